"""Retries of messages whose handlers fail: their pauses, attempts and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from brokers import client_of
from paged import in_line
from trio.testing import MockClock

from amqp_rt import (
    Broker,
    Container,
    Message,
    Modify,
    Retry,
    node,
)
from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.outcomes import Modified
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.testing.clocks import VirtualClock

POLICY = Retry(3, first_s=10, factor=3, most_s=100, jitter=0, never=(ValueError,))


class Handler:
    """Handler that records the times of its calls, and fails as often as it should."""

    def __init__(self, failures: int = 100, error: type[Exception] = RuntimeError) -> None:
        self.start = trio.current_time()
        self.times: list[float] = []
        self.failures = failures
        self.error = error

    def fail(self) -> None:
        self.times.append(round(trio.current_time() - self.start, 1))
        if len(self.times) <= self.failures:
            raise self.error("it does not work")


def failing(handler: Handler, **options: Any) -> Callable[..., Any]:
    @node("orders", **options)
    async def place(order: str) -> None:
        handler.fail()

    return place


@asynccontextmanager
async def worker(broker: Broker, *nodes: Any, **options: Any) -> AsyncIterator[None]:
    """Run a container that consumes from *broker* with *nodes*."""
    async with (
        Container("worker", network=broker.container.network, **options) as container,
        container.connect("memory://b", reconnect=None) as peer,
    ):
        await container.consume(peer, nodes)
        yield


@asynccontextmanager
async def running(*declared: Queue, store: MemoryStore | None = None) -> AsyncIterator[Broker]:
    # A commit in a thread would let the clock jump.
    async with Broker("b", clock=VirtualClock(), store=store, executor=in_line) as broker:
        for each in declared:
            await broker.declare(each)
        await broker.listen("memory://b")
        yield broker


async def send(broker: Broker, body: object, **properties: Any) -> None:
    async with client_of(broker) as peer, peer.sender("orders") as out:
        await out.send(body, **properties)


async def dead_letter(broker: Broker) -> Message:
    async with client_of(broker) as peer, peer.receiver("dead", credit=1) as dead:
        delivery = await dead.receive()
        delivery.accept()
        return delivery.message


@pytest.mark.req("A9", "B16")
async def test_a_queue_keeps_a_failed_message_for_growing_pauses(autojump_clock: MockClock) -> None:
    handler = Handler()
    async with (
        running(Queue("orders", dead_letter="dead")) as broker,
        worker(broker, failing(handler, retry=POLICY)),
    ):
        await send(broker, "o-1")
        given_up = await dead_letter(broker)
    assert handler.times == [0, 10, 40]
    assert given_up.body == "o-1"
    why = (given_up.message_annotations or {})["x-opt-dead-letter-description"]
    assert "failed 3 times, at last: RuntimeError" in why


async def test_a_message_that_no_attempt_can_help_is_rejected_at_once(
    autojump_clock: MockClock,
) -> None:
    handler = Handler(error=ValueError)
    async with (
        running(Queue("orders", dead_letter="dead")) as broker,
        worker(broker, failing(handler), retry=POLICY),
    ):
        await send(broker, "o-1")
        await dead_letter(broker)
    assert handler.times == [0]


async def test_on_error_of_a_node_goes_before_the_retry_of_its_container(
    autojump_clock: MockClock,
) -> None:
    handler = Handler(failures=1)
    async with (
        running(Queue("orders")) as broker,
        worker(broker, failing(handler, on_error=Modified(delivery_failed=True)), retry=POLICY),
    ):
        await send(broker, "o-1")
        await trio.sleep(5)
    assert handler.times == [0, 0]


def test_a_node_has_a_retry_or_an_outcome_for_errors() -> None:
    with pytest.raises(ValueError, match="retry or on_error, not both"):
        node("orders", retry=POLICY, on_error=Modified(delivery_failed=True))


@pytest.mark.req("B7", "B16")
async def test_two_workers_and_a_restart_of_the_broker_count_together(
    autojump_clock: MockClock,
) -> None:
    store = MemoryStore()
    declared = Queue("orders", dead_letter="dead")
    first, second = Handler(), Handler()
    async with (
        running(declared, store=store) as broker,
        worker(broker, failing(first, retry=POLICY)),
    ):
        await send(broker, "o-1", durable=True)
        await trio.sleep(1)
    await trio.sleep(2)
    async with (
        running(declared, store=store) as broker,
        worker(broker, failing(second, retry=POLICY)),
    ):
        given_up = await dead_letter(broker)
    assert (first.times, second.times) == ([0], [10, 40])
    assert given_up.delivery_count == 3


@pytest.mark.req("B7", "B23")
async def test_a_group_waits_for_its_failed_message_over_a_restart(
    autojump_clock: MockClock,
) -> None:
    store = MemoryStore()
    seen: list[str] = []

    @node("orders", retry=POLICY)
    async def place(order: str) -> None:
        seen.append(order)
        if order == "first" and seen.count("first") < 2:
            raise RuntimeError

    declared = Queue("orders", groups=8)
    async with running(declared, store=store) as broker:
        async with worker(broker, place):
            await send(broker, "first", group_id="g", durable=True)
            await trio.sleep(1)
            await send(broker, "second", group_id="g", durable=True)
            await trio.sleep(1)
        assert seen == ["first"]
    async with running(declared, store=store) as broker, worker(broker, place):
        await trio.sleep(5)
        assert seen == ["first"], "its group waits with it"
        await trio.sleep(5)
    assert seen == ["first", "first", "second"]


@pytest.mark.parametrize("returned", [False, True])
async def test_a_handler_asks_for_a_pause(returned: bool, autojump_clock: MockClock) -> None:
    times: list[float] = []

    @node("orders")
    async def place(order: str) -> object:
        times.append(trio.current_time())
        if len(times) > 1:
            return None
        later = Modify("the bank is closed", delay_s=120)
        if returned:
            return later
        raise later

    async with running(Queue("orders")) as broker, worker(broker, place):
        await send(broker, "o-1")
        await trio.sleep(200)
    assert round(times[1] - times[0]) == 120


async def test_a_receiver_asks_for_a_pause(autojump_clock: MockClock) -> None:
    async with running(Queue("orders")) as broker, client_of(broker) as peer:
        await send(broker, "o-1")
        async with peer.receiver("orders", credit=2) as orders:
            (await orders.receive()).modify(delay_s=60)
            start = trio.current_time()
            (await orders.receive()).accept()
            assert round(trio.current_time() - start) == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_s": -1},
        {"delay_s": float("inf")},
        {"delay_s": 1e18},
        {"delay_s": 1, "failed": False},
    ],
)
def test_a_pause_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="delay_s is"):
        Modify("later", **wrong)


@pytest.mark.parametrize(("pause_s", "held_s"), [(5, 5), (300, 20)])
async def test_another_broker_gets_a_failed_message_back_after_a_bounded_pause(
    pause_s: float, held_s: float, autojump_clock: MockClock
) -> None:
    # A client that sends to a node keeps nothing for a pause, as other brokers do not.
    retry = Retry(5, first_s=pause_s, most_s=pause_s, jitter=0)
    limits = Limits(retry_held_max_s=20)
    async with (
        Container("c", nodes=[failing(Handler(), retry=retry)], limits=limits) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        start = trio.current_time()
        receipt = out.send_nowait("o-1")
        outcome = await receipt.outcome()
        assert round(trio.current_time() - start) == held_s
        assert outcome == Modified(delivery_failed=True), "the peer would only store the request"


async def test_messages_that_are_held_use_credit_and_no_slot(autojump_clock: MockClock) -> None:
    seen: list[str] = []

    @node("orders", prefetch=3, retry=Retry(5, first_s=20, jitter=0, most_s=20))
    async def place(order: str) -> None:
        seen.append(order)
        raise RuntimeError

    async with (
        Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        receipts = [out.send_nowait(each) for each in "abcdef"]
        await trio.sleep(1)
        assert seen == ["a", "b", "c", "d"], "1 slot and 3 that wait"
        await trio.sleep(20)
        assert seen == ["a", "b", "c", "d", "e", "f"]
        assert [each.done for each in receipts] == [True] * 4 + [False] * 2


async def test_a_node_that_is_removed_gives_back_what_it_holds(autojump_clock: MockClock) -> None:
    place = failing(Handler(), retry=POLICY)
    async with (
        Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        receipt = out.send_nowait("o-1")
        await trio.sleep(1)
        assert not receipt.done
        start = trio.current_time()
        container.remove(place)
        assert await receipt.outcome() == Modified(delivery_failed=True)
        assert trio.current_time() - start < 1


async def test_the_end_of_a_container_gives_back_what_it_holds(autojump_clock: MockClock) -> None:
    handler = Handler()
    async with running(Queue("orders")) as broker:
        async with worker(broker, failing(handler, retry=POLICY)):
            await send(broker, "o-1")
            await trio.sleep(1)
            start = trio.current_time()
        assert trio.current_time() - start < 1


async def test_a_sender_asks_for_a_later_delivery(autojump_clock: MockClock) -> None:
    clock = VirtualClock()
    async with Broker("b", clock=clock) as broker:
        await broker.declare(Queue("orders"))
        async with broker.local() as peer, peer.receiver("orders", credit=5) as orders:
            async with peer.sender("orders") as out:
                at = datetime.fromtimestamp(clock.wall(), UTC) + timedelta(seconds=30)
                await out.send("at", deliver_at=at)
                await out.send("after", delay_s=10)
                await out.send(Message("now"), delay_s=0)
            start = trio.current_time()
            for body, due_s in (("now", 0), ("after", 10), ("at", 30)):
                delivery = await orders.receive()
                delivery.accept()
                assert delivery.body == body
                assert trio.current_time() - start == pytest.approx(due_s, abs=1.1)
                if body == "at":
                    assert delivery.message.deliver_at == at.replace(
                        microsecond=at.microsecond // 1000 * 1000
                    )


def test_a_delay_is_read_and_removed() -> None:
    message = Message("m", delay_s=1.5, message_annotations={"x-opt-a": 1})
    assert Message.decode(message.encode()).delay_s == 1.5
    assert Message.decode(message.replace(delay_s=None).encode()).message_annotations == {
        "x-opt-a": 1
    }
    assert (Message("m").delay_s, Message("m").deliver_at) == (None, None)
    with pytest.raises(ValueError, match="a delay is"):
        Message("m", delay_s=-1)
    with pytest.raises(ValueError, match="time zone"):
        Message("m", deliver_at=datetime(2030, 1, 1))  # noqa: DTZ001


async def test_a_pause_that_is_too_long_for_the_wire_is_shortened(
    autojump_clock: MockClock,
) -> None:
    handler = Handler()
    forever = Retry(2, first_s=1e300, most_s=float("inf"))
    async with (
        running(Queue("orders")) as broker,
        worker(broker, failing(handler, retry=forever)),
    ):
        await send(broker, "o")
        await trio.sleep(1000)
        assert broker.stats("orders").delayed == 1, "it is not back at once"
    assert handler.times == [0]
