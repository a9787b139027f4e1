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
from amqp_rt.fronts.recent import OCTETS_MAX
from amqp_rt.fronts.splicing import CONTENT_CLASS, split_data, with_data

from .arguments import plain
from .bodies import OutgoingBody, body_of
from .codec import read_entries, split_entries, write_entries
from .conversions import fits_str8
from .faults import CommandFault
from .incoming_headers import REPLY_TO_HEADER, IncomingHeader
from .layouts import DeliveryProperties, FileProperties, MessageProperties, StreamProperties
from .message_ids import MESSAGE_ID
from .outgoing_headers import OutgoingFields
from .recent import Delivered, Recents

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
    recents: Recents | None = None,
) -> Content:
    """Encode content as a message of AMQP 1.0.

    Args:
        octets: Its header segment.
        body: Its body segment, in pieces.
        kind: Type of its properties.
        command: Code of the command that it comes with, for faults.
        exchange: The exchange that it is published to.
        routing_key: Its routing key.
        recents: Caches of the front: equal headers are converted once.

    Raises:
        CommandFault: The header is malformed (503), or 1.0 cannot hold a value (542).
    """
    key = (kind.CODE, exchange, routing_key, octets or b"")
    known_front = None if recents is None else recents.content_fronts.get(key)
    if known_front is not None:
        front, headers = known_front
        return Content(with_data(front, body), headers)
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
    headers = {}
    for name, value in (properties.headers or {}).items():
        # No argument equals a value of a type that is unknown outside of AMQP 0-10.
        with suppress(CommandFault):
            headers[name] = plain(value)
    try:
        if incoming.has_sections:
            return Content(incoming.with_sections(b"".join(body)), headers)
        front = incoming.front()
    except AmqpError as error:
        raise CommandFault.of(error) from error
    if recents is not None and len(key[-1]) <= OCTETS_MAX:
        recents.content_fronts.put(key, (front, headers))
    return Content(with_data(front, body), headers)


def from_payload(
    payload: bytes,
    kind: type[Properties],
    *,
    address: str,
    limits: Limits,
    recents: Recents | None = None,
) -> Delivered:
    """Return a message of AMQP 1.0 as content. Every message can be sent, as by ``message.transfer``.

    Args:
        payload: The message.
        kind: Type of the properties.
        address: Address of its queue: the routing key of messages without one.
        limits: Bounds on sections and values.
        recents: Caches of the front: messages alike in all but the body are converted once.
    """
    place = split_data(payload)
    key: tuple[int, str, bytes] | None = None
    if place is not None and recents is not None and place[0] <= OCTETS_MAX:
        end, start = place
        key = (kind.CODE, address, payload[:end])
        known = recents.contents.get(key)
        if known is not None:
            return known._replace(body=[payload[start:]])
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
    made = Delivered(
        write_entries((properties,)),
        found.pieces,
        delivery.exchange,
        delivery.routing_key,
        delivery.redelivered,
        delivery.priority or 0,
    )
    if key is not None and recents is not None:
        recents.contents.put(key, made._replace(body=[]))
    return made


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
