"""Frames of a WebSocket: vectors, cuts anywhere, and comparison with wsproto."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from c_modules import SANITIZE, compiled_here
from hypothesis import given
from hypothesis import strategies as st
from wsproto.frame_protocol import FrameProtocol, Opcode, ParseFailed, XorMaskerSimple

import amqp_rt
from amqp_rt.limits import KIB, MIB, Limits
from amqp_rt.net import masking
from amqp_rt.net.channels import LayeredChannel
from amqp_rt.net.masking import apply_mask, mask_in_python
from amqp_rt.net.websocket_frames import WebSocketLayer

HELLO = b"Hello"
KEY = bytes.fromhex("37fa213d")
#: No limit is reached.
WIDE = Limits(
    websocket_message_max=1 << 62, websocket_stranger_max=1 << 62, websocket_overhead_max=0
)


def layer(*, client: bool, limits: Limits = WIDE) -> WebSocketLayer:
    return WebSocketLayer(limits, client=client)


def framed(
    first: int, payload: bytes = b"", *, masked: bool, width: int = 0, key: bytes = KEY
) -> bytes:
    """Return a frame whose size is in *width* octets; 0 for as few as it takes."""
    size = len(payload)
    least = 1 if size < 126 else 2 if size < 65_536 else 8
    width = max(width, least)
    second = size if width == 1 else 126 if width == 2 else 127
    head = bytes((first, second | 0x80 * masked))
    head += b"" if width == 1 else size.to_bytes(width, "big")
    return head + (key + XorMaskerSimple(key).process(bytearray(payload)) if masked else payload)


def xored(payload: bytes, key: bytes) -> bytes:
    """Return *payload* masked, as RFC 6455 §5.3 puts it."""
    return bytes(octet ^ key[at % 4] for at, octet in enumerate(payload))


def fed(ours: WebSocketLayer, pieces: Iterable[bytes]) -> tuple[bytes, bytes, str]:
    """Return the payload in *pieces*, the answers to them, and the fault in them."""
    heard = b""
    out: list[bytes | memoryview] = []
    why = ""
    for piece in pieces:
        if not piece or ours.ended:
            continue
        try:
            heard += ours.receive(piece)
        except ConnectionError as error:
            why = str(error)
        out += ours.outgoing()
        if why:
            break
    return heard, b"".join(out), why


def unmasked(frame: bytes) -> bytes:
    """Return a short frame of a client without its mask."""
    assert frame[1] & 0x80
    return bytes((frame[0], frame[1] & 0x7F)) + xored(frame[6:], frame[2:6])


# --- vectors ---------------------------------------------------------------------------------------


@pytest.mark.req("L2")
@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize(
    ("wire", "masked_wire", "heard", "answer"),
    [
        # RFC 6455 §5.7, as binary.
        ("820548656c6c6f", "828537fa213d7f9f4d5158", HELLO, ""),
        ("020348656c 80026c6f", "028337fa213d7f9f4d 808237fa213d5b95", HELLO, ""),
        ("890548656c6c6f", "898537fa213d7f9f4d5158", b"", "8a0548656c6c6f"),
        ("8a0548656c6c6f", "8a8537fa213d7f9f4d5158", b"", ""),
        # A ping within a message.
        (
            "020348656c 8900 80026c6f",
            "028337fa213d7f9f4d 898037fa213d 808237fa213d5b95",
            HELLO,
            "8a00",
        ),
        ("8200 0200 0000 8000", "828037fa213d 028037fa213d 008037fa213d 808037fa213d", b"", ""),
        ("880203e8", "888237fa213d3412", b"", "880203e8"),
        ("8800", "888037fa213d", b"", "8800"),
        ("88040bb86f6b", "888437fa213d3c424e56", b"", "88020bb8"),
    ],
)
def test_what_is_valid_is_read_at_any_cut(
    wire: str, masked_wire: str, heard: bytes, answer: str, client: bool
) -> None:
    said = bytes.fromhex(wire if client else masked_wire)
    for cut in range(len(said)):
        for pieces in ([said[:cut], said[cut:]], [said[at : at + 1] for at in range(len(said))]):
            ours = layer(client=client)
            found, out, why = fed(ours, pieces)
            assert (found, why) == (heard, "")
            assert (unmasked(out) if client and out else out).hex() == answer
            assert ours.ended is (said[0] == 0x88)


FAULTS: list[tuple[str, Callable[[bool], bytes], int]] = [
    *(
        (why, lambda masked, first=first, payload=payload: framed(first, payload, masked=masked), code)  # type: ignore[misc]
        for why, first, payload, code in (
            ("AMQP is binary, not text", 0x81, b"text", 1003),
            ("AMQP is binary, not text", 0x01, b"", 1003),
            *(("a reserved bit is set", 0x82 | bit, b"x", 1002) for bit in (0x10, 0x20, 0x40)),
            *(
                (f"the reserved opcode {code}", 0x80 | code, b"", 1002)
                for code in (*range(3, 8), *range(11, 16))
            ),
            ("begins with a continuation", 0x80, b"x", 1002),
            ("begins with a continuation", 0x00, b"", 1002),
            *(("a control frame is fragmented", code, b"", 1002) for code in (8, 9, 10)),
            *(("a control frame is too large", 0x80 | code, b"x" * 126, 1002) for code in (8, 9, 10)),
            ("no valid code", 0x88, b"\3", 1002),
            *(
                ("no valid code", 0x88, code.to_bytes(2, "big"), 1002)
                for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65_535)
            ),
            ("not UTF-8", 0x88, b"\x03\xe8\xff", 1007),
            ("not UTF-8", 0x88, b"\x03\xe8\xed\xa0\x80", 1007),
        )
    ),
    (
        "a message begins within another",
        lambda masked: framed(0x02, b"a", masked=masked) + framed(0x82, b"b", masked=masked),
        1002,
    ),
    ("the size 125 is in 2 octets", lambda masked: framed(0x82, b"x" * 125, masked=masked, width=2), 1002),
    ("the size 126 is in 8 octets", lambda masked: framed(0x82, b"x" * 126, masked=masked, width=8), 1002),
    (
        "the size 65535 is in 8 octets",
        lambda masked: framed(0x82, b"x" * 65_535, masked=masked, width=8),
        1002,
    ),
    (
        "its highest bit set",
        lambda masked: bytes((0x82, 127 | 0x80 * masked)) + b"\xff" * 12,
        1002,
    ),
    ("masked", lambda masked: framed(0x82, b"x", masked=not masked), 1002),
    ("masked", lambda masked: framed(0x89, b"", masked=not masked), 1002),
]  # fmt: skip


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize(("why", "said", "code"), FAULTS)
def test_what_breaks_a_rule_is_answered_with_its_code(
    why: str, said: Callable[[bool], bytes], code: int, client: bool
) -> None:
    octets = said(not client)
    for pieces in ([octets], [octets[:1], octets[1:2], octets[2:]]):
        ours = layer(client=client)
        assert ours.receive(framed(0x82, b"before", masked=not client)) == b"before"
        heard, out, found = fed(ours, pieces)
        assert heard in (b"", b"a")
        assert found.startswith("WebSocket: ")
        assert why in found
        assert (unmasked(out) if client else out) == b"\x88\x02" + code.to_bytes(2, "big")
        # It stays so, and nothing follows a close.
        with pytest.raises(ConnectionError, match="WebSocket: "):
            ours.receive(framed(0x82, b"after", masked=not client))
        with pytest.raises(ConnectionError, match="has ended"):
            ours.send(b"after")
        ours.end()
        assert not ours.outgoing()


@pytest.mark.req("L2")
@pytest.mark.parametrize("code", [1000, 1003, 1007, 1011, 1014, 3000, 4999])
def test_codes_of_the_peer_are_returned(code: int) -> None:
    ours = layer(client=False)
    said = framed(0x88, code.to_bytes(2, "big") + "gründe".encode(), masked=True)
    assert fed(ours, [said + b"and what follows is ignored"]) == (
        b"",
        b"\x88\x02" + code.to_bytes(2, "big"),
        "",
    )
    assert ours.ended


@pytest.mark.req("L2", "SE18")
def test_of_many_pings_the_last_is_answered() -> None:
    ours = layer(client=False)
    pings = [framed(0x89, b"%d" % at, masked=True) for at in range(1_000)]
    assert fed(ours, [b"".join(pings)]) == (b"", b"\x8a\x03999", "")


@pytest.mark.req("L2", "SE18")
def test_messages_are_counted_before_they_arrive() -> None:
    limits = Limits(websocket_message_max=1_000)
    for sizes, fits in (([1_000, 1_000], True), ([1_001], False), ([1 << 62], False)):
        ours = layer(client=True, limits=limits)
        heads = b"".join(
            b"\x82\x7e" + size.to_bytes(2, "big") + bytes(size)
            if fits
            else b"\x82\x7f" + size.to_bytes(8, "big")
            if size > 65_535
            else b"\x82\x7e" + size.to_bytes(2, "big")
            for size in sizes
        )
        _, out, why = fed(ours, [heads])
        assert why == ("" if fits else "WebSocket: a message is too large")
        assert fits or unmasked(out) == b"\x88\x02\x03\xf1"


@pytest.mark.req("L2", "SE18")
def test_empty_messages_do_not_make_room() -> None:
    """Messages without content bring nothing, and are no reason to accept more of them."""
    ours = layer(client=True, limits=Limits(websocket_stranger_max=1_000))
    for _ in range(500):
        assert ours.receive(b"\x82\x00") == b""
    with pytest.raises(ConnectionError, match="too much has come without a message"):
        ours.receive(b"\x82\x00")


# --- comparison with wsproto -----------------------------------------------------------------------

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([0x82, 0x82, 0x02, 0x00, 0x80, 0x80, 0x89, 0x8A, 0x88, 0x81, 0xC2, 0x09, 0x83]),
        st.one_of(
            st.binary(max_size=140),
            st.sampled_from([b"\x03\xe8", b"\x03\xe8ok", b"\x03\xed", b"\x0b\xb8\xff", b"x" * 65_536]),
        ),
        st.sampled_from([0, 0, 0, 0, 0, 0, 0, 2, 8]),
        st.sampled_from([True, True, True, True, True, True, True, False]),
        st.binary(min_size=4, max_size=4),
    ),
    max_size=6,
)  # fmt: skip


def cut(said: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for size in cuts:
        pieces.append(said[:size])
        said = said[size:]
    return [*pieces, said]


def read_by_wsproto(pieces: list[bytes], *, client: bool) -> tuple[bytes, int]:
    """Return the payload of messages, and the code with which wsproto ends; 1003 for text."""
    theirs = FrameProtocol(client, [])
    heard = b""
    for piece in pieces:
        theirs.receive_bytes(piece)
        try:
            for frame in theirs.received_frames():
                if frame.opcode is Opcode.CLOSE:
                    assert isinstance(frame.payload, tuple)
                    code = int(frame.payload[0])
                    return heard, 0 if code == 1005 else code
                if frame.opcode is Opcode.TEXT:
                    return heard, 1003
                if not frame.opcode.iscontrol():
                    heard += frame.payload  # type: ignore[operator]
        except ParseFailed as error:
            # Ours looks at the opcode before the payload.
            return heard, 1003 if "codec" in str(error) else int(error.code)
    return heard, -1


@pytest.mark.req("L2", "SE18")
@given(frames=FRAMES, cuts=st.lists(st.integers(1, 300), max_size=8), client=st.booleans())
def test_both_read_alike(
    frames: list[tuple[int, bytes, int, bool, bytes]], cuts: list[int], client: bool
) -> None:
    said = b"".join(
        framed(first, payload, masked=client is not right, width=width, key=key)
        for first, payload, width, right, key in frames
    )
    # Whatever was valid until here ends with a fault that takes few octets.
    pieces = cut(said + b"\x80\x00" * 10, cuts)
    expected, code = read_by_wsproto(pieces, client=client)
    ours = layer(client=client)
    heard, out, _ = fed(ours, pieces)
    # Where there is a fault, the payload in its chunk is not passed on.
    assert expected.startswith(heard)
    assert code != -1
    last = FrameProtocol(not client, [])
    last.receive_bytes(out)
    *answers, closing = last.received_frames()
    assert all(each.opcode is Opcode.PONG for each in answers)
    assert closing.opcode is Opcode.CLOSE
    assert isinstance(closing.payload, tuple)
    assert int(closing.payload[0]) == (code or 1005)


@pytest.mark.req("L2")
@given(
    buffers=st.lists(
        st.binary(max_size=300) | st.sampled_from([bytes(65_536), b"y" * 70_000]), max_size=4
    ),
    cuts=st.lists(st.integers(1, 70_000), max_size=5),
    client=st.booleans(),
)
def test_wsproto_reads_what_we_send(buffers: list[bytes], cuts: list[int], client: bool) -> None:
    ours = layer(client=client)
    out: list[bytes | memoryview] = []
    for at, buffer in enumerate(buffers):
        ours.send(buffer if at % 2 else memoryview(buffer))
        if at % 3 == 0:
            out += ours.outgoing()
    ours.end()
    said = b"".join(out + ours.outgoing())
    heard, code = read_by_wsproto(cut(said, cuts), client=not client)
    assert (heard, code) == (b"".join(buffers), 1000)
    mirror = layer(client=not client)
    heard, _, why = fed(mirror, cut(said, cuts))
    assert (heard, why, mirror.ended) == (b"".join(buffers), "", True)


@pytest.mark.req("L2")
def test_messages_are_as_large_as_others_accept_and_as_few_as_possible() -> None:
    ours = layer(client=False)
    ours.send(b"a" * 40)
    ours.send(b"b" * 100_000)
    ours.send(b"")
    ours.send(b"c" * 40)
    assert [len(each) for each in ours.outgoing()] == [10, 40, 65_496, 4, 34_504, 0, 40]
    assert ours.outgoing() == []


@pytest.mark.req("L2", "SE18")
def test_masks_are_new_for_each_frame() -> None:
    ours = layer(client=True)
    keys = set()
    for _ in range(50):
        ours.send(b"x")
        head, _ = ours.outgoing()
        keys.add(bytes(head[2:]))
    assert len(keys) > 45


# --- masks -----------------------------------------------------------------------------------------


def masks() -> list[Any]:
    """Return the functions to compare with the definition: that in Python, and that in C."""
    source = Path(__file__).parents[2] / "amqp_rt" / "net" / "_masking.c"
    built = compiled_here(source) if SANITIZE or apply_mask is mask_in_python else None
    return [mask_in_python, apply_mask if built is None else built.apply_mask]


MASKS = masks()


@pytest.mark.req("L2", "SE18")
@given(
    data=st.binary(max_size=100),
    start=st.integers(0, 120),
    size=st.integers(0, 120),
    key=st.binary(min_size=4, max_size=4),
    phase=st.integers(0, 3),
    view=st.booleans(),
)
def test_masks_are_applied_at_any_place(
    data: bytes, start: int, size: int, key: bytes, phase: int, view: bool
) -> None:
    start = min(start, len(data))
    stop = min(start + size, len(data))
    expected = xored(data[start:stop], key[phase:] + key[:phase])
    for mask in MASKS:
        assert mask(memoryview(data) if view else data, start, stop, key, phase) == expected


@pytest.mark.skipif(MASKS[1] is mask_in_python, reason="there is no C compiler")
@pytest.mark.req("SE18")
@pytest.mark.parametrize(
    ("start", "stop", "key", "phase"),
    [
        (0, 11, b"abcd", 0),
        (-1, 5, b"abcd", 0),
        (5, 4, b"abcd", 0),
        (0, 5, b"abc", 0),
        (0, 5, b"abcde", 0),
        (0, 5, b"abcd", -1),
        (1 << 62, (1 << 62) + 1, b"abcd", 0),
    ],
)
def test_masks_stay_within_their_data(start: int, stop: int, key: bytes, phase: int) -> None:
    with pytest.raises(ValueError, match="a mask has 4 octets"):
        MASKS[1](bytes(10), start, stop, key, phase)


def test_the_compiled_package_masks_in_c() -> None:
    assert (masking.apply_mask is mask_in_python) is not amqp_rt.COMPILED


# --- turns -----------------------------------------------------------------------------------------


class Endless:
    """Channel on which a peer has sent the same octets again and again."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets * (200_000 // len(octets))
        self.asked: list[int] = []

    def recv(self, size: int, /) -> bytes:
        self.asked.append(size)
        data, self.octets = self.octets[:size], self.octets[size:] + self.octets[:size]
        return data

    def send(self, data: Any, /) -> int:
        return len(data)

    def shutdown(self, how: int, /) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


@pytest.mark.req("SE18", "L6")
def test_small_frames_are_read_a_few_at_a_time() -> None:
    """Many frames in one step would keep other connections waiting."""
    small = Endless(framed(0x82, b"x", masked=True))
    channel = LayeredChannel(small, layer(client=False))
    assert len(b"".join(channel.recv(64 * KIB) for _ in range(5))) > 1_000
    assert small.asked == [8 * KIB] * 5
    large = Endless(framed(0x82, b"x" * 65_000, masked=True))
    channel = LayeredChannel(large, layer(client=False, limits=Limits(websocket_stranger_max=MIB)))
    for _ in range(5):
        channel.recv(64 * KIB)
    assert large.asked == [8 * KIB, *[64 * KIB] * 4]
