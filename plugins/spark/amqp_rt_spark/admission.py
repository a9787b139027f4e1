"""Bounds of micro-batches, which Spark (4.2 and later) asks a source for."""

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
    """What Spark wants to know of a stream beside what it reads."""

    options: Options

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """One of the bounds of the options; the others are looked at together with it."""
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()
