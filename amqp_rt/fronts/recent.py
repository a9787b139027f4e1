"""Cache of conversions from and to octets: publishers repeat commands and properties.

A front has one :class:`Recent` for each kind of conversion, which serves all its connections: entries
follow from the octets alone, not from a user's rights or from names on a connection.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

__all__ = ["OCTETS_MAX", "Recent"]

K = TypeVar("K")
V = TypeVar("V")

#: Entries of one generation, of which there are two, where the caller sets no other number.
_ENTRIES_MAX: Final = 128
#: Longest octets that are worth an entry; longer ones are converted each time.
OCTETS_MAX: Final = 512


class Recent(Generic[K, V]):
    """A bounded map that evicts entries not used while a whole generation of others was added.

    An entry found in the old generation moves to the young one; when the young one is full, it
    becomes the old one, and the old one is dropped.

    Args:
        entries_max: Entries of one generation; the map holds at most twice as many.
    """

    def __init__(self, entries_max: int = _ENTRIES_MAX) -> None:
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
