"""The check of a queue's invariants finds what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from brokers import World, acquired_entries, made

from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queue.invariants import broken_invariants

BREAKS: list[tuple[str, Callable[[Any], None]]] = [
    ("messages are here", lambda queue: setattr(queue, "available", queue.available + 1)),
    ("bytes are here", lambda queue: setattr(queue, "bytes", queue.bytes + 1)),
    ("counted as acquired", lambda queue: setattr(queue, "acquired", queue.acquired + 1)),
    ("wait for a time", lambda queue: setattr(queue, "delayed", 1)),
    ("in 1 heaps and among", lambda queue: queue.shelf.returned.append(queue.shelf.head)),
    ("in 0 heaps and not among", lambda queue: setattr(queue.shelf, "head", queue.shelf.next)),
    ("set aside", lambda queue: queue.shelf.aside.add(queue.shelf.next)),
    ("have gone", lambda queue: queue.shelf.returned.append(0)),
    ("stand in rings", lambda queue: queue.turns.ring.append(queue.turns.ring[0])),
    ("paged out", lambda queue: setattr(queue.paging, "count", 1)),
]


@pytest.mark.parametrize(("said", "damage"), BREAKS, ids=[said for said, _ in BREAKS])
def test_a_broken_invariant_is_named(said: str, damage: Callable[[Any], None]) -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("a", "b", "c")
    client.receiver("q", credit=1)
    queue = world.host.space().find("q").held
    if "rings" in said:
        world.purge("q")
        client.receiver("q", credit=1)
    assert broken_invariants(queue, acquired_entries(queue)) == []
    acquired = acquired_entries(queue)
    damage(queue)
    assert any(said in each for each in broken_invariants(queue, acquired))
    # A queue that is broken on purpose is not checked again.
    made.remove(world)
