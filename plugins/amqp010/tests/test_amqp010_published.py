"""Messages published over sockets, by the project's own client and by qpid-python, and a broker that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import stored010
import trio
from client010 import Client, connected
from driven010 import Driven
from msgspec.structs import replace
from octets010 import Operation
from protocol010 import EXPLICIT, Failed
from served010 import serving

from amqp_rt import connect
from amqp_rt.fronts import DEFAULT_LIMITS

DURABLE = {"delivery_mode": 2}


async def bodies(url: str, queue: str) -> list[bytes]:
    """Return the messages of *queue*, consumed by AMQP 1.0."""
    found: list[bytes] = []
    async with connect(url) as connection, connection.receiver(queue, credit=200) as receiver:
        while (delivery := await receiver.get(within=0.2)) is not None:
            found.append(bytes(delivery.body))
            delivery.accept()
    return found


@pytest.mark.req("D2", "N19")
async def test_messages_reach_consumers_of_1_0() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        for number in range(500):
            session.transfer("", b"%d" % number, key="q", accept_mode=None)
        await session.sync()
        assert session.state.answers_of_broker == []
        found = await bodies(served.url, "q")
        assert found == [b"%d" % number for number in range(500)]


def named(answers: list[Operation]) -> list[tuple[str, Any]]:
    return [(each.name, each.fields["transfers"]) for each in answers]


@pytest.mark.req("D12", "D15")
async def test_answers_come_before_the_completion() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        taken = session.transfer("", b"x", key="q", accept_mode=EXPLICIT)
        lost = session.transfer("", b"x", key="nowhere", accept_mode=EXPLICIT, sync=True)
        await session.done(lost)
        assert named(session.state.answers_of_broker) == [
            ("message.accept", [(taken, taken)]),
            ("message.reject", [(lost, lost)]),
        ]


async def test_a_message_that_is_too_large_ends_the_session() -> None:
    limits = replace(DEFAULT_LIMITS, message_size_max=10_000)
    async with serving(limits=limits) as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        with pytest.raises(Failed) as caught:
            await session.done(session.transfer("", bytes(10_001), key="q", sync=True))
        assert caught.value.code == 506


@pytest.mark.req("D10", "D11")
async def test_a_replayed_transfer_is_not_executed_twice() -> None:
    async with serving() as served:
        async with served.client() as client:
            session = await client.session(b"s")
            session.state.ask_timeout(60)
            await session.call("queue.declare", queue="q")
            for number in range(20):
                session.transfer("", b"%d" % number, key="q")
            await session.sync()
            await client.cut()
        session.state.incomplete.update(range(1, 21))
        async with served.client() as client:
            again = await client.resume(session.state)
            again.transfer("", b"20", key="q")
            await again.sync()
            assert await bodies(served.url, "q") == [b"%d" % number for number in range(21)]


def headers_of(message: Operation) -> dict[str, Any]:
    found: dict[str, Any] = message.header("message-properties").application_headers
    return found


def number_of(message: Operation) -> int:
    number = headers_of(message)["qpid.msg_sequence"]
    assert isinstance(number, int)
    return number


@pytest.mark.req("D3")
async def test_an_exchange_numbers_the_messages_of_all_sessions(tmp_path: Path) -> None:
    arguments = {"qpid.msg_sequence": 1}
    async with serving(store=f"sqlite:{tmp_path}/m.db") as served, served.client() as client:
        first, second = await client.session(b"1"), await client.session(b"2")
        await first.call(
            "exchange.declare", exchange="e", type="fanout", durable=True, arguments=arguments
        )
        lost = first.transfer("e", b"to no queue", accept_mode=None, sync=True)
        await first.done(lost)
        # More queues than one step of publishing serves.
        for name in (f"q{number}" for number in range(25)):
            await first.call("queue.declare", queue=name, durable=True)
            await first.call("exchange.bind", queue=name, exchange="e", binding_key="")
        # The sender's own number counts no more than that of another broker.
        forged = {"application_headers": {"qpid.msg_sequence": 77, "mine": "kept"}}
        for body in (b"a", b"b"):
            first.transfer("e", body, properties=forged)
            second.transfer("e", body)
        await first.sync()
        await second.sync()
        for name in ("q0", "q24"):
            await first.subscribe(name, name)
            found = [await first.message() for _ in range(4)]
            assert sorted(map(number_of, found)) == [2, 3, 4, 5]
            own = [each for each in found if "mine" in headers_of(each)]
            assert [each.body for each in own] == [b"a", b"b"]
            assert number_of(own[0]) < number_of(own[1])
    async with serving(store=f"sqlite:{tmp_path}/m.db") as served, served.client() as client:
        session = await client.session(b"1")
        await session.call("queue.declare", queue="new")
        await session.call("exchange.bind", queue="new", exchange="e", binding_key="")
        await session.subscribe("new", "d")
        session.transfer("e", b"after the restart")
        assert number_of(await session.message()) == 1


@pytest.mark.req("D2")
async def test_only_selected_messages_stay_in_a_queue_with_a_filter(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/m.db"
    async with serving(store=store) as served, served.client() as client:
        session = await client.session(b"1")
        await session.call("exchange.declare", exchange="e", type="fanout", durable=True)
        for name, arguments in (("all", None), ("some", {"qpid.filter": "colour = 'red'"})):
            await session.call("queue.declare", queue=name, durable=True, arguments=arguments)
            await session.call("exchange.bind", queue=name, exchange="e", binding_key="")
        for delivery in ({}, DURABLE):
            for colour in ("red", "blue"):
                headers = {"application_headers": {"colour": colour}}
                session.transfer(
                    "e",
                    colour.encode(),
                    properties=headers,
                    delivery=delivery,
                    accept_mode=EXPLICIT,
                )
        await session.sync()
        # The sender of a message that is not selected does not learn that.
        assert {each.name for each in session.state.answers_of_broker} == {"message.accept"}
        for name, count in (("all", 4), ("some", 2)):
            answer: Any = await session.call("queue.query", queue=name)
            assert answer.message_count == count
    async with serving(store=store) as served, served.client() as client:
        # The declaration outlives the process, and so do stored messages that are selected.
        session = await client.session(b"1")
        for colour in ("blue", "red"):
            headers = {"application_headers": {"colour": colour}}
            session.transfer("e", colour.encode() + b" again", properties=headers)
        await session.sync()
        assert await bodies(served.url, "some") == [b"red", b"red again"]
        assert await bodies(served.url, "all") == [b"red", b"blue", b"blue again", b"red again"]


@pytest.mark.req("D3")
async def test_the_broker_assigns_the_expiration() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        before = time.time()
        stated = {"expiration": 77}
        session.transfer("", b"expires", key="q", delivery={**stated, "ttl": 60_000})
        session.transfer("", b"stays", key="q", delivery=stated)
        await session.sync()
        await session.subscribe("q", "d")
        expires, stays = [(await session.message()).header("delivery-properties") for _ in range(2)]
        # Both are rounded up: the time left to milliseconds, the expiration to seconds.
        assert before + 60 <= expires.expiration <= time.time() + 62
        assert 0 < expires.ttl <= 60_000
        assert (stays.expiration, stays.ttl) == (77, None)


# --- qpid-python -------------------------------------------------------------------------------------


@pytest.mark.req("D2", "D12")
async def test_qpid_messaging_sends(messaging: Driven) -> None:
    async with serving() as served:
        await messaging.step("connect", "c", f"127.0.0.1:{served.port}")
        await messaging.step("session", "s", "c")
        await messaging.step("sender", "out", "s", "q; {create: always}")
        for number in range(10):
            await messaging.step("send", "out", bytes([number]))
        await messaging.step("close", "c")
        assert await bodies(served.url, "q") == [bytes([number]) for number in range(10)]


@pytest.mark.req("R12")
async def test_qpid_messaging_commits_and_rolls_back(messaging: Driven) -> None:
    async with serving() as served:
        await messaging.step("connect", "c", f"127.0.0.1:{served.port}")
        await messaging.step("session", "s", "c", True)
        await messaging.step("sender", "out", "s", "q; {create: always}")
        await messaging.step("send", "out", b"kept")
        await messaging.step("commit", "s")
        await messaging.step("send", "out", b"dropped")
        await messaging.step("rollback", "s")
        for end in ("rollback", "commit"):
            # After a rollback the library grants a receiver messages, but no octets.
            await messaging.step("receiver", "in", "s", "q")
            message = await messaging.step("fetch", "in")
            assert message["content"] == b"kept"
            await messaging.step("acknowledge", "s")
            await messaging.step(end, "s")
            await messaging.step("close", "in")
        await messaging.step("send", "out", b"made")
        await messaging.step("commit", "s")
        await messaging.step("close", "c")
        assert await bodies(served.url, "q") == [b"made"]


# --- crashes -----------------------------------------------------------------------------------------


class Process:
    """Broker with a store, in a process of its own."""

    def __init__(self, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(stored010.__file__)), str(store)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2].rstrip("/"))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with connected(stream) as client:
            yield client


@contextmanager
def started(store: Path) -> Iterator[Process]:
    process = Process(store)
    try:
        yield process
    finally:
        process.kill()
        assert process.process.stdout is not None
        process.process.stdout.close()


@pytest.mark.req("D12", "N17", "R12")
@pytest.mark.slow
@pytest.mark.parametrize("transactional", [False, True])
async def test_what_is_complete_survives_a_kill(tmp_path: Path, transactional: bool) -> None:
    """Each durable transfer, or each transaction of ten, that is complete is there, once and in order."""
    sent = 0
    batches: list[range] = []
    in_doubt: list[range] = []
    for cycle in range(3):
        with started(tmp_path / "store.db") as process, suppressed():
            async with process.client() as client, trio.open_nursery() as nursery:
                session = await client.session(b"s")
                await session.call("queue.declare", queue="q", durable=True)
                if transactional:
                    await session.call("tx.select")
                nursery.start_soon(kill_later, process, 0.2 + 0.07 * cycle)
                while True:
                    batches.append(range(sent, sent + 10))
                    for number in batches[-1]:
                        session.transfer("", b"%d" % number, key="q", delivery=DURABLE)
                    sent += 10
                    await session.call("tx.commit" if transactional else "execution.sync")
        # The kill has come between its sending and its completion.
        in_doubt.append(batches[-1])
    with started(tmp_path / "store.db") as process:
        found = [int(each) for each in await bodies(process.url, "q")]
    assert sent > 100
    assert found == sorted(set(found))
    assert set(found) >= {each for batch in batches if batch not in in_doubt for each in batch}
    if transactional:
        assert all(len(set(each) & set(found)) in (0, 10) for each in in_doubt)


async def kill_later(process: Process, delay_s: float) -> None:
    await trio.sleep(delay_s)
    await trio.to_thread.run_sync(process.kill)


@contextmanager
def suppressed() -> Iterator[None]:
    """Suppress the errors of a connection whose broker is killed."""
    try:
        yield
    except* (Failed, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
