"""Byte streams in memory, and listeners that have a name instead of a port."""

from __future__ import annotations

from typing import Final

import trio

from ..errors import ConnectFailed

#: Bytes that one side may be ahead before its send waits.
_AHEAD_MAX: Final = 1024 * 1024


class _Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.ended = False
        self.reader_gone = False
        self.changed = trio.lowlevel.ParkingLot()
        self.room = trio.lowlevel.ParkingLot()


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a pair; what one end sends the other receives."""

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._in = inward
        self._out = outward
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data*; waits while the peer is far behind.

        Cancelled while it waits, nothing of *data* has been sent.

        Raises:
            trio.BrokenResourceError: The other end is closed.
            trio.ClosedResourceError: This end is closed, or has said that it is done.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        out = self._out
        while out.size >= _AHEAD_MAX and not out.reader_gone and not self._closed:
            await out.room.park()
        if self._closed or out.ended:
            raise trio.ClosedResourceError("this end of the memory stream is closed")
        if out.reader_gone:
            raise trio.BrokenResourceError("the other end of the memory stream is closed")
        if data:
            out.chunks.append(bytes(data))
            out.size += len(data)
            out.changed.unpark_all()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send would not wait."""
        out = self._out
        await trio.lowlevel.checkpoint()
        while out.size >= _AHEAD_MAX and not out.reader_gone and not self._closed:
            await out.room.park()
        if self._closed:
            raise trio.ClosedResourceError("this end of the memory stream is closed")

    async def send_eof(self) -> None:
        """Nothing more will be sent; the other direction stays open."""
        self._out.ended = True
        self._out.changed.unpark_all()
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has arrived, all of it but at most *max_bytes*; nothing at the end.

        Cancelled while it waits, nothing has been taken.

        Raises:
            trio.ClosedResourceError: This end is closed.
        """
        pipe = self._in
        await trio.lowlevel.checkpoint_if_cancelled()
        while not pipe.chunks and not pipe.ended and not self._closed:
            await pipe.changed.park()
        if self._closed:
            raise trio.ClosedResourceError("this end of the memory stream is closed")
        data = b"".join(pipe.chunks)
        if max_bytes is not None and len(data) > max_bytes:
            pipe.chunks = [data[max_bytes:]]
            data = data[:max_bytes]
        else:
            pipe.chunks = []
        pipe.size -= len(data)
        if pipe.size < _AHEAD_MAX:
            pipe.room.unpark_all()
        return data

    def close(self) -> None:
        """Close this end without waiting."""
        self._closed = True
        for pipe in (self._in, self._out):
            pipe.ended = True
            pipe.changed.unpark_all()
            pipe.room.unpark_all()
        self._in.reader_gone = True

    async def aclose(self) -> None:
        """Close this end: the other one reads what is left, then the end."""
        self.close()
        await trio.lowlevel.checkpoint()


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

        Raises:
            OSError: Somebody listens there already.
        """
        if name in self._listeners and not self._is_closed(name):
            raise OSError(f"memory://{name} is listened on already")
        send, receive = trio.open_memory_channel[MemoryStream](128)
        self._listeners[name] = send
        return receive

    def _is_closed(self, name: str) -> bool:
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
            raise ConnectFailed(f"nobody listens at memory://{name}") from None
        return ours
