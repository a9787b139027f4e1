"""Socket pair between a supervisor and the process of a worker: its report that it serves, and requests of probes.

Both ends write lines of JSON. The worker writes a :class:`Report` when it serves, and an :class:`Answer` to each
:class:`Question`, in any order. The end of the stream is the end of the other process, even by ``kill -9``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import trio
from msgspec import Struct

if TYPE_CHECKING:
    from ..telemetry.probe import Probe

log = logging.getLogger("amqp_rt.cli")

#: Environment variable of workers: number, colon, descriptor.
WORKER: Final = "AMQP_RT_WORKER"
#: Seconds for the answer of a worker: less than the second that Kubernetes gives a probe by default.
ANSWER_S: Final = 0.8
#: Questions without an answer, beyond which a worker is asked nothing more: they fit into the buffer of the socket, so that
#: no question waits for a process that reads none.
QUESTIONS_MAX: Final = 32
_CHUNK: Final = 65_536


class Report(Struct, tag=True):
    """Report of a worker that it serves."""

    name: str
    listeners: list[str]
    pid: int


class Question(Struct, tag=True):
    """Request of a probe, passed on to a worker."""

    number: int
    path: str
    #: Pattern of nodes whose own metrics are wanted.
    node: str | None = None


class Answer(Struct, tag=True):
    """Response of a worker to the request with the same number."""

    number: int
    status: int
    body: str


_Line: TypeAlias = Report | Question | Answer


class _Lines:
    """Lines on a stream, of which several tasks may write."""

    def __init__(self, ours: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._writing = trio.Lock()
        self._rest = bytearray()
        self._decoder = msgspec.json.Decoder(_Line)

    async def write(self, line: _Line) -> None:
        """Write a line, which is not cut by a cancellation if the buffer has room for it.

        Raises:
            BrokenResourceError: The other process has ended.
        """
        async with self._writing:
            await self._stream.send_all(msgspec.json.encode(line) + b"\n")

    async def read(self) -> _Line | None:
        """Return the next line, or None once the other process has ended. A cancellation loses nothing."""
        start = 0
        while (end := self._rest.find(b"\n", start)) < 0:
            start = len(self._rest)
            try:
                more = await self._stream.receive_some(_CHUNK)
            except trio.BrokenResourceError:
                return None
            if not more:
                return None
            self._rest += more
        line: _Line = self._decoder.decode(self._rest[:end])
        del self._rest[: end + 1]
        return line


class ProcessChannel:
    """End of a supervisor, for one process of a worker.

    Args:
        ours: Its socket.
        served: Called when the process reports that it serves.
    """

    def __init__(self, ours: socket.socket, served: Callable[[Report], None]) -> None:
        self._lines = _Lines(ours)
        self._served = served
        self._numbers = count(1)
        self._asked: dict[int, trio.MemorySendChannel[Answer]] = {}

    async def run(self) -> None:
        """Read what the process writes, until it ends."""
        try:
            while (line := await self._lines.read()) is not None:
                if isinstance(line, Report):
                    self._served(line)
                elif isinstance(line, Answer) and (asked := self._asked.pop(line.number, None)):
                    with suppress(trio.BrokenResourceError):  # It came too late.
                        asked.send_nowait(line)
                    asked.close()
        finally:
            for each in self._asked.values():
                each.close()

    async def ask(self, path: str, node: str | None = None) -> Answer | None:
        """Pass a request on to the process; return its answer, or None if none comes within ``ANSWER_S`` seconds."""
        if len(self._asked) >= QUESTIONS_MAX:
            return None
        number = next(self._numbers)
        self._asked[number], answered = trio.open_memory_channel[Answer](1)
        with trio.move_on_after(ANSWER_S), answered:
            try:
                await self._lines.write(Question(number, path, node))
                return await answered.receive()
            except (trio.BrokenResourceError, trio.EndOfChannel):
                pass
        return None


class WorkerChannel:
    """End of a worker.

    Args:
        text: The value of :data:`WORKER`.
    """

    def __init__(self, text: str) -> None:
        number, _, descriptor = text.partition(":")
        self.number = int(number)
        self._socket = socket.socket(fileno=int(descriptor))
        # Processes that the application starts must not keep the supervisor waiting for our end.
        self._socket.set_inheritable(False)

    @cached_property
    def _lines(self) -> _Lines:
        return _Lines(self._socket)

    async def report(self, name: str, listeners: list[str]) -> None:
        """Report that the worker serves."""
        await self._write(Report(name, listeners, os.getpid()))

    async def run(self, stop: Callable[[], None], probe: Probe | None) -> None:
        """Answer requests by *probe* until the supervisor has ended, and call *stop* then."""
        async with trio.open_nursery() as nursery:
            while (line := await self._lines.read()) is not None:
                if isinstance(line, Question) and probe is not None:
                    nursery.start_soon(self._answer, line, probe)
            nursery.cancel_scope.cancel()
        log.warning("the supervisor has ended; stopping")
        stop()

    async def _answer(self, question: Question, probe: Probe) -> None:
        try:
            status, body = await probe.answer(question.path, question.node)
        except Exception:
            log.exception("a request of a probe failed")
            status, body = 500, ""
        await self._write(Answer(question.number, status, body))

    async def _write(self, line: _Line) -> None:
        # The end of the supervisor is noticed by :meth:`run`.
        with suppress(trio.BrokenResourceError):
            await self._lines.write(line)
