"""What may come of a check, beside that it passes."""

from __future__ import annotations

__all__ = ["Departs", "NotOffered", "require"]


class Departs(Exception):
    """The host does something else than the standard says; the text is what was seen."""

    def __init__(self, seen: str) -> None:
        super().__init__(seen)
        self.seen = seen


class NotOffered(Exception):
    """What the check is about is optional, and this host does not have it; the text says why."""


def require(holds: object, seen: str) -> None:
    """Depart with *seen* unless something holds.

    Raises:
        Departs: It does not.
    """
    if not holds:
        raise Departs(seen)
