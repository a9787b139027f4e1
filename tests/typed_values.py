"""AMQP values for tests: equality that includes types, and Hypothesis strategies for every type."""

from __future__ import annotations

import datetime as dt
import math
from uuid import UUID

from hypothesis import strategies as st

from amqp_rt.codec.primitives import encode
from amqp_rt.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float32,
    Int,
    Map,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)


def same(one: object, other: object) -> bool:
    """Return whether both are the same AMQP value: in type and value, at every depth; a NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return math.copysign(1, one) == math.copysign(1, other) and (
            one == other or (math.isnan(one) and encode(one) == encode(other))
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict | Map) and isinstance(other, dict | Map):
        return same(pairs(one), pairs(other))
    if isinstance(one, Array) and isinstance(other, Array):
        return one.of is other.of and same(
            [*one.items, *one.descriptors], [*other.items, *other.descriptors]
        )
    if isinstance(one, Described) and isinstance(other, Described):
        return same([one.descriptor, one.value], [other.descriptor, other.value])
    return one == other


def pairs(mapping: dict[object, object] | Map) -> list[object]:
    return [part for pair in mapping.items() for part in pair]


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
ascii_text = st.text(st.characters(max_codepoint=127), max_size=300)


def integers_of(kind: type[UInt]) -> st.SearchStrategy[object]:
    return st.integers(kind.MIN, kind.MAX).map(kind)


#: Element class → strategy of its values.
SCALARS: dict[type, st.SearchStrategy[object]] = {
    type(None): st.none(),
    bool: st.booleans(),
    **{
        kind: integers_of(kind)  # type: ignore[arg-type]
        for kind in (UByte, UShort, UInt, ULong, Byte, Short, Int, Timestamp)
    },
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    Float32: st.integers(0, 0xFFFF_FFFF).map(Float32.from_bits),
    float: st.floats(),
    Decimal32: st.binary(min_size=4, max_size=4).map(Decimal32),
    Decimal64: st.binary(min_size=8, max_size=8).map(Decimal64),
    Decimal128: st.binary(min_size=16, max_size=16).map(Decimal128),
    Char: st.characters(exclude_categories=["Cs"]).map(Char),
    UUID: st.uuids(),
    bytes: st.binary(max_size=300),
    str: text,
    Symbol: ascii_text.map(Symbol),
}

scalars = st.one_of(*SCALARS.values())


def _compounds(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=5)
    maps = st.dictionaries(scalars, inner, max_size=5)
    arrays = st.sampled_from([*SCALARS, list, dict, Array]).flatmap(
        lambda kind: st.builds(
            Array,
            st.lists(_elements(kind, lists, maps), max_size=5),
            st.just(kind),
            st.lists(scalars, max_size=2).map(tuple),
        )
    )
    return st.one_of(lists, maps, arrays, st.builds(Described, inner, inner))


def _elements(
    kind: type, lists: st.SearchStrategy[object], maps: st.SearchStrategy[object]
) -> st.SearchStrategy[object]:
    if kind is list:
        return lists
    if kind is dict:
        return maps
    if kind is Array:
        return st.lists(SCALARS[UInt], max_size=3).map(lambda items: Array(items, UInt))
    return SCALARS[kind]


#: Any AMQP value as a peer may send it.
values = st.recursive(scalars, _compounds, max_leaves=12)

moments = st.datetimes(timezones=st.just(dt.UTC))
