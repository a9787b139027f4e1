"""Entities on the seams of the core: its inlets, rooms, duplicate detection and transactions serve them unchanged."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from amqp_rt_servicebus.conditions import MESSAGE_LOCK_LOST, NO_ROOM, NOT_ALLOWED
from amqp_rt_servicebus.messages import StoredFactory
from entities import Bench, condition

from amqp_rt import Message
from amqp_rt.broker.building import Intake, Producer, Transactions
from amqp_rt.fronts import (
    ACCEPTED,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Modified,
    Outcome,
    Rejected,
    Source,
    Target,
    TransactionalState,
)
from amqp_rt.testing.pairs import Joined, Recorder

ABANDON = Modified(delivery_failed=True)
DEFER = Modified(undeliverable_here=True)


class Connection:
    """A client with links that send to, receive from, and control transactions of an entity."""

    def __init__(self, **options: Any) -> None:
        self.bench = Bench(**options)
        entity = self.bench.entity
        self.intake = Intake(entity)
        self.intake.duplicates = entity.duplicates
        self.transactions = Transactions(None, self.bench.time.monotonic)
        self.joined = Joined(on_attach=self.attach)
        self.joined.pump()
        self.session = self.joined.client.begin()
        self.names = 0

    def attach(self, link: Any) -> None:
        if isinstance(link.target, Coordinator):
            self.transactions.attach(link)
        elif hasattr(link, "send"):
            subscription = self.bench.entity.consume(settled=False)
            subscription.transactions = self.transactions
            link.accept(subscription)
        else:
            entity = self.bench.entity
            link.accept(
                Producer(
                    self.intake,
                    entity,
                    StoredFactory(),
                    self.bench.time.wall,
                    transactions=self.transactions,
                    volatile=True,
                    check=entity.check,
                )
            )

    def sender(self) -> Any:
        self.names += 1
        link = self.session.attach_sender(f"s{self.names}", Recorder(), target=Target(address="q"))
        self.joined.pump()
        return link

    def send(self, link: Any, message: Message, state: Any = None) -> Any:
        """Send *message*; return the outcome."""
        delivery = link.send(message.encode(), state=state)
        self.joined.pump()
        return delivery.state

    def receiver(self, credit: int) -> Recorder:
        self.names += 1
        endpoint = Recorder()
        link = self.session.attach_receiver(f"r{self.names}", endpoint, source=Source(address="q"))
        self.joined.pump()
        link.grant(credit)
        self.joined.pump()
        return endpoint

    def update(self, delivery: Any, state: Outcome | TransactionalState) -> None:
        delivery.update(state)
        self.joined.pump()

    def controller(self) -> Any:
        link = self.session.attach_sender(
            "control", Recorder(), source=Source(), target=Coordinator()
        )
        self.joined.pump()
        return link

    def declare(self, control: Any) -> bytes:
        state = self.send(control, Message(Declare()))
        assert isinstance(state, Declared)
        return state.txn_id

    def discharge(self, control: Any, txn_id: bytes, *, fail: bool) -> None:
        assert self.send(control, Message(Discharge(txn_id, fail))) == ACCEPTED


def test_durable_messages_are_taken_and_keep_that() -> None:
    connection = Connection()
    assert connection.send(connection.sender(), Message("m", durable=True)) == ACCEPTED
    (message,) = connection.bench.peeked()
    assert message.durable


def test_a_message_that_the_entity_refuses_is_rejected() -> None:
    connection = Connection(sessions=True)
    outcome = connection.send(connection.sender(), Message("m"))
    assert isinstance(outcome, Rejected)
    assert condition(outcome.error) == NOT_ALLOWED


def test_a_message_beyond_the_size_is_rejected_and_does_not_wait() -> None:
    connection = Connection(bytes_max=4_000)
    sender = connection.sender()
    for _ in range(3):
        assert connection.send(sender, Message(bytes(1_000))) == ACCEPTED
    outcome = connection.send(sender, Message(bytes(1_000)))
    assert isinstance(outcome, Rejected)
    assert condition(outcome.error) == NO_ROOM
    connection.bench.requests.delete_batch(1, inf)
    assert connection.send(sender, Message(bytes(1_000))) == ACCEPTED


def test_credit_of_senders_ends_with_the_memory() -> None:
    connection = Connection()
    connection.bench.memory.limit = 10_000
    sender = connection.sender()
    assert 0 < sender.credit < 10
    sent = 0
    while sender.credit:
        assert connection.send(sender, Message(bytes(1_000))) == ACCEPTED
        sent += 1
    assert 7 <= sent <= 9
    connection.bench.entity.purge()
    connection.joined.pump()
    assert sender.credit > 0


def test_a_duplicate_is_accepted_and_takes_no_number() -> None:
    connection = Connection(duplicates_s=60)
    sender = connection.sender()
    for message_id in ("1", "1", "2"):
        durable = message_id == "1"
        message = Message(message_id, message_id=message_id, durable=durable)
        assert connection.send(sender, message) == ACCEPTED
        assert connection.send(sender, Message("again", message_id=message_id)) == ACCEPTED
    shown = connection.bench.peeked()
    assert [each.body for each in shown] == ["1", "2"]
    assert [each.message_annotations["x-opt-sequence-number"] for each in shown] == [1, 2]
    connection.bench.advance(60)
    connection.send(sender, Message("after", message_id="1"))
    assert connection.bench.bodies() == ["1", "2", "after"]


@pytest.mark.parametrize("fail", [False, True])
def test_posts_of_a_transaction_appear_with_its_discharge(fail: bool) -> None:
    connection = Connection()
    control = connection.controller()
    sender = connection.sender()
    txn_id = connection.declare(control)
    connection.send(sender, Message("m"), TransactionalState(txn_id))
    assert connection.bench.bodies() == []
    assert connection.bench.memory.held > 0
    connection.discharge(control, txn_id, fail=fail)
    assert connection.bench.bodies() == ([] if fail else ["m"])
    assert connection.bench.memory.held == connection.bench.entity.bytes


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize(
    ("outcome", "state", "count"),
    [(ACCEPTED, "gone", 0), (ABANDON, "ready", 1), (DEFER, "deferred", 0), (Rejected(), "dead", 0)],
)
def test_outcomes_of_a_transaction_take_effect_with_its_discharge(
    outcome: Outcome, state: str, count: int, fail: bool
) -> None:
    connection = Connection()
    bench = connection.bench
    bench.send()
    (delivery,) = connection.receiver(1).deliveries
    control = connection.controller()
    txn_id = connection.declare(control)
    connection.update(delivery, TransactionalState(txn_id, outcome))
    assert bench.entity.acquired == 1
    connection.discharge(control, txn_id, fail=fail)
    sizes = bench.entity.sizes()
    if fail:
        assert bench.entity.acquired == 1
        connection.update(delivery, ACCEPTED)
        assert bench.bodies() == []
        return
    assert (sizes.active, sizes.deferred, sizes.dead_letters) == (
        int(state == "ready"),
        int(state == "deferred"),
        int(state == "dead"),
    )
    assert [each.header.delivery_count for each in bench.peeked()] == [count] * (
        state in ("ready", "deferred")
    )
    assert delivery.state == outcome


def test_a_lock_does_not_end_while_a_transaction_decides() -> None:
    connection = Connection(lock_s=30)
    bench = connection.bench
    bench.send()
    (delivery,) = connection.receiver(1).deliveries
    control = connection.controller()
    txn_id = connection.declare(control)
    connection.update(delivery, TransactionalState(txn_id, ACCEPTED))
    bench.advance(31)
    assert bench.entity.acquired == 1
    connection.discharge(control, txn_id, fail=False)
    assert bench.bodies() == []


def test_a_lost_lock_in_a_transaction_is_answered_so() -> None:
    connection = Connection(lock_s=30)
    bench = connection.bench
    bench.send()
    (delivery,) = connection.receiver(1).deliveries
    bench.advance(31)
    control = connection.controller()
    txn_id = connection.declare(control)
    connection.update(delivery, TransactionalState(txn_id, ACCEPTED))
    connection.discharge(control, txn_id, fail=False)
    assert isinstance(delivery.state, Rejected)
    assert condition(delivery.state.error) == MESSAGE_LOCK_LOST
    assert bench.bodies() == ["m"]


@pytest.mark.parametrize("fail", [False, True])
def test_a_transaction_decides_after_the_end_of_the_link(fail: bool) -> None:
    connection = Connection(lock_s=30)
    bench = connection.bench
    bench.send()
    receiver = connection.receiver(1)
    control = connection.controller()
    txn_id = connection.declare(control)
    connection.update(receiver.deliveries[0], TransactionalState(txn_id, ACCEPTED))
    receiver.deliveries[0].link.detach()
    connection.joined.pump()
    connection.discharge(control, txn_id, fail=fail)
    assert bench.bodies() == (["m"] if fail else [])
    assert bench.entity.acquired == int(fail)
    bench.advance(31)
    assert bench.entity.acquired == 0


def test_receiving_within_a_transaction_is_refused() -> None:
    connection = Connection()
    connection.bench.send()
    control = connection.controller()
    txn_id = connection.declare(control)
    endpoint = connection.receiver(0)
    endpoint.attached[0].grant(1, properties={"txn-id": txn_id})
    connection.joined.pump()
    ((error, _),) = endpoint.detached
    assert error is not None
    assert error.condition == "amqp:not-implemented"
    assert connection.bench.entity.acquired == 0
