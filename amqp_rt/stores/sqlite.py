"""Durable store: one SQLite file, written through apsw. :mod:`.sqlite_files` opens and keeps the file.

A commit is on the disk when it returns (WAL, ``synchronous=FULL``; there is no other mode). Every
page carries a checksum (:mod:`.pages`). A store that was not closed cleanly is verified when it is
opened. A damaged store is put aside, readable data is copied to a new one, and lost data is listed
(:mod:`.salvage`). ``docs/decisions/0015`` lists the kinds of damage that are detected.

The node and the sequence number of a message form the key of its row, ``node << 40 | sequence``, so
that messages of one node are stored together. Large deletions, such as a node of a million messages
or a message of a gigabyte, are only recorded in the commit and done by :meth:`SQLiteStore.tidy` in steps.

A payload that several messages share is written once, as the only piece of a body to which each of
them refers, and is deleted with the last of them (``docs/decisions/0031``).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import apsw

from ..errors import AmqpError
from .base import (
    PIECE_MAX,
    SEQUENCE_MAX,
    ChangeSet,
    Chunk,
    OpenResult,
    StoreBusy,
    Stored,
    StoreDamaged,
    StoredHead,
    StoreFailed,
    StoreFull,
    StoreRefused,
    refuse,
    shared_bodies,
)
from .pages import PageDamaged
from .sqlite_files import StoreFile, described, reason_of

__all__ = ["SQLiteStore"]

_log = logging.getLogger("amqp_rt.store")

#: Bits of a sequence number and of the index of a piece.
_BITS: Final = SEQUENCE_MAX.bit_length()
_PIECE_BITS: Final = PIECE_MAX.bit_length()

#: Value of ``pieces`` if the payload is the first piece of a body that several messages may share.
_SHARED: Final = -1
#: Rows and bytes deleted in one step; the rows also bound the heads read at a time.
_STEP_ROWS: Final = 1000
_STEP_BYTES: Final = 4 * 1024 * 1024
#: Free pages that a store may have, and the number released in one step.
_FREE_PAGES: Final = 1024
_VACUUM_PAGES: Final = 256
#: Kinds of rows that can be cleared.
_MESSAGES: Final = 0
_CHUNKS: Final = 1
#: Error numbers of the operating system for a full disk.
_NO_ROOM: Final = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

_Row = tuple[Any, ...]

#: Messages of one statement. apsw lets other threads run at each step of a statement, and then has to wait for the
#: interpreter: one statement for each message would be slow while the event loop is busy.
_BLOCKS: Final = (128, 16, 4, 1)
#: Columns of a message.
_COLUMNS: Final = 5
_INSERTS: Final = {
    (table, count): f"INSERT OR REPLACE INTO {table} VALUES {rows}"  # noqa: S608
    for table in ("messages", "spilled")
    for count, rows in ((each, ", ".join(["(?, ?, ?, ?, ?)"] * each)) for each in _BLOCKS)
}


class SQLiteStore:
    """:class:`~amqp_rt.stores.base.Store` in the file *path*, with ``-wal``, ``.lock`` and other files
    beside it while it is open.

    Args:
        path: Path of the file. The file is created if it does not exist; its folder must exist.
        vfs: SQLite's name of the underlying VFS, for tests of failures.
    """

    def __init__(self, path: str | os.PathLike[str], *, vfs: str = "") -> None:
        self._file = StoreFile(path, vfs)
        self.path = self._file.path
        #: Reason why the store accepts no more calls.
        self._failed = ""
        #: Whether damaged data was read; the store must be verified when it is opened next.
        self._damaged = False
        self._forget()

    def _forget(self) -> None:
        #: kind, node → first and last sequence number of rows that are cleared but not deleted yet
        self._cleared: dict[tuple[int, int], tuple[int, int]] = {}
        #: Logs with chunks that are trimmed but not deleted yet.
        self._trimmed: set[int] = set()
        self._has_bodies = False
        self._next_body = 0
        #: identity → payload and body, of payloads shared in the last batch with messages: a message
        #: that is routed to many queues may take several batches.
        self._shared: dict[int, tuple[bytes, int]] = {}
        self._spilling = False

    def size_on_disk(self) -> int:
        """Return the bytes of the file and of its write-ahead log. May be called from any thread."""
        size = 0
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            try:
                size += path.stat().st_size
            except OSError:
                continue
        return size

    def __repr__(self) -> str:
        return f"<SQLiteStore {str(self.path)!r}>"

    # -- opening and closing -----------------------------------------------------------------------

    def open(self) -> OpenResult:
        if self._file.is_open:
            raise StoreBusy(f"{self.path} is open already")
        self._file.acquire()
        try:
            return self._open()
        except (apsw.Error, OSError) as error:
            self._release_resources()
            reason = reason_of(error, self.path)
            raise StoreFailed(f"{self.path} cannot be opened: {reason}") from error
        except BaseException:
            self._release_resources()
            raise

    def _open(self) -> OpenResult:
        self._failed, self._damaged = "", False
        opened = self._file.open()
        self._load()
        self._drop_orphans()
        for damage in opened.damage:
            _log.error("%s: %s", self.path, described(damage))
        if opened.aside is not None:
            _log.error("%s was damaged; the damaged file is kept as %s", self.path, opened.aside)
        return opened

    def _load(self) -> None:
        """Read the state kept in memory from the store."""
        db = self._file.connection
        spilling = self._spilling
        self._forget()
        self._spilling = spilling
        for key, first, last in db.execute("SELECT id, first, last FROM cleared"):
            self._cleared[key & 1, key >> 1] = (first, last)
        self._trimmed = set(
            _column(
                db,
                "SELECT log FROM logs WHERE EXISTS (SELECT 1 FROM chunks WHERE place >= log << 40"
                " AND place < log << 40 | first)",
            )
        )
        top_piece, top_body, top_dead = db.execute(
            "SELECT (SELECT max(id) FROM pieces), (SELECT max(body) FROM bodies),"
            " (SELECT max(last) FROM dead)"
        ).fetchone() or (None, None, None)
        self._has_bodies = top_body is not None
        self._next_body = 1 + max(
            (top_piece or 0) >> _PIECE_BITS, top_body or 0, (top_dead or 0) >> _PIECE_BITS
        )

    def _drop_orphans(self) -> None:
        """Delete bodies of messages that were never put, or were only spilled."""
        db = self._file.connection
        orphans = list(
            _column(
                db,
                "SELECT place FROM bodies WHERE NOT EXISTS"
                " (SELECT 1 FROM messages WHERE messages.place = bodies.place)",
            )
        )
        if orphans:
            with db:
                db.executemany("DELETE FROM bodies WHERE place = ?", [(each,) for each in orphans])

    def close(self) -> None:
        if not self._file.is_open:
            return
        try:
            if not self._failed and not self._damaged:
                self._file.close()
        except (apsw.Error, OSError) as error:
            # The store is not marked as clean, and will be verified when it is opened.
            _log.error("%s could not be closed in good order: %s", self.path, error)
        finally:
            self._release_resources()

    def _release_resources(self) -> None:
        """Release all resources without writing to the database."""
        self._forget()
        self._file.release()

    # -- failures ----------------------------------------------------------------------------------

    def _usable(self) -> apsw.Connection:
        db = self._file.connection
        if self._failed:
            raise StoreFailed(f"{self.path} has to be opened again: {self._failed}")
        return db

    def _refused(self, error: apsw.Error) -> AmqpError:
        """Roll back after *error* in a batch or in housekeeping; return the exception to raise."""
        db = self._file.connection
        full = isinstance(error, apsw.FullError) or (
            isinstance(error, apsw.IOError) and db.system_errno in _NO_ROOM
        )
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if full:
                self._load()
                self._file.release_reserve()
                return StoreFull(f"there is no room for {self.path}: {error}")
        except apsw.Error as worse:
            error = worse
        self._failed = str(error) or type(error).__name__
        return StoreFailed(f"{self.path} cannot be written: {self._failed}")

    def _unreadable(self, error: apsw.Error) -> AmqpError:
        self._damaged = True
        if isinstance(error, PageDamaged | apsw.CorruptError | apsw.NotADBError):
            return StoreDamaged(f"{self.path}: {error}; reopening it salvages the readable data")
        self._failed = str(error) or type(error).__name__
        return StoreFailed(f"{self.path} cannot be read: {self._failed}")

    def _rows(self, sql: str, bindings: _Row = ()) -> list[_Row]:
        try:
            return self._usable().execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._unreadable(error) from error

    # -- changes -----------------------------------------------------------------------------------

    def commit(self, batch: ChangeSet) -> None:
        db = self._usable()
        refuse(batch)
        if not batch:
            return
        # Facts are small and hold the positions of readers: they are accepted as long as possible.
        adds = batch.puts or batch.pieces or batch.appends
        file = self._file
        if file.full and adds:
            file.reserve()
        try:
            if file.full and adds and not file.has_room(batch.size):
                raise StoreFull(f"there is no room for {self.path}: {file.shortage()}")
            if batch.spills and not self._spilling:
                file.attach_spill()
                self._spilling = True
            db.execute("BEGIN IMMEDIATE")
            self._write(db, batch)
            db.execute("COMMIT")
            file.checkpoint_if_due()
        except apsw.Error as error:
            raise self._refused(error) from error
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
                self._load()
            raise

    def _write(self, db: apsw.Connection, batch: ChangeSet) -> None:
        moves = [
            (_place(*source), _place(*to), to, head)
            for source, to, head in batch.moves
            if not self._is_gone(*source)
        ]
        for at, (source, _, _, _) in enumerate(moves):
            # Moved out of the way first, since the source node may be cleared in the same batch.
            self._rename(db, source, -1 - at)
        for node in batch.cleared:
            self._clear(db, node)
        for node, start, end in batch.dropped:
            self._drop(db, node, start, end)
        if self._cleared:
            for (node, sequence), *_ in chain(
                ((place, put) for place, put in batch.puts.items()),
                ((place[:2], data) for place, data in batch.pieces.items()),
                ((to, head) for _, _, to, head in moves),
            ):
                self._reclaim(db, _MESSAGES, node, sequence)
            for log, chunk in batch.appends:
                self._reclaim(db, _CHUNKS, log, chunk.offset)
        if batch.pieces:
            self._put_pieces(db, batch.pieces)
        # Before messages are put, which get the pages that this frees: half as many pages are written.
        removed = _runs(node << _BITS | sequence for node, sequence in batch.removes)
        for table in self._tables() if removed else ():
            _delete(db, table, removed)
        if batch.puts:
            self._put(db, batch)
        if batch.updates:
            updates = [
                (head, _place(*place))
                for place, head in batch.updates.items()
                if not self._is_gone(*place)
            ]
            for table in self._tables():
                db.executemany(f"UPDATE {table} SET head = ? WHERE place = ?", updates)  # noqa: S608
        for at, (_, place, _, head) in enumerate(moves):
            self._rename(db, -1 - at, place)
            for table in self._tables():
                db.execute(f"UPDATE {table} SET head = ? WHERE place = ?", (head, place))  # noqa: S608
        if removed and self._has_bodies:
            # After pieces of the same batch: the message that they belong to may have been given up.
            _delete(db, "bodies", removed)
        for (kind, key), value in batch.facts.items():
            if value is None:
                db.execute("DELETE FROM facts WHERE kind = ? AND key = ?", (kind, key))
            else:
                db.execute(
                    "INSERT INTO facts (kind, key, value) VALUES (?, ?, ?)"
                    " ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value",
                    (kind, key, value),
                )
        for log, chunk in batch.appends:
            self._append(db, log, chunk)
        for log, offset in batch.trims.items():
            self._trim(db, log, offset)

    def _tables(self) -> tuple[str, ...]:
        """Return the tables that hold messages."""
        return ("messages", "spilled") if self._spilling else ("messages",)

    def _rename(self, db: apsw.Connection, place: int, to: int) -> None:
        for table in (*self._tables(), "bodies"):
            db.execute(f"UPDATE OR REPLACE {table} SET place = ? WHERE place = ?", (to, place))  # noqa: S608

    def _put(self, db: apsw.Connection, batch: ChangeSet) -> None:
        puts = batch.puts
        #: Values of rows, one after the other.
        durable: list[Any] = []
        spilled: list[Any] = []
        sharers: list[_Row] = []
        if self._has_bodies:
            places = [(_place(*place),) for place in puts]
            for table in self._tables():
                db.executemany(
                    "DELETE FROM bodies WHERE place = ?1 AND EXISTS"  # noqa: S608
                    f" (SELECT 1 FROM {table} WHERE place = ?1 AND pieces < 0)",
                    places,
                )
        if batch.shares or self._shared:
            self._share(db, puts)
        shared = self._shared
        for (node, sequence), (head, payload, volatile) in puts.items():
            place = node << _BITS | sequence
            size = len(payload)
            pieces = 0
            if not size:
                if self._has_bodies:
                    pieces, size = self._count_pieces(db, place)
            elif shared and id(payload) in shared:
                sharers.append((place, shared[id(payload)][1]))
                pieces, payload = _SHARED, b""
            rows = spilled if volatile else durable
            rows += (place, pieces, size, head, payload)
        if sharers:
            self._has_bodies = True
            db.executemany("INSERT OR REPLACE INTO bodies VALUES (?, ?)", sharers)
        if self._spilling:
            _delete(db, "spilled", _runs(durable[::_COLUMNS]))
        if spilled:
            _delete(db, "messages", _runs(spilled[::_COLUMNS]))
            _insert(db, "spilled", spilled)
        if durable:
            _insert(db, "messages", durable)

    def _share(
        self, db: apsw.Connection, puts: dict[tuple[int, int], tuple[bytes, bytes, bool]]
    ) -> None:
        """Write the payloads that several of *puts* share, or that the batch before has written."""
        payloads = (payload for _, payload, _ in puts.values())
        self._shared, self._next_body = shared_bodies(payloads, self._shared, self._next_body)
        # Existing pieces stay; those of the batch before may have been deleted with their last message.
        db.executemany(
            "INSERT OR IGNORE INTO pieces VALUES (?, ?)",
            [(body << _PIECE_BITS, payload) for payload, body in self._shared.values()],
        )

    # -- pieces ------------------------------------------------------------------------------------

    def _body(self, db: apsw.Connection, place: int) -> int | None:
        """Return the number of the body that holds the pieces of a message, or None."""
        row = db.execute("SELECT body FROM bodies WHERE place = ?", (place,)).fetchone()
        return None if row is None else int(row[0])

    def _count_pieces(self, db: apsw.Connection, place: int) -> tuple[int, int]:
        body = self._body(db, place)
        if body is None:
            return 0, 0
        count, size = db.execute(
            "SELECT count(*), total(length(data)) FROM pieces WHERE id BETWEEN ? AND ?",
            (body << _PIECE_BITS, body << _PIECE_BITS | PIECE_MAX),
        ).fetchone() or (0, 0)
        return int(count), int(size)

    def _put_pieces(self, db: apsw.Connection, pieces: dict[tuple[int, int, int], bytes]) -> None:
        bodies: dict[int, int] = {}
        rows = []
        for (node, sequence, index), data in pieces.items():
            place = node << _BITS | sequence
            body = bodies.get(place)
            if body is None:
                body = self._body(db, place)
            if body is None:
                body, self._next_body = self._next_body, self._next_body + 1
                db.execute("INSERT INTO bodies VALUES (?, ?)", (place, body))
                self._has_bodies = True
            bodies[place] = body
            rows.append((body << _PIECE_BITS | index, data))
        db.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?)", rows)

    # -- large deletions ---------------------------------------------------------------------------

    def _is_gone(self, node: int, sequence: int) -> bool:
        first, last = self._cleared.get((_MESSAGES, node), (0, -1))
        return first <= sequence <= last

    def _clear(self, db: apsw.Connection, node: int) -> None:
        for kind, tables in ((_MESSAGES, (*self._tables(), "bodies")), (_CHUNKS, ("chunks",))):
            bounds = _place(node, 0), _place(node, SEQUENCE_MAX)
            tops = [
                db.execute(
                    f"SELECT max(place) FROM {table} WHERE place BETWEEN ? AND ?",  # noqa: S608
                    bounds,
                ).get
                for table in tables
            ]
            last = max((top for top in tops if top is not None), default=None)
            if last is not None:
                self._set_cleared(db, kind, node, 0, last & SEQUENCE_MAX)
                # Small nodes are deleted completely at once.
                self._delete_some(db, kind, node)
        db.execute("DELETE FROM logs WHERE log = ?", (node,))
        self._trimmed.discard(node)

    def _drop(self, db: apsw.Connection, node: int, first: int, last: int) -> None:
        while (_MESSAGES, node) in self._cleared:
            # Only one range is remembered for each node.
            self._delete_some(db, _MESSAGES, node)
        self._set_cleared(db, _MESSAGES, node, first, last)
        # Small ranges are deleted completely at once.
        self._delete_some(db, _MESSAGES, node)

    def _set_cleared(
        self, db: apsw.Connection, kind: int, node: int, first: int, last: int
    ) -> None:
        key = node << 1 | kind
        if first > last:
            self._cleared.pop((kind, node), None)
            db.execute("DELETE FROM cleared WHERE id = ?", (key,))
        else:
            self._cleared[kind, node] = first, last
            db.execute("INSERT OR REPLACE INTO cleared VALUES (?, ?, ?)", (key, first, last))

    def _reclaim(self, db: apsw.Connection, kind: int, node: int, sequence: int) -> None:
        """Delete cleared rows up to *sequence*, before a new row is written there."""
        while (bounds := self._cleared.get((kind, node))) and bounds[0] <= sequence <= bounds[1]:
            self._delete_some(db, kind, node, sequence)

    def _delete_some(
        self, db: apsw.Connection, kind: int, node: int, until: int = SEQUENCE_MAX
    ) -> None:
        """Delete a bounded number of cleared rows, at most up to *until*."""
        first, last = self._cleared[kind, node]
        until = min(last, until)
        start, end = _place(node, first), _place(node, until)
        tables = ("chunks",) if kind == _CHUNKS else self._tables()
        for table in tables:
            end = _step_end(db, table, "size", start, end)
        if kind == _MESSAGES and self._has_bodies:
            end = _step_end(db, "bodies", "0", start, end)
            tables = *tables, "bodies"
        for table in tables:
            db.execute(f"DELETE FROM {table} WHERE place BETWEEN ? AND ?", (start, end))  # noqa: S608
        self._set_cleared(db, kind, node, (end & SEQUENCE_MAX) + 1, last)

    def tidy(self) -> bool:
        db = self._usable()
        self._shared = {}
        try:
            with db:
                more = self._tidy(db)
            if more:
                self._file.checkpoint_if_due()
            return more
        except apsw.Error as error:
            raise self._refused(error) from error

    def _tidy(self, db: apsw.Connection) -> bool:
        if self._cleared:
            kind, node = next(iter(self._cleared))
            self._delete_some(db, kind, node)
            return True
        dead = db.execute("SELECT first, last FROM dead LIMIT 1").fetchone()
        if dead is not None:
            first, last = dead
            end = _step_end(db, "pieces", "length(data)", first, last, key="id")
            db.execute("DELETE FROM pieces WHERE id BETWEEN ? AND ?", (first, end))
            if end == last:
                db.execute("DELETE FROM dead WHERE first = ?", (first,))
            else:
                db.execute("UPDATE dead SET first = ? WHERE first = ?", (end + 1, first))
            return True
        if self._trimmed:
            log = next(iter(self._trimmed))
            first = db.execute("SELECT first FROM logs WHERE log = ?", (log,)).get
            start, last = _place(log, 0), _place(log, first) - 1
            end = _step_end(db, "chunks", "size", start, last)
            db.execute("DELETE FROM chunks WHERE place BETWEEN ? AND ?", (start, end))
            if end == last:
                self._trimmed.discard(log)
            return True
        free = db.pragma("freelist_count")
        if free > max(_FREE_PAGES, db.pragma("page_count") // 4):
            db.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
            return True
        return False

    # -- logs --------------------------------------------------------------------------------------

    def _append(self, db: apsw.Connection, log: int, chunk: Chunk) -> None:
        known = db.execute(
            "SELECT next, latest_ms, written FROM logs WHERE log = ?", (log,)
        ).fetchone()
        size = len(chunk.data)
        end = chunk.offset + chunk.count
        latest_ms, before = chunk.last_ms, 0
        if known is None:
            db.execute(
                "INSERT INTO logs VALUES (?, ?, ?, ?, ?, 0)",
                (log, chunk.offset, end, latest_ms, size),
            )
        else:
            if chunk.offset != known[0]:
                raise StoreRefused(f"log {log} goes on at offset {known[0]}, not {chunk.offset}")
            latest_ms, before = max(latest_ms, known[1]), known[2]
            db.execute(
                "UPDATE logs SET next = ?, latest_ms = ?, written = ? WHERE log = ?",
                (end, latest_ms, before + size, log),
            )
        db.execute(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(_place(log, chunk.offset), chunk.count, chunk.first_ms, chunk.last_ms),
                *(latest_ms, size, before, chunk.data),
            ),
        )

    def _trim(self, db: apsw.Connection, log: int, offset: int) -> None:
        known = db.execute("SELECT first, next, written FROM logs WHERE log = ?", (log,)).fetchone()
        if known is None or offset <= known[0]:
            return
        first, dropped = known[1], known[2]
        if offset < first:
            row = db.execute(
                "SELECT place, count, before, size FROM chunks WHERE place BETWEEN ? AND ?"
                " ORDER BY place DESC LIMIT 1",
                (_place(log, known[0]), _place(log, offset)),
            ).fetchone()
            if row is None:
                return
            place, count, before, size = row
            first, dropped = place & SEQUENCE_MAX, before
            if first + count <= offset:
                first, dropped = first + count, before + size
        if first > known[0]:
            db.execute(
                "UPDATE logs SET first = ?, dropped = ? WHERE log = ?", (first, dropped, log)
            )
            self._trimmed.add(log)

    # -- reading -----------------------------------------------------------------------------------

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        rows = self._rows("SELECT key, value FROM facts WHERE kind = ? ORDER BY key", (kind,))
        return [(key, value) for key, value in rows]

    def _segments(self, node: int, first: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of places that can hold messages of *node* from *first* on."""
        gone = self._cleared.get((_MESSAGES, node))
        if gone is None:
            yield _place(node, first), _place(node, SEQUENCE_MAX)
            return
        if first < gone[0]:
            yield _place(node, first), _place(node, gone[0] - 1)
        if gone[1] < SEQUENCE_MAX:
            yield _place(node, max(first, gone[1] + 1)), _place(node, SEQUENCE_MAX)

    def _select(self, columns: str, limit: str = "") -> str:
        """Return a query for messages between two places, which are bound once for all tables."""
        parts = [
            f"SELECT {columns} FROM {table} WHERE place BETWEEN ?1 AND ?2"  # noqa: S608
            for table in self._tables()
        ]
        return f"{' UNION ALL '.join(parts)} ORDER BY 1 {limit}"

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        db = self._usable()
        found: list[Stored] = []
        size = 0
        try:
            sql = self._select("place, pieces, head, payload", "LIMIT ?3")
            for start, end in self._segments(node, first):
                cursor = db.execute(sql, (start, end, count - len(found)))
                for place, pieces, head, payload in cursor:
                    stored = (
                        Stored(place & SEQUENCE_MAX, head, payload, pieces)
                        if pieces >= 0
                        else self._read_shared(db, place, head)
                    )
                    found.append(stored)
                    size += len(stored.payload)
                    if size >= size_max:
                        cursor.close(True)
                        return found
        except apsw.Error as error:
            raise self._unreadable(error) from error
        return found

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        db = self._usable()
        found: list[Stored] = []
        try:
            sql = self._select("place, pieces, head, payload")
            for sequence in sequences:
                if self._is_gone(node, sequence):
                    continue
                place = _place(node, sequence)
                rows: list[_Row] = db.execute(sql, (place, place)).fetchall()
                for _, pieces, head, payload in rows:
                    found.append(
                        Stored(sequence, head, payload, pieces)
                        if pieces >= 0
                        else self._read_shared(db, place, head)
                    )
        except apsw.Error as error:
            raise self._unreadable(error) from error
        return found

    def _read_shared(self, db: apsw.Connection, place: int, head: bytes) -> Stored:
        """Read a message whose payload other messages may share.

        Raises:
            StoreDamaged: The payload is missing.
        """
        row = db.execute(
            "SELECT data, body FROM bodies JOIN pieces ON id = body << ? WHERE place = ?",
            (_PIECE_BITS, place),
        ).fetchone()
        if row is None:
            self._damaged = True
            raise StoreDamaged(
                f"{self.path}: message {place & SEQUENCE_MAX} of node {place >> _BITS} has lost its"
                " payload; reopening it salvages the readable data"
            )
        return Stored(place & SEQUENCE_MAX, head, row[0], 0, row[1])

    def heads(self, node: int, first: int = 0) -> Iterator[StoredHead]:
        # Read in pages, so that no cursor stays open between two calls.
        self._usable()
        while True:
            rows: list[_Row] = []
            for start, end in self._segments(node, first):
                sql = self._select("place, head, size, pieces", "LIMIT ?3")
                rows += self._rows(sql, (start, end, _STEP_ROWS - len(rows)))
            for place, head, size, pieces in rows:
                yield StoredHead(place & SEQUENCE_MAX, head, size, max(pieces, 0))
            if len(rows) < _STEP_ROWS:
                return
            first = (rows[-1][0] & SEQUENCE_MAX) + 1

    def summary(self, node: int) -> tuple[int, int, int, int]:
        count = size = 0
        ends: list[int] = []
        for start, end in self._segments(node, 0):
            for table in self._tables():
                ((rows, bytes_, first, last),) = self._rows(
                    f"SELECT count(*), sum(size), min(place), max(place) FROM {table}"  # noqa: S608
                    " WHERE place BETWEEN ? AND ?",
                    (start, end),
                )
                if rows:
                    count, size = count + rows, size + bytes_
                    ends += first & SEQUENCE_MAX, last & SEQUENCE_MAX
        return (count, size, min(ends), max(ends)) if ends else (0, 0, -1, -1)

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        if not 0 <= index <= PIECE_MAX or self._is_gone(node, sequence):
            return b""
        own = " AND ".join(
            f"NOT EXISTS (SELECT 1 FROM {table} WHERE place = ?3 AND pieces < 0)"  # noqa: S608
            for table in self._tables()
        )
        rows = self._rows(
            "SELECT data FROM pieces WHERE id ="  # noqa: S608
            f" (SELECT body << ?1 | ?2 FROM bodies WHERE place = ?3 AND {own})",
            (_PIECE_BITS, index, _place(node, sequence)),
        )
        return rows[0][0] if rows else b""

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        first, end, _ = self.extent(log)
        db = self._usable()
        found: list[Chunk] = []
        if max(offset, first) >= end:
            return found
        try:
            start = _place(log, max(offset, first))
            holder = db.execute(
                "SELECT place, count FROM chunks WHERE place BETWEEN ? AND ?"
                " ORDER BY place DESC LIMIT 1",
                (_place(log, first), start),
            ).fetchone()
            if holder is not None and holder[0] + holder[1] > start:
                start = holder[0]
            cursor = db.execute(
                "SELECT place, count, first_ms, last_ms, data FROM chunks"
                " WHERE place BETWEEN ? AND ? ORDER BY place",
                (start, _place(log, end) - 1),
            )
            size = 0
            for place, count, first_ms, last_ms, data in cursor:
                found.append(Chunk(place & SEQUENCE_MAX, count, first_ms, last_ms, data))
                size += len(data)
                if size >= size_max:
                    cursor.close(True)
                    break
        except apsw.Error as error:
            raise self._unreadable(error) from error
        return found

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        first, end, _ = self.extent(log)
        low, high = _place(log, first), _place(log, end)
        # Binary search for the first chunk whose ``latest_ms``, the maximum so far, is not before the
        # time. If the clock was set back, that time need not occur in the chunk itself.
        while low < high:
            middle = (low + high) // 2
            rows = self._rows(
                "SELECT place, latest_ms FROM chunks WHERE place BETWEEN ? AND ? ORDER BY place LIMIT 1",
                (middle, _place(log, end) - 1),
            )
            if not rows or rows[0][1] >= time_ms:
                high = middle
            else:
                low = rows[0][0] + 1
        rows = self._rows(
            "SELECT place, count, first_ms, last_ms, data FROM chunks"
            " WHERE place BETWEEN ? AND ? AND last_ms >= ? ORDER BY place LIMIT 1",
            (low, _place(log, end) - 1, time_ms),
        )
        if not rows:
            return None
        place, count, first_ms, last_ms, data = rows[0]
        return Chunk(place & SEQUENCE_MAX, count, first_ms, last_ms, data)

    def extent(self, log: int) -> tuple[int, int, int]:
        rows = self._rows("SELECT first, next, written - dropped FROM logs WHERE log = ?", (log,))
        return rows[0] if rows else (0, 0, 0)


def _place(node: int, sequence: int) -> int:
    return node << _BITS | sequence


def _column(db: apsw.Connection, sql: str, bindings: _Row = ()) -> Iterator[Any]:
    return (row[0] for row in db.execute(sql, bindings))


def _runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last ones of runs of adjacent *places*, in order."""
    runs: list[tuple[int, int]] = []
    first = last = -1
    for place in sorted(places):
        if place > last + 1 or last < 0:
            if last >= 0:
                runs.append((first, last))
            first = place
        last = place
    if last >= 0:
        runs.append((first, last))
    return runs


def _delete(db: apsw.Connection, table: str, runs: list[tuple[int, int]]) -> None:
    db.executemany(f"DELETE FROM {table} WHERE place BETWEEN ? AND ?", runs)  # noqa: S608


def _insert(db: apsw.Connection, table: str, values: list[Any]) -> None:
    """Put rows with *values*, those of one row after those of another, into *table*."""
    at = 0
    for count in _BLOCKS:
        step = count * _COLUMNS
        while len(values) - at >= step:
            db.execute(_INSERTS[table, count], values[at : at + step])
            at += step


def _step_end(
    db: apsw.Connection, table: str, size: str, start: int, end: int, *, key: str = "place"
) -> int:
    """Return the last key towards *end* up to which rows of *table* may be deleted in one step."""
    total = 0
    cursor = db.execute(
        f"SELECT {key}, {size} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}",  # noqa: S608
        (start, end),
    )
    for rows, (at, bytes_) in enumerate(cursor, 1):
        total += bytes_
        if rows >= _STEP_ROWS or total >= _STEP_BYTES:
            cursor.close(True)
            return int(at)
    return end
