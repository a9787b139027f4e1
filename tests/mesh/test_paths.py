"""Paths and trees: compared with all paths of small graphs, and at their limits."""

from __future__ import annotations

from itertools import pairwise, permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.limits import Limits
from amqp_rt.mesh.paths import Paths, Tree, mutual, within_reach

Claims = dict[str, dict[str, int]]
NODES = "abcde"

claims_of_five = st.fixed_dictionaries(
    {
        node: st.dictionaries(st.sampled_from(NODES.replace(node, "")), st.integers(1, 5))
        for node in NODES
    }
)


def cost_of(claims: Claims, path: tuple[str, ...]) -> float:
    """Return the cost of *path*, infinite if one of its links is not claimed by both ends."""
    cost = 0.0
    for one, other in pairwise(path):
        if other not in claims[one] or one not in claims[other]:
            return inf
        cost += claims[one][other]
    return cost


def cheapest(claims: Claims, destination: str, without: set[str] | None = None) -> float:
    """Return the least cost of all paths from a to *destination*."""
    between = [node for node in NODES if node not in {"a", destination, *(without or ())}]
    return min(
        cost_of(claims, ("a", *middle, destination))
        for count in range(len(between) + 1)
        for middle in permutations(between, count)
    )


@pytest.mark.req("P1")
@given(claims_of_five)
def test_a_path_costs_least_of_all(claims: Claims) -> None:
    paths = Paths(claims, "a")
    for node in "bcde":
        path = paths.path(node)
        least = cheapest(claims, node)
        if path is None:
            assert least == inf
        else:
            assert cost_of(claims, ("a", *path)) == least == paths.costs[node]
            assert path[-1] == node
    assert set(paths.costs) == within_reach(claims, "a") == set(Paths(mutual(claims), "a").costs)


@pytest.mark.req("P1")
@given(claims_of_five, st.sampled_from(NODES))
def test_equal_databases_lead_to_equal_paths(claims: Claims, source: str) -> None:
    """Of the nodes through which a path costs least, the one with the lowest id is the last but one."""
    paths = Paths(claims, source)
    for node in paths.costs.keys() - {source}:
        before = [
            each
            for each, cost in paths.costs.items()
            if each in claims[node] and cost + claims[each].get(node, inf) == paths.costs[node]
        ]
        assert (source, *(paths.path(node) or ()))[-2] == min(before)


@pytest.mark.req("P4")
@given(claims_of_five, st.sets(st.sampled_from("bcde")))
def test_nodes_to_avoid_are_ends_or_the_only_way(claims: Claims, avoid: set[str]) -> None:
    paths = Paths(claims, "a", avoid=avoid)
    for node in "bcde":
        path = paths.path(node)
        least = cheapest(claims, node, avoid)
        if path is None:
            assert cheapest(claims, node) == inf
        elif least < inf:
            assert not avoid & set(path[:-1])
            assert cost_of(claims, ("a", *path)) == least


def chain(count: int) -> Claims:
    names = [f"n{number:03}" for number in range(count)]
    return {
        name: {
            other: 1
            for other in (names[max(at - 1, 0)], names[min(at + 1, count - 1)])
            if other != name
        }
        for at, name in enumerate(names)
    }


def test_a_link_needs_both_ends() -> None:
    """A node that claims another as its neighbour is not believed until the other one says so."""
    claims = {"a": {"b": 1}, "b": {"a": 1}, "evil": {"a": 1, "b": 1}}
    assert Paths(claims, "a").path("evil") is None
    assert mutual(claims)["evil"] == {}


def test_the_way_to_oneself_is_empty() -> None:
    assert Paths({}, "a").path("a") == ()
    assert Paths({}, "a").path("b") is None


@pytest.mark.parametrize("bound", [1, 16])
def test_mesh_hops_max(bound: int) -> None:
    paths = Paths(chain(bound + 2), "n000", limits=Limits(mesh_hops_max=bound))
    path = paths.path(f"n{bound:03}")
    assert path is not None
    assert len(path) == bound
    assert paths.path(f"n{bound + 1:03}") is None


def nodes_of(tree: tuple[Tree, ...]) -> list[str]:
    return [name for node, below in tree for name in (node, *nodes_of(below))]


@pytest.mark.req("P2")
@given(claims_of_five, st.sets(st.sampled_from(NODES)))
def test_a_tree_has_each_node_once(claims: Claims, destinations: set[str]) -> None:
    paths = Paths(claims, "a")
    tree, left = paths.tree(destinations)
    found = nodes_of(tree)
    assert len(found) == len(set(found))
    assert set(left) == {node for node in destinations if paths.path(node) is None}
    expected = {node for each in destinations for node in paths.path(each) or ()}
    assert set(found) == expected


@pytest.mark.parametrize("bound", [1, 256])
def test_mesh_tree_max(bound: int) -> None:
    names = [f"n{number:03}" for number in range(bound + 1)]
    claims = {"a": dict.fromkeys(names, 1)} | {name: {"a": 1} for name in names}
    paths = Paths(claims, "a", limits=Limits(mesh_tree_max=bound))
    tree, left = paths.tree(names[:-1])
    assert (len(nodes_of(tree)), left) == (bound, [])
    tree, left = paths.tree(names)
    assert (len(nodes_of(tree)), left) == (bound, [names[-1]])
