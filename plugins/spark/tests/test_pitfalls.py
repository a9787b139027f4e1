"""The known pitfalls of data sources for Spark: where each of them is tested, and those that nothing else is about."""

from __future__ import annotations

import ast
import datetime as dt
import inspect
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.java import session
from amqp_rt_spark.leasing import LeaseStream
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import moment, read_options
from amqp_rt_spark.writing import Sink, Task

from amqp_rt import sync
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits

#: Pitfall → what goes wrong, and the tests that would fail.
PITFALLS = {
    1: (
        "Spark compares offsets as text: keys in another order are endless empty batches",
        "test_reading.test_an_offset_is_text_in_order test_spooling.test_an_offset_is_text_in_order",
    ),
    2: (
        "the first offset is asked for twice, and again when the first batch is done again",
        "test_micro_batches.test_a_start_that_moves_is_found_once",
    ),
    3: (
        "a source hears of a batch one batch later, and of the last one never",
        "test_micro_batches.test_the_group_is_where_the_query_is test_spark.test_a_queue_is_consumed_once",
    ),
    4: (
        "stop() is never called: a driver that is killed says nothing",
        (
            "test_driver_kills.test_nothing_is_lost_and_nothing_doubled "
            "test_micro_batches.test_a_group_has_one_query"
        ),
    ),
    5: (
        "names of parameters are part of Spark's interface",
        "test_pitfalls.test_parameters_have_the_names_that_spark_gives_them",
    ),
    6: (
        "a reader that takes filters fails the query unless Spark's switch is on",
        "test_pitfalls.test_a_reader_takes_filters_only_if_it_is_told_to",
    ),
    7: (
        "IsNotNull comes along with each comparison",
        "test_pitfalls.test_what_of_a_condition_is_taken",
    ),
    8: (
        "a filter that is claimed and not applied gives wrong rows",
        (
            "test_spark.test_what_filters_leave_out_is_not_read test_reading.test_bounds_are_exact "
            "test_pitfalls.test_what_of_a_condition_is_taken"
        ),
    ),
    9: (
        "abort comes after a commit that took effect",
        "test_pitfalls.test_abort_takes_back_nothing_that_is_published",
    ),
    10: (
        "a batch is written again under its number",
        (
            "test_micro_batches.test_each_call_is_one_at_which_it_may_end "
            "test_micro_batches.test_an_old_checkpoint_is_noticed"
        ),
    ),
    11: (
        "a batch that is done again has other partitions",
        (
            "test_reading.test_a_batch_is_read_whole_by_any_tasks "
            "test_spooling.test_a_batch_is_the_same_when_it_is_done_again "
            "test_micro_batches.test_nothing_is_lost_and_nothing_doubled_wherever_the_driver_ends"
        ),
    ),
    12: (
        "local[N] gives a task one attempt",
        (
            "test_pitfalls.test_a_session_gives_tasks_several_attempts "
            "test_spark.test_tasks_that_fail_leave_nothing"
        ),
    ),
    13: (
        "workers are the python3 of the path",
        "test_pitfalls.test_workers_are_the_python_of_the_driver",
    ),
    14: (
        "modules named pyspark_* are imported without a guard",
        "test_java.test_the_module_that_spark_finds_never_raises",
    ),
    15: (
        "Arrow schemas have to be equal to the last detail, and times are in UTC",
        "test_spark.test_a_log_is_a_table test_spark.test_octet_for_octet",
    ),
    16: (
        "options are text with names in lower case",
        "test_options.test_names_have_no_case",
    ),
    17: (
        "two attempts of a task run at the same time",
        (
            "test_pitfalls.test_two_attempts_at_the_same_time "
            "test_spooling.test_two_attempts_of_a_task_at_once"
        ),
    ),
    18: (
        "nothing is pushed down to a stream",
        "test_pitfalls.test_a_stream_is_narrowed_by_a_selector",
    ),
    19: (
        "a stream that is united with itself is two readers",
        "test_pitfalls.test_two_readers_of_one_stream",
    ),
    20: (
        "two queries of one stream read it twice",
        "test_pitfalls.test_two_readers_of_one_stream test_spooling.test_a_folder_is_of_one_checkpoint",
    ),
    21: (
        "retention takes what has been planned",
        (
            "test_pitfalls.test_retention_keeps_away_from_what_is_planned "
            "test_reading.test_retention_that_is_faster_is_noticed_or_let_pass"
        ),
    ),
    22: (
        "a new checkpoint is a new query, and sends everything again",
        (
            "test_micro_batches.test_an_old_checkpoint_is_noticed "
            "test_micro_batches.test_a_checkpoint_from_a_backup_loses_nothing_silently"
        ),
    ),
}


def test_each_pitfall_has_its_tests() -> None:
    assert list(PITFALLS) == list(range(1, 23))
    folder = Path(__file__).parent
    known = {
        f"{path.stem}.{node.name}"
        for path in folder.glob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {name for _, tests in PITFALLS.values() for name in tests.split()}
    assert named <= known, named - known


# --- What Spark's interface is, without a Java ---------------------------------------------------


def test_parameters_have_the_names_that_spark_gives_them() -> None:
    """Some are given by their names, and only when something has failed."""
    pytest.importorskip("pyspark")
    from amqp_rt_spark import readers, source, writers

    modules = [source, readers, writers]
    if source.FILTERS:
        from amqp_rt_spark import filters

        modules.append(filters)
    ours = [
        each
        for module in modules
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__
    ]
    compared = Counter[str]()
    for kind in ours:
        for base in kind.__mro__:
            if not base.__module__.startswith("pyspark"):
                continue
            for name, method in inspect.getmembers(base, inspect.isfunction):
                if name.startswith("_"):
                    continue
                theirs = list(inspect.signature(method).parameters)
                found = list(inspect.signature(getattr(kind, name)).parameters)
                assert len(found) == len(theirs), f"{kind.__name__}.{name}"
                if name in ("write", "commit", "abort", "partitions", "writer", "streamWriter"):
                    assert found == theirs, f"{kind.__name__}.{name}"
                compared[name] += 1
    assert {"commit", "abort", "streamWriter", "latestOffset"} <= set(compared)
    assert ("pushFilters" in compared) == source.FILTERS


def test_a_reader_takes_filters_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from amqp_rt_spark import source
    from amqp_rt_spark.source import AmqpDataSource
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

    said = {"url": "amqp://h", "address": "a"}
    monkeypatch.setattr(source, "FILTERS", False)
    with pytest.raises(ValueError, match=r"filterPushdown=true takes pyspark 4\.1 or later"):
        AmqpDataSource({**said, "filterpushdown": "true"}).reader(StructType([]))
    monkeypatch.undo()
    if not source.FILTERS:
        return
    plain = AmqpDataSource(said).reader(StructType([]))
    assert type(plain).pushFilters is DataSourceReader.pushFilters
    told = AmqpDataSource({**said, "filterpushdown": "true"}).reader(StructType([]))
    assert type(told).pushFilters is not DataSourceReader.pushFilters


def test_what_of_a_condition_is_taken() -> None:
    """Only what is honoured exactly; the rest is Spark's, as without us."""
    datasource = pytest.importorskip("pyspark.sql.datasource")
    if not hasattr(datasource, "Filter"):
        pytest.skip("pyspark 4.0 gives readers no conditions")
    from amqp_rt_spark.batch import Bounds
    from amqp_rt_spark.filters import push
    from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, IsNotNull, Not, StringContains

    def taken(filter_: Filter, *, logs: bool = True) -> Bounds | None:
        bounds = Bounds()
        return bounds if push(bounds, filter_, logs=logs) else None

    assert taken(GreaterThan(("offset",), 5)) == Bounds(first=6)
    assert taken(EqualTo(("address",), "a")) == Bounds(addresses={"a"})
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for ms in (8_462_002_281, -33_806_137_266, 0, 1_767_225_600_001):
        exact = epoch + dt.timedelta(milliseconds=ms)
        assert taken(EqualTo(("enqueued_time",), exact)) == Bounds(since_ms=ms, until_ms=ms + 1)
        between = exact + dt.timedelta(microseconds=1)
        assert taken(GreaterThan(("enqueued_time",), between)) == Bounds(since_ms=ms + 1)
        assert moment(exact.isoformat()) == ms
    # The filter excludes no row of a log, where every row has an offset; in a queue it does.
    assert taken(IsNotNull(("offset",))) == Bounds()
    for left in (
        IsNotNull(("body",)),
        EqualTo(("body",), b"x"),
        EqualTo(("offset",), 1.5),
        Not(EqualTo(("offset",), 1)),
        StringContains(("address",), "a"),
    ):
        assert taken(left) is None, left
    assert taken(IsNotNull(("offset",)), logs=False) is None
    assert taken(EqualTo(("partition",), 1), logs=False) is None


def test_a_session_gives_tasks_several_attempts() -> None:
    assert inspect.signature(session).parameters["master"].default == "local[*,4]"


@pytest.mark.slow
@pytest.mark.spark
def test_workers_are_the_python_of_the_driver(spark: Any) -> None:
    import sys

    from pyspark.sql.functions import udf

    @udf(returnType="string", useArrow=False)
    def who(number: int) -> str:
        return sys.executable

    (row,) = spark.range(1).select(who("id").alias("who")).collect()
    assert row.who == sys.executable


# --- The sink ------------------------------------------------------------------------------------


def sink(served: Any) -> Sink:
    said = {"url": served.url, "address": "out"}
    return Sink(read_options(said, "sink"), ["body"], streaming=True)


@pytest.mark.req("K3")
def test_abort_takes_back_nothing_that_is_published(served: Any) -> None:
    """Spark aborts a batch whose commit has failed on the way back, with all that was written."""
    pytest.importorskip("pyspark")
    from amqp_rt_spark.writers import AmqpCommitMessage, AmqpStreamWriter
    from pyspark.sql.types import StructType

    schema = StructType().add("body", "string")
    options = read_options({"url": served.url, "address": "out"}, "sink")
    writer = AmqpStreamWriter(options, schema)
    messages: list[Any] = [
        AmqpCommitMessage(sink(served).send([{"body": body}], Task(part, part, 0, "q", "one")))
        for part, body in enumerate("ab")
    ]
    writer.commit(messages, batchId=0)
    # The message of a failed task is None.
    AmqpStreamWriter(options, schema).abort([*messages, None], batchId=0)
    assert sorted(served.bodies("out")) == ["a", "b"]
    AmqpStreamWriter(options, schema).commit(messages, batchId=0)
    assert sorted(served.bodies("out")) == ["a", "b"]


@pytest.mark.req("K3")
def test_two_attempts_at_the_same_time(served: Any) -> None:
    """Speculation: both have sent all they have, and one of them counts, whichever Spark has chosen."""
    it = sink(served)
    first, second = (
        it.send([{"body": body} for body in "abc"], Task(0, attempt, 0, "q", "one"))
        for attempt in (1, 2)
    )
    assert first.count == second.count == 3
    assert it.publish([second])
    assert not it.publish([first])
    assert sorted(served.bodies("out")) == ["a", "b", "c"]


# --- The source ----------------------------------------------------------------------------------


@pytest.mark.req("K2")
def test_a_stream_is_narrowed_by_a_selector(served: Any) -> None:
    for number in range(10):
        served.send("one", str(number), application_properties={"odd": bool(number % 2)})
    said = {"url": served.url, "address": "one", "columns": "offset", "selector": "odd = TRUE"}
    it = LogStream(read_options(said, "source"))
    start = it.initialOffset()
    end = it.latestOffset(start, SimpleNamespace())
    offsets = [row[0] for span in it.partitions(start, end) for row in it.read(span)]
    assert offsets == [1, 3, 5, 7, 9]
    # Excluded records are behind the offset, too.
    assert it.latestOffset(end, SimpleNamespace()) == end


@pytest.mark.req("K2", "K5")
def test_two_readers_of_one_stream(served: Any) -> None:
    """A log is read by both, and a lease by one: the other one is told."""
    served.send("one", *range(5))
    served.send("in", *range(5))
    said = {"url": served.url, "address": "one", "columns": "offset", "group": "g"}
    for begin in ("earliest", "latest"):
        logs = [
            LogStream(read_options({**said, "startingOffsets": begin}, "source")) for _ in range(2)
        ]
        starts = [json.dumps(it.initialOffset()) for it in logs]
        assert starts[0] == starts[1]
        ends = [json.dumps(it.latestOffset(json.loads(starts[0]))) for it in logs]
        assert ends[0] == ends[1]
    queues = [
        LeaseStream(read_options({**said, "address": "in", "mode": "lease"}, "source"))
        for _ in range(2)
    ]
    starts = [json.dumps(it.initialOffset()) for it in queues]
    with pytest.raises(AmqpError, match="'g' has been opened again since") as caught:
        queues[0].latestOffset(json.loads(starts[0]))
    assert caught.value.condition == "amqp:link:stolen"
    assert queues[1].latestOffset(json.loads(starts[1])) != json.loads(starts[1])


@pytest.mark.req("K2")
@pytest.mark.parametrize("hold", ["60s", "0"])
def test_retention_keeps_away_from_what_is_planned(hold: str) -> None:
    with sync.Broker(volatile=True, limits=Limits(log_bytes_max=200_000)) as broker:
        broker.declare(Log("one", partitions=1), Queue("out"))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        said = {"url": url, "address": "one", "columns": "offset", "hold": hold}
        it = LogStream(read_options(said, "source"))
        start = it.initialOffset()
        with broker.local() as peer, peer.sender("one") as out:
            for _ in range(20):
                out.send(bytes(2_000))
            spans = it.partitions(start, it.latestOffset(start, SimpleNamespace()))
            # The log is full several times over before anybody reads.
            for _ in range(400):
                out.send(bytes(2_000))
        if hold == "0":
            with pytest.raises(DataLost, match="retention was faster"):
                [row for span in spans for row in it.read(span)]
        else:
            assert [row[0] for span in spans for row in it.read(span)] == [*range(20)]
        connections.forget(it.options.endpoint)
