"""Stand-in for the bank: replace it by a client of yours."""

from __future__ import annotations

import threading
from collections import Counter


class CardDeclined(Exception):
    """Card that the bank does not accept: another attempt is no better."""


class Bank:
    """Bank that charges cards; those beginning with ``slow`` take three attempts, and ``bad`` ones are declined."""

    def __init__(self) -> None:
        self.charged: dict[str, int] = {}
        self._attempts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def charge(self, card: str, cents: int, *, reference: str) -> None:
        """Charge *cents*; a second time for the same *reference* changes nothing.

        Raises:
            CardDeclined: The card is not accepted.
            ConnectionError: The bank does not answer; try again.
        """
        with self._lock:
            if card.startswith("bad"):
                raise CardDeclined(f"{card!r} is not accepted")
            self._attempts[reference] += 1
            if card.startswith("slow") and self._attempts[reference] < 3:
                raise ConnectionError("the bank does not answer")
            self.charged[reference] = cents
