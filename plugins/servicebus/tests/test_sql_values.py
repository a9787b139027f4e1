"""Values of SQL: promotion, arithmetic, comparison and conversion as in C#, and their forms on the wire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from math import copysign, inf, isnan, nan
from typing import Any
from uuid import UUID

import pytest
from amqp_rt_servicebus.sql_values import (
    COMPUTED_TEXT_MAX,
    Moment,
    OffsetMoment,
    Opaque,
    Refused,
    Span,
    Uri,
    Whole,
    combine,
    comparison,
    converted,
    duration_of,
    equality_key,
    signed,
    text_of,
    type_name,
    value_of,
    wire_of,
)
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.values import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
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

pytestmark = pytest.mark.req("Z14")

#: One of each numeric type, all of the value 6.
SIXES: dict[str, Any] = {
    "sbyte": Byte(6),
    "byte": UByte(6),
    "short": Short(6),
    "ushort": UShort(6),
    "char": Char("\x06"),
    "int": Int(6),
    "uint": UInt(6),
    "long": 6,
    "ulong": ULong(6),
    "float": Float32(6),
    "double": 6.0,
    "decimal": Decimal(6),
}
#: The table of C# (binary numeric promotion), a row for each left operand, in the order of SIXES.
#: i int, I uint, l long, L ulong, f float, d double, m decimal, - refused.
PROMOTIONS = {
    "sbyte": "i i i i i i l l - f d m",
    "byte": "i i i i i i I l L f d m",
    "short": "i i i i i i l l - f d m",
    "ushort": "i i i i i i I l L f d m",
    "char": "i i i i i i I l L f d m",
    "int": "i i i i i i l l - f d m",
    "uint": "l I l I I l I l L f d m",
    "long": "l l l l l l l l - f d m",
    "ulong": "- L - L L - L - L f d m",
    "float": "f f f f f f f f f f d -",
    "double": "d d d d d d d d d d d -",
    "decimal": "m m m m m m m m m - - m",
}
LETTERS = {"i": Int, "I": UInt, "l": int, "L": ULong, "f": Float32, "d": float, "m": Decimal}


@pytest.mark.parametrize("left", SIXES)
@pytest.mark.parametrize("symbol", list("+-*/%"))
def test_numbers_are_promoted_as_in_csharp(left: str, symbol: str) -> None:
    results = {"+": 12, "-": 0, "*": 36, "/": 1, "%": 0}
    for (right, value), letter in zip(SIXES.items(), PROMOTIONS[left].split(), strict=True):
        if letter == "-":
            with pytest.raises(Refused, match=f"'{left}' and '{right}'"):
                combine(symbol, SIXES[left], value)
            continue
        found = combine(symbol, SIXES[left], value)
        assert (type(found), found) == (LETTERS[letter], results[symbol]), (left, right)


@pytest.mark.parametrize("left", SIXES)
def test_numbers_are_compared_where_they_are_promoted(left: str) -> None:
    for (right, value), letter in zip(SIXES.items(), PROMOTIONS[left].split(), strict=True):
        for symbol, holds in {"=": True, "<>": False, "!=": False, "<": False, ">=": True}.items():
            compare = comparison(symbol)
            if letter == "-":
                with pytest.raises(Refused, match=f"'{left}' and '{right}'"):
                    compare(SIXES[left], value)
            else:
                assert compare(SIXES[left], value) is holds, (left, symbol, right)


def test_a_literal_is_a_ulong_where_one_is_needed() -> None:
    most = ULong(2**64 - 1)
    assert comparison(">")(most, Whole(5))
    assert combine("-", most, Whole(5)) == ULong(2**64 - 6)
    assert type(combine("+", Whole(1), Int(2))) is int
    with pytest.raises(Refused, match="'ulong' and 'long'"):
        comparison(">")(most, 5)


@pytest.mark.parametrize(
    ("symbol", "left", "right", "expected"),
    [
        ("+", 2**63 - 1, Whole(1), -(2**63)),
        ("-", Int(-(2**31)), Int(1), Int(2**31 - 1)),
        ("*", UInt(2**31), UInt(2), UInt(0)),
        ("-", ULong(0), ULong(1), ULong(2**64 - 1)),
        ("/", Int(-7), Int(2), Int(-3)),
        ("%", Int(-7), Int(2), Int(-1)),
        ("%", Int(7), Int(-2), Int(1)),
        ("/", 1.0, 0.0, inf),
        ("/", 1.0, -0.0, -inf),
        ("/", -1, 0.0, -inf),
        ("%", -7.5, 2.0, -1.5),
        ("+", Float32(0.1), Float32(0.2), Float32(Float32(0.1) + Float32(0.2))),
        ("*", Float32(3e38), Float32(10), Float32(inf)),
        ("+", Decimal("0.1"), Int(1), Decimal("1.1")),
        ("/", Decimal(1), Decimal(3), Decimal("0.3333333333333333333333333333")),
        ("%", Decimal("-7.5"), Decimal(2), Decimal("-1.5")),
        ("+", "a", "b", "ab"),
        ("+", "n=", Whole(5), "n=5"),
        ("+", True, "!", "True!"),
        ("-", Moment(50), Moment(20), Span(30)),
        ("-", OffsetMoment(50), Moment(20), Span(30)),
        ("+", Moment(50), Span(20), Moment(70)),
        ("-", OffsetMoment(50), Span(20), OffsetMoment(30)),
        ("+", Span(1), Span(2), Span(3)),
    ],
)
def test_results(symbol: str, left: Any, right: Any, expected: Any) -> None:
    found = combine(symbol, left, right)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("symbol", "left", "right"),
    [("/", 0.0, 0.0), ("%", 1.0, 0.0), ("%", inf, 2.0), ("/", nan, 0.0)],
)
def test_results_that_are_no_numbers(symbol: str, left: float, right: float) -> None:
    assert isnan(combine(symbol, left, right))


@pytest.mark.parametrize(
    ("symbol", "left", "right", "said"),
    [
        ("/", Int(1), Int(0), "divided by zero"),
        ("%", 1, 0, "divided by zero"),
        ("/", Decimal(1), Int(0), "divided by zero"),
        ("%", Decimal(1), Int(0), "divided by zero"),
        ("/", -(2**63), -1, "outside the range of long"),
        ("/", Int(-(2**31)), Int(-1), "outside the range of int"),
        ("*", Decimal(2**95), Decimal(4), "outside the range of decimal"),
        ("%", Decimal(2**95), Decimal("1E-28"), "outside the range of decimal"),
        ("-", "a", "b", "'-' cannot be applied to operands of type 'string' and 'string'"),
        ("+", True, True, "'bool' and 'bool'"),
        ("+", "a", Moment(1), "'string' and 'DateTime'"),
        ("+", Moment(1), Moment(1), "'DateTime' and 'DateTime'"),
        ("-", Span(1), Moment(1), "'TimeSpan' and 'DateTime'"),
        ("*", Span(1), Int(2), "'TimeSpan' and 'int'"),
        ("+", Opaque([]), Int(1), "'object' and 'int'"),
        ("-", Moment(1), Span(2), "outside the range of DateTime"),
        ("+", Span(2**63 - 1), Span(1), "outside the range of TimeSpan"),
        ("-", Moment(2**70), Moment(0), "outside the range of TimeSpan"),
        ("+", "a" * COMPUTED_TEXT_MAX, "b", "longer than 32768"),
    ],
)
def test_what_csharp_refuses(symbol: str, left: Any, right: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        combine(symbol, left, right)


@pytest.mark.parametrize(
    ("symbol", "value", "expected"),
    [
        ("-", Byte(-128), Int(128)),
        ("-", UInt(1), -1),
        ("-", Int(-(2**31)), Int(-(2**31))),
        ("-", Char("a"), Int(-97)),
        ("-", 2.5, -2.5),
        ("-", Float32(2.5), Float32(-2.5)),
        ("-", Decimal("2.5"), Decimal("-2.5")),
        ("-", Span(5), Span(-5)),
        ("-", Whole(5), -5),
        ("+", UByte(5), Int(5)),
        ("+", UInt(5), UInt(5)),
        ("+", ULong(5), ULong(5)),
        ("+", Span(5), Span(5)),
    ],
)
def test_signs(symbol: str, value: Any, expected: Any) -> None:
    found = signed(symbol, value)
    assert (type(found), found) == (type(expected), expected)


def test_a_sign_keeps_zero_negative() -> None:
    assert copysign(1, signed("-", 0.0)) == -1


@pytest.mark.parametrize(("symbol", "value"), [("-", ULong(1)), ("-", "a"), ("+", True)])
def test_signs_that_csharp_refuses(symbol: str, value: Any) -> None:
    with pytest.raises(Refused, match="cannot be applied to an operand of type"):
        signed(symbol, value)


ID = UUID(int=7)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("a", "a", True),
        ("a", "A", False),
        (True, True, True),
        (True, False, False),
        (ID, ID, True),
        (Uri("sb://a"), Uri("sb://b"), False),
        (Moment(5), OffsetMoment(5), True),
        (nan, nan, False),
        (Char("a"), Int(97), True),
    ],
)
def test_equality(left: Any, right: Any, equal: bool) -> None:
    assert comparison("=")(left, right) is equal
    assert comparison("<>")(left, right) is not equal


@pytest.mark.parametrize(
    ("symbol", "left", "right"),
    [
        ("<", "a", "b"),
        ("<", True, False),
        (">=", ID, ID),
        ("=", "5", Whole(5)),
        ("=", True, Whole(1)),
        ("=", "a", Char("a")),
        ("=", str(ID), ID),
        ("=", Uri("a"), "a"),
        ("=", Opaque(b"a"), Opaque(b"a")),
        ("=", Moment(5), 5),
        ("=", Moment(5), Span(5)),
        ("<", Decimal(1), 1.5),
    ],
)
def test_comparisons_that_csharp_refuses(symbol: str, left: Any, right: Any) -> None:
    names = f"'{type_name(left)}' and '{type_name(right)}'"
    with pytest.raises(Refused, match=f"operator '{symbol}' cannot be applied .* {names}"):
        comparison(symbol)(left, right)


def test_a_long_is_compared_with_a_double_as_a_double() -> None:
    assert comparison("=")(2**53 + 1, float(2**53))
    assert comparison("=")(Int(2**24 + 1), Float32(2**24))


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (Symbol("a"), "a"),
        (Timestamp(0), Moment(621_355_968_000_000_000)),
        (datetime(1970, 1, 1, tzinfo=UTC), Moment(621_355_968_000_000_000)),
        (
            datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
            Moment(621_355_968_000_000_000),
        ),
        (datetime(1, 1, 1, 0, 0, 1), Moment(10_000_000)),  # noqa: DTZ001 - the point
        (timedelta(milliseconds=1.5), Span(15_000)),
        (Described(Symbol("com.microsoft:timespan"), 5), Span(5)),
        (Described(Symbol("com.microsoft:datetime-offset"), 5), OffsetMoment(5)),
        (Described(Symbol("com.microsoft:uri"), "sb://a"), Uri("sb://a")),
        (Decimal128((6176 << 113 | 25).to_bytes(16, "big")), Decimal(25)),
        (Decimal64((1 << 63 | 397 << 53 | 25).to_bytes(8, "big")), Decimal("-2.5")),
        (Decimal32((100 << 23 | 25).to_bytes(4, "big")), Decimal("2.5")),
        (Decimal128(((6176 - 40) << 113 | 25).to_bytes(16, "big")), Decimal(0)),
        (None, None),
    ],
)
def test_values_of_the_wire(raw: object, value: Any) -> None:
    found = value_of(raw)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "raw", [Described(Symbol("com.example:other"), 5), [1], {"a": 1}, b"abc", (1, 2)]
)
def test_other_values_have_no_operators_but_stay_as_they_are(raw: object) -> None:
    value = value_of(raw)
    assert type_name(value) == "object"
    assert wire_of(value) is raw


@pytest.mark.parametrize(
    "raw",
    [
        Decimal128((0x1E << 122).to_bytes(16, "big")),  # infinity
        Decimal128(((6176 + 6000) << 113 | 1).to_bytes(16, "big")),
        Decimal("NaN"),
        Decimal("1E+999999"),
        Decimal(2**96),
    ],
)
def test_decimals_beyond_those_of_csharp_are_refused(raw: object) -> None:
    with pytest.raises(Refused, match="outside the range of decimal"):
        value_of(raw)


@pytest.mark.parametrize(
    "value",
    [
        *(each for each in SIXES.values() if type(each) is not Decimal),
        "text",
        True,
        ID,
        Timestamp(1_700_000_000_123),
        Described(Symbol("com.microsoft:timespan"), -5),
        Described(Symbol("com.microsoft:datetime-offset"), 5),
        Described(Symbol("com.microsoft:uri"), "sb://a"),
        Decimal128((6170 << 113 | 25).to_bytes(16, "big")),
        None,
    ],
)
def test_values_return_to_the_wire_in_their_type(value: Any) -> None:
    found = wire_of(value_of(value))
    assert (type(found), found) == (type(value), value)


def test_a_literal_is_a_long_on_the_wire() -> None:
    assert type(wire_of(Whole(5))) is int
    assert duration_of(Span(15_009)) == timedelta(microseconds=1_500)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e14, "100000000000000"),
        (1e15, "1E+15"),
        (1.5e300, "1.5E+300"),
        (-0.0001, "-0.0001"),
        (1e-5, "1E-05"),
        (0.1, "0.1"),
        (0.0, "0"),
        (5.0, "5"),
        (Float32(0.1), "0.1"),
        (nan, "NaN"),
        (-inf, "-Infinity"),
        (Decimal("1E+3"), "1000"),
        (Decimal("2.50"), "2.50"),
        (Int(-5), "-5"),
        (Char("x"), "x"),
        (False, "False"),
        (ID, "00000000-0000-0000-0000-000000000007"),
        (Moment(5), None),
        (Opaque([]), None),
    ],
)
def test_texts(value: Any, text: str | None) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (4, Int, Int(4)),
        (2**40, Int, 2**40),
        (2.0, Int, Int(2)),
        (2.5, Int, 2.5),
        (inf, Int, inf),
        (5, Decimal, Decimal(5)),
        (0.1, Decimal, Decimal("0.1")),
        (nan, Decimal, nan),
        (0.5, Float32, Float32(0.5)),
        (1e300, Float32, 1e300),
        (Int(5), float, 5.0),
        (ULong(2**63), int, ULong(2**63)),
        (5, str, "5"),
        (True, str, "True"),
        (Moment(5), str, Moment(5)),
        ("7", Int, Int(7)),
        ("7.5", Int, "7.5"),
        ("7.5", float, 7.5),
        ("x", float, "x"),
        ("NaN", float, "NaN"),
        ("1e400", float, "1e400"),
        ("1e9999999999999999999", float, "1e9999999999999999999"),
        ("1_000", int, "1_000"),
        ("9" * 5000, int, "9" * 5000),
        ("1e999999999", Decimal, "1e999999999"),
        ("TRUE", bool, True),
        ("yes", bool, "yes"),
        (str(ID), UUID, ID),
        ("x", UUID, "x"),
        ("x", Moment, "x"),
        (None, Int, None),
        (True, Int, True),
    ],
)
def test_set_keeps_the_type_of_a_property_where_it_can(
    value: Any, kind: type, expected: Any
) -> None:
    found = converted(value, kind)
    assert type(found) is type(expected)
    assert found == expected or isnan(expected)


def test_equal_numbers_have_equal_keys() -> None:
    keys = {equality_key(value) for name, value in SIXES.items() if name != "char"}
    assert len(keys) == 1
    distinct: list[Any] = [True, 1, "1", Char("1"), Uri("1"), Moment(1), Span(1), ID, Opaque(b"1")]
    assert len({equality_key(value) for value in distinct}) == len(distinct)
    assert equality_key(Moment(1)) == equality_key(OffsetMoment(1))
    assert equality_key(nan) != equality_key(nan)
    assert equality_key(Opaque([])) != equality_key(Opaque([]))


INTEGERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    *(st.integers(kind.MIN, kind.MAX).map(kind) for kind in (Int, UInt, ULong, Byte, UShort)),
)


@given(left=INTEGERS, right=INTEGERS, symbol=st.sampled_from("+-*/%"))
def test_integers_are_exact_within_their_range_and_wrap_outside(
    left: int, right: int, symbol: str
) -> None:
    try:
        found = combine(symbol, left, right)
    except Refused:
        refused = {type(left), type(right)}
        mixed = ULong in refused and refused & {int, Int, Byte}
        assert mixed or not right or (left, right) == (-(2**63), -1) or right == -1
        return
    a, b = int(left), int(right)
    exact = {
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "/": lambda: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda: abs(a) % abs(b) * (-1 if a < 0 else 1),
    }[symbol]()
    bits = 32 if type(found) in (Int, UInt) else 64
    assert (found - exact) % 2**bits == 0


@given(st.floats(allow_nan=False))
def test_texts_of_floats_read_back(value: float) -> None:
    text = text_of(value)
    assert text is not None
    assert float(text.replace("Infinity", "inf")) == value


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 28))
def test_decimals_survive_the_wire(coefficient: int, places: int) -> None:
    value = Decimal(coefficient).scaleb(-places)
    assert value_of(wire_of(value)) == value


KINDS = [*map(type, SIXES.values()), str, bool, UUID, Moment, OffsetMoment, Span, Uri, Opaque]
TEXTS = st.one_of(st.text("0123456789eE+-. x", max_size=25), st.text(max_size=5))


@given(
    value=st.one_of(
        TEXTS, INTEGERS, st.floats(), st.sampled_from([*SIXES.values(), True, ID, Span(5)])
    ),
    kind=st.sampled_from(KINDS),
)
def test_what_cannot_be_converted_stays_as_it_is(value: Any, kind: type) -> None:
    found = converted(value, kind)
    assert found is value or type(found) is kind
