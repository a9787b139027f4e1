"""Two links of different connections, joined so that their peers see one link.

A node on the way of a route joins the link that a peer requests with one that it opens towards the destination. Messages,
outcomes, settlement, credit, drains and detaches of either link pass to the other. Nothing is decided here, and no octet
of a message is changed, but for the annotation that a bridge adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from ..fronts.base import RECEIVER, IncomingDelivery, OutgoingDelivery, ReceivingLink, SendingLink
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error
from ..termini import Coordinator, Source, Target, outlives_connection
from .loads import LOAD
from .passing import STREAM_ABOVE, Opener, Passing, Room, cause_of, pass_outcome
from .via import Revised

#: Symbol of the outcome *modified*, as sources list it.
MODIFIED: Final = "amqp:modified:list"
_MAP_TOO_LARGE: Final = Error(
    "amqp:frame-size-too-small", "the destination's unsettled map is larger than your frames"
)
_NOT_FOUND: Final = Error("amqp:not-found", "the next node of the route refused the link")


class Siblings:
    """Splices whose links belong to one session of a peer.

    Discharges of transactions are held back until the messages that were sent before them have left: they go by different
    links, on which they might overtake each other here.
    """

    def __init__(self) -> None:
        self._all: dict[Splice, None] = {}
        self._coordinators: dict[Splice, None] = {}

    def add(self, splice: Splice, *, coordinator: bool) -> None:
        """Add a splice; that of a *coordinator* waits for the others."""
        (self._coordinators if coordinator else self._all)[splice] = None

    def remove(self, splice: Splice) -> None:
        """Remove a splice that has ended."""
        self._all.pop(splice, None)
        self._coordinators.pop(splice, None)
        self.advance()

    def hold_work(self) -> bool:
        """Return whether messages of transactions wait."""
        return any(each.holds_work for each in self._all)

    def advance(self) -> None:
        """Send on the discharges that wait, if nothing is before them any more."""
        for each in list(self._coordinators):
            each.resume()


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

    Unsettled maps pass in both directions, so that the peers resume their deliveries as if they had one link (Part 2 §2.6.13),
    over any nodes. If the destination keeps its terminus, the loss of a link therefore gives no outcomes: the other one is
    suspended as it is, also in the middle of a message, and both peers remember what is unsettled.

    Created by a host in its ``attach``, and bound to both links. No method waits.

    Args:
        came: The link that the peer requested, not answered yet.
        opener: The session to the next node. Links of one session of the peer that depend on each other, such as those of a
            transaction, need the same one.
        siblings: Splices for the other links of the peer's session; None if there are none.
        name: Name of the link to open.
        address: Address of the node there, if it is another than the one that the peer asked for.
        revise: Revision of messages, see :class:`Passing`; without it no octet is changed.
        properties: Properties of its attach, such as the rest of the route.
        outer: The link on which messages arrive leads to a broker outside. It is not told the load of nodes. What waits here
            unsettled when it ends is not sent on, since no outcome can reach the broker, which will deliver it again. If
            it does not know *modified*, its messages are released instead.
        limits: ``splice_bytes_max`` bounds the messages that wait here; ``frame_size_max`` has to be that of the connections.
        refuse: Called with the error instead of ``came.refuse`` if the next node refuses the link, so that the first node can
            try another path.
        on_ended: Called once, when both links have ended.
        now: The clock, in seconds, if :meth:`stuck` is called.

    Raises:
        LocalProtocolError: No link can be opened on *opener*. The peer has not been answered.
    """

    def __init__(
        self,
        came: ReceivingLink | SendingLink,
        opener: Opener,
        name: str,
        *,
        address: str | None = None,
        revise: Callable[[bytes, bool], Revised] | None = None,
        properties: Mapping[object, object] | None = None,
        outer: bool = False,
        limits: Limits = DEFAULT_LIMITS,
        siblings: Siblings | None = None,
        refuse: Callable[[Error], None] | None = None,
        on_ended: Callable[[Splice], None] = lambda splice: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._came: Any = came
        self._limits = limits
        self._outer = outer
        self._room = Room(limits)
        self._refuse = refuse or came.refuse
        self._on_ended = on_ended
        #: Links that have ended or were never attached; the splice ends with the second.
        self._over = 0
        self._answered = False
        #: Terminus with the address that the peer asked for, if the next node has another one.
        self._asked: Source | Target | None = None
        self._held = False
        #: Error with which the first of the links ended.
        self.error: Error | None = None
        #: Error and kind of the end of the receiving link, once it has ended.
        self._ending: tuple[Error | None, bool] | None = None
        #: The sending peer was asked to drain, and whether messages have arrived since.
        self._draining = False
        self._arrived = False
        #: Then the peer had less credit than the receiver gave.
        self._short = False
        #: Between nodes of a mesh. A broker outside knows other names of links, and octets may have been changed on the way to it.
        self._relays = address is None and revise is None and not outer
        common: dict[str, Any] = {
            "source": came.source,
            "target": came.target,
            "snd_settle_mode": came.snd_settle_mode,
            "rcv_settle_mode": came.rcv_settle_mode,
            "properties": properties,
            "desired_capabilities": came.desired_capabilities,
            "relays": came if self._relays else None,
        }
        if address is not None:
            ours = "target" if came.role == RECEIVER else "source"
            self._asked = common[ours]
            common[ours] = replace(common[ours], address=address)
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
            self.inlet.stream_above = STREAM_ABOVE
        #: Properties of flows that were passed on last.
        self._told: Mapping[object, object] | None = None
        self._passing = Passing(
            self.outlet, frame_max=limits.frame_size_max, keep_tags=True, revise=revise, now=now
        )
        self._siblings = siblings
        if siblings is not None:
            coordinator = isinstance(came.target, Coordinator)
            siblings.add(self, coordinator=coordinator)
            if coordinator:
                self._passing.is_held_back = siblings.hold_work

    @property
    def held(self) -> int:
        """Bytes of messages that wait here."""
        return self._passing.held

    @property
    def holds_work(self) -> bool:
        """Whether messages of transactions wait here, so that their discharge has to wait too."""
        return self.outlet.attached and self._passing.holds_work

    def resume(self) -> None:
        """Send on what other links have held back."""
        if self._passing.waiting:
            self._passing.pump()
            self._advance(flowed=False)

    @property
    def busy(self) -> bool:
        """Whether a message waits here, is incomplete, or has not been settled."""
        return not self._passing.idle or self._passing.unanswered > 0

    @property
    def unsettled(self) -> int:
        """Number of messages that wait here, or have no outcome yet."""
        return len(self._passing.waiting) + self._passing.unanswered

    @property
    def dropped(self) -> int:
        """Number of settled messages that were lost because a link ended."""
        return self._passing.dropped

    def stuck(self, since: float) -> int:
        """Return the number of messages without an outcome that were sent before *since*."""
        return self._passing.stuck(since)

    # --- both links --------------------------------------------------------------------------

    def on_attached(self, link: Any) -> None:
        """Answer the peer when the next node has answered us; after that, pass on the first credit."""
        if self._outer and link is self.inlet:
            # RabbitMQ 3 ends the session of a link that gets an outcome which it does not know.
            source = link.source
            self._passing.modifies = (
                not source or not source.outcomes or MODIFIED in source.outcomes
            )
        if link is self._came:
            if self.outlet.attached and self.inlet.attached:
                self.on_credit(self.outlet)
            return
        self._answered = True
        came = self._came
        if self._relays:
            came.relay(link)
            self._passing.resumable = outlives_connection(
                link.target if came is self.inlet else link.source
            )
        source, target = link.source, link.target
        if isinstance(self._asked, Target):
            target = replace(target, address=self._asked.address)
        elif self._asked is not None:
            source = replace(source, address=self._asked.address)
        common: dict[str, Any] = {
            "source": source,
            "target": target,
            "properties": link.properties,
            "offered_capabilities": link.offered_capabilities,
        }
        if came is self.inlet:
            came.accept(
                self,
                max_message_size=link.max_message_size,
                stream_above=STREAM_ABOVE,
                rcv_settle_mode=link.rcv_settle_mode,
                **common,
            )
        else:
            came.accept(self, snd_settle_mode=link.snd_settle_mode, **common)
        if self._relays:
            came.remote_unsettled = link.remote_unsettled = None
            if not came.sent_all:
                # The destination does not know that the peer knows only a part of its map.
                came.detach(_MAP_TOO_LARGE, closed=False)

    def hold(self) -> None:
        """Take back the credit of the sender, and give it none from now on."""
        self._held = True
        if self.inlet.attached:
            self.inlet.grant(0)

    def opened(self, link: ReceivingLink) -> None:
        """Use *link*, which we opened, in the place of the one that the peer is said to have requested."""
        self._came = self.inlet = link

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """Detach the other link, with the same error."""
        self._over += 1
        self.error = self.error or error
        if not self._answered:
            self._over += 1
            # An error of the connection or session is none of the link, for which there may be another path.
            self._refuse(error if error is not None and not link.session.ended else _NOT_FOUND)
        elif link is self.inlet:
            self._ending = cause_of(link, error), closed
            if self._outer:
                self._passing.drop_unsettled()
            self._finish()
        else:
            if self._is_suspended(error, closed=closed):
                self._passing.suspend()
            else:
                self._passing.end()
            self.inlet.detach(cause_of(link, error), closed=closed)
        if self._over == 2:
            if self._siblings is not None:
                self._siblings.remove(self)
            self._on_ended(self)

    def _is_suspended(self, error: Error | None, *, closed: bool) -> bool:
        """Return whether both peers remember what is unsettled, or resume it on another link already."""
        stolen = error is not None and error.condition == "amqp:link:stolen"
        return self._passing.resumable and (stolen or not closed)

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
        size = self._passing.add(deliveries)
        self._room.took(len(deliveries), size)
        self._advance(flowed=False)

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Send on more of a message in several frames, its end, or its abort."""
        self._passing.pump()
        self._advance(flowed=False)
        if self._siblings is not None:
            self._siblings.advance()

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Settle what the sender has settled; what still waits will be sent settled."""
        for delivery in deliveries:
            sending = delivery.context
            if sending is not None and delivery.settled:
                sending.context = delivery.context = None
                self._passing.unanswered -= 1
                sending.settle(delivery.state)
                self._passing.answered(sending)

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
        if self._siblings is not None:
            self._siblings.advance()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes, other states and settlement to the sender."""
        if self._ending is None:
            for sending in deliveries:
                if sending.context is not None:
                    pass_outcome(sending, sending.context, modifies=self._passing.modifies)
                    self._passing.unanswered -= sending.context is None
                self._passing.answered(sending)

    # --- credit --------------------------------------------------------------------------------

    def _advance(self, *, flowed: bool) -> None:
        """Give the sender as much credit as the receiver gives, and continue a drain.

        Unless the receiver's flow asks for it (*flowed*), credit is topped up when half can be, so that one flow serves
        many messages.
        """
        inlet, outlet, passing = self.inlet, self.outlet, self._passing
        if not inlet.attached or not outlet.attached or self._held:
            return
        started = False
        if outlet.draining and not passing.streaming:
            if passing.idle and self._has_to_ask():
                started = True
            elif not outlet.credit or (passing.idle and not inlet.credit):
                if outlet.writable:
                    self._draining = False
                    outlet.drained()
                elif outlet.credit:
                    # The answer has to come behind messages that the link holds; ``on_credit`` follows.
                    return
        if self._draining and not started and not inlet.credit:
            # The sender has answered. What it sent leaves first.
            return
        waiting = len(passing.waiting)
        room = self._room.further(waiting, passing.held) if waiting else self._room.alone
        target = max(0, min(outlet.credit - waiting, room))
        credit = inlet.credit
        granted = target < credit or (
            target > credit and (flowed or 2 * (target - credit) >= target)
        )
        if flowed and self._flow_properties() != self._told:
            granted = True
        if granted:
            self._told = self._flow_properties()
            inlet.grant(target, properties=self._told)
        if self._draining and (granted or started):
            inlet.drain()
            self._short = inlet.credit < outlet.credit - len(passing.waiting)

    def _flow_properties(self) -> Mapping[object, object] | None:
        """Return the properties of the receiver's flows, as far as the sender gets them."""
        found: Mapping[object, object] | None = self.outlet.flow_properties
        if self._outer and found is not None and LOAD in found:
            return {key: value for key, value in found.items() if key != LOAD} or None
        return found

    def _has_to_ask(self) -> bool:
        """Return whether the sender has to be asked to drain; it is, after this.

        The sender may have had less credit than the receiver gave. If it used all of that, it is given more and asked again.
        """
        if not self.outlet.credit or (self._draining and self.inlet.credit):
            return False
        if self._draining and not (self._arrived and self._short):
            return False
        self._draining = True
        self._arrived = False
        return True
