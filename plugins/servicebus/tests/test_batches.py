"""Batches that clients send: all messages or none, also in a transaction."""

from __future__ import annotations

import pytest
from amqp_rt_servicebus.conditions import NO_ROOM, NOT_ALLOWED
from amqp_rt_servicebus.messages import BATCH_FORMAT
from entities import condition
from linked import Connection

from amqp_rt import Message
from amqp_rt.fronts import ACCEPTED, Rejected, TransactionalState

AB = [Message("a", message_id="1"), Message("b", message_id="2")]


def test_messages_of_a_batch_are_stored_one_by_one() -> None:
    connection = Connection()
    sender = connection.sender()
    assert connection.send(sender, Message("first")) == ACCEPTED
    assert connection.send_batch(sender, AB) == ACCEPTED
    assert connection.bench.bodies() == ["first", "a", "b"]


def test_a_batch_with_a_message_that_is_refused_is_refused() -> None:
    connection = Connection(sessions=True)
    outcome = connection.send_batch(connection.sender(), [Message("a", group_id="x"), Message("b")])
    assert isinstance(outcome, Rejected)
    assert condition(outcome.error) == NOT_ALLOWED
    assert connection.bench.bodies() == []


def test_a_batch_that_is_malformed_is_refused() -> None:
    connection = Connection()
    outcome = connection.send_payload(connection.sender(), b"\x00\x53\x77\x40", BATCH_FORMAT, None)
    assert isinstance(outcome, Rejected)
    assert condition(outcome.error) == "amqp:decode-error"


def test_a_batch_without_room_is_refused_as_a_whole() -> None:
    connection = Connection(bytes_max=4_000)
    outcome = connection.send_batch(connection.sender(), [Message(bytes(1_500))] * 3)
    assert isinstance(outcome, Rejected)
    assert condition(outcome.error) == NO_ROOM
    assert connection.bench.entity.bytes == 0


@pytest.mark.parametrize("fail", [False, True])
def test_a_batch_of_a_transaction_appears_with_its_discharge(fail: bool) -> None:
    connection = Connection()
    control = connection.controller()
    txn_id = connection.declare(control)
    outcome = connection.send_batch(connection.sender(), AB, TransactionalState(txn_id))
    assert outcome == TransactionalState(txn_id, ACCEPTED)
    assert connection.bench.bodies() == []
    assert connection.bench.memory.held > 0
    connection.discharge(control, txn_id, fail=fail)
    assert connection.bench.bodies() == ([] if fail else ["a", "b"])
    assert connection.bench.memory.held == connection.bench.entity.bytes


def test_duplicates_in_batches_of_transactions_are_dropped() -> None:
    connection = Connection(duplicates_s=60)
    control = connection.controller()
    sender = connection.sender()
    for _ in range(2):
        txn_id = connection.declare(control)
        connection.send_batch(sender, AB, TransactionalState(txn_id))
        connection.discharge(control, txn_id, fail=False)
    assert connection.bench.bodies() == ["a", "b"]
    assert connection.bench.memory.held == connection.bench.entity.bytes


def test_a_batch_that_is_refused_fails_its_transaction() -> None:
    connection = Connection(sessions=True)
    control = connection.controller()
    txn_id = connection.declare(control)
    outcome = connection.send_batch(connection.sender(), AB, TransactionalState(txn_id))
    assert isinstance(outcome, TransactionalState)
    assert isinstance(outcome.outcome, Rejected)


def test_a_batch_of_an_unknown_transaction_detaches_its_link() -> None:
    connection = Connection()
    sender = connection.sender()
    connection.send_batch(sender, AB, TransactionalState(b"unknown"))
    assert not sender.attached
    assert connection.bench.bodies() == []
