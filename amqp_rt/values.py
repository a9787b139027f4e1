"""The AMQP types that Python lacks (Part 1 §1.6).

Plain ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``uuid.UUID``, ``list`` and ``dict``
are sent as null, boolean, long, double, string, binary, uuid, list and map. Every other AMQP type
has a class here, so that a received value is sent again with its type. Numbers and texts subclass
``int``, ``float`` or ``str``: a peer's ``uint`` 5 equals 5, and arithmetic gives plain numbers.

Arguments outside a type's range raise ``ValueError`` when the value is made, not when it is sent.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Iterable, Iterator
from math import isnan
from typing import ClassVar, Self

from msgspec import Struct

__all__ = [
    "Array",
    "Byte",
    "Char",
    "Decimal32",
    "Decimal64",
    "Decimal128",
    "Described",
    "Float32",
    "Int",
    "Map",
    "Short",
    "Symbol",
    "Timestamp",
    "UByte",
    "UInt",
    "ULong",
    "UShort",
]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)


class Symbol(str):
    """Name from a constrained domain, in ASCII (§1.6.21).

    Equal to the ``str`` of the same text. Text that is not ASCII is refused when it is encoded.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Symbol({str.__repr__(self)})"


class Char(str):
    """Single Unicode character (§1.6.16)."""

    __slots__ = ()

    def __new__(cls, character: str) -> Self:
        if len(character) != 1 or "\ud800" <= character <= "\udfff":
            raise ValueError(f"Char takes one character, surrogates excluded, not {character!r}")
        return str.__new__(cls, character)

    def __repr__(self) -> str:
        return f"Char({str.__repr__(self)})"


class _Bounded(int):
    """An ``int`` that fits the width of its AMQP type."""

    __slots__ = ()
    MIN: ClassVar[int]
    MAX: ClassVar[int]

    def __new__(cls, value: int = 0) -> Self:
        self = int.__new__(cls, value)
        if not cls.MIN <= self <= cls.MAX:
            raise ValueError(f"{cls.__name__} takes {cls.MIN} to {cls.MAX}, not {int(self)}")
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int.__repr__(self)})"

    # Printed counts should read as plain numbers, without the type's name.
    __str__ = int.__repr__


class UByte(_Bounded):
    """An unsigned integer of 8 bits (§1.6.3)."""

    __slots__ = ()
    MIN = 0
    MAX = 0xFF


class UShort(_Bounded):
    """An unsigned integer of 16 bits (§1.6.4)."""

    __slots__ = ()
    MIN = 0
    MAX = 0xFFFF


class UInt(_Bounded):
    """An unsigned integer of 32 bits (§1.6.5)."""

    __slots__ = ()
    MIN = 0
    MAX = 0xFFFF_FFFF


class ULong(_Bounded):
    """An unsigned integer of 64 bits (§1.6.6)."""

    __slots__ = ()
    MIN = 0
    MAX = 0xFFFF_FFFF_FFFF_FFFF


class Byte(_Bounded):
    """A signed integer of 8 bits (§1.6.7)."""

    __slots__ = ()
    MIN = -0x80
    MAX = 0x7F


class Short(_Bounded):
    """A signed integer of 16 bits (§1.6.8)."""

    __slots__ = ()
    MIN = -0x8000
    MAX = 0x7FFF


class Int(_Bounded):
    """A signed integer of 32 bits (§1.6.9). A plain ``int`` is AMQP's 64-bit ``long``."""

    __slots__ = ()
    MIN = -0x8000_0000
    MAX = 0x7FFF_FFFF


class Timestamp(_Bounded):
    """A point in time: milliseconds since the start of 1970, UTC, signed (§1.6.17)."""

    __slots__ = ()
    MIN = -0x8000_0000_0000_0000
    MAX = 0x7FFF_FFFF_FFFF_FFFF

    @classmethod
    def from_datetime(cls, moment: dt.datetime) -> Self:
        """Return *moment*, which must have a time zone, in whole milliseconds, rounded down."""
        if moment.tzinfo is None:
            raise ValueError(f"{moment!r} has no time zone, so it is no point in time")
        return cls((moment - _EPOCH) // _MILLISECOND)

    @property
    def datetime(self) -> dt.datetime:
        """The same moment in UTC.

        Raises:
            OverflowError: The moment is outside the years 1 to 9999.
        """
        return _EPOCH + int(self) * _MILLISECOND


class Float32(float):
    """A floating point number of 32 bits, AMQP's ``float`` (§1.6.11). The value is rounded."""

    __slots__ = ()

    def __new__(cls, value: float = 0.0) -> Self:
        try:
            if isnan(value):
                return float.__new__(cls, value)  # struct would quieten it and lose its payload
            return float.__new__(cls, _F32.unpack(_F32.pack(value))[0])
        except OverflowError:
            raise ValueError(f"Float32 cannot hold {value!r}") from None

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Return the number with the IEEE 754 representation *bits*; a NaN keeps its payload."""
        if bits & 0x7F80_0000 == 0x7F80_0000 and bits & 0x007F_FFFF:
            # Widened by hand, since converting a signalling NaN makes it a quiet one.
            wide = (bits & 0x8000_0000) << 32 | 0x7FF << 52 | (bits & 0x007F_FFFF) << 29
            return float.__new__(cls, _F64.unpack(wide.to_bytes(8, "big"))[0])
        return float.__new__(cls, _F32.unpack(bits.to_bytes(4, "big"))[0])

    @property
    def bits(self) -> int:
        """The 32 bits of this number (IEEE 754 binary32)."""
        if not isnan(self):
            return int.from_bytes(_F32.pack(self), "big")
        wide = int.from_bytes(_F64.pack(self), "big")
        # A payload in the low bits alone does not fit; setting any bit keeps the value a NaN.
        payload = wide >> 29 & 0x007F_FFFF or 0x0040_0000
        return wide >> 32 & 0x8000_0000 | 0x7F80_0000 | payload

    def __repr__(self) -> str:
        return f"Float32({float.__repr__(self)})"

    __str__ = float.__repr__


_F32 = struct.Struct(">f")
_F64 = struct.Struct(">d")


class _Decimal:
    """Decimal number kept as its octets (IEEE 754-2008); without arithmetic, so no bit is lost."""

    __slots__ = ("octets",)
    WIDTH: ClassVar[int]

    def __init__(self, octets: bytes) -> None:
        if len(octets) != self.WIDTH:
            raise ValueError(f"{type(self).__name__} takes {self.WIDTH} octets, not {len(octets)}")
        self.octets = bytes(octets)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.octets == other.octets

    def __hash__(self) -> int:
        return hash(self.octets)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bytes.fromhex({self.octets.hex()!r}))"


class Decimal32(_Decimal):
    """A decimal number of 32 bits (§1.6.13), kept as its octets."""

    __slots__ = ()
    WIDTH = 4


class Decimal64(_Decimal):
    """A decimal number of 64 bits (§1.6.14), kept as its octets."""

    __slots__ = ()
    WIDTH = 8


class Decimal128(_Decimal):
    """A decimal number of 128 bits (§1.6.15), kept as its octets."""

    __slots__ = ()
    WIDTH = 16


class Described(Struct, frozen=True):
    """A value with the descriptor that gives its meaning (§1.2.2). Both may be any value."""

    descriptor: object
    value: object

    def __repr__(self) -> str:
        return f"Described({self.descriptor!r}, {self.value!r})"


class Array:
    """Values of one AMQP type, under one constructor (§1.6.24).

    *of* is the Python class that stands for the element type, such as ``UInt``, ``Symbol``,
    ``bytes``, ``list`` or ``Array``. By default it is the class of the first item; an empty array
    needs it. Described elements share their descriptors, given outermost first in *descriptors*,
    while *items* are the values inside; ``Described`` items are split accordingly.

    Raises:
        ValueError: The element type is unknown, or the items' descriptors differ.
    """

    __slots__ = ("descriptors", "items", "of")

    def __init__(
        self,
        items: Iterable[object],
        of: type | None = None,
        descriptors: tuple[object, ...] = (),
    ) -> None:
        values = tuple(items)
        while of is None and values and type(values[0]) is Described:
            descriptor = values[0].descriptor
            inner = []
            for value in values:
                if (
                    type(value) is not Described
                    or type(value.descriptor) is not type(descriptor)
                    or value.descriptor != descriptor
                ):
                    raise ValueError(f"array items must all be described by {descriptor!r}")
                inner.append(value.value)
            values = tuple(inner)
            descriptors = (*descriptors, descriptor)
        if of is None:
            if not values:
                raise ValueError("an empty Array needs its element type: Array([], of=Symbol)")
            of = type(values[0])
        self.items = values
        self.of: type = STANDS_FOR.get(of, of)
        self.descriptors = descriptors

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[object]:
        return iter(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (
            self.of is other.of
            and self.items == other.items
            and self.descriptors == other.descriptors
        )

    def __hash__(self) -> int:
        return hash((self.of, self.items, self.descriptors))

    def __repr__(self) -> str:
        described = f", descriptors={self.descriptors!r}" if self.descriptors else ""
        return f"Array({list(self.items)!r}, of={self.of.__name__}{described})"


class Map:
    """A map as its ordered pairs, for keys that a ``dict`` cannot distinguish or hold (§1.6.23).

    Examples are ``True``, ``1`` and ``UInt(1)``, a symbol and a string of the same text, or a list.
    A look-up prefers the key of the same type and otherwise uses an equal one.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[object, object]] = ()) -> None:
        self.pairs = tuple((key, value) for key, value in pairs)

    def keys(self) -> list[object]:
        return [key for key, _ in self.pairs]

    def values(self) -> list[object]:
        return [value for _, value in self.pairs]

    def items(self) -> list[tuple[object, object]]:
        return list(self.pairs)

    def get(self, key: object, default: object = None) -> object:
        equal = [pair for pair in self.pairs if pair[0] == key]
        for found, value in equal:
            if type(found) is type(key):
                return value
        return equal[0][1] if equal else default

    def __getitem__(self, key: object) -> object:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[object]:
        return iter(self.keys())

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same keys, types included, with equal values, in any order."""
        if not isinstance(other, Map | dict):
            return NotImplemented
        ours = [(type(key), key, value) for key, value in self.items()]
        theirs = [(type(key), key, value) for key, value in other.items()]
        return len(ours) == len(theirs) and all(entry in theirs for entry in ours)

    __hash__ = None  # type: ignore[assignment]  # as unhashable as the dict it stands for

    def __repr__(self) -> str:
        return f"Map({list(self.pairs)!r})"


_ABSENT = object()

#: Python classes that are sent as the AMQP type of another class.
STANDS_FOR: dict[type, type] = {
    tuple: list,
    Map: dict,
    bytearray: bytes,
    memoryview: bytes,
    dt.datetime: Timestamp,
}
