"""Counts for operators, of a bounded number of kinds: what happened how often, and how long it took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView
from typing import Final

#: Kind under which the rest is counted once there are as many as may be.
OTHER: Final = "other"
#: Kinds that are counted apart, such as conditions of errors. Peers choose some of them.
KINDS_MAX: Final = 30


class BoundedCounts:
    """Counts by kind, of which at most *most* are told apart; the others are counted together."""

    def __init__(self, most: int = KINDS_MAX) -> None:
        self._most = most
        self._counts: dict[str, int] = {}

    def add(self, kind: str, count: int = 1) -> None:
        """Count *kind* once more, or *count* times."""
        counts = self._counts
        if kind not in counts and len(counts) >= self._most:
            kind = OTHER
        counts[kind] = counts.get(kind, 0) + count

    def items(self) -> ItemsView[str, int]:
        """Return each kind with its count."""
        return self._counts.items()

    def total(self) -> int:
        """Return the count of all kinds together."""
        return sum(self._counts.values())


class Distribution:
    """Histogram of values: how many are at most each of *bounds*, how many there are, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        #: Number of values up to each bound, and of those above the last one.
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count *value*."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Distribution:
        """Return a distribution with the present counts."""
        copied = Distribution(self.bounds)
        copied.counts = list(self.counts)
        copied.total = self.total
        return copied


class Tallies:
    """Counts of a container since it was created."""

    def __init__(self) -> None:
        #: Connections that peers have opened, and those of them that have ended, by protocol.
        self.opened = BoundedCounts()
        self.closed = BoundedCounts()
        #: Links that were refused, by condition.
        self.refused = BoundedCounts()
        #: Logins that failed, by mechanism.
        self.logins_failed = BoundedCounts()
        #: What is stuck, by cause, and since when the oldest unsettled delivery of each session has been that, as the
        #: latest round of :mod:`amqp_rt.telemetry.stuck` found.
        self.stuck: dict[str, int] = {}
        self.unsettled_since: dict[object, float] = {}
