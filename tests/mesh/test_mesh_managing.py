"""Members of a mesh at their ``$management``, with a broker and without one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio
from meshed import client, line, members, until
from trio.testing import MockClock

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError, CallFailed
from amqp_rt.limits import Limits
from amqp_rt.mesh import Mesh, MeshRule
from amqp_rt.mesh.managing import MeshAddressEntity, MeshEntity, MeshLegEntity, MeshNodeEntity
from amqp_rt.mesh.records import TAKES, Offer
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.security.access import Access, Rights
from amqp_rt.security.access import Rule as AccessRule
from amqp_rt.security.mechanisms import Plain

TYPES: dict[Any, str] = {
    MeshEntity: "amqp_rt.mesh",
    MeshNodeEntity: "amqp_rt.mesh-node",
    MeshAddressEntity: "amqp_rt.mesh-address",
    MeshLegEntity: "amqp_rt.mesh-leg",
}


async def rows(peer: Any, kind: Any) -> dict[str, Any]:
    async with peer.management() as there:
        return {row["name"]: row async for row in there.query(TYPES[kind])}


async def test_a_member_tells_about_nodes_addresses_and_legs(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast")]
    async with line("A", "B", "C", network=network, rules=rules, zone="z1") as made:

        async def take(text: str) -> None: ...

        for name in ("B", "C"):
            for address in ("work", "news"):
                made.boxes[name].node(address)(take)
        made.boxes["C"].node("shop/{item}")(take)
        await until(lambda: len(made.meshes["A"].instances("work")) == 2)
        await made.meshes["A"].reachable("shop/1")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("work") as work,
            peer.sender("news") as news,
        ):
            await work.send("x")
            await news.send("x")
            (mesh,) = (await rows(peer, MeshEntity)).values()
            assert mesh["ready"] is True
            assert (mesh["node"], mesh["nodes"], mesh["neighbours"]) == ("A", 3, 1)
            nodes = await rows(peer, MeshNodeEntity)
            assert {name: (row["cost"], row["path"], row["state"]) for name, row in nodes.items()} == {
                "A": (0, [], "here"),
                "B": (1, ["B"], "up"),
                "C": (2, ["B", "C"], "reached"),
            }  # fmt: skip
            assert {row["zone"] for row in nodes.values()} == {"z1"}
            assert nodes["C"]["addresses"] == 3
            addresses = await rows(peer, MeshAddressEntity)
            assert {name: (row["distribution"], row["nodes"]) for name, row in addresses.items()} == {
                "work": ("balanced", ["B", "C"]),
                "news": ("multicast", ["B", "C"]),
                "shop/{item}": ("balanced", ["C"]),
            }  # fmt: skip
            legs = list((await rows(peer, MeshLegEntity)).values())
            assert sorted((row["address"], row["to"], row["state"]) for row in legs) == [
                ("news", "B", "open"),
                ("work", "B", "open"),
                ("work", "C", "open"),
            ]
            assert {tuple(row["path"]) for row in legs if row["address"] == "news"} == {("B", "C")}
            async with peer.management() as there:
                found = await there.read(TYPES[MeshAddressEntity], "shop/7")
                assert [route["path"] for route in found["routes"]] == [["B", "C"]]
                leg = await there.read(TYPES[MeshLegEntity], legs[0]["name"])
                assert leg["address"] == legs[0]["address"]
                for kind, name in (("mesh-address", "none"), ("mesh-node", "Z"), ("mesh", "other")):
                    with pytest.raises(CallFailed) as failed:
                        await there.read(f"amqp_rt.{kind}", name)
                    word = kind.replace("-", " ")
                    assert f"there is no {word} {name!r}" in failed.value.description
                with pytest.raises(CallFailed, match="has no operation DELETE"):
                    await there.delete("amqp_rt.mesh-node", "B")
                assert set((await there.types()).keys()) == {*TYPES.values(), "org.amqp.management"}


async def test_pinned_links_are_legs(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("one", route="link")]
    async with members(network) as made:
        await made.start("A", rules=rules)
        await made.start("B", "A", rules=rules, broker={"volatile": True})
        await made.brokers["B"].declare(Queue("one"), Queue("two"))
        for address in ("one", "two", "$coordinator"):
            await made.meshes["A"].reachable(address)
        async with client(made.urls["A"], "shop", network=network) as peer:
            async with (
                peer.sender("one", name="out") as out,
                peer.receiver("two", name="in", credit=7),
                peer.transaction() as txn,
            ):
                await out.send("x", transaction=txn)
                legs = await rows(peer, MeshLegEntity)
                assert sorted(
                    (row["address"], row["state"], row["to"], row["path"]) for row in legs.values()
                ) == [
                    ("$coordinator", "pinned", "B", ["B"]),
                    ("one", "pinned", "B", ["B"]),
                    ("two", "pinned, from there", "B", ["B"]),
                ]
                assert legs["shop/in"]["credit"] == 7
                assert legs["shop/out"]["credit"] > 0
                async with peer.management() as there:
                    leg = await there.read(TYPES[MeshLegEntity], "shop/out")
                    assert leg["address"] == "one"
            assert not [
                row
                for row in (await rows(peer, MeshLegEntity)).values()
                if row["address"] != "$coordinator"
            ]


async def test_a_member_is_drained_by_an_operation(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", network=network) as made:

        async def take(text: str) -> None: ...

        made.boxes["B"].node("work")(take)
        await made.meshes["A"].reachable("work")
        async with client(made.urls["A"], network=network) as peer, peer.sender("work") as out:
            await out.send("x")
            async with client(made.urls["B"], "ops", network=network) as operator:
                (before,) = (await rows(operator, MeshEntity)).values()
                assert before["ends"] == 1
                assert before["busy"] is True
                async with operator.management() as there:
                    await there.request("DRAIN", type="amqp_rt.mesh", name="mesh")
                await until(lambda: not made.meshes["A"].instances("work"))
                await trio.sleep(1)
                (after,) = (await rows(operator, MeshEntity)).values()
                assert (after["draining"], after["ready"], after["busy"]) == (True, False, False)
                nodes = await rows(peer, MeshNodeEntity)
                assert nodes["B"]["draining"] is True


async def test_operations_take_the_right_to_manage(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    access = Access(
        [
            AccessRule("*", Rights.MANAGE, users=("root",)),
            AccessRule("work", Rights.SEND | Rights.LISTEN, users=("ann",)),
            AccessRule("work", Rights.MANAGE, users=("bob",)),
        ]
    )
    users = {name: name for name in ("root", "ann", "bob")}
    async with members(network) as made:
        box = {"users": users, "access": access, "plain_in_clear": True}
        await made.start("A", box_options=box)

        def login(name: str) -> Any:
            auth = Plain(name, name)
            return client(made.urls["A"], network=network, auth=auth, plain_in_clear=True)

        async with login("root") as peer:
            assert len(await rows(peer, MeshNodeEntity)) == 1
        for name in ("ann", "bob"):
            async with login(name) as peer, peer.management() as there:
                for operation in ("READ", "DRAIN"):
                    # One may not even attach, the other gets this answer to its request.
                    with pytest.raises(Exception, match="takes the right to manage"):
                        await there.request(operation, type="amqp_rt.mesh", name="mesh")
        assert not made.meshes["A"]._engine.draining


async def test_a_broker_answers_for_its_membership_too(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with Broker("A", network=network) as broker:
        (url,) = await broker.listen("memory://A")
        async with client(url, network=network) as peer, peer.management() as there:
            assert "amqp_rt.mesh" not in await there.types()
            async with Mesh(broker.container, name="shop"):
                assert {"amqp_rt.mesh", "amqp_rt.queue"} <= (await there.types()).keys()
                assert (await there.read("amqp_rt.mesh", "shop"))["node"] == "A"
            assert "amqp_rt.mesh" not in await there.types()


async def test_calls_of_clients_of_a_broker_get_replies_of_other_members(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with members(network) as made, Broker("A", network=network) as broker:
        (url,) = await broker.listen("memory://A")
        async with Mesh(broker.container, role="interior") as mesh:
            made.urls["A"] = url
            await made.start("B", "A")

            async def greet(name: str) -> str:
                return f"hello {name}"

            made.boxes["B"].rpc("greet")(greet)
            await mesh.reachable("greet")
            async with client(url, network=network) as peer:
                assert await peer.call("greet", "Ada", reply=str, within=5) == "hello Ada"
                async with peer.receiver(dynamic=True) as replies:
                    assert replies.address.startswith("$mesh/A/")


async def test_a_virtual_host_of_a_broker_drains_no_member(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with Broker("A", network=network, virtual_hosts=["", "other"]) as broker:
        (url,) = await broker.listen("memory://A")
        async with Mesh(broker.container) as mesh:
            async with (
                client(url, network=network, virtual_host="other") as peer,
                peer.management() as there,
            ):
                with pytest.raises(CallFailed, match="default virtual host"):
                    await there.request("DRAIN", type="amqp_rt.mesh", name="mesh")
            assert not mesh._engine.draining


async def test_an_applications_own_management_node_stays(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()

    async def manage(text: str) -> str:
        return f"own: {text}"

    async with Container("A", network=network) as box:
        box.rpc("$management")(manage)
        (url,) = await box.listen("memory://A")
        async with Mesh(box), client(url, network=network) as peer:
            assert await peer.call("$management", "x", reply=str) == "own: x"


async def test_the_node_ends_with_the_membership(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with Container("A", network=network) as box:
        for _ in range(2):
            async with Mesh(box):
                assert [route.address for route in box.routes] == ["$management"]
            assert not box.routes


async def test_many_addresses_come_in_pages(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    offer = {f"item/{number}": Offer(TAKES) for number in range(2_500)}
    async with members(network) as made:
        box = {"limits": Limits(management_rows_max=1_000)}
        await made.start("A", offer=offer, box_options=box)
        async with client(made.urls["A"], network=network) as peer:
            await until(lambda: made.meshes["A"].instances("item/2499"))
            async with peer.management() as there:
                page = await there.request("QUERY", entityType="amqp_rt.mesh-address")
            assert 0 < len(page.body["results"]) <= 1_000
            assert len(await rows(peer, MeshAddressEntity)) == 2_500


async def test_a_pattern_of_another_node_attracts_no_requests_to_manage(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", network=network) as made:
        seen: list[str] = []

        async def take(text: str, name: str) -> None:
            seen.append(name)

        made.boxes["B"].node("{name}")(take)
        made.boxes["B"].node("{name}/{more}")(take)
        await made.meshes["A"].reachable("anything")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.sender("anything") as out:
                await out.send("x")
            assert seen == ["anything"]
            assert (await rows(peer, MeshEntity))["mesh"]["node"] == "A"
            for address in ("$management", "$cbs", "work/$management"):
                seen.clear()
                # Refused, or taken by A itself: a request without a reply-to changes nothing.
                with suppress(AmqpError):
                    async with peer.sender(address) as to:
                        await to.send("x")
                assert not seen
