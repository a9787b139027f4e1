"""A topic: each message to every subscription of that moment (distribution-mode *copy*).

Each subscription has a queue of its own, so that credit, settlement, release and time to live are
the same as everywhere. The payload is shared between them. One that does not keep up is given up
when its queue is full: neither the others nor the publishers wait for it.

A subscription ends with the terminus of its link, or with the last of its links if they share it;
until then it gathers, whether anybody is there or not. One that is durable has its queue in the
store, and a durable message is accepted when all of those have it (:class:`TopicLedger`).

A message for more subscriptions than one turn of the event loop has time for is handed to some of them
in each turn, in the order in which they were made, and messages behind it wait. It goes to those that
there were when it was put. Publishers get no credit for more than ``backlog_max`` messages that wait so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from ..fronts.base import IncomingDelivery
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error
from .entries import Entry, head_of
from .journal import Journal, QueueLedger, Unit, accept, refuse
from .observed import ObservedQueue
from .queues import Counts, Memory, MessageQueue
from .subscriptions import Subscription

#: What handing one message to one subscription is worth, in deliveries that are concluded: if it has
#: filters, and if it is in the store.
_WORK_OF_A_COPY: Final = 4
_WORK_OF_FILTERS: Final = 32
_WORK_OF_A_ROW: Final = 4
#: What deleting the queue of one subscription is worth.
_WORK_OF_AN_END: Final = 16
#: Queues that are deleted, or swept, at once.
_FEW: Final = 50


class _Passing:
    """A message that is being handed to subscriptions.

    Args:
        entry: The message.
        copies: Those that have their place in stored queues already; None if none has.
        last: The number of the newest subscription that is to get it.
    """

    __slots__ = ("copies", "entry", "last", "seen")

    def __init__(self, entry: Entry, copies: dict[int, Entry] | None, last: int) -> None:
        self.entry = entry
        self.copies = copies
        self.last = last
        #: The number of the last subscription that was looked at.
        self.seen = 0


def _drop(entry: Entry, reason: str, error: Error | None) -> bool:
    """There is no dead-letter address for copies."""
    return False


class MessageTopic:
    """The subscribers of one topic.

    Args:
        memory: Shared account of bytes.
        wall: The wall clock.
        backlog_max: Messages that may wait for one subscriber; 0 for ``limits.backlog_max``.
        backlog_bytes_max: Bytes of those; 0 for ``limits.backlog_bytes_max``.
        monotonic: The clock of delays; by default the wall clock.
        limits: Bounds.
    """

    def __init__(
        self,
        memory: Memory,
        wall: Callable[[], float],
        *,
        backlog_max: int = 0,
        backlog_bytes_max: int = 0,
        monotonic: Callable[[], float] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.memory = memory
        self.wall = wall
        self.monotonic = monotonic or wall
        self.backlog_max = backlog_max or limits.backlog_max
        self.backlog_bytes_max = backlog_bytes_max or limits.backlog_bytes_max
        self.limits = limits
        self.counts = Counts()
        self.deleted = False
        #: A topic always has room: its subscribers' queues are bounded.
        self.awaited = False
        self.on_room: Callable[[], None] = _nothing
        #: What subscribers' queues are, and who hears what becomes of their messages.
        self.queue_type: type[MessageQueue] = MessageQueue
        #: Called as a queue's ``bury`` for what a subscriber's queue gives up.
        self.bury: Callable[[Entry, str, Error | None], bool] = _drop
        self.watch: Any = None
        #: Called with the time at which a subscriber's queue has something to do next.
        self.on_alarm: Callable[[MessageQueue, float], None] = _nothing_then
        #: Called when the topic or a subscriber's queue has more work than one turn may take.
        self.on_unfinished: Callable[[MessageQueue | MessageTopic], None] = _no_more
        #: Bytes of messages of transactions.
        self._held = 0
        #: The queues of the subscriptions.
        self._queues: dict[int, MessageQueue] = {}
        #: Of the subscriptions that do not want everything.
        self._filters: dict[int, Any] = {}
        #: Those that lie in the store, by the numbers that they have there.
        self.stored: dict[int, int] = {}
        #: Whom to tell that a subscription's backlog was full, and what to say to who comes for it.
        self.given_up: dict[int, Callable[[Error], None]] = {}
        #: Messages that wait until they are kept.
        self.pending = 0
        self._identities = 0
        #: The numbers of all subscriptions, in order; None if some have come or gone since.
        self._order: list[int] | None = None
        #: What waits for a later turn: messages, calls that stage messages, queues that are to be swept
        #: or deleted.
        self._passing: deque[_Passing] = deque()
        self.staging: deque[Callable[[], None]] = deque()
        self._swept: list[MessageQueue] = []
        self._doomed: list[MessageQueue] = []
        self._unfinished = False

    @property
    def queues(self) -> list[MessageQueue]:
        """What waits, and is with consumers, of each subscription, in the order of their making."""
        return list(self._queues.values())

    @property
    def consumers(self) -> list[Subscription]:
        """The subscribers."""
        return [
            consumer for queue in self._queues.values() for consumer in queue.consumers.values()
        ]

    @property
    def available(self) -> int:
        """Messages that wait, summed over the subscribers."""
        return sum(queue.available for queue in self._queues.values())

    @property
    def acquired(self) -> int:
        """Messages that are delivered and not settled, summed over the subscribers."""
        return sum(queue.acquired for queue in self._queues.values())

    @property
    def bytes(self) -> int:
        """Bytes of both; a payload counts once for each subscriber."""
        return sum(queue.bytes for queue in self._queues.values())

    def hold(self, entry: Entry) -> None:
        """Give *entry* room: it may come when its transaction is discharged."""
        self.memory.held += len(entry.payload)
        self._held += len(entry.payload)

    def let_go(self, entry: Entry) -> None:
        """Take the room of a held *entry* back: it comes now, or ``room_again`` follows."""
        if not self.deleted:
            self.memory.held -= len(entry.payload)
            self._held -= len(entry.payload)

    def room_again(self) -> None:
        """Tell those who wait for room."""
        if self.memory.waiting:
            self.memory.tell()

    def room(self) -> int:
        """How many more messages it can take: as many as the memory of all nodes has room for; none
        while too many wait to be handed out."""
        if len(self._passing) + len(self.staging) >= self.backlog_max:
            return 0
        return max(0, (self.memory.limit - self.memory.held) // 1024)

    def fits(self, size: int) -> bool:
        """Whether a message of *size* bytes may still come in."""
        return self.memory.held + size <= self.memory.limit

    def put(self, entry: Entry, copies: dict[int, Entry] | None = None) -> None:
        """Give *entry* to all current subscriptions: now, if this turn has time for all of them.

        Args:
            entry: The message.
            copies: Copies of it whose places in stored queues are reserved, by subscription; None if no
                places are.
        """
        self.counts.enqueued += 1
        count = len(self._queues)
        if self._passing or (
            count > 1
            and not self.takes_turn(count, _WORK_OF_A_COPY, _WORK_OF_FILTERS * len(self._filters))
        ):
            self.hold(entry)
            self._passing.append(_Passing(entry, copies, self._identities))
            self.go_on_later()
        else:
            self._hand_out(entry, copies, list(self._queues))

    def takes_turn(self, count: int, work: int, more: int = 0) -> bool:
        """Return whether this turn has time to do *count* times *work*, and *more*, which it then has
        no more. One time is always done: it is what a queue would do."""
        if count > 1:
            work = count * work + more
            if work > self.memory.work:
                return False
            self.memory.work -= work
        return True

    def go_on_later(self) -> None:
        """Have :meth:`resume` called in the next turn."""
        if not self._unfinished:
            self._unfinished = True
            self.on_unfinished(self)

    def resume(self) -> None:
        """Go on with what was too much for one turn."""
        self._unfinished = False
        try:
            self._go_on()
        finally:
            # What raised is not called again; what is behind it may be waited for.
            more = self._doomed or self.staging
            if more or (not self.deleted and (self._passing or self._swept)):
                self.go_on_later()
        if self.awaited:
            self.on_room()

    def _go_on(self) -> None:
        """Do what waits, as far as the work of this turn goes."""
        memory = self.memory
        while memory.work > 0:
            if self._doomed:
                memory.work -= _WORK_OF_AN_END
                self._doomed.pop().delete()
            elif self.staging:
                # Even if the topic has failed: a discharge may wait for it.
                memory.work -= max(1, _WORK_OF_A_ROW * len(self.stored))
                self.staging.popleft()()
            elif self.deleted:
                return
            elif self._passing:
                memory.work -= 1
                # Giving up a slow subscriber may delete the topic, and then nothing waits any more.
                if self._hand_out_some(self._passing[0]) and self._passing:
                    self.let_go(self._passing.popleft().entry)
            elif self._swept:
                memory.work -= _WORK_OF_A_COPY
                self._swept.pop().sweep()
            else:
                return

    def _hand_out_some(self, passing: _Passing) -> bool:
        """Hand out a message as far as the work of this turn goes. Returns whether all have it."""
        memory = self.memory
        if self._order is None:
            self._order = list(self._queues)
        order = self._order
        at = start = bisect_right(order, passing.seen)
        last = bisect_right(order, passing.last)
        while at < last and memory.work > 0:
            memory.work -= _WORK_OF_FILTERS if order[at] in self._filters else _WORK_OF_A_COPY
            at += 1
        if at > start:
            # Before anything can go wrong: none of them gets it twice.
            passing.seen = order[at - 1]
        self._hand_out(passing.entry, passing.copies, order[start:at])
        return at >= last

    def _hand_out(
        self, entry: Entry, copies: dict[int, Entry] | None, identities: Iterable[int]
    ) -> None:
        """Give a message to those of *identities* that exist and match it."""
        counts = self.counts
        before = counts.enqueued
        slow: list[int] = []
        for identity in identities:
            queue = self._queues.get(identity)
            if queue is None:
                # It has ended meanwhile.
                continue
            if copies is not None and identity in self.stored:
                copy = copies.get(identity)
                if copy is None:
                    continue
            else:
                wanted = self._filters.get(identity)
                if wanted is not None and not wanted.matches(entry, entry.publisher):
                    continue
                copy = entry.again()
            queue.put(copy)
            if queue.available > self.backlog_max or queue.bytes > self.backlog_bytes_max:
                slow.append(identity)
        # The queues have counted a copy each.
        counts.enqueued = before
        for identity in slow:
            self._give_up(identity)

    def reserve(self, entry: Entry) -> dict[int, Entry]:
        """Give copies of *entry* their places in the stored queues that want it."""
        found: dict[int, Entry] = {}
        for identity in self.stored:
            wanted = self._filters.get(identity)
            if wanted is None or wanted.matches(entry, entry.publisher):
                found[identity] = copy = entry.again()
                self._queues[identity].reserve(copy)
        return found

    def put_reserved(self, entry: Entry, copies: dict[int, Entry]) -> None:
        """Put what was reserved for *entry*, and give it to the subscriptions that keep nothing."""
        self.put(entry, copies)

    def withhold(self, copies: dict[int, Entry]) -> None:
        """What was reserved does not come."""
        for identity, copy in copies.items():
            queue = self._queues.get(identity)
            copy.stored = False
            if queue is not None:
                queue.withhold(copy)

    def open(self, filters: Any) -> tuple[int, MessageQueue]:
        """A new subscription without a consumer: it gathers from now on.

        Args:
            filters: What messages have to match, None for nothing.

        Returns:
            The subscription's number, for :meth:`close`, and its queue.
        """
        queue = self.queue_type(
            self.memory, self.wall, self.bury, monotonic=self.monotonic, limits=self.limits
        )
        if isinstance(queue, ObservedQueue):
            queue.watch = self.watch
        queue.counts = self.counts
        queue.on_alarm = partial(self.on_alarm, queue)
        queue.on_unfinished = partial(self.on_unfinished, queue)
        self._identities += 1
        identity = self._identities
        self._queues[identity] = queue
        self._order = None
        if filters is not None:
            # What it does not want never takes room in its backlog.
            self._filters[identity] = filters
        return identity, queue

    def keep(self, identity: int, journal: Journal, number: int) -> None:
        """Keep the durable messages of a subscription in the store, as those of *number*."""
        queue = self._queues[identity]
        queue.ledger = QueueLedger(journal, number, queue)
        self.stored[identity] = number

    def close(self, identity: int) -> None:
        """A subscription has ended; what it held is dropped."""
        queue = self._queues.pop(identity, None)
        self._order = None
        self._filters.pop(identity, None)
        self.given_up.pop(identity, None)
        self.stored.pop(identity, None)
        if queue is None:
            return
        if self.memory.work > 0:
            self.memory.work -= _WORK_OF_AN_END
            queue.delete()
        else:
            # A connection may have ended that had very many of them.
            queue.deleted = True
            self._doomed.append(queue)
            self.go_on_later()

    def subscribe(
        self,
        *,
        default_outcome: Any,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: Any = None,
    ) -> Subscription:
        """A new subscription for one link: it gets what is put from now on."""
        identity, queue = self.open(filters)
        subscription = queue.subscribe(
            default_outcome=default_outcome, outcomes=outcomes, settled=settled
        )
        subscription.on_left.append(partial(self.close, identity))
        return subscription

    def identity_of(self, queue: object) -> int:
        """The number of the subscription that has *queue*."""
        for identity, known in self._queues.items():
            if known is queue:
                return identity
        raise KeyError(queue)

    def _give_up(self, identity: int) -> None:
        queue = self._queues.get(identity)
        if queue is None:
            return
        error = Error(
            "amqp:resource-limit-exceeded",
            "the subscriber did not keep up and its backlog is full",
        )
        # Closing takes the links from their subscriptions.
        links = [each.link for each in queue.consumers.values() if each.link is not None]
        on_given_up = self.given_up.get(identity)
        self.close(identity)
        for link in links:
            if link.attached:
                link.detach(error)
        if on_given_up is not None:
            on_given_up(error)

    def sweep(self) -> None:
        """Drop what has expired at the front of each subscriber's queue; of many some later."""
        if len(self._queues) <= _FEW:
            for queue in self._queues.values():
                queue.sweep()
        elif not self._swept:
            self._swept = self.queues
            self.go_on_later()

    def delete(self) -> None:
        """The topic is no more."""
        self.deleted = True
        self.memory.held -= self._held
        self._held = 0
        self._passing.clear()
        self._swept.clear()
        queues = self.queues
        for queue in queues[:_FEW]:
            queue.delete()
        for queue in queues[_FEW:]:
            # What comes late does nothing there.
            queue.deleted = True
        # Those of subscriptions that have ended may be waiting, too.
        self._doomed += queues[_FEW:]
        self._queues.clear()
        self._order = None
        self._filters.clear()
        self.given_up.clear()
        self.stored.clear()
        # For no subscription any more: their senders get their answers.
        self.stage_all()
        if self._doomed:
            self.go_on_later()

    def stage_all(self) -> None:
        """Stage all messages that wait for that, since no more turns come."""
        while self.staging:
            self.staging.popleft()()


class TopicLedger:
    """Keeps durable messages for the stored subscriptions of *topic*.

    A message comes to its subscribers when all stored subscriptions have it on the disk, and what
    comes after it waits with it.
    """

    def __init__(self, journal: Journal, topic: MessageTopic, address: str) -> None:
        self.address = address
        self._journal = journal
        self._topic = topic

    @property
    def copies(self) -> int:
        """How many copies of a durable message are stored."""
        return len(self._topic.stored)

    def wants(self, entry: Entry) -> bool:
        """Whether *entry* has to be staged: somebody keeps it, or it is behind one that waits."""
        topic = self._topic
        return topic.pending > 0 or (entry.durable and bool(topic.stored))

    def reserve(self, entry: Entry) -> None:
        """Let what comes next wait behind *entry*; :meth:`stage` follows."""
        self._topic.pending += 1

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Put *entries* once they are kept, and answer *deliveries* then, which brought them."""
        topic = self._topic
        stored = len(topic.stored)
        if topic.staging or not topic.takes_turn(len(entries) * stored, _WORK_OF_A_ROW):
            # One message takes one turn at most: ``stored_subscriptions_max`` bounds its copies.
            for at, entry in enumerate(entries):
                last = at == len(entries) - 1
                some = deliveries[at : at + 1]
                stage = partial(self._stage_held, entry, some, done if last else None, note)
                topic.hold(entry)
                topic.staging.append(stage)
            topic.go_on_later()
        else:
            self._stage(entries, deliveries, done, note)

    def call_in_line(self, call: Callable[[], None]) -> bool:
        """Call *call* when all messages that wait to be staged have been; False if none does."""
        staging = self._topic.staging
        if not staging:
            return False
        staging.append(call)
        return True

    def _stage_held(
        self,
        entry: Entry,
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None,
    ) -> None:
        """Stage *entry*, which had room while it waited for a turn."""
        self._topic.let_go(entry)
        self._stage([entry], deliveries, done, note)

    def _stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None,
    ) -> None:
        topic = self._topic

        def answer(say: Callable[[IncomingDelivery], None]) -> None:
            topic.pending -= len(entries)
            for delivery in deliveries:
                say(delivery)
            if done is not None:
                done()

        def put() -> None:
            for entry, copies in staged:
                topic.put_reserved(entry, copies)

        def refused(error: Error) -> None:
            self._journal.log_refused(len(entries), self.address, error, topic.wall())
            for _, copies in staged:
                topic.withhold(copies)
            answer(partial(refuse, error=error))

        unit = Unit(refused)
        staged = [(entry, self._write(unit, entry)) for entry in entries]
        if note is not None:
            note(unit, deliveries)
        unit.then(put, None, topic)
        unit.then(partial(answer, accept))
        self._journal.add(unit)

    def receive(self, entry: Entry) -> None:
        """Put *entry*, which is in the broker already and cannot be refused, once it is kept."""
        topic = self._topic
        topic.pending += 1
        unit = self._journal.loose
        copies = self._write(unit, entry)

        def kept() -> None:
            topic.pending -= 1
            topic.put_reserved(entry, copies)

        def undo() -> None:
            topic.pending -= 1
            topic.withhold(copies)

        unit.then(kept, undo, topic)

    def _write(self, unit: Unit, entry: Entry) -> dict[int, Entry]:
        topic = self._topic
        copies = topic.reserve(entry)
        if entry.durable and copies:
            # All copies have the same.
            head = head_of(entry.again())
            for identity, copy in copies.items():
                unit.put(topic.stored[identity], copy.sequence, head, copy.payload)
                copy.stored = True
        return copies


def _nothing() -> None:
    """Do nothing: no publisher waits for room."""


def _no_more(held: MessageQueue | MessageTopic) -> None:
    """Do nothing: no later turn is scheduled."""


def _nothing_then(queue: MessageQueue, at: float) -> None:
    """Do nothing: no alarm is kept."""
