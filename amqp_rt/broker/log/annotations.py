"""Message annotations of a log: those that give readers the place of a record, and the partition key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...codec.sections import (
    DELIVERY_ANNOTATIONS,
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    read_annotations,
    walk_head,
    write_annotations,
)
from ...fronts.base import Payload
from ...limits import Limits
from ...message import JOIN_MAX, MESSAGE_FORMAT
from ...values import Symbol, Timestamp, ULong
from ..entries import Entry, annotated
from .records import Record

#: Message annotations of each delivery, which give the place of its record: those of Event Hubs (a
#: string, a long and a timestamp) and that of RabbitMQ's streams (a ulong).
OFFSET: Final = Symbol("x-opt-offset")
SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")
ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")
STREAM_OFFSET: Final = Symbol("x-stream-offset")
#: The partition, as a string.
PARTITION_ID: Final = Symbol("x-opt-partition-id")
#: Annotation that determines the partition of a message.
PARTITION_KEY: Final = "x-opt-partition-key"


def annotate_record(partition: int, offset: int, record: Record) -> Payload:
    """Return the payload to send for *record*, with its place in the message annotations.

    A message of an unknown format is sent unchanged.
    """
    payload = record.payload
    if record.message_format != MESSAGE_FORMAT:
        return payload
    head = walk_head(payload)
    if head.message_annotations:
        said = {
            OFFSET: str(offset),
            SEQUENCE_NUMBER: offset,
            ENQUEUED_TIME: Timestamp(record.time_ms),
            STREAM_OFFSET: ULong(offset),
            PARTITION_ID: str(partition),
        }
        return annotated(payload, said)
    front = head.header + _place(partition, offset, record.time_ms)
    return front + head.rest if len(payload) < JOIN_MAX else [front, head.rest]


def with_delivery_annotations(payload: Payload, annotations: Mapping[Any, object]) -> Payload:
    """Return *payload*, which has no delivery annotations, with *annotations* as these (§3.2.2)."""
    front = payload if isinstance(payload, bytes) else payload[0]
    header = walk_head(front).header
    out = bytearray(header)
    write_annotations(out, DELIVERY_ANNOTATIONS, annotations)
    out += memoryview(front)[len(header) :]
    return bytes(out) if isinstance(payload, bytes) else [bytes(out), *payload[1:]]


#: Encoded keys and constructors of the annotations above, each with its widest encoding.
_AT_OFFSET, _AT_SEQUENCE_NUMBER, _AT_ENQUEUED_TIME, _AT_STREAM_OFFSET, _AT_PARTITION_ID = (
    bytes((0xA3, len(key))) + key.encode() + bytes((constructor,))
    for key, constructor in (
        (OFFSET, 0xA1),
        (SEQUENCE_NUMBER, 0x81),
        (ENQUEUED_TIME, 0x83),
        (STREAM_OFFSET, 0x80),
        (PARTITION_ID, 0xA1),
    )
)


def _place(partition: int, offset: int, time_ms: int) -> bytes:
    """Return the message annotations of a record that has none of its own (§3.2.3).

    Encoded by hand, because every delivery of a log has them and this is the largest part of its cost.
    """
    text, number, part = b"%d" % offset, offset.to_bytes(8), b"%d" % partition
    said = b"".join(
        (
            _AT_OFFSET,
            len(text).to_bytes(),
            text,
            _AT_SEQUENCE_NUMBER,
            number,
            _AT_ENQUEUED_TIME,
            time_ms.to_bytes(8, signed=True),
            _AT_STREAM_OFFSET,
            number,
            _AT_PARTITION_ID,
            len(part).to_bytes(),
            part,
        )
    )
    # A map of ten items; its size includes the octet of that count.
    return b"".join((_PLACE_OPENING, (len(said) + 1).to_bytes(), b"\x0a", said))


_PLACE_OPENING: Final = SECTION_OPENINGS[MESSAGE_ANNOTATIONS] + b"\xc1"


#: Octets of a message in which the key's name is searched before the sections are read.
_SEARCHED_MAX: Final = 4_096
_KEY_NAME: Final = PARTITION_KEY.encode()


def partition_key(entry: Entry, limits: Limits) -> bytes | None:
    """Return the partition key of a message, None if it has none."""
    payload = entry.payload
    if entry.message_format != MESSAGE_FORMAT:
        return None
    if len(payload) <= _SEARCHED_MAX and _KEY_NAME not in payload:
        return None
    section = walk_head(payload, limits).message_annotations
    key = read_annotations(section, limits).get(Symbol(PARTITION_KEY)) if section else None
    if isinstance(key, str):
        return key.encode("utf-8", "surrogatepass")
    return key if isinstance(key, bytes) else None
