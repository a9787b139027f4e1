"""Filters that Spark 4.1 and later pushes down to a reader."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from .batch import Bounds
from .readers import AmqpReader

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MS: Final = dt.timedelta(milliseconds=1)


class FilteredReader(AmqpReader):
    """Batch reader that skips the rows which pushed-down filters exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Apply the filters that can be applied exactly; yield the others, which Spark evaluates."""
        logs = self._batch.only_logs()
        for each in filters:
            if not push(self._batch.bounds, each, logs=logs):
                yield each


_COMPARED: Final = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, EqualTo)


def push(bounds: Bounds, filter_: Filter, *, logs: bool) -> bool:
    """Narrow *bounds* by *filter_*; return whether that excludes every row that fails the filter.

    Rows of queues have no offset and no partition: without *logs*, only filters on the address are applied.
    """
    column = getattr(filter_, "attribute", None)
    if isinstance(filter_, IsNotNull):
        # Spark adds this filter to every comparison.
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
        # Records have milliseconds: round to the first one at or after the value, and the first one after it.
        # In whole numbers: a product of floats may be next to the millisecond.
        since = value.astimezone(dt.UTC) - _EPOCH
        first, end = _range(filter_, -(-since // _MS), since // _MS + 1)
        bounds.since_ms = _higher(bounds.since_ms, first)
        bounds.until_ms = _lower(bounds.until_ms, end)
        return True
    return False


def _wanted(filter_: Filter, kind: type) -> set[Any] | None:
    """Return the values that an equality or an ``IN`` accepts; None for other filters and types."""
    if isinstance(filter_, EqualTo):
        values: tuple[Any, ...] = (filter_.value,)
    elif isinstance(filter_, In):
        values = tuple(filter_.value)
    else:
        return None
    return set(values) if all(type(value) is kind for value in values) else None


def _range(filter_: Filter, at: int, after: int) -> tuple[int | None, int | None]:
    """Return the first position and the end of a comparison's range.

    *at* is the position of the value, *after* the position following the value.
    """
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
