"""Server's engine of 0-10: a connection that a client opened (:mod:`amqp_rt.fronts.base`).

Controls of class connection are handled here, those of class session, and commands, by the channels. A fault
of framing, or of a control, closes the connection; a fault of a command ends its session.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from amqp_rt import __version__
from amqp_rt.fronts import (
    Closed,
    ConnectionFailed,
    Error,
    Event,
    LoginRequested,
    Opened,
    Peer,
    ServerOptions,
)
from amqp_rt.fronts.engines import GatheringEngine, LoginExchange

from .assembling import Assembler, Assembly
from .channels import Channel
from .codec import read_control, write_control
from .contexts import Thirsty
from .deliveries import OutgoingDelivery
from .faults import CommandFault, ConnectionFault, close_code_of, condition_of, reply_text
from .frames import (
    CONTROL,
    CONTROL_TRACK,
    FRAME_SIZE_MAX,
    FRAME_SIZE_MIN,
    PROTOCOL_HEADER,
    Frame,
    FrameReader,
    control_frames,
)
from .handling import Handler
from .layouts import (
    CloseCode,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionHeartbeat,
    ConnectionOpen,
    ConnectionOpenOk,
    ConnectionSecure,
    ConnectionSecureOk,
    ConnectionStart,
    ConnectionStartOk,
    ConnectionTune,
    ConnectionTuneOk,
    Control,
)
from .lifecycle import TRANSITIONS, Stage
from .limits import CHANNELS_MAX, HEARTBEAT_MAX, LOST_TURN
from .links import SendingLink
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
        #: Why the connection ends; None for a normal close.
        self.error: Error | None = None
        #: Whether the owner has received the event of the end.
        self._error_reported = False
        self._registry = registry
        self._channels: dict[int, Channel] = {}
        self._channel_max = min(CHANNELS_MAX, max(1, limits.channel_max * 32))
        self._frame_max = max(FRAME_SIZE_MIN, min(FRAME_SIZE_MAX, limits.frame_size_max))
        before_open = max(FRAME_SIZE_MIN, min(FRAME_SIZE_MAX, limits.frame_size_before_open))
        self._frames = FrameReader(before_open)
        self._assembler = Assembler(limits.message_size_max)
        self._header = b""
        self._exchange: LoginExchange | None = None
        #: Whether the client has chosen a mechanism that was not offered.
        self._unoffered = False
        self._open_due = False
        self._heartbeat_s = 0.0
        self._heard_at = now
        self._ends_at = now + limits.handshake_s
        #: Whether the output was full at the end of a turn, so that channels may wait for room.
        self._full = False
        #: Numbers of the channels whose turn is due.
        self._turning: dict[int, None] = {}
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
    def sessions(self) -> Mapping[int, Channel]:
        """Channels in use, by number: sessions for containers and brokers."""
        return self._channels

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
        if data and self.stage is Stage.HEADER:
            data = self._on_protocol_header(data)
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
            self._break("the stream ended without a close")
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
                self._break("the connection was not opened in time")
        elif self.stage is Stage.RUNNING and self._heartbeat_s:
            if self.congested:
                # Nothing is read, and so nothing can be heard.
                self._heard_at = now
            if now >= self._heard_at + 2 * self._heartbeat_s:
                # Without a handshake: the peer is gone.
                self._break("nothing was heard for two heartbeats")
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
            turning, self._turning = self._turning, {}
            for number in turning:
                channel = self._channels.get(number)
                if channel is not None:
                    channel.turn(self._now)
                    if channel.is_free:
                        self._channels.pop(number, None)
            self.flush()
            if not self._turning:
                break
        else:
            self.unread = True
        self._full = self._full or self.output_size >= self.limits.output_max
        if self.congested:
            self._relieve()

    def _relieve(self) -> None:
        """Read on once the input of no channel has to wait."""
        for number in list(self._congested):
            channel = self._channels.get(number)
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

    def _on_protocol_header(self, data: bytes) -> bytes:
        """Check the protocol header, the first eight octets; return those after it."""
        self._header += data
        if len(self._header) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._header):
            return b""
        if not self._header.startswith(PROTOCOL_HEADER):
            self.write_data(PROTOCOL_HEADER)
            self._break("the protocol header is another one", "amqp:connection:framing-error")
            return b""
        rest = self._header[len(PROTOCOL_HEADER) :]
        self._header = b""
        self.stage = Stage.START
        # Ours comes before start: clients wait for it.
        self.write_data(PROTOCOL_HEADER)
        self._say(
            ConnectionStart(
                server_properties={
                    "host": self.options.container_id,
                    "product": "amqp-rt",
                    "version": __version__,
                    "platform": "Python",
                    "copyright": "the amqp_rt authors",
                    "information": "a broker for AMQP 1.0, 0-9-1 and 0-10",
                    "cluster-name": self.options.container_id,
                },
                mechanisms=self._mechanisms(),
                locales=["en_US"],
            )
        )
        return rest

    def _on_data(self, data: bytes) -> None:
        if self.congested:
            self._frames.hold(data)
            return
        try:
            left = self.work_max - self.spent
            self.spent = 0
            for frame in self._frames.feed(data):
                self._on_frame(frame)
                left -= 1 + self.spent
                self.spent = 0
                if self.stage is Stage.CLOSED or self.congested:
                    break
                if left <= 0:
                    # The rest may be less than a frame; the next call will find out.
                    self.unread = True
                if self.unread:
                    break
        except ConnectionFault as fault:
            self._fail(fault)

    def _on_frame(self, frame: Frame) -> None:
        try:
            if self.stage is not Stage.RUNNING and (frame.channel or frame.track != CONTROL_TRACK):
                if self.stage is Stage.CLOSING:
                    return
                # Refused with the first frame: strangers have nothing held but a control.
                raise ConnectionFault("the connection is not open yet")
            if frame.channel >= self._channel_max:
                raise ConnectionFault(
                    f"channel {frame.channel}: channels have numbers below {self._channel_max}"
                )
            assembly = self._assembler.receive(frame)
            if assembly is None:
                return
            if assembly.kind == CONTROL:
                self._on_control(assembly)
            elif self.stage is Stage.RUNNING:
                channel = self._channel(assembly.channel)
                channel.receive_command(assembly, self._now)
                if channel.is_congested:
                    self._congested[assembly.channel] = None
                    self.congested = True
            else:
                raise ConnectionFault("a command before the connection is open")
        except CommandFault as fault:
            if self.stage is not Stage.RUNNING or fault.channel is None:
                self._fail(ConnectionFault(fault.text))
            else:
                self._channel(fault.channel).fail(fault, self._now)
        except ConnectionFault as fault:
            self._fail(fault)

    def _channel(self, number: int) -> Channel:
        """Return channel *number*, whose turn comes after this chunk."""
        self._turning[number] = None
        channel = self._channels.get(number)
        if channel is None:
            channel = Channel(self, number, self._registry, self._open_handler)
            self._channels[number] = channel
        return channel

    def _open_handler(self, session: Session) -> Handler:
        options = self.options
        return Handler(session, self.peer, self.limits, options.topology, options.branches)

    def _on_control(self, assembly: Assembly) -> None:
        control = read_control(assembly.content)
        if control.CODE >> 8 != _CONNECTION:
            if self.stage is Stage.RUNNING:
                # What the peer has sent before the control has its effect before it.
                self.flush()
                self._channel(assembly.channel).receive_control(control, self._now)
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
        elif isinstance(control, ConnectionStartOk):
            self._on_start_ok(control)
        elif isinstance(control, ConnectionSecureOk):
            assert self._exchange is not None
            self._ask_login(self._exchange, control.response)
        elif isinstance(control, ConnectionTuneOk):
            self._on_tune_ok(control)
        elif isinstance(control, ConnectionOpen):
            self._on_open(control)

    def _on_close(self, control: ConnectionClose) -> None:
        self.flush()
        self._say(ConnectionCloseOk())
        error = None
        if control.reply_code not in (None, 0, CloseCode.NORMAL):
            error = Error(condition_of(control.reply_code), control.reply_text or "")
        self.error = error
        self._finish(Closed(error))

    # --- login -----------------------------------------------------------------------------

    def _mechanisms(self) -> list[str]:
        """Return the mechanisms to offer.

        Clients that insist on PLAIN may use it where anonymous access is allowed; they are
        anonymous there, with any user and password.
        """
        offered = [*self.options.mechanisms]
        if "PLAIN" not in offered and self._allows_anonymous:
            offered.append("PLAIN")
        return offered

    @property
    def _allows_anonymous(self) -> bool:
        return "ANONYMOUS" in self.options.mechanisms or not self.options.sasl_required

    def _on_start_ok(self, control: ConnectionStartOk) -> None:
        properties = control.client_properties or {}
        self.peer.properties = {name: properties[name] for name in properties}
        # Each connection is a container of its own: none can take over links of another.
        self.peer.container_id = f"amqp010-{self.peer.address}-{id(self):x}"
        mechanism = control.mechanism or ""
        response = control.response
        refused = "" if mechanism in self._mechanisms() else f"{mechanism!r:.50} is not offered"
        self._unoffered = bool(refused)
        if mechanism == "PLAIN" and "PLAIN" not in self.options.mechanisms and not refused:
            if "ANONYMOUS" not in self.options.mechanisms:
                self._let_in(None, None, None)
                return
            mechanism, response = "ANONYMOUS", b""
        self._exchange = LoginExchange(self, mechanism)
        self._exchange.refused = refused
        self._ask_login(self._exchange, response)

    def _ask_login(self, exchange: LoginExchange, response: bytes | None) -> None:
        if response is not None and len(response) > self.limits.sasl_response_max:
            exchange.refused = f"a response of more than {self.limits.sasl_response_max} octets"
            response = None
        self.stage = Stage.LOGIN
        self.report(LoginRequested(exchange.mechanism, response, None, exchange))

    def login_challenged(self, data: bytes) -> list[Event]:
        """Send a challenge of the mechanism."""
        if self.stage is Stage.LOGIN:
            if self._exchange is not None and self._exchange.refused:
                self.login_failed()
                return []
            self.stage = Stage.SECURE
            self._say(ConnectionSecure(challenge=data))
        return []

    def login_succeeded(self, user: str | None, identity: Any, mechanism: str) -> list[Event]:
        """Accept the login as *user*, None for an anonymous one."""
        if self.stage is Stage.LOGIN:
            if self._exchange is not None and self._exchange.refused:
                self.login_failed()
            else:
                self._let_in(user, identity, mechanism)
        return []

    def login_failed(self) -> None:
        """Refuse the login; clients see no difference between causes."""
        if self.stage in (Stage.LOGIN, Stage.SECURE):
            error = Error("amqp:unauthorized-access", "the login failed")
            if self._unoffered:
                # No further data is sent (rule validity of start-ok).
                self.error = error
                self._finish(ConnectionFailed(error))
            else:
                self._fail_with(CloseCode.CONNECTION_FORCED, error)
            self._wake()

    def _let_in(self, user: str | None, identity: Any, mechanism: str | None) -> None:
        self._exchange = None
        self.peer.user = user
        self.peer.identity = identity
        self.peer.mechanism = mechanism
        self.stage = Stage.TUNE
        self._say(
            ConnectionTune(
                channel_max=self._channel_max,
                max_frame_size=self._frame_max,
                heartbeat_min=0,
                heartbeat_max=HEARTBEAT_MAX,
            )
        )

    def _on_tune_ok(self, control: ConnectionTuneOk) -> None:
        # Absent is without a limit of the client's own.
        channel_max = self._channel_max if control.channel_max is None else control.channel_max
        frame_max = self._frame_max if control.max_frame_size is None else control.max_frame_size
        heartbeat_s = control.heartbeat or 0
        if (
            channel_max > self._channel_max
            or frame_max > self._frame_max
            or heartbeat_s > HEARTBEAT_MAX
        ):
            # Without a close handshake, as the rules "upper-limit" of tune-ok demand.
            self._break("the client wants more than it was offered", "amqp:not-allowed")
            return
        if frame_max < FRAME_SIZE_MIN:
            raise ConnectionFault(f"max-frame-size is at least {FRAME_SIZE_MIN}, got {frame_max}")
        # Connection controls use channel 0 in any case.
        self._channel_max = max(1, channel_max)
        self._frame_max = self.frame_max_out = frame_max
        self._frames.frame_max = min(self._frames.frame_max, frame_max)
        self._heartbeat_s = float(heartbeat_s)
        self.stage = Stage.OPEN

    def _on_open(self, control: ConnectionOpen) -> None:
        host = control.virtual_host
        # Clients that mean the default virtual host send nothing or "/".
        self.peer.virtual_host = "" if host in (None, "", "/") else f"vhost:{host}"
        self.stage = Stage.RUNNING
        self._ends_at = inf
        self._frames.frame_max = self._frame_max
        # No frame is handled before the container has accepted the connection to this virtual host.
        self._open_due = self.unread = True
        self.report(Opened(self.peer))

    def _say_open_ok(self) -> None:
        """Send ``open-ok``: the container has accepted the connection."""
        self._open_due = False
        self._say(ConnectionOpenOk(known_hosts=[]))

    # --- output ----------------------------------------------------------------------------

    def _say(self, control: Control) -> None:
        """Send a control of class connection."""
        for each in control_frames(0, write_control(control), self.frame_max_out):
            self.write_data(each)

    def write_frames(self, buffers: list[bytes]) -> None:
        """Queue the frames of one control or command of a channel."""
        if self.over:
            return
        for each in buffers:
            self._output.append(each)
            self.output_size += len(each)
        self._wake()

    def _pour(self) -> None:
        """Start a new turn: offer credit to consumers that waited for room, and replay."""
        self.given = 0
        if not self._has_room:
            return
        if self._full:
            self._full = False
            self._turning.update(dict.fromkeys(self._channels))
        if self.thirsty:
            thirsty, self.thirsty = self.thirsty, {}
            for link in thirsty:
                link.offer_credit()

    # --- --- called by channels and parts --------------------------------------------------

    def request_turn(self, number: int) -> None:
        """Have the turn of channel *number* called before the next output."""
        self._turning[number] = None
        self._wake()

    def count_subscriptions(self) -> int:
        """Return the number of subscriptions of all sessions."""
        return sum(channel.subscription_count for channel in self._channels.values())

    def has_begun(self, number: int) -> bool:
        """Return whether a command of channel *number* has begun to arrive and is incomplete."""
        return self._assembler.has_begun(number)

    def forget(self, number: int) -> None:
        """Drop the incomplete command of channel *number*."""
        self._assembler.forget(number)

    # --- the end ---------------------------------------------------------------------------

    def _fail(self, fault: ConnectionFault) -> None:
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
        self._exchange = None
        self._end_channels()
        self._ends_at = self._now + self.limits.close_grace_s
        self._say(ConnectionClose(reply_code=code, reply_text=reply_text(text)))

    def _break(self, why: str, condition: str = "amqp:connection:forced") -> None:
        """End the connection without a close handshake."""
        self.error = Error(condition, why)
        self._finish(ConnectionFailed(self.error))

    def _finish(self, event: Event) -> None:
        """End the connection: nothing more is sent or handled."""
        if self.finished:
            return
        self.flush()
        self.stage = Stage.CLOSED
        self._exchange = None
        self._end_channels()
        if not self._error_reported:
            self.report(event)

    def _end_channels(self) -> None:
        """End the channels. Their sessions are kept for the time that their clients requested."""
        if not self.over:
            self.over = True
            self._open_due = False
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
        channels, self._channels = self._channels, {}
        for count, (number, channel) in enumerate(channels.items()):
            begun = self._assembler.begun(number)
            if begun is not None:
                channel.salvage(begun)
            channel.lose(self._now, at_once=count < LOST_TURN)
        self.flush()
        if self.congested:
            self.congested = False
            self.unread = True
        self._congested.clear()
        self._turning.clear()
        self._scheduled.clear()
        self._working.clear()
        self._notify_followers()
