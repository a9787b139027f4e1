"""Messages for which a queue has no room, under each policy."""

from __future__ import annotations

import pytest
from brokers import World
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker.nodes import Queue
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Rejected


@pytest.mark.req("B24", "B17")
def test_senders_wait_for_room() -> None:
    world = World(Queue("q", length_max=3))
    client = world.client()
    sender = client.sender("q")
    assert sender.link.credit <= 3
    other = client.sender("q")
    assert sender.link.credit + other.link.credit <= 3


@pytest.mark.req("B24")
def test_what_is_too_much_is_rejected() -> None:
    world = World(Queue("q", length_max=2, overflow="reject"))
    client = world.client()
    sender = client.sender("q")
    sender.send("a", "b", "c")
    assert sender.outcomes[:2] == [ACCEPTED, ACCEPTED]
    refused = sender.outcomes[2]
    assert isinstance(refused, Rejected)
    assert refused.error is not None
    assert refused.error.condition == "amqp:resource-limit-exceeded"
    # Acquired messages are still there.
    receiver = client.receiver("q", credit=1)
    sender.send("d")
    assert isinstance(sender.outcomes[3], Rejected)
    receiver.settle(ACCEPTED)
    sender.send("e")
    assert sender.outcomes[4] == ACCEPTED
    assert client.receiver("q", credit=9).bodies == ["b", "e"]


@pytest.mark.req("B24")
@pytest.mark.parametrize("overflow", ["reject", "drop-head"])
def test_bytes_are_bounded_too(overflow: str) -> None:
    world = World(Queue("q", bytes_max=2_500, overflow=overflow))  # type: ignore[arg-type]
    sender = world.client().sender("q")
    sender.send(b"a" * 1_000, b"b" * 1_000, b"c" * 1_000)
    kept = [Message.decode(each).body[:1] for each in world.peek("q", 9)]
    assert kept == ([b"a", b"b"] if overflow == "reject" else [b"b", b"c"])
    assert world.stats("q").bytes <= 2_500


@pytest.mark.req("B24", "B22", "B16")
def test_a_ring_keeps_the_last() -> None:
    world = World(Queue("q", length_max=3, overflow="drop-head", dead_letter="old"))
    client = world.client()
    client.sender("q").send(*range(10))
    assert [Message.decode(each).body for each in world.peek("q", 9)] == [7, 8, 9]
    old = client.receiver("old", credit=99).messages
    assert [each.body for each in old] == list(range(7))
    annotations = old[0].message_annotations
    assert annotations["x-opt-dead-letter-reason"] == "overflow"


@pytest.mark.slow
@pytest.mark.req("B24", "B22")
@given(st.lists(st.sampled_from(["send", "get", "accept", "release"]), max_size=60))
def test_a_ring_is_a_bounded_list(steps: list[str]) -> None:
    world = World(Queue("q", length_max=4, overflow="drop-head"))
    client = world.client()
    sender, receiver = client.sender("q"), client.receiver("q")
    available: list[int] = []
    held: list[tuple[int, int]] = []
    count = 0
    for step in steps:
        if step == "send":
            sender.send(count)
            available.append(count)
            count += 1
            while available and len(available) + len(held) > 4:
                available.pop(0)
        elif step == "get" and available:
            index = len(receiver.bodies)
            receiver.grant(1)
            number = available.pop(0)
            assert receiver.bodies[index:] == [number]
            held.append((index, number))
        elif step in ("accept", "release") and held:
            index, number = held.pop()
            receiver.settle(ACCEPTED if step == "accept" else RELEASED, index)
            if step == "release":
                available.append(number)
                available.sort()
    assert [Message.decode(each).body for each in world.peek("q", 9)] == available
