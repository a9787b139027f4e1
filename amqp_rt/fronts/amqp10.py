"""Front of AMQP 1.0, with the interface of any other front."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ..core.engine import Engine
from ..core.frames import AMQP_HEADER, SASL_HEADER
from ..core.options import ClientMechanism, EngineOptions
from ..limits import DEFAULT_LIMITS, Limits
from .base import ServerOptions

__all__ = ["ClientMechanism", "ClientOptions", "Front", "client"]


class Front:
    """Native front, which accepts AMQP 1.0 with and without SASL."""

    name = "amqp1.0"
    headers: tuple[bytes, ...] = (AMQP_HEADER, SASL_HEADER)
    preferred_header = AMQP_HEADER

    def server(self, options: ServerOptions, now: float) -> Engine:
        """Create an engine for a connection that a client opened."""
        return Engine(
            EngineOptions(
                container_id=options.container_id,
                limits=options.limits,
                offered_capabilities=options.offered_capabilities,
                properties=options.properties,
                mechanisms=options.mechanisms,
                sasl_required=options.sasl_required,
                channel_max_for=options.channel_max_for,
                address=options.address,
                echo_addresses=options.echo_addresses,
                whole_errors=options.whole_errors,
                whole_frames=options.whole_frames,
            ),
            client=False,
            now=now,
        )


class ClientOptions(Struct, kw_only=True):
    """Options of the engine of a connection that a client opens."""

    container_id: str
    hostname: str | None = None
    limits: Limits = DEFAULT_LIMITS
    #: Seconds for the handshake; 0 for those of the limits.
    handshake_s: float = 0
    #: In order of preference; empty means no SASL layer.
    mechanisms: tuple[ClientMechanism, ...] = ()
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] = {}
    #: Send open together with the protocol header. Some servers (rhea) expect it after their
    #: header.
    pipelined: bool = True


def client(options: ClientOptions, now: float) -> Engine:
    """Create an engine for a connection that we open; its first bytes are in the output."""
    return Engine(
        EngineOptions(
            container_id=options.container_id,
            hostname=options.hostname,
            limits=options.limits,
            handshake_s=options.handshake_s,
            offered_capabilities=options.offered_capabilities,
            desired_capabilities=options.desired_capabilities,
            properties=options.properties,
            client_mechanisms=options.mechanisms,
            pipelined=options.pipelined,
        ),
        client=True,
        now=now,
    )
