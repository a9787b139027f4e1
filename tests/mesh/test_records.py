"""Messages of a mesh: sizes, what is ignored, what is refused, and each limit at its bound and above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.codec.primitives import decode, encode
from amqp_rt.errors import DecodeError
from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.mesh.records import (
    EDGE,
    GIVES,
    NUMBER_MAX,
    PATTERN,
    TAKES,
    Addresses,
    Ask,
    Digest,
    Hello,
    Links,
    Offer,
    Record,
    Version,
    all_addresses,
    decode_record,
    encode_record,
)

HELLO = Hello("a", 7, 9, 250, 2**62 + 5, 3)
LINKS = Links("a", 1_790_000_000, 7, 3, "eu-1a", False, ("amqps://a:5671",), {"b": 1, "c": 20})
CHANGE = Addresses("a", 5, 3, 4, 0, 1, {"orders": Offer(TAKES | GIVES)}, ("old",))
RECORDS: list[Record] = [
    HELLO,
    Digest({"a": Version(1, 2, 3), "b": Version(4, 0, 6)}),
    Ask({"a": Version(1, 2, 0)}),
    LINKS,
    CHANGE,
    Addresses("a", 5, 0, 4, 1, 2, {"x/{y}": Offer(TAKES | PATTERN | EDGE, "multicast", 0)}),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_message_is_decoded_as_it_was_encoded(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_later_versions_may_add_fields(record: Record) -> None:
    values: Any = decode(encode_record(record))
    assert decode_record(encode([*values, "more", {"of": "it"}])) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_no_field_may_be_missing(record: Record) -> None:
    values: Any = decode(encode_record(record))
    with pytest.raises(DecodeError):
        decode_record(encode(values[:-1]))


@pytest.mark.parametrize("kind", [0, 6, 2**61])
def test_unknown_kinds_are_ignored(kind: int) -> None:
    assert decode_record(encode([kind, "whatever"])) is None


def changed(record: Record, at: int, value: object) -> bytes:
    values: Any = decode(encode_record(record))
    values[at] = value
    return encode(values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode([]),
        encode({}),
        encode([True]),
        encode([None]),
        encode_record(HELLO) + b"\x40",
        *(changed(HELLO, 1, node) for node in ("", "a/b", None, 5, b"a")),
        *(changed(HELLO, 2, number) for number in (0, -1, NUMBER_MAX, True, "7", 7.0)),
        *(changed(HELLO, 4, interval) for interval in (0, 60_001)),
        changed(LINKS, 2, NUMBER_MAX),
        changed(LINKS, 4, 0),
        changed(LINKS, 6, 1),
        changed(LINKS, 7, {"amqp://x": 1}),
        *(changed(LINKS, 8, costs) for costs in ([], {"b": 0}, {"b": 65_536}, {"a": 1}, {1: 1})),
        changed(CHANGE, 3, 4),
        changed(CHANGE, 5, 1),
        changed(CHANGE, 6, 2),
        *(
            changed(CHANGE, 7, {"x": offer})
            for offer in ([], [1, "balanced"], [1, "random", 1], [-1, "balanced", 1], 5)
        ),
        changed(CHANGE, 7, {"x": [1, "balanced", 65_536]}),
        changed(CHANGE, 7, {"x{": [PATTERN, "balanced", 1]}),
        encode([2, {"a": [1, 2]}]),
        encode([3, [["a", 1, 2]]]),
        encode([3, {"a": [1, 2, 3]}]),
    ],
)
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_record(data)


def _name(size: int) -> Record:
    # Two octets each, so that octets are counted, not characters.
    return Hello("é" * (size // 2) + "a" * (size % 2), 1, 0, 250, 0)


def _neighbours(count: int) -> Record:
    return Links("a", 1, 1, 1, "", False, (), {f"n{number}": 1 for number in range(count)})


def _urls(count: int) -> Record:
    return Links("a", 1, 1, 1, "", False, ("amqp://x",) * count, {})


def _offers(count: int) -> Record:
    return Addresses("a", 1, 0, 1, 0, 1, {f"n{number}": Offer() for number in range(count)})


def _withdrawn(count: int) -> Record:
    return Addresses("a", 1, 1, 2, 0, 1, {}, tuple(f"n{number}" for number in range(count)))


def _parts(count: int) -> Record:
    return Addresses("a", 1, 0, 1, 0, count, {})


def _digest(count: int) -> Record:
    return Digest({f"n{number}": Version(1, 1, 1) for number in range(count)})


def _ask(count: int) -> Record:
    return Ask({f"n{number}": Version(1, 1, 1) for number in range(count)})


@pytest.mark.req("P1", "SE18")
@pytest.mark.parametrize(
    ("limit", "make"),
    [
        ("mesh_name_max", _name),
        ("mesh_neighbours_max", _neighbours),
        ("mesh_urls_max", _urls),
        ("mesh_part_max", _offers),
        ("mesh_part_max", _withdrawn),
        ("mesh_node_addresses_max", _parts),
        ("mesh_nodes_max", _digest),
        ("mesh_nodes_max", _ask),
    ],
)
def test_a_message_has_bounds(limit: str, make: Callable[[int], Record]) -> None:
    for limits, bound in (
        (DEFAULT_LIMITS, getattr(DEFAULT_LIMITS, limit)),
        (Limits(**{limit: 20}), 20),
    ):
        at_the_bound = make(bound)
        assert decode_record(encode_record(at_the_bound), limits) == at_the_bound
        with pytest.raises(DecodeError):
            decode_record(encode_record(make(bound + 1)), limits)


@pytest.mark.req("P1", "SE18")
def test_mesh_message_max() -> None:
    limits = Limits(mesh_message_max=4 * KIB)
    room = 4 * KIB - len(encode([77, "x" * 300])) + 300
    assert decode_record(encode([77, "x" * room]), limits) is None
    with pytest.raises(DecodeError, match="mesh_message_max"):
        decode_record(encode([77, "x" * (room + 1)]), limits)


@given(st.dictionaries(st.text(max_size=255), st.just(Offer()), max_size=300))
def test_parts_fit_a_message_and_hold_everything(offers: dict[str, Offer]) -> None:
    limits = Limits(mesh_message_max=4 * KIB, mesh_part_max=50, mesh_name_max=1_024)
    found: dict[str, Offer] = {}
    records = all_addresses("a" * 255, NUMBER_MAX - 1, NUMBER_MAX - 1, offers, limits)
    for number, record in enumerate(records):
        assert decode_record(encode_record(record), limits) == record
        assert (record.part, record.parts) == (number, len(records))
        found |= record.offers
    assert found == offers


def test_records_take_the_room_that_the_design_allows() -> None:
    """209 octets for the links of a node with 8 neighbours, 35 for an address, 61 for a hello."""
    costs = {f"node-{number:03}": 1 for number in range(8)}
    links = Links("node-200", 1_790_000_000, 2**61, 1_000, "eu-1a", False, ("amqps://10.0.0.200:5671",), costs)  # fmt: skip
    assert len(encode_record(links)) <= 209
    offers = {f"service-{number:05}/do": Offer() for number in range(500)}
    (record,) = all_addresses("node-200", 1_790_000_000, 1_000, offers, DEFAULT_LIMITS)
    assert len(encode_record(record)) <= 500 * 35 + 61
    assert len(encode_record(Hello("node-200", 2**61, 2**61, 250, 2**61))) <= 61
