"""The queue as it was in one class, with which ``test_queue_parts.py`` compares the queue of today."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf
from sys import maxsize
from typing import Any, Final, Protocol

from amqp_rt.broker.entries import NEVER, NOWHERE, Entry, annotate, encode_outgoing
from amqp_rt.broker.queue.groups import Groups
from amqp_rt.broker.queue.keyed import Marks
from amqp_rt.broker.queue.locks import Locks
from amqp_rt.broker.queue.schedule import DelayedMessages
from amqp_rt.broker.queue.subscriptions import Browser, DistributionNode, Enlisted, Subscription
from amqp_rt.errors import LocalProtocolError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import ACCEPTED, RELEASED, Accepted, Error, Modified, Rejected

#: A sequence number above all others: that of the first message outside memory if there is none.
NOWHERE_PAGED: Final = 1 << 60
#: Messages read at a time, at most.
CHUNK: Final = 2_000
#: The same for one consumer with filters or browser.
AHEAD: Final = 500


class Ahead:
    """Messages read for one browser or consumer with filters, beyond those in memory."""

    __slots__ = ("_entries", "_position", "_taken", "end", "wanted")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        #: Index of the next one to look at, and sequence numbers of those taken by others since.
        self._position = 0
        self._taken: set[int] = set()
        #: Sequence number after the last message that was looked at.
        self.end = 0
        #: Whether a read was requested and has not ended.
        self.wanted = False

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

    def miss(self, sequence: int) -> None:
        """Skip the message at *sequence*, which another consumer has taken."""
        entries = self._entries
        if self._position < len(entries) and sequence <= entries[-1].sequence:
            self._taken.add(sequence)


class Paging:
    """State of the part of a queue that is not in memory.

    Args:
        bytes_max: Bytes of messages in memory beyond which new ones stay in the store only.
        messages_max: The same in messages.
        ask: Requests a read, after which ``MessageQueue.load`` or ``MessageQueue.load_ahead`` is called.
    """

    __slots__ = (
        "ahead",
        "ask",
        "asked",
        "bytes",
        "bytes_max",
        "epoch",
        "gone",
        "last",
        "messages_max",
        "out",
        "reads",
    )

    def __init__(self, bytes_max: int, messages_max: int, ask: Callable[[], None]) -> None:
        self.bytes_max = bytes_max
        self.messages_max = messages_max
        self.ask = ask
        #: Whether the next messages were requested and have not been read.
        self.asked = False
        #: Bytes in the store only, and the last sequence number of the middle range.
        self.bytes = 0
        self.last = -1
        #: Number of the present middle range: the results of reads of an earlier one are outdated.
        self.epoch = 0
        #: Messages in memory within the middle range; None for those that have left memory since.
        self.out: dict[int, Entry | None] = {}
        #: Reads under way, and sequence numbers of messages deleted from the store since the first
        #: began.
        self.reads = 0
        self.gone: list[int] = []
        #: By the identity of the subscription.
        self.ahead: dict[int, Ahead] = {}

    def reset(self) -> None:
        """Clear the state, since all messages are in memory."""
        self.epoch += 1
        self.asked = False
        self.bytes = 0
        self.last = -1
        self.out.clear()
        self.gone.clear()
        self.ahead.clear()

    def look_ahead(self, identity: int) -> Ahead:
        """Return the messages read ahead for the subscription *identity*."""
        found = self.ahead.get(identity)
        if found is None:
            found = self.ahead[identity] = Ahead()
        return found

    def take(self, entry: Entry) -> None:
        """Record that *entry* was loaded into memory out of its turn."""
        self.out[entry.sequence] = entry
        for ahead in self.ahead.values():
            ahead.miss(entry.sequence)

    def reads_for(self, identity: int) -> bool:
        """Return whether a read for the subscription *identity* is under way."""
        ahead = self.ahead.get(identity)
        return ahead is not None and ahead.wanted

    def want(self, ahead: Ahead) -> None:
        """Request a read for the subscription of *ahead*."""
        if not ahead.wanted:
            ahead.wanted = True
            self.ask()

    def forget(self, sequence: int) -> None:
        """Record that the message at *sequence* was deleted from the store.

        A read under way may still return it, so it stays in ``out`` until the read has ended.
        """
        if sequence in self.out:
            if self.reads:
                self.gone.append(sequence)
            else:
                del self.out[sequence]

    def read(self) -> None:
        """Record the end of a read."""
        self.reads -= 1
        if not self.reads:
            for sequence in self.gone:
                self.out.pop(sequence, None)
            self.gone.clear()

    def pass_to(self, sequence: int) -> None:
        """Record that all messages before *sequence* are in memory."""
        if self.out:
            self.out = {place: entry for place, entry in self.out.items() if place >= sequence}


#: Slots of a segment, and the shift and mask that find one.
_SEGMENT: Final = 128
_SHIFT: Final = 7
_MASK: Final = 127

#: The header's ``delivery-count`` is a uint; a sender may begin with its highest value.
_COUNT_MAX: Final = 0xFFFF_FFFF

#: Treatment of messages that exceed the limits of the queue.
BLOCK: Final = "block"
REJECT: Final = "reject"
DROP_HEAD: Final = "drop-head"

#: In heaps the rank is above the sequence number, so that the lowest rank comes first.
_PLACE_BITS: Final = 40
_PLACE: Final = (1 << _PLACE_BITS) - 1

#: Messages that one consumer gets in a row if no other waits.
_RUN: Final = 64

#: Messages delivered in one turn of the event loop, however much credit there is.
_DELIVERED: Final = 1_000

#: Slots that a search passes over, and heaps whose first messages are compared, for a unit of work.
_PASSED: Final = 32

#: Expired messages that are given up in a row.
_SWEPT: Final = 50

#: Messages due at the same time that become available in a row, and overdue deliveries that are
#: released in a row.
_DUE: Final = 250

#: Deferrable work, such as ended links' deliveries to conclude, in one turn of the event loop for
#: all nodes that share their :class:`Memory`: a few milliseconds. Filters that examine messages count
#: as much as they have done.
WORK_OF_A_TURN: Final = 1_000
#: Units of that work for giving one message up, which may make a dead letter of it, and for deleting
#: the queue of one subscription; and for each further copy of that dead letter.
WORK_OF_AN_END: Final = 16
WORK_OF_A_LETTER: Final = 8
#: Messages that may arrive while there is no time to drop those that they replace.
_UNSHED_MAX: Final = 1_000
#: Numbers freed for as much work; freeing a segment of messages takes about as long.
_FREED: Final = 64

#: Results of outcomes: what happens to a message whose delivery has ended.
_ACCEPTED: Final = 0
_REQUEUED: Final = 1
DEAD_LETTERED: Final = 2
DROPPED: Final = 3
_FAILED: Final = 4


_NO_MORE_WORK: Final = Error(
    "amqp:resource-limit-exceeded", "the transaction holds too many deliveries"
)


class Memory:
    """Memory account of messages in all nodes that share this object, in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: int = 0
        #: Deferrable work that may still be done in this turn of the event loop. The host refills
        #: it, and calls the nodes that have left some.
        self.work: int = WORK_OF_A_TURN
        #: Callbacks, by their owner, called one by one when there is room again.
        self.waiting: dict[Any, Callable[[], None]] = {}

    @property
    def scarce(self) -> bool:
        """Whether more than seven eighths are in use."""
        return self.held * 8 > self.limit * 7

    def wait(self, who: Any, on_room: Callable[[], None]) -> None:
        """If memory is scarce, call *on_room* once when it no longer is."""
        if self.scarce:
            self.waiting[who] = on_room

    def notify_waiting(self) -> None:
        """Call the waiting callbacks as long as there is room."""
        for who in list(self.waiting):
            if self.scarce:
                break
            on_room = self.waiting.pop(who, None)
            if on_room is not None:
                on_room()


class Counts:
    """Counters of a node since it was created."""

    def __init__(self) -> None:
        self.enqueued: int = 0
        self.delivered: int = 0
        self.accepted: int = 0
        self.requeued: int = 0
        self.dead_lettered: int = 0
        self.expired: int = 0
        #: Archived without being accepted or dead-lettered: given up without a dead-letter address,
        #: purged, replaced by a later message, missing in the store, or deleted with the queue.
        self.dropped: int = 0


class Ledger(Protocol):
    """Store of one queue's messages. Called for entries that are ``stored``."""

    def remove(self, entry: Entry) -> None:
        """Remove *entry*."""

    def update(self, entry: Entry) -> None:
        """Write the changed state of *entry*, whose payload is unchanged."""

    def rewrite(self, entry: Entry) -> None:
        """Write *entry*, whose payload has changed."""

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        """Remove the messages from *first* to *last*, except *kept*."""

    def settle(self, delivery: Any, outcome: Any) -> None:
        """Settle *delivery* once the changes of its entry are on the disk."""


def effective_priority(priority: int, levels: int) -> int:
    """Return the level, from 0, of *priority* among *levels* distinct priorities (§3.2.1)."""
    if levels >= 10:
        return min(priority, levels - 1)
    lowest = 5 - (levels + 1) // 2
    return min(max(priority, lowest), 4 + levels // 2) - lowest


class _Left:
    """Deliveries to be concluded, in order.

    Args:
        deliveries: Arguments of :meth:`finish`.
        finish: Concludes one of them, unless it has been concluded in the meantime.
    """

    def __init__(self, deliveries: list[Any], finish: Callable[[Any], None]) -> None:
        self.deliveries = deliveries
        self.finish = finish
        #: Number of those concluded.
        self.done: int = 0


class _Segment:
    """Block of neighbouring slots."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.slots: list[Entry | None] = [None] * _SEGMENT
        self.live: int = 0


def _ignore() -> None:
    """Do nothing."""


def _ignore_time(at: float) -> None:
    """Do nothing."""


class MessageQueue(DistributionNode):
    """Messages of one queue and their distribution to consumers.

    Args:
        memory: Shared memory account.
        wall: The wall clock, for times to live.
        dead_letter: Dead-letters a message that is given up: called with the entry, the reason and the
            consumer's error. Returns False if there is no dead-letter address; the message is then
            dropped.
        max_deliveries: Failed deliveries (``delivery-count``) after which a message is given up.
        max_attempts: Acquisitions, with any outcome, after which a requeued message is given up
            (decision 0012).
        length_max: Maximum number of messages, acquired ones included; 0 for unlimited.
        bytes_max: Maximum size in bytes; 0 for ``limits.queue_bytes_max``.
        priorities: Number of distinct priorities (§3.2.1); 1 to ignore them.
        overflow: Treatment of messages beyond these limits: ``BLOCK`` grants no credit for them,
            ``REJECT`` rejects them, ``DROP_HEAD`` gives up the first available ones.
        monotonic: Clock of delays and locks; by default the wall clock.
        marker: Reads the values for the next three from a message; None if none of them is used.
        last_value: Whether only the last of messages with equal keys is kept.
        sorting: Whether messages are sorted by their marks; equal ones stay in order.
        grouping: Whether the messages of a group go to one consumer.
        lock_s: Seconds after which an unsettled delivery is released; 0 for no limit.
        single_active: Whether one consumer gets all messages until it leaves.
        exclusive: Whether only one consumer is allowed.
        limits: Bounds.
    """

    def __init__(
        self,
        memory: Memory,
        wall: Callable[[], float],
        dead_letter: Callable[[Entry, str, Error | None], bool],
        *,
        max_deliveries: int = 0,
        max_attempts: int = 0,
        length_max: int = 0,
        bytes_max: int = 0,
        priorities: int = 1,
        overflow: str = BLOCK,
        monotonic: Callable[[], float] | None = None,
        marker: Callable[[Entry], Marks] | None = None,
        last_value: bool = False,
        sorting: bool = False,
        grouping: bool = False,
        lock_s: float = 0.0,
        single_active: bool = False,
        exclusive: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.overflow = overflow
        self.monotonic = monotonic or wall
        self.single_active = single_active
        self.exclusive = exclusive
        self.last_value = last_value
        self.sorting = sorting
        self.priorities = priorities
        self.memory = memory
        self.wall = wall
        self.dead_letter = dead_letter
        self.max_deliveries = max_deliveries
        self.max_attempts = max_attempts
        self.length_max = length_max
        self.bytes_max = bytes_max or limits.queue_bytes_max
        self.limits = limits
        #: Called when messages have left and ``awaited`` is set.
        self.on_room: Callable[[], None] = _ignore
        #: Whether a sender waits for room.
        self.awaited: bool = False
        #: Called when deferrable work is left in this turn: :meth:`resume` has to be called soon.
        self.on_unfinished: Callable[[], None] = _ignore
        self.unfinished: bool = False
        #: Called with a time of the monotonic clock by which :meth:`tick` has to be called.
        self.on_alarm: Callable[[float], None] = _ignore_time
        #: The last such time, ``inf`` if it has passed.
        self.alarm: float = inf
        self.counts = Counts()
        #: Store of the queue's messages, None if it is in memory only.
        self.ledger: Ledger | None = None
        #: Messages that have a sequence number and room, and are not put yet.
        self.pending: int = 0
        #: Messages of transactions, which have room and no sequence number yet.
        self.held: int = 0
        #: Large messages with a sequence number whose body is arriving.
        self.arriving: int = 0
        #: Messages that are AVAILABLE, and that are ACQUIRED.
        self.available: int = 0
        self.acquired: int = 0
        #: Messages that are not due yet, or paused.
        self.delayed: int = 0
        #: Payload bytes of all of these.
        self.bytes: int = 0
        #: Number of the available messages that are in the store only, and their lowest sequence
        #: number; see :mod:`~amqp_rt.broker.queue.paging`.
        self.paged: int = 0
        self.paged_from: int = NOWHERE_PAGED
        #: Bytes of bodies that are in the store only, of messages in memory.
        self.beyond: int = 0
        #: Called with a subscription, a delivery begun with the part before the body, and its
        #: entry: the callee sends the pieces of the body and then calls :meth:`fed`.
        self.on_pieces: Callable[[Subscription, Any, Entry], None] | None = None
        #: With more bytes or messages than these, new messages have to go through the ledger.
        self.bytes_here_max: int = NOWHERE_PAGED
        self.messages_here_max: int = NOWHERE_PAGED
        self.consumers: dict[int, Subscription] = {}
        self.browsers: dict[int, Browser] = {}
        self.deleted: bool = False
        #: Called when outcomes have left the queue empty, or None.
        self.on_empty: Callable[[], None] | None = None
        self._identities: int = 0
        self._segments: dict[int, _Segment] = {}
        self._tail: _Segment = _Segment(0)
        self._segments[0] = self._tail
        #: Fresh messages are in the slots from ``_head`` up to ``_next``. A slot may be empty, such
        #: as one whose message was reserved and withdrawn, but not the first one.
        self._head: int = 0
        self._next: int = 0
        #: The next sequence number.
        self._place_next: int = 0
        #: Ranks of requeued messages: of those for all consumers, and of others by the consumers
        #: that must not get them. With priorities or sorting, of all messages.
        self._returned: list[int] = []
        self._apart: dict[frozenset[int], list[int]] = {}
        #: Sequence numbers of those between ``_head`` and ``_next`` that are in heaps nevertheless:
        #: a selective consumer had acquired them out of turn.
        self._aside: set[int] = set()
        #: Consumers with credit, in the order in which it came; each takes its turn and goes to the
        #: end.
        self._ring: deque[Subscription] = deque()
        #: If some consumers have a priority other than 0: all priorities with 0, highest first, and
        #: one ring for each in place of ``_ring``.
        self._levels: list[int] = []
        self._rings: dict[int, deque[Subscription]] = {}
        #: Whether messages are being delivered, or must not be; see :meth:`conclude_left`.
        self._pumping: bool = False
        self._left: deque[_Left] = deque()
        #: Whether one of them is being concluded.
        self._concluding: bool = False
        #: Whether this turn's deliveries are used up.
        self._exhausted: bool = False
        #: Whether many messages are being put, to be delivered after the last of them.
        self._gathers: bool = False
        #: Count of deliveries at which those of this turn are used up.
        self._enough: int = 0
        #: Objects of the deleted queue that have not been freed yet.
        self._trash: list[Any] = []
        #: The last consumer or browser that has examined a message, and whether browsers are served
        #: before consumers in the next turn.
        self._tired: Subscription | None = None
        self._browsers_first: bool = True
        self._freed: bool = False
        #: Whether messages are ordered by more than their sequence number.
        self._ranked: bool = priorities > 1 or sorting
        self._marker = marker
        #: The last message with each key, as long as it is in the queue.
        self._latest: dict[Any, Entry] = {}
        #: Number of ranks in heaps whose messages have been replaced.
        self._stale: int = 0
        self._groups: Groups | None = Groups() if grouping else None
        #: The single active consumer.
        self._active: Subscription | None = None
        self._schedule: DelayedMessages | None = None
        #: Paused messages by their sequence numbers; they are in the schedule too. And a heap of
        #: their ranks, which may contain ranks of messages no longer paused.
        self._paused: dict[int, Entry] = {}
        self._paused_ranks: list[int] = []
        self._locks: Locks | None = None
        self._paging: Paging | None = None
        #: Whether the queue may hold messages that expire.
        self._has_expiring: bool = False
        #: Wall-clock time for which the expiry alarm is set, and the time of that alarm.
        self._expires_at: float = NEVER
        self._expiry_alarm: float = inf
        #: Whether :meth:`sweep` has left no work for :meth:`resume`.
        self._swept: bool = True
        #: Number of times that :meth:`_shed` ran out of time since it last dropped all that was
        #: over the limits.
        self._unshed: int = 0
        self.lock(lock_s)

    def lock(self, lock_s: float) -> None:
        """Limit the time of later unsettled deliveries to *lock_s* seconds; 0 for no limit."""
        if not lock_s:
            self._locks = None
        elif self._locks is None:
            self._locks = Locks(lock_s, self.monotonic)
        else:
            self._locks.lock_s = lock_s

    # --- Room ---

    def room(self) -> int:
        """Return the number of messages for which there is room, at the mean size of those here."""
        held = self.available + self.acquired + self.delayed + self.pending + self.held
        memory = self.memory
        free = memory.limit - memory.held
        mean = self.bytes // held if held else 1024
        if self.overflow != BLOCK:
            # Messages beyond the limits are allowed to arrive: they or others are then given up.
            return max(0, free // max(mean, 64))
        free = min(free, self.bytes_max - self.bytes)
        room = free // mean if mean > 64 else free // 64
        if self.length_max and self.length_max - held < room:
            room = self.length_max - held
        return max(0, room)

    def fits(self, size: int) -> bool:
        """Return whether there is room for a message of *size* bytes."""
        memory = self.memory
        if memory.held + size > memory.limit:
            return False
        if self.overflow == DROP_HEAD:
            return self._unshed < _UNSHED_MAX
        if self.overflow == REJECT and self.length_max:
            held = self.available + self.acquired + self.delayed + self.pending + self.held
            if held >= self.length_max:
                return False
        return self.bytes + size <= self.bytes_max

    def _shed(self) -> None:
        """Give up the first available messages while there are too many.

        If there are very many, the rest is left for :meth:`resume`.
        """
        left = _SWEPT
        while self.available > self.paged and self._is_over():
            if self.paged and not self._begins_here():
                # The first ones have to be read before they are given up.
                break
            if not left or self.memory.work <= 0:
                self._unshed += 1
                self._resume_later()
                break
            left -= 1
            self._give_up(self._pop_first(), "overflow", None)
        else:
            self._unshed = 0
        self._tell_of_room()

    def _is_over(self) -> bool:
        """Return whether the messages exceed the limits of number or bytes."""
        return self.bytes > self.bytes_max or (
            self.length_max > 0 and self.available + self.acquired + self.delayed > self.length_max
        )

    def _begins_here(self) -> bool:
        """Return whether the first available message is in memory and not loaded out of turn."""
        if self._head < self._next:
            return True
        return any(
            heap and heap[0] < self.paged_from for heap in (self._returned, *self._apart.values())
        )

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for *entry*, without a sequence number, until its transaction ends."""
        size = len(entry.payload)
        self.bytes += size
        self.memory.held += size
        self.held += 1

    def release_room(self, entry: Entry) -> None:
        """Free the room of a held *entry*, which is put now, or ``notify_waiting`` follows."""
        if not self.deleted:
            size = len(entry.payload)
            self.bytes -= size
            self.memory.held -= size
            self.held -= 1

    def notify_waiting(self) -> None:
        """Notify those that wait for room."""
        self._freed = True
        self._tell_of_room()

    # --- Putting ---

    def reserve(self, entry: Entry) -> None:
        """Reserve a sequence number and room for *entry*.

        :meth:`put` or :meth:`cancel_reserved` follows, in order.
        """
        entry.sequence = self._place_next
        self._place_next += 1
        if self._paging is not None and self.paged_from == NOWHERE_PAGED:
            self._begin_paging(entry)
        size = len(entry.payload)
        self.bytes += size + entry.rest
        self.beyond += entry.rest
        self.memory.held += size
        self.pending += 1

    def cancel_reserved(self, entry: Entry) -> None:
        """Withdraw a reserved *entry*."""
        if self.deleted:
            return
        self.pending -= 1
        self._archive(entry)
        self._tell_of_room()

    def restore(self, entry: Entry) -> None:
        """Put a message from the store at its position. Called in order, before links attach."""
        self._place_next = max(self._place_next, entry.sequence + 1)
        size = len(entry.payload)
        self.bytes += size + entry.rest
        self.beyond += entry.rest
        self.memory.held += size
        if (entry.due is None or not self._delays(entry)) and self._mark(entry):
            self._append(entry, entry.sequence)

    def put(self, entry: Entry) -> None:
        """Take responsibility for *entry* and deliver it if a consumer waits."""
        if self.deleted:
            return
        sequence = entry.sequence
        if sequence < 0:
            later = sequence < NOWHERE
            sequence = entry.sequence = self._place_next
            self._place_next = sequence + 1
            size = len(entry.payload)
            self.bytes += size
            self.memory.held += size
        else:
            self.pending -= 1
            later = entry.due is not None
        self.counts.enqueued += 1
        if later and self._delays(entry):
            return
        if self._marker is not None and not self._mark(entry):
            return
        if sequence >= self.paged_from and self._page_out(entry):
            return
        if self._ring and not self.available and not self._pumping and not self.browsers:
            # No message is before it and a consumer waits: it needs no slot.
            subscription = self._ring[0]
            link = subscription.link
            if (
                link.credit > 0
                and link.writable
                and (
                    not subscription.selective
                    or (self.memory.work > 0 and self._examine(subscription, entry))
                )
                and self._hand(subscription, entry)
            ):
                self._head = self._next = sequence + 1
                if link.credit <= 0 or subscription.feeding:
                    self._retire(self._ring, subscription)
                elif len(self._ring) > 1:
                    self._ring.rotate(-1)
                self._tell_of_room()
                return
        self._append(entry, sequence)
        if self._ring or self._levels or self.browsers or self.overflow == DROP_HEAD:
            self._came()

    def gather(self) -> None:
        """Put messages without delivering them, until :meth:`deliver_gathered` in the same turn."""
        self._gathers = self._pumping = True

    def deliver_gathered(self) -> None:
        """Deliver the messages put since :meth:`gather`, from the next turn on."""
        self._gathers = False
        if not self.deleted:
            self._exhausted = True
            self._resume_later()

    def _came(self) -> None:
        """Deliver after messages have become available."""
        if self._gathers:
            return
        if self.browsers:
            self._browse_all()
        if self._ring or self._levels:
            self.pump()
        if self.overflow == DROP_HEAD:
            self._shed()

    def _append(self, entry: Entry, sequence: int) -> None:
        if self._ranked:
            self._head = self._next = sequence + 1
            self._file(entry)
            self._place(entry, sequence)
            for browser in self.browsers.values():
                browser.backlog.insert(0, self._rank(entry))
            return
        if self._head == self._next:
            self._head = sequence
        self._next = sequence + 1
        self._place(entry, sequence)

    def _rank(self, entry: Entry) -> int:
        """Return the number that orders *entry*: its mark or priority, then its sequence number."""
        if not self._ranked:
            return entry.sequence
        if self.sorting:
            order: int = entry.marks.order
            return order << _PLACE_BITS | entry.sequence
        band = effective_priority(entry.priority, self.priorities)
        return (self.priorities - 1 - band) << _PLACE_BITS | entry.sequence

    def _step(self) -> None:
        """Advance ``_head`` past a removed fresh message to the next one."""
        self._head += 1
        while self._head < self._next and (
            self._look(self._head) is None or (self._aside and self._head in self._aside)
        ):
            if self._head >> _SHIFT in self._segments:
                self._head += 1
            else:
                self._head = min(((self._head >> _SHIFT) + 1) << _SHIFT, self._next)

    # --- Keys and times ---

    def _mark(self, entry: Entry) -> bool:
        """Read the marks of *entry*; return False if a later message has replaced it."""
        if self._marker is None:
            return True
        entry.marks = self._marker(entry)
        key = entry.marks.key
        if not self.last_value or key is None:
            return True
        before = self._latest.get(key)
        if before is not None and before.sequence > entry.sequence:
            # The older message was delayed until now.
            self._replaced(entry)
            return False
        self._latest[key] = entry
        if before is not None:
            before.marks.replaced = True
            if self._look(before.sequence) is before:
                # Not acquired.
                self._remove(before.sequence)
                if before.sequence in self._aside or before.sequence < self._head:
                    self._aside.discard(before.sequence)
                    self._stale += 1
                    if self._stale > self.available + 64:
                        self._regroup()
                elif before.sequence == self._head:
                    self._step()
                self._replaced(before)
                self._tell_of_room()
        return True

    def _replaced(self, entry: Entry) -> None:
        self.counts.dropped += 1
        self._archive(entry)

    def _skim(self) -> None:
        """Remove ranks of replaced messages from the front of each heap."""
        for avoid, heap in [(None, self._returned), *self._apart.items()]:
            while heap and self._look(heap[0] & _PLACE) is None:
                heapq.heappop(heap)
                self._stale -= 1
            if avoid is not None and not heap:
                del self._apart[avoid]

    def _delays(self, entry: Entry) -> bool:
        """Hold *entry* if it is not due yet; return whether that is so."""
        if self._schedule is None:
            self._schedule = DelayedMessages(self.wall, self.monotonic)
        if not self._schedule.add(entry):
            entry.due = None
            return False
        self.delayed += 1
        if self._paging is not None and entry.stored and entry.sequence >= self.paged_from:
            self._paging.out[entry.sequence] = entry
        self._set_alarm()
        return True

    def _mature(self, entry: Entry) -> None:
        """Make *entry*, which is due now, AVAILABLE at its position."""
        self.delayed -= 1
        entry.due = None
        if self._mark(entry):
            self._appear(entry)

    def _appear(self, entry: Entry) -> None:
        """Make *entry* AVAILABLE at its position, which is before later messages."""
        sequence = entry.sequence
        if sequence >= self._next and (not self.paged or sequence < self.paged_from):
            if self.paged:
                for consumer in self.consumers.values():
                    consumer.cursor = min(consumer.cursor, sequence)
            self._append(entry, sequence)
            return
        rank = self._rank(entry)
        for browser in self.browsers.values():
            if max(browser.cursor, self._head) > sequence:
                browser.backlog.insert(0, rank)
        if self._head <= sequence < self._next:
            for consumer in self.consumers.values():
                consumer.cursor = min(consumer.cursor, sequence)
        else:
            self._file(entry)
            if sequence > self._head and not self._ranked:
                self._aside.add(sequence)
        self._place(entry, sequence)

    def tick(self) -> None:
        """Deliver messages that are due, release overdue deliveries, and give up expired messages.

        Work beyond one turn is left to the next one: the alarm is then due at once.
        """
        self.alarm = inf
        if self.deleted:
            return
        if self._schedule is not None:
            due = self._schedule.due(_DUE)
            self.memory.work -= 2 * len(due)
            for entry in due:
                if entry.due is None:
                    self._end_pause(entry)
                else:
                    self._mature(entry)
            if due:
                self._came()
                self._tell_of_room()
        if self._locks is not None:
            overdue = self._locks.overdue(_DUE)
            if overdue:
                released: list[Any] = []
                for subscription, delivery in overdue:
                    released.append((subscription, delivery, delivery.context))
                    # An outcome from the peer arrives too late now: the peer is informed, and it is
                    # ignored.
                    delivery.context = RELEASED
                self.conclude_left(released, self._release_locked)
                self.concluded()
        if self._has_expiring:
            self._expires_at = NEVER
            self._expiry_alarm = inf
            self.sweep()
        self._set_alarm()

    def _release_locked(self, locked: Any) -> None:
        """Release a delivery that has been unsettled for too long."""
        subscription, delivery, entry = locked
        self.conclude(subscription, entry, RELEASED)
        self.settle(delivery, entry, RELEASED)

    def _watch_front(self) -> None:
        """Set an alarm for the expiry of the first message, if that is next.

        Messages behind it expire once they are first, as messages keep their order.
        """
        if self._stale:
            # The rank of a replaced message may hide the first one.
            self._skim()
        at = NEVER
        if self._head < self._next:
            first = self._look(self._head)
            if first is not None:
                at = first.expires_at
        for heap in (self._returned, *self._apart.values()):
            entry = self._look(heap[0] & _PLACE) if heap else None
            if entry is not None and entry.expires_at < at:
                at = entry.expires_at
        if at < self._expires_at:
            self._expires_at = at
            # A wake-up slightly before the time must not set the alarm again and again.
            self._expiry_alarm = self.monotonic() + max(0.001, at - self.wall())
            self._set_alarm()
        elif not self.available and self._expires_at == NEVER:
            self._has_expiring = False

    def _set_alarm(self) -> None:
        at = self._expiry_alarm
        if self._schedule is not None:
            at = min(at, self._schedule.next())
        if self._locks is not None:
            at = min(at, self._locks.next())
        if at < self.alarm:
            self.alarm = at
            self.on_alarm(at)

    def _place(self, entry: Entry, sequence: int) -> None:
        number = sequence >> _SHIFT
        segment = self._tail
        if segment.number != number:
            found = self._segments.get(number)
            if found is None:
                found = _Segment(number)
                self._segments[number] = found
            if number > segment.number:
                if not segment.live:
                    del self._segments[segment.number]
                self._tail = found
            segment = found
        segment.slots[sequence & _MASK] = entry
        segment.live += 1
        self.available += 1
        if entry.expires_at < self._expires_at:
            self._has_expiring = True
            self._watch_front()

    def _look(self, sequence: int) -> Entry | None:
        segment = self._segments.get(sequence >> _SHIFT)
        return None if segment is None else segment.slots[sequence & _MASK]

    def _fresh(self, sequence: int) -> Entry | None:
        """Return the message at *sequence* if it is fresh."""
        if self._aside and sequence in self._aside:
            return None
        return self._look(sequence)

    def _remove(self, sequence: int) -> Entry:
        segment = self._segments[sequence >> _SHIFT]
        entry = segment.slots[sequence & _MASK]
        assert entry is not None
        segment.slots[sequence & _MASK] = None
        segment.live -= 1
        if not segment.live and segment is not self._tail:
            del self._segments[segment.number]
        self.available -= 1
        return entry

    # --- Delivering ---

    def subscribe(
        self,
        *,
        default_outcome: Any,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: Any = None,
        priority: int = 0,
        exclusive: bool = False,
    ) -> Subscription:
        """Return a new consumer, which is to be the endpoint of a sending link.

        Consumers with a higher *priority* get messages before the others. *exclusive* keeps others
        out; call :meth:`locked` before.
        """
        self._identities += 1
        subscription = Subscription(
            self,
            self._identities,
            default_outcome=default_outcome,
            outcomes=outcomes,
            settled=settled,
            filters=filters,
            groups=self._groups,
            priority=priority,
            exclusive=exclusive,
        )
        self.consumers[subscription.identity] = subscription
        if priority and not self._levels:
            self._levels.append(0)
            self._rings[0] = self._ring
            self._ring = deque()
        if self._levels and priority not in self._rings:
            self._rings[priority] = deque()
            self._levels.append(priority)
            self._levels.sort(reverse=True)
        if self.single_active:
            subscription.active = False
            if self._active is None:
                self._active = subscription
                subscription.active = not self._paused
        return subscription

    def locked(self, exclusive: bool) -> bool:
        """Return whether a further consumer, *exclusive* or not, has to be refused."""
        for consumer in self.consumers.values():
            # If one is exclusive, it is the only one.
            return exclusive or self.exclusive or consumer.exclusive
        return False

    @property
    def locks_deliveries(self) -> bool:
        """Whether deliveries that are not settled in time are requeued."""
        return self._locks is not None

    def _ring_of(self, subscription: Subscription) -> deque[Subscription]:
        return self._rings[subscription.priority] if self._levels else self._ring

    def browse(self, *, settled: bool = False, filters: Any = None) -> Browser:
        """Return a new browser of messages available now and arriving later (§3.5.7 *copy*)."""
        self._identities += 1
        older = sorted(self._older(), reverse=True)
        browser = Browser(
            self,
            self._identities,
            backlog=older,
            cursor=self._head,
            settled=settled,
            filters=filters,
        )
        self.browsers[browser.identity] = browser
        return browser

    def serve(self, subscription: Subscription) -> None:
        """Send messages after credit or room has come, and return credit that a drain asks for."""
        if subscription.feeding:
            if subscription.on_writable is not None:
                subscription.on_writable()
            return
        link = subscription.link
        waiting = self.available
        if isinstance(subscription, Browser):
            self._browse(subscription)
            waiting = len(subscription.backlog) + self.paged
            waiting += max(0, self._next - max(subscription.cursor, self._head))
        else:
            if (
                not subscription.ready
                and link.credit > 0
                and subscription.active
                and not self.deleted
            ):
                subscription.ready = True
                self._ring_of(subscription).append(subscription)
            self.pump()
            # The number that passes the filters is unknown without examining all messages.
            waiting = 0 if subscription.selective else self.available
        link.offer(waiting)
        self._give_back(subscription)
        if subscription.ready and link.credit <= 0:
            # Later credit queues up behind that of other consumers.
            self._ring_of(subscription).remove(subscription)
            subscription.ready = False

    def _give_back(self, subscription: Subscription) -> None:
        """Return the credit of a draining link if *subscription* gets no more messages now."""
        link = subscription.link
        if not link.draining:
            return
        # Messages still to be requeued are for it as well.
        looking = self._exhausted or bool(self._left) or self._is_searching(subscription)
        if self.paged and not looking:
            looking = self._awaits_reading(subscription)
        if not looking and (link.credit <= 0 or link.writable):
            link.drained()

    def _is_searching(self, subscription: Subscription) -> bool:
        """Return whether the search for *subscription* continues in a later turn."""
        if not subscription.searching:
            return False
        return isinstance(subscription, Browser) or (subscription.ready and self.available > 0)

    def pump(self) -> None:
        """Deliver while there are messages and consumers that may have them."""
        if self._pumping or self.deleted:
            return
        self._pumping = True
        self._tired = None
        self._enough = self.counts.delivered + _DELIVERED
        try:
            if self._levels:
                for level in self._levels:
                    self._pump_ring(self._rings[level])
            else:
                self._pump_ring(self._ring)
        finally:
            self._pumping = self._exhausted or bool(self._left)
        self._tell_of_room()

    def _pump_ring(self, ring: deque[Subscription]) -> None:
        passed = 0
        # A consumer that may have none of the messages keeps its place, and is passed over once.
        while self.available and passed < len(ring) and not self._exhausted:
            if self.counts.delivered >= self._enough:
                # The rest is delivered in the next turn, before anything else.
                self._exhausted = True
                self.memory.work -= _DELIVERED
                self._resume_later()
                return
            subscription = ring[0]
            if self.memory.work <= -WORK_OF_A_TURN and (subscription.selective or self._apart):
                # Searches end with the work of a turn. Passing over very many consumers or heaps
                # takes as long again, and then those without filters wait too.
                self._exhausted = True
                self._resume_later()
                return
            served = self._serve_run(ring, subscription, 1 if len(ring) > 1 else _RUN)
            if subscription.ready:
                passed = 0 if served else passed + 1
                if len(ring) > 1:
                    ring.rotate(-1)
        tired = self._tired
        if tired is not None and self.memory.work <= 0 and len(ring) > 1 and tired in ring:
            # In the next turn the others search first.
            ring.rotate(-1 - ring.index(tired))

    def _serve_run(self, ring: deque[Subscription], subscription: Subscription, run: int) -> bool:
        """Deliver up to *run* messages to the first in the ring; return whether it got any."""
        served = False
        link = subscription.link
        while run > 0 and self.available:
            if link.credit <= 0 or not link.writable:
                self._retire(ring, subscription)
                self.memory.work -= 4
                if self.memory.work <= -WORK_OF_A_TURN:
                    self._exhausted = True
                    self._resume_later()
                break
            entry = self._take(subscription)
            if entry is None:
                break
            if self._hand(subscription, entry):
                served = True
                run -= 1
                if link.credit <= 0 or subscription.feeding:
                    self._retire(ring, subscription)
                    break
            else:
                self._put_back(entry)
                if not link.attached:
                    # Its endpoint will be notified of the end.
                    self._retire(ring, subscription)
                    break
        return served

    def _retire(self, ring: deque[Subscription], subscription: Subscription) -> None:
        """Remove the first in the ring, which lacks credit or room and joins again with both."""
        ring.popleft()
        subscription.ready = False

    def _take(self, subscription: Subscription) -> Entry | None:
        """Take and return the first message that *subscription* may have."""
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
                if self._stale:
                    self._skim()
                if self._returned:
                    heap = self._returned
                    sequence = heap[0]
                if self._apart:
                    key = self._first_apart(subscription, sequence)
                    if key is not None:
                        heap = self._apart[key]
                        sequence = heap[0]
                if self._head < self._next and (heap is None or self._head < sequence):
                    sequence = self._head
                    heap = None
                if sequence < 0 or (
                    # It was acquired out of turn, and the store holds those that are before it.
                    heap is not None and self.paged and sequence >= self.paged_from
                ):
                    return None
                entry = self._remove(sequence & _PLACE)
                if heap is None:
                    self._step()
                else:
                    self._unfile(entry, heap, key)
            if entry.expires_at == NEVER or entry.expires_at > self.wall():
                return entry
            self._expire(entry)
            if self.memory.work <= 0:
                # Messages behind it expire in the next turn; none is delivered before that.
                self._exhausted = True
                self._resume_later()
                return None

    def _first_apart(self, subscription: Subscription, before: int) -> frozenset[int] | None:
        """Return the key of the heap apart with the lowest rank that *subscription* may have.

        None if that is not lower than *before*, or there is none; -1 is no bound.
        """
        # There may be a heap for each set of consumers.
        self.memory.work -= len(self._apart) // _PASSED
        key: frozenset[int] | None = None
        for avoid, heap in self._apart.items():
            if subscription.identity not in avoid and (before < 0 or heap[0] < before):
                before = heap[0]
                key = avoid
        return key

    def _unfile(self, entry: Entry, heap: list[int], key: frozenset[int] | None) -> None:
        """Remove *entry* from *heap*, where it is the first; *key* is None unless that is apart."""
        heapq.heappop(heap)
        if key is not None and not heap:
            del self._apart[key]
        if self._aside:
            self._aside.discard(entry.sequence)

    def _search(self, subscription: Subscription) -> Entry | None:
        """Take and return the first message that a selective *subscription* wants.

        A search that is too long for this turn continues in :meth:`resume`.
        """
        subscription.searching = False
        while True:
            sequence = -1
            heap: list[int] | None = None
            key: frozenset[int] | None = None
            if self._stale:
                self._skim()
            if self._returned:
                heap = self._returned
                sequence = heap[0]
            if self._apart:
                key = self._first_apart(subscription, sequence)
                if key is not None:
                    heap = self._apart[key]
                    sequence = heap[0]
            if self._head < self._next and (heap is None or self._head < sequence):
                fresh = self._wanted(subscription, self._next if heap is None else sequence)
                if fresh >= 0:
                    wanted = self._remove(fresh)
                    if fresh == self._head:
                        self._step()
                    return wanted
                if subscription.searching:
                    # Later messages must not overtake those that have not been examined.
                    return None
            if heap is None:
                return self._reach(subscription) if self.paged else None
            if self.paged and sequence >= self.paged_from:
                # It was acquired out of turn, and the store may hold some that are before it.
                older = self._reach(subscription, sequence)
                if older is not None:
                    return older
                if not self._has_reached(subscription, sequence):
                    return None
            if self.memory.work <= 0:
                self._search_later(subscription)
                return None
            first = self._look(sequence & _PLACE)
            assert first is not None
            if self._examine(subscription, first):
                self._unfile(self._remove(first.sequence), heap, key)
                return first
            self._set_apart(subscription, heap, key)

    def _examine(self, subscription: Subscription, entry: Entry) -> bool:
        """Return whether a selective *subscription* wants *entry*, and count the work of that."""
        self._tired = subscription
        wanted = subscription.wants(entry)
        filters = subscription.filters
        self.memory.work -= 1 if filters is None else filters.work
        return wanted

    def _search_later(self, subscription: Subscription) -> None:
        """Continue the search for *subscription* in the next turn."""
        subscription.searching = True
        # Very many consumers would take long although none of them examines a message.
        self.memory.work -= 1
        self._resume_later()

    def _wanted(self, subscription: Subscription, before: int) -> int:
        """Return the first fresh message below *before* that *subscription* wants, -1 for none.

        If the work of this turn is used up first, ``subscription.searching`` is set.
        """
        cursor = max(subscription.cursor, self._head)
        last = min(self._next, before)
        memory = self.memory
        while cursor < last:
            if memory.work <= 0:
                subscription.cursor = cursor
                self._search_later(subscription)
                return -1
            if not cursor % _PASSED:
                memory.work -= 1
            entry = self._fresh(cursor)
            if entry is None:
                cursor = self._after_empty(cursor, last)
            elif self._examine(subscription, entry):
                subscription.cursor = cursor
                return cursor
            else:
                cursor += 1
        subscription.cursor = cursor
        return -1

    def _after_empty(self, sequence: int, last: int) -> int:
        """Return the slot after the empty one at *sequence*, or after the segment if it is gone."""
        if sequence >> _SHIFT in self._segments:
            return sequence + 1
        return min(((sequence >> _SHIFT) + 1) << _SHIFT, last)

    def _set_apart(
        self, subscription: Subscription, heap: list[int], key: frozenset[int] | None
    ) -> None:
        """Move the first rank of *heap* to the messages that *subscription* must not get.

        *key* are the consumers that must not get those of *heap*.
        """
        rank = heapq.heappop(heap)
        if key is not None and not heap:
            del self._apart[key]
        avoid = (
            frozenset((subscription.identity,)) if key is None else key | {subscription.identity}
        )
        heapq.heappush(self._apart.setdefault(avoid, []), rank)

    def resume(self) -> None:
        """Continue with deferred work; requested by ``on_unfinished``."""
        self.unfinished = False
        if self._left:
            self._go_on_concluding()
        if self._trash:
            self._discard_some()
        exhausted = self._exhausted
        if exhausted:
            self._exhausted = False
            self._pumping = bool(self._left)
        if not self.deleted:
            if not self._swept:
                self.sweep()
            # In turns, as either may use up the work of each turn for long.
            first = self._browsers_first
            if self.browsers:
                self._browsers_first = not first
                if first:
                    self._browse_all()
            self.pump()
            if self.browsers and not first:
                self._browse_all()
            if self.overflow == DROP_HEAD and not self._exhausted:
                # Only after delivery: messages that consumers have credit for are not dropped.
                self._shed()
            self._give_back_all()

    def _hand(self, subscription: Subscription, entry: Entry) -> bool:
        """Send *entry*; return False if the link has ended or cannot take this message."""
        if self.beyond and entry.pieces:
            return self._hand_in_pieces(subscription, entry)
        if subscription.acquiring is not None:
            return self._hand_in(subscription, entry)
        link = subscription.link
        payload = encode_outgoing(entry, self.wall()) if entry.altered else entry.payload
        settled = subscription.settled
        try:
            delivery = link.send(
                payload,
                None if settled else entry,
                settled=settled,
                message_format=entry.message_format,
            )
        except LocalProtocolError:
            if link.attached:
                # The message is too large for the link.
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        entry.attempts += 1
        self.counts.delivered += 1
        if settled:
            self.counts.accepted += 1
            self._archive(entry)
        else:
            self.acquired += 1
            if self._locks is not None and delivery is not None:
                self._lock(subscription, delivery)
        if self._groups is not None:
            self._give(subscription, entry)
        return True

    def start_lock(self, subscription: Subscription, delivery: Any) -> None:
        """Start the time limit of a delivery that was recorded before it was sent."""
        if self._locks is not None:
            self._lock(subscription, delivery)

    def _lock(self, subscription: Subscription, delivery: Any) -> None:
        assert self._locks is not None
        if self._locks.add(subscription, delivery) < self.alarm:
            self._set_alarm()

    def _give(self, subscription: Subscription, entry: Entry) -> None:
        """Make *subscription* the owner of the group of *entry*."""
        assert self._groups is not None
        if self._groups.give(entry, subscription.identity):
            self._look_again()

    def _look_again(self) -> None:
        """Let all consumers examine messages again, after group owners have changed."""
        for consumer in self.consumers.values():
            consumer.cursor = 0
        self._regroup()

    def _hand_in(self, subscription: Subscription, entry: Entry) -> bool:
        """Send *entry* in the transaction in which *subscription* acquires (Part 4 §4.4.3)."""
        link = subscription.link
        transaction = subscription.acquiring
        if not transaction.has_room:
            link.detach(_NO_MORE_WORK)
            return False
        payload = encode_outgoing(entry, self.wall()) if entry.altered else entry.payload
        enlisted = Enlisted(subscription, transaction, entry, acquired=True)
        try:
            enlisted.delivery = link.send(
                payload,
                enlisted,
                settled=subscription.settled,
                message_format=entry.message_format,
                state=transaction.state,
            )
        except LocalProtocolError:
            if link.attached:
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        if subscription.settled:
            enlisted.outcome = ACCEPTED
        transaction.enlist(enlisted)
        entry.attempts += 1
        self.counts.delivered += 1
        self.acquired += 1
        if self._locks is not None and not subscription.settled:
            self._lock(subscription, enlisted.delivery)
        if self._groups is not None:
            self._give(subscription, entry)
        return True

    # --- Settling ---

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Any) -> None:
        """Apply *outcome* to *entry*, whose delivery has ended (§3.4); ``concluded`` follows."""
        if self.deleted:
            return
        if type(outcome) is Accepted:
            self.acquired -= 1
            self.counts.accepted += 1
            self._archive(entry)
        else:
            self.apply_outcome(entry, self.record_outcome(subscription, entry, outcome))

    def record_outcome(self, subscription: Subscription, entry: Entry, outcome: Any) -> int:
        """Record *outcome* in *entry* and in the ledger; return its result for the message.

        The message is not visible to others before :meth:`apply_outcome`. If it is removed from the
        queue, it is removed from the ledger here, and its dead letter, if any, is added there.
        """
        ledger = self.ledger
        if ledger is not None and not entry.stored:
            ledger = None
        kind = type(outcome)
        reason = ""
        error: Error | None = None
        if kind is Accepted:
            if ledger is not None:
                ledger.remove(entry)
                entry.stored = False
            return _ACCEPTED
        rewritten = False
        if kind is Rejected:
            # Counts as a failed delivery, unlike release (§3.4.3, §3.4.4).
            entry.delivery_count = min(entry.delivery_count + 1, _COUNT_MAX)
            entry.altered = True
            reason = "rejected"
            error = outcome.error
        elif kind is Modified:
            if outcome.delivery_failed:
                entry.delivery_count = min(entry.delivery_count + 1, _COUNT_MAX)
                entry.altered = True
            if outcome.message_annotations:
                size = len(entry.payload)
                annotate(entry, outcome.message_annotations, self.limits)
                self._grow(len(entry.payload) - size)
                rewritten = True
            if outcome.undeliverable_here:
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
        if not reason:
            if self.max_deliveries and entry.delivery_count >= self.max_deliveries:
                reason = "max-deliveries"
            elif self.max_attempts and entry.attempts >= self.max_attempts:
                reason = "max-attempts"
            else:
                if ledger is not None:
                    if rewritten:
                        ledger.rewrite(entry)
                    else:
                        ledger.update(entry)
                failed = kind is Modified and outcome.delivery_failed and subscription.pauses
                return _FAILED if failed else _REQUEUED
        # The dead letter is written before the message is removed, in the same commit.
        self.memory.work -= WORK_OF_AN_END
        result = DEAD_LETTERED if self.dead_letter(entry, reason, error) else DROPPED
        if ledger is not None:
            ledger.remove(entry)
            entry.stored = False
        return result

    def apply_outcome(self, entry: Entry, result: int) -> None:
        """Apply the *result* of an outcome to the acquired *entry*; ``concluded`` follows."""
        if self.deleted:
            return
        self.acquired -= 1
        counts = self.counts
        if result == _REQUEUED:
            counts.requeued += 1
            self._put_back(entry)
            return
        if result == _FAILED:
            counts.requeued += 1
            self._pause(entry)
            return
        if result == _ACCEPTED:
            counts.accepted += 1
        elif result == DEAD_LETTERED:
            counts.dead_lettered += 1
        else:
            counts.dropped += 1
        self._archive(entry)

    def revert_outcome(self, entry: Entry, before: Entry) -> None:
        """Restore *entry* to its state *before* the outcome, which the ledger has refused."""
        if not self.deleted:
            self._grow(len(before.payload) - len(entry.payload))
        entry.payload = before.payload
        entry.delivery_count = before.delivery_count
        entry.altered = before.altered
        entry.avoid = before.avoid
        entry.stored = before.stored

    def _grow(self, size: int) -> None:
        self.bytes += size
        self.memory.held += size

    def settle(self, delivery: Any, entry: Entry, outcome: Any) -> None:
        """Settle *delivery*, whose peer waits for it, once its outcome is safe."""
        if self.ledger is not None and entry.stored:
            self.ledger.settle(delivery, outcome)
        else:
            delivery.settle(outcome)

    def is_busy(self) -> bool:
        """Return whether long work has to wait for a later turn of the event loop."""
        # Pending conclusions come first: dead letters keep the order in which their messages were
        # given up.
        return (self.memory.work <= 0 or bool(self._left)) and not self._concluding

    def conclude_left(self, deliveries: list[Any], finish: Callable[[Any], None]) -> None:
        """Call *finish* for each of *deliveries*: as far as this turn allows, later for the rest.

        No message is delivered before all of them are concluded, since messages behind a requeued
        one must not overtake it. The remaining ones belong to the queue: their link and connection
        may have ended.

        Args:
            deliveries: Deliveries to conclude in this order, after those of earlier calls.
            finish: Called with each of them; must check whether it has been concluded already.
        """
        self._left.append(_Left(deliveries, finish))
        if len(self._left) == 1:
            self._conclude_some()
        if self._left:
            self._pumping = True
            self._resume_later()

    def _resume_later(self) -> None:
        if not self.unfinished:
            self.unfinished = True
            self.on_unfinished()

    def _conclude_some(self) -> None:
        """Conclude pending deliveries as far as the work of this turn allows."""
        memory = self.memory
        while self._left:
            left = self._left[0]
            deliveries = left.deliveries
            while left.done < len(deliveries):
                if memory.work <= 0:
                    return
                delivery = deliveries[left.done]
                # Counted before an error can occur, so that no delivery is concluded twice.
                left.done += 1
                memory.work -= 1
                self._concluding = True
                try:
                    left.finish(delivery)
                finally:
                    self._concluding = False
            self._left.popleft()

    def _go_on_concluding(self) -> None:
        self._conclude_some()
        if self._left:
            self._resume_later()
        else:
            self._pumping = self._exhausted
            self.concluded()
            if not self.deleted:
                self._give_back_all()

    def conclude_all(self) -> None:
        """Conclude all pending deliveries, since the event loop gives no more turns."""
        if self._left:
            work, self.memory.work = self.memory.work, maxsize
            self._go_on_concluding()
            self.memory.work = work

    def concluded(self) -> None:
        """Deliver requeued messages, after a complete batch of outcomes."""
        if self.available and (self._ring or self._levels):
            self.pump()
        self._tell_of_room()
        if self.on_empty is not None and not (self.available or self.acquired or self.delayed):
            self.on_empty()

    def pause(self, subscription: Subscription) -> None:
        """Stop serving a subscription whose link has ended and may be replaced."""
        if subscription.on_writable is not None:
            subscription.on_writable()
        if subscription.ready:
            subscription.ready = False
            self._ring_of(subscription).remove(subscription)

    def claim(self, subscription: Subscription, sequence: int) -> Entry | None:
        """Acquire the available message at *sequence* for *subscription*, as before a restart.

        Returns None if it does not exist.
        """
        entry = self._look(sequence)
        if entry is None:
            return None
        self._remove(sequence)
        self._aside.discard(sequence)
        if self._head <= sequence < self._next:
            if sequence == self._head:
                self._step()
        else:
            for heap in (self._returned, *self._apart.values()):
                heap[:] = [rank for rank in heap if rank & _PLACE != sequence]
                heapq.heapify(heap)
            self._apart = {avoid: heap for avoid, heap in self._apart.items() if heap}
        self.acquired += 1
        return entry

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription that has ended."""
        self.browsers.pop(subscription.identity, None)
        if subscription.on_writable is not None:
            # The callback notices the end and stops sending.
            subscription.on_writable()
        if self._paging is not None:
            self._paging.ahead.pop(subscription.identity, None)
        if self.consumers.pop(subscription.identity, None) is None:
            return
        if subscription.ready:
            subscription.ready = False
            self._ring_of(subscription).remove(subscription)
        priority = subscription.priority
        if priority and not any(each.priority == priority for each in self.consumers.values()):
            self._levels.remove(priority)
            del self._rings[priority]
            if self._levels == [0]:
                self._ring = self._rings[0]
                self._levels.clear()
                self._rings.clear()
        if subscription is self._active:
            self._succeed()
        # Messages that only this consumer must not get are for all consumers now.
        for avoid in [avoid for avoid in self._apart if subscription.identity in avoid]:
            moved = self._apart.pop(avoid)
            rest = avoid - {subscription.identity}
            heap = self._apart.setdefault(rest, []) if rest else self._returned
            heap += moved
            heapq.heapify(heap)
        if self._groups is not None:
            self._groups.leave(subscription.identity)
            self._look_again()

    def _succeed(self) -> None:
        """Replace the active consumer, which has left, by the first one of the highest priority."""
        self._active = None
        for consumer in self.consumers.values():
            if self._active is None or consumer.priority > self._active.priority:
                self._active = consumer
        if not self._paused:
            self._activate()

    def _activate(self) -> None:
        """Begin to serve the active consumer."""
        active = self._active
        if active is not None and not active.active:
            active.active = True
            if active.link is not None and active.link.credit > 0 and not active.feeding:
                active.ready = True
                self._ring_of(active).append(active)

    # --- Pauses after failures ---

    def _pause(self, entry: Entry) -> None:
        """Requeue a failed *entry*, at its original place, after a pause that grows with each failure.

        The first failure is retried at once: most are transient, and a lost connection counts as
        one. The pause is not kept in the store; after a restart the message is available.
        Where order is promised, the messages behind it wait with it: all of the queue with a
        single active consumer, those of its group with groups.
        """
        # A sender may claim any delivery-count; attempts are counted here.
        failures = min(entry.delivery_count, entry.attempts)
        limits = self.limits
        pause_s = 0.0
        if failures > 1:
            pause_s = min(
                limits.retry_pause_s * 2.0 ** min(failures - 2, 60), limits.retry_pause_max_s
            )
        if entry.expires_at != NEVER:
            pause_s = min(pause_s, entry.expires_at - self.wall())
        if pause_s <= 0:
            self._put_back(entry)
            return
        if self._schedule is None:
            self._schedule = DelayedMessages(self.wall, self.monotonic)
        self._schedule.pause(entry, pause_s)
        self.delayed += 1
        self._paused[entry.sequence] = entry
        heapq.heappush(self._paused_ranks, self._rank(entry))
        active = self._active
        if active is not None and active.active:
            active.active = False
            if active.ready:
                active.ready = False
                self._ring_of(active).remove(active)
        if self._groups is not None:
            self._groups.hold(entry)
        self._set_alarm()

    def _end_pause(self, entry: Entry) -> None:
        """Make *entry*, whose pause has ended, AVAILABLE unless an operator has taken it."""
        if self._paused.pop(entry.sequence, None) is None:
            return
        self.delayed -= 1
        self._put_back(entry)
        self._go_on_without(entry)

    def _go_on_without(self, entry: Entry) -> None:
        """Deliver the messages that had to wait for *entry*, which is no longer paused."""
        ranks, paused = self._paused_ranks, self._paused
        while ranks and ranks[0] & _PLACE not in paused:
            heapq.heappop(ranks)
        if len(ranks) > 2 * len(paused) + 1_000:
            self._paused_ranks = [self._rank(each) for each in paused.values()]
            heapq.heapify(self._paused_ranks)
        if not paused:
            self._activate()
        if self._groups is not None and self._groups.free(entry):
            self._look_again()

    def _put_back(self, entry: Entry) -> None:
        """Make *entry* AVAILABLE at its position, unless a later message has replaced it."""
        if self.last_value and entry.marks.replaced:
            self._replaced(entry)
            return
        if entry.first_acquirer:
            entry.altered = True
        self._file(entry)
        self._place(entry, entry.sequence)
        if entry.sequence > self._head and not self._ranked:
            self._aside.add(entry.sequence)

    def _file(self, entry: Entry) -> None:
        """Add *entry* to the heap for the consumers that may have it.

        A consumer with filters may have it until it has examined it; see :meth:`_set_apart`.
        """
        avoid = entry.avoid
        heap = self._returned
        if avoid:
            avoid = entry.avoid = frozenset(link for link in avoid if link in self.consumers)
            if avoid:
                heap = self._apart.setdefault(avoid, [])
        heapq.heappush(heap, self._rank(entry))

    def _regroup(self) -> None:
        """Sort all requeued messages into heaps again by the consumers that may have them."""
        older = self._older()
        self._returned.clear()
        self._apart.clear()
        self._stale = 0
        for rank in older:
            entry = self._look(rank & _PLACE)
            if entry is not None:
                self._file(entry)

    def _archive(self, entry: Entry) -> None:
        # The guards avoid looking at each entry in queues without such messages.
        size = len(entry.payload)
        self.bytes -= size
        self.memory.held -= size
        if self.beyond:
            self.bytes -= entry.rest
            self.beyond -= entry.rest
        self._freed = True
        if self.ledger is not None and entry.stored:
            self.ledger.remove(entry)
        if self.paged_from != NOWHERE_PAGED and entry.sequence >= self.paged_from:
            self._left_from_among_paged(entry.sequence)
        if self._latest and entry.marks is not None and self._latest.get(entry.marks.key) is entry:
            del self._latest[entry.marks.key]

    def _expire(self, entry: Entry) -> None:
        self.counts.expired += 1
        self._give_up(entry, "expired", None)

    def _give_up(self, entry: Entry, reason: str, error: Error | None) -> None:
        # The dead letter is written before the message is removed, in the same commit.
        self.memory.work -= WORK_OF_AN_END
        if self.dead_letter(entry, reason, error):
            self.counts.dead_lettered += 1
        else:
            self.counts.dropped += 1
        self._archive(entry)

    def _tell_of_room(self) -> None:
        if self.paged:
            self._ask_for_more()
        if self._has_expiring:
            self._watch_front()
        if self._freed:
            self._freed = False
            if self.awaited:
                self.on_room()
            if self.memory.waiting:
                self.memory.notify_waiting()

    # --- Messages in pieces ---

    def expect(self, entry: Entry) -> None:
        """Give *entry*, whose body is going to arrive, a sequence number and room.

        :meth:`arrive` or :meth:`forgo` follows.
        """
        entry.sequence = self._place_next
        self._place_next += 1
        size = len(entry.payload)
        self.bytes += size
        self.memory.held += size
        self.arriving += 1

    def grow(self, entry: Entry, size: int) -> None:
        """Count *size* more bytes of the body, which are being written to the store."""
        if not self.deleted:
            entry.rest += size
            self.bytes += size
            self.beyond += size

    def forgo(self, entry: Entry) -> None:
        """Withdraw an expected *entry*."""
        if not self.deleted:
            self.arriving -= 1
            self._archive(entry)
            self._tell_of_room()

    def arrive(self, entry: Entry) -> None:
        """Make an expected *entry*, which is kept completely, AVAILABLE and deliver it."""
        if self.deleted:
            return
        self.arriving -= 1
        self.counts.enqueued += 1
        paging = self._paging
        sequence = entry.sequence
        if paging is None or sequence < self.paged_from:
            self._appear(entry)
        elif not self.paged:
            self._all_here()
            self._appear(entry)
        else:
            # It is read together with its neighbours.
            if any(browser.cursor > sequence for browser in self.browsers.values()):
                # These browsers have passed it: keep it in memory for them, without its body.
                paging.out[sequence] = entry
                self._appear(entry)
                for browser in self.browsers.values():
                    if browser.cursor <= sequence:
                        browser.backlog.append(sequence)
                        browser.backlog.sort(reverse=True)
                self._came()
                return
            for identity, consumer in self.consumers.items():
                if consumer.cursor > sequence:
                    consumer.cursor = sequence
                    paging.ahead.pop(identity, None)
            self._leave_to_store(paging, entry)
        self._came()
        self._tell_of_room()

    def _hand_in_pieces(self, subscription: Subscription, entry: Entry) -> bool:
        """Begin to send *entry*; the subscription gets no other message until it is complete."""
        link = subscription.link
        transaction = subscription.acquiring
        settled = subscription.settled
        if subscription.recorder is not None:
            # The recorded state of a delivery would have to include its payload.
            entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        context: Any = None if settled else entry
        enlisted: Enlisted | None = None
        if transaction is not None:
            if not transaction.has_room:
                link.detach(_NO_MORE_WORK)
                return False
            context = enlisted = Enlisted(subscription, transaction, entry, acquired=True)
        payload = encode_outgoing(entry, self.wall()) if entry.altered else entry.payload
        size = len(entry.payload) + entry.rest
        try:
            if 0 < link.max_message_size < size:
                raise LocalProtocolError("the message is larger than the peer takes")
            delivery = link.send(
                payload,
                context,
                settled=settled,
                message_format=entry.message_format,
                state=None if transaction is None else transaction.state,
                more=True,
            )
        except LocalProtocolError:
            if link.attached:
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        if enlisted is not None:
            enlisted.delivery = delivery
            transaction.enlist(enlisted)
        entry.attempts += 1
        self.counts.delivered += 1
        self.acquired += 1
        if self._locks is not None and not settled:
            self._lock(subscription, delivery)
        if self._groups is not None:
            self._give(subscription, entry)
        self._feed(subscription, delivery, entry)
        return True

    def _show_in_pieces(self, browser: Browser, payload: Any, entry: Entry) -> None:
        link = browser.link
        if 0 < link.max_message_size < len(entry.payload) + entry.rest:
            raise LocalProtocolError("the message is larger than the peer takes")
        delivery = link.send(
            payload,
            None,
            settled=browser.settled,
            message_format=entry.message_format,
            more=True,
        )
        self._feed(browser, delivery, entry)

    def _feed(self, subscription: Subscription, delivery: Any, entry: Entry) -> None:
        assert self.on_pieces is not None
        subscription.feeding = True
        self.on_pieces(subscription, delivery, entry)

    def fed(self, subscription: Subscription, delivery: Any, entry: Entry, outcome: Any) -> None:
        """Finish the sending of *entry* in pieces.

        *outcome* is None if all pieces were sent, and otherwise the outcome of the abandoned
        delivery, unless that has another one.
        """
        subscription.feeding = False
        subscription.on_writable = None
        if self.deleted:
            return
        enlisted = delivery.context
        if isinstance(enlisted, Enlisted):
            if outcome is not None:
                # The consumer cannot decide about a message that it did not receive completely.
                enlisted.transaction.fail("a large message could not be sent whole")
            elif subscription.settled and enlisted.outcome is None:
                enlisted.outcome = ACCEPTED
        context = delivery.context
        if isinstance(subscription, Browser) or isinstance(context, Enlisted):
            pass
        elif subscription.settled and (context is None or context is entry):
            self.conclude(subscription, entry, ACCEPTED if outcome is None else outcome)
            self.concluded()
        elif outcome is not None and delivery.context is entry:
            delivery.context = outcome
            self.conclude(subscription, entry, outcome)
            self.concluded()
        if subscription.link.attached:
            self.serve(subscription)

    # --- Paging ---

    def page(self, bytes_max: int, messages_max: int, ask: Callable[[], None]) -> None:
        """Page the queue: messages beyond *bytes_max* or *messages_max* stay in the ledger only.

        *ask* is called when :meth:`readings` has something to read.
        """
        self._paging = Paging(bytes_max, messages_max, ask)
        self.bytes_here_max = bytes_max
        self.messages_here_max = messages_max

    @property
    def in_order(self) -> bool:
        """Whether messages are always delivered in the order of arrival."""
        return not self._ranked and self._marker is None

    @property
    def is_full(self) -> bool:
        """Whether memory holds as many messages as it may."""
        paging = self._paging
        return paging is not None and (
            self.bytes - paging.bytes > paging.bytes_max
            or self.available - self.paged + self.pending > paging.messages_max
        )

    def _begin_paging(self, entry: Entry) -> None:
        """Start paging with *entry* if memory holds too much."""
        paging = self._paging
        assert paging is not None
        if self.is_full or (self.memory.scarce and self.bytes * 16 >= paging.bytes_max):
            self.paged_from = entry.sequence
            self.bytes_here_max = -1

    def _all_here(self) -> None:
        """End paging, since all messages are in memory."""
        paging = self._paging
        assert paging is not None
        paging.reset()
        self.paged_from = NOWHERE_PAGED
        self.bytes_here_max = paging.bytes_max

    def _page_out(self, entry: Entry) -> bool:
        """Leave *entry* to the store; return False if there is room in memory by now."""
        paging = self._paging
        assert paging is not None
        if not self.paged and self._has_few(paging):
            self._all_here()
            return False
        self._leave_to_store(paging, entry)
        self._came()
        self._tell_of_room()
        return True

    def _leave_to_store(self, paging: Paging, entry: Entry) -> None:
        size = len(entry.payload)
        self.memory.held -= size
        paging.bytes += size + entry.rest
        self.beyond -= entry.rest
        paging.last = max(paging.last, entry.sequence)
        self.paged += 1
        self.available += 1
        self._freed = True

    def _has_few(self, paging: Paging) -> bool:
        """Return whether memory holds at most half of the bytes and messages that it may."""
        return (
            self.bytes - paging.bytes <= paging.bytes_max // 2
            and self.available - self.paged <= paging.messages_max // 2
        )

    def _ask_for_more(self) -> None:
        """Request the next messages from the store before consumers have to wait for them."""
        paging = self._paging
        assert paging is not None
        if paging.asked or self._pumping:
            return
        if (
            self.available == self.paged
            or self._has_few(paging)
            # They are to be given up, to make room.
            or (self.overflow == DROP_HEAD and self._is_over() and not self._begins_here())
            # The messages in memory are not for the waiting consumers.
            or any(
                not each.selective and each.link.credit > 0 and each.link.writable
                for ring in (self._ring, *self._rings.values())
                for each in ring
            )
        ):
            paging.asked = True
            paging.ask()

    def readings(self) -> list[tuple[int, int, int]]:
        """Return the reads to be done now; :meth:`load` or :meth:`load_ahead` follows for each.

        Each is the identity of a subscription, 0 for the queue itself, the first sequence number,
        and the epoch.
        """
        paging = self._paging
        if paging is None or not self.paged:
            return []
        found: list[tuple[int, int, int]] = []
        if paging.asked:
            found.append((0, self.paged_from, paging.epoch))
        for identity, ahead in paging.ahead.items():
            subscription: Subscription | None = self.consumers.get(identity)
            if subscription is None:
                subscription = self.browsers.get(identity)
            if ahead.wanted and subscription is not None:
                found.append((identity, max(subscription.cursor, self.paged_from), paging.epoch))
        paging.reads += len(found)
        return found

    def load(self, found: list[Entry], epoch: int) -> int:
        """Take the next messages of those in the store only; return how many are missing there.

        Missing messages are noticed when the store has no more; they are counted as dropped.
        """
        paging = self._paging
        assert paging is not None
        paging.read()
        if paging.epoch != epoch or self.deleted:
            return 0
        paging.asked = False
        lost = 0
        after = self.paged_from if found else paging.last + 1
        for entry in found:
            sequence = entry.sequence
            if sequence > paging.last:
                break
            after = sequence + 1
            if sequence not in paging.out:
                self._come_in(entry)
                self._append(entry, sequence)
        if self.paged and after > paging.last:
            lost = self.paged
            self.counts.dropped += lost
            self._lose_paged()
        elif self.paged:
            self.paged_from = after
            paging.pass_to(after)
        else:
            self._all_here()
        self._came()
        self._tell_of_room()
        self._give_back_all()
        return lost

    def _come_in(self, entry: Entry) -> None:
        """Move *entry* from the store into memory; :meth:`_place` follows, or it is acquired."""
        paging = self._paging
        assert paging is not None
        size = len(entry.payload)
        self.memory.held += size
        paging.bytes -= size + entry.rest
        self.beyond += entry.rest
        self.paged -= 1
        self.available -= 1
        # It had been due before, or would be among the delayed messages.
        entry.due = None

    def _lose_paged(self) -> None:
        """Forget the messages that are in the store only."""
        paging = self._paging
        assert paging is not None
        self.bytes -= paging.bytes
        self.available -= self.paged
        self.paged = 0
        self._freed = True
        self._all_here()

    def _drop_paged(self) -> None:
        """Remove the messages that are in the store only."""
        paging = self._paging
        if self.paged and paging is not None and self.ledger is not None:
            kept = [entry for entry in paging.out.values() if entry is not None and entry.stored]
            self.ledger.discard(self.paged_from, paging.last, kept)
            self._lose_paged()

    def read_failed(self, identity: int) -> None:
        """Record that a read for the subscription *identity*, or 0 for the queue, has failed."""
        paging = self._paging
        assert paging is not None
        paging.read()
        if not identity:
            paging.asked = False
        elif identity in paging.ahead:
            paging.ahead[identity].wanted = False

    def read_on(self) -> None:
        """Request the next messages even though no consumer waits for them."""
        paging = self._paging
        if self.paged and paging is not None and not paging.asked:
            paging.asked = True
            paging.ask()

    def begin_reading(self) -> None:
        """Count a read of messages that stay in the store; :meth:`end_reading` follows."""
        paging = self._paging
        assert paging is not None
        paging.reads += 1

    def end_reading(self, found: list[Entry]) -> list[Entry]:
        """Return those of *found* that are available now; if in memory, the entries there."""
        paging = self._paging
        assert paging is not None
        available: list[Entry] = []
        for entry in found:
            sequence = entry.sequence
            if (
                self.paged_from <= sequence <= paging.last
                and sequence not in paging.out
                and self.paged
            ):
                available.append(entry)
                continue
            here = self._present(sequence)
            if here is not None:
                available.append(here)
        paging.read()
        return available

    def read_again(self) -> None:
        """Request reads again that have failed."""
        if not self.deleted:
            self._came()
            self._tell_of_room()

    def restore_paged(self, first: int, last: int, count: int, size: int) -> None:
        """Record *count* messages of *size* bytes, from *first* to *last*, that stay in the store.

        Messages in that range that belong in memory are put by :meth:`restore` before and
        :meth:`fetch` afterwards.
        """
        paging = self._paging
        assert paging is not None
        self._place_next = max(self._place_next, last + 1)
        self.paged_from = first
        self.bytes_here_max = -1
        paging.last = last
        paging.bytes = size
        self.bytes += size
        self.paged = count
        self.available += count

    def fetch(self, entry: Entry) -> None:
        """Load *entry*, which is counted among those in the store only, into memory."""
        paging = self._paging
        assert paging is not None
        due = entry.due
        self._come_in(entry)
        paging.out[entry.sequence] = entry
        if due is not None:
            entry.due = due
            if self._delays(entry):
                return
        self._file(entry)
        self._aside.add(entry.sequence)
        self._place(entry, entry.sequence)

    def _left_from_among_paged(self, sequence: int) -> None:
        paging = self._paging
        if paging is not None and sequence in paging.out:
            paging.out[sequence] = None

    def removed(self, sequence: int) -> None:
        """Record that the message at *sequence* was deleted from the store."""
        if self._paging is not None:
            self._paging.forget(sequence)

    def load_ahead(self, identity: int, found: list[Entry], epoch: int) -> int:
        """Take the next messages in the store for a selective consumer or browser to examine.

        Returns 0, since none are missed.
        """
        paging = self._paging
        assert paging is not None
        paging.read()
        ahead = paging.ahead.get(identity)
        subscription: Subscription | None = self.consumers.get(identity)
        if subscription is None:
            subscription = self.browsers.get(identity)
        if paging.epoch != epoch or self.deleted or ahead is None or subscription is None:
            return 0
        ahead.fill(found)
        if not found:
            subscription.cursor = paging.last + 1
        if isinstance(subscription, Browser):
            self._browse(subscription)
        else:
            self.pump()
        if subscription.link is not None:
            self._give_back(subscription)
        return 0

    def _ahead(self, subscription: Subscription) -> Entry | None:
        """Return the next message in the store for *subscription* to examine.

        None if it has to be read first.
        """
        paging = self._paging
        assert paging is not None
        cursor = subscription.cursor = max(subscription.cursor, self.paged_from)
        if cursor > paging.last:
            return None
        ahead = paging.look_ahead(subscription.identity)
        entry: Entry | None = ahead.next(cursor, paging)
        if entry is None:
            subscription.cursor = max(cursor, ahead.end)
            if subscription.cursor <= paging.last:
                paging.want(ahead)
            return None
        subscription.cursor = entry.sequence + 1
        return entry

    def _ahead_of(self, subscription: Subscription, sequence: int) -> Entry | None:
        """Return the same if it is before *sequence*.

        None means not loaded yet, not absent; ask :meth:`_has_reached`.
        """
        paging = self._paging
        assert paging is not None
        if subscription.cursor >= sequence:
            return None
        entry = self._ahead(subscription)
        if entry is not None and entry.sequence > sequence:
            subscription.cursor = entry.sequence
            paging.look_ahead(subscription.identity).step_back()
            return None
        return entry

    def _has_reached(self, subscription: Subscription, sequence: int) -> bool:
        """Return whether *subscription* has examined all in the store before *sequence*."""
        paging = self._paging
        assert paging is not None
        return subscription.cursor >= min(sequence, paging.last + 1)

    def _reach(self, subscription: Subscription, before: int = NOWHERE_PAGED) -> Entry | None:
        """Acquire the first message read ahead that *subscription* wants, below *before*."""
        paging = self._paging
        assert paging is not None
        while self.paged:
            if self.memory.work <= 0:
                self._search_later(subscription)
                break
            entry = self._ahead_of(subscription, before)
            if entry is None:
                break
            if self._examine(subscription, entry):
                self._come_in(entry)
                paging.take(entry)
                if not self.paged:
                    self._all_here()
                return entry
        return None

    def _awaits_reading(self, subscription: Subscription) -> bool:
        """Return whether messages for *subscription* may exist that have not been read."""
        paging = self._paging
        assert paging is not None
        if subscription.selective or isinstance(subscription, Browser):
            return paging.reads_for(subscription.identity)
        return subscription.active

    def _give_back_all(self) -> None:
        for subscription in [*self.browsers.values(), *self.consumers.values()]:
            if subscription.link is not None and subscription.link.draining:
                self._give_back(subscription)

    # --- Browsing ---

    def _unseen(self, browser: Browser) -> int:
        """Return the rank or sequence number that *browser* is to see next, -1 for none.

        It is either the last of its backlog or its cursor.
        """
        cursor = browser.cursor = max(browser.cursor, self._head)
        if browser.backlog:
            sequence = browser.backlog[-1]
            if not self.paged or sequence < self.paged_from or cursor >= self._next:
                return sequence
        return cursor if cursor < self._next else -1

    def _browse_all(self) -> None:
        """Serve browsers as far as the work of this turn allows, the rest in the next one."""
        memory = self.memory
        served: list[Browser] = []
        for browser in list(self.browsers.values()):
            if memory.work <= 0:
                # The others come first in the next turn.
                for each in served:
                    if self.browsers.pop(each.identity, None) is not None:
                        self.browsers[each.identity] = each
                self._resume_later()
                return
            memory.work -= 1
            served.append(browser)
            self._browse(browser)

    def _browse(self, browser: Browser) -> None:
        """Send copies to *browser* as far as its credit and the work of this turn allow."""
        link = browser.link
        if link is None or self.deleted:
            return
        memory = self.memory
        browser.searching = False
        while link.credit > 0 and link.writable and not browser.feeding:
            sequence = self._unseen(browser)
            if memory.work <= 0 and (sequence >= 0 or self.paged):
                browser.searching = True
                self._resume_later()
                return
            late = bool(browser.backlog) and sequence == browser.backlog[-1]
            if late and self.paged and sequence >= self.paged_from:
                # It became available out of turn, and the store may hold some that are before it.
                entry = self._ahead_of(browser, sequence)
                if entry is not None:
                    sequence = entry.sequence
                    late = False
                elif self._has_reached(browser, sequence):
                    entry = self._look(sequence)
                else:
                    return
            elif sequence >= 0:
                entry = self._look(sequence & _PLACE) if late else self._fresh(sequence)
                if entry is None and not late:
                    if not sequence % _PASSED:
                        memory.work -= 1
                    browser.cursor = self._after_empty(sequence, self._next)
                    continue
            else:
                entry = self._ahead(browser) if self.paged else None
                if entry is None:
                    return
                sequence = entry.sequence
            if entry is not None and browser.selective and not self._examine(browser, entry):
                entry = None
            else:
                memory.work -= 1
            if entry is not None and (entry.expires_at == NEVER or entry.expires_at > self.wall()):
                payload = encode_outgoing(entry, self.wall()) if entry.altered else entry.payload
                try:
                    if entry.pieces:
                        self._show_in_pieces(browser, payload, entry)
                    else:
                        link.send(
                            payload,
                            None,
                            settled=browser.settled,
                            message_format=entry.message_format,
                        )
                except LocalProtocolError:
                    if not link.attached:
                        return
            if late:
                browser.backlog.pop()
            else:
                browser.cursor = sequence + 1

    # --- Operations of operators ---

    def _older(self) -> list[int]:
        """Return the ranks of available messages that are not fresh, in no order."""
        return [*self._returned, *chain.from_iterable(self._apart.values())]

    def peek(self, count: int, after: int = -1, before: int = NOWHERE_PAGED) -> list[Entry]:
        """Return the first *count* messages that are available or paused.

        Their sequence numbers are higher than *after* and lower than *before*; of a paged queue
        only those before the paged range. The work depends on *count* and *after*, not on the
        number of messages.
        """
        found: list[Entry] = []
        if count <= 0:
            return found
        before = min(before, self.paged_from)
        fresh = range(max(self._head, after + 1), min(self._next, before))
        ways: list[Iterable[int]] = [_in_order(heap) for heap in self._heaps() if heap]
        last = -1
        for rank in heapq.merge(*ways, fresh):
            if rank == last:
                # Also among the fresh ones, or paused before.
                continue
            last = rank
            sequence = rank & _PLACE
            if not after < sequence < before:
                if self._ranked or sequence <= after:
                    continue
                break
            entry = self._present(sequence)
            if entry is not None:
                found.append(entry)
                if len(found) == count:
                    break
        return found

    def _heaps(self) -> list[list[int]]:
        """Return the heaps of ranks of messages that are not fresh."""
        return [self._returned, *self._apart.values(), self._paused_ranks]

    def _present(self, sequence: int) -> Entry | None:
        """Return the message at *sequence* if it is AVAILABLE or paused."""
        entry = self._look(sequence)
        if entry is None and self._paused:
            entry = self._paused.get(sequence)
            if entry is not None and self.last_value and entry.marks.replaced:
                return None
        return entry

    @property
    def present(self) -> int:
        """Number of messages visible to operators: AVAILABLE or paused."""
        return self.available + len(self._paused)

    @property
    def bytes_in_memory(self) -> int:
        """Part of ``bytes`` that is in memory: the queue's share of the memory account."""
        paged = 0 if self._paging is None else self._paging.bytes
        return self.bytes - self.beyond - paged

    @property
    def place_next(self) -> int:
        """Sequence number of the next message."""
        return self._place_next

    def withdraw(self, count: int, before: int = NOWHERE_PAGED) -> list[Entry]:
        """Remove and return the first *count* messages that :meth:`peek` sees."""
        found = self.peek(count, before=before)
        self._forget(found)
        return found

    def drop(self, count: int, before: int = NOWHERE_PAGED) -> int:
        """Drop the first *count* messages that :meth:`peek` sees; return how many there were."""
        found = self.peek(count, before=before)
        self._forget(found)
        self.counts.dropped += len(found)
        return len(found)

    def purge(self) -> int:
        """Drop all messages that are available or paused; return how many there were."""
        return self.purge_paged() + self.drop(self.present)

    def purge_paged(self) -> int:
        """Drop the messages that are in the store only; return how many there were."""
        dropped = self.paged
        self._drop_paged()
        self.counts.dropped += dropped
        return dropped

    def sweep(self) -> None:
        """Give up the expired messages at the front; messages behind them are not examined.

        If there are very many, the rest is left for :meth:`resume`.
        """
        if self._stale:
            self._skim()
        left = _SWEPT
        for avoid, heap in [(None, self._returned), *self._apart.items()]:
            while left and heap and self._expired(heap[0] & _PLACE):
                place = heapq.heappop(heap) & _PLACE
                self._aside.discard(place)
                self._expire(self._remove(place))
                left = left - 1 if self.memory.work > 0 else 0
            # Messages given up may have been requeued here, which removes empty heaps too.
            if avoid is not None and not heap and self._apart.get(avoid) is heap:
                del self._apart[avoid]
        while left and self._head < self._next and self._expired(self._head):
            sequence = self._head
            entry = self._remove(sequence)
            self._step()
            self._expire(entry)
            left = left - 1 if self.memory.work > 0 else 0
        self._swept = left > 0
        if not self._swept:
            self._resume_later()
        self._tell_of_room()

    def _expired(self, sequence: int) -> bool:
        entry = self._look(sequence)
        return entry is not None and entry.expires_at != NEVER and entry.expires_at <= self.wall()

    def _pop_first(self) -> Entry:
        """Remove and return the first available message."""
        if self._stale:
            self._skim()
        first: list[int] | None = None
        avoiding: frozenset[int] | None = None
        for avoid, heap in [(None, self._returned), *self._apart.items()]:
            if heap and (first is None or heap[0] < first[0]):
                first = heap
                avoiding = avoid
        if first is None or (self._head < self._next and self._head < first[0]):
            entry = self._remove(self._head)
            self._step()
            return entry
        place = heapq.heappop(first) & _PLACE
        if avoiding is not None and not first:
            del self._apart[avoiding]
        self._aside.discard(place)
        return self._remove(place)

    def _forget(self, entries: list[Entry]) -> None:
        """Remove *entries*, which :meth:`peek` has just returned as the first ones."""
        if not entries:
            return
        gone = {entry.sequence for entry in entries}
        last = self._rank(entries[-1])
        for heap in self._heaps():
            # Messages that arrived since the operation began may rank before them.
            newer: list[int] = []
            while heap and heap[0] <= last:
                rank = heapq.heappop(heap)
                if rank & _PLACE in gone:
                    continue
                if self._present(rank & _PLACE) is not None:
                    newer.append(rank)
                elif heap is not self._paused_ranks:
                    self._stale -= 1
            for rank in newer:
                heapq.heappush(heap, rank)
        for avoid in [avoid for avoid, heap in self._apart.items() if not heap]:
            del self._apart[avoid]
        self._aside -= gone
        for entry in entries:
            if self._paused.pop(entry.sequence, None) is None:
                self._remove(entry.sequence)
            else:
                self.delayed -= 1
                self._go_on_without(entry)
        if self._head in gone:
            self._step()
        for entry in entries:
            self._archive(entry)
        self._tell_of_room()

    def delete(self) -> None:
        """Delete the queue and drop its messages; later outcomes have no effect."""
        self.deleted = True
        self.counts.dropped += self.available + self.acquired + self.delayed
        self.memory.held -= self.bytes - self.beyond
        self.beyond = 0
        if self._paging is not None:
            self.memory.held += self._paging.bytes
            self.paged = 0
            self._all_here()
        self.bytes = self.available = self.acquired = self.pending = self.held = self.delayed = 0
        self._pumping = self._exhausted = False
        self._trash = [
            self._segments,
            self._latest,
            self._aside,
            self._paused,
            *self._heaps(),
        ]
        if self._schedule is not None:
            self._trash += self._schedule.heaps()
        self._schedule = None
        self._has_expiring = False
        self._latest = {}
        self._aside = set()
        self._stale = 0
        self._head = self._next
        self._returned = []
        self._apart = {}
        self._paused = {}
        self._paused_ranks = []
        self._segments = {}
        self._tail = _Segment(self._next >> _SHIFT)
        self._segments[self._tail.number] = self._tail
        for ring in (self._ring, *self._rings.values()):
            for subscription in ring:
                subscription.ready = False
            ring.clear()
        if self.memory.waiting:
            self.memory.notify_waiting()
        self._discard_some()

    def _discard_some(self) -> None:
        """Free objects of the deleted queue, some in each turn, as millions take long to free."""
        memory = self.memory
        while self._trash:
            if memory.work <= 0:
                self._resume_later()
                return
            memory.work -= WORK_OF_AN_END
            held = self._trash[-1]
            # One segment holds many messages.
            _drop_some(held, 1 if isinstance(held, dict) else _FREED)
            if not held:
                self._trash.pop()

    # --- Invariants ---

    def broken_invariants(self, acquired: Iterable[Entry] | None = None) -> list[str]:
        """Return a sentence for each invariant of this object's state that does not hold.

        For tests, between two calls of other methods: the work is proportional to the number of
        messages times that of consumers. *acquired* contains all entries held by a delivery or
        transaction of this queue, if the caller knows them; only then, or if no message is
        ACQUIRED, are bytes compared exactly.
        """
        broken: list[str] = []
        if self.deleted:
            # A queue that failed keeps its state as it was at the error.
            return broken
        here = self._check_slots(broken)
        self._check_ranks(here, broken)
        self._check_counts(here, acquired, broken)
        self._check_turns(here, broken)
        return broken

    def _check_slots(self, broken: list[str]) -> dict[int, Entry]:
        """Check segments and paging; return the entries in slots by their sequence numbers."""
        here: dict[int, Entry] = {}
        for number, segment in self._segments.items():
            found = 0
            for at, entry in enumerate(segment.slots):
                if entry is None:
                    continue
                found += 1
                place = number << _SHIFT | at
                here[place] = entry
                if entry.sequence != place:
                    broken.append(f"the entry of place {entry.sequence} lies in slot {place}")
                if place >= self._place_next:
                    broken.append(f"place {place} was never given out")
            if segment.number != number:
                broken.append(f"segment {segment.number} is filed as {number}")
            if segment.live != found:
                broken.append(f"segment {number} counts {segment.live} entries, and has {found}")
            if not found and segment is not self._tail:
                broken.append(f"segment {number} is empty and not the last one")
        if self._segments.get(self._tail.number) is not self._tail:
            broken.append("the last segment is not among the segments")
        paging = self._paging
        if paging is None or self.paged_from == NOWHERE_PAGED:
            if self.paged or self.paged_from != NOWHERE_PAGED:
                broken.append(f"{self.paged} messages are paged out, from no place on")
            if paging is not None and (paging.bytes or paging.out):
                broken.append(f"{paging.bytes} bytes are paged out, from no place on")
            return here
        if not 0 <= self.paged <= self.available or paging.bytes < 0:
            broken.append(f"{self.paged} messages of {paging.bytes} bytes are paged out")
        for place, entry in here.items():
            if place >= self.paged_from and paging.out.get(place) is not entry:
                broken.append(f"place {place} is paged out, and has an entry in memory")
        return here

    def _check_ranks(self, here: dict[int, Entry], broken: list[str]) -> None:
        """Check that each entry of *here* is either in one heap or fresh."""
        filed: dict[int, int] = {}
        stale = 0
        for heap in (self._returned, *self._apart.values()):
            if any(heap[at] < heap[(at - 1) >> 1] for at in range(1, len(heap))):
                broken.append("the ranks of what came back are no heap")
            for rank in heap:
                place = rank & _PLACE
                entry = here.get(place)
                if entry is None:
                    stale += 1
                    continue
                filed[place] = filed.get(place, 0) + 1
                if rank != self._rank(entry):
                    broken.append(f"place {place} is filed with the rank of another")
        if stale != self._stale:
            broken.append(
                f"{stale} ranks are of messages that have gone, {self._stale} are counted"
            )
        for avoid, heap in self._apart.items():
            if not heap or not avoid or not avoid <= self.consumers.keys():
                broken.append(f"a heap of {len(heap)} ranks is kept from consumers {set(avoid)}")
        for place in here:
            fresh = self._head <= place < self._next and place not in self._aside
            if filed.get(place, 0) + fresh != 1:
                broken.append(
                    f"place {place} is in {filed.get(place, 0)} heaps and "
                    f"{'' if fresh else 'not '}among those never taken"
                )
        broken += [
            f"place {place} is set aside and in no heap"
            for place in self._aside
            if place not in filed
        ]
        if self._head < self._next and self._fresh(self._head) is None:
            broken.append(f"the first of those never taken, at {self._head}, is not there")
        ranks = set(self._paused_ranks)
        for place, entry in self._paused.items():
            if entry.sequence != place or place in here or self._rank(entry) not in ranks:
                broken.append(
                    f"the paused message of place {place} is elsewhere too, or has no rank"
                )

    def _check_counts(
        self, here: dict[int, Entry], acquired: Iterable[Entry] | None, broken: list[str]
    ) -> None:
        """Check the counters against the actual messages."""
        counted = (self.available, self.acquired, self.delayed, self.pending, self.held, self.paged)
        if min(*counted, self.arriving) < 0 or self.bytes < 0 or self.beyond < 0:
            broken.append(f"a count is negative: {counted}, {self.bytes}, {self.beyond}")
        if len(here) != self.available - self.paged:
            broken.append(
                f"{len(here)} messages are here, {self.available - self.paged} are counted"
            )
        waiting = list(self._paused.values())
        if self._schedule is not None:
            for scheduled in self._schedule.heaps():
                waiting += [entry for _, _, entry in scheduled if entry.due is not None]
        if len(waiting) != self.delayed:
            broken.append(f"{len(waiting)} messages wait for a time, {self.delayed} are counted")
        if self.delayed and self.alarm == inf:
            broken.append("messages wait for a time, and no alarm is set")
        entries = [*here.values(), *waiting]
        if acquired is not None:
            entries += acquired
            if len(entries) != len(here) + len(waiting) + self.acquired:
                broken.append(f"{self.acquired} messages are counted as acquired")
        if len({entry.sequence for entry in entries}) != len(entries):
            broken.append("a message is in more places than one")
        size = sum(len(entry.payload) + entry.rest for entry in entries)
        paged = 0 if self._paging is None else self._paging.bytes
        known = not (self.pending or self.held or self.arriving) and (
            acquired is not None or not self.acquired
        )
        if self.bytes - paged != size if known else self.bytes - paged < size:
            broken.append(f"{size} bytes are here, {self.bytes - paged} are counted")
        rest = sum(entry.rest for entry in entries)
        if self.beyond != rest if known else self.beyond < rest:
            broken.append(f"{rest} bytes are in the store only, {self.beyond} are counted")
        for key, entry in self._latest.items():
            if entry.marks.key != key or entry.marks.replaced:
                broken.append(f"the last message with the key {key!r} is not its last one")

    def _check_turns(self, here: dict[int, Entry], broken: list[str]) -> None:
        """Check the rings, and that no waiting consumer may have one of the messages."""
        if self._levels:
            if self._levels != sorted(set(self._levels), reverse=True) or self._ring:
                broken.append(f"the levels {self._levels} are out of order, or not in use")
            if self._rings.keys() != set(self._levels) or 0 not in self._levels:
                broken.append(f"rings of {list(self._rings)}, and levels {self._levels}")
        elif self._rings:
            broken.append(f"rings of {list(self._rings)}, and no levels")
        standing: list[Subscription] = []
        for ring in (self._ring, *self._rings.values()):
            standing += ring
        for subscription in standing:
            identity = subscription.identity
            if self.consumers.get(identity) is not subscription:
                broken.append(f"consumer {identity} has left, and stands in a ring")
            elif not subscription.ready or not subscription.active:
                broken.append(f"consumer {identity} is not ready, and stands in a ring")
            elif subscription not in self._ring_of(subscription):
                broken.append(f"consumer {identity} stands in the ring of another priority")
        ready = [each for each in self.consumers.values() if each.ready]
        if len(ready) != len(standing):
            broken.append(f"{len(ready)} consumers are ready, {len(standing)} stand in rings")
        if self.single_active:
            active = [each for each in self.consumers.values() if each.active]
            if active != ([self._active] if self._active is not None and not self._paused else []):
                broken.append(f"{len(active)} consumers are active")
            if (self._active is None) != (not self.consumers):
                broken.append("no consumer is to be the active one")
        if self._pumping or self.unfinished or self.paged:
            return
        now = self.wall()
        for subscription in ready:
            link = subscription.link
            if link.credit <= 0 or not link.writable or subscription.feeding:
                continue
            for place, entry in here.items():
                avoided = entry.avoid is not None and subscription.identity in entry.avoid
                if not avoided and entry.expires_at > now and subscription.wants(entry):
                    broken.append(f"consumer {subscription.identity} may have place {place}")
                    break


def _in_order(heap: list[int]) -> Iterator[int]:
    """Yield the elements of *heap* in order without changing it, at a cost for each one yielded."""
    frontier = [(heap[0], 0)]
    while frontier:
        value, at = heapq.heappop(frontier)
        yield value
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))


def _drop_some(held: Any, count: int) -> None:
    """Remove up to *count* elements of *held*, a dict, set or list."""
    if isinstance(held, list):
        del held[-count:]
        return
    drop_one = held.popitem if isinstance(held, dict) else held.pop
    for _ in range(min(count, len(held))):
        drop_one()
