"""Messages of one link on their way to another, and the outcomes on their way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Final, Protocol

from ..errors import LocalProtocolError
from ..fronts.base import (
    SND_UNSETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import Limits
from ..outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Received,
    Rejected,
    Released,
)
from ..termini import Coordinator, Source, Target
from ..transactions import TransactionalState
from .via import Revised

#: Outcomes outside of transactions (Part 3 §3.4), which are final.
FINAL = (Accepted, Rejected, Released, Modified)
#: Outcome of a request, between nodes, that was answered with the report of a failure of the node which answered. The first node of
#: the route counts it as a failure of that node, and tells the caller *accepted*, since the reply says what failed.
FAILED_ANSWER: Final = Rejected(Error("amqp:internal-error", "amqp-rt: answered with a failure"))
#: Messages in more than one frame are streamed: the next node gets each frame when it arrives.
STREAM_ABOVE: Final = 1
#: Messages that may be on their way here, in terms of those that fit ``splice_bytes_max`` if each is of the largest size.
SURGE: Final = 4
_LARGE_HEAD: Final = Rejected(
    Error("amqp:link:message-size-exceeded", "header and annotations are larger than a frame")
)


class Opener(Protocol):
    """Session towards the next node, on which links can be opened."""

    def attach_sender(
        self,
        name: str,
        endpoint: Any,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        max_message_size: int = 0,
        properties: Mapping[object, object] | None = None,
        desired_capabilities: tuple[str, ...] = (),
        relays: Any = None,
    ) -> SendingLink:
        """Attach a link on which we send, for the peer of the link *relays* if that is given."""

    def attach_receiver(
        self,
        name: str,
        endpoint: Any,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        max_message_size: int | None = None,
        properties: Mapping[object, object] | None = None,
        desired_capabilities: tuple[str, ...] = (),
        relays: Any = None,
    ) -> ReceivingLink:
        """Attach a link on which the peer sends, for the peer of the link *relays* if that is given."""


class Passing:
    """Messages of one link on their way to another, in order.

    A message waits here while the link out has no credit or room, or an earlier message is incomplete. A message in one
    frame counts with its size; one in several frames as a frame, since the rest of it stays in the session window.

    Args:
        outlet: The link on which the messages are sent on.
        frame_max: Octets of the largest frame that arrives.
        keep_tags: Use the delivery-tags of the sender. Without it the tags of several senders cannot collide.
        revise: Called with the first octets of each message of format 0, and whether they are all of it; returns the octets to
            send instead, or an outcome that refuses the message. While it returns None, the message waits for more, at most
            *frame_max* octets.
        now: The clock, in seconds, for messages without an outcome; None to keep no times.
    """

    def __init__(
        self,
        outlet: SendingLink,
        *,
        frame_max: int,
        keep_tags: bool,
        revise: Callable[[bytes, bool], Revised] | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.outlet = outlet
        self._frame_max = frame_max
        self.waiting: deque[IncomingDelivery] = deque()
        #: Bytes that the messages which wait may take.
        self.held = 0
        #: Settled messages that could not be sent on.
        self.dropped = 0
        #: Messages sent unsettled; the owner of the links counts down those that have been settled.
        self.unanswered = 0
        self._keep_tags = keep_tags
        self._revise = revise
        #: First octets of a message that is not decided yet; the message is the first that waits.
        self._head = b""
        #: Whether the sender knows the outcome *modified*; if not, its messages are released instead.
        self.modifies = True
        #: Message that was refused before its end had arrived.
        self._refused: IncomingDelivery | None = None
        self._now = now
        #: When the messages without an outcome were sent, the oldest first; empty without a clock.
        self._sent_at: dict[OutgoingDelivery, float] = {}
        #: Message of which a part has been sent on.
        self._open: tuple[IncomingDelivery, OutgoingDelivery] | None = None
        #: Returns whether what waits has to wait on, for messages of other links.
        self.is_held_back: Callable[[], bool] | None = None
        #: The sender resumes what is incomplete when its link is lost, so that this is not aborted.
        self.resumable = False
        #: The latest message that was sent on was one of a transaction.
        self._in_transaction = False

    @property
    def streaming(self) -> bool:
        """Whether a part of a message has been sent on, and not its end."""
        return self._open is not None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and no message is incomplete."""
        return not self.waiting and self._open is None

    @property
    def holds_work(self) -> bool:
        """Whether some of a message that is sent in a transaction has not left yet."""
        if any(type(each.state) is TransactionalState for each in self.waiting):
            return True
        return self._in_transaction and (self._open is not None or not self.outlet.writable)

    def add(self, deliveries: list[IncomingDelivery]) -> int:
        """Send *deliveries* on, or let them wait; return the bytes that they may take."""
        outlet = self.outlet
        size = 0
        if (
            self._open is None
            and self.is_held_back is None
            and not self.waiting
            and len(deliveries) <= outlet.credit
            and outlet.writable
        ):
            # The common case. A message that does not leave at once waits at the link, and the others here.
            for at, delivery in enumerate(deliveries):
                if delivery.streamed:
                    rest = deliveries[at:]
                    break
                payload = delivery.payload
                size += len(payload)
                if self._revise is None:
                    sending = self._send(delivery, payload)
                else:
                    sending = self._send_revised(delivery)
                if sending is not None and sending.delivery_id < 0:
                    rest = deliveries[at + 1 :]
                    break
            else:
                return size
        else:
            rest = deliveries
        waits = sum([self._cost(each) for each in rest])
        self.waiting.extend(rest)
        self.held += waits
        self.pump()
        return size + waits

    def pump(self) -> None:
        """Send on what waits, as far as there are credit and room."""
        outlet = self.outlet
        waiting = self.waiting
        if self._refused is not None:
            self._refused.read_chunks()
            if self._refused.complete or self._refused.aborted:
                self._refused = None
        while outlet.attached:
            if self._open is not None:
                if not outlet.writable:
                    return
                delivery, sending = self._open
                if not self._continue(delivery, sending, delivery.read_chunks()):
                    return
            elif (
                not waiting
                or outlet.credit <= 0
                or not outlet.writable
                or (self.is_held_back is not None and self.is_held_back())
            ):
                return
            else:
                delivery = waiting.popleft()
                self.held -= self._cost(delivery)
                if not delivery.streamed:
                    self._send_revised(delivery)
                elif not self._begin(delivery):
                    waiting.appendleft(delivery)
                    self.held += self._cost(delivery)
                    return

    def _cost(self, delivery: IncomingDelivery) -> int:
        return self._frame_max if delivery.streamed else len(delivery.payload)

    def _send_revised(self, delivery: IncomingDelivery) -> OutgoingDelivery | None:
        """Send on a message in one frame, revised if there is a revision."""
        if self._revise is None or delivery.message_format:
            return self._send(delivery, delivery.payload)
        revised = self._revise(delivery.payload, True)
        if isinstance(revised, bytes):
            return self._send(delivery, revised)
        self._refuse(delivery, revised)
        return None

    def _refuse(self, delivery: IncomingDelivery, outcome: Rejected | Modified | None) -> None:
        if delivery.settled:
            self.dropped += 1
        else:
            delivery.settle(known_outcome(outcome or _LARGE_HEAD, self.modifies))
        if not delivery.complete:
            self._refused = delivery

    def _send(
        self, delivery: IncomingDelivery, payload: bytes, *, more: bool = False
    ) -> OutgoingDelivery | None:
        if delivery.resumed:
            return self._send_resumed(delivery, payload, more=more)
        outlet = self.outlet
        settled = delivery.settled and outlet.snd_settle_mode != SND_UNSETTLED
        self._in_transaction = type(delivery.state) is TransactionalState
        try:
            sending = outlet.send(
                payload,
                None if settled else delivery,
                settled=settled,
                tag=delivery.tag if self._keep_tags else None,
                message_format=delivery.message_format,
                state=delivery.state,
                more=more,
            )
        except LocalProtocolError as fault:
            # For example a transactional state that does not fit the frames of the next node.
            if delivery.settled:
                self.dropped += 1
            else:
                delivery.settle(Rejected(Error.of(fault)))
            return None
        if not delivery.settled:
            delivery.context = sending
            self.unanswered += 1
            if self._now is not None:
                self._sent_at[sending] = self._now()
        return sending

    def answered(self, sending: OutgoingDelivery) -> None:
        """Forget when *sending* was sent, if it has an outcome or is settled; *accepted* in a transaction is one."""
        if self._sent_at and (sending.settled or not isinstance(sending.state, Received | None)):
            self._sent_at.pop(sending, None)

    def stuck(self, since: float) -> int:
        """Return the number of messages without an outcome that were sent before *since*."""
        return sum(1 for _ in takewhile(lambda at: at < since, self._sent_at.values()))

    def _send_resumed(
        self, delivery: IncomingDelivery, payload: bytes, *, more: bool
    ) -> OutgoingDelivery | None:
        """Send on what the sender has sent to resume a delivery, or to abort it."""
        outlet: Any = self.outlet
        settled = delivery.settled
        try:
            sending: OutgoingDelivery = outlet.send_resumed(
                payload,
                None if settled else delivery,
                settled=settled,
                tag=delivery.tag,
                message_format=delivery.message_format,
                state=delivery.state,
                more=more,
                aborted=delivery.aborted,
            )
        except LocalProtocolError:
            # It stays unsettled at both peers, until the link is attached once more.
            return None
        if type(delivery.state) is Received:
            # It said where the transfer continues, and is no state of the delivery later.
            delivery.state = None
        if sending.settled and not settled:
            # The outcome that the sender repeats does not fit the frames of the next node, and decides nothing any more.
            settle_fitting(delivery, delivery.state)
        elif not settled:
            delivery.context = sending
            self.unanswered += 1
            if self._now is not None:
                self._sent_at[sending] = self._now()
        return sending

    def _is_aborted(self, delivery: IncomingDelivery) -> bool:
        """Return whether the sender has aborted *delivery*; otherwise its link was lost in the middle of it."""
        link = delivery.link
        return not self.resumable or (link.attached and not link.session.ended)

    def _begin(self, delivery: IncomingDelivery) -> bool:
        """Send on the beginning of a message in several frames; return False if that needs more of it."""
        head, self._head = self._head, b""
        if delivery.aborted:
            if delivery.resumed and self._is_aborted(delivery):
                self._send_resumed(delivery, b"", more=False)
            return True
        chunks = delivery.read_chunks()
        if self._revise is not None and not delivery.message_format:
            head = b"".join((head, *chunks))
            revised = self._revise(head, delivery.complete)
            if revised is None and len(head) < self._frame_max:
                self._head = head
                return False
            if not isinstance(revised, bytes):
                self._refuse(delivery, revised)
                return True
            chunks = [revised]
        sending = self._send(delivery, chunks[0] if chunks else b"", more=True)
        if sending is not None:
            self._open = delivery, sending
            self._continue(delivery, sending, chunks[1:])
        elif not delivery.complete:
            self._refused = delivery
        return True

    def _continue(
        self, delivery: IncomingDelivery, sending: OutgoingDelivery, chunks: list[bytes]
    ) -> bool:
        """Send on *chunks* of an incomplete message; return whether that was its end."""
        if delivery.aborted:
            self._open = None
            delivery.context = None
            self.unanswered -= not sending.settled
            self._sent_at.pop(sending, None)
            if self._is_aborted(delivery):
                sending.abort()
            return True
        complete = delivery.complete
        if complete:
            self._open = None
            last = chunks.pop() if chunks else b""
        for chunk in chunks:
            sending.write(chunk)
        if complete:
            sending.write(last, more=False)
            if delivery.settled and not sending.settled:
                # The sender settled with a later frame (Part 2 §2.7.5).
                sending.settle(delivery.state)
        return complete

    def end(self) -> None:
        """Return an outcome for each message, since the link out has ended.

        A message of which no octet can have arrived is released. Any other one may have been processed.
        """
        if self._open is not None:
            self._open[0].read_chunks()
            self._open = None
        for sending in self.outlet.unsettled:
            give_up(sending.context, begun=sending.delivery_id >= 0, modifies=self.modifies)
        self._sent_at.clear()
        self.drop()

    def drop_unsettled(self) -> None:
        """Drop the unsettled messages that wait: their sender is lost, and sends them again. Settled ones still leave."""
        waiting, self.waiting = self.waiting, deque()
        self.held = 0
        self._head = b""
        for delivery in waiting:
            if delivery.settled:
                self.waiting.append(delivery)
                self.held += self._cost(delivery)
            elif delivery.streamed:
                # What is not read stays in the window of the session, although the link ends.
                delivery.read_chunks()

    def suspend(self) -> None:
        """Forget all messages without an outcome: both peers remember them, and will resume them."""
        if self._open is not None:
            self._open[0].read_chunks()
            self._open = None
        self._sent_at.clear()
        self.drop(release=False)

    def drop(self, *, release: bool = True) -> None:
        """Release the messages that wait; those that are settled are lost, and counted."""
        waiting, self.waiting = self.waiting, deque()
        self.held = 0
        self._head = b""
        if self._refused is not None:
            self._refused.read_chunks()
        for delivery in waiting:
            if delivery.streamed:
                # What is not read stays in the window of the session, although the link ends.
                delivery.read_chunks()
            if delivery.settled:
                self.dropped += not (delivery.aborted or delivery.resumed)
            elif release:
                give_up(delivery, begun=False)


class Room:
    """Number of messages that may wait at a node, or be on their way to it, by the size of recent ones.

    Credit counts messages, and memory bytes. As many messages are let in as fit ``splice_bytes_max`` at the recent size, which
    is taken to be the largest until messages have been smaller; it grows at once, and shrinks gradually. If a sender of
    small messages turns to the largest while the next node takes none, those on their way may take more than
    ``splice_bytes_max``. They take at most ``SURGE`` times as much, since there are never more than ``SURGE`` times the
    messages that fit whatever their sizes.

    Args:
        limits: ``splice_bytes_max`` and ``frame_size_max``.
        stream_above: Bytes up to which a message in several frames is assembled.
    """

    __slots__ = ("_bytes", "_most", "_size", "alone")

    def __init__(self, limits: Limits, *, stream_above: int = 0) -> None:
        self._bytes = limits.splice_bytes_max
        self._size = limits.frame_size_max + stream_above
        #: What :meth:`further` returns while no message waits.
        self.alone = max(limits.splice_bytes_max // self._size, 1)
        self._most = SURGE * self.alone

    def took(self, count: int, size: int) -> None:
        """Count *count* messages that have arrived, of *size* bytes in total."""
        each = size // count
        self._size = each if each > self._size else (7 * self._size + each) // 8 or 1
        self.alone = min(self._bytes // self._size, self._most) or 1

    def further(self, waiting: int, held: int) -> int:
        """Return how many messages may follow *waiting* ones of *held* bytes; at least one if none waits."""
        room = min((self._bytes - held) // self._size, self._most - waiting)
        return max(room, 0 if waiting else 1)


def distributed_target(link: ReceivingLink) -> Target | Coordinator | None:
    """Return the target to answer *link* with, whose messages go to several destinations: none of them keeps it."""
    target = link.target
    if not isinstance(target, Target):
        return target
    return Target(address=target.address, capabilities=target.capabilities)


def give_up(delivery: IncomingDelivery, *, begun: bool, modifies: bool = True) -> None:
    """Set the outcome of a message that will get none: *modified* if it may have been processed, else *released*."""
    if not delivery.settled and delivery.local_state is None:
        delivery.settle(MODIFIED_FAILED if begun and modifies else RELEASED)


def cause_of(link: ReceivingLink | SendingLink, error: Error | None) -> Error | None:
    """Return the error for the other link, after *link* ended with *error*.

    An error of a connection or session is none of a link of another connection.
    """
    if not link.session.ended:
        return error
    reason = error.description if error is not None else None
    return Error("amqp:link:detach-forced", reason or "a connection of the route was lost")


def for_client(state: Any) -> Any:
    """Return what a client gets for the *state* that a leg has got."""
    return ACCEPTED if state == FAILED_ANSWER else state


def known_outcome(state: Any, modifies: bool) -> Any:
    """Return *state*, or *released* in place of *modified* for a sender that does not know that (Part 3 §3.5.3 ``outcomes``)."""
    return RELEASED if type(state) is Modified and not modifies else state


def pass_outcome(
    sending: OutgoingDelivery,
    delivery: IncomingDelivery,
    *,
    to_client: bool = False,
    modifies: bool = True,
) -> None:
    """Pass the receiver's state of *sending* to the sender of *delivery*, which is perhaps a client."""
    state = sending.state
    if type(state) is Accepted and not delivery.settled and not delivery.second:
        # The common case, which no peer refuses.
        delivery.settle(state)
        if not sending.settled:
            sending.settle()
        sending.context = delivery.context = None
        return
    state = for_client(state) if to_client else known_outcome(state, modifies)
    if delivery.settled:
        # The sender has settled, or sent the message settled, and expects nothing.
        if not sending.settled:
            sending.settle()
        return
    final = type(state) in FINAL
    if sending.settled or final:
        # Settled without a state, the default outcome of the source applies (Part 3 §3.5.3), at each node alike.
        settle_fitting(delivery, state)
        if final and not delivery.second and not sending.settled:
            # The outcome cannot change, and the sender will not answer it: settle for both.
            sending.settle()
        if sending.settled:
            # The two refer to each other.
            sending.context = delivery.context = None
    elif state is not None:
        delivery.update(state)


def settle_fitting(delivery: IncomingDelivery, outcome: Any) -> None:
    """Settle *delivery* with *outcome*, without annotations that do not fit the frames of its sender.

    Raises:
        LocalProtocolError: The delivery has another outcome.
    """
    try:
        delivery.settle(outcome)
    except LocalProtocolError:
        if type(outcome) is not Modified:
            raise
        delivery.settle(Modified(outcome.delivery_failed, outcome.undeliverable_here))
