"""Messages that observers may read.

mypyc compiles this module: each observed message passes through it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .codec.sections import read_properties, walk_front
from .compiling import mypyc_attr
from .errors import DecodeError
from .limits import DEFAULT_LIMITS
from .message import Message, MessageId
from .trace_context import NO_TRACE, trace_in, trace_of


@mypyc_attr(allow_interpreted_subclasses=True)
class UnreadMessage:
    """Message that is decoded when an observer reads it: most observers need the trace context alone, or nothing.

    Args:
        payload: The encoded message; None if there is no message of format 0, or it has not arrived yet.
        message: The message, if it has been decoded.
    """

    __slots__ = ("message", "payload")

    def __init__(self, payload: bytes | None, message: Message | None = None) -> None:
        self.payload = payload
        #: The message, once it has been decoded; None before, and if it cannot be.
        self.message = message

    def read(self) -> Message | None:
        """Return the message; None if it cannot be decoded, or is not there yet."""
        if self.message is None and self.payload is not None:
            try:
                self.message = Message.decode(self.payload)
            except DecodeError:
                self.payload = None
        return self.message

    def trace(self) -> Mapping[str, str]:
        """Return the trace context of the message, ``traceparent`` and ``tracestate``; empty if there is none."""
        if self.message is not None:
            return trace_of(self.message)
        return NO_TRACE if self.payload is None else trace_in(self.payload)

    def ids(self) -> tuple[MessageId | None, MessageId | None]:
        """Return ``message-id`` and ``correlation-id``, each None if there is none, or it cannot be decoded."""
        try:
            if self.message is not None:
                properties = self.message.properties
            elif self.payload is not None:
                _, _, start, end, _ = walk_front(self.payload)
                if start == end:
                    return None, None
                properties = read_properties(self.payload, start, end, DEFAULT_LIMITS)
            else:
                return None, None
        except DecodeError:
            return None, None
        return properties.message_id, properties.correlation_id
