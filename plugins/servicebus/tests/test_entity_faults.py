"""Faults at an entity: what they leave behind, on links in memory."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.conditions import SERVER_BUSY, SESSION_LOCK_LOST
from amqp_rt_servicebus.faults import Fault, Faults
from entities import Bench, condition, stored_of
from linked import Connection

from amqp_rt import Message
from amqp_rt.fronts import ACCEPTED, AmqpError, Error, Rejected, TransactionalState

BUSY = Error(SERVER_BUSY, "a test wants it")


def with_faults(bench: Bench, *occasions: str) -> Faults:
    """Let each of *occasions* fail once."""
    faults = Faults()
    for each in occasions:
        faults.add(Fault(error=BUSY, on=each))
    for part in bench.entity.parts:
        part.fault = lambda on, path=part.path: faults.take(on, path)
    return faults


def test_a_receiver_is_detached_before_its_message_and_others_get_it() -> None:
    bench = Bench()
    first, second = bench.receiver(credit=1), bench.receiver(credit=1)
    with_faults(bench, "receive")
    bench.send("a")
    bench.run()
    assert sorted(str(each.error) for each in (first, second)) == ["None", SERVER_BUSY]
    assert [*first.bodies, *second.bodies] == ["a"]


def test_a_session_is_free_after_its_receiver_was_detached() -> None:
    bench = Bench(sessions=True)
    bench.send("a", group_id="x")
    with_faults(bench, "receive")
    receiver = bench.receiver(session="x", credit=1)
    assert receiver.error == SERVER_BUSY
    again = bench.receiver(session="x", credit=1)
    assert again.bodies == ["a"]
    assert again.messages[0].delivery_count == 0


def test_a_message_stays_locked_after_a_settlement_that_failed() -> None:
    bench = Bench(lock_s=30)
    number = bench.send("a")
    receiver = bench.receiver(credit=2)
    with_faults(bench, "settle")
    answer = receiver.update(ACCEPTED)
    assert answer == Rejected(BUSY)
    # Its token is still good, and its lock ends in time.
    bench.requests.renew([receiver.token()])
    bench.advance(31)
    assert stored_of(bench, number).delivery_count == 1
    assert receiver.bodies == ["a", "a"]
    assert receiver.update(ACCEPTED) == ACCEPTED
    assert bench.bodies() == []


def test_a_message_of_a_session_stays_locked_until_its_session_ends() -> None:
    bench = Bench(sessions=True)
    bench.send("a", group_id="x")
    receiver = bench.receiver(session="x", credit=1)
    with_faults(bench, "settle")
    assert receiver.update(ACCEPTED) == Rejected(BUSY)
    receiver.detach()
    with pytest.raises(AmqpError) as caught:
        bench.requests.complete([receiver.token()], session_id="x")
    assert condition(caught.value) == SESSION_LOCK_LOST
    assert bench.receiver(session="x", credit=1).bodies == ["a"]


def test_only_one_of_several_outcomes_fails() -> None:
    bench = Bench()
    for body in "abc":
        bench.send(body)
    receiver = bench.receiver(credit=3)
    with_faults(bench, "settle")
    answers: list[Any] = [receiver.update(ACCEPTED, index) for index in range(3)]
    assert answers == [Rejected(BUSY), ACCEPTED, ACCEPTED]
    assert bench.bodies() == ["a"]


def test_a_message_that_a_fault_rejects_is_not_posted_in_its_transaction() -> None:
    connection = Connection()
    with_faults(connection.bench, "send")
    control = connection.controller()
    sender = connection.sender()
    txn_id = connection.declare(control)
    states = [
        connection.send(sender, Message(body), TransactionalState(txn_id)) for body in ("a", "b")
    ]
    assert [type(each.outcome) for each in states] == [Rejected, type(ACCEPTED)]
    connection.discharge(control, txn_id, fail=False)
    assert connection.bench.bodies() == ["b"]


def test_a_batch_is_rejected_by_one_fault() -> None:
    connection = Connection()
    with_faults(connection.bench, "send")
    sender = connection.sender()
    batch = [Message("a"), Message("b")]
    assert connection.send_batch(sender, batch) == Rejected(BUSY)
    assert connection.send_batch(sender, batch) == ACCEPTED
    assert connection.bench.bodies() == ["a", "b"]
