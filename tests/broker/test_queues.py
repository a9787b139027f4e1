"""Queues, as their links see them."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import World

from amqp_rt.broker.entries import Entry
from amqp_rt.broker.nodes import Queue
from amqp_rt.core.performatives import RECEIVER
from amqp_rt.fronts.base import RCV_SECOND, SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Received,
    Rejected,
    rejected,
)
from amqp_rt.values import Timestamp

DEAD = Queue("q", max_deliveries=3, max_attempts=5, dead_letter="dead")


def counts(world: World, address: str = "q") -> tuple[int, int]:
    stats = world.stats(address)
    return stats.available, stats.acquired


# --- order and sharing ---------------------------------------------------------------------


@pytest.mark.req("B5", "B19", "M2", "M19")
def test_messages_pass_in_order_and_untouched() -> None:
    world = World(Queue("q"))
    client = world.client()
    sender = client.sender("q")
    payloads = [bytes(Message(n, subject=f"s{n}").encode()) for n in range(20)]
    for payload in payloads[:10]:
        sender.send_raw(payload)
    assert counts(world) == (10, 0)
    receiver = client.receiver("q", credit=50)
    for payload in payloads[10:]:
        sender.send_raw(payload)
    assert [d.payload for d in receiver.endpoint.deliveries] == payloads
    assert sender.outcomes == [ACCEPTED] * 20
    assert counts(world) == (0, 20)
    receiver.settle(ACCEPTED)
    assert counts(world) == (0, 0)
    assert world.host.memory.held == 0


@pytest.mark.req("B19", "Z9")
def test_competing_consumers_take_turns_in_the_order_of_their_credit() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    first, second, third = (world.client().receiver("q") for _ in range(3))
    second.grant(2)
    first.grant(3)
    third.grant(1)
    sender.send(*range(8))
    assert second.bodies == [0, 3]
    assert first.bodies == [1, 4, 5]
    assert third.bodies == [2]
    third.grant(1)
    assert third.bodies == [2, 6]
    assert counts(world) == (1, 7)


@pytest.mark.req("Z9")
def test_credit_taken_back_and_given_again_loses_its_place() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    first, second = (world.client().receiver("q") for _ in range(2))
    first.grant(1)
    second.grant(1)
    first.grant(0)
    first.grant(1)
    sender.send("a", "b")
    assert (first.bodies, second.bodies) == (["b"], ["a"])


def test_a_consumer_never_gets_more_than_its_credit() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send(*range(10))
    receiver = world.client().receiver("q", credit=4)
    assert receiver.bodies == [0, 1, 2, 3]
    receiver.settle(ACCEPTED)
    assert receiver.bodies == [0, 1, 2, 3]
    assert counts(world) == (6, 0)


def test_a_full_window_holds_a_consumer_back_and_not_the_others() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    slow = world.client(limits=Limits(session_window=2)).receiver("q")
    slow.link.grant(100)
    slow.link.session.engine.take()
    fast = world.client().receiver("q", credit=100)
    slow.grant(100)
    sender.send(*range(20))
    assert sorted(slow.bodies + fast.bodies) == list(range(20))
    assert slow.bodies == sorted(slow.bodies)
    assert fast.bodies == sorted(fast.bodies)


@pytest.mark.req("X16")
def test_drain_gives_what_there_is_and_the_rest_of_the_credit_back() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    receiver = world.client().receiver("q")
    sender.send("only")
    receiver.link.grant(5)
    receiver.drain()
    assert receiver.bodies == ["only"]
    assert receiver.link.credit == 0
    sender.send("later")
    assert receiver.bodies == ["only"]
    receiver.drain()
    assert receiver.link.credit == 0
    receiver.grant(1)
    assert receiver.bodies == ["only", "later"]


# --- outcomes ------------------------------------------------------------------------------

#: outcome → where the message is then, its delivery-count, whether it comes again
OUTCOMES: list[tuple[Outcome, str, int]] = [
    (ACCEPTED, "gone", 0),
    (RELEASED, "again", 0),
    (Modified(), "again", 0),
    (MODIFIED_FAILED, "again", 1),
    (Modified(delivery_failed=True, undeliverable_here=False), "again", 1),
    (Modified(undeliverable_here=True), "elsewhere", 0),
    (Modified(delivery_failed=True, undeliverable_here=True), "elsewhere", 1),
    (Rejected(), "dead", 1),
    (rejected("amqp:decode-error", "no JSON"), "dead", 1),
]


@pytest.mark.req("M19", "M20", "M21", "M22", "M23", "M8")
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("outcome", "where", "count"), OUTCOMES, ids=str)
def test_each_outcome(outcome: Outcome, where: str, count: int, second: bool) -> None:
    world = World(DEAD)
    client = world.client()
    client.sender("q").send("m", "next")
    mode = RCV_SECOND if second else 0
    receiver = client.receiver("q", credit=1, rcv_settle_mode=mode)
    other = world.client().receiver("q")
    receiver.settle(outcome, 0)
    if second:
        # The broker settles after the receiver has sent its outcome (Part 2 §2.6.12).
        assert receiver.endpoint.settled == receiver.endpoint.deliveries
    receiver.grant(1)
    again = receiver.messages[1]
    if where == "again":
        assert (again.body, again.delivery_count) == ("m", count)
    else:
        assert (again.body, again.delivery_count) == ("next", 0)
    other.grant(1)
    if where == "elsewhere":
        assert [(m.body, m.delivery_count) for m in other.messages] == [("m", count)]
    dead = client.receiver("dead", credit=5)
    found = [(m.body, m.delivery_count) for m in dead.messages]
    assert found == ([("m", count)] if where == "dead" else [])


@pytest.mark.req("M23")
def test_annotations_of_a_modified_outcome_are_merged() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send(
        "m", subject="s", message_annotations={"x-opt-a": 1, "x-opt-b": 2}, priority=7
    )
    before = world.stats("q").bytes
    receiver = client.receiver("q", credit=1)
    receiver.settle(Modified(message_annotations={"x-opt-b": 3, "x-opt-c": "new"}))
    assert world.stats("q").bytes > before
    receiver.grant(1)
    message = receiver.messages[1]
    assert message.message_annotations == {"x-opt-a": 1, "x-opt-b": 3, "x-opt-c": "new"}
    assert (message.body, message.subject, message.priority) == ("m", "s", 7)
    receiver.settle(ACCEPTED, 1)
    assert world.host.memory.held == 0


@pytest.mark.req("M23")
def test_annotations_cannot_grow_without_end() -> None:
    limits = Limits(annotations_max=200)
    world = World(Queue("q"), limits=limits)
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=1)
    for n in range(5):
        receiver.settle(Modified(message_annotations={f"x-opt-{n}": "x" * 60}), n)
        receiver.grant(1)
    assert list(receiver.messages[-1].message_annotations) == ["x-opt-0", "x-opt-1"]


def test_a_message_waits_for_a_consumer_that_may_have_it() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=1)
    receiver.settle(Modified(undeliverable_here=True))
    receiver.grant(10)
    assert receiver.bodies == ["m"]
    assert counts(world) == (1, 0)
    # Another link of the same client is another link.
    assert client.receiver("q", credit=1).bodies == ["m"]


@pytest.mark.req("B11")
def test_two_outcomes_that_contradict_detach_the_link() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=1, rcv_settle_mode=RCV_SECOND)
    session = client.session
    (delivery,) = receiver.endpoint.deliveries
    for outcome in (ACCEPTED, RELEASED):
        session.queue_disposition(RECEIVER, delivery.delivery_id, False, outcome)
        session.flush_dispositions()
    world.pump()
    assert receiver.error == "amqp:illegal-state"
    # The first word counts.
    assert counts(world) == (0, 0)
    assert world.stats("q").accepted == 1


@pytest.mark.req("M32")
def test_an_outcome_outside_the_agreed_set_detaches_the_link() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=1, outcomes=("amqp:accepted:list",))
    assert receiver.link.source.outcomes == ("amqp:accepted:list",)
    receiver.settle(RELEASED)
    assert receiver.error == "amqp:invalid-field"
    assert counts(world) == (1, 0)


@pytest.mark.parametrize(
    ("default", "where"),
    [
        (None, "again"),
        (RELEASED, "again"),
        (MODIFIED_FAILED, "failed"),
        (ACCEPTED, "gone"),
        (rejected("amqp:not-allowed"), "dead"),
    ],
)
@pytest.mark.parametrize("how", ["settled without an outcome", "detached", "lost"])
@pytest.mark.req("B14", "M31")
def test_the_default_outcome(default: Outcome | None, where: str, how: str) -> None:
    world = World(DEAD)
    world.client().sender("q").send("m")
    client = world.client()
    receiver = client.receiver("q", credit=1, default_outcome=default)
    if how == "detached":
        receiver.detach()
    elif how == "lost":
        client.cut()
    else:
        (delivery,) = receiver.endpoint.deliveries
        client.session.incoming.pop(delivery.delivery_id, None)
        client.session.queue_disposition(RECEIVER, delivery.delivery_id, True, None)
        world.pump()
    again = world.client().receiver("q", credit=1)
    found = [(m.body, m.delivery_count) for m in again.messages]
    assert found == {"again": [("m", 0)], "failed": [("m", 1)]}.get(where, [])
    assert world.stats("dead").available == (1 if where == "dead" else 0)


@pytest.mark.req("B5")
@pytest.mark.parametrize("how", ["detach", "cut", "end", "close"])
def test_what_a_lost_link_held_comes_again_in_order(how: str) -> None:
    world = World(Queue("q"))
    world.client().sender("q").send(*range(10))
    client = world.client()
    receiver = client.receiver("q", credit=6)
    receiver.settle(ACCEPTED, 2)
    if how == "detach":
        receiver.detach()
    elif how == "cut":
        client.cut()
    elif how == "end":
        client.session.end()
    else:
        client.joined.client.close()
    world.pump()
    assert world.client().receiver("q", credit=20).bodies == [0, 1, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.req("B5")
def test_what_never_left_for_a_lost_link_is_not_lost() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.receiver("q", credit=3)
    for n in range(3):
        world.host.space().publish("q", bytes(Message(bytes([n]) * 200_000).encode()))
    assert counts(world)[1] > 0
    client.cut()
    assert counts(world) == (3, 0)
    assert [m.body[0] for m in world.client().receiver("q", credit=3).messages] == [0, 1, 2]


def test_a_settled_link_takes_messages_for_good() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send(1, 2)
    client = world.client()
    receiver = client.receiver("q", credit=1, snd_settle_mode=SND_SETTLED)
    assert receiver.link.snd_settle_mode == SND_SETTLED
    assert [d.settled for d in receiver.endpoint.deliveries] == [True]
    assert counts(world) == (1, 0)
    client.cut()
    assert counts(world) == (1, 0)


def test_a_message_too_large_for_one_consumer_goes_to_another() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send(b"x" * 5_000, b"small")
    small = world.client(limits=Limits(message_size_max=2_000)).receiver("q", credit=5)
    assert small.bodies == [b"small"]
    assert counts(world) == (1, 1)
    assert world.client().receiver("q", credit=5).bodies == [b"x" * 5_000]


# --- giving up -----------------------------------------------------------------------------


def test_a_message_is_given_up_after_max_deliveries_failures() -> None:
    world = World(DEAD, volatile=True, limits=Limits(retry_pause_s=0))
    client = world.client()
    client.sender("q").send("m", durable=True, ttl_s=60, message_annotations={"x-opt-a": 1})
    receiver = client.receiver("q", credit=10)
    for n in range(3):
        assert [m.delivery_count for m in receiver.messages] == list(range(n + 1))
        receiver.settle(MODIFIED_FAILED, n)
    assert counts(world) == (0, 0)
    (dead,) = client.receiver("dead", credit=1).messages
    assert (dead.body, dead.delivery_count, dead.durable, dead.ttl_s) == ("m", 3, True, None)
    assert dead.message_annotations == {
        "x-opt-a": 1,
        "x-opt-deadletter-source": "q",
        "x-opt-dead-letter-reason": "max-deliveries",
        "x-opt-dead-letter-history": [
            {
                "source": "q",
                "reason": "max-deliveries",
                "time": Timestamp(int(world.time.now * 1000)),
                "delivery-count": 3,
                "attempts": 3,
            }
        ],
    }


@pytest.mark.req("B16")
def test_a_message_that_was_given_up_often_tells_of_the_last_times() -> None:
    queues = [Queue(f"q{n}", max_attempts=1, dead_letter=f"q{n + 1}") for n in range(5)]
    world = World(*queues, limits=Limits(dead_letter_history_max=3))
    client = world.client()
    client.sender("q0").send("m", message_annotations={"x-opt-dead-letter-history": "forged"})
    client.receiver("q0", credit=1, settle=rejected("amqp:decode-error", "no JSON"))
    for n in range(1, 5):
        world.time.now += 1
        client.receiver(f"q{n}", credit=1, settle=RELEASED)
    (dead,) = client.receiver("q5", credit=1).messages
    annotations = dead.message_annotations
    history = annotations["x-opt-dead-letter-history"]
    assert isinstance(history, list)
    assert [each["source"] for each in history] == ["q2", "q3", "q4"]
    assert [each["reason"] for each in history] == ["max-attempts"] * 3
    assert [each["time"] // 1000 - 1_000_000 for each in history] == [2, 3, 4]
    # The error of the first consumer is not that of the last delivery.
    assert annotations["x-opt-dead-letter-condition"] is None


@pytest.mark.req("B15")
def test_what_is_given_up_goes_back_to_its_sender() -> None:
    world = World(
        Queue("q", return_to_sender=True, dead_letter="dead"),
        Queue("replies", return_to_sender=True),
    )
    client = world.client()
    out = client.sender("q")
    out.send("mine", reply_to="replies")
    out.send("nobody's", reply_to="nowhere")
    out.send("anonymous")
    out.send("a loop", reply_to="q")
    out.send_raw(b"no AMQP", message_format=7)
    client.receiver("q", credit=9, settle=rejected("amqp:decode-error"))
    replies = client.receiver("replies", credit=9)
    (returned,) = replies.messages
    assert returned.body == "mine"
    assert returned.message_annotations["x-opt-deadletter-source"] == "q"
    assert returned.message_annotations["x-opt-dead-letter-reason"] == "rejected"
    letters = client.receiver("dead", credit=9).endpoint.deliveries
    assert len(letters) == 4
    # A message returns to its sender once.
    replies.settle(rejected("amqp:decode-error"))
    assert world.stats("replies").dropped == 1


def test_released_messages_are_given_up_after_max_attempts_only() -> None:
    world = World(DEAD)
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=10)
    for n in range(5):
        assert len(receiver.bodies) == n + 1
        receiver.settle(RELEASED, n)
    assert counts(world) == (0, 0)
    (dead,) = client.receiver("dead", credit=1).messages
    assert dead.delivery_count == 0
    assert dead.message_annotations["x-opt-dead-letter-reason"] == "max-attempts"


@pytest.mark.req("M21")
def test_a_rejection_is_kept_with_its_error() -> None:
    world = World(DEAD)
    client = world.client()
    client.sender("q").send("m")
    error = Error("amqp:decode-error", "no JSON", {"at": 7})
    client.receiver("q", credit=1).settle(Rejected(error))
    (dead,) = client.receiver("dead", credit=1).messages
    assert dead.delivery_count == 1
    assert dead.message_annotations == {
        "x-opt-deadletter-source": "q",
        "x-opt-dead-letter-reason": "rejected",
        "x-opt-dead-letter-condition": "amqp:decode-error",
        "x-opt-dead-letter-description": "no JSON",
        "x-opt-dead-letter-info": {"at": 7},
        "x-opt-dead-letter-history": dead.message_annotations["x-opt-dead-letter-history"],
    }


def test_without_a_dead_letter_address_it_is_dropped_and_counted() -> None:
    world = World(Queue("q", max_deliveries=1))
    client = world.client()
    client.sender("q").send(1, 2)
    receiver = client.receiver("q", credit=2)
    receiver.settle(MODIFIED_FAILED, 0)
    receiver.settle(rejected("amqp:not-allowed"), 1)
    stats = world.stats("q")
    assert (stats.available, stats.acquired, stats.dropped, stats.dead_lettered) == (0, 0, 2, 0)
    assert world.host.memory.held == 0


# --- browsing ------------------------------------------------------------------------------


@pytest.mark.req("B20", "M30")
def test_a_browser_sees_everything_and_takes_nothing() -> None:
    world = World(Queue("q"))
    client = world.client()
    sender = client.sender("q")
    sender.send(*range(5))
    browser = client.receiver("q", credit=3, distribution_mode="copy")
    assert browser.link.source.distribution_mode == "copy"
    assert browser.bodies == [0, 1, 2]
    browser.grant(100)
    sender.send(5)
    assert browser.bodies == [0, 1, 2, 3, 4, 5]
    browser.settle(ACCEPTED)
    browser.drain()
    assert browser.link.credit == 0
    assert counts(world) == (6, 0)
    assert client.receiver("q", credit=10).bodies == [0, 1, 2, 3, 4, 5]


@pytest.mark.req("M30", "B20")
@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("x")], ids=str)
def test_nothing_comes_twice_to_a_browser_whatever_it_says(outcome: Outcome) -> None:
    world = World(Queue("q", max_deliveries=1, dead_letter="dead"))
    client = world.client()
    client.sender("q").send("m")
    browser = client.receiver("q", credit=5, distribution_mode="copy", rcv_settle_mode=RCV_SECOND)
    browser.settle(outcome)
    assert browser.endpoint.settled == browser.endpoint.deliveries
    browser.grant(5)
    assert browser.bodies == ["m"]
    (message,) = client.receiver("q", credit=1).messages
    assert message.delivery_count == 0


@pytest.mark.req("B20")
def test_a_browser_sees_what_arrives_before_a_consumer_takes_it() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    consumer = world.client().receiver("q", credit=10)
    browser = world.client().receiver("q", credit=10, distribution_mode="copy")
    sender.send(1, 2)
    assert consumer.bodies == browser.bodies == [1, 2]


@pytest.mark.req("B20")
def test_a_browser_sees_what_is_available_and_not_what_others_hold() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send(*range(6))
    receiver = client.receiver("q", credit=4)
    receiver.settle(ACCEPTED, 0)
    receiver.settle(RELEASED, 2)
    receiver.settle(Modified(undeliverable_here=True), 1)
    browser = client.receiver("q", credit=10, distribution_mode="copy")
    assert browser.bodies == [1, 2, 4, 5]


# --- time to live --------------------------------------------------------------------------


@pytest.mark.req("M7")
def test_the_ttl_is_reduced_by_the_time_spent_here() -> None:
    world = World(Queue("q"), volatile=True)
    client = world.client()
    client.sender("q").send("m", ttl_s=10, durable=True, priority=9)
    world.time.now += 4
    (message,) = client.receiver("q", credit=1).messages
    assert (message.ttl_s, message.durable, message.priority) == (6, True, 9)


@pytest.mark.req("M7")
@pytest.mark.parametrize("dead_letter", [None, "dead"])
def test_an_expired_message_is_never_sent(dead_letter: str | None) -> None:
    world = World(Queue("q", dead_letter=dead_letter))
    client = world.client()
    sender = client.sender("q")
    sender.send("old", ttl_s=5)
    sender.send("new", ttl_s=500)
    sender.send("eternal")
    browser = client.receiver("q", distribution_mode="copy")
    world.time.now += 5
    browser.grant(10)
    assert browser.bodies == ["new", "eternal"]
    receiver = client.receiver("q", credit=10)
    assert receiver.bodies == ["new", "eternal"]
    stats = world.stats("q")
    assert (stats.expired, stats.dropped) == (1, 0 if dead_letter else 1)
    if dead_letter:
        (dead,) = client.receiver("dead", credit=1).messages
        assert dead.message_annotations["x-opt-dead-letter-reason"] == "expired"
        assert dead.ttl_s is None


@pytest.mark.req("M7")
def test_a_message_that_comes_back_too_late_is_given_up() -> None:
    world = World(Queue("q", dead_letter="dead"))
    client = world.client()
    client.sender("q").send("m", ttl_s=5)
    receiver = client.receiver("q", credit=1)
    world.time.now += 6
    receiver.settle(RELEASED)
    receiver.grant(1)
    assert receiver.bodies == ["m"]
    assert world.stats("dead").available == 1


@pytest.mark.parametrize(
    ("own_s", "queue_s", "lives_s"), [(None, 5, 5), (3, 5, 3), (9, 5, 5), (9, None, 9)]
)
def test_a_queue_bounds_the_time_to_live(
    own_s: float | None, queue_s: float | None, lives_s: float
) -> None:
    world = World(Queue("q", ttl_s=queue_s))
    client = world.client()
    client.sender("q").send("m", ttl_s=own_s)
    receiver = client.receiver("q")
    world.time.now += lives_s - 1
    receiver.grant(1)
    assert receiver.messages[0].ttl_s == (None if own_s is None else 1)
    receiver.settle(RELEASED)
    world.time.now += 1
    receiver.grant(1)
    assert receiver.bodies == ["m"]
    assert world.stats("q").expired == 1


def test_the_sweep_gives_up_expired_messages_without_a_consumer() -> None:
    world = World(Queue("q", dead_letter="dead"), Queue("r", ttl_s=1))
    client = world.client()
    sender = client.sender("q")
    sender.send("a", "b", ttl_s=5)
    sender.send("c", ttl_s=50)
    client.sender("r").send("d")
    receiver = client.receiver("q", credit=2)
    receiver.settle(RELEASED, 0)
    receiver.settle(Modified(undeliverable_here=True), 1)
    receiver.detach()
    world.host.sweep()
    assert counts(world) == (3, 0)
    world.time.now += 5
    world.host.sweep()
    assert counts(world) == (1, 0)
    assert counts(world, "r") == (0, 0)
    assert world.stats("dead").available == 2
    world.time.now += 50
    world.host.sweep()
    world.host.sweep()
    assert counts(world) == (0, 0)


@pytest.mark.req("M8")
def test_only_the_first_acquirer_is_told_so() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("m", first_acquirer=True)
    receiver = client.receiver("q", credit=2)
    receiver.settle(RELEASED, 0)
    assert [m.first_acquirer for m in receiver.messages] == [True, False]


@pytest.mark.req("M3", "M4", "M8")
def test_no_header_is_inserted_unless_it_says_something() -> None:
    world = World(Queue("q"))
    client = world.client()
    payload = bytes(Message("m").encode())
    client.sender("q").send_raw(payload)
    receiver = client.receiver("q", credit=3)
    receiver.settle(RELEASED, 0)
    receiver.settle(MODIFIED_FAILED, 1)
    first, second, third = (d.payload for d in receiver.endpoint.deliveries)
    assert first == second == payload
    assert third == bytes.fromhex("005370c00705404040405201") + payload or third.endswith(payload)
    assert Message.decode(third).delivery_count == 1


@pytest.mark.req("M18", "M22")
def test_the_header_of_another_message_format_is_not_touched() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send_raw(b"\x00\x53\x70opaque", message_format=7)
    receiver = client.receiver("q", credit=3)
    receiver.settle(Modified(delivery_failed=True, message_annotations={"x-opt-a": 1}), 0)
    receiver.settle(RELEASED, 1)
    found = [(d.payload, d.message_format) for d in receiver.endpoint.deliveries]
    assert found == [(b"\x00\x53\x70opaque", 7)] * 3


def test_a_large_message_gets_its_header_too() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send(b"x" * 300_000, ttl_s=10)
    receiver = client.receiver("q", credit=2)
    receiver.settle(MODIFIED_FAILED, 0)
    world.time.now += 1
    again = receiver.messages[1]
    assert (len(again.body), again.ttl_s, again.delivery_count) == (300_000, 10, 1)


@pytest.mark.req("M25")
def test_received_is_not_an_outcome() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("m")
    receiver = client.receiver("q", credit=2, rcv_settle_mode=RCV_SECOND)
    (delivery,) = receiver.endpoint.deliveries
    delivery.update(Received(1, 5))
    world.pump()
    assert counts(world) == (0, 1)
    receiver.settle(ACCEPTED)
    assert counts(world) == (0, 0)
    # Settled while that was all it said: the default outcome holds.
    client.sender("q").send("n")
    (_, second) = receiver.endpoint.deliveries
    client.session.queue_disposition(RECEIVER, second.delivery_id, True, Received(1, 5))
    world.pump()
    assert counts(world) == (1, 0)


def test_a_message_too_large_for_a_browser_is_passed_over() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send(b"x" * 5_000, b"small")
    small = world.client(limits=Limits(message_size_max=2_000))
    assert small.receiver("q", credit=5, distribution_mode="copy").bodies == [b"small"]
    assert counts(world) == (2, 0)


# --- cost ----------------------------------------------------------------------------------


def depth_of(world: World) -> Any:
    return world.host.space().nodes["q"].held


def test_emptied_segments_are_given_back() -> None:
    world = World(Queue("q"))
    payload = bytes(Message("m").encode())
    receiver = world.client().receiver("q")
    for _ in range(3):
        for _ in range(1_000):
            world.host.space().publish("q", payload)
        receiver.grant(1_000)
        receiver.settle(Accepted())
        receiver.endpoint.deliveries.clear()
    assert len(depth_of(world).shelf.segments) == 1
    for _ in range(1_000):
        world.host.space().publish("q", payload)
    receiver.grant(1_000)
    assert len(depth_of(world).shelf.segments) == 1
    receiver.settle(RELEASED)
    assert counts(world) == (1_000, 0)
    world.purge("q")
    assert len(depth_of(world).shelf.segments) == 1


def test_a_queue_that_is_deleted_drops_what_waits_and_what_is_in_hand() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("a", "b", "c")
    queue = world.host.space().find("q").held
    assert world.client().receiver("q", credit=1).bodies == ["a"]
    world.host.space().delete("q")
    assert queue.counts.dropped == 3


def test_room_counts_messages_that_are_being_written() -> None:
    world = World(Queue("q", length_max=2, overflow="reject"))
    queue = world.host.space().find("q").held
    assert queue.fits(1)
    for _ in range(2):
        queue.reserve(Entry(b"x"))
    assert not queue.fits(1)
    # Not one message more than there is memory for.
    world.host.memory.held = world.host.memory.limit
    assert queue.room() == 0


def test_messages_of_a_browse_only_queue_stay() -> None:
    world = World(Queue("q", browse_only=True))
    client = world.client()
    client.sender("q").send("one")
    for _ in range(2):
        receiver = client.receiver("q", credit=5)
        assert receiver.link.source.distribution_mode == "copy"
        receiver.settle(ACCEPTED)
        assert counts(world) == (1, 0)
    refused = client.receiver("q", distribution_mode="move")
    assert refused.error is not None
    assert "amqp:not-implemented" in refused.error


@pytest.mark.parametrize("value", ["a", b"a", 7], ids=["text", "octets", "number"])
def test_messages_are_grouped_by_any_field(value: object) -> None:
    world = World(Queue("q", groups=1_000, group_key="team"))
    client = world.client()
    first, second = client.receiver("q", credit=1), client.receiver("q", credit=9)
    sender = client.sender("q")
    for number in range(3):
        sender.send(number, application_properties={"team": value}, group_id=str(number))
    assert [each.payload for each in second.endpoint.deliveries] == []
    first.grant(9)
    assert len(first.endpoint.deliveries) == 3


def test_a_field_of_groups_needs_groups() -> None:
    with pytest.raises(ValueError, match="group_key needs groups"):
        Queue("q", group_key="team")


def test_a_selector_keeps_other_messages_out() -> None:
    world = World(Queue("q", selector="team = 'a' OR JMSPriority > 8"))
    client = world.client()
    sender = client.sender("q")
    for number, team in enumerate("abcab"):
        sender.send(number, application_properties={"team": team})
    stats = world.stats("q")
    assert (stats.available, stats.enqueued, stats.dropped) == (2, 5, 3)
    receiver = client.receiver("q", credit=9)
    assert [each.body for each in receiver.messages] == [0, 3]
    # A consumer that waits does not get the others either.
    sender.send(5, application_properties={"team": "b"})
    sender.send(6, application_properties={"team": "a"})
    assert [each.body for each in receiver.messages] == [0, 3, 6]
    assert sender.outcomes == [ACCEPTED] * 7
    receiver.settle(ACCEPTED)
    stats = world.stats("q")
    assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0)


def test_a_selector_is_checked_when_a_queue_is_declared() -> None:
    with pytest.raises(ValueError, match="selector: "):
        Queue("q", selector="team = = 1")
    Queue("q", selector="team = 1")
