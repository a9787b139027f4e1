"""Redirects of clients to the nodes that serve an address."""

from __future__ import annotations

from collections.abc import Iterable

from ..addresses import parse_url
from ..errors import ConnectFailed
from ..events import Peer
from ..outcomes import Error
from ..values import Symbol


def redirect_to(urls: Iterable[str], peer: Peer, address: str) -> Error | None:
    """Return the error that redirects *peer* to one of *urls* (Part 2 §2.8.18); None if it can use none of them.

    A client keeps its protocol, and whether it is encrypted. Links of the container itself have no other place to go.

    Args:
        urls: Where the node listens.
        peer: The client.
        address: The address of its link.
    """
    if peer.trusted or peer.protocol != "amqp1.0":
        return None
    scheme = "amqps" if peer.secure else "amqp"
    for each in urls:
        try:
            url = parse_url(each, listening=True)
        except ConnectFailed:
            continue
        if url.scheme == scheme and url.port:
            info: dict[object, object] = {
                Symbol("hostname"): url.host,
                Symbol("network-host"): url.host,
                Symbol("port"): url.port,
                Symbol("address"): address,
            }
            return Error("amqp:link:redirect", f"{address!r} is served at {each}", info)
    return None
