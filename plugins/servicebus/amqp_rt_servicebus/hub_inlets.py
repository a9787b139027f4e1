"""Endpoints of links that send to a hub: batches, partitions and idempotent producers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from amqp_rt.broker.building import (
    FULL,
    Entry,
    EntryFactory,
    Inlet,
    Intake,
    Memory,
    Place,
    Producer,
)
from amqp_rt.errors import AmqpError
from amqp_rt.fronts.base import IncomingDelivery, ReceivingLink
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, Accepted, Error, Received, Rejected

from .backlog import Backlog
from .hub_events import Arrival, Arriving
from .hub_producers import ProducerLink
from .messages import BATCH_FORMAT

#: Logs a message that is refused, though its sender has settled it.
LogDrop: TypeAlias = Callable[[bytes, int, ReceivingLink, Error | None], None]

#: Work of an event in the unit of ``Memory.work``: about ten microseconds.
_WORK: Final = 4
#: Octets of a record in the account of its log, beside its payload.
RECORD_COST: Final = 64

_NO_TRANSACTIONS: Final = Rejected(
    Error("amqp:not-implemented", "event hubs have no transactions: send without one")
)
_GONE: Final = Rejected(Error("amqp:not-found", "the event hub has been deleted"))


class Partitions(Protocol):
    """Partitions of a hub, as far as arriving events need them."""

    limits: Limits
    memory: Memory
    #: Returns the error that a test wants on an occasion, None if it wants none.
    fault: Callable[[str], Error | None]

    @property
    def deleted(self) -> bool:
        """Whether the hub has been deleted."""

    def resume_later(self, work: EventIntake) -> None:
        """Call ``resume`` of *work* in the next turn of the event loop."""

    def choose(self, key: bytes | None) -> int:
        """Return the partition of *key*; without a key, of the next events in turn."""

    def place(self, index: int) -> Place:
        """Return the destination of events of partition *index*."""


def _pass(item: object) -> None:
    """Do nothing."""


def _nothing() -> None:
    """Do nothing."""


class EventIntake:
    """Arrival of events on one link.

    Args:
        partitions: Partitions of the hub.
        partition: The only partition of the link; None if keys or turns decide.
        publisher: Publisher in the address of the link, if it names one.
        producer: The idempotent producer of a link to one partition; None for other links.
    """

    def __init__(
        self,
        partitions: Partitions,
        *,
        partition: int | None = None,
        publisher: str | None = None,
        producer: ProducerLink | None = None,
    ) -> None:
        self._partitions = partitions
        self._partition = partition
        self._publisher = publisher
        self._producer = producer
        self._backlog = Backlog(partitions.memory)
        #: Whether :meth:`resume` will be called.
        self._asked = False

    @property
    def pending(self) -> bool:
        """Whether deliveries are left for a later turn."""
        return self._backlog.pending

    def deliver(
        self,
        link: ReceivingLink,
        deliveries: Sequence[IncomingDelivery],
        inlet: Inlet,
        log_drop: LogDrop,
        done: Callable[[], object],
    ) -> None:
        """Take *deliveries* in their order, in several turns if they hold many events, and settle each.

        Args:
            link: Their link.
            deliveries: Messages and batches.
            inlet: Endpoint of the link, which says whether there is room.
            log_drop: Logs an event that is refused, though its sender has settled it.
            done: Called when they have been taken.
        """
        for delivery in deliveries:
            steps = self._steps(link, delivery, inlet, log_drop)
            if delivery.message_format == BATCH_FORMAT or self._backlog.pending:
                self._backlog.add(steps, _pass, work=_WORK)
            else:
                # The link counts the work of single events.
                deque(steps, maxlen=0)
        self._backlog.add((), _pass, done)
        self._run()

    def resume(self) -> None:
        """Continue with the deliveries as far as this turn allows."""
        self._asked = False
        self._run()

    def _run(self) -> None:
        if not self._backlog.run() and not self._backlog.running and not self._asked:
            self._asked = True
            self._partitions.resume_later(self)

    def _steps(
        self,
        link: ReceivingLink,
        delivery: IncomingDelivery,
        inlet: Inlet,
        log_drop: LogDrop,
    ) -> Iterator[None]:
        """Take one delivery; yield before that, and between its events."""
        # The first step is taken early, before those of the deliveries in front of this one.
        yield
        outcome: Accepted | Rejected
        if delivery.state is not None and not isinstance(delivery.state, Received):
            outcome = _NO_TRANSACTIONS
        elif (fault := self._partitions.fault("send")) is not None:
            outcome = Rejected(fault)
        else:
            arriving = Arriving(
                delivery.payload,
                delivery.message_format,
                publisher=self._publisher,
                limits=self._partitions.limits,
            )
            try:
                yield from arriving
                outcome = self._store(arriving.arrival, inlet.admits, link.peer.container_id)
            except AmqpError as error:
                outcome = Rejected(Error.of(error))
        if delivery.settled and isinstance(outcome, Rejected):
            log_drop(delivery.payload, delivery.message_format, link, outcome.error)
        delivery.settle(outcome)

    def _store(
        self, found: Arrival, admits: Callable[[int], bool], sender: str | None
    ) -> Accepted | Rejected:
        partitions, events = self._partitions, found.events
        index, producer = self._partition, self._producer
        if partitions.deleted:
            return _GONE
        if producer is not None and not producer.check(events):
            return ACCEPTED
        if not admits(sum(len(event.payload) + RECORD_COST for event in events)):
            return FULL
        if producer is not None:
            producer.stored(events)
        if index is None:
            index = partitions.choose(found.key)
        place = partitions.place(index)
        for event in events:
            place.put(Entry(event.payload, publisher=sender))
        return ACCEPTED


class HubInlet(Inlet):
    """Endpoint for events on a link to the anonymous terminus; see :class:`HubProducer`."""

    def __init__(
        self,
        events: EventIntake,
        intake: Intake,
        place: Place,
        entry_factory: EntryFactory,
        wall: Callable[[], float],
    ) -> None:
        super().__init__(intake, place, entry_factory, wall, volatile=True)
        self._events = events

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Store the events of *deliveries* and settle each."""
        self._events.deliver(link, deliveries, self, self._log_drop, _nothing)


class HubProducer(Producer):
    """Endpoint of a link that sends to a hub.

    Args:
        events: Takes the events of the link.
        intake: Room of the hub.
        place: Destination of events, whose room counts.
        entry_factory: Factory of the broker, for its limits.
        wall: The wall clock.
    """

    def __init__(
        self,
        events: EventIntake,
        intake: Intake,
        place: Place,
        entry_factory: EntryFactory,
        wall: Callable[[], float],
    ) -> None:
        super().__init__(intake, place, entry_factory, wall, volatile=True)
        self._events = events

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Store the events of *deliveries*, settle each, and grant credit again."""
        # Count the credit as used before the events take room, as every producer does.
        self.unpromised = self.early and len(deliveries) > self.promised
        self.intake.used(self)
        self._events.deliver(link, deliveries, self, self._log_drop, self._taken)

    def _taken(self) -> None:
        # Not before, so that few deliveries wait in memory.
        if not self._events.pending:
            self.intake.top_up(self)

    def on_attached(self, link: ReceivingLink) -> None:
        """Handle the attach of both sides."""
        link.delivery_work = _WORK
        super().on_attached(link)
