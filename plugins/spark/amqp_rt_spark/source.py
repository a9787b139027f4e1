"""The format ``amqp`` as Spark finds it: base classes of Spark around what reads and writes.

Spark makes these objects more than once, in processes of its own, and pickles them on the way; making
one connects nowhere. Names of methods and parameters are Spark's.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import Row, StructType

from .arrow import batches
from .leasing import LeaseBatch, LeaseStream
from .options import SINK, SOURCE, Options, read_options
from .reading import Batch, Bounds, LogStream, Stream
from .schema import ddl_of, with_schema
from .spooling import SpoolStream
from .writing import Sink, Task, Written


class AmqpPartition(InputPartition):
    """What one task reads."""


class AmqpCommitMessage(WriterCommitMessage):
    """What one task has written."""

    def __init__(self, written: Written) -> None:
        self.written = written


class AmqpDataSource(DataSource):
    """AMQP nodes as tables and streams: ``spark.read.format("amqp")``.

    The options are in :mod:`.options`, the columns in :mod:`.schema`.
    """

    @classmethod
    def name(cls) -> str:
        return "amqp"

    def schema(self) -> str:
        return ddl_of(read_options(self.options, SOURCE))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = with_schema(read_options(self.options, SOURCE), schema)
        if options.mode == "lease":
            return LeasedReader(options, schema)
        # Spark refuses a reader that takes filters unless its own switch is on, too.
        kind = FilteredReader if options.filter_pushdown else AmqpReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = with_schema(read_options(self.options, SOURCE), schema)
        if options.mode == "spool":
            return SpoolStreamReader(options, schema)
        kind = LeaseStreamReader if options.mode == "lease" else LogStreamReader
        return kind(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ValueError("a node is never overwritten: use mode('append')")
        return AmqpWriter(read_options(self.options, SINK), schema)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return AmqpStreamWriter(read_options(self.options, SINK), schema)


def _batches(rows: Iterator[tuple[Any, ...]], schema: StructType) -> Iterator[pa.RecordBatch]:
    return batches(rows, to_arrow_schema(schema, timezone="UTC"))


class AmqpReader(DataSourceReader):
    """Reads what there is in logs, and browses queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._batch = Batch(options)
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [AmqpPartition(span) for span in self._batch.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._batch.read(partition.value), self._schema)


class FilteredReader(AmqpReader):
    """The same, and what filters leave out is not read."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take what is honoured exactly; the rest is given back, and Spark looks at it."""
        logs = self._batch.only_logs()
        for each in filters:
            if not push(self._batch.bounds, each, logs=logs):
                yield each


class LeasedReader(DataSourceReader):
    """Reads what a group has of queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._batch = LeaseBatch(options)
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [AmqpPartition(span) for span in self._batch.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._batch.read(partition.value), self._schema)


_COMPARED: Final = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, EqualTo)


def push(bounds: Bounds, filter_: Filter, *, logs: bool) -> bool:
    """Narrow *bounds* by *filter_*; whether no row comes that it does not let pass.

    Rows of queues have no offset and no partition: without *logs* only addresses are looked at.
    """
    column = getattr(filter_, "attribute", None)
    if isinstance(filter_, IsNotNull):
        # Comes along with every comparison.
        return column == ("address",) or (logs and column in (("partition",), ("offset",)))
    if column == ("address",):
        wanted = _wanted(filter_, str)
        if wanted is None:
            return False
        bounds.addresses = wanted if bounds.addresses is None else bounds.addresses & wanted
        return True
    if not logs:
        return False
    if column == ("partition",):
        numbers = _wanted(filter_, int)
        if numbers is None:
            return False
        bounds.partitions = numbers if bounds.partitions is None else bounds.partitions & numbers
        return True
    if not isinstance(filter_, _COMPARED):
        return False
    value = filter_.value
    if column == ("offset",) and isinstance(value, int):
        first, end = _range(filter_, value, value + 1)
        bounds.first = _higher(bounds.first, first)
        bounds.end = _lower(bounds.end, end)
        return True
    if column == ("enqueued_time",) and isinstance(value, dt.datetime):
        # Records have milliseconds: the first one at or after the value, and the first one after it.
        moment = value.timestamp() * 1000
        first, end = _range(filter_, math.ceil(moment), math.floor(moment) + 1)
        bounds.since_ms = _higher(bounds.since_ms, first)
        bounds.until_ms = _lower(bounds.until_ms, end)
        return True
    return False


def _wanted(filter_: Filter, kind: type) -> set[Any] | None:
    """The values that an equality, or a list of them, lets pass."""
    if isinstance(filter_, EqualTo):
        values: tuple[Any, ...] = (filter_.value,)
    elif isinstance(filter_, In):
        values = tuple(filter_.value)
    else:
        return None
    return set(values) if all(type(value) is kind for value in values) else None


def _range(filter_: Filter, at: int, after: int) -> tuple[int | None, int | None]:
    """From where on, and before where: *at* is where the value is, *after* where what follows it is."""
    if isinstance(filter_, EqualTo):
        return at, after
    if isinstance(filter_, GreaterThan):
        return after, None
    if isinstance(filter_, GreaterThanOrEqual):
        return at, None
    return None, at if isinstance(filter_, LessThan) else after


def _higher(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else max(one, other)


def _lower(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


class _Limited(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What Spark wants to know of a stream beside what it reads."""

    options: Options

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """One of the bounds of the options; the others are looked at together with it."""
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()


class _InBatches(Stream):
    """Gives Spark what the class behind it plans and reads: spans as partitions, rows in batches."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options)
        self._schema = schema

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        return [AmqpPartition(each) for each in super().partitions(start, end)]  # type: ignore[misc]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return _batches(super().read(partition.value), self._schema)


class LogStreamReader(_InBatches, LogStream, _Limited):
    """Streams the records of logs."""


class LeaseStreamReader(_InBatches, LeaseStream, _Limited):
    """Streams messages that are leased from queues."""


class SpoolStreamReader(_InBatches, SpoolStream, _Limited):
    """Streams messages of queues, which are in files by then."""


def _task(epoch: int) -> Task:
    """The task that is running, which knows the micro-batch by properties of its job."""
    context = TaskContext.get()
    assert context is not None
    number = context.getLocalProperty("streaming.sql.batchId")
    return Task(
        context.partitionId(),
        context.taskAttemptId(),
        epoch if number is None else int(number),
        context.getLocalProperty("sql.streaming.queryId") or "",
        (context.getLocalProperty("spark.jobGroup.id") or "") if number is not None else "",
    )


def _sink(options: Options, schema: StructType, *, streaming: bool) -> Sink:
    body_type = schema["body"].dataType if "body" in schema.names else None
    return Sink(options, schema.names, streaming=streaming, body_type=body_type)


def _fields(rows: Iterator[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield dict(zip(row.__fields__, row, strict=True))


def _written(messages: list[WriterCommitMessage | None]) -> list[Written | None]:
    return [each.written if isinstance(each, AmqpCommitMessage) else None for each in messages]


class AmqpWriter(DataSourceWriter):
    """Writes what a batch has made."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=False)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is to be done: what is staged is not visible, and the broker forgets it."""


class AmqpStreamWriter(DataSourceStreamWriter):
    """Writes what the micro-batches of a stream have made."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=True)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is to be done, and nothing may be: the commit may have taken effect."""
