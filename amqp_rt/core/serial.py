"""Serial number arithmetic for ids that wrap at 2**32 (RFC 1982, Part 2 §2.8.10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MASK: Final = 0xFFFFFFFF
_HALF: Final = 0x80000000


def add(serial: int, count: int) -> int:
    """Advance *serial* by *count*, which may be negative."""
    return (serial + count) & MASK


def difference(later: int, earlier: int) -> int:
    """Return the distance from *earlier* to *later*; negative if *later* comes first."""
    distance = (later - earlier) & MASK
    return distance - 0x100000000 if distance >= _HALF else distance


def within(serial: int, first: int, last: int) -> bool:
    """Return whether *serial* lies between *first* and *last*, both included.

    The range is empty if *last* comes before *first*.
    """
    return ((serial - first) & MASK) <= ((last - first) & MASK) < _HALF


def in_range(known: Mapping[int, object], first: int, span: int) -> list[int]:
    """Return the *span* ids from *first*, or those of them in *known* where it is the smaller.

    So the cost is bounded by both; with a small span the ids returned may not be known.
    """
    if span <= len(known):
        return [(first + offset) & MASK for offset in range(span)]
    return [each for each in known if ((each - first) & MASK) < span]
