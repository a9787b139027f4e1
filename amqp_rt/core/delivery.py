"""The settlement machine of one delivery, for each direction (Part 2 §2.6.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LocalProtocolError
from ..outcomes import Accepted, Modified, Received, Rejected, Released
from ..transactions import Declared, TransactionalState
from .performatives import RECEIVER, SENDER

if TYPE_CHECKING:
    from .links import ReceiverLink, SenderLink


def is_outcome(state: Any) -> bool:
    """Whether *state* is terminal (Part 3 §3.4)."""
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
    """A message on its way from the peer to us."""

    #: Waits for its link's next batch of news, of which it is one item however much happens.
    noted: bool = False
    #: The sender resumes what we do not know: not listened to (§2.7.5).
    ignored: bool = False
    #: It is one that an earlier link left unsettled (§2.6.13).
    resumed: bool = False
    #: Bytes of a resumed delivery that are still to come and that we have already.
    repeated: int = 0
    #: It was handed out before it had arrived, because it is large: read it in chunks.
    streamed: bool = False

    def __init__(
        self, link: ReceiverLink, delivery_id: int, tag: bytes, message_format: int
    ) -> None:
        self.link = link
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format
        #: The sender has settled it: no outcome will be heard.
        self.settled: bool = False
        #: We have settled it, or it can no longer be settled.
        self.local_settled: bool = False
        #: What the sender said of it.
        self.state: Any = None
        #: What we said of it.
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
        """Payload bytes that have arrived so far."""
        return self._size

    def resume(self, link: ReceiverLink, delivery_id: int, second: bool) -> None:
        """Go on as a delivery of *link*, the one that its link was resumed as (§2.6.13)."""
        self.link = link
        self.resumed = True
        self.delivery_id = delivery_id
        self.second = second
        self.local_settled = False
        self.state = None
        if type(self.local_state) is TransactionalState:
            # It went with its transaction.
            self.local_state = None

    def say_again(self) -> None:
        """Say the outcome that was said on a link before this one, or in between."""
        session = self.link.session
        session.queue_disposition(RECEIVER, self.delivery_id, not self.second, self.local_state)
        if not self.second:
            self.local_settled = True
            session.forget_incoming(self.delivery_id)

    def read_chunks(self) -> list[bytes]:
        """What has arrived since the last call; taking it reopens the session window."""
        chunks = self._chunks
        if chunks:
            self._chunks = []
            self.link.session.release(self._unread)
            self._unread = 0
        return chunks

    def settle(self, outcome: Any) -> None:
        """Say *outcome*: settled at once, or after the sender where the link settles second.

        Saying the same outcome again changes nothing. One that was said within a transaction, and
        not settled, may be followed by another. On a link that is gone it is in vain: the peer will
        decide when it comes back.

        Raises:
            LocalProtocolError: Another outcome has been said, or the outcome is larger than the
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
        """What we said depends on a transaction, and we can still say something else."""
        return type(self.local_state) is TransactionalState and not self.local_settled

    def update(self, state: Any) -> None:
        """Say *state* without settling (§2.6.12).

        Raises:
            LocalProtocolError: An outcome has been said, the delivery is settled, its link has gone,
                or the state is larger than the peer's frames.
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
    """A message on its way from us to the peer."""

    #: As for :class:`Delivery`.
    noted: bool = False
    #: Octets that ``local_state`` takes of the first frame.
    state_size: int = 0
    #: Bytes of a message that is sent in pieces.
    size: int = 0
    #: It is one that an earlier link left unsettled (§2.6.13).
    resumed: bool = False
    #: The receiver's outcome is known from its unsettled map; settling says what we made of it.
    confirms: bool = False

    def __init__(self, link: SenderLink, tag: bytes, message_format: int, settled: bool) -> None:
        self.link = link
        #: Given when the first frame leaves; -1 before.
        self.delivery_id: int = -1
        self.tag = tag
        self.message_format = message_format
        #: We have settled it: nothing more will be heard.
        self.settled = settled
        self.remote_settled: bool = False
        #: What the peer said of it.
        self.state: Any = None
        #: What we said of it with its first frame, for example a transactional state.
        self.local_state: Any = None
        self.complete: bool = False
        self.aborted: bool = False
        self.context: Any = None

    def resume(self, link: SenderLink) -> None:
        """Go on as a delivery of *link*, the one that its link was resumed as (§2.6.13)."""
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
            LocalProtocolError: The message is complete or aborted, its link is gone, or it becomes
                too large for the peer. Nothing was sent.
        """
        if self.complete:
            raise LocalProtocolError("the message is complete")
        self.link.go_on(self, data, more)

    def abort(self) -> None:
        """Give up an unfinished message (§2.7.5 ``aborted``). The peer drops what it has.

        Raises:
            LocalProtocolError: The message is complete.
        """
        if self.aborted:
            return
        if self.complete:
            raise LocalProtocolError("the message is complete; it can no longer be aborted")
        self.link.give_up(self)

    def settle(self, state: Any = None) -> None:
        """Forget it, and tell the peer if it has not settled it itself.

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
