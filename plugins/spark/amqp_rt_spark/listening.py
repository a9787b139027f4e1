"""Lag and bytes of streams, by micro-batch: a listener for a session, in the driver.

Sources of ``format("amqp")`` report with each micro-batch its end, and the ends of their nodes. This module
turns both into numbers for dashboards and alarms.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct
from pyspark.sql.streaming.listener import StreamingQueryListener

_log = logging.getLogger("amqp_rt_spark")

#: Most queries whose last metrics are kept.
QUERIES_MAX: Final = 100


class Partition(Struct, frozen=True):
    """Progress of a query in one partition of a log, or in a queue.

    Attributes:
        address: The node.
        partition: Number of the partition, None for a queue.
        offset: The first one that is not read yet; of a queue the number of a lease.
        behind: Messages available there, None if Spark does not report them (before 4.2).
        behind_bytes: Bytes of those, by the mean size of the log's records; None for a queue.
        messages: Messages of the batch; with a selector, also those that it has excluded.
        bytes: Bytes of those, likewise.
    """

    address: str
    partition: int | None
    offset: int
    behind: int | None
    behind_bytes: int | None
    messages: int
    bytes: int | None


class BatchMetrics(Struct, frozen=True):
    """Result of a micro-batch, and the lag of its query.

    Attributes:
        query: Id of the query, which its checkpoint keeps.
        name: Its ``queryName``, empty without one.
        batch: Number of the micro-batch.
        rows: Rows that Spark has counted, including those of other sources of the query.
        rows_per_second: Rows a second, over the whole micro-batch.
        partitions: Each partition of the logs, and each queue; empty if the query has no ``amqp`` source.
    """

    query: str
    name: str
    batch: int
    rows: int
    rows_per_second: float
    partitions: tuple[Partition, ...]

    @property
    def behind(self) -> int | None:
        """Messages available in all partitions, None if unknown for all of them."""
        return _sum(each.behind for each in self.partitions)

    @property
    def behind_bytes(self) -> int | None:
        """Bytes of the available messages, by mean sizes, None if unknown for all partitions."""
        return _sum(each.behind_bytes for each in self.partitions)

    @property
    def bytes(self) -> int | None:
        """Bytes of the messages of the micro-batch, by mean sizes, None if unknown for all partitions."""
        return _sum(each.bytes for each in self.partitions)


def _sum(numbers: Iterator[int | None]) -> int | None:
    """Return the sum of the known numbers, None if there is none."""
    known = [each for each in numbers if each is not None]
    return sum(known) if known else None


class MetricsListener(StreamingQueryListener):
    """Metrics of each micro-batch of a session: ``spark.streams.addListener(MetricsListener())``.

    Spark calls it after the micro-batch, in the driver, one call after another: a slow *report* delays later ones,
    and no query. A query that is stopped, fails, or dies with its driver reports nothing more, and keeps its last
    metrics here; an unfinished micro-batch is in no report.

    Args:
        report: Called with the metrics of each micro-batch of a query that reads ``format("amqp")``, in a
            thread of Spark. Its exceptions are logged. By default each is a line of the logger
            ``amqp_rt_spark``, at the level INFO.
    """

    def __init__(self, report: Callable[[BatchMetrics], object] | None = None) -> None:
        self._report = report or _logged
        self._last: dict[str, BatchMetrics] = {}
        self._lock = threading.Lock()

    @property
    def last(self) -> dict[str, BatchMetrics]:
        """Last metrics by query id, of the ``QUERIES_MAX`` queries that reported most recently."""
        with self._lock:
            return dict(self._last)

    def openmetrics(self) -> str:
        """Return the last metrics as text for Prometheus: gauges of messages, bytes and offsets, without times.

        Labels are the ``query`` (its name, or its id), the ``address`` and the ``partition``.
        """
        lines = []
        for name, attribute in _GAUGES.items():
            lines.append(f"# TYPE {name} gauge")
            for metrics in self.last.values():
                for each in metrics.partitions:
                    value = getattr(each, attribute)
                    if value is None:
                        continue
                    labels = {"query": metrics.name or metrics.query, "address": each.address}
                    if each.partition is not None:
                        labels["partition"] = str(each.partition)
                    said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                    lines.append(f"{name}{{{said}}} {value}")
        return "\n".join([*lines, "# EOF", ""])

    # --- Called by Spark, under its names ---

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Do nothing: no rows have been read."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Report a micro-batch."""
        metrics = metrics_of(event.progress)
        if not metrics.partitions:
            return
        with self._lock:
            self._last.pop(metrics.query, None)
            self._last[metrics.query] = metrics
            while len(self._last) > QUERIES_MAX:
                del self._last[next(iter(self._last))]
        try:
            self._report(metrics)
        except Exception:
            _log.exception("metrics not reported: query %s", metrics.name or metrics.query)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Do nothing: no messages have come since the last micro-batch."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Keep the last metrics: an alarm needs to see that they no longer change."""


_GAUGES: Final = {
    "amqp_rt_spark_messages_behind": "behind",
    "amqp_rt_spark_bytes_behind": "behind_bytes",
    "amqp_rt_spark_offset": "offset",
    "amqp_rt_spark_batch_messages": "messages",
    "amqp_rt_spark_batch_bytes": "bytes",
}


def _escaped(text: str) -> str:
    """Return *text* as the value of a label in OpenMetrics."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _logged(metrics: BatchMetrics) -> None:
    _log.info(
        "micro-batch done: query %s batch %d rows %d bytes %s behind %s behind_bytes %s",
        *(metrics.name or metrics.query, metrics.batch, metrics.rows),
        *(metrics.bytes, metrics.behind, metrics.behind_bytes),
    )


def metrics_of(progress: Any) -> BatchMetrics:
    """Return the metrics of the ``amqp`` sources in a ``StreamingQueryProgress``."""
    found: list[Partition] = []
    for source in progress.sources:
        found += _partitions(source)
    return BatchMetrics(
        query=str(progress.id),
        name=progress.name or "",
        batch=int(progress.batchId),
        rows=int(progress.numInputRows),
        rows_per_second=float(progress.processedRowsPerSecond or 0.0),
        partitions=tuple(found),
    )


def _partitions(source: Any) -> Iterator[Partition]:
    start, end, latest = map(_offset, (source.startOffset, source.endOffset, source.latestOffset))
    for address, each in (end.get("logs") or {}).items():
        there = _of(latest, "logs", address, each["id"])
        # Spark before 4.2 repeats the end of the batch as the latest offset, which has no mean sizes.
        known = "mean" in there
        # For the first micro-batch Spark does not report the start.
        before = _of(start, "logs", address, each["id"]).get("p", there.get("from", {}))
        for number, at in each["p"].items():
            last = there["p"].get(number) if known else None
            mean = there.get("mean", {}).get(number)
            behind = None if last is None else max(last - at, 0)
            count = max(at - before.get(number, at), 0)
            yield Partition(
                *(address, int(number), at, behind),
                None if behind is None or mean is None else behind * mean,
                count,
                None if mean is None else count * mean,
            )
    for address, each in (end.get("leases") or {}).items():
        first = _of(start, "leases", address, each["id"]).get("n", each["n"])
        there = _of(latest, "leases", address, each["id"])
        last = there["n"] if "waiting" in there else None
        behind = None if last is None else max(last - each["n"], 0)
        yield Partition(address, None, each["n"], behind, None, max(each["n"] - first, 0), None)


def _offset(said: Any) -> Mapping[str, Any]:
    """Return an offset of an ``amqp`` source, empty if it is one of another source."""
    try:
        found = json.loads(said) if isinstance(said, str) else said
    except ValueError:
        return {}
    ours = isinstance(found, Mapping) and found.keys() & {"logs", "leases"}
    return found if ours else {}


def _of(offset: Mapping[str, Any], kind: str, address: str, known: str) -> Mapping[str, Any]:
    """Return the entry of a node in *offset*, empty if it is of another incarnation."""
    found = (offset.get(kind) or {}).get(address) or {}
    return found if found.get("id") == known else {}
