"""Two clocks, passed in (decision 30).

Timeouts, locks and heartbeats read the monotonic clock; ``ttl`` and
``absolute-expiry-time`` follow the wall clock. Pure code never reads either: the time
is an argument.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where an application, or a simulation, takes the time from."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""


class SystemClock:
    """The clocks of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
