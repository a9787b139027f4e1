"""Addresses that rules or rights do not give a node are dropped, counted and shown, in virtual time."""

from __future__ import annotations

import pytest
from meshed import members, until
from trio.testing import MockClock

from amqp_rt import Access, Plain, Rights, Rule
from amqp_rt.mesh.records import PATTERN, TAKES, Offer
from amqp_rt.mesh.rules import MeshRule, MeshRules
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")

RULES = [MeshRule("bank/open/*"), MeshRule("bank/*", nodes=("C",))]


@pytest.mark.parametrize(
    ("origin", "address", "pattern", "admitted"),
    [
        ("B", "bank/pay", False, False),
        ("C", "bank/pay", False, True),
        ("B", "bank/open/1", False, True),
        ("B", "shop", False, True),
        ("B", "bank/{name}", True, False),
        ("C", "bank/{name}", True, True),
        ("B", "bank/open/{name}", True, True),
        # Each of them matches addresses of the bank.
        ("B", "{all:rest}", True, False),
        ("B", "{name}/pay", True, False),
        ("B", "ba{name}/pay", True, False),
        ("B", "shop/{all:rest}", True, True),
    ],
)
def test_rules_name_the_nodes_that_may_offer_an_address(
    origin: str, address: str, pattern: bool, admitted: bool
) -> None:
    offer = Offer(TAKES | PATTERN if pattern else TAKES)
    assert MeshRules(RULES).admit(origin, address, offer) is admitted


async def test_a_misadvertised_address_is_dropped_and_counted(autojump_clock: MockClock) -> None:
    async with members(MemoryNetwork()) as made:
        await made.start("A", rules=RULES)
        offers = {"bank/pay": Offer(), "{all:rest}": Offer(TAKES | PATTERN), "shop": Offer()}
        await made.start("B", "A", offer=offers)
        await made.start("C", "B", offer={"bank/pay": Offer()})
        mesh = made.meshes["A"]
        await until(lambda: made.way("A", "bank/pay") and made.way("A", "shop"))
        assert [each.node for each in mesh.instances("bank/pay")] == ["C"]
        assert mesh.instances("other") == []
        assert mesh.stats().offers_dropped == {"not admitted": 2}


async def test_an_edge_offers_what_it_may_listen_to(autojump_clock: MockClock) -> None:
    access = Access(
        [Rule("$mesh", Rights.SEND, users=("E",)), Rule("mine/*", Rights.LISTEN, users=("E",))]
    )
    async with members(MemoryNetwork()) as made:
        box = {"access": access, "users": {"E": "e"}, "plain_in_clear": True}
        await made.start("A", box_options=box)
        offers = {
            "mine/1": Offer(),
            "mine/2/{name}": Offer(TAKES | PATTERN),
            "orders": Offer(),
            "{all:rest}": Offer(TAKES | PATTERN),
            "$management": Offer(),
        }
        dial = {"auth": Plain("E", "e"), "plain_in_clear": True}
        await made.start("E", "A", role="edge", offer=offers, dial=dial)
        mesh = made.meshes["A"]
        await until(lambda: mesh.instances("mine/1") and mesh.instances("mine/2/x"))
        assert not any(mesh.instances(each) for each in ("orders", "other", "$management"))
        assert mesh.stats().offers_dropped == {"not admitted": 3}
