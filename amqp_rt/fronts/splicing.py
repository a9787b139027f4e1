"""Messages of AMQP 1.0 assembled and split as octets, for protocols with exchanges and routing keys.

The broker stores every message in the form of 1.0 (Part 3 §3.2). Exchange and routing key are the first
two message annotations of a message from such a protocol, so that all sections before the body can be
encoded once for messages that differ in these and in the body only, and converted once on the way out.
Properties without a field in 1.0 travel in further annotations, whose names begin with ``x-``.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct as Layout
from typing import Final, NamedTuple

from ..values import Symbol

#: Message annotations with the exchange and routing key of a message, named as in RabbitMQ.
EXCHANGE: Final = Symbol("x-exchange")
ROUTING_KEY: Final = Symbol("x-routing-key")
#: The property ``type``, which has no field in 1.0.
TYPE: Final = Symbol("x-basic-type")
#: The property ``app-id``, which has no field in 1.0.
APP_ID: Final = Symbol("x-basic-app-id")
#: Headers that application-properties cannot hold, such as tables and arrays, and names in ``x-``.
HEADERS: Final = Symbol("x-basic-headers")
#: Present if the priority was set to 0, and if a delivery-mode other than 2 was set; without them
#: the properties were absent.
PRIORITY: Final = Symbol("x-basic-priority")
DELIVERY_MODE: Final = Symbol("x-basic-delivery-mode")
#: The expiration as published: the ttl of 1.0 counts down on the way.
EXPIRATION: Final = Symbol("x-basic-expiration")
#: Of a message of 0-10: which fields were absent, as a number; and structs with values that 1.0 has no
#: place for.
FORM: Final = Symbol("x-amqp010-form")
STRUCTS: Final = Symbol("x-amqp010-structs")
#: Of a message of 0-10's classes file and stream: the name of the class.
CONTENT_CLASS: Final = Symbol("x-content-class")
#: All annotations above.
ANNOTATIONS: Final = frozenset(
    (
        *(EXCHANGE, ROUTING_KEY, TYPE, APP_ID, HEADERS, PRIORITY, DELIVERY_MODE, EXPIRATION),
        *(FORM, STRUCTS, CONTENT_CLASS),
    )
)
#: Dead-lettering history, oldest first.
HISTORY: Final = Symbol("x-opt-dead-letter-history")


class FrontSections(NamedTuple):
    """The sections before the body of an AMQP 1.0 message, without exchange and routing key."""

    header: bytes
    #: Message annotations other than exchange and routing key: number of keys and values, and their
    #: octets.
    more: int
    others: bytes
    rest: bytes


def place_of(exchange: bytes, routing_key: bytes) -> bytes:
    """Encode the annotations for exchange and routing key, each given as its size, one octet, and UTF-8."""
    return _EXCHANGE_IS + exchange + _KEY_IS + routing_key


def split_front(front: bytes) -> FrontSections | None:
    """Split encoded sections before a body, whose annotations begin with empty exchange and key.

    The result is None if they do not begin so.
    """
    found = _annotations(front)
    if found is None:
        return None
    at, key_end, section_end = found
    start = 6 if front[at + 3] == _MAP8 else 12
    count = front[at + 5] if start == 6 else int.from_bytes(front[at + 8 : at + 12], "big")
    return FrontSections(front[:at], count - 4, front[key_end:section_end], front[section_end:])


def joined(front: FrontSections, place: bytes, body: bytes) -> bytes:
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


def with_data(front: bytes, body: Sequence[bytes]) -> bytes:
    """Assemble an AMQP 1.0 message of the sections *front* and one data section with *body* in pieces."""
    size = len(body[0]) if len(body) == 1 else sum(map(len, body))
    if size < 256:
        return b"".join((front, _DATA8[size], *body))
    return b"".join((front, b"\0\x53\x75\xb0", size.to_bytes(4, "big"), *body))


def split_data(payload: bytes) -> tuple[int, int] | None:
    """Find the only data section of a message, which ends it.

    Returns:
        The end of the sections before, and the start of the body; None for all other messages, malformed
            ones included.
    """
    at, end = 0, len(payload)
    try:
        while True:
            kind = payload[at : at + 4]
            code = _SIZES8.get(kind)
            if code is not None:
                start = at + 5
                after = start + payload[at + 4]
            elif kind in _SIZES32:
                code = kind[2]
                start = at + 8
                after = start + int.from_bytes(payload[at + 4 : start], "big")
            else:
                return None
            if code == _DATA:
                return (at, start) if after == end and start <= end else None
            at = after
    except IndexError:
        return None


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
            return _new(Parts, ((address, payload[:at]), None, body))
        begin, key_end, section_end = found
        others = payload[key_end:section_end]
        if _HISTORY_OCTETS in others:
            # The header ``x-death`` contains exchange and routing key, so they belong to the cache
            # key.
            return _new(Parts, ((address, payload[:at]), None, body))
        exchange = begin + (19 if payload[begin + 3] == _MAP8 else 25)
        routing = exchange + 1 + payload[exchange] + len(_KEY_IS)
        place = payload[exchange : routing - len(_KEY_IS)] + payload[routing:key_end]
        return _new(Parts, ((payload[:begin], others, payload[section_end:at]), place, body))
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


#: Creates Parts in half the time that ``Parts(...)`` takes.
_new: Final = tuple.__new__
_DATA: Final = 0x75
_DATA8: Final = [bytes((0, 0x53, 0x75, 0xA0, size)) for size in range(256)]
_ANNOTATIONS: Final = 0x72
_MAP8: Final = 0xC1
_SIZE_AND_COUNT: Final = Layout(">II")
#: The annotations that each message begins with, up to the size of their values.
_EXCHANGE_IS: Final = b"\xa3\x0ax-exchange\xa1"
_KEY_IS: Final = b"\xa3\x0dx-routing-key\xa1"
_HISTORY_OCTETS: Final = str(HISTORY).encode()
#: Codes of the sections, with the constructors for a size of 8 and of 32 bits: lists, maps and
#: binaries.
_FORMS: Final = [
    *((0x70, 0xC0, 0xD0), (0x71, 0xC1, 0xD1), (0x72, 0xC1, 0xD1), (0x73, 0xC0, 0xD0)),
    *((0x74, 0xC1, 0xD1), (0x75, 0xA0, 0xB0)),
]
_SIZES8: Final = {bytes((0, 0x53, code, short)): code for code, short, _ in _FORMS}
_SIZES32: Final = frozenset(bytes((0, 0x53, code, wide)) for code, _, wide in _FORMS)
