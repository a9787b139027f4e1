"""Connections that the reactor carries from their first octet on, without a task of their own.

A task for each connection, with its scopes and the frames of its coroutines, would take more time and memory
than everything that the protocol does to set the connection up. Only sockets without TLS arrive like this;
what has to wait for a handshake is a task (:meth:`~amqp_rt.container.entry.ConnectionEntry.accept`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from ..events import Event, Peer
from ..fronts.base import Front, ProtocolEngine
from ..limits import Limits
from ..net.carrier import Carrier, nothing
from ..net.driver import TRIO_CLOCK
from ..net.entrance import refuse_unknown
from ..net.listeners import Admission, ConnectionLimiter
from ..net.preamble import decidable, match, nearest_header
from ..net.reactor import Reactor
from ..net.traces.recording import Traced
from ..outcomes import Error
from .connections import Connection
from .profiles import Profile

log = logging.getLogger("amqp_rt.container")


class ArrivalHome(Protocol):
    """Entry of connections, as arrivals use it."""

    @property
    def fronts(self) -> Sequence[Front]:
        """Protocols that listeners speak."""

    @property
    def limits(self) -> Limits:
        """Limits of connections."""

    def begin(
        self,
        front: Front,
        address: str,
        since: float,
        profile: Profile | None,
        admission: Admission,
    ) -> Connection | None:
        """Begin a connection on which the header of *front* has arrived; None if the container is stopping."""

    def traced(self, engine: ProtocolEngine, traces: list[Traced]) -> ProtocolEngine:
        """Return *engine* with its traces, if there are any, which are appended to *traces*."""

    def ended(self, connection: Connection) -> None:
        """Remove all state of *connection*, which has ended."""


class Arrivals:
    """Sockets that a listener accepts, on their way to the reactor.

    Args:
        home: The entry.
        reactor: Carries the connections.
        limiter: Counts them.
        profile: Their profile; None for that of all listeners.
    """

    def __init__(
        self,
        home: ArrivalHome,
        reactor: Reactor,
        limiter: ConnectionLimiter,
        profile: Profile | None,
    ) -> None:
        self._home = home
        self._reactor = reactor
        self._limiter = limiter
        self._profile = profile

    def arrive(self, sock: socket.socket, host: str, address: str) -> None:
        """Carry the connection of *sock* within the limits; above them close it at once."""
        arrival = ArrivedConnection(self._home, sock, address, self._profile)
        admission = self._limiter.admit(host, address, arrival.drop)
        if admission is None:
            sock.close()
            return
        arrival.start(self._reactor, admission)


class ArrivedConnection:
    """Connection that a peer has opened, from its arrival to its end.

    It is an engine itself until the first octets tell which protocol the peer speaks, as
    :func:`~amqp_rt.net.preamble.select_front` is for streams; then the front's engine takes its place.
    """

    __slots__ = (
        "_address",
        "_admission",
        "_begun",
        "_carrier",
        "_connection",
        "_home",
        "_output",
        "_profile",
        "_since",
        "_sock",
        "_traces",
        "deadline",
        "finished",
        "on_output",
        "work_max",
    )

    def __init__(
        self, home: ArrivalHome, sock: socket.socket, address: str, profile: Profile | None
    ) -> None:
        self._home = home
        self._sock = sock
        self._address = address
        self._profile = profile
        self._since = trio.current_time()
        self._admission: Admission | None = None
        self._carrier: Carrier | None = None
        self._connection: Connection | None = None
        self._traces: list[Traced] = []
        self._begun = b""
        self._output = b""
        self.deadline = self._since + home.limits.handshake_s
        self.finished = False
        self.on_output: Callable[[], None] = nothing
        self.work_max = 0

    def start(self, reactor: Reactor, admission: Admission) -> None:
        """Be carried by *reactor*, within *admission*, until the end."""
        self._admission = admission
        self._carrier = Carrier(
            self._sock, self, _ignore, limits=self._home.limits, clock=TRIO_CLOCK
        )
        reactor.adopt(self._carrier, self._sock, self.ended)

    def drop(self) -> None:
        """Drop the connection: another one takes its place."""
        if self._carrier is not None:
            self._carrier.drop("the connection was dropped")

    def ended(self) -> None:
        """Close the socket and free its room, after the end of the connection."""
        carrier, self._carrier = self._carrier, None
        assert carrier is not None
        assert self._admission is not None
        carrier.leave()
        self._sock.close()
        try:
            for each in self._traces:
                each.stop()
            if carrier.failure is not None:
                # A fault of ours: it must not end the other connections.
                log.error("the connection from %s broke", self._address, exc_info=carrier.failure)
        finally:
            if self._connection is not None:
                self._home.ended(self._connection)
            self._admission.leave()

    # --- the engine, until the protocol is known ---------------------------------------------

    @property
    def peer(self) -> Peer:
        """Peer of the connection."""
        return Peer(address=self._address)

    @property
    def unread(self) -> bool:
        """Whether input is left: never."""
        return False

    @property
    def congested(self) -> bool:
        """Whether too much input is in hand: never, as a header is short."""
        return False

    @property
    def output_size(self) -> int:
        """Number of bytes waiting in ``take``."""
        return len(self._output)

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Find the protocol that begins with *data*, and let its engine take over."""
        data = self._begun + data
        front = match(data, self._home.fronts)
        if front is None:
            self._begun = data
            if decidable(data, self._home.fronts):
                refuse_unknown(data, self._address)
                self._output = nearest_header(data, self._home.fronts)
                self.finished = True
            return []
        assert not isinstance(front, bytes)
        assert self._carrier is not None
        assert self._admission is not None
        connection = self._connection = self._home.begin(
            front, self._address, self._since, self._profile, self._admission
        )
        if connection is None:
            self._give_up()
            return []
        self._begun = b""
        engine = self._home.traced(connection.engine, self._traces)
        self._carrier.become(engine, connection.handle)
        return engine.receive(data, now)

    def receive_eof(self, now: float) -> list[Event]:
        """End: no protocol follows."""
        self.finished = True
        return []

    def tick(self, now: float) -> list[Event]:
        """End: the peer had its time for a header."""
        self._give_up()
        return []

    def take(self) -> list[bytes]:
        """Take the header that would be accepted, for a peer that has sent another one."""
        output, self._output = self._output, b""
        return [output] if output else []

    def close(self, error: Error | None = None) -> None:
        """End."""
        self._give_up()

    def _give_up(self) -> None:
        self.finished = True
        self.drop()


def _ignore(events: list[Event]) -> None:
    """Ignore the events of an arrival: it has none."""
