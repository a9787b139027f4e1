"""Distribution of latencies in bounded memory, for benchmarks."""

from __future__ import annotations

from math import ceil, exp2, log2
from typing import Final

#: Buckets for each doubling: a percentile is at most 1.1 % too large.
_BUCKETS: Final = 64
#: Shortest latency that is told from shorter ones, in seconds.
_LEAST_S: Final = 1e-7


class Latencies:
    """Counts of latencies in buckets whose bounds grow by a constant factor."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.least_s = 0.0
        self.most_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count a latency."""
        self.least_s = min(self.least_s, seconds) if self.count else seconds
        self.most_s = max(self.most_s, seconds)
        self.count += 1
        self.total_s += seconds
        bucket = int(log2(max(1.0, seconds / _LEAST_S)) * _BUCKETS)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def percentile(self, percent: float) -> float:
        """Return the latency in seconds that *percent* of those counted do not exceed; 0.0 if there are none."""
        left = max(1, ceil(self.count * percent / 100))
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                bound = exp2((bucket + 1) / _BUCKETS) * _LEAST_S
                return max(self.least_s, min(self.most_s, bound))
        return 0.0
