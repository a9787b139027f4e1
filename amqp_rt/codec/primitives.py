"""Every primitive type of Part 1 §1.6: a table of readers and a table of writers.

Readers accept every encoding of a type; writers use the shortest. A size or count from the wire is
compared with the octets present before any object is built from it; nesting depth and element
counts are limited by a budget that belongs to the :class:`Reader`. Malformed bytes raise
``DecodeError`` and values without an encoding raise ``EncodeError``; no other errors are raised. A
writer that raises may have appended a part of the value: to continue with *out*, the caller has to
truncate it.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable
from typing import Final
from uuid import UUID

from ..errors import DecodeError, EncodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..values import (
    STANDS_FOR,
    Array,
    Byte,
    Char,
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

#: Upper bound for any configured limit and for nested values of the user: each level takes frames
#: of the C or Python stack, and a program cannot recover from its exhaustion.
NESTING_CEILING: Final = 128

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
#: The same after a constructor.
_CODED_U16: Final = struct.Struct(">BH")
_CODED_U32: Final = struct.Struct(">BI")
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")
_F64: Final = struct.Struct(">d")

# The constructor of an int subclass checks the range, which the width on the wire guarantees
# already.
_int: Final = int.__new__
_UBYTES: Final = [UByte(n) for n in range(256)]
_UINTS: Final = [UInt(n) for n in range(256)]
_ULONGS: Final = [ULong(n) for n in range(256)]

#: Number of unequal keys with the same hash that may occur by chance, as -1 and -2 do. More of them
#: indicate an attack that aims to make look-ups slow.
_COLLISIONS_MAX: Final = 16


# --- Reading ----------------------------------------------------------------------------------


class Reader:
    """Position in a byte string, with the budgets for reading on from there.

    The budgets of *limits*, depth and number of elements, cover everything that is read through one
    reader. After a ``DecodeError`` the reader cannot be used any more.
    """

    __slots__ = ("at", "data", "depth", "elements", "end")

    def __init__(
        self,
        data: bytes,
        at: int = 0,
        end: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.data: bytes = data
        self.at: int = at
        size = len(data)
        self.end: int = size if end is None or end > size else end
        self.depth: int = min(limits.nesting_max, NESTING_CEILING)
        self.elements: int = limits.elements_max

    def read_value(self) -> object:
        """Read one value of any type; a described one becomes ``Described``."""
        at = self.at
        if at >= self.end:
            raise DecodeError("a value is missing: the octets end before its constructor")
        self.at = at + 1
        return _READERS[self.data[at]](self)

    def peek_code(self) -> int:
        """Return the constructor of the next value; 0 if the value is described."""
        if self.at >= self.end:
            raise DecodeError("a value is missing: the octets end before its constructor")
        return self.data[self.at]

    def skip_value(self) -> None:
        """Skip one value without building it.

        Constructors and sizes are checked; the contents of a list, map or array are not.
        """
        values = 1
        while values:
            code = self.peek_code()
            self.at += 1
            width = _WIDTHS[code]
            if width >= 0:
                self.take(width)
            elif width == _VARIABLE8:
                self.take_sized()
            elif width == _VARIABLE32:
                self.take(self.take_u32())
            elif code == 0:
                values += 2
                if values > self.depth:
                    raise DecodeError("descriptors are nested deeper than nesting_max")
            else:
                raise _unassigned(code)
            values -= 1

    def take(self, width: int) -> int:
        """Skip *width* octets and return where they began."""
        at = self.at
        after = at + width
        if after > self.end:
            raise DecodeError(f"{width} octets expected, {self.end - at} are left")
        self.at = after
        return at

    def take_sized(self) -> int:
        """Skip a size of one octet and that many octets; return where the latter began."""
        at = self.at + 1
        if at > self.end:
            raise DecodeError("a size expected, no octet is left")
        after = at + self.data[at - 1]
        if after > self.end:
            raise DecodeError(f"{after - at} octets expected, {self.end - at} are left")
        self.at = after
        return at

    def take_u32(self) -> int:
        """Skip a size or count of four octets and return it."""
        at = self.take(4)
        data = self.data
        return data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]

    def enter(self, end: int) -> int:
        """Enter a compound value that ends at *end*; pass the result to ``leave``."""
        outer = self.end
        if end > outer:
            raise DecodeError(
                f"a size of {end - self.at} exceeds the {outer - self.at} octets left"
            )
        if self.depth <= 0:
            raise DecodeError("values are nested deeper than nesting_max")
        self.depth -= 1
        self.end = end
        return outer

    def leave(self, outer: int) -> None:
        """Leave a compound value, all of which must have been read."""
        if self.at != self.end:
            left = self.end - self.at
            if left < 0:
                raise DecodeError(f"the last element is {-left} octets longer than its container")
            raise DecodeError(f"{left} octets are left over after the last element")
        self.depth += 1
        self.end = outer

    def spend(self, count: int) -> None:
        """Deduct *count* elements from the budget."""
        self.elements -= count
        if self.elements < 0:
            raise DecodeError("there are more elements than elements_max")

    def enter_list(self) -> tuple[int, int]:
        """Enter a list of any width; return its element count and the argument for ``leave``."""
        code = self.peek_code()
        self.at += 1
        if code == 0xC0:
            return self._enter_counted8()
        if code == 0xD0:
            return self._enter_counted32()
        if code == 0x45:
            return 0, self.enter(self.at)
        raise DecodeError(f"a list expected, not constructor 0x{code:02x}")

    def enter_map(self) -> tuple[int, int]:
        """Enter a map of any width; return its element count and the argument for ``leave``."""
        code = self.peek_code()
        self.at += 1
        if code == 0xC1:
            count, outer = self._enter_counted8()
        elif code == 0xD1:
            count, outer = self._enter_counted32()
        else:
            raise DecodeError(f"a map expected, not constructor 0x{code:02x}")
        if count & 1:
            raise DecodeError(f"a map of {count} elements has a key without a value")
        return count, outer

    def _enter_counted8(self) -> tuple[int, int]:
        at = self.take(2)
        return self._enter_counted(at + 1 + self.data[at], self.data[at + 1])

    def _enter_counted32(self) -> tuple[int, int]:
        size = self.take_u32()
        end = self.at + size
        return self._enter_counted(end, self.take_u32())

    def _enter_counted(self, end: int, count: int) -> tuple[int, int]:
        # Every element has its own constructor, so that a count above the number of octets is
        # wrong.
        if count > end - self.at:
            raise DecodeError(f"{count} elements do not fit into {end - self.at} octets")
        outer = self.enter(end)
        self.spend(count)
        return count, outer

    def read_items(self, count: int) -> list[object]:
        """Read *count* values, each with its constructor."""
        data = self.data
        end = self.end
        items: list[object] = []
        for _ in range(count):
            at = self.at
            if at >= end:
                raise DecodeError(f"{count} elements expected, {len(items)} are there")
            code = data[at]
            if code == 0xA1 and at + 1 < end:
                # Most map entries are short strings: read them without a call.
                after = at + 2 + data[at + 1]
                if after <= end:
                    self.at = after
                    try:
                        items.append(data[at + 2 : after].decode("utf-8"))
                    except UnicodeDecodeError as error:
                        raise _not_utf8(error) from None
                    continue
            self.at = at + 1
            items.append(_READERS[code](self))
        return items


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS) -> object:
    """Decode the single value in *data*; octets after it are an error."""
    reader = Reader(data, 0, None, limits)
    value = reader.read_value()
    if reader.at != reader.end:
        raise DecodeError(f"{reader.end - reader.at} octets are left over after the value")
    return value


def _unassigned(code: int) -> DecodeError:
    return DecodeError(f"constructor 0x{code:02x} is assigned to no type")


def _read_null(r: Reader) -> object:
    return None


def _read_true(r: Reader) -> object:
    return True


def _read_false(r: Reader) -> object:
    return False


def _read_boolean(r: Reader) -> object:
    octet = r.data[r.take(1)]
    if octet > 1:
        raise DecodeError(f"a boolean is 0 or 1, not {octet}")
    return octet == 1


def _read_ubyte(r: Reader) -> object:
    return _UBYTES[r.data[r.take(1)]]


def _read_ushort(r: Reader) -> object:
    return _int(UShort, _U16.unpack_from(r.data, r.take(2))[0])


def _read_uint0(r: Reader) -> object:
    return _UINTS[0]


def _read_smalluint(r: Reader) -> object:
    return _UINTS[r.data[r.take(1)]]


def _read_uint(r: Reader) -> object:
    return _int(UInt, r.take_u32())


def _read_ulong0(r: Reader) -> object:
    return _ULONGS[0]


def _read_smallulong(r: Reader) -> object:
    return _ULONGS[r.data[r.take(1)]]


def _read_ulong(r: Reader) -> object:
    return _int(ULong, _U64.unpack_from(r.data, r.take(8))[0])


def _read_byte(r: Reader) -> object:
    octet = r.data[r.take(1)]
    return _int(Byte, octet - 256 if octet > 127 else octet)


def _read_short(r: Reader) -> object:
    return _int(Short, _I16.unpack_from(r.data, r.take(2))[0])


def _read_smallint(r: Reader) -> object:
    octet = r.data[r.take(1)]
    return _int(Int, octet - 256 if octet > 127 else octet)


def _read_int(r: Reader) -> object:
    return _int(Int, _I32.unpack_from(r.data, r.take(4))[0])


def _read_smalllong(r: Reader) -> object:
    octet = r.data[r.take(1)]
    return octet - 256 if octet > 127 else octet


def _read_long(r: Reader) -> object:
    return _I64.unpack_from(r.data, r.take(8))[0]


def _read_float(r: Reader) -> object:
    return Float32.from_bits(r.take_u32())


def _read_double(r: Reader) -> object:
    return _F64.unpack_from(r.data, r.take(8))[0]


def _read_decimal32(r: Reader) -> object:
    at = r.take(4)
    return Decimal32(r.data[at : r.at])


def _read_decimal64(r: Reader) -> object:
    at = r.take(8)
    return Decimal64(r.data[at : r.at])


def _read_decimal128(r: Reader) -> object:
    at = r.take(16)
    return Decimal128(r.data[at : r.at])


def _read_char(r: Reader) -> object:
    code_point = r.take_u32()
    if code_point > 0x10FFFF or 0xD800 <= code_point <= 0xDFFF:
        raise DecodeError(f"0x{code_point:x} is no Unicode character")
    return Char(chr(code_point))


def _read_timestamp(r: Reader) -> object:
    return _int(Timestamp, _I64.unpack_from(r.data, r.take(8))[0])


def _read_uuid(r: Reader) -> object:
    at = r.take(16)
    return UUID(bytes=r.data[at : r.at])


def _read_binary8(r: Reader) -> object:
    at = r.take_sized()
    return r.data[at : r.at]


def _read_binary32(r: Reader) -> object:
    at = r.take(r.take_u32())
    return r.data[at : r.at]


def _not_utf8(error: UnicodeDecodeError) -> DecodeError:
    return DecodeError(f"a string is not UTF-8: {error.reason}")


def _not_ascii(error: UnicodeDecodeError) -> DecodeError:
    return DecodeError(f"a symbol is not ASCII: {error.reason}")


def _read_string8(r: Reader) -> object:
    at = r.take_sized()
    try:
        return r.data[at : r.at].decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _read_string32(r: Reader) -> object:
    at = r.take(r.take_u32())
    try:
        return r.data[at : r.at].decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _read_symbol8(r: Reader) -> object:
    at = r.take_sized()
    try:
        return Symbol(r.data[at : r.at], "ascii")
    except UnicodeDecodeError as error:
        raise _not_ascii(error) from None


def _read_symbol32(r: Reader) -> object:
    at = r.take(r.take_u32())
    try:
        return Symbol(r.data[at : r.at], "ascii")
    except UnicodeDecodeError as error:
        raise _not_ascii(error) from None


def _read_list0(r: Reader) -> object:
    return []


def _read_list8(r: Reader) -> object:
    count, outer = r._enter_counted8()
    items = r.read_items(count)
    r.leave(outer)
    return items


def _read_list32(r: Reader) -> object:
    count, outer = r._enter_counted32()
    items = r.read_items(count)
    r.leave(outer)
    return items


def _read_map8(r: Reader) -> object:
    count, outer = r._enter_counted8()
    value = _read_pairs(r, count)
    r.leave(outer)
    return value


def _read_map32(r: Reader) -> object:
    count, outer = r._enter_counted32()
    value = _read_pairs(r, count)
    r.leave(outer)
    return value


def _read_pairs(r: Reader, count: int) -> object:
    if count & 1:
        raise DecodeError(f"a map of {count} elements has a key without a value")
    items = r.read_items(count)
    mapping: dict[object, object] = {}
    for index in range(0, count, 2):
        key = items[index]
        kind = type(key)
        if kind is not str and kind is not Symbol and kind is not bytes:
            return _pairs_of_any_keys(items[::2], items[1::2])
        mapping[key] = items[index + 1]
    if 2 * len(mapping) == count:
        return mapping
    return _pairs_of_any_keys(items[::2], items[1::2])


def _pairs_of_any_keys(keys: list[object], values: list[object]) -> object:
    if _tell_apart(keys):
        mapping = dict(zip(keys, values, strict=True))
        if len(mapping) == len(keys):
            return mapping
    _refuse_duplicates(keys)
    return Map(zip(keys, values, strict=True))


def _tell_apart(keys: list[object]) -> bool:
    """Return whether a ``dict`` can hold *keys* without becoming slow.

    The hashes of texts and binaries cannot be predicted by a peer. For other types, a peer could
    send many keys with the same hash and cause a quadratic number of comparisons.
    """
    try:
        return len(keys) - len({hash(key) for key in keys}) <= _COLLISIONS_MAX
    except TypeError:
        return False


def _refuse_duplicates(keys: list[object]) -> None:
    """Raise if two of *keys* have the same type and value (§1.6.23)."""
    seen = set()
    for key in keys:
        # Equal encodings mean equal types and values, at any depth.
        octets = encode(key)
        if octets in seen:
            raise DecodeError(f"a map has a key twice: {shown(key)}")
        seen.add(octets)


def _read_array8(r: Reader) -> object:
    at = r.take(2)
    return _read_elements(r, at + 1 + r.data[at], r.data[at + 1])


def _read_array32(r: Reader) -> object:
    size = r.take_u32()
    end = r.at + size
    return _read_elements(r, end, r.take_u32())


def _read_elements(r: Reader, end: int, count: int) -> object:
    if end < r.at:
        raise DecodeError("the size of an array does not even hold its count")
    outer = r.enter(end)
    descriptors: list[object] = []
    depth = r.depth
    while r.peek_code() == 0:
        # Described elements share one descriptor, which is part of the constructor (§1.6.24).
        if r.depth <= 0:
            raise DecodeError("descriptors are nested deeper than nesting_max")
        r.depth -= 1
        r.at += 1
        descriptors.append(r.read_value())
    code = r.peek_code()
    r.at += 1
    element = _ELEMENTS[code]
    if element is None:
        raise _unassigned(code)
    if count > end - r.at and _WIDTHS[code] != 0:
        raise DecodeError(f"{count} elements do not fit into {end - r.at} octets")
    r.spend(count)
    read = _READERS[code]
    if count and _WIDTHS[code] == 0:
        # Such elements take no octets on the wire; so even a large count must not take time.
        items = [read(r)] * count
    else:
        items = [read(r) for _ in range(count)]
    r.depth = depth
    r.leave(outer)
    return Array(items, element, tuple(descriptors))


def _read_described(r: Reader) -> object:
    if r.depth <= 0:
        raise DecodeError("descriptors are nested deeper than nesting_max")
    r.depth -= 1
    descriptor = r.read_value()
    value = r.read_value()
    r.depth += 1
    return Described(descriptor, value)


def _unassigned_reader(code: int) -> Callable[[Reader], object]:
    def read(r: Reader) -> object:
        raise _unassigned(code)

    return read


_VARIABLE8: Final = -1
_VARIABLE32: Final = -2
_UNASSIGNED: Final = -3

#: Constructor → reader, width in octets or kind of size field, Python class of the value.
_CONSTRUCTORS: Final[dict[int, tuple[Callable[[Reader], object], int, type]]] = {
    0x40: (_read_null, 0, type(None)),
    0x41: (_read_true, 0, bool),
    0x42: (_read_false, 0, bool),
    0x56: (_read_boolean, 1, bool),
    0x50: (_read_ubyte, 1, UByte),
    0x60: (_read_ushort, 2, UShort),
    0x43: (_read_uint0, 0, UInt),
    0x52: (_read_smalluint, 1, UInt),
    0x70: (_read_uint, 4, UInt),
    0x44: (_read_ulong0, 0, ULong),
    0x53: (_read_smallulong, 1, ULong),
    0x80: (_read_ulong, 8, ULong),
    0x51: (_read_byte, 1, Byte),
    0x61: (_read_short, 2, Short),
    0x54: (_read_smallint, 1, Int),
    0x71: (_read_int, 4, Int),
    0x55: (_read_smalllong, 1, int),
    0x81: (_read_long, 8, int),
    0x72: (_read_float, 4, Float32),
    0x82: (_read_double, 8, float),
    0x74: (_read_decimal32, 4, Decimal32),
    0x84: (_read_decimal64, 8, Decimal64),
    0x94: (_read_decimal128, 16, Decimal128),
    0x73: (_read_char, 4, Char),
    0x83: (_read_timestamp, 8, Timestamp),
    0x98: (_read_uuid, 16, UUID),
    0xA0: (_read_binary8, _VARIABLE8, bytes),
    0xB0: (_read_binary32, _VARIABLE32, bytes),
    0xA1: (_read_string8, _VARIABLE8, str),
    0xB1: (_read_string32, _VARIABLE32, str),
    0xA3: (_read_symbol8, _VARIABLE8, Symbol),
    0xB3: (_read_symbol32, _VARIABLE32, Symbol),
    0x45: (_read_list0, 0, list),
    0xC0: (_read_list8, _VARIABLE8, list),
    0xD0: (_read_list32, _VARIABLE32, list),
    0xC1: (_read_map8, _VARIABLE8, dict),
    0xD1: (_read_map32, _VARIABLE32, dict),
    0xE0: (_read_array8, _VARIABLE8, Array),
    0xF0: (_read_array32, _VARIABLE32, Array),
}

_READERS: Final[list[Callable[[Reader], object]]] = [
    _CONSTRUCTORS[code][0] if code in _CONSTRUCTORS else _unassigned_reader(code)
    for code in range(256)
]
_READERS[0x00] = _read_described
_WIDTHS: Final[list[int]] = [
    _CONSTRUCTORS[code][1] if code in _CONSTRUCTORS else _UNASSIGNED for code in range(256)
]
_ELEMENTS: Final[list[type | None]] = [
    _CONSTRUCTORS[code][2] if code in _CONSTRUCTORS else None for code in range(256)
]


# --- Writing ----------------------------------------------------------------------------------

#: Precomputed pairs of a constructor and one octet.
_UBYTE: Final = [bytes((0x50, n)) for n in range(256)]
_SMALLUINT: Final = [bytes((0x52, n)) for n in range(256)]
_SMALLULONG: Final = [bytes((0x53, n)) for n in range(256)]
_BYTE: Final = [bytes((0x51, n)) for n in range(256)]
_SMALLINT: Final = [bytes((0x54, n)) for n in range(256)]
_SMALLLONG: Final = [bytes((0x55, n)) for n in range(256)]
_BINARY8: Final = [bytes((0xA0, n)) for n in range(256)]
_STRING8: Final = [bytes((0xA1, n)) for n in range(256)]
_SYMBOL8: Final = [bytes((0xA3, n)) for n in range(256)]


def shown(value: object) -> str:
    """Format *value* for an error message, in a short form even if it is large."""
    kind = type(value).__name__
    if isinstance(value, str | bytes | bytearray):
        text = repr(value[:60])
    elif isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    elif value is None or isinstance(value, int | float | UUID | dt.datetime):
        text = repr(value)[:60]
    else:
        return f"a {kind}"
    return text if text.startswith(kind) else f"{text} ({kind})"


def refused(kind: str, value: object) -> EncodeError:
    """Create the error for a *value* that cannot be sent as *kind*."""
    return EncodeError(f"{shown(value)} cannot be sent as {kind}")


def write_null(out: bytearray, value: object = None) -> None:
    """Append null (§1.6.1)."""
    if value is not None:
        raise refused("null", value)
    out.append(0x40)


def write_boolean(out: bytearray, value: object) -> None:
    """Append *value* as a ``boolean`` in one octet (§1.6.2)."""
    if value is True:
        out += b"\x41"
    elif value is False:
        out += b"\x42"
    else:
        raise refused("boolean", value)


def write_ubyte(out: bytearray, value: object) -> None:
    """Append *value* as a ``ubyte`` (§1.6.3)."""
    if not isinstance(value, int) or not 0 <= value <= 0xFF:
        raise refused("ubyte", value)
    out += _UBYTE[value]


def write_ushort(out: bytearray, value: object) -> None:
    """Append *value* as a ``ushort`` (§1.6.4)."""
    if not isinstance(value, int) or not 0 <= value <= 0xFFFF:
        raise refused("ushort", value)
    out += _CODED_U16.pack(0x60, value)


def write_uint(out: bytearray, value: object) -> None:
    """Append *value* as a ``uint`` in its shortest form (§1.6.5)."""
    if not isinstance(value, int) or not 0 <= value <= 0xFFFF_FFFF:
        raise refused("uint", value)
    if value == 0:
        out += b"\x43"
    elif value <= 0xFF:
        out += _SMALLUINT[value]
    else:
        out += _CODED_U32.pack(0x70, value)


def write_ulong(out: bytearray, value: object) -> None:
    """Append *value* as a ``ulong`` in its shortest form (§1.6.6)."""
    if not isinstance(value, int) or not 0 <= value <= 0xFFFF_FFFF_FFFF_FFFF:
        raise refused("ulong", value)
    if value == 0:
        out.append(0x44)
    elif value <= 0xFF:
        out += _SMALLULONG[value]
    else:
        out.append(0x80)
        out += _U64.pack(value)


def write_byte(out: bytearray, value: object) -> None:
    """Append *value* as a ``byte`` (§1.6.7)."""
    if not isinstance(value, int) or not -0x80 <= value <= 0x7F:
        raise refused("byte", value)
    out += _BYTE[value & 0xFF]


def write_short(out: bytearray, value: object) -> None:
    """Append *value* as a ``short`` (§1.6.8)."""
    if not isinstance(value, int) or not -0x8000 <= value <= 0x7FFF:
        raise refused("short", value)
    out.append(0x61)
    out += _I16.pack(value)


def write_int(out: bytearray, value: object) -> None:
    """Append *value* as an ``int`` in its shortest form (§1.6.9)."""
    if not isinstance(value, int) or not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise refused("int", value)
    if -0x80 <= value <= 0x7F:
        out += _SMALLINT[value & 0xFF]
    else:
        out.append(0x71)
        out += _I32.pack(value)


def write_long(out: bytearray, value: object) -> None:
    """Append *value* as a ``long`` in its shortest form (§1.6.10)."""
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise refused("long", value)
    if -0x80 <= value <= 0x7F:
        out += _SMALLLONG[value & 0xFF]
    else:
        out.append(0x81)
        out += _I64.pack(value)


def write_float(out: bytearray, value: object) -> None:
    """Append *value* as a ``float`` of 32 bits (§1.6.11), rounded if it has more precision."""
    if type(value) is not Float32:
        if not isinstance(value, float | int):
            raise refused("float", value)
        try:
            value = Float32(value)
        except (ValueError, OverflowError):
            raise refused("float", value) from None
    out.append(0x72)
    out += _U32.pack(value.bits)


def write_double(out: bytearray, value: object) -> None:
    """Append *value* as a ``double`` (§1.6.12)."""
    if not isinstance(value, float | int):
        raise refused("double", value)
    try:
        octets = _F64.pack(float(value))
    except OverflowError:
        raise refused("double", value) from None
    out.append(0x82)
    out += octets


def write_decimal(out: bytearray, value: object) -> None:
    """Append a ``decimal32``, ``decimal64`` or ``decimal128`` (§1.6.13 to §1.6.15)."""
    if isinstance(value, Decimal32):
        out.append(0x74)
        out += value.octets
    elif isinstance(value, Decimal64):
        out.append(0x84)
        out += value.octets
    elif isinstance(value, Decimal128):
        out.append(0x94)
        out += value.octets
    else:
        raise refused("decimal", value)


def write_char(out: bytearray, value: object) -> None:
    """Append *value* as a ``char`` (§1.6.16)."""
    if not isinstance(value, str) or len(value) != 1 or 0xD800 <= ord(value) <= 0xDFFF:
        raise refused("char", value)
    out.append(0x73)
    out += _U32.pack(ord(value))


def write_timestamp(out: bytearray, value: object) -> None:
    """Append milliseconds, or a ``datetime`` with a time zone, as a ``timestamp`` (§1.6.17)."""
    if isinstance(value, dt.datetime):
        try:
            value = Timestamp.from_datetime(value)
        except ValueError as error:
            raise EncodeError(str(error)) from None
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise refused("timestamp", value)
    out.append(0x83)
    out += _I64.pack(value)


def write_uuid(out: bytearray, value: object) -> None:
    """Append *value* as a ``uuid`` (§1.6.18)."""
    if not isinstance(value, UUID):
        raise refused("uuid", value)
    out.append(0x98)
    out += value.bytes


def write_binary(out: bytearray, value: object) -> None:
    """Append *value*, bytes or the like, as ``binary`` in its shortest form (§1.6.19)."""
    if isinstance(value, memoryview):
        value = value.tobytes()  # its length counts items, which may be wider than octets
    if not isinstance(value, bytes | bytearray):
        raise refused("binary", value)
    size = len(value)
    if size <= 0xFF:
        out += _BINARY8[size]
    else:
        _write_size32(out, 0xB0, size)
    out += value


def write_string(out: bytearray, value: object) -> None:
    """Append *value* as a ``string`` in UTF-8, in its shortest form (§1.6.20)."""
    if not isinstance(value, str):
        raise refused("string", value)
    try:
        octets = value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EncodeError(f"{shown(value)} is no text in UTF-8: {error.reason}") from None
    size = len(octets)
    if size <= 0xFF:
        out += _STRING8[size]
    else:
        _write_size32(out, 0xB1, size)
    out += octets


def write_symbol(out: bytearray, value: object) -> None:
    """Append *value* as a ``symbol`` in its shortest form (§1.6.21)."""
    if not isinstance(value, str):
        raise refused("symbol", value)
    octets = _ascii(value)
    size = len(octets)
    if size <= 0xFF:
        out += _SYMBOL8[size]
    else:
        _write_size32(out, 0xB3, size)
    out += octets


def _ascii(value: str) -> bytes:
    try:
        return value.encode("ascii")
    except UnicodeEncodeError:
        raise EncodeError(f"{shown(value)} is not ASCII, as a symbol must be") from None


def _write_size32(out: bytearray, code: int, size: int) -> None:
    if size > 0xFFFF_FFFF:
        raise EncodeError(f"{size} octets do not fit into a size of 32 bits")
    out.append(code)
    out += _U32.pack(size)


def write_list(out: bytearray, value: object, depth: int = 0) -> None:
    """Append a list or tuple as a ``list`` in its shortest form (§1.6.22)."""
    if not isinstance(value, list | tuple):
        raise refused("list", value)
    if not value:
        out.append(0x45)
        return
    depth = deeper(depth)
    at = open_compound(out, 0xC0)
    for item in value:
        write_value(out, item, depth)
    close_compound(out, at, len(value))


def write_map(out: bytearray, value: object, depth: int = 0) -> None:
    """Append a ``dict`` or ``Map`` as a ``map``, in its order (§1.6.23)."""
    depth = deeper(depth)
    if isinstance(value, dict):
        at = open_compound(out, 0xC1)
        for key, item in value.items():
            write_value(out, key, depth)
            write_value(out, item, depth)
        close_compound(out, at, 2 * len(value))
        return
    if not isinstance(value, Map):
        raise refused("map", value)
    at = open_compound(out, 0xC1)
    seen = set()
    for key, item in value.pairs:
        begin = len(out)
        write_value(out, key, depth)
        octets = bytes(out[begin:])
        if octets in seen:
            raise EncodeError(f"a map has a key twice: {shown(key)}")
        seen.add(octets)
        write_value(out, item, depth)
    close_compound(out, at, 2 * len(value.pairs))


def write_array(out: bytearray, value: object, depth: int = 0) -> None:
    """Append an ``Array`` (§1.6.24).

    Numbers are written in their full width, other types in the smallest width that holds all
    elements, but never in width zero: every peer's decoder knows these constructors.
    """
    if not isinstance(value, Array):
        raise refused("array", value)
    depth = deeper(depth)
    at = open_compound(out, 0xE0)
    for descriptor in value.descriptors:
        out.append(0x00)
        write_value(out, descriptor, depth)
        depth = deeper(depth)
    _write_elements(out, value, depth)
    close_compound(out, at, len(value.items))


def write_described(out: bytearray, value: object, depth: int = 0) -> None:
    """Append a ``Described`` value (§1.2.2)."""
    if not isinstance(value, Described):
        raise refused("described value", value)
    depth = deeper(depth)
    out.append(0x00)
    write_value(out, value.descriptor, depth)
    write_value(out, value.value, depth)


def write_value(out: bytearray, value: object, depth: int = 0) -> None:
    """Append *value* as the AMQP type of its Python class, in the shortest form.

    Objects of a class declared with :func:`~amqp_rt.codec.composites.composite` write themselves.
    *depth* is the number of values in which this one is nested.
    """
    kind = type(value)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        scalar(out, value)
        return
    compound = _COMPOUNDS.get(kind)
    if compound is None:
        compound = getattr(kind, "__amqp_write__", None)
        if compound is None:
            kind = amqp_kind(kind)
            scalar = _SCALARS.get(kind)
            if scalar is not None:
                scalar(out, value)
                return
            compound = _COMPOUNDS.get(kind)
            if compound is None:
                raise EncodeError(f"{shown(value)} has no AMQP type")
    compound(out, value, depth)


def encode(value: object) -> bytes:
    """Encode *value* as :func:`write_value` does."""
    out = bytearray()
    write_value(out, value)
    return bytes(out)


def amqp_kind(kind: type) -> type:
    """Return the class among *kind* and its bases that determines the AMQP type."""
    for base in kind.__mro__:
        if base in _SCALARS or base in _COMPOUNDS:
            return base
    return kind


def deeper(depth: int) -> int:
    """Return the depth one level down.

    Raises:
        EncodeError: The result would exceed ``NESTING_CEILING``.
    """
    if depth >= NESTING_CEILING:
        raise EncodeError(f"values are nested deeper than {NESTING_CEILING}, or hold themselves")
    return depth + 1


#: Narrow constructors of lists, maps and arrays, each with room for size and count.
_OPENED: Final = {code: bytes((code, 0, 0)) for code in (0xC0, 0xC1, 0xE0)}


def open_compound(out: bytearray, code8: int) -> int:
    """Begin a list, map or array with its narrow constructor; return its position."""
    at = len(out)
    out += _OPENED[code8]
    return at


def close_compound(out: bytearray, at: int, count: int) -> None:
    """Fill in size and count of the compound begun at *at*; widen it if they need more octets."""
    size = len(out) - at - 2
    if size <= 0xFF and count <= 0xFF:
        out[at + 1] = size
        out[at + 2] = count
        return
    size += 3
    if size > 0xFFFF_FFFF:
        raise EncodeError(f"{size} octets do not fit into a size of 32 bits")
    # Every wide constructor is the narrow one plus 0x10.
    out[at : at + 3] = bytes((out[at] + 0x10,)) + _U32.pack(size) + _U32.pack(count)


#: Element types with several encodings: constructor and struct format of the widest.
_WIDE: Final[dict[type, tuple[int, str]]] = {
    bool: (0x56, "B"),
    UInt: (0x70, "I"),
    ULong: (0x80, "Q"),
    Int: (0x71, "i"),
    int: (0x81, "q"),
}
#: Element types with a single encoding: its constructor.
_SINGLE: Final[dict[type, int]] = {
    type(None): 0x40,
    UByte: 0x50,
    UShort: 0x60,
    Byte: 0x51,
    Short: 0x61,
    Float32: 0x72,
    float: 0x82,
    Decimal32: 0x74,
    Decimal64: 0x84,
    Decimal128: 0x94,
    Char: 0x73,
    Timestamp: 0x83,
    UUID: 0x98,
}
#: Element types of variable size: the narrow constructor.
_VARIABLE: Final[dict[type, int]] = {bytes: 0xA0, str: 0xA1, Symbol: 0xA3}
#: Compound element types: the wide constructor.
_COMPOUND: Final[dict[type, int]] = {list: 0xD0, dict: 0xD1, Array: 0xF0}


def _write_elements(out: bytearray, array: Array, depth: int) -> None:
    kind = _element_kind(array.of)
    items = array.items
    for item in items:
        _check_element(kind, item)
    if kind in _WIDE:
        code, letter = _WIDE[kind]
        out.append(code)
        try:
            out += struct.pack(f">{len(items)}{letter}", *items)
        except struct.error:
            raise EncodeError(f"an array of {kind.__name__} has items out of range") from None
    elif kind in _SINGLE:
        out.append(_SINGLE[kind])
        write = _SCALARS[kind]
        for item in items:
            begin = len(out)
            write(out, item)
            del out[begin]
    elif kind in _VARIABLE:
        _write_variable_elements(out, kind, items)
    elif kind in _COMPOUND:
        out.append(_COMPOUND[kind])
        nested = _COMPOUNDS[kind]
        for item in items:
            body = bytearray()
            nested(body, item, depth)
            out += _widened(body)
    else:
        raise EncodeError(f"{kind.__name__} cannot be the element type of an array")


def _element_kind(kind: type) -> type:
    base = amqp_kind(kind)
    return STANDS_FOR.get(base, base)


def _check_element(kind: type, item: object) -> None:
    """Refuse an item of another AMQP type; plain numbers and texts adapt to *kind*."""
    found = type(item)
    if found is kind:
        return
    found = _element_kind(found)
    plain = found is int or found is float or found is str
    if found is not kind and not (plain and kind is not bool and issubclass(kind, found)):
        raise EncodeError(f"{shown(item)} in an array of {kind.__name__}")


def _write_variable_elements(out: bytearray, kind: type, items: tuple[object, ...]) -> None:
    write = _SCALARS[kind]
    bodies: list[bytes] = []
    widest = 0
    for item in items:
        whole = bytearray()
        write(whole, item)
        body = bytes(whole[2:] if whole[0] < 0xB0 else whole[5:])
        widest = max(widest, len(body))
        bodies.append(body)
    if widest <= 0xFF:
        out.append(_VARIABLE[kind])
        for body in bodies:
            out.append(len(body))
            out += body
    else:
        out.append(_VARIABLE[kind] + 0x10)
        for body in bodies:
            out += _U32.pack(len(body))
            out += body


def _widened(compound: bytearray) -> bytes:
    """Convert size, count and content of a compound to the widths of its wide constructor."""
    code = compound[0]
    if code == 0x45:
        return b"\x00\x00\x00\x04\x00\x00\x00\x00"
    if code == 0xD0 or code == 0xD1 or code == 0xF0:
        return bytes(compound[1:])
    return _U32.pack(compound[1] + 3) + _U32.pack(compound[2]) + bytes(compound[3:])


_SCALARS: Final[dict[type, Callable[[bytearray, object], None]]] = {
    type(None): write_null,
    bool: write_boolean,
    UByte: write_ubyte,
    UShort: write_ushort,
    UInt: write_uint,
    ULong: write_ulong,
    Byte: write_byte,
    Short: write_short,
    Int: write_int,
    int: write_long,
    Float32: write_float,
    float: write_double,
    Decimal32: write_decimal,
    Decimal64: write_decimal,
    Decimal128: write_decimal,
    Char: write_char,
    Timestamp: write_timestamp,
    dt.datetime: write_timestamp,
    UUID: write_uuid,
    bytes: write_binary,
    bytearray: write_binary,
    memoryview: write_binary,
    str: write_string,
    Symbol: write_symbol,
}

_COMPOUNDS: Final[dict[type, Callable[[bytearray, object, int], None]]] = {
    list: write_list,
    tuple: write_list,
    dict: write_map,
    Map: write_map,
    Array: write_array,
    Described: write_described,
}
