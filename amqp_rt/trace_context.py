"""Trace context of messages: W3C Trace Context, and its draft for AMQP.

Publishers write ``traceparent`` and ``tracestate`` into the application-properties, intermediaries only into the
message-annotations, and readers prefer the annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from .errors import DecodeError
from .message import Message

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
#: ``traceparent`` as it is encoded. Only messages with it near their start are decoded for their trace
#: context: decoding the sections of every message would cost time. See ``Limits.trace_context_within``.
TRACE_OCTETS: Final = b"traceparent"
#: Characters of ``tracestate`` that are passed on (Trace Context §3.3.1.5).
_TRACESTATE_MAX: Final = 512
#: Version, trace-id, parent-id, flags (Trace Context §3.2.2), 55 characters; later versions than 00 may append fields.
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,200})?"
)


def trace_of(message: Message) -> dict[str, str]:
    """Return the trace context of *message*, ``traceparent`` and ``tracestate``; empty if it has none.

    A malformed trace context is left out, since Trace Context §3.2.2 requires that.
    """
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


def with_trace(message: Message, trace: Mapping[str, str]) -> Message:
    """Return *message* with *trace* in its application-properties, as its publisher writes it.

    A message that has a ``traceparent`` keeps its own.
    """
    own = message.application_properties
    if not trace or TRACEPARENT in own or TRACEPARENT in message.message_annotations:
        return message
    return message.replace(application_properties={**own, **trace})
