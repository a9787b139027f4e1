"""Storage of a broker's logs: the reads for readers that are far behind, and removal."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

import trio

from ...errors import AmqpError
from ...limits import Limits
from ...outcomes import Error
from ...stores.base import Store
from ..durable.journal import Journal
from .partitions import Partition, ReaderPlace, WaitingReader
from .records import Block, block_of

_log = logging.getLogger("amqp_rt.broker")


class LogStorage:
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
        self._places: OrderedDict[ReaderPlace, None] = OrderedDict()
        self._asked: deque[tuple[object, WaitingReader, ReaderPlace]] = deque()
        self._work = trio.Event()

    def get(self, place: ReaderPlace) -> Block | None:
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

    def ask(self, log: object, reader: WaitingReader, place: ReaderPlace) -> None:
        """Read the records at *place*; *reader* is served when they are available."""
        place.fetching = True
        self._asked.append((log, reader, place))
        self._work.set()

    def drop(self, place: ReaderPlace) -> None:
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
                if not reader.left:
                    try:
                        await self._read(reader, place)
                    except Exception as error:
                        self._on_fault(log, error)
            self._work = trio.Event()
            await self._work.wait()

    async def _read(self, reader: WaitingReader, place: ReaderPlace) -> None:
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
            if reader.link is not None:
                reader.link.detach(Error.of(error))
            return
        place.fetching = place.seeking = False
        if reader.left:
            return
        # If there are none, all records that existed at the request were dropped, or are too old.
        place.offset = max(place.offset, end if offset < 0 else offset)
        place.blocks.extend(blocks)
        self.held += sum(block.size for block in blocks)
        self._places[place] = None
        while self.held > self.limits.log_cache_bytes_max and len(self._places) > 1:
            self.drop(next(iter(self._places)))
        reader.serve()

    async def find_kept(
        self, partition: Partition, oldest_ms: int, max_bytes: int | None
    ) -> tuple[int, int, int]:
        """Find the first offset of *partition* to keep: records before it are older than *oldest_ms*, or
        beyond *max_bytes*. Return it with the first offset, and the bytes."""
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
        return keep, first, size

    async def trim(self, partition: Partition, keep: int) -> tuple[int, int]:
        """Drop the chunks before *keep*; return the first remaining offset, and the bytes."""
        journal, number = self.journal, partition.number
        await journal.write(lambda unit: unit.trim(number, keep))
        first, _, size = await journal.call(journal.store.extent, number)
        return first, size


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
        return (blocks[0].since(since_ms) if blocks[0].records else chunk.offset), blocks
    blocks = [block_of(chunk) for chunk in store.chunks(number, offset, size_max)]
    return max(offset, blocks[0].offset) if blocks else -1, blocks
