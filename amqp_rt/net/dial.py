"""From a URL to a connected stream."""

from __future__ import annotations

from ipaddress import ip_address
from socket import AF_INET, AF_INET6

import trio
from msgspec import Struct

from ..addresses import Url
from ..errors import ConnectFailed
from .endpoints import check_scheme, is_local, reason
from .memory import MemoryNetwork


class Dialled(Struct, kw_only=True):
    """A connected stream, and what may be said on it."""

    stream: trio.abc.Stream
    #: What is sent is encrypted, and the peer's name was verified.
    secure: bool = False
    #: It does not leave this machine: the address that was reached says so, not a name.
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
    check_scheme(url)
    if url.scheme == "memory":
        if network is None:
            raise ConnectFailed(f"cannot connect to {url}: there is no network in memory here")
        return Dialled(stream=await network.dial(url.host), local=True)
    try:
        if url.scheme == "amqp+unix":
            return Dialled(stream=await trio.open_unix_socket(url.path), local=True)
        stream = await _open_tcp(url.host, url.port)
        sock = stream.socket
        return Dialled(stream=stream, local=is_local(sock.family, sock.getpeername()))
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {url}: {reason(error)}") from error


async def _open_tcp(host: str, port: int) -> trio.SocketStream:
    """Connect to the first of *host*'s addresses that answers.

    An address as it stands has no others to race against, which spares a nursery and four passes
    of the scheduler.
    """
    try:
        version = ip_address(host).version
    except ValueError:
        return await trio.open_tcp_stream(host, port)
    sock = trio.socket.socket(AF_INET if version == 4 else AF_INET6)
    try:
        await sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)
