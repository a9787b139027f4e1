"""Transports of plug-ins, for URLs with schemes of their own.

A plug-in registers an object in the entry point group ``amqp_rt.transports``, under the scheme. AMQP and the login run over
its streams as over a socket.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from ..addresses import Url, host_in, transport_plugins
from ..errors import ConnectFailed
from .endpoints import reason

__all__ = ["TransportPlugin", "open_plugin", "peer_of", "transport_for"]


class TransportPlugin(Protocol):
    """Transport that opens and accepts streams at URLs of one scheme."""

    #: Whether its streams are encrypted and their peers verified, as with TLS. Passwords are sent in clear only
    #: over such a transport, and only such a one is used where TLS is required.
    secure: bool

    async def dial(self, url: Url) -> trio.abc.Stream:
        """Open a stream to *url*. The caller limits the time; cancelled, it leaves nothing open.

        Raises:
            OSError: There is no connection; its text is the reason.
            ConnectFailed: The URL is malformed.
        """

    async def listen(self, url: Url) -> tuple[trio.abc.Listener[Any], Url]:
        """Listen at *url*; return the listener, and the URL at which it is reached.

        ``accept`` of the listener may raise an OSError if descriptors or memory are missing.

        Raises:
            OSError: It is not possible; its text is the reason.
            ConnectFailed: The URL is malformed.
        """

    def peer(self, stream: Any) -> str:
        """Return the address of the peer of an accepted *stream* as ``HOST:PORT``; "" if it has none.

        Connections and failed logins are counted by host. Those without an address are bounded together.
        """


def transport_for(url: Url) -> TransportPlugin | None:
    """Return the transport of a plug-in for *url*; None if its scheme is one of ours.

    Raises:
        ConnectFailed: The plug-in does not load.
    """
    found = transport_plugins().get(url.scheme)
    if found is None:
        return None
    try:
        transport: TransportPlugin = found.load()()
    except Exception as error:
        raise ConnectFailed(
            f"{url}: the transport {found.value} of a plug-in does not load: {error}",
            condition="amqp:internal-error",
        ) from error
    return transport


async def open_plugin(transport: TransportPlugin, url: Url) -> tuple[trio.abc.Listener[Any], Url]:
    """Listen at *url* with *transport*; return the listener, and the URL at which it is reached.

    Raises:
        ConnectFailed: It is not possible; the message names the URL and the reason.
    """
    try:
        return await transport.listen(url)
    except OSError as error:
        raise ConnectFailed(f"cannot listen on {url}: {reason(error)}") from error


def peer_of(transport: TransportPlugin, scheme: str, stream: Any) -> tuple[str, str]:
    """Return the host and the address of the peer of an accepted *stream*."""
    address = transport.peer(stream)
    return host_in(address), address or f"{scheme}://"
