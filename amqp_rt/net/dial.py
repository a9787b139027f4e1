"""From a URL to a connected stream."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Final

import trio
from msgspec import Struct

from ..addresses import Url
from ..errors import ConnectFailed
from .memory import MemoryNetwork

#: Schemes that need what this version does not have yet, and what that is.
_NOT_YET: Final = {
    "amqps": "TLS",
    "ws": "WebSocket",
    "wss": "WebSocket over TLS",
}
#: The system's words are for system calls; these say what to look at.
_WORDS: Final = {
    errno.ECONNREFUSED: "nobody listens there",
    errno.ENOENT: "there is no such socket file",
    errno.EHOSTUNREACH: "the host cannot be reached",
    errno.ENETUNREACH: "its network cannot be reached",
    errno.ETIMEDOUT: "it does not answer",
}


class Dialled(Struct, kw_only=True):
    """A connected stream, and what may be said on it."""

    stream: trio.abc.Stream
    #: What is sent is encrypted.
    secure: bool = False
    #: It never leaves this machine: the address that it really reached says so, not a name.
    local: bool = False


async def dial(url: Url, *, network: MemoryNetwork | None = None) -> Dialled:
    """Connect to *url*; of a host with several addresses, to the one that answers first.

    The caller bounds the time. Cancelled, nothing stays open.

    Args:
        url: ``amqp``, ``amqp+unix`` or ``memory``.
        network: Where ``memory`` names are looked up.

    Raises:
        ConnectFailed: One sentence says where, and why not.
    """
    if url.scheme in _NOT_YET:
        raise ConnectFailed(
            f"cannot connect to {url}: {_NOT_YET[url.scheme]} is not there in this version; "
            "use amqp://, amqp+unix:// or memory://",
            condition="amqp:not-implemented",
        )
    if url.scheme == "memory":
        if network is None:
            raise ConnectFailed(f"cannot connect to {url}: there is no network in memory here")
        return Dialled(stream=await network.dial(url.host), local=True)
    if url.scheme not in ("amqp", "amqp+unix"):
        raise ConnectFailed(f"cannot connect to {url}: {url.scheme}:// is not known")
    if url.scheme == "amqp+unix" and not hasattr(socket, "AF_UNIX"):
        raise ConnectFailed(f"cannot connect to {url}: this system has no Unix sockets")
    try:
        if url.scheme == "amqp+unix":
            return Dialled(stream=await trio.open_unix_socket(url.path), local=True)
        stream = await trio.open_tcp_stream(url.host, url.port)
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {url}: {_reason(error)}") from error
    return Dialled(stream=stream, local=is_local(stream))


def is_local(stream: trio.SocketStream) -> bool:
    """Whether the peer of *stream* is this machine, by the address and not by a name."""
    try:
        address = stream.socket.getpeername()
    except OSError:
        return False
    if stream.socket.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        return host.ipv4_mapped.is_loopback
    return host.is_loopback


def _reason(error: OSError) -> str:
    """Why, in one clause. trio puts the failures of several addresses into a group."""
    if isinstance(error, socket.gaierror):
        return "the host's name is not known"
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        for each in cause.exceptions:
            if isinstance(each, OSError):
                return _reason(each)
    if isinstance(cause, OSError):
        return _reason(cause)
    if error.errno is None:
        return str(error)
    return _WORDS.get(error.errno) or error.strerror or os.strerror(error.errno)
