"""Drivers, workers and brokers are killed at random for as long as wanted, and the ledger balances.

Queries read a log, a lease and a spool, and write exactly once into a queue and a log, some of them twice in a
``foreachBatch``. One writes at least once: the negative control, which loses nothing either, and doubles. What they
read is written exactly once, too, while all this happens. Every row is known by its number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.options import read_options
from amqp_rt_spark.writing import Sink, Task

#: How long it goes on, and the seed of what happens.
SECONDS = float(os.environ.get("AMQP_RT_CHAOS_SECONDS", "1800"))
SEED = int(os.environ.get("AMQP_RT_CHAOS_SEED", "0")) or random.SystemRandom().randrange(2**32)

#: From the moment when all queries of a driver run to its end by us, and between other kills.
DRIVER_S = 5.0, 40.0
KILL_S = 1.5, 8.0
#: At most so long a broker stays away.
AWAY_S = 6.0

NODES = "log:3 in post out sunk:2 twice:2"
ADDRESSES = "log", "in", "post"
#: Prefix of the rows of each query → the node that it writes to.
WRITTEN = {"log": "out", "lease": "sunk", "spool": "out", "first": "out", "second": "out"}

DRIVER = """
import json, sys, time
from amqp_rt_spark.java import session

url, folder, conf, once = sys.argv[1:]
spark = session("local[4,8]", conf=json.loads(conf))


def source(address, **more):
    options = {"url": url, "address": address, "body": "text", "columns": "body", **more}
    options["maxMessagesPerTrigger"] = "500"
    return spark.readStream.format("amqp").options(**options).load()


def named(rows, name):
    # Rows that come slowly: whatever happens then happens in the middle of a task.
    slow = "coalesce(java_method('java.lang.Thread', 'sleep', 3L), 'null')"
    return rows.repartition(2).selectExpr(f"if({slow} = 'null', concat('{name} ', body), body) body")


def start(name, writer):
    writer = writer.option("checkpointLocation", folder + "/checkpoints/" + name)
    trigger = {"availableNow": True} if once == "once" else {"processingTime": "500 milliseconds"}
    query = writer.trigger(**trigger).start()
    # Queries start in turn: Spark gives a Python that it starts ten seconds to answer.
    while query.isActive and query.lastProgress is None:
        time.sleep(0.1)
    return query


def copy(name, rows, address, **more):
    options = {"url": url, "address": address, **more}
    return start(name, named(rows, name).writeStream.format("amqp").options(**options))


def both(rows, number):
    options = {"url": url, "address": "out", "producer": "both"}
    for name in ("first", "second"):
        named(rows, name).write.format("amqp").options(**options).mode("append").save()


queries = [
    copy("twice", source("log"), "twice", delivery="at-least-once"),
    copy("log", source("log", group="log"), "out"),
    copy("lease", source("in", mode="lease", group="lease"), "sunk"),
    copy("spool", source("post", mode="spool", spoolDir=folder + "/spool"), "out"),
    start("both", source("log", minPartitions="4").writeStream.foreachBatch(both)),
]
print("started", flush=True)
if once == "once":
    for query in queries:
        query.awaitTermination()
else:
    spark.streams.awaitAnyTermination()
"""


#: Spark's error for a Python that did not answer in ten seconds, on a busy machine.
_TOO_SLOW = "Python worker failed to connect back"


def body_of(number: int) -> str:
    """A row: its number, and something whose length shows whether it is whole. Some are large."""
    return f"{number} " + "x" * (number % 97 if number % 500 else 300_000)


class Feeder(threading.Thread):
    """Writes the next numbers to all addresses, each exactly once, until it is to stop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self.count = 0
        # A connection of its own: the ledger's is used by another thread.
        options = {"url": url, "containerId": "feeder"}
        self._sinks = [
            Sink(
                read_options({**options, "address": address}, "sink"),
                ["body", "properties"],
                streaming=True,
            )
            for address in ADDRESSES
        ]

    def run(self) -> None:
        try:
            for epoch in count():
                if self.stopped.wait(0.5):
                    return
                numbers = range(self.count, self.count + 20)
                for sink in self._sinks:
                    rows = [
                        {"body": body_of(each), "properties": {"message_id": f"message {each}"}}
                        for each in numbers
                    ]
                    sink.publish([sink.send(rows, Task(0, 0, epoch, "feeder", "run"))])
                self.count = numbers.stop
        except BaseException as error:
            self.failure = error


def session_of(leader: int) -> Iterator[tuple[int, bytes]]:
    """The processes of a session, with their commands."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):
            stat = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
            if int(stat[3]) == leader:
                yield int(folder.name), (folder / "cmdline").read_bytes()


class Drivers:
    """The driver of all queries, which is started again whenever it has ended."""

    def __init__(self, url: str, conf: dict[str, str], folder: Path) -> None:
        self._url = url
        # Spark tidies up when it ends by itself only.
        self._conf = json.dumps({**conf, "spark.local.dir": str(folder / "scratch")})
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        #: When all queries of the driver were seen to run, and how many workers of it were killed.
        self._since: float | None = None
        self.workers = 0
        #: Drivers that have ended although all their workers were alive.
        self.failed: list[Path] = []
        self.starts = 0
        self.own_ends = 0

    @property
    def said(self) -> Path:
        return self._folder / f"driver {self.starts}"

    def start(self, once: str = "on") -> None:
        self.starts += 1
        self._since, self.workers = None, 0
        with self.said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, self._url, str(self._folder), self._conf, once],
                start_new_session=True,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def look(self) -> None:
        """Start the driver again if it has ended by itself."""
        assert self._process is not None
        if self._process.poll() is None:
            return
        self.own_ends += 1
        if not self.workers and _TOO_SLOW not in self.said.read_text("utf-8"):
            self.failed.append(self.said)
        self.start()

    @property
    def running_s(self) -> float:
        """How long all queries of the driver have run; negative if they do not yet."""
        if self._since is None:
            if "started" not in self.said.read_text("utf-8").splitlines():
                return -1.0
            self._since = time.monotonic()
        return time.monotonic() - self._since

    def kill_worker(self, luck: random.Random) -> bool:
        """Kill a process of Python that Spark has started, if there is one."""
        assert self._process is not None
        workers = [
            number
            for number, command in session_of(self._process.pid)
            if b"pyspark.daemon" in command or b"worker" in command
        ]
        if not workers:
            return False
        self.workers += 1
        with suppress(ProcessLookupError):
            os.kill(luck.choice(workers), signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Kill the driver; its workers find that out by themselves."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self, within_s: float) -> int:
        """Let all queries go on to the end."""
        for _ in range(3):
            self.start("once")
            assert self._process is not None
            ended = self._process.wait(within_s)
            if not ended or _TOO_SLOW not in self.said.read_text("utf-8"):
                break
        return ended

    def close(self) -> None:
        if self._process is not None:
            self.kill()
            for number, _ in session_of(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


@pytest.fixture
def drivers(
    broker_process_with: Callable[[str], Any], spark_conf: dict[str, str], tmp_path: Path
) -> Iterator[tuple[Any, Drivers]]:
    broker = broker_process_with(NODES)
    found = Drivers(broker.url, spark_conf, tmp_path)
    yield broker, found
    found.close()


def rows_in(endpoint: Endpoint, node: str) -> Iterator[str]:
    parts = dict(each.partition(":")[::2] for each in NODES.split())[node]
    # With its retries: the broker may still be starting.
    states = connections.call(endpoint, node, "READ")
    there = connections.wire(endpoint)
    if not parts:
        yield from (message.body for message in there.browse(node))
    for part in states["partitions"] if parts else ():
        number, first, end = (int(part[name]) for name in ("partition", "first", "next"))
        for _, message in there.read(node, number, first, end):
            yield message.body


def wait_for_rows(endpoint: Endpoint, within_s: float = 30.0) -> None:
    """Wait until the control writes: a driver that ends then has rows out that its checkpoint does not know."""

    def count() -> int:
        parts = connections.call(endpoint, "twice", "READ")["partitions"]
        return sum(int(part["next"]) for part in parts)

    before, until = count(), time.monotonic() + within_s
    while count() == before and time.monotonic() < until:
        time.sleep(0.01)


def ledger(endpoint: Endpoint) -> dict[str, Counter[int]]:
    """Query → how often each number was found, of rows that are whole."""
    found: dict[str, Counter[int]] = {name: Counter() for name in (*WRITTEN, "twice")}
    for node in {*WRITTEN.values(), "twice"}:
        for body in rows_in(endpoint, node):
            name, _, row = body.partition(" ")
            number = int(row.partition(" ")[0])
            assert row == body_of(number)
            assert WRITTEN.get(name, "twice") == node
            found[name][number] += 1
    return found


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(SECONDS + 1_800)
@pytest.mark.req("K2", "K3", "K5", "K6")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="workers are found by /proc")
def test_the_ledger_balances_whatever_is_killed(drivers: tuple[Any, Drivers]) -> None:
    broker, queries = drivers
    luck = random.Random(SEED)
    print(f"AMQP_RT_CHAOS_SEED={SEED}")
    happened: Counter[str] = Counter()
    feeder = Feeder(broker.url)
    feeder.start()
    queries.start()
    try:
        until = time.monotonic() + SECONDS
        driver_s = luck.uniform(*DRIVER_S)
        while time.monotonic() < until or len(happened) < 4:
            time.sleep(luck.uniform(*KILL_S))
            assert feeder.failure is None, feeder.failure
            queries.look()
            running_s = queries.running_s
            if running_s > driver_s:
                wait_for_rows(broker.endpoint)
                queries.kill()
                queries.start()
                driver_s = luck.uniform(*DRIVER_S)
                happened["driver"] += 1
            elif running_s < 0 and luck.random() < 0.8:
                # A query that never runs meets nothing.
                continue
            elif luck.random() < 0.4:
                if queries.kill_worker(luck):
                    happened["worker"] += 1
            else:
                end = luck.choice((signal.SIGTERM, signal.SIGKILL))
                broker.restart(end, luck.choice((0.0, luck.uniform(0.0, AWAY_S))))
                happened[end.name] += 1
    finally:
        feeder.stopped.set()
        feeder.join(300)
    assert feeder.failure is None, feeder.failure
    queries.kill()
    assert queries.finish(900) == 0, queries.said.read_text("utf-8")[-3_000:]
    # The content of the nodes is in the store.
    broker.restart(signal.SIGKILL)
    found = ledger(broker.endpoint)
    control = found.pop("twice")
    print(
        f"{feeder.count} rows for each query; {dict(happened)}; {queries.own_ends} drivers ended with their workers; "
        f"at least once: {control.total()} rows"
    )
    expected = Counter(range(feeder.count))
    for name, rows in found.items():
        lost, doubled = expected - rows, rows - expected
        assert (lost, doubled) == (Counter(), Counter()), name
    # The negative control: nothing is lost without an answer, and whatever had none is doubled.
    assert set(control) == set(expected)
    assert control.total() > feeder.count
    # No loss of the broker has ended a query.
    assert not queries.failed, queries.failed[0].read_text("utf-8")[-3_000:]
    assert set(happened) == {"driver", "worker", "SIGTERM", "SIGKILL"}
