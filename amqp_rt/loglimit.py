"""A bound on log lines that peers, or failing handlers, can repeat. Pure: the time is an argument."""

from __future__ import annotations

import logging
from typing import Any

from .limits import DEFAULT_LIMITS, Limits
from .message import message_id_of
from .outcomes import Error


class LogLimiter:
    """Admits a few lines of each key in each period, and counts those left out.

    Args:
        limits: ``log_lines_max`` lines of a key in ``log_period_s`` seconds, for the
            ``log_keys_max`` keys that were used last.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        #: For each key the end of its period, the lines admitted in it, and those left out.
        self._keys: dict[object, tuple[float, int, int]] = {}

    def admit(self, key: object, now: float) -> str | None:
        """Return None if a line of *key* is to be left out, and otherwise what to append to it.

        That is empty, or says how many lines of *key* have been left out since the last one.
        """
        limits = self.limits
        ends, lines, left_out = self._keys.pop(key, (now + limits.log_period_s, 0, 0))
        # A wall clock may be put back, which must not silence the log until it has caught up.
        if not ends - limits.log_period_s <= now < ends:
            ends = now + limits.log_period_s
            lines = 0
        if lines >= limits.log_lines_max:
            self._keys[key] = ends, lines, left_out + 1
            return None
        # The oldest keys are forgotten first: a key that is used moves to the end.
        self._keys[key] = ends, lines + 1, 0
        if len(self._keys) > limits.log_keys_max:
            del self._keys[next(iter(self._keys))]
        return f" ({left_out} more like this were not logged)" if left_out else ""


def error_text(error: Error) -> str:
    """Return *error*, which a peer may have chosen, as part of one line."""
    description = (error.description or "")[:500]
    return f"{error.condition}: {description!r}" if description else str(error.condition)


def log_loss(
    log: logging.Logger,
    limiter: LogLimiter,
    now: float,
    *,
    event: str,
    address: str | None,
    payload: bytes,
    message_format: int,
    why: str,
    error: Error | None = None,
    key: object = None,
) -> None:
    """Warn that a message for *address* is lost, if *limiter* admits the line.

    *event* says what was done, with the preposition before the address. Lines are counted by event,
    address and *key*, or the reason *why* without one, whose text peers must not choose then. They may
    have chosen that of *error*.
    """
    left_out = limiter.admit((event, address, key or why), now)
    if left_out is not None:
        log.warning(
            "%s %.200r, message-id %.200r: %s%s%s",
            event,
            address,
            message_id_of(payload, message_format, limiter.limits),
            why,
            "" if error is None else f": {error_text(error)}",
            left_out,
        )


def log_refusal(
    log: logging.Logger, limiter: LogLimiter, link: Any, error: Error, now: float
) -> None:
    """Log that *link*, which a peer asked for, has been refused with *error*."""
    receives = hasattr(link, "send")
    terminus = link.source if receives else link.target
    address = getattr(terminus, "address", None)
    container = link.peer.container_id
    left_out = limiter.admit(("link refused", container, str(error.condition)), now)
    if left_out is not None:
        log.info(
            "link refused: %.100r of %.100r, to %s %.200r: %s%s",
            link.name,
            container,
            "receive from" if receives else "send to",
            address,
            error_text(error),
            left_out,
        )
