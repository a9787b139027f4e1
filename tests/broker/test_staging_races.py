"""Epochs while other things happen: at each place where a commit waits for the store (K3)."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from brokers import commit_epoch, committed_epoch
from crashed import Photographed
from stalls import Stalls, beside

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Queue
from amqp_rt.broker.durable import facts
from amqp_rt.broker.staging.attempts import ATTEMPT, COMMITTED, EPOCH, PART, PRODUCER, RUN
from amqp_rt.errors import LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.stores.base import ChangeSet, StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore

pytestmark = pytest.mark.req("K3")

#: Fields of a part in a commit: part, attempt, count, crc.
Named = tuple[int, int, int, int]


def claim(epoch: int = 0, part: int = 0, attempt: int = 0, run: str = "one") -> dict[Any, Any]:
    return {PRODUCER: "job", RUN: run, EPOCH: epoch, PART: part, ATTEMPT: attempt}


def named(bodies: Sequence[Any], part: int = 0, attempt: int = 0) -> Named:
    crc = 0
    for body in bodies:
        crc = zlib.crc32(Message(body, durable=True).encode(), crc)
    return part, attempt, len(bodies), crc


async def stage(peer: Connection, bodies: Sequence[Any], **said: Any) -> Named:
    claimed = claim(**said)
    async with peer.sender("out", properties=claimed) as out:
        for body in bodies:
            await out.send(body, durable=True)
    return named(bodies, claimed[PART], claimed[ATTEMPT])


async def published(broker: Broker) -> list[Any]:
    await broker.host.wait_kept()
    return [Message.decode(each).body for each in await broker.peek("out", 100)]


async def after_restart(store: MemoryStore) -> list[Any]:
    """Return the bodies in the queue after the broker was started again and had time to publish."""
    async with Broker(store=store, executor=Stalls()) as broker:
        await trio.testing.wait_all_tasks_blocked()
        assert broker.host.staging.area.bytes == 0
        return await published(broker)


async def staged(*parts: Sequence[Any]) -> tuple[MemoryStore, list[Named]]:
    """A store in which *parts* of epoch 0 have been staged, of a broker that has stopped."""
    store = MemoryStore()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        found = [await stage(peer, bodies, part=part) for part, bodies in enumerate(parts)]
    return store, found


Happens = Callable[[Broker, Connection], Awaitable[None]]


async def take_over(broker: Broker, peer: Connection) -> None:
    await stage(peer, [], run="two")


async def take_over_by_committing(broker: Broker, peer: Connection) -> None:
    host = broker.host
    async with trio.open_nursery() as nursery:
        beside(nursery, commit_epoch, host, "out", "job", "two", 7, [])
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def begin_anew(broker: Broker, peer: Connection) -> None:
    async with peer.sender("out", properties=claim()):
        pass


async def delete(broker: Broker, peer: Connection) -> None:
    broker.host.space().delete("out")


async def replace(broker: Broker, peer: Connection) -> None:
    broker.host.space().delete("out")
    broker.host.space().declare(Queue("out"))


@pytest.mark.parametrize(
    ("happens", "condition"),
    [
        (take_over, "amqp:link:stolen"),
        (take_over_by_committing, "amqp:link:stolen"),
        (begin_anew, "amqp:precondition-failed"),
        (delete, "amqp:resource-deleted"),
        (replace, "amqp:resource-deleted"),
    ],
)
@pytest.mark.parametrize("recounted", [0, 1, 2])
async def test_what_changes_while_stages_are_counted_counts(
    happens: Happens, condition: str, recounted: int
) -> None:
    store, parts = await staged("ab", "cd")
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        passed = [stalls.at("messages") for _ in range(recounted + 1)]
        for stall in passed[:-1]:
            stall.released.set()
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        async with passed[-1]:
            await happens(broker, peer)
        assert await answer.get() == condition
        if happens not in (delete, replace):
            assert committed_epoch(broker.host, "out", "job") != 0
            assert await published(broker) == []
    if happens in (take_over, begin_anew):
        # Nothing of the decision was written either.
        async with Broker(store=store) as broker:
            assert committed_epoch(broker.host, "out", "job") == -1
            assert await published(broker) == []


async def test_the_run_is_checked_when_its_turn_comes() -> None:
    store, parts = await staged("ab")
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        commit = partial(commit_epoch, broker.host)
        stall = stalls.at("messages")
        first = beside(nursery, commit, "out", "job", "one", 0, parts)
        await stall.reached.wait()
        # The second waits for the first, and has nothing to recount itself.
        second = beside(nursery, commit, "out", "job", "one", 5, [])
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            await take_over(broker, peer)
        assert await first.get() == await second.get() == "amqp:link:stolen"
        assert committed_epoch(broker.host, "out", "job") == -1
        assert await commit("out", "job", "two", 0, [])


async def test_a_run_that_was_replaced_is_not_told_of_later_commits() -> None:
    stalls = Stalls()
    async with (
        Broker(store=MemoryStore(), executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        stall = stalls.at("commit")
        first = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 3, [])
        await stall.reached.wait()
        second = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 3, [])
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            await take_over(broker, peer)
        assert await first.get() is True
        assert await second.get() == "amqp:link:stolen"


async def test_nothing_is_added_while_the_rest_is_counted() -> None:
    """Messages that come while other parts are counted are not those that the commit speaks of."""
    store, (_, second) = await staged("ab", "cd")
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
        peer.sender("out", properties=claim(attempt=1)) as out,
    ):
        await out.send("a", durable=True)
        stall = stalls.at("messages")
        parts = [named("a", attempt=1), second]
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        await stall.reached.wait()
        receipt = out.send_nowait("b", durable=True)
        await trio.testing.wait_all_tasks_blocked()
        async with stall:
            pass
        assert await answer.get() == "amqp:precondition-failed"
        await receipt.accepted()
        again = [named("ab", attempt=1), second]
        assert await commit_epoch(broker.host, "out", "job", "one", 0, again)
        assert await published(broker) == ["a", "b", "c", "d"]


async def test_what_is_being_written_is_not_committed_over() -> None:
    stalls = Stalls()
    async with (
        Broker(store=MemoryStore(), executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as out:
            await out.send("a", durable=True)
            stall = stalls.at("commit")
            receipt = out.send_nowait("b", durable=True)
            await stall.reached.wait()
            answer = beside(
                nursery, commit_epoch, broker.host, "out", "job", "one", 0, [named("a")]
            )
            assert await answer.get() == "amqp:precondition-failed"
            async with stall:
                pass
            await receipt.accepted()
        assert await commit_epoch(broker.host, "out", "job", "one", 0, [named("ab")])
        assert await published(broker) == ["a", "b"]


# --- while the decision is written -------------------------------------------------------------


async def test_an_epoch_is_said_to_be_committed_when_that_is_kept() -> None:
    store, parts = await staged("ab")
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        stall = stalls.at("commit")
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        async with stall:
            assert committed_epoch(broker.host, "out", "job") == -1
            async with peer.sender("out", properties=claim(1)) as out:
                assert out.link.properties[COMMITTED] == -1
        assert await answer.get() is True
        assert committed_epoch(broker.host, "out", "job") == 0


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("happens", [take_over, begin_anew, delete, replace])
async def test_what_changes_while_a_decision_is_written_does_not_change_it(
    happens: Happens, refused: bool
) -> None:
    store, parts = await staged("ab", "cd")
    stalls = Stalls()
    gone = happens in (delete, replace)
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        full = StoreFull("the disk is full") if refused else None
        stall = stalls.at("commit", error=full)
        if refused:
            # The unit is tried alone before it is refused.
            stalls.at("commit", error=full).released.set()
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        async with stall:
            await happens(broker, peer)
        if refused:
            assert await answer.get() == "amqp:resource-limit-exceeded"
        else:
            assert await answer.get() == ("amqp:resource-deleted" if gone else True)
        await broker.host.wait_kept()
        if not gone:
            assert await published(broker) == ([] if refused else ["a", "b", "c", "d"])
            assert committed_epoch(broker.host, "out", "job") == (-1 if refused else 0)
        if refused and not gone:
            # The stages hold the messages of the latest run, and of the latest link of each attempt.
            kept = {(0, 0)} if happens is take_over else {(0, 0), (1, 0)}
            (known,) = broker.host.staging.producers.by_node.values()
            assert {each[1:] for each in known["job"].stages} == kept
            assert len(store.facts(facts.STAGES.name)) == len(kept)
            run = "two" if happens is take_over else "one"
            assert await commit_epoch(broker.host, "out", "job", run, 0, [named("")])
            assert broker.host.staging.area.bytes == 0
        assert broker.host.staging.area.bytes == 0
    if happens is not delete:
        expected = ["a", "b", "c", "d"] if not refused and not gone else []
        assert await after_restart(store) == expected
    async with Broker(store=store) as broker:
        if happens is take_over:
            with pytest.raises(LinkRefused):
                async with broker.local() as peer:
                    await stage(peer, [], run="one")


@pytest.mark.parametrize("refused", [False, True])
async def test_a_run_that_begins_while_a_decision_is_written_is_kept_too(refused: bool) -> None:
    store = Photographed()
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        part = await stage(peer, "ab")
        # Something else is being written, so that the decision and the run are written together.
        stall = stalls.at("commit")
        broker.host.space().declare(Queue("other"))
        async with stall:
            begun = len(store.copies) + 1
            if refused:
                for _ in range(2):
                    stalls.at("commit", error=StoreFull("the disk is full")).released.set()
            answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, [part])
            await trio.testing.wait_all_tasks_blocked()
            await take_over(broker, peer)
        assert await answer.get() == ("amqp:resource-limit-exceeded" if refused else True)
        await broker.host.wait_kept()
    for crashed in store.copies[begun:]:
        async with Broker(store=crashed, executor=Stalls()) as broker:
            await trio.testing.wait_all_tasks_blocked()
            committed = committed_epoch(broker.host, "out", "job")
            assert committed == (-1 if refused else 0)
            assert await published(broker) == ([] if refused else ["a", "b"])
    async with Broker(store=store.copies[-1]) as broker, broker.local() as peer:
        # The replacement of the earlier run is known.
        with pytest.raises(LinkRefused):
            await stage(peer, [], run="one")


async def test_a_broker_that_stops_while_it_decides_keeps_the_decision() -> None:
    store, parts = await staged("ab")
    stalls = Stalls()
    async with (
        trio.open_nursery() as nursery,
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
    ):
        stall = stalls.at("commit")
        beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        await stall.reached.wait()
        # The change must not be written over the decision.
        await take_over(broker, peer)
        nursery.start_soon(_release_soon, stall)
    assert await after_restart(store) == ["a", "b"]


async def _release_soon(stall: Any) -> None:
    await trio.testing.wait_all_tasks_blocked()
    stall.released.set()


# --- while it is published ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["messages", "commit"])
async def test_a_decision_is_published_whatever_arrives_meanwhile(call: str) -> None:
    stalls = Stalls()
    store = MemoryStore()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        parts = [await stage(peer, bodies, part=part) for part, bodies in enumerate(["ab", "cd"])]
        if call == "commit":
            stalls.at("commit").released.set()
        stall = stalls.at(call)
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        async with stall:
            await take_over(broker, peer)
            later = beside(nursery, commit_epoch, broker.host, "out", "job", "two", 0, [])
            await trio.testing.wait_all_tasks_blocked()
            assert not later.over.is_set()
        assert await answer.get() is True
        assert await later.get() is False
        assert await published(broker) == ["a", "b", "c", "d"]
    assert await after_restart(store) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("call", ["messages", "commit"])
async def test_a_node_that_goes_while_it_is_published_to(call: str) -> None:
    stalls = Stalls()
    store = MemoryStore()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        parts = [await stage(peer, bodies, part=part) for part, bodies in enumerate(["ab", "cd"])]
        if call == "commit":
            stalls.at("commit").released.set()
        stall = stalls.at(call)
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, parts)
        async with stall:
            await replace(broker, peer)
        assert await answer.get() == "amqp:resource-deleted"
        assert await published(broker) == []
        await broker.host.wait_kept()
        assert store.facts(facts.STAGES.name) == store.facts("epoch-producer") == []
    assert await after_restart(store) == []


async def test_what_cannot_be_read_now_is_published_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An epoch that is decided is never answered before it is there, and never overwritten."""
    stalls = Stalls()
    async with (
        Broker(store=MemoryStore(), executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        part = await stage(peer, "ab")
        for _ in range(2):
            stalls.at("messages", error=StoreFailed("unreadable")).released.set()
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, [part])
        assert await answer.get() is True
        assert await published(broker) == ["a", "b"]


class Given(MemoryStore):
    """A disk that fails for good as soon as it is told to."""

    fails = False

    def commit(self, batch: ChangeSet) -> None:
        if self.fails:
            raise StoreFailed("the disk failed")
        super().commit(batch)


async def test_what_was_decided_before_the_store_was_given_up_comes_with_the_restart() -> None:
    stalls = Stalls()
    store = Given()
    async with (
        Broker(store=store, executor=stalls) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        part = await stage(peer, "ab")
        stall = stalls.at("messages")
        answer = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, [part])
        async with stall:
            store.fails = True
        # Neither "it is there" nor an endless wait.
        assert await answer.get() == "amqp:internal-error"
        again = beside(nursery, commit_epoch, broker.host, "out", "job", "one", 0, [part])
        assert await again.get() == "amqp:internal-error"
    store.fails = False
    assert await after_restart(store) == ["a", "b"]


async def test_a_producer_at_work_is_not_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    stalls = Stalls()
    limits = Limits(epoch_producers_max=1, epoch_producer_s=10)
    async with (
        Broker(store=MemoryStore(), executor=stalls, limits=limits) as broker,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        commit = partial(commit_epoch, broker.host)
        stall = stalls.at("commit")
        answer = beside(nursery, commit, "out", "job", "one", 3, [])
        await stall.reached.wait()
        await trio.sleep(20)
        other = beside(nursery, commit, "out", "other", "one", 0, [])
        assert await other.get() == "amqp:resource-limit-exceeded"
        async with stall:
            pass
        assert await answer.get() is True
        assert committed_epoch(broker.host, "out", "job") == 3
