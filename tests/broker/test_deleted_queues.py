"""Queues whose messages go elsewhere when they are deleted, as alternate exchanges of 0-10 want it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from brokers import check_queues, client_of
from crashed import Photographed
from trio.testing import MockClock, wait_all_tasks_blocked

from amqp_rt import Broker, Receiver
from amqp_rt.addresses import LEAVING
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.errors import AmqpError, LinkDetached
from amqp_rt.events import Peer
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.base import Exchange, QueueDeclaration
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.stores.base import ChangeSet, Store
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Symbol

SOURCE, REASON = Symbol("x-opt-deadletter-source"), Symbol("x-opt-dead-letter-reason")
#: Few messages in memory: the others have to be read before they are moved.
COUNT = 400
PAGED = Limits(queue_memory_bytes_max=4_000, queue_memory_messages_max=20)


def leaving(name: str = "q", to: str = "dead") -> Queue:
    return Queue(name, dead_letter=to, dead_letter_for=("deleted",))


def owned(broker: Broker) -> Topology:
    peer = Peer()
    return broker.topologies.of(peer, Anchor(DEFAULT_LIMITS, peer, "s"))


def bodies(broker: Broker, name: str) -> list[object]:
    return [
        Message.decode(entry.payload).body
        for entry in broker.host.space().find(name).held.peek(100_000)  # type: ignore[attr-defined]
    ]


def names(broker: Broker) -> list[str]:
    return [each.name for each in broker.host.space().declarations()]


async def until_gone(broker: Broker) -> None:
    """Wait until the messages of deleted queues are elsewhere, and stored there."""

    def is_settled() -> bool:
        nodes = broker.host.space().nodes.values()
        return not any(
            node.name.startswith(LEAVING) or node.held.pending  # type: ignore[attr-defined]
            for node in nodes
        )

    with trio.fail_after(30):
        while not is_settled():  # noqa: ASYNC110 - nothing reports it
            await trio.sleep(0.01)


def holds(store: MemoryStore, number: int) -> bool:
    """Return whether *store*, which is not open, has messages of the node *number*."""
    store.open()
    count = store.summary(number)[0]
    store.abandon()
    return count > 0


async def receive_all(link: Receiver) -> None:
    while True:
        await link.receive()


def fill(broker: Broker, name: str, count: int) -> None:
    for number in range(count):
        broker.host.space().publish(name, Message(number, durable=True).encode())


@pytest.mark.parametrize("reasons", [None, ("rejected",)], ids=["default", "others"])
async def test_messages_of_a_deleted_queue_are_dropped_by_default(
    reasons: tuple[str, ...] | None,
) -> None:
    async with Broker(volatile=True) as broker:
        await broker.declare(Queue("q", dead_letter="dead", dead_letter_for=reasons))
        fill(broker, "q", 3)
        await broker.delete("q")
        assert names(broker) == ["dead"]
        assert bodies(broker, "dead") == []


@pytest.mark.parametrize("kind", ["memory", "store", "paged"])
async def test_messages_of_a_deleted_queue_go_to_its_dead_letter_address(
    kind: str, tmp_path: Path
) -> None:
    store = None if kind == "memory" else f"sqlite:{tmp_path / 'broker.db'}"
    limits = PAGED if kind == "paged" else DEFAULT_LIMITS
    async with Broker(store=store, volatile=True, limits=limits) as broker:
        await broker.declare(leaving())
        fill(broker, "q", 300)
        await broker.delete("q")
        # The name is free at once.
        await broker.declare(Queue("q"))
        await until_gone(broker)
        assert sorted(names(broker)) == ["dead", "q"]
        found = await broker.peek("dead", 1_000)
        assert [Message.decode(each).body for each in found] == list(range(300))
        annotations = Message.decode(found[0]).message_annotations
        assert (annotations[SOURCE], annotations[REASON]) == ("q", "deleted")
        assert bodies(broker, "q") == []
        check_queues(broker.host)


async def test_the_alternate_exchange_gets_the_messages_of_a_deleted_queue() -> None:
    async with Broker(volatile=True) as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e", type="fanout"))
        for name in ("one", "two"):
            here.declare_queue(QueueDeclaration(name=name))
            here.bind_queue(name, "e", "", {})
        here.declare_queue(QueueDeclaration(name="q", alternate="e"))
        fill(broker, "q", 3)
        assert here.delete_queue("q") == 3
        await until_gone(broker)
        assert bodies(broker, "one") == bodies(broker, "two") == [0, 1, 2]


async def test_what_consumers_hold_goes_when_they_release_it() -> None:
    async with Broker(volatile=True) as broker:
        await broker.listen("memory://b")
        await broker.declare(leaving())
        fill(broker, "q", 4)
        async with client_of(broker) as peer, peer.receiver("q", credit=2) as link:
            first, _second = await link.receive(), await link.receive()
            first.accept()
            await wait_all_tasks_blocked()
            await broker.delete("q")
            with pytest.raises(LinkDetached):
                await receive_all(link)
        await until_gone(broker)
        # The order is that in which they were given up.
        assert sorted(bodies(broker, "dead")) == [1, 2, 3]  # type: ignore[type-var]
        check_queues(broker.host)


async def test_a_delayed_message_goes_when_it_is_due(autojump_clock: MockClock) -> None:
    async with Broker(volatile=True) as broker:
        await broker.declare(leaving())
        delayed = Message("later", message_annotations={Symbol("x-opt-delivery-delay"): 30_000})
        broker.host.space().publish("q", delayed.encode())
        await broker.delete("q")
        await trio.sleep(20)
        assert bodies(broker, "dead") == []
        await trio.sleep(20)
        assert bodies(broker, "dead") == ["later"]
        assert names(broker) == ["dead"]


async def test_nothing_attaches_to_a_queue_that_leaves() -> None:
    async with Broker(volatile=True) as broker:
        await broker.listen("memory://b")
        await broker.declare(leaving())
        fill(broker, "q", 2)
        async with client_of(broker) as peer, peer.receiver("q", credit=1) as link:
            held = await link.receive()
            await broker.delete("q")
            (name,) = [each for each in names(broker) if each.startswith(LEAVING)]
            for attaching in (peer.receiver(name), peer.sender(name)):
                with pytest.raises(AmqpError):
                    async with attaching as other:
                        await other.wait_attached()
            held.accept()
        await until_gone(broker)


async def test_an_operator_may_delete_what_leaves() -> None:
    async with Broker(volatile=True) as broker:
        await broker.listen("memory://b")
        await broker.declare(leaving())
        fill(broker, "q", 2)
        async with client_of(broker) as peer, peer.receiver("q", credit=1) as link:
            await link.receive()
            await broker.delete("q")
            (name,) = [each for each in names(broker) if each.startswith(LEAVING)]
            await broker.delete(name)
            assert names(broker) == ["dead"]


async def test_the_rest_goes_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        await broker.declare(leaving())
        fill(broker, "q", 5_000)
        broker.host.space().delete("q")
        # Otherwise nothing is left for the restart.
        assert len(bodies(broker, "dead")) < 5_000
    async with Broker(store=store) as broker:
        await until_gone(broker)
        found = [Message.decode(each).body for each in await broker.peek("dead", 10_000)]
        assert found == list(range(5_000))
        annotations = Message.decode((await broker.peek("dead", 1))[0]).message_annotations
        assert annotations[SOURCE] == "q"
    async with Broker(store=store) as broker:
        assert names(broker) == ["dead"]


async def test_a_deleted_queue_without_messages_is_gone_after_a_crash() -> None:
    disk = Photographed()
    async with Broker(store=disk) as broker:
        await broker.declare(leaving())
        fill(broker, "q", 1)
        number = broker.host.space().find("q").number
        await broker.delete("q")
        await until_gone(broker)
    # As if the last message had left in a commit before that which deletes the queue.
    crashed = [each for each in disk.copies if holds(each, number)][-1]
    crashed.open()
    batch = ChangeSet()
    batch.remove(number, 0)
    crashed.commit(batch)
    crashed.abandon()
    async with Broker(store=crashed) as broker:
        assert any(name.startswith(LEAVING) for name in names(broker))
        await until_gone(broker)
        assert names(broker) == ["dead"]
    async with Broker(store=crashed) as broker:
        assert names(broker) == ["dead"]


@pytest.mark.slow
async def test_a_crash_at_any_commit_neither_loses_nor_doubles_a_message() -> None:
    disk = Photographed()
    async with Broker(store=disk, limits=PAGED) as broker:
        await broker.declare(leaving())
        fill(broker, "q", COUNT)
        await broker.delete("q")
        await until_gone(broker)
    leaves = 0
    published = 0
    for crashed in disk.copies:
        store: Store = crashed
        async with Broker(store=store, limits=PAGED) as broker:
            if "dead" not in names(broker):
                continue
            is_leaving = any(name.startswith(LEAVING) for name in names(broker))
            await until_gone(broker)
            where = "q" if "q" in names(broker) else "dead"
            found = [Message.decode(each).body for each in await broker.peek(where, 2 * COUNT)]
            assert found == list(range(len(found)))
            assert len(found) >= published
            published = len(found)
            if where == "dead":
                assert len(found) == COUNT
            leaves += is_leaving
    assert leaves > 1


@pytest.mark.req("SE11")
async def test_nobody_declares_a_queue_that_looks_as_if_it_leaves() -> None:
    async with Broker(volatile=True) as broker:
        name = f"{LEAVING}t1/q"
        for declare in (
            lambda: owned(broker).declare_queue(QueueDeclaration(name=name)),
            lambda: broker.host.space().declare(Queue("q", aliases=(name,))),
        ):
            with pytest.raises(AmqpError) as caught:
                declare()
            assert caught.value.condition == "amqp:unauthorized-access"
