"""Losses of a broker: which errors are one, and how long to try again.

A broker that is started again, a network that is away for a moment, and a connection that was dropped
because a task was busy elsewhere end no query: the task connects again and goes on where it was.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final

from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    SessionEnded,
)

_log = logging.getLogger("amqp_rt_spark")

#: Seconds before the second attempt, which double with each one, and at most. The first attempt comes at
#: once: most losses are connections that were idle for too long, and their broker is there.
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
_RANDOM: Final = random.SystemRandom()

#: Conditions with which a broker ends links and requests because it stops, or because an operator has
#: detached them: those of the runtime's own client (decision 0025).
_PASSING: Final = frozenset({"amqp:connection:forced", "amqp:link:detach-forced"})
#: Conditions of a lost connection that another one would meet again.
_LASTING: Final = frozenset(
    {"amqp:unauthorized-access", "amqp:not-implemented", "amqp:not-allowed", "amqp:invalid-field"}
)


def is_loss(error: AmqpError) -> bool:
    """Return whether *error* says that the broker, or the way there, is gone for the moment."""
    if isinstance(error, AuthenticationFailed):
        return False
    if isinstance(error, ConnectFailed | ConnectionLost | SessionEnded):
        return error.condition not in _LASTING
    # A broker that does not answer may be lost as well: nothing else is said of a network that is cut.
    if isinstance(error, DeadlineExceeded):
        return error.condition == DeadlineExceeded.default_condition
    return error.condition in _PASSING


class Patience:
    """Time to bear losses of one broker, counted from each loss.

    Args:
        retry_s: Seconds; 0 bears no loss at all.
        now: A clock.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        retry_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._retry_s = retry_s
        self._now = now
        self._sleep = sleep
        self._since: float | None = None
        self._progress: object = None
        self._attempts = 0

    def bear(self, error: AmqpError, progress: object = None) -> None:
        """Wait until the next attempt is due.

        Args:
            error: Why the last attempt has failed.
            progress: How far the work has got. If that has changed since the last failure, this is
                another loss, and its time begins now.

        Raises:
            AmqpError: *error* is no loss, or the time has passed.
        """
        if not is_loss(error) or self._retry_s <= 0:
            raise error
        now = self._now()
        if self._since is None or progress != self._progress:
            self._since, self._progress, self._attempts = now, progress, 0
            _log.warning("broker lost, trying again for %g s: %s", self._retry_s, error)
        left = self._since + self._retry_s - now
        if left <= 0:
            raise type(error)(
                f"{error.description}; tried again for {self._retry_s:g} s (retryTimeout)",
                condition=error.condition,
                info=error.info,
            ) from error
        if self._attempts:
            pause = min(_PAUSE_S * 2 ** min(self._attempts - 1, 16), _PAUSE_MAX_S, left)
            # Many tasks lose the same broker at the same moment.
            self._sleep(pause * _RANDOM.uniform(0.5, 1.0) if pause < left else left)
        self._attempts += 1
