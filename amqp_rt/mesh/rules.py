"""Rules of a mesh: how messages to addresses are distributed, and what happens without a destination (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from ..addresses import Pattern, wild_match, wild_parts
from .records import DISTRIBUTIONS, PATTERN, Offer

Distribution: TypeAlias = Literal["closest", "balanced", "multicast"]

_ROUTES = ("message", "link")
_ABSENT = ("refuse", "wait")
_OUTCOMES = ("handled", "worst")
_SLOW = ("wait", "skip")


class MeshRule(Struct, frozen=True, kw_only=False):
    """How one node of a mesh treats addresses: as the node that offers them, and as the one to which senders are connected.

    Args:
        address: An address; ``*`` stands for any characters.
        distribution: Which destination gets a message: the nearest, one of all, or each of them.
        route: ``message``: the destination is chosen for each message. ``link``: for each link of a client, when it
            attaches; filters, transactions and settle modes are those of the destination.
        absent: Without a destination, refuse links after 2 s, or let them wait without credit.
        fallback: Another address, whose destinations get the messages while this one has none, such as a queue. Senders
            need no right to it. Messages that go there stay there.
        ordered: Use one destination, and another one when all of its messages are settled.
        resend: Number of further destinations that get a message which one has released.
        outcomes: Outcome of a message with several destinations. ``handled``: *rejected* if one has rejected it, else *accepted*
            if one has accepted it, else *modified*, else *released*. ``worst``: *accepted* only if all have accepted it.
        slow: With several destinations, let senders of settled messages ``wait`` for the slowest, or ``skip`` those that have
            no credit; messages that these miss are counted.
        nodes: Ids of the nodes that may offer the address; empty for all. Offers of others are dropped here. An edge's
            addresses are offered by its uplink.
        per_user: Use links of their own for each user, whose properties name the user.
        redirect: Ask clients to attach at the nearest node that serves the address (``amqp:link:redirect``), if that says where it
            listens. The container's own links, and clients of other protocols, are routed.

    Raises:
        ValueError: A value is none of those.
    """

    address: str
    distribution: Distribution = "balanced"
    route: Literal["message", "link"] = "message"
    absent: Literal["refuse", "wait"] = "refuse"
    fallback: str | None = None
    ordered: bool = False
    resend: int = 0
    per_user: bool = False
    redirect: bool = False
    nodes: tuple[str, ...] = ()
    outcomes: Literal["handled", "worst"] = "handled"
    slow: Literal["wait", "skip"] = "wait"

    def __post_init__(self) -> None:
        for name, known in (
            ("distribution", DISTRIBUTIONS),
            ("route", _ROUTES),
            ("absent", _ABSENT),
            ("outcomes", _OUTCOMES),
            ("slow", _SLOW),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"rule for {self.address!r}: {name} is one of {', '.join(known)}, "
                    f"not {getattr(self, name)!r}"
                )
        if not self.address or self.resend < 0:
            raise ValueError(
                f"rule for {self.address!r}: it has an address, and resend is not below 0"
            )
        if self.fallback is not None:
            if self.distribution == "multicast" or self.route == "link":
                raise ValueError(
                    f"rule for {self.address!r}: a fallback is for messages that go to one destination each, not for "
                    "multicast or routed links"
                )
            if not self.fallback or "*" in self.fallback or self.fallback == self.address:
                raise ValueError(
                    f"rule for {self.address!r}: fallback is another address, without wildcards, not "
                    f"{self.fallback!r}"
                )
        elif self.distribution != "multicast" and (self.outcomes, self.slow) != ("handled", "wait"):
            raise ValueError(
                f"rule for {self.address!r}: outcomes and slow are for the distribution multicast"
            )


#: How addresses are treated for which there is no rule.
_DEFAULT: Final = MeshRule("*")


class MeshRules:
    """Rules in order; the first whose address matches holds."""

    def __init__(self, rules: Iterable[MeshRule] = ()) -> None:
        self._rules = [(wild_parts(each.address), each) for each in rules]

    def find(self, address: str) -> MeshRule | None:
        """Return the rule for *address*; None without one."""
        for parts, rule in self._rules:
            if wild_match(parts, address):
                return rule
        return None

    def rule_for(self, address: str) -> MeshRule:
        """Return the rule for *address*, or the default one."""
        return self.find(address) or _DEFAULT

    def admit(self, origin: str, address: str, offer: Offer) -> bool:
        """Return whether *origin* may offer *address*.

        A pattern takes the right to each address that it can match: it would attract messages of other nodes.
        """
        if not offer.flags & PATTERN:
            rule = self.find(address)
            return rule is None or not rule.nodes or origin in rule.nodes
        wild = Pattern(address).wild
        for parts, rule in self._rules:
            if rule.nodes and origin not in rule.nodes and _overlap(parts, wild_parts(wild)):
                return False
            if wild_match(parts, wild):
                # Later rules hold for none of its addresses.
                return True
        return True


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether some address matches both; what is between two wildcards can be anywhere in it."""
    if len(one) == 1:
        return wild_match(other, one[0])
    if len(other) == 1:
        return wild_match(one, other[0])
    first = one[0].startswith(other[0]) or other[0].startswith(one[0])
    last = one[-1].endswith(other[-1]) or other[-1].endswith(one[-1])
    return first and last
