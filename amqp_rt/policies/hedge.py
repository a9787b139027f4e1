"""Second requests for calls that take long."""

from __future__ import annotations

from math import inf
from typing import Final

from .budgets import Budget
from .states import ByAddress, check_least

#: Latencies from which a percentile is computed, and the least number for one.
LATENCIES_MAX: Final = 256
LATENCIES_MIN: Final = 20
#: New latencies after which the percentile is computed again.
_LATENCIES_STEP: Final = 16


class Hedge:
    """Send a slow request a second time, and take the reply that arrives first.

    The second request leaves when the first has taken longer than 95 % of the recent ones to its
    address, which needs 20 replies at first. The other request is then abandoned, and its handler
    cancelled. At most *budget* of the calls of the last 10 seconds are sent twice. Requires
    ``peer.calling(..., idempotent=True)``, since both requests may be processed.

    Args:
        budget: Second requests for each call.
    """

    def __init__(self, *, budget: float = 0.05) -> None:
        check_least("Hedge", "budget", budget, 0, 1)
        self._states = ByAddress(lambda: HedgeState(budget))

    def state_of(self, address: str) -> HedgeState:
        """Return the latencies and the budget of calls to *address*."""
        return self._states.get(address)


class HedgeState:
    """Latencies of the last calls to one address, and the budget of second requests."""

    __slots__ = ("_latencies", "_next", "_p95_s", "budget")

    def __init__(self, share: float) -> None:
        self.budget = Budget(share, 0)
        self._latencies: list[float] = []
        self._next = 0
        self._p95_s = inf

    @property
    def delay_s(self) -> float:
        """Seconds after which a second request may leave; infinite without enough latencies."""
        return self._p95_s

    def observe(self, latency_s: float) -> None:
        """Add a latency, in place of the oldest if there are enough."""
        if len(self._latencies) < LATENCIES_MAX:
            self._latencies.append(latency_s)
        else:
            self._latencies[self._next % LATENCIES_MAX] = latency_s
        self._next += 1
        count = len(self._latencies)
        if count == LATENCIES_MIN or (count > LATENCIES_MIN and self._next % _LATENCIES_STEP == 0):
            self._p95_s = sorted(self._latencies)[(count * 95 - 1) // 100]
