"""Turns of a queue's consumers: which one gets the next message, and which message. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ...errors import LocalProtocolError
from ...outcomes import ACCEPTED
from ..entries import NEVER, Entry, encode_outgoing, exceeds_link
from .accounts import WORK_OF_A_TURN
from .groups import Groups
from .shelf import PASSED, PLACE
from .subscriptions import NO_MORE_WORK, Browser, Enlisted, Subscription

if TYPE_CHECKING:
    from .queue import MessageQueue

#: Messages that one consumer gets in a row if no other waits.
_RUN: Final = 64

#: Messages delivered in one turn of the event loop, however much credit there is.
_DELIVERED: Final = 1_000

#: Work of a consumer that leaves its ring since it cannot send, in messages examined.
_WORK_OF_A_RETIREMENT: Final = 4


class Turns:
    """Consumers of a queue that have credit, in the order in which they are served.

    Args:
        queue: The queue.
        grouping: Whether the messages of a group go to one consumer.
    """

    def __init__(self, queue: MessageQueue, *, grouping: bool) -> None:
        self._queue = queue
        #: Consumers with credit, in the order in which it came; each takes its turn and goes to the
        #: end.
        self.ring: deque[Subscription] = deque()
        #: If some consumers have a priority other than 0: all priorities with 0, highest first, and
        #: one ring for each in place of ``ring``.
        self.levels: list[int] = []
        self.rings: dict[int, deque[Subscription]] = {}
        #: Owners of message groups, None if the queue has no groups.
        self.groups: Groups | None = Groups() if grouping else None
        #: The single active consumer.
        self.single: Subscription | None = None
        #: Whether messages are being delivered, or must not be; see ``MessageQueue.conclude_left``.
        self.pumping: bool = False
        #: Whether this turn's deliveries are used up.
        self.exhausted: bool = False
        #: Whether many messages are being put, to be delivered after the last of them.
        self.gathers: bool = False
        #: Count of deliveries at which those of this turn are used up.
        self._deliveries_end: int = 0
        #: The last consumer or browser that has examined a message.
        self._last_searcher: Subscription | None = None

    def ring_of(self, subscription: Subscription) -> deque[Subscription]:
        """Return the ring of the consumers with the priority of *subscription*."""
        return self.rings[subscription.priority] if self.levels else self.ring

    def pump(self) -> None:
        """Deliver while there are messages and consumers that may have them."""
        queue = self._queue
        if self.pumping or queue.deleted:
            return
        self.pumping = True
        self._deliveries_end = queue.counts.delivered + _DELIVERED
        self._last_searcher = None
        try:
            if self.levels:
                for level in self.levels:
                    self._pump_ring(self.rings[level])
            else:
                self._pump_ring(self.ring)
        finally:
            self.pumping = self.exhausted or bool(queue.deferred.unconcluded)
        queue.notify_room()

    def _pump_ring(self, ring: deque[Subscription]) -> None:
        queue = self._queue
        passed = 0
        # A consumer that may have none of the messages keeps its place, and is passed over once.
        while queue.available and passed < len(ring) and not self.exhausted:
            if queue.counts.delivered >= self._deliveries_end:
                # The rest is delivered in the next turn, before anything else.
                self.exhausted = True
                queue.memory.work -= _DELIVERED
                queue.resume_later()
                return
            subscription = ring[0]
            if queue.memory.work <= -WORK_OF_A_TURN and (
                subscription.selective or queue.shelf.apart
            ):
                # Searches end with the work of a turn. Passing over very many consumers or heaps
                # takes as long again, and then those without filters wait too.
                self.exhausted = True
                queue.resume_later()
                return
            served = self._serve_run(ring, subscription, 1 if len(ring) > 1 else _RUN)
            if subscription.ready:
                passed = 0 if served else passed + 1
                if len(ring) > 1:
                    ring.rotate(-1)
        searcher = self._last_searcher
        if searcher is not None and queue.memory.work <= 0 and len(ring) > 1 and searcher in ring:
            # In the next turn the others search first.
            ring.rotate(-1 - ring.index(searcher))

    def _serve_run(self, ring: deque[Subscription], subscription: Subscription, run: int) -> bool:
        """Deliver up to *run* messages to the first in the ring; return whether it got any."""
        queue = self._queue
        served = False
        link = subscription.link
        credit = link.credit
        while run > 0 and queue.available:
            if credit <= 0 or not link.writable:
                self.retire(ring, subscription)
                # Very many may have run out of room together: the consumers of one connection.
                queue.memory.work -= _WORK_OF_A_RETIREMENT
                if queue.memory.work <= -WORK_OF_A_TURN:
                    self.exhausted = True
                    queue.resume_later()
                break
            entry = self._take(subscription)
            if entry is None:
                break
            if queue.send(subscription, entry):
                served = True
                run -= 1
                credit = link.credit
                if credit <= 0 or subscription.feeding:
                    self.retire(ring, subscription)
                    break
            else:
                avoided = entry.avoid is not None and subscription.identity in entry.avoid
                queue.put_back(entry)
                credit = link.credit
                if not link.attached or not avoided:
                    # Its endpoint will be notified of the end, or of more credit. The first message
                    # that the credit does not cover waits for this consumer, in order, or for others.
                    self.retire(ring, subscription)
                    break
        return served

    def retire(self, ring: deque[Subscription], subscription: Subscription) -> None:
        """Remove the first in the ring, which lacks credit or room and joins again with both."""
        ring.popleft()
        subscription.ready = False

    def _take(self, subscription: Subscription) -> Entry | None:
        """Take and return the first message that *subscription* may have."""
        queue = self._queue
        shelf = queue.shelf
        while True:
            if subscription.selective:
                wanted = self._search(subscription)
                if wanted is None:
                    return None
                entry = wanted
            else:
                sequence = -1
                heap: list[int] | None = None
                key: frozenset[int] | None = None
                if shelf.stale:
                    shelf.drop_stale()
                if shelf.returned:
                    heap = shelf.returned
                    sequence = heap[0]
                if shelf.apart:
                    key = shelf.first_apart(subscription, sequence)
                    if key is not None:
                        heap = shelf.apart[key]
                        sequence = heap[0]
                if shelf.head < shelf.next and (heap is None or shelf.head < sequence):
                    sequence = shelf.head
                    heap = None
                if sequence < 0 or (
                    # It was acquired out of turn, and the store holds those that are before it.
                    heap is not None and queue.paging.count and sequence >= queue.paging.first
                ):
                    return None
                entry = shelf.remove(sequence & PLACE)
                if heap is None:
                    shelf.step()
                else:
                    shelf.pop(entry, heap, key)
            if entry.expires_at == NEVER or entry.expires_at > queue.wall():
                return entry
            queue.expire(entry)
            if queue.memory.work <= 0:
                # Messages behind it expire in the next turn; none is delivered before that.
                self.exhausted = True
                queue.resume_later()
                return None

    def _search(self, subscription: Subscription) -> Entry | None:
        """Take and return the first message that a selective *subscription* wants.

        A search that is too long for this turn continues in :meth:`resume`.
        """
        queue = self._queue
        shelf = queue.shelf
        subscription.searching = False
        while True:
            sequence = -1
            heap: list[int] | None = None
            key: frozenset[int] | None = None
            if shelf.stale:
                shelf.drop_stale()
            if shelf.returned:
                heap = shelf.returned
                sequence = heap[0]
            if shelf.apart:
                key = shelf.first_apart(subscription, sequence)
                if key is not None:
                    heap = shelf.apart[key]
                    sequence = heap[0]
            if shelf.head < shelf.next and (heap is None or shelf.head < sequence):
                fresh = self._wanted(subscription, shelf.next if heap is None else sequence)
                if fresh >= 0:
                    wanted = shelf.remove(fresh)
                    if fresh == shelf.head:
                        shelf.step()
                    return wanted
                if subscription.searching:
                    # Later messages must not overtake those that have not been examined.
                    return None
            if heap is None:
                return queue.paging.acquire(subscription) if queue.paging.count else None
            if queue.paging.count and sequence >= queue.paging.first:
                # It was acquired out of turn, and the store may hold some that are before it.
                older = queue.paging.acquire(subscription, sequence)
                if older is not None:
                    return older
                if not queue.paging.has_reached(subscription, sequence):
                    return None
            if queue.memory.work <= 0:
                self.search_later(subscription)
                return None
            first = shelf.available_at(sequence & PLACE)
            assert first is not None
            if self.examine(subscription, first):
                shelf.pop(shelf.remove(first.sequence), heap, key)
                return first
            shelf.set_apart(subscription, heap, key)

    def _wanted(self, subscription: Subscription, before: int) -> int:
        """Return the first fresh message below *before* that *subscription* wants, -1 for none.

        If the work of this turn is used up first, ``subscription.searching`` is set.
        """
        queue = self._queue
        shelf = queue.shelf
        cursor = max(subscription.cursor, shelf.head)
        last = min(shelf.next, before)
        memory = queue.memory
        while cursor < last:
            if memory.work <= 0:
                subscription.cursor = cursor
                self.search_later(subscription)
                return -1
            if not cursor % PASSED:
                memory.work -= 1
            entry = shelf.fresh(cursor)
            if entry is None:
                cursor = shelf.after_empty(cursor, last)
            elif self.examine(subscription, entry):
                subscription.cursor = cursor
                return cursor
            else:
                cursor += 1
        subscription.cursor = cursor
        return -1

    def examine(self, subscription: Subscription, entry: Entry) -> bool:
        """Return whether a selective *subscription* wants *entry*, and count the work of that."""
        self._last_searcher = subscription
        wanted = subscription.wants(entry)
        filters = subscription.filters
        self._queue.memory.work -= 1 if filters is None else filters.work
        return wanted

    def search_later(self, subscription: Subscription) -> None:
        """Continue the search for *subscription* in the next turn."""
        queue = self._queue
        subscription.searching = True
        # Very many consumers would take long although none of them examines a message.
        queue.memory.work -= 1
        queue.resume_later()

    def send_in_transaction(self, subscription: Subscription, entry: Entry) -> bool:
        """Send *entry* in the transaction in which *subscription* acquires (Part 4 §4.4.3)."""
        queue = self._queue
        link = subscription.link
        transaction = subscription.acquiring
        assert transaction is not None
        if not transaction.has_room:
            link.detach(NO_MORE_WORK)
            return False
        payload = encode_outgoing(entry, queue.wall()) if entry.altered else entry.payload
        enlisted = Enlisted(subscription, transaction, entry, acquired=True)
        try:
            enlisted.delivery = link.send(
                payload,
                enlisted,
                settled=subscription.settled,
                message_format=entry.message_format,
                state=transaction.state,
            )
        except LocalProtocolError as error:
            if exceeds_link(link, error):
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        if subscription.settled:
            enlisted.outcome = ACCEPTED
        transaction.enlist(enlisted)
        entry.attempts += 1
        queue.counts.delivered += 1
        queue.acquired += 1
        if queue.timing.locks is not None and not subscription.settled:
            queue.timing.start_lock(subscription, enlisted.delivery)
        if self.groups is not None:
            self.assign_group(subscription, entry)
        return True

    def return_credit(self, subscription: Subscription) -> None:
        """Return the credit of a draining link if *subscription* gets no more messages now."""
        queue = self._queue
        link = subscription.link
        if not link.draining:
            return
        # Messages still to be requeued are for it as well.
        looking = (
            self.exhausted or bool(queue.deferred.unconcluded) or self._is_searching(subscription)
        )
        if queue.paging.count and not looking:
            looking = queue.paging.awaits_reading(subscription)
        if not looking and (link.credit <= 0 or link.writable):
            link.drained()

    def return_all_credit(self) -> None:
        """Return the credit of all draining links whose consumers get no more messages now."""
        queue = self._queue
        for subscription in [*queue.browsers.values(), *queue.consumers.values()]:
            if subscription.link.draining:
                self.return_credit(subscription)

    def _is_searching(self, subscription: Subscription) -> bool:
        """Return whether the search for *subscription* continues in a later turn."""
        if not subscription.searching:
            return False
        return isinstance(subscription, Browser) or (
            subscription.ready and self._queue.available > 0
        )

    def resume_serving(self, subscription: Subscription) -> None:
        """Serve *subscription* after messages have been read ahead for it."""
        if isinstance(subscription, Browser):
            self._queue.browsing.serve(subscription)
        else:
            self.pump()
        self.return_credit(subscription)

    def activate(self) -> None:
        """Begin to serve the active consumer."""
        active = self.single
        if active is not None and not active.active:
            active.set_active(True)
            if active.link.credit > 0 and not active.feeding:
                active.ready = True
                self.ring_of(active).append(active)

    def _replace_single(self) -> None:
        """Replace the active consumer, which has left, by the first one of the highest priority."""
        queue = self._queue
        self.single = None
        for consumer in queue.consumers.values():
            if self.single is None or consumer.priority > self.single.priority:
                self.single = consumer
        if not queue.timing.paused:
            self.activate()

    def assign_group(self, subscription: Subscription, entry: Entry) -> None:
        """Make *subscription* the owner of the group of *entry*, if it has one."""
        groups = self.groups
        if groups is not None and groups.give(entry, subscription.identity):
            self.restart_searches()

    def restart_searches(self) -> None:
        """Let all consumers examine messages again, after group owners have changed."""
        queue = self._queue
        for consumer in queue.consumers.values():
            consumer.cursor = 0
        queue.shelf.rebuild_heaps()

    def join(self, subscription: Subscription) -> None:
        """Add the new consumer *subscription*, which has no credit yet."""
        priority = subscription.priority
        if priority and not self.levels:
            self.levels.append(0)
            self.rings[0] = self.ring
            self.ring = deque()
        if self.levels and priority not in self.rings:
            self.rings[priority] = deque()
            self.levels.append(priority)
            self.levels.sort(reverse=True)
        if self._queue.single_active:
            subscription.active = False
            if self.single is None:
                self.single = subscription
                subscription.active = not self._queue.timing.paused

    def suspend(self, subscription: Subscription) -> None:
        """Remove *subscription* from its ring, if it is there."""
        if subscription.ready:
            subscription.ready = False
            self.ring_of(subscription).remove(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Remove a consumer that is no longer among those of the queue."""
        self.suspend(subscription)
        consumers = self._queue.consumers
        priority = subscription.priority
        if priority and not any(each.priority == priority for each in consumers.values()):
            self.levels.remove(priority)
            del self.rings[priority]
            if self.levels == [0]:
                self.ring = self.rings[0]
                self.levels.clear()
                self.rings.clear()
        if subscription is self.single:
            self._replace_single()
        self._queue.shelf.release(subscription.identity)
        if self.groups is not None:
            self.groups.leave(subscription.identity)
            self.restart_searches()

    def clear(self) -> None:
        """Remove all consumers from their rings, as the queue has been deleted."""
        self.pumping = self.exhausted = False
        for ring in (self.ring, *self.rings.values()):
            for subscription in ring:
                subscription.ready = False
            ring.clear()
