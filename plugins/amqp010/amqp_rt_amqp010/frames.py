"""Frames: a header of twelve octets and a payload; segments and assemblies made of them.

An assembly is a control, or a command with at most one header segment and one body segment. Its
segments follow each other, each in one frame or more; frames of other channels and of the other track
may come between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct as Layout
from typing import Final, NamedTuple

from .faults import CommandFault, ConnectionFault
from .layouts import COMMANDS, CloseCode, ErrorCode
from .limits import ASSEMBLY_COST, CHUNK_COST, PARTIAL_MAX, SEGMENT_MAX

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
_BEGINS: Final = FIRST_SEGMENT | FIRST_FRAME

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


class Assembly:
    """A control, or a command with its content."""

    __slots__ = ("body", "body_size", "channel", "content", "header", "kind")

    def __init__(self, channel: int, kind: int) -> None:
        self.channel = channel
        #: ``CONTROL`` or ``COMMAND``.
        self.kind = kind
        #: Octets of the control or command.
        self.content = b""
        #: Octets of the header segment; None if there is none, which differs from an empty one.
        self.header: bytes | None = None
        #: Octets of the body segment as they came; None if there is none.
        self.body: list[bytes] | None = None
        self.body_size = 0

    @property
    def code(self) -> int:
        """Class and operation code; -1 if the content is too short to have them."""
        content = self.content
        return content[0] << 8 | content[1] if len(content) >= 2 else -1


class _Partial:
    """An assembly that is being received."""

    __slots__ = ("assembly", "chunks", "cost", "dropped", "in_segment", "last", "segment", "size")

    def __init__(self, channel: int, kind: int) -> None:
        self.assembly = Assembly(channel, kind)
        #: Type of the latest segment; whether it is incomplete; whether it is the last one.
        self.segment = kind
        self.in_segment = False
        self.last = False
        #: Payloads of that segment, and their octets.
        self.chunks: list[bytes] = []
        self.size = 0
        #: What the whole assembly counts for ``PARTIAL_MAX``.
        self.cost = ASSEMBLY_COST
        #: A fault has been reported; the other frames are read without being held.
        self.dropped = False


class Assembler:
    """Joins the frames of one connection to assemblies.

    Args:
        body_max: Octets of the largest body (``message_size_max``).
        partial_max: Octets of all incomplete assemblies.
    """

    def __init__(self, body_max: int, partial_max: int = PARTIAL_MAX) -> None:
        self.body_max = body_max
        self.partial_max = partial_max
        #: Channel and track, as one number → what has been received of an assembly.
        self._partial: dict[int, _Partial] = {}
        #: What they count for ``partial_max``.
        self.held = 0

    def receive(self, frame: Frame) -> Assembly | None:
        """Add *frame*; return the assembly that it completes, None if more frames are missing.

        Raises:
            ConnectionFault: Flags, types or tracks do not fit the frames before, or a control is too
                large (501); there is no room for it (320).
            CommandFault: A command or header is too large, a body exceeds ``body_max``, all incomplete
                ones exceed ``partial_max`` (506), or the command has no content (503). Raised once;
                the other frames of that assembly are dropped.
        """
        flags, kind, track, channel, payload = frame
        key = channel << 1 | track
        partial = self._partial.get(key)
        if partial is not None and partial.dropped and flags & _BEGINS == _BEGINS:
            # The session of a dropped command has ended; the peer need not finish the command.
            self._remove(key, partial)
            partial = None
        if partial is None:
            if flags & _BEGINS != _BEGINS:
                raise ConnectionFault(f"channel {channel} has a frame without the first one before")
            if kind != track:
                raise ConnectionFault(f"segment type {kind} begins an assembly on track {track}")
            if flags == WHOLE:
                return self._whole(channel, kind, payload)
            partial = _Partial(channel, kind)
            self._partial[key] = partial
            self.held += partial.cost
        else:
            self._follow(partial, frame)
        partial.in_segment = not flags & LAST_FRAME
        partial.last = flags & LAST_SEGMENT != 0
        if not partial.dropped:
            try:
                self._hold(partial, payload)
                if not partial.in_segment:
                    self._end_segment(partial)
            except CommandFault:
                self._release(partial)
                if partial.last and not partial.in_segment:
                    self._remove(key, partial)
                raise
        if partial.in_segment or not partial.last:
            return None
        self._remove(key, partial)
        return None if partial.dropped else partial.assembly

    def _whole(self, channel: int, kind: int, payload: bytes) -> Assembly:
        """Return the assembly of one frame."""
        if len(payload) > SEGMENT_MAX:
            raise self._too_large(kind, channel, payload)
        assembly = Assembly(channel, kind)
        assembly.content = payload
        if kind == COMMAND:
            self._check_header(assembly)
        return assembly

    def _follow(self, partial: _Partial, frame: Frame) -> None:
        """Check that *frame* may come next, and begin its segment if it is the first one of that."""
        flags, kind, _, channel, _ = frame
        if partial.in_segment:
            if flags & FIRST_FRAME:
                raise ConnectionFault(f"channel {channel} has a segment within another")
            # Frames of a segment agree in all that tells of the segment.
            first = partial.segment < HEADER
            if kind != partial.segment or (flags & FIRST_SEGMENT != 0) != first:
                raise ConnectionFault(f"channel {channel} has frames of one segment that differ")
            if (flags & LAST_SEGMENT != 0) != partial.last:
                raise ConnectionFault(f"channel {channel} has frames of one segment that differ")
            return
        if flags & FIRST_SEGMENT:
            raise ConnectionFault(f"channel {channel} has an assembly within another")
        if not flags & FIRST_FRAME:
            raise ConnectionFault(f"channel {channel} has a segment without its first frame")
        if kind <= partial.segment:
            raise ConnectionFault(
                f"segment type {kind} follows type {partial.segment} on channel {channel}"
            )
        partial.segment = kind
        if kind == BODY and not partial.dropped:
            partial.assembly.body = []

    def _hold(self, partial: _Partial, payload: bytes) -> None:
        """Keep *payload*.

        Raises:
            CommandFault: The command, or all that is held, is too large.
            ConnectionFault: The same of a control.
        """
        size = len(payload)
        partial.size += size
        assembly = partial.assembly
        if partial.segment == BODY:
            if partial.size > self.body_max:
                raise self._excess(assembly, f"a body of more than {self.body_max} octets")
            assembly.body_size = partial.size
        elif partial.size > SEGMENT_MAX:
            seen = assembly.content or b"".join(partial.chunks) + payload[:2]
            raise self._too_large(partial.segment, assembly.channel, seen)
        if size:
            partial.cost += size + CHUNK_COST
            self.held += size + CHUNK_COST
        if self.held > self.partial_max:
            text = f"incomplete segments of more than {self.partial_max} octets"
            if assembly.kind == CONTROL:
                raise ConnectionFault(text, CloseCode.CONNECTION_FORCED)
            raise self._excess(assembly, text)
        # Empty payloads take no place, so that there may be any number of them.
        if size and assembly.body is not None:
            assembly.body.append(payload)
        elif size:
            partial.chunks.append(payload)

    def _end_segment(self, partial: _Partial) -> None:
        """Join the payloads of a segment; bodies are left in pieces."""
        assembly = partial.assembly
        chunks = partial.chunks
        joined = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if partial.segment == HEADER:
            assembly.header = joined
        elif partial.segment != BODY:
            assembly.content = joined
            if partial.segment == COMMAND and not partial.last:
                known = COMMANDS.get(assembly.code)
                if known is not None and not known.CONTENT:
                    raise self._made(
                        f"{known.NAME} has no header or body",
                        ErrorCode.COMMAND_INVALID,
                        assembly.channel,
                        joined,
                    )
            elif partial.segment == CONTROL and not partial.last:
                raise ConnectionFault(f"a control on channel {assembly.channel} has two segments")
        if partial.last and assembly.header is None and partial.segment != CONTROL:
            self._check_header(assembly)
        partial.chunks = []
        partial.size = 0

    def _remove(self, key: int, partial: _Partial) -> None:
        del self._partial[key]
        self.held -= partial.cost

    def _release(self, partial: _Partial) -> None:
        self.held -= partial.cost - ASSEMBLY_COST
        partial.cost = ASSEMBLY_COST
        partial.chunks = []
        partial.assembly.body = None
        partial.dropped = True

    def _too_large(self, kind: int, channel: int, content: bytes) -> Exception:
        text = f"a segment of type {kind} with more than {SEGMENT_MAX} octets"
        if kind == CONTROL:
            return ConnectionFault(text)
        return self._made(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED, channel, content)

    def _excess(self, assembly: Assembly, text: str) -> CommandFault:
        code = ErrorCode.RESOURCE_LIMIT_EXCEEDED
        return self._made(text, code, assembly.channel, assembly.content)

    def _check_header(self, assembly: Assembly) -> None:
        """Check that *assembly*, which is complete and has no header, needs none.

        Raises:
            CommandFault: The command must have one.
        """
        known = COMMANDS.get(assembly.code)
        if known is not None and known.HEADER_REQUIRED:
            text = f"{known.NAME} has no header"
            raise self._made(text, ErrorCode.COMMAND_INVALID, assembly.channel, assembly.content)

    def _made(self, text: str, code: ErrorCode, channel: int, content: bytes) -> CommandFault:
        known = len(content) >= 2
        return CommandFault(
            text,
            code,
            class_code=content[0] if known else None,
            command_code=content[1] if known else None,
            channel=channel,
        )

    def has_begun(self, channel: int) -> bool:
        """Return whether a command of *channel* is incomplete and has not been dropped."""
        partial = self._partial.get(channel << 1 | COMMAND_TRACK)
        return partial is not None and not partial.dropped

    def begun(self, channel: int) -> Assembly | None:
        """Return the incomplete command of *channel* with the part of its body so far, None without a body."""
        partial = self._partial.get(channel << 1 | COMMAND_TRACK)
        if partial is None or partial.dropped or partial.segment != BODY:
            return None
        return partial.assembly

    def forget(self, channel: int) -> None:
        """Drop the incomplete command of *channel*, whose session ends, and its frames to come."""
        partial = self._partial.get(channel << 1 | COMMAND_TRACK)
        if partial is not None:
            self._release(partial)


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
