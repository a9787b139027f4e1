"""Simulation of Spark's micro-batch engine: its calls, in its order, with everything pickled
on the way as Spark does it, and with the driver killed at any of them.

The order was traced in Spark 4.3: the first offset is requested twice, the source learns of the end of
a batch only when the next one begins, a planned batch is repeated after a restart from the
logged offsets with the same number, perhaps with other partitions, and the sink has to commit again
every batch that was not recorded as committed. Real broker, real sockets, no Java.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.leasing import LeaseStream
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import Options, read_options
from amqp_rt_spark.schema import columns_of
from amqp_rt_spark.spooling import SpoolFile, SpoolStream
from amqp_rt_spark.streams import StartRemembered
from amqp_rt_spark.writing import EpochDiffers, Sink, Task, Written, plan_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amqp_rt import Message, sync
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError

MESSAGES = 40
ALL = Counter(map(str, range(MESSAGES)))
NEVER = 1_000_000


class DriverEnded(Exception):
    """Raised where the driver's process is killed."""


class TaskEnded(Exception):
    """Raised where the process of a task is killed."""


class Checkpoint:
    """Folder that outlives the driver: planned offsets by batch, and completed batches."""

    def __init__(self) -> None:
        self.offsets: dict[int, str] = {}
        self.commits: set[int] = set()


def moved(value: Any) -> Any:
    """Return *value* as it arrives in another process."""
    return pickle.loads(pickle.dumps(value))


class StagedSink:
    """Sink of the plug-in, unchanged."""

    def __init__(self, options: Options, source: Options) -> None:
        self.options = options
        self.read = columns_of(source)
        self.columns = [name for name in self.read if name != "address"]
        #: Run → the sink that is sent to its tasks.
        self.sinks: dict[str, Sink] = {}

    def write(self, rows: list[tuple[Any, ...]], task: Task, fail: bool) -> Written:
        if task.run not in self.sinks:
            self.sinks[task.run] = Sink(self.options, self.columns, streaming=True)
        sink = moved(self.sinks[task.run])

        def fields() -> Iterator[dict[str, Any]]:
            for number, row in enumerate(rows):
                if fail and number == len(rows) // 2:
                    raise OSError("the task fails")
                found = dict(zip(self.read, row, strict=True))
                yield {name: found[name] for name in self.columns}
            if fail and not rows:
                raise OSError("the task fails")

        return moved(sink.send(fields(), task))

    def commit(self, written: list[Written]) -> None:
        Sink(self.options, self.columns, streaming=True).publish(written)


class RowsByPosition:
    """Negative control: a sink that identifies rows by batch, partition and position."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    def write(self, rows: list[tuple[Any, ...]], task: Task, fail: bool) -> None:
        for number, row in enumerate(rows):
            if fail and number == len(rows) // 2:
                raise OSError("the task fails")
            self.known.setdefault((task.epoch, task.part, number), row)

    def commit(self, written: list[Any]) -> None:
        """Do nothing: all rows have been sent already."""


class BareLogs(StartRemembered, LogStream):
    """As for Spark 4.0 and 4.1."""


class BareLeases(StartRemembered, LeaseStream):
    """As for Spark 4.0 and 4.1."""


class BareSpools(StartRemembered, SpoolStream):
    """As for Spark 4.0 and 4.1."""


class Driver:
    """Driver of a query, for one life; the query ends when it has read everything (AvailableNow).

    Args:
        checkpoint: State shared by all lives.
        source: Options of the source.
        sink: Writes and commits.
        run: The id of this run.
        ends_at: Number of the call at which it is killed; never if there are fewer.
        chance: Decides which tasks fail, and the partitions of rows in a shuffle.
        shuffle: Whether the rows are redistributed before they are written.
        early: Negative control: the source is notified of a completed batch before the sink commits it.
        older: Behave as traced in Spark 4.0 and 4.1, which pass neither bounds nor starts, and ask
            for the tasks of an empty batch where the last planned one ends before anything else.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Options,
        sink: Any,
        run: str,
        ends_at: int,
        chance: random.Random,
        *,
        shuffle: bool,
        early: bool = False,
        older: bool = False,
    ) -> None:
        self.early = early
        self.older = older
        self.checkpoint = checkpoint
        self.sink = sink
        self.run_id = run
        self.chance = chance
        self.shuffle = shuffle
        self.trace: list[str] = []
        self._left = ends_at
        # Made in one process, used in another.
        kinds: dict[str, Any] = {"lease": LeaseStream, "spool": SpoolStream}
        if older:
            kinds = {"lease": BareLeases, "spool": BareSpools}
        logs = BareLogs if older else LogStream
        self.reader: Any = moved(kinds.get(source.mode, logs)(source))
        self._attempts = 0

    def arrow(self, name: str) -> None:
        self.trace.append(name)
        if self._left == 0:
            raise DriverEnded(name)
        self._left -= 1

    def call(self, name: str, *args: Any) -> Any:
        self.arrow(f"before {name}")
        try:
            found = getattr(self.reader, name)(*(json.loads(json.dumps(each)) for each in args))
        except TaskEnded:
            raise DriverEnded(name) from None
        self.arrow(f"after {name}")
        return found

    def run(self) -> None:
        checkpoint = self.checkpoint
        number = max(checkpoint.offsets, default=-1)
        if not self.older:
            self.call("prepareForTriggerAvailableNow")
        elif number >= 0:
            seen = json.loads(checkpoint.offsets[number])
            assert self.call("partitions", seen, seen) == []
        if number >= 0 and number not in checkpoint.commits:
            # Planned, and not known to be complete: repeat it.
            self.batch(number)
        elif number < 0:
            self.call("initialOffset")
        while True:
            number = max(checkpoint.offsets, default=-1) + 1
            text = self.before(number)
            start = () if self.older else (json.loads(text),)
            found = json.dumps(self.call("latestOffset", *start))
            if not self.older:
                self.call("reportLatestOffset")
            if found == text:
                return
            checkpoint.offsets[number] = found
            self.arrow("offsets are logged")
            if number > 0:
                self.call("commit", json.loads(checkpoint.offsets[number - 1]))
            self.batch(number)

    def before(self, number: int) -> str:
        """Return the offsets at which batch *number* begins."""
        if number > 0:
            return self.checkpoint.offsets[number - 1]
        return json.dumps(self.call("initialOffset"))

    def batch(self, number: int) -> None:
        start, end = self.before(number), self.checkpoint.offsets[number]
        spans = moved(self.call("partitions", json.loads(start), json.loads(end)))
        parts = [self.rows(span) for span in spans]
        if self.early:
            self.call("commit", json.loads(end))
        if self.shuffle:
            rows = [row for part in parts for row in part]
            self.chance.shuffle(rows)
            count = self.chance.randint(1, 3)
            parts = [rows[each::count] for each in range(count)]
        written = []
        for part, rows in enumerate(parts):
            written.append(self.task(number, part, rows))
            self.arrow("a task is done")
        self.sink.commit(moved(written))
        self.arrow("the sink has committed")
        self.checkpoint.commits.add(number)
        self.arrow("the batch is noted")

    def rows(self, span: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a task reads; a failed task is repeated."""
        for _ in range(4):
            try:
                return list(moved(self.reader).read(span))
            except TaskEnded:
                continue
        raise DriverEnded("a task has failed too often")

    def task(self, number: int, part: int, rows: list[tuple[Any, ...]]) -> Any:
        while True:
            fail = self.chance.random() < 0.2
            self._attempts += 1
            task = Task(part, self._attempts, number, "query", self.run_id)
            try:
                return self.sink.write(rows, task, fail)
            except OSError:
                continue


@pytest.fixture(scope="module")
def anywhere() -> Iterator[Any]:
    """Return a broker, its URL, and a function that makes unused names."""
    with sync.Broker(volatile=True) as broker:
        (url,) = broker.listen("amqp://127.0.0.1:0")
        numbers = iter(range(1_000_000))

        def fresh() -> tuple[str, str]:
            number = next(numbers)
            names = f"log{number}", f"out{number}"
            broker.declare(Log(names[0], partitions=2), Queue(names[1]), Queue(f"in{number}"))
            return names

        yield broker, url, fresh
        connections.forget(read_options({"url": url, "address": "x"}, "source").endpoint)


def fill(broker: Any, address: str, first: int, end: int, *, named: bool = True) -> None:
    with broker.local() as peer, peer.sender(address) as out:
        for number in range(first, end):
            name = {"message_id": f"message {number}"} if named else {}
            out.send(Message(str(number), **name))


def unsettled(endpoint: Endpoint, queue: str) -> bool:
    """Return whether messages of *queue* stay acquired; a killed consumer's are released after a moment."""
    for _ in range(200):
        if not connections.call(endpoint, queue, "READ")["acquired"]:
            return False
        time.sleep(0.01)
    return True


def lives(
    broker: Any,
    url: str,
    names: tuple[str, str],
    sink_of: Callable[[Options], Any],
    ends: list[int],
    seed: int,
    *,
    shuffle: bool,
    early: bool = False,
    named: bool = True,
    older: bool = False,
    **options: str,
) -> Any:
    """Run the query until it is complete, with its driver killed at *ends*; return its sink."""
    log, _ = names
    chance = random.Random(seed)
    checkpoint = Checkpoint()
    sink = None
    fill(broker, log, 0, MESSAGES // 2, named=named)
    for life, end in enumerate([*ends, NEVER, NEVER]):
        # Options that may change from one start to the next.
        given = {
            "url": url,
            "address": log,
            "group": "query",
            "columns": "body",
            "raw": "true",
            "maxMessagesPerTrigger": str(chance.randint(5, 25)),
            "minPartitions": str(chance.randint(1, 5)),
            **options,
        }
        source = read_options(given, "source")
        if source.mode == "spool":
            assert not unsettled(source.endpoint, log)
        if sink is None:
            sink = sink_of(source)
        driver = Driver(
            checkpoint,
            source,
            sink,
            f"run {life}",
            end,
            chance,
            shuffle=shuffle,
            early=early,
            older=older,
        )
        try:
            driver.run()
        except DriverEnded:
            if chance.random() < 0.5 or source.mode == "spool":
                # Also so that its unsettled messages are released.
                connections.forget(source.endpoint)
        if life == 0:
            fill(broker, log, MESSAGES // 2, MESSAGES, named=named)
    return sink


def found(url: str, address: str) -> Counter[Any]:
    endpoint = read_options({"url": url, "address": address}, "source").endpoint
    return Counter(message.body for message in connections.wire(endpoint).browse(address))


crashes = st.lists(st.integers(0, 45), max_size=4)
steady = settings(
    max_examples=min(60, settings().max_examples),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
@steady
@given(crashes, st.integers(0, 2**16), st.booleans())
def test_nothing_is_lost_and_nothing_doubled_wherever_the_driver_ends(
    anywhere: Any, ends: list[int], seed: int, shuffle: bool
) -> None:
    broker, url, fresh = anywhere
    names = fresh()

    def sink(source: Options) -> StagedSink:
        return StagedSink(read_options({"url": url, "address": names[1]}, "sink"), source)

    lives(broker, url, names, sink, ends, seed, shuffle=shuffle)
    assert found(url, names[1]) == ALL
    broker.delete(names[0])
    broker.delete(names[1])


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
@pytest.mark.parametrize("mode", ["auto", "lease", "spool"])
def test_nothing_is_lost_with_spark_that_says_no_starts(
    anywhere: Any, mode: str, tmp_path: Path
) -> None:
    """Spark 4.0 and 4.1."""
    broker, url, fresh = anywhere
    for seed in range(12):
        log, out = fresh()
        chance = random.Random(seed)
        names = (log if mode == "auto" else out.replace("out", "in")), out
        ends = [chance.randint(0, 45) for _ in range(3)]
        more = {"spoolDir": str(tmp_path / str(seed))} if mode == "spool" else {}

        def sink(source: Options, to: str = out) -> StagedSink:
            return StagedSink(read_options({"url": url, "address": to}, "sink"), source)

        lives(broker, url, names, sink, ends, seed, shuffle=True, older=True, mode=mode, **more)
        assert found(url, out) == ALL, seed


@pytest.mark.slow
@pytest.mark.req("K2", "K3")
def test_each_call_is_one_at_which_it_may_end(anywhere: Any) -> None:
    """Kill the first life at every one of its calls, one after the other."""
    broker, url, fresh = anywhere
    for end in range(0, 60, 1):
        names = fresh()

        def sink(source: Options, to: str = names[1]) -> StagedSink:
            return StagedSink(read_options({"url": url, "address": to}, "sink"), source)

        lives(broker, url, names, sink, [end], 7, shuffle=True)
        assert found(url, names[1]) == ALL, end


@pytest.mark.slow
@pytest.mark.req("K3")
@pytest.mark.parametrize("delivery", ["by position", "at-least-once"])
def test_other_sinks_would_double_or_lose(anywhere: Any, delivery: str) -> None:
    """Negative control: the same lives with sinks that are not exactly once."""
    broker, url, fresh = anywhere
    wrong = 0
    for seed in range(12):
        names = fresh()
        chance = random.Random(seed)

        def sink(source: Options, to: str = names[1]) -> Any:
            if delivery == "by position":
                return RowsByPosition()
            given = {"url": url, "address": to, "delivery": delivery}
            return StagedSink(read_options(given, "sink"), source)

        ends = [chance.randint(10, 45) for _ in range(3)]
        done = lives(broker, url, names, sink, ends, seed, shuffle=True)
        if delivery == "by position":
            found_there = Counter(row[0].decode() for row in done.known.values())
            wrong += len(found_there) < MESSAGES or max(found_there.values()) > 1
        else:
            found_there = found(url, names[1])
            assert set(found_there) == set(ALL)
            wrong += max(found_there.values()) > 1
    assert wrong > 0


@pytest.mark.slow
@pytest.mark.req("K2")
@steady
@given(crashes, st.integers(0, 2**16))
def test_a_start_that_moves_is_found_once(anywhere: Any, ends: list[int], seed: int) -> None:
    """Start at the latest record: all records after the first call are read once."""
    broker, url, fresh = anywhere
    names = fresh()
    log = names[0]
    fill(broker, log, -10, 0)
    source = {"url": url, "address": log, "group": "query", "startingOffsets": "latest"}
    LogStream(read_options(source, "source")).initialOffset()

    def sink(source: Options) -> StagedSink:
        return StagedSink(read_options({"url": url, "address": names[1]}, "sink"), source)

    lives(broker, url, names, sink, ends, seed, shuffle=False, startingOffsets="latest")
    assert found(url, names[1]) == ALL


def test_the_group_is_where_the_query_is(anywhere: Any) -> None:
    """The end of the last batch is included, although Spark never commits it."""
    _broker, url, fresh = anywhere
    names = fresh()

    def sink(source: Options) -> StagedSink:
        return StagedSink(read_options({"url": url, "address": names[1]}, "sink"), source)

    lives(anywhere[0], url, names, sink, [], 1, shuffle=False)
    endpoint = read_options({"url": url, "address": "x"}, "source").endpoint
    cursor = connections.call(endpoint, names[0], "CURSOR", group="query")
    assert sum(cursor.values()) == MESSAGES


# --- Queues --------------------------------------------------------------------------------------


def leased(anywhere: Any, ends: list[int], seed: int, **options: Any) -> tuple[Counter[Any], int]:
    """Stream a queue; return the published messages, and those left in the queue."""
    broker, url, fresh = anywhere
    _, out = fresh()
    queue = out.replace("out", "in")

    def sink(source: Options) -> StagedSink:
        return StagedSink(read_options({"url": url, "address": out}, "sink"), source)

    lives(broker, url, (queue, out), sink, ends, seed, mode="lease", **options)
    stats = connections.call(
        read_options({"url": url, "address": queue}, "source").endpoint, queue, "READ"
    )
    return found(url, out), stats["available"] + stats["acquired"]


@pytest.mark.slow
@pytest.mark.req("K2", "K5")
@steady
@given(crashes, st.integers(0, 2**16), st.booleans())
def test_a_queue_is_consumed_once_wherever_the_driver_ends(
    anywhere: Any, ends: list[int], seed: int, shuffle: bool
) -> None:
    assert leased(anywhere, ends, seed, shuffle=shuffle) == (ALL, 0)


@pytest.mark.slow
@pytest.mark.req("K5")
def test_accepting_early_would_lose_messages(anywhere: Any) -> None:
    """Negative control: the queue is notified of a completed batch before the sink commits it."""
    wrong = 0
    for end in range(12, 30):
        options = {"shuffle": False, "early": True}
        out, _ = leased(anywhere, [end], 3, failOnDataLoss="false", **options)
        assert max(out.values()) == 1
        wrong += out != ALL
    assert wrong > 0


@pytest.mark.req("K5")
def test_a_queue_that_is_streamed_is_still_a_queue(anywhere: Any) -> None:
    broker, url, fresh = anywhere
    _, out = fresh()
    queue = out.replace("out", "in")
    fill(broker, queue, 0, 10)
    given_ = {"url": url, "address": queue, "mode": "lease", "group": "g", "columns": "offset,body"}
    stream = LeaseStream(read_options(given_ | {"maxMessagesPerTrigger": "4"}, "source"))
    start = stream.initialOffset()
    end = stream.latestOffset(start, None)
    (span,) = stream.partitions(start, end)
    rows = [(number, str(number).encode()) for number in range(4)]
    assert list(stream.read(span)) == list(stream.read(span)) == rows
    with broker.local() as peer, peer.receiver(queue) as messages:
        for number in range(4, 10):
            delivery = messages.receive()
            assert delivery.body == str(number)
            delivery.accept()
    known = start["leases"][queue]["id"]
    assert stream.reportLatestOffset() == {
        "leases": {queue: {"id": known, "n": 10, "waiting": True}},
        "v": 1,
    }
    # No message is left, and the files have been deleted.
    assert stream.latestOffset(end, None) == end
    assert found(url, queue) == Counter()


@pytest.mark.req("K5")
def test_a_queue_does_not_wait_for_busy_ones(anywhere: Any) -> None:
    broker, url, fresh = anywhere
    queues = [fresh()[1].replace("out", "in") for _ in range(3)]
    for queue in queues:
        fill(broker, queue, 0, 10)
    given_ = {"url": url, "address": ",".join(queues), "mode": "lease", "group": "g"}
    stream = LeaseStream(read_options(given_ | {"maxMessagesPerTrigger": "1"}, "source"))
    end = stream.initialOffset()
    for _ in range(6):
        end = stream.latestOffset(end, None)
    assert [end["leases"][queue]["n"] for queue in queues] == [2, 2, 2]


@pytest.mark.req("K5")
def test_a_group_has_one_query(anywhere: Any) -> None:
    broker, url, fresh = anywhere
    _, out = fresh()
    queue = out.replace("out", "in")
    fill(broker, queue, 0, 10)
    given_ = {"url": url, "address": queue, "mode": "lease", "group": "g"}
    one, two = (LeaseStream(read_options(given_, "source")) for _ in range(2))
    start = one.initialOffset()
    two.initialOffset()
    with pytest.raises(AmqpError) as caught:
        one.latestOffset(start, None)
    assert caught.value.condition == "amqp:link:stolen"
    end = two.latestOffset(start, None)
    spans = two.partitions(start, end)
    # An operator ends the lease.
    connections.call(two.options.endpoint, queue, "RELEASE-LEASE", group="g")
    with pytest.raises(DataLost, match=r"the lease has ended: .*no group 'g'"):
        list(two.read(spans[0]))
    three = LeaseStream(read_options(given_, "source"))
    # With a new checkpoint the messages are read as new ones.
    begin = three.initialOffset()
    later = three.latestOffset(begin, None)
    rows = [row for span in three.partitions(begin, later) for row in three.read(span)]
    assert [row[2] for row in rows] == [*range(10)]
    # The numbers are equal, but the messages are not: requests for the old ones are refused.
    assert later["leases"][queue]["n"] == end["leases"][queue]["n"]
    for refused in (lambda: three.partitions(start, end), lambda: three.latestOffset(end, None)):
        with pytest.raises(DataLost, match="was released, or has ended after its leaseTtl"):
            refused()
    with pytest.raises(DataLost, match="was released, or has ended, and was opened again"):
        list(two.read(spans[0]))
    with pytest.raises(AmqpError, match="was opened again"):
        two.commit(end)
    lax = LeaseStream(read_options(given_ | {"failOnDataLoss": "false"}, "source"))
    assert lax.partitions(start, end) == []
    again = lax.latestOffset(end, None)
    assert again == later
    rows = [row for span in lax.partitions(end, again) for row in lax.read(span)]
    assert [row[2] for row in rows] == [*range(10)]
    lax.commit(end)
    lax.commit(again)
    assert lax.latestOffset(again, None) == again
    assert found(url, queue) == Counter()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs the option group"),
        ({"group": "g", "startingOffsets": "latest"}, "no offsets to start at"),
        ({"group": "g", "selector": "a = 1"}, "no selector"),
        ({"group": "g", "endingTimestamp": "1"}, "a stream has no end"),
    ],
)
def test_what_a_lease_cannot_do(options: dict[str, str], why: str) -> None:
    given_ = {"url": "amqp://h", "address": "q", "mode": "lease", **options}
    with pytest.raises(ValueError, match=why):
        LeaseStream(read_options(given_, "source"))


# --- Any queue, by files -------------------------------------------------------------------------


class Killed:
    """Kills tasks, and the driver, while they store received messages.

    Args:
        patch: Applies the change, and reverts it in the end.
        ends: Files at which to kill, counted from the first: before the file exists, or after it and before
            any of its messages is accepted.
        endpoint: Broker that they are connected to.
    """

    def __init__(self, patch: pytest.MonkeyPatch, ends: dict[int, str], endpoint: Endpoint) -> None:
        #: Messages that are in files and were not accepted.
        self.doubtful = 0
        publish = SpoolFile.publish
        numbers = count()

        def publishing(file: SpoolFile, *, dry: bool) -> bool:
            end = ends.get(next(numbers))
            done = end != "before" and publish(file, dry=dry)
            if end is not None:
                self.doubtful += file.count if done else 0
                connections.forget(endpoint)
                raise TaskEnded
            return done

        patch.setattr(SpoolFile, "publish", publishing)


def spool(
    anywhere: Any, ends: list[int], kills: dict[int, str], seed: int, folder: Path, **options: Any
) -> tuple[Counter[Any], int]:
    """Stream a queue by files; return the published messages, and the number of possible duplicates."""
    broker, url, fresh = anywhere
    _, out = fresh()
    queue = out.replace("out", "in")
    endpoint = read_options({"url": url, "address": queue}, "source").endpoint

    def sink(source: Options) -> StagedSink:
        return StagedSink(read_options({"url": url, "address": out}, "sink"), source)

    with pytest.MonkeyPatch.context() as patch:
        killed = Killed(patch, kills, endpoint)
        given_ = {"mode": "spool", "spoolDir": str(folder / queue), **options}
        # Each kill may take the driver's life, too.
        ends = [*ends, *[NEVER] * len(kills)]
        lives(broker, url, (queue, out), sink, ends, seed, **given_)
    assert not unsettled(endpoint, queue)
    assert found(url, queue) == Counter()
    return found(url, out), killed.doubtful


fewer = settings(steady, max_examples=min(30, settings().max_examples))
kills = st.dictionaries(st.integers(0, 12), st.sampled_from(["before", "after"]), max_size=4)


@pytest.mark.slow
@pytest.mark.req("K6")
@fewer
@given(crashes, kills, st.integers(0, 2**16), st.booleans())
def test_files_lose_nothing_wherever_driver_and_tasks_end(
    anywhere: Any,
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[int],
    kills: dict[int, str],
    seed: int,
    shuffle: bool,
) -> None:
    """At least once: duplicates were in a file that was not accepted, and have no message-id."""
    folder = tmp_path_factory.mktemp("spool")
    out, doubtful = spool(anywhere, ends, kills, seed, folder, shuffle=shuffle, named=False)
    assert set(out) == set(ALL)
    assert out.total() - MESSAGES <= doubtful


@pytest.mark.slow
@pytest.mark.req("K6")
@fewer
@given(crashes, kills, st.integers(0, 2**16), st.booleans())
def test_messages_with_names_come_once(
    anywhere: Any,
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[int],
    kills: dict[int, str],
    seed: int,
    shuffle: bool,
) -> None:
    """Redelivered messages are recognized by the remaining files."""
    folder = tmp_path_factory.mktemp("spool")
    out, _ = spool(anywhere, ends, kills, seed, folder, shuffle=shuffle)
    assert out == ALL


@pytest.mark.req("K6")
def test_without_a_look_into_the_files_they_would_be_double(
    anywhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(SpoolStream, "_live", lambda stream, folder: set())
    out, doubtful = spool(anywhere, [], {2: "after"}, 5, tmp_path, shuffle=False)
    assert MESSAGES < out.total() <= MESSAGES + doubtful


# --- The sink alone ------------------------------------------------------------------------------


@pytest.mark.req("K3")
def test_a_driver_that_was_thought_dead_gets_nothing_in(anywhere: Any) -> None:
    _, url, fresh = anywhere
    _, out = fresh()
    sink = Sink(read_options({"url": url, "address": out}, "sink"), ["body"], streaming=True)
    old = sink.send([{"body": "old"}], Task(0, 1, 0, "query", "one"))
    new = sink.send([{"body": "new"}], Task(0, 1, 0, "query", "two"))
    with pytest.raises(AmqpError, match="later run"):
        sink.publish([old])
    with pytest.raises(AmqpError) as caught:
        sink.send([{"body": "old"}], Task(1, 2, 0, "query", "one"))
    assert caught.value.condition == "amqp:link:stolen"
    assert sink.publish([new])
    assert found(url, out) == Counter(["new"])


@pytest.mark.req("K3")
def test_an_old_checkpoint_is_noticed(anywhere: Any) -> None:
    _, url, fresh = anywhere
    _, out = fresh()
    given_ = {"url": url, "address": out, "producer": "job"}
    sink = Sink(read_options(given_, "sink"), ["body"], streaming=True)
    for epoch in range(3):
        sent = sink.send([{"body": epoch}], Task(0, epoch, epoch, "query", "one"))
        assert sink.publish([sent])
    # The last batch is repeated, as Spark does, and nothing is sent.
    again = sink.send([{"body": 2}], Task(0, 9, 2, "query", "two"))
    assert (again.count, sink.publish([again])) == (0, False)
    with pytest.raises(ValueError, match="has published epoch 2, and this is epoch 0"):
        sink.send([{"body": 0}], Task(0, 1, 0, "other query", "three"))


@pytest.mark.req("K3")
def test_a_batch_with_a_name_is_published_once(anywhere: Any) -> None:
    _, url, fresh = anywhere
    _, out = fresh()
    given_ = {"url": url, "address": out, "producer": "report of May"}
    for _ in range(2):
        sink = moved(Sink(read_options(given_, "sink"), ["body"], streaming=False))
        sink.publish([sink.send([{"body": 1}], Task(part, part)) for part in range(2)])
    assert found(url, out) == Counter({1: 2})
    with pytest.raises(ValueError, match="needs the option producer"):
        Sink(
            read_options({"url": url, "address": out, "delivery": "exactly-once"}, "sink"),
            ["body"],
            streaming=False,
        )
    plain = Sink(read_options({"url": url, "address": out}, "sink"), ["body"], streaming=False)
    plain.publish([plain.send([{"body": 2}], Task(0, 0))])
    assert found(url, out) == Counter({1: 2, 2: 1})


# --- Repeated epochs -----------------------------------------------------------------------------


def restarted(
    anywhere: Any, names: tuple[str, str], checkpoint: Checkpoint, run: str, **options: str
) -> Driver:
    """Run a query that writes the rows it reads, and ends when it has read everything."""
    _, url, _ = anywhere
    log, out = names
    starting = options.pop("startingOffsets", "earliest")
    source = read_options(
        {"url": url, "address": log, "columns": "body", "raw": "true", "startingOffsets": starting},
        "source",
    )
    sink = StagedSink(read_options({"url": url, "address": out, **options}, "sink"), source)
    chance = random.Random(run)
    driver = Driver(checkpoint, source, sink, run, NEVER, chance, shuffle=True)
    driver.run()
    return driver


def counted(first: int, end: int) -> Counter[str]:
    return Counter(map(str, range(first, end)))


@pytest.mark.req("K3")
@pytest.mark.parametrize("on_different", ["fail", "skip"])
def test_a_checkpoint_from_a_backup_loses_nothing_silently(
    anywhere: Any, caplog: pytest.LogCaptureFixture, on_different: str
) -> None:
    broker, url, fresh = anywhere
    names = log, out = fresh()
    checkpoint = Checkpoint()
    fill(broker, log, 0, 40)
    restarted(anywhere, names, checkpoint, "one")
    backup = copy.deepcopy(checkpoint)
    fill(broker, log, 40, 140)
    restarted(anywhere, names, checkpoint, "two")
    published = json.loads(checkpoint.offsets[1])
    assert found(url, out) == counted(0, 140)
    # Restored at once, it plans the same records, which are published already.
    again = copy.deepcopy(backup)
    restarted(anywhere, names, again, "three")
    assert "not published again: epoch 1 of 'query' is there" in caplog.text
    assert found(url, out) == counted(0, 140)
    # Restored after more records have arrived, it plans more under the same number.
    fill(broker, log, 140, 340)
    if on_different == "skip":
        # The negative control: 200 of 340 rows are gone, and the query ends well.
        restarted(anywhere, names, backup, "four", onDifferentEpoch="skip")
        assert "messages dropped" in caplog.text
        assert found(url, out) == counted(0, 140)
        return
    with pytest.raises(
        EpochDiffers, match="epoch 1 of 'query' is committed with something else"
    ) as caught:
        restarted(anywhere, names, backup, "four")
    assert "100 messages" in caught.value.description
    assert "not 300 messages" in caught.value.description
    assert 1 not in backup.commits
    # The error persists until the advice in its text is followed.
    with pytest.raises(EpochDiffers):
        restarted(anywhere, names, backup, "five")
    assert found(url, out) == counted(0, 140)
    starting = json.dumps({log: published["logs"][log]["p"]})
    restarted(anywhere, names, Checkpoint(), "six", producer="another", startingOffsets=starting)
    assert found(url, out) == counted(0, 340)


@pytest.mark.slow
@pytest.mark.req("K3")
@pytest.mark.parametrize("on_different", ["fail", "skip"])
def test_a_producer_without_its_checkpoint_loses_nothing_silently(
    anywhere: Any, on_different: str
) -> None:
    broker, url, fresh = anywhere
    names = log, out = fresh()
    fill(broker, log, 0, 100)
    restarted(anywhere, names, Checkpoint(), "one", producer="job")
    fill(broker, log, 100, 300)
    given_ = {"producer": "job", "onDifferentEpoch": on_different}
    if on_different == "skip":
        # The negative control.
        restarted(anywhere, names, Checkpoint(), "two", **given_)
    else:
        with pytest.raises(EpochDiffers, match="another one; restore the latest checkpoint"):
            restarted(anywhere, names, Checkpoint(), "two", **given_)
    assert found(url, out) == counted(0, 100)


def in_a_micro_batch(anywhere: Any, out: str, run: str, *bodies: range, **given_: str) -> None:
    """Act as a ``foreachBatch`` that writes each of *bodies*: a writer for each, all in one batch."""
    _, url, _ = anywhere
    for bodies_ in bodies:
        options = read_options({"url": url, "address": out, "producer": "job", **given_}, "sink")
        sink = Sink(options, ["body"], streaming=False)
        attempt = next(attempts)
        rows = [{"body": str(each)} for each in bodies_]
        tasks = [Task(part, attempt, 7, "query", run) for part in range(2)]
        sink.publish([moved(sink).send(rows[task.part :: 2], task) for task in tasks])


attempts = count()


@pytest.mark.req("K3")
def test_a_micro_batch_may_write_more_than_once(anywhere: Any) -> None:
    _, url, fresh = anywhere
    _, out = fresh()
    in_a_micro_batch(anywhere, out, "one", range(500), range(500, 1000))
    assert found(url, out) == counted(0, 1000)
    # A repetition of the batch repeats both writes.
    in_a_micro_batch(anywhere, out, "two", range(500), range(500, 1000))
    assert found(url, out) == counted(0, 1000)
    # The run before had ended between its second write and its third.
    in_a_micro_batch(anywhere, out, "three", range(500), range(500, 1000), range(1000, 1100))
    assert found(url, out) == counted(0, 1100)
    with pytest.raises(EpochDiffers, match="give each a producer of its own"):
        in_a_micro_batch(anywhere, out, "four", range(501))
    # Negative control: mistaken for the first write, the messages would be lost.
    in_a_micro_batch(anywhere, out, "five", range(2000, 2010), onDifferentEpoch="skip")
    assert found(url, out) == counted(0, 1100)


@pytest.mark.req("K3")
@pytest.mark.parametrize("on_different", ["fail", "skip"])
def test_a_name_that_another_batch_had_loses_nothing_silently(
    anywhere: Any, on_different: str
) -> None:
    _, url, fresh = anywhere
    _, out = fresh()
    given_ = {
        "url": url,
        "address": out,
        "producer": "report",
        "onDifferentEpoch": on_different,
    }

    def write(first: int, end: int) -> bool:
        sink = Sink(read_options(given_, "sink"), ["body"], streaming=False)
        rows = [{"body": str(each)} for each in range(first, end)]
        return sink.publish([moved(sink).send(rows, Task(0, next(attempts)))])

    assert write(0, 20) is True
    # The same batch again, as after a lost answer.
    assert write(0, 20) is False
    if on_different == "skip":
        # The negative control.
        assert write(0, 30) is False
    else:
        with pytest.raises(EpochDiffers, match="this name was given to another batch"):
            write(0, 30)
        given_["producer"] = "another report"
        assert write(20, 30) is True
    assert found(url, out) == counted(0, 20 if on_different == "skip" else 30)


@pytest.mark.req("K3")
def test_a_plan_that_is_done_again_may_have_other_rows(anywhere: Any, tmp_path: Path) -> None:
    """If rows differ each time they are made, the plan in the checkpoint shows that none is lost."""
    _, url, fresh = anywhere
    _, out = fresh()
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    plan = 'v1\n{{"batchTimestampMs":{}}}\n{{"logs":{{}}}}'
    (offsets / "0").write_text(plan.format(1))
    options = {"url": url, "address": out, "checkpointLocation": str(tmp_path)}

    def write(run: str, body: str) -> bool:
        sink = Sink(read_options(options, "sink"), ["body"], streaming=True)
        return sink.publish([sink.send([{"body": body}], Task(0, 0, 0, "query", run))])

    assert write("one", "3f2a") is True
    assert write("two", "88d1") is False
    # The same offsets, planned again: the records there may be other ones.
    (offsets / "0").write_text(plan.format(2))
    with pytest.raises(EpochDiffers, match=r"planned as '[0-9a-f]{16} \{\"logs\":\{\}\}'"):
        write("three", "c0de")
    assert found(url, out) == Counter(["3f2a"])


def test_where_a_plan_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets" / "3").write_text("v1\n{}\n" + "x" * 5_000)
    monkeypatch.chdir(tmp_path)
    known = plan_of(str(folder), 3)
    assert len(known) == 1_024
    for same in (f"file:{folder}", f"file://{folder}".replace(" ", "%20"), "a b"):
        assert plan_of(same, 3) == known
    for unknown in ("", "hdfs://h/folder", "s3a://b/f", str(tmp_path)):
        assert plan_of(unknown, 3) == ""
    assert plan_of(str(folder), 4) == ""


# --- Restarts of the broker ----------------------------------------------------------------------


class Restarting(Driver):
    """Driver whose broker is restarted every few calls."""

    broker: Any
    every: int

    def arrow(self, name: str) -> None:
        super().arrow(name)
        if len(self.trace) % self.every == 0:
            ends = (signal.SIGTERM, signal.SIGKILL)
            self.broker.restart(ends[len(self.trace) // self.every % 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("log", marks=pytest.mark.req("K2", "K3")),
        pytest.param("lease", marks=[pytest.mark.req("K5"), pytest.mark.long]),
        pytest.param("spool", marks=[pytest.mark.req("K6"), pytest.mark.long]),
    ],
)
def test_the_ledger_balances_however_often_the_broker_starts_again(
    broker_process: Any, tmp_path: Path, long_run_here: bool, mode: str
) -> None:
    bodies = [str(number) for number in range(60)]
    address = "log" if mode == "log" else "in"
    broker_process.send(address, *bodies)
    url = {"url": broker_process.url}
    given = {"address": address, "mode": mode, "raw": "true", "columns": "body"}
    given |= {"spoolDir": str(tmp_path / "spool")} if mode == "spool" else {"group": "g"}
    options = read_options({**url, **given, "maxMessagesPerTrigger": "25"}, "source")
    sink = StagedSink(read_options({**url, "address": "out"}, "sink"), options)
    driver = Restarting(Checkpoint(), options, sink, "run", NEVER, random.Random(1), shuffle=True)
    driver.broker = broker_process
    driver.every = 3 if long_run_here else 10
    driver.run()
    assert broker_process.starts > 2
    assert Counter(broker_process.bodies("out")) == Counter(bodies)
