"""Where a reader of a log begins, as Event Hubs and RabbitMQ say it."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.broker.filtering.filters import log_position
from amqp_rt.broker.filtering.positions import Position, event_hubs_position, stream_position
from amqp_rt.broker.filtering.selectors import InvalidFilter
from amqp_rt.values import Described, Int, Symbol, Timestamp, ULong

DAY_MS = 86_400_000


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    ("selector", "position"),
    [
        ("amqp.annotation.x-opt-offset > '-1'", Position("first")),
        ("amqp.annotation.x-opt-offset >= '-1'", Position("first")),
        ("amqp.annotation.x-opt-offset > '@latest'", Position("next")),
        ("amqp.annotation.x-opt-offset >= '@latest'", Position("last")),
        ("amqp.annotation.x-opt-offset > '4294967296'", Position("offset", 1 << 32, False)),
        ("amqp.annotation.x-opt-offset >= '0'", Position("offset", 0)),
        (" amqp.annotation.x-opt-offset>='5' ", Position("offset", 5)),
        (
            "amqp.annotation.x-opt-sequence-number > '42'",
            Position("sequence-number", 42, inclusive=False),
        ),
        ("amqp.annotation.x-opt-sequence-number >= 42", Position("sequence-number", 42)),
        (
            "amqp.annotation.x-opt-sequence-number > -1",
            Position("sequence-number", -1, inclusive=False),
        ),
        (
            "amqp.annotation.x-opt-enqueued-time > '1700000000000'",
            Position("timestamp", 1_700_000_000_000, inclusive=False),
        ),
        (
            "amqp.annotation.x-opt-enqueuedtimeutc >= 1700000000000",
            Position("timestamp", 1_700_000_000_000),
        ),
        ("amqp.annotation.x-opt-offset > '1' AND color = 'blue'", None),
        ("amqp.annotation.x-opt-offset < '1'", None),
        ("amqp.annotation.x-opt-partition-key > '1'", None),
        ("color = 'blue'", None),
        ("", None),
    ],
)
def test_event_hubs(selector: str, position: Position | None) -> None:
    assert event_hubs_position(selector) == position


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    "value", ["''", "'abc'", "'-2'", "'1.5'", "'99999999999999999999'", "'@LATEST'", "'١'"]
)
def test_event_hubs_compare_with_numbers(value: str) -> None:
    with pytest.raises(
        InvalidFilter, match="at character 30: a number expected as offset"
    ) as found:
        event_hubs_position(f"amqp.annotation.x-opt-offset > {value}")
    assert found.value.position == 30


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    ("value", "position"),
    [
        ("first", Position("first")),
        (Symbol("last"), Position("last")),
        ("next", Position("next")),
        (ULong(0), Position("offset", 0)),
        (ULong(1 << 63), Position("offset", 1 << 63)),
        (Int(7), Position("offset", 7)),
        (Timestamp(5), Position("timestamp", 5)),
        ("1Y", Position("age", 365 * DAY_MS)),
        ("2M", Position("age", 60 * DAY_MS)),
        ("7D", Position("age", 7 * DAY_MS)),
        ("1h", Position("age", 3_600_000)),
        ("5m", Position("age", 300_000)),
        ("30s", Position("age", 30_000)),
    ],
)
def test_streams(value: object, position: Position) -> None:
    assert stream_position(value) == position


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    "value",
    ["", "First", "1", "1x", "1h ", "9999999999s", -1, True, 1.5, None, b"first", ["first"]],
)
def test_what_is_no_place_in_a_stream(value: object) -> None:
    with pytest.raises(InvalidFilter, match="rabbitmq:stream-offset-spec: first, last"):
        stream_position(value)


SPEC, SELECTOR = "rabbitmq:stream-offset-spec", "apache.org:selector-filter:string"


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    ("asked", "position"),
    [
        (None, None),
        ({}, None),
        ({SPEC: None}, None),
        ({SPEC: "first"}, Position("first")),
        ({"any": Described(Symbol(SPEC), ULong(3))}, Position("offset", 3)),
        ({SELECTOR: "amqp.annotation.x-opt-offset > '3'"}, Position("offset", 3, False)),
        (
            {"any": Described(ULong(0x468C_0000_0004), "amqp.annotation.x-opt-offset >= '3'")},
            Position("offset", 3),
        ),
        ({SELECTOR: "color = 'blue'", SPEC: "last"}, Position("last")),
        ({SELECTOR: 1, "other": "first"}, None),
    ],
)
def test_the_position_in_a_filter_set(
    asked: dict[Any, object] | None, position: Position | None
) -> None:
    assert log_position(asked) == position


def test_there_is_one_position() -> None:
    with pytest.raises(InvalidFilter, match="there is another start position"):
        log_position({SPEC: "first", SELECTOR: "amqp.annotation.x-opt-offset > '3'"})
