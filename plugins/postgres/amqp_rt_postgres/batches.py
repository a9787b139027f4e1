"""Batches as statements on the tables, and the state in memory that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, Final

from msgspec import Struct

from amqp_rt.stores.base import ChangeSet, Chunk, StoreRefused, shared_bodies

from .arrays import number_column, octet_column
from .schema import FIRST_ROOM, MOVING
from .sessions import Statement

#: Value of ``pieces`` if the payload is the only piece of a body that several messages may share.
SHARED: Final = -1

_PLACES: Final = "unnest($1::bigint[], $2::bigint[]) AS u(room, sequence)"
_AT: Final = "room = u.room AND {0}.sequence = u.sequence"
_REPLACE: Final = (
    " ON CONFLICT (room, sequence) DO UPDATE SET pieces = excluded.pieces, size = excluded.size,"
    " spilled = excluded.spilled, head = excluded.head, payload = excluded.payload"
)
_PUT: Final = (
    "INSERT INTO message (room, sequence, pieces, size, spilled, head, payload)"
    " SELECT u.room, u.sequence, $6::int8, u.size, $7::bool, u.head, u.payload"
    " FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[], $5::bytea[])"
    " AS u(room, sequence, size, head, payload)" + _REPLACE
)
_PUT_PIECES: Final = (
    "INSERT INTO message (room, sequence, pieces, size, spilled, head, payload)"
    " SELECT u.room, u.sequence, coalesce(p.pieces, 0), coalesce(p.size, 0), $4::bool, u.head, ''"
    " FROM unnest($1::bigint[], $2::bigint[], $3::bytea[]) AS u(room, sequence, head)"
    " LEFT JOIN LATERAL (SELECT count(*) AS pieces, sum(length(piece.data)) AS size FROM body"
    "  JOIN piece ON piece.body = body.body WHERE body.room = u.room AND body.sequence = u.sequence)"
    " AS p ON true" + _REPLACE
)
_UPDATE: Final = (
    "UPDATE message SET head = u.head FROM unnest($1::bigint[], $2::bigint[], $3::bytea[])"
    f" AS u(room, sequence, head) WHERE message.{_AT.format('message')}"
)
_REMOVE: Final = f"DELETE FROM message USING {_PLACES} WHERE message.{_AT.format('message')}"
#: Bodies that may have lost their last message; housekeeping looks, and deletes their pieces.
LOST_BODIES: Final = (
    "WITH gone AS ({0} RETURNING body.body) INSERT INTO dead_body SELECT DISTINCT body FROM gone"
    " ON CONFLICT DO NOTHING"
)
_REMOVE_BODY: Final = LOST_BODIES.format(
    f"DELETE FROM body USING {_PLACES} WHERE body.{_AT.format('body')}"
)
_UNSHARE: Final = LOST_BODIES.format(
    f"DELETE FROM body USING {_PLACES}, message WHERE body.{_AT.format('body')}"
    f" AND message.{_AT.format('message')} AND message.pieces < 0"
)
_DROP: Final = (
    "DELETE FROM message WHERE room = $1::int8 AND sequence BETWEEN $2::int8 AND $3::int8"
)
_DROP_BODY: Final = LOST_BODIES.format(
    "DELETE FROM body WHERE room = $1::int8 AND sequence BETWEEN $2::int8 AND $3::int8"
)
_PUT_BODY: Final = (
    "INSERT INTO body (room, sequence, body)"
    " SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) ON CONFLICT DO NOTHING"
)
_PUT_PIECE: Final = (
    "INSERT INTO piece (body, index, data) SELECT body.body, u.index, u.data"
    " FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[]) AS u(room, sequence, index, data)"
    " JOIN body ON body.room = u.room AND body.sequence = u.sequence"
    " ON CONFLICT (body, index) DO UPDATE SET data = excluded.data"
)
_PUT_SHARED: Final = (
    "INSERT INTO piece (body, index, data) SELECT u.body, 0, u.data"
    " FROM unnest($1::bigint[], $2::bytea[]) AS u(body, data) ON CONFLICT DO NOTHING"
)
_TAKE: Final = (
    f"UPDATE {{0}} SET room = {MOVING}, sequence = u.at FROM unnest($1::bigint[], $2::bigint[], $3::bigint[])"
    " AS u(room, sequence, at) WHERE {0}.room = u.room AND {0}.sequence = u.sequence"
)
_TARGETS: Final = "unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u(at, room, sequence)"
_TAKEN: Final = f"taken.room = {MOVING} AND taken.sequence = u.at"
_MAKE_WAY: Final = f"DELETE FROM message USING {_TARGETS}, message AS taken WHERE {_TAKEN} AND message.{_AT.format('message')}"
_MAKE_WAY_BODY: Final = LOST_BODIES.format(
    f"DELETE FROM body USING {_TARGETS}, message AS taken WHERE {_TAKEN} AND body.{_AT.format('body')}"
)
_ARRIVE: Final = (
    "UPDATE message SET room = u.room, sequence = u.sequence, head = u.head"
    " FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[]) AS u(at, room, sequence, head)"
    f" WHERE message.room = {MOVING} AND message.sequence = u.at"
)
_ARRIVE_BODY: Final = (
    f"UPDATE body SET room = u.room, sequence = u.sequence FROM {_TARGETS}"
    f" WHERE body.room = {MOVING} AND body.sequence = u.at"
)
_PUT_FACT: Final = (
    "INSERT INTO fact (kind, digest, key, value)"
    " SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[])"
    " ON CONFLICT (kind, digest) DO UPDATE SET value = excluded.value"
)
_REMOVE_FACT: Final = (
    "DELETE FROM fact USING unnest($1::bytea[], $2::bytea[]) AS u(kind, digest)"
    " WHERE fact.kind = u.kind AND fact.digest = u.digest"
)
_PUT_CHUNK: Final = (
    "INSERT INTO chunk (room, first_offset, count, first_ms, last_ms, latest_ms, size, before, data)"
    " SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],"
    " $7::bigint[], $8::bigint[], $9::bytea[])"
)
_PUT_EXTENT: Final = (
    "INSERT INTO extent (log, first, next, latest_ms, written, dropped)"
    " SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])"
    " ON CONFLICT (log) DO UPDATE SET first = excluded.first, next = excluded.next,"
    " latest_ms = excluded.latest_ms, written = excluded.written, dropped = excluded.dropped"
)
_FILLED: Final = (
    "SELECT u.room FROM unnest($1::bigint[]) AS u(room)"
    " WHERE EXISTS (SELECT FROM message WHERE message.room = u.room)"
    " OR EXISTS (SELECT FROM body WHERE body.room = u.room)"
    " OR EXISTS (SELECT FROM chunk WHERE chunk.room = u.room)"
)
_LAST_WHOLE: Final = (
    "SELECT first_offset + count, before + size FROM (SELECT first_offset, count, before, size FROM chunk"
    " WHERE room = $1::int8 AND first_offset < $2::int8 ORDER BY first_offset DESC LIMIT 2) AS c"
    " WHERE first_offset + count <= $2::int8 ORDER BY first_offset DESC LIMIT 1"
)


class Extent(Struct, frozen=True):
    """Extent of a log."""

    first: int
    next: int
    #: Latest time of a record so far, in milliseconds: it never decreases.
    latest_ms: int
    #: Bytes of all chunks that were ever appended, and of those that were trimmed.
    written: int
    dropped: int


class Known(Struct):
    """Content of the tables that a store has in memory: it changes with batches of this process only."""

    #: node → room, of nodes that were cleared
    rooms: dict[int, int]
    extents: dict[int, Extent]
    #: Logs with chunks that are trimmed but not deleted yet.
    trimmed: set[int]
    next_room: int = FIRST_ROOM
    next_body: int = 1
    has_bodies: bool = False
    #: identity → payload and body, of payloads shared in the last batch with messages: a message that is routed to
    #: many queues may take several batches.
    shared: dict[int, tuple[bytes, int]] = {}

    def room(self, node: int) -> int:
        """Return the room of *node*."""
        return self.rooms.get(node, node)


class Plan:
    """The statements of a batch, and the state in memory once they are committed.

    Args:
        batch: The batch, within the limits of every store.
        known: The state before.
        rows: Returns the rows of a query.

    Raises:
        StoreRefused: A chunk does not begin at the end of its log.
    """

    def __init__(
        self,
        batch: ChangeSet,
        known: Known,
        rows: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]],
    ) -> None:
        self.statements: list[Statement] = []
        self._rows = rows
        #: As it is after the batch; the argument stays as it is, in case the batch fails.
        self.known = known = Known(
            known.rooms, known.extents, known.trimmed, known.next_room, known.next_body,
            known.has_bodies, known.shared,
        )  # fmt: skip
        moves = [
            (self._place(source), to, head, at) for at, (source, to, head) in enumerate(batch.moves)
        ]
        if moves:
            # Taken first, since the source may be cleared or put again in the same batch.
            taken = self._columns(source for source, *_ in moves)
            at = number_column([at for *_, at in moves])
            self._add(_TAKE.format("message"), *taken, at)
            if known.has_bodies:
                self._add(_TAKE.format("body"), *taken, at)
        if batch.cleared:
            self._clear(batch.cleared)
        for node, first, last in batch.dropped:
            self._add(_DROP, known.room(node), first, last)
            if known.has_bodies:
                self._add(_DROP_BODY, known.room(node), first, last)
        if batch.puts or batch.pieces:
            self._put(batch)
        if batch.updates:
            heads = octet_column(list(batch.updates.values()))
            self._add(_UPDATE, *self._columns(map(self._place, batch.updates)), heads)
        if moves:
            targets = (
                number_column([at for *_, at in moves]),
                *self._columns(self._place(to) for _, to, _, _ in moves),
            )
            heads = octet_column([head for _, _, head, _ in moves])
            if known.has_bodies:
                self._add(_MAKE_WAY_BODY, *targets)
                self._add(_MAKE_WAY, *targets)
                self._add(_ARRIVE_BODY, *targets)
            else:
                self._add(_MAKE_WAY, *targets)
            self._add(_ARRIVE, *targets, heads)
        if batch.removes:
            places = self._columns(map(self._place, batch.removes))
            self._add(_REMOVE, *places)
            if known.has_bodies:
                self._add(_REMOVE_BODY, *places)
        if batch.facts:
            self._change_facts(batch.facts)
        if batch.appends or batch.trims:
            self._change_logs(batch)

    def _add(self, text: str, *parameters: Any) -> None:
        self.statements.append((text, parameters))

    def _place(self, place: tuple[int, int]) -> tuple[int, int]:
        return self.known.room(place[0]), place[1]

    def _columns(self, places: Iterable[tuple[int, int]]) -> tuple[Any, Any]:
        found = list(places)
        return number_column([room for room, _ in found]), number_column([at for _, at in found])

    def _clear(self, nodes: set[int]) -> None:
        known = self.known
        known.rooms, known.extents = dict(known.rooms), dict(known.extents)
        known.trimmed = known.trimmed - nodes
        gone = [node for node in nodes if known.extents.pop(node, None) is not None]
        if gone:
            self._add("DELETE FROM extent WHERE log = ANY($1::bigint[])", number_column(gone))
        rooms = {known.room(node): node for node in nodes}
        for (room,) in self._rows(_FILLED, [number_column(list(rooms))]):
            node, fresh = rooms[room], known.next_room
            known.next_room += 1
            known.rooms[node] = fresh
            self._add("INSERT INTO cleared (room, node) VALUES ($1::int8, $2::int8)", room, node)
            self._add(
                "INSERT INTO room (node, room) VALUES ($1::int8, $2::int8)"
                " ON CONFLICT (node) DO UPDATE SET room = excluded.room",
                *(node, fresh),
            )

    # -- messages ----------------------------------------------------------------------------------

    def _put(self, batch: ChangeSet) -> None:
        known = self.known
        whole = [place for place, put in batch.puts.items() if put[1]]
        hollow = [place for place, put in batch.puts.items() if not put[1]]
        if known.has_bodies:
            # A message that is put again has its own payload from now on.
            if whole:
                self._add(_REMOVE_BODY, *self._columns(map(self._place, whole)))
            if hollow:
                self._add(_UNSHARE, *self._columns(map(self._place, hollow)))
        if batch.pieces:
            self._put_pieces(batch.pieces)
        if batch.puts and (batch.shares or known.shared):
            self._share(batch)
        #: whether spilled, whether shared → rows
        groups: dict[tuple[bool, bool], list[tuple[int, int, int, bytes, bytes]]] = {}
        sharers: list[tuple[tuple[int, int], int]] = []
        shared = known.shared
        rooms = known.rooms
        for (node, sequence), (head, payload, spilled) in batch.puts.items():
            if not payload:
                continue
            room = rooms.get(node, node)
            if shared and id(payload) in shared:
                sharers.append(((room, sequence), shared[id(payload)][1]))
                row = (room, sequence, len(payload), head, b"")
                groups.setdefault((spilled, True), []).append(row)
            else:
                row = (room, sequence, len(payload), head, payload)
                groups.setdefault((spilled, False), []).append(row)
        if sharers:
            columns = self._columns(place for place, _ in sharers)
            self._add(_PUT_BODY, *columns, number_column([body for _, body in sharers]))
        for (spilled, shares), rows in groups.items():
            at, sequences, sizes, whole_heads, payloads = zip(*rows, strict=True)
            self._add(
                _PUT,
                *(number_column(at), number_column(sequences), number_column(sizes)),
                *(octet_column(whole_heads), octet_column(payloads)),
                *(SHARED if shares else 0, spilled),
            )
        for spilled in (False, True):
            some = [place for place in hollow if batch.puts[place][2] == spilled]
            if some:
                columns = self._columns(map(self._place, some))
                heads = octet_column([batch.puts[place][0] for place in some])
                self._add(_PUT_PIECES, *columns, heads, spilled)

    def _put_pieces(self, pieces: dict[tuple[int, int, int], bytes]) -> None:
        known = self.known
        known.has_bodies = True
        places = list(dict.fromkeys(self._place((node, at)) for node, at, _ in pieces))
        first = known.next_body
        known.next_body += len(places)
        # Messages of which there are pieces keep their body.
        self._add(_PUT_BODY, *self._columns(places), number_column(range(first, known.next_body)))
        self._add(
            _PUT_PIECE,
            *self._columns(self._place((node, at)) for node, at, _ in pieces),
            number_column([index for *_, index in pieces]),
            octet_column(list(pieces.values())),
        )

    def _share(self, batch: ChangeSet) -> None:
        """Write the payloads that several messages share, or that the batch before has written."""
        known = self.known
        payloads = (payload for _, payload, _ in batch.puts.values())
        known.shared, known.next_body = shared_bodies(payloads, known.shared, known.next_body)
        if known.shared:
            known.has_bodies = True
            # Those of the batch before may have been deleted with their last message.
            self._add(
                _PUT_SHARED,
                number_column([body for _, body in known.shared.values()]),
                octet_column([payload for payload, _ in known.shared.values()]),
            )

    # -- facts and logs ----------------------------------------------------------------------------

    def _change_facts(self, facts: dict[tuple[str, bytes], bytes | None]) -> None:
        gone: list[tuple[bytes, bytes]] = []
        kept: list[tuple[bytes, bytes, bytes, bytes]] = []
        for (kind, key), value in facts.items():
            name, digest = kind.encode(), sha256(key).digest()
            if value is None:
                gone.append((name, digest))
            else:
                kept.append((name, digest, key, value))
        for text, rows in ((_PUT_FACT, kept), (_REMOVE_FACT, gone)):
            if rows:
                self._add(text, *(octet_column(column) for column in zip(*rows, strict=True)))

    def _change_logs(self, batch: ChangeSet) -> None:
        known = self.known
        known.extents, known.trimmed = dict(known.extents), set(known.trimmed)
        changed: set[int] = set()
        chunks: list[tuple[int, ...]] = []
        appended: dict[int, list[tuple[int, int]]] = {}
        for log, chunk in batch.appends:
            before = known.extents.get(log)
            if before is None:
                before = Extent(chunk.offset, chunk.offset, chunk.last_ms, 0, 0)
            elif chunk.offset != before.next:
                raise StoreRefused(f"log {log} goes on at offset {before.next}, not {chunk.offset}")
            after = _after(before, chunk)
            known.extents[log] = after
            changed.add(log)
            appended.setdefault(log, []).append((after.next, after.written))
            chunks.append(
                (
                    *(known.room(log), chunk.offset, chunk.count, chunk.first_ms, chunk.last_ms),
                    *(after.latest_ms, len(chunk.data), before.written),
                )
            )
        if chunks:
            columns = [number_column(column) for column in zip(*chunks, strict=True)]
            self._add(
                _PUT_CHUNK, *columns, octet_column([chunk.data for _, chunk in batch.appends])
            )
        for log, offset in batch.trims.items():
            extent = known.extents.get(log)
            if extent is None or offset <= extent.first:
                continue
            whole = [end for end in appended.get(log, ()) if end[0] <= offset] or self._rows(
                _LAST_WHOLE, (known.room(log), offset)
            )
            if whole and whole[-1][0] > extent.first:
                first, dropped = whole[-1]
                known.extents[log] = Extent(
                    first, extent.next, extent.latest_ms, extent.written, dropped
                )
                known.trimmed.add(log)
                changed.add(log)
        if changed:
            rows = [
                (log, each.first, each.next, each.latest_ms, each.written, each.dropped)
                for log in changed
                for each in (known.extents[log],)
            ]
            self._add(_PUT_EXTENT, *(number_column(column) for column in zip(*rows, strict=True)))


def _after(extent: Extent, chunk: Chunk) -> Extent:
    """Return the extent of a log after *chunk* was appended."""
    return Extent(
        extent.first,
        chunk.offset + chunk.count,
        max(extent.latest_ms, chunk.last_ms),
        extent.written + len(chunk.data),
        extent.dropped,
    )
