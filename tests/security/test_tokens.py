"""Tokens: what is accepted, what is not, and what is in them."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from amqp_rt.limits import Limits
from amqp_rt.security.access import Rights
from amqp_rt.security.tokens import (
    SAS_TYPE,
    Cbs,
    Claims,
    SasKey,
    SasKeys,
    Swt,
    Token,
    TokenRefused,
    Tokens,
    covers,
    granted_words,
    sas_token,
    scope_of,
)

SEND, LISTEN, MANAGE = Rights.SEND, Rights.LISTEN, Rights.MANAGE
NOW = 1_600_000_000.0


class At:
    """A clock that stands."""

    def wall(self) -> float:
        return NOW

    def monotonic(self) -> float:
        return 0.0


LIMITS = Limits()


async def judged(cbs: Cbs, text: str, audience: str | None, kind: str | None = SAS_TYPE) -> Token:
    return await cbs.validate(kind, text, audience, LIMITS)


def keys(**options: Any) -> Cbs:
    rules: dict[str, str | SasKey] = {
        "app": "key-one",
        "both": SasKey(("old", "new"), SEND),
        "narrow": SasKey(("k",), MANAGE, "orders"),
    }
    return Cbs([SasKeys(rules)], clock=At(), **options)


@pytest.mark.req("SE15")
async def test_the_published_signatures(shared: Path) -> None:
    cases = json.loads((shared / "spec/azure/sas-vectors.json").read_text("utf-8"))["cases"]
    for case in cases:
        token = case["token"]
        assert sas_token(case["uri"], case["rule"], case["key"], case["expiry"]) == token
        validator = SasKeys({case["rule"]: case["key"]})
        claims = await validator.validate(token, 0.0)
        assert claims.expires_at == case["expiry"]
        assert claims.subject == case["rule"]
        assert claims.scope == scope_of(case["uri"])
        wrong = SasKeys({case["rule"]: case["key"] + "x"})
        with pytest.raises(TokenRefused):
            await wrong.validate(token, 0.0)


@pytest.mark.req("SE15")
@pytest.mark.parametrize("key", ["old", "new"])
async def test_either_key_of_a_rule_signs(key: str) -> None:
    token = await judged(keys(), sas_token("sb://h/q", "both", key, int(NOW) + 9), "sb://h/q")
    assert token.rights("q") == SEND


GOOD = sas_token("sb://h/q", "app", "key-one", int(NOW) + 9)


@pytest.mark.req("SE15", "SE10")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        GOOD.replace("SharedAccessSignature ", ""),
        GOOD.replace("SharedAccessSignature ", "sharedaccesssignature "),
        GOOD + "&se=1",
        GOOD + "&x=1",
        GOOD.replace("&skn=app", ""),
        GOOD.replace("se=", "se=+"),
        GOOD.replace("se=", "se=-"),
        GOOD.replace("se=", "se=0"),
        GOOD.replace("se=", "se=9999999999999999999"),
        GOOD.replace("sr=sb", "sr=SB"),
        GOOD.replace("sig=", "sig=A"),
        GOOD.replace("skn=app", "skn=nobody"),
        GOOD.replace("skn=app", "skn=both"),
        sas_token("sb://h/q", "app", "key-two", int(NOW) + 9),
        sas_token("sb://h/q", "app", "", int(NOW) + 9),
        sas_token("sb://h/q", "app", "key-one", int(NOW)),
        sas_token("sb://h/q", "app", "key-one", int(NOW) - 9),
        sas_token("sb://h/other", "app", "key-one", int(NOW) + 9),
        sas_token("sb://h/q/below", "app", "key-one", int(NOW) + 9),
        sas_token("sb://h/q", "narrow", "k", int(NOW) + 9),
        GOOD + "\n",
        "SharedAccessSignature " + "&" * 100,
        "SharedAccessSignature sr=\udcff&sig=&se=1&skn=app",
    ],
)
async def test_a_signature_that_is_not_accepted(text: str) -> None:
    with pytest.raises(TokenRefused) as caught:
        await judged(keys(), text, "sb://h/q")
    assert "key-one" not in str(caught.value)


@pytest.mark.req("SE10", "SE11")
async def test_a_token_is_for_a_resource_and_what_is_below() -> None:
    token = await judged(
        keys(), sas_token("sb://H/Q", "app", "key-one", int(NOW) + 9), "amqps://h/q/"
    )
    assert token.scope == "q"
    assert token.expires_at == NOW + 9
    for address, rights in {
        "q": SEND | LISTEN,
        "Q": SEND | LISTEN,
        "q/$DeadLetterQueue": SEND | LISTEN,
        "q/$management": SEND | LISTEN,
        "q2": Rights.NONE,
        "": Rights.NONE,
    }.items():
        assert token.rights(address) == rights
    narrower = await judged(keys(), sas_token("sb://h/", "app", "key-one", int(NOW) + 9), "q/x")
    assert (narrower.rights("q/x"), narrower.rights("q")) == (SEND | LISTEN, Rights.NONE)


@pytest.mark.parametrize(
    ("audience", "scope"),
    [
        ("sb://ns.example.com/Queue1", "queue1"),
        ("amqps://ns:5671/queue1/", "queue1"),
        ("https://ns/", ""),
        ("https://ns", ""),
        ("queue1", "queue1"),
        ("/queue1/", "queue1"),
        ("sb://ns/a%2Fb?x=1#y", "a/b"),
        ("", ""),
    ],
)
def test_audiences_are_compared_as_paths(audience: str, scope: str) -> None:
    assert scope_of(audience) == scope


def test_what_is_covered() -> None:
    assert covers("", "x")
    assert covers("a", "A/b")
    assert not covers("a", "ab")
    assert not covers("a/b", "a")


@pytest.mark.req("A16", "SE11")
@pytest.mark.parametrize("waits", [True, False])
async def test_the_application_says_what_a_token_gives(waits: bool) -> None:
    seen: list[tuple[Mapping[str, Any], str]] = []

    def policy(claims: Mapping[str, Any], address: str) -> Any:
        seen.append((claims, address))
        return {"q/*": MANAGE, "q": LISTEN, "r": SEND}

    async def slow(claims: Mapping[str, Any], address: str) -> Any:
        await trio.lowlevel.checkpoint()
        return policy(claims, address)

    token = await judged(keys(rights=slow if waits else policy), GOOD, "sb://h/q")
    assert token.rights("q") == LISTEN
    assert token.rights("q/a") == MANAGE
    assert token.rights("r") == Rights.NONE  # beyond the audience
    assert seen[0][1] == "q"
    assert seen[0][0]["skn"] == "app"
    with pytest.raises(TokenRefused, match="no rights"):
        await judged(keys(rights=lambda claims, address: Rights.NONE), GOOD, "q")


async def test_types_and_sizes() -> None:
    cbs = keys()
    # Azure's clients say jwt of a signature; the other way round nobody is fooled.
    for kind in (None, "jwt", "saml"):
        assert (await judged(cbs, GOOD, "q", kind)).rights("q")
    with pytest.raises(TokenRefused, match="no SharedAccessSignature"):
        await judged(cbs, "a.b.c", "q", SAS_TYPE)
    with pytest.raises(TokenRefused, match="not taken here"):
        await judged(cbs, "a.b.c", "q", "jwt")
    with pytest.raises(TokenRefused, match="not taken here"):
        await judged(cbs, "a.b.c", "q", None)
    with pytest.raises(TokenRefused, match="not taken here"):
        await judged(cbs, "a=b", "q", None)
    with pytest.raises(TokenRefused) as caught:
        await judged(cbs, GOOD, "sb://h/q/" + "x" * LIMITS.name_max)
    assert caught.value.condition == "amqp:invalid-field"
    with pytest.raises(ValueError, match="two validators"):
        Cbs([SasKeys({}), SasKeys({})])
    with pytest.raises(ValueError, match="empty"):
        SasKeys({"a": ""})
    assert "key-one" not in repr(cbs) + repr(SasKeys({"a": "key-one"})) + repr(SasKey(("key-one",)))


SWT_KEY = b"0123456789abcdef"


def swt(key: bytes = SWT_KEY, **fields: str) -> str:
    text = "&".join(f"{quote(name)}={quote(value, safe='')}" for name, value in fields.items())
    signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
    return f"{text}&HMACSHA256={quote(signature, safe='')}"


FIELDS = {
    "Issuer": "us",
    "Audience": "http://h/orders",
    "ExpiresOn": str(int(NOW) + 9),
    "rights": "listen,send:orders/in",
}


@pytest.mark.req("SE15")
async def test_simple_web_tokens() -> None:
    cbs = Cbs([Swt(SWT_KEY, issuer="us")], clock=At())
    token = await judged(cbs, swt(**FIELDS), None, "amqp:swt")
    assert token.scope == "orders"
    assert token.rights("orders") == LISTEN
    assert token.rights("orders/in") == LISTEN | SEND
    assert token.rights("x") == Rights.NONE
    assert token.expires_at == NOW + 9
    assert repr(Swt(SWT_KEY)) == "Swt(***)"
    with pytest.raises(ValueError, match="empty"):
        Swt(b"")


@pytest.mark.req("SE15")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "HMACSHA256=",
        swt(**FIELDS).rpartition("&")[0],
        swt(b"another", **FIELDS),
        swt(**FIELDS) + "&rights=manage",
        "rights=manage&" + swt(**FIELDS),
        swt(**{**FIELDS, "Issuer": "them"}),
        swt(**{**FIELDS, "ExpiresOn": "soon"}),
        swt(**{**FIELDS, "ExpiresOn": str(int(NOW))}),
        swt(**{**FIELDS, "Audience": ""}),
        swt(**{name: value for name, value in FIELDS.items() if name != "Audience"}),
        swt(**{name: value for name, value in FIELDS.items() if name != "ExpiresOn"}),
        swt(**{**FIELDS, "rights": "everything"}),
        swt(**{f"x{number}": "1" for number in range(200)}),
    ],
)
async def test_a_simple_web_token_that_is_not_accepted(text: str) -> None:
    with pytest.raises(TokenRefused):
        await judged(Cbs([Swt(SWT_KEY, issuer="us")], clock=At()), text, None, "swt")


def test_words_of_rights() -> None:
    assert granted_words(["send", "Listen", "send:a/*", "manage:b", "openid", "send:"]) == {
        "*": SEND | LISTEN,
        "a/*": SEND,
        "b": MANAGE,
    }
    assert len(granted_words([f"send:{number}" for number in range(1000)])) == 100


def token_of(scope: str, rights: Rights) -> Token:
    return Token(scope=scope, grants=((("", ""), rights),), expires_at=0.0)


@pytest.mark.req("SE12", "SE14")
def test_a_newer_token_takes_the_place_of_an_older_one_whole() -> None:
    changes: list[None] = []
    tokens = Tokens(Limits(tokens_max=2))
    tokens.on_changed = lambda: changes.append(None)
    assert tokens.anywhere() == Rights.NONE
    tokens.put(token_of("q", MANAGE), 10.0)
    tokens.put(token_of("q", LISTEN), 20.0)
    assert tokens.rights("q") == tokens.anywhere() == LISTEN
    tokens.put(token_of("r", SEND), 5.0)
    assert tokens.next_expiry == 5.0
    assert not tokens.expire(4.9)
    assert tokens.expire(5.0)
    assert tokens.rights("r") == Rights.NONE
    assert tokens.rights("q") == LISTEN
    assert tokens.drop("q")
    assert not tokens.drop("q")
    assert (len(tokens), len(changes), tokens.next_expiry) == (0, 4, float("inf"))


def test_claims_say_nothing_by_themselves() -> None:
    assert Claims(expires_at=1.0).rights == Rights.NONE
