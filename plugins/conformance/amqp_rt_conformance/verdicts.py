"""Results of a check other than success."""

from __future__ import annotations

__all__ = ["Departs", "NotOffered", "require"]


class Departs(Exception):
    """The host departs from the standard; the text is the observation."""

    def __init__(self, seen: str) -> None:
        super().__init__(seen)
        self.seen = seen


class NotOffered(Exception):
    """The host does not offer the optional feature of the check; the text has the reason."""


def require(holds: object, seen: str) -> None:
    """Raise unless a condition holds.

    Raises:
        Departs: *holds* is false; the text is *seen*.
    """
    if not holds:
        raise Departs(seen)
