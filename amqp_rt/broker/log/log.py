"""Logs: records are appended, read by their offsets, and never removed by their readers.

A log has partitions. In each of them offsets count from 0 without gaps, and the times at which records
were appended never decrease. A reader has positions and credit, and nothing else: its outcomes change
nothing (distribution-mode *copy*).

With a journal, each committed batch holds new chunks for the partitions that have new records, and a
record is neither delivered nor accepted before its chunk is on the disk. The newest records are in
memory too; readers further behind are served from the store piece by piece (:class:`Reading`). Without
a journal everything is in memory, and records beyond the size of the log are dropped, oldest first.

Records are stored as they arrived. Their time to live is ignored: the log's retention decides.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio
from msgspec import Struct

from ...batches import RECORD_BATCH, RECORD_HEAD
from ...codec.sections import (
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    read_annotations,
    walk_head,
)
from ...errors import AmqpError, LocalProtocolError
from ...fronts.base import IncomingDelivery, Payload, SendingLink
from ...limits import DEFAULT_LIMITS, Limits
from ...message import JOIN_MAX, MESSAGE_FORMAT
from ...outcomes import Accepted, Error, Modified, Rejected, Released
from ...stores.base import Batch, Chunk, Store
from ...transactions import TransactionalState
from ...values import Symbol, Timestamp, ULong
from ..durable.facts import Era
from ..durable.journal import Journal, Unit, accept, refuse
from ..entries import Entry, annotated, entry_of
from ..filtering.positions import Position
from ..queue.accounts import Counts, Memory

_log = logging.getLogger("amqp_rt.broker")

#: Message annotations of each delivery, which give the place of its record: those of Event Hubs (a
#: string, a long and a timestamp) and that of RabbitMQ's streams (a ulong).
OFFSET: Final = Symbol("x-opt-offset")
SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")
ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")
STREAM_OFFSET: Final = Symbol("x-stream-offset")
#: The partition, as a string.
PARTITION_ID: Final = Symbol("x-opt-partition-id")
#: Annotation that determines the partition of a message.
PARTITION_KEY: Final = "x-opt-partition-key"

_TERMINAL: Final = (Accepted, Rejected, Released, Modified, TransactionalState)

#: Bytes of memory for a record besides its payload.
_RECORD_COST: Final = 64
#: Bytes and records of a block; memory is released in whole blocks.
_BLOCK_BYTES: Final = 64 * 1024
_BLOCK_RECORDS: Final = 1_000
#: Least number of blocks in a bound, of bytes or of age.
_PARTS: Final = 8
#: Bytes after which the records of one batch continue in another chunk.
_CHUNK_BYTES: Final = 1024 * 1024
#: Bytes of records that are written together at most.
_GATHERED_BYTES: Final = 16 * 1024 * 1024
#: Records that a reader examines at one place, and in all, before other readers get their turn. Its
#: filters end it earlier if they use up the work of all nodes in this turn of the event loop.
_RUN: Final = 64
_LOOKS: Final = 1_000
#: Octets of a record that are copied for its filters in the time of a unit of that work.
_COPIED: Final = 32_768


class Record(Struct, gc=False, array_like=True):
    """Message of a log. New fields go to the end."""

    #: Time of appending: milliseconds since 1970.
    time_ms: int
    payload: bytes
    message_format: int = MESSAGE_FORMAT
    #: Container-id of the publisher, if known.
    publisher: str | None = None

    @property
    def size(self) -> int:
        """Number of bytes that it counts as."""
        return len(self.payload) + _RECORD_COST


def _size_of(records: list[Record]) -> int:
    """Return the sum of ``size`` of *records*, without a call for each one."""
    return sum([len(record.payload) for record in records]) + _RECORD_COST * len(records)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class Block:
    """Consecutive records in memory."""

    __slots__ = ("missing", "offset", "records", "size")

    def __init__(self, offset: int, records: list[Record], missing: int = 0) -> None:
        self.offset = offset
        self.records = records
        self.size = _size_of(records)
        #: Number of records that cannot be read.
        self.missing = missing

    @property
    def end(self) -> int:
        """Offset after the last record."""
        return self.offset + len(self.records) + self.missing

    @property
    def first_ms(self) -> int:
        return self.records[0].time_ms

    @property
    def last_ms(self) -> int:
        return self.records[-1].time_ms


def chunk_of(offset: int, records: Sequence[Record]) -> Chunk:
    """Return the chunk to store for *records*, the first of which has *offset*."""
    return Chunk(
        offset, len(records), records[0].time_ms, records[-1].time_ms, _encoder.encode(records)
    )


def block_of(chunk: Chunk) -> Block:
    """Return the records of *chunk*; none if they cannot be read, and readers see the gap in offsets."""
    try:
        records = _decoder.decode(chunk.data)
    except msgspec.DecodeError as error:
        _log.error("records %d to %d: %s", chunk.offset, chunk.offset + chunk.count - 1, error)
        return Block(chunk.offset, [], chunk.count)
    return Block(chunk.offset, records)


class Partition:
    """Partition of a log: its offsets, and its newest records.

    Args:
        index: Index of the partition in its log.
        number: Its number in the store, 0 if it is in memory only.
        memory: Shared account of bytes.
    """

    def __init__(self, index: int, number: int, memory: Memory) -> None:
        self.index = index
        self.number = number
        self.memory = memory
        #: First offset still present, and the offset of the next record.
        self.first = 0
        self.next = 0
        #: Bytes of all records.
        self.bytes = 0
        #: Time of the last record, -1 if none, and the latest time given to a record.
        self.last_ms = -1
        self.latest_ms = -1
        #: Blocks of the newest records; ``next`` comes after the last one.
        self.blocks: list[Block] = []
        #: Bytes in ``blocks``.
        self.held = 0
        #: Readers that have credit and have reached the end.
        self.waiting: dict[LogReader, None] = {}
        #: The batch being assembled, and the offset of its next record.
        self._batch: Batch | None = None
        self._planned = 0

    @property
    def base(self) -> int:
        """First offset in memory."""
        return self.blocks[0].offset if self.blocks else self.next

    def now(self, wall: float) -> int:
        """Return the time of a record that arrives at *wall*: never before that of an earlier one."""
        self.latest_ms = max(self.latest_ms, int(wall * 1000))
        return self.latest_ms

    def extend(self, records: Iterable[Record], block_bytes: int, block_ms: int) -> None:
        """Append *records* in memory."""
        block = self.blocks[-1] if self.blocks else None
        grown = 0
        for record in records:
            # As ``record.size``, without a call for each record.
            size = len(record.payload) + _RECORD_COST
            if (
                block is None
                or block.size + size > block_bytes
                or len(block.records) >= _BLOCK_RECORDS
                or record.time_ms - block.first_ms > block_ms
            ):
                block = Block(self.next, [])
                self.blocks.append(block)
            block.records.append(record)
            block.size += size
            grown += size
            self.next += 1
            self.last_ms = record.time_ms
        self.held += grown
        self.memory.held += grown

    def forget(self, count: int) -> None:
        """Drop the oldest *count* blocks from memory."""
        size = sum(block.size for block in self.blocks[:count])
        del self.blocks[:count]
        self.held -= size
        self.memory.held -= size

    def find(self, offset: int) -> Block:
        """Return the block that contains *offset*, which is in memory."""
        return self.blocks[bisect_right(self.blocks, offset, key=_block_offset) - 1]

    def since(self, time_ms: int) -> int:
        """Return the offset of the first record in memory that is not older than *time_ms*."""
        at = bisect_left(self.blocks, time_ms, key=_block_last_ms)
        return self.next if at == len(self.blocks) else _since(self.blocks[at], time_ms)

    def knows(self, time_ms: int) -> bool:
        """Return whether the first record not older than *time_ms* is in memory, if there is one."""
        blocks = self.blocks
        return self.first >= self.base or bool(blocks and blocks[0].first_ms < time_ms)

    def plan(self, batch: Batch, records: list[Record]) -> tuple[int, int]:
        """Add *records* to *batch*, after those added before; return the offset after the last of
        them, and their bytes in the store."""
        if self._batch is not batch:
            self._batch = batch
            self._planned = self.next
        if _size_of(records) <= _CHUNK_BYTES:
            stored = self._append(batch, records)
            return self._planned, stored
        stored = size = 0
        chunk: list[Record] = []
        for record in records:
            if chunk and size + record.size > _CHUNK_BYTES:
                stored += self._append(batch, chunk)
                chunk, size = [], 0
            chunk.append(record)
            size += record.size
        stored += self._append(batch, chunk)
        return self._planned, stored

    def _append(self, batch: Batch, records: list[Record]) -> int:
        chunk = chunk_of(self._planned, records)
        batch.append(self.number, chunk)
        self._planned += len(records)
        return len(chunk.data)

    def planned(self) -> None:
        """End the batch: its records are stored, or will not be."""
        self._batch = None


def _block_offset(block: Block) -> int:
    return block.offset


def _block_last_ms(block: Block) -> int:
    return block.last_ms


def _block_end(block: Block) -> int:
    return block.end


def _time(record: Record) -> int:
    return record.time_ms


def _since(block: Block, time_ms: int) -> int:
    return block.offset + bisect_left(block.records, time_ms, key=_time)


class Appending:
    """Records written together, as part of a unit (:class:`~amqp_rt.broker.durable.journal.Appended`).

    Offsets are assigned when the records are put into a batch: refused records leave no gap.
    """

    def __init__(self, log: MessageLog) -> None:
        self.log = log
        #: Partition → records.
        self.records: dict[Partition, list[Record]] = {}
        self.size = 0
        #: Deliveries to answer, with the call to make afterwards.
        self.answers: list[tuple[list[IncomingDelivery], Callable[[], None] | None]] = []
        #: Whether the records have been put into a batch: no more are added.
        self.closed = False
        #: Partition → offset after its last record, and bytes.
        self._plans: dict[Partition, tuple[int, int]] = {}
        self._kept = False

    def add(self, partition: Partition, records: list[Record]) -> None:
        """Add *records* for *partition*."""
        known = self.records.get(partition)
        if known is None:
            self.records[partition] = records
        else:
            known += records
        self.size += _size_of(records)

    def write(self, batch: Batch) -> None:
        self.closed = True
        if not self._kept and (not self.log.deleted or self.log.failed):
            for partition, records in self.records.items():
                self._plans[partition] = partition.plan(batch, records)

    def verify(self, store: Store) -> None:
        self._kept = bool(self._plans) and all(
            store.extent(partition.number)[1] >= end for partition, (end, _) in self._plans.items()
        )

    def kept(self) -> None:
        """Append the records, which are on the disk, and serve readers."""
        log = self.log
        self._give_room()
        for partition, records in self.records.items():
            partition.planned()
            if not log.deleted:
                partition.bytes += self._plans[partition][1]
                log.extend(partition, records)

    def accept(self) -> None:
        """Accept the deliveries that brought the records, which are on the disk."""
        self._answer(accept)
        self.log.tell_of_room()

    def refused(self, error: Error) -> None:
        """Drop the records, which cannot be stored, and refuse their deliveries."""
        log = self.log
        if log.reading is not None:
            count = sum(map(len, self.records.values()))
            log.reading.journal.log_refused(count, log.address, error, log.wall())
        self.undo()
        self._answer(partial(refuse, error=error))

    def undo(self) -> None:
        """Release the room of the records, which are not stored."""
        self.closed = True
        self._give_room()
        for partition in self.records:
            partition.planned()
        self.log.tell_of_room()

    def _give_room(self) -> None:
        self.log.pending -= self.size
        self.log.memory.held -= self.size

    def _answer(self, say: Callable[[IncomingDelivery], None]) -> None:
        # The log keeps a reference to this until the next records, and deliveries refer to their link.
        answers, self.answers = self.answers, []
        for deliveries, done in answers:
            for delivery in deliveries:
                say(delivery)
            if done is not None:
                done()


class MessageLog:
    """Log with its partitions and readers.

    Args:
        memory: Shared account of bytes.
        wall: The wall clock.
        incarnation: Name of this log, unlike that of any other log with its address, earlier or later.
        numbers: The partitions' numbers in the store; zeros if they are in memory only.
        reading: Writes records, and serves readers that are far behind; None if everything is in
            memory.
        max_age_s: Seconds after which records are dropped, None for never.
        max_bytes: Bytes that a partition keeps; None for no limit, or in memory for
            ``limits.log_bytes_max``.
        limits: Bounds.
    """

    def __init__(
        self,
        memory: Memory,
        wall: Callable[[], float],
        incarnation: str,
        numbers: Sequence[int],
        reading: Reading | None,
        *,
        max_age_s: float | None = None,
        max_bytes: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.memory = memory
        self.wall = wall
        #: Address for log lines.
        self.address = ""
        self.incarnation = incarnation
        self.reading = reading
        self.limits = limits
        self.partitions = [Partition(index, number, memory) for index, number in enumerate(numbers)]
        self.keep(max_age_s, max_bytes)
        self.counts = Counts()
        self.deleted = False
        #: Whether it is out of service after an unexpected error, and appears deleted until the broker
        #: is started again. Records already on their way to the disk are still written.
        self.failed = False
        #: Whether only the broker may append to it.
        self.sealed = False
        self.awaited = False
        self.on_room: Callable[[], None] = _nothing
        #: Called when readers have more records to examine; :meth:`resume` should be called soon.
        self.on_unfinished: Callable[[], None] = _nothing
        self.readers: dict[LogReader, None] = {}
        self._unfinished: dict[LogReader, None] = {}
        #: Whether :meth:`resume` has been requested for them.
        self._resumes = False
        #: Bytes of records that wait to be written, or for their transaction.
        self.pending = 0
        self._gathering: Appending | None = None
        self._gathered_in = Unit()
        #: Group → partition → offset at which it continues.
        self.cursors: dict[str, dict[int, int]] = {}
        #: Starts of the broker after which records were appended, the latest one last.
        self.eras: list[Era] = []
        #: Holder → partition → first offset that must not be dropped, and its expiry (wall clock).
        self.holds: dict[str, tuple[dict[int, int], float]] = {}
        #: Held while a cursor or hold is written, so that none is derived from outdated state.
        self.noting = trio.Lock()

    async def restore(self) -> None:
        """Restore the offsets, sizes and times of the partitions from the store.

        Raises:
            AmqpError: The store cannot be read.
        """
        if self.reading is not None:
            for partition in self.partitions:
                await self.reading.restore(partition)

    def keep(self, max_age_s: float | None, max_bytes: int | None) -> None:
        """Set the retention: keep records for *max_age_s* seconds, and *max_bytes* bytes of them."""
        self.max_age_s = max_age_s
        self.max_bytes = max_bytes
        if self.reading is None and max_bytes is None:
            self.max_bytes = self.limits.log_bytes_max
        self._block_bytes = min(_BLOCK_BYTES, (self.max_bytes or _BLOCK_BYTES * _PARTS) // _PARTS)
        self._block_ms = 86_400_000 if max_age_s is None else int(max_age_s * 1000) // _PARTS

    def begin_era(self, id_: str) -> None:
        """Assign records appended from now on to the era *id_*."""
        starts = [partition.next for partition in self.partitions]
        # No position belongs to an era without records. If it were kept, it would continue after the
        # restore of a backup made now, and records appended then would look like those appended before.
        if self.eras and self.eras[-1].starts == starts:
            self.eras.pop()
        self.eras.append(Era(id_, starts))
        del self.eras[: -self.limits.log_eras_max]

    # --- Interface of every node ---

    @property
    def consumers(self) -> list[LogReader]:
        """Readers of the log."""
        return list(self.readers)

    @property
    def available(self) -> int:
        """Number of records."""
        return sum(partition.next - partition.first for partition in self.partitions)

    @property
    def acquired(self) -> int:
        """0: readers do not acquire records."""
        return 0

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return sum(partition.bytes for partition in self.partitions)

    def room(self) -> int:
        """Return the number of messages for which there is room."""
        free = min(self.memory.limit - self.memory.held, self.limits.queue_bytes_max - self.pending)
        return max(0, free // 1024)

    def fits(self, size: int) -> bool:
        """Return whether a message of *size* bytes may be admitted."""
        return (
            self.memory.held + size <= self.memory.limit
            and self.pending + size <= self.limits.queue_bytes_max
        )

    def tell_of_room(self) -> None:
        """Notify the waiting senders of room."""
        if self.awaited:
            self.on_room()
        if self.memory.waiting:
            self.memory.tell()

    # --- Appending ---

    def extend(self, partition: Partition, records: list[Record]) -> None:
        """Append *records* in memory, and serve the readers that wait for them."""
        partition.extend(records, self._block_bytes, self._block_ms)
        self.counts.enqueued += len(records)
        if self.reading is None:
            partition.bytes = partition.held
            self._trim(partition)
        else:
            self._evict(partition)
        if partition.waiting:
            waiting, partition.waiting = partition.waiting, {}
            for reader in waiting:
                self.serve(reader)

    def _evict(self, partition: Partition) -> None:
        """Keep only a tail in memory, and nothing while memory is scarce."""
        bound = 0 if self.memory.scarce else self.limits.log_tail_bytes_max
        count = 0
        held = partition.held
        for block in partition.blocks:
            if held <= bound:
                break
            held -= block.size
            count += 1
        if count:
            partition.forget(count)

    def _trim(self, partition: Partition) -> None:
        """Drop records beyond the retention from memory. Size never drops the newest block; age may."""
        blocks = partition.blocks
        held = self.held_from(partition)
        oldest = self.oldest_ms()
        count = 0
        size = partition.held
        bound = self.max_bytes
        for at, block in enumerate(blocks):
            too_many = bound is not None and size > bound and at < len(blocks) - 1
            if block.end > held or not (too_many or block.last_ms < oldest):
                break
            size -= block.size
            count += 1
        if count:
            partition.forget(count)
            partition.bytes = partition.held
            partition.first = partition.base

    def oldest_ms(self) -> int:
        """Return the time before which retention by age drops records."""
        return -1 if self.max_age_s is None else int((self.wall() - self.max_age_s) * 1000)

    def held_from(self, partition: Partition) -> int:
        """Return the first offset of *partition* covered by a hold; its end if there is none."""
        now = self.wall()
        return min(
            (
                offsets[partition.index]
                for offsets, until in self.holds.values()
                if partition.index in offsets and until > now
            ),
            default=partition.next,
        )

    def set_cursor(self, group: str, offsets: dict[int, int]) -> None:
        """Set the cursor of *group* to *offsets*; without any, delete it."""
        if offsets:
            self.cursors[group] = offsets
        else:
            self.cursors.pop(group, None)

    def set_hold(self, holder: str, held: tuple[dict[int, int], float] | None) -> None:
        """Set the hold of *holder* to *held*, or delete it if that is empty."""
        if held is not None and held[0]:
            self.holds[holder] = held
        else:
            self.holds.pop(holder, None)

    def expire_holds(self) -> list[str]:
        """Drop expired holds; return the names of their holders."""
        now = self.wall()
        gone = [holder for holder, (_, until) in self.holds.items() if until <= now]
        for holder in gone:
            del self.holds[holder]
        return gone

    async def retain(self) -> None:
        """Drop records beyond the retention from the store, in whole chunks.

        Raises:
            AmqpError: The store cannot be read, or has no room even for this.
        """
        reading = self.reading
        if reading is None or (self.max_age_s is None and self.max_bytes is None):
            return
        for partition in self.partitions:
            first, bytes_ = await reading.retain(self, partition)
            if self.deleted:
                return
            self._shorten(partition, first, bytes_)

    async def purge(self) -> int:
        """Drop all records that no hold covers, in whole chunks; return the number of records.

        Raises:
            AmqpError: The store cannot be read, or has no room even for this.
        """
        dropped = 0
        for partition in self.partitions:
            if self.deleted:
                break
            keep = self.held_from(partition)
            before = partition.first
            if self.reading is None:
                await trio.lowlevel.checkpoint()
                partition.forget(bisect_right(partition.blocks, keep, key=_block_end))
                partition.first, partition.bytes = partition.base, partition.held
            else:
                first, bytes_ = await self.reading.trim(partition, keep)
                self._shorten(partition, first, bytes_)
            dropped += partition.first - before
            self.counts.dropped += partition.first - before
        self.tell_of_room()
        return dropped

    def _shorten(self, partition: Partition, first: int, bytes_: int) -> None:
        """Set the beginning of *partition* to *first*: the store has dropped the records before it."""
        if first > partition.first and not self.deleted:
            partition.first, partition.bytes = first, bytes_
            partition.forget(bisect_right(partition.blocks, first, key=_block_end))
            self.tell_of_room()

    def gather(
        self,
        entrance: Entrance,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
    ) -> Unit:
        """Append *entries* together with those of other senders until the next batch is written: each
        batch has its records of a partition together. Return the unit in which they are written."""
        assert self.reading is not None
        appending = self._gathering
        new = appending is None or appending.closed or appending.size >= _GATHERED_BYTES
        if appending is None or new:
            appending = self._gathering = Appending(self)
            self._gathered_in = Unit(appending.refused)
        for partition, records in entrance.records(entries).items():
            appending.add(partition, records)
        appending.answers.append((deliveries, done))
        unit = self._gathered_in
        if new:
            unit.append(appending)
            unit.then(appending.kept, None, self)
            unit.then(appending.accept)
            self.reading.journal.add(unit)
        return unit

    def join(self, partition: Partition, records: list[Record]) -> None:
        """Append *records* together with the other changes of the journal's loose unit."""
        assert self.reading is not None
        unit = self.reading.journal.loose
        last = unit.appended[-1] if unit.appended else None
        if isinstance(last, Appending) and last.log is self:
            last.add(partition, records)
            return
        # Later records must come after these.
        self._gathering = None
        appending = Appending(self)
        appending.add(partition, records)
        unit.append(appending)
        unit.then(appending.kept, appending.undo, self)
        unit.then(appending.accept)

    def sweep(self) -> None:
        """Drop records that are too old, and release memory while it is scarce."""
        for partition in self.partitions:
            if self.reading is None:
                self._trim(partition)
            elif self.memory.scarce:
                self._evict(partition)
        self.tell_of_room()

    def delete(self) -> None:
        """Mark the log as deleted, release its memory and remove its readers."""
        self.deleted = True
        for partition in self.partitions:
            partition.forget(len(partition.blocks))
            partition.waiting.clear()
        for reader in list(self.readers):
            self.leave(reader)
        self._unfinished.clear()

    # --- Reading ---

    def subscribe(
        self,
        partitions: Sequence[int],
        position: Position | None,
        *,
        settled: bool = False,
        filters: Any = None,
        batches: bool = False,
    ) -> LogReader:
        """Return a new reader of *partitions*, from *position* in each of them; by default from the
        next record on. With *batches*, each message to it may hold many records."""
        reader = LogReader(self, settled=settled, filters=filters, batches=batches)
        reader.places = [
            self._place(self.partitions[index], position or Position("next"))
            for index in partitions
        ]
        self.readers[reader] = None
        return reader

    def _place(self, partition: Partition, position: Position) -> Place:
        kind = position.kind
        value = position.value if position.inclusive else position.value + 1
        if kind == "first":
            return Place(partition, partition.first)
        if kind == "next":
            return Place(partition, partition.next)
        if kind == "last":
            return Place(partition, max(partition.first, partition.next - 1))
        if kind in ("offset", "sequence-number"):
            return Place(partition, max(partition.first, value))
        time_ms = int(self.wall() * 1000) - value if kind == "age" else value
        if self.reading is None or partition.knows(time_ms):
            return Place(partition, partition.since(time_ms), time_ms)
        return Place(partition, partition.first, time_ms, seeking=True)

    def serve(self, reader: LogReader) -> None:
        """Send *reader* the records that it has credit for; return the credit if it drains."""
        if reader.serving or self.deleted or reader.link is None:
            return
        reader.serving = True
        link = reader.link
        looks = _LOOKS
        filtered = reader.filters is not None
        try:
            idle = 0
            places = reader.places
            while idle < len(places) and looks > 0 and link.credit > 0 and link.writable:
                if filtered and self.memory.work <= 0:
                    break
                place = places[0]
                looked = self._read(reader, place, looks if reader.batches else min(looks, _RUN))
                idle = 0 if looked else idle + 1
                looks -= looked
                if len(places) > 1:
                    places.append(places.pop(0))
        finally:
            reader.serving = False
        if link.credit > 0 and link.writable:
            if looks <= 0 or (filtered and self.memory.work <= 0):
                self._unfinished[reader] = None
                self._resume_later()
                return
            for place in reader.places:
                if not place.fetching:
                    place.partition.waiting[reader] = None
        if not filtered:
            behind = reader.behind
            link.offer(-(-behind // _BLOCK_RECORDS) if reader.batches else behind)
        if (
            link.draining
            and not any(place.fetching for place in reader.places)
            and (link.credit <= 0 or link.writable)
        ):
            link.drained()

    def _read(self, reader: LogReader, place: Place, count: int) -> int:
        """Let *reader* examine up to *count* records at *place*; return their number."""
        found = self._find(reader, place)
        if found is None:
            return 0
        link = reader.link
        block, index = found
        records = block.records
        if index >= len(records):
            place.offset = block.end
            return 1
        start = index
        end = min(len(records), index + count)
        if reader.batches:
            index = reader.give_batch(place, block, index, end)
            place.offset = block.offset + index
            return index - start
        while index < end and link.credit > 0 and link.writable:
            record = records[index]
            if record.time_ms >= place.since_ms and not reader.give(
                place.partition, block.offset + index, record
            ):
                break
            index += 1
        place.offset = block.offset + index
        return index - start

    def _find(self, reader: LogReader, place: Place) -> tuple[Block, int] | None:
        """Find the record at *place*; None if it has not arrived, or is being fetched."""
        if place.fetching:
            return None
        partition = place.partition
        place.offset = max(place.offset, partition.first)
        reading = self.reading
        if reading is None or (not place.seeking and place.offset >= partition.base):
            if place.offset >= partition.next:
                return None
            block = partition.find(place.offset)
            return block, place.offset - block.offset
        read = reading.get(place)
        if read is not None:
            return read, place.offset - read.offset
        reading.ask(self, reader, place)
        return None

    def resume(self) -> None:
        """Continue serving readers that had too many records to examine; see ``on_unfinished``."""
        self._resumes = False
        unfinished, self._unfinished = self._unfinished, {}
        waiting: dict[LogReader, None] = {}
        for reader in unfinished:
            if reader.filters is not None and self.memory.work <= 0:
                waiting[reader] = None
            else:
                self.serve(reader)
        if waiting:
            # They come first in the next turn.
            self._unfinished = waiting | self._unfinished
            self._resume_later()

    def _resume_later(self) -> None:
        if not self._resumes:
            self._resumes = True
            self.on_unfinished()

    def leave(self, reader: LogReader) -> None:
        """Remove *reader*, whose link has ended."""
        self.readers.pop(reader, None)
        self._unfinished.pop(reader, None)
        for place in reader.places:
            place.partition.waiting.pop(reader, None)
            if self.reading is not None:
                self.reading.drop(place)


class Place:
    """Position of a reader in one partition."""

    __slots__ = ("blocks", "fetching", "offset", "partition", "seeking", "since_ms")

    def __init__(
        self, partition: Partition, offset: int, since_ms: int = -1, *, seeking: bool = False
    ) -> None:
        self.partition = partition
        #: Offset of the next record to examine.
        self.offset = offset
        #: Older records are skipped.
        self.since_ms = since_ms
        #: Whether the store has to find the first record that is not older.
        self.seeking = seeking
        #: Whether a read from the store is pending.
        self.fetching = False
        #: Blocks read from the store.
        self.blocks: deque[Block] = deque()


def _fetch(
    store: Store, number: int, offset: int, since_ms: int, seeking: bool, size_max: int
) -> tuple[int, list[Block]]:
    """Read records from *offset* on, or from the first one not older than *since_ms*; return the
    offset to continue at, -1 if there are none, and the blocks."""
    if seeking:
        chunk = store.chunk_at(number, since_ms)
        if chunk is None:
            return -1, []
        blocks = [block_of(chunk)]
        return (_since(blocks[0], since_ms) if blocks[0].records else chunk.offset), blocks
    blocks = [block_of(chunk) for chunk in store.chunks(number, offset, size_max)]
    return max(offset, blocks[0].offset) if blocks else -1, blocks


class Reading:
    """Storage of a broker's logs: writes, drops and reads their records piece by piece.

    One piece is read at a time, for the readers in turn, so that a commit never waits for more than
    that. Records that were read are cached for their reader while there is room.
    """

    def __init__(
        self,
        journal: Journal,
        limits: Limits,
        on_fault: Callable[[object, Exception], object],
    ) -> None:
        self.journal = journal
        self.limits = limits
        self._on_fault = on_fault
        #: Bytes of cached records.
        self.held = 0
        self._places: OrderedDict[Place, None] = OrderedDict()
        self._asked: deque[tuple[MessageLog, LogReader, Place]] = deque()
        self._work = trio.Event()

    def get(self, place: Place) -> Block | None:
        """Return the next cached block at *place*, and move the place to it."""
        blocks = place.blocks
        while blocks:
            block = blocks[0]
            if block.end > place.offset:
                place.offset = max(place.offset, block.offset)
                self._places.move_to_end(place)
                return block
            self.held -= blocks.popleft().size
        self._places.pop(place, None)
        return None

    def ask(self, log: MessageLog, reader: LogReader, place: Place) -> None:
        """Read the records at *place*; :meth:`MessageLog.serve` is called when they are available."""
        place.fetching = True
        self._asked.append((log, reader, place))
        self._work.set()

    def drop(self, place: Place) -> None:
        """Drop the cached records of *place*."""
        self.held -= sum(block.size for block in place.blocks)
        place.blocks.clear()
        self._places.pop(place, None)

    async def restore(self, partition: Partition) -> None:
        """Set the offsets, the size and the last time of *partition* from the store."""
        journal, store, number = self.journal, self.journal.store, partition.number
        partition.first, partition.next, partition.bytes = await journal.call(store.extent, number)
        if partition.first < partition.next:
            last = await journal.call(store.chunks, number, partition.next - 1, 1)
            if last:
                partition.last_ms = partition.latest_ms = last[-1].last_ms

    async def run(self) -> None:
        """Carry out the requested reads, until cancelled."""
        while True:
            while self._asked:
                log, reader, place = self._asked.popleft()
                if reader in log.readers:
                    try:
                        await self._read(log, reader, place)
                    except Exception as error:
                        self._on_fault(log, error)
            self._work = trio.Event()
            await self._work.wait()

    async def _read(self, log: MessageLog, reader: LogReader, place: Place) -> None:
        partition = place.partition
        end = partition.next
        try:
            offset, blocks = await self.journal.call(
                _fetch,
                self.journal.store,
                partition.number,
                place.offset,
                place.since_ms,
                place.seeking,
                self.limits.log_read_bytes_max,
            )
        except AmqpError as error:
            _log.error("a log cannot be read: %s", error)
            reader.link.detach(Error.of(error))
            return
        place.fetching = place.seeking = False
        if reader not in log.readers:
            return
        # If there are none, all records that existed at the request were dropped, or are too old.
        place.offset = max(place.offset, end if offset < 0 else offset)
        place.blocks.extend(blocks)
        self.held += sum(block.size for block in blocks)
        self._places[place] = None
        while self.held > self.limits.log_cache_bytes_max and len(self._places) > 1:
            self.drop(next(iter(self._places)))
        log.serve(reader)

    async def retain(self, log: MessageLog, partition: Partition) -> tuple[int, int]:
        """Drop records of *partition* that are beyond the retention of *log* and not covered by a hold;
        return the first remaining offset, and the bytes."""
        oldest_ms, max_bytes = log.oldest_ms(), log.max_bytes
        journal, store, number = self.journal, self.journal.store, partition.number
        end = partition.next
        first, _, size = await journal.call(store.extent, number)
        keep = first
        if oldest_ms >= 0 and first < end:
            chunk = await journal.call(store.chunk_at, number, oldest_ms)
            keep = end if chunk is None else chunk.offset
        if max_bytes is not None and keep == first and size > max_bytes:
            excess = size - max_bytes
            bound = min(excess, self.limits.log_read_bytes_max)
            for chunk in await journal.call(store.chunks, number, first, bound):
                if excess <= 0 or chunk.offset + chunk.count >= end:
                    break
                excess -= len(chunk.data)
                keep = chunk.offset + chunk.count
        # While the store was read, a hold may have been set, or the log deleted.
        keep = min(keep, log.held_from(partition))
        if keep > first and not log.deleted:
            return await self.trim(partition, keep)
        return first, size

    async def trim(self, partition: Partition, keep: int) -> tuple[int, int]:
        """Drop the chunks before *keep*; return the first remaining offset, and the bytes."""
        journal, number = self.journal, partition.number
        await journal.keep(lambda unit: unit.trim(number, keep))
        first, _, size = await journal.call(journal.store.extent, number)
        return first, size


class LogReader:
    """Reader of a log: the endpoint of a sending link."""

    def __init__(
        self,
        log: MessageLog,
        *,
        settled: bool = False,
        filters: Any = None,
        batches: bool = False,
    ) -> None:
        self.log = log
        self.settled = settled
        self.filters = filters
        #: Whether it is sent batches of records.
        self.batches = batches
        self.places: list[Place] = []
        self.link: Any = None
        self.serving = False
        #: Called when the link has ended.
        self.on_left: list[Callable[[], None]] = []

    @property
    def behind(self) -> int:
        """Number of records not examined yet."""
        return sum(max(0, place.partition.next - place.offset) for place in self.places)

    def give(self, partition: Partition, offset: int, record: Record) -> bool:
        """Send *record* if the filters match.

        Return False if the link cannot continue, or the filters have to wait for the next turn.
        """
        payload = dress(partition.index, offset, record)
        if self.filters is not None:
            if self.log.memory.work <= 0:
                return False
            if not self._wants(record, payload):
                return True
        link = self.link
        try:
            link.send(payload, None, settled=self.settled, message_format=record.message_format)
        except LocalProtocolError as error:
            self._not_sent(error)
            return False
        self.log.counts.delivered += 1
        return True

    def give_batch(self, place: Place, block: Block, start: int, end: int) -> int:
        """Send records of *block* with indexes from *start* to before *end* in one message: as many as
        fit and match the filters. Return the index of the first one not examined.

        A record that is too large for a batch is sent alone.
        """
        link = self.link
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
                filters is None or self._wants(record, dress(partition, offset, record))
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
                self._not_sent(error)
                return start
            self.log.counts.delivered += len(pieces) // 2
        return offset - block.offset

    def _not_sent(self, error: LocalProtocolError) -> None:
        """Detach the link, whose peer does not accept messages of this size."""
        if self.link.attached:
            # Skipping the record would look as if it had never existed.
            self.link.detach(Error("amqp:link:message-size-exceeded", error.description))

    def _wants(self, record: Record, payload: Payload) -> bool:
        whole = payload if isinstance(payload, bytes) else b"".join(payload)
        if record.message_format == MESSAGE_FORMAT:
            entry = entry_of(whole, walk_head(whole))
        else:
            entry = Entry(whole, record.message_format)
        wanted = bool(self.filters.matches(entry, record.publisher))
        self.log.memory.work -= self.filters.work + len(whole) // _COPIED
        return wanted

    # --- Callbacks of the link (fronts.base.SendingEndpoint) ---

    def on_attached(self, link: SendingLink) -> None:
        self.link = link

    def on_credit(self, link: SendingLink) -> None:
        if link.flow_properties is not None and "txn-id" in link.flow_properties:
            link.detach(Error("amqp:not-implemented", "who reads a log acquires nothing"))
        else:
            self.log.serve(self)

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        """Settle *deliveries* with the peer's outcomes, which do not change the log (§3.5.2)."""
        for delivery in deliveries:
            if not delivery.settled and type(delivery.state) in _TERMINAL:
                delivery.settle(delivery.state)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self.log.leave(self)
        # Deliveries refer to their link, and the callbacks to this reader: break the reference cycle.
        link.unsettled = []
        called, self.on_left = self.on_left, []
        for on_left in called:
            on_left()


def dress(partition: int, offset: int, record: Record) -> Payload:
    """Return the payload to send for *record*, with its place in the message annotations.

    A message of an unknown format is sent unchanged.
    """
    payload = record.payload
    if record.message_format != MESSAGE_FORMAT:
        return payload
    head = walk_head(payload)
    if head.message_annotations:
        said = {
            OFFSET: str(offset),
            SEQUENCE_NUMBER: offset,
            ENQUEUED_TIME: Timestamp(record.time_ms),
            STREAM_OFFSET: ULong(offset),
            PARTITION_ID: str(partition),
        }
        return annotated(payload, said)
    front = head.header + _place(partition, offset, record.time_ms)
    return front + head.rest if len(payload) < JOIN_MAX else [front, head.rest]


#: Encoded keys and constructors of the annotations above, each with its widest encoding.
_AT_OFFSET, _AT_SEQUENCE_NUMBER, _AT_ENQUEUED_TIME, _AT_STREAM_OFFSET, _AT_PARTITION_ID = (
    bytes((0xA3, len(key))) + key.encode() + bytes((constructor,))
    for key, constructor in (
        (OFFSET, 0xA1),
        (SEQUENCE_NUMBER, 0x81),
        (ENQUEUED_TIME, 0x83),
        (STREAM_OFFSET, 0x80),
        (PARTITION_ID, 0xA1),
    )
)


def _place(partition: int, offset: int, time_ms: int) -> bytes:
    """Return the message annotations of a record that has none of its own (§3.2.3).

    Encoded by hand, because every delivery of a log has them and this is the largest part of its cost.
    """
    text, number, part = b"%d" % offset, offset.to_bytes(8), b"%d" % partition
    said = b"".join(
        (
            _AT_OFFSET,
            len(text).to_bytes(),
            text,
            _AT_SEQUENCE_NUMBER,
            number,
            _AT_ENQUEUED_TIME,
            time_ms.to_bytes(8, signed=True),
            _AT_STREAM_OFFSET,
            number,
            _AT_PARTITION_ID,
            len(part).to_bytes(),
            part,
        )
    )
    # A map of ten items; its size includes the octet of that count.
    return b"".join((_PLACE_OPENING, (len(said) + 1).to_bytes(), b"\x0a", said))


_PLACE_OPENING: Final = SECTION_OPENINGS[MESSAGE_ANNOTATIONS] + b"\xc1"


class Entrance:
    """Entry of one link to a log, for one partition or all in turn (broker.producers).

    Messages are both put and stored here (:class:`~amqp_rt.broker.producers.Ledger`).
    """

    def __init__(self, log: MessageLog, partition: int | None = None) -> None:
        self.log = log
        self._partition = partition
        self._turn = -1

    @property
    def deleted(self) -> bool:
        """Whether the log has been deleted."""
        return self.log.deleted

    def fits(self, size: int) -> bool:
        """Return whether the log has room for *size* bytes."""
        return self.log.fits(size)

    def records(self, entries: list[Entry]) -> dict[Partition, list[Record]]:
        """Return the records for *entries*, which arrive now, by their partitions."""
        log = self.log
        wall = log.wall()
        only = 0 if len(log.partitions) == 1 else self._partition
        if only is not None:
            partition = log.partitions[only]
            return {partition: _records(entries, partition.now(wall))}
        chosen: dict[int, list[Entry]] = {}
        for entry in entries:
            chosen.setdefault(self._choose(entry), []).append(entry)
        found: dict[Partition, list[Record]] = {}
        for index, some in chosen.items():
            partition = log.partitions[index]
            found[partition] = _records(some, partition.now(wall))
        return found

    def _choose(self, entry: Entry) -> int:
        """Return the index of the partition for *entry*: by its key, or else the next one in turn."""
        count = len(self.log.partitions)
        key = _key_of(entry, self.log.limits)
        if key is not None:
            return zlib.crc32(key) % count
        self._turn = (self._turn + 1) % count
        return self._turn

    def put(self, entry: Entry) -> None:
        """Append *entry* in memory only."""
        if not self.log.deleted:
            for partition, records in self.records([entry]).items():
                self.log.extend(partition, records)

    def hold(self, entry: Entry) -> None:
        """Reserve room for *entry*, which may follow when its transaction is discharged."""
        self.reserve(entry)

    def let_go(self, entry: Entry) -> None:
        """Release the room of *entry*, which is put now, or :meth:`room_again` follows."""
        size = len(entry.payload) + _RECORD_COST
        self.log.pending -= size
        self.log.memory.held -= size

    def room_again(self) -> None:
        """Notify the waiting senders of room."""
        self.log.tell_of_room()

    def wants(self, entry: Entry) -> bool:
        """Return True: even messages that are not durable are stored, so that offsets have no gaps."""
        return True

    def reserve(self, entry: Entry) -> None:
        """Reserve room for *entry*; :meth:`stage` follows."""
        size = len(entry.payload) + _RECORD_COST
        self.log.pending += size
        self.log.memory.held += size

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Append *entries* once they are stored, and then answer *deliveries*, which brought them.

        *done* is called last, whether they were stored or refused. *note* adds to the unit the changes
        for the deliveries themselves.
        """
        unit = self.log.gather(self, entries, deliveries, done)
        if note is not None:
            note(unit, deliveries)

    def receive(self, entries: list[Entry]) -> None:
        """Append *entries* once they are stored, together with the next changes; they are in the broker
        already and cannot be refused."""
        log = self.log
        for partition, records in self.records(entries).items():
            size = _size_of(records)
            log.pending += size
            log.memory.held += size
            log.join(partition, records)


def _records(entries: list[Entry], time_ms: int) -> list[Record]:
    """Return the records of *entries*, appended at *time_ms*."""
    return [
        Record(time_ms, entry.payload, entry.message_format, entry.publisher) for entry in entries
    ]


#: Octets of a message in which the key's name is searched before the sections are read.
_SEARCHED_MAX: Final = 4_096
_KEY_NAME: Final = PARTITION_KEY.encode()


def _key_of(entry: Entry, limits: Limits) -> bytes | None:
    """Return the partition key of a message, None if it has none."""
    payload = entry.payload
    if entry.message_format != MESSAGE_FORMAT:
        return None
    if len(payload) <= _SEARCHED_MAX and _KEY_NAME not in payload:
        return None
    section = walk_head(payload, limits).message_annotations
    key = read_annotations(section, limits).get(Symbol(PARTITION_KEY)) if section else None
    if isinstance(key, str):
        return key.encode("utf-8", "surrogatepass")
    return key if isinstance(key, bytes) else None


def _nothing() -> None:
    """Do nothing: default of the callbacks."""
