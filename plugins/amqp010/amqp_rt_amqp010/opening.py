"""Opening of a connection: protocol header, login, limits, virtual host."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from amqp_rt import __version__
from amqp_rt.fronts import Error, Event, Limits, LoginRequested, Peer, ServerOptions
from amqp_rt.fronts.engines import LoginExchange

from .faults import ConnectionFault
from .frames import FRAME_SIZE_MIN, PROTOCOL_HEADER
from .layouts import (
    ConnectionOpen,
    ConnectionSecure,
    ConnectionSecureOk,
    ConnectionStart,
    ConnectionStartOk,
    ConnectionTune,
    ConnectionTuneOk,
    Control,
)
from .lifecycle import Stage
from .limits import HEARTBEAT_MAX


class Terms(NamedTuple):
    """Bounds that server and client agree on."""

    #: Number of channels.
    channel_max: int
    #: Octets of a frame.
    frame_max: int
    #: Seconds between heartbeats; 0 for none.
    heartbeat_s: int = 0


class OpeningConnection(Protocol):
    """Connection that is being opened."""

    #: The input that is expected next.
    stage: Stage

    @property
    def peer(self) -> Peer: ...

    @property
    def limits(self) -> Limits: ...

    def write_data(self, data: bytes) -> None:
        """Queue octets."""

    def say(self, control: Control) -> None:
        """Send a control of class connection."""

    def report(self, event: Event) -> None:
        """Queue an event for the owner of the connection."""

    def begin(self, terms: Terms) -> None:
        """Keep to *terms* from now on."""

    def open(self) -> None:
        """Ask the owner to accept the connection; handle no frame before that."""

    def refuse(self, error: Error, *, silently: bool) -> None:
        """End the connection, without a close handshake if *silently*."""

    def break_off(self, why: str, condition: str) -> None:
        """End the connection without a close handshake."""


class Opening:
    """Opening of one connection, which drops it once it is open, or has ended.

    Args:
        connection: The connection.
        options: Options of its listener.
        offer: The highest bounds that the client may choose.
    """

    def __init__(self, connection: OpeningConnection, options: ServerOptions, offer: Terms) -> None:
        self._connection = connection
        self._options = options
        self._offer = offer
        self._header = b""
        self._mechanism = ""
        #: Whether the client has chosen a mechanism that was not offered.
        self._unoffered = False
        #: Why the login can only fail; empty if it may succeed.
        self._refused = ""

    def receive_header(self, data: bytes) -> bytes:
        """Check the protocol header, the first eight octets; return the octets after it."""
        connection = self._connection
        self._header += data
        if len(self._header) < len(PROTOCOL_HEADER) and PROTOCOL_HEADER.startswith(self._header):
            return b""
        if not self._header.startswith(PROTOCOL_HEADER):
            connection.write_data(PROTOCOL_HEADER)
            connection.break_off(
                "the protocol header is another one", "amqp:connection:framing-error"
            )
            return b""
        rest = self._header[len(PROTOCOL_HEADER) :]
        self._header = b""
        connection.stage = Stage.START
        # Ours comes before start: clients wait for it.
        connection.write_data(PROTOCOL_HEADER)
        connection.say(
            ConnectionStart(
                server_properties={
                    "host": self._options.container_id,
                    "product": "amqp-rt",
                    "version": __version__,
                    "platform": "Python",
                    "copyright": "the amqp_rt authors",
                    "information": "a broker for AMQP 1.0, 0-9-1 and 0-10",
                    "cluster-name": self._options.container_id,
                },
                mechanisms=self._mechanisms(),
                locales=["en_US"],
            )
        )
        return rest

    def receive_control(self, control: Control) -> None:
        """Handle a control that the stage of the connection permits.

        Raises:
            ConnectionFault: Its bounds are too low.
        """
        if isinstance(control, ConnectionStartOk):
            self._on_start_ok(control)
        elif isinstance(control, ConnectionSecureOk):
            self._ask_login(control.response)
        elif isinstance(control, ConnectionTuneOk):
            self._on_tune_ok(control)
        elif isinstance(control, ConnectionOpen):
            self._on_open(control)

    # --- login ------------------------------------------------------------------------------------

    def _mechanisms(self) -> list[str]:
        """Return the mechanisms to offer.

        Clients that insist on PLAIN may use it where anonymous access is allowed; they are
        anonymous there, with any user and password.
        """
        offered = [*self._options.mechanisms]
        if "PLAIN" not in offered and self._allows_anonymous:
            offered.append("PLAIN")
        return offered

    @property
    def _allows_anonymous(self) -> bool:
        return "ANONYMOUS" in self._options.mechanisms or not self._options.sasl_required

    def _on_start_ok(self, control: ConnectionStartOk) -> None:
        peer = self._connection.peer
        properties = control.client_properties or {}
        peer.properties = {name: properties[name] for name in properties}
        # Each connection is a container of its own: none can take over links of another.
        peer.container_id = f"amqp010-{peer.address}-{id(self._connection):x}"
        mechanism = control.mechanism or ""
        response = control.response
        refused = "" if mechanism in self._mechanisms() else f"{mechanism!r:.50} is not offered"
        self._unoffered = bool(refused)
        if mechanism == "PLAIN" and "PLAIN" not in self._options.mechanisms and not refused:
            if "ANONYMOUS" not in self._options.mechanisms:
                self._let_in(None, None, None)
                return
            mechanism, response = "ANONYMOUS", b""
        self._mechanism = mechanism
        self._refused = refused
        self._ask_login(response)

    def _ask_login(self, response: bytes | None) -> None:
        most = self._connection.limits.sasl_response_max
        if response is not None and len(response) > most:
            self._refused = f"a response of more than {most} octets"
            response = None
        self._connection.stage = Stage.LOGIN
        # Kept by the application only: it refers to the connection, which would refer to it.
        exchange = LoginExchange(self, self._mechanism)
        exchange.refused = self._refused
        self._connection.report(LoginRequested(self._mechanism, response, None, exchange))

    def login_challenged(self, data: bytes) -> list[Event]:
        """Send a challenge of the mechanism."""
        if self._connection.stage is Stage.LOGIN:
            if self._refused:
                self.login_failed()
                return []
            self._connection.stage = Stage.SECURE
            self._connection.say(ConnectionSecure(challenge=data))
        return []

    def login_succeeded(self, user: str | None, identity: Any, mechanism: str) -> list[Event]:
        """Accept the login as *user*, None for an anonymous one."""
        if self._connection.stage is Stage.LOGIN:
            if self._refused:
                self.login_failed()
            else:
                self._let_in(user, identity, mechanism)
        return []

    def login_failed(self) -> None:
        """Refuse the login; clients see no difference between causes."""
        if self._connection.stage in (Stage.LOGIN, Stage.SECURE):
            error = Error("amqp:unauthorized-access", "the login failed")
            # No further data is sent to one that chose another mechanism (rule validity of start-ok).
            self._connection.refuse(error, silently=self._unoffered)

    def _let_in(self, user: str | None, identity: Any, mechanism: str | None) -> None:
        connection = self._connection
        connection.peer.user = user
        connection.peer.identity = identity
        connection.peer.mechanism = mechanism
        connection.stage = Stage.TUNE
        connection.say(
            ConnectionTune(
                channel_max=self._offer.channel_max,
                max_frame_size=self._offer.frame_max,
                heartbeat_min=0,
                heartbeat_max=HEARTBEAT_MAX,
            )
        )

    # --- limits and virtual host ------------------------------------------------------------------

    def _on_tune_ok(self, control: ConnectionTuneOk) -> None:
        offer = self._offer
        # Absent is without a limit of the client's own.
        channel_max = offer.channel_max if control.channel_max is None else control.channel_max
        frame_max = offer.frame_max if control.max_frame_size is None else control.max_frame_size
        heartbeat_s = control.heartbeat or 0
        if (
            channel_max > offer.channel_max
            or frame_max > offer.frame_max
            or heartbeat_s > HEARTBEAT_MAX
        ):
            # Without a close handshake, as the rules "upper-limit" of tune-ok demand.
            self._connection.break_off(
                "the client wants more than it was offered", "amqp:not-allowed"
            )
            return
        if frame_max < FRAME_SIZE_MIN:
            raise ConnectionFault(f"max-frame-size is at least {FRAME_SIZE_MIN}, got {frame_max}")
        # Connection controls use channel 0 in any case.
        self._connection.begin(Terms(max(1, channel_max), frame_max, heartbeat_s))
        self._connection.stage = Stage.OPEN

    def _on_open(self, control: ConnectionOpen) -> None:
        host = control.virtual_host
        # Clients that mean the default virtual host send nothing or "/".
        self._connection.peer.virtual_host = "" if host in (None, "", "/") else f"vhost:{host}"
        self._connection.open()
