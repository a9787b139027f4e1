"""Subscriptions of 0-10 at a real broker: which messages their clients get, and when."""

from __future__ import annotations

import pytest
from amqp_rt_amqp010 import engine
from amqp_rt_amqp010.layouts import DetachCode, MessageSubscribe
from amqp_rt_amqp010.limits import SUBSCRIPTIONS_MAX
from octets010 import BODY, HEADERS
from protocol010 import (
    BYTES,
    CREDIT,
    MESSAGES,
    NONE,
    NOT_ACQUIRED,
    UNLIMITED,
    WINDOW,
    Failed,
)
from subscribers010 import Attached, World

from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.security.access import Rights


def consuming(world: World, **how: object) -> Attached:
    """Return a session with a subscription ``d`` to queue ``q``."""
    session = world.client().attach()
    session.subscribe("q", **how)  # type: ignore[arg-type]
    return session


def refused(session: Attached, name: str, /, **fields: object) -> int | None:
    """Send a command that fails; return the error-code."""
    with pytest.raises(Failed) as caught:
        session.call(name, **fields)
    return caught.value.code


# --- subscribe ---------------------------------------------------------------------------------------


@pytest.mark.req("D7")
def test_messages_come_as_far_as_credit_goes() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = consuming(world, messages=0)
    assert session.bodies() == []
    session.flow(2)
    found = session.messages()
    assert [each.body for each in found] == [b"1", b"2"]
    assert [each.destination for each in found] == ["d", "d"]
    assert [(each.accept_mode, each.acquire_mode) for each in found] == [(0, 0), (0, 0)]
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 2)


@pytest.mark.req("D7")
def test_absent_modes_are_explicit_and_pre_acquired() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = consuming(world, accept_mode=None, acquire_mode=None)
    (found,) = session.messages()
    assert (found.accept_mode, found.acquire_mode) == (0, 0)
    assert world.stats("q").acquired == 1


@pytest.mark.req("D7")
def test_an_accept_mode_of_none_settles_messages_as_they_are_sent() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = consuming(world, accept_mode=NONE)
    assert session.bodies() == [b"1", b"2"]
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)
    # Nothing is left to be accepted or released.
    session.accept(*range(5))
    session.release(*range(5))
    assert session.bodies() == []


def test_a_destination_is_in_use_until_it_is_cancelled() -> None:
    world = World("q", "other")
    session = consuming(world)
    session.call("message.cancel", destination="d")
    session.subscribe("other")
    assert refused(session, "message.subscribe", queue="q", destination="d") == 530


def test_an_absent_destination_is_the_empty_one() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.call("message.subscribe", queue="q")
    session.call("message.flow", unit=BYTES)
    session.call("message.flow", unit=MESSAGES, value=1)
    assert session.bodies() == [b"1"]
    assert refused(session, "message.subscribe", queue="q", destination="") == 530


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"queue": "missing"}, 404),
        ({"queue": None}, 542),
        ({"accept_mode": 2}, 542),
        ({"acquire_mode": 7}, 542),
        ({"resume_id": "r"}, 540),
        ({"resume_ttl": 1}, 540),
        ({"exclusive": True, "acquire_mode": NOT_ACQUIRED}, 540),
        ({"arguments": {"unknown": 1}}, 540),
        ({"arguments": {"x-priority": "high"}}, 542),
        ({"arguments": {"qpid.sync_frequency": -1}}, 542),
        ({"arguments": {"x-apache-selector": 5}}, 542),
        ({"arguments": {"x-apache-selector": "a ="}}, 542),
    ],
    ids=[
        *("missing-queue", "no-queue", "accept-mode", "acquire-mode", "resume-id", "resume-ttl"),
        "exclusive-browser",
        *("unknown", "priority", "frequency", "number-as-selector", "wrong-selector"),
    ],
)
def test_wrong_subscriptions_end_the_session(fields: dict[str, object], code: int) -> None:
    world = World("q")
    session = world.client().attach()
    wanted = {"queue": "q", "destination": "d", **fields}
    assert refused(session, "message.subscribe", **wanted) == code
    exception = session.state.exception
    assert exception is not None
    assert exception.field_index == MessageSubscribe.__struct_fields__.index(next(iter(fields)))
    assert not world.host.space().find("q").consumers()


def test_the_right_to_receive_is_asked_for() -> None:
    world = World("q")
    world.denied.add((Rights.LISTEN, "q"))
    client = world.client()
    client.holds = []
    session = client.attach()
    number = session.send("message.subscribe", queue="q", destination="d", sync=True)
    # The link waits for the container, and so do commands after it.
    session.send("message.flow", destination="d", unit=MESSAGES, value=1)
    (link,) = client.holds
    assert not session.state.is_complete(number)
    refused = world._decide(link.peer, Rights.LISTEN, "q")
    assert refused is not None
    link.refuse(refused)
    world.pump()
    assert session.state.exception is not None
    assert (session.state.exception.error_code, session.state.exception.command_id) == (403, number)


def test_an_exclusive_subscription_keeps_others_out() -> None:
    world = World("q")
    session = consuming(world, exclusive=True)
    other = world.client().attach(b"other")
    assert refused(other, "message.subscribe", queue="q", destination="d") == 405
    session.call("message.cancel", destination="d")
    again = world.client().attach(b"again")
    again.subscribe("q")
    late = world.client().attach(b"late")
    assert refused(late, "message.subscribe", queue="q", destination="d", exclusive=True) == 405


def test_a_session_has_a_bounded_number_of_subscriptions() -> None:
    world = World("q")
    session = world.client().attach()
    for number in range(SUBSCRIPTIONS_MAX):
        session.call("message.subscribe", queue="q", destination=f"d{number}")
    assert refused(session, "message.subscribe", queue="q", destination="more") == 506


def test_the_subscriptions_of_a_connection_are_bounded() -> None:
    world = World("q", limits=Limits(connection_subscriptions_max=3))
    client = world.client()
    first, second = client.attach(b"first"), client.attach(b"second")
    first.subscribe("q", "a")
    first.subscribe("q", "b")
    second.subscribe("q", "a")
    assert refused(second, "message.subscribe", queue="q", destination="b") == 506
    # The session has ended with its subscription; other connections have their own.
    first.subscribe("q", "c")
    assert refused(client.attach(b"third"), "message.subscribe", queue="q", destination="a") == 506
    world.client().attach(b"other").subscribe("q", "a")
    first.call("message.cancel", destination="c")
    client.attach(b"fourth").subscribe("q", "a")


def test_resumed_sessions_count_for_the_subscriptions_of_a_connection() -> None:
    world = World("q", limits=Limits(connection_subscriptions_max=3))
    states = []
    for name in (b"first", b"second", b"third"):
        client = world.client()
        session = client.attach(name, timeout=60)
        for destination in "ab" if name != b"third" else "a":
            session.subscribe("q", destination)
        states.append(session.state)
        client.cut()
    client = world.client()
    client.go_on(states[0])
    client.wire.adopt(states[1])
    states[1].attach(point=False)
    world.pump()
    assert states[1].detached is not None
    assert states[1].detached.code == DetachCode.SESSION_BUSY
    assert client.engine.count_subscriptions() == 2
    client.go_on(states[2])
    assert client.engine.count_subscriptions() == 3


def test_cancelled_browsers_make_place_for_subscriptions() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = world.client().attach()
    session.client.subscriptions().most = 2
    for number in range(5):
        session.subscribe("q", f"d{number}", acquire_mode=NOT_ACQUIRED)
        session.call("message.cancel", destination=f"d{number}")
    assert session.bodies() == [b"1"] * 5
    # Those with acquired messages stay.
    session.subscribe("q", "first")
    session.call("message.cancel", destination="first")
    session.subscribe("q", "second")
    assert refused(session, "message.subscribe", queue="q", destination="third") == 506


@pytest.mark.req("R12")
def test_a_session_with_transactions_has_no_subscription_without_acceptance() -> None:
    world = World("q")
    session = world.client().attach()
    session.call("tx.select")
    assert (
        refused(session, "message.subscribe", queue="q", destination="d", accept_mode=NONE) == 530
    )
    other = world.client().attach(b"other")
    other.subscribe("q", accept_mode=NONE)
    assert refused(other, "tx.select") == 530


@pytest.mark.req("R12")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_accepted_messages_are_gone_with_the_commit_and_released_by_a_rollback(end: str) -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = world.client().attach()
    session.call("tx.select")
    session.subscribe("q")
    first, second = session.messages()
    session.accept(first.id)
    # An accepted message is released by a rollback only; the release of others does not wait for the end.
    session.release(first.id, second.id)
    assert (world.stats("q").acquired, world.stats("q").available) == (2, 0)
    (again,) = session.messages()
    assert again.body == b"2"
    session.call("message.cancel", destination="d")
    session.release(again.id)
    session.call(f"tx.{end}")
    if end == "commit":
        assert (world.stats("q").acquired, world.stats("q").available) == (0, 1)
    else:
        assert (world.stats("q").acquired, world.stats("q").available) == (0, 2)
    assert not world.host.space().find("q").consumers()


@pytest.mark.req("D7")
def test_a_selector_chooses_messages() -> None:
    world = World("q")
    for color in ("red", "blue", "red"):
        world.publish("q", color.encode(), application_properties={"color": color})
    session = consuming(world, arguments={"x-apache-selector": "color = 'red'"})
    assert session.bodies() == [b"red", b"red"]
    assert world.stats("q").available == 1


def test_consumers_of_higher_priority_are_served_first() -> None:
    world = World("q")
    session = world.client().attach()
    session.subscribe("q", "low")
    session.subscribe("q", "high", messages=2, arguments={"x-priority": 5})
    world.publish("q", b"1", b"2", b"3")
    assert [each.destination for each in session.messages()] == ["high", "high", "low"]


@pytest.mark.req("D13")
def test_every_nth_message_asks_for_completion() -> None:
    world = World("q")
    session = consuming(world, arguments={"qpid.sync_frequency": 3})
    world.publish("q", *[b"x"] * 7)
    assert [each.sync for each in session.messages()] == [False, False, True] * 2 + [False]


# --- credit ------------------------------------------------------------------------------------------


@pytest.mark.req("D7")
def test_both_units_are_needed() -> None:
    world = World("q")
    world.publish("q", b"1")
    session = consuming(world, messages=UNLIMITED, octets=0)
    assert session.bodies() == []
    session.flow(None, unit=BYTES)
    assert session.bodies() == [b"1"]


def test_octets_of_header_and_body_count() -> None:
    world = World("q")
    world.publish("q", b"12345678", b"12345678")
    probe = consuming(world, acquire_mode=NOT_ACQUIRED, messages=1)
    (found,) = probe.messages()
    size = sum(len(octets) for kind, octets in found.segments() if kind in (HEADERS, BODY))
    session = world.client().attach(b"counting")
    session.subscribe("q", octets=size - 1)
    assert session.bodies() == []
    session.flow(1, unit=BYTES)
    assert session.bodies() == [b"12345678"]
    session.flow(size, unit=BYTES)
    assert session.bodies() == [b"12345678"]


def test_a_message_beyond_the_octets_is_left_to_others() -> None:
    world = World("q")
    small = consuming(world, octets=200)
    world.publish("q", b"x" * 500, b"1")
    assert small.bodies() == []
    other = world.client().attach(b"other")
    other.subscribe("q", messages=1)
    assert other.bodies() == [b"x" * 500]
    # It is tried again with the next credit.
    small.flow(1, unit=BYTES)
    assert small.bodies() == [b"1"]


@pytest.mark.req("D7")
def test_a_window_moves_with_completion_and_not_with_acceptance() -> None:
    world = World("q")
    client = world.client()
    session = client.attach()
    session.state.completes = False
    session.subscribe("q", messages=2)
    world.publish("q", *[b"%d" % number for number in range(5)])
    first, second = session.messages()
    session.accept(first.id, second.id)
    assert session.bodies() == []
    session.complete(second.id)
    assert session.bodies() == [b"2"]
    # Once only.
    session.complete(second.id)
    assert session.bodies() == []
    session.complete(first.id)
    assert session.bodies() == [b"3"]


@pytest.mark.req("D7")
def test_a_window_of_octets_moves_by_the_size_of_each_message() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    session.subscribe("q", octets=150)
    world.publish("q", b"x" * 100, b"y" * 100)
    (first,) = session.messages()
    session.complete(first.id)
    assert session.bodies() == [b"y" * 100]


@pytest.mark.req("D7")
def test_nothing_returns_in_credit_mode() -> None:
    world = World("q")
    session = consuming(world, flow_mode=CREDIT, messages=1)
    world.publish("q", b"1", b"2")
    (first,) = session.messages()
    session.complete(first.id)
    session.accept(first.id)
    assert session.bodies() == []


@pytest.mark.req("D7")
def test_the_mode_changes_without_credit_only() -> None:
    world = World("q")
    session = consuming(world, flow_mode=CREDIT, messages=1)
    # The same again is no change.
    session.call("message.set-flow-mode", destination="d", flow_mode=CREDIT)
    session.call("message.stop", destination="d")
    session.call("message.set-flow-mode", destination="d", flow_mode=WINDOW)
    session.flow(1)
    assert refused(session, "message.set-flow-mode", destination="d", flow_mode=CREDIT) == 406


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("message.set-flow-mode", {"destination": "d", "flow_mode": 2}, 542),
        ("message.flow", {"destination": "d", "unit": 2, "value": 1}, 542),
        *(
            (f"message.{name}", {"destination": "none"}, 404)
            for name in ("cancel", "flow", "flush", "stop", "set-flow-mode")
        ),
    ],
    ids=["mode", "unit", "cancel", "flow", "flush", "stop", "set-flow-mode"],
)
def test_wrong_credit_ends_the_session(name: str, fields: dict[str, object], code: int) -> None:
    assert refused(consuming(World("q")), name, **fields) == code


@pytest.mark.req("D7")
@pytest.mark.parametrize("zeroing", ["stop", "flush"])
def test_unlimited_credit_ends_with_stop_and_flush(zeroing: str) -> None:
    world = World("q")
    session = consuming(world)
    session.call(f"message.{zeroing}", destination="d")
    world.publish("q", b"1")
    assert session.bodies() == []
    session.flow(1)
    assert session.bodies() == []
    session.flow(1000, unit=BYTES)
    assert session.bodies() == [b"1"]


@pytest.mark.req("D7")
def test_completion_returns_nothing_for_transfers_before_a_stop() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    session.subscribe("q", messages=1)
    world.publish("q", b"1", b"2", b"3")
    (first,) = session.messages()
    session.call("message.stop", destination="d")
    session.flow(UNLIMITED, unit=BYTES)
    session.complete(first.id)
    assert session.bodies() == []
    session.flow(1)
    (second,) = session.messages()
    session.complete(second.id)
    assert session.bodies() == [b"3"]


@pytest.mark.req("D7")
def test_a_flush_sends_what_there_is_and_completes_when_it_is_sent() -> None:
    world = World("q")
    world.publish("q", *[b"x"] * 250)
    session = world.client().attach()
    session.subscribe("q", octets=0)
    sent = session.state.send("message.flow", destination="d", unit=BYTES, value=UNLIMITED)
    number = session.state.send("message.flush", destination="d", sync=True)
    client = session.client
    while not session.state.is_complete(number):
        assert client.step()
        if session.state.is_complete(number):
            break
    assert session.state.is_complete(sent)
    assert len(session.state.messages) == 250


def test_a_flush_with_little_credit_uses_it_up() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = world.client().attach()
    session.subscribe("q", messages=2, octets=0)
    session.state.send("message.flow", destination="d", unit=BYTES, value=UNLIMITED)
    session.call("message.flush", destination="d")
    assert session.bodies() == [b"1", b"2"]
    session.flow(UNLIMITED, unit=BYTES)
    session.flow(1)
    assert session.bodies() == [b"3"]


def test_a_flush_of_a_browser_completes() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = consuming(world, acquire_mode=NOT_ACQUIRED, messages=5)
    session.call("message.flush", destination="d")
    assert session.bodies() == [b"1", b"2"]
    world.publish("q", b"3")
    assert session.bodies() == []


def test_a_subscription_with_a_selector_is_flushed_too() -> None:
    world = World("q")
    for number in range(300):
        world.publish("q", b"%d" % number, application_properties={"n": number})
    session = consuming(world, arguments={"x-apache-selector": "n >= 298"}, messages=5)
    session.call("message.flush", destination="d")
    assert session.bodies() == [b"298", b"299"]


# --- the end -----------------------------------------------------------------------------------------


def test_messages_of_a_cancelled_subscription_are_settled() -> None:
    world = World("q")
    world.publish("q", b"1", b"2", b"3")
    session = consuming(world)
    first, second, third = session.messages()
    session.call("message.cancel", destination="d")
    world.publish("q", b"4")
    assert session.bodies() == []
    session.accept(first.id)
    session.release(second.id)
    assert world.stats("q").available == 2
    assert len(world.host.space().find("q").consumers()) == 1
    session.accept(third.id)
    assert not world.host.space().find("q").consumers()
    assert (world.stats("q").available, world.stats("q").acquired) == (2, 0)


def test_an_auto_delete_queue_goes_with_its_last_subscription() -> None:
    world = World()
    session = world.client().attach()
    session.call("queue.declare", queue="q", auto_delete=True)
    session.subscribe("q")
    world.publish("q", b"1")
    assert session.bodies() == [b"1"]
    session.call("message.cancel", destination="d")
    assert not world.host.space().has("q")
    session.call("execution.sync")


@pytest.mark.req("D2")
def test_subscribers_of_a_deleted_queue_lose_their_session() -> None:
    world = World("q")
    session = consuming(world)
    other = world.client().attach(b"other")
    other.call("queue.delete", queue="q")
    assert session.state.exception is not None
    assert session.state.exception.error_code == 408
    assert session.state.exception.command_id is None
    assert session.state.detached is not None
    other.call("execution.sync")


def test_a_queue_deleted_under_way_refuses_its_subscriber() -> None:
    world = World("q")
    client = world.client()
    client.holds = []
    session = client.attach()
    number = session.send("message.subscribe", queue="q", destination="d", sync=True)
    client.place(client.holds[0])
    world.host.space().delete("q")
    world.pump()
    assert session.state.exception is not None
    assert session.state.exception.error_code == 408
    assert not session.state.is_complete(number)


def test_what_is_not_settled_is_requeued_when_the_session_ends() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = consuming(world)
    first, _ = session.messages()
    session.accept(first.id)
    session.state.detach()
    world.pump()
    other = world.client().attach(b"other")
    other.subscribe("q")
    (again,) = other.messages()
    assert again.body == b"2"
    assert again.header("delivery-properties").redelivered


def test_a_session_that_is_to_end_with_its_connection_takes_no_more_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "LOST_TURN", 1)
    world = World("q")
    client = world.client()
    client.attach(b"first")
    session = client.attach(b"second")
    session.subscribe("q")
    world.publish("q", b"held")
    (held,) = session.messages()
    assert held.body == b"held"
    # Without the turn in which the second session ends.
    client.lose()
    world.clients.remove(client)
    world.publish("q", b"later")
    other = world.client().attach()
    other.subscribe("q")
    (later,) = other.messages()
    assert later.body == b"later"
    assert not later.header("delivery-properties").redelivered
    world.front.tick(world.now)
    (again,) = other.messages()
    assert again.body == b"held"
    assert again.header("delivery-properties").redelivered


@pytest.mark.req("D11", "N10")
@pytest.mark.parametrize("late", [False, True])
def test_a_session_that_ends_before_the_answer_leaves_no_links(late: bool) -> None:
    world = World("q")
    client = world.client()
    session = client.attach()
    # The answer comes in the turn of the end, or after a right has been asked for.
    client.holds = [] if late else None
    session.state.send("message.subscribe", queue="q", destination="d")
    if not late:
        session.state.detach()
    world.pump()
    if client.holds is not None:
        session.state.detach()
        world.pump()
        for link in client.holds:
            client.place(link)
    assert session.state.detached is not None
    queue = world.host.space().find("q")
    assert not queue.consumers()
    client.holds = None
    world.publish("q", b"x")
    other = client.attach(b"other")
    other.subscribe("q")
    assert other.bodies() == [b"x"]


def test_ranges_may_be_as_wide_as_the_circle_permits() -> None:
    world = World("q")
    world.publish("q", b"1", b"2")
    session = consuming(world)
    session.messages()
    session.done(session.state.send("message.accept", transfers=[(0, 2**31 - 1)], sync=True))
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)
    session.done(session.state.send("message.accept", sync=True))


def test_queues_of_other_kinds_are_subscribed_to() -> None:
    world = World(Queue("q", priorities=10))
    world.publish("q", b"low", priority=1)
    world.publish("q", b"high", priority=9)
    assert consuming(world).bodies() == [b"high", b"low"]
