"""Byte streams in memory, and listeners that have a name instead of a port."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import Final

import trio

from ..errors import ConnectFailed

#: Bytes that one side may be ahead before its send waits.
_AHEAD_MAX: Final = 256 * 1024
#: ``send_all`` hands over pieces of this size, so that no single send exceeds the bound by more.
_PIECE: Final = 65_536
#: Connections that wait for a listener to accept them.
_BACKLOG: Final = 128


class _Pipe:
    """One direction: chunks in order, and the tasks that wait for more or for room."""

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        #: Bytes of the first chunk that have been read.
        self.taken = 0
        self.size = 0
        #: The sender has said that nothing more comes.
        self.ended = False
        #: The reader has closed its end.
        self.deaf = False
        self.arrivals = trio.lowlevel.ParkingLot()
        self.departures = trio.lowlevel.ParkingLot()

    @property
    def readable(self) -> bool:
        """A read would not wait."""
        return bool(self.chunks) or self.ended

    @property
    def writable(self) -> bool:
        """A send would not wait."""
        return self.size < _AHEAD_MAX or self.deaf

    def put(self, chunk: bytes) -> None:
        """Hand *chunk* over; the reader hears of it once."""
        if not self.chunks:
            self.arrivals.unpark_all()
        self.chunks.append(chunk)
        self.size += len(chunk)

    def take(self, size: int | None) -> bytes:
        """What has arrived, all of it but at most *size* bytes."""
        chunks = self.chunks
        full = self.size >= _AHEAD_MAX
        if size is None:
            size = self.size
        if len(chunks) == 1 and not self.taken and len(chunks[0]) <= size:
            data = chunks.popleft()
        else:
            pieces: list[bytes | memoryview] = []
            room = size
            while chunks and room:
                first = chunks[0]
                end = min(len(first), self.taken + room)
                pieces.append(memoryview(first)[self.taken : end])
                room -= end - self.taken
                if end == len(first):
                    chunks.popleft()
                    self.taken = 0
                else:
                    self.taken = end
            data = b"".join(pieces)
        self.size -= len(data)
        if full and self.size < _AHEAD_MAX:
            self.departures.unpark_all()
        return data

    def end(self) -> None:
        """Nothing more is sent."""
        self.ended = True
        self.arrivals.unpark_all()
        self.departures.unpark_all()

    def abandon(self) -> None:
        """Nothing more is read."""
        self.deaf = True
        self.chunks.clear()
        self.size = 0
        self.arrivals.unpark_all()
        self.departures.unpark_all()


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a pair; what one end sends the other receives.

    It has two faces: a trio stream, and the calls of a non-blocking socket, by which the driver
    moves bytes without a task in between.
    """

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._in = inward
        self._out = outward
        self._closed = False
        self._sending = False
        self._receiving = False

    # --- a trio stream -------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data*; waits while the peer is far behind.

        Cancelled while it waits, an unknown part of *data* has been sent.

        Raises:
            trio.BrokenResourceError: The other end is closed.
            trio.ClosedResourceError: This end is closed, or has said that nothing more comes.
            trio.BusyResourceError: Another task is sending.
        """
        with _Alone(self, "_sending"):
            await trio.lowlevel.checkpoint()
            rest = memoryview(data)
            self._may_send()
            while rest:
                while not self._out.writable and not self._out.ended:
                    await self._out.departures.park()
                self._may_send()
                self._out.put(bytes(rest[:_PIECE]))
                rest = rest[_PIECE:]

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send would not wait."""
        with _Alone(self, "_sending"):
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this end of the memory stream is closed")
            while not self._out.writable and not self._out.ended:
                await self._out.departures.park()
            if self._closed:
                raise trio.ClosedResourceError("this end of the memory stream is closed")

    async def send_eof(self) -> None:
        """Nothing more will be sent; the other direction stays open."""
        with _Alone(self, "_sending"):
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this end of the memory stream is closed")
            self._out.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has arrived, all of it but at most *max_bytes*; nothing at the end.

        Cancelled while it waits, nothing has been taken.

        Raises:
            trio.ClosedResourceError: This end is closed.
            trio.BusyResourceError: Another task is receiving.
        """
        if max_bytes is not None and index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        with _Alone(self, "_receiving"):
            await trio.lowlevel.checkpoint()
            while not self._closed and not self._in.readable:
                await self._in.arrivals.park()
            if self._closed:
                raise trio.ClosedResourceError("this end of the memory stream is closed")
            return self._in.take(max_bytes)

    async def aclose(self) -> None:
        """Close this end: the other one reads what is left, then the end."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _may_send(self) -> None:
        if self._closed or self._out.ended:
            raise trio.ClosedResourceError("this end of the memory stream is closed")
        if self._out.deaf:
            raise trio.BrokenResourceError("the other end of the memory stream is closed")

    # --- a non-blocking socket -----------------------------------------------------------

    def recv(self, size: int, /) -> bytes:
        """As a socket's: ``BlockingIOError`` if there is nothing yet."""
        if self._closed:
            raise OSError("this end of the memory stream is closed")
        if not self._in.readable:
            raise BlockingIOError
        return self._in.take(size)

    def send(self, data: bytes | memoryview, /) -> int:
        """As a socket's, but it takes all or nothing."""
        out = self._out
        if self._closed or out.ended:
            raise OSError("this end of the memory stream is closed")
        if out.deaf:
            raise BrokenPipeError("the other end of the memory stream is closed")
        if not out.writable:
            raise BlockingIOError
        if data:
            out.put(bytes(data))
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """As a socket's; takes whole buffers."""
        sent = 0
        for buffer in buffers:
            if sent and not self._out.writable:
                break
            sent += self.send(buffer)
        return sent

    def shutdown(self, how: int, /) -> None:
        """As a socket's for writing: nothing more will be sent."""
        self._out.end()

    def close(self) -> None:
        """Close this end without waiting."""
        self._closed = True
        self._out.end()
        self._in.abandon()

    async def wait_readable(self) -> None:
        """Until ``recv`` would not block."""
        await trio.lowlevel.checkpoint()
        while not self._in.readable and not self._closed:
            await self._in.arrivals.park()

    async def wait_writable(self) -> None:
        """Until ``send`` would not block."""
        await trio.lowlevel.checkpoint()
        while not self._out.writable and not self._closed:
            await self._out.departures.park()


class _Alone:
    """Lets one task in at a time; the second is told so instead of mixing its bytes in."""

    def __init__(self, stream: MemoryStream, flag: str) -> None:
        self._stream = stream
        self._flag = flag

    def __enter__(self) -> None:
        if getattr(self._stream, self._flag):
            raise trio.BusyResourceError("another task is using this direction of the stream")
        setattr(self._stream, self._flag, True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        setattr(self._stream, self._flag, False)


def memory_stream_pair() -> tuple[MemoryStream, MemoryStream]:
    """Two ends of a connection that exists in memory only."""
    one, other = _Pipe(), _Pipe()
    return MemoryStream(one, other), MemoryStream(other, one)


class MemoryNetwork:
    """Names that can be listened on and dialled, within one object and nowhere else."""

    def __init__(self) -> None:
        self._listeners: dict[str, trio.MemorySendChannel[MemoryStream]] = {}

    def listen(self, name: str) -> trio.MemoryReceiveChannel[MemoryStream]:
        """Claim *name*: the channel brings one stream per dialled connection.

        Closing the channel gives the name up.

        Raises:
            OSError: Somebody listens there already.
        """
        if name in self._listeners and not self._is_free(name):
            raise OSError(errno.EADDRINUSE, f"memory://{name} is listened on already")
        send, receive = trio.open_memory_channel[MemoryStream](_BACKLOG)
        self._listeners[name] = send
        return receive

    def _is_free(self, name: str) -> bool:
        return self._listeners[name].statistics().open_receive_channels == 0

    async def dial(self, name: str) -> MemoryStream:
        """Connect to the listener of that name.

        Raises:
            ConnectFailed: Nobody listens there.
        """
        listener = self._listeners.get(name)
        ours, theirs = memory_stream_pair()
        try:
            if listener is None:
                raise trio.BrokenResourceError
            await listener.send(theirs)
        except trio.BrokenResourceError:
            raise ConnectFailed(
                f"cannot connect to memory://{name}: nobody listens there"
            ) from None
        return ours
