"""Rows of messages in jobs: conditions, and bounds of time."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any

from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import functions as sql

from ..options import moment
from .conf import Syntax
from .lake import read_table

#: Text of a time with its zone, or of milliseconds since 1970.
Moment = Annotated[str, Syntax(moment)]


def condition_of(rows: Any, where: str) -> Any:
    """Return the SQL condition *where* as a column of *rows*.

    Raises:
        ValueError: The text is no condition on these rows.
    """
    # Spark logs such an error in full; the message raised here is enough.
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        condition = sql.expr(where)
        # Resolve columns and types before anything is read.
        rows.where(condition).schema  # noqa: B018
    except PySparkException as error:
        said = str(error).strip().splitlines()[0].partition(" SQLSTATE:")[0]
        raise ValueError(f"where is no condition: {said:.400}") from None
    finally:
        log.setLevel(level)
    return condition


def messages_of(
    spark: Any, table: str, needed: Iterable[str], *, since: str, until: str, where: str
) -> Any:
    """Return the rows of a table of ingest that were enqueued from *since* on and before *until*, and for which
    *where* is true.

    Raises:
        ValueError: The table is not one of ingest, or *where* is no condition.
    """
    rows = read_table(spark, table)
    for name in needed:
        if name not in rows.columns:
            hint = ": ingest writes it unless no-raw is set" if name == "message" else ""
            raise ValueError(f"the table {table} has no column {name}{hint}")
    rows = within(rows, since, until)
    return rows.where(condition_of(rows, where)) if where else rows


def within(rows: Any, since: str, until: str) -> Any:
    """Return the *rows* that were enqueued from *since* on and before *until*; an empty text is no bound."""
    at = sql.col("enqueued_time")
    if since:
        rows = rows.where(at >= sql.timestamp_millis(sql.lit(moment(since))))
    if until:
        rows = rows.where(at < sql.timestamp_millis(sql.lit(moment(until))))
    return rows
