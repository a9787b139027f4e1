"""Entities on the seams of the core: its inlets, rooms, duplicate detection and transactions serve them unchanged."""

from __future__ import annotations

from math import inf

import pytest
from amqp_rt_servicebus.conditions import MESSAGE_LOCK_LOST, NO_ROOM, NOT_ALLOWED
from entities import condition
from linked import Connection

from amqp_rt import Message
from amqp_rt.fronts import (
    ACCEPTED,
    Modified,
    Outcome,
    Rejected,
    TransactionalState,
)

ABANDON = Modified(delivery_failed=True)
DEFER = Modified(undeliverable_here=True)


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


@pytest.mark.req("Z11")
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


@pytest.mark.req("Z18")
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


@pytest.mark.req("Z18")
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


@pytest.mark.req("Z18")
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


@pytest.mark.req("Z18")
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


@pytest.mark.req("Z18")
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


@pytest.mark.req("Z18")
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
