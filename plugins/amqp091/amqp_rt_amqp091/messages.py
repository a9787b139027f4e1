"""Conversion of messages between 0-9-1 and AMQP 1.0 (``docs/guides/amqp091.md`` has the table).

The broker stores every message in the form of 1.0. Properties without a field in 1.0 travel in
message annotations whose names begin with ``x-``, so that a message comes out as it was published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from amqp_rt.fronts import (
    DEFAULT_LIMITS,
    Limits,
    Message,
    Symbol,
    Timestamp,
    UByte,
    UInt,
)
from amqp_rt.fronts.headers import (
    AMQP10,
    CORRELATION_ID_TYPE,
    EXPIRES,
    GROUP_ID,
    GROUP_SEQUENCE,
    MESSAGE_ID_TYPE,
    REPLY_TO_GROUP_ID,
    SUBJECT,
    TEXT_FIELDS,
    TO,
    annotation_headers,
    body_sections,
    death_headers,
    number_headers,
    read_sections,
    typed_id,
)
from amqp_rt.fronts.splicing import (
    APP_ID,
    DELIVERY_MODE,
    EXCHANGE,
    EXPIRATION,
    HEADERS,
    PRIORITY,
    ROUTING_KEY,
    TYPE,
    FrontSections,
    split_front,
)
from amqp_rt.message import MessageId

from .methods import BasicProperties
from .values import Decimal, Seconds

_TTL_MAX: Final = 0xFFFF_FFFF
_SHORT_MAX: Final = 255

#: Types with the same meaning in both protocols.
_SIMPLE: Final = (bool, int, float, str, bytes, type(None), UUID)


class Invalid(Exception):
    """A malformed property: reply code 406 (RabbitMQ's choice)."""


def to_message(
    properties: BasicProperties,
    body: bytes,
    *,
    exchange: str,
    routing_key: str,
) -> bytes:
    """Encode a message of 0-9-1 as AMQP 1.0.

    Raises:
        Invalid: The expiration is not a number.
    """
    return _message(properties, body, exchange, routing_key).encode()


def front_of(properties: BasicProperties) -> FrontSections | None:
    """Encode the sections before the body, which serve all destinations and bodies.

    The result is None if they depend on the body.

    Raises:
        Invalid: The expiration is not a number.
    """
    if properties.type == AMQP10:
        return None
    return split_front(_message(properties, b"", "", "").encode_front())


def _message(properties: BasicProperties, body: bytes, exchange: str, routing_key: str) -> Message:
    annotations: dict[Any, Any] = {EXCHANGE: exchange, ROUTING_KEY: routing_key}
    if properties.type is not None:
        annotations[TYPE] = properties.type
    if properties.app_id is not None:
        annotations[APP_ID] = properties.app_id
    headers = properties.headers
    plain: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    message_id: MessageId | None = properties.message_id
    correlation_id: MessageId | None = properties.correlation_id
    if headers is not None:
        others: dict[str, Any] = {}
        for name, value in headers.items():
            if isinstance(value, _SIMPLE) and not name.startswith("x-"):
                plain[name] = value
            elif isinstance(value, Seconds) and value.value <= _SECONDS_MAX:
                plain[name] = Timestamp(value.value * 1000)
            elif name in TEXT_FIELDS and type(value) is str:
                fields[TEXT_FIELDS[name]] = value
            elif name == GROUP_SEQUENCE and type(value) is UInt:
                fields["group_sequence"] = value
            elif name == MESSAGE_ID_TYPE and properties.message_id is not None:
                message_id = typed_id(properties.message_id, value)
                if message_id is properties.message_id:
                    others[name] = to_value(value)
            elif name == CORRELATION_ID_TYPE and properties.correlation_id is not None:
                correlation_id = typed_id(properties.correlation_id, value)
                if correlation_id is properties.correlation_id:
                    others[name] = to_value(value)
            else:
                others[name] = to_value(value)
        if others or not headers:
            annotations[HEADERS] = others
    # No priority means the lowest one in 0-9-1 (RabbitMQ), not the middle one as in 1.0.
    priority = properties.priority or 0
    if properties.priority == 0:
        annotations[PRIORITY] = UByte(0)
    if properties.delivery_mode not in (None, 2):
        annotations[DELIVERY_MODE] = UByte(properties.delivery_mode)
    if properties.expiration is not None:
        annotations[EXPIRATION] = properties.expiration
    timestamp = properties.timestamp
    said, kind = read_sections(body) if properties.type == AMQP10 else (body, None)
    return Message(
        said,
        body_kind=kind,
        durable=properties.delivery_mode == 2,
        priority=priority,
        ttl_ms=_ttl_ms(properties.expiration),
        message_annotations=annotations,
        message_id=message_id,
        user_id=None if properties.user_id is None else _octets(properties.user_id),
        reply_to=properties.reply_to,
        correlation_id=correlation_id,
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        creation_time=None if timestamp is None else min(timestamp, _SECONDS_MAX) * 1000,
        application_properties=plain or None,
        **fields,
    )


_SECONDS_MAX: Final = (1 << 63) // 1000 - 1


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _ttl_ms(expiration: str | None) -> int | None:
    if expiration is None:
        return None
    if not (expiration.isascii() and expiration.isdigit() and len(expiration) <= 20):
        raise Invalid(f"expiration is a number of milliseconds, not {expiration!r:.50}")
    return min(int(expiration), _TTL_MAX)


def to_arguments(table: Mapping[str, object]) -> dict[str, object]:
    """Convert a field table to types of AMQP 1.0, as the broker expects arguments."""
    return {name: to_value(value) for name, value in table.items()}


def to_value(value: object) -> object:
    """Convert a field value to a value of AMQP 1.0."""
    if isinstance(value, Seconds):
        return Timestamp(min(value.value, _SECONDS_MAX) * 1000)
    if isinstance(value, Decimal):
        return {"scale": UByte(value.scale), "value": value.value}
    if isinstance(value, Mapping):
        return {str(name): to_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_value(each) for each in value]
    return value


class Content:
    """A message in the form of 0-9-1."""

    __slots__ = ("body", "exchange", "properties", "redelivered", "routing_key")

    def __init__(
        self,
        properties: BasicProperties,
        body: bytes,
        exchange: str,
        routing_key: str,
        redelivered: bool,
    ) -> None:
        self.properties = properties
        self.body = body
        self.exchange = exchange
        self.routing_key = routing_key
        self.redelivered = redelivered


def from_message(payload: bytes, address: str, limits: Limits = DEFAULT_LIMITS) -> Content:
    """Convert *payload*, a message of AMQP 1.0 from queue *address*, to 0-9-1.

    Raises:
        DecodeError: It is malformed.
    """
    message = Message.decode(payload, limits)
    annotations = message.message_annotations
    header = message.header
    stated = message.properties
    said: BasicProperties = BasicProperties()
    headers: dict[str, object] = {}
    told = annotations.get(HEADERS)
    headers |= _table(message.application_properties)
    if isinstance(told, Mapping):
        headers |= _table(told)
    if header.delivery_count:
        headers.setdefault("x-delivery-count", header.delivery_count)
    said.message_id = _id(stated.message_id, MESSAGE_ID_TYPE, headers)
    said.correlation_id = _id(stated.correlation_id, CORRELATION_ID_TYPE, headers)
    for name, text in (
        (TO, stated.to),
        (SUBJECT, stated.subject),
        (GROUP_ID, stated.group_id),
        (REPLY_TO_GROUP_ID, stated.reply_to_group_id),
    ):
        if text is not None:
            headers.setdefault(name, str(text))
    if stated.group_sequence is not None:
        headers.setdefault(GROUP_SEQUENCE, UInt(stated.group_sequence))
    if isinstance(stated.absolute_expiry_time, int):
        headers.setdefault(EXPIRES, Seconds(max(0, stated.absolute_expiry_time // 1000)))
    headers |= _table(death_headers(annotations))
    for name, value in _table(annotation_headers(annotations)).items():
        headers.setdefault(name, value)
    headers |= _table(number_headers(annotations))
    said.content_type = _short(stated.content_type)
    said.content_encoding = _short(stated.content_encoding)
    said.reply_to = _short(stated.reply_to)
    if stated.user_id is not None:
        said.user_id = _short(stated.user_id.decode("utf-8", "surrogateescape"))
    if isinstance(stated.creation_time, int):
        said.timestamp = max(0, stated.creation_time // 1000)
    said.type = _short(annotations.get(TYPE))
    said.app_id = _short(annotations.get(APP_ID))
    if header.ttl is not None:
        # Dead-lettering removes the ttl, and with it the expiration.
        said.expiration = _short(annotations.get(EXPIRATION, header.ttl))
    foreign = EXCHANGE not in annotations
    if foreign or header.priority or PRIORITY in annotations:
        said.priority = min(header.priority, 255)
    mode = annotations.get(DELIVERY_MODE, 1 if foreign else None)
    if header.durable:
        said.delivery_mode = 2
    elif isinstance(mode, int):
        said.delivery_mode = mode & 0xFF
    if headers or told is not None:
        said.headers = headers
    kind = message.body_kind
    if kind == "data":
        chunks = message.data
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    elif kind is None:
        body = b""
    else:
        # A body other than data is passed on as sections, marked by its type.
        body = body_sections(message)
        said.type = AMQP10
    return Content(
        said,
        body,
        _short(annotations.get(EXCHANGE)) or "",
        _short(annotations.get(ROUTING_KEY, address)) or "",
        header.delivery_count > 0,
    )


def _short(text: object) -> str | None:
    """Convert *text* to a string that fits a short string, cut if it is too long."""
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    octets = _octets(str(text))
    if len(octets) <= _SHORT_MAX:
        return str(text)
    return octets[:_SHORT_MAX].decode("utf-8", "ignore")


def _id(value: object, told_in: str, headers: dict[str, object]) -> str | None:
    """Convert an id to a text; header *told_in* has its type if it is not a string."""
    if value is None or isinstance(value, str):
        return _short(value)
    if isinstance(value, bytes):
        headers.setdefault(told_in, "binary")
        return _short(value.hex())
    headers.setdefault(told_in, "uuid" if isinstance(value, UUID) else "ulong")
    return _short(str(value))


def _table(values: Mapping[Any, Any]) -> dict[str, object]:
    """Convert a map of 1.0 to a field table, without names that are empty or exceed 255 octets."""
    return {
        str(name): _from_value(value)
        for name, value in values.items()
        if 0 < len(_octets(str(name))) <= _SHORT_MAX
    }


def _from_value(value: object) -> object:
    """Convert a value of 1.0 to a field value."""
    if isinstance(value, Timestamp):
        return Seconds(max(0, value // 1000))
    if isinstance(value, Symbol):
        return str(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        if value.keys() == {"scale", "value"} and isinstance(value["scale"], UByte):
            number = value["value"]
            if isinstance(number, int) and -(1 << 31) <= number < 1 << 31:
                return Decimal(int(value["scale"]), int(number))
        return _table(value)
    if isinstance(value, str | bytes | bool | int | float | type(None)):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return str(value)
        return value
    try:
        return [_from_value(each) for each in value]  # type: ignore[attr-defined]
    except TypeError:
        return str(value)
