"""Edge processes, as the process that has the queues sees them: the hub passes them connections to unwrap.

An edge carries TLS and WebSocket on its own core. The hub accepts each connection and counts it; then it passes the
socket on, together with one end of a new socket pair, over the control socket that the edge inherited. The edge does the
handshakes, says on the pair what they revealed (:class:`Unwrapped`), and relays octets from then on. Neither the control
socket nor a pair has a name, so that no other process can speak for an edge, and what is said on a pair is about the
connection for which the hub made it.

Logins, rights and protocols stay in the hub. Edges need Linux, whose sockets keep the boundaries of control messages.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Final, TypeAlias

import msgspec
import trio
from msgspec import Struct

from ..errors import ConnectFailed
from ..events import Certificate
from ..limits import Limits
from .carrier import nothing
from .driver import Turn
from .tls import TlsLayer

#: Octets of the longest control message: the first octets of a client, and text of a bounded size.
CONTROL_MAX: Final = 131_072
#: Sockets that come with one control message.
DESCRIPTORS_MAX: Final = 2
#: Octets of the length before an :class:`Unwrapped`, and of the longest: a certificate has a bounded number of names.
LENGTH_SIZE: Final = 4
ARRIVAL_MAX: Final = 1_048_576
#: Clients that one message names.
_TOLD_AT_ONCE: Final = 1_000


class EdgeSettings(Struct, frozen=True, kw_only=True, tag=True):
    """First message to an edge: what it needs for the handshakes."""

    limits: Limits
    #: PEM files; an empty name for none.
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    #: Web pages that may open a WebSocket.
    origins: tuple[str, ...] = ()
    #: Level and format of log lines.
    log_level: str = "INFO"
    log_format: str = "text"


class Passed(Struct, frozen=True, kw_only=True, tag=True):
    """Message to an edge: a connection, whose socket and end of the pair come with it."""

    number: int
    #: ``amqps``, ``ws`` or ``wss``.
    scheme: str
    path: str
    #: The client's address, for logs.
    address: str
    #: Octets that were read from the socket already.
    received: bytes
    #: Seconds that the handshakes may take.
    within: float


class Trust(Struct, frozen=True, tag=True):
    """Message to an edge: the clients of these numbers have logged in, and may send larger messages."""

    numbers: list[int]


class Reload(Struct, frozen=True, tag=True):
    """Message to an edge: read the certificates again."""


class EdgeReady(Struct, frozen=True, tag=True):
    """Only message of an edge: it can take connections."""


class Unwrapped(Struct, frozen=True, kw_only=True):
    """Facts that the handshakes of a connection revealed, the first octets on its pair after their length."""

    secure: bool
    certificate: Certificate | None = None
    server_name: str = ""


def facts_of(layer: TlsLayer | None) -> Unwrapped:
    """Return what the handshake of *layer* revealed; None stands for a stream without TLS."""
    if layer is None:
        return Unwrapped(secure=False)
    return Unwrapped(secure=True, certificate=layer.certificate, server_name=layer.server_name)


ToEdge: TypeAlias = EdgeSettings | Passed | Trust | Reload


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Return the control sockets of the hub and of a new edge.

    Raises:
        ConnectFailed: This system has no such sockets.
    """
    kind = getattr(socket, "SOCK_SEQPACKET", None)
    if kind is None or not hasattr(socket, "AF_UNIX"):
        raise ConnectFailed(
            "edge processes need Linux: this system has no Unix sockets of the kind SOCK_SEQPACKET",
            condition="amqp:not-implemented",
        )
    try:
        return socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise ConnectFailed(
            f"edge processes need Unix sockets of the kind SOCK_SEQPACKET: {error.strerror}",
            condition="amqp:not-implemented",
        ) from error


class HandedOver(Struct, kw_only=True):
    """Connection that an edge has unwrapped: the octets of AMQP are on *stream*."""

    stream: trio.abc.Stream
    arrival: Unwrapped
    #: Call it once the client has logged in.
    trust: Callable[[], None]
    #: Call it at the end of the connection.
    left: Callable[[], None]


class EdgeProcess:
    """One edge process, as long as it lives.

    Args:
        control: The hub's control socket.
        pid: The process.
    """

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.pid = pid
        #: Connections that it carries.
        self.connections = 0
        control.setblocking(False)
        self._raw = control
        self._control = trio.socket.from_stdlib_socket(control)
        self._sending = trio.Lock()
        self._numbers = count(1)
        #: Numbers of clients that have logged in, of which the edge has to be told.
        self._trusted: list[int] = []
        self._turn = Turn()

    async def send(self, message: ToEdge, sockets: Iterable[socket.socket] = ()) -> None:
        """Send a control message. If cancelled while it waits for room, nothing was sent.

        Raises:
            OSError: The edge has ended.
        """
        data = msgspec.msgpack.encode(message)
        descriptors = array.array("i", [each.fileno() for each in sockets])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if descriptors else []
        async with self._sending:
            await self._control.sendmsg([data], rights)

    async def wait_ready(self) -> None:
        """Wait until the edge can take connections.

        Raises:
            OSError: It has ended before.
        """
        if not await self._control.recv(CONTROL_MAX):
            raise ConnectionResetError("the edge has ended")

    async def run(self) -> None:
        """Tell the edge which clients have logged in, until its process ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell)
            try:
                # An edge says nothing more.
                while await self._control.recv(CONTROL_MAX):
                    pass
            except OSError:
                pass
            nursery.cancel_scope.cancel()

    async def _tell(self) -> None:
        while True:
            await self._turn.wait()
            trusted, self._trusted = self._trusted[:_TOLD_AT_ONCE], self._trusted[_TOLD_AT_ONCE:]
            if self._trusted:
                self._turn.call()
            try:
                await self.send(Trust(trusted))
            except OSError:
                return

    def close(self) -> None:
        """Close the control socket, which ends the process."""
        self._control.close()

    async def unwrap(
        self, client: socket.socket, *, scheme: str, path: str, address: str, received: bytes, within: float
    ) -> HandedOver:  # fmt: skip
        """Let the edge do the handshakes of *client*, which is passed on; return the stream of AMQP.

        If cancelled, the edge drops the client.

        Raises:
            ConnectFailed: The edge has ended, or the handshake failed and the edge has logged why.
        """
        number = next(self._numbers)
        self.connections += 1
        ours, theirs = socket.socketpair()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        arrival = None
        try:
            with theirs, client:
                handover = Passed(
                    number=number,
                    scheme=scheme,
                    path=path,
                    address=address,
                    received=received,
                    within=within,
                )
                await self.send(handover, [client, theirs])
            arrival = await _receive_arrival(stream)
        except (OSError, trio.BrokenResourceError) as error:
            raise ConnectFailed(f"the edge process {self.pid} has ended") from error
        finally:
            if arrival is None:
                self.connections -= 1
                await trio.aclose_forcefully(stream)
        return HandedOver(
            stream=stream,
            arrival=arrival,
            # Only messages of WebSockets have limits that a login raises.
            trust=nothing if scheme == "amqps" else partial(self._trust, number),
            left=self._leave,
        )

    def _trust(self, number: int) -> None:
        if not self._trusted:
            try:
                # Now, before the outcome of the login is on the pair: the client's next message may be large.
                self._raw.send(msgspec.msgpack.encode(Trust([number])))
                return
            except BlockingIOError:
                pass
            except OSError:
                return
        self._trusted.append(number)
        self._turn.call()

    def _leave(self) -> None:
        self.connections -= 1


class HandshakeFailed(ConnectFailed):
    """The edge has refused a connection, and has logged why."""


async def _receive_arrival(stream: trio.SocketStream) -> Unwrapped:
    """Receive the first octets of an edge on a pair, and nothing after them.

    Raises:
        HandshakeFailed: The pair ended instead.
    """
    size = int.from_bytes(await _receive_exactly(stream, LENGTH_SIZE), "big")
    if size > ARRIVAL_MAX:
        raise ConnectFailed(f"an edge said {size} octets about a connection")
    return msgspec.msgpack.decode(await _receive_exactly(stream, size), type=Unwrapped)


async def _receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = await stream.receive_some(size - len(found))
        if not piece:
            raise HandshakeFailed("the handshake failed")
        found += piece
    return found


class Edges:
    """Edge processes that live. Without any, the hub does handshakes itself."""

    def __init__(self) -> None:
        self.living: list[EdgeProcess] = []

    def next(self) -> EdgeProcess | None:
        """Return the edge with the fewest connections, of several the one that waits for longest; None if there is none."""
        found = min(self.living, key=_connections_of, default=None)
        if found is not None:
            # Connections that last for a moment go round, too.
            self.living.remove(found)
            self.living.append(found)
        return found

    async def reload(self) -> None:
        """Let all edges read the certificates again."""
        for edge in list(self.living):
            try:
                await edge.send(Reload())
            except OSError:
                pass  # It has ended: its successor reads them at its start.


def _connections_of(edge: EdgeProcess) -> int:
    return edge.connections
