"""Views of messages for filters: each section is decoded on first use, the body never.

A node holds messages encoded. Filters name a few fields, so only the sections of these are decoded,
once for all filters of a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import maxsize
from typing import Any, Final

from ...codec.sections import (
    MESSAGE_ANNOTATIONS,
    read_annotation_map,
    read_application_properties,
    read_header_fields,
    read_properties,
    read_section_code,
    walk_front,
)
from ...limits import Limits
from ...message import Properties
from ..entries import Entry

__all__ = ["Exhausted", "MessageView"]

_NO_PROPERTIES = Properties()

#: Octets of a section that are decoded in the time of a step, if it has few and long fields.
_OCTETS_OF_A_STEP: Final = 128
#: Steps for decoding an entry of a map, the properties, and the header.
_STEPS_OF_AN_ENTRY: Final = 4
_STEPS_OF_PROPERTIES: Final = 4
_STEPS_OF_A_HEADER: Final = 6
#: Largest number of steps counted for a map of annotations.
_NESTED_MAX: Final = 2_500


class Exhausted(Exception):
    """Error that the filters of a link have used all steps allowed for one message."""


class MessageView:
    """View of one message for the filters of one link.

    Reading a malformed section raises ``DecodeError``. The steps of reading and of filters are
    counted; each takes about a third of a microsecond.

    Args:
        entry: The message.
        limits: Bounds of decoding.
        steps_max: Steps after which reading and filters raise :class:`Exhausted`.
    """

    __slots__ = (
        "_application_properties",
        "_front",
        "_limits",
        "_message_annotations",
        "_properties",
        "_steps_max",
        "entry",
        "steps",
    )

    def __init__(self, entry: Entry, limits: Limits, steps_max: int = maxsize) -> None:
        self.entry = entry
        #: Number of steps taken.
        self.steps = 0
        self._steps_max = steps_max
        self._limits = limits
        self._front: tuple[int, int, int, int, int] | None = None
        self._message_annotations: Mapping[Any, object] | None = None
        self._properties: Properties | None = None
        self._application_properties: Mapping[str, object] | None = None

    def spend(self, steps: int) -> None:
        """Count *steps* taken by a filter.

        Raises:
            Exhausted: More steps than allowed have been taken.
        """
        self.steps += steps
        if self.steps > self._steps_max:
            raise Exhausted

    def ttl(self) -> int | None:
        """Return the time to live of the message on arrival, in milliseconds (§3.2.1).

        The other fields of the header are attributes of the entry.
        """
        self.spend(_STEPS_OF_A_HEADER)
        header_end = (self._front or self._find())[0]
        return read_header_fields(self.entry.payload, header_end, self._limits)[2]

    def message_annotations(self) -> Mapping[Any, object]:
        """Return the message annotations (§3.2.3)."""
        found = self._message_annotations
        if found is None:
            payload = self.entry.payload
            _, at, end, _, _ = self._front or self._find()
            found = {}
            if at < end:
                self.spend((end - at) // _OCTETS_OF_A_STEP)
                _, content = read_section_code(payload, at, self._limits)
                found = read_annotation_map(
                    payload, MESSAGE_ANNOTATIONS, content, end, self._limits
                )
                # Their values may be lists of small elements.
                self.spend(min(_STEPS_OF_AN_ENTRY * len(found) + (end - at) // 4, _NESTED_MAX))
            self._message_annotations = found
        return found

    def properties(self) -> Properties:
        """Return the standard properties; all None if the section is absent (§3.2.4)."""
        found = self._properties
        if found is None:
            _, _, at, end, _ = self._front or self._find()
            found = _NO_PROPERTIES
            if at < end:
                self.spend(_STEPS_OF_PROPERTIES + (end - at) // _OCTETS_OF_A_STEP)
                found = read_properties(self.entry.payload, at, end, self._limits)
            self._properties = found
        return found

    def application_properties(self) -> Mapping[str, object]:
        """Return the application properties (§3.2.5)."""
        found = self._application_properties
        if found is None:
            _, _, _, at, end = self._front or self._find()
            found = {}
            if at < end:
                self.spend((end - at) // _OCTETS_OF_A_STEP)
                found = read_application_properties(self.entry.payload, at, end, self._limits)
                self.spend(_STEPS_OF_AN_ENTRY * len(found))
            self._application_properties = found
        return found

    def _find(self) -> tuple[int, int, int, int, int]:
        self._front = front = walk_front(self.entry.payload, self._limits)
        return front
