"""Transactions and kept links while their store is slow: what happens meanwhile changes no half of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from stalls import Stalls, beside

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Queue
from amqp_rt.broker.durable import facts
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.stores.base import StoreFull
from amqp_rt.stores.memory import MemoryStore

KEPT: dict[str, Any] = {"name": "mine", "timeout": 1_000, "durable": 2}


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def waiting(broker: Broker, address: str) -> list[Any]:
    if not broker.has(address):
        return []
    return [Message.decode(each).body for each in await broker.peek(address, 100)]


class Move:
    """A client that moves a message from ``from`` to ``to`` in a transaction."""

    def __init__(self, broker: Broker, peer: Connection, inbox: Any) -> None:
        self.broker = broker
        self.peer = peer
        self.inbox = inbox


async def nothing(move: Move) -> None:
    """Nothing happens."""


async def delete_target(move: Move) -> None:
    move.broker.host.space().delete("to")


async def delete_origin(move: Move) -> None:
    move.broker.host.space().delete("from")


async def replace_both(move: Move) -> None:
    for name in ("from", "to"):
        move.broker.host.space().delete(name)
        move.broker.host.space().declare(Queue(name))


async def lose_connection(move: Move) -> None:
    move.peer.close()
    await settle()


async def detach_consumer(move: Move) -> None:
    move.inbox.abandon()
    await settle()


@pytest.mark.req("R3", "R4")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    "happens",
    [nothing, delete_target, delete_origin, replace_both, lose_connection, detach_consumer],
)
async def test_a_discharge_that_is_being_written_is_whole(
    happens: Callable[[Move], Awaitable[None]], refused: bool
) -> None:
    store = MemoryStore()
    stalls = Stalls()
    async with (
        Broker(store=store, executor=stalls) as broker,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("from"), Queue("to"))
        broker.publish("from", Message("a", durable=True).encode())
        await broker.host.wait_kept()
        stall = stalls.at("commit", error=StoreFull("the disk is full") if refused else None)
        if refused:
            stalls.at("commit", error=StoreFull("the disk is full")).released.set()

        async def move() -> None:
            async with (
                broker.local() as peer,
                peer.receiver("from", credit=1, rcv_settle_mode=RCV_SECOND) as inbox,
                peer.sender("to") as out,
            ):
                delivery = await inbox.receive(within=5)
                found.append(Move(broker, peer, inbox))
                async with peer.transaction() as txn:
                    delivery.accept(transaction=txn)
                    await out.send("a", durable=True, transaction=txn)

        found: list[Move] = []
        answer = beside(nursery, move)
        async with stall:
            await happens(found[0])
        result = await answer.get()
        if happens is nothing:
            assert (result == "amqp:transaction:rollback") is refused
        await settle()
        await broker.host.wait_kept()
        gone = {delete_target: {"to"}, delete_origin: {"from"}, replace_both: {"from", "to"}}.get(
            happens, set()
        )
        expected = {"from": ["a"] if refused else [], "to": [] if refused else ["a"]}
        for name, bodies in expected.items():
            assert await waiting(broker, name) == ([] if name in gone else bodies)
        for name in {"from", "to"} - gone:
            stats = broker.stats(name)
            assert (stats.acquired, stats.bytes) == (0, 13 * stats.available)
        nursery.cancel_scope.cancel()
    async with Broker(store=store, executor=Stalls()) as broker:
        for name, bodies in expected.items():
            assert await waiting(broker, name) == ([] if name in gone else bodies)


async def close_link(broker: Broker, inbox: Any) -> None:
    inbox.abandon()
    await settle()


async def suspend_link(broker: Broker, inbox: Any) -> None:
    await inbox.suspend()
    await settle()


async def attach_elsewhere(broker: Broker, inbox: Any) -> None:
    async with broker.local() as other:
        second = other.receiver("q", credit=0, **KEPT)
        await second.__aenter__()
        await second.suspend()


async def delete_node(broker: Broker, inbox: Any) -> None:
    broker.host.space().delete("q")


@pytest.mark.req("X23")
@pytest.mark.parametrize("happens", [close_link, suspend_link, attach_elsewhere, delete_node])
async def test_a_delivery_whose_departure_is_being_written_is_nowhere_twice(
    happens: Callable[[Broker, Any], Awaitable[None]],
) -> None:
    store = MemoryStore()
    stalls = Stalls()
    async with Broker(store=store, executor=stalls) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        inbox = peer.receiver("q", credit=1, rcv_settle_mode=RCV_SECOND, **KEPT)
        await inbox.__aenter__()
        await inbox.wait_attached()
        await broker.host.wait_kept()
        broker.publish("q", Message("a", durable=True).encode())
        stalls.at("commit").released.set()
        stall = stalls.at("commit")
        # The message is kept; that it leaves is being written.
        async with stall:
            assert broker.stats("q").acquired == 1
            await happens(broker, inbox)
        await settle()
        await broker.host.wait_kept()
        if happens is delete_node:
            assert store.facts(facts.DELIVERIES.name) == store.facts(facts.TERMINI.name) == []
            return
        stats = broker.stats("q")
        assert (stats.available, stats.acquired) == (1, 0)
        assert store.facts(facts.DELIVERIES.name) == []
        assert len(store.facts(facts.TERMINI.name)) == (0 if happens is close_link else 1)
    async with Broker(store=store, executor=Stalls()) as broker:
        assert await waiting(broker, "q") == ["a"]


async def test_what_is_remembered_of_links_that_are_not_there_is_forgotten() -> None:
    """Another terminus may get the number, and would take messages for those that it has had."""
    store = MemoryStore()
    async with Broker(store=store, executor=Stalls()) as broker:
        await broker.declare(Queue("q"))
        assert broker.host.journal is not None
        for kind in (facts.SEEN.name, facts.DELIVERIES.name):
            broker.host.journal.loose.put_fact(kind, (77).to_bytes(4, "big") + b"tag", bytes(8))
    async with Broker(store=store, executor=Stalls()) as broker:
        await broker.host.wait_kept()
        assert store.facts(facts.SEEN.name) == store.facts(facts.DELIVERIES.name) == []
