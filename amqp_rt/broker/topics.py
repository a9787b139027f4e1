"""Topics, which copy each message to all current subscriptions (distribution-mode *copy*).

Each subscription has a queue of its own, so that credit, settlement, release and time to live work
as for any queue. The copies share the payload. A subscription whose queue is full is ended: neither
other subscriptions nor publishers wait for a slow one.

A subscription ends with the terminus of its link, or with the last of its links if they share it;
until then it collects messages, with or without an attached link. A durable subscription has its
queue in the store, and a durable message is accepted when all of these have it
(:class:`TopicLedger`).

If a message has more subscriptions than one turn of the event loop has time for, each turn hands it
to some of them, in the order of their creation, and messages behind it wait. Filters that examine it
take part of that time, each as much as it has used. The message goes to the subscriptions that
existed when it was put. Publishers get no credit while ``backlog_max`` messages
wait for their turns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from sys import maxsize
from typing import Any, Final

from ..fronts.base import IncomingDelivery
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error, Outcome
from .durable.answers import accept, refuse
from .durable.journal import Journal
from .durable.ledgers import QueueLedger
from .durable.units import Unit
from .entries import Entry, head_of
from .filtering.filters import FilterSet
from .queue.accounts import WORK_OF_AN_END, Counts, Memory
from .queue.fullness import full_text, why_memory
from .queue.queue import MessageQueue
from .queue.subscriptions import Subscription

#: Cost of handing one message to one subscription, in deliveries concluded in the same time, and of
#: writing it to the store. Filters count their own work.
_WORK_OF_A_COPY: Final = 4
_WORK_OF_A_ROW: Final = 4
#: Maximum number of queues that are deleted, or swept, in one step.
_FEW: Final = 50


class _Passing:
    """Message that is being handed to subscriptions.

    Args:
        entry: The message.
        copies: Copies with a sequence number in stored queues, by subscription; None if the stored
            queues get their copies like all others.
        last: Number of the newest subscription that gets the message.
    """

    __slots__ = ("copies", "entry", "last", "seen")

    def __init__(self, entry: Entry, copies: dict[int, Entry] | None, last: int) -> None:
        self.entry = entry
        self.copies = copies
        self.last = last
        #: Number of the last subscription that has been examined.
        self.seen = 0


class MessageTopic:
    """Subscriptions of one topic.

    Args:
        memory: Shared account of bytes.
        wall: The wall clock.
        new_queue: Makes the queue of a subscription.
        backlog_max: Messages that may wait in one subscription; 0 for ``limits.backlog_max``.
        backlog_bytes_max: Bytes that one subscription may hold; 0 for ``limits.backlog_bytes_max``.
        limits: Bounds.
    """

    #: Messages are handed out in turns anyway (:class:`~amqp_rt.broker.durable.journal.CallOwner`).
    gathering: Final = None

    def __init__(
        self,
        memory: Memory,
        wall: Callable[[], float],
        new_queue: Callable[[], MessageQueue],
        *,
        backlog_max: int = 0,
        backlog_bytes_max: int = 0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.memory = memory
        self.wall = wall
        self._new_queue = new_queue
        self.backlog_max = backlog_max or limits.backlog_max
        self.backlog_bytes_max = backlog_bytes_max or limits.backlog_bytes_max
        self.counts = Counts()
        self.deleted = False
        #: Whether a publisher waits for room: then ``on_room`` is called after each turn's work.
        self.awaited = False
        self.on_room: Callable[[], None] = _nothing
        #: Called with a subscription's queue and the time of its next alarm.
        self.on_alarm: Callable[[MessageQueue, float], None] = _ignore_alarm
        #: Called with the topic or a subscription's queue if it has more work than one turn allows, and
        #: with the function that does all of it which must not be lost.
        self.on_unfinished: Callable[[MessageQueue | MessageTopic, Callable[[], None]], None] = (
            _ignore_work
        )
        #: Bytes of messages of transactions, and of messages that wait for a turn.
        self._held = 0
        #: Subscription → its queue.
        self._queues: dict[int, MessageQueue] = {}
        #: Subscription → its filters, if it has any.
        self._filters: dict[int, FilterSet] = {}
        #: Durable subscription → the number of its queue in the store.
        self.stored: dict[int, int] = {}
        #: Subscription → function called with the error when it is ended because its backlog is
        #: full, so that a peer that attaches again gets the error.
        self.on_end_slow: dict[int, Callable[[Error], None]] = {}
        #: Number of messages that are being stored.
        self.pending = 0
        self._identities = 0
        #: All subscriptions in the order of their creation; None if the list is out of date.
        self._order: list[int] | None = None
        #: Work for later turns: messages to hand out, calls that stage messages, queues to sweep,
        #: and queues to delete.
        self._passing: deque[_Passing] = deque()
        #: A call that returns True is repeated in the next turn.
        self.staging: deque[Callable[[], object]] = deque()
        self._to_sweep: list[MessageQueue] = []
        self._ended: list[MessageQueue] = []
        self._unfinished = False

    @property
    def queues(self) -> list[MessageQueue]:
        """Queues of the subscriptions, in the order of their creation."""
        return list(self._queues.values())

    @property
    def consumers(self) -> list[Subscription]:
        """Consumers of the queues of all subscriptions."""
        return [
            consumer for queue in self._queues.values() for consumer in queue.consumers.values()
        ]

    @property
    def available(self) -> int:
        """Number of messages that wait, summed over the subscriptions."""
        return sum(queue.available for queue in self._queues.values())

    @property
    def acquired(self) -> int:
        """Number of unsettled deliveries, summed over the subscriptions."""
        return sum(queue.acquired for queue in self._queues.values())

    @property
    def bytes(self) -> int:
        """Bytes of both; a payload counts once for each subscription."""
        return sum(queue.bytes for queue in self._queues.values())

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for *entry*, until its transaction ends or its turn comes."""
        self.memory.held += len(entry.payload)
        self._held += len(entry.payload)

    def release_room(self, entry: Entry) -> None:
        """Release the room reserved for *entry*: it is put now, or ``notify_waiting`` follows."""
        if not self.deleted:
            self.memory.held -= len(entry.payload)
            self._held -= len(entry.payload)

    def notify_waiting(self) -> None:
        """Notify publishers that wait for room."""
        if self.memory.waiting:
            self.memory.notify_waiting()

    def room(self) -> int:
        """Return the number of messages for which the memory of all nodes has room.

        0 while too many messages wait to be handed out or stored.
        """
        if len(self._passing) + len(self.staging) >= self.backlog_max:
            return 0
        return max(0, (self.memory.limit - self.memory.held) // 1024)

    def fits(self, size: int) -> bool:
        """Return whether there is room for a message of *size* bytes."""
        return self.memory.held + size <= self.memory.limit

    def why_full(self, name: str, size: int) -> str:
        """Return why the topic, whose name is *name*, has no room for a message of *size* bytes."""
        waiting = ""
        if len(self._passing) + len(self.staging) >= self.backlog_max:
            waiting = "too many messages wait to be handed out or stored"
        return full_text("topic", name, why_memory(self.memory, size), waiting)

    def put(self, entry: Entry, copies: dict[int, Entry] | None = None) -> None:
        """Hand *entry* to all current subscriptions: now if this turn has time for all, or later.

        Args:
            entry: The message.
            copies: Copies with a sequence number reserved in stored queues, by subscription; None if
                the stored queues get their copies like all others.
        """
        self.counts.enqueued += 1
        count = len(self._queues)
        if (
            not self._passing
            and not self._filters
            and (count <= 1 or self.takes_turn(count, _WORK_OF_A_COPY))
        ):
            self._copy_to(entry, copies, list(self._queues))
            return
        passing = _Passing(entry, copies, self._identities)
        if self._passing or not self._filters or not self._copy_some(passing):
            self.reserve_room(entry)
            self._passing.append(passing)
            self.resume_later()

    def takes_turn(self, count: int, work: int) -> bool:
        """Return whether this turn has time for *count* times *work*, and use that time.

        A *count* of 1 is always allowed: a queue would do as much.
        """
        if count > 1:
            work = count * work
            if work > self.memory.work:
                return False
            self.memory.work -= work
        return True

    def resume_later(self) -> None:
        """Request a call of :meth:`resume` in the next turn."""
        if not self._unfinished:
            self._unfinished = True
            self.on_unfinished(self, self.stage_all)

    def resume(self) -> None:
        """Continue deferred work."""
        self._unfinished = False
        try:
            self._continue()
        finally:
            # A call that raised is not repeated, but a discharge may wait for those behind it.
            more = self._ended or self.staging
            if more or (not self.deleted and (self._passing or self._to_sweep)):
                self.resume_later()
        if self.awaited:
            self.on_room()

    def _continue(self) -> None:
        """Do deferred work as far as this turn allows."""
        memory = self.memory
        while memory.work > 0:
            if self._ended:
                memory.work -= WORK_OF_AN_END
                self._ended.pop().delete()
            elif self.staging:
                # Even if the topic has failed, since a discharge may wait for the call.
                memory.work -= 1
                self._stage_next()
            elif self.deleted:
                return
            elif self._passing:
                memory.work -= 1
                # Ending a slow subscription may delete the topic, and then no message waits.
                if self._copy_some(self._passing[0]) and self._passing:
                    self.release_room(self._passing.popleft().entry)
            elif self._to_sweep:
                memory.work -= _WORK_OF_A_COPY
                self._to_sweep.pop().sweep()
            else:
                return

    def _copy_some(self, passing: _Passing) -> bool:
        """Hand out a message as far as this turn allows; return whether that is done."""
        memory = self.memory
        if self._order is None:
            self._order = list(self._queues)
        order = self._order
        at = bisect_right(order, passing.seen)
        last = bisect_right(order, passing.last)
        while at < last and memory.work > 0:
            start = at
            while at < last and memory.work > 0:
                memory.work -= _WORK_OF_A_COPY
                at += 1
                if order[at - 1] in self._filters:
                    # Its filters may use up the rest of this turn.
                    break
            # Set before an error can occur, so that no subscription gets the message twice.
            passing.seen = order[at - 1]
            self._copy_to(passing.entry, passing.copies, order[start:at])
        return at >= last

    def _copy_to(
        self, entry: Entry, copies: dict[int, Entry] | None, identities: Iterable[int]
    ) -> None:
        """Put a message into the queues of those *identities* that exist and whose filters match."""
        counts = self.counts
        before = counts.enqueued
        slow: list[int] = []
        for identity in identities:
            queue = self._queues.get(identity)
            if queue is None:
                # The subscription has ended in the meantime.
                continue
            if copies is not None and identity in self.stored:
                copy = copies.get(identity)
                if copy is None:
                    continue
            else:
                wanted = self._filters.get(identity)
                if wanted is not None and not self._matches(wanted, entry):
                    continue
                copy = entry.copy_for_node()
            queue.put(copy)
            if queue.available > self.backlog_max or queue.bytes > self.backlog_bytes_max:
                slow.append(identity)
        # Each queue counted its copy, but the topic has got only one message.
        counts.enqueued = before
        for identity in slow:
            self._end_slow(identity)

    def _matches(self, wanted: FilterSet, entry: Entry) -> bool:
        """Return whether the filters *wanted* match *entry*, and count the work of that."""
        matches: bool = wanted.matches(entry, entry.publisher)
        self.memory.work -= wanted.work
        return matches

    @property
    def has_filters(self) -> bool:
        """Whether a subscription has filters."""
        return bool(self._filters)

    def examine(self, entry: Entry, matches: dict[int, bool]) -> bool:
        """Let the filters of stored subscriptions examine *entry*, as far as this turn allows.

        Their *matches*, by subscription, are for :meth:`reserve`. Return whether there are all.
        """
        if self._filters:
            for identity in self.stored:
                wanted = self._filters.get(identity)
                if wanted is not None and identity not in matches:
                    if self.memory.work <= 0:
                        return False
                    matches[identity] = self._matches(wanted, entry)
        return True

    def reserve(self, entry: Entry, matches: dict[int, bool] | None = None) -> dict[int, Entry]:
        """Reserve sequence numbers for copies of *entry* in the stored queues whose filters match.

        Return the copies, by subscription. Filters without a result examine the message now.
        """
        found: dict[int, Entry] = {}
        for identity in self.stored:
            wanted = self._filters.get(identity)
            match = wanted is None
            if wanted is not None:
                known = None if matches is None else matches.get(identity)
                match = self._matches(wanted, entry) if known is None else known
            if match:
                found[identity] = copy = entry.copy_for_node()
                self._queues[identity].reserve(copy)
        return found

    def cancel_reserved(self, copies: dict[int, Entry]) -> None:
        """Withdraw reserved *copies*, which could not be stored."""
        for identity, copy in copies.items():
            queue = self._queues.get(identity)
            copy.stored = False
            if queue is not None:
                queue.cancel_reserved(copy)

    def open(self, filters: FilterSet | None) -> tuple[int, MessageQueue]:
        """Create a subscription without a consumer, which collects messages from now on.

        Args:
            filters: Filters that its messages have to match; None for all messages.

        Returns:
            The subscription's number, for :meth:`close`, and its queue.
        """
        queue = self._new_queue()
        queue.counts = self.counts
        queue.on_alarm = partial(self.on_alarm, queue)
        queue.on_unfinished = partial(self.on_unfinished, queue, queue.deferred.conclude_all)
        self._identities += 1
        identity = self._identities
        self._queues[identity] = queue
        self._order = None
        if filters is not None:
            # Messages that do not match never take room in the backlog.
            self._filters[identity] = filters
        return identity, queue

    def keep(self, identity: int, journal: Journal, number: int) -> None:
        """Store the durable messages of a subscription under *number*."""
        queue = self._queues[identity]
        queue.ledger = QueueLedger(journal, number, queue)
        self.stored[identity] = number

    def close(self, identity: int) -> None:
        """End a subscription, and drop its messages."""
        queue = self._queues.pop(identity, None)
        self._order = None
        self._filters.pop(identity, None)
        self.on_end_slow.pop(identity, None)
        self.stored.pop(identity, None)
        if queue is None:
            return
        if self.memory.work > 0:
            self.memory.work -= WORK_OF_AN_END
            queue.delete()
        else:
            # A connection with very many subscriptions may have ended.
            queue.deleted = True
            self._ended.append(queue)
            self.resume_later()

    def subscribe(
        self,
        *,
        default_outcome: Outcome,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: FilterSet | None = None,
    ) -> Subscription:
        """Create a subscription for one link, which gets the messages put from now on."""
        identity, _ = self.open(filters)
        return self.join(
            identity, default_outcome=default_outcome, outcomes=outcomes, settled=settled
        )

    def join(
        self,
        identity: int,
        *,
        default_outcome: Outcome,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
    ) -> Subscription:
        """Create the only consumer of the subscription *identity*, which ends with it."""
        subscription = self._queues[identity].subscribe(
            default_outcome=default_outcome, outcomes=outcomes, settled=settled
        )
        subscription.on_end.append(partial(self.close, identity))
        return subscription

    def _end_slow(self, identity: int) -> None:
        queue = self._queues.get(identity)
        if queue is None:
            return
        error = Error(
            "amqp:resource-limit-exceeded",
            "the subscriber did not keep up and its backlog is full",
        )
        # Collected before closing, which removes the links from their subscriptions.
        links = [each.link for each in queue.consumers.values()]
        on_end_slow = self.on_end_slow.get(identity)
        self.close(identity)
        for link in links:
            if link.attached:
                link.detach(error)
        if on_end_slow is not None:
            on_end_slow(error)

    def sweep(self) -> None:
        """Drop expired messages at the front of each queue; of many queues in later turns."""
        if len(self._queues) <= _FEW:
            for queue in self._queues.values():
                queue.sweep()
        elif not self._to_sweep:
            self._to_sweep = self.queues
            self.resume_later()

    def delete(self) -> None:
        """Delete the topic, its subscriptions and their messages."""
        self.deleted = True
        self.memory.held -= self._held
        self._held = 0
        self._passing.clear()
        self._to_sweep.clear()
        queues = self.queues
        for queue in queues[:_FEW]:
            queue.delete()
        for queue in queues[_FEW:]:
            # Late calls have no effect there.
            queue.deleted = True
        # Queues of subscriptions that ended before may be in the list already.
        self._ended += queues[_FEW:]
        self._queues.clear()
        self._order = None
        self._filters.clear()
        self.on_end_slow.clear()
        self.stored.clear()
        # No subscription is left to store them for, but their senders have to be answered.
        self.stage_all()
        if self._ended:
            self.resume_later()

    def _stage_next(self) -> None:
        """Make the next call that stages messages."""
        # Removed before an error can occur, so that it is not repeated.
        call = self.staging.popleft()
        if call() is True:
            self.staging.appendleft(call)

    def stage_all(self) -> None:
        """Stage all messages that wait for it, since no more turns follow."""
        work, self.memory.work = self.memory.work, maxsize
        try:
            while self.staging:
                self._stage_next()
        finally:
            self.memory.work = work


class TopicLedger:
    """Stores durable messages for the durable subscriptions of *topic*.

    A message is handed out when it is on the disk for all durable subscriptions, and messages behind
    it wait too, so that the order stays.
    """

    #: Topics take no messages in pieces (:class:`~amqp_rt.broker.producers.IntakeLedger`).
    pieces: Final = None

    def __init__(self, journal: Journal, topic: MessageTopic, address: str) -> None:
        self.address = address
        self._journal = journal
        self._topic = topic
        #: Results of filters on messages that are to be received, by the identity of the entry.
        self._filter_matches: dict[int, dict[int, bool]] = {}

    @property
    def line(self) -> TopicLedger:
        """Messages that wait for their turn (:class:`~amqp_rt.broker.producers.Line`)."""
        return self

    @property
    def copies(self) -> int:
        """Number of copies of a durable message that are stored, counted as 1 if there are none."""
        return max(1, len(self._topic.stored))

    def wants(self, entry: Entry) -> bool:
        """Return whether *entry* has to be staged: to be stored, or to wait behind stored ones."""
        topic = self._topic
        return topic.pending > 0 or (entry.durable and bool(topic.stored))

    def reserve(self, entry: Entry) -> None:
        """Make later messages wait behind *entry*, for which :meth:`stage` follows."""
        self._topic.pending += 1

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Store *entries*, then put them and settle *deliveries*, in which they arrived.

        *done* is called after that, also if they were refused. *note* may add changes to the unit.
        """
        topic = self._topic
        stored = len(topic.stored)
        examined: list[dict[int, bool]] = [{} for _ in entries]
        if (
            topic.staging
            or not topic.takes_turn(len(entries) * stored, _WORK_OF_A_ROW)
            or not all(map(topic.examine, entries, examined))
        ):
            # One message is staged within a turn, as ``stored_subscriptions_max`` bounds its copies.
            for at, entry in enumerate(entries):
                last = at == len(entries) - 1
                some = deliveries[at : at + 1]
                stage = partial(
                    self._stage_held, entry, examined[at], some, done if last else None, note
                )
                topic.reserve_room(entry)
                topic.staging.append(stage)
            topic.resume_later()
        else:
            self._stage(entries, examined, deliveries, done, note)

    def call_in_line(self, call: Callable[[], None], entries: list[Entry]) -> bool:
        """Call *call* after all messages that wait to be staged.

        Filters of durable subscriptions have examined *entries* then, which :meth:`receive` or
        :meth:`forget` follows for. Return False if there is nothing to wait for.
        """
        topic = self._topic
        left = deque(entries if topic.has_filters else ())

        def examine() -> bool:
            while left:
                if not topic.examine(left[0], self._filter_matches.setdefault(id(left[0]), {})):
                    return True
                left.popleft()
            return False

        if not topic.staging and not examine():
            return False
        topic.staging += (examine, call)
        topic.resume_later()
        return True

    def forget(self, entries: list[Entry]) -> None:
        """Forget the results of filters on *entries*, which have been received or are withdrawn."""
        for entry in entries:
            self._filter_matches.pop(id(entry), None)

    def _stage_held(
        self,
        entry: Entry,
        matches: dict[int, bool],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None,
    ) -> bool:
        """Stage *entry*, for which room was reserved while it waited for a turn.

        Return whether this has to be repeated, since filters have not examined it yet.
        """
        if not self._examined(entry, matches):
            return True
        self._stage([entry], [matches], deliveries, done, note)
        return False

    def _stage(
        self,
        entries: list[Entry],
        examined: list[dict[int, bool]],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None,
    ) -> None:
        topic = self._topic

        def answer(settle: Callable[[IncomingDelivery], None]) -> None:
            topic.pending -= len(entries)
            for delivery in deliveries:
                settle(delivery)
            if done is not None:
                done()

        def put() -> None:
            for entry, copies in staged:
                topic.put(entry, copies)

        def refused(error: Error) -> None:
            self._journal.log_refused(len(entries), self.address, error, topic.wall())
            for _, copies in staged:
                topic.cancel_reserved(copies)
            answer(partial(refuse, error=error))

        unit = Unit(refused)
        staged = [
            (entry, self._write(unit, entry, matches))
            for entry, matches in zip(entries, examined, strict=True)
        ]
        if note is not None:
            note(unit, deliveries)
        unit.then(put, None, topic)
        unit.then(partial(answer, accept))
        self._journal.add(unit)

    def receive(self, entries: list[Entry]) -> None:
        """Store *entries*, then put them; they are in the broker already and cannot be refused."""
        for entry in entries:
            self._receive(entry, self._filter_matches.get(id(entry)))

    def receive_in_turn(self, entry: Entry, remove: Callable[[], None]) -> bool:
        """Store *entry*, now or in a later turn (:class:`~amqp_rt.broker.producers.Line`)."""
        topic = self._topic
        matches: dict[int, bool] = {}
        if (
            not topic.staging
            and topic.takes_turn(len(topic.stored), _WORK_OF_A_ROW)
            and topic.examine(entry, matches)
        ):
            self._receive(entry, matches)
            return False
        topic.pending += 1
        topic.reserve_room(entry)
        topic.staging.append(partial(self._receive_held, entry, matches, remove))
        topic.resume_later()
        return True

    def _receive_held(
        self, entry: Entry, matches: dict[int, bool], remove: Callable[[], None]
    ) -> bool:
        """Receive *entry*, for which room was reserved while it waited for a turn.

        Return whether this has to be repeated, since filters have not examined it yet.
        """
        if not self._examined(entry, matches):
            return True
        self._topic.pending -= 1
        self._receive(entry, matches)
        remove()
        return False

    def _examined(self, entry: Entry, matches: dict[int, bool]) -> bool:
        """Examine *entry*, and release what was reserved for it when all filters have; return whether they have."""
        topic = self._topic
        if not topic.examine(entry, matches):
            return False
        topic.memory.work -= _WORK_OF_A_ROW * len(topic.stored)
        topic.release_room(entry)
        return True

    def _receive(self, entry: Entry, matches: dict[int, bool] | None) -> None:
        topic = self._topic
        topic.pending += 1
        unit = self._journal.loose
        copies = self._write(unit, entry, matches)

        def kept() -> None:
            topic.pending -= 1
            topic.put(entry, copies)

        def undo() -> None:
            topic.pending -= 1
            topic.cancel_reserved(copies)

        unit.then(kept, undo, topic)

    def _write(
        self, unit: Unit, entry: Entry, matches: dict[int, bool] | None = None
    ) -> dict[int, Entry]:
        topic = self._topic
        copies = topic.reserve(entry, matches)
        if entry.durable and copies:
            # The same fields for all copies.
            head = head_of(entry.copy_for_node())
            for identity, copy in copies.items():
                unit.put(topic.stored[identity], copy.sequence, head, copy.payload)
                copy.stored = True
        return copies


def _nothing() -> None:
    """Do nothing: no publisher waits for room."""


def _ignore_work(held: MessageQueue | MessageTopic, finish: Callable[[], None]) -> None:
    """Do nothing: no later turn is scheduled."""


def _ignore_alarm(queue: MessageQueue, at: float) -> None:
    """Do nothing: no alarm is kept."""
