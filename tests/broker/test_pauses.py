"""Pauses between attempts of a message whose deliveries fail."""

from __future__ import annotations

import pytest
from brokers import Receiving, World

from amqp_rt.broker.nodes import DELIVERIES_MAX, Queue, Topic
from amqp_rt.broker.topology.topologies import Topologies
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Modified, Outcome
from amqp_rt.values import Symbol, Timestamp


def counts(world: World, address: str = "q") -> tuple[int, int, int]:
    stats = world.stats(address)
    return stats.available, stats.acquired, stats.delayed


def advance(world: World, seconds: float) -> None:
    world.time.now += seconds
    world.host.turns.tick()
    world.pump()


def fail(receiver: Receiving, index: int = -1, outcome: Outcome = MODIFIED_FAILED) -> None:
    """Let a delivery fail; the last one unless *index* says otherwise."""
    receiver.endpoint.deliveries[index].settle(outcome)
    receiver.world.pump()


@pytest.mark.req("B16")
def test_pauses_double_from_the_second_failure_up_to_a_maximum() -> None:
    world = World(Queue("q"), limits=Limits(retry_pause_s=1, retry_pause_max_s=5))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=50)
    fail(receiver)
    assert len(receiver.messages) == 2, "the first retry is immediate"
    for number, pause_s in enumerate((1, 2, 4, 5, 5), start=2):
        fail(receiver)
        assert counts(world) == (0, 0, 1)
        advance(world, pause_s - 0.01)
        assert len(receiver.messages) == number
        advance(world, 0.01)
        assert len(receiver.messages) == number + 1
    assert receiver.messages[-1].delivery_count == 6
    receiver.settle(ACCEPTED, -1)
    assert counts(world) == (0, 0, 0)
    assert world.host.memory.held == 0


@pytest.mark.parametrize("outcome", [RELEASED, Modified()])
def test_what_is_released_has_not_failed(outcome: Outcome) -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=20)
    for number in range(1, 10):
        assert len(receiver.messages) == number
        fail(receiver, outcome=outcome)


def test_what_is_released_after_failures_is_not_paused() -> None:
    world = World(Queue("q"), limits=Limits(retry_pause_s=10))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=20)
    fail(receiver)
    fail(receiver)
    advance(world, 10)
    assert len(receiver.messages) == 3
    fail(receiver, outcome=RELEASED)
    assert len(receiver.messages) == 4
    fail(receiver, outcome=Modified())
    assert len(receiver.messages) == 5


def test_without_a_pause_a_failed_message_is_retried_at_once() -> None:
    world = World(Queue("q"), limits=Limits(retry_pause_s=0))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=20)
    for number in range(1, 10):
        assert len(receiver.messages) == number
        fail(receiver)


def test_a_delivery_count_that_a_sender_claims_makes_no_pause_and_has_an_end() -> None:
    world = World(Queue("q"), limits=Limits(retry_pause_s=1, retry_pause_max_s=60))
    world.client().sender("q").send("m", delivery_count=2**32 - 2)
    receiver = world.client().receiver("q", credit=20)
    fail(receiver)
    fail(receiver)
    advance(world, 1)
    assert len(receiver.messages) == 3
    assert receiver.messages[-1].delivery_count == 2**32 - 1


def test_others_pass_a_message_in_its_pause_and_it_returns_to_its_place() -> None:
    world = World(Queue("q"), limits=Limits(retry_pause_s=1))
    sender = world.client().sender("q")
    receiver = world.client().receiver("q", credit=3)
    sender.send("poison")
    fail(receiver)
    fail(receiver)
    sender.send("a", "b", "c")
    assert receiver.bodies == ["poison", "poison", "a"]
    advance(world, 1)
    receiver.grant(2)
    assert receiver.bodies == ["poison", "poison", "a", "poison", "b"]


@pytest.mark.req("B23")
def test_the_single_active_consumer_waits_so_that_order_is_kept() -> None:
    world = World(Queue("q", single_active=True), limits=Limits(retry_pause_s=1))
    sender = world.client().sender("q")
    active = world.client().receiver("q", credit=10)
    sender.send("poison")
    fail(active)
    fail(active)
    sender.send("a", "b")
    assert active.bodies == ["poison", "poison"]
    # The consumer that takes over, and one that grants more credit, wait too.
    standby = world.client().receiver("q", credit=10)
    active.detach()
    assert standby.bodies == []
    standby.grant(10)
    assert standby.bodies == []
    advance(world, 1)
    assert standby.bodies == ["poison", "a", "b"]


@pytest.mark.req("B23")
def test_the_group_of_a_failed_message_waits_and_other_groups_do_not() -> None:
    world = World(Queue("q", groups=64), limits=Limits(retry_pause_s=1))
    sender = world.client().sender("q")
    receiver = world.client().receiver("q", credit=10)
    sender.send("poison", "second", group_id="g")
    fail(receiver, 0)
    fail(receiver, 1)
    assert receiver.bodies == ["poison", "second", "poison", "second"]
    fail(receiver, 2)
    world.time.now += 0.5
    fail(receiver, 3)
    sender.send("third", group_id="g")
    sender.send("other", group_id="h")
    sender.send("none")
    assert receiver.bodies[4:] == ["other", "none"]
    advance(world, 0.5)
    assert receiver.bodies[6:] == [], "the second message of the group is still in its pause"
    advance(world, 0.5)
    assert receiver.bodies[6:] == ["poison", "second", "third"]


def test_a_message_in_its_pause_expires_on_time() -> None:
    world = World(
        Queue("q", dead_letter="dead"), limits=Limits(retry_pause_s=60, retry_pause_max_s=60)
    )
    world.client().sender("q").send("m", ttl_s=5)
    receiver = world.client().receiver("q", credit=10)
    fail(receiver)
    fail(receiver)
    advance(world, 5)
    assert len(receiver.messages) == 2
    assert counts(world, "dead") == (1, 0, 0)


def test_operators_see_and_move_messages_in_their_pause() -> None:
    world = World(Queue("q"), Queue("r"))
    world.client().sender("q").send("a", "poison", "b")
    receiver = world.client().receiver("q", credit=3)
    receiver.settle(MODIFIED_FAILED, 1)
    receiver.grant(1)
    receiver.settle(MODIFIED_FAILED, 3)
    receiver.detach(closed=True)
    assert counts(world) == (2, 0, 1)
    seen = [Message.decode(each).body for each in world.peek("q", 10)]
    assert seen == ["a", "poison", "b"]
    assert [Message.decode(each).body for each in world.peek("q", 2)] == ["a", "poison"]
    assert world.move("q", "r", 2) == 2
    assert (counts(world), counts(world, "r")) == ((1, 0, 0), (2, 0, 0))
    advance(world, 60)
    assert (counts(world), counts(world, "r")) == ((1, 0, 0), (2, 0, 0))
    assert world.client().receiver("r", credit=5).bodies == ["a", "poison"]
    assert world.client().receiver("q", credit=5).bodies == ["b"]
    assert world.host.memory.held > 0


def test_moving_a_message_in_its_pause_lets_the_single_active_consumer_go_on() -> None:
    world = World(Queue("q", single_active=True), Queue("r"))
    world.client().sender("q").send("poison", "next")
    receiver = world.client().receiver("q", credit=1)
    fail(receiver)
    receiver.grant(1)
    fail(receiver)
    receiver.grant(1)
    assert receiver.bodies == ["poison", "poison"]
    assert world.move("q", "r", 1) == 1
    receiver.grant(2)
    assert receiver.bodies == ["poison", "poison", "next"]


def test_purging_removes_messages_in_their_pause() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("poison")
    receiver = world.client().receiver("q", credit=2)
    fail(receiver)
    fail(receiver)
    assert counts(world) == (0, 0, 1)
    assert world.purge("q") == 1
    assert counts(world) == (0, 0, 0)
    assert world.host.memory.held == 0
    advance(world, 60)
    receiver.grant(5)
    assert len(receiver.messages) == 2


def test_a_last_value_that_is_replaced_during_its_pause_is_gone() -> None:
    world = World(Queue("q", last_value_key="properties.subject"))
    sender = world.client().sender("q")
    receiver = world.client().receiver("q", credit=2)
    sender.send("old", subject="k")
    fail(receiver)
    fail(receiver)
    sender.send("new", subject="k")
    advance(world, 60)
    receiver.grant(5)
    assert receiver.bodies == ["old", "old", "new"]
    # Messages that have not been replaced return more than once.
    for number in range(4, 7):
        fail(receiver)
        advance(world, 60)
        assert len(receiver.messages) == number


def test_subscribers_of_a_topic_pause_too() -> None:
    world = World(Topic("t"), limits=Limits(retry_pause_s=1))
    receiver = world.client().receiver("t", credit=10)
    world.client().sender("t").send("m")
    fail(receiver)
    fail(receiver)
    assert len(receiver.messages) == 2
    advance(world, 1)
    assert len(receiver.messages) == 3


@pytest.mark.req("B16")
def test_ten_failures_lead_to_the_dead_letter_address_if_there_is_one() -> None:
    world = World(Queue("q", dead_letter="dead"), Queue("none"), Queue("any", max_deliveries=0))
    assert DELIVERIES_MAX == 10
    sender = world.client().sender("q")
    sender.send("m")
    receiver = world.client().receiver("q", credit=50)
    for _ in range(DELIVERIES_MAX):
        assert counts(world) == (0, 1, 0)
        fail(receiver)
        advance(world, 60)
    assert counts(world) == (0, 0, 0)
    assert counts(world, "dead") == (1, 0, 0)


@pytest.mark.parametrize("declared", [Queue("q"), Queue("q", max_deliveries=0, dead_letter="dead")])
def test_no_number_of_failures_drops_a_message_otherwise(declared: Queue) -> None:
    world = World(declared)
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=50)
    for _ in range(3 * DELIVERIES_MAX):
        fail(receiver)
        advance(world, 60)
    assert counts(world) == (0, 1, 0)


@pytest.mark.req("B16")
def test_a_peer_cannot_ask_for_retries_without_a_pause() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m")
    asked: dict[object, object] = {Symbol("x-opt-requeues"): True}
    receiver = world.client().receiver("q", credit=50, properties=asked)
    fail(receiver)
    fail(receiver)
    assert counts(world) == (0, 0, 1)


def test_a_peer_cannot_hide_its_consumer() -> None:
    world = World(Queue("q"))
    topologies = Topologies(world.host, lambda *_: None)
    asked: dict[object, object] = {Symbol("x-opt-idle"): True}
    world.client().receiver("q", credit=1, properties=asked)
    assert topologies.space("").consumers("q") == 1


def later(seconds: float, **others: object) -> Modified:
    """Outcome of a failed message whose consumer asks for a pause."""
    changes = {Symbol("x-opt-delivery-delay"): int(seconds * 1000)}
    return Modified(delivery_failed=True, message_annotations={**changes, **others})


@pytest.mark.req("B16")
def test_a_consumer_asks_for_the_pause_of_a_failed_message() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    sender.send("m", "n")
    receiver = world.client().receiver("q", credit=1)
    fail(receiver, outcome=later(3600))
    receiver.grant(5)
    assert receiver.bodies == ["m", "n"], "others pass it"
    assert counts(world) == (0, 1, 1)
    advance(world, 3599.9)
    assert len(receiver.messages) == 2
    advance(world, 0.1)
    assert receiver.bodies == ["m", "n", "m"]
    again = receiver.messages[-1]
    assert again.delivery_count == 1
    assert not again.message_annotations, "the request is not part of the message"
    receiver.settle(ACCEPTED, 1, 2)
    assert counts(world) == (0, 0, 0)
    assert world.host.memory.held == 0


def test_a_pause_may_end_at_a_time_and_other_annotations_stay() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=2)
    at = Timestamp(int((world.time.now + 60) * 1000))
    why = {Symbol("x-opt-delivery-time"): at, Symbol("x-opt-why"): "closed"}
    fail(receiver, outcome=Modified(delivery_failed=True, message_annotations=why))
    advance(world, 59)
    assert len(receiver.messages) == 1
    advance(world, 1)
    assert receiver.messages[-1].message_annotations == {"x-opt-why": "closed"}


@pytest.mark.parametrize("value", [True, "soon", -5, 0])
def test_a_pause_that_is_none_leaves_that_of_the_queue(value: object) -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=2)
    changes = {Symbol("x-opt-delivery-delay"): value}
    fail(receiver, outcome=Modified(delivery_failed=True, message_annotations=changes))
    assert len(receiver.messages) == 2, "the first retry is immediate"
    assert not receiver.messages[-1].message_annotations


def test_what_has_not_failed_is_not_paused() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=2)
    changes = {Symbol("x-opt-delivery-delay"): 60_000}
    fail(receiver, outcome=Modified(message_annotations=changes))
    assert len(receiver.messages) == 2


def test_a_message_expires_in_a_pause_that_would_be_longer() -> None:
    world = World(Queue("q", dead_letter="dead"))
    world.client().sender("q").send("m", ttl_s=5)
    receiver = world.client().receiver("q", credit=10)
    fail(receiver, outcome=later(3600))
    advance(world, 5)
    assert len(receiver.messages) == 1
    assert counts(world, "dead") == (1, 0, 0)


@pytest.mark.req("B23")
def test_a_group_waits_for_the_pause_that_its_consumer_asked_for() -> None:
    world = World(Queue("q", groups=64))
    sender = world.client().sender("q")
    receiver = world.client().receiver("q", credit=10)
    sender.send("poison", group_id="g")
    fail(receiver, outcome=later(60))
    sender.send("second", group_id="g")
    sender.send("other", group_id="h")
    assert receiver.bodies == ["poison", "other"]
    advance(world, 60)
    assert receiver.bodies == ["poison", "other", "poison", "second"]


def test_operators_move_a_message_out_of_the_pause_that_its_consumer_asked_for() -> None:
    world = World(Queue("q"), Queue("r"))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=2)
    fail(receiver, outcome=later(3600))
    assert world.move("q", "r", 1) == 1
    assert world.client().receiver("r", credit=1).bodies == ["m"]
    advance(world, 3600)
    assert len(receiver.messages) == 1
    assert counts(world) == (0, 0, 0)


def test_a_last_message_that_is_dead_lettered_is_not_delayed_there() -> None:
    world = World(Queue("q", dead_letter="dead", max_deliveries=1))
    world.client().sender("q").send("m")
    fail(world.client().receiver("q", credit=1), outcome=later(3600))
    assert counts(world, "dead") == (1, 0, 0)


@pytest.mark.parametrize(
    ("growth", "pauses"), [("exponential", (2, 4, 8, 10, 10)), ("linear", (2, 4, 6, 8, 10))]
)
def test_a_queue_declares_its_pauses(growth: str, pauses: tuple[int, ...]) -> None:
    declared = {"redelivery_delay_s": 2, "redelivery_delay_max_s": 10, "redelivery_growth": growth}
    world = World(Queue("q", **declared))
    world.client().sender("q").send("m")
    receiver = world.client().receiver("q", credit=50)
    for number, pause_s in enumerate(pauses, start=1):
        fail(receiver)
        advance(world, pause_s - 0.01)
        assert len(receiver.messages) == number
        advance(world, 0.01)
        assert len(receiver.messages) == number + 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"redelivery_growth": "cubic"}, "exponential or linear"),
        ({"redelivery_delay_s": -1}, "redelivery_delay_s is at least 0"),
        (
            {"redelivery_delay_s": 5, "redelivery_delay_max_s": 4},
            "redelivery_delay_max_s is at least 5",
        ),
    ],
)
def test_pauses_that_cannot_be_are_refused(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Queue("q", **wrong)
