"""Tokens that give rights for a time: their validation, and the tokens of a connection.

A token is put on a connection for an *audience*: a resource and everything below it. It is validated
once, when it is put; the result is plain data (:class:`Token`), read by
:func:`amqp_rt.security.access.decide`. A newer token for the same audience replaces the older one
completely, so rights that it no longer gives are withdrawn.
"""

from __future__ import annotations

import base64
import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qsl, quote, unquote

from msgspec import Struct

from ..addresses import wild_match, wild_parts
from ..clock import Clock, SystemClock
from ..errors import AmqpError
from ..limits import Limits, check_seconds
from .access import Rights, rights_of

#: Capability that a container which accepts tokens offers in its open (CBS draft §3.1).
CBS_CAPABILITY: Final = "AMQP_CBS_V1_0"
#: Token types by the names in deployed clients and in the drafts.
SAS_TYPE: Final = "servicebus.windows.net:sastoken"
JWT_TYPES: Final = frozenset({"jwt", "amqp:jwt"})
SWT_TYPES: Final = frozenset({"swt", "amqp:swt"})

#: Rights at an audience: in all of it, or by address pattern within it.
Granted: TypeAlias = Rights | Mapping[str, Rights]
#: ``rights(claims, address)``, a plain or an async function: the rights of a valid token at
#: *address*, which is empty if the token was put for everything.
RightsPolicy: TypeAlias = Callable[[Mapping[str, Any], str], Granted | Awaitable[Granted]]

_SAS_PREFIX: Final = "SharedAccessSignature "
#: Maximum number of digits of a time in seconds.
_SECONDS_DIGITS_MAX: Final = 15
#: Maximum number of address patterns in one token.
_GRANTS_MAX: Final = 100


class TokenRefused(AmqpError):
    """The token is not accepted. The text is sent to the peer that put it, and holds no secret."""

    default_condition = "amqp:unauthorized-access"


class Claims(Struct, frozen=True, kw_only=True):
    """Contents of a valid token, as its validator found them."""

    #: Seconds since 1970 at which its rights end; ``inf`` for never.
    expires_at: float
    #: Audience in the token itself, in the form of :func:`scope_of`; None without one.
    scope: str | None = None
    #: The subject for whom the token was issued.
    subject: str | None = None
    #: Rights that the token gives, unless a policy replaces them.
    rights: Granted = Rights.NONE
    #: All claims of the token.
    values: Mapping[str, Any] = {}


class Validator(Protocol):
    """Validator for tokens of some types."""

    types: frozenset[str]

    async def validate(self, token: str, now: float) -> Claims:
        """Return the claims of *token*; *now* is in seconds since 1970.

        Raises:
            TokenRefused: The token is malformed, not signed by a trusted key, or not valid at *now*.
        """


class Token(Struct, frozen=True, kw_only=True):
    """Accepted token: its rights, their addresses and their expiry."""

    #: The audience: a path in lower case, empty for everything.
    scope: str
    #: Address patterns within the scope, split at their wildcards, and rights.
    grants: tuple[tuple[tuple[str, ...], Rights], ...]
    expires_at: float
    subject: str | None = None
    #: Address patterns of the token's own claims, if nothing else determines its audience (set-token);
    #: a newer token of the same scope and the same patterns replaces it.
    patterns: tuple[str, ...] = ()

    def rights(self, address: str) -> Rights:
        """Return the rights at *address*."""
        found = Rights.NONE
        if covers(self.scope, address):
            for parts, rights in self.grants:
                if wild_match(parts, address):
                    found |= rights
        return found


class Tokens:
    """Tokens of one connection, dropped with it.

    Args:
        limits: Maximum number of tokens.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: By audience: the token, and its expiry on the clock of :meth:`expire`.
        self._kept: dict[tuple[str, ...], tuple[Token, float]] = {}
        #: Called when rights may have changed.
        self.on_changed: Callable[[], None] = _nothing

    def put(self, token: Token, expires: float) -> None:
        """Keep *token* until *expires*, replacing one for the same audience.

        Raises:
            TokenRefused: The connection has too many tokens.
        """
        audience = (token.scope, *token.patterns)
        if audience not in self._kept and len(self._kept) >= self._limits.tokens_max:
            raise TokenRefused(
                f"the connection has {len(self._kept)} tokens already",
                condition="amqp:resource-limit-exceeded",
            )
        self._kept[audience] = token, expires
        self.on_changed()

    def replace(self, token: Token, expires: float) -> None:
        """Keep *token* until *expires* in place of all others."""
        self._kept = {(token.scope, *token.patterns): (token, expires)}
        self.on_changed()

    def drop(self, scope: str) -> bool:
        """Remove the token for an audience; return whether there was one."""
        gone = self._kept.pop((scope,), None) is not None
        if gone:
            self.on_changed()
        return gone

    def expire(self, now: float) -> bool:
        """Remove expired tokens; return whether there were any."""
        gone = [each for each, (_, expires) in self._kept.items() if expires <= now]
        for each in gone:
            del self._kept[each]
        return bool(gone)

    @property
    def next_expiry(self) -> float:
        """Earliest expiry of a token, ``inf`` without tokens."""
        return min((expires for _, expires in self._kept.values()), default=inf)

    def rights(self, address: str) -> Rights:
        """Return the rights of all tokens at *address*."""
        found = Rights.NONE
        for token, _ in self._kept.values():
            found |= token.rights(address)
        return found

    def anywhere(self) -> Rights:
        """Return the rights of all tokens at any address."""
        found = Rights.NONE
        for token, _ in self._kept.values():
            for _, rights in token.grants:
                found |= rights
        return found

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<Tokens: {len(self._kept)}>"


def _nothing() -> None:
    """Do nothing; the default callback."""


class Cbs:
    """Validators of tokens, and the rights that tokens give.

    ::

        Cbs([SasKeys({"app": key}), Jwt(jwks="https://login.example/keys", audience="shop")])

    Args:
        validators: Validators, at most one for each type of token.
        rights: Computes the rights of a valid token, instead of those that its validator found.
        clock: Clock whose wall time decides expiry.
    """

    def __init__(
        self,
        validators: Iterable[Validator],
        *,
        rights: RightsPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self._rights = rights
        self._validators: dict[str, Validator] = {}
        for each in validators:
            for kind in each.types:
                if kind in self._validators:
                    raise ValueError(f"two validators for tokens of the type {kind!r}")
                self._validators[kind] = each

    async def validate(
        self,
        kind: str | None,
        text: str,
        audience: str | None,
        limits: Limits,
    ) -> Token:
        """Validate a token and return its rights for *audience*.

        Args:
            kind: Type of the token; None to detect it.
            text: The token.
            audience: URI or address that the token is put for; None to use the one in the token.
            limits: Maximum sizes of the token and the audience.

        Raises:
            TokenRefused: The token is not accepted, or not for that audience.
        """
        now = self.clock.wall()
        if len(text) > limits.token_size_max:
            raise TokenRefused(
                f"a token has at most {limits.token_size_max} characters",
                condition="amqp:resource-limit-exceeded",
            )
        if not text.isascii():
            raise TokenRefused("a token is plain ASCII", condition="amqp:invalid-field")
        if kind is None or text.startswith(_SAS_PREFIX):
            # Azure's own clients label their signatures "jwt". Detection by the prefix is safe, since the
            # token is then verified as a signature.
            kind = _looks_like(text)
        validator = self._validators.get(kind)
        if validator is None:
            raise TokenRefused(f"tokens of the type {kind!r:.60} are not taken here")
        claims = await validator.validate(text, now)
        # Written so that NaN, which compares false with everything, counts as expired.
        if not claims.expires_at > now:
            raise TokenRefused("the token has expired")
        scope = scope_of(audience) if audience is not None else claims.scope or ""
        if len(scope) > limits.name_max:
            raise TokenRefused("the audience is too long", condition="amqp:invalid-field")
        if claims.scope is not None and not covers(claims.scope, scope):
            raise TokenRefused("the token is for something else")
        given: Any = claims.rights
        if self._rights is not None:
            given = self._rights(claims.values, scope)
            if inspect.isawaitable(given):
                given = await given
        if isinstance(given, Rights):
            given = {"*": given}
        given = {pattern: rights for pattern, rights in given.items() if rights}
        if not given:
            raise TokenRefused("the token gives no rights here")
        says_more = audience is not None or claims.scope is not None or "*" in given
        return Token(
            scope=scope,
            grants=tuple((wild_parts(pattern), rights) for pattern, rights in given.items()),
            expires_at=claims.expires_at,
            subject=claims.subject,
            patterns=() if says_more else tuple(sorted(given)),
        )

    def __repr__(self) -> str:
        return f"<Cbs: {', '.join(sorted(self._validators))}>"


def scope_of(audience: str) -> str:
    """Return an audience in normal form: a path in lower case, without scheme, host and outer slashes.

    Deployed clients write hosts and paths in either case, and one resource as ``sb://``,
    ``amqps://`` or ``https://``.
    """
    _, separator, rest = audience.partition("://")
    path = rest.partition("#")[0].partition("?")[0].partition("/")[2] if separator else audience
    return unquote(path).strip("/").lower()


def covers(scope: str, address: str) -> bool:
    """Return whether *address* is the resource *scope* or below it, ignoring case."""
    if not scope:
        return True
    address = address.lower()
    return address == scope or address.startswith(f"{scope}/")


def granted_words(words: Iterable[str]) -> dict[str, Rights]:
    """Return the rights in the words of a claim: ``send``, or ``send:orders/*`` for some addresses only.

    Words that name no right are ignored: they may be meant for other services.
    """
    found: dict[str, Rights] = {}
    for word in words:
        right, colon, pattern = word.partition(":")
        rights = rights_of([right])
        if rights and (pattern or not colon) and len(found) < _GRANTS_MAX:
            pattern = pattern or "*"
            found[pattern] = found.get(pattern, Rights.NONE) | rights
    return found


def _looks_like(text: str) -> str:
    """Return the type of a token by its form."""
    if text.startswith(_SAS_PREFIX):
        return SAS_TYPE
    return "jwt" if text.count(".") == 2 and "=" not in text else "swt"


class BearerToken(Struct, frozen=True):
    """Token as a client holds it.

    Args:
        text: The token.
        expires_at: Seconds since 1970; None if that is not known.
        type: ``"jwt"``, ``"servicebus.windows.net:sastoken"``, …
    """

    text: str
    expires_at: float | None = None
    type: str = "jwt"

    def __post_init__(self) -> None:
        if self.expires_at is not None:
            check_seconds("expires_at", self.expires_at)

    def __repr__(self) -> str:
        return f"BearerToken(***, {self.expires_at}, {self.type!r})"


class SasKey(Struct, frozen=True):
    """Rule of shared access: its keys, and the rights of tokens signed with one of them.

    Args:
        keys: The keys as text: the current one and, during a key rotation, the previous or next one.
        rights: Rights that its tokens give.
        address: Address at and below which they apply; by default everywhere.
    """

    keys: tuple[str, ...]
    rights: Rights = Rights.SEND | Rights.LISTEN
    address: str = ""

    def __repr__(self) -> str:
        return f"SasKey(***, {self.rights}, {self.address!r})"


class SasKeys:
    """Validator of shared access signatures: ``SharedAccessSignature sr=…&sig=…&se=…&skn=…``.

    The signature is HMAC-SHA256 over the resource as encoded in the token, a line feed and the
    expiry; the HMAC key is the text of the rule's key, not decoded from Base64.

    Args:
        rules: Name → key, or :class:`SasKey` for other rights than to send and listen.
    """

    types = frozenset({SAS_TYPE})

    def __init__(self, rules: Mapping[str, str | SasKey]) -> None:
        self._rules = {
            name: SasKey((rule,)) if isinstance(rule, str) else rule for name, rule in rules.items()
        }
        if any(not key for rule in self._rules.values() for key in rule.keys):
            raise ValueError("a key must not be empty: any client could sign with it")
        # A random rule for unknown names, so that they take as long as known ones.
        self._nobody = SasKey((secrets.token_urlsafe(32),))

    async def validate(self, token: str, now: float) -> Claims:
        """Validate *token*; see :meth:`Validator.validate`."""
        if not token.startswith(_SAS_PREFIX):
            raise TokenRefused("the token is no SharedAccessSignature")
        fields: dict[str, str] = {}
        for part in token.removeprefix(_SAS_PREFIX).split("&"):
            name, _, value = part.partition("=")
            if name in fields:
                raise TokenRefused("the token contains a field twice")
            fields[name] = value
        if set(fields) != {"sr", "sig", "se", "skn"}:
            raise TokenRefused("a SharedAccessSignature has sr, sig, se and skn")
        expires_at = _seconds(fields["se"])
        name = unquote(fields["skn"])
        known = self._rules.get(name)
        rule = known or self._nobody
        signed = f"{fields['sr']}\n{fields['se']}".encode()
        given = unquote(fields["sig"]).encode()
        right = False
        for key in rule.keys:
            digest = hmac.digest(key.encode(), signed, "sha256")
            right |= hmac.compare_digest(base64.b64encode(digest), given)
        if known is None or not right:
            raise TokenRefused("the token is not signed by a key that is known here")
        scope = scope_of(unquote(fields["sr"]))
        if not covers(scope_of(rule.address), scope):
            raise TokenRefused("the key is for something else")
        return Claims(
            expires_at=expires_at,
            scope=scope,
            subject=name,
            rights=rule.rights,
            values={"sr": unquote(fields["sr"]), "skn": name, "se": expires_at},
        )

    def __repr__(self) -> str:
        return f"<SasKeys: {', '.join(sorted(self._rules))}>"


class Swt:
    """Validator of simple web tokens: form fields, of which the last, ``HMACSHA256``, signs the others.

    ``ExpiresOn`` and ``Audience`` are required; ``Audience`` is the resource that the token is
    for. A field ``rights`` gives rights in the form of :func:`granted_words`.

    Args:
        key: Octets of the HMAC key.
        issuer: Required value of ``Issuer``; None accepts any.
    """

    types = SWT_TYPES

    def __init__(self, key: bytes, *, issuer: str | None = None) -> None:
        if not key:
            raise ValueError("a key must not be empty: any client could sign with it")
        self._key = key
        self._issuer = issuer

    async def validate(self, token: str, now: float) -> Claims:
        """Validate *token*; see :meth:`Validator.validate`."""
        signed, separator, signature = token.rpartition("&HMACSHA256=")
        digest = base64.b64encode(hmac.digest(self._key, signed.encode(), "sha256"))
        if not separator or not hmac.compare_digest(digest, unquote(signature).encode()):
            raise TokenRefused("the token is not signed by the key that is known here")
        try:
            pairs = parse_qsl(signed, strict_parsing=True, max_num_fields=_GRANTS_MAX)
        except ValueError:
            raise TokenRefused("the token is no list of fields") from None
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise TokenRefused("the token contains a field twice")
        if self._issuer is not None and fields.get("Issuer") != self._issuer:
            raise TokenRefused("the token has another issuer")
        if not fields.get("Audience"):
            raise TokenRefused("the token has no Audience")
        return Claims(
            expires_at=_seconds(fields.get("ExpiresOn", "")),
            scope=scope_of(fields["Audience"]),
            subject=fields.get("Issuer"),
            rights=granted_words(fields.get("rights", "").replace(",", " ").split()),
            values=fields,
        )

    def __repr__(self) -> str:
        return "Swt(***)"


def _seconds(text: str) -> float:
    if not (text.isascii() and text.isdecimal() and len(text) <= _SECONDS_DIGITS_MAX):
        raise TokenRefused("the token's expiry is not a number of seconds")
    return float(text)


def sas_token(resource: str, name: str, key: str, expires_at: int) -> str:
    """Return a shared access signature.

    Args:
        resource: URI that it is for.
        name: Name of the rule.
        key: Key of the rule, as text.
        expires_at: Expiry in seconds since 1970.
    """
    encoded = _quoted(resource)
    digest = hmac.digest(key.encode(), f"{encoded}\n{expires_at}".encode(), "sha256")
    signature = _quoted(base64.b64encode(digest).decode())
    return f"{_SAS_PREFIX}sr={encoded}&sig={signature}&se={expires_at}&skn={_quoted(name)}"


def _quoted(text: str) -> str:
    return quote(text, safe="")
