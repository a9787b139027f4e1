"""Paging: the part of a queue that is in the store only, and not in memory. Pure.

The messages of a paged queue form three ranges of sequence numbers: those in memory, at the front;
those in the store only, from ``Paging.first`` to ``Paging.last``; and those being written to the
store. All messages of the middle range are in the store under their sequence numbers, so that
it can be read in order, and while it exists every new message is appended to it.

A few messages within the middle range are in memory, because consumers with filters took them out
of turn or they are delayed. ``out`` lists them, since a read returns them with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..entries import Entry
from .accounts import DROP_HEAD
from .subscriptions import Browser, Subscription

if TYPE_CHECKING:
    from .queue import MessageQueue

#: A sequence number above all others: that of the first message outside memory if there is none.
NOWHERE_PAGED: Final = 1 << 60
#: Messages read at a time, at most.
CHUNK: Final = 2_000
#: The same for one consumer with filters or browser.
AHEAD: Final = 500


class Ahead:
    """Messages read for one browser or consumer with filters, beyond those in memory."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        #: Index of the next one to look at, and sequence numbers of those taken by others since.
        self._position: int = 0
        self._taken: set[int] = set()
        #: Sequence number after the last message that was looked at.
        self.end: int = 0
        #: Whether a read was requested and has not ended.
        self.wanted: bool = False

    def fill(self, entries: list[Entry]) -> None:
        """Take the result of a read."""
        self._entries = entries
        self._position = 0
        self._taken.clear()
        self.wanted = False

    def next(self, cursor: int, paging: Paging) -> Entry | None:
        """Return the next message from *cursor* on, None if all those read have been looked at."""
        entries = self._entries
        while self._position < len(entries):
            entry = entries[self._position]
            sequence = entry.sequence
            if sequence > paging.last:
                # Already in the store, but the queue has not been notified of the commit yet.
                break
            self._position += 1
            self.end = sequence + 1
            if sequence >= cursor and sequence not in paging.out and sequence not in self._taken:
                return entry
        self._entries = []
        self._position = 0
        self._taken.clear()
        return None

    def step_back(self) -> None:
        """Return to the message that :meth:`next` returned last, which was not looked at."""
        self._position -= 1

    def skip(self, sequence: int) -> None:
        """Skip the message at *sequence*, which another consumer has taken."""
        entries = self._entries
        if self._position < len(entries) and sequence <= entries[-1].sequence:
            self._taken.add(sequence)


class Paging:
    """Part of a queue that is in the store only, and its reading.

    It is empty unless :meth:`enable` was called. All counters of the queue include it.

    Args:
        queue: The queue, whose counters and heaps this object changes.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self.enabled: bool = False
        self._ask: Callable[[], None] = _ignore
        #: Bounds of memory: with more bytes or messages, new messages stay in the store only.
        self._bytes_max: int = NOWHERE_PAGED
        self._messages_max: int = NOWHERE_PAGED
        #: With more bytes or messages than these, new messages have to go through the ledger.
        self.bytes_here_max: int = NOWHERE_PAGED
        self.messages_here_max: int = NOWHERE_PAGED
        #: Number of the available messages that are in the store only, and their bytes.
        self.count: int = 0
        self.bytes: int = 0
        #: First and last sequence numbers of the range in the store; ``NOWHERE_PAGED`` and -1 if
        #: all messages are in memory.
        self.first: int = NOWHERE_PAGED
        self.last: int = -1
        #: Messages in memory within that range; None for those that have left memory since.
        self.out: dict[int, Entry | None] = {}
        #: Messages read for a subscription, by its identity.
        self.ahead: dict[int, Ahead] = {}
        #: Whether the next messages were requested and have not been read.
        self._asked: bool = False
        #: Number of the present range: the results of reads of an earlier one are outdated.
        self._epoch: int = 0
        #: Reads under way, and sequence numbers of messages deleted from the store since the first
        #: began.
        self._reads: int = 0
        self._gone: list[int] = []

    def enable(self, bytes_max: int, messages_max: int, ask: Callable[[], None]) -> None:
        """Leave messages beyond *bytes_max* or *messages_max* in the ledger only, from now on.

        *ask* is called when :meth:`readings` has something to read.
        """
        self.enabled = True
        self._ask = ask
        self._bytes_max = self.bytes_here_max = bytes_max
        self._messages_max = self.messages_here_max = messages_max

    # --- Leaving messages to the store ---

    @property
    def is_full(self) -> bool:
        """Whether memory holds as many messages as it may."""
        queue = self._queue
        return self.enabled and (
            queue.bytes - self.bytes > self._bytes_max
            or queue.available - self.count + queue.pending > self._messages_max
        )

    def begin_if_full(self, entry: Entry) -> None:
        """Start paging with *entry*, which has just been reserved, if memory holds too much."""
        queue = self._queue
        if self.is_full or (queue.memory.scarce and queue.bytes * 16 >= self._bytes_max):
            self.first = entry.sequence
            self.bytes_here_max = -1

    def end(self) -> None:
        """End paging for now, since all messages are in memory."""
        self._epoch += 1
        self._asked = False
        self.bytes = 0
        self.first = NOWHERE_PAGED
        self.last = -1
        self.bytes_here_max = self._bytes_max
        self.out.clear()
        self._gone.clear()
        self.ahead.clear()

    def page_out(self, entry: Entry) -> bool:
        """Leave *entry* to the store; return False if there is room in memory by now."""
        if not self.count and self._has_few():
            self.end()
            return False
        self.leave_to_store(entry)
        self._queue.distribute()
        self._queue.notify_room()
        return True

    def leave_to_store(self, entry: Entry) -> None:
        """Remove *entry*, which is in the store and behind all in memory, from memory."""
        queue = self._queue
        size = len(entry.payload)
        queue.memory.held -= size
        self.bytes += size + entry.rest
        queue.beyond -= entry.rest
        self.last = max(self.last, entry.sequence)
        self.count += 1
        queue.available += 1
        queue.freed = True

    def _has_few(self) -> bool:
        """Return whether memory holds at most half of the bytes and messages that it may."""
        queue = self._queue
        return (
            queue.bytes - self.bytes <= self._bytes_max // 2
            and queue.available - self.count <= self._messages_max // 2
        )

    # --- Reading the next messages ---

    def ask_for_more(self) -> None:
        """Request the next messages from the store before consumers have to wait for them."""
        queue = self._queue
        if self._asked or queue.turns.pumping:
            return
        if (
            queue.available == self.count
            or self._has_few()
            # They are to be given up, to make room.
            or (queue.overflow == DROP_HEAD and queue.drops_unread())
        ):
            self._asked = True
            self._ask()
            return
        for ring in (queue.turns.ring, *queue.turns.rings.values()):
            for each in ring:
                if not each.selective and each.link.credit > 0 and each.link.writable:
                    # The messages in memory are not for this consumer.
                    self._asked = True
                    self._ask()
                    return

    def read_on(self) -> None:
        """Request the next messages even though no consumer waits for them."""
        if self.count and not self._asked:
            self._asked = True
            self._ask()

    def readings(self) -> list[tuple[int, int, int]]:
        """Return the reads to be done now; :meth:`load` or :meth:`load_ahead` follows for each.

        Each is the identity of a subscription, 0 for the queue itself, the first sequence number,
        and the epoch.
        """
        if not self.count:
            return []
        found: list[tuple[int, int, int]] = []
        if self._asked:
            found.append((0, self.first, self._epoch))
        for identity, ahead in self.ahead.items():
            subscription = self._queue.subscription(identity)
            if ahead.wanted and subscription is not None:
                found.append((identity, max(subscription.cursor, self.first), self._epoch))
        self._reads += len(found)
        return found

    def load(self, found: list[Entry], epoch: int) -> int:
        """Take the next messages of those in the store only; return how many are missing there.

        Missing messages are noticed when the store has no more; they are counted as dropped.
        """
        queue = self._queue
        self._end_read()
        if self._epoch != epoch or queue.deleted:
            return 0
        self._asked = False
        lost = 0
        after = self.first if found else self.last + 1
        for entry in found:
            sequence = entry.sequence
            if sequence > self.last:
                break
            after = sequence + 1
            if sequence not in self.out:
                self._move_to_memory(entry)
                queue.shelf.append(entry, sequence)
        if self.count and after > self.last:
            lost = self.count
            queue.counts.dropped += lost
            self._forget_stored()
        elif self.count:
            self.first = after
            if self.out:
                self.out = {place: entry for place, entry in self.out.items() if place >= after}
        else:
            self.end()
        queue.distribute()
        queue.notify_room()
        queue.turns.return_all_credit()
        return lost

    def read_failed(self, identity: int) -> None:
        """Record that a read for the subscription *identity*, or 0 for the queue, has failed."""
        self._end_read()
        if not identity:
            self._asked = False
        elif identity in self.ahead:
            self.ahead[identity].wanted = False

    def read_again(self) -> None:
        """Request reads again that have failed."""
        if not self._queue.deleted:
            self._queue.distribute()
            self._queue.notify_room()

    def begin_reading(self) -> None:
        """Count a read of messages that stay in the store; :meth:`end_reading` follows."""
        self._reads += 1

    def end_reading(self, found: list[Entry]) -> list[Entry]:
        """Return those of *found* that are available now; if in memory, the entries there."""
        available: list[Entry] = []
        for entry in found:
            sequence = entry.sequence
            if self.first <= sequence <= self.last and sequence not in self.out and self.count:
                available.append(entry)
                continue
            here = self._queue.present_at(sequence)
            if here is not None:
                available.append(here)
        self._end_read()
        return available

    def _end_read(self) -> None:
        self._reads -= 1
        if not self._reads:
            for sequence in self._gone:
                self.out.pop(sequence, None)
            self._gone.clear()

    def _move_to_memory(self, entry: Entry) -> None:
        """Move *entry* from the store into memory; the queue then places or delivers it."""
        queue = self._queue
        size = len(entry.payload)
        queue.memory.held += size
        self.bytes -= size + entry.rest
        queue.beyond += entry.rest
        self.count -= 1
        queue.available -= 1
        # It had been due before, or would be among the delayed messages.
        entry.due = None

    # --- Removing messages ---

    def mark_left(self, sequence: int) -> None:
        """Record that a message within the range has left memory."""
        if sequence in self.out:
            self.out[sequence] = None

    def removed(self, sequence: int) -> None:
        """Record that the message at *sequence* was deleted from the store.

        A read under way may still return it, so it stays in ``out`` until the read has ended.
        """
        if sequence in self.out:
            if self._reads:
                self._gone.append(sequence)
            else:
                del self.out[sequence]

    def purge(self) -> int:
        """Drop the messages that are in the store only; return how many there were."""
        dropped = self.count
        ledger = self._queue.ledger
        if dropped and ledger is not None:
            kept = [entry for entry in self.out.values() if entry is not None and entry.stored]
            ledger.discard(self.first, self.last, kept)
            self._forget_stored()
        self._queue.counts.dropped += dropped
        return dropped

    def _forget_stored(self) -> None:
        """Forget the messages that are in the store only."""
        queue = self._queue
        queue.bytes -= self.bytes
        queue.available -= self.count
        self.count = 0
        queue.freed = True
        self.end()

    # --- After a restart ---

    def restore(self, first: int, last: int, count: int, size: int) -> None:
        """Record *count* messages of *size* bytes, from *first* to *last*, that stay in the store.

        Messages in that range that belong in memory are put by :meth:`MessageQueue.restore` before
        and :meth:`fetch` afterwards.
        """
        queue = self._queue
        queue.place_next = max(queue.place_next, last + 1)
        self.first = first
        self.bytes_here_max = -1
        self.last = last
        self.bytes = size
        queue.bytes += size
        self.count = count
        queue.available += count

    def fetch(self, entry: Entry) -> None:
        """Load *entry*, which is counted among those in the store only, into memory."""
        due = entry.due
        self._move_to_memory(entry)
        self.out[entry.sequence] = entry
        if due is not None:
            entry.due = due
            if self._queue.timing.restore(entry):
                return
        self._queue.shelf.place_early(entry)

    # --- Messages for browsers and consumers with filters ---

    def load_ahead(self, identity: int, found: list[Entry], epoch: int) -> int:
        """Take the next messages in the store for a selective consumer or browser to examine.

        Returns 0, since none are missed.
        """
        queue = self._queue
        self._end_read()
        ahead = self.ahead.get(identity)
        subscription = queue.subscription(identity)
        if self._epoch != epoch or queue.deleted or ahead is None or subscription is None:
            return 0
        ahead.fill(found)
        if not found:
            subscription.cursor = self.last + 1
        queue.turns.resume_serving(subscription)
        return 0

    def awaits_reading(self, subscription: Subscription) -> bool:
        """Return whether messages for *subscription* may exist that have not been read."""
        if subscription.selective or isinstance(subscription, Browser):
            ahead = self.ahead.get(subscription.identity)
            return ahead is not None and ahead.wanted
        return subscription.active

    def next_ahead(self, subscription: Subscription) -> Entry | None:
        """Return the next message in the store for *subscription* to examine.

        None if it has to be read first.
        """
        cursor = subscription.cursor = max(subscription.cursor, self.first)
        if cursor > self.last:
            return None
        ahead = self._ahead_for(subscription)
        entry = ahead.next(cursor, self)
        if entry is None:
            subscription.cursor = max(cursor, ahead.end)
            if subscription.cursor <= self.last and not ahead.wanted:
                ahead.wanted = True
                self._ask()
            return None
        subscription.cursor = entry.sequence + 1
        return entry

    def _ahead_for(self, subscription: Subscription) -> Ahead:
        """Return the messages read ahead for *subscription*."""
        found = self.ahead.get(subscription.identity)
        if found is None:
            found = self.ahead[subscription.identity] = Ahead()
        return found

    def ahead_of(self, subscription: Subscription, sequence: int) -> Entry | None:
        """Return the same if it is before *sequence*.

        None means not loaded yet, not absent; ask :meth:`has_reached`.
        """
        if subscription.cursor >= sequence:
            return None
        entry = self.next_ahead(subscription)
        if entry is not None and entry.sequence > sequence:
            subscription.cursor = entry.sequence
            self._ahead_for(subscription).step_back()
            return None
        return entry

    def has_reached(self, subscription: Subscription, sequence: int) -> bool:
        """Return whether *subscription* has examined all in the store before *sequence*."""
        return subscription.cursor >= min(sequence, self.last + 1)

    def acquire(self, subscription: Subscription, before: int = NOWHERE_PAGED) -> Entry | None:
        """Acquire the first message read ahead that *subscription* wants, below *before*."""
        queue = self._queue
        while self.count:
            if queue.memory.work <= 0:
                queue.turns.search_later(subscription)
                break
            entry = self.ahead_of(subscription, before)
            if entry is None:
                break
            if queue.turns.examine(subscription, entry):
                self._move_to_memory(entry)
                self.out[entry.sequence] = entry
                for ahead in self.ahead.values():
                    ahead.skip(entry.sequence)
                if not self.count:
                    self.end()
                return entry
        return None


def _ignore() -> None:
    """Do nothing."""
