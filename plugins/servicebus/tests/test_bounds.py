"""Bounds of a namespace: what is at a bound is taken, and what is beyond it gets the answer of the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from amqp_rt_servicebus.administration import QuotaExceeded
from amqp_rt_servicebus.bounds import (
    DEFAULT_BOUNDS,
    SERVICE_BOUNDS,
    Bounds,
    is_bound,
    with_bound,
)
from amqp_rt_servicebus.conditions import ARGUMENT_OUT_OF_RANGE, MESSAGE_NOT_FOUND
from amqp_rt_servicebus.declarations import Correlation, Queue, Rule, Sql, Subscription, Topic
from amqp_rt_servicebus.entity import Entity
from amqp_rt_servicebus.namespace import Namespace
from amqp_rt_servicebus.requests import Requests
from amqp_rt_servicebus.testing import ServiceBus
from asking import ask
from entities import Whole
from msgspec.structs import fields

from amqp_rt.errors import AmqpError

ANSWERS: dict[str, tuple[type[Exception], str]] = {
    "entities_max": (QuotaExceeded, "has 3 entities already"),
    "subscriptions_max": (QuotaExceeded, "has 3 subscriptions already"),
    "rules_max": (QuotaExceeded, "more than 3 rules"),
    "sql_filters_max": (QuotaExceeded, "more than 3 SQL filters"),
    "correlation_filters_max": (QuotaExceeded, "more than 3 correlation filters"),
    "sql_text_max": (ValueError, "at most 3 are allowed"),
    "sql_statements_max": (ValueError, "more than 3 statements"),
    "session_waiting_max": (AmqpError, "3 receivers wait"),
    "session_state_max": (AmqpError, "at most 3"),
}


def entity(bus: ServiceBus, name: str) -> Entity:
    return bus.namespace.existing((name,)).entity


def declare_entities(bus: ServiceBus, count: int) -> None:
    # There are two already.
    for number in range(count - 2):
        bus.declare(Queue(f"q{number}"))


def declare_subscriptions(bus: ServiceBus, count: int) -> None:
    for number in range(count - 1):
        bus.declare_subscription("t", Subscription(f"s{number}"))


def declare_rules(filter_of: Callable[[int], Any], given: int = 0) -> Callable[..., None]:
    def declare(bus: ServiceBus, count: int) -> None:
        for number in range(count - given):
            bus.declare_rule("t", "s", Rule(f"r{number}", filter_of(number)))

    return declare


def declare_text(bus: ServiceBus, count: int) -> None:
    bus.declare_rule("t", "s", Rule("r", Sql("a" + " " * (count - 3) + "=1")))


def declare_statements(bus: ServiceBus, count: int) -> None:
    bus.declare_rule("t", "s", Rule("r", action="SET a=1;" * count))


def wait_for_sessions(bus: ServiceBus, count: int) -> None:
    def wait() -> None:
        for _ in range(count):
            entity(bus, "q").wait_for_session(lambda subscription: True, settled=False)

    bus.call(wait)


def set_state(bus: ServiceBus, count: int) -> None:
    def change() -> None:
        found = entity(bus, "q")
        found.consume_session("a", settled=False)
        Requests(found).set_session_state("a", bytes(count))

    bus.call(change)


DOINGS: dict[str, Callable[[ServiceBus, int], None]] = {
    "entities_max": declare_entities,
    "subscriptions_max": declare_subscriptions,
    "rules_max": declare_rules(lambda number: Sql("1=1"), 1),
    "sql_filters_max": declare_rules(lambda number: Sql(f"n={number}")),
    "correlation_filters_max": declare_rules(lambda number: Correlation(label=f"{number}")),
    "sql_text_max": declare_text,
    "sql_statements_max": declare_statements,
    "session_waiting_max": wait_for_sessions,
    "session_state_max": set_state,
}


@pytest.mark.parametrize("name", DOINGS)
def test_a_bound_is_kept(name: str) -> None:
    declared = Queue("q", requires_session=True), Topic("t", [Subscription("s")])
    error, text = ANSWERS[name]
    changed: Any = {name: 3}
    with ServiceBus(*declared, bounds=Bounds(**changed)) as bus:
        DOINGS[name](bus, 3)
    with (
        ServiceBus(*declared, bounds=Bounds(**changed)) as bus,
        pytest.raises(error, match=text),
    ):
        DOINGS[name](bus, 4)


def test_the_messages_that_a_request_names_are_bounded() -> None:
    with ServiceBus(Queue("q"), bounds=Bounds(named_max=3)) as bus:
        answers = [
            ask(bus, "q", "cancel-scheduled-message", {"sequence-numbers": [7] * count})[:2]
            for count in (3, 4)
        ]
    # There is no such message; too many are refused before that is found.
    assert answers == [(404, MESSAGE_NOT_FOUND), (400, ARGUMENT_OUT_OF_RANGE)]


def test_an_answer_to_a_peek_is_bounded() -> None:
    with ServiceBus(Queue("q"), bounds=Bounds(peeked_max=3)) as bus:
        for _ in range(4):
            bus.queue("q").send()
        assert len(bus.call(lambda: Whole(entity(bus, "q")).peek(0, 100))) == 3


@pytest.mark.parametrize("name", ["steps_max", "rule_steps_max"])
def test_steps_of_rules_are_bounded(name: str) -> None:
    topic = Topic("t", [Subscription("s", [Rule("r", Sql("a IS NULL"))])])
    # One for the rule, one for the filter, one for each of its two parts.
    for most, active in ((4, 1), (2, 0)):
        changed: Any = {name: most}
        with ServiceBus(topic, bounds=Bounds(**changed)) as bus:
            bus.topic("t").send()
            assert bus.subscription("t", "s").stats.active == active


def test_copies_are_bounded() -> None:
    topic = Topic("t", [Subscription(f"s{number}", forward_to="t") for number in range(3)])
    with ServiceBus(topic, bounds=Bounds(copies_max=10)) as bus:
        bus.topic("t").send()
        parts = [bus.subscription("t", f"s{number}").stats for number in range(3)]
    assert 3 < sum(each.dead_letters + each.transfer_dead_letters for each in parts) <= 12


def test_every_bound_has_a_test() -> None:
    tested = {*DOINGS, "named_max", "peeked_max", "steps_max", "rule_steps_max", "copies_max"}
    assert tested == {field.name for field in fields(Bounds)}


def test_bounds_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="rules_max has to be at least 1, got 0"):
        Bounds(rules_max=0)
    with pytest.raises(ValueError, match="rules_max is a whole number, not 'many'"):
        with_bound(DEFAULT_BOUNDS, "rules_max", "many")
    assert with_bound(DEFAULT_BOUNDS, "rules_max", "1_000").rules_max == 1_000
    assert is_bound("copies_max")
    assert not is_bound("message_size_max")


def test_a_realistic_namespace_has_the_bounds_of_the_service() -> None:
    assert Namespace().bounds is DEFAULT_BOUNDS
    assert Namespace(realistic=True).bounds is SERVICE_BOUNDS
    assert Namespace(realistic=True, bounds=Bounds(rules_max=1)).bounds.rules_max == 1
    assert (SERVICE_BOUNDS.sql_text_max, SERVICE_BOUNDS.subscriptions_max) == (1_024, 2_000)
