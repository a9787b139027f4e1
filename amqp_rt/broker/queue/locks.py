"""Time limit for deliveries that a consumer leaves unsettled (Part 3 §3.4.4). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from ..entries import Entry
from .subscriptions import Enlisted, Subscription


class Locks:
    """Unsettled deliveries of one queue, in the order in which their time ends.

    Settled deliveries stay in the list until it is compacted, which happens often enough to keep it
    within a few times the number of unsettled ones.

    Args:
        lock_s: Seconds from delivery; a change applies to later deliveries.
        monotonic: The clock.
    """

    def __init__(self, lock_s: float, monotonic: Callable[[], float]) -> None:
        self.lock_s = lock_s
        self._monotonic = monotonic
        self._held: deque[tuple[float, Subscription, Any]] = deque()
        self._compact_at = 64

    def add(self, subscription: Subscription, delivery: Any) -> float:
        """Add *delivery*, just sent to *subscription*; return until when it may stay unsettled."""
        until = self._monotonic() + self.lock_s
        self._held.append((until, subscription, delivery))
        if len(self._held) >= self._compact_at:
            self._held = deque(held for held in self._held if _is_held(held[2]))
            self._compact_at = 2 * len(self._held) + 64
        return until

    def overdue(self, most: int) -> list[tuple[Subscription, Any]]:
        """Remove and return at most *most* overdue deliveries, with their subscriptions.

        The time of two kinds begins anew instead: of deliveries in a transaction, which has its own
        time limit, and of those that have not left yet, which the peer could not release.
        """
        now = self._monotonic()
        held = self._held
        found: list[tuple[Subscription, Any]] = []
        again: list[tuple[Subscription, Any]] = []
        while held and held[0][0] <= now and len(found) + len(again) < most:
            _, subscription, delivery = held.popleft()
            if not _is_held(delivery):
                continue
            if isinstance(delivery.context, Enlisted) or delivery.delivery_id < 0:
                again.append((subscription, delivery))
            else:
                found.append((subscription, delivery))
        for subscription, delivery in again:
            self.add(subscription, delivery)
        return found

    def next(self) -> float:
        """Return when to look again, by the monotonic clock; ``inf`` if nothing is held."""
        while self._held and not _is_held(self._held[0][2]):
            self._held.popleft()
        return self._held[0][0] if self._held else inf


def _is_held(delivery: Any) -> bool:
    """Return whether *delivery* is unsettled and has no outcome yet.

    Until then its context is its entry, or the ``Enlisted`` that a transaction made of that.
    """
    return not delivery.settled and isinstance(delivery.context, Entry | Enlisted)
