"""Fields of each struct as reading and writing need them, from the layouts."""

from __future__ import annotations

from typing import Final, cast, get_args, get_type_hints

from .layouts import Composite
from .type_codes import (
    ARRAY,
    BIT,
    BYTE_RANGES,
    COMPOSITE,
    MAP,
    SEQUENCE_SET,
    STR8,
    STR16,
    STR16_ARRAY,
    STRUCT32,
    UUID_CODE,
    VBIN8,
    VBIN16,
    VBIN32,
)


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
KINDS: Final[dict[str, int]] = {
    "bit": BIT,
    "uint8": 0x02,
    "uint16": 0x12,
    "uint32": 0x22,
    "uint64": 0x32,
    "sequence-no": 0x22,
    "datetime": 0x38,
    "uuid": UUID_CODE,
    "str8": STR8,
    "str16": STR16,
    "vbin8": VBIN8,
    "vbin16": VBIN16,
    "vbin32": VBIN32,
    "map": MAP,
    "array": ARRAY,
    "sequence-set": SEQUENCE_SET,
    "byte-ranges": BYTE_RANGES,
    "struct32": STRUCT32,
    "str16-array": STR16_ARRAY,
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
            Field(name, 1 << index, COMPOSITE if made is not None else KINDS[kind], made)
            for index, (name, kind, made) in enumerate(wire_fields(of))
        ]
    )


class _Plans(dict[type[Composite], Plan]):
    """Plans by class, each made at its first use: all of them are much of the work of an import."""

    def __missing__(self, of: type[Composite]) -> Plan:
        plan = self[of] = _plan(of)
        return plan


PLANS: Final = _Plans()
