"""Locks between processes, which are released when their process ends, even by a crash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    #: Beyond the contents of a lock file, since locked bytes cannot be read on Windows.
    _LOCKED_BYTE = 1 << 30
else:
    import fcntl

__all__ = ["FileLock"]


class FileLock:
    """Lock file. Only its holder may delete it, and the lock of a file that was deleted does not count: two
    processes could otherwise lock two different files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def acquire(self) -> bool:
        """Acquire the lock unless it is held by another process or another object; return whether it
        was acquired."""
        while True:
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
            if self._is_there(file):
                break
            # A holder has deleted the file after it was opened here.
            os.close(file)
        self._file = file
        try:
            os.ftruncate(file, 0)
            os.write(file, b"%d\n" % os.getpid())
        except OSError:
            pass  # The disk is full: the holder will be unknown to others.
        return True

    def holder(self) -> str:
        """Return a description of the holder, as far as it is known."""
        try:
            pid = self.path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            pid = ""
        return f"process {pid}" if pid.isdigit() else "another process"

    def _is_there(self, file: int) -> bool:
        """Return whether the open *file* is the one at the path."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; with *remove* delete the file, where the system can delete open files."""
        if self._file >= 0:
            if remove and sys.platform != "win32":
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1
