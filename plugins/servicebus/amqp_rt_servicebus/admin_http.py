"""Engine of one HTTP/1.1 connection, without I/O: bytes in, bytes out, a request at a time.

h11 reads and writes the messages (RFC 9112); this engine decides about their size and number, about
time and about errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import inf
from typing import Final, TypeAlias

import h11

from .administration import Response
from .atom import ERROR_TYPE, write_error
from .xml_trees import DOCUMENT_MAX

#: Answers a request: method, target, headers by lower-case name, body.
Handler: TypeAlias = Callable[[str, str, Mapping[str, str], bytes], Response]

#: Maximum number of octets of a request's line and headers.
HEAD_MAX: Final = 16 * 1024
#: Maximum number of octets of a request's body.
BODY_MAX: Final = DOCUMENT_MAX
#: Octets of answers that wait for the connection, above which no further request is answered.
OUTPUT_MAX: Final = 1 << 20
#: Octets of requests that wait for the answers before them.
PIPELINED_MAX: Final = BODY_MAX + HEAD_MAX
#: Requests that are answered in one go, and octets of bodies that count as much as a request.
_WORK_MAX: Final = 8
_OCTETS_OF_WORK: Final = 512
#: Seconds within which a request has to be complete, counted from the answer before it.
IDLE_S: Final = 30.0

_log = logging.getLogger(__name__)


class HttpEngine:
    """Server side of one connection.

    Args:
        handler: Answers each request.
        now: Seconds of the event loop's clock.
    """

    def __init__(self, handler: Handler, now: float) -> None:
        self._handler = handler
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        self._out = bytearray()
        self._since = now
        #: The request that is being read, and the method of the one that is not answered yet.
        self._request: h11.Request | None = None
        self._method = b""
        self._body = bytearray()
        #: Whether requests were left for :meth:`go_on`, since those before them took long enough.
        self.unread = False
        #: Nothing more is read; the output of :meth:`take` is still to be sent.
        self.closed = False

    @property
    def deadline(self) -> float:
        """Time at which :meth:`tick` closes the connection, ``inf`` once it is closed."""
        return inf if self.closed else self._since + IDLE_S

    @property
    def blocked(self) -> bool:
        """Whether answers have to be taken before more is read."""
        return len(self._out) >= OUTPUT_MAX

    @property
    def waiting(self) -> int:
        """Number of octets of answers that :meth:`take` returns."""
        return len(self._out)

    def receive(self, data: bytes, now: float) -> None:
        """Take *data* from the client; no bytes mean that it has closed its side."""
        if self.closed:
            return
        # h11 buffers the requests behind one that is not answered yet, without a bound.
        if self.blocked and len(self._http.trailing_data[0]) + len(data) > PIPELINED_MAX:
            self._refuse(HTTPStatus.BAD_REQUEST, "too many requests wait for their answers")
            return
        self._http.receive_data(data)
        self._advance(now)

    def go_on(self, now: float) -> None:
        """Continue with requests that were left."""
        if not self.closed:
            self._advance(now)

    def take(self) -> bytes:
        """Return the bytes to send, and continue with requests that waited for room."""
        data = bytes(self._out)
        waited = self.blocked
        self._out.clear()
        if waited and not self.closed:
            self._advance(self._since)
        return data

    def tick(self, now: float) -> None:
        """Close the connection if the time for a request is over."""
        if self.closed or now < self.deadline:
            return
        if self._request is not None or self._http.trailing_data[0]:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"a request has to be complete within {IDLE_S:g} s"
            )
        self.closed = True

    def _advance(self, now: float) -> None:
        """Read and answer requests while there is room for answers, and time."""
        self.unread = False
        left = _WORK_MAX
        try:
            while not self.closed and not self.blocked:
                if left <= 0:
                    self.unread = True
                    return
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > BODY_MAX:
                        self._refuse_body()
                elif isinstance(event, h11.EndOfMessage):
                    self._since = now
                    left -= 1 + len(self._body) // _OCTETS_OF_WORK
                    self._finish()
                else:
                    self.closed = isinstance(event, h11.ConnectionClosed)
                    return
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            self._refuse(HTTPStatus(status), f"the request is malformed: {error}")

    def _begin(self, request: h11.Request) -> None:
        self._request = request
        self._method = request.method
        self._body.clear()
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and (
            b"content-length" in names or request.http_version < b"1.1"
        ):
            # What comes behind could be another request for a proxy than for us (RFC 9112 §6.1, §6.3).
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                "Transfer-Encoding is for HTTP/1.1, and without Content-Length: where the body ends is not clear",
            )
            return
        # Different lengths have been refused by h11.
        length = next((value for name, value in request.headers if name == b"content-length"), b"0")
        # Refused before the body, which a client with Expect then does not send. h11 has checked the digits.
        if int(length) > BODY_MAX:
            self._refuse_body()
        elif self._http.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))

    def _finish(self) -> None:
        request, body = self._request, bytes(self._body)
        assert request is not None, "h11 ends no message before it has begun"
        self._request = None
        self._body.clear()
        headers: dict[str, str] = {}
        for raw, value in request.headers:
            name, text = raw.decode("ascii"), value.decode("latin-1")
            # Fields that occur several times are one list (RFC 9110 §5.3).
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        method, target = request.method.decode("ascii"), request.target.decode("latin-1")
        try:
            response = self._handler(method, target, headers, body)
        except Exception:
            _log.exception("administration failed: %s %.200s", method, target)
            response = _failure(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed here")
        self._answer(response)
        if self._http.our_state is h11.MUST_CLOSE:
            self.closed = True
        elif self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()

    def _answer(self, response: Response, *extra: tuple[str, str]) -> None:
        headers = [
            *response.headers.items(),
            ("content-length", str(len(response.body))),
            *extra,
        ]
        reason = HTTPStatus(response.status).phrase.encode()
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        self._send(head)
        if response.body and self._method != b"HEAD":
            self._send(h11.Data(data=response.body))
        self._send(h11.EndOfMessage())
        # A malformed request has none: its refusal has a body, whatever came before.
        self._method = b""

    def _refuse_body(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has more than {BODY_MAX} octets",
        )

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Answer with an error if that is still possible, and close."""
        self.closed = True
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(_failure(status, detail), ("connection", "close"))

    def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._out += data


def _failure(status: HTTPStatus, detail: str) -> Response:
    document = write_error(status, f"SubCode={status.value}00. {detail}")
    return Response(status, {"content-type": ERROR_TYPE}, document)
