"""Links to the destinations of an address, and the messages on their way over them."""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..errors import LocalProtocolError
from ..fronts.base import (
    SND_SETTLED,
    SND_UNSETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    SendingLink,
)
from ..outcomes import ACCEPTED, Accepted, Error, Rejected, Released
from . import balance
from .loads import read_load
from .passing import FINAL, give_up, pass_outcome

if TYPE_CHECKING:
    from .fans import Fan

#: Kinds of legs: for priorities 0 to 4, for 5 to 9, and for messages that are streamed; named like the uses of links in attaches.
LOW, HIGH, STREAMS = "low", "high", "streams"
KINDS: Final = (LOW, HIGH, STREAMS)
#: Messages that are handed to the only leg at a time.
RUN_MESSAGES: Final = 64


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
            self._reject(delivery, fault)
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

    def send_run(self, waiting: deque[Handover], now: float) -> list[Handover]:
        """Send the first messages of *waiting*, as ``send`` does for one, and remove them from there; return them.

        Stops before a message that could not leave at once in one frame, or that is not sent like most.
        """
        # Links of other protocols take messages one by one.
        run = getattr(self.link, "send_run", None)
        if run is None or self.fan.revise is not None:
            return []
        presettled = waiting[0].delivery.settled
        handovers: list[Handover] = []
        payloads: list[bytes] = []
        for handover in islice(waiting, min(self.link.credit, RUN_MESSAGES)):
            delivery = handover.delivery
            if (
                delivery.streamed
                or delivery.message_format
                or delivery.state is not None
                or delivery.settled != presettled
                or handover.tried
            ):
                break
            handovers.append(handover)
            payloads.append(delivery.payload)
        if not handovers:
            return []
        settled = _sends_settled(self.link, handovers[0].delivery)
        sent = run(payloads, handovers, settled)
        del handovers[len(sent) :]
        for handover, sending in zip(handovers, sent, strict=True):
            waiting.popleft()
            handover.leg, handover.sending = self, sending
            handover.since = now
            if not settled:
                self.pending[handover] = None
            if not presettled:
                handover.delivery.context = handover
                if settled:
                    # The receiver wants no other outcome.
                    handover.delivery.settle(ACCEPTED)
        if not settled:
            self.standing.outstanding += len(handovers)
        return handovers

    def pump(self) -> None:
        """Send on what has arrived of an incomplete message."""
        handover = self.open
        if handover is None:
            return
        delivery = handover.delivery
        if delivery.aborted:
            self._abort(handover)
        elif self.link.writable:
            self._write(handover, delivery.read_chunks())

    def _reject(self, delivery: IncomingDelivery, fault: LocalProtocolError) -> None:
        """Reject a message that the link refuses; one that its sender has settled is dropped."""
        if delivery.settled:
            self.fan.dropped += 1
        else:
            delivery.settle(Rejected(Error.of(fault)))

    def _abort(self, handover: Handover) -> None:
        """End a message of which a part has been sent."""
        self.open = None
        assert handover.sending is not None
        if not handover.sending.settled:
            self.standing.outstanding -= 1
            self.pending.pop(handover, None)
        handover.sending.abort()

    def _write(self, handover: Handover, chunks: list[bytes]) -> None:
        delivery, sending = handover.delivery, handover.sending
        assert sending is not None
        last = b""
        if delivery.complete and chunks:
            last = chunks.pop()
        try:
            for chunk in chunks:
                sending.write(chunk)
            if delivery.complete:
                sending.write(last, more=False)
        except LocalProtocolError as fault:
            # It becomes too large for a destination that came after the sender had heard of a larger size.
            self._abort(handover)
            self._reject(delivery, fault)
            return
        if delivery.complete:
            self.open = None
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
        accepted: list[Handover] = []
        for sending in deliveries:
            handover = sending.context
            if handover is None:
                continue
            delivery = handover.delivery
            if (
                type(sending.state) is Accepted
                and sending.settled
                and not handover.answered
                and not delivery.settled
                and not delivery.second
                and delivery.link.attached
            ):
                accepted.append(handover)
                continue
            if accepted:
                # Failures in a row count, so that answers stay in order.
                self._accepted(accepted, now)
                accepted = []
            if type(sending.state) in FINAL or sending.settled:
                self._done(handover, sending.state, now)
            if type(sending.state) is Released and self.fan.retry(self, handover):
                if not sending.settled:
                    sending.settle()
            elif not delivery.link.attached:
                if not sending.settled and type(sending.state) in FINAL:
                    sending.settle()
            else:
                pass_outcome(sending, delivery, to_client=True)
        if accepted:
            self._accepted(accepted, now)
        self.fan.settled()
        self.check_retired()

    def _accepted(self, handovers: list[Handover], now: float) -> None:
        """Count messages that were accepted and settled, and settle them at their senders, as is done for one with any outcome."""
        run: list[IncomingDelivery] = []
        latencies: list[float] = []
        slowest = -1.0
        for handover in handovers:
            handover.answered = True
            self.pending.pop(handover, None)
            took_s = now - handover.since
            latencies.append(took_s)
            if took_s > slowest:
                # Quicker ones at the same time change nothing after it.
                slowest = took_s
                self.standing.answered(ACCEPTED, took_s, now)
            delivery, sending = handover.delivery, handover.sending
            assert sending is not None
            # The two refer to each other.
            sending.context = delivery.context = None
            if run and run[0].link is not delivery.link:
                # In the order in which they arrived: neighbours of links of one session share a disposition.
                _accept_run(run)
                run = []
            run.append(delivery)
        _accept_run(run)
        self.standing.outstanding -= len(handovers)
        self.answers.count_accepted(latencies)

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


def _sends_settled(link: SendingLink, delivery: IncomingDelivery) -> bool:
    """Return whether a message is sent settled: as its sender wants it, unless the receiver wants all or none of them to be."""
    if link.snd_settle_mode == SND_SETTLED:
        return True
    return delivery.settled and link.snd_settle_mode != SND_UNSETTLED


def _accept_run(deliveries: list[IncomingDelivery]) -> None:
    """Accept *deliveries* of one link, at least one."""
    # Links of other protocols settle messages one by one.
    run = getattr(deliveries[0].link, "accept_run", None)
    for delivery in deliveries if run is None else run(deliveries):
        delivery.settle(ACCEPTED)


def _has_left(handover: Handover) -> bool:
    return handover.sending is not None and handover.sending.delivery_id >= 0
