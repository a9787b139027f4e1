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


class Deadlines(Generic[K]):
    """A time for each of some keys. Setting, removing and finding the next cost O(log n).

    Times that were replaced or removed stay in the heap until they are met or the heap is rebuilt, which
    keeps it within about twice the number of keys.
    """

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._times)

    @property
    def heap_size(self) -> int:
        """Number of times in the heap, replaced ones included."""
        return len(self._heap)

    def set(self, key: K, at: float) -> None:
        """Set the time of *key* to *at*, a wall-clock time in seconds; ``inf`` removes it."""
        if at == inf:
            self._times.pop(key, None)
            return
        self._times[key] = at
        # The count keeps equal times in the order in which they were set, and keys are not compared.
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._times) + _SPARE:
            self._heap = [each for each in self._heap if self._times.get(each[2]) == each[0]]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove the time of *key*, if it has one."""
        self._times.pop(key, None)
        if not self._times:
            self._heap.clear()

    @property
    def next(self) -> float:
        """The earliest time, ``inf`` if there is none."""
        heap = self._heap
        while heap and self._times.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def pop(self, now: float) -> K | None:
        """Remove and return the key with the earliest time, if that has come at *now*; else None."""
        if self.next > now + EARLY_S:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._times[key]
        return key
