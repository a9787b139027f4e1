"""Replies that are kept for as long as their ``ttl`` allows."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, TypeAlias

from ..message import Message
from .states import check_least

#: Octets that an entry of a cache takes besides its reply: key, objects and table.
ENTRY_OVERHEAD: Final = 512
#: Connection, address, and digest of the encoded request.
CacheKey: TypeAlias = tuple[object, str, bytes]


class Cache:
    """Keep replies for as long as their ``ttl`` allows, and ask once for equal requests.

    A reply is kept only if it is a success and its header has a ``ttl``, which counts from its arrival.
    Requests are equal if connection, address, payload and properties are; replies are never shared by
    connections, and so never by users. While a request is under way, equal ones wait for its
    reply. If that reply may not be kept, each of them sends its own request.

    Args:
        entries: Most replies; beyond these the least recently used one is dropped.
        octets: Most octets of all replies together; a larger reply is not kept.

    Raises:
        ValueError: An argument is less than 1.
    """

    def __init__(self, entries: int = 1_024, *, octets: int = 16 * 1024 * 1024) -> None:
        check_least("Cache", "entries", entries, 1)
        check_least("Cache", "octets", octets, 1)
        self.entries = entries
        self.octets = octets
        self._kept: OrderedDict[CacheKey, tuple[float, int, Message]] = OrderedDict()
        self._octets = 0
        #: Requests under way, with an object that the waiting calls share. See ``container.calling``.
        self.flights: dict[CacheKey, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: CacheKey, now: float) -> Message | None:
        """Return the kept reply for *key*, or None."""
        found = self._kept.get(key)
        if found is None:
            return None
        if now >= found[0]:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return found[2]

    def put(self, key: CacheKey, reply: Message, size: int, now: float) -> bool:
        """Keep *reply* of *size* octets, arrived at *now*, if its ``ttl`` allows; return whether."""
        ttl_ms = reply.ttl_ms
        if not ttl_ms:
            return False
        if key in self._kept:
            self._drop(key)
        size += ENTRY_OVERHEAD
        if size <= self.octets:
            self._kept[key] = (now + ttl_ms / 1000, size, reply)
            self._octets += size
            while self._octets > self.octets or len(self._kept) > self.entries:
                self._drop(next(iter(self._kept)))
        return True

    def clear(self) -> None:
        """Drop all replies. Requests under way are not affected."""
        self._kept.clear()
        self._octets = 0

    def _drop(self, key: CacheKey) -> None:
        self._octets -= self._kept.pop(key)[1]
