"""``ingest``: append logs and queues to a table of a lake, each message once.

The checkpoint records the messages of a batch before anything is read, and the table records the batches
that it has (:mod:`.lake`). So repeating a batch, for any reason, changes nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta

from .. import connections
from ..endpoints import Endpoint
from .checkpoints import read_checkpoint
from .conf import StreamConf
from .lag import settle_all, standings_of
from .lake import Format, append_delta, format_of, write_parquet
from .report import Plot, Report, Section, Table
from .running import Run, Watch, follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Day of a message, in UTC regardless of the session's zone. Messages without a broker's time get the
#: time of the batch, which the checkpoint records, too.
_DATE: Final = (
    "date_add(date'1970-01-01', cast(floor(unix_micros("
    "coalesce(enqueued_time, current_timestamp())) / 86400000000) as int)) as date"
)
_BAD: Final = "body_kind = 'undecodable'"
#: Names of Spark's observation, and of the count in it.
_OBSERVED: Final = "amqp_rt"
_QUARANTINED: Final = "quarantined"


class Ingest(StreamConf, frozen=True, kw_only=True):
    """Settings of the job ``ingest``."""

    address: Annotated[
        tuple[str, ...],
        Meta(description="The log or queue to read. Repeatable: several logs, or several queues."),
    ]
    table: Annotated[str, Meta(description="The folder of the table, made if there is none.")]
    table_format: Annotated[
        Literal["auto", "delta", "parquet"],
        Meta(description="auto: the format of the table, or Delta if deltalake is installed."),
    ] = "auto"
    partition_by: Annotated[
        tuple[Literal["date", "address", "none"], ...],
        Meta(description="Partition column of the table. Repeatable.", min_length=1),
    ] = ("date", "address")
    quarantine: Annotated[
        str,
        Meta(description="Table for messages that cannot be decoded. [default: TABLE_quarantine]"),
    ] = ""
    group: Annotated[
        str, Meta(description="The name under which the broker keeps how far this has got.")
    ] = "ingest"
    body: Annotated[
        Literal["auto", "json", "text", "binary"],
        Meta(description="Type of bodies; with json and text, other bodies go into quarantine."),
    ] = "auto"
    raw: Annotated[
        bool,
        Meta(description="Keep each message as it came, too, for replay and audit."),
    ] = True
    selector: Annotated[
        str, Meta(description="Only messages of the log that the broker finds this true of.")
    ] = ""
    starting_offsets: Annotated[
        str, Meta(description="Where a log is begun: earliest, latest, committed, or JSON.")
    ] = "earliest"
    fail_on_data_loss: Annotated[
        bool, Meta(description="End if retention took records before they were read.")
    ] = True
    max_messages: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Messages in one micro-batch at most.")
    ] = 100_000
    max_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Bytes in one micro-batch of a log, roughly: it passes through the driver."
        ),
    ] = 64 << 20


def ingest(spark: SparkSession, conf: Ingest, watch: Watch | None = None) -> Report:
    """Append new messages to a table until stopped; with ``once``, until all available ones are in it.

    Raises:
        ValueError: Something is wrong with *conf*.
        AmqpError: The broker cannot be queried.
        StreamingQueryException: A batch has failed; the next run repeats it.
    """
    mode = mode_of(conf.endpoint, conf.address)
    form = format_of(conf.table, conf.table_format)
    # Readers of tables skip folders whose names begin with an underscore.
    checkpoint = conf.checkpoint or f"{conf.table.rstrip('/')}/_checkpoint"
    query = (
        _rows(spark, conf, mode)
        .writeStream.queryName("ingest")
        .option("checkpointLocation", checkpoint)
        .foreachBatch(_TableWriter(conf, form, checkpoint))
        .trigger(**conf.trigger)
        .start()
    )
    run = follow(query, watch)
    if run.stopped and conf.group:
        # The broker learns of a batch when Spark requests the next one, which a stop has prevented.
        done = read_checkpoint(checkpoint, spark)
        settle_all(standings_of(done, conf.endpoint, conf.group), conf.endpoint, conf.group)
    return _report(conf, form, run)


def mode_of(endpoint: Endpoint, addresses: tuple[str, ...]) -> str:
    """Return the mode in which nodes are read: logs by their offsets, queues by leases.

    Raises:
        ValueError: The nodes are of different kinds, or of one that cannot be read.
        AmqpError: A node does not exist.
    """
    try:
        kinds = {
            address: str(connections.call(endpoint, address, "READ")["kind"])
            for address in addresses
        }
    finally:
        connections.forget(endpoint)
    modes = {"log": "log", "queue": "lease"}
    found = {modes.get(kind) for kind in kinds.values()}
    if len(found) == 1 and (mode := found.pop()) is not None:
        return mode
    said = ", ".join(f"{address!r} is a {kind}" for address, kind in kinds.items())
    raise ValueError(f"give logs, or queues, and not both: {said}")


def _rows(spark: SparkSession, conf: Ingest, mode: str) -> DataFrame:
    """Return the stream of the table's rows, decodable or not."""
    from pyspark.sql.functions import count_if, expr

    log = mode == "log"
    source = spark.readStream.format("amqp").options(
        **conf.options(
            address=conf.address,
            mode=mode,
            group=conf.group,
            body=conf.body,
            raw=conf.raw,
            onUndecodable="row",
            failOnDataLoss=conf.fail_on_data_loss,
            maxMessagesPerTrigger=conf.max_messages,
            maxBytesPerTrigger=conf.max_bytes if log else None,
            selector=conf.selector,
            startingOffsets=conf.starting_offsets if log else None,
        )
    )
    found = source.load()
    columns = ["address", "partition", "offset", "enqueued_time", _DATE, "body", "body_kind"]
    if "body_variant" in found.columns:
        # Other readers of a lake do not support VARIANT yet.
        columns.append("to_json(body_variant) as body_json")
    columns += [
        "header",
        "properties",
        "to_json(application_properties) as application_properties",
        "to_json(message_annotations) as message_annotations",
    ]
    if conf.raw:
        columns.append("message")
    return found.selectExpr(*columns).observe(_OBSERVED, count_if(expr(_BAD)).alias(_QUARANTINED))


class _TableWriter:
    """Writes a batch to the tables. Picklable, as some sessions send it to another process."""

    def __init__(self, conf: Ingest, form: Format, checkpoint: str) -> None:
        self._conf = conf
        self._form = form
        self._checkpoint = checkpoint
        self._quarantine = conf.quarantine or f"{conf.table.rstrip('/')}_quarantine"
        self._columns = [each for each in conf.partition_by if each != "none"]
        self._query = ""

    def __call__(self, rows: DataFrame, batch: int) -> None:
        # Read the query's id from its own file, which works in every kind of session.
        if not self._query:
            text = rows.sparkSession.read.text(f"{self._checkpoint}/metadata").collect()[0][0]
            self._query = str(json.loads(text)["id"])
        if self._form == "delta":
            self._write_delta(rows, batch)
        else:
            self._write_parquet(rows, batch)

    def _write_delta(self, rows: DataFrame, batch: int) -> None:
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        found = rows.toArrow()
        bad = pc.equal(found["body_kind"], "undecodable")
        columns = self._columns
        for table, part in (
            (self._conf.table, found.filter(pc.invert(bad))),
            (self._quarantine, found.filter(bad)),
        ):
            if part.num_rows:
                append_delta(table, part, columns, query=self._query, batch=batch)

    def _write_parquet(self, rows: DataFrame, batch: int) -> None:
        columns = self._columns
        kept = rows.persist()
        try:
            good = kept.where(f"not ({_BAD})")
            write_parquet(self._conf.table, good, columns, query=self._query, batch=batch)
            bad = kept.where(_BAD)
            if not bad.isEmpty():
                write_parquet(self._quarantine, bad, columns, query=self._query, batch=batch)
        finally:
            kept.unpersist()


def _report(conf: Ingest, form: Format, run: Run) -> Report:
    quarantined = run.observed.get(_QUARANTINED, 0)
    rows: list[list[Any]] = [
        [address, partition, first, end, end - first]
        for (address, partition), (first, end) in sorted(
            run.moved.items(), key=lambda item: (item[0][0], item[0][1] or 0)
        )
    ]
    batches = "1 batch" if run.batches == 1 else f"{run.batches} batches"
    note = f"{run.rows} messages in {batches}, {quarantined} of them in quarantine."
    if run.behind is not None:
        note += f" {run.behind} were left when the last batch was planned."
    sections: list[Section] = [
        Table("read", ["address", "partition", "from", "to", "messages"], rows, note=note)
    ]
    if run.history:
        numbers = [batch.number for batch in run.history]
        rates: list[float | None] = [round(batch.rate, 1) for batch in run.history]
        sections.append(Plot("rate", "line", numbers, {"rows": rates}, "rows/s by batch"))
        if any(batch.behind is not None for batch in run.history):
            behind: list[float | None] = [batch.behind for batch in run.history]
            sections.append(Plot("lag", "line", numbers, {"behind": behind}, "messages by batch"))
    return Report(
        title=f"ingest into {conf.table} ({form})",
        sections=sections,
        facts={
            "table": conf.table,
            "format": form,
            "rows": run.rows,
            "quarantined": quarantined,
            "batches": run.batches,
            "last_batch": run.history[-1].number if run.history else None,
            "seconds": round(run.seconds, 3),
            "behind": run.behind,
        },
    )
