"""Identities of clients of a broker with edge processes: the table of the security matrix."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import security_matrix as matrix
import trio
from certificates import certificates
from edge_tasks import an_edge

from amqp_rt import Broker, ClientTls, External, ServerTls, connect
from amqp_rt.errors import AmqpError
from amqp_rt.events import Certificate
from amqp_rt.net.edges import Edges, Unwrapped
from amqp_rt.net.tls import client_layer, encrypt

pytestmark = [
    pytest.mark.req("L5"),
    pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="edges need Linux"),
]

KNOWN = certificates()
Attempt: TypeAlias = Callable[[Broker, str], Awaitable[str]]


def said_of_ada() -> bytes:
    facts = Unwrapped(secure=True, certificate=Certificate(subject={"commonName": "ada"}))
    data = msgspec.msgpack.encode(facts)
    return len(data).to_bytes(4, "big") + data


def says(octets: bytes, *, tls: bool = False) -> Attempt:
    """Return an attempt to begin with *octets*, within TLS or in clear."""

    async def say(broker: Broker, url: str) -> str:
        stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port_of(url))
        async with stream:
            if tls:
                layer = client_layer(ClientTls(KNOWN.ca), "localhost")
                stream = await encrypt(stream, layer, within=5)
            await stream.send_all(octets)
            try:
                while await stream.receive_some(1_000):
                    pass
            except trio.BrokenResourceError:
                pass
        return "; ".join(f"in as {each.peer.user}" for each in broker.container.connections) or matrix.REFUSED  # fmt: skip

    return say


def logs_in(certificate: Path | None) -> Attempt:
    """Return an attempt to log in with EXTERNAL."""

    async def log_in(broker: Broker, url: str) -> str:
        where = url.replace("127.0.0.1", "localhost")
        tls = ClientTls(KNOWN.ca, certificate=certificate)
        try:
            async with connect(where, tls=tls, auth=External(), reconnect=None):
                (seen,) = broker.container.connections
                return f"in as {seen.peer.user}"
        except AmqpError as error:
            return matrix.NOT_OFFERED if "offers only these" in str(error) else str(error)

    return log_in


async def looks_for_sockets(broker: Broker, url: str) -> str:
    return named_sockets()


def named_sockets() -> str:
    """Look for a Unix socket of this process, in which broker and edge run, that has a name."""
    # Inode, and path if there is one.
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found = {f"socket:[{line[6]}]": line[7:] for line in lines}
    ours = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    known = [found[each] for each in ours if each in found]
    # The control sockets at least.
    assert len(known) >= 2
    return "none has a name" if not any(known) else str(known)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


ATTEMPTS: dict[str, Attempt] = {
    "connect to a socket between broker and edge": looks_for_sockets,
    "say in clear what an edge would say of ada's certificate": says(said_of_ada()),
    "say it within TLS": says(said_of_ada(), tls=True),
    "name another address by the PROXY protocol": says(
        b"PROXY TCP4 127.0.0.9 127.0.0.1 50000 5671\r\n"
    ),
    "log in with EXTERNAL and no certificate": logs_in(None),
    "log in with EXTERNAL and ada's certificate": logs_in(KNOWN.client),
}


@pytest.mark.parametrize("attempt", matrix.AT_EDGES)
async def test_who_is_believed(attempt: str) -> None:
    assert set(ATTEMPTS) == set(matrix.AT_EDGES)
    options: dict[str, Any] = {"client_ca": KNOWN.ca, "client_certificate": "optional"}
    tls = ServerTls(KNOWN.server, **options)
    broker = Broker(sasl=["EXTERNAL", "PLAIN"], users={"bob": "pw"}, tls=tls)
    edges = broker.container.entry.edges = Edges()
    async with broker, an_edge(edges, tls=tls):
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        with trio.fail_after(10):
            assert await ATTEMPTS[attempt](broker, url) == matrix.AT_EDGES[attempt]
