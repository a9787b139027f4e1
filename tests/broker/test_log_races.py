"""Logs while other things happen: at each place where a call waits for the store (K4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio.testing
from stalls import Stall, Stalls, beside

from amqp_rt import Broker, Message
from amqp_rt.broker import Log
from amqp_rt.broker.durable.facts import CURSORS, HOLDS
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.stores.base import ChangeSet, StoreFull
from amqp_rt.stores.memory import MemoryStore

pytestmark = pytest.mark.req("K4")

GONE = "amqp:resource-deleted"


class Logs:
    """A broker with a log of two partitions, over a store that a test can stop."""

    def __init__(self, broker: Broker, stalls: Stalls, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.host = broker.host
        self.stalls = stalls
        self.nursery = nursery

    def facts(self) -> list[str]:
        """Return the kinds of the cursors and holds in the store."""
        store = self.broker.host.journal.store
        return [kind.name for kind in (CURSORS, HOLDS) for _ in store.facts(kind.name)]

    async def fill(self) -> None:
        """Put four records into each partition, each in a chunk of its own."""
        for number in range(8):
            self.host.space().publish(f"log/partitions/{number % 2}", Message(number).encode())
            await self.host.wait_kept()

    @asynccontextmanager
    async def writing(self, error: Exception | None = None) -> AsyncIterator[Stall]:
        """Stop the next batch, which something before this has begun, or begins in here."""
        stall = self.stalls.at("commit", error=error)
        yield stall
        stall.released.set()


@asynccontextmanager
async def logs(**limits: int) -> AsyncIterator[Logs]:
    stalls = Stalls()
    async with (
        Broker(store=MemoryStore(), executor=stalls, limits=Limits(**limits)) as broker,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Log("log", partitions=2))
        await broker.host.wait_kept()
        yield Logs(broker, stalls, nursery)


@pytest.mark.parametrize("call", ["set_cursor", "hold"])
@pytest.mark.parametrize("again", [False, True])
async def test_a_log_is_deleted_while_a_fact_of_it_is_written(call: str, again: bool) -> None:
    async with logs() as world:
        host = world.host
        args = ("log", "g", {0: 7}) if call == "set_cursor" else ("log", "g", {0: 7}, 60)
        async with world.writing() as stall:
            answer = beside(world.nursery, getattr(world.broker, call), *args)
            await stall.reached.wait()
            host.space().delete("log")
            if again:
                host.space().declare(Log("log", partitions=2))
        assert await answer.get() == GONE
        await host.wait_kept()
        assert world.facts() == []
        if again:
            (log,) = host.services.logs
            assert (log.cursors, log.holds) == ({}, {})


async def test_a_log_is_deleted_while_another_waits_for_its_turn() -> None:
    async with logs() as world:
        host = world.host
        async with world.writing() as stall:
            first = beside(world.nursery, world.broker.set_cursor, "log", "g", {0: 7})
            await stall.reached.wait()
            others = [
                beside(world.nursery, world.broker.set_cursor, "log", "h", {0: 7}),
                beside(world.nursery, world.broker.hold, "log", "h", {0: 7}, 60),
            ]
            await trio.testing.wait_all_tasks_blocked()
            host.space().delete("log")
        assert [await each.get() for each in (first, *others)] == [GONE] * 3
        await host.wait_kept()
        assert world.facts() == []


async def test_two_parts_of_a_cursor_are_set_at_the_same_time() -> None:
    async with logs() as world:
        host = world.host
        async with world.writing() as stall:
            first = beside(world.nursery, world.broker.set_cursor, "log", "g", {0: 7})
            await stall.reached.wait()
            second = beside(world.nursery, world.broker.set_cursor, "log", "g", {1: 8})
            await trio.testing.wait_all_tasks_blocked()
        assert (await first.get(), await second.get()) == (None, None)
        assert host.space().find("log").cursor("g") == {0: 7, 1: 8}


async def test_groups_that_come_at_the_same_time_do_not_exceed_the_bound() -> None:
    async with logs(log_groups_max=1, log_holds_max=1) as world:
        async with world.writing() as stall:
            first = beside(world.nursery, world.broker.set_cursor, "log", "g", {0: 7})
            await stall.reached.wait()
            second = beside(world.nursery, world.broker.set_cursor, "log", "h", {0: 7})
            await trio.testing.wait_all_tasks_blocked()
        assert await first.get() is None
        assert await second.get() == "amqp:resource-limit-exceeded"


@pytest.mark.parametrize("call", ["set_cursor", "hold"])
async def test_what_a_cancelled_caller_had_written_is_known(call: str) -> None:
    async with logs() as world:
        host = world.host
        (log,) = host.services.logs
        args = ("log", "g", {0: 7}) if call == "set_cursor" else ("log", "g", {0: 7}, 60)
        async with world.writing() as stall:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(getattr(world.broker, call), *args)
                    await stall.reached.wait()
                    scope.cancel()
        await host.wait_kept()
        assert len(world.facts()) == 1
        assert "g" in (log.cursors if call == "set_cursor" else log.holds)
        host.space().delete("log")
        await host.wait_kept()
        assert world.facts() == []


async def test_a_hold_that_is_refused_leaves_what_was_held() -> None:
    async with logs() as world:
        host = world.host
        (log,) = host.services.logs
        await host.space().find("log").hold("h", {0: 3}, 60)
        before = dict(log.holds)
        async with world.writing(StoreFull("no room")):
            # Changes that are written one by one have no room then either.
            again = world.stalls.at("commit", error=StoreFull("no room"))
            again.released.set()
            answer = beside(world.nursery, world.broker.hold, "log", "h", {0: 9}, 60)
            await trio.testing.wait_all_tasks_blocked()
        assert await answer.get() == "amqp:resource-limit-exceeded"
        assert log.holds == before
        with pytest.raises(AmqpError, match="characters"):
            await host.space().find("log").hold("", {0: 9}, 60)
        assert log.holds == before


async def test_records_are_held_while_retention_asks_the_store() -> None:
    async with logs() as world:
        host = world.host
        (log,) = host.services.logs
        await world.fill()
        log.keep(None, 1)
        stall = world.stalls.at("chunks")
        retained = beside(world.nursery, log.retain)
        async with stall:
            held = beside(world.nursery, world.broker.hold, "log", "h", {0: 0}, 60)
            await trio.testing.wait_all_tasks_blocked()
        assert (await retained.get(), await held.get()) == (None, None)
        assert host.space().find("log").log_stats().partitions[0].first == 0


@pytest.mark.parametrize("call", ["retain", "purge"])
async def test_a_log_is_deleted_while_its_records_are_dropped(
    call: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with logs() as world:
        host = world.host
        (log,) = host.services.logs
        await world.fill()
        log.keep(None, 1)
        async with world.stalls.at("extent"):
            answer = beside(world.nursery, getattr(log, call))
            await trio.testing.wait_all_tasks_blocked()
            host.space().delete("log")
            trims: list[int] = []
            trim = ChangeSet.trim
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ChangeSet,
                "trim",
                lambda batch, number, to: (trims.append(number), trim(batch, number, to)),
            )
            await answer.get()
            await host.wait_kept()
        assert trims == []


async def test_facts_of_logs_that_are_gone_are_dropped_at_the_start() -> None:
    store = MemoryStore()
    async with Broker(store=store) as broker:
        await broker.declare(Log("log"))
        await broker.set_cursor("log", "g", {0: 7})
        ((key, value),) = store.facts(CURSORS.name)
        broker.host.space().delete("log")
        await broker.host.wait_kept()
        assert list(store.facts(CURSORS.name)) == []
        broker.host.journal.loose.put_fact(CURSORS.name, key, value)
    async with Broker(store=store) as broker:
        await broker.host.wait_kept()
        assert list(store.facts(CURSORS.name)) == []
        await broker.declare(Log("log"))
        assert broker.cursor("log", "g") == {}
