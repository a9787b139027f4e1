"""Spark's base classes around our readers (:mod:`.batch`, :mod:`.log_streams`, :mod:`.leasing`, :mod:`.spooling`).

Names of methods and parameters are Spark's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from .batch import Batch
from .columnar import batches
from .leasing import LeaseBatch, LeaseStream
from .log_streams import LogStream
from .options import Options
from .sentences import sentence_first
from .spans import joined
from .spooling import SpoolStream
from .streams import StartRemembered, Stream
from .workers import exempt_modules

#: Features of this pyspark: bounds of batches, and their start (4.2); and a time zone for types of Arrow, which
#: were always in UTC before.
ADMISSION: Final = find_spec("pyspark.sql.streaming.datasource") is not None
_ZONE: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


class AmqpPartition(InputPartition):
    """Input of one task."""


def _tasks(spans: Iterable[Any], options: Options) -> list[InputPartition]:
    return [AmqpPartition(each) for each in joined(spans, options)]


def _batches(
    reader: Batch | LeaseBatch | Stream, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    exempt_modules()
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
