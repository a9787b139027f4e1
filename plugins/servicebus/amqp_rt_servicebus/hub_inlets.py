"""Endpoints of links that send to a hub: batches, partitions and idempotent producers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from amqp_rt.broker.building import FULL, Entry, EntryFactory, Inlet, Intake, Place, Producer
from amqp_rt.errors import AmqpError
from amqp_rt.fronts.base import IncomingDelivery, ReceivingLink
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, Accepted, Error, Received, Rejected

from .hub_events import Arrival, arrival
from .hub_producers import ProducerLink

#: Octets of a record in the account of its log, beside its payload.
RECORD_COST: Final = 64

_NO_TRANSACTIONS: Final = Rejected(
    Error("amqp:not-implemented", "event hubs have no transactions: send without one")
)
_GONE: Final = Rejected(Error("amqp:not-found", "the event hub has been deleted"))


class Partitions(Protocol):
    """Partitions of a hub, as far as arriving events need them."""

    limits: Limits

    #: Returns the error that a test wants on an occasion, None if it wants none.
    fault: Callable[[str], Error | None]

    @property
    def deleted(self) -> bool:
        """Whether the hub has been deleted."""

    def choose(self, key: bytes | None) -> int:
        """Return the partition of *key*; without a key, of the next events in turn."""

    def place(self, index: int) -> Place:
        """Return the destination of events of partition *index*."""


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

    def take(
        self, delivery: IncomingDelivery, admits: Callable[[int], bool], sender: str | None
    ) -> Accepted | Rejected:
        """Store the events of *delivery*, all in one partition and at once, and return the outcome.

        Args:
            delivery: The delivery, which may hold a batch.
            admits: Returns whether there is room for a number of octets.
            sender: Container-id of the client.
        """
        if self._partitions.deleted:
            return _GONE
        fault = self._partitions.fault("send")
        if fault is not None:
            return Rejected(fault)
        if delivery.state is not None and not isinstance(delivery.state, Received):
            return _NO_TRANSACTIONS
        try:
            found = arrival(
                delivery.payload,
                delivery.message_format,
                publisher=self._publisher,
                limits=self._partitions.limits,
            )
            return self._store(found, admits, sender)
        except AmqpError as error:
            return Rejected(Error.of(error))

    def _store(
        self, found: Arrival, admits: Callable[[int], bool], sender: str | None
    ) -> Accepted | Rejected:
        partitions, events = self._partitions, found.events
        index, producer = self._partition, self._producer
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


def _deliver(
    intake: EventIntake,
    link: ReceivingLink,
    deliveries: Sequence[IncomingDelivery],
    inlet: Inlet,
    log_drop: Callable[[bytes, int, ReceivingLink, Error | None], None],
) -> None:
    for delivery in deliveries:
        outcome = intake.take(delivery, inlet.admits, link.peer.container_id)
        if delivery.settled and isinstance(outcome, Rejected):
            log_drop(delivery.payload, delivery.message_format, link, outcome.error)
        delivery.settle(outcome)


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
        _deliver(self._events, link, deliveries, self, self._log_drop)


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
        _deliver(self._events, link, deliveries, self, self._log_drop)
        self.intake.top_up(self)
