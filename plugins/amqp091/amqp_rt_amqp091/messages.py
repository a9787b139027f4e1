"""Conversion of messages between 0-9-1 and AMQP 1.0 (``docs/guides/amqp091.md`` has the table).

The broker stores every message in the form of 1.0. Properties without a field in 1.0 travel in
message annotations whose names begin with ``x-``, so that a message comes out as it was published.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct as Layout
from typing import Any, Final, NamedTuple
from uuid import UUID

from amqp_rt.fronts import (
    DEFAULT_LIMITS,
    AmqpError,
    Limits,
    Message,
    Symbol,
    Timestamp,
    UByte,
    UInt,
)

from .methods import BasicProperties
from .values import Decimal, Seconds

#: Message annotations with the exchange and routing key of a message, named as in RabbitMQ.
EXCHANGE: Final = Symbol("x-exchange")
ROUTING_KEY: Final = Symbol("x-routing-key")
#: The property ``type``, which has no field in 1.0.
TYPE: Final = Symbol("x-basic-type")
#: The property ``app-id``, which has no field in 1.0.
APP_ID: Final = Symbol("x-basic-app-id")
#: Headers that application-properties cannot hold: tables, arrays, decimals, and names in ``x-``.
HEADERS: Final = Symbol("x-basic-headers")
#: Present if the priority was set to 0, and if a delivery-mode other than 2 was set; without them
#: the properties were absent.
PRIORITY: Final = Symbol("x-basic-priority")
DELIVERY_MODE: Final = Symbol("x-basic-delivery-mode")
#: The expiration as published: the ttl of 1.0 counts down on the way.
EXPIRATION: Final = Symbol("x-basic-expiration")

#: ``type`` of a message whose body consists of sections of 1.0, since the body is not data.
AMQP10: Final = "amqp-1.0"

#: Dead-lettering history, oldest first; and its reasons in RabbitMQ's terms.
_HISTORY: Final = Symbol("x-opt-dead-letter-history")
_REASONS: Final = {
    "overflow": "maxlen",
    "max-deliveries": "delivery_limit",
    "max-attempts": "delivery_limit",
}

#: Headers for properties of 1.0 without a field in 0-9-1.
_TO: Final = "x-amqp10-to"
_SUBJECT: Final = "x-amqp10-subject"
_GROUP_ID: Final = "x-amqp10-group-id"
_GROUP_SEQUENCE: Final = "x-amqp10-group-sequence"
_REPLY_TO_GROUP_ID: Final = "x-amqp10-reply-to-group-id"
_EXPIRES: Final = "x-amqp10-absolute-expiry-time"
_MESSAGE_ID_TYPE: Final = "x-message-id-type"
_CORRELATION_ID_TYPE: Final = "x-correlation-id-type"
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


class Front(NamedTuple):
    """The sections before the body of an AMQP 1.0 message, without exchange and routing key."""

    header: bytes
    #: Message annotations other than exchange and routing key: number of keys and values, and their
    #: octets.
    more: int
    others: bytes
    rest: bytes


def place_of(exchange: bytes, routing_key: bytes) -> bytes:
    """Encode the annotations for exchange and routing key, given as encoded short strings."""
    return _EXCHANGE_IS + exchange + _KEY_IS + routing_key


def front_of(properties: BasicProperties) -> Front | None:
    """Encode the sections before the body, which serve all destinations and bodies.

    The result is None if they depend on the body.

    Raises:
        Invalid: The expiration is not a number.
    """
    if properties.type == AMQP10:
        return None
    front = _message(properties, b"", "", "").encode_front()
    found = _annotations(front)
    if found is None:
        return None
    at, key_end, section_end = found
    start = 6 if front[at + 3] == _MAP8 else 12
    count = front[at + 5] if start == 6 else int.from_bytes(front[at + 8 : at + 12], "big")
    return Front(front[:at], count - 4, front[key_end:section_end], front[section_end:])


def joined(front: Front, place: bytes, body: bytes) -> bytes:
    """Assemble an AMQP 1.0 message, with the same octets as its encoder (Part 3 §3.2)."""
    annotations = place + front.others
    count = 4 + front.more
    size = len(annotations) + 1
    if size < 256 and count < 256:
        head = bytes((0, 0x53, 0x72, _MAP8, size, count))
    else:
        head = b"\0\x53\x72\xd1" + _SIZE_AND_COUNT.pack(size + 3, count)
    size = len(body)
    if size < 256:
        data = bytes((0, 0x53, _DATA, 0xA0, size))
    else:
        data = b"\0\x53\x75\xb0" + size.to_bytes(4, "big")
    return b"".join((front.header, head, annotations, front.rest, data, body))


class Parts(NamedTuple):
    """An AMQP 1.0 message from a queue, in pieces that other messages may share."""

    #: Cache key for all sections before the body, but for *place*.
    key: tuple[object, ...]
    #: Exchange and routing key as short strings, None if they are part of *key*.
    place: bytes | None
    body: bytes


def parts_of(payload: bytes, address: str) -> Parts | None:
    """Split a message from queue *address* that ends with its only data section.

    The result is None for all other messages, malformed ones included.
    """
    at, end = 0, len(payload)
    found: tuple[int, int, int] | None = None
    try:
        while True:
            kind = payload[at : at + 4]
            code = _SIZES8.get(kind)
            if code is not None:
                after = at + 5 + payload[at + 4]
            elif kind in _SIZES32:
                code = kind[2]
                after = at + 8 + int.from_bytes(payload[at + 4 : at + 8], "big")
            else:
                return None
            if code == _DATA:
                break
            if code == _ANNOTATIONS:
                found = _annotations(payload, at)
            at = after
        if after != end:
            return None
        body = payload[at + (5 if kind[3] == 0xA0 else 8) :]
        if found is None:
            return Parts((address, payload[:at]), None, body)
        begin, key_end, section_end = found
        others = payload[key_end:section_end]
        if _HISTORY_OCTETS in others:
            # The header ``x-death`` contains exchange and routing key, so they belong to the cache
            # key.
            return Parts((address, payload[:at]), None, body)
        exchange = begin + (19 if payload[begin + 3] == _MAP8 else 25)
        routing = exchange + 1 + payload[exchange] + len(_KEY_IS)
        return Parts(
            (payload[:begin], others, payload[section_end:at]),
            payload[exchange : routing - len(_KEY_IS)] + payload[routing:key_end],
            body,
        )
    except IndexError:
        return None


def _annotations(payload: bytes, at: int | None = None) -> tuple[int, int, int] | None:
    """Find message annotations that begin with exchange and routing key.

    They are searched at *at*, or after the header if that is None.

    Returns:
        The start of the section, the end of the routing key, and the end of the section; None if
            the section does not begin so.
    """
    if at is None:
        # After the header, if there is one.
        at = 5 + payload[4] if payload[:4] == b"\0\x53\x70\xc0" else 0
    if payload[at : at + 4] == b"\0\x53\x72\xc1":
        start, section_end = at + 6, at + 5 + payload[at + 4]
    else:
        start, section_end = at + 12, at + 8 + int.from_bytes(payload[at + 4 : at + 8], "big")
    exchange = start + len(_EXCHANGE_IS)
    if payload[start:exchange] != _EXCHANGE_IS:
        return None
    routing = exchange + 1 + payload[exchange]
    key = routing + len(_KEY_IS)
    if payload[routing:key] != _KEY_IS:
        return None
    return at, key + 1 + payload[key], section_end


_DATA: Final = 0x75
_ANNOTATIONS: Final = 0x72
_MAP8: Final = 0xC1
_SIZE_AND_COUNT: Final = Layout(">II")
#: The annotations that each message of 0-9-1 begins with, up to the size of their values.
_EXCHANGE_IS: Final = b"\xa3\x0ax-exchange\xa1"
_KEY_IS: Final = b"\xa3\x0dx-routing-key\xa1"
_HISTORY_OCTETS: Final = str(_HISTORY).encode()
#: Codes of the sections, with the constructors for a size of 8 and of 32 bits: lists, maps and
#: binaries.
_FORMS: Final = [
    *((0x70, 0xC0, 0xD0), (0x71, 0xC1, 0xD1), (0x72, 0xC1, 0xD1), (0x73, 0xC0, 0xD0)),
    *((0x74, 0xC1, 0xD1), (0x75, 0xA0, 0xB0)),
]
_SIZES8: Final = {bytes((0, 0x53, code, short)): code for code, short, _ in _FORMS}
_SIZES32: Final = frozenset(bytes((0, 0x53, code, wide)) for code, _, wide in _FORMS)


def _message(properties: BasicProperties, body: bytes, exchange: str, routing_key: str) -> Message:
    annotations: dict[Any, Any] = {EXCHANGE: exchange, ROUTING_KEY: routing_key}
    if properties.type is not None:
        annotations[TYPE] = properties.type
    if properties.app_id is not None:
        annotations[APP_ID] = properties.app_id
    headers = properties.headers
    plain: dict[str, Any] = {}
    if headers is not None:
        others: dict[str, Any] = {}
        for name, value in headers.items():
            if isinstance(value, _SIMPLE) and not name.startswith("x-"):
                plain[name] = value
            elif isinstance(value, Seconds) and value.value <= _SECONDS_MAX:
                plain[name] = Timestamp(value.value * 1000)
            else:
                others[name] = to_value(value)
        if others or not plain:
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
    said, kind = _sections(body) if properties.type == AMQP10 else (body, None)
    return Message(
        said,
        body_kind=kind,
        durable=properties.delivery_mode == 2,
        priority=priority,
        ttl_ms=_ttl_ms(properties.expiration),
        message_annotations=annotations,
        message_id=properties.message_id,
        user_id=None if properties.user_id is None else _octets(properties.user_id),
        reply_to=properties.reply_to,
        correlation_id=properties.correlation_id,
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        creation_time=None if timestamp is None else min(timestamp, _SECONDS_MAX) * 1000,
        application_properties=plain or None,
    )


_SECONDS_MAX: Final = (1 << 63) // 1000 - 1


def _sections(body: bytes) -> tuple[Any, Any]:
    """Decode a *body* of type ``amqp-1.0``: return the body of 1.0 and its kind.

    If *body* is not exactly such sections, return it unchanged as data, with the kind None.
    """
    try:
        found = Message.decode(body)
        alone = Message(found.body, body_kind=found.body_kind)
    except AmqpError:
        return body, None
    if found.body_kind is None or found.footer or found.encode_front() != alone.encode_front():
        return body, None
    return found.body, found.body_kind


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
    said.message_id = _id(stated.message_id, _MESSAGE_ID_TYPE, headers)
    said.correlation_id = _id(stated.correlation_id, _CORRELATION_ID_TYPE, headers)
    for name, text in (
        (_TO, stated.to),
        (_SUBJECT, stated.subject),
        (_GROUP_ID, stated.group_id),
        (_REPLY_TO_GROUP_ID, stated.reply_to_group_id),
    ):
        if text is not None:
            headers.setdefault(name, str(text))
    if stated.group_sequence is not None:
        headers.setdefault(_GROUP_SEQUENCE, UInt(stated.group_sequence))
    if isinstance(stated.absolute_expiry_time, int):
        headers.setdefault(_EXPIRES, Seconds(max(0, stated.absolute_expiry_time // 1000)))
    history = annotations.get(_HISTORY)
    if isinstance(history, list):
        _tell_deaths(
            history,
            str(annotations.get(EXCHANGE, "")),
            str(annotations.get(ROUTING_KEY, "")),
            headers,
        )
    _add_annotations(annotations, headers)
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
        body = _body_sections(message)
        said.type = AMQP10
    return Content(
        said,
        body,
        _short(annotations.get(EXCHANGE)) or "",
        _short(annotations.get(ROUTING_KEY, address)) or "",
        header.delivery_count > 0,
    )


def _body_sections(message: Message) -> bytes:
    """Encode the body alone, as sections."""
    return Message(message.body, body_kind=message.body_kind).encode()


_OURS: Final = frozenset(
    (EXCHANGE, ROUTING_KEY, TYPE, APP_ID, HEADERS, PRIORITY, DELIVERY_MODE, EXPIRATION)
)


def _add_annotations(annotations: Mapping[Any, Any], headers: dict[str, object]) -> None:
    """Add other annotations, such as a sender's or dead-letter reasons, as headers."""
    others = {
        name: value
        for name, value in annotations.items()
        if isinstance(name, str) and name.startswith("x-") and name not in _OURS
    }
    for name, value in _table(others).items():
        headers.setdefault(name, value)


def _tell_deaths(history: list[Any], exchange: str, key: str, headers: dict[str, object]) -> None:
    """Add ``x-death`` and related headers in RabbitMQ's form.

    There is an entry for each queue and reason with its count, the latest first.
    """
    deaths: dict[tuple[str, str], dict[str, object]] = {}
    for each in history:
        if not isinstance(each, Mapping):
            continue
        queue = str(each.get("source", ""))
        reason = str(each.get("reason", ""))
        reason = _REASONS.get(reason, reason)
        before = deaths.pop((queue, reason), None)
        count = before["count"] if before is not None else 0
        deaths[queue, reason] = {
            "count": int(count) + 1 if isinstance(count, int) else 1,
            "queue": queue,
            "reason": reason,
            "time": before["time"] if before is not None else _from_value(each.get("time")),
            "exchange": exchange,
            "routing-keys": [key],
        }
    if not deaths:
        return
    headers["x-death"] = list(reversed(deaths.values()))
    for name, (queue, reason) in (("first", next(iter(deaths))), ("last", next(reversed(deaths)))):
        headers[f"x-{name}-death-queue"] = queue
        headers[f"x-{name}-death-reason"] = reason
        headers[f"x-{name}-death-exchange"] = exchange


def _short(text: object) -> str | None:
    """Convert *text* to a string that fits a short string, cut if it is too long."""
    if text is None:
        return None
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
