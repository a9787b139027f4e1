"""JSON bodies of structs, maps and arrays, in the form of Spark's ``to_json``.

Differences: object keys that are not strings are written as their JSON text, and timestamps are in UTC
regardless of the session's time zone.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec.json import Encoder

from . import variant

_ENCODER: Final = Encoder(decimal_format="number")
_FLOAT32: Final = struct.Struct(">f")


def encode(value: Any, kind: Any = None) -> bytes:
    """Return *value* as JSON.

    Args:
        value: A struct, a map, an array or a VARIANT, as Spark passes it to Python.
        kind: Its Spark type. Without one, times are treated as timestamps, and floats as doubles.

    Raises:
        ValueError: Part of *value* has no JSON form.
    """
    return _ENCODER.encode(_plain(value, kind))


def _plain(value: Any, kind: Any) -> Any:
    """Return *value* in types that JSON has; *kind* is its Spark type."""
    if value is None or isinstance(value, str | bool | int | Decimal):
        return value
    if isinstance(value, float):
        return _number(value, single=_name(kind) == "float")
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        return _moment(value, zoned=_name(kind) != "timestamp_ntz")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return _interval(value)
    if hasattr(value, "metadata") and hasattr(value, "value"):
        return _plain(variant.decode(value.value, value.metadata), None)
    if hasattr(value, "__fields__"):
        # Like to_json, leave out null fields, in structs only.
        kinds = [each.dataType for each in kind.fields] if kind is not None else [None] * len(value)
        return {
            name: _plain(each, its)
            for name, each, its in zip(value.__fields__, value, kinds, strict=True)
            if each is not None
        }
    if isinstance(value, Mapping):
        keys, values = getattr(kind, "keyType", None), getattr(kind, "valueType", None)
        return {_key(key, keys): _plain(each, values) for key, each in value.items()}
    if isinstance(value, list | tuple):
        element = getattr(kind, "elementType", None)
        return [_plain(each, element) for each in value]
    raise ValueError(
        f"a body with a value of type {type(value).__name__} cannot be written as JSON: cast it to a "
        "type that JSON has"
    )


def _name(kind: Any) -> str:
    return "" if kind is None else str(kind.typeName())


def _key(key: Any, kind: Any) -> str:
    found = _plain(key, kind)
    return found if isinstance(found, str) else _ENCODER.encode(found).decode()


def _number(value: float, *, single: bool) -> float | str:
    if not math.isfinite(value):
        # JSON has no numbers for these; Spark writes and reads these strings.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if single:
        # The shortest digits that give the same 4 octets: 0.1, not 0.10000000149011612.
        for digits in range(6, 9):
            short = float(f"{value:.{digits}g}")
            if _FLOAT32.pack(short) == _FLOAT32.pack(value):
                return short
    return value


def _moment(value: dt.datetime, *, zoned: bool) -> str:
    # Spark passes timestamps as local times of the worker.
    if zoned:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    # Without its spec, a time of whole seconds would have no milliseconds, unlike all others.
    return value.isoformat(timespec="milliseconds") + ("Z" if zoned else "")


def _interval(value: dt.timedelta) -> str:
    sign = "-" if value < dt.timedelta() else ""
    seconds, micros = divmod(abs(value) // dt.timedelta(microseconds=1), 1_000_000)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    fraction = f".{micros:06}".rstrip("0").rstrip(".")
    return f"INTERVAL '{sign}{days} {hour:02}:{minute:02}:{second:02}{fraction}' DAY TO SECOND"
