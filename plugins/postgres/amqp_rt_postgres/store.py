"""Durable store: a schema of a PostgreSQL database. Several brokers may be started on it; one at a time uses it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import (
    PIECE_MAX,
    ChangeSet,
    Chunk,
    OpenResult,
    StoreBusy,
    Stored,
    StoreDamaged,
    StoredHead,
    StoreFailed,
    StoreFull,
    StoreLost,
    refuse,
)

from .arrays import number_column
from .batches import LOST_BODIES, SHARED, Extent, Known, Plan
from .election import Term, begin, connect, continue_term, log_safety, reason_of
from .schema import FENCED, FIRST_ROOM
from .sessions import Session, Statement, now
from .urls import parse_store_url
from .watching import Watch

__all__ = ["PostgreSQLStore"]

T = TypeVar("T")

_log = logging.getLogger("amqp_rt.store")

#: Heads, and descriptions of chunks, that are read at a time.
_HEADS: Final = 2000
_CHUNKS: Final = 128
#: Rows that one step of housekeeping deletes: of messages, and of those that may be large.
_STEP_ROWS: Final = 2000
_STEP_LARGE: Final = 100
#: How often one call may lose its connection. One that never gets through must not be sent for ever.
_LOSSES_MAX: Final = 4
#: Most seconds for the last change of a term.
_CLOSE_S: Final = 2.0
#: Seconds between measurements of the size.
_SIZE_S: Final = 60.0
#: SQLSTATE of a full disk.
_DISK_FULL: Final = "53100"

_MESSAGES: Final = """
SELECT m.sequence, m.pieces, m.head, m.payload, b.body, p.data FROM (
    SELECT sequence, n, sum(bytes) OVER (ORDER BY sequence) - bytes AS before FROM (
        SELECT sequence, row_number() OVER (ORDER BY sequence) AS n,
            CASE WHEN pieces > 0 THEN 0 ELSE size END AS bytes
        FROM message WHERE room = $1::int8 AND sequence >= $2::int8 ORDER BY sequence LIMIT $3::int8
    ) AS t
) AS s
JOIN message m ON m.room = $1::int8 AND m.sequence = s.sequence
LEFT JOIN body b ON m.pieces < 0 AND b.room = m.room AND b.sequence = m.sequence
LEFT JOIN piece p ON p.body = b.body AND p.index = 0
WHERE s.n = 1 OR s.before < $4::int8 ORDER BY s.sequence
"""
_READ: Final = """
SELECT m.sequence, m.pieces, m.head, m.payload, b.body, p.data
FROM unnest($2::bigint[]) WITH ORDINALITY AS u(sequence, n)
JOIN message m ON m.room = $1::int8 AND m.sequence = u.sequence
LEFT JOIN body b ON m.pieces < 0 AND b.room = m.room AND b.sequence = m.sequence
LEFT JOIN piece p ON p.body = b.body AND p.index = 0
ORDER BY u.n
"""
_PIECE: Final = """
SELECT piece.data FROM body JOIN piece ON piece.body = body.body AND piece.index = $3::int8::int4
WHERE body.room = $1::int8 AND body.sequence = $2::int8 AND NOT EXISTS
    (SELECT FROM message m WHERE m.room = body.room AND m.sequence = body.sequence AND m.pieces < 0)
"""
_SUMMARY: Final = (
    "SELECT count(*), coalesce(sum(size), 0)::int8, coalesce(min(sequence), -1), coalesce(max(sequence), -1)"
    " FROM message WHERE room = $1::int8"
)
_CHUNK_SIZES: Final = (
    "SELECT first_offset, size FROM chunk WHERE room = $1::int8 AND first_offset >= $2::int8"
    " AND first_offset < $3::int8 ORDER BY first_offset LIMIT $4::int8"
)
_CHUNK: Final = (
    "SELECT first_offset, count, first_ms, last_ms, data FROM chunk WHERE room = $1::int8"
)
_DROP_ORPHANS: Final = LOST_BODIES.format(
    "DELETE FROM body WHERE NOT EXISTS (SELECT FROM message WHERE message.room = body.room"
    " AND message.sequence = body.sequence)"
)


def _step(table: str, condition: str, order: str) -> str:
    """Return the statement that deletes the first ``$1`` rows of *table* with *condition*."""
    return (
        f"DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {condition}"
        f" ORDER BY {order} LIMIT $1::int8))"
    )


class PostgreSQLStore:
    """:class:`~amqp_rt.stores.base.SharedStore` in a schema of a PostgreSQL database.

    Args:
        url: ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, as libpq reads it; the password may also be in the file
            that ``PGPASSFILE`` names. With ``?schema=NAME`` for the schema, ``amqp_rt`` by default;
            ``silent_s=6`` for the seconds after which a silent database, or a silent broker, is taken to be lost; and
            ``rejoin_s=10`` for those within which the broker tries to continue after it has lost the database.

    Raises:
        AmqpError: *url* is no such URL.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_store_url(url)
        #: Its name for logs and errors, without the password.
        self.path = self._url.name
        #: Held while a call uses the connection.
        self.lock = threading.RLock()
        self.session: Session | None = None
        self.answered = 0.0
        self.joining: Session | None = None
        self.until = math.inf
        #: Called, in any thread, when the connection was lost without a call; :meth:`rejoin` should follow.
        self.on_disconnected: Callable[[], None] | None = None
        #: The term in which this object uses the store; None before, and after it was closed cleanly.
        self._term: Term | None = None
        self._is_open = False
        #: Reason why the store accepts no more calls, and whether it can never be opened again.
        self._failed: AmqpError | None = None
        self._lost: StoreLost | None = None
        #: Connection of a broker that waits for another one.
        self._waiting: Session | None = None
        self._has_waited = False
        self._watch: Watch | None = None
        self._known = Known({}, {}, set())
        self._size = 0
        self._measured = 0.0

    def __repr__(self) -> str:
        return f"<PostgreSQLStore {self.path}>"

    def size_on_disk(self) -> int:
        """Return the bytes of the tables and indexes, measured once a minute at most. May be called from any thread."""
        return self._size

    # -- opening and closing -----------------------------------------------------------------------

    def open(self) -> OpenResult:
        with self.lock:
            if self._is_open:
                raise StoreBusy(f"{self.path} is open already")
            if self._lost is not None:
                # The broker's memory is out of date.
                raise self._lost
            if self._watch is None:
                self._watch = Watch(self, self._url)
                self._watch.start()
            try:
                clean = self._begin() if self._term is None else self._continue()
            except StoreBusy:
                raise
            except BaseException:
                self._stop_watch()
                raise
            finally:
                self.joining = None
            self._is_open = True
            self._failed = None
            return OpenResult(clean)

    def _begin(self) -> bool:
        """Begin a term; return whether the last one ended cleanly."""
        session = self._waiting
        if session is None:
            try:
                session = connect(self._url, self._join)
            except StoreFailed as error:
                if self._has_waited and isinstance(error.__cause__, psycopg.OperationalError):
                    # It waits for another broker, and may as well wait for the database.
                    raise StoreBusy(error.description) from error
                raise
        self._waiting = session
        self._join(session)
        try:
            term, clean = begin(session, self._url)
            self._answer(session)
        except StoreBusy:
            self._has_waited = True
            raise
        except psycopg.Error as error:
            failed = self._not_begun(session, error)
            self._stop_waiting()
            raise failed from error
        except BaseException:
            self._stop_waiting()
            raise
        self._waiting = None
        try:
            self._load(session)
            if not clean or self._has_waited:
                _log.info("%s: term %d begins", self.path, term.epoch)
            log_safety(session, self._url)
            self._tidy_up(session, term)
        except psycopg.Error as error:
            failed = self._not_begun(session, error)
            session.close()
            raise failed from error
        except BaseException:
            session.close()
            raise
        self._term = term
        self.session = session
        return clean

    def _not_begun(self, session: Session, error: psycopg.Error) -> AmqpError:
        """Return the exception for *error* before the store is open; a lost connection is tried again."""
        if session.broken or isinstance(error, psycopg.OperationalError):
            self._has_waited = True
            return StoreBusy(f"{self.path} was lost: {reason_of(error)}")
        return StoreFailed(f"{self.path} cannot be opened: {reason_of(error)}")

    def _join(self, session: Session, until: float = math.inf) -> None:
        """Let the watch end *session*, which is not the store's yet, if the database falls silent."""
        self.until = until
        self.joining = session
        self._answer(session)

    def _continue(self) -> bool:
        """Continue the term in which the store failed."""
        term = self._term
        assert term is not None
        # The journal decides when to open it again; the token tells whether another broker was there meanwhile.
        self.answered = now()
        session = self._reconnect(term)
        losses = 0
        while True:
            try:
                self._load(session)
            except psycopg.Error as error:
                if not session.broken:
                    # The lock has to be freed: another broker may be able to use it.
                    session.close()
                    text = f"{self.path} cannot be used again: {reason_of(error)}"
                    raise self._given_up(StoreLost(text)) from error
                losses += 1
                session = self._rejoin(term, reason_of(error), losses)
            else:
                return False

    def _load(self, session: Session) -> None:
        """Read the content of the tables that is kept in memory."""
        rows = session.rows
        rooms = dict(rows("SELECT node, room FROM room"))
        extents = {
            log: Extent(*extent)
            for log, *extent in rows(
                "SELECT log, first, next, latest_ms, written, dropped FROM extent"
            )
        }
        ((top_room, top_body, has_bodies),) = rows(
            "SELECT (SELECT greatest(max(r.room), max(c.room)) FROM room r FULL JOIN cleared c ON false),"
            " greatest((SELECT max(body) FROM body), (SELECT max(body) FROM piece), (SELECT max(body) FROM dead_body)),"
            " EXISTS (SELECT FROM body) OR EXISTS (SELECT FROM dead_body)"
        )
        self._known = Known(
            rooms,
            extents,
            set(extents),
            max(FIRST_ROOM, (top_room or 0) + 1),
            1 + (top_body or 0),
            has_bodies,
        )

    def _tidy_up(self, session: Session, term: Term) -> None:
        """Delete rows that do not outlive their process: spilled messages, and pieces of messages that were never put."""
        self._run(
            session,
            term,
            [
                ("DELETE FROM message WHERE spilled", ()),
                (_DROP_ORPHANS, ()),
            ],
        )

    def close(self) -> None:
        with self.lock:
            self._stop_waiting()
            if not self._is_open:
                self._stop_watch()
                return
            self._is_open = False
            session = self.session
            if self._failed is None and session is not None and self._term is not None:
                self._end_term(session, self._term)
                self._term = None
                self._has_waited = False
            self._stop_watch()
            self.session = None
            if session is not None:
                session.close()

    def _end_term(self, session: Session, term: Term) -> None:
        """Write that *term* has ended cleanly, if the database does it soon."""
        deadline = threading.Timer(_CLOSE_S, session.cut)
        deadline.daemon = True
        deadline.start()
        try:
            session.run(
                [
                    # A lost mark costs the next broker a check. It is not worth the wait for a replica that is away.
                    ("SET LOCAL synchronous_commit = off", ()),
                    (
                        "UPDATE state SET clean = true WHERE epoch = $1::int8 AND token = $2::int8",
                        (term.epoch, term.token),
                    ),
                ]
            )
            # The server frees the lock of an ended session a moment later: another broker need not wait for that.
            session.unlock()
        except psycopg.Error as error:
            _log.error("%s could not be closed in good order: %s", self.path, reason_of(error))
        finally:
            deadline.cancel()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    # -- the connection ----------------------------------------------------------------------------

    def _answer(self, session: Session) -> None:
        self.answered = now()

    def _usable(self) -> Session:
        """Return the connection, a new one if it was lost.

        Raises:
            StoreFailed: The store is not open, or has failed.
            StoreLost: It cannot be used again.
        """
        if not self._is_open:
            raise StoreFailed(f"{self.path} is not open")
        if self._failed is not None:
            raise self._failed
        session = self.session
        if session is None or session.broken:
            assert self._term is not None
            session = self._rejoin(self._term, "the connection has ended")
        return session

    def disconnected(self, session: Session) -> None:
        """Note that the watch has ended *session*."""
        call = self.on_disconnected
        if call is not None and self.session is session:
            call()

    def rejoin(self) -> None:
        """Connect again if the connection was lost, and continue.

        Raises:
            StoreLost: Another broker uses the store, or it cannot be reached.
        """
        with self.lock:
            self._usable()

    def _rejoin(self, term: Term, why: str, times: int = 1) -> Session:
        """Connect again and continue *term*, or give the store up; a call has lost its connection for the *times*-th time."""
        if times > _LOSSES_MAX:
            text = f"{self.path} was lost {times} times by the same batch or query: {why}"
            raise self._given_up(StoreLost(text))
        _log.warning("%s was lost: %s", self.path, why)
        try:
            return self._reconnect(term)
        except StoreLost as error:
            raise self._given_up(error) from None

    def _given_up(self, error: StoreLost) -> StoreLost:
        """Accept no more calls because of *error*, and tell it: a reader may be the first to notice."""
        self._lost = self._failed = error
        if self.on_disconnected is not None:
            self.on_disconnected()
        return error

    def _reconnect(self, term: Term) -> Session:
        old, self.session = self.session, None
        if old is not None:
            old.close()
        try:
            session, stored = continue_term(term, self._url, self.answered, self._join)
        finally:
            self.joining = None
        self._answer(session)
        self.session = session
        term.batch = stored
        _log.info("%s is connected again", self.path)
        return session

    def _read(self, work: Callable[[Session], T]) -> T:
        """Return the result of *work*, which only reads; do it again on another connection if it is lost."""
        with self.lock:
            losses = 0
            while True:
                session = self._usable()
                try:
                    found = work(session)
                except psycopg.Error as error:
                    if session.broken:
                        assert self._term is not None
                        losses += 1
                        self._rejoin(self._term, reason_of(error), losses)
                        continue
                    if error.sqlstate == _DISK_FULL:
                        # Even a query may have to write, to make room for its pages in the server's memory.
                        raise self._full(error) from error
                    self._failed = StoreFailed(f"{self.path} cannot be read: {reason_of(error)}")
                    raise self._failed from error
                self._answer(session)
                return found

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._read(lambda session: session.rows(query, parameters))

    def _run(self, session: Session, term: Term, statements: list[Statement]) -> None:
        """Run *statements* as the next batch of *term*.

        Raises:
            psycopg.Error: It failed; whether it is stored is unknown if the connection was lost.
        """
        number = term.batch + 1
        guard = "SELECT begin_batch($1::int8, $2::int8, $3::int8)", (term.epoch, term.token, number)
        session.run([guard, *statements])
        self._answer(session)
        term.batch = number

    def _write(self, statements: list[Statement]) -> None:
        """Run *statements* as a batch; on another connection, unless it was stored, if the connection is lost.

        Raises:
            StoreFull: There is no room.
            StoreFailed: The database refuses it.
            StoreLost: Another broker uses the store, or it cannot be reached.
        """
        term = self._term
        session = self._usable()
        assert term is not None
        number = term.batch + 1
        losses = 0
        while True:
            try:
                self._run(session, term, statements)
            except psycopg.Error as error:
                if session.broken:
                    losses += 1
                    session = self._rejoin(term, reason_of(error), losses)
                    if term.batch >= number:
                        return
                    continue
                raise self._refused(error) from error
            return

    def _full(self, error: psycopg.Error) -> StoreFull:
        return StoreFull(f"there is no room for {self.path}: {reason_of(error)}")

    def _refused(self, error: psycopg.Error) -> AmqpError:
        """Return the exception for *error* in a batch, which was rolled back."""
        if error.sqlstate == _DISK_FULL:
            return self._full(error)
        if error.sqlstate == FENCED:
            text = f"{self.path} is in use by another broker now: this one must not go on"
            return self._given_up(StoreLost(text))
        self._failed = StoreFailed(f"{self.path} cannot be written: {reason_of(error)}")
        return self._failed

    # -- changes -----------------------------------------------------------------------------------

    def commit(self, batch: ChangeSet) -> None:
        with self.lock:
            self._usable()
            refuse(batch)
            if not batch:
                return
            plan = Plan(batch, self._known, self._rows)
            self._write(plan.statements)
            self._known = plan.known

    def tidy(self) -> bool:
        with self.lock:
            self._usable()
            self._known.shared = {}
            for step in (self._empty_room, self._delete_body, self._delete_chunks):
                if step():
                    return True
            self._measure()
            return False

    def _empty_room(self) -> bool:
        """Delete some rows of a cleared node; return whether there were any."""
        found = self._rows("SELECT room, node FROM cleared LIMIT 1")
        if not found:
            return False
        room, node = found[0]
        rows = {
            table: self._rows(
                f"SELECT count(*) FROM (SELECT FROM {table} WHERE room = $1::int8 LIMIT $2::int8) AS t",
                (room, _STEP_ROWS),
            )[0][0]
            for table in ("message", "body", "chunk")
        }
        if rows["message"]:
            self._write([(_step("message", "room = $2::int8", "sequence"), (_STEP_ROWS, room))])
        elif rows["body"]:
            gone = LOST_BODIES.format(_step("body", "room = $2::int8", "sequence"))
            self._write([(gone, (_STEP_ROWS, room))])
        elif rows["chunk"]:
            self._write([(_step("chunk", "room = $2::int8", "first_offset"), (_STEP_LARGE, room))])
        else:
            self._forget_room(room, node)
        return True

    def _forget_room(self, room: int, node: int) -> None:
        """Forget *room*, which is empty; and the room of *node*, if nothing is stored of it."""
        statements: list[Statement] = [("DELETE FROM cleared WHERE room = $1::int8", (room,))]
        current = self._known.room(node)
        ((used,),) = self._rows(
            "SELECT EXISTS (SELECT FROM message WHERE room = $1::int8) OR EXISTS (SELECT FROM body WHERE room = $1::int8)"
            " OR EXISTS (SELECT FROM chunk WHERE room = $1::int8) OR EXISTS (SELECT FROM extent WHERE log = $2::int8)"
            " OR EXISTS (SELECT FROM cleared WHERE node = $2::int8 AND room <> $3::int8)",
            (current, node, room),
        )
        if not used:
            statements.append(("DELETE FROM room WHERE node = $1::int8", (node,)))
        self._write(statements)
        if not used:
            self._known.rooms = {key: at for key, at in self._known.rooms.items() if key != node}

    def _delete_body(self) -> bool:
        """Delete some pieces that no message has any more; return whether there were any."""
        found = self._rows(
            "SELECT body, EXISTS (SELECT FROM body WHERE body.body = dead_body.body),"
            " EXISTS (SELECT FROM piece WHERE piece.body = dead_body.body) FROM dead_body LIMIT 1"
        )
        if not found:
            return False
        body, is_used, has_pieces = found[0]
        if is_used or not has_pieces:
            self._write([("DELETE FROM dead_body WHERE body = $1::int8", (body,))])
        else:
            self._write([(_step("piece", "body = $2::int8", "index"), (_STEP_LARGE, body))])
        return True

    def _delete_chunks(self) -> bool:
        """Delete some trimmed chunks; return whether there may be more."""
        known = self._known
        for log in sorted(known.trimmed):
            bounds = known.room(log), known.extents[log].first
            if self._rows(
                "SELECT FROM chunk WHERE room = $1::int8 AND first_offset < $2::int8 LIMIT 1",
                bounds,
            ):
                step = _step("chunk", "room = $2::int8 AND first_offset < $3::int8", "first_offset")
                self._write([(step, (_STEP_LARGE, *bounds))])
                return True
            known.trimmed = known.trimmed - {log}
        return False

    def _measure(self) -> None:
        at = now()
        if at - self._measured >= _SIZE_S or not self._measured:
            self._measured = at
            ((self._size,),) = self._rows(
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::int8 FROM pg_class"
                " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
            )

    # -- reading -----------------------------------------------------------------------------------

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        rows = self._rows(
            "SELECT key, value FROM fact WHERE kind = $1::bytea ORDER BY key", (kind.encode(),)
        )
        return [(key, value) for key, value in rows]

    def _stored(self, node: int, rows: list[tuple[Any, ...]]) -> list[Stored]:
        found: list[Stored] = []
        for sequence, pieces, head, payload, body, shared in rows:
            if pieces != SHARED:
                found.append(Stored(sequence, head, payload, pieces))
            elif shared is None:
                raise StoreDamaged(
                    f"{self.path}: message {sequence} of node {node} has lost its payload"
                )
            else:
                found.append(Stored(sequence, head, shared, 0, body))
        return found

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        with self.lock:
            bounds = (self._known.room(node), first, count, size_max)
            return self._stored(node, self._rows(_MESSAGES, bounds))

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        with self.lock:
            places = self._known.room(node), number_column(list(sequences))
            return self._stored(node, self._rows(_READ, places))

    def heads(self, node: int, first: int = 0) -> Iterator[StoredHead]:
        # Read in pages: a cursor would have to stay open in its transaction between two calls.
        while True:
            rows = self._rows(
                "SELECT sequence, head, size, pieces FROM message WHERE room = $1::int8 AND sequence >= $2::int8"
                " ORDER BY sequence LIMIT $3::int8",
                (self._known.room(node), first, _HEADS),
            )
            for sequence, head, size, pieces in rows:
                yield StoredHead(sequence, head, size, max(pieces, 0))
            if len(rows) < _HEADS:
                return
            first = rows[-1][0] + 1

    def summary(self, node: int) -> tuple[int, int, int, int]:
        with self.lock:
            ((count, size, first, last),) = self._rows(_SUMMARY, (self._known.room(node),))
            return count, size, first, last

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        if not 0 <= index <= PIECE_MAX:
            return b""
        with self.lock:
            rows = self._rows(_PIECE, (self._known.room(node), sequence, index))
            return rows[0][0] if rows else b""

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        with self.lock:
            first, end, _ = self.extent(log)
            start = max(offset, first)
            if start >= end:
                return []
            room = self._known.room(log)
            holder = self._rows(
                "SELECT first_offset, count FROM chunk WHERE room = $1::int8 AND first_offset BETWEEN $2::int8"
                " AND $3::int8 ORDER BY first_offset DESC LIMIT 1",
                (room, first, start),
            )
            if holder and sum(holder[0]) > start:
                start = holder[0][0]
            last, size = start, 0
            more = True
            while more:
                sizes = self._rows(_CHUNK_SIZES, (room, last, end, _CHUNKS))
                more = len(sizes) == _CHUNKS
                for at, bytes_ in sizes:
                    last = at + 1
                    size += bytes_
                    if size >= size_max:
                        more = False
                        break
            rows = self._rows(
                f"{_CHUNK} AND first_offset >= $2::int8 AND first_offset < $3::int8 ORDER BY first_offset",
                (room, start, last),
            )
            return [Chunk(*row) for row in rows]

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        with self.lock:
            first, end, _ = self.extent(log)
            room = self._known.room(log)
            # The latest time so far never decreases; if the clock was set back, the chunk itself may be older.
            found = self._rows(
                "SELECT first_offset FROM chunk WHERE room = $1::int8 AND latest_ms >= $2::int8 AND first_offset >= $3::int8"
                " ORDER BY latest_ms, first_offset LIMIT 1",
                (room, time_ms, first),
            )
            if not found:
                return None
            rows = self._rows(
                f"{_CHUNK} AND first_offset >= $2::int8 AND first_offset < $3::int8 AND last_ms >= $4::int8"
                " ORDER BY first_offset LIMIT 1",
                (room, found[0][0], end, time_ms),
            )
            return Chunk(*rows[0]) if rows else None

    def extent(self, log: int) -> tuple[int, int, int]:
        with self.lock:
            self._usable()
            found = self._known.extents.get(log)
            if found is None:
                return 0, 0, 0
            return found.first, found.next, found.written - found.dropped
