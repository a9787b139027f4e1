"""The plug-in for AMQP 0-10 as targets of ``fuzz_targets``: segments, frames with assemblies, an engine at a broker.

Each target also checks a rule that holds for all input: what was read is written and read as the same, an error
is a sentence, no more is held than the limits allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from amqp_rt_amqp010.assembling import Assembler, Assembly
from amqp_rt_amqp010.codec import (
    read_command,
    read_control,
    read_entries,
    read_value,
    write_command,
    write_control,
    write_entries,
    write_value,
)
from amqp_rt_amqp010.faults import CommandFault, ConnectionFault
from amqp_rt_amqp010.frames import CONTROL, Frame, FrameReader, assembly_frames, control_frames
from amqp_rt_amqp010.layouts import MessageTransfer
from amqp_rt_amqp010.limits import ASSEMBLY_COST
from amqp_rt_amqp010.reading import DecodeFault
from hostile010 import Hostile
from subscribers010 import World

#: Bounds of the assemblies: small, so that inputs reach them.
BODY_MAX: Final = 300
PARTIAL_MAX: Final = 4_096
FRAME_MAX: Final = 512


def segments010(data: bytes) -> None:
    """Read one value, control, command and header of AMQP 0-10."""
    try:
        value = write_value(read_value(data))
    except DecodeFault as fault:
        assert str(fault)  # noqa: PT017
    else:
        assert write_value(read_value(value)) == value
    try:
        control = write_control(read_control(data))
    except ConnectionFault as fault:
        assert str(fault)  # noqa: PT017
    else:
        assert write_control(read_control(control)) == control
    try:
        command, sync = read_command(data)
    except CommandFault as fault:
        assert str(fault)  # noqa: PT017
    else:
        octets = write_command(command, sync=sync)
        again, same = read_command(octets)
        assert write_command(again, sync=same) == octets
    try:
        header = write_entries(read_entries(data, MessageTransfer.CODE))
    except CommandFault as fault:
        assert str(fault)  # noqa: PT017
    else:
        assert write_entries(read_entries(header, MessageTransfer.CODE)) == header


def frames010(data: bytes) -> None:
    """Read frames of AMQP 0-10, in chunks, and join them; what is joined is written and joined again."""
    reader = FrameReader(FRAME_MAX)
    assembler = Assembler(BODY_MAX, PARTIAL_MAX)
    size = len(data) % 97 + 1
    try:
        for at in range(0, len(data), size):
            for frame in reader.feed(data[at : at + size]):
                _receive(assembler, frame)
            assert reader.held < FRAME_MAX
    except ConnectionFault as fault:
        assert str(fault)  # noqa: PT017


def _receive(assembler: Assembler, frame: Frame) -> None:
    assembly = None
    try:
        assembly = assembler.receive(frame)
    except CommandFault as fault:
        assert str(fault)  # noqa: PT017
        assert fault.channel == frame.channel  # noqa: PT017
        if frame.channel % 2:
            assembler.forget(frame.channel)
    assert 0 <= assembler.held <= PARTIAL_MAX + ASSEMBLY_COST
    if assembly is not None:
        _again(assembly)


def _again(assembly: Assembly) -> None:
    """Write *assembly* in small frames, and join these."""
    if assembly.kind == CONTROL:
        buffers = control_frames(assembly.channel, assembly.content, 20)
    else:
        buffers = assembly_frames(
            assembly.channel, assembly.content, assembly.header, assembly.body, 20
        )
    reader, assembler = FrameReader(20), Assembler(BODY_MAX)
    found = [
        joined
        for buffer in buffers
        for frame in reader.feed(buffer)
        if (joined := assembler.receive(frame)) is not None
    ]
    assert len(found) == 1
    assert (found[0].content, found[0].header) == (assembly.content, assembly.header)
    body = None if assembly.body is None else b"".join(assembly.body)
    assert (None if found[0].body is None else b"".join(found[0].body)) == body
    assert assembler.held == 0


def engine010(data: bytes) -> None:
    """Give octets to the engine of an open connection with a session, at a broker with a queue."""
    world = World("q")
    world.publish("q", b"x", b"y")
    hostile = Hostile(world)
    hostile.attach(0)
    size = len(data) % 97 + 1
    for at in range(0, len(data), size):
        hostile.feed(data[at : at + size])
    hostile.end()
    if world.host.space().has("q"):
        assert len(world.host.services.branches) or not world.stats("q").acquired


TARGETS: Final[tuple[Callable[[bytes], None], ...]] = (segments010, frames010, engine010)
