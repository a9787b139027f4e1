"""Values, structs, controls and commands, to and from octets.

Sizes and counts from the peer are checked against the octets present before anything is read. Faults
of a control are faults of its connection, those of a command end its session.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from struct import Struct as Layout
from typing import Final, cast, get_args, get_type_hints
from uuid import UUID

from amqp_rt.fronts import Byte, Char, Float32, Int, Short, UByte, UInt, ULong, UShort

from .faults import CommandFault, ConnectionFault
from .layouts import CODED, COMMANDS, CONTROLS, STRUCTS, Command, Composite, Control, ErrorCode
from .limits import ELEMENTS_MAX, NESTING_MAX
from .serials import MASK, RangeSet
from .values import (
    BIN_CODES,
    Array,
    Bin,
    Datetime,
    Dec32,
    Dec64,
    LatinChar,
    Opaque,
    Str8,
    Str8Latin,
    Str8Utf16,
    Str16Latin,
    Str16Utf16,
    UnknownStruct,
    Vbin8,
    Vbin32,
)

_STR8: Final = 0x85
_STR16: Final = 0x95
_VBIN8: Final = 0x80
_VBIN16: Final = 0x90
_VBIN32: Final = 0xA0
_UUID: Final = 0x48
_CHAR: Final = 0x04
_CHAR_UTF32: Final = 0x27
_MAP: Final = 0xA8
_LIST: Final = 0xA9
_ARRAY: Final = 0xAA
_STRUCT32: Final = 0xAB
_VOID: Final = 0xF0
# Types without a code, which occur as fields only.
_BIT: Final = 0x100
_SEQUENCE_SET: Final = 0x101
_BYTE_RANGES: Final = 0x102
_STR16_ARRAY: Final = 0x103
_COMPOSITE: Final = 0x104

_U8: Final = Layout(">B")
_U16: Final = Layout(">H")
_U32: Final = Layout(">I")
_U64: Final = Layout(">Q")
_I64: Final = Layout(">q")
_F64: Final = Layout(">d")
_DEC32: Final = Layout(">Bi")
_DEC64: Final = Layout(">Bq")
_RANGE32: Final = Layout(">II")
_RANGE64: Final = Layout(">QQ")
#: Most octets of a text or binary whose size has two octets.
_SIZE16_MAX: Final = 0xFFFF
#: High half of a type code → octets of its fixed width, -1 to -4 for the octets of a size before the
#: value, -5 for reserved halves, whose values cannot be skipped.
_WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128, -1, -2, -4, -5, 5, 9, -5, 0)
_RESERVED: Final = -5


class DecodeFault(Exception):
    """Octets that are no value of their type, or exceed a limit."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.COMMAND_INVALID) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def _bool(value: int) -> object:
    return value != 0


def _plain(value: object) -> object:
    return value


#: Type code → layout of a number, and the function that makes the value.
_NUMBERS: Final[dict[int, tuple[Layout, Callable[[int], object]]]] = {
    0x01: (Layout(">b"), Byte),
    0x02: (_U8, UByte),
    0x08: (_U8, _bool),
    0x11: (Layout(">h"), Short),
    0x12: (_U16, UShort),
    0x21: (Layout(">i"), Int),
    0x22: (_U32, UInt),
    0x23: (_U32, Float32.from_bits),
    0x31: (_I64, _plain),
    0x32: (_U64, ULong),
    0x33: (_F64, _plain),
    0x38: (_I64, Datetime),
}
#: Type code → codec of its characters, and the class of its values.
_TEXTS: Final[dict[int, tuple[str, Callable[[str], object]]]] = {
    _CHAR: ("iso-8859-15", LatinChar),
    0x84: ("iso-8859-15", Str8Latin),
    _STR8: ("utf-8", Str8),
    0x86: ("utf-16-be", Str8Utf16),
    0x94: ("iso-8859-15", Str16Latin),
    _STR16: ("utf-8", _plain),
    0x96: ("utf-16-be", Str16Utf16),
}
#: Type code → class of its octets.
_BINARIES: Final[dict[int, Callable[[bytes], object]]] = {
    **dict.fromkeys(BIN_CODES.values(), Bin),
    _VBIN8: Vbin8,
    _VBIN16: _plain,
    _VBIN32: Vbin32,
}
#: Class of a value → type code, where the class alone tells.
_CODES: Final[dict[type, int]] = {
    type(None): _VOID,
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
    Char: _CHAR_UTF32,
    UUID: _UUID,
    LatinChar: _CHAR,
    Dec32: 0xC8,
    Dec64: 0xD8,
    Str8Latin: 0x84,
    Str8: _STR8,
    Str8Utf16: 0x86,
    Str16Latin: 0x94,
    Str16Utf16: 0x96,
    str: _STR16,
    Vbin8: _VBIN8,
    Vbin32: _VBIN32,
    dict: _MAP,
    list: _LIST,
    tuple: _LIST,
    Array: _ARRAY,
    UnknownStruct: _STRUCT32,
}


class Field:
    """Field of a struct, as the codec needs it."""

    __slots__ = ("bit", "composite", "kind", "name")

    def __init__(self, name: str, bit: int, kind: int, composite: type[Composite] | None) -> None:
        self.name = name
        #: Packing flag of the field, as a number with that bit alone.
        self.bit = bit
        self.kind = kind
        self.composite = composite


class Plan:
    """Fields of a struct in their order, and the packing flags that it defines."""

    __slots__ = ("fields", "flags")

    def __init__(self, fields: list[Field]) -> None:
        self.fields = fields
        self.flags = (1 << len(fields)) - 1


#: Wire type of a field → its kind: a type code, or one of those above 255.
_KINDS: Final[dict[str, int]] = {
    "bit": _BIT,
    "uint8": 0x02,
    "uint16": 0x12,
    "uint32": 0x22,
    "uint64": 0x32,
    "sequence-no": 0x22,
    "datetime": 0x38,
    "uuid": _UUID,
    "str8": _STR8,
    "str16": _STR16,
    "vbin8": _VBIN8,
    "vbin16": _VBIN16,
    "vbin32": _VBIN32,
    "map": _MAP,
    "array": _ARRAY,
    "sequence-set": _SEQUENCE_SET,
    "byte-ranges": _BYTE_RANGES,
    "struct32": _STRUCT32,
    "str16-array": _STR16_ARRAY,
}


def wire_fields(of: type[Composite]) -> list[tuple[str, str, type[Composite] | None]]:
    """Return the fields of *of* in order: name, wire type, and the struct where the type is one."""
    hints = get_type_hints(of, include_extras=True)
    found: list[tuple[str, str, type[Composite] | None]] = []
    for name in of.__struct_fields__:
        # A field is ``X | None`` unless it is a bit; X has the wire type, or is a struct.
        parts = [hints[name], *get_args(hints[name])]
        kinds = [part.__metadata__[0] for part in parts if hasattr(part, "__metadata__")]
        if kinds:
            found.append((name, kinds[0], None))
        else:
            made = cast("type[Composite]", parts[1])
            found.append((name, made.NAME.partition(".")[2], made))
    return found


def _plan(of: type[Composite]) -> Plan:
    return Plan(
        [
            Field(name, 1 << index, _COMPOSITE if made is not None else _KINDS[kind], made)
            for index, (name, kind, made) in enumerate(wire_fields(of))
        ]
    )


_PLANS: Final[dict[type[Composite], Plan]] = {
    each: _plan(each) for each in (*CONTROLS.values(), *COMMANDS.values(), *STRUCTS)
}


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
        start = self.at
        stop = start + count
        if stop > self.end:
            raise DecodeFault(f"a value needs {count} octets, and {self.end - start} are there")
        self.at = stop
        return self._data[start:stop]

    def uint8(self) -> int:
        return self.octets(1)[0]

    def uint16(self) -> int:
        value: int = _U16.unpack(self.octets(2))[0]
        return value

    def uint32(self) -> int:
        value: int = _U32.unpack(self.octets(4))[0]
        return value

    def sized(self, width: int) -> bytes:
        """Read octets after their size, which has *width* octets."""
        return self.octets(int.from_bytes(self.octets(width), "big"))

    def text(self, octets: bytes, codec: str) -> str:
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
                name = self.text(self.sized(1), "utf-8")
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
        code = _VOID
        items: list[object] = []
        if self.at < self.end:
            code = self.uint8()
            width = _WIDTHS[code >> 4]
            items = [self.typed(code) for _ in range(self._count(abs(width)))]
        self._leave(outer)
        return Array(code, items)

    def value(self) -> object:
        """Read a value, which its type code precedes."""
        return self.typed(self.uint8())

    def typed(self, code: int) -> object:
        """Read a value of the type with *code*."""
        number = _NUMBERS.get(code)
        if number is not None:
            layout, make = number
            return make(layout.unpack(self.octets(layout.size))[0])
        width = _WIDTHS[code >> 4]
        texts = _TEXTS.get(code)
        if texts is not None:
            codec, wrap = texts
            return wrap(self.text(self.octets(1) if width > 0 else self.sized(-width), codec))
        binary = _BINARIES.get(code)
        if binary is not None:
            return binary(self.octets(width) if width > 0 else self.sized(-width))
        if code == _VOID:
            return None
        if code == _MAP:
            return self.map_value()
        if code == _LIST:
            return self.list_value()
        if code == _ARRAY:
            return self.array_value()
        if code == _STRUCT32:
            return self.struct32()
        if code == _UUID:
            return UUID(bytes=self.octets(16))
        if code == _CHAR_UTF32:
            return Char(self.text(self.octets(4), "utf-32-be"))
        if code == 0xC8:
            exponent, mantissa = _DEC32.unpack(self.octets(5))
            return Dec32(exponent, mantissa)
        if code == 0xD8:
            exponent, mantissa = _DEC64.unpack(self.octets(9))
            return Dec64(exponent, mantissa)
        if width == _RESERVED:
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
        plan = _PLANS[of]
        # The first octet has the flags of fields 0 to 7, from its lowest bit on.
        flags = int.from_bytes(self.octets(of.PACK), "little") if of.PACK else plan.flags
        if flags & ~plan.flags:
            raise DecodeFault(f"{of.NAME} has flags for fields that it has not: {flags:#06x}")
        values: dict[str, object] = {}
        for index, field in enumerate(plan.fields):
            if outermost:
                self.field_index = index
            if field.kind == _BIT:
                values[field.name] = flags & field.bit != 0
            elif flags & field.bit:
                values[field.name] = self._field(field)
        if outermost:
            self.field_index = -1
        return of(**values)

    def _field(self, field: Field) -> object:
        kind = field.kind
        if kind == _STR8:
            return self.text(self.sized(1), "utf-8")
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
        if kind == _SEQUENCE_SET:
            return self._sequence_set()
        if kind == _BYTE_RANGES:
            return self._byte_ranges()
        if kind == _STR16_ARRAY:
            return self._texts()
        if kind == _COMPOSITE:
            assert field.composite is not None
            return self.composite(field.composite)
        if kind in (_VBIN8, _VBIN16, _VBIN32):
            return self.sized(-_WIDTHS[kind >> 4])
        return self.typed(kind)

    def _sequence_set(self) -> RangeSet:
        octets = self.sized(2)
        if len(octets) % 8:
            raise DecodeFault(f"a sequence-set of {len(octets)} octets has no whole ranges")
        found = RangeSet()
        for first, last in _RANGE32.iter_unpack(octets):
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
        for first, last in _RANGE64.iter_unpack(octets):
            if first <= after or last < first:
                raise DecodeFault(f"byte-ranges have {first} to {last} out of order")
            after = last + 1
            found.append((first, last))
        return found

    def _texts(self) -> list[str]:
        found: list[str] = []
        for each in self.array_value().items:
            if isinstance(each, bytes):
                found.append(self.text(each, "utf-8"))
            elif isinstance(each, str):
                found.append(str(each))
            else:
                raise DecodeFault(f"an array has {each!r:.80} where there should be a text")
        return found


# --- controls, commands and entries ------------------------------------------------------------------


def read_control(octets: bytes) -> Control:
    """Decode a control segment.

    Raises:
        ConnectionFault: It is malformed, or there is no such control.
    """
    reader = Reader(octets)
    try:
        code = reader.uint16()
        known = CONTROLS.get(code)
        if known is None:
            raise DecodeFault(f"there is no control {code & 0xFF} in class {code >> 8}")
        found = reader.fields(known)
        if reader.at != reader.end:
            raise DecodeFault(f"{known.NAME} has octets after its last field")
    except DecodeFault as fault:
        raise ConnectionFault(fault.text) from None
    assert isinstance(found, Control)
    return found


def read_command(octets: bytes) -> tuple[Command, bool]:
    """Decode a command segment; return the command, and whether its ``sync`` flag is set.

    Raises:
        CommandFault: It is malformed (503), too deep or too large (506), or there is no such command
            (540).
    """
    reader = Reader(octets)
    code = -1
    try:
        code = reader.uint16()
        known = COMMANDS.get(code)
        if known is None:
            raise DecodeFault(
                f"there is no command {code & 0xFF} in class {code >> 8}", ErrorCode.NOT_IMPLEMENTED
            )
        header = reader.sized(1)
        if len(header) != 1 or header[0] & 0xFE:
            raise DecodeFault(f"{known.NAME} has a malformed session header: {header[:8]!r}")
        found = reader.fields(known, outermost=True)
        if reader.at != reader.end:
            raise DecodeFault(f"{known.NAME} has octets after its last field")
    except DecodeFault as fault:
        raise CommandFault(
            fault.text,
            fault.code,
            class_code=code >> 8 if code >= 0 else None,
            command_code=code & 0xFF if code >= 0 else None,
            field_index=reader.field_index if reader.field_index >= 0 else None,
        ) from None
    assert isinstance(found, Command)
    return found, header[0] == 1


def split_entries(octets: bytes, command: int) -> list[tuple[int, bytes]]:
    """Split a header segment into the codes of its structs and their octets, with size and code.

    Args:
        octets: The segment.
        command: Class and command code of the command whose header it is, for faults.

    Raises:
        CommandFault: It is malformed, or has a struct twice.
    """
    reader = Reader(octets)
    found: list[tuple[int, bytes]] = []
    known: set[int] = set()
    try:
        while reader.at < reader.end:
            start = reader.at
            inner = reader.sized(4)
            if len(inner) < 2:
                raise DecodeFault("an entry of a header has no code")
            code = inner[0] << 8 | inner[1]
            if code in known:
                raise DecodeFault(f"a header has struct {code:#06x} twice")
            if len(known) == ELEMENTS_MAX:
                raise DecodeFault(
                    f"a header has more than {ELEMENTS_MAX} structs",
                    ErrorCode.RESOURCE_LIMIT_EXCEEDED,
                )
            known.add(code)
            found.append((code, octets[start : reader.at]))
    except DecodeFault as fault:
        raise _entry_fault(fault, command) from None
    return found


def read_entries(octets: bytes, command: int) -> list[Composite | UnknownStruct]:
    """Decode the structs of a header segment; unknown ones are kept as octets, to be passed on.

    Raises:
        CommandFault: As of :func:`split_entries`.
    """
    reader = Reader(octets)
    try:
        return [reader.struct32() for _ in split_entries(octets, command)]
    except DecodeFault as fault:
        raise _entry_fault(fault, command) from None


def _entry_fault(fault: DecodeFault, command: int) -> CommandFault:
    return CommandFault(
        fault.text, fault.code, class_code=command >> 8, command_code=command & 0xFF
    )


def write_control(control: Control) -> bytes:
    """Encode the segment of *control*.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray(_U16.pack(control.CODE))
    _put_fields(out, control)
    return bytes(out)


def write_command(command: Command, *, sync: bool = False) -> bytes:
    """Encode the segment of *command*; *sync* asks for its completion at once.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray(_U16.pack(command.CODE))
    out += b"\x01\x01" if sync else b"\x01\x00"
    _put_fields(out, command)
    return bytes(out)


def write_entries(entries: Iterable[Composite | UnknownStruct]) -> bytes:
    """Encode the structs of a header segment.

    Raises:
        ValueError: A field does not fit its wire type, or a struct is no struct32.
    """
    out = bytearray()
    for each in entries:
        _put_typed(out, _STRUCT32, each)
    return bytes(out)


# --- values ------------------------------------------------------------------------------------------


def read_value(octets: bytes) -> object:
    """Decode one value after its type code.

    Raises:
        DecodeFault: It is malformed, or octets follow it.
    """
    reader = Reader(octets)
    found = reader.value()
    if reader.at != reader.end:
        raise DecodeFault(f"{reader.end - reader.at} octets follow a value")
    return found


def write_value(value: object) -> bytes:
    """Encode *value* after its type code.

    Raises:
        ValueError: No type fits.
    """
    out = bytearray()
    _put_value(out, value)
    return bytes(out)


def read_struct(octets: bytes, of: type[Composite]) -> Composite:
    """Decode a struct of type *of*, with its size and code as far as it has these.

    Raises:
        DecodeFault: It is malformed, or octets follow it.
    """
    reader = Reader(octets)
    found = reader.composite(of)
    if reader.at != reader.end:
        raise DecodeFault(f"{reader.end - reader.at} octets follow {of.NAME}")
    return found


def write_struct(value: Composite) -> bytes:
    """Encode *value* with its size and code, as far as it has these.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray()
    _put_struct(out, value)
    return bytes(out)


def _code_of(value: object) -> int:
    """Return the type code for *value*.

    Raises:
        ValueError: No type fits.
    """
    code = _CODES.get(type(value))
    if code is not None:
        return code
    if isinstance(value, Bin):
        return BIN_CODES[len(value)]
    if isinstance(value, int):
        return 0x31 if value < 1 << 63 else 0x32
    if isinstance(value, bytes):
        return _VBIN16 if len(value) <= _SIZE16_MAX else _VBIN32
    if isinstance(value, str):
        return _STR16
    if isinstance(value, float):
        return 0x33
    if isinstance(value, Composite):
        return _STRUCT32
    if isinstance(value, Opaque):
        return value.code
    if isinstance(value, Mapping):
        return _MAP
    raise ValueError(f"AMQP 0-10 has no type for {value!r:.80}")


def _put_value(out: bytearray, value: object) -> None:
    code = _code_of(value)
    out.append(code)
    _put_typed(out, code, value)


def _put_typed(out: bytearray, code: int, value: object) -> None:
    """Append *value* in the type with *code*, without the code."""
    number = _NUMBERS.get(code)
    if number is not None:
        if isinstance(value, Float32):
            value = value.bits
        elif code == 0x23:
            raise ValueError(f"{value!r:.80} is no Float32")
        try:
            out += number[0].pack(value)
        except struct.error:
            raise ValueError(f"{value!r:.80} does not fit type {code:#04x}") from None
        return
    width = _WIDTHS[code >> 4]
    texts = _TEXTS.get(code)
    if texts is not None or code == _CHAR_UTF32:
        if not isinstance(value, str):
            raise ValueError(f"{value!r:.80} is no text")
        _put_octets(out, value.encode(texts[0] if texts is not None else "utf-32-be"), width)
    elif isinstance(value, bytes) and code in _BINARIES:
        _put_octets(out, value, width)
    elif isinstance(value, Opaque) and value.code == code and width != _RESERVED:
        _put_octets(out, value.octets, width)
    elif isinstance(value, UUID) and code == _UUID:
        out += value.bytes
    elif isinstance(value, Dec32) and code == 0xC8:
        _put_decimal(out, _DEC32, value.exponent, value.mantissa)
    elif isinstance(value, Dec64) and code == 0xD8:
        _put_decimal(out, _DEC64, value.exponent, value.mantissa)
    elif value is None and code == _VOID:
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
        raise ValueError(f"{octets!r:.40} … has {size} octets, at most {(1 << 8 * -width) - 1} fit")
    else:
        out += size.to_bytes(-width, "big")
    out += octets


def _put_nested(out: bytearray, code: int, value: object) -> None:
    """Append a value that holds others."""
    start = len(out)
    out += b"\0\0\0\0"
    if code == _MAP and isinstance(value, Mapping):
        out += _U32.pack(len(value))
        for name, each in value.items():
            _put_octets(out, name.encode(), -1)
            _put_value(out, each)
    elif code == _LIST and isinstance(value, list | tuple):
        out += _U32.pack(len(value))
        for each in value:
            _put_value(out, each)
    elif code == _ARRAY and isinstance(value, Array):
        out.append(value.code)
        out += _U32.pack(len(value.items))
        for each in value.items:
            _put_typed(out, value.code, each)
    elif code == _STRUCT32 and isinstance(value, UnknownStruct):
        out += _U16.pack(value.code)
        out += value.octets
    elif code == _STRUCT32 and isinstance(value, Composite) and value.CODE and value.SIZE == 4:
        out += _U16.pack(value.CODE)
        _put_fields(out, value)
    else:
        raise ValueError(f"{value!r:.80} does not fit type {code:#04x}")
    out[start : start + 4] = _U32.pack(len(out) - start - 4)


def _put_struct(out: bytearray, value: Composite) -> None:
    if value.SIZE == 4:
        _put_nested(out, _STRUCT32, value)
        return
    inner = bytearray()
    _put_fields(inner, value)
    if value.SIZE:
        _put_octets(out, bytes(inner), -value.SIZE)
    else:
        out += inner


def _put_fields(out: bytearray, value: Composite) -> None:
    """Append packing flags and fields."""
    plan = _PLANS[type(value)]
    start = len(out)
    flags = 0
    if value.PACK:
        out += bytes(value.PACK)
    for field in plan.fields:
        held = getattr(value, field.name)
        if field.kind == _BIT:
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
    if kind == _SEQUENCE_SET:
        assert isinstance(value, RangeSet)
        _put_octets(out, b"".join(_RANGE32.pack(*each) for each in value.ranges()), -2)
    elif kind == _BYTE_RANGES:
        assert isinstance(value, list)
        _put_octets(out, b"".join(_RANGE64.pack(*each) for each in value), -2)
    elif kind == _STR16_ARRAY:
        assert isinstance(value, list)
        _put_nested(out, _ARRAY, Array(_STR16, value))
    elif kind == _COMPOSITE:
        assert isinstance(value, Composite)
        _put_struct(out, value)
    else:
        _put_typed(out, kind, value)
