"""SASL layer of a connection, of either side (Part 5 §5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..codec.composites import read_composite
from ..codec.primitives import Reader
from ..events import Event, LoginRequested
from .frames import SASL_FRAME, SASL_HEADER, FrameBuffer, connection_fault, performative_frame
from .lifecycle import AWAITS_LOGIN, READS_SASL
from .repeated import repeated_frame
from .sasl_frames import (
    AUTH,
    OK,
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .options import ClientMechanism


class SaslExchange:
    """A client's SASL init or response that waits for the application's answer.

    Each call answers once. Calls after the end of the connection have no effect.
    """

    def __init__(self, layer: SaslLayer, mechanism: str) -> None:
        self.mechanism = mechanism
        #: Why the exchange can only fail; empty if it may succeed.
        self.refused: str = ""
        self._layer = layer

    def challenge(self, data: bytes) -> list[Event]:
        """Send a challenge; the client's response arrives as another ``LoginRequested``.

        Returns the events of bytes that had already arrived: handle them as those of ``receive``.
        """
        return self._layer.challenge(data)

    def succeed(
        self, user: str | None, identity: Any = None, data: bytes | None = None
    ) -> list[Event]:
        """Accept the client as *user*; *data* goes with the outcome.

        Returns the events of bytes that had already arrived: handle them as those of ``receive``.
        """
        return self._layer.succeed(user, identity, self.mechanism, data)

    def fail(self) -> None:
        """Reject the login with the same outcome for every cause, and end the connection."""
        self._layer.fail()


class SaslLayer:
    """SASL negotiation of one connection, which precedes the protocol header of AMQP.

    The layer begins with our SASL header, which a server's mechanisms follow.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: The client's login, on the server's side.
        self._exchange: SaslExchange | None = None
        #: Mechanism in use, on the client's side.
        self._mechanism: ClientMechanism | None = None
        engine.write_raw(SASL_HEADER)
        if not engine.client:
            mechanisms = SaslMechanisms(engine.options.mechanisms)
            engine.write_raw(repeated_frame(0, mechanisms, SASL_FRAME))

    def on_frame(self, buffer: FrameBuffer) -> None:
        """Handle a SASL frame of the peer.

        Raises:
            Fault: The frame is not one of SASL, or not one that may come now.
            DecodeError: The frame cannot be decoded.
        """
        engine = self._engine
        if buffer.kind != SASL_FRAME:
            raise connection_fault(
                "amqp:connection:framing-error", f"frame type {buffer.kind} is not SASL"
            )
        if buffer.body == buffer.end:
            raise connection_fault("amqp:connection:framing-error", "an empty SASL frame")
        reader = Reader(buffer.data, buffer.body, buffer.end, engine.limits)
        if engine.client:
            self._on_server(read_composite(reader, SaslMechanisms, SaslChallenge, SaslOutcome))
        else:
            self._on_client(read_composite(reader, SaslInit, SaslResponse))

    def end(self) -> None:
        """Drop the client's login. It refers to this layer, and the cycle would keep the engine."""
        self._exchange = None

    # --- server's side -------------------------------------------------------------------

    def _on_client(self, performative: Any) -> None:
        engine = self._engine
        if isinstance(performative, SaslInit):
            if self._exchange is not None:
                raise connection_fault("amqp:not-allowed", "sasl-init came twice")
            mechanism = str(performative.mechanism)
            self._exchange = SaslExchange(self, mechanism)
            if mechanism not in engine.options.mechanisms:
                self._exchange.refused = f"{mechanism!r:.50} is not offered"
            response = performative.initial_response
            hostname = performative.hostname
            engine.peer.virtual_host = hostname or engine.peer.virtual_host
        else:
            if self._exchange is None:
                raise connection_fault("amqp:not-allowed", "sasl-response came before sasl-init")
            mechanism = self._exchange.mechanism
            response = performative.response
            hostname = None
        if response is not None and len(response) > engine.limits.sasl_response_max:
            self._exchange.refused = (
                f"a response of more than {engine.limits.sasl_response_max} octets"
            )
            response = None
        engine.layer = AWAITS_LOGIN
        engine.report(LoginRequested(mechanism, response, hostname, self._exchange))

    def challenge(self, data: bytes) -> list[Event]:
        """Send a challenge, and process bytes that the client had sent ahead."""
        engine = self._engine
        if engine.layer != AWAITS_LOGIN:
            return []
        if self._refused():
            return []
        engine.layer = READS_SASL
        engine.write_raw(performative_frame(0, SaslChallenge(data), SASL_FRAME))
        return engine.run()

    def succeed(
        self, user: str | None, identity: Any, mechanism: str, data: bytes | None = None
    ) -> list[Event]:
        """Accept the client, and process bytes that it had sent ahead."""
        engine = self._engine
        if engine.layer != AWAITS_LOGIN:
            return []
        if self._refused():
            return []
        engine.peer.user = user
        engine.peer.identity = identity
        engine.peer.mechanism = mechanism
        frame_of = repeated_frame if data is None else performative_frame
        engine.write_raw(frame_of(0, SaslOutcome(OK, data), SASL_FRAME))
        engine.end_sasl()
        return engine.run()

    def fail(self) -> None:
        """Reject the login, with the same outcome for every cause (§5.3.3.5)."""
        engine = self._engine
        if engine.finished or engine.sasl_done:
            return
        engine.write_raw(performative_frame(0, SaslOutcome(AUTH), SASL_FRAME))
        engine.fail_login("the login failed")

    def _refused(self) -> bool:
        """Return whether the exchange can only fail, after failing it in that case."""
        if self._exchange is not None and self._exchange.refused:
            self.fail()
            return True
        return False

    # --- client's side -------------------------------------------------------------------

    def _on_server(self, performative: Any) -> None:
        engine = self._engine
        if isinstance(performative, SaslMechanisms):
            if self._mechanism is not None:
                raise connection_fault("amqp:not-allowed", "sasl-mechanisms came twice")
            offered = performative.sasl_server_mechanisms
            for mechanism in engine.options.client_mechanisms:
                if mechanism.name in offered:
                    self._mechanism = mechanism
                    break
            else:
                engine.fail_login(self._no_common_mechanism(offered))
                return
            init = SaslInit(mechanism.name, mechanism.initial(), engine.options.hostname)
            engine.write_raw(performative_frame(0, init, SASL_FRAME))
        elif self._mechanism is None:
            raise connection_fault("amqp:not-allowed", "the server spoke before its mechanisms")
        elif isinstance(performative, SaslChallenge):
            response = self._mechanism.respond(performative.challenge)
            engine.write_raw(performative_frame(0, SaslResponse(response), SASL_FRAME))
        elif performative.code == OK:
            finish = getattr(self._mechanism, "finish", None)
            if finish is not None:
                # With some mechanisms the server proves its identity too; this raises if the proof
                # is wrong.
                finish(performative.additional_data)
            engine.end_sasl()
        elif performative.code == AUTH:
            engine.fail_login("the peer did not accept the login")
        else:
            engine.fail_login(f"the peer could not check the login (sasl-code {performative.code})")

    def _no_common_mechanism(self, offered: Sequence[str]) -> str:
        """Return why none of the mechanisms *offered* by the server can be used."""
        names = [str(name) for name in offered]
        shown = ", ".join(names)
        ours = [mechanism.name for mechanism in self._engine.options.client_mechanisms]
        takes_password = any(name == "PLAIN" or name.startswith("SCRAM-") for name in names)
        if ours == ["ANONYMOUS"] and takes_password:
            return (
                "the peer requires a login: give a user name and a password, as in amqp://USER:PASSWORD@HOST"
                f" (its SASL mechanisms are {shown})"
            )
        text = f"the peer offers only these SASL mechanisms: {shown}"
        if "PLAIN" in names and all(name.startswith("SCRAM-") for name in ours):
            # What is left of a user and a password where the latter may not be sent in clear.
            text += "; PLAIN sends the password itself, which takes TLS or plain_in_clear=True"
        return text
