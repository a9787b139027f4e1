"""Messages cross between 0-9-1 and 1.0 without loss (N19)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from amqp_rt_amqp091 import faults
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.codec import read_method, write_shortstr
from amqp_rt_amqp091.frames import content_frames
from amqp_rt_amqp091.messages import Invalid, from_message, front_of, to_message
from amqp_rt_amqp091.methods import BasicDeliver, BasicProperties
from amqp_rt_amqp091.recent import read_publish
from amqp_rt_amqp091.values import Decimal, Seconds
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typed_values import scalars, values
from worlds091 import World

from amqp_rt import Message
from amqp_rt.fronts import (
    Byte,
    Error,
    Float32,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    UShort,
)
from amqp_rt.fronts.recent import Recent
from amqp_rt.fronts.splicing import joined, parts_of, place_of

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_NAME = st.text("abcxyz-_.", min_size=1, max_size=12)
#: Names of headers for fields of 1.0.
_FIELDS = st.sampled_from(
    [
        *("x-amqp10-to", "x-amqp10-subject", "x-amqp10-group-id", "x-amqp10-group-sequence"),
        *("x-amqp10-reply-to-group-id", "x-message-id-type", "x-correlation-id-type"),
    ]
)
_ASCII = st.text("abc/-+;=", max_size=20)
_SECONDS = st.integers(0, (1 << 53)).map(Seconds)
_SIMPLE = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | _TEXT
    | st.binary(max_size=20)
    | st.none()
    | _SECONDS
    | st.integers(-128, 127).map(Byte)
    | st.integers(0, 255).map(UByte)
    | st.integers(-(1 << 15), (1 << 15) - 1).map(Short)
    | st.integers(0, (1 << 16) - 1).map(UShort)
    | st.integers(-(1 << 31), (1 << 31) - 1).map(Int)
    | st.integers(0, (1 << 32) - 1).map(UInt)
    | st.floats(width=32, allow_nan=False).map(Float32)
    | st.builds(Decimal, st.integers(0, 255), st.integers(-(1 << 31), (1 << 31) - 1))
)
_VALUE = st.recursive(
    _SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAME, inner, max_size=3),
    max_leaves=6,
)
_PROPERTIES: dict[str, st.SearchStrategy[Any]] = {
    "content_type": _ASCII,
    "content_encoding": _ASCII,
    "headers": st.dictionaries(_NAME | _FIELDS, _VALUE, max_size=5),
    "delivery_mode": st.sampled_from([1, 2]),
    "priority": st.integers(0, 255),
    "correlation_id": _TEXT,
    "reply_to": _TEXT,
    "expiration": st.integers(0, 1 << 40).map(str),
    "message_id": _TEXT,
    "timestamp": st.integers(0, 1 << 53),
    "type": _TEXT.filter(lambda text: text != "amqp-1.0"),
    "user_id": _TEXT,
    "app_id": _TEXT,
}


def typed(value: Any) -> Any:
    """*value* with its types: ``Int(1)`` and ``1`` are equal otherwise."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    return (type(value).__name__, value)


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    st.fixed_dictionaries({}, optional=_PROPERTIES).map(lambda said: BasicProperties(**said)),
    st.binary(max_size=50),
    _TEXT,
    _TEXT,
)
def test_what_goes_in_comes_out(
    properties: BasicProperties, body: bytes, exchange: str, key: str
) -> None:
    payload = to_message(properties, body, exchange=exchange, routing_key=key)
    # The short way says the same.
    front = front_of(properties)
    assert front is not None
    place = place_of(write_shortstr(exchange), write_shortstr(key))
    assert joined(front, place, body) == payload
    parts = parts_of(payload, "q")
    assert parts is not None
    said = write_shortstr(exchange) + write_shortstr(key)
    assert (parts.key, parts.place, parts.body) == (
        (front.header, front.others, front.rest),
        said,
        body,
    )
    found = from_message(payload, "q")
    assert (found.body, found.exchange, found.routing_key) == (body, exchange, key)
    assert not found.redelivered
    for name in BasicProperties.__struct_fields__:
        said, heard = getattr(properties, name), getattr(found.properties, name)
        assert typed(heard) == typed(said), name


@pytest.mark.req("N19")
def test_a_peer_of_1_0_sees_the_properties() -> None:
    message = Message.decode(
        to_message(
            BasicProperties(
                content_type="text/plain",
                content_encoding="gzip",
                headers={"n": 5, "when": Seconds(7), "x-list": [1], "table": {"a": True}},
                delivery_mode=2,
                priority=7,
                correlation_id="c",
                reply_to="r",
                expiration="500",
                message_id="m",
                timestamp=9,
                type="order",
                user_id="ada",
                app_id="shop",
            ),
            b"body",
            exchange="e",
            routing_key="k",
        )
    )
    assert (message.durable, message.priority, message.ttl_ms) == (True, 7, 500)
    assert (message.message_id, message.correlation_id, message.reply_to) == ("m", "c", "r")
    assert (message.content_type, message.content_encoding) == ("text/plain", "gzip")
    assert (message.user_id, message.creation_time) == (b"ada", 9000)
    assert message.application_properties == {"n": 5, "when": Timestamp(7000)}
    annotations = message.message_annotations
    assert (annotations["x-exchange"], annotations["x-routing-key"]) == ("e", "k")
    assert (annotations["x-basic-type"], annotations["x-basic-app-id"]) == ("order", "shop")
    assert annotations["x-basic-headers"] == {"x-list": [1], "table": {"a": True}}
    assert (message.body_kind, message.body) == ("data", b"body")


@pytest.mark.req("N19")
def test_what_a_peer_of_1_0_says_is_told_in_properties_and_headers() -> None:
    identity = uuid.UUID(int=5)
    found = from_message(
        Message(
            b"body",
            durable=True,
            priority=9,
            ttl_ms=800,
            delivery_count=2,
            message_annotations={Symbol("x-opt-note"): "n"},
            message_id=identity,
            correlation_id=12,
            user_id=b"ada",
            to="there",
            subject="about",
            reply_to="back",
            content_type="text/plain",
            creation_time=Timestamp(4000),
            absolute_expiry_time=Timestamp(9000),
            group_id="g",
            group_sequence=3,
            reply_to_group_id="h",
            application_properties={"a": UInt(1), "id": identity, "when": Timestamp(2000)},
        ).encode(),
        "q",
    )
    said = found.properties
    assert (found.exchange, found.routing_key, found.redelivered) == ("", "q", True)
    assert (said.delivery_mode, said.priority, said.expiration) == (2, 9, "800")
    assert (said.message_id, said.correlation_id) == (str(identity), "12")
    assert (said.user_id, said.reply_to, said.timestamp) == ("ada", "back", 4)
    assert said.headers == {
        "a": 1,
        "id": str(identity),
        "when": Seconds(2),
        "x-opt-note": "n",
        "x-delivery-count": 2,
        "x-message-id-type": "uuid",
        "x-correlation-id-type": "ulong",
        "x-amqp10-to": "there",
        "x-amqp10-subject": "about",
        "x-amqp10-group-id": "g",
        "x-amqp10-group-sequence": 3,
        "x-amqp10-reply-to-group-id": "h",
        "x-amqp10-absolute-expiry-time": Seconds(9),
    }


@pytest.mark.req("N19")
@pytest.mark.parametrize(
    ("message_id", "correlation_id"),
    [("m", "c"), (uuid.UUID(int=5), 12), (b"\xff", uuid.UUID(int=6)), (7, b"c")],
    ids=["text", "uuid and ulong", "binary and uuid", "ulong and binary"],
)
def test_headers_for_fields_of_1_0_become_these_fields_again(
    message_id: Any, correlation_id: Any
) -> None:
    said: dict[str, Any] = {
        "message_id": message_id,
        "correlation_id": correlation_id,
        "to": "there",
        "subject": "about",
        "group_id": "g",
        "group_sequence": 3,
        "reply_to_group_id": "h",
    }
    found = from_message(Message(b"body", **said).encode(), "q")
    again = Message.decode(to_message(found.properties, found.body, exchange="e", routing_key="k"))
    assert {name: getattr(again, name) for name in said} == said
    assert "x-basic-headers" not in again.message_annotations


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *(("m", "uuid"), ("m", "ulong"), ("m", "binary"), ("m", "other"), ("m", 5)),
        *(("1" * 30, "ulong"), (str(1 << 64), "ulong"), ("01", "ulong"), ("\u0663", "ulong")),
        *(("FF", "binary"), ("f f", "binary"), (str(uuid.UUID(int=5)).replace("-", ""), "uuid")),
        (str(uuid.UUID(int=0xA << 8)).upper(), "uuid"),
    ],
)
def test_an_id_that_is_not_of_the_type_in_its_header_stays_a_text(text: str, kind: Any) -> None:
    said = BasicProperties(message_id=text, headers={"x-message-id-type": kind})
    message = Message.decode(to_message(said, b"", exchange="e", routing_key="k"))
    assert message.message_id == text
    found = from_message(message.encode(), "q").properties
    assert (found.message_id, found.headers) == (text, {"x-message-id-type": kind})


@pytest.mark.req("N19")
@pytest.mark.parametrize("body", ["text", 5, None, {"a": [1, 2]}])
def test_a_body_that_is_no_data_is_passed_on_as_sections(body: Any) -> None:
    found = from_message(Message(body, body_kind="value").encode(), "q")
    assert found.properties.type == "amqp-1.0"
    again = Message.decode(to_message(found.properties, found.body, exchange="", routing_key="q"))
    assert (again.body_kind, again.body) == ("value", body)


def test_several_data_sections_are_one_body() -> None:
    payload = Message([b"a", b"b"], body_kind="data").encode()
    assert from_message(payload, "q").body == b"ab"


@pytest.mark.parametrize("expiration", ["", "soon", "-1", "1.5", "\u0663", "9" * 30])
def test_an_expiration_is_a_number(expiration: str) -> None:
    with pytest.raises(Invalid):
        to_message(BasicProperties(expiration=expiration), b"", exchange="", routing_key="q")


#: Names that mean something here, names that do not, and some that 0-9-1 has no room for.
_NAMES = (
    st.sampled_from(
        [
            *("x-exchange", "x-routing-key", "x-basic-type", "x-basic-app-id", "x-basic-headers"),
            *("x-basic-priority", "x-basic-delivery-mode", "x-basic-expiration"),
            *("x-opt-dead-letter-history", "x-opt-note", "", "x" * 256, "\u20ac" * 86),
        ]
    )
    | _NAME
)
_LONG = _TEXT | st.just("long" * 80)


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    annotations=st.dictionaries(_NAMES.map(lambda n: Symbol(n.replace("\u20ac", "e"))), values),
    application=st.dictionaries(_NAMES, scalars),
    properties=st.fixed_dictionaries(
        {},
        optional={
            "message_id": _LONG | st.binary(max_size=200) | st.uuids() | st.integers(0, 1 << 63),
            "correlation_id": _LONG | st.binary(max_size=200),
            "user_id": st.binary(max_size=300),
            "to": _LONG,
            "subject": _LONG,
            "reply_to": _LONG,
            "group_id": _LONG,
            "creation_time": st.integers(-(1 << 63), (1 << 63) - 1).map(Timestamp),
            "absolute_expiry_time": st.integers(-(1 << 63), (1 << 63) - 1).map(Timestamp),
            "ttl_ms": st.integers(0, (1 << 32) - 1),
            "priority": st.integers(0, 255),
            "group_sequence": st.integers(0, (1 << 32) - 1),
        },
    ),
    body=values,
)
def test_whatever_a_peer_of_1_0_sends_can_be_said(
    annotations: Any, application: Any, properties: Any, body: Any
) -> None:
    payload = Message(
        body,
        body_kind="value",
        message_annotations=annotations,
        application_properties=application,
        **properties,
    ).encode()
    found = from_message(payload, "q" * 300)
    method = BasicDeliver(exchange=found.exchange, routing_key=found.routing_key)
    content_frames(1, method, found.properties, found.body, 1 << 20)


@pytest.mark.req("N19")
@pytest.mark.parametrize(
    "body",
    [
        b"no sections at all",
        b"\x00\x53\x70\xc0",
        b"",
        Message(b"body", message_annotations={Symbol("x-exchange"): "forged"}).encode(),
        Message(b"body", durable=True).encode(),
        Message("text", application_properties={"a": 1}).encode(),
    ],
)
def test_sections_are_taken_for_such_only_if_they_are_a_body(body: bytes) -> None:
    said = BasicProperties(type="amqp-1.0")
    message = Message.decode(to_message(said, body, exchange="e", routing_key="k"))
    assert (message.body_kind, message.body) == ("data", body)
    assert message.message_annotations["x-exchange"] == "e"
    assert not message.durable
    again = from_message(message.encode(), "q")
    assert (again.body, again.properties.type) == (body, "amqp-1.0")


# --- The short way --------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.fixed_dictionaries({}, optional=_PROPERTIES).map(lambda said: BasicProperties(**said)),
    st.binary(max_size=9000),
)
def test_a_message_that_was_said_before_is_said_in_the_same_way(
    properties: BasicProperties, body: bytes
) -> None:
    """What is remembered of earlier messages gives the same octets as what is made anew."""
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"), m.QueueBind(queue="q", exchange="amq.fanout"))
    client.say(1, m.BasicConsume(queue="q", no_ack=True))
    client.take()
    for _ in range(3):
        client.publish(1, "q", body, properties=properties)
    client.publish(1, "key", body, properties=properties, exchange="amq.fanout")
    one, *others, last = client.contents()
    assert one.body == last.body == body
    assert typed_properties(last.properties) == typed_properties(one.properties)
    assert (last.method.exchange, last.method.routing_key) == ("amq.fanout", "key")
    for number, other in enumerate(others, 2):
        assert other.body == body
        assert typed_properties(other.properties) == typed_properties(one.properties)
        assert other.method == replace(one.method, delivery_tag=number)


def typed_properties(properties: BasicProperties) -> Any:
    return {name: typed(getattr(properties, name)) for name in properties.__struct_fields__}


@given(
    st.binary(max_size=30)
    | st.builds(
        lambda exchange, key, bits, rest: (
            b"\0\0" + write_shortstr(exchange) + write_shortstr(key) + bytes((bits,)) + rest
        ),
        _TEXT,
        _TEXT,
        st.integers(0, 255),
        st.sampled_from([b"", b"x"]),
    )
)
def test_a_publication_is_read_the_short_way_as_the_long_one(fields: bytes) -> None:
    payload = m.BasicPublish.code.to_bytes(4, "big") + fields
    found = read_publish(payload)
    if found is not None:
        method = read_method(payload)
        assert found.method == method
        assert isinstance(method, m.BasicPublish)
        exchange, key = write_shortstr(method.exchange), write_shortstr(method.routing_key)
        assert found.place == place_of(exchange, key)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        Message("text").encode(),
        Message([b"a", b"b"], body_kind="data").encode(),
        Message(b"x", footer={Symbol("x-f"): 1}).encode(),
        Message(b"x" * 300).encode()[:-1],
        Message(b"x").encode() + b"y",
        b"\0\x53\x75",
        b"\0\x53\x70\xd0\0\0",
    ],
)
def test_what_is_no_plain_message_is_not_split(payload: bytes) -> None:
    assert parts_of(payload, "q") is None


def test_what_is_remembered_is_bounded() -> None:
    recent: Recent[int, int] = Recent(entries_max=4)
    for number in range(100):
        recent.put(number, number)
        assert recent.get(0) == 0, "what is asked for stays"
    known = [number for number in range(100) if recent.get(number) is not None]
    assert len(known) <= 9
    assert 99 in known


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.req("N7", "N19")
@pytest.mark.parametrize(
    ("code", "condition", "soft"),
    [
        (311, "amqp:link:message-size-exceeded", True),
        (320, "amqp:connection:forced", False),
        (403, "amqp:unauthorized-access", True),
        (404, "amqp:not-found", True),
        (405, "amqp:resource-locked", True),
        (406, "amqp:precondition-failed", True),
        (501, "amqp:connection:framing-error", False),
        (502, "amqp:decode-error", False),
        (506, "amqp:resource-limit-exceeded", False),
        (530, "amqp:not-allowed", False),
        (540, "amqp:not-implemented", False),
        (541, "amqp:internal-error", False),
    ],
)
def test_errors_mean_the_same_in_both_protocols(code: int, condition: str, soft: bool) -> None:
    assert faults.code_of(condition) == code
    assert faults.condition_of(code) == condition
    assert (code in faults.SOFT) is soft
    fault = faults.Fault.of(Error(condition, "why"))
    assert (fault.code, fault.text) == (code, "why")


@pytest.mark.req("N7")
@pytest.mark.parametrize("condition", ["amqp:illegal-state", "amqp:invalid-field"])
def test_conditions_without_a_code_of_their_own_end_a_channel_only(condition: str) -> None:
    fault = faults.Fault.of(Error(condition, "why"))
    assert (fault.code, fault.text) == (faults.PRECONDITION_FAILED, "why")
    assert fault.code in faults.SOFT


@pytest.mark.req("N7")
def test_a_reply_text_is_a_short_string_that_begins_with_the_name_of_its_code() -> None:
    assert faults.reply_text(404, "no queue") == "NOT_FOUND - no queue"
    assert len(faults.reply_text(404, "\u00e4" * 300).encode()) <= 255
    assert set(faults.NAMES) >= faults.SOFT
