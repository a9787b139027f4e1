"""Events that an engine reports about its connection.

Only changes of the connection as a whole are events, reported in the order in which they
happened. Deliveries, outcomes and credit go straight to the endpoint bound to a link, one batch
for each chunk of bytes (:mod:`amqp_rt.fronts.base`), because an event object and a dispatch for
each message would cost too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field

from .outcomes import Error


class Certificate(Struct, frozen=True, kw_only=True):
    """Holder's data from a certificate that was verified against the authorities."""

    #: Attributes of the subject, such as ``{"commonName": "ada", "organizationName": "Analytical Engines"}``.
    subject: Mapping[str, str] = field(default_factory=dict)
    #: Subject alternative names (RFC 5280 §4.2.1.6).
    dns_names: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    #: The serial number in hexadecimal digits.
    serial_number: str = ""
    #: End of validity, in seconds since 1970-01-01 UTC.
    not_after: float = 0.0


class Peer(Struct, kw_only=True):
    """The other end of a connection, as far as it is known.

    ``user`` is the authenticated user, None before authentication or without it;
    ``identity`` is the value that the application's verifier returned for that user. ``trusted``
    is true for the process itself, connected in memory. ``tokens`` are those of the connection
    (:class:`amqp_rt.security.tokens.Tokens`), None where none are accepted. ``secure`` is true if
    the connection is encrypted; ``certificate`` is then the client certificate, if there is one,
    and ``server_name`` the host name that the peer requested (SNI). ``profile`` is the
    :class:`~amqp_rt.Profile` of the listener that accepted the connection, None without one.
    ``enters_by_right`` is true if its protocol asks for a right when a virtual host is opened, so that
    peers who have none there are refused (0-10 §connection.open, rule security).
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
    enters_by_right: bool = False
    profile: Any = None
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] = field(default_factory=dict)


class LoginRequested(Struct):
    """A client sent its part of the SASL exchange: answer through ``exchange``.

    ``exchange.challenge(data)``, ``exchange.succeed(user, identity)`` or
    ``exchange.fail()`` may be called now or later; until then the connection waits,
    bounded by the handshake deadline (Part 5 §5.3). An exchange whose ``exchange.refused`` gives a
    reason can only fail. The event is reported all the same, so that every failure takes equally long.
    """

    mechanism: str
    response: bytes | None
    hostname: str | None
    exchange: Any

    def __repr__(self) -> str:
        """Return a text without the response, which may hold a password."""
        said = "None" if self.response is None else "***"
        return f"LoginRequested({self.mechanism!r}, {said}, {self.hostname!r})"


class Opened(Struct):
    """The peer's open has arrived, and ours is sent or about to be (Part 2 §2.7.1)."""

    peer: Peer


class AttachRequested(Struct):
    """The peer asks for a link: ``link.accept(...)`` or ``link.refuse(error)``, now or later.

    ``link`` is a :class:`~amqp_rt.fronts.base.SendingLink` or
    :class:`~amqp_rt.fronts.base.ReceivingLink`.
    """

    link: Any


class LinksMoved(Struct):
    """Links that outlive connections belong to this connection from now on.

    ``anchor`` is their ``connection`` (:class:`amqp_rt.fronts.anchors.Anchor`). The container judges them
    anew, by the rights of this connection, before it handles the next event.
    """

    anchor: Any


class Closed(Struct):
    """Both sides have sent close, or the stream ended after one had (Part 2 §2.7.9).

    ``error`` is the error in the peer's close, None for a clean end.
    """

    error: Error | None = None


class ConnectionFailed(Struct):
    """The connection broke: a protocol fault of the peer, a timeout, or a lost stream.

    For a fault or a timeout our close with ``error`` is already in the output.
    """

    error: Error


Event: TypeAlias = (
    LoginRequested | Opened | AttachRequested | LinksMoved | Closed | ConnectionFailed
)
