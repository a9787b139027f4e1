"""Common part of both roles of a connection: octets in, events and octets out (0-9-1 §1.4, §4.2).

Frames and their faults, heartbeats and the close handshakes are handled here. Methods of channel 0,
and channels, are left to the engines: :mod:`.engine` for servers, :mod:`.client_engine` for
clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, ClassVar, Final

from amqp_rt.fronts import (
    AmqpError,
    Closed,
    ConnectionFailed,
    Error,
    Event,
    Limits,
    Peer,
)
from amqp_rt.fronts.engines import BareEngine

from . import faults
from . import methods as m
from .codec import NotImplementedFault, SyntaxFault, read_method
from .contents import BaseChannel
from .faults import SOFT, Fault, condition_of, reply_text
from .frames import (
    FRAME_MIN_SIZE,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    BrokenFrame,
    Frame,
    FrameReader,
    OversizeFrame,
    content_frames,
    method_frame,
)
from .handling import FAULTS, handle_frames
from .lifecycle import CLOSED, RUNNING, Stage, Transitions

log = logging.getLogger("amqp_rt.frames")

#: Highest values proposed or agreed to: number of channels, octets of a frame, seconds between
#: heartbeats.
CHANNEL_MAX: Final = 2047
FRAME_MAX: Final = 131_072
HEARTBEAT_S: Final = 60

#: Stages in which a fault ends the connection without a close, since the login is not complete.
_BEFORE_LOGIN: Final = (Stage.HEADER, Stage.START, Stage.LOGIN, Stage.SECURE)


class Connection(BareEngine):
    """A connection without its stream, in either role.

    Args:
        limits: Bounds on resources that the peer may use.
        peer: The peer, as far as it is known.
        stage: The first stage.
        now: The time, in seconds of the clock that all later calls use.
    """

    transitions: ClassVar[Transitions]

    def __init__(self, limits: Limits, peer: Peer, stage: Stage, now: float) -> None:
        super().__init__(limits, peer, now)
        self.stage = stage
        #: The method being handled, whose class and number a close for its fault has to name.
        self.context: m.Method | None = None
        #: Octets of the largest frame we may send.
        self.frame_max_out = FRAME_MIN_SIZE
        self.channels: dict[int, BaseChannel] = {}
        self._channel_max = CHANNEL_MAX
        self._frame_max = FRAME_MAX
        self._frames = FrameReader(FRAME_MAX)
        self._heartbeat_s = 0.0
        self._heard_at = now
        self._ends_at = now + limits.handshake_s
        #: Why the connection ends; None for a normal close.
        self.error: Error | None = None
        #: Whether the owner has received the event of the end.
        self._error_reported = False

    # --- --- called by the driver --------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the connection is closed and sends nothing more."""
        return self.stage is CLOSED

    @property
    def sessions(self) -> Mapping[int, Any]:
        """Channels by number: sessions for containers and brokers."""
        return self.channels

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called."""
        stage = self.stage
        if stage is CLOSED:
            return inf
        if self._events or self._is_due():
            return self._now
        beat = self._heartbeat_s
        if stage is not RUNNING or not beat:
            return self._ends_at
        heard = self._heard_at + 2 * beat
        said = self._said_at + beat / 2
        return min(heard, said)

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Handle octets from the peer."""
        self._now = now
        if data:
            self._heard_at = now
        if self.stage is CLOSED:
            return []
        self._receiving = True
        unread, self.unread = self.unread, False
        self.spent = 0
        self._go_on()
        if data and self.stage is not RUNNING:
            data = self._on_octets(data)
        if (data or unread) and not self.finished:
            self._on_data(data)
        return self._done()

    def receive_eof(self, now: float) -> list[Event]:
        """Handle the end of the peer's half of the stream."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if self.stage is Stage.CLOSING:
            self._finish(Closed(self.error))
        else:
            self._break("the stream ended without a close")
        return self._done()

    def tick(self, now: float) -> list[Event]:
        """Handle timeouts and heartbeats that are due."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if now >= self._ends_at:
            if self.stage is Stage.CLOSING:
                self._finish(Closed(self.error))
            else:
                log.warning("the connection with %s was not opened in time", self.peer.address)
                self._break("the connection was not opened in time")
        elif self.stage is RUNNING and self._heartbeat_s:
            if now >= self._heard_at + 2 * self._heartbeat_s:
                # Without a handshake: the peer is gone (§4.2.7).
                self._break("nothing was heard for two heartbeats")
            elif now >= self._said_at + self._heartbeat_s / 2:
                self.write_data(HEARTBEAT_FRAME)
        if self.stage is not CLOSED:
            self._resume_channels()
            self._pour()
        return self._done()

    def close(self, error: Error | None = None) -> None:
        """Close the connection, by a close handshake if the stage allows one."""
        if self.finished or self.stage is Stage.CLOSING:
            return
        if self.stage in _BEFORE_LOGIN or self.stage is Stage.TUNE:
            # Close is not allowed yet.
            self._finish(Closed(error))
            self._wake()
            return
        code, text = faults.SUCCESS, "Goodbye"
        if error is not None:
            code = self._code_of(error)
            text = error.description or str(error.condition)
        self._say_close(code, text, None)

    def _code_of(self, error: Error) -> int:
        """Return the reply code that closes the connection for *error*."""
        code = faults.code_of(str(error.condition))
        if code in SOFT and code != faults.ACCESS_REFUSED:
            return faults.CONNECTION_FORCED
        return code

    # --- --- hooks of a role -------------------------------------------------------------

    def _is_due(self) -> bool:
        """Whether ``tick`` has something to do at once."""
        return False

    def _go_on(self) -> None:
        """Resume channels that were held up, and do one turn's share of work that exceeds a turn."""

    def _resume_channels(self) -> None:
        """Resume channels that were held up."""

    def _pour(self) -> None:
        """Offer credit to consumers that waited for room in the output."""

    def _on_octets(self, data: bytes) -> bytes:
        """Handle octets before the connection is open; return those that belong to frames."""
        return data

    def _on_new_channel(self, frame: Frame) -> None:
        """Handle a frame of a channel that is not open."""
        raise NotImplementedError

    def _on_method(self, method: m.Method) -> None:
        """Handle a method of channel 0 that is allowed in this stage."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Clean up after the end of the channels."""

    # --- input ---------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        try:
            handle_frames(self, self._frames, data)
        except BrokenFrame as error:
            # No reply makes sense to such a peer (§4.2.3).
            log.warning("%s: %s", self.peer.address, error)
            self._break(str(error), "amqp:connection:framing-error")
        except OversizeFrame as error:
            self._fail(Fault(faults.FRAME_ERROR, str(error)), None)

    def on_other_frame(self, frame: Frame) -> None:
        """Handle a frame that belongs to no open channel."""
        if frame.type == HEARTBEAT:
            if frame.channel or frame.payload:
                # A fault of the connection: heartbeats belong to no channel.
                self._fail(
                    Fault(faults.FRAME_ERROR, "a heartbeat is on channel 0, and empty"), None
                )
        elif frame.channel == 0:
            self._on_control(frame)
        elif self.stage is Stage.CLOSING:
            pass
        elif self.stage is not RUNNING:
            raise Fault(faults.CHANNEL_ERROR, "the connection is not open yet")
        else:
            self._on_new_channel(frame)

    def on_fault(self, channel: BaseChannel | None, error: Exception) -> None:
        """Answer a fault in a frame of *channel*, or of the connection if it is None."""
        if isinstance(error, Fault):
            fault = error
        elif isinstance(error, SyntaxFault):
            fault = Fault(faults.SYNTAX_ERROR, str(error))
        elif isinstance(error, NotImplementedFault):
            fault = Fault(faults.NOT_IMPLEMENTED, str(error))
        else:
            assert isinstance(error, AmqpError)
            fault = Fault.of(error)
        self.fail(channel, fault, self.context)

    def guard(self, channel: BaseChannel | None, step: Callable[[], None]) -> None:
        """Run *step*, and answer its fault if it raises one."""
        try:
            step()
        except FAULTS as error:
            self.on_fault(channel, error)

    def fail(self, channel: BaseChannel | None, fault: Fault, method: m.Method | None) -> None:
        """Close *channel*, or the connection if the fault demands it (§4.8)."""
        if channel is None or fault.code not in SOFT:
            self._fail(fault, method)
        else:
            self.close_channel(channel, fault, method)

    def close_channel(self, channel: BaseChannel, fault: Fault, method: m.Method | None) -> None:
        """Close *channel* with the reply code of *fault*; *method* caused it."""
        if channel.closing or channel.ended:
            return
        self.flush()
        channel.flush()
        channel.end()
        channel.closing = True
        code = 0 if method is None else method.code
        self.write(
            channel.number,
            m.ChannelClose(
                reply_code=fault.code,
                reply_text=reply_text(fault.code, fault.text),
                class_id=code >> 16,
                method_id=code & 0xFFFF,
            ),
        )

    def _fail(self, fault: Fault, method: m.Method | None) -> None:
        if self.stage is Stage.CLOSING or self.finished:
            return
        log.warning("%s: %s", self.peer.address or "a peer", reply_text(fault.code, fault.text))
        if self.stage in _BEFORE_LOGIN:
            self._break(fault.text, condition_of(fault.code))
            return
        code = fault.code if fault.code not in SOFT else faults.CHANNEL_ERROR
        error = Error(condition_of(code), fault.text)
        self.error = error
        self._say_close(code, fault.text, method)
        self.report(ConnectionFailed(error))
        self._error_reported = True

    def _on_control(self, frame: Frame) -> None:
        if frame.type != METHOD:
            raise Fault(faults.CHANNEL_ERROR, "content does not come on channel 0")
        method = self.context = read_method(frame.payload)
        if type(method) not in self.transitions[self.stage]:
            if self.stage is Stage.CLOSING:
                return
            raise Fault(
                faults.COMMAND_INVALID, f"{method.name} may not come on channel 0, or not now"
            )
        self.flush()
        if isinstance(method, m.ConnectionClose):
            self.write(0, m.ConnectionCloseOk())
            error = None
            if method.reply_code not in (0, faults.SUCCESS):
                error = Error(condition_of(method.reply_code), method.reply_text)
            self.error = error
            self._finish(Closed(error))
        elif isinstance(method, m.ConnectionCloseOk):
            self._finish(Closed(self.error))
        else:
            self._on_method(method)

    # --- output --------------------------------------------------------------------------

    def write(self, channel: int, method: m.Method) -> None:
        """Send a method."""
        if self.finished and not isinstance(method, m.ConnectionCloseOk):
            return
        self.write_data(method_frame(channel, method))

    def write_content(
        self, channel: int, method: m.Method, properties: m.BasicProperties, body: bytes
    ) -> None:
        """Send a method with its content.

        Raises:
            ValueError: The properties do not fit a frame, or cannot be written.
        """
        if self.finished:
            return
        for each in content_frames(channel, method, properties, body, self.frame_max_out):
            self._output.append(each)
            self.output_size += len(each)
        self._wake()

    # --- --- called by channels ----------------------------------------------------------

    def release(self, channel: BaseChannel) -> None:
        """Free the number of *channel*, which is closed on both sides."""
        channel.end()
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]

    # --- --- closing ---------------------------------------------------------------------

    def _say_close(self, code: int, text: str, method: m.Method | None) -> None:
        self.flush()
        self._end_channels()
        self.stage = Stage.CLOSING
        self._ends_at = self._now + self.limits.close_grace_s
        said = 0 if method is None else method.code
        self.write(
            0,
            m.ConnectionClose(
                reply_code=code,
                reply_text=reply_text(code, text),
                class_id=said >> 16,
                method_id=said & 0xFFFF,
            ),
        )

    def _break(self, why: str, condition: str = "amqp:connection:forced") -> None:
        """End the connection without a close handshake."""
        self.error = Error(condition, why)
        self._finish(ConnectionFailed(self.error))

    def _end_channels(self) -> None:
        if self.over:
            return
        self.over = True
        # Channels refer to their connection: with a reference back, it and its buffers would stay
        # in memory until a full collection.
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            channel.end()
        self._ended()
        self._notify_followers()

    def _finish(self, event: Event) -> None:
        """End the connection: nothing more is sent or handled."""
        if self.finished:
            return
        if self._error_reported:
            self.stage = CLOSED
        else:
            self.flush()
            self.stage = CLOSED
            self._end_channels()
            self.report(event)
