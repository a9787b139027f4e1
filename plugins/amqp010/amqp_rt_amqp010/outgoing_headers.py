"""Header segments of ``message.transfer`` from AMQP 1.0 (``docs/guides/amqp010.md`` has the table).

Messages may be of any sender. What does not fit its field becomes a header, or is left out; a section that is
malformed counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final, TypeVar
from uuid import UUID

from amqp_rt.fronts import AmqpError, Int, Message, UInt, ULong
from amqp_rt.fronts.headers import (
    CORRELATION_ID_TYPE,
    annotation_headers,
    death_headers,
    number_headers,
)
from amqp_rt.fronts.splicing import (
    APP_ID,
    DELIVERY_MODE,
    EXCHANGE,
    EXPIRATION,
    FORM,
    HEADERS,
    PRIORITY,
    ROUTING_KEY,
    STRUCTS,
    TYPE,
)
from amqp_rt.message import Header, Properties

from .codec import read_entries, split_entries, write_entries
from .conversions import fits_str8, from_amqp10, headers_of
from .correlation import octets_of
from .faults import CommandFault
from .forms import (
    DISCARD_UNROUTABLE,
    IMMEDIATE,
    NO_CONTENT_LENGTH,
    NO_PROPERTIES,
    NO_ROUTING_KEY,
    PROPERTIES_FIRST,
)
from .incoming_headers import GROUP_SEQUENCE_HEADER, REPLY_TO_HEADER, TEXT_HEADERS, TYPE_HEADER
from .layouts import Composite, DeliveryMode, DeliveryProperties, MessageProperties, MessageTransfer
from .message_ids import MESSAGE_ID, uuid_for
from .recent import OutgoingHeader
from .reply_addresses import reply_to_for
from .type_codes import SIZE16_MAX

T = TypeVar("T")

#: Highest priority of the specification.
_PRIORITY_MAX: Final = 9
#: Header for a content type beside that of a body in the form of Qpid.
_CONTENT_TYPE: Final = "x-amqp10-content-type"
#: Failed deliveries, where there are more than the flag ``redelivered`` tells.
_DELIVERY_COUNT: Final = "x-delivery-count"
_TTL_MAX: Final = 0xFFFF_FFFF
_ULONG_MAX: Final = ULong.MAX
#: Position of the content-length in encoded message-properties: behind size, code and flags.
_LENGTH_AT: Final = 8
_EMPTY: Final[Mapping[Any, Any]] = {}


class OutgoingFields:
    """Header segment of a message of AMQP 1.0.

    Args:
        message: The message.
        address: Address of its queue: the routing key of a message without one.
        content_type: Content type of the body in 0-10, if that is not the one of the message.
        body_type: Header that tells how to read the body; None for octets and common types.
        wall: Returns the time in seconds since 1970; None to keep the sender's expiration in any case.
    """

    def __init__(
        self,
        message: Message,
        address: str,
        content_type: str | None,
        body_type: str | None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._annotations = _section(lambda: message.message_annotations, _EMPTY)
        self._header = _section(lambda: message.header, Header())
        self._stated = _section(lambda: message.properties, Properties())
        self._application = _section(lambda: message.application_properties, _EMPTY)
        self._address = address
        self._wall = wall
        form = self._annotations.get(FORM)
        self._form = int(form) if isinstance(form, UInt) else 0
        self._kept_delivery = DeliveryProperties()
        self._kept = MessageProperties()
        self._unknown: list[bytes] = []
        self._read_kept()
        self._headers = self._application_headers()
        self._content_type = content_type
        if body_type is not None:
            self._headers[TYPE_HEADER] = body_type

    def _read_kept(self) -> None:
        """Read values that 1.0 has no place for. Any sender may have written them."""
        octets = self._annotations.get(STRUCTS)
        if not isinstance(octets, bytes):
            return
        code = MessageTransfer.CODE
        try:
            entries = read_entries(octets, code)
            encoded = split_entries(octets, code)
        except CommandFault:
            return
        for entry, (_, each) in zip(entries, encoded, strict=True):
            if isinstance(entry, DeliveryProperties):
                self._kept_delivery = entry
            elif isinstance(entry, MessageProperties):
                self._kept = entry
            else:
                self._unknown.append(each)

    def _application_headers(self) -> dict[str, object]:
        annotations, stated = self._annotations, self._stated
        headers = headers_of(self._application)
        told = annotations.get(HEADERS)
        if isinstance(told, Mapping):
            headers |= headers_of(told)
        for name, field in TEXT_HEADERS.items():
            text = getattr(stated, field)
            if text is not None:
                headers[name] = from_amqp10(text)
        sequence = stated.group_sequence
        if sequence is not None:
            headers[GROUP_SEQUENCE_HEADER] = (
                Int(sequence) if sequence <= Int.MAX else UInt(sequence)
            )
        if TYPE in annotations:
            headers[TYPE_HEADER] = from_amqp10(annotations[TYPE])
        if self._kept.application_headers is not None:
            for name, value in self._kept.application_headers.items():
                if name in headers:
                    headers[name] = value
        count = self._header.delivery_count
        if count > 1:
            headers[_DELIVERY_COUNT] = UInt(count)
        headers |= headers_of(death_headers(annotations))
        for name, value in headers_of(annotation_headers(annotations)).items():
            headers.setdefault(name, value)
        headers |= headers_of(number_headers(annotations))
        return headers

    @property
    def expires(self) -> bool:
        """Whether the message has a time to live."""
        return self._header.ttl is not None

    def delivery_properties(self) -> DeliveryProperties:
        """Return the delivery-properties."""
        annotations, header, form, stated = (
            self._annotations,
            self._header,
            self._form,
            self._stated,
        )
        kept = self._kept_delivery
        ttl = self._ttl()
        foreign = EXCHANGE not in annotations
        exchange = str(annotations.get(EXCHANGE, ""))
        key = str(annotations.get(ROUTING_KEY, self._address))
        mode = annotations.get(DELIVERY_MODE, 1 if foreign else None)
        stated_priority = foreign or header.priority or PRIORITY in annotations
        return DeliveryProperties(
            discard_unroutable=form & DISCARD_UNROUTABLE != 0,
            immediate=form & IMMEDIATE != 0,
            redelivered=header.delivery_count > 0,
            priority=min(header.priority, _PRIORITY_MAX) if stated_priority else None,
            delivery_mode=DeliveryMode.PERSISTENT
            if header.durable
            else (mode & 0xFF if isinstance(mode, int) else None),
            ttl=ttl,
            timestamp=_seconds(stated.creation_time, kept.timestamp),
            expiration=self._expiration(ttl),
            exchange=exchange if fits_str8(exchange) else None,
            routing_key=None if (form & NO_ROUTING_KEY and not key) or not fits_str8(key) else key,
        )

    def _ttl(self) -> int | None:
        """Return the time left, in milliseconds."""
        left = self._header.ttl
        if left is None:
            return None
        first = self._annotations.get(EXPIRATION)
        if (
            not isinstance(first, str)
            or not _is_number(first)
            or not _TTL_MAX < int(first) <= _ULONG_MAX
        ):
            return left
        # 1.0 counts down from the most that its field holds.
        return int(first) - (_TTL_MAX - left)

    def _expiration(self, ttl: int | None) -> int | None:
        """Return when the message expires, in seconds since 1970.

        The broker computes that of a message with a *ttl*, whatever its sender has stated
        (0-10 §delivery-properties.expiration). Rounded up, so that no client drops it too early.
        """
        if ttl is None or self._wall is None:
            stated = self._stated.absolute_expiry_time
            return _seconds(stated, self._kept_delivery.expiration)
        return ceil(self._wall() + ttl / 1000)

    def message_properties(self) -> MessageProperties:
        """Return the message-properties, without the length of the body."""
        stated, headers = self._stated, self._headers
        found = MessageProperties()
        if stated.message_id is not None:
            found.message_id = uuid_for(stated.message_id)
            if not isinstance(stated.message_id, UUID):
                kind = stated.message_id
                headers[MESSAGE_ID] = ULong(kind) if isinstance(kind, int) else from_amqp10(kind)
        if stated.correlation_id is not None:
            found.correlation_id, name = octets_of(stated.correlation_id)
            if name is not None:
                headers[CORRELATION_ID_TYPE] = name
        self._set_reply_to(found)
        self._set_content(found)
        if stated.user_id is not None and len(stated.user_id) <= SIZE16_MAX:
            found.user_id = stated.user_id
        found.app_id = self._app_id()
        if headers or isinstance(self._annotations.get(HEADERS), Mapping):
            found.application_headers = headers
        return found

    def _set_reply_to(self, found: MessageProperties) -> None:
        address = self._stated.reply_to
        if address is None:
            return
        found.reply_to = self._kept.reply_to or reply_to_for(str(address), self._form)
        if found.reply_to is None:
            self._headers.setdefault(REPLY_TO_HEADER, from_amqp10(str(address)))

    def _set_content(self, found: MessageProperties) -> None:
        stated, kept, forced = self._stated, self._kept, self._content_type
        kind = kept.content_type if stated.content_type is None else stated.content_type
        if forced is not None:
            if kind is not None and kind != forced:
                self._headers.setdefault(_CONTENT_TYPE, from_amqp10(kind))
            kind = forced
        if kind is not None and fits_str8(kind):
            found.content_type = str(kind)
        encoding = stated.content_encoding
        if encoding is None:
            encoding = kept.content_encoding
        if encoding is not None and fits_str8(encoding):
            found.content_encoding = str(encoding)

    def _app_id(self) -> bytes | None:
        found = self._annotations.get(APP_ID)
        octets = found.encode() if isinstance(found, str) else found
        return octets if isinstance(octets, bytes) and len(octets) <= SIZE16_MAX else None

    def encode(self) -> OutgoingHeader:
        """Return the header segment, which has a place for the length of the body."""
        delivery = self.delivery_properties()
        message = self.message_properties()
        form = self._form
        if form & NO_PROPERTIES and message == MessageProperties():
            return OutgoingHeader(self._written([delivery]), None)
        if form & NO_CONTENT_LENGTH:
            order: list[Composite] = [delivery, message]
            if form & PROPERTIES_FIRST:
                order.reverse()
            return OutgoingHeader(self._written(order), None)
        message.content_length = 0
        if form & PROPERTIES_FIRST:
            at = _LENGTH_AT
            octets = self._written([message, delivery])
        else:
            at = len(self._written([delivery])) - sum(map(len, self._unknown)) + _LENGTH_AT
            octets = self._written([delivery, message])
        return OutgoingHeader(octets[:at], octets[at + 8 :])

    def _written(self, structs: list[Composite]) -> bytes:
        return b"".join((write_entries(structs), *self._unknown))


def _section(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except AmqpError:
        return default


def _seconds(moment: object, kept: int | None) -> int | None:
    """Return *moment* of 1.0 in seconds; *kept* if 1.0 could not hold it."""
    if not isinstance(moment, int):
        return None
    return moment // 1000 if kept is None else kept


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20
