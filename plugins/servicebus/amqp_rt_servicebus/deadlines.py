"""Times at which something ends, with the next one known."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from math import inf
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Time by which an event may be early, in seconds: two clocks that move together round differently.
EARLY_S: Final = 1e-6
#: Replaced times that are tolerated beyond one for each valid time.
_SPARE: Final = 64
#: Replaced times that one call drops, and times that one call moves.
_DROPPED: Final = 16
_MOVED: Final = 4


class Deadlines(Generic[K]):
    """A time for each of some keys. Setting, removing and finding the next cost O(log n).

    Times that were replaced or removed stay in the heap until they are met. When there are too many of them, the valid times
    move to another heap, a few with each call: dropping thousands at once would take tens of milliseconds.
    """

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        #: The heap before, whose valid times are being moved.
        self._old: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._times)

    @property
    def heap_size(self) -> int:
        """Number of times that are kept, replaced ones included."""
        return len(self._heap) + len(self._old)

    def set(self, key: K, at: float) -> None:
        """Set the time of *key* to *at*, a wall-clock time in seconds; ``inf`` removes it."""
        if at == inf:
            self.discard(key)
            return
        self._times[key] = at
        # The count keeps equal times in the order in which they were set, and keys are not compared.
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if self._old:
            self._move()
        elif len(self._heap) > 2 * len(self._times) + _SPARE:
            self._heap, self._old = self._old, self._heap

    def _move(self) -> None:
        """Move a few valid times of the old heap."""
        old = self._old
        for _ in range(min(_MOVED, len(old))):
            # Without its last item a heap is still one.
            each = old.pop()
            if self._times.get(each[2]) == each[0]:
                heapq.heappush(self._heap, each)

    def discard(self, key: K) -> None:
        """Remove the time of *key*, if it has one."""
        self._times.pop(key, None)
        if not self._times:
            self._heap.clear()
            self._old.clear()

    @property
    def next(self) -> float:
        """The earliest time, ``inf`` if there is none.

        Behind many removed times it may be one of these: :meth:`pop` returns None for it.
        """
        first = self._first()
        return first[0][0] if first else inf

    def _first(self) -> list[tuple[float, int, K]]:
        """Return the heap that has the next time, after dropping a few replaced ones; an empty one if there is none."""
        heap, old = self._heap, self._old
        self._drop_replaced(heap)
        if not old:
            return heap
        self._drop_replaced(old)
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _drop_replaced(self, heap: list[tuple[float, int, K]]) -> None:
        times = self._times
        for _ in range(_DROPPED):
            if not heap or times.get(heap[0][2]) == heap[0][0]:
                break
            heapq.heappop(heap)

    def pop(self, now: float) -> K | None:
        """Remove and return the key with the earliest time, if that has come at *now*.

        Returns:
            None if it has not, or if there are too many removed times before it: :attr:`next` has come then.
        """
        first = self._first()
        if not first or first[0][0] > now + EARLY_S:
            return None
        at, _, key = heapq.heappop(first)
        if self._times.get(key) != at:
            return None
        del self._times[key]
        return key
