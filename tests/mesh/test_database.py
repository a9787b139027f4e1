"""MeshDatabase of a mesh: what is newer, what is kept, its limits, and that databases converge whatever is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amqp_rt.limits import Limits
from amqp_rt.mesh.database import UNKNOWN, MeshDatabase, Verdict
from amqp_rt.mesh.directory import Directory
from amqp_rt.mesh.records import (
    PATTERN,
    TAKES,
    Addresses,
    Links,
    Offer,
    Version,
    all_addresses,
    decode_record,
)

NEWER, SAME, OLDER, GAP, REFUSED = Verdict


def links(epoch: int, seq: int, origin: str = "a", **costs: int) -> Links:
    return Links(origin, epoch, 7, seq, "", False, (), costs)


def listed(epoch: int, seq: int, *addresses: str, origin: str = "a") -> Addresses:
    return Addresses(origin, epoch, 0, seq, 0, 1, dict.fromkeys(addresses, Offer()))


@pytest.mark.req("P1")
@pytest.mark.parametrize(
    ("epoch", "seq", "verdict"),
    [(5, 5, SAME), (5, 4, OLDER), (4, 9, OLDER), (5, 6, NEWER), (6, 1, NEWER)],
)
def test_newer_is_the_epoch_then_the_sequence_number(
    epoch: int, seq: int, verdict: Verdict
) -> None:
    database = MeshDatabase()
    assert database.put_links(links(5, 5, b=1), 0.0) is NEWER
    assert database.put_addresses(listed(5, 5, "x"), 0.0) is NEWER
    assert database.put_links(links(epoch, seq, c=1), 0.0) is verdict
    assert ("c" in database.claims["a"]) == (verdict is NEWER)
    if epoch == 5:
        assert database.put_addresses(listed(epoch, seq, "y"), 0.0) is verdict
        assert ("y" in database.directory.of("a")) == (verdict is NEWER)


def test_a_new_epoch_forgets_the_other_sequence_number_and_keeps_the_content() -> None:
    database = MeshDatabase()
    database.put_addresses(listed(5, 9, "x"), 0.0)
    database.put_links(links(6, 1), 0.0)
    assert database.version("a") == Version(6, 1, 0)
    assert "x" in database.directory.of("a")
    assert database.missing({"a": Version(6, 1, 1)}) == {"a": Version(6, 1, 0)}


@pytest.mark.parametrize(
    ("epoch", "base", "seq", "verdict"),
    [(5, 5, 6, NEWER), (5, 4, 6, NEWER), (5, 6, 7, GAP), (6, 5, 6, GAP), (5, 4, 5, SAME)],
)
def test_changes_need_their_base(epoch: int, base: int, seq: int, verdict: Verdict) -> None:
    database = MeshDatabase()
    database.put_addresses(listed(5, 5, "x", "y"), 0.0)
    change = Addresses("a", epoch, base, seq, 0, 1, {"z": Offer()}, ("x",))
    assert database.put_addresses(change, 0.0) is verdict
    assert set(database.directory.of("a")) == ({"y", "z"} if verdict is NEWER else {"x", "y"})


@given(st.permutations([0, 1, 2, 2, 0]))
def test_a_list_is_valid_when_all_its_parts_are_there(order: list[int]) -> None:
    database = MeshDatabase()
    database.put_addresses(listed(5, 1, "old"), 0.0)
    offers = {f"x{number}": Offer() for number in range(6)}
    parts = all_addresses("a", 5, 2, offers, Limits(mesh_part_max=2))
    seen: set[int] = set()
    for number in order:
        verdict = database.put_addresses(parts[number], 0.0)
        assert verdict is (SAME if number in seen else NEWER)
        seen.add(number)
        whole = set(offers) if len(seen) == 3 else {"old"}
        assert set(database.directory.of("a")) == whole
    assert database._waiting_offers == 0


@given(st.permutations([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]))
def test_parts_of_different_lists_of_one_version_do_not_mix(order: list[tuple[int, int]]) -> None:
    """Two neighbours answer with the same version, of which one has dropped an address by its rules."""
    offers = {f"x{number}": Offer() for number in range(6)}
    fewer = {name: offer for name, offer in offers.items() if name != "x1"}
    lists = [all_addresses("a", 5, 2, each, Limits(mesh_part_max=2)) for each in (offers, fewer)]
    assert [len(each) for each in lists] == [3, 3]
    database = MeshDatabase()
    seen: list[set[int]] = [set(), set()]
    for which, part in order:
        database.put_addresses(lists[which][part], 0.0)
        seen[which].add(part)
        if len(seen[which]) == 3:
            # The first whole list is that of the version.
            assert set(database.directory.of("a")) == set((offers, fewer)[which])
            break
        assert not database.directory.of("a")
    assert database.version("a") == Version(5, 0, 2)
    assert database._waiting_offers == 0


def test_few_lists_of_one_version_are_gathered() -> None:
    database = MeshDatabase()
    first = [Addresses("a", 5, 0, 2, 0, 2, {f"x{n}": Offer()}, mark=n) for n in range(5)]
    for part in first:
        assert database.put_addresses(part, 0.0) is NEWER
    assert database._waiting_offers == 4
    # The oldest one made room.
    assert database.put_addresses(first[1], 0.0) is SAME
    assert database.put_addresses(first[0], 0.0) is NEWER
    # A newer version ends them all.
    database.put_addresses(listed(5, 3, "y"), 0.0)
    assert set(database.directory.of("a")) == {"y"}
    assert database._waiting_offers == 0


def test_the_digest_covers_what_is_within_reach() -> None:
    one, other = MeshDatabase(), MeshDatabase()
    for database in (one, other):
        database.put_links(links(5, 1, b=1), 0.0)
    assert one.digest == 0
    one.set_reach({"a"}, 0.0)
    other.set_reach({"a"}, 0.0)
    assert one.digest == other.digest != 0
    one.put_links(links(5, 1, "far"), 0.0)
    assert one.digest == other.digest
    assert set(one.versions()) == {"a"}
    assert set(one.versions("far")) == {"a", "far"}
    one.put_links(links(5, 2), 0.0)
    assert one.digest != other.digest


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [2, 1_024])
def test_mesh_nodes_max(bound: int) -> None:
    database = MeshDatabase(Limits(mesh_nodes_max=bound))
    names = [f"n{number}" for number in range(bound)]
    database.set_reach(set(names[:-1]), 0.0)
    for name in names:
        assert database.put_links(links(1, 1, name), 0.0) is NEWER
    # The node that is longest out of reach makes room; one within reach never does.
    assert database.put_links(links(1, 1, "more"), 1.0) is NEWER
    assert len(database) == bound
    assert names[-1] not in database
    database.set_reach({*names[:-1], "more"}, 1.0)
    assert database.put_links(links(1, 1, "evil"), 1.0) is REFUSED
    assert database.refused == 1
    assert "evil" not in database


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [1, 20])
def test_mesh_updates_max(bound: int) -> None:
    database = MeshDatabase(Limits(mesh_updates_max=bound))
    for put in (
        lambda seq, now: database.put_links(links(1, seq), now),
        lambda seq, now: database.put_addresses(listed(1, seq), now),
    ):
        assert [put(seq, 0.0) for seq in range(1, bound + 1)] == [NEWER] * bound
        assert put(bound + 1, 0.0) is REFUSED
        assert put(bound + 1, 1 / bound) is NEWER
        assert put(bound + 2, 1 / bound) is REFUSED


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("kept_s", [0.0, 600.0])
def test_mesh_kept_s(kept_s: float) -> None:
    database = MeshDatabase(Limits(mesh_kept_s=kept_s))
    database.set_reach({"a"}, 0.0)
    database.put_links(links(1, 1), 0.0)
    database.put_addresses(listed(1, 1, "x"), 0.0)
    assert database.expires_at is None
    database.set_reach(set(), 100.0)
    assert database.expires_at == 100.0 + kept_s
    if kept_s:
        assert database.expire(100.0 + kept_s - 0.001) == 0
    assert database.expire(100.0 + kept_s) == 1
    assert (database.version("a"), database.claims, database.directory.count) == (UNKNOWN, {}, 0)
    assert database.digest == 0


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [3, 100_000])
def test_mesh_addresses_max(bound: int) -> None:
    limits = Limits(mesh_addresses_max=bound, mesh_node_addresses_max=bound)
    directory = Directory(limits)
    for number in range(bound):
        directory.add(f"n{number % 2}", f"x{number}", Offer())
    assert (directory.count, directory.dropped) == (bound, {})
    directory.add("n2", "more", Offer())
    assert (directory.count, directory.dropped) == (bound, {"mesh_addresses_max": 1})
    assert not directory.find("more")
    directory.remove("n0", "x0")
    directory.add("n2", "more", Offer())
    assert directory.find("more")


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [1, 10_000])
def test_mesh_node_addresses_max(bound: int) -> None:
    database = MeshDatabase(Limits(mesh_node_addresses_max=bound))
    names = [f"x{number}" for number in range(bound)]
    for part in all_addresses("a", 1, 1, dict.fromkeys(names, Offer()), Limits()):
        assert database.put_addresses(part, 0.0) is NEWER
    assert (database.directory.count, database.directory.dropped) == (bound, {})
    change = Addresses("a", 1, 1, 2, 0, 1, {"more": Offer()})
    assert database.put_addresses(change, 0.0) is NEWER
    assert database.directory.dropped == {"mesh_node_addresses_max": 1}
    # The version is noted nevertheless: otherwise the neighbours would ask for it each second.
    assert database.version("a").addresses == 2
    for part in all_addresses("b", 1, 1, dict.fromkeys([*names, "more"], Offer()), Limits()):
        database.put_addresses(part, 0.0)
    assert len(database.directory.of("b")) == bound


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize("bound", [1, 1_000])
def test_mesh_patterns_max(bound: int) -> None:
    directory = Directory(Limits(mesh_patterns_max=bound))
    for number in range(bound):
        directory.add("a", f"x{number}/{{y}}", Offer(TAKES | PATTERN))
    directory.add("b", "x0/{y}", Offer(TAKES | PATTERN))
    assert directory.dropped == {}
    assert set(directory.find("x0/1")) == {"a", "b"}
    directory.add("a", "more/{y}", Offer(TAKES | PATTERN))
    assert directory.dropped == {"mesh_patterns_max": 1}
    assert not directory.find("more/1")


def test_literal_addresses_win_over_patterns_and_specific_patterns_over_others() -> None:
    directory = Directory()
    for address in ("{all:rest}", "x/{y}"):
        directory.add("a", address, Offer(TAKES | PATTERN))
    directory.add("b", "x/1", Offer())
    assert list(directory.find("x/1")) == ["b"]
    assert list(directory.find("x/2")) == ["a"]
    directory.remove("a", "x/{y}")
    assert directory.find("x/2") == {"a": Offer(TAKES | PATTERN)}
    directory.replace("a", {})
    assert (directory.find("x/2"), directory.count) == ({}, 1)


@pytest.mark.req("P1")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_databases_converge_whatever_is_lost_doubled_or_out_of_order(data: st.DataObject) -> None:
    """Three databases get the records of an origin in any order, some not at all; then they compare versions."""
    limits = Limits(mesh_part_max=2, mesh_updates_max=1_000)
    records: list[Links | Addresses] = []
    offers: dict[str, Offer] = {}
    origin = MeshDatabase(limits)
    for seq in range(1, data.draw(st.integers(2, 6))):
        records.append(links(3, seq, b=seq))
        before = dict(offers)
        for name in data.draw(st.lists(st.sampled_from("uvwxyz"), max_size=4)):
            offers.pop(name, None) or offers.setdefault(name, Offer())
        changed = {name: each for name, each in offers.items() if name not in before}
        gone = tuple(name for name in before if name not in offers)
        if seq > 1 and len(changed) <= 2 and data.draw(st.booleans()):
            records.append(Addresses("a", 3, seq - 1, seq, 0, 1, changed, gone))
        else:
            records += all_addresses("a", 3, seq, offers, limits)

    def put(database: MeshDatabase, record: object) -> None:
        if isinstance(record, Links):
            database.put_links(record, 0.0)
        else:
            assert isinstance(record, Addresses)
            database.put_addresses(record, 0.0)

    for record in records:
        put(origin, record)
    databases = [origin, MeshDatabase(limits), MeshDatabase(limits), MeshDatabase(limits)]
    for database in databases:
        database.set_reach({"a"}, 0.0)
        for record in data.draw(st.lists(st.sampled_from(records), max_size=12)):
            put(database, record)
    orders = data.draw(st.lists(st.permutations(range(4)), max_size=3))
    pairs = [pair for order in [*orders, range(4)] for pair in pairwise(order)]
    for one, other in pairs:
        asked = databases[other].missing(databases[one].versions())
        for message in databases[one].answers(asked):
            put(databases[other], decode_record(message, limits))
    for database in databases:
        assert database.version("a") == origin.version("a")
        assert database.claims == origin.claims
        assert dict(database.directory.of("a")) == offers
        assert database.digest == origin.digest


def test_a_refused_offer_is_counted_and_the_others_stand() -> None:
    database = MeshDatabase(admit=lambda origin, address, _offer: address.startswith(f"{origin}/"))
    database.put_addresses(listed(1, 1, "a/x", "b/x"), 0.0)
    assert set(database.directory.of("a")) == {"a/x"}
    assert database.directory.dropped == {"not admitted": 1}
