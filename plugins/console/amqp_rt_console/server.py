"""Server of HTTP/1.1 for ASGI applications on trio streams, within bounds of size and time.

h11 reads and writes the messages (RFC 9112). Whatever a peer sends ends its own connection at most.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import h11
import trio

from amqp_rt import Limits
from amqp_rt.addresses import host_in
from amqp_rt.container.doors import DoorArrival

log = logging.getLogger("amqp_rt.console")

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Octets that are read at a time.
_PIECE: Final = 16 * 1024
#: Octets that are read and ignored after the last answer, lest the system resets the connection before it is read,
#: and seconds for that.
_REST_MAX: Final = 65_536
_LINGER_S: Final = 2.0
#: Status codes of answers without a body (RFC 9110 §6.4.1).
_NO_BODY: Final = {204, 304}
#: Start of a target in absolute form, which proxies send (RFC 9112 §3.2.2).
_ABSOLUTE: Final = re.compile(r"https?://", re.IGNORECASE)


class PeerGone(OSError):
    """The peer has closed the connection, or did not send or take octets in time."""


class HttpServer:
    """Server side of HTTP/1.1 for *app*.

    Args:
        app: The application. Its exceptions are logged; the peer gets the status 500.
        limits: Bounds of requests, and of time.
    """

    def __init__(self, app: Application, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def serve(self, stream: trio.abc.Stream, arrival: DoorArrival) -> None:
        """Answer the requests on *stream* until either side ends it. Faults of the peer raise nothing."""
        conversation = _Conversation(self._app, stream, arrival, self._limits)
        try:
            within = self._limits.handshake_s
            while await conversation.answer(within):
                within = self._limits.http_idle_s
            await conversation.linger()
        except (PeerGone, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.debug("a connection has ended: %s", error)


class _Conversation:
    """One connection: a request is read, passed to the application, and answered, before the next."""

    def __init__(
        self, app: Application, stream: trio.abc.Stream, arrival: DoorArrival, limits: Limits
    ) -> None:
        self._app = app
        self._stream = stream
        self._arrival = arrival
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.http_head_max)
        #: Octets of following requests that are read while one is answered.
        self.kept_max = limits.http_head_max
        #: Whether the peer has ended its direction.
        self.ended = False

    async def answer(self, within: float) -> bool:
        """Answer one request, whose head arrives *within* seconds; return whether another one may follow.

        Raises:
            PeerGone: The peer has ended the connection, or is too slow.
        """
        http = self._http
        try:
            with trio.move_on_after(within) as waiting:
                request = await self._head()
            if waiting.cancelled_caught or request is None:
                return False
            # h11 bounds what is incomplete; a whole head may have come at once.
            lines = (
                len(request.target),
                *(len(name) + len(value) for name, value in request.headers),
            )
            if sum(lines) > self._limits.http_head_max:
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
            scope = self._scope(request)
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
            return False
        exchange = _Exchange(self, http, request, trio.current_time() + self._limits.http_body_s)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if _is_gone(error):
                raise PeerGone(str(error)) from None
            log.exception("a request was not answered: %s %.200s", request.method, request.target)
            if exchange.started:
                return False
            await self._refuse(500)
            return False
        finally:
            exchange.finish()
        if not exchange.started:
            await self._refuse(500)
            return False
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    async def _head(self) -> h11.Request | None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            await self.read()

    async def read(self) -> int:
        """Read the octets that have arrived, and wait for some; return their number, 0 at the end.

        Raises:
            PeerGone: The peer has broken the connection.
        """
        try:
            data = bytes(await self._stream.receive_some(_PIECE))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone(str(error)) from None
        self.ended = self.ended or not data
        self._http.receive_data(data)
        return len(data)

    async def write(self, data: bytes) -> None:
        """Write *data*.

        Raises:
            PeerGone: The peer has closed the connection, or did not take it in time.
        """
        try:
            with trio.fail_after(self._limits.write_stall_s):
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            raise PeerGone(str(error) or "it did not read") from None

    async def _refuse(self, status: int) -> None:
        """Answer with *status* and no body, after which the connection ends."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        head = h11.Response(
            status_code=status,
            reason=HTTPStatus(status).phrase,
            headers=[("content-length", "0"), ("connection", "close")],
        )
        written = [self._http.send(each) or b"" for each in (head, h11.EndOfMessage())]
        await self.write(b"".join(written))

    async def linger(self) -> None:
        """End our direction, and wait a while until the peer has read all and ends its own."""
        if self.ended:
            return
        with trio.move_on_after(_LINGER_S):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
                ignored = 0
                while ignored < _REST_MAX and (piece := await self._stream.receive_some(_PIECE)):
                    ignored += len(piece)
            else:
                await self._stream.aclose()

    def _scope(self, request: h11.Request) -> Scope:
        # h11 lets no octet through that is not ASCII.
        target = request.target.decode("ascii")
        if _ABSOLUTE.match(target):
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        host, _, port = self._arrival.address.rpartition(":")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii").upper(),
            "scheme": "https" if self._arrival.secure else "http",
            "path": unquote(path, errors="replace"),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": list(request.headers),
            "client": (host_in(self._arrival.address), int(port) if port.isdecimal() else 0)
            if host
            else None,
            "server": None,
            "state": {"arrival": self._arrival},
            "extensions": {},
        }


class _Exchange:
    """One request and its answer, as ASGI has them."""

    def __init__(
        self,
        conversation: _Conversation,
        http: h11.Connection,
        request: h11.Request,
        body_by: float,
    ) -> None:
        self._conversation = conversation
        self._http = http
        self._kept_max = conversation.kept_max
        self._head = request.method == b"HEAD"
        self._body_by = body_by
        #: Whether the application has the whole body, and whether that has arrived: most requests end with their head.
        self._given = False
        self._read = not any(
            name in (b"content-length", b"transfer-encoding") for name, _ in request.headers
        ) and isinstance(http.next_event(), h11.EndOfMessage)
        self._response: h11.Response | None = None
        self._bodiless = self._head
        #: Whether the answer has begun.
        self.started = False
        self._over = trio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next piece of the body; after it, wait for the end of the connection.

        Raises:
            PeerGone: The body did not arrive in time, or the connection was broken.
        """
        conversation = self._conversation
        if not self._read:
            if self._http.they_are_waiting_for_100_continue:
                told = h11.InformationalResponse(status_code=100, headers=[])
                await conversation.write(self._http.send(told) or b"")
            with trio.move_on_at(self._body_by):
                return await self._piece()
            raise PeerGone("the body of a request did not arrive in time")
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        kept = 0
        while not conversation.ended:
            if kept >= self._kept_max:
                # Requests that follow at once stay for later, and so does the end of the connection.
                await self._over.wait()
                break
            kept += await conversation.read()
        return {"type": "http.disconnect"}

    def finish(self) -> None:
        """Note that the application has returned."""
        self._over.set()

    async def _piece(self) -> MutableMapping[str, Any]:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise PeerGone(f"the body of a request is malformed: {error}") from None
            if event is h11.NEED_DATA:
                await self._conversation.read()
            elif isinstance(event, h11.Data):
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            elif isinstance(event, h11.EndOfMessage):
                self._read = self._given = True
                return {"type": "http.request", "body": b"", "more_body": False}
            else:
                raise PeerGone("the connection ended within the body of a request")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Write a part of the answer.

        Raises:
            PeerGone: The peer does not take it.
        """
        if message["type"] == "http.response.start":
            status = int(message["status"])
            self._bodiless = self._head or status in _NO_BODY
            headers = [*message.get("headers", []), ("date", formatdate(usegmt=True))]
            if not self._read:
                # The rest of the body is not read.
                headers.append(("connection", "close"))
            self._response = h11.Response(
                status_code=status, reason=HTTPStatus(status).phrase, headers=headers
            )
            return
        written = []
        if self._response is not None:
            written.append(self._http.send(self._response) or b"")
            self._response, self.started = None, True
        body = message.get("body", b"")
        if body and not self._bodiless:
            written.append(self._http.send(h11.Data(data=bytes(body))) or b"")
        if not message.get("more_body", False):
            written.append(self._http.send(h11.EndOfMessage()) or b"")
        if data := b"".join(written):
            await self._conversation.write(data)


def _is_gone(error: BaseException) -> bool:
    """Return whether *error* is nothing but the end of a connection."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_gone(each) for each in error.exceptions)
    # Frameworks raise an exception of their own instead.
    return isinstance(error, PeerGone) or isinstance(error.__context__, PeerGone)
