"""Frames: type, channel, size, payload and the end octet (0-9-1 §4.2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout
from typing import Final, NamedTuple

from .codec import write_header, write_method
from .methods import BasicProperties, Method
from .values import ContentHeader

#: First octets that a client sends (§4.2.2).
PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8

FRAME_END: Final = 0xCE
_FRAME_END: Final = b"\xce"
#: Octets of a frame beside its payload, which count for frame-max (errata).
OVERHEAD: Final = 8
#: Lowest frame-max that peers may agree on (``frame-min-size``).
FRAME_MIN_SIZE: Final = 4096
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_TYPES: Final = frozenset((METHOD, HEADER, BODY, HEARTBEAT))
_LAYOUT: Final = Layout(">BHI")
_BASIC: Final = 60
#: Creates a Frame in half the time that ``Frame(...)`` takes.
_new: Final = tuple.__new__


class BrokenFrame(Exception):
    """Octets that are no frame of this protocol: the connection ends without a reply (§4.2.3)."""


class OversizeFrame(Exception):
    """A frame larger than agreed: reply code 501."""


class Frame(NamedTuple):
    """A frame without its overhead."""

    type: int
    channel: int
    payload: bytes


class FrameReader:
    """Splits input into frames; holds at most one incomplete frame.

    Args:
        frame_max: Octets of the largest frame, overhead included. May be changed between frames.
    """

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        #: Input of the last call, and how much of it has been read.
        self._data = b""
        self._position = 0
        #: Octets still to come of a frame that was too large.
        self._skip = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that *data* completes, in order.

        Each frame is parsed only when it is requested, so that ``frame_max`` may change at any
        frame. A caller that stops early gets the other frames from the next call: the position is
        recorded before each yield, since a compiled generator that is dropped runs no ``finally``.

        Raises:
            BrokenFrame: The type is unknown, or the end octet is wrong.
            OversizeFrame: The size exceeds ``frame_max``. Raised on reading the size: such a
                payload is never held. Octets after the frame can be fed.
        """
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if self._position < len(self._data):
            data = self._data[self._position :] + data
        self._data = data
        self._position = position = 0
        length = len(data)
        read_head = _LAYOUT.unpack_from
        while position < length:
            if data[position] not in _TYPES:
                raise BrokenFrame(f"there is no frame type {data[position]}")
            start = position + 7
            if start > length:
                break
            kind, channel, size = read_head(data, position)
            if size + OVERHEAD > self.frame_max:
                here = min(size + OVERHEAD, length - position)
                self._skip = size + OVERHEAD - here
                self._position = position + here
                raise OversizeFrame(
                    f"a frame of {size + OVERHEAD} octets; at most {self.frame_max} are agreed"
                )
            end = start + size
            if length <= end:
                break
            # Checked before anything is decoded.
            if data[end] != FRAME_END:
                raise BrokenFrame(f"a frame ends with {data[end]:#04x}, not with 0xce")
            self._position = position = end + 1
            yield _new(Frame, (kind, channel, data[start:end]))
        self._data = data[position:]
        self._position = 0


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Encode one frame."""
    return _LAYOUT.pack(kind, channel, len(payload)) + payload + _FRAME_END


def method_frame(channel: int, method: Method) -> bytes:
    """Encode the frame of *method*."""
    return frame(METHOD, channel, write_method(method))


def content_frames(
    channel: int, method: Method, properties: BasicProperties, body: bytes, frame_max: int
) -> list[bytes]:
    """Encode *method* with its content: a header, and a body in as many frames as needed (§4.2.6).

    An empty body has no frame.

    Raises:
        ValueError: The method or the properties do not fit a frame, or cannot be written.
    """
    found = [
        method_frame(channel, method),
        frame(HEADER, channel, write_header(ContentHeader(_BASIC, len(body), properties))),
    ]
    if any(len(each) > frame_max for each in found):
        raise ValueError(f"the properties do not fit a frame of {frame_max} octets")
    room = frame_max - OVERHEAD
    found += [
        frame(BODY, channel, body[start : start + room]) for start in range(0, len(body), room)
    ]
    return found


def delivered_frames(
    channel: int,
    said: bytes,
    number: int,
    redelivered: bool,
    place: bytes,
    properties: bytes,
    body: bytes,
    frame_max: int,
) -> bytes | None:
    """Assemble the frames of a delivery from encoded parts; None if a part does not fit its frame.

    Args:
        channel: The channel number.
        said: ``basic.deliver`` up to its consumer-tag.
        number: The delivery-tag.
        redelivered: Whether the message may have been delivered before.
        place: Exchange and routing key, encoded.
        properties: Property flags and properties, encoded.
        body: The content.
        frame_max: Octets of the largest frame.
    """
    size = len(body)
    if size > frame_max - OVERHEAD or len(properties) + 12 + OVERHEAD > frame_max:
        return None
    parts = [
        *(_LAYOUT.pack(METHOD, channel, len(said) + 9 + len(place)), said),
        *(_TAG.pack(number, redelivered), place),
        *(_FRAME_END, _CONTENT.pack(HEADER, channel, 12 + len(properties), _BASIC, 0, size)),
        *(properties, _FRAME_END),
    ]
    if size:
        parts += (_LAYOUT.pack(BODY, channel, size), body, _FRAME_END)
    return b"".join(parts)


_TAG: Final = Layout(">QB")
#: Head of a header's frame, and its payload up to the flags.
_CONTENT: Final = Layout(">BHIHHQ")
