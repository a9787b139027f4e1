"""Columns of many rows as arrays in PostgreSQL's binary format, which is several times faster than lists are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

__all__ = ["Column", "number_column", "octet_column", "register"]

_INT8: Final = 20
_BYTEA: Final = 17
#: Dimensions, whether there are nulls, type of the elements; then the number of elements and the first index.
_HEADER: Final = struct.Struct(">iIIii")
_EMPTY: Final = struct.Struct(">iII")
_NUMBER: Final = struct.Struct(">iq")
_SIZE: Final = struct.Struct(">i")


class Column:
    """Encoded ``bigint[]``."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Octets(Column):
    """Encoded ``bytea[]``."""

    __slots__ = ()


class _NumbersDumper(Dumper):
    format = Format.BINARY
    oid = 1016

    def dump(self, obj: Column) -> Buffer:
        """Return the octets of a column."""
        return obj.data


class _OctetsDumper(_NumbersDumper):
    oid = 1001


def number_column(values: Sequence[int]) -> Column:
    """Encode integers of 64 bits."""
    if not values:
        return Column(_EMPTY.pack(0, 0, _INT8))
    pack = _NUMBER.pack
    head = _HEADER.pack(1, 0, _INT8, len(values), 1)
    return Column(head + b"".join([pack(8, value) for value in values]))


def octet_column(values: Sequence[bytes]) -> Column:
    """Encode octet strings."""
    if not values:
        return _Octets(_EMPTY.pack(0, 0, _BYTEA))
    parts = [_HEADER.pack(1, 0, _BYTEA, len(values), 1)]
    parts += _sized(values)
    return _Octets(b"".join(parts))


def _sized(values: Iterable[bytes]) -> Iterable[bytes]:
    pack = _SIZE.pack
    for value in values:
        yield pack(len(value))
        yield value


def register(context: AdaptContext) -> None:
    """Let the statements of a connection have columns as parameters."""
    context.adapters.register_dumper(Column, _NumbersDumper)
    context.adapters.register_dumper(_Octets, _OctetsDumper)
