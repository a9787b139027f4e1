"""The type system: codes, widths, and which Python values stand for which type."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct as Layout
from typing import Final
from uuid import UUID

from amqp_rt.fronts import Byte, Char, Float32, Int, Short, UByte, UInt, ULong, UShort

from .values import (
    BIN_CODES,
    Array,
    Bin,
    Datetime,
    Dec32,
    Dec64,
    LatinChar,
    Str8,
    Str8Latin,
    Str8Utf16,
    Str16Latin,
    Str16Utf16,
    UnknownStruct,
    Vbin8,
    Vbin32,
)

STR8: Final = 0x85
STR16: Final = 0x95
VBIN8: Final = 0x80
VBIN16: Final = 0x90
VBIN32: Final = 0xA0
UUID_CODE: Final = 0x48
CHAR: Final = 0x04
CHAR_UTF32: Final = 0x27
MAP: Final = 0xA8
LIST: Final = 0xA9
ARRAY: Final = 0xAA
STRUCT32: Final = 0xAB
VOID: Final = 0xF0
# Types without a code, which occur as fields only.
BIT: Final = 0x100
SEQUENCE_SET: Final = 0x101
BYTE_RANGES: Final = 0x102
STR16_ARRAY: Final = 0x103
COMPOSITE: Final = 0x104

U8: Final = Layout(">B")
U16: Final = Layout(">H")
U32: Final = Layout(">I")
U64: Final = Layout(">Q")
I64: Final = Layout(">q")
F64: Final = Layout(">d")
DEC32_LAYOUT: Final = Layout(">Bi")
DEC64_LAYOUT: Final = Layout(">Bq")
RANGE32: Final = Layout(">II")
RANGE64: Final = Layout(">QQ")
#: Most octets of a text or binary whose size has two octets.
SIZE16_MAX: Final = 0xFFFF
#: High half of a type code → octets of its fixed width, -1 to -4 for the octets of a size before the
#: value, -5 for reserved halves, whose values cannot be skipped.
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128, -1, -2, -4, -5, 5, 9, -5, 0)
RESERVED: Final = -5


def _bool(value: int) -> object:
    return value != 0


def _plain(value: object) -> object:
    return value


#: Type code → layout of a number, and the function that makes the value.
NUMBERS: Final[dict[int, tuple[Layout, Callable[[int], object]]]] = {
    0x01: (Layout(">b"), Byte),
    0x02: (U8, UByte),
    0x08: (U8, _bool),
    0x11: (Layout(">h"), Short),
    0x12: (U16, UShort),
    0x21: (Layout(">i"), Int),
    0x22: (U32, UInt),
    0x23: (U32, Float32.from_bits),
    0x31: (I64, _plain),
    0x32: (U64, ULong),
    0x33: (F64, _plain),
    0x38: (I64, Datetime),
}
#: Type code → codec of its characters, and the class of its values.
TEXTS: Final[dict[int, tuple[str, Callable[[str], object]]]] = {
    CHAR: ("iso-8859-15", LatinChar),
    0x84: ("iso-8859-15", Str8Latin),
    STR8: ("utf-8", Str8),
    0x86: ("utf-16-be", Str8Utf16),
    0x94: ("iso-8859-15", Str16Latin),
    STR16: ("utf-8", _plain),
    0x96: ("utf-16-be", Str16Utf16),
}
#: Type code → class of its octets.
BINARIES: Final[dict[int, Callable[[bytes], object]]] = {
    **dict.fromkeys(BIN_CODES.values(), Bin),
    VBIN8: Vbin8,
    VBIN16: _plain,
    VBIN32: Vbin32,
}
#: Class of a value → type code, where the class alone tells.
CODES: Final[dict[type, int]] = {
    type(None): VOID,
    bool: 0x08,
    Byte: 0x01,
    UByte: 0x02,
    Short: 0x11,
    UShort: 0x12,
    Int: 0x21,
    UInt: 0x22,
    Float32: 0x23,
    ULong: 0x32,
    float: 0x33,
    Datetime: 0x38,
    Char: CHAR_UTF32,
    UUID: UUID_CODE,
    LatinChar: CHAR,
    Dec32: 0xC8,
    Dec64: 0xD8,
    Str8Latin: 0x84,
    Str8: STR8,
    Str8Utf16: 0x86,
    Str16Latin: 0x94,
    Str16Utf16: 0x96,
    str: STR16,
    Vbin8: VBIN8,
    Vbin32: VBIN32,
    dict: MAP,
    list: LIST,
    tuple: LIST,
    Array: ARRAY,
    UnknownStruct: STRUCT32,
}
