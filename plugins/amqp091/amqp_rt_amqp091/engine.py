"""Server's engine of 0-9-1: a connection that a client opened (:mod:`amqp_rt.fronts.base`).

Methods of channel 0 (§1.4.1) are handled here, those of channels by the channels. A fault of the
client is answered with its reply code, which ends a channel or the connection (§4.8).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from amqp_rt import __version__
from amqp_rt.fronts import (
    ConnectionFailed,
    Error,
    Event,
    LoginRequested,
    Opened,
    Peer,
    ServerOptions,
    Topology,
)
from amqp_rt.fronts.engines import GatheringEngine, LoginExchange

from . import faults
from . import methods as m
from .channels import Channel
from .codec import Reader, SyntaxFault, read_method
from .connection import CHANNEL_MAX, FRAME_MAX, HEARTBEAT_S, Connection
from .faults import Fault
from .frames import FRAME_MIN_SIZE, METHOD, PROTOCOL_HEADER, Frame
from .lifecycle import CLOSED, TRANSITIONS, Stage, Transitions
from .links import SendingLink
from .outgoing import OutgoingDelivery
from .recent import Recents

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


class Engine(Connection, GatheringEngine[SendingLink, OutgoingDelivery]):
    """A connection that a client opened."""

    transitions: ClassVar[Transitions] = TRANSITIONS

    def __init__(self, options: ServerOptions, recents: Recents, now: float) -> None:
        peer = Peer(address=options.address, protocol="amqp0-9-1")
        super().__init__(options.limits, peer, Stage.HEADER, now)
        self.options = options
        self.topology: Topology | None = None
        self.recents = recents
        #: Consumers that have credit but no room in the output, or in this turn.
        self.thirsty: dict[SendingLink, None] = {}
        #: Messages sent to consumers in this turn.
        self.given = 0
        self.hears_cancel = False
        self._header = b""
        self._names = count(1)
        self._exchange: LoginExchange | None = None
        self._secret: m.ConnectionUpdateSecret | None = None
        self._hears_failure = False
        #: Whether the client has the capability ``connection.blocked``, and whether it was sent
        #: ``connection.blocked``.
        self._hears_blocked = False
        self._blocked = False
        self._open_due = False
        self._channel_max = min(CHANNEL_MAX, max(1, options.limits.channel_max * 32))
        #: Functions that send the confirms of channels.
        self._confirming: dict[Callable[[], None], None] = {}

    # --- --- called by the driver --------------------------------------------------------

    @property
    def notifies(self) -> bool:
        """Whether the next ``take`` may notify endpoints: channels go on, or consumers get room.

        Otherwise the driver takes the output once, and sends it in the same pass of the scheduler.
        """
        return bool(self._open_due or self._scheduled or self.thirsty)

    # --- --- hooks of Connection ---------------------------------------------------------

    def _is_due(self) -> bool:
        return bool(
            self._scheduled or (self.thirsty and self.output_size < self.limits.output_max // 2)
        )

    def _go_on(self) -> None:
        if self._open_due or self._scheduled:
            self._resume_channels()
        if self._working:
            working, self._working = self._working, {}
            for step in working:
                step()

    def _resume_channels(self) -> None:
        """Complete the open if it is due, and resume channels that were held up."""
        if self._open_due:
            self._say_open_ok()
        scheduled, self._scheduled = self._scheduled, {}
        for step in scheduled:
            step()

    def _before_take(self) -> None:
        if self._open_due and self.stage is Stage.RUNNING:
            self._say_open_ok()
        if self._scheduled:
            # Methods that held up channels have their answers. Events that follow are reported by
            # the next call of the driver.
            self._receiving = True
            self._resume_channels()
            self.flush()
            self._receiving = False
        if self._posted or self._confirming:
            self._confirm()
        if not self.thirsty:
            self.given = 0

    def _code_of(self, error: Error) -> int:
        if self._open_due and error.condition == "amqp:not-found":
            # RabbitMQ's reply code for an unknown virtual host.
            return faults.NOT_ALLOWED
        return super()._code_of(error)

    def _on_octets(self, data: bytes) -> bytes:
        return self._on_protocol_header(data) if self.stage is Stage.HEADER else data

    def _ended(self) -> None:
        self._open_due = False
        # Both refer to this connection: a reference cycle would keep it alive.
        self._exchange = None
        topology, self.topology = self.topology, None
        if topology is not None:
            topology.close()
        self.thirsty.clear()
        self._scheduled.clear()
        self._working.clear()

    # --- input ---------------------------------------------------------------------------

    def _on_protocol_header(self, data: bytes) -> bytes:
        """Check the protocol header, the first eight octets; return those after it (§4.2.2)."""
        self._header += data
        if len(self._header) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._header):
            return b""
        if not self._header.startswith(PROTOCOL_HEADER):
            self._output.append(PROTOCOL_HEADER)
            self.output_size += len(PROTOCOL_HEADER)
            self._break("the protocol header is another one", "amqp:connection:framing-error")
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
                    "version": __version__,
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
        """Return the mechanisms to offer.

        Clients that insist on PLAIN may use it where anonymous access is allowed; they are
        anonymous there, with any user and password.
        """
        offered = [*self.options.mechanisms]
        if "PLAIN" in offered:
            offered.append("AMQPLAIN")
        elif "ANONYMOUS" in offered or not self.options.sasl_required:
            offered += ["PLAIN", "AMQPLAIN"]
        return offered

    def _on_new_channel(self, frame: Frame) -> None:
        method = read_method(frame.payload) if frame.type == METHOD else None
        self.context = method
        if not isinstance(method, m.ChannelOpen):
            if isinstance(method, m.ChannelCloseOk | m.ChannelClose):
                # Both sides sent close: answer it; the channel is closed on both sides.
                if isinstance(method, m.ChannelClose):
                    self.write(frame.channel, m.ChannelCloseOk())
                return
            raise Fault(faults.CHANNEL_ERROR, f"channel {frame.channel} is not open")
        if frame.channel > self._channel_max:
            raise Fault(faults.CHANNEL_ERROR, f"channel numbers go up to {self._channel_max} here")
        self.flush()
        self.channels[frame.channel] = Channel(self, frame.channel)
        self.write(frame.channel, m.ChannelOpenOk())

    def _on_method(self, method: m.Method) -> None:
        if isinstance(method, m.ConnectionStartOk):
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
        # Each connection is a container of its own: none can take over links of another.
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
        self._exchange = LoginExchange(self, mechanism)
        self._exchange.refused = refused
        self._ask_login(self._exchange, response)

    def _ask_login(self, exchange: LoginExchange, response: bytes | None) -> None:
        if response is not None and len(response) > self.limits.sasl_response_max:
            exchange.refused = f"a response of more than {self.limits.sasl_response_max} octets"
            response = None
        if self.stage is not Stage.RUNNING:
            self.stage = Stage.LOGIN
        self.report(LoginRequested(exchange.mechanism, response, None, exchange))

    def login_challenged(self, data: bytes) -> list[Event]:
        """Send a challenge of the mechanism."""
        if self.stage is Stage.LOGIN:
            if self._exchange is not None and self._exchange.refused:
                self.login_failed()
                return []
            self.stage = Stage.SECURE
            self.write(0, m.ConnectionSecure(challenge=data))
        return []

    def login_succeeded(self, user: str | None, identity: Any, mechanism: str) -> list[Event]:
        """Accept the login, or the updated secret."""
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
        self._exchange = None
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
        """Refuse the login, or the updated secret; clients see no difference between causes."""
        if self._secret is not None and self.stage is Stage.RUNNING:
            self._secret = None
            self._fail(Fault(faults.NOT_ALLOWED, "the new secret is not accepted"), None)
            return
        if self.stage not in (Stage.LOGIN, Stage.SECURE):
            return
        error = Error("amqp:unauthorized-access", "the login failed")
        if self._hears_failure:
            self.error = error
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
            # Close without a handshake, as §1.4.2.6 demands.
            self._break("the client wants more than it was offered", "amqp:not-allowed")
            return
        self._channel_max = min(self._channel_max, channel_max)
        self._frames.frame_max = self.frame_max_out = min(self._frame_max, frame_max)
        self._heartbeat_s = float(method.heartbeat)
        self.stage = Stage.OPEN

    def _on_open(self, method: m.ConnectionOpen) -> None:
        host = method.virtual_host
        # Clients that mean the default virtual host send "/".
        self.peer.virtual_host = "" if host in ("", "/") else f"vhost:{host}"
        self.stage = Stage.RUNNING
        self._ends_at = inf
        # No frame is handled before the container has accepted the connection to this virtual host.
        self._open_due = self.unread = True
        self.report(Opened(self.peer))

    def _say_open_ok(self) -> None:
        """Send ``open-ok``: the container has accepted the connection."""
        self._open_due = False
        if self.options.topology is not None:
            self.topology = self.options.topology(self.peer, self)
        self.write(0, m.ConnectionOpenOk())

    def _on_update_secret(self, method: m.ConnectionUpdateSecret) -> None:
        if self.peer.mechanism != "PLAIN" or self.peer.user is None:
            raise Fault(faults.NOT_ALLOWED, "only a login by PLAIN has a secret to update")
        self._secret = method
        exchange = LoginExchange(self, "PLAIN")
        response = b"\0" + self.peer.user.encode() + b"\0" + method.new_secret
        self._ask_login(exchange, response)

    # --- --- output ----------------------------------------------------------------------

    def write(self, channel: int, method: m.Method) -> None:
        """Send a method."""
        if self._open_due and not isinstance(method, m.ConnectionOpenOk | m.ConnectionClose):
            self._say_open_ok()
        super().write(channel, method)

    def write_content(
        self, channel: int, method: m.Method, properties: m.BasicProperties, body: bytes
    ) -> None:
        """Send a method with its content."""
        try:
            super().write_content(channel, method, properties, body)
        except ValueError:
            # Headers added on the way exceed a frame: send the message itself without any headers.
            super().write_content(channel, method, replace(properties, headers=None), body)

    def _pour(self) -> None:
        """Start a new turn: offer credit to consumers that waited for room."""
        self.given = 0
        if not self.thirsty or self.output_size >= self.limits.output_max // 2:
            return
        thirsty, self.thirsty = self.thirsty, {}
        for link in thirsty:
            link.offer_credit()

    def write_octets(self, data: bytes) -> None:
        """Send encoded frames."""
        if self.stage is CLOSED:
            return
        if self._open_due:
            self._say_open_ok()
        self.write_data(data)

    # --- --- called by channels ----------------------------------------------------------

    def next_name(self) -> int:
        """Return a number unique to one link of the connection."""
        return next(self._names)

    def confirm_later(self, flush: Callable[[], None]) -> None:
        """Call *flush*, which sends confirms, with the next output."""
        self._confirming[flush] = None
        self._wake()

    def _confirm(self) -> None:
        if self._posted:
            self._posted = False
            if self._hears_blocked and not self._blocked and self.topology is not None:
                self._blocked = self.topology.scarce(self._unblock)
                if self._blocked:
                    self.write(0, m.ConnectionBlocked(reason="low on memory"))
        while self._confirming:
            confirming, self._confirming = self._confirming, {}
            for flush in confirming:
                flush()

    def _unblock(self) -> None:
        self._blocked = False
        if self.stage is Stage.RUNNING:
            self.write(0, m.ConnectionUnblocked())


def _plain_of(response: bytes) -> bytes | None:
    """Convert a response of AMQPLAIN to one of PLAIN; None if it is malformed.

    It is a field table without its length.
    """
    try:
        table = Reader(len(response).to_bytes(4, "big") + response).table()
    except SyntaxFault:
        return None
    user, password = table.get("LOGIN"), table.get("PASSWORD")
    if not isinstance(user, str) or not isinstance(password, str | bytes):
        return None
    secret = password if isinstance(password, bytes) else password.encode()
    return b"\0" + user.encode() + b"\0" + secret
