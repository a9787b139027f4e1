"""Times of day at which something is due, in the notation of cron. Pure: the time is an argument.

Daylight saving time follows Debian's cron, by the library cronsim: a time of day that is skipped is due when daylight
saving time begins, and one that occurs twice is due the first time; a wildcard in the hours is due in both.
"""

from __future__ import annotations

from datetime import datetime
from math import inf
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


class Cron:
    """Timetable in five fields: minute, hour, day of the month, month, day of the week.

    Args:
        text: The fields.
        tz: Name of the time zone, such as ``"Europe/Berlin"``.

    Raises:
        ValueError: The text or the time zone is wrong, or the library cronsim is not installed.
    """

    def __init__(self, text: str, tz: str = "UTC") -> None:
        try:
            from cronsim import CronSim, CronSimError  # an optional dependency
        except ImportError:
            raise ValueError("cron needs a library: pip install 'amqp-rt[cron]'") from None
        self.text = text
        try:
            self._zone = ZoneInfo(tz)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"tz: there is no time zone {tz!r:.50}") from None
        self._times = CronSim
        try:
            CronSim(text, self._at(0.0))
        except CronSimError as error:
            raise ValueError(
                f"cron: {text!r:.50} is no timetable such as '30 2 * * *': {error}"
            ) from None
        # The library takes a sixth for seconds.
        if len(text.split()) != 5:
            raise ValueError(
                f"cron: {text!r:.50} is no timetable such as '30 2 * * *': it has five fields"
            )

    def _at(self, time: float) -> datetime:
        return datetime.fromtimestamp(time, self._zone)

    def after(self, time: float) -> float:
        """Return the first time after *time*, in seconds since 1970-01-01 UTC; infinity if there is none."""
        for found in self._times(self.text, self._at(time)):
            if (due := found.timestamp()) > time:
                return due
        return inf

    def latest(self, time: float) -> float:
        """Return the last time up to *time*, in seconds since 1970-01-01 UTC; minus infinity if there is none."""
        backwards = self._times(self.text, self._at(time + 60), reverse=True)
        found = next((due for each in backwards if (due := each.timestamp()) <= time), -inf)
        # The library leaves out times of a repeated hour when it goes backwards.
        while found > -inf and (later := self.after(found)) <= time:
            found = later
        return found

    def __repr__(self) -> str:
        return f"Cron({self.text!r}, {self._zone.key!r})"
