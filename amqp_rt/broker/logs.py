"""A log: records that are appended, read by their offsets, and never taken away by who reads them.

A log has partitions. In each of them the first record has offset 0 and every other one more than the
record before it; the time at which a record was appended never goes back. Readers have a position and
credit, and nothing else: what they say of a delivery changes nothing (distribution-mode *copy*).

With a journal each batch that is committed holds one chunk for each partition that has new records, and
neither readers nor senders hear of a record before its chunk is on the disk. The newest records are in
memory too; who is further behind is served from the store in pieces (:class:`Reading`). Without a journal
everything is in memory, and what exceeds the log's size is dropped, oldest first.

Records are kept as they came. Their time to live is not looked at: how long they stay is up to the log.
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

from ..batches import RECORD_BATCH, RECORD_HEAD
from ..codec.sections import (
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    read_annotations,
    walk_head,
)
from ..errors import AmqpError, LocalProtocolError
from ..fronts.base import IncomingDelivery, Payload, SendingLink
from ..limits import DEFAULT_LIMITS, Limits
from ..message import JOIN_MAX, MESSAGE_FORMAT
from ..outcomes import Accepted, Error, Modified, Rejected, Released
from ..stores.base import Batch, Chunk, Store
from ..transactions import TransactionalState
from ..values import Symbol, Timestamp, ULong
from .entries import Entry, annotated
from .journal import Journal, Unit, accept, refuse
from .positions import Position
from .queues import Counts, Memory

_log = logging.getLogger("amqp_rt.broker")

#: What each delivery says of its record, in its message annotations: as Event Hubs does (a text, a
#: long and a timestamp) and as RabbitMQ does for its streams (a ulong).
OFFSET: Final = Symbol("x-opt-offset")
SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")
ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")
STREAM_OFFSET: Final = Symbol("x-stream-offset")
#: The partition, as a text.
PARTITION_ID: Final = Symbol("x-opt-partition-id")
#: By which messages choose their partition.
PARTITION_KEY: Final = "x-opt-partition-key"

_TERMINAL: Final = (Accepted, Rejected, Released, Modified, TransactionalState)

#: What a record takes beside its payload, in memory.
_RECORD_COST: Final = 64
#: Bytes, records and milliseconds of a block; memory is given back in whole blocks.
_BLOCK_BYTES: Final = 64 * 1024
_BLOCK_RECORDS: Final = 1_000
#: Blocks that a bound, of bytes or of age, is worth at least.
_PARTS: Final = 8
#: Bytes after which the records of one batch go on in another chunk.
_CHUNK_BYTES: Final = 1024 * 1024
#: Records that are written together at most.
_GATHERED_BYTES: Final = 16 * 1024 * 1024
#: Records that one reader looks at in a row, and before others have their turn.
_RUN: Final = 64
_LOOKS: Final = 1_000


class Record(Struct, gc=False, array_like=True):
    """One message of a log. New fields go to the end."""

    #: When it was appended: milliseconds since 1970.
    time_ms: int
    payload: bytes
    message_format: int = MESSAGE_FORMAT
    #: The container-id of who sent it, where that is known.
    publisher: str | None = None

    @property
    def size(self) -> int:
        """The bytes that it is counted as."""
        return len(self.payload) + _RECORD_COST


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class Block:
    """Consecutive records in memory."""

    __slots__ = ("missing", "offset", "records", "size")

    def __init__(self, offset: int, records: list[Record], missing: int = 0) -> None:
        self.offset = offset
        self.records = records
        # As ``Record.size`` has it, without a call for each: readers far behind wait for this.
        payloads = sum([len(record.payload) for record in records])
        self.size = payloads + _RECORD_COST * len(records)
        #: How many there were that cannot be read.
        self.missing = missing

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.offset + len(self.records) + self.missing

    @property
    def first_ms(self) -> int:
        return self.records[0].time_ms

    @property
    def last_ms(self) -> int:
        return self.records[-1].time_ms


def chunk_of(offset: int, records: Sequence[Record]) -> Chunk:
    """What a store keeps of *records*, the first of which has *offset*."""
    return Chunk(
        offset, len(records), records[0].time_ms, records[-1].time_ms, _encoder.encode(records)
    )


def block_of(chunk: Chunk) -> Block:
    """The records of *chunk*; none if they cannot be read, which a reader sees from the offsets."""
    try:
        records = _decoder.decode(chunk.data)
    except msgspec.DecodeError as error:
        _log.error("records %d to %d: %s", chunk.offset, chunk.offset + chunk.count - 1, error)
        return Block(chunk.offset, [], chunk.count)
    return Block(chunk.offset, records)


class Partition:
    """The records of one partition: how far they go, and the newest of them.

    Args:
        index: Which partition of the log it is.
        number: Its number in the store, 0 if it is in memory only.
        memory: Shared account of bytes.
    """

    def __init__(self, index: int, number: int, memory: Memory) -> None:
        self.index = index
        self.number = number
        self.memory = memory
        #: The first offset that is there, and the one that the next record gets.
        self.first = 0
        self.next = 0
        #: Bytes of what is kept.
        self.bytes = 0
        #: When the last record was appended, -1 if never, and the latest time that was given out.
        self.last_ms = -1
        self.latest_ms = -1
        #: The newest records; ``next`` comes after the last one.
        self.blocks: list[Block] = []
        #: Bytes of those.
        self.held = 0
        #: Readers that have credit and are at the end.
        self.waiting: dict[LogReader, None] = {}
        #: The batch that is being put together, and where the next record of it goes.
        self._batch: Batch | None = None
        self._planned = 0

    @property
    def base(self) -> int:
        """The first offset that is in memory."""
        return self.blocks[0].offset if self.blocks else self.next

    def now(self, wall: float) -> int:
        """The time of a record that comes at *wall*: never before that of an earlier one."""
        self.latest_ms = max(self.latest_ms, int(wall * 1000))
        return self.latest_ms

    def extend(self, records: Iterable[Record], block_bytes: int, block_ms: int) -> None:
        """Append to what is in memory."""
        block = self.blocks[-1] if self.blocks else None
        grown = 0
        for record in records:
            size = record.size
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
        """The block with *offset*, which is in memory."""
        return self.blocks[bisect_right(self.blocks, offset, key=_block_offset) - 1]

    def since(self, time_ms: int) -> int:
        """The offset of the first record in memory that is not older than *time_ms*."""
        at = bisect_left(self.blocks, time_ms, key=_block_last_ms)
        return self.next if at == len(self.blocks) else _since(self.blocks[at], time_ms)

    def knows(self, time_ms: int) -> bool:
        """Whether the first record that is not older than *time_ms* is in memory, if there is one."""
        blocks = self.blocks
        return self.first >= self.base or bool(blocks and blocks[0].first_ms < time_ms)

    def plan(self, batch: Batch, records: list[Record]) -> tuple[int, int]:
        """Add *records* to *batch*, after those that are there already: the offset after the last
        of them, and their bytes in the store."""
        if self._batch is not batch:
            self._batch = batch
            self._planned = self.next
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
        """What was planned is kept, or never will be."""
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


class Era(Struct, frozen=True, array_like=True):
    """A start of the broker, and where a log was then. New fields go to the end.

    A store that is restored from a backup goes on from an older place, and its records get offsets that others
    had before. These are of another era, so that a reader whose position is of an era that does not have it any
    more can see that.
    """

    id: str
    #: Of each partition the offset of the first record that is of this era or of a later one.
    starts: list[int]


class Appending:
    """Records that are written together, as part of a unit (broker.journal.Appended).

    Their offsets are given out when they are put into a batch: what is refused leaves no gap.
    """

    def __init__(self, log: MessageLog) -> None:
        self.log = log
        #: Partition → records.
        self.records: dict[Partition, list[Record]] = {}
        self.size = 0
        #: What is to be answered, and what is to be called then.
        self.answers: list[tuple[list[IncomingDelivery], Callable[[], None] | None]] = []
        #: It has been put into a batch: nothing is added any more.
        self.closed = False
        #: Partition → the offset after the last record, and bytes.
        self._plans: dict[Partition, tuple[int, int]] = {}
        self._kept = False

    def add(self, partition: Partition, record: Record) -> None:
        """One more record."""
        self.records.setdefault(partition, []).append(record)
        self.size += record.size

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
        """Show the records, which are on the disk, to the readers."""
        log = self.log
        self._give_room()
        for partition, records in self.records.items():
            partition.planned()
            if not log.deleted:
                partition.bytes += self._plans[partition][1]
                log.extend(partition, records)

    def accept(self) -> None:
        """Answer those who have sent the records, which are on the disk."""
        self._answer(accept)
        self.log.tell_of_room()

    def refused(self, error: Error) -> None:
        """There was no room for them: let those know who sent them."""
        log = self.log
        if log.reading is not None:
            count = sum(map(len, self.records.values()))
            log.reading.journal.log_refused(count, log.address, error, log.wall())
        self.undo()
        self._answer(partial(refuse, error=error))

    def undo(self) -> None:
        """They are not kept."""
        self.closed = True
        self._give_room()
        for partition in self.records:
            partition.planned()
        self.log.tell_of_room()

    def _give_room(self) -> None:
        self.log.pending -= self.size
        self.log.memory.held -= self.size

    def _answer(self, say: Callable[[IncomingDelivery], None]) -> None:
        # The log keeps this until records come again, and deliveries refer to their link.
        answers, self.answers = self.answers, []
        for deliveries, done in answers:
            for delivery in deliveries:
                say(delivery)
            if done is not None:
                done()


class MessageLog:
    """The partitions of one log, and who reads them.

    Args:
        memory: Shared account of bytes.
        wall: The wall clock.
        incarnation: Names this log, and no other that has its address later or had it before.
        numbers: The partitions' numbers in the store; zeros if they are in memory only.
        reading: Keeps records, and serves readers that are far behind; None if everything is in
            memory.
        max_age_s: Seconds after which records go, None for never.
        max_bytes: Bytes that a partition keeps, None for any number, or in memory for
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
        #: For what is logged.
        self.address = ""
        self.incarnation = incarnation
        self.reading = reading
        self.limits = limits
        self.partitions = [Partition(index, number, memory) for index, number in enumerate(numbers)]
        self.keep(max_age_s, max_bytes)
        self.counts = Counts()
        self.deleted = False
        #: It is out of service after an unexpected error, and looks deleted until the broker is started
        #: again. What was on its way to the disk is written.
        self.failed = False
        #: Nobody but the broker appends to it.
        self.sealed = False
        self.awaited = False
        self.on_room: Callable[[], None] = _nothing
        #: Called when readers have more to look at; :meth:`resume` is to be called soon.
        self.on_unfinished: Callable[[], None] = _nothing
        self.readers: dict[LogReader, None] = {}
        self._unfinished: dict[LogReader, None] = {}
        #: Bytes of records that wait for the disk, or for their transaction.
        self.pending = 0
        self._gathering: Appending | None = None
        self._gathered_in = Unit()
        #: Group → partition → the offset that it goes on at.
        self.cursors: dict[str, dict[int, int]] = {}
        #: Starts of the broker since which records were appended, the latest one last.
        self.eras: list[Era] = []
        #: Holder → partition → the offset from which on nothing is dropped, and until when.
        self.holds: dict[str, tuple[dict[int, int], float]] = {}
        #: Held while one of those is being written, so that none is made of what is out of date.
        self.noting = trio.Lock()

    async def restore(self) -> None:
        """Take up where the store ends.

        Raises:
            AmqpError: It cannot be read.
        """
        if self.reading is not None:
            for partition in self.partitions:
                await self.reading.restore(partition)

    def keep(self, max_age_s: float | None, max_bytes: int | None) -> None:
        """Keep records that long, and that many bytes of them, from now on."""
        self.max_age_s = max_age_s
        self.max_bytes = max_bytes
        if self.reading is None and max_bytes is None:
            self.max_bytes = self.limits.log_bytes_max
        self._block_bytes = min(_BLOCK_BYTES, (self.max_bytes or _BLOCK_BYTES * _PARTS) // _PARTS)
        self._block_ms = 86_400_000 if max_age_s is None else int(max_age_s * 1000) // _PARTS

    def begin_era(self, id_: str) -> None:
        """Count what is appended from now on to the era *id_*."""
        starts = [partition.next for partition in self.partitions]
        # No position is of an era without records. Kept, it would go on after a backup made now was
        # restored, and the records after that could not be told from those before.
        if self.eras and self.eras[-1].starts == starts:
            self.eras.pop()
        self.eras.append(Era(id_, starts))
        del self.eras[: -self.limits.log_eras_max]

    # --- What the host asks of every node ---

    @property
    def consumers(self) -> list[LogReader]:
        """Who reads."""
        return list(self.readers)

    @property
    def available(self) -> int:
        """Records that are there."""
        return sum(partition.next - partition.first for partition in self.partitions)

    @property
    def acquired(self) -> int:
        """Nobody takes a record away."""
        return 0

    @property
    def bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(partition.bytes for partition in self.partitions)

    def room(self) -> int:
        """How many more messages it can take."""
        free = min(self.memory.limit - self.memory.held, self.limits.queue_bytes_max - self.pending)
        return max(0, free // 1024)

    def fits(self, size: int) -> bool:
        """Whether a message of *size* bytes may still come in."""
        return (
            self.memory.held + size <= self.memory.limit
            and self.pending + size <= self.limits.queue_bytes_max
        )

    def tell_of_room(self) -> None:
        """Room has come: tell who waits for it."""
        if self.awaited:
            self.on_room()
        if self.memory.waiting:
            self.memory.tell()

    # --- Appending ---

    def extend(self, partition: Partition, records: list[Record]) -> None:
        """*records* are there now: let readers have them."""
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
        """Keep no more in memory than a tail, and nothing of that while memory is scarce."""
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
        """Drop from memory what retention does not keep. The block written to goes by age only."""
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
        """The time before which retention by age drops records."""
        return -1 if self.max_age_s is None else int((self.wall() - self.max_age_s) * 1000)

    def held_from(self, partition: Partition) -> int:
        """The offset from which on somebody holds the records of *partition*."""
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
        """Let *group* go on at *offsets*; without any it is unknown."""
        if offsets:
            self.cursors[group] = offsets
        else:
            self.cursors.pop(group, None)

    def set_hold(self, holder: str, held: tuple[dict[int, int], float] | None) -> None:
        """Keep for *holder* what it has *held*, which may be nothing."""
        if held is not None and held[0]:
            self.holds[holder] = held
        else:
            self.holds.pop(holder, None)

    def expire_holds(self) -> list[str]:
        """Forget the holds whose time is over; whose they were."""
        now = self.wall()
        gone = [holder for holder, (_, until) in self.holds.items() if until <= now]
        for holder in gone:
            del self.holds[holder]
        return gone

    async def retain(self) -> None:
        """Let the store drop what retention does not keep, in whole chunks.

        Raises:
            AmqpError: The store cannot be read, or has no room even for that.
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
        """Drop what is there and nobody holds, in whole chunks; how many records.

        Raises:
            AmqpError: The store cannot be read, or has no room even for that.
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
        """The store has dropped what was before *first*."""
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
        """Append *entries* with all that comes before the next batch is written, whoever sent it:
        each batch has one chunk of a partition. The unit that they are written in."""
        assert self.reading is not None
        appending = self._gathering
        new = appending is None or appending.closed or appending.size >= _GATHERED_BYTES
        if appending is None or new:
            appending = self._gathering = Appending(self)
            self._gathered_in = Unit(appending.refused)
        for entry in entries:
            appending.add(*entrance.record(entry))
        appending.answers.append((deliveries, done))
        unit = self._gathered_in
        if new:
            unit.append(appending)
            unit.then(appending.kept, None, self)
            unit.then(appending.accept)
            self.reading.journal.add(unit)
        return unit

    def join(self, partition: Partition, record: Record) -> None:
        """Append *record* with what else the journal's loose unit changes."""
        assert self.reading is not None
        unit = self.reading.journal.loose
        last = unit.appended[-1] if unit.appended else None
        if isinstance(last, Appending) and last.log is self:
            last.add(partition, record)
            return
        # What comes later is behind it.
        self._gathering = None
        appending = Appending(self)
        appending.add(partition, record)
        unit.append(appending)
        unit.then(appending.kept, appending.undo, self)
        unit.then(appending.accept)

    def sweep(self) -> None:
        """Drop what is too old, and give memory back that others need."""
        for partition in self.partitions:
            if self.reading is None:
                self._trim(partition)
            elif self.memory.scarce:
                self._evict(partition)
        self.tell_of_room()

    def delete(self) -> None:
        """The log is no more."""
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
        """A new reader of *partitions*, from *position* on in each of them; by default from what
        comes next. With *batches* it is sent many records in one message."""
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
        """Credit, room or records have come: send what there is, or give the credit back."""
        if reader.serving or self.deleted or reader.link is None:
            return
        reader.serving = True
        link = reader.link
        looks = _LOOKS
        try:
            idle = 0
            places = reader.places
            while idle < len(places) and looks > 0 and link.credit > 0 and link.writable:
                place = places[0]
                looked = self._read(reader, place, looks if reader.batches else min(looks, _RUN))
                idle = 0 if looked else idle + 1
                looks -= looked
                if len(places) > 1:
                    places.append(places.pop(0))
        finally:
            reader.serving = False
        if link.credit > 0 and link.writable:
            if looks <= 0:
                self._unfinished[reader] = None
                self.on_unfinished()
                return
            for place in reader.places:
                if not place.fetching:
                    place.partition.waiting[reader] = None
        if reader.filters is None:
            behind = reader.behind
            link.offer(-(-behind // _BLOCK_RECORDS) if reader.batches else behind)
        if (
            link.draining
            and not any(place.fetching for place in reader.places)
            and (link.credit <= 0 or link.writable)
        ):
            link.drained()

    def _read(self, reader: LogReader, place: Place, count: int) -> int:
        """Let *reader* look at up to *count* records at *place*; how many it did."""
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
        """Where the record at *place* is; None if it is not there yet, or is being fetched."""
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
        """Go on where readers had too much to look at; asked for by ``on_unfinished``."""
        unfinished, self._unfinished = self._unfinished, {}
        for reader in unfinished:
            self.serve(reader)

    def leave(self, reader: LogReader) -> None:
        """A reader's link is over."""
        self.readers.pop(reader, None)
        self._unfinished.pop(reader, None)
        for place in reader.places:
            place.partition.waiting.pop(reader, None)
            if self.reading is not None:
                self.reading.drop(place)


class Place:
    """Where a reader is in one partition."""

    __slots__ = ("blocks", "fetching", "offset", "partition", "seeking", "since_ms")

    def __init__(
        self, partition: Partition, offset: int, since_ms: int = -1, *, seeking: bool = False
    ) -> None:
        self.partition = partition
        #: Of the next record that it looks at.
        self.offset = offset
        #: Older records are passed over.
        self.since_ms = since_ms
        #: Where those end only the store knows.
        self.seeking = seeking
        #: The store is being asked.
        self.fetching = False
        #: What it said.
        self.blocks: deque[Block] = deque()


def _fetch(
    store: Store, number: int, offset: int, since_ms: int, seeking: bool, size_max: int
) -> tuple[int, list[Block]]:
    """Records from *offset* on, or from the first that is not older than *since_ms*: the offset to
    go on at, -1 if there is nothing there, and the blocks that follow."""
    if seeking:
        chunk = store.chunk_at(number, since_ms)
        if chunk is None:
            return -1, []
        blocks = [block_of(chunk)]
        return (_since(blocks[0], since_ms) if blocks[0].records else chunk.offset), blocks
    blocks = [block_of(chunk) for chunk in store.chunks(number, offset, size_max)]
    return max(offset, blocks[0].offset) if blocks else -1, blocks


class Reading:
    """What the logs of a broker have in the store: written, dropped, and read piece by piece.

    One piece is read at a time, for the readers in turn, so that what is committed never waits for
    more than that. What has been read is kept for its reader while there is room for it.
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
        #: Bytes of what was read and is kept.
        self.held = 0
        self._places: OrderedDict[Place, None] = OrderedDict()
        self._asked: deque[tuple[MessageLog, LogReader, Place]] = deque()
        self._work = trio.Event()

    def get(self, place: Place) -> Block | None:
        """The next block at *place*, if it has been read; the place is moved to it."""
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
        """Read what is at *place*; :meth:`MessageLog.serve` is called when it is there."""
        place.fetching = True
        self._asked.append((log, reader, place))
        self._work.set()

    def drop(self, place: Place) -> None:
        """Forget what was read for *place*."""
        self.held -= sum(block.size for block in place.blocks)
        place.blocks.clear()
        self._places.pop(place, None)

    async def restore(self, partition: Partition) -> None:
        """Set *partition* to where the store ends."""
        journal, store, number = self.journal, self.journal.store, partition.number
        partition.first, partition.next, partition.bytes = await journal.call(store.extent, number)
        if partition.first < partition.next:
            last = await journal.call(store.chunks, number, partition.next - 1, 1)
            if last:
                partition.last_ms = partition.latest_ms = last[-1].last_ms

    async def run(self) -> None:
        """Read what is asked for, until cancelled."""
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
        # With nothing there, all that there was when it was asked has been dropped, or is too old.
        place.offset = max(place.offset, end if offset < 0 else offset)
        place.blocks.extend(blocks)
        self.held += sum(block.size for block in blocks)
        self._places[place] = None
        while self.held > self.limits.log_cache_bytes_max and len(self._places) > 1:
            self.drop(next(iter(self._places)))
        log.serve(reader)

    async def retain(self, log: MessageLog, partition: Partition) -> tuple[int, int]:
        """Drop what *log* does not keep any more of *partition*, and no hold covers; the first offset
        that is left, and the bytes."""
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
        # While the store worked, a hold may have been placed on them, or the log deleted.
        keep = min(keep, log.held_from(partition))
        if keep > first and not log.deleted:
            return await self.trim(partition, keep)
        return first, size

    async def trim(self, partition: Partition, keep: int) -> tuple[int, int]:
        """Drop the chunks before *keep*; the first offset that is left, and the bytes."""
        journal, number = self.journal, partition.number
        await journal.keep(lambda unit: unit.trim(number, keep))
        first, _, size = await journal.call(journal.store.extent, number)
        return first, size


class LogReader:
    """A consumer of a log: the endpoint of a sending link."""

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
        #: It is sent batches of records.
        self.batches = batches
        self.places: list[Place] = []
        self.link: Any = None
        self.serving = False
        #: Called when the link is over.
        self.on_left: list[Callable[[], None]] = []

    @property
    def behind(self) -> int:
        """Records that it has not looked at."""
        return sum(max(0, place.partition.next - place.offset) for place in self.places)

    def give(self, partition: Partition, offset: int, record: Record) -> bool:
        """Send *record* if the filters let it pass; false if the link cannot go on."""
        payload = dress(partition.index, offset, record)
        if self.filters is not None and not self._wants(record, payload):
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
        """Send records of *block* from the index *start* on and before *end* in one message, as many as
        fit and the filters let pass; return the index of the first one that was not looked at.

        One that does not fit by itself is sent by itself.
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
        """Detach a link whose peer does not take a record of that size."""
        if self.link.attached:
            # To leave it out would look as if it had never been there.
            self.link.detach(Error("amqp:link:message-size-exceeded", error.description))

    def _wants(self, record: Record, payload: Payload) -> bool:
        whole = payload if isinstance(payload, bytes) else b"".join(payload)
        entry = Entry(whole, record.message_format)
        if record.message_format == MESSAGE_FORMAT:
            head = walk_head(whole)
            entry.durable = head.durable
            entry.priority = head.priority
            entry.first_acquirer = head.first_acquirer
            entry.delivery_count = head.delivery_count
        return bool(self.filters.matches(entry, record.publisher))

    # --- What the link says (fronts.base.SendingEndpoint) ---

    def on_attached(self, link: SendingLink) -> None:
        self.link = link

    def on_credit(self, link: SendingLink) -> None:
        if link.flow_properties is not None and "txn-id" in link.flow_properties:
            link.detach(Error("amqp:not-implemented", "who reads a log acquires nothing"))
        else:
            self.log.serve(self)

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        """Whatever it says, in a transaction or not, the record stays as it is (§3.5.2)."""
        for delivery in deliveries:
            if not delivery.settled and type(delivery.state) in _TERMINAL:
                delivery.settle(delivery.state)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self.log.leave(self)
        # Deliveries refer to their link, and what is called to this: no cycle is to keep the link.
        link.unsettled = []
        called, self.on_left = self.on_left, []
        for on_left in called:
            on_left()


def dress(partition: int, offset: int, record: Record) -> Payload:
    """What to send of *record*: its message, with its place in the message annotations.

    A message of a format that we do not know is sent as it is.
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


#: What comes before the values of the annotations above, which have the widest encoding each.
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
    """The message annotations of a record that has none of its own (§3.2.3).

    Written out, since every delivery of a log has them, and everything else about one costs less.
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
    # A map of ten items, whose size counts the octet that says so.
    return b"".join((_PLACE_OPENING, (len(said) + 1).to_bytes(), b"\x0a", said))


_PLACE_OPENING: Final = SECTION_OPENINGS[MESSAGE_ANNOTATIONS] + b"\xc1"


class Entrance:
    """The way in for one link, to one partition or to all in turn (broker.producers).

    It is where messages are put, and keeps them too (:class:`~amqp_rt.broker.producers.Ledger`).
    """

    def __init__(self, log: MessageLog, partition: int | None = None) -> None:
        self.log = log
        self._partition = partition
        self._turn = -1

    @property
    def deleted(self) -> bool:
        """There is no such log any more."""
        return self.log.deleted

    def fits(self, size: int) -> bool:
        """As the log says."""
        return self.log.fits(size)

    def record(self, entry: Entry) -> tuple[Partition, Record]:
        """What is kept of *entry*, and where."""
        partition = self._choose(entry)
        time_ms = partition.now(self.log.wall())
        return partition, Record(time_ms, entry.payload, entry.message_format, entry.publisher)

    def _choose(self, entry: Entry) -> Partition:
        partitions = self.log.partitions
        if self._partition is not None:
            return partitions[self._partition]
        count = len(partitions)
        if count == 1:
            return partitions[0]
        key = _key_of(entry, self.log.limits)
        if key is not None:
            return partitions[zlib.crc32(key) % count]
        self._turn = (self._turn + 1) % count
        return partitions[self._turn]

    def put(self, entry: Entry) -> None:
        """Append *entry*, in memory only."""
        if not self.log.deleted:
            partition, record = self.record(entry)
            self.log.extend(partition, [record])

    def hold(self, entry: Entry) -> None:
        """Give *entry* room: it may come when its transaction is discharged."""
        self.reserve(entry)

    def let_go(self, entry: Entry) -> None:
        """Take the room of a held *entry* back: it comes now, or :meth:`room_again` follows."""
        size = len(entry.payload) + _RECORD_COST
        self.log.pending -= size
        self.log.memory.held -= size

    def room_again(self) -> None:
        """Tell those who wait for room."""
        self.log.tell_of_room()

    def wants(self, entry: Entry) -> bool:
        """Everything is kept, whether or not it says that it is durable: offsets have no gaps."""
        return True

    def reserve(self, entry: Entry) -> None:
        """Give *entry* room; :meth:`stage` follows."""
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
        """Append *entries* once they are kept, and answer *deliveries* then, which brought them.

        *done* is called last, whatever became of them. *note* adds to the unit what is to be kept
        of the deliveries themselves.
        """
        unit = self.log.gather(self, entries, deliveries, done)
        if note is not None:
            note(unit, deliveries)

    def receive(self, entry: Entry) -> None:
        """Append *entry*, which is in the broker already and cannot be refused, once it is kept,
        together with what is changed next."""
        self.reserve(entry)
        self.log.join(*self.record(entry))


def _key_of(entry: Entry, limits: Limits) -> bytes | None:
    """The partition key of a message, if it has one."""
    if entry.message_format != MESSAGE_FORMAT:
        return None
    section = walk_head(entry.payload, limits).message_annotations
    key = read_annotations(section, limits).get(Symbol(PARTITION_KEY)) if section else None
    if isinstance(key, str):
        return key.encode("utf-8", "surrogatepass")
    return key if isinstance(key, bytes) else None


def _nothing() -> None:
    """Nobody wants to know."""
