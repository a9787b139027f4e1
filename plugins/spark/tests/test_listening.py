"""Lag and bytes of streams, as a listener of Spark hears of them."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options

pytest.importorskip("pyspark")

from amqp_rt_spark import listening
from amqp_rt_spark.listening import BatchMetrics, MetricsListener, Partition, metrics_of

pytestmark = pytest.mark.req("K2")


def progress(*sources: Any, query: str = "q", name: str | None = "late") -> Any:
    return SimpleNamespace(
        id=query,
        name=name,
        batchId=4,
        numInputRows=3,
        processedRowsPerSecond=1.5,
        sources=[
            SimpleNamespace(startOffset=start, endOffset=end, latestOffset=latest)
            for start, end, latest in sources
        ],
    )


def log(address: str = "a", known: str = "x", **more: Any) -> str:
    return json.dumps({"logs": {address: {"id": known, **more}}, "v": 1})


def lease(number: int, **more: Any) -> str:
    return json.dumps({"leases": {"jobs": {"id": "l", "n": number, **more}}, "v": 1})


#: Metrics of a source, and not of Spark in its place.
SAID = {"waiting": True}


def test_what_is_behind() -> None:
    start, end = log(p={"0": 5, "1": 2}), log(p={"0": 8, "1": 2})
    latest = log(p={"0": 9, "1": 4}, mean={"0": 100, "1": 10}, **{"from": {"0": 0, "1": 0}})
    found = metrics_of(progress((start, end, latest), (lease(3), lease(5), lease(9, **SAID))))
    assert found.partitions == (
        Partition("a", 0, 8, 1, 100, 3, 300),
        Partition("a", 1, 2, 2, 20, 0, 0),
        Partition("jobs", None, 5, 4, None, 2, None),
    )
    assert (found.behind, found.behind_bytes, found.bytes) == (7, 120, 300)
    assert (found.query, found.name, found.batch, found.rows) == ("q", "late", 4, 3)


@pytest.mark.parametrize("latest", ["null", None, "x", log(known="other", p={"0": 9})])
def test_what_nobody_has_said_is_unknown(latest: Any) -> None:
    """Spark before 4.2 does not ask for it; a log that was made again is another one."""
    found = metrics_of(progress((None, log(p={"0": 8}), latest)))
    assert found.partitions == (Partition("a", 0, 8, None, None, 0, None),)
    assert (found.behind, found.behind_bytes, found.bytes) == (None, None, None)


def test_the_end_of_a_batch_is_not_the_end_of_its_nodes() -> None:
    """Spark before 4.2 repeats it as the latest offset."""
    found = metrics_of(
        progress((None, log(p={"0": 8}), log(p={"0": 8})), (None, lease(5), lease(5)))
    )
    assert [each.behind for each in found.partitions] == [None, None]


def test_sources_that_are_not_ours() -> None:
    told: list[BatchMetrics] = []
    listener = MetricsListener(told.append)
    for end in ("7", "null", '{"shardId": 1}', "[]", None):
        listener.onQueryProgress(SimpleNamespace(progress=progress((None, end, None))))
    assert (told, listener.last) == ([], {})


def test_the_last_ones_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "QUERIES_MAX", 2)
    listener = MetricsListener()
    for query in ("one", "two", "one", "three"):
        event = progress((None, lease(5), lease(9, **SAID)), query=query, name=None)
        listener.onQueryProgress(SimpleNamespace(progress=event))
        listener.onQueryTerminated(SimpleNamespace())
    assert list(listener.last) == ["one", "three"]


def test_a_report_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def report(metrics: BatchMetrics) -> None:
        raise OSError("no room")

    listener = MetricsListener(report)
    event = SimpleNamespace(progress=progress((None, lease(5), lease(9, **SAID))))
    listener.onQueryProgress(event)
    assert "metrics not reported: query late" in caplog.text
    with caplog.at_level(logging.INFO, "amqp_rt_spark"):
        MetricsListener().onQueryProgress(event)
    assert "query late batch 4 rows 3 bytes None behind 4 behind_bytes None" in caplog.text


def test_text_for_prometheus() -> None:
    listener = MetricsListener()
    end, latest = log('a"\\b', p={"0": 8}), log('a"\\b', p={"0": 9}, mean={"0": 10})
    listener.onQueryProgress(SimpleNamespace(progress=progress((end, end, latest))))
    text = listener.openmetrics()
    where = '{query="late",address="a\\"\\\\b",partition="0"}'
    assert f"amqp_rt_spark_messages_behind{where} 1\n" in text
    assert f"amqp_rt_spark_bytes_behind{where} 10\n" in text
    assert text.endswith("# EOF\n")


def test_a_source_says_what_it_takes(served: Any) -> None:
    served.send("one", *("x" * 1_000 for _ in range(10)))
    said = {"url": served.url, "address": "one", "maxMessagesPerTrigger": "4"}
    stream = LogStream(read_options(said, "source"))
    end = stream.latestOffset(stream.initialOffset(), None)
    found = metrics_of(progress(("null", json.dumps(end), json.dumps(stream.reportLatestOffset()))))
    (part,) = found.partitions
    assert (part.offset, part.messages, part.behind) == (4, 4, 6)
    assert part.bytes is not None
    assert part.behind_bytes is not None
    assert part.bytes > 4 * 1_000
    assert part.behind_bytes > 6 * 1_000
