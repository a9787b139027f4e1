"""Credit in bytes: a consumer whose credit does not cover a message leaves it to the others."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Time
from brokers import World as BrokerWorld
from byte_links import ByteLink

from amqp_rt.broker.entries import Entry
from amqp_rt.broker.kinds.logs import LogNode
from amqp_rt.broker.leases import FROM, GROUP, TO
from amqp_rt.broker.nodes import Log, Queue
from amqp_rt.broker.queue.accounts import Memory
from amqp_rt.broker.queue.invariants import broken_invariants
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.subscriptions import Subscription
from amqp_rt.outcomes import RELEASED

#: Not an encoded message: the header is neither read nor replaced.
OPAQUE = 1


class World:
    def __init__(self) -> None:
        self.time = Time()
        self.unfinished = 0
        self.queue = MessageQueue(
            Memory(1 << 20), self.time.wall, lambda *_: False, monotonic=self.time.monotonic
        )

    def consumer(self, name: str, *, browses: bool = False, **options: Any) -> ByteLink:
        link = ByteLink(name, **options)
        subscription: Subscription
        if browses:
            subscription = self.queue.browse()
        else:
            subscription = self.queue.subscribe(default_outcome=RELEASED)
        link.subscription = subscription
        subscription.on_attached(link)  # type: ignore[arg-type]
        return link

    def put(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.queue.put(Entry(payload, OPAQUE))
        self.check()

    def check(self) -> None:
        assert broken_invariants(self.queue) == []


SMALL, LARGE = b"s" * 10, b"l" * 100


def test_a_message_beyond_the_credit_waits_for_the_consumer_in_order() -> None:
    world = World()
    link = world.consumer("a")
    link.give(10, 50)
    world.put(SMALL, LARGE, SMALL)
    assert (link.sent, world.queue.available) == ([SMALL], 2)
    link.give(0, 59)
    assert link.sent == [SMALL]
    link.give(0, 11)
    assert link.sent == [SMALL, LARGE, SMALL]
    world.check()


def test_a_message_beyond_the_credit_of_one_consumer_goes_to_another() -> None:
    world = World()
    poor, rich = world.consumer("poor"), world.consumer("rich")
    poor.give(10, 50)
    rich.give(1, 1_000)
    world.put(LARGE, SMALL)
    assert (poor.sent, rich.sent) == ([], [LARGE])
    # The message that it lacked credit for is gone: any credit gets it the next one.
    poor.give(0, 1)
    assert poor.sent == [SMALL]
    world.check()


def test_credit_that_does_not_suffice_costs_one_try() -> None:
    world = World()
    link = world.consumer("a")
    world.put(*[LARGE] * 20)
    link.give(20, 50)
    assert link.tries == 1
    link.give(1, 1)
    assert link.tries == 2
    # A message that arrives meanwhile is not tried at all.
    world.put(SMALL)
    assert (link.tries, link.sent) == (2, [])


def test_a_message_that_was_not_sent_is_not_counted_as_delivered() -> None:
    world = World()
    link = world.consumer("a")
    link.give(1, 50)
    world.put(LARGE)
    assert (world.queue.counts.delivered, world.queue.acquired) == (0, 0)
    link.give(0, 50)
    (delivery,) = link.held
    assert delivery.context.attempts == 1
    assert not delivery.context.altered


def test_a_message_too_large_for_a_link_is_passed_over_for_good() -> None:
    world = World()
    link = world.consumer("a", largest=50)
    link.give(10, 60)
    world.put(LARGE, SMALL)
    assert (link.sent, link.lacking) == ([SMALL], False)
    link.give(0, 1_000)
    assert (link.sent, world.queue.available) == ([SMALL], 1)


@pytest.mark.parametrize("browses", [False, True])
def test_a_drain_ends_at_a_message_that_the_credit_does_not_cover(browses: bool) -> None:
    world = World()
    world.put(SMALL, LARGE)
    link = world.consumer("a", browses=browses)
    link.give(10, 50, drain=True)
    assert (link.sent, link.draining, link.messages) == ([SMALL], False, 0)


def test_a_browser_continues_with_the_message_that_its_credit_did_not_cover() -> None:
    world = World()
    world.put(SMALL, LARGE, SMALL)
    link = world.consumer("a", browses=True)
    link.give(10, 50)
    assert link.sent == [SMALL]
    link.give(0, 1_000)
    assert link.sent == [SMALL, LARGE, SMALL]
    assert world.queue.available == 3


def test_a_reader_of_a_log_waits_for_the_credit_of_its_next_record() -> None:
    broker = BrokerWorld(Log("log"))
    broker.client().receiver("log", credit=0)
    (reader,) = broker.host.space().find_kind("log", LogNode).held.readers
    link = ByteLink("a")
    link.subscription = reader
    reader.link = link  # type: ignore[assignment]
    broker.client().sender("log").send(LARGE, SMALL)
    link.give(10, 50)
    assert (link.sent, link.tries) == ([], 1)
    link.give(0, 1_000)
    assert [LARGE in link.sent[0], SMALL in link.sent[1]] == [True, True]


@pytest.mark.parametrize("drain", [False, True])
async def test_a_reader_of_a_lease_waits_for_the_credit_of_its_next_message(drain: bool) -> None:
    broker = BrokerWorld(Queue("work"))
    broker.client().sender("work").send(LARGE, SMALL)
    leases, node = broker.host.leases, broker.host.space().find("work")
    await leases.open(node, "job")
    await leases.extend(node, "job", 1, 2)
    link = ByteLink("a", largest=10_000)
    link.properties = {GROUP: "job", FROM: 0, TO: 2}
    assert leases.attach(node, link)  # type: ignore[arg-type]
    link.give(10, 50, drain=drain)
    assert (link.sent, link.tries, link.attached) == ([], 1, True)
    # A drain returns the credit, without the message.
    assert (link.draining, link.messages) == (False, 0 if drain else 10)
    link.give(10, 1_000)
    assert [LARGE in link.sent[0], SMALL in link.sent[1]] == [True, True]
