"""Listening on TCP, Unix sockets and memory, with limits for connections."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias

import trio
from msgspec.structs import replace

from ..addresses import network_of
from ..errors import ConnectFailed, DecodeError
from ..limits import Limits
from ..loglimit import LogLimiter
from .endpoints import is_loopback, reason
from .memory import MemoryNetwork
from .proxy_headers import ProxyHeader, ProxyProtocol, octets_missing, parse_header, trusts

log = logging.getLogger("amqp_rt.net")

#: Runs one accepted connection until it ends. The second argument is the peer's address as text,
#: the third is called once the peer has logged in. Behind a proxy it may get ``server_name``, the host name that
#: the client requested.
Serve: TypeAlias = Callable[..., Awaitable[None]]
#: Takes one accepted socket, which does not block, with its peer's host and its address as text.
Arrive: TypeAlias = Callable[[socket.socket, str, str], None]
#: Errors of a temporary lack of resources. trio's listeners skip all other failures of a single
#: connection.
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_BACK_OFF_S: Final = 0.1
#: Errors of a connection that failed before it was accepted (accept(2)).
_FAILED: Final = {
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTO,
}
#: Connections accepted before other tasks get their turn.
_ACCEPTS_IN_A_ROW: Final = 16
#: Connections that the system holds until they are accepted.
_BACKLOG: Final = 1_024
#: Attempts to get the same free port on every address of a host.
_PORT_TRIES: Final = 16
#: Host names that stand for peers without an address to count.
_NO_ADDRESS: Final = {"unix", "memory", "gone", ""}


class Crowd:
    """Counts of the connections of all listeners of one process.

    Args:
        blocks: Whether an address (:func:`~amqp_rt.addresses.network_of`) is blocked for failed logins before.
    """

    def __init__(self, blocks: Callable[[str], bool] = lambda network: False) -> None:
        self.blocks = blocks
        #: Connections that have not logged in.
        self.strangers = 0
        self.by_network: dict[str, int] = {}
        #: Those that have not logged in by address, the oldest first, each with the function that
        #: ends it.
        self.strangers_by_network: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = count()

    def strangers_of(self, network: str) -> int:
        """Return the number of connections of *network* that have not logged in."""
        return len(self.strangers_by_network.get(network, ()))

    def enter(self, network: str, drop: Callable[[], None]) -> int:
        """Count a connection of *network* that has not logged in; return its number.

        *drop* ends it, to make room for another one.
        """
        number = next(self._numbers)
        self.strangers += 1
        self.strangers_by_network.setdefault(network, {})[number] = drop
        return number

    def leave(self, network: str, number: int) -> None:
        """Stop counting a connection, which has logged in or ended. A second call has no effect."""
        strangers = self.strangers_by_network.get(network)
        if strangers is not None and strangers.pop(number, None) is not None:
            self.strangers -= 1
            if not strangers:
                del self.strangers_by_network[network]

    def drop_stranger(self, network: str | None = None) -> None:
        """End the oldest connection of *network* that has not logged in.

        Without *network* it is the address with most of them: an attacker with many connections
        displaces its own, and not those of others that are about to log in.
        """
        if network is None:
            network, _ = max(
                self.strangers_by_network.items(),
                # Of addresses with equal counts, the one with the oldest connection.
                key=lambda each: (len(each[1]), -next(iter(each[1]))),
            )
        strangers = self.strangers_by_network[network]
        number, drop = next(iter(strangers.items()))
        self.leave(network, number)
        drop()


class Admission:
    """Admission of one connection within the limits of its listener."""

    __slots__ = ("_limiter", "_network", "_number")

    def __init__(self, limiter: ConnectionLimiter, network: str, number: int) -> None:
        self._limiter = limiter
        self._network = network
        self._number = number

    def log_in(self) -> None:
        """Stop counting the connection among those without a login. A second call has no effect."""
        self._limiter.crowd.leave(self._network, self._number)

    def leave(self) -> None:
        """Free the room, after the end of the connection."""
        self.log_in()
        self._limiter.connections -= 1
        _take_from(self._limiter.crowd.by_network, self._network)


class ConnectionLimiter:
    """Counter of one listener's connections, which refuses those above its limits.

    Args:
        limits: The limits.
        crowd: Shared by all listeners of a process, so that connections are counted together.
    """

    def __init__(self, limits: Limits, crowd: Crowd | None = None) -> None:
        self.limits = limits
        self.crowd = crowd or Crowd()
        self.connections = 0
        self._refusing = False
        self._dropping = False

    def _admits(self, host: str, network: str) -> bool:
        """Return whether one more connection from *host*, which counts for *network*, is allowed."""
        limits, crowd = self.limits, self.crowd
        if self.connections >= limits.connections_max or not limits.connections_unauthenticated_max:
            return False
        if host in _NO_ADDRESS:
            return True
        return (
            not crowd.blocks(network)
            and crowd.by_network.get(network, 0) < limits.connections_per_address_max
            and limits.connections_unauthenticated_per_address_max > 0
        )

    def admit(self, host: str, address: str, drop: Callable[[], None]) -> Admission | None:
        """Return the admission of one more connection from *host*; None, with a line in the log, above the limits.

        If too many connections, of the same address or in total, have not logged in, the oldest of
        them is dropped instead: refusing the new one would let a peer that occupies all places keep
        out everyone else, including those behind the same address (NAT).

        Args:
            host: The host that the connection counts for.
            address: The peer's address, for the log.
            drop: Ends the connection, to make room for another one.
        """
        network, crowd = network_of(host), self.crowd
        if not self._admits(host, network):
            # One line for a flood of connections, not one for each of them.
            level = logging.DEBUG if self._refusing else logging.WARNING
            blocked = host not in _NO_ADDRESS and crowd.blocks(network)
            why = "too many failed logins" if blocked else "too many connections"
            log.log(level, "connection from %s refused: %s", address, why)
            self._refusing = True
            return None
        self._refusing = False
        limits = self.limits
        of_address = limits.connections_unauthenticated_per_address_max
        crowded = host not in _NO_ADDRESS and crowd.strangers_of(network) >= of_address
        if crowded or crowd.strangers >= limits.connections_unauthenticated_max:
            level = logging.DEBUG if self._dropping else logging.WARNING
            log.log(level, "connections that have not logged in are dropped: there are too many")
            self._dropping = True
            crowd.drop_stranger(network if crowded else None)
        else:
            self._dropping = False
        self.connections += 1
        crowd.by_network[network] = crowd.by_network.get(network, 0) + 1
        return Admission(self, network, crowd.enter(network, drop))

    async def serve(self, stream: trio.abc.Stream, host: str, address: str, serve: Serve) -> None:
        """Run one connection within the limits; above them the stream is dropped at once."""
        scope = trio.CancelScope()
        admission = self.admit(host, address, scope.cancel)
        if admission is None:
            await trio.aclose_forcefully(stream)
            return
        try:
            with scope:
                await serve(stream, address, admission.log_in)
        finally:
            admission.leave()
            if not (isinstance(stream, trio.SocketStream) and stream.socket.fileno() < 0):
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)


class ProxiedArrivals:
    """Connections that proxies open for their clients, up to the end of the header that says for whom.

    The limiter counts them by the addresses of the clients, since all have that of the proxy.

    Args:
        policy: Which proxies are trusted.
        limiter: Counts the connections whose header has arrived.
    """

    def __init__(self, policy: ProxyProtocol, limiter: ConnectionLimiter) -> None:
        self.policy = policy
        self.limiter = limiter
        #: Connections whose header has not arrived. A proxy sends it at once, so they are few.
        self.waiting = 0
        self._log = LogLimiter(replace(limiter.limits, log_lines_max=1))

    async def serve(self, stream: trio.abc.Stream, host: str, address: str, serve: Serve) -> None:
        """Run one connection that a proxy opened; drop it if its header is missing, malformed or late."""
        limits = self.limiter.limits
        header: ProxyHeader | None = None
        try:
            if host == "gone":
                return
            if not trusts(self.policy.trusted, host):
                self._refuse(address, "it is none of the trusted proxies")
                return
            if self.waiting >= limits.connections_unauthenticated_max:
                self._refuse(address, "too many connections without a PROXY header")
                return
            self.waiting += 1
            try:
                with trio.move_on_after(limits.handshake_s):
                    header = await _receive_header(stream, limits.proxy_header_max)
                if header is None:
                    self._refuse(address, f"no PROXY header within {limits.handshake_s:g} s")
            except (DecodeError, trio.BrokenResourceError) as error:
                self._refuse(address, str(getattr(error, "description", error)))
            finally:
                self.waiting -= 1
            if (
                header is not None
                and header.source is None
                and not header.own
                and is_loopback(host)
            ):
                # It would have the privileges of a peer on this machine, and may be on any.
                self._refuse(address, "the PROXY header of a proxy on this machine names no client")
                header = None
        finally:
            if header is None:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)
        if header is None:
            return
        if header.source is not None:
            client, port = header.source
            # Peers on this machine have privileges. Only a proxy on it can speak for them.
            if is_loopback(host) or not is_loopback(client):
                host, address = client, _address_text(client, port)
        if header.authority:
            serve = partial(serve, server_name=header.authority)
        await self.limiter.serve(stream, host, address, serve)

    def _refuse(self, address: str, why: str) -> None:
        more = self._log.admit(why.partition(":")[0], trio.current_time())
        if more is not None:
            log.warning("connection from %s refused: %s%s", address, why, more)


async def _receive_header(stream: trio.abc.Stream, most: int) -> ProxyHeader:
    """Receive the header of the PROXY protocol, of at most *most* octets, and nothing after it.

    Raises:
        DecodeError: It is malformed, or the stream ended within it.
    """
    begun = b""
    while missing := octets_missing(begun, most):
        piece = await stream.receive_some(missing)
        if not piece:
            raise DecodeError("the connection ended within the PROXY header")
        begun += piece
    return parse_header(begun)


def _take_from(counts: dict[str, int], key: str) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


async def open_tcp(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on every address of *host*, or of this machine; port 0 picks one port for all.

    Raises:
        ConnectFailed: An address cannot be listened on; the message names it and the reason.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host or None)
        if port == 0 and len(listeners) > 1:
            listeners = await _on_one_port(host, listeners)
    except OSError as error:
        raise ConnectFailed(f"cannot listen on {host or '*'}:{port}: {reason(error)}") from error
    return listeners


async def _on_one_port(
    host: str, listeners: list[trio.SocketListener]
) -> list[trio.SocketListener]:
    """Try the ports that the system picks for one address until one is free on all."""
    for tries in range(1, _PORT_TRIES + 1):
        port = listeners[0].socket.getsockname()[1]
        for listener in listeners:
            await listener.aclose()
        try:
            return await trio.open_tcp_listeners(port, host=host or None)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or tries == _PORT_TRIES:
                raise
        listeners = await trio.open_tcp_listeners(0, host=host or None)
    return listeners


async def open_unix(path: str, *, mode: int = 0o600) -> trio.SocketListener:
    """Listen on a Unix socket at *path*; the file of a dead listener is replaced.

    Raises:
        ConnectFailed: Another listener is active, or the file cannot be created.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConnectFailed(
            f"cannot listen on amqp+unix://{path}: this system has no Unix sockets",
            condition="amqp:not-implemented",
        )
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        await sock.bind(path)
        # No client can connect before it listens: there is no moment with a wider mode.
        os.chmod(path, mode)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConnectFailed(f"cannot listen on amqp+unix://{path}: {reason(error)}") from error
    return trio.SocketListener(sock)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is in the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "the address is already in use")


async def serve_socket(
    listener: trio.abc.Listener[Any],
    limiter: ConnectionLimiter,
    serve: Serve,
    *,
    nursery: trio.Nursery,
    proxied: ProxiedArrivals | None = None,
    peer_of: Callable[[Any], tuple[str, str]] | None = None,
) -> None:
    """Accept connections into *nursery* until cancelled; then close the listener.

    *peer_of* returns the host and the address of a peer whose stream is no socket. With *proxied* each begins with a header of the PROXY protocol. A lack of descriptors or memory delays accepting and does not end it.
    """
    exhausted = False
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                if not exhausted:
                    log.error("accepting connections is delayed: %s", reason(error))
                exhausted = True
                await trio.sleep(_BACK_OFF_S)
                continue
            exhausted = False
            host, address = (peer_of or _peer_of)(stream)
            if proxied is None:
                nursery.start_soon(limiter.serve, stream, host, address, serve)
            else:
                nursery.start_soon(proxied.serve, stream, host, address, serve)


async def accept_sockets(listener: trio.SocketListener, arrive: Arrive) -> None:
    """Accept connections until cancelled, and give each to *arrive*; then close the listener.

    The reactor uses it. No task is started for a connection: *arrive* returns at once, and closes the socket now or later. A lack
    of descriptors or memory delays accepting and does not end it.
    """
    exhausted = False
    # trio's socket gives up the descriptor: its own accept() takes one connection per pass.
    with socket.socket(fileno=listener.socket.detach()) as listening:
        is_unix = listening.family == socket.AF_UNIX
        if not is_unix:
            # Accepted sockets inherit the option on Linux, and the reactor is for Linux only.
            with suppress(OSError):
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            await trio.lowlevel.wait_readable(listening)
            try:
                for _ in range(_ACCEPTS_IN_A_ROW):
                    connected, peer = listening.accept()
                    exhausted = False
                    connected.setblocking(False)
                    if is_unix:
                        arrive(connected, "unix", "unix")
                    else:
                        arrive(connected, peer[0], _address_text(peer[0], peer[1]))
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if not exhausted:
                        log.error("accepting connections is delayed: %s", reason(error))
                    exhausted = True
                    await trio.sleep(_BACK_OFF_S)
                elif error.errno not in _FAILED:
                    raise


async def serve_memory(
    network: MemoryNetwork, name: str, limiter: ConnectionLimiter, serve: Serve, *, nursery: trio.Nursery,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:  # fmt: skip
    """Accept connections to a name in memory into *nursery* until cancelled.

    Raises:
        ConnectFailed: The name is in use.
    """
    try:
        listening = network.listen(name)
    except OSError as error:
        raise ConnectFailed(f"cannot listen on memory://{name}: {reason(error)}") from error
    async with listening as arrivals:
        task_status.started()
        async for stream in arrivals:
            nursery.start_soon(limiter.serve, stream, "memory", f"memory://{name}", serve)


def bound_address(listener: trio.SocketListener) -> tuple[str, int]:
    """Return the host and port of a TCP listener."""
    host, port = listener.socket.getsockname()[:2]
    return host, port


def _peer_of(stream: trio.SocketStream) -> tuple[str, str]:
    try:
        if stream.socket.family == trio.socket.AF_UNIX:
            return "unix", "unix"
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone", "gone"
    return host, _address_text(host, port)


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
