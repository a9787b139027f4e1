"""Encoding of whole messages from their sections (Part 3 §3.2)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import astuple

from ..errors import EncodeError
from .primitives import refused, write_value
from .section_types import Header, Properties
from .sections import (
    AMQP_VALUE,
    DELIVERY_ANNOTATIONS,
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    numbered_opening,
    write_annotations,
    write_application_properties,
    write_header,
    write_properties,
)

_U32: Final = struct.Struct(">I")


def check_header(header: Any) -> None:
    """Refuse values of the wrong type.

    The parameter is untyped: with a type, compiled code raises TypeError before a value can be checked.
    """
    for flag in (header.durable, header.first_acquirer):
        if not isinstance(flag, bool):
            raise refused("boolean", flag)
    for number in (header.priority, header.delivery_count):
        if not isinstance(number, int):
            raise refused("uint", number)
    if header.ttl is not None and not isinstance(header.ttl, int):
        raise refused("uint", header.ttl)


def write_front(
    out: bytearray,
    header: Header | None,
    delivery_annotations: Mapping[Any, object] | None,
    message_annotations: Mapping[Any, object] | None,
    properties: Properties | None,
    application_properties: Mapping[Any, object] | None,
) -> None:
    """Append all sections before the body, without empty ones."""
    if header is not None:
        write_header(
            out,
            durable=header.durable,
            priority=header.priority,
            ttl_ms=header.ttl,
            first_acquirer=header.first_acquirer,
            delivery_count=header.delivery_count,
        )
    if delivery_annotations:
        write_annotations(out, DELIVERY_ANNOTATIONS, delivery_annotations)
    if message_annotations:
        write_annotations(out, MESSAGE_ANNOTATIONS, message_annotations)
    if properties is not None:
        write_properties(out, properties)
    if application_properties:
        write_application_properties(out, application_properties)


def write_body_data(out: bytearray, chunks: tuple[bytes, ...]) -> None:
    """Append *chunks* as data sections (§3.2.6)."""
    for chunk in chunks:
        size = len(chunk)
        if size <= 0xFF:
            out += _DATA8[size]
        else:
            write_data(out, size)
        out += chunk


def data_octets(
    properties: Properties,
    application_properties: Mapping[Any, object] | None,
    chunks: tuple[bytes, ...],
) -> bytes:
    """Return a message of *chunks* with properties only, without other sections."""
    if not application_properties and len(chunks) == 1:
        opening = numbered_opening(astuple(properties))
        if opening is not None:
            # Numbered messages of one section are common, and this takes a third of the time.
            only = chunks[0]
            size = len(only)
            return opening + (_DATA8[size] if size <= 0xFF else data_opening(size)) + only
    out = bytearray()
    write_properties(out, properties)
    if application_properties:
        write_application_properties(out, application_properties)
    write_body_data(out, chunks)
    return bytes(out)


def value_section(value: object) -> bytes:
    """Encode *value* as an amqp-value section (§3.2.8).

    Raises:
        EncodeError: It has no encoding.
    """
    out = bytearray(SECTION_OPENINGS[AMQP_VALUE])
    try:
        write_value(out, value)
    except EncodeError as error:
        raise EncodeError(f"the body: {error.description}") from None
    return bytes(out)


_DATA8: Final = [bytes((0x00, 0x53, 0x75, 0xA0, size)) for size in range(256)]


def data_opening(size: int) -> bytes:
    """Return the octets that precede the *size* octets of a data section (§3.2.6)."""
    if size <= 0xFF:
        return _DATA8[size]
    if size <= 0xFFFF_FFFF:
        return b"\x00\x53\x75\xb0" + _U32.pack(size)
    raise EncodeError(f"a data section of {size} octets: a size has 32 bits")


def write_data(out: bytearray, size: int) -> None:
    """Append the octets that precede the *size* octets of a data section (§3.2.6).

    For callers that write the content themselves, such as a sender of a streamed body.
    """
    if size <= 0xFF:
        out += _DATA8[size]
    else:
        out += data_opening(size)
