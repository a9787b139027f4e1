"""AMQP over WebSocket (OASIS binding, RFC 6455) as a stream of octets, with trio-websocket.

Only the stream matters: an AMQP frame may extend over several messages, and a message may contain
several frames. trio-websocket handles handshakes, frames and pongs; compression is not used. Its
tasks run in a nursery of each connection, within one that outlives the handshake, and end with the
stream.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeAlias

import trio
from trio_websocket import (
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    wrap_client_stream,
    wrap_server_stream,
)

from ..errors import ConnectFailed
from ..limits import Limits
from .carrier import READ_SIZE, nothing

log = logging.getLogger("amqp_rt.net")

#: Name of the subprotocol in the handshake (AMQP WebSocket binding §2.1).
SUBPROTOCOL: Final = "amqp"
#: Name used by clients of Azure's libraries, which offer no other.
_LEGACY_SUBPROTOCOL: Final = "AMQPWSB10"
#: Octets of one message that we send; some peers accept no larger ones.
_MESSAGE: Final = 65_536
#: Messages that wait to be read. With more than one, a peer would not notice that it is not read.
_QUEUE: Final = 1
#: Chunks discarded from a faulty peer, so that it can read why the connection ends.
_LINGER_READS: Final = 16

#: Close codes of RFC 6455 §7.4.1.
_UNSUPPORTED: Final = 1003
_ABNORMAL: Final = 1006
_TOO_BIG: Final = 1009

_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"

#: Frames passed to trio-websocket at once: some milliseconds of work.
_FRAMES_AT_ONCE: Final = 200
#: End of a handshake; h11 accepts bare line feeds as well.
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n")
#: Octets of the longest frame header.
_HEADER_MAX: Final = 14
#: Values of a header's second octet without the mask bit, and the size of the length after them.
_LENGTH_SIZES: Final = {126: 2, 127: 8}

_Handshake: TypeAlias = Callable[[trio.Nursery, "_Octets"], Awaitable[WebSocketConnection]]


class FrameCounter:
    """Parser that finds the frames of a WebSocket (RFC 6455 §5.2) without reading their payload.

    The handshake, up to its empty line, precedes the first frame.
    """

    def __init__(self) -> None:
        self._handshake = True
        #: The last octets of the handshake so far, or the beginning of a frame's header.
        self._begun = b""
        #: Octets of the current frame's payload still to come.
        self._payload = 0

    def reach(self, data: bytes, count: int) -> int:
        """Return how many octets of *data*, the next input, belong to the next *count* frames.

        All of them, if *data* contains no more frames. The octets after them have to be passed
        again.
        """
        at = self._pass_handshake(data) if self._handshake else 0
        end = len(data)
        while at < end:
            if self._payload:
                step = min(self._payload, end - at)
                self._payload -= step
                at += step
                continue
            if not self._begun:
                if not count:
                    break
                count -= 1
            header = self._begun + data[at : at + _HEADER_MAX]
            size = _header_size(header)
            if len(header) < size:
                self._begun = header
                return end
            at += size - len(self._begun)
            self._begun = b""
            self._payload = _payload_size(header)
        return at

    def _pass_handshake(self, data: bytes) -> int:
        seen = self._begun + data
        end = _EMPTY_LINE.search(seen)
        if end is None:
            self._begun = seen[-2:]
            return len(data)
        at = end.end() - len(self._begun)
        self._handshake, self._begun = False, b""
        return at


def _header_size(begun: bytes) -> int:
    """Return the size of the header that begins with *begun*, or 2 if it is not known yet."""
    if len(begun) < 2:
        return 2
    return 2 + _LENGTH_SIZES.get(begun[1] & 0x7F, 0) + (4 if begun[1] & 0x80 else 0)


def _payload_size(header: bytes) -> int:
    """Return the size of the payload after *header*."""
    short = header[1] & 0x7F
    size = _LENGTH_SIZES.get(short, 0)
    return int.from_bytes(header[2 : 2 + size], "big") if size else short


class _Octets(trio.abc.Stream):
    """Stream below trio-websocket, with limits, and with detection of its end.

    trio-websocket collects the frames of a message in any number, and the body of a refusal of any
    length; therefore octets between two messages are counted here. It closes this object and not
    the stream below, which may still have to carry a last message. It processes all frames that it
    receives at once; therefore it receives a few at a time, and other tasks get their turn between
    them.
    """

    def __init__(self, below: trio.abc.Stream, limits: Limits) -> None:
        self.below = below
        self.limits = limits
        #: Octets since the last message that was read, and their limit.
        self.unread = 0
        self.unread_max = limits.websocket_stranger_max
        #: Why reading stopped, if it is the peer's fault.
        self.fault = ""
        #: Whether anything, and whether a close frame, has been sent.
        self.spoke = self.said_close = False
        #: Called when no more input follows.
        self.on_end: Callable[[], None] = nothing
        self._closed = False
        self._sending = trio.Lock()
        self._frames = FrameCounter()
        #: Octets received that were too many frames to be passed on at once.
        self._rest = b""

    def trust(self) -> None:
        """Raise the limit for a peer that has logged in.

        One message may be waiting, one may be arriving, and a chunk may contain further ones.
        """
        limits = self.limits
        self.unread_max = (
            2 * limits.websocket_message_max + READ_SIZE + limits.websocket_overhead_max
        )

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._closed:
            raise trio.ClosedResourceError("this WebSocket is closed")
        most = min(max_bytes or READ_SIZE, self.unread_max + 1 - self.unread)
        if self._rest:
            await trio.lowlevel.checkpoint()
        else:
            try:
                self._rest = bytes(await self.below.receive_some(most))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.on_end()
                raise
        data = self._rest[:most]
        size = self._frames.reach(data, _FRAMES_AT_ONCE)
        data, self._rest = data[:size], self._rest[size:]
        self.unread += len(data)
        if self.unread > self.unread_max:
            self.fault = "too much has come without a message"
            self.on_end()
            raise trio.BrokenResourceError(self.fault)
        if not data:
            self.on_end()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this WebSocket is closed")
        self.spoke = True
        # Each frame is sent by its own call; this is the first octet of a close (RFC 6455 §5.2).
        self.said_close = self.said_close or data[:1] == b"\x88"
        # The driver bounds its own sends; pongs are sent by the reading task, which would otherwise
        # wait without a limit. Where both wait, the driver's error is the better one.
        with trio.move_on_after(self.limits.write_stall_s + 1.0) as scope:
            try:
                async with self._sending:
                    await self.below.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.on_end()
                raise
        if scope.cancelled_caught:
            self.fault = f"the peer has not read for {self.limits.write_stall_s:g} s"
            raise trio.BrokenResourceError(self.fault)

    async def send_last(self, data: bytes) -> None:
        """Send *data*, if any, and then end our direction, within ``websocket_linger_s``."""
        below = self.below
        try:
            with trio.move_on_after(self.limits.websocket_linger_s):
                async with self._sending:
                    if data:
                        await below.send_all(data)
                    if isinstance(below, trio.abc.HalfCloseableStream):
                        await below.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def drain_input(self) -> None:
        """Read and discard a bounded amount of the peer's input, within ``websocket_linger_s``.

        Closing with unread input would reset the connection, and the reset may overtake our last
        octets.
        """
        try:
            with trio.move_on_after(self.limits.websocket_linger_s):
                for _ in range(_LINGER_READS):
                    if not await self.below.receive_some(READ_SIZE):
                        break
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass

    async def wait_send_all_might_not_block(self) -> None:
        await self.below.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self._closed = True
        self.on_end()
        await trio.lowlevel.checkpoint()


class WebSocketStream(trio.abc.Stream):
    """Octets in the messages of one WebSocket after its handshake.

    Both directions end together: a WebSocket that has sent a close frame sends nothing more, and
    after our close frame trio-websocket delivers no more messages.
    """

    def __init__(
        self, connection: WebSocketConnection, octets: _Octets, end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._octets = octets
        self._end = end
        self._rest = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive the octets that have arrived; empty at the end.

        If cancelled while waiting, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The peer broke the rules and was sent a close frame where
                possible; the message gives the reason.
        """
        while not self._rest:
            try:
                message = await self._connection.get_message()
            except ConnectionClosed as closed:
                await self._raise_for_code(
                    _ABNORMAL if closed.reason is None else closed.reason.code
                )
                return b""
            self._octets.unread = 0
            if isinstance(message, str):
                with trio.move_on_after(self._octets.limits.websocket_linger_s):
                    await self._connection.aclose(_UNSUPPORTED, "AMQP is binary, not text")
                raise trio.BrokenResourceError("WebSocket: AMQP is binary, not text")
            self._rest = message
        size = len(self._rest) if max_bytes is None else max_bytes
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    async def _raise_for_code(self, code: int) -> None:
        """Raise the error for the end of messages, if the end is the peer's fault.

        *code* is the close code that trio-websocket reports.
        """
        octets = self._octets
        why = octets.fault
        if octets.unread > octets.unread_max:
            code = _TOO_BIG
        elif code == _TOO_BIG:
            why = "a message is too large"
        elif not why and code != _ABNORMAL and not octets.said_close:
            # The peer has sent no close: trio-websocket reports the code that we should send, but
            # does not send it.
            why = "a malformed frame"
        if why:
            if code != _ABNORMAL:
                await self._send_close(code)
            raise trio.BrokenResourceError(f"WebSocket: {why}")

    async def _send_close(self, code: int) -> None:
        octets = self._octets
        # A client's frames are masked (RFC 6455 §5.3); zeros are a valid mask.
        head = b"\x88\x82\0\0\0\0" if self._connection.is_client else b"\x88\x02"
        said, octets.said_close = octets.said_close, True
        await octets.send_last(b"" if said else head + code.to_bytes(2, "big"))
        await octets.drain_input()

    def trust(self) -> None:
        """Accept messages up to ``websocket_message_max``, now that the peer has logged in."""
        self._octets.trust()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data* in messages. If cancelled while waiting, an unknown part of it has been sent.

        Raises:
            trio.BrokenResourceError: The WebSocket has ended.
        """
        whole = memoryview(data)
        try:
            for at in range(0, len(whole), _MESSAGE):
                await self._connection.send_message(bytes(whole[at : at + _MESSAGE]))
        except ConnectionClosed as closed:
            raise trio.BrokenResourceError("the WebSocket has ended") from closed

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send would not wait."""
        await self._octets.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Send close, wait briefly for the peer's (RFC 6455 §5.5.1), and close the stream below.

        If cancelled, the stream is closed without a close frame.
        """
        try:
            with trio.move_on_after(self._octets.limits.websocket_linger_s):
                await self._connection.aclose()
            await self._octets.send_last(b"")
        finally:
            self._end()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._octets.below)


async def accept_websocket(
    stream: trio.abc.Stream,
    *,
    path: str,
    origins: Collection[str],
    limits: Limits,
    within: float,
    nursery: trio.Nursery,
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
        nursery: Where the WebSocket's tasks run until it is closed.

    Raises:
        ConnectFailed: The handshake failed; the message is one clause.
    """

    async def answer(home: trio.Nursery, octets: _Octets) -> WebSocketConnection:
        request = await wrap_server_stream(
            home,
            octets,
            message_queue_size=_QUEUE,
            max_message_size=limits.websocket_message_max,
            receive_buffer_size=READ_SIZE,
        )
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
        return await request.accept(subprotocol=spoken)

    with trio.move_on_after(max(0.0, within)):
        found: WebSocketStream = await nursery.start(
            _keep, stream, limits, answer, "it spoke no WebSocket", _BAD_REQUEST
        )
        return found
    raise ConnectFailed("it did not finish the WebSocket handshake in time")


async def request_websocket(
    stream: trio.abc.Stream, *, host: str, path: str, limits: Limits, nursery: trio.Nursery
) -> WebSocketStream:
    """Request a WebSocket from a server; the caller limits the time. A failure closes *stream*.

    The WebSocket's tasks run in *nursery* until it is closed.

    Raises:
        ConnectFailed: The server refuses, or uses another protocol; the message is one clause.
    """

    async def ask(home: trio.Nursery, octets: _Octets) -> WebSocketConnection:
        connection = await wrap_client_stream(
            home,
            octets,  # type: ignore[arg-type]
            host,
            path,
            subprotocols=[SUBPROTOCOL],
            message_queue_size=_QUEUE,
            max_message_size=limits.websocket_message_max,
            receive_buffer_size=READ_SIZE,
        )
        if connection.subprotocol != SUBPROTOCOL:
            raise ConnectFailed(f"the peer does not speak {SUBPROTOCOL} over WebSocket")
        return connection

    found: WebSocketStream = await nursery.start(
        _keep, stream, limits, ask, "the peer does not speak WebSocket there", b""
    )
    return found


async def _keep(
    below: trio.abc.Stream,
    limits: Limits,
    handshake: _Handshake,
    unknown: str,
    answer: bytes,
    *,
    task_status: trio.TaskStatus[WebSocketStream],
) -> None:
    """Perform the handshake, and run trio-websocket's task until the end of the WebSocket.

    trio-websocket reads in a task that may raise for the peer's input, and that ends without
    notifying the task that waits for the handshake. *unknown* is the reason reported then, and
    *answer* is sent to the peer.

    Raises:
        ConnectFailed: The handshake failed. After it, nothing is raised.
    """
    octets = _Octets(below, limits)
    stream: WebSocketStream | None = None
    why = unknown
    try:
        try:
            async with trio.open_nursery() as home:
                octets.on_end = home.cancel_scope.cancel
                connection = await handshake(home, octets)
                octets.on_end = nothing
                octets.unread = 0
                stream = WebSocketStream(connection, octets, home.cancel_scope.cancel)
                task_status.started(stream)
                await trio.sleep_forever()
        except* Exception as group:
            why = _reason(group, unknown)
            log.debug("a WebSocket's task ended: %s", why, exc_info=group)
        if stream is None:
            await octets.send_last(b"" if octets.spoke else answer)
            await octets.drain_input()
            raise ConnectFailed(why)
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(below)


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
