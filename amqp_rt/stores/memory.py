"""Store in memory, for tests and simulations, and as the reference of a store's behaviour.

Nothing survives the process. Within it, the object stands for the disk: committed data is there
when it is opened again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Final

from .base import (
    SHARED_MIN,
    ChangeSet,
    Chunk,
    OpenResult,
    StoreBusy,
    Stored,
    StoredHead,
    StoreFailed,
    StoreFull,
    StoreRefused,
    refuse,
)

__all__ = ["MemoryStore"]

#: Stale entries of an index before it is rebuilt.
_STALE_MAX: Final = 1024


class _NodeMessages:
    """The messages of one node."""

    __slots__ = ("messages", "order")

    def __init__(self) -> None:
        #: sequence → head, payload, spilled
        self.messages: dict[int, tuple[bytes, bytes, bool]] = {}
        #: Sequence numbers in order, some of which may have been removed.
        self.order: list[int] = []

    def put(self, sequence: int, message: tuple[bytes, bytes, bool]) -> None:
        messages = self.messages
        if sequence not in messages:
            order = self.order
            if not order or order[-1] < sequence:
                order.append(sequence)
            elif order[bisect_left(order, sequence)] != sequence:
                insort(order, sequence)
        messages[sequence] = message

    def pop(self, sequence: int) -> tuple[bytes, bytes, bool] | None:
        message = self.messages.pop(sequence, None)
        if message is not None and len(self.order) > 2 * len(self.messages) + _STALE_MAX:
            self.order = sorted(self.messages)
        return message


class _LogChunks:
    """The chunks of one log."""

    __slots__ = ("chunks", "next")

    def __init__(self, first: int) -> None:
        self.chunks: list[Chunk] = []
        self.next = first


class MemoryStore:
    """:class:`~amqp_rt.stores.base.Store` that lasts as long as the object.

    Args:
        size_max: Bytes that it holds before it is full, for tests of a full disk. Batches without
            messages, pieces and chunks are always accepted.
    """

    def __init__(self, *, size_max: int | None = None) -> None:
        self.size_max = size_max
        #: Bytes of messages, pieces, chunks and facts; a shared payload counts once.
        self.size = 0
        #: identity of a payload of ``SHARED_MIN`` bytes or more → number of messages that share it
        self._sharers: dict[int, int] = {}
        self._open = False
        self._clean = True
        self._nodes: dict[int, _NodeMessages] = {}
        #: place → index → data
        self._pieces: dict[tuple[int, int], dict[int, bytes]] = {}
        self._facts: dict[str, dict[bytes, bytes]] = {}
        self._logs: dict[int, _LogChunks] = {}

    def open(self) -> OpenResult:
        if self._open:
            raise StoreBusy("the store is open already")
        for node in list(self._nodes):
            found = self._nodes[node].messages
            for sequence in [sequence for sequence, put in found.items() if put[2]]:
                self._remove(node, sequence)
        for node, sequence in list(self._pieces):
            if sequence not in self._node(node).messages:
                self._drop_pieces(node, sequence)
        clean, self._clean, self._open = self._clean, False, True
        return OpenResult(clean)

    def close(self) -> None:
        if self._open:
            self._open, self._clean = False, True

    def abandon(self) -> None:
        """Drop the lock as a crash of the process would: the store can be opened again, but is not clean."""
        self._open = False

    def _check(self) -> None:
        if not self._open:
            raise StoreFailed("the store is not open")

    def _node(self, node: int) -> _NodeMessages:
        return self._nodes.get(node) or _NodeMessages()

    # -- changes -----------------------------------------------------------------------------------

    def commit(self, batch: ChangeSet) -> None:
        self._check()
        refuse(batch)
        self._refuse_gaps(batch)
        if (
            self.size_max is not None
            and self.size + batch.size > self.size_max
            and (batch.puts or batch.pieces or batch.appends)
        ):
            raise StoreFull(
                f"{batch.size} bytes do not fit: {self.size} of {self.size_max} are used"
            )
        moved = [(to, head, self._take(*place)) for place, to, head in batch.moves]
        for node in batch.cleared:
            self._clear(node)
        for node, first, last in batch.dropped:
            for sequence in [each for each in self._node(node).messages if first <= each <= last]:
                self._remove(node, sequence)
        for (node, sequence, index), data in batch.pieces.items():
            known = self._pieces.setdefault((node, sequence), {})
            self.size += len(data) - len(known.get(index, b""))
            known[index] = data
        for (node, sequence), (head, payload, spilled) in batch.puts.items():
            self._put(node, sequence, head, payload, spilled)
        for (node, sequence), head in batch.updates.items():
            message = self._node(node).messages.get(sequence)
            if message is not None:
                self._put(node, sequence, head, message[1], message[2])
        for (node, sequence), head, taken in moved:
            if taken is not None:
                (_, payload, spilled), pieces = taken
                self._remove(node, sequence)
                self._put(node, sequence, head, payload, spilled)
                if pieces:
                    self._pieces[node, sequence] = pieces
                    self.size += sum(map(len, pieces.values()))
        for node, sequence in batch.removes:
            self._remove(node, sequence)
        self._keep_facts(batch)
        for log, chunk in batch.appends:
            found = self._logs.get(log)
            if found is None:
                found = self._logs[log] = _LogChunks(chunk.offset)
            found.chunks.append(chunk)
            found.next = chunk.offset + chunk.count
            self.size += len(chunk.data)
        for log, offset in batch.trims.items():
            found = self._logs.get(log)
            if found is not None:
                gone = bisect_right(
                    found.chunks, offset, key=lambda chunk: chunk.offset + chunk.count
                )
                self.size -= sum(len(chunk.data) for chunk in found.chunks[:gone])
                del found.chunks[:gone]

    def _refuse_gaps(self, batch: ChangeSet) -> None:
        ends: dict[int, int] = {
            log: found.next for log, found in self._logs.items() if log not in batch.cleared
        }
        for log, chunk in batch.appends:
            expected = ends.get(log, chunk.offset)
            if chunk.offset != expected:
                raise StoreRefused(f"log {log} goes on at offset {expected}, not {chunk.offset}")
            ends[log] = chunk.offset + chunk.count

    def _put(self, node: int, sequence: int, head: bytes, payload: bytes, spilled: bool) -> None:
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = _NodeMessages()
        known = found.messages.get(sequence)
        self._count(head, payload)
        if known is not None:
            self._discount(known)
        found.put(sequence, (head, payload, spilled))

    def _count(self, head: bytes, payload: bytes) -> None:
        """Add a message to ``size``."""
        self.size += len(head)
        if len(payload) < SHARED_MIN:
            self.size += len(payload)
            return
        sharers = self._sharers.get(id(payload), 0)
        self._sharers[id(payload)] = sharers + 1
        if not sharers:
            self.size += len(payload)

    def _discount(self, message: tuple[bytes, bytes, bool]) -> None:
        """Subtract a message from ``size``."""
        head, payload, _ = message
        self.size -= len(head)
        if len(payload) >= SHARED_MIN:
            sharers = self._sharers.pop(id(payload)) - 1
            if sharers:
                self._sharers[id(payload)] = sharers
                return
        self.size -= len(payload)

    def _remove(self, node: int, sequence: int) -> None:
        found = self._nodes.get(node)
        message = None if found is None else found.pop(sequence)
        if message is not None:
            self._discount(message)
        self._drop_pieces(node, sequence)

    def _drop_pieces(self, node: int, sequence: int) -> None:
        for data in self._pieces.pop((node, sequence), {}).values():
            self.size -= len(data)

    def _take(
        self, node: int, sequence: int
    ) -> tuple[tuple[bytes, bytes, bool], dict[int, bytes]] | None:
        message = self._node(node).messages.get(sequence)
        if message is None:
            return None
        pieces = self._pieces.get((node, sequence), {})
        self._remove(node, sequence)
        return message, pieces

    def _clear(self, node: int) -> None:
        for sequence in list(self._node(node).messages):
            self._remove(node, sequence)
        for place in [place for place in self._pieces if place[0] == node]:
            self._drop_pieces(*place)
        self._nodes.pop(node, None)
        log = self._logs.pop(node, None)
        if log is not None:
            self.size -= sum(len(chunk.data) for chunk in log.chunks)

    def _keep_facts(self, batch: ChangeSet) -> None:
        for (kind, key), value in batch.facts.items():
            facts = self._facts.setdefault(kind, {})
            known = facts.pop(key, None)
            if known is not None:
                self.size -= len(key) + len(known)
            if value is not None:
                facts[key] = value
                self.size += len(key) + len(value)

    # -- reading -----------------------------------------------------------------------------------

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        self._check()
        return sorted(self._facts.get(kind, {}).items())

    def _stored(self, node: int, sequence: int, message: tuple[bytes, bytes, bool]) -> Stored:
        pieces = 0 if message[1] else len(self._pieces.get((node, sequence), ()))
        return Stored(sequence, message[0], message[1], pieces)

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        self._check()
        found = self._node(node)
        stored: list[Stored] = []
        size = 0
        for at in range(bisect_left(found.order, first), len(found.order)):
            if len(stored) >= count or (stored and size >= size_max):
                break
            sequence = found.order[at]
            message = found.messages.get(sequence)
            if message is not None:
                stored.append(self._stored(node, sequence, message))
                size += len(message[1])
        return stored

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        self._check()
        found = self._node(node).messages
        return [
            self._stored(node, sequence, found[sequence])
            for sequence in sequences
            if sequence in found
        ]

    def heads(self, node: int, first: int = 0) -> Iterator[StoredHead]:
        self._check()
        found = self._node(node)
        for sequence in found.order[bisect_left(found.order, first) :]:
            message = found.messages.get(sequence)
            if message is not None:
                pieces = {} if message[1] else self._pieces.get((node, sequence), {})
                size = len(message[1]) + sum(map(len, pieces.values()))
                yield StoredHead(sequence, message[0], size, len(pieces))

    def summary(self, node: int) -> tuple[int, int, int, int]:
        heads = list(self.heads(node))
        if not heads:
            return 0, 0, -1, -1
        return len(heads), sum(head.size for head in heads), heads[0].sequence, heads[-1].sequence

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        self._check()
        return self._pieces.get((node, sequence), {}).get(index, b"")

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        self._check()
        found = self._logs.get(log)
        chunks: list[Chunk] = []
        if found is None:
            return chunks
        size = 0
        start = bisect_right(found.chunks, offset, key=lambda chunk: chunk.offset + chunk.count)
        for chunk in found.chunks[start:]:
            if chunks and size >= size_max:
                break
            chunks.append(chunk)
            size += len(chunk.data)
        return chunks

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        self._check()
        found = self._logs.get(log)
        chunks = [] if found is None else found.chunks
        return next((chunk for chunk in chunks if chunk.last_ms >= time_ms), None)

    def extent(self, log: int) -> tuple[int, int, int]:
        self._check()
        found = self._logs.get(log)
        if found is None:
            return 0, 0, 0
        first = found.chunks[0].offset if found.chunks else found.next
        return first, found.next, sum(len(chunk.data) for chunk in found.chunks)

    def tidy(self) -> bool:
        self._check()
        return False
