"""Available messages of a queue in memory, and their order. Pure.

Messages are in slots, in segments that are found by sequence number. *Fresh* messages, which were
never acquired and have no rank, are contiguous, so that the next one is known. The ranks of others
are in heaps, by the consumers that must not get them. In heaps a rank is a priority or mark above a
sequence number.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ..entries import Entry
from .accounts import DROP_HEAD
from .segments import MASK, SHIFT, Segment
from .subscriptions import Subscription

if TYPE_CHECKING:
    from .queue import MessageQueue

#: Segments at the end of a queue that are not packed: most queues are shorter.
PACKED_AFTER: Final = 16
#: In heaps the rank is above the sequence number, so that the lowest rank comes first.
PLACE_BITS: Final = 40
PLACE: Final = (1 << PLACE_BITS) - 1
#: Slots that a search passes over, and heaps whose first messages are compared, for a unit of work.
PASSED: Final = 32
#: Work of making entries of a packed segment.
UNPACKED: Final = 8
#: Messages that are removed from a packed segment before it is unpacked.
TAKEN_MAX: Final = 4


class Shelf:
    """Slots and heaps of a queue's available messages.

    Args:
        queue: The queue.
        priorities: Number of distinct priorities (§3.2.1); 1 to ignore them.
        sorting: Whether messages are sorted by their marks; equal ones stay in order.
    """

    def __init__(self, queue: MessageQueue, priorities: int, *, sorting: bool) -> None:
        self._queue = queue
        self.priorities = priorities
        self.sorting = sorting
        #: Whether messages are ordered by more than their sequence number.
        self.ranked: bool = priorities > 1 or sorting
        self.segments: dict[int, Segment] = {}
        self._tail: Segment = Segment(0)
        self.segments[0] = self._tail
        #: Fresh messages are in the slots from ``head`` up to ``next``. A slot may be empty, such
        #: as one whose message was reserved and withdrawn, but not the first one.
        self.head: int = 0
        self.next: int = 0
        #: Ranks of requeued messages: of those for all consumers, and of others by the consumers
        #: that must not get them. With priorities or sorting, of all messages.
        self.returned: list[int] = []
        self.apart: dict[frozenset[int], list[int]] = {}
        #: Sequence numbers of those between ``head`` and ``next`` that are in heaps nevertheless:
        #: a selective consumer had acquired them out of turn.
        self.aside: set[int] = set()
        #: Number of ranks in heaps whose messages have been replaced.
        self.stale: int = 0
        #: Heap of a ring with priorities: the level of each message above its sequence number, so that the
        #: oldest one of the lowest level comes first. Some are of messages that have gone.
        self.lowest: list[int] = []

    def append(self, entry: Entry, sequence: int) -> None:
        """Make *entry*, whose *sequence* number is above all others here, AVAILABLE."""
        queue = self._queue
        if self.ranked:
            self.head = self.next = sequence + 1
            self.push(entry)
            self.place(entry, sequence)
            for browser in queue.browsers.values():
                browser.backlog.insert(0, self.rank(entry))
            return
        if self.head == self.next:
            self.head = sequence
        self.next = sequence + 1
        self.place(entry, sequence)

    def place(self, entry: Entry, sequence: int) -> None:
        """Put *entry* into the slot of its *sequence* number, which makes it AVAILABLE."""
        queue = self._queue
        number = sequence >> SHIFT
        segment = self._tail
        if segment.number != number:
            found = self.segments.get(number)
            if found is None:
                found = Segment(number)
                self.segments[number] = found
            if number > segment.number:
                if not segment.live:
                    del self.segments[segment.number]
                self._tail = found
                self._pack(number - PACKED_AFTER)
            segment = found
            if segment.packed:
                self._unpack(segment)
        segment.slots[sequence & MASK] = entry
        segment.live += 1
        queue.available += 1
        if entry.expires_at < queue.timing.expires_at:
            queue.timing.has_expiring = True
            queue.timing.watch_front()

    def _pack(self, number: int) -> None:
        """Pack the segment *number* if consumers are not there yet."""
        segment = self.segments.get(number)
        if segment is not None and number > self.head >> SHIFT and not self._queue.paging.out:
            segment.pack()

    def _unpack(self, segment: Segment) -> None:
        self._queue.memory.work -= UNPACKED
        segment.unpack()

    def place_early(self, entry: Entry) -> None:
        """Make *entry*, which was read out of turn, AVAILABLE at its position."""
        self.push(entry)
        self.aside.add(entry.sequence)
        self.place(entry, entry.sequence)

    def available_at(self, sequence: int) -> Entry | None:
        """Return the available message at *sequence*, to be read only: it may be a copy."""
        segment = self.segments.get(sequence >> SHIFT)
        if segment is None:
            return None
        if segment.packed:
            return segment.peek(sequence & MASK)
        return segment.slots[sequence & MASK]

    def fresh(self, sequence: int) -> Entry | None:
        """Return the message at *sequence* if it is fresh."""
        if self.aside and sequence in self.aside:
            return None
        return self.available_at(sequence)

    def remove(self, sequence: int) -> Entry:
        """Empty the slot of the available message at *sequence*, and return that message."""
        queue = self._queue
        segment = self.segments[sequence >> SHIFT]
        if segment.packed and (sequence == self.head or segment.taken == TAKEN_MAX):
            # The others of the segment are probably next.
            self._unpack(segment)
        if not segment.packed:
            entry = segment.slots[sequence & MASK]
            segment.slots[sequence & MASK] = None
        else:
            entry = segment.take(sequence & MASK)
        assert entry is not None
        segment.live -= 1
        if not segment.live and segment is not self._tail:
            del self.segments[segment.number]
        queue.available -= 1
        return entry

    def step(self) -> None:
        """Advance ``head`` past a removed fresh message to the next one."""
        self.head += 1
        while self.head < self.next and (
            self.available_at(self.head) is None or (self.aside and self.head in self.aside)
        ):
            if self.head >> SHIFT in self.segments:
                self.head += 1
            else:
                self.head = min(((self.head >> SHIFT) + 1) << SHIFT, self.next)

    def after_empty(self, sequence: int, last: int) -> int:
        """Return the slot after the empty one at *sequence*, or after the segment if it is gone."""
        if sequence >> SHIFT in self.segments:
            return sequence + 1
        return min(((sequence >> SHIFT) + 1) << SHIFT, last)

    def rank(self, entry: Entry) -> int:
        """Return the number that orders *entry*: its mark or priority, then its sequence number."""
        if not self.ranked:
            return entry.sequence
        if self.sorting:
            order: int = entry.marks.order
            return order << PLACE_BITS | entry.sequence
        band = effective_priority(entry.priority, self.priorities)
        return (self.priorities - 1 - band) << PLACE_BITS | entry.sequence

    def push(self, entry: Entry) -> None:
        """Add *entry* to the heap for the consumers that may have it.

        A consumer with filters may have it until it has examined it; see :meth:`set_apart`.
        """
        queue = self._queue
        avoid = entry.avoid
        heap = self.returned
        if avoid:
            avoid = entry.avoid = frozenset(link for link in avoid if link in queue.consumers)
            if avoid:
                heap = self.apart.setdefault(avoid, [])
        heapq.heappush(heap, self.rank(entry))
        if self.priorities > 1 and queue.overflow == DROP_HEAD and not self.sorting:
            self._watch_lowest(entry)

    def _watch_lowest(self, entry: Entry) -> None:
        if len(self.lowest) > 2 * self._queue.available + 64:
            self._rebuild_lowest()
        level = effective_priority(entry.priority, self.priorities)
        heapq.heappush(self.lowest, level << PLACE_BITS | entry.sequence)

    def _rebuild_lowest(self) -> None:
        levels = self.priorities - 1
        # Ranks have the levels in the other direction.
        self.lowest = [
            (levels - (rank >> PLACE_BITS)) << PLACE_BITS | rank & PLACE
            for rank in self.older()
            if self.available_at(rank & PLACE) is not None
        ]
        heapq.heapify(self.lowest)

    def pop(self, entry: Entry, heap: list[int], key: frozenset[int] | None) -> None:
        """Remove *entry* from *heap*, where it is the first; *key* is None unless that is apart."""
        heapq.heappop(heap)
        if key is not None and not heap:
            del self.apart[key]
        if self.aside:
            self.aside.discard(entry.sequence)

    def first_apart(self, subscription: Subscription, before: int) -> frozenset[int] | None:
        """Return the key of the heap apart with the lowest rank that *subscription* may have.

        None if that is not lower than *before*, or there is none; -1 is no bound.
        """
        queue = self._queue
        # There may be a heap for each set of consumers.
        queue.memory.work -= len(self.apart) // PASSED
        key: frozenset[int] | None = None
        for avoid, heap in self.apart.items():
            if subscription.identity not in avoid and (before < 0 or heap[0] < before):
                before = heap[0]
                key = avoid
        return key

    def set_apart(
        self, subscription: Subscription, heap: list[int], key: frozenset[int] | None
    ) -> None:
        """Move the first rank of *heap* to the messages that *subscription* must not get.

        *key* are the consumers that must not get those of *heap*.
        """
        rank = heapq.heappop(heap)
        if key is not None and not heap:
            del self.apart[key]
        avoid = (
            frozenset((subscription.identity,)) if key is None else key | {subscription.identity}
        )
        heapq.heappush(self.apart.setdefault(avoid, []), rank)

    def rebuild_heaps(self) -> None:
        """Sort all requeued messages into heaps again by the consumers that may have them."""
        older = self.older()
        self.lowest.clear()
        self.returned.clear()
        self.apart.clear()
        self.stale = 0
        for rank in older:
            entry = self.available_at(rank & PLACE)
            if entry is not None:
                self.push(entry)

    def drop_stale(self) -> None:
        """Remove ranks of replaced messages from the front of each heap."""
        for avoid, heap in [(None, self.returned), *self.apart.items()]:
            self.skip_stale(heap)
            if avoid is not None and not heap:
                del self.apart[avoid]

    def skip_stale(self, heap: list[int]) -> None:
        """Remove ranks of replaced messages from the front of *heap*."""
        while heap and self.available_at(heap[0] & PLACE) is None:
            heapq.heappop(heap)
            self.stale -= 1

    def older(self) -> list[int]:
        """Return the ranks of available messages that are not fresh, in no order."""
        return [*self.returned, *chain.from_iterable(self.apart.values())]

    def begins_before(self, sequence: int) -> bool:
        """Return whether the first message here is before *sequence*, the first one in the store."""
        if self.head < self.next:
            return True
        return any(heap and heap[0] < sequence for heap in (self.returned, *self.apart.values()))

    def pop_first(self) -> Entry:
        """Remove and return the first available message."""
        if self.stale:
            self.drop_stale()
        first: list[int] | None = None
        avoiding: frozenset[int] | None = None
        for avoid, heap in [(None, self.returned), *self.apart.items()]:
            if heap and (first is None or heap[0] < first[0]):
                first = heap
                avoiding = avoid
        if first is None or (self.head < self.next and self.head < first[0]):
            entry = self.remove(self.head)
            self.step()
            return entry
        place = heapq.heappop(first) & PLACE
        if avoiding is not None and not first:
            del self.apart[avoiding]
        self.aside.discard(place)
        return self.remove(place)

    def pop_excess(self) -> Entry:
        """Remove and return the message that a ring gives up first, or a queue that is deleted.

        Where priorities are distinguished this is the oldest one of the lowest, so that less important
        ones make room for others; without priorities the first one.
        """
        if self.priorities == 1 or self.sorting or self._queue.leaving:
            return self.pop_first()
        if len(self.lowest) < self._queue.available:
            # The queue has become a ring since they came.
            self._rebuild_lowest()
        entry: Entry | None = None
        while entry is None:
            entry = self.available_at(heapq.heappop(self.lowest) & PLACE)
        self.replace(entry)
        return entry

    def remove_anywhere(self, sequence: int) -> Entry | None:
        """Remove the message at *sequence*, wherever it is; return None if it does not exist."""
        entry = self.available_at(sequence)
        if entry is None:
            return None
        self.remove(sequence)
        self.aside.discard(sequence)
        if self.head <= sequence < self.next:
            if sequence == self.head:
                self.step()
        else:
            for heap in (self.returned, *self.apart.values()):
                heap[:] = [rank for rank in heap if rank & PLACE != sequence]
                heapq.heapify(heap)
            self.apart = {avoid: heap for avoid, heap in self.apart.items() if heap}
        return entry

    def remove_all(self, entries: list[Entry]) -> int:
        """Remove available *entries*, wherever they are; return the work of that."""
        work = len(entries)
        older: set[int] = set()
        for entry in entries:
            sequence = entry.sequence
            self.remove(sequence)
            if sequence < self.head or sequence in self.aside:
                self.aside.discard(sequence)
                older.add(sequence)
            elif sequence == self.head:
                self.step()
        if older:
            for heap in (self.returned, *self.apart.values()):
                work += len(heap) // PASSED
                left = [rank for rank in heap if rank & PLACE not in older]
                if len(left) < len(heap):
                    heap[:] = left
                    heapq.heapify(heap)
            self.apart = {avoid: heap for avoid, heap in self.apart.items() if heap}
        return work

    def replace(self, before: Entry) -> bool:
        """Remove *before*, which a later message replaces; return False if it is acquired."""
        sequence = before.sequence
        if self.available_at(sequence) is not before:
            return False
        self.remove(sequence)
        if sequence in self.aside or sequence < self.head:
            self.aside.discard(sequence)
            self.stale += 1
            if self.stale > self._queue.available + 64:
                self.rebuild_heaps()
        elif sequence == self.head:
            self.step()
        return True

    def release(self, identity: int) -> None:
        """Give messages that only consumer *identity*, which has left, must not get to all."""
        for avoid in [avoid for avoid in self.apart if identity in avoid]:
            moved = self.apart.pop(avoid)
            rest = avoid - {identity}
            heap = self.apart.setdefault(rest, []) if rest else self.returned
            heap += moved
            heapq.heapify(heap)

    def clear(self) -> list[Any]:
        """Remove all messages, and return the objects that hold them, for a caller that frees them."""
        held: list[Any] = [self.segments, self.aside, self.returned, *self.apart.values()]
        self.aside = set()
        self.stale = 0
        self.head = self.next
        self.returned = []
        self.lowest = []
        self.apart = {}
        self.segments = {}
        self._tail = Segment(self.next >> SHIFT)
        self.segments[self._tail.number] = self._tail
        return held


def effective_priority(priority: int, levels: int) -> int:
    """Return the level, from 0, of *priority* among *levels* distinct priorities (§3.2.1)."""
    if levels >= 10:
        return min(priority, levels - 1)
    lowest = 5 - (levels + 1) // 2
    return min(max(priority, lowest), 4 + levels // 2) - lowest


def in_order(heap: list[int]) -> Iterator[int]:
    """Yield the elements of *heap* in order without changing it, at a cost for each one yielded."""
    frontier = [(heap[0], 0)]
    while frontier:
        value, at = heapq.heappop(frontier)
        yield value
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
