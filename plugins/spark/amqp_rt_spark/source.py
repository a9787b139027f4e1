"""Data source ``amqp``: Spark's base classes around our readers and writers.

Spark makes these objects more than once, in processes of its own, and pickles them on the way; their
constructors make no connection. Names of methods and parameters are Spark's.
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

#: Features of this pyspark: filters for readers (4.1); bounds of batches, and their start (4.2); and a time
#: zone for types of Arrow, which were always in UTC before.
FILTERS: Final = hasattr(datasource, "Filter")
ADMISSION: Final = find_spec("pyspark.sql.streaming.datasource") is not None
_ZONE: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


class AmqpPartition(InputPartition):
    """Input of one task."""


class AmqpCommitMessage(WriterCommitMessage):
    """Result of one writing task."""

    def __init__(self, written: Written | Spread) -> None:
        self.written = written


@sentence_first
class AmqpDataSource(DataSource):
    """AMQP nodes as tables and streams: ``spark.read.format("amqp")``.

    The options are in :mod:`.options`, the columns in :mod:`.schema`. Invalid options raise ``ValueError`` when
    a table or a stream is loaded, or a query starts, which Spark shows as its own ``PySparkException`` with our message
    first. A broker that cannot be reached for ``retryTimeout``, and records that are gone, end the task or the query in
    the same way.

    When a query is stopped or cancelled, or a task or the driver is killed, nothing has to be undone. The input of a
    task is read again: a log keeps its records, leased messages stay with their group, spooled ones are in files. Messages
    that it has staged are not visible, and the broker drops them. Only ``delivery=at-least-once`` sends some messages again.
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
        # Spark refuses a reader with pushFilters unless its own switch is on, too.
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
    """Reads the records of logs, and browses queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._batch = Batch(options)
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return _tasks(self._batch.partitions(), self._batch.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._batch, partition, self._schema)


@sentence_first
class LeasedReader(DataSourceReader):
    """Reads the messages that a group holds of queues."""

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
        """Plans batches from the start that Spark passes."""

else:
    # Spark neither requests bounds nor passes a start.
    Limited, _Plans = DataSourceStreamReader, StartRemembered


class _InBatches(_Plans):
    """Adapts the next class in the method resolution order to Spark: spans as partitions, rows in batches."""

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
    """Streams messages of queues, by way of files."""


def _task(epoch: int) -> Task:
    """Return the running task; properties of its job give the micro-batch."""
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
    """Writes the rows of a batch.

    With ``producer`` all rows become visible by one commit, after the last task; without it each message when it is
    sent, and a repeated task sends its rows again.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=False)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: staged messages are not visible, and the broker drops them."""


@sentence_first
class AmqpStreamWriter(DataSourceStreamWriter):
    """Writes the rows of micro-batches, each visible by one commit.

    A driver that is killed around the commit repeats the micro-batch, and the broker skips it if it has it.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._sink = _sink(options, schema, streaming=True)

    def write(self, iterator: Iterator[Row]) -> AmqpCommitMessage:
        return AmqpCommitMessage(self._sink.send(_fields(iterator), _task(0)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.publish(_written(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: the commit may have taken effect, and messages staged without one are dropped."""
