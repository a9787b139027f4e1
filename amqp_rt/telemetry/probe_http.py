"""HTTP of the listener for probes: one GET of each connection is answered, within bounds.

h11 reads and writes the messages (RFC 9112). Peers are strangers: whatever they send ends their connection at most.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

import h11
import trio
from msgspec import Struct

#: Seconds for the head of a request, and for a response to be taken by the peer.
PATIENCE_S: Final = 5
#: Bytes of the head of a request.
HEAD_MAX: Final = 8_192
#: Connections at a time; further ones are closed unanswered.
CONNECTIONS_MAX: Final = 32
#: Bytes behind the head that are read and ignored, lest the system resets the connection before the answer is read.
_REST_MAX: Final = 65_536

log = logging.getLogger("amqp_rt.probe")


class ProbeRequest(Struct, frozen=True):
    """Parts of a GET that probes use."""

    path: str
    #: Last value of each field of the query.
    query: dict[str, str]
    accept: str


class ProbeResponse(Struct, frozen=True):
    """Answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Responding: TypeAlias = Callable[[ProbeRequest], Awaitable[ProbeResponse]]


class HttpResponder:
    """Handler of the connections of a listener: each has one request, which *respond* answers."""

    def __init__(self, respond: Responding) -> None:
        self._respond = respond
        self._room = trio.CapacityLimiter(CONNECTIONS_MAX)

    async def handle(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Answer the request on *stream*, and close it. Raises nothing; if cancelled, the stream is closed."""
        try:
            self._room.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            await trio.aclose_forcefully(stream)
            return
        try:
            await self._converse(stream)
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            log.debug("a request of a probe was not answered: %r", error)
        except Exception:
            log.exception("a request of a probe failed")
        finally:
            self._room.release_on_behalf_of(stream)
            await trio.aclose_forcefully(stream)

    async def _converse(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Read a request, send the answer, and wait until the peer has read it.

        Raises:
            TooSlowError: The peer did not send, or did not read.
            BrokenResourceError: The peer has closed the connection.
        """
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        try:
            with trio.fail_after(PATIENCE_S):
                request = await _receive(stream, http)
            if request is None:
                return
            response = await self._answer(request)
        except h11.RemoteProtocolError as error:
            request = None
            response = ProbeResponse(error.error_status_hint, f"{error}\n".encode())
        written = _written(http, response, has_body=request is None or request.method != b"HEAD")
        with trio.fail_after(PATIENCE_S):
            await stream.send_all(written)
            await stream.send_eof()
            ignored = 0
            while ignored < _REST_MAX and (piece := await stream.receive_some(HEAD_MAX)):
                ignored += len(piece)

    async def _answer(self, request: h11.Request) -> ProbeResponse:
        if request.method not in (b"GET", b"HEAD"):
            return ProbeResponse(405, b"only GET and HEAD are answered\n")
        accept = next((value for name, value in request.headers if name == b"accept"), b"")
        try:
            # h11 lets no octet through that is not ASCII.
            url = urlsplit(request.target.decode("ascii"))
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        except ValueError:
            return ProbeResponse(400, b"the target of the request is no URL\n")
        return await self._respond(ProbeRequest(url.path, query, accept.decode("latin-1")))


async def _receive(stream: trio.abc.ReceiveStream, http: h11.Connection) -> h11.Request | None:
    """Return the head of the request on *stream*, or None if the peer closes it before.

    Raises:
        h11.RemoteProtocolError: The peer speaks no HTTP/1.1.
    """
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        http.receive_data(bytes(await stream.receive_some(HEAD_MAX)))


def _written(http: h11.Connection, response: ProbeResponse, *, has_body: bool) -> bytes:
    """Return the octets of *response*, after which the connection ends."""
    headers = [
        ("content-type", response.content_type),
        ("content-length", str(len(response.body))),
        ("cache-control", "no-store"),
        ("connection", "close"),
        *([("allow", "GET, HEAD")] if response.status == 405 else []),
    ]
    reason = HTTPStatus(response.status).phrase
    head = h11.Response(status_code=response.status, headers=headers, reason=reason)
    events: list[h11.Event] = [head]
    if has_body:
        events.append(h11.Data(data=response.body))
    events.append(h11.EndOfMessage())
    return b"".join(http.send(event) or b"" for event in events)
