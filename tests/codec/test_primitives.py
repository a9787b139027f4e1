from __future__ import annotations

import datetime as dt
import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from uuid import UUID

import pytest
from typed_values import same

from amqp_rt.codec import primitives
from amqp_rt.codec.primitives import (
    NESTING_CEILING,
    Reader,
    decode,
    encode,
    write_value,
)
from amqp_rt.errors import DecodeError, EncodeError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
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

U = UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6")

#: Value, how we write it, how else a peer may write it.
WIRES: list[tuple[object, str, list[str]]] = [
    (None, "40", []),
    (True, "41", ["5601"]),
    (False, "42", ["5600"]),
    (UByte(0), "5000", []),
    (UByte(255), "50ff", []),
    (UShort(0), "600000", []),
    (UShort(0xFFFF), "60ffff", []),
    (UInt(0), "43", ["5200", "7000000000"]),
    (UInt(1), "5201", ["7000000001"]),
    (UInt(255), "52ff", ["70000000ff"]),
    (UInt(256), "7000000100", []),
    (UInt(0xFFFF_FFFF), "70ffffffff", []),
    (ULong(0), "44", ["5300", "800000000000000000"]),
    (ULong(255), "53ff", ["8000000000000000ff"]),
    (ULong(256), "800000000000000100", []),
    (ULong(0xFFFF_FFFF_FFFF_FFFF), "80ffffffffffffffff", []),
    (Byte(-128), "5180", []),
    (Byte(-1), "51ff", []),
    (Byte(127), "517f", []),
    (Short(-32768), "618000", []),
    (Short(32767), "617fff", []),
    (Int(0), "5400", ["7100000000"]),
    (Int(-128), "5480", ["71ffffff80"]),
    (Int(127), "547f", ["710000007f"]),
    (Int(-129), "71ffffff7f", []),
    (Int(128), "7100000080", []),
    (Int(-0x8000_0000), "7180000000", []),
    (Int(0x7FFF_FFFF), "717fffffff", []),
    (0, "5500", ["810000000000000000"]),
    (-128, "5580", ["81ffffffffffffff80"]),
    (127, "557f", ["81000000000000007f"]),
    (-129, "81ffffffffffffff7f", []),
    (128, "810000000000000080", []),
    (-(1 << 63), "818000000000000000", []),
    ((1 << 63) - 1, "817fffffffffffffff", []),
    (Float32(0.1), "723dcccccd", []),
    (Float32(-0.0), "7280000000", []),
    (Float32.from_bits(0x7F80_0001), "727f800001", []),
    (0.1, "823fb999999999999a", []),
    (-0.0, "828000000000000000", []),
    (struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0], "82fff8000000001234", []),
    (Decimal32(b"\x22\x50\0\1"), "7422500001", []),
    (Decimal64(bytes(range(8))), "840001020304050607", []),
    (Decimal128(bytes(range(16))), "94000102030405060708090a0b0c0d0e0f", []),
    (Char("A"), "7300000041", []),
    (Char("\U0010ffff"), "730010ffff", []),
    (Timestamp(0), "830000000000000000", []),
    (Timestamp(-1), "83ffffffffffffffff", []),
    (U, "98f81d4fae7dec11d0a76500a0c91e6bf6", []),
    (b"", "a000", ["b000000000"]),
    (b"a\0", "a0026100", ["b0000000026100"]),
    (b"x" * 255, "a0ff" + "78" * 255, []),
    (b"x" * 256, "b000000100" + "78" * 256, []),
    ("", "a100", ["b100000000"]),
    ("été", "a105c3a974c3a9", ["b100000005c3a974c3a9"]),
    ("\U0001f600", "a104f09f9880", []),
    ("é" * 128, "b100000100" + "c3a9" * 128, []),
    (Symbol(""), "a300", ["b300000000"]),
    (Symbol("a-b"), "a303612d62", ["b300000003612d62"]),
    (Symbol("s" * 256), "b300000100" + "73" * 256, []),
    ([], "45", ["c00100", "d00000000400000000"]),
    ([1, "a", None], "c00703 5501 a10161 40", ["d0 0000000a 00000003 5501 a10161 40"]),
    ([[True], []], "c00602 c0020141 45", ["c00802 c0020141 c00100"]),
    ([None] * 255, "d0 00000103 000000ff" + "40" * 255, []),
    ([None] * 254, "c0 ff fe" + "40" * 254, []),
    ([None] * 256, "d0 00000104 00000100" + "40" * 256, []),
    ({}, "c10100", ["d10000000400000000"]),
    (
        {"b": 1, Symbol("a"): None},
        "c10a04 a10162 5501 a30161 40",
        ["d10000000d00000004 a10162 5501 a30161 40"],
    ),
    (
        Map([(True, 1), (1, 2), (UInt(1), 3), (1.0, 4)]),
        "c11708 41 5501 5501 5502 5201 5503 823ff0000000000000 5504",
        [],
    ),
    (Map([("a", 1), (Symbol("a"), 2)]), "c10b04 a10161 5501 a30161 5502", []),
    (Map([([1], 2)]), "c10802 c0030155015502", []),
    (Array([], Symbol), "e00200a3", ["f00000000500000000a3", "e00200b3"]),
    (Array([], UInt), "e0020070", ["e0020052", "e0020043"]),
    (Array([], int, (ULong(7), "d")), "e0090000530700a1016481", []),
    (
        Array([Int(1), Int(-2)]),
        "e00a02 71 00000001 fffffffe",
        ["f00000000d00000002 71 00000001 fffffffe", "e00402 54 01fe"],
    ),
    (Array([ULong(0)] * 3), "e01a0380" + "00" * 24, ["e0020344", "e0050353000000"]),
    (Array([True, False]), "e00402560100", []),
    (Array([True, True]), "e00402560101", ["e0020241"]),
    (Array([UByte(1), UByte(2)]), "e00402500102", []),
    (Array([Float32(0.5)]), "e00601723f000000", []),
    (Array([None, None]), "e0020240", []),
    (Array([U]), "e0120198" + U.hex, []),
    (
        Array([Symbol("a"), Symbol("bc")]),
        "e00702a3 0161 026263",
        ["e00d02b3 0000000161 000000026263"],
    ),
    (
        Array(["", "y" * 256]),
        "f00000010d00000002b1 00000000 00000100" + "79" * 256,
        [],
    ),
    (
        Array([[], [Int(7)]]),
        "e01402d0 0000000400000000 00000006000000015407",
        ["e00802c0 0100 03015407"],
    ),
    (Array([{}], dict), "e00a01d1 0000000400000000", ["e00401c1 0100"]),
    (
        Array([Array([UByte(1)]), Array([], str)]),
        "e01502f0 00000006 00000001 5001 00000005 00000000 a1",
        ["e00902e0 03015001 0200a1"],
    ),
    (
        Array([Int(1), Int(2)], Int, (Symbol("d"),)),
        "e00e02 00 a30164 71 00000001 00000002",
        ["f00000001100000002 00 a30164 71 00000001 00000002"],
    ),
    (
        Array([UByte(9)], UByte, (ULong(1), ULong(2))),
        "e00901 005301 005302 50 09",
        [],
    ),
    (Described(ULong(36), []), "00532445", ["00800000000000000024c00100"]),
    (Described("URL", "x"), "00a10355524ca10178", []),
    (Described(Described(1, 2), Described(3, 4)), "0000550155020055035504", []),
    (Described([1], {"a": b""}), "00c003015501c10602a10161a000", []),
]

ENCODINGS = [
    pytest.param(value, wire.replace(" ", ""), id=f"{value!r:.40}-{wire[:12]}")
    for value, ours, theirs in WIRES
    for wire in (ours, *theirs)
]


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6")
@pytest.mark.parametrize(
    ("value", "wire"),
    [pytest.param(value, wire.replace(" ", ""), id=f"{value!r:.40}") for value, wire, _ in WIRES],
)
def test_a_value_is_written_in_its_shortest_form(value: object, wire: str) -> None:
    assert encode(value).hex() == wire


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6")
@pytest.mark.parametrize(("value", "wire"), ENCODINGS)
def test_every_encoding_is_read(value: object, wire: str) -> None:
    data = bytes.fromhex(wire)
    assert same(decode(data), value)
    assert same(decode(encode(decode(data))), value)


@pytest.mark.req("T9")
@pytest.mark.parametrize(("value", "wire"), ENCODINGS)
def test_cut_anywhere_it_is_an_error(value: object, wire: str) -> None:
    data = bytes.fromhex(wire)
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode(data[:length])
        with pytest.raises(DecodeError):
            Reader(data[:length]).skip_value()
        # The same with the rest of the bytes still there, beyond what may be read.
        with pytest.raises(DecodeError):
            Reader(data, 0, length).read_value()
        with pytest.raises(DecodeError):
            Reader(data, 0, length).skip_value()


@pytest.mark.req("T9")
@pytest.mark.parametrize(("value", "wire"), ENCODINGS)
def test_what_follows_a_value_is_left_alone(value: object, wire: str) -> None:
    data = bytes.fromhex(wire)
    with pytest.raises(DecodeError, match="1 octets are left over"):
        decode(data + b"\x40")
    around = b"\x41" + data + b"\x42"
    reader = Reader(around, 1)
    assert same(reader.read_value(), value)
    assert reader.at == len(around) - 1
    assert reader.peek_code() == 0x42
    reader = Reader(around, 1)
    reader.skip_value()
    assert reader.at == len(around) - 1
    # Reading spends nothing that a later value needs: neither depth nor the end is lost.
    assert (reader.end, reader.depth) == (len(around), DEFAULT_LIMITS.nesting_max)


@pytest.mark.req("T1")
def test_every_constructor_is_read_or_refused() -> None:
    assigned = {int(wire[:2], 16) for _, ours, theirs in WIRES for wire in (ours, *theirs)}
    assert len(assigned) == 40  # 39 of Part 1 §1.6 and the 0x00 of described values
    for code in set(range(256)) - assigned:
        data = bytes((code,)) + bytes(20)
        for read in (decode, lambda octets: Reader(octets).skip_value()):
            with pytest.raises(DecodeError, match=f"constructor 0x{code:02x}"):
                read(data)
        with pytest.raises(DecodeError, match=f"constructor 0x{code:02x}"):
            decode(bytes((0xE0, 10, 1, code)) + bytes(8))


INVALID = [
    ("5602", "a boolean is 0 or 1, not 2"),
    ("a102c328", "not UTF-8"),
    ("a103eda080", "not UTF-8"),
    ("b100000001ff", "not UTF-8"),
    ("a301ff", "not ASCII"),
    ("b30000000180", "not ASCII"),
    ("7300110000", "no Unicode character"),
    ("730000d800", "no Unicode character"),
    ("c00001", "do not fit"),
    ("c0020241", "do not fit"),
    ("c003025500", "2 elements expected, 1 are there"),
    ("c0030141ff", "left over"),
    ("c0030180000000000000000001", "8 octets expected"),
    ("d000000003000000", "4 octets expected"),
    ("d0ffffffff00000000", "exceeds"),
    ("d000000004ffffffff", "4294967295 elements do not fit"),
    ("c10101", "do not fit"),
    ("c103015401", "a key without a value"),
    ("d10000000600000001 5401", "a key without a value"),
    ("c109 04 a10161 40 a10161 40", "a key twice: 'a'"),
    ("c109 04 5401 5401 5401 5402", "a key twice: Int.1."),
    ("e001", "2 octets expected"),
    ("e00000", "does not even hold its count"),
    ("e00100", "a value is missing"),
    ("e0020271", "2 elements do not fit"),
    ("e00402710000", "4 octets expected"),
    ("e0050271000000", "4 octets expected"),
    ("e00302710000", "exceeds|do not fit"),
    ("e004015000ff", "left over"),
    ("e0020000", "a value is missing"),
    ("e00402a10005", "left over|expected"),
    ("f000000005ffffffff44", "more elements than elements_max"),
    ("f000000005ffffffff40", "more elements than elements_max"),
    ("f0ffffffff0000000040", "exceeds"),
]


@pytest.mark.req("T1", "T5", "T9")
@pytest.mark.parametrize(("wire", "why"), INVALID)
def test_malformed_bytes_are_refused_with_the_reason(wire: str, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as caught:
        decode(bytes.fromhex(wire))
    assert caught.value.condition == "amqp:decode-error"


KEYS_TWICE = [
    ("c10704 5400 40 7100000000 40", Int(0)),
    ("c10804 5201 40 7000000001 40", UInt(1)),
    ("c10704 41 40 5601 40", True),
    ("c10b04 c0020141 40 c0020141 40", [True]),
    ("c10904 c00100 40 45 40", []),
]


@pytest.mark.req("T5")
@pytest.mark.parametrize(("wire", "key"), KEYS_TWICE)
def test_a_key_in_another_width_is_the_same_key(wire: str, key: object) -> None:
    body = bytes.fromhex(wire)[3:]
    with pytest.raises(DecodeError, match="a key twice"):
        decode(bytes((0xC1, len(body) + 1, 4)) + body)
    with pytest.raises(EncodeError, match="a key twice"):
        encode(Map([(key, None), (key, None)]))


@pytest.mark.req("T5")
def test_ordinary_maps_are_dicts_in_their_order() -> None:
    for keys in (["b", "a", "c"], [Symbol("x"), "y"], [-1, -2, 3], [U, b"u", Timestamp(3)]):
        found = decode(encode(dict.fromkeys(keys)))
        assert type(found) is dict
        assert list(found) == keys


@pytest.mark.req("T9")
def test_keys_chosen_to_collide_do_not_make_a_slow_dict() -> None:
    # UUIDs hash as the number they are, modulo 2**61 - 1: a peer can make as many as it likes.
    prime = (1 << 61) - 1
    keys = [UUID(int=7 + n * prime) for n in range(100)]
    assert len({hash(key) for key in keys}) == 1
    found = decode(encode(Map((key, None) for key in keys)))
    assert type(found) is Map
    assert found.keys() == keys
    few = dict.fromkeys(keys[:10])
    assert same(decode(encode(few)), few)


@pytest.mark.req("T9")
@pytest.mark.parametrize("around", ["list", "map", "map key", "array", "described", "descriptor"])
def test_nesting_stops_at_nesting_max(around: str) -> None:
    limits = Limits(nesting_max=5)
    wrap: dict[str, Callable[[object], object]] = {
        "list": lambda value: [value],
        "map": lambda value: {"a": value},
        "map key": lambda value: Map([(value, 1)]),
        "array": lambda value: Array([value]),
        "described": lambda value: Described(1, value),
        "descriptor": lambda value: Described(value, 1),
    }
    value: object = UInt(300)
    for _ in range(5):
        value = wrap[around](value)
    data = encode(value)
    assert encode(decode(data, limits)) == data
    with pytest.raises(DecodeError, match="nesting_max"):
        decode(encode(wrap[around](value)), limits)
    # The budget is given back on the way out: as deep again beside it is no deeper.
    beside = encode([value, value])
    assert encode(decode(beside, Limits(nesting_max=6))) == beside


@pytest.mark.req("T9")
def test_described_arrays_count_their_descriptors_as_depth() -> None:
    array = Array([1], int, (1, 2, 3, 4))
    assert same(decode(encode(array), Limits(nesting_max=5)), array)
    with pytest.raises(DecodeError, match="nesting_max"):
        decode(encode(array), Limits(nesting_max=4))


@pytest.mark.req("T9")
@pytest.mark.parametrize("code", ["c0", "00", "e0"])
def test_no_limit_allows_more_than_the_stack_bears(code: str) -> None:
    limits = Limits(nesting_max=1_000_000)
    if code == "00":
        data = bytes(100_000)
    elif code == "c0":
        data = b"\x45"
        for _ in range(5_000):
            data = b"\xd0" + struct.pack(">II", len(data) + 4, 1) + data
    else:
        data = b"\x40"
        for _ in range(5_000):
            data = b"\xf0" + struct.pack(">II", len(data) + 4, 1) + data
    with pytest.raises(DecodeError, match="nesting_max"):
        decode(data, limits)


@pytest.mark.req("T9")
def test_skipping_bounds_descriptors_and_minds_no_depth_in_compounds() -> None:
    with pytest.raises(DecodeError, match="nested deeper"):
        Reader(bytes(100_000)).skip_value()
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    data = encode(deep)
    reader = Reader(data)
    reader.skip_value()
    assert reader.at == len(data)


@pytest.mark.req("T9")
def test_elements_are_one_budget_for_everything_read() -> None:
    limits = Limits(elements_max=10)
    assert decode(encode([None] * 10), limits) == [None] * 10
    with pytest.raises(DecodeError, match="elements_max"):
        decode(encode([None] * 11), limits)
    assert decode(encode([[None] * 4, [None] * 4]), limits) == [[None] * 4] * 2
    with pytest.raises(DecodeError, match="elements_max"):
        decode(encode([[None] * 4, [None] * 5]), limits)
    with pytest.raises(DecodeError, match="elements_max"):
        decode(encode({n: n for n in range(6)}), limits)
    assert decode(bytes.fromhex("e0020a44"), limits) == Array([ULong(0)] * 10)
    with pytest.raises(DecodeError, match="elements_max"):
        decode(bytes.fromhex("e0020b44"), limits)
    reader = Reader(encode([1] * 6) * 2, limits=limits)
    reader.read_value()
    with pytest.raises(DecodeError, match="elements_max"):
        reader.read_value()


@pytest.mark.req("T1")
def test_an_empty_input_holds_no_value() -> None:
    for read in (Reader.read_value, Reader.skip_value, Reader.peek_code):
        with pytest.raises(DecodeError, match="a value is missing"):
            read(Reader(b""))
        with pytest.raises(DecodeError, match="a value is missing"):
            read(Reader(b"\x40\x40", 1, 1))
    assert Reader(b"\x40", 0, 99).end == 1


class Colour(IntEnum):
    RED = 1


class Name(StrEnum):
    X = "x"


class Text(str):
    __slots__ = ()


ALSO_TAKEN = [
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"abcd")[::2], b"ac"),
    ((1, "a"), [1, "a"]),
    (dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), Timestamp(1000)),
    (Colour.RED, 1),
    (Name.X, "x"),
    (Text("t"), "t"),
    (OrderedDict(a=1), {"a": 1}),
    (Map([("a", 1)]), {"a": 1}),
    (Array([1, 2], UInt), Array([UInt(1), UInt(2)])),
    (Array([1.5], Float32), Array([Float32(1.5)])),
    (Array(["a", Symbol("b")], Symbol), Array([Symbol("a"), Symbol("b")])),
    (Array([b"a", bytearray(b"b")]), Array([b"a", b"b"])),
    (Array([(1,), [2]]), Array([[1], [2]])),
    (Array([Map([("a", 1)]), {"b": 2}]), Array([{"a": 1}, {"b": 2}])),
]


@pytest.mark.req("T1", "T4", "T5")
@pytest.mark.parametrize(("value", "arrives_as"), ALSO_TAKEN)
def test_pythons_relatives_of_a_type_are_sent_as_that_type(
    value: object, arrives_as: object
) -> None:
    assert same(decode(encode(value)), arrives_as)


NOT_SENT = [
    (1 << 63, "9223372036854775808 .int. cannot be sent as long"),
    (-(1 << 63) - 1, "cannot be sent as long"),
    (10**10_000, "an int of 33220 bits cannot be sent as long"),
    ("\ud800", "is no text in UTF-8"),
    (Symbol("é"), "'é' .Symbol. is not ASCII"),
    (dt.datetime(2020, 1, 1), "no time zone"),  # noqa: DTZ001
    (object(), "an? object has no AMQP type"),
    ({1, 2}, "a set has no AMQP type"),
    (1j, "a complex has no AMQP type"),
    ([[object()]], "no AMQP type"),
    (Array([1, "a"]), "'a' .str. in an array of int"),
    (Array([UInt(1), ULong(1)]), "ULong.1. in an array of UInt"),
    (Array([1, True]), "True .bool. in an array of int"),
    (Array([True, 1]), "in an array of bool"),
    (Array([1, -1], UInt), "out of range"),
    (Array([256], UByte), "256 .int. cannot be sent as ubyte"),
    (Array([object()]), "cannot be the element type|no AMQP type"),
    (Array([], Described), "Described cannot be the element type"),
    (Array(["ab"], Char), "cannot be sent as char"),
]


@pytest.mark.req("T1", "T4")
@pytest.mark.parametrize(("value", "why"), NOT_SENT, ids=lambda value: f"{type(value).__name__}")
def test_what_has_no_encoding_is_refused_by_name(value: object, why: str) -> None:
    with pytest.raises(EncodeError, match=why):
        encode(value)


@pytest.mark.req("T9")
def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    mapping: dict[str, object] = {}
    mapping["itself"] = mapping
    for value in (loop, mapping, Described(1, loop), Array([loop])):
        with pytest.raises(EncodeError, match=f"deeper than {NESTING_CEILING}"):
            encode(value)


WRITERS = [
    ("null", None, "40", 0),
    ("boolean", True, "41", 1),
    ("ubyte", 255, "50ff", 256),
    ("ushort", 65_535, "60ffff", 65_536),
    ("uint", 256, "7000000100", 1 << 32),
    ("ulong", 256, "800000000000000100", 1 << 64),
    ("byte", -128, "5180", -129),
    ("short", -2, "61fffe", 32_768),
    ("int", -2, "54fe", 1 << 31),
    ("long", -2, "55fe", 1 << 63),
    ("float", 0.5, "723f000000", 1e39),
    ("double", 1, "823ff0000000000000", 10**400),
    ("decimal", Decimal32(b"abcd"), "7461626364", b"abcd"),
    ("char", "a", "7300000061", "ab"),
    ("timestamp", 1, "830000000000000001", 1 << 63),
    ("uuid", U, "98" + U.hex, U.bytes),
    ("binary", b"a", "a00161", 5),
    ("string", "a", "a10161", "\ud800"),
    ("symbol", "a", "a30161", "é"),
    ("list", [1], "c003015501", {}),
    ("map", {"a": 1}, "c10602a101615501", []),
    ("array", Array([1.0]), "e00a01823ff0000000000000", [1.0]),
    ("described", Described(1, 2), "0055015502", 1),
]


@pytest.mark.req("T1")
@pytest.mark.parametrize(("kind", "value", "wire", "wrong"), WRITERS)
def test_each_writer_writes_its_type_and_refuses_others(
    kind: str, value: object, wire: str, wrong: object
) -> None:
    write = getattr(primitives, f"write_{kind}")
    out = bytearray(b"before")
    write(out, value)
    assert out.hex() == b"before".hex() + wire.replace(" ", "")
    for other in (wrong, object()):
        with pytest.raises(EncodeError):
            write(bytearray(), other)


@pytest.mark.req("T1")
def test_a_value_is_appended() -> None:
    out = bytearray()
    for value in (1, "a", [None]):
        write_value(out, value)
    assert out.hex() == "5501a10161c0020140"


def python_value(kind: str, value: object, case: dict[str, object]) -> object:
    """The value that a vector of kind *kind* describes."""
    classes: dict[str, Callable[..., object]] = {
        "null": lambda _: None,
        "boolean": bool,
        "ubyte": UByte,
        "ushort": UShort,
        "uint": UInt,
        "ulong": ULong,
        "byte": Byte,
        "short": Short,
        "int": Int,
        "long": int,
        "float": lambda v: Float32.from_bits(bits(v)) if isinstance(v, dict) else Float32(v),
        "double": lambda v: struct.unpack(">d", octets(v))[0] if isinstance(v, dict) else v,
        "decimal32": lambda v: Decimal32(octets(v)),
        "decimal64": lambda v: Decimal64(octets(v)),
        "decimal128": lambda v: Decimal128(octets(v)),
        "char": Char,
        "timestamp": Timestamp,
        "uuid": UUID,
        "binary": lambda v: bytes.fromhex(v["hex"]),
        "string": str,
        "symbol": Symbol,
        "list": lambda v: [nested(item) for item in v],
        "map": lambda v: {nested(key): nested(item) for key, item in v},
    }

    def octets(pattern: dict[str, str]) -> bytes:
        return bytes.fromhex(pattern["bits"])

    def bits(pattern: dict[str, str]) -> int:
        return int(pattern["bits"], 16)

    def nested(entry: dict[str, object]) -> object:
        return python_value(str(entry["type"]), entry.get("value"), entry)

    if kind == "described":
        descriptor = case["descriptor"]
        assert isinstance(descriptor, dict)
        assert isinstance(value, dict)
        return Described(nested(descriptor), nested(value))
    if kind == "array":
        assert isinstance(value, list)
        element = str(case["element_type"])
        if element == "described":
            inner = [Described(nested(item["descriptor"]), Int(item["value"])) for item in value]
            return Array(inner)
        of = {"boolean": bool, "list": list, "uuid": UUID, "symbol": Symbol}.get(element)
        return Array(
            [python_value(element, item, {}) for item in value], of or (None if value else Int)
        )
    return classes[kind](value)


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6")
def test_the_valid_vectors(shared: Path) -> None:
    cases = json.loads((shared / "spec/vectors/amqp10/types-valid.json").read_text())["cases"]
    assert len(cases) > 150
    for case in cases:
        data = bytes.fromhex(case["hex"])
        expected = python_value(case["type"], case.get("value"), case)
        assert same(decode(data), expected), case
        if case["shortest"]:
            assert encode(expected) == data, case
        for length in range(len(data)):
            with pytest.raises(DecodeError):
                decode(data[:length])


@pytest.mark.req("T1", "T5", "T9")
def test_the_invalid_vectors(shared: Path) -> None:
    cases = json.loads((shared / "spec/vectors/amqp10/types-invalid.json").read_text())["cases"]
    assert len(cases) > 25
    for case in cases:
        try:
            value = decode(bytes.fromhex(case["hex"]))
        except DecodeError:
            continue
        pytest.fail(f"{case} was read as {value!r}")


def interop_value(kind: str, value: object) -> object:
    if kind == "described":
        descriptor, inner = value  # type: ignore[misc]
        return Described(interop_value(*descriptor), interop_value(*inner))
    if kind == "list":
        return [interop_value(*item) for item in value]  # type: ignore[attr-defined]
    if kind == "map":
        return {
            interop_value(*key): interop_value(*item)
            for key, item in value  # type: ignore[attr-defined]
        }
    if kind == "array":
        assert isinstance(value, dict)
        of = {"int": Int, "string": str}[value["element"]]
        items = [interop_value(value["element"], item) for item in value["values"]]
        descriptors = [interop_value(*value["descriptor"])] if "descriptor" in value else []
        return Array(items, of, tuple(descriptors))
    return python_value(kind, value, {})


@pytest.mark.req("T1", "T4", "T5", "T6")
def test_what_proton_wrote(shared: Path) -> None:
    folder = shared / "spec/vectors/proton-interop"
    files = json.loads((folder / "expected.json").read_text())["files"]
    assert len(files) == 9
    for name, expected in files.items():
        if name == "message":  # a message, not a value
            continue
        data = (folder / f"{name}.amqp").read_bytes()
        reader = Reader(data)
        found = []
        while reader.at < reader.end:
            found.append(reader.read_value())
        wanted = [interop_value(kind, value) for kind, value in expected]
        assert len(found) == len(wanted), name
        for one, other in zip(found, wanted, strict=True):
            assert same(decode(encode(one)), one), name
            if isinstance(one, dict):  # proton writes the entries in no particular order
                assert one.keys() == other.keys()
                one = {key: one[key] for key in other}
            assert same(one, other), name
