"""Subscriptions of a topic against lists: whatever comes, goes, comes back and is said, both agree."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runs import machine_settings

from amqp_rt.broker.nodes import Topic
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified
from amqp_rt.termini import Source
from amqp_rt.values import Described, Symbol

OUTCOMES = {"accept": ACCEPTED, "release": RELEASED, "fail": Modified(delivery_failed=True)}


#: Failed messages are requeued at once; ``test_pauses.py`` has the pauses.
UNPAUSED = Limits(retry_pause_s=0)


class Subscriber:
    """A subscription of the model: what waits for it, and what its link has in hand."""

    def __init__(self, name: str, *, lasting: bool, selects: int | None) -> None:
        self.name = name
        self.lasting = lasting
        #: Of messages it wants those with this remainder.
        self.selects = selects
        self.link: Receiving | None = None
        self.credit = 0
        #: (body, failures), in order; and those that its link has, by their index there.
        self.waiting: list[tuple[int, int]] = []
        self.held: dict[int, tuple[int, int]] = {}
        #: Expected deliveries of the present link.
        self.got: list[tuple[int, int]] = []
        self.compared = 0

    def wants(self, body: int) -> bool:
        return self.selects is None or body % 2 == self.selects

    def serve(self) -> None:
        while self.link is not None and self.credit and self.waiting:
            item = self.waiting.pop(0)
            self.held[len(self.got)] = item
            self.got.append(item)
            self.credit -= 1

    def give_back(self, item: tuple[int, int]) -> None:
        """Requeue *item* at its place: bodies rise in the order of the topic."""
        self.waiting.append(item)
        self.waiting.sort()


class SubscriptionModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Topic("t"), limits=UNPAUSED)
        self.sender = self.world.client("maker").sender("t")
        #: All links of one name are of one container.
        self.client = self.world.client("reader")
        self.subscribers: list[Subscriber] = []
        self.sent = 0
        self.named = 0

    def attach(self, subscriber: Subscriber) -> None:
        options: dict[str, Any] = {}
        if subscriber.selects is not None:
            options["filter"] = selecting(subscriber.selects)
        options["expiry_policy"] = "never" if subscriber.lasting else "link-detach"
        subscriber.link = self.client.receiver(
            "t", name=subscriber.name, source=Source(address="t", **options)
        )
        assert subscriber.link.error is None
        subscriber.credit = 0
        subscriber.got = []
        subscriber.compared = 0

    # --- Rules ---

    @rule(lasting=st.booleans(), selects=st.sampled_from([None, 0, 1]))
    def subscribe(self, lasting: bool, selects: int | None) -> None:
        subscriber = Subscriber(f"s{self.named}", lasting=lasting, selects=selects)
        self.named += 1
        self.subscribers.append(subscriber)
        self.attach(subscriber)

    @rule(count=st.integers(1, 5))
    def publish(self, count: int) -> None:
        for _ in range(count):
            body = self.sent
            self.sent += 1
            self.sender.send(body, application_properties={"odd": body % 2})
            for subscriber in self.subscribers:
                if subscriber.wants(body) and (subscriber.link is not None or subscriber.lasting):
                    subscriber.waiting.append((body, 0))
                    subscriber.serve()

    def attached(self) -> list[Subscriber]:
        return [each for each in self.subscribers if each.link is not None]

    @precondition(lambda self: self.attached())
    @rule(data=st.data(), credit=st.integers(1, 5))
    def grant(self, data: st.DataObject, credit: int) -> None:
        subscriber = data.draw(st.sampled_from(self.attached()))
        assert subscriber.link is not None
        subscriber.credit = credit
        subscriber.serve()
        subscriber.link.grant(credit)

    @precondition(lambda self: any(each.held for each in self.attached()))
    @rule(data=st.data(), said=st.sampled_from(sorted(OUTCOMES)))
    def settle(self, data: st.DataObject, said: str) -> None:
        subscriber = data.draw(st.sampled_from([each for each in self.attached() if each.held]))
        index = data.draw(st.sampled_from(sorted(subscriber.held)))
        assert subscriber.link is not None
        body, failures = subscriber.held.pop(index)
        if said != "accept":
            subscriber.give_back((body, failures + (said == "fail")))
            subscriber.serve()
        subscriber.link.settle(OUTCOMES[said], index)

    @precondition(lambda self: self.attached())
    @rule(data=st.data(), closed=st.booleans())
    def leave(self, data: st.DataObject, closed: bool) -> None:
        """Closed, a subscription is over; otherwise one that lasts goes on gathering."""
        subscriber = data.draw(st.sampled_from(self.attached()))
        assert subscriber.link is not None
        subscriber.link.detach(closed=closed)
        subscriber.link = None
        if closed or not subscriber.lasting:
            self.subscribers.remove(subscriber)

    @precondition(lambda self: any(each.link is None for each in self.subscribers))
    @rule(data=st.data())
    def attach_again(self, data: st.DataObject) -> None:
        """A link that remembers nothing: what it had in hand comes again, as after the default outcome."""
        away = [each for each in self.subscribers if each.link is None]
        subscriber = data.draw(st.sampled_from(away))
        held, subscriber.held = subscriber.held, {}
        for item in held.values():
            subscriber.give_back(item)
        self.attach(subscriber)

    # --- Both agree ---

    @invariant()
    def queues_are_consistent(self) -> None:
        self.world.check()

    @invariant()
    def check_received(self) -> None:
        while self.world.host.turns.unfinished:
            self.world.host.turns.run_pending()
            self.world.pump()
        for subscriber in self.attached():
            assert subscriber.link is not None
            deliveries = subscriber.link.endpoint.deliveries
            found = [Message.decode(each.payload) for each in deliveries[subscriber.compared :]]
            expected = subscriber.got[subscriber.compared :]
            assert [(each.body, each.delivery_count) for each in found] == expected
            subscriber.compared = len(deliveries)
            assert subscriber.link.link.credit == subscriber.credit

    @invariant()
    def check_totals(self) -> None:
        stats = self.world.stats("t")
        assert stats.available == sum(len(each.waiting) for each in self.subscribers)
        assert stats.acquired == sum(len(each.held) for each in self.subscribers)


def selecting(odd: int) -> Any:
    return {Symbol("s"): Described(Symbol("apache.org:selector-filter:string"), f"odd = {odd}")}


SubscriptionModel.TestCase.settings = machine_settings()
TestSubscriptions = pytest.mark.slow(pytest.mark.req("B19")(SubscriptionModel.TestCase))
