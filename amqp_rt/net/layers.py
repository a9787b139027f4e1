"""What may lie between a channel and an engine: TLS.

A :class:`Layer` turns bytes into other bytes and does no I/O. While hands are still being shaken it
lies on a trio stream (:class:`LayeredStream`); then the driver takes both apart again and puts the
layer on the non-blocking socket itself (:class:`LayeredChannel`), so that the reactor carries TLS as it
carries plain TCP. Where a WebSocket is in TLS, its layer stays on the trio stream.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from .carrier import Channel

#: Bytes that a layer is given to transform in one step.
_STEP: Final = 65_536
#: Bytes that one call sends, so that others get their turn.
_SENT_MAX: Final = 1_048_576
#: Bytes of a layer's own answers (alerts, key updates) that wait for a peer that does not read.
ANSWERS_MAX: Final = 65_536


class Layer(Protocol):
    """Bytes of the peer in, bytes for the engine out; and the other way round."""

    #: The peer has said that nothing more comes.
    ended: bool

    def receive(self, data: bytes) -> bytes:
        """Take bytes from below, none at their end; returns those for above, as far as they go.

        Raises:
            OSError: The peer broke the rules of the layer; the sentence says how.
        """

    def send(self, data: bytes | memoryview) -> None:
        """Take bytes from above."""

    def outgoing(self) -> bytes:
        """What has to leave below now, the layer's own answers among it."""

    def end(self) -> None:
        """Say that nothing more comes from us. Saying it twice is as once."""


class LayeredChannel:
    """A channel with a layer on it; a channel itself.

    A full channel below must not lead the carrier to believe that all has left. So what was taken
    and has not gone down is not counted as sent: the carrier comes back with the same bytes when
    there is room, and is told then.
    """

    def __init__(self, below: Channel, layer: Layer) -> None:
        self._below = below
        self._layer = layer
        self._out = memoryview(b"")
        #: Bytes that the layer has taken and the carrier does not know of.
        self._taken = 0

    def recv(self, size: int, /) -> bytes:
        """As a socket's; may return more than *size*, as nothing may be left behind where no
        readiness of the socket tells of it."""
        layer = self._layer
        if layer.ended:
            return b""
        data = self._below.recv(size)
        try:
            found = layer.receive(data)
        finally:
            # A fault has its answer too: an alert.
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
        """As a socket's."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """As a socket's. What is sent in one call is bounded, as are steps that cannot be undone."""
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
        """What was taken has gone down: it counts as sent."""
        sent, self._taken = sent + self._taken, 0
        return sent

    def _sent(self, sent: int) -> int:
        if not sent and self._taken:
            raise BlockingIOError
        return sent

    def shutdown(self, how: int, /) -> None:
        """As a socket's for writing, after the layer's own last word."""
        self._layer.end()
        if not self._push():
            raise BlockingIOError
        self._below.shutdown(how)

    def end_input(self) -> None:
        """Let the end be noticed, though the peer leaves its half of the socket open."""
        if isinstance(self._below, socket.socket):
            self._below.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the channel below."""
        self._below.close()

    def _push(self) -> bool:
        """Send what the layer has; whether nothing is left."""
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
    """A trio stream with a layer on it, which has *received* something already."""

    def __init__(self, below: trio.abc.Stream, layer: Layer, *, received: bytes = b"") -> None:
        self.below = below
        self.layer = layer
        self._rest = received
        self._sending = trio.Lock()

    def take_rest(self) -> bytes:
        """What has been received and not been read."""
        rest, self._rest = self._rest, b""
        return rest

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has arrived; nothing at the end. Cancelled while it waits, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The stream below broke, or the peer the layer's rules.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._rest and not self.layer.ended:
            # However little is asked for: bytes below and above do not correspond.
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
        """Send *data*. Cancelled while it waits, an unknown part of it has been sent.

        Raises:
            trio.BrokenResourceError: The stream below broke.
        """
        whole = memoryview(data)
        async with self._sending:
            for at in range(0, len(whole), _STEP):
                try:
                    self.layer.send(whole[at : at + _STEP])
                except OSError as error:
                    # A peer that has left in the middle of a record hears nothing any more.
                    raise trio.BrokenResourceError(error.strerror or str(error)) from error
                await self._push()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send would not wait."""
        async with self._sending:
            await self.below.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Say that nothing more will be sent, in the words of the layer and of what is below."""
        async with self._sending:
            self.layer.end()
            await self._push()
            if isinstance(self.below, trio.abc.HalfCloseableStream):
                try:
                    await self.below.send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # The last word has left, and somebody has acted on it.

    async def aclose(self) -> None:
        """Close both, without a conversation."""
        await self.below.aclose()

    async def _answer(self) -> None:
        """Send the layer's own answers. Whoever is sending takes them along; reading goes on though
        nothing can be sent any more."""
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


def layered(channel: Channel, layer: Layer | None) -> Channel:
    """*channel* with *layer* on it, if there is one."""
    if layer is None:
        return channel
    above = LayeredChannel(channel, layer)
    if layer.ended:
        above.end_input()
    return above


def take_apart(stream: trio.abc.Stream) -> tuple[trio.abc.Stream, Layer | None, bytes]:
    """The stream at the bottom, the layer on it, and what was received already."""
    if isinstance(stream, LayeredStream):
        return stream.below, stream.layer, stream.take_rest()
    return stream, None, b""
