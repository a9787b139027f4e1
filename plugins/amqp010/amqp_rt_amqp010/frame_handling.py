"""Frames of a connection, passed to its channels within the bounds of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .assembling import Assembler
from .faults import CommandFault, ConnectionFault
from .frames import CONTROL, CONTROL_TRACK, Frame
from .lifecycle import CLOSED, RUNNING, Stage

if TYPE_CHECKING:
    from .engine import Engine


def handle_frames(engine: Engine, data: bytes, now: float) -> None:
    """Handle the frames that *data* completes, until the connection ends, has worked enough for a turn, or has to wait.

    The function is compiled, unlike the engine, whose class extends one of ``amqp_rt``.
    """
    # What the interpreter would look up for each frame is looked up once: the stage changes only while a frame is handled, and
    # the number of channels only with the stage.
    running, closed = RUNNING, CLOSED
    stage, channel_max, work_max = engine.stage, engine.channel_max, engine.work_max
    assembler = engine.assembler
    try:
        for frames, frame in enumerate(engine.reader.feed(data), 1):
            if engine.judge_frame is None or not engine.drops(frame):
                _handle_frame(engine, assembler, frame, channel_max, now, runs=stage is running)
            stage = engine.stage
            if stage is closed or engine.congested:
                break
            if stage is not running:
                channel_max = engine.channel_max
            if frames + engine.spent >= work_max:
                # The rest may be less than a frame; the next call will find out.
                engine.unread = True
            if engine.unread:
                break
    except ConnectionFault as fault:
        engine.fail(fault)


def _handle_frame(
    engine: Engine,
    assembler: Assembler,
    frame: Frame,
    channel_max: int,
    now: float,
    *,
    runs: bool,
) -> None:
    try:
        if not runs and (frame.channel or frame.track != CONTROL_TRACK):
            if engine.stage is Stage.CLOSING:
                return
            # Refused with the first frame: strangers have nothing held but a control.
            raise ConnectionFault("the connection is not open yet")
        if frame.channel >= channel_max:
            raise ConnectionFault(
                f"channel {frame.channel}: channels have numbers below {channel_max}"
            )
        assembly = assembler.receive(frame)
        if assembly is None:
            return
        if assembly.kind == CONTROL:
            engine.on_control(assembly)
        elif runs:
            number = assembly.channel
            channel = engine.channels.get(number)
            if channel is None:
                channel = engine.channel(number)
            else:
                engine.turning[number] = None
            channel.receive_command(assembly, now)
            if channel.is_congested:
                engine.hold_up(number)
        else:
            raise ConnectionFault("a command before the connection is open")
    except CommandFault as fault:
        if engine.stage is not RUNNING or fault.channel is None:
            engine.fail(ConnectionFault(fault.text))
        else:
            engine.channel(fault.channel).fail(fault, now)
    except ConnectionFault as fault:
        engine.fail(fault)
