"""Queues that number their messages: in the order of arrival, from 1, and on after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from brokers import Controller, World
from paged import large, world_of

from amqp_rt.broker import LifeCycles, Queue
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.transactions import TransactionalState
from amqp_rt.values import Symbol, ULong

KEY = Symbol("x-opt-queue-number-n")
NUMBERED = Queue("q", number_header="n")


def numbers(receiver: Any, key: Symbol = KEY) -> list[Any]:
    return [each.message_annotations.get(key) for each in receiver.messages]


@pytest.mark.req("D3")
@pytest.mark.parametrize("life_cycles", [None, LifeCycles()], ids=["plain", "observed"])
def test_messages_have_their_number_in_the_queue(life_cycles: LifeCycles | None) -> None:
    ring = Queue("ring", number_header="m", length_max=2, overflow="drop-head")
    world = World(NUMBERED, ring, Queue("other"), life_cycles=life_cycles)
    client = world.client()
    waiting = client.receiver("q", credit=1)
    sender = client.sender("q")
    # What the sender states there is replaced, and its other annotations stay.
    sender.send("a", message_annotations={KEY: ULong(77), Symbol("x-opt-mine"): 5})
    sender.send("b", "c")
    assert waiting.messages[0].message_annotations == {KEY: 1, Symbol("x-opt-mine"): 5}
    later = client.receiver("q", credit=1)
    later.settle(RELEASED)
    assert numbers(client.receiver("q", credit=5)) == [2, 3]
    # A message that moves keeps its number, and gets one of the next queue beside it.
    sender.send("d")
    world.client().sender("ring").send(1, 2, 3)
    found = client.receiver("ring", credit=5)
    assert numbers(found, Symbol("x-opt-queue-number-m")) == [2, 3]
    client.sender("other").send("e")
    assert not client.receiver("other", credit=1).messages[0].message_annotations


@pytest.mark.req("D3")
def test_the_size_of_the_number_is_accounted_for() -> None:
    world = World(NUMBERED)
    client = world.client()
    client.sender("q").send("a", "b")
    receiver = client.receiver("q", credit=5)
    receiver.settle(ACCEPTED)
    stats = world.stats("q")
    assert (stats.available, stats.bytes, world.host.memory.held) == (0, 0, 0)


@pytest.mark.req("D3")
@pytest.mark.usefixtures("small_pieces")
async def test_the_count_goes_on_after_a_restart(kept: Callable[[], Any]) -> None:
    small = Limits(message_size_max=20_000, frame_size_max=4_096)
    wide = Limits(message_size_max=10_000_000, frame_size_max=4_096)
    async with world_of(kept(), NUMBERED, limits=small) as world:
        client = world.client(limits=wide)
        sender = client.sender("q")
        for payload in (
            Message("kept", durable=True).encode(),
            large()[1],
            Message("lost with the process").encode(),
        ):
            sender.send_raw(bytes(payload))
            await world.settle()
        controller = Controller(client)
        posted = controller.declare()
        in_transaction = bytes(Message("in a transaction", durable=True).encode())
        sender.link.send(in_transaction, 0, state=TransactionalState(posted))
        await world.settle()
        controller.discharge(posted)
        await world.settle()
        receiver = client.receiver("q", credit=1)
        await world.settle()
        assert numbers(receiver) == [1]
        receiver.settle(ACCEPTED)
        await world.settle()
    async with world_of(kept(), limits=small) as world:
        client = world.client(limits=wide)
        client.sender("q").send("after")
        await world.settle()
        receiver = client.receiver("q", credit=5)
        await world.settle()
        assert numbers(receiver) == [2, 4, 5]
        receiver.settle(ACCEPTED)
        await world.settle()
    # Nor does it begin anew if the queue has no messages.
    async with world_of(kept(), limits=small) as world:
        client = world.client(limits=wide)
        client.sender("q").send("again", durable=True)
        receiver = client.receiver("q", credit=5)
        await world.settle()
        assert numbers(receiver) == [6]
        world.host.space().delete("q")
        world.host.space().declare(NUMBERED)
        client.sender("q").send("in a new queue", durable=True)
        receiver = client.receiver("q", credit=5)
        await world.settle()
        assert numbers(receiver) == [1]


@pytest.mark.parametrize("name", ["", "ü", "a\n", "n" * 101])
def test_names_of_headers_are_checked(name: str) -> None:
    Queue("q", number_header="n" * 100)
    with pytest.raises(ValueError, match="number_header has 1 to 100 printable characters"):
        Queue("q", number_header=name)


def test_numbering_cannot_be_declared_later() -> None:
    world = World(Queue("q"))
    with pytest.raises(AmqpError):
        world.host.space().declare(NUMBERED)
