"""Event hubs of a namespace: logs of the broker at the addresses and with the operations of Event Hubs.

:class:`HubHost` finds the hub of a link and attaches it; :class:`EventHub` is one hub. The operations at
``$management`` are in :mod:`.hub_operations`. Events are in memory
only. The oldest ones are dropped after the retention of the hub, and when a partition exceeds ``Limits.log_bytes_max``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import Struct

from amqp_rt.addresses import address_of
from amqp_rt.broker import Log
from amqp_rt.broker.building import EntryFactory, Intake, Place
from amqp_rt.errors import AmqpError
from amqp_rt.fronts.base import (
    SENDER,
    SND_SETTLED,
    SND_UNSETTLED,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
)
from amqp_rt.fronts.hosts import BareHost
from amqp_rt.outcomes import Error
from amqp_rt.termini import Source, Target
from amqp_rt.values import Symbol, Timestamp

from .conditions import NOT_ALLOWED
from .declarations import DEFAULT_GROUP, Hub
from .faults import Faults
from .hub_addresses import HubAddress, hub_address, partition_index
from .hub_events import arrived_event, delivered_event, joined
from .hub_inlets import EventIntake, HubInlet, HubProducer
from .hub_positions import start_position
from .hub_producers import IDEMPOTENT, ProducerLink, Producers
from .hub_readers import HubReader, ReaderGroup, owner_level

if TYPE_CHECKING:
    from amqp_rt import Broker

#: Capability of a reader to which each event says what the last one of the partition is.
RUNTIME_METRIC: Final = Symbol("com.microsoft:enable-receiver-runtime-metric")
#: Octets of a message or batch; clients fill their batches up to what the link says.
EVENT_SIZE_MAX: Final = 1024 * 1024
#: Readers without an owner level of one partition and consumer group, as in the service.
READERS_MAX: Final = 5
#: Time of the last event of a partition that never had one: the year 1, in milliseconds since 1970.
NEVER_MS: Final = -62_135_596_800_000

_NOT_FOUND: Final = "amqp:not-found"
#: Hash of partition keys, as clients that compute partitions themselves have it.
_KEY_HASH: Final = "lookup3"


class PartitionFacts(Struct, frozen=True, kw_only=True):
    """State of a partition, as ``$management`` and the runtime metrics of readers have it."""

    #: Sequence number of the oldest event; 0 if there never was one.
    begin: int
    #: Sequence number of the newest event; -1 if there never was one. As text it is its offset.
    last: int
    #: Time of the newest event, in milliseconds since 1970.
    last_ms: int
    is_empty: bool


def _log_of(declared: Hub, node_name: str) -> Log:
    retention = cast("float | None", declared.retention)
    return Log(
        node_name,
        partitions=declared.partitions,
        key_hash=_KEY_HASH,
        max_age_s=None if retention == inf else retention,
    )


class EventHub:
    """A hub: its declaration and its log.

    Args:
        declared: The declaration.
        broker: The broker, in which the log is created.
        node_name: Name of the log.
        readers_max: Readers without owner level of one partition and group; None for no limit.
        fault: Returns the error that a test wants on an occasion (:data:`.faults.OCCASIONS`).

    Raises:
        AmqpError: The broker has a node of that name, or too many nodes.
    """

    def __init__(
        self,
        declared: Hub,
        broker: Broker,
        *,
        node_name: str,
        readers_max: int | None,
        fault: Callable[[str], Error | None],
    ) -> None:
        host = broker.host
        space = host.space()
        space.declare_transient(_log_of(declared, node_name))
        node = space.get(node_name)
        self.declared = declared
        self._update = space.update
        self._node_name = node_name
        self.limits = host.limits
        self.log = host.log(node_name)
        self.fault = fault
        self.intake: Intake = node.intake
        #: Time of the declaration, in seconds since 1970.
        self.created_at = host.clock.wall()
        self._clock = host.clock
        self.memory = host.memory
        #: Requests a call of ``resume`` in the next turn of the event loop.
        self.resume_later = host.turns.resume_later
        self._delete = partial(space.delete, node_name)
        self._entry_factory = EntryFactory("lenient", host.limits)
        self._places: list[Place] = []
        for index in range(declared.partitions):
            part = node.part(f"{node_name}/Partitions/{index}", index)
            assert part is not None
            self._places.append(part.open_intake()[0])
        self._producers = [Producers() for _ in range(declared.partitions)]
        self._readers_max = readers_max
        self._readers: defaultdict[tuple[str, int], ReaderGroup] = defaultdict(
            partial(ReaderGroup, readers_max)
        )
        self._turn = -1

    @property
    def name(self) -> str:
        """Name, as it was declared."""
        return self.declared.name

    def redeclare(self, declared: Hub) -> None:
        """Replace the declaration by one with as many partitions; the events and links stay."""
        self.declared = declared
        self._update(_log_of(declared, self._node_name))

    # --- State ---

    @property
    def deleted(self) -> bool:
        """Whether the hub has been deleted."""
        return self.log.deleted

    def facts(self, index: int) -> PartitionFacts:
        """Return the state of partition *index*."""
        part = self.log.partitions[index]
        return PartitionFacts(
            begin=part.first,
            last=part.next - 1,
            last_ms=NEVER_MS if part.last_ms < 0 else part.last_ms,
            is_empty=part.first == part.next,
        )

    def find_partition(self, text: str) -> int:
        """Return the index of the partition with the id *text*.

        Raises:
            AmqpError: There is none.
        """
        index = partition_index(text, self.declared.partitions)
        if index is None:
            raise AmqpError(
                f"the hub {self.name!r} has no partition {text!r:.50}: its partitions are 0 to"
                f" {self.declared.partitions - 1}",
                condition=_NOT_FOUND,
            )
        return index

    def find_group(self, name: str) -> str:
        """Return the consumer group *name*, in any case, in lower case.

        Raises:
            AmqpError: There is none.
        """
        groups = {DEFAULT_GROUP.lower(), *(each.lower() for each in self.declared.consumer_groups)}
        if name.lower() not in groups:
            raise AmqpError(
                f"the hub {self.name!r} has no consumer group {name!r:.100}: declare it with the hub",
                condition=_NOT_FOUND,
            )
        return name.lower()

    # --- Events ---

    def choose(self, key: bytes | None) -> int:
        """Return the partition of *key*; without a key, of the next events in turn."""
        count = self.declared.partitions
        if key is not None:
            return self.log.key_hash(key) % count
        self._turn = (self._turn + 1) % count
        return self._turn

    def place(self, index: int) -> Place:
        """Return the destination of events of partition *index*."""
        return self._places[index]

    def publish(self, payload: bytes, partition: int | None = None) -> int:
        """Store one encoded event of this process; return its partition.

        Raises:
            AmqpError: It is malformed, or there is no room.
        """
        event = arrived_event(payload, limits=self.limits)
        if not self.log.fits(len(event.payload)):
            raise AmqpError(
                f"the hub {self.name!r} has no room", condition="amqp:resource-limit-exceeded"
            )
        index = self.choose(event.key) if partition is None else partition
        place = self._places[index]
        place.put(self._entry_factory.make_entry(event.payload, 0, self._clock.wall()))
        return index

    def events(self, index: int) -> Iterator[tuple[int, bytes]]:
        """Yield the sequence numbers and the encoded events of partition *index*, as readers get them."""
        for block in self.log.partitions[index].blocks:
            for number, record in enumerate(block.records, block.offset):
                yield number, joined(delivered_event(record.payload, number, record.time_ms))

    def event(self, index: int, number: int) -> bytes:
        """Return the encoded event *number* of partition *index*, which is kept, as readers get it."""
        block = self.log.partitions[index].find(number)
        record = block.records[number - block.offset]
        return joined(delivered_event(record.payload, number, record.time_ms))

    # --- Links ---

    def attach_sender(self, link: ReceivingLink, address: HubAddress) -> None:
        """Accept *link*, whose peer sends to *address*.

        Raises:
            AmqpError: The address or the properties of the link are wrong, or a test wants a fault.
        """
        self._check_fault()
        if address.group is not None:
            raise AmqpError(
                f"consumer groups only receive: send to {self.name!r} or to one of its partitions",
                condition=NOT_ALLOWED,
            )
        index = None if address.partition is None else self.find_partition(address.partition)
        producer: ProducerLink | None = None
        if IDEMPOTENT in link.desired_capabilities:
            if index is None:
                raise AmqpError(
                    "an idempotent producer sends to one partition: attach to"
                    f" {self.name}/Partitions/n",
                    condition=NOT_ALLOWED,
                )
            producer = self._producers[index].open(link.properties)
        events = EventIntake(self, partition=index, publisher=address.publisher, producer=producer)
        size_max = min(self.limits.message_size_max, EVENT_SIZE_MAX)
        place = self._places[index or 0]
        link.accept(
            HubProducer(events, self.intake, place, self._entry_factory, self._clock.wall),
            target=Target(address=cast("Target", link.target).address),
            max_message_size=size_max,
            properties=None if producer is None else producer.properties,
            offered_capabilities=() if producer is None else (IDEMPOTENT,),
        )

    def attach_reader(self, link: SendingLink, address: HubAddress) -> None:
        """Accept *link*, whose peer receives from *address*.

        Raises:
            AmqpError: The address, a filter or the owner level is wrong, a reader with a higher level is
                attached, or a test wants a fault.
        """
        self._check_fault()
        if address.group is None or address.partition is None:
            raise AmqpError(
                f"receive from {self.name}/ConsumerGroups/GROUP/Partitions/n", condition=NOT_ALLOWED
            )
        group = self.find_group(address.group)
        index = self.find_partition(address.partition)
        asked = cast("Source", link.source)
        position = start_position(asked.filter)
        level = owner_level(link)
        readers = self._readers[group, index]
        readers.check(level)
        settled = link.snd_settle_mode == SND_SETTLED
        reader = HubReader.at(self.log, index, position, settled=settled, fault=self.fault)
        measured = RUNTIME_METRIC in link.desired_capabilities
        if measured:
            reader.delivery_annotations = partial(self._metrics, index)
        # Before the attach is answered, so that no event goes to two owners.
        readers.enter(reader, link, level)
        link.accept(
            reader,
            source=Source(
                address=asked.address,
                distribution_mode=Symbol("copy"),
                filter=asked.filter,
                outcomes=asked.outcomes,
            ),
            # A client that leaves the choice to us settles each event, as it is used to.
            snd_settle_mode=SND_SETTLED if settled else SND_UNSETTLED,
            offered_capabilities=(RUNTIME_METRIC,) if measured else (),
        )

    def _check_fault(self) -> None:
        fault = self.fault("attach")
        if fault is not None:
            raise fault.raised_as(AmqpError)

    def _metrics(self, index: int, partition: object, offset: int) -> dict[Any, object]:
        """Return the delivery annotations of an event for a reader that wants runtime metrics."""
        facts = self.facts(index)
        return {
            Symbol("last_enqueued_sequence_number"): facts.last,
            Symbol("last_enqueued_offset"): str(facts.last),
            Symbol("last_enqueued_time_utc"): Timestamp(facts.last_ms),
            Symbol("runtime_info_retrieval_time_utc"): Timestamp(int(self._clock.wall() * 1000)),
        }

    def inlet(self, address: HubAddress) -> HubInlet:
        """Return the endpoint for events to *address* on a link to the anonymous terminus.

        Raises:
            AmqpError: There is no such partition.
        """
        index = None if address.partition is None else self.find_partition(address.partition)
        events = EventIntake(self, partition=index, publisher=address.publisher)
        place = self._places[index or 0]
        return HubInlet(events, self.intake, place, self._entry_factory, self._clock.wall)

    def delete(self) -> None:
        """Delete the hub with its events, and detach its links."""
        self._delete()


class HubHost(BareHost):
    """Event hubs of a namespace: the host of their addresses.

    Args:
        realistic: Whether the service's limit of five readers without owner level applies.
        faults: Errors that a test wants in place of what hubs would do.
    """

    def __init__(self, faults: Faults, *, realistic: bool = False) -> None:
        self._faults = faults
        self._readers_max = READERS_MAX if realistic else None
        self._broker: Broker | None = None
        self._prefix = ""
        #: Hubs by their names in lower case.
        self._hubs: dict[str, EventHub] = {}
        #: Declarations until the broker has started.
        self._waiting: dict[str, Hub] = {}

    def __repr__(self) -> str:
        return f"<HubHost: {len(self)} hubs>"

    def bind(self, broker: Broker, *, prefix: str = "") -> None:
        """Create the hubs when *broker* starts.

        Args:
            broker: The broker.
            prefix: Beginning of the names of their logs, which are nodes of the broker.
        """
        self._prefix = prefix
        broker.container.on_startup(partial(self._start, broker))

    def _start(self, broker: Broker) -> None:
        self._broker = broker
        waiting, self._waiting = self._waiting, {}
        for hub in waiting.values():
            self.declare(hub)

    # --- Hubs ---

    def __iter__(self) -> Iterator[EventHub]:
        """Iterate over the hubs, in the order of their declarations."""
        return iter(list(self._hubs.values()))

    def __contains__(self, name: str) -> bool:
        return self.declared(name) is not None

    def __len__(self) -> int:
        return len(self._hubs) + len(self._waiting)

    def declared(self, name: str) -> Hub | None:
        """Return the declaration of the hub *name*, in any case; None if there is none."""
        key = name.lower()
        found = self._hubs.get(key)
        return self._waiting.get(key) if found is None else found.declared

    def declare(self, declared: Hub) -> None:
        """Create a hub, or change the consumer groups, the retention and the keys of the hub of that name.

        Raises:
            AmqpError: The broker has a node of that name.
            ValueError: The hub has another number of partitions.
        """
        key = declared.name.lower()
        known = self._hubs.get(key)
        before = self.declared(key)
        if before is not None and before.partitions != declared.partitions:
            raise ValueError(
                f"hub {before.name!r}: partitions is {before.partitions}, and cannot become"
                f" {declared.partitions}: delete the hub first"
            )
        if known is not None:
            known.redeclare(declared)
        elif self._broker is None:
            self._waiting[key] = declared
        else:
            self._hubs[key] = EventHub(
                declared,
                self._broker,
                node_name=f"{self._prefix}{declared.name}",
                readers_max=self._readers_max,
                fault=lambda on: self._faults.take(on, key),
            )

    def delete(self, name: str) -> None:
        """Delete the hub *name* with its events, and detach its links.

        Raises:
            AmqpError: There is none.
        """
        key = name.lower()
        if self._waiting.pop(key, None) is None:
            self.find(name).delete()
            del self._hubs[key]

    def find(self, name: str) -> EventHub:
        """Return the hub *name*, in any case.

        Raises:
            AmqpError: There is none.
        """
        found = self._hubs.get(name.lower())
        if found is None:
            raise AmqpError(
                f"The messaging entity '{name:.300}' could not be found.", condition=_NOT_FOUND
            )
        return found

    # --- Links (fronts.base.Host) ---

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*; return False if its address is not that of a hub or a part of one."""
        terminus = link.source if link.role == SENDER else link.target
        if not isinstance(terminus, Source | Target) or not isinstance(terminus.address, str):
            return False
        address = hub_address(terminus.address)
        hub = self._hubs.get(address.hub.lower())
        if hub is None:
            return False
        try:
            if link.role != SENDER:
                hub.attach_sender(cast("ReceivingLink", link), _as_asked(address, link.asked))
            else:
                hub.attach_reader(cast("SendingLink", link), address)
        except AmqpError as error:
            link.refuse(Error.of(error))
        return True

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for events to *address* on a link to the anonymous terminus.

        None if the address is not that of a hub, an error if it is not one that events are sent to.
        """
        found = hub_address(address)
        hub = self._hubs.get(found.hub.lower())
        if hub is None:
            return None
        if found.group is not None:
            return Error(NOT_ALLOWED, f"consumer groups only receive: send to {hub.name!r}")
        try:
            return hub.inlet(found)
        except AmqpError as error:
            return Error.of(error)


def _as_asked(address: HubAddress, asked: str | None) -> HubAddress:
    """Return *address* with the publisher as the client spells it: its name is written into events."""
    if address.publisher is None or asked is None:
        return address
    found = hub_address(address_of(asked))
    if (found.publisher or "").lower() != address.publisher.lower():
        return address
    return HubAddress(address.hub, publisher=found.publisher)
