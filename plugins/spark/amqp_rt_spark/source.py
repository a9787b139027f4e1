"""Data source ``amqp``, which makes readers (:mod:`.readers`) and writers (:mod:`.writers`).

Spark makes these objects more than once, in processes of its own, and pickles them on the way; their
constructors make no connection. Most of these processes request the name or the columns only. Readers, writers, Arrow and
the engine of AMQP are therefore imported when a reader or a writer is made. Names of methods and parameters are Spark's.
"""

from __future__ import annotations

from typing import Final

import pyspark
from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from .options import SINK, SOURCE, read_options
from .schema import ddl_of, with_schema
from .sentences import sentence_first

#: Whether this pyspark has filters for readers (4.1).
FILTERS: Final = hasattr(datasource, "Filter")


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
        from .readers import AmqpReader, LeasedReader

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
        from .readers import LeaseStreamReader, LogStreamReader, SpoolStreamReader

        options = with_schema(read_options(self.options, SOURCE), schema)
        if options.mode == "spool":
            return SpoolStreamReader(options, schema)
        kind = LeaseStreamReader if options.mode == "lease" else LogStreamReader
        return kind(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from .writers import AmqpWriter

        if overwrite:
            raise ValueError("a node is never overwritten: use mode('append')")
        return AmqpWriter(read_options(self.options, SINK), schema)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from .writers import AmqpStreamWriter

        return AmqpStreamWriter(read_options(self.options, SINK), schema)
