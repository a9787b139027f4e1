"""The queue against a list: whatever is done to it, through real links, both agree on everything."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from brokers import Receiving, World, made
from call_counts import plain_only
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runs import machine_settings

from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queue import invariants, segments, shelf
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, rejected

MAX_DELIVERIES = 3

AVAILABLE, GONE, DEAD = "available", "gone", "dead"


#: Failed messages are requeued at once; ``test_pauses.py`` has the pauses.
UNPAUSED = Limits(retry_pause_s=0)


class Item:
    """A message of the model. ``state`` is a consumer while that consumer holds it."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.state: Any = AVAILABLE
        self.failures = 0
        self.avoid: set[Any] = set()


class Consumer:
    def __init__(self, link: Receiving) -> None:
        self.link = link
        self.credit = 0
        #: Expected deliveries in order, as (sequence, delivery-count), and those still unsettled.
        self.got: list[tuple[int, int]] = []
        self.held: dict[int, Item] = {}


class Reader:
    def __init__(self, link: Receiving, backlog: list[int], cursor: int) -> None:
        self.link = link
        self.credit = 0
        self.backlog = backlog
        self.cursor = cursor
        self.got: list[int] = []


class QueueModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            Queue("q", max_deliveries=MAX_DELIVERIES, dead_letter="dead"), limits=UNPAUSED
        )
        self.producer = self.world.client().sender("q")
        self.items: list[Item] = []
        self.dead: list[int] = []
        self.consumers: list[Consumer] = []
        self.readers: list[Reader] = []
        self.ring: list[Consumer] = []
        #: No message from this sequence number on has ever been taken.
        self.head = 0

    # --- The model ---

    def available(self) -> list[Item]:
        return [item for item in self.items if item.state == AVAILABLE]

    def deliver(self) -> None:
        passed = 0
        while passed < len(self.ring) and self.available():
            consumer = self.ring[0]
            item = next((i for i in self.available() if consumer not in i.avoid), None)
            if item is None:
                passed += 1
                self.ring.append(self.ring.pop(0))
                continue
            passed = 0
            self.head = max(self.head, item.sequence + 1)
            item.state = consumer
            consumer.held[len(consumer.got)] = item
            consumer.got.append((item.sequence, item.failures))
            consumer.credit -= 1
            self.ring.pop(0)
            if consumer.credit:
                self.ring.append(consumer)

    def show(self, reader: Reader) -> None:
        while reader.credit:
            if reader.backlog:
                sequence = reader.backlog.pop(0)
            else:
                sequence = max(reader.cursor, self.head)
                if sequence >= len(self.items):
                    return
                reader.cursor = sequence + 1
            if self.items[sequence].state == AVAILABLE:
                reader.got.append(sequence)
                reader.credit -= 1

    def conclude(self, consumer: Consumer, index: int, kind: str) -> None:
        item = consumer.held.pop(index)
        item.state = AVAILABLE
        if kind == "accept":
            item.state = GONE
        elif kind == "reject":
            item.state = DEAD
        elif kind in {"fail", "fail here"}:
            item.failures += 1
            if item.failures >= MAX_DELIVERIES:
                item.state = DEAD
        if kind in {"not here", "fail here"}:
            item.avoid.add(consumer)
        if item.state == DEAD:
            self.dead.append(item.sequence)

    def forget(self, consumer: Consumer) -> None:
        for index in sorted(consumer.held):
            self.conclude(consumer, index, "release")
        self.consumers.remove(consumer)
        if consumer in self.ring:
            self.ring.remove(consumer)
        for item in self.items:
            item.avoid.discard(consumer)

    # --- What may happen ---

    @rule(count=st.integers(1, 5))
    def put(self, count: int) -> None:
        for _ in range(count):
            self.items.append(Item(len(self.items)))
            self.producer.send(len(self.items) - 1)
            for reader in self.readers:
                self.show(reader)
            self.deliver()

    @precondition(lambda self: len(self.consumers) < 4)
    @rule(own_connection=st.booleans())
    def attach(self, own_connection: bool) -> None:
        client = self.world.client() if own_connection else self.world.clients[0]
        self.consumers.append(Consumer(client.receiver("q")))

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), credit=st.integers(1, 6))
    def grant(self, data: st.DataObject, credit: int) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.credit = credit
        if consumer not in self.ring:
            self.ring.append(consumer)
        self.deliver()
        consumer.link.grant(credit)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.link.drain()
        # All that it might have was sent before: what is left is given back.
        consumer.credit = 0
        if consumer in self.ring:
            self.ring.remove(consumer)
        assert consumer.link.link.credit == 0

    @precondition(lambda self: any(consumer.held for consumer in self.consumers))
    @rule(
        data=st.data(),
        kind=st.sampled_from(["accept", "release", "fail", "reject", "not here", "fail here"]),
    )
    def settle(self, data: st.DataObject, kind: str) -> None:
        consumer = data.draw(st.sampled_from([c for c in self.consumers if c.held]))
        indexes = sorted(
            data.draw(st.sets(st.sampled_from(sorted(consumer.held)), min_size=1, max_size=4))
        )
        for index in indexes:
            self.conclude(consumer, index, kind)
        self.deliver()
        outcome = {
            "accept": ACCEPTED,
            "release": RELEASED,
            "fail": Modified(delivery_failed=True),
            "reject": rejected("amqp:decode-error"),
            "not here": Modified(undeliverable_here=True),
            "fail here": Modified(delivery_failed=True, undeliverable_here=True),
        }[kind]
        consumer.link.settle(outcome, *indexes)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        self.forget(consumer)
        self.deliver()
        consumer.link.detach()

    @precondition(lambda self: len(self.world.clients) > 1)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.world.clients[1:]))
        for consumer in list(self.consumers):
            if consumer.link.link.connection is client.joined.client:
                self.forget(consumer)
                self.deliver()
        client.cut()

    @precondition(lambda self: len(self.readers) < 2)
    @rule()
    def browse(self) -> None:
        link = self.world.clients[0].receiver("q", distribution_mode="copy")
        older = [item.sequence for item in self.available() if item.sequence < self.head]
        self.readers.append(Reader(link, older, self.head))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), credit=st.integers(1, 6))
    def attach_browser(self, data: st.DataObject, credit: int) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.credit = credit
        self.show(reader)
        reader.link.grant(credit)

    # --- What must hold ---

    @invariant()
    def queues_are_consistent(self) -> None:
        self.world.check()

    @invariant()
    def check_deliveries(self) -> None:
        for consumer in self.consumers:
            found = [(m.body, m.delivery_count) for m in consumer.link.messages]
            assert found == consumer.got
        for reader in self.readers:
            assert reader.link.bodies == reader.got

    @invariant()
    def check_counts_and_order(self) -> None:
        stats = self.world.stats("q")
        held = sum(len(consumer.held) for consumer in self.consumers)
        waiting = [item.sequence for item in self.available()]
        assert (stats.available, stats.acquired) == (len(waiting), held)
        assert stats.enqueued == len(self.items)
        assert stats.dead_lettered == len(self.dead)
        assert self.bodies("q") == waiting
        assert self.bodies("dead") == self.dead

    def bodies(self, address: str) -> list[Any]:
        return [Message.decode(m).body for m in self.world.peek(address, 10_000)]

    def teardown(self) -> None:
        """Once everybody has gone, everything that was not settled is there, in order."""
        for client in self.world.clients[1:]:
            client.cut()
        for consumer in self.consumers:
            consumer.link.detach()
        left = [item.sequence for item in self.items if item.state not in {GONE, DEAD}]
        assert self.bodies("q") == left
        assert self.world.stats("q").acquired == 0
        for address in ("q", "dead"):
            self.world.purge(address)
        assert self.world.host.memory.held == 0


QueueModel.TestCase.settings = machine_settings()
TestQueueModel = pytest.mark.slow(
    pytest.mark.req("B5", "M19", "M21", "M22", "M23", "B20", "M30", "Z9")(QueueModel.TestCase)
)


@plain_only
@pytest.mark.slow
class TestPackedQueueModel(QueueModel.TestCase):  # type: ignore[misc]
    """The same with segments so small that most of them are packed."""

    settings = settings(max_examples=10, deadline=None)

    def setUp(self) -> None:
        small = {"SHIFT": 2, "MASK": 3}
        for module, names in (
            (segments, {**small, "SEGMENT": 4}),
            (shelf, {**small, "PACKED_AFTER": 1, "TAKEN_MAX": 1}),
            (invariants, {"SHIFT": 2, "SEGMENT": 4}),
        ):
            patch = mock.patch.multiple(module, **names)
            patch.start()
            self.addCleanup(patch.stop)
        # Their queues cannot be checked once segments have their size again; each step has done so.
        self.addCleanup(made.clear)
