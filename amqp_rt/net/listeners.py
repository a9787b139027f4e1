"""Listening: TCP, Unix sockets and memory, with bounds on who may connect."""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
import stat
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import trio

from ..errors import ConnectFailed
from ..limits import Limits
from .memory import MemoryNetwork

log = logging.getLogger("amqp_rt.net")

#: Runs one accepted connection until it ends. Its second argument is the peer's address in
#: words, its third is called once the peer has logged in.
Serve: TypeAlias = Callable[[trio.abc.Stream, str, Callable[[], None]], Awaitable[None]]

#: What the system says when it is out of something for a moment (LIM4).
_TRANSIENT: Final = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.ECONNABORTED,
    errno.EPERM,
}
_BACK_OFF_S: Final = 0.1


class Door:
    """Counts the connections of one listener, and turns away those above its bounds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections = 0
        self._strangers: Counter[str] = Counter()

    @property
    def strangers(self) -> int:
        """Connections that have not logged in."""
        return self._strangers.total()

    def admits(self, host: str) -> bool:
        """Whether one more connection from *host* is allowed."""
        limits = self.limits
        return (
            self.connections < limits.connections_max
            and self.strangers < limits.connections_unauthenticated_max
            and self._strangers[host] < limits.connections_unauthenticated_per_address_max
        )

    async def serve(self, stream: trio.abc.Stream, host: str, address: str, serve: Serve) -> None:
        """Run one connection within the bounds; above them the stream is dropped at once."""
        if not self.admits(host):
            log.warning("connection from %s refused: too many connections", address)
            await trio.aclose_forcefully(stream)
            return
        self.connections += 1
        self._strangers[host] += 1
        unknown = True

        def logged_in() -> None:
            nonlocal unknown
            if unknown:
                unknown = False
                self._strangers[host] -= 1
                if not self._strangers[host]:
                    del self._strangers[host]

        try:
            await serve(stream, address, logged_in)
        finally:
            logged_in()
            self.connections -= 1
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)


async def open_tcp(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on every address of *host*; port 0 picks one port for all of them.

    Raises:
        ConnectFailed: The address cannot be listened on; the sentence says which and why.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host or None)
        if port == 0 and len(listeners) > 1:
            chosen = listeners[0].socket.getsockname()[1]
            for listener in listeners:
                await listener.aclose()
            listeners = await trio.open_tcp_listeners(chosen, host=host or None)
    except OSError as error:
        raise ConnectFailed(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    return listeners


async def open_unix(path: str, *, mode: int = 0o600) -> trio.SocketListener:
    """Listen on a Unix socket at *path*; a file left over by a dead listener is replaced.

    Raises:
        ConnectFailed: Somebody listens there, or the file cannot be made.
    """
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        await sock.bind(path)
        os.chmod(path, mode)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConnectFailed(f"cannot listen on unix socket {path}: {_reason(error)}") from error
    return trio.SocketListener(sock)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is in the way")
    except FileNotFoundError:
        return
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "somebody listens there already")


async def serve_socket(
    listener: trio.SocketListener, door: Door, serve: Serve, *, nursery: trio.Nursery
) -> None:
    """Accept connections into *nursery* until cancelled; the listener is closed then.

    The system running out of descriptors or memory delays accepting and does not end it.
    """
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
                log.error("accepting connections is delayed: %s", _reason(error))
                await trio.sleep(_BACK_OFF_S)
                continue
            host, address = _peer_of(stream)
            nursery.start_soon(door.serve, stream, host, address, serve)


async def serve_memory(
    network: MemoryNetwork, name: str, door: Door, serve: Serve, *, nursery: trio.Nursery,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:  # fmt: skip
    """Accept connections to a name in memory into *nursery* until cancelled."""
    async with network.listen(name) as arrivals:
        task_status.started()
        async for stream in arrivals:
            nursery.start_soon(door.serve, stream, "memory", f"memory://{name}", serve)


def bound_address(listener: trio.SocketListener) -> tuple[str, int]:
    """Host and port that a TCP listener got."""
    host, port = listener.socket.getsockname()[:2]
    return host, port


def _peer_of(stream: trio.SocketStream) -> tuple[str, str]:
    try:
        if stream.socket.family == trio.socket.AF_UNIX:
            return "unix", "unix"
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone", "gone"
    return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
