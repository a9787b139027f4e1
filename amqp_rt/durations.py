"""Times as people write them in options and configuration files: ``500ms``, ``30s``, ``5m``, ``2h``, ``1d``."""

from __future__ import annotations

import re
from typing import Final

from .limits import SECONDS_MAX

#: Unit → seconds.
UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?")


def parse_duration(text: str) -> float:
    """Parse *text* as a time in seconds; a number without a unit is seconds.

    Raises:
        ValueError: The text is no such time, or the time is longer than any setting may be.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r:.80} is not a time such as 30s, 500ms, 5m or 2h")
    seconds = float(found[1]) * UNITS[found[2] or "s"]
    if seconds > SECONDS_MAX:
        raise ValueError(f"{text!r:.80} is longer than {SECONDS_MAX:.0f} seconds")
    return seconds
