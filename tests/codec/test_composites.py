from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from typed_values import same

from amqp_rt.codec import composites
from amqp_rt.codec.composites import (
    ANNOTATIONS,
    ANY,
    BINARY,
    BOOLEAN,
    BYTE,
    DOUBLE,
    FIELDS,
    FLOAT,
    INT,
    LIST,
    LONG,
    MANDATORY,
    MAP,
    SHORT,
    STRING,
    SYMBOL,
    SYMBOLS,
    TIMESTAMP,
    UBYTE,
    UINT,
    ULONG,
    USHORT,
    UUID,
    FieldType,
    any_of,
    composite,
    composite_name,
    decode_composite,
    descriptor_of,
    encode_composite,
    fields_of,
    from_described,
    one_of,
    read_composite,
    read_described_as,
    read_known,
    registry_of,
)
from amqp_rt.codec.primitives import NESTING_CEILING, Reader, decode, encode
from amqp_rt.errors import DecodeError, EncodeError
from amqp_rt.limits import Limits
from amqp_rt.values import Array, Described, Map, Symbol, Timestamp, UInt, ULong


@composite(0x1D, ("condition", SYMBOL, MANDATORY), ("description", STRING))
class Fault(Struct, frozen=True, gc=False):
    condition: str
    description: str | None = None


@composite(0x24)
class Done(Struct, frozen=True, gc=False):
    pass


@composite(0x25, ("fault", one_of(Fault)))
class FaultyState(Struct, frozen=True, gc=False):
    fault: Fault | None = None


@composite(
    0x14,
    ("handle", UINT, MANDATORY),
    ("delivery_tag", BINARY),
    ("more", BOOLEAN, False),
    ("state", any_of(lambda: (Done, FaultyState))),
    ("priority", UBYTE, 4),
    ("names", SYMBOLS),
    ("fields", FIELDS),
)
class Move(Struct, gc=False):
    handle: int
    delivery_tag: bytes | None = None
    more: bool = False
    state: Any = None
    priority: int = 4
    names: tuple[str, ...] = ()
    fields: dict[Any, Any] | None = None


@composite(0x11, ("channel", USHORT), ("first", UINT, MANDATORY), ("name", STRING))
class Named(Struct, kw_only=True):
    channel: int | None = None
    first: int
    name: str | None = None


_COMPOUND = re.compile(r"([\[{<])(\d+) ([^\[\]{}<>]*)[\]}>]")


def octets(notation: str) -> bytes:
    """Hex digits, with ``[2 43 40]`` for a list8 of two elements, ``{2 ..}`` map8, ``<2 ..>`` array8."""

    def compound(match: re.Match[str]) -> str:
        body = bytes.fromhex(match[3])
        code = {"[": "c0", "{": "c1", "<": "e0"}[match[1]]
        return f"{code} {len(body) + 1:02x} {int(match[2]):02x} {body.hex()}"

    while (shorter := _COMPOUND.sub(compound, notation)) != notation:
        notation = shorter
    return bytes.fromhex(notation)


MOVE = b"amqp:move:list".hex()

#: Object, how we write it, how else a peer may write it.
WIRES: list[tuple[Struct, str, list[str]]] = [
    (Done(), "005324 45", ["005324 [0 ]", "005324 d00000000400000000"]),
    (
        Move(0),
        "005314 [1 43]",
        [
            "005314 [1 5200]",
            "005314 d0 00000009 00000001 7000000000",
            "00800000000000000014 [1 43]",
            f"00a30e{MOVE} [1 43]",
            f"00b30000000e{MOVE} [1 43]",
            "005314 [7 43 404040404040]",  # nothing left out
            "005314 [5 43 40 42 40 5004]",  # defaults spelt out
            "005314 [9 43 404040404040 [1 5501] 41]",  # surplus items
        ],
    ),
    (Move(256, b"tag"), "005314 [2 7000000100 a003746167]", []),
    (Move(1, None, True), "005314 [3 5201 40 41]", ["005314 [3 5201 40 5601]"]),
    (Move(1, priority=5), "005314 [5 5201 404040 5005]", []),
    (
        Move(1, state=Done()),
        "005314 [4 5201 4040 00532445]",
        ["005314 [4 5201 4040 00800000000000000024 45]"],
    ),
    (
        Move(1, state=FaultyState(Fault("a:b", "é"))),
        "005314 [4 5201 4040 005325 [1 00531d [2 a303613a62 a102c3a9]]]",
        [],
    ),
    (Move(1, state=Described(ULong(0x99), [1])), "005314 [4 5201 4040 005399 [1 5501]]", []),
    (Move(1, state=Described("x", 1)), "005314 [4 5201 4040 00 a10178 5501]", []),
    (Move(1, state="plain"), "005314 [4 5201 4040 a105706c61696e]", []),
    (
        Move(1, names=(Symbol("a"),)),
        "005314 [6 5201 40404040 a30161]",
        ["005314 [6 5201 40404040 <1 a3 0161>]", "005314 [6 5201 40404040 [1 a30161]]"],
    ),
    (
        Move(1, names=(Symbol("a"), Symbol("b"))),
        "005314 [6 5201 40404040 <2 a3 0161 0162>]",
        ["005314 [6 5201 40404040 [2 a30161 a30162]]"],
    ),
    (
        Move(1, fields={Symbol("k"): UInt(7)}),
        "005314 [7 5201 4040404040 {2 a3016b 5207}]",
        ["005314 [7 5201 4040404040 {2 a1016b 5207}]"],
    ),
    (Named(first=3), "005311 [2 40 5203]", []),
    (Named(channel=9, first=3, name="n"), "005311 [3 600009 5203 a1016e]", []),
]

ENCODINGS = [
    pytest.param(value, octets(wire), id=f"{type(value).__name__}-{wire[7:40]}")
    for value, ours, theirs in WIRES
    for wire in (ours, *theirs)
]


@pytest.mark.req("T7", "T8")
@pytest.mark.parametrize(
    ("value", "wire"),
    [pytest.param(value, octets(wire), id=wire) for value, wire, _ in WIRES],
)
def test_defaults_and_trailing_nulls_are_left_out(value: Struct, wire: bytes) -> None:
    assert encode_composite(value).hex() == wire.hex()
    assert encode([value]).endswith(wire)


@pytest.mark.req("T7", "T8")
@pytest.mark.parametrize(("value", "wire"), ENCODINGS)
def test_every_encoding_is_read(value: Struct, wire: bytes) -> None:
    found = decode_composite(wire, Done, Move, Named)
    assert found == value
    assert type(found) is type(value)
    reader = Reader(b"\x40" + wire + b"\x41", 1)
    assert read_known(reader, registry_of(Done, Move, Named)) == value
    assert reader.at == len(wire) + 1


@pytest.mark.req("T7", "T9")
@pytest.mark.parametrize(("value", "wire"), ENCODINGS)
def test_cut_anywhere_it_is_an_error(value: Struct, wire: bytes) -> None:
    with pytest.raises(DecodeError, match="left over"):
        decode_composite(wire + b"\x40", type(value))
    for length in range(len(wire)):
        with pytest.raises(DecodeError):
            decode_composite(wire[:length], type(value))
        with pytest.raises(DecodeError):
            read_composite(Reader(wire, 0, length), type(value))


MALFORMED = [
    ("005314 45", r"move\.handle is mandatory"),
    ("005314 [1 40]", r"move\.handle is mandatory"),
    ("005314 [1 a10161]", r"move\.handle: uint expected, not constructor 0xa1"),
    ("005314 [1 5301]", r"move\.handle: uint expected, not constructor 0x53"),
    ("005314 [1 5401]", r"move\.handle: uint expected, not constructor 0x54"),
    ("005314 [1 5001]", r"move\.handle: uint expected, not constructor 0x50"),
    ("005314 [2 43 a10161]", r"move\.delivery-tag: binary expected"),
    ("005314 [2 43 a00561]", "move: the last element is 4 octets longer"),
    ("005314 [3 43 a00561]", r"move\.more: the octets end inside it"),
    ("005314 [3 43 40 5602]", r"move\.more: a boolean is 0 or 1, not 2"),
    ("005314 [3 43 40 5201]", r"move\.more: boolean expected"),
    ("005314 [5 43 404040 5204]", r"move\.priority: ubyte expected"),
    ("005314 [6 43 40404040 a10161]", r"move\.names: symbol, one or several, expected"),
    ("005314 [6 43 40404040 [1 5501]]", r"move\.names: symbol, one or several, expected"),
    ("005314 [6 43 40404040 <1 5001>]", r"move\.names: symbol, one or several, expected"),
    ("005314 [7 43 4040404040 45]", r"move\.fields: a map expected"),
    ("005314 [7 43 4040404040 {1 a30161}]", r"move\.fields: a map of 1 elements has a key w"),
    ("005314 [7 43 4040404040 {2 5501 40}]", r"move\.fields: .* symbols, not 1 .int."),
    ("005314 [7 43 4040404040 {2 53ff 40}]", r"move\.fields: .* symbols, not ULong.255."),
    ("005314 [7 43 4040404040 {2 a102c3a9 40}]", r"move\.fields: the key 'é' .str. is not ASCII"),
    ("005314 [7 43 4040404040 {4 a30161 40 a10161 40}]", r"move\.fields: the map has a key twice"),
    ("005314 [1 43ff]", "move: 1 octets are left over"),
    ("005314 c0ff0143", "move: a size of 254 exceeds the 1 octets left"),
    ("005314 [2 43]", "move: 2 elements do not fit"),
    ("005314 d0ffffffff00000001 43", "move: a size of .* exceeds"),
    ("005314 [9 43 404040404040 5501 ff]", "move: constructor 0xff"),
    ("005314 {0 }", "move: a list expected, not constructor 0xc1"),
    ("005314 a00101", "move: a list expected, not constructor 0xa0"),
    ("005314", "move: a value is missing"),
    ("0053", "1 octets expected"),
    ("00", "a value is missing"),
    ("40", "a described value expected, not constructor 0x40"),
    ("005315 45", "done or move or named expected, not a value described by 21"),
    ("005424 45", "not a value described by None"),
    ("00a10161 45", "not a value described by None"),
    ("00a30161 45", "not a value described by 'a' .Symbol."),
    ("0000532445 45", "not a value described by None"),
    ("005311 [1 a10161]", r"named\.channel: ushort expected"),
    ("005311 [3 40 43 a104ff616161]", r"named\.name: not utf-8"),
]


@pytest.mark.req("T7", "T8", "T9")
@pytest.mark.parametrize(("wire", "why"), MALFORMED)
def test_what_is_wrong_is_named_by_composite_and_field(wire: str, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as caught:
        decode_composite(octets(wire), Done, Move, Named)
    assert caught.value.condition == "amqp:decode-error"


@pytest.mark.req("T7")
def test_a_symbol_must_be_ascii_in_a_field_too() -> None:
    with pytest.raises(DecodeError, match=r"fault\.condition: not ascii"):
        decode_composite(octets("00531d [1 a304ff616161]"), Fault)


@pytest.mark.req("T7")
def test_an_inner_fault_is_named_by_its_path() -> None:
    wire = encode(Described(ULong(0x14), [UInt(1), None, None, Described(ULong(0x25), [7])]))
    with pytest.raises(DecodeError, match=r"move\.state: faulty-state\.fault: a described value"):
        decode_composite(wire, Move)
    wire = encode(Described(ULong(0x25), [Described(ULong(0x24), [])]))
    with pytest.raises(DecodeError, match=r"faulty-state\.fault: fault expected.*described by 36"):
        decode_composite(wire, FaultyState)


UNSENT = [
    (Move(None), "move.handle is mandatory"),  # type: ignore[arg-type]
    (Move(-1), "move.handle: -1 .int. cannot be sent as uint"),
    (Move("1"), "move.handle: '1' .str. cannot be sent as uint"),  # type: ignore[arg-type]
    (Move(1, "t"), "move.delivery-tag: 't' .str. cannot be sent as binary"),  # type: ignore[arg-type]
    (Move(1, more=2), "move.more: 2 .int. cannot be sent as boolean"),  # type: ignore[arg-type]
    (Move(1, state=object()), "move.state: an? object has no AMQP type"),
    (Move(1, names=("é",)), "move.names: 'é' .str. is not ASCII"),
    (Move(1, names=5), "move.names: 5 .int. cannot be sent as symbols"),  # type: ignore[arg-type]
    (Move(1, names=("a", 5)), "move.names: 5 .int. in an array of Symbol"),  # type: ignore[arg-type]
    (Move(1, fields=[]), "move.fields: a list cannot be sent as fields"),  # type: ignore[arg-type]
    (Move(1, fields={5: 1}), "move.fields: 5 .int. cannot be sent as symbol"),
    (FaultyState(Done()), "faulty-state.fault: a Done cannot be sent as fault"),  # type: ignore[arg-type]
    (FaultyState(7), "faulty-state.fault: 7 .int. cannot be sent as fault"),  # type: ignore[arg-type]
    (Move(1, state=FaultyState(Fault(None))), "state: faulty-state.fault: fault.condition is m"),  # type: ignore[arg-type]
]


@pytest.mark.req("T7")
@pytest.mark.parametrize(("value", "why"), UNSENT, ids=lambda value: f"{value!r:.40}")
def test_a_wrong_value_is_named_by_composite_and_field(value: object, why: str) -> None:
    with pytest.raises(EncodeError, match=why):
        encode_composite(value)


def test_only_composites_are_written_as_such() -> None:
    for value in (5, msgspec.defstruct("Plain", [])()):
        with pytest.raises(EncodeError, match="cannot be sent as composite type"):
            encode_composite(value)
    with pytest.raises(TypeError, match="int is not declared with @composite"):
        fields_of(int)


@pytest.mark.req("T9")
def test_composites_count_against_depth_and_elements() -> None:
    wire = encode_composite(Move(1, state=FaultyState(Fault("a"))))
    assert decode_composite(wire, Move, limits=Limits(nesting_max=3, elements_max=6))
    with pytest.raises(DecodeError, match=r"move\.state: faulty-state\.fault: .*nesting_max"):
        decode_composite(wire, Move, limits=Limits(nesting_max=2))
    with pytest.raises(DecodeError, match="elements_max"):
        decode_composite(wire, Move, limits=Limits(elements_max=5))
    loop = Move(1)
    loop.state = loop
    with pytest.raises(EncodeError, match=f"deeper than {NESTING_CEILING}"):
        encode_composite(loop)


@pytest.mark.req("T7")
def test_surplus_items_are_judged_by_their_size_only() -> None:
    surplus = [b"x"] * 50
    wire = encode(Described(ULong(0x24), surplus))
    assert decode_composite(wire, Done) == Done()
    assert decode_composite(encode(Described(ULong(0x24), [None] * 300)), Done) == Done()


#: Field type, value, its wire, other encodings, constructors of neighbouring types.
FIELD_TYPES: list[tuple[str, FieldType, object, str, list[str], list[str]]] = [
    ("boolean", BOOLEAN, True, "41", ["5601"], ["5001", "5201"]),
    ("ubyte", UBYTE, 7, "5007", [], ["5107", "5207", "600007"]),
    ("ushort", USHORT, 7, "600007", [], ["5007", "610007"]),
    ("uint", UINT, 7, "5207", ["7000000007"], ["5007", "600007", "5307", "5407", "7100000007"]),
    ("uint", UINT, 0, "43", ["5200", "7000000000"], ["44"]),
    ("ulong", ULONG, 7, "5307", ["800000000000000007"], ["5207", "5507", "7000000007"]),
    ("ulong", ULONG, 0, "44", ["5300"], ["43"]),
    ("byte", BYTE, -7, "51f9", [], ["50f9", "54f9"]),
    ("short", SHORT, -7, "61fff9", [], ["60fff9"]),
    ("int", INT, -7, "54f9", ["71fffffff9"], ["55f9", "52f9"]),
    ("long", LONG, -7, "55f9", ["81fffffffffffffff9"], ["54f9", "83fffffffffffffff9"]),
    ("float", FLOAT, 0.5, "723f000000", [], ["823fe0000000000000"]),
    ("double", DOUBLE, 0.5, "823fe0000000000000", [], ["723f000000"]),
    ("timestamp", TIMESTAMP, 7, "830000000000000007", [], ["5507", "810000000000000007"]),
    (
        "uuid",
        UUID,
        uuid.UUID(int=7),
        "98" + uuid.UUID(int=7).hex,
        [],
        ["a010" + uuid.UUID(int=7).hex],
    ),
    ("binary", BINARY, b"a", "a00161", ["b00000000161"], ["a10161", "a30161"]),
    ("string", STRING, "a", "a10161", ["b10000000161"], ["a00161", "a30161"]),
    ("symbol", SYMBOL, "a", "a30161", ["b30000000161"], ["a10161", "a00161"]),
    ("list", LIST, [], "45", ["c00100"], ["c10100", "e0020040"]),
    ("map", MAP, {}, "c10100", ["d10000000400000000"], ["c00100", "45"]),
    ("map", MAP, {"a": 1}, "c10602a101615501", [], []),
    ("annotations", ANNOTATIONS, {"a": 1}, "c10602a301615501", ["c10602a101615501"], ["45"]),
    ("annotations", ANNOTATIONS, {ULong(7): 1}, "c1050253075501", [], ["c1050252075501"]),
    ("*", ANY, UInt(7), "5207", ["7000000007"], []),
]


@pytest.mark.req("T1", "T7")
@pytest.mark.parametrize(
    ("name", "kind", "value", "wire", "others", "wrong"),
    FIELD_TYPES,
    ids=[f"{entry[0]}-{entry[2]}" for entry in FIELD_TYPES],
)
def test_a_field_takes_every_width_of_its_type_and_no_other(
    name: str, kind: FieldType, value: object, wire: str, others: list[str], wrong: list[str]
) -> None:
    @composite(0x99, ("field", kind))
    class One(Struct):
        field: Any = None

    def around(item: str) -> bytes:
        return (
            encode(ULong(0x99)).join((b"\0", b""))
            + bytes((0xC0, len(item) // 2 + 1, 1))
            + bytes.fromhex(item)
        )

    assert kind.name == name
    assert encode_composite(One(value)) == around(wire)
    for item in (wire, *others):
        found = decode_composite(around(item), One)
        assert found.field == value
        again = decode_composite(encode_composite(found), One)
        assert same(again.field, found.field)
        for length in range(len(around(item))):
            with pytest.raises(DecodeError):
                decode_composite(around(item)[:length], One)
    for item in wrong:
        with pytest.raises(DecodeError, match=r"one\.field: "):
            decode_composite(around(item), One)


@pytest.mark.req("T3", "T7")
def test_fields_give_plain_ints_symbols_and_timestamps() -> None:
    @composite(0x99, ("number", UINT), ("name", SYMBOL), ("when", TIMESTAMP), ("any", ANY))
    class Several(Struct):
        number: int | None = None
        name: str | None = None
        when: int | None = None
        any: Any = None

    for number in (0, 1, 1 << 31):
        found = decode_composite(encode_composite(Several(number, "a", 5, UInt(number))), Several)
        kinds = [type(item) for item in (found.number, found.name, found.when, found.any)]
        assert kinds == [int, Symbol, Timestamp, UInt]


SYMBOLS_WIRES = [
    ("40", ()),
    ("a30161", ("a",)),
    ("b30000000161", ("a",)),
    ("e00401a3 0161", ("a",)),
    ("e00602a3 01610162", ("a", "b")),
    ("f00000000900000002a3 01610162", ("a", "b")),
    ("e00200a3", ()),
    ("e0020040", ()),
    ("45", ()),
    ("c00702 a30161 a30162", ("a", "b")),
]


@pytest.mark.req("T8")
@pytest.mark.parametrize(("wire", "names"), SYMBOLS_WIRES)
def test_several_symbols_come_as_null_one_array_or_list(wire: str, names: tuple[str, ...]) -> None:
    item = bytes.fromhex(wire)
    data = bytes.fromhex("005314") + bytes((0xC0, len(item) + 6, 6, 0x43)) + b"\x40" * 4 + item
    assert decode_composite(data, Move).names == names


@pytest.mark.req("T8")
@pytest.mark.parametrize(
    ("names", "wire"),
    [
        ((), ""),
        ([], ""),
        ("a", "a30161"),
        (("a",), "a30161"),
        (["a", Symbol("b")], "e00602a301610162"),
        (Array([Symbol("a"), Symbol("b")]), "e00602a301610162"),
    ],
)
def test_several_symbols_are_sent_as_null_one_or_array(names: Any, wire: str) -> None:
    start = encode_composite(Move(1))
    data = encode_composite(Move(1, names=names))
    if wire:
        assert data.hex().endswith("40404040" + wire)
    else:
        assert decode_composite(data, Move).names == ()
        assert len(data) <= len(start) + 5


@pytest.mark.req("T8")
def test_a_mandatory_field_of_several_must_hold_one() -> None:
    @composite(0x40, ("names", SYMBOLS, MANDATORY))
    class Offer(Struct):
        names: tuple[str, ...]

    assert encode_composite(Offer(("A",))).hex() == "005340c00401a30141"
    with pytest.raises(EncodeError, match=r"offer\.names is mandatory"):
        encode_composite(Offer(()))


@pytest.mark.req("T7")
def test_fields_may_be_any_mapping() -> None:
    for mapping in ({"a": 1}, MappingProxyType({"a": 1}), Map([("a", 1)])):
        wire = encode_composite(Move(1, fields=mapping))  # type: ignore[arg-type]
        assert decode_composite(wire, Move).fields == {Symbol("a"): 1}


def test_names_and_descriptors_come_from_the_class() -> None:
    assert (composite_name(FaultyState), descriptor_of(FaultyState)) == ("faulty-state", 0x25)
    assert [field.name for field in fields_of(Move)][:2] == ["handle", "delivery-tag"]
    assert [field.mandatory for field in fields_of(Move)][:2] == [True, False]
    registry = registry_of(FaultyState)
    assert list(registry) == ["amqp:faulty-state:list", 0x25]


@pytest.mark.req("T6")
def test_a_value_of_unknown_descriptor_stays_described() -> None:
    registry = registry_of(Done)
    for value in (5, Described(ULong(99), [Described(ULong(0x24), [])]), Described("d", None)):
        assert same(read_described_as(Reader(encode(value)), registry), value)
    assert read_described_as(Reader(encode(Done())), registry) == Done()
    with pytest.raises(DecodeError, match="done expected, not a value described by 99"):
        read_known(Reader(encode(Described(ULong(99), []))), registry)


def test_a_descriptor_may_be_larger_than_an_octet() -> None:
    @composite(0x0000_468C_0000_0004, ("text", STRING), symbol="com.example:selector:list")
    class Selector(Struct):
        text: str | None = None

    wire = encode_composite(Selector("a"))
    assert wire.hex() == "00800000468c00000004c00401a10161"
    assert decode_composite(wire, Selector) == Selector("a")
    named = Described(Symbol("com.example:selector:list"), ["a"])
    assert decode_composite(encode(named), Selector) == Selector("a")


def test_a_class_that_does_not_match_its_table_is_refused() -> None:
    class Point(Struct):
        x: int = 0
        y: int = 0

    with pytest.raises(TypeError, match=r"Point has the attributes \['x', 'y'\]"):
        composite(1, ("y", INT, 0), ("x", INT, 0))(Point)
    with pytest.raises(TypeError, match=r"Point\.y has the default 0, but .* None"):
        composite(1, ("x", INT, 0), ("y", INT))(Point)
    with pytest.raises(TypeError, match=r"Point\.x has the default 0, but .* MANDATORY"):
        composite(1, ("x", INT, MANDATORY), ("y", INT, 0))(Point)


# --- Objects of users -------------------------------------------------------------------------


@composite("com.example:point:list", ("x", LONG, 0), ("y", LONG, 0))
@dataclass
class Point:
    x: int = 0
    y: int = 0


@composite("com.example:label:list", ("text", STRING, MANDATORY))
@dataclass
class Label:
    text: str


@composite("com.example:nothing:list")
@dataclass
class Nothing:
    pass


@composite(
    0x0000_468C_0000_0005,
    ("first_name", STRING, MANDATORY),
    ("where", one_of(Point)),
    ("tags", SYMBOLS),
    as_map=True,
)
class Person(Struct, rename="camel"):
    first_name: str
    where: Point | None = None
    tags: tuple[str, ...] = ()


OBJECTS: list[tuple[object, object]] = [
    (Point(1, 2), Described(Symbol("com.example:point:list"), [1, 2])),
    (Point(), Described(Symbol("com.example:point:list"), [])),
    (Label("a"), Described(Symbol("com.example:label:list"), ["a"])),
    (Nothing(), Described(Symbol("com.example:nothing:list"), [])),
    (
        Person("Ada", Point(3)),
        Described(
            ULong(0x0000_468C_0000_0005),
            {
                Symbol("firstName"): "Ada",
                Symbol("where"): Described(Symbol("com.example:point:list"), [3]),
            },
        ),
    ),
]


@pytest.mark.req("T11")
@pytest.mark.parametrize(("thing", "described"), OBJECTS, ids=lambda value: f"{value!r:.30}")
def test_objects_travel_as_described_lists_and_maps(thing: object, described: object) -> None:
    data = encode(thing)
    assert same(decode(data), described)
    assert decode_composite(data, type(thing)) == thing
    assert from_described(described, Point, Label, Nothing, Person) == thing
    assert same(decode(encode({"in": [thing]})), {"in": [described]})
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_composite(data[:length], type(thing))


@pytest.mark.req("T11")
def test_objects_as_maps_are_read_with_leniency_and_named_faults() -> None:
    def person(mapping: object) -> Person:
        return from_described(Described(Symbol("amqp:person:map"), mapping), Person)

    assert person({"firstName": "A", "other": [1], 5: 6, "where": None}) == Person("A")
    assert person({"firstName": "A", "tags": Symbol("t")}).tags == ("t",)
    for mapping, why in [
        ({}, r"person\.firstName is mandatory"),
        ({"firstName": 5}, r"person\.firstName: string expected"),
        ({"firstName": "A", "where": [1]}, r"person\.where: a described value expected"),
        (Map([("firstName", "A"), (Symbol("firstName"), "B")]), r"person: the key .* twice"),
        (["A"], "person: a map expected"),
    ]:
        with pytest.raises(DecodeError, match=why):
            person(mapping)
    with pytest.raises(DecodeError, match="no AMQP type"):
        from_described(object(), Person)
    with pytest.raises(TypeError, match="Point has no numeric descriptor"):
        descriptor_of(Point)


# --- Against the standard ---------------------------------------------------------------------

#: Where the package declares the composite types of the standard.
MODULES = [
    *("amqp_rt.core.performatives", "amqp_rt.core.sasl_frames", "amqp_rt.transactions"),
    *("amqp_rt.outcomes", "amqp_rt.termini", "amqp_rt.message", "amqp_rt.codec.sections"),
]


def declared() -> dict[str, type]:
    """Every composite class of the package by the standard's name of its type."""
    found: dict[str, type] = {}
    for name in MODULES:
        if find_spec(name) is None:
            continue
        for value in vars(import_module(name)).values():
            if isinstance(value, type) and "__composite__" in vars(value):
                kind = composite_name(value)
                assert found.setdefault(kind, value) is value, f"{kind} is declared twice"
    return found


def standard(shared: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The composite and the other types of the standard, by name."""
    spec = json.loads((shared / "spec/amqp-1.0/amqp-1.0-types.json").read_text())
    types = {name: kind for part in spec["parts"].values() for name, kind in part["types"].items()}
    made = {name: kind for name, kind in types.items() if kind["class"] == "composite"}
    return made, {name: kind for name, kind in types.items() if name not in made}


def constant(kind: str, text: str, types: dict[str, dict[str, Any]]) -> object:
    """What a default says, as a value."""
    while types[kind]["class"] == "restricted":
        text = types[kind].get("choices", {}).get(text, text)
        kind = types[kind]["source"]
    if kind == "boolean":
        return text == "true"
    return text if kind in ("symbol", "string") else int(text)


@pytest.mark.req("T7", "T8")
def test_every_composite_type_of_the_standard_is_declared_with_its_fields(shared: Path) -> None:
    made, others = standard(shared)
    classes = declared()
    assert set(made) - set(classes) == set()
    for name, kind in made.items():
        cls = classes[name]
        assert descriptor_of(cls) == kind["descriptor"]["code"]
        assert kind["descriptor"]["name"] in registry_of(cls)
        fields = fields_of(cls)
        assert [field.name for field in fields] == [
            field["name"] for field in kind.get("fields", [])
        ]
        for ours, theirs in zip(fields, kind.get("fields", []), strict=True):
            where = f"{name}.{ours.name}"
            assert ours.mandatory == theirs.get("mandatory", False), where
            assert ours.type.multiple == theirs.get("multiple", False), where
            source = theirs["type"]
            if source in made:
                assert ours.type.name == "*", where
                continue
            if "default" in theirs:
                assert ours.default == constant(source, theirs["default"], others), where
            elif not ours.mandatory:
                assert ours.default in (None, ()), where
            if source == "*":
                needed = theirs["requires"]
                sources = {
                    other["source"]
                    for other in others.values()
                    if needed in other.get("provides", [])
                }
                assert ours.type.name in {"*", needed} | sources, where
                continue
            while others[source]["class"] == "restricted":
                source = others[source]["source"]
            name_of_ours = {"fields": "map", "annotations": "map"}.get(
                ours.type.name, ours.type.name
            )
            assert name_of_ours == source, where


def vector_value(entry: Any, classes: dict[str, type]) -> Any:
    if isinstance(entry, list):  # [type, value], as the entries of maps are written
        entry = {"type": entry[0], "value": entry[1]}
    kind, value = entry["type"], entry.get("value")
    if kind in classes:
        return vector_object(entry, classes)
    if kind == "map":
        return {vector_value(key, classes): vector_value(item, classes) for key, item in value}
    if kind == "array":
        return tuple(vector_value(item, classes) for item in value)
    if kind == "binary":
        return bytes.fromhex(value["hex"])
    return uuid.UUID(value) if kind == "uuid" else value


def vector_object(case: dict[str, Any], classes: dict[str, type]) -> object:
    """The object that a vector describes: the fields it names, the defaults for the others."""
    cls = classes[case["type"]]
    attributes = {field.name: field for field in fields_of(cls)}
    values = {}
    for name, entry in case["fields"].items():
        value = vector_value(entry, classes)
        field = attributes[name]
        if field.type.multiple and not isinstance(value, tuple):
            value = (value,)
        values[field.attribute] = value
    for field in attributes.values():
        if not field.mandatory:
            values.setdefault(field.attribute, field.default)
    return cls(**values)


@pytest.mark.req("T7", "T8")
def test_the_composite_vectors(shared: Path) -> None:
    cases = json.loads((shared / "spec/vectors/amqp10/composites.json").read_text())["cases"]
    assert len(cases) == 99
    classes = declared()
    for case in cases:
        cls = classes[case["type"]]
        data = bytes.fromhex(case["hex"])
        expected = vector_object(case, classes)
        found = decode_composite(data, cls)
        assert found == expected, case
        assert decode_composite(encode_composite(found), cls) == expected, case
        assert len(encode_composite(found)) <= len(data), case
        for length in range(len(data)):
            with pytest.raises(DecodeError):
                decode_composite(data[:length], cls)


def field_constants() -> Iterator[FieldType]:
    for name, value in vars(composites).items():
        if name.isupper() and isinstance(value, FieldType):
            yield value


def test_every_field_type_is_in_the_table_above() -> None:
    tested = {id(kind) for _, kind, *_ in FIELD_TYPES} | {id(FIELDS), id(SYMBOLS)}
    assert {id(kind) for kind in field_constants()} == tested
