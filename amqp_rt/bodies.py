"""Bodies of messages that are read while they arrive, without I/O."""

from __future__ import annotations

from .codec.sections import (
    AMQP_SEQUENCE,
    AMQP_VALUE,
    DATA,
    SECTION_BEGIN_MAX,
    SECTION_NAMES,
    begin_section,
)
from .errors import DecodeError
from .limits import DEFAULT_LIMITS, Limits
from .message import Message

__all__ = ["BodyReader"]


class BodyReader:
    """Reader of a message's data as it arrives, without holding all of it (§3.2.6).

    Feed it the pieces of the payload; each call returns contents of the data sections. ``message`` is
    set, without its body, once the first data section begins.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.message: Message | None = None
        self._limits = limits
        #: Encoded sections before and after the body.
        self._around = bytearray()
        #: Beginning of a section, too short to identify it.
        self._begun = b""
        #: Code of the current section, and the number of its octets still to come.
        self._code = 0
        self._left = 0

    def feed(self, octets: bytes) -> list[bytes]:
        """Process the next octets of the payload; return the pieces of the body in them.

        Raises:
            DecodeError: The payload is malformed, its body is not data, or the sections around the body
                are larger than ``message_size_max``.
        """
        found: list[bytes] = []
        if self._begun:
            octets = self._begun + octets
            self._begun = b""
        at = 0
        while at < len(octets):
            if self._left:
                piece = octets[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                if self._code == DATA:
                    found.append(piece)
                else:
                    self._around += piece
                continue
            begin = octets[at : at + SECTION_BEGIN_MAX]
            section = begin_section(begin, self._limits)
            if section is None:
                self._begun = begin
                break
            code, content, self._left = section
            self._enter(code)
            if code != DATA:
                self._around += begin[:content]
                if len(self._around) + self._left > self._limits.message_size_max:
                    raise DecodeError(
                        "the sections around the body are larger than message_size_max"
                    )
            at += content
        return found

    def _enter(self, code: int) -> None:
        """Check the order of the sections, which is that of their codes."""
        if code in (AMQP_SEQUENCE, AMQP_VALUE):
            raise DecodeError(f"a stream is made of data, not of {SECTION_NAMES[code]}")
        if code <= self._code and not code == self._code == DATA:
            raise DecodeError(f"{SECTION_NAMES[code]} comes after {SECTION_NAMES[self._code]}")
        self._code = code
        if code == DATA and self.message is None:
            self.message = Message.decode(bytes(self._around), self._limits)

    def finish(self) -> Message:
        """End the payload; return the message with its footer, without its body.

        Raises:
            DecodeError: The payload ended inside a section.
        """
        if self._left or self._begun:
            raise DecodeError("the payload ends inside a section")
        return Message.decode(bytes(self._around), self._limits)
