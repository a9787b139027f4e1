"""Rules, and the decision that every protocol asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amqp_rt.events import Peer
from amqp_rt.security.access import (
    Access,
    Rights,
    Rule,
    SettingsError,
    decide,
    decide_anywhere,
    granted,
)

SEND, LISTEN, MANAGE, NONE = Rights.SEND, Rights.LISTEN, Rights.MANAGE, Rights.NONE

RULES = Access(
    [
        Rule("orders", SEND, users=("shop",)),
        Rule("orders/*", SEND | LISTEN, groups=("staff",)),
        Rule("*/private", LISTEN, users=("eve",)),
        Rule("news", LISTEN, users=("*",)),
        Rule("public/*", LISTEN, anonymous=True),
        Rule("*", MANAGE, users=("root",)),
        Rule("only/there", SEND, users=("shop",), virtual_host="vh"),
    ],
    groups={"staff": ["ann", "bob"]},
)


@pytest.mark.req("SE11", "SE17")
@pytest.mark.parametrize(
    ("user", "address", "rights"),
    [
        ("shop", "orders", SEND),
        ("shop", "orders/1", NONE),
        ("shop", "Orders", NONE),
        ("shop", "orders*", NONE),
        ("ann", "orders/1", SEND | LISTEN),
        ("ann", "orders/1/x", SEND | LISTEN),
        ("ann", "orders", NONE),
        ("bob", "orders/", SEND | LISTEN),
        ("eve", "a/private", LISTEN),
        ("eve", "a/private/x", NONE),
        ("anybody", "news", LISTEN),
        (None, "news", NONE),
        (None, "public/a", LISTEN),
        ("shop", "public/a", LISTEN),
        ("root", "anything", MANAGE),
        ("*", "orders/1", NONE),
        ("staff", "orders/1", NONE),
        ("shop", "only/there", NONE),
        ("shop", "", NONE),
    ],
)
def test_rules_add_up_and_nothing_else_does(user: str | None, address: str, rights: Rights) -> None:
    peer = Peer(user=user)
    assert RULES.rights(peer, address) == rights
    for wanted in (SEND, LISTEN, MANAGE):
        refused = decide(RULES, peer, wanted, address)
        assert (refused is None) == (wanted in rights)
        if refused is not None:
            assert refused.condition == "amqp:unauthorized-access"


@pytest.mark.req("SE17")
def test_a_rule_of_a_virtual_host_holds_there_only() -> None:
    peer = Peer(user="shop", virtual_host="vh")
    assert decide(RULES, peer, SEND, "only/there") is None
    assert decide(RULES, Peer(user="shop"), SEND, "only/there") is not None


@pytest.mark.req("SE11")
def test_who_manages_may_send_and_listen() -> None:
    assert SEND in MANAGE
    assert LISTEN in MANAGE
    assert MANAGE not in SEND | LISTEN
    assert [str(each) for each in (SEND, LISTEN | SEND, MANAGE, NONE)] == [
        "send",
        "send and listen",
        "manage",
        "none",
    ]


def test_without_rules_and_tokens_everybody_may_everything() -> None:
    assert decide(None, Peer(), MANAGE, "x") is None
    assert decide_anywhere(None, Peer()) is None
    assert decide(Access(), Peer(trusted=True), MANAGE, "x") is None
    assert decide(Access(), Peer(), LISTEN, "x") is not None
    assert decide_anywhere(Access(), Peer()) is not None
    assert granted(None, Peer(), "x") == NONE


@pytest.mark.req("SE11")
@pytest.mark.parametrize(
    ("user", "address", "allowed"),
    [
        ("root", "$management", True),
        ("root", "orders/$management", True),
        ("shop", "$management", False),
        ("shop", "orders/$management", True),
        ("shop", "other/$management", False),
        ("nobody", "orders/$management", False),
        ("root", "$cbs", True),
        ("shop", "$cbs", False),
    ],
)
def test_nodes_with_a_dollar(user: str, address: str, allowed: bool) -> None:
    for wanted in (SEND, LISTEN):
        assert (decide(RULES, Peer(user=user), wanted, address) is None) == allowed


@pytest.mark.req("SE11")
def test_a_right_at_a_management_node_itself_opens_links_there_only() -> None:
    access = Access([Rule("q/$management", SEND, users=("ops",))])
    ops = Peer(user="ops")
    assert decide(access, ops, LISTEN, "q/$management") is None
    for wanted, address in (
        (MANAGE, "q/$management"),
        (LISTEN, "q"),
        (LISTEN, "other/$management"),
    ):
        assert decide(access, ops, wanted, address) is not None


@pytest.mark.req("SE11")
def test_to_talk_to_a_management_node_is_not_to_manage() -> None:
    access = Access([Rule("team/*", MANAGE, users=("ops",)), Rule("q", SEND, users=("ops",))])
    ops = Peer(user="ops")
    for address in ("$management", "team/q/$management", "q/$management"):
        assert decide(access, ops, SEND, address) is None
    assert decide(access, ops, MANAGE, "$management") is not None
    assert decide(access, ops, MANAGE, "q/$management") is not None
    assert decide(access, ops, MANAGE, "q") is not None
    assert decide(access, ops, MANAGE, "team/q") is None


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Rule("", SEND, users=("a",)), "a rule has an address"),
        (Rule("x", NONE, users=("a",)), "gives no rights"),
        (Rule("x", SEND), "applies to no user"),
        (Rule("x", SEND, groups=("staf",)), "there is no group 'staf'; did you mean 'staff'?"),
        (
            Rule(realm="billin", rights=SEND, users=("a",)),
            "there is no realm 'billin'; did you mean 'billing'?",
        ),
        (
            Rule("x", SEND, users=("a",), realm="billing"),
            "the rule for 'x' has the realm 'billing'",
        ),
        (Rule(realm="billing", users=("a",)), "the rule for realm 'billing' gives no rights"),
        (Rule(realm="billing", rights=SEND), "the rule for realm 'billing' applies to no user"),
    ],
)
def test_a_rule_that_cannot_be_meant(rule: Rule, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        Access([rule], groups={"staff": ["ann"]}, realms={"billing": ["invoices"]})


REALMS = {"billing": ["invoices", "payments/*"], "shop": ["orders", "invoices"]}


@pytest.mark.req("D20", "SE16")
@pytest.mark.parametrize(
    ("user", "address", "rights"),
    [
        ("ann", "invoices", LISTEN),
        ("ann", "payments/1", LISTEN),
        ("ann", "orders", NONE),
        ("bob", "payments/1", NONE),
        ("bob", "orders", SEND),
        # Rights of realms that share an address add up, as rules do.
        ("eve", "invoices", SEND | LISTEN),
        ("zoe", "invoices", NONE),
        (None, "invoices", NONE),
    ],
)
def test_a_realm_is_a_group_of_addresses(user: str | None, address: str, rights: Rights) -> None:
    rules = [
        Rule(realm="billing", rights=LISTEN, users=("ann", "eve")),
        Rule(realm="shop", rights=SEND, groups=("staff",)),
    ]
    access = Access(rules, groups={"staff": ["bob", "eve"]}, realms=REALMS)
    peer = Peer(user=user)
    assert access.rights(peer, address) == rights
    assert (decide(access, peer, SEND, address) is None) == (SEND in rights)
    assert bool(access.anywhere(peer)) == (user in ("ann", "bob", "eve"))


@pytest.mark.req("D20")
@pytest.mark.parametrize("addresses", [[], [""], ["invoices", ""]])
def test_a_realm_has_addresses(addresses: list[str]) -> None:
    with pytest.raises(
        ValueError, match="realm 'billing' has addresses, and none of them is empty"
    ):
        Access(realms={"billing": addresses})


FILE = """
[groups]
staff = ["ann"]

[[rule]]
address = "orders/*"
groups = ["staff"]
rights = ["send", "listen"]

[[rule]]
address = "*"
users = ["root"]
rights = ["manage"]
"""


@pytest.mark.req("SE17")
@pytest.mark.parametrize("turned", [False, True])
def test_several_rules_for_one_address_add_up(turned: bool) -> None:
    rules = [
        Rule("orders", SEND, users=("shop",)),
        Rule("ord*", LISTEN, users=("*",)),
        Rule("other", MANAGE, users=("shop",)),
    ]
    access = Access(rules[::-1] if turned else rules)
    shop = Peer(user="shop")
    assert access.rights(shop, "orders") == SEND | LISTEN
    assert access.anywhere(shop) == SEND | LISTEN | MANAGE


@pytest.mark.req("SE17", "B25")
def test_a_rule_of_a_file_may_hold_in_one_virtual_host_and_for_strangers(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(
        FILE
        + """
[[rule]]
address = "news"
users = ["ann"]
virtual_host = "vh"
rights = ["listen"]

[[rule]]
address = "hello"
anonymous = true
rights = ["send"]
"""
    )
    access = Access.load(file)
    assert access.rights(Peer(user="ann", virtual_host="vh"), "news") == LISTEN
    assert access.rights(Peer(user="ann", virtual_host="other"), "news") == NONE
    assert access.rights(Peer(user="ann"), "news") == NONE
    assert access.rights(Peer(), "hello") == SEND
    assert access.rights(Peer(), "news") == NONE


def test_rules_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE)
    access = Access.load(file)
    assert repr(access) == "<Access: 2 rules, 1 groups>"
    assert access.rights(Peer(user="ann"), "orders/1") == SEND | LISTEN
    assert access.rights(Peer(user="root"), "orders/1") == MANAGE


@pytest.mark.req("D20")
def test_realms_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    lines = '[realms]\nshop = ["orders/*", "news"]'
    text = FILE.replace("[groups]", lines + "\n\n[groups]")
    file.write_text(text.replace('address = "orders/*"', 'realm = "shop"'))
    access = Access.load(file)
    assert access.rights(Peer(user="ann"), "news") == SEND | LISTEN
    assert access.rights(Peer(user="ann"), "orders/1") == SEND | LISTEN
    assert access.rights(Peer(user="ann"), "other") == NONE
    file.write_text(text.replace(lines, "[realms]\nshop = []"))
    with pytest.raises(SettingsError, match="line 3: realm 'shop' has addresses"):
        Access.load(file)


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('rights = ["manage"]', 'right = ["manage"]', "line 13: there is no 'right' here"),
        ('"listen"]', '"lisen"]', "line 8: 'lisen' is not known here; did you mean 'listen'?"),
        ('groups = ["staff"]', 'groups = ["stuff"]', "line 5: there is no group 'stuff'"),
        ('users = ["root"]', "users = []", "line 10: the rule for '\\*' applies to no user"),
        ("[groups]", "[group]", "line 2: there is no 'group' here; did you mean 'groups'?"),
    ],
)
def test_a_mistake_in_a_file_has_its_line(
    tmp_path: Path, right: str, wrong: str, sentence: str
) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE.replace(right, wrong))
    with pytest.raises(SettingsError, match=sentence.replace("?", r"\?")):
        Access.load(file)


class _Tokens:
    def rights(self, address: str) -> Rights:
        return LISTEN if address == "orders" else NONE

    def anywhere(self) -> Rights:
        return LISTEN


@pytest.mark.req("SE11")
def test_what_tokens_give_adds_to_the_rules() -> None:
    tokens: Any = _Tokens()
    peer = Peer(user="shop", tokens=tokens)
    assert granted(RULES, peer, "orders") == SEND | LISTEN
    assert decide(None, Peer(tokens=tokens), LISTEN, "orders") is None
    assert decide(None, Peer(tokens=tokens), SEND, "orders") is not None
    assert decide(None, Peer(tokens=tokens), SEND, "$cbs") is None
    assert decide_anywhere(None, Peer(tokens=tokens)) is None


@pytest.mark.req("SE11")
def test_tokens_leave_the_rights_that_rules_give_elsewhere() -> None:
    """Who manages somewhere by a rule may talk to the management node with any token."""
    tokens: Any = _Tokens()
    access = Access([Rule("team/*", MANAGE, users=("ops",))])
    assert decide(access, Peer(user="ops", tokens=tokens), SEND, "$management") is None
    assert decide(access, Peer(user="eve", tokens=tokens), SEND, "$management") is not None
