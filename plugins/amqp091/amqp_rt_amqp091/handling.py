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
    left = connection.work_max - connection.spent
    for frame in reader.feed(data):
        connection.spent = 0
        connection.context = None
        channel = connection.channels.get(frame.channel)
        try:
            if channel is not None and frame.type != HEARTBEAT and connection.stage is RUNNING:
                channel.on_frame(frame)
            else:
                connection.on_other_frame(frame)
        except FAULTS as error:
            connection.on_fault(channel, error)
        left -= 1 + connection.spent
        if connection.stage is CLOSED:
            break
        if left <= 0:
            # The rest may be less than a frame; the next call will find out.
            connection.unread = True
        if connection.unread:
            break
