"""Messages of a queue as operators see and remove them: those that are AVAILABLE or paused. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..entries import Entry
from .paging import NOWHERE_PAGED
from .shelf import PLACE, in_order

if TYPE_CHECKING:
    from .queue import MessageQueue


def peek(
    queue: MessageQueue, count: int, after: int = -1, before: int = NOWHERE_PAGED
) -> list[Entry]:
    """Return the first *count* messages that are available or paused.

    Their sequence numbers are higher than *after* and lower than *before*; of a paged queue
    only those before the paged range. The work depends on *count* and *after*, not on the
    number of messages.
    """
    found: list[Entry] = []
    if count <= 0:
        return found
    before = min(before, queue.paging.first)
    fresh = range(max(queue.shelf.head, after + 1), min(queue.shelf.next, before))
    ways: list[Iterable[int]] = [in_order(heap) for heap in _heaps(queue) if heap]
    last = -1
    for rank in heapq.merge(*ways, fresh):
        if rank == last:
            # Also among the fresh ones, or paused before.
            continue
        last = rank
        sequence = rank & PLACE
        if not after < sequence < before:
            if queue.shelf.ranked or sequence <= after:
                continue
            break
        entry = queue.present_at(sequence)
        if entry is not None:
            found.append(entry)
            if len(found) == count:
                break
    return found


def remove(queue: MessageQueue, entries: list[Entry]) -> None:
    """Remove *entries*, which :meth:`peek` has just returned as the first ones."""
    if not entries:
        return
    gone = {entry.sequence for entry in entries}
    last = queue.shelf.rank(entries[-1])
    for heap in _heaps(queue):
        # Messages that arrived since the operation began may rank before them.
        newer: list[int] = []
        while heap and heap[0] <= last:
            rank = heapq.heappop(heap)
            if rank & PLACE in gone:
                continue
            if queue.present_at(rank & PLACE) is not None:
                newer.append(rank)
            elif heap is not queue.timing.paused_ranks:
                queue.shelf.stale -= 1
        for rank in newer:
            heapq.heappush(heap, rank)
    for avoid in [avoid for avoid, heap in queue.shelf.apart.items() if not heap]:
        del queue.shelf.apart[avoid]
    queue.shelf.aside -= gone
    for entry in entries:
        if queue.timing.paused.pop(entry.sequence, None) is None:
            queue.shelf.remove(entry.sequence)
        else:
            queue.delayed -= 1
            # Its schedule still has it, and finds that it is not paused any more.
            entry.due = None
            queue.timing.resume_behind(entry)
    if queue.shelf.head in gone:
        queue.shelf.step()
    for entry in entries:
        queue.archive(entry)
    queue.notify_room()


def _heaps(queue: MessageQueue) -> list[list[int]]:
    """Return the heaps of ranks of messages that are not fresh."""
    return [queue.shelf.returned, *queue.shelf.apart.values(), queue.timing.paused_ranks]
