"""Addresses that the nodes of a mesh offer, by address (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..addresses import Pattern
from ..limits import DEFAULT_LIMITS, Limits
from .records import PATTERN, Offer


def admit_all(_origin: str, _address: str, _offer: Offer) -> bool:
    """Admit every offer."""
    return True


class Directory:
    """Offers of all origins, found by origin and by address.

    Args:
        limits: ``mesh_node_addresses_max``, ``mesh_addresses_max`` and ``mesh_patterns_max`` apply. An offer beyond them is
            dropped and counted; the others of its origin are kept.
        admit: Whether the rules of the mesh let an origin offer an address.
    """

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        admit: Callable[[str, str, Offer], bool] = admit_all,
    ) -> None:
        self._limits = limits
        self._admit = admit
        self._by_origin: dict[str, dict[str, Offer]] = {}
        self._literals: dict[str, dict[str, Offer]] = {}
        #: Pattern and offers by the text of the pattern, the most specific one first.
        self._patterns: dict[str, tuple[Pattern, dict[str, Offer]]] = {}
        self._sorted: list[tuple[Pattern, dict[str, Offer]]] | None = None
        #: Offers of all origins together.
        self.count = 0
        #: Offers dropped, by the reason.
        self.dropped: dict[str, int] = {}

    def of(self, origin: str) -> Mapping[str, Offer]:
        """Return the offers of *origin*."""
        return self._by_origin.get(origin, {})

    def of_pattern(self, pattern: str) -> Mapping[str, Offer]:
        """Return the offers of a pattern, given as its text, by origin."""
        known = self._patterns.get(pattern)
        return {} if known is None else known[1]

    @property
    def named(self) -> int:
        """Number of addresses and patterns."""
        return len(self._literals) + len(self._patterns)

    def addresses(self) -> list[tuple[str, int]]:
        """Return all addresses and the texts of all patterns, each with 0 or ``PATTERN``."""
        return [
            *((address, 0) for address in self._literals),
            *((pattern, PATTERN) for pattern in self._patterns),
        ]

    def replace(self, origin: str, offers: Mapping[str, Offer]) -> None:
        """Make *offers* those of *origin*; what is equal before and after stays in place."""
        for address in [known for known in self.of(origin) if known not in offers]:
            self.remove(origin, address)
        for address, offer in offers.items():
            self.add(origin, address, offer)

    def add(self, origin: str, address: str, offer: Offer) -> None:
        """Add or change one offer, if rules and limits admit it."""
        known = self._by_origin.setdefault(origin, {})
        old = known.get(address)
        if old == offer:
            return
        if old is not None:
            self.remove(origin, address)
            known = self._by_origin.setdefault(origin, {})
        reason = self._reason_to_drop(origin, address, offer, len(known))
        if reason:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            if not known:
                del self._by_origin[origin]
            return
        known[address] = offer
        self.count += 1
        if not offer.flags & PATTERN:
            self._literals.setdefault(address, {})[origin] = offer
        elif address in self._patterns:
            self._patterns[address][1][origin] = offer
        else:
            self._patterns[address] = (Pattern(address), {origin: offer})
            self._sorted = None

    def _reason_to_drop(self, origin: str, address: str, offer: Offer, known: int) -> str:
        limits = self._limits
        if not self._admit(origin, address, offer):
            return "not admitted"
        if known >= limits.mesh_node_addresses_max:
            return "mesh_node_addresses_max"
        if self.count >= limits.mesh_addresses_max:
            return "mesh_addresses_max"
        if (
            offer.flags & PATTERN
            and address not in self._patterns
            and len(self._patterns) >= limits.mesh_patterns_max
        ):
            return "mesh_patterns_max"
        return ""

    def remove(self, origin: str, address: str) -> None:
        """Remove one offer, if it is there."""
        known = self._by_origin.get(origin, {})
        offer = known.pop(address, None)
        if offer is None:
            return
        self.count -= 1
        if not known:
            del self._by_origin[origin]
        if offer.flags & PATTERN:
            offers = self._patterns[address][1]
            del offers[origin]
            if not offers:
                del self._patterns[address]
                self._sorted = None
        else:
            offers = self._literals[address]
            del offers[origin]
            if not offers:
                del self._literals[address]

    def find(self, address: str) -> Mapping[str, Offer]:
        """Return the offers for *address* by origin.

        Literal addresses win over patterns, and more specific patterns over others. Takes time in proportion to the
        patterns, at most ``mesh_patterns_max``.
        """
        if address in self._literals:
            return self._literals[address]
        if self._sorted is None:
            self._sorted = sorted(self._patterns.values(), key=lambda each: each[0].rank)
        for pattern, offers in self._sorted:
            if pattern.match(address) is not None:
                return offers
        return {}
