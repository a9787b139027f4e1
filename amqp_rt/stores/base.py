"""What a store does for a broker, and what it may be asked for.

A store knows four things and nothing about protocols or queues:

* **messages**, each at a place: the number of its node and its sequence number there;
* **pieces** of messages that are too large to be handed over whole;
* **logs**: chunks of records, each of which begins at an offset and is never changed;
* **facts**: small values by kind and key, such as declared nodes, bindings, the states of links,
  cursors of log readers, the epochs of idempotent producers, holds on a log.

Everything changes by :class:`Batch`, and a batch is kept whole or not at all: that is what settles a
transaction, moves a message from one node to another, and publishes what was staged under a node
that nobody sees. What came back from :meth:`Store.commit` survives the death of the process and of
the machine; whoever calls it has promised nothing before.

Methods block. A broker calls them from one worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from msgspec import Struct

from ..errors import AmqpError

__all__ = [
    "NODE_MAX",
    "PIECE_MAX",
    "RECORD_MAX",
    "SEQUENCE_MAX",
    "SHARED_MIN",
    "Batch",
    "Chunk",
    "Damage",
    "Head",
    "Opened",
    "Store",
    "StoreBusy",
    "StoreDamaged",
    "StoreFailed",
    "StoreFull",
    "StoreRefused",
    "Stored",
    "refuse",
]

#: Sequence numbers that one node can give out, and numbers of nodes: together 63 bits.
SEQUENCE_MAX: Final = 2**40 - 1
NODE_MAX: Final = 2**23 - 1
#: Bytes of one head, payload, piece, chunk or fact, and the highest index of a piece.
RECORD_MAX: Final = 64 * 1024 * 1024
PIECE_MAX: Final = 2**20 - 1
#: Bytes from which a payload that several messages of a batch share is counted, and should be written,
#: once. Below, looking it up costs more than writing it again.
SHARED_MIN: Final = 1024


class StoreFull(AmqpError):
    """There is no room for a batch. Nothing of it was kept; smaller ones may still be."""

    default_condition = "amqp:resource-limit-exceeded"


class StoreFailed(AmqpError):
    """Reading or writing failed. What a batch in flight came to is unknown until the store has been
    closed and opened again, which verifies it; until then it takes nothing more."""

    default_condition = "amqp:internal-error"


class StoreRefused(AmqpError):
    """A batch that no store can keep: a place or a record beyond what there can be, or a chunk that
    does not begin where its log ends. Nothing of it was kept."""

    default_condition = "amqp:not-allowed"


class StoreBusy(AmqpError):
    """Another process has the store."""

    default_condition = "amqp:resource-locked"


class StoreDamaged(AmqpError):
    """What was read is not what was written, and cannot be told from it."""

    default_condition = "amqp:internal-error"


class Stored(Struct, gc=False):
    """A message as it was put. ``payload`` is empty if it is kept in pieces."""

    sequence: int
    head: bytes
    payload: bytes
    #: How many pieces there are.
    pieces: int = 0
    #: The same positive number for messages whose payload is kept once for all of them; 0 if the store
    #: does not say.
    body: int = 0


class Head(Struct, gc=False):
    """What is known of a message without reading it."""

    sequence: int
    head: bytes
    #: Bytes of its payload, pieces included.
    size: int
    pieces: int = 0


class Chunk(Struct, gc=False):
    """Consecutive records of a log, as they were appended."""

    #: Offset of the first record, and how many there are.
    offset: int
    count: int
    #: Wall-clock time of the first and of the last record, in milliseconds.
    first_ms: int
    last_ms: int
    data: bytes


class Damage(Struct, frozen=True):
    """Something that could not be read, and was set aside."""

    #: What it is, such as ``"message"``, ``"chunk"``, ``"fact"`` or ``"page"``.
    what: str
    #: The node or log, -1 if unknown.
    node: int
    #: The first and the last sequence number or offset that may be concerned, -1 if unknown.
    first: int
    last: int
    #: Why it is thought to be damaged.
    reason: str


class Opened(Struct, frozen=True):
    """What a store found when it was opened."""

    #: The store was closed in good order.
    clean: bool
    #: What was lost; the rest is there.
    damage: tuple[Damage, ...] = ()
    #: Where what is damaged was put aside, for whoever wants to look at it.
    aside: str | None = None


class Batch:
    """Changes that are kept together or not at all, each place named at most once.

    What is put and removed before the batch is committed never reaches the store: a message that
    was consumed while its neighbours were written costs nothing.

    Several messages share a payload if it is the same object, as it is when a message goes to several
    queues.
    """

    def __init__(self) -> None:
        #: place → head, payload, spilled
        self.puts: dict[tuple[int, int], tuple[bytes, bytes, bool]] = {}
        #: place → head
        self.updates: dict[tuple[int, int], bytes] = {}
        self.removes: set[tuple[int, int]] = set()
        #: place, index → data; of messages that are put in this batch or in a later one.
        self.pieces: dict[tuple[int, int, int], bytes] = {}
        #: (from place, to place, head): whole messages that change their node.
        self.moves: list[tuple[tuple[int, int], tuple[int, int], bytes]] = []
        #: (kind, key) → value, None to forget it.
        self.facts: dict[tuple[str, bytes], bytes | None] = {}
        self.appends: list[tuple[int, Chunk]] = []
        #: log → offset; older chunks are dropped once all their records are.
        self.trims: dict[int, int] = {}
        #: Nodes whose messages and chunks go.
        self.cleared: set[int] = set()
        #: Node, first and last place of messages that go.
        self.dropped: list[tuple[int, int, int]] = []
        #: Bytes of what is to be written; a shared payload counts once.
        self.size = 0
        #: A payload of ``SHARED_MIN`` bytes or more was put at several places.
        self.shares = False
        #: The payloads of that size, by identity.
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
        """Keep a message. One that is *spilled* is here only to save memory: it is gone when the
        store is opened again."""
        self.puts[node, sequence] = (head, payload, spilled)
        size = len(payload)
        if size >= SHARED_MIN:
            if id(payload) in self._large:
                self.shares = True
                size = 0
            else:
                self._large[id(payload)] = payload
        self.size += len(head) + size

    def piece(self, node: int, sequence: int, index: int, data: bytes) -> None:
        """Keep a piece of the message that will be put, with an empty payload, at this place.

        Pieces whose message was never put are dropped when the store is opened.
        """
        self.pieces[node, sequence, index] = data
        self.size += len(data)

    def update(self, node: int, sequence: int, head: bytes) -> None:
        """Give a message another head."""
        place = node, sequence
        known = self.puts.get(place)
        if known is None:
            self.updates[place] = head
        else:
            self.puts[place] = (head, known[1], known[2])
        self.size += len(head)

    def remove(self, node: int, sequence: int) -> None:
        """Forget a message and its pieces."""
        place = node, sequence
        self.updates.pop(place, None)
        known = self.puts.pop(place, None)
        if known is None or not known[1]:
            # With pieces, or put by an earlier batch.
            self.removes.add(place)
        else:
            self.size -= len(known[0])
            if not self.shares:
                self.size -= len(known[1])
                self._large.pop(id(known[1]), None)

    def move(self, node: int, sequence: int, to: int, to_sequence: int, head: bytes) -> None:
        """Give a message that an earlier batch put, with its pieces, another place and head."""
        self.updates.pop((node, sequence), None)
        self.moves.append(((node, sequence), (to, to_sequence), head))
        self.size += len(head)

    def keep(self, kind: str, key: bytes, value: bytes) -> None:
        """Keep a fact, in place of what was known by this kind and key."""
        self.facts[kind, key] = value
        self.size += len(key) + len(value)

    def forget(self, kind: str, key: bytes) -> None:
        """Forget a fact, if it is known."""
        self.facts[kind, key] = None
        self.size += len(key)

    def append(self, log: int, chunk: Chunk) -> None:
        """Add to the end of a log: *chunk* begins where the last one ended, the first one of a log
        wherever it likes."""
        self.appends.append((log, chunk))
        self.size += len(chunk.data)

    def trim(self, log: int, offset: int) -> None:
        """Drop chunks of a log that end before *offset*."""
        self.trims[log] = max(offset, self.trims.get(log, 0))

    def clear(self, node: int) -> None:
        """Forget every message, piece and chunk of *node*, and where its log ended, those of this
        batch included. What was moved away before stays where it is now."""
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
        """Forget the messages of *node* at the places from *first* to *last* and their pieces, those
        of this batch included, but none that was moved. However many, it takes no longer than one."""

        def stays(place: tuple[int, ...]) -> bool:
            return place[0] != node or not first <= place[1] <= last

        self.dropped.append((node, first, last))
        self.puts = {place: put for place, put in self.puts.items() if stays(place)}
        self.updates = {place: head for place, head in self.updates.items() if stays(place)}
        self.removes = {place for place in self.removes if stays(place)}
        self.pieces = {place: data for place, data in self.pieces.items() if stays(place)}


def refuse(batch: Batch) -> None:
    """Look whether *batch* can be kept at all, whatever is in a store.

    Raises:
        StoreRefused: It cannot.
    """
    for place, (head, payload, _) in batch.puts.items():
        if not (0 <= place[0] <= NODE_MAX and 0 <= place[1] <= SEQUENCE_MAX):
            raise StoreRefused(f"there is no place {place[0]}, {place[1]}")
        if len(payload) > RECORD_MAX or len(head) > RECORD_MAX:
            raise StoreRefused(
                f"a message of {len(payload)} bytes: what exceeds {RECORD_MAX} is kept in pieces"
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


class Store(Protocol):
    """Keeps what batches say. ``check_store`` in :mod:`amqp_rt.testing.checks` is its definition."""

    def open(self) -> Opened:
        """Take hold of the store and verify it, thoroughly if it was not closed in good order.

        Raises:
            StoreBusy: Another process has it.
            StoreFailed: It cannot be read or written at all; the text says what to do.
            AmqpError: It was written by a later release.
        """

    def commit(self, batch: Batch) -> None:
        """Keep *batch*: it is on the disk when this returns.

        Raises:
            StoreFull: No room. Nothing of it was kept.
            StoreRefused: It cannot be kept at all. Nothing of it was.
            StoreFailed: What became of it is unknown.
        """

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        """Keys and values of a kind, in order of their keys."""

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        """Messages of *node* from the sequence number *first* on, in order: at most *count*, and no
        more after their payloads have reached *size_max* bytes. Pieces are not counted."""

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        """The messages of *node* at these places, as far as they exist, in the order asked for."""

    def heads(self, node: int, first: int = 0) -> Iterator[Head]:
        """What is known of every message of *node* from the sequence number *first* on, in order,
        without their payloads. Batches may be committed in between; whether it sees what they change
        is not said."""

    def summary(self, node: int) -> tuple[int, int, int, int]:
        """Messages of *node*, bytes of their payloads, and the first and last sequence number; -1
        for both if there are none."""

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        """A piece of a message; empty if there is none."""

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        """Chunks of *log* from the one that holds *offset* on, or the first after it; at least one
        if there is any, and no more after their data have reached *size_max* bytes."""

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        """The first chunk of *log* whose last record is not older than *time_ms*."""

    def extent(self, log: int) -> tuple[int, int, int]:
        """First offset, next offset and bytes of *log*; 0, 0, 0 if nothing was ever appended. The
        next offset is remembered when everything has been trimmed."""

    def tidy(self) -> bool:
        """Do a bounded piece of housekeeping, such as giving space back to the file system. Whether
        there is more of it to do.

        Raises:
            StoreFull, StoreFailed: As of :meth:`commit`.
        """

    def close(self) -> None:
        """Let go of it in good order."""
