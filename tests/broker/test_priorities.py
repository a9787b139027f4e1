"""Priority bands (Part 3 §3.2.1), and the order within them."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import World
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queue.shelf import effective_priority
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.termini import COPY

#: levels → the effective priority of each priority from 0 to 11, by the letter of §3.2.1
BANDS: dict[int, list[int]] = {
    1: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    2: [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    3: [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2],
    4: [0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3],
    5: [0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4],
    9: [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8],
    10: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9],
    12: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
}


@pytest.mark.req("M6")
@pytest.mark.parametrize("levels", BANDS)
def test_priorities_fall_into_bands(levels: int) -> None:
    assert [effective_priority(each, levels) for each in range(12)] == BANDS[levels]
    assert effective_priority(255, levels) == levels - 1


@pytest.mark.req("M4", "M6", "B6", "B22")
def test_higher_priorities_come_first_and_equal_ones_in_order() -> None:
    world = World(Queue("q", priorities=10))
    client = world.client()
    sender = client.sender("q")
    for name, priority in [("a", 4), ("b", 9), ("c", None), ("d", 0), ("e", 9), ("f", 5)]:
        sender.send(name, **({} if priority is None else {"priority": priority}))
    browser = client.receiver("q", credit=9, distribution_mode=COPY)
    order = ["b", "e", "f", "a", "c", "d"]
    assert browser.bodies == order
    assert [each.payload[-1:] for each in world.host.space().find("q").held.peek(9)] == [
        name.encode() for name in order
    ]
    receiver = client.receiver("q", credit=3)
    assert receiver.bodies == ["b", "e", "f"]
    # A requeued message takes its old place, before later ones and after those that rank higher.
    sender.send("g", priority=9)
    receiver.settle(RELEASED, 1, 2)
    rest = client.receiver("q", credit=9, settle=ACCEPTED)
    assert rest.bodies == ["e", "g", "f", "a", "c", "d"]
    assert browser.bodies[6:] == ["g"]


@pytest.mark.req("M6", "B20")
def test_a_browser_sees_what_comes_later_once() -> None:
    world = World(Queue("q", priorities=5))
    client = world.client()
    browser = client.receiver("q", credit=9, distribution_mode=COPY)
    sender = client.sender("q")
    for name, priority in [("a", 4), ("b", 9), ("c", 1)]:
        sender.send(name, priority=priority)
    assert browser.bodies == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.req("M6", "B6")
@given(
    st.sampled_from([2, 3, 7, 10]),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["send", "get", "return"])), max_size=40),
)
def test_a_queue_with_priorities_is_a_sorted_list(
    levels: int, steps: list[tuple[int, str]]
) -> None:
    world = World(Queue("q", priorities=levels))
    client = world.client()
    sender = client.sender("q")
    receiver = client.receiver("q")
    model: list[tuple[int, int]] = []
    held: list[tuple[int, tuple[int, int]]] = []
    count = 0
    for priority, step in steps:
        if step == "send":
            sender.send(count, priority=priority)
            model.append((-effective_priority(priority, levels), count))
            count += 1
        elif step == "get" and model:
            before = len(receiver.bodies)
            receiver.grant(1)
            model.sort()
            first = model.pop(0)
            assert receiver.bodies[before:] == [first[1]]
            held.append((before, first))
        elif step == "return" and held:
            index, back = held.pop(priority % len(held))
            receiver.settle(RELEASED, index)
            model.append(back)
    rest = client.receiver("q", credit=99, settle=ACCEPTED)
    expected: list[Any] = [number for _, number in sorted(model)]
    assert rest.bodies == expected
