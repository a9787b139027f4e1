"""Entities against a list: whatever is done to one, over real links and by operations, both agree.

The model holds messages in a list that it searches, looks for the next event among all of them, and keeps each
unit of credit as an element of another list.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any
from uuid import UUID

import pytest
from amqp_rt_servicebus.conditions import MESSAGE_LOCK_LOST, MESSAGE_NOT_FOUND
from amqp_rt_servicebus.messages import SCHEDULED_ENQUEUE_TIME
from entities import NOW, Bench, Divided, Receiving, condition
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from amqp_rt import Message
from amqp_rt.fronts import ACCEPTED, RELEASED, AmqpError, Error, Modified, Rejected
from amqp_rt.values import Symbol, Timestamp

pytestmark = pytest.mark.req("Z7", "Z9", "Z10", "Z13")

LOCK_S = 10
DELIVERIES_MAX = 3
RECEIVERS = 3

ACTIVE, DEFERRED, SCHEDULED = 0, 1, 2

OUTCOMES = {
    "complete": ACCEPTED,
    "release": RELEASED,
    "abandon": Modified(delivery_failed=True),
    "defer": Modified(undeliverable_here=True),
    "dead-letter": Rejected(
        Error("com.microsoft:dead-letter", None, {Symbol("DeadLetterReason"): "asked"})
    ),
}


class Lock:
    """Lock of a message in the model; the token is learnt from the delivery."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.token: UUID | None = None


class Item:
    """Message in the model."""

    def __init__(self, number: int, body: int, ttl: float, due: float) -> None:
        self.number = number
        self.body = body
        self.ttl = ttl
        self.due = due
        self.expires = inf
        self.state = SCHEDULED if due else ACTIVE
        self.count = 0
        self.lock: Lock | None = None


class Consumer:
    """Receiver in the model: its link, and what it should have got."""

    def __init__(self, link: Receiving) -> None:
        self.link = link
        self.credit = 0
        self.got: list[tuple[int, int]] = []
        #: The message and the lock of each delivery that the client has not settled, by its index.
        self.open: dict[int, tuple[Item, Lock]] = {}


class EntityModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(lock_s=LOCK_S, deliveries_max=DELIVERIES_MAX, dead_letters_expired=True)
        self.items: list[Item] = []
        self.dead: list[tuple[int, str, int]] = []
        self.last = 0
        self.bodies = 0
        self.line: list[Consumer] = []
        self.locks: list[tuple[Item, Lock]] = []
        self.consumers = [Consumer(self.bench.receiver()) for _ in range(RECEIVERS)]

    # --- The model ---

    @property
    def now(self) -> float:
        return self.bench.time.now

    def number(self) -> int:
        self.last += 1
        return self.last

    def activate(self, item: Item, at: float) -> None:
        item.state = ACTIVE
        item.expires = at + item.ttl
        self.items.append(item)

    def bury(self, item: Item, reason: str) -> None:
        self.items.remove(item)
        item.lock = None
        self.dead.append((item.number, reason, item.count))

    def requeue(self, item: Item, at: float) -> None:
        item.lock = None
        if item.count >= DELIVERIES_MAX:
            self.bury(item, "MaxDeliveryCountExceeded")
        elif item.state == ACTIVE and item.expires <= at:
            self.bury(item, "TTLExpiredException")

    def settle(self, item: Item, how: str) -> None:
        if how == "complete":
            self.items.remove(item)
            item.lock = None
            return
        if how == "dead-letter":
            self.bury(item, "asked")
            return
        item.count += how == "abandon"
        if how == "defer":
            item.state = DEFERRED
        self.requeue(item, self.now)

    def events(self) -> list[tuple[float, int, int, Item]]:
        found = []
        for item in self.items:
            if item.state == SCHEDULED:
                found.append((item.due, 0, item.number, item))
            elif item.lock is not None:
                found.append((item.lock.until, 1, item.number, item))
            elif item.state == ACTIVE and item.expires < inf:
                found.append((item.expires, 2, item.number, item))
        return sorted(found, key=lambda event: event[:3])

    def pass_time(self) -> None:
        while (events := self.events()) and events[0][0] <= self.now:
            at, kind, _, item = events[0]
            if kind == 0:
                self.items.remove(item)
                item.number = self.number()
                self.activate(item, at)
            elif kind == 1:
                item.count += 1
                self.requeue(item, at)
            else:
                self.bury(item, "TTLExpiredException")

    def deliver(self) -> None:
        while self.line:
            ready = [each for each in self.items if each.state == ACTIVE and each.lock is None]
            if not ready:
                return
            item = min(ready, key=lambda each: each.number)
            consumer = self.line.pop(0)
            consumer.credit -= 1
            item.lock = Lock(self.now + LOCK_S)
            self.locks.append((item, item.lock))
            consumer.open[len(consumer.got)] = (item, item.lock)
            consumer.got.append((item.number, item.count))

    def is_held(self, item: Item, lock: Lock) -> bool:
        return item.lock is lock

    def pick(self, choice: int, choices: list[Any]) -> Any:
        return choices[choice % len(choices)]

    # --- What is done to both ---

    @rule(ttl=st.sampled_from([inf, inf, 5, 25]), delay=st.sampled_from([0, 0, 0, 4, 15]))
    def send(self, ttl: float, delay: int) -> None:
        self.bodies += 1
        fields: dict[str, Any] = {} if ttl == inf else {"ttl_s": ttl}
        if delay:
            due = Timestamp(round((self.now + delay) * 1000))
            fields["message_annotations"] = {SCHEDULED_ENQUEUE_TIME: due}
        item = Item(self.number(), self.bodies, ttl, self.now + delay if delay else 0)
        if delay:
            self.items.append(item)
        else:
            self.activate(item, self.now)
        assert self.bench.send(self.bodies, **fields) == item.number
        self.deliver()
        self.bench.run()

    @rule(which=st.integers(0, RECEIVERS - 1), credit=st.integers(1, 3))
    def grant(self, which: int, credit: int) -> None:
        consumer = self.consumers[which]
        consumer.credit += credit
        self.line += [consumer] * credit
        granted = consumer.credit
        self.deliver()
        consumer.link.grant(granted)

    @rule(seconds=st.sampled_from([1, 4, 10, 11, 30]))
    def advance(self, seconds: int) -> None:
        self.bench.time.now += seconds
        self.pass_time()
        self.deliver()
        self.bench.advance(0)

    @precondition(lambda self: any(each.open for each in self.consumers))
    @rule(choice=st.integers(0, 100), how=st.sampled_from(sorted(OUTCOMES)))
    def settle_by_link(self, choice: int, how: str) -> None:
        consumer, index = self.pick(
            choice, [(each, index) for each in self.consumers for index in each.open]
        )
        item, lock = consumer.open.pop(index)
        held = self.is_held(item, lock)
        if held:
            self.settle(item, how)
            self.deliver()
        answer = consumer.link.update(OUTCOMES[how], index)
        if not held:
            assert isinstance(answer, Rejected)
            assert condition(answer.error) == MESSAGE_LOCK_LOST
        elif how == "dead-letter":
            assert answer == Rejected()
        else:
            assert answer == OUTCOMES[how]

    @precondition(lambda self: self.locks)
    @rule(
        choice=st.integers(0, 1_000),
        how=st.sampled_from(["complete", "abandon", "defer", "dead-letter", "renew"]),
    )
    def settle_by_token(self, choice: int, how: str) -> None:
        item, lock = self.pick(choice, self.locks[-10:])
        assert lock.token is not None
        requests = Divided(self.bench)
        call: dict[str, Callable[[], Any]] = {
            "complete": lambda: requests.complete([lock.token]),
            "abandon": lambda: requests.abandon([lock.token]),
            "defer": lambda: requests.defer([lock.token]),
            "dead-letter": lambda: requests.dead_letter([lock.token], "asked"),
            "renew": lambda: requests.renew([lock.token]),
        }
        if not self.is_held(item, lock):
            with pytest.raises(AmqpError) as caught:
                call[how]()
            assert condition(caught.value) == MESSAGE_LOCK_LOST
            return
        if how == "renew":
            lock.until = self.now + LOCK_S
            assert call[how]() == (lock.until, 1)
            return
        self.settle(item, how)
        self.deliver()
        call[how]()
        self.bench.run()

    @precondition(lambda self: self.locks)
    @rule(
        choices=st.lists(st.integers(0, 1_000), min_size=2, max_size=4),
        how=st.sampled_from(["complete", "abandon", "defer", "dead_letter"]),
    )
    def settle_several_by_token(self, choices: list[int], how: str) -> None:
        picked = dict.fromkeys(self.pick(choice, self.locks[-10:]) for choice in choices)
        tokens = [lock.token for _, lock in picked]
        settle = getattr(self.bench.requests, how)
        arguments = ("asked",) if how == "dead_letter" else ()
        if not all(self.is_held(item, lock) for item, lock in picked):
            with pytest.raises(AmqpError) as caught:
                settle(tokens, *arguments)
            assert condition(caught.value) == MESSAGE_LOCK_LOST
            return
        for item, _ in picked:
            self.settle(item, how.replace("_", "-"))
        self.deliver()
        settle(tokens, *arguments)
        self.bench.run()

    @rule(choice=st.integers(0, 100), settled=st.booleans())
    def receive_deferred(self, choice: int, settled: bool) -> None:
        number = choice % (self.last + 2)
        item = next((each for each in self.items if each.number == number), None)
        if item is None or item.state != DEFERRED or item.lock is not None:
            expected = False
        elif item.expires <= self.now:
            expected = False
            self.bury(item, "TTLExpiredException")
        else:
            expected = True
        if not expected:
            with pytest.raises(AmqpError) as caught:
                Divided(self.bench).receive_deferred([number], settled=settled)
            assert condition(caught.value) == MESSAGE_NOT_FOUND
            return
        assert item is not None
        ((payload, token),) = Divided(self.bench).receive_deferred([number], settled=settled)
        message = Message.decode(payload)
        assert (message.body, message.delivery_count) == (item.body, item.count)
        if settled:
            self.items.remove(item)
        else:
            item.lock = Lock(self.now + LOCK_S)
            item.lock.token = token
            self.locks.append((item, item.lock))

    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        number = choice % (self.last + 2)
        item = next(
            (each for each in self.items if each.number == number and each.state == SCHEDULED), None
        )
        if item is None:
            with pytest.raises(AmqpError) as caught:
                Divided(self.bench).cancel_scheduled([number])
            assert condition(caught.value) == MESSAGE_NOT_FOUND
        else:
            self.items.remove(item)
            Divided(self.bench).cancel_scheduled([number])

    @rule(count=st.integers(1, 3))
    def delete(self, count: int) -> None:
        ready = [each for each in self.items if each.state == ACTIVE and each.lock is None]
        gone = sorted(ready, key=lambda each: each.number)[:count]
        for item in gone:
            self.items.remove(item)
        assert self.bench.requests.delete_batch(count, self.now + 1) == len(gone)

    @rule(which=st.integers(0, RECEIVERS - 1), cut=st.booleans())
    def replace(self, which: int, cut: bool) -> None:
        consumer = self.consumers[which]
        self.line = [each for each in self.line if each is not consumer]
        if cut:
            consumer.link.cut()
        else:
            consumer.link.detach()
            self.bench.receivers.remove(consumer.link)
        self.consumers[which] = Consumer(self.bench.receiver())

    # --- Both agree ---

    @invariant()
    def receivers_got_the_same(self) -> None:
        for consumer in self.consumers:
            got = [
                (each.message_annotations["x-opt-sequence-number"], each.delivery_count)
                for each in consumer.link.messages
            ]
            assert got == consumer.got
            assert consumer.link.link.credit == consumer.credit
            for index, (_, lock) in consumer.open.items():
                lock.token = consumer.link.token(index)

    @invariant()
    def messages_are_the_same(self) -> None:
        shown = [
            (
                each.message_annotations["x-opt-sequence-number"],
                each.body,
                each.message_annotations["x-opt-message-state"],
                each.delivery_count,
            )
            for each in self.bench.peeked()
        ]
        expected = [(each.number, each.body, each.state, each.count) for each in self.items]
        assert shown == sorted(expected)

    @invariant()
    def dead_letters_are_the_same(self) -> None:
        shown = [
            (
                each.message_annotations["x-opt-sequence-number"],
                each.application_properties["DeadLetterReason"],
                each.delivery_count,
            )
            for each in self.bench.peeked(self.bench.dead)
        ]
        assert shown == sorted(self.dead)

    @invariant()
    def accounts_are_right(self) -> None:
        entity = self.bench.entity
        held = sum(
            each.size
            for part in entity.parts
            for number in part.shelf.numbers
            if (each := part.shelf.find(number)) is not None
        )
        assert self.bench.memory.held == held
        states = [each.state for each in self.items]
        sizes = entity.sizes()
        assert [sizes.active, sizes.deferred, sizes.scheduled] == [
            states.count(each) for each in (ACTIVE, DEFERRED, SCHEDULED)
        ]
        locked = [each for each in self.items if each.lock is not None]
        assert entity.acquired == sum(each.state == ACTIVE for each in locked)
        assert len(entity.shelf.tokens) == len(locked)

    @invariant()
    def the_alarm_is_in_time(self) -> None:
        events = self.events()
        if events:
            assert self.bench.entity.alarm <= events[0][0] - NOW + 0.001


TestEntityModel = EntityModel.TestCase
