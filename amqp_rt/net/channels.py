"""Channels with layers on them: TLS, WebSocket, or the second on the first.

A :class:`Layer` turns bytes into other bytes and does no I/O, and so a carrier drives a socket with layers on it as it
drives the socket alone. Until the protocol is known a layer is on a trio stream (:mod:`.layers`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

from .carrier import GATHER_MAX, NonBlockingSocket, drop_sent

#: Bytes that a layer transforms in one step, and those by which a buffer may exceed them: a body of
#: the first size goes in the same step as the header before it.
STEP: Final = 65_536
_STEP_MAX: Final = STEP + 16_384
#: Bytes sent by one call, so that other connections get their turn.
_SENT_MAX: Final = 1_048_576
#: Bytes of a layer's own answers (alerts, key updates) that may wait for a peer that does not read.
ANSWERS_MAX: Final = 65_536


class Layer(Protocol):
    """Transformation of the peer's bytes to those of the engine, and the other way round."""

    #: Whether the peer has ended its direction.
    ended: bool
    #: Bytes to read from below at a time.
    appetite: int
    #: Whether the stream below ends in our direction with the layer, rather than in both with the
    #: peer's answer.
    half_closes: bool

    def receive(self, data: bytes) -> bytes:
        """Process bytes from below, empty at their end; return the resulting bytes for above.

        Raises:
            OSError: The peer broke a rule of the layer; the message names it.
        """

    def send(self, data: bytes | memoryview) -> None:
        """Process bytes from above."""

    def outgoing(self) -> list[bytes | memoryview]:
        """Return the buffers to send below now, including the layer's own answers."""

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
        #: Windows has no ``sendmsg``.
        self._gathers = hasattr(below, "sendmsg")
        self._out: list[bytes | memoryview] = []
        #: Bytes that the layer has taken and that have not been counted as sent.
        self._taken = 0
        #: The peer broke a rule of the layer.
        self._failed = False

    def recv(self, size: int, /) -> bytes:
        """Receive like a socket, but possibly more than *size* bytes.

        No bytes may be left behind in the layer, since the socket's readiness would not announce
        them. After a fault of the peer this returns its bytes as they are, to be discarded.
        """
        layer = self._layer
        if self._failed:
            return self._below.recv(size)
        if layer.ended:
            return b""
        data = self._below.recv(min(size, layer.appetite))
        try:
            found = layer.receive(data)
        except OSError:
            self._failed = True
            raise
        finally:
            # Even a fault has an answer: an alert, or a close with its code.
            self._push()
        if self._out and not self._taken and sum(map(len, self._out)) > ANSWERS_MAX:
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
                piece = rest[: _STEP_MAX - self._taken]
                self._layer.send(piece)
                self._taken += len(piece)
                rest = rest[len(piece) :]
                if self._taken >= STEP and (
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
        layer = self._layer
        layer.end()
        if not self._push():
            raise BlockingIOError
        if layer.half_closes or layer.ended or self._failed:
            self._below.shutdown(how)

    def end_input(self) -> None:
        """Make the end of input visible, though the peer leaves its half of the socket open."""
        below = self._below
        if isinstance(below, LayeredChannel):
            below.end_input()
        elif isinstance(below, socket.socket):
            below.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the channel below."""
        self._below.close()

    def _push(self) -> bool:
        """Send the layer's output; return whether none is left."""
        out = self._out
        out += self._layer.outgoing()
        try:
            while out:
                if len(out) == 1 or not self._gathers:
                    sent = self._below.send(out[0])
                else:
                    sent = self._below.sendmsg(out[:GATHER_MAX])
                drop_sent(out, sent)
        except (BlockingIOError, InterruptedError):
            return False
        return True


def layered(channel: NonBlockingSocket, layers: Sequence[Layer]) -> NonBlockingSocket:
    """Put *layers* on *channel*, the lowest first."""
    for layer in layers:
        above = LayeredChannel(channel, layer)
        if layer.ended:
            above.end_input()
        channel = above
    return channel
