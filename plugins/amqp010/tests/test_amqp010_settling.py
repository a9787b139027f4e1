"""Outcomes that clients of 0-10 give, and messages that they acquire later, at a real broker."""

from __future__ import annotations

import pytest
from octets010 import Operation
from protocol010 import CREDIT, MESSAGES, NONE, NOT_ACQUIRED, UNLIMITED, Failed
from subscribers010 import Attached, World

from amqp_rt.broker.nodes import Queue
from amqp_rt.fronts import Message
from amqp_rt.security.access import Rights


def acquire(session: Attached, *numbers: int | None) -> list[tuple[int, int]]:
    """Acquire messages; return the ids of the result."""
    ids = [(number, number) for number in numbers]
    result = session.call("message.acquire", transfers=ids)
    assert result is not None
    return result.transfers or []


def redelivered(message: Operation) -> bool:
    return bool(message.header("delivery-properties").redelivered)


# --- accept, reject, release -------------------------------------------------------------------------


@pytest.mark.req("D7")
def test_accepted_messages_are_gone() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = world.client().attach()
    session.subscribe("q")
    first, second, third = session.messages()
    session.accept(third.id, first.id)
    assert world.stats("q").acquired == 1
    session.accept(first.id, second.id)
    assert world.stats("q").acquired == 0


@pytest.mark.req("D7")
def test_released_messages_keep_their_position_and_mark() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = world.client().attach()
    session.subscribe("q", flow_mode=CREDIT, messages=2)
    first, second = session.messages()
    session.release(second.id)
    session.release(first.id, redelivered=True)
    session.flow(3)
    found = session.messages()
    assert [(each.body, redelivered(each)) for each in found] == [
        (b"1", True),
        (b"2", False),
        (b"3", False),
    ]
    # The mark stays.
    session.release(found[0].id)
    session.flow(1)
    (again,) = session.messages()
    assert redelivered(again)


@pytest.mark.req("D7")
@pytest.mark.parametrize("command", ["accept", "reject", "release"])
def test_an_outcome_is_given_once(command: str) -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", flow_mode=CREDIT, messages=1)
    (message,) = session.messages()
    session.release(message.id)
    assert world.stats("q").available == 1
    # The id is gone, and those of other commands were never there.
    session.call(f"message.{command}", transfers=[(0, 1000)])
    assert world.stats("q").available == 1


@pytest.mark.req("D2", "D7")
def test_rejected_messages_go_to_the_alternate_exchange() -> None:
    world = World()
    session = world.client().attach()
    session.call("exchange.declare", exchange="alt", type="fanout")
    session.call("queue.declare", queue="dead")
    session.call("exchange.bind", exchange="alt", queue="dead")
    session.call("queue.declare", queue="q", alternate_exchange="alt")
    world.publish("q", b"1", b"2")
    session.subscribe("q")
    first, second = session.messages()
    session.reject(first.id, code=0, text="not for me")
    assert (world.stats("dead").available, world.stats("q").acquired) == (1, 1)
    session.reject(second.id)
    held = world.host.space().find("dead").held.peek(2)
    annotations = [Message.decode(entry.payload).message_annotations for entry in held]
    assert [each["x-opt-dead-letter-condition"] for each in annotations] == [
        "amqp-0-10:unspecified"
    ] * 2
    assert annotations[0]["x-opt-dead-letter-description"] == "not for me"


@pytest.mark.req("D2", "D19")
@pytest.mark.parametrize("deleted", [False, True])
def test_an_alternate_exchange_of_a_queue_is_the_last(
    deleted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What it cannot route does not go to its own alternate; a dead-letter exchange passes it on."""
    world = World()
    session = world.client().attach()
    session.call("exchange.declare", exchange="second", type="fanout")
    session.call("queue.declare", queue="last")
    session.call("exchange.bind", exchange="second", queue="last")
    session.call("exchange.declare", exchange="alt", type="fanout", alternate_exchange="second")
    session.call("queue.declare", queue="q", alternate_exchange="alt")
    world.publish("q", b"1")
    if deleted:
        session.call("queue.delete", queue="q")
    else:
        session.subscribe("q")
        session.reject(session.messages()[0].id)
    assert world.stats("last").available == 0
    assert "leads to no queue that takes it" in caplog.text
    world.host.space().declare(Queue("chained", dead_letter="/exchanges/alt"))
    world.publish("chained", b"2")
    session.subscribe("chained", "d2")
    session.reject(session.messages()[-1].id)
    assert world.stats("last").available == 1


def test_a_reject_code_that_does_not_exist_ends_the_session() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q")
    (message,) = session.messages()
    with pytest.raises(Failed) as caught:
        session.reject(message.id, code=3)
    assert caught.value.code == 542
    assert world.stats("q").available == 1


def test_outcomes_of_many_messages_are_passed_on_in_turns() -> None:
    world = World("q")
    world.publish("q", *[b"x"] * 500)
    session = world.client().attach()
    session.subscribe("q")
    assert len(session.messages()) == 500
    number = session.state.send("message.accept", transfers=[(0, 499)], sync=True)
    session.client.step()
    assert 0 < world.stats("q").acquired < 500
    assert not session.state.is_complete(number)
    session.done(number)
    assert world.stats("q").acquired == 0


def test_a_message_taken_away_under_way_is_passed_over() -> None:
    world = World("q", "other")
    world.publish("q", *[b"x"] * 200)
    session = world.client().attach()
    session.subscribe("q")
    session.call("message.cancel", destination="d")
    assert len(session.messages()) == 200
    number = session.state.send("message.release", transfers=[(0, 199)], sync=True)
    session.client.step()
    assert not session.state.is_complete(number)
    world.host.space().delete("q")
    session.done(number)
    session.subscribe("other")


@pytest.mark.req("D7")
@pytest.mark.parametrize("end", ["detach", "failure", "cancel", "close", "cut"])
def test_outcomes_count_whatever_ends_the_session_behind_them(end: str) -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = world.client().attach()
    session.subscribe("q")
    first, second, _ = session.messages()
    # All in one chunk.
    session.state.accept(first.id)
    session.state.send("message.release", transfers=[(second.id, second.id)])
    if end == "detach":
        session.state.detach()
    elif end == "failure":
        session.state.send("message.cancel", destination="none")
        session.state.accept(second.id)
    elif end == "cancel":
        session.state.send("message.cancel", destination="d")
    elif end == "close":
        session.client.wire.control("connection.close", 0, reply_code=200)
    session.client.step()
    world.pump()
    session.client.cut()
    assert (world.stats("q").available, world.stats("q").acquired) == (2, 0)


@pytest.mark.req("D7")
def test_an_accepted_message_counts_before_a_command_that_is_malformed() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q")
    (message,) = session.messages()
    session.state.accept(message.id)
    session.state.send("message.transfer", destination="", body=None, accept_mode=9)
    world.pump()
    assert session.state.exception is not None
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)


# --- bounds ------------------------------------------------------------------------------------------


def test_a_session_holds_a_bounded_number_of_messages() -> None:
    world = World("q", "r")
    world.publish("q", *[b"x"] * 20)
    session = world.client().attach()
    session.client.subscriptions().deliveries.most = 8
    session.subscribe("q")
    found = session.messages()
    assert len(found) == 8
    # No subscription gets more, and a flush does not wait for that.
    session.subscribe("r", "r")
    world.publish("r", b"r")
    session.call("message.flush", destination="r")
    session.flow(1, "r")
    session.flow(UNLIMITED, "r", unit=1)
    assert session.messages() == []
    session.accept(found[0].id)
    assert session.messages() == []
    session.accept(found[1].id)
    assert len(session.messages()) == 2


def test_the_oldest_copies_are_forgotten() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = world.client().attach()
    session.client.subscriptions().deliveries.copies_most = 2
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    first, second, third = session.messages()
    assert acquire(session, first.id, second.id, third.id) == [(second.id, third.id)]


# --- browsing and acquiring --------------------------------------------------------------------------


@pytest.mark.req("D7")
@pytest.mark.parametrize("command", ["accept", "reject", "release"])
def test_outcomes_of_messages_that_are_not_acquired_change_nothing(command: str) -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    session.call(f"message.{command}", transfers=[(copy.id, copy.id)])
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 0)
    # Its id may no longer be referenced.
    assert acquire(session, copy.id) == []


@pytest.mark.req("D2", "D7")
def test_one_of_two_sessions_acquires_a_message() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    one, two = (world.client().attach(name) for name in (b"one", b"two"))
    for session in (one, two):
        session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    mine, theirs = one.messages(), two.messages()
    assert acquire(one, mine[0].id) == [(mine[0].id, mine[0].id)]
    assert acquire(two, theirs[0].id, theirs[1].id) == [(theirs[1].id, theirs[1].id)]
    # An id that is acquired is not acquired again.
    assert acquire(one, mine[0].id) == []
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 2)
    one.accept(mine[0].id)
    two.release(theirs[1].id)
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 0)


def test_acquired_messages_are_requeued_when_the_session_ends() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    acquire(session, copy.id)
    assert world.stats("q").acquired == 1
    session.client.cut()
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 0)
    other = world.client().attach(b"other")
    other.subscribe("q")
    (again,) = other.messages()
    assert redelivered(again)


def test_copies_of_a_cancelled_subscription_can_be_acquired() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    first, second = session.messages()
    session.call("message.cancel", destination="d")
    assert acquire(session, first.id) == [(first.id, first.id)]
    session.accept(first.id, second.id)
    assert world.stats("q").available == 1
    assert not world.host.space().find("q").consumers()


def test_nothing_is_acquired_where_the_accept_mode_is_none() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", accept_mode=NONE, acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    assert acquire(session, copy.id) == []
    assert world.stats("q").available == 1


def test_a_message_that_was_consumed_or_replaced_is_not_acquired() -> None:
    world = World(Queue("q", last_value_key="subject"))
    world.publish("q", b"old", subject="a")
    world.publish("q", b"other", subject="b")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    old, other = session.messages()
    world.publish("q", b"new", subject="a")
    world.host.space().find("q").held.purge()
    world.publish("q", b"newer", subject="a")
    assert acquire(session, old.id, other.id) == []
    assert acquire(session) == []


def test_acquiring_from_the_middle_keeps_the_order_of_the_rest() -> None:
    world = World("q")
    world.publish("q", *[b"%d" % number for number in range(6)])
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    copies = session.messages()
    assert acquire(session, copies[0].id, copies[3].id) == [
        (copies[0].id, copies[0].id),
        (copies[3].id, copies[3].id),
    ]
    session.release(copies[3].id)
    assert acquire(session, copies[2].id) == [(copies[2].id, copies[2].id)]
    other = world.client().attach(b"other")
    other.subscribe("q")
    assert other.bodies() == [b"1", b"3", b"4", b"5"]


def test_an_exclusive_subscription_keeps_its_messages() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    other = world.client().attach(b"other")
    other.subscribe("q", exclusive=True, messages=0)
    assert acquire(session, copy.id) == []
    other.flow(1)
    assert other.bodies() == [b"1"]


def test_the_right_to_receive_is_asked_for_when_messages_are_acquired() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    world.denied.add((Rights.LISTEN, "q"))
    with pytest.raises(Failed) as caught:
        acquire(session, copy.id)
    assert caught.value.code == 403
    assert world.stats("q").available == 1


def test_expired_messages_are_not_acquired() -> None:
    world = World("q")
    world.publish("q", b"1", ttl_s=5)
    session = world.client().attach()
    session.subscribe("q", acquire_mode=NOT_ACQUIRED)
    (copy,) = session.messages()
    world.now += 10
    assert acquire(session, copy.id) == []


# --- a session without a connection ------------------------------------------------------------------


@pytest.mark.req("D10")
def test_messages_stay_acquired_while_a_session_is_detached() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    client = world.client()
    session = client.attach(timeout=60)
    session.subscribe("q", messages=2)
    first, second = session.messages()
    client.cut()
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 2)
    again = world.client().go_on(session.state)
    # Credit is gone, outcomes count.
    assert again.messages() == [first, second]
    again.accept(first.id)
    again.release(second.id)
    assert (world.stats("q").available, world.stats("q").acquired) == (2, 0)
    again.flow(UNLIMITED, unit=1)
    again.flow(2)
    assert again.bodies() == [b"2", b"3"]


@pytest.mark.req("D10")
def test_messages_under_way_come_again_after_resumption() -> None:
    world = World("q")
    client = world.client()
    session = client.attach(timeout=60)
    session.subscribe("q")
    world.host.space().publish("q", Message(b"1").encode())
    client.engine.take()
    client.cut()
    assert session.messages() == []
    assert world.stats("q").acquired == 1
    again = world.client().go_on(session.state)
    (message,) = again.messages()
    assert message.body == b"1"
    assert not redelivered(message)
    again.accept(message.id)
    assert world.stats("q").acquired == 0


@pytest.mark.req("D10")
def test_messages_are_requeued_when_the_time_of_a_session_is_up() -> None:
    world = World("q")
    world.publish("q", b"1")
    client = world.client()
    session = client.attach(timeout=60)
    session.subscribe("q")
    assert session.bodies() == [b"1"]
    client.cut()
    world.now += 59
    world.front.tick(world.now)
    assert world.stats("q").acquired == 1
    world.now += 2
    world.front.tick(world.now)
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 0)


def test_a_flush_that_waits_is_complete_when_the_session_is_attached_again() -> None:
    world = World("q")
    world.publish("q", *[b"x"] * 300)
    client = world.client()
    session = client.attach(timeout=60)
    session.subscribe("q", octets=0)
    session.state.send("message.flow", destination="d", unit=1, value=UNLIMITED)
    number = session.state.send("message.flush", destination="d", sync=True)
    client.step()
    assert not session.state.is_complete(number)
    client.cut()
    again = world.client().go_on(session.state)
    assert again.done(number) is None
    assert len(again.messages()) < 300
    again.flow(UNLIMITED, unit=1)
    again.flow(UNLIMITED, unit=MESSAGES)
    assert world.stats("q").acquired == 300


def test_a_queue_deleted_while_its_subscriber_is_detached_ends_the_session() -> None:
    world = World("q")
    client = world.client()
    session = client.attach(timeout=60)
    session.subscribe("q")
    client.cut()
    world.host.space().delete("q")
    client = world.client()
    client.wire.adopt(session.state)
    session.state.attach(point=False)
    world.pump()
    assert session.state.exception is not None
    assert session.state.exception.error_code == 408


@pytest.mark.parametrize("name", ["message.accept", "message.release", "message.reject"])
def test_ranges_that_name_nothing_are_work_as_held_messages_are_looked_through(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("q")
    world.publish("q", *[b"x"] * 2_000)
    session = world.client().attach()
    session.subscribe("q", flow_mode=CREDIT, messages=UNLIMITED)
    while world.stats("q").available:
        session.messages()
    spent: list[int] = []
    monkeypatch.setattr(session.client.engine, "spend", spent.append)
    session.done(session.send(name, transfers=[(1 << 28, 1 << 30)]))
    assert sum(spent) >= 20
    assert world.stats("q").acquired == 2_000
