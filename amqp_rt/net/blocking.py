"""Engines on a plain blocking socket, without an event loop or a thread.

For scripts, and for processes that must not start an event loop. Everything happens in the calling
thread, within the calls below; between them nothing is sent or received, not even heartbeats. TLS
is a layer on the socket as elsewhere (:mod:`.channels`); it is imported only where it is used, since
it imports trio.
"""

from __future__ import annotations

import selectors
import socket
import ssl
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ..addresses import Url
from ..clock import Clock, SystemClock
from ..errors import ConnectFailed, ConnectionLost, DeadlineExceeded
from ..events import Closed, ConnectionFailed, Event
from ..fronts.base import ProtocolEngine
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error
from .carrier import READ_SIZE, Carrier, Handle, NonBlockingSocket
from .endpoints import check_scheme, reason

if TYPE_CHECKING:
    from .tls import ClientTls, TlsLayer

_CLOCK: Final = SystemClock()


def connect_blocking(
    url: Url,
    engine: ProtocolEngine,
    handle: Handle | None = None,
    *,
    tls: ClientTls | ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
    limits: Limits = DEFAULT_LIMITS,
    clock: Clock = _CLOCK,
) -> BlockingConnection:
    """Connect to *url* and start *engine* on the connection.

    Args:
        url: ``amqp``, ``amqps`` or ``amqp+unix``.
        engine: See :class:`BlockingConnection`, also for *handle*, *limits* and *clock*.
        handle: See there.
        tls: Trusted authorities for ``amqps``; by default those of the system.
        timeout_s: Seconds to connect, including the TLS handshake.
        limits: See there.
        clock: See there.

    Raises:
        ConnectFailed: The message names the URL and the reason.
    """
    until = clock.monotonic() + timeout_s
    sock = dial_blocking(url, timeout_s=timeout_s)
    layer = None
    if url.scheme == "amqps":
        try:
            layer = _encrypted(sock, url.host, tls, until, clock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise ConnectFailed(f"cannot connect to {url}: {error}") from error
            raise
    return BlockingConnection(sock, engine, handle, tls=layer, limits=limits, clock=clock)


def _encrypted(
    sock: socket.socket,
    host: str,
    tls: ClientTls | ssl.SSLContext | None,
    until: float,
    clock: Clock,
) -> TlsLayer:
    """Create a TLS layer for *sock* and complete its handshake before *until*.

    Raises:
        OSError: The handshake failed; the message is one clause.
    """
    from .tls import ENDED, MAYBE, client_layer

    layer = client_layer(tls, host)
    data: bytes | None = None
    while True:
        seconds = until - clock.monotonic()
        if seconds <= 0:
            raise TimeoutError("the TLS handshake took too long")
        sock.settimeout(seconds)
        try:
            done = layer.handshake(data)
        finally:
            sock.sendall(b"".join(layer.outgoing()))
        if done:
            return layer
        data = sock.recv(READ_SIZE)
        if not data:
            raise ConnectionError(ENDED + MAYBE)


def dial_blocking(url: Url, *, timeout_s: float = 10.0) -> socket.socket:
    """Connect a socket to *url*: ``amqp``, ``amqps`` (not encrypted yet) or ``amqp+unix``.

    Raises:
        ConnectFailed: The message names the URL and the reason.
    """
    check_scheme(url)
    if url.scheme == "memory":
        raise ConnectFailed(f"cannot connect to {url}: memory is for event loops only")
    if url.scheme not in ("amqp", "amqps", "amqp+unix"):
        raise ConnectFailed(
            f"cannot connect to {url}: without an event loop there are amqp://, amqps:// and "
            "amqp+unix:// only",
            condition="amqp:not-implemented",
        )
    try:
        if url.scheme != "amqp+unix":
            sock = socket.create_connection((url.host, url.port), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(url.path)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {url}: {reason(error)}") from error


class BlockingConnection:
    """Connection that runs *engine* over *sock* in the calling thread.

    As a context manager it closes politely at the end of the block, or drops the connection if the
    block raised. Only one thread at a time may use it.

    Args:
        sock: A connected socket, which this object owns from now on.
        engine: The engine to run, created with the time of *clock*.
        handle: Called with the events of each chunk. A plain call, which must not wait.
        tls: TLS on the socket after its handshake; :func:`connect_blocking` performs it.
        limits: ``output_max`` and ``write_stall_s`` are used here.
        clock: The clock of the engine.
    """

    def __init__(
        self,
        sock: socket.socket,
        engine: ProtocolEngine,
        handle: Handle | None = None,
        *,
        tls: TlsLayer | None = None,
        limits: Limits = DEFAULT_LIMITS,
        clock: Clock = _CLOCK,
    ) -> None:
        self.engine = engine
        #: Why the connection ended, if the peer or the network gave a reason.
        self.error: Error | None = None
        self._clock = clock
        self._user_handle = handle
        self._socket = sock
        self._selector = selectors.DefaultSelector()
        self._registered = 0
        self._flush_due = False
        sock.setblocking(False)
        channel: NonBlockingSocket = sock
        initial = b""
        if tls is not None:
            from .channels import layered

            initial = tls.pending()
            channel = layered(sock, [tls])
        self._carrier = Carrier(
            channel, engine, self._handle, limits=limits, clock=clock, closes=tls is None
        )
        self._watch(self._carrier)
        self._step(lambda: self._carrier.start(self, initial))

    # --- called by users -----------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the connection has ended; data that has not arrived will not."""
        return self._carrier.over

    def run_until(self, done: Callable[[], bool], *, timeout_s: float = inf) -> None:
        """Send, receive and watch the clock until *done()* is true.

        *done* is called whenever its result may have changed. It is a plain call, for example
        ``lambda: delivery.settled``.

        Raises:
            DeadlineExceeded: It did not become true in time. The connection stays open.
            ConnectionLost: The connection ended before.
        """
        until = self._clock.monotonic() + timeout_s
        while not done():
            if self._carrier.over:
                error = self.error or Error("amqp:connection:forced", "the connection is over")
                raise ConnectionLost(str(error.description or ""), condition=str(error.condition))
            self._run_once(until)
            if self._clock.monotonic() >= until and not done():
                raise DeadlineExceeded(f"nothing came of it within {timeout_s:g} s")

    def run_for(self, seconds: float) -> None:
        """Keep the connection going for *seconds*: heartbeats, and input from the peer."""
        until = self._clock.monotonic() + seconds
        while not self._carrier.over and self._clock.monotonic() < until:
            self._run_once(until)

    def flush(self, *, timeout_s: float = inf) -> None:
        """Pass all output to the operating system.

        Raises:
            DeadlineExceeded: The peer does not read.
            ConnectionLost: The connection ended before.
        """
        self.run_until(
            lambda: not (self._flush_due or self._carrier.wants_write), timeout_s=timeout_s
        )

    def close(self, *, grace_s: float = 5.0) -> None:
        """Close politely: the peer has *grace_s* to answer. Afterwards the socket is closed."""
        self._step(lambda: self._carrier.stop(grace_s))
        while not self._carrier.over:
            self._run_once(inf)
        self.drop()

    def drop(self) -> None:
        """End abruptly, without waiting."""
        self._carrier.drop("the connection was dropped")
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()

    # --- called by the carrier -----------------------------------------------------------

    def watch(self, carrier: Carrier) -> None:
        """Update the selector when ``wants_read`` or ``wants_write`` has changed."""
        self._watch(carrier)

    def alarm(self, carrier: Carrier) -> None:
        """Do nothing: alarms are checked before each wait."""

    def later(self, carrier: Carrier) -> None:
        """Flush the carrier in the next step."""
        self._flush_due = True

    def ended(self, carrier: Carrier) -> None:
        """Do nothing: the end is checked after each step."""

    # --- inside --------------------------------------------------------------------------

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Closed | ConnectionFailed):
                self.error = event.error
        if self._user_handle is not None:
            self._user_handle(events)

    def _watch(self, carrier: Carrier) -> None:
        wanted = selectors.EVENT_READ if carrier.wants_read else 0
        if carrier.wants_write:
            wanted |= selectors.EVENT_WRITE
        if wanted and self._registered:
            self._selector.modify(self._socket, wanted)
        elif wanted:
            self._selector.register(self._socket, wanted)
        elif self._registered:
            self._selector.unregister(self._socket)
        self._registered = wanted

    def _step(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            self._carrier.fail(error)
            raise

    def _run_once(self, until: float) -> None:
        carrier = self._carrier
        if self._flush_due:
            self._flush_due = False
            self._step(carrier.flush)
            return
        seconds = min(until, carrier.wakes_at) - self._clock.monotonic()
        for _, ready in self._selector.select(None if seconds == inf else max(seconds, 0)):
            if ready & selectors.EVENT_WRITE and carrier.wants_write:
                self._step(carrier.writable)
            if ready & selectors.EVENT_READ and carrier.wants_read:
                self._step(carrier.readable)
        now = self._clock.monotonic()
        if now >= carrier.wakes_at:
            self._step(lambda: carrier.expire(now))
