"""Where links of clients lead that attach again at another member, and what the destination has kept for them."""

from __future__ import annotations

import pytest
from meshed import Members, client, members, until
from trio.testing import MockClock

from amqp_rt import Container, Reconnect
from amqp_rt.broker import Queue
from amqp_rt.mesh import MeshRule
from amqp_rt.net.memory import MemoryNetwork

pytestmark = [pytest.mark.slow, pytest.mark.req("P3", "P5")]

RULES = [MeshRule("orders*", route="link")]


async def begin(made: Members, *brokers: str) -> None:
    """Start A and B, and beyond them nodes with brokers that have the queue."""
    await made.start("A", rules=RULES)
    await made.start("B", "A", rules=RULES)
    for at, name in enumerate(brokers):
        # One broker is near both of them, two are near one each.
        seeds = "AB" if len(brokers) == 1 else "AB"[at]
        await made.start(name, *seeds, rules=RULES, broker={"volatile": True})
        await made.brokers[name].declare(Queue("orders"))
    for name in made.meshes:
        await until(lambda name=name: len(made.meshes[name].instances("orders")) == len(brokers))


def termini(made: Members, name: str) -> int:
    return len(made.brokers[name].host.services.termini)


async def test_a_suspended_link_is_resumed_from_any_node(autojump_clock: MockClock) -> None:
    """At A, at B, and at the broker's own node: what is in hand stays in hand, and outcomes count once."""
    network = MemoryNetwork()
    async with members(network) as made:
        await begin(made, "C")
        urls = [made.urls[name] for name in "ABC"]
        soon = Reconnect(first_delay_s=0.05)
        async with (
            Container("client", network=network) as box,
            box.connect(urls, reconnect=soon) as peer,
        ):
            async with peer.sender("orders", timeout=30) as out:
                for body in ("one", "two", "three"):
                    await out.send(body)
            inbox = peer.receiver("orders", timeout=30, rcv_settle_mode=1, credit=3)
            held = [await inbox.receive() for _ in range(3)]
            stats = made.brokers["C"].stats
            for name, delivery in zip("ABC", held, strict=True):
                assert stats("orders").acquired == 3 - held.index(delivery)
                assert peer.peer.container_id == name
                if name != "C":
                    made.kill[name]()
                    await made.ended[name].wait()
                delivery.accept()
                await delivery.settled()
            assert stats("orders").accepted == 3
            await inbox.close()


async def test_links_with_kept_termini_lead_to_one_destination_from_every_node(
    autojump_clock: MockClock,
) -> None:
    """Both brokers have the queue, each nearer to one of the nodes: names of links decide."""
    network = MemoryNetwork()
    async with members(network) as made:
        await begin(made, "C", "D")
        taken = []
        for number in range(4):
            found = set()
            for ingress in "AB":
                async with (
                    client(made.urls[ingress], network=network) as peer,
                    peer.receiver("orders", name=f"inbox-{number}", timeout=30) as inbox,
                ):
                    assert inbox.source.timeout == 30
                    found |= {name for name in "CD" if termini(made, name)}
                await until(lambda: not any(termini(made, name) for name in "CD"))
            assert len(found) == 1
            taken += found
        assert set(taken) == {"C", "D"}


async def test_links_whose_messages_are_distributed_keep_nothing(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("C", "A", broker={"volatile": True})
        await made.brokers["C"].declare(Queue("orders"))
        await made.meshes["A"].reachable("orders")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("orders", timeout=30) as out,
        ):
            assert out.target.timeout == 0
            assert out.target.address == "orders"
