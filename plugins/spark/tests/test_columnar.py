"""The decoder in C makes the columns that ``rows.py`` defines, of whatever peers send, or leaves them to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import column_twins as twins
import pytest
from amqp_rt_spark import spelling, variant
from amqp_rt_spark.malformed import decoded
from amqp_rt_spark.options import Options
from amqp_rt_spark.rows import PLACE, Place, Records, RowMaker, time_at_its_place
from hypothesis import example, given
from hypothesis import strategies as st
from typed_values import SCALARS, text, values

from amqp_rt import Message
from amqp_rt.batches import RECORD_HEAD, read_records
from amqp_rt.broker.log.annotations import annotate_record
from amqp_rt.broker.log.records import Record
from amqp_rt.codec.primitives import encode
from amqp_rt.errors import DecodeError
from amqp_rt.message import Sequence
from amqp_rt.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
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

pytestmark = [
    pytest.mark.req("K1"),
    pytest.mark.skipif(
        twins.module() is None, reason="there is no C compiler, and nothing installed"
    ),
]

#: A value of each type that the compiled decoder takes.
USUAL: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "bytes": [UByte(255), UShort(65_535), UInt(0), UInt(7), UInt(2**32 - 1)],
    "long": [ULong(0), ULong(7), ULong(2**63 - 1), ULong(2**63), ULong(2**64 - 1)],
    "signed": [Byte(-128), Short(-2), Int(-1), Int(-(2**31)), -1, -(2**63), 2**63 - 1],
    "float": [1.5, Float32(1.5), float("nan"), -0.0],
    "decimal": [Decimal32(b"1234"), Decimal64(b"12345678"), Decimal128(b"1" * 16)],
    "time": [Timestamp(0), Timestamp(-1), Timestamp(2**62), Timestamp(-(2**62))],
    "text": ["", "é𝄞\u0800", "x" * 63, "x" * 64, "x" * 300, Symbol("s"), Symbol("s" * 300)],
    "octets": [b"", b"\0", b"x" * 300],
    "uuid": uuid.UUID(int=2**100),
    "list": [[], [[1], [2, [3]]], list(range(300))],
    "map": {"b": {"z": 1, "a": {"é": 2}}, "a": {}, "": [{"c": None}]},
}
KINDS = (bytes, str, type(None), int, Sequence)


def message(**given: Any) -> Message:
    return Message(b"octets", subject="s", message_id=7, **given)


FULL = Message(
    b"octets" * 50,
    durable=True,
    priority=9,
    ttl_ms=2**32 - 1,
    first_acquirer=True,
    delivery_count=300,
    message_id=uuid.UUID(int=5),
    user_id=b"user",
    to="to",
    subject="é",
    reply_to="there",
    correlation_id=b"\x00\xfe",
    content_type="text/plain",
    content_encoding="gzip",
    absolute_expiry_time=Timestamp(2**40),
    creation_time=Timestamp(-5),
    group_id="g",
    group_sequence=2**32 - 1,
    reply_to_group_id="r" * 300,
    application_properties={"carrier": "UA", "delay": 7, "late": True},
    message_annotations={
        Symbol("x-opt-enqueued-time"): Timestamp(1_700_000_000_000),
        Symbol("x-opt-note"): "n",
    },
    delivery_annotations={Symbol("x-opt-here"): 1},
    footer={Symbol("x-opt-sum"): b"1"},
)


@pytest.mark.parametrize(
    "message",
    [
        *(message(application_properties={"a": each}) for name in USUAL if name not in ("list", "map")
          for each in (USUAL[name] if isinstance(USUAL[name], list) else [USUAL[name]])),
        *(Message(each, body_kind="value") for each in USUAL.values()),
        Message(USUAL, body_kind="value"),
        *(message(application_properties=dict.fromkeys(names, 1)) for names in
          (["b", "a", "", "ab", "é"], [f"k{number:02}" * 9 for number in range(60)])),
        message(message_annotations={Symbol("x-opt-a"): 1, Symbol("x-opt-enqueued-time"): None}),
        message(priority=0), message(ttl_ms=0), message(delivery_count=3),
        *(Message(b"x", message_id=each, correlation_id=each) for each in
          ("", "é", 0, 255, 2**64 - 1, b"", uuid.UUID(int=2**127))),
        *(Message(body, content_type=said) for body in (b'{"a": [1, 2.5]}', b"{", b"[" * 9) for said in
          ("application/json", "text/json \t; charset=utf-8", "x+json;y", "json ", "jso", "")),
        Message([b'{"a"', b":1}"], body_kind="data", content_type="application/json"),
        Message([b"one", b"", b"two" * 200], body_kind="data"),
        Message("text"), Message(""), Message(Symbol("text")), Message(None),
        FULL,
    ],
    ids=lambda found: repr(found)[:60],
)  # fmt: skip
def test_what_is_usual_is_decoded(message: Message) -> None:
    """With all columns, or with one of them: what is left to rows.py would only be slow."""
    expected = {*twins.CHOICES}
    if message.body_kind == "value" or twins.parsed_if_json(message.body) is None:
        # JSON in a value is rare, and it is said in rows.py that something else is none.
        expected -= {each for each in twins.CHOICES if each.body == "json"}
    assert twins.check(message.encode()) == expected


def test_a_message_without_a_body_or_anything_is_decoded() -> None:
    for payload in (b"", message().encode_front(), Message(b"", durable=True).encode_front()):
        assert twins.check(payload) == {*twins.CHOICES}


@pytest.mark.parametrize(
    "value",
    [
        Char("x"),
        Array([1, 2], int),
        Described(Symbol("d"), 1),
        {1: 2},
        Map([(Symbol("a"), 1), ("a", 2)]),
        {f"k{number}": 1 for number in range(65)},
        list(range(1_100)),
        [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_rare_is_left_to_rows(value: Any) -> None:
    wanted = [each for each in twins.CHOICES if each.columns == ("body_variant",)]
    assert not twins.check(Message(value, body_kind="value").encode()) & {*wanted}


@st.composite
def messages(draw: st.DrawFn) -> Message:
    simple = st.one_of(*SCALARS.values())
    names = st.one_of(text, st.sampled_from(["a", "b", "carrier"]))
    said = {
        name: draw(strategy)
        for name, strategy in {
            "message_id": st.one_of(*(SCALARS[kind] for kind in (ULong, uuid.UUID, bytes, str))),
            "correlation_id": st.one_of(*(SCALARS[kind] for kind in (ULong, uuid.UUID, bytes))),
            "user_id": st.binary(max_size=300),
            "to": text,
            "subject": text,
            "reply_to": text,
            "absolute_expiry_time": SCALARS[Timestamp],
            "creation_time": SCALARS[Timestamp],
            "group_id": text,
            "group_sequence": st.integers(0, 2**32 - 1),
            "reply_to_group_id": text,
            "durable": st.booleans(),
            "priority": st.integers(0, 255),
            "ttl_ms": st.integers(0, 2**32 - 1),
            "delivery_count": st.integers(0, 2**32 - 1),
            "application_properties": st.dictionaries(names, simple, max_size=5),
            "message_annotations": st.dictionaries(
                st.sampled_from([*sorted(PLACE), "x-opt-a", "x-opt-b"]).map(Symbol),
                st.one_of(SCALARS[Timestamp], values),
                max_size=3,
            ),
        }.items()
        if draw(st.booleans())
    }
    body = draw(st.one_of(values, st.lists(values, max_size=3).map(Sequence), st.binary()))
    if isinstance(body, bytes) and draw(st.booleans()):
        said["content_type"] = draw(st.sampled_from(["application/json", "a/b", "x;json"]))
    return Message(body, **said)


#: Octets that mean something where they are put.
PIECES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([bytes((code,)) for code in (*range(0x40, 0x99), *range(0xA0, 0xF1))]),
    st.sampled_from(
        [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x53\x75", b"\x80\0\0\0", b"\0\0\0\x04"]
    ),
)


@pytest.mark.slow
@given(
    messages(), st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 5), PIECES), max_size=4)
)
def test_both_make_the_same_of_whatever_comes(
    given_: Message, changes: list[tuple[int, int, bytes]]
) -> None:
    payload = bytearray(given_.encode())
    for at, cut, put in changes:
        at %= len(payload) + 1
        payload[at : at + cut] = put
    twins.check(bytes(payload))


SECTION = st.tuples(st.integers(0x6F, 0x79), values).map(
    lambda pair: b"\x00\x53" + bytes(pair[:1]) + encode(pair[1])
)


@pytest.mark.slow
@given(st.lists(SECTION, max_size=5))
@example([b"\x00\x53\x77\x46"])
@example([b"\x00\x53\x70\xc0\x00"])
@example([b"\x00\x53\x70\xc0\x01\x01"])
@example([b"\x00\x53\x70\xd0\x00\x00\x00\x03\x00"])
@example([b"\x00\x53\x73\xc0\x02\x0e\x40"])
@example([b"\x00\x53\x74\xc1\x05\x02\xa1\x02\xc0\x80\x40"])
@example([b"\x00\x53\x74\xc1\x07\x02\xa1\x03\xed\xa0\x80\x40"])
@example([b"\x00\x53\x72\xc1\x06\x02\xa3\x02\xc3\xa9\x40"])
@example([b"\x00\x53\x72\xc1\x09\x04\xa3\x01a\x40\xa3\x01a\x40"])
@example([b"\x00\x53\x75\xb0\xff\xff\xff\xff"])
def test_both_make_the_same_of_any_sections(sections: list[bytes]) -> None:
    twins.check(b"".join(sections))


@given(st.binary(max_size=40).map(lambda octets: b"\x00\x53\x77" + octets))
def test_both_make_the_same_of_values_at_random(payload: bytes) -> None:
    twins.check(payload)


def test_every_cut_of_a_message_is_survived() -> None:
    payload = FULL.encode()
    for end in range(len(payload)):
        twins.check(payload[:end])


def test_each_octet_of_a_message_may_be_any_other() -> None:
    payload = Message(
        {"a": [1, "é"], "b": b"2"}, message_id=1, application_properties={"c": True}, ttl_ms=5
    ).encode()
    for at in range(len(payload)):
        for octet in (0, 1, 0x40, 0x45, 0x7F, 0x80, 0xA1, 0xC1, 0xD1, 0xFF, payload[at] ^ 1):
            twins.check(payload[:at] + bytes((octet,)) + payload[at + 1 :])


# --- Tables --------------------------------------------------------------------------------------


def test_an_odd_message_leaves_nothing_behind() -> None:
    options = Options(raw=True)
    usual = [Message(f"{number}" * number, subject="s").encode() for number in range(1, 30)]
    # All columns but the last ones are written when it turns out to be odd.
    odd = Message("odd" * 100, application_properties={"a": Char("x")}, subject="x" * 50).encode()
    found = twins.table(options)
    for at, payload in enumerate(usual):
        assert found.fill([odd], 0, 99, [0], "n", None) == 0
        assert found.fill([payload, odd], 0, 99, [at, 0], "n", None) == 1
    count, columns = found.take()
    assert count == len(usual)
    maker = RowMaker(options)
    assert twins.rows_of(columns, count, options) == [
        twins.plain(maker.row(decoded(payload), Place("n", None, at)))
        for at, payload in enumerate(usual)
    ]
    # And after it was taken, it begins anew.
    assert found.take()[0] == 0


def test_a_table_is_full_by_rows_or_by_octets() -> None:
    payloads = [Message(b"x" * 100).encode()] * 10
    found = twins.table(Options(), rows=4)
    assert (found.fill(payloads, 0, 99, None, "n", 0), found.full, found.rows) == (4, True, 4)
    assert found.fill(payloads, 4, 99, None, "n", 0) == 4
    assert found.take()[0] == 4
    assert (found.full, found.fill(payloads, 6, 8, None, "n", 0), found.rows) == (False, 8, 2)
    assert (found.fill(payloads, 8, 99, None, "n", 0), found.full) == (10, True)
    size = len(payloads[0])
    # The last one may exceed it: a message larger than all that has a batch of its own.
    for octets, rows in ((1, 1), (size, 1), (size + 1, 2), (3 * size, 3)):
        found = twins.table(Options(), octets=octets)
        assert (found.fill(payloads, 0, 99, None, "n", 0), found.full) == (rows, True)


def test_columns_that_a_table_does_not_have() -> None:
    make = twins.module().Table
    for columns in (["nothing"], ["body", "body"], [1]):
        with pytest.raises(ValueError, match="columns: "):
            make(columns, 1, 1, False, False, None, ())
    for rows in (0, -1, 2**40):
        with pytest.raises(ValueError, match="rows: "):
            make(["body"], rows, 1, False, False, None, ())
    with pytest.raises(ValueError, match="hidden: at most 16"):
        make(["body"], 1, 1, False, False, None, [b"x"] * 17)


def test_what_is_no_list_of_octets_is_refused() -> None:
    found = twins.table(Options())
    assert found.fill(["text", None], 0, 99, None, "n", 0) == 0
    for payloads, start, offsets, partition in (
        ((), 0, None, 0),
        ([], 0, (), 0),
        ([b""], 0, ["x"], 0),
        ([b""], 0, [], 0),
        ([b""], 0, [2**64], 0),
        ([b""], 0, None, 2**31),
        ([b""], -1, None, 0),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError, IndexError)):
            found.fill(payloads, start, 99, offsets, "n", partition)
    assert found.take()[0] == 0


def test_what_is_raised_while_json_is_parsed() -> None:
    payloads = [Message(b"1", content_type="json").encode()] * 3
    found: Any = None

    def make(parse: Any) -> Any:
        return twins.module().Table(["body", "body_variant"], 10, 1_000, False, False, parse, ())

    def interrupted(octets: bytes) -> Any:
        raise KeyboardInterrupt

    def again(octets: bytes) -> Any:
        return found.fill(payloads, 0, 99, None, "n", 0)

    def emptied(octets: bytes) -> Any:
        payloads.clear()

    found = make(interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.fill(payloads, 0, 99, None, "n", 0)
    assert found.take()[0] == 0
    found = make(again)
    with pytest.raises(RuntimeError, match="is being filled already"):
        found.fill(payloads, 0, 99, None, "n", 0)
    for wrong in (1, (b"",), ("a", "b")):
        found = make(lambda octets, wrong=wrong: wrong)
        with pytest.raises(TypeError):
            found.fill(payloads, 0, 99, None, "n", 0)
    found = make(emptied)
    assert found.fill(payloads, 0, 99, None, "n", 0) == 1
    assert found.take()[0] == 1


def annotated(names: dict[str, Any]) -> bytes:
    said = {Symbol(name): value for name, value in names.items()}
    return Message(b"x", message_annotations=said).encode()


def test_annotations_that_are_left_out() -> None:
    made = annotated({"x-opt-offset": "5", "x-opt-a": 1})
    only = annotated({"x-opt-offset": "5"})
    rest = annotated({"x-opt-a": 1})
    options = Options(columns=("message_annotations",))
    found = twins.module().Table(
        options.columns, 9, 999, False, False, None, (b"x-opt-offset", b"x-opt-b")
    )
    twice = made.replace(b"x-opt-a", b"x-opt-b").replace(b"x-opt-offset", b"x-opt-bffset")
    assert found.fill([made, only, rest, twice], 0, 99, [5] * 4, "n", 0) == 4
    count, columns = found.take()
    (first,), (nothing,), (same,), _ = twins.rows_of(columns, count, options)
    assert first == same == RowMaker(options).row(decoded(rest), Place("n"))[0]
    assert nothing is None
    # Without an offset nothing else says what they say.
    assert found.fill([made], 0, 99, None, "n", 0) == 1
    count, columns = found.take()
    (((value, names),),) = twins.rows_of(columns, count, options)
    assert variant.decode(value, names) == {"x-opt-offset": "5", "x-opt-a": 1}


# --- Places of records ----------------------------------------------------------------------------


def recorded(partition: int, offset: int, time_ms: int, message: Message) -> bytes:
    """Return what a log sends of *message*."""
    found = annotate_record(partition, offset, Record(time_ms, message.encode()))
    return b"".join(found) if isinstance(found, list) else found


#: A record with a header, one without, and one with annotations of its own.
DRESSED = [
    recorded(partition, offset, time_ms, said)
    for said in (
        Message(b"1", durable=True),
        Message(b"1"),
        Message(b"1", message_annotations={Symbol("x-opt-a"): 1}),
    )
    for partition, offset, time_ms in ((0, 0, 0), (17, 2**40, 1_700_000_000_000), (3, 7, -1))
]


@pytest.mark.parametrize("payload", DRESSED)
def test_a_place_is_in_columns_and_not_in_the_annotations(payload: bytes) -> None:
    assert twins.check(payload) == {*twins.CHOICES}
    said = dict(decoded(payload).message_annotations)
    only = "x-opt-a" not in said
    assert time_at_its_place(payload) == (said["x-opt-enqueued-time"] if only else None)
    options = Options(columns=("enqueued_time", "message_annotations"))
    ((time, kept),) = RowMaker(options).rows([Records("n", [payload], 0, [7])])
    assert time == said["x-opt-enqueued-time"] * 1000
    assert (kept is None) if only else (variant.decode(*kept) == {"x-opt-a": 1})


@pytest.mark.slow
@pytest.mark.parametrize("payload", DRESSED[1::6])
def test_a_place_that_is_changed_is_read_the_same_way(payload: bytes) -> None:
    maker = RowMaker(Options(columns=("enqueued_time", "message_annotations")))
    for at in range(len(payload)):
        for octet in (0x31, payload[at] ^ 1):
            changed = bytearray(payload)
            changed[at] = octet
            found = time_at_its_place(bytes(changed))
            message = decoded(bytes(changed))
            if found is not None and isinstance(message, Message):
                short = maker.row(message, Place("n", 0, 7, time_ms=found, bare=True))
                assert short == maker.row(message, Place("n", 0, 7))
            twins.check(bytes(changed))


# --- Batches of records ---------------------------------------------------------------------------


def packed(*found: tuple[int, int, bytes]) -> bytes:
    return b"".join(
        RECORD_HEAD.pack(offset, time_ms, 0, len(payload)) + payload
        for offset, time_ms, payload in found
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30)
        ),
        max_size=4,
    ),
    st.integers(0, 300),
    st.binary(max_size=2),
)
@example([(1, 0, b"a"), (2, 1_700_000_000_000, b"")], 300, b"")
@example([(1, 0, b"a"), (1, 0, b"")], 300, b"")
def test_batches_are_read_alike(found: list[tuple[int, int, bytes]], cut: int, more: bytes) -> None:
    """In order or not, and cut off or changed anywhere."""
    for records in (found, sorted(found, key=lambda each: each[0])):
        for batch in (packed(*records)[:cut] + more, packed(*records)):
            try:
                expected = read_records(batch)
            except DecodeError as error:
                with pytest.raises(DecodeError, match=re.escape(str(error))):
                    twins.module().records(batch)
            else:
                assert twins.module().records(batch) == expected


# --- Numbers of records ---------------------------------------------------------------------------


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=30),
    st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 3), st.binary(max_size=3)), max_size=2
    ),
)
def test_numbers_at_their_place(
    number: int, said: bytes, changes: list[tuple[int, int, bytes]]
) -> None:
    annotations = {Symbol("x-opt-offset"): said.hex(), Symbol("x-opt-sequence-number"): number}
    payload = bytearray(Message(b"x", durable=True, message_annotations=annotations).encode())
    assert twins.module().numbers([bytes(payload)]) == [number]
    assert spelling.number_at_its_place(bytes(payload)) == number
    for at, cut, put in changes:
        at %= len(payload) + 1
        payload[at : at + cut] = put
    whole = [bytes(payload[:end]) for end in (len(payload), *range(0, len(payload), 7))]
    assert twins.module().numbers(whole) == [spelling.number_at_its_place(each) for each in whole]


def test_numbers_that_are_not_at_their_place_are_looked_for() -> None:
    told = {Symbol("x-opt-a"): 1, Symbol("x-opt-sequence-number"): 7}
    assert spelling.numbers([Message(b"x", message_annotations=told).encode()]) == [7]


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_no_octet_is_touched_that_is_not_ours() -> None:
    """The tests above, on a decoder that checks each access to memory."""
    compiler = os.environ.get("CC", "cc")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler has no checks of memory")
    environ = {
        **os.environ,
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "AMQP_RT_SANITIZE": "1",
        "AMQP_RT_LONG": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__],
        env=environ,
        cwd=twins.ROOT,
        capture_output=True,
        text=True,
        timeout=1_500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
