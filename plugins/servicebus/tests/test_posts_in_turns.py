"""Batches in transactions are read and put in turns; what may change in between is examined again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from amqp_rt_servicebus.conditions import ENTITY_DISABLED
from entities import condition
from linked import Connection
from msgspec.structs import replace

from amqp_rt import Message
from amqp_rt.fronts import ACCEPTED, Discharge, Rejected, TransactionalState

pytestmark = pytest.mark.req("Z13")

WORK = 100
COUNT = 100


class Posting:
    """A connection whose work is limited, with a transaction."""

    def __init__(self, **options: Any) -> None:
        self.connection = Connection(**options)
        self.bench = self.connection.bench
        self.control = self.connection.controller()
        self.sender = self.connection.sender()
        self.declare()
        self.bench.memory.work = WORK

    def declare(self) -> None:
        self.txn_id = self.connection.declare(self.control)
        self.state = TransactionalState(self.txn_id)

    def batch(self, first: int = 0, count: int = COUNT, state: Any = None) -> Any:
        """Send a batch in the transaction; return the delivery."""
        messages = [Message(body) for body in range(first, first + count)]
        return self.connection.begin_batch(self.sender, messages, state or self.state)

    def turn(self) -> None:
        self.bench.turn(WORK)
        self.connection.joined.pump()

    def turns(self, true: Callable[[], bool] = lambda: False) -> None:
        """Give turns until *true*, or as long as there is something to do."""
        for _ in range(1_000):
            if true() or not self.bench.unfinished:
                return
            self.turn()
        raise AssertionError("it has no end")

    def send(self, body: object) -> Any:
        return self.connection.begin(self.sender, bytes(Message(body).encode()), 0, self.state)

    def discharge(self, *, fail: bool = False) -> Any:
        payload = bytes(Message(Discharge(self.txn_id, fail)).encode())
        return self.connection.begin(self.control, payload, 0, None)

    @property
    def bodies(self) -> list[Any]:
        self.bench.memory.work = 1 << 40
        return self.bench.bodies()

    @property
    def is_free(self) -> bool:
        """Whether no room is reserved."""
        return self.bench.memory.held == self.bench.entity.bytes


def outcome(delivery: Any) -> Any:
    state = delivery.state
    return state.outcome if isinstance(state, TransactionalState) else state


def test_a_batch_is_read_in_turns_and_its_discharge_waits() -> None:
    posting = Posting()
    posted = posting.batch()
    discharged = posting.discharge()
    assert posting.bench.unfinished
    assert (posted.state, discharged.state) == (None, None)
    posting.turns()
    assert outcome(posted) == ACCEPTED
    assert discharged.state == ACCEPTED
    assert posting.bodies == list(range(COUNT))
    assert posting.is_free


def test_posts_appear_in_the_order_in_which_they_were_sent() -> None:
    posting = Posting()
    posting.batch()
    posting.send(COUNT)
    posting.batch(COUNT + 1)
    posting.send(2 * COUNT + 1)
    discharged = posting.discharge()
    posting.turns()
    assert discharged.state == ACCEPTED
    assert posting.bodies == list(range(2 * COUNT + 2))
    assert posting.is_free


def test_what_is_sent_outside_of_the_transaction_keeps_its_order_too() -> None:
    posting = Posting()
    posting.batch()
    for body in ("a", "b"):
        payload = bytes(Message(body).encode())
        posting.connection.begin(posting.sender, payload, 0, None)
    posting.turns()
    assert posting.bodies == ["a", "b"]
    posting.discharge()
    posting.turns()
    assert posting.bodies == ["a", "b", *range(COUNT)]


def test_nothing_appears_while_a_batch_is_read() -> None:
    posting = Posting()
    posted = posting.batch()
    while posted.state is None:
        assert len(posting.bench.entity.shelf) == 0
        posting.turn()
    assert len(posting.bench.entity.shelf) == 0
    assert posting.bench.memory.held == posting.bench.entity.shelf.reserved > 0


@pytest.mark.parametrize("when", ["while it is read", "later"])
def test_a_batch_that_is_rolled_back_leaves_nothing(when: str) -> None:
    posting = Posting()
    posting.batch()
    if when == "later":
        posting.turns()
    discharged = posting.discharge(fail=True)
    posting.turns()
    assert discharged.state == ACCEPTED
    assert posting.bodies == []
    assert posting.is_free


def test_a_control_link_that_ends_while_a_batch_is_read_rolls_back() -> None:
    posting = Posting()
    batch = posting.batch()
    single = posting.send("after it")
    posting.control.detach()
    posting.connection.joined.pump()
    posting.turns()
    for each in (batch, single):
        assert isinstance(each.state, Rejected)
        assert condition(each.state.error) == "amqp:transaction:unknown-id"
    assert posting.sender.attached
    assert posting.bodies == []
    assert posting.is_free


def test_a_connection_that_is_lost_while_a_batch_is_read_rolls_back() -> None:
    posting = Posting()
    posting.batch()
    posting.send("after it")
    posting.connection.joined.server.receive_eof(0.0)
    posting.turns()
    assert posting.bodies == []
    assert posting.is_free
    assert len(posting.connection.transactions) == 0


def test_a_link_that_ends_while_its_batch_is_read_has_posted_it() -> None:
    posting = Posting()
    posting.batch()
    posting.sender.detach()
    posting.connection.joined.pump()
    discharged = posting.discharge()
    posting.turns()
    assert discharged.state == ACCEPTED
    assert posting.bodies == list(range(COUNT))


def test_a_transaction_whose_time_ends_while_a_batch_is_read_fails() -> None:
    posting = Posting()
    posted = posting.batch()
    posting.bench.time.now += 1_000_000
    for roll_back in posting.connection.transactions.overdue():
        roll_back()
    discharged = posting.discharge()
    posting.turns()
    assert condition(outcome(posted).error) == "amqp:transaction:timeout"
    assert condition(discharged.state.error) == "amqp:transaction:timeout"
    assert posting.bodies == []
    assert posting.is_free


def test_an_entity_that_is_disabled_while_a_batch_is_read_refuses_it() -> None:
    posting = Posting()
    posted = posting.batch()
    options = replace(posting.bench.entity.options, status="SendDisabled")
    posting.bench.entity.reconfigure(options)
    posting.turns()
    assert condition(outcome(posted).error) == ENTITY_DISABLED
    discharged = posting.discharge()
    posting.turns()
    assert discharged.state == ACCEPTED
    assert posting.bodies == []
    assert posting.is_free


def test_an_entity_that_is_deleted_while_a_batch_is_read_refuses_it() -> None:
    posting = Posting()
    posted = posting.batch()
    behind = posting.send("after it")
    discharged = posting.discharge()
    posting.bench.entity.delete()
    posting.turns()
    posting.connection.joined.pump()
    assert [condition(outcome(each).error) for each in (posted, behind)] == ["amqp:not-found"] * 2
    assert discharged.state == ACCEPTED
    assert posting.bench.memory.held == 0


def test_an_entity_that_is_deleted_before_the_discharge_fails_it() -> None:
    posting = Posting()
    posting.batch()
    posting.turns()
    posting.bench.entity.delete()
    discharged = posting.discharge()
    posting.turns()
    assert isinstance(discharged.state, Rejected)
    assert posting.bench.memory.held == 0


def test_an_entity_that_is_deleted_while_a_batch_is_put_drops_it() -> None:
    posting = Posting()
    posting.batch()
    posting.turns()
    posting.bench.memory.work = WORK
    posting.discharge()
    assert 0 < len(posting.bench.entity.shelf) < COUNT
    posting.bench.entity.delete()
    posting.turns()
    assert posting.bench.memory.held == 0


def test_a_batch_that_is_put_keeps_its_room_and_its_place() -> None:
    posting = Posting(bytes_max=20_000)
    posting.batch()
    posting.turns()
    posting.bench.memory.work = WORK
    held = posting.bench.memory.held
    posting.discharge()
    assert 0 < len(posting.bench.entity.shelf) < COUNT
    # Messages take some more than in the batch, since each has an id here.
    assert posting.bench.memory.held >= held * 0.9
    posting.declare()
    posting.send(COUNT)
    posting.discharge()
    posting.turns()
    assert posting.bodies == list(range(COUNT + 1))
    assert posting.is_free


def test_a_batch_beyond_the_work_of_its_transaction_is_refused() -> None:
    posting = Posting()
    posting.connection.transactions.limits = replace(
        posting.connection.transactions.limits, transaction_work_max=2 * COUNT + 1
    )
    posting.declare()
    posting.bench.memory.work = WORK
    # Each message counts.
    posts = [posting.batch(first * COUNT) for first in range(3)]
    posts += [posting.send("single"), posting.send("too many")]
    posting.turns()
    outcomes = [type(outcome(each)).__name__ for each in posts]
    assert outcomes == ["Accepted", "Accepted", "Rejected", "Accepted", "Rejected"]


def test_a_batch_without_room_is_refused_before_it_is_read() -> None:
    posting = Posting(bytes_max=500)
    posted = posting.batch()
    assert condition(outcome(posted).error) == "amqp:resource-limit-exceeded"
    assert posting.bench.memory.held == 0
    discharged = posting.discharge()
    assert discharged.state == ACCEPTED
