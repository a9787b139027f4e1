"""Disks that fail: SQLite VFSes between a store and the real files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import apsw

#: Makes names that no other disk of the process has.
COUNTER = itertools.count()


class Disk(apsw.VFS):
    """Passes every write, truncation and synchronization on, after asking *before* with a name and
    how many there were."""

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
