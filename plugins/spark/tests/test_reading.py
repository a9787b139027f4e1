"""Batches and streams, planned against a real broker, without Spark."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.batch import Batch, Bounds
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.leasing import LeaseBatch
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.offsets import offset_of, positions_of
from amqp_rt_spark.options import Options, read_options
from amqp_rt_spark.spans import Snapshot, Span, cut, joined

from amqp_rt import sync
from amqp_rt.broker import Log
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits

pytestmark = pytest.mark.req("K1", "K2")

EVERYTHING = SimpleNamespace()


def options(served: Any, **given: str) -> Any:
    said = {"url": served.url, "address": "log", "columns": "partition,offset,body", **given}
    return read_options(said, "source")


def stream(served: Any, **given: str) -> LogStream:
    return LogStream(options(served, **given))


def parts(offset: dict[str, Any], address: str = "log") -> dict[int, int]:
    return positions_of(offset)[address][1]


def rows(reading: Any, spans: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(row for span in spans for row in pickle.loads(pickle.dumps(reading)).read(span))


# --- Offsets and tasks ---------------------------------------------------------------------------


def test_an_offset_is_text_in_order() -> None:
    found = offset_of({"b": ("i", {2: 1, 0: 5}), "a": ("j", {})})
    assert json.dumps(found) == (
        '{"logs": {"a": {"id": "j", "p": {}}, "b": {"id": "i", "p": {"0": 5, "2": 1}}}, "v": 1}'
    )
    assert positions_of(json.loads(json.dumps(found))) == {"a": ("j", {}), "b": ("i", {0: 5, 2: 1})}
    for other in ({}, {"v": 2, "logs": {}}, {"v": 1, "leases": {}}):
        with pytest.raises(ValueError, match="holds no offset of logs"):
            positions_of(other)


@pytest.mark.parametrize(
    ("least", "most", "lengths"),
    [(1, None, [7, 3]), (4, None, [2, 2, 3, 3]), (1, 4, [3, 3, 4]), (20, None, [1] * 10)],
)
def test_tasks_are_cut(least: int, most: int | None, lengths: list[int]) -> None:
    ranges = [Span("a", 0, 10, 17, "i"), Span("a", 1, 5, 8, "i")]
    found = list(cut(ranges, least, most))
    assert sorted(span.end - span.start for span in found) == sorted(lengths)
    numbers = [(span.partition, each) for span in found for each in range(span.start, span.end)]
    assert numbers == [(0, each) for each in range(10, 17)] + [(1, each) for each in range(5, 8)]


@pytest.mark.parametrize(
    ("lengths", "least", "tasks"),
    [
        ([1, 1], 1, [[1], [1]]),
        ([1, 1], 2, [[1, 1]]),
        ([1, 1], 99, [[1, 1]]),
        ([3, 3, 3, 3], 5, [[3, 3], [3, 3]]),
        ([9, 3, 3, 3], 5, [[9], [3, 3, 3]]),
        ([9, 9, 1], 5, [[9], [9, 1]]),
        ([1, 9, 9], 5, [[1, 9], [9]]),
        ([], 5, []),
    ],
)
def test_small_partitions_have_a_task_together(
    lengths: list[int], least: int, tasks: list[list[int]]
) -> None:
    spans = [Span("a", at, 10, 10 + length, "i") for at, length in enumerate(lengths)]
    found = joined(spans, Options(min_per_partition=least))
    assert [span for task in found for span in task] == spans
    assert [[span.end - span.start for span in task] for task in found] == tasks
    # `min_partitions` overrides joining.
    apart = joined(spans, Options(min_per_partition=least, min_partitions=len(spans) or 1))
    assert apart == [(span,) for span in spans]
    # How much a queue has is known when it has been read.
    queues = [Snapshot(name, None) for name in "abc"]
    assert joined(queues, Options(min_per_partition=least)) == [(each,) for each in queues]


# --- Streams -------------------------------------------------------------------------------------


def test_a_batch_has_its_share_of_each_partition(served: Any) -> None:
    served.send("log", *range(100))
    it = stream(served, maxMessagesPerTrigger="30")
    start = it.initialOffset()
    assert parts(it.latestOffset(start, SimpleNamespace(max_rows=30))) == {0: 15, 1: 15}
    # Spark's way to say that a batch is to have everything.
    assert parts(it.latestOffset(start, EVERYTHING)) == {0: 50, 1: 50}
    assert parts(it.latestOffset(start)) == {0: 15, 1: 15}
    assert parts(it.reportLatestOffset() or {}) == {0: 50, 1: 50}


@pytest.mark.slow
def test_a_partition_does_not_wait_for_busy_ones(served: Any) -> None:
    served.send("log", *range(10))
    it = stream(served, maxMessagesPerTrigger="1")
    end = it.initialOffset()
    for _ in range(10):
        # The other partition is never done.
        served.send("log", *range(10), group_id="the same")
        end = it.latestOffset(end, SimpleNamespace(max_rows=1))
    assert parts(end) == {0: 5, 1: 5}


@pytest.mark.slow
def test_a_batch_is_bounded_by_bytes(served: Any) -> None:
    served.send("one", *(bytes(1_000) for _ in range(100)))
    it = stream(served, address="one", maxBytesPerTrigger="10000")
    start = it.initialOffset()
    found = parts(it.latestOffset(start, SimpleNamespace(max_bytes=10_000)), "one")
    assert 5 <= found[0] <= 10
    tiny = stream(served, address="one", maxBytesPerTrigger="1")
    assert parts(tiny.latestOffset(start, SimpleNamespace(max_bytes=1)), "one") == {0: 1}
    both = stream(served, address="one", maxBytesPerTrigger="10000", maxMessagesPerTrigger="3")
    assert parts(both.latestOffset(start, SimpleNamespace(max_rows=3)), "one") == {0: 3}


def test_a_small_batch_waits_but_not_for_ever(served: Any) -> None:
    served.send("log", *range(10))
    it = stream(served, minMessagesPerTrigger="11", maxTriggerDelay="30s")
    now = 100.0
    it._now = lambda: now
    start = it.initialOffset()
    assert it.latestOffset(start, EVERYTHING) == start
    now = 129
    assert json.dumps(it.latestOffset(start, EVERYTHING)) == json.dumps(start)
    now = 131
    end = it.latestOffset(start, EVERYTHING)
    assert parts(end) == {0: 5, 1: 5}
    served.send("log", *range(10))
    assert it.latestOffset(end, EVERYTHING) == end
    served.send("log", *range(10))
    later = it.latestOffset(end, EVERYTHING)
    assert parts(later) == {0: 15, 1: 15}
    assert it.latestOffset(later, EVERYTHING) == later
    # A query that ends by itself never waits.
    served.send("log", "x")
    it.prepareForTriggerAvailableNow()
    assert sum(parts(it.latestOffset(later, EVERYTHING)).values()) == 31


def test_available_now_is_what_there_is_now(served: Any) -> None:
    served.send("log", *range(20))
    it = stream(served, maxMessagesPerTrigger="15")
    it.prepareForTriggerAvailableNow()
    served.send("log", *range(20))
    at = it.initialOffset()
    ends = []
    while True:
        end = it.latestOffset(at, SimpleNamespace(max_rows=15))
        if end == at:
            break
        at = end
        ends.append(sum(parts(end).values()))
    assert ends[-1] == 20
    assert len(ends) == 2


def test_a_batch_is_read_whole_by_any_tasks(served: Any) -> None:
    served.send("log", *(str(number) for number in range(60)))
    for least in (1, 7):
        it = stream(served, minPartitions=str(least))
        start = it.initialOffset()
        end = it.latestOffset(start, EVERYTHING)
        spans = it.partitions(start, end)
        assert len(spans) >= max(least, 2)
        found = rows(it, spans)
        assert [row[:2] for row in found] == [(part, at) for part in (0, 1) for at in range(30)]
        assert {row[2] for row in found} == {str(number).encode() for number in range(60)}
    assert list(it.read(None)) == []


def test_several_logs_are_one_stream(served: Any) -> None:
    served.send("log", *range(10))
    both = stream(served, address="log, one")
    start = both.initialOffset()
    assert both.latestOffset(start, EVERYTHING) != start
    only = stream(served)
    before = only.latestOffset(only.initialOffset(), EVERYTHING)
    served.send("one", *range(5))
    # A log that was added later begins at its own start.
    end = both.latestOffset(before, EVERYTHING)
    assert (parts(end), parts(end, "one")) == ({0: 5, 1: 5}, {0: 5})
    assert len(rows(both, both.partitions(before, end))) == 5


# --- Logs by a pattern ---------------------------------------------------------------------------


def like(served: Any, pattern: str, **given: str) -> LogStream:
    said = {"url": served.url, "addressPattern": pattern, "columns": "address,offset,body"}
    return LogStream(read_options({**said, **given}, "source"))


def drained(it: LogStream, at: Any) -> tuple[list[tuple[str, bytes]], Any]:
    """What a query reads until there is no more, and where it is then."""
    found = []
    while (end := json.loads(json.dumps(it.latestOffset(at, EVERYTHING)))) != at:
        found += [(row[0], row[2]) for row in rows(it, it.partitions(at, end))]
        at = end
    return found, at


@pytest.mark.parametrize("begin", ["earliest", "latest"])
def test_logs_that_come_later_are_read_from_their_start(served: Any, begin: str) -> None:
    for name in ("sales.a", "other"):
        served.broker.declare(Log(name, partitions=2))
        served.send(name, "before")
    it = like(served, "sales.*", startingOffsets=begin, group="g")
    start = it.initialOffset()
    assert list(start["logs"]) == ["sales.a"]
    served.send("sales.a", "after")
    found, at = drained(it, start)
    before = [("sales.a", b"before")] if begin == "earliest" else []
    assert sorted(found) == sorted([*before, ("sales.a", b"after")])
    served.broker.declare(Log("sales.b", partitions=1))
    served.send("sales.b", "one", "two")
    served.send("sales.a", "more")
    # First it is noted where the new one begins: a batch that is done again knows it, too.
    end = it.latestOffset(at, EVERYTHING)
    assert parts(end, "sales.b") == {0: 0}
    again = like(served, "sales.*", startingOffsets=begin, group="g")
    for _ in range(2):
        assert [row[2] for row in rows(again, again.partitions(at, end))] == [b"more"]
    found, at = drained(again, end)
    assert found == [("sales.b", b"one"), ("sales.b", b"two")]
    served.send("sales.b", "three")
    assert drained(again, at)[0] == [("sales.b", b"three")]
    assert connections.call(served.endpoint, "sales.b", "CURSOR", group="g") == {0: 3}


def test_a_pattern_that_means_nothing_yet(served: Any) -> None:
    it = like(served, "sales.*")
    start = it.initialOffset()
    assert start == {"logs": {}, "v": 1} == it.latestOffset(start, EVERYTHING)
    served.broker.declare(Log("sales.a"))
    served.send("sales.a", "one")
    assert drained(it, start)[0] == [("sales.a", b"one")]
    # The pattern matches no logs of the broker itself.
    assert all(not name.startswith("$") for name in like(served, "*").initialOffset()["logs"])


def test_a_query_that_ends_does_not_begin_with_new_logs(served: Any) -> None:
    served.broker.declare(Log("sales.a"))
    it = like(served, "sales.*")
    start = it.initialOffset()
    it.prepareForTriggerAvailableNow()
    served.broker.declare(Log("sales.b"))
    served.send("sales.b", "one")
    assert it.latestOffset(start, EVERYTHING) == start


def test_more_logs_than_the_broker_lists_at_once() -> None:
    with sync.Broker(volatile=True, limits=Limits(management_rows_max=2)) as broker:
        broker.declare(*(Log(f"sales.{number}") for number in range(5)))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        it = like(SimpleNamespace(url=url), "sales.*")
        assert list(it.initialOffset()["logs"]) == [f"sales.{number}" for number in range(5)]
        connections.forget(it.options.endpoint)


def test_a_log_of_a_pattern_that_goes(served: Any) -> None:
    for name in ("sales.a", "sales.b"):
        served.broker.declare(Log(name))
        served.send(name, "one")
    strict = like(served, "sales.*", group="g")
    lax = like(served, "sales.*", group="g", failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, EVERYTHING)
    served.broker.delete("sales.b")
    for refused in (lambda: strict.partitions(start, end), lambda: strict.latestOffset(end)):
        with pytest.raises(DataLost, match=r"'sales.b', which .* is not there any more"):
            refused()
    assert [row[0] for row in rows(lax, lax.partitions(start, end))] == ["sales.a"]
    later = lax.latestOffset(end, EVERYTHING)
    assert list(later["logs"]) == ["sales.a"]
    # A log that the pattern no longer matches is not missed.
    narrow = like(served, "sales.a*", group="g")
    assert list(narrow.latestOffset(end, EVERYTHING)["logs"]) == ["sales.a"]


def test_a_batch_of_all_logs_of_a_pattern(served: Any) -> None:
    for name in ("sales.a", "sales.b", "sale"):
        served.broker.declare(Log(name))
        served.send(name, name)
    said = {"url": served.url, "addressPattern": "sales.?", "columns": "address,body"}
    batch = Batch(read_options(said, "source"))
    assert batch.only_logs()
    assert [row[0] for row in rows(batch, batch.partitions())] == ["sales.a", "sales.b"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"startingOffsets": "latest"}, "needs the option group"),
        ({"startingTimestamp": "1"}, "needs the option group"),
        ({"endingOffsets": '{"log": {}}'}, "a stream has no end"),
        ({"mode": "browse"}, "browsed by a batch"),
    ],
)
def test_what_a_stream_cannot_do(served: Any, given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        stream(served, **given)


def test_a_queue_is_no_log(served: Any) -> None:
    with pytest.raises(ValueError, match="stream a queue with mode=lease"):
        stream(served, address="in").initialOffset()


def test_where_a_stream_begins(served: Any) -> None:
    served.send("one", *range(10))
    it = connections.wire(served.endpoint)
    since = [
        int(message.message_annotations["x-opt-enqueued-time"])
        for _, message in it.read("one", 0, 0, 10)
    ]

    def first(**given: str) -> int:
        return parts(stream(served, address="one", **given).initialOffset(), "one")[0]

    assert first() == 0
    assert first(startingOffsets='{"one": {"0": 4}}') == 4
    # A misspelt name would otherwise begin at the start, without a word.
    with pytest.raises(
        ValueError, match="names the log 'other', which is not read: there is 'one'"
    ):
        first(startingOffsets='{"other": {"0": 4}}')
    assert first(group="a", startingOffsets="committed") == 0
    assert first(group="b", startingOffsets="latest") == 10
    assert first(group="c", startingTimestamp=str(since[5])) == since.index(since[5])
    assert first(group="d", startingTimestamp=str(since[-1] + 100_000)) == 10
    served.send("one", "more")
    # The broker remembers.
    assert first(group="b", startingOffsets="latest") == 10
    assert first(group="b", startingOffsets="committed") == 10
    with pytest.raises(ValueError, match="names partition 7"):
        first(startingOffsets='{"one": {"7": 0}}')


def test_an_end_before_the_start_is_an_error(served: Any) -> None:
    served.send("one", *range(10))
    it = stream(served, address="one")
    start = it.initialOffset()
    end = it.latestOffset(start, EVERYTHING)
    assert it.partitions(end, end) == []
    with pytest.raises(ValueError, match="begins at 10 and ends at 0"):
        it.partitions(end, start)


def test_retention_that_is_faster_is_noticed_or_let_pass() -> None:
    limits = Limits(log_bytes_max=200_000)
    with sync.Broker(volatile=True, limits=limits) as broker:
        broker.declare(Log("one", partitions=1))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        here = SimpleNamespace(url=url)
        start = stream(here, address="one").initialOffset()
        with broker.local() as peer, peer.sender("one") as out:
            for _ in range(400):
                out.send(bytes(2_000))
        strict = stream(here, address="one")
        end = strict.latestOffset(start, EVERYTHING)
        with pytest.raises(DataLost, match=r"from 0 to \d+ are gone"):
            strict.partitions(start, end)
        lax = stream(here, address="one", failOnDataLoss="false")
        first = parts(lax.initialOffset(), "one")[0]
        found = rows(lax, lax.partitions(start, end))
        assert [row[1] for row in found] == list(range(first, 400))
        # A first batch that is done again, and has nothing left of what it had.
        planned = {"v": 1, "logs": {"one": {"id": positions_of(end)["one"][0], "p": {"0": 3}}}}
        with pytest.raises(DataLost, match="from 3 to"):
            strict.partitions(strict.initialOffset(), planned)
        assert lax.partitions(lax.initialOffset(), planned) == []
        connections.forget(lax.options.endpoint)


@pytest.mark.parametrize("group", [{}, {"group": "g"}, {"group": "g", "startingOffsets": "latest"}])
def test_a_log_that_was_made_again(served: Any, group: dict[str, str]) -> None:
    strict, lax = (
        stream(served, address="one", **group),
        stream(served, address="one", failOnDataLoss="false", **group),
    )
    start = strict.initialOffset()
    served.send("one", *range(10))
    end = strict.latestOffset(start, EVERYTHING)
    served.broker.delete("one")
    served.broker.declare(Log("one", partitions=1))
    served.send("one", "a", "b")
    for call in (lambda: strict.latestOffset(end), lambda: strict.partitions(start, end)):
        with pytest.raises(DataLost, match="deleted and made again"):
            call()
    assert lax.partitions(start, end) == []
    later = lax.latestOffset(end, EVERYTHING)
    # Spark says of the batch before, too, that it is done; that it was is of no use to the new log.
    lax.commit(end)
    assert [row[2] for row in rows(lax, lax.partitions(end, later))] == [b"a", b"b"]
    lax.commit(later)
    if group:
        assert connections.call(lax.options.endpoint, "one", "CURSOR", group="g") == {0: 2}
    assert lax.latestOffset(later, EVERYTHING) == later


def test_a_store_from_a_backup(tmp_path: Path) -> None:
    """A log that went on from an older place is noticed when it has grown past the checkpoint, too."""

    @contextmanager
    def started() -> Iterator[tuple[Any, LogStream, LogStream]]:
        with sync.Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
            broker.declare(Log("one", partitions=1))
            (url,) = broker.listen("amqp://127.0.0.1:0")
            given = {"url": url, "address": "one", "columns": "offset"}
            strict, lax = (
                LogStream(read_options({**given, "failOnDataLoss": loss}, "source"))
                for loss in ("true", "false")
            )
            yield broker, strict, lax
            connections.forget(strict.options.endpoint)

    def fill(broker: Any, count: int) -> None:
        with broker.local() as peer, peer.sender("one") as out:
            for number in range(count):
                out.send(number)

    with started() as (broker, it, _):
        fill(broker, 5)
        start = it.latestOffset(it.initialOffset(), EVERYTHING)
    # Starts of the broker do no harm.
    with started() as (broker, it, _):
        assert it.latestOffset(start, EVERYTHING) == start
        fill(broker, 5)
        before = it.latestOffset(start, EVERYTHING)
        assert parts(before, "one") == {0: 10}
    for file in tmp_path.glob("broker.db*"):
        shutil.copy(file, tmp_path / f"kept {file.name}")
    with started() as (broker, it, _):
        fill(broker, 10)
        later = it.latestOffset(before, EVERYTHING)
        assert len(rows(it, it.partitions(before, later))) == 10
    # The backup: records 10 to 19 are gone, and 15 others come.
    for file in tmp_path.glob("broker.db*"):
        file.unlink()
    for file in tmp_path.glob("kept *"):
        shutil.copy(file, tmp_path / file.name.removeprefix("kept "))
    with started() as (broker, it, lax):
        # The restored log has the records that were read before the backup.
        assert it.latestOffset(before, EVERYTHING) == before
        fill(broker, 15)
        assert parts(it.latestOffset(before, EVERYTHING), "one") == {0: 25}
        for call in (lambda: it.latestOffset(later), lambda: it.partitions(before, later)):
            with pytest.raises(
                DataLost, match="restored from a backup: partition 0 has other records before 20"
            ):
                call()
        assert parts(lax.latestOffset(later, EVERYTHING), "one") == {0: 25}
        # A checkpoint of an earlier release says nothing of eras: it goes on, and is not changed by it.
        plain = offset_of(positions_of(later))
        assert parts(it.latestOffset(plain, EVERYTHING), "one") == {0: 25}
        end = offset_of({"one": (positions_of(later)["one"][0], {0: 25})})
        assert it.latestOffset(end, EVERYTHING) == end


def test_a_log_that_is_gone_for_good(served: Any) -> None:
    served.send("one", *range(10))
    it = stream(served, address="one", group="g", failOnDataLoss="false")
    start = it.initialOffset()
    end = it.latestOffset(start, EVERYTHING)
    served.broker.delete("one")
    for call in (lambda: it.commit(end), lambda: it.latestOffset(end), it.initialOffset):
        with pytest.raises(AmqpError, match="no node"):
            call()


@pytest.mark.parametrize("group", [{}, {"group": "g"}])
def test_a_hold_ends_with_what_is_read(group: dict[str, str]) -> None:
    """Retention takes what a query has written, when it has read everything."""
    with sync.Broker(volatile=True, limits=Limits(log_bytes_max=200_000)) as broker:
        broker.declare(Log("one", partitions=1))
        (url,) = broker.listen("amqp://127.0.0.1:0")

        def query() -> LogStream:
            return LogStream(read_options({"url": url, "address": "one", **group}, "source"))

        def fill(out: Any, count: int = 400) -> None:
            for _ in range(count):
                out.send(bytes(2_000))

        def first() -> int:
            (part,) = connections.call(it.options.endpoint, "one", "READ")["partitions"]
            return int(part["first"])

        it = query()
        start = it.initialOffset()
        with broker.local() as peer, peer.sender("one") as out:
            fill(out, 20)
            planned = it.latestOffset(start, EVERYTHING)
            begin = first()
            it.partitions(start, planned)
            fill(out)
            assert first() == begin
            # The next batch holds what comes after.
            later = it.latestOffset(planned, EVERYTHING)
            it.partitions(planned, later)
            fill(out)
            assert begin < first() <= parts(planned, "one")[0]
            if group:
                # The query ended here, was started again, and finds that its last batch was written.
                it = query()
                later = it.latestOffset(later, EVERYTHING)
                it.partitions(later, later)
            else:
                later = it.latestOffset(later, EVERYTHING)
            assert it.latestOffset(later, EVERYTHING) == later
            out.send(b"")
            assert first() > parts(planned, "one")[0]
        connections.forget(it.options.endpoint)


def test_a_hold_that_is_too_long_is_a_warning(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker refuses it, and the batch goes on without."""
    served.send("one", *range(10))
    it = stream(served, address="one", group="g", hold="30d")
    start = it.initialOffset()
    spans = it.partitions(start, it.latestOffset(start, EVERYTHING))
    assert "retention is not kept away from one" in caplog.text
    assert len(rows(it, spans)) == 10


# --- Batches -------------------------------------------------------------------------------------


def test_a_batch_is_between_two_places(served: Any) -> None:
    served.send("one", *range(10))

    def offsets(**given: str) -> list[int]:
        batch = Batch(options(served, address="one", **given))
        return [row[1] for row in rows(batch, batch.partitions())]

    assert offsets() == list(range(10))
    assert offsets(startingOffsets='{"one": {"0": 4}}', endingOffsets='{"one": {"0": 7}}') == [
        4,
        5,
        6,
    ]
    assert offsets(endingTimestamp="1") == []
    assert offsets(startingTimestamp="1") == list(range(10))
    assert offsets(startingOffsets="latest") == []
    connections.call(served.endpoint, "one", "SET-CURSOR", {0: 6}, group="g")
    assert offsets(startingOffsets="committed", group="g") == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="endingOffsets names 70"):
        offsets(endingOffsets='{"one": {"0": 70}}')
    with pytest.raises(ValueError, match="needs the option group"):
        offsets(startingOffsets="committed")
    with pytest.raises(AmqpError, match="nowhere"):
        Batch(options(served, address="nowhere")).partitions()


def test_bounds_are_exact(served: Any) -> None:
    served.send("log", *range(20))

    def found(bounds: Bounds) -> list[tuple[int, int]]:
        batch = Batch(options(served))
        batch.bounds = bounds
        return [row[:2] for row in rows(batch, batch.partitions())]

    assert found(Bounds(partitions={1}, first=3, end=6)) == [(1, 3), (1, 4), (1, 5)]
    assert found(Bounds(first=8)) == [(0, 8), (0, 9), (1, 8), (1, 9)]
    assert found(Bounds(end=1)) == [(0, 0), (1, 0)]
    assert found(Bounds(first=5, end=2)) == []
    assert found(Bounds(end=-3)) == []
    assert found(Bounds(first=100)) == []
    assert found(Bounds(addresses=set())) == []
    assert found(Bounds(until_ms=1)) == []
    assert len(found(Bounds(since_ms=1))) == 20


def test_queues_and_logs_in_one_batch(served: Any) -> None:
    served.send("in", *range(7))
    served.send("one", *range(3))
    batch = Batch(options(served, address="in,one", columns="address,partition,offset"))
    spans = batch.partitions()
    assert not batch.only_logs()
    assert Snapshot("in", 7) in spans
    found = [row for span in spans for row in batch.read(span)]
    assert sorted(found, key=str) == sorted(
        [("in", None, None)] * 7 + [("one", 0, each) for each in range(3)], key=str
    )
    with pytest.raises(ValueError, match="is a log"):
        Batch(options(served, address="one", mode="browse")).partitions()


@pytest.mark.req("K5")
def test_a_batch_reads_what_a_group_has(served: Any) -> None:
    served.send("in", *range(10), durable=True)
    connections.call(served.endpoint, "in", "OPEN-LEASE", group="g")
    connections.call(served.endpoint, "in", "LEASE", group="g", generation=1, count=8)
    connections.call(served.endpoint, "in", "RETURN-LEASE", [[2, 4]], group="g", generation=1)
    connections.call(served.endpoint, "in", "ACCEPT-LEASE", group="g", generation=1, to=1)
    told = options(
        served, address="in", mode="lease", group="g", minPartitions="3", columns="offset"
    )
    batch = LeaseBatch(told)
    for _ in range(2):
        spans = batch.partitions()
        assert len(spans) == 3
        assert [row for span in spans for row in batch.read(span)] == [(1,), (4,), (5,), (6,), (7,)]
    with pytest.raises(ValueError, match="needs the option group"):
        LeaseBatch(options(served, address="in", mode="lease"))
    gone = spans[0]
    connections.call(served.endpoint, "in", "RELEASE-LEASE", group="g")
    with pytest.raises(AmqpError, match="no group 'g'"):
        list(batch.read(gone))
