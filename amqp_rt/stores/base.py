"""The interface between a broker and its store.

A store holds four kinds of data and knows nothing about protocols or queues:

* **messages**, each at a place: the number of its node and its sequence number there;
* **pieces** of messages that are too large to be passed as a whole;
* **logs**: chunks of records, each of which begins at an offset and is never changed;
* **facts**: small values by kind and key, such as declared nodes, bindings, the states of links,
  cursors of log readers, the epochs of idempotent producers, holds on a log.

All changes are made by a :class:`ChangeSet`, which is committed as a whole or not at all. Committing a
transaction, moving a message from one node to another and publishing messages staged under a hidden
node rely on this. A batch that :meth:`Store.commit` has returned from survives a crash of the process
and of the machine; callers confirm nothing before.

Methods block. A broker calls them from one worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

from msgspec import Struct

from .changes import (
    NODE_MAX,
    PIECE_MAX,
    RECORD_MAX,
    SEQUENCE_MAX,
    SHARED_MIN,
    ChangeSet,
    refuse,
    shared_bodies,
)
from .errors import StoreBusy, StoreDamaged, StoreFailed, StoreFull, StoreLost, StoreRefused

__all__ = [
    "NODE_MAX",
    "PIECE_MAX",
    "RECORD_MAX",
    "SEQUENCE_MAX",
    "SHARED_MIN",
    "ChangeSet",
    "Chunk",
    "Damage",
    "OpenResult",
    "SharedStore",
    "Store",
    "StoreBusy",
    "StoreDamaged",
    "StoreFailed",
    "StoreFull",
    "StoreLost",
    "StoreRefused",
    "Stored",
    "StoredHead",
    "refuse",
    "shared_bodies",
]


class Stored(Struct, gc=False):
    """Message as it was put. ``payload`` is empty if it is stored in pieces."""

    sequence: int
    head: bytes
    payload: bytes
    #: Number of pieces.
    pieces: int = 0
    #: Positive number shared by the messages whose payload is stored once for all of them; 0 if unknown.
    body: int = 0


class StoredHead(Struct, gc=False):
    """Message without its payload."""

    sequence: int
    head: bytes
    #: Bytes of its payload, pieces included.
    size: int
    pieces: int = 0


class Chunk(Struct, gc=False):
    """Consecutive records of a log, as they were appended."""

    #: Offset of the first record, and the number of records.
    offset: int
    count: int
    #: Wall-clock times of the first and of the last record, in milliseconds.
    first_ms: int
    last_ms: int
    data: bytes


class Damage(Struct, frozen=True):
    """Data that could not be read, and was put aside."""

    #: Kind of data, such as ``"message"``, ``"chunk"``, ``"fact"`` or ``"page"``.
    what: str
    #: The node or log, -1 if unknown.
    node: int
    #: First and last sequence number or offset that may be affected, -1 if unknown.
    first: int
    last: int
    #: Reason for regarding it as damaged.
    reason: str


class OpenResult(Struct, frozen=True):
    """Result of opening a store."""

    #: Whether the store had been closed cleanly.
    clean: bool
    #: Lost data; all other data is available.
    damage: tuple[Damage, ...] = ()
    #: Path of the damaged store, which was put aside for inspection.
    aside: str | None = None


class Store(Protocol):
    """Storage of batches. ``check_store`` in :mod:`amqp_rt.testing.checks` is its specification."""

    def open(self) -> OpenResult:
        """Lock the store and verify it, completely if it was not closed cleanly.

        Raises:
            StoreBusy: Another process has it open.
            StoreFailed: It cannot be read or written at all; the text has the remedy.
            AmqpError: It was written by a later release.
        """

    def commit(self, batch: ChangeSet) -> None:
        """Commit *batch*, which is on the disk when this returns.

        Raises:
            StoreFull: There is no room. Nothing was stored.
            StoreRefused: The batch cannot be stored by any store. Nothing was stored.
            StoreFailed: Whether the batch was stored is unknown.
        """

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        """Return keys and values of a kind, in order of the keys."""

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        """Return messages of *node* from the sequence number *first* on, in order: at most *count*, and
        no more once their payloads have reached *size_max* bytes. Pieces are not counted."""

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        """Return the existing messages of *node* at *sequences*, in the given order."""

    def heads(self, node: int, first: int = 0) -> Iterator[StoredHead]:
        """Yield the heads of all messages of *node* from the sequence number *first* on, in order.

        Batches may be committed in between; whether their changes are seen is unspecified.
        """

    def summary(self, node: int) -> tuple[int, int, int, int]:
        """Return the number of messages of *node*, the bytes of their payloads, and the first and last
        sequence number, both -1 without messages."""

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        """Return a piece of a message; empty if there is none."""

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        """Return chunks of *log* from the one that holds *offset* on, or the first after it; at least
        one if there is any, and no more once their data have reached *size_max* bytes."""

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        """Return the first chunk of *log* whose last record is not older than *time_ms*."""

    def extent(self, log: int) -> tuple[int, int, int]:
        """Return first offset, next offset and bytes of *log*; 0, 0, 0 if nothing was ever appended.

        The next offset is kept when all records have been trimmed.
        """

    def tidy(self) -> bool:
        """Do a bounded amount of housekeeping, such as returning space to the file system; return
        whether more is left.

        Raises:
            StoreFull, StoreFailed: As of :meth:`commit`.
        """

    def close(self) -> None:
        """Close the store cleanly."""


@runtime_checkable
class SharedStore(Store, Protocol):
    """Store that several brokers may be started on, of which one at a time uses it.

    :meth:`open` raises :class:`StoreBusy` while another broker uses it, and is called again until it
    succeeds. Every method may raise :class:`StoreLost`: then another broker uses it from now on, or may do so.
    """

    #: Called in any thread when the store was lost while no method was running; :meth:`rejoin` follows.
    on_disconnected: Callable[[], None] | None

    def rejoin(self) -> None:
        """Continue with the store, if it was lost and no other broker has used it in the meantime.

        Raises:
            StoreLost: It cannot be used any more.
        """
