"""Values that a queue reads from messages to sort them, replace them, and keep groups together.

A queue without such options never decodes a bare message. One with them does so once, when the
message arrives, and keeps the values.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Hashable
from math import isnan
from typing import Any, Final
from uuid import UUID
from zlib import crc32

from msgspec import Struct

from ...errors import DecodeError
from ...limits import DEFAULT_LIMITS, Limits
from ...message import MESSAGE_FORMAT, Properties
from ...values import Symbol, Timestamp
from ..entries import Entry
from ..filtering.filters import compile_filter_set
from ..filtering.views import MessageView

_PROPERTIES: Final = frozenset(Properties.__struct_fields__)

#: Types of values that can be a key; None and collections cannot.
_KEYS: Final = (str, int, float, bytes, UUID, dt.datetime)

#: Octets of a sort value: its class, and the longest value of a class.
_OCTETS: Final = 129
_TEXT_OCTETS: Final = _OCTETS - 1

#: Classes of keys, in their sort order.
_BOOLEAN, _NUMBER, _TIME, _TEXT, _BINARY, _UUID, _NONE = range(7)

#: Sort value of messages without the sort key: they come after all that have one.
LAST: Final = _NONE << 8 * _TEXT_OCTETS

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND: Final = dt.timedelta(milliseconds=1)


class Marks(Struct, gc=False):
    """Values that a queue has read from a message."""

    #: Of messages with equal keys only the last is kept; None if it has no key.
    key: Hashable = None
    #: Sort value; lower ones come first.
    order: int = 0
    #: Number of the message's group, -1 for none.
    group: int = -1
    #: Whether a later message with the same key has arrived.
    replaced: bool = False
    #: Whether the selector of the queue matches.
    selected: bool = True


class MessageField:
    """Field of a message, as named in a declaration.

    Args:
        text: ``properties.NAME`` with a name of the standard, such as ``properties.group-id``;
            ``message-annotations.NAME``, ``application-properties.NAME``, or the bare name of an
            application property.

    Raises:
        ValueError: No such field exists.
    """

    def __init__(self, text: str) -> None:
        section, dot, name = text.partition(".")
        if not dot or section not in {
            "properties",
            "message-annotations",
            "application-properties",
        }:
            section, name = "application-properties", text
        if section == "properties":
            name = name.replace("-", "_")
            if name not in _PROPERTIES:
                raise ValueError(f"messages have no property {name!r}")
        if not name:
            raise ValueError(f"{text!r} names no field of a message")
        self.section = section
        self.name = name

    def read(self, view: MessageView) -> Any:
        """Return the field's value, None if the message has none.

        Raises:
            DecodeError: The section is malformed.
        """
        if self.section == "properties":
            return getattr(view.properties(), self.name)
        if self.section == "message-annotations":
            return view.message_annotations().get(Symbol(self.name))
        return view.application_properties().get(self.name)


def marker(
    *,
    last_value_key: str | None = None,
    sort_key: str | None = None,
    groups: int = 0,
    group_key: str | None = None,
    selector: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Callable[[Entry], Marks] | None:
    """Return a function that reads the marks of messages for these options; None if none are set.

    Raises:
        ValueError: A key does not name a field.
        InvalidFilter: The selector is malformed, or exceeds a limit.
    """
    latest = None if last_value_key is None else MessageField(last_value_key)
    sorting = None if sort_key is None else MessageField(sort_key)
    grouping = MessageField(group_key or "properties.group-id")
    wanted = None
    if selector is not None:
        wanted = compile_filter_set({Symbol("jms-selector"): selector}, limits=limits)
    if latest is None and sorting is None and not groups and wanted is None:
        return None

    def read(entry: Entry) -> Marks:
        marks = Marks(order=0 if sorting is None else LAST)
        if wanted is not None:
            marks.selected = wanted.matches(entry)
        if entry.message_format != MESSAGE_FORMAT:
            return marks
        view = MessageView(entry, limits)
        try:
            if latest is not None:
                marks.key = key_of(latest.read(view))
            if sorting is not None:
                marks.order = order_of(sorting.read(view))
            if groups:
                group = key_of(grouping.read(view))
                if group is not None:
                    octets = group if isinstance(group, bytes) else str(group).encode()
                    marks.group = crc32(octets) % groups
        except DecodeError:
            # The receiver will detect the malformed section; for sorting the message has no key.
            pass
        return marks

    return read


def key_of(value: Any) -> Hashable:
    """Convert *value* to a hashable key, equal for equal values; None if it cannot be a key."""
    if not isinstance(value, _KEYS):
        return None
    if isinstance(value, str):
        # A symbol or a character is the same key as the equal string.
        return str(value)
    if isinstance(value, bool):
        return (_BOOLEAN, value)
    if isinstance(value, float) and isnan(value):
        return (_NUMBER, "nan")
    return value


def order_of(value: Any) -> int:
    """Return a number that sorts *value* among all possible keys.

    False comes before true; then follow numbers of any type by value, times, strings by the first
    128 octets of their UTF-8, binaries likewise, UUIDs; and last all other values.
    """
    if isinstance(value, bool):
        return _ordered(_BOOLEAN, bytes((value,)))
    if isinstance(value, Timestamp):
        return _ordered(_TIME, _number(int(value)))
    if isinstance(value, dt.datetime):
        return _ordered(_TIME, _number((value - _EPOCH) // _MILLISECOND))
    if isinstance(value, str):
        return _ordered(_TEXT, str(value).encode("utf-8", "surrogatepass")[:_TEXT_OCTETS])
    if isinstance(value, int | float):
        return _ordered(_NUMBER, _number(value))
    if isinstance(value, bytes):
        return _ordered(_BINARY, value[:_TEXT_OCTETS])
    if isinstance(value, UUID):
        return _ordered(_UUID, value.bytes)
    return LAST


def _ordered(kind: int, octets: bytes) -> int:
    return int.from_bytes(bytes((kind,)) + octets.ljust(_TEXT_OCTETS, b"\0"), "big")


def _number(value: float) -> bytes:
    """Encode a number as octets that sort by value: the nearest double, then the difference."""
    nearest = float(value)
    if isnan(nearest):
        return b"\xff" * 16
    (bits,) = struct.unpack(">Q", struct.pack(">d", nearest + 0.0))
    bits = bits ^ 0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else bits | 1 << 63
    off = value - int(nearest) if isinstance(value, int) else 0
    return struct.pack(">QQ", bits, off + (1 << 63))
