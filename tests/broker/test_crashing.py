"""A broker that is killed: acknowledged messages are present, settled ones are gone, the order is kept."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import paged_broker
import pytest
import trio

from amqp_rt import Connection, Sender, connect
from amqp_rt.errors import ConnectionLost, LinkDetached
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.stores.sqlite import SQLiteStore


def serve_of(path: Path) -> list[str]:
    """Return the command of ``amqp-rt serve`` with a store."""
    return [
        *(sys.executable, "-m", "amqp_rt.cli", "serve", "--listen", "amqp://127.0.0.1:0"),
        *("--node", "queue:work", "--store", f"sqlite:{path}", "--log-level", "warning"),
    ]


def paged_of(path: Path) -> list[str]:
    """Return the command of a broker that keeps only some messages in memory."""
    return [sys.executable, str(Path(paged_broker.__file__)), str(path)]


class Served:
    """Broker in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.url: str = json.loads(line.removeprefix("ready "))["listeners"][0]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate()
        return self.process.returncode


def body_of(number: int) -> bytes:
    text = b"%d " % number + bytes(number % 251 for _ in range(number % 900))
    return text + zlib.crc32(text).to_bytes(4, "big")


def number_of(body: bytes) -> int:
    text, crc = body[:-4], body[-4:]
    assert zlib.crc32(text).to_bytes(4, "big") == crc
    return int(text.split(b" ")[0])


@contextmanager
def suppress_lost() -> Iterator[None]:
    """Suppress the errors of a lost connection."""
    try:
        yield
    except* (ConnectionLost, LinkDetached):
        pass


class Ledger:
    """Messages sent, acknowledged, received and settled."""

    senders = 50

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.received: set[int] = set()
        #: Messages accepted by us and settled by the broker.
        self.done: set[int] = set()

    async def work(self, url: str, kill: trio.Event, luck: random.Random) -> None:
        """Send and consume until the broker has ended, some time after *kill* is set."""
        before = len(self.acknowledged)
        with suppress_lost():
            async with connect(url, reconnect=None) as peer, trio.open_nursery() as nursery:
                nursery.start_soon(self.produce, peer)
                nursery.start_soon(self.consume, peer)
                await trio.sleep(luck.uniform(0.05, 0.4))
                # On a busy machine that was too early for anything to be lost.
                while len(self.acknowledged) < before + 50:  # noqa: ASYNC110 - several tasks count it
                    await trio.sleep(0.01)
                kill.set()

    async def produce(self, peer: Connection) -> None:
        async with peer.sender("work") as out, trio.open_nursery() as nursery:
            for _ in range(self.senders):
                nursery.start_soon(self.send, out)

    async def send(self, out: Sender) -> None:
        while True:
            number = self.sent
            self.sent += 1
            await out.send(body_of(number), durable=True)
            self.acknowledged.add(number)

    async def consume(self, peer: Connection) -> None:
        async with peer.receiver("work", credit=20, rcv_settle_mode=RCV_SECOND) as messages:
            async for delivery in messages:
                number = number_of(delivery.body)
                assert number not in self.done
                self.received.add(number)
                delivery.accept()
                await delivery.settled()
                self.done.add(number)

    def check(self, left: list[int]) -> None:
        """Check that the messages *left* in the queue are those without a known settlement."""
        assert len(set(left)) == len(left), "something is there twice"
        assert left == sorted(left), "the order is another one"
        assert not self.done & set(left), "something settled came back"
        lost = self.acknowledged - self.received - set(left)
        assert not lost, f"{len(lost)} acknowledged messages are lost"
        assert all(number < self.sent for number in left), "something was invented"


async def kill_often(
    command: list[str], ledger: Ledger, luck: random.Random, long_run: bool
) -> None:
    """Start the broker repeatedly, and kill it while it works."""
    for _ in range(100 if long_run else 3):
        served = await trio.to_thread.run_sync(Served, command)
        kill = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ledger.work, served.url, kill, luck)
            await kill.wait()
            await trio.to_thread.run_sync(served.end, signal.SIGKILL)


async def remaining(command: list[str], *, credit: int, within: float) -> list[int]:
    """Start the broker once more, and return the content of its queue."""
    served = await trio.to_thread.run_sync(Served, command)
    left: list[int] = []
    async with connect(served.url) as peer, peer.receiver("work", credit=credit) as messages:
        while (delivery := await messages.get(within=within)) is not None:
            left.append(number_of(delivery.body))
            delivery.accept()
    assert await trio.to_thread.run_sync(served.end, signal.SIGTERM) == 0
    return left


@pytest.mark.slow
@pytest.mark.req("B7", "B26", "M5")
async def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_back(
    tmp_path: Path, long_run: bool
) -> None:
    ledger = Ledger()
    command = serve_of(tmp_path / "broker.db")
    await kill_often(command, ledger, random.Random(7), long_run)
    left = await remaining(command, credit=100, within=0.3)
    assert len(ledger.acknowledged) > 100
    ledger.check(left)


class SlowLedger(Ledger):
    """Ledger that consumes less than is sent, with large messages in between that stay incomplete."""

    senders = 20
    #: Parts of the large messages that were sent.
    begun = 0

    async def work(self, url: str, kill: trio.Event, luck: random.Random) -> None:
        with suppress_lost():
            async with connect(url, reconnect=None) as peer, trio.open_nursery() as nursery:
                nursery.start_soon(self.produce, peer)
                nursery.start_soon(self.consume, peer)
                nursery.start_soon(self.begin_large, peer)
                await trio.sleep(luck.uniform(0.2, 0.5))
                while len(self.acknowledged - self.done) <= 100 or self.begun <= 10:  # noqa: ASYNC110 - several tasks count it
                    await trio.sleep(0.01)
                kill.set()

    async def begin_large(self, peer: Connection) -> None:
        async with peer.sender("work") as out, out.stream(durable=True) as body:
            while True:
                await body.write(b"cut" * 10_000)
                self.begun += 1
                await trio.sleep(0.01)

    async def consume(self, peer: Connection) -> None:
        async with peer.receiver("work", credit=5, rcv_settle_mode=RCV_SECOND) as messages:
            last = -1
            async for delivery in messages:
                number = number_of(delivery.body)
                assert number not in self.done, "something settled came back"
                assert number > last, "the order is another one"
                last = number
                self.received.add(number)
                delivery.accept()
                await delivery.settled()
                self.done.add(number)
                await trio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.req("B7", "B24", "B26")
async def test_a_broker_that_is_killed_finds_what_was_not_in_memory(
    tmp_path: Path, long_run: bool
) -> None:
    ledger = SlowLedger()
    path = tmp_path / "broker.db"
    await kill_often(paged_of(path), ledger, random.Random(11), long_run)
    assert ledger.begun > 10
    assert len(ledger.acknowledged - ledger.done) > 100, "there was nothing but what is in memory"
    ledger.check(await remaining(paged_of(path), credit=500, within=1))
    store = SQLiteStore(path)
    store.open()
    while store.tidy():
        pass
    for node in range(1, 4):
        assert store.summary(node)[0] == 0, "something is left in the store"
    store.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM pieces").fetchone() == (0,)
