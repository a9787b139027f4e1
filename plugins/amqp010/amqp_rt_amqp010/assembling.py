"""Assemblies made of frames: controls, and commands with their content, as far as they have arrived."""

from __future__ import annotations

from typing import Final

from .faults import CommandFault, ConnectionFault
from .frames import (
    BODY,
    COMMAND,
    COMMAND_TRACK,
    CONTROL,
    FIRST_FRAME,
    FIRST_SEGMENT,
    HEADER,
    LAST_FRAME,
    LAST_SEGMENT,
    WHOLE,
    Frame,
)
from .layouts import COMMANDS, CloseCode, ErrorCode
from .limits import ASSEMBLY_COST, CHUNK_COST, PARTIAL_MAX, SEGMENT_MAX

_BEGINS: Final = FIRST_SEGMENT | FIRST_FRAME


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
