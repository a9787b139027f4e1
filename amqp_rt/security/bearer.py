"""Logging in with an OAuth 2.0 token: OAUTHBEARER (RFC 7628) and XOAUTH2, both sides; and the
mechanisms of those who bring their tokens to ``$cbs`` afterwards."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from msgspec import Struct

from ..errors import AuthenticationFailed
from ..events import Peer
from .mechanisms import Challenge, Failure, Step, Success

#: A token, or where one comes from: asked anew before each connection.
TokenSource: TypeAlias = str | Callable[[], Awaitable[str]]

#: RFC 6750 §2.1.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/\-]+=*")
_REFUSED: Final = b'{"status":"invalid_token"}'


class Login(Struct, frozen=True):
    """Whom a token stands for."""

    user: str
    identity: Any = None


#: ``await verify(token, peer)``: whom the token stands for, or None if it is not valid.
VerifyToken: TypeAlias = Callable[[str, Peer], Awaitable[Login | None]]


class _BearerClient:
    """What both mechanisms have in common on the client's side."""

    name = ""
    #: The token crosses the wire as it is: over TLS, or without leaving the machine, only.
    reveals = True

    def __init__(self, token: TokenSource, *, user: str = "") -> None:
        self.user = user
        self._source = token
        self._token = token if isinstance(token, str) else ""

    async def prepare(self) -> None:
        """Get a token, before a connection is made.

        Raises:
            AuthenticationFailed: What was got is no token.
        """
        if not isinstance(self._source, str):
            self._token = await self._source()
        if not _TOKEN.fullmatch(self._token):
            raise AuthenticationFailed(
                "there is no token, or it has characters that no token has",
                condition="amqp:invalid-field",
            )

    def respond(self, challenge: bytes) -> bytes:
        """The server says why not (RFC 7628 §3.2.3), and wants to hear that we heard."""
        return b"\x01"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(***)"


class OAuthBearer(_BearerClient):
    """OAUTHBEARER, client side (RFC 7628). The token is in no repr and no log.

    Args:
        token: The token, or an async function that gets one; it is called for each connection.
        user: Whom to act for, if the server wants to hear it.
    """

    name = "OAUTHBEARER"

    def initial(self) -> bytes | None:
        """The one message of this mechanism."""
        user = self.user.replace("=", "=3D").replace(",", "=2C")
        acting = f"a={user}" if user else ""
        return f"n,{acting},\x01auth=Bearer {self._token}\x01\x01".encode()


class XOAuth2(_BearerClient):
    """XOAUTH2, client side: the older form of the same. The token is in no repr and no log.

    Args:
        token: The token, or an async function that gets one; it is called for each connection.
        user: Whose it is.
    """

    name = "XOAUTH2"

    def initial(self) -> bytes | None:
        """The one message of this mechanism."""
        return f"user={self.user}\x01auth=Bearer {self._token}\x01\x01".encode()


class BearerServer:
    """OAUTHBEARER and XOAUTH2, server side; the application judges the token.

    Args:
        name: ``OAUTHBEARER`` or ``XOAUTH2``.
        verify: Judges tokens.
    """

    reveals = True

    def __init__(self, name: str, verify: VerifyToken) -> None:
        self.name = name
        self._verify = verify

    def begin(self) -> _BearerExchange:
        """One exchange: a refusal takes a step more."""
        return _BearerExchange(self.name, self._verify)

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Each exchange has an object of its own, see :meth:`begin`."""
        return Failure("a bearer's login is one exchange")


class _BearerExchange:
    def __init__(self, name: str, verify: VerifyToken) -> None:
        self.name = name
        self._verify = verify
        self._failure: Failure | None = None

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        if self._failure is not None:
            return self._failure
        if response is None:
            return Challenge(b"")
        found = _bearer(self.name, response)
        if found is None:
            return Failure(f"a malformed {self.name} response")
        user, token = found
        login = await self._verify(token, peer)
        if login is not None and user in ("", login.user):
            return Success(login.user, login.identity)
        self._failure = Failure("a token that is not valid, or not for this user", user)
        return Challenge(_REFUSED)


def _bearer(name: str, response: bytes) -> tuple[str, str] | None:
    """The user, maybe empty, and the token."""
    try:
        head, *pairs = response.decode().split("\x01")
    except UnicodeDecodeError:
        return None
    if name == "OAUTHBEARER":
        given = re.fullmatch(r"[ny],(?:a=((?:[^=,]|=2C|=3D)*))?,", head)
        user = given and (given[1] or "").replace("=2C", ",").replace("=3D", "=")
    else:
        given = re.fullmatch("user=(.*)", head)
        user = given and given[1]
    if user is None or pairs[-2:] != ["", ""]:
        return None
    auths = [pair.removeprefix("auth=") for pair in pairs if pair.startswith("auth=")]
    if len(auths) != 1:
        return None
    scheme, _, token = auths[0].partition(" ")
    if scheme.lower() != "bearer" or not _TOKEN.fullmatch(token):
        return None
    return user, token


class CbsLogin:
    """AMQPCBS, or its elder MSSBCBS, client side: our tokens come to ``$cbs`` when we are in."""

    reveals = True

    def __init__(self, name: str = "AMQPCBS") -> None:
        self.name = name

    def initial(self) -> bytes | None:
        """Nothing is said."""
        return b""

    def respond(self, challenge: bytes) -> bytes:
        """Nothing more either."""
        return b""

    def __repr__(self) -> str:
        return f"CbsLogin({self.name!r})"


class CbsLoginServer:
    """AMQPCBS, or MSSBCBS, server side: lets everybody in as nobody, with tokens to follow.

    It is offered where tokens may cross the wire.
    """

    reveals = True

    def __init__(self, name: str = "AMQPCBS") -> None:
        self.name = name

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """What is said is not looked at."""
        return Success(None)
