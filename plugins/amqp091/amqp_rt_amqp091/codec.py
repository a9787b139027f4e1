"""Fields of methods and tables, to and from octets (0-9-1 §4.2.5).

Lengths and counts from the peer are checked against the octets present; a fault is a
:class:`SyntaxFault`, reply code 502. Field types are those in use by implementations, in which
``s`` is a short integer, not those of the published grammar.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from struct import Struct as Layout
from typing import Final, get_args, get_type_hints

from msgspec import Struct

from amqp_rt.fronts import (
    Byte,
    Float32,
    Int,
    Short,
    UByte,
    UInt,
    ULong,
    UShort,
)

from .methods import METHODS, BasicProperties, Method
from .values import ContentHeader, Decimal, Seconds

#: Levels of tables and arrays within each other.
NESTING_MAX: Final = 32
#: Fields and items of a method or header, nested ones included: some milliseconds of work.
ELEMENTS_MAX: Final = 4_096
#: Highest bit of the property flags: one word has room for all properties of the class.
_PROPERTY_FLAGS: Final = 15


class SyntaxFault(Exception):
    """Octets that break the grammar: reply code 502."""


class NotImplementedFault(Exception):
    """A class or method unknown to this protocol: reply code 540."""


class Reader:
    """Reader of fields from the octets of one method, header or table."""

    __slots__ = ("_data", "_elements", "_end", "_position")

    def __init__(self, data: bytes, start: int = 0, end: int | None = None) -> None:
        self._data = data
        self._position = start
        self._end = len(data) if end is None else end
        self._elements = 0

    def at_end(self) -> bool:
        return self._position == self._end

    def octets(self, count: int) -> bytes:
        start = self._position
        end = start + count
        if end > self._end:
            raise SyntaxFault(f"a field of {count} octets, and {self._end - start} are there")
        self._position = end
        return self._data[start:end]

    def number(self, layout: Layout) -> int:
        value: int = layout.unpack(self.octets(layout.size))[0]
        return value

    def shortstr(self) -> str:
        # Short strings need not be UTF-8; other octets survive decoding and encoding as surrogates.
        start = self._position + 1
        end = start + self._data[start - 1] if start <= self._end else start
        if end > self._end:
            raise SyntaxFault(f"a short string needs {end - self._end} octets more than are there")
        self._position = end
        return self._data[start:end].decode("utf-8", "surrogateescape")

    def longstr(self) -> bytes:
        return self.octets(self.number(_UINT32))

    def table(self, depth: int = 0) -> dict[str, object]:
        """Read a field table (§4.2.5.5); its names are unique and not empty."""
        end = self._enter(depth)
        outer, self._end = self._end, end
        found: dict[str, object] = {}
        while self._position < end:
            name = self.shortstr()
            if not name:
                raise SyntaxFault("a table has a field without a name")
            if name in found:
                raise SyntaxFault(f"a table has the field {name!r:.80} twice")
            found[name] = self.value(depth + 1)
        self._end = outer
        return found

    def array(self, depth: int) -> list[object]:
        end = self._enter(depth)
        outer, self._end = self._end, end
        found: list[object] = []
        while self._position < end:
            found.append(self.value(depth + 1))
        self._end = outer
        return found

    def _enter(self, depth: int) -> int:
        if depth > NESTING_MAX:
            raise SyntaxFault(f"tables and arrays are nested more than {NESTING_MAX} deep")
        size = self.number(_UINT32)
        if size > self._end - self._position:
            raise SyntaxFault(
                f"a table of {size} octets, and {self._end - self._position} are there"
            )
        return self._position + size

    def value(self, depth: int = 0) -> object:
        """Read a field value, which its type precedes."""
        self._elements += 1
        if self._elements > ELEMENTS_MAX:
            raise SyntaxFault(f"a table has more than {ELEMENTS_MAX} fields")
        kind = self.octets(1)
        plain = _NUMBERS.get(kind)
        if plain is not None:
            layout, wrap = plain
            return wrap(layout.unpack(self.octets(layout.size))[0])
        match kind:
            case b"S":
                text = self.longstr()
                try:
                    return text.decode()
                except UnicodeDecodeError:
                    return text
            case b"x":
                return self.longstr()
            case b"F":
                return self.table(depth)
            case b"A":
                return self.array(depth)
            case b"D":
                return Decimal(self.number(_UINT8), self.number(_INT32))
            case b"V":
                return None
        raise SyntaxFault(f"there is no field type {kind!r}")


def _bool(value: int) -> bool:
    return value != 0


def _plain(value: object) -> object:
    return value


_UINT8: Final = Layout(">B")
_UINT16: Final = Layout(">H")
_UINT32: Final = Layout(">I")
_UINT64: Final = Layout(">Q")
_INT32: Final = Layout(">i")
_INT64: Final = Layout(">q")

#: Field type → its layout, and the function that converts the number. ``U`` and ``L`` are read as
#: in strict peers.
_NUMBERS: Final[dict[bytes, tuple[Layout, Callable[[int], object]]]] = {
    b"t": (_UINT8, _bool),
    b"b": (Layout(">b"), Byte),
    b"B": (_UINT8, UByte),
    b"s": (Layout(">h"), Short),
    b"U": (Layout(">h"), Short),
    b"u": (_UINT16, UShort),
    b"I": (_INT32, Int),
    b"i": (_UINT32, UInt),
    b"l": (_INT64, _plain),
    b"L": (_INT64, _plain),
    b"f": (Layout(">f"), Float32),
    b"d": (Layout(">d"), _plain),
    b"T": (_UINT64, Seconds),
}
#: Python type → field type and layout. A plain int is written as a long, signed 64 bits.
_WRITTEN: Final[dict[type, tuple[bytes, Layout]]] = {
    bool: (b"t", _UINT8),
    Byte: (b"b", Layout(">b")),
    UByte: (b"B", _UINT8),
    Short: (b"s", Layout(">h")),
    UShort: (b"u", _UINT16),
    Int: (b"I", _INT32),
    UInt: (b"i", _UINT32),
    int: (b"l", _INT64),
    Float32: (b"f", Layout(">f")),
    float: (b"d", Layout(">d")),
}


def write_shortstr(value: str) -> bytes:
    """Encode a short string.

    Raises:
        ValueError: It has more than 255 octets.
    """
    data = value.encode("utf-8", "surrogateescape")
    if len(data) > 255:
        raise ValueError(f"a short string has at most 255 octets, not {len(data)}")
    return bytes((len(data),)) + data


def write_longstr(value: bytes) -> bytes:
    """Encode a long string."""
    return _UINT32.pack(len(value)) + value


def write_table(table: Mapping[str, object]) -> bytes:
    """Encode a field table with its length.

    Raises:
        ValueError: A name is too long, or a value has no field type.
    """
    parts: list[bytes] = []
    for name, value in table.items():
        parts.append(write_shortstr(name))
        parts.append(write_value(value))
    return write_longstr(b"".join(parts))


def write_value(value: object) -> bytes:
    """Encode a field value, preceded by its type.

    Raises:
        ValueError: No field type fits.
    """
    known = _WRITTEN.get(type(value))
    try:
        if known is not None:
            return known[0] + known[1].pack(value)
    except struct.error:
        raise ValueError(f"{value!r} has more than 64 bits, or 64 without a sign") from None
    if value is None:
        return b"V"
    if isinstance(value, str):
        return b"S" + write_longstr(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bytes):
        return b"x" + write_longstr(value)
    if isinstance(value, Seconds):
        return b"T" + _UINT64.pack(value.value)
    if isinstance(value, Decimal):
        return b"D" + _UINT8.pack(value.scale) + _INT32.pack(value.value)
    if isinstance(value, ULong) and value < 1 << 63:
        return b"l" + _INT64.pack(value)
    if isinstance(value, Mapping):
        return b"F" + write_table(value)
    if isinstance(value, list | tuple):
        return b"A" + write_longstr(b"".join(map(write_value, value)))
    raise ValueError(f"a table cannot carry {value!r:.80}")


_INTEGERS: Final[dict[str, Layout]] = {
    "octet": _UINT8,
    "short": _UINT16,
    "long": _UINT32,
    "longlong": _UINT64,
    "timestamp": _UINT64,
}


def _read(reader: Reader, kind: str) -> object:
    if kind == "shortstr":
        return reader.shortstr()
    if kind == "longstr":
        return reader.longstr()
    if kind == "table":
        return reader.table()
    return reader.number(_INTEGERS[kind])


def _write(value: object, kind: str) -> bytes:
    if kind == "shortstr":
        assert isinstance(value, str)
        return write_shortstr(value)
    if kind == "longstr":
        assert isinstance(value, bytes)
        return write_longstr(value)
    if kind == "table":
        assert isinstance(value, dict)
        return write_table(value)
    return _INTEGERS[kind].pack(value)


def _kinds(of: type[Struct]) -> tuple[tuple[str, str], ...]:
    """Return the wire fields of *of* in order, each with its wire type."""
    hints = get_type_hints(of, include_extras=True)
    found = []
    for name in of.__struct_fields__:
        hint = hints[name]
        # A property is ``X | None``: the annotated part has the wire type.
        annotated = next((part for part in get_args(hint) if hasattr(part, "__metadata__")), hint)
        found.append((name, annotated.__metadata__[0]))
    return tuple(found)


#: Field names and wire types of every method, in order.
FIELDS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    code: _kinds(method) for code, method in METHODS.items()
}
#: The same of the content properties; the first one has the highest bit of the flags.
PROPERTIES: Final = _kinds(BasicProperties)


def read_method(payload: bytes) -> Method:
    """Decode the method of a frame of type 1 (§4.2.4).

    Raises:
        SyntaxFault: Its fields are malformed, or octets follow them.
        NotImplementedFault: There is no such method.
    """
    reader = Reader(payload)
    code = reader.number(_UINT32)
    method = METHODS.get(code)
    if method is None:
        raise NotImplementedFault(f"there is no method {code & 0xFFFF} in class {code >> 16}")
    values: dict[str, object] = {}
    octet = bit = 0
    for name, kind in FIELDS[code]:
        if kind == "bit":
            # Adjacent bits share octets, from the lowest bit on (§4.2.5.2).
            if bit in (0, 8):
                octet, bit = reader.number(_UINT8), 0
            values[name] = bool(octet >> bit & 1)
            bit += 1
        else:
            bit = 0
            values[name] = _read(reader, kind)
    if not reader.at_end():
        raise SyntaxFault(f"{method.name} has octets after its last field")
    return method(**values)


def write_method(method: Method) -> bytes:
    """Encode the payload of *method*'s frame.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    parts = [_UINT32.pack(method.code)]
    octet = bit = 0
    for name, kind in FIELDS[method.code]:
        value = getattr(method, name)
        if kind == "bit":
            if bit == 8:
                parts.append(bytes((octet,)))
                octet = bit = 0
            octet |= value << bit
            bit += 1
            continue
        if bit:
            parts.append(bytes((octet,)))
            octet = bit = 0
        parts.append(_write(value, kind))
    if bit:
        parts.append(bytes((octet,)))
    return b"".join(parts)


@lru_cache(maxsize=256)
def _stated(flags: int) -> tuple[tuple[str, str], ...]:
    """Return the properties that *flags* declare present, in order."""
    return tuple(
        each for index, each in enumerate(PROPERTIES) if flags >> (_PROPERTY_FLAGS - index) & 1
    )


def read_header(payload: bytes) -> ContentHeader:
    """Decode the content header of a frame of type 2.

    Raises:
        SyntaxFault: It is malformed, or its weight is not 0.
    """
    reader = Reader(payload)
    class_id = reader.number(_UINT16)
    if reader.number(_UINT16) != 0:
        raise SyntaxFault("the weight of a content header is 0")
    body_size = reader.number(_UINT64)
    flags = word = reader.number(_UINT16)
    while word & 1:
        # Another word of flags follows, for which no properties are defined.
        word = reader.number(_UINT16)
        if word & ~1:
            raise SyntaxFault("a content header has properties that the class has not")
    if flags & 0b10:
        raise SyntaxFault("a content header has a fifteenth property")
    properties = BasicProperties()
    for name, kind in _stated(flags):
        if kind == "shortstr":
            setattr(properties, name, reader.shortstr())
        else:
            setattr(properties, name, _read(reader, kind))
    if not reader.at_end():
        raise SyntaxFault("a content header has octets after its last property")
    return ContentHeader(class_id, body_size, properties)


def write_header(header: ContentHeader) -> bytes:
    """Encode the payload of a content header's frame.

    Raises:
        ValueError: A property does not fit its wire type.
    """
    flags = 0
    parts = []
    for index, (name, kind) in enumerate(PROPERTIES):
        value = getattr(header.properties, name)
        if value is not None:
            flags |= 1 << (_PROPERTY_FLAGS - index)
            parts.append(_write(value, kind))
    return b"".join(
        (
            _UINT16.pack(header.class_id),
            b"\0\0",
            _UINT64.pack(header.body_size),
            _UINT16.pack(flags),
            *parts,
        )
    )
