"""Authorization: rights, rules, and the single function that decides for every protocol.

A front translates the client's request into a :class:`Rights` and an address, and calls
:func:`decide`. No other code grants anything, and anything not granted is refused.

Rights come from two sources and add up: the rules of an :class:`Access` for the logged-in user,
and the tokens of the connection (:mod:`amqp_rt.security.tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Flag
from pathlib import Path
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from ..addresses import (
    EXCHANGES,
    LEAVING,
    REPLY_TO,
    address_of,
    is_direct_reply,
    wild_match,
    wild_parts,
)
from ..config_files import SettingsError, mistake, read_settings, suggestion
from ..events import Peer
from ..outcomes import Error

#: Addresses of the nodes for tokens and for management operations.
CBS: Final = "$cbs"
MANAGEMENT: Final = "$management"
#: Where a container describes its nodes, if it does.
ASYNCAPI: Final = "$asyncapi"
_ENTITY_MANAGEMENT: Final = f"/{MANAGEMENT}"

#: In ``users`` of a rule: every user who has logged in.
EVERYBODY: Final = "*"


#: Address that no node has: only rules and tokens for every address give rights there.
EVERYWHERE: Final = "*"


class Rights(Flag):
    """Rights at an address."""

    NONE = 0
    #: Send messages to the node.
    SEND = 1
    #: Receive messages from the node, by consuming or browsing.
    LISTEN = 2
    #: Create, change, inspect and delete the node; includes the rights to send and to listen.
    MANAGE = 4 | SEND | LISTEN

    def __str__(self) -> str:
        if Rights.MANAGE in self:
            return "manage"
        return " and ".join(each.name.lower() for each in self if each.name) or "none"


class Rule(Struct, frozen=True):
    """Rights of some users at some addresses.

    Args:
        address: An address, in which ``*`` matches any number of characters, slashes included.
        rights: Rights at these addresses; at least one.
        users: User names; ``"*"`` matches every user who has logged in under a name.
        groups: Names of groups.
        anonymous: Whether the rule also applies to peers without a user name.
        virtual_host: Virtual host in which the rule applies; None for all.
        realm: Name of a realm, whose addresses it applies to instead of *address*; None for none.
    """

    address: str = ""
    rights: Rights = Rights.NONE
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    anonymous: bool = False
    virtual_host: str | None = None
    realm: str | None = None


class Access:
    """Set of rules. A right that no rule gives does not exist.

    Args:
        rules: Rules in any order; their rights add up.
        groups: Group name → its users.
        realms: Realm name → its addresses, each as in a rule.

    Raises:
        ValueError: A rule has no address, names an unknown group or realm, or applies to no users; or a realm
            has no addresses, or an empty one.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        groups: Mapping[str, Collection[str]] | None = None,
        realms: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.groups = {name: frozenset(users) for name, users in (groups or {}).items()}
        self.realms = {name: tuple(addresses) for name, addresses in (realms or {}).items()}
        self.rules = tuple(rules)
        for name, addresses in self.realms.items():
            if wrong := _wrong_realm(name, addresses):
                raise ValueError(wrong)
        for rule in self.rules:
            if wrong := _wrong(rule, self.groups, self.realms):
                raise ValueError(wrong)
        #: Each rule with its users, and each of its addresses split at the wildcards.
        self._compiled = tuple(
            (
                rule,
                frozenset(rule.users).union(*(self.groups[name] for name in rule.groups)),
                wild_parts(address),
            )
            for rule in self.rules
            for address in ((rule.address,) if rule.realm is None else self.realms[rule.realm])
        )

    @classmethod
    def load(cls, path: str | Path) -> Access:
        """Load the rules of a TOML file: ``[groups]`` of users, ``[realms]`` of addresses, ``[[rule]]`` tables.

        Raises:
            SettingsError: The file cannot be used; the text has its name, the line and the reason.
        """
        found, text = read_settings(path, _File)
        rules = [each.rule() for each in found.rule]
        groups = {name: frozenset(users) for name, users in found.groups.items()}
        for name, addresses in found.realms.items():
            if wrong := _wrong_realm(name, addresses):
                raise mistake(str(path), text, ("realms", name), wrong)
        for index, rule in enumerate(rules):
            if wrong := _wrong(rule, groups, found.realms):
                raise mistake(str(path), text, ("rule", index), wrong)
        return cls(rules, groups=groups, realms=found.realms)

    def rights(self, peer: Peer, address: str) -> Rights:
        """Return the rights of *peer* at *address*, in time proportional to the addresses of all rules."""
        found = Rights.NONE
        for rule in self.matching(peer, address):
            found |= rule.rights
        return found

    def matching(self, peer: Peer, address: str) -> Iterator[Rule]:
        """Yield the rules that give *peer* rights at *address*, in their order; one of a realm for each of its
        addresses that match."""
        for rule, users, parts in self._compiled:
            if _applies(rule, users, peer) and wild_match(parts, address):
                yield rule

    def anywhere(self, peer: Peer) -> Rights:
        """Return the rights of *peer* at any address."""
        found = Rights.NONE
        for rule, users, _ in self._compiled:
            if _applies(rule, users, peer):
                found |= rule.rights
        return found

    def __repr__(self) -> str:
        return f"<Access: {len(self.rules)} rules, {len(self.groups)} groups>"


def _applies(rule: Rule, users: frozenset[str], peer: Peer) -> bool:
    if rule.virtual_host is not None and rule.virtual_host != peer.virtual_host:
        return False
    if peer.user is None:
        return rule.anonymous
    return peer.user in users or EVERYBODY in users or rule.anonymous


def _wrong(
    rule: Rule, groups: Mapping[str, Collection[str]], realms: Mapping[str, Collection[str]]
) -> str:
    """Return the mistake in *rule*, empty if there is none."""
    if rule.realm is None and not rule.address:
        return "a rule has an address, or a realm; '*' is every address"
    if rule.realm is not None and rule.address:
        return f"the rule for {rule.address!r} has the realm {rule.realm!r} as well: leave out one"
    if rule.realm is not None and rule.realm not in realms:
        return f"there is no realm {rule.realm!r}{suggestion(rule.realm, list(realms))}"
    where = repr(rule.address) if rule.realm is None else f"realm {rule.realm!r}"
    if not rule.rights:
        return f"the rule for {where} gives no rights: send, listen or manage"
    if not (rule.users or rule.groups or rule.anonymous):
        return f"the rule for {where} applies to no user: name users or groups, or set anonymous"
    for name in rule.groups:
        if name not in groups:
            return f"there is no group {name!r}{suggestion(name, list(groups))}"
    return ""


def _wrong_realm(name: str, addresses: Collection[str]) -> str:
    """Return the mistake in the realm *name*, empty if there is none."""
    if not addresses or not all(addresses):
        return f"realm {name!r} has addresses, and none of them is empty; '*' is every address"
    return ""


def decide(
    access: Access | None, peer: Peer, wanted: Rights, address: str, *, called: str | None = None
) -> Error | None:
    """Return None if *peer* may perform an operation that needs *wanted* at *address*, else the error.

    The only place where this is decided, for all protocols. *address* is the node's own name: callers
    that have another one, such as a URL, an alias or an address of an exchange with a key, resolve it
    first, as :meth:`amqp_rt.container.permissions.Permissions.decide` does. The answer does not depend
    on whether the node exists, so that peers cannot probe for nodes.

    Without rules and tokens every peer may do everything; the process itself always may. The node
    for tokens is open to all peers where tokens are accepted. Links to a management node need any
    right at its entity or at the node itself, or the right to manage at any address; each operation
    requested there then needs the right to manage the node concerned.

    Args:
        access: The rules, if there are any.
        peer: The peer, with the tokens of its connection.
        wanted: Rights that the operation needs.
        address: Name of the node.
        called: Address that the peer used, for the error: it must not reveal the target of an alias.
    """
    if peer.trusted or (access is None and peer.tokens is None):
        return None
    if address == CBS and peer.tokens is not None and Rights.MANAGE not in wanted:
        return None
    entity = address.removesuffix(_ENTITY_MANAGEMENT)
    if Rights.MANAGE in wanted or (address != MANAGEMENT and entity == address):
        allowed = wanted in granted(access, peer, address)
    elif address == MANAGEMENT:
        # A link to a management node does not manage anything yet.
        allowed = Rights.MANAGE in anywhere(access, peer)
        wanted = Rights.MANAGE
    else:
        # Some clients put a token for the management node itself.
        allowed = bool(granted(access, peer, entity) | granted(access, peer, address))
    if allowed:
        return None
    return Error(
        "amqp:unauthorized-access",
        f"{(called or address)!r} is not for you: it takes the right to {wanted}",
    )


def decide_anywhere(access: Access | None, peer: Peer) -> Error | None:
    """Return None if *peer* has any right at all, else the error.

    For operations without an address: links to dynamic nodes or the anonymous terminus, and transactions.
    """
    if peer.trusted or (access is None and peer.tokens is None) or anywhere(access, peer):
        return None
    return Error("amqp:unauthorized-access", "nothing here is for you: log in, or put a token")


#: Returns the error if a peer lacks the rights at an address, None if it has them.
Decide: TypeAlias = Callable[[Peer, Rights, str], Error | None]


class Passage(Struct, frozen=True):
    """Path on which a declaration makes messages move, and the rights that the declaration needs.

    Args:
        source: Origin of the messages: a queue with dead letters, an exchange that is bound or has an
            alternate exchange, or an alias.
        target: Their destination.
        at_source: The right that the declaration needs at *source*.
        at_target: The same at *target*. To put messages there takes the right to send.
    """

    source: str
    target: str
    at_source: Rights = Rights.LISTEN
    at_target: Rights = Rights.SEND


def decide_passages(decide: Decide, peer: Peer, passages: Iterable[Passage]) -> Error | None:
    """Return None if *peer* may declare nodes whose messages move along *passages*, else the error.

    The only place where this is decided, for all declarations and protocols. It is decided at the
    declaration, by the rights of the declaring peer; nodes declared earlier stay as they are when
    rights change (``docs/decisions/0023``).
    """
    for each in passages:
        for wanted, address in ((each.at_source, each.source), (each.at_target, each.target)):
            refused = decide(peer, wanted, address)
            if refused is not None:
                return Error(
                    refused.condition,
                    f"messages of {each.source!r} would go to {each.target!r}, and "
                    f"{refused.description}",
                )
    return None


class Explanation(Struct, frozen=True, kw_only=True):
    """Whether a peer may do something at an address, and why."""

    #: Name of the node at the address, which may be called by an alias.
    address: str
    #: The right that is asked for: ``send``, ``listen`` or ``manage``.
    right: str
    allowed: bool
    #: Rules that give rights there, each as one line; those that decide have a part of *right*.
    rules: list[str]
    #: The reason, as a sentence.
    reason: str


def explain(
    access: Access | None,
    peer: Peer,
    wanted: Rights,
    address: str,
    judge: Decide | None = None,
) -> Explanation:
    """Return the judgement of :func:`decide` on *peer* at *address*, and the rules that it results from.

    Args:
        access: The rules, if there are any.
        peer: The peer; tokens of its connection count as well.
        wanted: Rights to ask for.
        address: Name of the node.
        judge: Decides in place of :func:`decide`, with more than rules, such as aliases.
    """
    refused = judge(peer, wanted, address) if judge else decide(access, peer, wanted, address)
    who = "a peer without a user name" if peer.user is None else f"user {peer.user!r}"
    rules = [] if access is None else list(dict.fromkeys(access.matching(peer, address)))
    gives = [each for each in rules if each.rights & wanted]
    if access is None:
        reason = "there are no rules, so that every peer may do everything"
    elif refused is None and wanted in granted(access, peer, address):
        reason = f"decided by {' and '.join(map(_line, gives))}"
    elif refused is None:
        reason = f"not by a rule for {address!r}: {who} has a right that opens this address"
    elif rules:
        reason = (
            f"{who} has the right to {granted(access, peer, address)} there; {refused.description}"
        )
    else:
        reason = f"no rule gives {who} a right at {address!r}"
    return Explanation(
        address=address,
        right=str(wanted),
        allowed=refused is None,
        rules=[_line(each) for each in rules],
        reason=reason,
    )


def _line(rule: Rule) -> str:
    """Return *rule* as one line."""
    where = f"address {rule.address!r}" if rule.realm is None else f"realm {rule.realm!r}"
    parts = [f"users {', '.join(rule.users)}"] if rule.users else []
    parts += [f"groups {', '.join(rule.groups)}"] if rule.groups else []
    parts += ["anonymous"] if rule.anonymous else []
    parts += [] if rule.virtual_host is None else [f"virtual host {rule.virtual_host!r}"]
    return f"the rule for {where} ({'; '.join(parts)}): {rule.rights}"


def reserved(address: str) -> str:
    """Return the reason why no node, alias or dead-letter address may have *address*, empty if one may.

    A node there would receive messages meant for the broker, such as tokens of others, or could not be
    reached by its name.
    """
    if address in (CBS, MANAGEMENT, ASYNCAPI) or address.endswith(_ENTITY_MANAGEMENT):
        return f"{address!r} is the broker's own"
    if address.startswith(EXCHANGES):
        return f"{address!r} is the address of an exchange"
    if address == REPLY_TO or is_direct_reply(address):
        return f"{address!r} is for replies to requests"
    if address.startswith(LEAVING):
        return f"{address!r} is that of a queue that was deleted"
    if address_of(address) != address:
        return f"{address!r} means {address_of(address)!r}"
    return ""


def granted(access: Access | None, peer: Peer, address: str) -> Rights:
    """Return the rights of *peer* at *address* by rules and tokens."""
    found = Rights.NONE if access is None else access.rights(peer, address)
    if peer.tokens is not None:
        found |= peer.tokens.rights(address)
    return found


def anywhere(access: Access | None, peer: Peer) -> Rights:
    """Return the rights of *peer* at any address, by rules and tokens."""
    found = Rights.NONE if access is None else access.anywhere(peer)
    if peer.tokens is not None:
        found |= peer.tokens.anywhere()
    return found


_Word = Literal["send", "listen", "manage"]


class _FileRule(Struct, frozen=True, forbid_unknown_fields=True):
    """Rule in the file."""

    rights: tuple[_Word, ...]
    address: str = ""
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    anonymous: bool = False
    virtual_host: str | None = None
    realm: str | None = None

    def rule(self) -> Rule:
        return Rule(
            self.address,
            rights_of(self.rights),
            self.users,
            self.groups,
            self.anonymous,
            self.virtual_host,
            self.realm,
        )


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of the file of :meth:`Access.load`."""

    groups: dict[str, tuple[str, ...]] = {}
    realms: dict[str, tuple[str, ...]] = {}
    rule: tuple[_FileRule, ...] = ()


def rights_of(words: Iterable[str]) -> Rights:
    """Return the rights that *words* such as ``"send"`` name; other words are ignored."""
    found = Rights.NONE
    for word in words:
        found |= _WORDS.get(word.lower(), Rights.NONE)
    return found


_WORDS: Final[Mapping[str, Rights]] = {
    "send": Rights.SEND,
    "listen": Rights.LISTEN,
    "manage": Rights.MANAGE,
}

__all__ = [
    "ASYNCAPI",
    "CBS",
    "EVERYBODY",
    "EVERYWHERE",
    "MANAGEMENT",
    "Access",
    "Decide",
    "Explanation",
    "Passage",
    "Rights",
    "Rule",
    "SettingsError",
    "anywhere",
    "decide",
    "decide_anywhere",
    "decide_passages",
    "explain",
    "granted",
    "reserved",
    "rights_of",
]
