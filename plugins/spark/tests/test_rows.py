"""Messages as rows and back, and values as VARIANT."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

import pytest
from amqp_rt_spark import variant
from amqp_rt_spark.malformed import decoded
from amqp_rt_spark.options import Options
from amqp_rt_spark.rows import Place, RowMaker, check_columns, payload_of
from amqp_rt_spark.schema import columns_of, ddl_of
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from typed_values import SCALARS, same, text, values

from amqp_rt import Message
from amqp_rt.errors import DecodeError
from amqp_rt.message import Sequence
from amqp_rt.values import (
    Byte,
    Decimal32,
    Described,
    Float32,
    Int,
    Map,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

pytestmark = pytest.mark.req("K1")

#: Values that a VARIANT keeps as they are.
KEPT = st.recursive(
    st.one_of(
        *(SCALARS[kind] for kind in (type(None), bool, Byte, Short, Int, int, float, Float32)),
        *(SCALARS[kind] for kind in (uuid.UUID, bytes)),
        text,
        st.integers(-(2**40), 2**40).map(Timestamp),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)


class Stored:
    """As pyspark hands a VARIANT over."""

    def __init__(self, value: Any, metadata: Any) -> None:
        self.value = value
        self.metadata = metadata


def row_of(message: Message, **options: Any) -> dict[str, Any]:
    """The row of *message*, as a sink would get it."""
    chosen = Options(**options)
    made = RowMaker(chosen).row(message, Place("here", 3, 17))
    row = dict(zip(columns_of(chosen), made, strict=True))
    for name in ("body_variant", "application_properties", "message_annotations"):
        if row.get(name) is not None:
            row[name] = Stored(*row[name])
    if row.get("header") is not None:
        names = ("durable", "priority", "ttl", "first_acquirer", "delivery_count")
        row["header"] = dict(zip(names, row["header"], strict=True))
    if row.get("properties") is not None:
        names = (
            *("message_id", "message_id_type", "user_id", "to", "subject", "reply_to"),
            *("correlation_id", "correlation_id_type", "content_type", "content_encoding"),
            *("absolute_expiry_time", "creation_time", "group_id", "group_sequence"),
            "reply_to_group_id",
        )
        row["properties"] = dict(zip(names, row["properties"], strict=True))
        for name in ("absolute_expiry_time", "creation_time"):
            if (micros := row["properties"][name]) is not None:
                row["properties"][name] = dt.datetime.fromtimestamp(micros / 1e6, dt.UTC)
    return row


# --- VARIANT -------------------------------------------------------------------------------------


@pytest.mark.slow
@given(KEPT)
def test_a_variant_keeps_what_it_has_a_type_for(value: object) -> None:
    found = variant.decode(*variant.encode(value))
    assert same(sorted_maps(found), sorted_maps(value))


def sorted_maps(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_maps(value[key]) for key in sorted(value)}
    return [sorted_maps(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow
@given(st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 1), st.booleans()), values))
def test_the_short_way_makes_the_same_variant(value: dict[Any, Any]) -> None:
    """Maps of values without parts, whose shapes are remembered: a Map goes the long way."""
    for _ in range(2):
        assert variant.encode(value) == variant.encode(Map(value.items()))


def test_peers_do_not_fill_the_memory_with_shapes() -> None:
    for number in range(2_000):
        variant.encode({f"k{number}": number})
    variant.encode({"k" * 100_000: 1})
    assert len(variant._SHAPES) <= variant._SHAPES_MAX
    assert sum(len(key) for shape in variant._SHAPES for key in shape) < 100_000


@pytest.mark.slow
@given(values)
def test_whatever_amqp_has_becomes_a_variant(value: object) -> None:
    variant.decode(*variant.encode(value))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (UByte(255), Short(255)),
        (UShort(65_535), Int(65_535)),
        (UInt(2**32 - 1), 2**32 - 1),
        (ULong(2**63 - 1), 2**63 - 1),
        (ULong(2**64 - 1), ULong(2**64 - 1)),
        (Symbol("a"), "a"),
        (Described(Symbol("d"), [1]), [1]),
        (Map([(Symbol("a"), 1), (2, "b")]), {"2": "b", "a": 1}),
        (Decimal32(b"1234"), b"1234"),
        (list(range(300)), list(range(300))),
        ({f"k{number:04}": number for number in range(700)},) * 2,
        ("x" * 63, "x" * 63),
        ("x" * 70_000, "x" * 70_000),
    ],
)
def test_what_a_variant_makes_of_it(value: object, found: object) -> None:
    assert same(variant.decode(*variant.encode(value)), found)


@pytest.mark.parametrize(
    ("value", "metadata"),
    [
        (b"", b"\x11\0\0"),
        (b"\0", b""),
        (b"\0", b"\x12\0\0"),
        (b"\0", b"\x11\x05\0"),
        (b"\x0c", b"\x11\0\0"),
        (bytes([16 << 2, 9, 0, 0, 0, 65]), b"\x11\0\0"),
        (bytes([63 << 2]), b"\x11\0\0"),
        (b"\x03\xff\0", b"\x11\0\0"),
        (b"\x02\x01\x05\0\x01\0", b"\x11\0\0"),
        (b"\x03\x01\x00\x01\x05\xff", b"\x11\0\0"),
    ],
)
def test_what_is_no_variant(value: bytes, metadata: bytes) -> None:
    with pytest.raises(ValueError, match="VARIANT"):
        variant.decode(value, metadata)


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_octets_at_random_do_no_harm(value: bytes, names: bytes) -> None:
    try:
        variant.decode(value, b"\x11" + names)
    except ValueError:
        pass


def test_a_variant_is_not_nested_without_end() -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    with pytest.raises(ValueError, match="nested more than 100"):
        variant.encode(value)
    # A list that holds itself, as far as its octets can say so.
    deep = b"\x00"
    for _ in range(150):
        size = len(deep)
        deep = bytes([0b0111, 1, 0, 0, *size.to_bytes(2, "little")]) + deep
    with pytest.raises(ValueError, match="nested more than 100"):
        variant.decode(deep, b"\x11\0\0")


@pytest.mark.slow
@given(KEPT)
def test_spark_reads_the_same(value: object) -> None:
    types = pytest.importorskip("pyspark.sql.types", reason="pyspark is not installed")
    # Spark's Python half knows no uuid in a VARIANT, though the other half does.
    assume(not holds(value, uuid.UUID))
    found = types.VariantVal(*variant.encode(value)).toPython()
    if not holds(value, (float, Timestamp)):
        assert found == value


def holds(value: object, kinds: Any) -> bool:
    if isinstance(value, dict):
        return any(holds(each, kinds) for each in value.values())
    if isinstance(value, list):
        return any(holds(each, kinds) for each in value)
    return isinstance(value, kinds)


# --- Round trips ---------------------------------------------------------------------------------

properties = st.fixed_dictionaries(
    {},
    optional={
        "message_id": st.one_of(*(SCALARS[kind] for kind in (ULong, uuid.UUID, bytes, str))),
        "user_id": st.binary(max_size=20),
        "to": text,
        "subject": text,
        "reply_to": text,
        "correlation_id": st.one_of(*(SCALARS[kind] for kind in (ULong, uuid.UUID, bytes, str))),
        "absolute_expiry_time": st.integers(0, 2**40).map(Timestamp),
        "creation_time": st.integers(0, 2**40).map(Timestamp),
        "group_id": text,
        "group_sequence": st.integers(0, 2**32 - 1),
        "reply_to_group_id": text,
    },
)


@pytest.mark.slow
@given(
    values,
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        st.one_of(*SCALARS.values()),
        max_size=4,
    ),
    properties,
    st.booleans(),
)
def test_a_raw_row_is_sent_again_octet_for_octet(
    body: Any, mine: dict[str, Any], said: dict[str, Any], durable: bool
) -> None:
    message = Message(body, application_properties=mine, durable=durable, ttl_ms=7, **said)
    came = Message.decode(message.encode())
    row = row_of(came, raw=True)
    again = Message.decode(payload_of(row, Options(durable=False)))
    assert again.bare == came.bare
    assert (again.durable, again.ttl_ms) == (durable, 7)


@pytest.mark.slow
@given(KEPT, properties)
def test_what_a_variant_keeps_comes_back_without_raw(body: Any, said: dict[str, Any]) -> None:
    message = Message(body, body_kind="value", application_properties={"a": Short(7)}, **said)
    came = Message.decode(message.encode())
    again = Message.decode(payload_of(row_of(came), Options()))
    assert same(sorted_maps(again.body), sorted_maps(came.body))
    assert same(dict(again.application_properties), {"a": Short(7)})
    assert again.properties == came.properties


@pytest.mark.parametrize(
    "message",
    [
        Message(b"octets", content_type="text/plain"),
        Message([b"two", b"parts"], body_kind="data"),
        Message("text"),
        Message(Sequence([1, "two"])),
        Message(None),
        Message(b"value", body_kind="value"),
        Message(b"x", message_annotations={Symbol("x-opt-a"): 1, Symbol("x-opt-offset"): "12"}),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_each_kind_of_body_comes_back(message: Message, raw: bool) -> None:
    again = Message.decode(payload_of(row_of(message, raw=raw), Options()))
    assert (again.body, again.body_kind) == (message.body, message.body_kind)
    assert again.content_type == message.content_type
    # A place in a log is no part of the message.
    assert "x-opt-offset" not in again.message_annotations
    assert again.message_annotations.get("x-opt-a") == message.message_annotations.get("x-opt-a")
    if raw:
        assert again.bare == message.bare


def test_a_message_without_a_body() -> None:
    came = Message.decode(Message("x", subject="s").encode_front())
    row = row_of(came)
    assert (row["body_kind"], row["body"]) == ("none", None)
    again = Message.decode(payload_of(row, Options()))
    assert (again.body_kind, again.subject) == (None, "s")


# --- What a row holds ------------------------------------------------------------------------------


def test_the_columns_of_a_record() -> None:
    message = Message(
        b'{"a": [1, 2.5]}',
        content_type="application/json; charset=utf-8",
        message_id=ULong(5),
        creation_time=Timestamp(1_000),
        message_annotations={Symbol("x-opt-enqueued-time"): Timestamp(2_000)},
        application_properties={"n": UInt(7)},
        priority=9,
    )
    row = row_of(message)
    assert (row["address"], row["partition"], row["offset"]) == ("here", 3, 17)
    assert row["enqueued_time"] == 2_000_000
    assert row["body_kind"] == "data"
    assert variant.decode(row["body_variant"].value, row["body_variant"].metadata) == {
        "a": [1, 2.5]
    }
    assert row["header"] == {
        "durable": False,
        "priority": 9,
        "ttl": None,
        "first_acquirer": False,
        "delivery_count": 0,
    }
    assert row["properties"]["message_id"], row["properties"]["message_id_type"] == ("5", "ulong")
    assert row_of(Message("é"), body="text")["body"] == "é"
    assert row_of(Message(b"{"), body="auto")["body_variant"] is None
    claimed = Message(b"{", content_type="application/json")
    assert row_of(claimed)["body_variant"] is None
    assert set(row_of(message, columns=("body", "offset"))) == {"body", "offset"}
    assert list(row_of(message, columns=("offset",), raw=True)) == ["offset", "message"]


def test_octets_that_are_no_message_are_a_row_with_all_that_can_be_read_of_them() -> None:
    placed = Message(
        message_annotations={"x-opt-sequence-number": 5, "x-opt-enqueued-time": Timestamp(5)}
    )
    payload = placed.encode_front() + b"\x00\x53\x75\xa0\x05ab"
    with pytest.raises(DecodeError):
        Message.decode(payload)
    columns = ("address", "offset", "body", "body_kind", "enqueued_time", "header", "properties")
    row = row_of(decoded(payload), on_undecodable="row", columns=(*columns, "message_annotations"))
    assert (row["address"], row["offset"], row["enqueued_time"]) == ("here", 17, 5_000)
    assert (row["body"], row["body_kind"]) == (payload, "undecodable")
    assert row["header"] is row["properties"] is None
    assert row["message_annotations"] is None
    assert row_of(decoded(payload), columns=("offset",)) == {"offset": 17}
    with pytest.raises(DecodeError, match="onUndecodable=row"):
        row_of(decoded(payload))
    # Not even its annotations.
    row = row_of(decoded(b"nothing"), on_undecodable="row", columns=("body", "enqueued_time"))
    assert row == {"body": b"nothing", "enqueued_time": None}


def test_what_cannot_be_decoded() -> None:
    bad = Message.decode(Message(b"\xff").encode())
    with pytest.raises(DecodeError, match=r"'here', partition 3, offset 17 cannot be decoded"):
        row_of(bad, body="text")
    row = row_of(bad, body="text", on_undecodable="row", columns=("offset", "body", "body_kind"))
    # A string as the column is, with what is no text in it shown as such.
    assert (row["offset"], row["body_kind"]) == (17, "undecodable")
    assert row["body"].endswith("\\xff")
    placed = Message(b"\xff", message_annotations={"x-opt-enqueued-time": Timestamp(5)})
    columns = ("enqueued_time", "body", "body_variant")
    other = row_of(placed, body="json", on_undecodable="row", columns=columns)
    assert (other["enqueued_time"], other["body"]) == (5_000, placed.encode())
    with pytest.raises(ValueError, match="filter it out"):
        payload_of(row, Options())
    with pytest.raises(DecodeError):
        row_of(Message(b"{"), body="json")


def test_the_schema() -> None:
    assert ddl_of(Options(columns=("offset", "body"), body="text")) == "offset bigint, body string"
    assert "message binary" in ddl_of(Options(raw=True))
    assert "body_variant" not in ddl_of(Options(body="binary"))


# --- What a user writes ----------------------------------------------------------------------------


class Struct(tuple[Any, ...]):  # noqa: SLOT001 - as pyspark names its fields
    """A row within a row, as pyspark's ``Row`` is made."""

    __fields__: tuple[str, ...]

    def __new__(cls, **fields: Any) -> Struct:
        made = super().__new__(cls, fields.values())
        made.__fields__ = tuple(fields)
        return made


def test_rows_that_users_make() -> None:
    def sent(options: Options = Options(), **row: Any) -> Message:  # noqa: B008 - it is frozen
        return Message.decode(payload_of(row, options))

    assert (sent(body=b"x").body, sent(body=b"x").body_kind) == (b"x", "data")
    assert sent(body=bytearray(b"x"), body_kind="value").body_kind == "value"
    assert (sent(body="x").body, sent(body="x").body_kind) == ("x", "value")
    assert sent(body="x", body_kind="data").body == b"x"
    assert [sent(body=each).body for each in (None, True, 7, 1.5)] == [None, True, 7, 1.5]
    shaped = sent(body=Struct(a=1, b=[Struct(c=dt.date(2026, 1, 2))], v=Stored(*variant.encode(2))))
    assert json.loads(shaped.body) == {"a": 1, "b": [{"c": "2026-01-02"}], "v": 2}
    assert shaped.content_type == "application/json"
    typed = sent(body=Stored(*variant.encode({"a": Int(1)})))
    assert same(typed.body, {"a": Int(1)})
    named = sent(
        body="x",
        subject="s",
        message_id=7,
        message_id_type="ulong",
        ttl=5,
        priority=1,
        user_id="u",
        application_properties={"a": 1},
    )
    assert (named.subject, named.message_id, named.ttl_ms, named.priority) == ("s", 7, 5, 1)
    assert (named.user_id, dict(named.application_properties)) == (b"u", {"a": 1})
    assert named.durable
    assert not sent(Options(durable=False), body="x").durable
    keyed = sent(Options(ordering_key="k"), body="x", k=12)
    assert keyed.message_annotations == {"x-opt-partition-key": "12"}
    assert sent(body="x", key="k").message_annotations == {"x-opt-partition-key": "k"}
    octets = sent(body="x", key=bytearray(b"k")).message_annotations
    assert octets == {"x-opt-partition-key": b"k"}
    assert sent(body="x", key=None).message_annotations == {}


@pytest.mark.parametrize("seconds", [1, -1])
def test_below_a_millisecond_times_are_cut(seconds: int) -> None:
    """Towards the past, as Spark cuts what it casts: never to a time that has not come yet."""
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC) + dt.timedelta(microseconds=1_999)
    for value in (moment, moment.astimezone().replace(tzinfo=None)):
        row = {"body": "x", "creation_time": value}
        assert Message.decode(payload_of(row, Options())).creation_time == Timestamp(
            seconds * 1_000 + 1
        )
    cut = variant.decode(*variant_of_micros(seconds * 1_000_000 + 1_999))
    assert cut == Timestamp(seconds * 1_000 + 1)


def variant_of_micros(micros: int) -> tuple[bytes, bytes]:
    """Return a VARIANT that is a timestamp, as Spark makes it."""
    return bytes((12 << 2,)) + micros.to_bytes(8, "little", signed=True), b"\x01\x00\x00"


def test_a_partition_key_is_a_column() -> None:
    chosen = {"columns": ("key", "timestamp")}
    for key, found in (("k", "k"), (b"k", "k"), (b"\xff", "\\xff"), (7, "7")):
        annotations = {
            Symbol("x-opt-partition-key"): key,
            Symbol("x-opt-enqueued-time"): Timestamp(2_000),
        }
        row = row_of(Message("x", message_annotations=annotations), **chosen)
        assert row == {"key": found, "timestamp": 2_000_000}
    assert row_of(Message("x"), **chosen) == {"key": None, "timestamp": None}
    assert not {"key", "timestamp"} & set(columns_of(Options()))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"body": "x", "application_properties": [1]}, "a map or a VARIANT"),
        ({"body": "x", "message_id": "x", "message_id_type": "uuid"}, "which is no uuid"),
        ({"body": "x", "creation_time": 7}, "takes a timestamp"),
        ({"body_kind": "sequence", "body": None}, "is in body_variant"),
    ],
)
def test_rows_that_make_no_message(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        payload_of(row, Options())


def test_columns_are_looked_at_before_anything_is_sent() -> None:
    here = Options(addresses=("a",))
    check_columns(["body", "offset", "subject", "key", "to"], here)
    check_columns(["body", "to"], Options())
    check_columns(["body", "x", "address"], replace(here, ignore_unknown_columns=True))
    check_columns(["message", "x"], replace(here, ordering_key="x"))
    check_columns(["body", "key", "x"], replace(here, ordering_key="x", dedup_column="key"))
    for names, options, why in (
        (["subject"], here, "need a column body"),
        (["key", "value"], here, "rename its column 'value' to 'body'"),
        (["body"], Options(), "needs the option address, .* or a column 'to', which names it for"),
        (["body", "sujbect"], here, "nothing becomes of the column 'sujbect': drop it"),
        (["body", "topic"], here, "column 'topic', which is Kafka's: did you mean address when"),
        (["body", "address"], here, "is the source of a row, not its destination"),
        (["body", "address"], Options(), "needs the option address"),
        (["body", "timestamp"], here, "is the column 'creation_time'"),
        (["body"], replace(here, ordering_key="k"), "a column 'k' that is not there"),
        (["body", "key", "k"], replace(here, ordering_key="k"), "orderingKey names another"),
    ):
        with pytest.raises(ValueError, match=why):
            check_columns(names, options)
