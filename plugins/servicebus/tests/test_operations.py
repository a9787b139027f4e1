"""Operations at management nodes: wire types, statuses, and requests that are malformed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from amqp_rt_servicebus.declarations import (
    Correlation,
    Everything,
    Nothing,
    Queue,
    Rule,
    Sql,
    Subscription,
    Topic,
)
from amqp_rt_servicebus.operations import OPERATIONS
from amqp_rt_servicebus.rule_values import (
    CORRELATION_FILTER,
    EMPTY_ACTION,
    FALSE_FILTER,
    RULE,
    SQL_ACTION,
    SQL_FILTER,
)
from amqp_rt_servicebus.testing import ServiceBus
from asking import ask

from amqp_rt import Message
from amqp_rt.values import Array, Described, Int, Symbol, Timestamp, UInt

pytestmark = pytest.mark.req("Z13")

FAR_MS = 253_402_300_800_000


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    rules = [
        Rule("none", Nothing()),
        Rule("sql", Sql("a = 1"), action="SET b = 2"),
        Rule("fields", Correlation(label="x", properties={"p": 1})),
    ]
    with ServiceBus(
        Queue("q"),
        Queue("s", requires_session=True),
        Topic("t", [Subscription("s", rules), Subscription("empty", [])]),
    ) as bus:
        yield bus


@pytest.mark.parametrize("entity", ["q", "Q", "q/$DeadLetterQueue", "t/Subscriptions/S"])
def test_an_operation_finds_its_entity(bus: ServiceBus, entity: str) -> None:
    assert ask(bus, entity, "peek-message", {})[0] == 204


@pytest.mark.parametrize("operation", sorted(each.partition(":")[2] for each in OPERATIONS))
def test_an_operation_on_nothing_is_answered_with_not_found(
    bus: ServiceBus, operation: str
) -> None:
    assert ask(bus, "nowhere", operation, {})[:2] == (404, "amqp:not-found")


def test_peeked_messages_are_encoded(bus: ServiceBus) -> None:
    bus.queue("q").send("a")
    bus.queue("q").send("b")
    status, _, body = ask(
        bus, "q", "peek-message", {"from-sequence-number": 2, "message-count": Int(5)}
    )
    (found,) = body["messages"]
    assert (status, Message.decode(found["message"]).body) == (200, b"b")


def test_bodies_are_left_out_if_asked(bus: ServiceBus) -> None:
    bus.queue("q").send(b"large", application_properties={"a": 1})
    body = ask(bus, "q", "peek-message", {"omit-message-body": True})[2]
    (found,) = body["messages"]
    assert b"large" not in found["message"]
    peeked = Message.decode(found["message"] + b"\x00\x53\x77\x40")
    assert peeked.application_properties == {"a": 1}


def test_scheduled_messages_get_numbers_of_64_bits(bus: ServiceBus) -> None:
    at = Timestamp(4_000_000_000_000)
    message = Message("a", message_annotations={Symbol("x-opt-scheduled-enqueue-time"): at})
    entry = {"message-id": "1", "message": bytes(message.encode())}
    status, _, body = ask(bus, "q", "schedule-message", {"messages": [entry, entry]})
    assert (status, body["sequence-numbers"]) == (200, Array([1, 2], of=int))
    numbers = {"sequence-numbers": body["sequence-numbers"]}
    assert ask(bus, "q", "cancel-scheduled-message", numbers)[0] == 200
    assert ask(bus, "q", "cancel-scheduled-message", numbers)[:2] == (
        404,
        "com.microsoft:message-not-found",
    )


def test_a_message_that_is_refused_is_not_scheduled(bus: ServiceBus) -> None:
    entry = {"message": bytes(Message("a").encode())}
    status, condition, _ = ask(bus, "s", "schedule-message", {"messages": [entry]})
    assert (status, condition) == (400, "amqp:not-allowed")
    status, condition, _ = ask(bus, "t/subscriptions/s", "schedule-message", {"messages": [entry]})
    assert (status, condition) == (400, "amqp:not-allowed")
    assert bus.queue("s").stats.active == 0


@pytest.mark.parametrize("operation", ["renew-lock", "update-disposition"])
def test_a_token_that_is_not_known_is_lost(bus: ServiceBus, operation: str) -> None:
    body = {"lock-tokens": Array([uuid4()], of=UUID), "disposition-status": "completed"}
    assert ask(bus, "q", operation, body)[:2] == (410, "com.microsoft:message-lock-lost")


@pytest.mark.parametrize("mode", [UInt(0), UInt(1)])
def test_a_number_that_is_not_deferred_is_not_found(bus: ServiceBus, mode: UInt) -> None:
    bus.queue("q").send("a")
    body = {"sequence-numbers": Array([1], of=int), "receiver-settle-mode": mode}
    assert ask(bus, "q", "receive-by-sequence-number", body)[:2] == (
        404,
        "com.microsoft:message-not-found",
    )


@pytest.mark.parametrize(
    "operation", ["renew-session-lock", "get-session-state", "set-session-state"]
)
def test_a_session_that_is_not_locked_is_lost(bus: ServiceBus, operation: str) -> None:
    lost = (410, "com.microsoft:session-lock-lost")
    assert ask(bus, "s", operation, {"session-id": "x"})[:2] == lost
    assert ask(bus, "s", operation, {"session-id": "x"}, link="gone")[:2] == lost
    assert ask(bus, "q", operation, {"session-id": "x"})[:2] == (400, "amqp:not-allowed")


def test_sessions_are_listed_in_pages(bus: ServiceBus) -> None:
    asked = {"last-updated-time": Timestamp(FAR_MS), "skip": Int(0), "top": Int(2)}
    assert ask(bus, "s", "get-message-sessions", asked)[0] == 204
    for name in "abc":
        bus.queue("s").send("x", group_id=name)
    status, _, body = ask(bus, "s", "get-message-sessions", asked)
    assert (status, body["sessions-ids"], body["skip"]) == (200, Array(["a", "b"]), 2)
    asked["skip"] = body["skip"]
    assert ask(bus, "s", "get-message-sessions", asked)[2]["sessions-ids"] == Array(["c"])
    asked["last-updated-time"] = Timestamp(0)
    assert ask(bus, "s", "get-message-sessions", asked)[0] == 204


def test_messages_are_deleted_up_to_a_time(bus: ServiceBus) -> None:
    for _ in range(3):
        bus.queue("q").send("a")
    body = {"message-count": Int(2), "enqueued-time-utc": Timestamp(FAR_MS)}
    assert ask(bus, "q", "batch-delete-messages", body)[2] == {"message-count": 2}
    assert ask(bus, "q", "batch-delete-messages", body)[2] == {"message-count": 1}
    assert ask(bus, "q", "batch-delete-messages", body)[0] == 204
    body["message-count"] = Int(4001)
    assert ask(bus, "q", "batch-delete-messages", body)[:2] == (
        400,
        "com.microsoft:argument-out-of-range",
    )


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("peek-message", None),
        ("peek-message", {"message-count": "many"}),
        ("peek-message", {"from-sequence-number": True}),
        ("peek-message", {"session-id": 1}),
        ("renew-lock", {}),
        ("renew-lock", {"lock-tokens": "text"}),
        ("renew-lock", {"lock-tokens": [1]}),
        ("update-disposition", {"lock-tokens": []}),
        ("update-disposition", {"lock-tokens": [], "disposition-status": "lost"}),
        (
            "update-disposition",
            {"lock-tokens": [], "disposition-status": "abandoned", "properties-to-modify": 1},
        ),
        ("receive-by-sequence-number", {"sequence-numbers": ["1"]}),
        ("schedule-message", {"messages": [1]}),
        ("schedule-message", {"messages": [{}]}),
        ("cancel-scheduled-message", {}),
        ("batch-delete-messages", {}),
        ("renew-session-lock", {}),
        ("set-session-state", {"session-id": "x", "session-state": "text"}),
        ("get-message-sessions", {"last-updated-time": "now"}),
    ],
)
def test_an_argument_of_another_type_is_refused(
    bus: ServiceBus, operation: str, body: object
) -> None:
    assert ask(bus, "q", operation, body)[:2] == (400, "com.microsoft:argument-error")


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_a_number_out_of_its_range_is_refused(bus: ServiceBus, number: int) -> None:
    if number > 0:
        body: dict[str, Any] = {"message-count": number - 1}
    else:
        body = {"from-sequence-number": number}
    assert ask(bus, "q", "peek-message", body)[1] == "com.microsoft:argument-out-of-range"


# --- Rules -------------------------------------------------------------------------------------


def test_rules_are_enumerated_as_described_lists(bus: ServiceBus) -> None:
    status, _, body = ask(bus, "t/subscriptions/s", "enumerate-rules", {"top": Int(9)})
    assert status == 200
    none, sql, fields = [each["rule-description"] for each in body["rules"]]
    assert none.descriptor == sql.descriptor == fields.descriptor == RULE
    assert none.value[:3] == [Described(FALSE_FILTER, []), Described(EMPTY_ACTION, []), "none"]
    assert type(none.value[3]) is Timestamp
    assert sql.value[:2] == [
        Described(SQL_FILTER, ["a = 1", 20]),
        Described(SQL_ACTION, ["SET b = 2", 20]),
    ]
    assert fields.value[0].descriptor == CORRELATION_FILTER
    assert fields.value[0].value == [None, None, None, None, "x", None, None, None, {"p": 1}]
    page = ask(bus, "t/subscriptions/s", "enumerate-rules", {"top": Int(1), "skip": Int(1)})[2]
    assert [each["rule-description"].value[2] for each in page["rules"]] == ["sql"]
    assert ask(bus, "t/subscriptions/empty", "enumerate-rules", {"top": Int(1)})[0] == 204


@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ({}, Everything()),
        ({"sql-filter": {"expression": "a = 1"}}, Sql("a = 1")),
        ({"true-filter": {}}, Everything()),
        ({"false-filter": {}}, Nothing()),
        (
            {"correlation-filter": {"label": "x", "properties": {"a": 1}}},
            Correlation(label="x", properties={"a": 1}),
        ),
    ],
)
def test_a_rule_is_added_and_removed(
    bus: ServiceBus, description: dict[str, Any], wanted: object
) -> None:
    place = "t/subscriptions/empty"
    action = {"sql-rule-action": {"expression": "SET b = 2"}}
    body = {"rule-name": "r", "rule-description": {**description, **action}}
    assert ask(bus, place, "add-rule", body)[0] == 200
    declared = bus.call(lambda: bus.namespace.get(("t", "empty", "R")).declared)
    assert declared == Rule("r", wanted, "SET b = 2")  # type: ignore[arg-type]
    assert ask(bus, place, "add-rule", body)[:2] == (
        409,
        "com.microsoft:entity-already-exists",
    )
    assert ask(bus, place, "remove-rule", {"rule-name": "R"})[0] == 200
    assert ask(bus, place, "remove-rule", {"rule-name": "R"})[:2] == (404, "amqp:not-found")


@pytest.mark.parametrize(
    "description",
    [
        None,
        {"sql-filter": {"expression": "a ="}},
        {"sql-filter": {}},
        {"sql-filter": 1},
        {"correlation-filter": {}},
        {"correlation-filter": {"label": 1}},
        {"correlation-filter": {"properties": {1: 1}}},
        {"sql-filter": {"expression": "1=1"}, "correlation-filter": {"label": "x"}},
        {"sql-rule-action": {"expression": "SET"}},
    ],
)
def test_a_malformed_rule_is_refused(bus: ServiceBus, description: object) -> None:
    body = {"rule-name": "r", "rule-description": description}
    assert ask(bus, "t/subscriptions/empty", "add-rule", body)[:2] == (
        400,
        "com.microsoft:argument-error",
    )
    assert ask(bus, "t/subscriptions/empty", "enumerate-rules", {"top": Int(1)})[0] == 204


@pytest.mark.parametrize("entity", ["q", "t", "t/subscriptions/s/$deadletterqueue"])
def test_only_subscriptions_have_rules(bus: ServiceBus, entity: str) -> None:
    assert ask(bus, entity, "enumerate-rules", {"top": Int(1)})[:2] == (400, "amqp:not-allowed")


def test_a_request_schedules_thousands_of_messages(bus: ServiceBus) -> None:
    due = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(4_000_000_000_000)}
    messages = [
        {"message-id": str(n), "message": bytes(Message(b"", message_annotations=due).encode())}
        for n in range(2_000)
    ]
    status, _, body = ask(bus, "q", "schedule-message", {"messages": messages})
    assert status == 200
    assert list(body["sequence-numbers"]) == list(range(1, 2_001))
    status, _, _ = ask(bus, "q", "cancel-scheduled-message", body)
    assert status == 200
    assert bus.queue("q").stats.scheduled == 0
