"""Selectors against a model of three-valued logic, and any text against the bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker.entries import Entry, EntryFactory
from amqp_rt.broker.filtering.filters import compile_filter_set, log_position
from amqp_rt.broker.filtering.selectors import (
    FILTEX,
    JMS,
    QPID,
    Dialect,
    InvalidFilter,
    compile_selector,
)
from amqp_rt.broker.filtering.views import Exhausted, MessageView
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.message import Message
from amqp_rt.values import Described, Symbol, ULong

# --- The model ---------------------------------------------------------------------------------

# An expression is a tuple: what it is, and its parts. The model evaluates it as it is written in
# the texts, one rule after the other, with nothing compiled.

Properties = dict[str, Any]


def kind(value: Any) -> str:
    return {bool: "boolean", str: "text", int: "number", float: "number"}[type(value)]


def conj(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    return True if one is True and other is True else None


def negation(one: Any) -> Any:
    return (not one) if isinstance(one, bool) else None


def disj(one: Any, other: Any) -> Any:
    return negation(conj(negation(one), negation(other)))


def compared(sign: str, one: Any, other: Any, dialect: Dialect) -> Any:
    if one is None or other is None:
        return None
    if kind(one) != kind(other):
        return dialect.unlike
    if sign in ("=", "<>"):
        return (one == other) == (sign == "=")
    if kind(one) == "boolean":
        return dialect.unlike
    return {"<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[sign]


def in_range(value: float) -> Any:
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else None
    return value if abs(value) < float("inf") else None


def calculated(sign: str, one: Any, other: Any, dialect: Dialect) -> Any:
    if one is None or other is None or kind(one) != kind(other):
        return None
    if kind(one) == "text":
        return one + other if sign == "+" else None
    if kind(one) != "number":
        return None
    if sign == "+":
        return in_range(one + other)
    if sign == "-":
        return in_range(one - other)
    if sign == "*":
        return in_range(one * other)
    if other == 0:
        return None
    if dialect.whole_quotients and isinstance(one, int) and isinstance(other, int):
        sign_of_both = -1 if (one < 0) != (other < 0) else 1
        return in_range(sign_of_both * (abs(one) // abs(other)))
    return in_range(one / other)


def like(text: str, pattern: str, escape: str | None) -> bool:
    """By backtracking, which the short texts of this test can bear."""
    found = ""
    at = 0
    while at < len(pattern):
        character = pattern[at]
        following = pattern[at + 1 : at + 2]
        if escape and character == escape and following and following in ("%_" + escape):
            found += re.escape(following)
            at += 1
        else:
            found += {"%": "(?s:.*)", "_": "(?s:.)"}.get(character, re.escape(character))
        at += 1
    return re.fullmatch(found, text) is not None


def evaluated(expression: Any, properties: Properties, dialect: Dialect) -> Any:
    def value(part: Any) -> Any:
        return evaluated(part, properties, dialect)

    match expression:
        case ("literal", found):
            return found
        case ("name", name):
            return properties.get(name)
        case ("and", *parts):
            result: Any = True
            for part in parts:
                result = conj(result, value(part))
            return result
        case ("or", *parts):
            result = False
            for part in parts:
                result = disj(result, value(part))
            return result
        case ("not", part):
            return negation(value(part))
        case ("compare", sign, one, other):
            return compared(sign, value(one), value(other), dialect)
        case ("null", part, negative):
            return (value(part) is None) != negative
        case ("in", part, items, negative):
            one = value(part)
            found = [compared("=", one, value(item), dialect) for item in items]
            clash = one is not None and any(
                item is not None and kind(item) != kind(one) for item in map(value, items)
            )
            if one is None:
                return None
            if True in found:
                return not negative
            if any(value(item) is None for item in items):
                return None
            return dialect.unlike if clash else negative
        case ("between", part, low, high, negative):
            one = value(part)
            inside = conj(
                compared("<=", value(low), one, dialect), compared("<=", one, value(high), dialect)
            )
            return negation(inside) if negative else inside
        case ("like", part, pattern, escape, negative):
            one = value(part)
            result = None if one is None else dialect.unlike
            if isinstance(one, str):
                result = like(one, pattern, escape)
            return negation(result) if negative else result
        case ("calculate", sign, one, other):
            return calculated(sign, value(one), value(other), dialect)
        case ("minus", part):
            one = value(part)
            return in_range(-one) if one is not None and kind(one) == "number" else None
    raise AssertionError(expression)


# --- Its text ----------------------------------------------------------------------------------


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def written(expression: Any) -> str:
    """The text of *expression*, with parentheses around all operands."""

    def inner(part: Any) -> str:
        return f"({written(part)})"

    match expression:
        case ("literal", bool() as found):
            return str(found).upper()
        case ("literal", str() as found):
            return quoted(found)
        case ("literal", float() as found):
            return f"{found:.1E}"
        case ("literal", found):
            return str(found)
        case ("name", name):
            return str(name)
        case ("and" | "or" as word, *parts):
            return f" {word.upper()} ".join(map(inner, parts))
        case ("not", part):
            return "NOT " + inner(part)
        case ("compare" | "calculate", sign, one, other):
            return f"{inner(one)} {sign} {inner(other)}"
        case ("null", part, negative):
            return f"{inner(part)} IS {'NOT ' * negative}NULL"
        case ("in", part, items, negative):
            return f"{inner(part)} {'NOT ' * negative}IN ({', '.join(map(inner, items))})"
        case ("between", part, low, high, negative):
            return f"{inner(part)} {'NOT ' * negative}BETWEEN {inner(low)} AND {inner(high)}"
        case ("like", part, pattern, escape, negative):
            ending = "" if escape is None else f" ESCAPE {quoted(escape)}"
            return f"{inner(part)} {'NOT ' * negative}LIKE {quoted(pattern)}{ending}"
        case ("minus", part):
            return "-" + inner(part)
    raise AssertionError(expression)


NAMES = ("a", "b", "c", "d")
TEXTS = st.text("ab%_!'é", max_size=6)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.5, 1.0, 2.5, 1e300]),
)
VALUES = st.one_of(TEXTS, NUMBERS.filter(lambda n: n < 2**63), st.booleans(), st.none())
LITERALS = st.one_of(TEXTS, NUMBERS.filter(lambda n: n >= 0), st.booleans())


def larger(smaller: st.SearchStrategy[Any], *, between: bool = True) -> st.SearchStrategy[Any]:
    some = st.lists(smaller, min_size=1, max_size=3)
    several = st.lists(smaller, min_size=2, max_size=4)
    escapes = st.sampled_from([None, "!", "%", "_", "a"])
    found = [
        several.map(lambda parts: ("and", *parts)),
        several.map(lambda parts: ("or", *parts)),
        st.tuples(st.just("not"), smaller),
        st.tuples(
            st.just("compare"), st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), smaller, smaller
        ),
        st.tuples(st.just("null"), smaller, st.booleans()),
        st.tuples(st.just("in"), smaller, some, st.booleans()),
        st.tuples(st.just("like"), smaller, TEXTS, escapes, st.booleans()),
        st.tuples(st.just("calculate"), st.sampled_from("+-*/"), smaller, smaller),
        st.tuples(st.just("minus"), smaller),
    ]
    if between:
        found.append(st.tuples(st.just("between"), smaller, smaller, smaller, st.booleans()))
    return st.one_of(found)


LEAVES = st.one_of(
    st.tuples(st.just("name"), st.sampled_from(NAMES)), st.tuples(st.just("literal"), LITERALS)
)
EXPRESSIONS = {
    "jms": st.recursive(LEAVES, larger, max_leaves=12),
    "filtex": st.recursive(LEAVES, lambda smaller: larger(smaller, between=False), max_leaves=12),
}


def entry_of(properties: Properties) -> Entry:
    return EntryFactory("pass").make_entry(
        Message(b"", application_properties=properties).encode(), 0, 0.0
    )


#: As JMS, but for the check that the generated expressions do not pass: it has its own tests.
LENIENT = Dialect("lenient", "jms", False, True, False, False, True)


@pytest.mark.slow
@pytest.mark.req("M29")
@pytest.mark.parametrize("dialect", [LENIENT, QPID, FILTEX], ids=lambda dialect: dialect.name)
@given(data=st.data())
def test_a_selector_says_what_the_model_says(dialect: Dialect, data: st.DataObject) -> None:
    expression = data.draw(EXPRESSIONS[dialect.words])
    properties = data.draw(st.dictionaries(st.sampled_from(NAMES), VALUES))
    text = written(expression)
    try:
        selector = compile_selector(text, dialect)
    except InvalidFilter:
        # The C++ broker of Qpid takes no wildcard for an escape character, and nothing else here
        # is refused.
        assert dialect is QPID
        assert "ESCAPE '%'" in text or "ESCAPE '_'" in text
        return
    found = selector(MessageView(entry_of(properties), DEFAULT_LIMITS))
    expected = evaluated(expression, properties, dialect)
    assert (type(found), found) == (type(expected), expected), text


# --- Any text ----------------------------------------------------------------------------------

WORDS = [
    *("AND", "OR", "NOT", "IS", "NULL", "LIKE", "ESCAPE", "IN", "BETWEEN", "TRUE", "UTC()", "and"),
    *("(", ")", ",", "=", "<>", "<", ">=", "+", "-", "*", "/", "%", "'", '"', "[", "]", ".", "$"),
    *("a", "b1", "p.subject", "h.priority", "JMSType", "amqp.to", "amqp.annotation.x-opt-a", "'x'"),
    *("'%_'", "1", "0x1F", "1.5", "0x", "1e", "1e400", "9" * 30, "0b1", "07", "\0", "\ud800", "é"),
]
SOUP = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=60).map("".join),
    st.tuples(st.sampled_from(WORDS), st.integers(1, 5_000)).map(lambda pair: pair[0] * pair[1]),
)
FULL = entry_of({"a": "x" * 4096, "b1": 5})


@pytest.mark.req("M29", "SE18")
@pytest.mark.parametrize("dialect", [JMS, QPID, FILTEX], ids=lambda dialect: dialect.name)
@given(text=SOUP)
def test_any_text_compiles_or_is_refused(dialect: Dialect, text: str) -> None:
    try:
        selector = compile_selector(text, dialect)
    except InvalidFilter as error:
        assert error.position is None or 0 <= error.position <= len(text)  # noqa: PT017
        return
    try:
        selector(MessageView(FULL, DEFAULT_LIMITS))
    except Exhausted:
        pass


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**63 - 1), st.text(max_size=10), SOUP),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
DESCRIPTORS = st.one_of(
    st.sampled_from([0x468C_0000_0000 + n for n in range(6)]).map(ULong),
    st.sampled_from([0x110, 0x111, 0x120, *range(0x170, 0x179)]).map(ULong),
    st.sampled_from(["amqp:sql-filter", "rabbitmq:stream-filter", "no"]).map(Symbol),
    st.sampled_from(["rabbitmq:stream-offset-spec", "rabbitmq:stream-match-unfiltered"]).map(
        Symbol
    ),
)
SETS = st.dictionaries(
    st.text("abc", min_size=1).map(Symbol),
    st.one_of(ANYTHING, st.builds(Described, DESCRIPTORS, ANYTHING)),
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.req("M28", "SE18")
@given(asked=SETS, log=st.booleans(), payload=st.one_of(st.binary(), st.just(FULL.payload)))
def test_any_set_and_any_message(asked: dict[Any, object], log: bool, payload: bytes) -> None:
    try:
        found = compile_filter_set(asked, receiver="me", log=log)
    except InvalidFilter:
        return
    assert set(found.in_place) | set(found.unsupported) == set(asked)
    assert found.matches(Entry(payload), "you") in (True, False)
    assert found.position == (log_position(asked) if log else None)
