"""Values and structs to octets."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from struct import Struct as Layout
from uuid import UUID

from amqp_rt.fronts import Float32

from .layouts import Composite
from .plans import PLANS, Field
from .serials import RangeSet
from .type_codes import (
    ARRAY,
    BINARIES,
    BIT,
    BYTE_RANGES,
    CHAR_UTF32,
    CODES,
    DEC32_LAYOUT,
    DEC64_LAYOUT,
    LIST,
    MAP,
    NUMBERS,
    RANGE32,
    RANGE64,
    RESERVED,
    SEQUENCE_SET,
    SIZE16_MAX,
    STR8,
    STR16,
    STR16_ARRAY,
    STRUCT32,
    TEXTS,
    U16,
    U32,
    UUID_CODE,
    VBIN16,
    VBIN32,
    VOID,
    WIDTHS,
)
from .values import BIN_CODES, Array, Bin, Dec32, Dec64, Opaque, UnknownStruct


def _code_of(value: object) -> int:
    """Return the type code for *value*.

    Raises:
        ValueError: No type fits.
    """
    code = CODES.get(type(value))
    if code is not None:
        return code
    if isinstance(value, Bin):
        return BIN_CODES[len(value)]
    if isinstance(value, int):
        return 0x31 if value < 1 << 63 else 0x32
    if isinstance(value, bytes):
        return VBIN16 if len(value) <= SIZE16_MAX else VBIN32
    if isinstance(value, str):
        return STR16
    if isinstance(value, float):
        return 0x33
    if isinstance(value, Composite):
        return STRUCT32
    if isinstance(value, Opaque):
        return value.code
    if isinstance(value, Mapping):
        return MAP
    raise ValueError(f"AMQP 0-10 has no type for {value!r:.80}")


def put_value(out: bytearray, value: object) -> None:
    """Append *value* after its type code."""
    code = _code_of(value)
    out.append(code)
    put_typed(out, code, value)


def put_typed(out: bytearray, code: int, value: object) -> None:
    """Append *value* in the type with *code*, without the code."""
    if code == STRUCT32:
        _put_nested(out, code, value)
        return
    number = NUMBERS.get(code)
    if number is not None:
        if code == 0x23:
            if not isinstance(value, Float32):
                raise ValueError(f"{value!r:.80} is no Float32")
            value = value.bits
        try:
            out += number[0].pack(value)
        except struct.error:
            raise ValueError(f"{value!r:.80} does not fit type {code:#04x}") from None
        return
    width = WIDTHS[code >> 4]
    texts = TEXTS.get(code)
    if texts is not None or code == CHAR_UTF32:
        if not isinstance(value, str):
            raise ValueError(f"{value!r:.80} is no text")
        _put_octets(out, value.encode(texts[0] if texts is not None else "utf-32-be"), width)
    elif isinstance(value, bytes) and code in BINARIES:
        _put_octets(out, value, width)
    elif isinstance(value, Opaque) and value.code == code and width != RESERVED:
        _put_octets(out, value.octets, width)
    elif isinstance(value, UUID) and code == UUID_CODE:
        out += value.bytes
    elif isinstance(value, Dec32) and code == 0xC8:
        _put_decimal(out, DEC32_LAYOUT, value.exponent, value.mantissa)
    elif isinstance(value, Dec64) and code == 0xD8:
        _put_decimal(out, DEC64_LAYOUT, value.exponent, value.mantissa)
    elif value is None and code == VOID:
        return
    else:
        _put_nested(out, code, value)


def _put_decimal(out: bytearray, layout: Layout, exponent: int, mantissa: int) -> None:
    try:
        out += layout.pack(exponent, mantissa)
    except struct.error:
        raise ValueError(f"{mantissa} / 10**{exponent} does not fit its decimal type") from None


def _put_octets(out: bytearray, octets: bytes, width: int) -> None:
    """Append *octets*, with a size of ``-width`` octets where *width* is negative."""
    size = len(octets)
    if width >= 0:
        if size != width:
            raise ValueError(f"{octets!r:.80} has {size} octets, and its type has {width}")
    elif size >= 1 << 8 * -width:
        raise ValueError(f"{octets!r:.40} has {size} octets; at most {(1 << 8 * -width) - 1} fit")
    else:
        out += size.to_bytes(-width, "big")
    out += octets


def _put_nested(out: bytearray, code: int, value: object) -> None:
    """Append a value that holds others."""
    start = len(out)
    out += b"\0\0\0\0"
    if code == MAP and isinstance(value, Mapping):
        out += U32.pack(len(value))
        for name, each in value.items():
            if not isinstance(name, str):
                raise ValueError(f"the key {name!r:.80} of a map is no text")
            _put_octets(out, name.encode(), -1)
            put_value(out, each)
    elif code == LIST and isinstance(value, list | tuple):
        out += U32.pack(len(value))
        for each in value:
            put_value(out, each)
    elif code == ARRAY and isinstance(value, Array):
        out.append(value.code)
        out += U32.pack(len(value.items))
        for each in value.items:
            put_typed(out, value.code, each)
    elif code == STRUCT32 and isinstance(value, UnknownStruct):
        out += U16.pack(value.code)
        out += value.octets
    elif code == STRUCT32 and isinstance(value, Composite) and value.CODE and value.SIZE == 4:
        out += U16.pack(value.CODE)
        put_fields(out, value)
    else:
        raise ValueError(f"{value!r:.80} does not fit type {code:#04x}")
    out[start : start + 4] = U32.pack(len(out) - start - 4)


def put_struct(out: bytearray, value: Composite) -> None:
    """Append *value* with its size and code, as far as it has these."""
    if value.SIZE == 4:
        _put_nested(out, STRUCT32, value)
        return
    inner = bytearray()
    put_fields(inner, value)
    if value.SIZE:
        _put_octets(out, bytes(inner), -value.SIZE)
    else:
        out += inner


def put_fields(out: bytearray, value: Composite) -> None:
    """Append packing flags and fields."""
    plan = PLANS[type(value)]
    start = len(out)
    flags = 0
    if value.PACK:
        out += bytes(value.PACK)
    for field in plan.fields:
        held = getattr(value, field.name)
        if field.kind == BIT:
            if held:
                flags |= field.bit
        elif held is not None:
            flags |= field.bit
            _put_field(out, field, held)
        elif not value.PACK:
            raise ValueError(f"{value.NAME} has no flags: {field.name} cannot be absent")
    if value.PACK:
        out[start : start + value.PACK] = flags.to_bytes(value.PACK, "little")


def _put_field(out: bytearray, field: Field, value: object) -> None:
    kind = field.kind
    # Most fields are short texts, which need none of the checks of other types.
    if kind == STR8 and isinstance(value, str):
        octets = value.encode()
        if len(octets) > 255:
            raise ValueError(f"{field.name} has {len(octets)} octets; at most 255 fit")
        out.append(len(octets))
        out += octets
    elif kind < BIT:
        put_typed(out, kind, value)
    elif isinstance(value, RangeSet) and kind == SEQUENCE_SET:
        _put_octets(
            out, b"".join([RANGE32.pack(first, last) for first, last in value.ranges()]), -2
        )
    elif isinstance(value, Composite) and value.__class__ is field.composite:
        put_struct(out, value)
    elif isinstance(value, list) and kind == STR16_ARRAY:
        _put_nested(out, ARRAY, Array(STR16, value))
    elif isinstance(value, list) and kind == BYTE_RANGES:
        _put_octets(out, b"".join([RANGE64.pack(first, last) for first, last in value]), -2)
    else:
        raise ValueError(f"{value!r:.80} does not fit {field.name}")
