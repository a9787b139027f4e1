"""Rules of a mesh: how messages to addresses are distributed, and what happens without a destination (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from msgspec import Struct

from ..addresses import wild_match, wild_parts
from .records import DISTRIBUTIONS

Distribution: TypeAlias = Literal["closest", "balanced", "multicast"]

_ROUTES = ("message", "link")
_ABSENT = ("refuse", "wait")


class MeshRule(Struct, frozen=True, kw_only=False):
    """How one node of a mesh treats addresses: as the node that offers them, and as the one to which senders are connected.

    Args:
        address: An address; ``*`` stands for any characters.
        distribution: Which destination gets a message: the nearest, one of all, or each of them.
        route: ``message``: the destination is chosen for each message. ``link``: for each link of a client, when it
            attaches; filters, transactions and settle modes are those of the destination.
        absent: Without a destination, refuse links after 2 s, or let them wait without credit.
        ordered: Use one destination, and another one when all of its messages are settled.
        resend: Number of further destinations that get a message which one has released.
        per_user: Use links of their own for each user, whose properties name the user.

    Raises:
        ValueError: A value is none of those.
    """

    address: str
    distribution: Distribution = "balanced"
    route: Literal["message", "link"] = "message"
    absent: Literal["refuse", "wait"] = "refuse"
    ordered: bool = False
    resend: int = 0
    per_user: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("distribution", DISTRIBUTIONS),
            ("route", _ROUTES),
            ("absent", _ABSENT),
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
