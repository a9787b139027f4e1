"""Messages that are not to be delivered yet, and when something is to be done. Pure.

A delay is measured by the monotonic clock, so that no jump of the wall clock changes it; a time of day
follows the wall clock, wherever that goes. What a store keeps is the time of day in both cases: a
message whose delay a restart has interrupted waits no longer than the whole delay again, even if the
wall clock was put back meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..codec.sections import read_annotations
from ..errors import DecodeError
from ..limits import Limits

if TYPE_CHECKING:
    from .entries import Entry

#: Message annotations by which a sender asks for later delivery: milliseconds from the arrival, and
#: a time of day, as Artemis and as Service Bus spell it.
DELAY: Final = "x-opt-delivery-delay"
TIME: Final = "x-opt-delivery-time"
ENQUEUE_TIME: Final = "x-opt-scheduled-enqueue-time"

#: What an annotation section without any of them does not have.
_HINTS: Final = (b"x-opt-delivery-", b"x-opt-scheduled-")

#: Seconds between looks at the wall clock, which may jump.
LOOK_S: Final = 1.0


class Due(Struct, frozen=True, gc=False):
    """When a message may be delivered at the earliest."""

    #: In wall-clock time.
    at: float
    #: The delay that was asked for, in seconds; None if a time of day was.
    delay_s: float | None = None


def due_of(section: bytes, now: float, limits: Limits) -> Due | None:
    """When a message with these encoded message annotations, which arrived *now*, is due.

    None for at once. With a delay and a time the later one counts.

    Raises:
        DecodeError: It says so in a way that cannot be understood.
    """
    if not any(hint in section for hint in _HINTS):
        return None
    annotations: dict[Any, object] = {**read_annotations(section, limits)}
    found: Due | None = None
    for key in (DELAY, TIME, ENQUEUE_TIME):
        value = annotations.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            kind = "a number of milliseconds" if key == DELAY else "a timestamp"
            raise DecodeError(f"the message annotation {key} is {kind}, not {value!r:.50}")
        due = Due(now + value / 1000, value / 1000) if key == DELAY else Due(value / 1000)
        if due.at > now and (found is None or due.at > found.at):
            found = due
    return found


class Schedule:
    """The messages of one queue that are not due.

    Args:
        wall: The wall clock.
        monotonic: The other one.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._wall = wall
        self._monotonic = monotonic
        #: Times, places and messages: by the monotonic clock, and by the wall clock.
        self._delayed: list[tuple[float, int, Entry]] = []
        self._dated: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._delayed) + len(self._dated)

    def heaps(self) -> list[list[tuple[float, int, Entry]]]:
        """All that is kept, in no order, for those who let go of it."""
        return [self._delayed, self._dated]

    def add(self, entry: Entry) -> bool:
        """Keep *entry* until it is due; false if it is."""
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
        """Keep a failed *entry*, whose ``due`` is None, for *pause_s* seconds."""
        heapq.heappush(self._delayed, (self._monotonic() + pause_s, entry.sequence, entry))

    def due(self, most: int) -> list[Entry]:
        """Take out what is due now, *most* of it at most, in the order of its places."""
        found: list[Entry] = []
        for heap, now in ((self._delayed, self._monotonic()), (self._dated, self._wall())):
            while heap and heap[0][0] <= now and len(found) < most:
                found.append(heapq.heappop(heap)[2])
        found.sort(key=_place)
        return found

    def next(self) -> float:
        """When to look again, by the monotonic clock; ``inf`` if there is nothing to wait for."""
        at = self._delayed[0][0] if self._delayed else inf
        if self._dated:
            left = self._dated[0][0] - self._wall()
            at = min(at, self._monotonic() + max(0.0, min(left, LOOK_S)))
        return at


def _place(entry: Entry) -> int:
    return entry.sequence
