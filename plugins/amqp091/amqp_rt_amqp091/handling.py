"""Frames of a connection, passed to its channels within the bounds of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from amqp_rt.fronts import AmqpError

from .codec import NotImplementedFault, SyntaxFault
from .faults import Fault
from .frames import HEARTBEAT, FrameReader
from .lifecycle import CLOSED, RUNNING

if TYPE_CHECKING:
    from .connection import Connection

#: Exceptions that are answered with a reply code.
FAULTS: Final = (Fault, SyntaxFault, NotImplementedFault, AmqpError)


def handle_frames(connection: Connection, reader: FrameReader, data: bytes) -> None:
    """Handle the frames that *data* completes, until the connection ends or has worked enough for a turn.

    The function is compiled, unlike the connection, whose class extends one of ``amqp_rt``.

    Raises:
        BrokenFrame: The octets are no frame.
        OversizeFrame: A frame is larger than agreed.
    """
    # What the interpreter would look up for each frame is looked up once: the stage changes only while a frame is handled, and
    # the channels only with the stage.
    running, closed = RUNNING, CLOSED
    stage, channels, work_max = connection.stage, connection.channels, connection.work_max
    for frames, frame in enumerate(reader.feed(data), 1):
        connection.context = None
        channel = channels.get(frame.channel)
        try:
            if channel is not None and frame.type != HEARTBEAT and stage is running:
                channel.on_frame(frame)
            else:
                connection.on_other_frame(frame)
        except FAULTS as error:
            connection.on_fault(channel, error)
        stage = connection.stage
        if stage is closed:
            break
        if stage is not running:
            channels = connection.channels
        if frames + connection.spent >= work_max:
            # The rest may be less than a frame; the next call will find out.
            connection.unread = True
        if connection.unread:
            break
