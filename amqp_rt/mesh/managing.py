"""A member of a mesh as operators see it: entities of its ``$management``.

``amqp_rt.mesh`` is the membership itself, which can be drained; ``amqp_rt.mesh-node``, ``amqp_rt.mesh-address`` and
``amqp_rt.mesh-leg`` are what the member knows of the mesh. Requests and rights are those of every management node: each takes
the right to manage ``$management``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from ..container.container import Container
from ..errors import AmqpError
from ..events import Peer
from ..fronts.base import SENDER
from ..management.answering import (
    ADDRESS,
    Collection,
    EntityManagement,
    UnchangeableEntities,
    attributes,
)
from ..message import Message
from ..termini import Coordinator
from .host import MeshHost
from .neighbours import MESH
from .peers import MeshMember, Peers
from .pinned import COORDINATOR, PinnedLink
from .records import EDGE, GIVES, LINK_ROUTED, PATTERN, TAKES
from .routing import MeshRoute, RoutingEngine
from .splices import Splice
from .statistics import MeshStats, collect, neighbours_up, state_of
from .ways import Ways

__all__ = [
    "MeshAddressEntity",
    "MeshEntity",
    "MeshLegEntity",
    "MeshNodeEntity",
    "MeshStatus",
    "managed",
]

#: Nodes and neighbours that one row names; the row of one address alone names more.
_NAMED_MAX: Final = 16
_ROUTES_MAX: Final = 256
#: Beginning of the patterns by which uplinks offer what their edges created.
DIRECT: Final = f"{MESH}/"


class MeshEntity(Struct, frozen=True, kw_only=True):
    """Membership of a container in a mesh; its name is that of the mesh."""

    name: str
    node: str
    role: str
    zone: str
    #: Joined, and not draining.
    ready: bool
    draining: bool
    #: Nodes within reach, this one included; of these, the neighbours of this one; and its edges.
    nodes: int
    neighbours: int
    edges: int
    #: Offers that this node knows, of all nodes.
    offers: int
    #: Links that this node has opened to others along routes, and links of others that it passes on, or that end here.
    legs: int
    hops: int
    ends: int
    #: As in :class:`MeshStats`.
    seeking: int
    waiting: int
    stuck: int
    dropped: int
    skipped: int
    #: Whether messages of our clients are under way, or links of others are open.
    busy: bool
    #: Offers dropped, members not accepted and malformed records, by their reasons.
    refused: dict[str, int]


class MeshNodeEntity(Struct, frozen=True, kw_only=True):
    """A node of the mesh."""

    name: str
    zone: str
    #: ``here``; ``up``, ``suspect``, ``heard`` or ``down`` for neighbours; ``reached`` for others within reach; ``edge``.
    state: str
    draining: bool
    #: Cost of the path, and the nodes that it passes; the last one is the node itself.
    cost: int
    path: list[str]
    #: Neighbours, the first of them, and addresses that it offers.
    links: int
    neighbours: list[str]
    addresses: int
    urls: list[str]


class MeshAddressEntity(Struct, frozen=True, kw_only=True):
    """An address that nodes within reach serve."""

    name: str
    distribution: str
    #: Whether messages can be sent there, and received from there; and whether links are routed, not messages.
    takes: bool
    gives: bool
    link_routed: bool
    #: Nodes that serve it, and those that are alive; the nearest, and what the path to the first of them costs.
    instances: int
    alive: int
    nodes: list[str]
    cost: int
    #: Ways to each node, the nearest first; in the row of one address only.
    routes: list[dict[str, Any]] | None = None


class MeshLegEntity(Struct, frozen=True, kw_only=True):
    """A link that this node has opened to a destination, for messages of its clients.

    A pinned link is the continuation of one link of a client, which its name says after the client's container-id. It has no load or
    latency.
    """

    name: str
    address: str
    #: User for whom alone it is, empty for all.
    user: str
    to: str
    path: list[str]
    #: ``open``, ``opening``, ``retiring`` or ``ejected``; ``pinned``, or ``pinned, from there`` for a client's receiver.
    state: str
    credit: int
    outstanding: int
    load: int
    slots: int
    latency_ms: float


class MeshStatus:
    """State of the membership of one container.

    Args:
        member: The member.
        engine: Its routing.
        ways: Its ways.
        host: Its host.
        peers: Its neighbours.
        joined: Whether it has joined the mesh.
        drain: Withdraws its addresses.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        member: MeshMember,
        *,
        engine: RoutingEngine,
        ways: Ways,
        host: MeshHost,
        peers: Peers,
        joined: Callable[[], bool],
        drain: Callable[[], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:
        self.member = member
        self.engine = engine
        self.ways = ways
        self.host = host
        self.peers = peers
        self.joined = joined
        self.drain = drain
        self.now = now

    def stats(
        self,
        *,
        bridges: Mapping[str, int] | None = None,
        bridges_refused: Mapping[str, int] | None = None,
    ) -> MeshStats:
        """Return the counts of the member, with those of its bridges as given."""
        return collect(
            *(self.engine, self.ways, self.host, self.peers),
            now=self.now(),
            bridges=bridges,
            bridges_refused=bridges_refused,
        )

    def summary(self) -> MeshEntity:
        """Return the membership as a whole."""
        engine, host, member = self.engine, self.host, self.member
        stats = self.stats()
        return MeshEntity(
            name=member.mesh,
            node=member.node,
            role=member.role,
            zone=member.zone,
            ready=self.joined() and not engine.draining,
            draining=engine.draining,
            nodes=len(engine.paths().costs),
            neighbours=neighbours_up(engine, edges=False),
            edges=neighbours_up(engine, edges=True),
            offers=stats.offers,
            legs=stats.legs,
            hops=stats.hops,
            ends=stats.ends,
            seeking=stats.seeking,
            waiting=stats.waiting,
            stuck=stats.stuck,
            dropped=stats.dropped,
            skipped=stats.skipped,
            busy=bool(stats.hops or stats.ends or host.busy),
            refused={
                **{f"offer: {reason}": count for reason, count in stats.offers_dropped.items()},
                **{f"member: {reason}": count for reason, count in stats.members_refused.items()},
                **{
                    name: count
                    for name, count in (
                        ("record", stats.records_refused),
                        ("link", stats.links_refused),
                    )
                    if count
                },
            },
        )

    def node(self, name: str) -> MeshNodeEntity | None:
        """Return what is known of a node within reach, or of an edge of ours; None if it is neither."""
        engine = self.engine
        line = engine.lines.get(name)
        path = engine.paths().path(name)
        if path is None:
            if line is None or not line.edge:
                return None
            return MeshNodeEntity(
                name=name,
                zone="",
                state=f"edge, {line.state.value}",
                draining=False,
                cost=line.cost,
                path=[name],
                links=1,
                neighbours=[self.member.node],
                addresses=engine.edge_addresses(name),
                urls=[],
            )
        links = engine.database.links(name)
        costs = {} if links is None else links.costs
        return MeshNodeEntity(
            name=name,
            zone=links.zone if links is not None else "",
            state=state_of(engine, name),
            draining=links is not None and links.draining,
            cost=engine.paths().costs[name],
            path=list(path),
            links=len(costs),
            neighbours=sorted(costs)[:_NAMED_MAX],
            addresses=len(engine.database.directory.of(name)),
            urls=list(links.urls) if links is not None else [],
        )

    def address(self, name: str, *, routes: bool = False) -> MeshAddressEntity | None:
        """Return how an address is served, with *routes* also the ways to its nodes; None if no node within reach does."""
        found = self.engine.lookup(name)
        return None if not found else _address_entity(name, found, routes=routes)

    def pattern(self, name: str, *, routes: bool = False) -> MeshAddressEntity | None:
        """Return the same for a pattern as it was offered."""
        found = self.engine.lookup_pattern(name)
        return None if not found else _address_entity(name, found, routes=routes)

    def legs(self) -> Iterator[MeshLegEntity | None]:
        """Yield the legs of all addresses; None for an address without any."""
        for each in self.host.routed_addresses():
            yield None
            for node, path, leg in each.open_legs():
                standing = leg.standing
                if leg.retiring:
                    state = "retiring"
                elif not leg.link.attached:
                    state = "opening"
                else:
                    state = "ejected" if standing.ejected_until > self.now() else "open"
                yield MeshLegEntity(
                    name=leg.link.name,
                    address=each.address,
                    user=each.user,
                    to=node,
                    path=list(path),
                    state=state,
                    credit=leg.link.credit if leg.link.attached else 0,
                    outstanding=standing.outstanding,
                    load=standing.load,
                    slots=standing.slots,
                    latency_ms=round(standing.latency * 1_000, 3),
                )
        for tree in self.host.trees():
            yield None
            for to, route, branch in tree.open_branches():
                yield MeshLegEntity(
                    name=branch.link.name,
                    address=tree.address,
                    user=tree.user,
                    to=to,
                    path=route,
                    state="open" if branch.link.attached else "opening",
                    credit=branch.link.credit if branch.link.attached else 0,
                    outstanding=len(branch.unsettled),
                    load=0,
                    slots=0,
                    latency_ms=0.0,
                )
        for pinned, splice in self.host.pinned.joined():
            yield _pinned_entity(pinned, splice)


def _pinned_entity(pinned: PinnedLink, splice: Splice) -> MeshLegEntity:
    link = pinned.link
    gives = link.role == SENDER
    terminus = link.source if gives else link.target
    attached = link.attached and splice.outlet.attached
    state = "pinned, from there" if gives else "pinned"
    return MeshLegEntity(
        name=f"{link.peer.container_id}/{link.name}",
        address=COORDINATOR
        if isinstance(terminus, Coordinator)
        else getattr(terminus, "address", ""),
        user=link.peer.user or "",
        to=pinned.node,
        path=list(pinned.path),
        state=state if attached else "opening",
        credit=splice.outlet.credit if attached else 0,
        outstanding=splice.unsettled,
        load=0,
        slots=0,
        latency_ms=0.0,
    )


def _address_entity(name: str, found: list[MeshRoute], *, routes: bool) -> MeshAddressEntity:
    flags = 0
    for each in found:
        flags |= each.offer.flags
    return MeshAddressEntity(
        name=name,
        distribution=found[0].offer.distribution,
        takes=bool(flags & TAKES),
        gives=bool(flags & GIVES),
        link_routed=bool(flags & LINK_ROUTED),
        instances=len(found),
        alive=sum(bool(each.offer.weight) for each in found),
        nodes=[each.node for each in found[:_NAMED_MAX]],
        cost=found[0].cost,
        routes=[
            {
                "node": each.node,
                "zone": each.zone,
                "cost": each.cost,
                "path": list(each.path),
                "alive": bool(each.offer.weight),
                "edge": bool(each.offer.flags & EDGE),
            }
            for each in found[:_ROUTES_MAX]
        ]
        if routes
        else None,
    )


class _MemberEntities(UnchangeableEntities):
    """Base of the collections.

    Args:
        status: The state of the member.
    """

    def __init__(self, status: MeshStatus) -> None:
        self._status = status


class _Memberships(_MemberEntities):
    type_name = "amqp_rt.mesh"
    attributes = MeshEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DRAIN": []}
    #: Whether virtual hosts separate peers; elsewhere they are only names by which peers call the container.
    in_broker = False

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        yield attributes(self._status.summary())

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        return attributes(self._status.summary()) if name == self._status.member.mesh else None

    async def act(self, operation: str, name: str, message: Message, virtual_host: str) -> None:
        if virtual_host and self.in_broker:
            raise AmqpError(
                "members of a mesh are drained from the default virtual host",
                condition="amqp:unauthorized-access",
            )
        await self._status.drain()


class _MeshNodes(_MemberEntities):
    type_name = "amqp_rt.mesh-node"
    attributes = MeshNodeEntity

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        engine = self._status.engine
        edges = [each.node for each in engine.lines.values() if each.edge]
        costs = engine.paths().costs
        for name in (*sorted(costs, key=lambda node: (costs[node], node)), *sorted(edges)):
            yield self.find(name, virtual_host)

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        found = self._status.node(name)
        return None if found is None else attributes(found)


class _MeshAddresses(_MemberEntities):
    type_name = "amqp_rt.mesh-address"
    attributes = MeshAddressEntity

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        status = self._status
        # A copy, since the addresses change between two turns of a query.
        for name, flags in status.engine.database.directory.addresses():
            if name.startswith(DIRECT):
                yield None
                continue
            found = status.pattern(name) if flags & PATTERN else status.address(name)
            yield None if found is None else attributes(found)

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        found = self._status.address(name, routes=True) or self._status.pattern(name, routes=True)
        return None if found is None else attributes(found)


class _MeshLegs(_MemberEntities):
    type_name = "amqp_rt.mesh-leg"
    attributes = MeshLegEntity

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        for each in self._status.legs():
            yield None if each is None else attributes(each)

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        found = (each for each in self._status.legs() if each is not None and each.name == name)
        return next((attributes(each) for each in islice(found, 1)), None)


@contextmanager
def managed(container: Container, status: MeshStatus) -> Iterator[None]:
    """Answer requests about *status* at the container's ``$management``, inside the block.

    A container without a management node gets one; an application's own node of that address stays as it is.
    """
    memberships = _Memberships(status)
    collections: list[Collection] = [
        memberships,
        _MeshNodes(status),
        _MeshAddresses(status),
        _MeshLegs(status),
    ]
    management = container.management
    if isinstance(management, EntityManagement):
        memberships.in_broker = True
        for each in collections:
            management.add_collection(each)
        try:
            yield
        finally:
            for each in collections:
                management.remove_collection(each.type_name)
        return
    if container.nodes.handler_at(ADDRESS) is not None:
        yield
        return
    own = EntityManagement(
        decide=container.permissions.decide, collections=collections, limits=container.limits
    )

    async def manage(message: Message, peer: Peer) -> Message:
        return await own.answer(message, peer)

    container.rpc(ADDRESS)(manage)
    try:
        yield
    finally:
        container.remove(ADDRESS)
