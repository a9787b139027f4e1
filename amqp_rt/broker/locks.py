"""How long a consumer may keep a delivery unsettled (Part 3 §3.4.4). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from .entries import Entry
from .subscriptions import Enlisted, Subscription


class Locks:
    """The unsettled deliveries of one queue, in the order in which their time is up.

    What has been settled stays in the list until it is noticed, which is often enough for the list
    to be no longer than a few times what is unsettled.

    Args:
        lock_s: Seconds from the delivery; changed, it holds for what is delivered from then on.
        monotonic: The clock.
    """

    def __init__(self, lock_s: float, monotonic: Callable[[], float]) -> None:
        self.lock_s = lock_s
        self._monotonic = monotonic
        self._held: deque[tuple[float, Subscription, Any]] = deque()
        self._compact_at = 64

    def add(self, subscription: Subscription, delivery: Any) -> float:
        """*delivery* has just been sent to *subscription*; until when it may be unsettled."""
        until = self._monotonic() + self.lock_s
        self._held.append((until, subscription, delivery))
        if len(self._held) >= self._compact_at:
            self._held = deque(held for held in self._held if _is_held(held[2]))
            self._compact_at = 2 * len(self._held) + 64
        return until

    def overdue(self, most: int) -> list[tuple[Subscription, Any]]:
        """Take out the deliveries that have been unsettled for too long, and whose they are: *most* of
        them at most.

        A transaction that has a delivery has a time limit of its own, and what has not left yet
        cannot be taken from anybody: the time of both begins anew.
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
        """When to look again, by the monotonic clock; ``inf`` if nothing is held."""
        while self._held and not _is_held(self._held[0][2]):
            self._held.popleft()
        return self._held[0][0] if self._held else inf


def _is_held(delivery: Any) -> bool:
    """Its context is its entry, or what a transaction made of that, until it has its outcome."""
    return not delivery.settled and isinstance(delivery.context, Entry | Enlisted)
