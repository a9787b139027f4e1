"""Tokens of a namespace: keys of the namespace and of its entities, roles, and what they may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import trio
from amqp_rt_servicebus.administration import AccessRefused
from amqp_rt_servicebus.declarations import SasKey
from amqp_rt_servicebus.tokens import (
    Policies,
    PolicyKeys,
    RoleTokens,
    TokenAuthorizer,
    cbs_of,
)

from amqp_rt import Rights
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.security.tokens import SAS_TYPE, Claims, TokenRefused, sas_token

NOW = 1_700_000_000
NAMESPACE = {"root": SasKey("all", secondary="old"), "app": SasKey("of-all", rights=("Send",))}
ORDERS = {"app": SasKey("of-orders", rights=("Listen",))}


class Clock:
    """A clock that stands still."""

    def wall(self) -> float:
        return NOW

    def monotonic(self) -> float:
        return 0.0


def policies(address: str) -> Iterable[Policies]:
    yield "", NAMESPACE
    if address == "orders" or address.startswith("orders/"):
        yield "orders", ORDERS


def token(resource: str, name: str, key: str, lives_s: int = 60) -> str:
    return sas_token(resource, name, key, NOW + lives_s)


async def claims(text: str) -> Claims:
    return await PolicyKeys(policies).validate(text, NOW)


# --- Shared access signatures ------------------------------------------------------------------


@pytest.mark.parametrize("key", ["all", "old"])
async def test_both_keys_of_a_policy_sign(key: str) -> None:
    found = await claims(token("sb://h:1/", "root", key))
    assert (found.scope, found.subject) == ("", "root")
    assert found.rights == Rights.MANAGE | Rights.SEND | Rights.LISTEN


@pytest.mark.parametrize(
    ("resource", "key", "rights"),
    [
        ("sb://h/orders", "of-orders", Rights.LISTEN),
        ("sb://h/Orders/$management", "of-orders", Rights.LISTEN),
        ("sb://h/orders/subscriptions/s", "of-orders", Rights.LISTEN),
        ("h:1/orders", "of-all", Rights.SEND),
        ("sb://h/others", "of-all", Rights.SEND),
    ],
)
async def test_a_policy_of_an_entity_may_have_the_name_of_one_of_its_namespace(
    resource: str, key: str, rights: Rights
) -> None:
    assert (await claims(token(resource, "app", key))).rights == rights


@pytest.mark.parametrize(
    ("resource", "name", "key"),
    [
        ("sb://h/", "app", "of-orders"),
        ("sb://h/others", "app", "of-orders"),
        ("sb://h/ordersmore", "app", "of-orders"),
        ("sb://h/orders", "nobody", "all"),
        ("sb://h/orders", "root", "wrong"),
    ],
)
async def test_a_key_is_for_its_entity_only(resource: str, name: str, key: str) -> None:
    with pytest.raises(TokenRefused):
        await claims(token(resource, name, key))


@pytest.mark.parametrize(
    "text", ["", "SharedAccessSignature ", "SharedAccessSignature sr=&skn=&sig="]
)
async def test_a_malformed_signature_is_refused(text: str) -> None:
    with pytest.raises(TokenRefused):
        await claims(text)


async def test_a_token_for_a_management_node_is_one_for_its_entity() -> None:
    cbs = cbs_of(policies, clock=Clock())
    text = token("sb://h/orders/$management", "app", "of-orders")
    found = await cbs.validate(SAS_TYPE, text, "sb://h/Orders/$management", DEFAULT_LIMITS)
    assert found.rights("orders") == Rights.LISTEN
    assert found.rights("orders/$deadletterqueue") == Rights.LISTEN
    assert found.rights("others") == Rights.NONE


# --- Roles -------------------------------------------------------------------------------------


class Issued:
    """Validator that takes every token as one with some claims; it may have to wait for keys."""

    types = frozenset({"jwt"})

    def __init__(self, *, waits: bool = False, **values: Any) -> None:
        self._waits = waits
        self._claims = Claims(expires_at=NOW + 60, rights=Rights.SEND, values=values)

    async def validate(self, token: str, now: float) -> Claims:
        if self._waits:
            await trio.lowlevel.checkpoint()
        return self._claims


@pytest.mark.parametrize(
    ("values", "rights"),
    [
        ({}, Rights.SEND),
        ({"roles": "Azure Service Bus Data Owner"}, Rights.SEND),
        ({"roles": []}, Rights.NONE),
        ({"roles": ["Azure Service Bus Data Receiver", "Reader", 1]}, Rights.LISTEN),
        (
            {"roles": ["azure event hubs data sender", "Azure Service Bus Data Receiver"]},
            Rights.SEND | Rights.LISTEN,
        ),
        ({"roles": ["Other"] * 100 + ["Azure Service Bus Data Owner"]}, Rights.NONE),
    ],
)
async def test_roles_give_their_rights(values: dict[str, Any], rights: Rights) -> None:
    assert (await RoleTokens(Issued(**values)).validate("", NOW)).rights == rights


# --- Administration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "name", "key", "rights"),
    [
        ("https://h/", "root", "all", {"Manage", "Send", "Listen"}),
        ("https://h/orders", "root", "old", {"Manage", "Send", "Listen"}),
        ("https://h/orders", "app", "of-orders", {"Listen"}),
    ],
)
def test_requests_have_the_rights_of_their_key(
    resource: str, name: str, key: str, rights: set[str]
) -> None:
    authorizer = TokenAuthorizer(policies, clock=Clock())
    assert authorizer.rights(token(resource, name, key), "https://h/orders") == rights


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (token("https://h/others", "root", "all"), "is for 'others', not for 'orders'"),
        (token("https://h/", "root", "all", 0), "has expired"),
        (token("https://h/", "root", "wrong"), "not signed"),
        ("a.web.token", "no validator takes a token of this kind"),
    ],
)
def test_requests_are_refused(text: str, said: str) -> None:
    with pytest.raises(AccessRefused, match=said):
        TokenAuthorizer(policies, clock=Clock()).rights(text, "https://h/orders")


def test_requests_do_not_wait_for_keys_of_web_tokens() -> None:
    issued = Issued(waits=True, roles=["Azure Service Bus Data Owner"])
    authorizer = TokenAuthorizer(policies, [issued], clock=Clock())
    with pytest.raises(AccessRefused, match="not known yet"):
        authorizer.rights("a.web.token", "https://h/orders")
