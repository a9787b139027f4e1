"""Reading of messages that queues have in the store only, and restoring of queues at the start."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import trio
from msgspec import Struct

from ...errors import AmqpError
from ...limits import Limits
from ...outcomes import RELEASED, Outcome, rejected
from ...stores.base import Store
from ..entries import NEVER, Entry, restored
from ..queue.paging import AHEAD, CHUNK
from ..queue.queue import MessageQueue
from ..queue.subscriptions import Subscription
from .journal import Journal
from .units import Unit

_log = logging.getLogger("amqp_rt.store")

#: Messages, and bytes of them, that a starting broker reads at a time.
_RESTORED_MAX: Final = 10_000
_RESTORED_BYTES_MAX: Final = 16 * 1024 * 1024
_LOST: Final = rejected("amqp:internal-error", "a part of the message is not in the store any more")
#: Seconds until a failed read is repeated.
_RETRY_S: Final = 1.0
#: Messages that a purge or move by an operator takes before other tasks run.
STEP: Final = 500


class _Summary(Struct):
    """Summary of the messages that the store has of a queue from a sequence number on."""

    first: int = -1
    last: int = -1
    count: int = 0
    size: int = 0
    #: Whether some have a time to live.
    expiring: bool = False
    #: Sequence numbers of those that were delayed when they arrived.
    delayed: list[int] = []


def _read(
    store: Store,
    number: int,
    first: int,
    count: int,
    size_max: int,
    bodies: dict[int, bytes] | None = None,
) -> list[Entry]:
    """Read messages of a node in order; called in the worker thread.

    Messages that share a payload in the store share one object. *bodies* holds the shared payloads
    read before; those read now are added to it.
    """
    shared = {} if bodies is None else bodies
    return [
        restored(
            number,
            stored.sequence,
            stored.head,
            shared.setdefault(stored.body, stored.payload) if stored.body else stored.payload,
        )
        for stored in store.messages(number, first, count, size_max)
    ]


def _read_one(store: Store, number: int, sequence: int) -> Entry | None:
    for stored in store.read(number, [sequence]):
        return restored(number, stored.sequence, stored.head, stored.payload)
    return None


def _summarize(store: Store, number: int, first: int) -> _Summary:
    found = _Summary()
    for head in store.heads(number, first):
        entry = restored(number, head.sequence, head.head, b"")
        if not found.count:
            found.first = head.sequence
        found.last = head.sequence
        found.count += 1
        found.size += len(entry.payload) + entry.rest if entry.pieces else head.size
        if entry.expires_at != NEVER:
            found.expiring = True
        if entry.due is not None:
            found.delayed.append(head.sequence)
    return found


class _Waiting:
    """Waiter for the next messages of a queue, or for the error of reading them."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: AmqpError | None = None


def _nothing(unit: Unit) -> None:
    """Write nothing: the unit only waits until earlier changes are kept."""


class _Feed:
    """Message that is sent in pieces."""

    def __init__(
        self, queue: MessageQueue, subscription: Subscription, delivery: Any, entry: Entry
    ) -> None:
        self.queue = queue
        self.subscription = subscription
        self.delivery = delivery
        self.entry = entry

    async def wait_writable(self, link: Any) -> None:
        """Wait until *link* can send more, or has ended."""
        while link.attached and not link.writable:
            event = trio.Event()
            self.subscription.on_writable = event.set
            await event.wait()


class Pager:
    """Reader that gives queues the messages they request, a chunk at a time and each in its turn.

    Args:
        limits: Bounds, among them those of a queue's messages in memory.
        on_fault: Called with a queue and an unexpected error in its reading.
    """

    def __init__(self, limits: Limits, on_fault: Callable[[object, Exception], object]) -> None:
        self._limits = limits
        self._on_fault = on_fault
        self._numbers: dict[MessageQueue, int] = {}
        #: Queues that have requested messages, in order.
        self._requesting: dict[MessageQueue, None] = {}
        #: Queues whose read failed and is to be repeated.
        self._failed: dict[MessageQueue, None] = {}
        self._waiting: dict[MessageQueue, _Waiting] = {}
        self._requested = trio.Event()
        #: Payloads shared by messages in the store, by their numbers there, while the broker
        #: starts: its queues are read one after another and share them in memory.
        self._bodies: dict[int, bytes] = {}
        #: Large messages that links have begun to send.
        self._feeds: deque[_Feed] = deque()

    def adopt(self, queue: MessageQueue, number: int) -> None:
        """Page *queue*, node *number* of the store, and send its large messages in pieces.

        A paged queue keeps only its first messages in memory.
        A queue that is not in the order of arrival needs all of its messages and is not paged.
        """
        queue.large.on_pieces = partial(self._feed_soon, queue)
        if queue.in_order:
            self._numbers[queue] = number
            limits = self._limits
            queue.paging.enable(
                limits.queue_memory_bytes_max,
                limits.queue_memory_messages_max,
                partial(self._request, queue),
            )

    def release(self, queue: MessageQueue, error: AmqpError | None = None) -> None:
        """Stop reading for *queue*, which has been deleted, or has failed with *error*."""
        self._numbers.pop(queue, None)
        self._requesting.pop(queue, None)
        self._failed.pop(queue, None)
        self._wake_waiter(queue, error)

    def _request(self, queue: MessageQueue) -> None:
        self._requesting[queue] = None
        self._requested.set()

    # --- At the start ---

    async def restore(self, journal: Journal, number: int, queue: MessageQueue) -> bool:
        """Restore *queue* from node *number* of the store; return whether any message has a ttl.

        A paging queue gets its first messages, and the number and size of the others.

        Raises:
            AmqpError: The store cannot be read.
        """
        call, store = journal.call, journal.store
        expiring = False
        first = 0
        while found := await call(
            _read, store, number, first, _RESTORED_MAX, _RESTORED_BYTES_MAX, self._bodies
        ):
            for entry in found:
                if entry.expires_at != NEVER:
                    expiring = True
                queue.restore(entry)
            first = found[-1].sequence + 1
            if queue in self._numbers and queue.paging.is_full:
                rest = await call(_summarize, store, number, first)
                if rest.count:
                    queue.paging.restore(rest.first, rest.last, rest.count, rest.size)
                for sequence in rest.delayed:
                    await self.fetch(journal, queue, sequence)
                return expiring or rest.expiring
        return expiring

    async def fetch(self, journal: Journal, queue: MessageQueue, sequence: int) -> None:
        """Load one message of *queue* into memory, if the store has it and the queue does not."""
        number = self._numbers.get(queue)
        if number is not None and sequence >= queue.paging.first:
            entry = await journal.call(_read_one, journal.store, number, sequence)
            if entry is not None:
                queue.paging.fetch(entry)

    # --- While running ---

    async def run(self, journal: Journal) -> None:
        """Serve the read requests of queues from the store of *journal*, until cancelled."""
        self._bodies.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._retry)
            while True:
                await self._requested.wait()
                self._requested = trio.Event()
                while self._feeds:
                    nursery.start_soon(self._feed, journal, self._feeds.popleft())
                while self._requesting:
                    queue = next(iter(self._requesting))
                    del self._requesting[queue]
                    try:
                        await self._serve(journal, queue)
                    except Exception as error:
                        self._on_fault(queue, error)

    # --- Operations of operators ---

    async def peek(
        self, journal: Journal, queue: MessageQueue, count: int, bytes_max: int
    ) -> list[Entry]:
        """Return the first *count* messages of *queue* that are available or paused, in order.

        They have at most *bytes_max* bytes, except that one message is always returned. Those in
        the store only are read a chunk at a time and stay there. Messages that arrive or leave in
        between may or may not be included.

        Raises:
            AmqpError: The store cannot be read.
        """
        number = self._numbers.get(queue)
        if number is None:
            return queue.peek(count)
        found: list[Entry] = []
        size = 0
        after = -1
        while len(found) < count:
            some = queue.peek(min(count - len(found), CHUNK), after)
            last = some[-1].sequence if some else -1
            if not some and queue.paging.count:
                some, last = await self._read_available(
                    journal, queue, number, max(after + 1, queue.paging.first)
                )
            if last < 0:
                break
            after = last
            for entry in some:
                size += len(entry.payload)
                if len(found) >= count or (found and size > bytes_max):
                    return found
                found.append(entry)
        return found

    async def _read_available(
        self, journal: Journal, queue: MessageQueue, number: int, first: int
    ) -> tuple[list[Entry], int]:
        """Return available messages from *first* on, and the last sequence number that was read.

        The number is -1 if the store has no more.
        """
        size_max = max(1, self._limits.queue_memory_bytes_max // 4)
        read: list[Entry] = []
        queue.paging.begin_reading()
        try:
            read = await journal.call(_read, journal.store, number, first, AHEAD, size_max)
        except msgspec.DecodeError as error:
            raise AmqpError(f"messages of the queue cannot be read: {error}") from error
        finally:
            some = queue.paging.end_reading(read)
        return some, read[-1].sequence if read else -1

    async def process_in_order(
        self,
        journal: Journal | None,
        queue: MessageQueue,
        count: int,
        work: Callable[[int, int], int],
    ) -> int:
        """Call *work* for the first *count* messages that operators see now, as they are read.

        *work* gets the number of messages that it may take, at most ``STEP``, and the sequence
        number before which they are, and returns how many it took; other tasks run between calls.
        Changes by *work* are on the disk before more is read, so that neither memory nor the
        pending writes grow with the queue. Returns how many were taken in all.

        Raises:
            AmqpError: The store cannot be read, or was given up; or an error of *work*.
        """
        before = queue.place_next
        count = min(count, queue.present)
        done = 0
        while True:
            taken = work(min(count - done, STEP), before)
            done += taken
            if done >= count:
                return done
            if taken:
                await trio.lowlevel.checkpoint()
                continue
            if journal is None or not queue.paging.count or queue.paging.first >= before:
                return done
            await journal.write(_nothing)
            waiting = self._waiting.setdefault(queue, _Waiting())
            queue.paging.read_on()
            if queue.paging.count:
                await waiting.over.wait()
            if waiting.error is not None:
                raise waiting.error

    def _wake_waiter(self, queue: MessageQueue, error: AmqpError | None) -> None:
        """Wake the waiter for *queue*: some of it has been read, or reading failed with *error*."""
        waiting = self._waiting.pop(queue, None)
        if waiting is not None:
            waiting.error = error
            waiting.over.set()

    # --- Messages in pieces ---

    def _feed_soon(
        self, queue: MessageQueue, subscription: Subscription, delivery: Any, entry: Entry
    ) -> None:
        self._feeds.append(_Feed(queue, subscription, delivery, entry))
        self._requested.set()

    async def _feed(self, journal: Journal, feed: _Feed) -> None:
        try:
            await self._send_pieces(journal, feed)
        except Exception as error:
            self._on_fault(feed.queue, error)

    async def _send_pieces(self, journal: Journal, feed: _Feed) -> None:
        """Read the pieces of a message and write them to its link as that can send them."""
        delivery, entry = feed.delivery, feed.entry
        link = feed.subscription.link
        outcome: Outcome | None = RELEASED
        try:
            for index in range(entry.pieces):
                # A message that is moved in the meantime takes its pieces along: look the origin up
                # again.
                place = entry.origin or (0, 0)
                data = await journal.call(journal.store.piece, *place, index)
                await feed.wait_writable(link)
                if delivery.complete or not link.attached:
                    break
                if not data:
                    # The piece is missing; unless the message was taken, the store is damaged.
                    outcome = _LOST
                    break
                delivery.write(data, more=index < entry.pieces - 1)
            else:
                outcome = None
        except AmqpError as error:
            _log.error("a large message cannot be read now: %s", error)
            await trio.sleep(_RETRY_S)
        finally:
            if not delivery.complete and link.attached:
                delivery.abort()
            feed.queue.large.finish(feed.subscription, delivery, entry, outcome)

    async def _retry(self) -> None:
        while True:
            await trio.sleep(_RETRY_S)
            failed, self._failed = self._failed, {}
            for queue in failed:
                try:
                    queue.paging.read_again()
                except Exception as error:
                    self._on_fault(queue, error)

    async def _serve(self, journal: Journal, queue: MessageQueue) -> None:
        number = self._numbers.get(queue)
        if number is None:
            return
        readings = queue.paging.readings()
        failed: AmqpError | None = None
        for identity, first, epoch in readings:
            count = (
                AHEAD
                if identity
                else max(1, min(CHUNK, self._limits.queue_memory_messages_max // 2))
            )
            give = partial(queue.paging.load_ahead, identity) if identity else queue.paging.load
            error = await self._reading(journal, queue, number, identity, first, epoch, count, give)
            failed = failed or error
        self._wake_waiter(queue, failed)

    async def _reading(
        self,
        journal: Journal,
        queue: MessageQueue,
        number: int,
        identity: int,
        first: int,
        epoch: int,
        count: int,
        give: Callable[[list[Entry], int], int],
    ) -> AmqpError | None:
        """Read for the subscription *identity*, or for the queue if 0; return the error, if any."""
        size_max = max(1, self._limits.queue_memory_bytes_max // 4)
        try:
            found = await journal.call(_read, journal.store, number, first, count, size_max)
        except (AmqpError, msgspec.DecodeError) as error:
            _log.error("messages of a queue cannot be read now: %s", error)
            queue.paging.read_failed(identity)
            self._failed[queue] = None
            return error if isinstance(error, AmqpError) else AmqpError(str(error))
        except BaseException:
            queue.paging.read_failed(identity)
            raise
        lost = give(found, epoch)
        if lost:
            _log.error("%d messages of node %d are not in the store any more", lost, number)
        return None
