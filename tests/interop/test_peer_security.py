"""TLS and logins with the programs in tests/peers, from both sides."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest
from certificates import certificates
from edge_tasks import an_edge
from peer_programs import PeerPrograms, digest, filler, numbers

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.net.edges import Edges
from amqp_rt.net.tls import ClientTls, ServerTls

KNOWN = certificates()


async def exchange(peer: PeerPrograms, where: Mapping[str, Any]) -> None:
    """Let the peer send and receive many messages at a queue, and one of many frames."""
    sent = await peer.run("send", count=250, **where)
    assert sent["settled"] == 250
    received = await peer.run("receive", count=250, credit=10, **where)
    assert numbers(received["messages"]) == list(range(250))
    await peer.run("send", size=1_000_000, **where)
    received = await peer.run("receive", count=1, **where)
    assert received["messages"][0]["body"] == digest(filler(1_000_000))


@pytest.mark.req("SE7", "L1")
async def test_their_client_over_tls(peer: PeerPrograms) -> None:
    async with Broker(tls=ServerTls(KNOWN.server)) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        where: dict[str, Any] = {
            "port": int(url.rpartition(":")[2]),
            "tls": {"ca": str(KNOWN.ca)},
            "address": "q",
        }
        await exchange(peer, where)


@pytest.mark.req("SE7")
async def test_their_client_does_not_believe_us(peer: PeerPrograms) -> None:
    async with Container("us", tls=ServerTls(KNOWN.stranger)) as container:
        (url,) = await container.listen("amqps://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        result = await peer.run("open", port=port, tls={"ca": str(KNOWN.ca)})
    assert result["error"]["scope"] == "transport"


@pytest.mark.req("SE7", "SE2")
async def test_their_client_is_whom_its_certificate_names(peer: PeerPrograms) -> None:
    tls = ServerTls(KNOWN.server, client_ca=KNOWN.ca)
    users = []

    async def note(peer: Any, address: str, role: str) -> bool:
        users.append((peer.user, peer.mechanism))
        return True

    async with Broker(tls=tls, sasl=["EXTERNAL"], authorize=note) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        shown = {"ca": str(KNOWN.ca), "cert": str(KNOWN.client)}
        await peer.run("send", port=port, address="q", tls=shown)
    assert users == [("ada", "EXTERNAL")]


@pytest.mark.req("SE7", "L1")
async def test_our_client_over_tls(peer: PeerPrograms) -> None:
    async with peer.serve(tls={"cert": str(KNOWN.server)}) as server:
        async with (
            Container("client") as container,
            container.connect(
                server.url,
                tls=ClientTls(KNOWN.ca),
                reconnect=None,
                pipelined=peer.name != "rhea",
            ) as connection,
            connection.sender("sink") as out,
        ):
            await out.send_many(range(20))
            await out.send(filler(500_000))
        assert (await server.stop())["sink"]["received"] == 21


@pytest.mark.req("L2")
@pytest.mark.parametrize("scheme", ["ws", "wss"])
async def test_their_client_over_websocket(rhea_programs: PeerPrograms, scheme: str) -> None:
    peer = rhea_programs
    async with Broker(tls=ServerTls(KNOWN.server)) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen(f"{scheme}://127.0.0.1:0/amqp")
        where: dict[str, Any] = {
            "port": int(url.rpartition(":")[2].partition("/")[0]),
            "websocket": "/amqp",
            "address": "q",
        }
        if scheme == "wss":
            where["tls"] = {"ca": str(KNOWN.ca)}
        await exchange(peer, where)


@pytest.mark.req("L2", "L5")
@pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="edges need Linux")
async def test_their_client_passes_an_edge(rhea_programs: PeerPrograms) -> None:
    peer = rhea_programs
    broker = Broker(tls=ServerTls(KNOWN.server), auto_create=["queue:*"])
    edges = broker.container.entry.edges = Edges()
    async with broker, an_edge(edges):
        for url in await broker.listen("amqps://127.0.0.1:0", "wss://127.0.0.1:0/amqp"):
            where: dict[str, Any] = {
                "port": int(url.rpartition(":")[2].partition("/")[0]),
                "tls": {"ca": str(KNOWN.ca)},
                "address": "q",
            }
            if url.startswith("wss"):
                where["websocket"] = "/amqp"
            await exchange(peer, where)
