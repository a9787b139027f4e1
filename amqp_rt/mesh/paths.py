"""Shortest paths and trees over the links of a mesh (pure).

A link counts if both of its ends claim it: a node cannot make itself the neighbour of another one. Nodes to avoid, which drain,
are passed through only if there is no other way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final

from ..limits import DEFAULT_LIMITS, Limits

#: Added for passing through a node to avoid: more than any path without it can cost.
_DETOUR: Final = 2**32

#: A node and the trees below it.
Tree = tuple[str, tuple["Tree", ...]]


def mutual(claims: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the links that both ends claim, each with the cost that its beginning claims."""
    empty: Mapping[str, int] = {}
    return {
        node: {other: cost for other, cost in costs.items() if node in claims.get(other, empty)}
        for node, costs in claims.items()
    }


def within_reach(claims: Mapping[str, Mapping[str, int]], source: str) -> set[str]:
    """Return *source* and all nodes that links claimed by both ends lead to."""
    empty: Mapping[str, int] = {}
    seen = {source}
    todo = [source]
    while todo:
        node = todo.pop()
        for other in claims.get(node, empty):
            if other not in seen and node in claims.get(other, empty):
                seen.add(other)
                todo.append(other)
    return seen


class Paths:
    """Shortest paths from one node to all others, by Dijkstra's algorithm.

    Of paths with equal costs, the one whose last node but one has the lower id is taken, so that equal databases lead to equal
    paths.
    """

    def __init__(
        self,
        claims: Mapping[str, Mapping[str, int]],
        source: str,
        *,
        avoid: Collection[str] = (),
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.source = source
        self._limits = limits
        empty: Mapping[str, int] = {}
        #: Cost of the path to each node within reach; that of a path through a node to avoid is 2**32 greater.
        self.costs: dict[str, int] = {}
        self._before: dict[str, str] = {source: ""}
        costs, parents = self.costs, self._before
        costs[source] = 0
        # Most costs of a mesh are equal: nodes wait in a list for each cost, and the heap has each cost once.
        waiting: dict[int, list[str]] = {0: [source]}
        heap = [0]
        while heap:
            cost = heappop(heap)
            for node in waiting.pop(cost):
                if costs[node] != cost:
                    continue
                onward = cost + _DETOUR if node in avoid and node != source else cost
                for other, more in claims.get(node, empty).items():
                    total = onward + more
                    known = costs.get(other)
                    # Links cost at least 1, so that a node of equal cost is not one that the path has passed.
                    if known is not None and (
                        total > known or (total == known and node >= parents[other])
                    ):
                        continue
                    if node not in claims.get(other, empty):
                        continue
                    parents[other] = node
                    if total != known:
                        costs[other] = total
                        if total in waiting:
                            waiting[total].append(other)
                        else:
                            waiting[total] = [other]
                            heappush(heap, total)

    def path(self, destination: str) -> tuple[str, ...] | None:
        """Return the ids to pass, the last of which is *destination*.

        Empty for the source itself; None without a way or if it has more than ``mesh_hops_max`` nodes.
        """
        if destination not in self.costs:
            return None
        found: list[str] = []
        node = destination
        while node != self.source:
            found.append(node)
            if len(found) > self._limits.mesh_hops_max:
                return None
            node = self._before[node]
        return tuple(reversed(found))

    def tree(self, destinations: Iterable[str]) -> tuple[tuple[Tree, ...], list[str]]:
        """Return the trees below the source that lead to *destinations*, and those left out.

        No id occurs twice. Left out are destinations without a path, and those for which the tree would have more than
        ``mesh_tree_max`` nodes.
        """
        below: dict[str, set[str]] = {}
        known: set[str] = set()
        left: list[str] = []
        for destination in sorted(set(destinations) - {self.source}):
            path = self.path(destination)
            if path is None or len(known.union(path)) > self._limits.mesh_tree_max:
                left.append(destination)
                continue
            before = self.source
            for node in path:
                below.setdefault(before, set()).add(node)
                before = node
            known.update(path)

        def grow(node: str) -> tuple[Tree, ...]:
            return tuple((each, grow(each)) for each in sorted(below.get(node, ())))

        return grow(self.source), left
