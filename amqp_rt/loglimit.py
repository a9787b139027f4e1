"""Rate limits for log lines that peers or failing handlers can repeat; the time is an argument.

The modules of containers and brokers that write such lines call a :class:`LogLimiter` with a key, which
names the subject of the line; :func:`log_loss` and :func:`log_refusal` write the lines that several modules
have in common.
"""

from __future__ import annotations

import logging
from math import inf
from typing import Any, Final

from .addresses import host_in, network_of
from .errors import printable
from .limits import DEFAULT_LIMITS, Limits
from .message import message_id_of
from .outcomes import Error

#: Characters of a condition in a line; those of the standard have less than half of it.
_CONDITION_MAX: Final = 100


#: State of a key without lines: its period has ended.
_NEW: Final = (-inf, 0, 0)


class LogLimiter:
    """Limiter that admits a few lines per key and period, and counts the suppressed ones.

    When a key is dropped, its count of suppressed lines is lost, and its next line is admitted.

    Args:
        limits: ``log_lines_max`` lines per key in ``log_period_s`` seconds, for the
            ``log_keys_max`` most recently used keys.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        #: Key → end of its period, lines admitted in it, lines suppressed since the last one.
        self._keys: dict[object, tuple[float, int, int]] = {}

    def admit(self, key: object, now: float) -> str | None:
        """Return the text to append to a line of *key*, or None if the line is to be suppressed.

        The text is empty, or gives the number of lines of *key* suppressed since the last one that was
        admitted.

        Args:
            key: The subject of the line.
            now: Seconds of any clock, of the same one in all calls.
        """
        limits, keys = self.limits, self._keys
        period = limits.log_period_s
        ends, lines, left_out = keys.pop(key, _NEW)
        # Some callers pass the wall clock, which may be set back. That must not suppress lines until it
        # has caught up.
        if not ends - period <= now < ends:
            ends = now + period
            lines = 0
        if lines >= limits.log_lines_max:
            keys[key] = ends, lines, left_out + 1
            return None
        # Used keys move to the end, so the key that is dropped is the least recently used one.
        keys[key] = ends, lines + 1, 0
        if len(keys) > limits.log_keys_max:
            del keys[next(iter(keys))]
        return f" ({left_out} more like this were not logged)" if left_out else ""


def error_text(error: Error) -> str:
    """Return *error*, whose text a peer may have chosen, as part of one line."""
    condition = printable(str(error.condition), _CONDITION_MAX)
    description = (error.description or "")[:500]
    return f"{condition}: {description!r}" if description else condition


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
    """Log a warning that a message for *address* is lost, if *limiter* admits the line.

    Lines are counted by *event*, *address*, and *key* or, without one, *why*.

    Args:
        log: Destination of the line.
        limiter: Limiter of the lines.
        now: Current time, for *limiter*.
        event: The kind of loss, with the preposition before the address: ``"message rejected: to"``.
        address: Address of the message.
        payload: The encoded message, for its message-id.
        message_format: Format of *payload*.
        why: The reason. If a peer can choose its text, give a *key*: otherwise each new text would have
            lines of its own.
        error: Error to append, whose text a peer may have chosen.
        key: The subject to count the lines by, instead of *why*.
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
    """Log that *link*, requested by a peer, has been refused with *error*, if *limiter* admits the line.

    Lines are counted by the network of the peer's connection and the condition of *error*: a peer chooses
    its container-id, and with it would choose how many lines it may write.
    """
    # Our side of a link on which the peer receives is a sending link.
    receives = hasattr(link, "send")
    terminus = link.source if receives else link.target
    address = getattr(terminus, "address", None)
    container = link.peer.container_id
    network = network_of(host_in(link.peer.address))
    left_out = limiter.admit(("link refused", network, str(error.condition)), now)
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
