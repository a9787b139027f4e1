"""Disks that fail: SQLite VFSes between a store and the real files."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

#: Makes names that are unique in the process.
COUNTER = itertools.count()


class Disk(apsw.VFS):
    """Passes on every write, truncation and synchronization, after calling *before* with the operation's
    name and the number of calls so far."""

    def __init__(self, before: Callable[[str, int], None]) -> None:
        self.name = f"test-disk-{next(COUNTER)}"
        super().__init__(self.name, "")
        self.before = before
        self.calls = 0

    def called(self, what: str) -> None:
        self.calls += 1
        self.before(what, self.calls)

    def xOpen(self, name: object, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _File(self, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: object, flags: list[int]) -> None:
        super().__init__("", name, flags)  # type: ignore[arg-type]
        self.disk = disk

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self.disk.called("write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self.disk.called("sync")
        super().xSync(flags)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.disk.called("truncate")
        super().xTruncate(size)


@contextmanager
def disk(before: Callable[[str, int], None]) -> Iterator[Disk]:
    made = Disk(before)
    try:
        yield made
    finally:
        made.unregister()


class PowerCut(apsw.VFS):
    """A disk that loses power at call number *at*. Writes before a file's last synchronization are safe;
    :meth:`leave` then leaves the result on the real disk: any part of the later writes, by sectors."""

    SECTOR = 512

    def __init__(self, at: int) -> None:
        self.name = f"test-disk-{next(COUNTER)}"
        super().__init__(self.name, "")
        self.at = at
        self.calls = 0
        self.safe: dict[str, bytearray] = {}
        self.pending: dict[str, list[tuple[int, bytes | None]]] = {}

    def called(self) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise apsw.IOError("the power is gone")

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802
        self.called()
        super().xDelete(name, sync)
        self.safe.pop(name, None)
        self.pending.pop(name, None)

    def xOpen(self, name: object, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        if path not in self.safe:
            known = Path(path)
            self.safe[path] = bytearray(known.read_bytes() if known.exists() else b"")
            self.pending[path] = []
        return _PoweredFile(self, path, name, flags)

    def leave(self, chance: random.Random) -> None:
        for path, safe in self.safe.items():
            for offset, data in self.pending[path]:
                if data is None:
                    if chance.random() < 0.5:
                        del safe[offset:]
                    continue
                for start in range(0, len(data), self.SECTOR):
                    if chance.random() < 0.5:
                        part = data[start : start + self.SECTOR]
                        safe.extend(bytes(max(0, offset + start - len(safe))))
                        safe[offset + start : offset + start + len(part)] = part
            if safe or Path(path).exists():
                Path(path).write_bytes(safe)


class _PoweredFile(apsw.VFSFile):
    def __init__(self, disk: PowerCut, path: str, name: object, flags: list[int]) -> None:
        super().__init__("", name, flags)  # type: ignore[arg-type]
        self.disk = disk
        self.path = path

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self.disk.called()
        super().xWrite(data, offset)
        self.disk.pending[self.path].append((offset, data))

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.disk.called()
        super().xTruncate(size)
        self.disk.pending[self.path].append((size, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self.disk.called()
        super().xSync(flags)
        safe = self.disk.safe[self.path]
        for offset, data in self.disk.pending[self.path]:
            if data is None:
                del safe[offset:]
            else:
                safe.extend(bytes(max(0, offset - len(safe))))
                safe[offset : offset + len(data)] = data
        self.disk.pending[self.path].clear()


class Renames:
    """Files that were renamed, until their folder is synchronized too.

    The next rename may depend on that, and so may the caller after a reported success: a second rename
    before the first is synchronized is noted in ``early``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.unsafe: set[str] = set()
        self.early: list[str] = []
        self._replace, self._fsync = os.replace, os.fsync
        monkeypatch.setattr(os, "replace", self.replace)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def replace(self, source: str | Path, target: str | Path) -> None:
        if self.unsafe:
            self.early.append(Path(target).name)
        self._replace(source, target)
        self.names.append(Path(target).name)
        self.unsafe.add(str(target))

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        synced = os.fstat(handle)
        self.unsafe = {
            name for name in self.unsafe if not os.path.samestat(synced, os.stat(Path(name).parent))
        }
