"""Server's engine of 0-10: a connection that a client opened (:mod:`amqp_rt.fronts.base`).

Controls of class connection are handled here, those of class session, and commands, by the channels. A fault
of framing, or of a control, closes the connection; a fault of a command ends its session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from amqp_rt.fronts import (
    Closed,
    ConnectionFailed,
    Error,
    Event,
    Opened,
    Peer,
    ServerOptions,
)
from amqp_rt.fronts.engines import GatheringEngine

from .assembling import Assembler, Assembly
from .channels import Channel
from .codec import read_control, write_control
from .contexts import Thirsty
from .deliveries import OutgoingDelivery
from .faults import ConnectionFault, close_code_of, condition_of, reply_text
from .frame_handling import handle_frames
from .frames import FRAME_SIZE_MAX, FRAME_SIZE_MIN, Frame, FrameReader, control_frames
from .handling import Handler
from .layouts import (
    CloseCode,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionHeartbeat,
    ConnectionOpenOk,
    Control,
)
from .lifecycle import TRANSITIONS, Stage
from .limits import CHANNELS_MAX, LOST_TURN
from .links import SendingLink
from .opening import Opening, Terms
from .partial_messages import PartialMessages
from .recent import Recents
from .registry import SessionRegistry
from .sessions import Session
from .staged_files import StagedFiles

log = logging.getLogger("amqp_rt.frames")

#: Class code of the controls of connections.
_CONNECTION: Final = 1
_HEARTBEAT: Final = control_frames(0, write_control(ConnectionHeartbeat()), FRAME_SIZE_MIN)[0]


class Engine(GatheringEngine[SendingLink, OutgoingDelivery]):
    """A connection that a client opened.

    Args:
        options: Those of its listener.
        registry: The sessions of the broker.
        recents: Caches of the front.
        partials: Messages of the front of which some fragments have arrived.
        staged: Files of the front that clients have staged.
        now: The time, in seconds of the clock that all later calls use.
    """

    def __init__(
        self,
        options: ServerOptions,
        registry: SessionRegistry,
        recents: Recents,
        partials: PartialMessages,
        staged: StagedFiles,
        now: float,
    ) -> None:
        limits = options.limits
        peer = Peer(address=options.address, protocol="amqp0-10", enters_by_right=True)
        super().__init__(limits, peer, now)
        self.options = options
        self.stage = Stage.HEADER
        #: Octets of the largest frame to send.
        self.frame_max_out = FRAME_SIZE_MIN
        #: Consumers that have credit but no room in the output, or in this turn.
        self.thirsty: dict[Thirsty, None] = {}
        #: Messages sent to consumers in this turn.
        self.given = 0
        #: Conversions of messages that were made before.
        self.recents = recents
        self.partials = partials
        self.staged = staged
        #: Interceptor that sees each frame first (:meth:`drops`); None for none.
        self.judge_frame: Callable[[Frame, Peer], object] | None = None
        #: Why the connection ends; None for a normal close.
        self.error: Error | None = None
        #: Whether the owner has received the event of the end.
        self._error_reported = False
        self._registry = registry
        self.channels: dict[int, Channel] = {}
        self.channel_max = min(CHANNELS_MAX, max(1, limits.channel_max * 32))
        self._frame_max = max(FRAME_SIZE_MIN, min(FRAME_SIZE_MAX, limits.frame_size_max))
        before_open = max(FRAME_SIZE_MIN, min(FRAME_SIZE_MAX, limits.frame_size_before_open))
        self.reader = FrameReader(before_open)
        self.assembler = Assembler(limits.message_size_max)
        #: None once the connection is open, or has ended.
        self._opening: Opening | None = Opening(
            self, options, Terms(self.channel_max, self._frame_max)
        )
        self._open_due = False
        self._heartbeat_s = 0.0
        self._heard_at = now
        self._ends_at = now + limits.handshake_s
        #: Whether the output was full at the end of a turn, so that channels may wait for room.
        self._full = False
        #: Numbers of the channels whose turn is due.
        self.turning: dict[int, None] = {}
        #: Whether the sessions are still to be detached, at the next call with the time.
        self._detach_due = False
        #: Numbers of the channels whose input should wait. While there are any nothing is read.
        self._congested: dict[int, None] = {}

    # --- --- called by the driver --------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the connection is closed and sends nothing more."""
        return self.stage is Stage.CLOSED

    @property
    def notifies(self) -> bool:
        """Whether the next ``take`` may notify endpoints, or leave something to do soon.

        Otherwise the driver takes the output once, and sends it in the same pass of the scheduler.
        """
        return bool(
            self.turning
            or self.thirsty
            or self._posts
            or self._answered
            or self._scheduled
            or self._open_due
            or self._full
            or self.congested
            or self._detach_due
            or self.output_size >= self.limits.output_max
        )

    @property
    def sessions(self) -> Mapping[int, Channel]:
        """Channels in use, by number: sessions for containers and brokers."""
        return self.channels

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called."""
        if self.finished:
            return inf
        if self._events or self._is_due():
            return self._now
        at = self._ends_at
        if self._heartbeat_s and self.stage is Stage.RUNNING:
            at = min(at, self._heard_at + 2 * self._heartbeat_s)
            at = min(at, self._said_at + self._heartbeat_s / 2)
        return at

    def _is_due(self) -> bool:
        return (
            bool(self._scheduled)
            or self._detach_due
            or bool((self.thirsty or self._full) and self._has_room)
        )

    @property
    def _has_room(self) -> bool:
        return self.output_size < self.limits.output_max // 2

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Handle octets from the peer."""
        self._now = now
        if data:
            self._heard_at = now
        if self.finished:
            return []
        self._receiving = True
        unread, self.unread = self.unread, False
        self.spent = 0
        if self._detach_due:
            self._detach()
        if not self.over:
            self._go_on()
            working, self._working = self._working, {}
            for step in working:
                step()
        if data and self.stage is Stage.HEADER and self._opening is not None:
            data = self._opening.receive_header(data)
        if (data or unread) and not self.finished:
            self._on_data(data)
        return self._done()

    def receive_eof(self, now: float) -> list[Event]:
        """Handle the end of the peer's half of the stream."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if self._detach_due:
            self._detach()
        if self.stage is Stage.CLOSING:
            self._finish(Closed(self.error))
        else:
            self.break_off("the stream ended without a close")
        return self._done()

    def tick(self, now: float) -> list[Event]:
        """Handle timeouts and heartbeats that are due."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if self._detach_due:
            self._detach()
        if now >= self._ends_at:
            if self.stage is Stage.CLOSING:
                self._finish(Closed(self.error))
            else:
                log.warning("connection not opened in time: %s", self.peer.address)
                self.break_off("the connection was not opened in time")
        elif self.stage is Stage.RUNNING and self._heartbeat_s:
            if self.congested:
                # Nothing is read, and so nothing can be heard.
                self._heard_at = now
            if now >= self._heard_at + 2 * self._heartbeat_s:
                # Without a handshake: the peer is gone.
                self.break_off("nothing was heard for two heartbeats")
            elif now >= self._said_at + self._heartbeat_s / 2:
                self.write_data(_HEARTBEAT)
        if not self.over:
            self._go_on()
            self._pour()
        return self._done()

    def close(self, error: Error | None = None) -> None:
        """Close the connection, by a close handshake if the stage allows one."""
        if self.finished or self.stage is Stage.CLOSING:
            return
        if self.stage in (Stage.HEADER, Stage.START, Stage.LOGIN, Stage.SECURE, Stage.TUNE):
            self._finish(Closed(error))
            self._wake()
            return
        if error is None:
            self._say_close(CloseCode.NORMAL, "")
            return
        code = close_code_of(error)
        if code is CloseCode.INVALID_PATH and not self._open_due:
            code = CloseCode.CONNECTION_FORCED
        self._say_close(code, error.description or str(error.condition))

    # --- --- hooks of GatheringEngine -----------------------------------------------------------

    def _before_take(self) -> None:
        if self._open_due and self.stage is Stage.RUNNING:
            self._say_open_ok()
        if not self.over:
            # Events that follow are reported by the next call of the driver.
            self._receiving = True
            self._go_on()
            self.flush()
            self._confirm()
            self._receiving = False
        if not self.thirsty:
            self.given = 0

    def _confirm(self) -> None:
        """Give channels their turns: they send replies, complete commands, and replay."""
        if self.over:
            return
        # Twice: what a turn publishes is completed by the next one. More follows in later turns of others.
        for _ in range(2):
            turning, self.turning = self.turning, {}
            for number in turning:
                channel = self.channels.get(number)
                if channel is not None:
                    channel.turn(self._now)
                    if channel.is_free:
                        self.channels.pop(number, None)
            self.flush()
            if not self.turning:
                break
        else:
            self.unread = True
        self._full = self._full or self.output_size >= self.limits.output_max
        if self.congested:
            self._relieve()

    def _relieve(self) -> None:
        """Read on once the input of no channel has to wait."""
        for number in list(self._congested):
            channel = self.channels.get(number)
            if channel is None or not channel.is_congested:
                del self._congested[number]
        if not self._congested:
            self.congested = False
            self.unread = True
            # Silence since then was ours.
            self._heard_at = self._now

    # --- input -----------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Complete the open if it is due, and take the steps that are due."""
        if self._open_due:
            self._say_open_ok()
        scheduled, self._scheduled = self._scheduled, {}
        for step in scheduled:
            step()

    def _on_data(self, data: bytes) -> None:
        if self.congested:
            self.reader.hold(data)
            return
        handle_frames(self, data, self._now)

    def channel(self, number: int) -> Channel:
        """Return channel *number*, whose turn comes after this chunk."""
        self.turning[number] = None
        channel = self.channels.get(number)
        if channel is None:
            channel = Channel(self, number, self._registry, self._open_handler)
            self.channels[number] = channel
        return channel

    def hold_up(self, number: int) -> None:
        """Read nothing more until the input of channel *number* need not wait."""
        self._congested[number] = None
        self.congested = True

    def drops(self, frame: Frame) -> bool:
        """Return whether an interceptor drops *frame*."""
        return False

    def _open_handler(self, session: Session) -> Handler:
        options = self.options
        return Handler(session, self.peer, self.limits, options.topology, options.branches)

    def on_control(self, assembly: Assembly) -> None:
        """Handle a control of class connection, or pass one of class session to its channel.

        Raises:
            ConnectionFault: The control may not come now.
        """
        control = read_control(assembly.content)
        if control.CODE >> 8 != _CONNECTION:
            if self.stage is Stage.RUNNING:
                # What the peer has sent before the control has its effect before it.
                self.flush()
                self.channel(assembly.channel).receive_control(control, self._now)
            elif self.stage is not Stage.CLOSING:
                raise ConnectionFault(f"{control.NAME} before the connection is open")
            return
        following = TRANSITIONS[self.stage].get(type(control))
        if following is None or assembly.channel:
            if self.stage is Stage.CLOSING:
                return
            raise ConnectionFault(
                f"{control.NAME} may not come on channel {assembly.channel}, or not now"
            )
        if isinstance(control, ConnectionClose):
            self._on_close(control)
        elif isinstance(control, ConnectionCloseOk):
            self._finish(Closed(self.error))
        elif self._opening is not None:
            self._opening.receive_control(control)

    def _on_close(self, control: ConnectionClose) -> None:
        self.flush()
        self.say(ConnectionCloseOk())
        error = None
        if control.reply_code not in (None, 0, CloseCode.NORMAL):
            error = Error(condition_of(control.reply_code), control.reply_text or "")
        self.error = error
        self._finish(Closed(error))

    # --- called by the opening -------------------------------------------------------------

    def begin(self, terms: Terms) -> None:
        """Keep to *terms*, on which client and server agree."""
        self.channel_max = terms.channel_max
        self._frame_max = self.frame_max_out = terms.frame_max
        self.reader.frame_max = min(self.reader.frame_max, terms.frame_max)
        self._heartbeat_s = float(terms.heartbeat_s)

    def open(self) -> None:
        """Ask the container to accept the connection to its virtual host; handle no frame before that."""
        self._opening = None
        self.stage = Stage.RUNNING
        self._ends_at = inf
        self.reader.frame_max = self._frame_max
        self._open_due = self.unread = True
        self.report(Opened(self.peer))

    def refuse(self, error: Error, *, silently: bool) -> None:
        """End the connection for *error*, without a close handshake if *silently*."""
        if silently:
            self.error = error
            self._finish(ConnectionFailed(error))
        else:
            self._fail_with(CloseCode.CONNECTION_FORCED, error)
        self._wake()

    def break_off(self, why: str, condition: str = "amqp:connection:forced") -> None:
        """End the connection without a close handshake."""
        self.error = Error(condition, why)
        self._finish(ConnectionFailed(self.error))

    def say(self, control: Control) -> None:
        """Send a control of class connection."""
        for each in control_frames(0, write_control(control), self.frame_max_out):
            self.write_data(each)

    def _say_open_ok(self) -> None:
        """Send ``open-ok``: the container has accepted the connection."""
        self._open_due = False
        self.say(ConnectionOpenOk(known_hosts=[]))

    # --- output ----------------------------------------------------------------------------

    def write_frames(self, buffers: list[bytes]) -> None:
        """Queue the frames of one control or command of a channel."""
        if self.over:
            return
        self._output += buffers
        self.output_size += sum(map(len, buffers))
        if not self._receiving:
            self._wake()

    def _pour(self) -> None:
        """Start a new turn: offer credit to consumers that waited for room, and replay."""
        self.given = 0
        if not self._has_room:
            return
        if self._full:
            self._full = False
            self.turning.update(dict.fromkeys(self.channels))
        if self.thirsty:
            thirsty, self.thirsty = self.thirsty, {}
            for link in thirsty:
                link.offer_credit()

    # --- --- called by channels and parts --------------------------------------------------

    def request_turn(self, number: int) -> None:
        """Have the turn of channel *number* called before the next output."""
        self.turning[number] = None
        self._wake()

    def count_subscriptions(self) -> int:
        """Return the number of subscriptions of all sessions."""
        return sum(channel.subscription_count for channel in self.channels.values())

    def has_begun(self, number: int) -> bool:
        """Return whether a command of channel *number* has begun to arrive and is incomplete."""
        return self.assembler.has_begun(number)

    def forget(self, number: int) -> None:
        """Drop the incomplete command of channel *number*."""
        self.assembler.forget(number)

    # --- the end ---------------------------------------------------------------------------

    def fail(self, fault: ConnectionFault) -> None:
        """Close the connection for *fault* of the peer."""
        if self.stage is Stage.CLOSING or self.finished:
            return
        log.warning("connection closed: %s: %s", self.peer.address or "a peer", fault.text)
        self._fail_with(fault.code, Error(condition_of(fault.code), fault.text))

    def _fail_with(self, code: CloseCode, error: Error) -> None:
        self.error = error
        self._say_close(code, error.description or "")
        self.report(ConnectionFailed(error))
        self._error_reported = True

    def _say_close(self, code: CloseCode, text: str) -> None:
        self.flush()
        self.stage = Stage.CLOSING
        self._opening = None
        self._end_channels()
        self._ends_at = self._now + self.limits.close_grace_s
        self.say(ConnectionClose(reply_code=code, reply_text=reply_text(text)))

    def _finish(self, event: Event) -> None:
        """End the connection: nothing more is sent or handled."""
        if self.finished:
            return
        self.flush()
        self.stage = Stage.CLOSED
        self._opening = None
        self._end_channels()
        if not self._error_reported:
            self.report(event)

    def _end_channels(self) -> None:
        """End the channels. Their sessions are kept for the time that their clients requested."""
        if not self.over:
            self.over = True
            self._open_due = self._full = False
            self.thirsty.clear()
            self._detach_due = True
        # Sessions are kept for a time from now on: the time has to be that of this call.
        if self._receiving or self.finished:
            self._detach()

    def _detach(self) -> None:
        if not self._detach_due:
            return
        self._detach_due = False
        # Channels refer to their connection: with a reference back, it and its buffers would stay
        # in memory until a full collection.
        channels, self.channels = self.channels, {}
        for count, (number, channel) in enumerate(channels.items()):
            begun = self.assembler.begun(number)
            if begun is not None:
                channel.salvage(begun)
            channel.lose(self._now, at_once=count < LOST_TURN)
        self.flush()
        if self.congested:
            self.congested = False
            self.unread = True
        self._congested.clear()
        # A queue may have sent since the connection ended: the links did not know of it.
        self.thirsty.clear()
        self.turning.clear()
        self._scheduled.clear()
        self._working.clear()
        self._notify_followers()
