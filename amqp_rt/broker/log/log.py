"""Logs: records are appended, read by their offsets, and never removed by their readers.

A log has partitions. In each of them offsets count from 0 without gaps, and the times at which records
were appended never decrease. A reader has positions and credit, and nothing else: its outcomes change
nothing (distribution-mode *copy*).

With a journal, each committed batch holds new chunks for the partitions that have new records, and a
record is neither delivered nor accepted before its chunk is on the disk. The newest records are in
memory too; readers further behind are served from the store piece by piece (:mod:`.storage`). Without
a journal everything is in memory, and records beyond the size of the log are dropped, oldest first.

Records are stored as they arrived. Their time to live is ignored: the log's retention decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final
from zlib import crc32

import trio

from ...fronts.base import IncomingDelivery
from ...limits import DEFAULT_LIMITS, Limits
from ..durable.facts import Era
from ..durable.units import Unit
from ..entries import Entry
from ..filtering.filters import FilterSet
from ..filtering.positions import Position
from ..queue.accounts import Counts, Memory
from ..queue.fullness import full_text, why_bytes, why_memory
from .appending import Appending, Entrance
from .cursors import Cursors, Holds
from .partitions import Partition, ReaderPlace
from .reading import LogReader
from .records import Record
from .storage import LogStorage

#: Bytes of a block; memory is released in whole blocks.
_BLOCK_BYTES: Final = 64 * 1024
#: Least number of blocks in a bound, of bytes or of age.
_PARTS: Final = 8
#: Bytes of records that are written together at most.
_GATHERED_BYTES: Final = 16 * 1024 * 1024


class MessageLog:
    """Log with its partitions and readers.

    Args:
        memory: Shared account of bytes.
        wall: The wall clock.
        incarnation: Name of this log, unlike that of any other log with its address, earlier or later.
        numbers: The partitions' numbers in the store; zeros if they are in memory only.
        storage: Writes records, and serves readers that are far behind; None if everything is in
            memory.
        max_age_s: Seconds after which records are dropped, None for never.
        max_bytes: Bytes that a partition keeps; None for no limit, or in memory for
            ``limits.log_bytes_max``.
        key_hash: Returns a number of a partition key, whose remainder is the partition.
        limits: Bounds.
    """

    #: Readers are served in turns anyway (:class:`~amqp_rt.broker.durable.journal.CallOwner`).
    gathering: Final = None

    def __init__(
        self,
        memory: Memory,
        wall: Callable[[], float],
        incarnation: str,
        numbers: Sequence[int],
        storage: LogStorage | None,
        *,
        max_age_s: float | None = None,
        max_bytes: int | None = None,
        key_hash: Callable[[bytes], int] = crc32,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.memory = memory
        self.wall = wall
        #: Address for log lines.
        self.address = ""
        self.incarnation = incarnation
        self.key_hash = key_hash
        self.storage = storage
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
        #: Readers that have more records to examine in a later turn.
        self.unfinished: dict[LogReader, None] = {}
        #: Whether :meth:`resume` has been requested for them.
        self._resumes = False
        #: Bytes of records that wait to be written, or for their transaction.
        self.pending = 0
        self._gathering: Appending | None = None
        self._gathered_in = Unit()
        self.cursors = Cursors()
        self.holds = Holds()
        #: Starts of the broker after which records were appended, the latest one last.
        self.eras: list[Era] = []
        #: Held while a cursor or hold is written, so that none is derived from outdated state.
        self.noting = trio.Lock()

    async def restore(self) -> None:
        """Restore the offsets, sizes and times of the partitions from the store.

        Raises:
            AmqpError: The store cannot be read.
        """
        if self.storage is not None:
            for partition in self.partitions:
                await self.storage.restore(partition)

    def keep(self, max_age_s: float | None, max_bytes: int | None) -> None:
        """Set the retention: keep records for *max_age_s* seconds, and *max_bytes* bytes of them."""
        self.max_age_s = max_age_s
        self.max_bytes = max_bytes
        if self.storage is None and max_bytes is None:
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

    def lags(self) -> Iterator[tuple[str, int]]:
        """Yield each group of readers with a cursor, and the number of records that it has not read."""
        for group, offsets in list(self.cursors.items()):
            yield (
                group,
                sum(
                    max(0, partition.next - max(offsets.get(partition.index, 0), partition.first))
                    for partition in self.partitions
                ),
            )

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

    def why_full(self, name: str, size: int) -> str:
        """Return why the log, whose name is *name*, has no room for a message of *size* bytes."""
        pending = why_bytes("queue_bytes_max", self.pending, size, self.limits.queue_bytes_max)
        return full_text("log", name, why_memory(self.memory, size), pending)

    def notify_waiting(self) -> None:
        """Notify the waiting senders of room."""
        if self.awaited:
            self.on_room()
        if self.memory.waiting:
            self.memory.notify_waiting()

    # --- Appending ---

    def extend(self, partition: Partition, records: list[Record]) -> None:
        """Append *records* in memory, and serve the readers that wait for them."""
        partition.extend(records, self._block_bytes, self._block_ms)
        self.counts.enqueued += len(records)
        if self.storage is None:
            partition.bytes = partition.held
            self._trim(partition)
        else:
            self._evict(partition)
        if partition.waiting:
            waiting, partition.waiting = partition.waiting, {}
            for reader in waiting:
                reader.serve()

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
        held = self.holds.first(partition.index, partition.next, self.wall())
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

    async def retain(self) -> None:
        """Drop records beyond the retention from the store, in whole chunks.

        Raises:
            AmqpError: The store cannot be read, or has no room even for this.
        """
        storage = self.storage
        if storage is None or (self.max_age_s is None and self.max_bytes is None):
            return
        for partition in self.partitions:
            keep, first, bytes_ = await storage.find_kept(
                partition, self.oldest_ms(), self.max_bytes
            )
            # While the store was read, a hold may have been set, or the log deleted.
            keep = min(keep, self.holds.first(partition.index, partition.next, self.wall()))
            if keep > first and not self.deleted:
                first, bytes_ = await storage.trim(partition, keep)
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
            keep = self.holds.first(partition.index, partition.next, self.wall())
            before = partition.first
            if self.storage is None:
                await trio.lowlevel.checkpoint()
                partition.forget_before(keep)
                partition.first, partition.bytes = partition.base, partition.held
            else:
                first, bytes_ = await self.storage.trim(partition, keep)
                self._shorten(partition, first, bytes_)
            dropped += partition.first - before
            self.counts.dropped += partition.first - before
        self.notify_waiting()
        return dropped

    def _shorten(self, partition: Partition, first: int, bytes_: int) -> None:
        """Set the beginning of *partition* to *first*: the store has dropped the records before it."""
        if first > partition.first and not self.deleted:
            partition.first, partition.bytes = first, bytes_
            partition.forget_before(first)
            self.notify_waiting()

    def gather(
        self,
        entrance: Entrance,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
    ) -> Unit:
        """Append *entries* together with those of other senders until the next batch is written: each
        batch has its records of a partition together. Return the unit in which they are written."""
        assert self.storage is not None
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
            self.storage.journal.add(unit)
        return unit

    def join(self, partition: Partition, records: list[Record]) -> None:
        """Append *records* together with the other changes of the journal's loose unit."""
        assert self.storage is not None
        unit = self.storage.journal.loose
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
            if self.storage is None:
                self._trim(partition)
            elif self.memory.scarce:
                self._evict(partition)
        self.notify_waiting()

    def delete(self) -> None:
        """Mark the log as deleted, release its memory and remove its readers."""
        self.deleted = True
        for partition in self.partitions:
            partition.forget(len(partition.blocks))
            partition.waiting.clear()
        for reader in list(self.readers):
            self.leave(reader)
        self.unfinished.clear()

    # --- Reading ---

    def subscribe(
        self,
        partitions: Sequence[int],
        position: Position | None,
        *,
        settled: bool = False,
        filters: FilterSet | None = None,
        batches: bool = False,
    ) -> LogReader:
        """Return a new reader of *partitions*, from *position* in each of them; by default from the
        next record on. With *batches*, each message to it may hold many records."""
        reader = LogReader(self, settled=settled, filters=filters, batches=batches)
        self.add_reader(reader, partitions, position)
        return reader

    def add_reader(
        self, reader: LogReader, partitions: Sequence[int], position: Position | None
    ) -> None:
        """Let *reader*, a new one, read *partitions* from *position* in each of them; by default from
        the next record on."""
        reader.places = [
            self._place(self.partitions[index], position or Position("next"))
            for index in partitions
        ]
        self.readers[reader] = None

    def _place(self, partition: Partition, position: Position) -> ReaderPlace:
        kind = position.kind
        value = position.value if position.inclusive else position.value + 1
        if kind == "first":
            return ReaderPlace(partition, partition.first)
        if kind == "next":
            return ReaderPlace(partition, partition.next)
        if kind == "last":
            return ReaderPlace(partition, max(partition.first, partition.next - 1))
        if kind in ("offset", "sequence-number"):
            return ReaderPlace(partition, max(partition.first, value))
        time_ms = int(self.wall() * 1000) - value if kind == "age" else value
        if self.storage is None or partition.knows(time_ms):
            return ReaderPlace(partition, partition.since(time_ms), time_ms)
        return ReaderPlace(partition, partition.first, time_ms, seeking=True)

    def resume(self) -> None:
        """Continue serving readers that had too many records to examine; see ``on_unfinished``."""
        self._resumes = False
        unfinished, self.unfinished = self.unfinished, {}
        waiting: dict[LogReader, None] = {}
        for reader in unfinished:
            if reader.filters is not None and self.memory.work <= 0:
                waiting[reader] = None
            else:
                reader.serve()
        if waiting:
            # They come first in the next turn.
            self.unfinished = waiting | self.unfinished
            self.resume_later()

    def resume_later(self) -> None:
        """Request a call of :meth:`resume`."""
        if not self._resumes:
            self._resumes = True
            self.on_unfinished()

    def leave(self, reader: LogReader) -> None:
        """Remove *reader*, whose link has ended."""
        reader.left = True
        self.readers.pop(reader, None)
        self.unfinished.pop(reader, None)
        for place in reader.places:
            place.partition.waiting.pop(reader, None)
            if self.storage is not None:
                self.storage.drop(place)


def _nothing() -> None:
    """Do nothing: default of the callbacks."""
