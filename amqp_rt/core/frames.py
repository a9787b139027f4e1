"""Frame header, frame buffer, and fast paths for transfer and disposition (Part 2 §2.3).

Transfer and disposition have fast paths because they cross the wire once per message.
"""

from __future__ import annotations

from struct import Struct as Packer
from typing import Any, Final, cast

from ..codec.composites import encode_composite, read_composite, write_composite
from ..codec.primitives import Reader
from ..errors import RemoteProtocolError
from ..limits import Limits
from ..outcomes import ACCEPTED, Accepted, Error, Outcome, Rejected
from ..transactions import DeliveryState, TransactionalState
from ..values import Described
from .performatives import Disposition, Transfer

AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
TLS_HEADER: Final = b"AMQP\x02\x01\x00\x00"
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"

AMQP_FRAME: Final = 0
SASL_FRAME: Final = 1

#: A frame without a body, which only resets the peer's idle timer (§2.4.5).
EMPTY_FRAME: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"

FRAME_SIZE_MIN: Final = 512

_HEADER: Final = Packer(">IBBH")
_ACCEPTED: Final = b"\x00\x53\x24\x45"
#: The same before an absent ``batchable``. Azure's SDK for Python writes that, and booleans in two octets.
_ACCEPTED_AND_NULL: Final = _ACCEPTED + b"\x40"
#: Characters of an error that fit the smallest frame size that a peer may request.
_CONDITION_MAX: Final = 128
_DESCRIPTION_MAX: Final = 64


class Fault(RemoteProtocolError):
    """Protocol violation by the peer.

    ``scope`` names the endpoint that ends because of it: connection, session or link (§2.8.15 to
    §2.8.18).
    """

    def __init__(self, scope: str, condition: str, description: str) -> None:
        super().__init__(description, condition=condition)
        self.scope = scope


def connection_fault(condition: str, description: str) -> Fault:
    """Create a fault that closes the connection."""
    return Fault("connection", condition, description)


def session_fault(condition: str, description: str) -> Fault:
    """Create a fault that ends the session."""
    return Fault("session", condition, description)


def link_fault(condition: str, description: str) -> Fault:
    """Create a fault that detaches the link."""
    return Fault("link", condition, description)


def above_channel_max(channel: int, channel_max: int) -> Fault:
    """Create the fault for a *channel* above what we allow."""
    return connection_fault(
        "amqp:connection:framing-error",
        f"channel {channel} is above the channel-max {channel_max}",
    )


def no_session(name: str, channel: int, channel_max: int) -> Fault:
    """Create the fault for the performative *name* on a channel without a session."""
    if channel > channel_max:
        return above_channel_max(channel, channel_max)
    return connection_fault(
        "amqp:not-allowed", f"{name} on channel {channel}, which has no session"
    )


def misplaced_received() -> Fault:
    """Create the fault for a sender's state that only a receiver may set."""
    return link_fault(
        "amqp:invalid-field",
        "a sender may send *received* only when it resumes a delivery (§3.4.1)",
    )


class FrameBuffer:
    """Buffer that cuts a stream of arbitrary pieces into whole frames.

    A frame's size is checked in its header, before its body is buffered. The pieces of a large
    frame are joined once, when it is complete.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.data: bytes = b""
        #: Offsets of the body and the end of the frame that ``next_frame`` found.
        self.body: int = 0
        self.end: int = 0
        self.kind: int = 0
        self.channel: int = 0
        #: Offset of the next frame.
        self.at: int = 0
        self._pieces: list[bytes] = []
        self._pieces_size: int = 0
        self._wanted: int = 0

    def held(self) -> int:
        """Return the number of bytes whose frame is incomplete or has not been asked for."""
        return len(self.data) - self.at + self._pieces_size

    def feed(self, data: bytes) -> None:
        """Append the next piece of the stream."""
        if self._pieces:
            self._pieces.append(data)
            self._pieces_size += len(data)
            if self._pieces_size >= self._wanted:
                self.data = b"".join(self._pieces)
                self.at = 0
                self._pieces = []
                self._pieces_size = 0
        elif self.at < len(self.data):
            self.data = self.data[self.at :] + data
            self.at = 0
        else:
            self.data = data
            self.at = 0

    def take_header(self) -> bytes:
        """Take the eight octets of a protocol header; empty if they are incomplete (§2.2)."""
        at = self.at
        if self._pieces or len(self.data) - at < 8:
            return b""
        self.at = at + 8
        return self.data[at : at + 8]

    def next_frame(self) -> bool:
        """Find the next whole frame; return False if there is none yet.

        Raises:
            Fault: The frame header is malformed, or the frame too large.
        """
        if self._pieces:
            return False
        data = self.data
        at = self.at
        held = len(data) - at
        if held < 8:
            if held == 0 and at:
                # An idle connection must not keep its last chunk in memory.
                self.data = b""
                self.at = 0
            return False
        size = data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
        if size < 8:
            raise connection_fault("amqp:connection:framing-error", f"frame size {size} is below 8")
        if size > self.size_max:
            raise connection_fault(
                "amqp:connection:framing-error",
                f"frame of {size} bytes is larger than the {self.size_max} allowed",
            )
        body = data[at + 4] * 4
        if body < 8 or body > size:
            raise connection_fault(
                "amqp:connection:framing-error",
                f"data offset {data[at + 4]} does not fit a frame of {size} bytes",
            )
        if held < size:
            self._pieces = [data[at:] if at else data]
            self._pieces_size = held
            self._wanted = size
            self.data = b""
            self.at = 0
            return False
        self.kind = data[at + 5]
        self.channel = data[at + 6] << 8 | data[at + 7]
        self.body = at + body
        self.end = at + size
        self.at = at + size
        return True


def frame(kind: int, channel: int, body: bytes) -> bytes:
    """Encode a frame with *body*."""
    return _HEADER.pack(len(body) + 8, 2, kind, channel) + body


def performative_frame(channel: int, performative: Any, kind: int = AMQP_FRAME) -> bytes:
    """Encode a frame with *performative* and no payload."""
    out = bytearray(8)
    write_composite(out, performative)
    _HEADER.pack_into(out, 0, len(out), 2, kind, channel)
    return bytes(out)


#: Number of fields of each performative, by the code of its descriptor (§2.7).
_FIELDS: Final = {
    0x10: 10,
    0x11: 8,
    0x12: 14,
    0x13: 11,
    0x14: 11,
    0x15: 6,
    0x16: 3,
    0x17: 1,
    0x18: 1,
}
#: Octets by which a whole frame is larger at most: its nulls, and a list of another size.
WHOLE_FRAME_GROWTH: Final = 24
#: 00 53 code, a list without fields, a short and a long one.
_NO_FIELDS: Final = 0x45
_SHORT_LIST: Final = 0xC0


def whole_frame(data: bytes) -> bytes:
    """Return a frame of ours in which absent fields of the performative are written as nulls.

    Args:
        data: The frame, or the part of it before its payload. Other frames are returned unchanged.
    """
    if len(data) < 12 or data[5] != AMQP_FRAME:
        return data
    wanted = _FIELDS[data[10]]
    if data[11] == _NO_FIELDS:
        count, at = 0, 12
    elif data[11] == _SHORT_LIST:
        count, at = data[13], 14
    else:
        count, at = int.from_bytes(data[16:20]), 20
    fields = data[at:] + b"\x40" * (wanted - count)
    if len(fields) < 255:
        body = data[8:11] + bytes((_SHORT_LIST, len(fields) + 1, wanted)) + fields
    else:
        head = b"\xd0" + (len(fields) + 4).to_bytes(4) + wanted.to_bytes(4)
        body = data[8:11] + head + fields
    size = int.from_bytes(data[:4]) - len(data) + 8 + len(body)
    return size.to_bytes(4) + data[4:8] + body


def whole_error(error: Error | None) -> Error | None:
    """Return *error* with an empty ``info`` if it has none, so that it is written with all its fields."""
    if error is None or error.info is not None:
        return error
    return Error(error.condition, error.description, {})


def whole_state(state: DeliveryState | None) -> DeliveryState | None:
    """Return a delivery's *state*, whose error is written with all its fields."""
    if type(state) is Rejected:
        return Rejected(whole_error(state.error))
    if type(state) is TransactionalState:
        # The state of an outcome is the outcome.
        outcome = cast("Outcome | Described | None", whole_state(state.outcome))
        return TransactionalState(state.txn_id, outcome)
    return state


def shortened(error: Error) -> Error:
    """Return *error* without its info, and with a description that fits the smallest frames."""
    condition = error.condition
    if len(condition) > _CONDITION_MAX:
        condition = "amqp:internal-error"
    return Error(condition, (error.description or "")[:_DESCRIPTION_MAX])


def short_state(state: DeliveryState | None) -> DeliveryState | None:
    """Return a delivery's *state* with a short error, if it has one; other states unchanged."""
    if type(state) is Rejected and state.error is not None:
        return Rejected(shortened(state.error))
    if type(state) is TransactionalState:
        outcome = cast("Outcome | Described | None", short_state(state.outcome))
        return TransactionalState(state.txn_id, outcome)
    return state


#: First frame of a delivery with a tag of four octets, packed in one call:
#: 00 53 14 C0 size count | 70 handle | 70 delivery-id | A0 04 tag | 43 | settled | more
_FIRST: Final = Packer(">IHHIBBBIBIBB4sBBB")
#: Octets of it before the payload, and those of its tag.
PLAIN_SIZE: Final = 33
PLAIN_TAG_SIZE: Final = 4
#: What the first frames of a link have in common: the frame's octets 4 to 20, up to the delivery-id.
_RUN_HEAD: Final = Packer(">HHIBBBIB")
#: The same frame in its variable parts: size | octets 4 to 20 | delivery-id | A0 04 | tag | 43, settled, more
PLAIN_FRAME: Final = Packer(">I16sIH4s3s")
PLAIN_TAG: Final = 0xA004
#: Later frames: 00 53 14 C0 size count | 70 handle | 40 40 40 40 | more
_LATER: Final = Packer(">IHHIBBBIIB")
#: 00 53 15 C0 size count | role | 70 first | 70 last | settled
_DISPOSITION: Final = Packer(">IHHIBBBBIBIB")
#: The same with a long list: 00 53 15 D0 size count
_LONG_DISPOSITION: Final = Packer(">IHHIIIBBIBIB")


def first_transfer(
    channel: int, handle: int, delivery_id: int, tag: bytes, settled: bool, more: bool, size: int
) -> bytes:
    """Encode the frame header and the first transfer of a plain delivery.

    The payload of *size* bytes follows. Plain means a tag of four octets, message-format 0 and no
    state.
    """
    return _FIRST.pack(
        size + 33,
        0x0200,
        channel,
        0x005314C0,
        20,
        6,
        0x70,
        handle,
        0x70,
        delivery_id,
        0xA0,
        4,
        tag,
        0x43,
        0x41 if settled else 0x42,
        0x41 if more else 0x42,
    )


def run_head(channel: int, handle: int) -> bytes:
    """Return octets 4 to 20 of the frames of :func:`first_transfer`, which are those of its link."""
    return _RUN_HEAD.pack(0x0200, channel, 0x005314C0, 20, 6, 0x70, handle, 0x70)


def later_transfer(channel: int, handle: int, more: bool, size: int) -> bytes:
    """Encode the frame header and transfer of a delivery's continuation (§2.7.5)."""
    return _LATER.pack(
        size + 24,
        0x0200,
        channel,
        0x005314C0,
        11,
        6,
        0x70,
        handle,
        0x40404040,
        0x41 if more else 0x42,
    )


def any_transfer(channel: int, transfer: Transfer, size: int) -> bytes:
    """Encode the frame header and any *transfer*, to precede *size* payload bytes."""
    out = bytearray(8)
    write_composite(out, transfer)
    _HEADER.pack_into(out, 0, len(out) + size, 2, AMQP_FRAME, channel)
    return bytes(out)


def encode_state(state: DeliveryState | None) -> bytes:
    """Encode a delivery state; null if there is none."""
    if state is None:
        return b"\x40"
    if type(state) is Accepted:
        return _ACCEPTED
    return encode_composite(state)


def disposition_frame(
    channel: int, role: bool, first: int, last: int, settled: bool, state: DeliveryState | None
) -> bytes:
    """Encode a disposition frame for a range (§2.7.6)."""
    return encoded_disposition(channel, role, first, last, settled, encode_state(state))


def encoded_disposition(
    channel: int, role: bool, first: int, last: int, settled: bool, state: bytes
) -> bytes:
    """Encode a disposition frame for a range whose *state* is encoded already."""
    size = len(state)
    role_code = 0x41 if role else 0x42
    settled_code = 0x41 if settled else 0x42
    if size > 200:
        return (
            _LONG_DISPOSITION.pack(
                size + 32,
                0x0200,
                channel,
                0x005315D0,
                size + 16,
                5,
                role_code,
                0x70,
                first,
                0x70,
                last,
                settled_code,
            )
            + state
        )
    return (
        _DISPOSITION.pack(
            size + 26,
            0x0200,
            channel,
            0x005315C0,
            size + 13,
            5,
            role_code,
            0x70,
            first,
            0x70,
            last,
            settled_code,
        )
        + state
    )


def read_transfer(data: bytes, at: int, end: int, limits: Limits) -> tuple[Transfer, int]:  # noqa: C901
    """Decode the transfer at *at*; return it and the offset of its payload.

    The fast path knows the constructors that peers commonly use. Any others, valid or not, are left
    to the declared composite.
    """
    try:
        if data[at] == 0 and data[at + 1] == 0x53 and data[at + 2] == 0x14:
            code = data[at + 3]
            if code == 0xC0:
                stop = at + 5 + data[at + 4]
                count = data[at + 5]
                p = at + 6
            elif code == 0xD0:
                stop = (
                    at
                    + 8
                    + (data[at + 4] << 24 | data[at + 5] << 16 | data[at + 6] << 8 | data[at + 7])
                )
                count = data[at + 8] << 24 | data[at + 9] << 16 | data[at + 10] << 8 | data[at + 11]
                p = at + 12
            else:
                return _read_any_transfer(data, at, end, limits)
            if stop > end or count > 11 or count == 0:
                return _read_any_transfer(data, at, end, limits)
            code = data[p]
            if code == 0x43:
                handle = 0
                p += 1
            elif code == 0x52:
                handle = data[p + 1]
                p += 2
            elif code == 0x70:
                handle = data[p + 1] << 24 | data[p + 2] << 16 | data[p + 3] << 8 | data[p + 4]
                p += 5
            else:
                return _read_any_transfer(data, at, end, limits)
            delivery_id: int | None = None
            tag: bytes | None = None
            message_format: int | None = None
            settled: bool | None = None
            more = False
            if count > 1:
                code = data[p]
                if code == 0x52:
                    delivery_id = data[p + 1]
                    p += 2
                elif code == 0x70:
                    delivery_id = (
                        data[p + 1] << 24 | data[p + 2] << 16 | data[p + 3] << 8 | data[p + 4]
                    )
                    p += 5
                elif code == 0x43:
                    delivery_id = 0
                    p += 1
                elif code == 0x40:
                    p += 1
                else:
                    return _read_any_transfer(data, at, end, limits)
            if count > 2:
                code = data[p]
                if code == 0xA0:
                    size = data[p + 1]
                    p += 2
                    tag = data[p : p + size]
                    p += size
                elif code == 0x40:
                    p += 1
                else:
                    return _read_any_transfer(data, at, end, limits)
            if count > 3:
                code = data[p]
                if code == 0x43:
                    message_format = 0
                    p += 1
                elif code == 0x40:
                    p += 1
                elif code == 0x52:
                    message_format = data[p + 1]
                    p += 2
                elif code == 0x70:
                    message_format = (
                        data[p + 1] << 24 | data[p + 2] << 16 | data[p + 3] << 8 | data[p + 4]
                    )
                    p += 5
                else:
                    return _read_any_transfer(data, at, end, limits)
            if count > 4:
                code = data[p]
                if code == 0x41:
                    settled = True
                elif code == 0x42:
                    settled = False
                elif code == 0x56 and data[p + 1] <= 1:
                    p += 1
                    settled = data[p] == 1
                elif code != 0x40:
                    return _read_any_transfer(data, at, end, limits)
                p += 1
            if count > 5:
                code = data[p]
                if code == 0x41:
                    more = True
                elif code == 0x56 and data[p + 1] <= 1:
                    p += 1
                    more = data[p] == 1
                elif code != 0x42 and code != 0x40:
                    return _read_any_transfer(data, at, end, limits)
                p += 1
            # The remaining fields are null, or false if boolean (from the ninth field on), unless
            # the peer uses rare features, which the declared composite decodes.
            rest = count - 6
            while rest > 0:
                code = data[p]
                if code != 0x40 and (code != 0x42 or count - rest < 8):
                    return _read_any_transfer(data, at, end, limits)
                p += 1
                rest -= 1
            if p == stop:
                return Transfer(handle, delivery_id, tag, message_format, settled, more), stop
    except IndexError:
        pass
    return _read_any_transfer(data, at, end, limits)


def _read_any_transfer(data: bytes, at: int, end: int, limits: Limits) -> tuple[Transfer, int]:
    reader = Reader(data, at, end, limits)
    transfer = read_composite(reader, Transfer)
    return transfer, reader.at


def read_disposition(data: bytes, at: int, end: int, limits: Limits) -> Disposition:
    """Decode the disposition at *at*, with a fast path for the usual encoding."""
    try:
        if (
            data[at] == 0
            and data[at + 1] == 0x53
            and data[at + 2] == 0x15
            and data[at + 3] == 0xC0
            and at + 5 + data[at + 4] == end
            and data[at + 5] >= 4
        ):
            count = data[at + 5]
            p = at + 6
            code = data[p]
            if code == 0x41:
                role = True
            elif code == 0x42:
                role = False
            elif code == 0x56 and data[p + 1] <= 1:
                p += 1
                role = data[p] == 1
            else:
                return _read_any_disposition(data, at, end, limits)
            p += 1
            code = data[p]
            if code == 0x52:
                first = data[p + 1]
                p += 2
            elif code == 0x70:
                first = data[p + 1] << 24 | data[p + 2] << 16 | data[p + 3] << 8 | data[p + 4]
                p += 5
            elif code == 0x43:
                first = 0
                p += 1
            else:
                return _read_any_disposition(data, at, end, limits)
            last: int | None = None
            code = data[p]
            if code == 0x40:
                p += 1
            elif code == 0x52:
                last = data[p + 1]
                p += 2
            elif code == 0x70:
                last = data[p + 1] << 24 | data[p + 2] << 16 | data[p + 3] << 8 | data[p + 4]
                p += 5
            else:
                return _read_any_disposition(data, at, end, limits)
            code = data[p]
            if code == 0x41:
                settled = True
            elif code == 0x42:
                settled = False
            elif code == 0x56 and data[p + 1] <= 1:
                p += 1
                settled = data[p] == 1
            else:
                return _read_any_disposition(data, at, end, limits)
            p += 1
            if count == 4 and p == end:
                return Disposition(role, first, last, settled)
            if count == 5 and p + 4 == end and data[p:end] == _ACCEPTED:
                return Disposition(role, first, last, settled, ACCEPTED)
            if count == 6 and p + 5 == end and data[p:end] == _ACCEPTED_AND_NULL:
                return Disposition(role, first, last, settled, ACCEPTED)
    except IndexError:
        pass
    return _read_any_disposition(data, at, end, limits)


def _read_any_disposition(data: bytes, at: int, end: int, limits: Limits) -> Disposition:
    return read_composite(Reader(data, at, end, limits), Disposition)
