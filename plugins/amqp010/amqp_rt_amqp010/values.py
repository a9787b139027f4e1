"""Values of the type system for which neither Python nor :mod:`amqp_rt.values` has a type.

A received value keeps its type, so that a map is written again with the widths that it came with.
Plain Python values are written as ``void``, ``boolean``, ``int64``, ``double``, ``str16``, ``vbin16``
(``vbin32`` above 65,535 octets), ``uuid``, ``list`` and ``map``; numbers of other widths are those of
:mod:`amqp_rt.values`, ``char-utf32`` is its ``Char``.

The texts and octets below equal plain ones of the same content.
"""

from __future__ import annotations

from typing import Final, Self

from msgspec import Struct

#: Octets of fixed-width binaries → type code.
BIN_CODES: Final[dict[int, int]] = {
    1: 0x00,
    2: 0x10,
    4: 0x20,
    8: 0x30,
    16: 0x40,
    32: 0x50,
    64: 0x60,
    128: 0x70,
    5: 0xC0,
    9: 0xD0,
}


class Bin(bytes):
    """Octets of a fixed width (``bin8`` to ``bin1024``, ``bin40``, ``bin72``); the length tells the type."""

    __slots__ = ()

    def __new__(cls, octets: bytes) -> Self:
        if len(octets) not in BIN_CODES:
            raise ValueError(f"no fixed-width binary has {len(octets)} octets")
        return bytes.__new__(cls, octets)


class Vbin8(bytes):
    """Up to 255 octets with a size of one octet."""

    __slots__ = ()


class Vbin32(bytes):
    """Octets with a size of four octets."""

    __slots__ = ()


class Str8(str):
    """Text of up to 255 octets of UTF-8."""

    __slots__ = ()


class Str8Latin(str):
    """Text of up to 255 characters of ISO-8859-15."""

    __slots__ = ()


class Str8Utf16(str):
    """Text of up to 255 octets of UTF-16 in network byte order."""

    __slots__ = ()


class Str16Latin(str):
    """Text of up to 65,535 characters of ISO-8859-15."""

    __slots__ = ()


class Str16Utf16(str):
    """Text of up to 65,535 octets of UTF-16 in network byte order."""

    __slots__ = ()


class LatinChar(str):
    """Single character of ISO-8859-15 (``char``)."""

    __slots__ = ()

    def __new__(cls, character: str) -> Self:
        if len(character.encode("iso-8859-15", "ignore")) != 1 or len(character) != 1:
            raise ValueError(f"char takes one character of ISO-8859-15, not {character!r}")
        return str.__new__(cls, character)


class Datetime(int):
    """Seconds since 1970-01-01 UTC, signed 64 bits."""

    __slots__ = ()


class Dec32(Struct, frozen=True):
    """Decimal number: *mantissa* (signed 32 bits) divided by ten to the power of *exponent*."""

    exponent: int
    mantissa: int


class Dec64(Struct, frozen=True):
    """Decimal number: *mantissa* (signed 64 bits) divided by ten to the power of *exponent*."""

    exponent: int
    mantissa: int


class Array(Struct, frozen=True):
    """Values of one type, given by its code."""

    code: int
    items: list[object]


class UnknownStruct(Struct, frozen=True):
    """A struct32 that the specification does not define: class and struct code, flags and fields."""

    code: int
    octets: bytes


class Opaque(Struct, frozen=True):
    """Value of a type that the specification does not define, without its size.

    ``bit``, which is defined as a field of structs only, is read as one where a map or list has it.
    """

    code: int
    octets: bytes


def as_text(value: object) -> str | None:
    """Return *value* as text where a name or an option is meant; None if it is none.

    Clients in Python 2 and C++ send such texts as binary.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return None
