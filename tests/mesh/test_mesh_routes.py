"""Attaches with routes and records, from peers that may not send them or send them wrongly, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from meshed import client, line, members, until
from trio.testing import MockClock

from amqp_rt import Access, Connection, Message, Plain, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.errors import DeliveryRejected, LinkRefused
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.hops import ROUTE, RouteRefused, read_route, route_of
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")

#: Route as it arrives at A → condition of the refusal.
BAD_ROUTES: list[tuple[Any, str]] = [
    ("A", "amqp:invalid-field"),
    ([], "amqp:not-found"),
    (["B"], "amqp:not-found"),
    (["A", "A"], "amqp:invalid-field"),
    (["A", "B", "C", "B"], "amqp:invalid-field"),
    (["A", 7], "amqp:invalid-field"),
    (["A", [["B"], ["B"]]], "amqp:invalid-field"),
    (["A", [["B"]], "C"], "amqp:invalid-field"),
    (["A", [[], []]], "amqp:invalid-field"),
    ([["A"]], "amqp:invalid-field"),
    (["A", []], "amqp:invalid-field"),
    (["A", *(f"n{at}" for at in range(16))], "amqp:invalid-field"),
    (["A", [[f"n{at}"] for at in range(256)]], "amqp:invalid-field"),
]


@pytest.mark.parametrize(("route", "condition"), BAD_ROUTES)
def test_malformed_routes_are_refused(route: Any, condition: str) -> None:
    with pytest.raises(RouteRefused) as refused:
        read_route(route, "A", DEFAULT_LIMITS)
    assert refused.value.condition == condition


def test_routes_have_as_many_nodes_as_the_limits_allow() -> None:
    path = ["A", *(f"n{at}" for at in range(15))]
    assert read_route(path, "A", DEFAULT_LIMITS) == path[1:]
    wide = ["A", [[f"n{at}"] for at in range(255)]]
    assert read_route(wide, "A", DEFAULT_LIMITS) == wide[1:]
    assert read_route(["A", "B"], "A", Limits(mesh_hops_max=2)) == ["B"]
    with pytest.raises(RouteRefused):
        read_route(["A", "B"], "A", Limits(mesh_hops_max=1))


def test_a_tree_becomes_a_route_that_ends_at_its_destinations() -> None:
    tree = ("B", (("C", ()), ("D", (("E", ()),))))
    assert route_of(tree, {"C", "E"}) == ["B", [["C"], ["D", "E"]]]
    assert route_of(tree, {"B", "C", "E"}) == ["B", [[], ["C"], ["D", "E"]]]
    assert route_of(("B", (("C", ()),)), {"B", "C"}) == ["B", [[], ["C"]]]


async def refusal(peer: Connection, address: str, **options: Any) -> str:
    """Return the condition with which a sender is refused."""
    with pytest.raises(LinkRefused) as refused:
        async with peer.sender(address, **options):
            pass
    return refused.value.condition


async def test_a_client_can_neither_route_nor_send_records(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", network=network) as made:

        async def take(text: str) -> None:
            pass

        made.boxes["A"].node("here")(take)
        made.boxes["B"].node("there")(take)
        await made.meshes["A"].reachable("there")
        async with client(made.urls["A"], network=network) as peer:
            for route in (["A"], ["A", "B"], "nonsense"):
                told = await refusal(peer, "there", properties={ROUTE: route})
                assert told == "amqp:not-allowed"
            assert await refusal(peer, "here", properties={ROUTE: ["A"]}) == "amqp:not-allowed"
            assert await refusal(peer, "$mesh") == "amqp:not-allowed"
            with pytest.raises(LinkRefused):
                async with peer.receiver("$mesh"):
                    pass
        assert made.meshes["A"]._host.hops == 0


async def test_a_members_bad_route_is_refused_and_opens_nothing(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", network=network) as made:
        await until(lambda: len(made.meshes["B"]._engine.paths().costs) == 2)
        (neighbour,) = [
            each for each in made.meshes["B"]._host._ways.neighbours.values() if each.node == "A"
        ]
        peer = neighbour.connection
        for route, condition in BAD_ROUTES:
            assert await refusal(peer, "x", properties={ROUTE: route}) == condition
        # No neighbour of A has this id.
        assert await refusal(peer, "x", properties={ROUTE: ["A", "Z"]}) == "amqp:not-found"
        assert made.meshes["A"]._host.hops == 0
        assert made.meshes["A"]._engine.lines["B"].state.value == "up"


ACCESS = Access(
    [
        Rule("$mesh", Rights.MANAGE, users=("A", "B", "C")),
        Rule("orders", Rights.SEND, users=("ann",)),
    ]
)
USERS = {name: "secret-" + name for name in ("A", "B", "C", "ann", "bob")}


async def test_rights_are_judged_where_the_client_is_connected(autojump_clock: MockClock) -> None:
    """C has no rule for ann: B is its peer, and A has judged."""
    network = MemoryNetwork()
    only_members = Access([Rule("$mesh", Rights.MANAGE, users=("A", "B", "C"))])
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
            access = ACCESS if name == "A" else only_members
            box = {"access": access, "users": USERS, "plain_in_clear": True}
            dial = {"auth": Plain(name, USERS[name]), "plain_in_clear": True}
            await made.start(name, *seeds, box_options=box, dial=dial)
        got = []

        async def orders(order: str) -> None:
            got.append(order)

        async def price(sku: str) -> str:
            return sku

        made.boxes["C"].node("orders")(orders)
        await made.meshes["A"].reachable("orders")

        def login(user: str) -> Any:
            return client(
                made.urls["A"],
                network=network,
                auth=Plain(user, USERS[user]),
                plain_in_clear=True,
            )

        async with login("ann") as ann, ann.sender("orders") as out:
            await out.send("1")
        async with login("bob") as bob:
            assert await refusal(bob, "orders") == "amqp:unauthorized-access"
            assert await refusal(bob, "orders", properties={ROUTE: ["A", "B", "C"]}) == (
                "amqp:not-allowed"
            )
        assert got == ["1"]


async def test_a_container_that_may_not_join_is_an_ordinary_client(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    access = Access([Rule("$mesh", Rights.MANAGE, users=("B",))])
    async with members(network) as made:
        box = {"access": access, "users": USERS, "plain_in_clear": True}
        await made.start("A", box_options=box)
        # It has the password of another user, and the right of none.
        dial = {"auth": Plain("bob", USERS["bob"]), "plain_in_clear": True}
        await made.start("B", "A", dial=dial)
        await trio.sleep(3)
        assert made.meshes["A"]._engine.lines == {}
        assert "it has logged in under another name than its id" in made.meshes["A"]._peers.refused


async def test_each_way_to_an_address_takes_the_right_to_it(autojump_clock: MockClock) -> None:
    """Bob may send to another address, and eve has no right at all; B, which has the broker, has no rules for either."""
    network = MemoryNetwork()
    users = {**USERS, "eve": "secret-eve"}
    access = Access(
        [
            Rule("$mesh", Rights.MANAGE, users=("A", "B")),
            Rule("*", Rights.SEND | Rights.LISTEN, users=("ann",)),
            Rule("other", Rights.SEND, users=("bob",)),
        ]
    )
    rules = [MeshRule("linked", route="link")]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A")):
            box = {"access": access, "users": users, "plain_in_clear": True}
            dial = {"auth": Plain(name, users[name]), "plain_in_clear": True}
            await made.start(
                name,
                *seeds,
                box_options=box,
                dial=dial,
                rules=rules,
                broker={"volatile": True} if name == "B" else None,
            )
        names = ("linked", "other", "plain")
        await made.brokers["B"].declare(*(Queue(each) for each in names))
        for each in (*names, "$coordinator"):
            await made.meshes["A"].reachable(each)

        def login(user: str) -> Any:
            auth = Plain(user, users[user])
            return client(made.urls["A"], user, network=network, auth=auth, plain_in_clear=True)

        async with login("bob") as bob, login("eve") as eve, login("ann") as ann:
            for address in ("linked", "plain"):
                assert await refusal(bob, address) == "amqp:unauthorized-access"
                with pytest.raises(LinkRefused) as refused:
                    async with bob.receiver(address):
                        pass
                assert refused.value.condition == "amqp:unauthorized-access"
            async with bob.sender() as out:
                await out.send(Message("mine", to="other"))
                with pytest.raises(DeliveryRejected) as rejected:
                    await out.send(Message("not mine", to="plain"))
                assert rejected.value.condition == "amqp:unauthorized-access"
            with pytest.raises(LinkRefused) as refused:
                async with eve.transaction():
                    pass
            assert refused.value.condition == "amqp:unauthorized-access"
            async with ann.sender("linked") as out, ann.transaction() as txn:
                await out.send("x", transaction=txn)
        held = {each: made.brokers["B"].stats(each).available for each in names}
        assert held == {"linked": 1, "other": 1, "plain": 0}


@pytest.mark.req("P4")
async def test_an_edge_has_the_rights_of_a_client(autojump_clock: MockClock) -> None:
    """With a route, a link of it would be judged by no node."""
    network = MemoryNetwork()
    async with members(network) as made:
        access = Access([Rule("$mesh", Rights.SEND, users=("bob",))])
        box = {"access": access, "users": USERS, "plain_in_clear": True}
        await made.start("A", box_options=box)
        dial = {"auth": Plain("bob", USERS["bob"]), "plain_in_clear": True}
        await made.start("bob", "A", role="edge", dial=dial)

        async def secret(text: str) -> None:
            pass

        made.boxes["A"].node("secret")(secret)
        await until(lambda: made.meshes["bob"]._engine.joined)
        peer = made.meshes["bob"]._host._ways.neighbours["A"].connection
        assert await refusal(peer, "secret", properties={ROUTE: ["A"]}) == "amqp:not-allowed"
        assert await refusal(peer, "secret") == "amqp:unauthorized-access"
