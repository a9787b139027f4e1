"""The format ``amqp`` as Spark finds it: base classes of Spark around what reads and writes.

Spark makes these objects more than once, in processes of its own, and pickles them on the way; making
one connects nowhere. Names of methods and parameters are Spark's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyspark
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from .columnar import batches
from .leasing import LeaseBatch, LeaseStream
from .options import SINK, SOURCE, Options, read_options
from .reading import Batch, LogStream, StartRemembered, Stream, joined
from .schema import ddl_of, with_schema
from .sentences import sentence_first
from .spooling import SpoolStream
from .spreading import Spread, SpreadSink
from .writing import Sink, Task, Written

#: What this pyspark has: conditions that are given to readers (4.1); bounds of batches, and their start (4.2);
#: and a time zone for types of Arrow, which were always in UTC before.
FILTERS: Final = hasattr(datasource, "Filter")
ADMISSION: Final = find_spec("pyspark.sql.streaming.datasource") is not None
_ZONE: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


class AmqpPartition(InputPartition):
    """What one task reads."""


class AmqpCommitMessage(WriterCommitMessage):
    """What one task has written."""

    def __init__(self, written: Written | Spread) -> None:
        self.written = written


@sentence_first
class AmqpDataSource(DataSource):
    """AMQP nodes as tables and streams: ``spark.read.format("amqp")``.

    The options are in :mod:`.options`, the columns in :mod:`.schema`. Options that are wrong raise ``ValueError`` when
    a table or a stream is loaded, or a query starts, which Spark shows as its own ``PySparkException`` with our sentence
    first. A broker that cannot be reached for ``retryTimeout``, and records that are gone, end the task or the query in
    the same way.

    When a query is stopped or cancelled, or a task or the driver is killed, nothing has to be undone. What a task has read
    is read again: a log keeps its records, leased messages stay with their group, spooled ones are in files. What it
    has staged is not visible, and the broker drops it. Only ``delivery=at-least-once`` sends some messages again.
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
        if not options.filter_pushdown:
            return AmqpReader(options, schema)
        if not FILTERS:
            raise ValueError(
                f"filterPushdown=true takes pyspark 4.1 or later, and this is {pyspark.__version__}: leave it out"
            )
        from .filters import FilteredReader

        return FilteredReader(options, schema)

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


def _tasks(spans: Iterable[Any], options: Options) -> list[InputPartition]:
    return [AmqpPartition(each) for each in joined(spans, options)]


def _batches(
    reader: Batch | LeaseBatch | Stream, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    found = chain.from_iterable(map(reader.records, partition.value))
    return batches(found, reader.options, to_arrow_schema(schema, **_ZONE))


@sentence_first
class AmqpReader(DataSourceReader):
    """Reads what there is in logs, and browses queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._batch = Batch(options)
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return _tasks(self._batch.partitions(), self._batch.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._batch, partition, self._schema)


@sentence_first
class LeasedReader(DataSourceReader):
    """Reads what a group has of queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._batch = LeaseBatch(options)
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return _tasks(self._batch.partitions(), self._batch.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._batch, partition, self._schema)


if TYPE_CHECKING or ADMISSION:
    from .admission import Limited

    class _Plans(Stream):
        """Plans batches from where Spark says that they start."""

else:
    # No bounds are asked for, and no start is said.
    Limited, _Plans = DataSourceStreamReader, StartRemembered


class _InBatches(_Plans):
    """Gives Spark what the class behind it plans and reads: spans as partitions, rows in batches."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options)
        self._schema = schema

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        return _tasks(super().partitions(start, end), self.options)  # type: ignore[misc]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return _batches(self, partition, self._schema)


@sentence_first
class LogStreamReader(_InBatches, LogStream, Limited):
    """Streams the records of logs."""


@sentence_first
class LeaseStreamReader(_InBatches, LeaseStream, Limited):
    """Streams messages that are leased from queues."""


@sentence_first
class SpoolStreamReader(_InBatches, SpoolStream, Limited):
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


def _sink(options: Options, schema: StructType, *, streaming: bool) -> Any:
    body_type = schema["body"].dataType if "body" in schema.names else None
    kind = Sink if options.addresses else SpreadSink
    return kind(options, schema.names, streaming=streaming, body_type=body_type)


def _fields(rows: Iterator[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield dict(zip(row.__fields__, row, strict=True))


def _written(messages: list[WriterCommitMessage | None]) -> list[Any]:
    return [each.written if isinstance(each, AmqpCommitMessage) else None for each in messages]


@sentence_first
class AmqpWriter(DataSourceWriter):
    """Writes what a batch has made.

    With ``producer`` all rows become visible by one commit, after the last task; without it each message when it is
    sent, and a task that is done again sends its rows again.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=False)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what is staged to the broker: it is not visible, and is dropped."""


@sentence_first
class AmqpStreamWriter(DataSourceStreamWriter):
    """Writes what the micro-batches of a stream have made, each visible by one commit.

    A driver that is killed around the commit does the micro-batch again, and the broker skips it if it has it.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=True)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave all as it is: the commit may have taken effect, and what is staged without one is dropped."""
