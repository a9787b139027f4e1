"""Client's engine of 0-9-1: a connection that we open (§2.4, connection manager; no I/O).

The handshake on channel 0 is handled here, and channels are opened. On a channel, methods are
answered in the order in which they were sent; messages are published, and confirmed if selected;
messages and methods that the server sends unasked go to callbacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import ClassVar, Final

from msgspec import Struct

from amqp_rt.fronts import DEFAULT_LIMITS, Limits, Opened, Peer
from amqp_rt.fronts.amqp10 import ClientMechanism

from . import faults
from . import methods as m
from .client_channels import EngineChannel, OnAnswer, nothing
from .codec import read_method
from .connection import CHANNEL_MAX, FRAME_MAX, HEARTBEAT_S, Connection
from .faults import Fault
from .frames import FRAME_MIN_SIZE, METHOD, PROTOCOL_HEADER, Frame
from .lifecycle import CLIENT_TRANSITIONS, Stage, Transitions

#: Capabilities of this client beyond the standard.
_CAPABILITIES: Final = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


class Plain:
    """SASL PLAIN (RFC 4616)."""

    name = "PLAIN"

    def __init__(self, user: str, password: str) -> None:
        self._response = f"\0{user}\0{password}".encode()

    def initial(self) -> bytes:
        """Return the user and the password."""
        return self._response

    def respond(self, challenge: bytes) -> bytes:
        """Return an empty response: PLAIN has no challenge."""
        return b""


class External:
    """SASL EXTERNAL (RFC 4422, appendix A): TLS has authenticated the client."""

    name = "EXTERNAL"

    def initial(self) -> bytes:
        """Return an empty response: the identity is that of the TLS certificate."""
        return b""

    def respond(self, challenge: bytes) -> bytes:
        """Return an empty response: there is nothing to add."""
        return b""


class ClientOptions(Struct, kw_only=True):
    """Options of a connection that a client opens."""

    #: SASL mechanisms in order of preference.
    mechanisms: tuple[ClientMechanism, ...] = (Plain("guest", "guest"),)
    virtual_host: str = "/"
    #: ``client-properties``, to which those of the library are added.
    properties: Mapping[str, object] = {}
    limits: Limits = DEFAULT_LIMITS
    channel_max: int = CHANNEL_MAX
    frame_max: int = FRAME_MAX
    #: Longest time between heartbeats in seconds, 0 for none; the server may ask for a shorter one.
    heartbeat_s: int = HEARTBEAT_S
    #: Address of the server, for log records.
    address: str = ""


class ClientEngine(Connection):
    """A connection that we open. The protocol header is in the output from the start."""

    transitions: ClassVar[Transitions] = CLIENT_TRANSITIONS

    def __init__(self, options: ClientOptions, now: float) -> None:
        peer = Peer(address=options.address, protocol="amqp0-9-1")
        super().__init__(options.limits, peer, Stage.START, now)
        self.options = options
        #: Reason of the server for blocking publishers; None while it accepts messages.
        self.blocked: str | None = None
        #: Called when ``blocked`` changes and after output was taken.
        self.on_room: Callable[[], None] = nothing
        self._mechanism: ClientMechanism | None = None
        self._updates: deque[OnAnswer] = deque()
        #: Whether no octets have arrived yet.
        self._silent = True
        self.write_data(PROTOCOL_HEADER)

    # --- --- called by the client --------------------------------------------------------

    def open_channel(self, on_answer: OnAnswer) -> EngineChannel:
        """Open a channel; *on_answer* is called with ``channel.open-ok``.

        Raises:
            Fault: The connection is not open, or has as many channels as were agreed.
        """
        if self.stage is not Stage.RUNNING:
            raise Fault(faults.CHANNEL_ERROR, "the connection is not open")
        number = next(
            (each for each in range(1, self._channel_max + 1) if each not in self.channels), 0
        )
        if not number:
            raise Fault(faults.NOT_ALLOWED, f"all {self._channel_max} channels are open")
        channel = self.channels[number] = EngineChannel(self, number)
        channel.ask(m.ChannelOpen(), on_answer)
        return channel

    def update_secret(self, secret: bytes, reason: str, on_answer: OnAnswer) -> None:
        """Send a new secret before the old one expires; *on_answer* is called with the answer."""
        if self.stage is not Stage.RUNNING:
            on_answer(Fault(faults.CHANNEL_ERROR, "the connection is not open"))
            return
        self._updates.append(on_answer)
        self.write(0, m.ConnectionUpdateSecret(new_secret=secret, reason=reason))

    def take(self) -> list[bytes]:
        """Return the buffers to send; room is available afterwards."""
        output = super().take()
        self.on_room()
        return output

    # --- --- hooks of Connection ---------------------------------------------------------

    def _on_octets(self, data: bytes) -> bytes:
        first, self._silent = self._silent, False
        if first and data.startswith(b"A"):
            # No frame begins so: it is the protocol header that the server supports (§4.2.2).
            self._break("the server does not speak AMQP 0-9-1", "amqp:connection:framing-error")
            return b""
        return data

    def _on_method(self, method: m.Method) -> None:
        if isinstance(method, m.ConnectionStart):
            self._on_start(method)
        elif isinstance(method, m.ConnectionSecure):
            assert self._mechanism is not None
            self.write(0, m.ConnectionSecureOk(response=self._mechanism.respond(method.challenge)))
        elif isinstance(method, m.ConnectionTune):
            self._on_tune(method)
        elif isinstance(method, m.ConnectionOpenOk):
            self.stage = Stage.RUNNING
            self._ends_at = inf
            self.report(Opened(self.peer))
        elif isinstance(method, m.ConnectionBlocked):
            self.blocked = method.reason
            self.on_room()
        elif isinstance(method, m.ConnectionUnblocked):
            self.blocked = None
            self.on_room()
        elif isinstance(method, m.ConnectionUpdateSecretOk):
            if not self._updates:
                raise Fault(faults.COMMAND_INVALID, f"{method.name} answers nothing")
            self._updates.popleft()(method)

    def _on_start(self, method: m.ConnectionStart) -> None:
        self.peer.properties = dict(method.server_properties.items())
        offered = method.mechanisms.decode("ascii", "replace").split()
        mechanism = next((each for each in self.options.mechanisms if each.name in offered), None)
        if mechanism is None:
            ours = " or ".join(each.name for each in self.options.mechanisms)
            said = " ".join(offered)
            self._break(f"the server offers {said!r:.200}, not {ours}", "amqp:unauthorized-access")
            return
        self._mechanism = mechanism
        self.stage = Stage.LOGIN
        self.write(
            0,
            m.ConnectionStartOk(
                client_properties={
                    "product": "amqp-rt",
                    "platform": "Python",
                    **self.options.properties,
                    "capabilities": dict(_CAPABILITIES),
                },
                mechanism=mechanism.name,
                response=mechanism.initial() or b"",
                locale="en_US",
            ),
        )

    def _on_tune(self, method: m.ConnectionTune) -> None:
        """Agree on the lower of both values; 0 is no bound (§1.4.2.5)."""
        options = self.options
        self._channel_max = _least(method.channel_max, options.channel_max)
        frame_max = max(FRAME_MIN_SIZE, _least(method.frame_max, options.frame_max))
        heartbeat = 0
        if options.heartbeat_s:
            heartbeat = _least(method.heartbeat, options.heartbeat_s)
        self._heartbeat_s = float(heartbeat)
        self._frames.frame_max = self.frame_max_out = frame_max
        self.stage = Stage.OPEN
        self.write(
            0,
            m.ConnectionTuneOk(
                channel_max=self._channel_max, frame_max=frame_max, heartbeat=heartbeat
            ),
        )
        self.write(0, m.ConnectionOpen(virtual_host=options.virtual_host))

    def _on_new_channel(self, frame: Frame) -> None:
        method = read_method(frame.payload) if frame.type == METHOD else None
        self.context = method
        if isinstance(method, m.ChannelClose):
            # Both sides sent close.
            self.write(frame.channel, m.ChannelCloseOk())
        elif not isinstance(method, m.ChannelCloseOk):
            raise Fault(faults.CHANNEL_ERROR, f"channel {frame.channel} is not open")

    def _ended(self) -> None:
        self.on_room = nothing
        updates, self._updates = self._updates, deque()
        for on_answer in updates:
            on_answer(self.reason())

    def reason(self) -> Fault:
        """Return the fault with which the connection has ended."""
        error = self.error
        if error is None:
            return Fault(faults.CONNECTION_FORCED, "the connection has ended")
        return Fault.of(error)


def _least(one: int, other: int) -> int:
    """Return the lower of two bounds, where 0 means no bound."""
    return min(one, other) if one and other else one or other
