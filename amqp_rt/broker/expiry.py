"""Times to live, and reasons to give up a message. Pure; the time is an argument.

``ttl`` counts from a message's arrival (Part 3 §3.2.1), on the wall clock, so that a store can keep
the time of expiry.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Final

from ..outcomes import Error
from ..values import Symbol, Timestamp, UInt

#: Expiry time of a message without a time to live.
NEVER: Final = inf

#: Reasons for giving up a message.
REJECTED: Final = "rejected"
EXPIRED: Final = "expired"
MAX_DELIVERIES: Final = "max-deliveries"
MAX_ATTEMPTS: Final = "max-attempts"
OVERFLOW: Final = "overflow"
#: Its queue is deleted. Unlike the others it has to be declared.
DELETED: Final = "deleted"

#: All of them.
REASONS: Final = (REJECTED, EXPIRED, MAX_DELIVERIES, MAX_ATTEMPTS, OVERFLOW, DELETED)

#: Reasons that arise without a consumer: unchecked, a message could move in a cycle for ever.
AUTOMATIC: Final = frozenset((EXPIRED, OVERFLOW))

#: Message annotations of a dead-lettered message: the address that gave it up, one of the reasons
#: above, and the error with which the consumer rejected it.
SOURCE: Final = Symbol("x-opt-deadletter-source")
REASON: Final = Symbol("x-opt-dead-letter-reason")
CONDITION: Final = Symbol("x-opt-dead-letter-condition")
DESCRIPTION: Final = Symbol("x-opt-dead-letter-description")
INFO: Final = Symbol("x-opt-dead-letter-info")
#: List of maps, oldest first: where, why and when it was given up, with the counters of that node.
HISTORY: Final = Symbol("x-opt-dead-letter-history")


def expiry(ttl_ms: int | None, ttl_s: float | None, now: float) -> float:
    """Return when a message that arrives *now* expires, by its *ttl_ms* and its node's *ttl_s*."""
    own = NEVER if ttl_ms is None else now + ttl_ms / 1000
    return own if ttl_s is None else min(own, now + ttl_s)


def remaining_ms(expires_at: float, now: float) -> int:
    """Return the reduced ``ttl`` for the next hop, at least 1 (§3.2.1)."""
    return min(max(1, int((expires_at - now) * 1000)), 0xFFFF_FFFF)


def dead_letter_annotations(
    known: Mapping[Any, object],
    source: str,
    reason: str,
    error: Error | None,
    *,
    now: float,
    delivery_count: int,
    attempts: int,
    history_max: int,
) -> dict[Symbol, object]:
    """Return the annotations of a message given up *now*; *known* are those that it has already."""
    history = known.get(HISTORY)
    past = list(history) if isinstance(history, list) else []
    past.append(
        {
            "source": source,
            "reason": reason,
            "time": Timestamp(int(now * 1000)),
            "delivery-count": UInt(delivery_count),
            "attempts": UInt(attempts),
        }
    )
    annotations: dict[Symbol, object] = {
        SOURCE: source,
        REASON: reason,
        HISTORY: past[-history_max:],
        # Remove those of an earlier time, since this time there may be no error.
        CONDITION: None,
        DESCRIPTION: None,
        INFO: None,
    }
    if error is not None:
        annotations[CONDITION] = Symbol(error.condition)
        if error.description is not None:
            annotations[DESCRIPTION] = error.description
        if error.info:
            annotations[INFO] = error.info
    return {key: value for key, value in annotations.items() if value is not None or key in known}
