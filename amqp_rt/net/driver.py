"""Carrying an engine over a stream until both sides have finished.

One function serves every stream. A socket, and a stream in memory, are carried directly, without a
task between the engine and the bytes, also with TLS or a WebSocket on them; with a
:class:`~amqp_rt.net.reactor.Reactor` one task waits for all sockets together. Any other stream,
such as one of the application, has tasks that read and send.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

import trio

from ..clock import Clock
from ..fronts.base import ProtocolEngine
from ..limits import DEFAULT_LIMITS, Limits
from .carrier import READ_SIZE, READS_IN_A_ROW, Carrier, Handle
from .channels import layered
from .layers import unwrap
from .memory import MemoryStream
from .websocket_frames import WebSocketLayer

if TYPE_CHECKING:
    from .reactor import Reactor

__all__ = ["READ_SIZE", "Handle", "TrioClock", "run_connection"]


class TrioClock:
    """Clock of the running event loop, which is virtual if trio's clock is."""

    def monotonic(self) -> float:
        """Return the time used by engines and deadlines."""
        return trio.current_time()

    def wall(self) -> float:
        """Return the seconds since 1970-01-01 UTC."""
        return time.time()


#: The one clock of all connections of a container.
TRIO_CLOCK: Final = TrioClock()


async def run_connection(
    stream: trio.abc.Stream,
    engine: ProtocolEngine,
    handle: Handle,
    *,
    stopping: trio.Event | None = None,
    grace_s: float = 5.0,
    clock: Clock = TRIO_CLOCK,
    limits: Limits = DEFAULT_LIMITS,
    initial: bytes = b"",
    reactor: Reactor | None = None,
) -> None:
    """Carry *engine* over *stream* until the connection has ended.

    The polite end is ``engine.close()``, from anywhere, or setting *stopping*: the close is sent
    and the peer has time to answer. Cancelling is the abrupt end: the stream is dropped, because a
    cancelled send may have left half a frame. In either case every link is notified before this
    returns. Network failures never raise here; events report them. Exceptions of *handle* or of an
    endpoint are raised here, after the connection was dropped.

    Args:
        stream: Any trio stream; the driver owns it from now on, and closes it at the end.
        engine: The engine to carry.
        handle: Called with the events of each chunk. A plain call, which must not wait.
        stopping: Set it to end politely.
        grace_s: Seconds that the peer has to answer our close after *stopping*.
        clock: The clock with which the engine was created.
        limits: ``output_max``, ``write_stall_s`` and ``websocket_linger_s`` are used here.
        initial: Bytes that were read from the stream already.
        reactor: Waits for this connection's socket together with others. Without one, the
            connection has two tasks of its own.
    """
    bottom, layers, rest = unwrap(stream)
    websocket = any(isinstance(layer, WebSocketLayer) for layer in layers)
    linger_s = limits.websocket_linger_s if websocket else None
    carry: Callable[[bytes], Awaitable[None]]
    sock: socket.socket | None = None
    try:
        if isinstance(bottom, trio.SocketStream):
            # trio's socket gives up the descriptor, so that no other code can close it meanwhile.
            sock = socket.socket(fileno=bottom.socket.detach())
            carrier = Carrier(
                layered(sock, layers),
                engine,
                handle,
                limits=limits,
                clock=clock,
                closes=not layers,
                linger_s=linger_s,
            )
            if reactor is not None:
                carry = partial(reactor.carry, carrier, sock)
            else:
                carry = _Tasks(
                    carrier,
                    partial(trio.lowlevel.wait_readable, sock),
                    partial(trio.lowlevel.wait_writable, sock),
                ).carry
        elif isinstance(bottom, MemoryStream):
            carrier = Carrier(
                layered(bottom, layers),
                engine,
                handle,
                limits=limits,
                clock=clock,
                gathers=True,
                closes=not layers,
                linger_s=linger_s,
            )
            carry = _Tasks(carrier, bottom.wait_readable, bottom.wait_writable).carry
        else:
            channel = _StreamChannel()
            carrier = Carrier(
                channel, engine, handle, limits=limits, clock=clock, gathers=False, closes=False
            )
            carry = _StreamTasks(carrier, stream, channel, limits).carry
        try:
            if stopping is None:
                await carry(initial + rest)
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_stop_when, stopping, carrier, grace_s)
                    await carry(initial + rest)
                    nursery.cancel_scope.cancel()
        finally:
            carrier.drop("the connection was dropped")
            carrier.leave()
        if carrier.failure is not None:
            raise carrier.failure
    finally:
        if sock is not None:
            sock.close()
        elif isinstance(bottom, MemoryStream):
            bottom.close()
        else:
            await _close_forcefully(stream)


async def _stop_when(stopping: trio.Event, carrier: Carrier, grace_s: float) -> None:
    await stopping.wait()
    carrier.stop(grace_s)


async def _close_forcefully(stream: trio.abc.Stream) -> None:
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)


class Turn:
    """Place where one task waits to be called; calls before it runs count as one."""

    def __init__(self) -> None:
        self._called = False
        self._waiting: trio.lowlevel.Task | None = None

    def call(self) -> None:
        """Let the task run in the scheduler's next pass."""
        self._called = True
        if self._waiting is not None:
            trio.lowlevel.reschedule(self._waiting)
            self._waiting = None

    async def wait(self) -> None:
        """Wait until called. Always a checkpoint; a cancelled wait loses no call."""
        if self._called:
            await trio.lowlevel.checkpoint()
        else:
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self._called = False

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED


def in_trio_time(carrier: Carrier) -> float:
    """Convert the next alarm of *carrier* to trio's clock."""
    if carrier.wakes_at == inf or carrier.clock is TRIO_CLOCK:
        return carrier.wakes_at
    return trio.current_time() + (carrier.wakes_at - carrier.clock.monotonic())


class _TaskHost:
    """Base of hosts with tasks of their own: turns, an alarm, and handling of failures."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._turn = Turn()
        self._reading = Turn()
        self._alarm = trio.CancelScope()
        self._scope = trio.CancelScope()

    def watch(self, carrier: Carrier) -> None:
        """Wake the tasks for which the carrier now has work."""
        if carrier.wants_read:
            self._reading.call()
        if carrier.wants_write:
            self._turn.call()

    def alarm(self, carrier: Carrier) -> None:
        """Set the alarm earlier."""
        self._alarm.deadline = in_trio_time(carrier)

    def later(self, carrier: Carrier) -> None:
        """Wake the task that sends, or the one that processes input.

        The latter also if the channel is full, for which the former waits.
        """
        if carrier.resuming or carrier.wants_write:
            self._reading.call()
        else:
            self._turn.call()

    def ended(self, carrier: Carrier) -> None:
        """Cancel the tasks, which have nothing left to do."""
        self._scope.cancel()

    def _call(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            self.carrier.fail(error)

    def _expire(self) -> None:
        self.carrier.expire(self.carrier.clock.monotonic())

    async def _run(self, initial: bytes, *tasks: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            self._call(lambda: self.carrier.start(self, initial))
            for task in tasks:
                nursery.start_soon(task)


class _Tasks(_TaskHost):
    """Two tasks for a channel: a reader, and one that sends and watches the clock.

    The latter sends only output that could not be sent at once.
    """

    def __init__(
        self,
        carrier: Carrier,
        wait_readable: Callable[[], Awaitable[None]],
        wait_writable: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(carrier)
        self._wait_readable = wait_readable
        self._wait_writable = wait_writable

    async def carry(self, initial: bytes) -> None:
        """Run until the carrier has ended."""
        await self._run(initial, self._read, self._write)

    async def _read(self) -> None:
        carrier = self.carrier
        while True:
            if not carrier.wants_read:
                await self._reading.wait()
                if carrier.resuming or not carrier.wants_read:
                    self._call(carrier.flush)
                continue
            await self._wait_readable()
            try:
                for _ in range(READS_IN_A_ROW):
                    if carrier.readable() < READ_SIZE or not carrier.wants_read:
                        break
            except Exception as error:
                carrier.fail(error)

    async def _write(self) -> None:
        carrier = self.carrier
        while True:
            with trio.CancelScope(deadline=in_trio_time(carrier)) as self._alarm:
                # One scope for many turns: cancelling any of these waits is harmless.
                while True:
                    if carrier.wants_write:
                        await self._wait_writable()
                        self._call(carrier.writable)
                    else:
                        await self._turn.wait()
                        if not carrier.wants_write:
                            self._call(carrier.flush)
            self._call(self._expire)


class _StreamChannel:
    """Channel of a stream that can only be awaited; it holds one chunk in each direction."""

    def __init__(self) -> None:
        self.arrived: bytes | None = None
        self.departing: bytes | memoryview | None = None
        self.ending = False
        self.turn = Turn()

    def recv(self, size: int, /) -> bytes:
        """Take the chunk that the reading task left here."""
        arrived = self.arrived
        if arrived is None:
            raise BlockingIOError
        self.arrived = None
        return arrived

    def send(self, data: bytes | memoryview, /) -> int:
        """Leave *data* for the sending task."""
        if self.departing is not None:
            raise BlockingIOError
        self.departing = data
        self.turn.call()
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Send the first buffer; the carrier offers the others again."""
        return self.send(buffers[0])

    def shutdown(self, how: int, /) -> None:
        """End our direction, once the chunk left here has been sent."""
        if self.departing is not None:
            raise BlockingIOError
        self.ending = True
        self.turn.call()

    def close(self) -> None:
        """Do nothing, since the driver closes the stream."""


class _StreamTasks(_TaskHost):
    """Tasks for any other stream. No timer but the write stall cancels a send that has begun."""

    def __init__(
        self, carrier: Carrier, stream: trio.abc.Stream, channel: _StreamChannel, limits: Limits
    ) -> None:
        super().__init__(carrier)
        self._stream = stream
        self._channel = channel
        self._stall_s = limits.write_stall_s

    async def carry(self, initial: bytes) -> None:
        """Run until the carrier has ended."""
        await self._run(initial, self._read, self._send, self._flush, self._watch_clock)

    async def _read(self) -> None:
        carrier = self.carrier
        while True:
            if not carrier.wants_read:
                await self._reading.wait()
                if carrier.resuming or not carrier.wants_read:
                    self._call(carrier.flush)
                continue
            try:
                data = await self._stream.receive_some(READ_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                carrier.drop("the stream broke")
                return
            self._channel.arrived = bytes(data)
            self._call(carrier.readable)

    async def _send(self) -> None:
        channel = self._channel
        while True:
            await channel.turn.wait()
            while channel.departing is not None:
                with trio.move_on_after(self._stall_s) as scope:
                    try:
                        await self._stream.send_all(channel.departing)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        self.carrier.drop("the stream broke")
                        return
                if scope.cancelled_caught:
                    self.carrier.drop(f"the peer has not read for {self._stall_s:g} s")
                    return
                channel.departing = None
                if self.carrier.wants_write:
                    self._call(self.carrier.writable)
            if channel.ending:
                await self._end()
                return

    async def _end(self) -> None:
        """End our direction; where the stream cannot end it alone, close the stream."""
        try:
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            else:
                await self._stream.aclose()
                self.carrier.drop("the stream is closed")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.carrier.drop("the stream broke")

    async def _flush(self) -> None:
        while True:
            await self._turn.wait()
            if not self.carrier.wants_write:
                self._call(self.carrier.flush)

    async def _watch_clock(self) -> None:
        while True:
            with trio.CancelScope(deadline=in_trio_time(self.carrier)) as self._alarm:
                await trio.sleep_forever()
            self._call(self._expire)
