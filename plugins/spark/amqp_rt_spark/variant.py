"""VARIANT, as Parquet and Spark store it: a value that says of each of its parts what type it is.

From AMQP it keeps null, booleans, the widths of signed integers, float and double, strings, binary,
timestamps, uuids, lists and maps with names as keys. It has no unsigned integers (they become the
next wider signed one; a ulong may become a decimal), no symbols and characters (strings), and no
decimals of IEEE 754 (their octets); a described value is the value. Who needs those again reads
with ``raw=true``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

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
    Timestamp,
    UByte,
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
    """*value* as a VARIANT: its octets, and those of its names.

    Raises:
        ValueError: It is nested too deeply, or is nothing that AMQP or JSON have.
    """
    names: dict[str, None] = {}
    _gather(value, names, 0)
    # In order: then the fields of an object are in order by their numbers, too.
    keys = sorted(names, key=_octets)
    numbers = {name: number for number, name in enumerate(keys)}
    out = bytearray()
    _write(out, value, numbers)
    return bytes(out), _metadata(keys)


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


def _primitive(out: bytearray, kind: int, octets: bytes = b"") -> None:
    out.append(kind << 2 | _PRIMITIVE)
    out += octets


def _long(out: bytearray, value: int) -> None:
    if -_LONG_MAX - 1 <= value <= _LONG_MAX:
        _primitive(out, _INT64, struct.pack("<q", value))
    else:
        _primitive(out, _DECIMAL16, b"\0" + value.to_bytes(16, "little", signed=True))


def _sized(out: bytearray, kind: int, octets: bytes) -> None:
    _primitive(out, kind, struct.pack("<I", len(octets)) + octets)


def _write(out: bytearray, value: Any, numbers: dict[str, int]) -> None:
    if value is None:
        _primitive(out, _NULL)
    elif isinstance(value, bool):
        _primitive(out, _TRUE if value else _FALSE)
    elif isinstance(value, str):
        octets = value.encode()
        if len(octets) < 64:
            out.append(len(octets) << 2 | _SHORT_STRING)
            out += octets
        else:
            _sized(out, _STRING, octets)
    elif isinstance(value, int):
        _integer(out, value)
    elif isinstance(value, Float32):
        _primitive(out, _FLOAT, struct.pack("<I", value.bits))
    elif isinstance(value, float):
        _primitive(out, _DOUBLE, struct.pack("<d", value))
    elif isinstance(value, bytes | bytearray | memoryview):
        _sized(out, _BINARY, bytes(value))
    elif isinstance(value, UUID):
        _primitive(out, _UUID, value.bytes)
    elif isinstance(value, Mapping | Map):
        _object(out, value, numbers)
    elif isinstance(value, list | tuple | Array):
        _array(out, value, numbers)
    elif isinstance(value, Described):
        _write(out, value.value, numbers)
    elif isinstance(value, Decimal32 | Decimal64 | Decimal128):
        _sized(out, _BINARY, value.octets)
    else:
        raise ValueError(f"a VARIANT holds no {type(value).__name__}")


def _integer(out: bytearray, value: int) -> None:
    if isinstance(value, Timestamp):
        _primitive(out, _TIMESTAMP, struct.pack("<q", _microseconds(value)))
    elif isinstance(value, Byte):
        _primitive(out, _INT8, struct.pack("<b", value))
    elif isinstance(value, Short | UByte):
        _primitive(out, _INT16, struct.pack("<h", value))
    elif isinstance(value, Int | UShort):
        _primitive(out, _INT32, struct.pack("<i", value))
    else:
        _long(out, value)


def _microseconds(moment: int) -> int:
    """Milliseconds that a peer gave, within what fits."""
    return max(-_LONG_MAX - 1, min(int(moment) * 1000, _LONG_MAX))


def _parts(
    out: bytearray, kind: int, ids: list[int] | None, parts: list[bytes], names: int
) -> None:
    """An object or an array: its header, where each part begins, and the parts."""
    offset_width = _width(sum(map(len, parts)))
    large = len(parts) > 0xFF
    header = offset_width - 1
    id_width = 0
    if ids is None:
        header |= large << 2
    else:
        id_width = _width(max(names - 1, 0))
        header |= (id_width - 1) << 2 | large << 4
    out.append(header << 2 | kind)
    out += len(parts).to_bytes(4 if large else 1, "little")
    for number in ids or ():
        out += number.to_bytes(id_width, "little")
    at = 0
    for part in parts:
        out += at.to_bytes(offset_width, "little")
        at += len(part)
    out += at.to_bytes(offset_width, "little")
    for part in parts:
        out += part


def _object(out: bytearray, value: Any, numbers: dict[str, int]) -> None:
    # Keys that differ in type only are one name; the last one stays.
    fields = {numbers[_name(key)]: each for key, each in value.items()}
    ids = sorted(fields)
    parts = []
    for number in ids:
        part = bytearray()
        _write(part, fields[number], numbers)
        parts.append(bytes(part))
    _parts(out, _OBJECT, ids, parts, len(numbers))


def _array(out: bytearray, value: Any, numbers: dict[str, int]) -> None:
    parts = []
    for each in value:
        part = bytearray()
        _write(part, each, numbers)
        parts.append(bytes(part))
    _parts(out, _ARRAY, None, parts, len(numbers))


# --- Decoding ------------------------------------------------------------------------------------


def decode(value: bytes, metadata: bytes) -> Any:
    """What *encode* was given, as AMQP has it: integers by their widths, names as strings.

    Raises:
        ValueError: It is no VARIANT, or holds what AMQP has no type for.
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
