"""Entities: locks, outcomes, counts, times to live, dead letters, over real links and by operations."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from amqp_rt_servicebus.bounds import DEFAULT_BOUNDS
from amqp_rt_servicebus.conditions import (
    ENTITY_DISABLED,
    MESSAGE_LOCK_LOST,
    MESSAGE_NOT_FOUND,
    NO_ROOM,
    NOT_ALLOWED,
    TOO_LARGE,
)
from amqp_rt_servicebus.declarations import Queue, Subscription, Topic
from amqp_rt_servicebus.messages import SCHEDULED_ENQUEUE_TIME, arrived
from amqp_rt_servicebus.options import Options
from byte_links import ByteLink
from entities import NOW, Bench, Receiving, condition, stored_of

from amqp_rt import Message
from amqp_rt.fronts import ACCEPTED, RELEASED, AmqpError, Error, Modified, Rejected
from amqp_rt.fronts.base import RCV_FIRST, RCV_SECOND
from amqp_rt.values import Symbol, Timestamp

ABANDON = Modified(delivery_failed=True, undeliverable_here=False)
DEFER = Modified(delivery_failed=True, undeliverable_here=True)
DEAD_LETTER = "com.microsoft:dead-letter"


def scheduled(seconds: float) -> dict[Any, Any]:
    return {SCHEDULED_ENQUEUE_TIME: Timestamp(round((NOW + seconds) * 1000))}


def rejection(reason: str | None, description: str | None, **more: Any) -> Rejected:
    """Return the outcome with which the SDKs dead-letter a message."""
    info = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description, **more}
    return Rejected(Error(DEAD_LETTER, description, {Symbol(key): info[key] for key in info}))


# --- Locks ------------------------------------------------------------------------------------


@pytest.mark.req("Z7")
def test_a_message_is_locked_and_its_tag_is_the_token_in_the_order_of_dotnet() -> None:
    bench = Bench()
    number = bench.send()
    receiver = bench.receiver(credit=1)
    stored = stored_of(bench, number)
    assert stored.token is not None
    assert receiver.deliveries[0].tag == stored.token.bytes_le
    assert receiver.deliveries[0].tag != stored.token.bytes
    said = receiver.messages[0].message_annotations
    assert said["x-opt-locked-until"] == round((NOW + 60) * 1000)


@pytest.mark.req("Z7")
def test_the_lock_begins_when_the_message_is_taken_for_the_credit() -> None:
    bench = Bench(lock_s=30)
    receiver = bench.receiver(credit=1)
    bench.advance(20)
    number = bench.send()
    assert stored_of(bench, number).until == NOW + 50
    bench.advance(29)
    assert receiver.update(ACCEPTED) == ACCEPTED


@pytest.mark.req("Z8")
def test_receive_and_delete_removes_the_message_as_it_is_sent() -> None:
    bench = Bench()
    bench.send()
    receiver = bench.receiver(credit=1, settled=True)
    assert receiver.deliveries[0].settled
    assert "x-opt-locked-until" not in receiver.messages[0].message_annotations
    assert bench.bodies() == []
    assert bench.memory.held == 0


@pytest.mark.req("Z7")
def test_a_lock_that_ends_counts_and_the_message_is_delivered_again() -> None:
    bench = Bench(lock_s=30)
    bench.send("a")
    receiver = bench.receiver(credit=2)
    bench.advance(30)
    assert [each.delivery_count for each in receiver.messages] == [0, 1]


@pytest.mark.req("Z7")
def test_an_outcome_after_the_lock_is_answered_with_lock_lost() -> None:
    bench = Bench(lock_s=30)
    bench.send()
    receiver = bench.receiver(credit=1)
    other = bench.receiver(credit=1)
    bench.advance(30)
    assert other.bodies == ["m"]
    answer = receiver.update(ACCEPTED)
    assert isinstance(answer, Rejected)
    assert condition(answer.error) == MESSAGE_LOCK_LOST
    assert other.update(ACCEPTED) == ACCEPTED
    assert bench.bodies() == []


def test_a_lock_has_ended_even_if_the_alarm_was_not_called_yet() -> None:
    bench = Bench(lock_s=30)
    number = bench.send()
    receiver = bench.receiver(credit=1)
    bench.time.now += 31
    answer = receiver.update(ACCEPTED)
    assert isinstance(answer, Rejected)
    assert condition(answer.error) == MESSAGE_LOCK_LOST
    assert stored_of(bench, number).delivery_count == 1


def test_a_lost_lock_does_not_settle_the_dead_letter_that_the_message_became() -> None:
    bench = Bench(lock_s=30, deliveries_max=1)
    bench.send()
    receiver = bench.receiver(credit=1)
    reader = bench.receiver(of=bench.dead, credit=1)
    bench.time.now += 31
    answer = receiver.update(ACCEPTED)
    assert isinstance(answer, Rejected)
    assert len(reader.deliveries) == 1
    assert reader.update(ACCEPTED) == ACCEPTED


@pytest.mark.req("Z7")
@pytest.mark.parametrize("end", [Receiving.detach, Receiving.cut])
def test_the_end_of_a_link_frees_no_lock(end: Any) -> None:
    bench = Bench(lock_s=30)
    bench.send()
    receiver = bench.receiver(credit=1)
    token = receiver.token()
    end(receiver)
    other = bench.receiver(credit=1)
    assert other.deliveries == []
    bench.advance(20)
    bench.requests.complete([token])
    assert bench.bodies() == []


@pytest.mark.req("Z7")
def test_after_the_end_of_a_link_the_lock_ends_with_its_time() -> None:
    bench = Bench(lock_s=30)
    bench.send()
    bench.receiver(credit=1).detach()
    other = bench.receiver(credit=1)
    bench.advance(30)
    assert [each.delivery_count for each in other.messages] == [1]


@pytest.mark.req("Z7")
def test_locks_are_renewed_from_now_and_none_if_one_is_lost() -> None:
    bench = Bench(lock_s=30)
    bench.send("a")
    bench.send("b")
    receiver = bench.receiver(credit=2)
    bench.advance(20)
    assert bench.requests.renew([receiver.token(0), receiver.token(1)]) == (NOW + 50, 2)
    bench.advance(15)
    assert receiver.update(ACCEPTED, 0) == ACCEPTED
    with pytest.raises(AmqpError) as caught:
        bench.requests.renew([receiver.token(1), receiver.token(0)])
    assert condition(caught.value) == MESSAGE_LOCK_LOST
    bench.advance(15)
    assert stored_of(bench, 2).delivery_count == 1


# --- Outcomes by link -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "count", "where"),
    [
        (ACCEPTED, None, "gone"),
        (RELEASED, 0, "ready"),
        (ABANDON, 1, "ready"),
        (Modified(), 1, "ready"),
        (Modified(delivery_failed=False), 1, "ready"),
        (DEFER, 0, "deferred"),
        (Modified(undeliverable_here=True), 0, "deferred"),
        (rejection("r", "d"), 0, "dead"),
        (Rejected(), 0, "dead"),
    ],
)
def test_an_outcome_decides_on_the_count_and_the_place(
    outcome: Any, count: int | None, where: str
) -> None:
    bench = Bench()
    number = bench.send()
    receiver = bench.receiver(credit=1)
    answer = receiver.update(outcome)
    # The SDKs take an error in the answer for a failure.
    assert answer == (Rejected() if isinstance(outcome, Rejected) else outcome)
    sizes = bench.entity.sizes()
    assert (sizes.active, sizes.deferred, sizes.dead_letters) == (
        int(where == "ready"),
        int(where == "deferred"),
        int(where == "dead"),
    )
    if count is not None:
        home = bench.dead if where == "dead" else bench.entity
        assert stored_of(bench, number, home).delivery_count == count


@pytest.mark.req("Z7")
@pytest.mark.parametrize("settled_by_client", [False, True])
@pytest.mark.parametrize("settle_mode", [RCV_FIRST, RCV_SECOND])
def test_both_ways_of_settling_are_served(settle_mode: int, settled_by_client: bool) -> None:
    bench = Bench()
    bench.send()
    receiver = bench.receiver(credit=1, settle_mode=settle_mode)
    if settled_by_client:
        receiver.deliveries[0].settle(ACCEPTED)
        bench.run()
    else:
        assert receiver.update(ACCEPTED) == ACCEPTED
    assert bench.bodies() == []


def test_a_delivery_that_is_settled_without_an_outcome_stays_locked() -> None:
    bench = Bench()
    bench.send()
    receiver = bench.receiver(credit=1)
    token = receiver.token()
    receiver.deliveries[0].settle(None)
    bench.run()
    bench.requests.complete([token])
    assert bench.bodies() == []


def test_abandoned_messages_are_first_again() -> None:
    bench = Bench()
    for body in "abc":
        bench.send(body)
    receiver = bench.receiver(credit=2)
    receiver.update(ABANDON, 0)
    receiver.grant(2)
    assert receiver.bodies == ["a", "b", "a", "c"]


def test_properties_to_modify_become_application_properties() -> None:
    bench = Bench()
    bench.send(application_properties={"kept": 1, "changed": 2})
    receiver = bench.receiver(credit=1)
    receiver.update(Modified(message_annotations={Symbol("changed"): "x", Symbol("new"): True}))
    receiver.grant(1)
    assert dict(receiver.messages[1].application_properties) == {
        "kept": 1,
        "changed": "x",
        "new": True,
    }
    assert bench.memory.held == bench.entity.bytes > 0


def test_the_outcome_of_a_released_prefetch_is_not_counted_however_often() -> None:
    bench = Bench(deliveries_max=2)
    bench.send()
    receiver = bench.receiver()
    for _ in range(5):
        receiver.grant(1)
        receiver.update(RELEASED)
    assert bench.entity.sizes().active == 1


# --- Operations by token ----------------------------------------------------------------------


@pytest.mark.req("Z7")
def test_locks_are_settled_by_their_tokens() -> None:
    bench = Bench()
    for body in "abcd":
        bench.send(body)
    receiver = bench.receiver(credit=4)
    requests = bench.requests
    requests.complete([receiver.token(0)])
    requests.abandon([receiver.token(1)], {"x": 1})
    requests.defer([receiver.token(2)])
    requests.dead_letter([receiver.token(3)], "why", "because", {"y": 2})
    assert [each.body for each in bench.peeked()] == ["b", "c"]
    assert [each.header.delivery_count for each in bench.peeked()] == [1, 0]
    assert dict(bench.peeked()[0].application_properties) == {"x": 1}
    assert dict(bench.peeked(bench.dead)[0].application_properties) == {
        "y": 2,
        "DeadLetterReason": "why",
        "DeadLetterErrorDescription": "because",
    }
    answer = receiver.update(ACCEPTED, 0)
    assert isinstance(answer, Rejected)
    assert condition(answer.error) == MESSAGE_LOCK_LOST


def test_a_lost_token_leaves_the_others_locked() -> None:
    bench = Bench()
    bench.send("a")
    bench.send("b")
    receiver = bench.receiver(credit=2)
    tokens = [receiver.token(0), receiver.token(1)]
    bench.requests.complete([tokens[1]])
    with pytest.raises(AmqpError) as caught:
        bench.requests.complete(tokens)
    assert condition(caught.value) == MESSAGE_LOCK_LOST
    assert receiver.update(ACCEPTED, 0) == ACCEPTED


# --- Dead letters -----------------------------------------------------------------------------


@pytest.mark.req("Z10")
def test_the_delivery_limit_dead_letters_with_number_and_time_kept() -> None:
    bench = Bench(lock_s=30, deliveries_max=1)
    bench.send("before")
    number = bench.send("m")
    receiver = bench.receiver(credit=2)
    receiver.update(ACCEPTED, 0)
    bench.advance(31)
    (letter,) = bench.peeked(bench.dead)
    assert letter.application_properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    said = letter.message_annotations
    assert said["x-opt-sequence-number"] == number == 2
    assert said["x-opt-enqueued-time"] == NOW * 1000
    assert said["x-opt-deadletter-source"] == "q"
    assert letter.header.delivery_count == 1


def test_dead_letters_have_no_limit_of_deliveries_and_no_time_to_live() -> None:
    bench = Bench(deliveries_max=1, ttl_s=5, dead_letters_expired=True)
    bench.send()
    bench.advance(5)
    (letter,) = bench.peeked(bench.dead)
    assert letter.application_properties["DeadLetterReason"] == "TTLExpiredException"
    bench.advance(1_000)
    receiver = bench.receiver(of=bench.dead)
    for _ in range(3):
        receiver.grant(1)
        receiver.update(ABANDON)
    assert [each.delivery_count for each in receiver.messages] == [0, 1, 2]


@pytest.mark.parametrize(
    ("outcome", "reason", "description"),
    [
        (rejection("r", "d"), "r", "d"),
        (rejection(None, None), None, None),
        (Rejected(), None, None),
        (Rejected(Error("x:bad", "no good")), "x:bad", "no good"),
    ],
)
def test_a_rejected_has_its_reason_in_the_info(
    outcome: Rejected, reason: str | None, description: str | None
) -> None:
    bench = Bench()
    bench.send()
    bench.receiver(credit=1).update(outcome)
    (letter,) = bench.peeked(bench.dead)
    assert letter.application_properties.get("DeadLetterReason") == reason
    assert letter.application_properties.get("DeadLetterErrorDescription") == description


def test_other_entries_of_the_info_are_properties() -> None:
    bench = Bench()
    bench.send()
    bench.receiver(credit=1).update(rejection("r", "d", colour="red"))
    assert bench.peeked(bench.dead)[0].application_properties["colour"] == "red"


def test_a_dead_letter_that_is_dead_lettered_again_stays() -> None:
    bench = Bench()
    bench.send()
    bench.receiver(credit=1).update(rejection("r", "d"))
    bench.receiver(of=bench.dead, credit=1).update(rejection("again", None))
    (letter,) = bench.peeked(bench.dead)
    assert letter.application_properties["DeadLetterReason"] == "again"
    assert letter.application_properties["DeadLetterErrorDescription"] == "d"


def test_the_order_of_dead_letters_is_that_of_their_numbers() -> None:
    bench = Bench()
    for body in "abc":
        bench.send(body)
    receiver = bench.receiver(credit=3)
    for index in (2, 0, 1):
        receiver.update(rejection("r", None), index)
    assert bench.bodies(bench.dead) == ["a", "b", "c"]


# --- Times to live ----------------------------------------------------------------------------


@pytest.mark.req("Z10")
@pytest.mark.parametrize(
    ("own_s", "default_s", "lasting_s"), [(5, inf, 5), (None, 7, 7), (5, 7, 5), (9, 7, 7)]
)
def test_the_shorter_time_to_live_counts(
    own_s: float | None, default_s: float, lasting_s: float
) -> None:
    bench = Bench(ttl_s=default_s)
    bench.send(**({} if own_s is None else {"ttl_s": own_s}))
    (shown,) = bench.peeked()
    assert shown.ttl_ms == lasting_s * 1000
    assert shown.absolute_expiry_time == round((NOW + lasting_s) * 1000)
    bench.advance(lasting_s - 0.001)
    assert len(bench.bodies()) == 1
    bench.advance(0.001)
    assert bench.bodies() == []
    assert bench.entity.counts.expired == 1
    assert bench.memory.held == 0


def test_the_header_keeps_the_first_time_to_live() -> None:
    bench = Bench()
    bench.send(ttl_s=100)
    bench.advance(40)
    receiver = bench.receiver(credit=1)
    assert receiver.messages[0].ttl_ms == 100_000


@pytest.mark.req("Z10")
@pytest.mark.parametrize("to_dead_letters", [False, True])
def test_a_locked_message_expires_at_the_end_of_its_lock(to_dead_letters: bool) -> None:
    bench = Bench(lock_s=30, dead_letters_expired=to_dead_letters)
    bench.send(ttl_s=10)
    receiver = bench.receiver(credit=1)
    bench.advance(20)
    assert bench.bodies() == ["m"]
    receiver.update(ABANDON)
    assert bench.bodies() == []
    assert bench.bodies(bench.dead) == (["m"] if to_dead_letters else [])


@pytest.mark.req("Z10")
def test_an_expired_message_is_not_delivered_before_the_alarm_either() -> None:
    bench = Bench()
    bench.send("old", ttl_s=10)
    bench.send("new")
    bench.time.now += 10
    assert bench.receiver(credit=2).bodies == ["new"]


# --- Deferral ---------------------------------------------------------------------------------


def deferred(bench: Bench, body: str = "m", **fields: Any) -> int:
    number = bench.send(body, **fields)
    bench.receiver(credit=1).update(DEFER)
    return number


@pytest.mark.req("Z13")
def test_a_deferred_message_is_received_by_its_number_only() -> None:
    bench = Bench()
    number = deferred(bench)
    assert bench.receiver(credit=1).deliveries == []
    ((payload, token),) = bench.requests.receive_deferred([number], settled=False)
    message = Message.decode(payload)
    assert message.body == "m"
    assert message.message_annotations["x-opt-message-state"] == 1
    assert message.message_annotations["x-opt-locked-until"] == round((NOW + 60) * 1000)
    assert token is not None
    bench.requests.complete([token])
    assert bench.bodies() == []


@pytest.mark.req("Z13")
def test_a_deferred_message_is_deferred_again_after_its_lock() -> None:
    bench = Bench(lock_s=30)
    number = deferred(bench)
    ((_, token),) = bench.requests.receive_deferred([number], settled=False)
    assert token is not None
    with pytest.raises(AmqpError) as caught:
        bench.requests.receive_deferred([number], settled=False)
    assert condition(caught.value) == MESSAGE_NOT_FOUND
    bench.requests.abandon([token])
    bench.requests.receive_deferred([number], settled=False)
    bench.advance(30)
    assert stored_of(bench, number).delivery_count == 2
    assert bench.receiver(credit=1).deliveries == []
    ((_, token),) = bench.requests.receive_deferred([number], settled=True)
    assert token is None
    assert bench.bodies() == []


@pytest.mark.req("Z13")
def test_none_is_taken_if_one_is_not_deferred() -> None:
    bench = Bench()
    number = deferred(bench)
    active = bench.send("active")
    for wrong in (active, 99):
        with pytest.raises(AmqpError) as caught:
            bench.requests.receive_deferred([number, wrong], settled=False)
        assert condition(caught.value) == MESSAGE_NOT_FOUND
    assert stored_of(bench, number).token is None


@pytest.mark.req("Z13")
def test_a_deferred_message_expires_when_it_is_asked_for() -> None:
    bench = Bench(dead_letters_expired=True)
    number = deferred(bench, ttl_s=10)
    bench.advance(11)
    assert bench.bodies() == ["m"]
    with pytest.raises(AmqpError):
        bench.requests.receive_deferred([number], settled=False)
    assert bench.bodies(bench.dead) == ["m"]


# --- Schedule ---------------------------------------------------------------------------------


@pytest.mark.req("Z13")
def test_a_scheduled_message_gets_a_new_number_at_the_end_when_it_is_due() -> None:
    bench = Bench()
    first = bench.send("later", message_annotations=scheduled(10), ttl_s=5)
    bench.send("now")
    receiver = bench.receiver(credit=1)
    assert receiver.bodies == ["now"]
    assert [each.message_annotations["x-opt-message-state"] for each in bench.peeked()] == [2, 0]
    bench.advance(12)
    (later,) = [each for each in bench.peeked() if each.body == "later"]
    said = later.message_annotations
    assert first == 1
    assert said["x-opt-sequence-number"] == 3
    assert said["x-opt-enqueued-time"] == (NOW + 10) * 1000
    assert said["x-opt-scheduled-enqueue-time"] == (NOW + 10) * 1000
    assert later.absolute_expiry_time == (NOW + 15) * 1000
    with pytest.raises(AmqpError):
        bench.requests.cancel_scheduled([first])


def test_time_that_passes_at_once_is_handled_in_order() -> None:
    bench = Bench()
    bench.send(message_annotations=scheduled(10), ttl_s=5)
    bench.advance(60)
    assert bench.bodies() == []
    assert bench.entity.counts.expired == 1


def test_a_time_in_the_past_is_now() -> None:
    bench = Bench()
    bench.send(message_annotations=scheduled(-10))
    assert bench.receiver(credit=1).bodies == ["m"]


@pytest.mark.req("Z13")
def test_cancelling_removes_all_or_none() -> None:
    bench = Bench()
    numbers = [bench.send(body, message_annotations=scheduled(10)) for body in "ab"]
    active = bench.send("c")
    with pytest.raises(AmqpError) as caught:
        bench.requests.cancel_scheduled([*numbers, active])
    assert condition(caught.value) == MESSAGE_NOT_FOUND
    bench.requests.cancel_scheduled(numbers)
    bench.advance(20)
    assert bench.bodies() == ["c"]


@pytest.mark.req("Z11")
def test_scheduling_returns_numbers_and_none_for_a_duplicate() -> None:
    bench = Bench(duplicates_s=60)
    payload = Message("m", message_id="x", message_annotations=scheduled(10)).encode()
    assert bench.requests.schedule([arrived(payload), arrived(payload)]) == [1, 0]
    assert bench.send("next") == 2


@pytest.mark.req("Z11")
def test_a_duplicate_from_another_entity_is_dropped() -> None:
    bench = Bench(duplicates_s=60)
    for _ in range(2):
        bench.entity.receive(arrived(Message("m", message_id="x").encode()))
    assert bench.bodies() == ["m"]
    bench.advance(60)
    bench.entity.receive(arrived(Message("m", message_id="x").encode()))
    assert len(bench.bodies()) == 2


# --- Peek and delete --------------------------------------------------------------------------


@pytest.mark.req("Z13")
def test_peek_shows_every_state_and_no_lock() -> None:
    bench = Bench()
    deferred(bench, "deferred")
    bench.send("locked")
    bench.receiver(credit=1)
    bench.send("active")
    bench.send("scheduled", message_annotations=scheduled(10))
    shown = bench.peeked()
    assert [each.body for each in shown] == ["deferred", "locked", "active", "scheduled"]
    for each in shown:
        assert "x-opt-locked-until" not in each.message_annotations
        assert not each.delivery_annotations


@pytest.mark.req("Z13")
def test_peek_goes_on_from_a_number() -> None:
    bench = Bench()
    for body in "abcde":
        bench.send(body)
    bench.receiver(credit=1, settled=True)
    pages = [bench.requests.peek(first, 2) for first in (0, 4, 6)]
    assert [[Message.decode(each).body for each in page] for page in pages] == [
        ["b", "c"],
        ["d", "e"],
        [],
    ]


@pytest.mark.req("Z13")
def test_an_answer_to_a_peek_is_bounded_by_its_bytes() -> None:
    bench = Bench()
    for _ in range(3):
        bench.send(bytes(1_000))
    assert len(bench.requests.peek(0, 10, bytes_max=2_500)) == 2
    assert len(bench.requests.peek(0, 10, bytes_max=1)) == 1


def test_only_active_messages_that_are_not_locked_are_deleted() -> None:
    bench = Bench()
    deferred(bench, "deferred")
    bench.send("locked")
    bench.receiver(credit=1)
    bench.send("old")
    bench.send("old")
    bench.send("scheduled", message_annotations=scheduled(10))
    bench.advance(5)
    bench.send("new")
    assert bench.requests.delete_batch(1, NOW + 5) == 1
    assert bench.requests.delete_batch(100, NOW + 5) == 1
    assert bench.requests.delete_batch(100, NOW + 5) == 0
    assert bench.bodies() == ["deferred", "locked", "scheduled", "new"]
    for count in (0, 4_001):
        with pytest.raises(AmqpError):
            bench.requests.delete_batch(count, NOW)


# --- Competition ------------------------------------------------------------------------------


@pytest.mark.req("Z9")
def test_credit_is_used_in_the_order_in_which_it_arrived() -> None:
    bench = Bench()
    first = bench.receiver(credit=2)
    second = bench.receiver(credit=2)
    first.grant(4)
    for body in range(6):
        bench.send(body)
    bench.run()
    assert first.bodies == [0, 1, 4, 5]
    assert second.bodies == [2, 3]


@pytest.mark.req("Z9")
def test_a_receiver_that_has_left_loses_its_place() -> None:
    bench = Bench()
    first = bench.receiver(credit=2)
    second = bench.receiver(credit=1)
    first.detach()
    bench.send()
    bench.run()
    assert second.bodies == ["m"]


@pytest.mark.req("Z9")
def test_a_drain_returns_the_credit_that_finds_no_message() -> None:
    bench = Bench()
    bench.send()
    receiver = bench.receiver()
    receiver.drain(5)
    assert receiver.bodies == ["m"]
    assert receiver.link.credit == 0
    bench.send()
    bench.run()
    assert len(receiver.deliveries) == 1
    receiver.grant(1)
    assert len(receiver.deliveries) == 2


def test_a_message_that_a_link_cannot_take_stays_for_others() -> None:
    bench = Bench()
    bench.send(bytes(5_000))
    small = bench.receiver(credit=1, max_message_size=1_000)
    assert small.error == TOO_LARGE
    assert len(bench.receiver(credit=1).deliveries) == 1


def test_a_message_beyond_the_credit_in_bytes_of_a_link_waits_for_more() -> None:
    bench = Bench()
    bench.send(bytes(500))
    link = ByteLink("poor", largest=10_000)
    link.accept(bench.entity.consume(settled=True))
    link.give(5, 100)
    assert (link.tries, link.attached) == (1, True)
    link.give(0, 1_000)
    assert (link.tries, len(link.sent)) == (2, 1)


# --- Alarms, room, status, end ----------------------------------------------------------------


def test_alarms_do_not_grow_with_the_number_of_locks() -> None:
    bench = Bench(lock_s=30)
    receiver = bench.receiver(credit=200)
    for _ in range(100):
        bench.send()
        bench.time.now += 0.01
    bench.run()
    assert len(bench.alarms) == 1
    for index in range(100):
        receiver.update(ACCEPTED, index)
    bench.advance(31)
    assert len(bench.alarms) == 1
    assert bench.entity.alarm == inf


def test_locks_and_expiries_of_removed_messages_keep_no_memory() -> None:
    bench = Bench()
    receiver = bench.receiver(credit=2_000, settled=False)
    for index in range(1_000):
        bench.send(ttl_s=100)
        bench.run()
        receiver.update(ACCEPTED, index)
    assert bench.entity.timing.locks.heap_size < 100
    assert bench.entity.timing.expiries.heap_size < 100


def test_there_is_room_up_to_the_size() -> None:
    bench = Bench(bytes_max=1_000)
    assert bench.entity.fits(1_000)
    assert not bench.entity.fits(1_001)
    bench.send(bytes(450))
    assert not bench.entity.fits(600)
    entry = arrived(Message(bytes(300)).encode())
    bench.entity.reserve_room(entry)
    assert not bench.entity.fits(250)
    bench.entity.release_room(entry)
    assert bench.entity.fits(250)


def test_senders_are_called_when_messages_have_left() -> None:
    bench = Bench()
    called: list[str] = []
    bench.entity.on_room = lambda: called.append("room")
    bench.entity.awaited = True
    bench.send()
    assert not called
    bench.receiver(credit=1, settled=True)
    assert called


@pytest.mark.parametrize(
    ("status", "sends", "receives"),
    [
        ("Active", True, True),
        ("Disabled", False, False),
        ("SendDisabled", False, True),
        ("ReceiveDisabled", True, False),
    ],
)
def test_a_status_closes_directions(status: Any, sends: bool, receives: bool) -> None:
    bench = Bench()
    bench.entity.reconfigure(Options(status=status))
    refused = bench.entity.check(arrived(Message("m").encode()))
    assert (refused is None) == sends
    if refused is not None:
        assert condition(refused.error) == ENTITY_DISABLED
    error = bench.entity.refuse_consumer()
    assert (error is None) == receives
    if error is not None:
        assert condition(error) == ENTITY_DISABLED


def test_clients_do_not_send_to_sub_queues() -> None:
    bench = Bench()
    refused = bench.dead.check(arrived(Message("m").encode()))
    assert refused is not None
    assert condition(refused.error) == NOT_ALLOWED


def test_a_partition_key_equals_the_session() -> None:
    bench = Bench()
    key = {Symbol("x-opt-partition-key"): "k"}
    for group_id, refuses in (("k", False), ("other", True), (None, False)):
        stored = arrived(Message("m", group_id=group_id, message_annotations=key).encode())
        assert (bench.entity.check(stored) is not None) == refuses


def test_an_idle_entity_is_reported_once_its_time_has_passed() -> None:
    bench = Bench(idle_s=300)
    idle: list[float] = []
    bench.entity.on_idle = lambda: idle.append(bench.time.now - NOW)
    receiver = bench.receiver()
    bench.advance(400)
    receiver.detach()
    bench.advance(200)
    bench.requests.peek(0, 1)
    bench.send(message_annotations=scheduled(900))
    bench.advance(299)
    assert not idle
    bench.advance(1)
    bench.advance(100)
    assert not idle, "a scheduled message is a use"
    bench.entity.purge()
    bench.advance(600)
    assert len(idle) == 1


def test_senders_of_an_entity_keep_it() -> None:
    bench = Bench(idle_s=300)
    idle: list[str] = []
    bench.entity.on_idle = lambda: idle.append("idle")
    bench.entity.is_used = lambda: True
    bench.advance(1_000)
    assert not idle
    bench.entity.is_used = lambda: False
    bench.advance(300)
    assert idle


def test_a_deleted_entity_keeps_nothing_and_answers_lock_lost() -> None:
    bench = Bench()
    for _ in range(3):
        bench.send()
    receiver = bench.receiver(credit=2)
    receiver.update(rejection("r", "d"), 0)
    bench.entity.delete()
    assert bench.memory.held == 0
    answer = receiver.update(ACCEPTED, 1)
    assert isinstance(answer, Rejected)
    assert condition(answer.error) == MESSAGE_LOCK_LOST
    assert bench.send() == 0


def test_sizes_count_every_state_and_the_sub_queues() -> None:
    bench = Bench()
    deferred(bench)
    bench.send(message_annotations=scheduled(10))
    bench.send()
    bench.receiver(credit=1).update(rejection("r", "d"))
    bench.send()
    sizes = bench.entity.sizes()
    assert (sizes.active, sizes.deferred, sizes.scheduled, sizes.dead_letters) == (1, 1, 1, 1)
    assert sizes.bytes == bench.memory.held > 0
    assert (bench.entity.available, bench.entity.acquired) == (1, 0)
    bench.receiver(credit=1)
    assert (bench.entity.available, bench.entity.acquired) == (0, 1)


def test_purging_leaves_the_locked_messages() -> None:
    bench = Bench()
    bench.send("locked")
    bench.receiver(credit=1)
    bench.send("a")
    bench.send("b", message_annotations=scheduled(10))
    assert bench.entity.purge() == 2
    assert bench.bodies() == ["locked"]


def test_options_are_those_of_the_declaration() -> None:
    queue = Options.of(
        Queue("q", lock_duration=30, max_delivery_count=3, requires_duplicate_detection=True)
    )
    assert (queue.lock_s, queue.deliveries_max, queue.duplicates_s) == (30, 3, 600)
    subscription = Options.of(Subscription("s", requires_session=True, auto_delete_on_idle=600))
    assert (subscription.sessions, subscription.idle_s, subscription.duplicates_s) == (True, 600, 0)
    topic = Options.of(Topic("t", default_message_time_to_live=5, enable_partitioning=True))
    assert (topic.ttl_s, topic.partitioned, topic.sessions) == (5, True, False)
    assert topic.bytes_max == 1024 * 1024 * 1024


def test_changed_options_count_from_now_on() -> None:
    bench = Bench(lock_s=30, deliveries_max=10)
    bench.send()
    receiver = bench.receiver(credit=1)
    bench.entity.reconfigure(Options(lock_s=5, deliveries_max=1))
    bench.advance(29)
    assert bench.entity.acquired == 1
    receiver.update(ABANDON)
    assert bench.entity.sizes().dead_letters == 1


def test_all_locks_end_when_a_test_asks_for_it() -> None:
    bench = Bench()
    for body in "ab":
        bench.send(body)
    receiver = bench.receiver(credit=2)
    assert bench.entity.expire_locks() == 2
    assert [each.delivery_count for each in bench.peeked()] == [1, 1]
    answer = receiver.update(ACCEPTED, 0)
    assert isinstance(answer, Rejected)
    assert condition(answer.error) == MESSAGE_LOCK_LOST
    assert bench.entity.expire_locks() == 0


def test_a_peek_is_bounded_in_number() -> None:
    bench = Bench()
    for _ in range(DEFAULT_BOUNDS.peeked_max + 1):
        bench.send()
    assert len(bench.requests.peek(0, DEFAULT_BOUNDS.peeked_max + 1)) == DEFAULT_BOUNDS.peeked_max
    assert bench.requests.peek(0, -1) == []


def test_what_is_scheduled_by_a_request_is_checked_as_a_send_is() -> None:
    bench = Bench(sessions=True, bytes_max=1_000)
    good = [arrived(Message("m", group_id="s").encode())]
    for bad, expected in (
        ([*good, arrived(Message("m").encode())], NOT_ALLOWED),
        ([arrived(Message(bytes(2_000), group_id="s").encode())], NO_ROOM),
    ):
        with pytest.raises(AmqpError) as caught:
            bench.requests.schedule(bad)
        assert condition(caught.value) == expected
    assert bench.bodies() == []
    assert bench.requests.schedule(good) == [1]


def test_the_sdk_reads_all_fields_of_a_message() -> None:
    sdk = pytest.importorskip("azure.servicebus")
    bench = Bench()
    bench.send(
        "m",
        message_id="1",
        group_id="s",
        subject="label",
        ttl_s=30,
        application_properties={"a": 1},
        message_annotations=scheduled(10),
    )
    read = sdk.ServiceBusReceivedMessage.from_bytes
    assert read(bench.requests.peek(0, 1)[0]).state == sdk.ServiceBusMessageState.SCHEDULED
    bench.advance(10)
    received = read(bench.receiver(credit=1).deliveries[0].payload)
    assert received.sequence_number == 2
    assert received.enqueued_time_utc.timestamp() == NOW + 10
    assert received.expires_at_utc.timestamp() == NOW + 40
    assert received.locked_until_utc.timestamp() == NOW + 70
    assert received.scheduled_enqueue_time_utc.timestamp() == NOW + 10
    assert received.state == sdk.ServiceBusMessageState.ACTIVE
    assert (received.message_id, received.session_id, received.subject) == ("1", "s", "label")
    assert received.delivery_count == 0
    bench.requests.dead_letter(list(bench.entity.shelf.tokens), "why", "because")
    letter = read(bench.requests_of(bench.dead).peek(0, 1)[0])
    assert (letter.dead_letter_reason, letter.dead_letter_error_description) == ("why", "because")
    assert letter.dead_letter_source == "q"
    assert letter.sequence_number == 2
