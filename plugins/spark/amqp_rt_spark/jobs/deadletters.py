"""Report on dead letters, and replay them to their sources.

The report groups them by source, reason, and the shape of their bodies. It browses the queue, or reads the
log, and changes nothing. A replay moves the chosen ones (:mod:`.returning`).
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from msgspec import Meta
from pyspark.sql import functions as sql

from amqp_rt.errors import AmqpError

from .. import connections
from .conf import JobConf, Rate, per_second
from .publishing import Pace
from .report import Plot, Report, Section, Table, Text
from .returning import DESTINATIONS_MAX, Letter, Return, group_of, no_way, waiting
from .tables import condition_of

ORIGINAL: Final = "original"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: Most bars of the plot over time, and most reasons with a series of their own.
_BARS: Final = 60
_REASONS: Final = 8
#: Most bars over all reasons that are fetched. Reasons come from messages.
_POINTS: Final = 10_000
#: Characters of a body's shape that are shown.
_SHAPE_CHARS: Final = 400


class Deadletters(JobConf, frozen=True, kw_only=True):
    """Settings of the job ``deadletters``."""

    address: Annotated[str, Meta(description="The dead-letter queue, or a log of dead letters.")]
    where: Annotated[
        str,
        Meta(
            description="Only those for which this SQL condition is true, over the columns of a message "
            "and source, reason, condition, description, seen, deliveries, attempts, message_id, "
            "subject, shape, fingerprint."
        ),
    ] = ""
    groups: Annotated[int, Meta(description="Groups that are shown, the largest first.", ge=1)] = (
        100
    )
    replay_to: Annotated[
        str,
        Meta(
            description="Send them once more: to the address that gave them up (original), or to this one."
        ),
    ] = ""
    rate: Annotated[Rate, Meta(description="Not more than so many at a time: 200/s.")] = ""
    dry_run: Annotated[
        bool, Meta(description="Show the messages to replay without sending them.")
    ] = False


def deadletters(spark: Any, conf: Deadletters) -> Report:
    """Report on dead letters, and replay them if requested.

    Args:
        spark: The session.
        conf: Settings of the job.

    Returns:
        A report whose exit code is 3 if some that were chosen could not be replayed.

    Raises:
        ValueError: ``where`` is no condition, or the replay is impossible.
        AmqpError: The broker cannot be reached, or refuses. After an interruption the same replay
            continues from its position.
    """
    if conf.replay_to == conf.address:
        raise ValueError("replay_to is the dead-letter queue itself")
    kind = _kind(conf)
    if conf.replay_to and kind == "log":
        raise ValueError(
            f"{conf.address!r} is a log, whose records stay where they are: ingest it, and use the job "
            "replay"
        )
    mode = "log" if kind == "log" else "browse"
    letters = described(_read(spark, conf, mode=mode))
    if conf.where:
        letters = letters.where(condition_of(letters, conf.where))
    found = letters.select(
        *("source", "reason", "condition", "description", "shape", "fingerprint"),
        *("seen", "deliveries", "attempts"),
        sql.coalesce("message_id", sql.concat_ws("/", "partition", "offset")).alias("name"),
    ).cache()
    try:
        report = _report(found, conf)
    finally:
        found.unpersist()
    if conf.replay_to:
        replay = _planned(letters, conf) if conf.dry_run else _replayed(spark, conf)
        report.sections[:0] = replay.sections
        report.facts["replay"] = replay.facts
        report.exit_code = replay.exit_code
    return report


def _kind(conf: Deadletters) -> str:
    try:
        return str(connections.call(conf.endpoint, conf.address, "READ")["kind"])
    except AmqpError as error:
        if error.condition == "amqp:not-found" and not conf.replay_to:
            # Perhaps a broker without this management; if the queue is missing, browsing raises.
            return "queue"
        raise


def _read(spark: Any, conf: Deadletters, **options: str) -> Any:
    given = conf.options(address=conf.address, onUndecodable="row", **options)
    return spark.read.format("amqp").options(**given).load()


# --- Report --------------------------------------------------------------------------------------


def _annotation(*names: str) -> str:
    """Return SQL for the first of these annotations that is present; their names differ among brokers."""
    found = [f"try_variant_get(message_annotations, '$[\"{name}\"]', 'string')" for name in names]
    return f"coalesce({', '.join(found)})" if len(found) > 1 else found[0]


_LAST: Final = (
    "try_element_at(try_variant_get(message_annotations, '$[\"x-opt-dead-letter-history\"]', "
    "'array<variant>'), -1)"
)
_SHAPE: Final = """
case when body_kind in ('undecodable', 'none') then body_kind
     when body_variant is not null then schema_of_variant(body_variant)
     when try_validate_utf8(body) is null then 'binary'
     else coalesce(schema_of_variant(try_parse_json(try_validate_utf8(body))), 'text')
end
"""
#: Column → its SQL expression.
_DESCRIBED: Final = {
    "source": _annotation("x-opt-deadletter-source", "x-opt-ORIG-ADDRESS", "x-first-death-queue"),
    "reason": f"coalesce({_annotation('x-opt-dead-letter-reason', 'x-first-death-reason')}, "
    "try_variant_get(application_properties, '$.DeadLetterReason', 'string'))",
    "condition": _annotation("x-opt-dead-letter-condition"),
    "description": f"coalesce({_annotation('x-opt-dead-letter-description')}, "
    "try_variant_get(application_properties, '$.DeadLetterErrorDescription', 'string'))",
    "seen": f"coalesce(try_variant_get({_LAST}, '$.time', 'timestamp'), enqueued_time, "
    "properties.creation_time)",
    "deliveries": f"coalesce(try_variant_get({_LAST}, '$[\"delivery-count\"]', 'bigint'), "
    "header.delivery_count)",
    "attempts": f"try_variant_get({_LAST}, '$.attempts', 'bigint')",
    "message_id": "properties.message_id",
    "subject": "properties.subject",
    "shape": f"concat_ws(' ', body_kind, properties.content_type, {_SHAPE})",
}


def described(messages: Any) -> Any:
    """Return *messages* with their dead-letter facts as columns, which ``where`` may name."""
    found = messages.selectExpr("*", *(f"{made} as {name}" for name, made in _DESCRIBED.items()))
    return found.selectExpr("*", "substr(sha2(shape, 256), 1, 8) as fingerprint")


def _report(found: Any, conf: Deadletters) -> Report:
    key = ["source", "reason", "condition", "fingerprint"]
    grouped = (
        found.groupBy(*key)
        .agg(
            sql.count("*").alias("count"),
            sql.unix_micros(sql.min("seen")).alias("first"),
            sql.unix_micros(sql.max("seen")).alias("last"),
            sql.min("deliveries").alias("least"),
            sql.max("deliveries").alias("most"),
            sql.any_value("shape").alias("shape"),
            sql.max_by("description", "seen").alias("description"),
            sql.expr(
                "slice(array_distinct(filter(array(min_by(name, seen), max_by(name, seen), min(name), "
                "max(name)), each -> each is not null)), 1, 3)"
            ).alias("names"),
        )
        .orderBy(sql.desc("count"), *key)
    )
    rows = grouped.limit(conf.groups).collect()
    totals = found.agg(
        sql.count("*").alias("letters"),
        sql.countDistinct(sql.struct(*key)).alias("groups"),
        sql.unix_micros(sql.min("seen")).alias("first"),
        sql.unix_micros(sql.max("seen")).alias("last"),
    ).first()
    first, last = _moment(totals["first"]), _moment(totals["last"])
    groups = Table(
        "Groups",
        ["", "messages", "source", "reason", "body"],
        [
            [
                number,
                row["count"],
                row.source,
                ": ".join(each for each in (row.reason, row.condition, row.description) if each),
                row.shape[:_SHAPE_CHARS],
            ]
            for number, row in enumerate(rows, 1)
        ],
        "" if totals.groups <= len(rows) else f"{totals.groups - len(rows)} more groups",
    )
    details = Table(
        "When they were given up",
        ["", "first", "last", "deliveries", "shape", "for example"],
        [
            [
                number,
                _shown(row["first"]),
                _shown(row["last"]),
                row.least if row.least == row.most else f"{row.least} to {row.most}",
                row.fingerprint,
                ", ".join(row.names),
            ]
            for number, row in enumerate(rows, 1)
        ],
    )
    sections: list[Section] = [
        Text(
            f"{totals.letters} dead letters of {conf.address}, of {totals.groups} kind"
            f"{'s' if totals.groups != 1 else ''}"
            + (f", for which {conf.where}" if conf.where else "")
            + "."
        ),
        groups,
        details,
    ]
    if first is not None and last is not None:
        sections.append(_over_time(found, first, last))
    return Report(
        title=f"Dead letters of {conf.address}",
        sections=sections,
        facts={
            "letters": totals.letters,
            "groups": totals.groups,
            "first_seen": first,
            "last_seen": last,
        },
    )


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)


def _shown(micros: int | None) -> str:
    moment = _moment(micros)
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _over_time(found: Any, first: datetime, last: datetime) -> Plot:
    """Plot the number of dead letters over time, by reason."""
    whole = max((last - first).total_seconds(), 1.0)
    width = max(1, math.ceil(whole / _BARS))
    at = sql.floor(sql.unix_seconds("seen") / width).alias("at")
    reason = sql.coalesce("reason", sql.lit("unknown")).alias("reason")
    counted = found.where("seen is not null").groupBy(at, reason).count()
    rows = counted.orderBy(sql.desc("count")).limit(_POINTS).collect()
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.reason] += row["count"]
    shown = {name for name, _ in totals.most_common(_REASONS)}
    counts: dict[str, Counter[int]] = {}
    for row in rows:
        name = row.reason if row.reason in shown else "others"
        counts.setdefault(name, Counter())[row["at"]] += row["count"]
    bars = range(
        min(min(each) for each in counts.values()), max(max(each) for each in counts.values()) + 1
    )
    return Plot(
        f"Given up, each {width} s",
        "bar" if len(bars) <= 1 else "line",
        [_EPOCH + timedelta(seconds=bar * width) for bar in bars],
        {name: [float(each[bar]) for bar in bars] for name, each in sorted(counts.items())},
        "messages",
    )


# --- Replay --------------------------------------------------------------------------------------

_UNDECODABLE: Final = "body_kind = 'undecodable'"


def _destination(conf: Deadletters) -> Any:
    return sql.col("source") if conf.replay_to == ORIGINAL else sql.lit(conf.replay_to)


def _planned(letters: Any, conf: Deadletters) -> Report:
    """Report the effect that a replay of *letters* would have."""
    aimed = letters.select(
        sql.coalesce(_destination(conf), sql.lit("")).alias("to"),
        sql.expr(_UNDECODABLE).alias("bad"),
        "seen",
    )
    counted = aimed.groupBy("to", "bad").agg(
        sql.count("*").alias("count"),
        sql.unix_micros(sql.min("seen")).alias("first"),
        sql.unix_micros(sql.max("seen")).alias("last"),
    )
    rows: list[list[Any]] = []
    would = failed = 0
    for row in counted.orderBy(sql.desc("count"), "to").limit(DESTINATIONS_MAX).collect():
        why = "the message cannot be decoded" if row.bad else no_way(conf.address, row.to)
        why = why or _missing(conf, row.to)
        rows.append([row.to, row["count"], _shown(row["first"]), _shown(row["last"]), why])
        would += 0 if why else row["count"]
        failed += row["count"] if why else 0
    sections: list[Section] = [
        Table("Would be replayed", ["to", "messages", "first seen", "last seen", "but"], rows)
    ]
    aside = waiting(conf, conf.address, conf.replay_to)
    if aside:
        sections.append(
            Text(
                f"{aside} messages are set aside by a replay that was interrupted: the next one "
                "finishes with them first."
            )
        )
    return Report(
        title="",
        sections=sections,
        exit_code=3 if failed else 0,
        facts={"dry_run": True, "would_replay": would, "failed": failed, "set_aside": aside},
    )


def _missing(conf: Deadletters, to: str) -> str:
    """Return the reason if no node *to* exists; an empty text if it does, or the answer is unknown."""
    try:
        connections.call(conf.endpoint, to, "READ")
    except AmqpError as error:
        if error.condition == "amqp:not-found":
            return "there is no such node"
    return ""


def _replayed(spark: Any, conf: Deadletters) -> Report:
    """Replay the chosen dead letters, and report the result."""
    group = group_of(conf.replay_to)

    def choose() -> list[Letter]:
        rows = described(_read(spark, conf, mode="lease", group=group))
        chosen = condition_of(rows, conf.where) if conf.where else sql.lit(True)
        found = rows.select(
            sql.col("offset").alias("number"),
            sql.when(sql.expr(_UNDECODABLE), "")
            .otherwise(sql.coalesce(_destination(conf), sql.lit("")))
            .alias("to"),
            sql.coalesce(chosen, sql.lit(False)).alias("chosen"),
        ).collect()
        return [
            Letter(row.number, "" if no_way(conf.address, row.to) else row.to, row.chosen)
            for row in found
        ]

    pace = Pace(per_second(conf.rate) if conf.rate else None)
    done = Return(conf, conf.address, conf.replay_to, choose, pace)
    done.run()
    rows: list[list[Any]] = [[to, count, ""] for to, count in done.sent.most_common() if count]
    rows += [
        [to, count, done.refused.get(to) or "they cannot be replayed, and stay"]
        for to, count in done.failed.most_common(DESTINATIONS_MAX)
        if count
    ]
    note = f"x-opt-replay-id is {done.id}; {done.kept} messages stay in {conf.address}"
    if done.finished:
        note += f"; {done.finished} had been replayed by a run that was interrupted"
    failed = done.failed.total()
    return Report(
        title="",
        sections=[Table("Replayed", ["to", "messages", "not sent, since"], rows, note)],
        exit_code=3 if failed else 0,
        facts={
            "dry_run": False,
            "id": done.id,
            "replayed": done.sent.total(),
            "finished": done.finished,
            "failed": failed,
            "kept": done.kept,
            "to": {to: count for to, count in done.sent.items() if count},
        },
    )
