"""Checks of protocol headers, SASL, open and close, frames, idle time-outs and malformed octets."""

from __future__ import annotations

import struct
import time
from typing import Final

from amqp_rt.net.traces.octets import (
    HEADER,
    SASL_HEADER,
    CompositeValue,
    Raw,
    composite,
    encode,
    encode_frame,
)

from .checks import check
from .frames import open_frame
from .host import Host
from .peers import Peer
from .verdicts import Departs, NotOffered, require

#: Octets of a frame that every host must accept (Part 2 §2.7.1, MIN-MAX-FRAME-SIZE).
MIN_MAX_FRAME_SIZE: Final = 512
FRAMING: Final = "amqp:connection:framing-error"
DECODE: Final = "amqp:decode-error"
_BEGIN: Final = composite("begin", next_outgoing_id=0, incoming_window=9, outgoing_window=9)
#: A link that is attached and detached without waiting for answers.
_ATTACH_AND_DETACH: Final = (
    composite(
        "attach", name="l", handle=0, role="receiver", source="amqp-rt-conformance", target="t"
    ),
    composite("detach", handle=0, closed=True),
)
#: The longest idle time-out that the check waits for, in milliseconds.
_IDLE_MAX_MS: Final = 5_000

# --- protocol headers ----------------------------------------------------------------------------


def _another_header(host: Host, octets: bytes) -> None:
    peer = host.dial()
    peer.raw(octets)
    answer = peer.hear("header")
    # The answer may be the header of another version that the host supports.
    require(answer.payload != octets, f"{octets!r} is answered by itself")
    peer.gone()


@check("X1", section="2.2")
def header(host: Host) -> None:
    """The header of AMQP 1.0 is answered by itself, or by a required one and the stream's end."""
    peer = host.dial()
    peer.raw(HEADER)
    answer = peer.hear("header")
    if answer.payload != HEADER:
        require(answer.payload[:4] == b"AMQP", f"the header is answered by {answer.payload!r}")
        peer.gone()


@check("X1", section="2.2")
def another_version(host: Host) -> None:
    """An unsupported version is answered by a supported one, and the end of the stream."""
    _another_header(host, b"AMQP\x00\x09\x00\x00")


@check("X1", section="2.2")
def another_protocol_id(host: Host) -> None:
    """An unknown protocol id is answered by a supported header, and the end of the stream."""
    _another_header(host, b"AMQP\x77\x01\x00\x00")


@check("X1", section="2.2")
def no_header(host: Host) -> None:
    """Octets that are no header are answered by a supported header, and the end of the stream."""
    _another_header(host, b"\x16\x07NoAMQP")


@check("X1", section="2.2")
def header_in_pieces(host: Host) -> None:
    """A header may arrive octet by octet."""
    peer = host.dial()
    for octet in SASL_HEADER:
        peer.raw(bytes((octet,)))
        time.sleep(0.005)
    peer.hear("header")


@check("SE1", section="5.3.2")
def sasl(host: Host) -> None:
    """The SASL layer ends with the code ok, and AMQP begins with its own header."""
    _through_sasl(host)
    host.connect()


@check("SE1", section="5.3.1")
def sasl_frames_are_small(host: Host) -> None:
    """Frames of the SASL layer have 512 octets at most."""
    peer = _through_sasl(host)
    frame = peer.hear("sasl_mechanisms")
    require(frame.size <= MIN_MAX_FRAME_SIZE, f"sasl-mechanisms of {frame.size} octets")


@check("SE1", section="5.3.3.6")
def unknown_mechanism(host: Host) -> None:
    """A mechanism that was not offered is refused with the code auth."""
    peer = _through_sasl(host)
    peer.hear("sasl_mechanisms")
    peer.send("sasl_init", mechanism="NO-SUCH-MECHANISM", initial_response=b"x")
    outcome = peer.hear("sasl_outcome")
    require(
        outcome.fields.get("code") == 1, f"the code auth (1) is expected, and {outcome!r} arrives"
    )


@check("SE1", section="5.3.3.6")
def wrong_password(host: Host) -> None:
    """A wrong password is refused with the code auth."""
    if host.user is None:
        raise NotOffered("without a user there is no password to be wrong")
    peer = _through_sasl(host)
    peer.hear("sasl_mechanisms")
    response = f"\0{host.user}\0{host.password}-not".encode()
    peer.send("sasl_init", mechanism="PLAIN", initial_response=response)
    outcome = peer.hear("sasl_outcome", within=host.patience_s + 5)
    require(
        outcome.fields.get("code") == 1, f"the code auth (1) is expected, and {outcome!r} arrives"
    )


def _through_sasl(host: Host) -> Peer:
    peer = host.dial()
    peer.raw(SASL_HEADER)
    if peer.hear("header").payload != SASL_HEADER:
        raise NotOffered("the host has no SASL layer")
    return peer


# --- open and close ------------------------------------------------------------------------------


@check("X4", section="2.7.1")
def open_of_the_host(host: Host) -> None:
    """The host sends open with a container-id on channel 0, and a max-frame-size of at least
    512.
    """
    peer = host.log_in()
    peer.raw(HEADER)
    peer.open()
    peer.hear("header")
    frame = peer.hear("open")
    require(frame.channel == 0, f"open comes on channel {frame.channel}")
    require(isinstance(frame.fields.get("container_id"), str), "open has no container-id")
    size = frame.fields.get("max_frame_size", 2**32 - 1)
    require(size >= MIN_MAX_FRAME_SIZE, f"the max-frame-size is {size}")


@check("X4", section="2.7.9")
def close(host: Host) -> None:
    """Close is answered by close, without an error."""
    peer = host.connect()
    peer.send("close")
    frame = peer.hear("close")
    require(frame.fields.get("error") is None, f"our close is answered by {frame!r}")


@check("X4", "X26", section="2.7.9")
def close_with_an_error(host: Host) -> None:
    """A close with an error is answered by close, as any other."""
    peer = host.connect()
    peer.send("close", error=("amqp:internal-error", "this end has a fault of its own"))
    peer.hear("close")


@check("X4", section="2.7.1")
def open_without_a_container_id(host: Host) -> None:
    """Open without the mandatory container-id is a decode error."""
    peer = host.log_in()
    peer.raw(HEADER)
    peer.open(container_id=None)
    peer.hear("header")
    peer.fault("close", conditions=(DECODE, "amqp:invalid-field"))


@check("X4", section="2.7.1")
def begin_before_open(host: Host) -> None:
    """The first frame must be open: another one closes the connection with an error."""
    peer = host.log_in()
    peer.raw(HEADER)
    peer.expect_channel(0)
    peer.send("begin", next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    peer.hear("header")
    peer.fault("close")


@check("X4", section="2.8.15")
def open_twice(host: Host) -> None:
    """A second open is not allowed: the connection is closed with an error."""
    peer = host.connect()
    peer.open()
    peer.fault("close", conditions=("amqp:illegal-state", "amqp:not-allowed", FRAMING))


@check("X4", section="2.7.1")
def smallest_frames(host: Host) -> None:
    """A peer with a max-frame-size of 512 receives no larger frame."""
    peer = host.connect(max_frame_size=MIN_MAX_FRAME_SIZE)
    peer.begin()
    address = host.queue(peer)
    out = peer.sender(address)
    # The host may not accept larger frames either, so the message is sent in small transfers.
    piece = b"\x00\x53\x75\xa0\xc8" + bytes(200)
    number = out.begin(payload=piece, more=True)
    for _ in range(8):
        out.go_on(piece, more=True)
    out.go_on(piece)
    out.accepted(number)
    source = peer.receiver(address)
    source.flow(1)
    delivery = source.take()
    source.settle(delivery)
    large = [size for size in delivery.sizes if size > MIN_MAX_FRAME_SIZE]
    require(not large, f"frames of {large} octets come")


@check("X5", section="2.4.1")
def everything_at_once(host: Host) -> None:
    """All frames from open to close may be sent at once; open and close are answered."""
    peer = host.log_in()
    peer.expect_channel(0)
    frames = [
        composite("open", container_id="kit-at-once", hostname=host.name),
        _BEGIN,
        *_ATTACH_AND_DETACH,
        composite("end"),
        composite("close"),
    ]
    peer.raw(HEADER + b"".join(map(encode_frame, frames)))
    peer.hear("header")
    # Answers on a session that the close has ended already are optional.
    peer.hear("open")
    peer.hear("close", passing={"empty", "flow", "begin", "attach", "detach", "end"})


@check("X5", section="2.5.2")
def begin_and_end_at_once(host: Host) -> None:
    """Begin and end may be sent at once; each is answered."""
    peer = host.connect()
    peer.expect_channel(0)
    peer.raw(encode_frame(_BEGIN) + encode_frame(composite("end")))
    peer.hear("begin")
    peer.hear("end")


@check("X5", section="2.6.3")
def attach_and_detach_at_once(host: Host) -> None:
    """Attach and detach may be sent at once; each is answered."""
    peer = host.session()
    peer.raw(b"".join(map(encode_frame, _ATTACH_AND_DETACH)))
    # The source need not exist: a refused link is attached and detached as well.
    peer.hear("attach")
    peer.hear("detach")
    peer.alive()


@check("X5", "SE1", section="5.3.2")
def sasl_at_once(host: Host) -> None:
    """A client need not wait for answers in the SASL layer, nor before open."""
    _through_sasl(host)
    peer = host.dial()
    mechanism = "ANONYMOUS" if host.user is None else "PLAIN"
    init = composite("sasl_init", mechanism=mechanism, initial_response=host.response())
    peer.raw(SASL_HEADER + encode_frame(init) + HEADER)
    peer.open()
    for name in ("header", "sasl_mechanisms", "sasl_outcome", "header", "open"):
        peer.hear(name)


# --- frames --------------------------------------------------------------------------------------


@check("X3", section="2.3.1")
def extended_header(host: Host) -> None:
    """The extended header of a frame is ignored."""
    peer = host.connect()
    peer.expect_channel(0)
    peer.raw(encode_frame(_BEGIN, doff=4))
    peer.hear("begin")


@check("X3", section="2.8.16")
def data_offset_too_small(host: Host) -> None:
    """A data offset below 2 is a framing error."""
    peer = host.connect()
    peer.raw(encode_frame(_BEGIN, doff=1))  # fmt: skip
    peer.fault("close", conditions=(FRAMING,))


@check("X3", section="2.8.16")
def data_offset_beyond_the_frame(host: Host) -> None:
    """A data offset beyond the end of the frame is a framing error."""
    peer = host.connect()
    peer.raw(struct.pack(">IBBH", 16, 9, 0, 0) + bytes(8))
    peer.fault("close", conditions=(FRAMING,))


@check("X3", section="2.8.16")
def frame_smaller_than_its_header(host: Host) -> None:
    """A frame whose size is less than its header is a framing error."""
    peer = host.connect()
    peer.raw(struct.pack(">IBBH", 4, 2, 0, 0) + bytes(8))
    peer.fault("close", conditions=(FRAMING,))


@check("X3", section="2.7.1")
def frame_too_large(host: Host) -> None:
    """A frame larger than the max-frame-size of the host is a framing error."""
    peer = host.connect()
    size = peer.greeting.get("max_frame_size", 2**32 - 1)
    if size > 64 * 2**20:
        raise NotOffered(f"frames of {size} octets are taken")
    peer.begin()
    peer.raw(encode_frame(b"\x00\x53\x17\x45" + bytes(size)))
    peer.fault("close", conditions=(FRAMING,))


@check("X3", section="2.3.2")
def empty_frames(host: Host) -> None:
    """Frames without a body are accepted."""
    peer = host.session()
    peer.raw(encode_frame(b"") + encode_frame(b""))
    peer.alive()


@check("X3", section="2.3")
def frames_in_pieces(host: Host) -> None:
    """A frame may arrive octet by octet."""
    peer = host.connect()
    peer.expect_channel(0)
    for octet in encode_frame(_BEGIN):  # fmt: skip
        peer.raw(bytes((octet,)))
    peer.hear("begin")


@check("X26", section="2.8.15")
def unknown_performative(host: Host) -> None:
    """An unknown performative closes the connection with an error."""
    peer = host.session()
    peer.raw(encode_frame(b"\x00\x53\x1f\x45"))
    peer.fault("close")


@check("X26", section="2.8.15")
def frame_without_a_performative(host: Host) -> None:
    """A frame body other than a described list closes the connection with an error."""
    peer = host.session()
    peer.raw(encode_frame(b"\xa1\x05hello"))
    peer.fault("close")


@check("X26", section="2.8.15")
def frame_on_a_channel_without_a_session(host: Host) -> None:
    """A frame on a channel without a session closes the connection with an error."""
    peer = host.session()
    peer.send("attach", channel=3, name="l", handle=0, role="receiver", source="q", target="t")
    peer.fault("close")


# --- types, tried on open, which every host has to read --------------------------------------------


def _opens(host: Host, frame: bytes) -> None:
    peer = host.log_in()
    peer.raw(HEADER + frame)
    peer.hear("header")
    peer.hear("open")
    peer.begin()


def _does_not_open(host: Host, frame: bytes, *conditions: str) -> None:
    peer = host.log_in()
    peer.raw(HEADER + frame)
    peer.hear("header")
    peer.fault("close", conditions=conditions)


_ID: Final = encode("string", "kit")
_NULL: Final = b"\x40"


@check("T1", section="1.6")
def long_encodings(host: Host) -> None:
    """Values in their longest encodings are accepted: str32, uint, ushort, null for no value."""
    name = host.name.encode()
    _opens(
        host,
        open_frame(
            b"\xb1" + struct.pack(">I", 3) + b"kit",
            b"\xb1" + struct.pack(">I", len(name)) + name,
            b"\x70" + struct.pack(">I", 4096),
            b"\x60" + struct.pack(">H", 9),
            b"\x70" + struct.pack(">I", 60_000),
            *[_NULL] * 5,
            code=b"\x80" + struct.pack(">Q", 0x10),
        ),
    )


@check("T1", section="1.6")
def short_encodings(host: Host) -> None:
    """Values in their shortest encodings are accepted: list8, str8, uint0, smalluint."""
    name = host.name.encode()
    items = _ID + b"\xa1" + bytes((len(name),)) + name + _NULL + b"\x60\x00\x09" + b"\x43"
    _opens(host, encode_frame(b"\x00\x53\x10\xc0" + bytes((len(items) + 1, 5)) + items))


@check("T1", section="1.6.2")
def booleans(host: Host) -> None:
    """A boolean encoded in two octets (0x56) is accepted."""
    peer = host.session()
    address = host.queue(peer)
    link = peer.receiver(address, incomplete_unsettled=Raw(b"\x56\x00"))
    link.flow(0, drain=Raw(b"\x56\x00"))
    peer.alive()


@check("T6", section="1.3")
def symbolic_descriptors(host: Host) -> None:
    """A descriptor may be a symbol: amqp:open:list."""
    _opens(host, open_frame(_ID, encode("string", host.name), code=b"\xa3\x0eamqp:open:list"))


@check("T6", section="1.2")
def unknown_described_value(host: Host) -> None:
    """An unknown described value, where any type is allowed, is accepted."""
    odd = b"\x00\x80" + struct.pack(">Q", 0xDEAD_0000_BEEF) + b"\xa1\x01x"
    properties = encode("map", {"amqp-rt:odd": Raw(odd)})
    _opens(host, open_frame(_ID, encode("string", host.name), *[_NULL] * 7, properties))


@check("T7", section="1.4")
def trailing_nulls(host: Host) -> None:
    """Trailing fields may be omitted, or sent as nulls."""
    _opens(host, open_frame(_ID))
    _opens(host, open_frame(_ID, *[_NULL] * 9))


@check("T7", section="2.8.15")
def field_of_a_wrong_type(host: Host) -> None:
    """A field of a wrong type is a decode error."""
    frame = open_frame(_ID, encode("string", host.name), encode("string", "many"))
    _does_not_open(host, frame, DECODE, "amqp:invalid-field")


@check("T7", section="2.8.15")
def mandatory_field_missing(host: Host) -> None:
    """A begin without the mandatory next-outgoing-id is a decode error."""
    peer = host.connect()
    peer.expect_channel(0)
    peer.send("begin", incoming_window=9, outgoing_window=9)
    peer.fault("close", "end", conditions=(DECODE, "amqp:invalid-field"))


@check("T8", section="1.4")
def several_values(host: Host) -> None:
    """Of a field with several values one may come by itself, many in an array."""
    many = encode("symbol*", ["amqp-rt:a", "amqp-rt:b"])
    _opens(host, open_frame(_ID, encode("string", host.name), *[_NULL] * 5, encode("symbol", "amqp-rt:a")))  # fmt: skip
    _opens(host, open_frame(_ID, encode("string", host.name), *[_NULL] * 5, many, many))


@check("T5", section="1.6.23")
def half_a_pair(host: Host) -> None:
    """A map with a key and no value is a decode error."""
    odd = b"\xd1" + struct.pack(">II", 4 + 5, 1) + b"\xa3\x03key"
    _does_not_open(host, open_frame(_ID, *[_NULL] * 8, odd), DECODE)


@check("T5", section="1.6.23")
def same_key_twice(host: Host) -> None:
    """A map with a duplicate key is a decode error."""
    content = b"\xa3\x03key\xa1\x01a\xa3\x03key\xa1\x01b"
    twice = b"\xd1" + struct.pack(">II", 4 + len(content), 4) + content
    _does_not_open(host, open_frame(_ID, *[_NULL] * 8, twice), DECODE)


@check("T3", section="1.6.20")
def text_that_is_no_utf8(host: Host) -> None:
    """A string that is not UTF-8 is a decode error."""
    _does_not_open(host, open_frame(b"\xa1\x04\xff\xfe\xc0\x80"), DECODE)


@check("T9", section="2.8.15")
def sizes_that_lie(host: Host) -> None:
    """A list whose size exceeds its frame is a decode error."""
    lie = encode_frame(b"\x00\x53\x10\xd0" + struct.pack(">II", 2**31, 2**31) + _ID)
    _does_not_open(host, lie, DECODE, FRAMING)


@check("T9", section="2.8.15")
def count_that_lies(host: Host) -> None:
    """A list with fewer items than its count is a decode error."""
    lie = encode_frame(b"\x00\x53\x10\xd0" + struct.pack(">II", 4 + len(_ID), 2**32 - 1) + _ID)
    _does_not_open(host, lie, DECODE, FRAMING)


@check("T9", section="1.6")
def values_inside_values(host: Host) -> None:
    """Hundreds of nested lists, or an array of 2^32 - 1 nulls, do not stop the host."""
    peer = host.connect()
    depth = min(400, (peer.greeting.get("max_frame_size", 2**32 - 1) - 100) // 9)
    deep = b"\x45"
    for _ in range(depth):
        deep = b"\xd0" + struct.pack(">II", len(deep) + 4, 1) + deep
    endless = b"\xf0" + struct.pack(">II", 5, 2**32 - 1) + b"\x40"
    for content in (deep, endless):
        peer = host.connect()
        peer.expect_channel(0)
        properties = b"\xd1" + struct.pack(">II", 7 + len(content), 2) + b"\xa3\x01x" + content
        peer.send("begin", next_outgoing_id=0, incoming_window=9, outgoing_window=9, properties=Raw(properties))  # fmt: skip
        # The host may accept or refuse it; it has to keep running.
        peer.hear("begin", "close")
        host.session()


# --- idle time-outs ------------------------------------------------------------------------------


@check("X6", section="2.4.5")
def idle_time_out_of_ours(host: Host) -> None:
    """A peer with an idle-time-out of one second receives a frame every second."""
    try:
        peer = host.connect(idle_time_out=1000)
    except Departs as departure:
        raise NotOffered(f"a second is too short for the host: {departure.seen}") from None
    for _ in range(3):
        if peer.next(1.25) is None:
            raise Departs("nothing comes for longer than the idle-time-out of 1 s")


@check("X6", section="2.4.5")
def idle_time_out_of_theirs(host: Host) -> None:
    """A peer silent for longer than the host's idle-time-out receives a close with an error."""
    peer = host.connect()
    limit = peer.greeting.get("idle_time_out") or 0
    if not limit:
        raise NotOffered("the host has no idle-time-out")
    if limit > _IDLE_MAX_MS:
        raise NotOffered(f"its idle-time-out of {limit / 1000:g} s is too long to be waited for")
    # Hosts should announce half of the time that they enforce.
    frame = peer.hear("close", within=limit / 1000 * 3 + 1)
    error = frame.fields.get("error")
    condition = error.fields.get("condition") if isinstance(error, CompositeValue) else None
    require(condition == "amqp:resource-limit-exceeded", f"the host closes with {condition}")


@check("X26", section="2.4.4")
def end_without_a_close(host: Host) -> None:
    """A peer that ends its stream without a close affects no other connection."""
    other = host.session()
    peer = host.session()
    peer.receiver(host.queue(peer)).flow(10)
    peer.cut()
    other.alive()
    host.session()
