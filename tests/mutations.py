"""Deliberate mistakes, one at a time, to show that the simulation detects them.

Each :class:`Mutation` changes one method of the broker or of the protocol as a mistake would have, and names
the promise that this breaks. ``python docs/_tools/mutations.py`` writes the page that shows how each is
detected.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from unittest import mock

from markets import market
from msgspec import Struct
from worlds import trade

from amqp_rt.broker.dead_letters import DeadLetters
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.durable.ledgers import QueueLedger
from amqp_rt.broker.durable.units import Unit
from amqp_rt.broker.entries import head_of
from amqp_rt.broker.expiry import NEVER
from amqp_rt.broker.log.appending import Appending, Entrance
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.shelf import Shelf
from amqp_rt.broker.termini import KeptSource, KeptTarget
from amqp_rt.broker.topics import MessageTopic, TopicLedger
from amqp_rt.broker.transactions import Transaction
from amqp_rt.core.senders import SenderLink
from amqp_rt.outcomes import ACCEPTED, Released
from amqp_rt.testing.faults import Cut, Fails, Full, InjectedFault, Kill, draw_faults
from amqp_rt.testing.simulation import Simulation, simulate

#: Seeds that are tried for each mutation.
SEEDS: Final = 60
#: Virtual seconds after which a scenario counts as hanging.
_WITHIN_S: Final = 3_000.0

Change = Callable[[Any], Callable[..., Any]]


class Mutation(Struct, frozen=True):
    """A deliberate mistake."""

    name: str
    #: The promise that it breaks, in the words of the page.
    promise: str
    scenario: Callable[[Simulation], Awaitable[None]]
    kind: type
    method: str
    #: Function from the correct method to the wrong one.
    change: Change
    #: Draws the faults that happen besides.
    draw: Callable[[Random], Sequence[InjectedFault]] = draw_faults
    #: Seed that is tried first, since it is known to detect the mistake.
    seed: int = 0


class Caught(Struct, frozen=True):
    """Detection of a mistake by the simulation."""

    seed: int
    faults: int
    complaint: str


@contextmanager
def made(mutation: Mutation) -> Iterator[None]:
    """Apply the mistake within the block."""
    right = getattr(mutation.kind, mutation.method)
    with mock.patch.object(mutation.kind, mutation.method, mutation.change(right)):
        yield


def hunt(mutation: Mutation) -> Caught | None:
    """Run seed after seed with the mistake until one fails with it and passes without it; None if there
    is none."""
    logging.disable(logging.CRITICAL)
    try:
        for seed in dict.fromkeys([mutation.seed, *range(SEEDS)]):
            with made(mutation):
                complaint = _fails(mutation, seed)
            if complaint and not _fails(mutation, seed):
                faults = mutation.draw(Random(f"{seed}/faults"))
                return Caught(seed, len(faults), complaint)
    finally:
        logging.disable(logging.NOTSET)
    return None


def _fails(mutation: Mutation, seed: int) -> str:
    """Return the scenario's failure under *seed* in one line; empty if it passes."""
    faults = mutation.draw(Random(f"{seed}/faults"))
    try:
        simulate(mutation.scenario, seed=seed, faults=faults, within=_WITHIN_S)
    except Exception as error:
        said = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {said[0]}"
    return ""


def _gives_up(luck: Random) -> list[InjectedFault]:
    """Make the disk fail twice: the broker fails its store, and is restarted."""
    commit = luck.randint(4, 40)
    return [Fails(host="broker", commit=commit), Fails(host="broker", commit=commit + 1)]


def _kills_late(luck: Random) -> list[InjectedFault]:
    """Kill the broker with messages in flight, and cut its connections."""
    return [Kill(host="broker", commit=luck.randint(4, 40), kept=True), Cut(frames=luck.randint(60, 200))]  # fmt: skip


def _fills(luck: Random) -> list[InjectedFault]:
    """Fill the disk for a while, and kill the broker afterwards."""
    return [Full(host="broker", commit=luck.randint(4, 30), count=3), Kill(host="broker", at=10.0)]


def _settles_first(right: Any) -> Callable[..., None]:
    def stage(self: Any, entries: Any, deliveries: Any, *rest: Any, **options: Any) -> None:
        for delivery in deliveries:
            delivery.settle(ACCEPTED)
        right(self, entries, deliveries, *rest, **options)

    return stage


def _nothing(right: Any) -> Callable[..., None]:
    return lambda self, *args, **options: None


def _false(right: Any) -> Callable[..., bool]:
    return lambda self, *args, **options: False


def _forgets_to_requeue(right: Any) -> Callable[..., None]:
    def conclude(self: Any, subscription: Any, entry: Any, outcome: Any) -> None:
        if not isinstance(outcome, Released):
            right(self, subscription, entry, outcome)

    return conclude


def _requeues_behind(right: Any) -> Callable[..., None]:
    def put_back(self: Any, entry: Any) -> None:
        entry.sequence = self.place_next
        self.place_next += 1
        right(self, entry)

    return put_back


def _counts_credit_twice(right: Any) -> Callable[..., Any]:
    def on_flow(self: Any, *args: Any) -> Any:
        found = right(self, *args)
        self.credit *= 2
        return found

    return on_flow


def _garbles(right: Any) -> Callable[..., None]:
    def put_entries(self: Any, node: int, entries: list[Any]) -> None:
        for entry in entries:
            wrong = entry.payload[:-1] + bytes([entry.payload[-1] ^ 1])
            put = self.put if entry.durable else self.spill
            put(node, entry.sequence, head_of(entry), wrong)

    return put_entries


def _skips_one(right: Any) -> Callable[..., None]:
    def restore(self: Any, entry: Any) -> None:
        if entry.sequence % 4 != 1:
            right(self, entry)

    return restore


def _takes_full_for_kept(right: Any) -> Callable[..., Any]:
    async def one_by_one(self: Any, units: list[Unit], error: Any) -> None:
        for unit in units:
            unit.kept(self.on_fault)
        units.clear()

    return one_by_one


def _loses_a_post(right: Any) -> Callable[..., None]:
    def commit(self: Any, done: Any) -> None:
        if len(self._posts) > 1:
            self._posts.pop()
        right(self, done)

    return commit


def _keeps_a_post(right: Any) -> Callable[..., None]:
    def roll_back(self: Any) -> None:
        for inlet, entry, _ in self._posts[:1]:
            inlet.take(entry.copy_for_node())
        right(self)

    return roll_back


def _consumes_before_commit(right: Any) -> Callable[..., None]:
    def enlist(self: Any, enlisted: Any) -> None:
        right(self, enlisted)
        if isinstance(enlisted.subscription.node, MessageQueue) and enlisted.entry.stored:
            ledger = enlisted.subscription.node.ledger
            if ledger is not None:
                ledger.remove(enlisted.entry)

    return enlist


def _by_place_only(right: Any) -> Callable[..., int]:
    def rank(self: Any, entry: Any) -> int:
        place: int = entry.sequence
        return place

    return rank


def _last_first(right: Any) -> Callable[..., int]:
    def rank(self: Any, entry: Any) -> int:
        if self.priorities > 1:
            entry.priority = 9 - entry.priority
        found: int = right(self, entry)
        if self.priorities > 1:
            entry.priority = 9 - entry.priority
        return found

    return rank


def _misses_a_subscriber(right: Any) -> Callable[..., Any]:
    def reserve(self: Any, entry: Any, matches: Any = None) -> Any:
        found = right(self, entry, matches)
        return dict(list(found.items())[:1])

    return reserve


def _keeps_no_backlog(right: Any) -> Callable[..., Any]:
    def write(self: Any, unit: Unit, entry: Any, matches: Any = None) -> Any:
        was, entry.durable = entry.durable, False
        try:
            return right(self, unit, entry, matches)
        finally:
            entry.durable = was

    return write


def _appends_twice(right: Any) -> Callable[..., None]:
    def add(self: Any, partition: Any, records: Any) -> None:
        right(self, partition, records)
        if len(self.records[partition]) >= 2:
            self.records[partition].append(self.records[partition][-1])

    return add


def _never(right: Any) -> Callable[..., None]:
    def put(self: Any, entry: Any) -> None:
        entry.expires_at = NEVER
        right(self, entry)

    return put


def _too_early(right: Any) -> Callable[..., None]:
    def put(self: Any, entry: Any) -> None:
        if entry.expires_at != NEVER:
            entry.expires_at -= 5
        right(self, entry)

    return put


_LOST: Final = "what is acknowledged is not lost (REL1)"
_SETTLED: Final = "what is settled does not come back (REL2)"
_ORDER: Final = "order is kept (REL3)"
_INVENTED: Final = "nothing is corrupt or invented (REL4)"
_DAMAGE: Final = "nothing is skipped in silence (REL5)"
_ATOMIC: Final = "a transaction is whole or nothing (R1)"
_TIMES: Final = "what expires is given up, at its time (B16)"

MUTATIONS: Final = (
    Mutation("a queue settles before the commit", _LOST, trade, QueueLedger, "stage", _settles_first, _gives_up, seed=1),
    Mutation("a topic settles before the commit", _LOST, market, TopicLedger, "stage", _settles_first, _gives_up, seed=23),
    Mutation("a log settles before the commit", _LOST, trade, Entrance, "stage", _settles_first, _gives_up, seed=27),
    Mutation("a full disk counts as kept", _LOST, trade, Journal, "_one_by_one", _takes_full_for_kept, _fills, seed=1),
    Mutation("a released message is not requeued", _LOST, trade, MessageQueue, "conclude", _forgets_to_requeue),
    Mutation("a topic keeps no backlog", _LOST, market, TopicLedger, "_write", _keeps_no_backlog, seed=9),
    Mutation("a topic misses a subscriber", _LOST, market, MessageTopic, "reserve", _misses_a_subscriber),
    Mutation("an expired message is dropped", _LOST, market, DeadLetters, "move", _false, seed=13),
    Mutation("what is consumed stays on the disk", _SETTLED, trade, QueueLedger, "remove", _nothing, _kills_late),
    Mutation("a kept source forgets what it had in hand", _SETTLED, trade, KeptSource, "restore_delivery", _false, _kills_late, seed=1),
    Mutation("a kept target forgets what it has taken", _SETTLED, trade, KeptTarget, "note", _nothing, _kills_late, seed=4),
    Mutation("a requeued message goes to the end", _ORDER, trade, MessageQueue, "put_back", _requeues_behind, seed=6),
    Mutation("priorities are not looked at", _ORDER, market, Shelf, "rank", _by_place_only),
    Mutation("the lowest priority comes first", _ORDER, market, Shelf, "rank", _last_first),
    Mutation("a message is kept garbled", _INVENTED, trade, Unit, "put_entries", _garbles, seed=6),
    Mutation("a record is appended twice", _INVENTED, trade, Appending, "add", _appends_twice),
    Mutation("a message is skipped as the store is read", _DAMAGE, trade, MessageQueue, "restore", _skips_one, seed=6),
    Mutation("credit is counted twice", "nobody sends more than is granted (X19)", trade, SenderLink, "on_flow", _counts_credit_twice, seed=4),
    Mutation("a commit loses one of its messages", _ATOMIC, market, Transaction, "commit", _loses_a_post),
    Mutation("a rollback keeps one of its messages", _ATOMIC, market, Transaction, "roll_back", _keeps_a_post, seed=39),
    Mutation("a transaction consumes before its commit", _ATOMIC, trade, Transaction, "enlist", _consumes_before_commit, seed=13),
    Mutation("nothing expires", _TIMES, market, MessageQueue, "put", _never, seed=41),
    Mutation("messages expire too early", _TIMES, market, MessageQueue, "put", _too_early, seed=51),
)  # fmt: skip
