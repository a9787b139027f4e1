"""Output of a channel: controls and commands, as frames of its connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .codec import write_control
from .contexts import Connection
from .frames import assembly_frames, control_frames
from .layouts import Control


class ChannelConnection(Connection, Protocol):
    """Connection, as its channels use it."""

    #: Octets of the largest frame to send.
    frame_max_out: int

    @property
    def finished(self) -> bool:
        """Whether nothing more is sent."""

    def write_frames(self, buffers: list[bytes]) -> None:
        """Queue the frames of one control or command."""

    def request_turn(self, number: int) -> None:
        """Have the turn of channel *number* called before the next output."""

    def has_begun(self, number: int) -> bool:
        """Return whether a command of channel *number* has begun to arrive and is incomplete."""

    def forget(self, number: int) -> None:
        """Drop the incomplete command of channel *number*."""


class ChannelTransport:
    """Output of one channel (:class:`~amqp_rt_amqp010.handlers.Transport`).

    Args:
        connection: Its connection.
        number: The channel number.
    """

    def __init__(self, connection: ChannelConnection, number: int) -> None:
        self.connection = connection
        self._number = number

    @property
    def has_room(self) -> bool:
        """Whether more output should be queued."""
        return self.connection.output_size < self.connection.limits.output_max

    @property
    def has_begun(self) -> bool:
        """Whether a command has begun to arrive and is incomplete."""
        return self.connection.has_begun(self._number)

    def send_control(self, control: Control) -> None:
        """Queue *control*."""
        connection = self.connection
        octets = write_control(control)
        connection.write_frames(control_frames(self._number, octets, connection.frame_max_out))

    def send_command(
        self, octets: bytes, header: bytes | None, body: Sequence[bytes] | None
    ) -> None:
        """Queue the frames of a command with its content."""
        connection = self.connection
        connection.write_frames(
            assembly_frames(self._number, octets, header, body, connection.frame_max_out)
        )

    def forget(self) -> None:
        """Drop the command that is incomplete, if any, and the rest of its frames."""
        self.connection.forget(self._number)

    def request_turn(self) -> None:
        """Have the turn of the channel called before the next output."""
        self.connection.request_turn(self._number)
