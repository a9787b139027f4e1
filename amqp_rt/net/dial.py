"""From a URL to a connected stream."""

from __future__ import annotations

import ipaddress

import trio
from msgspec import Struct

from ..addresses import Url
from ..errors import ConnectFailed
from .memory import MemoryNetwork


class Dialled(Struct):
    """A stream, and what may be sent over it."""

    stream: trio.abc.Stream
    #: Encrypted, with the peer's name verified.
    secure: bool
    #: It does not leave this machine.
    local: bool


async def dial(url: Url, *, network: MemoryNetwork) -> Dialled:
    """Connect to *url*: TCP, a Unix socket, or a name in *network*.

    Cancelled, nothing is left open.

    Raises:
        ConnectFailed: In one sentence, where and why.
    """
    try:
        if url.scheme == "memory":
            return Dialled(await network.dial(url.host), False, True)
        if url.scheme == "amqp+unix":
            return Dialled(await trio.open_unix_socket(url.path), False, True)
        if url.scheme == "amqp":
            stream = await trio.open_tcp_stream(url.host, url.port)
            stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            return Dialled(stream, False, _is_loopback(stream))
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {url}: {_reason(error)}") from error
    raise ConnectFailed(f"cannot connect to {url}: {url.scheme}:// is not spoken by this version")


def _is_loopback(stream: trio.SocketStream) -> bool:
    try:
        return ipaddress.ip_address(stream.socket.getpeername()[0].split("%")[0]).is_loopback
    except (OSError, ValueError):
        return False


def _reason(error: OSError) -> str:
    if error.__cause__ is not None and isinstance(error.__cause__, OSError):
        error = error.__cause__
    elif isinstance(error.__cause__, BaseExceptionGroup):
        inner = error.__cause__.exceptions[0]
        error = inner if isinstance(inner, OSError) else error
    return error.strerror or str(error)
