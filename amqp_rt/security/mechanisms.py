"""SASL mechanisms, both sides, without I/O of their own (Part 5 §5.3, RFC 4616, RFC 4505).

A client mechanism is plain calls; a server mechanism is async, because asking who somebody is
may take a database, a file or a hash in a worker thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from ..errors import AuthenticationFailed
from ..events import Certificate, Peer
from .tokens import Token

#: ``await verifier(user, password, peer)``: what the application knows of the user, anything but
#: None, or None if the two do not go together.
Verifier: TypeAlias = Callable[[str, str, Peer], Awaitable[Any]]


class Challenge(Struct, frozen=True):
    """Ask the client for more."""

    data: bytes


class Success(Struct, frozen=True):
    """The client is who it says; ``user`` is None for nobody in particular. ``data`` goes with the
    outcome (§5.3.3.6), for mechanisms in which the server has the last word. ``tokens`` are those
    that the login brought: the connection has them as if they were put on ``$cbs``."""

    user: str | None
    identity: Any = None
    data: bytes | None = None
    tokens: tuple[Token, ...] = ()


class Failure(Struct, frozen=True):
    """It is not, whatever the reason. ``why`` is for the log and never for the client; ``user`` is
    who it claimed to be, if it did."""

    why: str
    user: str = ""


Step: TypeAlias = Challenge | Success | Failure


class ServerMechanism(Protocol):
    """The server's side. One object serves any number of exchanges that take one step.

    Where an exchange takes several, ``begin()`` makes an object for each. A mechanism whose secrets
    cross the wire as they are says so by ``reveals = True``, and is offered where they may.
    """

    name: str

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Judge the client's response; None means that it sent no initial response."""


class Plain:
    """PLAIN, client side (RFC 4616). The password is in no repr and no log.

    Args:
        user: Who we are.
        password: The secret; sent in clear, so use it over loopback, Unix sockets or TLS.
        authorize_as: Whom to act for, where the server allows it.

    Raises:
        AuthenticationFailed: They cannot be said in PLAIN.
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
        """The one message of this mechanism."""
        return f"{self._authorize_as}\0{self.user}\0{self._password}".encode()

    def respond(self, challenge: bytes) -> bytes:
        """A server that asks although all has been said hears it again."""
        return self.initial() or b""

    def __repr__(self) -> str:
        return f"Plain({self.user!r}, ***)"


class Anonymous:
    """ANONYMOUS, client side (RFC 4505): nobody in particular, with an optional trace."""

    name = "ANONYMOUS"

    def __init__(self, trace: str = "") -> None:
        self.trace = trace

    def initial(self) -> bytes | None:
        """The trace."""
        return self.trace.encode()

    def respond(self, challenge: bytes) -> bytes:
        """Nothing more to say."""
        return b""

    def __repr__(self) -> str:
        return "Anonymous()"


class PlainServer:
    """PLAIN, server side; the application's verifier decides."""

    name = "PLAIN"
    reveals = True

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Judge ``authzid NUL authcid NUL password``."""
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
    """EXTERNAL, client side (RFC 4422 appendix A): who we are has been said outside of SASL, by the
    certificate of the TLS connection.

    Args:
        authorize_as: Whom to act for, where the server allows it.
    """

    name = "EXTERNAL"

    def __init__(self, authorize_as: str = "") -> None:
        self._authorize_as = authorize_as

    def initial(self) -> bytes | None:
        """The one message of this mechanism; it may be empty."""
        return self._authorize_as.encode()

    def respond(self, challenge: bytes) -> bytes:
        """A server that asks hears it again."""
        return self._authorize_as.encode()

    def __repr__(self) -> str:
        return "External()"


class AnonymousServer:
    """ANONYMOUS, server side: lets everybody in as nobody."""

    name = "ANONYMOUS"

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """The trace, if any, is not looked at."""
        return Success(None)


#: ``identify(certificate)``: the user whom a certificate is for, or None for nobody.
Identify: TypeAlias = Callable[[Certificate], str | None]


def common_name(certificate: Certificate) -> str | None:
    """The user whom a certificate is for: its subject's common name, else its first DNS name."""
    return certificate.subject.get("commonName") or next(iter(certificate.dns_names), None)


class ExternalServer:
    """EXTERNAL, server side: the client is whom its certificate names.

    Only certificates that were verified get here, and EXTERNAL is offered to nobody else.

    Args:
        identify: Which user a certificate stands for; by default :func:`common_name`.
    """

    name = "EXTERNAL"

    def __init__(self, identify: Identify = common_name) -> None:
        self._identify = identify

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Judge the certificate; the response may say whom to act for, which is oneself."""
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
    """Whether a password may cross this connection (SE9).

    Args:
        secure: The connection is encrypted.
        local: It never leaves the machine: loopback, a Unix socket or memory.
        allowed: The user has said by name that it may cross in clear.
    """
    return secure or local or allowed


def reveals(mechanism: object) -> bool:
    """Whether a mechanism, of either side, sends its secret as it is."""
    return bool(getattr(mechanism, "reveals", False))


def offered(
    mechanisms: Iterable[ServerMechanism],
    *,
    secure: bool,
    local: bool,
    plain_in_clear: bool,
    certificate: bool = False,
) -> tuple[str, ...]:
    """The names to offer on a connection: PLAIN and its like only where a secret may cross it,
    EXTERNAL only to who has shown a certificate."""
    secrets = may_send_in_clear(secure=secure, local=local, allowed=plain_in_clear)
    return tuple(
        m.name
        for m in mechanisms
        if (secrets or not reveals(m)) and (certificate or m.name != "EXTERNAL")
    )
