"""Bound of the calls that run at the same time."""

from __future__ import annotations

from collections import Counter

from ..errors import Overloaded
from .states import check_least


class Bulkhead:
    """Refuse calls above a number that run at the same time, for each address.

    A slow node then holds at most *calls* of the application's tasks. Calls do not queue: one above
    the bound raises :class:`~amqp_rt.errors.Overloaded` at once.

    Args:
        calls: Most calls to one address that run at the same time.

    Raises:
        ValueError: *calls* is less than 1.
    """

    def __init__(self, calls: int = 64) -> None:
        check_least("Bulkhead", "calls", calls, 1)
        self.calls = calls
        # Only addresses with running calls: their number needs no other bound.
        self._running: Counter[str] = Counter()

    def enter(self, address: str) -> None:
        """Count a call that starts; :meth:`leave` must follow.

        Raises:
            Overloaded: As many calls as allowed are running.
        """
        running = self._running.get(address, 0)
        if running >= self.calls:
            raise Overloaded(
                f"{address!r} was not called: {running} calls to it are running, and "
                f"Bulkhead({self.calls}) allows no more; call again later, or raise the number",
            )
        self._running[address] = running + 1

    def leave(self, address: str) -> None:
        """Count a call that has ended."""
        running = self._running[address] - 1
        if running:
            self._running[address] = running
        else:
            del self._running[address]

    def running(self, address: str) -> int:
        """Return the number of calls to *address* that are running."""
        return self._running.get(address, 0)
