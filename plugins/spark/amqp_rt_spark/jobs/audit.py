"""Compare a table of a lake with the logs it was made from, by counts and checksums of offset ranges.

Both sides are read once, and each range is reduced to a count and a checksum that does not depend on the
order. Only ranges that differ are compared record by record, and the differences are reported as ranges again.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from functools import reduce
from typing import Annotated, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct
from pyspark.sql import Window
from pyspark.sql import functions as sql

from amqp_rt.durations import parse_duration
from amqp_rt.errors import AmqpError

from .. import connections
from ..logs import log_state, release_hold
from ..options import SOURCE, read_options
from .checkpoints import local_path
from .conf import Duration, JobConf
from .report import Report, Table, Text
from .tables import Moment, messages_of, within

_logger = logging.getLogger("amqp_rt_spark")

#: Most ranges of differences that the report lists.
_RANGES_MAX: Final = 1_000
_KEY: Final = ("address", "partition", "offset")
#: Kinds of differences at an offset, and their texts in the report.
_WORDS: Final = {
    "missing": "the log has it, the table has not",
    "extra": "the table has it, the log never had",
    "differing": "the table has another message there",
    "doubled": "the table has it more than once",
}


class Audit(JobConf, frozen=True, kw_only=True):
    """Settings of the job ``audit``."""

    address: Annotated[tuple[str, ...], Meta(description="A log. Repeatable.")]
    table: Annotated[str, Meta(description="The table that ingest has written.")]
    quarantine: Annotated[
        str,
        Meta(
            description="Its table of messages that cannot be decoded. [default: TABLE_quarantine]"
        ),
    ] = ""
    group: Annotated[
        str,
        Meta(
            description="Look only as far as this group has come, which is that of ingest; by default "
            "as far as the logs go."
        ),
    ] = ""
    since: Annotated[
        Moment,
        Meta(description="Only records that were enqueued from this time on: 2026-01-31T12:00Z."),
    ] = ""
    until: Annotated[Moment, Meta(description="… and before this one.")] = ""
    range_size: Annotated[int, Meta(description="Offsets that are compared at once.", ge=1)] = (
        10_000
    )
    hold: Annotated[
        Duration, Meta(description="How long retention spares the records being read.")
    ] = "10m"


class AuditedPartition(Struct, frozen=True):
    """A partition, compared from *first* on and before *end*; the log ends at *next*."""

    address: str
    partition: int
    first: int
    end: int
    next: int


def audit(spark: Any, conf: Audit) -> Report:
    """Compare logs with the table that ingest has made of them.

    Returns:
        A report with the exit code 3 if they differ.

    Raises:
        ValueError: The table is not one of ingest, or an address is not a log.
        AmqpError: The broker cannot be reached, or refuses.
    """
    holder = f"audit:{uuid4()}"
    try:
        return _compared(spark, conf, holder)
    finally:
        for address in conf.address:
            release_hold(conf.endpoint, address, holder)


def _compared(spark: Any, conf: Audit, holder: str) -> Report:
    parts = [part for address in conf.address for part in _parts(conf, address, holder)]
    lake, exact = _lake(spark, conf, parts)
    lake = lake.cache()
    try:
        rows = _sums(conf, _log(spark, conf, parts, exact=exact), lake).collect()
        sums = {(row.address, row.partition): row for row in rows}
        places = Counter[str]()
        for row in lake.groupBy("place").count().collect():
            places[row.place] = row["count"]
        suspects = [
            AuditedPartition(
                part.address,
                part.partition,
                max(part.first, row.lowest * conf.range_size),
                min(part.end, (row.highest + 1) * conf.range_size),
                part.next,
            )
            for part in parts
            if (row := sums.get((part.address, part.partition))) is not None
            and row.lowest is not None
        ]
        wrong = []
        totals = Counter[tuple[str, int, str]]()
        if suspects or places["beyond"]:
            log = _log(spark, conf, suspects, exact=exact) if suspects else None
            ranges = _ranges(spark, log, lake, suspects).cache()
            try:
                wrong = ranges.orderBy(*_KEY[:2], "first").limit(_RANGES_MAX).collect()
                by = ranges.groupBy("address", "partition", "what").agg(
                    sql.sum("count").alias("count")
                )
                for row in by.collect():
                    totals[row.address, row.partition, row.what] = row["count"]
            finally:
                ranges.unpersist()
    finally:
        lake.unpersist()
    return _report(conf, parts, sums, places, totals, wrong, exact=exact)


def _parts(conf: Audit, address: str, holder: str) -> list[AuditedPartition]:
    """Return the partitions of a log to compare; *holder* keeps its records from retention meanwhile."""
    state = log_state(read_options(conf.options(address=address), SOURCE), address)
    ends = {number: part.next for number, part in state.parts.items()}
    if conf.group:
        cursor = connections.call(conf.endpoint, address, "CURSOR", group=conf.group)
        ends = {number: min(int(cursor.get(number, 0)), end) for number, end in ends.items()}
    try:
        connections.call(
            conf.endpoint,
            address,
            "HOLD",
            {number: part.first for number, part in state.parts.items()},
            holder=holder,
            seconds=parse_duration(conf.hold),
            incarnation=state.incarnation,
        )
    except AmqpError as error:
        # The hold is only a precaution: records lost meanwhile are noticed in any case.
        _logger.warning("retention is not kept away from %s: %s", address, error)
    return [
        AuditedPartition(address, number, part.first, max(ends[number], part.first), part.next)
        for number, part in sorted(state.parts.items())
    ]


def _digest(exact: bool) -> Any:
    """Return the column that distinguishes messages; null without a message, as for undecodable ones."""
    if not exact:
        return sql.lit(None).cast("bigint").alias("digest")
    return sql.when(sql.col("message").isNotNull(), sql.xxhash64("message")).alias("digest")


def _log(spark: Any, conf: Audit, parts: list[AuditedPartition], *, exact: bool) -> Any:
    """Return address, partition, offset and digest of the records of logs."""
    frames = []
    pushes = spark.conf.get("spark.sql.python.filterPushdown.enabled", "false") == "true"
    for address in dict.fromkeys(part.address for part in parts):
        mine = [part for part in parts if part.address == address]
        given = conf.options(
            address=address,
            mode="log",
            columns="address,partition,offset,enqueued_time,message",
            raw=True,
            onUndecodable="row",
            filterPushdown=pushes,
            startingOffsets=_offsets(address, {part.partition: part.first for part in mine}),
            endingOffsets=_offsets(address, {part.partition: part.end for part in mine}),
        )
        rows = spark.read.format("amqp").options(**given).load()
        # Spark's source reads partitions without given offsets as a whole, so drop them here.
        frames.append(rows.where(sql.col("partition").isin([part.partition for part in mine])))
    rows = within(reduce(lambda one, other: one.unionAll(other), frames), conf.since, conf.until)
    return rows.select(*_KEY, _digest(exact))


def _offsets(address: str, offsets: dict[int, int]) -> str:
    return json.dumps({address: {str(part): offset for part, offset in offsets.items()}})


def _lake(spark: Any, conf: Audit, parts: list[AuditedPartition]) -> tuple[Any, bool]:
    """Return address, partition, offset and digest of the table's rows with their place relative to the log,
    and whether the digests are of messages."""
    needed = (*_KEY, "enqueued_time")
    given = {"since": conf.since, "until": conf.until, "where": ""}
    rows = messages_of(spark, conf.table, needed, **given)
    exact = "message" in rows.columns
    found = rows.select(*_KEY, _digest(exact))
    aside = conf.quarantine or f"{conf.table.rstrip('/')}_quarantine"
    path = local_path(aside)
    if conf.quarantine or (path is not None and path.is_dir()):
        # For undecodable messages, checking their presence is enough.
        bad = messages_of(spark, aside, needed, **given)
        found = found.unionAll(bad.select(*_KEY, _digest(False)))
    place = (
        sql.when(sql.col("next").isNull() | (sql.col("offset") >= sql.col("next")), "beyond")
        .when(sql.col("offset") < sql.col("first"), "older")
        .when(sql.col("offset") >= sql.col("end"), "later")
        .otherwise("within")
        .alias("place")
    )
    found = found.where(sql.col("address").isin(*conf.address) & sql.col("offset").isNotNull())
    joined = found.join(_known(spark, parts), ["address", "partition"], "left")
    return joined.select(*_KEY, "digest", place), exact


def _known(spark: Any, parts: list[AuditedPartition]) -> Any:
    """Return *parts* as a DataFrame that is broadcast to every task."""
    schema = "address string, partition int, first bigint, end bigint, next bigint"
    return sql.broadcast(spark.createDataFrame([msgspec.structs.astuple(p) for p in parts], schema))


def _sums(conf: Audit, log: Any, lake: Any) -> Any:
    """Return, by partition, the counts of both sides, the number of differing ranges, and the first and last."""
    bucket = sql.floor(sql.col("offset") / conf.range_size).cast("bigint").alias("bucket")

    def summed(rows: Any, side: str) -> Any:
        return rows.groupBy("address", "partition", bucket).agg(
            sql.count("*").alias(f"{side}_count"),
            sql.bit_xor(sql.xxhash64("offset", "digest")).alias(f"{side}_sum"),
        )

    both = summed(log, "log").join(
        summed(lake.where("place = 'within'"), "lake"), ["address", "partition", "bucket"], "full"
    )
    same = sql.expr("log_count <=> lake_count and log_sum <=> lake_sum")
    differs = sql.when(~same, sql.col("bucket"))
    return both.groupBy("address", "partition").agg(
        sql.coalesce(sql.sum("log_count"), sql.lit(0)).alias("records"),
        sql.coalesce(sql.sum("lake_count"), sql.lit(0)).alias("rows"),
        sql.count("*").alias("ranges"),
        sql.count(differs).alias("differing"),
        sql.min(differs).alias("lowest"),
        sql.max(differs).alias("highest"),
        sql.bit_xor("log_sum").alias("log_sum"),
        sql.bit_xor("lake_sum").alias("lake_sum"),
    )


def _ranges(spark: Any, log: Any, lake: Any, suspects: list[AuditedPartition]) -> Any:
    """Return the differences in the *suspects* and the rows beyond the end of their log, as ranges of offsets."""
    near = lake.where("place = 'beyond'")
    if suspects:
        known = _known(spark, suspects).select("address", "partition", "first", "end")
        within_them = lake.where("place = 'within'").join(known, ["address", "partition"])
        near = near.unionAll(
            within_them.where("offset >= first and offset < end").select(lake.columns)
        )
    table = near.groupBy(*_KEY).agg(
        sql.count("*").alias("rows"),
        sql.min("digest").alias("low"),
        sql.max("digest").alias("high"),
    )
    if log is None:
        both = table.withColumn("digest", sql.lit(None).cast("bigint")).withColumn(
            "there", sql.lit(None).cast("boolean")
        )
    else:
        both = table.join(log.withColumn("there", sql.lit(True)), list(_KEY), "full")
    what = (
        sql.when(sql.col("there").isNull(), "extra")
        .when(sql.col("rows").isNull(), "missing")
        .when(sql.expr("low <> digest or high <> digest"), "differing")
        .when(sql.col("rows") > 1, "doubled")
    )
    wrong = both.withColumn("what", what).where("what is not null")
    window = Window.partitionBy("address", "partition", "what").orderBy("offset")
    # Consecutive offsets have a constant difference from their row numbers.
    island = sql.col("offset") - sql.row_number().over(window)
    return (
        wrong.withColumn("island", island)
        .groupBy("address", "partition", "what", "island")
        .agg(
            sql.min("offset").alias("first"),
            sql.max("offset").alias("last"),
            sql.count("*").alias("count"),
        )
    )


def _report(
    conf: Audit,
    parts: list[AuditedPartition],
    sums: dict[tuple[str, int], Any],
    places: Counter[str],
    totals: Counter[tuple[str, int, str]],
    wrong: list[Any],
    *,
    exact: bool,
) -> Report:
    found = {what: sum(n for key, n in totals.items() if key[2] == what) for what in _WORDS}
    bad = sum(found.values())
    records = sum(row.records for row in sums.values())
    said = f"{records} records of {', '.join(conf.address)} were compared with {conf.table}: "
    said += (
        ", ".join(f"{count} {what}" for what, count in found.items() if count)
        if bad
        else "there is no difference"
    )
    said += "."
    if not exact:
        said += " The table has no column message, so that only offsets were compared."
    if places["older"]:
        said += f" {places['older']} rows are of records that the logs do not keep any more."
    if places["later"]:
        said += f" {places['later']} rows are of records after where {conf.group} is."
    table = []
    for part in parts:
        key = part.address, part.partition
        row = sums.get(key)
        sums_of = [_hex(row.log_sum), _hex(row.lake_sum)] if row else [""]
        table.append(
            [
                *key,
                part.first,
                part.end,
                row.records if row else 0,
                row.rows if row else 0,
                " ≠ ".join(dict.fromkeys(sums_of)),
                sum(totals[(*key, what)] for what in _WORDS),
            ]
        )
    differences = Table(
        "Differences",
        ["address", "partition", "first offset", "last offset", "messages", "what"],
        [
            [
                *(row.address, row.partition, row["first"], row.last, row["count"]),
                f"{row.what}: {_WORDS[row.what]}",
            ]
            for row in wrong
        ],
        f"these are the first {_RANGES_MAX} ranges" if len(wrong) == _RANGES_MAX else "",
    )
    return Report(
        title=f"Audit of {conf.table}",
        sections=[
            Text(said),
            Table(
                "Partitions",
                ["address", "partition", "from", "to", "records", "rows", "checksum", "wrong"],
                table,
            ),
            *([differences] if wrong else []),
        ],
        exit_code=3 if bad else 0,
        facts={
            "records": records,
            "rows": sum(row.rows for row in sums.values()),
            "older": places["older"],
            "later": places["later"],
            "exact": exact,
            **found,
        },
    )


def _hex(checksum: int | None) -> str:
    return "" if checksum is None else f"{checksum & 0xFFFF_FFFF_FFFF_FFFF:016x}"
