"""Spark's base classes around our writers (:mod:`.writing`, :mod:`.spreading`).

Names of methods and parameters are Spark's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import Row, StructType

from .options import Options
from .sentences import sentence_first
from .spreading import Spread, SpreadSink
from .workers import exempt_modules
from .writing import Sink, Task, Written


class AmqpCommitMessage(WriterCommitMessage):
    """Result of one writing task."""

    def __init__(self, written: Written | Spread) -> None:
        self.written = written


def _task(epoch: int) -> Task:
    """Return the running task; properties of its job give the micro-batch."""
    exempt_modules()
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
