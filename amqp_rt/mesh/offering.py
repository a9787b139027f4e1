"""Addresses of a container that it offers to the other members of a mesh, as they come and go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import trio

from ..container.container import Container
from ..fronts.hosts import ListedHost
from .pinned import COORDINATOR
from .records import GIVES, LINK_ROUTED, PATTERN, TAKES, Offer
from .routing import Effect, RoutingEngine
from .rules import MeshRules

log = logging.getLogger("amqp_rt.mesh")

_FLAGS: Final[Mapping[str, int]] = {
    "node": TAKES,
    "rpc": TAKES,
    "source": GIVES,
    "link": TAKES | GIVES | LINK_ROUTED,
}
#: Addresses of hosts that are offered or withdrawn before other tasks get a turn.
_TURN: Final = 500


class OwnOffers:
    """Offers of a container: its nodes, what its bridges reach, and what its hosts list, such as the queues of a broker.

    Queues take messages and give some. Addresses that begin with ``$`` are not offered, but for the coordinator of
    transactions; nor are dynamic and exclusive queues, which belong to one client of this node.

    Args:
        container: The container.
        engine: The routing.
        rules: Rules for addresses.
        fixed: Offers in place of those of nodes and hosts; None to offer what there is.
        outside: Returns the offers of bridges, which win over others: links to their addresses lead outside.
        carry_out: Carries out effects of the routing.
    """

    def __init__(
        self,
        container: Container,
        engine: RoutingEngine,
        rules: MeshRules,
        fixed: Mapping[str, Offer] | None,
        *,
        outside: Callable[[], dict[str, Offer]],
        carry_out: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._container = container
        self._engine = engine
        self._rules = rules
        self._fixed = fixed
        self._outside = outside
        self._carry_out = carry_out
        self._offered: dict[str, Offer] = {}
        #: Offers of our nodes and bridges, which win over those of hosts.
        self._declared: dict[str, Offer] = {}
        #: Addresses of hosts that have changed.
        self._touched: dict[str, None] = {}
        self._wakeup = trio.Event()
        #: Addresses that were not offered, beyond ``mesh_node_addresses_max``.
        self.left_out = 0

    @property
    def coordinates(self) -> bool:
        """Whether transactions are coordinated here."""
        return COORDINATOR in self._offered

    def start(self) -> None:
        """Offer what there is now, and follow changes."""
        self.renew()
        if self._fixed is None:
            self._container.nodes.on_change = self.renew
        for host in self._hosts():
            host.on_address = self._touch
            if host.coordinates:
                self._offer(COORDINATOR, Offer(TAKES | LINK_ROUTED, "closest"))
            self._touched.update(dict.fromkeys(host.addresses()))
        for _ in self._follow():
            pass

    def stop(self) -> None:
        """Follow changes no longer."""
        if self._fixed is None:
            self._container.nodes.on_change = None
        for host in self._hosts():
            host.on_address = None

    def _hosts(self) -> list[ListedHost]:
        if self._fixed is not None:
            return []
        return [each for each in self._container.hosts if isinstance(each, ListedHost)]

    async def run(self) -> None:
        """Follow changes of hosts, which can be many at a time, until cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            for _ in self._follow():
                await trio.lowlevel.checkpoint()

    def _touch(self, address: str) -> None:
        self._touched[address] = None
        self._wakeup.set()

    def _follow(self) -> Iterator[None]:
        """Offer or withdraw what has changed; yields after some addresses."""
        hosts = self._hosts()
        at = 0
        while self._touched:
            address = next(iter(self._touched))
            del self._touched[address]
            if address not in self._declared:
                if any(each.lists(address) for each in hosts):
                    self._offer(address, self._offer_of(address, TAKES | GIVES))
                else:
                    self._withdraw(address)
            at += 1
            if at % _TURN == 0:
                yield

    def renew(self) -> None:
        """Offer what nodes and bridges have now."""
        own = self._offers_of_nodes() if self._fixed is None else self._fixed
        before, self._declared = self._declared, {**own, **self._outside()}
        for address, offer in self._declared.items():
            self._offer(address, offer)
        for address in before.keys() - self._declared.keys():
            self._withdraw(address)
            # A host may have it as well.
            self._touch(address)

    def _offers_of_nodes(self) -> dict[str, Offer]:
        offers: dict[str, Offer] = {}
        for route in self._container.nodes.routes:
            if route.address.startswith("$"):
                continue
            flags = _FLAGS[route.kind] | (PATTERN if route.pattern.captures else 0)
            known = offers.get(route.address)
            offers[route.address] = self._offer_of(
                route.address, flags | (known.flags if known is not None else 0)
            )
        return offers

    def _offer_of(self, address: str, flags: int) -> Offer:
        rule = self._rules.rule_for(address)
        return Offer(flags | (LINK_ROUTED if rule.route == "link" else 0), rule.distribution)

    def _offer(self, address: str, offer: Offer) -> None:
        known = self._offered.get(address)
        if known == offer:
            return
        limit = self._container.limits.mesh_node_addresses_max
        if known is None and len(self._offered) >= limit:
            if not self.left_out:
                log.warning(
                    "mesh: %r and further addresses are not offered: a node offers mesh_node_addresses_max, "
                    "which is %d",
                    address,
                    limit,
                )
            self.left_out += 1
            return
        self._offered[address] = offer
        self._carry_out(self._engine.offer(address, offer, now=trio.current_time()))

    def _withdraw(self, address: str) -> None:
        if self._offered.pop(address, None) is None:
            return
        self._carry_out(self._engine.withdraw(address, now=trio.current_time()))
        if self.left_out:
            # There is room for one of the others.
            self.left_out = 0
            for host in self._hosts():
                for each in host.addresses():
                    self._touch(each)
