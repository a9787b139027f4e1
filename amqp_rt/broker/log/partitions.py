"""Partitions of a log: their offsets and newest records, and the places of readers in them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from ...fronts.base import SendingLink
from ...stores.base import ChangeSet
from ..queue.accounts import Memory
from .records import RECORD_COST, Block, Record, chunk_of, size_of

#: Records of a block; memory is released in whole blocks.
BLOCK_RECORDS: Final = 1_000
#: Bytes after which the records of one batch continue in another chunk.
_CHUNK_BYTES: Final = 1024 * 1024


class WaitingReader(Protocol):
    """Reader that waits for records, of a partition or from the store."""

    link: SendingLink | None
    #: Whether it has been removed from its log.
    left: bool

    def serve(self) -> None:
        """Send the records that it has credit for."""


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
        self.waiting: dict[WaitingReader, None] = {}
        #: The batch being assembled, and the offset of its next record.
        self._batch: ChangeSet | None = None
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
            size = len(record.payload) + RECORD_COST
            if (
                block is None
                or block.size + size > block_bytes
                or len(block.records) >= BLOCK_RECORDS
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

    def forget_before(self, offset: int) -> None:
        """Drop the blocks from memory whose records all come before *offset*."""
        self.forget(bisect_right(self.blocks, offset, key=_block_end))

    def find(self, offset: int) -> Block:
        """Return the block that contains *offset*, which is in memory."""
        return self.blocks[bisect_right(self.blocks, offset, key=_block_offset) - 1]

    def since(self, time_ms: int) -> int:
        """Return the offset of the first record in memory that is not older than *time_ms*."""
        at = bisect_left(self.blocks, time_ms, key=_block_last_ms)
        return self.next if at == len(self.blocks) else self.blocks[at].since(time_ms)

    def knows(self, time_ms: int) -> bool:
        """Return whether the first record not older than *time_ms* is in memory, if there is one."""
        blocks = self.blocks
        return self.first >= self.base or bool(blocks and blocks[0].first_ms < time_ms)

    def plan(self, batch: ChangeSet, records: list[Record]) -> tuple[int, int]:
        """Add *records* to *batch*, after those added before; return the offset after the last of
        them, and their bytes in the store."""
        if self._batch is not batch:
            self._batch = batch
            self._planned = self.next
        if size_of(records) <= _CHUNK_BYTES:
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

    def _append(self, batch: ChangeSet, records: list[Record]) -> int:
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


class ReaderPlace:
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
