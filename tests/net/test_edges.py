"""Edge processes as tasks: what they unwrap and relay, and what the broker learns of it."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from certificates import certificates
from edge_tasks import an_edge

from amqp_rt import Broker, ClientTls, ServerTls, connect
from amqp_rt.errors import AuthenticationFailed, ConnectionLost
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.net.edge_relay import EdgeWork
from amqp_rt.net.edges import EdgeProcess, Edges, EdgeSettings, control_pair
from amqp_rt.net.reactor import open_reactor
from amqp_rt.security.mechanisms import External, Plain

pytestmark = [
    pytest.mark.req("L5"),
    pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="edges need Linux"),
]

KNOWN = certificates()
TLS = ClientTls(KNOWN.ca)


@asynccontextmanager
async def broker_behind(
    *urls: str, client_ca: str = "", **limits: Any
) -> AsyncIterator[tuple[Broker, list[str], EdgeProcess]]:
    """A broker whose TLS and WebSockets an edge carries."""
    set_limits = msgspec.structs.replace(DEFAULT_LIMITS, **limits)
    broker = Broker(
        users={"ada": "pw"},
        sasl=["PLAIN", "EXTERNAL"] if client_ca else ["PLAIN"],
        tls=ServerTls(KNOWN.server, client_ca=client_ca or None),
        limits=set_limits,
        auto_create=["queue:*"],
        plain_in_clear=True,
    )
    edges = broker.container.entry.edges = Edges()
    async with broker, an_edge(edges, set_limits, client_ca=client_ca) as edge:
        yield broker, await broker.listen(*urls), edge


async def until(edge: EdgeProcess, connections: int) -> None:
    """Wait until *edge* has so many connections."""
    with trio.fail_after(5):
        while edge.connections != connections:  # noqa: ASYNC110  # only tests wait for it
            await trio.sleep(0.01)


@pytest.mark.parametrize("scheme", ["amqps", "wss", "ws", "upgraded"])
async def test_messages_pass_an_edge(scheme: str) -> None:
    listens = "amqp" if scheme == "upgraded" else scheme
    # A stranger's messages of a WebSocket may be as large as those of a login, and no larger.
    limits = {"websocket_stranger_max": 4_096}
    async with broker_behind(f"{listens}://127.0.0.1:0/", **limits) as (broker, (url,), edge):
        url = url.replace("127.0.0.1", "localhost").replace("amqp:", "amqps:")
        tls = None if scheme == "ws" else TLS
        async with connect(url, tls=tls, auth=Plain("ada", "pw"), reconnect=None) as peer:
            body = bytes(range(256)) * 800
            async with peer.sender("q") as out:
                await out.send(body)
            async with peer.receiver("q") as into:
                with await into.receive() as delivery:
                    assert delivery.body == body
            (seen,) = broker.container.connections
            assert edge.connections == 1
            assert seen.peer.user == "ada"
            assert seen.peer.secure == (scheme != "ws")
            assert seen.peer.server_name == ("" if scheme == "ws" else "localhost")
            assert seen.peer.address.startswith("127.0.0.1:")
        await until(edge, 0)
        assert not broker.container.connections


async def test_clients_without_tls_and_websocket_pass_no_edge() -> None:
    async with (
        broker_behind("amqp://127.0.0.1:0") as (_, (url,), edge),
        connect(url, auth=Plain("ada", "pw"), reconnect=None),
    ):
        assert edge.connections == 0


async def test_a_wrong_password_is_refused() -> None:
    async with broker_behind("amqps://127.0.0.1:0", failed_login_delay_s=0.0) as (_, (url,), edge):
        with pytest.raises(AuthenticationFailed):
            async with connect(url, tls=TLS, auth=Plain("ada", "guess"), reconnect=None):
                pass
        await until(edge, 0)


async def test_a_certificate_logs_in() -> None:
    async with broker_behind("amqps://127.0.0.1:0", client_ca=str(KNOWN.ca)) as (broker, (url,), _):
        tls = ClientTls(KNOWN.ca, certificate=KNOWN.client)
        async with connect(url, tls=tls, auth=External(), reconnect=None):
            (seen,) = broker.container.connections
            assert seen.peer.user == "ada"
            assert seen.peer.certificate is not None
            assert seen.peer.certificate.dns_names == ("client.example.org",)


async def test_what_speaks_no_tls_is_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    async with broker_behind("amqps://127.0.0.1:0") as (_, (url,), edge):
        port = int(url.rpartition(":")[2])
        with caplog.at_level(logging.INFO, "amqp_rt.net"):
            client = await trio.open_tcp_stream("127.0.0.1", port)
            async with client:
                await client.send_all(b"AMQP\0\1\0\0")
                with trio.fail_after(5):
                    while await client.receive_some(100):
                        pass
            await until(edge, 0)
    said = [each.message for each in caplog.records if "refused" in each.message]
    assert len(said) == 1, said
    assert said[0].startswith("connection from 127.0.0.1:")


@pytest.mark.parametrize("limits", [{"tls_handshake_s": 0.1}, {"handshake_s": 0.1}])
async def test_a_silent_client_is_dropped(limits: dict[str, float]) -> None:
    async with broker_behind("wss://127.0.0.1:0/", **limits) as (_, (url,), edge):
        port = int(url.rpartition(":")[2].rstrip("/"))
        async with await trio.open_tcp_stream("127.0.0.1", port) as client:
            with trio.fail_after(5):
                assert await client.receive_some(1) == b""
            await until(edge, 0)


async def test_the_oldest_stranger_makes_room_in_the_middle_of_its_handshake() -> None:
    async with broker_behind("amqps://127.0.0.1:0", connections_unauthenticated_max=1) as found:
        _, (url,), edge = found
        port = int(url.rpartition(":")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as first:
            await until(edge, 1)
            with trio.fail_after(5):
                async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None):
                    assert await first.receive_some(1) == b""
                    assert edge.connections == 1


async def test_an_edge_that_ends_loses_its_connections_and_others_serve() -> None:
    async with broker_behind("amqps://127.0.0.1:0") as (broker, (url,), edge):
        edges = broker.container.entry.edges
        assert edges is not None
        async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None) as peer:
            edges.living.remove(edge)
            # The hub serves by itself what comes while there is no edge.
            async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None):
                assert edge.connections == 1
            life = trio.CancelScope()
            async with (
                an_edge(edges, broker.container.limits, life) as second,
                connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None) as other,
                other.receiver("q") as into,
            ):
                assert (edge.connections, second.connections) == (1, 1)
                life.cancel()
                with trio.fail_after(10), pytest.raises(ConnectionLost):
                    await into.receive()
            assert peer.state == "open"


async def test_a_hub_that_cannot_reach_an_edge_refuses_one_client_only() -> None:
    async with broker_behind("amqps://127.0.0.1:0") as (broker, (url,), edge):
        edges = broker.container.entry.edges
        assert edges is not None
        ours, theirs = control_pair()
        theirs.close()
        # It has died, which has not been noticed yet.
        edge.connections = 1
        dead = EdgeProcess(ours, 1)
        edges.living.append(dead)
        with pytest.raises(Exception, match=r"closed the connection|broke"):
            async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None):
                pass
        edges.living.remove(dead)
        dead.close()
        async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None):
            assert edge.connections == 2


async def test_short_connections_go_round() -> None:
    async with broker_behind("amqps://127.0.0.1:0") as (broker, (url,), edge):
        edges = broker.container.entry.edges
        assert edges is not None
        async with an_edge(edges, broker.container.limits) as second:
            used = []
            for _ in range(4):
                async with connect(url, tls=TLS, auth=Plain("ada", "pw"), reconnect=None):
                    used.append((edge.connections, second.connections))
                await until(edge, 0)
                await until(second, 0)
            assert used == [(1, 0), (0, 1)] * 2


# --- relaying ------------------------------------------------------------------------------------


@asynccontextmanager
async def relayed(*, reactor: bool) -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """The client's and the hub's end of a relayed connection."""
    control, other = control_pair()
    work = EdgeWork(control, EdgeSettings(limits=DEFAULT_LIMITS))
    client, at_client = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in socket.socketpair())  # fmt: skip
    hub, at_hub = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in socket.socketpair())  # fmt: skip
    with trio.fail_after(20), control, other:
        async with open_reactor() as found, trio.open_nursery() as nursery, client, hub:
            work._reactor = found if reactor else None
            nursery.start_soon(work._relay, at_client, at_hub)
            yield client, hub
            await client.aclose()
            await hub.aclose()


async def received(stream: trio.SocketStream) -> bytes:
    return b"".join([bytes(each) async for each in stream])


@pytest.mark.parametrize("reactor", [True, False])
async def test_a_client_that_has_ended_its_half_gets_the_answer(reactor: bool) -> None:
    async with relayed(reactor=reactor) as (client, hub):
        await client.send_all(b"request")
        await client.send_eof()
        assert await received(hub) == b"request"
        await hub.send_all(b"answer")
        await hub.aclose()
        assert await received(client) == b"answer"


@pytest.mark.parametrize("reactor", [True, False])
async def test_the_last_octets_of_a_client_that_is_gone_arrive(reactor: bool) -> None:
    async with relayed(reactor=reactor) as (client, hub):
        await client.send_all(bytes(300_000))
        await client.aclose()
        assert len(await received(hub)) == 300_000


@pytest.mark.parametrize("reactor", [True, False])
async def test_the_end_of_the_hub_is_that_of_the_client(reactor: bool) -> None:
    async with relayed(reactor=reactor) as (client, hub):
        await hub.send_all(b"bye")
        await hub.aclose()
        assert await received(client) == b"bye"


@pytest.mark.parametrize("reactor", [True, False])
async def test_a_side_that_does_not_read_holds_up_the_other_one_only_in_its_direction(
    reactor: bool,
) -> None:
    flood = os.urandom(1_000_000) * 8
    async with relayed(reactor=reactor) as (client, hub):
        # The hub's octets find no reader, so that the socket to the client is full.
        sent = 0
        with trio.move_on_after(0.2):
            for at in range(0, len(flood), 65_536):
                await hub.send_all(flood[at : at + 65_536])
                sent = at
        assert sent < 4_000_000
        # Those of the client as well, until the hub reads.
        got = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_all, flood)
            await trio.sleep(0.2)
            while len(got) < len(flood):
                got += await hub.receive_some(65_536)
        assert got == flood


async def test_certificates_are_read_again(tmp_path: Any) -> None:
    chosen = tmp_path / "server.pem"
    chosen.write_bytes(KNOWN.server.read_bytes())
    other = KNOWN.issue("localhost", common_name="renewed")
    broker = Broker(tls=ServerTls(KNOWN.server))
    edges = broker.container.entry.edges = Edges()
    async with broker, an_edge(edges, DEFAULT_LIMITS, certificate=str(chosen)):
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        for replaced, expected in ((other, "renewed"), (tmp_path, "renewed")):
            if replaced is tmp_path:
                # A file that cannot be used leaves all as it was.
                chosen.write_text("no certificate")
            else:
                chosen.write_bytes(replaced.read_bytes())
            await edges.reload()
            context = ssl.create_default_context(cafile=str(KNOWN.ca))
            stream = trio.SSLStream(
                await trio.open_tcp_stream("127.0.0.1", port), context, server_hostname="localhost"
            )
            await stream.do_handshake()
            subject = {name: value for part in stream.getpeercert()["subject"] for name, value in part}  # fmt: skip
            assert subject.get("commonName") == expected
            await trio.aclose_forcefully(stream)
