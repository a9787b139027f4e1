"""Header segments of ``message.transfer`` to AMQP 1.0 (``docs/guides/amqp010.md`` has the table)."""

from __future__ import annotations

from typing import Any, Final

from amqp_rt.fronts import Int, Message, Timestamp, UByte, UInt
from amqp_rt.fronts.headers import AMQP10, CORRELATION_ID_TYPE, REPLY_TO_GROUP_ID, TO, read_sections
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

from .arguments import MESSAGE_SEQUENCE
from .codec import read_entries, split_entries, write_struct
from .conversions import SECONDS_MAX, SECONDS_MIN, is_exact, to_amqp10
from .correlation import correlation_id_of
from .forms import (
    DISCARD_UNROUTABLE,
    IMMEDIATE,
    NO_CONTENT_LENGTH,
    NO_PROPERTIES,
    NO_ROUTING_KEY,
    PROPERTIES_FIRST,
)
from .layouts import (
    DeliveryMode,
    DeliveryProperties,
    FragmentProperties,
    MessageProperties,
    MessageTransfer,
)
from .message_ids import MESSAGE_ID, original_id
from .reply_addresses import address_for, form_of, reply_to_for
from .values import as_text

#: Headers that have a field in 1.0 → its name. A value of another type stays a header.
TEXT_HEADERS: Final = {
    "qpid.subject": "subject",
    "JMSXGroupID": "group_id",
    TO: "to",
    REPLY_TO_GROUP_ID: "reply_to_group_id",
}
GROUP_SEQUENCE_HEADER: Final = "JMSXGroupSeq"
#: Header for an address that ``reply-to`` cannot hold.
REPLY_TO_HEADER: Final = "x-amqp10-reply-to"
#: Header for the property ``type`` of 0-9-1.
TYPE_HEADER: Final = str(TYPE)
_TTL_MAX: Final = 0xFFFF_FFFF


class IncomingHeader:
    """Header segment of a transfer, converted to AMQP 1.0.

    Args:
        octets: The segment; None if there is none.
        exchange: Destination of the transfer.
        number: Number that the exchange gives to the message, which replaces one of the sender; 0 for none.

    Raises:
        CommandFault: The segment is malformed (503), too deep or too large (506).
    """

    def __init__(self, octets: bytes | None, exchange: str, number: int = 0) -> None:
        #: Arguments of the message.
        self.fields: dict[str, Any] = {}
        self.annotations: dict[Any, Any] = {EXCHANGE: exchange, ROUTING_KEY: ""}
        #: Application headers that 1.0 has as application properties, and others.
        self._plain: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._form = 0
        #: Values that 1.0 has no place for.
        self._kept_delivery = DeliveryProperties()
        self._kept = MessageProperties()
        self._kept_headers: dict[str, object] = {}
        self._unknown: list[bytes] = []
        delivery, message = self._split(octets)
        if delivery is None:
            self._form |= NO_ROUTING_KEY
        self._convert_delivery(delivery or DeliveryProperties())
        if message is None:
            self._form |= NO_PROPERTIES
        if number:
            message = message or MessageProperties()
            headers = message.application_headers or {}
            message.application_headers = {**headers, MESSAGE_SEQUENCE: number}
        if message is not None:
            self._convert_message(message)
        self._finish()

    def _split(
        self, octets: bytes | None
    ) -> tuple[DeliveryProperties | None, MessageProperties | None]:
        delivery: DeliveryProperties | None = None
        message: MessageProperties | None = None
        if not octets:
            return None, None
        code = MessageTransfer.CODE
        entries = read_entries(octets, code)
        for entry, (_, encoded) in zip(entries, split_entries(octets, code), strict=True):
            if isinstance(entry, DeliveryProperties):
                delivery = entry
                if message is not None:
                    self._form |= PROPERTIES_FIRST
            elif isinstance(entry, MessageProperties):
                message = entry
            elif not isinstance(entry, FragmentProperties):
                # Fragments end where they are joined: a message of a queue is whole.
                self._unknown.append(encoded)
        return delivery, message

    def _convert_delivery(self, delivery: DeliveryProperties) -> None:
        fields, annotations = self.fields, self.annotations
        annotations[ROUTING_KEY] = delivery.routing_key or ""
        if delivery.routing_key is None:
            self._form |= NO_ROUTING_KEY
        if delivery.discard_unroutable:
            self._form |= DISCARD_UNROUTABLE
        if delivery.immediate:
            self._form |= IMMEDIATE
        if delivery.redelivered:
            fields["delivery_count"] = 1
        # No priority means the lowest one (Qpid), not the middle one as in 1.0.
        fields["priority"] = delivery.priority or 0
        if delivery.priority == 0:
            annotations[PRIORITY] = UByte(0)
        mode = delivery.delivery_mode
        fields["durable"] = mode == DeliveryMode.PERSISTENT
        if mode not in (None, DeliveryMode.PERSISTENT):
            annotations[DELIVERY_MODE] = UByte(mode)
        if delivery.ttl is not None:
            fields["ttl_ms"] = min(delivery.ttl, _TTL_MAX)
            if delivery.ttl > _TTL_MAX:
                annotations[EXPIRATION] = str(delivery.ttl)
        if delivery.timestamp is not None:
            fields["creation_time"] = _moment(delivery.timestamp)
            if not SECONDS_MIN <= delivery.timestamp <= SECONDS_MAX:
                self._kept_delivery.timestamp = delivery.timestamp
        if delivery.expiration is not None:
            fields["absolute_expiry_time"] = _moment(delivery.expiration)
            if not SECONDS_MIN <= delivery.expiration <= SECONDS_MAX:
                self._kept_delivery.expiration = delivery.expiration

    def _convert_message(self, message: MessageProperties) -> None:
        fields = self.fields
        if message.content_length is None:
            self._form |= NO_CONTENT_LENGTH
        fields["user_id"] = message.user_id
        if message.app_id is not None:
            text = as_text(message.app_id)
            self.annotations[APP_ID] = message.app_id if text is None else text
        if message.reply_to is not None:
            address = fields["reply_to"] = address_for(message.reply_to)
            form = form_of(message.reply_to)
            self._form |= form
            if reply_to_for(address, form) != message.reply_to:
                self._kept.reply_to = message.reply_to
        # Symbols of 1.0 are ASCII.
        for name in ("content_type", "content_encoding"):
            text = getattr(message, name)
            if text is not None and not text.isascii():
                setattr(self._kept, name, text)
            else:
                fields[name] = text
        headers = dict(message.application_headers or {})
        fields["message_id"] = message.message_id
        if message.message_id is not None and MESSAGE_ID in headers:
            original = original_id(message.message_id, headers[MESSAGE_ID])
            if original is not None:
                fields["message_id"] = original
                del headers[MESSAGE_ID]
        if message.correlation_id is not None:
            fields["correlation_id"], known = correlation_id_of(
                message.correlation_id, headers.get(CORRELATION_ID_TYPE)
            )
            if known:
                del headers[CORRELATION_ID_TYPE]
        for name, value in headers.items():
            self._convert_header(name, value)
        if message.application_headers == {}:
            self.annotations[HEADERS] = {}

    def _convert_header(self, name: str, value: object) -> None:
        field = TEXT_HEADERS.get(name)
        text = as_text(value)
        if field is not None and text is not None:
            self.fields[field] = text
        elif name == GROUP_SEQUENCE_HEADER and _is_sequence(value):
            self.fields["group_sequence"] = value
            if type(value) is Int or (type(value) is UInt and value > Int.MAX):
                return
            self._kept_headers[name] = value
            return
        elif name == TYPE_HEADER and type(value) is str:
            self.annotations[TYPE] = value
        elif name == REPLY_TO_HEADER and type(value) is str and self._is_reply_address(value):
            self.fields["reply_to"] = value
        else:
            converted = to_amqp10(value)
            if isinstance(converted, dict | list) or name.startswith("x-"):
                self._others[name] = converted
            else:
                self._plain[name] = converted
            if not is_exact(value):
                self._kept_headers[name] = value
            return
        if type(value) is not str:
            self._kept_headers[name] = value

    def _is_reply_address(self, text: str) -> bool:
        return self.fields.get("reply_to") is None and reply_to_for(text) is None

    def _finish(self) -> None:
        annotations = self.annotations
        if self.has_sections:
            # These are for bodies of data (Part 3 §3.2.4).
            for name in ("content_type", "content_encoding"):
                text = self.fields.pop(name, None)
                if text is not None:
                    setattr(self._kept, name, text)
        if self._others:
            annotations[HEADERS] = self._others
        if self._form:
            annotations[FORM] = UInt(self._form)
        if self._kept_headers:
            self._kept.application_headers = self._kept_headers
        known = (self._kept_delivery, self._kept)
        kept = [write_struct(each) for each in known if each != type(each)()]
        if kept or self._unknown:
            annotations[STRUCTS] = b"".join((*kept, *self._unknown))
        self.fields["message_annotations"] = annotations
        self.fields["application_properties"] = self._plain or None

    @property
    def has_sections(self) -> bool:
        """Whether the body consists of sections of 1.0."""
        return self.annotations.get(TYPE) == AMQP10

    def front(self) -> bytes:
        """Return the sections of 1.0 before the body."""
        return Message(b"", **self.fields).encode_front()

    def with_sections(self, body: bytes) -> bytes:
        """Return the message of 1.0 whose sections are in *body*; data if there are none."""
        found, kind = read_sections(body)
        return Message(found, body_kind=kind, **self.fields).encode()


def _is_sequence(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= UInt.MAX


def _moment(seconds: int) -> Timestamp:
    return Timestamp(min(max(seconds, SECONDS_MIN), SECONDS_MAX) * 1000)
