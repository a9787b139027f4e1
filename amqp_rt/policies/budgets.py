"""Counts of the events of the last seconds, and budgets of additional attempts."""

from __future__ import annotations

from typing import Final

#: Seconds of the past that budgets and circuits look at.
SPAN_S: Final = 10.0
#: Parts of the span, each of which is forgotten as a whole.
_BUCKETS: Final = 10


class Window:
    """Count of the events of the last ``SPAN_S`` seconds.

    The past is forgotten in steps of a tenth of the span, so memory and work do not depend on the
    number of events.
    """

    __slots__ = ("_counts", "_newest", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._newest = 0
        self._total = 0

    def add(self, now: float) -> None:
        """Count an event at *now*, in seconds of a clock that does not go back."""
        total = self.total(now)
        self._counts[self._newest % _BUCKETS] += 1
        self._total = total + 1

    def remove(self, at: float, now: float) -> None:
        """Uncount an event that was counted at *at*, unless it has left the span."""
        self.total(now)
        bucket = int(at // (SPAN_S / _BUCKETS))
        if self._newest - bucket < _BUCKETS:
            self._counts[bucket % _BUCKETS] -= 1
            self._total -= 1

    def total(self, now: float) -> int:
        """Return the number of events that are still in the span at *now*."""
        bucket = int(now // (SPAN_S / _BUCKETS))
        if bucket > self._newest:
            if bucket - self._newest >= _BUCKETS:
                self.clear()
            else:
                for passed in range(self._newest + 1, bucket + 1):
                    self._total -= self._counts[passed % _BUCKETS]
                    self._counts[passed % _BUCKETS] = 0
            self._newest = bucket
        return self._total

    def clear(self) -> None:
        """Forget all events."""
        self._counts = [0] * _BUCKETS
        self._total = 0


class Budget:
    """Bound of additional attempts: a share of the calls of the last 10 seconds, and a reserve.

    Args:
        share: Additional attempts for each call.
        reserve: Additional attempts in 10 seconds that are allowed without any call.
    """

    __slots__ = ("_calls", "_extra", "reserve", "share")

    def __init__(self, share: float, reserve: float) -> None:
        self.share = share
        self.reserve = reserve
        self._calls = Window()
        self._extra = Window()

    def count_call(self, now: float) -> None:
        """Count a call, which adds its share to the budget."""
        self._calls.add(now)

    def has_room(self, now: float) -> bool:
        """Return whether one more attempt is within the budget."""
        allowed = self.share * self._calls.total(now) + self.reserve
        # A product such as 0.2 * 15 may be slightly below its true value.
        return self._extra.total(now) + 1 <= allowed + 1e-9

    def spend(self, now: float) -> bool:
        """Take one more attempt out of the budget; return False, and take none, without room."""
        if not self.has_room(now):
            return False
        self._extra.add(now)
        return True

    def give_back(self, at: float, now: float) -> None:
        """Return what :meth:`spend` took at *at*, for an attempt that has not left."""
        self._extra.remove(at, now)

    def spent(self, now: float) -> int:
        """Return the number of additional attempts in the last 10 seconds."""
        return self._extra.total(now)
