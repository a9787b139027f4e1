"""Queues with only their head in memory deliver as they would without paging."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from brokers import Receiving
from paged import in_memory, world_of
from runs import of_this_run

from amqp_rt.broker.durable import pager
from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified
from amqp_rt.stores.base import Stored, StoreFailed
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.termini import COPY
from amqp_rt.values import Described, Symbol


def selector(text: str) -> dict[object, object]:
    return {Symbol("jms"): Described(Symbol("apache.org:selector-filter:string"), text)}


@pytest.mark.slow
@pytest.mark.req("B24", "B6")
@pytest.mark.parametrize("durable", [True, False])
async def test_only_the_head_is_in_memory_and_all_come_out_in_order(
    kept: Callable[[], Any], durable: bool
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(500), durable=durable)
        queue = world.queue()
        stats = world.stats("q")
        assert (stats.available, queue.paging.count + in_memory(queue)) == (500, 500)
        assert in_memory(queue) <= 22
        assert stats.bytes > world.host.memory.held > 0
        receiver = await world.take(0)
        for _ in range(50):
            receiver.grant(10)
            await world.settle()
            assert in_memory(queue) <= 1_000
            receiver.settle(ACCEPTED, *range(len(receiver.bodies) - 10, len(receiver.bodies)))
            await world.settle()
        assert receiver.bodies == list(range(500))
        stats = world.stats("q")
        assert (stats.available, stats.bytes, world.host.memory.held) == (0, 0, 0)
        assert world.store.summary(1)[0] == 0
        # The whole queue is in memory again: messages that are not durable are not written.
        await world.put("x", durable=False)
        assert (queue.paging.count, world.store.summary(1)[0]) == (0, 0)


@pytest.mark.req("B24", "B7")
async def test_a_broker_that_starts_counts_what_it_does_not_load(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(300))
        before = world.stats("q")
    async with world_of(kept()) as world:
        queue = world.queue()
        stats = world.stats("q")
        assert (stats.available, stats.bytes) == (before.available, before.bytes)
        await world.put("last")
        receiver = await world.take(400)
        assert receiver.bodies == [*range(300), "last"]
        receiver.settle(ACCEPTED)
        await world.settle()
        assert queue.bytes == world.host.memory.held == 0


async def test_what_was_spilled_does_not_outlive_the_broker(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(100), durable=False)
        assert world.queue().paging.count
    async with world_of(kept()) as world:
        assert world.stats("q").available == 0


@pytest.mark.req("B24", "B21")
async def test_consumers_with_filters_reach_beyond_memory(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        sender = world.client().sender("q")
        for n in range(400):
            fields = {"application_properties": {"kind": "odd" if n % 2 else "even"}}
            sender.send(n, durable=True, **fields)
        await world.settle()
        odd = await world.take(1_000, filter=selector("kind = 'odd'"))
        assert odd.bodies == list(range(1, 400, 2))
        nothing = await world.take(10, filter=selector("kind = 'none'"))
        assert nothing.bodies == []
        assert world.queue().paging.count
        odd.settle(RELEASED, 0, 150)
        odd.settle(ACCEPTED, *range(1, 150), *range(151, 200))
        await world.settle()
        assert odd.bodies[200:] == [1, 301]
        odd.settle(RELEASED, 200, 201)
        odd.detach()
        await world.settle()
        rest = await world.take(1_000)
        assert sorted(rest.bodies) == sorted([1, 301, *range(0, 400, 2)])
        rest.settle(ACCEPTED)
        await world.settle()
        assert (world.stats("q").bytes, world.host.memory.held) == (0, 0)
        assert world.store.summary(1)[0] == 0


@pytest.mark.req("B24", "B5")
async def test_what_a_filter_took_out_of_turn_comes_back_at_its_place(
    kept: Callable[[], Any],
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        sender = world.client().sender("q")
        for n in range(300):
            sender.send(n, durable=True, application_properties={"n": n})
        await world.settle()
        far = await world.take(3, filter=selector("n IN (150, 250, 299)"))
        assert far.bodies == [150, 250, 299]
        far.settle(RELEASED)
        far.detach()
        await world.settle()
        # A consumer with a filter gets older ones first, too, and so does a browser.
        some = await world.take(4, filter=selector("n > 148 AND n < 252"))
        assert some.bodies == [149, 150, 151, 152]
        some.settle(RELEASED)
        some.detach()
        await world.settle()
        assert world.queue().paging.count
        browser = await world.take(1_000, distribution_mode=COPY)
        assert browser.bodies == list(range(300))
        receiver = await world.take(0)
        for _ in range(30):
            receiver.grant(10)
            await world.settle()
        assert receiver.bodies == list(range(300))
        receiver.settle(ACCEPTED)
        await world.settle()
        assert (world.stats("q").bytes, world.host.memory.held) == (0, 0)
        assert world.store.summary(1)[0] == 0


@pytest.mark.req("B7")
async def test_what_came_back_is_delivered_before_what_is_in_the_store_behind_it(
    kept: Callable[[], Any],
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(300), application_properties={"n": 0})
        await world.put(*range(300, 310), application_properties={"n": 1})
        one = await world.take(1, filter=selector("n = 1"))
        one.settle(RELEASED)
        await world.settle()
        one.grant(2)
        await world.settle()
        assert one.bodies == [300, 300, 301]


@pytest.mark.req("B24", "B22")
async def test_a_browser_sees_everything_and_leaves_it(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(200))
        first = await world.take(1_000, distribution_mode=COPY)
        assert first.bodies == list(range(200))
        slow = await world.take(0, distribution_mode=COPY)
        for _ in range(10):
            slow.grant(7)
            await world.settle()
        assert slow.bodies == list(range(70))
        await world.put("more")
        assert first.bodies == [*range(200), "more"]
        assert world.stats("q").available == 201
        slow.grant(1_000)
        slow.drain()
        await world.settle()
        assert slow.bodies == [*range(200), "more"]
        assert slow.link.credit == 0


async def test_a_drained_link_gets_what_is_in_the_store_first(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(200))
        receiver = world.client().receiver("q")
        receiver.link.grant(300)
        receiver.link.drain()
        await world.settle()
        assert receiver.bodies == list(range(200))
        assert receiver.link.credit == 0


@pytest.mark.req("B24")
async def test_purging_leaves_what_is_acquired(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        sender = world.client().sender("q")
        for n in range(300):
            sender.send(n, durable=True, application_properties={"n": n})
        await world.settle()
        first = await world.take(5)
        far = await world.take(1, filter=selector("n = 250"))
        assert (first.bodies, far.bodies) == ([0, 1, 2, 3, 4], [250])
        assert await world.host.space().find("q").purge() == 294
        await world.settle()
        assert world.store.summary(1)[0] == 6
        await world.put("new")
        first.settle(RELEASED)
        far.settle(RELEASED)
        await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired) == (7, 0)
    async with world_of(kept()) as world:
        assert (await world.take(10)).bodies == [0, 1, 2, 3, 4, 250, "new"]


async def test_what_has_expired_in_the_store_is_given_up(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(100), ttl_s=10)
        await world.put("stays")
        world.time.now += 11
        for _ in range(20):
            world.host.sweep()
            await world.settle()
        assert world.stats("q").expired == 100
        assert (await world.take(10)).bodies == ["stays"]


async def test_delayed_messages_are_in_memory_and_come_when_they_are_due(
    kept: Callable[[], Any],
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(60))
        await world.put("later", message_annotations={Symbol("x-opt-delivery-delay"): 60_000})
        await world.put(*range(60, 120))
    async with world_of(kept()) as world:
        stats = world.stats("q")
        assert (stats.available, stats.delayed) == (120, 1)
        receiver = await world.take(100)
        assert receiver.bodies == list(range(100))
        world.time.now += 61
        world.host.turns.tick()
        receiver.grant(100)
        await world.settle()
        assert sorted(map(str, receiver.bodies)) == sorted(map(str, [*range(120), "later"]))
        receiver.settle(ACCEPTED)
        await world.settle()
        assert (world.stats("q").bytes, world.store.summary(1)[0]) == (0, 0)


@pytest.mark.req("B17", "B24")
async def test_what_a_queue_has_in_the_store_is_bounded() -> None:
    limits = Limits(queue_memory_bytes_max=1_000, queue_stored_bytes_max=20_000)
    async with world_of(MemoryStore(), Queue("q"), limits=limits) as world:
        sender = world.client().sender("q")
        while sender.link.credit:
            sender.send(b"x" * 90, durable=True)
            await world.settle()
        stats = world.stats("q")
        assert 1_000 < stats.bytes <= 20_000
        assert sender.outcomes == [ACCEPTED] * stats.available
        receiver = await world.take(stats.available)
        receiver.settle(ACCEPTED)
        await world.settle()
        assert sender.link.credit


async def test_a_ring_of_what_is_in_the_store(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q", length_max=100, overflow="drop-head")) as world:
        await world.put(*range(300))
        await world.settle()
        assert world.stats("q").available == 100
        assert (await world.take(200)).bodies == list(range(200, 300))


@pytest.mark.parametrize("kind", [{"priorities": 3}, {"sort_key": "application-properties.n"}])
async def test_queues_with_an_order_of_their_own_stay_in_memory(kind: dict[str, Any]) -> None:
    async with world_of(MemoryStore(), Queue("q", **kind)) as world:
        await world.put(*range(100), application_properties={"n": 1})
        assert (world.queue().paging.count, world.stats("q").available) == (0, 100)


async def test_a_store_that_cannot_be_read_is_read_again(autojump_clock: Any) -> None:
    class Troubled(MemoryStore):
        fails = False

        def messages(self, *args: Any) -> list[Stored]:
            if self.fails:
                raise StoreFailed("the disk failed")
            return super().messages(*args)

    store = Troubled()
    async with world_of(store, Queue("q")) as world:
        await world.put(*range(200))
        store.fails = True
        receiver = await world.take(200)
        assert len(receiver.bodies) < 200
        store.fails = False
        await trio.sleep(5)
        await world.settle()
        assert receiver.bodies == list(range(200))


async def test_what_the_store_has_lost_is_not_counted_for_ever() -> None:
    store = MemoryStore()
    async with world_of(store, Queue("q")) as world:
        await world.put(*range(200))
        kept = {n: put for n, put in store._nodes[1].messages.items() if n < 100}
        store._nodes[1].messages = kept
        receiver = await world.take(200)
        assert receiver.bodies == list(range(100))
        stats = world.stats("q")
        assert (stats.available, stats.acquired, stats.dropped) == (0, 100, 100)


@pytest.mark.slow
@pytest.mark.req("B24", "B5")
@pytest.mark.parametrize("seed", range(of_this_run(brief=3, quick=8, long=48)))
async def test_every_message_ends_once_and_comes_in_its_turn(seed: int) -> None:
    chance = random.Random(seed)
    limits = Limits(
        queue_memory_bytes_max=chance.choice((50, 300, 2_000)), queue_memory_messages_max=10
    )
    accepted: list[int] = []

    def settle(receiver: Receiving, share: float, *outcomes: Any) -> None:
        for delivery in receiver.endpoint.deliveries:
            if delivery.local_state is None and chance.random() < share:
                outcome = chance.choice(outcomes)
                delivery.settle(outcome)
                if outcome is ACCEPTED:
                    accepted.append(Message.decode(delivery.payload).body)

    async with world_of(MemoryStore(), Queue("q"), limits=limits) as world:
        sender = world.client().sender("q")
        receivers = [world.client().receiver("q") for _ in range(2)]
        count = 0
        for _ in range(150):
            step = chance.random()
            if step < 0.5:
                for _ in range(chance.randrange(1, 20)):
                    sender.send(count, durable=chance.random() < 0.8)
                    count += 1
            elif step < 0.7:
                chance.choice(receivers).grant(chance.randrange(1, 30))
            else:
                failed = Modified(delivery_failed=True)
                settle(chance.choice(receivers), 0.5, ACCEPTED, ACCEPTED, RELEASED, failed)
            if chance.random() < 0.7:
                await world.settle()
        while len(accepted) < count:
            # Pauses after failures end.
            world.time.now += limits.retry_pause_max_s
            world.host.turns.tick()
            for receiver in receivers:
                settle(receiver, 1, ACCEPTED)
                receiver.grant(50)
            await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0)
        assert (world.host.memory.held, world.store.summary(1)[0]) == (0, 0)
        assert sorted(accepted) == list(range(count))
        for receiver in receivers:
            others = next(each for each in receivers if each is not receiver)
            new = [body for body in dict.fromkeys(receiver.bodies) if body not in others.bodies]
            assert new == sorted(new)


@pytest.mark.req("B7")
async def test_a_delayed_message_behind_those_in_the_store_waits_over_a_restart(
    kept: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Messages that a restart reads at once; the others stay in the store, except delayed ones.
    monkeypatch.setattr(pager, "_RESTORED_MAX", 40)
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(100))
        await world.put("late", message_annotations={"x-opt-delivery-delay": 60_000})
        assert world.stats("q").delayed == 1
    async with world_of(kept()) as world:
        assert (world.stats("q").available, world.stats("q").delayed) == (100, 1)
        receiver = await world.take(0)
        for _ in range(12):
            receiver.grant(10)
            await world.settle()
        assert receiver.bodies == list(range(100))
        world.time.now += 61
        world.host.turns.tick()
        await world.settle()
        assert receiver.bodies == [*range(100), "late"]


@pytest.mark.req("B7")
async def test_annotations_of_a_modified_outcome_are_stored(kept: Callable[[], Any]) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put("m")
        receiver = await world.take(1)
        receiver.settle(Modified(message_annotations={Symbol("x-opt-seen"): "yes"}))
        await world.settle()
    async with world_of(kept()) as world:
        receiver = await world.take(1)
        assert receiver.messages[0].message_annotations["x-opt-seen"] == "yes"
