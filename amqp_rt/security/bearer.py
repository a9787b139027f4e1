"""Login with tokens, both sides: OAUTHBEARER (RFC 7628), XOAUTH2 and AMQPCBS (CBS draft §4.2).

Tokens of such a login are kept like those put on ``$cbs`` later: they give rights, are replaced by
newer tokens for the same audience, and end when they expire.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Struct

from ..errors import AuthenticationFailed
from ..events import Peer
from ..limits import Limits
from .mechanisms import Challenge, Failure, ServerMechanism, Step, Success
from .tokens import BearerToken, Cbs, Token, TokenRefused

#: A token, or an async function that gets one before each connection.
TokenSource: TypeAlias = str | Callable[[], Awaitable[str]]

#: Tokens of AMQPCBS, or an async function that gets them.
TokensSource: TypeAlias = Sequence[BearerToken] | Callable[[], Awaitable[Sequence[BearerToken]]]

#: Syntax of a bearer token (RFC 6750 §2.1).
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/\-]+=*")
_REFUSED: Final = b'{"status":"invalid_token"}'


#: Octets of one response of AMQPCBS, which every server accepts in a frame (CBS draft §4.2.1).
_RESPONSE_MAX: Final = 8_000
#: Octets of the name of a token's type.
_KIND_MAX: Final = 256
#: The end of a list of tokens (CBS draft §4.2.2).
_END: Final = b"\0\0"


class Login(Struct, frozen=True):
    """Identity that a token stands for.

    Args:
        user: The user's name, or None for a login without one.
        identity: Any data of the application about the user.
        token: The token's rights and expiry, if the connection is to have them: a result of
            :meth:`Cbs.validate <amqp_rt.security.tokens.Cbs.validate>`.
    """

    user: str | None
    identity: Any = None
    token: Token | None = None


#: ``await verify(token, peer)``: the login that the token stands for, or None if it is not valid.
VerifyToken: TypeAlias = Callable[[str, Peer], Awaitable[Login | None]]


class _BearerClient:
    """Base class of both mechanisms on the client's side."""

    name = ""
    #: The token is sent unprotected: only over TLS, or within the machine.
    reveals = True

    def __init__(self, token: TokenSource, *, user: str = "") -> None:
        self.user = user
        self._source = token
        self._token = token if isinstance(token, str) else ""

    async def prepare(self) -> None:
        """Get a token, before a connection is made.

        Raises:
            AuthenticationFailed: The token is missing or malformed.
        """
        if not isinstance(self._source, str):
            self._token = await self._source()
        if not _TOKEN.fullmatch(self._token):
            raise AuthenticationFailed(
                "there is no token, or it has characters that no token has",
                condition="amqp:invalid-field",
            )

    def respond(self, challenge: bytes) -> bytes:
        """Acknowledge the server's error (RFC 7628 §3.2.3), as the mechanism requires."""
        return b"\x01"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(***)"


class OAuthBearer(_BearerClient):
    """Client side of OAUTHBEARER (RFC 7628). The token never appears in a repr or a log.

    Args:
        token: The token, or an async function that gets one; it is called for each connection.
        user: User to act for, if the server expects one.
    """

    name = "OAUTHBEARER"

    def initial(self) -> bytes | None:
        """Return the only message of this mechanism."""
        user = self.user.replace("=", "=3D").replace(",", "=2C")
        acting = f"a={user}" if user else ""
        return f"n,{acting},\x01auth=Bearer {self._token}\x01\x01".encode()


class XOAuth2(_BearerClient):
    """Client side of XOAUTH2, the predecessor. The token never appears in a repr or a log.

    Args:
        token: The token, or an async function that gets one; it is called for each connection.
        user: User to whom the token belongs.
    """

    name = "XOAUTH2"

    def initial(self) -> bytes | None:
        """Return the only message of this mechanism."""
        return f"user={self.user}\x01auth=Bearer {self._token}\x01\x01".encode()


class BearerServer:
    """Server side of OAUTHBEARER and XOAUTH2; the application verifies the token.

    Args:
        name: ``OAUTHBEARER`` or ``XOAUTH2``.
        verify: Verifies tokens.
    """

    reveals = True

    def __init__(self, name: str, verify: VerifyToken) -> None:
        self.name = name
        self._verify = verify

    def begin(self) -> _BearerExchange:
        """Begin an exchange, whose refusal takes one step more."""
        return _BearerExchange(self.name, self._verify)

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Refuse; use the exchange of :meth:`begin` instead."""
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
            tokens = () if login.token is None else (login.token,)
            return Success(login.user, login.identity, tokens=tokens)
        self._failure = Failure("a token that is not valid, or not for this user", user)
        return Challenge(_REFUSED)


def _bearer(name: str, response: bytes) -> tuple[str, str] | None:
    """Return the user, empty if absent, and the token; None if *response* is malformed."""
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


class TokenPlainServer:
    """Server side of PLAIN whose password may be a token, as clients of RabbitMQ send one.

    Such a login is that of the token's subject, whatever name the client gives.

    Args:
        verify: Verifies tokens.
        passwords: PLAIN for other passwords; None refuses these.
    """

    name = "PLAIN"
    reveals = True

    def __init__(self, verify: VerifyToken, passwords: ServerMechanism | None) -> None:
        self._verify = verify
        self._passwords = passwords

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Verify ``authzid NUL authcid NUL token``, or else a password."""
        if response is None:
            return Challenge(b"")
        parts = response.split(b"\0")
        text = parts[-1].decode("ascii", "replace")
        if len(parts) == 3 and _TOKEN.fullmatch(text):
            login = await self._verify(text, peer)
            if login is not None:
                tokens = () if login.token is None else (login.token,)
                return Success(login.user, login.identity, tokens=tokens)
        if self._passwords is None:
            return Failure("a password that is no valid token")
        return await self._passwords.respond(response, peer)


class CbsLogin:
    """Client side of AMQPCBS: the login transfers the connection's tokens (CBS draft §4.2).

    Without tokens it is its predecessor MSSBCBS: the login has no user, and tokens are put on ``$cbs``
    afterwards.

    Args:
        tokens: Tokens, or an async function that gets them; it is called for each connection.
    """

    #: Tokens are sent unprotected.
    reveals = True

    def __init__(self, tokens: TokensSource = ()) -> None:
        self.name = "AMQPCBS" if tokens else "MSSBCBS"
        self._source = tokens
        #: Responses not sent yet.
        self._responses: list[bytes] = []

    async def prepare(self) -> None:
        """Get tokens, before a connection is made.

        Raises:
            AuthenticationFailed: There is no token, or one cannot be sent.
        """
        if self.name == "MSSBCBS":
            return
        tokens = await self._source() if callable(self._source) else self._source
        parts = [_part(each) for each in tokens]
        if not parts:
            raise AuthenticationFailed("there is no token", condition="amqp:invalid-field")
        self._responses = [b""]
        for part in parts:
            if self._responses[-1] and len(self._responses[-1]) + len(part) > _RESPONSE_MAX:
                self._responses.append(b"")
            self._responses[-1] += part
        self._responses[-1] += _END

    def initial(self) -> bytes | None:
        """Return the first response, with as many tokens as fit a frame."""
        return self._responses.pop(0) if self._responses else b""

    def respond(self, challenge: bytes) -> bytes:
        """Return the next response; challenges have no content (§4.2.3)."""
        return self._responses.pop(0) if self._responses else b""

    def __repr__(self) -> str:
        return f"CbsLogin({'***' if self._source else ''})"


def _part(token: BearerToken) -> bytes:
    """Return a token as an entry of the list: ``TYPE NUL TOKEN NUL``."""
    part = f"{token.type}\0{token.text}\0".encode()
    if not token.text or part.count(b"\0") != 2 or len(part) + len(_END) > _RESPONSE_MAX:
        raise AuthenticationFailed(
            "a token is empty, has NUL in it, or is too large for AMQPCBS",
            condition="amqp:invalid-field",
        )
    return part


class CbsLoginServer:
    """Server side of AMQPCBS: if all tokens are valid, the connection gets them, without a user name.

    Args:
        cbs: Validates tokens.
        limits: Maximum number and sizes of tokens.
    """

    name = "AMQPCBS"
    reveals = True

    def __init__(self, cbs: Cbs, limits: Limits) -> None:
        self._cbs = cbs
        self._limits = limits

    def begin(self) -> _CbsExchange:
        """Begin an exchange, since tokens may take several responses."""
        return _CbsExchange(self._cbs, self._limits)

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Refuse; use the exchange of :meth:`begin` instead."""
        return Failure("a login with tokens is one exchange")


class _CbsExchange:
    def __init__(self, cbs: Cbs, limits: Limits) -> None:
        self._cbs = cbs
        self._limits = limits
        self._rest = b""
        self._found: list[Token] = []

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        rest = self._rest + (response or b"")
        while rest and not (rest.startswith(_END) and self._found):
            kind, _, more = rest.partition(b"\0")
            text, end, more = more.partition(b"\0")
            if not end:
                break
            if len(self._found) >= self._limits.tokens_max:
                return Failure("more tokens than a connection may have")
            try:
                token = await self._cbs.validate(
                    kind.decode() or None, text.decode(), None, self._limits
                )
            except UnicodeDecodeError:
                return Failure("a malformed AMQPCBS response")
            except TokenRefused as error:
                return Failure(f"a token was refused: {error.description}")
            self._found.append(token)
            rest = more
        if rest == _END:
            return Success(None, tokens=tuple(self._found))
        if len(rest) > self._limits.token_size_max + _KIND_MAX or rest.startswith(_END):
            return Failure("a malformed AMQPCBS response")
        self._rest = rest
        return Challenge(b"")


class MssbCbsServer:
    """Server side of MSSBCBS: admits all clients without a user name, with tokens to follow on ``$cbs``.

    Offered where tokens may be sent.
    """

    name = "MSSBCBS"
    reveals = True

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Accept any response."""
        return Success(None)


def verified_by(cbs: Cbs, limits: Limits) -> VerifyToken:
    """Return a function that verifies logins by *cbs*; the user is the subject of the token."""

    async def verify(text: str, peer: Peer) -> Login | None:
        try:
            token = await cbs.validate(None, text, None, limits)
        except TokenRefused:
            return None
        return Login(token.subject, token=token)

    return verify
