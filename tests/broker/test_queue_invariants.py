"""The check of a queue's invariants finds what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from brokers import World, acquired_entries, made

from amqp_rt.broker.nodes import Queue

BREAKS: list[tuple[str, Callable[[Any], None]]] = [
    ("messages are here", lambda queue: setattr(queue, "available", queue.available + 1)),
    ("bytes are here", lambda queue: setattr(queue, "bytes", queue.bytes + 1)),
    ("counted as acquired", lambda queue: setattr(queue, "acquired", queue.acquired + 1)),
    ("wait for a time", lambda queue: setattr(queue, "delayed", 1)),
    ("in 1 heaps and among", lambda queue: queue._returned.append(queue._head)),
    ("in 0 heaps and not among", lambda queue: setattr(queue, "_head", queue._next)),
    ("set aside", lambda queue: queue._aside.add(queue._next)),
    ("have gone", lambda queue: queue._returned.append(0)),
    ("stand in rings", lambda queue: queue._ring.append(queue._ring[0])),
    ("paged out", lambda queue: setattr(queue, "paged", 1)),
]


@pytest.mark.parametrize(("said", "damage"), BREAKS, ids=[said for said, _ in BREAKS])
def test_a_broken_invariant_is_named(said: str, damage: Callable[[Any], None]) -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("a", "b", "c")
    client.receiver("q", credit=1)
    queue = world.host._queue("q", "")
    if "rings" in said:
        world.purge("q")
        client.receiver("q", credit=1)
    assert queue.broken_invariants(acquired_entries(queue)) == []
    acquired = acquired_entries(queue)
    damage(queue)
    assert any(said in each for each in queue.broken_invariants(acquired))
    # What is broken on purpose is not checked again.
    made.remove(world)
