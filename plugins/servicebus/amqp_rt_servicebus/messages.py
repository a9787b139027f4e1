"""Messages of an entity, and the sections that the service writes on arrival and on each delivery.

A message arrives as the bytes of its sender. The service reads its properties and annotations once, and keeps
the octets from the properties on, which copies for subscriptions share. On each delivery only the sections
that the service writes are encoded: header, annotations and properties. Annotations that the service
writes are never believed when a client sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from struct import Struct as Packer
from typing import Any, Final, TypeAlias
from uuid import UUID, uuid4
from zlib import crc32

from msgspec.structs import replace

from amqp_rt.codec.primitives import (
    Reader,
    close_compound,
    open_compound,
    write_boolean,
    write_long,
    write_null,
    write_short,
    write_string,
    write_symbol,
    write_ubyte,
    write_uint,
    write_value,
)
from amqp_rt.codec.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    read_annotations,
    read_application_properties,
    read_header_fields,
    read_properties,
    read_section_code,
    walk,
    walk_front,
    write_properties,
)
from amqp_rt.errors import DecodeError, EncodeError
from amqp_rt.fronts.base import Payload
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import JOIN_MAX
from amqp_rt.values import Symbol

from .stored import NO_PROPERTIES, Stored

#: Format of a message whose data sections are messages of their own, stored together or not at all.
BATCH_FORMAT: Final = 0x8001_3700
#: Messages in one batch.
BATCH_MESSAGES_MAX: Final = 4_500
#: Octets of the application properties after a change by a receiver or a rule; the service has the same limit.
APPLICATION_PROPERTIES_MAX: Final = 64 * 1024
#: Partitions of a partitioned entity, and bits of a sequence number below its partition.
PARTITIONS: Final = 16
PARTITION_SHIFT: Final = 48

_UINT_MAX: Final = 0xFFFF_FFFF
_I64: Final = Packer(">q")

ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")
SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")
ENQUEUE_SEQUENCE_NUMBER: Final = Symbol("x-opt-enqueue-sequence-number")
LOCKED_UNTIL: Final = Symbol("x-opt-locked-until")
LOCK_TOKEN: Final = Symbol("x-opt-lock-token")
MESSAGE_STATE: Final = Symbol("x-opt-message-state")
PARTITION_ID: Final = Symbol("x-opt-partition-id")
DEAD_LETTER_SOURCE: Final = Symbol("x-opt-deadletter-source")
SCHEDULED_ENQUEUE_TIME: Final = Symbol("x-opt-scheduled-enqueue-time")

#: Annotations that only the service writes.
_SERVICE: Final = frozenset(
    {
        ENQUEUED_TIME,
        SEQUENCE_NUMBER,
        ENQUEUE_SEQUENCE_NUMBER,
        LOCKED_UNTIL,
        LOCK_TOKEN,
        MESSAGE_STATE,
        PARTITION_ID,
        DEAD_LETTER_SOURCE,
    }
)


def _key(name: Symbol) -> bytes:
    """Encode the key of an annotation."""
    out = bytearray()
    write_symbol(out, name)
    return bytes(out)


# Annotations of each delivery: their keys, with the constructors of times and of the state, which is a small int.
_ENQUEUED_AT: Final = _key(ENQUEUED_TIME) + b"\x83"
_NUMBER: Final = _key(SEQUENCE_NUMBER)
_STATE: Final = _key(MESSAGE_STATE) + b"\x54"
_ENQUEUED_NUMBER: Final = _key(ENQUEUE_SEQUENCE_NUMBER)
_PARTITION: Final = _key(PARTITION_ID)
_SOURCE: Final = _key(DEAD_LETTER_SOURCE)
_LOCKED_UNTIL: Final = _key(LOCKED_UNTIL) + b"\x83"
#: Delivery annotations with a lock token, whose 16 octets follow: a map of two items.
_LOCK: Final = (
    SECTION_OPENINGS[DELIVERY_ANNOTATIONS]
    + bytes((0xC1, len(_key(LOCK_TOKEN)) + 18, 2))
    + _key(LOCK_TOKEN)
    + b"\x98"
)

#: Application properties of dead letters.
REASON: Final = "DeadLetterReason"
DESCRIPTION: Final = "DeadLetterErrorDescription"

#: Makes lock tokens and message-ids.
NewId: TypeAlias = Callable[[], UUID]


# --- Arrival ---------------------------------------------------------------------------------


def arrived(
    payload: bytes,
    *,
    limits: Limits = DEFAULT_LIMITS,
    new_id: NewId = uuid4,
) -> Stored:
    """Return the message that a client has sent as *payload*.

    Delivery annotations and the annotations of the service are left out; a message without an id gets one.

    Raises:
        DecodeError: The sections are not those of a message, or one before the body is malformed.
    """
    sections = walk(payload, limits)
    end = sections.delivery_annotations
    durable, priority, ttl_ms, _, _ = read_header_fields(payload, end, limits)
    annotations: dict[Any, Any] = {}
    at, end = sections.message_annotations, sections.properties
    if at < end:
        annotations = {
            key: value
            for key, value in read_annotations(payload[at:end], limits).items()
            if key not in _SERVICE
        }
    at, end = sections.properties, sections.application_properties
    properties = read_properties(payload, at, end, limits) if at < end else NO_PROPERTIES
    if end < sections.body:
        read_application_properties(payload, end, sections.body, limits)
    if properties.message_id is None or properties.absolute_expiry_time is not None:
        properties = replace(
            properties,
            message_id=str(new_id()) if properties.message_id is None else properties.message_id,
            absolute_expiry_time=None,
        )
    due = annotations.get(SCHEDULED_ENQUEUE_TIME) if annotations else None
    stored = Stored(
        payload[at:] if at else payload,
        priority=priority,
        properties=properties,
        content_at=end - at,
        body_at=sections.body - at,
        size=len(payload),
        sent_durable=durable,
        ttl_ms=ttl_ms,
        due_at=due / 1000 if isinstance(due, int) else 0.0,
    )
    if annotations:
        stored.annotate(annotations)
    return stored


def split_batch(
    payload: bytes, *, limits: Limits = DEFAULT_LIMITS, messages_max: int = BATCH_MESSAGES_MAX
) -> list[bytes]:
    """Return the messages in a batch of :data:`BATCH_FORMAT`, each encoded.

    The sections around them only repeat those of the first message, and are ignored.

    Raises:
        DecodeError: The body is not made of data sections, there are none, or more than *messages_max*.
    """
    *_, at = walk_front(payload, limits)
    end = len(payload)
    found: list[bytes] = []
    while at < end:
        if payload[at : at + 3] != _DATA:
            if payload[at : at + 3] == _FOOTER:
                break
            raise DecodeError(
                f"batch: octet {at} begins no data section: each message is in a data section of its own"
            )
        if len(found) == messages_max:
            raise DecodeError(f"batch: there are more than {messages_max} messages: send several")
        reader = Reader(payload, at + 3, end, limits)
        content = reader.read_value()
        if not isinstance(content, bytes):
            raise DecodeError(f"batch: the data section at octet {at} has no binary content")
        found.append(content)
        at = reader.at
    if not found:
        raise DecodeError("batch: there is no message in it")
    return found


_DATA: Final = b"\x00\x53\x75"
_FOOTER: Final = b"\x00\x53\x78"


def partition_of(stored: Stored) -> int:
    """Return the partition of a message: by its session, else its partition key, else its id."""
    key = stored.session or stored.partition_key or str(stored.properties.message_id)
    return crc32(key.encode("utf-8", "surrogatepass")) % PARTITIONS


def enqueued(stored: Stored, at: float, ttl_s: float) -> None:
    """Set the times of a message that becomes active at *at* in an entity with *ttl_s*.

    The shorter of both times to live counts. The property ``absolute-expiry-time`` is its end.
    """
    own_s = inf if stored.ttl_ms is None else stored.ttl_ms / 1000
    lasting_s = min(own_s, ttl_s)
    stored.enqueued_at = at
    if lasting_s == inf:
        stored.lasting_ms = None
        stored.expires_at = inf
        moment = None
    else:
        stored.lasting_ms = round(lasting_s * 1000)
        stored.expires_at = at + lasting_s
        moment = milliseconds(stored.expires_at)
    if stored.properties.absolute_expiry_time != moment:
        stored.properties = replace(stored.properties, absolute_expiry_time=moment)


def milliseconds(at: float) -> int:
    """Return a wall-clock time as AMQP has it: milliseconds since 1970."""
    return round(at * 1000)


# --- Copies ----------------------------------------------------------------------------------


def copied(stored: Stored, *, hops: int = 0) -> Stored:
    """Return the message for another entity, with *hops* entities more behind it.

    The copy shares the payload, has no number, and counts its deliveries anew. It keeps the number under
    which it was first enqueued.
    """
    return Stored(
        stored.payload,
        priority=stored.priority,
        publisher=stored.publisher,
        returnable=stored.returnable,
        properties=stored.properties,
        annotation_octets=stored.annotation_octets,
        annotation_items=stored.annotation_items,
        content_at=stored.content_at,
        body_at=stored.body_at,
        size=stored.size,
        sent_durable=stored.sent_durable,
        ttl_ms=stored.ttl_ms,
        enqueued_number=stored.enqueued_number or stored.number,
        hops=stored.hops + hops,
        dead_letter_source=stored.dead_letter_source,
    )


# --- Delivery --------------------------------------------------------------------------------


def delivered(
    stored: Stored, *, token: UUID | None = None, until: float = inf, body: bool = True
) -> Payload:
    """Encode a message for a receiver.

    The header always has the count of failed deliveries, and the time to live that the message had at
    first, to which clients add the enqueued time. Large messages are returned in pieces.

    Args:
        stored: The message.
        token: Token of the lock, which is a delivery annotation; None without a lock.
        until: Wall-clock end of the lock; ``inf`` if the message has none of its own.
        body: Whether the body is included.
    """
    out = bytearray(b"\x00\x53\x70")
    at = open_compound(out, 0xC0)
    write_boolean(out, stored.sent_durable)
    write_ubyte(out, stored.priority)
    if stored.lasting_ms is None:
        write_null(out)
    else:
        write_uint(out, min(stored.lasting_ms, _UINT_MAX))
    write_boolean(out, not stored.attempts)
    write_uint(out, stored.delivery_count)
    close_compound(out, at, 5)
    if token is not None:
        out += _LOCK
        out += token.bytes
    _write_annotations(out, stored, until)
    write_properties(out, stored.properties)
    if not body:
        out += stored.payload[stored.content_at : stored.body_at]
        return bytes(out)
    content = memoryview(stored.payload)[stored.content_at :]
    if len(content) < JOIN_MAX:
        out += content
        return bytes(out)
    return [bytes(out), bytes(content) if stored.content_at else stored.payload]


def _write_annotations(out: bytearray, stored: Stored, until: float) -> None:
    """Append the message annotations: those of the sender, then those of the service."""
    out += SECTION_OPENINGS[MESSAGE_ANNOTATIONS]
    at = open_compound(out, 0xC1)
    out += stored.annotation_octets
    count = 6 + stored.annotation_items
    out += _ENQUEUED_AT
    out += _I64.pack(milliseconds(stored.enqueued_at))
    out += _NUMBER
    write_long(out, stored.number)
    out += _STATE
    out.append(stored.state)
    if stored.enqueued_number:
        out += _ENQUEUED_NUMBER
        write_long(out, stored.enqueued_number)
        count += 2
    if stored.partition is not None:
        out += _PARTITION
        write_short(out, stored.partition)
        count += 2
    if stored.dead_letter_source:
        out += _SOURCE
        write_string(out, stored.dead_letter_source)
        count += 2
    if until != inf:
        out += _LOCKED_UNTIL
        out += _I64.pack(milliseconds(until))
        count += 2
    close_compound(out, at, count)


def encoded(stored: Stored, *, until: float = inf, body: bool = True) -> bytes:
    """Return :func:`delivered` in one piece, without a token, as answers at ``$management`` have it."""
    payload = delivered(stored, until=until, body=body)
    return payload if isinstance(payload, bytes) else b"".join(payload)


# --- Application properties ------------------------------------------------------------------


def application_properties(stored: Stored, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Return the application properties of a message."""
    if stored.content_at == stored.body_at:
        return {}
    return read_application_properties(stored.payload, stored.content_at, stored.body_at, limits)


def change_properties(
    stored: Stored,
    changes: Mapping[Any, object],
    *,
    removed: frozenset[str] = frozenset(),
    limits: Limits = DEFAULT_LIMITS,
) -> bool:
    """Set application properties as a receiver or a rule asks, and leave out *removed* ones.

    The others stay octet for octet, since the service keeps described values there that may not be
    written by AMQP's rules. Values without an encoding, and keys that are no text, are left out.

    Returns:
        Whether the message was changed. All changes are dropped if the properties would become larger
        than :data:`APPLICATION_PROPERTIES_MAX`, since each delivery could add more.
    """
    written: dict[str, bytes] = {}
    for key, value in changes.items():
        if isinstance(key, str):
            item = bytearray()
            try:
                write_string(item, str(key))
                write_value(item, value)
            except EncodeError:
                continue
            written[str(key)] = bytes(item)
    if not written and not removed:
        return False
    out = bytearray(SECTION_OPENINGS[APPLICATION_PROPERTIES])
    at = open_compound(out, 0xC1)
    count = 0
    begin, end = stored.content_at, stored.body_at
    if begin < end:
        reader = Reader(
            stored.payload, read_section_code(stored.payload, begin, limits)[1], end, limits
        )
        items, outer = reader.enter_map()
        for _ in range(items // 2):
            first = reader.at
            known = reader.read_value()
            reader.skip_value()
            if known not in written and known not in removed:
                out += stored.payload[first : reader.at]
                count += 2
        reader.leave(outer)
    for each in written.values():
        out += each
        count += 2
    close_compound(out, at, count)
    section = bytes(out) if count else b""
    if len(section) > max(APPLICATION_PROPERTIES_MAX, end - begin):
        return False
    payload = stored.payload
    stored.payload = payload[:begin] + section + payload[end:]
    stored.body_at = begin + len(section)
    stored.size += len(section) - (end - begin)
    return True


def mark_dead(stored: Stored, source: str, reason: str | None, description: str | None) -> None:
    """Write into a message why *source* has dead-lettered it."""
    known = {REASON: reason, DESCRIPTION: description}
    change_properties(stored, {key: value for key, value in known.items() if value is not None})
    stored.dead_letter_source = source
