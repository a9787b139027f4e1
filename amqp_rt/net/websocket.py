"""AMQP over WebSocket (the OASIS binding, RFC 6455): a layer, and the handshakes of both sides.

The stream of octets is what counts: an AMQP frame may lie across messages, and a message may hold
several. Frames and handshakes are wsproto's; nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from ..errors import ConnectFailed
from ..limits import Limits
from .layers import LayeredStream

#: The subprotocol's name in the handshake (AMQP WebSocket binding §2.1).
SUBPROTOCOL: Final = "amqp"
#: Octets of one message that we send; some peers take no larger ones.
_MESSAGE: Final = 65_536


class WebSocketLayer:
    """One WebSocket after its handshake; see :class:`~.layers.Layer`."""

    def __init__(self, websocket: WSConnection, limits: Limits) -> None:
        self.ended = False
        self._websocket = websocket
        self._message_max = limits.websocket_message_max
        #: Octets of the message that is being received.
        self._size = 0
        self._out: list[bytes] = []

    def receive(self, data: bytes) -> bytes:
        """Take frames, whole or not; returns what their messages hold."""
        if self._websocket.state is not ConnectionState.CLOSED:
            self._websocket.receive_data(data or None)
        return self.pending()

    def pending(self) -> bytes:
        """What has come already: frames may follow the handshake at once."""
        pieces: list[bytes] = []
        for event in self._websocket.events():
            self._take(event, pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take(self, event: Event, pieces: list[bytes]) -> None:
        if isinstance(event, BytesMessage):
            self._size += len(event.data)
            if self._size > self._message_max:
                raise self._fail(
                    CloseReason.MESSAGE_TOO_BIG,
                    f"a message has more than {self._message_max} octets",
                )
            if event.message_finished:
                self._size = 0
            pieces.append(bytes(event.data))
        elif isinstance(event, Ping):
            self._say(event.response())
        elif isinstance(event, CloseConnection):
            if self._websocket.state not in (
                ConnectionState.REMOTE_CLOSING,
                ConnectionState.CLOSED,
            ):
                # The peer has said nothing of the kind: wsproto says why we should.
                raise self._fail(event.code, event.reason or "a malformed frame")
            if self._websocket.state is ConnectionState.REMOTE_CLOSING:
                self._say(event.response())
            self.ended = True
        elif isinstance(event, TextMessage):
            raise self._fail(CloseReason.UNSUPPORTED_DATA, "AMQP is binary, not text")

    def _fail(self, code: int, why: str) -> ConnectionError:
        self.ended = True
        self._say(CloseConnection(code=code, reason=why[:100]))
        return ConnectionError(f"WebSocket: {why}")

    def _say(self, event: Event) -> None:
        try:
            self._out.append(self._websocket.send(event))
        except LocalProtocolError:
            pass  # One side has said its last word.

    def send(self, data: bytes | memoryview) -> None:
        """Put octets into messages."""
        for at in range(0, len(data), _MESSAGE):
            self._say(BytesMessage(data=bytes(data[at : at + _MESSAGE])))

    def outgoing(self) -> bytes:
        """Frames that are ready."""
        out, self._out = self._out, []
        return out[0] if len(out) == 1 else b"".join(out)

    def end(self) -> None:
        """Say close (RFC 6455 §5.5.1)."""
        if self._websocket.state is ConnectionState.OPEN:
            self._say(CloseConnection(code=CloseReason.NORMAL_CLOSURE))


async def accept_websocket(
    stream: trio.abc.Stream, *, path: str, origins: Collection[str], limits: Limits, within: float
) -> LayeredStream:
    """Answer a client's handshake; after a failure the client is told and *stream* is closed.

    Browsers say where their page comes from, and only pages of *origins* are let in: any page could
    connect otherwise, with all that its reader's network reaches. That page and listener have the same
    name proves nothing, as names are rebound. Programs say nothing, and are let in.

    Args:
        stream: Where a client begins to speak.
        path: The path that it must ask for.
        origins: Such as ``https://example.org``; ``*`` for every page.
        limits: ``websocket_message_max`` is used here.
        within: Seconds.

    Raises:
        ConnectFailed: It was no such handshake; one clause says why.
    """
    websocket = WSConnection(ConnectionType.SERVER)
    request = await _first_event(stream, websocket, within=within)
    if not isinstance(request, Request):
        await _end(stream, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        raise ConnectFailed("it spoke no WebSocket")
    headers = {name.lower(): value for name, value in request.extra_headers}
    status, why = 0, ""
    if request.target.partition("?")[0] != path:
        status, why = 404, f"there is nothing at {request.target!r:.100}"
    elif not _may_come(headers.get(b"origin"), origins):
        status, why = 403, f"pages of {headers[b'origin']!r:.100} are not let in"
    elif SUBPROTOCOL not in request.subprotocols:
        status, why = 400, f"it does not offer the subprotocol {SUBPROTOCOL}"
    if status:
        answer = websocket.send(
            RejectConnection(
                status_code=status, headers=[(b"content-length", b"0"), (b"connection", b"close")]
            )
        )
        await _end(stream, answer)
        raise ConnectFailed(why)
    try:
        with trio.fail_after(within):
            await stream.send_all(websocket.send(AcceptConnection(subprotocol=SUBPROTOCOL)))
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
        await _end(stream, b"")
        raise ConnectFailed("it left during the WebSocket handshake") from None
    return _layered(stream, websocket, limits)


async def request_websocket(
    stream: trio.abc.Stream, *, host: str, path: str, limits: Limits
) -> LayeredStream:
    """Ask a server for a WebSocket; the caller bounds the time. After a failure *stream* is closed.

    Raises:
        ConnectFailed: The server refuses, or speaks something else; one clause says so.
    """
    websocket = WSConnection(ConnectionType.CLIENT)
    try:
        await stream.send_all(
            websocket.send(Request(host=host, target=path, subprotocols=[SUBPROTOCOL]))
        )
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        await _end(stream, b"")
        raise ConnectFailed("the peer broke the WebSocket handshake off") from None
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    answer = await _first_event(stream, websocket, within=float("inf"))
    why = "the peer does not speak WebSocket there"
    if isinstance(answer, AcceptConnection):
        if answer.subprotocol == SUBPROTOCOL:
            return _layered(stream, websocket, limits)
        why = f"the peer does not speak {SUBPROTOCOL} over WebSocket"
    elif isinstance(answer, RejectConnection):
        why = f"the peer refuses the WebSocket with HTTP status {answer.status_code}"
    await _end(stream, b"")
    raise ConnectFailed(why)


def _layered(stream: trio.abc.Stream, websocket: WSConnection, limits: Limits) -> LayeredStream:
    layer = WebSocketLayer(websocket, limits)
    try:
        received = layer.pending()
    except ConnectionError:
        received = b""  # The layer has ended; its answer leaves with the first that is sent.
    return LayeredStream(stream, layer, received=received)


async def _first_event(
    stream: trio.abc.Stream, websocket: WSConnection, *, within: float
) -> Event | None:
    """What the peer says first; None if that was nothing that we know, or too late."""
    try:
        with trio.move_on_after(within):
            while True:
                data = bytes(await stream.receive_some())
                websocket.receive_data(data or None)
                # The first only: what follows the handshake is the layer's.
                event = next(websocket.events(), None)
                if event is not None or not data:
                    return event
    except (RemoteProtocolError, LocalProtocolError, ValueError):
        pass  # No HTTP, no such request or answer, or a name that is none.
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return None


async def _end(stream: trio.abc.Stream, answer: bytes) -> None:
    """Say a last word, if there is one, and leave."""
    try:
        with trio.move_on_after(1.0):
            if answer:
                await stream.send_all(answer)
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)


def _may_come(origin: bytes | None, origins: Collection[str]) -> bool:
    return origin is None or "*" in origins or origin.decode("latin-1") in origins
