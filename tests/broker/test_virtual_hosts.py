"""Virtual hosts: which there are, who gets which, and that nothing crosses from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from amqp_rt import Broker, Container, Message
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.container.connections import Connection
from amqp_rt.errors import CallFailed, ConnectFailed, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.net.memory import MemoryNetwork

#: The list, the host of a declared node, and what a hostname means then.
NAMES: list[tuple[list[str] | None, str, str | None]] = [
    (None, "", ""),
    (None, "127.0.0.1", ""),
    (None, "shop.example", ""),
    (None, "berlin", "berlin"),
    (None, "Berlin", ""),
    (None, "vhost:berlin", "berlin"),
    (None, "vhost:paris", None),
    (None, "vhost:", None),
    (None, "vhost:/", ""),
    (["", "paris"], "paris", "paris"),
    (["", "paris"], "rome", ""),
    (["", "paris"], "vhost:rome", None),
    (["paris"], "paris", "paris"),
    (["paris"], "berlin", "berlin"),
    (["paris"], "rome", None),
    (["paris"], "", None),
    (["paris"], "vhost:", None),
    (["paris"], "vhost:/", None),
    (["", "/"], "vhost:/", "/"),
    ([], "127.0.0.1", None),
]


@pytest.mark.req("B25")
@pytest.mark.parametrize(("listed", "hostname", "expected"), NAMES)
def test_what_a_hostname_means(
    listed: list[str] | None, hostname: str, expected: str | None
) -> None:
    host = BrokerHost(virtual_hosts=listed)
    host.spaces.open("berlin").declare(Queue("q"))
    assert host.virtual_host(hostname) == expected


async def said(peer: Connection, **asked: Any) -> Any:
    reply = await peer.call(
        "$management", Message({}, application_properties=asked), reply=Message, within=5
    )
    assert reply.application_properties["statusCode"] in (200, 201), reply.application_properties
    return reply.body


def columns(found: Any, *names: str) -> list[list[Any]]:
    """Return the attributes *names* of the entities that a query found."""
    places = [found["attributeNames"].index(name) for name in names]
    return [[row[place] for place in places] for row in found["results"]]


@pytest.mark.req("B25")
async def test_nothing_crosses(autojump_clock: trio.testing.MockClock) -> None:
    async with Broker(auto_create=["queue:auto-*"]) as broker:
        for virtual_host in ("", "b"):
            await broker.declare(
                Queue("q", dead_letter="dead"), Topic("t"), Log("l"), virtual_host=virtual_host
            )
        async with broker.local() as here, broker.local("b") as there:
            assert there.peer.virtual_host == "b"
            # A queue, by a link of its own, by the relay, and in a transaction.
            async with here.sender("q") as out:
                await out.send("here")
            async with there.sender() as anywhere:
                await anywhere.send("by relay", to="q")
            async with there.transaction() as txn, there.sender("q") as out:
                await out.send("in a transaction", transaction=txn)
            async with there.receiver("q") as jobs:
                first, second = await jobs.receive(), await jobs.receive()
                assert [first.body, second.body] == ["by relay", "in a transaction"]
                first.reject()
                second.accept()
                await second.settled()
            # Dead letters, logs, topics, and what is made on first use.
            async with there.sender("l") as records, there.sender("auto-1"):
                await records.send("a record")
            async with here.receiver("t") as news, there.sender("t") as out:
                await out.send("not for you")
                with trio.move_on_after(5):
                    await news.receive()
                    raise AssertionError("it crossed")
            # A dynamic node's name means nothing elsewhere, not even to its owner's neighbour.
            async with there.receiver(dynamic=True) as replies:
                assert replies.address is not None
                with pytest.raises(LinkRefused):
                    async with here.sender(replies.address):
                        pass
            counts = {
                name: [
                    broker.stats(each.name, virtual_host=name).available
                    for each in broker.nodes(virtual_host=name)
                ]
                for name in broker.host.virtual_hosts()
            }
            assert counts == {"": [1, 0, 0, 0], "b": [0, 1, 0, 1, 0]}
            # Management sees the nodes of its own host; the default one sees which hosts there are.
            everybody = await said(here, operation="QUERY", entityType="amqp_rt.virtual-host")
            alone = await said(there, operation="QUERY", entityType="amqp_rt.virtual-host")
            # The client that asks has a dynamic node for the replies.
            assert columns(everybody, "name", "nodes") == [["", 5], ["b", 5]]
            assert columns(alone, "name", "nodes") == [["b", 6]]
            found = await said(there, operation="QUERY", entityType="amqp_rt.node")
            names = {name for (name,) in columns(found, "name")}
            assert names >= {"q", "t", "l", "dead", "auto-1"}
            assert len(names) == 6
            await said(there, operation="CREATE", name="new")
            assert Queue("new") in broker.nodes(virtual_host="b")
            assert Queue("new") not in broker.nodes()


@pytest.mark.req("B25")
async def test_who_names_none_is_refused_where_there_is_a_list() -> None:
    network = MemoryNetwork()
    seen: list[str] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        seen.append(peer.virtual_host)
        return True

    broker = Broker(virtual_hosts=["b"], network=network, authorize=authorize)
    async with broker, Container("client", network=network) as client:
        await broker.declare(Queue("q"), virtual_host="b")
        await broker.listen("memory://broker")
        for virtual_host in ("c", "vhost:c", None):
            with pytest.raises(ConnectFailed) as refused:
                async with client.connect(
                    "memory://broker", virtual_host=virtual_host, reconnect=None
                ) as peer:
                    await peer.wait_open()
            assert refused.value.condition == "amqp:not-found", virtual_host
        for virtual_host in ("b", "vhost:b"):
            async with (
                client.connect("memory://broker", virtual_host=virtual_host) as peer,
                peer.sender("q") as out,
            ):
                await out.send(1)
        # Rights are decided by the virtual host's own name, whatever the peer called it.
        assert set(seen) == {"b"}
        assert broker.stats("q", virtual_host="b").available == 2
        # A client in the same process needs no name.
        async with broker.local() as peer:
            assert (await said(peer, operation="GET-TYPES"))["amqp_rt.virtual-host"] == []


@pytest.mark.req("B25")
async def test_a_query_for_something_else() -> None:
    async with Broker() as broker, broker.local() as peer:
        asked = Message({}, application_properties={"operation": "QUERY", "entityType": "x"})
        with pytest.raises(CallFailed, match="there is no type 'x'"):
            await peer.call("$management", asked, reply=Message, within=5)


@pytest.mark.req("B25")
async def test_a_store_keeps_them_apart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        for virtual_host in ("", "b"):
            await broker.declare(Queue("q"), virtual_host=virtual_host)
            async with broker.local(virtual_host) as peer, peer.sender("q") as out:
                await out.send(f"in {virtual_host!r}", durable=True)
    async with Broker(store=store) as broker:
        assert broker.host.virtual_hosts() == ["", "b"]
        for virtual_host in ("", "b"):
            async with broker.local(virtual_host) as peer, peer.receiver("q") as jobs:
                delivery = await jobs.receive()
                assert delivery.body == f"in {virtual_host!r}"
                delivery.accept()


async def test_walks_over_all_names_share_them_until_they_change() -> None:
    async with Broker() as broker:
        await broker.declare(Queue("a"), Queue("b"))
        space = broker.host.space()
        names = space.names
        assert names == ("a", "b")
        assert space.names is names
        await broker.delete("a")
        await broker.declare(Queue("c"))
        assert space.names == ("b", "c")
