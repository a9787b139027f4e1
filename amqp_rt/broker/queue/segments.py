"""Blocks of neighbouring messages in a queue, and how those that wait for long are packed. Pure.

A block far behind the front and far before the end of its queue is *packed* into columns: the values of a field are one
value if all messages agree, as in most fields, or else a tuple. That takes less than half of the memory. The collector
does not look at the messages any more, since it stops tracking a tuple of bytes or numbers when it first sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, Final

from msgspec.structs import astuple

from ..entries import Entry

#: Slots of a segment, and the shift and mask that find one.
SEGMENT: Final = 128
SHIFT: Final = 7
MASK: Final = 127

_FIELDS: Final[tuple[str, ...]] = Entry.__struct_fields__
_PAYLOAD: Final = _FIELDS.index("payload")
_SEQUENCE: Final = _FIELDS.index("sequence")
#: Fields whose values belong to one message and its queue: with any of them it is not packed.
_OWN: Final = tuple(_FIELDS.index(name) for name in ("marks", "due", "avoid", "origin"))
#: Slots of packed segments: one list for all, since the collector looks at each.
_NO_SLOTS: Final[list[Entry | None]] = []


class Segment:
    """Block of neighbouring slots, in which the messages of a queue are found by sequence number."""

    def __init__(self, number: int) -> None:
        self.number = number
        #: Messages by their slots; empty while the segment is packed.
        self.slots: list[Entry | None] = [None] * SEGMENT
        self.live: int = 0
        self.packed: bool = False
        #: Of a packed segment: payloads by slots, None for a message that was taken since.
        self._payloads: tuple[bytes | None, ...] = ()
        self._taken: tuple[int, ...] = ()
        #: One of its messages, and the fields in which others differ, by their numbers.
        self._like: Entry | None = None
        self._columns: tuple[tuple[int, tuple[Any, ...]], ...] = ()

    def pack(self) -> None:
        """Keep columns instead of entries, if all slots are filled."""
        if self.packed or self.live < SEGMENT:
            return
        slots: list[Any] = self.slots
        columns: list[tuple[Any, ...]] = list(zip(*map(astuple, slots), strict=True))
        for own in _OWN:
            if columns[own].count(None) < SEGMENT:
                return
        self._payloads = columns[_PAYLOAD]
        self._columns = tuple(
            (at, column)
            for at, column in enumerate(columns)
            if at not in {_PAYLOAD, _SEQUENCE} and column.count(column[0]) < SEGMENT
        )
        like = _copy(slots[0])
        like.payload = b""
        self._like = like
        self.packed = True
        self.slots = _NO_SLOTS

    def unpack(self) -> None:
        """Make entries of all messages again."""
        assert self._like is not None
        columns: list[Iterable[Any]] = [repeat(value) for value in astuple(self._like)]
        for at, column in self._columns:
            columns[at] = column
        first = self.number << SHIFT
        columns[_PAYLOAD] = self._payloads
        columns[_SEQUENCE] = range(first, first + SEGMENT)
        slots: list[Any] = list(map(Entry, *columns))
        for taken in self._taken:
            slots[taken] = None
        self.slots = slots
        self.packed = False
        self._payloads = ()
        self._taken = ()
        self._like = None
        self._columns = ()

    def peek(self, at: int) -> Entry | None:
        """Return the message in slot *at* of this packed segment: an entry of its own, to be read or taken."""
        payload = self._payloads[at]
        if payload is None:
            return None
        entry = _copy(self._like)
        entry.payload = payload
        entry.sequence = self.number << SHIFT | at
        for field, column in self._columns:
            setattr(entry, _FIELDS[field], column[at])
        return entry

    def take(self, at: int) -> Entry | None:
        """Remove the message in slot *at* of this packed segment, which stays packed, and return it."""
        entry = self.peek(at)
        self._taken = (*self._taken, at)
        self._payloads = (*self._payloads[:at], None, *self._payloads[at + 1 :])
        return entry

    @property
    def taken(self) -> int:
        """Number of messages that were removed since it was packed."""
        return len(self._taken)


def _copy(entry: Any) -> Entry:
    # The method of the struct, since copy.copy() takes three times as long.
    copied: Entry = entry.__copy__()
    return copied
