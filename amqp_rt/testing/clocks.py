"""Clocks that tests control."""

from __future__ import annotations

from typing import Final

import trio

from ..clock import Clock, SystemClock

__all__ = ["MovableClock", "VirtualClock"]

#: Start of virtual time: 2023-11-14T22:13:20Z, the same for every test.
BEGINNING_S: Final = 1_700_000_000.0


class MovableClock:
    """The system's clocks, ahead by an offset that a test sets.

    A broker with this clock computes expiry, locks and schedules from it. Timers of connections
    follow the event loop, so that peers waiting in real time do not run into timeouts.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        #: The offset in seconds.
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.ahead_s

    def wall(self) -> float:
        return self._clock.wall() + self.ahead_s

    def advance(self, seconds: float) -> None:
        """Advance both clocks.

        Raises:
            ValueError: *seconds* is negative: time does not go back.
        """
        if not seconds >= 0:
            raise ValueError(f"a clock is moved on by 0 seconds or more, not by {seconds!r}")
        self.ahead_s += seconds


class VirtualClock:
    """The event loop's time for both clocks: both are virtual if trio's clock is."""

    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return BEGINNING_S + trio.current_time()
