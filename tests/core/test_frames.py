"""Frames out of a stream, however it is cut; the fast paths against the declared composites."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import frame

from amqp_rt.codec.composites import encode_composite, read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.frames import (
    AMQP_HEADER,
    EMPTY_FRAME,
    Fault,
    FrameBuffer,
    any_transfer,
    connection_fault,
    disposition_frame,
    encode_state,
    first_transfer,
    later_transfer,
    read_disposition,
    read_transfer,
    session_fault,
)
from amqp_rt.core.performatives import (
    PERFORMATIVES,
    Close,
    Detach,
    Disposition,
    End,
    Transfer,
)
from amqp_rt.core.repeated import final_frame
from amqp_rt.errors import DecodeError
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Modified,
    Received,
    rejected,
)
from amqp_rt.transactions import Declared, TransactionalState

# --- the buffer ------------------------------------------------------------------------------


def raw(kind: int, channel: int, body: bytes, *, extended: bytes = b"") -> bytes:
    doff = 2 + len(extended) // 4
    size = 8 + len(extended) + len(body)
    return struct.pack(">IBBH", size, doff, kind, channel) + extended + body


FRAMES = [
    (0, 0, b""),
    (0, 7, b"x"),
    (1, 65_535, b"sasl"),
    (0, 1, bytes(range(256))),
    (255, 2, b"unknown kinds are not the buffer's business"),
    (0, 3, b""),
]
STREAM = (
    AMQP_HEADER
    + b"".join(raw(*one) for one in FRAMES[:3])
    + raw(*FRAMES[3], extended=b"whatever")
    + b"".join(raw(*one) for one in FRAMES[4:])
)


def cut_out(pieces: list[bytes], size_max: int = 512) -> list[tuple[int, int, bytes]]:
    buffer = FrameBuffer(size_max)
    header = b""
    found = []
    for piece in pieces:
        buffer.feed(piece)
        if not header:
            header = buffer.take_header()
            if not header:
                continue
            assert header == AMQP_HEADER
        while buffer.next_frame():
            found.append((buffer.kind, buffer.channel, buffer.data[buffer.body : buffer.end]))
    assert buffer.held() == 0
    return found


@pytest.mark.req("X3")
def test_one_cut_at_every_position() -> None:
    for at in range(len(STREAM) + 1):
        assert cut_out([STREAM[:at], STREAM[at:]]) == FRAMES


@pytest.mark.req("X3")
def test_pieces_of_every_size() -> None:
    for size in range(1, len(STREAM) + 1):
        pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
        assert cut_out(pieces) == FRAMES


@pytest.mark.req("X3")
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cuts(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(STREAM)]
    assert cut_out([STREAM[begin:end] for begin, end in pairwise(at)]) == FRAMES


@pytest.mark.req("X3")
@pytest.mark.parametrize("size", [0, 1, 7, 513, 0xFFFFFFFF])
def test_a_size_is_judged_before_the_body_is_kept(size: int) -> None:
    buffer = FrameBuffer(512)
    buffer.feed(struct.pack(">IBBH", size, 2, 0, 0)[:7])
    assert not buffer.next_frame()
    buffer.feed(b"\0")
    with pytest.raises(Fault, match="frame"):
        buffer.next_frame()
    assert buffer.held() <= 8


@pytest.mark.req("X3")
@pytest.mark.parametrize("size", [8, 512])
def test_sizes_at_the_bounds(size: int) -> None:
    buffer = FrameBuffer(512)
    buffer.feed(raw(0, 0, bytes(size - 8)))
    assert buffer.next_frame()
    assert not buffer.next_frame()


@pytest.mark.req("X3")
@pytest.mark.parametrize(
    ("doff", "good"), [(0, False), (1, False), (2, True), (4, True), (5, False)]
)
def test_data_offsets_at_the_bounds(doff: int, good: bool) -> None:
    buffer = FrameBuffer(512)
    buffer.feed(struct.pack(">IBBH", 16, doff, 0, 0) + bytes(8))
    if good:
        assert buffer.next_frame()
        assert buffer.end - buffer.body == 16 - 4 * doff
    else:
        with pytest.raises(Fault, match="data offset"):
            buffer.next_frame()


def test_what_is_used_up_is_let_go() -> None:
    buffer = FrameBuffer(512)
    buffer.feed(EMPTY_FRAME * 30)
    while buffer.next_frame():
        pass
    assert buffer.data == b""


# --- reading fast and slow -------------------------------------------------------------------

uints = st.one_of(
    st.just(b"\x43"),
    st.integers(0, 255).map(lambda n: bytes((0x52, n))),
    st.integers(0, 0xFFFFFFFF).map(lambda n: b"\x70" + struct.pack(">I", n)),
)
booleans = st.sampled_from([b"\x41", b"\x42", b"\x56\x00", b"\x56\x01", b"\x56\x02"])
binaries = st.binary(max_size=40).flatmap(
    lambda tag: st.sampled_from(
        [
            bytes((0xA0, len(tag))) + tag,
            b"\xb0" + struct.pack(">I", len(tag)) + tag,
            bytes((0xA0, len(tag) + 3)) + tag,
        ]
    )
)
states = st.sampled_from(
    [
        b"\x00\x53\x24\x45",
        b"\x00\x53\x24\xc0\x01\x00",
        b"\x00\x80" + bytes(7) + b"\x24\x45",
        b"\x00\x53\x26\x45",
        encode_composite(Received(1, 2)),
        encode_composite(rejected("amqp:not-found")),
        b"\x00\x53\x99\x45",
    ]
)
null = st.just(b"\x40")
anything = st.one_of(null, uints, booleans, binaries, states, st.binary(min_size=1, max_size=3))
ubytes = st.sampled_from([b"\x50\x00", b"\x50\x01"])


def fields(*usual: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """So many of *usual* in order as one likes; now and then something else among them."""
    each = [st.one_of(one, one, one, null, anything) for one in usual]
    return st.integers(0, len(usual)).flatmap(lambda n: st.tuples(*each[:n]).map(list))


transfers = fields(
    uints, uints, binaries, uints, booleans, booleans, ubytes, states, booleans, booleans, booleans
)
dispositions = fields(booleans, uints, uints, booleans, states, booleans)


@st.composite
def lists(draw: st.DrawFn, items: st.SearchStrategy[list[bytes]], code: int) -> bytes:
    """A described list, now and then with a count, a size or a surplus that is wrong."""
    found = draw(items) + draw(st.sampled_from([[], [], [], [b"\x40"], [b"\x43", b"\xa1\x01x"]]))
    body = b"".join(found)
    count = len(found) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    size = len(body) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 200]))
    descriptor = draw(
        st.sampled_from(
            [bytes((0, 0x53, code))] * 4
            + [b"\x00\x80" + bytes(7) + bytes((code,)), b"\x00\x53\x16"]
        )
    )
    shape = draw(st.sampled_from(["list8", "list8", "list8", "list32", "list0"]))
    if shape == "list0":
        return descriptor + b"\x45"
    if shape == "list8" and 0 <= size < 255 and 0 <= count < 256:
        return descriptor + bytes((0xC0, size + 1, count)) + body
    return descriptor + b"\xd0" + struct.pack(">II", max(0, size + 4), max(0, count)) + body


def outcome(read: Any) -> object:
    try:
        return read()
    except DecodeError:
        return DecodeError


def slow_transfer(data: bytes, at: int, end: int) -> object:
    reader = Reader(data, at, end, DEFAULT_LIMITS)
    return read_composite(reader, Transfer), reader.at


def slow_disposition(data: bytes, at: int, end: int) -> object:
    return read_composite(Reader(data, at, end, DEFAULT_LIMITS), Disposition)


@pytest.mark.slow
@pytest.mark.req("X3", "T1", "T7")
@given(lists(transfers, 0x14), st.binary(max_size=5), st.binary(max_size=5), st.booleans())
def test_transfers_are_read_fast_as_slow(
    performative: bytes, before: bytes, after: bytes, cut: bool
) -> None:
    data = before + performative + after
    at = len(before)
    # Octets behind the end belong to the next frame.
    end = len(data) - (len(after) if cut else 0)
    fast = outcome(lambda: read_transfer(data, at, end, DEFAULT_LIMITS))
    assert fast == outcome(lambda: slow_transfer(data, at, end))
    for short in range(at, end):
        assert outcome(lambda short=short: read_transfer(data, at, short, DEFAULT_LIMITS)) == (
            outcome(lambda short=short: slow_transfer(data, at, short))
        )


@pytest.mark.slow
@pytest.mark.req("X3", "T1", "T7")
@given(lists(dispositions, 0x15), st.binary(max_size=5), st.binary(max_size=5), st.booleans())
def test_dispositions_are_read_fast_as_slow(
    performative: bytes, before: bytes, after: bytes, cut: bool
) -> None:
    data = before + performative + after
    at = len(before)
    end = len(data) - (len(after) if cut else 0)
    fast = outcome(lambda: read_disposition(data, at, end, DEFAULT_LIMITS))
    assert fast == outcome(lambda: slow_disposition(data, at, end))
    for short in range(at, end):
        assert outcome(lambda short=short: read_disposition(data, at, short, DEFAULT_LIMITS)) == (
            outcome(lambda short=short: slow_disposition(data, at, short))
        )


#: The usual encodings of each field of a transfer and of a disposition, with octets that all differ.
_HANDLES = (b"\x43", b"\x52\x07", b"\x70\x01\x02\x03\x04")
_NUMBERS = (b"\x43", b"\x52\x09", b"\x70\x05\x06\x07\x08", b"\x40")
_FLAGS = (b"\x41", b"\x42", b"\x56\x00", b"\x56\x01", b"\x40")
_TRANSFER = (
    _HANDLES,
    _NUMBERS,
    (b"\xa0\x03tag", b"\xa0\x00", b"\x40"),
    (b"\x43", b"\x52\x0b", b"\x40", b"\x70\x0c\x0d\x0e\x0f"),
    _FLAGS,
    _FLAGS,
)
_DISPOSITION = (_FLAGS[:4], _HANDLES, _NUMBERS, _FLAGS, (b"\x40", b"\x00\x53\x24\x45"))
_SURPLUS = (b"", b"\x40", b"\x40\x40\x42\x42\x40")


def usual(code: int, values: tuple[tuple[bytes, ...], ...], at_least: int) -> Iterator[bytes]:
    """Each usual encoding of a performative, with as few fields as it may have and with more."""
    descriptor = bytes((0, 0x53, code))
    for count in range(at_least, len(values) + 1):
        for chosen in product(*values[:count]):
            for more in _SURPLUS if count == len(values) else _SURPLUS[:1]:
                body = b"".join(chosen) + more
                each = count + len(more)
                yield descriptor + bytes((0xC0, len(body) + 1, each)) + body
                yield descriptor + b"\xd0" + struct.pack(">II", len(body) + 4, each) + body


@pytest.mark.slow
@pytest.mark.req("X3", "T7")
def test_every_usual_transfer_and_disposition_is_read_as_the_composite_says() -> None:
    for data in usual(0x14, _TRANSFER, 1):
        end = 9 + len(data)
        data = bytes(9) + data + b"\x70more"
        expected = outcome(lambda data=data, end=end: slow_transfer(data, 9, end))
        assert read_transfer(data, 9, end, DEFAULT_LIMITS) == expected
        # The payload lies behind a transfer.
        assert read_transfer(data, 9, len(data), DEFAULT_LIMITS) == expected
    for data in usual(0x15, _DISPOSITION, 2):
        end = 9 + len(data)
        data = bytes(9) + data + b"\x70more"
        fast = outcome(lambda data=data, end=end: read_disposition(data, 9, end, DEFAULT_LIMITS))
        assert fast == outcome(lambda data=data, end=end: slow_disposition(data, 9, end))


@pytest.mark.req("X3", "T7")
@pytest.mark.parametrize(
    "octets",
    [
        # A size of 16 MiB and more, and the performatives beside it.
        b"\x00\x53\x14\xd0\x01\x00\x00\x05\x00\x00\x00\x01\x43",
        b"\x00\x53\x13\xc0\x02\x01\x43",
        b"\x00\x53\x15\xc0\x02\x01\x43",
    ],
)
def test_what_is_no_transfer_is_not_read_as_one(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        read_transfer(octets, 0, len(octets), DEFAULT_LIMITS)


def test_a_fault_says_what_it_ends_and_why() -> None:
    for fault, scope in ((connection_fault, "connection"), (session_fault, "session")):
        found = fault("amqp:invalid-field", "words")
        assert (found.scope, found.condition) == (scope, "amqp:invalid-field")


# --- writing -----------------------------------------------------------------------------------

u32 = st.integers(0, 0xFFFFFFFF)
u16 = st.integers(0, 0xFFFF)


def read_frame(octets: bytes, payload: int = 0) -> tuple[int, Any]:
    size, doff, kind, channel = struct.unpack_from(">IBBH", octets)
    assert (size, doff, kind) == (len(octets) + payload, 2, 0)
    reader = Reader(octets, 8)
    performative = read_composite(reader, *PERFORMATIVES)
    assert reader.at == len(octets)
    return channel, performative


@pytest.mark.req("X18")
@given(u16, u32, u32, st.binary(min_size=4, max_size=4), st.booleans(), st.booleans(), u16)
def test_a_first_transfer_says_what_the_composite_says(
    channel: int, handle: int, number: int, tag: bytes, settled: bool, more: bool, size: int
) -> None:
    octets = first_transfer(channel, handle, number, tag, settled, more, size)
    said = Transfer(handle, number, tag, 0, settled, more)
    assert read_frame(octets, size) == (channel, said)
    assert read_frame(any_transfer(channel, said, size), size) == (channel, said)


@pytest.mark.req("X18")
@given(u16, u32, st.booleans(), u16)
def test_a_later_transfer_says_what_the_composite_says(
    channel: int, handle: int, more: bool, size: int
) -> None:
    octets = later_transfer(channel, handle, more, size)
    assert read_frame(octets, size) == (channel, Transfer(handle, more=more))


STATES = [
    None,
    ACCEPTED,
    RELEASED,
    MODIFIED_FAILED,
    Received(3, 4),
    Declared(b"t"),
    TransactionalState(b"t", ACCEPTED),
    rejected("amqp:not-found", "x" * 150),
    rejected("amqp:not-found", "x" * 160),
    rejected("amqp:not-found", "x" * 300),
    Modified(True, True, {f"x-opt-{n}": "y" * 20 for n in range(40)}),
]


@pytest.mark.slow
@pytest.mark.req("X21")
@pytest.mark.parametrize("state", STATES)
@given(u16, st.booleans(), u32, u32, st.booleans())
def test_a_disposition_says_what_the_composite_says(
    state: object, channel: int, role: bool, first: int, last: int, settled: bool
) -> None:
    octets = disposition_frame(channel, role, first, last, settled, state)
    assert read_frame(octets) == (channel, Disposition(role, first, last, settled, state))


@pytest.mark.parametrize("length", range(190, 215))
def test_dispositions_where_their_shape_changes(length: int) -> None:
    state = rejected("c", "d" * (length - 15))
    assert abs(len(encode_state(state)) - length) < 5
    octets = disposition_frame(1, True, 2, 3, True, state)
    assert read_frame(octets) == (1, Disposition(True, 2, 3, True, state))


@pytest.mark.req("X4", "X26")
@pytest.mark.parametrize(
    "error",
    [
        None,
        Error("amqp:not-found", "short", {"key": "value"}),
        Error("amqp:not-found", "\U0001f600" * 4_000),
        Error("amqp:not-found", "words", {"key": "v" * 600}),
        Error("amqp:" + "x" * 600, "words"),
    ],
)
def test_last_words_fit_the_smallest_frame(error: Error | None) -> None:
    for said in (Detach(0xFFFFFFFF, True, error), End(error), Close(error)):
        octets = final_frame(65_535, said, 512)
        assert len(octets) <= 512
        _, found = read_frame(octets)
        assert type(found) is type(said)
        if error is None or len(frame(said)) <= 512:
            assert found == said
            continue
        assert found.error.condition in (error.condition, "amqp:internal-error")
        assert (error.description or "").startswith(found.error.description)
        # The caller's error is as it was.
        assert said.error is error


@pytest.mark.req("X4")
def test_a_condition_is_kept_up_to_128_characters() -> None:
    for length, kept in ((128, True), (129, False)):
        condition = "x" * length
        _, found = read_frame(final_frame(1, Close(Error(condition, "d" * 900)), 512))
        assert found.error.condition == (condition if kept else "amqp:internal-error")
