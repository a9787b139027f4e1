"""Locks between processes that end with the process that holds them, however it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    #: Beyond everything that is written to a lock file: on Windows what is locked cannot be read.
    _LOCKED_BYTE = 1 << 30
else:
    import fcntl

__all__ = ["FileLock"]


class FileLock:
    """A lock file. It stays where it is: to delete it would let two processes lock two files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def acquire(self) -> bool:
        """Take the lock, if nobody has it: neither another process nor another object here."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            if sys.platform == "win32":
                os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
                os.lseek(file, 0, os.SEEK_SET)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._file = file
        try:
            os.ftruncate(file, 0)
            os.write(file, b"%d\n" % os.getpid())
        except OSError:
            pass  # The disk is full: nobody will know who has it.
        return True

    def holder(self) -> str:
        """Who has it, as far as is known."""
        try:
            pid = self.path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            pid = ""
        return f"process {pid}" if pid.isdigit() else "another process"

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
