"""Composite types: a list of fields is compiled to an encoder and a decoder (Part 1 §1.4).

::

    @composite(0x13, ("next_incoming_id", UINT), ("incoming_window", UINT, MANDATORY), ...)
    class Flow(Struct, gc=False):
        ...

The order of the fields is their order on the wire. A field that is null or omitted has its default
value, and a value equal to its default is written as null, so that trailing fields can be omitted.
Tables belong to their classes; there is no global registry.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import astuple

from ..errors import DecodeError, EncodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..values import Array, Map, Symbol, ULong
from .primitives import (
    Reader,
    close_compound,
    deeper,
    encode,
    open_compound,
    refused,
    shown,
    write_array,
    write_binary,
    write_boolean,
    write_byte,
    write_double,
    write_float,
    write_int,
    write_list,
    write_long,
    write_map,
    write_short,
    write_string,
    write_symbol,
    write_timestamp,
    write_ubyte,
    write_uint,
    write_ulong,
    write_ushort,
    write_uuid,
    write_value,
)

T = TypeVar("T")


class _Mandatory:
    def __repr__(self) -> str:
        return "MANDATORY"


#: Third item of a field that has no default and must not be null (§1.4.1).
MANDATORY: Final = _Mandatory()

_NULL: Final = b"\x40"

# Types that the decoder reads in place, without a call; all others are read by ``read``.
_CALL: Final = 0
_IN_PLACE_BOOLEAN: Final = 1
_IN_PLACE_UINT: Final = 2
_IN_PLACE_BINARY: Final = 3
_IN_PLACE_SYMBOL: Final = 4
_IN_PLACE_STRING: Final = 5
_IN_PLACE_ANY: Final = 6


class FieldType:
    """Reader and writer of one type of field. *name* is the type's name in the standard."""

    def __init__(
        self,
        name: str,
        read: Callable[[Reader], object],
        write: Callable[[bytearray, object], None] | None = None,
        *,
        nested: Callable[[bytearray, object, int], None] | None = None,
        in_place: int = _CALL,
        multiple: bool = False,
    ) -> None:
        self.name: str = name
        self.read: Callable[[Reader], object] = read
        self.write: Callable[[bytearray, object], None] | None = write
        self.nested: Callable[[bytearray, object, int], None] | None = nested
        self.in_place: int = in_place
        #: Whether the field may hold several values; null then means none.
        self.multiple: bool = multiple


class Field:
    """Field of a composite type: *name* in the spelling of the standard, *attribute* in ours."""

    def __init__(self, attribute: str, name: str, type_: FieldType, default: object) -> None:
        self.attribute: str = attribute
        self.name: str = name
        self.type: FieldType = type_
        self.mandatory: bool = default is MANDATORY
        self.default: object = default


class Composite:
    """Table of one composite class, compiled from its fields."""

    def __init__(
        self,
        cls: type,
        descriptor: int | str,
        symbol: str | None,
        fields: list[Field],
        as_map: bool,
    ) -> None:
        self.cls: type = cls
        self.name: str = _kebab(cls.__name__)
        self.code: int | None = descriptor if isinstance(descriptor, int) else None
        if isinstance(descriptor, str):
            self.symbol = Symbol(descriptor)
        else:
            self.symbol = Symbol(symbol or f"amqp:{self.name}:{'map' if as_map else 'list'}")
        self.fields: tuple[Field, ...] = tuple(fields)
        self.as_map: bool = as_map
        self.prefix: bytes = b"\x00" + encode(
            self.symbol if self.code is None else ULong(self.code)
        )
        self._reads: list[tuple[int, object, Callable[[Reader], object]]] = [
            (field.type.in_place, field.default, field.type.read) for field in fields
        ]
        self._writes: list[
            tuple[
                object,
                Callable[[bytearray, object], None] | None,
                Callable[[bytearray, object, int], None] | None,
            ]
        ] = [
            (None if field.mandatory else field.default, field.type.write, field.type.nested)
            for field in fields
        ]
        self._defaults: list[object] = [field.default for field in fields]
        self._attributes: list[str] = [field.attribute for field in fields]
        self._mandatory: list[int] = [i for i, field in enumerate(fields) if field.mandatory]
        self._by_position: bool = _takes_positions(cls, fields)
        self._get: Callable[[object], Any] | None = None
        if not issubclass(cls, Struct) and fields:
            self._get = operator.attrgetter(*self._attributes)

    # --- Reading ---

    def read(self, r: Reader) -> object:
        """Read the list or map after the descriptor."""
        values = self._read_map(r) if self.as_map else self._read_list(r)
        for index in self._mandatory:
            if values[index] is MANDATORY:
                raise DecodeError(f"{self.name}.{self.fields[index].name} is mandatory")
        if self._by_position:
            return self.cls(*values)
        return self.cls(**dict(zip(self._attributes, values, strict=True)))

    def _read_list(self, r: Reader) -> list[object]:
        values: list[object] = []
        data = r.data
        try:
            count, outer = r.enter_list()
        except DecodeError as error:
            raise DecodeError(f"{self.name}: {error.description}") from None
        try:
            at = r.at
            # Octets are read without a bounds check each time: reading past the end of the list, or
            # of the data, is detected below, and the distance is bounded by the number of declared
            # fields.
            for in_place, default, read in self._reads:
                if len(values) == count:
                    break
                code = data[at]
                if code == 0x40:
                    at += 1
                    values.append(default)
                elif in_place == _IN_PLACE_UINT and code == 0x52:
                    values.append(data[at + 1])
                    at += 2
                elif in_place == _IN_PLACE_UINT and code == 0x43:
                    values.append(0)
                    at += 1
                elif in_place == _IN_PLACE_BOOLEAN and code == 0x41:
                    values.append(True)
                    at += 1
                elif in_place == _IN_PLACE_BOOLEAN and code == 0x42:
                    values.append(False)
                    at += 1
                elif in_place == _IN_PLACE_BOOLEAN and code == 0x56 and data[at + 1] <= 1:
                    values.append(data[at + 1] == 1)
                    at += 2
                elif in_place == _IN_PLACE_BINARY and code == 0xA0:
                    begin = at + 2
                    at = begin + data[at + 1]
                    values.append(data[begin:at])
                elif code == 0xA1 and in_place >= _IN_PLACE_STRING:
                    begin = at + 2
                    at = begin + data[at + 1]
                    values.append(data[begin:at].decode("utf-8"))
                elif code == 0xA3 and in_place == _IN_PLACE_SYMBOL:
                    begin = at + 2
                    at = begin + data[at + 1]
                    values.append(Symbol(data[begin:at], "ascii"))
                else:
                    r.at = at
                    values.append(read(r))
                    at = r.at
            r.at = at
            surplus = count - len(values)
            if len(values) < len(self._defaults):
                values += self._defaults[len(values) :]
            while surplus > 0:
                r.skip_value()
                surplus -= 1
            r.leave(outer)
        except IndexError:
            raise self._bad(len(values), "the octets end inside it") from None
        except UnicodeDecodeError as error:
            raise self._bad(len(values), f"not {error.encoding}: {error.reason}") from None
        except DecodeError as error:
            raise self._bad(len(values), error.description) from None
        return values

    def _read_map(self, r: Reader) -> list[object]:
        values = list(self._defaults)
        names = [field.name for field in self.fields]
        found: set[str] = set()
        index = len(names)
        try:
            count, outer = r.enter_map()
            for _ in range(count // 2):
                index = len(names)
                key = r.read_value()
                if not isinstance(key, str) or key not in names:
                    r.skip_value()
                    continue
                if key in found:
                    raise DecodeError(f"the key {key!r} is there twice")
                found.add(key)
                index = names.index(key)
                if r.peek_code() == 0x40:
                    r.take(1)
                else:
                    values[index] = self.fields[index].type.read(r)
            index = len(names)
            r.leave(outer)
        except DecodeError as error:
            raise self._bad(index, error.description) from None
        return values

    def _bad(self, index: int, why: str) -> DecodeError:
        """Create the error for the field being read, or for data after the last field."""
        if index < len(self.fields):
            return DecodeError(f"{self.name}.{self.fields[index].name}: {why}")
        return DecodeError(f"{self.name}: {why}")

    # --- Writing ---

    def write(self, out: bytearray, value: object, depth: int = 0) -> None:
        """Append *value* with its descriptor."""
        depth = deeper(depth)
        items = self._items_of(value)
        for index in self._mandatory:
            item = items[index]
            if not item and (item is None or self.fields[index].type.multiple):
                raise EncodeError(f"{self.name}.{self.fields[index].name} is mandatory")
        out += self.prefix
        at = open_compound(out, 0xC1 if self.as_map else 0xC0)
        count = 0
        for index in range(len(self._writes)):
            item = items[index]
            if item is None:
                continue
            default, write, nested = self._writes[index]
            if default is not None and item == default:
                continue
            if self.as_map:
                write_symbol(out, self.fields[index].name)
                count += 2
            else:
                if count != index:
                    out += _NULL * (index - count)
                count = index + 1
            try:
                if write is not None:
                    write(out, item)
                elif nested is not None:
                    nested(out, item, depth)
            except EncodeError as error:
                raise EncodeError(
                    f"{self.name}.{self.fields[index].name}: {error.description}"
                ) from None
        if count == 0 and not self.as_map:
            del out[at:]
            out.append(0x45)
        else:
            close_compound(out, at, count)

    def _items_of(self, value: object) -> tuple[object, ...]:
        if self._get is not None:
            items = self._get(value)
            return (items,) if len(self.fields) == 1 else items
        if isinstance(value, Struct):
            return astuple(value)
        return ()


def composite(
    descriptor: int | str,
    *fields: tuple[str, FieldType] | tuple[str, FieldType, object],
    symbol: str | None = None,
    as_map: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Declare a class as a composite type, with fields ``(attribute, type[, default])``.

    *descriptor* is the number of the type, or its symbol if it has no number. The symbol of a
    numbered type is derived from the class name (``FooBar`` is ``amqp:foo-bar:list``) unless given.
    The default of a field is null; a field whose third item is ``MANDATORY`` has none.

    Classes may be msgspec Structs or dataclasses. With *as_map* the fields are encoded as a
    described map from their names, which msgspec's ``rename`` determines, to their values; unknown
    keys are ignored. Instances can be encoded wherever a value is expected.

    Raises:
        TypeError: The fields are not those of the class, in the same order, or a default differs.
    """

    def declare(cls: type[T]) -> type[T]:
        table = _compile(cls, descriptor, fields, symbol, as_map)
        owner: Any = cls
        owner.__composite__ = table
        owner.__amqp_write__ = table.write
        return cls

    return declare


def _compile(
    cls: type,
    descriptor: int | str,
    declared: tuple[tuple[Any, ...], ...],
    symbol: str | None,
    as_map: bool,
) -> Composite:
    attributes = [str(entry[0]) for entry in declared]
    names = [attribute.replace("_", "-") for attribute in attributes]
    if issubclass(cls, Struct):
        has = list(cls.__struct_fields__)
        keys = list(cls.__struct_encode_fields__)
    else:
        has = keys = list(inspect.signature(cls).parameters)
    if has != attributes:
        raise TypeError(
            f"{cls.__name__} has the attributes {has}, but its composite type has {attributes}"
        )
    if as_map:
        names = keys
    fields: list[Field] = []
    for entry, name in zip(declared, names, strict=True):
        kind: FieldType = entry[1]
        default = entry[2] if len(entry) > 2 else () if kind.multiple else None
        fields.append(Field(entry[0], name, kind, default))
    return Composite(cls, descriptor, symbol, fields, as_map)


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def _takes_positions(cls: type, fields: list[Field]) -> bool:
    """Return whether ``cls(*values)`` works, which it does not for keyword-only classes.

    Raises:
        TypeError: The class gives a field another default than the composite type does.
    """
    parameters = inspect.signature(cls).parameters
    by_position = True
    for field in fields:
        parameter = parameters[field.attribute]
        by_position = by_position and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        default = parameter.default
        if default is not inspect.Parameter.empty and default != field.default:
            raise TypeError(
                f"{cls.__name__}.{field.attribute} has the default {default!r}, "
                f"but its composite type has {field.default!r}"
            )
    return by_position


# --- Using composite classes ------------------------------------------------------------------

#: Descriptor, numeric or symbolic → table. Created by :func:`registry_of`, owned by its user.
Registry: TypeAlias = dict[object, Composite]


def composite_of(cls: type) -> Composite:
    """Return the table of *cls*.

    Raises:
        TypeError: *cls* is not a composite class.
    """
    table = getattr(cls, "__composite__", None)
    if isinstance(table, Composite):
        return table
    raise TypeError(f"{cls.__name__} is not declared with @composite")


def fields_of(cls: type) -> tuple[Field, ...]:
    """Return the fields of a composite class in the order of the wire."""
    return composite_of(cls).fields


def composite_name(cls: type) -> str:
    """Return the type's name in the standard, such as ``delete-on-close``."""
    return composite_of(cls).name


def descriptor_of(cls: type) -> int:
    """Return the numeric descriptor of a composite class.

    Raises:
        TypeError: *cls* is not a composite class, or has only a symbolic descriptor.
    """
    code = composite_of(cls).code
    if code is None:
        raise TypeError(f"{cls.__name__} has no numeric descriptor")
    return code


def registry_of(*classes: type) -> Registry:
    """Create a registry that finds composite classes by either descriptor."""
    registry: Registry = {}
    for cls in classes:
        table = composite_of(cls)
        registry[table.symbol] = table
        if table.code is not None:
            registry[table.code] = table
    return registry


def write_composite(out: bytearray, value: object, depth: int = 0) -> None:
    """Append an instance of a composite class with its descriptor."""
    table = getattr(type(value), "__composite__", None)
    if not isinstance(table, Composite):
        raise refused("composite type", value)
    table.write(out, value, depth)


def encode_composite(value: object) -> bytes:
    """Encode an instance of a composite class as :func:`write_composite` does."""
    out = bytearray()
    write_composite(out, value)
    return bytes(out)


def read_composite(r: Reader, *classes: type[T]) -> T:
    """Read a described value that must be of one of *classes*."""
    descriptor = _read_descriptor(r)
    numeric = isinstance(descriptor, int)
    for cls in classes:
        table = composite_of(cls)
        if (table.code if numeric else table.symbol) == descriptor:
            return cast("T", table.read(r))
    raise _unknown(descriptor, [composite_name(cls) for cls in classes])


def decode_composite(data: bytes, *classes: type[T], limits: Limits = DEFAULT_LIMITS) -> T:
    """Decode the single value in *data*, of one of *classes*; octets after it are an error."""
    r = Reader(data, 0, None, limits)
    value = read_composite(r, *classes)
    if r.at != r.end:
        raise DecodeError(f"{r.end - r.at} octets are left over after the value")
    return value


def from_described(value: object, *classes: type[T]) -> T:
    """Convert a ``Described`` value to an object of one of *classes*."""
    try:
        data = encode(value)
    except EncodeError as error:
        raise DecodeError(error.description) from None
    return decode_composite(data, *classes)


def read_known(r: Reader, registry: Registry) -> object:
    """Read a described value that must be of a class in *registry*."""
    descriptor = _read_descriptor(r)
    table = _look_up(registry, descriptor)
    if table is None:
        raise _unknown(descriptor, sorted({known.name for known in registry.values()}))
    return table.read(r)


def read_described_as(r: Reader, registry: Registry) -> object:
    """Read any value; one described as a class in *registry* becomes an object of that class."""
    if r.peek_code() != 0x00:
        return r.read_value()
    begin = r.at
    descriptor = _read_descriptor(r)
    table = _look_up(registry, descriptor)
    if table is not None:
        return table.read(r)
    r.at = begin
    return r.read_value()


def _look_up(registry: Registry, descriptor: object) -> Composite | None:
    return registry.get(descriptor) if descriptor is not None else None


def _read_descriptor(r: Reader) -> int | str | None:
    """Read the descriptor of the next value; None if it is neither a ulong nor a symbol."""
    code = r.peek_code()
    if code != 0x00:
        raise DecodeError(f"a described value expected, not constructor 0x{code:02x}")
    at = r.at
    r.at = at + 1
    if r.peek_code() == 0x53 and at + 2 < r.end:
        r.at = at + 3
        return r.data[at + 2]
    descriptor = r.read_value()
    # Only these two types identify composite types; an int 36 does not.
    if isinstance(descriptor, ULong | Symbol):
        return descriptor
    return None


def _unknown(descriptor: object, names: list[str]) -> DecodeError:
    return DecodeError(
        f"{' or '.join(names)} expected, not a value described by {shown(descriptor)}"
    )


# --- Field types ------------------------------------------------------------------------------


def _wrong(expected: str, code: int) -> DecodeError:
    return DecodeError(f"{expected} expected, not constructor 0x{code:02x}")


def _reads(name: str, *codes: int) -> Callable[[Reader], object]:
    """Create a reader of values that begin with one of *codes*."""

    def read(r: Reader) -> object:
        code = r.peek_code()
        if code not in codes:
            raise _wrong(name, code)
        return r.read_value()

    return read


def _reads_int(name: str, *codes: int) -> Callable[[Reader], object]:
    """Create a reader of numbers as plain ``int``, since the field determines their width."""

    def read(r: Reader) -> object:
        code = r.peek_code()
        if code not in codes:
            raise _wrong(name, code)
        value = r.read_value()
        assert isinstance(value, int)
        return int(value)

    return read


def _read_fields(r: Reader) -> object:
    return _read_keyed(r, numbers=False)


def _read_annotations(r: Reader) -> object:
    return _read_keyed(r, numbers=True)


def _read_keyed(r: Reader, numbers: bool) -> object:
    count, outer = r.enter_map()
    found: dict[object, object] = {}
    for _ in range(count // 2):
        key = r.read_value()
        if type(key) is str:
            key = _symbol_of(key)
        elif type(key) is not Symbol and not (numbers and type(key) is ULong):
            raise DecodeError(f"the keys of this map are symbols, not {shown(key)}")
        found[key] = r.read_value()
    if 2 * len(found) != count:
        raise DecodeError("the map has a key twice")
    r.leave(outer)
    return found


def _symbol_of(text: str) -> Symbol:
    if not text.isascii():
        raise DecodeError(f"the key {shown(text)} is not ASCII, as a symbol must be")
    return Symbol(text)


def _write_fields(out: bytearray, value: object, depth: int) -> None:
    if not isinstance(value, Mapping | Map):
        raise refused("fields", value)
    depth = deeper(depth)
    at = open_compound(out, 0xC1)
    for key, item in value.items():
        write_symbol(out, key)
        write_value(out, item, depth)
    close_compound(out, at, 2 * len(value))


def _write_annotations(out: bytearray, value: object, depth: int) -> None:
    if not isinstance(value, Mapping | Map):
        raise refused("annotations", value)
    depth = deeper(depth)
    at = open_compound(out, 0xC1)
    for key, item in value.items():
        if isinstance(key, int):
            write_ulong(out, key)
        else:
            write_symbol(out, key)
        write_value(out, item, depth)
    close_compound(out, at, 2 * len(value))


def _write_map(out: bytearray, value: object, depth: int) -> None:
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    write_map(out, value, depth)


def _read_symbols(r: Reader) -> object:
    code = r.peek_code()
    value = r.read_value()
    if code == 0x40:
        return ()
    if isinstance(value, Symbol):
        return (value,)
    if isinstance(value, Array):
        if not value.items:
            return ()
        if value.of is Symbol and not value.descriptors:
            return value.items
    elif isinstance(value, list) and all(type(item) is Symbol for item in value):
        return tuple(value)
    raise _wrong("symbol, one or several,", code)


def _write_symbols(out: bytearray, value: object, depth: int) -> None:
    if isinstance(value, str):
        write_symbol(out, value)
        return
    if not isinstance(value, tuple | list | set | frozenset | Array):
        raise refused("symbols", value)
    items = tuple(value)
    if not items:
        out += _NULL
    elif len(items) == 1:
        write_symbol(out, items[0])
    else:
        write_array(out, Array(items, Symbol), depth)


def _read_any(r: Reader) -> object:
    return r.read_value()


BOOLEAN: Final = FieldType(
    "boolean", _reads("boolean", 0x41, 0x42, 0x56), write_boolean, in_place=_IN_PLACE_BOOLEAN
)
UBYTE: Final = FieldType("ubyte", _reads_int("ubyte", 0x50), write_ubyte)
USHORT: Final = FieldType("ushort", _reads_int("ushort", 0x60), write_ushort)
UINT: Final = FieldType(
    "uint", _reads_int("uint", 0x70, 0x52, 0x43), write_uint, in_place=_IN_PLACE_UINT
)
ULONG: Final = FieldType("ulong", _reads_int("ulong", 0x80, 0x53, 0x44), write_ulong)
BYTE: Final = FieldType("byte", _reads_int("byte", 0x51), write_byte)
SHORT: Final = FieldType("short", _reads_int("short", 0x61), write_short)
INT: Final = FieldType("int", _reads_int("int", 0x71, 0x54), write_int)
LONG: Final = FieldType("long", _reads("long", 0x81, 0x55), write_long)
FLOAT: Final = FieldType("float", _reads("float", 0x72), write_float)
DOUBLE: Final = FieldType("double", _reads("double", 0x82), write_double)
TIMESTAMP: Final = FieldType("timestamp", _reads("timestamp", 0x83), write_timestamp)
UUID: Final = FieldType("uuid", _reads("uuid", 0x98), write_uuid)
BINARY: Final = FieldType(
    "binary", _reads("binary", 0xA0, 0xB0), write_binary, in_place=_IN_PLACE_BINARY
)
STRING: Final = FieldType(
    "string", _reads("string", 0xA1, 0xB1), write_string, in_place=_IN_PLACE_STRING
)
SYMBOL: Final = FieldType(
    "symbol", _reads("symbol", 0xA3, 0xB3), write_symbol, in_place=_IN_PLACE_SYMBOL
)
LIST: Final = FieldType("list", _reads("list", 0x45, 0xC0, 0xD0), nested=write_list)
MAP: Final = FieldType("map", _reads("map", 0xC1, 0xD1), nested=_write_map)
#: A map with symbols as keys (Part 2 §2.8.13). Strings are accepted too, since peers confuse them.
FIELDS: Final = FieldType("fields", _read_fields, nested=_write_fields)
#: As fields, and also with ulong keys, which the standard reserves (Part 3 §3.2.10).
ANNOTATIONS: Final = FieldType("annotations", _read_annotations, nested=_write_annotations)
#: ``*``: a value of any type.
ANY: Final = FieldType("*", _read_any, nested=write_value, in_place=_IN_PLACE_ANY)
#: ``multiple="true"`` symbols (§1.4.4): null, one, or an array; some peers send a list.
SYMBOLS: Final = FieldType("symbol", _read_symbols, nested=_write_symbols, multiple=True)


class _Choice:
    """Classes that a field may hold; resolved on first use, when all of them are declared."""

    def __init__(self, classes: tuple[object, ...], strict: bool) -> None:
        self._classes = classes
        self._strict = strict
        self._registry: Registry | None = None

    def registry(self) -> Registry:
        known = self._registry
        if known is None:
            classes: list[type] = []
            for entry in self._classes:
                if isinstance(entry, type):
                    classes.append(entry)
                else:
                    classes += cast("Callable[[], tuple[type, ...]]", entry)()
            known = self._registry = registry_of(*classes)
        return known

    def read(self, r: Reader) -> object:
        if self._strict:
            return read_known(r, self.registry())
        return read_described_as(r, self.registry())

    def write(self, out: bytearray, value: object, depth: int) -> None:
        if self._strict:
            table = getattr(type(value), "__composite__", None)
            if not isinstance(table, Composite) or table.symbol not in self.registry():
                names = sorted({known.name for known in self.registry().values()})
                raise refused(" or ".join(names), value)
        write_value(out, value, depth)


def one_of(*classes: type | Callable[[], tuple[type, ...]]) -> FieldType:
    """Create a field type that accepts only objects of *classes*.

    A callable among *classes* returns classes that are declared later.
    """
    choice = _Choice(classes, strict=True)
    return FieldType("*", choice.read, nested=choice.write)


def any_of(*classes: type | Callable[[], tuple[type, ...]]) -> FieldType:
    """Create a field type for any value; described ones of *classes* become their objects."""
    choice = _Choice(classes, strict=False)
    return FieldType("*", choice.read, nested=choice.write)
