"""Cost does not grow with what is there. Counted in executed lines of the broker, not in time."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from brokers import World

import amqp_rt
from amqp_rt.broker.entries import Entry
from amqp_rt.broker.filtering.filters import FilterSet
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Outcome
from amqp_rt.values import Described, Symbol

pure = pytest.mark.skipif(amqp_rt.COMPILED, reason="compiled code has no lines to count")


def lines(work: Callable[[], object]) -> int:
    """How many lines of the broker *work* executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("amqp_rt.broker."):
            return None
        if event == "line":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def payload(size: int = 100) -> bytes:
    return bytes(Message(b"x" * size).encode())


def filled(depth: int) -> World:
    world = World(Queue("q"))
    for _ in range(depth):
        world.host.space().publish("q", payload())
    return world


@pure
def test_depth() -> None:
    def hop(depth: int) -> int:
        world = filled(depth)
        sender = world.client().sender("q")
        receiver = world.client().receiver("q")

        def work() -> None:
            sender.send(*range(300))
            receiver.grant(300)
            receiver.settle(ACCEPTED)

        return lines(work)

    assert hop(20_000) <= 1.05 * hop(300)


@pure
@pytest.mark.parametrize("credit", [0, 1_000], ids=["idle", "waiting"])
def test_consumers(credit: int) -> None:
    def hop(consumers: int) -> int:
        world = World(Queue("q"))
        sender = world.client().sender("q")
        receivers = []
        for n in range(consumers):
            if n % 200 == 0:
                client = world.client()
            receivers.append(client.receiver("q", credit=credit))
        receivers[-1].grant(1_000)

        def work() -> None:
            sender.send(*range(100))
            for receiver in receivers:
                if receiver.endpoint.deliveries:
                    receiver.settle(ACCEPTED)

        return lines(work)

    # Each consumer that got something is told apart by its own batch of outcomes.
    assert hop(400) <= (1.05 if not credit else 3) * hop(2)


@pure
@pytest.mark.parametrize("order", ["oldest", "newest", "random"])
@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED], ids=str)
def test_unsettled(order: str, outcome: Outcome) -> None:
    def settle(unsettled: int) -> int:
        world = filled(unsettled)
        receiver = world.client().receiver("q", credit=unsettled)
        while world.host.turns.unfinished:
            world.host.turns.run_pending()
            world.pump()
        indexes = list(range(unsettled))
        if order == "newest":
            indexes.reverse()
        elif order == "random":
            random.Random(7).shuffle(indexes)
        return lines(lambda: receiver.settle(outcome, *indexes[:100]))

    assert settle(4_000) <= 1.2 * settle(100)


@pure
def test_a_browser_far_behind() -> None:
    def calls_at(depth: int) -> int:
        world = filled(depth)
        browser = world.client().receiver("q", distribution_mode="copy")
        browser.grant(depth - 200)
        browser.settle(ACCEPTED)
        return lines(lambda: browser.grant(100))

    assert calls_at(4_000) <= 1.05 * calls_at(300)


@pytest.mark.slow
@pure
def test_nodes() -> None:
    def hop(nodes: int) -> int:
        world = World(Queue("q"))
        for n in range(nodes):
            world.host.space().declare(Queue(f"q{n}"))
        client = world.client()
        receiver = client.receiver("q", credit=100)
        sender = client.sender("q")

        def work() -> None:
            sender.send(*range(100))
            receiver.settle(ACCEPTED)

        return lines(work)

    assert hop(5_000) == hop(1)


@pytest.mark.slow
@pytest.mark.parametrize("header", [False, True])
def test_memory_of_a_queued_message(header: bool) -> None:
    world = World(Queue("q"))
    count = 20_000
    template = bytes(Message(b"x" * 100, durable=header).encode())
    world.host.space().publish("q", template)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(count):
        world.host.space().publish("q", bytes(bytearray(template)))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / count <= 220


def test_queued_messages_are_invisible_to_the_collector() -> None:
    world = filled(100)
    entries = world.host.space().nodes["q"].held.peek(100)
    assert len(entries) == 100
    assert not any(gc.is_tracked(entry) for entry in entries)
    assert not gc.is_tracked(Entry(b"", avoid=frozenset({1})))


def test_subscribers_share_the_payload() -> None:
    world = World(Topic("t"))
    client = world.client()
    for _ in range(3):
        client.receiver("t")
    world.host.space().publish("t", payload())
    queues = world.host.space().nodes["t"].held._queues.values()
    assert len({id(queue.peek(1)[0].payload) for queue in queues}) == 1


def selecting(text: str) -> dict[object, object]:
    return {Symbol("jms-selector"): Described(Symbol("apache.org:selector-filter:string"), text)}


@pytest.mark.slow
@pytest.mark.req("B21", "B22")
def test_selectors_of_a_deep_priority_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    matches = FilterSet.matches

    def counted(self: FilterSet, entry: Entry, publisher: str | None) -> bool:
        nonlocal looked
        looked += 1
        return matches(self, entry, publisher)

    monkeypatch.setattr(FilterSet, "matches", counted)

    def work(depth: int, consumers: int) -> int:
        nonlocal looked
        world = World(Queue("q", priorities=10))
        for n in range(depth):
            color = f"c{n * 20 // depth % consumers}" if n % (depth // 20) == 0 else "none"
            message = Message(n, priority=n % 10, application_properties={"color": color})
            world.host.space().publish("q", bytes(message.encode()))
        looked = 0
        client = world.client()
        receivers = [
            client.receiver("q", filter=selecting(f"color = 'c{n}'"), credit=1)
            for n in range(consumers)
        ]
        for _ in range(20):
            for receiver in receivers:
                receiver.settle(ACCEPTED)
                receiver.grant(1)
                while world.host.turns.unfinished:
                    world.host.turns.run_pending()
                    world.pump()
        assert sum(len(receiver.bodies) for receiver in receivers) == 20
        return looked

    # Each consumer looks at each message once, when it is the first that it may have, and at none again.
    assert work(2_000, 1) <= 2_100
    assert work(2_000, 5) <= 5 * 2_100
    assert work(8_000, 5) <= 5 * 8_100
