"""Times of a queue: delays, pauses after failures, limits of deliveries, expiry, and their alarm. Pure."""

from __future__ import annotations

import heapq
from math import inf
from typing import TYPE_CHECKING, Any, Final

from ...outcomes import RELEASED
from ..entries import NEVER, Entry
from .locks import Locks
from .schedule import DelayedMessages
from .shelf import PLACE
from .subscriptions import Subscription

if TYPE_CHECKING:
    from .queue import MessageQueue

#: Messages due at the same time that become available in a row, and overdue deliveries that are
#: released in a row.
_DUE: Final = 250
#: Expired messages that are given up in a row.
SWEPT: Final = 50


class Timing:
    """Messages and deliveries of a queue that wait for a time, and the alarm for the next one.

    Args:
        queue: The queue.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self.schedule: DelayedMessages | None = None
        self.locks: Locks | None = None
        #: Pauses after failures: the shortest and the longest, in seconds, and whether they grow by a
        #: factor of two or by the shortest pause.
        self.pause_s: float = queue.limits.retry_pause_s
        self.pause_max_s: float = queue.limits.retry_pause_max_s
        self.doubles: bool = True
        #: Number of failures that are retried at once.
        self.unpaused: int = 1
        #: Paused messages by their sequence numbers; they are in the schedule too. And a heap of
        #: their ranks, which may contain ranks of messages no longer paused.
        self.paused: dict[int, Entry] = {}
        self.paused_ranks: list[int] = []
        #: Whether the queue may hold messages that expire.
        self.has_expiring: bool = False
        #: Wall-clock time for which the expiry alarm is set, and the time of that alarm.
        self.expires_at: float = NEVER
        self._expiry_alarm: float = inf
        #: Whether :meth:`sweep` has left no work for ``MessageQueue.resume``.
        self.sweep_done: bool = True

    def declare_pauses(
        self, first_s: float | None, longest_s: float | None, *, doubles: bool
    ) -> None:
        """Pause failed messages as their queue declares.

        Args:
            first_s: Seconds after the first failure; None for those of the limits, from the second one.
            longest_s: The longest pause in seconds; None for that of the limits, or *first_s* if that is longer.
            doubles: Whether pauses double with each failure, or grow by the first one.
        """
        limits = self._queue.limits
        self.doubles = doubles
        self.unpaused = 1 if first_s is None else 0
        self.pause_s = limits.retry_pause_s if first_s is None else first_s
        self.pause_max_s = (
            max(limits.retry_pause_max_s, self.pause_s) if longest_s is None else longest_s
        )

    def heaps(self) -> list[Any]:
        """Return the collections of messages that wait, for a caller that removes them."""
        found: list[Any] = [self.paused, self.paused_ranks]
        if self.schedule is not None:
            found += self.schedule.heaps()
        return found

    def clear(self) -> None:
        """Forget all messages that wait."""
        self.schedule = None
        self.has_expiring = False
        self.paused = {}
        self.paused_ranks = []

    def lock(self, lock_s: float) -> None:
        """Limit the time of later unsettled deliveries to *lock_s* seconds; 0 for no limit."""
        queue = self._queue
        if not lock_s:
            self.locks = None
        elif self.locks is None:
            self.locks = Locks(lock_s, queue.monotonic)
        else:
            self.locks.lock_s = lock_s

    @property
    def locks_deliveries(self) -> bool:
        """Whether deliveries that are not settled in time are requeued."""
        return self.locks is not None

    def start_lock(self, subscription: Subscription, delivery: Any) -> None:
        """Start the time limit of *delivery*, which has been sent to *subscription*."""
        queue = self._queue
        if self.locks is not None and self.locks.add(subscription, delivery) < queue.alarm:
            self._set_alarm()

    def _release_locked(self, locked: Any) -> None:
        """Release a delivery that has been unsettled for too long."""
        queue = self._queue
        subscription, delivery, entry = locked
        queue.conclude(subscription, entry, RELEASED)
        queue.settle(delivery, entry, RELEASED)

    def _open_schedule(self) -> DelayedMessages:
        """Return the schedule, which most queues never need."""
        if self.schedule is None:
            self.schedule = DelayedMessages(self._queue.wall, self._queue.monotonic)
        return self.schedule

    def delays(self, entry: Entry) -> bool:
        """Hold *entry* if it is not due yet; return whether that is so."""
        queue = self._queue
        if not self._open_schedule().add(entry):
            entry.due = None
            return False
        queue.delayed += 1
        if entry.stored and entry.sequence >= queue.paging.first:
            queue.paging.out[entry.sequence] = entry
        self._set_alarm()
        return True

    def _end_delay(self, entry: Entry) -> None:
        """Make *entry*, which is due now, AVAILABLE at its position."""
        queue = self._queue
        queue.delayed -= 1
        entry.due = None
        if queue.mark(entry):
            queue.make_available(entry)

    def pause(self, entry: Entry) -> None:
        """Requeue a failed *entry*, at its original place, after a pause.

        A pause that its consumer requested is ``entry.due``, and is kept in the store. Without one the pause
        grows with each failure, and a restart ends it. The first failure is then retried at once unless the
        queue declares pauses: most are transient, and a lost connection counts as one.
        Where order is promised, the messages behind it wait with it: all of the queue with a
        single active consumer, those of its group with groups.
        """
        queue = self._queue
        schedule = self._open_schedule()
        if entry.due is None:
            pause_s = self._pause_after_failures(entry)
            if pause_s <= 0:
                queue.put_back(entry)
                return
            schedule.pause(entry, pause_s)
        elif not schedule.add(entry):
            entry.due = None
            queue.put_back(entry)
            return
        self._hold_paused(entry)

    def _pause_after_failures(self, entry: Entry) -> float:
        """Return the seconds for which the failed *entry* pauses."""
        # A sender may claim any delivery-count; attempts are counted here.
        paused = min(entry.delivery_count, entry.attempts) - self.unpaused
        if paused <= 0:
            return 0.0
        factor = 2.0 ** min(paused - 1, 60) if self.doubles else float(paused)
        pause_s = min(self.pause_s * factor, self.pause_max_s)
        if entry.expires_at != NEVER:
            pause_s = min(pause_s, entry.expires_at - self._queue.wall())
        return pause_s

    def restore(self, entry: Entry) -> bool:
        """Hold *entry* of the store until it is due, if it is not; return whether that is so.

        One that was delivered before had failed, and keeps its place before those that wait with it.
        """
        queue = self._queue
        if entry.due is None:
            return False
        if not entry.attempts:
            return self.delays(entry)
        if not self._open_schedule().add(entry):
            entry.due = None
            return False
        if not queue.mark(entry):
            # Its schedule finds nothing to end then.
            entry.due = None
            return True
        if entry.sequence >= queue.paging.first:
            queue.paging.out[entry.sequence] = entry
        self._hold_paused(entry)
        return True

    def _hold_paused(self, entry: Entry) -> None:
        """Count *entry*, which is in the schedule, as paused, and hold those that must not pass it."""
        queue = self._queue
        queue.delayed += 1
        self.paused[entry.sequence] = entry
        heapq.heappush(self.paused_ranks, queue.shelf.rank(entry))
        active = queue.turns.single
        if active is not None and active.active:
            active.active = False
            if active.ready:
                active.ready = False
                queue.turns.ring_of(active).remove(active)
        if queue.turns.groups is not None:
            queue.turns.groups.hold(entry)
        self._set_alarm()

    def _end_pause(self, entry: Entry) -> None:
        """Make *entry*, whose pause has ended, AVAILABLE unless an operator has taken it."""
        queue = self._queue
        if self.paused.pop(entry.sequence, None) is None:
            return
        queue.delayed -= 1
        entry.due = None
        queue.put_back(entry)
        self.resume_behind(entry)

    def resume_behind(self, entry: Entry) -> None:
        """Deliver the messages that had to wait for *entry*, which is no longer paused."""
        queue = self._queue
        ranks, paused = self.paused_ranks, self.paused
        while ranks and ranks[0] & PLACE not in paused:
            heapq.heappop(ranks)
        if len(ranks) > 2 * len(paused) + 1_000:
            self.paused_ranks = [queue.shelf.rank(each) for each in paused.values()]
            heapq.heapify(self.paused_ranks)
        if not paused:
            queue.turns.activate()
        if queue.turns.groups is not None and queue.turns.groups.free(entry):
            queue.turns.restart_searches()

    def tick(self) -> None:
        """Deliver messages that are due, release overdue deliveries, and give up expired messages.

        Work beyond one turn is left to the next one: the alarm is then due at once.
        """
        queue = self._queue
        queue.alarm = inf
        if queue.deleted:
            return
        if self.schedule is not None:
            due = self.schedule.due(_DUE)
            queue.memory.work -= 2 * len(due)
            for entry in due:
                if entry.due is None or entry.sequence in self.paused:
                    self._end_pause(entry)
                else:
                    self._end_delay(entry)
            if due:
                queue.distribute()
                queue.notify_room()
        if self.locks is not None:
            overdue = self.locks.overdue(_DUE)
            if overdue:
                released: list[Any] = []
                for subscription, delivery in overdue:
                    released.append((subscription, delivery, delivery.context))
                    # An outcome from the peer arrives too late now: the peer is informed, and it is
                    # ignored.
                    delivery.context = RELEASED
                queue.deferred.conclude(released, self._release_locked)
                queue.concluded()
        if self.has_expiring:
            self.expires_at = NEVER
            self._expiry_alarm = inf
            self.sweep()
        self._set_alarm()

    def _set_alarm(self) -> None:
        queue = self._queue
        at = self._expiry_alarm
        if self.schedule is not None:
            at = min(at, self.schedule.next())
        if self.locks is not None:
            at = min(at, self.locks.next())
        if at < queue.alarm:
            queue.alarm = at
            queue.on_alarm(at)

    def watch_front(self) -> None:
        """Set an alarm for the expiry of the first message, if that is next.

        Messages behind it expire once they are first, as messages keep their order.
        """
        queue = self._queue
        shelf = queue.shelf
        if shelf.stale:
            # The rank of a replaced message may hide the first one.
            shelf.drop_stale()
        at = NEVER
        if shelf.head < shelf.next:
            first = shelf.available_at(shelf.head)
            if first is not None:
                at = first.expires_at
        for heap in (shelf.returned, *shelf.apart.values()):
            entry = shelf.available_at(heap[0] & PLACE) if heap else None
            if entry is not None and entry.expires_at < at:
                at = entry.expires_at
        if at < self.expires_at:
            self.expires_at = at
            # A wake-up slightly before the time must not set the alarm again and again.
            self._expiry_alarm = queue.monotonic() + max(0.001, at - queue.wall())
            self._set_alarm()
        elif not queue.available and self.expires_at == NEVER:
            self.has_expiring = False

    def sweep(self) -> None:
        """Give up the expired messages at the front; messages behind them are not examined.

        If there are very many, the rest is left for :meth:`resume`.
        """
        queue = self._queue
        shelf = queue.shelf
        if shelf.stale:
            shelf.drop_stale()
        left = SWEPT
        for avoid, heap in [(None, shelf.returned), *shelf.apart.items()]:
            while left and heap and self._expired(heap[0] & PLACE):
                place = heapq.heappop(heap) & PLACE
                shelf.aside.discard(place)
                queue.expire(shelf.remove(place))
                if shelf.stale:
                    shelf.skip_stale(heap)
                left = left - 1 if queue.memory.work > 0 else 0
            # Messages given up may have been requeued here, which removes empty heaps too.
            if avoid is not None and not heap and shelf.apart.get(avoid) is heap:
                del shelf.apart[avoid]
        while left and shelf.head < shelf.next and self._expired(shelf.head):
            sequence = shelf.head
            entry = shelf.remove(sequence)
            shelf.step()
            queue.expire(entry)
            left = left - 1 if queue.memory.work > 0 else 0
        self.sweep_done = left > 0
        if not self.sweep_done:
            queue.resume_later()
        queue.notify_room()

    def _expired(self, sequence: int) -> bool:
        queue = self._queue
        entry = queue.shelf.available_at(sequence)
        return entry is not None and entry.expires_at != NEVER and entry.expires_at <= queue.wall()
