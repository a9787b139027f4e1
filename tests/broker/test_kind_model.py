"""Queues with any of their options against a list: both agree on who gets what, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from runs import machine_settings

from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, rejected
from amqp_rt.values import Described, Symbol, ULong

LOCK_S = 7
OUTCOMES = {
    "accept": ACCEPTED,
    "release": RELEASED,
    "reject": rejected("amqp:decode-error"),
    "not here": Modified(undeliverable_here=True),
}

ONES = Described(Symbol("apache.org:selector-filter:string"), "number = 1")

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "order": st.sampled_from(["priorities", "sort_key"]),
        "last_value_key": st.just("key"),
        "groups": st.just(1_000),
        "lock_s": st.just(LOCK_S),
        "single_active": st.just(True),
        "max_attempts": st.just(3),
        "overflow": st.sampled_from(["drop-head", "reject"]),
    },
)


#: Failed messages are requeued at once; ``test_pauses.py`` has the pauses.
UNPAUSED = Limits(retry_pause_s=0)


class Item:
    """A message of the model that is somewhere in the queue."""

    def __init__(self, place: int, fields: dict[str, Any], now: float) -> None:
        self.place = place
        self.priority = fields["priority"]
        self.number = fields["number"]
        self.key = fields["key"]
        self.group = fields["group"]
        self.expires = now + (fields["ttl"] or float("inf"))
        self.due = now + fields["delay"]
        self.attempts = 0
        self.avoid: set[Consumer] = set()
        self.replaced = False


class Consumer:
    def __init__(self, link: Receiving, priority: int, choosy: bool) -> None:
        self.link = link
        self.choosy = choosy
        self.priority = priority
        self.credit = 0
        self.got: list[int] = []
        #: By index in ``got``, with the time until which it may have it.
        self.held: dict[int, tuple[Item, float]] = {}


class KindModel(RuleBasedStateMachine):
    @initialize(options=OPTIONS)
    def declare(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self.order = self.options.pop("order", "")
        declared = dict(self.options)
        if self.order == "priorities":
            declared["priorities"] = 10
        elif self.order == "sort_key":
            declared["sort_key"] = "number"
        if "overflow" in declared:
            declared["length_max"] = 4
        self.world = World(Queue("q", dead_letter="dead", **declared), limits=UNPAUSED)
        self.client = self.world.client()
        self.producer = self.client.sender("q")
        self.now = 0.0
        self.places = 0
        self.available: list[Item] = []
        self.delayed: list[Item] = []
        self.dead: list[int] = []
        self.dropped = 0
        self.refused = 0
        self.latest: dict[str, Item] = {}
        self.owners: dict[str, Consumer] = {}
        self.consumers: list[Consumer] = []
        self.active: Consumer | None = None
        self.rings: dict[int, list[Consumer]] = {}
        #: Everything that is held, in the order of delivery.
        self.locks: list[tuple[Consumer, int]] = []

    # --- The model ---

    def rank(self, item: Item) -> tuple[Any, ...]:
        if self.order == "priorities":
            return -item.priority, item.place
        if self.order == "sort_key":
            return item.number is None, item.number or 0, item.place
        return (item.place,)

    def allows(self, consumer: Consumer, item: Item) -> bool:
        if consumer in item.avoid or (consumer.choosy and item.number != 1):
            return False
        if "groups" not in self.options or item.group is None:
            return True
        owner = self.owners.get(item.group, consumer)
        return owner is consumer or owner in item.avoid

    def gone(self, item: Item) -> None:
        if self.latest.get(item.key) is item:
            del self.latest[item.key]

    def dead_letter(self, item: Item) -> None:
        self.dead.append(item.place)
        self.gone(item)

    def take(self, consumer: Consumer) -> Item | None:
        while True:
            allowed = [item for item in self.available if self.allows(consumer, item)]
            if not allowed:
                return None
            item = min(allowed, key=self.rank)
            self.available.remove(item)
            if item.expires > self.now:
                return item
            self.dead_letter(item)

    def deliver(self) -> None:
        for level in sorted(self.rings, reverse=True):
            ring = self.rings[level]
            passed = 0
            while self.available and passed < len(ring):
                consumer = ring[0]
                item = self.take(consumer)
                if item is not None:
                    self.hand(consumer, item)
                if consumer.credit:
                    passed = passed + 1 if item is None else 0
                    ring.append(ring.pop(0))
                else:
                    passed = 0
                    ring.pop(0)

    def hand(self, consumer: Consumer, item: Item) -> None:
        if "groups" in self.options and item.group is not None:
            self.owners[item.group] = consumer
        item.attempts += 1
        consumer.credit -= 1
        consumer.held[len(consumer.got)] = item, self.now + LOCK_S
        self.locks.append((consumer, len(consumer.got)))
        consumer.got.append(item.place)

    def enter(self, item: Item) -> None:
        """*item* is available, unless there is a later one with its key."""
        if "last_value_key" in self.options and item.key is not None:
            before = self.latest.get(item.key)
            if before is not None and before.place > item.place:
                self.dropped += 1
                return
            self.latest[item.key] = item
            if before is not None:
                before.replaced = True
                if before in self.available:
                    self.available.remove(before)
                    self.dropped += 1
        self.available.append(item)

    def came(self) -> None:
        self.deliver()
        if self.options.get("overflow") == "drop-head":
            while self.available and self.count() > 4:
                item = min(self.available, key=self.worth)
                self.available.remove(item)
                self.dead_letter(item)

    def worth(self, item: Item) -> tuple[Any, ...]:
        """Return the place of *item* among those that a ring gives up, lowest first."""
        return (item.priority, item.place) if self.order == "priorities" else self.rank(item)

    def count(self) -> int:
        held = sum(len(consumer.held) for consumer in self.consumers)
        return len(self.available) + len(self.delayed) + held

    def conclude(self, consumer: Consumer, index: int, kind: str) -> None:
        item, _ = consumer.held.pop(index)
        self.locks.remove((consumer, index))
        if kind == "accept":
            self.gone(item)
            return
        if kind == "not here":
            item.avoid.add(consumer)
        if kind == "reject" or item.attempts >= self.options.get("max_attempts", 1_000):
            self.dead_letter(item)
        elif item.replaced:
            self.dropped += 1
        else:
            self.available.append(item)

    def stand(self, consumer: Consumer) -> None:
        """Let *consumer*, which has credit, stand in line."""
        ring = self.rings.setdefault(consumer.priority, [])
        if consumer not in ring:
            ring.append(consumer)

    # --- What may happen ---

    @rule(
        fields=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 9),
                "number": st.sampled_from([None, 1, 2, 3]),
                "key": st.sampled_from([None, "a", "b"]),
                "group": st.sampled_from([None, "a", "b", "c"]),
                "ttl": st.sampled_from([None, None, 5]),
                "delay": st.sampled_from([0, 0, 3, 10]),
            }
        )
    )
    def put(self, fields: dict[str, Any]) -> None:
        properties = {name: fields[name] for name in ("number", "key") if fields[name]}
        options: dict[str, Any] = {}
        if fields["delay"]:
            key = Symbol("x-opt-delivery-delay")
            options["message_annotations"] = {key: ULong(fields["delay"] * 1000)}
        if self.options.get("overflow") == "reject" and self.count() >= 4:
            self.refused += 1
        else:
            item = Item(self.places, fields, self.now)
            self.places += 1
            if fields["delay"]:
                self.delayed.append(item)
            else:
                self.enter(item)
                self.came()
        self.producer.send(
            self.places - 1,
            priority=fields["priority"],
            application_properties=properties,
            group_id=fields["group"],
            ttl_s=fields["ttl"],
            **options,
        )

    @precondition(lambda self: len(self.consumers) < 4)
    @rule(priority=st.sampled_from([0, 0, 1, -1]), choosy=st.booleans())
    def attach(self, priority: int, choosy: bool) -> None:
        properties: dict[object, object] = {Symbol("priority"): priority}
        wanted = {Symbol("wanted"): ONES} if choosy else None
        link = self.client.receiver("q", properties=properties, filter=wanted)
        consumer = Consumer(link, priority, choosy)
        self.consumers.append(consumer)
        if self.active is None:
            self.active = consumer

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), credit=st.integers(1, 5))
    def grant(self, data: st.DataObject, credit: int) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.credit = credit
        if "single_active" not in self.options or consumer is self.active:
            self.stand(consumer)
        self.deliver()
        consumer.link.grant(credit)

    @precondition(lambda self: any(consumer.held for consumer in self.consumers))
    @rule(data=st.data(), kind=st.sampled_from(sorted(OUTCOMES)))
    def settle(self, data: st.DataObject, kind: str) -> None:
        consumer = data.draw(st.sampled_from([each for each in self.consumers if each.held]))
        indexes = sorted(
            data.draw(st.sets(st.sampled_from(sorted(consumer.held)), min_size=1, max_size=3))
        )
        for index in indexes:
            self.conclude(consumer, index, kind)
        self.deliver()
        consumer.link.settle(OUTCOMES[kind], *indexes)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        for index in sorted(consumer.held):
            self.conclude(consumer, index, "release")
        self.consumers.remove(consumer)
        for ring in self.rings.values():
            if consumer in ring:
                ring.remove(consumer)
        self.owners = {group: each for group, each in self.owners.items() if each is not consumer}
        for item in self.everything():
            item.avoid.discard(consumer)
        if consumer is self.active:
            self.active = max(self.consumers, key=lambda each: each.priority, default=None)
            if "single_active" in self.options and self.active and self.active.credit:
                self.stand(self.active)
        self.deliver()
        consumer.link.detach()

    def everything(self) -> list[Item]:
        held = [item for consumer in self.consumers for item, _ in consumer.held.values()]
        return [*self.available, *self.delayed, *held]

    @rule(seconds=st.sampled_from([1, 4, 10]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        due = [item for item in self.delayed if item.due <= self.now]
        for item in due:
            self.delayed.remove(item)
            self.enter(item)
        if due:
            self.came()
        if "lock_s" in self.options:
            overdue = [
                (consumer, index)
                for consumer, index in self.locks
                if consumer.held[index][1] <= self.now
            ]
            for consumer, index in overdue:
                self.conclude(consumer, index, "release")
            if overdue:
                self.deliver()
        self.world.time.now += seconds
        self.world.host.turns.tick()
        self.world.pump()
        self.expire()

    def expire(self) -> None:
        """Take what the queue has given up because its time is over.

        The queue looks at those that were never taken and at those that were put back, at the first
        of each. How many more it finds behind them is its own affair, but the first of all must be gone.
        """
        expired = {item.place: item for item in self.available if item.expires <= self.now}
        for place in self.bodies("dead")[len(self.dead) :]:
            item = expired.pop(place)
            self.available.remove(item)
            self.dead_letter(item)
        if self.available:
            assert min(self.available, key=self.rank).expires > self.now

    # --- What must hold ---

    @invariant()
    def queues_are_consistent(self) -> None:
        self.world.check()

    @invariant()
    def check_received(self) -> None:
        for consumer in self.consumers:
            assert consumer.link.bodies == consumer.got
            assert consumer.link.error is None

    @invariant()
    def check_remaining(self) -> None:
        stats = self.world.stats("q")
        held = sum(len(consumer.held) for consumer in self.consumers)
        assert (stats.available, stats.acquired) == (len(self.available), held)
        assert stats.delayed == len(self.delayed)
        assert (stats.dropped, stats.dead_lettered) == (self.dropped, len(self.dead))
        assert stats.enqueued == self.places
        in_order = [item.place for item in sorted(self.available, key=self.rank)]
        assert self.bodies("q") == in_order
        assert self.bodies("dead") == self.dead

    def bodies(self, address: str) -> list[Any]:
        return [Message.decode(m).body for m in self.world.peek(address, 10_000)]

    def teardown(self) -> None:
        """Once everybody has gone and everything is due, nothing is held that cannot be taken."""
        for consumer in self.consumers:
            consumer.link.detach()
        self.world.time.now += 100
        self.world.host.sweep()
        taker = self.client.receiver("q", credit=10_000, settle=ACCEPTED)
        stats = self.world.stats("q")
        assert (stats.available, stats.acquired, stats.delayed) == (0, 0, 0)
        assert len(set(taker.bodies)) == len(taker.bodies)
        queue = self.world.host.space().find("q").held
        assert (queue._latest, queue.shelf.aside) == ({}, set())
        assert len(queue.shelf.older()) == queue.shelf.stale
        self.world.purge("dead")
        assert self.world.host.memory.held == 0


KindModel.TestCase.settings = machine_settings()
TestKindModel = pytest.mark.slow(
    pytest.mark.req("B5", "B6", "B22", "B23", "B24", "B28", "M15", "M24")(KindModel.TestCase)
)
