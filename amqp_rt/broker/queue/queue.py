"""Queues: storing, delivering, settling and requeueing messages (Part 3 §3.3).

Pure: the wall clock is an argument, and is read only for messages with a time to live. A message is
AVAILABLE while it is in a slot, ACQUIRED while a delivery holds it, and ARCHIVED afterwards. Its
sequence number never changes and is its position in the queue, so that a requeued message is
delivered again before those that were behind it.

The cost of an operation does not grow with the length of the queue. Slots are in segments that are
found by sequence number. *Fresh* messages, which were never acquired, are contiguous, so that the
next one is known; requeued ones are in a heap; consumers without credit are in no searched list.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final

from ...errors import LocalProtocolError
from ...limits import DEFAULT_LIMITS, Limits
from ...outcomes import Accepted, Error, Modified, Outcome, Rejected
from ..entries import NOWHERE, Entry, annotate, encode_outgoing, exceeds_link
from ..expiry import DELETED, OVERFLOW
from .accounts import (
    ACCEPTED,
    BLOCK,
    DEAD_LETTERED,
    DROP_HEAD,
    DROPPED,
    FAILED,
    REJECT,
    REQUEUED,
    WORK_OF_AN_END,
    Counts,
    Ledger,
    Memory,
)
from .browsing import Browsing
from .deferred import Deferred
from .fullness import why_full as why_queue_full
from .keyed import Marks
from .large import LargeMessages
from .operating import peek, remove
from .paging import NOWHERE_PAGED, Paging
from .schedule import requested_pause
from .shelf import Shelf
from .subscriptions import Browser, DistributionNode, Subscription
from .timing import SWEPT, Timing
from .turns import Turns

if TYPE_CHECKING:
    from ..filtering.filters import FilterSet

#: The header's ``delivery-count`` is a uint; a sender may begin with its highest value.
_COUNT_MAX: Final = 0xFFFF_FFFF

#: Messages that may arrive while there is no time to drop those that they replace.
_EXCESS_TURNS_MAX: Final = 1_000


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
            ``REJECT`` rejects them, ``DROP_HEAD`` gives up the first ones of the lowest priority.
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
        #: Messages that are AVAILABLE, and that are ACQUIRED.
        self.available: int = 0
        self.acquired: int = 0
        #: Messages that are not due yet, or paused.
        self.delayed: int = 0
        #: Payload bytes of all of these.
        self.bytes: int = 0
        #: Bytes of bodies that are in the store only, of messages in memory.
        self.beyond: int = 0
        self.consumers: dict[int, Subscription] = {}
        self.browsers: dict[int, Browser] = {}
        self.deleted: bool = False
        #: Whether the queue gives up all of its messages (:mod:`.leaving`).
        self.leaving: bool = False
        #: Called when outcomes have left the queue empty, or None.
        self.on_empty: Callable[[], None] | None = None
        #: Called when messages have left the queue, which is leaving.
        self.on_left: Callable[[], None] = _ignore
        self._identities: int = 0
        #: Sequence number of the next message.
        self.place_next: int = 0
        #: Whether browsers are served before consumers in the next turn.
        self._browsers_first: bool = True
        #: Whether messages have left since :meth:`notify_room`.
        self.freed: bool = False
        self._marker = marker
        #: The last message with each key, as long as it is in the queue.
        self._latest: dict[Any, Entry] = {}
        #: Times that :meth:`_drop_excess` ran out of time since it last dropped all over the limits.
        self._excess_turns: int = 0
        self.shelf = Shelf(self, priorities, sorting=sorting)
        self.turns = Turns(self, grouping=grouping)
        self.browsing = Browsing(self)
        self.timing = Timing(self)
        self.paging = Paging(self)
        self.large = LargeMessages(self)
        self.deferred = Deferred(self)
        self.timing.lock(lock_s)

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

    def why_full(self, name: str, size: int) -> str:
        """Return which limit keeps a message of *size* bytes out of the queue *name*."""
        return why_queue_full(self, name, size)

    def fits(self, size: int) -> bool:
        """Return whether there is room for a message of *size* bytes."""
        memory = self.memory
        if memory.held + size > memory.limit:
            return False
        if self.overflow == DROP_HEAD:
            return self._excess_turns < _EXCESS_TURNS_MAX
        if self.overflow == REJECT and self.length_max:
            held = self.available + self.acquired + self.delayed + self.pending + self.held
            if held >= self.length_max:
                return False
        return self.bytes + size <= self.bytes_max

    def _drop_excess(self) -> None:
        """Give up messages while there are too many: those of low priority, or else the first ones.

        If there are very many, the rest is left for :meth:`resume`.
        """
        left = SWEPT
        while self.available > self.paging.count and self._is_over():
            if self.paging.count and not self.shelf.begins_before(self.paging.first):
                # The first ones have to be read before they are given up.
                break
            if not left or self.memory.work <= 0:
                self._excess_turns += 1
                self.resume_later()
                break
            left -= 1
            self._discard(self.shelf.pop_excess(), DELETED if self.leaving else OVERFLOW, None)
        else:
            self._excess_turns = 0
        self.notify_room()

    def drops_unread(self) -> bool:
        """Return whether messages are to be given up that have to be read before."""
        return self._is_over() and not self.shelf.begins_before(self.paging.first)

    def _is_over(self) -> bool:
        """Return whether the messages exceed the limits of number or bytes."""
        if self.leaving:
            return True
        return self.bytes > self.bytes_max or (
            self.length_max > 0 and self.available + self.acquired + self.delayed > self.length_max
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
        self.freed = True
        self.notify_room()

    # --- Putting ---

    def reserve(self, entry: Entry) -> None:
        """Reserve a sequence number and room for *entry*.

        :meth:`put` or :meth:`cancel_reserved` follows, in order.
        """
        entry.sequence = self.place_next
        self.place_next += 1
        paging = self.paging
        if paging.enabled and paging.first == NOWHERE_PAGED:
            paging.begin_if_full(entry)
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
        self.archive(entry)
        self.notify_room()

    def restore(self, entry: Entry) -> None:
        """Put a message from the store at its position. Called in order, before links attach."""
        self.place_next = max(self.place_next, entry.sequence + 1)
        size = len(entry.payload)
        self.bytes += size + entry.rest
        self.beyond += entry.rest
        self.memory.held += size
        if not self.timing.restore(entry) and self.mark(entry):
            self.shelf.append(entry, entry.sequence)

    def put(self, entry: Entry) -> None:
        """Take responsibility for *entry* and deliver it if a consumer waits."""
        if self.deleted:
            return
        sequence = entry.sequence
        if sequence < 0:
            later = sequence < NOWHERE
            sequence = entry.sequence = self.place_next
            self.place_next = sequence + 1
            size = len(entry.payload)
            self.bytes += size
            self.memory.held += size
        else:
            self.pending -= 1
            later = entry.due is not None
        self.counts.enqueued += 1
        if later and self.timing.delays(entry):
            return
        if self._marker is not None and not self.mark(entry):
            return
        if sequence >= self.paging.first and self.paging.page_out(entry):
            return
        turns = self.turns
        ring = turns.ring
        if ring and not self.available and not turns.pumping and not self.browsers:
            # No message is before it and a consumer waits: it needs no slot.
            subscription = ring[0]
            link = subscription.link
            if (
                link.credit > 0
                and link.writable
                and (
                    not subscription.selective
                    or (self.memory.work > 0 and turns.examine(subscription, entry))
                )
                and self.send(subscription, entry)
            ):
                shelf = self.shelf
                shelf.head = shelf.next = sequence + 1
                if link.credit <= 0 or subscription.feeding:
                    turns.retire(ring, subscription)
                elif len(ring) > 1:
                    ring.rotate(-1)
                self.notify_room()
                return
        self.shelf.append(entry, sequence)
        if ring or turns.levels or self.browsers or self.overflow == DROP_HEAD:
            self.distribute()

    @property
    def gathering(self) -> MessageQueue:
        """The queue itself, since :meth:`gather` has an effect here."""
        return self

    def gather(self) -> None:
        """Put messages without delivering them, until :meth:`deliver_gathered` in the same turn."""
        self.turns.gathers = self.turns.pumping = True

    def deliver_gathered(self) -> None:
        """Deliver the messages put since :meth:`gather`, from the next turn on."""
        self.turns.gathers = False
        if not self.deleted:
            self.turns.exhausted = True
            self.resume_later()

    def distribute(self) -> None:
        """Deliver after messages have become available."""
        if self.turns.gathers:
            return
        if self.browsers:
            self.browsing.serve_all()
        if self.turns.ring or self.turns.levels:
            self.turns.pump()
        if self.overflow == DROP_HEAD:
            self._drop_excess()

    # --- Keys ---

    def mark(self, entry: Entry) -> bool:
        """Read the marks of *entry*; return False if it is not selected, or a later message has replaced it."""
        if self._marker is None:
            return True
        entry.marks = self._marker(entry)
        if not entry.marks.selected:
            return self._replaced(entry)
        if not self.last_value or (key := entry.marks.key) is None:
            return True
        before = self._latest.get(key)
        if before is not None and before.sequence > entry.sequence:
            # The older message was delayed until now.
            return self._replaced(entry)
        self._latest[key] = entry
        if before is not None:
            before.marks.replaced = True
            if self.shelf.replace(before):
                self._replaced(before)
                self.notify_room()
        return True

    def _replaced(self, entry: Entry) -> bool:
        self.counts.dropped += 1
        self.archive(entry)
        return False

    def make_available(self, entry: Entry) -> None:
        """Make *entry* AVAILABLE at its position, which is before later messages."""
        sequence = entry.sequence
        if sequence >= self.shelf.next and (not self.paging.count or sequence < self.paging.first):
            if self.paging.count:
                for consumer in self.consumers.values():
                    consumer.cursor = min(consumer.cursor, sequence)
            self.shelf.append(entry, sequence)
            return
        rank = self.shelf.rank(entry)
        for browser in self.browsers.values():
            if max(browser.cursor, self.shelf.head) > sequence:
                browser.backlog.insert(0, rank)
        if self.shelf.head <= sequence < self.shelf.next:
            for consumer in self.consumers.values():
                consumer.cursor = min(consumer.cursor, sequence)
        else:
            self.shelf.push(entry)
            if sequence > self.shelf.head and not self.shelf.ranked:
                self.shelf.aside.add(sequence)
        self.shelf.place(entry, sequence)

    # --- Times ---

    def lock(self, lock_s: float) -> None:
        """Limit the time of later unsettled deliveries to *lock_s* seconds; 0 for no limit."""
        self.timing.lock(lock_s)

    def start_lock(self, subscription: Subscription, delivery: Any) -> None:
        """Start the time limit of *delivery*, which was recorded before it was sent."""
        self.timing.start_lock(subscription, delivery)

    def tick(self) -> None:
        """Do what is due by now; called at the time of the alarm."""
        self.timing.tick()

    def sweep(self) -> None:
        """Give up the expired messages at the front."""
        self.timing.sweep()

    # --- Delivering ---

    def subscribe(
        self,
        *,
        default_outcome: Outcome,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: FilterSet | None = None,
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
            groups=self.turns.groups,
            priority=priority,
            exclusive=exclusive,
        )
        self.consumers[subscription.identity] = subscription
        self.turns.join(subscription)
        return subscription

    def locked(self, exclusive: bool) -> bool:
        """Return whether a further consumer, *exclusive* or not, has to be refused."""
        for consumer in self.consumers.values():
            # If one is exclusive, it is the only one.
            return exclusive or self.exclusive or consumer.exclusive
        return False

    def browse(self, *, settled: bool = False, filters: FilterSet | None = None) -> Browser:
        """Return a new browser of messages available now and arriving later (§3.5.7 *copy*)."""
        self._identities += 1
        older = sorted(self.shelf.older(), reverse=True)
        browser = Browser(
            self,
            self._identities,
            backlog=older,
            cursor=self.shelf.head,
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
            self.browsing.serve(subscription)
            waiting = len(subscription.backlog) + self.paging.count
            waiting += max(0, self.shelf.next - max(subscription.cursor, self.shelf.head))
        else:
            if (
                not subscription.ready
                and link.credit > 0
                and subscription.active
                and not (self.deleted or self.leaving)
            ):
                subscription.ready = True
                self.turns.ring_of(subscription).append(subscription)
            self.turns.pump()
            # The number that passes the filters is unknown without examining all messages.
            waiting = 0 if subscription.selective else self.available
        link.offer(waiting)
        self.turns.return_credit(subscription)
        if subscription.ready and link.credit <= 0:
            # Later credit queues up behind that of other consumers.
            self.turns.ring_of(subscription).remove(subscription)
            subscription.ready = False

    def resume(self) -> None:
        """Continue with deferred work; requested by ``on_unfinished``."""
        self.unfinished = False
        if self.deferred.unconcluded:
            self.deferred.resume()
        if self.deferred.trash:
            self.deferred.free_some()
        exhausted = self.turns.exhausted
        if exhausted:
            self.turns.exhausted = False
            self.turns.pumping = bool(self.deferred.unconcluded)
        if not self.deleted:
            if not self.timing.sweep_done:
                self.timing.sweep()
            # In turns, as either may use up the work of each turn for long.
            first = self._browsers_first
            if self.browsers:
                self._browsers_first = not first
                if first:
                    self.browsing.serve_all()
            self.turns.pump()
            if self.browsers and not first:
                self.browsing.serve_all()
            if self.overflow == DROP_HEAD and not self.turns.exhausted:
                # Only after delivery: messages that consumers have credit for are not dropped.
                self._drop_excess()
            self.turns.return_all_credit()

    def send(self, subscription: Subscription, entry: Entry) -> bool:
        """Send *entry*; return False if the link has ended or cannot take this message."""
        if self.beyond and entry.pieces:
            return self.large.begin_send(subscription, entry)
        if subscription.acquiring is not None:
            return self.turns.send_in_transaction(subscription, entry)
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
        except LocalProtocolError as error:
            if exceeds_link(link, error):
                # The message is too large for the link.
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        entry.attempts += 1
        self.counts.delivered += 1
        if settled:
            self.counts.accepted += 1
            self.archive(entry)
        else:
            self.acquired += 1
            if self.timing.locks is not None and delivery is not None:
                self.timing.start_lock(subscription, delivery)
        if self.turns.groups is not None:
            self.turns.assign_group(subscription, entry)
        return True

    # --- Settling ---

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> None:
        """Apply *outcome* to *entry*, whose delivery has ended (§3.4); ``concluded`` follows."""
        if self.deleted:
            return
        if type(outcome) is Accepted:
            self.acquired -= 1
            self.counts.accepted += 1
            self.archive(entry)
        else:
            self.apply_outcome(entry, self.record_outcome(subscription, entry, outcome))

    def record_outcome(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> int:
        """Record *outcome* in *entry* and in the ledger; return its result for the message.

        The message is not visible to others before :meth:`apply_outcome`. If it is removed from the
        queue, it is removed from the ledger here, and its dead letter, if any, is added there.
        """
        ledger = self.ledger
        if ledger is not None and not entry.stored:
            ledger = None
        reason = ""
        error: Error | None = None
        if type(outcome) is Accepted:
            if ledger is not None:
                ledger.remove(entry)
                entry.stored = False
            return ACCEPTED
        rewritten = False
        if type(outcome) is Rejected:
            # Counts as a failed delivery, unlike release (§3.4.3, §3.4.4).
            entry.delivery_count = min(entry.delivery_count + 1, _COUNT_MAX)
            entry.altered = True
            reason = "rejected"
            error = outcome.error
        elif type(outcome) is Modified:
            if outcome.delivery_failed:
                entry.delivery_count = min(entry.delivery_count + 1, _COUNT_MAX)
                entry.altered = True
            changes = outcome.message_annotations
            if changes and outcome.delivery_failed and subscription.pauses:
                changes, entry.due = requested_pause(changes, self.wall(), entry.expires_at)
            if changes:
                size = len(entry.payload)
                annotate(entry, changes, self.limits)
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
                if type(outcome) is Modified and outcome.delivery_failed and subscription.pauses:
                    return FAILED
                return REQUEUED
        entry.due = None
        # The dead letter is written before the message is removed, in the same commit.
        self.memory.work -= WORK_OF_AN_END
        result = DEAD_LETTERED if self.dead_letter(entry, reason, error) else DROPPED
        if ledger is not None and entry.stored:
            ledger.remove(entry)
            entry.stored = False
        return result

    def apply_outcome(self, entry: Entry, result: int) -> None:
        """Apply the *result* of an outcome to the acquired *entry*; ``concluded`` follows."""
        if self.deleted:
            return
        self.acquired -= 1
        counts = self.counts
        if result == REQUEUED:
            counts.requeued += 1
            self.put_back(entry)
            return
        if result == FAILED:
            counts.requeued += 1
            self.timing.pause(entry)
            return
        if result == ACCEPTED:
            counts.accepted += 1
        elif result == DEAD_LETTERED:
            counts.dead_lettered += 1
        else:
            counts.dropped += 1
        self.archive(entry)

    def revert_outcome(self, entry: Entry, before: Entry) -> None:
        """Restore *entry* to its state *before* the outcome, which the ledger has refused."""
        if not self.deleted:
            self._grow(len(before.payload) - len(entry.payload))
        entry.payload = before.payload
        entry.delivery_count = before.delivery_count
        entry.altered = before.altered
        entry.avoid = before.avoid
        entry.due = before.due
        entry.stored = before.stored

    def _grow(self, size: int) -> None:
        self.bytes += size
        self.memory.held += size

    def settle(self, delivery: Any, entry: Entry, outcome: Outcome) -> None:
        """Settle *delivery*, whose peer waits for it, once its outcome is safe."""
        # A dropped or dead-lettered one is not stored any more, which is to be on disk as well.
        if self.ledger is not None and (entry.stored or entry.durable):
            self.ledger.settle(delivery, outcome)
        else:
            delivery.settle(outcome)

    def conclude_left(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Call *finish* for each of *deliveries*, as far as this turn allows and later for the rest, then *after*."""
        self.deferred.conclude(deliveries, finish, after)

    def is_busy(self) -> bool:
        """Return whether long work has to wait for a later turn of the event loop."""
        # Pending conclusions come first: dead letters keep the order in which their messages were
        # given up.
        return (
            self.memory.work <= 0 or bool(self.deferred.unconcluded)
        ) and not self.deferred.concluding

    def resume_later(self) -> None:
        if not self.unfinished:
            self.unfinished = True
            self.on_unfinished()

    def concluded(self) -> None:
        """Deliver requeued messages, after a complete batch of outcomes."""
        if self.available and (self.turns.ring or self.turns.levels):
            self.turns.pump()
        if self.leaving and self.available:
            self.resume_later()
        self.notify_room()
        if self.on_empty is not None and not (self.available or self.acquired or self.delayed):
            self.on_empty()

    def pause(self, subscription: Subscription) -> None:
        """Stop serving a subscription whose link has ended and may be replaced."""
        if subscription.on_writable is not None:
            subscription.on_writable()
        self.turns.suspend(subscription)

    def claim(self, subscription: Subscription, sequence: int) -> Entry | None:
        """Acquire the available message at *sequence* for *subscription*; return None if there is none."""
        entry = self.shelf.remove_anywhere(sequence)
        if entry is None:
            return None
        self.acquired += 1
        return entry

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription that has ended."""
        self.browsers.pop(subscription.identity, None)
        if subscription.on_writable is not None:
            # The callback notices the end and stops sending.
            subscription.on_writable()
        self.paging.ahead.pop(subscription.identity, None)
        if self.consumers.pop(subscription.identity, None) is None:
            return
        self.turns.leave(subscription)

    def put_back(self, entry: Entry) -> None:
        """Make *entry* AVAILABLE at its position, unless a later message has replaced it."""
        if self.last_value and entry.marks.replaced:
            self._replaced(entry)
            return
        if entry.first_acquirer:
            entry.altered = True
        self.shelf.push(entry)
        self.shelf.place(entry, entry.sequence)
        if entry.sequence > self.shelf.head and not self.shelf.ranked:
            self.shelf.aside.add(entry.sequence)

    def archive(self, entry: Entry) -> None:
        """Remove *entry*, which is in no slot any more, from the accounts and the store."""
        # The guards avoid looking at each entry in queues without such messages.
        size = len(entry.payload)
        self.bytes -= size
        self.memory.held -= size
        if self.beyond:
            self.bytes -= entry.rest
            self.beyond -= entry.rest
        self.freed = True
        if self.ledger is not None and entry.stored:
            self.ledger.remove(entry)
        if entry.sequence >= self.paging.first:
            self.paging.mark_left(entry.sequence)
        if self._latest and entry.marks is not None and self._latest.get(entry.marks.key) is entry:
            del self._latest[entry.marks.key]

    def expire(self, entry: Entry) -> None:
        self.counts.expired += 1
        self._discard(entry, "expired", None)

    def _discard(self, entry: Entry, reason: str, error: Error | None) -> None:
        # The dead letter is written before the message is removed, in the same commit.
        self.memory.work -= WORK_OF_AN_END
        if self.dead_letter(entry, reason, error):
            self.counts.dead_lettered += 1
        else:
            self.counts.dropped += 1
        self.archive(entry)

    def notify_room(self) -> None:
        """Do what messages that have left make possible: read others, and notify those that wait."""
        if self.paging.count:
            self.paging.ask_for_more()
        if self.timing.has_expiring:
            self.timing.watch_front()
        if self.freed:
            self.freed = False
            if self.awaited:
                self.on_room()
            if self.memory.waiting:
                self.memory.notify_waiting()
            if self.leaving:
                self.on_left()

    @property
    def in_order(self) -> bool:
        """Whether messages are always delivered in the order of arrival."""
        return not self.shelf.ranked and self._marker is None

    def subscription(self, identity: int) -> Subscription | None:
        """Return the consumer or browser *identity*, None if it has left."""
        return self.consumers.get(identity) or self.browsers.get(identity)

    # --- Operations of operators ---

    def peek(self, count: int, after: int = -1, before: int = NOWHERE_PAGED) -> list[Entry]:
        """Return the first *count* messages that are available or paused; see :func:`~.operating.peek`."""
        return peek(self, count, after, before)

    def present_at(self, sequence: int) -> Entry | None:
        """Return the message at *sequence* if it is AVAILABLE or paused."""
        entry = self.shelf.available_at(sequence)
        if entry is None and self.timing.paused:
            entry = self.timing.paused.get(sequence)
            if entry is not None and self.last_value and entry.marks.replaced:
                return None
        return entry

    @property
    def present(self) -> int:
        """Number of messages visible to operators: AVAILABLE or paused."""
        return self.available + len(self.timing.paused)

    @property
    def bytes_in_memory(self) -> int:
        """Part of ``bytes`` that is in memory: the queue's share of the memory account."""
        return self.bytes - self.beyond - self.paging.bytes

    def withdraw(self, count: int, before: int = NOWHERE_PAGED) -> list[Entry]:
        """Remove and return the first *count* messages that :meth:`peek` sees."""
        found = self.peek(count, before=before)
        remove(self, found)
        return found

    def drop(self, count: int, before: int = NOWHERE_PAGED) -> int:
        """Drop the first *count* messages that :meth:`peek` sees; return how many there were."""
        found = self.withdraw(count, before)
        self.counts.dropped += len(found)
        return len(found)

    def purge(self) -> int:
        """Drop all messages that are available or paused; return how many there were."""
        return self.paging.purge() + self.drop(self.present)

    def delete(self) -> None:
        """Delete the queue and drop its messages; later outcomes have no effect."""
        self.deleted = True
        self.counts.dropped += self.available + self.acquired + self.delayed
        self.memory.held += self.beyond + self.paging.bytes - self.bytes
        self.beyond = 0
        self.paging.count = 0
        self.paging.end()
        self.bytes = self.available = self.acquired = self.pending = self.held = self.delayed = 0
        self.deferred.trash = [*self.shelf.clear(), self._latest, *self.timing.heaps()]
        self._latest = {}
        self.timing.clear()
        self.turns.clear()
        if self.memory.waiting:
            self.memory.notify_waiting()
        self.deferred.free_some()
