"""Frames: a header of twelve octets and a payload; reading them, and cutting assemblies into them.

An assembly is a control, or a command with at most one header segment and one body segment. Its
segments follow each other, each in one frame or more; frames of other channels and of the other track
may come between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct as Layout
from typing import Final, NamedTuple

from .faults import ConnectionFault

#: First octets of both peers.
PROTOCOL_HEADER: Final = b"AMQP\x01\x01\x00\x0a"

# Types of segments.
CONTROL: Final = 0
COMMAND: Final = 1
HEADER: Final = 2
BODY: Final = 3

# Flags of a frame.
FIRST_SEGMENT: Final = 0x08
LAST_SEGMENT: Final = 0x04
FIRST_FRAME: Final = 0x02
LAST_FRAME: Final = 0x01
#: Flags of an assembly in one frame.
WHOLE: Final = 0x0F

CONTROL_TRACK: Final = 0
COMMAND_TRACK: Final = 1

#: Octets of a frame before its payload; they count for its size.
OVERHEAD: Final = 12
#: Bounds of what peers may agree on as ``max-frame-size``: MIN-MAX-FRAME-SIZE, and its two octets.
FRAME_SIZE_MIN: Final = 4096
FRAME_SIZE_MAX: Final = 65535
#: Bodies from this size on are passed to the stream as they are, without a copy.
APART_MIN: Final = 16 * 1024

#: Flags, type, size, reserved, track, channel, reserved.
_LAYOUT: Final = Layout(">BBHBBHI")
#: Creates a Frame in half the time that ``Frame(...)`` takes.
_new: Final = tuple.__new__


class Frame(NamedTuple):
    """A frame without its size and its reserved octets."""

    flags: int
    #: Type of the segment that it belongs to.
    type: int
    track: int
    channel: int
    payload: bytes


class FrameReader:
    """Splits input, which begins after the protocol header, into frames; holds one incomplete frame.

    Args:
        frame_max: Octets of the largest frame, overhead included. May be changed between frames.
    """

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        #: Input of the last call, and how much of it has been read.
        self._data = b""
        self._position = 0
        #: Whether the input was faulty: positions of later frames are not known.
        self._broken = False

    @property
    def held(self) -> int:
        """Octets of input that have not become frames."""
        return len(self._data) - self._position

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that *data* completes, in order.

        Each frame is parsed only when it is requested, so that ``frame_max`` may change at any
        frame. A caller that stops early gets the other frames from the next call: the position is
        recorded before each yield, since a compiled generator that is dropped runs no ``finally``.

        Raises:
            ConnectionFault: A header is malformed, or a size exceeds ``frame_max``, which is found on
                reading the size: such a payload is never held. Input after it is discarded.
        """
        if self._broken:
            return
        if self._position < len(self._data):
            data = self._data[self._position :] + data
        self._data = data
        self._position = position = 0
        length = len(data)
        read_head = _LAYOUT.unpack_from
        while position + OVERHEAD <= length:
            flags, kind, size, first, track, channel, last = read_head(data, position)
            if flags > WHOLE or kind > BODY or track > COMMAND_TRACK or first or last:
                self._break()
                raise ConnectionFault(_complaint(flags, kind, first, track, last))
            if not OVERHEAD <= size <= self.frame_max:
                self._break()
                raise ConnectionFault(
                    f"a frame of {size} octets; it has {OVERHEAD} to {self.frame_max}"
                )
            end = position + size
            if end > length:
                break
            start = position + OVERHEAD
            self._position = position = end
            yield _new(Frame, (flags, kind, track, channel, data[start:end]))
        self._data = data[position:]
        self._position = 0

    def hold(self, data: bytes) -> None:
        """Keep *data* for the next :meth:`feed`."""
        if not self._broken:
            self._data = self._data[self._position :] + data
            self._position = 0

    def _break(self) -> None:
        self._broken = True
        self._data = b""
        self._position = 0


def _complaint(flags: int, kind: int, first: int, track: int, last: int) -> str:
    if flags > WHOLE:
        return f"the flags {flags:#04x} of a frame have reserved bits"
    if kind > BODY:
        return f"there is no segment type {kind}"
    if track & 0xF0 or first or last:
        return "a frame has reserved octets other than 0"
    return f"there is no track {track}"


# --- writing -----------------------------------------------------------------------------------------


def control_frames(channel: int, octets: bytes, frame_max: int) -> list[bytes]:
    """Encode the frames of a control segment with *octets*."""
    return _assembly(channel, CONTROL, octets, None, None, frame_max)


def assembly_frames(
    channel: int,
    octets: bytes,
    header: bytes | None,
    body: Sequence[bytes] | None,
    frame_max: int,
) -> list[bytes]:
    """Encode the frames of a command with its content, as buffers to send in this order.

    All is joined once, but pieces of the body that are large and fit into a frame are returned as they
    are, without a copy.

    Args:
        channel: The channel number.
        octets: The command segment.
        header: The header segment; None for none.
        body: Pieces of the body segment; None for none, which differs from an empty body.
        frame_max: Octets of the largest frame.
    """
    return _assembly(channel, COMMAND, octets, header, body, frame_max)


def _assembly(
    channel: int,
    kind: int,
    octets: bytes,
    header: bytes | None,
    body: Sequence[bytes] | None,
    frame_max: int,
) -> list[bytes]:
    buffers: list[bytes] = []
    parts: list[bytes | memoryview] = []
    last = LAST_SEGMENT if header is None and body is None else 0
    _segment(parts, kind, kind, FIRST_SEGMENT | last, channel, octets, frame_max)
    if header is not None:
        last = LAST_SEGMENT if body is None else 0
        _segment(parts, HEADER, kind, last, channel, header, frame_max)
    if body is not None:
        pieces = [each for each in body if each] or [b""]
        room = frame_max - OVERHEAD
        end = len(pieces) - 1
        for index, piece in enumerate(pieces):
            flags = LAST_SEGMENT
            if index == 0:
                flags |= FIRST_FRAME
            if index == end:
                flags |= LAST_FRAME
            size = len(piece)
            if APART_MIN <= size <= room:
                parts.append(_LAYOUT.pack(flags, BODY, size + OVERHEAD, 0, kind, channel, 0))
                buffers.append(b"".join(parts))
                buffers.append(piece)
                parts = []
            else:
                _payload(parts, BODY, kind, flags, channel, piece, room)
    if parts:
        buffers.append(b"".join(parts))
    return buffers


def _segment(
    parts: list[bytes | memoryview],
    kind: int,
    track: int,
    flags: int,
    channel: int,
    octets: bytes,
    frame_max: int,
) -> None:
    _payload(
        parts, kind, track, flags | FIRST_FRAME | LAST_FRAME, channel, octets, frame_max - OVERHEAD
    )


def _payload(
    parts: list[bytes | memoryview],
    kind: int,
    track: int,
    flags: int,
    channel: int,
    octets: bytes,
    room: int,
) -> None:
    """Append the frames of *octets*; of the flags, those for the first and last frame are its ends'."""
    size = len(octets)
    if size <= room:
        parts.append(_LAYOUT.pack(flags, kind, size + OVERHEAD, 0, track, channel, 0))
        parts.append(octets)
        return
    view = memoryview(octets)
    for start in range(0, size, room):
        piece = view[start : start + room]
        some = flags
        if start:
            some &= ~FIRST_FRAME
        if start + room < size:
            some &= ~LAST_FRAME
        parts.append(_LAYOUT.pack(some, kind, len(piece) + OVERHEAD, 0, track, channel, 0))
        parts.append(piece)
