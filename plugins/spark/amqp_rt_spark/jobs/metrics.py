"""``metrics``: rates, latencies and ratios by address and window, from the events of ``$journal``.

Each event records how long the message had waited, or was held. So a window needs only its own events, in
any order: in a stream, events that are late by no more than ``late`` count in the window in which they
happened, and a window is emitted once, when that time is over.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from amqp_rt.durations import parse_duration

from .conf import Duration, StreamConf
from .lake import Format, append_delta, format_of, write_parquet
from .report import Plot, Report, Table, Text
from .running import Run, Watch, follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Most windows in a report: the last ones.
WINDOWS_MAX: Final = 10_000
#: Most addresses in its plots: those with most traffic.
PLOTTED: Final = 8

_EVENTS: Final = (
    *("published", "delivered", "accepted", "released", "modified", "rejected"),
    *("expired", "dead-lettered", "dropped", "moved"),
)
_OUTCOMES: Final = ("accepted", "released", "modified", "rejected")
#: Format of published windows: times in UTC, unknown values as null.
_JSON: Final = (
    "map('timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSS'Z'\", 'timeZone', 'UTC', "
    "'ignoreNullFields', 'false')"
)
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Metrics(StreamConf, frozen=True, kw_only=True):
    """Settings of the job ``metrics``."""

    address: Annotated[str, Meta(description="The log of the broker's events.")] = "$journal"
    window: Annotated[Duration, Meta(description="How much time is counted together.")] = "1m"
    late: Annotated[
        Duration, Meta(description="How long a window waits for events that come late.")
    ] = "1m"
    starting: Annotated[
        Literal["earliest", "latest"],
        Meta(description="Where a stream without a checkpoint begins."),
    ] = "earliest"
    table: Annotated[
        str, Meta(description="Folder of the table that each window is appended to.")
    ] = ""
    table_format: Annotated[
        Literal["auto", "delta", "parquet"],
        Meta(description="auto: the format of the table, or Delta if deltalake is installed."),
    ] = "auto"
    to: Annotated[
        str, Meta(description="Address that each window is published to, as JSON, for alerts.")
    ] = ""
    group: Annotated[
        str, Meta(description="Name under which the broker keeps how far a stream has got.")
    ] = "metrics"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "late"):
            if parse_duration(getattr(self, name)) < 0.001:
                raise ValueError(f"{name} is at least 1ms, not {getattr(self, name)!r}")
        if (self.table or self.to) and not self.checkpoint:
            raise ValueError(
                "checkpoint: name a folder; to write each row to a table or an address once, Spark "
                "has to keep its progress there"
            )

    @property
    def whole(self) -> bool:
        """Whether all present events are counted once, without a checkpoint."""
        return self.once and not self.checkpoint


def metrics(spark: SparkSession, conf: Metrics, watch: Watch | None = None) -> Report:
    """Count the events of the journal by address and window.

    The report's facts contain the windows themselves, the last ``WINDOWS_MAX`` of them.

    With ``once`` and no ``checkpoint`` all present events are counted, including those of open windows.
    Otherwise a stream emits each window once, when it is over.

    Raises:
        AmqpError: The journal cannot be read.
        StreamingQueryException: The query has failed.
    """
    if conf.whole:
        events = spark.read.format("amqp").options(**_source(conf)).load()
        return report_of(_collected(windows(events, conf)), conf)
    moving = {
        "group": conf.group,
        "startingOffsets": conf.starting,
        "maxMessagesPerTrigger": conf.max_messages,
    }
    events = spark.readStream.format("amqp").options(**_source(conf, **moving)).load()
    writer = _WindowWriter(conf, format_of(conf.table, conf.table_format) if conf.table else None)
    stream = windows(events, conf).writeStream.queryName("metrics").outputMode("append")
    if conf.checkpoint:
        stream = stream.option("checkpointLocation", conf.checkpoint)
    run = follow(stream.foreachBatch(writer).trigger(**conf.trigger).start(), watch)
    return report_of(writer.kept, conf, run)


def windows(events: DataFrame, conf: Metrics) -> DataFrame:
    """Return a row for each window and address of the records of a journal.

    Quantiles are exact, interpolated between the two nearest values; times are milliseconds. Events that
    the broker did not record count as ``lost``, at the address ``""``.
    """
    from pyspark.sql import functions as f

    width = parse_duration(conf.window)
    parts = [
        f"try_variant_get(application_properties, '$[\"{name}\"]', '{kind}') {column}"
        for name, kind, column in (
            ("time", "timestamp", "time"),
            ("event", "string", "event"),
            ("address", "string", "address"),
            ("size", "bigint", "size"),
            ("attempt", "bigint", "attempt"),
            ("waited-us", "bigint", "waited"),
            ("held-us", "bigint", "held"),
            ("count", "bigint", "count"),
        )
    ]
    read = (
        events.selectExpr(*parts)
        .where("time is not null and event is not null")
        .withColumn("address", f.coalesce("address", f.lit("")))
        .withWatermark("time", f"{round(parse_duration(conf.late) * 1000)} milliseconds")
    )
    quantiles = f"array({', '.join(map(str, _QUANTILES.values()))})"
    counted = read.groupBy(
        f.window("time", f"{round(width * 1000)} milliseconds"), f.col("address")
    ).agg(
        *(f.expr(f"count_if(event = '{name}')").alias(_column(name)) for name in _EVENTS),
        f.expr("count_if(event = 'delivered' and attempt > 1)").alias("redelivered"),
        f.expr("sum(if(event = 'published', size, 0))").alias("bytes"),
        f.expr("sum(if(event = 'lost', count, 0))").alias("lost"),
        f.expr(f"percentile(if(event = 'delivered', waited, null), {quantiles})").alias("waited"),
        f.expr(f"percentile(held, {quantiles})").alias("held"),
    )
    return counted.selectExpr(
        "window.start window_start",
        "window.end window_end",
        "address",
        *map(_column, _EVENTS),
        "redelivered",
        "bytes",
        "lost",
        f"published / {width}D published_per_s",
        f"bytes / {width}D bytes_per_s",
        f"delivered / {width}D delivered_per_s",
        "redelivered / nullif(delivered, 0) redelivery_ratio",
        f"rejected / nullif({' + '.join(_OUTCOMES)}, 0) reject_ratio",
        *(f"waited[{at}] / 1000 in_queue_{name}_ms" for at, name in enumerate(_QUANTILES)),
        *(f"held[{at}] / 1000 settle_{name}_ms" for at, name in enumerate(_QUANTILES)),
    )


def _source(conf: Metrics, **more: Any) -> dict[str, str]:
    return conf.options(address=conf.address, mode="log", columns="application_properties", **more)


def _column(event: str) -> str:
    return event.replace("-", "_")


def _collected(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the last windows of *frame*, in order, with times in UTC regardless of the session's zone."""
    last = frame.orderBy(frame.window_start.desc(), frame.address).limit(WINDOWS_MAX)
    rows = last.selectExpr(
        "* except (window_start, window_end)",
        "unix_millis(window_start) window_start",
        "unix_millis(window_end) window_end",
    ).collect()
    found = [row.asDict() for row in rows]
    for row in found:
        for name in ("window_start", "window_end"):
            row[name] = dt.datetime.fromtimestamp(row[name] / 1000, dt.UTC)
    return sorted(found, key=lambda row: (row["window_start"], row["address"]))


class _WindowWriter:
    """Emits the windows of a micro-batch. Repeating it changes nothing.

    Attributes:
        kept: The last windows, for the report.
    """

    def __init__(self, conf: Metrics, form: Format | None) -> None:
        self.kept: list[dict[str, Any]] = []
        self._conf = conf
        self._form = form
        self._query = ""

    def __call__(self, frame: DataFrame, number: int) -> None:
        frame = frame.persist()
        try:
            found = _collected(frame)
            # Most batches close no window.
            if found:
                self.kept.extend(found)
                del self.kept[:-WINDOWS_MAX]
                self._pass_on(frame, number)
        finally:
            frame.unpersist()

    def _pass_on(self, frame: DataFrame, number: int) -> None:
        conf = self._conf
        if not self._query and conf.checkpoint:
            text = frame.sparkSession.read.text(f"{conf.checkpoint}/metadata").collect()[0][0]
            self._query = str(json.loads(text)["id"])
        if self._form == "delta":
            append_delta(conf.table, frame.toArrow(), (), query=self._query, batch=number)
        elif self._form == "parquet":
            write_parquet(conf.table, frame, (), query=self._query, batch=number)
        if conf.to:
            # Spark tasks know the number of the micro-batch, which is the epoch.
            messages = frame.selectExpr(
                f"to_json(struct(*), {_JSON}) body",
                "'data' body_kind",
                "'application/json' content_type",
                "'metrics' subject",
            )
            options = conf.options(address=conf.to, producer=self._query)
            messages.write.format("amqp").options(**options).mode("append").save()


# ---- the report --------------------------------------------------------------------------------


def report_of(rows: list[dict[str, Any]], conf: Metrics, run: Run | None = None) -> Report:
    """Build the report of windows: totals and windows by address as tables, and plots over time."""
    known, lost = rows, sum(row["lost"] for row in rows)
    rows = [row for row in rows if row["address"]]
    totals = _totals(rows)
    sections: list[Any] = [Text(_summary(rows, conf, run))]
    if lost:
        sections.append(
            Text(
                f"The broker did not record {lost:,} events, as there were more than it may record "
                "in a second (per_second): counts and rates are too low."
            )
        )
    if rows:
        sections += [*_totals_tables(totals), *_window_tables(rows), *_plots(rows, totals)]
    return Report(
        title=f"Life cycles of messages: {conf.address}",
        sections=sections,
        facts={
            "windows": known,
            "lost": lost,
            "late": run.late if run else 0,
            "addresses": {total.address: total.counts for total in totals},
        },
    )


class _Total(Struct):
    """Totals over all windows of one address."""

    address: str
    counts: dict[str, int] = {}
    windows: int = 0
    worst: dict[str, float] = {}


def _totals(rows: Iterable[Mapping[str, Any]]) -> list[_Total]:
    found: dict[str, _Total] = {}
    for row in rows:
        total = found.setdefault(row["address"], _Total(row["address"]))
        total.windows += 1
        for name in (*map(_column, _EVENTS), "redelivered", "bytes"):
            total.counts[name] = total.counts.get(name, 0) + row[name]
        for name in ("in_queue_p99_ms", "settle_p99_ms"):
            if row[name] is not None:
                total.worst[name] = max(total.worst.get(name, 0.0), row[name])
    return sorted(found.values(), key=lambda each: (-each.counts["published"], each.address))


def _summary(rows: list[dict[str, Any]], conf: Metrics, run: Run | None) -> str:
    if not rows:
        said = "There are no windows that are over yet." if run else "The journal is empty."
    else:
        first, last = rows[0]["window_start"], max(row["window_end"] for row in rows)
        said = f"{len(rows):,} window{'s' if len(rows) > 1 else ''} of {conf.window} from {first:%F %T} to {last:%F %T} UTC."
    if run is not None:
        said += f" {run.rows:,} events were read in {run.batches:,} micro-batches."
        if run.late:
            said += f" Some came later than {conf.late} and are left out."
    return said


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None


def _totals_tables(totals: list[_Total]) -> list[Table]:
    ends = ("accepted", "released", "modified", "rejected", "expired", "dead_lettered", "dropped")
    return [
        Table(
            "By address",
            ["address", "in", "bytes", "out", "again, %", "queue p99, ms", "settle p99, ms"],
            [
                [
                    total.address,
                    total.counts["published"],
                    total.counts["bytes"],
                    total.counts["delivered"],
                    _percent(total.counts["redelivered"], total.counts["delivered"]),
                    _shown(total.worst.get("in_queue_p99_ms")),
                    _shown(total.worst.get("settle_p99_ms")),
                ]
                for total in totals
            ],
            note="in: published; out: delivered; again: redelivered, included in out; p99: of "
            "the window where it was highest.",
        ),
        Table(
            "How it ended",
            ["address", *(name.replace("_lettered", "") for name in ends)],
            [[total.address, *(total.counts[name] for name in ends)] for total in totals],
            note="dead: dead-lettered, for any reason.",
        ),
    ]


def _window_tables(rows: list[dict[str, Any]]) -> list[Table]:
    newest = rows[::-1]
    traffic = ["window", "address", "in/s", "bytes/s", "out/s", "again, %", "rejected, %"]
    latency = [f"{what} {name}" for what in ("queue", "settle") for name in _QUANTILES]
    return [
        Table(
            "Traffic by window",
            traffic,
            [
                [
                    _moment(row),
                    row["address"],
                    _shown(row["published_per_s"]),
                    _shown(row["bytes_per_s"]),
                    _shown(row["delivered_per_s"]),
                    _ratio(row["redelivery_ratio"]),
                    _ratio(row["reject_ratio"]),
                ]
                for row in newest
            ],
        ),
        Table(
            "Latency by window, ms",
            ["window", "address", *latency],
            [
                [
                    _moment(row),
                    row["address"],
                    *(_shown(row[f"in_queue_{name}_ms"]) for name in _QUANTILES),
                    *(_shown(row[f"settle_{name}_ms"]) for name in _QUANTILES),
                ]
                for row in newest
            ],
            note="In the queue: from when a message came, or came back, until it was delivered. "
            "To settle: from there to its outcome.",
        ),
    ]


def _moment(row: Mapping[str, Any]) -> str:
    return f"{row['window_start']:%m-%d %T}"


def _shown(value: float | None) -> float | None:
    """Round *value* to a useful number of digits."""
    return None if value is None else round(value, 1 if value >= 10 else 3)


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


def _plots(rows: list[dict[str, Any]], totals: list[_Total]) -> list[Plot]:
    """Return plots over time, of the addresses with most traffic."""
    moments = sorted({row["window_start"] for row in rows})
    places = {moment: at for at, moment in enumerate(moments)}
    shown = [total.address for total in totals[:PLOTTED]]
    plots = []
    for name, title, unit, absent in (
        ("published_per_s", "Published", "messages/s", 0.0),
        ("in_queue_p99_ms", "Time in the queue, p99", "ms", None),
        ("settle_p99_ms", "Time to settle, p99", "ms", None),
        ("redelivery_ratio", "Redelivered", "share of deliveries", None),
    ):
        series: dict[str, list[float | None]] = {each: [absent] * len(moments) for each in shown}
        for row in rows:
            if row["address"] in series:
                series[row["address"]][places[row["window_start"]]] = row[name]
        plots.append(Plot(title, "line", moments, series, unit))
    return plots
