"""Messages for which a queue has no room, under each policy."""

from __future__ import annotations

import pytest
from brokers import World
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import WouldBlock
from amqp_rt.limits import Limits
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
    assert refused.error.description == "queue 'q' is full: length_max 2 is reached"
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


def refusal(world: World, address: str, *sizes: int) -> str:
    """Return why a queue refuses the last of messages of these sizes, published within the process."""
    *earlier, last = [bytes(Message(bytes(size)).encode()) for size in sizes]
    for each in earlier:
        world.host.space().publish(address, each)
    with pytest.raises(WouldBlock) as caught:
        world.host.space().publish(address, last)
    return str(caught.value.description)


@pytest.mark.req("B24")
def test_a_refusal_names_the_node_and_the_limit() -> None:
    limits = Limits(broker_bytes_max=10_000)
    world = World(
        Queue("few", length_max=1),
        Queue("small", bytes_max=500),
        Topic("t"),
        Log("l"),
        limits=limits,
    )
    assert refusal(world, "few", 1, 1) == "queue 'few' is full: length_max 1 is reached"
    assert refusal(world, "small", 501).endswith("bytes would exceed bytes_max 500")
    for name, kind in (("small", "queue"), ("t", "topic"), ("l", "log")):
        why = refusal(world, name, 10_001)
        assert why.startswith(f"{kind} {name!r} is full: ")
        assert why.endswith("would exceed the memory of the broker (broker_bytes_max)")
    # Both places are promised.
    promised = World(Queue("q", length_max=2))
    for _ in range(2):
        promised.client().sender("q")
    assert refusal(promised, "q", 1).startswith("queue 'q' is full: its room is promised")


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


@pytest.mark.req("B24", "D3")
def test_a_ring_gives_up_messages_of_low_priority_first() -> None:
    world = World(Queue("q", length_max=4, overflow="drop-head", priorities=10, dead_letter="old"))
    client = world.client()
    sender = client.sender("q")
    for number, priority in enumerate([5, 1, 9, 1, 5, 0, 9]):
        sender.send(number, priority=priority)
    # The oldest of the lowest, which may be the message that comes.
    assert client.receiver("old", credit=9).bodies == [1, 5, 3]
    assert client.receiver("q", credit=9).bodies == [2, 6, 0, 4]


@pytest.mark.req("B24", "D3")
def test_a_queue_that_becomes_a_ring_gives_up_low_priorities_of_before() -> None:
    world = World(Queue("q", priorities=10))
    client = world.client()
    sender = client.sender("q")
    for number, priority in enumerate([5, 1, 9]):
        sender.send(number, priority=priority)
    world.host.space().update(Queue("q", length_max=3, overflow="drop-head", priorities=10))
    sender.send(3, priority=4)
    sender.send(4, priority=6)
    assert client.receiver("q", credit=9).bodies == [2, 4, 0]


@pytest.mark.req("B24")
def test_what_a_ring_remembers_of_messages_that_are_gone_is_bounded() -> None:
    world = World(Queue("q", length_max=1_000, overflow="drop-head", priorities=10))
    client = world.client()
    sender, receiver = client.sender("q"), client.receiver("q")
    for number in range(1_000):
        sender.send(number, priority=number % 10)
        receiver.grant(1)
        receiver.settle(ACCEPTED, number)
    shelf = world.host.space().find("q").held.shelf
    assert len(shelf.lowest) <= 2 * 1 + 64 + 1


@pytest.mark.slow
@pytest.mark.req("B24", "B22", "D3")
@given(
    st.lists(st.sampled_from(["send", "get", "accept", "release"]), max_size=60),
    st.sampled_from([None, 2, 10]),
    st.data(),
)
def test_a_ring_is_a_bounded_list(
    steps: list[str], priorities: int | None, data: st.DataObject
) -> None:
    world = World(Queue("q", length_max=4, overflow="drop-head", priorities=priorities or 1))
    client = world.client()
    sender, receiver = client.sender("q"), client.receiver("q")
    available: list[int] = []
    held: list[tuple[int, int]] = []
    levels: dict[int, int] = {}
    count = 0

    def rank(number: int) -> tuple[int, int]:
        return -levels[number], number

    for step in steps:
        if step == "send":
            priority = data.draw(st.integers(0, 9)) if priorities else 4
            levels[count] = int(priority > 4) if priorities == 2 else priority
            sender.send(count, priority=priority)
            available.append(count)
            available.sort(key=rank)
            count += 1
            while available and len(available) + len(held) > 4:
                available.remove(min(available, key=lambda number: (levels[number], number)))
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
                available.sort(key=rank)
    assert [Message.decode(each).body for each in world.peek("q", 9)] == available
