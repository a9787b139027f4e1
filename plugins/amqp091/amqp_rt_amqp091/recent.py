"""Caches of a front: methods and properties that publishers repeat, and deliveries alike."""

from __future__ import annotations

from typing import Final, NamedTuple

from amqp_rt.fronts.recent import Recent
from amqp_rt.fronts.splicing import FrontSections, place_of

from .methods import BasicProperties, BasicPublish

#: Entries of one generation of places: there are many, which are small, unlike sets of properties.
_PLACES_MAX: Final = 512


class Published(NamedTuple):
    """A decoded ``basic.publish``, and its exchange and routing key as encoded annotations."""

    method: BasicPublish
    place: bytes


def read_publish(payload: bytes) -> Published | None:
    """Decode ``basic.publish``; None if it is malformed or a name is not UTF-8."""
    try:
        first = 7 + payload[6]
        second = first + 1 + payload[first]
        if len(payload) != second + 1:
            return None
        method = BasicPublish(
            reserved_1=payload[4] << 8 | payload[5],
            exchange=payload[7:first].decode(),
            routing_key=payload[first + 1 : second].decode(),
            mandatory=bool(payload[second] & 1),
            immediate=bool(payload[second] & 2),
        )
    except (IndexError, UnicodeDecodeError):
        return None
    return Published(method, place_of(payload[6:first], payload[first:second]))


class Delivered(NamedTuple):
    """Parts of a delivery in 0-9-1 that follow from the sections before an AMQP 1.0 body."""

    redelivered: bool
    #: Exchange and routing key, as ``basic.deliver`` ends; used where ``Parts.place`` is None.
    place: bytes
    #: Property flags and properties, as in a content header.
    properties: bytes


class Recents:
    """All caches of a front."""

    def __init__(self) -> None:
        #: Octets of ``basic.publish`` → the method.
        self.methods: Recent[bytes, Published] = Recent(_PLACES_MAX)
        #: Flags and properties of a content header → the properties, which are never modified.
        self.properties: Recent[bytes, BasicProperties] = Recent()
        #: Flags and properties of a content header → the sections before the body in AMQP 1.0.
        self.fronts: Recent[bytes, FrontSections] = Recent()
        #: Sections before the body of a queued message → the parts of its delivery.
        self.delivered: Recent[tuple[object, ...], Delivered] = Recent()
