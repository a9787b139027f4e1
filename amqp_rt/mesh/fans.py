"""Messages of many links to one address, distributed between links to its destinations.

The first node of a route keeps a :class:`Fan` for an address. Links of senders join it; a :class:`Leg` is a link to one
destination. Each message goes to one leg. The senders' credit is that of the legs, so that a message seldom waits here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from random import random as _random
from typing import Any, Final

from ..codec.sections import read_header_fields
from ..container.credit import SharedSlots
from ..errors import DecodeError
from ..fronts.base import (
    IncomingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, KIB, Limits
from ..outcomes import RELEASED, Error
from ..termini import Source
from . import balance
from .legs import HIGH, KINDS, LOW, RUN_MESSAGES, STREAMS, Handover, Leg
from .passing import FINAL, Opener, Room, distributed_target, give_up

#: Priorities from here on have legs of their own, where the host opens such (Part 3 §3.2.1).
HIGH_PRIORITY: Final = 5
#: Larger messages are streamed, on legs of their own: one that arrives slowly would hold up the others. A body of 64 KiB,
#: with other sections of up to 4 KiB, is none of them: bodies often have just this size.
STREAM_ABOVE: Final = 68 * KIB
#: Seconds that a message waits for a destination: after the last one has gone, or without credit of its own.
WAIT_S: Final = 1.0
#: Seconds that a link waits for the first destination.
ABSENT_S: Final = 2.0
#: Messages of a run that make it worth collecting them.
_RUN_LEAST: Final = 4
_ABSENT = Error("amqp:not-found", "no destination of this address can be reached")


class Ingress:
    """Link of a sender to a fan.

    Args:
        fan: The fan.
        relayed: The link leads to the anonymous terminus, and has credit of its own.
    """

    def __init__(self, fan: Fan, *, relayed: bool) -> None:
        self._fan = fan
        self._relayed = relayed

    def on_attached(self, link: ReceivingLink) -> None:
        """Give the link its share of the legs' credit."""
        self._fan.slots.add(link)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Distribute messages."""
        fan = self._fan
        if not self._relayed:
            fan.slots.took(link, len(deliveries))
        now = fan.now()
        fan.take([Handover(each, now, self._relayed) for each in deliveries])

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Send on more of messages that are streamed, and discard the rest of those that lost their leg."""
        self._fan.pump()
        for delivery in deliveries:
            if not self._fan.holds(delivery):
                delivery.read_chunks()

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Settle what the sender has settled; what still waits will be sent settled."""
        for delivery in deliveries:
            handover = delivery.context
            if delivery.settled and handover is not None and handover.leg is not None:
                delivery.context = None
                handover.leg.settle(handover)
                handover.leg.check_retired()
        self._fan.settled()

    def on_flow(self, link: ReceivingLink) -> None:
        """Note credit that the sender has returned."""
        if not self._relayed:
            self._fan.slots.flowed(link)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Free the link's credit. Messages that have arrived completely are still sent."""
        if not self._relayed:
            self._fan.senders -= 1
            self._fan.slots.remove(link)
            if not self._fan.senders:
                self._fan._on_wait()
        self._fan.pump()


class Fan:
    """Address as the first node of a route sees it: links of senders, and legs to destinations.

    Created by a host for an address and user; *pump* and the other methods do not wait. The host adds a leg for each
    destination that it knows, nearest first, replaces them when paths change, calls ``tick`` at ``deadline``, and ``rotate``
    about once a second, so that idle senders do not keep the credit.

    Args:
        now: The clock, in seconds.
        zone: Our zone, which is preferred.
        closest: Use only the legs of least cost.
        ordered: Use one leg, and another when all of its messages are settled.
        resend: Other destinations that get a message which one has released.
        limits: ``fan_legs_max`` bounds the legs of each kind, ``splice_bytes_max`` the messages that wait; ``frame_size_max``.
        random: Returns numbers from 0 to 1, without 1.
        on_left: Called with each leg that has ended.
        on_wait: Called when ``deadline`` may have become earlier.
        on_kind: Called with ``HIGH`` or ``STREAMS`` before a message waits for a leg of that kind, which can be added then; None
            if there are none.
        revise: Returns what to send in place of the first octets of a message of format 0; without it no octet is changed.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        zone: str = "",
        closest: bool = False,
        ordered: bool = False,
        resend: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        random: Callable[[], float] = _random,
        on_left: Callable[[Leg], None] = lambda leg: None,
        on_wait: Callable[[], None] = lambda: None,
        on_kind: Callable[[str], None] | None = None,
        revise: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.now = now
        self.revise = revise
        self._on_left = on_left
        self._on_wait = on_wait
        # An order of all messages leaves no choice of a leg.
        self._on_kind = None if ordered else on_kind
        #: Links of senders, those that wait for a destination included.
        self.senders = 0
        #: Error with which a destination refused the latest leg; senders are refused with it if there is no other one.
        self.refusal: Error | None = None
        self.slots = SharedSlots(0)
        self.legs: list[Leg] = []
        #: Settled messages that could not be sent on.
        self.dropped = 0
        self._zone = zone
        self._closest = closest
        self._ordered = ordered
        self._resend = resend
        self._limits = limits
        self._random = random
        #: Messages that wait, by the kind of leg that they need; and those that were released once.
        self._waiting: dict[str, deque[Handover]] = {kind: deque() for kind in KINDS}
        self._in_turn = tuple(self._waiting[kind] for kind in (HIGH, LOW, STREAMS))
        self._again: deque[Handover] = deque()
        self._held = 0
        self._room = Room(limits, stream_above=STREAM_ABOVE)
        #: Links that wait for the first destination, with the time at which they are refused.
        self._pending: list[tuple[ReceivingLink, float]] = []
        #: When the last destination went.
        self._absent_since = now()
        self._pumping = False
        #: Number of changes to what :meth:`_eligible` depends on, other than the legs' credit.
        self._changes = 0

    @property
    def waiting(self) -> int:
        """Number of messages that wait."""
        return sum(map(len, self._waiting.values())) + len(self._again)

    def waits_for(self, kind: str) -> bool:
        """Return whether messages wait for a leg of *kind*."""
        return bool(self._waiting[kind])

    def usual_s(self, kind: str) -> float:
        """Return the mean time in which the legs of *kind* answer messages that are accepted; 0 if none has been."""
        found = [
            each.standing.usual for each in self.legs if each.kind == kind and each.standing.usual
        ]
        return sum(found) / len(found) if found else 0.0

    @property
    def reachable(self) -> bool:
        """Whether a leg for any message is attached; those of other kinds only relieve it."""
        return any(
            each.kind == LOW and each.link.attached and not each.retiring for each in self.legs
        )

    # --- legs --------------------------------------------------------------------------------

    def add(
        self,
        opener: Opener,
        name: str,
        standing: balance.Standing,
        *,
        kind: str = LOW,
        properties: Mapping[object, object] | None = None,
        **attach: Any,
    ) -> Leg | None:
        """Open a leg; None if there are as many as may be.

        Args:
            opener: The session to the next node.
            name: Name of the link.
            standing: What is known of the destination; legs of several kinds to one destination need one each.
            kind: ``LOW``, ``HIGH`` or ``STREAMS``. Without legs of their own, these messages use the ``LOW`` ones.
            properties: Properties of the attach, such as the rest of the route.
            attach: Termini and other fields of the attach.

        Raises:
            LocalProtocolError: No link can be opened on *opener*.
        """
        if sum(each.kind == kind and not each.retiring for each in self.legs) >= (
            self._limits.fan_legs_max
        ):
            return None
        leg = Leg(self, standing, kind)
        leg.link = opener.attach_sender(name, leg, properties=properties, **attach)
        self.legs.append(leg)
        return leg

    def adopt(self, link: SendingLink, standing: balance.Standing, *, source: Source) -> Leg:
        """Accept *link*, which a receiver requested, as a leg."""
        leg = Leg(self, standing, LOW)
        leg.link = link
        self.legs.append(leg)
        link.accept(leg, source=source)
        return leg

    def withdraw(self) -> list[ReceivingLink]:
        """Return the links that wait for a destination, which no longer belong to this fan."""
        links = [link for link, _ in self._pending]
        self._pending.clear()
        self.senders -= len(links)
        return links

    def retire(self, leg: Leg) -> None:
        """Send nothing new to *leg*, and detach it when its messages are settled."""
        self._changes += 1
        leg.retiring = True
        if not self.reachable:
            self._absent_since = self.now()
        # What waited for this one may take others.
        self.pump()

    def changed(self) -> None:
        """Accept the links that wait for a destination; called when a leg is attached."""
        self._changes += 1
        pending, self._pending = self._pending, []
        for link, _ in pending:
            self._accept(link)
        self.pump()

    def left(self, leg: Leg, again: Iterable[Handover]) -> None:
        """Remove *leg*, and send the messages *again* to others."""
        self._changes += 1
        self.legs.remove(leg)
        if not self.reachable:
            self._absent_since = self.now()
        for handover in reversed(list(again)):
            self._put(handover, first=True)
            if not handover.relayed and not handover.tried:
                self.slots.held += 1
        self.pump()
        self._on_left(leg)
        if self.waiting:
            self._on_wait()

    def _eligible(self, kind: str) -> list[Leg]:
        legs = [each for each in self.legs if each.link.attached and not each.retiring]
        if kind != LOW and any(each.kind == kind and not each.retiring for each in self.legs):
            # Messages wait for a leg that is being opened: their order stays, and they hold up no others.
            legs = [each for each in legs if each.kind == kind]
            if kind == STREAMS:
                # A message that is read slowly holds up those behind it, also where all of it has left already.
                idle = [each for each in legs if not each.busy]
                opens = any(each.kind == kind and not each.answered for each in self.legs)
                legs = [] if opens and not idle else idle or legs
        else:
            legs = [each for each in legs if each.kind == LOW]
        if len(legs) == 1 and not self._ordered:
            # There is nothing to choose from; the only leg is never left out.
            return legs
        if self._closest:
            legs = balance.nearest(legs, _standing)
        if self._ordered:
            # A leg that has messages under way keeps the others behind them.
            busy = next((each for each in self.legs if each.busy), None)
            if busy is not None:
                return [each for each in legs if each is busy]
            return [each for each in legs if each.link.credit > 0][:1]
        return balance.eligible(legs, _standing, now=self.now())

    def _choose(self, kind: str, tried: tuple[Leg, ...]) -> Leg | None:
        # Several legs may lead to one destination, whose answers they share.
        seen = {id(each.answers) for each in tried}
        if tried and all(
            id(each.answers) in seen
            for each in self.legs
            if each.kind == kind and not each.retiring
        ):
            # Other destinations have no leg of the kind, or have refused it.
            kind = LOW
        ready = [
            each for each in self._eligible(kind) if each.ready and id(each.answers) not in seen
        ]
        if not ready:
            return None
        return ready[0] if self._ordered else self._better(ready, self.now())

    # --- senders -----------------------------------------------------------------------------

    def join(self, link: ReceivingLink, *, wait: bool = False) -> None:
        """Accept *link*, which a sender requested.

        Without a destination it is refused with ``amqp:not-found`` after 2 s; with *wait* it is accepted and gets no credit.
        """
        self.senders += 1
        if wait or self.reachable:
            self._accept(link)
        else:
            self._pending.append((link, self.now() + ABSENT_S))
            self._on_wait()

    def relay(self) -> Ingress:
        """Return an endpoint for messages of links to the anonymous terminus; it does not touch their credit.

        A message waits a second for credit of a leg, and is then *released*.
        """
        return Ingress(self, relayed=True)

    def _accept(self, link: ReceivingLink) -> None:
        legs = [each.link for each in self.legs if each.link.attached]
        sizes = [each.max_message_size for each in legs if each.max_message_size]
        link.accept(
            Ingress(self, relayed=False),
            target=distributed_target(link),
            max_message_size=min(sizes, default=self._limits.streaming_message_size_max),
            stream_above=STREAM_ABOVE,
            rcv_settle_mode=min((each.rcv_settle_mode for each in legs), default=0),
        )

    def take(self, handovers: list[Handover]) -> None:
        """Distribute messages that have arrived."""
        before = self._held
        low = self._waiting[LOW]
        size = 0
        for handover in handovers:
            delivery = handover.delivery
            if (
                delivery.streamed
                or len(delivery.payload) > STREAM_ABOVE
                or delivery.payload[1:3] in _HEADER
            ):
                self._put(handover)
            else:
                # As there, without a call for each message.
                low.append(handover)
                size += len(delivery.payload)
        self._held += size
        self._room.took(len(handovers), self._held - before)
        self.pump()
        if self.waiting:
            self._on_wait()

    def retry(self, leg: Leg, handover: Handover) -> bool:
        """Let a message that the destination of *leg* released wait for another one; return False if there is none."""
        delivery = handover.delivery
        if len(handover.tried) >= self._resend or delivery.streamed or delivery.settled:
            return False
        if type(delivery.local_state) in FINAL:
            # Its sender has been told: the destination has settled now what it had released before.
            return False
        handover.tried = (*handover.tried, leg)
        if self._is_spent(handover):
            return False
        handover.leg = handover.sending = delivery.context = None
        handover.answered = False
        self._again.append(handover)
        self._count(handover, 1)
        return True

    def _kind(self, handover: Handover) -> str:
        delivery = handover.delivery
        if delivery.streamed:
            return STREAMS
        payload = delivery.payload
        if len(payload) > STREAM_ABOVE:
            # All of it came at once, and may leave slowly.
            return STREAMS
        # The header comes first (Part 3 §3.2), and few messages have one.
        if payload[1:3] in _HEADER and (self._on_kind or self._has(HIGH)):
            try:
                if read_header_fields(payload, len(payload), self._limits)[1] >= HIGH_PRIORITY:
                    return HIGH
            except DecodeError:
                # The destination refuses malformed messages.
                pass
        return LOW

    def _has(self, kind: str) -> bool:
        return any(each.kind == kind and not each.retiring for each in self.legs)

    def _put(self, handover: Handover, *, first: bool = False) -> None:
        kind = handover.kind = self._kind(handover)
        if kind != LOW and self._on_kind is not None:
            self._on_kind(kind)
        waiting = self._waiting[kind]
        if first:
            waiting.appendleft(handover)
        else:
            waiting.append(handover)
        self._count(handover, 1)

    def holds(self, delivery: IncomingDelivery) -> bool:
        """Return whether a streamed message is being sent on, or waits."""
        return any(
            each.open is not None and each.open.delivery is delivery for each in self.legs
        ) or any(each.delivery is delivery for each in self._waiting[STREAMS])

    def _count(self, handover: Handover, sign: int) -> None:
        delivery = handover.delivery
        # What is not read of a streamed message stays in the session window.
        size = self._limits.frame_size_max if delivery.streamed else len(delivery.payload)
        self._held += sign * size

    # --- sending -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what waits, as far as legs have credit; then share the credit that is left."""
        if self._pumping:
            # A write called back.
            return
        self._pumping = True
        try:
            for leg in self.legs:
                leg.pump()
                leg.check_retired()
            # Most have nothing. What is sent from one may fill another, so that each is looked at when it is its turn.
            if self._again:
                self._send_from(self._again)
            for waiting in self._in_turn:
                if waiting:
                    self._send_from(waiting)
        finally:
            self._pumping = False
        self.share()

    def settled(self) -> None:
        """Send what waited for messages to be settled, and share the credit of legs that are not busy any more."""
        if self._again or self._waiting[STREAMS] or (self._ordered and self.waiting):
            self.pump()
        else:
            self.share()

    def _send_from(self, waiting: deque[Handover]) -> None:
        now = self.now()
        #: Legs for any of the messages; None if they have to be looked for again.
        ready: list[Leg] | None = None
        changes = self._changes
        #: Messages that are sent one by one before a run is tried again.
        single = 0
        while waiting:
            handover = waiting[0]
            leg: Leg | None = None
            if not handover.delivery.aborted:
                if handover.tried or self._ordered:
                    leg = self._choose(handover.kind, handover.tried)
                    if leg is None and not self._is_spent(handover):
                        return
                else:
                    if ready is None or changes != self._changes:
                        changes = self._changes
                        ready = [each for each in self._eligible(handover.kind) if each.ready]
                    if not ready:
                        return
                    if single:
                        single -= 1
                    elif len(ready) == 1 and len(waiting) > 1 and handover.kind != STREAMS:
                        sent = ready[0].send_run(waiting, now)
                        if len(sent) < _RUN_LEAST:
                            # Large messages, or those that differ from each other: runs would be short.
                            single = RUN_MESSAGES
                        if sent:
                            self._finish_run(sent)
                            if ready[0].link.credit <= 0:
                                ready = None
                            continue
                    leg = self._better(ready, now)
            waiting.popleft()
            self._finish(handover)
            if leg is None:
                if not handover.delivery.aborted:
                    # The destinations that had not seen it have gone.
                    handover.delivery.settle(RELEASED)
            elif (
                not leg.send(handover, now)
                or handover.kind == STREAMS
                or (ready is not None and len(ready) > 1 and not leg.link.writable)
            ):
                ready = None

    def _is_spent(self, handover: Handover) -> bool:
        """Return whether all destinations have released a message."""
        tried = handover.tried
        if not tried:
            return False
        if self._ordered:
            legs = self._eligible(handover.kind)
        else:
            # Legs without credit, those that are busy and those that are being opened are waited for.
            legs = [
                each
                for each in self.legs
                if each.kind in (handover.kind, LOW)
                and not each.retiring
                and (each.link.attached or not each.answered)
            ]
            if self._closest:
                legs = balance.nearest(legs, _standing)
            legs = balance.eligible(legs, _standing, now=self.now())
        seen = {id(each.answers) for each in tried}
        return all(id(each.answers) in seen for each in legs)

    def _better(self, ready: list[Leg], now: float) -> Leg:
        if len(ready) == 1:
            return ready[0]
        return balance.choose(ready, _standing, zone=self._zone, now=now, random=self._random)

    def _finish(self, handover: Handover) -> None:
        self._count(handover, -1)
        if not handover.relayed and not handover.tried:
            self.slots.held -= 1

    def _finish_run(self, handovers: list[Handover]) -> None:
        """Note that messages, of which none was sent before, wait no longer."""
        for handover in handovers:
            self._held -= len(handover.delivery.payload)
            if not handover.relayed:
                self.slots.held -= 1

    def share(self) -> None:
        """Give the senders as much credit as the legs have, less the messages that wait.

        A sender may use it for either priority, so that it is the larger of both: legs of one kind may hold all slots of
        their destinations, and give the credit back only when it is asked for. Messages beyond that of their kind wait.
        """
        total = sum([each.link.credit for each in self._eligible(LOW)])
        if len(self.legs) > 1 and self._has(HIGH):
            total = max(total, sum([each.link.credit for each in self._eligible(HIGH)]))
        waiting = self.slots.held
        self.slots.resize(min(total, waiting + self._room.further(self.waiting, self._held)))

    def rotate(self) -> None:
        """Ask a sender that does not use its credit to return it, if others have none."""
        if self.slots.starved:
            self.slots.rotate()

    # --- time --------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called; ``inf`` for never."""
        found = [at for _, at in self._pending]
        found += [each.standing.ejected_until for each in self.legs]
        found = [at for at in found if at > -math.inf]
        for waiting in (*self._waiting.values(), self._again):
            found += [self._waits_until(each) for each in islice(waiting, 1)]
            found += [self._waits_until(each) for each in waiting if each.relayed][:1]
        return min(found, default=math.inf)

    def _waits_until(self, handover: Handover) -> float:
        """Return when a message that waits is given back."""
        if not self.reachable:
            return max(handover.since, self._absent_since) + WAIT_S
        return handover.since + WAIT_S if handover.relayed else math.inf

    def tick(self, now: float) -> None:
        """Refuse links, and release messages, that have waited long enough; use legs again after their ejection."""
        pending, self._pending = self._pending, []
        for link, at in pending:
            if at <= now:
                self.senders -= 1
                link.refuse(self.refusal or _ABSENT)
            else:
                self._pending.append((link, at))
        for leg in self.legs:
            if leg.standing.ejected_until <= now:
                leg.standing.ejected_until = -math.inf
        for waiting in (*self._waiting.values(), self._again):
            for handover in list(waiting):
                if self._waits_until(handover) <= now:
                    waiting.remove(handover)
                    self._finish(handover)
                    self._give_back(handover)
        self.pump()

    def _give_back(self, handover: Handover) -> None:
        if handover.delivery.streamed:
            handover.delivery.read_chunks()
        if handover.delivery.settled:
            self.dropped += 1
        else:
            give_up(handover.delivery, begun=False)


#: Descriptor of a header section, as smallulong and as the first octets of a ulong.
_HEADER: Final = (b"\x53\x70", b"\x80\x00")


def _standing(leg: Leg) -> balance.Standing:
    return leg.standing
