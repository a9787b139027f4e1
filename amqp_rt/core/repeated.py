"""Frames that connections have in common, encoded and decoded once.

The opens, begins, detaches and closes of the connections of one application are mostly the same octets. What a
connection costs is largely what these frames cost, since each of them is a list of many fields.

Nothing that only one connection knows is kept: maps, such as properties, and errors are always encoded and
decoded, as are all attaches.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from msgspec.structs import astuple

from ..codec.composites import read_composite
from ..codec.primitives import Reader
from ..limits import Limits
from ..outcomes import Error
from .frames import AMQP_FRAME, performative_frame, shortened, whole_error
from .performatives import PERFORMATIVES, Begin, Close, Detach, End, Open

#: Frames that are kept in each direction; all are forgotten when there are more.
_FRAMES_MAX: Final = 256
#: Octets of a performative that is kept.
_OCTETS_MAX: Final = 256


class _Recent:
    """Cache of the latest frames, bounded as ``lru_cache`` is, which would also keep what must not be kept."""

    def __init__(self) -> None:
        #: Encoded frames by the class and the fields of their performative.
        self.encoded: dict[object, bytes] = {}
        #: Performatives by their octets, with the limits they keep within and the number of their elements.
        self.decoded: dict[bytes, tuple[Limits, Any, int]] = {}


_RECENT: Final = _Recent()


def repeated_frame(channel: int, performative: Any, kind: int = AMQP_FRAME) -> bytes:
    """Encode the frame of *performative*, or return the equal frame that was encoded before.

    For performatives without secrets, which are likely to be sent again.

    Raises:
        EncodeError: A field has no encoding.
    """
    key = (type(performative), channel, kind, astuple(performative))
    try:
        known = _RECENT.encoded.get(key)
    except TypeError:
        # Maps and errors have no hash.
        return performative_frame(channel, performative, kind)
    if known is None:
        known = performative_frame(channel, performative, kind)
        if len(known) <= _OCTETS_MAX:
            if len(_RECENT.encoded) >= _FRAMES_MAX:
                _RECENT.encoded.clear()
            _RECENT.encoded[key] = known
    return known


def final_frame(channel: int, performative: Any, size_max: int, *, whole: bool = False) -> bytes:
    """Encode a detach, end or close, and shorten its error if it exceeds *size_max*.

    With *whole* the error is written with all its fields.

    An error's text may come from the peer or from a user, while the frame size is the peer's
    choice.
    """
    error: Error | None = performative.error
    if error is None:
        return repeated_frame(channel, performative)
    if whole:
        performative.error = whole_error(error)
    data = performative_frame(channel, performative)
    if len(data) > size_max:
        performative = copy.copy(performative)
        performative.error = shortened(error)
        if whole:
            performative.error.info = {}
        data = performative_frame(channel, performative)
    return data


def read_performative(data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
    """Read the performative between *at* and *end*; return it and the number of its elements.

    Equal octets may give the same object, which is not to be changed.

    Raises:
        DecodeError: The octets cannot be decoded, or exceed the limits.
    """
    octets = b""
    if end - at <= _OCTETS_MAX:
        octets = data[at:end]
        known = _RECENT.decoded.get(octets)
        if known is not None and known[0] is limits:
            return known[1], known[2]
    reader = Reader(data, at, end, limits)
    performative: Any = read_composite(reader, *PERFORMATIVES)
    elements = limits.elements_max - reader.elements
    if octets and _may_be_shared(performative):
        if len(_RECENT.decoded) >= _FRAMES_MAX:
            _RECENT.decoded.clear()
        _RECENT.decoded[octets] = limits, performative, elements
    return performative, elements


def _may_be_shared(performative: Any) -> bool:
    """Return whether *performative* has nothing that can be changed, and may come again."""
    if isinstance(performative, Open | Begin):
        return performative.properties is None
    if isinstance(performative, Detach | End | Close):
        return performative.error is None
    return False
