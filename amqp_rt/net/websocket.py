"""AMQP over WebSocket (the OASIS binding, RFC 6455), by trio-websocket, as a stream of octets.

The stream is what counts: an AMQP frame may lie across messages, and a message may hold several.
Handshakes, frames and pongs are trio-websocket's; nothing is compressed. Its tasks live in a nursery
of each connection, within one that outlives the handshake, and end with the stream.
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
from .carrier import READ_SIZE

log = logging.getLogger("amqp_rt.net")

#: The subprotocol's name in the handshake (AMQP WebSocket binding §2.1).
SUBPROTOCOL: Final = "amqp"
#: What clients of Azure's libraries call it, which offer nothing else.
_LEGACY_SUBPROTOCOL: Final = "AMQPWSB10"
#: Octets of one message that we send; some peers take no larger ones.
_MESSAGE: Final = 65_536
#: Messages that wait to be read: one, or a peer that is not read would not notice.
_QUEUE: Final = 1
#: Chunks of a faulty peer that are thrown away, so that it reads why it has to go.
_LINGER_READS: Final = 16

#: Codes of RFC 6455 §7.4.1.
_UNSUPPORTED: Final = 1003
_ABNORMAL: Final = 1006
_TOO_BIG: Final = 1009

_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"

#: Frames that are handed over at once: some milliseconds of work.
_FRAMES_AT_ONCE: Final = 200
#: What ends a handshake; h11 takes line feeds alone as well.
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n")
#: Octets of the longest header of a frame.
_HEADER_MAX: Final = 14
#: The second octet of a header without the mask bit, and the size of the length that follows.
_LENGTH_SIZES: Final = {126: 2, 127: 8}

_ShakeHands: TypeAlias = Callable[[trio.Nursery, "_Octets"], Awaitable[WebSocketConnection]]


class FrameCounter:
    """Follows the frames of a WebSocket (RFC 6455 §5.2) from octet to octet, without a look at what they carry.

    Before the first frame is the handshake, up to its empty line.
    """

    def __init__(self) -> None:
        self._handshake = True
        #: The end of the handshake so far, or the beginning of a frame's header.
        self._begun = b""
        #: Octets of the current frame's payload that are to come.
        self._payload = 0

    def reach(self, data: bytes, count: int) -> int:
        """Return how many octets of *data*, which comes next, the next *count* frames take.

        All of them, if there are no more frames in it. What follows is to be given again.
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
    """Return the size of the header that begins with *begun*, or 2 as long as that does not tell."""
    if len(begun) < 2:
        return 2
    return 2 + _LENGTH_SIZES.get(begun[1] & 0x7F, 0) + (4 if begun[1] & 0x80 else 0)


def _payload_size(header: bytes) -> int:
    """Return the size of the payload after *header*."""
    short = header[1] & 0x7F
    size = _LENGTH_SIZES.get(short, 0)
    return int.from_bytes(header[2 : 2 + size], "big") if size else short


class _Octets(trio.abc.Stream):
    """What trio-websocket reads and writes: the stream below, with bounds and an eye on the end.

    trio-websocket collects the frames of a message however many they are, and the body of a refusal
    however long, so what comes between two messages is counted here. It closes this, and not the
    stream below: there may be a last word. It works through all frames that it gets at once, so it gets
    a few at a time, and other tasks have their turn between them.
    """

    def __init__(self, below: trio.abc.Stream, limits: Limits) -> None:
        self.below = below
        self.limits = limits
        #: Octets since the last message that was read, and how many there may be.
        self.unread = 0
        self.unread_max = limits.websocket_stranger_max
        #: Why nothing more is read, if the peer is to blame for it.
        self.fault = ""
        #: Something was said, and a close frame.
        self.spoke = self.said_close = False
        #: Called when nothing more comes.
        self.on_end: Callable[[], None] = nothing
        self._closed = False
        self._sending = trio.Lock()
        self._frames = FrameCounter()
        #: What has come, and was too many frames to be handed over.
        self._rest = b""

    def trust(self) -> None:
        """The peer is known. One message may wait, one be on its way, and others be read with it."""
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
        # Each frame comes by itself; this is the first octet of a close (RFC 6455 §5.2).
        self.said_close = self.said_close or data[:1] == b"\x88"
        # The driver bounds what it sends; pongs are sent by the task that reads, which nobody would
        # see waiting. Where both wait, the driver's sentence is the better one.
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

    async def say_last(self, data: bytes) -> None:
        """Say *data*, if there is any, and that it was the last; within a moment."""
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

    async def hear_out(self) -> None:
        """Throw away what the peer says still, for a moment and not without end.

        Closing with unread input would reset the connection, and the reset may overtake the last word.
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
    """The octets in the messages of one WebSocket after its handshake.

    Both directions end together: a WebSocket that has said close says nothing more, and after
    ours trio-websocket brings no more messages.
    """

    def __init__(
        self, connection: WebSocketConnection, octets: _Octets, end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._octets = octets
        self._end = end
        self._rest = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has arrived; nothing at the end. Cancelled while it waits, nothing has been taken.

        Raises:
            trio.BrokenResourceError: The peer broke the rules, and has been told with a close
                frame; the sentence says how.
        """
        while not self._rest:
            try:
                message = await self._connection.get_message()
            except ConnectionClosed as closed:
                await self._judge(_ABNORMAL if closed.reason is None else closed.reason.code)
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

    async def _judge(self, code: int) -> None:
        """What it means that no message comes any more, with trio-websocket's word for it."""
        octets = self._octets
        why = octets.fault
        if octets.unread > octets.unread_max:
            code = _TOO_BIG
        elif code == _TOO_BIG:
            why = "a message is too large"
        elif not why and code != _ABNORMAL and not octets.said_close:
            # The peer has said nothing of the kind: trio-websocket says why we should, and does not.
            why = "a malformed frame"
        if why:
            if code != _ABNORMAL:
                await self._say_close(code)
            raise trio.BrokenResourceError(f"WebSocket: {why}")

    async def _say_close(self, code: int) -> None:
        octets = self._octets
        # A client's frames are masked (RFC 6455 §5.3); zeros are a mask as well.
        head = b"\x88\x82\0\0\0\0" if self._connection.is_client else b"\x88\x02"
        said, octets.said_close = octets.said_close, True
        await octets.say_last(b"" if said else head + code.to_bytes(2, "big"))
        await octets.hear_out()

    def trust(self) -> None:
        """The peer has logged in: from now on a message may be as large as ``websocket_message_max``."""
        self._octets.trust()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data* in messages. Cancelled while it waits, an unknown part of it has been sent.

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
        """Say close, hear the peer's (RFC 6455 §5.5.1) within a moment, and close what is below.

        Cancelled, it is closed without a word.
        """
        try:
            with trio.move_on_after(self._octets.limits.websocket_linger_s):
                await self._connection.aclose()
            await self._octets.say_last(b"")
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
    """Answer a client's handshake; after a failure the client is told and *stream* is closed.

    Browsers say where their page comes from, and only pages of *origins* are let in: any page could
    connect otherwise, with all that its reader's network reaches. That page and listener have the same
    name proves nothing, as names are rebound. Programs say nothing, and are let in.

    Args:
        stream: Where a client begins to speak.
        path: The path that it must ask for.
        origins: Such as ``https://example.org``; ``*`` for every page.
        limits: Those of WebSockets, and ``write_stall_s``, are used here.
        within: Seconds.
        nursery: Where the WebSocket's tasks run until it is closed.

    Raises:
        ConnectFailed: It was no such handshake; one clause says why.
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
            # Whichever a proxy has looked at, the other one would be let in.
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
    """Ask a server for a WebSocket; the caller bounds the time. After a failure *stream* is closed.

    The WebSocket's tasks run in *nursery* until it is closed.

    Raises:
        ConnectFailed: The server refuses, or speaks something else; one clause says so.
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
    shake_hands: _ShakeHands,
    unknown: str,
    answer: bytes,
    *,
    task_status: trio.TaskStatus[WebSocketStream],
) -> None:
    """The task of a WebSocket: shake hands, and keep trio-websocket's task until the end.

    It reads in a task that may raise for what the peer says, and that ends without telling whoever
    waits for the handshake: *unknown* says what that means, and *answer* is said to the peer.

    Raises:
        ConnectFailed: There was no handshake. After it, nothing is raised.
    """
    octets = _Octets(below, limits)
    stream: WebSocketStream | None = None
    why = unknown
    try:
        try:
            async with trio.open_nursery() as home:
                octets.on_end = home.cancel_scope.cancel
                connection = await shake_hands(home, octets)
                octets.on_end = nothing
                octets.unread = 0
                stream = WebSocketStream(connection, octets, home.cancel_scope.cancel)
                task_status.started(stream)
                await trio.sleep_forever()
        except* Exception as group:
            why = _reason(group, unknown)
            log.debug("a WebSocket's task ended: %s", why, exc_info=group)
        if stream is None:
            await octets.say_last(b"" if octets.spoke else answer)
            await octets.hear_out()
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
    """Whether *key* is 16 octets in base64 (RFC 6455 §4.1)."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def _may_come(origin: bytes | None, origins: Collection[str]) -> bool:
    return origin is None or "*" in origins or origin.decode("latin-1") in origins


def nothing() -> None:
    """Nobody has to know."""
