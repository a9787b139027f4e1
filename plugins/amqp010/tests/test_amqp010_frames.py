"""Frames, segments and assemblies: however they are cut, and against peers that break the rules."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterable
from itertools import product

import pytest
from amqp010_targets import frames010
from amqp_rt_amqp010.assembling import Assembler, Assembly
from amqp_rt_amqp010.codec import write_command, write_control
from amqp_rt_amqp010.faults import CommandFault, ConnectionFault
from amqp_rt_amqp010.frames import (
    APART_MIN,
    BODY,
    COMMAND,
    COMMAND_TRACK,
    CONTROL,
    CONTROL_TRACK,
    FIRST_FRAME,
    FIRST_SEGMENT,
    FRAME_SIZE_MAX,
    FRAME_SIZE_MIN,
    HEADER,
    LAST_FRAME,
    LAST_SEGMENT,
    OVERHEAD,
    PROTOCOL_HEADER,
    WHOLE,
    Frame,
    FrameReader,
    assembly_frames,
    control_frames,
)
from amqp_rt_amqp010.layouts import (
    CloseCode,
    ConnectionHeartbeat,
    ErrorCode,
    FileStage,
    MessageFlow,
    MessageTransfer,
    StreamPublish,
)
from amqp_rt_amqp010.limits import ASSEMBLY_COST, CHUNK_COST, SEGMENT_MAX
from hypothesis import given
from hypothesis import strategies as st

TRANSFER = write_command(MessageTransfer(destination="q"))
FLOW = write_command(MessageFlow(destination="d", unit=0, value=1))
HEARTBEAT = write_control(ConnectionHeartbeat())
#: A command that the specification does not have.
UNKNOWN = bytes.fromhex("7701 0100 0000")
BODY_MAX = 1 << 20


def octets(flags: int, kind: int, track: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BBHBBHI", flags, kind, 12 + len(payload), 0, track, channel, 0) + payload


def command(flags: str, kind: int, payload: bytes = b"", channel: int = 1) -> Frame:
    """Return a frame of the command track; *flags* as in the specification: B E b e."""
    bits = {"B": FIRST_SEGMENT, "E": LAST_SEGMENT, "b": FIRST_FRAME, "e": LAST_FRAME}
    return Frame(sum(bits[each] for each in flags), kind, COMMAND_TRACK, channel, payload)


def read(data: bytes, frame_max: int = FRAME_SIZE_MAX) -> list[Frame]:
    return list(FrameReader(frame_max).feed(data))


def join(frames: Iterable[Frame], assembler: Assembler | None = None) -> list[Assembly]:
    assembler = assembler or Assembler(BODY_MAX)
    return [found for each in frames if (found := assembler.receive(each)) is not None]


def content(assembly: Assembly) -> tuple[object, ...]:
    body = None if assembly.body is None else b"".join(assembly.body)
    assert assembly.body_size == len(body or b"")
    return assembly.channel, assembly.kind, assembly.content, assembly.header, body


# --- frames ------------------------------------------------------------------------------------------


def test_the_protocol_header() -> None:
    assert PROTOCOL_HEADER.hex() == "414d51500101000a"


def test_a_frame_in_octets() -> None:
    [buffer] = control_frames(300, HEARTBEAT, FRAME_SIZE_MIN)
    assert buffer.hex(" ", 4) == "0f000010 0000012c 00000000 010a0000"
    assert read(buffer) == [Frame(WHOLE, CONTROL, CONTROL_TRACK, 300, HEARTBEAT)]


@pytest.mark.slow
@given(
    st.lists(
        st.builds(
            Frame,
            st.integers(0, 15),
            st.integers(0, 3),
            st.integers(0, 1),
            st.integers(0, 65535),
            st.binary(max_size=30),
        )
    ),
    st.data(),
)
def test_frames_come_out_however_they_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(octets(*each) for each in sent)
    reader = FrameReader(FRAME_SIZE_MIN)
    found: list[Frame] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == sent
    assert reader.held == 0


def test_frames_that_were_not_taken_come_with_the_next_call() -> None:
    reader = FrameReader(FRAME_SIZE_MIN)
    first, second, third = (octets(WHOLE, 0, 0, number, b"x") for number in (1, 2, 3))
    for found in reader.feed(first + second + third[:4]):
        assert found.channel == 1
        break
    assert reader.held == len(second) + 4
    assert [each.channel for each in reader.feed(third[4:])] == [2, 3]


@pytest.mark.parametrize("frame_max", [OVERHEAD, 8192, FRAME_SIZE_MIN, FRAME_SIZE_MAX])
def test_the_size_field_is_held_against_the_limit(frame_max: int) -> None:
    whole = octets(WHOLE, 0, 0, 0, b"x" * (frame_max - OVERHEAD))
    [found] = read(whole, frame_max)
    assert len(found.payload) == frame_max - OVERHEAD
    for size in {frame_max + 1, 0, OVERHEAD - 1} - {FRAME_SIZE_MAX + 1}:
        reader = FrameReader(frame_max)
        head = struct.pack(">BBHBBHI", WHOLE, 0, size, 0, 0, 0, 0)
        with pytest.raises(ConnectionFault, match=f"a frame of {size} octets") as caught:
            list(reader.feed(head))
        assert caught.value.code == CloseCode.FRAMING_ERROR
        assert reader.held == 0
        assert list(reader.feed(whole)) == []


def test_the_limit_may_change_between_frames() -> None:
    reader = FrameReader(FRAME_SIZE_MIN)
    found = reader.feed(octets(WHOLE, 0, 0, 0, b"") + octets(WHOLE, 3, 1, 1, b"x" * 5000))
    next(found)
    reader.frame_max = 8192
    assert len(next(found).payload) == 5000


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        *((f"{flags:02x}00000c0000000000000000", "reserved bits") for flags in (0x10, 0x40, 0xFF)),
        ("0f04000c0000000000000000", "no segment type 4"),
        ("0fff000c0000000000000000", "no segment type 255"),
        ("0f00000c0002000000000000", "no track 2"),
        ("0f00000c0010000000000000", "reserved octets"),
        ("0f00000c0100000000000000", "reserved octets"),
        ("0f00000c0000000000000001", "reserved octets"),
        ("0f00000c0000000001000000", "reserved octets"),
    ],
)
def test_reserved_bits_are_zero(head: str, complaint: str) -> None:
    with pytest.raises(ConnectionFault, match=complaint) as caught:
        read(bytes.fromhex(head))
    assert caught.value.code == CloseCode.FRAMING_ERROR


def test_each_bit_of_a_header_is_judged() -> None:
    """Of 96 bits, flags, types, sizes, tracks and channels may differ; others may not."""
    good = bytearray(octets(WHOLE, BODY, COMMAND_TRACK, 0, b"xxxx"))
    free = {
        *(0 * 8 + bit for bit in range(4)),  # flags
        *(1 * 8 + bit for bit in range(2)),  # type
        *(2 * 8 + bit for bit in range(8)),  # size, too large for what is there, or smaller
        *(3 * 8 + bit for bit in range(8)),
        5 * 8,  # track
        *(6 * 8 + bit for bit in range(16)),  # channel
    }
    for bit in range(96):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        reader = FrameReader(FRAME_SIZE_MAX)
        try:
            list(reader.feed(bytes(data)))
        except ConnectionFault:
            # A size of 0 plus one bit is below that of a header.
            assert bit not in free or bit == 3 * 8 + 4
        else:
            assert bit in free


# --- assemblies --------------------------------------------------------------------------------------


def test_a_control_between_the_frames_of_a_command() -> None:
    frames = [
        command("Bbe", COMMAND, TRANSFER),
        command("be", HEADER, b"head"),
        command("Eb", BODY, b"on"),
        Frame(WHOLE, CONTROL, CONTROL_TRACK, 1, HEARTBEAT),
        command("BEbe", COMMAND, FLOW, channel=2),
        command("Ee", BODY, b"e"),
    ]
    assert [content(each) for each in join(frames)] == [
        (1, CONTROL, HEARTBEAT, None, None),
        (2, COMMAND, FLOW, None, None),
        (1, COMMAND, TRANSFER, b"head", b"one"),
    ]


@pytest.mark.parametrize(
    ("frames", "header", "body"),
    [
        ([command("BEbe", COMMAND, TRANSFER)], None, None),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", HEADER, b"h")], b"h", None),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", HEADER)], b"", None),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", BODY, b"b")], None, b"b"),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", BODY)], None, b""),
    ],
)
def test_header_and_body_may_be_absent_or_empty(
    frames: list[Frame], header: bytes | None, body: bytes | None
) -> None:
    [found] = join(frames)
    assert content(found) == (1, COMMAND, TRANSFER, header, body)
    assert found.code == MessageTransfer.CODE


def test_bodies_are_left_in_pieces() -> None:
    pieces = [b"a" * 100, b"b" * 50]
    [found] = join(
        [
            command("Bbe", COMMAND, TRANSFER),
            command("Eb", BODY, pieces[0]),
            command("E", BODY),
            command("Ee", BODY, pieces[1]),
        ]
    )
    assert found.body is not None
    assert [id(each) for each in found.body] == [id(each) for each in pieces]


@pytest.mark.parametrize("code", [b"", b"\4"])
def test_a_command_without_a_code_is_left_to_the_codec(code: bytes) -> None:
    [found] = join([command("BEbe", COMMAND, code)])
    assert found.code == -1


def test_an_unknown_command_may_have_content() -> None:
    [found] = join([command("Bbe", COMMAND, UNKNOWN), command("Ebe", BODY, b"x")])
    assert content(found) == (1, COMMAND, UNKNOWN, None, b"x")


@pytest.mark.slow
@pytest.mark.parametrize("frame_max", [13, 40, FRAME_SIZE_MIN, FRAME_SIZE_MAX])
@pytest.mark.parametrize("header", [None, b"", b"h" * 41, b"h" * 60_000])
@pytest.mark.parametrize(
    "body",
    [None, (), (b"",), (b"b" * 10, b"", b"c" * 60), (b"d" * 70_000,), (b"e" * APART_MIN,) * 3],
    ids=["none", "no pieces", "empty", "small", "large", "apart"],
)
def test_what_is_written_is_read(
    frame_max: int, header: bytes | None, body: tuple[bytes, ...] | None
) -> None:
    buffers = assembly_frames(7, TRANSFER, header, body, frame_max)
    frames = read(b"".join(buffers), frame_max)
    assert all(len(each.payload) <= frame_max - OVERHEAD for each in frames)
    [found] = join(frames)
    whole = None if body is None else b"".join(body)
    assert content(found) == (7, COMMAND, TRANSFER, header, whole)


def test_large_bodies_are_written_without_a_copy() -> None:
    small, large = b"s" * 100, b"l" * APART_MIN
    buffers = assembly_frames(1, TRANSFER, b"h", [small, large, small], FRAME_SIZE_MAX)
    assert [each is large for each in buffers] == [False, True, False]
    [joined] = assembly_frames(1, TRANSFER, b"h", [small, b"m" * (APART_MIN - 1)], FRAME_SIZE_MAX)
    assert small in joined
    # What does not fit into a frame is cut, and copied once.
    [joined] = assembly_frames(1, TRANSFER, None, [large], FRAME_SIZE_MIN)
    assert len(joined) == len(TRANSFER) + len(large) + OVERHEAD * 6


def test_a_control_in_several_frames() -> None:
    long = write_control(ConnectionHeartbeat()) + b"x" * 100
    frames = read(b"".join(control_frames(0, long, 50)))
    assert len(frames) == 3
    assert content(*join(frames)) == (0, CONTROL, long, None, None)


def test_segments_of_all_flags_and_types_join_or_fault() -> None:
    """Of three frames with all flags and types, those join that the rules allow."""
    letters = {CONTROL: "o", COMMAND: "c", HEADER: "h", BODY: "b"}
    joined = set()
    for flags in product(range(16), repeat=3):
        for later in product(letters, repeat=2):
            kinds = (COMMAND, *later)
            assembler = Assembler(BODY_MAX)
            try:
                *before, last = [
                    assembler.receive(Frame(bits, kind, COMMAND_TRACK, 1, TRANSFER))
                    for bits, kind in zip(flags, kinds, strict=True)
                ]
            except ConnectionFault:
                continue
            if before == [None, None] and last is not None:
                assert assembler.held == 0
                joined.add(("".join(letters[each] for each in kinds), flags))
    b_big, e_big, b, e = FIRST_SEGMENT, LAST_SEGMENT, FIRST_FRAME, LAST_FRAME
    assert joined == {
        ("ccc", (b_big | e_big | b, b_big | e_big, b_big | e_big | e)),
        *(("cc" + each, (b_big | b, b_big | e, e_big | b | e)) for each in "hb"),
        *(("c" + each * 2, (b_big | b | e, e_big | b, e_big | e)) for each in "hb"),
        ("chb", (b_big | b | e, b | e, e_big | b | e)),
    }


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([command("Ebe", BODY)], "without the first one before"),
        ([command("BE", COMMAND)], "without the first one before"),
        ([command("BEe", COMMAND)], "without the first one before"),
        ([command("BEbe", HEADER)], "type 2 begins an assembly on track 1"),
        ([command("BEbe", CONTROL)], "type 0 begins an assembly on track 1"),
        ([Frame(WHOLE, COMMAND, CONTROL_TRACK, 1, b"")], "type 1 begins an assembly on track 0"),
        ([command("BEb", COMMAND), command("BEbe", COMMAND)], "segment within another"),
        ([command("BEb", COMMAND), command("BEe", BODY)], "frames of one segment that differ"),
        ([command("BEb", COMMAND), command("Ee", COMMAND)], "frames of one segment that differ"),
        ([command("BEb", COMMAND), command("Be", COMMAND)], "frames of one segment that differ"),
        (
            [command("Bbe", COMMAND, TRANSFER), command("BEbe", COMMAND)],
            "assembly within another",
        ),
        (
            [command("Bbe", COMMAND, TRANSFER), command("Ee", HEADER)],
            "without its first frame",
        ),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", COMMAND)], "type 1 follows type 1"),
        ([command("Bbe", COMMAND, TRANSFER), command("Ebe", CONTROL)], "type 0 follows type 1"),
        (
            [
                command("Bbe", COMMAND, TRANSFER),
                command("be", BODY),
                command("Ebe", HEADER),
            ],
            "type 2 follows type 3",
        ),
        (
            [command("Bbe", COMMAND, TRANSFER), command("be", BODY), command("Ebe", BODY)],
            "type 3 follows type 3",
        ),
        (
            [command("Bbe", COMMAND, TRANSFER), command("be", HEADER), command("Ebe", HEADER)],
            "type 2 follows type 2",
        ),
        (
            [Frame(FIRST_SEGMENT | FIRST_FRAME | LAST_FRAME, CONTROL, CONTROL_TRACK, 0, HEARTBEAT)],
            "a control on channel 0 has two segments",
        ),
    ],
)
def test_frames_in_a_wrong_order_end_the_connection(frames: list[Frame], complaint: str) -> None:
    with pytest.raises(ConnectionFault, match=complaint) as caught:
        join(frames)
    assert caught.value.code == CloseCode.FRAMING_ERROR


def refused(
    assembler: Assembler, frames: list[Frame], code: ErrorCode, complaint: str
) -> CommandFault:
    """Receive *frames*, the last one of which is refused."""
    assert join(frames[:-1], assembler) == []
    with pytest.raises(CommandFault, match=complaint) as caught:
        assembler.receive(frames[-1])
    assert (caught.value.code, caught.value.channel) == (code, 1)
    return caught.value


def test_content_where_there_is_none_ends_the_session() -> None:
    assembler = Assembler(BODY_MAX)
    fault = refused(
        assembler,
        [command("Bbe", COMMAND, FLOW)],
        ErrorCode.COMMAND_INVALID,
        "message.flow has no header or body",
    )
    assert (fault.class_code, fault.command_code) == (4, 10)
    # Its rest is dropped, and then there is another.
    assert join([command("be", HEADER, b"h"), command("Ebe", BODY, b"b")], assembler) == []
    assert assembler.held == 0
    assert len(join([command("BEbe", COMMAND, FLOW)], assembler)) == 1


@pytest.mark.parametrize("of", [FileStage(), StreamPublish()], ids=lambda of: of.NAME)
def test_a_required_header_is_required(of: FileStage | StreamPublish) -> None:
    data = write_command(of)
    for frames in (
        [command("BEbe", COMMAND, data)],
        [command("BEb", COMMAND, data[:3]), command("BEe", COMMAND, data[3:])],
        [command("Bbe", COMMAND, data), command("Ebe", BODY, b"x")],
    ):
        assembler = Assembler(BODY_MAX)
        refused(assembler, frames, ErrorCode.COMMAND_INVALID, f"{of.NAME} has no header")
        assert assembler.held == 0
    frames = [command("Bbe", COMMAND, data), command("Ebe", HEADER, b"h")]
    assert len(join(frames)) == 1


def test_a_body_is_bounded_as_it_adds_up() -> None:
    begin = [command("Bbe", COMMAND, TRANSFER), command("be", HEADER, b"h")]
    half = b"x" * 50
    assert len(join([*begin, command("Eb", BODY, half), command("Ee", BODY, half)], Assembler(100))) == 1  # fmt: skip
    assembler = Assembler(100)
    frames = [*begin, command("Eb", BODY, half), command("E", BODY, half), command("E", BODY, b"x")]
    fault = refused(
        assembler, frames, ErrorCode.RESOURCE_LIMIT_EXCEEDED, "a body of more than 100 octets"
    )
    assert (fault.class_code, fault.command_code) == (4, 1)
    # Nothing is held of it, and the rest is read without a second fault.
    assert assembler.held == ASSEMBLY_COST
    assert join([command("E", BODY, half), command("Ee", BODY, half)], assembler) == []
    assert assembler.held == 0
    assert len(join([command("BEbe", COMMAND, FLOW)], assembler)) == 1


def test_a_body_of_one_frame_is_bounded() -> None:
    assembler = Assembler(100)
    frames = [command("Bbe", COMMAND, TRANSFER), command("Ebe", BODY, b"x" * 101)]
    refused(assembler, frames, ErrorCode.RESOURCE_LIMIT_EXCEEDED, "more than 100 octets")
    assert assembler.held == 0


@pytest.mark.parametrize("kind", [COMMAND, HEADER])
def test_commands_and_headers_are_bounded(kind: int) -> None:
    begin = [] if kind == COMMAND else [command("Bbe", COMMAND, TRANSFER)]
    bits = "B" if kind == COMMAND else ""
    data = UNKNOWN.ljust(SEGMENT_MAX, b"x")
    fitting = [command(f"{bits}Eb", kind, data[:99]), command(f"{bits}Ee", kind, data[99:])]
    assert len(join([*begin, *fitting])) == 1
    for frames in (
        [command(f"{bits}Ebe", kind, data + b"x")],
        [command(f"{bits}Eb", kind, data[:9]), command(f"{bits}E", kind, data)],
    ):
        fault = refused(
            Assembler(BODY_MAX),
            [*begin, *frames],
            ErrorCode.RESOURCE_LIMIT_EXCEEDED,
            f"more than {SEGMENT_MAX} octets",
        )
        code = (0x77, 1) if kind == COMMAND else (4, 1)
        assert (fault.class_code, fault.command_code) == code


def test_controls_are_bounded() -> None:
    data = b"x" * SEGMENT_MAX
    assert len(join([Frame(WHOLE, CONTROL, CONTROL_TRACK, 0, data)])) == 1
    for frames in (
        [Frame(WHOLE, CONTROL, CONTROL_TRACK, 0, data + b"x")],
        [Frame(0x0E, CONTROL, CONTROL_TRACK, 0, data), Frame(0x0C, CONTROL, 0, 0, b"x")],
    ):
        with pytest.raises(ConnectionFault, match=f"more than {SEGMENT_MAX}"):
            join(frames)


def test_all_incomplete_commands_are_bounded_together() -> None:
    room = 2 * (ASSEMBLY_COST + CHUNK_COST + 100)
    assembler = Assembler(BODY_MAX, room)
    for channel in (1, 2):
        assembler.receive(command("Bb", COMMAND, b"x" * 100, channel=channel))
    assert assembler.held == room
    with pytest.raises(CommandFault, match=f"more than {room} octets") as caught:
        assembler.receive(command("Bb", COMMAND, b"x" * 2, channel=3))
    assert (caught.value.code, caught.value.channel) == (ErrorCode.RESOURCE_LIMIT_EXCEEDED, 3)
    with pytest.raises(ConnectionFault, match="more than") as ended:
        assembler.receive(Frame(0x0E, CONTROL, CONTROL_TRACK, 1, b"x"))
    assert ended.value.code == CloseCode.CONNECTION_FORCED


def test_empty_frames_are_bounded_by_channels() -> None:
    assembler = Assembler(BODY_MAX, 9 * ASSEMBLY_COST)
    for channel in range(9):
        assembler.receive(command("Bb", COMMAND, channel=channel))
    with pytest.raises(CommandFault, match="more than"):
        assembler.receive(command("Bb", COMMAND, channel=9))


def test_a_forgotten_command_gives_its_memory_back() -> None:
    for rest in ([command("E", BODY, b"x" * 500), command("Ee", BODY, b"y")], []):
        assembler = Assembler(BODY_MAX)
        join([command("Bbe", COMMAND, TRANSFER), command("Eb", BODY, b"x" * 500)], assembler)
        assert assembler.has_begun(1)
        assembler.forget(1)
        assembler.forget(2)
        assert not assembler.has_begun(1)
        assert not assembler.has_begun(2)
        assert assembler.held == ASSEMBLY_COST
        # The peer may finish the command, or begin another in its next session.
        assert join(rest, assembler) == []
        assert len(join([command("BEbe", COMMAND, FLOW)], assembler)) == 1
        assert assembler.held == 0


@pytest.mark.slow
def test_bodies_in_frames_of_one_octet_take_no_more_memory_than_they_count() -> None:
    count = 20_000
    # Payloads as they come from the reader: objects of their own.
    stream = b"".join(octets(LAST_SEGMENT, BODY, COMMAND_TRACK, 1, b"x") for _ in range(count))
    assembler = Assembler(BODY_MAX)
    join([command("Bbe", COMMAND, TRANSFER), command("Eb", BODY, b"x")], assembler)
    frames = FrameReader(FRAME_SIZE_MIN).feed(stream)
    tracemalloc.start()
    try:
        for each in frames:
            assembler.receive(each)
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now <= assembler.held


# --- any octets --------------------------------------------------------------------------------------

FRAMES = st.builds(
    octets,
    st.integers(0, 15) | st.just(WHOLE),
    st.integers(0, 3),
    st.integers(0, 1),
    st.integers(0, 3),
    st.sampled_from([TRANSFER, FLOW, HEARTBEAT, b""]) | st.binary(max_size=120),
)


@pytest.mark.slow
@given(st.lists(FRAMES, max_size=12).map(b"".join) | st.binary(max_size=200))
def test_any_octets_are_frames_or_a_fault(data: bytes) -> None:
    frames010(data)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.none() | st.binary(max_size=60),
            st.none() | st.lists(st.binary(max_size=40), max_size=4),
        ),
        max_size=6,
    ),
    st.integers(13, 60),
    st.randoms(use_true_random=False),
)
def test_assemblies_of_several_channels_interleave(
    sent: list[tuple[int, bytes | None, list[bytes] | None]], frame_max: int, random: object
) -> None:
    queues: dict[int, list[Frame]] = {}
    expected: dict[int, list[tuple[object, ...]]] = {}
    for channel, header, body in sent:
        buffers = assembly_frames(channel, TRANSFER, header, body, frame_max)
        queues.setdefault(channel, []).extend(read(b"".join(buffers), frame_max))
        whole = None if body is None else b"".join(body)
        expected.setdefault(channel, []).append((channel, COMMAND, TRANSFER, header, whole))
    assembler = Assembler(BODY_MAX)
    found: dict[int, list[tuple[object, ...]]] = {}
    while queues:
        channel = random.choice(sorted(queues))  # type: ignore[attr-defined]
        for each in join([queues[channel].pop(0)], assembler):
            found.setdefault(channel, []).append(content(each))
        if not queues[channel]:
            del queues[channel]
    assert found == expected
    assert assembler.held == 0
