"""Front for HTTP: the administration at the listeners of AMQP, recognised by the beginnings of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from amqp_rt.fronts import Closed, Error, Event, Peer, ServerOptions

from .admin_http import HttpEngine
from .administration import Response

#: Answers a request of a client: method, target, headers by lower-case name, body.
Answer: TypeAlias = Callable[[Peer, str, str, Mapping[str, str], bytes], Response]

#: Beginnings of requests, by method.
METHODS: Final = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


class AdminEngine:
    """Connection of one HTTP client, as a container carries it (``fronts.base.ServerEngine``).

    Args:
        answer: Answers requests.
        options: Options of the listener.
        now: Seconds of the event loop's clock.
    """

    def __init__(self, answer: Answer, options: ServerOptions, now: float) -> None:
        self._peer = Peer(address=options.address, protocol="http")
        self._http = HttpEngine(partial(answer, self._peer), now)
        self._now = now
        self._ended = False
        self.on_output: Callable[[], None] = _nothing
        self.work_max = 0
        #: Never: few requests are read ahead.
        self.congested = False
        self.followers: dict[object, Callable[[], None]] = {}

    @property
    def unread(self) -> bool:
        """Whether requests were left for the next call of :meth:`receive`."""
        return self._http.unread and not self._http.closed

    @property
    def finished(self) -> bool:
        """Whether no more output follows."""
        return self._http.closed and not self._http.waiting

    @property
    def output_size(self) -> int:
        """Number of bytes waiting in :meth:`take`."""
        return self._http.waiting

    @property
    def peer(self) -> Peer:
        """The client."""
        return self._peer

    @property
    def deadline(self) -> float:
        """Time at which :meth:`tick` has to be called."""
        return self._http.deadline

    @property
    def over(self) -> bool:
        """Whether the connection has ended. It has no links."""
        return self._http.closed

    @property
    def sessions(self) -> Mapping[int, Any]:
        """Return no sessions."""
        return {}

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Answer the requests in *data*, or those that were left, as many as do not take long."""
        if data:
            self._http.receive(data, now)
        else:
            self._http.go_on(now)
        return self._events()

    def receive_eof(self, now: float) -> list[Event]:
        """Handle the end of the client's half of the stream."""
        if not self._http.closed:
            self._http.receive(b"", now)
            self._http.closed = True
        return self._events()

    def tick(self, now: float) -> list[Event]:
        """Close the connection if it was idle for too long."""
        self._http.tick(now)
        return self._events()

    def take(self) -> list[bytes]:
        """Take the bytes to send."""
        data = self._http.take()
        if data and self._http.waiting:
            self.on_output()
        return [data] if data else []

    def close(self, error: Error | None = None) -> None:
        """End the connection: HTTP has no word for it."""
        self._http.closed = True
        self.on_output()

    def _events(self) -> list[Event]:
        if not self._http.closed or self._ended:
            return []
        self._ended = True
        followers, self.followers = self.followers, {}
        for follow in followers.values():
            follow()
        return [Closed()]


class AdminFront:
    """Front that accepts HTTP requests (``fronts.base.Front``).

    Args:
        answer: Answers a request of a client, whose listener is known by the profile of the peer.
    """

    name = "http"
    headers: tuple[bytes, ...] = METHODS
    #: Answer to a client whose first octets resemble HTTP and are no request.
    preferred_header = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def server(self, options: ServerOptions, now: float) -> AdminEngine:
        """Create the engine for a connection that begins with a request."""
        return AdminEngine(self._answer, options, now)


def _nothing() -> None:
    """Do nothing."""
