from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple
from typed_values import same

from amqp_rt.annotations import check_annotations, check_application_properties, merge_annotations
from amqp_rt.bodies import BodyReader
from amqp_rt.codec.composites import decode_composite, encode_composite
from amqp_rt.codec.primitives import encode
from amqp_rt.codec.sections import walk_front
from amqp_rt.errors import DecodeError, EncodeError, LocalProtocolError
from amqp_rt.limits import Limits
from amqp_rt.message import (
    JOIN_MAX,
    Head,
    Header,
    Message,
    Properties,
    Sequence,
    encode_delivery_annotations,
    read_annotations,
    read_data,
    reencode,
    walk,
    walk_head,
    write_data,
    write_header,
)
from amqp_rt.outcomes import Error
from amqp_rt.signatures import sign, verify
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

#: A message as built, and the same message on the wire, section by section.
WIRES: dict[str, tuple[Message, list[str]]] = {
    "data": (Message(b"hi"), ["005375a0026869"]),
    "no data": (Message(b""), ["005375a000"]),
    "bytearray": (Message(bytearray(b"hi")), ["005375a0026869"]),
    "two data": (
        Message([b"a", memoryview(b"bc")], body_kind="data"),
        ["005375a00161", "005375a0026263"],
    ),
    "256 octets": (Message(b"x" * 256), ["005375b000000100" + "78" * 256]),
    "null": (Message(), ["00537740"]),
    "string": (Message("hello"), ["005377a10568656c6c6f"]),
    "number": (Message(-1), ["00537755ff"]),
    "long": (Message(1 << 40), ["00537781" + "0000010000000000"]),
    "uint": (Message(UInt(256)), ["0053777000000100"]),
    "true": (Message(True), ["00537741"]),
    "double": (Message(0.5), ["00537782" + "3fe0000000000000"]),
    "uuid": (Message(U), ["00537798" + U.hex]),
    "binary value": (Message(b"hi", body_kind="value"), ["005377a0026869"]),
    "list": (Message([1, "a"]), ["005377c006025501a10161"]),
    "map": (Message({"a": 1}), ["005377c10602a101615501"]),
    "described": (Message(Described(ULong(36), [])), ["005377" + "00532445"]),
    "composite": (
        Message(Error("amqp:not-found")),
        ["005377" + "00531dc01101a30e" + "616d71703a6e6f742d666f756e64"],
    ),
    "sequence": (Message(Sequence([1, 2])), ["005376c0050255015502"]),
    "empty sequence": (Message([], body_kind="sequence"), ["00537645"]),
    "durable": (Message(None, durable=True), ["005370c0020141", "00537740"]),
    "priority": (Message(None, priority=9), ["005370c00402405009", "00537740"]),
    "ttl": (Message(None, ttl_ms=0), ["005370c00403404043", "00537740"]),
    "ttl in seconds": (
        Message(None, ttl_s=1.5),
        ["005370c008034040" + "70000005dc", "00537740"],
    ),
    "first acquirer": (Message(None, first_acquirer=True), ["005370c0050440404041", "00537740"]),
    "delivery count": (Message(None, delivery_count=1), ["005370c00705404040405201", "00537740"]),
    "header": (
        Message(
            None, durable=True, priority=9, ttl_ms=60000, first_acquirer=True, delivery_count=256
        ),
        ["005370c00f0541500970" + "0000ea60" + "41" + "7000000100", "00537740"],
    ),
    "delivery annotations": (
        Message(None, delivery_annotations={"x-opt-d": 1}),
        ["005371c10c02a307782d6f70742d645501", "00537740"],
    ),
    "rejected": (
        Message(None, delivery_annotations={"rejected": Error("a:b")}),
        ["005371c11602a30872656a6563746564" + "00531dc00601a303613a62", "00537740"],
    ),
    "message annotations": (
        Message(None, message_annotations={ULong(5): "v"}),
        ["005372c10602" + "5305" + "a10176", "00537740"],
    ),
    "message id": (Message(None, message_id="id"), ["005373c00501a1026964", "00537740"]),
    "ulong ids": (
        Message(None, message_id=1, correlation_id=300),
        ["005373c01006" + "5301" + "40404040" + "80000000000000012c"[:18], "00537740"],
    ),
    "uuid id": (
        Message(None, correlation_id=U),
        ["005373c017064040404040" + "98" + U.hex, "00537740"],
    ),
    "binary id": (Message(None, message_id=b"\x01"), ["005373c00401a00101", "00537740"]),
    "properties": (
        Message(
            b"",
            message_id="i",
            user_id=b"u",
            to="t",
            subject="s",
            reply_to="r",
            correlation_id="c",
            content_type="a/b",
            content_encoding="gzip",
            absolute_expiry_time=dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC),
            creation_time=2,
            group_id="é",
            group_sequence=7,
            reply_to_group_id="g",
        ),
        [
            (
                "005373c0390d"
                "a10169"
                "a00175"
                "a10174"
                "a10173"
                "a10172"
                "a10163"
                "a303612f62"
                "a304677a6970"
                "8300000000000003e8"
                "830000000000000002"
                "a102c3a9"
                "5207"
                "a10167"
            ),
            "005375a000",
        ],
    ),
    "application properties": (
        Message(None, application_properties={"a": "b", "n": 1, "t": True, "z": None}),
        ["005374c11408" + "a10161a10162" + "a1016e5501" + "a1017441" + "a1017a40", "00537740"],
    ),
    "footer": (
        Message(None, footer={"x-opt-f": b"\x01"}),
        ["00537740", "005378c10d02a307782d6f70742d66a00101"],
    ),
    "everything": (
        Message(
            Sequence(["q"]),
            durable=True,
            delivery_annotations={"x-opt-d": 1},
            message_annotations={"x-opt-m": 2},
            subject="s",
            application_properties={"a": 1},
            footer={"x-opt-f": 3},
        ),
        [
            "005370c0020141",
            "005371c10c02a307782d6f70742d645501",
            "005372c10c02a307782d6f70742d6d5502",
            "005373c00704404040a10173",
            "005374c10602a101615501",
            "005376c00401a10171",
            "005378c10c02a307782d6f70742d665503",
        ],
    ),
}
wires = pytest.mark.parametrize(
    ("message", "sections"), WIRES.values(), ids=[name.replace(" ", "-") for name in WIRES]
)


def content(message: Message) -> list[object]:
    """Return all parts of a message, which decodes every section."""
    return [
        message.header,
        dict(message.delivery_annotations),
        dict(message.message_annotations),
        message.properties,
        dict(message.application_properties),
        message.body_kind,
        message.body,
        message.data,
        dict(message.footer),
    ]


def plain(value: object) -> object:
    """Return *value* encoded and decoded again."""
    if isinstance(value, Error):
        return Described(ULong(0x1D), [Symbol(value.condition)])
    if isinstance(value, Properties):
        times = (value.absolute_expiry_time, value.creation_time)
        return [str(value), *(encode(Timestamp(t) if type(t) is int else t) for t in times)][1:] + [
            getattr(value, name)
            for name in Properties.__struct_fields__
            if not name.endswith("_time")
        ]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


# --- One message, one wire ---


@pytest.mark.req("M1", "M4", "M12")
@wires
def test_a_message_is_written_as_the_standard_says(message: Message, sections: list[str]) -> None:
    assert message.encode().hex() == "".join(sections)


@pytest.mark.req("M1", "M4", "M12")
@wires
def test_a_message_is_read_as_it_was_written(message: Message, sections: list[str]) -> None:
    decoded = Message.decode(bytes.fromhex("".join(sections)))

    ours, theirs = content(message), content(decoded)
    assert list(map(plain, theirs)) == list(map(plain, ours))


@pytest.mark.req("M2", "T10")
@wires
def test_a_message_that_was_read_is_relayed_octet_for_octet(
    message: Message, sections: list[str]
) -> None:
    wire = bytes.fromhex("".join(sections))
    decoded = Message.decode(wire)

    content(decoded)

    assert decoded.encode() is wire
    assert decoded.buffers() == [wire]


@pytest.mark.req("M1", "T9")
@wires
def test_a_message_cut_off_is_refused_unless_a_section_ends_there(
    message: Message, sections: list[str]
) -> None:
    whole = bytes.fromhex("".join(sections))
    ends = {len(bytes.fromhex("".join(sections[:count]))) for count in range(len(sections) + 1)}
    for cut in range(len(whole)):
        if cut in ends:
            assert Message.decode(whole[:cut]).encode() == whole[:cut]
        else:
            with pytest.raises(DecodeError):
                Message.decode(whole[:cut])


@pytest.mark.req("M1")
@wires
@pytest.mark.parametrize("trailing", ["00", "40", "0053", "005300", "00537940", "a000", "005370"])
def test_octets_after_the_last_section_are_refused(
    message: Message, sections: list[str], trailing: str
) -> None:
    with pytest.raises(DecodeError):
        Message.decode(bytes.fromhex("".join(sections) + trailing))


@wires
def test_buffers_are_the_message_in_pieces(message: Message, sections: list[str]) -> None:
    assert b"".join(message.buffers()).hex() == "".join(sections)


def test_large_data_are_not_copied() -> None:
    small, large = b"s" * (JOIN_MAX - 1), b"l" * JOIN_MAX
    message = Message([small, large, large, small], body_kind="data", footer={"x-opt-f": 1})

    buffers = message.buffers()

    assert b"".join(buffers) == message.encode()
    assert [buffer is large for buffer in buffers] == [False, True, False, True, False]
    assert Message(large).buffers()[1] is large


# --- Sections and their order ---

#: A section of each kind with nothing much in it.
ANY = {
    "header": "00537045",
    "delivery-annotations": "005371c10100",
    "message-annotations": "005372c10100",
    "properties": "00537345",
    "application-properties": "005374c10100",
    "data": "005375a000",
    "amqp-sequence": "00537645",
    "amqp-value": "00537740",
    "footer": "005378c10100",
}
PLACES = {name: min(index, 5) if index < 8 else 6 for index, name in enumerate(ANY)}


@pytest.mark.req("M1")
@pytest.mark.parametrize("second", ANY)
@pytest.mark.parametrize("first", ANY)
def test_every_section_after_every_section(first: str, second: str) -> None:
    wire = bytes.fromhex(ANY[first] + ANY[second])
    if PLACES[first] < PLACES[second]:
        Message.decode(wire)
    elif first == second in ("data", "amqp-sequence"):
        assert walk(wire).body_count == 2
    else:
        with pytest.raises(DecodeError) as caught:
            Message.decode(wire)
        assert second in caught.value.description


@pytest.mark.req("M1")
@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ("005370450053704500537740", "there are two header sections"),
        ("0053734500537045", "header comes after properties"),
        ("00537740005375a000", "a body of amqp-value goes on with data"),
        ("005375a000005378c10100005375a000", "data comes after footer"),
        ("005379c10100", "no section of a message is described by ULong(121)"),
        ("0053", "a section's descriptor: 1 octets expected, 0 are left"),
        ("00a301780040", "no section of a message is described by 'x' (Symbol)"),
        ("0055704500", "no section of a message is described by 112 (int)"),
        ("40", "a section expected at octet 0, not constructor 0x40"),
        ("005377a00161" + "ff", "a section expected at octet 6, not constructor 0xff"),
        ("005370c10100", "header: a list expected, not constructor 0xc1"),
        ("00537240", "message-annotations: a map expected, not constructor 0x40"),
        ("005375a10161", "data: a binary expected, not constructor 0xa1"),
        ("005377ff", "amqp-value: a value expected, not constructor 0xff"),
        ("005375a00361", "data: 2 octets are missing"),
        ("005375a0", "data: the octets end inside its size"),
        ("005375b0ffffffff", "data: 4294967295 octets are missing"),
        ("0053760053", "amqp-sequence: a list expected, not constructor 0x00"),
        ("005377", "amqp-value: a value is missing: the octets end before its constructor"),
    ],
)
def test_what_is_wrong_with_the_sections_is_said(wire: str, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        Message.decode(bytes.fromhex(wire))
    assert caught.value.description == said
    assert caught.value.condition == "amqp:decode-error"


@pytest.mark.req("M1")
def test_a_message_without_a_body_is_let_through() -> None:
    for wire in (b"", bytes.fromhex("005370c0020141")):
        message = Message.decode(wire)
        assert (message.body_kind, message.body, message.data) == (None, None, ())
        assert message.encode() == wire
        assert message.replace(durable=True).encode().hex() == "005370c0020141"


@pytest.mark.req("T9", "M1")
def test_there_are_at_most_sections_max_sections() -> None:
    limits = Limits(sections_max=3)
    data = bytes.fromhex("005375a00161")
    assert Message.decode(data * 3, limits).body == b"aaa"
    with pytest.raises(DecodeError, match="more sections than sections_max"):
        Message.decode(data * 4, limits)


@pytest.mark.req("T9")
def test_a_section_has_at_most_elements_max_elements() -> None:
    message = Message.decode(Message([None] * 4).encode(), Limits(elements_max=3))
    with pytest.raises(DecodeError, match=r"amqp-value: .*elements_max"):
        _ = message.body


#: The same as ``"everything"``, as other peers may write it.
UNUSUAL = {
    "wide": (
        "005370d0000000050000000141"
        "005371d10000000f00000002a307782d6f70742d645501"
        "005372d10000000f00000002a307782d6f70742d6d5502"
        "005373d00000000a00000004404040a10173"
        "005374d10000000900000002a101615501"
        "005376d00000000700000001a10171"
        "005378d10000000f00000002a307782d6f70742d665503"
    ),
    "wide descriptors": (
        "00800000000000000070c0020141"
        "00800000000000000071c10c02a307782d6f70742d645501"
        "00800000000000000072c10c02a307782d6f70742d6d5502"
        "00800000000000000073c00704404040a10173"
        "00800000000000000074c10602a101615501"
        "00800000000000000076c00401a10171"
        "00800000000000000078c10c02a307782d6f70742d665503"
    ),
    "symbols": "".join(
        "00a3" + f"{len(symbol):02x}" + symbol.encode().hex() + rest
        for symbol, rest in [
            ("amqp:header:list", "c0020141"),
            ("amqp:delivery-annotations:map", "c10c02a307782d6f70742d645501"),
            ("amqp:message-annotations:map", "c10c02a307782d6f70742d6d5502"),
            ("amqp:properties:list", "c00704404040a10173"),
            ("amqp:application-properties:map", "c10602a101615501"),
            ("amqp:amqp-sequence:list", "c00401a10171"),
            ("amqp:footer:map", "c10c02a307782d6f70742d665503"),
        ]
    ),
    "explicit defaults": (
        "005370c009055601500440" + "5600" + "43"
        "005371c10c02a307782d6f70742d645501"
        "005372c10c02a307782d6f70742d6d5502"
        "005373c00f0c404040" + "a10173" + "4040404040404040"
        "005374c10602a101615501"
        "005376c00401a10171"
        "005378c10c02a307782d6f70742d665503"
    ),
    "texts confused": (
        "005370c0020141"
        "005371c10c02a107782d6f70742d645501"
        "005372c10c02a107782d6f70742d6d5502"
        "005373c00704404040a30173"
        "005374c10602a301615501"
        "005376c00401a10171"
        "005378c10c02a107782d6f70742d665503"
    ),
}


@pytest.mark.req("M1", "M2", "T1")
@pytest.mark.parametrize("wire", UNUSUAL.values(), ids=UNUSUAL)
def test_other_encodings_say_the_same_and_are_kept(wire: str) -> None:
    octets = bytes.fromhex(wire)
    message = Message.decode(octets)

    assert content(message) == content(Message.decode(WIRES["everything"][0].encode()))
    assert message.encode() is octets
    for cut in range(len(octets)):
        try:
            content(Message.decode(octets[:cut]))
        except DecodeError:
            pass
    changed = message.replace(priority=5).encode()
    assert changed.endswith(octets[walk(octets).delivery_annotations :])
    assert Message.decode(changed).durable
    head = walk_head(octets)
    assert (head.durable, head.priority, head.ttl_ms) == (True, 4, None)
    assert read_annotations(head.message_annotations) == {"x-opt-m": 2}
    assert head.rest == octets[walk(octets).properties :]


def test_data_and_sequences_in_unusual_encodings() -> None:
    data = "0080000000000000007500"[:20] + "a00161"
    assert Message.decode(bytes.fromhex(data + "005375b00000000162")).data == (b"a", b"b")
    assert Message.decode(bytes.fromhex(data)).body == b"a"
    assert Message.decode(bytes.fromhex("00537645" + "005376c003015501")).body == [1]


# --- Header ---


@pytest.mark.req("M4")
def test_an_absent_header_means_its_defaults() -> None:
    message = Message.decode(Message(b"").encode())

    assert message.header == Header(False, 4, None, False, 0)
    assert (message.durable, message.priority, message.ttl_ms) == (False, 4, None)
    assert (message.ttl_s, message.first_acquirer, message.delivery_count) == (None, False, 0)
    head = walk_head(message.encode())
    assert (head.durable, head.priority, head.ttl_ms) == (False, 4, None)
    assert (head.first_acquirer, head.delivery_count) == (False, 0)


@pytest.mark.req("M4")
@pytest.mark.parametrize("count", range(6))
def test_fields_left_out_or_null_have_their_defaults(count: int) -> None:
    values = [True, UByte(9), UInt(5), True, UInt(6)]
    wanted = [True, 9, 5, True, 6]
    for nulls in range(2):
        fields = [*values[:count], *[None] * nulls * (5 - count)]
        wire = b"\x00\x53\x70" + encode(fields)
        header = Message.decode(wire).header
        head = walk_head(wire)
        expected = [*wanted[:count], *[False, 4, None, False, 0][count:]]
        assert [getattr(header, name) for name in Header.__struct_fields__] == expected
        assert [
            head.durable,
            head.priority,
            head.ttl_ms,
            head.first_acquirer,
            head.delivery_count,
        ] == expected


@pytest.mark.req("T8", "M4")
@pytest.mark.parametrize(
    ("wire", "field"),
    [
        ("005370c0030155", "header"),
        ("005370c000", "header"),
        ("005370c0020140ff", None),
        ("005370c003015501", "header.durable"),
        ("005370c0040240a101", "header.priority"),
        ("005370c00403404041", "header.ttl"),
        ("005370c005044040405601"[:20], "header"),
        ("005370c00201", "header"),
        ("005370c00102", "header"),
        ("005370c0020141" + "41", None),
    ],
)
def test_a_bad_header_is_refused_everywhere(wire: str, field: str | None) -> None:
    octets = bytes.fromhex(wire)
    with pytest.raises(DecodeError):
        _ = Message.decode(octets).header
    with pytest.raises(DecodeError) as caught:
        walk_head(octets)
    if field:
        assert caught.value.description.startswith(field)


def test_surplus_header_fields_are_ignored() -> None:
    wire = bytes.fromhex("005370c00706" + "4141404040" + "41")
    with pytest.raises(DecodeError):
        walk_head(wire)  # priority is no boolean
    wire = bytes.fromhex("005370c00706" + "4140404040" + "41")
    assert walk_head(wire).durable
    assert Message.decode(wire).durable


@pytest.mark.req("M4", "M7")
def test_header_fields_can_be_set_on_the_way() -> None:
    wire = WIRES["everything"][0].encode()
    message = Message.decode(wire)

    message.delivery_count += 1
    message.ttl_s = 2
    message.priority = 6
    message.first_acquirer = True

    assert message.encode() == (
        bytes.fromhex("005370c00c0541500670000007d0415201")
        + wire[walk(wire).delivery_annotations :]
    )
    message.ttl_s = None
    message.header = Header()
    assert message.encode() == wire[walk(wire).delivery_annotations :]


@pytest.mark.req("M3")
def test_write_header_says_nothing_that_goes_without_saying() -> None:
    out = bytearray()
    write_header(out)
    assert out == b""
    with pytest.raises(EncodeError):
        write_header(out, priority=256)


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), 4_294_967.3])
def test_a_time_to_live_is_milliseconds_in_32_bits(seconds: float) -> None:
    with pytest.raises(ValueError, match="time to live"):
        Message(b"", ttl_s=seconds)
    message = Message(b"")
    with pytest.raises(ValueError, match="time to live"):
        message.ttl_s = seconds
    with pytest.raises(TypeError):
        Message(b"", ttl_s=1, ttl_ms=1000)


# --- Intermediaries ---


@pytest.mark.req("M2", "M3")
@wires
def test_an_intermediary_passes_on_what_it_need_not_change(
    message: Message, sections: list[str]
) -> None:
    octets = bytes.fromhex("".join(sections))
    head = walk_head(octets)
    where = walk(octets)

    passed_on = reencode(
        head,
        ttl_ms=head.ttl_ms,
        first_acquirer=head.first_acquirer,
        delivery_count=head.delivery_count,
    )

    without = octets[: where.delivery_annotations] + octets[where.message_annotations :]
    assert b"".join(passed_on) == without
    assert passed_on[-1] is head.rest
    if where.properties == 0:
        assert passed_on[0] is octets  # not even copied
    assert head.rest == octets[where.properties :]


@pytest.mark.req("M2", "M7", "M8", "M9", "M10")
def test_an_intermediary_changes_the_head_only() -> None:
    octets = WIRES["everything"][0].encode()
    head = walk_head(octets)

    passed_on = reencode(
        head,
        ttl_ms=900,
        first_acquirer=False,
        delivery_count=2,
        delivery_annotations=encode_delivery_annotations({"x-opt-ours": 1}),
        message_annotations=merge_annotations(
            head.message_annotations, {"x-opt-m": "new", "x-opt-n": None}
        ),
    )

    message = Message.decode(b"".join(passed_on))
    assert message.header == Header(True, 4, 900, False, 2)
    assert message.delivery_annotations == {"x-opt-ours": 1}
    assert message.message_annotations == {"x-opt-m": "new", "x-opt-n": None}
    assert message.encode().endswith(octets[walk(octets).properties :])


@pytest.mark.req("M3")
def test_no_section_is_inserted_unless_it_says_something() -> None:
    octets = Message(b"hi").encode()
    head = walk_head(octets)

    assert reencode(head, ttl_ms=None, first_acquirer=False, delivery_count=0) == [octets]
    assert reencode(head, ttl_ms=None, first_acquirer=False, delivery_count=1) == [
        bytes.fromhex("005370c00705404040405201"),
        octets,
    ]
    assert merge_annotations(b"", {}) == encode_delivery_annotations({}) == b""


@pytest.mark.req("M2")
def test_an_intermediary_does_not_look_at_the_bare_message() -> None:
    octets = Message(b"", durable=True).encode() + b"\x00\x53\x73 this is no list"
    assert walk_head(octets).rest == octets[7:]


@pytest.mark.req("M1")
@pytest.mark.parametrize(
    "wire",
    [
        "0053704500537045",
        "005371c1010000537045",
        "005372c10100005371c10100",
        "005372c10100005372c10100",
        "40",
        "005379",
        "0053",
        "00",
        "005370",
        "005370c0",
        "005370d000",
        "005370c00a0141",
        "00a310616d71703a6865616465723a6c697374",
        "00a310616d71703a6865616465723a6c69737441",
        "005371c20100",
    ],
)
def test_a_bad_head_is_refused(wire: str) -> None:
    with pytest.raises(DecodeError):
        walk_head(bytes.fromhex(wire))


@pytest.mark.req("B21")
@given(
    st.lists(
        st.sampled_from(["header", "delivery-annotations", "message-annotations"]), max_size=3
    ),
    st.lists(st.sampled_from(["properties", "application-properties"]), max_size=3),
    st.sampled_from(["", "data", "amqp-sequence", "amqp-value", "footer"]),
)
def test_the_front_of_a_message_is_found_as_the_whole_is(
    head: list[str], bare: list[str], body: str
) -> None:
    octets = bytes.fromhex("".join(ANY[name] for name in [*head, *bare, body] if name))
    try:
        whole = walk(octets)
    except DecodeError as error:
        with pytest.raises(DecodeError, match=re.escape(error.description)):
            walk_front(octets)
        return
    assert walk_front(octets) == astuple(whole)[:5]
    # Of the body, nothing counts but its descriptor.
    if body:
        assert walk_front(octets[: whole.body + 3]) == astuple(whole)[:5]


@pytest.mark.req("B21")
@pytest.mark.parametrize(
    "wire",
    [
        "005374c1",
        "005374c10a0041",
        "005374d1000000",
        "00537445",
        "005379",
        "40",
        "00a310616d71703a6865616465723a6c697374",
    ],
)
def test_a_bad_front_is_refused(wire: str) -> None:
    with pytest.raises(DecodeError):
        walk_front(bytes.fromhex(wire))


def test_a_front_with_symbols_for_descriptors() -> None:
    header = bytes.fromhex("00a310") + b"amqp:header:list" + b"\x45"
    rest = bytes.fromhex(ANY["properties"] + ANY["data"])
    at = len(header)
    end = at + len(bytes.fromhex(ANY["properties"]))
    assert walk_front(header + rest) == (at, at, at, end, end)


def test_a_head_in_unusual_order_of_absence() -> None:
    only = bytes.fromhex(ANY["delivery-annotations"] + ANY["data"])
    head = walk_head(only)
    assert (head.header, head.delivery_annotations) == (b"", only[:6])
    assert (head.message_annotations, head.rest) == (b"", only[6:])
    only = bytes.fromhex(ANY["header"] + ANY["message-annotations"])
    head = walk_head(only)
    assert (head.header, head.delivery_annotations) == (only[:4], b"")
    assert (head.message_annotations, head.rest) == (only[4:], b"")


@pytest.mark.req("M7", "M9", "M10")
def test_forwarding_drops_delivery_annotations_and_reduces_the_ttl() -> None:
    wire = Message(
        b"hi",
        ttl_ms=1000,
        delivery_annotations={"x-opt-d": 1},
        message_annotations={"x-opt-m": 1},
    ).encode()
    received = Message.decode(wire)

    forwarded = received.forwarded(elapsed_ms=400)

    assert forwarded.ttl_ms == 600
    assert forwarded.encode().endswith(wire[walk(wire).message_annotations :])
    assert Message.decode(forwarded.encode()).delivery_annotations == {}
    assert received.encode() is wire
    assert received.forwarded(elapsed_ms=5000).ttl_ms == 0
    untouched = Message.decode(Message(b"hi").encode())
    assert untouched.forwarded(elapsed_ms=7).encode() == untouched.encode()
    assert Message(b"", delivery_annotations={"x-opt-d": 1}).forwarded().delivery_annotations == {}


# --- Annotations ---


@pytest.mark.req("M10", "M23")
def test_annotations_of_a_received_message_can_be_augmented() -> None:
    wire = WIRES["everything"][0].encode()
    message = Message.decode(wire)

    message.message_annotations = {**message.message_annotations, "x-opt-n": 5}

    again = Message.decode(message.encode())
    assert again.message_annotations == {"x-opt-m": 2, "x-opt-n": 5}
    assert again.delivery_annotations == {"x-opt-d": 1}
    assert again.bare == message.bare == wire[walk(wire).properties : walk(wire).footer]
    message.delivery_annotations = None
    assert Message.decode(message.encode()).delivery_annotations == {}


@pytest.mark.req("M23")
def test_modified_annotations_replace_entries_of_the_same_key() -> None:
    section = Message(None, message_annotations={"x-opt-a": 1, "x-opt-b": UInt(2)}).encode()[:-4]

    merged = merge_annotations(section, {Symbol("x-opt-a"): "one", ULong(7): 7})

    assert read_annotations(merged) == {"x-opt-a": "one", "x-opt-b": 2, ULong(7): 7}
    assert type(read_annotations(merged)[Symbol("x-opt-b")]) is UInt
    assert merge_annotations(section, {}) is section
    assert read_annotations(merge_annotations(b"", {"x-opt-a": 1})) == {"x-opt-a": 1}
    with pytest.raises(DecodeError):
        merge_annotations(section[:-1], {"x-opt-a": 1})


KEYS: list[tuple[object, set[str]]] = [
    (Symbol("x-opt-a"), set()),
    (Symbol("x-opt"), set()),
    (Symbol("x-other"), {"strict"}),
    (Symbol("other"), {"strict", "default"}),
    (Symbol("rejected"), {"strict", "default"}),
    (ULong(0), {"strict", "default"}),
    (ULong(1 << 63), {"strict", "default"}),
]


@pytest.mark.req("M11")
@pytest.mark.parametrize("policy", ["default", "strict", "lenient"])
@pytest.mark.parametrize("section", ["delivery_annotations", "message_annotations", "footer"])
@pytest.mark.parametrize(("key", "refused_by"), KEYS)
def test_keys_that_are_not_understood(
    key: object, refused_by: set[str], section: str, policy: Any
) -> None:
    if key == "rejected" and section == "delivery_annotations":
        return
    message = Message.decode(Message(b"", **{section: {key: 1}}).encode())  # type: ignore[arg-type]
    judged: list[Message | Head] = [message]
    if section != "footer":
        judged.append(walk_head(message.encode()))
    for subject in judged:
        error = check_annotations(subject, policy)
        if policy in refused_by:
            assert error is not None
            assert error.condition == "amqp:not-implemented"
            assert repr(key)[7:-1] in str(error.description)
            assert check_annotations(subject, policy, understood={key}) is None
        else:
            assert error is None


@pytest.mark.req("M9")
@pytest.mark.parametrize("policy", ["default", "strict", "lenient"])
def test_rejected_holds_an_error(policy: Any) -> None:
    good = Message(b"", delivery_annotations={"rejected": Error("amqp:not-found", "gone")})
    assert check_annotations(good, policy) is None
    assert check_annotations(walk_head(good.encode()), policy) is None
    assert check_annotations(Message.decode(good.encode()), policy) is None
    for bad in ("5501", "00531d45", "00532445", "a10161"):
        octets = bytes.fromhex(f"005371c1{11 + len(bad) // 2:02x}02a30872656a6563746564" + bad)
        error = check_annotations(walk_head(octets), policy)
        assert error is not None
        assert error.condition == "amqp:invalid-field"
        assert check_annotations(Message.decode(octets), policy) is not None
    with pytest.raises(LocalProtocolError, match="'rejected' holds an Error"):
        Message(b"", delivery_annotations={"rejected": "no"}).encode()
    with pytest.raises(LocalProtocolError, match="'rejected' holds an Error"):
        encode_delivery_annotations({"rejected": 1})


@pytest.mark.req("M11")
@pytest.mark.parametrize("section", ["71", "72", "78"])
@pytest.mark.parametrize("entries", ["5501" + "40", "40" + "40", "c10100" + "40", "a0017840"])
def test_annotation_keys_are_symbols_or_ulongs(section: str, entries: str) -> None:
    octets = bytes.fromhex(f"0053{section}c1{1 + len(entries) // 2:02x}02" + entries)
    with pytest.raises(DecodeError, match=r"annotations: .*symbol|footer: .*symbol"):
        content(Message.decode(octets))
    with pytest.raises(DecodeError):
        check_annotations(Message.decode(octets))
    with pytest.raises(EncodeError, match=r"annotations: .*symbol"):
        Message(b"", message_annotations={b"key": 1}).encode()


# --- Properties ---


@pytest.mark.req("M12")
@pytest.mark.parametrize("kind", [ULong(1), U, b"1", "1"])
def test_the_four_types_of_message_id_stay_what_they_are(kind: Any) -> None:
    request = Message.decode(Message(None, message_id=kind).encode())
    assert same(request.message_id, kind)

    reply = Message(None, correlation_id=request.message_id)

    assert same(Message.decode(reply.encode()).correlation_id, kind)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"message_id": True}, "properties.message-id: True (bool) cannot be sent as message-id"),
        ({"message_id": 1.5}, "properties.message-id: 1.5 (float) cannot be sent as message-id"),
        ({"correlation_id": -1}, "properties.correlation-id: -1 (int) cannot be sent as ulong"),
        ({"user_id": "u"}, "properties.user-id: 'u' (str) cannot be sent as binary"),
        ({"to": b"q"}, "properties.to: b'q' (bytes) cannot be sent as string"),
        ({"subject": "\ud800"}, "properties.subject: "),
        ({"content_type": "é"}, "properties.content-type: 'é' (str) is not ASCII"),
        ({"group_sequence": -1}, "properties.group-sequence: -1 (int) cannot be sent as uint"),
        ({"creation_time": dt.datetime(2024, 1, 1)}, "properties.creation-time: "),  # noqa: DTZ001
        ({"ttl_ms": -1}, "-1 (int) cannot be sent as uint"),
        ({"message_annotations": {"é": 1}}, "message-annotations: 'é' (str) is not ASCII"),
        ({"footer": 5}, "footer: 5 (int) cannot be sent as annotations"),
        ({"delivery_annotations": 5}, "5 (int) cannot be sent as delivery-annotations"),
        ({"application_properties": [1]}, "a list cannot be sent as application-properties"),
        ({"durable": 1}, "1 (int) cannot be sent as boolean"),
        ({"first_acquirer": "no"}, "'no' (str) cannot be sent as boolean"),
        ({"priority": None}, "None (NoneType) cannot be sent as uint"),
        ({"priority": 256}, "256 (int) cannot be sent as ubyte"),
        ({"delivery_count": 1.5}, "1.5 (float) cannot be sent as uint"),
        ({"ttl_ms": "60"}, "'60' (str) cannot be sent as uint"),
    ],
)
def test_what_cannot_be_sent_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EncodeError) as caught:
        Message(b"", **fields).encode()
    assert caught.value.description.startswith(said)


@pytest.mark.req("M12", "M2")
def test_the_bare_message_of_a_received_message_is_immutable() -> None:
    received = Message.decode(WIRES["everything"][0].encode())

    for name, value in [
        ("subject", "x"),
        ("message_id", 1),
        ("properties", Properties()),
        ("application_properties", {}),
        ("body", b""),
    ]:
        with pytest.raises(LocalProtocolError, match="immutable"):
            setattr(received, name, value)
    with pytest.raises(AttributeError):
        received.properties.subject = "x"  # type: ignore[misc]
    for mapping in (
        received.application_properties,
        received.message_annotations,
        received.delivery_annotations,
        received.footer,
        Message.decode(b"").footer,
    ):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


@pytest.mark.req("M12", "M2")
def test_a_changed_copy_keeps_the_sections_that_were_not_changed() -> None:
    wire = bytes.fromhex(UNUSUAL["wide"])
    where = walk(wire)
    received = Message.decode(wire)

    copy = received.replace(subject="other", body=b"new", body_kind="value")

    assert received.encode() is wire
    changed = copy.encode()
    assert changed.startswith(wire[: where.properties])
    assert wire[where.application_properties : where.body] in changed
    assert changed.endswith(b"\x00\x53\x77\xa0\x03new" + wire[where.footer :])
    copy.to = "q"
    assert (copy.to, copy.subject, copy.body) == ("q", "other", b"new")
    assert Message.decode(copy.encode()).to == "q"
    assert received.replace(body_kind="value").body == Sequence(["q"])
    with pytest.raises(TypeError, match="'sujet'"):
        received.replace(sujet="x")


def test_a_built_message_can_be_changed_until_it_is_sent() -> None:
    message = Message("a", subject="s")
    message.subject = None
    message.durable = True
    message.application_properties = {"n": 1}
    message.message_annotations["x-opt-a"] = 1  # type: ignore[index]
    message.body = "b"
    message.footer = None

    assert content(Message.decode(message.encode())) == [
        Header(durable=True),
        {},
        {"x-opt-a": 1},
        Properties(),
        {"n": 1},
        "value",
        "b",
        (),
        {},
    ]


@pytest.mark.req("M13")
@pytest.mark.parametrize("body", ["text", None, Sequence([1]), {"a": 1}])
@pytest.mark.parametrize("name", ["content_type", "content_encoding"])
def test_content_type_and_encoding_are_for_data(name: str, body: object) -> None:
    message = Message(body, **{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match=name.replace("_", "-")):
        message.encode()
    received = Message.decode(Message(b"", **{name: "x"}).encode())  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        received.replace(body=body).encode()


@pytest.mark.req("M13")
def test_identity_is_never_said_but_relayed() -> None:
    for spelling in ("identity", "Identity"):
        with pytest.raises(LocalProtocolError, match="identity"):
            Message(b"", content_encoding=spelling).encode()
    wire = bytes.fromhex("005373c01208" + "40404040404040" + "a3086964656e74697479" + "00537740")
    message = Message.decode(wire)
    assert message.content_encoding == "identity"
    assert message.replace(durable=True).encode().endswith(wire)


def test_properties_name_the_field_that_is_wrong() -> None:
    for wire, said in [
        ("005373c0080340a00161" + "a101ff", "properties.to: "),
        ("005373c00302" + "4055", "properties.user-id: binary expected"),
        ("005373c0040240a101", "properties.user-id: "),
        ("005373c00301" + "4040", "properties: 1 octets are left over"),
        ("005373c00e0c" + "40" * 11 + "5601", "properties.group-sequence: uint expected"),
        ("005373c0020e40", "properties: 14 elements do not fit"),
        ("005373c10100", "properties: a list expected"),
        ("005373c000", "properties: "),
        ("005373d000000000", "properties: "),
    ]:
        octets = bytes.fromhex(wire)
        with pytest.raises(DecodeError) as caught:
            content(Message.decode(octets))
        assert caught.value.description.startswith(said)


@pytest.mark.req("T9")
@pytest.mark.parametrize("code", range(0x70, 0x79))
@pytest.mark.parametrize(
    "value", ["00", "0001", "000000000000", "01ff", "02ff02", "020240", "0402404040"]
)
def test_sizes_and_counts_that_lie(code: int, value: str) -> None:
    for constructor in ("a0", "b0", "c0", "c1", "d0", "d1", "e0", "f0"):
        octets = bytes.fromhex(f"0053{code:02x}{constructor}{value}")
        for read in (lambda octets: content(Message.decode(octets)), walk_head):
            try:
                read(octets)
            except DecodeError:
                pass


# --- Application properties ---


@pytest.mark.req("M16")
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -(1 << 63),
        UByte(1),
        UInt(1),
        Int(-1),
        0.5,
        Float32(0.5),
        Decimal64(b"12345678"),
        Char("é"),
        Timestamp(5),
        U,
        b"bytes",
        "text",
        "x" * 300,
        Symbol("symbol"),
    ],
)
def test_simple_values_are_application_properties(value: object) -> None:
    message = Message.decode(Message(b"", application_properties={"kéy": value}).encode())
    assert same(message.application_properties["kéy"], value)
    assert check_application_properties(message) is None


COMPOUND: list[object] = [[], [1], {}, {"a": 1}, (1,), Array([1]), Map([(1, 2)]), Described(1, 2)]


@pytest.mark.req("M16")
@pytest.mark.parametrize("value", [*COMPOUND, Error("a:b"), object()])
def test_other_values_are_never_sent(value: object) -> None:
    with pytest.raises(LocalProtocolError, match=r"'key'.* only simple values"):
        Message(b"", application_properties={"key": value}).encode()


@pytest.mark.req("M16")
@pytest.mark.parametrize("key", [1, b"key", None])
def test_keys_are_strings(key: Any) -> None:
    with pytest.raises(LocalProtocolError, match="keys of application properties are strings"):
        Message(b"", application_properties={key: 1}).encode()
    octets = b"\x00\x53\x74" + encode({key: 1})
    with pytest.raises(DecodeError, match="application-properties: the keys are strings"):
        _ = Message.decode(octets).application_properties


@pytest.mark.req("M16", "M2")
@pytest.mark.parametrize("value", COMPOUND)
def test_other_values_are_relayed_and_readable(value: object) -> None:
    octets = b"\x00\x53\x74" + encode({"key": value}) + b"\x00\x53\x77\x40"
    message = Message.decode(octets)

    error = check_application_properties(message)

    assert encode(message.application_properties["key"]) == encode(value)
    assert message.encode() is octets
    assert message.replace(durable=True).encode().endswith(octets)
    assert error is not None
    assert error.condition == "amqp:decode-error"
    assert "'key'" in str(error.description)


def test_application_properties_refuse_a_key_twice() -> None:
    for keys in ("a10161" + "40" + "a10161" + "40", "a10161" + "40" + "a30161" + "40"):
        octets = bytes.fromhex("005374c10904" + keys)
        with pytest.raises(DecodeError, match="application-properties: a key is there twice"):
            _ = Message.decode(octets).application_properties


def test_application_property_that_has_no_encoding() -> None:
    with pytest.raises(EncodeError, match=r"the application property 'n'.*int"):
        Message(b"", application_properties={"n": 1 << 64}).encode()
    with pytest.raises(EncodeError, match="application property"):
        Message(b"", application_properties={"\ud800": 1}).encode()


# --- Bodies ---


@pytest.mark.req("T10", "M1")
def test_bodies_of_several_sections() -> None:
    message = Message.decode(bytes.fromhex("005375a00161" * 3))
    assert (message.body, message.data) == (b"aaa", (b"a", b"a", b"a"))
    message = Message.decode(bytes.fromhex("005376c003015501" + "00537645" + "005376c003015502"))
    assert message.body == Sequence([1, 2])
    assert type(message.body) is Sequence


@pytest.mark.parametrize(
    ("body", "kind"),
    [("text", "data"), ([b"a", "b"], "data"), ("ab", "sequence"), ({}, "sequence")],
)
def test_a_body_that_is_not_of_its_kind(body: object, kind: Any) -> None:
    with pytest.raises(TypeError):
        Message(body, body_kind=kind)
    with pytest.raises(ValueError, match="'data', 'sequence' or 'value'"):
        Message(b"", body_kind="json")  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [object(), 1 << 64, {1: object()}, Sequence([object()])])
def test_a_body_without_an_encoding(body: object) -> None:
    with pytest.raises(EncodeError, match=r"^the body: "):
        Message(body).encode()


def test_a_value_that_lies_about_its_inside_is_found_when_it_is_read() -> None:
    octets = bytes.fromhex("005377c00503a10161")  # claims three elements, has two
    octets += b"\x40"
    message = Message.decode(octets)
    with pytest.raises(DecodeError, match=r"^amqp-value: "):
        _ = message.body
    assert message.encode() is octets


def test_payloads_that_are_no_bytes_are_taken_as_such() -> None:
    for payload in (bytearray(b"\x00\x53\x75\xa0\x01a"), memoryview(b"\x00\x53\x75\xa0\x01a")):
        assert Message.decode(payload).body == b"a"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (Message(b"hi", subject="s"), "Message(b'hi', 2 bytes of data, subject='s')"),
        (Message("hello", message_id=ULong(5)), "Message('hello', message_id=ULong(5))"),
        (Message(None), "Message(None)"),
        (Message([1] * 9), "Message(list of 9)"),
        (Message({1: 2}), "Message(dict of 1)"),
        (Message(Sequence([1])), "Message(Sequence of 1)"),
        (Message(Array([1])), "Message(a Array)"),
    ],
)
def test_a_message_shows_itself(message: Message, shown: str) -> None:
    assert repr(message) == shown
    assert repr(Message.decode(message.encode())) == shown


def test_a_message_shows_itself_briefly() -> None:
    for body in (b"\x00" * 9999, "é" * 9999, b"x" * 9999, ["x" * 9999]):
        message = Message(body, to="q" * 9999, subject="s" * 9999)
        assert len(repr(message)) < 350
        assert len(repr(walk_head(message.encode()))) < 350
    assert "x" * 60 not in repr(Message("x" * 100))
    broken = Message.decode(bytes.fromhex("005373c0040240a101"))
    assert repr(broken).startswith("Message(9 bytes, properties.user-id")
    assert len(repr(Message.decode(bytes.fromhex("005377c00502a1016140")))) < 200


# --- Signatures ---


@pytest.mark.req("M17")
@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
def test_a_signature_holds_for_the_bare_message(algorithm: Any) -> None:
    message = Message("pay 5", subject="order", footer={"x-opt-other": 1}, durable=True)
    sign(message, b"key", algorithm=algorithm)
    wire = message.encode()

    assert verify(wire, b"key", algorithm=algorithm)
    assert verify(message, b"key", algorithm=algorithm)
    assert Message.decode(wire).footer["x-opt-other"] == 1
    relayed = Message.decode(wire)
    relayed.delivery_count = 7
    relayed.message_annotations = {"x-opt-hop": 1}
    assert verify(relayed.encode(), b"key", algorithm=algorithm)
    assert not verify(wire, b"another", algorithm=algorithm)
    assert not verify(wire.replace(b"pay 5", b"pay 6"), b"key", algorithm=algorithm)
    assert not verify(wire.replace(b"order", b"Order"), b"key", algorithm=algorithm)
    assert not verify(Message("pay 5").encode(), b"key", algorithm=algorithm)


@pytest.mark.req("M17", "M2")
def test_a_received_message_can_be_signed_without_touching_it() -> None:
    wire = bytes.fromhex(UNUSUAL["symbols"])
    message = Message.decode(wire)
    sign(message, b"key")
    where = walk(wire)

    assert message.encode().startswith(wire[: where.footer])
    assert verify(message.encode(), b"key")
    assert message.footer["x-opt-f"] == 3


@pytest.mark.req("M17")
def test_signatures_take_a_key_and_a_hash_that_hold() -> None:
    with pytest.raises(ValueError, match="empty key"):
        sign(Message(b""), b"")
    with pytest.raises(ValueError, match="sha256"):
        verify(b"", b"key", algorithm="md5")  # type: ignore[arg-type]
    with pytest.raises(DecodeError):
        verify(b"garbage", b"key")
    forged = Message(b"", footer={"x-opt-hmac-sha256": "text"}).encode()
    assert not verify(forged, b"key")


# --- Streams ---


def streamed(octets: bytes, size: int, limits: Limits | None = None) -> tuple[bytes, Message]:
    reader = BodyReader(limits) if limits else BodyReader()
    body = b"".join(
        piece for at in range(0, len(octets), size) for piece in reader.feed(octets[at : at + size])
    )
    return body, reader.finish()


STREAMS = [
    Message(b"", subject="s"),
    Message(b"hello"),
    Message([b"a" * 300, b"", b"bc"], body_kind="data", durable=True, footer={"x-opt-f": 1}),
    Message(
        [b"x"] * 9,
        body_kind="data",
        message_annotations={"x-opt-a": "y" * 400},
        application_properties={"n": 1},
        content_type="text/plain",
    ),
]


@pytest.mark.req("X19", "M1")
@pytest.mark.parametrize("message", STREAMS)
def test_a_body_is_read_while_it_arrives(message: Message) -> None:
    whole = message.encode()
    for size in range(1, len(whole) + 1):
        body, received = streamed(whole, size)
        assert body == message.body
        assert received.properties == message.properties
        assert received.footer == message.footer
        assert received.body_kind is None


@pytest.mark.req("X19", "M1")
@pytest.mark.parametrize("wire", ["wide", "wide descriptors", "symbols"])
def test_streams_in_other_encodings(wire: str) -> None:
    octets = bytes.fromhex(UNUSUAL[wire])
    where = walk(octets)
    octets = octets[: where.body] + b"\x00\x53\x75\xb0\0\0\0\x01a" + octets[where.footer :]
    for size in range(1, 40):
        body, received = streamed(octets, size)
        assert body == b"a"
        assert received.subject == "s"
        assert received.footer == {"x-opt-f": 3}


def test_the_front_is_there_when_the_body_begins() -> None:
    reader = BodyReader()
    front = Message(b"", subject="s").encode_front()
    begin = bytearray()
    write_data(begin, 1 << 30)

    assert reader.feed(front) == []
    assert reader.message is None
    assert reader.feed(bytes(begin)) == []
    assert reader.message is not None
    assert reader.message.subject == "s"
    assert reader.feed(b"x" * 1000) == [b"x" * 1000]
    with pytest.raises(DecodeError, match="ends inside a section"):
        reader.finish()


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ("00537740", "made of data, not of amqp-value"),
        ("00537645", "made of data, not of amqp-sequence"),
        ("005375a00161" + "00537045", "header comes after data"),
        ("005375a000" + "005378c10100" + "005375a000", "data comes after footer"),
        ("0053704500537045", "header comes after header"),
        ("40", "a section expected"),
        ("00" * 70, "descriptor"),
        ("005375a101", "data: a binary expected"),
        ("005379", "no section"),
        ("005370ff", "header: a list expected"),
    ],
)
def test_what_cannot_be_streamed(wire: str, said: str) -> None:
    octets = bytes.fromhex(wire)
    for size in (1, 7, len(octets)):
        with pytest.raises(DecodeError, match=said):
            streamed(octets, size)


@pytest.mark.req("T9")
def test_what_surrounds_a_streamed_body_is_bounded() -> None:
    limits = Limits(message_size_max=100)
    fits = Message(b"x" * 500, message_annotations={"x-opt-a": "y" * 83})
    assert len(fits.encode_front()) == 100
    assert streamed(fits.encode(), 10, limits)[0] == fits.body
    large = Message(b"", message_annotations={"x-opt-a": "y" * 84})
    with pytest.raises(DecodeError, match="message_size_max"):
        streamed(large.encode(), 10, limits)
    with pytest.raises(DecodeError, match="message_size_max"):
        BodyReader(limits).feed(bytes.fromhex("005372d1ffffffff00000000"))


def test_a_data_section_says_its_size() -> None:
    for size, wire in [(0, "005375a000"), (255, "005375a0ff"), (256, "005375b000000100")]:
        out = bytearray()
        write_data(out, size)
        assert out.hex() == wire
    with pytest.raises(EncodeError, match="32 bits"):
        write_data(bytearray(), 1 << 32)


# --- Vectors ---


def test_the_composite_vectors(shared: Path) -> None:
    cases = json.loads((shared / "spec/vectors/amqp10/composites.json").read_text())["cases"]
    classes: dict[str, type[Header | Properties]] = {"header": Header, "properties": Properties}
    read: dict[str, Callable[[Any], object]] = {
        "uuid": UUID,
        "binary": lambda value: bytes.fromhex(value["hex"]),
    }
    found = 0
    for case in cases:
        if cls := classes.get(case["type"]):
            value = decode_composite(bytes.fromhex(case["hex"]), cls)
            for name, field in case["fields"].items():
                wanted = read.get(field["type"], lambda value: value)(field["value"])
                assert getattr(value, name.replace("-", "_")) == wanted
            assert decode_composite(encode_composite(value), cls) == value
            message = Message.decode(bytes.fromhex(case["hex"]))
            assert getattr(message, case["type"]) == value
            found += 1
    assert found >= 6


def test_the_message_of_the_interoperability_vectors(shared: Path) -> None:
    octets = (shared / "spec/vectors/proton-interop/message.amqp").read_bytes()
    message = Message.decode(octets)
    assert (message.body_kind, message.body) == ("value", b"\xa1\x05hello")
    assert message.header == Header()
    assert message.properties == Properties(
        absolute_expiry_time=Timestamp(0), creation_time=Timestamp(0), group_sequence=0
    )
    assert message.encode() == octets


@pytest.mark.req("T9")
def test_the_fuzz_inputs_that_broke_others(shared: Path) -> None:
    lines = (shared / "spec/vectors/proton-fuzz.jsonl").read_text().splitlines()
    inputs = [json.loads(line) for line in lines]
    payloads = [base64.b64decode(one["b64"]) for one in inputs if one["target"] == "message-decode"]
    assert len(payloads) > 100
    for payload in payloads:
        for read in (lambda octets: content(Message.decode(octets)), walk_head):
            try:
                read(payload)
            except DecodeError:
                pass


@pytest.mark.req("M1")
@pytest.mark.parametrize(
    ("message", "octets"),
    [
        (Message(b"ab", message_id=1, durable=True, footer={"x-opt-a": 1}), b"ab"),
        (Message(b""), b""),
        (Message(bytes(300)), bytes(300)),
        (Message([b"a", b"b"], body_kind="data"), None),
        (Message("ab"), None),
        (Message([1], body_kind="sequence"), None),
    ],
)
def test_a_body_of_one_data_section_is_read_without_a_message(
    message: Message, octets: bytes | None
) -> None:
    assert read_data(message.encode()) == octets


def test_octets_that_are_no_message_have_no_data() -> None:
    with pytest.raises(DecodeError):
        read_data(b"\x00\x53\x75\xa0\x05ab")
    # A descriptor that is written at length is for the reader that takes its time.
    assert read_data(b"\x00\x80\0\0\0\0\0\0\0\x75\xa0\x01a") is None


def test_a_message_names_the_fields_that_it_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"^a message has no field sujet, ttl$"):
        Message(b"", sujet="x", ttl=1, durable=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="give ttl_ms or ttl_s, not both"):
        Message(b"", ttl_ms=1, ttl_s=1)
