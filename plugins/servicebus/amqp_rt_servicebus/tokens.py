"""Tokens of a namespace: shared access signatures and web tokens, and the rights that they give.

The same tokens are put at ``$cbs`` and sent in the headers of the administration.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from msgspec.structs import replace

from amqp_rt import Cbs, Rights, SasKeys
from amqp_rt import SasKey as Policy
from amqp_rt.clock import Clock, SystemClock
from amqp_rt.limits import Limits
from amqp_rt.security.tokens import (
    SAS_TYPE,
    Claims,
    Token,
    TokenRefused,
    Validator,
    covers,
    scope_of,
)

from .addresses import MANAGEMENT
from .administration import AccessRefused
from .declarations import Right, SasKey

#: Shared access policies by name, each list with the address at and below which they apply.
Policies: TypeAlias = tuple[str, Mapping[str, SasKey]]

#: Name and key of the policy that a namespace has unless others are given, as the emulator has it.
DEFAULT_POLICY: Final = "RootManageSharedAccessKey"
DEFAULT_KEY: Final = "SAS_KEY_VALUE"

#: Roles of Azure in the claim ``roles``, and their rights.
_ROLES: Final[Mapping[str, Rights]] = {
    f"azure {service} data {role}": rights
    for service in ("service bus", "event hubs")
    for role, rights in (
        ("owner", Rights.MANAGE),
        ("sender", Rights.SEND),
        ("receiver", Rights.LISTEN),
    )
}
#: Roles of one token that are read.
_ROLES_MAX: Final = 100
_RIGHTS: Final[Mapping[Right, Rights]] = {
    "Send": Rights.SEND,
    "Listen": Rights.LISTEN,
    "Manage": Rights.MANAGE,
}
_PREFIX: Final = "SharedAccessSignature "


def rights_of_key(key: SasKey) -> Rights:
    """Return the rights of tokens that are signed with *key*."""
    found = Rights.NONE
    for right in key.rights:
        found |= _RIGHTS[right]
    return found


class PolicyKeys:
    """Validator of shared access signatures with the keys of a namespace and of its entities.

    Args:
        policies: Returns the policies that apply at an address, which is a path in lower case: those of
            the namespace first.
    """

    types = frozenset({SAS_TYPE})

    def __init__(self, policies: Callable[[str], Iterable[Policies]]) -> None:
        self._policies = policies

    async def validate(self, token: str, now: float) -> Claims:
        """Return the claims of *token*.

        Raises:
            TokenRefused: It is malformed, or not signed by a key that applies to its resource.
        """
        fields = _fields_of(token)
        name = unquote(fields.get("skn", ""))
        scope = entity_of(resource_of(unquote(fields.get("sr", ""))))
        rules = [
            (address, policies[name])
            for address, policies in self._policies(scope)
            if name in policies
        ]
        for address, key in rules[:-1]:
            try:
                return await _checked(token, now, name, address, key)
            except TokenRefused:
                # Policies of an entity and of its namespace may share a name.
                continue
        if not rules:
            # A name that is not known takes as long as one that is, and has the same answer.
            return await SasKeys({}).validate(token, now)
        address, key = rules[-1]
        return await _checked(token, now, name, address, key)


async def _checked(token: str, now: float, name: str, address: str, key: SasKey) -> Claims:
    keys = (key.key, key.secondary) if key.secondary else (key.key,)
    claims = await SasKeys({name: Policy(keys, rights_of_key(key))}).validate(token, now)
    scope = entity_of(resource_of(str(claims.values["sr"])))
    if not covers(address, scope):
        raise TokenRefused(f"the key {name!r:.100} is for {address!r:.300} only")
    return replace(claims, scope=scope)


def _fields_of(token: str) -> dict[str, str]:
    fields = token.removeprefix(_PREFIX).split("&", 4)
    return dict(each.partition("=")[::2] for each in fields)


def resource_of(text: str) -> str:
    """Return the path of a resource, in lower case and empty for the whole namespace.

    JavaScript writes ``host:port/entity`` without a scheme for the targets of forwarding.
    """
    # Names of entities have no colon, which precedes the port of a host.
    if "://" not in text and ":" in text.partition("/")[0]:
        text = f"sb://{text}"
    return scope_of(text)


class RoleTokens:
    """Validator of web tokens whose claim ``roles`` names roles of Azure, which give their rights.

    Args:
        validator: Validator of the tokens themselves.
    """

    def __init__(self, validator: Validator) -> None:
        self._validator = validator
        self.types = validator.types

    async def validate(self, token: str, now: float) -> Claims:
        """Return the claims of *token*, with the rights of its roles, if it has any.

        Raises:
            TokenRefused: As for the validator.
        """
        claims = await self._validator.validate(token, now)
        roles = claims.values.get("roles")
        if not isinstance(roles, list):
            return claims
        rights = Rights.NONE
        for role in roles[:_ROLES_MAX]:
            if isinstance(role, str):
                rights |= _ROLES.get(role.lower(), Rights.NONE)
        return replace(claims, rights=rights)


class NamespaceCbs(Cbs):
    """Tokens of a namespace: one that is put for a management node is put for its entity.

    JavaScript puts a token for ``orders/$management``, and sends requests about ``orders`` there.
    """

    async def validate(
        self, kind: str | None, text: str, audience: str | None, limits: Limits
    ) -> Token:
        """Validate a token and return its rights; see :meth:`amqp_rt.Cbs.validate`.

        Raises:
            TokenRefused: The token is not accepted, or not for that audience.
        """
        if audience is not None:
            audience = entity_of(scope_of(audience))
        return await super().validate(kind, text, audience, limits)


def entity_of(scope: str) -> str:
    """Return the entity of *scope*, which may be its management node."""
    return scope.removesuffix(f"/{MANAGEMENT}")


def cbs_of(
    policies: Callable[[str], Iterable[Policies]],
    validators: Iterable[Validator] = (),
    *,
    clock: Clock | None = None,
) -> Cbs:
    """Return the tokens that are accepted at ``$cbs``.

    Args:
        policies: As for :class:`PolicyKeys`.
        validators: Validators of web tokens.
        clock: Clock of their expiry; by default that of the system, since clients issue their tokens by it,
            whatever time it is for messages.
    """
    return NamespaceCbs(
        [PolicyKeys(policies), *(RoleTokens(each) for each in validators)],
        clock=clock or SystemClock(),
    )


class TokenAuthorizer:
    """Judge of the tokens in requests to the administration (``administration.Authorizer``).

    Args:
        policies: As for :class:`PolicyKeys`.
        validators: Validators of web tokens. Those that would have to fetch keys first refuse.
        clock: As for :func:`cbs_of`.
    """

    def __init__(
        self,
        policies: Callable[[str], Iterable[Policies]],
        validators: Iterable[Validator] = (),
        *,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._keys = PolicyKeys(policies)
        self._others = [RoleTokens(each) for each in validators]

    def rights(self, token: str, resource: str) -> frozenset[Right]:
        """Return the rights of *token* at *resource*.

        Raises:
            AccessRefused: The token is malformed, expired, not signed by a known key or for something else.
        """
        now = self._clock.wall()
        validators: list[Validator] = [self._keys] if token.startswith(_PREFIX) else [*self._others]
        refusal = "no validator takes a token of this kind"
        for validator in validators:
            try:
                claims = _at_once(validator.validate(token, now))
            except TokenRefused as error:
                refusal = error.description
                continue
            if not claims.expires_at > now:
                raise AccessRefused("the token has expired")
            return self._granted(claims, resource_of(resource))
        raise AccessRefused(refusal)

    def _granted(self, claims: Claims, scope: str) -> frozenset[Right]:
        if claims.scope is not None and not covers(claims.scope, scope):
            raise AccessRefused(f"the token is for {claims.scope!r:.300}, not for {scope!r:.300}")
        given = claims.rights
        if not isinstance(given, Rights):
            given = given.get("*", Rights.NONE)
        return frozenset(name for name, right in _RIGHTS.items() if right in given)


def _at_once(checking: Coroutine[Any, Any, Claims]) -> Claims:
    """Return the result of *checking*, which must not wait: requests are answered in one step.

    Raises:
        TokenRefused: It would wait, or raised this.
    """
    try:
        checking.send(None)
    except StopIteration as done:
        claims: Claims = done.value
        return claims
    checking.close()
    raise TokenRefused("the keys for the token are not known yet: configure them")
