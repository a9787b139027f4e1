"""Events of a hub: what is kept of one when it arrives, and what is written when it is delivered.

Annotations that the service writes are never believed when a client sends them, and those of idempotent
producers end here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from amqp_rt.codec.sections import (
    DELIVERY_ANNOTATIONS,
    MESSAGE_ANNOTATIONS,
    SECTION_OPENINGS,
    read_annotations,
    walk,
    walk_head,
    write_annotations,
)
from amqp_rt.errors import AmqpError, DecodeError
from amqp_rt.fronts.base import Payload
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import JOIN_MAX, MESSAGE_FORMAT
from amqp_rt.values import Symbol, Timestamp

from .conditions import ARGUMENT_ERROR
from .messages import BATCH_FORMAT, ENQUEUED_TIME, SEQUENCE_NUMBER, split_batch
from .stored import PARTITION_KEY

OFFSET: Final = Symbol("x-opt-offset")
PUBLISHER: Final = Symbol("x-opt-publisher")
PRODUCER_ID: Final = Symbol("com.microsoft:producer-id")
PRODUCER_EPOCH: Final = Symbol("com.microsoft:producer-epoch")
PRODUCER_SEQUENCE_NUMBER: Final = Symbol("com.microsoft:producer-sequence-number")

#: Events in one batch, which are stored in one step.
BATCH_EVENTS_MAX: Final = 5_000

_PRODUCER: Final = (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQUENCE_NUMBER)
_SERVICE: Final = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME, PUBLISHER, *_PRODUCER})


class Event(Struct, frozen=True):
    """Event that has arrived."""

    payload: bytes
    #: Octets of the partition key; None without one.
    key: bytes | None
    #: Annotations of an idempotent producer: its id, epoch and the number of the event; None if absent.
    producer: tuple[object, object, object]


def arrived_event(
    payload: bytes, *, publisher: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> Event:
    """Return the event that a client has sent as *payload*.

    Args:
        payload: The encoded message.
        publisher: Publisher in the address of the link, whose name is the partition key too.
        limits: Bounds of the annotations.

    Raises:
        DecodeError: The sections are not those of a message, or its annotations are malformed.
        AmqpError: The partition key is not the publisher's name.
    """
    walk(payload, limits)
    head = walk_head(payload, limits)
    annotations = read_annotations(head.message_annotations, limits)
    kept = {name: value for name, value in annotations.items() if name not in _SERVICE}
    key = kept.get(PARTITION_KEY)
    if publisher is not None:
        if key not in (None, publisher, publisher.encode()):
            raise AmqpError(
                f"the partition key {key!r:.100} is not the name of the publisher {publisher!r:.100}:"
                " leave it out",
                condition=ARGUMENT_ERROR,
            )
        key = kept[PARTITION_KEY] = publisher
        kept[PUBLISHER] = publisher
    producer = (
        annotations.get(PRODUCER_ID),
        annotations.get(PRODUCER_EPOCH),
        annotations.get(PRODUCER_SEQUENCE_NUMBER),
    )
    if head.delivery_annotations or kept != annotations:
        out = bytearray(head.header)
        write_annotations(out, MESSAGE_ANNOTATIONS, kept)
        payload = bytes(out) + head.rest
    return Event(payload, key_octets(key), producer)


def key_octets(key: object) -> bytes | None:
    """Return the octets of a partition key that are hashed; None if *key* is none."""
    if isinstance(key, str):
        return key.encode("utf-8", "surrogatepass")
    return key if isinstance(key, bytes) else None


class Arrival(Struct, frozen=True):
    """Events of one delivery, which are stored together in one partition, or not at all."""

    events: list[Event]
    #: Octets of the partition key for all of them; None without one.
    key: bytes | None


class Arriving:
    """One delivery, a message or a batch, whose events are decoded one at a time.

    Iterate to the end; :attr:`arrival` has the events then. The key of a batch is that of its envelope, or else
    that of its first event: the SDKs write both.

    Args:
        payload: The message or batch.
        message_format: Its format.
        publisher: Publisher in the address of the link.
        limits: Bounds of the annotations.
    """

    def __init__(
        self,
        payload: bytes,
        message_format: int,
        *,
        publisher: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._payload = payload
        self._format = message_format
        self._publisher = publisher
        self._limits = limits
        self.arrival = Arrival([], None)

    def __iter__(self) -> Iterator[None]:
        """Decode the delivery, and yield after each event.

        Raises:
            DecodeError: The message or the batch is malformed, or has another format.
            AmqpError: As for :func:`arrived_event`.
        """
        limits = self._limits
        if self._format == MESSAGE_FORMAT:
            event = arrived_event(self._payload, publisher=self._publisher, limits=limits)
            self.arrival = Arrival([event], event.key)
            return
        if self._format != BATCH_FORMAT:
            raise DecodeError(
                f"the message format 0x{self._format:08x} is neither 0 nor 0x{BATCH_FORMAT:08x}, which is"
                " that of batches"
            )
        events: list[Event] = []
        for each in split_batch(self._payload, limits=limits, messages_max=BATCH_EVENTS_MAX):
            events.append(arrived_event(each, publisher=self._publisher, limits=limits))
            yield
        envelope = read_annotations(walk_head(self._payload, limits).message_annotations, limits)
        self.arrival = Arrival(events, key_octets(envelope.get(PARTITION_KEY)) or events[0].key)


def delivered_event(
    payload: bytes,
    number: int,
    time_ms: int,
    delivery_annotations: Mapping[Any, object] | None = None,
) -> Payload:
    """Encode an event for a reader. Large events are returned in pieces.

    Args:
        payload: The event as it was kept.
        number: Its sequence number, which as text is its offset.
        time_ms: Time at which it was enqueued, in milliseconds since 1970.
        delivery_annotations: Delivery annotations; None for none.
    """
    head = walk_head(payload)
    out = bytearray(head.header)
    if delivery_annotations:
        write_annotations(out, DELIVERY_ANNOTATIONS, delivery_annotations)
    out += _with_place(head.message_annotations, number, time_ms)
    if len(payload) < JOIN_MAX:
        return bytes(out) + head.rest
    return [bytes(out), head.rest]


#: Descriptor of the message annotations.
_OPENING: Final = SECTION_OPENINGS[MESSAGE_ANNOTATIONS]
#: Constructor of a short map; octets and items that its own octets can count.
_SHORT_MAP: Final = b"\xc1"
_SHORT_MAX: Final = 255
#: Items of a map that say the place of an event: keys and values.
_PLACE_ITEMS: Final = 6
#: Keys of the place, each with the constructor of its value.
_AT_NUMBER, _AT_OFFSET, _AT_TIME = (
    bytes((0xA3, len(key))) + key.encode() + bytes((constructor,))
    for key, constructor in ((SEQUENCE_NUMBER, 0x81), (OFFSET, 0xA1), (ENQUEUED_TIME, 0x83))
)


def _with_place(own: bytes, number: int, time_ms: int) -> bytes:
    """Return the message annotations of an event with its place, behind those of its sender.

    Spliced and not decoded, because that would be the largest part of the cost of a delivery. Keys of the place never are
    among those of the sender (:func:`arrived_event`).

    Args:
        own: Section with the annotations of the sender, empty without any.
        number: Sequence number of the event.
        time_ms: Time at which it was enqueued.
    """
    items, count = b"", 0
    if own[len(_OPENING) : len(_OPENING) + 1] == _SHORT_MAP and own.startswith(_OPENING):
        count, items = own[len(_OPENING) + 2], own[len(_OPENING) + 3 :]
    elif own:
        place = {SEQUENCE_NUMBER: number, OFFSET: str(number), ENQUEUED_TIME: Timestamp(time_ms)}
        out = bytearray()
        write_annotations(out, MESSAGE_ANNOTATIONS, {**read_annotations(own), **place})
        return bytes(out)
    text = b"%d" % number
    said = b"".join(
        (
            items,
            _AT_NUMBER,
            number.to_bytes(8, signed=True),
            _AT_OFFSET,
            len(text).to_bytes(),
            text,
            _AT_TIME,
            time_ms.to_bytes(8, signed=True),
        )
    )
    count += _PLACE_ITEMS
    # The size of a map includes the octets of its count.
    if len(said) < _SHORT_MAX and count <= _SHORT_MAX:
        return b"".join((_OPENING, _SHORT_MAP, (len(said) + 1).to_bytes(), count.to_bytes(), said))
    return b"".join((_OPENING, b"\xd1", (len(said) + 4).to_bytes(4), count.to_bytes(4), said))


def joined(payload: Payload) -> bytes:
    """Return *payload* in one piece."""
    return payload if isinstance(payload, bytes) else b"".join(payload)
