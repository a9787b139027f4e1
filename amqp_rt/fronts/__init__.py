"""Names for authors of fronts, in this distribution or another.

They comprise the interface itself (:mod:`amqp_rt.fronts.base`), events of engines, errors and
outcomes, and the values of Part 1 for which Python has no types of its own: fields of other
protocols are converted to these, so that they keep their width.
"""

from __future__ import annotations

from ..errors import AmqpError, LocalProtocolError
from ..events import AttachRequested, Closed, ConnectionFailed, Event, LoginRequested, Opened, Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..outcomes import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
    rejected,
)
from ..termini import Coordinator, Source, Target
from ..transactions import Declare, Declared, Discharge, TransactionalState
from ..values import Byte, Char, Float32, Int, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from .base import (
    TRACINGS,
    Exchange,
    Front,
    Host,
    Payload,
    ProtocolEngine,
    QueueDeclaration,
    QueueState,
    ReceivingEndpoint,
    SendingEndpoint,
    ServerEngine,
    ServerOptions,
    Topology,
    TracedFrame,
    TraceMask,
    TraceReader,
    Tracing,
    Unsettled,
    UnsettledMap,
)

__all__ = [
    "ACCEPTED",
    "DEFAULT_LIMITS",
    "RELEASED",
    "TRACINGS",
    "Accepted",
    "AmqpError",
    "AttachRequested",
    "Byte",
    "Char",
    "Closed",
    "ConnectionFailed",
    "Coordinator",
    "Declare",
    "Declared",
    "Discharge",
    "Error",
    "Event",
    "Exchange",
    "Float32",
    "Front",
    "Host",
    "Int",
    "Limits",
    "LocalProtocolError",
    "LoginRequested",
    "Message",
    "Modified",
    "Opened",
    "Outcome",
    "Payload",
    "Peer",
    "ProtocolEngine",
    "QueueDeclaration",
    "QueueState",
    "ReceivingEndpoint",
    "Rejected",
    "Released",
    "SendingEndpoint",
    "ServerEngine",
    "ServerOptions",
    "Short",
    "Source",
    "Symbol",
    "Target",
    "Timestamp",
    "Topology",
    "TraceMask",
    "TraceReader",
    "TracedFrame",
    "Tracing",
    "TransactionalState",
    "UByte",
    "UInt",
    "ULong",
    "UShort",
    "Unsettled",
    "UnsettledMap",
    "rejected",
]
