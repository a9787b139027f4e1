"""Messages of 0-10, 1.0 and 0-9-1, converted to each other (N19).

The table in ``docs/guides/amqp010.md`` says what becomes of each field; a test here runs each of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import pytest
from amqp_rt_amqp010 import layouts
from amqp_rt_amqp010.codec import read_entries, read_value, write_entries
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.layouts import (
    Composite,
    DeliveryProperties,
    FragmentProperties,
    MessageProperties,
    MessageTransfer,
    ReplyTo,
    Xid,
)
from amqp_rt_amqp010.limits import ELEMENTS_MAX, NESTING_MAX
from amqp_rt_amqp010.messages import content_of, payload_of
from amqp_rt_amqp010.recent import Recents
from amqp_rt_amqp010.values import (
    BIN_CODES,
    Array,
    Bin,
    Datetime,
    Dec32,
    Dec64,
    LatinChar,
    Opaque,
    Str8,
    Str8Latin,
    Str8Utf16,
    Str16Latin,
    Str16Utf16,
    UnknownStruct,
    Vbin8,
    Vbin32,
)
from amqp_rt_amqp091.messages import from_message, to_message
from amqp_rt_amqp091.methods import BasicProperties
from amqp_rt_amqp091.values import Decimal, Seconds
from hypothesis import example, given
from hypothesis import strategies as st
from typed_values import scalars, values

from amqp_rt import Message
from amqp_rt.fronts import (
    Byte,
    Char,
    Float32,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from amqp_rt.message import BodyKind, Sequence

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "amqp010.md"
CODE = MessageTransfer.CODE

# --- helpers -----------------------------------------------------------------------------------------


def typed(value: Any) -> Any:
    """Return *value* with its types: ``Int(1)`` and ``1`` are equal otherwise."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    if isinstance(value, Array):
        return ("Array", value.code, typed(value.items))
    if isinstance(value, Float32):
        return ("Float32", value.bits)
    if isinstance(value, Composite):
        return (value.NAME, {name: typed(getattr(value, name)) for name in value.__struct_fields__})
    return (type(value).__name__, value)


def structs_of(header: bytes) -> tuple[DeliveryProperties, MessageProperties, list[Any]]:
    delivery, stated, others = DeliveryProperties(), MessageProperties(), []
    for each in read_entries(header, CODE):
        if isinstance(each, DeliveryProperties):
            delivery = each
        elif isinstance(each, MessageProperties):
            stated = each
        else:
            others.append(each)
    return delivery, stated, others


def incoming(
    delivery: DeliveryProperties | None = None,
    stated: MessageProperties | None = None,
    *others: Composite | UnknownStruct,
    body: bytes = b"body",
    exchange: str = "e",
) -> Message:
    entries = [each for each in (delivery, stated, *others) if each is not None]
    return Message.decode(payload_of(write_entries(entries), [body], exchange=exchange))


def outgoing(body: object = b"body", **fields: Any) -> tuple[Any, Any, bytes]:
    header, pieces = content_of(Message(body, **fields).encode(), address="q")
    delivery, stated, _ = structs_of(header)
    return delivery, stated, b"".join(pieces)


def both_ways(
    entries: list[Any], body: list[bytes], exchange: str = "e"
) -> tuple[bytes, bytes, bytes]:
    """Return the header, what it is after both conversions, and the message between them."""
    recents = Recents()
    header = write_entries(entries)
    payload = payload_of(header, body, exchange=exchange, recents=recents)
    again = payload_of(header, body, exchange=exchange, recents=recents)
    assert again == payload == payload_of(header, body, exchange=exchange), "cached or not"
    found, pieces = content_of(payload, address="q", recents=recents)
    assert content_of(payload, address="q", recents=recents) == (found, pieces)
    assert content_of(payload, address="q") == (found, pieces)
    assert b"".join(pieces) == b"".join(body)
    return header, found, payload


# --- from 0-10 to 0-10 -------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_LATIN = st.text("abcäöü€", max_size=20)
_BASIC = st.text("abc\0é", max_size=20)
_NAME = st.text("abcxyz-_.", max_size=12) | st.sampled_from(
    [
        *("x-exchange", "x-basic-type", "x-basic-headers", "x-amqp010-form", "x-amqp010-structs"),
        *(
            "x-amqp10-to",
            "x-amqp10-message-id",
            "x-correlation-id-type",
            "x-death",
            "scale",
            "value",
        ),
        *("qpid.subject", "JMSXGroupID", "JMSXGroupSeq", "x-amqp10-reply-to-group-id"),
        *("x-amqp10-reply-to", "x-amqp10-content-type", "x-delivery-count", "", "x" * 255),
    ]
)
_SECONDS = st.integers(-(1 << 63), (1 << 63) - 1)
_ULONG = st.integers(0, (1 << 64) - 1)
_SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | _TEXT
    | st.sampled_from(["amqp-1.0", "uuid", "ulong"])
    | st.binary(max_size=20)
    | st.uuids()
    | st.integers(-128, 127).map(Byte)
    | st.integers(0, 255).map(UByte)
    | st.integers(-(1 << 15), (1 << 15) - 1).map(Short)
    | st.integers(0, (1 << 16) - 1).map(UShort)
    | st.integers(-(1 << 31), (1 << 31) - 1).map(Int)
    | st.integers(0, (1 << 32) - 1).map(UInt)
    | _ULONG.map(ULong)
    | st.floats(width=32).map(Float32)
    | st.characters(exclude_categories=["Cs"]).map(Char)
    | st.sampled_from("aä€").map(LatinChar)
    | _SECONDS.map(Datetime)
    | st.builds(Dec32, st.integers(0, 255), st.integers(-(1 << 31), (1 << 31) - 1))
    | st.builds(Dec64, st.integers(0, 255), _SECONDS)
    | _TEXT.map(Str8)
    | _LATIN.map(Str8Latin)
    | _LATIN.map(Str16Latin)
    | _BASIC.map(Str8Utf16)
    | _BASIC.map(Str16Utf16)
    | st.binary(max_size=20).map(Vbin8)
    | st.binary(max_size=20).map(Vbin32)
    | st.sampled_from(sorted(BIN_CODES)).map(lambda width: Bin(bytes(width)))
    | st.builds(UnknownStruct, st.just(0x7701), st.binary(max_size=9))
    | st.builds(Opaque, st.just(0x87), st.binary(max_size=9))
    | st.builds(Xid, format=st.integers(0, 9), global_id=st.binary(max_size=3))
    | st.lists(st.integers(0, 255), max_size=3).map(lambda found: Array(0x02, [*map(UByte, found)]))
)
_VALUE = st.recursive(
    _SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAME, inner, max_size=3),
    max_leaves=6,
)
_DELIVERY: dict[str, st.SearchStrategy[Any]] = {
    "discard_unroutable": st.booleans(),
    "immediate": st.booleans(),
    "redelivered": st.booleans(),
    "priority": st.integers(0, 9),
    "delivery_mode": st.integers(0, 255),
    "ttl": _ULONG | st.integers(0, 1 << 32),
    "timestamp": _SECONDS | st.integers(0, 1 << 31),
    "expiration": _SECONDS | st.integers(0, 1 << 31),
    "routing_key": _TEXT,
}
_ADDRESS = _TEXT | st.sampled_from(
    ["/exchanges/a", "/exchanges/a/b", "/queues/q", "amqp://h/q", "a/b", "%41", "/", ""]
)
_STATED: dict[str, st.SearchStrategy[Any]] = {
    "message_id": st.uuids(),
    "correlation_id": st.binary(max_size=20) | st.uuids().map(lambda u: str(u).encode()),
    "reply_to": st.builds(ReplyTo, exchange=st.none() | _ADDRESS, routing_key=st.none() | _ADDRESS),
    "content_type": _TEXT,
    "content_encoding": _TEXT,
    "user_id": st.binary(max_size=20),
    "app_id": st.binary(max_size=20),
    "application_headers": st.dictionaries(_NAME, _VALUE, max_size=5),
}
_DELIVERIES = st.fixed_dictionaries({}, optional=_DELIVERY).map(
    lambda said: DeliveryProperties(exchange="e", **said)
)
_MESSAGES = st.fixed_dictionaries({}, optional=_STATED).map(lambda said: MessageProperties(**said))


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    delivery=_DELIVERIES,
    stated=st.none() | _MESSAGES,
    others=st.lists(
        st.builds(UnknownStruct, st.integers(0x7000, 0x7FFF), st.binary(max_size=9)),
        max_size=2,
        unique_by=lambda each: each.code,
    ),
    body=st.lists(st.binary(max_size=300), max_size=3),
    length=st.booleans(),
    turned=st.booleans(),
)
def test_a_message_comes_out_as_it_came_in(
    delivery: DeliveryProperties,
    stated: MessageProperties | None,
    others: list[UnknownStruct],
    body: list[bytes],
    length: bool,
    turned: bool,
) -> None:
    if stated is not None and length:
        stated.content_length = sum(map(len, body))
    entries: list[Any] = [delivery] if stated is None else [delivery, stated]
    if turned:
        entries.reverse()
    _, found, _ = both_ways([*entries, *others], body)
    again = read_entries(found, CODE)
    assert [typed(each) for each in again] == [typed(each) for each in [*entries, *others]]


@pytest.mark.req("N19")
@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([DeliveryProperties(exchange="e")], id="nothing"),
        pytest.param([DeliveryProperties(exchange="e", routing_key="")], id="empty key"),
        pytest.param(
            [
                DeliveryProperties(exchange="e", routing_key="k", priority=4, delivery_mode=2),
                MessageProperties(content_length=3, application_headers={}),
            ],
            id="empty headers",
        ),
        pytest.param(
            [
                DeliveryProperties(exchange="e", routing_key="k", delivery_mode=1, priority=0),
                MessageProperties(
                    content_length=3,
                    message_id=UUID(int=5),
                    correlation_id=b"c",
                    reply_to=ReplyTo(exchange="amq.topic", routing_key="a.b"),
                    content_type="text/plain",
                    content_encoding="utf-8",
                    user_id=b"ada",
                    app_id=b"shop",
                    application_headers={"a": Int(5), "b": "text", "qpid.subject": "s"},
                ),
            ],
            id="everything",
        ),
        pytest.param(
            [
                DeliveryProperties(exchange="e", routing_key="k", redelivered=True, ttl=1 << 40),
                MessageProperties(reply_to=ReplyTo(routing_key="q")),
            ],
            id="without length",
        ),
    ],
)
def test_common_headers_keep_their_octets(entries: list[Any]) -> None:
    header, found, _ = both_ways(entries, [b"ab", b"c"])
    assert found == header


def test_the_exchange_is_the_destination_of_the_transfer() -> None:
    header = write_entries([DeliveryProperties(exchange="forged", routing_key="k")])
    delivery, _, _ = structs_of(content_of(payload_of(header, [], exchange="e"))[0])
    assert (delivery.exchange, delivery.routing_key) == ("e", "k")


@pytest.mark.parametrize("header", [None, b""])
def test_a_transfer_without_header_has_a_message(header: bytes | None) -> None:
    recents = Recents()
    payload = payload_of(header, [b"body"], exchange="e", recents=recents)
    assert Message.decode(payload).body == b"body"
    found, pieces = content_of(payload, address="q", recents=recents)
    assert read_entries(found, CODE) == [DeliveryProperties(exchange="e")]
    assert pieces == [b"body"]


def test_what_belongs_to_the_transfer_is_not_passed_on() -> None:
    delivery = DeliveryProperties(exchange="e", routing_key="k", resume_id="r", resume_ttl=5)
    _, found, _ = both_ways([delivery, FragmentProperties(first=True, last=True)], [b"body"])
    assert read_entries(found, CODE) == [DeliveryProperties(exchange="e", routing_key="k")]


def test_the_length_of_the_body_is_the_true_one() -> None:
    header = write_entries([DeliveryProperties(exchange="e"), MessageProperties(content_length=99)])
    recents = Recents()
    for body in (b"one", b"another"):
        payload = payload_of(header, [body], exchange="e", recents=recents)
        _, stated, _ = structs_of(content_of(payload, recents=recents)[0])
        assert stated.content_length == len(body)


# --- bounds ------------------------------------------------------------------------------------------


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.req("N19")
def test_headers_as_deep_as_they_may_be_are_converted() -> None:
    # The struct and its map are two levels.
    entries = [
        DeliveryProperties(exchange="e"),
        MessageProperties(application_headers={"a": nested(NESTING_MAX - 2)}),
    ]
    header, found, _ = both_ways(entries, [])
    assert found == header
    entries[1] = MessageProperties(application_headers={"a": nested(NESTING_MAX - 1)})
    with pytest.raises(CommandFault) as caught:
        payload_of(write_entries(entries), [])
    assert caught.value.code == layouts.ErrorCode.RESOURCE_LIMIT_EXCEEDED


def test_as_many_headers_as_there_may_be_are_converted() -> None:
    headers: dict[str, object] = {str(number): number for number in range(ELEMENTS_MAX)}
    entries = [DeliveryProperties(exchange="e"), MessageProperties(application_headers=headers)]
    header, found, _ = both_ways(entries, [])
    assert found == header
    headers["more"] = 1
    with pytest.raises(CommandFault) as caught:
        payload_of(write_entries(entries), [])
    assert caught.value.code == layouts.ErrorCode.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.parametrize("header", [b"x", b"\0\0\0\2\4\1", b"\0\0\0\4\4\1\xff\xff", b"\0\0\0\0"])
def test_malformed_headers_are_faults_of_their_command(header: bytes) -> None:
    with pytest.raises(CommandFault) as caught:
        payload_of(header, [b"body"])
    assert caught.value.code == layouts.ErrorCode.COMMAND_INVALID
    assert (caught.value.class_code, caught.value.command_code) == (4, 1)


@given(st.binary(max_size=60), st.binary(max_size=9))
def test_any_header_is_converted_or_a_fault_of_its_command(header: bytes, body: bytes) -> None:
    try:
        payload = payload_of(header, [body], exchange="e")
    except CommandFault:
        return
    content_of(payload)


@pytest.mark.slow
@given(_DELIVERIES, _MESSAGES, st.data())
def test_a_changed_header_is_converted_or_a_fault_of_its_command(
    delivery: DeliveryProperties, stated: MessageProperties, data: st.DataObject
) -> None:
    header = bytearray(write_entries([delivery, stated]))
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        payload = payload_of(bytes(header), [b"body"], exchange="e")
    except CommandFault:
        return
    _, pieces = content_of(payload)
    assert pieces == [b"body"]


# --- from 1.0 ----------------------------------------------------------------------------------------

#: Names that mean something here, names that do not, and some that 0-10 has no room for.
_KEYS = _NAME | st.sampled_from(["x" * 256, "\u20ac" * 86, "x-opt-dead-letter-history"])
_LONG = _TEXT | st.just("long" * 80)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "message_id": _LONG | st.binary(max_size=200) | st.uuids() | st.integers(0, 1 << 63),
    "correlation_id": _LONG | st.binary(max_size=200) | st.uuids() | st.integers(0, 1 << 63),
    "user_id": st.binary(max_size=300),
    "to": _LONG,
    "subject": _LONG,
    "reply_to": _LONG | _ADDRESS | st.just("/exchanges/%ff%fe/%80"),
    "group_id": _LONG,
    "reply_to_group_id": _LONG,
    "creation_time": _SECONDS.map(Timestamp),
    "absolute_expiry_time": _SECONDS.map(Timestamp),
    "ttl_ms": st.integers(0, (1 << 32) - 1),
    "priority": st.integers(0, 255),
    "durable": st.booleans(),
    "delivery_count": st.integers(0, (1 << 32) - 1),
    "group_sequence": st.integers(0, (1 << 32) - 1),
}


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    annotations=st.dictionaries(_KEYS.map(lambda n: Symbol(n.replace("\u20ac", "e"))), values),
    application=st.dictionaries(_KEYS, scalars),
    properties=st.fixed_dictionaries({}, optional=_FIELDS),
    body=values | st.lists(values),
    kind=st.sampled_from(["value", "sequence"]),
)
def test_every_message_of_1_0_can_be_sent(
    annotations: Any, application: Any, properties: Any, body: Any, kind: BodyKind
) -> None:
    payload = Message(
        body,
        body_kind=kind if isinstance(body, list) else "value",
        message_annotations=annotations,
        application_properties=application,
        **properties,
    ).encode()
    header, _ = content_of(payload, address="q" * 300)
    delivery, stated, _ = structs_of(header)
    assert (delivery.priority or 0) <= 9
    assert stated.reply_to is None or "reply_to" in properties or annotations


@pytest.mark.req("N19")
def test_values_that_exceed_their_fields_are_left_out_or_become_headers() -> None:
    long = "\u20ac" * 30_000
    delivery, stated, body = outgoing(
        long,
        message_annotations={
            Symbol("x-exchange"): long,
            Symbol("x-routing-key"): long,
            Symbol("x-basic-app-id"): long,
        },
        message_id=long,
        correlation_id=long,
        user_id=b"x" * 65_536,
        subject=long,
        reply_to=long,
        application_properties={"text": long, "octets": b"x" * 65_536, "x" * 256: 1},
    )
    assert body == long.encode()
    assert (delivery.exchange, delivery.routing_key) == (None, None)
    assert (stated.correlation_id, stated.user_id, stated.reply_to) == (None, None, None)
    assert stated.app_id is None
    octets = Vbin32(long.encode())
    assert typed(stated.application_headers) == typed(
        {
            "text": octets,
            "octets": Vbin32(b"x" * 65_536),
            "qpid.subject": octets,
            "x-amqp10-message-id": octets,
            "x-amqp10-reply-to": octets,
        }
    )


@pytest.mark.slow
@given(
    st.binary(max_size=80)
    | st.tuples(st.binary(max_size=30), st.integers(0, 30)).map(
        lambda cut: Message(b"body", subject="s", durable=True).encode()[: cut[1]] + cut[0]
    )
)
@example(b"\0\x53\x72\xc1\x01\x01\0\x53\x75\xa0\x04body")
@example(b"\0\x53\x73\xc0\x03\x01\xa1\xff\0\x53\x75\xa0\x04body")
@example(b"\0\x53\x75\xb0\xff")
@example(b"\0\x53\x77\xc1\x03\x02\xa1\xff")
def test_octets_that_are_no_message_can_be_sent(payload: bytes) -> None:
    header, pieces = content_of(payload, address="q", recents=Recents())
    delivery, _, _ = structs_of(header)
    assert delivery.exchange is not None
    if payload.endswith(b"\x75\xa0\x04body"):
        assert pieces == [b"body"]


@pytest.mark.slow
@given(
    properties=st.fixed_dictionaries(
        {},
        optional={
            "message_id": _TEXT | st.binary(max_size=20) | st.uuids() | _ULONG,
            "correlation_id": _TEXT | st.uuids() | _ULONG | st.just(b"\xff"),
            "user_id": st.binary(max_size=20),
            "to": _TEXT,
            "subject": _TEXT,
            "reply_to": st.sampled_from(["q", "/exchanges/e/k", "/exchanges/e", "x" * 300]),
            "content_type": st.sampled_from(["text/plain", "application/json"]),
            "content_encoding": st.just("gzip"),
            "group_id": _TEXT,
            "reply_to_group_id": _TEXT,
            "group_sequence": st.integers(0, (1 << 32) - 1),
            "creation_time": st.integers(0, 1 << 40).map(lambda s: Timestamp(s * 1000)),
            "absolute_expiry_time": st.integers(0, 1 << 40).map(lambda s: Timestamp(s * 1000)),
            "ttl_ms": st.integers(0, (1 << 32) - 1),
            "priority": st.integers(0, 9),
            "durable": st.booleans(),
            "delivery_count": st.integers(0, 1),
        },
    ),
    application=st.dictionaries(
        st.text("abc", min_size=1, max_size=9),
        st.booleans()
        | st.integers(-(1 << 63), (1 << 63) - 1)
        | _TEXT
        | st.binary(max_size=9)
        | st.uuids()
        | st.integers(0, 255).map(UByte)
        | st.integers(0, (1 << 32) - 1).map(UInt),
    ),
    body=st.binary(max_size=300),
)
def test_a_message_of_1_0_goes_through_0_10(properties: Any, application: Any, body: bytes) -> None:
    """What the table maps to a field, or to a header with its own name, comes back."""
    message = Message.decode(
        Message(body, application_properties=application, **properties).encode()
    )
    header, pieces = content_of(message.encode(), address="q")
    found = Message.decode(payload_of(header, pieces, exchange="e"))
    assert (found.body_kind, found.body) == ("data", body)
    assert typed(dict(found.application_properties)) == typed(application)
    for name in properties:
        assert typed(getattr(found, name)) == typed(getattr(message, name)), name


@pytest.mark.req("N19")
def test_a_message_that_was_dead_lettered_tells_so() -> None:
    header = write_entries([DeliveryProperties(exchange="e", routing_key="k", ttl=500)])
    message = Message.decode(payload_of(header, [b"body"], exchange="e"))
    message.message_annotations = {
        **message.message_annotations,
        Symbol("x-opt-dead-letter-reason"): "expired",
        Symbol("x-opt-dead-letter-history"): [
            {"source": "q", "reason": "expired", "time": Timestamp(7000)}
        ],
    }
    message.ttl_ms = None
    delivery, stated, _ = structs_of(content_of(message.encode())[0])
    assert (delivery.ttl, delivery.exchange, delivery.routing_key) == (None, "e", "k")
    headers = stated.application_headers
    assert headers is not None
    assert headers["x-opt-dead-letter-reason"] == "expired"
    assert headers["x-first-death-queue"] == "q"
    assert typed(headers["x-death"]) == typed(
        [
            {
                "count": 1,
                "queue": "q",
                "reason": "expired",
                "time": Datetime(7),
                "exchange": "e",
                "routing-keys": ["k"],
            }
        ]
    )


@pytest.mark.req("N19")
@pytest.mark.parametrize(
    ("ttl", "stated", "expiration"),
    [
        (None, None, None),
        (None, 77, 77),
        (0, None, 1000),
        (1, 77, 1001),
        (5_000, 77, 1005),
        (1 << 40, 77, 1000 + -(-(1 << 40) // 1000)),
    ],
)
def test_the_expiration_is_computed_from_the_ttl(
    ttl: int | None, stated: int | None, expiration: int | None
) -> None:
    now = 1000.0
    recents = Recents()
    delivery = DeliveryProperties(exchange="e", ttl=ttl, expiration=stated)
    payload = payload_of(write_entries([delivery]), [], exchange="e")
    for later in (0, 7):
        now = 1000.0 + later
        header, _ = content_of(payload, wall=lambda now=now: now, recents=recents)
        wanted = expiration if ttl is None or expiration is None else expiration + later
        assert structs_of(header)[0].expiration == wanted


@pytest.mark.req("N19")
@pytest.mark.parametrize(
    ("first", "left", "ttl"),
    [
        (500, 500, 500),
        (500, 1, 1),
        (1 << 40, (1 << 32) - 1, 1 << 40),
        (1 << 40, (1 << 32) - 11, (1 << 40) - 10),
        (0, 0, 0),
    ],
)
def test_the_ttl_is_the_time_that_is_left(first: int, left: int, ttl: int) -> None:
    header = write_entries([DeliveryProperties(exchange="e", ttl=first)])
    message = Message.decode(payload_of(header, [], exchange="e"))
    assert message.ttl_ms == min(first, (1 << 32) - 1)
    message.ttl_ms = left
    assert structs_of(content_of(message.encode())[0])[0].ttl == ttl


def test_kept_values_change_no_field_that_1_0_has() -> None:
    """Any sender of 1.0 may write the annotation."""
    forged = write_entries(
        [
            DeliveryProperties(exchange="x", routing_key="y", priority=9, timestamp=1),
            MessageProperties(user_id=b"root", app_id=b"a", application_headers={"a": 1, "b": 2}),
        ]
    )
    delivery, stated, _ = outgoing(
        message_annotations={Symbol("x-amqp010-structs"): forged},
        user_id=b"ada",
        application_properties={"a": UInt(1)},
    )
    assert (delivery.exchange, delivery.routing_key, delivery.priority) == ("", "q", 4)
    assert delivery.timestamp is None
    assert (stated.user_id, stated.app_id, stated.application_headers) == (b"ada", None, {"a": 1})


@pytest.mark.parametrize(
    "body",
    [5, None, b"octets", {1: 2}, {"x" * 256: 1}, Sequence([1, 2])],
    ids=["int", "null", "binary", "keys", "long key", "sequence"],
)
def test_a_body_without_a_common_type_is_passed_on_as_sections(body: Any) -> None:
    kind: BodyKind = "sequence" if isinstance(body, Sequence) else "value"
    payload = Message(body, body_kind=kind, content_type=None).encode()
    header, pieces = content_of(payload, address="q")
    assert structs_of(header)[1].application_headers == {"x-basic-type": "amqp-1.0"}
    again = Message.decode(payload_of(header, pieces, exchange="e", recents=Recents()))
    assert (again.body_kind, typed(again.body)) == (kind, typed(body))


@pytest.mark.parametrize("body", [b"", b"no sections", Message(b"body", durable=True).encode()])
def test_sections_are_taken_for_such_only_if_they_are_a_body(body: bytes) -> None:
    header = write_entries(
        [
            DeliveryProperties(exchange="e"),
            MessageProperties(
                content_type="text/plain", application_headers={"x-basic-type": "amqp-1.0"}
            ),
        ]
    )
    payload = payload_of(header, [body], exchange="e")
    message = Message.decode(payload)
    assert (message.body_kind, message.body, message.durable) == ("data", body, False)
    assert content_of(payload) == (header, [body])


def test_several_data_sections_are_pieces_of_one_body() -> None:
    header, pieces = content_of(Message([b"a", b"bc"], body_kind="data").encode())
    assert pieces == [b"a", b"bc"]
    assert structs_of(header)[1].content_length == 3


# --- the table ---------------------------------------------------------------------------------------

_CHECKS: dict[str, Callable[[], None]] = {}


def row(text: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Declare the check of the row of the table whose first cell is *text*."""

    def declare(check: Callable[[], None]) -> Callable[[], None]:
        _CHECKS[text] = check
        return check

    return declare


@row("`delivery-mode` 2")
def _delivery_mode() -> None:
    assert incoming(DeliveryProperties(delivery_mode=2)).durable
    assert not incoming(DeliveryProperties(delivery_mode=1)).durable


@row("`priority`, 0 if it is absent")
def _priority_in() -> None:
    assert incoming(DeliveryProperties(priority=7)).priority == 7
    assert incoming(DeliveryProperties()).priority == 0


@row("`ttl`")
def _ttl() -> None:
    assert incoming(DeliveryProperties(ttl=500)).ttl_ms == 500
    message = incoming(DeliveryProperties(ttl=1 << 40))
    assert message.ttl_ms == 0xFFFF_FFFF
    assert message.message_annotations["x-basic-expiration"] == str(1 << 40)
    assert outgoing(ttl_ms=500)[0].ttl == 500


@row("`timestamp`, `expiration`")
def _moments() -> None:
    message = incoming(DeliveryProperties(timestamp=5, expiration=9))
    assert (message.creation_time, message.absolute_expiry_time) == (5000, 9000)


@row("`redelivered`")
def _redelivered() -> None:
    assert incoming(DeliveryProperties(redelivered=True)).delivery_count == 1


@row("destination of the transfer, `routing-key`")
def _place() -> None:
    annotations = incoming(DeliveryProperties(routing_key="k")).message_annotations
    assert (annotations["x-exchange"], annotations["x-routing-key"]) == ("e", "k")


@row("`message-id`")
def _message_id() -> None:
    assert incoming(None, MessageProperties(message_id=UUID(int=5))).message_id == UUID(int=5)


@row("`correlation-id`")
def _correlation_id() -> None:
    assert incoming(None, MessageProperties(correlation_id=b"c")).correlation_id == "c"
    assert incoming(None, MessageProperties(correlation_id=b"\xff")).correlation_id == b"\xff"


@row("`reply-to` with a key only")
def _reply_to_queue() -> None:
    said = MessageProperties(reply_to=ReplyTo(routing_key="q"))
    assert incoming(None, said).reply_to == "q"


@row("`reply-to` with an exchange")
def _reply_to_exchange() -> None:
    said = MessageProperties(reply_to=ReplyTo(exchange="e/", routing_key="k"))
    assert incoming(None, said).reply_to == "/exchanges/e%2F/k"


@row("`content-type`, `content-encoding`, `user-id`")
def _content_type() -> None:
    said = MessageProperties(content_type="a/b", content_encoding="gzip", user_id=b"ada")
    message = incoming(None, said)
    assert (message.content_type, message.content_encoding) == ("a/b", "gzip")
    assert message.user_id == b"ada"


@row("`app-id`")
def _app_id() -> None:
    message = incoming(None, MessageProperties(app_id=b"shop"))
    assert message.message_annotations["x-basic-app-id"] == "shop"


@row("headers `qpid.subject`, `JMSXGroupID`, `JMSXGroupSeq`")
def _named_headers() -> None:
    headers: dict[str, object] = {"qpid.subject": b"s", "JMSXGroupID": "g", "JMSXGroupSeq": Int(3)}
    message = incoming(None, MessageProperties(application_headers=headers))
    assert (message.subject, message.group_id, message.group_sequence) == ("s", "g", 3)
    assert message.application_properties == {}


@row("other simple headers")
def _simple_headers() -> None:
    headers = {"n": Short(5), "when": Datetime(7)}
    message = incoming(None, MessageProperties(application_headers=headers))
    found = dict(message.application_properties)
    assert typed(found) == typed({"n": Short(5), "when": Timestamp(7000)})


@row("maps, lists, decimals, and headers whose names begin with `x-`")
def _other_headers() -> None:
    headers = {"map": {"a": True}, "list": [1], "x-a": 5, "dec": Dec32(2, 314)}
    message = incoming(None, MessageProperties(application_headers=headers))
    assert message.application_properties == {}
    assert message.message_annotations["x-basic-headers"] == {
        "map": {"a": True},
        "list": [1],
        "x-a": 5,
        "dec": {"scale": UByte(2), "value": 314},
    }


@row("which fields are absent")
def _form() -> None:
    said = DeliveryProperties(routing_key="k")
    assert "x-amqp010-form" in incoming(said).message_annotations
    whole = incoming(said, MessageProperties(content_length=4))
    assert "x-amqp010-form" not in whole.message_annotations


@row("values that 1.0 cannot hold, such as widths of texts, and unknown structs")
def _structs() -> None:
    headers = {"a": Str8("text")}
    said = MessageProperties(application_headers=headers)
    message = incoming(None, said, UnknownStruct(0x7701, b"octets"))
    assert message.application_properties == {"a": "text"}
    kept = read_entries(message.message_annotations["x-amqp010-structs"], CODE)
    assert typed(kept) == typed([said, UnknownStruct(0x7701, b"octets")])


@row("body")
def _body() -> None:
    message = incoming(body=b"octets")
    assert (message.body_kind, message.body) == ("data", b"octets")


@row("`priority`")
def _priority_out() -> None:
    assert [outgoing(priority=each)[0].priority for each in (0, 9, 10)] == [0, 9, 9]


@row("`delivery-count`")
def _delivery_count() -> None:
    for count, headers in ((0, None), (1, None), (2, {"x-delivery-count": UInt(2)})):
        delivery, stated, _ = outgoing(delivery_count=count)
        assert delivery.redelivered is (count > 0)
        assert stated.application_headers == headers


@row("a `message-id` that is no UUID")
def _other_message_id() -> None:
    for said in ("m", b"m", ULong(5)):
        _, stated, _ = outgoing(message_id=said)
        assert isinstance(stated.message_id, UUID)
        assert stated.message_id.version == 5
        assert typed(stated.application_headers) == typed({"x-amqp10-message-id": said})
    _, stated, _ = outgoing(message_id=str(UUID(int=5)))
    assert stated.message_id == UUID(int=5)


@row("a `correlation-id` of type uuid or ulong")
def _other_correlation_id() -> None:
    for said, kind in ((UUID(int=5), "uuid"), (12, "ulong")):
        _, stated, _ = outgoing(correlation_id=said)
        assert stated.correlation_id == str(said).encode()
        assert stated.application_headers == {"x-correlation-id-type": kind}


@row("`to`, `reply-to-group-id`")
def _to() -> None:
    _, stated, _ = outgoing(to="there", reply_to_group_id="h")
    assert stated.application_headers == {
        "x-amqp10-to": "there",
        "x-amqp10-reply-to-group-id": "h",
    }


@row("annotations whose names begin with `x-`")
def _annotations() -> None:
    _, stated, _ = outgoing(message_annotations={Symbol("x-opt-note"): "n"})
    assert stated.application_headers == {"x-opt-note": "n"}


@row("the dead-letter history")
def _history() -> None:
    history = [{"source": "q", "reason": "rejected"}]
    _, stated, _ = outgoing(message_annotations={Symbol("x-opt-dead-letter-history"): history})
    assert stated.application_headers["x-first-death-reason"] == "rejected"


@row("a value that is a map, a list or a string")
def _common_bodies() -> None:
    _, stated, body = outgoing({"a": [UInt(1)]})
    assert stated.content_type == "amqp/map"
    assert typed(read_value(b"\xa8" + body)) == typed({"a": [UInt(1)]})
    _, stated, body = outgoing([Timestamp(5000), None], body_kind="value")
    assert stated.content_type == "amqp/list"
    assert typed(read_value(b"\xa9" + body)) == typed([Datetime(5), None])
    _, stated, body = outgoing("text")
    assert (stated.content_type, body) == ("text/plain", b"text")


@row("another body that is not data")
def _other_bodies() -> None:
    _, stated, body = outgoing(5)
    assert stated.application_headers == {"x-basic-type": "amqp-1.0"}
    assert Message.decode(body).body == 5


def _rows() -> list[str]:
    section = (
        GUIDE.read_text("utf-8").partition("## Conversion of messages")[2].partition("\n## ")[0]
    )
    found = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    return [each for each in found if each not in ("0-10", "1.0")]


@pytest.mark.req("N19")
@pytest.mark.parametrize("text", sorted(set(_rows())))
def test_the_table_is_true(text: str) -> None:
    _CHECKS[text]()


def test_the_table_has_a_row_for_each_check() -> None:
    assert set(_rows()) == set(_CHECKS)


# --- with 0-9-1 --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    delivery=st.fixed_dictionaries(
        {},
        optional={
            "priority": st.integers(0, 9),
            "delivery_mode": st.sampled_from([1, 2]),
            "ttl": st.integers(0, (1 << 32) - 1),
            "timestamp": st.integers(0, 1 << 40),
            "routing_key": _TEXT,
            "redelivered": st.booleans(),
        },
    ),
    stated=st.fixed_dictionaries(
        {},
        optional={
            "message_id": st.uuids(),
            "correlation_id": _TEXT.map(str.encode),
            "reply_to": st.just(ReplyTo(exchange="", routing_key="q")),
            "content_type": st.just("text/plain"),
            "content_encoding": st.just("gzip"),
            "user_id": st.just(b"ada"),
            "app_id": _TEXT.map(str.encode),
        },
    ),
    headers=st.dictionaries(
        st.text("abc", min_size=1, max_size=9)
        | st.sampled_from(["qpid.subject", "JMSXGroupID", "x-amqp10-to"]),
        _TEXT,
        max_size=4,
    )
    | st.dictionaries(
        st.text("abc", min_size=1, max_size=9),
        st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | _TEXT | st.none(),
        max_size=4,
    )
    | st.just({"JMSXGroupSeq": Int(7)}),
    body=st.binary(max_size=300),
)
def test_a_message_goes_through_0_9_1(
    delivery: Any, stated: Any, headers: dict[str, Any], body: bytes
) -> None:
    header = write_entries(
        [
            DeliveryProperties(exchange="e", **delivery),
            MessageProperties(application_headers=headers, **stated),
        ]
    )
    seen = from_message(payload_of(header, [body], exchange="e"), "q")
    assert (seen.body, seen.exchange) == (body, "e")
    assert seen.routing_key == delivery.get("routing_key", "")
    payload = to_message(
        seen.properties, seen.body, exchange=seen.exchange, routing_key=seen.routing_key
    )
    after, heard, _ = structs_of(content_of(payload)[0])
    assert after.exchange == "e"
    assert after.routing_key == delivery.get("routing_key", "")
    for name in ("priority", "delivery_mode", "timestamp", "ttl"):
        assert getattr(after, name) == delivery.get(name), name
    # A client of 0-9-1 that publishes the message does not say that it was delivered before.
    assert not after.redelivered
    if heard.application_headers:
        heard.application_headers.pop("x-delivery-count", None)
    for name in (
        "correlation_id",
        "reply_to",
        "content_type",
        "content_encoding",
        "user_id",
        "app_id",
    ):
        assert getattr(heard, name) == stated.get(name), name
    assert heard.message_id == stated.get("message_id")
    assert typed(heard.application_headers or {}) == typed(headers)


@pytest.mark.slow
@pytest.mark.req("N19")
@given(
    said=st.fixed_dictionaries(
        {},
        optional={
            "content_type": st.just("text/plain"),
            "content_encoding": st.just("gzip"),
            "headers": st.dictionaries(
                st.text("abc", min_size=1, max_size=9),
                st.booleans()
                | st.integers(-(1 << 63), (1 << 63) - 1)
                | _TEXT
                | st.binary(max_size=9)
                | st.integers(0, 1 << 40).map(Seconds)
                | st.builds(Decimal, st.integers(0, 255), st.integers(-(1 << 31), (1 << 31) - 1))
                | st.lists(st.booleans(), max_size=2)
                | st.dictionaries(st.text("xyz", min_size=1), st.integers(0, 9), max_size=2),
                max_size=4,
            ),
            "delivery_mode": st.sampled_from([1, 2]),
            "priority": st.integers(0, 9),
            "correlation_id": _TEXT,
            "reply_to": st.sampled_from(["q", "/exchanges/e/k"]),
            "expiration": st.integers(0, (1 << 32) - 1).map(str),
            "message_id": _TEXT,
            "timestamp": st.integers(0, 1 << 40),
            "type": _TEXT.filter(lambda text: text != "amqp-1.0"),
            "user_id": _TEXT,
            "app_id": _TEXT,
        },
    ),
    key=_TEXT,
    body=st.binary(max_size=300),
)
def test_a_message_of_0_9_1_goes_through_0_10(said: Any, key: str, body: bytes) -> None:
    payload = to_message(BasicProperties(**said), body, exchange="e", routing_key=key)
    header, pieces = content_of(payload)
    found = from_message(payload_of(header, pieces, exchange="e"), "q")
    assert (found.body, found.exchange, found.routing_key) == (body, "e", key)
    heard = found.properties
    # Type and message-id were headers on the way, so that empty headers may be absent now.
    said["headers"], heard.headers = said.get("headers") or {}, heard.headers or {}
    for name in BasicProperties.__struct_fields__:
        assert typed(getattr(heard, name)) == typed(said.get(name)), name


def test_ids_of_other_types_are_the_same_each_time() -> None:
    one, other = (outgoing(message_id="m")[1].message_id for _ in range(2))
    assert one == other != uuid5(UUID(int=0), "m")
