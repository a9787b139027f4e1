"""Send the messages of a lake to an address again, each of them once (:mod:`.sending`).

A further run under the same id, after an interruption or with more rows in the table, continues from its
position. Messages of one partition keep their order, and so do those of a group that came from one
partition; between partitions the order is roughly that of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

from msgspec import Meta
from pyspark.sql import Window
from pyspark.sql import functions as sql

from .. import connections
from .conf import JobConf, Rate, per_second
from .publishing import Pace
from .report import Report, Table, Text
from .sending import PARTITIONS_MAX, Origin, Sender, producer_of, shown
from .tables import Moment, messages_of

#: Columns of a row that are used beside its message.
_BESIDE: Final = ("header", "message_annotations")
_NEEDED: Final = ("address", "partition", "offset", "enqueued_time", "message", *_BESIDE)


class Replay(JobConf, frozen=True, kw_only=True):
    """Settings of the job ``replay``."""

    table: Annotated[str, Meta(description="The table that ingest has written.")]
    to: Annotated[str, Meta(description="The address to send to.")]
    replay_id: Annotated[
        str,
        Meta(
            description="A name for this replay. Under the same one nothing is sent twice, so table, where and "
            "since stay the same; it is the message annotation x-opt-replay-id."
        ),
    ]
    where: Annotated[
        str,
        Meta(
            description="Only rows for which this SQL condition is true, over the table's columns."
        ),
    ] = ""
    since: Annotated[
        Moment,
        Meta(description="Only messages that were enqueued from this time on: 2026-01-31T12:00Z."),
    ] = ""
    until: Annotated[Moment, Meta(description="… and before this one.")] = ""
    rate: Annotated[Rate, Meta(description="Not more than so many at a time: 200/s.")] = ""
    set_property: Annotated[
        tuple[str, ...],
        Meta(description="An application property to set, NAME=VALUE, a string. Repeatable."),
    ] = ()
    dry_run: Annotated[bool, Meta(description="Show the messages to send, and send nothing.")] = (
        False
    )


def replay(spark: Any, conf: Replay) -> Report:
    """Send messages of a table to an address, each once under this id.

    Args:
        spark: The session.
        conf: Settings of the job.

    Raises:
        ValueError: The table is not one of ingest with raw messages, or ``where`` is no condition.
        AmqpError: The broker cannot be reached, or refuses. A further run continues from its position.
    """
    properties = _properties(conf.set_property)
    rows = messages_of(
        spark, conf.table, _NEEDED, since=conf.since, until=conf.until, where=conf.where
    )
    if conf.dry_run:
        return _planned(rows, conf)
    # Ordered by time, as far as that keeps the order of offsets in each partition.
    before = Window.partitionBy("address", "partition").orderBy("offset")
    moment = sql.max("enqueued_time").over(
        before.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    columns = ["address", "partition", "offset", "message", *_BESIDE]
    ordered = (
        rows.select(*columns, moment.alias("_moment"))
        .orderBy("_moment", "address", "partition", "offset")
        .drop("_moment")
    )
    pace = Pace(per_second(conf.rate) if conf.rate else None)
    sender = Sender(conf, conf.to, conf.replay_id, pace, properties, _chosen(conf))
    sender.send(row.asDict() for row in ordered.toLocalIterator(prefetchPartitions=True))
    return _report(conf, sender.counts)


def _chosen(conf: Replay) -> str:
    """Describe the choice of rows, without ``until``: a later one only adds rows after those sent."""
    said = {"table": conf.table, "where": conf.where, "since": conf.since}
    return " ".join(f"{name}={value}" for name, value in said.items() if value)


def _report(conf: Replay, counts: dict[Origin, list[int]]) -> Report:
    sent = sum(each[0] for each in counts.values())
    already = sum(each[1] for each in counts.values())
    return Report(
        title=f"Replay {conf.replay_id} to {conf.to}",
        sections=[
            Text(
                f"{sent} messages were sent"
                + (f", and {already} had been before." if already else ".")
            ),
            Table(
                "By where they came from",
                ["address", "partition", "sent", "sent before"],
                [[*origin, *counts[origin]] for origin in sorted(counts, key=shown)],
            ),
        ],
        facts={"id": conf.replay_id, "sent": sent, "sent_before": already},
    )


def _planned(rows: Any, conf: Replay) -> Report:
    """Report the messages that would be sent."""
    counted = rows.groupBy("address", "partition").agg(
        sql.countDistinct("offset").alias("count"),
        sql.min("offset").alias("first"),
        sql.max("offset").alias("last"),
    )
    table: list[list[Any]] = []
    for row in counted.orderBy("address", "partition").limit(PARTITIONS_MAX).collect():
        asked = producer_of(conf.replay_id, (row.address, row.partition))
        known = connections.call(conf.endpoint, conf.to, "EPOCH", producer=asked)["epoch"]
        table.append([row.address, row.partition, row["count"], row.first, row.last, max(0, known)])
    total = sum(each[2] for each in table)
    return Report(
        title=f"Replay {conf.replay_id} to {conf.to}",
        sections=[
            Table(
                "Would be sent, unless it was before",
                ["address", "partition", "messages", "first offset", "last offset", "sent before"],
                table,
                "messages before the offset in the last column were sent under this id",
            )
        ],
        facts={"id": conf.replay_id, "dry_run": True, "messages": total},
    )


def _properties(given: Iterable[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise ValueError(f"set_property is NAME=VALUE, not {each!r:.80}")
        found[name] = value
    return found
