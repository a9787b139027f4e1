"""Topics: copies for everybody, bounded for each."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import World

from amqp_rt.broker.nodes import Topic
from amqp_rt.fronts.base import SND_SETTLED
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Outcome, rejected


@pytest.mark.req("B19", "M2", "M30")
def test_each_subscriber_gets_a_copy_of_what_is_sent_after_it_attached() -> None:
    world = World(Topic("t"))
    sender = world.client().sender("t")
    sender.send(0)
    first = world.client().receiver("t", credit=10)
    sender.send(1)
    second = world.client().receiver("t", credit=10)
    late = world.client().receiver("t")
    sender.send(2, 3)
    late.grant(10)
    assert first.bodies == [1, 2, 3]
    assert second.bodies == late.bodies == [2, 3]
    assert sender.outcomes == [ACCEPTED] * 4
    for receiver in (first, second, late):
        receiver.settle(ACCEPTED)
    stats = world.stats("t")
    assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0)
    assert (stats.enqueued, stats.delivered, stats.accepted) == (4, 7, 7)
    assert (stats.consumers, stats.producers) == (3, 1)


@pytest.mark.parametrize("outcome", [ACCEPTED, rejected("x")], ids=str)
def test_what_is_settled_does_not_come_again(outcome: Outcome) -> None:
    world = World(Topic("t"))
    receiver = world.client().receiver("t", credit=5)
    world.client().sender("t").send("m")
    receiver.settle(outcome)
    assert receiver.bodies == ["m"]
    assert world.host.memory.held == 0


@pytest.mark.parametrize(("outcome", "count"), [(RELEASED, 0), (MODIFIED_FAILED, 1)], ids=str)
def test_what_is_given_back_comes_again_to_that_subscriber_only(
    outcome: Outcome, count: int
) -> None:
    world = World(Topic("t"))
    first, second = (world.client().receiver("t", credit=5) for _ in range(2))
    world.client().sender("t").send("m")
    first.settle(outcome, 0)
    assert [(m.body, m.delivery_count) for m in first.messages] == [("m", 0), ("m", count)]
    assert second.bodies == ["m"]


@pytest.mark.req("B19")
@pytest.mark.parametrize("bound", ["messages", "bytes"])
def test_a_subscriber_that_does_not_keep_up_is_detached_alone(bound: str) -> None:
    if bound == "messages":
        world = World(Topic("t", backlog_max=5))
    else:
        size = len(Message("0").encode())
        world = World(Topic("t", backlog_bytes_max=5 * size))
    sender = world.client().sender("t")
    slow = world.client().receiver("t", credit=2)
    fast = world.client().receiver("t", credit=100, snd_settle_mode=SND_SETTLED)
    held = 2 if bound == "messages" else 0
    sender.send(*(str(n) for n in range(5 + held)))
    assert slow.error is None
    sender.send("x")
    assert slow.error == "amqp:resource-limit-exceeded"
    assert len(fast.bodies) == 6 + held
    assert sender.outcomes == [ACCEPTED] * (6 + held)
    assert world.stats("t").consumers == 1
    assert world.host.memory.held == 0
    sender.send("y")
    assert fast.bodies[-1] == "y"


def test_a_subscriber_leaves_nothing_behind() -> None:
    world = World(Topic("t"))
    client = world.client()
    receiver = client.receiver("t", credit=1)
    sender = world.client().sender("t")
    sender.send(1, 2)
    assert world.host.memory.held > 0
    receiver.detach()
    assert world.host.memory.held == 0
    assert world.stats("t").consumers == 0
    client.receiver("t")
    sender.send(3)
    client.cut()
    assert world.host.memory.held == 0


@pytest.mark.req("M7")
def test_copies_expire_where_they_wait() -> None:
    world = World(Topic("t", ttl_s=10))
    receiver = world.client().receiver("t")
    sender = world.client().sender("t")
    sender.send("old")
    sender.send("older", ttl_s=5)
    world.time.now += 6
    receiver.grant(5)
    assert receiver.bodies == ["old"]
    idle = world.client().receiver("t")
    sender.send("unseen")
    world.time.now += 11
    world.host.sweep()
    assert idle.bodies == []
    assert world.stats("t").available == 0


def test_no_subscriber_no_message() -> None:
    world = World(Topic("t"))
    sender = world.client().sender("t")
    for _ in range(6):
        sender.send(*range(500))
    assert len(sender.outcomes) == 3_000
    assert world.host.memory.held == 0


def test_the_header_is_kept_for_each_subscriber() -> None:
    world = World(Topic("t"))
    receivers = [world.client().receiver("t", credit=5) for _ in range(2)]
    fields: dict[str, Any] = {"durable": True, "priority": 3, "first_acquirer": True, "ttl_s": 9}
    world.client().sender("t").send("m", **fields)
    world.time.now += 1
    for receiver in receivers:
        (message,) = receiver.messages
        assert (message.durable, message.priority, message.first_acquirer) == (True, 3, True)
        assert message.ttl_s == 9
