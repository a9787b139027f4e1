"""Faults that a test injects: errors in place of what the entities of a namespace would do."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from amqp_rt.outcomes import Error

#: Occasions on which a fault can occur, besides the operations at management nodes.
#:
#: ``attach``: a link is refused. ``send``: a message, a batch or scheduled messages are rejected. ``receive``: the link
#: of a receiver is detached instead of being sent a message, which stays. ``settle``: an outcome is answered
#: with the error, and the message stays locked. ``read``: a request for the properties of an event hub or its
#: partitions is answered with the error.
OCCASIONS: Final = ("attach", "send", "receive", "settle", "read")
#: Faults that wait for their occasion at the same time.
FAULTS_MAX: Final = 1_000


class Fault(Struct, kw_only=True):
    """An error, and the occasions on which it occurs."""

    error: Error
    #: One of :data:`OCCASIONS`, or an operation such as ``com.microsoft:peek-message``.
    on: str
    #: Path of the entity or sub-queue, in lower case; None for any.
    path: str | None = None
    #: How often it will occur.
    times: int = 1


class Faults:
    """Faults of one namespace that wait for their occasion."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Let *fault* occur, after those that were added before it.

        Raises:
            ValueError: It occurs less than once, or too many faults wait.
        """
        if fault.times < 1:
            raise ValueError(f"times is {fault.times}: a fault occurs at least once")
        if len(self._waiting) >= FAULTS_MAX:
            raise ValueError(f"{FAULTS_MAX} faults wait for their occasion already")
        self._waiting.append(fault)

    def take(self, on: str, path: str) -> Error | None:
        """Return the error that occurs now, None if there is none; *path* is that of an entity."""
        if not self._waiting:
            return None
        key = path.lower()
        for fault in self._waiting:
            if fault.on == on and fault.path in (None, key):
                fault.times -= 1
                if not fault.times:
                    self._waiting.remove(fault)
                return fault.error
        return None

    def clear(self) -> int:
        """Remove all faults; return how many waited."""
        waiting, self._waiting = self._waiting, []
        return len(waiting)
