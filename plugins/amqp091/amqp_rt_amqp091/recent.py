"""What was made of octets lately. Publishers say much the same again and again.

One :class:`Recent` of each kind belongs to a front and serves all its connections: what is in it follows
from the octets alone, nobody's rights or names do.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

from .messages import Front
from .methods import BasicProperties, BasicPublish

K = TypeVar("K")
V = TypeVar("V")

#: Entries of one generation, of which there are two: places are many and small, sets of properties few
#: and, as tables, large.
_PLACES_MAX: Final = 512
_SETS_MAX: Final = 128
#: Octets that are looked up; what is longer is made each time.
OCTETS_MAX: Final = 512


class Recent(Generic[K, V]):
    """A bounded map that forgets what has not been asked for while as much again came.

    There are two generations: who is found in the old one moves to the young one, and when that
    is full, the old one goes.
    """

    def __init__(self, entries_max: int = _SETS_MAX) -> None:
        self._entries_max = entries_max
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """What was made of *key*, None if that is forgotten."""
        found = self._young.get(key)
        if found is None and self._old:
            found = self._old.pop(key, None)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember *value* for a while."""
        if len(self._young) >= self._entries_max:
            self._old = self._young
            self._young = {}
        self._young[key] = value


class Published(NamedTuple):
    """A ``basic.publish`` that was read, and where it publishes to as annotations say it."""

    method: BasicPublish
    place: bytes


class Delivered(NamedTuple):
    """How what comes before the body of a message of AMQP 1.0 is said in 0-9-1."""

    redelivered: bool
    #: Exchange and routing key, as ``basic.deliver`` ends, unless the message says them itself.
    place: bytes
    #: Property flags and properties, as a content header ends.
    properties: bytes


class Recents:
    """All that a front remembers."""

    def __init__(self) -> None:
        #: Octets of ``basic.publish`` → the method.
        self.methods: Recent[bytes, Published] = Recent(_PLACES_MAX)
        #: Flags and properties of a content header → the properties, which nobody changes.
        self.properties: Recent[bytes, BasicProperties] = Recent()
        #: Likewise → what comes before the body of the message of AMQP 1.0.
        self.fronts: Recent[bytes, Front] = Recent()
        #: What comes before the body of a message in a queue → how a consumer is told.
        self.delivered: Recent[tuple[object, ...], Delivered] = Recent()
