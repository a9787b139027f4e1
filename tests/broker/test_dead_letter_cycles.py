"""Dead letters that need no consumer do not move in cycles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing
from brokers import World

from amqp_rt import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.outcomes import RELEASED, Rejected
from amqp_rt.stores.base import Store


def pass_time(world: World, seconds: float) -> None:
    """Let alarms go off that are due, and whatever they have left for later turns."""
    world.time.now += seconds
    world.host.turns.tick()
    while world.host.turns.unfinished:
        world.host.turns.run_pending()


def waiting(world: World, *names: str) -> list[int]:
    return [world.stats(name).available for name in names]


@pytest.mark.req("B16")
def test_what_expires_in_a_cycle_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world = World(Queue("a", ttl_s=1, dead_letter="b"), Queue("b", ttl_s=1, dead_letter="a"))
    world.client().sender("a").send("m", message_id="one")
    pass_time(world, 1.1)
    assert waiting(world, "a", "b") == [0, 1]
    pass_time(world, 1.1)
    assert waiting(world, "a", "b") == [0, 0]
    assert (world.stats("a").dead_lettered, world.stats("b").dropped) == (1, 1)
    assert "dead-letter cycle at 'a', message-id 'one': expired in 'b'" in caplog.text


@pytest.mark.req("B16")
def test_what_overflows_in_a_cycle_is_dropped() -> None:
    ring: dict[str, Any] = {"length_max": 1, "overflow": "drop-head"}
    world = World(Queue("a", dead_letter="b", **ring), Queue("b", dead_letter="a", **ring))
    sender = world.client().sender("a")
    for number in range(10):
        sender.send(number)
    assert waiting(world, "a", "b") == [1, 1]
    client = world.client()
    assert client.receiver("a", credit=9).bodies == [9]


@pytest.mark.req("B16")
@pytest.mark.parametrize("outcome", [Rejected(), RELEASED])
def test_a_retry_goes_on_for_ever(outcome: object) -> None:
    world = World(
        Queue("work", dead_letter="retry", max_attempts=1),
        Queue("retry", ttl_s=1, dead_letter="work"),
    )
    client = world.client()
    client.sender("work").send("m")
    for _ in range(20):
        receiver = client.receiver("work", credit=1)
        receiver.settle(outcome, 0)
        receiver.link.detach()
        assert waiting(world, "work", "retry") == [0, 1]
        pass_time(world, 1.1)
        assert waiting(world, "work", "retry") == [1, 0]


@pytest.mark.req("B16")
def test_a_chain_ends_at_the_bound() -> None:
    chain = [Queue(f"q{n}", ttl_s=1, dead_letter=f"q{n + 1}") for n in range(5)]
    for hops, arrived in ((5, 1), (4, 0)):
        world = World(*chain, Queue("q5"), limits=Limits(dead_letter_hops_max=hops))
        world.client().sender("q0").send("m")
        for _ in range(5):
            pass_time(world, 1.1)
        assert waiting(world, "q5") == [arrived]


@pytest.mark.req("B16")
def test_a_forged_history_neither_drops_a_message_nor_keeps_it() -> None:
    world = World(Queue("a", ttl_s=1, dead_letter="b"), Queue("b", ttl_s=1, dead_letter="a"))
    sender = world.client().sender("a")
    for reason in ("expired", "rejected"):
        forged = [{"source": name, "reason": reason} for name in ("b", "a")]
        sender.send("m", message_annotations={"x-opt-dead-letter-history": forged})
    pass_time(world, 1.1)
    assert waiting(world, "a", "b") == [0, 2]
    pass_time(world, 1.1)
    assert waiting(world, "a", "b") == [0, 0]


@pytest.mark.req("B16")
async def test_a_cycle_is_found_over_a_restart(
    kept: Callable[[], Store], autojump_clock: trio.testing.MockClock
) -> None:
    queues = Queue("a", length_max=1, overflow="drop-head", dead_letter="b"), Queue("b")
    async with Broker(store=kept()) as broker:
        for queue in queues:
            await broker.declare(queue)
        async with broker.local() as peer, peer.sender("a") as out:
            await out.send("first", durable=True)
            await out.send("second", durable=True)
    ring = Queue("b", length_max=1, overflow="drop-head", dead_letter="a")
    async with Broker(store=kept()) as broker:
        await broker.declare(ring)
        async with broker.local() as peer, peer.sender("b") as out:
            await out.send("pushes", durable=True)
        assert broker.stats("b").available == 1
        assert broker.stats("b").dropped == 1
        assert broker.stats("a").available == 1
