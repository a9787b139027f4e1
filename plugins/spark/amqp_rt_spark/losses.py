"""Losses of a broker: which errors count as one, and how long to retry.

A restarted broker, a short network failure, and a connection dropped because a task was busy elsewhere
end no query: the task reconnects and continues from its position.
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

#: Seconds before the second attempt, doubled for each further one up to the maximum. The first attempt is
#: immediate: most losses are connections that idled for too long, and their broker is available.
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
_RANDOM: Final = random.SystemRandom()

#: Conditions with which a broker ends links and requests when it stops, or when an operator detaches them.
#: The runtime's own client uses the same ones (decision 0025).
_PASSING: Final = frozenset({"amqp:connection:forced", "amqp:link:detach-forced"})
#: Conditions of a lost connection that a new connection would meet again.
_LASTING: Final = frozenset(
    {"amqp:unauthorized-access", "amqp:not-implemented", "amqp:not-allowed", "amqp:invalid-field"}
)


def is_loss(error: AmqpError) -> bool:
    """Return whether *error* means that the broker or the network is unavailable for the moment."""
    if isinstance(error, AuthenticationFailed):
        return False
    if isinstance(error, ConnectFailed | ConnectionLost | SessionEnded):
        return error.condition not in _LASTING
        # A broker that does not answer may be lost as well: a cut network gives no other sign.
    if isinstance(error, DeadlineExceeded):
        return error.condition == DeadlineExceeded.default_condition
    return error.condition in _PASSING


class Patience:
    """Time limit for retries after losses of one broker, counted from each loss.

    Args:
        retry_s: Seconds to retry; 0 raises every loss at once.
        now: A clock.
        sleep: Called with the seconds to wait.
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
            error: Error of the last attempt.
            progress: Position of the work. If it has changed since the last failure, this is another
                loss, and the time starts again.

        Raises:
            AmqpError: *error* is no loss, or the time is up.
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
            # Random, because many tasks lose the same broker at the same moment.
            self._sleep(pause * _RANDOM.uniform(0.5, 1.0) if pause < left else left)
        self._attempts += 1
