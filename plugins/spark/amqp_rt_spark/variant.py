"""VARIANT, as Parquet and Spark store it: a value that carries the type of each of its parts.

AMQP's null, booleans, widths of signed integers, float and double, strings, binary, timestamps, uuids,
lists and maps are kept, with map keys as names. VARIANT has no unsigned integers (they become the next
wider signed one; a ulong may become a decimal), no symbols and characters (strings), and no IEEE 754
decimals (their octets); a described value loses its descriptor. Read with ``raw=true`` to keep those.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from amqp_rt.values import (
    Array,
    Byte,
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

__all__ = ["decode", "encode"]

_VERSION: Final = 1
_PRIMITIVE, _SHORT_STRING, _OBJECT, _ARRAY = 0, 1, 2, 3
_NULL, _TRUE, _FALSE, _INT8, _INT16, _INT32, _INT64, _DOUBLE = range(8)
_DECIMAL4, _DECIMAL8, _DECIMAL16, _DATE, _TIMESTAMP, _TIMESTAMP_NTZ = range(8, 14)
_FLOAT, _BINARY, _STRING = range(14, 17)
_UUID: Final = 20

_DEPTH_MAX: Final = 100
_LONG_MAX: Final = 2**63 - 1


def encode(value: Any) -> tuple[bytes, bytes]:
    """Encode *value* as a VARIANT: its octets, and those of its metadata (the names).

    Raises:
        ValueError: The value is nested too deeply, or has a type that neither AMQP nor JSON has.
    """
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        return scalar(value), _NO_NAMES
    # Decoded maps have one of these two types; asking an abstract class would take longer than the rest.
    if type(value) in (dict, MappingProxyType):
        found = _flat(value)
        if found is not None:
            return found
    names: dict[str, None] = {}
    _gather(value, names, 0)
    # Sorted, so that sorting the fields of an object by number sorts them by name, too.
    keys = sorted(names, key=_octets)
    numbers = {name: number for number, name in enumerate(keys)}
    return _written(value, numbers), _metadata(keys)


class _Shape(Struct, frozen=True):
    """Metadata and first octets of objects with the same names, and the order of their values."""

    metadata: bytes
    keys: tuple[str, ...]
    #: Octets before the offsets of the values: the header of an object with 1-octet offsets, the count, the ids.
    begin: bytes


#: Shapes of earlier maps, by their keys in order: maps of one application are alike.
_SHAPES: Final[dict[tuple[str, ...], _Shape]] = {}
#: Peers choose the keys, so the shapes are bounded in number, in names each, and in characters of these.
_SHAPES_MAX: Final = 256
_SHAPE_KEYS_MAX: Final = 64
_SHAPE_OCTETS_MAX: Final = 1_024


def _flat(value: Mapping[Any, Any]) -> tuple[bytes, bytes] | None:
    """Encode a map from names to scalars, as most are; return None for any other map."""
    keys = tuple(value)
    shape = _SHAPES.get(keys)
    if shape is None:
        shape = _shape(keys)
        if shape is None:
            return None
    parts = [b""]
    for key in shape.keys:
        each = value[key]
        scalar = _SCALARS.get(type(each))
        if scalar is None:
            return None
        parts.append(scalar(each))
    ends = list(accumulate(map(len, parts)))
    if ends[-1] > 0xFF:
        return None
    parts[0] = shape.begin + bytes(ends)
    return b"".join(parts), shape.metadata


def _shape(keys: tuple[Any, ...]) -> _Shape | None:
    """Return the shape of maps with *keys*, and remember it; None if it is beyond the bounds."""
    # Keys of other types may be equal to each other and still have different names.
    if len(keys) > _SHAPE_KEYS_MAX or not all(isinstance(key, str) for key in keys):
        return None
    if sum(map(len, keys)) > _SHAPE_OCTETS_MAX:
        return None
    names = tuple(sorted(map(str, keys), key=_octets))
    begin = bytes((_OBJECT, len(names), *range(len(names))))
    if len(_SHAPES) >= _SHAPES_MAX:
        _SHAPES.clear()
    found = _SHAPES[keys] = _Shape(_metadata(list(names)), names, begin)
    return found


def _octets(name: str) -> bytes:
    return name.encode()


def _gather(value: Any, names: dict[str, None], depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise ValueError(f"a value is nested more than {_DEPTH_MAX} times")
    if isinstance(value, Mapping | Map):
        for key, each in value.items():
            names[_name(key)] = None
            _gather(each, names, depth + 1)
    elif isinstance(value, list | tuple | Array):
        for each in value:
            _gather(each, names, depth + 1)
    elif isinstance(value, Described):
        _gather(value.value, names, depth + 1)


def _name(key: object) -> str:
    return str(key)


def _width(number: int) -> int:
    return max(1, (number.bit_length() + 7) // 8)


def _metadata(keys: list[str]) -> bytes:
    texts = [key.encode() for key in keys]
    width = _width(max(sum(map(len, texts)), len(texts)))
    out = bytearray([_VERSION | 0x10 | (width - 1) << 6])
    out += len(texts).to_bytes(width, "little")
    at = 0
    for text in texts:
        out += at.to_bytes(width, "little")
        at += len(text)
    out += at.to_bytes(width, "little")
    for text in texts:
        out += text
    return bytes(out)


_NO_NAMES: Final = _metadata([])


# Scalars: each is a tag and octets.

_TAGGED_INT8: Final = struct.Struct("<Bb").pack
_TAGGED_INT16: Final = struct.Struct("<Bh").pack
_TAGGED_INT32: Final = struct.Struct("<Bi").pack
_TAGGED_INT64: Final = struct.Struct("<Bq").pack
_TAGGED_SIZE: Final = struct.Struct("<BI").pack
_TAGGED_DOUBLE: Final = struct.Struct("<Bd").pack
_SHORT_STRINGS: Final = [bytes((size << 2 | _SHORT_STRING,)) for size in range(64)]


def _null(value: object) -> bytes:
    return b"\x00"


def _boolean(value: object) -> bytes:
    return b"\x04" if value else b"\x08"


def _string(value: str) -> bytes:
    octets = value.encode()
    size = len(octets)
    if size < 64:
        return _SHORT_STRINGS[size] + octets
    return _TAGGED_SIZE(_STRING << 2, size) + octets


def _binary(value: Any) -> bytes:
    octets = bytes(value)
    return _TAGGED_SIZE(_BINARY << 2, len(octets)) + octets


def _int8(value: int) -> bytes:
    return _TAGGED_INT8(_INT8 << 2, value)


def _int16(value: int) -> bytes:
    return _TAGGED_INT16(_INT16 << 2, value)


def _int32(value: int) -> bytes:
    return _TAGGED_INT32(_INT32 << 2, value)


def _int64(value: int) -> bytes:
    if -_LONG_MAX - 1 <= value <= _LONG_MAX:
        return _TAGGED_INT64(_INT64 << 2, value)
    return bytes((_DECIMAL16 << 2, 0)) + value.to_bytes(16, "little", signed=True)


def _timestamp(value: int) -> bytes:
    # Milliseconds from a peer, clamped to the range of 64-bit microseconds.
    moment = max(-_LONG_MAX - 1, min(int(value) * 1000, _LONG_MAX))
    return _TAGGED_INT64(_TIMESTAMP << 2, moment)


def _float(value: Float32) -> bytes:
    return _TAGGED_SIZE(_FLOAT << 2, value.bits)


def _double(value: float) -> bytes:
    return _TAGGED_DOUBLE(_DOUBLE << 2, value)


def _uuid(value: UUID) -> bytes:
    return bytes((_UUID << 2,)) + value.bytes


def _decimal(value: Decimal32 | Decimal64 | Decimal128) -> bytes:
    return _binary(value.octets)


#: Encoders by exact type, which most values match; subclasses are tested in this order.
_SCALARS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): _null,
    bool: _boolean,
    str: _string,
    Symbol: _string,
    Timestamp: _timestamp,
    Byte: _int8,
    Short: _int16,
    UByte: _int16,
    Int: _int32,
    UShort: _int32,
    UInt: _int64,
    ULong: _int64,
    int: _int64,
    Float32: _float,
    float: _double,
    bytes: _binary,
    bytearray: _binary,
    memoryview: _binary,
    UUID: _uuid,
    Decimal32: _decimal,
    Decimal64: _decimal,
    Decimal128: _decimal,
}


def _written(value: Any, numbers: dict[str, int]) -> bytes:
    """Encode *value*, with *numbers* as the ids of its names."""
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        return scalar(value)
    if isinstance(value, Mapping | Map):
        return _object(value, numbers)
    if isinstance(value, list | tuple | Array):
        parts = [_written(each, numbers) for each in value]
        return _joined(_ARRAY, None, parts, len(numbers))
    if isinstance(value, Described):
        return _written(value.value, numbers)
    for kind, scalar in _SCALARS.items():
        if isinstance(value, kind):
            return scalar(value)
    raise ValueError(f"a VARIANT holds no {type(value).__name__}")


def _object(value: Any, numbers: dict[str, int]) -> bytes:
    # Keys that differ only in type share one name; the last value wins.
    fields = {numbers[_name(key)]: each for key, each in value.items()}
    ids = sorted(fields)
    parts = [_written(fields[number], numbers) for number in ids]
    return _joined(_OBJECT, ids, parts, len(numbers))


def _joined(kind: int, ids: list[int] | None, parts: list[bytes], names: int) -> bytes:
    """Build an object or an array: its header, the offsets of its parts, and the parts."""
    ends = list(accumulate(map(len, parts), initial=0))
    offset_width = _width(ends[-1])
    large = len(parts) > 0xFF
    header = offset_width - 1
    id_width = 0
    if ids is None:
        header |= large << 2
    else:
        id_width = _width(max(names - 1, 0))
        header |= (id_width - 1) << 2 | large << 4
    out = bytearray((header << 2 | kind,))
    out += len(parts).to_bytes(4 if large else 1, "little")
    for number in ids or ():
        out += number.to_bytes(id_width, "little")
    for end in ends:
        out += end.to_bytes(offset_width, "little")
    out += b"".join(parts)
    return bytes(out)


# --- Decoding ------------------------------------------------------------------------------------


def decode(value: bytes, metadata: bytes) -> Any:
    """Decode a VARIANT into AMQP values: integers by their widths, names as strings.

    Raises:
        ValueError: The octets are no VARIANT, or hold a type that AMQP lacks.
    """
    try:
        return _read(bytes(value), 0, _names(bytes(metadata)), 0)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is no VARIANT: {error}") from error


def _names(metadata: bytes) -> list[str]:
    if not metadata or metadata[0] & 0x0F != _VERSION:
        raise ValueError("it is no VARIANT: its version is not 1")
    width = (metadata[0] >> 6) + 1
    size = int.from_bytes(metadata[1 : 1 + width], "little")
    at = 1 + width
    text = at + (size + 1) * width
    if text > len(metadata):
        raise ValueError("it is no VARIANT: its names are cut off")
    bounds = [
        int.from_bytes(metadata[at + each * width : at + (each + 1) * width], "little")
        for each in range(size + 1)
    ]
    return [metadata[text + first : text + end].decode() for first, end in pairwise(bounds)]


def _read(data: bytes, at: int, names: list[str], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError(f"a value is nested more than {_DEPTH_MAX} times")
    first = data[at]
    kind, header = first & 3, first >> 2
    at += 1
    if kind == _PRIMITIVE:
        return _read_primitive(data, at, header)
    if kind == _SHORT_STRING:
        return data[at : at + header].decode()
    return _read_parts(data, at, names, depth, header, is_object=kind == _OBJECT)


def _read_primitive(data: bytes, at: int, kind: int) -> Any:
    if kind <= _FALSE:
        return (None, True, False)[kind]
    if kind in _FIXED:
        code, made = _FIXED[kind]
        return made(struct.unpack_from(code, data, at)[0])
    if kind in (_DECIMAL4, _DECIMAL8, _DECIMAL16):
        size = {_DECIMAL4: 4, _DECIMAL8: 8, _DECIMAL16: 16}[kind]
        whole = int.from_bytes(data[at + 1 : at + 1 + size], "little", signed=True)
        if data[at]:
            return float(Decimal(whole).scaleb(-data[at]))
        return ULong(whole) if whole > _LONG_MAX else whole
    if kind in (_STRING, _BINARY):
        (size,) = struct.unpack_from("<I", data, at)
        octets = data[at + 4 : at + 4 + size]
        if len(octets) < size:
            raise ValueError("it is no VARIANT: it is cut off")
        return octets.decode() if kind == _STRING else octets
    if kind == _UUID:
        return UUID(bytes=data[at : at + 16])
    raise ValueError(f"AMQP has no type for a VARIANT of the kind {kind}")


def _moment(microseconds: int) -> Timestamp:
    return Timestamp(microseconds // 1000)


def _day(days: int) -> Timestamp:
    return Timestamp(days * 86_400_000)


_FIXED: Final[dict[int, tuple[str, Any]]] = {
    _INT8: ("<b", Byte),
    _INT16: ("<h", Short),
    _INT32: ("<i", Int),
    _INT64: ("<q", int),
    _DOUBLE: ("<d", float),
    _DATE: ("<i", _day),
    _TIMESTAMP: ("<q", _moment),
    _TIMESTAMP_NTZ: ("<q", _moment),
    _FLOAT: ("<I", Float32.from_bits),
}


def _read_parts(
    data: bytes, at: int, names: list[str], depth: int, header: int, *, is_object: bool
) -> Any:
    width = (header & 3) + 1
    id_width = (header >> 2 & 3) + 1 if is_object else 0
    large = header >> (4 if is_object else 2) & 1
    size_width = 4 if large else 1
    size = int.from_bytes(data[at : at + size_width], "little")
    at += size_width
    ids_at = at
    at += size * id_width
    parts_at = at + (size + 1) * width
    if parts_at > len(data):
        raise ValueError("it is no VARIANT: it is cut off")
    values = [
        _read(
            data,
            parts_at + int.from_bytes(data[at + each * width : at + (each + 1) * width], "little"),
            names,
            depth + 1,
        )
        for each in range(size)
    ]
    if not is_object:
        return values
    ids = [
        int.from_bytes(data[ids_at + each * id_width : ids_at + (each + 1) * id_width], "little")
        for each in range(size)
    ]
    return {names[number]: each for number, each in zip(ids, values, strict=True)}
