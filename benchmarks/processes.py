"""Processes of the roles: process groups, controlled by lines of JSON, measured by /proc.

A role is started as ``PROGRAM ROLE '{"option": …}'``. It prints ``{"ready": 1}``, a server with its
``port``, once it can be used, and its result at the end. Servers and consumers end when the parent
closes their standard input; consumers also end after the number of messages that the parent has
written there as a line. Each process is the leader of a process group, which is killed when this
process ends at the latest, for any cause of its end. Times in results are seconds on a clock of the
process; ``cpu`` is its processor time after the warm-up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


#: Kills the registered process groups when its parent has ended.
_GUARD = """
import os, signal, sys
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for each in groups:
    try:
        os.killpg(each, signal.SIGKILL)
    except OSError:
        pass
"""
_guard: subprocess.Popen[bytes] | None = None


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start *command* as the leader of a process group, to be ended by :func:`end`.

    Otherwise it ends with this process: a guard process ensures this, even after ``kill -9``.
    """
    global _guard  # noqa: PLW0603  # one for all that this process starts
    if _guard is None or _guard.poll() is not None:
        _guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(_guard.__exit__, None, None, None)
    with _signals_held():
        # Ctrl-C is for the parent, which ends its children itself.
        process = subprocess.Popen(command, start_new_session=True, **options)
        _tell_guard("+", process.pid)
    return process


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delay signals that end this process until the end of the block.

    A child that is started but not registered with the guard yet would outlive an exception of a
    signal handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda came, _frame: held.append(came))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in held:
            signal.raise_signal(number)


def _tell_guard(what: str, pid: int) -> None:
    assert _guard is not None
    assert _guard.stdin is not None
    _guard.stdin.write(f"{what}{pid}\n".encode())
    _guard.stdin.flush()


def end(process: subprocess.Popen[Any], patience_s: float = 0.0) -> None:
    """Kill the group of *process*, after SIGTERM and up to *patience_s* seconds if set."""
    if patience_s and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _tell_guard("-", process.pid)


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that scratch folders are removed."""

    def leave(number: int, _frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


class RoleFailed(Exception):
    """A role ended without its result, or did not answer in time."""


class Role:
    """Process that plays a role in a measurement."""

    def __init__(
        self,
        command: Sequence[str],
        role: str,
        options: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self.name = f"{Path(command[-1]).name} {role}"
        self.patience_s = patience_s
        self.process = start(
            [*command, role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._errors: list[bytes] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()
        self.ready = self.line()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            del self._errors[:-50]
            self._errors.append(line)

    @property
    def port(self) -> int:
        return int(self.ready["port"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, patience_s: float | None = None) -> dict[str, Any]:
        """Return the next line that the role prints.

        Raises:
            RoleFailed: The role ended, printed no JSON, or did not answer in time.
        """
        try:
            line = self._lines.get(timeout=patience_s or self.patience_s)
        except queue.Empty:
            self.kill()
            waited = patience_s or self.patience_s
            raise RoleFailed(f"{self.name}: no answer in {waited:.0f} s") from None
        if line is None:
            self.process.wait()
            last = b"".join(self._errors[-8:]).decode(errors="replace").strip()
            raise RoleFailed(f"{self.name}: ended with {self.process.returncode}: {last}")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            self.kill()
            raise RoleFailed(f"{self.name}: printed {line!r}") from None
        return found

    def result(self, patience_s: float | None = None) -> dict[str, Any]:
        """Return the line that a client prints at its end."""
        found = self.line(patience_s)
        self.process.wait(self.patience_s)
        return found

    def expect(self, count: int) -> None:
        """Make a consumer end after *count* messages in total."""
        assert self.process.stdin
        self.process.stdin.write(f"{count}\n".encode())
        self.process.stdin.flush()

    def tell(self) -> dict[str, Any]:
        """Request from a watched server the values measured since the previous request."""
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.line()

    def ask(self, what: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """Send a job to a server that works on demand, and return its result."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        return self.line(patience_s)

    def end(self, patience_s: float | None = None) -> dict[str, Any]:
        """Close the input of a role that works until then, and return its result."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.result(patience_s)

    def kill(self) -> None:
        end(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def kill(pids: Sequence[int]) -> None:
    """Kill *pids* as in a crash, without any output or write afterwards."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cpu_s(pids: Sequence[int]) -> float:
    """Return the seconds of processor time that *pids* have used, as counted by the scheduler, with ended threads."""
    return sum(map(_cpu_s, pids))


def _cpu_s(pid: int) -> float:
    try:
        # The clock of another process, as clock_getcpuclockid(3) names it on Linux.
        return time.clock_gettime((~pid << 3) | 2)
    except (AttributeError, OSError):
        return _cpu_ticks_s(pid)


def _cpu_ticks_s(pid: int) -> float:
    """Return the same in ticks of the clock; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0


def tree_cpu_s(pid: int) -> float:
    """Return the seconds of processor time of *pid* and its descendants, including ended ones."""
    total = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            fields = (PROC / str(each) / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total * TICK_S


def descendants(pid: int) -> list[int]:
    """Return *pid* and its descendants."""
    found = [pid]
    for parent in found:
        for children in (PROC / str(parent) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def memory_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of *pids* in bytes."""
    return _status(pids, "VmRSS:")


def peak_bytes(pids: Sequence[int]) -> int:
    """Return the highest resident memory of *pids* so far, in bytes."""
    return _status(pids, "VmHWM:")


def _status(pids: Sequence[int], field: str) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) * 1024
    return total
