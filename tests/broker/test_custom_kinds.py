"""Kinds of nodes that a plug-in adds: plain Python, without a queue, a topic or a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import trio
from brokers import World

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.entries import Entry
from amqp_rt.broker.host import KINDS_OF_NODES, BrokerHost
from amqp_rt.broker.kinds.base import Node, Space
from amqp_rt.broker.nodes import Declaration
from amqp_rt.broker.producers import Intake
from amqp_rt.broker.queue.accounts import Counts, Memory
from amqp_rt.errors import AmqpError
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.stores.memory import MemoryStore


class Latest(Declaration, frozen=True, kw_only=True):
    """Node that keeps the message that arrived last."""

    fallback: str = ""

    @property
    def kind(self) -> str:
        return "latest"


class OneMessage:
    """Holder of one message, for :class:`LatestNode`."""

    gathering = None

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.awaited = False
        self.on_room: Callable[[], None] = lambda: None
        self.counts = Counts()
        self.deleted = False
        self.acquired = 0
        self.consumers: list[Any] = []
        self.entry: Entry | None = None

    @property
    def available(self) -> int:
        return 0 if self.entry is None else 1

    @property
    def bytes(self) -> int:
        return 0 if self.entry is None else len(self.entry.payload)

    def room(self) -> int:
        return 10

    def fits(self, size: int) -> bool:
        return True

    def why_full(self, name: str, size: int) -> str:
        return f"box {name!r} is full"

    def put(self, entry: Entry) -> None:
        self.counts.enqueued += 1
        self.entry = entry

    def reserve_room(self, entry: Entry) -> None:
        """Reserve nothing."""

    def release_room(self, entry: Entry) -> None:
        """Reserve nothing."""

    def notify_waiting(self) -> None:
        """Reserve nothing."""

    def delete(self) -> None:
        self.deleted = True
        self.entry = None


class LatestNode(Node):
    """Node of one message."""

    kind = "latest"
    declaration = Latest
    held: OneMessage

    @classmethod
    def make(
        cls, space: Space, declared: Latest, *, number: int, owner: Any, transient: bool, new: bool
    ) -> Self:
        held = OneMessage(space.services.memory)
        return cls(space, declared, held, Intake(held), held, number=number, volatile=True)

    async def purge(self) -> int:
        await trio.lowlevel.checkpoint()
        purged, self.held.entry = self.held.available, None
        return purged


KINDS = (*KINDS_OF_NODES, LatestNode)


def test_a_kind_of_a_plugin_takes_messages_and_is_deleted() -> None:
    world = World(Latest("now"), kinds=KINDS)
    client = world.client()
    sender = client.sender("now")
    sender.send("a", "b")
    assert sender.outcomes == [ACCEPTED, ACCEPTED]
    stats = world.stats("now")
    assert (stats.kind, stats.available, stats.enqueued, stats.producers) == ("latest", 1, 2, 1)
    assert trio.run(world.host.space().find("now").purge) == 1
    assert world.host.space().delete("now") == 0
    world.pump()
    assert not world.host.space().has("now")
    assert not sender.link.attached


def test_operations_of_other_kinds_are_refused() -> None:
    world = World(Latest("now"), kinds=KINDS)
    for call in (world.peek, world.log_stats):
        with pytest.raises(AmqpError, match="'now' is not a"):
            call("now")


async def test_a_kind_of_a_plugin_is_restored() -> None:
    store = MemoryStore()
    for expected in ([], [Latest("now", fallback="x")]):
        host = BrokerHost(journal=Journal(store), kinds=KINDS)
        await host.restore()
        assert host.space().declarations() == expected
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            host.space().declare(Latest("now", fallback="x"))
            await host.wait_kept()
            nursery.cancel_scope.cancel()
        await host.close()
