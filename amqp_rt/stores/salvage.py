"""Recovery of readable data from a damaged store, page by page, without SQLite.

Pages with a correct checksum are trusted, so the tables are walked from their roots, and an unreadable
page costs only its own rows, whose range is known from its parent page. If an interior page cannot be
read, its children are found by the pointer map, in which SQLite records the parent of every page
(``auto_vacuum``). The pointer map also distinguishes pages in use from free ones, whose old rows must
not reappear.

The write-ahead log (WAL) is read here as well, to distinguish a torn end, which was never confirmed,
from damage. Each frame's checksum continues that of the frame before, so a frame can be verified even
if an earlier one cannot. Formats: "Database File Format" of SQLite, sections 1.5 to 1.8 and 4.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from .base import PIECE_MAX, SEQUENCE_MAX, Damage
from .pages import FRAME_HEADER, LOG_HEADER, PAGE, PENDING_PAGE, USABLE, intact

__all__ = ["Pages", "Tail", "copy", "free_name", "is_store", "read_tail"]

_MAGIC: Final = b"SQLite format 3\0"
_FRAME: Final = FRAME_HEADER + PAGE
_WORD: Final = 0xFFFFFFFF
#: Types of pages in a table's B-tree: interior pages and leaves.
_INTERIOR: Final = 0x05
_LEAF: Final = 0x0D
#: Depth that no tree of SQLite reaches.
_DEPTH_MAX: Final = 24
#: Entry type in the pointer map: a page of a tree, followed by its parent page.
_BELOW: Final = b"\x05"
_MAPPED: Final = USABLE // 5
#: Lowest and highest possible row id of a table.
_FIRST: Final = -(2**63)
_LAST: Final = 2**63 - 1
_BITS: Final = SEQUENCE_MAX.bit_length()
_PIECE_BITS: Final = PIECE_MAX.bit_length()
#: Rows and bytes that are written in one transaction.
_ROWS: Final = 1000
_BYTES: Final = 8 * 1024 * 1024


def is_store(path: Path, application_id: int) -> bool:
    """Return whether *path* is, or once was, a store. An empty file may have been one."""
    with path.open("rb") as file:
        page = file.read(PAGE)
        if not page:
            return True
        if page[:16] == _MAGIC and page[68:72] == application_id.to_bytes(4, "big"):
            return True
        number = 1
        while page and number <= 256:
            if intact(page, number):
                return True
            page, number = file.read(PAGE), number + 1
    return False


def version(path: Path) -> int | None:
    """Return the schema version of the store at *path*, None if its first page cannot be read."""
    with path.open("rb") as file:
        page = file.read(PAGE)
    return int.from_bytes(page[60:64], "big") if intact(page, 1) else None


def free_name(path: Path) -> Path:
    """Return an unused path beside *path* that contains the time of the discovery of the damage."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = base = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while name.exists() or name.with_name(name.name + "-wal").exists():
        number += 1
        name = base.with_name(f"{base.name}-{number}")
    return name


# -- the write-ahead log -----------------------------------------------------------------------------


class Tail(NamedTuple):
    """Part of a WAL that SQLite did not recover."""

    #: Page number → offset of its content in the WAL.
    pages: dict[int, int]
    #: Pages whose content was in an unreadable frame.
    lost: frozenset[int]
    damage: tuple[Damage, ...]
    path: Path


class _Frame(NamedTuple):
    good: bool
    #: The page in the frame; for a damaged frame, all pages that it may hold.
    pages: tuple[int, ...]
    #: Number of pages of the database after the transaction, if this is its last frame, else 0.
    commit: int


def _add(order: str, data: bytes, first: int, second: int) -> tuple[int, int]:
    """Continue a checksum of the WAL over *data*."""
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for one, two in zip(words, words, strict=True):
        first = (first + one + second) & _WORD
        second = (second + two + first) & _WORD
    return first, second


def _header_before(
    order: str, data: bytes, before: tuple[int, int], after: tuple[int, int]
) -> tuple[int, int]:
    """Return the page and commit fields that a frame's header must have had if *data* is its page.

    Computes the checksum backwards, from its value after the frame to that before it.
    """
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    first, second = after
    for at in range(len(words) - 2, -1, -2):
        second = (second - words[at + 1] - first) & _WORD
        first = (first - words[at] - second) & _WORD
    one = (first - before[0] - before[1]) & _WORD
    two = (second - before[1] - first) & _WORD
    page, commit = struct.unpack(">II", struct.pack(f"{order}II", one, two))
    return page, commit


def read_tail(path: Path, start: int, *, everything: bool = False) -> Tail:
    """Read the WAL at *path* from frame *start* on, where SQLite found its end, or *everything* in
    it if SQLite did not get that far.

    * Frames of an earlier use of the file, garbage, zeros or a copy of frames are ignored.
    * Frames of a transaction without its last frame are ignored: it was never committed.
    * A damaged frame followed by frames that were written after it had been synchronized is
      damage: the intact frames are to be applied, and the page in the damaged one is lost.
    * A damaged frame in the last transaction, whose end is intact: the transaction is dropped as a
      whole, since it may be torn, and reported, since it may have been confirmed.
    """
    nothing = Tail({}, frozenset(), (), path)
    if not path.exists():
        return nothing
    with path.open("rb") as file:
        header = file.read(LOG_HEADER)
        count = max(path.stat().st_size - LOG_HEADER, 0) // _FRAME
        if count <= start or len(header) < LOG_HEADER:
            return nothing
        order = "<" if sys.byteorder == "little" else ">"
        if header[:3] == b"\x37\x7f\x06" and header[3] in (0x82, 0x83):
            order = "<" if header[3] == 0x82 else ">"
        sum_ = struct.unpack(">II", header[24:])
        sound = _add(order, header[:24], 0, 0) == sum_
        heads = [_at(file, LOG_HEADER + number * _FRAME, FRAME_HEADER) for number in range(count)]
        salts = header[16:24] if sound else heads[0][8:16]
        last = max((n for n in range(start, count) if heads[n][8:16] == salts), default=-1)
        if last < 0:
            return nothing
        seen = {head[16:] for head in heads[:start]}
        before = sum_ if not start else struct.unpack(">II", heads[start - 1][16:])
        frames: list[_Frame] = []
        sums: list[tuple[int, int]] = [before]
        if not start and not sound:
            sums.append(_add(order, header[:24], 0, 0))
        for number in range(start, last + 1):
            head = heads[number]
            data = _at(file, LOG_HEADER + number * _FRAME + FRAME_HEADER, PAGE)
            page, commit = struct.unpack(">II", head[:8])
            stored: tuple[int, int] = struct.unpack(">II", head[16:])
            after = [_add(order, head[:8] + data, *one) for one in sums]
            chained = (not frames or frames[-1].good) and stored == after[0]
            if stored in after and head[16:] not in seen and (chained or head[8:16] == salts):
                if frames and not frames[-1].good and stored != after[0]:
                    # Only the checksum of the frame before was damaged.
                    frames[-1] = _Frame(True, frames[-1].pages[:1], frames[-1].commit)
                frames.append(_Frame(True, (page,), commit))
                seen.add(head[16:])
                sums = [stored]
                continue
            # If only the header of the frame is damaged, it may hold another page than the header names.
            # The checksum is too weak to decide, so both pages are lost.
            others = [_header_before(order, data, one, stored)[0] for one in sums]
            frames.append(_Frame(False, (page, *others), commit))
            sums = [stored, after[0]]
    return _classify(frames, start, path, everything=everything and sound)


def _at(file: Any, offset: int, length: int) -> bytes:
    file.seek(offset)
    data: bytes = file.read(length)
    return data


def _classify(frames: list[_Frame], start: int, path: Path, *, everything: bool) -> Tail:
    commits = [n for n, frame in enumerate(frames) if frame.good and frame.commit]
    bad = next((n for n, frame in enumerate(frames) if not frame.good), len(frames))
    end = commits[-1] if commits else -1
    damage: tuple[Damage, ...] = ()
    if end > bad:
        first = bad if frames[bad].commit else next(n for n in commits if n > bad)
        if any(frame.good for frame in frames[first + 1 :]):
            reason = f"frame {start + bad} of the log is damaged"
            damage = (Damage("page", -1, -1, -1, reason),)
        else:
            reason = (
                f"frame {start + bad} of the log cannot be read, so that the last batch is dropped;"
                " if the machine lost power during that write, no client was promised the batch"
            )
            damage = (Damage("batch", -1, -1, -1, reason),)
            end = max((n for n in commits if n < bad), default=-1)
    elif end >= 0 and not everything:
        damage = (Damage("page", -1, -1, -1, "the log is damaged beside its pages"),)
    pages: dict[int, int] = {}
    lost: set[int] = set()
    for number, frame in enumerate(frames[: end + 1]):
        for page in frame.pages:
            if frame.good:
                lost.discard(page)
                pages[page] = LOG_HEADER + (start + number) * _FRAME + FRAME_HEADER
            else:
                lost.add(page)
                pages.pop(page, None)
    return Tail(pages, frozenset(lost), damage, path)


# -- the database ------------------------------------------------------------------------------------


class Lost(NamedTuple):
    """Range of rows that cannot be read."""

    first: int
    last: int
    reason: str


class Row(NamedTuple):
    """Readable row."""

    id: int
    values: tuple[Any, ...]


class Pages:
    """Pages of a store, from the database and from the tail of its WAL."""

    def __init__(self, path: Path, tail: Tail | None = None) -> None:
        self._file = path.open("rb")
        self._log = None if tail is None or not tail.pages else tail.path.open("rb")
        self._newer = {} if tail is None else tail.pages
        self._lost = frozenset() if tail is None else tail.lost
        self.count = max(-(-path.stat().st_size // PAGE), *self._newer, 0, 0)
        #: Pages that could not be read.
        self.damaged: set[int] = set()

    def close(self) -> None:
        self._file.close()
        if self._log is not None:
            self._log.close()

    def page(self, number: int) -> bytes | None:
        """Return a page without its checksum, None if it cannot be read."""
        if self._log is not None and number in self._newer:
            return _at(self._log, self._newer[number], USABLE)
        if number not in self._lost and 0 < number <= self.count:
            page = _at(self._file, (number - 1) * PAGE, PAGE)
            if intact(page, number):
                return page[:USABLE]
        self.damaged.add(number)
        return None

    def rows(self, root: int) -> Iterator[Row | Lost]:
        """Yield the rows of the table with the root page *root*, in order, and the lost ranges."""
        return self._walk(root, _FIRST, _LAST, 0)

    def _walk(self, number: int, first: int, last: int, depth: int) -> Iterator[Row | Lost]:
        page = self.page(number)
        at = 100 if number == 1 else 0
        kind = -1 if page is None or depth > _DEPTH_MAX else page[at]
        if page is None or kind not in (_INTERIOR, _LEAF):
            yield from self._orphans(number, first, last, depth)
            return
        cells = struct.unpack_from(">H", page, at + 3)[0]
        places = struct.unpack_from(f">{cells}H", page, at + (12 if kind == _INTERIOR else 8))
        if kind == _LEAF:
            for place in places:
                yield self._row(page, place)
            return
        for place in places:
            child = struct.unpack_from(">I", page, place)[0]
            key, _ = _varint(page, place + 4)
            yield from self._walk(child, first, key, depth + 1)
            first = key + 1
        yield from self._walk(struct.unpack_from(">I", page, at + 8)[0], first, last, depth + 1)

    def _orphans(self, number: int, first: int, last: int, depth: int) -> Iterator[Row | Lost]:
        """Yield the rows below an unreadable page."""
        reason = f"page {number} is damaged"
        below, complete = self._below(number)
        if depth > _DEPTH_MAX or not below:
            yield Lost(first, last, reason)
            return
        known: list[tuple[int, int]] = []
        for child in below:
            key = self._first_key(child, depth + 1)
            if key is None:
                complete = False
            else:
                known.append((key, child))
        if not complete:
            yield Lost(first, last, f"{reason}, and a page below it; others were saved")
        known.sort()
        for (key, child), (end, _) in zip(known, [*known[1:], (last + 1, 0)], strict=True):
            yield from self._walk(child, key, end - 1, depth + 1)

    def _below(self, number: int) -> tuple[list[int], bool]:
        """Return the children of an interior page by the pointer map, and whether the whole map
        could be read."""
        wanted = _BELOW + number.to_bytes(4, "big")
        found: list[int] = []
        complete = True
        for start in range(2, self.count + 1, _MAPPED + 1):
            map_page = start + 1 if start == PENDING_PAGE else start
            page = self.page(map_page)
            if page is None:
                complete = False
                continue
            at = page.find(wanted)
            while at >= 0:
                if not at % 5 and map_page + 1 + at // 5 <= self.count:
                    found.append(map_page + 1 + at // 5)
                at = page.find(wanted, at + 1)
        return found, complete

    def _first_key(self, number: int, depth: int) -> int | None:
        page = self.page(number)
        if page is None or depth > _DEPTH_MAX or not struct.unpack_from(">H", page, 3)[0]:
            return None
        if page[0] == _INTERIOR:
            place = struct.unpack_from(">H", page, 12)[0]
            child = self._first_key(struct.unpack_from(">I", page, place)[0], depth + 1)
            # If the first child is unreadable, its last key still bounds the first key of this page.
            return _varint(page, place + 4)[0] if child is None else child
        place = struct.unpack_from(">H", page, 8)[0]
        _, at = _varint(page, place)
        return _varint(page, at)[0]

    def _row(self, page: bytes, place: int) -> Row | Lost:
        size, at = _varint(page, place)
        id_, at = _varint(page, at)
        local = size
        if size > USABLE - 35:
            least = (USABLE - 12) * 32 // 255 - 23
            local = least + (size - least) % (USABLE - 4)
            if local > USABLE - 35:
                local = least
        data = page[at : at + local]
        if local < size:
            parts = [data]
            left = size - local
            number = struct.unpack_from(">I", page, at + local)[0]
            while left > 0:
                more = self.page(number)
                if more is None:
                    return Lost(id_, id_, f"page {number} is damaged")
                parts.append(more[4 : 4 + left])
                left -= USABLE - 4
                number = struct.unpack_from(">I", more)[0]
            data = b"".join(parts)
        values = _record(data)
        return Row(id_, (id_, *values[1:]))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a variable-length integer of SQLite; return it and its end."""
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    value = value << 8 | data[at]
    return (value - 2**64 if value >= 2**63 else value), at + 1


def _record(data: bytes) -> list[Any]:
    """Return the values of a row."""
    end, at = _varint(data, 0)
    place = end
    values: list[Any] = []
    while at < end:
        kind, at = _varint(data, at)
        if kind >= 12:
            size = (kind - 12) // 2
            value: Any = data[place : place + size]
            if kind % 2:
                value = value.decode("utf-8")
        elif kind in (8, 9):
            size, value = 0, kind - 8
        elif kind == 0:
            size, value = 0, None
        else:
            size = (0, 1, 2, 3, 4, 6, 8)[kind]
            value = int.from_bytes(data[place : place + size], "big", signed=True)
        values.append(value)
        place += size
    return values


# -- saving ------------------------------------------------------------------------------------------

#: Table → kind of its rows in :class:`Damage`.
_WHAT: Final[dict[str, str]] = {
    "messages": "message",
    "chunks": "chunk",
    "logs": "log",
    "facts": "fact",
    "cleared": "clearing",
}


#: Tables in the order in which they are read → number of their columns.
_COLUMNS: Final[dict[str, int]] = {
    "messages": 5,
    "bodies": 2,
    "pieces": 2,
    "chunks": 8,
    "logs": 6,
    "facts": 4,
    "cleared": 3,
}


def copy(pages: Pages, roots: dict[str, int], db: apsw.Connection | None) -> list[Damage]:
    """Copy the readable data of *pages* into the empty store *db*; without one, only check them.

    Returns:
        The losses.
    """
    damage: list[Damage] = []
    lost_pieces: list[Lost] = []
    lost_bodies: list[Lost] = []
    scratch = apsw.Connection("")  # a temporary database, on the disk if it grows large
    try:
        # For messages: the number of pieces of each that has some, or -1 for a shared body, which has one
        # piece. For bodies: the number of pieces that were read.
        scratch.execute("CREATE TABLE whole (body INTEGER PRIMARY KEY, pieces INTEGER NOT NULL)")
        for table in _COLUMNS:
            lost = _copy_table(pages, table, roots[table], db, scratch)
            if table == "pieces":
                lost_pieces = lost
            elif table == "bodies":
                lost_bodies = lost
            else:
                damage += [d for one in lost for d in _named(table, one)]
        damage += _incomplete(db, scratch, lost_bodies, lost_pieces)
        if db is not None:
            _repair_logs(db)
    finally:
        scratch.close()
    return damage


def _copy_table(
    pages: Pages,
    table: str,
    root: int,
    db: apsw.Connection | None,
    scratch: apsw.Connection,
) -> list[Lost]:
    lost: list[Lost] = []
    rows: list[tuple[Any, ...]] = []
    size = 0
    columns = _COLUMNS[table]
    marks = ", ".join("?" * columns)
    if table in ("messages", "bodies"):
        scratch.execute(f"CREATE TABLE {table} (place INTEGER PRIMARY KEY, value INTEGER)")

    def write() -> None:
        if table == "messages":
            found = [(row[0], row[1]) for row in rows if row[1]]
            scratch.executemany("INSERT OR REPLACE INTO messages VALUES (?, ?)", found)
        elif table == "bodies":
            scratch.executemany("INSERT OR REPLACE INTO bodies VALUES (?, ?)", rows)
        elif table == "pieces":
            scratch.executemany(
                "INSERT INTO whole VALUES (?, 1) ON CONFLICT DO UPDATE SET pieces = pieces + 1",
                [(row[0] >> _PIECE_BITS,) for row in rows],
            )
        if db is not None and rows:
            with db:
                db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)  # noqa: S608
        rows.clear()

    for row in pages.rows(root):
        if isinstance(row, Lost):
            lost.append(row)
            continue
        if len(row.values) != columns:
            lost.append(Lost(row.id, row.id, f"row {row.id} is not of this table"))
            continue
        rows.append(row.values)
        size += sum(len(value) for value in row.values if isinstance(value, bytes))
        if len(rows) >= _ROWS or size >= _BYTES:
            write()
            size = 0
    write()
    return lost


def _named(table: str, lost: Lost) -> Iterable[Damage]:
    """Describe *lost* by nodes and sequence numbers."""
    what = _WHAT[table]
    first, last, reason = lost
    if table == "cleared":
        reason += "; messages that had been cleared may be back"
    if table == "logs":
        node = first if first == last else -1
        yield Damage(
            what, node, -1, -1, f"{reason}; where logs began and ended is taken from chunks"
        )
    elif table not in ("messages", "chunks"):
        yield Damage(what, -1, -1, -1, reason)
    elif first >= 0 and first >> _BITS == last >> _BITS:
        yield Damage(what, first >> _BITS, first & SEQUENCE_MAX, last & SEQUENCE_MAX, reason)
    else:
        low, high = first >> _BITS, last >> _BITS
        if first != _FIRST:
            yield Damage(what, low, first & SEQUENCE_MAX, SEQUENCE_MAX, reason)
        if first == _FIRST or last == _LAST or high - low > 1:
            yield Damage(what, -1, -1, -1, reason)
        if last != _LAST:
            yield Damage(what, high, 0, last & SEQUENCE_MAX, reason)


def _incomplete(
    db: apsw.Connection | None,
    scratch: apsw.Connection,
    lost_bodies: list[Lost],
    lost_pieces: list[Lost],
) -> Iterator[Damage]:
    """Delete messages with missing pieces, and pieces without a message; yield the losses."""
    reasons = {one.reason for one in (*lost_bodies, *lost_pieces)}
    reason = "; ".join(sorted(reasons)) or "pieces of it are missing"
    broken: list[Any] = scratch.execute(
        "SELECT m.place FROM messages m LEFT JOIN bodies b ON b.place = m.place"
        " LEFT JOIN whole w ON w.body = b.value WHERE abs(m.value) IS NOT w.pieces"
    ).fetchall()
    for (place,) in broken:
        node, sequence = place >> _BITS, place & SEQUENCE_MAX
        yield Damage("message", node, sequence, sequence, f"a piece of it is lost: {reason}")
    if not broken and (lost_bodies or lost_pieces):
        yield Damage("piece", -1, -1, -1, f"{reason}; of no message that is there")
    if db is not None:
        with db:
            db.executemany("DELETE FROM messages WHERE place = ?", broken)
            db.executemany("DELETE FROM bodies WHERE place = ?", broken)
            db.execute(
                "DELETE FROM pieces WHERE id >> ? NOT IN (SELECT body FROM bodies)", (_PIECE_BITS,)
            )


def _repair_logs(db: apsw.Connection) -> None:
    """Restore lost rows of logs from their chunks."""
    with db:
        db.execute(
            "INSERT INTO logs SELECT place >> ?1, min(place & ?2), max((place & ?2) + count),"
            " max(latest_ms), max(before + size), min(before) FROM chunks"
            " WHERE place >> ?1 NOT IN (SELECT log FROM logs) AND NOT EXISTS"
            " (SELECT 1 FROM cleared WHERE id = (place >> ?1) << 1 | 1"
            "  AND place & ?2 BETWEEN first AND last) GROUP BY place >> ?1",
            (_BITS, SEQUENCE_MAX),
        )
