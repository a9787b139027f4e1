"""Growing delays after failed logins."""

from __future__ import annotations

from collections.abc import Collection

from ..limits import Limits


class Backoff:
    """Recent failures of addresses and of users, counted separately.

    Only failures are delayed, so attacks do not slow the login of a user with the right password.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: Address or user → failures and the time of the last one; the most recent last.
        self._failures: dict[str, tuple[int, float]] = {}

    def failed(self, who: Collection[str], now: float) -> float:
        """Count a failure of each of *who*; return the seconds by which to delay the answer."""
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

    def __bool__(self) -> bool:
        """Whether any login has failed recently."""
        return bool(self._failures)

    def blocks(self, who: str, now: float) -> bool:
        """Return whether *who* has failed so often recently that its connections are to be refused."""
        count, last = self._failures.get(who, (0, now))
        limits = self._limits
        return count >= limits.failed_logins_max and now - last < limits.failed_login_memory_s
