"""The clock of a broker that is given none."""

from __future__ import annotations

import trio

from ..clock import SystemClock


class RunClock(SystemClock):
    """The clocks of the system; virtual ones from :meth:`begin` on where the event loop's is.

    Whoever runs trio on a clock of their own, such as ``trio.testing.MockClock``, means the time of
    the broker too: a message that lives for an hour is to expire when an hour of that clock has
    passed. Both clocks go on from where those of the system are then, so that what was put before
    keeps its times.
    """

    def __init__(self) -> None:
        #: The event loop's, if it is virtual, and what is added to its time.
        self._virtual: trio.abc.Clock | None = None
        self._monotonic_s = 0.0
        self._wall_s = 0.0

    def begin(self) -> None:
        """The broker runs in the event loop of this task from now on. Saying so twice is as once."""
        clock = trio.lowlevel.current_clock()
        if clock is self._virtual:
            return
        # Trio does not export the class of its real clock. If it were called otherwise one day, both
        # clocks would still go on, and only not see that somebody sets the wall clock.
        if type(clock).__name__ == "SystemClock":
            self._virtual = None
            return
        now = clock.current_time()
        self._monotonic_s = super().monotonic() - now
        self._wall_s = super().wall() - now
        self._virtual = clock

    def monotonic(self) -> float:
        clock = self._virtual
        return super().monotonic() if clock is None else clock.current_time() + self._monotonic_s

    def wall(self) -> float:
        clock = self._virtual
        return super().wall() if clock is None else clock.current_time() + self._wall_s
