"""The clock interface, with separate monotonic and wall time.

Timeouts, locks and heartbeats use the monotonic clock; ``ttl`` and ``absolute-expiry-time``
use the wall clock. Pure code never reads either: the time is an argument.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the time for an application or a simulation."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment; never goes back."""

    def wall(self) -> float:
        """Return the seconds since 1970-01-01 UTC; may jump."""


class SystemClock:
    """The clocks of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
