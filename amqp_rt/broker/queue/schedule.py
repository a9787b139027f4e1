"""Delayed and scheduled messages of a queue, and the time of the next one. Pure.

A delay is measured by the monotonic clock, so that changes of the wall clock do not affect it; a
scheduled time follows the wall clock. The store keeps the wall-clock time in both cases: after a
restart a delayed message waits at most for its whole delay again, even if the wall clock was set
back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ...errors import DecodeError

if TYPE_CHECKING:
    from ..entries import Entry

#: Message annotations that request a later delivery: a delay in milliseconds from the arrival, and
#: a wall-clock time, in the spelling of Artemis and of Service Bus.
DELAY: Final = "x-opt-delivery-delay"
TIME: Final = "x-opt-delivery-time"
ENQUEUE_TIME: Final = "x-opt-scheduled-enqueue-time"
_REQUESTS: Final = (DELAY, TIME, ENQUEUE_TIME)
_ANY_REQUEST: Final = frozenset(_REQUESTS)

#: Seconds between checks of the wall clock, which may be set.
LOOK_S: Final = 1.0


class Due(Struct, frozen=True, gc=False):
    """Earliest time of delivery of a message."""

    #: Wall-clock time.
    at: float
    #: The requested delay in seconds; None if a wall-clock time was requested.
    delay_s: float | None = None


def due_of(annotations: Mapping[Any, object], now: float) -> Due | None:
    """Return when a message with these message annotations, which arrived *now*, is due.

    None means at once. Of several requests the latest time counts.

    Raises:
        DecodeError: A request has a value of a wrong type.
    """
    if _ANY_REQUEST.isdisjoint(annotations):
        return None
    found: Due | None = None
    for key in _REQUESTS:
        value = annotations.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            kind = "a number of milliseconds" if key == DELAY else "a timestamp"
            raise DecodeError(f"the message annotation {key} is {kind}, not {value!r:.50}")
        found = _later(found, _due_by(key, value, now), now)
    return found


def _due_by(key: str, value: int, now: float) -> Due:
    """Return the time that the request *key* with *value* names, in milliseconds."""
    return Due(now + value / 1000, value / 1000) if key == DELAY else Due(value / 1000)


def _later(found: Due | None, due: Due, now: float) -> Due | None:
    """Return *due* if it is in the future and later than *found*, otherwise *found*."""
    return due if due.at > now and (found is None or due.at > found.at) else found


def requested_pause(
    changes: Mapping[object, object], now: float, expires_at: float
) -> tuple[Mapping[object, object], Due | None]:
    """Return the changes of an outcome without a requested pause, and the end of that pause.

    A consumer that modifies a failed message requests the pause with the annotations with which a sender
    requests a delay: a delay in milliseconds, or a time. Values of other types request none. The message
    expires at its time.

    Args:
        changes: The message annotations of the outcome (Part 3 §3.4.5).
        now: Wall-clock time.
        expires_at: Wall-clock time at which the message expires.
    """
    found: Due | None = None
    rest = changes
    for key in _REQUESTS:
        if key not in changes:
            continue
        value = changes[key]
        rest = {name: each for name, each in rest.items() if name != key}
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        due = _due_by(key, value, now)
        found = _later(found, Due(expires_at) if due.at > expires_at else due, now)
    return rest, found


class DelayedMessages:
    """Messages of one queue that are not due yet.

    Args:
        wall: The wall clock.
        monotonic: The monotonic clock.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._wall = wall
        self._monotonic = monotonic
        #: Times, sequence numbers and messages: by the monotonic clock, and by the wall clock.
        self._delayed: list[tuple[float, int, Entry]] = []
        self._dated: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._delayed) + len(self._dated)

    def heaps(self) -> list[list[tuple[float, int, Entry]]]:
        """Return the heaps with all messages, for a caller that removes them."""
        return [self._delayed, self._dated]

    def add(self, entry: Entry) -> bool:
        """Hold *entry* until it is due; return False if it is due now."""
        due = entry.due
        if due is None:
            return False
        left = due.at - self._wall()
        if due.delay_s is not None:
            left = min(left, due.delay_s)
        if left <= 0:
            return False
        if due.delay_s is None:
            heapq.heappush(self._dated, (due.at, entry.sequence, entry))
        else:
            heapq.heappush(self._delayed, (self._monotonic() + left, entry.sequence, entry))
        return True

    def pause(self, entry: Entry, pause_s: float) -> None:
        """Hold a failed *entry*, whose ``due`` is None, for *pause_s* seconds."""
        heapq.heappush(self._delayed, (self._monotonic() + pause_s, entry.sequence, entry))

    def due(self, most: int) -> list[Entry]:
        """Remove and return at most *most* due messages, in the order of their sequence numbers."""
        found: list[Entry] = []
        for heap, now in ((self._delayed, self._monotonic()), (self._dated, self._wall())):
            while heap and heap[0][0] <= now and len(found) < most:
                found.append(heapq.heappop(heap)[2])
        found.sort(key=_place)
        return found

    def next(self) -> float:
        """Return when to look again, by the monotonic clock; ``inf`` if no message is held."""
        at = self._delayed[0][0] if self._delayed else inf
        if self._dated:
            left = self._dated[0][0] - self._wall()
            at = min(at, self._monotonic() + max(0.0, min(left, LOOK_S)))
        return at


def _place(entry: Entry) -> int:
    return entry.sequence
