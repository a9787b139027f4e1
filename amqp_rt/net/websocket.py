"""AMQP over WebSocket (OASIS binding, RFC 6455): handshakes, by trio-websocket, and streams of octets.

Only the stream matters: an AMQP frame may extend over several messages, and a message may contain
several frames. After the handshake a layer of our own takes over (:mod:`.websocket_frames`), which
lies on the socket as TLS does: trio-websocket has a task and a queue for each connection, and wsproto
unmasks and joins in Python.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeAlias

import trio
from trio_websocket import ConnectionRejected, wrap_client_stream, wrap_server_stream

from ..errors import ConnectFailed
from ..limits import Limits
from .carrier import READ_SIZE, nothing
from .layers import LayeredStream
from .websocket_frames import WebSocketLayer

log = logging.getLogger("amqp_rt.net")

#: Name of the subprotocol in the handshake (AMQP WebSocket binding §2.1).
SUBPROTOCOL: Final = "amqp"
#: Name used by clients of Azure's libraries, which offer no other.
_LEGACY_SUBPROTOCOL: Final = "AMQPWSB10"
#: Chunks discarded from a faulty peer, so that it can read why the connection ends.
_LINGER_READS: Final = 16

_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"

#: End of a handshake; h11 accepts bare line feeds as well.
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n")
#: Beginning of a server's consent, and octets that are enough to recognise it.
_CONSENT: Final = re.compile(rb"HTTP/[0-9.]+ 101\b")
_FIRST: Final = 20

_Shake: TypeAlias = Callable[[trio.Nursery, "_Handshake"], Awaitable[None]]


class _Handshake(trio.abc.Stream):
    """Stream below trio-websocket during a handshake, bounded, and with detection of its end.

    trio-websocket receives the octets of the handshake only, since those that follow are for the
    layer; after a server's refusal it receives the refusal's body, too. It closes this object and
    not the stream below, which may still have to carry an answer.
    """

    def __init__(self, below: trio.abc.Stream, limits: Limits) -> None:
        self._below = below
        self._limits = limits
        self._left = limits.websocket_stranger_max
        #: The first and the last octets of the handshake so far.
        self._first = self._tail = b""
        self._over = False
        self._refused = False
        #: Octets after the handshake.
        self.rest = b""
        #: Whether anything has been sent.
        self.spoke = False
        #: Called when no more input follows.
        self.on_end: Callable[[], None] = nothing

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._over and not self._refused:
            await trio.sleep_forever()
        data, self.rest = self.rest, b""
        if not data:
            # A layer below would keep what is not taken, out of sight of the driver.
            most = None if isinstance(self._below, LayeredStream) else self._left + 1
            try:
                data = bytes(await self._below.receive_some(most))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.on_end()
                raise
        if not self._over:
            data = self._pass_handshake(data)
        self._left -= len(data)
        if self._left < 0:
            self.on_end()
            raise trio.BrokenResourceError("the handshake is too long")
        if not data:
            self.on_end()
        return data

    def _pass_handshake(self, data: bytes) -> bytes:
        """Return the octets of *data* that belong to the handshake; keep the others."""
        self._first += data[: _FIRST - len(self._first)]
        seen = self._tail + data
        end = _EMPTY_LINE.search(seen)
        if end is None:
            self._tail = seen[-2:]
            return data
        self._over = True
        # A request does not begin with a version.
        self._refused = self._first.startswith(b"HTTP/") and not _CONSENT.match(self._first)
        at = end.end() - len(self._tail)
        self.rest = data[at:]
        return data[:at]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.spoke = True
        try:
            await self._below.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.on_end()
            raise

    async def fail(self, answer: bytes) -> None:
        """End the connection after a failed handshake, with *answer* if nothing has been sent yet."""
        await _send_last(self._below, b"" if self.spoke else answer, self._limits)

    async def wait_send_all_might_not_block(self) -> None:
        await self._below.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self.on_end()
        await trio.lowlevel.checkpoint()


async def _send_last(below: trio.abc.Stream, data: bytes, limits: Limits) -> None:
    """Send *data*, end our direction, and discard a bounded amount of the peer's input.

    Closing with unread input would reset the connection, and the reset may overtake our last
    octets. Sending and receiving may each take ``websocket_linger_s``.
    """
    try:
        with trio.move_on_after(limits.websocket_linger_s):
            if data:
                await below.send_all(data)
            if isinstance(below, trio.abc.HalfCloseableStream):
                await below.send_eof()
        with trio.move_on_after(limits.websocket_linger_s):
            for _ in range(_LINGER_READS):
                if not await below.receive_some(READ_SIZE):
                    break
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
        pass


class WebSocketStream(LayeredStream):
    """Octets in the messages of one WebSocket after its handshake.

    Both directions end together: a WebSocket that has sent a close frame sends nothing more.
    """

    def __init__(
        self, below: trio.abc.Stream, limits: Limits, *, client: bool, arrived: bytes
    ) -> None:
        frames = WebSocketLayer(limits, client=client)
        super().__init__(below, frames, arrived=arrived)
        self._limits = limits
        #: Accept messages up to ``websocket_message_max``, now that the peer has logged in.
        self.trust = frames.trust

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive the octets that have arrived; empty at the end.

        If cancelled while waiting, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The peer broke the rules and was sent a close frame where
                possible; the message gives the reason.
        """
        try:
            return await super().receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            if isinstance(error.__cause__, OSError):
                await _send_last(self.below, b"", self._limits)
            raise

    async def aclose(self) -> None:
        """Send close, wait briefly for the peer's (RFC 6455 §5.5.1), and close the stream below.

        If cancelled, the stream is closed without a close frame.
        """
        try:
            with trio.move_on_after(self._limits.websocket_linger_s):
                await self.send_eof()
                for _ in range(_LINGER_READS):
                    if not await super().receive_some():
                        break
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self.below)

    async def _answer(self) -> None:
        # The driver bounds its own sends. Answers are sent by the reading task, which would
        # otherwise wait without a limit. Where both wait, the driver's error is the better one.
        with trio.move_on_after(self._limits.write_stall_s + 1.0) as scope:
            await super()._answer()
        if scope.cancelled_caught:
            raise trio.BrokenResourceError(
                f"WebSocket: the peer has not read for {self._limits.write_stall_s:g} s"
            )


async def accept_websocket(
    stream: trio.abc.Stream,
    *,
    path: str,
    origins: Collection[str],
    limits: Limits,
    within: float,
) -> WebSocketStream:
    """Answer a client's handshake; after a failure also answer, and close *stream*.

    Browsers send the origin of their page, and only pages of *origins* are accepted: otherwise any
    page could connect, with access to everything that its reader's network reaches. Page and
    listener having the same name proves nothing, since names can be rebound. Programs send no
    origin, and are accepted.

    Args:
        stream: A stream on which the client sends first.
        path: The path that the client has to request.
        origins: Such as ``https://example.org``; ``*`` for every page.
        limits: The limits of WebSockets, and ``write_stall_s``, are used here.
        within: Seconds for the handshake.

    Raises:
        ConnectFailed: The handshake failed; the message is one clause.
    """

    async def answer(home: trio.Nursery, octets: _Handshake) -> None:
        request = await wrap_server_stream(home, octets)
        headers = request.headers
        origins_said = [value for name, value in headers if name == b"origin"]
        origin = origins_said[0] if origins_said else None
        keys = [value for name, value in headers if name == b"sec-websocket-key"]
        offered = request.proposed_subprotocols
        spoken = SUBPROTOCOL if SUBPROTOCOL in offered else _LEGACY_SUBPROTOCOL
        status, why = 0, ""
        if len(keys) != 1 or not _is_nonce(keys[0]):
            status, why = 400, "its Sec-WebSocket-Key is not one of 16 octets"
        elif len(origins_said) > 1:
            # A proxy may have checked one of them and we another.
            status, why = 400, "it has several Origin headers"
        elif request.path.partition("?")[0] != path:
            status, why = 404, f"there is nothing at {request.path!r:.100}"
        elif not _may_come(origin, origins):
            status, why = 403, f"pages of {origin!r:.100} are not let in"
        elif spoken not in offered:
            status, why = 400, f"it does not offer the subprotocol {SUBPROTOCOL}"
        if status:
            await request.reject(status, extra_headers=[(b"connection", b"close")])
            raise ConnectFailed(why)
        await request.accept(subprotocol=spoken)

    with trio.move_on_after(max(0.0, within)):
        rest = await _shake(stream, limits, answer, "it spoke no WebSocket", _BAD_REQUEST)
        return WebSocketStream(stream, limits, client=False, arrived=rest)
    raise ConnectFailed("it did not finish the WebSocket handshake in time")


async def request_websocket(
    stream: trio.abc.Stream, *, host: str, path: str, limits: Limits
) -> WebSocketStream:
    """Request a WebSocket from a server; the caller limits the time. A failure closes *stream*.

    Raises:
        ConnectFailed: The server refuses, or uses another protocol; the message is one clause.
    """

    async def ask(home: trio.Nursery, octets: _Handshake) -> None:
        connection = await wrap_client_stream(
            home,
            octets,  # type: ignore[arg-type]
            host,
            path,
            subprotocols=[SUBPROTOCOL],
        )
        if connection.subprotocol != SUBPROTOCOL:
            raise ConnectFailed(f"the peer does not speak {SUBPROTOCOL} over WebSocket")

    rest = await _shake(stream, limits, ask, "the peer does not speak WebSocket there", b"")
    return WebSocketStream(stream, limits, client=True, arrived=rest)


async def _shake(
    below: trio.abc.Stream, limits: Limits, shake: _Shake, unknown: str, answer: bytes
) -> bytes:
    """Perform the handshake on *below*; return the octets that follow it. A failure closes *below*.

    trio-websocket reads in a task that may raise for the peer's input, and that ends without
    notifying the task that waits for the handshake. *unknown* is the reason reported then, and
    *answer* is sent to the peer.

    Raises:
        ConnectFailed: The handshake failed; the message is one clause.
    """
    octets = _Handshake(below, limits)
    done = False
    why = unknown
    try:
        try:
            async with trio.open_nursery() as home:
                octets.on_end = home.cancel_scope.cancel
                await shake(home, octets)
                done = True
                home.cancel_scope.cancel()
        except* Exception as group:
            done = False
            why = _reason(group, unknown)
            log.debug("a WebSocket's handshake failed: %s", why, exc_info=group)
        if not done:
            await octets.fail(answer)
            raise ConnectFailed(why)
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(below)
        raise
    return octets.rest


def _reason(group: ExceptionGroup[Exception], unknown: str) -> str:
    for error in group.exceptions:
        if isinstance(error, ConnectFailed):
            return error.description
        if isinstance(error, ConnectionRejected):
            return f"the peer refuses the WebSocket with HTTP status {error.status_code}"
    return unknown


def _is_nonce(key: bytes) -> bool:
    """Return whether *key* is 16 octets in base64 (RFC 6455 §4.1)."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def _may_come(origin: bytes | None, origins: Collection[str]) -> bool:
    return origin is None or "*" in origins or origin.decode("latin-1") in origins
