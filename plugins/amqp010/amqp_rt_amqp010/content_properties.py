"""Content of classes file and stream, to and from AMQP 1.0 (0-10 §file.file-properties, §stream.stream-properties).

The broker stores it as messages of 1.0 like those of class message, with the name of its class in the annotation
``x-content-class``. Consumers of other protocols, and of class message, get it as ordinary messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from amqp_rt.fronts import AmqpError, Limits, Message, Symbol
from amqp_rt.fronts.headers import AMQP10
from amqp_rt.fronts.splicing import CONTENT_CLASS, with_data

from .arguments import plain
from .bodies import OutgoingBody, body_of
from .codec import read_entries, split_entries, write_entries
from .conversions import fits_str8
from .faults import CommandFault
from .incoming_headers import REPLY_TO_HEADER, IncomingHeader
from .layouts import DeliveryProperties, FileProperties, MessageProperties, StreamProperties
from .message_ids import MESSAGE_ID
from .outgoing_headers import OutgoingFields

Properties: TypeAlias = FileProperties | StreamProperties

FILE: Final = "file"
STREAM: Final = "stream"
#: Annotations for properties of files that 1.0 has no field for.
FILENAME: Final = Symbol("x-filename")
CLUSTER_ID: Final = Symbol("x-cluster-id")


class Content(NamedTuple):
    """A message of class file or stream on its way to queues."""

    #: The message in AMQP 1.0.
    payload: bytes
    #: Its headers, as arguments of bindings are compared with them.
    headers: dict[str, object]


class Delivered(NamedTuple):
    """A message on its way to a consumer of class file or stream."""

    #: Its header segment.
    header: bytes
    body: list[bytes]
    exchange: str | None
    routing_key: str | None
    redelivered: bool
    #: From 0 to 9.
    priority: int


def read_properties(octets: bytes | None, kind: type[Properties], command: int) -> Properties:
    """Return the properties in a header segment; those of none are all absent.

    Args:
        octets: The segment.
        kind: Type of the properties.
        command: Code of the command, for faults.

    Raises:
        CommandFault: The segment is malformed (503).
    """
    for entry in read_entries(octets or b"", command):
        if isinstance(entry, kind):
            return entry
    return kind()


def to_content(
    octets: bytes | None,
    body: Sequence[bytes],
    kind: type[Properties],
    command: int,
    *,
    exchange: str,
    routing_key: str,
) -> Content:
    """Encode content as a message of AMQP 1.0.

    Args:
        octets: Its header segment.
        body: Its body segment, in pieces.
        kind: Type of its properties.
        command: Code of the command that it comes with, for faults.
        exchange: The exchange that it is published to.
        routing_key: Its routing key.

    Raises:
        CommandFault: The header is malformed (503), or 1.0 cannot hold a value (542).
    """
    properties = read_properties(octets, kind, command)
    unknown = [
        encoded
        for code, encoded in split_entries(octets or b"", command)
        if code not in (kind.CODE, DeliveryProperties.CODE, MessageProperties.CODE)
    ]
    known = write_entries(
        (
            DeliveryProperties(
                priority=properties.priority,
                timestamp=properties.timestamp,
                routing_key=routing_key,
            ),
            MessageProperties(
                content_type=properties.content_type,
                content_encoding=properties.content_encoding,
                application_headers=properties.headers,
            ),
        )
    )
    incoming = IncomingHeader(b"".join((known, *unknown)), exchange)
    incoming.annotations[CONTENT_CLASS] = STREAM if kind is StreamProperties else FILE
    if isinstance(properties, FileProperties):
        incoming.fields["message_id"] = properties.message_id
        incoming.fields["reply_to"] = properties.reply_to
        incoming.fields["durable"] = True
        if properties.filename is not None:
            incoming.annotations[FILENAME] = properties.filename
        if properties.cluster_id is not None:
            incoming.annotations[CLUSTER_ID] = properties.cluster_id
    try:
        if incoming.has_sections:
            payload = incoming.with_sections(b"".join(body))
        else:
            payload = with_data(incoming.front(), body)
    except AmqpError as error:
        raise CommandFault.of(error) from error
    headers: dict[str, object] = {}
    for name, value in (properties.headers or {}).items():
        # No argument equals a value of a type that is unknown outside of AMQP 0-10.
        with suppress(CommandFault):
            headers[name] = plain(value)
    return Content(payload, headers)


def from_payload(
    payload: bytes, kind: type[Properties], *, address: str, limits: Limits
) -> Delivered:
    """Return a message of AMQP 1.0 as content. Every message can be sent, as by ``message.transfer``.

    Args:
        payload: The message.
        kind: Type of the properties.
        address: Address of its queue: the routing key of messages without one.
        limits: Bounds on sections and values.
    """
    try:
        message = Message.decode(payload, limits)
        found = body_of(message)
    except AmqpError:
        message = Message(b"")
        found = OutgoingBody([payload], None, AMQP10)
    fields = OutgoingFields(message, address, found.content_type, found.kind)
    delivery = fields.delivery_properties()
    stated = fields.message_properties()
    headers = stated.application_headers
    properties = kind(
        content_type=stated.content_type,
        content_encoding=stated.content_encoding,
        priority=delivery.priority,
        timestamp=delivery.timestamp,
    )
    if isinstance(properties, FileProperties):
        _set_file_fields(properties, message, headers or {})
    properties.headers = headers or None
    return Delivered(
        write_entries((properties,)),
        found.pieces,
        delivery.exchange,
        delivery.routing_key,
        delivery.redelivered,
        delivery.priority or 0,
    )


def _set_file_fields(
    properties: FileProperties, message: Message, headers: dict[str, object]
) -> None:
    """Set the properties that files alone have, and remove the headers that stand for them."""
    with suppress(AmqpError):
        stated = message.properties
        if stated.message_id is not None and fits_str8(str(stated.message_id)):
            properties.message_id = str(stated.message_id)
            headers.pop(MESSAGE_ID, None)
        if stated.reply_to is not None and fits_str8(str(stated.reply_to)):
            properties.reply_to = str(stated.reply_to)
            headers.pop(REPLY_TO_HEADER, None)
    with suppress(AmqpError):
        annotations = message.message_annotations
        for name, field in ((FILENAME, "filename"), (CLUSTER_ID, "cluster_id")):
            text = annotations.get(name)
            if isinstance(text, str) and fits_str8(text):
                setattr(properties, field, str(text))
                headers.pop(str(name), None)
