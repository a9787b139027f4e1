"""Values, structs, controls and commands against the vectors of another codec, and against rules."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from amqp010_targets import segments010
from amqp_rt_amqp010 import layouts
from amqp_rt_amqp010.assembling import Assembler
from amqp_rt_amqp010.codec import (
    read_command,
    read_control,
    read_entries,
    read_struct,
    read_value,
    split_entries,
    write_command,
    write_control,
    write_entries,
    write_struct,
    write_value,
)
from amqp_rt_amqp010.faults import CommandFault, ConnectionFault
from amqp_rt_amqp010.frames import FrameReader, assembly_frames, control_frames
from amqp_rt_amqp010.layouts import (
    COMMANDS,
    CONTROLS,
    CommandFragment,
    Composite,
    ConnectionClose,
    ConnectionOpen,
    ConnectionStart,
    DeliveryProperties,
    DtxStart,
    ErrorCode,
    ExecutionResult,
    FragmentProperties,
    MessageAccept,
    MessageProperties,
    MessageTransfer,
    QueueDeclare,
    RecoverResult,
    ReplyTo,
    SessionAttach,
    SessionCompleted,
    SessionExpected,
    SessionHeader,
    SessionRequestTimeout,
    StreamProperties,
    XaResult,
    Xid,
)
from amqp_rt_amqp010.limits import ELEMENTS_MAX, NESTING_MAX, RANGES_MAX
from amqp_rt_amqp010.plans import wire_fields
from amqp_rt_amqp010.reading import DecodeFault, Reader
from amqp_rt_amqp010.serials import MASK, RangeSet
from amqp_rt_amqp010.values import (
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
    as_text,
)
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.fronts import Byte, Char, Float32, Int, Short, Symbol, UByte, UInt, ULong, UShort

VECTORS = Path(__file__).parent / "vectors"
PRIMITIVES = json.loads((VECTORS / "primitives.json").read_text("utf-8"))["cases"]
OPERATIONS = json.loads((VECTORS / "ops.json").read_text("utf-8"))["cases"]
TRANSFER = MessageTransfer.CODE
#: Elements of the types of the specification, by their names.
TYPES = {
    each.attrib["name"]: each
    for each in ET.parse(
        Path(__file__).parent / "specification" / "amqp.0-10-qpid-errata.stripped.xml"
    ).iterfind("{http://www.amqp.org/schema/amqp.xsd}type")
}
#: Types of fields only, which have no code.
UNCODED = {"sequence-no", "sequence-set", "byte-ranges"}
CODES = {name: int(each.attrib["code"], 0) for name, each in TYPES.items() if name not in UNCODED}


@pytest.mark.parametrize("name", ["primitives.json", "ops.json"])
def test_the_copies_of_the_vectors_are_copies(name: str, shared: Path) -> None:
    theirs = shared / "spec" / "vectors" / "amqp010" / name
    assert (VECTORS / name).read_bytes() == theirs.read_bytes()


# --- vectors -----------------------------------------------------------------------------------------


def plain(value: object, *, nested: bool = True) -> object:
    """Return *value* as the vectors spell it, which leave out zeros in nested structs."""
    if isinstance(value, bool | float | str | None):
        return value
    if isinstance(value, Datetime):
        return {"datetime": int(value)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, UUID):
        return {"uuid": str(value)}
    if isinstance(value, RangeSet):
        return {"ranges": [list(each) for each in value.ranges()]}
    if isinstance(value, dict):
        return {"map": {name: plain(each) for name, each in value.items()}}
    if isinstance(value, Array):
        return [plain(each) for each in value.items]
    if isinstance(value, list):
        return [plain(each) for each in value]
    assert isinstance(value, Composite)
    found: dict[str, object] = {"struct": value.NAME.partition(".")[2].replace("-", "_")}
    for name, kind, _ in wire_fields(type(value)):
        held = getattr(value, name)
        if kind == "bit" and held:
            found[name.rstrip("_")] = True
        elif kind != "bit" and held is not None and (held != 0 or not nested):
            found[name.rstrip("_")] = {"datetime": held} if kind == "datetime" else plain(held)
    return found


def set_of(ranges: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack(">II", *each) for each in ranges)


@pytest.mark.parametrize("case", PRIMITIVES, ids=lambda case: f"{case['type']} {case['hex'][:16]}")
def test_values_of_another_codec(case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if case["type"] == "sequence-set":
        command, _ = read_command(bytes.fromhex("040201000100") + data)
        assert isinstance(command, MessageAccept)
        value: object = command.transfers
        assert write_command(command)[6:] == data
    else:
        code = bytes((CODES[case["type"]],))
        value = read_value(code + data)
        assert write_value(value) == code + data
    assert plain(value) == case["value"]


@pytest.mark.parametrize("case", OPERATIONS, ids=lambda case: case["name"])
def test_controls_and_commands_of_another_codec(case: Any) -> None:
    assembler = Assembler(1 << 20)
    [found] = filter(
        None, map(assembler.receive, FrameReader(65535).feed(bytes.fromhex(case["frames"])))
    )
    assert found.channel == case["channel"]
    assert found.code == case["class_code"] << 8 | case["code"]
    assert found.content.hex() == case["segments"][0]["payload"]
    read: Composite
    if case["kind"] == "control":
        read = read_control(found.content)
        written = write_control(read)
        frames = control_frames(found.channel, found.content, 65535)
    else:
        read, sync = read_command(found.content)
        assert sync == case["sync"]
        written = write_command(read, sync=sync)
        frames = assembly_frames(found.channel, found.content, found.header, found.body, 65535)
    assert case["name"] == read.NAME
    described = plain(read, nested=False)
    assert isinstance(described, dict)
    del described["struct"]
    assert described == {
        name.replace("-", "_"): value for name, value in case["args"].items() if value is not False
    }
    # That codec writes empty arrays as arrays of void.
    if b"\0\0\0\x05\xf0" not in found.content:
        assert written == found.content
    if case["name"] == "message.transfer":
        assert found.header is not None
        assert found.body is not None
        assert b"".join(found.body).hex() == case["body"]
        entries = read_entries(found.header, TRANSFER)
        assert [plain(each) for each in entries] == case["headers"]
        assert write_entries(entries) == found.header
        assert (
            b"".join(octets for _, octets in split_entries(found.header, TRANSFER)) == found.header
        )
    if len(case["frames"]) == 2 * len(b"".join(frames)):
        assert b"".join(frames).hex() == case["frames"]


# --- the type system ---------------------------------------------------------------------------------

#: Values of each type with a code, but for the bit, which occurs as a flag only.
VALUES: dict[str, list[object]] = {
    "bin8": [Bin(b"\xff")],
    "int8": [Byte(-128), Byte(127)],
    "uint8": [UByte(0), UByte(255)],
    "char": [LatinChar("€"), LatinChar("\0")],
    "boolean": [True, False],
    "bin16": [Bin(b"ab")],
    "int16": [Short(-32768), Short(32767)],
    "uint16": [UShort(65535)],
    "bin32": [Bin(b"abcd")],
    "int32": [Int(-(2**31)), Int(2**31 - 1)],
    "uint32": [UInt(2**32 - 1)],
    "float": [Float32(0.5), Float32(math.inf)],
    "char-utf32": [Char("😀"), Char("a")],
    "bin64": [Bin(bytes(8))],
    "int64": [0, -(2**63), 2**63 - 1],
    "uint64": [ULong(0), ULong(2**64 - 1)],
    "double": [0.1, -math.inf],
    "datetime": [Datetime(0), Datetime(-1), Datetime(1_700_000_000)],
    "bin128": [Bin(bytes(16))],
    "uuid": [UUID(int=7)],
    "bin256": [Bin(bytes(32))],
    "bin512": [Bin(bytes(64))],
    "bin1024": [Bin(bytes(128))],
    "vbin8": [Vbin8(b""), Vbin8(b"x" * 255)],
    "str8-latin": [Str8Latin("grüße €")],
    "str8": [Str8("grüße")],
    "str8-utf16": [Str8Utf16("grüße 😀")],
    "vbin16": [b"", b"x" * 65535],
    "str16-latin": [Str16Latin("é" * 65535)],
    "str16": ["", "grüße 😀", "x" * 65535],
    "str16-utf16": [Str16Utf16("\ufeffgrüße 😀")],
    "vbin32": [Vbin32(b"x"), Vbin32(b"x" * 65536)],
    "map": [{}, {"a": UByte(1), "": {"b": [None]}}],
    "list": [[], [1, UByte(2), "3", b"4", [True]]],
    "array": [
        *(Array(0xF0, []), Array(0xF0, [None, None]), Array(0x02, [UByte(1), UByte(2)])),
        *(Array(0x95, ["a", ""]), Array(0xA8, [{}, {"k": 1}]), Array(0x85, [Str8("a")])),
        *(Array(0xAA, [Array(0x31, [1])]), Array(0x10, [Bin(b"ab")]), Array(0x08, [True])),
        *(Array(0xC8, [Dec32(0, 0)]), Array(0x48, [UUID(int=1)]), Array(0x90, [b"", b"x"])),
        Array(0xAB, [Xid(format=1, global_id=b"g", branch_id=b"b"), UnknownStruct(0x0909, b"?")]),
    ],
    "struct32": [
        *(XaResult(status=3), UnknownStruct(0xFF00, b""), UnknownStruct(0x0406, b"\0")),
        MessageProperties(application_headers={"deep": Datetime(5)}),
    ],
    "bin40": [Bin(bytes(5))],
    "dec32": [Dec32(2, -314), Dec32(255, 2**31 - 1)],
    "bin72": [Bin(bytes(9))],
    "dec64": [Dec64(0, -(2**63))],
    "void": [None],
}


def same(one: object, other: object) -> bool:
    """Compare values and their types, nested ones included."""
    if type(one) is not type(other):
        # Structs of the same type are equal only if all their fields are.
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Array) and isinstance(other, Array):
        return one.code == other.code and same(one.items, other.items)
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    return one == other


def test_all_types_of_the_specification_are_known() -> None:
    assert len(TYPES) == 45
    assert set(VALUES) | {"bit"} | UNCODED == set(TYPES)


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_keeps_its_type_and_width(kind: str) -> None:
    for value in VALUES[kind]:
        data = write_value(value)
        assert data[0] == CODES[kind]
        element = TYPES[kind]
        if "fixed-width" in element.attrib:
            assert len(data) == 1 + int(element.attrib["fixed-width"])
        else:
            width = int(element.attrib["variable-width"])
            assert int.from_bytes(data[1 : 1 + width], "big") == len(data) - 1 - width
        assert same(read_value(data), value), value
        assert same(read_value(write_value({"k": [value]})), {"k": [value]})


@pytest.mark.parametrize(
    "value",
    [
        *(Opaque(0xF1, b""), Opaque(0x03, b"x"), Opaque(0x1F, b"xy"), Opaque(0x7F, b"z" * 128)),
        *(Opaque(0x8F, b""), Opaque(0x9F, b"xyz"), Opaque(0xAF, b"xyz" * 99_999)),
        *(Opaque(0xC1, b"12345"), Opaque(0xD1, b"123456789"), Opaque(0xFF, b"")),
    ],
)
def test_values_of_unknown_types_are_kept(value: Opaque) -> None:
    for each in (
        value,
        {"before": 1, "it": value, "after": "2"},
        Array(value.code, [value, value]),
    ):
        assert same(read_value(write_value(each)), each)


@pytest.mark.parametrize("code", [0xB0, 0xBF, 0xE0, 0xEF])
def test_values_of_reserved_widths_cannot_be_skipped(code: int) -> None:
    with pytest.raises(DecodeFault, match="reserved"):
        read_value(bytes((code, 0, 0, 0, 0)))
    with pytest.raises(ValueError, match="does not fit"):
        write_value(Opaque(code, b""))


def test_bits_of_floats_are_kept() -> None:
    for data in (b"\x23\x7f\x80\0\1", b"\x23\xff\xc1\x23\x45", b"\x33\x7f\xf8\0\0\0\0\0\5"):
        assert write_value(read_value(data)) == data


def test_plain_values_are_written_in_their_usual_types() -> None:
    assert write_value(2**63)[0] == CODES["uint64"]
    assert write_value(b"x" * 65536)[0] == CODES["vbin32"]
    assert write_value(Symbol("x")) == write_value("x")
    assert write_value(ErrorCode.NOT_FOUND) == write_value(404)
    assert write_value((1,)) == write_value([1])


@pytest.mark.parametrize(
    "data", ["a800000000", "a80000000400000000", "a900000000", "a90000000400000000", "aa00000000"]
)
def test_empty_collections_need_no_count(data: str) -> None:
    found = read_value(bytes.fromhex(data))
    assert found in ({}, [], Array(0xF0, []))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        *((object(), "no type"), ({1: 2}, "no text"), (2**64, "does not fit")),
        *(("x" * 65536, "at most 65535 fit"), (Str8("x" * 256), "at most 255 fit")),
        *((Vbin8(b"x" * 256), "at most 255 fit"), ("\ud800", "surrogates")),
        *((Array(0x02, ["x"]), "does not fit"), (Array(0x95, [1]), "no text")),
        *((Array(0x23, [1]), "no Float32"), (Array(0x10, [b"x"]), "1 octets, and its type has 2")),
        *(
            (Array(0xA8, [1]), "does not fit"),
            (Dec32(256, 0), "decimal"),
            (Dec64(0, 2**63), "decimal"),
        ),
        *(
            (ReplyTo(), "does not fit"),
            (QueueDeclare(), "does not fit"),
            (CommandFragment(), "fit"),
        ),
    ],
    ids=lambda each: f"{each:.20}" if isinstance(each, str) else type(each).__name__,
)
def test_values_that_have_no_encoding(value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        write_value(value)


def test_tagged_values_hold_what_their_type_can() -> None:
    for octets in (b"", b"abc"):
        with pytest.raises(ValueError, match="no fixed-width binary"):
            Bin(octets)
    for text in ("ab", "", "Ω"):
        with pytest.raises(ValueError, match="one character of ISO-8859-15"):
            LatinChar(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (Str8("x"), "x"),
        (b"x", "x"),
        (Vbin32("é".encode()), "é"),
        (b"\xff", None),
        (1, None),
    ],
)
def test_octets_are_text_where_a_name_is_meant(value: object, text: str | None) -> None:
    found = as_text(value)
    assert found == text
    assert type(found) is type(text)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        *(("", "1 octets, and 0"), ("95", "2 octets"), ("950002", "needs 2 octets, and 0")),
        *(("31000000", "needs 8 octets, and 3"), ("95000261", "needs 2 octets, and 1")),
        *(("a8ffffffff", "4294967295 octets, and 0"), ("a9ffffffff00000000", "and 4 are there")),
        ("a80000000300000000", "needs 4 at least"),
        *(("a800000003000000", "needs 4 at least"), ("aa00000004f0000000", "needs 5 at least")),
        *(("ab0000000106", "needs 2 at least"), ("a90000000400000001", "1 values do not fit")),
        *(
            ("a9000000050000000002", "after its last part"),
            ("a90000000900000001f0f0f0f0f0", "after"),
        ),
        *(("aa0000000902ffffffff00000000", "4294967295 values do not fit"),),
        *(("a80000000a000000020161f00161f0", "key 'a' twice"), ("9500 01ff", "not UTF-8")),
        *(("8501ff", "not UTF-8"), ("860161", "not UTF-16-BE"), ("8602d800", "not UTF-16-BE")),
        *(("2700110000", "not UTF-32-BE"), ("270000d800", "not UTF-32-BE")),
        *(("ab0000000406010400", "flags for fields"), ("f0f0", "follow a value")),
        *(
            ("ab00000005060101 0000", "needs 2 octets, and 1"),
            ("ab00000007060101000007ff", "after"),
        ),
        ("aa0000000ab0000000010000000000", "reserved"),
    ],
)
def test_malformed_values(data: str, complaint: str) -> None:
    with pytest.raises(DecodeFault, match=complaint):
        read_value(bytes.fromhex(data))


# --- structs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "data"),
    [
        # A size of one octet, one of flags.
        (SessionHeader(sync=True), "0101"),
        (SessionHeader(), "0100"),
        # A size of two octets and no code.
        (ReplyTo(exchange="e", routing_key="k"), "0006 0300 0165 016b"),
        (ReplyTo(), "0002 0000"),
        # No size and no flags.
        (CommandFragment(command_id=5, byte_ranges=[(0, 9)]), "00000005 0010" + "0" * 31 + "9"),
        # A size of four octets and a code.
        (Xid(format=1, global_id=b"g"), "0000000a 0604 0300 00000001 0167"),
        # The ninth field has the lowest bit of the second octet.
        (DeliveryProperties(discard_unroutable=True, exchange=""), "00000005 0401 0101 00"),
        (MessageProperties(application_headers={}), "0000000c 0403 0001 00000004 00000000"),
        (FragmentProperties(), "00000004 0402 0300"),
        (FragmentProperties(first=False, last=False), "00000004 0402 0000"),
        (StreamProperties(timestamp=-1), "0000000c 0a01 1000 ffffffffffffffff"),
        (
            RecoverResult(in_doubt=Array(0xAB, [Xid(format=0, global_id=b"", branch_id=b"")])),
            "0000001b 0603 0100 00000013 ab 00000001 0000000a 0604 0700 00000000 00 00",
        ),
    ],
    ids=lambda value: value.NAME if isinstance(value, Composite) else None,
)
def test_structs_have_size_code_and_flags_as_declared(value: Composite, data: str) -> None:
    octets = bytes.fromhex(data)
    assert write_struct(value) == octets
    assert read_struct(octets, type(value)) == value


def test_a_fragment_has_no_flags_for_absent_fields() -> None:
    with pytest.raises(ValueError, match="byte_ranges cannot be absent"):
        write_struct(CommandFragment(command_id=5))


@pytest.mark.parametrize(
    ("of", "data", "complaint"),
    [
        (ReplyTo, "0009 0300 0165 016b", "9 octets, and 6"),
        (ReplyTo, "0007 0300 0165 016b 00", "after its last field"),
        (ReplyTo, "0002 0400", "flags for fields"),
        (ReplyTo, "0001 00", "needs 2 octets"),
        (ReplyTo, "0002 0000 00", "follow message.reply-to"),
        (SessionHeader, "0102", "flags for fields"),
        (Xid, "00000004 0601 0000", "other than dtx.xid"),
        (Xid, "00000004 0909 0000", "other than dtx.xid"),
        (CommandFragment, "00000005 0008 0000000000000000", "no whole ranges"),
        (CommandFragment, "00000005 0010" + "0" * 15 + "9" + "0" * 16, "out of order"),
        (
            CommandFragment,
            "00000005 0020" + "0" * 16 + "0" * 15 + "4" + "0" * 15 + "5" + "0" * 15 + "7",
            "5 to 7 out of order",
        ),
    ],
)
def test_malformed_structs(of: type[Composite], data: str, complaint: str) -> None:
    with pytest.raises(DecodeFault, match=complaint):
        read_struct(bytes.fromhex(data), of)


# --- controls and commands ---------------------------------------------------------------------------


def test_absent_is_neither_zero_nor_empty() -> None:
    for timeout in (None, 0):
        control = SessionRequestTimeout(timeout=timeout)
        assert read_control(write_control(control)) == control
    for accept, destination in ((None, None), (0, ""), (None, ""), (1, None)):
        command = MessageTransfer(accept_mode=accept, destination=destination)
        found, _ = read_command(write_command(command))
        assert found == command
        assert isinstance(found, MessageTransfer)
        assert found.accept_mode == accept


def test_the_session_header_is_between_code_and_flags() -> None:
    command = QueueDeclare(queue="q", durable=True)
    for sync, octets in ((False, "0801 0100 0900 0171"), (True, "0801 0101 0900 0171")):
        data = bytes.fromhex(octets)
        assert write_command(command, sync=sync) == data
        assert read_command(data) == (command, sync)


@pytest.mark.parametrize("of", [*CONTROLS.values(), *COMMANDS.values()], ids=lambda of: of.NAME)
def test_empty_and_full_operations_come_back(of: type[Any]) -> None:
    samples: dict[str, object] = {
        "bit": True,
        "uint8": 7,
        "uint16": 700,
        "uint32": MASK,
        "uint64": 2**64 - 1,
        "sequence-no": MASK,
        "str8": "é" * 127,
        "str16": "t",
        "vbin8": b"b",
        "vbin16": b"\xff",
        "vbin32": b"v",
        "sequence-set": RangeSet([(MASK, 3)]),
        "map": {"k": [UByte(1)]},
        "str16-array": ["a", "b"],
        "array": Array(0x95, ["a"]),
        "struct32": XaResult(status=0),
        "xid": Xid(format=1, global_id=b"g", branch_id=b""),
    }
    full = of(**{name: samples[kind] for name, kind, _ in wire_fields(of)})
    for made in (of(), full):
        if of.NAME.startswith(("connection.", "session.")):
            assert read_control(write_control(made)) == made
        else:
            for sync in (True, False):
                assert read_command(write_command(made, sync=sync)) == (made, sync)


def test_texts_of_arrays_may_have_any_width() -> None:
    for array in (Array(0x85, [Str8("PLAIN")]), Array(0x90, [b"PLAIN"]), Array(0x95, ["PLAIN"])):
        data = bytes.fromhex("01010200") + write_value(array)[1:]
        found = read_control(data)
        assert isinstance(found, ConnectionStart)
        assert found.mechanisms == ["PLAIN"]
        assert type(found.mechanisms[0]) is str
    with pytest.raises(ConnectionFault, match="should be a text"):
        read_control(bytes.fromhex("01010200") + write_value(Array(0x02, [UByte(1)]))[1:])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        *(("", "needs 2 octets"), ("02", "needs 2 octets"), ("0263", "no control 99 in class 2")),
        *(("04010000", "no control 1 in class 4"), ("0201", "needs 2 octets, and 0")),
        *(("02010400", "flags for fields that it has not: 0x0004"), ("02010080", "has not")),
        *(("0201010000", "needs 2 octets, and 1"), ("0201000000", "after its last field")),
        *(("020a0100 0007" + "00" * 7, "no whole ranges"),),
        *(("020a0100 0008 0000000500000003", "5 to 3 of a sequence-set is inverted"),),
        *(("020a0100 0008 00000000ffffffff", "0 to 4294967295 of a sequence-set is inverted"),),
        *(("020a0100 0008 0000000080000000", "is inverted"),),
    ],
)
def test_malformed_controls_end_the_connection(data: str, complaint: str) -> None:
    with pytest.raises(ConnectionFault, match=complaint) as caught:
        read_control(bytes.fromhex(data))
    assert caught.value.code == layouts.CloseCode.FRAMING_ERROR
    assert str(caught.value) == caught.value.text


@pytest.mark.parametrize(
    ("data", "code", "place", "complaint"),
    [
        ("", 503, (None, None, None), "needs 2 octets"),
        ("0b010100", 540, (11, 1, None), "no command 1 in class 11"),
        ("0463", 540, (4, 99, None), "no command 99 in class 4"),
        ("04010000", 503, (4, 1, None), "malformed session header"),
        ("0401020000", 503, (4, 1, None), "malformed session header"),
        ("040101020000", 503, (4, 1, None), "malformed session header"),
        ("040101000800", 503, (4, 1, None), "has not: 0x0008"),
        ("040101000001", 503, (4, 1, None), "has not: 0x0100"),
        ("0401010007000165", 503, (4, 1, 1), "needs 1 octets, and 0"),
        ("04010100010005", 503, (4, 1, 0), "needs 5 octets"),
        ("0401010001000165ff", 503, (4, 1, None), "after its last field"),
        ("06020101 0300 00000004 0604 0800", 503, (6, 2, 0), "has not"),
        ("04020100 0100 0004 00000000", 503, (4, 2, 0), "no whole ranges"),
    ],
)
def test_malformed_commands_end_the_session(
    data: str, code: int, place: tuple[int | None, ...], complaint: str
) -> None:
    with pytest.raises(CommandFault, match=complaint) as caught:
        read_command(bytes.fromhex(data))
    fault = caught.value
    assert fault.code == code
    assert (fault.class_code, fault.command_code, fault.field_index) == place
    assert str(fault) == fault.text


def test_ranges_that_touch_or_are_out_of_order_are_one_set() -> None:
    for ranges in ([(0, 2), (3, 4)], [(3, 4), (0, 2)], [(0, 3), (1, 4)], [(0, 4), (2, 2)]):
        octets = set_of(ranges)
        command, _ = read_command(
            bytes.fromhex("040201000100") + struct.pack(">H", len(octets)) + octets
        )
        assert isinstance(command, MessageAccept)
        assert command.transfers == RangeSet([(0, 4)])


def test_a_sequence_set_holds_as_many_ranges_as_its_size_can_tell() -> None:
    for count, fits in ((RANGES_MAX, True), (RANGES_MAX + 1, False)):
        control = SessionCompleted(commands=RangeSet((2 * n, 2 * n) for n in range(count)))
        if fits:
            assert read_control(write_control(control)) == control
        else:
            with pytest.raises(ValueError, match="at most 65535 fit"):
                write_control(control)


def test_fragments_are_kept_as_they_came() -> None:
    control = SessionExpected(commands=RangeSet([(0, 0)]), fragments=Array(0x90, [b"?"]))
    assert read_control(write_control(control)) == control


@pytest.mark.parametrize(
    "command",
    [
        MessageAccept(transfers=[(0, 1)]),  # type: ignore[arg-type]
        DtxStart(xid=ReplyTo()),  # type: ignore[arg-type]
        ExecutionResult(value=5),
        QueueDeclare(queue=b"q"),  # type: ignore[arg-type]
    ],
    ids=lambda command: command.NAME,
)
def test_fields_of_another_type_are_not_written(command: Any) -> None:
    with pytest.raises(ValueError, match=r"does not fit|no text"):
        write_command(command)


def test_fields_beyond_their_width_are_not_written() -> None:
    for control in (ConnectionClose(reply_code=65536), ConnectionOpen(virtual_host="x" * 256)):
        with pytest.raises(ValueError, match="fit"):
            write_control(control)
    with pytest.raises(ValueError, match="at most 65535"):
        write_control(SessionAttach(name=b"x" * 65536))


# --- headers -----------------------------------------------------------------------------------------


def test_unknown_entries_are_passed_on() -> None:
    entries = [
        UnknownStruct(0x0777, b"\1\2\3"),
        MessageProperties(content_length=5, reply_to=ReplyTo(exchange="", routing_key="r")),
        DeliveryProperties(priority=4, ttl=5),
    ]
    data = write_entries(entries)
    assert read_entries(data, TRANSFER) == entries
    codes = [code for code, _ in split_entries(data, TRANSFER)]
    assert codes == [0x0777, 0x0403, 0x0401]
    assert read_entries(b"", TRANSFER) == []


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        *(
            ("000000", "needs 4 octets"),
            ("00000001 04", "has no code"),
            ("00000000", "has no code"),
        ),
        *(("00000004 0401", "needs 4 octets, and 2"), ("ffffffff 0401", "4294967295 octets")),
        *(("00000004 0401 0000 00000004 0401 0000", "0x0401 twice"),),
        *(("00000004 0401 0010", "has not"), ("00000005 0401 0000 00", "after its last part")),
    ],
)
def test_malformed_headers(data: str, complaint: str) -> None:
    with pytest.raises(CommandFault, match=complaint) as caught:
        read_entries(bytes.fromhex(data), TRANSFER)
    assert caught.value.code == ErrorCode.COMMAND_INVALID
    assert (caught.value.class_code, caught.value.command_code) == (4, 1)


# --- limits ------------------------------------------------------------------------------------------


def with_arguments(arguments: bytes) -> bytes:
    """Encode ``queue.declare`` with the octets of a map."""
    return bytes.fromhex("080101004000") + arguments


def nested(depth: int) -> bytes:
    """Encode a map of *depth* levels: lists in it."""
    data = b""
    for _ in range(depth - 1):
        count = b"\0\0\0\1\xa9" if data else b"\0\0\0\0"
        data = struct.pack(">I", len(count + data)) + count + data
    data = b"\0\0\0\1\1k\xa9" + data
    return struct.pack(">I", len(data)) + data


def test_values_are_bounded_in_depth() -> None:
    read_command(with_arguments(nested(NESTING_MAX)))
    with pytest.raises(CommandFault, match=f"more than {NESTING_MAX} deep") as caught:
        read_command(with_arguments(nested(NESTING_MAX + 1)))
    assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert caught.value.field_index == 6


@pytest.mark.parametrize("kind", ["list", "array"])
def test_values_are_bounded_in_number(kind: str) -> None:
    for count, fits in ((ELEMENTS_MAX - 1, True), (ELEMENTS_MAX, False)):
        if kind == "list":
            inner = b"\xa9" + struct.pack(">II", 4 + count, count) + b"\xf0" * count
        else:
            # Values of a type without width take no octets at all.
            inner = b"\xaa" + struct.pack(">IBI", 5, 0xF0, count)
        data = b"\0\0\0\1\1k" + inner
        octets = with_arguments(struct.pack(">I", len(data)) + data)
        if fits:
            read_command(octets)
        else:
            with pytest.raises(CommandFault, match=f"more than {ELEMENTS_MAX} values") as caught:
                read_command(octets)
            assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


def test_entries_are_bounded_in_number() -> None:
    for count, fits in ((ELEMENTS_MAX, True), (ELEMENTS_MAX + 1, False)):
        data = b"".join(struct.pack(">IH", 2, code) for code in range(0x1000, 0x1000 + count))
        if fits:
            assert len(split_entries(data, TRANSFER)) == count
        else:
            with pytest.raises(CommandFault, match=f"more than {ELEMENTS_MAX} structs"):
                split_entries(data, TRANSFER)


HUGE = "ffffffff"
LIES = [
    *(f"{code}{HUGE}" for code in ("a0", "a8", "a9", "aa", "ab", "af")),
    *(f"{code}{HUGE}{HUGE}" for code in ("a8", "a9")),
    *(f"{code}00000009{HUGE}f0f0f0f0f0" for code in ("a8", "a9")),
    *(f"aa00000005{code}{HUGE}" for code in ("f0", "f1", "ff", "00", "70", "85", "a8")),
    *("80ff", "90ffff", "85ff", "95ffff", "9fffff"),
]


@pytest.mark.parametrize("lie", LIES)
def test_sizes_and_counts_that_lie_cost_no_memory(lie: str) -> None:
    data = bytes.fromhex(lie)

    def survive() -> None:
        with pytest.raises(DecodeFault):
            read_value(data)

    survive()  # whatever is made once only
    tracemalloc.start()
    try:
        survive()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32_768


# --- any values, any octets --------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LATIN = st.binary(max_size=20).map(lambda octets: octets.decode("iso-8859-15"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | TEXT
    | st.binary(max_size=20)
    | st.uuids()
    | st.integers(-128, 127).map(Byte)
    | st.integers(0, 255).map(UByte)
    | st.integers(-(2**15), 2**15 - 1).map(Short)
    | st.integers(0, 2**16 - 1).map(UShort)
    | st.integers(-(2**31), 2**31 - 1).map(Int)
    | st.integers(0, 2**32 - 1).map(UInt)
    | st.integers(0, 2**64 - 1).map(ULong)
    | st.integers(-(2**63), 2**63 - 1).map(Datetime)
    | st.integers(0, 2**32 - 1).map(Float32.from_bits)
    | st.characters(exclude_categories=["Cs"]).map(Char)
    | st.integers(0, 255).map(lambda octet: LatinChar(bytes((octet,)).decode("iso-8859-15")))
    | st.sampled_from([1, 2, 4, 5, 8, 9, 16, 32, 64, 128]).flatmap(
        lambda size: st.binary(min_size=size, max_size=size).map(Bin)
    )
    | st.binary(max_size=20).map(Vbin8)
    | st.binary(max_size=20).map(Vbin32)
    | TEXT.map(Str8)
    | TEXT.map(Str8Utf16)
    | TEXT.map(Str16Utf16)
    | LATIN.map(Str8Latin)
    | LATIN.map(Str16Latin)
    | st.builds(Dec32, st.integers(0, 255), st.integers(-(2**31), 2**31 - 1))
    | st.builds(Dec64, st.integers(0, 255), st.integers(-(2**63), 2**63 - 1))
    | st.builds(UnknownStruct, st.integers(0x0B00, 0xFFFF), st.binary(max_size=9))
    | st.builds(Opaque, st.sampled_from([0x8F, 0x9F, 0xAF]), st.binary(max_size=9))
    | st.builds(XaResult, status=st.none() | st.integers(0, 65535))
)
ANY = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=3).map(
            lambda headers: MessageProperties(application_headers=headers)
        )
        | st.lists(st.dictionaries(TEXT, inner, max_size=2), max_size=3).map(
            lambda maps: Array(0xA8, list(maps))
        )
        | st.lists(st.lists(inner, max_size=2), max_size=3).map(
            lambda lists: Array(0xA9, list(lists))
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(ANY)
def test_any_value_comes_back_with_its_type(value: object) -> None:
    data = write_value(value)
    found = read_value(data)
    assert same(found, value) or write_value(found) == data


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_any_octets_are_a_value_or_a_fault(data: bytes) -> None:
    segments010(data)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Segments of the vectors, and values, with a few octets changed, removed or inserted."""
    octets = st.sampled_from(
        [bytes.fromhex(each["payload"]) for case in OPERATIONS for each in case["segments"]]
    )
    data = bytearray(draw(octets | ANY.map(write_value)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["change", "remove", "insert", "cut"]))
        if how == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "remove":
            del data[at : at + 1]
        elif how == "insert":
            data.insert(at, draw(st.integers(0, 255)))
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.slow
@given(damaged())
def test_damaged_octets_are_a_value_or_a_fault(data: bytes) -> None:
    segments010(data)


def test_a_reader_reads_a_part_of_its_octets() -> None:
    reader = Reader(b"xx\x02\x05yy", 2, 4)
    assert reader.value() == 5
    assert (reader.at, reader.end) == (4, 4)
    with pytest.raises(DecodeFault, match="and 0 are there"):
        reader.uint8()
