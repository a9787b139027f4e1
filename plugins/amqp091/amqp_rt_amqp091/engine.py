"""The server's engine of 0-9-1: octets in, events and octets out (:mod:`amqp_rt.fronts.base`).

It reads frames, knows the connection (§1.4.1) and its channels, and leaves to these what happens on
them. A client's fault is answered with its reply code: it ends a channel, or the connection (§4.8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any, Final

from amqp_rt.fronts import (
    AmqpError,
    Closed,
    ConnectionFailed,
    Error,
    Event,
    LoginRequested,
    Opened,
    Peer,
    ServerOptions,
    Topology,
)

from . import faults
from . import methods as m
from .channels import Channel
from .codec import NotImplementedFault, Reader, SyntaxFault, read_method
from .faults import SOFT, Fault, condition_of, reply_text
from .frames import (
    FRAME_MIN_SIZE,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    PROTOCOL_HEADER,
    BrokenFrame,
    Frame,
    FrameReader,
    OversizeFrame,
    content_frames,
    method_frame,
)
from .lifecycle import TRANSITIONS, Stage
from .links import IncomingDelivery, ReceivingLink, SendingLink

log = logging.getLogger("amqp_rt.frames")

#: What we propose: no client has more channels, larger frames or rarer heartbeats.
CHANNEL_MAX: Final = 2047
FRAME_MAX: Final = 131_072
HEARTBEAT_S: Final = 60

#: Frames that are handled in a row unless somebody says otherwise: as many as there are.
_WORK_MAX: Final = 1 << 30

_CAPABILITIES: Final = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": True,
}


class Exchange:
    """A login that waits for an answer, as the application sees it."""

    def __init__(self, engine: Engine, mechanism: str) -> None:
        self.mechanism = mechanism
        #: Why it can only fail; empty if it may succeed.
        self.refused = ""
        self._engine = engine

    def challenge(self, data: bytes) -> list[Event]:
        """Ask the client for more."""
        return self._engine.login_challenged(data)

    def succeed(
        self, user: str | None, identity: Any = None, data: bytes | None = None
    ) -> list[Event]:
        """Let the client in as *user*."""
        return self._engine.login_succeeded(user, identity, self.mechanism)

    def fail(self) -> None:
        """Refuse the client."""
        self._engine.login_failed()


class Engine:
    """One connection that a client opened."""

    def __init__(self, options: ServerOptions, replies: dict[str, Channel], now: float) -> None:
        self.options = options
        self.limits = options.limits
        self.peer = Peer(address=options.address, protocol="amqp0-9-1")
        self.on_output: Callable[[], None] = _nothing
        #: Frames of one call of ``receive``, and whether the last one has left some.
        self.work_max = _WORK_MAX
        self.unread = False
        self.stage = Stage.HEADER
        #: It is over: nothing happens on its channels any more.
        self.over = False
        self.followers: dict[Any, Callable[[], None]] = {}
        self.channels: dict[int, Channel] = {}
        self.topology: Topology | None = None
        #: Who waits for direct replies, by address; of all connections of the front.
        self.replies = replies
        #: Consumers that have credit and no room.
        self.thirsty: dict[SendingLink, None] = {}
        #: The method that is being done, for what is said when it cannot be.
        self.context: m.Method | None = None
        self.hears_cancel = False
        self.output_size = 0
        self._output: list[bytes] = []
        self._signalled = False
        self._receiving = False
        self._events: list[Event] = []
        self._header = b""
        self._frames = FrameReader(FRAME_MAX)
        self._names = count(1)
        self._exchange: Exchange | None = None
        self._secret: m.ConnectionUpdateSecret | None = None
        self._hears_failure = False
        #: The client wants to know when it had better send nothing, and has been told so.
        self._hears_blocked = False
        self._blocked = False
        self._open_due = False
        self._channel_max = min(CHANNEL_MAX, max(1, options.limits.channel_max * 32))
        self._frame_max = FRAME_MAX
        #: Octets of the frames that we send.
        self.frame_max_out = FRAME_MIN_SIZE
        self._heartbeat_s = 0.0
        self._heard_at = self._said_at = self._now = now
        self._ends_at = now + options.limits.handshake_s
        #: Channels that go on where they were held up.
        self._scheduled: dict[Channel, None] = {}
        self._dirty: dict[Channel, None] = {}
        #: Octets that wait on all channels.
        self._held = 0
        #: Messages of this chunk, by who takes them and the link on which they come.
        self._posts: dict[tuple[int, ReceivingLink], tuple[Any, list[IncomingDelivery]]] = {}
        self._error: Error | None = None
        #: The owner has heard that it is over.
        self._error_reported = False

    # --- what the driver calls -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Nothing more will be said."""
        return self.stage is Stage.CLOSED

    @property
    def sessions(self) -> dict[int, Channel]:
        """The channels: for the rest of the program they are sessions."""
        return self.channels

    @property
    def deadline(self) -> float:
        """When ``tick`` wants to be called."""
        if self.finished:
            return inf
        if (
            self._scheduled
            or self._events
            or (self.thirsty and self.output_size < self.limits.output_max // 2)
        ):
            return self._now
        at = self._ends_at
        if self._heartbeat_s and self.stage is Stage.RUNNING:
            at = min(at, self._heard_at + 2 * self._heartbeat_s)
            at = min(at, self._said_at + self._heartbeat_s / 2)
        return at

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take octets from the client."""
        self._now = now
        if data:
            self._heard_at = now
        if self.finished:
            return []
        self._receiving = True
        unread, self.unread = self.unread, False
        if self._open_due:
            self._say_open_ok()
        self._go_on()
        if self.stage is Stage.HEADER:
            data = self._on_protocol_header(data)
        if (data or unread) and not self.finished:
            self._on_data(data)
        return self._done()

    def receive_eof(self, now: float) -> list[Event]:
        """The client's half of the stream has ended."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if self.stage is Stage.CLOSING:
            self._finish(Closed(self._error))
        else:
            self._finish(
                ConnectionFailed(
                    Error("amqp:connection:forced", "the stream ended without a close")
                )
            )
        return self._done()

    def tick(self, now: float) -> list[Event]:
        """Let time pass."""
        self._now = now
        if self.finished:
            return []
        self._receiving = True
        if now >= self._ends_at:
            if self.stage is Stage.CLOSING:
                self._finish(Closed(self._error))
            else:
                log.warning("%s did not open its connection in time", self.peer.address)
                self._break("the connection was not opened in time")
        elif self.stage is Stage.RUNNING and self._heartbeat_s:
            if now >= self._heard_at + 2 * self._heartbeat_s:
                # Without a handshake: nobody is there (§4.2.7).
                self._break("nothing was heard for two heartbeats")
            elif now >= self._said_at + self._heartbeat_s / 2:
                self._write(HEARTBEAT_FRAME)
        if not self.finished:
            self._go_on()
            self._pour()
        return self._done()

    def take(self) -> list[bytes]:
        """Buffers to send."""
        if self._open_due and self.stage is Stage.RUNNING:
            self._say_open_ok()
        if self._scheduled:
            # Whoever answered is waited for no more. What is to be reported waits for the next call.
            self._receiving = True
            self._go_on()
            self.flush_posts()
            self._receiving = False
        self._flush_dirty()
        output, self._output = self._output, []
        self.output_size = 0
        self._signalled = False
        if output:
            self._said_at = self._now
        return output

    def close(self, error: Error | None = None) -> None:
        """Say close."""
        if self.finished or self.stage is Stage.CLOSING:
            return
        if self.stage in (Stage.HEADER, Stage.START, Stage.LOGIN, Stage.SECURE, Stage.TUNE):
            # No close can be said yet.
            self._finish(Closed(error))
            self._wake()
            return
        code, text = faults.SUCCESS, "Goodbye"
        if error is not None:
            code = faults.code_of(str(error.condition))
            text = error.description or str(error.condition)
            if self._open_due and code == faults.NOT_FOUND:
                # RabbitMQ's code for a virtual host that there is not.
                code = faults.NOT_ALLOWED
            elif code in SOFT and code != faults.ACCESS_REFUSED:
                code = faults.CONNECTION_FORCED
        self._say_close(code, text, None)

    def _done(self) -> list[Event]:
        self.flush_posts()
        self._flush_dirty()
        self._receiving = False
        if self._output and not self._signalled:
            self._wake()
        events, self._events = self._events, []
        return events

    # --- input ---------------------------------------------------------------------------

    def _on_protocol_header(self, data: bytes) -> bytes:
        """The first eight octets; returns what follows them (§4.2.2)."""
        self._header += data
        if len(self._header) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._header):
            return b""
        if not self._header.startswith(PROTOCOL_HEADER):
            self._output.append(PROTOCOL_HEADER)
            self.output_size += len(PROTOCOL_HEADER)
            self._finish(
                ConnectionFailed(
                    Error("amqp:connection:framing-error", "the protocol header is another one")
                )
            )
            return b""
        rest = self._header[len(PROTOCOL_HEADER) :]
        self._header = b""
        self.stage = Stage.START
        self.write(
            0,
            m.ConnectionStart(
                version_major=0,
                version_minor=9,
                server_properties={
                    "product": "amqp-rt",
                    "version": "0.1.0",
                    "platform": "Python",
                    "cluster_name": self.options.container_id,
                    "capabilities": dict(_CAPABILITIES),
                },
                mechanisms=" ".join(self._mechanisms()).encode(),
                locales=b"en_US",
            ),
        )
        return rest

    def _mechanisms(self) -> list[str]:
        """What clients may log in by. Those that insist on PLAIN are let in where anybody is, and are
        nobody there, whatever they say."""
        offered = [*self.options.mechanisms]
        if "PLAIN" in offered:
            offered.append("AMQPLAIN")
        elif "ANONYMOUS" in offered or not self.options.sasl_required:
            offered += ["PLAIN", "AMQPLAIN"]
        return offered

    def _on_data(self, data: bytes) -> None:
        try:
            left = self.work_max
            for frame in self._frames.feed(data):
                self._on_frame(frame)
                left -= 1
                if left <= 0 or self._open_due:
                    # What is left may be no whole frame: then the next call finds that out. Nothing
                    # is done before somebody has looked at who wants to open what.
                    self.unread = True
                if self.finished or self.unread:
                    break
        except BrokenFrame as error:
            # Nothing sensible can be said (§4.2.3).
            log.warning("%s: %s", self.peer.address, error)
            self._break(str(error), "amqp:connection:framing-error")
        except OversizeFrame as error:
            self._fail(Fault(faults.FRAME_ERROR, str(error)), None)

    def _on_frame(self, frame: Frame) -> None:
        self.context = None
        if frame.type == HEARTBEAT:
            if frame.channel or frame.payload:
                self._fail(
                    Fault(faults.FRAME_ERROR, "a heartbeat is on channel 0, and empty"), None
                )
            return
        if frame.channel == 0:
            self.guard(None, lambda: self._on_control(frame))
            return
        if self.stage is Stage.CLOSING:
            return
        if self.stage is not Stage.RUNNING:
            self._fail(Fault(faults.CHANNEL_ERROR, "the connection is not open yet"), None)
            return
        channel = self.channels.get(frame.channel)
        if channel is not None:
            self.guard(channel, lambda: channel.on_frame(frame))
        else:
            self.guard(None, lambda: self._on_new_channel(frame))

    def _on_new_channel(self, frame: Frame) -> None:
        method = read_method(frame.payload) if frame.type == METHOD else None
        self.context = method
        if not isinstance(method, m.ChannelOpen):
            if isinstance(method, m.ChannelCloseOk | m.ChannelClose):
                # Close crossed close: it is answered, and over on both sides.
                if isinstance(method, m.ChannelClose):
                    self.write(frame.channel, m.ChannelCloseOk())
                return
            raise Fault(faults.CHANNEL_ERROR, f"channel {frame.channel} is not open")
        if frame.channel > self._channel_max:
            raise Fault(faults.CHANNEL_ERROR, f"channel numbers go up to {self._channel_max} here")
        self.flush_posts()
        self.channels[frame.channel] = Channel(self, frame.channel)
        self.write(frame.channel, m.ChannelOpenOk())

    def guard(self, channel: Channel | None, step: Callable[[], None]) -> None:
        """Do *step*, and answer the fault if it is one."""
        try:
            step()
        except Fault as fault:
            self.fail(channel, fault, self.context)
        except SyntaxFault as error:
            self.fail(channel, Fault(faults.SYNTAX_ERROR, str(error)), self.context)
        except NotImplementedFault as error:
            self.fail(channel, Fault(faults.NOT_IMPLEMENTED, str(error)), self.context)
        except AmqpError as error:
            self.fail(channel, Fault.of(error), self.context)

    def fail(self, channel: Channel | None, fault: Fault, method: m.Method | None) -> None:
        """End *channel*, or the connection where that is what the fault costs."""
        if channel is None or fault.code not in SOFT:
            self._fail(fault, method)
        else:
            self.close_channel(channel, fault, method)

    def close_channel(self, channel: Channel, fault: Fault, method: m.Method | None) -> None:
        """End *channel*, and say why."""
        if channel.closing or channel.ended:
            return
        self.flush_posts()
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
        log.warning("%s: %s", self.peer.address or "a client", reply_text(fault.code, fault.text))
        if self.stage in (Stage.START, Stage.LOGIN, Stage.SECURE):
            self._break(fault.text, condition_of(fault.code))
            return
        code = fault.code if fault.code not in SOFT else faults.CHANNEL_ERROR
        error = Error(condition_of(code), fault.text)
        self._error = error
        self._say_close(code, fault.text, method)
        self.report(ConnectionFailed(error))
        self._error_reported = True

    # --- channel 0 -----------------------------------------------------------------------

    def _on_control(self, frame: Frame) -> None:
        if frame.type != METHOD:
            raise Fault(faults.CHANNEL_ERROR, "content does not come on channel 0")
        method = self.context = read_method(frame.payload)
        following = TRANSITIONS[self.stage].get(type(method))
        if following is None:
            if self.stage is Stage.CLOSING:
                return
            raise Fault(
                faults.COMMAND_INVALID, f"{method.name} may not come on channel 0, or not now"
            )
        self.flush_posts()
        if isinstance(method, m.ConnectionClose):
            self.write(0, m.ConnectionCloseOk())
            error = None
            if method.reply_code not in (0, faults.SUCCESS):
                error = Error(condition_of(method.reply_code), method.reply_text)
            self._finish(Closed(error))
        elif isinstance(method, m.ConnectionCloseOk):
            self._finish(Closed(self._error))
        elif isinstance(method, m.ConnectionStartOk):
            self._on_start_ok(method)
        elif isinstance(method, m.ConnectionSecureOk):
            assert self._exchange is not None
            self._ask_login(self._exchange, method.response)
        elif isinstance(method, m.ConnectionTuneOk):
            self._on_tune_ok(method)
        elif isinstance(method, m.ConnectionOpen):
            self._on_open(method)
        elif isinstance(method, m.ConnectionUpdateSecret):
            self._on_update_secret(method)

    def _on_start_ok(self, method: m.ConnectionStartOk) -> None:
        properties = method.client_properties
        self.peer.properties = {name: properties[name] for name in properties}
        capabilities = properties.get("capabilities")
        if isinstance(capabilities, dict):
            self.hears_cancel = capabilities.get("consumer_cancel_notify") is True
            self._hears_blocked = capabilities.get("connection.blocked") is True
            self._hears_failure = capabilities.get("authentication_failure_close") is True
        name = properties.get("connection_name")
        # Each connection is a container of its own: nothing of it is taken up by another.
        self.peer.container_id = (
            f"{name if isinstance(name, str) else 'amqp091'}"[:200]
            + f"-{self.peer.address}-{id(self):x}"
        )
        mechanism = method.mechanism
        response: bytes | None = method.response
        refused = "" if mechanism in self._mechanisms() else f"{mechanism!r:.50} is not offered"
        if mechanism == "AMQPLAIN" and not refused:
            mechanism, response = "PLAIN", _plain_of(method.response)
        if mechanism == "PLAIN" and "PLAIN" not in self.options.mechanisms:
            if "ANONYMOUS" in self.options.mechanisms:
                mechanism, response = "ANONYMOUS", b""
            else:
                self._let_in(None, None, None)
                return
        self._exchange = Exchange(self, mechanism)
        self._exchange.refused = refused
        self._ask_login(self._exchange, response)

    def _ask_login(self, exchange: Exchange, response: bytes | None) -> None:
        if response is not None and len(response) > self.limits.sasl_response_max:
            exchange.refused = f"a response of more than {self.limits.sasl_response_max} octets"
            response = None
        if self.stage is not Stage.RUNNING:
            self.stage = Stage.LOGIN
        self.report(LoginRequested(exchange.mechanism, response, None, exchange))

    def login_challenged(self, data: bytes) -> list[Event]:
        """The mechanism asks for more."""
        if self.stage is Stage.LOGIN:
            if self._exchange is not None and self._exchange.refused:
                self.login_failed()
                return []
            self.stage = Stage.SECURE
            self.write(0, m.ConnectionSecure(challenge=data))
        return []

    def login_succeeded(self, user: str | None, identity: Any, mechanism: str) -> list[Event]:
        """The client is who it says."""
        if self._secret is not None and self.stage is Stage.RUNNING:
            self._secret = None
            self.peer.identity = identity
            self.write(0, m.ConnectionUpdateSecretOk())
        elif self.stage is Stage.LOGIN:
            if self._exchange is not None and self._exchange.refused:
                self.login_failed()
                return []
            self._let_in(user, identity, mechanism)
        return []

    def _let_in(self, user: str | None, identity: Any, mechanism: str | None) -> None:
        self.peer.user = user
        self.peer.identity = identity
        self.peer.mechanism = mechanism
        self.stage = Stage.TUNE
        self.write(
            0,
            m.ConnectionTune(
                channel_max=self._channel_max, frame_max=self._frame_max, heartbeat=HEARTBEAT_S
            ),
        )

    def login_failed(self) -> None:
        """The client is nobody that we know; all hear the same, whatever the cause."""
        if self._secret is not None and self.stage is Stage.RUNNING:
            self._secret = None
            self._fail(Fault(faults.NOT_ALLOWED, "the new secret is not accepted"), None)
            return
        if self.stage not in (Stage.LOGIN, Stage.SECURE):
            return
        error = Error("amqp:unauthorized-access", "the login failed")
        if self._hears_failure:
            self._error = error
            self._say_close(
                faults.ACCESS_REFUSED, "Login was refused using the given mechanism", None
            )
            self.report(ConnectionFailed(error))
            self._error_reported = True
        else:
            self._finish(ConnectionFailed(error))
        self._wake()

    def _on_tune_ok(self, method: m.ConnectionTuneOk) -> None:
        channel_max = method.channel_max or 65_535
        frame_max = method.frame_max or FRAME_MAX
        if method.frame_max and method.frame_max < FRAME_MIN_SIZE:
            raise Fault(faults.NOT_ALLOWED, f"frame-max is at least {FRAME_MIN_SIZE}")
        if method.frame_max > self._frame_max or (method.channel_max > self._channel_max):
            # Without a handshake, says the book (§1.4.2.6).
            self._break("the client wants more than it was offered", "amqp:not-allowed")
            return
        self._channel_max = min(self._channel_max, channel_max)
        self._frames.frame_max = self.frame_max_out = min(self._frame_max, frame_max)
        self._heartbeat_s = float(method.heartbeat)
        self.stage = Stage.OPEN

    def _on_open(self, method: m.ConnectionOpen) -> None:
        host = method.virtual_host
        # "/" is what clients say who mean the only one there is.
        self.peer.virtual_host = "" if host in ("", "/") else f"vhost:{host}"
        self.stage = Stage.RUNNING
        self._ends_at = inf
        self._open_due = True
        self.report(Opened(self.peer))

    def _say_open_ok(self) -> None:
        """The container has heard of it, and has nothing against it."""
        self._open_due = False
        if self.options.topology is not None:
            self.topology = self.options.topology(self.peer, self)
        self.write(0, m.ConnectionOpenOk())

    def _on_update_secret(self, method: m.ConnectionUpdateSecret) -> None:
        if self.peer.mechanism != "PLAIN" or self.peer.user is None:
            raise Fault(faults.NOT_ALLOWED, "only a login by PLAIN has a secret to update")
        self._secret = method
        exchange = Exchange(self, "PLAIN")
        response = b"\0" + self.peer.user.encode() + b"\0" + method.new_secret
        self._ask_login(exchange, response)

    # --- output --------------------------------------------------------------------------

    def write(self, channel: int, method: m.Method) -> None:
        """Send a method."""
        if self.finished and not isinstance(method, m.ConnectionCloseOk):
            return
        if self._open_due and not isinstance(method, m.ConnectionOpenOk | m.ConnectionClose):
            self._say_open_ok()
        self._write(method_frame(channel, method))

    def write_content(
        self, channel: int, method: m.Method, properties: m.BasicProperties, body: bytes
    ) -> None:
        """Send a method with its content."""
        if self.finished:
            return
        try:
            frames = content_frames(channel, method, properties, body, self.frame_max_out)
        except ValueError:
            # What others have put into it is more than a frame holds: the message itself is whole.
            properties.headers = None
            frames = content_frames(channel, method, properties, body, self.frame_max_out)
        for each in frames:
            self._output.append(each)
            self.output_size += len(each)
        self._wake()

    def _write(self, data: bytes) -> None:
        self._output.append(data)
        self.output_size += len(data)
        self._wake()

    def _wake(self) -> None:
        if not self._signalled and not self._receiving:
            self._signalled = True
            self.on_output()

    def _go_on(self) -> None:
        """Let channels take what was held up."""
        scheduled, self._scheduled = self._scheduled, {}
        for channel in scheduled:
            channel.go_on()

    def _pour(self) -> None:
        """There is room again for those who had credit and none."""
        if not self.thirsty or self.output_size >= self.limits.output_max // 2:
            return
        thirsty, self.thirsty = self.thirsty, {}
        for link in thirsty:
            link.offer_credit()

    # --- what channels call --------------------------------------------------------------

    def hold(self, size: int) -> None:
        """*size* more octets wait on a channel: of content that is not complete, or of frames behind
        an answer that is not there. All channels together may have so many.

        Raises:
            Fault: They are too many.
        """
        self._held += size
        most = max(self.limits.session_window_bytes, 2 * self.limits.message_size_max)
        if self._held > most:
            raise Fault(
                faults.RESOURCE_ERROR,
                f"the channels have more than {most} octets of what is not complete",
            )

    def let_go(self, size: int) -> None:
        """*size* octets wait no more."""
        self._held -= size

    def report(self, event: Event) -> None:
        """An event for the owner of the connection."""
        self._events.append(event)

    def next_name(self) -> int:
        """A number that no other link of the connection has."""
        return next(self._names)

    def schedule(self, channel: Channel) -> None:
        """Let *channel* go on with what was held up: soon, by ``tick``."""
        self._scheduled[channel] = None
        self._wake()

    def mark_dirty(self, channel: Channel) -> None:
        """*channel* has confirms to say."""
        self._dirty[channel] = None
        self._wake()

    def _flush_dirty(self) -> None:
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for channel in dirty:
                channel.flush()

    def post(self, way: Any, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Hand over a message with the others of this chunk; without a *way* it goes over *link*."""
        key = (id(way), link)
        found = self._posts.get(key)
        if found is None:
            self._posts[key] = (way, [delivery])
        else:
            found[1].append(delivery)

    def flush_posts(self) -> None:
        """Hand over what was published so far, before anything else happens."""
        while self._posts:
            posts, self._posts = self._posts, {}
            for (_, link), (way, deliveries) in posts.items():
                if way is None:
                    link.put(deliveries)
                else:
                    way.deliver(link, deliveries)
            if self._hears_blocked and not self._blocked and self.topology is not None:
                self._blocked = self.topology.scarce(self._unblock)
                if self._blocked:
                    self.write(0, m.ConnectionBlocked(reason="low on memory"))

    def _unblock(self) -> None:
        self._blocked = False
        if self.stage is Stage.RUNNING:
            self.write(0, m.ConnectionUnblocked())

    def drop_replies(self, channel: Channel) -> None:
        """*channel* waits for replies no more."""
        for address in [each for each, other in self.replies.items() if other is channel]:
            del self.replies[address]

    def release(self, channel: Channel) -> None:
        """*channel* is over on both sides: its number is free."""
        channel.end()
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]

    # --- the end -------------------------------------------------------------------------

    def _say_close(self, code: int, text: str, method: m.Method | None) -> None:
        self.flush_posts()
        self._end_channels()
        self._open_due = False
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
        """End without a word."""
        self._finish(ConnectionFailed(Error(condition, why)))

    def _end_channels(self) -> None:
        if self.over:
            return
        self.over = True
        for channel in list(self.channels.values()):
            channel.end()
        if self.topology is not None:
            self.topology.close()
        followers, self.followers = self.followers, {}
        for follower in followers.values():
            follower()

    def _finish(self, event: Event) -> None:
        """Nothing more is said, or heard."""
        if self.finished:
            return
        if self._error_reported:
            self.stage = Stage.CLOSED
        else:
            self.flush_posts()
            self.stage = Stage.CLOSED
            self._end_channels()
            self.report(event)
        self.thirsty.clear()
        self._scheduled.clear()


def _nothing() -> None:
    """Nobody has asked to hear of output."""


def _plain_of(response: bytes) -> bytes | None:
    """AMQPLAIN, a table without its length, as PLAIN says it."""
    try:
        table = Reader(len(response).to_bytes(4, "big") + response).table()
    except SyntaxFault:
        return None
    user, password = table.get("LOGIN"), table.get("PASSWORD")
    if not isinstance(user, str) or not isinstance(password, str | bytes):
        return None
    secret = password if isinstance(password, bytes) else password.encode()
    return b"\0" + user.encode() + b"\0" + secret
