"""A broker that is stopped, killed or cut off in the middle of reads, writes and commits."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark import connections, link_ends
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.drains import Drain
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.leasing import LeaseStream
from amqp_rt_spark.link_ends import Window
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options
from amqp_rt_spark.outlets import Outlet
from amqp_rt_spark.spooling import SpoolStream
from amqp_rt_spark.wire import Wire
from amqp_rt_spark.writing import Sink, Task

from amqp_rt import Message, sync
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError, ConnectFailed, ConnectionLost, DeadlineExceeded
from amqp_rt.limits import Limits

ROWS = 300
NUMBERS = list(range(ROWS))
ENDS = pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=str)
#: The same, for what is much like another test.
MORE_ENDS = pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL], ids=str
)


def source(url: str, address: str, **given: str) -> Any:
    return read_options(
        {
            "url": url,
            "address": address,
            "columns": "body",
            "body": "text",
            "credit": "20",
            **given,
        },
        "source",
    )


def sink(url: str, **given: str) -> Sink:
    options = {"url": url, "address": "out", "maxInFlight": "20", **given}
    return Sink(read_options(options, "sink"), ["body"], streaming=True)


def task(attempt: int = 1, epoch: int = 0) -> Task:
    return Task(0, attempt, epoch, "query", "run")


def rows(at: dict[int, Callable[[], object]], end: int = ROWS) -> Iterator[dict[str, Any]]:
    """Rows, and what happens before some of them."""
    for number in range(end):
        if number in at:
            at[number]()
        yield {"body": str(number)}


def read(it: Any, span: Any, at: dict[int, Callable[[], object]]) -> list[int]:
    """The numbers in the rows of *span*, and what happens when some of them have come."""
    found = []
    for row in it.read(span):
        found.append(int(row[0]))
        if len(found) in at:
            at[len(found)]()
    return found


def planned(it: Any) -> Any:
    """The only task of the first batch of a stream."""
    begin = it.initialOffset()
    (span,) = it.partitions(begin, it.latestOffset(begin, SimpleNamespace()))
    return span


# --- A broker that is started again --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("K2")
@ENDS
def test_a_log_is_read_on_at_its_offset(broker_process: Any, end: signal.Signals) -> None:
    broker_process.send("one", *map(str, NUMBERS))
    stream = LogStream(source(broker_process.url, "one"))
    again = {50: lambda: broker_process.restart(end)}
    assert read(stream, planned(stream), again) == NUMBERS
    batch = Batch(source(broker_process.url, "one"))
    broker_process.restart(end)
    (span,) = batch.partitions()
    assert read(batch, span, {}) == NUMBERS
    assert broker_process.starts == 3


@pytest.mark.slow
@pytest.mark.req("K5")
@MORE_ENDS
def test_a_lease_is_read_on_at_its_number(broker_process: Any, end: signal.Signals) -> None:
    broker_process.send("in", *map(str, NUMBERS))
    options = source(broker_process.url, "in", mode="lease", group="g")
    stream = LeaseStream(options)
    begin = stream.initialOffset()
    broker_process.restart(end)
    until = stream.latestOffset(begin, SimpleNamespace())
    (span,) = stream.partitions(begin, until)
    assert read(stream, span, {50: lambda: broker_process.restart(end)}) == NUMBERS
    broker_process.restart(end)
    stream.commit(until)
    assert broker_process.bodies("in") == []


@pytest.mark.slow
@pytest.mark.req("K6")
@MORE_ENDS
def test_a_spool_takes_its_share_again(
    broker_process: Any, end: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker_process.send("in", *map(str, NUMBERS))
    options = source(broker_process.url, "in", mode="spool", spoolDir=str(tmp_path / "spool"))
    stream = SpoolStream(options)
    begin = stream.initialOffset()
    until = stream.latestOffset(begin, SimpleNamespace())
    # The message that has told that there are some is lost with the connection, and waits again.
    broker_process.restart(end)
    spans = stream.partitions(begin, until)
    take = Drain.take
    calls = count()

    def taking(drain: Drain, most: int) -> list[Any]:
        if next(calls) == 2:
            broker_process.restart(end)
        return take(drain, most)

    monkeypatch.setattr(Drain, "take", taking)
    found = [number for span in spans for number in read(stream, span, {})]
    assert sorted(found) == NUMBERS
    assert broker_process.bodies("in") == []


@pytest.mark.slow
@pytest.mark.req("K3")
@ENDS
def test_what_is_staged_is_gone_on_with(broker_process: Any, end: signal.Signals) -> None:
    again = {at: lambda: broker_process.restart(end) for at in (50, 170)}
    it = sink(broker_process.url)
    done = it.send(rows(again), task())
    broker_process.restart(end)
    assert it.publish([done])
    # In order, each of them once.
    assert broker_process.bodies("out") == [str(number) for number in NUMBERS]


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
@MORE_ENDS
def test_at_least_once_is_no_less(broker_process: Any, end: signal.Signals) -> None:
    again = {at: lambda: broker_process.restart(end) for at in (50, 170)}
    done = sink(broker_process.url, delivery="at-least-once").send(rows(again), task())
    assert done.count == ROWS
    found = Counter(broker_process.bodies("out"))
    assert set(found) == {str(number) for number in NUMBERS}
    # Twice is at most what had no answer.
    assert sum(found.values()) <= ROWS + 2 * 20


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
def test_a_broker_that_stays_away_ends_the_task(tmp_path: Path) -> None:
    away = Endpoint("amqp://127.0.0.1:1", retry_s=0.2)
    with pytest.raises(ConnectFailed, match=r"tried again for 0\.2 s \(retryTimeout\)"):
        connections.call(away, "one", "READ")
    for work in (
        lambda: list(connections.records(away, "one", 0, 0, 1)),
        lambda: list(connections.browsed(away, "one")),
        lambda: sink(away.url, retryTimeout="200ms").send(rows({}), task()),
    ):
        with pytest.raises(ConnectFailed, match=r"tried again for 0\.2 s"):
            work()


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
def test_a_browse_that_has_begun_is_not_begun_again(broker_process: Any) -> None:
    """A browse cannot continue where the connection was lost: rows would be returned twice."""
    broker_process.send("in", *map(str, NUMBERS))
    batch = Batch(source(broker_process.url, "in", mode="browse"))
    broker_process.restart(signal.SIGKILL)
    (span,) = batch.partitions()
    connections.forget(batch.options.endpoint)
    with pytest.raises(AmqpError):
        read(batch, span, {50: lambda: broker_process.restart(signal.SIGKILL)})
    # The task is done again.
    assert sorted(read(batch, span, {})) == NUMBERS


# --- A connection that is cut --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("K2", "K5")
@pytest.mark.parametrize("mode", ["log", "lease"])
def test_a_reader_goes_on_wherever_it_is_cut(served: Any, relay: Any, mode: str) -> None:
    served.send("one" if mode == "log" else "in", *map(str, range(30)))
    given = {"credit": "7", "group": "g"}
    if mode == "log":
        it: Any = LogStream(source(relay.url, "one", **given))
    else:
        it = LeaseStream(source(relay.url, "in", mode="lease", **given))
    span = planned(it)
    for at in range(1, 31):
        assert read(it, span, {at: relay.cut}) == list(range(30)), at
    assert relay.cuts == 30


@pytest.mark.slow
@pytest.mark.req("K3")
def test_a_writer_goes_on_wherever_it_is_cut(served: Any, relay: Any) -> None:
    """Also twice in a row, and while it asks how much has arrived."""
    it = sink(relay.url, maxInFlight="20")
    for epoch, at in enumerate(range(31)):

        def cut(twice: bool = bool(at % 2)) -> None:
            relay.cut()
            if twice:
                relay.cut_at(b"STAGE", heard=False)

        done = it.send(rows({at: cut, 15: relay.cut}, 30), task(epoch, epoch))
        assert (done.count, it.publish([done])) == (30, True), at
        assert served.bodies("out")[30 * epoch :] == [str(number) for number in range(30)], at


@pytest.mark.req("K2", "K3")
def test_without_a_time_to_try_again_the_first_cut_ends_it(served: Any, relay: Any) -> None:
    """The negative control, and how it was."""
    served.send("one", *map(str, range(30)))
    it = LogStream(source(relay.url, "one", credit="7", retryTimeout="0"))
    span = planned(it)
    with pytest.raises(ConnectionLost):
        read(it, span, {10: relay.cut})
    out = sink(relay.url, retryTimeout="0")
    with pytest.raises(ConnectionLost):
        out.send(rows({10: relay.cut}), task())
    done = out.send(rows({}), task(2))
    relay.cut_at(b"COMMIT-EPOCH", heard=True)
    with pytest.raises(ConnectionLost):
        out.publish([done])
    # The epoch was published, and the query does not know.
    assert not sink(relay.url).publish([done])


@pytest.mark.req("K3")
@pytest.mark.parametrize("heard", [False, True])
def test_a_commit_whose_answer_is_lost_is_asked_again(served: Any, relay: Any, heard: bool) -> None:
    it = sink(relay.url)
    done = it.send(rows({}), task())
    relay.cut_at(b"COMMIT-EPOCH", heard=heard)
    assert it.publish([done]) is not heard
    assert relay.cuts == 1
    assert served.bodies("out") == [str(number) for number in NUMBERS]


@pytest.mark.req("K3")
def test_what_the_broker_has_lost_ends_the_task(served: Any, relay: Any) -> None:
    """A broker without a store: what it had accepted for the attempt is gone when it starts again."""
    it = sink(relay.url)

    def lose() -> None:
        relay.cut()
        # Staged messages are deleted with the node.
        served.broker.delete("out")
        served.broker.declare(Queue("out"))

    with pytest.raises(AmqpError, match="the task has to be done again") as caught:
        it.send(rows({100: lose}), task())
    assert caught.value.condition == "amqp:precondition-failed"


# --- Spark ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.req("K2", "K3")
@pytest.mark.parametrize(
    ("streaming", "end"),
    [
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(True, signal.SIGKILL, marks=pytest.mark.long),
        (False, signal.SIGKILL),
    ],
)
def test_spark_does_not_notice(
    spark: Any, broker_process: Any, tmp_path: Path, streaming: bool, end: signal.Signals
) -> None:
    """The broker starts again while tasks read and write, and between micro-batches."""
    from pyspark.sql.functions import udf

    count = 2_000
    bodies = [str(number) for number in range(count)]
    broker_process.send("log", *bodies)
    begun, again = tmp_path / "begun", tmp_path / "again"

    @udf(returnType="string", useArrow=False)
    def waiting(body: str) -> str:
        if body == "50":
            begun.touch()
            while not again.exists():
                time.sleep(0.01)
        return body

    url = broker_process.url
    read = spark.readStream if streaming else spark.read
    source = read.format("amqp").options(url=url, address="log", body="text", credit="20")
    if streaming:
        source = source.option("maxMessagesPerTrigger", str(count // 2))
    found = source.load().select(waiting("body").alias("body"))

    def restart() -> None:
        while not begun.exists():
            time.sleep(0.01)
        broker_process.restart(end)
        again.touch()
        if streaming:
            while not broker_process.bodies("out"):
                time.sleep(0.01)
            broker_process.restart(end)

    out = {"url": url, "address": "out", "producer": "job", "maxInFlight": "20"}
    # Spark knows Python's formats only in threads that have a session, so the query stays in this one.
    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(restart)
        if streaming:
            writer = found.writeStream.format("amqp").options(**out).trigger(availableNow=True)
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            assert writer.start().awaitTermination(100)
        else:
            found.write.format("amqp").options(**out).mode("append").save()
        restarted.result()
    assert broker_process.starts == (3 if streaming else 2)
    assert Counter(broker_process.bodies("out")) == Counter(bodies)


# --- Tasks that do nothing for long --------------------------------------------------------------


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Any]:
    """A broker that ends connections which are silent for a second."""
    limits = Limits(close_grace_s=0.2, idle_timeout_s=0.5, log_batch_bytes_max=400)
    with sync.Broker(limits=limits, store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
        broker.declare(Queue("in"), Queue("out"), Log("one", partitions=1))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        for address in ("one", "in"):
            out = Outlet(connections.wire(Endpoint(url)), address, timeout_s=30)
            for number in NUMBERS:
                out.send(Message(str(number), durable=True).encode())
            out.finish()
        yield SimpleNamespace(url=url, broker=broker)
        connections.forget(Endpoint(url))


def be_silent() -> None:
    """As long as the peer allows, and longer."""
    time.sleep(1.5)


@pytest.mark.slow
@pytest.mark.req("K2", "K5")
@pytest.mark.parametrize("mode", ["log", "lease"])
def test_a_reader_that_is_silent_for_long_goes_on(hasty: Any, mode: str) -> None:
    def stream(**given: str) -> Any:
        if mode == "log":
            return LogStream(source(hasty.url, "one", **given))
        return LeaseStream(source(hasty.url, "in", mode="lease", group="g", **given))

    it = stream()
    assert read(it, planned(it), {50: be_silent}) == NUMBERS
    # The negative control, and how it was.
    without = stream(retryTimeout="0")
    with pytest.raises(ConnectionLost):
        read(without, planned(without), {50: be_silent})


@pytest.mark.slow
@pytest.mark.req("K3")
@pytest.mark.parametrize("at", [0, 50])
def test_a_writer_that_is_silent_for_long_goes_on(hasty: Any, at: int) -> None:
    """Before its first row, too: it attaches when that is there."""
    it = sink(hasty.url)
    connections.wire(it.options.endpoint)
    done = it.send(rows({at: be_silent}), task())
    be_silent()
    assert it.publish([done])
    found = [message.body for message in connections.wire(it.options.endpoint).browse("out")]
    assert found == [str(number) for number in NUMBERS]
    if at:
        # The negative control, and how it was.
        with pytest.raises(ConnectionLost):
            sink(hasty.url, retryTimeout="0").send(rows({at: be_silent}), task(2, 1))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.req("K2", "K3")
def test_a_slow_function_of_a_user_ends_no_query(spark: Any, hasty: Any) -> None:
    """The sink has attached, and waits for the rows that the function has not made yet."""
    from pyspark.sql.functions import udf

    @udf(returnType="string", useArrow=False)
    def slow(body: str) -> str:
        # Spark hands rows over by the hundred: some have been sent, and others come later.
        if body in ("0", "150"):
            time.sleep(1.5)
        return body

    given = {"url": hasty.url, "address": "one", "body": "text"}
    found = spark.read.format("amqp").options(**given).load()
    out = {"url": hasty.url, "address": "out", "producer": "slow"}
    found.select(slow("body").alias("body")).write.format("amqp").options(**out).mode(
        "append"
    ).save()
    bodies = [message.body for message in connections.wire(Endpoint(hasty.url)).browse("out")]
    assert Counter(bodies) == Counter(map(str, NUMBERS))


def test_a_sink_attaches_at_its_first_row(served: Any) -> None:
    it = sink(served.url)
    connections.forget(it.options.endpoint)

    def look() -> None:
        assert not [each for _, each in connections._WIRES if each == it.options.endpoint]

    it.send(rows({0: look}, 3), task())
    # A task without rows has its part, too.
    empty = it.send(rows({}, 0), Task(1, 2, 0, "query", "run"))
    assert empty.count == 0


# --- Room ----------------------------------------------------------------------------------------


@pytest.mark.req("K3")
def test_who_waits_for_room_for_too_long_is_told_what_to_raise() -> None:
    limits = Limits(staged_bytes_max=4_000, close_grace_s=0.2)
    with sync.Broker(limits=limits, volatile=True) as broker:
        broker.declare(Queue("out"))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        it = sink(url, settleTimeout="300ms")
        with pytest.raises(
            DeadlineExceeded, match=r"staged_bytes_max.*maxMessagesPerTrigger"
        ) as caught:
            it.send(rows({}), task())
        assert caught.value.condition == "amqp:resource-limit-exceeded"
        connections.forget(it.options.endpoint)


@pytest.mark.req("K3")
def test_writers_that_find_no_room_wait_for_each_other() -> None:
    """Ten times what may be staged, and the room is shared by two: none of it is refused, or lost."""
    limits = Limits(staged_bytes_max=200_000, close_grace_s=0.2)
    with sync.Broker(limits=limits, volatile=True) as broker:
        broker.declare(Queue("out"))
        (url,) = broker.listen("amqp://127.0.0.1:0")

        def write(name: str) -> None:
            it = sink(url, producer=name, containerId=name)
            for epoch in range(25):
                sent = ({"body": f"{name} {epoch} {n} ".ljust(10_000, ".")} for n in range(8))
                assert it.publish([it.send(sent, task(epoch, epoch))])

        with ThreadPoolExecutor() as pool:
            list(pool.map(write, ("one", "two")))
        found = Counter(
            tuple(message.body.split()[:3])
            for message in connections.wire(Endpoint(url)).browse("out")
        )
        assert found == Counter(
            (name, str(epoch), str(n))
            for name in ("one", "two")
            for epoch in range(25)
            for n in range(8)
        )
        for name in ("", "one", "two"):
            connections.forget(Endpoint(url, container_id=name))


@pytest.mark.parametrize(
    ("arrived", "credit"),
    [
        ([], 16),
        ([(1, 100)], 1_000),
        ([(10, 10 * 1_048_576)], 16),
        ([(10, 10 * 100_000)], 167),
        ([(1, 50_000_000)], 1),
        # Larger ones count at once, smaller ones little by little.
        ([(10, 1_000), (1, 1_048_576)], 16),
        ([(1, 1_048_576), (10, 1_000)], 21),
    ],
)
def test_large_messages_get_less_credit(arrived: list[tuple[int, int]], credit: int) -> None:
    window = Window(1_000)
    for number, size in arrived:
        window.note(number, size)
    assert window.credit == credit
    assert Window(3).credit == 3


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["", "1 = 1"])
def test_a_reader_of_large_records_has_few_on_the_way(
    served: Any, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Noted(Window):
        @property
        def credit(self) -> int:
            asked.append(super().credit)
            return asked[-1]

    monkeypatch.setattr(link_ends, "Window", Noted)
    served.send("one", *(bytes(2 * 1_048_576) for _ in range(30)))
    with Wire(served.endpoint) as it:
        found = it.records("one", 0, 0, 30, selector=selector)
        taken = sum(len(offsets) for offsets, *_ in found)
    assert taken == 30
    assert asked[0] <= 16  # Before it knows how large they are.
    assert max(asked[1:]) == 7  # Seven of 2 MiB fit into 16 MiB.
