"""Sessions of an entity against lists: locks, order, receivers that wait, and expiry agree with a naive model."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from amqp_rt_servicebus.conditions import SESSION_CANNOT_BE_LOCKED, SESSION_LOCK_LOST
from entities import Bench, Receiving, condition
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from amqp_rt.broker.building import Subscription
from amqp_rt.fronts import ACCEPTED, RELEASED, AmqpError, Modified, Rejected

pytestmark = pytest.mark.req("Z12")

LOCK_S = 10
DELIVERIES_MAX = 2
SESSIONS = ("a", "b", "")

OUTCOMES = {
    "complete": ACCEPTED,
    "release": RELEASED,
    "abandon": Modified(delivery_failed=True),
    "defer": Modified(undeliverable_here=True),
    "dead-letter": Rejected(),
}


class Item:
    """Message in the model."""

    def __init__(self, number: int, session: str, expires: float) -> None:
        self.number = number
        self.session = session
        self.expires = expires
        self.deferred = False
        self.count = 0
        self.holder: Consumer | None = None


class Consumer:
    """Receiver of a session in the model."""

    def __init__(self, session: str, until: float) -> None:
        self.session = session
        self.until = until
        self.link: Receiving | None = None
        self.credit = 0
        self.got: list[tuple[int, int]] = []
        self.open: dict[int, Item] = {}


class SessionModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(
            sessions=True, lock_s=LOCK_S, deliveries_max=DELIVERIES_MAX, dead_letters_expired=True
        )
        self.items: list[Item] = []
        self.dead: list[int] = []
        self.last = 0
        self.consumers: list[Consumer] = []
        #: Endpoints for receivers that have waited, and how many still wait.
        self.taken: list[Subscription] = []
        self.waiting = 0

    # --- The model ---

    @property
    def now(self) -> float:
        return self.bench.time.now

    def holder(self, session: str) -> Consumer | None:
        return next((each for each in self.consumers if each.session == session), None)

    def ready(self, session: str | None = None) -> list[Item]:
        return [
            each
            for each in self.items
            if each.holder is None
            and not each.deferred
            and (self.holder(each.session) is None if session is None else each.session == session)
        ]

    def requeue(self, item: Item, at: float) -> None:
        item.holder = None
        if item.count >= DELIVERIES_MAX or (item.expires <= at and not item.deferred):
            self.items.remove(item)
            self.dead.append(item.number)

    def free(self, consumer: Consumer, at: float, *, counts: bool) -> None:
        self.consumers.remove(consumer)
        for item in [each for each in self.items if each.holder is consumer]:
            item.count += counts
            self.requeue(item, at)

    def pass_time(self) -> None:
        while True:
            events: list[tuple[float, int, Any]] = [
                (each.expires, 0, each)
                for each in self.items
                if each.holder is None and not each.deferred
            ]
            events += [(each.until, 1, each) for each in self.consumers]
            if not events:
                return
            at, kind, what = min(events, key=lambda event: event[:2])
            if at > self.now:
                return
            if kind == 0:
                self.requeue(what, at)
            else:
                self.free(what, at, counts=True)
                assert what.link is not None

    def deliver(self) -> None:
        while self.waiting and (free := self.ready()):
            self.waiting -= 1
            session = min(free, key=lambda each: each.number).session
            self.consumers.append(Consumer(session, self.now + LOCK_S))
        for consumer in self.consumers:
            while consumer.credit and (ready := self.ready(consumer.session)):
                item = min(ready, key=lambda each: each.number)
                consumer.credit -= 1
                item.holder = consumer
                consumer.open[len(consumer.got)] = item
                consumer.got.append((item.number, item.count))

    def attach_waiters(self) -> None:
        """Attach the links of receivers that have got the session for which they waited."""
        for subscription in self.taken:
            session = self.bench.entity.session_of(subscription)
            assert session is not None
            consumer = self.holder(session.id)
            assert consumer is not None
            assert consumer.link is None
            assert consumer.until == session.until
            consumer.link = self.bench.receiver(subscription=subscription)
        self.taken.clear()
        self.bench.run()

    # --- What is done to both ---

    @rule(session=st.sampled_from(SESSIONS), ttl=st.sampled_from([inf, inf, 5]))
    def send(self, session: str, ttl: float) -> None:
        self.last += 1
        self.items.append(Item(self.last, session, self.now + ttl))
        self.deliver()
        fields = {} if ttl == inf else {"ttl_s": ttl}
        assert self.bench.send(group_id=session, **fields) == self.last
        self.attach_waiters()

    @rule(session=st.sampled_from(SESSIONS))
    def accept(self, session: str) -> None:
        if self.holder(session) is not None:
            with pytest.raises(AmqpError) as caught:
                self.bench.receiver(session=session)
            assert condition(caught.value) == SESSION_CANNOT_BE_LOCKED
            return
        consumer = Consumer(session, self.now + LOCK_S)
        self.consumers.append(consumer)
        consumer.link = self.bench.receiver(session=session)

    @rule()
    def accept_next(self) -> None:
        free = self.ready()
        subscription = self.bench.entity.consume_session(None, settled=False)
        assert (subscription is not None) == bool(free)
        if subscription is not None:
            session = min(free, key=lambda each: each.number).session
            consumer = Consumer(session, self.now + LOCK_S)
            self.consumers.append(consumer)
            consumer.link = self.bench.receiver(subscription=subscription)

    @precondition(lambda self: not self.ready())
    @rule()
    def wait(self) -> None:
        def on_session(subscription: Subscription) -> bool:
            self.taken.append(subscription)
            return True

        self.waiting += 1
        self.bench.entity.wait_for_session(on_session, settled=False)

    @precondition(lambda self: self.consumers)
    @rule(choice=st.integers(0, 9), credit=st.integers(1, 3))
    def grant(self, choice: int, credit: int) -> None:
        consumer = self.consumers[choice % len(self.consumers)]
        consumer.credit += credit
        granted = consumer.credit
        self.deliver()
        assert consumer.link is not None
        consumer.link.grant(granted)

    @precondition(lambda self: any(each.open for each in self.consumers))
    @rule(choice=st.integers(0, 99), how=st.sampled_from(sorted(OUTCOMES)))
    def settle(self, choice: int, how: str) -> None:
        found = [(each, index) for each in self.consumers for index in each.open]
        consumer, index = found[choice % len(found)]
        item = consumer.open.pop(index)
        if how == "complete":
            self.items.remove(item)
        elif how == "dead-letter":
            self.items.remove(item)
            self.dead.append(item.number)
        else:
            item.count += how == "abandon"
            item.deferred = item.deferred or how == "defer"
            self.requeue(item, self.now)
        self.deliver()
        assert consumer.link is not None
        assert consumer.link.update(OUTCOMES[how], index) == OUTCOMES[how]

    @precondition(lambda self: self.consumers)
    @rule(choice=st.integers(0, 9), cut=st.booleans())
    def end(self, choice: int, cut: bool) -> None:
        consumer = self.consumers[choice % len(self.consumers)]
        self.free(consumer, self.now, counts=False)
        self.deliver()
        assert consumer.link is not None
        if cut:
            consumer.link.cut()
        else:
            consumer.link.detach()
        self.attach_waiters()

    @rule(session=st.sampled_from(SESSIONS))
    def renew(self, session: str) -> None:
        consumer = self.holder(session)
        if consumer is None:
            with pytest.raises(AmqpError) as caught:
                self.bench.requests.renew_session(session)
            assert condition(caught.value) == SESSION_LOCK_LOST
        else:
            consumer.until = self.now + LOCK_S
            assert self.bench.requests.renew_session(session) == consumer.until

    @rule(seconds=st.sampled_from([1, 4, 10, 11]))
    def advance(self, seconds: int) -> None:
        self.bench.time.now += seconds
        before = list(self.consumers)
        self.pass_time()
        lost = [each for each in before if each not in self.consumers]
        self.deliver()
        self.bench.advance(0)
        self.attach_waiters()
        for consumer in lost:
            assert consumer.link is not None
            assert consumer.link.error == SESSION_LOCK_LOST

    # --- Both agree ---

    @invariant()
    def receivers_got_the_same(self) -> None:
        for consumer in self.consumers:
            assert consumer.link is not None
            got = [
                (each.message_annotations["x-opt-sequence-number"], each.delivery_count)
                for each in consumer.link.messages
            ]
            assert got == consumer.got
            assert consumer.link.error is None

    @invariant()
    def messages_are_the_same(self) -> None:
        shown = [
            (
                each.message_annotations["x-opt-sequence-number"],
                each.group_id,
                bool(each.message_annotations["x-opt-message-state"]),
                each.delivery_count,
            )
            for each in self.bench.peeked()
        ]
        assert shown == sorted(
            (each.number, each.session, each.deferred, each.count) for each in self.items
        )
        dead = [
            each.message_annotations["x-opt-sequence-number"]
            for each in self.bench.peeked(self.bench.dead)
        ]
        assert dead == sorted(self.dead)

    @invariant()
    def sessions_are_the_same(self) -> None:
        with_messages = {each.session for each in self.items}
        assert set(self.bench.requests.sessions()) == with_messages
        held = {each.session for each in self.consumers}
        assert len(self.bench.entity.sessions) == len(with_messages | held)
        assert self.bench.entity.sessions.waiting == self.waiting
        locked = sum(each.holder is not None for each in self.items)
        assert len(self.bench.entity.shelf.tokens) == locked


TestSessionModel = SessionModel.TestCase
