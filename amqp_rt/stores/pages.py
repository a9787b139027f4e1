"""Checksums for every page of an SQLite file, by a VFS between SQLite and the operating system.

SQLite does not verify the pages that it reads. Here each page of the database ends in a CRC-32 of its
content, seeded with its number, so that a flipped bit, a page of zeros and a page written to the wrong
place are detected when the page is read. The frames of SQLite's write-ahead log (WAL) have checksums,
but SQLite checks them only during recovery. So the checksums of frames that were written or recovered
are kept here and compared at each read, above all when frames are copied into the database.

WAL needs shared memory, which a VFS of apsw does not offer: the database must be in
``locking_mode=EXCLUSIVE`` before its WAL is used.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any, Final
from zlib import crc32

import apsw

__all__ = ["PAGE", "PENDING_PAGE", "RESERVED", "USABLE", "Files", "PageDamaged", "intact"]

#: Bytes of a page, of the checksum at its end, and of the usable rest.
PAGE: Final = 4096
RESERVED: Final = 4
USABLE: Final = PAGE - RESERVED
#: The page in which SQLite keeps its locks, and which it never writes.
PENDING_PAGE: Final = 0x40000000 // PAGE + 1
#: Octets of the header of a frame in the WAL, and of the WAL itself.
FRAME_HEADER: Final = 24
LOG_HEADER: Final = 32
_FRAME: Final = FRAME_HEADER + PAGE
#: Octets of the header of a database, in its first page.
_HEAD: Final = 100
_SUM: Final = struct.Struct(">I")


def _sum(page: bytes | memoryview, number: int) -> bytes:
    return _SUM.pack(crc32(memoryview(page)[:USABLE], number))


def intact(page: bytes | memoryview, number: int) -> bool:
    """Return whether *page* has the checksum of page *number* (from 1) of a database."""
    return len(page) == PAGE and bytes(page[USABLE:]) == _sum(page, number)


class PageDamaged(apsw.IOError):
    """The checksum of a page is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.extendedresult = apsw.SQLITE_IOERR_DATA


class _Database(apsw.VFSFile):
    """File of the database."""

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        if amount == PAGE and not offset % PAGE:
            data = super().xRead(PAGE, offset)
            if data:  # empty beyond the end of the file, where a new page will be written
                number = offset // PAGE + 1
                if not intact(data, number):
                    raise PageDamaged(f"page {number} is damaged")
            return data
        if offset + amount <= _HEAD:
            # SQLite reads the page size before it recovers the WAL, which may hold a new version of a
            # torn first page. It reads the whole page later, before it relies on its content.
            return super().xRead(amount, offset)
        # For a part of a page or of several, the whole pages are read and verified.
        first = offset // PAGE
        start = first * PAGE
        data = super().xRead(-(-(offset + amount - start) // PAGE) * PAGE, start)
        view = memoryview(data)
        for at in range(0, len(data), PAGE):
            number = first + at // PAGE + 1
            if not intact(view[at : at + PAGE], number):
                raise PageDamaged(f"page {number} is damaged")
        return data[offset - start : offset - start + amount]

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if len(data) != PAGE or offset % PAGE:
            raise apsw.IOError(f"{len(data)} octets at {offset} are no page")
        super().xWrite(data[:USABLE] + _sum(data, offset // PAGE + 1), offset)


class _WalFile(apsw.VFSFile):
    """WAL of the database."""

    def __init__(self, files: Files, base: str, name: Any, flags: list[int]) -> None:
        super().__init__(base, name, flags)
        self._files = files
        #: For each frame, by its number: the checksum of its page, and whether it is known.
        self._sums = array("I")
        self._known = bytearray()

    def _learn(self, frame: int, page: bytes | memoryview) -> None:
        missing = frame + 1 - len(self._sums)
        if missing > 0:
            self._sums.extend([0] * missing)
            self._known.extend(bytes(missing))
        self._sums[frame] = crc32(page)
        self._known[frame] = 1

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        data = super().xRead(amount, offset)
        frame, at = divmod(offset - LOG_HEADER, _FRAME)
        if amount == PAGE and at == FRAME_HEADER:
            if frame < len(self._known) and self._known[frame] and self._sums[frame] != crc32(data):
                raise PageDamaged(f"frame {frame} of the log is damaged")
        elif amount == _FRAME and not at and len(data) == _FRAME:
            # Read during recovery, in which SQLite verifies the frame itself.
            self._learn(frame, memoryview(data)[FRAME_HEADER:])
        return data

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        super().xWrite(data, offset)
        frame, at = divmod(offset - LOG_HEADER, _FRAME)
        if at == FRAME_HEADER and len(data) == PAGE:
            if frame < len(self._known):
                self._sums[frame] = crc32(data)
                self._known[frame] = 1
            else:
                self._learn(frame, data)
            self._files.frames = frame + 1
        elif at >= FRAME_HEADER and 0 <= frame < len(self._known):
            self._known[frame] = 0  # A partial write: the checksum of the page is unknown.


class Files(apsw.VFS):
    """VFS for the files of one store, which verifies the database at *path* and its WAL.

    Args:
        name: SQLite's name of the VFS, unique in the process.
        path: Path of the database.
        base: Name of the underlying VFS, "" for that of the platform.
    """

    def __init__(self, name: str, path: str, base: str = "") -> None:
        super().__init__(name, base)
        self.name = name
        self._path = path
        self._base = base
        #: Frames in the WAL since it last restarted.
        self.frames = 0

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        if name is not None:
            opened = name.filename() if isinstance(name, apsw.URIFilename) else name
            if flags[0] & apsw.SQLITE_OPEN_MAIN_DB and opened == self._path:
                return _Database(self._base, name, flags)
            if flags[0] & apsw.SQLITE_OPEN_WAL and opened == self._path + "-wal":
                return _WalFile(self, self._base, name, flags)
        return apsw.VFSFile(self._base, name, flags)
