"""Values of SQL filters and actions, and their operators, which are those of C#.

Operators of the service "follow C# implicit conversion semantics whenever possible". A value of a message has
the class of its AMQP type (:mod:`amqp_rt.values`); a plain ``int`` is a ``long`` and a plain ``float`` is a
``double``, as they are on the wire. ``None`` stands for null and for *unknown*: no function here takes it.

Rules for points that the documentation leaves open:

* Operands that C# refuses to combine raise :class:`Refused`: a string with a number, a string with ``<``, a
  ``decimal`` with a ``double``, a ``ulong`` with a signed integer other than a literal.
* Integers overflow as in unchecked C#: they wrap. An integer or decimal divided by zero is refused.
* ``+`` with a string on either side concatenates, as in C#; times have no text there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation
from math import copysign, fmod, inf, isfinite, isinf, isnan, nan
from typing import Any, Final, TypeAlias
from uuid import UUID

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

#: Longest text that an expression computes, in characters: the service bounds a property by 32 KiB.
COMPUTED_TEXT_MAX: Final = 32_768

_TICKS_OF_A_MILLISECOND: Final = 10_000
_TICKS_OF_A_MICROSECOND: Final = 10
#: Ticks of .NET (100 ns since the year 1) at the start of 1970, and the last one.
_TICKS_AT_1970: Final = 621_355_968_000_000_000
_TICKS_MAX: Final = 3_155_378_975_999_999_999
_TIMESPAN: Final = "com.microsoft:timespan"
_OFFSET_TIME: Final = "com.microsoft:datetime-offset"
_URI: Final = "com.microsoft:uri"
_YEAR_1: Final = datetime(1, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Refused(Exception):
    """Operands that an operator of C# does not take, or a result outside its type."""


class Whole(int):
    """Integer literal of a filter: a ``long``, which C# takes for a ``ulong`` too."""

    __slots__ = ()


class Moment(int):
    """``DateTime`` of .NET, in UTC: ticks of 100 ns since the year 1."""

    __slots__ = ()


class OffsetMoment(Moment):
    """``DateTimeOffset`` of .NET, in UTC, which keeps its type on the wire."""

    __slots__ = ()


class Span(int):
    """``TimeSpan`` of .NET: ticks of 100 ns."""

    __slots__ = ()


class Uri(str):
    """``Uri`` of .NET, which C# does not compare with strings."""

    __slots__ = ()


class Opaque:
    """Value without operators, such as a list: it can be copied, and is not null."""

    __slots__ = ("raw",)

    def __init__(self, raw: object) -> None:
        self.raw = raw


#: Value of an expression: an instance of a key of ``_NAMES``.
Value: TypeAlias = Any

#: Type → its name in C#.
_NAMES: Final[Mapping[type, str]] = {
    bool: "bool",
    Byte: "sbyte",
    UByte: "byte",
    Short: "short",
    UShort: "ushort",
    Int: "int",
    UInt: "uint",
    int: "long",
    Whole: "long",
    ULong: "ulong",
    Float32: "float",
    float: "double",
    Decimal: "decimal",
    Char: "char",
    str: "string",
    UUID: "Guid",
    Moment: "DateTime",
    OffsetMoment: "DateTimeOffset",
    Span: "TimeSpan",
    Uri: "Uri",
    Opaque: "object",
}


def type_name(value: Value) -> str:
    """Return the name that C# has for the type of *value*."""
    return _NAMES[type(value)]


# --- From and to the wire --------------------------------------------------------------------------

#: Types whose values on the wire are those of expressions.
PLAIN_TYPES: Final = frozenset(_NAMES) - {
    *(Decimal, Whole, Moment, OffsetMoment, Span, Uri, Opaque),
}

#: Exponent bits, coefficient bits after them, and bias of the decimals (IEEE 754-2008 §3.5.2).
_DECIMALS: Final[Mapping[type, tuple[int, int, int]]] = {
    Decimal32: (8, 23, 101),
    Decimal64: (10, 53, 398),
    Decimal128: (14, 113, 6176),
}
_DECIMAL_MAX: Final = Decimal(2**96 - 1)
_DECIMAL_SCALE_MAX: Final = 28
#: Context of .NET's ``decimal``: at most 29 digits, halves to even.
_CONTEXT: Final = Context(prec=29, Emin=-10_000, Emax=10_000)
#: Context of conversions: 29 digits before the point and 28 after it.
_EXACT: Final = Context(prec=57, Emin=-10_000, Emax=10_000)
_SMALLEST: Final = Decimal(1).scaleb(-_DECIMAL_SCALE_MAX)


def value_of(raw: object) -> Value:
    """Return the value of *raw*, which is a value of the wire or of Python; None stays None.

    Times of Python without a zone are in UTC.

    Raises:
        Refused: A decimal is not one of .NET.
    """
    kind = type(raw)
    if raw is None or kind in PLAIN_TYPES:
        return raw
    if isinstance(raw, Decimal):
        return _rounded(raw)
    if isinstance(raw, Symbol):
        return str(raw)
    if isinstance(raw, Timestamp):
        return Moment(int(raw) * _TICKS_OF_A_MILLISECOND + _TICKS_AT_1970)
    if kind in _DECIMALS:
        return _read_decimal(raw)
    if isinstance(raw, datetime):
        moment = raw if raw.tzinfo is not None else raw.replace(tzinfo=UTC)
        return Moment((moment - _YEAR_1) // _MICROSECOND * _TICKS_OF_A_MICROSECOND)
    if isinstance(raw, timedelta):
        return Span(raw // _MICROSECOND * _TICKS_OF_A_MICROSECOND)
    if isinstance(raw, Described):
        inner = raw.value
        if raw.descriptor == _TIMESPAN and type(inner) is int:
            return Span(inner)
        if raw.descriptor == _OFFSET_TIME and type(inner) is int:
            return OffsetMoment(inner)
        if raw.descriptor == _URI and isinstance(inner, str):
            return Uri(inner)
    return raw if kind in _NAMES else Opaque(raw)


def wire_of(value: Value) -> object:
    """Return *value* as it is encoded among the application properties."""
    kind = type(value)
    if kind in PLAIN_TYPES or value is None:
        return value
    if kind is Decimal:
        return _write_decimal(value)
    if kind is Whole:
        return int(value)
    if kind is Moment:
        return Timestamp((value - _TICKS_AT_1970) // _TICKS_OF_A_MILLISECOND)
    if kind is OffsetMoment:
        return Described(Symbol(_OFFSET_TIME), int(value))
    if kind is Span:
        return Described(Symbol(_TIMESPAN), int(value))
    if kind is Uri:
        return Described(Symbol(_URI), str(value))
    return value.raw


def duration_of(value: Span) -> timedelta:
    """Return a time as Python has it, rounded down to microseconds."""
    return timedelta(microseconds=value // _TICKS_OF_A_MICROSECOND)


def _rounded(value: Decimal) -> Decimal:
    """Return *value* with at most 28 places, as .NET's ``decimal`` keeps it.

    Raises:
        Refused: The range of ``decimal`` does not contain it.
    """
    # The exponent is compared first: a number of 6,000 digits would be written out otherwise.
    if not value.is_finite() or value.adjusted() > _DECIMAL_SCALE_MAX:
        raise Refused("a number is outside the range of decimal")
    if value and int(value.as_tuple().exponent) < -_DECIMAL_SCALE_MAX:
        value = value.quantize(_SMALLEST, context=_EXACT)
    if abs(value) > _DECIMAL_MAX:
        raise Refused("a number is outside the range of decimal")
    return value


def _read_decimal(raw: Any) -> Decimal:
    """Read a decimal in AMQP's binary encoding (Part 1 §1.6.13)."""
    exponent_bits, coefficient_bits, bias = _DECIMALS[type(raw)]
    bits = int.from_bytes(raw.octets, "big")
    size = 8 * raw.WIDTH
    high = 0
    if bits >> (size - 3) & 3 == 3:
        if bits >> (size - 5) & 15 == 15:
            raise Refused("a number is outside the range of decimal")
        coefficient_bits -= 2
        high = 4 << coefficient_bits
    exponent = (bits >> coefficient_bits & ((1 << exponent_bits) - 1)) - bias
    coefficient = high | bits & ((1 << coefficient_bits) - 1)
    digits = tuple(map(int, str(coefficient)))
    return _rounded(Decimal((bits >> (size - 1), digits, exponent if coefficient else 0)))


def _write_decimal(value: Decimal) -> Decimal128:
    sign, digits, exponent = value.as_tuple()
    coefficient = int("".join(map(str, digits)))
    bits = sign << 127 | (int(exponent) + 6176) << 113 | coefficient
    return Decimal128(bits.to_bytes(16, "big"))


# --- Numbers ---------------------------------------------------------------------------------------

_SIGNED: Final = frozenset({Byte, Short, Int, int})
_INTEGERS: Final = frozenset({Byte, UByte, Short, UShort, Int, UInt, int, Whole, ULong, Char})
#: Integers that C# makes an ``int`` for every operator.
_SMALL: Final = frozenset({Byte, UByte, Short, UShort, Char})
_NUMBERS: Final = _INTEGERS | {Float32, float, Decimal}


def _promote(left: type, right: type) -> type | None:
    """Return the type in which C# combines two numbers (C# §12.4.7.3); None if it refuses."""
    pair = {left, right}
    if Decimal in pair:
        return None if pair & {float, Float32} else Decimal
    for kind in (float, Float32):
        if kind in pair:
            return kind
    if ULong in pair:
        return None if pair & _SIGNED else ULong
    if pair & {int, Whole}:
        return int
    if UInt in pair:
        return int if pair & _SIGNED else UInt
    return Int


_PROMOTED: Final[Mapping[tuple[type, type], type | None]] = {
    (left, right): _promote(left, right) for left in _NUMBERS for right in _NUMBERS
}


def _number(value: Value) -> Any:
    """Return *value* for arithmetic: a ``char`` is its code unit."""
    return ord(value) if type(value) is Char else value


def _single(value: float) -> Float32:
    try:
        return Float32(value)
    except ValueError:
        return Float32(copysign(inf, value))


def _wrapped(value: int, bits: int) -> int:
    half = 1 << bits - 1
    return (value + half & (1 << bits) - 1) - half


_RESULTS: Final[Mapping[type, Callable[[Any], Value]]] = {
    Int: lambda value: Int(_wrapped(value, 32)),
    UInt: lambda value: UInt(value & 0xFFFF_FFFF),
    int: lambda value: _wrapped(value, 64),
    ULong: lambda value: ULong(value & 0xFFFF_FFFF_FFFF_FFFF),
    Float32: _single,
    float: float,
    Decimal: _rounded,
}


def _quotient(left: Any, right: Any, kind: type) -> Any:
    if kind is Decimal:
        if not right:
            raise Refused("a number is divided by zero")
        return _CONTEXT.divide(left, right)
    if kind is float or kind is Float32:
        if right:
            return left / right
        return nan if not left or isnan(left) else copysign(inf, left) * copysign(1.0, right)
    if not right:
        raise Refused("a number is divided by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: Any, right: Any, kind: type) -> Any:
    """Return the remainder, which has the sign of the dividend in C#."""
    if kind is float or kind is Float32:
        return nan if isinf(left) or not right else fmod(left, right)
    if not right:
        raise Refused("a number is divided by zero")
    if kind is Decimal:
        return _CONTEXT.remainder(left, right)
    found = abs(left) % abs(right)
    return -found if left < 0 else found


_ARITHMETIC: Final[Mapping[str, Callable[[Any, Any, type], Any]]] = {
    "+": lambda left, right, kind: left + right,
    "-": lambda left, right, kind: left - right,
    "*": lambda left, right, kind: left * right,
    "/": _quotient,
    "%": _remainder,
}
_ON_DECIMALS: Final[Mapping[str, Callable[[Decimal, Decimal], Decimal]]] = {
    "+": _CONTEXT.add,
    "-": _CONTEXT.subtract,
    "*": _CONTEXT.multiply,
}


def _operands(left: Value, right: Value, kind: type) -> tuple[Any, Any]:
    """Convert two numbers to the type in which they are combined."""
    left, right = _number(left), _number(right)
    if kind is float or kind is Float32:
        left, right = float(left), float(right)
        # C# converts an integer to float before it computes in float.
        return (float(_single(left)), float(_single(right))) if kind is Float32 else (left, right)
    if kind is Decimal:
        return Decimal(left), Decimal(right)
    return int(left), int(right)


def _refusal(symbol: str, left: Value, right: Value) -> Refused:
    return Refused(
        f"operator '{symbol}' cannot be applied to operands of type"
        f" '{type_name(left)}' and '{type_name(right)}'"
    )


def combine(symbol: str, left: Value, right: Value) -> Value:
    """Return ``left symbol right`` for one of ``+ - * / %``.

    Raises:
        Refused: C# has no such operator, the divisor is zero, or the result is too large.
    """
    kind = _PROMOTED.get((type(left), type(right)))
    if kind is not None:
        operands = _operands(left, right, kind)
        if kind is Decimal and symbol in _ON_DECIMALS:
            return _rounded(_ON_DECIMALS[symbol](*operands))
        try:
            found = _ARITHMETIC[symbol](*operands, kind)
        except InvalidOperation:
            raise Refused("a number is outside the range of decimal") from None
        if symbol == "/" and kind in (int, Int) and found == 1 << (63 if kind is int else 31):
            raise Refused(f"a quotient is outside the range of {_NAMES[kind]}")
        return _RESULTS[kind](found)
    if symbol == "+" and (type(left) is str or type(right) is str):
        return _joined(left, right)
    found = _combined_times(symbol, left, right)
    if found is None:
        raise _refusal(symbol, left, right)
    return found


def _joined(left: Value, right: Value) -> str:
    first, second = text_of(left), text_of(right)
    if first is None or second is None:
        raise _refusal("+", left, right)
    if len(first) + len(second) > COMPUTED_TEXT_MAX:
        raise Refused(f"a text is longer than {COMPUTED_TEXT_MAX} characters")
    return first + second


def _combined_times(symbol: str, left: Value, right: Value) -> Value:
    """Return the sum or difference of times; None if C# has no such operator."""
    kind: type = type(left)
    if symbol not in ("+", "-") or not isinstance(left, Moment | Span):
        return None
    if symbol == "-" and isinstance(left, Moment) and isinstance(right, Moment):
        kind = Span
    elif type(right) is not Span:
        return None
    ticks = int(left) + int(right) if symbol == "+" else int(left) - int(right)
    if kind is Span:
        if ticks != _wrapped(ticks, 64):
            raise Refused("a time is outside the range of TimeSpan")
    elif not 0 <= ticks <= _TICKS_MAX:
        raise Refused(f"a time is outside the range of {_NAMES[kind]}")
    return kind(ticks)


def signed(symbol: str, value: Value) -> Value:
    """Return *value* after a sign, ``+`` or ``-``.

    Raises:
        Refused: C# has no such operator for its type.
    """
    kind = type(value)
    if kind is Span:
        return combine("-", Span(0), value) if symbol == "-" else value
    if kind not in _NUMBERS or (symbol == "-" and kind is ULong):
        raise Refused(
            f"operator '{symbol}' cannot be applied to an operand of type '{type_name(value)}'"
        )
    if symbol == "+":
        return Int(_number(value)) if kind in _SMALL else value
    if kind is float or kind is Float32:
        return kind(-value)  # 0 - 0.0 would lose the sign of zero
    return combine("-", Int(0), value)


# --- Comparison ------------------------------------------------------------------------------------

_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EQUALITIES: Final = frozenset({"=", "<>", "!="})
#: Types whose values are equal or not, and of which C# orders none.
_UNORDERED: Final = frozenset({(kind, kind) for kind in (str, bool, UUID, Uri)})
#: Pairs of types that Python compares as C# does.
_COMPARABLE: Final = frozenset(
    {
        *((float, float), (Span, Span)),
        *((left, right) for left in (Moment, OffsetMoment) for right in (Moment, OffsetMoment)),
        *(
            (left, right)
            for left in _INTEGERS - {Char}
            for right in _INTEGERS - {Char}
            if _PROMOTED[left, right] is not None
        ),
    }
)


def comparison(symbol: str) -> Callable[[Value, Value], bool]:
    """Return a function for ``left symbol right``, which is one of ``= <> != < <= > >=``.

    The function raises :class:`Refused` if C# has no such operator for the types of its arguments.
    """
    test = _COMPARISONS[symbol]
    direct = _COMPARABLE | _UNORDERED if symbol in _EQUALITIES else _COMPARABLE

    def compare(left: Value, right: Value) -> bool:
        pair = (type(left), type(right))
        if pair in direct:
            return test(left, right)
        promoted = _PROMOTED.get(pair)
        if promoted is None:
            raise _refusal(symbol, left, right)
        return test(*_operands(left, right, promoted))

    return compare


def equality_key(value: Value) -> object:
    """Return a key that is equal for equal values, for filters that are looked up.

    Numbers of all types are compared by their exact values; values of other types differ, as NaN and values
    without operators do from all.
    """
    kind = type(value)
    if kind is str:
        return value
    if kind in _NUMBERS and kind is not Char:
        return ("number", value) if value == value else object()  # noqa: PLR0124 - NaN
    if kind is Opaque:
        return ("octets", value.raw) if type(value.raw) is bytes else object()
    return ("moment" if isinstance(value, Moment) else kind, value)


# --- Text and conversions --------------------------------------------------------------------------


def text_of(value: Value) -> str | None:
    """Return *value* as C# writes it in the invariant culture; None if its type has no text here."""
    kind = type(value)
    if kind in (str, Char, Uri):
        return str(value)
    if kind is bool:
        return "True" if value else "False"
    if kind in _INTEGERS:
        return int.__repr__(value)
    if kind is UUID:
        return str(value)
    if kind is Decimal:
        return format(value, "f")
    if kind is float or kind is Float32:
        return _text_of_float(value)
    return None


#: Decimal exponents between which .NET writes a ``double`` without an exponent.
_PLAIN_EXPONENTS: Final = range(-4, 15)


def _text_of_float(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    shortest = repr(float(value))
    if type(value) is Float32:
        texts = (f"{float(value):.{digits}g}" for digits in range(1, 10))
        shortest = next(text for text in texts if _single(float(text)) == value)
    sign, digits, exponent = Decimal(shortest).normalize().as_tuple()
    written = "".join(map(str, digits))
    scale = len(written) - 1 + int(exponent)
    minus = "-" if sign else ""
    if scale in _PLAIN_EXPONENTS:
        return minus + format(Decimal((0, digits, int(exponent))), "f")
    point = f".{written[1:]}" if len(written) > 1 else ""
    return f"{minus}{written[0]}{point}E{'-' if scale < 0 else '+'}{abs(scale):02}"


def converted(value: Value, kind: type) -> Value:
    """Return *value* as *kind*, where that is possible without loss of digits, else as it is.

    ``SET`` keeps the type of an existing property so (Service Bus facts, SQL).
    """
    if value is None or type(value) is kind:
        return value
    try:
        if kind is str:
            found = text_of(value)
            return value if found is None else found
        if type(value) is str:
            return _parsed(value, kind)
        if type(value) in _NUMBERS and type(value) is not Char:
            return _as_number(value, kind)
    except (ValueError, InvalidOperation, Refused):
        pass
    return value


def _as_number(value: Value, kind: type) -> Value:
    if kind in (float, Float32):
        number = float(value)
        return number if kind is float else Float32(number)
    if kind is Decimal:
        text = repr(float(value)) if isinstance(value, float) else str(value)
        return _rounded(Decimal(text))
    if kind in _INTEGERS and kind is not Char and isfinite(value) and int(value) == value:
        whole = int(value)
        if kind is int and whole != _wrapped(whole, 64):
            raise Refused("a number is outside the range of long")
        return kind(whole)
    return value


def _parsed(text: str, kind: type) -> Value:
    if not text.isascii() or "_" in text:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if kind is UUID:
        return UUID(text)
    if kind in _INTEGERS and kind is not Char:
        return kind(_as_number(int(text), kind))
    if kind in (float, Float32, Decimal):
        found = _as_number(Decimal(text), kind)
        return found if isfinite(found) else text
    return text
