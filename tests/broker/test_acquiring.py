"""Browsers that acquire messages of which they have sent copies."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Time

from amqp_rt.broker.entries import Entry
from amqp_rt.broker.queue.accounts import Memory
from amqp_rt.broker.queue.invariants import broken_invariants
from amqp_rt.broker.queue.keyed import Marks
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.subscriptions import Browser, Subscription
from amqp_rt.events import Peer
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Outcome

#: Not an encoded message: the header is neither read nor replaced.
OPAQUE = 1


class Copy:
    """A delivery, as a front keeps it."""

    delivery_id = 1

    def __init__(self, context: Any, settled: bool) -> None:
        self.context = context
        self.state: Any = None
        self.settled = self.remote_settled = settled

    def settle(self, outcome: Any) -> None:
        self.settled = True


class CopyLink:
    """Link with credit for as many messages as a test says."""

    requeues = True
    flow_properties = None
    connection = None
    peer = Peer()
    writable = attached = True
    draining = False
    max_message_size = 0

    def __init__(self, subscription: Subscription, credit: int) -> None:
        self.subscription = subscription
        self.credit = credit
        self.sent: list[Copy] = []
        self.unsettled: list[Any] = []
        subscription.on_attached(self)  # type: ignore[arg-type]
        subscription.on_credit(self)  # type: ignore[arg-type]

    def send(self, payload: Any, context: Any, *, settled: bool, **_: Any) -> Copy:
        self.credit -= 1
        copy = Copy(context, settled)
        self.sent.append(copy)
        return copy

    def offer(self, count: int) -> None:
        """Ignore the number of waiting messages."""

    def settle(self, outcome: Outcome, *copies: Copy) -> None:
        for copy in copies:
            copy.state = outcome
        self.subscription.on_outcomes(self, list(copies))  # type: ignore[arg-type]

    def end(self, *left: Copy) -> None:
        self.attached = False
        self.unsettled = list(left)
        self.subscription.on_detached(self, None, True)  # type: ignore[arg-type]


def queue_of(*payloads: bytes, **options: Any) -> MessageQueue:
    queue = MessageQueue(
        Memory(1 << 20),
        (time := Time()).wall,
        lambda *_: False,
        monotonic=time.monotonic,
        **options,
    )
    for payload in payloads:
        queue.put(Entry(payload, OPAQUE))
    return queue


def browsing(queue: MessageQueue) -> tuple[Browser, CopyLink]:
    """Return a browser to which all messages have been sent."""
    browser = queue.browse(settled=True)
    return browser, CopyLink(browser, 100)


def test_an_acquired_message_is_settled_like_that_of_a_consumer() -> None:
    queue = queue_of(b"1", b"2", b"3")
    browser, link = browsing(queue)
    first, second, third = link.sent
    assert browser.acquire([first, third]) == [first, third]
    assert (queue.available, queue.acquired) == (1, 2)
    assert not first.settled
    assert not first.remote_settled
    link.settle(ACCEPTED, first, second)
    link.settle(RELEASED, third)
    assert (queue.available, queue.acquired, queue.counts.accepted) == (2, 0, 1)
    assert first.settled
    assert broken_invariants(queue) == []


def test_a_message_is_acquired_once() -> None:
    queue = queue_of(b"1")
    browser, link = browsing(queue)
    other, theirs = browsing(queue)
    assert browser.acquire(link.sent) == link.sent
    assert browser.acquire(link.sent) == []
    assert other.acquire(theirs.sent) == []


@pytest.mark.parametrize(
    "default", [RELEASED, Modified(delivery_failed=True)], ids=["released", "failed"]
)
def test_acquired_messages_get_the_default_outcome_when_the_link_ends(default: Outcome) -> None:
    queue = queue_of(b"1", b"2")
    browser, link = browsing(queue)
    browser.default_outcome = default
    (first, _) = link.sent
    browser.acquire([first])
    link.end(first)
    assert (queue.available, queue.acquired) == (2, 0)
    entry = queue.shelf.available_at(0)
    assert entry is not None
    assert entry.delivery_count == (default is not RELEASED)
    assert queue.browsers == {}
    assert broken_invariants(queue) == []


@pytest.mark.parametrize("options", [{}, {"priorities": 10}], ids=["in-order", "priorities"])
def test_places_are_kept_whatever_was_acquired_and_returned(options: dict[str, Any]) -> None:
    queue = queue_of(*[b"%d" % number for number in range(8)], **options)
    browser, link = browsing(queue)
    by_place = sorted(link.sent, key=lambda copy: copy.context)
    for chosen in ([3, 0, 7], [1, 5], [0, 3]):
        copies = [by_place[place] for place in chosen]
        assert browser.acquire(copies) == copies
        assert broken_invariants(queue) == []
        link.settle(RELEASED, *copies)
        assert broken_invariants(queue) == []
        for copy, place in zip(copies, chosen, strict=True):
            copy.context = place
    taking = CopyLink(queue.subscribe(default_outcome=RELEASED), 100)
    assert [copy.context.sequence for copy in taking.sent] == list(range(8))


def test_a_consumer_that_keeps_others_out_keeps_browsers_from_acquiring() -> None:
    queue = queue_of(b"1")
    browser, link = browsing(queue)
    consumer = queue.subscribe(default_outcome=RELEASED, exclusive=True)
    assert browser.acquire(link.sent) == []
    consumer.end()
    assert browser.acquire(link.sent) == link.sent


def test_the_owner_of_a_group_keeps_its_messages() -> None:
    queue = queue_of(grouping=True, marker=lambda entry: Marks(group=int(entry.payload)))
    for payload in (b"1", b"2", b"1"):
        queue.put(Entry(payload, OPAQUE))
    browser, link = browsing(queue)
    owner = CopyLink(queue.subscribe(default_outcome=RELEASED), 1)
    assert len(owner.sent) == 1
    assert browser.acquire(link.sent) == [link.sent[1]]


def test_messages_of_a_deleted_queue_are_not_acquired() -> None:
    queue = queue_of(b"1")
    browser, link = browsing(queue)
    queue.delete()
    assert browser.acquire(link.sent) == []
