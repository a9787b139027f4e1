"""How messages are distributed by the load, speed and failures of destinations, in virtual time."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio
from meshed import Members, client, line, members, until
from trio.testing import MockClock

from amqp_rt.errors import AmqpError
from amqp_rt.mesh import Offer
from amqp_rt.mesh.balance import Standing
from amqp_rt.mesh.hops import LEG
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P2")


def standing(made: Members, node: str, address: str, of: str) -> Standing:
    """Return what *of* knows of the leg to *node*."""
    routed = made.meshes[of]._host._routed[(address, "")]
    return routed._legs[node].leg.standing


async def test_nodes_between_pass_on_the_load_of_the_last_one(autojump_clock: MockClock) -> None:
    async with line("A", "B", "C", network=(network := MemoryNetwork())) as made:
        go = trio.Event()

        async def work(text: str) -> None:
            await go.wait()

        made.boxes["C"].node("work", slots=2, prefetch=20)(work)
        await made.meshes["A"].reachable("work")
        async with (
            client(made.urls["A"], network=network) as far,
            far.sender("work") as out,
            client(made.urls["C"], network=network) as near,
            near.sender("work") as busy,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(out.send, "first")
            await until(lambda: made.boxes["C"].nodes.find("work")[0].load == 1)
            known = standing(made, "C", "work", "A")
            assert known.slots == 2
            for _ in range(9):
                nursery.start_soon(busy.send, "x")
            # No message of A's leg moves, and no credit: its flow comes for the load alone.
            await until(lambda: known.load == 10)
            go.set()
            await until(lambda: known.load == 0)


async def test_the_load_is_told_to_legs_only(autojump_clock: MockClock) -> None:
    async with line("A", "B", network=(network := MemoryNetwork())) as made:

        async def work(text: str) -> None:
            pass

        made.boxes["B"].node("work")(work)
        await made.meshes["A"].reachable("work")
        async with client(made.urls["A"], network=network) as peer, peer.sender("work") as out:
            await out.send("x")
            assert out.link.flow_properties is None
            await until(lambda: made.meshes["B"]._host._reports)
        legs = [
            link.properties[LEG]["from"]
            for told in made.meshes["B"]._host._reports._told.values()
            for link in told
        ]
        assert legs == ["A"]
        # Legs are closed a minute after the last sender, and then nothing is kept for them.
        await trio.sleep(70)
        assert not made.meshes["B"]._host._reports


async def shares(
    work: dict[str, Any],
    *,
    messages: int,
    senders: int,
    slots: int = 4,
    weights: dict[str, int] | None = None,
) -> tuple[Counter[str], int]:
    """Send messages to instances in a star; return how many each got, and how many failed."""
    got: Counter[str] = Counter()
    failed = 0
    async with members(network := MemoryNetwork()) as made:
        await made.start("hub")
        for name, handler in work.items():

            async def counted(text: str, name: str = name, handler: Any = handler) -> None:
                got[name] += 1
                await handler()

            offer = None if weights is None else {"work": Offer(weight=weights[name])}
            await made.start(name, "hub", offer=offer)
            made.boxes[name].node("work", slots=slots, prefetch=slots)(counted)
        await until(lambda: len(made.meshes["hub"].instances("work")) == len(work))
        async with (
            client(made.urls["hub"], network=network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            left = iter(range(messages))

            async def send() -> None:
                nonlocal failed
                for _ in left:
                    try:
                        await out.send("x")
                    except AmqpError:
                        failed += 1

            for _ in range(senders):
                nursery.start_soon(send)
    return got, failed


@pytest.mark.slow
async def test_an_instance_that_is_ten_times_slower_gets_about_a_tenth(
    autojump_clock: MockClock,
) -> None:
    work = {f"i{at}": partial(trio.sleep, 0.02) for at in range(8)}
    work["i3"] = partial(trio.sleep, 0.2)
    got, failed = await shares(work, messages=1_600, senders=16)
    assert failed == 0
    others = (sum(got.values()) - got["i3"]) / 7
    assert 0.03 < got["i3"] / others < 0.25, got
    assert min(got[name] for name in work if name != "i3") > 0.6 * others, got


@pytest.mark.slow
async def test_an_instance_that_fails_fast_gets_few_messages(autojump_clock: MockClock) -> None:
    """Failing at once looks idle: an eighth of the messages, and more, would fail."""

    async def fail() -> None:
        raise ValueError("out of order")

    work: dict[str, Any] = {f"i{at}": partial(trio.sleep, 0.02) for at in range(8)}
    work["i3"] = fail
    got, failed = await shares(work, messages=1_600, senders=16)
    assert failed == got["i3"] > 0
    assert failed <= 0.05 * 1_600, got


async def test_instances_get_shares_by_their_weights(autojump_clock: MockClock) -> None:
    """All work at the same speed; one that has the weight 0 gets nothing."""
    weights = {"i1": 1, "i2": 3, "i3": 0, "i4": 1}
    work = dict.fromkeys(weights, partial(trio.sleep, 0.02))
    got, failed = await shares(work, messages=900, senders=12, slots=30, weights=weights)
    assert failed == 0
    assert sum(got.values()) == 900
    assert "i3" not in got
    assert 2 < got["i2"] / got["i1"] < 4.5, got
    assert 2 < got["i2"] / got["i4"] < 4.5, got


async def test_messages_of_a_lost_link_are_no_load(autojump_clock: MockClock) -> None:
    async with line("A", network=(network := MemoryNetwork())) as made:
        go = trio.Event()

        async def work(text: str) -> None:
            await go.wait()

        made.boxes["A"].node("work", slots=2, prefetch=20)(work)
        workers = made.boxes["A"].nodes.find("work")[0]
        async with trio.open_nursery() as nursery:
            async with client(made.urls["A"], network=network) as peer, peer.sender("work") as out:
                async with peer.sender("work", settled=True) as settled:
                    for _ in range(4):
                        await settled.send("x")
                for _ in range(5):
                    nursery.start_soon(out.send, "x")
                await until(lambda: workers.load == 9)
                # What is settled exists only here, and is still handled.
                nursery.cancel_scope.cancel()
                await until(lambda: workers.load == 9)
            await until(lambda: workers.load == 4)
            go.set()
            await until(lambda: workers.load == 0)
