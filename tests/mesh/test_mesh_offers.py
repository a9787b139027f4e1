"""Offers of a member with a broker while queues are declared and deleted, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from meshed import client, members, until
from trio.testing import MockClock

from amqp_rt import Container
from amqp_rt.broker import Queue, Topic
from amqp_rt.limits import Limits
from amqp_rt.mesh import GIVES, PATTERN, TAKES, Mesh, MeshRule, Offer
from amqp_rt.net.memory import MemoryNetwork

pytestmark = [pytest.mark.req("P1"), pytest.mark.req("P5")]

VOLATILE = {"volatile": True}


async def test_queues_of_a_member_can_be_used_at_each_other(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", broker=VOLATILE)
        broker = made.brokers["B"]
        await broker.declare(Queue("jobs", max_deliveries=2, dead_letter="dead"), Topic("news"))
        for address in ("jobs", "dead", "news"):
            await made.meshes["A"].reachable(address)
        async with client(made.urls["A"], network=network) as peer:
            async with peer.receiver("news", credit=1) as news, peer.sender("news") as out:
                await out.send("today")
                assert (await news.receive()).message.body == "today"
            async with peer.sender("jobs") as out:
                await out.send("1")
            for _ in range(2):
                async with peer.receiver("jobs", credit=1) as source:
                    (await source.receive()).modify(failed=True)
            await until(lambda: broker.stats("dead").available == 1)
            # Dynamic queues are found only by peers that get their address.
            async with (
                client(made.urls["B"], network=network) as near,
                near.receiver(dynamic=True) as mine,
            ):
                await trio.sleep(1)
                assert not made.meshes["A"].instances(str(mine.address))
            await broker.delete("jobs")
            await until(lambda: not made.meshes["A"].instances("jobs"))
            await broker.declare(Queue("jobs"))
            await made.meshes["A"].reachable("jobs")


async def test_rules_of_a_member_hold_for_its_queues(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("one", "closest", route="link")]
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", broker=VOLATILE, rules=rules)
        await made.brokers["B"].declare(Queue("one"), Queue("two"))
        await made.meshes["A"].reachable("two")
        one, two = (made.meshes["A"].instances(each)[0].offer for each in ("one", "two"))
        assert (one.distribution, two.distribution) == ("closest", "balanced")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("one"),
            peer.sender("two"),
        ):
            # The second is a message route, and has no link of its own.
            assert len(made.meshes["A"]._host.pinned) == 1


async def test_no_more_queues_are_offered_than_the_limit_allows(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    box = {"limits": Limits(mesh_node_addresses_max=4)}
    async with members(network) as made:
        await made.start("A")
        # The coordinator is an address too.
        await made.start("B", "A", broker=VOLATILE, box_options=box)
        broker = made.brokers["B"]
        await broker.declare(*(Queue(f"q{at}") for at in range(3)))
        await made.meshes["A"].reachable("q2")
        await broker.declare(Queue("q3"))
        await trio.sleep(1)
        assert not made.meshes["A"].instances("q3")
        assert made.meshes["A"].instances("q2")
        await broker.delete("q0")
        await made.meshes["A"].reachable("q3")


@pytest.mark.parametrize(
    ("address", "offer", "wrong"),
    [
        ("", {}, "1 to mesh_name_max"),
        ("x" * 256, {}, "1 to mesh_name_max"),
        ("x", {"flags": 0}, "flags are TAKES or GIVES"),
        ("x", {"flags": PATTERN}, "flags are TAKES or GIVES"),
        ("x", {"flags": TAKES + 16}, "flags are TAKES or GIVES"),
        ("{x", {"flags": TAKES + PATTERN}, "offer of '{x'"),
        ("x", {"distribution": "fair"}, "distribution is one of"),
        ("x", {"weight": -1}, "weight is from 0 to 65535, not -1"),
        ("x", {"weight": 65_536}, "weight is from 0 to 65535, not 65536"),
    ],
)
def test_offers_that_others_would_refuse(address: str, offer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Mesh(Container("box"), offer={"fine": Offer(), address: Offer(**offer)})


async def test_stated_offers_reach_other_members(autojump_clock: MockClock) -> None:
    """At the bounds of what is allowed, in place of what the container has."""
    offers = {
        "x" * 255: Offer(weight=65_535),
        "rows": Offer(GIVES),
        "price/{sku}": Offer(TAKES + PATTERN, "closest", 3),
    }
    async with members(MemoryNetwork()) as made:
        await made.start("A")
        await made.start("B", "A", offer=offers)
        await made.meshes["A"].reachable("x" * 255)
        (instance,) = made.meshes["A"].instances("price/1")
        assert instance.offer == offers["price/{sku}"]
        assert made.meshes["A"].instances("x" * 255)[0].offer.weight == 65_535
