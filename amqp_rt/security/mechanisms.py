"""SASL mechanisms, both sides, without I/O of their own (Part 5 §5.3, RFC 4616, RFC 4505).

A client mechanism has plain methods; a server mechanism is async, because it may have to ask a
database, read a file or hash in a worker thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from ..errors import AuthenticationFailed
from ..events import Certificate, Peer
from .tokens import Token

#: ``await verifier(user, password, peer)``: the application's data about the user, anything but
#: None, or None if the user or the password is wrong.
Verifier: TypeAlias = Callable[[str, str, Peer], Awaitable[Any]]


class Challenge(Struct, frozen=True):
    """Step that asks the client for another response."""

    data: bytes


class Success(Struct, frozen=True):
    """Step that admits the client; ``user`` is None for a login without a user name.

    ``data`` goes with the outcome (§5.3.3.6), for mechanisms in which the server sends the last
    message. ``tokens`` are those from the login: the connection has them as if they were put on
    ``$cbs``.
    """

    user: str | None
    identity: Any = None
    data: bytes | None = None
    tokens: tuple[Token, ...] = ()


class Failure(Struct, frozen=True):
    """Step that refuses the client. ``why`` is for the log and never for the client; ``user`` is
    the user name that the client claimed, if any."""

    why: str
    user: str = ""


Step: TypeAlias = Challenge | Success | Failure


class ServerMechanism(Protocol):
    """Server side of a mechanism. One object serves any number of exchanges of one step.

    For exchanges of several steps, ``begin()`` makes an object for each. A mechanism whose secrets
    are sent unprotected declares ``reveals = True``, and is offered only where that is safe or allowed.
    """

    name: str

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Process the client's response; None means that it sent no initial response."""


class Plain:
    """Client side of PLAIN (RFC 4616). The password never appears in a repr or a log.

    Args:
        user: Our user name.
        password: The password; sent in clear, so use it over loopback, Unix sockets or TLS.
        authorize_as: User to act for, where the server allows it.

    Raises:
        AuthenticationFailed: User or password cannot be sent in PLAIN.
    """

    name = "PLAIN"
    reveals = True

    def __init__(self, user: str, password: str, *, authorize_as: str = "") -> None:
        if not user or "\0" in user + password + authorize_as:
            raise AuthenticationFailed(
                "PLAIN needs a user, and neither user nor password may contain NUL",
                condition="amqp:invalid-field",
            )
        self.user = user
        self._password = password
        self._authorize_as = authorize_as

    def initial(self) -> bytes | None:
        """Return the only message of this mechanism."""
        return f"{self._authorize_as}\0{self.user}\0{self._password}".encode()

    def respond(self, challenge: bytes) -> bytes:
        """Repeat the message, for a server that asks although it has it all."""
        return self.initial() or b""

    def __repr__(self) -> str:
        return f"Plain({self.user!r}, ***)"


class Anonymous:
    """Client side of ANONYMOUS (RFC 4505), with an optional trace text."""

    name = "ANONYMOUS"

    def __init__(self, trace: str = "") -> None:
        self.trace = trace

    def initial(self) -> bytes | None:
        """Return the trace text."""
        return self.trace.encode()

    def respond(self, challenge: bytes) -> bytes:
        """Return an empty response."""
        return b""

    def __repr__(self) -> str:
        return "Anonymous()"


class PlainServer:
    """Server side of PLAIN; the application's verifier decides."""

    name = "PLAIN"
    reveals = True

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Verify ``authzid NUL authcid NUL password``."""
        if response is None:
            return Challenge(b"")
        parts = response.split(b"\0")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            return Failure("a malformed PLAIN response")
        try:
            acting, user, password = (part.decode() for part in parts)
        except UnicodeDecodeError:
            return Failure("a PLAIN response that is not UTF-8")
        if acting and acting != user:
            return Failure(f"{user!r:.100} may not act for another user", user)
        identity = await self._verifier(user, password, peer)
        if identity is None:
            return Failure(f"wrong user or password for {user!r:.100}", user)
        return Success(user, identity)


class External:
    """Client side of EXTERNAL (RFC 4422 appendix A): our identity was proved outside of SASL, by the
    certificate of the TLS connection.

    Args:
        authorize_as: User to act for, where the server allows it.
    """

    name = "EXTERNAL"

    def __init__(self, authorize_as: str = "") -> None:
        self._authorize_as = authorize_as

    def initial(self) -> bytes | None:
        """Return the only message of this mechanism; it may be empty."""
        return self._authorize_as.encode()

    def respond(self, challenge: bytes) -> bytes:
        """Repeat the message, for a server that asks again."""
        return self._authorize_as.encode()

    def __repr__(self) -> str:
        return "External()"


class AnonymousServer:
    """Server side of ANONYMOUS: admits all clients without a user name."""

    name = "ANONYMOUS"

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Accept any response; the trace text is ignored."""
        return Success(None)


#: ``identify(certificate)``: the user of a certificate, or None.
Identify: TypeAlias = Callable[[Certificate], str | None]


def common_name(certificate: Certificate) -> str | None:
    """Return the user of a certificate: its subject's common name, else its first DNS name."""
    return certificate.subject.get("commonName") or next(iter(certificate.dns_names), None)


class ExternalServer:
    """Server side of EXTERNAL: the client is the user that its certificate names.

    Offered only to clients with a verified certificate.

    Args:
        identify: Returns the user of a certificate; by default :func:`common_name`.
    """

    name = "EXTERNAL"

    def __init__(self, identify: Identify = common_name) -> None:
        self._identify = identify

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Check the certificate; the response may name the same user, but no other."""
        if response is None:
            return Challenge(b"")
        if peer.certificate is None:
            return Failure("EXTERNAL without a certificate")
        user = self._identify(peer.certificate)
        if not user:
            return Failure("a certificate that stands for no user")
        if response and response != user.encode():
            return Failure(f"{user!r:.100} may not act for another user")
        return Success(user, peer.certificate)


def may_send_in_clear(*, secure: bool, local: bool, allowed: bool) -> bool:
    """Return whether a password may be sent on a connection.

    Args:
        secure: Whether the connection is encrypted.
        local: Whether it stays within the machine: loopback, a Unix socket or memory.
        allowed: Whether the configuration explicitly allows passwords in clear.
    """
    return secure or local or allowed


def reveals(mechanism: object) -> bool:
    """Return whether a mechanism, of either side, sends its secret unprotected."""
    return bool(getattr(mechanism, "reveals", False))


def offered(
    mechanisms: Iterable[ServerMechanism],
    *,
    secure: bool,
    local: bool,
    plain_in_clear: bool,
    certificate: bool = False,
) -> tuple[str, ...]:
    """Return the names to offer on a connection.

    PLAIN and others that reveal their secret are offered only where it may be sent, EXTERNAL only to
    clients with a certificate.
    """
    secrets = may_send_in_clear(secure=secure, local=local, allowed=plain_in_clear)
    return tuple(
        m.name
        for m in mechanisms
        if (secrets or not reveals(m)) and (certificate or m.name != "EXTERNAL")
    )
