from __future__ import annotations

import datetime as dt
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed_values import same, values

from amqp_rt.codec.composites import STRING, UINT, composite
from amqp_rt.container.payloads import (
    AMQP_VALUE,
    check_payload_type,
    decode_payload,
    encode_payload,
)
from amqp_rt.errors import DecodeError, EncodeError
from amqp_rt.message import Message, Sequence
from amqp_rt.values import (
    Array,
    Char,
    Decimal64,
    Described,
    Float32,
    Int,
    Map,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
)

U = UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6")
NOON = dt.datetime(2024, 5, 6, 12, 0, 0, 123000, tzinfo=dt.UTC)


class Order(msgspec.Struct):
    sku: str
    quantity: int


class Renamed(msgspec.Struct, rename="camel"):
    unit_price: Decimal
    placed_at: dt.datetime | None = None


class Checked(msgspec.Struct):
    quantity: Annotated[int, msgspec.Meta(ge=1)]

    def __post_init__(self) -> None:
        if self.quantity == 13:
            raise ValueError("thirteen brings bad luck")


@dataclass
class Item:
    name: str
    tags: list[str] = field(default_factory=list)


class Row(TypedDict):
    a: int


class Pair(NamedTuple):
    x: int
    y: int


class Colour(Enum):
    RED = "red"


class Size(StrEnum):
    L = "large"


class Level(IntEnum):
    HIGH = 3


@composite("example:point:list", ("x", UINT), ("label", STRING))
class Point(msgspec.Struct):
    x: int
    label: str | None = None


@composite("example:circle:list", ("radius", UINT))
class Circle(msgspec.Struct):
    radius: int


def _unhashable(use: str) -> str:
    """Return how Python says that a list is no *use*."""
    if sys.version_info >= (3, 14):
        return f"cannot use 'list' as {use} (unhashable type"
    return "unhashable type"


#: What msgspec says of octets that are not UTF-8, and of lists in sets: before version 0.23, and since.
NOT_UTF8 = ("'utf-8' codec can't decode byte", "Invalid UTF-8 encoded string")
NOT_HASHABLE = (_unhashable("a set element"), "Expected a hashable value, got `list` - at `$[0]`")


def sent(value: object, content_type: str | None = None) -> Message:
    """The message that a receiver gets."""
    content_type, body, kind = encode_payload(value, content_type)
    message = Message(body, body_kind=kind, content_type=content_type)
    return Message.decode(message.encode())


# --- Round trips ---

JSON = "application/json"

#: Value, its type, the content-type and the body that others see.
SENT: list[tuple[Any, Any, str | None, object]] = [
    (Order("A-1", 2), Order, JSON, b'{"sku":"A-1","quantity":2}'),
    ([Order("A-1", 2)], list[Order], JSON, b'[{"sku":"A-1","quantity":2}]'),
    (Renamed(Decimal("9.50")), Renamed, JSON, b'{"unitPrice":"9.50","placedAt":null}'),
    (Item("n", ["t"]), Item, JSON, b'{"name":"n","tags":["t"]}'),
    ({"a": 1}, Row, JSON, b'{"a":1}'),
    ({"a": [1, None]}, Any, JSON, b'{"a":[1,null]}'),
    (Pair(1, 2), Pair, JSON, b"[1,2]"),
    ({1, 2}, set[int], JSON, b"[1,2]"),
    ((1, "x"), tuple[int, str], JSON, b'[1,"x"]'),
    ([], list[int], JSON, b"[]"),
    (b"octets", bytes, None, b"octets"),
    (b"", Any, None, b""),
    ("text", str, None, "text"),
    ("", Any, None, ""),
    (5, int, None, 5),
    (5, float, None, 5),
    (0.5, float, None, 0.5),
    (True, bool, None, True),
    (None, None, None, None),
    (None, Order | None, None, None),
    (U, UUID, None, U),
    (NOON, dt.datetime, None, Timestamp(1714996800123)),
    (dt.datetime(2024, 5, 6), dt.datetime, None, "2024-05-06T00:00:00"),  # noqa: DTZ001
    (dt.date(2024, 5, 6), dt.date, None, "2024-05-06"),
    (dt.timedelta(seconds=90), dt.timedelta, None, "PT90S"),
    (Decimal("9.50"), Decimal, None, "9.50"),
    (Colour.RED, Colour, None, "red"),
    (Size.L, Size, None, "large"),
    (Level.HIGH, Level, None, 3),
    (Symbol("sym"), str, None, Symbol("sym")),
    (Symbol("sym"), Symbol, None, Symbol("sym")),
    (UInt(7), int, None, UInt(7)),
    (UInt(7), UInt, None, UInt(7)),
    (UByte(7), float, None, UByte(7)),
    (Float32(0.5), float, None, Float32(0.5)),
    (Char("c"), str, None, Char("c")),
    (Timestamp(5), int, None, Timestamp(5)),
    (Timestamp(5), Timestamp, None, Timestamp(5)),
    (Decimal64(b"12345678"), Decimal64, None, Decimal64(b"12345678")),
    (Described(Symbol("d"), 5), Described, None, Described(Symbol("d"), 5)),
    (Sequence([1, 2]), list[int], None, Sequence([1, 2])),
    (Point(1, "p"), Point, None, Described(Symbol("example:point:list"), [UInt(1), "p"])),
    (Point(1), Point | Circle, None, Described(Symbol("example:point:list"), [UInt(1)])),
]


@pytest.mark.req("A3", "T11")
@pytest.mark.parametrize(("value", "kind", "content_type", "body"), SENT)
def test_what_is_sent_is_what_others_see_and_what_comes_back(
    value: Any, kind: Any, content_type: str | None, body: object
) -> None:
    message = sent(value)

    assert message.content_type == content_type
    assert same(message.body, body)
    back = decode_payload(message, kind)
    assert back == value
    if kind in (str, int, float):
        assert type(back) is kind


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    "content_type",
    [
        JSON,
        "application/json; charset=utf-8",
        "Application/Vnd.Shop+JSON",
        "application/msgpack",
        "application/x-msgpack",
        AMQP_VALUE,
    ],
)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Order("A-1", 2), Order),
        (Renamed(Decimal("9.50"), NOON), Renamed),
        ([Item("n"), Item("m", ["t"])], list[Item]),
        ({"a": 1}, Row),
        ({"x": [1, 2.5, "s", None, True]}, Any),
        ("text", str),
        (5, int),
        (None, None),
        (U, UUID),
        (NOON, dt.datetime),
        (Decimal("0.1"), Decimal),
        ({Colour.RED: {1}}, dict[Colour, set[int]]),
    ],
)
def test_every_content_type_brings_the_value_back(value: Any, kind: Any, content_type: str) -> None:
    message = sent(value, content_type)
    assert decode_payload(message, kind) == value
    assert message.content_type == (None if content_type == AMQP_VALUE else content_type)
    assert message.body_kind == ("value" if content_type == AMQP_VALUE else "data")


@pytest.mark.req("A3", "T11")
def test_structures_as_amqp_values_are_maps() -> None:
    assert sent(Renamed(Decimal("9.50"), NOON), AMQP_VALUE).body == {
        "unitPrice": "9.50",
        "placedAt": Timestamp(1714996800123),
    }
    assert sent(Item("n", ["t"]), AMQP_VALUE).body == {"name": "n", "tags": ["t"]}
    assert sent([Point(1), UInt(5), b"b"], AMQP_VALUE).body == [
        Described(Symbol("example:point:list"), [1]),
        5,
        b"b",
    ]


@pytest.mark.req("A3")
def test_json_knows_the_values_of_amqp() -> None:
    value = {
        Symbol("s"): Symbol("v"),
        "n": UInt(5),
        "f": Float32(0.5),
        "t": Timestamp(1714996800123),
        "far": Timestamp(1 << 62),
        "m": Map([("k", Int(1))]),
        "a": Array([UByte(1)]),
    }
    plain = {"s": "v", "n": 5, "f": 0.5, "far": 1 << 62, "m": {"k": 1}, "a": [1]}
    moment = dt.datetime(2024, 5, 6, 12, 0, 0, 123000, tzinfo=dt.UTC)

    found = json.loads(encode_payload(value, JSON)[1])
    assert found == plain | {"t": "2024-05-06T12:00:00.123000Z"}
    found = msgspec.msgpack.decode(encode_payload(value, "application/msgpack")[1])
    assert found == plain | {"t": found["t"]}
    assert msgspec.convert(found["t"], dt.datetime) == moment


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    ("content_type", "octets"),
    [
        ("text/plain", "Grüße".encode()),
        ("text/plain; charset=utf-8", "Grüße".encode()),
        ('TEXT/html; x=y; Charset="ISO-8859-1"', "Grüße".encode("latin-1")),
        ("text/plain;charset=utf-16", "Grüße".encode("utf-16")),
        ("application/xml", "Grüße".encode()),
    ],
)
def test_text_is_in_the_charset_that_is_said(content_type: str, octets: bytes) -> None:
    message = sent("Grüße", content_type)
    assert message.body == octets
    if content_type != "application/xml":
        assert decode_payload(message, str) == decode_payload(message, Any) == "Grüße"
    assert decode_payload(message, bytes) == octets


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", int, 5),
        ("0.5", float, 0.5),
        ("x", Literal["x"], "x"),
        ("true", bool, True),
        ("9.50", Decimal, Decimal("9.50")),
    ],
)
def test_numbers_can_be_read_out_of_a_text(text: str, kind: Any, value: object) -> None:
    assert decode_payload(sent(text, "text/plain"), kind) == value


@pytest.mark.req("A3")
def test_encoded_bytes_are_sent_as_they_are() -> None:
    for content_type in (JSON, "image/png", "text/plain"):
        message = sent(b'{"sku":"A-1","quantity":2}', content_type)
        assert message.body == b'{"sku":"A-1","quantity":2}'
        assert decode_payload(message, bytes) == message.body
    assert decode_payload(sent(b"x", "image/png"), Any) == b"x"
    assert encode_payload(bytearray(b"x")) == (None, b"x", "data")
    assert encode_payload(memoryview(b"x"), "image/png") == ("image/png", b"x", "data")


@pytest.mark.req("A3")
@pytest.mark.parametrize("content_type", [None, "application/octet-stream"])
def test_data_that_say_nothing_are_what_is_asked_for(content_type: str | None) -> None:
    body = b'{"sku":"A-1","quantity":2}'
    message = Message.decode(Message(body, content_type=content_type).encode())
    assert decode_payload(message, bytes) == body
    assert decode_payload(message, Any) == body
    assert decode_payload(message, object) == body
    assert decode_payload(message, bytes | None) == body
    assert decode_payload(message, str) == body.decode()
    assert decode_payload(message, Order) == Order("A-1", 2)
    assert decode_payload(message, dict) == {"sku": "A-1", "quantity": 2}


@pytest.mark.req("A3")
def test_values_of_amqp_become_what_is_asked_for() -> None:
    body = {Symbol("sku"): Char("A"), Symbol("quantity"): UInt(2)}
    message = Message.decode(Message(body).encode())
    assert decode_payload(message, Order) == Order("A", 2)
    assert same(decode_payload(message, Any), body)
    assert decode_payload(message, dict[str, Any]) == {"sku": "A", "quantity": 2}
    message = Message({"at": Timestamp(5), "n": Timestamp(6)})
    assert decode_payload(message, dict[str, int]) == {"at": 5, "n": 6}
    assert decode_payload(message, dict[str, dt.datetime])["at"] == Timestamp(5).datetime
    message = Message(Map([(True, 1), (UInt(2), 2)]))
    assert decode_payload(message, dict[bool | int, int]) == {True: 1, 2: 2}
    message = Message([Described(Symbol("d"), [1]), Array([Symbol("s")])])
    assert decode_payload(message, list[list[Any]]) == [[1], ["s"]]
    assert decode_payload(Message(Timestamp(1 << 62)), int) == 1 << 62
    assert decode_payload(sent(Array([UInt(1)])), list[int]) == [1]
    assert decode_payload(sent(Described(Symbol("d"), 5)), int) == 5
    assert decode_payload(Message(5), str | int) == 5
    assert decode_payload(Message.decode(b""), None) is None
    assert decode_payload(Message.decode(b""), Any) is None


# --- JSON as other clients send it ---


def foreign(body: Any, content_type: str) -> Message:
    """An amqp-value with a content-type, which our own messages do not have (§3.2.4)."""
    front = bytes(Message(b"", content_type=content_type).encode()).removesuffix(
        b"\x00\x53\x75\xa0\x00"
    )
    return Message.decode(front + bytes(Message(body, body_kind="value").encode()))


TEXT = '{"sku":"A-1","quantity":2}'


@pytest.mark.req("A3")
@pytest.mark.parametrize("content_type", [JSON, "application/vnd.shop+json; charset=utf-8"])
@pytest.mark.parametrize("body", [TEXT, TEXT.encode()])
def test_the_content_type_of_a_string_or_binary_value_is_believed(
    body: str | bytes, content_type: str
) -> None:
    message = foreign(body, content_type)
    assert decode_payload(message, Order) == Order("A-1", 2)
    assert decode_payload(message, Any) == {"sku": "A-1", "quantity": 2}
    assert decode_payload(message, Order | None) == Order("A-1", 2)
    # A handler that asks for the text or the octets gets them.
    assert decode_payload(message, bytes) == TEXT.encode()
    assert decode_payload(message, type(body)) == body
    with pytest.raises(DecodeError, match=r"Expected `int`, got `object`"):
        decode_payload(message, int)


@pytest.mark.parametrize(
    ("body", "content_type", "kind", "found"),
    [
        ('"x"', JSON, str, "x"),
        ("no json", JSON, str, "no json"),
        ("5", JSON, int, 5),
        (b"\x05", "application/msgpack", int, 5),
        ("Grüße".encode("latin-1"), "text/plain; charset=latin1", str, "Grüße"),
        (b"x", "image/png", Any, b"x"),
        ("x", "image/png", str, "x"),
        ({"sku": "A", "quantity": 1}, JSON, Order, Order("A", 1)),
        (5, JSON, int, 5),
    ],
)
def test_values_with_a_content_type(body: Any, content_type: str, kind: Any, found: Any) -> None:
    assert decode_payload(foreign(body, content_type), kind) == found


# --- Types that are no payloads ---


class Foreign:
    """A class that msgspec knows nothing of."""


class Holder(msgspec.Struct):
    inside: list[Foreign]


class Recursive(msgspec.Struct):
    name: str
    parent: Recursive | None = None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Foreign, "Foreign cannot be decoded from a message: use a msgspec.Struct, a dataclass"),
        (Foreign | None, "Foreign (in "),
        (dict[str, Foreign], "Foreign (in dict[str, "),
        (Holder, "Foreign (in Holder) cannot be decoded"),
        (Order | Renamed, "all Struct types must be tagged"),
        (int | Foreign, "cannot be decoded: Type unions containing a custom type"),
        (complex, "complex cannot be decoded"),
    ],
)
def test_a_type_that_payloads_cannot_have_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        check_payload_type(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for _, kind, *_ in SENT if kind is not Any),
        *(Any, object, Recursive, Mapping[str, int], Checked, list[Pair], msgspec.Raw),
        Annotated[int, msgspec.Meta(ge=1)],
    ],
)
def test_any_other_type_is_a_payload(kind: Any) -> None:
    check_payload_type(kind)


# --- What does not fit ---


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        (sent({"sku": "A", "quantity": "2"}), Order, "Expected `int`, got `str` - at `$.quantity`"),
        (sent({"sku": "A"}), Order, "Object missing required field `quantity`"),
        (sent([{"a": 1}, {"a": "x"}]), list[Row], "Expected `int`, got `str` - at `$[1].a`"),
        (sent({"quantity": 0}), Checked, "Expected `int` >= 1 - at `$.quantity`"),
        (sent({"quantity": 13}), Checked, "thirteen brings bad luck"),
        (sent({"quantity": 0}, AMQP_VALUE), Checked, "Expected `int` >= 1 - at `$.quantity`"),
        (sent({"quantity": 0}, "application/msgpack"), Checked, "Expected `int` >= 1"),
        (sent("5"), int, "Expected `int`, got `str`"),
        (sent(5), str, "Expected `str`, got `int`"),
        (sent(None), Order, "Expected `object`, got `null`"),
        (sent("five", "text/plain"), int, "Expected `int`, got `str`"),
        (sent(True), int, "Expected `int`, got `bool`"),
        (sent(b"{", JSON), Order, "Input data was truncated"),
        (sent(b"", JSON), Any, "Input data was truncated"),
        (sent(b'{"a":1} x', JSON), Any, "JSON is malformed"),
        (sent(b'"\xff"', JSON), str, NOT_UTF8),
        (sent(b"\xc1", "application/msgpack"), Any, "MessagePack data is malformed"),
        (sent(b"\xff"), str, "the text is not utf-8: "),
        (sent(b"\xff", "text/plain"), str, "the text is not utf-8: "),
        (sent(b"a", "text/plain;charset=zlib"), str, "the charset of 'text/plain;charset=zlib'"),
        (sent(b"no json"), Order, "JSON is malformed"),
        (sent(b"x", "image/png"), Order, "Order cannot be made of 'image/png'"),
        (sent(b"x", "image/png"), str, "str cannot be made of 'image/png'"),
        (sent(Circle(5)), Point, "point expected, not a value described by "),
        (sent(b"[[1]]", JSON), set[Any], NOT_HASHABLE),
        (sent(b"[" * 100_000, JSON), Any, "it is nested too deeply"),
        (sent(b"\x91" * 100_000, "application/msgpack"), Any, "it is nested too deeply"),
        (Message(Map([([1], 1)])), dict, _unhashable("a dict key")),
        (sent(b'"%s"' % (b"z" * 9999), JSON), Literal["a"], "Invalid enum value 'zzz"),
        (Message(b"", content_encoding="br", content_type=JSON), Any, "content-encoding 'br'"),
        (Message(b"", content_encoding="gzip"), str, "the octets of gzip end too early"),
    ],
)
def test_what_is_wrong_with_a_payload_is_said(
    message: Message, kind: Any, said: str | tuple[str, ...]
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_payload(message, kind)
    assert caught.value.description.startswith(said)
    assert len(caught.value.description) < 320
    assert caught.value.condition == "amqp:decode-error"


def test_bytes_in_an_encoding_that_is_not_decoded_can_be_had_as_they_came() -> None:
    assert decode_payload(Message(b"br", content_encoding="br"), bytes) == b"br"


@pytest.mark.parametrize(
    ("value", "content_type", "said"),
    [
        (object(), JSON, "the payload cannot be encoded: object has no encoding there"),
        ([object()], None, "the payload cannot be encoded: object has no encoding there"),
        ({"f": print}, "application/msgpack", "the payload cannot be encoded: builtin_function"),
        (1 << 70, "application/msgpack", "the payload cannot be encoded: can't serialize ints"),
        (["\ud800"], None, "the payload cannot be encoded: 'utf-8' codec"),
        (Order("A", 1), "text/plain", "Order cannot be sent as 'text/plain': give bytes, or text"),
        (5, "image/png", "int cannot be sent as 'image/png': give bytes, or text"),
        ("é", "text/plain; charset=ascii", "the text is not ascii: "),
        ("e", "text/plain; charset=rot13", "the charset of 'text/plain; charset=rot13'"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: Any, content_type: str | None, said: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode_payload(value, content_type)
    assert caught.value.description.startswith(said)


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for content_type in (None, "application/msgpack", AMQP_VALUE):
        with pytest.raises(EncodeError, match="nested too deeply"):
            encode_payload(endless, content_type)


def test_what_has_no_amqp_type_is_refused_when_it_is_written() -> None:
    with pytest.raises(EncodeError, match="the body: a object has no AMQP type"):
        sent(object())
    with pytest.raises(EncodeError, match="the body: "):
        sent(1 << 70)


# --- Anything ---


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=9), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(json_values, st.sampled_from([None, JSON, "application/msgpack", AMQP_VALUE]))
def test_any_value_comes_back(value: Any, content_type: str | None) -> None:
    assert decode_payload(sent(value, content_type), Any) == value


KINDS: list[Any] = [
    Any, object, str, int, float, bool, bytes, None, UUID, dt.datetime, dt.date, Decimal, list, dict,
    set[Any], Order, Item, Row, Pair, Point, Point | Circle, Colour, Order | None, list[Order],
    dict[str, int], tuple[int, ...], Mapping[str, Any], Symbol, UInt, Described, Literal["a", 1],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.req("A3", "T9")
@given(values, st.sampled_from(KINDS))
def test_any_amqp_value_is_a_payload_or_a_decode_error(value: Any, kind: Any) -> None:
    message = Message(value, body_kind="value")
    try:
        decode_payload(message, kind)
    except DecodeError:
        pass


@pytest.mark.req("A3", "T9")
@given(
    st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([None, JSON, "application/msgpack", "text/plain", "application/octet-stream"]),
    st.sampled_from(KINDS),
)
def test_any_data_are_a_payload_or_a_decode_error(
    data: bytes, content_type: str | None, kind: Any
) -> None:
    try:
        decode_payload(Message(data, content_type=content_type), kind)
    except DecodeError:
        pass


@pytest.mark.slow
@given(json_values | values)
def test_whatever_can_be_sent_is_encoded_or_refused(value: Any) -> None:
    for content_type in (None, JSON, "application/msgpack", AMQP_VALUE):
        try:
            sent(value, content_type)
        except EncodeError:
            pass


def test_a_ulong_descriptor_tells_composites_apart() -> None:
    described = Described(ULong(0x1D), ["amqp:not-found"])
    assert decode_payload(Message(described), Any) == described
