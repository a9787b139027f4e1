"""Leases while other things happen: at each place where a group waits for the store (K5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from paged import in_memory
from stalls import Answer, Stall, Stalls, beside

from amqp_rt import Broker, Message
from amqp_rt.broker import Queue
from amqp_rt.broker.durable import facts
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.stores.base import StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore

pytestmark = pytest.mark.req("K5")

COUNT = 6


class Group:
    """A broker with a queue of six messages, and a group that has opened a lease of it."""

    def __init__(self, broker: Broker, stalls: Stalls, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.host = broker.host
        self.stalls = stalls
        self.nursery = nursery

    def extend(self, count: int = 2, generation: int = 1) -> Answer:
        return beside(
            self.nursery,
            self.host.leases.extend,
            self.host.space().find("work"),
            "job",
            generation,
            count,
        )

    def beside(self, call: Callable[..., Any], *args: Any) -> Answer:
        return beside(self.nursery, call, *args)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Stall]:
        """Drop the messages that are in memory; the others are being read."""
        stall = self.stalls.at("_read")
        queue = self.host.space().find("work").held
        queue.drop(in_memory(queue))
        assert queue.available == queue.paging.count > 1
        async with stall:
            yield stall

    async def check(self) -> None:
        """Each message waits, or some group that there is has it."""
        await self.host.wait_kept()
        if not self.host.space().has("work"):
            return
        stats = self.host.space().get("work").stats()
        leases = self.host.leases._leases.get(self.host.space().nodes["work"], {})
        held = [each for lease in leases.values() for each in lease.held if each is not None]
        assert stats.acquired == len(held)
        gone = stats.accepted + stats.dropped
        assert stats.available + stats.acquired == stats.enqueued - gone
        assert stats.consumers == len(leases)


@asynccontextmanager
async def group(store: Any = None, **limits: int) -> AsyncIterator[Group]:
    stalls = Stalls()
    async with (
        Broker(store=store or MemoryStore(), executor=stalls, limits=Limits(**limits)) as broker,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("work"))
        for body in range(COUNT):
            broker.publish("work", Message(body, durable=True).encode())
        await broker.host.wait_kept()
        await broker.host.leases.open(broker.host.space().find("work"), "job", 60)
        made = Group(broker, stalls, nursery)
        yield made
        await made.check()


async def after_restart(store: MemoryStore) -> tuple[list[Any], Any]:
    """Return the bodies that wait in the queue after a restart, and the state of the group."""
    async with Broker(store=store, executor=Stalls()) as broker:
        found = [Message.decode(each).body for each in await broker.peek("work", 100)]
        try:
            state = broker.host.leases.state(broker.host.space().find("work"), "job")
        except AmqpError as error:
            assert store.facts(facts.LEASES.name) == store.facts(facts.LEASED.name) == []
            return found, error.condition
        return found, (state.generation, state.first, state.next)


Happens = Callable[[Group], Awaitable[None]]


async def _begin(call: Callable[..., Any], *args: Any) -> None:
    """Run *call* up to where it waits for the store, and no other task before."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await call(*args)


async def release(group: Group) -> None:
    await _begin(group.host.leases.release, group.host.space().find("work"), "job")


async def open_again(group: Group) -> None:
    await _begin(group.host.leases.open, group.host.space().find("work"), "job")


async def release_and_open(group: Group) -> None:
    await release(group)
    await open_again(group)


async def delete(group: Group) -> None:
    group.host.space().delete("work")


async def expire(group: Group) -> None:
    leases = group.host.leases
    for groups in leases._leases.values():
        for lease in groups.values():
            lease.ends_at = 0.0
    leases.sweep()


HAPPENS = [
    (release, "amqp:not-found"),
    (open_again, "amqp:link:stolen"),
    (release_and_open, "amqp:not-found"),
    (delete, "amqp:not-found"),
    (expire, "amqp:not-found"),
]


@pytest.mark.parametrize(("happens", "condition"), HAPPENS)
@pytest.mark.parametrize("refused", [False, True])
async def test_what_changes_while_numbers_are_written(
    happens: Happens, condition: str, refused: bool
) -> None:
    store = MemoryStore()
    async with group(store) as job:
        full = StoreFull("the disk is full") if refused else None
        stall = job.stalls.at("commit", error=full)
        if refused:
            job.stalls.at("commit", error=full).released.set()
        first = job.extend()
        await stall.reached.wait()
        # The second one waits for the first.
        second = job.extend()
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            await happens(job)
        assert await first.get() == ("amqp:resource-limit-exceeded" if refused else condition)
        assert await second.get() == condition
        await job.check()
        if happens is open_again and not refused:
            # Messages with a number belong to the group, however often it was opened since.
            assert job.host.leases.state(job.host.space().find("work"), "job").next == 2
            assert job.host.space().get("work").stats().requeued == 0
        if happens is delete:
            assert store.facts(facts.LEASES.name) == store.facts(facts.LEASED.name) == []
            return
    found, state = await after_restart(store)
    every = list(range(COUNT))
    if happens is open_again and not refused:
        assert (found, state) == (every[2:], (2, 0, 2))
    elif happens is open_again:
        assert found == every
        assert state[0] == 2
    else:
        expected = (1, 0, 0) if happens is release_and_open else "amqp:not-found"
        assert (found, state) == (every, expected)


@pytest.mark.parametrize(("happens", "condition"), HAPPENS)
async def test_what_changes_while_messages_are_read(happens: Happens, condition: str) -> None:
    """Messages that are in the store only take a moment to read before they can be leased."""
    store = MemoryStore()
    async with group(store, queue_memory_messages_max=2) as job, job.reading() as stall:
        answer = job.extend()
        await trio.testing.wait_all_tasks_blocked()
        left = job.host.space().get("work").stats().available
        await happens(job)
        stall.released.set()
        assert await answer.get() == condition
        await trio.testing.wait_all_tasks_blocked()
    if happens is not delete:
        found, state = await after_restart(store)
        assert found == list(range(COUNT))[-left:]
        if happens is open_again:
            assert state == (2, 0, 0)


async def test_nothing_is_set_aside_for_a_request_that_was_cancelled() -> None:
    async with group(queue_memory_messages_max=2) as job, job.reading() as stall:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    job.host.leases.extend, job.host.space().find("work"), "job", 1, 2
                )
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        stall.released.set()
        await trio.testing.wait_all_tasks_blocked()
        await job.check()
        assert job.host.leases.state(job.host.space().find("work"), "job").next == 0


async def test_a_request_that_is_cancelled_while_numbers_are_written_waits_for_them() -> None:
    """Messages are set aside with their numbers or not at all, and none is named before it is kept."""
    async with group() as job:
        stall = job.stalls.at("commit")
        with trio.CancelScope() as scope:
            job.nursery.start_soon(_cancel_then_release, scope, stall, job)
            await job.host.leases.extend(job.host.space().find("work"), "job", 1, 2)
        assert job.host.leases.state(job.host.space().find("work"), "job").next == 2


async def _cancel_then_release(scope: trio.CancelScope, stall: Stall, job: Group) -> None:
    async with stall:
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert job.host.leases.state(job.host.space().find("work"), "job").next == 0


@pytest.mark.parametrize(("happens", "condition"), HAPPENS)
async def test_what_changes_when_something_was_just_drawn(happens: Happens, condition: str) -> None:
    async with group() as job:
        await job.extend(COUNT).get()
        # Messages wait in the queue for other consumers, so that the group waits for more.
        await job.host.leases.give_back(job.host.space().find("work"), "job", 1, [(0, COUNT)])
        answer = job.extend(2)
        await trio.testing.wait_all_tasks_blocked()
        job.host.space().publish("work", Message("more").encode())
        # The task that has acquired the message has had no turn since.
        await happens(job)
        assert await answer.get() == condition
        await trio.testing.wait_all_tasks_blocked()
        if happens is not delete:
            assert job.host.space().get("work").stats().available == COUNT + 1


async def test_what_was_just_drawn_for_a_request_that_is_cancelled_goes_back() -> None:
    async with group() as job:
        await job.extend(COUNT).get()
        await job.host.leases.give_back(job.host.space().find("work"), "job", 1, [(0, COUNT)])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    job.host.leases.extend, job.host.space().find("work"), "job", 1, 1
                )
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
                job.host.space().publish("work", Message("more").encode())
        assert job.host.space().get("work").stats().available == COUNT + 1


async def test_two_that_open_have_not_the_same_generation() -> None:
    async with group() as job:
        stall = job.stalls.at("commit")
        first = job.beside(job.host.leases.open, job.host.space().find("work"), "job")
        await stall.reached.wait()
        second = job.beside(job.host.leases.open, job.host.space().find("work"), "job")
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            pass
        assert await first.get() == "amqp:link:stolen"
        assert (await second.get()).generation == 3


async def test_a_number_is_said_when_it_is_kept() -> None:
    """A reader, or who accepts, cannot name what is not on the disk."""
    async with group() as job:
        await job.extend(2).get()
        stall = job.stalls.at("commit")
        answer = job.extend(2)
        async with stall:
            assert job.host.leases.state(job.host.space().find("work"), "job").next == 2
            accepted = job.beside(
                job.host.leases.accept, job.host.space().find("work"), "job", 1, 3
            )
            assert await accepted.get() == "amqp:invalid-field"
            back = job.beside(
                job.host.leases.give_back, job.host.space().find("work"), "job", 1, [(2, 3)]
            )
            assert await back.get() == "amqp:invalid-field"
        assert (await answer.get()).next == 4


@pytest.mark.parametrize("refused", [False, True])
async def test_what_is_accepted_while_numbers_are_written(refused: bool) -> None:
    store = MemoryStore()
    async with group(store) as job:
        await job.extend(2).get()
        full = StoreFull("the disk is full") if refused else None
        stall = job.stalls.at("commit", error=full)
        if refused:
            job.stalls.at("commit", error=full).released.set()
        more = job.extend(2)
        await stall.reached.wait()
        accepted = job.beside(job.host.leases.accept, job.host.space().find("work"), "job", 1, 1)
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            back = job.beside(
                job.host.leases.give_back, job.host.space().find("work"), "job", 1, [(1, 2)]
            )
            await trio.testing.wait_all_tasks_blocked()
        assert (await accepted.get()).first == (await back.get()).first == 1
        if refused:
            assert await more.get() == "amqp:resource-limit-exceeded"
        else:
            assert (await more.get()).next == 4
        await job.check()
        assert job.host.leases.state(job.host.space().find("work"), "job").next == (
            2 if refused else 4
        )
    found, state = await after_restart(store)
    assert found == ([1, 2, 3, 4, 5] if refused else [1, 4, 5])
    assert state[1] == 1


async def test_a_group_that_cannot_be_kept_is_not_there() -> None:
    store = MemoryStore()
    async with group(store) as job:
        for _ in range(2):
            job.stalls.at("commit", error=StoreFull("the disk is full")).released.set()
        answer = job.beside(job.host.leases.open, job.host.space().find("work"), "other")
        assert await answer.get() == "amqp:resource-limit-exceeded"
        with pytest.raises(AmqpError, match="no group"):
            job.host.leases.state(job.host.space().find("work"), "other")
        await job.check()


async def test_a_group_whose_opening_is_refused_stays_with_who_opened_it_meanwhile() -> None:
    async with group() as job:
        stall = job.stalls.at("commit", error=StoreFull("the disk is full"))
        job.stalls.at("commit", error=StoreFull("the disk is full")).released.set()
        first = job.beside(job.host.leases.open, job.host.space().find("work"), "other")
        await stall.reached.wait()
        second = job.beside(job.host.leases.open, job.host.space().find("work"), "other")
        await trio.testing.wait_all_tasks_blocked()
        stall.released.set()
        assert await first.get() == "amqp:resource-limit-exceeded"
        assert (await second.get()).generation == 2
        assert job.host.leases.state(job.host.space().find("work"), "other").generation == 2


async def test_nothing_of_a_queue_without_leases_is_remembered() -> None:
    async with group() as job:
        job.host.space().declare(Queue("locking", lock_s=1))
        with pytest.raises(AmqpError, match="cannot be leased"):
            await job.host.leases.open(job.host.space().find("locking"), "job")
        assert len(job.host.leases._leases) == 1


async def test_a_store_that_is_given_up_answers_who_waits() -> None:
    async with group() as job:
        for _ in range(2):
            job.stalls.at("commit", error=StoreFailed("the disk failed")).released.set()
        assert await job.extend().get() == "amqp:internal-error"
        assert await job.extend().get() == "amqp:internal-error"
