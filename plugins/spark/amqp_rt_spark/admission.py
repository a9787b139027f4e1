"""Bounds of micro-batches, for which Spark 4.2 and later asks a source."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from .options import Options


class Limited(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader that reports the bounds of its options to Spark."""

    options: Options

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return one of the bounds of the options; the others are applied together with it."""
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()
