"""Stuck work is found, logged once an episode, and counted while it lasts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio
from branching import XaSession, xid_of

from amqp_rt import Container, Limits, Message, node
from amqp_rt.broker.broker import Broker
from amqp_rt.broker.clocks import RunClock
from amqp_rt.broker.nodes import Queue
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.telemetry.stuck import CAUSES, StuckWatch
from amqp_rt.transactions import XaStatus, Xid

pytestmark = pytest.mark.req("O4")


class Found:
    """Log lines and counts of a broker."""

    def __init__(self, container: Container, caplog: pytest.LogCaptureFixture) -> None:
        self._container = container
        self._caplog = caplog
        caplog.set_level(logging.INFO, "amqp_rt.stuck")

    @property
    def lines(self) -> list[str]:
        return [each.getMessage() for each in self._caplog.records if each.name == "amqp_rt.stuck"]

    def of(self, cause: str) -> list[str]:
        return [each for each in self.lines if each.startswith(f"stuck: {cause} ")]

    def count(self, cause: str) -> int:
        return self._container.tallies.stuck[cause]


async def test_a_delivery_that_is_not_settled(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q") as receiver,
        ):
            for episode in (1, 2):
                await sender.send(b"x")
                delivery = await receiver.receive()
                await trio.sleep(290)
                assert len(found.of("unsettled")) == episode - 1
                await trio.sleep(800)
                assert len(found.of("unsettled")) == episode
                assert found.count("unsettled") == 1
                asked = peer.management()
                ages = [each["oldest_unsettled_s"] async for each in asked.query("amqp_rt.session")]
                assert ages == [pytest.approx(1090, abs=11)]
                (all_,) = [each async for each in asked.query("amqp_rt.container")]
                assert all_["stuck"] == 1
                delivery.accept()
                await trio.sleep(20)
                assert found.count("unsettled") == 0
    assert "'q'" in found.lines[0]
    assert receiver.name in found.lines[0]


async def test_deliveries_that_are_settled_in_time_are_not_stuck(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q", credit=1) as receiver,
        ):
            await sender.send_many([b"x"] * 10)
            for _ in range(8):
                delivery = await receiver.receive()
                await trio.sleep(250)
                delivery.accept()
    assert found.lines == []


async def test_a_queue_whose_consumer_wants_none_of_its_messages(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q", selector="kind = 'never'"),
        ):
            await sender.send(b"x")
            await trio.sleep(400)
            assert found.count("undelivered") == 1
            async with peer.receiver("q") as receiver:
                (await receiver.receive()).accept()
            await trio.sleep(20)
            assert found.count("undelivered") == 0
    (line,) = found.lines
    assert "queue 'q': 1 messages, 1 consumers" in line


async def test_a_queue_without_consumers(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        broker.publish("q", Message(b"x").encode())
        await trio.sleep(1_000)
        assert found.count("unattended") == 1
        await broker.delete("q")
        await trio.sleep(20)
        assert found.count("unattended") == 0
    (line,) = found.of("unattended")
    assert "'q'" in line
    (record,) = [each for each in caplog.records if each.name == "amqp_rt.stuck"]
    assert record.levelno == logging.INFO


async def test_a_sender_without_credit(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q", length_max=1))
        async with broker.local() as peer, peer.sender("q") as sender:
            await sender.send(b"x")
            waiting = sender.send_nowait(b"waits")
            await trio.sleep(400)
            assert found.count("sender") == 1
            await broker.purge("q")
            await waiting.accepted()
            await broker.purge("q")
            await trio.sleep(20)
            assert found.count("sender") == 0
    (line,) = found.of("sender")
    assert sender.name in line
    assert "length_max" in line


async def test_messages_of_a_client_that_gets_no_credit(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker("broker") as broker:
        await broker.declare(Queue("q", length_max=1))
        await broker.listen("memory://broker")
        async with Container("worker", network=broker.container.network) as worker:
            worker.start_handler(StuckWatch(worker).run)
            found = Found(worker, caplog)
            async with worker.connect("memory://broker") as peer, peer.sender("q") as sender:
                await sender.send(b"x")
                await trio.sleep(400)
                # There is no credit, and no message that waits for it.
                assert found.count("credit") == 0
                receipts = [sender.send_nowait(b"waits") for _ in range(2)]
                await trio.sleep(400)
                assert found.count("credit") == 1
                assert len(found.of("credit")) == 1
                # One leaves: the next one has waited for as long, but there is progress.
                await broker.purge("q")
                await receipts[0].accepted()
                await trio.sleep(200)
                assert found.count("credit") == 0
                await trio.sleep(200)
                assert found.count("credit") == 1
                await broker.purge("q")
                await receipts[1].accepted()
                await trio.sleep(20)
                assert found.count("credit") == 0
    line, _ = found.of("credit")
    assert f"link {sender.name!r} to 'q' of 'broker'" in line
    assert "2 messages without an outcome" in line


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_prepared_branch_without_its_coordinator(
    restarted: bool, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock = MemoryStore(), RunClock()
    xid = xid_of(1)
    async with Broker(store=store, executor=at_once, clock=clock) as broker:
        await broker.declare(Queue("to"))
        session = XaSession(broker.host)
        session.work(xid, b"x")
        assert await session.ended("prepare", xid) is XaStatus.OK
        session.close()
        if not restarted:
            await _branch_is_found(broker, caplog, xid, later_s=0)
            return
        await trio.sleep(250)
    # Its age counts from its preparation, over restarts, too.
    async with Broker(store=store, executor=at_once, clock=clock) as broker:
        await _branch_is_found(broker, caplog, xid, later_s=250)


async def _branch_is_found(
    broker: Broker, caplog: pytest.LogCaptureFixture, xid: Xid, *, later_s: float
) -> None:
    found = Found(broker.container, caplog)
    await trio.sleep(290 - later_s)
    assert found.count("branch") == 0
    await trio.sleep(20)
    assert found.count("branch") == 1
    (line,) = found.of("branch")
    assert str(xid) in line
    assert "of user 'user'" in line
    operator = XaSession(broker.host)
    assert await operator.ended("roll_back", xid) is XaStatus.OK
    await trio.sleep(20)
    assert found.count("branch") == 0


async def at_once(call: Callable[..., Any], *args: Any) -> Any:
    """Run calls of the store in the event loop."""
    return call(*args)


async def test_a_commit_that_takes_long(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hang = False

    async def execute(call: Callable[..., Any], *args: Any) -> Any:
        if hang:
            await trio.sleep(30)
        return call(*args)

    async with Broker(store=MemoryStore(), executor=execute) as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        async with broker.local() as peer, peer.sender("q") as sender:
            hang = True
            await sender.send(b"x", durable=True)
            hang = False
            assert len(found.of("commit")) == 1
            await trio.sleep(20)
            assert found.count("commit") == 0


async def test_an_old_transaction(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        async with broker.local() as peer, peer.sender("q") as sender:
            async with peer.transaction() as transaction:
                sender.send_nowait(b"x", transaction=transaction)
                await trio.sleep(25)
                assert found.lines == []
                await trio.sleep(25)
                assert found.count("transaction") == 1
                asked = [each async for each in peer.management().query("amqp_rt.transaction")]
            await trio.sleep(20)
            assert found.count("transaction") == 0
    (line,) = found.of("transaction")
    assert "rolled back after 60 s" in line
    # Operators find the transaction by its name, and its client.
    (entity,) = asked
    assert f"transaction {entity['name']} of {entity['container_id']!r} at " in line


async def test_a_handler_and_the_line_where_it_waits(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[int] = []

    @node("slow/{what}")
    async def slow(body: bytes, *, what: str) -> None:
        await trio.sleep(1)
        frame = inspect.currentframe()
        assert frame is not None
        lines.append(frame.f_lineno + 1)
        await trio.sleep(500)

    @node("quick")
    async def quick(body: bytes) -> None:
        await trio.sleep(100)

    async with Broker(nodes=[slow, quick]) as broker:
        found = Found(broker.container, caplog)
        async with (
            broker.local() as peer,
            peer.sender("slow/x") as sender,
            peer.sender("quick") as other,
        ):
            receipt = sender.send_nowait(b"x")
            for _ in range(4):
                await other.send(b"x")
            assert found.count("handler") == 1
            await receipt.accepted()
            await trio.sleep(20)
            assert found.count("handler") == 0
    (line,) = found.of("handler")
    assert "slow at 'slow/{what}'" in line
    assert f"waits in test_stuck.py:{lines[0]} (slow)" in line


async def test_a_container_without_a_broker_is_watched_on_request(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @node("slow")
    async def slow(body: bytes) -> None:
        await trio.sleep(100)

    async with Container("all", nodes=[slow], limits=Limits(stuck_after_s=50)) as all_:
        found = Found(all_, caplog)
        all_.start_handler(StuckWatch(all_).run)
        async with all_.local() as peer, peer.sender("slow") as sender:
            await sender.send(b"x")
    assert len(found.of("handler")) == 1


async def test_zero_turns_the_watch_off(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker(limits=Limits(stuck_after_s=0)) as broker:
        found = Found(broker.container, caplog)
        await broker.declare(Queue("q"))
        broker.publish("q", Message(b"x").encode())
        await trio.sleep(1_000)
    assert found.lines == []


async def test_lines_of_one_cause_are_limited(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        found = Found(broker.container, caplog)
        await broker.declare(*(Queue(f"q{number}") for number in range(400)))
        for number in range(400):
            broker.publish(f"q{number}", Message(b"x").encode())
        await trio.sleep(400)
        assert found.count("unattended") == 400
    assert 0 < len(found.lines) < 100


def test_each_cause_has_a_description() -> None:
    assert set(CAUSES) == {
        *("unsettled", "undelivered", "unattended", "sender", "credit", "commit", "transaction"),
        *("branch", "handler"),
    }
