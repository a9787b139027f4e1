"""Tokens that give rights for a while: what is in them, and those that a connection has.

A token is put on a connection for an *audience*: a resource and everything below it. It is judged
once, when it is put; what it gives is plain data from then on (:class:`Token`), looked at by
:func:`amqp_rt.security.access.decide`. A newer token for the same audience takes the place of the
older one whole, so that a right that it does not give any more is gone.
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

#: What the draft has who takes tokens offer in its open (CBS draft §3.1).
CBS_CAPABILITY: Final = "AMQP_CBS_V1_0"
#: Token types by the names that deployed clients and the drafts use.
SAS_TYPE: Final = "servicebus.windows.net:sastoken"
JWT_TYPES: Final = frozenset({"jwt", "amqp:jwt"})
SWT_TYPES: Final = frozenset({"swt", "amqp:swt"})

#: Rights at an audience: everywhere in it, or by pattern of address within it.
Granted: TypeAlias = Rights | Mapping[str, Rights]
#: ``rights(claims, address)``, a plain function or an async one: what a good token gives at
#: *address*, which is empty if the token was put for everything.
RightsPolicy: TypeAlias = Callable[[Mapping[str, Any], str], Granted | Awaitable[Granted]]

_SAS_PREFIX: Final = "SharedAccessSignature "
#: Digits of a number of seconds.
_SECONDS_DIGITS_MAX: Final = 15
#: Wildcard patterns in what one token gives.
_GRANTS_MAX: Final = 100


class TokenRefused(AmqpError):
    """A token is not accepted. The sentence is for whoever put it and says no secret."""

    default_condition = "amqp:unauthorized-access"


class Claims(Struct, frozen=True, kw_only=True):
    """What a validator found in a good token."""

    #: Seconds since 1970, after which it gives nothing; ``inf`` for never.
    expires_at: float
    #: What the token itself says it is for, as :func:`scope_of` has it; None if it does not.
    scope: str | None = None
    #: In whose name it was made.
    subject: str | None = None
    #: What it gives, unless a policy says otherwise.
    rights: Granted = Rights.NONE
    #: Everything that it says.
    values: Mapping[str, Any] = {}


class Validator(Protocol):
    """Judges tokens of some types."""

    types: frozenset[str]

    async def validate(self, token: str, now: float) -> Claims:
        """What *token* says; *now* is in seconds since 1970.

        Raises:
            TokenRefused: It is malformed, not signed by whom we trust, or out of its time.
        """


class Token(Struct, frozen=True, kw_only=True):
    """A token that was accepted: what it gives, where, and until when."""

    #: The audience: a path in lower case, empty for everything.
    scope: str
    #: Patterns of addresses within the scope, cut at their wildcards, and rights.
    grants: tuple[tuple[tuple[str, ...], Rights], ...]
    expires_at: float
    subject: str | None = None
    #: Patterns that it is for by what it says itself, where it says no more (set-token); a newer token
    #: of the same scope and the same patterns takes its place.
    patterns: tuple[str, ...] = ()

    def rights(self, address: str) -> Rights:
        """What it gives at *address*."""
        found = Rights.NONE
        if covers(self.scope, address):
            for parts, rights in self.grants:
                if wild_match(parts, address):
                    found |= rights
        return found


class Tokens:
    """The tokens of one connection; they go with it (SE14).

    Args:
        limits: How many there may be.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: By audience: the token, and when it expires in the clock of ``expire``.
        self._kept: dict[tuple[str, ...], tuple[Token, float]] = {}
        #: Called when rights may have changed.
        self.on_changed: Callable[[], None] = _nothing

    def put(self, token: Token, expires: float) -> None:
        """Keep *token* until *expires*, instead of one for the same audience.

        Raises:
            TokenRefused: There are too many.
        """
        audience = (token.scope, *token.patterns)
        if audience not in self._kept and len(self._kept) >= self._limits.tokens_max:
            raise TokenRefused(
                f"the connection has {len(self._kept)} tokens already",
                condition="amqp:resource-limit-exceeded",
            )
        self._kept[audience] = token, expires
        self.on_changed()

    def drop(self, scope: str) -> bool:
        """Forget the token for an audience; whether there was one."""
        gone = self._kept.pop((scope,), None) is not None
        if gone:
            self.on_changed()
        return gone

    def expire(self, now: float) -> bool:
        """Forget what has expired; whether anything has."""
        gone = [each for each, (_, expires) in self._kept.items() if expires <= now]
        for each in gone:
            del self._kept[each]
        return bool(gone)

    @property
    def next_expiry(self) -> float:
        """When ``expire`` has something to do."""
        return min((expires for _, expires in self._kept.values()), default=inf)

    def rights(self, address: str) -> Rights:
        """What they give at *address*."""
        found = Rights.NONE
        for token, _ in self._kept.values():
            found |= token.rights(address)
        return found

    def anywhere(self) -> Rights:
        """What they give at some address or other."""
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
    """Nobody wants to know."""


class Cbs:
    """Which tokens are accepted, and what they give.

    ::

        Cbs([SasKeys({"app": key}), Jwt(jwks="https://login.example/keys", audience="shop")])

    Args:
        validators: One for each kind of token.
        rights: What a good token gives, instead of what its validator reads in it.
        clock: Whose wall clock says what has expired.
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

    async def judge(
        self,
        kind: str | None,
        text: str,
        audience: str | None,
        limits: Limits,
    ) -> Token:
        """What a token gives for *audience*.

        Args:
            kind: The type of the token; None leaves it to how it looks.
            text: The token.
            audience: What it is put for, a URI or an address; None for what it says itself.
            limits: Its size.

        Raises:
            TokenRefused: It is not accepted, or not for that audience.
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
            # Azure's own clients call their signatures "jwt"; what it looks like leaves no doubt, and
            # it is verified as what it is.
            kind = _looks_like(text)
        validator = self._validators.get(kind)
        if validator is None:
            raise TokenRefused(f"tokens of the type {kind!r:.60} are not taken here")
        claims = await validator.validate(text, now)
        # NaN is no time either: it compares with nothing.
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
    """An audience as it is compared: a path in lower case, without scheme, host and slashes around.

    Deployed clients write hosts and paths in either case, and one resource as ``sb://``,
    ``amqps://`` or ``https://``.
    """
    _, separator, rest = audience.partition("://")
    path = rest.partition("#")[0].partition("?")[0].partition("/")[2] if separator else audience
    return unquote(path).strip("/").lower()


def covers(scope: str, address: str) -> bool:
    """Whether *address* is the resource *scope*, or below it. The case of letters does not count."""
    if not scope:
        return True
    address = address.lower()
    return address == scope or address.startswith(f"{scope}/")


def granted_words(words: Iterable[str]) -> dict[str, Rights]:
    """Rights from the words of a claim: ``send``, or ``send:orders/*`` for some addresses only.

    Words that name no right are for somebody else.
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
    """The type of a token that comes without one."""
    if text.startswith(_SAS_PREFIX):
        return SAS_TYPE
    return "jwt" if text.count(".") == 2 and "=" not in text else "swt"


class BearerToken(Struct, frozen=True):
    """A token as its bearer has it.

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
    """A rule of shared access: its keys, and what a token that one of them signed gives.

    Args:
        keys: The keys as text, the present one and, while they change, the one before or after it.
        rights: What its tokens give.
        address: Where, if not everywhere: this address and what is below it.
    """

    keys: tuple[str, ...]
    rights: Rights = Rights.SEND | Rights.LISTEN
    address: str = ""

    def __repr__(self) -> str:
        return f"SasKey(***, {self.rights}, {self.address!r})"


class SasKeys:
    """Shared access signatures: ``SharedAccessSignature sr=…&sig=…&se=…&skn=…``.

    The signature is HMAC-SHA256 over the resource as it stands in the token, a line feed and the
    expiry; the key is the text of the rule's key, not what it would be decoded to.

    Args:
        rules: Name → key, or :class:`SasKey` for other rights than to send and listen.
    """

    types = frozenset({SAS_TYPE})

    def __init__(self, rules: Mapping[str, str | SasKey]) -> None:
        self._rules = {
            name: SasKey((rule,)) if isinstance(rule, str) else rule for name, rule in rules.items()
        }
        if any(not key for rule in self._rules.values() for key in rule.keys):
            raise ValueError("a key must not be empty: anybody could sign with it")
        # Nobody has this one: a rule that is not there takes as long.
        self._nobody = SasKey((secrets.token_urlsafe(32),))

    async def validate(self, token: str, now: float) -> Claims:
        """See :class:`Validator`."""
        if not token.startswith(_SAS_PREFIX):
            raise TokenRefused("the token is no SharedAccessSignature")
        fields: dict[str, str] = {}
        for part in token.removeprefix(_SAS_PREFIX).split("&"):
            name, _, value = part.partition("=")
            if name in fields:
                raise TokenRefused("the token says something twice")
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
    """Simple web tokens: form fields, the last of them ``HMACSHA256``, over those before it.

    ``ExpiresOn`` and ``Audience`` have to be there; ``Audience`` is the resource that the token is
    for. A field ``rights`` gives rights as :func:`granted_words` reads them.

    Args:
        key: The octets that sign.
        issuer: What ``Issuer`` has to say; None lets it say anything.
    """

    types = SWT_TYPES

    def __init__(self, key: bytes, *, issuer: str | None = None) -> None:
        if not key:
            raise ValueError("a key must not be empty: anybody could sign with it")
        self._key = key
        self._issuer = issuer

    async def validate(self, token: str, now: float) -> Claims:
        """See :class:`Validator`."""
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
            raise TokenRefused("the token says something twice")
        if self._issuer is not None and fields.get("Issuer") != self._issuer:
            raise TokenRefused("the token is from somebody else")
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
        raise TokenRefused("the token does not say in seconds when it expires")
    return float(text)


def sas_token(resource: str, name: str, key: str, expires_at: int) -> str:
    """A shared access signature.

    Args:
        resource: What it is for, a URI.
        name: Of the rule.
        key: Of the rule, as text.
        expires_at: Seconds since 1970.
    """
    encoded = _quoted(resource)
    digest = hmac.digest(key.encode(), f"{encoded}\n{expires_at}".encode(), "sha256")
    signature = _quoted(base64.b64encode(digest).decode())
    return f"{_SAS_PREFIX}sr={encoded}&sig={signature}&se={expires_at}&skn={_quoted(name)}"


def _quoted(text: str) -> str:
    return quote(text, safe="")
