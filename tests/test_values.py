from __future__ import annotations

import copy
import datetime as dt
import math
import pickle
import struct

import pytest
from hypothesis import given
from typed_values import moments

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

BOUNDS = [
    (UByte, 0, 255),
    (UShort, 0, 65_535),
    (UInt, 0, 4_294_967_295),
    (ULong, 0, 18_446_744_073_709_551_615),
    (Byte, -128, 127),
    (Short, -32_768, 32_767),
    (Int, -2_147_483_648, 2_147_483_647),
    (Timestamp, -9_223_372_036_854_775_808, 9_223_372_036_854_775_807),
]


@pytest.mark.req("T1", "T3")
@pytest.mark.parametrize(("kind", "lowest", "highest"), BOUNDS)
def test_integers_keep_to_the_range_of_their_type(
    kind: type[UInt], lowest: int, highest: int
) -> None:
    assert (kind(lowest), kind(highest)) == (lowest, highest)
    for beyond in (lowest - 1, highest + 1):
        with pytest.raises(ValueError, match=f"{kind.__name__} takes {lowest} to {highest}"):
            kind(beyond)


@pytest.mark.req("T3")
def test_a_typed_number_is_the_plain_number_for_its_user() -> None:
    assert UInt(5) == 5
    assert {5: "five"}[UInt(5)] == "five"
    assert type(UInt(5) + 1) is int
    assert f"{UInt(5)} {UInt(5):03}" == "5 005"
    assert str(Float32(0.5)) == "0.5"
    assert Symbol("a") == "a"
    assert f"{Symbol('a')}" == "a"


SHOWN = [
    (UInt(5), "UInt(5)"),
    (Timestamp(-1), "Timestamp(-1)"),
    (Symbol("a"), "Symbol('a')"),
    (Char("a"), "Char('a')"),
    (Float32(0.5), "Float32(0.5)"),
    (Decimal32(b"\0\1\2\3"), "Decimal32(bytes.fromhex('00010203'))"),
    (Described(ULong(36), []), "Described(ULong(36), [])"),
    (Array([1], UInt), "Array([1], of=UInt)"),
    (Array([1], UInt, (Symbol("d"),)), "Array([1], of=UInt, descriptors=(Symbol('d'),))"),
    (Map([(1, "a"), (True, "b")]), "Map([(1, 'a'), (True, 'b')])"),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_a_value_shows_how_to_make_it(value: object, text: str) -> None:
    assert repr(value) == text


@pytest.mark.parametrize("value", [value for value, _ in SHOWN], ids=repr)
def test_values_can_be_copied_and_pickled(value: object) -> None:
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(other) is type(value)
        assert other == value


@pytest.mark.req("T3")
@pytest.mark.parametrize("text", ["", "ab", "\ud800"])
def test_a_char_is_one_character(text: str) -> None:
    with pytest.raises(ValueError, match="one character"):
        Char(text)


@pytest.mark.req("T3")
@given(moments)
def test_a_timestamp_is_a_moment_to_the_millisecond(moment: dt.datetime) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert Timestamp.from_datetime(moment).datetime == moment


@pytest.mark.req("T3")
def test_a_timestamp_drops_what_is_finer_and_minds_the_zone() -> None:
    zone = dt.timezone(dt.timedelta(hours=2))
    moment = dt.datetime(1970, 1, 1, 2, 0, 0, 1999, tzinfo=zone)
    assert Timestamp.from_datetime(moment) == 1
    assert Timestamp.from_datetime(dt.datetime(1969, 12, 31, 23, 59, 59, 999_500, dt.UTC)) == -1
    with pytest.raises(ValueError, match="no time zone"):
        Timestamp.from_datetime(dt.datetime(1970, 1, 1))  # noqa: DTZ001
    with pytest.raises(OverflowError):
        _ = Timestamp(Timestamp.MAX).datetime


@pytest.mark.req("T1")
def test_a_float_of_32_bits_rounds_and_refuses_what_is_too_large() -> None:
    assert Float32(0.1) == 0.10000000149011612
    assert Float32(math.inf) == math.inf
    for large in (1e39, 10**400):
        with pytest.raises(ValueError, match="Float32 cannot hold"):
            Float32(large)


@pytest.mark.req("T1")
@pytest.mark.parametrize(
    "bits",
    [
        *(0, 0x8000_0000, 1, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000),
        *(0x7FC0_0000, 0x7FC1_2345, 0xFFC0_0001, 0x7F80_0001, 0xFFBF_FFFF),
    ],
)
def test_a_float_of_32_bits_keeps_its_bits(bits: int) -> None:
    assert Float32.from_bits(bits).bits == bits
    assert pickle.loads(pickle.dumps(Float32.from_bits(bits))).bits == bits


@pytest.mark.req("T1")
def test_a_nan_made_of_a_double_stays_one() -> None:
    assert Float32(math.nan).bits == 0x7FC0_0000
    (low_payload,) = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))
    assert Float32(low_payload).bits == 0x7FC0_0000


@pytest.mark.req("T2")
@pytest.mark.parametrize(("kind", "width"), [(Decimal32, 4), (Decimal64, 8), (Decimal128, 16)])
def test_a_decimal_is_its_octets(kind: type[Decimal32], width: int) -> None:
    octets = bytes(range(width))
    assert kind(octets).octets == octets
    assert kind(octets) == kind(octets)
    assert len({kind(octets), kind(octets), kind(bytes(width))}) == 2
    assert kind(octets) != octets
    with pytest.raises(ValueError, match=f"{kind.__name__} takes {width} octets, not {width - 1}"):
        kind(octets[1:])


@pytest.mark.req("T4")
def test_an_array_learns_its_element_type_from_the_first_item() -> None:
    assert Array([UInt(1), 2]).of is UInt
    assert Array([(1, 2)]).of is list
    assert Array([Map()]).of is dict
    assert Array([bytearray(b"a")]).of is bytes
    assert Array([], of=Symbol) != Array([], of=str)
    with pytest.raises(ValueError, match="needs its element type"):
        Array([])


@pytest.mark.req("T4", "T6")
def test_described_items_share_one_descriptor() -> None:
    array = Array([Described(Symbol("d"), 1), Described(Symbol("d"), 2)])
    assert (array.items, array.of, array.descriptors) == ((1, 2), int, (Symbol("d"),))
    twice = Array([Described(Symbol("a"), Described(Symbol("b"), UInt(1)))])
    assert (twice.items, twice.of, twice.descriptors) == ((1,), UInt, ("a", "b"))
    for odd in (Described(Symbol("e"), 2), Described("d", 2), 2):
        with pytest.raises(ValueError, match="described by Symbol\\('d'\\)"):
            Array([Described(Symbol("d"), 1), odd])


@pytest.mark.req("T4")
def test_an_array_is_a_sequence() -> None:
    array = Array([1, 2, 3])
    assert (len(array), list(array), array[1], array[-1]) == (3, [1, 2, 3], 2, 3)
    assert 2 in array
    assert array != [1, 2, 3]
    assert hash(array) == hash(Array([1, 2, 3]))
    assert array != Array([1, 2, 3], of=UInt)


@pytest.mark.req("T5")
def test_a_map_finds_the_key_of_the_same_type_first() -> None:
    mapping = Map([(1, "long"), (True, "boolean"), (UInt(1), "uint"), ([2], "list")])
    assert mapping[True] == "boolean"
    assert mapping[UInt(1)] == "uint"
    assert mapping[ULong(1)] == "long"
    assert mapping[[2]] == "list"
    assert mapping.get(3, "none") == "none"
    assert True in mapping
    assert 3 not in mapping
    with pytest.raises(KeyError):
        mapping[3]


@pytest.mark.req("T5")
def test_a_map_keeps_its_order_and_compares_without_it() -> None:
    mapping = Map([(2, "b"), (1, "a")])
    assert (mapping.keys(), mapping.values()) == ([2, 1], ["b", "a"])
    assert (list(mapping), len(mapping)) == ([2, 1], 2)
    assert mapping == Map([(1, "a"), (2, "b")])
    assert mapping == {1: "a", 2: "b"}
    assert mapping != {True: "a", 2: "b"}
    assert mapping != Map([(1, "a")])
    assert mapping != [(2, "b"), (1, "a")]
    with pytest.raises(TypeError, match="unhashable"):
        hash(mapping)
