"""Readers of a log: the endpoints of sending links, with their places in its partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...batches import RECORD_BATCH, RECORD_HEAD
from ...codec.sections import walk_head
from ...errors import LocalProtocolError
from ...fronts.base import OutgoingDelivery, Payload, SendingLink
from ...message import MESSAGE_FORMAT
from ...outcomes import Accepted, Error, Modified, Rejected, Released
from ...transactions import TransactionalState
from ..entries import Entry, entry_of, exceeds_link
from ..filtering.filters import FilterSet
from .annotations import annotate_record, with_delivery_annotations
from .partitions import BLOCK_RECORDS, Partition, ReaderPlace
from .records import Block, Record

if TYPE_CHECKING:
    from .log import MessageLog

_TERMINAL: Final = (Accepted, Rejected, Released, Modified, TransactionalState)

#: Records that a reader examines at one place, and in all, before other readers get their turn. Its
#: filters end it earlier if they use up the work of all nodes in this turn of the event loop.
_RUN: Final = 64
_LOOKS: Final = 1_000
#: Octets of a record that are copied for its filters in the time of a unit of that work.
_COPIED: Final = 32_768


#: Returns the delivery annotations of the record at an offset of a partition.
DeliveryAnnotations: TypeAlias = Callable[[Partition, int], Mapping[Any, object]]


class LogReader:
    """Reader of a log: the endpoint of a sending link."""

    def __init__(
        self,
        log: MessageLog,
        *,
        settled: bool = False,
        filters: FilterSet | None = None,
        batches: bool = False,
    ) -> None:
        self.log = log
        self.settled = settled
        self.filters = filters
        #: Whether it is sent batches of records.
        self.batches = batches
        self.places: list[ReaderPlace] = []
        self.link: SendingLink | None = None
        self.serving = False
        #: Whether it has been removed from the log.
        self.left = False
        #: Called when the link has ended.
        self.on_end: list[Callable[[], None]] = []
        #: Returns the delivery annotations of a message sent to this reader, from its partition and offset;
        #: None if there are none. Batches have none.
        self.delivery_annotations: DeliveryAnnotations | None = None

    @property
    def behind(self) -> int:
        """Number of records not examined yet."""
        return sum(max(0, place.partition.next - place.offset) for place in self.places)

    def serve(self) -> None:
        """Send the records that the reader has credit for; return the credit if it drains."""
        log, link = self.log, self.link
        if self.serving or log.deleted or link is None:
            return
        self.serving = True
        looks = _LOOKS
        filtered = self.filters is not None
        try:
            idle = 0
            places = self.places
            while idle < len(places) and looks > 0 and link.credit > 0 and link.writable:
                if filtered and log.memory.work <= 0:
                    break
                place = places[0]
                looked = self._read(link, place, looks if self.batches else min(looks, _RUN))
                idle = 0 if looked else idle + 1
                looks -= looked
                if len(places) > 1:
                    places.append(places.pop(0))
        finally:
            self.serving = False
        if link.credit > 0 and link.writable:
            if looks <= 0 or (filtered and log.memory.work <= 0):
                log.unfinished[self] = None
                log.resume_later()
                return
            for place in self.places:
                if not place.fetching:
                    place.partition.waiting[self] = None
        if not filtered:
            behind = self.behind
            link.offer(-(-behind // BLOCK_RECORDS) if self.batches else behind)
        if (
            link.draining
            and not any(place.fetching for place in self.places)
            and (link.credit <= 0 or link.writable)
        ):
            link.drained()

    def _read(self, link: SendingLink, place: ReaderPlace, count: int) -> int:
        """Examine up to *count* records at *place*, for *link*; return their number."""
        found = self._find(place)
        if found is None:
            return 0
        block, index = found
        records = block.records
        if index >= len(records):
            place.offset = block.end
            return 1
        start = index
        end = min(len(records), index + count)
        if self.batches:
            index = self.give_batch(link, place, block, index, end)
            place.offset = block.offset + index
            return index - start
        while index < end and link.credit > 0 and link.writable:
            record = records[index]
            if record.time_ms >= place.since_ms and not self.give(
                link, place.partition, block.offset + index, record
            ):
                break
            index += 1
        place.offset = block.offset + index
        return index - start

    def _find(self, place: ReaderPlace) -> tuple[Block, int] | None:
        """Find the record at *place*; None if it has not arrived, or is being fetched."""
        if place.fetching:
            return None
        partition = place.partition
        place.offset = max(place.offset, partition.first)
        storage = self.log.storage
        if storage is None or (not place.seeking and place.offset >= partition.base):
            if place.offset >= partition.next:
                return None
            block = partition.find(place.offset)
            return block, place.offset - block.offset
        read = storage.get(place)
        if read is not None:
            return read, place.offset - read.offset
        storage.ask(self.log, self, place)
        return None

    def give(self, link: SendingLink, partition: Partition, offset: int, record: Record) -> bool:
        """Send *record* on *link* if the filters match.

        Return False if the link cannot continue, or the filters have to wait for the next turn.
        """
        payload = annotate_record(partition.index, offset, record)
        filters = self.filters
        if filters is not None:
            if self.log.memory.work <= 0:
                return False
            if not self._wants(filters, record, payload):
                return True
        if self.delivery_annotations is not None and record.message_format == MESSAGE_FORMAT:
            payload = with_delivery_annotations(
                payload, self.delivery_annotations(partition, offset)
            )
        try:
            link.send(payload, None, settled=self.settled, message_format=record.message_format)
        except LocalProtocolError as error:
            self._not_sent(link, error)
            return False
        self.log.counts.delivered += 1
        return True

    def give_batch(
        self, link: SendingLink, place: ReaderPlace, block: Block, start: int, end: int
    ) -> int:
        """Send records of *block* with indexes from *start* to before *end* in one message: as many as
        fit and match the filters. Return the index of the first one not examined.

        A record that is too large for a batch is sent alone.
        """
        bound = self.log.limits.log_batch_bytes_max
        if link.max_message_size:
            bound = min(bound, link.max_message_size)
        partition, since_ms, filters = place.partition.index, place.since_ms, self.filters
        pieces: list[bytes] = []
        append, pack, head_size = pieces.append, RECORD_HEAD.pack, RECORD_HEAD.size
        size, offset = 0, block.offset + start
        for record in block.records[start:end]:
            if filters is not None and self.log.memory.work <= 0:
                break
            payload, time_ms = record.payload, record.time_ms
            if time_ms >= since_ms and (
                filters is None
                or self._wants(filters, record, annotate_record(partition, offset, record))
            ):
                octets = len(payload)
                size += head_size + octets
                if size > bound and pieces:
                    break
                append(pack(offset, time_ms, record.message_format, octets))
                append(payload)
            offset += 1
        if pieces:
            try:
                link.send(b"".join(pieces), None, settled=self.settled, message_format=RECORD_BATCH)
            except LocalProtocolError as error:
                self._not_sent(link, error)
                return start
            self.log.counts.delivered += len(pieces) // 2
        return offset - block.offset

    def _not_sent(self, link: SendingLink, error: LocalProtocolError) -> None:
        """Detach *link* if its peer does not accept messages of this size, whatever credit it gives."""
        if exceeds_link(link, error):
            # Skipping the record would look as if it had never existed.
            link.detach(Error("amqp:link:message-size-exceeded", error.description))

    def _wants(self, filters: FilterSet, record: Record, payload: Payload) -> bool:
        whole = payload if isinstance(payload, bytes) else b"".join(payload)
        if record.message_format == MESSAGE_FORMAT:
            entry = entry_of(whole, walk_head(whole))
        else:
            entry = Entry(whole, record.message_format)
        wanted = filters.matches(entry, record.publisher)
        self.log.memory.work -= filters.work + len(whole) // _COPIED
        return wanted

    # --- Callbacks of the link (fronts.base.SendingEndpoint) ---

    def on_attached(self, link: SendingLink) -> None:
        self.link = link

    def on_credit(self, link: SendingLink) -> None:
        if link.flow_properties is not None and "txn-id" in link.flow_properties:
            link.detach(Error("amqp:not-implemented", "who reads a log acquires nothing"))
        else:
            self.serve()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Settle *deliveries* with the peer's outcomes, which do not change the log (§3.5.2)."""
        for delivery in deliveries:
            if not delivery.settled and type(delivery.state) in _TERMINAL:
                delivery.settle(delivery.state)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self.log.leave(self)
        # Deliveries refer to their link, and the callbacks to this reader: break the reference cycle.
        link.unsettled = []
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()
