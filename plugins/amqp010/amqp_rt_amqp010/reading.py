"""Values and structs from octets.

Sizes and counts from the peer are checked against the octets present before anything is read.
"""

from __future__ import annotations

from uuid import UUID

from amqp_rt.fronts import Char

from .layouts import CODED, Composite, ErrorCode
from .limits import ELEMENTS_MAX, NESTING_MAX
from .plans import PLANS, Field
from .serials import MASK, RangeSet
from .type_codes import (
    ARRAY,
    BINARIES,
    BIT,
    BYTE_RANGES,
    CHAR_UTF32,
    COMPOSITE,
    DEC32_LAYOUT,
    DEC64_LAYOUT,
    LIST,
    MAP,
    NUMBERS,
    RANGE32,
    RANGE64,
    RESERVED,
    SEQUENCE_SET,
    STR8,
    STR16,
    STR16_ARRAY,
    STRUCT32,
    TEXTS,
    U32,
    UUID_CODE,
    VBIN8,
    VBIN16,
    VBIN32,
    VOID,
    WIDTHS,
)
from .values import Array, Dec32, Dec64, Opaque, UnknownStruct


class DecodeFault(Exception):
    """Octets that are no value of their type, or exceed a limit."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.COMMAND_INVALID) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class Reader:
    """Reader of values and structs from the octets of one segment.

    Args:
        data: The octets.
        start: Position of the first one to read.
        end: Position behind the last one; None for all.
    """

    __slots__ = ("_data", "_depth", "_elements", "at", "end", "field_index")

    def __init__(self, data: bytes, start: int = 0, end: int | None = None) -> None:
        self._data = data
        self.at = start
        self.end = len(data) if end is None else end
        self._elements = 0
        self._depth = 0
        #: Position of the field of the outermost struct that is being read; -1 for none.
        self.field_index = -1

    def octets(self, count: int) -> bytes:
        start = self._pass(count)
        return self._data[start : self.at]

    def uint8(self) -> int:
        return self._data[self._pass(1)]

    def uint16(self) -> int:
        start = self._pass(2)
        return self._data[start] << 8 | self._data[start + 1]

    def uint32(self) -> int:
        value: int = U32.unpack_from(self._data, self._pass(4))[0]
        return value

    def _pass(self, count: int) -> int:
        """Move behind *count* octets; return the position of the first one."""
        start = self.at
        stop = start + count
        if stop > self.end:
            raise DecodeFault(f"a value needs {count} octets, and {self.end - start} are there")
        self.at = stop
        return start

    def sized(self, width: int) -> bytes:
        """Read octets after their size, which has *width* octets."""
        if width == 1:
            return self.octets(self.uint8())
        if width == 2:
            return self.octets(self.uint16())
        return self.octets(self.uint32())

    def utf8(self, octets: bytes) -> str:
        try:
            return octets.decode()
        except UnicodeDecodeError:
            raise DecodeFault(f"a text is not UTF-8: {octets[:40]!r}") from None

    def _text(self, octets: bytes, codec: str) -> str:
        try:
            return octets.decode(codec)
        except UnicodeDecodeError:
            raise DecodeFault(f"a text is not {codec.upper()}: {octets[:40]!r}") from None

    def _enter(self, least: int) -> int:
        """Read the size of a nested value; return where it ends, and end there until ``_leave``."""
        size = self.uint32()
        if size > self.end - self.at:
            raise DecodeFault(f"a value of {size} octets, and {self.end - self.at} are there")
        if 0 < size < least:
            raise DecodeFault(f"a value of {size} octets needs {least} at least")
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise DecodeFault(
                f"values are nested more than {NESTING_MAX} deep", ErrorCode.RESOURCE_LIMIT_EXCEEDED
            )
        outer = self.end
        self.end = self.at + size
        return outer

    def _leave(self, outer: int) -> None:
        if self.at != self.end:
            raise DecodeFault(f"a value has {self.end - self.at} octets after its last part")
        self.end = outer
        self._depth -= 1

    def _count(self, least: int) -> int:
        """Read a number of values, each of which has *least* octets."""
        count = self.uint32()
        if count * least > self.end - self.at:
            raise DecodeFault(f"{count} values do not fit into {self.end - self.at} octets")
        self._elements += count
        if self._elements > ELEMENTS_MAX:
            raise DecodeFault(
                f"there are more than {ELEMENTS_MAX} values", ErrorCode.RESOURCE_LIMIT_EXCEEDED
            )
        return count

    def map_value(self) -> dict[str, object]:
        """Read a map; a size of 0 without a count is an empty one, as Qpid writes it."""
        outer = self._enter(4)
        found: dict[str, object] = {}
        if self.at < self.end:
            for _ in range(self._count(2)):
                name = self.utf8(self.sized(1))
                if name in found:
                    raise DecodeFault(f"a map has the key {name!r:.80} twice")
                found[name] = self.value()
        self._leave(outer)
        return found

    def list_value(self) -> list[object]:
        """Read a list; a size of 0 without a count is an empty one."""
        outer = self._enter(4)
        found: list[object] = []
        if self.at < self.end:
            found = [self.value() for _ in range(self._count(1))]
        self._leave(outer)
        return found

    def array_value(self) -> Array:
        """Read an array; a size of 0 without type and count is an empty one."""
        outer = self._enter(5)
        code = VOID
        items: list[object] = []
        if self.at < self.end:
            code = self.uint8()
            width = WIDTHS[code >> 4]
            items = [self.typed(code) for _ in range(self._count(abs(width)))]
        self._leave(outer)
        return Array(code, items)

    def value(self) -> object:
        """Read a value, which its type code precedes."""
        return self.typed(self.uint8())

    def typed(self, code: int) -> object:
        """Read a value of the type with *code*."""
        if code == STR16:
            return self.utf8(self.octets(self.uint16()))
        number = NUMBERS.get(code)
        if number is not None:
            layout, make = number
            return make(layout.unpack_from(self._data, self._pass(layout.size))[0])
        width = WIDTHS[code >> 4]
        texts = TEXTS.get(code)
        if texts is not None:
            codec, wrap = texts
            return wrap(self._text(self.octets(1) if width > 0 else self.sized(-width), codec))
        binary = BINARIES.get(code)
        if binary is not None:
            return binary(self.octets(width) if width > 0 else self.sized(-width))
        if code == VOID:
            return None
        if code == MAP:
            return self.map_value()
        if code == LIST:
            return self.list_value()
        if code == ARRAY:
            return self.array_value()
        if code == STRUCT32:
            return self.struct32()
        if code == UUID_CODE:
            return UUID(bytes=self.octets(16))
        if code == CHAR_UTF32:
            return Char(self._text(self.octets(4), "utf-32-be"))
        if code == 0xC8:
            exponent, mantissa = DEC32_LAYOUT.unpack(self.octets(5))
            return Dec32(exponent, mantissa)
        if code == 0xD8:
            exponent, mantissa = DEC64_LAYOUT.unpack(self.octets(9))
            return Dec64(exponent, mantissa)
        if width == RESERVED:
            raise DecodeFault(f"type {code:#04x} is reserved, and its width is not known")
        return Opaque(code, self.octets(width) if width >= 0 else self.sized(-width))

    def struct32(self) -> Composite | UnknownStruct:
        """Read a struct32, which states its code."""
        outer = self._enter(2)
        code = self.uint16()
        known = CODED.get(code)
        found: Composite | UnknownStruct
        if known is None:
            found = UnknownStruct(code, self.octets(self.end - self.at))
        else:
            found = self.fields(known)
        self._leave(outer)
        return found

    def composite(self, of: type[Composite]) -> Composite:
        """Read a struct whose type the field tells, with its size and code as far as it has these."""
        if of.SIZE == 4:
            found = self.struct32()
            if not isinstance(found, of):
                raise DecodeFault(f"there is a struct other than {of.NAME}")
            return found
        if of.SIZE == 0:
            return self.fields(of)
        size = int.from_bytes(self.octets(of.SIZE), "big")
        if size > self.end - self.at:
            raise DecodeFault(f"a struct of {size} octets, and {self.end - self.at} are there")
        outer = self.end
        self.end = self.at + size
        made = self.fields(of)
        if self.at != self.end:
            raise DecodeFault(f"{of.NAME} has octets after its last field")
        self.end = outer
        return made

    def fields(self, of: type[Composite], *, outermost: bool = False) -> Composite:
        """Read the packing flags and fields of *of*."""
        plan = PLANS[of]
        # The first octet has the flags of fields 0 to 7, from its lowest bit on.
        flags = int.from_bytes(self.octets(of.PACK), "little") if of.PACK else plan.flags
        if flags & ~plan.flags:
            raise DecodeFault(f"{of.NAME} has flags for fields that it has not: {flags:#06x}")
        values: dict[str, object] = {}
        for index, field in enumerate(plan.fields):
            if outermost:
                self.field_index = index
            if field.kind == BIT:
                values[field.name] = flags & field.bit != 0
            elif flags & field.bit:
                values[field.name] = self._field(field)
        if outermost:
            self.field_index = -1
        return of(**values)

    def _field(self, field: Field) -> object:
        kind = field.kind
        if kind == STR8:
            return self.utf8(self.sized(1))
        if kind == 0x02:
            return self.uint8()
        if kind == 0x12:
            return self.uint16()
        if kind == 0x22:
            return self.uint32()
        if kind == 0x32:
            return int.from_bytes(self.octets(8), "big")
        if kind == 0x38:
            return int.from_bytes(self.octets(8), "big", signed=True)
        if kind == SEQUENCE_SET:
            return self._sequence_set()
        if kind == BYTE_RANGES:
            return self._byte_ranges()
        if kind == STR16_ARRAY:
            return self._texts()
        if kind == COMPOSITE:
            assert field.composite is not None
            return self.composite(field.composite)
        if kind in (VBIN8, VBIN16, VBIN32):
            return self.sized(-WIDTHS[kind >> 4])
        return self.typed(kind)

    def _sequence_set(self) -> RangeSet:
        octets = self.sized(2)
        if len(octets) % 8:
            raise DecodeFault(f"a sequence-set of {len(octets)} octets has no whole ranges")
        found = RangeSet()
        for first, last in RANGE32.iter_unpack(octets):
            if (last - first) & MASK >= 1 << 31:
                raise DecodeFault(f"the range {first} to {last} of a sequence-set is inverted")
            found.add(first, last)
        return found

    def _byte_ranges(self) -> list[tuple[int, int]]:
        octets = self.sized(2)
        if len(octets) % 16:
            raise DecodeFault(f"byte-ranges of {len(octets)} octets have no whole ranges")
        found: list[tuple[int, int]] = []
        after = -1
        for first, last in RANGE64.iter_unpack(octets):
            if first <= after or last < first:
                raise DecodeFault(f"byte-ranges have {first} to {last} out of order")
            after = last + 1
            found.append((first, last))
        return found

    def _texts(self) -> list[str]:
        found: list[str] = []
        for each in self.array_value().items:
            if isinstance(each, bytes):
                found.append(self.utf8(each))
            elif isinstance(each, str):
                found.append(str(each))
            else:
                raise DecodeFault(f"an array has {each!r:.80} where there should be a text")
        return found
