"""Conditions that Spark (4.1 and later) leaves to a reader."""

from __future__ import annotations

import datetime as dt
import math
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

from .reading import Bounds
from .source import AmqpReader


class FilteredReader(AmqpReader):
    """The same, and what filters leave out is not read."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take what is honoured exactly; the rest is given back, and Spark looks at it."""
        logs = self._batch.only_logs()
        for each in filters:
            if not push(self._batch.bounds, each, logs=logs):
                yield each


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
