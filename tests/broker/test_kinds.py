"""Queues that are sorted, that keep the last value of each key, and that deliver later."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
import trio
import trio.testing
from brokers import World
from hypothesis import given
from hypothesis import strategies as st
from paged import in_line

from amqp_rt import Broker, Limits, Message
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.broker.queue.keyed import LAST, MessageField, key_of, order_of
from amqp_rt.clock import Clock
from amqp_rt.outcomes import ACCEPTED, RELEASED, Rejected
from amqp_rt.stores.base import Store
from amqp_rt.values import Symbol, Timestamp, ULong


class Shifted:
    """The clocks of a trio run; the wall clock can be put forward or back."""

    def __init__(self) -> None:
        self.shift = 1_700_000_000.0

    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return trio.current_time() + self.shift


def at_once(store: Store, clock: Clock) -> Broker:
    broker = Broker(store=store, clock=clock)
    assert broker.host.journal is not None
    broker.host.journal.call = in_line
    return broker


def shown(world: World, address: str = "q") -> list[Any]:
    return [Message.decode(each).body for each in world.peek(address, 1_000)]


# --- Sorted ---


@pytest.mark.req("B22")
def test_a_sorted_queue_gives_the_lowest_first_and_equal_ones_as_they_came() -> None:
    world = World(Queue("q", sort_key="price"))
    client = world.client()
    out = client.sender("q")
    for body, price in [("c", 3), ("a", 1), ("d", 3), ("b", 2.5), ("e", None)]:
        properties = {} if price is None else {"price": price}
        out.send(body, application_properties=properties)
    assert shown(world) == ["a", "b", "c", "d", "e"]
    one = client.receiver("q", credit=2)
    assert one.bodies == ["a", "b"]
    out.send("between", application_properties={"price": 2})
    one.settle(RELEASED, 0)
    # Back in its place, whatever came meanwhile.
    assert client.receiver("q", credit=9).bodies == ["a", "between", "c", "d", "e"]


#: Values of keys, in their order.
IN_ORDER: list[Any] = [
    False,
    True,
    float("-inf"),
    -(2**63),
    -1.5,
    -1,
    0,
    5e-324,
    1,
    1.5,
    2**53,
    2**53 + 1,
    2**64 - 1,
    float("inf"),
    Timestamp(-1),
    dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
    Timestamp(1),
    "",
    "A",
    "Aa",
    Symbol("B"),
    "a",
    "é",
    b"",
    b"\x00\x01",
    b"\xff",
    UUID(int=0),
    UUID(int=1),
]


@pytest.mark.req("B22")
def test_keys_of_every_type_have_an_order() -> None:
    shuffled = random.Random(1).sample(IN_ORDER, len(IN_ORDER))
    assert sorted(shuffled, key=order_of) == IN_ORDER
    assert len({order_of(value) for value in IN_ORDER}) == len(IN_ORDER)
    assert all(order_of(value) < LAST for value in IN_ORDER)
    assert order_of(None) == order_of([1]) == order_of({}) == LAST


@given(st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False), st.integers(-(2**63), 2**64))
def test_numbers_are_ordered_by_what_they_are_worth(one: float, other: int) -> None:
    assert (order_of(one) < order_of(other)) == (one < other)
    assert (order_of(one) == order_of(other)) == (one == other)


def test_a_key_is_a_field_of_the_message() -> None:
    assert (MessageField("x").section, MessageField("x").name) == ("application-properties", "x")
    assert MessageField("a.b").name == "a.b"
    assert MessageField("properties.group-id").name == "group_id"
    assert MessageField("message-annotations.x-opt-key").section == "message-annotations"
    for text, why in [("properties.colour", "no property"), ("", "no field")]:
        with pytest.raises(ValueError, match=why):
            Queue("q", sort_key=text)
    with pytest.raises(ValueError, match="not of both"):
        Queue("q", sort_key="price", priorities=10)


def test_keys_that_are_alike_in_python_only_are_not_equal() -> None:
    assert key_of(True) != key_of(1)
    assert key_of(Symbol("a")) == key_of("a")
    assert key_of(float("nan")) == key_of(float("nan"))
    assert key_of([1]) is None


# --- Last value ---


@pytest.mark.req("B22")
def test_a_last_value_queue_keeps_the_last_of_each_key() -> None:
    world = World(Queue("q", last_value_key="properties.subject"))
    client = world.client()
    out = client.sender("q")
    for body, subject in [(1, "a"), (2, "b"), (3, "a"), (4, None), (5, None), (6, "b")]:
        out.send(body, subject=subject)
    assert shown(world) == [3, 4, 5, 6]
    stats = world.stats("q")
    assert (stats.available, stats.dropped, stats.enqueued) == (4, 2, 6)
    assert client.receiver("q", credit=4, settle=ACCEPTED).bodies == [3, 4, 5, 6]
    assert world.host.memory.held == 0
    # Nothing is remembered of what has gone.
    out.send(7, subject="a")
    assert shown(world) == [7]


@pytest.mark.req("B22")
@pytest.mark.parametrize("newer_is_taken", [False, True])
def test_an_outdated_message_does_not_come_back(newer_is_taken: bool) -> None:
    world = World(Queue("q", last_value_key="properties.subject"))
    client = world.client()
    out = client.sender("q")
    out.send("old", subject="a")
    holder = client.receiver("q", credit=1)
    out.send("new", subject="a")
    assert holder.bodies == ["old"]
    if newer_is_taken:
        assert client.receiver("q", credit=1, settle=ACCEPTED).bodies == ["new"]
    holder.settle(RELEASED)
    assert shown(world) == ([] if newer_is_taken else ["new"])
    assert world.stats("q").dropped == 1


@pytest.mark.req("B22")
@pytest.mark.parametrize("options", [{}, {"priorities": 10}, {"sort_key": "n"}])
def test_replaced_messages_leave_nothing_behind(options: dict[str, Any]) -> None:
    world = World(Queue("q", last_value_key="properties.subject", **options))
    client = world.client()
    out = client.sender("q")
    for turn in range(400):
        out.send(turn, subject=f"key {turn % 3}", application_properties={"n": -turn})
        if turn == 100:
            # The requeued message is in a heap, and replaced there.
            client.receiver("q", credit=3).detach()
        world.host.sweep()
    queue = world.host.space().find("q").held
    assert len(queue.shelf.older()) <= 200
    assert sorted(shown(world)) == [397, 398, 399]
    assert sorted(client.receiver("q", credit=9, settle=ACCEPTED).bodies) == [397, 398, 399]
    assert (world.host.memory.held, queue._latest) == (0, {})


@pytest.mark.req("B22", "B20")
def test_a_browser_of_a_last_value_queue_sees_the_changes() -> None:
    world = World(Queue("q", last_value_key="properties.subject"))
    client = world.client()
    out = client.sender("q")
    for n in range(4):
        out.send(n, subject="a")
    window = client.receiver("q", credit=9, distribution_mode="copy")
    out.send("b", subject="b")
    out.send(4, subject="a")
    assert window.bodies == [3, "b", 4]


@pytest.mark.req("B22", "B7")
async def test_order_and_keys_outlive_the_broker(kept: Callable[[], Store]) -> None:
    declared = [Queue("sorted", sort_key="n"), Queue("last", last_value_key="n")]
    async with Broker(store=kept()) as broker, broker.local() as peer:
        await broker.declare(*declared)
        for address in ("sorted", "last"):
            async with peer.sender(address) as out:
                for body, n in [("b", 2), ("a", 1), ("b again", 2)]:
                    await out.send(body, durable=True, application_properties={"n": n})
    async with Broker(store=kept()) as broker, broker.local() as peer:
        await broker.declare(*declared)
        async with peer.sender("last") as out:
            await out.send("a again", durable=True, application_properties={"n": 1})
        async with peer.receiver("sorted") as each, peer.receiver("last") as last:
            assert [(await each.get()).body for _ in range(3)] == ["a", "b", "b again"]
            assert [(await last.get()).body for _ in range(2)] == ["b again", "a again"]


# --- Later ---


def delayed(ms: int) -> dict[str, Any]:
    return {"message_annotations": {Symbol("x-opt-delivery-delay"): ULong(ms)}}


@pytest.mark.req("B28")
@pytest.mark.parametrize("key", ["x-opt-delivery-time", "x-opt-scheduled-enqueue-time"])
def test_a_message_comes_at_its_time_and_at_its_place(key: str) -> None:
    world = World(Queue("q"))
    client = world.client()
    out = client.sender("q")
    consumer = client.receiver("q", credit=9)
    at = Timestamp(int((world.time.now + 60) * 1000))
    out.send("at noon", message_annotations={Symbol(key): at})
    out.send("past", message_annotations={Symbol(key): Timestamp(1)})
    assert consumer.bodies == ["past"]
    assert world.stats("q").delayed == 1
    consumer.detach()
    out.send("now")
    assert shown(world) == ["past", "now"]
    world.time.now += 59
    world.host.turns.tick()
    assert shown(world) == ["past", "now"]
    world.time.now += 1
    world.host.turns.tick()
    assert shown(world) == ["at noon", "past", "now"]
    assert world.stats("q").delayed == 0


@pytest.mark.req("B28")
def test_what_is_due_is_seen_by_those_who_have_passed_its_place() -> None:
    world = World(Queue("q"))
    client = world.client()
    out = client.sender("q")
    browser = client.receiver("q", credit=99, distribution_mode="copy")
    out.send("first")
    out.send("later", **delayed(1_000))
    out.send("last")
    assert browser.bodies == ["first", "last"]
    world.time.now += 1
    world.host.turns.tick()
    world.pump()
    assert browser.bodies == ["first", "last", "later"]
    assert client.receiver("q", credit=9).bodies == ["first", "later", "last"]


@pytest.mark.req("B28", "B24")
def test_a_message_that_is_not_due_takes_room_and_can_expire() -> None:
    world = World(Queue("q", length_max=2, dead_letter="dead"))
    client = world.client()
    out = client.sender("q")
    out.send("later", ttl_ms=500, **delayed(1_000))
    out.send("now")
    assert out.link.credit == 0
    world.time.now += 1
    world.host.turns.tick()
    assert client.receiver("q", credit=9, settle=ACCEPTED).bodies == ["now"]
    assert shown(world, "dead") == ["later"]
    assert out.link.credit > 0


@pytest.mark.req("B28")
def test_a_delay_that_is_none_is_refused() -> None:
    world = World(Queue("q"))
    out = world.client().sender("q")
    out.send("soon", message_annotations={Symbol("x-opt-delivery-delay"): "soon"})
    (outcome,) = out.outcomes
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert "milliseconds" in (outcome.error.description or "")


@pytest.mark.req("B28")
def test_delays_hold_for_subscribers_and_not_for_logs() -> None:
    world = World(Topic("news"), Log("log"))
    client = world.client()
    reader = client.receiver("news", credit=9)
    client.sender("news").send("later", **delayed(1_000))
    client.sender("log").send("later", **delayed(1_000))
    assert reader.bodies == []
    assert world.log_stats("log").partitions[0].next == 1
    world.time.now += 1
    world.host.turns.tick()
    world.pump()
    assert reader.bodies == ["later"]


@pytest.mark.req("B28")
def test_queues_that_have_gone_leave_no_alarms() -> None:
    world = World(Queue("stays"), limits=Limits(nodes_max=10))
    client = world.client()
    client.sender("stays").send("later", **delayed(3_600_000))
    for _ in range(300):
        source = client.receiver(None, dynamic=True)
        address = source.link.source.address
        out = client.sender(address)
        out.send("later", **delayed(3_600_000))
        out.detach()
        source.detach()
    assert len(world.host.turns.alarms) <= 70
    world.time.now += 3_600
    world.host.turns.tick()
    assert shown(world, "stays") == ["later"]


@pytest.mark.req("B28")
async def test_a_delay_takes_as_long_as_it_says(autojump_clock: trio.testing.MockClock) -> None:
    clock: Clock = Shifted()
    async with Broker(clock=clock) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q") as out, peer.receiver("q") as inbox:
            began = trio.current_time()
            await out.send("second", **delayed(90_250))
            await out.send("first", **delayed(250))
            assert (await inbox.receive()).body == "first"
            assert trio.current_time() == pytest.approx(began + 0.25, abs=0.01)
            assert (await inbox.receive()).body == "second"
            assert trio.current_time() == pytest.approx(began + 90.25, abs=0.01)


@pytest.mark.slow
@pytest.mark.req("B28", "B7")
async def test_what_is_not_due_outlives_the_broker(
    kept: Callable[[], Store], autojump_clock: trio.testing.MockClock
) -> None:
    clock = Shifted()
    async with at_once(kept(), clock) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q") as out:
            at = Timestamp(int((clock.wall() + 300) * 1000))
            await out.send("delayed", durable=True, **delayed(100_000))
            await out.send("long", durable=True, **delayed(7_200_000))
            await out.send(
                "dated", durable=True, message_annotations={Symbol("x-opt-delivery-time"): at}
            )
    began = trio.current_time() + 50
    await trio.sleep(50)
    async with (
        at_once(kept(), clock) as broker,
        broker.local() as peer,
        peer.receiver("q") as inbox,
    ):
        assert (await inbox.receive()).body == "delayed"
        assert trio.current_time() == pytest.approx(began + 50, abs=1.1)
        assert (await inbox.receive()).body == "dated"
        assert trio.current_time() == pytest.approx(began + 250, abs=1.1)
    # Meanwhile the wall clock is put back: the whole delay again, and no more.
    clock.shift -= 86_400
    async with at_once(kept(), clock) as broker, broker.local() as peer:
        began = trio.current_time()
        async with peer.receiver("q") as inbox:
            for _ in range(2):
                # Not settled by anybody so far.
                (await inbox.receive()).accept()
            assert (await inbox.receive()).body == "long"
        assert trio.current_time() == pytest.approx(began + 7_200, abs=1.1)


@pytest.mark.req("B28")
async def test_clocks_that_jump(autojump_clock: trio.testing.MockClock) -> None:
    clock = Shifted()
    async with Broker(clock=clock) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q") as out, peer.receiver("q") as inbox:
            at = Timestamp(int((clock.wall() + 86_400) * 1000))
            await out.send("dated", message_annotations={Symbol("x-opt-delivery-time"): at})
            await out.send("delayed", **delayed(60_000))
            began = trio.current_time()
            clock.shift += 86_400
            # A time of day comes when the wall clock says so; a delay does not care.
            assert (await inbox.receive()).body == "dated"
            assert trio.current_time() - began < 2
            clock.shift -= 3 * 86_400
            assert (await inbox.receive()).body == "delayed"
            assert trio.current_time() - began == pytest.approx(60, abs=0.1)
