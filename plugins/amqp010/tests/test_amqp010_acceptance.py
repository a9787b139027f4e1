"""Messages accepted in local transactions (0-10 §tx), at a real broker."""

from __future__ import annotations

import pytest
from protocol010 import NONE, Failed
from subscribers010 import Attached, World

NOT_ALLOWED = 530


def subscribed(world: World, count: int) -> Attached:
    """Return a session with transactions that has got *count* messages of queue *q*."""
    world.publish("q", *(b"%d" % number for number in range(count)))
    session = world.client().attach()
    session.call("tx.select")
    session.subscribe("q")
    return session


@pytest.mark.req("R12")
def test_accepted_messages_are_gone_with_the_commit() -> None:
    world = World("q")
    session = subscribed(world, 3)
    first, second, third = session.messages()
    session.accept(first.id, third.id)
    assert world.stats("q").acquired == 3
    session.call("tx.commit")
    assert world.stats("q").acquired == 1
    session.accept(first.id, second.id)
    session.call("tx.commit")
    assert world.stats("q").acquired == 0


@pytest.mark.req("R12")
def test_after_a_rollback_messages_stay_acquired_and_can_be_accepted_again() -> None:
    world = World("q")
    session = subscribed(world, 2)
    first, second = session.messages()
    session.accept(first.id, second.id)
    session.call("tx.rollback")
    assert world.stats("q").acquired == 2
    assert world.stats("q").available == 0
    session.release(first.id)
    (again,) = session.messages()
    assert again.body == b"0"
    session.accept(second.id, again.id)
    session.call("tx.commit")
    assert world.stats("q").acquired == 0


@pytest.mark.req("R12")
def test_release_and_reject_act_at_once_and_are_not_rolled_back() -> None:
    world = World("q")
    session = subscribed(world, 2)
    first, second = session.messages()
    session.reject(first.id)
    session.call("message.cancel", destination="d")
    session.release(second.id)
    assert world.stats("q").available == 1
    session.call("tx.rollback")
    assert world.stats("q").available == 1
    assert world.stats("q").acquired == 0


@pytest.mark.req("R12")
@pytest.mark.parametrize("command", ["release", "reject"])
@pytest.mark.parametrize("end", ["tx.commit", "tx.rollback"])
def test_an_accepted_message_is_released_or_rejected_by_a_rollback(command: str, end: str) -> None:
    """qpid.messaging releases all that it has, and rolls back then."""
    world = World("q")
    session = subscribed(world, 1)
    (message,) = session.messages()
    session.call("message.cancel", destination="d")
    session.accept(message.id)
    getattr(session, command)(message.id)
    stats = world.stats("q")
    assert (stats.acquired, stats.available) == (1, 0)
    session.call(end)
    stats = world.stats("q")
    comes_back = command == "release" and end == "tx.rollback"
    assert (stats.acquired, stats.available) == (0, int(comes_back))
    session.subscribe("q", "again")
    assert len(session.messages()) == comes_back


@pytest.mark.req("R12")
def test_what_was_to_follow_a_rollback_is_forgotten_by_it() -> None:
    world = World("q")
    session = subscribed(world, 1)
    (message,) = session.messages()
    session.accept(message.id)
    session.release(message.id, redelivered=True)
    session.call("tx.rollback")
    (again,) = session.messages()
    assert again.header("delivery-properties").redelivered
    session.accept(again.id)
    session.call("tx.rollback")
    assert world.stats("q").acquired == 1


@pytest.mark.req("R12")
def test_the_end_of_the_session_requeues_what_was_accepted() -> None:
    world = World("q")
    session = subscribed(world, 2)
    session.accept(session.messages()[0].id)
    session.client.lose()
    world.pump()
    assert world.stats("q").available == 2


@pytest.mark.req("R12")
def test_many_messages_are_accepted_in_steps() -> None:
    world = World("q")
    session = subscribed(world, 1_000)
    numbers = [each.id for each in session.messages()]
    session.accept(*numbers)
    session.call("tx.commit")
    assert world.stats("q").acquired == world.stats("q").available == 0


@pytest.mark.req("R12")
def test_transfers_and_accepts_are_one_transaction() -> None:
    world = World("q", "r")
    session = subscribed(world, 1)
    (message,) = session.messages()
    for end, left, made in (("tx.rollback", 1, 0), ("tx.commit", 0, 1)):
        session.accept(message.id)
        session.state.transfer("", b"made", key="r")
        session.call(end)
        assert world.stats("q").acquired == left
        assert world.stats("r").available == made


@pytest.mark.req("R12")
def test_transactions_take_explicit_accepts() -> None:
    world = World("q")
    session = world.client().attach()
    session.call("tx.select")
    with pytest.raises(Failed) as caught:
        session.subscribe("q", accept_mode=NONE)
    assert caught.value.code == NOT_ALLOWED
    other = world.client().attach(b"other")
    other.subscribe("q", accept_mode=NONE)
    with pytest.raises(Failed) as caught:
        other.call("tx.select")
    assert caught.value.code == NOT_ALLOWED
    third = world.client().attach(b"third")
    third.subscribe("q", accept_mode=NONE)
    third.call("message.cancel", destination="d")
    third.call("tx.select")
