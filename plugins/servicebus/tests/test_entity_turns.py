"""An entity does no more in a turn of the event loop than the work that all nodes may do in it."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.backlog import Backlog
from amqp_rt_servicebus.turns import GRANTS_MAX, Turns
from entities import Bench, Receiving

from amqp_rt.broker.building import Memory
from amqp_rt.outcomes import ACCEPTED, RELEASED, Accepted, Modified

#: Work of a turn, and most calls, deliveries or events in it.
WORK = 100
OF_A_TURN = 25


def turns_until_done(bench: Bench) -> list[int]:
    """Give the entity turns until it asks for no more; return the work of each beyond its limit."""
    beyond = []
    while bench.unfinished:
        bench.turn(WORK)
        beyond.append(-min(0, bench.memory.work))
        assert len(beyond) < 1_000
    return beyond


def test_messages_are_delivered_in_turns() -> None:
    bench = Bench()
    for body in range(300):
        bench.send(body)
    receiver = bench.receiver()
    bench.memory.work = WORK
    receiver.link.grant(300)
    receiver.joined.pump()
    assert 0 < len(receiver.deliveries) <= OF_A_TURN
    assert max(turns_until_done(bench)) <= 10
    bench.memory.work = WORK
    receiver.joined.pump()
    assert receiver.bodies == list(range(300))


def test_nothing_is_delivered_without_work_left() -> None:
    bench = Bench()
    bench.send("m")
    bench.memory.work = 0
    receiver = bench.receiver()
    receiver.link.grant(1)
    receiver.joined.pump()
    assert receiver.deliveries == []
    bench.turn(1)
    receiver.joined.pump()
    assert receiver.bodies == ["m"]


def test_a_drain_is_answered_when_all_turns_are_done() -> None:
    bench = Bench()
    for body in range(100):
        bench.send(body)
    receiver = bench.receiver()
    bench.memory.work = WORK
    receiver.link.grant(200)
    receiver.link.drain()
    receiver.joined.pump()
    assert receiver.link.credit > 100
    turns_until_done(bench)
    receiver.joined.pump()
    assert receiver.bodies == list(range(100))
    assert receiver.link.credit == 0


def test_events_are_handled_in_turns() -> None:
    bench = Bench()
    for _ in range(100):
        bench.send(ttl_s=5)
    bench.time.now += 6
    bench.memory.work = WORK
    bench.entity.tick()
    assert len(bench.entity.shelf) == 100 - OF_A_TURN
    assert max(turns_until_done(bench)) <= 4
    assert len(bench.entity.shelf) == 0


def test_events_that_make_dead_letters_take_more_of_a_turn() -> None:
    bench = Bench(dead_letters_expired=True)
    for _ in range(100):
        bench.send(ttl_s=5)
    bench.time.now += 6
    bench.memory.work = WORK
    bench.entity.tick()
    assert 0 < len(bench.dead.shelf) < OF_A_TURN / 2
    turns_until_done(bench)
    assert len(bench.dead.shelf) == 100


def test_locks_that_end_at_once_end_in_turns() -> None:
    bench = Bench(lock_s=30, deliveries_max=0)
    for body in range(100):
        bench.send(body)
    receiver = bench.receiver(credit=100)
    # Earlier ends of these locks, of which nothing is left to be done.
    bench.time.now += 10
    bench.requests.renew([receiver.token(index) for index in range(100)])
    bench.time.now += 31
    bench.memory.work = WORK
    bench.entity.tick()
    assert len(bench.entity.shelf.tokens) >= 100 - OF_A_TURN
    turns_until_done(bench)
    assert len(bench.entity.shelf.tokens) == 0
    assert {each.delivery_count for each in bench.peeked()} == {1}


def test_many_requests_handle_no_more_events_than_one() -> None:
    bench = Bench()
    for _ in range(100):
        bench.send(ttl_s=5)
    bench.time.now += 6
    bench.memory.work = WORK
    for _ in range(50):
        bench.requests.peek(0, 1)
    assert len(bench.entity.shelf) == 100 - OF_A_TURN
    turns_until_done(bench)
    assert len(bench.entity.shelf) == 0


def all_at_once(receiver: Receiving, outcome: Any) -> None:
    """Send *outcome* for all deliveries, in one disposition."""
    for delivery in receiver.deliveries:
        delivery.update(outcome)
    receiver.joined.pump()


@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED, Modified(delivery_failed=True)])
def test_outcomes_are_applied_in_turns(outcome: object) -> None:
    bench = Bench(deliveries_max=0)
    for body in range(100):
        bench.send(body)
    receiver = bench.receiver(credit=100)
    bench.memory.work = WORK
    all_at_once(receiver, outcome)
    assert len(bench.entity.shelf.tokens) == 100 - OF_A_TURN
    # What comes later waits behind them, however much work is left.
    bench.memory.work = WORK
    assert bench.entity.is_busy()
    turns_until_done(bench)
    assert not bench.entity.shelf.tokens
    assert len(bench.entity.shelf) == (0 if type(outcome) is Accepted else 100)
    receiver.joined.pump()
    assert len(receiver.endpoint.settled) == 100


def test_a_lock_that_ends_while_its_outcome_waits_is_lost() -> None:
    bench = Bench(lock_s=30, deliveries_max=0)
    for body in range(50):
        bench.send(body)
    receiver = bench.receiver(credit=50)
    bench.memory.work = WORK
    all_at_once(receiver, ACCEPTED)
    bench.time.now += 31
    turns_until_done(bench)
    assert len(bench.entity.shelf) == 50 - OF_A_TURN
    receiver.joined.pump()
    states = [type(each.state).__name__ for each in receiver.deliveries]
    assert states == ["Accepted"] * OF_A_TURN + ["Rejected"] * (50 - OF_A_TURN)


def test_a_lock_that_has_ended_is_lost_before_its_event_is_handled() -> None:
    bench = Bench(lock_s=30)
    bench.send()
    receiver = bench.receiver(credit=1)
    bench.time.now += 31
    bench.memory.work = 0
    receiver.deliveries[0].update(ACCEPTED)
    receiver.joined.pump()
    turns_until_done(bench)
    receiver.joined.pump()
    assert type(receiver.deliveries[0].state).__name__ == "Rejected"
    assert len(bench.entity.shelf) == 1


def test_a_session_is_free_when_its_messages_are_back() -> None:
    bench = Bench(sessions=True)
    for body in range(100):
        bench.send(body, group_id="s")
    receiver = bench.receiver(session="s", credit=100)
    assert len(receiver.deliveries) == 100
    bench.memory.work = WORK
    receiver.link.detach()
    receiver.joined.pump()
    session = bench.entity.sessions.find("s")
    assert session is not None
    assert session.in_hand
    assert session.holder is not None
    turns_until_done(bench)
    assert not session.in_hand
    assert session.holder is None
    bench.memory.work = 1 << 40
    again = bench.receiver(session="s", credit=100)
    assert again.bodies == list(range(100))
    assert {each.delivery_count for each in again.messages} == {0}


def test_a_session_whose_lock_ends_counts_its_messages_in_turns() -> None:
    bench = Bench(sessions=True, lock_s=30)
    for body in range(100):
        bench.send(body, group_id="s")
    receiver = bench.receiver(session="s", credit=100)
    bench.time.now += 31
    bench.memory.work = WORK
    bench.entity.tick()
    receiver.joined.pump()
    assert receiver.error == "com.microsoft:session-lock-lost"
    turns_until_done(bench)
    bench.memory.work = 1 << 40
    again = bench.receiver(session="s", credit=100)
    assert again.bodies == list(range(100))
    assert {each.delivery_count for each in again.messages} == {1}


def test_sessions_go_to_receivers_that_wait_in_turns() -> None:
    bench = Bench(sessions=True)
    taken: list[object] = []

    def take(subscription: object) -> bool:
        taken.append(subscription)
        return True

    for _ in range(50):
        bench.entity.wait_for_session(take, settled=False)
    bench.memory.work = 10
    for number in range(50):
        bench.send(group_id=f"s{number}")
    assert len(taken) == 1
    turns_until_done(bench)
    assert len(taken) == 50


def test_a_deleted_entity_is_freed_in_turns() -> None:
    bench = Bench(sessions=True)
    for number in range(100):
        bench.send(group_id=f"s{number}")
    held = bench.memory.held
    assert held > 0
    bench.memory.work = WORK
    bench.entity.delete()
    assert bench.memory.held == 0
    assert len(turns_until_done(bench)) >= 200 // OF_A_TURN - 1
    assert len(bench.entity.sessions) == 0


# --- Parts -----------------------------------------------------------------------------------------


def test_a_backlog_keeps_the_order_and_calls_what_follows() -> None:
    memory = Memory(1)
    backlog = Backlog(memory)
    log: list[object] = []

    def call(item: int) -> None:
        log.append(item)
        # What a call asks for is part of it.
        assert not backlog.run()

    backlog.add(range(3), call, lambda: log.append("first"))
    backlog.add([], call, lambda: log.append("second"))
    memory.work = 8
    assert not backlog.run()
    assert (log, backlog.pending) == ([0, 1], True)
    backlog.add(range(3, 4), call)
    memory.work = 100
    assert backlog.run()
    assert (log, backlog.pending) == ([0, 1, 2, "first", "second", 3], False)
    backlog.add(range(9), call)
    backlog.clear()
    assert backlog.run()
    assert len(log) == 6


class _Link:
    def __init__(self) -> None:
        self.credit = 0
        self.attached = self.writable = True


class _Consumer:
    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.link = _Link()


def test_consumers_that_come_and_go_leave_nothing() -> None:
    turns = Turns()
    stays: Any = _Consumer(0)
    for number in range(1, 1_000):
        leaves: Any = _Consumer(number)
        for credit in range(1, 5):
            for each in (leaves, stays):
                each.link.credit = max(each.link.credit, credit + (number if each is stays else 0))
                turns.update(each)
        turns.leave(leaves)
        turns.leave(leaves)
    assert len(turns._grants) <= 3 * GRANTS_MAX
    assert len(turns) <= GRANTS_MAX
    assert turns.first() is stays
    count = 0
    while turns.first() is not None:
        turns.use()
        stays.link.credit -= 1
        count += 1
    assert count == 999 + 4
    assert len(turns) == 0
    assert not turns._own
