"""Ways from this node: what of the routing and the connections the links of routes need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from ..addresses import DIRECT_REPLY
from ..errors import LocalProtocolError
from ..fronts.base import LinkSession, ReceivingLink, SendingLink
from ..limits import Limits
from ..outcomes import Error
from .hops import LEG, ROUTE, LegUse, Route, write_leg
from .neighbours import MESH, Neighbour, Sessions
from .records import GIVES, TAKES, Offer
from .routing import MeshRoute, RoutingEngine
from .splices import Splice


class Ways:
    """Destinations of addresses, and the next nodes on the way.

    Args:
        engine: The routing.
        limits: Limits of the container.
    """

    def __init__(self, engine: RoutingEngine, limits: Limits) -> None:
        self.engine = engine
        self.node = engine.node
        self.limits = limits
        #: Neighbours by id, and ourselves: a connection in memory to the container's own nodes.
        self.neighbours: dict[str, Neighbour] = {}
        #: Direct connections to members that are no neighbours, by id: those that we have opened, for our links, and those that
        #: they have opened, for replies to what came over these. So the opener knows when nothing needs them any more.
        self.direct: dict[str, Neighbour] = {}
        self.returns: dict[str, Neighbour] = {}
        self._names = count(1)

    def destinations(self, address: str, *, gives: bool = False) -> list[MeshRoute]:
        """Return the nodes to which messages for *address* can be sent, or which give some; the best first.

        Those that offer it with weight 0, as they are not alive or drain, are left out.

        Nodes of equal cost come in an order that depends on this node, so that a few destinations of many get no
        more senders than others.
        """
        node = node_of(address)
        if self.engine.edge:
            # The uplink decides, and says what it finds.
            return [] if node == self.node else self._over_uplink()
        if node is not None:
            return [] if gives else self.at(node)
        flag = GIVES if gives else TAKES
        found = [
            each
            for each in self.engine.lookup(address)
            if each.offer.flags & flag and each.offer.weight
        ]
        found.sort(key=lambda each: (each.cost, weight_of(self.node, each.node)))
        # The cost stays that of the routing: nodes of one distance do not differ by what happens to be connected.
        return [
            replace(each, path=(each.node,)) if self._is_direct(each.node) else each
            for each in found
        ]

    def at(self, node: str, *, back: bool = False) -> list[MeshRoute]:
        """Return the way to *node*, *back* of replies, for an address there that no record lists."""
        paths = self.engine.paths()
        path = paths.path(node)
        if path is None:
            # An edge is reached by its uplinks, which lead on to it.
            return self.engine.lookup(f"{MESH}/{node}")
        if self._is_direct(node, back=back):
            path = (node,)
        return [MeshRoute(node, Offer(TAKES, "closest"), paths.costs[node], path, "")]

    def _is_direct(self, node: str, *, back: bool = False) -> bool:
        direct = (self.returns if back else self.direct).get(node)
        return direct is not None and direct.usable

    def ails(self, address: str) -> bool:
        """Return whether this node has *address* and offers it with weight 0."""
        found = self.engine.lookup(address)
        return any(each.node == self.node and not each.offer.weight for each in found)

    def _over_uplink(self) -> list[MeshRoute]:
        """Return the way of all links of an edge."""
        uplink = self.engine.uplink
        if uplink is None:
            return []
        return [MeshRoute(uplink, Offer(TAKES | GIVES, "balanced"), 1, (uplink,), "")]

    def path_back(self, node: str) -> tuple[str, ...] | None:
        """Return the ids to pass with replies to *node*, an edge or not; None if it is out of reach."""
        if self._is_direct(node, back=True):
            return (node,)
        found = self._over_uplink() if self.engine.edge else self.at(node, back=True)
        return (found[0].path or (self.node,)) if found else None

    def urls_of(self, node: str) -> tuple[str, ...]:
        """Return where *node* listens, as far as it says so; none for this node."""
        links = self.engine.database.links(node)
        return () if links is None or node == self.node else links.urls

    def stands(self, path: Sequence[str], *, back: bool = False) -> bool:
        """Return whether *path*, *back* of replies, still leads on over nodes that do not drain, and no connection is direct."""
        if self.engine.edge:
            return path[0] in (self.node, self.engine.uplink)
        if not path or tuple(path) == (self.node,):
            return True
        if self._is_direct(path[-1], back=back):
            return len(path) == 1
        claims = self.engine.database.claims
        draining = self.engine.database.draining(path[:-1])
        here = self.node
        for node in path:
            if node not in claims.get(here, {}) or here not in claims.get(node, {}):
                return False
            if here in draining and here != self.node:
                return False
            here = node
        return True

    def next(self, route: Route, *, back: bool = False) -> Neighbour:
        """Return the neighbour, or the member with a direct connection, with which *route*, *back* of replies, begins.

        Raises:
            LocalProtocolError: It is none.
        """
        node = str(route[0])
        neighbour = self.neighbours.get(node)
        if neighbour is None or not neighbour.usable:
            neighbour = (self.returns if back else self.direct).get(node)
        if neighbour is None or not neighbour.usable:
            raise LocalProtocolError(f"the next node {route[0]!r:.50} is no neighbour")
        return neighbour

    def join(
        self,
        link: ReceivingLink | SendingLink,
        route: Route,
        *,
        of: LinkSession | None,
        properties: Mapping[object, object],
        on_ended: Callable[[Splice], None],
        refuse: Callable[[Error], None] | None = None,
        now: Callable[[], float] | None = None,
    ) -> Splice:
        """Join *link* with one to the next node of *route*, which counts among the links there until it ends.

        Args:
            link: The link, requested and not answered. The one to the next node gets its name: termini are kept for a client
                and its name of the link, so that they are found from any node.
            route: The ids still to pass.
            of: Session of the peer whose links depend on each other; None for links of many senders.
            properties: Properties of the attach, with the route.
            on_ended: Called once, when both links have ended.
            refuse: As for :class:`Splice`.
            now: As for :class:`Splice`.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        neighbour = self.next(route)
        opener = neighbour.opener(of=of)
        opened = LegCount(neighbour, opener)

        def ended(splice: Splice) -> None:
            on_ended(splice)
            opened.end()

        try:
            return Splice(
                *(link, opener, link.name),
                properties=properties,
                limits=self.limits,
                siblings=opener.siblings,
                refuse=refuse,
                on_ended=ended,
                now=now,
            )
        except LocalProtocolError:
            opened.end()
            raise

    def new_name(self) -> str:
        """Return a name for a link, unique in the mesh."""
        return f"{self.node}/{self.engine.own.incarnation:x}/{next(self._names)}"

    def properties(
        self, route: Route, leg: LegUse, others: Mapping[object, object] | None = None
    ) -> dict[object, Any]:
        """Return the properties of an attach with *route*; links of an edge to its uplink have none, and are judged there."""
        properties = {**(others or {}), LEG: write_leg(leg)}
        if not self.engine.edge or route[0] == self.node:
            properties[ROUTE] = route
        return properties


class LegCount:
    """Count of one open link to a neighbour, which ends once."""

    __slots__ = ("_neighbour", "_opener")

    def __init__(self, neighbour: Neighbour, opener: Sessions) -> None:
        self._neighbour: Neighbour | None = neighbour
        self._opener = opener
        neighbour.took(opener)

    def end(self) -> None:
        """Count the end of the link."""
        neighbour, self._neighbour = self._neighbour, None
        if neighbour is not None:
            neighbour.gave_back(self._opener)


def spread(found: Sequence[MeshRoute], most: int, *, zone: str = "") -> list[MeshRoute]:
    """Return *most* of the destinations *found*, the first ones, but those of *zone* before others.

    A quarter of them are of other zones, if there are such: messages go there while all of the own zone are busy.
    """
    if not zone or len(found) <= most:
        return list(found[:most])
    near = [each for each in found if each.zone == zone]
    far = [each for each in found if each.zone != zone]
    near = near[: most - min(len(far), most // 4)]
    return [*near, *far[: most - len(near)]]


def node_of(address: str) -> str | None:
    """Return the node that *address* names, such as ``$mesh/NODE/…``; None if it names none."""
    address = address.removeprefix(DIRECT_REPLY)
    return address.split("/", 2)[1] if address.startswith(f"{MESH}/") else None


def weight_of(one: str, other: str) -> int:
    """Return a number that orders others differently for each node (rendezvous hashing)."""
    return crc32(f"{one}\0{other}".encode())
