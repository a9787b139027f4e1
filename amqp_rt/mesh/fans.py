"""Messages of many links to one address, distributed between links to its destinations.

The first node of a route keeps a :class:`Fan` for an address. Links of senders join it; a :class:`Leg` is a link to one
destination. Each message goes to one leg. The senders' credit is that of the legs, so that a message seldom waits here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, takewhile
from random import random as _random
from typing import Any, Final

from msgspec import Struct

from ..codec.sections import read_header_fields
from ..container.credit import SharedSlots
from ..errors import DecodeError, LocalProtocolError
from ..fronts.base import (
    SND_SETTLED,
    SND_UNSETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, KIB, Limits
from ..outcomes import ACCEPTED, RELEASED, Accepted, Error, Rejected, Released
from ..termini import Source
from . import balance
from .loads import read_load
from .passing import FINAL, Opener, Room, distributed_target, give_up, pass_outcome

#: Priorities from here on have legs of their own, where the host opens such (Part 3 §3.2.1).
HIGH_PRIORITY: Final = 5
#: Kinds of legs: for priorities 0 to 4, for 5 to 9, and for messages that are streamed; named like the uses of links in attaches.
LOW, HIGH, STREAMS = "low", "high", "streams"
KINDS: Final = (LOW, HIGH, STREAMS)
#: Larger messages are streamed, on legs of their own: one that arrives slowly would hold up the others. A body of 64 KiB,
#: with other sections of up to 4 KiB, is none of them: bodies often have just this size.
STREAM_ABOVE: Final = 68 * KIB
#: Seconds that a message waits for a destination: after the last one has gone, or without credit of its own.
WAIT_S: Final = 1.0
#: Seconds that a link waits for the first destination.
ABSENT_S: Final = 2.0
_ABSENT = Error("amqp:not-found", "no destination of this address can be reached")


class Handover(Struct, eq=False):
    """A message on its way through a fan."""

    delivery: IncomingDelivery
    #: When it arrived, later when it was sent on.
    since: float
    #: It came through an anonymous terminus, whose credit is not that of the legs.
    relayed: bool
    #: Kind of leg that it needs.
    kind: str = LOW
    leg: Leg | None = None
    sending: OutgoingDelivery | None = None
    answered: bool = False
    #: Legs whose destinations have released it.
    tried: tuple[Leg, ...] = ()


class Leg:
    """Link to one destination. Belongs to a :class:`Fan`, which attaches it.

    Args:
        fan: Its fan.
        standing: What is known of the destination; the host updates cost, load and slots.
        kind: ``LOW``, ``HIGH`` or ``STREAMS``.
    """

    def __init__(self, fan: Fan, standing: balance.Standing, kind: str) -> None:
        self.fan = fan
        self.standing = standing
        self.kind = kind
        self.link: SendingLink
        #: Gets no new messages; detached when its messages are settled.
        self.retiring = False
        #: Free for use by the owner of the fan.
        self.context: Any = None
        #: The destination has accepted the link.
        self.answered = False
        #: Outcomes from here; the owner of the fan keeps them for the next leg to the destination.
        self.answers = balance.Answers()
        #: Unsettled messages without an outcome, the oldest first.
        self.pending: dict[Handover, None] = {}
        #: Message of which a part has been sent.
        self.open: Handover | None = None
        #: Message that was sent last; as long as none of it has left, it can take another leg.
        self.last: Handover | None = None

    @property
    def ready(self) -> bool:
        """Whether a message can be sent now."""
        link = self.link
        return link.attached and self.open is None and link.credit > 0 and link.writable

    @property
    def busy(self) -> bool:
        """Whether a message is under way that the destination has not settled."""
        if self.standing.outstanding or self.open is not None:
            return True
        if self._unsent() is None:
            return False
        # A settled message waits at the link. Asking for room lets ``on_credit`` follow when it has left.
        _ = self.link.writable
        return True

    def _unsent(self) -> Handover | None:
        """Return the message of which nothing has left; None if there is none, or another leg has it by now."""
        last = self.last
        return None if last is None or last.leg is not self or _has_left(last) else last

    def send(self, handover: Handover, now: float) -> bool:
        """Send a message, or the beginning of one that is streamed.

        Returns:
            Whether the link takes a further message: False if it has refused this one, or not written it yet.
        """
        delivery, link = handover.delivery, self.link
        chunks = delivery.read_chunks() if delivery.streamed else [delivery.payload]
        if self.fan.revise is not None and chunks and not delivery.message_format:
            chunks = [self.fan.revise(chunks[0]), *chunks[1:]]
        try:
            sending = link.send(
                chunks[0] if chunks else b"",
                handover,
                settled=_sends_settled(link, delivery),
                message_format=delivery.message_format,
                state=delivery.state,
                more=delivery.streamed,
            )
        except LocalProtocolError as fault:
            if delivery.settled:
                self.fan.dropped += 1
            else:
                delivery.settle(Rejected(Error.of(fault)))
            return False
        handover.leg, handover.sending = self, sending
        handover.since = now
        self.last = handover
        if not sending.settled:
            self.standing.outstanding += 1
            self.pending[handover] = None
        if not delivery.settled:
            delivery.context = handover
        if delivery.streamed:
            self.open = handover
            self._write(handover, chunks[1:])
            return False
        if sending.settled and not delivery.settled:
            # The receiver wants no other outcome.
            delivery.settle(ACCEPTED)
        return sending.delivery_id >= 0 and link.credit > 0

    def pump(self) -> None:
        """Send on what has arrived of an incomplete message."""
        handover = self.open
        if handover is None:
            return
        delivery = handover.delivery
        if delivery.aborted:
            self.open = None
            assert handover.sending is not None
            if not handover.sending.settled:
                self.standing.outstanding -= 1
                self.pending.pop(handover, None)
            handover.sending.abort()
        elif self.link.writable:
            self._write(handover, delivery.read_chunks())

    def _write(self, handover: Handover, chunks: list[bytes]) -> None:
        delivery, sending = handover.delivery, handover.sending
        assert sending is not None
        last = b""
        if delivery.complete:
            self.open = None
            last = chunks.pop() if chunks else b""
        for chunk in chunks:
            sending.write(chunk)
        if delivery.complete:
            sending.write(last, more=False)
            if delivery.settled and not sending.settled:
                self.settle(handover)
            elif sending.settled and not delivery.settled:
                delivery.settle(ACCEPTED)

    def settle(self, handover: Handover) -> None:
        """Settle a message that its sender has settled."""
        assert handover.sending is not None
        if not handover.sending.settled:
            handover.sending.settle(handover.delivery.state)
            self._done(handover, None, 0.0)

    def _done(self, handover: Handover, outcome: object, now: float) -> None:
        """Count the first outcome of a message, at *now*; None for none."""
        if handover.answered:
            return
        handover.answered = True
        self.standing.outstanding -= 1
        self.pending.pop(handover, None)
        if outcome is not None:
            self.answers.count(outcome, now - handover.since)
            usual_s = self.fan.usual_s(self.kind) if type(outcome) is not Accepted else 0.0
            self.standing.answered(outcome, now - handover.since, now, usual_s=usual_s)

    # --- events of the link -----------------------------------------------------------------

    def on_attached(self, link: SendingLink) -> None:
        """Accept links that wait for a destination."""
        self.answered = True
        self.fan.refusal = None
        self.fan.changed()

    def on_credit(self, link: SendingLink) -> None:
        """Send what waits, and give the senders the new credit; a drain is answered when nothing waits."""
        load = read_load(link.flow_properties)
        if load is not None:
            self.standing.load, self.standing.slots = load
        self.pump()
        self.fan.pump()
        if link.draining and self.open is None and link.writable:
            link.drained()
            self.fan.share()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes to the senders, or try another destination."""
        now = self.fan.now()
        for sending in deliveries:
            handover = sending.context
            if handover is None:
                continue
            if type(sending.state) in FINAL or sending.settled:
                self._done(handover, sending.state, now)
            if type(sending.state) is Released and self.fan.retry(self, handover):
                if not sending.settled:
                    sending.settle()
            elif not handover.delivery.link.attached:
                if not sending.settled and type(sending.state) in FINAL:
                    sending.settle()
            else:
                pass_outcome(sending, handover.delivery, to_client=True)
        self.fan.settled()
        self.check_retired()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """Send messages of which nothing has left to another destination; others have been *modified*."""
        back = [each.context for each in link.unsettled]
        last = self._unsent()
        if last is not None and last not in back:
            # A settled message is not among those.
            back.append(last)
        if self.open is not None and self.open not in back:
            back.append(self.open)
        self.standing.outstanding = 0
        self.pending.clear()
        again = []
        for handover in back:
            delivery = handover.delivery
            begun = _has_left(handover)
            if begun or delivery.streamed:
                # What was read of a stream is gone.
                if delivery.settled:
                    self.fan.dropped += 1
                give_up(delivery, begun=begun)
            elif not delivery.aborted:
                handover.leg = handover.sending = delivery.context = None
                again.append(handover)
        self.open = self.last = None
        if not self.answered and self.kind == LOW:
            self.fan.refusal = error
        self.fan.left(self, again)

    def stuck(self, since: float) -> int:
        """Return the number of messages without an outcome that were sent before *since*."""
        return sum(1 for _ in takewhile(lambda each: each.since < since, self.pending))

    def check_retired(self) -> None:
        """Detach a leg that is replaced, once nothing of it is under way."""
        if (
            self.retiring
            and not self.standing.outstanding
            and self.open is None
            and (self.link.writable or not self.link.attached)
        ):
            self.link.detach()


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
        for handover in handovers:
            self._put(handover, first=False)
        self._room.took(len(handovers), self._held - before)
        self.pump()
        if self.waiting:
            self._on_wait()

    def retry(self, leg: Leg, handover: Handover) -> bool:
        """Let a message that the destination of *leg* released wait for another one; return False if there is none."""
        delivery = handover.delivery
        if len(handover.tried) >= self._resend or delivery.streamed or delivery.settled:
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

    def _put(self, handover: Handover, *, first: bool) -> None:
        kind = handover.kind = self._kind(handover)
        if kind != LOW and self._on_kind is not None:
            self._on_kind(kind)
        waiting = self._waiting[kind]
        if first:
            waiting.appendleft(handover)
        else:
            waiting.append(handover)
        if first and not handover.relayed and not handover.tried:
            self.slots.held += 1
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


def _sends_settled(link: SendingLink, delivery: IncomingDelivery) -> bool:
    """Return whether a message is sent settled: as its sender wants it, unless the receiver wants all or none of them to be."""
    if link.snd_settle_mode == SND_SETTLED:
        return True
    return delivery.settled and link.snd_settle_mode != SND_UNSETTLED


#: Descriptor of a header section, as smallulong and as the first octets of a ulong.
_HEADER: Final = (b"\x53\x70", b"\x80\x00")


def _standing(leg: Leg) -> balance.Standing:
    return leg.standing


def _has_left(handover: Handover) -> bool:
    return handover.sending is not None and handover.sending.delivery_id >= 0
