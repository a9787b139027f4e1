"""Bases of the layouts, and wire types of fields by the names of the specification.

A field that is absent is None, which is neither 0 nor empty: ``required`` in the specification does
not mean that clients send the field. A ``bit`` has no value beside its presence.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias
from uuid import UUID

from msgspec import Struct

from ..serials import RangeSet
from ..values import Array

Bit: TypeAlias = Annotated[bool, "bit"]
Uint8Field: TypeAlias = Annotated[int, "uint8"]
Uint16Field: TypeAlias = Annotated[int, "uint16"]
Uint32Field: TypeAlias = Annotated[int, "uint32"]
Uint64Field: TypeAlias = Annotated[int, "uint64"]
SequenceNoField: TypeAlias = Annotated[int, "sequence-no"]
#: Seconds since 1970-01-01 UTC, signed.
DatetimeField: TypeAlias = Annotated[int, "datetime"]
UuidField: TypeAlias = Annotated[UUID, "uuid"]
Str8Field: TypeAlias = Annotated[str, "str8"]
Str16Field: TypeAlias = Annotated[str, "str16"]
Vbin8Field: TypeAlias = Annotated[bytes, "vbin8"]
Vbin16Field: TypeAlias = Annotated[bytes, "vbin16"]
Vbin32Field: TypeAlias = Annotated[bytes, "vbin32"]
SequenceSetField: TypeAlias = Annotated[RangeSet, "sequence-set"]
#: Inclusive bounds in octets, ascending, disjoint.
ByteRangesField: TypeAlias = Annotated[list[tuple[int, int]], "byte-ranges"]
MapField: TypeAlias = Annotated[dict[str, object], "map"]
#: The domains str16-array and amqp-host-array: arrays of texts, whatever their width was.
Str16ArrayField: TypeAlias = Annotated[list[str], "str16-array"]
#: Array of any type. That of ``command-fragment`` has no defined encoding, since the struct has no
#: type code: its octets are kept and not interpreted.
ArrayField: TypeAlias = Annotated[Array, "array"]
#: A :class:`Composite` with a code, or an :class:`~amqp_rt_amqp010.values.UnknownStruct`.
Struct32Field: TypeAlias = Annotated[object, "struct32"]


class Composite(Struct, kw_only=True):
    """Struct of the specification. Instances are cached and shared: modify none that was received."""

    NAME: ClassVar[str]
    #: Class code and struct code, as on the wire; 0 for a struct that never states its code.
    CODE: ClassVar[int] = 0
    #: Octets of the size before the struct.
    SIZE: ClassVar[int] = 4
    #: Octets of packing flags.
    PACK: ClassVar[int] = 2


class Operation(Composite, kw_only=True):
    """Base of controls and commands, which fill the first segment of an assembly."""

    SIZE = 0
    #: Whether the specification lets a server, or a client, handle it.
    TO_SERVER: ClassVar[bool] = True
    TO_CLIENT: ClassVar[bool] = True
    #: Names of the operations that answer it; empty if it has no answer.
    ANSWERS: ClassVar[tuple[str, ...]] = ()


class Control(Operation, kw_only=True):
    """Content of a control segment."""


class Command(Operation, kw_only=True):
    """Content of a command segment, without the session header between its code and its flags."""

    #: Struct of its ``execution.result``; None if it has no result.
    RESULT: ClassVar[type[Composite] | None] = None
    #: Structs that its header segment may have as entries; empty if neither a header nor a body follows.
    CONTENT: ClassVar[tuple[type[Composite], ...]] = ()
    #: Whether the header segment must be present.
    HEADER_REQUIRED: ClassVar[bool] = False
