"""Clocks that a test moves."""

from __future__ import annotations

from typing import Final

import trio

from ..clock import Clock, SystemClock

__all__ = ["MovableClock", "VirtualClock"]

#: When virtual time begins: 2023-11-14T22:13:20Z, the same for every test.
BEGINNING_S: Final = 1_700_000_000.0


class MovableClock:
    """The clocks of the system, ahead by as much as a test says.

    A broker that is given one keeps its times to live, locks and schedules by it. Timers of
    connections follow the event loop, so that a peer which waits in real time is not given up.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        #: Seconds that it is ahead.
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.ahead_s

    def wall(self) -> float:
        return self._clock.wall() + self.ahead_s

    def advance(self, seconds: float) -> None:
        """Move both clocks on.

        Raises:
            ValueError: *seconds* is negative: time does not go back.
        """
        if not seconds >= 0:
            raise ValueError(f"a clock is moved on by 0 seconds or more, not by {seconds!r}")
        self.ahead_s += seconds


class VirtualClock:
    """The time of the event loop for both clocks: virtual if trio's clock is, wall clock included."""

    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return BEGINNING_S + trio.current_time()
