"""Second requests for calls that take long."""

from __future__ import annotations

from math import inf
from typing import Final

from .budgets import Budget
from .states import ADDRESSES_MAX, ByAddress, check_least

#: Latencies from which a percentile is computed: those of the last replies.
LATENCIES_MAX: Final = 256
#: New latencies after which the percentile is computed again.
_LATENCIES_STEP: Final = 16


class Hedge:
    """Send a slow request a second time, and take the reply that arrives first.

    The second request leaves when the first has taken longer than 95 % of the recent ones to its
    address, and at least *least_s*: where replies take microseconds, any pause of a process would
    otherwise be an occasion to ask again, and use up the budget. When one is answered, the other is
    abandoned, and its handler cancelled. At most *budget* of the calls of the last 10 seconds are sent
    twice. Requires ``peer.calling(..., idempotent=True)``, since both requests may be processed.

    Args:
        budget: Second requests for each call.
        least_s: Shortest time in seconds before a second request.
        replies: Replies that an address must have given before its requests are sent twice.
        addresses: Addresses with a state; beyond these the least recently used state is dropped.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        budget: float = 0.05,
        least_s: float = 0.01,
        replies: int = 20,
        addresses: int = ADDRESSES_MAX,
    ) -> None:
        check_least("Hedge", "budget", budget, 0, 1)
        check_least("Hedge", "least_s", least_s, 0)
        check_least("Hedge", "replies", replies, 1, LATENCIES_MAX)
        self._states = ByAddress("Hedge", lambda: HedgeState(budget, least_s, replies), addresses)

    def state_of(self, address: str) -> HedgeState:
        """Return the latencies and the budget of calls to *address*."""
        return self._states.get(address)


class HedgeState:
    """Latencies of the last calls to one address, and the budget of second requests."""

    __slots__ = ("_latencies", "_least", "_least_s", "_next", "_p95_s", "budget")

    def __init__(self, share: float, least_s: float, least: int) -> None:
        self.budget = Budget(share, 0)
        self._least_s = least_s
        self._least = least
        self._latencies: list[float] = []
        self._next = 0
        self._p95_s = inf

    @property
    def delay_s(self) -> float:
        """Seconds after which a second request may leave; infinite without enough latencies."""
        return max(self._p95_s, self._least_s)

    def observe(self, latency_s: float) -> None:
        """Add a latency, in place of the oldest if there are enough."""
        if len(self._latencies) < LATENCIES_MAX:
            self._latencies.append(latency_s)
        else:
            self._latencies[self._next % LATENCIES_MAX] = latency_s
        self._next += 1
        count = len(self._latencies)
        if count == self._least or (count > self._least and self._next % _LATENCIES_STEP == 0):
            self._p95_s = sorted(self._latencies)[(count * 95 - 1) // 100]
