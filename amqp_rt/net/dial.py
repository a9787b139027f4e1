"""Connecting to a URL."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, TypeAlias

import trio
from msgspec import Struct

from ..addresses import PORTS, Url
from ..errors import ConnectFailed
from ..limits import DEFAULT_LIMITS, Limits
from .carrier import nothing
from .endpoints import check_scheme, is_local, reason
from .memory import MemoryNetwork
from .preamble import HEADER_SIZE, TLS_HEADER
from .proxies import Proxy, open_through, proxy_for
from .tls import ENDED, MAYBE, NO_TLS, ClientTls, client_layer, encrypt
from .transports import transport_for

#: Opens a stream to a URL over a transport of the application. An OSError is a failed attempt.
Transport: TypeAlias = Callable[[str], Awaitable[trio.abc.Stream]]
#: Schemes with TLS, and their equivalents without it.
_WITHOUT_TLS: Final = {"amqps": "amqp", "sb": "amqp", "wss": "ws"}


class Dialled(Struct, kw_only=True):
    """Connected stream and its properties."""

    stream: trio.abc.Stream
    #: The stream is encrypted, and the peer's name was verified.
    secure: bool = False
    #: The peer is on this machine, according to the address that was reached, not to a name.
    local: bool = False
    #: Call it once the peer has accepted our login: from then on larger messages are accepted.
    trust: Callable[[], None] = nothing


async def dial(
    url: Url,
    *,
    network: MemoryNetwork | None = None,
    tls: ClientTls | ssl.SSLContext | None = None,
    upgrade: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    transport: Transport | None = None,
    proxy: str | None = None,
) -> Dialled:
    """Connect to *url*; of a host with several addresses, to the one that answers first.

    The caller limits the time. If cancelled, nothing stays open.

    Args:
        url: ``amqp``, ``amqps``, ``ws``, ``wss``, ``amqp+unix``, ``memory``, or the scheme of a plug-in.
        network: Where ``memory`` names are looked up.
        tls: Trusted authorities, for encrypted URLs and for *upgrade*; by default those of the
            system.
        upgrade: Request TLS within the AMQP port, and fail without it (Part 5 §5.2.1).
        limits: ``tls_handshake_s`` and the limits of WebSockets are used here.
        transport: Opens the stream instead of a socket.
        proxy: URL of a proxy to connect through, or ``env``; see :func:`.proxies.proxy_for`.

    Raises:
        ConnectFailed: The message names the URL and the reason.
    """
    check_scheme(url)
    if upgrade and url.scheme not in ("amqp", "amqp+unix"):
        raise ConnectFailed(
            f"cannot connect to {url}: the upgrade to TLS is for amqp://",
            condition="amqp:invalid-field",
        )
    if url.scheme == "memory" and transport is None:
        if network is None:
            raise ConnectFailed(f"cannot connect to {url}: there is no network in memory here")
        return Dialled(stream=await network.dial(url.host), local=True)
    dialled = await open_stream(url, proxy=proxy, transport=transport)
    stream = dialled.stream
    secure = upgrade or url.tls
    try:
        if upgrade:
            await _ask_for_tls(stream)
        if secure:
            layer = client_layer(tls, url.host)
            stream = await encrypt(stream, layer, within=limits.tls_handshake_s)
            dialled.secure = True
        if url.scheme in ("ws", "wss"):
            # Here: programs that use no WebSockets start faster without it.
            from .websocket import request_websocket

            host = f"[{url.host}]" if ":" in url.host else url.host
            websocket = await request_websocket(
                stream,
                host=host if url.port == PORTS[url.scheme] else f"{host}:{url.port}",
                path=url.path or "/",
                limits=limits,
            )
            stream, dialled.trust = websocket, websocket.trust
    except ConnectFailed as error:
        why = error.description
        if url.scheme in _WITHOUT_TLS and why == NO_TLS:
            why += f"; without TLS the scheme is {_WITHOUT_TLS[url.scheme]}://"
        elif why == ENDED:
            why += MAYBE
        raise ConnectFailed(f"cannot connect to {url}: {why}", condition=error.condition) from error
    dialled.stream = stream
    return dialled


async def open_stream(
    url: Url, *, proxy: str | None = None, transport: Transport | None = None
) -> Dialled:
    """Open the stream to *url* below TLS and WebSockets.

    The caller limits the time. If cancelled, nothing stays open. The arguments are those of :func:`dial`.

    Raises:
        ConnectFailed: The message names the URL and the reason.
    """
    try:
        through = None if proxy is None else proxy_for(url, proxy, os.environ)
        if transport is not None:
            return Dialled(stream=await transport(str(url)))
        if url.scheme == "amqp+unix":
            return Dialled(stream=await trio.open_unix_socket(url.path), local=True)
        plugin = transport_for(url)
        if plugin is not None:
            return Dialled(stream=await plugin.dial(url), secure=plugin.secure)
        if through is not None:
            # A proxy on this machine does not make its target one.
            return Dialled(stream=await _open_through(through, url))
        stream = await _open_tcp(url.host, url.port)
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {url}: {reason(error)}") from error
    local = is_local(stream.socket.family, stream.socket.getpeername())
    return Dialled(stream=stream, local=local)


async def _open_through(proxy: Proxy, url: Url) -> trio.SocketStream:
    """Connect to the host of *url* through *proxy*.

    Raises:
        ConnectFailed: The message names both and the reason.
    """
    try:
        return await open_through(proxy, url.host, url.port)
    except ConnectFailed as error:
        raise ConnectFailed(
            f"cannot connect to {url} through {proxy}: {error.description}",
            condition=error.condition,
        ) from error


async def _ask_for_tls(stream: trio.abc.Stream) -> None:
    """Request TLS within the AMQP port. Any answer but consent ends the connection.

    Raises:
        ConnectFailed: The peer does not offer TLS.
    """
    answer = b""
    try:
        await stream.send_all(TLS_HEADER)
        while len(answer) < HEADER_SIZE:
            piece = await stream.receive_some(HEADER_SIZE - len(answer))
            if not piece:
                break
            answer += piece
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        answer = b""
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    if answer != TLS_HEADER:
        await trio.aclose_forcefully(stream)
        raise ConnectFailed("the peer does not offer TLS within its AMQP port")


async def _open_tcp(host: str, port: int) -> trio.SocketStream:
    """Connect to the first of *host*'s addresses that answers.

    A literal address needs no race between addresses, which saves a nursery and four passes of the
    scheduler.
    """
    family = _family_of(host)
    if family is None:
        return await trio.open_tcp_stream(host, port)
    sock = socket.socket(family)
    try:
        sock.setblocking(False)
        try:
            sock.connect((host, port))
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
            if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number)) from None
        else:
            await trio.lowlevel.checkpoint()
        return trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise


@lru_cache(maxsize=1_024)
def _family_of(host: str) -> socket.AddressFamily | None:
    """Return the family of *host*, a literal address; None for a name."""
    try:
        return socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
    except ValueError:
        return None
