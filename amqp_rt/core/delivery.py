"""Settlement state machine of one delivery, for each direction (Part 2 §2.6.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LocalProtocolError
from ..outcomes import Accepted, Modified, Received, Rejected, Released
from ..transactions import Declared, TransactionalState
from .performatives import RECEIVER, SENDER

if TYPE_CHECKING:
    from .links import ReceiverLink, SenderLink


def is_outcome(state: Any) -> bool:
    """Return whether *state* is terminal (Part 3 §3.4)."""
    kind = type(state)
    return (
        kind is Accepted
        or kind is Released
        or kind is Modified
        or kind is Rejected
        or kind is Declared
        or (kind is TransactionalState and state.outcome is not None)
    )


class Delivery:
    """Delivery received from the peer."""

    #: Queued already for the link's next batch of notifications, which names a delivery only once.
    noted: bool = False
    #: The sender resumes a delivery that is unknown here; its transfers are ignored (§2.7.5).
    ignored: bool = False
    #: An earlier link left this delivery unsettled (§2.6.13).
    resumed: bool = False
    #: Bytes of a resumed delivery that will arrive again although they are here already.
    repeated: int = 0
    #: Handed out before it had arrived completely, because of its size: read it in chunks.
    streamed: bool = False

    def __init__(
        self, link: ReceiverLink, delivery_id: int, tag: bytes, message_format: int
    ) -> None:
        self.link = link
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format
        #: Settled by the sender, which expects no outcome.
        self.settled: bool = False
        #: Settled by us, or no longer possible to settle.
        self.local_settled: bool = False
        #: State set by the sender.
        self.state: Any = None
        #: State set by us.
        self.local_state: Any = None
        self.payload: bytes = b""
        self.complete: bool = False
        self.aborted: bool = False
        self.second: bool = False
        self.context: Any = None
        self._chunks: list[bytes] = []
        self._size: int = 0
        self._unread: int = 0

    @property
    def size(self) -> int:
        """Number of payload bytes received so far."""
        return self._size

    def resume(self, link: ReceiverLink, delivery_id: int, second: bool) -> None:
        """Continue as a delivery of *link*, which resumes the delivery's earlier link (§2.6.13)."""
        self.link = link
        self.resumed = True
        self.delivery_id = delivery_id
        self.second = second
        self.local_settled = False
        self.state = None
        if type(self.local_state) is TransactionalState:
            # The transaction ended with its connection, and the provisional state with it.
            self.local_state = None

    def say_again(self) -> None:
        """Repeat the outcome that was set on an earlier link, or between two links."""
        session = self.link.session
        session.queue_disposition(RECEIVER, self.delivery_id, not self.second, self.local_state)
        if not self.second:
            self.local_settled = True
            session.forget_incoming(self.delivery_id)

    def read_chunks(self) -> list[bytes]:
        """Return the chunks that arrived since the last call, and reopen the session window."""
        chunks = self._chunks
        if chunks:
            self._chunks = []
            self.link.session.release(self._unread)
            self._unread = 0
        return chunks

    def settle(self, outcome: Any) -> None:
        """Set *outcome*: settled at once, or after the sender where the link settles second.

        Setting the same outcome again has no effect. An outcome that was set within a transaction
        and not settled may be followed by another. If the link is detached nothing is sent now;
        the outcome is sent if the sender resumes the delivery.

        Raises:
            LocalProtocolError: Another outcome has been set, or the outcome is larger than the
                peer's frames. Nothing was sent.
            EncodeError: The outcome has no encoding.
        """
        known = self.local_state
        if known is not None and is_outcome(known) and not self._provisional:
            if known != outcome:
                raise LocalProtocolError(
                    f"the delivery has the outcome {self.local_state!r} already",
                    condition="amqp:illegal-state",
                )
            return
        if not self.local_settled and self.link.attached:
            session = self.link.session
            if self.settled:
                self.local_settled = True
                session.forget_incoming(self.delivery_id)
            elif self.second:
                session.queue_disposition(RECEIVER, self.delivery_id, False, outcome)
            else:
                session.queue_disposition(RECEIVER, self.delivery_id, True, outcome)
                self.local_settled = True
                session.forget_incoming(self.delivery_id)
        self.local_state = outcome

    @property
    def _provisional(self) -> bool:
        """Whether our state depends on a transaction and may still be replaced."""
        return type(self.local_state) is TransactionalState and not self.local_settled

    def update(self, state: Any) -> None:
        """Send *state* without settling (§2.6.12).

        Raises:
            LocalProtocolError: The delivery has an outcome or is settled, also because its link is
                detached; or the state is larger than the peer's frames.
            EncodeError: The state has no encoding.
        """
        if (
            self.local_settled
            or self.settled
            or (is_outcome(self.local_state) and not self._provisional)
        ):
            raise LocalProtocolError("the delivery is settled, or has an outcome")
        if self.link.attached:
            self.link.session.queue_disposition(RECEIVER, self.delivery_id, False, state)
        self.local_state = state

    def __repr__(self) -> str:
        said = self.local_state if self.local_state is not None else "no outcome"
        return f"<Delivery {self.delivery_id} on {self.link.name!r}: {self._size} bytes, {said}>"


class Sending:
    """Delivery that we send to the peer."""

    #: See :class:`Delivery`.
    noted: bool = False
    #: Octets that ``local_state`` takes in the first frame.
    state_size: int = 0
    #: Bytes so far of a message that is sent in pieces.
    size: int = 0
    #: An earlier link left this delivery unsettled (§2.6.13).
    resumed: bool = False
    #: The receiver's outcome is known from its unsettled map, and ``settle`` confirms it.
    confirms: bool = False

    def __init__(self, link: SenderLink, tag: bytes, message_format: int, settled: bool) -> None:
        self.link = link
        #: Assigned when the first frame leaves; -1 before.
        self.delivery_id: int = -1
        self.tag = tag
        self.message_format = message_format
        #: Settled by us; no further notification follows.
        self.settled = settled
        self.remote_settled: bool = False
        #: State set by the peer.
        self.state: Any = None
        #: State that we send with the first frame, for example a transactional state.
        self.local_state: Any = None
        self.complete: bool = False
        self.aborted: bool = False
        self.context: Any = None

    def resume(self, link: SenderLink) -> None:
        """Continue as a delivery of *link*, which resumes the delivery's earlier link (§2.6.13)."""
        self.link = link
        self.resumed = True
        self.confirms = False
        self.delivery_id = -1
        self.settled = False
        self.remote_settled = False
        self.state = None
        self.local_state = None
        self.state_size = 0
        self.complete = True

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a further piece of a message begun with ``more``; ``more=False`` ends it.

        Raises:
            LocalProtocolError: The message is complete or aborted, its link is detached, or the
                message becomes too large for the peer. Nothing was sent.
        """
        if self.complete:
            raise LocalProtocolError("the message is complete")
        self.link.go_on(self, data, more)

    def abort(self) -> None:
        """Abort an unfinished message (§2.7.5 ``aborted``). The peer drops the part that it has.

        Raises:
            LocalProtocolError: The message is complete.
        """
        if self.aborted:
            return
        if self.complete:
            raise LocalProtocolError("the message is complete; it can no longer be aborted")
        self.link.give_up(self)

    def settle(self, state: Any = None) -> None:
        """Settle, with a disposition to the peer if it has not settled already.

        Raises:
            LocalProtocolError: *state* is larger than the peer's frames, or is *received*. Nothing
                has changed.
            EncodeError: *state* has no encoding.
        """
        if self.settled:
            return
        if type(state) is Received:
            raise LocalProtocolError("only the receiver says how much it has received (§3.4.1)")
        if self.confirms:
            self.link.confirm(self, state)
            return
        if self.delivery_id >= 0:
            session = self.link.session
            if session.sent_unsettled(self.delivery_id):
                session.queue_disposition(SENDER, self.delivery_id, True, state)
                session.forget_outgoing(self.delivery_id)
        self.settled = True
        if self.resumed:
            self.link.finished(self)

    def __repr__(self) -> str:
        return f"<Sending {self.delivery_id} on {self.link.name!r}: {self.state}>"
