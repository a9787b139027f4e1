"""The queue, made of several parts, behaves as it did in one class: same operations, same deliveries and state."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import old_queue
import pytest
from brokers import Time
from call_counts import plain_only

from amqp_rt.broker.entries import LATER, NOWHERE, Entry
from amqp_rt.broker.expiry import NEVER
from amqp_rt.broker.queue import queue as new_queue
from amqp_rt.broker.queue.accounts import Memory
from amqp_rt.broker.queue.invariants import broken_invariants
from amqp_rt.broker.queue.keyed import Marks
from amqp_rt.broker.queue.schedule import Due
from amqp_rt.broker.queue.subscriptions import Browser, Subscription
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Rejected

# The old class is plain Python, which cannot inherit from a compiled one.
pytestmark = plain_only

#: How many sequences of operations are drawn; more for a change of the queue: PARTS=1000.
SEEDS = int(os.environ.get("PARTS", "10"))
OPERATIONS = 120
#: Not an encoded message: the header is neither read nor replaced.
OPAQUE = 1


class FakeDelivery:
    """Delivery that a queue has sent."""

    def __init__(self, context: Any, settled: bool, more: bool) -> None:
        self.context = context
        self.settled = settled
        self.complete = not more
        self.delivery_id = 1
        self.state: Any = None
        self.remote_settled = False

    def settle(self, outcome: Any) -> None:
        self.settled = True
        self.state = outcome


class FakeLink:
    """Link that notes what is sent."""

    requeues = False
    flow_properties = None
    connection = None

    def __init__(self, name: str, log: list[Any], max_message_size: int) -> None:
        self.name = name
        self.log = log
        self.max_message_size = max_message_size
        self.credit = 0
        self.writable = True
        self.draining = False
        self.attached = True
        self.unsettled: list[Any] = []

    def send(
        self, payload: Any, context: Any, *, settled: bool, more: bool = False, **_: Any
    ) -> Any:
        if 0 < self.max_message_size < len(payload):
            raise new_queue.LocalProtocolError("too large")
        self.credit -= 1
        self.log.append(("sent", self.name, bytes(payload), settled, more))
        delivery = FakeDelivery(context, settled, more)
        if not settled:
            self.unsettled.append(delivery)
        return delivery

    def offer(self, count: int) -> None:
        self.log.append(("offered", self.name, count))

    def drained(self) -> None:
        self.credit = 0
        self.draining = False
        self.log.append(("drained", self.name))

    def detach(self, error: Any) -> None:
        self.attached = False

    def remember(self) -> dict[Any, Any]:
        return {}


class Choosy:
    """Filter by the last digit of the payload."""

    #: Work of an examination.
    work = 3

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted

    def matches(self, entry: Entry, publisher: str | None) -> bool:
        return entry.payload[0] % 3 == self.wanted


class Store:
    """Ledger of a queue: committed messages, and changes that the next commit makes known."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.kept: dict[int, Entry] = {}
        self.uncommitted: list[Callable[[], Any]] = []

    def remove(self, entry: Entry) -> None:
        self.kept.pop(entry.sequence, None)
        self.uncommitted.append(partial(self.side.paging.removed, entry.sequence))

    def update(self, entry: Entry) -> None:
        self.rewrite(entry)

    def rewrite(self, entry: Entry) -> None:
        if entry.sequence in self.kept:
            self.kept[entry.sequence] = read(entry)

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        for sequence in [each for each in self.kept if first <= each <= last]:
            del self.kept[sequence]
        for entry in kept:
            self.kept[entry.sequence] = read(entry)

    def settle(self, delivery: Any, outcome: Any) -> None:
        self.uncommitted.append(partial(delivery.settle, outcome))


def read(entry: Entry) -> Entry:
    """Return *entry* as a read of the store returns it."""
    return Entry(
        entry.payload,
        OPAQUE,
        True,
        entry.priority,
        delivery_count=entry.delivery_count,
        expires_at=entry.expires_at,
        attempts=entry.attempts,
        sequence=entry.sequence,
        avoid=entry.avoid,
        stored=True,
        rest=entry.rest,
        pieces=entry.pieces,
    )


def mark(entry: Entry) -> Marks:
    """Return the marks of *entry*, made of its payload."""
    kind = entry.payload[0]
    return Marks(kind % 4 or None, kind % 5, kind % 3 - 1)


class Side:
    """Queue of one of the two implementations, with all that surrounds it."""

    def __init__(self, module: Any, options: dict[str, Any], paged: bool, stored: bool) -> None:
        self.log: list[Any] = []
        self.time = Time()
        self.memory = Memory(options.pop("memory"))
        self.queue = module.MessageQueue(
            self.memory, self.time.wall, self.dead_letter, monotonic=self.time.monotonic, **options
        )
        self.queue.on_room = partial(self.log.append, "room")
        self.queue.on_unfinished = partial(self.log.append, "unfinished")
        self.queue.on_empty = partial(self.log.append, "empty")
        self.queue.on_alarm = partial(self.note, "alarm")
        self.store = Store(self)
        self.paging = getattr(self.queue, "paging", self.queue)
        self.large = getattr(self.queue, "large", self.queue)
        self.large.on_pieces = self.feed
        if stored:
            self.queue.ledger = self.store
        if paged:
            enable = getattr(self.paging, "enable", None) or self.paging.page
            enable(60, 6, partial(self.log.append, "ask"))
        self.subscriptions: list[Subscription] = []
        self.reads: list[tuple[int, int, list[Entry]]] = []
        self.fed: list[tuple[Any, Any, Entry]] = []
        self.coming: list[Entry] = []
        self.links = 0

    def note(self, *what: Any) -> None:
        self.log.append(what)

    def dead_letter(self, entry: Entry, reason: str, error: Any) -> bool:
        self.note("dead-lettered", entry.payload, reason, error)
        return reason != "max-attempts"

    def feed(self, subscription: Subscription, delivery: Any, entry: Entry) -> None:
        self.fed.append((subscription, delivery, entry))

    # --- Operations; all random numbers are drawn by the caller ---

    def put(
        self, payload: bytes, priority: int, ttl: float | None, delay: float | None, durable: bool
    ) -> None:
        expires_at = NEVER if ttl is None else self.time.now + ttl
        due = None if delay is None else Due(self.time.now + delay, delay)
        entry = Entry(payload, OPAQUE, durable, priority, expires_at=expires_at, due=due)
        entry.sequence = NOWHERE if due is None else LATER
        queue, store = self.queue, self.store
        if not queue.fits(len(payload)):
            self.note("full")
        elif queue.ledger is not None and (
            durable
            or queue.pending
            or queue.bytes > self.paging.bytes_here_max
            or queue.available > self.paging.messages_here_max
        ):
            queue.reserve(entry)
            entry.stored = durable or entry.sequence >= self.paged_from

            def put() -> None:
                if entry.stored:
                    store.kept[entry.sequence] = read(entry)
                queue.put(entry)

            store.uncommitted.append(put)
        else:
            queue.put(entry)

    def refuse(self, payload: bytes) -> None:
        """Reserve a position and withdraw it, as when the store refuses a message."""
        self.commit()
        entry = Entry(payload, OPAQUE)
        self.queue.reserve(entry)
        self.queue.cancel_reserved(entry)

    def hold(self, payload: bytes, put: bool) -> None:
        entry = Entry(payload, OPAQUE)
        self.queue.reserve_room(entry)
        self.queue.release_room(entry)
        if put and self.queue.ledger is None:
            self.queue.put(entry)
        else:
            self.queue.notify_waiting()

    def gather(self, payloads: list[bytes]) -> None:
        if self.queue.ledger is None:
            self.queue.gather()
            for payload in payloads:
                self.queue.put(Entry(payload, OPAQUE))
            self.queue.deliver_gathered()

    def commit(self) -> None:
        uncommitted, self.store.uncommitted = self.store.uncommitted, []
        for call in uncommitted:
            call()

    def subscribe(
        self, credit: int, max_size: int, browses: bool, wanted: int, **options: Any
    ) -> None:
        filters = None if wanted < 0 else Choosy(wanted)
        self.links += 1
        link = FakeLink(f"l{self.links}", self.log, max_size)
        if browses:
            subscription = self.queue.browse(settled=options["settled"], filters=filters)
        elif self.queue.locked(exclusive=False):
            return
        else:
            subscription = self.queue.subscribe(
                default_outcome=RELEASED, filters=filters, **options
            )
        subscription.on_attached(link)  # type: ignore[arg-type]
        self.subscriptions.append(subscription)
        link.credit = credit
        subscription.on_credit(link)  # type: ignore[arg-type]

    def credit(self, at: int, credit: int, draining: bool, writable: bool) -> None:
        if self.subscriptions:
            subscription = self.subscriptions[at % len(self.subscriptions)]
            link = subscription.link
            link.credit = max(link.credit, credit)
            link.draining = draining
            link.writable = writable
            subscription.on_credit(link)

    def settle(self, at: int, first: int, count: int, outcome: Any) -> None:
        if self.subscriptions:
            subscription = self.subscriptions[at % len(self.subscriptions)]
            link = subscription.link
            some = [each for each in link.unsettled if each.complete][first % 3 :][:count]
            for delivery in some:
                delivery.state = outcome
                delivery.remote_settled = True
                link.unsettled.remove(delivery)
            if some:
                subscription.on_outcomes(link, some)

    def leave(self, at: int) -> None:
        if self.subscriptions:
            subscription = self.subscriptions.pop(at % len(self.subscriptions))
            link = subscription.link
            link.attached = False
            subscription.on_detached(link, None, closed=True)

    def begin_read(self) -> None:
        if not self.reads:
            for identity, first, epoch in self.paging.readings():
                found = [self.store.kept[each] for each in sorted(self.store.kept) if each >= first]
                self.reads.append((identity, epoch, [read(entry) for entry in found[:3]]))

    def end_read(self, fails: bool) -> None:
        if self.reads:
            identity, epoch, found = self.reads.pop(0)
            if fails:
                self.paging.read_failed(identity)
                self.paging.read_again()
            elif identity:
                self.paging.load_ahead(identity, found, epoch)
            else:
                self.note("lost", self.paging.load(found, epoch))

    def see(self, first: int) -> None:
        """Look at messages in the store for an operator."""
        if self.paged:
            self.paging.begin_reading()
            kept = self.store.kept
            found = [read(kept[each]) for each in sorted(kept) if each >= first][:3]
            self.note("seen", [entry.sequence for entry in self.paging.end_reading(found)])

    def expect(self, payload: bytes) -> None:
        if not self.queue.in_order:
            return
        entry = Entry(payload, OPAQUE, True)
        self.large.expect(entry)
        self.coming.append(entry)

    def pieces(self, at: int, ends: bool) -> None:
        if self.coming:
            entry = self.coming[at % len(self.coming)]
            if not ends:
                entry.pieces += 1
                self.large.grow(entry, 20)
                return
            self.coming.remove(entry)
            if not entry.pieces:
                cancel = getattr(self.large, "cancel", None) or self.large.forgo
                cancel(entry)
                return
            entry.stored = self.queue.ledger is not None

            def arrive() -> None:
                if entry.stored:
                    self.store.kept[entry.sequence] = read(entry)
                self.large.arrive(entry)

            self.store.uncommitted.append(arrive)

    def end_feeding(self, whole: bool) -> None:
        if self.fed:
            subscription, delivery, entry = self.fed.pop(0)
            delivery.complete = True
            if not subscription.link.attached:
                whole = False
            finish = getattr(self.large, "finish", None) or self.large.fed
            finish(subscription, delivery, entry, None if whole else RELEASED)

    def wait(self, seconds: float) -> None:
        self.time.now += seconds
        self.memory.work = 40
        if self.queue.alarm <= self.time.now:
            self.queue.tick()

    def resume(self, work: int) -> None:
        self.memory.work = work
        self.queue.resume()

    def conclude_all(self) -> None:
        getattr(self.queue, "deferred", self.queue).conclude_all()

    def take_out(self, count: int, drops: bool) -> None:
        taken = self.queue.drop(count) if drops else self.queue.withdraw(count)
        self.note(taken if isinstance(taken, int) else [each.sequence for each in taken])

    def claim(self, at: int, sequence: int) -> None:
        """Acquire a message for a consumer, as if it had held it before a restart."""
        consumers = [each for each in self.subscriptions if not isinstance(each, Browser)]
        if consumers:
            subscription = consumers[at % len(consumers)]
            entry = self.queue.claim(subscription, sequence)
            self.note("claimed", entry is not None)
            if entry is not None:
                subscription.link.unsettled.append(FakeDelivery(entry, settled=False, more=False))

    def purge(self) -> None:
        self.note("purged", self.queue.purge())

    def sweep(self) -> None:
        self.queue.sweep()

    def lock(self, lock_s: float) -> None:
        self.queue.lock(lock_s)

    def delete(self) -> None:
        self.queue.delete()

    def broken(self) -> int:
        """Return how many invariants do not hold: some operations are possible here and in no broker."""
        return len(
            self.queue.broken_invariants()
            if hasattr(self.queue, "broken_invariants")
            else broken_invariants(self.queue)
        )

    @property
    def paged(self) -> int:
        return self.paging.paged if self.paging is self.queue else self.paging.count

    @property
    def paged_from(self) -> int:
        return self.paging.paged_from if self.paging is self.queue else self.paging.first

    def state(self) -> dict[str, Any]:
        """Return what can be observed."""
        queue = self.queue
        names = (
            *("available", "acquired", "delayed", "pending", "held", "bytes", "alarm"),
            *("present", "bytes_in_memory", "place_next", "unfinished", "in_order"),
        )
        found = {name: getattr(queue, name) for name in names}
        found |= {
            "paged": (self.paged, self.paged_from, self.paging.is_full),
            "memory": (self.memory.held, self.memory.work),
            "counts": vars(queue.counts),
            "room": (queue.room(), queue.fits(30)),
            "busy": queue.is_busy(),
            "peek": [entry.sequence for entry in queue.peek(100)],
            "ready": [(each.identity, each.ready, each.active) for each in self.subscriptions],
            "cursors": [each.cursor for each in self.subscriptions],
            "links": [(each.link.credit, each.link.draining) for each in self.subscriptions],
        }
        return found


def draw(luck: Random, sequence: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return an operation, its arguments and its options."""
    payload = bytes([luck.randrange(60)]) * luck.choice([1, 5, 30])
    some = luck.randrange(100)
    outcomes: list[Any] = [ACCEPTED, ACCEPTED, RELEASED, Modified(delivery_failed=True), Rejected()]
    outcomes.append(Modified(undeliverable_here=True))
    options = {"settled": luck.random() < 0.2, "priority": luck.choice([0, 0, 0, 1, -1])}
    put = (
        payload,
        luck.randrange(10),
        luck.choice([None, None, None, 3.0, 20.0]),
        luck.choice([None, None, None, None, 2.0, 11.0]),
        luck.random() < 0.7,
    )
    credit = (some, luck.randrange(6), luck.random() < 0.3, luck.random() < 0.9)
    table: dict[str, tuple[int, tuple[Any, ...]]] = {
        "put": (30, put),
        "commit": (14, ()),
        "credit": (14, credit),
        "settle": (14, (some, luck.randrange(3), luck.randrange(1, 5), luck.choice(outcomes))),
        "subscribe": (
            3,
            (
                luck.randrange(5),
                luck.choice([0, 0, 0, 10]),
                luck.random() < 0.3,
                luck.choice([-1, -1, 0, 1]),
            ),
        ),
        "leave": (2, (some,)),
        "begin_read": (8, ()),
        "end_read": (12, (luck.random() < 0.1,)),
        "see": (2, (luck.randrange(sequence + 1),)),
        "expect": (1, (payload,)),
        "pieces": (4, (some, luck.random() < 0.4)),
        "end_feeding": (4, (luck.random() < 0.8,)),
        "wait": (6, (luck.choice([0.5, 2.0, 10.0]),)),
        "resume": (6, (luck.choice([0, 5, 100]),)),
        "conclude_all": (1, ()),
        "take_out": (2, (luck.randrange(4), luck.random() < 0.5)),
        "claim": (1, (some, luck.randrange(sequence + 1))),
        "purge": (1, ()),
        "sweep": (2, ()),
        "refuse": (1, (payload,)),
        "hold": (2, (payload, luck.random() < 0.5)),
        "gather": (2, ([payload] * luck.randrange(4),)),
        "lock": (1, (luck.choice([0.0, 4.0]),)),
    }
    name = luck.choices([*table], [weight for weight, _ in table.values()])[0]
    return name, table[name][1], options if name == "subscribe" else {}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_parts_and_whole_agree(seed: int) -> None:
    luck = Random(seed)
    kind = luck.choice(
        ["plain", "plain", "paged", "paged", "stored", "priorities", "keys", "sorted", "groups"]
    )
    paged = kind == "paged"
    options: dict[str, Any] = {
        "memory": luck.choice([100_000, 100_000, 600]),
        "max_deliveries": luck.choice([0, 3]),
        "max_attempts": luck.choice([0, 4]),
        "length_max": luck.choice([0, 0, 12]),
        "bytes_max": luck.choice([0, 300]),
        "priorities": 5 if kind == "priorities" else 1,
        "overflow": luck.choice(["block", "reject", "drop-head"]),
        "marker": mark if kind in {"keys", "sorted", "groups"} else None,
        "last_value": kind == "keys",
        "sorting": kind == "sorted",
        "grouping": kind == "groups",
        "lock_s": luck.choice([0.0, 0.0, 5.0]),
        "single_active": luck.random() < 0.2,
        "limits": Limits(retry_pause_s=luck.choice([0, 3])),
    }
    stored = paged or luck.random() < 0.3
    sides = [Side(module, dict(options), paged, stored) for module in (old_queue, new_queue)]
    deletes_at = luck.choice([OPERATIONS - 10, OPERATIONS, OPERATIONS])
    for number in range(OPERATIONS):
        name, arguments, more = draw(luck, sides[0].queue.place_next)
        if number == deletes_at:
            name, arguments, more = "delete", (), {}
        old, new = sides
        for side in sides:
            side.log.append((number, name))
        try:
            getattr(old, name)(*arguments, **more)
        except Exception as error:
            # Some operations are possible here and in no broker.
            with pytest.raises(type(error)):
                getattr(new, name)(*arguments, **more)
            return
        getattr(new, name)(*arguments, **more)
        assert new.log == old.log
        assert new.state() == old.state(), (number, name, arguments)
        assert new.broken() == old.broken(), (number, name)
