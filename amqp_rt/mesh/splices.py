"""Two links of different connections, joined so that their peers see one link.

A node on the way of a route joins the link that a peer requests with one that it opens towards the destination. Messages,
outcomes, settlement, credit, drains and detaches of either link pass to the other. Nothing is decided here, and no octet
of a message is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..errors import LocalProtocolError
from ..fronts.base import (
    RECEIVER,
    SND_UNSETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import (
    MODIFIED_FAILED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Rejected,
    Released,
)
from ..termini import Coordinator, Source, Target

#: Outcomes outside of transactions (Part 3 §3.4), which are final.
FINAL = (Accepted, Rejected, Released, Modified)
#: Messages in more than one frame are streamed: the next node gets each frame when it arrives.
_STREAM_ABOVE = 1
_NOT_FOUND = Error("amqp:not-found", "the next node of the route refused the link")


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
    ) -> SendingLink:
        """Attach a link on which we send."""

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
    ) -> ReceivingLink:
        """Attach a link on which the peer sends."""


class Passing:
    """Messages of one link on their way to another, in order.

    A message waits here while the link out has no credit or room, or an earlier message is incomplete. A message in one
    frame counts with its size; one in several frames as a frame, since the rest of it stays in the session window.

    Args:
        outlet: The link on which the messages are sent on.
        frame_max: Octets of the largest frame that arrives.
        keep_tags: Use the delivery-tags of the sender. Without it the tags of several senders cannot collide.
    """

    def __init__(self, outlet: SendingLink, *, frame_max: int, keep_tags: bool) -> None:
        self.outlet = outlet
        self._frame_max = frame_max
        self.waiting: deque[IncomingDelivery] = deque()
        #: Bytes that the messages which wait may take.
        self.held = 0
        #: Settled messages that could not be sent on.
        self.dropped = 0
        self._keep_tags = keep_tags
        #: Message of which a part has been sent on.
        self._open: tuple[IncomingDelivery, OutgoingDelivery] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and no message is incomplete."""
        return not self.waiting and self._open is None

    def add(self, deliveries: list[IncomingDelivery]) -> None:
        """Send *deliveries* on, or let them wait."""
        outlet = self.outlet
        if (
            self._open is None
            and not self.waiting
            and len(deliveries) <= outlet.credit
            and outlet.writable
        ):
            # The common case. A message that does not leave at once waits at the link, and the others here.
            for at, delivery in enumerate(deliveries):
                if delivery.streamed:
                    rest = deliveries[at:]
                    break
                sending = self._send(delivery, delivery.payload)
                if sending is not None and sending.delivery_id < 0:
                    rest = deliveries[at + 1 :]
                    break
            else:
                return
        else:
            rest = deliveries
        self.waiting.extend(rest)
        self.held += sum([self._cost(each) for each in rest])
        self.pump()

    def pump(self) -> None:
        """Send on what waits, as far as there are credit and room."""
        outlet = self.outlet
        waiting = self.waiting
        while outlet.attached:
            if self._open is not None:
                if not outlet.writable:
                    return
                delivery, sending = self._open
                if not self._continue(delivery, sending, delivery.read_chunks()):
                    return
            elif not waiting or outlet.credit <= 0 or not outlet.writable:
                return
            else:
                delivery = waiting.popleft()
                self.held -= self._cost(delivery)
                if delivery.streamed:
                    self._begin(delivery)
                else:
                    self._send(delivery, delivery.payload)

    def _cost(self, delivery: IncomingDelivery) -> int:
        return self._frame_max if delivery.streamed else len(delivery.payload)

    def _send(
        self, delivery: IncomingDelivery, payload: bytes, *, more: bool = False
    ) -> OutgoingDelivery | None:
        outlet = self.outlet
        settled = delivery.settled and outlet.snd_settle_mode != SND_UNSETTLED
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
        return sending

    def _begin(self, delivery: IncomingDelivery) -> None:
        """Send on the beginning of a message in several frames."""
        if delivery.aborted:
            return
        chunks = delivery.read_chunks()
        sending = self._send(delivery, chunks[0] if chunks else b"", more=True)
        if sending is not None:
            self._open = delivery, sending
            self._continue(delivery, sending, chunks[1:])

    def _continue(
        self, delivery: IncomingDelivery, sending: OutgoingDelivery, chunks: list[bytes]
    ) -> bool:
        """Send on *chunks* of an incomplete message; return whether that was its end."""
        if delivery.aborted:
            self._open = None
            delivery.context = None
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
        self._open = None
        for sending in self.outlet.unsettled:
            give_up(sending.context, begun=sending.delivery_id >= 0)
        self.drop()

    def drop(self) -> None:
        """Release the messages that wait; those that are settled are lost, and counted."""
        waiting, self.waiting = self.waiting, deque()
        self.held = 0
        for delivery in waiting:
            if delivery.settled:
                self.dropped += not delivery.aborted
            else:
                give_up(delivery, begun=False)


def give_up(delivery: IncomingDelivery, *, begun: bool) -> None:
    """Set the outcome of a message that will get none: *modified* if it may have been processed, else *released*."""
    if not delivery.settled and delivery.local_state is None:
        delivery.settle(MODIFIED_FAILED if begun else RELEASED)


def cause_of(link: ReceivingLink | SendingLink, error: Error | None) -> Error | None:
    """Return the error for the other link, after *link* ended with *error*.

    An error of a connection or session is none of a link of another connection.
    """
    if not link.session.ended:
        return error
    reason = error.description if error is not None else None
    return Error("amqp:link:detach-forced", reason or "a connection of the route was lost")


def pass_outcome(sending: OutgoingDelivery, delivery: IncomingDelivery) -> None:
    """Pass the receiver's state of *sending* to the sender of *delivery*."""
    state = sending.state
    if delivery.settled:
        # The sender has settled, or sent the message settled, and expects nothing.
        if not sending.settled:
            sending.settle()
        return
    final = type(state) in FINAL
    if sending.settled or final:
        # Settled without a state, the default outcome of the source applies (Part 3 §3.5.3), at each node alike.
        set_outcome(delivery, state)
        if final and not delivery.second and not sending.settled:
            # The outcome cannot change, and the sender will not answer it: settle for both.
            sending.settle()
        if sending.settled:
            # The two refer to each other.
            sending.context = delivery.context = None
    elif state is not None:
        delivery.update(state)


def set_outcome(delivery: IncomingDelivery, state: Any) -> None:
    """Set *state*, or without its details if these do not fit the frames of the peer."""
    try:
        delivery.settle(state)
    except LocalProtocolError:
        if type(state) is Rejected and state.error is not None:
            state = Rejected(Error(state.error.condition))
        elif type(state) is Modified:
            state = Modified(state.delivery_failed, state.undeliverable_here)
        else:
            raise
        delivery.settle(state)


class Splice:
    """Link that a peer requested, joined with one that we open to the next node.

    The peer is answered when the next node has answered us, with its termini, settle modes, sizes, properties and
    capabilities. If that refuses, the peer is refused with the same error.

    Credit of the receiving peer passes to the sending one, reduced to the messages that fit *unsent*: since messages in more
    than one frame wait in the session window, each message of the credit may take a frame. A drain is answered when the
    sending peer has used its credit or returned it. A request for an echo is answered by each node itself, which is
    sufficient: without credit it sends nothing more.

    If the link that receives ends, what has arrived completely is sent on before the other link is detached; an incomplete
    message is aborted. If the link that sends ends, messages without an outcome get one, *modified(delivery-failed)* if
    they had begun to leave and *released* otherwise, and the other link is detached with the same error.

    Created by a host in its ``attach``, and bound to both links. No method waits.

    Args:
        came: The link that the peer requested, not answered yet.
        opener: The session to the next node. Links of one session of the peer that depend on each other, such as those of a
            transaction, need the same one.
        name: Name of the link to open.
        properties: Properties of its attach, such as the rest of the route.
        limits: ``splice_bytes_max`` bounds the messages that wait here; ``frame_size_max`` has to be that of the connections.
        refuse: Called with the error instead of ``came.refuse`` if the next node refuses the link, so that the first node can
            try another path.
        on_ended: Called once, when both links have ended.

    Raises:
        LocalProtocolError: No link can be opened on *opener*. The peer has not been answered.
    """

    def __init__(
        self,
        came: ReceivingLink | SendingLink,
        opener: Opener,
        name: str,
        *,
        properties: Mapping[object, object] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        refuse: Callable[[Error], None] | None = None,
        on_ended: Callable[[Splice], None] = lambda splice: None,
    ) -> None:
        self._came: Any = came
        self._unsent_max = limits.splice_bytes_max
        self._frame_max = limits.frame_size_max
        self._refuse = refuse or came.refuse
        self._on_ended = on_ended
        #: Links that have ended or were never attached; the splice ends with the second.
        self._over = 0
        self._answered = False
        #: Error and kind of the end of the receiving link, once it has ended.
        self._ending: tuple[Error | None, bool] | None = None
        #: The sending peer was asked to drain, and whether messages have arrived since.
        self._draining = False
        self._arrived = False
        #: Then the peer had less credit than the receiver gave.
        self._short = False
        common: dict[str, Any] = {
            "source": came.source,
            "target": came.target,
            "snd_settle_mode": came.snd_settle_mode,
            "rcv_settle_mode": came.rcv_settle_mode,
            "properties": properties,
            "desired_capabilities": came.desired_capabilities,
        }
        self.inlet: Any
        self.outlet: Any
        if came.role == RECEIVER:
            self.inlet = came
            self.outlet = opener.attach_sender(name, self, **common)
        else:
            self.outlet = came
            self.inlet = opener.attach_receiver(
                name, self, max_message_size=came.max_message_size, **common
            )
            self.inlet.stream_above = _STREAM_ABOVE
        self._passing = Passing(self.outlet, frame_max=limits.frame_size_max, keep_tags=True)

    @property
    def held(self) -> int:
        """Bytes of messages that wait here."""
        return self._passing.held

    @property
    def dropped(self) -> int:
        """Number of settled messages that were lost because a link ended."""
        return self._passing.dropped

    # --- both links --------------------------------------------------------------------------

    def on_attached(self, link: Any) -> None:
        """Answer the peer when the next node has answered us; after that, pass on the first credit."""
        if link is self._came:
            if self.outlet.attached and self.inlet.attached:
                self.on_credit(self.outlet)
            return
        self._answered = True
        came = self._came
        common: dict[str, Any] = {
            "source": link.source,
            "target": link.target,
            "properties": link.properties,
            "offered_capabilities": link.offered_capabilities,
        }
        if came is self.inlet:
            came.accept(
                self,
                max_message_size=link.max_message_size,
                stream_above=_STREAM_ABOVE,
                rcv_settle_mode=link.rcv_settle_mode,
                **common,
            )
        else:
            came.accept(self, snd_settle_mode=link.snd_settle_mode, **common)

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """Detach the other link, with the same error."""
        self._over += 1
        if not self._answered:
            self._over += 1
            self._refuse(error or _NOT_FOUND)
        elif link is self.inlet:
            self._ending = cause_of(link, error), closed
            self._finish()
        else:
            self._passing.end()
            self.inlet.detach(cause_of(link, error), closed=closed)
        if self._over == 2:
            self._on_ended(self)

    def _finish(self) -> None:
        """Detach the link that sends, once everything has left that arrived before the other one ended."""
        assert self._ending is not None
        outlet, passing = self.outlet, self._passing
        if outlet.attached:
            passing.pump()
            if not outlet.writable:
                # ``on_credit`` follows when there is room.
                return
        passing.drop()
        error, closed = self._ending
        outlet.detach(error, closed=closed)

    # --- the link on which messages arrive -----------------------------------------------------

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Send messages on, or let them wait."""
        self._arrived = True
        self._passing.add(deliveries)
        self._advance(flowed=False)

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Send on more of a message in several frames, its end, or its abort."""
        self._passing.pump()
        self._advance(flowed=False)

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Settle what the sender has settled; what still waits will be sent settled."""
        for delivery in deliveries:
            sending = delivery.context
            if sending is not None and delivery.settled:
                sending.context = delivery.context = None
                sending.settle(delivery.state)

    def on_flow(self, link: ReceivingLink) -> None:
        """Note what the sender has available, and whether it has answered a drain."""
        self.outlet.offer(link.available + len(self._passing.waiting))
        self._advance(flowed=False)

    # --- the link on which messages leave --------------------------------------------------------

    def on_credit(self, link: SendingLink) -> None:
        """Send on what waits; pass new credit, or a drain, to the sender."""
        if self._ending is not None:
            self._finish()
            return
        self._passing.pump()
        if not link.draining:
            self._draining = False
        self._advance(flowed=True)

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes, other states and settlement to the sender."""
        if self._ending is None:
            for sending in deliveries:
                if sending.context is not None:
                    pass_outcome(sending, sending.context)

    # --- credit --------------------------------------------------------------------------------

    def _advance(self, *, flowed: bool) -> None:
        """Give the sender as much credit as the receiver gives, and continue a drain.

        Unless the receiver's flow asks for it (*flowed*), credit is topped up when half can be, so that one flow serves
        many messages.
        """
        inlet, outlet, passing = self.inlet, self.outlet, self._passing
        if not inlet.attached or not outlet.attached:
            return
        started = outlet.draining and self._drain()
        room = (self._unsent_max - passing.held) // self._frame_max
        if room < 1 and not passing.held:
            room = 1
        target = max(0, min(outlet.credit - len(passing.waiting), room))
        credit = inlet.credit
        granted = target < credit or (
            target > credit and (flowed or 2 * (target - credit) >= target)
        )
        if granted:
            inlet.grant(target, properties=outlet.flow_properties)
        if self._draining and (granted or started):
            inlet.drain()
            self._short = inlet.credit < outlet.credit - len(passing.waiting)

    def _drain(self) -> bool:
        """Continue a drain that the receiver asked for, or answer it; return whether the sender has to be asked.

        The sender may have had less credit than the receiver gave. If it used all of that, it is given more and asked again.
        """
        inlet, outlet = self.inlet, self.outlet
        if not self._passing.idle:
            return False
        if outlet.credit:
            if self._draining and inlet.credit:
                return False
            if not self._draining or (self._arrived and self._short):
                self._draining = True
                self._arrived = False
                return True
        self._draining = False
        outlet.drained()
        return False
