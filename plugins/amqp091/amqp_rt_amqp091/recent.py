"""Caches of conversions from and to octets: publishers repeat methods and properties.

One :class:`Recent` of each kind belongs to a front and serves all its connections: entries follow
from the octets alone, not from a user's rights or from names on a connection.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

from .messages import Front, place_of
from .methods import BasicProperties, BasicPublish

K = TypeVar("K")
V = TypeVar("V")

#: Entries of one generation, of which there are two: there are many places, which are small, and
#: few sets of properties, which are large when they hold tables.
_PLACES_MAX: Final = 512
_SETS_MAX: Final = 128
#: Longest octets that are cached; longer ones are converted each time.
OCTETS_MAX: Final = 512


class Recent(Generic[K, V]):
    """A bounded map that evicts entries not used while a whole generation of others was added.

    An entry found in the old generation moves to the young one; when the young one is full, it
    becomes the old one, and the old one is dropped.
    """

    def __init__(self, entries_max: int = _SETS_MAX) -> None:
        self._entries_max = entries_max
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Return the value cached for *key*, None if there is none."""
        found = self._young.get(key)
        if found is None and self._old:
            found = self._old.pop(key, None)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Cache *value* under *key*."""
        if len(self._young) >= self._entries_max:
            self._old = self._young
            self._young = {}
        self._young[key] = value


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
        self.fronts: Recent[bytes, Front] = Recent()
        #: Sections before the body of a queued message → the parts of its delivery.
        self.delivered: Recent[tuple[object, ...], Delivered] = Recent()
