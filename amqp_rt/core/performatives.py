"""The nine performatives of AMQP 1.0 (Part 2 §2.7), declared under their section numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..codec.composites import (
    BINARY,
    BOOLEAN,
    FIELDS,
    MANDATORY,
    MAP,
    STRING,
    SYMBOLS,
    UBYTE,
    UINT,
    ULONG,
    USHORT,
    any_of,
    composite,
    one_of,
    read_composite,
)
from ..codec.primitives import Reader
from ..errors import DecodeError
from ..limits import Limits
from ..outcomes import Accepted, Error, Modified, Received, Rejected, Released
from ..termini import Coordinator, Source, Target
from ..transactions import Declared, DeliveryState, TransactionalState

#: ``role`` on the wire (Part 2 §2.8.1).
SENDER, RECEIVER = False, True

#: Types allowed in a ``state`` field (Part 3 §3.4, Part 4 §4.5.8).
DELIVERY_STATE = any_of(
    Accepted, Rejected, Released, Modified, Received, Declared, TransactionalState
)


@composite(
    0x10,
    ("container_id", STRING, MANDATORY),
    ("hostname", STRING),
    ("max_frame_size", UINT, 4294967295),
    ("channel_max", USHORT, 65535),
    ("idle_time_out", UINT),
    ("outgoing_locales", SYMBOLS, ()),
    ("incoming_locales", SYMBOLS, ()),
    ("offered_capabilities", SYMBOLS, ()),
    ("desired_capabilities", SYMBOLS, ()),
    ("properties", FIELDS),
)
class Open(Struct, kw_only=True, gc=False):
    """Negotiate the connection (§2.7.1)."""

    container_id: str
    hostname: str | None = None
    max_frame_size: int = 4294967295
    channel_max: int = 65535
    idle_time_out: int | None = None
    outgoing_locales: tuple[str, ...] = ()
    incoming_locales: tuple[str, ...] = ()
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None


@composite(
    0x11,
    ("remote_channel", USHORT),
    ("next_outgoing_id", UINT, MANDATORY),
    ("incoming_window", UINT, MANDATORY),
    ("outgoing_window", UINT, MANDATORY),
    ("handle_max", UINT, 4294967295),
    ("offered_capabilities", SYMBOLS, ()),
    ("desired_capabilities", SYMBOLS, ()),
    ("properties", FIELDS),
)
class Begin(Struct, kw_only=True, gc=False):
    """Begin a session on a channel (§2.7.2)."""

    remote_channel: int | None = None
    next_outgoing_id: int
    incoming_window: int
    outgoing_window: int
    handle_max: int = 4294967295
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None


@composite(
    0x12,
    ("name", STRING, MANDATORY),
    ("handle", UINT, MANDATORY),
    ("role", BOOLEAN, MANDATORY),
    ("snd_settle_mode", UBYTE, 2),
    ("rcv_settle_mode", UBYTE, 0),
    ("source", any_of(Source)),
    ("target", any_of(Target, Coordinator)),
    ("unsettled", MAP),
    ("incomplete_unsettled", BOOLEAN, False),
    ("initial_delivery_count", UINT),
    ("max_message_size", ULONG),
    ("offered_capabilities", SYMBOLS, ()),
    ("desired_capabilities", SYMBOLS, ()),
    ("properties", FIELDS),
)
class Attach(Struct, kw_only=True, gc=False):
    """Attach a link to a session (§2.7.3)."""

    name: str
    handle: int
    role: bool
    snd_settle_mode: int = 2
    rcv_settle_mode: int = 0
    source: Any = None
    target: Any = None
    unsettled: Mapping[object, object] | None = None
    incomplete_unsettled: bool = False
    initial_delivery_count: int | None = None
    max_message_size: int | None = None
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None


@composite(
    0x13,
    ("next_incoming_id", UINT),
    ("incoming_window", UINT, MANDATORY),
    ("next_outgoing_id", UINT, MANDATORY),
    ("outgoing_window", UINT, MANDATORY),
    ("handle", UINT),
    ("delivery_count", UINT),
    ("link_credit", UINT),
    ("available", UINT),
    ("drain", BOOLEAN, False),
    ("echo", BOOLEAN, False),
    ("properties", FIELDS),
)
class Flow(Struct, kw_only=True, gc=False):
    """Update the windows of a session and the credit of a link (§2.7.4)."""

    next_incoming_id: int | None = None
    incoming_window: int
    next_outgoing_id: int
    outgoing_window: int
    handle: int | None = None
    delivery_count: int | None = None
    link_credit: int | None = None
    available: int | None = None
    drain: bool = False
    echo: bool = False
    properties: Mapping[object, object] | None = None


@composite(
    0x14,
    ("handle", UINT, MANDATORY),
    ("delivery_id", UINT),
    ("delivery_tag", BINARY),
    ("message_format", UINT),
    ("settled", BOOLEAN),
    ("more", BOOLEAN, False),
    ("rcv_settle_mode", UBYTE),
    ("state", DELIVERY_STATE),
    ("resume", BOOLEAN, False),
    ("aborted", BOOLEAN, False),
    ("batchable", BOOLEAN, False),
)
class Transfer(Struct, gc=False):
    """Transfer a message, or a part of it (§2.7.5)."""

    handle: int
    delivery_id: int | None = None
    delivery_tag: bytes | None = None
    message_format: int | None = None
    settled: bool | None = None
    more: bool = False
    rcv_settle_mode: int | None = None
    state: DeliveryState | None = None
    resume: bool = False
    aborted: bool = False
    batchable: bool = False


@composite(
    0x15,
    ("role", BOOLEAN, MANDATORY),
    ("first", UINT, MANDATORY),
    ("last", UINT),
    ("settled", BOOLEAN, False),
    ("state", DELIVERY_STATE),
    ("batchable", BOOLEAN, False),
)
class Disposition(Struct, gc=False):
    """State of a range of deliveries (§2.7.6). ``role`` is that of the disposition's sender."""

    role: bool
    first: int
    last: int | None = None
    settled: bool = False
    state: DeliveryState | None = None
    batchable: bool = False


@composite(0x16, ("handle", UINT, MANDATORY), ("closed", BOOLEAN, False), ("error", one_of(Error)))
class Detach(Struct, gc=False):
    """Detach a link from its session (§2.7.7)."""

    handle: int
    closed: bool = False
    error: Error | None = None


@composite(0x17, ("error", one_of(Error)))
class End(Struct, gc=False):
    """End a session (§2.7.8)."""

    error: Error | None = None


@composite(0x18, ("error", one_of(Error)))
class Close(Struct, gc=False):
    """Close the connection (§2.7.9)."""

    error: Error | None = None


#: Every performative that may occur in an AMQP frame.
PERFORMATIVES = (Open, Begin, Attach, Flow, Transfer, Disposition, Detach, End, Close)


def read_last(data: bytes, at: int, end: int, limits: Limits) -> Close | None:
    """Read a frame that arrives after our close, of which only a close counts (§2.4.3); None for any other.

    A close that cannot be decoded closes all the same, without an error.
    """
    # The usual encoding of a descriptor; only for others it has to be decoded.
    if end - at > 3 and data[at] == 0 and data[at + 1] == 0x53 and data[at + 2] != 0x18:
        return None
    try:
        performative = read_composite(Reader(data, at, end, limits), *PERFORMATIVES)
    except DecodeError:
        return Close() if data[at : at + 3] == b"\x00\x53\x18" else None
    return performative if isinstance(performative, Close) else None
