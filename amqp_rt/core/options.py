"""The options with which an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits


class ClientMechanism(Protocol):
    """Client side of a SASL mechanism; see :mod:`amqp_rt.security.mechanisms`.

    A mechanism that has to verify the additional data of the outcome has ``finish(data)``, too.
    """

    name: str

    def initial(self) -> bytes | None:
        """Return the initial response; None means no response, which differs from an empty one."""

    def respond(self, challenge: bytes) -> bytes:
        """Return the response to a challenge."""


class EngineOptions(Struct, kw_only=True):
    """Options of either side of a connection; fields for one side are marked as such."""

    container_id: str
    hostname: str | None = None
    limits: Limits = DEFAULT_LIMITS
    #: Seconds for the handshake; 0 for those of the limits.
    handshake_s: float = 0
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None
    #: Server: mechanisms to offer. Client: unused.
    mechanisms: tuple[str, ...] = ()
    sasl_required: bool = False
    #: Server: returns the highest channel number for a peer, called after its open and before ours; None
    #: for that of the limits.
    channel_max_for: Callable[[Peer], int] | None = None
    #: Client: mechanisms to use, preferred ones first.
    client_mechanisms: tuple[ClientMechanism, ...] = ()
    #: Client: send open together with the protocol header. False: wait for the peer's header first.
    pipelined: bool = True
    address: str = ""
    #: Server: our attaches repeat the address of our terminus as the peer wrote it (``Link.asked``).
    echo_addresses: bool = False
    #: Write errors with all three fields, an absent ``info`` as an empty map.
    whole_errors: bool = False
    #: Write performatives with all their fields, absent ones as nulls.
    whole_frames: bool = False
