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
#: Size of the pieces of ``send_all``, by which a single send may exceed the bound at most.
_PIECE: Final = 65_536
#: Connections that wait for a listener to accept them.
_BACKLOG: Final = 128


class _Pipe:
    """Direction of a stream: chunks in order, and the tasks that wait for data or for room."""

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        #: Bytes of the first chunk that have been read.
        self.taken = 0
        self.size = 0
        #: The sender has ended its direction.
        self.ended = False
        #: The reader has closed its end.
        self.deaf = False
        self.arrivals = trio.lowlevel.ParkingLot()
        self.departures = trio.lowlevel.ParkingLot()

    @property
    def readable(self) -> bool:
        """Whether a read would not wait."""
        return bool(self.chunks) or self.ended

    @property
    def writable(self) -> bool:
        """Whether a send would not wait."""
        return self.size < _AHEAD_MAX or self.deaf

    def put(self, chunk: bytes) -> None:
        """Add *chunk*; wake the reader if it was waiting."""
        if not self.chunks:
            self.arrivals.unpark_all()
        self.chunks.append(chunk)
        self.size += len(chunk)

    def take(self, size: int | None) -> bytes:
        """Take the bytes that have arrived, at most *size*."""
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
        """End the direction of the sender."""
        self.ended = True
        self.arrivals.unpark_all()
        self.departures.unpark_all()

    def abandon(self) -> None:
        """Close the reader's end, and drop unread chunks."""
        self.deaf = True
        self.chunks.clear()
        self.size = 0
        self.arrivals.unpark_all()
        self.departures.unpark_all()


class MemoryStream(trio.abc.HalfCloseableStream):
    """End of a pair of connected streams in memory.

    It has two interfaces: that of a trio stream, and that of a non-blocking socket, with which the
    driver moves bytes without a task in between.
    """

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._in = inward
        self._out = outward
        self._closed = False
        self._sending = False
        self._receiving = False

    # --- a trio stream -------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data*; wait while the peer is far behind.

        If cancelled while waiting, an unknown part of *data* has been sent.

        Raises:
            trio.BrokenResourceError: The other end is closed.
            trio.ClosedResourceError: This end is closed, or its direction has been ended.
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
        """End our direction; the other direction stays open."""
        with _Alone(self, "_sending"):
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this end of the memory stream is closed")
            self._out.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive the bytes that have arrived, at most *max_bytes*; empty at the end.

        If cancelled while waiting, nothing has been taken.

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
        """Close this end; the other end can read the rest before it sees the end."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _may_send(self) -> None:
        if self._closed or self._out.ended:
            raise trio.ClosedResourceError("this end of the memory stream is closed")
        if self._out.deaf:
            raise trio.BrokenResourceError("the other end of the memory stream is closed")

    # --- a non-blocking socket -----------------------------------------------------------

    def recv(self, size: int, /) -> bytes:
        """Receive like a socket: ``BlockingIOError`` if nothing has arrived yet."""
        if self._closed:
            raise OSError("this end of the memory stream is closed")
        if not self._in.readable:
            raise BlockingIOError
        return self._in.take(size)

    def send(self, data: bytes | memoryview, /) -> int:
        """Send like a socket, but all of *data* or nothing."""
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
        """Send like a socket, but whole buffers."""
        sent = 0
        for buffer in buffers:
            if sent and not self._out.writable:
                break
            sent += self.send(buffer)
        return sent

    def shutdown(self, how: int, /) -> None:
        """End our direction, like the shutdown of a socket for writing."""
        self._out.end()

    def close(self) -> None:
        """Close this end without waiting."""
        self._closed = True
        self._out.end()
        self._in.abandon()

    async def wait_readable(self) -> None:
        """Wait until ``recv`` would not block. Always a checkpoint."""
        if self._in.readable or self._closed:
            await trio.lowlevel.checkpoint()
        while not self._in.readable and not self._closed:
            await self._in.arrivals.park()

    async def wait_writable(self) -> None:
        """Wait until ``send`` would not block. Always a checkpoint."""
        if self._out.writable or self._closed:
            await trio.lowlevel.checkpoint()
        while not self._out.writable and not self._closed:
            await self._out.departures.park()


class _Alone:
    """Guard against two tasks that use one direction: the second fails instead of mixing bytes."""

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
    """Create the two ends of a connection in memory."""
    one, other = _Pipe(), _Pipe()
    return MemoryStream(one, other), MemoryStream(other, one)


class MemoryNetwork:
    """Registry of names that can be listened on and dialled, within this object only."""

    def __init__(self) -> None:
        self._listeners: dict[str, trio.MemorySendChannel[MemoryStream]] = {}

    def listen(self, name: str) -> trio.MemoryReceiveChannel[MemoryStream]:
        """Claim *name*: the channel receives one stream for each dialled connection.

        Closing the channel releases the name.

        Raises:
            OSError: The name is in use.
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
            ConnectFailed: There is no such listener.
        """
        listener = self._listeners.get(name)
        ours, theirs = memory_stream_pair()
        try:
            if listener is None:
                raise trio.BrokenResourceError
            await listener.send(theirs)
        except trio.BrokenResourceError:
            raise ConnectFailed(
                f"cannot connect to memory://{name}: nothing listens there"
            ) from None
        return ours
