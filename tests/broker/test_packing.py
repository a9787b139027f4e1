"""Queues whose messages wait for long: packed segments behave like others."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from brokers import World

from amqp_rt.broker.entries import Entry
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queue import shelf
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.segments import SEGMENT, Segment
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.values import Described, Symbol

#: Messages of a queue of which half are packed.
MANY = 2 * shelf.PACKED_AFTER * SEGMENT


def queue_of(world: World) -> MessageQueue:
    queue: MessageQueue = world.host.space().nodes["q"].held
    return queue


def packed(world: World) -> int:
    """Return the number of packed segments."""
    return sum(segment.packed for segment in queue_of(world).shelf.segments.values())


def filled(count: int = MANY, **options: Any) -> World:
    """Return a broker with a queue of *count* messages, whose bodies are their numbers."""
    world = World(Queue("q", **options))
    for number in range(count):
        world.host.space().publish("q", bytes(Message(number).encode()))
    world.check()
    assert packed(world) == max(0, count // SEGMENT - shelf.PACKED_AFTER - 1)
    return world


def entries() -> list[Entry]:
    """Return the messages of a segment, which differ in all fields that a packed one may have."""
    return [
        Entry(
            b"%d" % number,
            message_format=number % 3,
            durable=number % 2 == 0,
            priority=number % 10,
            first_acquirer=number % 5 == 0,
            delivery_count=number % 4,
            expires_at=1e9 + number,
            altered=number % 7 == 0,
            attempts=number % 3,
            sequence=5 * SEGMENT + number,
            stored=number % 2 == 0,
            publisher=f"publisher {number % 20}",
            returnable=number % 6 == 0,
        )
        for number in range(SEGMENT)
    ]


def test_a_segment_has_the_same_messages_before_and_after() -> None:
    segment = Segment(5)
    segment.slots = [*entries()]
    segment.live = SEGMENT
    segment.pack()
    assert segment.packed
    assert [segment.peek(at) for at in range(SEGMENT)] == entries()
    assert segment.take(7) == entries()[7]
    assert segment.peek(7) is None
    segment.unpack()
    assert segment.slots == [None if at == 7 else each for at, each in enumerate(entries())]


@pytest.mark.parametrize(
    "own", [{"avoid": frozenset({1})}, {"origin": (1, 2)}, {"marks": object()}]
)
def test_a_message_that_others_may_refer_to_stays_as_it_is(own: dict[str, Any]) -> None:
    segment = Segment(5)
    special = Entry(b"own", sequence=5 * SEGMENT + 9, **own)
    segment.slots = [*entries()]
    segment.slots[9] = special
    segment.live = SEGMENT
    segment.pack()
    assert not segment.packed
    assert segment.slots[9] is special


def test_messages_leave_in_order() -> None:
    world = filled()
    receiver = world.client().receiver("q", settle=ACCEPTED)
    for _ in range(MANY // 256):
        receiver.grant(256)
        world.check()
    assert receiver.bodies == list(range(MANY))
    assert world.host.memory.held == 0


def test_messages_are_taken_and_returned_out_of_turn() -> None:
    """By a consumer with a selector: first few of a segment, then more, after a browser has seen all."""
    world = World(Queue("q"))
    # There is no event loop that would give the queue its next turn.
    world.host.memory.work = 1_000_000
    for number in range(MANY):
        message = Message(number, application_properties={"number": number})
        world.host.space().publish("q", bytes(message.encode()))
    before = packed(world)
    client = world.client()
    browser = client.receiver("q", distribution_mode="copy")
    browser.grant(MANY)
    assert browser.bodies == list(range(MANY))
    few = client.receiver("q", filter=wanting("number IN (1000, 1001, 1500)"))
    few.grant(3)
    assert few.bodies == [1000, 1001, 1500]
    assert packed(world) == before
    world.check()
    few.settle(RELEASED)
    world.check()
    more = client.receiver("q", filter=wanting("number BETWEEN 1000 AND 1020"), settle=ACCEPTED)
    more.grant(100)
    assert more.bodies == list(range(1000, 1021))
    assert packed(world) < before
    world.check()
    rest = client.receiver("q", settle=ACCEPTED)
    rest.grant(MANY)
    assert rest.bodies == [number for number in range(MANY) if not 1000 <= number <= 1020]
    assert world.stats("q").available == 0


def wanting(text: str) -> dict[object, object]:
    return {Symbol("jms-selector"): Described(Symbol("apache.org:selector-filter:string"), text)}


def test_packed_messages_are_moved_and_purged() -> None:
    world = filled()
    world.host.space().declare(Queue("other"))
    assert world.move("q", "other", 1_000) == 1_000
    world.check()
    assert [Message.decode(each).body for each in world.peek("q", 2)] == [1_000, 1_001]
    world.purge("q")
    world.check()
    assert queue_of(world).available == 0
    assert not packed(world)


def test_the_collector_does_not_look_at_packed_messages() -> None:
    world = filled(128)
    # A tuple is tracked until a collection sees that it refers to nothing that is.
    gc.collect()
    before = len(gc.get_objects())
    for number in range(128, 10_000):
        world.host.space().publish("q", bytes(Message(number).encode()))
    gc.collect()
    assert len(gc.get_objects()) - before < 10_000 // 64
    assert packed(world) > 50
