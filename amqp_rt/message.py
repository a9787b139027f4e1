"""Messages of format 0 and their sections (Part 3 §3.2).

A received message keeps the bytes in which it came. Its sections are found by their sizes and decoded
on first use; unchanged sections are sent on octet for octet. :class:`Message` is for applications;
an intermediary that only passes messages on needs no more than :func:`walk_head`.

Links that carry another ``message-format`` than 0 hand out payloads as bytes, since sections exist in
format 0 only. Malformed bytes raise ``DecodeError`` and nothing else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import (
    Any,
    Final,
    Literal,
    Self,
    TypeAlias,
    Unpack,
    cast,
)
from uuid import UUID

from msgspec.structs import astuple

from .codec.composites import fields_of
from .codec.primitives import Reader, refused, shown, write_list, write_value
from .codec.section_types import (
    Head,
    Header,
    MessageFields,
    MessageId,
    Moment,
    OtherFields,
    Properties,
    SectionField,
    Sections,
)
from .codec.sections import (
    AMQP_SEQUENCE,
    AMQP_VALUE,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    MESSAGE_ANNOTATIONS,
    SECTION_NAMES,
    SECTION_OPENINGS,
    read_annotation_map,
    read_annotations,
    read_application_properties,
    read_data,
    read_header_fields,
    read_properties,
    read_section_code,
    reencode,
    walk,
    walk_front,
    walk_head,
    write_annotations,
    write_header,
)
from .codec.whole_messages import (
    check_header,
    data_octets,
    write_body_data,
    write_data,
    write_front,
)
from .errors import DecodeError, EncodeError, LocalProtocolError
from .limits import DEFAULT_LIMITS, SECONDS_MAX, Limits
from .outcomes import Error
from .values import Map, Symbol, Timestamp

__all__ = [
    "JOIN_MAX",
    "MESSAGE_FORMAT",
    "BodyKind",
    "Head",
    "Header",
    "Message",
    "MessageFields",
    "MessageId",
    "Moment",
    "OtherFields",
    "Properties",
    "Sections",
    "Sequence",
    "encode_delivery_annotations",
    "read_annotations",
    "read_data",
    "reencode",
    "walk",
    "walk_head",
    "write_data",
    "write_header",
]

#: Message annotations with which a sender requests a later delivery, as Artemis and this broker read them.
_DELAY: Final = Symbol("x-opt-delivery-delay")
_TIME: Final = Symbol("x-opt-delivery-time")

#: The ``message-format`` that this module implements (§3.2.16).
MESSAGE_FORMAT: Final = 0

#: The kinds of body: data sections, amqp-sequence sections, or one amqp-value section.
BodyKind: TypeAlias = Literal["data", "sequence", "value"]

#: Buffers of at least this size are passed on separately instead of being joined with others.
JOIN_MAX: Final = 16 * 1024

_NO_HEADER: Final = Header()
_NO_PROPERTIES: Final = Properties()
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class Sequence(list[Any]):
    """Body of amqp-sequence sections: the elements of all of them (§3.2.7).

    ``Message(Sequence([1, 2]))`` is sent with one such section; a plain list would be one
    amqp-value.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Sequence({list.__repr__(self)})"


# --- Message -----------------------------------------------------------------------------------

_OWN_HEADER: Final = 1
_OWN_DELIVERY_ANNOTATIONS: Final = 2
_OWN_MESSAGE_ANNOTATIONS: Final = 4
_OWN_PROPERTIES: Final = 8
_OWN_APPLICATION_PROPERTIES: Final = 16
_OWN_BODY: Final = 32
_OWN_FOOTER: Final = 64
_OWN_ALL: Final = 127

_BUILT: Final = Sections(0, 0, 0, 0, 0, 0, 0, 0, 0)
_UNREAD: Final[Any] = object()


class Message:
    """A message of format 0 (§3.2).

    *body* is sent as a data section if it is bytes, as an amqp-sequence section if it is a
    :class:`Sequence`, and as one amqp-value otherwise. *body_kind* selects explicitly: ``"data"``
    takes bytes, or a list of them for several data sections, ``"sequence"`` any list, and
    ``"value"`` anything, bytes too. *ttl_s* is *ttl_ms* in seconds. :class:`OtherFields` lists the further arguments,
    *fields*; among them *delay_s* and *deliver_at* are message annotations that ask a queue for a later delivery.

    A message made by :meth:`decode` keeps its bytes, and its bare message (properties,
    application-properties and body) is immutable as the standard demands: assigning to any of it
    raises ``LocalProtocolError``, the maps are read-only, and :meth:`replace` makes a changed copy.
    Header, annotations and footer may be changed on the way, by assigning to the attributes.
    Sections that were not assigned to are sent again octet for octet.

    ``header`` and ``properties`` are the sections as objects, with the same attributes as the
    message; reading several of them is cheaper that way.
    """

    __slots__ = (
        "_application_properties",
        "_body",
        "_chunks",
        "_delivery_annotations",
        "_footer",
        "_header",
        "_kind",
        "_limits",
        "_message_annotations",
        "_own",
        "_payload",
        "_properties",
        "_received",
        "_sections",
    )
    _header: Header | None
    _delivery_annotations: Mapping[Any, Any] | None
    _message_annotations: Mapping[Any, Any] | None
    _properties: Properties | None
    _application_properties: Mapping[str, Any] | None
    _footer: Mapping[Any, Any] | None
    #: The body as given or decoded, or ``_UNREAD``.
    _body: Any
    #: Contents of the data sections, once read.
    _chunks: tuple[bytes, ...] | None
    _kind: BodyKind | None
    #: Bit set of the sections that have to be encoded; the others are in the payload.
    _own: int

    durable = SectionField[bool]("header", "durable")
    priority = SectionField[int]("header", "priority")
    #: Time to live in milliseconds, counted from arrival.
    ttl_ms = SectionField["int | None"]("header", "ttl")
    first_acquirer = SectionField[bool]("header", "first_acquirer")
    delivery_count = SectionField[int]("header", "delivery_count")

    message_id = SectionField["MessageId | None"]("properties", "message_id")
    user_id = SectionField["bytes | None"]("properties", "user_id")
    to = SectionField["str | None"]("properties", "to")
    subject = SectionField["str | None"]("properties", "subject")
    reply_to = SectionField["str | None"]("properties", "reply_to")
    correlation_id = SectionField["MessageId | None"]("properties", "correlation_id")
    content_type = SectionField["str | None"]("properties", "content_type")
    content_encoding = SectionField["str | None"]("properties", "content_encoding")
    absolute_expiry_time = SectionField["Moment | None"]("properties", "absolute_expiry_time")
    creation_time = SectionField["Moment | None"]("properties", "creation_time")
    group_id = SectionField["str | None"]("properties", "group_id")
    group_sequence = SectionField["int | None"]("properties", "group_sequence")
    reply_to_group_id = SectionField["str | None"]("properties", "reply_to_group_id")

    # Python looks up the default of each parameter that is not given: those that are seldom given are none.
    def __init__(
        self,
        body: object = None,
        *,
        body_kind: BodyKind | None = None,
        durable: bool = False,
        ttl_ms: int | None = None,
        ttl_s: float | None = None,
        message_id: MessageId | None = None,
        user_id: bytes | None = None,
        to: str | None = None,
        subject: str | None = None,
        reply_to: str | None = None,
        correlation_id: MessageId | None = None,
        content_type: str | None = None,
        application_properties: Mapping[str, Any] | None = None,
        **fields: Unpack[OtherFields],
    ) -> None:
        if ttl_s is not None:
            if ttl_ms is not None:
                raise TypeError("give ttl_ms or ttl_s, not both")
            ttl_ms = _milliseconds(ttl_s)
        self._payload = b""
        self._sections = _BUILT
        self._limits = DEFAULT_LIMITS
        self._own = _OWN_ALL
        self._received = False
        self._header = Header(durable, 4, ttl_ms) if durable or ttl_ms is not None else None
        self._delivery_annotations = None
        self._message_annotations = None
        self._properties = Properties(
            message_id, user_id, to, subject, reply_to, correlation_id, content_type
        )
        self._application_properties = application_properties
        self._footer = None
        if fields:
            self._take_fields(cast("dict[str, Any]", fields))
        if type(body) is bytes and (body_kind is None or body_kind == "data"):
            self._body = body
            self._chunks = (body,)
            self._kind = "data"
        else:
            self._set_body(body, body_kind)

    def _take_fields(self, fields: dict[str, Any]) -> None:
        """Set all *fields*, which are removed."""
        take = fields.pop
        if not _HEADER_FIELDS.isdisjoint(fields):
            header = self._header or _NO_HEADER
            priority, first_acquirer = take("priority", 4), take("first_acquirer", False)
            count = take("delivery_count", 0)
            if priority != 4 or first_acquirer or count:
                self._header = Header(header.durable, priority, header.ttl, first_acquirer, count)
        if not _PROPERTY_NAMES.issuperset(fields):
            self._delivery_annotations = take("delivery_annotations", None)
            self._message_annotations = take("message_annotations", None)
            self._footer = take("footer", None)
            delay_s, deliver_at = take("delay_s", None), take("deliver_at", None)
            if delay_s is not None:
                self.delay_s = delay_s
            if deliver_at is not None:
                self.deliver_at = deliver_at
            if unknown := fields.keys() - _PROPERTY_NAMES:
                raise TypeError(f"a message has no field {', '.join(sorted(unknown))}")
        if fields:
            self._properties = Properties(*astuple(self.properties)[:_GIVEN], **fields)

    @classmethod
    def decode(cls, payload: bytes, limits: Limits = DEFAULT_LIMITS) -> Self:
        """Return the message in *payload*. Its sections are found now and decoded on first use.

        Raises:
            DecodeError: The sections are not those of a message (:func:`walk`). Malformed content of
                a section raises on first use instead.
        """
        self = cls.__new__(cls)
        if type(payload) is not bytes:
            payload = bytes(payload)
        self._payload = payload
        self._sections = walk(payload, limits)
        self._limits = limits
        self._own = 0
        self._received = True
        self._header = None
        self._delivery_annotations = None
        self._message_annotations = None
        self._properties = None
        self._application_properties = None
        self._body = _UNREAD
        self._chunks = None
        self._kind = _KINDS[self._sections.body_code]
        self._footer = None
        return self

    # --- Sections ---

    @property
    def header(self) -> Header:
        """The header; the defaults if the section is absent (§3.2.1)."""
        header = self._header
        if header is None:
            end = self._sections.delivery_annotations
            header = _NO_HEADER
            if end:
                header = Header(*read_header_fields(self._payload, end, self._limits))
            self._header = header
        return header

    @header.setter
    def header(self, header: Header) -> None:
        self._header = header
        self._own |= _OWN_HEADER

    @property
    def delivery_annotations(self) -> Mapping[Any, Any]:
        """Annotations from the sending peer for the receiving one, for one hop (§3.2.2)."""
        found = self._delivery_annotations
        if found is None:
            sections = self._sections
            found = self._delivery_annotations = self._annotations(
                _OWN_DELIVERY_ANNOTATIONS,
                DELIVERY_ANNOTATIONS,
                sections.delivery_annotations,
                sections.message_annotations,
            )
        return found

    @delivery_annotations.setter
    def delivery_annotations(self, annotations: Mapping[Any, Any] | None) -> None:
        self._delivery_annotations = annotations
        self._own |= _OWN_DELIVERY_ANNOTATIONS

    @property
    def message_annotations(self) -> Mapping[Any, Any]:
        """Annotations for the infrastructure, at every hop (§3.2.3)."""
        found = self._message_annotations
        if found is None:
            sections = self._sections
            found = self._message_annotations = self._annotations(
                _OWN_MESSAGE_ANNOTATIONS,
                MESSAGE_ANNOTATIONS,
                sections.message_annotations,
                sections.properties,
            )
        return found

    @message_annotations.setter
    def message_annotations(self, annotations: Mapping[Any, Any] | None) -> None:
        self._message_annotations = annotations
        self._own |= _OWN_MESSAGE_ANNOTATIONS

    @property
    def properties(self) -> Properties:
        """The standard properties; all None if the section is absent (§3.2.4)."""
        found = self._properties
        if found is None:
            at = self._sections.properties
            end = self._sections.application_properties
            found = _NO_PROPERTIES
            if at < end:
                found = read_properties(self._payload, at, end, self._limits)
            self._properties = found
        return found

    @properties.setter
    def properties(self, properties: Properties) -> None:
        self._refuse_if_received("properties")
        self._properties = properties
        self._own |= _OWN_PROPERTIES

    @property
    def application_properties(self) -> Mapping[str, Any]:
        """Properties set by the application, used in filters and routing too (§3.2.5)."""
        found = self._application_properties
        if found is None:
            at = self._sections.application_properties
            end = self._sections.body
            if self._own & _OWN_APPLICATION_PROPERTIES:
                found = {}
            elif at == end:
                found = _NOTHING
            else:
                found = MappingProxyType(
                    read_application_properties(self._payload, at, end, self._limits)
                )
            self._application_properties = found
        return found

    @application_properties.setter
    def application_properties(self, properties: Mapping[str, Any] | None) -> None:
        self._refuse_if_received("application-properties")
        self._application_properties = properties
        self._own |= _OWN_APPLICATION_PROPERTIES

    @property
    def footer(self) -> Mapping[Any, Any]:
        """Entries computed from the whole bare message, such as signatures (§3.2.9)."""
        found = self._footer
        if found is None:
            sections = self._sections
            found = self._footer = self._annotations(
                _OWN_FOOTER, FOOTER, sections.footer, sections.end
            )
        return found

    @footer.setter
    def footer(self, footer: Mapping[Any, Any] | None) -> None:
        self._footer = footer
        self._own |= _OWN_FOOTER

    @property
    def body_kind(self) -> BodyKind | None:
        """Type of the sections of the body; None if a peer sent a message without a body."""
        return self._kind

    @property
    def body(self) -> Any:
        """Bytes of the data sections, elements as a :class:`Sequence`, or the one value."""
        body = self._body
        if body is _UNREAD:
            sections = self._sections
            at = sections.body
            payload = self._payload
            if (
                sections.body_count == 1
                and sections.body_code == DATA
                and payload[at + 1] == 0x53
                and self._chunks is None
            ):
                # The walk has checked that all of the body is present.
                begin = at + 5 if payload[at + 3] == 0xA0 else at + 8
                body = payload[begin : sections.footer]
            else:
                body = self._read_body()
            self._body = body
        return body

    @body.setter
    def body(self, body: object) -> None:
        self._refuse_if_received("body")
        self._set_body(body, None)

    @property
    def data(self) -> tuple[bytes, ...]:
        """Contents of the data sections; empty for other kinds of body."""
        if self._kind != "data":
            return ()
        chunks = self._chunks
        if chunks is None:
            one = self._sections.body_count == 1
            chunks = self._chunks = (self.body,) if one else self._read_chunks()
        return chunks

    @property
    def ttl_s(self) -> float | None:
        """``ttl_ms`` in seconds."""
        ttl = self.header.ttl
        return None if ttl is None else ttl / 1000

    @ttl_s.setter
    def ttl_s(self, seconds: float | None) -> None:
        self.ttl_ms = None if seconds is None else _milliseconds(seconds)

    @property
    def delay_s(self) -> float | None:
        """Seconds after its arrival before which a queue does not deliver the message; None for none.

        It is the message annotation ``x-opt-delivery-delay``, which this broker and Artemis honour.
        """
        delay = (self.message_annotations or {}).get(_DELAY)
        return delay / 1000 if isinstance(delay, int) else None

    @delay_s.setter
    def delay_s(self, seconds: float | None) -> None:
        if seconds is not None and not 0 <= seconds <= SECONDS_MAX:
            raise ValueError(
                f"a delay is a number of seconds, 0 to {SECONDS_MAX:g}, not {seconds!r}"
            )
        self._annotate(_DELAY, None if seconds is None else round(seconds * 1000))

    @property
    def deliver_at(self) -> datetime | None:
        """Time before which a queue does not deliver the message; None for none.

        It is the message annotation ``x-opt-delivery-time``, which this broker and Artemis honour.

        Raises:
            ValueError: The time assigned has no time zone.
        """
        at = (self.message_annotations or {}).get(_TIME)
        return at.datetime if isinstance(at, Timestamp) else None

    @deliver_at.setter
    def deliver_at(self, time: datetime | None) -> None:
        self._annotate(_TIME, None if time is None else Timestamp.from_datetime(time))

    def _annotate(self, key: Symbol, value: object) -> None:
        """Set the message annotation *key*; None removes it."""
        rest = {
            name: each for name, each in (self.message_annotations or {}).items() if name != key
        }
        if value is not None:
            rest[key] = value
        self.message_annotations = rest or None

    @property
    def bare(self) -> bytes:
        """The encoded bare message, which intermediaries must not change (§3.2)."""
        payload = self.encode()
        sections = walk(payload, self._limits) if self._own else self._sections
        return payload[sections.properties : sections.footer]

    def encoded_maps(self) -> tuple[bytes, int, int, int, int] | None:
        """Return the octets received, and where in them message annotations and application-properties begin and end.

        None if one of the two was assigned to.
        """
        if self._own & (_OWN_MESSAGE_ANNOTATIONS | _OWN_APPLICATION_PROPERTIES):
            return None
        at = self._sections
        start, middle = at.message_annotations, at.properties
        return self._payload, start, middle, at.application_properties, at.body

    # --- Copies ---

    def replace(self, **changes: Any) -> Message:
        """Return a copy with *changes*, named like the arguments of the class.

        Other sections stay as they are, encoded ones octet for octet.
        """
        copy = Message.__new__(Message)
        for name in Message.__slots__:
            setattr(copy, name, getattr(self, name))
        copy._received = False
        if "body" in changes or "body_kind" in changes:
            body = changes.pop("body") if "body" in changes else self.body
            copy._set_body(body, changes.pop("body_kind", None))
        for name, value in changes.items():
            if name not in _SETTABLE:
                raise TypeError(f"a message has no {name!r} to replace")
            setattr(copy, name, value)
        return copy

    def forwarded(self, *, elapsed_ms: int = 0) -> Message:
        """Return the message for the next hop, *elapsed_ms* after it arrived here.

        Delivery annotations are for one hop and are dropped (§3.2.2); the time to live is reduced by
        *elapsed_ms* (§3.2.1). The bare message and the message annotations stay as they are.
        """
        copy = self.replace()
        sections = self._sections
        if self._own & _OWN_DELIVERY_ANNOTATIONS or (
            sections.delivery_annotations < sections.message_annotations
        ):
            copy.delivery_annotations = None
        if elapsed_ms > 0 and (ttl := self.header.ttl) is not None:
            copy.ttl_ms = max(0, ttl - elapsed_ms)
        return copy

    # --- Encoding ---

    def encode(self) -> bytes:
        """Return the message as one bytes object, the received one if nothing was assigned.

        Raises:
            LocalProtocolError: The message must not be sent, for example because of an application
                property that is a list.
            EncodeError: A value has no encoding.
        """
        if not self._own:
            return self._payload
        if self._own == _OWN_ALL and self._chunks is not None:
            properties = self._properties
            if (
                (properties is not None and properties.content_type is None)
                and not (self._header or self._footer or properties.content_encoding is not None)
                and not (self._message_annotations or self._delivery_annotations)
            ):
                # As most applications' messages: nothing to check, and one call.
                return data_octets(properties, self._application_properties, self._chunks)
        out = bytearray()
        self._write_front(out)
        if not self._own & _OWN_BODY:
            out += self._payload[self._sections.body : self._sections.footer]
        elif self._chunks is not None:
            write_body_data(out, self._chunks)
        else:
            self._write_body(out)
        self._write_footer(out)
        return bytes(out)

    def buffers(self) -> list[bytes]:
        """Return the message as several buffers, without copying a large body. Raises as encode does."""
        if self._chunks is None or not self._own & _OWN_BODY:
            return [self.encode()]
        found: list[bytes] = []
        out = bytearray(self.encode_front())
        for chunk in self._chunks:
            write_data(out, len(chunk))
            if len(chunk) < JOIN_MAX:
                out += chunk
            else:
                found += (bytes(out), chunk)
                out = bytearray()
        self._write_footer(out)
        if out:
            found.append(bytes(out))
        return found

    def encode_front(self) -> bytes:
        """Return the sections before the body, for a sender that streams data sections after them."""
        out = bytearray()
        self._write_front(out)
        return bytes(out)

    def _write_front(self, out: bytearray) -> None:
        own = self._own
        if own & (_OWN_PROPERTIES | _OWN_BODY):
            properties = self._properties or self.properties
            if properties.content_type is not None or properties.content_encoding is not None:
                self._check_content(properties)
        if own & _OWN_HEADER and self._header is not None:
            check_header(self._header)
        if own & _OWN_DELIVERY_ANNOTATIONS and self._delivery_annotations:
            _check_rejected(self._delivery_annotations)
        if own == _OWN_ALL:
            write_front(
                out,
                self._header,
                self._delivery_annotations,
                self._message_annotations,
                self._properties,
                self._application_properties,
            )
            return
        payload = self._payload
        sections = self._sections
        if own & _OWN_HEADER:
            write_front(out, self._header, None, None, None, None)
        else:
            out += payload[: sections.delivery_annotations]
        if own & _OWN_DELIVERY_ANNOTATIONS:
            write_front(out, None, self._delivery_annotations, None, None, None)
        else:
            out += payload[sections.delivery_annotations : sections.message_annotations]
        if own & _OWN_MESSAGE_ANNOTATIONS:
            write_front(out, None, None, self._message_annotations, None, None)
        else:
            out += payload[sections.message_annotations : sections.properties]
        if own & _OWN_PROPERTIES:
            write_front(out, None, None, None, self._properties, None)
        else:
            out += payload[sections.properties : sections.application_properties]
        if own & _OWN_APPLICATION_PROPERTIES:
            write_front(out, None, None, None, None, self._application_properties)
        else:
            out += payload[sections.application_properties : sections.body]

    def _check_content(self, properties: Properties) -> None:
        """Check the rules for content-type and content-encoding (§3.2.4)."""
        if self._kind != "data":
            name = "content-type" if properties.content_encoding is None else "content-encoding"
            raise LocalProtocolError(f"{name} is for bodies of data, not of {self._kind}")
        encoding = properties.content_encoding
        if encoding is not None and encoding.lower() == "identity":
            raise LocalProtocolError("content-encoding must not be 'identity': leave it out")

    def _write_body(self, out: bytearray) -> None:
        try:
            if self._kind == "sequence":
                out += SECTION_OPENINGS[AMQP_SEQUENCE]
                write_list(out, self._body)
            else:
                out += SECTION_OPENINGS[AMQP_VALUE]
                write_value(out, self._body)
        except EncodeError as error:
            raise EncodeError(f"the body: {error.description}") from None

    def _write_footer(self, out: bytearray) -> None:
        if not self._own & _OWN_FOOTER:
            out += self._payload[self._sections.footer :]
        elif self._footer:
            write_annotations(out, FOOTER, self._footer)

    # --- Decoding ---

    def _annotations(self, own: int, code: int, at: int, end: int) -> Mapping[Any, Any]:
        if self._own & own:
            return {}
        if at == end:
            return _NOTHING
        content = read_section_code(self._payload, at, self._limits)[1]
        return MappingProxyType(
            read_annotation_map(self._payload, code, content, end, self._limits)
        )

    def _reader(self, at: int, end: int) -> Reader:
        """Return a reader of the value of the section that begins at *at*."""
        content = read_section_code(self._payload, at, self._limits)[1]
        return Reader(self._payload, content, end, self._limits)

    def _read_body(self) -> object:
        kind = self._kind
        if kind == "data":
            chunks = self._chunks
            if chunks is None:
                chunks = self._chunks = self._read_chunks()
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        sections = self._sections
        try:
            if kind == "value":
                r = self._reader(sections.body, sections.footer)
                value = r.read_value()
                if r.at != r.end:
                    raise DecodeError(f"{r.end - r.at} octets are left over")
                return value
            elements = Sequence()
            at = sections.body
            for _ in range(sections.body_count):
                r = self._reader(at, sections.footer)
                count, outer = r.enter_list()
                elements += r.read_items(count)
                r.leave(outer)
                at = r.at
        except DecodeError as error:
            raise DecodeError(f"{SECTION_NAMES[sections.body_code]}: {error.description}") from None
        return elements if kind == "sequence" else None

    def _read_chunks(self) -> tuple[bytes, ...]:
        sections = self._sections
        at = sections.body
        chunks: list[bytes] = []
        for _ in range(sections.body_count):
            r = self._reader(at, sections.footer)
            chunks.append(cast("bytes", r.read_value()))
            at = r.at
        return tuple(chunks)

    # --- Inside ---

    def _refuse_if_received(self, what: str) -> None:
        if self._received:
            raise LocalProtocolError(
                f"the {what} of a received message cannot be set: the bare message is immutable; "
                "replace() makes a changed copy"
            )

    def _set_body(self, body: object, kind: BodyKind | None) -> None:
        self._own |= _OWN_BODY
        self._body = body
        self._chunks = None
        if kind is None:
            if isinstance(body, bytes | bytearray | memoryview):
                kind = "data"
            else:
                kind = "sequence" if isinstance(body, Sequence) else "value"
        self._kind = kind
        if kind == "data":
            if type(body) is bytes:
                self._chunks = (body,)
            else:
                self._chunks = _chunks_of(body)
                self._body = _UNREAD
        elif kind == "sequence":
            if not isinstance(body, list | tuple):
                raise TypeError(f"a sequence is made of a list, not of {shown(body)}")
            if not isinstance(body, Sequence):
                self._body = Sequence(body)
        elif kind != "value":
            raise ValueError(f"a body is 'data', 'sequence' or 'value', not {kind!r}")

    def __repr__(self) -> str:
        try:
            properties = self.properties
            said = [
                f", {name}={_BRIEF.repr(getattr(properties, name))}"
                for name in ("message_id", "to", "subject", "correlation_id", "content_type")
                if getattr(properties, name) is not None
            ]
            return f"Message({self._brief_body()}{''.join(said)})"
        except DecodeError as error:
            return f"Message({len(self._payload)} bytes, {error.description:.80})"

    def _brief_body(self) -> str:
        if self._kind == "data":
            size = sum(map(len, self.data))
            begin = self.data[0][:40] if self.data else b""
            return f"{_BRIEF.repr(begin)}{'…' if size > len(begin) else ''}, {size} bytes of data"
        body = self.body
        if isinstance(body, list | dict):
            return f"{type(body).__name__} of {len(body)}"
        if body is None or isinstance(body, str | bytes | int | float | UUID):
            return _BRIEF.repr(body)
        return f"a {type(body).__name__}"


def message_id_of(
    payload: bytes, message_format: int, limits: Limits = DEFAULT_LIMITS
) -> MessageId | None:
    """Return the ``message-id`` of an encoded message; None if it has none, is malformed, or is of
    another format than :data:`MESSAGE_FORMAT`."""
    if message_format != MESSAGE_FORMAT:
        return None
    try:
        _, _, start, end, _ = walk_front(payload, limits)
        return read_properties(payload, start, end, limits).message_id if end > start else None
    except DecodeError:
        return None


_KINDS: Final[dict[int, BodyKind | None]] = {
    DATA: "data",
    AMQP_SEQUENCE: "sequence",
    AMQP_VALUE: "value",
    0: None,
}
#: Standard properties that are parameters of :class:`Message`: the first ones.
_GIVEN: Final = 7
#: Fields of the header that are no parameters.
_HEADER_FIELDS: Final = frozenset(
    ("priority", "ttl_ms", "ttl_s", "first_acquirer", "delivery_count")
)
_PROPERTY_NAMES: Final = frozenset(field.attribute for field in fields_of(Properties))
_SETTABLE: Final = frozenset(MessageFields.__annotations__) | {"header", "properties"}

_BRIEF: Final = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 50


def _milliseconds(seconds: float) -> int:
    if not 0 <= seconds <= 0xFFFF_FFFF / 1000:
        raise ValueError(f"a time to live of {seconds} s is not between 0 and 49 days")
    return round(seconds * 1000)


def _chunks_of(body: object) -> tuple[bytes, ...]:
    parts = body if isinstance(body, list | tuple) else (body,)
    for part in parts:
        if not isinstance(part, bytes | bytearray | memoryview):
            raise TypeError(f"data is made of bytes, not of {shown(part)}")
    return tuple(bytes(part) for part in parts) or (b"",)


def encode_delivery_annotations(annotations: Mapping[Any, object]) -> bytes:
    """Return an encoded delivery-annotations section, empty without annotations (§3.2.2).

    Raises:
        LocalProtocolError: The reserved key ``rejected`` holds anything but an ``Error``.
    """
    _check_rejected(annotations)
    out = bytearray()
    write_annotations(out, DELIVERY_ANNOTATIONS, annotations)
    return bytes(out)


def _check_rejected(annotations: Mapping[Any, object]) -> None:
    """Check the only reserved key that we know, ``rejected``, which must hold an error (§3.2.2)."""
    if not isinstance(annotations, Mapping | Map):
        raise refused("delivery-annotations", annotations)
    rejected = annotations.get("rejected")
    if rejected is not None and not isinstance(rejected, Error):
        raise LocalProtocolError(
            f"the delivery annotation 'rejected' holds an Error, not {shown(rejected)}"
        )
