"""What an engine reports about its connection.

Only connection-level happenings are events, in the order in which they happened.
Deliveries, outcomes and credit go straight to the endpoint bound to a link, a batch per
chunk of bytes (:mod:`amqp_rt.fronts.base`), because a message must not cost an object
and a dispatch more than it has to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field

from .outcomes import Error


class Certificate(Struct, frozen=True, kw_only=True):
    """What a certificate says of its holder; it was verified against the authorities (SE7)."""

    #: Such as ``{"commonName": "ada", "organizationName": "Analytical Engines"}``.
    subject: Mapping[str, str] = field(default_factory=dict)
    #: Subject alternative names (RFC 5280 §4.2.1.6).
    dns_names: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    #: In hexadecimal digits.
    serial_number: str = ""
    #: Seconds since 1970-01-01 UTC.
    not_after: float = 0.0


class Peer(Struct, kw_only=True):
    """Who is at the other end, as far as the connection knows.

    ``user`` is what authentication established, None before it or without it;
    ``identity`` is whatever the application's verifier returned for that user. ``trusted`` is the
    process itself, by a connection in memory. ``tokens`` are those of the connection
    (:class:`amqp_rt.security.tokens.Tokens`), None where none are taken. ``secure`` says that the
    connection is encrypted, ``certificate`` what the peer showed then, and ``server_name`` the host
    that it asked for (SNI).
    """

    container_id: str = ""
    virtual_host: str = ""
    user: str | None = None
    identity: Any = None
    mechanism: str | None = None
    trusted: bool = False
    tokens: Any = None
    address: str = ""
    secure: bool = False
    certificate: Certificate | None = None
    server_name: str = ""
    protocol: str = "amqp1.0"
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] = field(default_factory=dict)


class LoginRequested(Struct):
    """A client spoke in the SASL exchange: answer through ``exchange``.

    ``exchange.challenge(data)``, ``exchange.succeed(user, identity)`` or
    ``exchange.fail()`` may be called now or later; until then the connection waits,
    bounded by the handshake deadline (Part 5 §5.3). Where ``exchange.refused`` says why, it can only
    fail: it is asked all the same, so that every failure takes as long as any other.
    """

    mechanism: str
    response: bytes | None
    hostname: str | None
    exchange: Any

    def __repr__(self) -> str:
        """What is secret in it is in no log."""
        said = "None" if self.response is None else "***"
        return f"LoginRequested({self.mechanism!r}, {said}, {self.hostname!r})"


class Opened(Struct):
    """The peer's open has arrived, and ours is sent or about to be (Part 2 §2.7.1)."""

    peer: Peer


class AttachRequested(Struct):
    """The peer wants a link: ``link.accept(...)`` or ``link.refuse(error)``, now or later.

    ``link`` is a :class:`~amqp_rt.fronts.base.SendingLink` or
    :class:`~amqp_rt.fronts.base.ReceivingLink`.
    """

    link: Any


class Closed(Struct):
    """Both sides have said close, or the stream ended after one did (Part 2 §2.7.9).

    ``error`` is what the peer gave as its reason, None for a clean end.
    """

    error: Error | None = None


class ConnectionFailed(Struct):
    """The connection broke: a protocol fault of the peer, a timeout, or a lost stream.

    For a fault or a timeout our Close with ``error`` is already in the output.
    """

    error: Error


Event: TypeAlias = LoginRequested | Opened | AttachRequested | Closed | ConnectionFailed
