"""Routes as attaches carry them between nodes (pure).

The property ``x-opt-mesh-route`` of an attach lists the ids that the link still has to pass. Its last element can be a list of
routes, where the link branches; an empty one of these is the node at which it branches. Each node removes its own id and adds
none, so that no link travels in a circle, whatever the databases of nodes say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

from msgspec import Struct

from ..errors import AmqpError
from ..limits import Limits
from ..values import Symbol
from .paths import Tree

#: Property of an attach: the route.
ROUTE: Final = Symbol("x-opt-mesh-route")
#: Property of an attach: for what its link is used.
LEG: Final = Symbol("x-opt-mesh-leg")
#: Property of an attach of a node to itself: the receiver of a client to which its link leads; empty for the node's own nodes.
END: Final = Symbol("x-opt-mesh-end")
#: Entry of the error with which an uplink refuses to distribute messages of an edge: links to the address are routed.
LINKED: Final = Symbol("x-opt-mesh-linked")

#: Ids, and where the link branches a list of routes as the last element.
Route: TypeAlias = "list[str | list[Route]]"

#: Uses of links: messages of any sender, of priorities 0 to 4, of 5 to 9, and those that are streamed; a link of a client, passed
#: on as it is.
LOW, HIGH, STREAMS, PINNED = "low", "high", "streams", "link"
#: Uses for messages of any sender.
BANDS: Final = (LOW, HIGH, STREAMS)
#: How a link that branches treats outcomes, and destinations without credit; otherwise as by default.
_WORST, _SKIP = "worst", "skip"


class RouteRefused(AmqpError):
    """The route of an attach is malformed or too long, or does not begin here."""

    default_condition = "amqp:invalid-field"


class LegUse(Struct, frozen=True):
    """For what a link between nodes is used."""

    #: Id of the node at which the route begins.
    origin: str
    #: One of ``BANDS``, or ``PINNED``.
    band: str = LOW
    #: User for whom alone the link is; empty for all.
    user: str = ""
    #: Where the link branches: *accepted* counts least; destinations without credit are skipped.
    worst: bool = False
    skips: bool = False
    #: Id that the node gave to the client's connection, and the client's container-id; empty where the link is for several.
    client: str = ""
    container: str = ""


def read_route(value: object, node: str, limits: Limits) -> Route:
    """Return the rest of a route that begins at *node*.

    Raises:
        RouteRefused: It is malformed, begins elsewhere, is too long, or has an id twice.
    """
    seen: set[str] = set()
    todo: list[tuple[object, int]] = [(value, 0)]
    while todo:
        route, depth = todo.pop()
        if not isinstance(route, list):
            raise RouteRefused(f"a route is a list, not {route!r:.50}")
        for at, step in enumerate(route):
            if isinstance(step, str):
                depth += 1
                if depth > limits.mesh_hops_max or len(seen) >= limits.mesh_tree_max:
                    raise RouteRefused(
                        f"a route passes {limits.mesh_hops_max} nodes at most, "
                        f"and has {limits.mesh_tree_max} in all"
                    )
                if step in seen:
                    raise RouteRefused(f"the route has {step!r:.50} twice")
                seen.add(step)
            elif isinstance(step, list) and 0 < at == len(route) - 1 and step:
                if len(step) > limits.mesh_tree_max or sum(not each for each in step) > 1:
                    raise RouteRefused("a route branches into routes, of which one may be empty")
                todo.extend((each, depth) for each in step)
            else:
                raise RouteRefused(f"a route has no element {step!r:.50}")
    assert isinstance(value, list)
    if not value or value[0] != node:
        raise RouteRefused(f"the route does not begin at {node!r}", condition="amqp:not-found")
    return value[1:]


def branches_of(rest: Route) -> list[Route] | None:
    """Return the routes into which *rest* branches here; None if it goes on as one."""
    if rest and isinstance(rest[0], list):
        return rest[0]
    return None


def route_of(tree: Tree, destinations: Collection[str]) -> Route:
    """Return the route that leads from the root of *tree*, which it begins with, to all *destinations* in it."""
    node, below = tree
    routes = [route_of(each, destinations) for each in below]
    if not routes:
        return [node]
    if node in destinations:
        routes.insert(0, [])
    if len(routes) == 1:
        return [node, *routes[0]]
    return [node, routes]


def nodes_in(route: Route) -> list[str]:
    """Return the ids in *route*, the first one before those to which it leads."""
    found: list[str] = []
    todo: list[str | list[Route]] = list(reversed(route))
    while todo:
        step = todo.pop()
        if isinstance(step, str):
            found.append(step)
        else:
            todo.extend(each for branch in reversed(step) for each in reversed(branch))
    return found


def write_leg(leg: LegUse) -> dict[str, str]:
    """Return the value of the property."""
    value = {"from": leg.origin, "band": leg.band}
    for key in ("user", "client", "container"):
        if text := getattr(leg, key):
            value[key] = text
    if leg.worst:
        value["outcomes"] = _WORST
    if leg.skips:
        value["slow"] = _SKIP
    return value


def read_leg(properties: Mapping[object, object]) -> LegUse:
    """Return for what a link is used. Without the property, and if it is malformed, it is a link of a client."""
    value = properties.get(LEG)
    if not isinstance(value, dict):
        return LegUse("", PINNED)
    texts = [value.get(key, "") for key in ("from", "user", "client", "container")]
    if not all(isinstance(each, str) for each in texts):
        return LegUse("", PINNED)
    origin, user, client, container = texts
    band = value.get("band")
    if band in BANDS:
        client = container = ""
    return LegUse(
        *(origin, str(band) if band in BANDS else PINNED, user),
        worst=value.get("outcomes") == _WORST,
        skips=value.get("slow") == _SKIP,
        client=client,
        container=container,
    )
