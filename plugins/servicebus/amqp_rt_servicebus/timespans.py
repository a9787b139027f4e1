"""Times as Service Bus writes them: ISO 8601 durations, where the longest one stands for no limit."""

from __future__ import annotations

from datetime import timedelta
from math import inf, isfinite
from typing import Final, TypeAlias

import msgspec

#: A time as declarations take it: seconds, or an ISO 8601 duration such as ``PT30S``.
Timespan: TypeAlias = timedelta | float | str

#: The longest time of .NET, which the service writes where there is no limit.
FOREVER: Final = "P10675199DT2H48M5.4775807S"
_FOREVER_S: Final = 10_675_199 * 86_400.0


def seconds_of(value: Timespan) -> float:
    """Return *value* in seconds; ``inf`` for the longest time of .NET and longer ones.

    Raises:
        ValueError: The text is no ISO 8601 duration of days and less, or the time is negative.
    """
    if isinstance(value, str):
        try:
            value = msgspec.convert(value.strip(), timedelta)
        except msgspec.ValidationError:
            raise ValueError(
                f"{value!r:.80} is not an ISO 8601 duration such as PT30S, PT5M or P14D"
            ) from None
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not seconds >= 0:
        raise ValueError(f"a time of {value!r:.80} is negative")
    return inf if seconds >= _FOREVER_S else seconds


def iso_of(seconds: float) -> str:
    """Return *seconds* as an ISO 8601 duration, such as ``PT1M30S`` or ``P14D``."""
    if not isfinite(seconds) or seconds >= _FOREVER_S:
        return FOREVER
    days, left = divmod(timedelta(seconds=seconds), timedelta(days=1))
    minutes, below = divmod(left.total_seconds(), 60)
    hours, minutes = divmod(int(minutes), 60)
    whole = f"{below:.6f}".rstrip("0").rstrip(".")
    parts = [(hours, "H"), (minutes, "M"), (whole if float(whole) else 0, "S")]
    time = "".join(f"{value}{unit}" for value, unit in parts if value)
    day = f"{days}D" if days else ""
    return f"P{day}T{time}" if time else f"P{day}" if day else "PT0S"
