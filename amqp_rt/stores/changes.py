"""Batches of changes to a store. Compiled: each durable message passes through one, when it is put and when it is removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from .errors import StoreRefused

if TYPE_CHECKING:
    from .base import Chunk

#: Highest sequence number of a node and highest node number: together 63 bits.
SEQUENCE_MAX: Final = 2**40 - 1
NODE_MAX: Final = 2**23 - 1
#: Bytes of one head, payload, piece, chunk or fact; and the highest index of a piece.
RECORD_MAX: Final = 64 * 1024 * 1024
PIECE_MAX: Final = 2**20 - 1
#: Bytes from which a payload shared by several messages of a batch counts once towards its size, and
#: should be written once. For smaller payloads the look-up costs more than writing them again.
SHARED_MIN: Final = 1024


class ChangeSet:
    """Changes that are committed as a whole or not at all, each place named at most once.

    A message that is put and removed before the batch is committed never reaches the store: if it is
    consumed while earlier batches are written, it costs nothing.

    Messages share a payload if it is the same object, as when one message is routed to several queues.
    """

    def __init__(self) -> None:
        #: place → head, payload, spilled
        self.puts: dict[tuple[int, int], tuple[bytes, bytes, bool]] = {}
        #: place → head
        self.updates: dict[tuple[int, int], bytes] = {}
        self.removes: set[tuple[int, int]] = set()
        #: place, index → data; of messages put in this batch or in a later one.
        self.pieces: dict[tuple[int, int, int], bytes] = {}
        #: (source place, target place, head): messages to move to another place.
        self.moves: list[tuple[tuple[int, int], tuple[int, int], bytes]] = []
        #: (kind, key) → value, None to delete the fact.
        self.facts: dict[tuple[str, bytes], bytes | None] = {}
        self.appends: list[tuple[int, Chunk]] = []
        #: log → offset; chunks that end at or before it are deleted.
        self.trims: dict[int, int] = {}
        #: Nodes whose messages and chunks are deleted.
        self.cleared: set[int] = set()
        #: Node, first and last sequence number of messages to delete.
        self.dropped: list[tuple[int, int, int]] = []
        #: Bytes to write; a shared payload counts once.
        self.size = 0
        #: Whether a message was put that is stored only to save memory.
        self.spills = False
        #: Whether a payload of ``SHARED_MIN`` bytes or more was put at several places.
        self.shares = False
        #: Payloads of at least ``SHARED_MIN`` bytes, by identity.
        self._large: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(
            self.puts
            or self.updates
            or self.removes
            or self.pieces
            or self.moves
            or self.facts
            or self.appends
            or self.trims
            or self.cleared
            or self.dropped
        )

    def put(
        self, node: int, sequence: int, head: bytes, payload: bytes, *, spilled: bool = False
    ) -> None:
        """Store a message.

        A *spilled* one is stored only to save memory, and deleted when the store is opened again.
        """
        self.puts[node, sequence] = (head, payload, spilled)
        if spilled:
            self.spills = True
        size = len(payload)
        if size >= SHARED_MIN:
            if id(payload) in self._large:
                self.shares = True
                size = 0
            else:
                self._large[id(payload)] = payload
        self.size += len(head) + size

    def piece(self, node: int, sequence: int, index: int, data: bytes) -> None:
        """Store a piece of the message that will be put, with an empty payload, at this place.

        Pieces whose message is never put are deleted when the store is opened.
        """
        self.pieces[node, sequence, index] = data
        self.size += len(data)

    def update(self, node: int, sequence: int, head: bytes) -> None:
        """Replace the head of a message."""
        place = node, sequence
        known = self.puts.get(place)
        if known is None:
            self.updates[place] = head
        else:
            self.puts[place] = (head, known[1], known[2])
        self.size += len(head)

    def remove(self, node: int, sequence: int) -> None:
        """Delete a message and its pieces."""
        place = node, sequence
        self.updates.pop(place, None)
        known = self.puts.pop(place, None)
        if known is None or not known[1]:
            # The message has pieces, or was put by an earlier batch.
            self.removes.add(place)
        else:
            self.size -= len(known[0])
            if not self.shares:
                self.size -= len(known[1])
                self._large.pop(id(known[1]), None)

    def move(self, node: int, sequence: int, to: int, to_sequence: int, head: bytes) -> None:
        """Move a message of an earlier batch, with its pieces, to another place, with a new head."""
        self.updates.pop((node, sequence), None)
        self.moves.append(((node, sequence), (to, to_sequence), head))
        self.size += len(head)

    def put_fact(self, kind: str, key: bytes, value: bytes) -> None:
        """Store a fact, replacing an earlier value of the same kind and key."""
        self.facts[kind, key] = value
        self.size += len(key) + len(value)

    def remove_fact(self, kind: str, key: bytes) -> None:
        """Delete a fact, if it exists."""
        self.facts[kind, key] = None
        self.size += len(key)

    def append(self, log: int, chunk: Chunk) -> None:
        """Append *chunk* to a log. It must begin at the log's next offset; the first one anywhere."""
        self.appends.append((log, chunk))
        self.size += len(chunk.data)

    def trim(self, log: int, offset: int) -> None:
        """Delete chunks of a log that end at or before *offset*."""
        self.trims[log] = max(offset, self.trims.get(log, 0))

    def clear(self, node: int) -> None:
        """Delete all messages, pieces and chunks of *node* and the end of its log, those of this batch
        included. Messages moved to other nodes before stay there."""
        self.cleared.add(node)
        self.removes.update(source for source, to, _ in self.moves if to[0] == node)
        self.moves = [move for move in self.moves if move[1][0] != node]
        self.puts = {place: put for place, put in self.puts.items() if place[0] != node}
        self.updates = {place: head for place, head in self.updates.items() if place[0] != node}
        self.removes = {place for place in self.removes if place[0] != node}
        self.pieces = {place: data for place, data in self.pieces.items() if place[0] != node}
        self.appends = [append for append in self.appends if append[0] != node]
        self.trims.pop(node, None)

    def drop(self, node: int, first: int, last: int) -> None:
        """Delete the messages of *node* with sequence numbers from *first* to *last* and their pieces,
        those of this batch included, but no moved ones. Takes no longer for many than for one."""

        def stays(place: tuple[int, ...]) -> bool:
            return place[0] != node or not first <= place[1] <= last

        self.dropped.append((node, first, last))
        self.puts = {place: put for place, put in self.puts.items() if stays(place)}
        self.updates = {place: head for place, head in self.updates.items() if stays(place)}
        self.removes = {place for place in self.removes if stays(place)}
        self.pieces = {place: data for place, data in self.pieces.items() if stays(place)}


def shared_bodies(
    payloads: Iterable[bytes], before: Mapping[int, tuple[bytes, int]], following: int
) -> tuple[dict[int, tuple[bytes, int]], int]:
    """Return the payloads that several messages share or that the batch before has written, and the next free number.

    Args:
        payloads: Those of the messages of a batch.
        before: What this function returned for the batch before.
        following: The next free number.

    Returns:
        Identity of a payload → the payload, which keeps the identity its own, and its number.
    """
    counts: dict[int, int] = {}
    large: dict[int, bytes] = {}
    for payload in payloads:
        if len(payload) >= SHARED_MIN:
            counts[id(payload)] = counts.get(id(payload), 0) + 1
            large[id(payload)] = payload
    shared: dict[int, tuple[bytes, int]] = {}
    for key, payload in large.items():
        if key in before:
            shared[key] = before[key]
        elif counts[key] > 1:
            shared[key] = payload, following
            following += 1
    return shared, following


def refuse(batch: ChangeSet) -> None:
    """Check that *batch* is within the limits of every store.

    Raises:
        StoreRefused: It is not.
    """
    for place, (head, payload, _) in batch.puts.items():
        if not (0 <= place[0] <= NODE_MAX and 0 <= place[1] <= SEQUENCE_MAX):
            raise StoreRefused(f"there is no place {place[0]}, {place[1]}")
        if len(payload) > RECORD_MAX or len(head) > RECORD_MAX:
            raise StoreRefused(
                f"a message of {len(payload)} bytes must be stored in pieces: a record holds at most "
                f"{RECORD_MAX}"
            )
    for (node, sequence, index), data in batch.pieces.items():
        if not (
            0 <= node <= NODE_MAX and 0 <= sequence <= SEQUENCE_MAX and 0 <= index <= PIECE_MAX
        ):
            raise StoreRefused(f"there is no piece {index} of place {node}, {sequence}")
        if not 0 < len(data) <= RECORD_MAX:
            raise StoreRefused(f"a piece has 1 to {RECORD_MAX} bytes, not {len(data)}")
    for _, (node, sequence), head in batch.moves:
        if not (0 <= node <= NODE_MAX and 0 <= sequence <= SEQUENCE_MAX) or len(head) > RECORD_MAX:
            raise StoreRefused(f"there is no place {node}, {sequence}")
    for log, chunk in batch.appends:
        if not (0 <= log <= NODE_MAX and 0 <= chunk.offset <= SEQUENCE_MAX - chunk.count):
            raise StoreRefused(f"there is no offset {chunk.offset} of log {log}")
        if chunk.count < 1 or len(chunk.data) > RECORD_MAX:
            raise StoreRefused(f"a chunk of {chunk.count} records and {len(chunk.data)} bytes")
    for head in batch.updates.values():
        if len(head) > RECORD_MAX:
            raise StoreRefused(f"a head of {len(head)} bytes")
    for key, value in batch.facts.items():
        if len(key[1]) > RECORD_MAX or len(value or b"") > RECORD_MAX:
            raise StoreRefused(f"a fact of {len(value or b'')} bytes")
