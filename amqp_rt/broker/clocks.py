"""Default clock of a broker, which follows a virtual clock of the event loop."""

from __future__ import annotations

import trio

from ..clock import SystemClock


class RunClock(SystemClock):
    """Clock of the system; from :meth:`begin` on that of the event loop, if that is virtual.

    Code that runs trio on its own clock, such as ``trio.testing.MockClock``, expects the broker to
    follow it: a message with a ttl of an hour expires when an hour of that clock has passed. Both
    times continue from the system's, so that messages put earlier keep their times.
    """

    def __init__(self) -> None:
        #: The event loop's clock, if it is virtual, and the offsets added to its time.
        self._virtual: trio.abc.Clock | None = None
        self._monotonic_s = 0.0
        self._wall_s = 0.0

    def begin(self) -> None:
        """Follow the clock of the current event loop from now on. A second call has no effect."""
        clock = trio.lowlevel.current_clock()
        if clock is self._virtual:
            return
        # Trio does not export the class of its real clock. If its name changed, both times would
        # still advance, and only miss changes of the system's wall clock.
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
