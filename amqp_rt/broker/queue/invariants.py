"""Invariants of a queue's state, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ..entries import Entry
from .paging import NOWHERE_PAGED
from .queue import MessageQueue
from .segments import SEGMENT, SHIFT
from .shelf import PLACE
from .subscriptions import Subscription


def broken_invariants(queue: MessageQueue, acquired: Iterable[Entry] | None = None) -> list[str]:
    """Return a sentence for each invariant of *queue* that does not hold.

    For tests, between two calls of other methods: the work is proportional to the number of
    messages times that of consumers. *acquired* contains all entries held by a delivery or
    transaction of this queue, if the caller knows them; only then, or if no message is
    ACQUIRED, are bytes compared exactly.
    """
    broken: list[str] = []
    if queue.deleted:
        # A queue that failed keeps its state as it was at the error.
        return broken
    here = _check_slots(queue, broken)
    _check_ranks(queue, here, broken)
    _check_counts(queue, here, acquired, broken)
    _check_turns(queue, here, broken)
    return broken


def _check_slots(queue: MessageQueue, broken: list[str]) -> dict[int, Entry]:
    """Check segments and paging; return the entries in slots by their sequence numbers."""
    here: dict[int, Entry] = {}
    for number, segment in queue.shelf.segments.items():
        found = 0
        for at in range(SEGMENT):
            entry = segment.peek(at) if segment.packed else segment.slots[at]
            if entry is None:
                continue
            found += 1
            place = number << SHIFT | at
            here[place] = entry
            if entry.sequence != place:
                broken.append(f"the entry of place {entry.sequence} lies in slot {place}")
            if place >= queue.place_next:
                broken.append(f"place {place} was never given out")
        if segment.number != number:
            broken.append(f"segment {segment.number} is filed as {number}")
        if segment.live != found:
            broken.append(f"segment {number} counts {segment.live} entries, and has {found}")
        if not found and segment is not queue.shelf._tail:
            broken.append(f"segment {number} is empty and not the last one")
    if queue.shelf.segments.get(queue.shelf._tail.number) is not queue.shelf._tail:
        broken.append("the last segment is not among the segments")
    paging = queue.paging
    if paging.first == NOWHERE_PAGED:
        if paging.count:
            broken.append(f"{paging.count} messages are paged out, from no place on")
        if paging.bytes or paging.out:
            broken.append(f"{paging.bytes} bytes are paged out, from no place on")
        return here
    if not 0 <= paging.count <= queue.available or paging.bytes < 0:
        broken.append(f"{paging.count} messages of {paging.bytes} bytes are paged out")
    for place, entry in here.items():
        if place >= paging.first and paging.out.get(place) is not entry:
            broken.append(f"place {place} is paged out, and has an entry in memory")
    return here


def _check_ranks(queue: MessageQueue, here: dict[int, Entry], broken: list[str]) -> None:
    """Check that each entry of *here* is either in one heap or fresh."""
    filed: dict[int, int] = {}
    stale = 0
    for heap in (queue.shelf.returned, *queue.shelf.apart.values()):
        if any(heap[at] < heap[(at - 1) >> 1] for at in range(1, len(heap))):
            broken.append("the ranks of what came back are no heap")
        for rank in heap:
            place = rank & PLACE
            entry = here.get(place)
            if entry is None:
                stale += 1
                continue
            filed[place] = filed.get(place, 0) + 1
            if rank != queue.shelf.rank(entry):
                broken.append(f"place {place} is filed with the rank of another")
    if stale != queue.shelf.stale:
        broken.append(
            f"{stale} ranks are of messages that have gone, {queue.shelf.stale} are counted"
        )
    for avoid, heap in queue.shelf.apart.items():
        if not heap or not avoid or not avoid <= queue.consumers.keys():
            broken.append(f"a heap of {len(heap)} ranks is kept from consumers {set(avoid)}")
    for place in here:
        fresh = queue.shelf.head <= place < queue.shelf.next and place not in queue.shelf.aside
        if filed.get(place, 0) + fresh != 1:
            broken.append(
                f"place {place} is in {filed.get(place, 0)} heaps and "
                f"{'' if fresh else 'not '}among those never taken"
            )
    broken += [
        f"place {place} is set aside and in no heap"
        for place in queue.shelf.aside
        if place not in filed
    ]
    if queue.shelf.head < queue.shelf.next and queue.shelf.fresh(queue.shelf.head) is None:
        broken.append(f"the first of those never taken, at {queue.shelf.head}, is not there")
    ranks = set(queue.timing.paused_ranks)
    for place, entry in queue.timing.paused.items():
        if entry.sequence != place or place in here or queue.shelf.rank(entry) not in ranks:
            broken.append(f"the paused message of place {place} is elsewhere too, or has no rank")


def _check_counts(
    queue: MessageQueue, here: dict[int, Entry], acquired: Iterable[Entry] | None, broken: list[str]
) -> None:
    """Check the counters against the actual messages."""
    paging = queue.paging
    counted = (
        queue.available,
        queue.acquired,
        queue.delayed,
        queue.pending,
        queue.held,
        paging.count,
    )
    if min(*counted, queue.large.arriving) < 0 or queue.bytes < 0 or queue.beyond < 0:
        broken.append(f"a count is negative: {counted}, {queue.bytes}, {queue.beyond}")
    if len(here) != queue.available - paging.count:
        broken.append(
            f"{len(here)} messages are here, {queue.available - paging.count} are counted"
        )
    waiting = list(queue.timing.paused.values())
    if queue.timing.schedule is not None:
        for scheduled in queue.timing.schedule.heaps():
            waiting += [
                entry
                for _, _, entry in scheduled
                if entry.due is not None and entry.sequence not in queue.timing.paused
            ]
    if len(waiting) != queue.delayed:
        broken.append(f"{len(waiting)} messages wait for a time, {queue.delayed} are counted")
    if queue.delayed and queue.alarm == inf:
        broken.append("messages wait for a time, and no alarm is set")
    entries = [*here.values(), *waiting]
    if acquired is not None:
        entries += acquired
        if len(entries) != len(here) + len(waiting) + queue.acquired:
            broken.append(f"{queue.acquired} messages are counted as acquired")
    if len({entry.sequence for entry in entries}) != len(entries):
        broken.append("a message is in more places than one")
    size = sum(len(entry.payload) + entry.rest for entry in entries)
    paged = paging.bytes
    known = not (queue.pending or queue.held or queue.large.arriving) and (
        acquired is not None or not queue.acquired
    )
    if queue.bytes - paged != size if known else queue.bytes - paged < size:
        broken.append(f"{size} bytes are here, {queue.bytes - paged} are counted")
    rest = sum(entry.rest for entry in entries)
    if queue.beyond != rest if known else queue.beyond < rest:
        broken.append(f"{rest} bytes are in the store only, {queue.beyond} are counted")
    for key, entry in queue._latest.items():
        if entry.marks.key != key or entry.marks.replaced:
            broken.append(f"the last message with the key {key!r} is not its last one")


def _check_turns(queue: MessageQueue, here: dict[int, Entry], broken: list[str]) -> None:
    """Check the rings, and that no waiting consumer may have one of the messages."""
    if queue.turns.levels:
        if queue.turns.levels != sorted(set(queue.turns.levels), reverse=True) or queue.turns.ring:
            broken.append(f"the levels {queue.turns.levels} are out of order, or not in use")
        if queue.turns.rings.keys() != set(queue.turns.levels) or 0 not in queue.turns.levels:
            broken.append(f"rings of {list(queue.turns.rings)}, and levels {queue.turns.levels}")
    elif queue.turns.rings:
        broken.append(f"rings of {list(queue.turns.rings)}, and no levels")
    standing: list[Subscription] = []
    for ring in (queue.turns.ring, *queue.turns.rings.values()):
        standing += ring
    for subscription in standing:
        identity = subscription.identity
        if queue.consumers.get(identity) is not subscription:
            broken.append(f"consumer {identity} has left, and stands in a ring")
        elif not subscription.ready or not subscription.active:
            broken.append(f"consumer {identity} is not ready, and stands in a ring")
        elif subscription not in queue.turns.ring_of(subscription):
            broken.append(f"consumer {identity} stands in the ring of another priority")
    ready = [each for each in queue.consumers.values() if each.ready]
    if len(ready) != len(standing):
        broken.append(f"{len(ready)} consumers are ready, {len(standing)} stand in rings")
    if queue.single_active:
        active = [each for each in queue.consumers.values() if each.active]
        if active != (
            [queue.turns.single]
            if queue.turns.single is not None and not queue.timing.paused
            else []
        ):
            broken.append(f"{len(active)} consumers are active")
        if (queue.turns.single is None) != (not queue.consumers):
            broken.append("no consumer is to be the active one")
    if queue.turns.pumping or queue.unfinished or queue.paging.count:
        return
    now = queue.wall()
    for subscription in ready:
        link = subscription.link
        if link.credit <= 0 or not link.writable or subscription.feeding:
            continue
        for place, entry in here.items():
            avoided = entry.avoid is not None and subscription.identity in entry.avoid
            if not avoided and entry.expires_at > now and subscription.wants(entry):
                broken.append(f"consumer {subscription.identity} may have place {place}")
                break
