"""Sections of a message of format 0, as they lie in its bytes (Part 3 §3.2).

A message is split by the sizes of its sections, and its bare message is decoded only on demand:
:func:`walk` finds all sections, :func:`walk_head` reads header and annotations for intermediaries.
The writers encode values as sections. :class:`~amqp_rt.message.Message`, which applications use, is
built on these functions.

Malformed bytes raise only ``DecodeError``.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, cast
from uuid import UUID

from msgspec.structs import astuple

from ..errors import DecodeError, EncodeError, LocalProtocolError
from ..limits import DEFAULT_LIMITS, Limits
from ..values import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
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
from .composites import (
    ANNOTATIONS,
    fields_of,
    read_composite,
)
from .primitives import (
    Reader,
    amqp_kind,
    close_compound,
    open_compound,
    refused,
    shown,
    write_binary,
    write_boolean,
    write_long,
    write_null,
    write_string,
    write_symbol,
    write_timestamp,
    write_ubyte,
    write_uint,
    write_ulong,
    write_uuid,
    write_value,
)
from .section_types import MESSAGE_ID, SYMBOLIC, TEXT, Head, Header, Properties, Sections

_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")

# Numeric descriptors of the sections (§3.2).
HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
AMQP_SEQUENCE: Final = 0x76
AMQP_VALUE: Final = 0x77
FOOTER: Final = 0x78

SECTION_NAMES: Final = {
    HEADER: "header",
    DELIVERY_ANNOTATIONS: "delivery-annotations",
    MESSAGE_ANNOTATIONS: "message-annotations",
    PROPERTIES: "properties",
    APPLICATION_PROPERTIES: "application-properties",
    DATA: "data",
    AMQP_SEQUENCE: "amqp-sequence",
    AMQP_VALUE: "amqp-value",
    FOOTER: "footer",
}
#: Type that each section restricts; the symbolic descriptor ends with its name.
_TYPES: Final = {
    HEADER: "list",
    DELIVERY_ANNOTATIONS: "map",
    MESSAGE_ANNOTATIONS: "map",
    PROPERTIES: "list",
    APPLICATION_PROPERTIES: "map",
    DATA: "binary",
    AMQP_SEQUENCE: "list",
    AMQP_VALUE: "*",
    FOOTER: "map",
}
_SYMBOLS: Final = {
    Symbol(f"amqp:{name}:{_TYPES[code]}"): code for code, name in SECTION_NAMES.items()
}
#: Position of each section in a message. The three kinds of body share one.
_PLACES: Final = {code: min(code - HEADER, 5) if code < FOOTER else 6 for code in SECTION_NAMES}

# Reach of a value, by its constructor: a number of octets, or the width of its size field.
_SIZE8: Final = 0xFF
_SIZE32: Final = 0xFE


def _prefixes() -> dict[bytes, int]:
    """Map the usual first four octets of each section to its code and reach.

    The octets are descriptor and constructor. The number is the section's code, shifted left by
    eight, plus the reach of its value.
    """
    reaches = {
        "list": {0x45: 0, 0xC0: _SIZE8, 0xD0: _SIZE32},
        "map": {0xC1: _SIZE8, 0xD1: _SIZE32},
        "binary": {0xA0: _SIZE8, 0xB0: _SIZE32},
        "*": {
            **dict.fromkeys((0x40, 0x41, 0x42, 0x43, 0x44, 0x45), 0),
            **dict.fromkeys((0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56), 1),
            **dict.fromkeys((0x60, 0x61), 2),
            **dict.fromkeys((0x70, 0x71, 0x72, 0x73, 0x74), 4),
            **dict.fromkeys((0x80, 0x81, 0x82, 0x83, 0x84), 8),
            **dict.fromkeys((0x94, 0x98), 16),
            **dict.fromkeys((0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0), _SIZE8),
            **dict.fromkeys((0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0), _SIZE32),
        },
    }
    return {
        bytes((0x00, 0x53, code, constructor)): code << 8 | reach
        for code, restricted in _TYPES.items()
        for constructor, reach in reaches[restricted].items()
    }


_PREFIXES: Final = _prefixes()

#: Encoded section descriptors, as we write them.
SECTION_OPENINGS: Final = {code: bytes((0x00, 0x53, code)) for code in SECTION_NAMES}


# --- Finding sections --------------------------------------------------------------------------


def walk(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> Sections:
    """Find the sections of *payload* by their sizes, without decoding them (§3.2).

    A message without a body is accepted, since some peers send such messages.

    Raises:
        DecodeError: A section is unknown, repeated, out of order, of the wrong type or truncated,
            or there are more than ``sections_max``.
    """
    end = len(payload)
    at = 0
    starts: list[int] = []
    code = 0
    body_code = 0
    body_count = 0
    try:
        while at < end:
            after = at + 4
            known = _PREFIXES.get(payload[at:after], 0)
            if known:
                code = known >> 8
                reach = known & 0xFF
                if reach == _SIZE8:
                    after += 1 + payload[after]
                elif reach == _SIZE32:
                    after += 4 + (
                        payload[after] << 24
                        | payload[after + 1] << 16
                        | payload[after + 2] << 8
                        | payload[after + 3]
                    )
                else:
                    after += reach
            else:
                code, after = _walk_unusual(payload, at, limits)
            if after > end:
                raise DecodeError(f"{SECTION_NAMES[code]}: {after - end} octets are missing")
            place = _PLACES[code]
            missing = place + 1 - len(starts)
            if missing > 0:
                if missing == 1:
                    starts.append(at)
                else:
                    starts += [at] * missing
                if place == 5:
                    body_code = code
                    body_count = 1
            elif code == body_code and code != AMQP_VALUE and place + 1 == len(starts):
                body_count += 1
                if body_count > limits.sections_max:
                    raise DecodeError("there are more sections than sections_max")
            else:
                raise _misplaced(code, body_code, len(starts) - 1)
            at = after
    except IndexError:
        raise DecodeError(f"{SECTION_NAMES[code]}: the octets end inside its size") from None
    starts += [end] * (7 - len(starts))
    return Sections(
        starts[1], starts[2], starts[3], starts[4], starts[5], starts[6], end, body_code, body_count
    )


def reach_of(payload: bytes, at: int) -> int:
    """Return where the section that begins at *at* ends; -1 if its encoding is unusual or octets are missing."""
    after = at + 4
    known = _PREFIXES.get(payload[at:after], 0)
    if not known:
        return -1
    reach = known & 0xFF
    end = len(payload)
    if reach == _SIZE8:
        if after >= end:
            return -1
        after += 1 + payload[after]
    elif reach == _SIZE32:
        if after + 3 >= end:
            return -1
        after += 4 + (
            payload[after] << 24
            | payload[after + 1] << 16
            | payload[after + 2] << 8
            | payload[after + 3]
        )
    else:
        after += reach
    return after if after <= end else -1


def read_data(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> bytes | None:
    """Return the octets of a body that is one data section in the usual encoding, else None.

    Raises:
        DecodeError: As :func:`walk`.
    """
    sections = walk(payload, limits)
    at = sections.body
    if sections.body_code != DATA or sections.body_count != 1 or payload[at + 1] != 0x53:
        return None
    return payload[at + 5 if payload[at + 3] == 0xA0 else at + 8 : sections.footer]


def walk_front(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> tuple[int, int, int, int, int]:
    """Find the sections before the body by their sizes, as :func:`walk` does.

    Only the first descriptor of the body is read, however large the body is.

    Returns:
        The offsets of delivery annotations, message annotations, properties, application properties
        and the rest; an absent section is empty.

    Raises:
        DecodeError: A section before the body is truncated, repeated, out of order, or of the wrong
            type; or the data after them is not a section.
    """
    end = len(payload)
    at = 0
    starts: list[int] = []
    code = HEADER
    try:
        while at < end:
            after = at + 4
            known = _PREFIXES.get(payload[at:after], 0)
            if known:
                code = known >> 8
                if code > APPLICATION_PROPERTIES:
                    break
                if known & 0xFF == _SIZE8:
                    after += 1 + payload[after]
                elif known & 0xFF == _SIZE32:
                    after += 4 + (
                        payload[after] << 24
                        | payload[after + 1] << 16
                        | payload[after + 2] << 8
                        | payload[after + 3]
                    )
            else:
                code, after = read_section_code(payload, at, limits)
                if code > APPLICATION_PROPERTIES:
                    break
                code, after = _walk_unusual(payload, at, limits)
            if after > end:
                raise DecodeError(f"{SECTION_NAMES[code]}: {after - end} octets are missing")
            missing = code - HEADER + 1 - len(starts)
            if missing <= 0:
                raise _misplaced(code, 0, len(starts) - 1)
            starts += [at] * missing
            at = after
    except IndexError:
        raise DecodeError(f"{SECTION_NAMES[code]}: the octets end inside its size") from None
    starts += [at] * (6 - len(starts))
    return starts[1], starts[2], starts[3], starts[4], starts[5]


def _walk_unusual(payload: bytes, at: int, limits: Limits) -> tuple[int, int]:
    """Return code and end of a section whose beginning is not the usual one.

    Any encoding of the descriptor and any kind of value is accepted.
    """
    code, content = read_section_code(payload, at, limits)
    reader = Reader(payload, content, None, limits)
    try:
        constructor = reader.peek_code()
        usual = SECTION_OPENINGS[code] + bytes((constructor,))
        if usual in _PREFIXES or (code == AMQP_VALUE and constructor == 0x00):
            reader.skip_value()
            return code, reader.at
    except DecodeError as error:
        raise DecodeError(f"{SECTION_NAMES[code]}: {error.description}") from None
    raise _wrong_type(code, constructor)


def read_section_code(payload: bytes, at: int, limits: Limits) -> tuple[int, int]:
    """Return the descriptor of the section that begins at *at*, and the offset of its value.

    Raises:
        DecodeError: No section begins there.
    """
    if payload[at + 1 : at + 2] == b"\x53" and payload[at] == 0x00 and at + 2 < len(payload):
        code = payload[at + 2]
        if code in SECTION_NAMES:
            return code, at + 3
    if payload[at] != 0x00:
        raise DecodeError(f"a section expected at octet {at}, not constructor 0x{payload[at]:02x}")
    reader = Reader(payload, at + 1, None, limits)
    try:
        descriptor = reader.read_value()
    except DecodeError as error:
        raise DecodeError(f"a section's descriptor: {error.description}") from None
    return _section_of(descriptor), reader.at


def _section_of(descriptor: object) -> int:
    code = 0
    if type(descriptor) is ULong:
        code = int(descriptor)
    elif type(descriptor) is Symbol:
        code = _SYMBOLS.get(descriptor, 0)
    if code not in SECTION_NAMES:
        raise DecodeError(f"no section of a message is described by {shown(descriptor)}")
    return code


#: Maximum octets of descriptor, constructor and size of a section.
SECTION_BEGIN_MAX: Final = 64


def begin_section(octets: bytes, limits: Limits) -> tuple[int, int, int] | None:
    """Return descriptor, content offset and content size of the section that *octets* begin.

    None if more octets are needed, which happens only below ``SECTION_BEGIN_MAX`` octets. The size
    of an amqp-value is given as 0, since its encoding need not begin with a size.

    Raises:
        DecodeError: The octets are not the beginning of a section.
    """
    if len(octets) < SECTION_BEGIN_MAX and octets[0] == 0x00:
        try:
            Reader(octets, 1, None, limits).read_value()
        except DecodeError:
            return None
    code, at = read_section_code(octets, 0, limits)
    if code == AMQP_VALUE:
        return code, at, 0
    if at >= len(octets):
        return None
    known = _PREFIXES.get(SECTION_OPENINGS[code] + octets[at : at + 1], 0)
    if not known:
        raise _wrong_type(code, octets[at])
    width = 1 if known & 0xFF == _SIZE8 else 4 if known & 0xFF == _SIZE32 else 0
    at += 1
    if at + width > len(octets):
        return None
    return code, at + width, int.from_bytes(octets[at : at + width], "big")


def _wrong_type(code: int, constructor: int) -> DecodeError:
    expected = "value" if code == AMQP_VALUE else _TYPES[code]
    return DecodeError(
        f"{SECTION_NAMES[code]}: a {expected} expected, not constructor 0x{constructor:02x}"
    )


def _misplaced(code: int, body_code: int, last_place: int) -> DecodeError:
    if _PLACES[code] == last_place:
        if body_code and code != body_code:
            return DecodeError(
                f"a body of {SECTION_NAMES[body_code]} goes on with {SECTION_NAMES[code]}"
            )
        return DecodeError(f"there are two {SECTION_NAMES[code]} sections")
    last = body_code if last_place == 5 else next(c for c in _PLACES if _PLACES[c] == last_place)
    return DecodeError(f"{SECTION_NAMES[code]} comes after {SECTION_NAMES[last]}")


# --- For intermediaries ------------------------------------------------------------------------


def walk_head(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> Head:
    """Read the header and the annotations, and keep the rest of *payload* in one piece.

    Only the first descriptor of the bare message is read.

    Raises:
        DecodeError: The header or an annotation section is truncated, repeated, out of order, or
            malformed.
    """
    # The loop of walk_front is repeated here, since every message of a broker passes through it: a
    # call and a growing list would cost a third more.
    end = len(payload)
    at = 0
    ends = [0, 0, 0]
    last = -1
    code = HEADER
    try:
        while at < end:
            after = at + 4
            known = _PREFIXES.get(payload[at:after], 0)
            if known:
                code = known >> 8
                if code > MESSAGE_ANNOTATIONS:
                    break
                if known & 0xFF == _SIZE8:
                    after += 1 + payload[after]
                elif known & 0xFF == _SIZE32:
                    after += 4 + (
                        payload[after] << 24
                        | payload[after + 1] << 16
                        | payload[after + 2] << 8
                        | payload[after + 3]
                    )
            else:
                code, after = read_section_code(payload, at, limits)
                if code > MESSAGE_ANNOTATIONS:
                    break
                code, after = _walk_unusual(payload, at, limits)
            if after > end:
                raise DecodeError(f"{SECTION_NAMES[code]}: {after - end} octets are missing")
            place = code - HEADER
            if place <= last:
                raise _misplaced(code, 0, last)
            last = place
            ends[place] = at = after
    except IndexError:
        raise DecodeError(f"{SECTION_NAMES[code]}: the octets end inside its size") from None
    if at == 0:
        return Head(False, 4, None, False, 0, b"", b"", b"", payload)
    header_end = ends[0]
    annotations_from = ends[1] or header_end
    durable, priority, ttl, first_acquirer, delivery_count = read_header_fields(
        payload, header_end, limits
    )
    return Head(
        durable,
        priority,
        ttl,
        first_acquirer,
        delivery_count,
        payload[:header_end],
        payload[header_end:annotations_from],
        payload[annotations_from:at],
        payload[at:],
    )


def reencode(
    head: Head,
    *,
    ttl_ms: int | None,
    first_acquirer: bool,
    delivery_count: int,
    delivery_annotations: bytes = b"",
    message_annotations: bytes | None = None,
) -> list[bytes]:
    """Return the buffers to send to the next hop.

    The header is rewritten only if a field changed, and then omitted if all are at their defaults.
    The received delivery annotations end here (§3.2.2); *delivery_annotations* are ours. Message
    annotations are passed on unchanged (§3.2.3) unless *message_annotations*, an encoded section as
    :func:`~amqp_rt.annotations.merge_annotations` creates it, replaces them.
    """
    if (
        ttl_ms == head.ttl_ms
        and first_acquirer == head.first_acquirer
        and delivery_count == head.delivery_count
    ):
        front = head.header
    else:
        out = bytearray()
        write_header(
            out,
            durable=head.durable,
            priority=head.priority,
            ttl_ms=ttl_ms,
            first_acquirer=first_acquirer,
            delivery_count=delivery_count,
        )
        front = bytes(out)
    if delivery_annotations:
        front += delivery_annotations
    if message_annotations is None:
        message_annotations = head.message_annotations
    if message_annotations:
        front += message_annotations
    return [front, head.rest] if front else [head.rest]


def read_header_fields(
    payload: bytes, end: int, limits: Limits
) -> tuple[bool, int, int | None, bool, int]:
    """Return the fields of the header in ``payload[:end]``; defaults if it is absent (§3.2.1)."""
    durable = False
    priority = 4
    ttl: int | None = None
    first_acquirer = False
    delivery_count = 0
    if end == 0:
        return durable, priority, ttl, first_acquirer, delivery_count
    # A list8 with the usual constructors is read in place. The result is valid if it ends at *end*.
    at = 0
    if payload[1] == 0x53 and payload[3] == 0xC0 and end > 5:
        count = payload[5]
        at = 6
        try:
            if count > 0:
                durable = payload[at] == 0x41
                at += 1 if 0x40 <= payload[at] <= 0x42 else end
            if count > 1:
                if payload[at] == 0x50:
                    priority = payload[at + 1]
                    at += 2
                else:
                    at += 1 if payload[at] == 0x40 else end
            if count > 2:
                if payload[at] == 0x70:
                    ttl = _U32.unpack_from(payload, at + 1)[0]
                    at += 5
                elif payload[at] == 0x52:
                    ttl = payload[at + 1]
                    at += 2
                else:
                    at += 1 if payload[at] == 0x40 else end
            if count > 3:
                first_acquirer = payload[at] == 0x41
                at += 1 if 0x40 <= payload[at] <= 0x42 else end
            if count > 4:
                if payload[at] == 0x52:
                    delivery_count = payload[at + 1]
                    at += 2
                else:
                    at += 1 if payload[at] in (0x40, 0x43) else end
            if count > 5:
                at = 0
        except (IndexError, struct.error):
            at = 0
    if at != end:
        header = read_composite(Reader(payload, 0, end, limits), Header)
        return (
            header.durable,
            header.priority,
            header.ttl,
            header.first_acquirer,
            header.delivery_count,
        )
    return durable, priority, ttl, first_acquirer, delivery_count


def write_header(
    out: bytearray,
    *,
    durable: bool = False,
    priority: int = 4,
    ttl_ms: int | None = None,
    first_acquirer: bool = False,
    delivery_count: int = 0,
) -> None:
    """Append a header section, or nothing if all fields have their defaults (§3.2.1)."""
    if delivery_count:
        count = 5
    elif first_acquirer:
        count = 4
    elif ttl_ms is not None:
        count = 3
    elif priority != 4:
        count = 2
    elif durable:
        count = 1
    else:
        return
    at = len(out)
    out += _HEADER_BEGIN[count]
    out.append(0x41 if durable else 0x40)
    if count > 1:
        if priority == 4:
            out.append(0x40)
        else:
            write_ubyte(out, priority)
    if count > 2:
        if ttl_ms is None:
            out.append(0x40)
        else:
            write_uint(out, ttl_ms)
    if count > 3:
        out.append(0x41 if first_acquirer else 0x40)
    if count > 4:
        write_uint(out, delivery_count)
    out[at + 4] = len(out) - at - 5


_HEADER_BEGIN: Final = [bytes((0x00, 0x53, 0x70, 0xC0, 0, count)) for count in range(6)]


# --- Annotations -------------------------------------------------------------------------------


def read_annotations(
    section: bytes, limits: Limits = DEFAULT_LIMITS
) -> dict[Symbol | ULong, object]:
    """Decode an encoded annotation section or footer; empty if *section* is empty (§3.2.10).

    Raises:
        DecodeError: The section is not a map with symbols or ulongs as keys.
    """
    if not section:
        return {}
    code, content = read_section_code(section, 0, limits)
    return read_annotation_map(section, code, content, len(section), limits)


def read_annotation_map(
    payload: bytes, code: int, content: int, end: int, limits: Limits
) -> dict[Symbol | ULong, object]:
    """Decode the map that begins at *content* in the section *code*, which ends at *end*."""
    try:
        found = ANNOTATIONS.read(Reader(payload, content, end, limits))
    except DecodeError as error:
        raise DecodeError(f"{SECTION_NAMES[code]}: {error.description}") from None
    return cast("dict[Symbol | ULong, object]", found)


def write_annotations(out: bytearray, code: int, annotations: Mapping[Any, object]) -> None:
    """Append the annotation section *code*, or nothing if there are no *annotations*."""
    if not annotations:
        return
    out += SECTION_OPENINGS[code]
    assert ANNOTATIONS.nested is not None
    try:
        ANNOTATIONS.nested(out, annotations, 0)
    except EncodeError as error:
        raise EncodeError(f"{SECTION_NAMES[code]}: {error.description}") from None


# --- Bare message ------------------------------------------------------------------------------

#: Types allowed as values of application properties, and their writers.
_SIMPLE_WRITERS: Final[dict[type, Callable[[bytearray, object], None]]] = {
    str: write_string,
    int: write_long,
    bool: write_boolean,
    UUID: write_uuid,
    bytes: write_binary,
    Symbol: write_symbol,
    dt.datetime: write_timestamp,
    type(None): write_null,
    **dict.fromkeys(
        (UByte, UShort, UInt, ULong, Byte, Short, Int, Float32, float, Decimal32, Decimal64),
        write_value,
    ),
    **dict.fromkeys((Decimal128, Char, Timestamp, bytearray, memoryview), write_value),
}

_PROPERTY_READERS: Final = tuple(field.type.read for field in fields_of(Properties))
#: Number of the properties behind the message-id.
_ALL_OTHERS: Final = 12
#: Properties of nothing but a number of one octet as message-id.
_NUMBERED_8: Final = [b"\x00\x53\x73\xc0\x03\x01\x53" + bytes((number,)) for number in range(256)]
_NULLS: Final = [b"\x40" * count for count in range(13)]
_STRING8: Final = [bytes((0xA1, size)) for size in range(256)]
_SYMBOL8: Final = [bytes((0xA3, size)) for size in range(256)]
#: First octets of a short text, by its size, for each field that may hold one.
_SHORT_TEXTS: Final = tuple(
    _SYMBOL8 if field.type is SYMBOLIC else _STRING8 if field.type in (TEXT, MESSAGE_ID) else None
    for field in fields_of(Properties)
)
_PROPERTY_WRITERS: Final = tuple(
    cast("Callable[[bytearray, object], None]", field.type.write) for field in fields_of(Properties)
)


def read_application_properties(
    payload: bytes, at: int, end: int, limits: Limits
) -> dict[str, object]:
    """Decode the application properties in the section from *at* to *end* (§3.2.5).

    Values of any type are accepted, beyond the standard, since some peers send lists and maps; keys
    that are symbols are converted to strings.
    """
    try:
        r = Reader(payload, read_section_code(payload, at, limits)[1], end, limits)
        count, outer = r.enter_map()
        items = r.read_items(count)
        r.leave(outer)
        found: dict[str, object] = {}
        for index in range(0, count, 2):
            key = items[index]
            if type(key) is not str:
                if not isinstance(key, str):
                    raise DecodeError(f"the keys are strings, not {shown(key)}")
                key = str(key)
            found[key] = items[index + 1]
        if 2 * len(found) != count:
            raise DecodeError("a key is there twice")
    except DecodeError as error:
        raise DecodeError(f"application-properties: {error.description}") from None
    return found


# Usual constructors of the properties' fields, and the kind of value then read in place.
_IN_PLACE_TEXT: Final = 1
_IN_PLACE_BINARY: Final = 2
_IN_PLACE_SMALLUINT: Final = 3
_USUAL_FIELDS: Final[dict[int, int]] = {
    **{index << 8 | 0xA1: _IN_PLACE_TEXT for index in (0, 2, 3, 4, 5, 6, 7, 10, 12)},
    **{index << 8 | 0xA3: _IN_PLACE_TEXT for index in (2, 3, 4, 6, 7, 10, 12)},
    **{index << 8 | 0xA0: _IN_PLACE_BINARY for index in (0, 1, 5)},
    11 << 8 | 0x52: _IN_PLACE_SMALLUINT,
}


def read_properties(payload: bytes, at: int, end: int, limits: Limits) -> Properties:
    """Decode the properties in the section from *at* to *end* (§3.2.4).

    Raises:
        DecodeError: The properties are malformed; the error names the field.
    """
    if payload[at : at + 4] == b"\x00\x53\x73\xc0":
        fields: list[Any] = []
        try:
            count = payload[at + 5]
            place = at + 6
            for index in range(min(count, 13)):
                code = payload[place]
                if code == 0x40:
                    fields.append(None)
                    place += 1
                    continue
                usual = _USUAL_FIELDS.get(index << 8 | code, 0)
                if usual == _IN_PLACE_TEXT:
                    begin = place + 2
                    place = begin + payload[place + 1]
                    fields.append(payload[begin:place].decode("utf-8"))
                elif usual == _IN_PLACE_BINARY:
                    begin = place + 2
                    place = begin + payload[place + 1]
                    fields.append(payload[begin:place])
                elif usual == _IN_PLACE_SMALLUINT:
                    fields.append(payload[place + 1])
                    place += 2
                else:
                    r = Reader(payload, place, end, limits)
                    fields.append(_PROPERTY_READERS[index](r))
                    place = r.at
            if place == end:
                return Properties(*fields)
        except (IndexError, UnicodeDecodeError, DecodeError):
            pass  # read_composite below raises the error that names the field
    return read_composite(Reader(payload, at, end, limits), Properties)


def numbered_opening(values: tuple[Any, ...]) -> bytes | None:
    """Return the properties section of *values* if they are a number as message-id and nothing else; else None."""
    only = values[0]
    if type(only) is int and values.count(None) == _ALL_OTHERS:
        if 0 < only <= 0xFF:
            return _NUMBERED_8[only]
        if 0 < only <= 0xFFFF_FFFF_FFFF_FFFF:
            return b"\x00\x53\x73\xc0\x0a\x01\x80" + _U64.pack(only)
    return None


def write_properties(out: bytearray, properties: Properties) -> None:
    """Append a properties section, or nothing if no property is set (§3.2.4)."""
    values = astuple(properties)
    opening = numbered_opening(values)
    if opening is not None:
        out += opening
        return
    at = len(out)
    out += b"\x00\x53\x73\xc0\x00\x00"
    count = 0
    index = 0
    try:
        for value in values:
            index += 1
            if value is None:
                continue
            if index - count > 1:
                out += _NULLS[index - count - 1]
            count = index
            if type(value) is str:
                beginnings = _SHORT_TEXTS[index - 1]
                if beginnings is not None and len(value) <= 0xFF and value.isascii():
                    out += beginnings[len(value)]
                    out += value.encode()
                    continue
            elif type(value) is int and (index == 1 or index == 6):
                # A message-id or correlation-id.
                write_ulong(out, value)
                continue
            _PROPERTY_WRITERS[index - 1](out, value)
    except EncodeError as error:
        name = fields_of(Properties)[index - 1].name
        raise EncodeError(f"properties.{name}: {error.description}") from None
    if count:
        close_compound(out, at + 3, count)
    else:
        del out[at:]


def write_application_properties(out: bytearray, properties: Mapping[Any, object]) -> None:
    """Append an application-properties section, or nothing if there are none (§3.2.5).

    Raises:
        LocalProtocolError: A key is not a string, or a value is not of a simple type: lists, maps,
            arrays and described values are not sent here.
        EncodeError: A value has no encoding.
    """
    if not properties:
        return
    if type(properties) is not dict:
        properties = _as_dict(properties)
    out += SECTION_OPENINGS[APPLICATION_PROPERTIES]
    at = open_compound(out, 0xC1)
    key: object = None
    entries: dict[Any, object] = properties
    try:
        for key, value in entries.items():
            if not isinstance(key, str):
                raise LocalProtocolError(
                    f"the keys of application properties are strings, not {shown(key)}"
                )
            _write_text(out, key)
            if type(value) is str:
                _write_text(out, value)
                continue
            write = _SIMPLE_WRITERS.get(type(value))
            if write is None:
                write = _SIMPLE_WRITERS.get(amqp_kind(type(value)))
                if write is None:
                    raise LocalProtocolError(
                        f"the application property {shown(key)} is {shown(value)}: "
                        "only simple values may be sent there"
                    )
            write(out, value)
    except EncodeError as error:
        raise EncodeError(f"the application property {shown(key)}: {error.description}") from None
    close_compound(out, at, 2 * len(entries))


def _as_dict(properties: object) -> dict[Any, object]:
    if not isinstance(properties, Mapping | Map):
        raise refused("application-properties", properties)
    try:
        return dict(properties.items())
    except TypeError:
        raise LocalProtocolError("the keys of application properties are strings") from None


def _write_text(out: bytearray, text: str) -> None:
    if len(text) <= 0xFF and text.isascii():
        out += _STRING8[len(text)]
        out += text.encode()
    else:
        write_string(out, text)


def is_simple(value: object) -> bool:
    """Return whether *value* may be sent as an application property (§3.2.5)."""
    return amqp_kind(type(value)) in _SIMPLE_WRITERS
