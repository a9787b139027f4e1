"""Routing engines in virtual time: meshes that change, lines that fail, and neighbours that lie."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
from meshes import Mesh

from amqp_rt.limits import Limits
from amqp_rt.mesh import routing
from amqp_rt.mesh.adjacency import LineState
from amqp_rt.mesh.records import (
    EDGE,
    GIVES,
    NUMBER_MAX,
    TAKES,
    Addresses,
    Digest,
    Hello,
    Links,
    Offer,
    Record,
    Version,
    decode_record,
    encode_record,
)
from amqp_rt.mesh.routing import LineChanged

UP, SUSPECT, LOST = LineState.UP, LineState.SUSPECT, LineState.LOST


def chain(*names: str, limits: Limits | None = None, seed: int = 0) -> Mesh:
    """Return nodes in a row that know each other."""
    mesh = Mesh(seed, limits or Limits())
    for name in names:
        mesh.start(name)
    for one, other in pairwise(names):
        mesh.link(one, other)
    mesh.run(3)
    mesh.check_quiet()
    return mesh


def path(mesh: Mesh, node: str, address: str) -> list[tuple[str, ...]]:
    return [each.path for each in mesh.engines[node].lookup(address)]


# --- meshes that change ------------------------------------------------------------------------------


@pytest.mark.req("P1")
def test_an_address_is_found_over_several_hops_and_withdrawn_again() -> None:
    mesh = chain("a", "b", "c", "d")
    mesh.offer("d", "orders")
    mesh.offer("b", "orders")
    mesh.run(0.1)
    assert path(mesh, "a", "orders") == [("b",), ("b", "c", "d")]
    assert path(mesh, "d", "orders") == [(), ("c", "b")]
    mesh.carry_out("b", mesh.engines["b"].withdraw("orders", now=mesh.now))
    mesh.run(0.1)
    assert path(mesh, "a", "orders") == [("b", "c", "d")]
    mesh.check_quiet()


@pytest.mark.req("P2")
def test_the_lowest_id_decides_about_the_distribution() -> None:
    mesh = chain("a", "b", "c")
    mesh.offer("c", "x", distribution="balanced")
    mesh.offer("b", "x", distribution="multicast", weight=3)
    mesh.run(0.2)
    for node in "abc":
        found = {each.node: each.offer for each in mesh.engines[node].lookup("x")}
        assert found == {"b": Offer(TAKES, "multicast", 3), "c": Offer(TAKES, "multicast", 1)}


@pytest.mark.req("P1")
@pytest.mark.parametrize(
    "count",
    [
        50,
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_mesh_converges_after_failures_and_restarts(count: int) -> None:
    mesh = Mesh(count)
    names = mesh.graph(count, 8 if count == 50 else 4)
    for name in names[::10]:
        mesh.offer(name, "shared", f"own/{name}")
    mesh.run(4)
    mesh.check_quiet()
    before = mesh.sent[5]
    mesh.offer(names[3], "new")
    mesh.run(1)
    # Each node sends it on to all neighbours but the one that it came from: less than twice per line.
    assert mesh.sent[5] - before <= 2 * len(mesh.lines)
    mesh.stop(names[10])
    mesh.stop(names[20], silent=True)
    mesh.run(0.9)
    assert {each.node for each in mesh.engines[names[0]].lookup("shared")} == (
        set(names[::10]) - {names[10], names[20]}
    )
    mesh.run(8)
    mesh.check_quiet()
    # Clocks that were put back or forward by a day change nothing.
    mesh.start(names[10], wall_s=1_790_000_000 - 86_400)
    mesh.start(names[20], wall_s=1_790_000_000 + 86_400)
    mesh.offer(names[10], "shared")
    mesh.run(5)
    mesh.check_quiet()
    assert names[10] in {each.node for each in mesh.engines[names[0]].lookup("shared")}
    assert mesh.engines[names[10]].own.contested >= 1


@pytest.mark.req("P1")
@pytest.mark.parametrize("seed", range(4))
def test_a_mesh_converges_whatever_happens(seed: int) -> None:
    """Losses, one-way lines, partitions, flaps, blocked programs and restarts, then quiet."""
    mesh = Mesh(seed)
    names = mesh.graph(12, 4)
    for line in mesh.lines.values():
        line.loss = 0.05
    choose = mesh.random
    for _ in range(60):
        mesh.run(choose.uniform(0.0, 0.7))
        node = choose.choice(names)
        what = choose.randrange(7)
        if node not in mesh.engines:
            mesh.start(node, wall_s=1_790_000_000 + choose.randint(-86_400, 86_400))
        elif what == 0:
            mesh.stop(node, silent=choose.random() < 0.5)
        elif what == 1:
            other = choose.choice(list(mesh.ends[node]))
            mesh.ends[node][other].cut.add((node, other))
            mesh.after(choose.uniform(0.1, 8), mesh.ends[node][other].cut.clear)
        elif what == 2:
            half = set(choose.sample(names, 6))
            for pair, line in mesh.lines.items():
                if len(pair & half) == 1:
                    one, other = pair
                    line.cut |= {(one, other), (other, one)}
                    mesh.after(4.0, line.cut.clear)
        elif what == 3:
            mesh.blocked[node] = mesh.now + choose.uniform(0.1, 7)
        elif what == 4:
            mesh.close(node, choose.choice(list(mesh.ends[node])))
        elif what == 5:
            mesh.offer(node, *(f"x{choose.randrange(20)}" for _ in range(5)))
        else:
            address = f"x{choose.randrange(20)}"
            mesh.carry_out(node, mesh.engines[node].withdraw(address, now=mesh.now))
    for line in mesh.lines.values():
        line.loss = 0.0
    for node in set(names) - mesh.engines.keys():
        mesh.start(node)
    # Lines that flapped often wait for half a minute.
    mesh.run(60)
    mesh.check_quiet()
    assert not mesh.left


@pytest.mark.req("P1")
def test_both_sides_of_a_partition_serve_what_they_have() -> None:
    mesh = chain("a", "b", "c", "d")
    for node in ("a", "d"):
        mesh.offer(node, "x")
    mesh.run(0.2)
    mesh.lines[frozenset("bc")].cut = {("b", "c"), ("c", "b")}
    mesh.run(1.0)
    assert path(mesh, "b", "x") == [("a",)]
    assert path(mesh, "c", "x") == [("d",)]
    mesh.run(60)
    mesh.check_quiet()
    mesh.lines[frozenset("bc")].cut.clear()
    mesh.run(3)
    assert path(mesh, "b", "x") == [("a",), ("c", "d")]
    mesh.check_quiet()


@pytest.mark.req("P1")
def test_a_line_that_works_one_way_is_routed_around_within_a_second() -> None:
    mesh = chain("a", "b", "c")
    mesh.link("a", "c")
    mesh.offer("b", "x")
    mesh.run(1)
    assert path(mesh, "a", "x") == [("b",)]
    mesh.lines[frozenset("ab")].cut.add(("b", "a"))
    mesh.run(1.0)
    assert path(mesh, "a", "x") == [("c", "b")]
    assert mesh.engines["a"].lines["b"].state is not UP
    assert mesh.engines["b"].lines["a"].state is not UP
    assert "a" not in mesh.engines["c"].database.claims["b"]


def test_a_silent_neighbour_is_suspect_before_a_second_and_lost_after_five() -> None:
    mesh = chain("a", "b")
    begin = mesh.now
    mesh.lines[frozenset("ab")].cut = {("a", "b"), ("b", "a")}
    mesh.run(6)
    of_a = [(at - begin, state) for at, node, _, state in mesh.reports if node == "a" and at > begin]  # fmt: skip
    assert [state for _, state in of_a] == [SUSPECT, LOST]
    assert 0.5 <= of_a[0][0] <= 0.76
    assert 4.7 <= of_a[1][0] <= 5.01


def test_a_line_that_flaps_waits_longer_each_time() -> None:
    """At 5 Hz; the records of its ends change a few times, and the other lines stand."""
    mesh = chain("a", "b", "c", "d")
    begin = mesh.now
    before = mesh.engines["d"].database.version("b").links
    for _ in range(100):
        mesh.close("a", "b")
        mesh.after(0.1, mesh.dial, "a", "b")
        mesh.run(0.2)
    ups = [at for at, node, peer, state in mesh.reports if at > begin and (node, peer, state) == ("b", "a", UP)]  # fmt: skip
    assert 4 <= len(ups) <= 7
    assert mesh.engines["d"].database.version("b").links - before <= 2 * len(ups) + 2
    others = {(node, peer) for at, node, peer, _ in mesh.reports if at > begin}
    assert others <= {("a", "b"), ("b", "a")}
    # Left alone, it is up after half a minute at most; a minute later all is forgotten.
    mesh.run(31)
    mesh.check_quiet()
    mesh.run(61)
    mesh.close("a", "b")
    mesh.dial("a", "b")
    mesh.run(0.3)
    assert mesh.engines["a"].lines["b"].state is UP


@pytest.mark.parametrize("seconds", [2.0, 4.5])
def test_a_program_that_was_blocked_loses_no_line(seconds: float) -> None:
    mesh = chain("a", "b", "c")
    begin = mesh.now
    mesh.blocked["b"] = mesh.now + seconds
    mesh.run(seconds + 3)
    after = [(node, state) for at, node, _, state in mesh.reports if at > begin]
    assert LOST not in {state for _, state in after}
    # The blocked one does not blame its neighbours: it did not listen.
    assert {node for node, state in after if state is SUSPECT} <= {"a", "c", "b"}
    mesh.check_quiet()


def test_the_monotonic_clock_may_jump_by_a_day() -> None:
    """As after a suspended machine: nobody was silent while nobody listened."""
    mesh = chain("a", "b")
    engine = mesh.engines["a"]
    effects = engine.tick(mesh.now + 86_400)
    assert not [each for each in effects if isinstance(each, LineChanged)]
    assert engine.lines["b"].state is UP


# --- draining, edges ---------------------------------------------------------------------------------


@pytest.mark.req("P4")
def test_a_draining_node_withdraws_and_is_passed_through_only_if_there_is_no_other_way() -> None:
    mesh = chain("a", "b", "c")
    for node in ("b", "c"):
        mesh.offer(node, "x")
    mesh.start("d")
    mesh.link("a", "d")
    mesh.link("d", "c")
    mesh.run(2)
    assert path(mesh, "a", "x") == [("b",), ("b", "c")]
    mesh.carry_out("b", mesh.engines["b"].drain(now=mesh.now))
    mesh.run(0.2)
    assert path(mesh, "a", "x") == [("d", "c")]
    mesh.stop("d")
    mesh.run(1)
    assert path(mesh, "a", "x") == [("b", "c")]


@pytest.mark.req("P4")
def test_an_uplink_offers_what_its_edges_offer() -> None:
    mesh = chain("a", "b")
    mesh.edges.add("e")
    mesh.start("e", zone="far")
    mesh.link("e", "b")
    mesh.offer("e", "x")
    mesh.offer("b", "x")
    mesh.run(2)
    (found,) = mesh.engines["a"].lookup("x")
    assert (found.node, found.offer.flags) == ("b", TAKES | EDGE)
    assert path(mesh, "a", "$mesh/e") == [("b",)]
    assert "e" not in mesh.engines["a"].database
    mesh.carry_out("e", mesh.engines["e"].withdraw("x", now=mesh.now))
    mesh.offer("e", "y")
    mesh.run(0.2)
    assert mesh.engines["a"].lookup("x")[0].offer.flags == TAKES
    assert path(mesh, "a", "y") == [("b",)]
    # A second uplink is connected, and offers no addresses of the edge until the first one has gone.
    mesh.link("e", "a")
    mesh.run(2)
    assert path(mesh, "a", "y") == [("b",)]
    assert path(mesh, "a", "$mesh/e") == [(), ("b",)]
    assert mesh.engines["e"].joined
    mesh.unlink("e", "b")
    mesh.run(0.2)
    assert path(mesh, "b", "y") == [("a",)]
    assert path(mesh, "b", "$mesh/e") == [("a",)]


@pytest.mark.req("P4")
def test_an_edge_leaves_an_uplink_that_drains_and_one_that_is_silent() -> None:
    mesh = chain("a", "b", "c")
    mesh.edges.add("e")
    mesh.start("e")
    edge = mesh.engines["e"]
    assert not edge.joined
    for number, uplink in enumerate("bac"):
        mesh.link("e", uplink)
        mesh.run(1 + number)
    mesh.offer("e", "x")
    mesh.run(1)
    assert (edge.uplink, path(mesh, "c", "x")) == ("b", [("b",)])
    mesh.carry_out("b", mesh.engines["b"].drain(now=mesh.now))
    mesh.run(0.2)
    assert (edge.uplink, path(mesh, "c", "x")) == ("a", [("b", "a")])
    mesh.stop("a", silent=True)
    mesh.run(1)
    # Uplinks that stay are preferred to those that drain.
    assert (edge.uplink, path(mesh, "c", "x")) == ("c", [()])
    assert edge.joined
    mesh.unlink("e", "c")
    mesh.run(0.5)
    assert edge.uplink == "b"
    mesh.unlink("e", "b")
    mesh.run(0.5)
    assert edge.uplink is None
    assert not edge.joined


@pytest.mark.req("P4", "SE18")
@pytest.mark.parametrize("bound", [1, 3])
def test_mesh_edges_max(bound: int) -> None:
    """Edges count neither as nodes nor as neighbours, and do not take the room of addresses of the node itself."""
    limits = Limits(
        mesh_edges_max=bound,
        mesh_nodes_max=2,
        mesh_neighbours_max=1,
        mesh_node_addresses_max=bound + 2,
    )
    mesh = Mesh(limits=limits)
    for node in "ab":
        mesh.start(node)
    mesh.link("a", "b")
    mesh.offer("b", "own")
    edges = [f"e{number}" for number in range(bound + 1)]
    for edge in edges:
        mesh.edges.add(edge)
        mesh.start(edge)
        mesh.link(edge, "b")
        mesh.run(1)
        mesh.offer(edge, f"of/{edge}")
    mesh.run(2)
    engine = mesh.engines["b"]
    assert sorted(engine.lines) == ["a", *edges[:bound]]
    assert [path(mesh, "a", f"$mesh/{edge}") for edge in edges] == [*([[("b",)]] * bound), []]
    assert path(mesh, "a", "own") == [("b",)]
    # One address more fits.
    assert sum(bool(path(mesh, "a", f"of/{edge}")) for edge in edges) == 1
    assert engine.dropped().get("addresses of edges", 0) == bound - 1
    assert len(mesh.engines["a"].database) == 2


@pytest.mark.req("P4")
def test_the_list_of_an_edge_is_repaired_when_it_was_lost() -> None:
    mesh = chain("a", "b")
    mesh.edges.add("e")
    mesh.start("e")
    line = mesh.link("e", "b")
    mesh.run(2)
    line.loss = 1.0
    mesh.offer("e", "x")
    mesh.run(0.2)
    line.loss = 0.0
    assert path(mesh, "a", "x") == []
    mesh.run(3)
    assert path(mesh, "a", "x") == [("b",)]


@pytest.mark.req("P4")
def test_an_edge_speaks_for_itself_only() -> None:
    mesh = chain("a", "b")
    mesh.edges.add("e")
    mesh.start("e")
    mesh.link("e", "b")
    mesh.run(1)
    engine = mesh.engines["b"]
    known = dict(engine.database.claims), engine.database.digest
    for record in (
        Links("a", NUMBER_MAX - 2, 5, 9, "", False, (), {"e": 1}),
        Links("e", 5, 5, 9, "", False, (), {"b": 1}),
        Addresses("a", NUMBER_MAX - 2, 0, 9, 0, 1, {"x": Offer()}),
        Digest({"b": Version(NUMBER_MAX - 2, 5, 5)}),
    ):
        mesh.inject("e", "b", encode_record(record))
    assert engine.refused == 4
    assert (dict(engine.database.claims), engine.database.digest) == known
    assert engine.own.contested == 0


# --- neighbours that lie -----------------------------------------------------------------------------


def forged(mesh: Mesh, origin: str, **changes: object) -> Links:
    """Return a record of *origin* that another node has made."""
    true = mesh.engines[origin].database.links(origin)
    assert true is not None
    fields = {name: getattr(true, name) for name in Links.__struct_fields__}
    return Links(**(fields | {"costs": {"evil": 1}} | changes))  # type: ignore[arg-type]


@pytest.mark.req("P1")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("what", ["seq", "last seq", "epoch", "incarnation"])
def test_an_origin_wins_over_what_is_forged_in_its_name(what: str, step: int) -> None:
    mesh = chain("a", "b", "c", "evil")
    true = mesh.engines["a"].database.links("a")
    assert true is not None
    changes = {
        "seq": {"seq": true.seq + step},
        "last seq": {"seq": NUMBER_MAX - 1 - step},
        "epoch": {"epoch": true.epoch + 10**9 * (1 + step)},
        "incarnation": {"epoch": true.epoch + 1 + step, "incarnation": 5},
    }[what]
    mesh.inject("evil", "c", encode_record(forged(mesh, "a", **changes)))
    # Three hops to the origin and back, and the pause between two changes of it.
    mesh.run(0.2)
    for node in ("a", "b", "c", "evil"):
        assert mesh.engines[node].database.claims["a"] == {"b": 1}
    if what != "seq" or step:
        assert mesh.engines["a"].own.contested >= 1
    assert not mesh.left
    mesh.run(3)
    mesh.check_quiet()


@pytest.mark.req("P1")
def test_an_epoch_is_claimed_once_however_often_its_end_is_heard() -> None:
    """A second record of an earlier start, heard before the links of the new epoch, lets no number be used twice."""
    mesh = chain("a", "b")
    mesh.start("c")
    mesh.offer("a", "before")
    mesh.run(1)
    epoch = mesh.engines["a"].own.epoch
    # The line changes the links of a, which are not announced again so soon; addresses are.
    mesh.link("a", "c")
    while "c" not in mesh.engines["a"].database.claims["a"]:
        mesh.run(0.001)
    for seq in (100, 101):
        stale = forged(mesh, "a", epoch=epoch, seq=seq, incarnation=5)
        mesh.inject("b", "a", encode_record(stale))
        assert mesh.engines["a"].own.epoch == epoch + 1
    mesh.offer("a", "after")
    mesh.run(1)
    assert mesh.engines["a"].own.epoch == epoch + 1
    for node in ("a", "b", "c"):
        for address in ("before", "after"):
            assert path(mesh, node, address), (node, address)
    mesh.run(3)
    mesh.check_quiet()


@pytest.mark.req("P1")
def test_a_line_that_comes_up_is_told_of_links_that_came_just_before() -> None:
    """The versions sent to the line include these links, which are not flooded to it, before reach is computed."""
    engine = routing.RoutingEngine("d", 1, wall_s=1, now=0)
    engine.connect("c", 2, now=0)
    engine.connect("a", 3, now=0)

    def hello(node: str, incarnation: int, *, heard: int) -> bytes:
        return encode_record(Hello(node, incarnation, heard, 250, 0, 0, False))

    engine.receive("a", hello("a", 3, heard=0), now=0.01)
    engine.receive("c", hello("c", 2, heard=1), now=0.01)
    links = Links("c", 1, 2, 7, "", False, (), {"d": 1})
    engine.receive("c", encode_record(links), now=0.02)
    told = [
        record.versions
        for each in engine.receive("a", hello("a", 3, heard=1), now=0.02)
        if isinstance(each, routing.Send)
        and each.peer == "a"
        and isinstance(record := decode_record(each.data, Limits()), Digest)
    ]
    assert [versions["c"].links for versions in told] == [7]


def test_a_node_whose_epochs_are_exhausted_leaves() -> None:
    mesh = chain("a", "b")
    mesh.inject("b", "a", encode_record(forged(mesh, "a", epoch=NUMBER_MAX - 1)))
    assert "no epoch is left" in mesh.left["a"]
    assert mesh.engines["a"].tick(mesh.now) == []
    assert mesh.engines["a"].deadline == float("inf")


@pytest.mark.req("P1")
def test_addresses_that_rules_do_not_give_an_origin_are_dropped() -> None:
    mesh = Mesh()
    for node in "abc":
        mesh.start(node, admit=lambda origin, address, _offer: address.split("/")[0] == origin)
    mesh.link("a", "b")
    mesh.link("b", "c")
    mesh.run(1)
    parts = Addresses("c", mesh.engines["c"].own.epoch, 1, 2, 0, 1, {"c/x": Offer(), "a/x": Offer(TAKES | GIVES)})  # fmt: skip
    mesh.inject("c", "b", encode_record(parts))
    mesh.run(0.1)
    assert path(mesh, "a", "c/x") == [("b", "c")]
    assert path(mesh, "a", "a/x") == []
    assert mesh.engines["a"].database.directory.dropped == {"not admitted": 1}


@pytest.mark.req("P1")
def test_a_claimed_neighbour_that_does_not_agree_is_no_neighbour() -> None:
    mesh = chain("a", "b", "c")
    poisoned = forged(mesh, "c", seq=1_000, costs={"a": 1, "b": 1})
    mesh.inject("c", "b", encode_record(poisoned))
    mesh.offer("c", "x")
    mesh.run(0.2)
    assert path(mesh, "a", "x") == [("b", "c")]


@pytest.mark.req("SE18")
def test_many_updates_cost_little_and_the_last_one_is_learned() -> None:
    """100,000 in a second: at most as many as the rate allows are taken over and sent on."""
    mesh = chain("a", "b", "c")
    before = mesh.sent[4]
    true = mesh.engines["c"].database.links("c")
    assert true is not None
    records = [
        encode_record(forged(mesh, "c", seq=true.seq + 1 + number, costs={"b": 1 + number % 9}))
        for number in range(2_000)
    ]
    engine = mesh.engines["b"]
    for number in range(20_000):
        effects = engine.receive("c", records[number % 2_000], now=mesh.now + number / 100_000)
        mesh.carry_out("b", effects)
    assert mesh.sent[4] - before <= 2 * 20
    assert len(engine._recent) <= 1_024
    mesh.run(3)
    mesh.check_quiet()


@pytest.mark.req("SE18")
def test_malformed_messages_are_counted_and_change_nothing() -> None:
    mesh = chain("a", "b")
    engine = mesh.engines["a"]
    digest = engine.database.digest
    for data in (b"", b"\x45", b"\xc0", b"x" * 70_000, encode_record(Hello("c", 1, 0, 250, 0))):
        mesh.inject("b", "a", data)
    assert engine.refused == 5
    assert engine.database.digest == digest
    mesh.check_quiet()


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [1, 64])
def test_a_node_has_so_many_neighbours(bound: int) -> None:
    mesh = Mesh(limits=Limits(mesh_neighbours_max=bound))
    engine = mesh.start("hub")
    for number in range(bound):
        assert LineChanged(f"n{number}", 5, LOST) not in engine.connect(
            f"n{number}", 5, now=mesh.now
        )
    assert engine.connect("more", 5, now=mesh.now) == [LineChanged("more", 5, LOST)]
    assert len(engine.lines) == bound
    # An edge is no neighbour in the graph.
    assert engine.connect("edge", 5, now=mesh.now, edge=True) != [LineChanged("edge", 5, LOST)]


# --- identities --------------------------------------------------------------------------------------


def test_an_id_that_is_used_again_ends_the_old_line() -> None:
    mesh = chain("a", "b")
    mesh.offer("b", "old")
    mesh.run(0.2)
    old = mesh.engines["b"].own.incarnation
    mesh.stop("b", silent=True)
    mesh.start("b", wall_s=5)
    assert mesh.engines["b"].own.incarnation != old
    mesh.run(3)
    assert [state for _, node, _, state in mesh.reports if node == "a"].count(LOST) == 1
    assert path(mesh, "a", "old") == []
    mesh.check_quiet()


@pytest.mark.req("P1")
@pytest.mark.parametrize("seed", range(3))
def test_of_namesakes_the_lower_incarnation_leaves(seed: int) -> None:
    """Two nodes with one id, at the ends of a mesh; they hear of each other by their records only."""
    mesh = chain("b", "c", "d", seed=seed)
    mesh.start("a")
    mesh.link("a", "b")
    mesh.run(1)
    # Its twin is "a2" in the simulation, and says "a" in the protocol.
    mesh.alias("a2", "a")
    mesh.link("d", "a2")
    mesh.run(5)
    incarnations = {name: mesh.incarnations[name] for name in ("a", "a2")}
    lower = min(incarnations, key=lambda name: incarnations[name])
    assert set(mesh.left) == {lower}
    assert "another node" in mesh.left[lower]
    mesh.run(2)
    higher = "a" if lower == "a2" else "a2"
    neighbour = "b" if higher == "a" else "d"
    for node in ("b", "c", "d"):
        assert mesh.engines[node].database.claims["a"] == {neighbour: 1}


def test_a_namesake_as_a_neighbour_is_noticed_at_once() -> None:
    mesh = chain("a", "b")
    engine = mesh.engines["a"]
    mine = engine.own.incarnation
    assert engine.connect("a", mine - 1, now=mesh.now) == [LineChanged("a", mine - 1, LOST)]
    mesh.carry_out("a", engine.connect("a", mine + 1, now=mesh.now))
    assert "id 'a'" in mesh.left["a"]


# --- a thousand nodes --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif("AMQP_RT_LONG" not in os.environ, reason="make test-long")
def test_a_thousand_nodes_and_a_hundred_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start takes most of the time: each node hears of each other one three times, which are nine million messages."""
    known: dict[bytes, Record | None] = {}

    def decoded(data: bytes, limits: Limits) -> Record | None:
        # A thousand engines decode the same octets, of which one process needs the result once.
        if data not in known:
            if len(known) > 20_000:
                known.clear()
            known[data] = decode_record(data, limits)
        return known[data]

    monkeypatch.setattr(routing, "decode_record", decoded)
    mesh = Mesh(1_000)
    names = mesh.graph(1_000, 4)
    mesh.run(5)
    mesh.check_quiet(paths_of=3)
    begin = time.process_time()
    for number, name in enumerate(mesh.random.sample(names, 100)):
        mesh.stop(name, silent=number % 2 == 0)
        mesh.run(0.05)
    mesh.run(8)
    mesh.check_quiet(paths_of=3)
    print(f"{time.process_time() - begin:.0f} s of CPU, {sum(mesh.sent.values())} messages")
