"""Direct connections to destinations, in virtual time: A – B – C, and what A and C do without B."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from meshed import Members, client, members, until, verifier
from trio.testing import MockClock

from amqp_rt import Access, Container, Plain, Rights, Rule
from amqp_rt.errors import AmqpError, DeliveryNotAccepted, LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.mesh import Mesh, MeshRule
from amqp_rt.mesh.dialling import Dialling
from amqp_rt.mesh.peers import MeshMember, open_properties
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.testing.network import SimulatedNetwork, SimulationTrace

pytestmark = pytest.mark.req("P3")


@pytest.fixture(autouse=True)
def seeds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members dial their seeds only: few members would otherwise all be neighbours."""
    monkeypatch.setattr(Dialling, "_wanted", lambda self: {})


@asynccontextmanager
async def three(*more: str, **options: Any) -> AsyncIterator[Members]:
    """Run A, which is direct, with B and C behind each other, and *more* behind B as well."""
    async with members(MemoryNetwork()) as made:
        await made.start("A", urls=None, direct=True, **options)
        await made.start("B", "A", urls=None)
        for name in ("C", *more):
            await made.start(name, "B", urls=None)
        yield made


def serve(made: Members, name: str, address: str) -> list[str]:
    """Let a member serve *address*; return what it got."""
    got: list[str] = []

    async def price(sku: str) -> str:
        got.append(sku)
        return f"{sku}: {name}"

    made.boxes[name].rpc(address)(price)
    return got


def direct(made: Members, name: str = "A") -> list[str]:
    """Return the nodes with which a member has opened direct connections."""
    return sorted(made.meshes[name]._host._ways.direct)


def returns(made: Members, name: str = "C") -> list[str]:
    """Return the nodes that have opened direct connections with a member."""
    return sorted(made.meshes[name]._host._ways.returns)


def through(made: Members, name: str = "B") -> int:
    """Return the number of links that pass a member."""
    return made.meshes[name]._host.hops


async def test_calls_take_no_hop(autojump_clock: MockClock) -> None:
    async with three() as made:
        got = serve(made, "C", "price")
        await made.meshes["A"].reachable("price")
        async with client(made.urls["A"], network=made.network) as peer:
            # The first of them goes over B: nothing waits for a connection.
            assert await peer.call("price", "1", reply=str, within=1) == "1: C"
            assert through(made) > 0
            await until(lambda: not through(made))
            for number in range(20):
                assert await peer.call("price", f"{number}", reply=str) == f"{number}: C"
                # Neither requests nor replies.
                assert not through(made)
            (instance,) = made.meshes["A"].instances("price")
            ((node, path, _),) = made.meshes["A"]._host.routed_addresses()[0].open_legs()
        assert (node, path) == ("C", ("C",))
        assert len(got) == 21
        # It is no adjacency: the routing knows of the line over B, and so do all.
        assert instance.cost == 2
        assert set(made.meshes["A"]._engine.lines) == {"B"}
        assert set(made.meshes["C"]._engine.lines) == {"B"}
        assert [made.meshes[each].stats().direct for each in "ABC"] == [1, 0, 1]
        claims = made.meshes["B"]._engine.database.claims
        assert {each: set(claims[each]) for each in "AC"} == {"A": {"B"}, "C": {"B"}}


async def test_links_that_go_to_one_destination_are_direct(autojump_clock: MockClock) -> None:
    rules = [MeshRule("row", route="link")]
    async with three(rules=rules) as made:
        got = serve(made, "C", "row")
        await made.meshes["A"].reachable("row")
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("row") as first,
        ):
            await first.send("1")
            await until(lambda: direct(made) == ["C"])
            assert through(made) == 1
            async with peer.session() as session, session.sender("row") as second:
                await second.send("2")
                # The first stays on its path, the second took none.
                assert through(made) == 1
                await first.send("3")
        assert got == ["1", "2", "3"]


async def test_mesh_direct_max(autojump_clock: MockClock) -> None:
    """A connects with as many as the bound says; links to another one go over B."""
    limits = Limits(mesh_direct_max=2)
    async with three("D", "E", box_options={"limits": limits}) as made:
        for name in "CDE":
            serve(made, name, f"price-{name}")
        for name in "CDE":
            await made.meshes["A"].reachable(f"price-{name}")
        async with client(made.urls["A"], network=made.network) as peer:
            for _ in range(30):
                for name in "CDE":
                    assert await peer.call(f"price-{name}", "1", reply=str) == f"1: {name}"
                await trio.sleep(1)
                assert len(direct(made)) <= 2
            assert len(direct(made)) == 2
            # One is used no longer, and its links stay: the third takes its place.
            left = direct(made)[0]
            used = set("CDE") - {left}
            for _ in range(20):
                for name in used:
                    assert await peer.call(f"price-{name}", "1", reply=str) == f"1: {name}"
                await trio.sleep(1)
            assert direct(made) == sorted(used)
            assert await peer.call(f"price-{left}", "1", reply=str, within=1) == f"1: {left}"
            assert through(made) > 0


async def test_a_connection_that_no_link_uses_is_closed(autojump_clock: MockClock) -> None:
    async with three() as made:
        serve(made, "C", "price")
        await made.meshes["A"].reachable("price")
        async with client(made.urls["A"], network=made.network) as peer:
            await peer.call("price", "1", reply=str)
            await until(lambda: direct(made) == ["C"])
            await trio.sleep(100)
            assert direct(made) == ["C"]
        # Legs go a minute after the last sender.
        await trio.sleep(50)
        assert direct(made) == ["C"]
        await trio.sleep(20)
        assert direct(made) == returns(made) == []
        async with client(made.urls["A"], network=made.network) as peer:
            assert await peer.call("price", "2", reply=str, within=1) == "2: C"


async def test_without_the_connection_links_take_the_path_of_the_routing(
    autojump_clock: MockClock,
) -> None:
    async with three() as made:
        got = serve(made, "C", "price")
        await made.meshes["A"].reachable("price")
        async with client(made.urls["A"], network=made.network) as peer:
            await peer.call("price", "0", reply=str)
            await until(lambda: direct(made) == ["C"])
            await trio.sleep(1)
            made.meshes["C"]._host._ways.returns["A"].lose("a test")
            await trio.lowlevel.checkpoint()
            for number in range(1, 20):
                with trio.fail_after(1):
                    assert await peer.call("price", f"{number}", reply=str) == f"{number}: C"
            assert through(made) > 0
            # Dialled again.
            await until(lambda: direct(made) == ["C"] and not through(made))
        assert len(got) == 20


async def test_a_silent_connection_is_given_up(autojump_clock: MockClock) -> None:
    """There are no hellos on it, so the idle timeout tells, as soon as they would tell of a neighbour."""
    async with trio.open_nursery() as nursery:
        network = SimulatedNetwork([], Random, SimulationTrace(), nursery)
        async with members(network.door("unused")) as made:
            for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
                box = {"network": network.door(name)}
                await made.start(name, *seeds, urls=None, direct=name == "A", box_options=box)
            serve(made, "C", "price")
            await made.meshes["A"].reachable("price")
            async with client(made.urls["A"], network=network.door("client")) as peer:
                await peer.call("price", "0", reply=str)
                await until(lambda: direct(made) == ["C"] and not through(made))
                with network.mute("C", to="A"):
                    since = trio.current_time()
                    with pytest.raises(DeliveryNotAccepted):
                        await peer.call("price", "1", reply=str, within=20)
                    assert trio.current_time() - since < 6
                    assert direct(made) == []
                    # C is still within reach, over B.
                    for number in range(5):
                        assert await peer.call("price", f"{number}", reply=str, within=1)
                        await trio.sleep(1)
                await until(lambda: direct(made) == ["C"] and not through(made))
        nursery.cancel_scope.cancel()


async def test_two_that_dial_each_other_have_a_connection_each(autojump_clock: MockClock) -> None:
    async with members(MemoryNetwork()) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
            await made.start(name, *seeds, urls=None, direct=True)
        for name in "AC":
            serve(made, name, f"price-{name}")
        await made.meshes["A"].reachable("price-C")
        await made.meshes["C"].reachable("price-A")
        async with (
            client(made.urls["A"], "a", network=made.network) as one,
            client(made.urls["C"], "c", network=made.network) as other,
        ):
            for number in range(100):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda: one.call("price-C", "x", reply=str, within=1))
                    nursery.start_soon(lambda: other.call("price-A", "x", reply=str, within=1))
                await trio.sleep(0.1)
                if number > 50:
                    assert direct(made) == ["C"]
                    assert direct(made, "C") == ["A"]
                    assert not through(made)


async def test_replies_do_not_take_the_connection_for_requests_the_other_way(
    autojump_clock: MockClock,
) -> None:
    async with three() as made:
        for name in "AC":
            serve(made, name, f"price-{name}")
        await made.meshes["A"].reachable("price-C")
        await made.meshes["C"].reachable("price-A")
        async with (
            client(made.urls["A"], "a", network=made.network) as one,
            client(made.urls["C"], "c", network=made.network) as other,
        ):
            while direct(made) != ["C"]:
                await one.call("price-C", "x", reply=str, within=1)
                await trio.sleep(0.1)
            # A has this connection for its own links; the one from C, which would lead back, is not there.
            assert returns(made, "A") == []
            for number in range(3):
                answer = await other.call("price-A", f"{number}", reply=str, within=1)
                assert answer == f"{number}: A"
            assert returns(made, "A") == []


async def test_another_member_at_the_url_keeps_its_connection(autojump_clock: MockClock) -> None:
    """D announces a URL at which C answers, such as one of a balancer; A connects with C alone."""
    async with three() as made:
        await made.start("D", "B", urls=[made.urls["C"]])
        for name in "CD":
            serve(made, name, f"price-{name}")
            await made.meshes["A"].reachable(f"price-{name}")
        async with client(made.urls["A"], network=made.network) as peer:
            await peer.call("price-C", "0", reply=str)
            await until(lambda: direct(made) == ["C"])
            ours = made.meshes["A"]._host._ways.direct["C"]
            theirs = made.meshes["C"]._host._ways.returns["A"]
            for _ in range(20):
                for name in "CD":
                    assert await peer.call(f"price-{name}", "1", reply=str) == f"1: {name}"
                await trio.sleep(1)
            assert made.meshes["A"]._host._ways.direct == {"C": ours}
            assert made.meshes["C"]._host._ways.returns == {"A": theirs}


async def test_a_member_closes_connections_that_are_for_others(autojump_clock: MockClock) -> None:
    async with three() as made:
        await until(lambda: "C" in made.meshes["A"]._engine.paths().costs)
        async with Container("C", network=made.network) as guest:

            def dial(meant: str) -> Any:
                said = open_properties(MeshMember("mesh", "C", 7, "interior", "", 1, meant))
                return guest.connect(made.urls["A"], properties=said, reconnect=None)

            async with dial("A"):
                await until(lambda: returns(made, "A") == ["C"])
                kept = made.meshes["A"]._host._ways.returns["C"]
                for meant in ("C", "nobody"):
                    with pytest.raises(AmqpError, match="another connection"):
                        async with dial(meant) as peer:
                            await peer.wait_closed()
                    assert made.meshes["A"]._host._ways.returns == {"C": kept}


async def test_nothing_is_lost_when_a_destination_leaves(autojump_clock: MockClock) -> None:
    async with three("D") as made:
        got = [serve(made, name, "orders") for name in "CD"]
        await until(lambda: len(made.meshes["A"].instances("orders")) == 2)
        sent: list[str] = []
        stop = trio.Event()
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("orders") as out,
            trio.open_nursery() as nursery,
        ):

            async def produce(name: int) -> None:
                while not stop.is_set():
                    order = f"{name}-{len(sent)}"
                    sent.append(order)
                    await out.send(order)
                    await trio.sleep(0.01)

            for number in range(4):
                nursery.start_soon(produce, number)
            await until(lambda: direct(made) == ["C", "D"])
            await trio.sleep(1)
            made.boxes["C"].stop()
            await made.ended["C"].wait()
            assert direct(made) == ["D"]
            await trio.sleep(1)
            stop.set()
        assert sorted(got[0] + got[1]) == sorted(sent)


@pytest.mark.req("P4")
async def test_edges_have_no_direct_connections() -> None:
    async with Container("E") as box:
        with pytest.raises(ValueError, match="direct is for interior nodes"):
            Mesh(box, role="edge", direct=True)
        await box.listen("amqp://127.0.0.1:0")
        with pytest.raises(ValueError, match="direct is for interior nodes"):
            async with Mesh(box, direct=True):
                pass


@pytest.mark.req("SE18")
@pytest.mark.parametrize(
    ("node", "role", "why"),
    [
        ("C", "interior", ""),
        ("E", "edge", "direct connections are for nodes within reach"),
        ("Z", "interior", "direct connections are for nodes within reach"),
        ("M", "interior", "it may not join"),
    ],
)
async def test_who_may_connect_directly(
    node: str, role: str, why: str, autojump_clock: MockClock
) -> None:
    """A member within reach, with the rights of one; it has no link of records on that connection."""
    access = Access(
        [
            Rule("$mesh", Rights.MANAGE, users=("B", "C", "Z")),
            Rule("$mesh", Rights.SEND, users=("E",)),
        ]
    )
    login = {"users": verifier({each: each for each in "BCEMZ"}), "access": access}
    async with members(MemoryNetwork()) as made:
        box = {**login, "plain_in_clear": True}
        for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
            dial = {"auth": Plain(name, name), "plain_in_clear": True}
            await made.start(name, *seeds, box_options=box, dial=dial)
        serve(made, "A", "here")
        await until(lambda: "C" in made.meshes["A"]._engine.paths().costs)
        said = open_properties(MeshMember("mesh", node, 7, role, "", 1, direct="A"))
        async with (
            Container(node, network=made.network) as guest,
            guest.connect(
                made.urls["A"],
                properties=said,
                auth=Plain(node, node),
                plain_in_clear=True,
                reconnect=None,
            ) as peer,
        ):
            await trio.sleep(0.1)
            assert returns(made, "A") == ([] if why else [node])
            assert made.meshes["A"].stats().members_refused == ({why: 1} if why else {})
            route: dict[object, Any] = {"x-opt-mesh-route": ["A"]}
            if why:
                with pytest.raises(LinkRefused):
                    async with peer.sender("here", properties=route):
                        pass
            else:
                async with peer.sender("here", properties=route) as out:
                    await out.send("x")
            with pytest.raises(LinkRefused) as refused:
                async with peer.sender("$mesh", settled=True):
                    pass
            assert refused.value.condition == "amqp:not-allowed"
            assert "Z" not in made.meshes["A"]._engine.lines
        await until(lambda: not returns(made, "A"))


async def test_messages_under_way_on_a_lost_connection_are_modified(
    autojump_clock: MockClock,
) -> None:
    async with three() as made:

        async def slow(text: str) -> None:
            await trio.sleep(3600 if text == "slow" else 0)

        made.boxes["C"].node("jobs", slots=5)(slow)
        await made.meshes["A"].reachable("jobs")
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("jobs") as out:
            await out.send("quick")
            await until(lambda: direct(made) == ["C"] and not through(made))
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    with pytest.raises(DeliveryNotAccepted) as failed:
                        await out.send("slow")
                    assert failed.value.info["outcome"].delivery_failed

                nursery.start_soon(send)
                await trio.sleep(0.1)
                made.meshes["A"]._host._ways.direct["C"].lose("a test")
