"""Frames of a connection, passed to its channels within the bounds of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import CommandFault, ConnectionFault
from .frames import CONTROL, CONTROL_TRACK, Frame
from .lifecycle import CLOSED, RUNNING, Stage

if TYPE_CHECKING:
    from .engine import Engine


def handle_frames(engine: Engine, data: bytes, now: float) -> None:
    """Handle the frames that *data* completes, until the connection ends, has worked enough for a turn, or has to wait.

    The function is compiled, unlike the engine, whose class extends one of ``amqp_rt``.
    """
    left = engine.work_max - engine.spent
    engine.spent = 0
    try:
        for frame in engine.reader.feed(data):
            if engine.judge_frame is None or not engine.drops(frame):
                _handle_frame(engine, frame, now)
            left -= 1 + engine.spent
            engine.spent = 0
            if engine.stage is CLOSED or engine.congested:
                break
            if left <= 0:
                # The rest may be less than a frame; the next call will find out.
                engine.unread = True
            if engine.unread:
                break
    except ConnectionFault as fault:
        engine.fail(fault)


def _handle_frame(engine: Engine, frame: Frame, now: float) -> None:
    try:
        if engine.stage is not RUNNING and (frame.channel or frame.track != CONTROL_TRACK):
            if engine.stage is Stage.CLOSING:
                return
            # Refused with the first frame: strangers have nothing held but a control.
            raise ConnectionFault("the connection is not open yet")
        if frame.channel >= engine.channel_max:
            raise ConnectionFault(
                f"channel {frame.channel}: channels have numbers below {engine.channel_max}"
            )
        assembly = engine.assembler.receive(frame)
        if assembly is None:
            return
        if assembly.kind == CONTROL:
            engine.on_control(assembly)
        elif engine.stage is RUNNING:
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
