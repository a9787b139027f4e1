"""Counts of one member of a mesh, and what it knows of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from .adjacency import Adjacency, LineState
from .host import MeshHost
from .instances import STUCK_S
from .peers import Peers
from .routing import RoutingEngine
from .ways import Ways

#: States of members that are no neighbours: the one that is asked, and others within reach.
HERE: Final = "here"
REACHED: Final = "reached"


class MeshMemberState(Struct, frozen=True, kw_only=True):
    """A member of a mesh, as another one knows it."""

    node: str
    zone: str
    #: ``here`` for the member that is asked; ``up``, ``suspect``, ``heard`` or ``down`` for its neighbours and edges;
    #: ``reached`` for others within reach.
    state: str
    #: Sum of the costs of the links on the way to it.
    cost: int
    #: Whether it is connected with the member that is asked; and whether it is an edge of that member.
    neighbour: bool
    edge: bool


class MeshStats(Struct, frozen=True, kw_only=True):
    """Counts of one member of a mesh: those of its own node, and of messages that pass through it.

    Numbers of messages, offers and refusals are totals since the member has joined; all others are those of the moment.
    """

    #: Members within reach, this one first, then its edges: at most ``mesh_nodes_max`` and ``mesh_edges_max``.
    members: tuple[MeshMemberState, ...]
    #: Addresses and patterns that this member knows, and offers of these: one for each address and member. Those of members
    #: out of reach are kept for ``mesh_kept_s``.
    addresses: int
    offers: int
    #: Direct connections: to members that are no neighbours, opened by either.
    direct: int
    #: Links to other members, and to our own nodes, that this member has opened along routes.
    legs: int
    #: Links of other members that it passes on, and those that end at its nodes.
    hops: int
    ends: int
    #: Links of its clients that seek a path.
    seeking: int
    #: Messages of its clients that wait for credit of a destination.
    waiting: int
    #: Messages without an outcome that were sent on for clients of this member more than ten seconds ago: to one of several
    #: destinations, to all, or on links that lead to one. Those that a client of this member received and keeps are among them.
    stuck: int
    #: Settled messages that were lost, since a link broke or no destination came in time.
    dropped: int
    #: Copies of settled messages that slow destinations of multicast addresses did not get.
    skipped: int
    #: Offers of other nodes and of edges that were dropped, by the reason: ``not admitted`` by rules or rights,
    #: ``incomplete list``, or the limit that they exceed.
    offers_dropped: dict[str, int]
    #: Connections that named the mesh and were not used, by the reason.
    members_refused: dict[str, int]
    #: Malformed messages of neighbours about the mesh, and links refused because of their routes.
    records_refused: int
    links_refused: int
    #: Of each bridge, 1 if its broker can be reached and else 0; and messages that it has refused, since they had passed this
    #: mesh or too many.
    bridges: dict[str, int]
    bridges_refused: dict[str, int]


def collect(
    engine: RoutingEngine,
    ways: Ways,
    host: MeshHost,
    peers: Peers,
    *,
    now: float,
    bridges: Mapping[str, int] | None = None,
    bridges_refused: Mapping[str, int] | None = None,
) -> MeshStats:
    """Return the counts of a member.

    Args:
        engine: Its routing.
        ways: Its ways.
        host: Its host.
        peers: Its neighbours.
        now: The time, in seconds.
        bridges: States of its bridges.
        bridges_refused: What these have refused.
    """
    directory = engine.database.directory
    return MeshStats(
        members=_members(engine),
        addresses=directory.named,
        offers=directory.count,
        direct=len(ways.direct) + len(ways.returns),
        legs=sum(each.opened for some in (ways.neighbours, ways.direct) for each in some.values()),
        hops=host.hops,
        ends=host.placed,
        seeking=host.pinned.seeking,
        waiting=host.waiting,
        stuck=host.stuck(now - STUCK_S),
        dropped=host.dropped,
        skipped=host.skipped,
        offers_dropped=engine.dropped(),
        members_refused=dict(peers.refused),
        records_refused=engine.refused,
        links_refused=host.refused,
        bridges=dict(bridges or {}),
        bridges_refused=dict(bridges_refused or {}),
    )


def state_of(engine: RoutingEngine, node: str) -> str:
    """Return the state of *node*, which is within reach or a neighbour."""
    line = engine.lines.get(node)
    if line is not None:
        return line.state.value
    return HERE if node == engine.node else REACHED


def _members(engine: RoutingEngine) -> tuple[MeshMemberState, ...]:
    costs = engine.paths().costs
    found = []
    for node in sorted(costs, key=lambda each: (costs[each], each)):
        links = engine.database.links(node)
        line = engine.lines.get(node)
        found.append(
            MeshMemberState(
                node=node,
                zone=links.zone if links is not None else "",
                state=state_of(engine, node),
                cost=costs[node],
                neighbour=line is not None,
                edge=line is not None and line.edge,
            )
        )
    others = [line for node, line in sorted(engine.lines.items()) if node not in costs]
    return (*found, *map(_unreached, others))


def _unreached(line: Adjacency) -> MeshMemberState:
    """Return the state of an edge, or of a neighbour that is not used at present."""
    return MeshMemberState(
        node=line.node,
        zone="",
        state=line.state.value,
        cost=line.cost,
        neighbour=True,
        edge=line.edge,
    )


def neighbours_up(engine: RoutingEngine, *, edges: bool) -> int:
    """Return the number of neighbours that are up, or of those that are edges."""
    return sum(each.state is LineState.UP and each.edge is edges for each in engine.lines.values())
