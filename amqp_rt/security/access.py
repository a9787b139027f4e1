"""Who may do what where: rights, rules, and the one function that decides for every protocol.

A front translates what its client wants into a :class:`Rights` and an address, and asks
:func:`decide`. Nothing else in the program grants anything. What is not granted is refused.

Rights come from two places and add up: the rules of an :class:`Access` for whoever has logged in,
and the tokens of the connection (:mod:`amqp_rt.security.tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Flag
from pathlib import Path
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from ..addresses import EXCHANGES, address_of, wild_match, wild_parts
from ..events import Peer
from ..outcomes import Error
from ..settings import SettingsError, mistake, read_settings, suggestion

#: Where tokens are put, and where operations are asked for.
CBS: Final = "$cbs"
MANAGEMENT: Final = "$management"
_ENTITY_MANAGEMENT: Final = f"/{MANAGEMENT}"

#: In ``users`` of a rule: everybody who has logged in.
EVERYBODY: Final = "*"


#: A name of no node: only rules and tokens for every address give rights here.
EVERYWHERE: Final = "*"


class Rights(Flag):
    """What may be done at an address."""

    NONE = 0
    #: Send messages there.
    SEND = 1
    #: Receive messages from there, by taking or by looking.
    LISTEN = 2
    #: Make, change, look into and delete what is there; who may do that may also send and listen.
    MANAGE = 4 | SEND | LISTEN

    def __str__(self) -> str:
        if Rights.MANAGE in self:
            return "manage"
        return " and ".join(each.name.lower() for each in self if each.name) or "none"


class Rule(Struct, frozen=True):
    """Rights at addresses, for some.

    Args:
        address: An address, in which ``*`` stands for any characters or none, slashes included.
        rights: What may be done there.
        users: Names; ``"*"`` is everybody who has logged in under a name.
        groups: Names of groups.
        anonymous: Also those who have not.
        virtual_host: Where it holds; None for everywhere.
    """

    address: str
    rights: Rights
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    anonymous: bool = False
    virtual_host: str | None = None


class Access:
    """Rules. A right that no rule gives is not there.

    Args:
        rules: In any order: what they give adds up.
        groups: Name → its users.

    Raises:
        ValueError: A rule names no address or a group that is not there, or is for nobody.
    """

    def __init__(
        self, rules: Iterable[Rule] = (), *, groups: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self.groups = {name: frozenset(users) for name, users in (groups or {}).items()}
        self.rules = tuple(rules)
        for rule in self.rules:
            if wrong := _wrong(rule, self.groups):
                raise ValueError(wrong)
        #: Each rule with whom it is for, and its address cut at the wildcards.
        self._compiled = tuple(
            (
                rule,
                frozenset(rule.users).union(*(self.groups[name] for name in rule.groups)),
                wild_parts(rule.address),
            )
            for rule in self.rules
        )

    @classmethod
    def load(cls, path: str | Path) -> Access:
        """The rules of a TOML file: ``[groups]`` with lists of users, and ``[[rule]]`` tables.

        Raises:
            SettingsError: The file cannot be used; its name, the line and the reason are said.
        """
        found, text = read_settings(path, _File)
        rules = [each.rule() for each in found.rule]
        groups = {name: frozenset(users) for name, users in found.groups.items()}
        for index, rule in enumerate(rules):
            if wrong := _wrong(rule, groups):
                raise mistake(str(path), text, ("rule", index), wrong)
        return cls(rules, groups=groups)

    def rights(self, peer: Peer, address: str) -> Rights:
        """What the rules let *peer* do at *address*. Takes time in proportion to the rules."""
        found = Rights.NONE
        for rule, users, parts in self._compiled:
            if _applies(rule, users, peer) and wild_match(parts, address):
                found |= rule.rights
        return found

    def anywhere(self, peer: Peer) -> Rights:
        """What the rules let *peer* do at some address or other."""
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


def _wrong(rule: Rule, groups: Mapping[str, Collection[str]]) -> str:
    """What is wrong with *rule*, if anything."""
    if not rule.address:
        return "a rule has an address; '*' is every address"
    if not rule.rights:
        return f"the rule for {rule.address!r} gives no rights: send, listen or manage"
    if not (rule.users or rule.groups or rule.anonymous):
        return (
            f"the rule for {rule.address!r} is for nobody: name users or groups, or set anonymous"
        )
    for name in rule.groups:
        if name not in groups:
            return f"there is no group {name!r}{suggestion(name, list(groups))}"
    return ""


def decide(
    access: Access | None, peer: Peer, wanted: Rights, address: str, *, called: str | None = None
) -> Error | None:
    """Whether *peer* may do what takes *wanted* at *address*: None, or why not.

    The only place where this is decided, whatever the protocol. *address* is the node's own name: who
    is given another one, such as a URL, an alias or an address of an exchange with a key, asks
    :meth:`amqp_rt.Container.own_name` before, as :meth:`amqp_rt.Container.decide` does. The answer
    says nothing of whether there is such a node, so that it cannot be found out by asking.

    Where neither rules nor tokens are set up, everybody may do everything; the process itself
    always may. The node for tokens is open to all who can bring some. Links to a management node are
    for those who have a right at its entity, or the right to manage at some place; what is then
    asked of it is decided operation by operation, by the right to manage what it is about.

    Args:
        access: The rules, if there are any.
        peer: Who asks, with the tokens of its connection.
        wanted: What it wants to do.
        address: Where.
        called: What the peer calls it, for the error: an alias does not give away what it means.
    """
    if peer.trusted or (access is None and peer.tokens is None):
        return None
    if address == CBS and peer.tokens is not None and Rights.MANAGE not in wanted:
        return None
    entity = address.removesuffix(_ENTITY_MANAGEMENT)
    if Rights.MANAGE in wanted or (address != MANAGEMENT and entity == address):
        allowed = wanted in granted(access, peer, address)
    elif address == MANAGEMENT:
        # To talk to a management node is not yet to manage anything.
        allowed = Rights.MANAGE in anywhere(access, peer)
        wanted = Rights.MANAGE
    else:
        allowed = bool(granted(access, peer, entity))
    if allowed:
        return None
    return Error(
        "amqp:unauthorized-access",
        f"{(called or address)!r} is not for you: it takes the right to {wanted}",
    )


def decide_anywhere(access: Access | None, peer: Peer) -> Error | None:
    """Whether *peer* may do what names no address: ask for a dynamic node, for the anonymous
    terminus or for transactions. It takes some right somewhere; None, or why not.
    """
    if peer.trusted or (access is None and peer.tokens is None) or anywhere(access, peer):
        return None
    return Error("amqp:unauthorized-access", "nothing here is for you: log in, or put a token")


#: Says why a peer may not do at an address what takes those rights; None if it may.
Decide: TypeAlias = Callable[[Peer, Rights, str], Error | None]


class Passage(Struct, frozen=True):
    """A way that messages take by themselves because of a declaration, and the rights that it takes.

    Args:
        source: Where the messages come from: a queue whose dead letters they are, an exchange that is
            bound or has an alternate exchange, or an alias.
        target: Where they go.
        at_source: The right at *source* that the declaration takes.
        at_target: The same at *target*. To put messages there takes the right to send.
    """

    source: str
    target: str
    at_source: Rights = Rights.LISTEN
    at_target: Rights = Rights.SEND


def decide_passages(decide: Decide, peer: Peer, passages: Iterable[Passage]) -> Error | None:
    """Whether *peer* may declare what lets messages take *passages*: None, or why not.

    The only place where this is decided, whatever is declared, and by which protocol. It is decided
    when something is declared, by the rights of who declares it. What has been declared stays as it
    is when rights change (decision 0023).
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


def reserved(address: str) -> str:
    """Why no node, alias or dead-letter address may be called *address*; empty if it may.

    A node there would get what is meant for the broker, such as the tokens of others, or could not be
    reached by its name.
    """
    if address in (CBS, MANAGEMENT) or address.endswith(_ENTITY_MANAGEMENT):
        return f"{address!r} is the broker's own"
    if address.startswith(EXCHANGES):
        return f"{address!r} is the address of an exchange"
    if address_of(address) != address:
        return f"{address!r} means {address_of(address)!r}"
    return ""


def granted(access: Access | None, peer: Peer, address: str) -> Rights:
    """What *peer* may do at *address* by rules and tokens."""
    found = Rights.NONE if access is None else access.rights(peer, address)
    if peer.tokens is not None:
        found |= peer.tokens.rights(address)
    return found


def anywhere(access: Access | None, peer: Peer) -> Rights:
    """What *peer* may do at some address or other, by rules and tokens."""
    found = Rights.NONE if access is None else access.anywhere(peer)
    if peer.tokens is not None:
        found |= peer.tokens.anywhere()
    return found


_Word = Literal["send", "listen", "manage"]


class _FileRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A rule as a file has it."""

    address: str
    rights: tuple[_Word, ...]
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    anonymous: bool = False
    virtual_host: str | None = None

    def rule(self) -> Rule:
        return Rule(
            self.address,
            rights_of(self.rights),
            self.users,
            self.groups,
            self.anonymous,
            self.virtual_host,
        )


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    groups: dict[str, tuple[str, ...]] = {}
    rule: tuple[_FileRule, ...] = ()


def rights_of(words: Iterable[str]) -> Rights:
    """The rights that *words* such as ``"send"`` name; others name none."""
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
    "CBS",
    "EVERYBODY",
    "EVERYWHERE",
    "MANAGEMENT",
    "Access",
    "Decide",
    "Passage",
    "Rights",
    "Rule",
    "SettingsError",
    "anywhere",
    "decide",
    "decide_anywhere",
    "decide_passages",
    "granted",
    "reserved",
    "rights_of",
]
