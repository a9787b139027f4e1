"""Failed logins cost time, and more of it each time (LIM16)."""

from __future__ import annotations

from collections.abc import Collection

from ..limits import Limits


class Backoff:
    """Who has failed of late: addresses and users, each on its own account.

    Only failures are delayed: who knows the password is not slowed by those who try.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: Who → failures, and when the last one was; the latest last.
        self._failures: dict[str, tuple[int, float]] = {}

    def failed(self, who: Collection[str], now: float) -> float:
        """Note a failure of all of *who*; the seconds after which it may be told."""
        limits = self._limits
        worst = 0
        for each in who:
            count, last = self._failures.pop(each, (0, now))
            if now - last >= limits.failed_login_memory_s:
                count = 0
            self._failures[each] = (count + 1, now)
            worst = max(worst, count)
        while len(self._failures) > limits.failed_logins_kept:
            del self._failures[next(iter(self._failures))]
        delay = limits.failed_login_delay_s * 2.0 ** min(worst, 32)
        return max(limits.failed_login_delay_s, min(delay, limits.failed_login_delay_max_s))

    def blocks(self, who: str, now: float) -> bool:
        """Whether *who* has failed so often of late that nothing more is heard of it."""
        count, last = self._failures.get(who, (0, now))
        limits = self._limits
        return count >= limits.failed_logins_max and now - last < limits.failed_login_memory_s
