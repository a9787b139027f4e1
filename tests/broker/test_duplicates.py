"""Duplicates are accepted and not put, within a window of time and number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio
from brokers import Controller, World
from paged import Gate

from amqp_rt import Broker, Message
from amqp_rt.broker.durable.facts import DUPLICATES
from amqp_rt.broker.nodes import Queue
from amqp_rt.errors import AmqpError, DeliveryRejected, LinkDetached
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, Rejected
from amqp_rt.stores.base import ChangeSet, Store, StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.values import ULong

ONCE = Queue("q", duplicate_window_s=60)


def shown(world: World, address: str = "q") -> list[Any]:
    return [Message.decode(each).body for each in world.peek(address, 1_000)]


async def bodies(broker: Broker, address: str = "q") -> list[Any]:
    await broker.host.wait_kept()
    return [Message.decode(each).body for each in await broker.peek(address, 1_000)]


# --- The window ---


@pytest.mark.req("B13", "Z11")
def test_what_comes_twice_is_accepted_and_not_put() -> None:
    world = World(ONCE)
    one = world.client().sender("q")
    another = world.client().sender("q")
    one.send("first", message_id="a")
    # From any sender, any number of times, and although the first has been consumed.
    one.send("again", message_id="a")
    another.send("again", "and again", message_id="a")
    world.client().receiver("q", credit=1, settle=ACCEPTED)
    another.send("still", message_id="a")
    another.send("second", message_id="b")
    assert [*one.outcomes, *another.outcomes] == [ACCEPTED] * 6
    assert shown(world) == ["second"]
    # Settled ones too, although their senders get no outcome.
    another.send("settled", settled=True, message_id="b")
    assert shown(world) == ["second"]
    stats = world.stats("q")
    assert (stats.enqueued, stats.dropped, stats.accepted) == (2, 0, 1)


@pytest.mark.req("B13", "Z11")
def test_the_window_ends_after_its_time_and_is_not_prolonged() -> None:
    world = World(ONCE)
    out = world.client().sender("q")
    out.send(1, message_id="a")
    world.time.now += 59.9
    out.send(2, message_id="a")
    assert shown(world) == [1]
    world.time.now += 0.1
    out.send(3, message_id="a")
    assert shown(world) == [1, 3]
    # With nothing coming, the sweep forgets.
    (window,) = world.host.services.windows
    assert len(window) == 1
    world.time.now += 60
    world.host.sweep()
    assert len(window) == 0


@pytest.mark.req("B13", "M12")
def test_ids_are_compared_with_their_types_and_messages_without_one_always_come() -> None:
    world = World(ONCE)
    out = world.client().sender("q")
    octets = UUID(int=5).bytes
    ids = [ULong(5), "5", octets, UUID(bytes=octets), octets.decode("latin-1"), "", b""]
    for message_id in ids + ids:
        out.send(message_id, message_id=message_id)
    assert len(shown(world)) == len(ids)
    out.send("none", "none")
    # A message of another format has no properties that could be read.
    out.send_raw(b"no AMQP", message_format=7)
    out.send_raw(b"no AMQP", message_format=7)
    assert world.stats("q").available == len(ids) + 4


@pytest.mark.req("B13")
def test_a_queue_without_the_option_takes_everything() -> None:
    world = World(Queue("q"))
    out = world.client().sender("q")
    out.send(1, 2, message_id="a")
    assert shown(world) == [1, 2]


@pytest.mark.req("B13", "B24")
def test_a_duplicate_needs_no_room() -> None:
    world = World(Queue("q", duplicate_window_s=60, length_max=1, overflow="reject"))
    out = world.client().sender("q")
    out.send("first", message_id="a")
    out.send("again", message_id="a")
    out.send("too much", message_id="b")
    assert out.outcomes[:2] == [ACCEPTED] * 2
    assert isinstance(out.outcomes[2], Rejected)
    # A refused message has not arrived, and may be sent again.
    world.client().receiver("q", credit=1, settle=ACCEPTED)
    out.send("second try", message_id="b")
    assert shown(world) == ["second try"]


@pytest.mark.req("B13")
def test_what_is_moved_inside_is_not_lost() -> None:
    world = World(
        Queue("work", dead_letter="dead"), Queue("dead", duplicate_window_s=60), Queue("other")
    )
    client = world.client()
    client.sender("work").send("one", "two", message_id="a")
    client.sender("other").send("three", message_id="a")
    client.receiver("work", credit=9, settle=Rejected())
    world.move("other", "dead", 1)
    # Dead letters and moved messages are different messages, whatever their ids.
    assert shown(world, "dead") == ["one", "two", "three"]


@pytest.mark.req("B13")
def test_within_the_process_too() -> None:
    world = World(ONCE)
    message = Message("m", message_id="a").encode()
    world.host.space().publish("q", message)
    world.host.space().publish("q", message)
    world.client().sender("q").send("m", message_id="a")
    assert shown(world) == ["m"]


@pytest.mark.req("B13")
def test_only_so_many_are_remembered() -> None:
    """At the bound the first is known still, with one more it is forgotten."""
    world = World(ONCE, limits=Limits(duplicates_max=3))
    out = world.client().sender("q")
    for n in range(3):
        out.send(n, message_id=ULong(n))
    out.send("again", message_id=ULong(0))
    assert shown(world) == [0, 1, 2]
    out.send(3, message_id=ULong(3))
    out.send("again", message_id=ULong(1))
    out.send("forgotten", message_id=ULong(0))
    assert shown(world) == [0, 1, 2, 3, "forgotten"]
    (window,) = world.host.services.windows
    assert len(window) == 3


@pytest.mark.req("B13")
def test_the_option_can_come_and_go() -> None:
    world = World(Queue("q"))
    out = world.client().sender("q")
    out.send(1, message_id="a")
    world.host.space().update(ONCE)
    out.send(2, 3, message_id="a")
    assert shown(world) == [1, 2]
    world.host.space().update(Queue("q", duplicate_window_s=1))
    world.time.now += 1
    out.send(4, message_id="a")
    world.host.space().update(Queue("q"))
    out.send(5, message_id="a")
    assert shown(world) == [1, 2, 4, 5]
    assert not world.host.services.windows
    with pytest.raises(ValueError, match="duplicate_window_s is at least"):
        Queue("q", duplicate_window_s=0)


# --- Transactions ---


@pytest.mark.req("B13", "R3")
def test_in_a_transaction_what_is_committed_counts() -> None:
    world = World(ONCE)
    client = world.client()
    control = Controller(client)
    out = client.sender("q")
    rolled_back = control.declare()
    out.post(rolled_back, "never", message_id="a")
    assert control.discharge(rolled_back, fail=True) == "accepted"
    txn = control.declare()
    out.post(txn, "first", "again", message_id="a")
    out.send("before", message_id="b")
    out.post(txn, "b again", message_id="b")
    assert shown(world) == ["before"]
    assert control.discharge(txn) == "accepted"
    assert shown(world) == ["before", "first"]
    out.send("after", message_id="a")
    assert shown(world) == ["before", "first"]
    queue = world.host.space().find("q").held
    assert (queue.held, queue.pending) == (0, 0)
    assert queue.bytes == sum(len(each) for each in world.peek("q", 9))


# --- The store ---


class Slow(MemoryStore):
    """A disk that can be full, or fail."""

    full = False
    fails = False

    def commit(self, batch: ChangeSet) -> None:
        if self.fails:
            raise StoreFailed("the disk failed")
        if self.full and batch.puts:
            raise StoreFull("the disk is full")
        super().commit(batch)


@pytest.mark.req("B13", "Z11", "B7")
async def test_the_window_outlives_the_broker(kept: Callable[[], Store]) -> None:
    async with Broker(store=kept()) as broker:
        await broker.declare(ONCE, Queue("short", duplicate_window_s=0.001))
        async with broker.local() as peer, peer.sender("q") as out:
            receipts = [
                out.send_nowait(n, durable=True, message_id=f"id-{n % 50}") for n in range(100)
            ]
            for receipt in receipts:
                await receipt.accepted()
            await out.send("in memory", message_id="transient")
            async with peer.sender("short") as short, peer.receiver("q") as messages:
                await short.send("a", durable=True, message_id="a")
                (await messages.receive()).accept()
    store = kept()
    async with Broker(store=store) as broker, broker.local() as peer:
        assert await bodies(broker) == list(range(1, 50))
        async with peer.sender("q") as out, peer.sender("short") as short:
            for n in range(50):
                await out.send("again", durable=True, message_id=f"id-{n}")
            # Nothing was kept of this one, so that it may come again.
            await out.send("was lost", message_id="transient")
            await short.send("b", durable=True, message_id="a")
        assert await bodies(broker) == [*range(1, 50), "was lost"]
        assert await bodies(broker, "short") == ["a", "b"]
        await broker.delete("q")
        await broker.delete("short")
        assert store.facts(DUPLICATES.name) == []


@pytest.mark.req("B13", "B7")
async def test_a_window_that_is_gone_is_not_found_again(kept: Callable[[], Store]) -> None:
    async with Broker(store=kept()) as broker, broker.local() as peer:
        await broker.declare(ONCE)
        async with peer.sender("q") as out:
            await out.send(1, durable=True, message_id="a")
    store = kept()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q") as out:
            await out.send(2, durable=True, message_id="a")
        assert await bodies(broker) == [1, 2]
        assert store.facts(DUPLICATES.name) == []


@pytest.mark.req("B13", "B7")
async def test_a_duplicate_is_accepted_when_the_first_is_safe() -> None:
    gate = Gate()
    store = Slow()
    async with Broker(store=store, executor=gate) as broker:
        await broker.declare(ONCE)
        async with broker.local() as peer, peer.sender("q") as one, peer.sender("q") as two:
            gate.opened = trio.Event()
            first = one.send_nowait("first", durable=True, message_id="a")
            again = two.send_nowait("again", durable=True, message_id="a")
            with trio.move_on_after(0.05):
                await again.outcome()
            assert not first.done
            assert not again.done
            gate.opened.set()
            await first.accepted()
            await again.accepted()
            assert await bodies(broker) == ["first"]


@pytest.mark.req("B13", "B7", "B24")
async def test_a_duplicate_of_what_is_refused_is_refused_and_may_come_again() -> None:
    gate = Gate()
    store = Slow()
    async with Broker(store=store, executor=gate) as broker:
        await broker.declare(ONCE)
        async with broker.local() as peer, peer.sender("q") as one, peer.sender("q") as two:
            gate.opened = trio.Event()
            store.full = True
            first = one.send_nowait("first", durable=True, message_id="a")
            again = two.send_nowait("again", durable=True, message_id="a")
            with trio.move_on_after(0.05):
                await again.outcome()
            gate.opened.set()
            for receipt in (first, again):
                with pytest.raises(DeliveryRejected) as refused:
                    await receipt.accepted()
                assert refused.value.condition == "amqp:resource-limit-exceeded"
            store.full = False
            await two.send("third time", durable=True, message_id="a")
            await one.send("fourth", durable=True, message_id="a")
            assert await bodies(broker) == ["third time"]
            assert len(store.facts(DUPLICATES.name)) == 1


@pytest.mark.req("B13", "B7")
async def test_a_duplicate_of_what_is_in_doubt_gets_no_answer() -> None:
    gate = Gate()
    store = Slow()
    async with Broker(store=store, executor=gate) as broker:
        await broker.declare(ONCE)
        async with broker.local() as peer, peer.sender("q") as one, peer.sender("q") as two:
            await one.send("before", durable=True)
            await two.send("before", durable=True)
            gate.opened = trio.Event()
            first = one.send_nowait("first", durable=True, message_id="a")
            with trio.move_on_after(0.05):
                await first.outcome()
            again = two.send_nowait("again", durable=True, message_id="a")
            with trio.move_on_after(0.05):
                await again.outcome()
            store.fails = True
            gate.opened.set()
            for receipt in (first, again):
                with pytest.raises(LinkDetached, match="whether"):
                    await receipt.accepted()


@pytest.mark.req("B13", "R10")
async def test_a_transaction_keeps_its_ids_with_its_messages() -> None:
    gate = Gate()
    store = Slow()
    async with Broker(store=store, executor=gate) as broker:
        await broker.declare(ONCE)
        async with broker.local() as peer, peer.sender("q") as out:
            store.full = True
            with pytest.raises(AmqpError):
                async with peer.transaction() as txn:
                    await out.send("refused", durable=True, message_id="a", transaction=txn)
            store.full = False
            async with peer.transaction() as txn:
                await out.send("one", durable=True, message_id="a", transaction=txn)
                await out.send("twice", durable=True, message_id="a", transaction=txn)
            assert await bodies(broker) == ["one"]
            # While the first message may still be refused, the second cannot be called a duplicate.
            gate.opened = trio.Event()
            first = out.send_nowait("two", durable=True, message_id="b")
            with pytest.raises(AmqpError, match="is being written"):
                async with peer.transaction() as txn:
                    await out.send("two again", durable=True, message_id="b", transaction=txn)
            gate.opened.set()
            await first.accepted()
    async with Broker(store=store) as broker, broker.local() as peer:
        async with peer.sender("q") as out:
            await out.send("again", durable=True, message_id="a")
        assert await bodies(broker) == ["one", "two"]


@pytest.mark.req("B13", "B7")
async def test_large_messages_too(tmp_path: Path) -> None:
    limits = Limits(message_size_max=64 * 1024)
    large = bytes(300_000)
    async with Broker(store=SQLiteStore(tmp_path / "broker.db"), limits=limits) as broker:
        await broker.declare(ONCE)
        async with broker.local() as peer, peer.sender("q") as out:
            for _ in range(3):
                await out.send(large, durable=True, message_id="large")
            assert broker.stats("q").available == 1
            assert len(large) < broker.stats("q").bytes < 2 * len(large)
            async with peer.transaction() as txn:
                await out.send(large, durable=True, message_id="large", transaction=txn)
                await out.send(large, durable=True, message_id="other", transaction=txn)
                await out.send(large, durable=True, message_id="other", transaction=txn)
            await out.send(large, durable=True, message_id="other")
            assert broker.stats("q").available == 2
            assert 2 * len(large) < broker.stats("q").bytes < 3 * len(large)
            assert await broker.purge("q") == 2
            await out.send(b"small", durable=True, message_id="large")
            assert broker.stats("q").available == 0
            assert broker.stats("q").bytes == 0
