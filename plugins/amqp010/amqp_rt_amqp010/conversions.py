"""Values of 0-10 and of AMQP 1.0, converted to each other.

Numbers, booleans, texts, octets, UUIDs, lists and maps mean the same in both, with the same widths. Types that
only one of them has become the nearest one of the other; :func:`is_exact` tells for which values of 0-10 the way
back gives another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from amqp_rt import values as amqp10
from amqp_rt.fronts import (
    Byte,
    Char,
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

from .codec import write_struct
from .layouts import Composite
from .type_codes import SIZE16_MAX
from .values import Array, Datetime, Dec32, Dec64, LatinChar, Opaque, UnknownStruct, Vbin32

#: Bounds of seconds that fit the milliseconds of 1.0.
SECONDS_MAX: Final = (1 << 63) // 1000 - 1
SECONDS_MIN: Final = -SECONDS_MAX
#: Octets of a name or a text whose size has one octet.
SIZE8_MAX: Final = 255
#: Classes that stand for one type in both protocols.
_COMMON: Final = frozenset(
    (
        *(type(None), bool, int, float, str, bytes, UUID, Char, Float32),
        *(Byte, UByte, Short, UShort, Int, UInt, ULong),
    )
)
#: Names in the map that stands for a decimal number, as in 0-9-1's conversion.
_DECIMAL: Final = frozenset(("scale", "value"))


def to_amqp10(value: object) -> object:
    """Convert *value* of 0-10 to 1.0."""
    if type(value) in _COMMON:
        return value
    if isinstance(value, Datetime):
        return Timestamp(min(max(value, SECONDS_MIN), SECONDS_MAX) * 1000)
    if isinstance(value, Mapping):
        return {str(name): to_amqp10(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_amqp10(each) for each in value]
    if isinstance(value, LatinChar):
        return Char(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, Dec32 | Dec64):
        return {"scale": UByte(value.exponent), "value": value.mantissa}
    if isinstance(value, Array):
        return [to_amqp10(each) for each in value.items]
    if isinstance(value, Opaque | UnknownStruct):
        return value.octets
    if isinstance(value, Composite):
        return write_struct(value)
    return value


def is_exact(value: object) -> bool:
    """Return whether :func:`from_amqp10` gives *value* back, with its type, from :func:`to_amqp10`."""
    if type(value) in _COMMON:
        return True
    if isinstance(value, Datetime):
        return SECONDS_MIN <= value <= SECONDS_MAX
    if isinstance(value, dict):
        return _decimal(value) is None and all(map(is_exact, value.values()))
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, Dec64):
        return not -(1 << 31) <= value.mantissa < 1 << 31
    return isinstance(value, Dec32)


def from_amqp10(value: object) -> object:
    """Convert *value* of 1.0 to 0-10."""
    if isinstance(value, str) and not isinstance(value, Char):
        return _text(str(value))
    if type(value) in _COMMON:
        return value
    if isinstance(value, Timestamp):
        return Datetime(value // 1000)
    if isinstance(value, Symbol):
        return _text(str(value))
    if isinstance(value, dict):
        found = _decimal(value)
        return headers_of(value) if found is None else found
    if isinstance(value, amqp10.Map | Mapping):
        return headers_of(value)
    if isinstance(value, list | tuple | amqp10.Array):
        return [from_amqp10(each) for each in value]
    return _text(str(value))


def headers_of(values: amqp10.Map | Mapping[Any, Any]) -> dict[str, object]:
    """Convert a map of 1.0 to one of 0-10, without names that exceed 255 octets."""
    found: dict[str, object] = {}
    for name, value in values.items():
        text = str(name)
        if fits_str8(text):
            found[text] = from_amqp10(value)
    return found


def is_plain(value: object) -> bool:
    """Return whether 0-10 has a type for *value* of 1.0 and all values in it."""
    if isinstance(value, str):
        return len(value) <= SIZE16_MAX // 4 or len(value.encode()) <= SIZE16_MAX
    if isinstance(value, Timestamp) or type(value) in _COMMON:
        return True
    if isinstance(value, dict):
        return all(
            type(name) is str and fits_str8(name) and is_plain(each) for name, each in value.items()
        )
    return isinstance(value, list) and all(map(is_plain, value))


def fits_str8(text: str) -> bool:
    """Return whether *text* fits a name of 0-10."""
    if text.isascii():
        return len(text) <= SIZE8_MAX
    try:
        return len(text.encode()) <= SIZE8_MAX
    except UnicodeEncodeError:
        return False


def _text(text: str) -> str | Vbin32:
    """Return *text*; as octets if it has too many for ``str16``."""
    if len(text) <= SIZE16_MAX // 4:
        return text
    octets = text.encode()
    return text if len(octets) <= SIZE16_MAX else Vbin32(octets)


def _decimal(value: Mapping[str, object]) -> Dec32 | Dec64 | None:
    """Return the decimal number that a map of 1.0 stands for; None if it is an ordinary map."""
    if value.keys() != _DECIMAL:
        return None
    scale, mantissa = value["scale"], value["value"]
    if not isinstance(scale, int) or type(scale) is not UByte:
        return None
    if not isinstance(mantissa, int) or type(mantissa) is not int:
        return None
    if -(1 << 31) <= mantissa < 1 << 31:
        return Dec32(int(scale), mantissa)
    return Dec64(int(scale), mantissa)
