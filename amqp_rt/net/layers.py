"""Streams with layers on them, until the driver separates the two.

During the handshake a layer is on a trio stream (:class:`LayeredStream`); then the driver puts it on the non-blocking
socket itself (:mod:`.channels`), so that the reactor carries it in the same way as plain TCP.
"""

from __future__ import annotations

import trio

from .channels import STEP, Layer


class LayeredStream(trio.abc.HalfCloseableStream):
    """A trio stream with a layer on it.

    Args:
        below: The stream, which this object closes.
        layer: A layer after its handshake.
        received: Bytes that were read and processed already.
        arrived: Bytes that were read from *below* and have not been processed.
    """

    def __init__(
        self,
        below: trio.abc.Stream,
        layer: Layer,
        *,
        received: bytes = b"",
        arrived: bytes = b"",
    ) -> None:
        self.below = below
        self.layer = layer
        self._rest = received
        self._arrived = arrived
        self._sending = trio.Lock()

    def take_rest(self, arrived: bytes = b"") -> bytes:
        """Take the bytes that have been received and not been read.

        *arrived* was received from below. A fault of the peer in it is found by the next call of
        the layer.
        """
        arrived, self._arrived = self._arrived + arrived, b""
        rest, self._rest = self._rest, b""
        try:
            return rest + self.layer.receive(arrived) if arrived else rest
        except OSError:
            return rest

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive the bytes that have arrived; empty at the end.

        If cancelled while waiting, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The stream below broke, or the peer broke a rule of the layer.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._rest and not self.layer.ended:
            data, self._arrived = self._arrived, b""
            if not data:
                # Regardless of *max_bytes*: numbers of bytes below and above do not correspond. A
                # layer below would keep what is not taken, out of sight of the driver.
                layered = isinstance(self.below, LayeredStream)
                most = None if layered else self.layer.appetite
                data = bytes(await self.below.receive_some(most))
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
            for at in range(0, len(whole), STEP):
                try:
                    self.layer.send(whole[at : at + STEP])
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
            ends = self.layer.half_closes or self.layer.ended
            if ends and isinstance(self.below, trio.abc.HalfCloseableStream):
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
            await self.below.send_all(made[0] if len(made) == 1 else b"".join(made))


def unwrap(stream: trio.abc.Stream) -> tuple[trio.abc.Stream, list[Layer], bytes]:
    """Split *stream* into that at the bottom, the layers on it, and bytes received already.

    The lowest layer is the first.
    """
    # The usual case comes first: to find out that it is no layer takes longer.
    if type(stream) is trio.SocketStream or not isinstance(stream, LayeredStream):
        return stream, [], b""
    bottom, layers, rest = unwrap(stream.below)
    layers.append(stream.layer)
    return bottom, layers, stream.take_rest(rest)
