"""Classes of decoded sections (Part 3 §3.2); :mod:`.sections` reads and writes them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final, Generic, Self, TypeAlias, TypedDict, TypeVar, cast, overload
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from ..errors import DecodeError
from .composites import BINARY, BOOLEAN, STRING, TIMESTAMP, UBYTE, UINT, FieldType, composite
from .primitives import (
    Reader,
    refused,
    write_binary,
    write_string,
    write_symbol,
    write_ulong,
    write_uuid,
)

T = TypeVar("T")

#: A message-id may be of any of four types, which are separate key spaces (§3.2.11 to §3.2.14).
MessageId: TypeAlias = int | UUID | bytes | str

#: A point in time: milliseconds since 1970, or a ``datetime`` with a time zone.
Moment: TypeAlias = int | dt.datetime


@composite(
    0x70,
    ("durable", BOOLEAN, False),
    ("priority", UBYTE, 4),
    ("ttl", UINT),
    ("first_acquirer", BOOLEAN, False),
    ("delivery_count", UINT, 0),
)
class Header(Struct, frozen=True, gc=False):
    """Delivery details of a message (§3.2.1). ``ttl`` counts milliseconds from arrival."""

    durable: bool = False
    priority: int = 4
    ttl: int | None = None
    first_acquirer: bool = False
    delivery_count: int = 0


def _read_any(r: Reader) -> object:
    return r.read_value()


def _write_message_id(out: bytearray, value: object) -> None:
    if isinstance(value, str):
        write_string(out, value)
    elif isinstance(value, UUID):
        write_uuid(out, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        write_ulong(out, value)
    elif isinstance(value, bytes | bytearray | memoryview):
        write_binary(out, value)
    else:
        raise refused("message-id", value)


def _read_text(r: Reader) -> object:
    """Read a string or a symbol, since peers confuse them."""
    code = r.peek_code()
    if code not in (0xA1, 0xB1, 0xA3, 0xB3):
        raise DecodeError(f"a text expected, not constructor 0x{code:02x}")
    return r.read_value()


MESSAGE_ID: Final = FieldType("message-id", _read_any, _write_message_id)
TEXT: Final = FieldType("string", _read_text, write_string, in_place=STRING.in_place)
SYMBOLIC: Final = FieldType("symbol", _read_text, write_symbol)


@composite(
    0x73,
    ("message_id", MESSAGE_ID),
    ("user_id", BINARY),
    ("to", TEXT),
    ("subject", TEXT),
    ("reply_to", TEXT),
    ("correlation_id", MESSAGE_ID),
    ("content_type", SYMBOLIC),
    ("content_encoding", SYMBOLIC),
    ("absolute_expiry_time", TIMESTAMP),
    ("creation_time", TIMESTAMP),
    ("group_id", TEXT),
    ("group_sequence", UINT),
    ("reply_to_group_id", TEXT),
)
class Properties(Struct, frozen=True, gc=False):
    """Standard properties, which are immutable in transit (§3.2.4).

    ``message_id`` and ``correlation_id`` keep the type in which they arrived: to echo an id, pass
    on the object that was read.
    """

    message_id: MessageId | None = None
    user_id: bytes | None = None
    to: str | None = None
    subject: str | None = None
    reply_to: str | None = None
    correlation_id: MessageId | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    absolute_expiry_time: Moment | None = None
    creation_time: Moment | None = None
    group_id: str | None = None
    group_sequence: int | None = None
    reply_to_group_id: str | None = None


class Sections(Struct, frozen=True, gc=False):
    """Offsets of the sections in a payload.

    The sections follow each other without gaps: each begins at its field and ends at the next one.
    An absent section is empty. The header begins at 0; the bare message begins at ``properties``
    and ends at ``footer``.
    """

    delivery_annotations: int
    message_annotations: int
    properties: int
    application_properties: int
    body: int
    footer: int
    end: int
    #: Descriptor of the body's sections: 0x75, 0x76, 0x77, or 0 if there is no body.
    body_code: int
    #: Number of sections in the body.
    body_count: int


class Head(Struct, gc=False):
    """Message as an intermediary holds it: fields of the header, and slices of the payload.

    ``rest`` is the bare message with its footer. It is never decoded, and it is the payload itself
    if no section precedes it.
    """

    durable: bool
    priority: int
    #: Time to live in milliseconds, counted from arrival; None means no limit.
    ttl_ms: int | None
    first_acquirer: bool
    delivery_count: int
    #: The encoded sections as received, empty if absent.
    header: bytes
    delivery_annotations: bytes
    message_annotations: bytes
    rest: bytes

    def __repr__(self) -> str:
        return (
            f"Head(durable={self.durable}, priority={self.priority}, ttl_ms={self.ttl_ms}, "
            f"first_acquirer={self.first_acquirer}, delivery_count={self.delivery_count}, "
            f"rest={len(self.rest)} bytes)"
        )


class OtherFields(TypedDict, total=False):
    """Further fields of a message, as arguments of :class:`~amqp_rt.message.Message`."""

    priority: int
    delay_s: float | None
    deliver_at: dt.datetime | None
    first_acquirer: bool
    delivery_count: int
    delivery_annotations: Mapping[Any, Any] | None
    message_annotations: Mapping[Any, Any] | None
    content_encoding: str | None
    absolute_expiry_time: Moment | None
    creation_time: Moment | None
    group_id: str | None
    group_sequence: int | None
    reply_to_group_id: str | None
    footer: Mapping[Any, Any] | None


class MessageFields(OtherFields, total=False):
    """Fields of a message besides its body, as arguments of methods that send one."""

    durable: bool
    ttl_ms: int | None
    ttl_s: float | None
    message_id: MessageId | None
    user_id: bytes | None
    to: str | None
    subject: str | None
    reply_to: str | None
    correlation_id: MessageId | None
    content_type: str | None
    application_properties: Mapping[str, Any] | None


class SectionField(Generic[T]):
    """Field of the header or of the properties, as an attribute of the message."""

    __slots__ = ("_name", "_section")

    def __init__(self, section: str, name: str) -> None:
        self._section = section
        self._name = name

    @overload
    def __get__(self, message: None, owner: type) -> Self: ...

    @overload
    def __get__(self, message: object, owner: type) -> T: ...

    def __get__(self, message: object | None, owner: type) -> Self | T:
        if message is None:
            return self
        return cast("T", getattr(getattr(message, self._section), self._name))

    def __set__(self, message: object, value: T) -> None:
        section = getattr(message, self._section)
        setattr(message, self._section, replace(section, **{self._name: value}))
