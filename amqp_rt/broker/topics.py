"""A topic: each message to every subscriber of that moment (distribution-mode *copy*).

Each subscriber has a queue of its own, so that credit, settlement, release and time to live are
the same as everywhere. The payload is shared between them. A subscriber that does not keep up is
detached when its queue is full: neither the others nor the publishers wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error
from .entries import Entry
from .queues import Counts, Memory, MessageQueue
from .subscriptions import Subscription


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
        #: Called when a subscriber's queue is to be told the time.
        self.on_alarm: Callable[[MessageQueue, float], None] = _nothing_then
        #: Bytes of messages of transactions.
        self._held = 0
        self._queues: dict[int, MessageQueue] = {}
        #: Of the subscribers that do not want everything.
        self._filters: dict[int, Any] = {}
        self._identities = 0

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
        """How many more messages it can take: as many as the memory of all nodes has room for."""
        return max(0, (self.memory.limit - self.memory.held) // 1024)

    def fits(self, size: int) -> bool:
        """Whether a message of *size* bytes may still come in."""
        return self.memory.held + size <= self.memory.limit

    def put(self, entry: Entry) -> None:
        """Give *entry* to whoever is subscribed now."""
        counts = self.counts
        before = counts.enqueued
        slow: list[int] = []
        for identity, queue in self._queues.items():
            wanted = self._filters.get(identity)
            if wanted is not None and not wanted.matches(entry, entry.publisher):
                continue
            queue.put(entry.again())
            if queue.available > self.backlog_max or queue.bytes > self.backlog_bytes_max:
                slow.append(identity)
        # The queues have counted a copy each.
        counts.enqueued = before + 1
        for identity in slow:
            self._give_up(identity)

    def subscribe(
        self,
        *,
        default_outcome: Any,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: Any = None,
    ) -> Subscription:
        """A new subscriber: it gets what is put from now on."""
        queue = MessageQueue(
            self.memory, self.wall, _drop, monotonic=self.monotonic, limits=self.limits
        )
        queue.counts = self.counts
        queue.on_alarm = partial(self.on_alarm, queue)
        subscription = queue.subscribe(
            default_outcome=default_outcome, outcomes=outcomes, settled=settled
        )
        self._identities += 1
        self._queues[self._identities] = queue
        if filters is not None:
            # What it does not want never takes room in its backlog.
            self._filters[self._identities] = filters
        subscription.on_left.append(partial(self._left, self._identities))
        return subscription

    def _left(self, identity: int) -> None:
        queue = self._queues.pop(identity, None)
        self._filters.pop(identity, None)
        if queue is not None:
            queue.delete()

    def _give_up(self, identity: int) -> None:
        queue = self._queues.pop(identity)
        self._filters.pop(identity, None)
        consumers = list(queue.consumers.values())
        queue.delete()
        for consumer in consumers:
            consumer.link.detach(
                Error(
                    "amqp:resource-limit-exceeded",
                    "the subscriber did not keep up and its backlog is full",
                )
            )

    def sweep(self) -> None:
        """Drop what has expired at the front of each subscriber's queue."""
        for queue in self._queues.values():
            queue.sweep()

    def delete(self) -> None:
        """The topic is no more."""
        self.deleted = True
        self.memory.held -= self._held
        self._held = 0
        for queue in self._queues.values():
            queue.delete()
        self._queues.clear()
        self._filters.clear()


def _nothing() -> None:
    """Nobody waits for room."""


def _nothing_then(queue: MessageQueue, at: float) -> None:
    """Nobody looks at the clock."""
