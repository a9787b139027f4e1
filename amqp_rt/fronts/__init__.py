"""What the author of a front, in this distribution or another, needs of ours.

The seam itself (:mod:`amqp_rt.fronts.base`), and the values of Part 1 for which Python has no types of
its own: fields of other protocols become these, and keep their width on the way through.
"""

from __future__ import annotations

from ..values import Byte, Char, Float32, Int, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from .base import Front, Host, Payload, ProtocolEngine, ServerOptions

__all__ = [
    "Byte",
    "Char",
    "Float32",
    "Front",
    "Host",
    "Int",
    "Payload",
    "ProtocolEngine",
    "ServerOptions",
    "Short",
    "Symbol",
    "Timestamp",
    "UByte",
    "UInt",
    "ULong",
    "UShort",
]
