"""Sessions: locks, the next one, order, state, expiry, and the end of their receivers."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.bounds import DEFAULT_BOUNDS
from amqp_rt_servicebus.conditions import (
    NOT_ALLOWED,
    SERVER_BUSY,
    SESSION_CANNOT_BE_LOCKED,
    SESSION_LOCK_LOST,
)
from amqp_rt_servicebus.messages import arrived
from amqp_rt_servicebus.requests import LISTED_MAX
from entities import NOW, Bench, Receiving, condition, stored_of

from amqp_rt import Message
from amqp_rt.broker.building import Subscription
from amqp_rt.fronts import ACCEPTED, RELEASED, AmqpError, Modified

pytestmark = pytest.mark.req("Z12")

ABANDON = Modified(delivery_failed=True)
DEFER = Modified(undeliverable_here=True)


def a_bench(**options: Any) -> Bench:
    return Bench(sessions=True, **options)


def test_a_receiver_gets_the_messages_of_its_session_in_order_later_ones_too() -> None:
    bench = a_bench()
    for body, session in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        bench.send(body, group_id=session)
    receiver = bench.receiver(session="a", credit=10)
    bench.send("a3", group_id="a")
    bench.run()
    assert receiver.bodies == ["a1", "a2", "a3"]
    assert "x-opt-locked-until" not in receiver.messages[0].message_annotations
    receiver.update(ABANDON, 1)
    assert receiver.bodies[-1] == "a2"


@pytest.mark.parametrize("session", ["a", ""])
def test_one_receiver_has_the_lock(session: str) -> None:
    bench = a_bench()
    first = bench.receiver(session=session)
    with pytest.raises(AmqpError) as caught:
        bench.entity.consume_session(session, settled=False)
    assert condition(caught.value) == SESSION_CANNOT_BE_LOCKED
    first.detach()
    assert bench.entity.consume_session(session, settled=False) is not None


def test_a_receiver_without_a_session_is_refused_and_the_reverse() -> None:
    with pytest.raises(AmqpError) as caught:
        a_bench().entity.consume(settled=False)
    assert condition(caught.value) == NOT_ALLOWED
    with pytest.raises(AmqpError) as caught:
        Bench().entity.consume_session(None, settled=False)
    assert condition(caught.value) == NOT_ALLOWED


def test_a_message_without_a_session_is_refused_or_dead_lettered() -> None:
    bench = a_bench()
    stored = arrived(Message("m").encode())
    refused = bench.entity.check(stored)
    assert refused is not None
    assert condition(refused.error) == NOT_ALLOWED
    bench.entity.receive(stored)
    (letter,) = bench.peeked(bench.dead)
    assert letter.application_properties["DeadLetterReason"] == "Session id is null."


def test_the_next_session_is_the_free_one_with_the_oldest_message() -> None:
    bench = a_bench()
    for body, session in ((1, "a"), (2, "b"), (3, "c"), (4, "b")):
        bench.send(body, group_id=session)
    bench.receiver(session="a")
    found = bench.entity.consume_session(None, settled=False)
    assert found is not None
    session = bench.entity.session_of(found)
    assert session is not None
    assert session.id == "b"
    assert session.until == NOW + 60
    receiver = bench.receiver(subscription=found, credit=5)
    assert receiver.bodies == [2, 4]


def test_a_session_with_only_deferred_or_locked_messages_is_not_next() -> None:
    bench = a_bench()
    bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    receiver.update(DEFER)
    receiver.detach()
    assert bench.entity.consume_session(None, settled=False) is None


def waiting(bench: Bench, name: str, log: list[str], *, takes: bool = True) -> int:
    def on_session(subscription: Subscription) -> bool:
        session = bench.entity.session_of(subscription)
        assert session is not None
        log.append(f"{name} {session.id}")
        return takes

    return bench.entity.wait_for_session(on_session, settled=False)


def test_receivers_wait_for_the_next_session_in_their_order() -> None:
    bench = a_bench()
    log: list[str] = []
    waiting(bench, "first", log)
    gone = waiting(bench, "gone", log)
    waiting(bench, "third", log)
    waiting(bench, "fourth", log)
    assert bench.entity.sessions.stop_waiting(gone)
    assert not bench.entity.sessions.stop_waiting(gone)
    for session in "aab":
        bench.send(group_id=session)
    assert log == ["first a", "third b"]
    assert bench.entity.sessions.waiting == 1


def test_a_receiver_whose_link_has_ended_leaves_the_session_to_the_next() -> None:
    bench = a_bench()
    log: list[str] = []
    waiting(bench, "ended", log, takes=False)
    waiting(bench, "next", log)
    bench.send(group_id="a")
    assert log == ["ended a", "next a"]


def test_a_session_that_is_freed_goes_to_the_receiver_that_waits() -> None:
    bench = a_bench()
    bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    log: list[str] = []
    waiting(bench, "next", log)
    receiver.detach()
    assert log == ["next a"]


def test_a_bounded_number_of_receivers_waits() -> None:
    bench = a_bench()
    for _ in range(DEFAULT_BOUNDS.session_waiting_max):
        bench.entity.wait_for_session(lambda subscription: False, settled=False)
    with pytest.raises(AmqpError) as caught:
        bench.entity.wait_for_session(lambda subscription: False, settled=False)
    assert condition(caught.value) == SERVER_BUSY


@pytest.mark.parametrize("end", [Receiving.detach, Receiving.cut])
def test_the_end_of_the_link_frees_the_session_at_once_and_counts_nothing(end: Any) -> None:
    bench = a_bench()
    number = bench.send(group_id="a")
    end(bench.receiver(session="a", credit=1))
    assert stored_of(bench, number).delivery_count == 0
    assert [each.delivery_count for each in bench.receiver(session="a", credit=1).messages] == [0]


def test_a_lock_that_ends_counts_what_is_in_hand_and_detaches() -> None:
    bench = a_bench(lock_s=30)
    for body in "ab":
        bench.send(body, group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    bench.advance(30)
    assert receiver.error == SESSION_LOCK_LOST
    assert [each.header.delivery_count for each in bench.peeked()] == [1, 0]
    assert bench.receiver(session="a", credit=2).bodies == ["a", "b"]


def test_the_lock_of_a_session_ends_in_a_dead_letter_at_the_limit() -> None:
    bench = a_bench(lock_s=30, deliveries_max=1)
    bench.send(group_id="a")
    bench.receiver(session="a", credit=1)
    bench.advance(31)
    assert bench.bodies(bench.dead) == ["m"]
    assert bench.requests.sessions() == []
    # The sub-queue has no sessions.
    assert bench.receiver(of=bench.dead, credit=1).bodies == ["m"]


def test_an_outcome_at_the_moment_the_lock_ends_does_nothing() -> None:
    bench = a_bench(lock_s=30)
    number = bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    bench.time.now += 30
    receiver.deliveries[0].update(ACCEPTED)
    bench.run()
    assert receiver.error == SESSION_LOCK_LOST
    assert stored_of(bench, number).delivery_count == 1


def test_the_lock_is_renewed_for_the_session() -> None:
    bench = a_bench(lock_s=30)
    bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    bench.advance(20)
    assert bench.requests.renew_session("a", receiver.subscription) == NOW + 50
    bench.advance(29)
    assert receiver.update(ACCEPTED) == ACCEPTED
    bench.advance(1)
    with pytest.raises(AmqpError) as caught:
        bench.requests.renew_session("a")
    assert condition(caught.value) == SESSION_LOCK_LOST
    with pytest.raises(AmqpError) as caught:
        bench.requests.renew([])
    assert condition(caught.value) == NOT_ALLOWED


def test_messages_of_a_session_are_settled_by_their_tokens_too() -> None:
    bench = a_bench()
    for body in "ab":
        bench.send(body, group_id="a")
    receiver = bench.receiver(session="a", credit=2)
    with pytest.raises(AmqpError) as caught:
        bench.requests.complete([receiver.token(0)], session_id="b")
    assert condition(caught.value) == SESSION_LOCK_LOST
    bench.requests.complete([receiver.token(0)], session_id="a")
    token = receiver.token(1)
    receiver.detach()
    with pytest.raises(AmqpError) as caught:
        bench.requests.complete([token], session_id="a")
    assert condition(caught.value) == SESSION_LOCK_LOST


def test_deferred_messages_need_the_lock_of_their_session() -> None:
    bench = a_bench()
    number = bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    receiver.update(DEFER)
    ask = bench.requests.receive_deferred
    for session, holder in (("b", None), (None, None)):
        with pytest.raises(AmqpError) as caught:
            ask([number], settled=False, session_id=session, holder=holder)
        assert condition(caught.value) == SESSION_LOCK_LOST
    ((payload, token),) = ask([number], settled=False, session_id="a", holder=receiver.subscription)
    assert "x-opt-locked-until" not in Message.decode(payload).message_annotations
    assert token is not None
    receiver.detach()
    assert stored_of(bench, number).token is None
    assert bench.entity.sizes().deferred == 1


# --- State ------------------------------------------------------------------------------------


def test_state_is_kept_without_messages_and_without_a_lock() -> None:
    bench = a_bench()
    receiver = bench.receiver(session="a")
    assert bench.requests.session_state("a") is None
    bench.requests.set_session_state("a", b"state", receiver.subscription)
    receiver.detach()
    with pytest.raises(AmqpError) as caught:
        bench.requests.session_state("a")
    assert condition(caught.value) == SESSION_LOCK_LOST
    receiver = bench.receiver(session="a")
    assert bench.requests.session_state("a") == b"state"
    assert bench.memory.held == 5
    bench.requests.set_session_state("a", None)
    receiver.detach()
    assert bench.memory.held == 0
    assert bench.requests.sessions() == []


def test_state_is_bounded() -> None:
    bench = a_bench()
    bench.receiver(session="a")
    bench.requests.set_session_state("a", bytes(DEFAULT_BOUNDS.session_state_max))
    with pytest.raises(AmqpError):
        bench.requests.set_session_state("a", bytes(DEFAULT_BOUNDS.session_state_max + 1))


def test_another_receiver_may_not_change_the_state() -> None:
    bench = a_bench()
    bench.receiver(session="a")
    other = bench.receiver(session="b")
    with pytest.raises(AmqpError) as caught:
        bench.requests.set_session_state("a", b"x", other.subscription)
    assert condition(caught.value) == SESSION_LOCK_LOST


def test_sessions_are_listed_by_messages_and_state_or_by_the_time_of_their_state() -> None:
    bench = a_bench()
    bench.send(group_id="a")
    for session in ("b", "c"):
        receiver = bench.receiver(session=session)
        bench.requests.set_session_state(session, b"x")
        receiver.detach()
        bench.advance(10)
    bench.receiver(session="empty")
    assert bench.requests.sessions() == ["a", "b", "c"]
    assert bench.requests.sessions(skip=1, top=1) == ["b"]
    assert bench.requests.sessions(since=NOW + 5) == ["c"]
    assert sorted(bench.requests.sessions(since=NOW)) == ["b", "c"]


def test_peek_needs_no_lock_and_shows_one_session() -> None:
    bench = a_bench()
    for body, session in ((1, "a"), (2, "b"), (3, "a")):
        bench.send(body, group_id=session)
    shown = bench.requests.peek(0, 10, session_id="a")
    assert [Message.decode(each).body for each in shown] == [1, 3]
    assert bench.bodies() == [1, 2, 3]
    assert bench.requests.peek(0, 10, session_id="x") == []


def test_deleting_takes_the_ready_messages_of_one_session() -> None:
    bench = a_bench()
    for body, session in ((1, "a"), (2, "b"), (3, "a")):
        bench.send(body, group_id=session)
    assert bench.requests.delete_batch(10, NOW + 1, session_id="a") == 2
    assert bench.requests.delete_batch(10, NOW + 1, session_id="x") == 0
    assert bench.bodies() == [2]


def test_receive_and_delete_and_release_in_a_session() -> None:
    bench = a_bench()
    for body in "abc":
        bench.send(body, group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    receiver.update(RELEASED)
    receiver.detach()
    receiver = bench.receiver(session="a", credit=5, settled=True)
    assert receiver.bodies == ["a", "b", "c"]
    assert bench.requests.sessions() == []
    receiver.drain(3)
    assert receiver.link.credit == 0


def test_all_locks_of_sessions_end_when_a_test_asks_for_it() -> None:
    bench = a_bench()
    bench.send(group_id="a")
    receiver = bench.receiver(session="a", credit=1)
    idle = bench.receiver(session="b")
    assert bench.entity.expire_locks() == 1
    bench.run()
    assert receiver.error == idle.error == SESSION_LOCK_LOST
    assert [each.delivery_count for each in bench.receiver(session="a", credit=1).messages] == [1]


def test_a_list_of_sessions_is_bounded() -> None:
    bench = a_bench()
    for number in range(LISTED_MAX + 1):
        bench.send(group_id=f"s{number}")
    assert len(bench.requests.sessions(top=LISTED_MAX + 1)) == LISTED_MAX
    assert bench.requests.sessions(skip=LISTED_MAX, top=5) == [f"s{LISTED_MAX}"]
    assert bench.requests.sessions(skip=-1, top=-1) == []
