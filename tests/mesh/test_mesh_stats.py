"""Counts of a member of a mesh, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from meshed import Members, client, line, members, until
from trio.testing import MockClock

from amqp_rt import Container, Limits
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError
from amqp_rt.mesh import Mesh, MeshRule, MeshStats
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("A19")


def stats(made: Members, name: str) -> MeshStats:
    return made.meshes[name].stats()


async def test_members_addresses_and_links_are_counted(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A", zone="z1")
        await made.start("B", "A", zone="z1", cost=3)
        await made.start("C", "B", zone="z2")
        await made.start("E", "A", role="edge")

        async def take(text: str) -> None: ...

        for name, address in (("B", "work"), ("C", "work"), ("C", "shop/{item}"), ("E", "till")):
            made.boxes[name].node(address)(take)
        for address in ("work", "shop/1", "till"):
            await made.meshes["A"].reachable(address)
        await until(lambda: len(made.meshes["A"].instances("work")) == 2)
        async with client(made.urls["A"], network=network) as peer, peer.sender("work") as out:
            await out.send("x")
            known = {each.node: each for each in stats(made, "A").members}
            assert {name: (each.state, each.cost, each.zone) for name, each in known.items()} == {
                "A": ("here", 0, "z1"),
                "B": ("up", 3, "z1"),
                "C": ("reached", 6, "z2"),
                "E": ("up", 1, ""),
            }
            assert [name for name, each in known.items() if each.neighbour] == ["B", "E"]
            assert [name for name, each in known.items() if each.edge] == ["E"]
            assert [each.node for each in stats(made, "C").members] == ["C", "B", "A"]
            found = {name: stats(made, name) for name in "ABC"}
            # One of them is the pattern by which A is asked for what E creates for links.
            assert {(each.addresses, each.offers) for each in found.values()} == {(4, 5)}
            # A leg to B, one over B to C.
            assert [(each.legs, each.hops, each.ends) for each in found.values()] == [
                (2, 0, 0),
                (1, 1, 1),
                (0, 0, 1),
            ]
        made.kill["C"]()
        await until(lambda: len(stats(made, "A").members) == 3)
        # Its offers are kept for a while, in case that it comes back.
        assert stats(made, "A").offers == 5


@pytest.mark.parametrize(
    "rule",
    [
        MeshRule("work", "balanced"),
        MeshRule("work", "multicast"),
        MeshRule("work", route="link"),
    ],
    ids=["one of several", "all", "a link to one"],
)
async def test_messages_without_an_outcome_count_as_stuck_after_ten_seconds(
    rule: MeshRule, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network, rules=[rule]) as made:
        go = trio.Event()

        async def work(text: str) -> None:
            if text == "stuck":
                await go.wait()

        made.boxes["C"].node("work", slots=10)(work)
        await made.meshes["A"].reachable("work")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(out.send, "stuck")
            await trio.sleep(9)
            nursery.start_soon(out.send, "stuck")
            # Others pass meanwhile, and are not counted.
            for _ in range(3):
                await out.send("x")
            assert stats(made, "A").stuck == 0
            await trio.sleep(1.5)
            assert stats(made, "A").stuck == 1
            await trio.sleep(9)
            assert stats(made, "A").stuck == 2
            # They are those of the first node of the route.
            assert stats(made, "B").stuck == stats(made, "C").stuck == 0
            go.set()
            await trio.sleep(1)
            assert stats(made, "A").stuck == 0


@pytest.mark.parametrize("ending", ["outcome", "detach"])
async def test_messages_that_a_client_keeps_are_stuck(
    ending: str, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", broker={"volatile": True})
        await made.brokers["B"].declare(Queue("jobs"))
        await made.meshes["A"].reachable("jobs")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.sender("jobs") as out:
                await out.send("1")
                await out.send("2")
            async with peer.receiver("jobs", credit=2) as source:
                kept = [await source.receive(), await source.receive()]
                await trio.sleep(12)
                assert stats(made, "A").stuck == 2
                if ending == "outcome":
                    for each in kept:
                        each.accept()
                    await trio.sleep(1)
                    assert stats(made, "A").stuck == 0
            await trio.sleep(1)
            assert stats(made, "A").stuck == 0


async def test_links_that_seek_and_messages_that_wait_are_counted(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("pinned", route="link")]
    async with line("A", "B", network=network, rules=rules) as made:
        go = trio.Event()

        async def work(text: str) -> None:
            await go.wait()

        async def send(peer: Any) -> None:
            async with peer.sender("pinned") as out:
                await out.send("x")

        async def relay(peer: Any) -> None:
            async with peer.sender() as out:
                await out.send("x", to="work")

        made.boxes["B"].node("work", slots=1, prefetch=1)(work)
        await made.meshes["A"].reachable("work")
        async with client(made.urls["A"], network=network) as peer, trio.open_nursery() as nursery:
            nursery.start_soon(send, peer)
            await trio.sleep(0.1)
            assert stats(made, "A").seeking == 1
            made.boxes["B"].node("pinned")(work)
            await trio.sleep(0.2)
            assert stats(made, "A").seeking == 0
            for _ in range(3):
                nursery.start_soon(relay, peer)
            await trio.sleep(0.1)
            assert stats(made, "A").waiting > 0
            go.set()
            await trio.sleep(0.2)
            assert stats(made, "A").waiting == 0


async def test_settled_messages_that_are_lost_are_counted(autojump_clock: MockClock) -> None:
    """Those in hand when the last destination goes: of the address while it has senders, and afterwards."""
    network = MemoryNetwork()
    async with (
        line("A", "B", network=network) as made,
        client(made.urls["A"], network=network) as peer,
    ):

        async def work(text: str) -> None:
            await trio.sleep_forever()

        made.boxes["B"].node("work", slots=1, prefetch=1)(work)
        await made.meshes["A"].reachable("work")
        async with peer.sender(settled=True) as out:
            # The credit of this link is not that of the destination.
            for _ in range(5):
                await out.send("x", to="work")
            await trio.sleep(0.1)
            waited = stats(made, "A").waiting
            assert 0 < waited < 5
            made.kill["B"]()
            await trio.sleep(3)
            assert stats(made, "A").dropped == waited
            assert stats(made, "A").waiting == 0
        await trio.sleep(100)
        assert not made.meshes["A"]._host._routed
        assert stats(made, "A").dropped == waited


async def test_skipped_copies_are_counted_where_the_tree_branches(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast", slow="skip")]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B"), ("D", "B")):
            await made.start(name, *seeds, rules=rules)
        go = trio.Event()
        got: list[str] = []

        async def quick(text: str) -> None:
            got.append(text)

        async def slow(text: str) -> None:
            await go.wait()

        made.boxes["C"].node("news")(quick)
        made.boxes["D"].node("news", slots=1, prefetch=4)(slow)
        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("news", settled=True) as out,
        ):
            for number in range(20):
                await out.send(f"{number}")
                await trio.sleep(0.01)
            await until(lambda: len(got) == 20)
            # While the link lasts, and for ever.
            skipped = stats(made, "B").skipped
            assert 0 < skipped < 20
        await trio.sleep(1)
        assert stats(made, "B").skipped == skipped
        assert not made.meshes["B"]._host._transit.branching
        go.set()


async def test_refusals_are_counted_by_their_reason(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        box = {"limits": Limits(mesh_node_addresses_max=2)}
        await made.start("A", box_options=box)
        await made.start("B", "A")

        async def take(text: str) -> None: ...

        for number in range(3):
            made.boxes["B"].node(f"n{number}")(take)
        await until(lambda: stats(made, "A").offers_dropped)
        async with (
            Container("X", network=network) as box,
            Mesh(box, [made.urls["A"]], name="other", role="interior"),
        ):
            await until(lambda: stats(made, "A").members_refused)
        found = stats(made, "A")
        assert found.offers_dropped == {"mesh_node_addresses_max": 1}
        assert set(found.members_refused) == {"it is of another mesh"}
        async with client(made.urls["A"], network=network) as peer:
            with pytest.raises(AmqpError):
                await peer.sender("n0", properties={"x-opt-mesh-route": ["A"]}).__aenter__()
            async with peer.management() as there:
                row = await there.read("amqp_rt.mesh", "mesh")
        found = stats(made, "A")
        assert found.links_refused == 1
        assert row["refused"] == {
            "offer: mesh_node_addresses_max": 1,
            "member: it is of another mesh": found.members_refused["it is of another mesh"],
            "link": 1,
        }
        for name in ("offers", "legs", "hops", "seeking", "waiting", "stuck", "dropped", "skipped"):
            assert row[name] == getattr(found, name)
