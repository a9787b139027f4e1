"""Broker with a store, whose journal and pager run."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from brokers import Receiving, World

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.nodes import Declaration
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED

#: Limits with which queues keep some twenty messages of these tests in memory.
FEW = Limits(queue_memory_bytes_max=1_000, queue_memory_messages_max=20)


async def in_line(call: Callable[..., Any], *args: Any) -> Any:
    """Run *call* at once, since virtual time does not wait for threads."""
    await trio.lowlevel.checkpoint()
    return call(*args)


class Gate:
    """Executor whose commits wait until an event is set."""

    def __init__(self) -> None:
        self.opened = trio.Event()
        self.opened.set()

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        if getattr(call, "__name__", "") == "commit":
            await self.opened.wait()
        await trio.lowlevel.checkpoint()
        return call(*args)


class PagedWorld(World):
    """Clients and such a broker, advanced step by step."""

    def __init__(self, store: Any, limits: Limits = FEW, **options: Any) -> None:
        self.store = store
        super().__init__(limits=limits, journal=Journal(store, in_line), **options)

    async def settle(self) -> None:
        """Carry bytes and run tasks until nothing more happens."""
        while True:
            self.pump()
            await trio.testing.wait_all_tasks_blocked()
            moved = any(client.pump() for client in self.clients)
            if not (self.host.journal.commit_soon() or moved):
                return

    def queue(self, address: str = "q") -> MessageQueue:
        return self.host.space().find(address).held

    async def put(self, *bodies: Any, durable: bool = True, **fields: Any) -> None:
        sender = self.client().sender("q")
        for at in range(0, len(bodies), 50):
            sender.send(*bodies[at : at + 50], durable=durable, **fields)
            await self.settle()
        sender.detach(closed=True)
        await self.settle()
        assert sender.outcomes == [ACCEPTED] * len(bodies)

    async def take(self, credit: int, **options: Any) -> Receiving:
        receiver = self.client().receiver("q", credit=credit, **options)
        await self.settle()
        return receiver


@asynccontextmanager
async def world_of(
    store: Any, *declared: Declaration, limits: Limits = FEW, **options: Any
) -> AsyncIterator[PagedWorld]:
    world = PagedWorld(store, limits, **options)
    await world.host.restore()
    world.host.declare_journals()
    for each in declared:
        world.host.space().declare(each)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        await world.settle()
        yield world
        await world.settle()
        nursery.cancel_scope.cancel()
    await world.host.close()


def in_memory(queue: MessageQueue) -> int:
    """Return how many of the available messages are in memory."""
    return queue.available - queue.paging.count


def large(size: int = 100_000, seed: int = 1, **fields: Any) -> tuple[bytes, bytes]:
    """Return a body, and its encoded message."""
    body = random.Random(seed).randbytes(size)
    return body, bytes(Message(body, durable=True, **fields).encode())
