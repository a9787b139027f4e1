"""Layers between a channel and an engine, namely TLS.

A :class:`Layer` turns bytes into other bytes and does no I/O. During the handshake it lies on a
trio stream (:class:`LayeredStream`); then the driver separates the two and puts the layer on the
non-blocking socket itself (:class:`LayeredChannel`), so that the reactor carries TLS in the same
way as plain TCP. Under a WebSocket, TLS stays on the trio stream.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from .carrier import NonBlockingSocket

#: Bytes that a layer transforms in one step.
_STEP: Final = 65_536
#: Bytes sent by one call, so that other connections get their turn.
_SENT_MAX: Final = 1_048_576
#: Bytes of a layer's own answers (alerts, key updates) that may wait for a peer that does not read.
ANSWERS_MAX: Final = 65_536


class Layer(Protocol):
    """Transformation of the peer's bytes to those of the engine, and the other way round."""

    #: Whether the peer has ended its direction.
    ended: bool

    def receive(self, data: bytes) -> bytes:
        """Process bytes from below, empty at their end; return the resulting bytes for above.

        Raises:
            OSError: The peer broke a rule of the layer; the message names it.
        """

    def send(self, data: bytes | memoryview) -> None:
        """Process bytes from above."""

    def outgoing(self) -> bytes:
        """Return the bytes to send below now, including the layer's own answers."""

    def end(self) -> None:
        """End our direction. A second call has no effect."""


class LayeredChannel:
    """Channel with a layer on it, itself a channel.

    If the channel below is full, the carrier must not conclude that everything has been sent.
    Therefore bytes that the layer has taken and that have not been passed below do not count as
    sent: the carrier offers the same bytes again when there is room, and they are counted then.
    """

    def __init__(self, below: NonBlockingSocket, layer: Layer) -> None:
        self._below = below
        self._layer = layer
        self._out = memoryview(b"")
        #: Bytes that the layer has taken and that have not been counted as sent.
        self._taken = 0

    def recv(self, size: int, /) -> bytes:
        """Receive like a socket, but possibly more than *size* bytes.

        No bytes may be left behind in the layer, since the socket's readiness would not announce
        them.
        """
        layer = self._layer
        if layer.ended:
            return b""
        data = self._below.recv(size)
        try:
            found = layer.receive(data)
        finally:
            # Even a fault has an answer: an alert.
            self._push()
        if len(self._out) > ANSWERS_MAX and not self._taken:
            raise ConnectionError("the peer provokes answers and does not read them")
        if found:
            if layer.ended:
                self.end_input()
            return found
        if layer.ended:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | memoryview, /) -> int:
        """Send like a socket."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Send like a socket, but a bounded number of bytes, in bounded steps.

        A step that the layer has transformed cannot be undone.
        """
        if not self._push():
            raise BlockingIOError
        sent, self._taken = self._taken, 0
        skip = sent
        for buffer in buffers:
            rest = memoryview(buffer)[skip:]
            skip = max(0, skip - len(buffer))
            while rest:
                piece = rest[: _STEP - self._taken]
                self._layer.send(piece)
                self._taken += len(piece)
                rest = rest[len(piece) :]
                if self._taken == _STEP and (
                    not self._push() or (sent := self._count(sent)) >= _SENT_MAX
                ):
                    return self._sent(sent)
        if self._push():
            sent = self._count(sent)
        return self._sent(sent)

    def _count(self, sent: int) -> int:
        """Count the bytes taken as sent, now that they have been passed below."""
        sent, self._taken = sent + self._taken, 0
        return sent

    def _sent(self, sent: int) -> int:
        if not sent and self._taken:
            raise BlockingIOError
        return sent

    def shutdown(self, how: int, /) -> None:
        """Shut down like a socket for writing, after the layer's own end."""
        self._layer.end()
        if not self._push():
            raise BlockingIOError
        self._below.shutdown(how)

    def end_input(self) -> None:
        """Make the end of input visible, though the peer leaves its half of the socket open."""
        if isinstance(self._below, socket.socket):
            self._below.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the channel below."""
        self._below.close()

    def _push(self) -> bool:
        """Send the layer's output; return whether none is left."""
        made = self._layer.outgoing()
        if made:
            self._out = memoryview(b"".join((self._out, made)) if self._out else made)
        try:
            while self._out:
                self._out = self._out[self._below.send(self._out) :]
        except (BlockingIOError, InterruptedError):
            return False
        return True


class LayeredStream(trio.abc.HalfCloseableStream):
    """A trio stream with a layer on it; *received* has been read and processed already."""

    def __init__(self, below: trio.abc.Stream, layer: Layer, *, received: bytes = b"") -> None:
        self.below = below
        self.layer = layer
        self._rest = received
        self._sending = trio.Lock()

    def take_rest(self) -> bytes:
        """Take the bytes that were received and have not been read."""
        rest, self._rest = self._rest, b""
        return rest

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive the bytes that have arrived; empty at the end.

        If cancelled while waiting, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The stream below broke, or the peer broke a rule of the layer.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._rest and not self.layer.ended:
            # Regardless of *max_bytes*: numbers of bytes below and above do not correspond.
            data = bytes(await self.below.receive_some(_STEP))
            try:
                self._rest = self.layer.receive(data)
            except OSError as error:
                raise trio.BrokenResourceError(error.strerror or str(error)) from error
            finally:
                await self._answer()
        size = len(self._rest) if max_bytes is None else max_bytes
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data*. If cancelled while waiting, an unknown part of it has been sent.

        Raises:
            trio.BrokenResourceError: The stream below broke.
        """
        whole = memoryview(data)
        async with self._sending:
            for at in range(0, len(whole), _STEP):
                try:
                    self.layer.send(whole[at : at + _STEP])
                except OSError as error:
                    # The peer ended the connection in the middle of a record and no longer
                    # receives.
                    raise trio.BrokenResourceError(error.strerror or str(error)) from error
                await self._push()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send would not wait."""
        async with self._sending:
            await self.below.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End our direction, of the layer and of the stream below."""
        async with self._sending:
            self.layer.end()
            await self._push()
            if isinstance(self.below, trio.abc.HalfCloseableStream):
                try:
                    await self.below.send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # closed by the peer or a caller in response to our end

    async def aclose(self) -> None:
        """Close the stream below, without a closing handshake."""
        await self.below.aclose()

    async def _answer(self) -> None:
        """Send the layer's own answers, unless another task is sending and will send them too.

        Reading continues even if nothing can be sent any more.
        """
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            await self._push()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._sending.release()

    async def _push(self) -> None:
        while made := self.layer.outgoing():
            await self.below.send_all(made)


def layered(channel: NonBlockingSocket, layer: Layer | None) -> NonBlockingSocket:
    """Put *layer* on *channel*, if there is a layer."""
    if layer is None:
        return channel
    above = LayeredChannel(channel, layer)
    if layer.ended:
        above.end_input()
    return above


def unwrap(stream: trio.abc.Stream) -> tuple[trio.abc.Stream, Layer | None, bytes]:
    """Split *stream* into the stream at the bottom, the layer on it, and bytes received already."""
    if type(stream) is trio.SocketStream:
        # The usual case: to find out that it is no layer takes longer.
        return stream, None, b""
    if isinstance(stream, LayeredStream):
        return stream.below, stream.layer, stream.take_rest()
    return stream, None, b""
