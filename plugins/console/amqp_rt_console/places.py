"""Places for answers that go on, of which each user has a share."""

from __future__ import annotations

from collections import Counter

from amqp_rt import Limits

from .problems import Problem
from .sessions import Owner


class StreamPlaces:
    """Places for streams of events: ``http_streams_max`` in all, ``http_streams_user_max`` for each owner."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.http_streams_max
        # One user never keeps out all others.
        self._share = min(limits.http_streams_user_max, max(1, self._most // 2))
        self._taken: Counter[Owner] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, owner: Owner) -> None:
        """Take a place for *owner*, until :meth:`give_back`.

        Raises:
            Problem: There is none.
        """
        if len(self) >= self._most:
            raise _none_left(503, f"there are {self._most} streams already (http_streams_max)")
        if self._taken[owner] >= self._share:
            raise _none_left(
                429, f"the user has {self._share} streams already (http_streams_user_max)"
            )
        self._taken[owner] += 1

    def give_back(self, owner: Owner) -> None:
        """Give back a place of *owner*."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]


def _none_left(status: int, why: str) -> Problem:
    return Problem(
        status,
        f"{why}: the page shows new numbers when it is loaded again",
        "amqp:resource-limit-exceeded",
        {"retry-after": "60"},
    )
