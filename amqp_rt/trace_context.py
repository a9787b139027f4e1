"""Trace context of messages: W3C Trace Context, and its draft for AMQP.

Publishers write ``traceparent`` and ``tracestate`` into the application-properties, intermediaries only into the
message-annotations, and readers prefer the annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from .codec.sections import (
    APPLICATION_PROPERTIES,
    PROPERTIES,
    SECTION_OPENINGS,
    walk_front,
    write_application_properties,
)
from .errors import DecodeError
from .message import Message

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
#: Trace context of messages without one.
NO_TRACE: Final[Mapping[str, str]] = {}
#: ``traceparent`` as it is encoded. Only messages with it near their start are decoded for their trace
#: context: decoding the sections of every message would cost time. See ``Limits.trace_context_within``.
TRACE_OCTETS: Final = b"traceparent"
#: Characters of ``tracestate`` that are passed on (Trace Context §3.3.1.5).
_TRACESTATE_MAX: Final = 512
#: Version, trace-id, parent-id, flags (Trace Context §3.2.2), 55 characters; later versions than 00 may append fields.
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,200})?"
)


#: The usual encoding of the key, a symbol in annotations and a string in properties, and of the type and size of its value.
_ENCODED_ANNOTATION: Final = b"\xa3\x0btraceparent\xa1\x37"
_ENCODED_PROPERTY: Final = b"\xa1\x0btraceparent\xa1\x37"
_STATE_OCTETS: Final = b"tracestate"
#: Application-properties with ``traceparent`` alone, which most publishers write, up to its value: a map of 71 octets with two
#: elements.
_USUAL_SECTION: Final = (
    SECTION_OPENINGS[APPLICATION_PROPERTIES] + b"\xc1\x47\x02" + _ENCODED_PROPERTY
)
#: Such a section with the usual version, and the beginning of a body in the usual encoding.
_USUAL: Final = re.compile(
    re.escape(_USUAL_SECTION)
    + rb"(00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})\x00\x53[\x75-\x77]"
)
#: Properties of less than 256 octets, up to their size.
_USUAL_PROPERTIES: Final = SECTION_OPENINGS[PROPERTIES] + b"\xc0"
#: Octets of a payload that is searched for a trace context as a whole, which is quicker than finding its sections.
_SEARCHED_MAX: Final = 4_096


def trace_of(message: Message) -> dict[str, str]:
    """Return the trace context of *message*, ``traceparent`` and ``tracestate``; empty if it has none.

    A malformed trace context is left out, since Trace Context §3.2.2 requires that.
    """
    encoded = message.encoded_maps()
    found = None if encoded is None else _trace_within(*encoded)
    return _decoded_trace(message) if found is None else found


def trace_in(payload: bytes) -> dict[str, str]:
    """Return the trace context of an encoded message as :func:`trace_of` does, without creating the message.

    A payload that begins like no message has none. Its body is not read.
    """
    # Most messages have a trace context of the usual shape, or none: the sections of others have to be found first.
    start = 5 + payload[4] if payload.startswith(_USUAL_PROPERTIES) and len(payload) > 4 else 0
    usual = _USUAL.match(payload, start)
    if usual is not None:
        return {TRACEPARENT: usual[1].decode("ascii")}
    if len(payload) <= _SEARCHED_MAX and payload.find(TRACE_OCTETS) < 0:
        return {}
    try:
        _, annotations, end, properties, body = walk_front(payload)
        if payload.find(TRACE_OCTETS, annotations, body) < 0:
            return {}
        found = _trace_within(payload, annotations, end, properties, body)
        return _decoded_trace(Message.decode(payload[:body])) if found is None else found
    except DecodeError:
        return {}


def _trace_within(
    octets: bytes, annotations: int, end: int, properties: int, body: int
) -> dict[str, str] | None:
    """Return the trace context in the annotations of *octets*, else in the application-properties.

    None if one of the sections has to be decoded to find out.
    """
    if annotations < end:
        found = _encoded_trace(octets, annotations, end, _ENCODED_ANNOTATION)
        if found is None or found:
            return found
    return _encoded_trace(octets, properties, body, _ENCODED_PROPERTY)


def _encoded_trace(octets: bytes, start: int, end: int, key: bytes) -> dict[str, str] | None:
    """Return the trace context of a section of *octets*; None if the section has to be decoded to find out.

    Decoding a map for one entry takes longer than all else that an unsampled message costs. In other values the octets
    that are looked for occur in binary only, as they are no UTF-8.
    """
    if octets.find(TRACE_OCTETS, start, end) < 0:
        return {}
    at = octets.find(key, start, end)
    if at >= 0 and octets.find(_STATE_OCTETS, start, end) < 0:
        at += len(key)
        parent = octets[at : min(at + 55, end)].decode("latin-1")
        if _TRACEPARENT.fullmatch(parent):
            return {TRACEPARENT: parent}
    return None


def _decoded_trace(message: Message) -> dict[str, str]:
    trace: dict[str, str] = {}
    try:
        for found in (message.message_annotations, message.application_properties):
            parent = found.get(TRACEPARENT)
            if isinstance(parent, str) and _TRACEPARENT.fullmatch(parent):
                trace[TRACEPARENT] = str(parent)
                state = found.get(TRACESTATE)
                if isinstance(state, str) and 0 < len(state) <= _TRACESTATE_MAX:
                    trace[TRACESTATE] = str(state)
                break
    except DecodeError:
        # The section is read again, and refused, when a handler asks for it.
        pass
    return trace


def trace_section(trace: Mapping[str, str]) -> bytes:
    """Encode application-properties with the trace context *trace* alone; nothing if there is none.

    Raises:
        EncodeError: A value has no encoding.
    """
    parent = trace.get(TRACEPARENT)
    if parent is not None and len(trace) == 1 and len(parent) == 55 and parent.isascii():
        # As below, without examining keys and values whose encoding is known.
        return _USUAL_SECTION + parent.encode("ascii")
    out = bytearray()
    write_application_properties(out, trace)
    return bytes(out)


def with_trace(message: Message, trace: Mapping[str, str], *, in_place: bool = False) -> Message:
    """Return *message* with *trace* in its application-properties, as its publisher writes it.

    A message that has a ``traceparent`` keeps its own.

    Args:
        message: The message.
        trace: ``traceparent`` and ``tracestate``, or nothing.
        in_place: Whether the message was made here, so that it may be changed; otherwise it is copied.
    """
    own = message.application_properties
    if not trace or TRACEPARENT in own or TRACEPARENT in message.message_annotations:
        return message
    if in_place:
        message.application_properties = {**own, **trace}
        return message
    return message.replace(application_properties={**own, **trace})
