"""Carry an engine over a stream until both sides are done.

Two carriers behind one function: sockets, where the task that makes output sends it at once,
and any other trio stream. Both read and write whole chunks; neither knows a protocol.
"""

from __future__ import annotations

import socket as stdlib_socket
from collections.abc import Callable
from math import inf
from typing import Final, TypeAlias

import trio

from ..events import Event
from ..fronts.base import ProtocolEngine
from ..limits import DEFAULT_LIMITS, Limits

#: Bytes asked of a socket at a time; more gains nothing.
READ_SIZE: Final = 65_536
#: Chunks read from one connection before the others get a turn.
READS_IN_A_ROW: Final = 16
#: Buffers up to this size together are joined; larger ones are gathered by ``sendmsg``.
_JOIN_MAX: Final = 65_536
#: Buffers handed to one ``sendmsg``; below every system's IOV_MAX.
_GATHER_MAX: Final = 512

#: Windows has no ``sendmsg``.
_GATHERS: Final = hasattr(stdlib_socket.socket, "sendmsg")

Handle: TypeAlias = Callable[[list[Event]], None]


async def run_connection(
    stream: trio.abc.Stream,
    engine: ProtocolEngine,
    handle: Handle,
    *,
    limits: Limits = DEFAULT_LIMITS,
    initial: bytes = b"",
) -> None:
    """Carry *engine* over *stream* until it has nothing more to say or hear.

    The polite end is ``engine.close()``, from anywhere: its close goes out, and the engine
    itself bounds how long it waits for the answer. Cancelling is the abrupt end: the stream is
    dropped, because a cancelled send may have left half a frame. The network never makes this
    raise; the events say what happened.

    Args:
        stream: Any trio stream; a ``SocketStream`` is driven directly on its socket.
        engine: Whose bytes these are.
        handle: Called with the events of each chunk, from within this task tree. Not async.
        limits: ``output_max`` and ``write_stall_s`` are used here.
        initial: Bytes that were read from the stream already.
    """
    carrier: _Carrier
    if isinstance(stream, trio.SocketStream):
        carrier = _SocketCarrier(stream, engine, handle, limits)
    else:
        carrier = _StreamCarrier(stream, engine, handle, limits)
    await carrier.run(initial)


class _Carrier:
    """What both carriers share: a reader, and a task that writes and watches the clock."""

    def __init__(self, engine: ProtocolEngine, handle: Handle, limits: Limits) -> None:
        self.engine = engine
        self.handle = handle
        self.limits = limits
        #: The stream is gone; nothing can be sent.
        self.broken = False
        self._reading = False
        self._writer: trio.lowlevel.Task | None = None
        self._woken = False
        self._wakes_at = inf
        self._alarm = trio.CancelScope()
        self._room: trio.lowlevel.Task | None = None

    async def run(self, initial: bytes) -> None:
        """Until the engine has finished, or the stream is gone."""
        engine = self.engine
        engine.on_output = self.on_output
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_until_over, initial)
                await self._write_until_over()
                nursery.cancel_scope.cancel()
        finally:
            engine.on_output = _nowhere
            if not engine.finished:
                # Cancelled, or the stream broke under the writer: the links must hear of it.
                self.handle(engine.receive_eof(trio.current_time()))
            with trio.CancelScope(shield=True):
                await self.aclose()

    def on_output(self) -> None:
        """The engine has something to send, or has finished. Any task of this run may cause it."""
        self.wake()

    def wake(self) -> None:
        """Let the writer run in the scheduler's next pass, however often this is called."""
        self._woken = True
        writer = self._writer
        if writer is not None:
            self._writer = None
            trio.lowlevel.reschedule(writer)

    async def _park(self) -> None:
        """Wait for output, or for the engine's deadline."""
        if self._woken:
            self._woken = False
            return
        self._wakes_at = self.engine.deadline
        with trio.CancelScope(deadline=self._wakes_at) as self._alarm:
            self._writer = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._unpark)
        self._wakes_at = inf
        self._woken = False

    def _unpark(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._writer = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _watch_clock(self) -> None:
        """The engine's deadline may have come nearer."""
        deadline = self.engine.deadline
        if deadline < self._wakes_at:
            self._wakes_at = deadline
            self._alarm.deadline = deadline

    def feed(self, data: bytes) -> None:
        """One chunk through the engine, and what it reports to the owner."""
        self._reading = True
        try:
            events = self.engine.receive(data, trio.current_time())
            if events:
                self.handle(events)
        finally:
            self._reading = False
        self._watch_clock()

    def _tick(self) -> None:
        now = trio.current_time()
        if now >= self.engine.deadline:
            events = self.engine.tick(now)
            if events:
                self.handle(events)

    async def _read_until_over(self, initial: bytes) -> None:
        if initial:
            self.feed(initial)
            self.after_read()
        engine = self.engine
        reads = 0
        while not engine.finished and not self.broken:
            data = self.read_now() if reads else b""
            if not data:
                reads = 0
                if self.output_waiting() > self.limits.output_max:
                    await self._wait_for_room()
                    continue
                data = await self.read()
                if not data:
                    break
            self.feed(data)
            self.after_read()
            reads = reads + 1 if len(data) == READ_SIZE else 0
            if reads >= READS_IN_A_ROW:
                reads = 0
                await trio.lowlevel.checkpoint()
        if not engine.finished:
            self.handle(engine.receive_eof(trio.current_time()))
        self.wake()

    async def _wait_for_room(self) -> None:
        """The peer does not read: neither do we, until it has."""
        self._room = trio.lowlevel.current_task()

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            self._room = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _give_room(self) -> None:
        if self._room is not None and self.output_waiting() <= self.limits.output_max:
            room = self._room
            self._room = None
            trio.lowlevel.reschedule(room)

    async def _write_until_over(self) -> None:
        raise AssertionError("each carrier writes in its own way")

    def after_read(self) -> None:
        """A chunk has been handled."""

    def read_now(self) -> bytes:
        """What can be read without waiting; nothing if there is nothing, or no way to tell."""
        return b""

    async def read(self) -> bytes:
        """The next chunk; nothing at the end of the stream."""
        raise AssertionError("each carrier reads in its own way")

    def output_waiting(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self.engine.output_size

    async def aclose(self) -> None:
        """Drop the stream."""


def _nowhere() -> None:
    """The connection is over."""


class _StreamCarrier(_Carrier):
    """Any trio stream: memory, and later TLS and WebSocket."""

    def __init__(
        self, stream: trio.abc.Stream, engine: ProtocolEngine, handle: Handle, limits: Limits
    ) -> None:
        super().__init__(engine, handle, limits)
        self.stream = stream

    async def read(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(READ_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.broken = True
            return b""

    def after_read(self) -> None:
        if self.engine.output_size or self.engine.finished:
            self.wake()

    async def _write_until_over(self) -> None:
        engine = self.engine
        while not self.broken:
            while buffers := engine.take():
                with trio.move_on_after(self.limits.write_stall_s) as scope:
                    try:
                        await self.stream.send_all(b"".join(buffers))
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        self.broken = True
                        return
                if scope.cancelled_caught:
                    self.broken = True
                    return
                self._give_room()
            if engine.finished:
                await self._end()
                return
            await self._park()
            self._tick()

    async def _end(self) -> None:
        """Let the peer read our last bytes before the stream goes."""
        if isinstance(self.stream, trio.abc.HalfCloseableStream):
            try:
                await self.stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.broken = True

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self.stream)


class _SocketCarrier(_Carrier):
    """A socket, used directly.

    The first output after a read, or after the writer's turn, is sent by the task that made it:
    a reply leaves without another task switch. What follows in the same pass of the scheduler
    goes with the writer's turn, so that many sends make one write.
    """

    def __init__(
        self, stream: trio.SocketStream, engine: ProtocolEngine, handle: Handle, limits: Limits
    ) -> None:
        super().__init__(engine, handle, limits)
        self.stream = stream
        # trio's socket is non-blocking; its plain methods are what we want.
        fileno = stream.socket.fileno()
        self._socket = stdlib_socket.socket(fileno=fileno)
        self._blocked = False
        self._corked = False
        self._pending: list[bytes | memoryview] = []
        self._pending_size = 0

    def on_output(self) -> None:
        if self._reading or self._blocked:
            return
        if self._corked:
            self.wake()
        else:
            self._corked = True
            if self._send():
                self._watch_clock()
            else:
                self.wake()

    def output_waiting(self) -> int:
        return self._pending_size + self.engine.output_size

    def after_read(self) -> None:
        self._corked = False
        if not self._blocked and not self._send():
            self.wake()

    def read_now(self) -> bytes:
        try:
            return self._socket.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            self.broken = True
            return b""

    async def read(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(READ_SIZE)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return b""

    def _send(self) -> bool:
        """Send what there is; never waits. False if there is work for the writer.

        That is when the socket is full or broken, or the engine has finished.
        """
        engine = self.engine
        while not self.broken:
            if not self._pending:
                buffers = engine.take()
                if not buffers:
                    return not engine.finished
                size = sum(map(len, buffers))
                self._pending_size = size
                if len(buffers) > 1 and size <= _JOIN_MAX:
                    self._pending = [b"".join(buffers)]
                else:
                    self._pending = list(buffers)
            try:
                if len(self._pending) == 1 or not _GATHERS:
                    sent = self._socket.send(self._pending[0])
                else:
                    sent = self._socket.sendmsg(self._pending[:_GATHER_MAX])
            except (BlockingIOError, InterruptedError):
                self._blocked = True
                return False
            except OSError:
                self.broken = True
                break
            self._pending_size -= sent
            self._drop(sent)
        return False

    def _drop(self, sent: int) -> None:
        pending = self._pending
        gone = 0
        for buffer in pending:
            size = len(buffer)
            if sent < size:
                break
            sent -= size
            gone += 1
        del pending[:gone]
        if sent:
            pending[0] = memoryview(pending[0])[sent:]

    async def _write_until_over(self) -> None:
        engine = self.engine
        while not self.broken:
            if self._blocked:
                with trio.move_on_after(self.limits.write_stall_s) as scope:
                    try:
                        await trio.lowlevel.wait_writable(self._socket)
                    except (OSError, trio.ClosedResourceError):
                        return
                if scope.cancelled_caught:
                    return
                self._blocked = False
            self._send()
            self._give_room()
            if self._blocked:
                continue
            if engine.finished:
                await self._end()
                return
            self._corked = False
            await self._park()
            self._tick()

    async def _end(self) -> None:
        """Say that we are done, and let the peer read our last bytes.

        Closing a socket with unread input makes the system reset it, and the reset may overtake
        what the peer has not read yet.
        """
        try:
            self._socket.shutdown(stdlib_socket.SHUT_WR)
        except OSError:
            return
        with trio.move_on_after(1.0):
            for _ in range(READS_IN_A_ROW):
                if not await self.read():
                    return

    async def aclose(self) -> None:
        # The descriptor belongs to trio's socket.
        self._socket.detach()
        await trio.aclose_forcefully(self.stream)
