"""Operations on a whole queue of which only the head is in memory, a chunk at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from paged import FEW, PagedWorld, in_memory, world_of

from amqp_rt.broker.lifecycles import JOURNAL, LifeCycles
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.stores.base import Stored, StoreFailed
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Described, Symbol


def selector(text: str) -> dict[object, object]:
    return {Symbol("jms"): Described(Symbol("apache.org:selector-filter:string"), text)}


async def seen(world: PagedWorld, address: str = "q", count: int = 10_000, **options: Any) -> Any:
    found = await world.host.space().find(address).peek(count, **options)
    return [Message.decode(each).body for each in found]


async def numbered(world: PagedWorld, count: int) -> None:
    sender = world.client().sender("q")
    for n in range(count):
        sender.send(n, durable=True, application_properties={"n": n})
        if not n % 50:
            await world.settle()
    await world.settle()


@pytest.mark.req("B24")
@pytest.mark.parametrize("durable", [True, False])
async def test_peeking_sees_all_of_it_and_leaves_it_there(
    kept: Callable[[], Any], durable: bool
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await world.put(*range(1_200), durable=durable)
        before = in_memory(world.queue()), world.queue().paging.count
        assert await seen(world) == list(range(1_200))
        assert await seen(world, count=700) == list(range(700))
        assert (in_memory(world.queue()), world.queue().paging.count) == before
        size = len((await world.host.space().find("q").peek())[0])
        assert len(await seen(world, bytes_max=60 * size)) in (59, 60)
        assert await seen(world, bytes_max=1) == [0]


@pytest.mark.req("B24", "B5")
async def test_what_was_taken_out_of_turn_is_seen_once_and_at_its_place(
    kept: Callable[[], Any],
) -> None:
    async with world_of(kept(), Queue("q")) as world:
        await numbered(world, 300)
        far = await world.take(3, filter=selector("n IN (150, 250, 299)"))
        first = await world.take(2)
        others = [n for n in range(2, 300) if n not in (150, 250, 299)]
        assert await seen(world) == others
        far.settle(RELEASED, 0, 1)
        first.settle(RELEASED, 1)
        await world.settle()
        assert await seen(world) == list(range(1, 299))


@pytest.mark.slow
async def test_peeking_while_others_take_what_is_there() -> None:
    async with world_of(MemoryStore(), Queue("q")) as world:
        await world.put(*range(3_000))
        receiver = await world.take(0)
        found: list[Any] = []

        async def watch() -> None:
            found.extend(await seen(world))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for _ in range(100):
                receiver.grant(10)
                world.pump()
                receiver.settle(ACCEPTED, *range(len(receiver.bodies) - 10, len(receiver.bodies)))
                world.pump()
                await trio.lowlevel.checkpoint()
        assert found == sorted(set(found))
        # Messages that no consumer took in the meantime are among them.
        assert set(found) >= set(range(1_000, 3_000))


async def test_a_store_that_cannot_be_read_is_said_so(autojump_clock: Any) -> None:
    class Troubled(MemoryStore):
        fails = False

        def messages(self, *args: Any) -> list[Stored]:
            if self.fails:
                raise StoreFailed("the disk failed")
            return super().messages(*args)

    store = Troubled()
    async with world_of(store, Queue("q"), Queue("to")) as world:
        await world.put(*range(200))
        store.fails = True
        here = in_memory(world.queue())
        with pytest.raises(StoreFailed):
            await world.host.space().find("q").peek(200)
        with pytest.raises(StoreFailed):
            await world.host.space().find("q").move(world.host.space().find("to"), 200)
        assert world.stats("to").available == here
        store.fails = False
        assert (
            await world.host.space().find("q").move(world.host.space().find("to"), 200)
            == 200 - here
        )
        assert await seen(world, "to") == list(range(200))


@pytest.mark.slow
@pytest.mark.req("B24")
async def test_moving_takes_all_of_it_in_order_and_in_bounded_memory(
    kept: Callable[[], Any],
) -> None:
    async with world_of(kept(), Queue("q"), Queue("to")) as world:
        await world.put(*range(1_000))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, in_memory(world.queue()) + in_memory(world.queue("to")))
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            assert (
                await world.host.space().find("q").move(world.host.space().find("to"), 900) == 900
            )
            nursery.cancel_scope.cancel()
        await world.settle()
        assert most <= 100
        assert (await seen(world, "to"), await seen(world)) == ([*range(900)], [*range(900, 1_000)])
        assert (world.store.summary(1)[0], world.store.summary(2)[0]) == (100, 900)
        assert (
            await world.host.space().find("q").move(world.host.space().find("to"), 0xFFFFFFFF)
            == 100
        )
    async with world_of(kept()) as world:
        assert await seen(world, "to") == list(range(1_000))
        assert world.stats("q").available == world.stats("q").bytes == 0


@pytest.mark.parametrize("target", [Topic("to"), Log("to"), Queue("to", priorities=3)])
async def test_moving_to_what_is_not_paged(target: Any) -> None:
    async with world_of(MemoryStore(), Queue("q"), target) as world:
        reader = world.client().receiver("to", credit=1_000)
        await world.put(*range(300))
        assert await world.host.space().find("q").move(world.host.space().find("to"), 300) == 300
        await world.settle()
        assert reader.bodies == list(range(300))
        assert world.stats("q").available == world.queue().paging.count == 0


@pytest.mark.parametrize("delete", ["q", "to"])
async def test_a_node_that_is_deleted_while_messages_are_moved(delete: str) -> None:
    async with world_of(MemoryStore(), Queue("q"), Queue("to")) as world:
        await world.put(*range(500))

        async def intervene() -> None:
            while not world.stats("to").available:
                await trio.lowlevel.checkpoint()
            world.host.space().delete(delete)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(intervene)
            if delete == "q":
                assert (
                    0
                    < await world.host.space().find("q").move(world.host.space().find("to"), 500)
                    < 500
                )
            else:
                with pytest.raises(AmqpError) as error:
                    await world.host.space().find("q").move(world.host.space().find("to"), 500)
                assert error.value.condition == "amqp:resource-deleted"
        await world.settle()


@pytest.mark.slow
@pytest.mark.req("K8", "B24")
async def test_the_journal_hears_of_each_message_that_is_purged_or_moved() -> None:
    options = LifeCycles(per_second=100_000)
    async with world_of(
        MemoryStore(), Queue("q"), Queue("to"), limits=FEW, life_cycles=options
    ) as world:
        world.host.declare_journals()
        reader = world.client(limits=Limits(backlog_max=100_000)).receiver(
            JOURNAL, credit=10_000, filter=selector("reason = 'purged' OR event = 'moved'")
        )
        await world.put(*range(600))
        assert await world.host.space().find("q").move(world.host.space().find("to"), 200) == 200
        assert await world.host.space().find("q").purge() == 400
        await world.settle()
        world.host.services.journals.flush() if hasattr(
            world.host.services.journals, "flush"
        ) else None
        await world.settle()
        said = [
            (each.application_properties["event"], each.application_properties["sequence"])
            for each in reader.messages
        ]
        assert said == [
            *(("moved", n) for n in range(200)),
            *(("dropped", n) for n in range(200, 600)),
        ]
        stats = world.stats("q")
        assert (stats.available, stats.bytes, stats.dropped) == (0, 0, 400)


@pytest.mark.slow
@pytest.mark.req("B17", "B24")
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_ring_drops_the_oldest_and_not_what_was_taken_out_of_turn(
    kept: Callable[[], Any], at_once: bool
) -> None:
    ring = Queue("q", overflow="drop-head", dead_letter="dead", length_max=100)
    async with world_of(kept(), ring) as world:
        queue = world.queue()
        await numbered(world, 90)
        far = await world.take(1, filter=selector("n = 80"))
        far.settle(RELEASED)
        far.detach()
        await world.settle()
        # A consumer holds so many messages that there is no reason to read on.
        here = in_memory(queue) - 1
        near = await world.take(here)
        assert near.bodies == list(range(here))
        assert (in_memory(queue), queue.available) == (1, 90 - here)
        sender = world.client().sender("q")
        for n in range(90, 150):
            sender.send(n, durable=True, application_properties={"n": n})
            if not at_once:
                await world.settle()
        await world.settle()
        assert await seen(world, "dead") == list(range(here, here + 50))
        assert await seen(world) == list(range(here + 50, 150))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_a_ring_keeps_the_newest_whatever_is_taken_and_given_back(seed: int) -> None:
    chance = random.Random(seed)
    async with world_of(
        MemoryStore(), Queue("q", overflow="drop-head", length_max=60, dead_letter="dead")
    ) as world:
        sender = world.client().sender("q")
        picky = world.client().receiver("q", filter=selector("n - (n / 7) * 7 = 3"))
        count = 0
        for _ in range(60):
            step = chance.random()
            if step < 0.6:
                for _ in range(chance.randrange(1, 50)):
                    sender.send(count, durable=True, application_properties={"n": count})
                    count += 1
            elif step < 0.8:
                picky.grant(chance.randrange(1, 4))
            else:
                picky.settle(RELEASED)
            await world.settle()
            held = world.stats("q").acquired
            waiting = await seen(world)
            assert len(waiting) + held <= 60
            assert waiting == sorted(waiting)
        # Each message that left was, at that time, the first of those that no consumer held.
        dead = await seen(world, "dead")
        assert len(dead) + len(waiting) + held == count
        mine = [n for n in dead if n % 7 != 3]
        assert mine == sorted(mine)
        assert not mine or not [n for n in waiting if n % 7 != 3 and n < mine[-1]]
