"""SQL filters against a naive reference: trees are drawn, written as texts, and evaluated in both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isnan
from typing import Any

import pytest
from amqp_rt_servicebus.sql import (
    Evaluation,
    EvaluationError,
    InvalidSql,
    parse_action,
    parse_filter,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from amqp_rt.values import Int

pytestmark = pytest.mark.req("Z14")

#: Tree: the name of its kind, then its parts.
Tree = tuple[Any, ...]


class Fields:
    """Message of application properties, with a label."""

    def __init__(self, application: Mapping[str, object]) -> None:
        self.application = application

    def system_property(self, name: str) -> object:
        return "order" if name == "Label" else None

    def application_properties(self) -> Mapping[str, object]:
        return self.application


class Failed(Exception):
    """Error of the reference."""


# --- The reference ---------------------------------------------------------------------------------


def wrap(value: int, bits: int) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def calculate(symbol: str, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return None
    texts = isinstance(left, str) or isinstance(right, str)
    if texts and symbol == "+":
        assume(float not in (type(left), type(right)))  # their texts have a test of their own
        return "".join(str(each) for each in (left, right))
    if texts or bool in (type(left), type(right)):
        raise Failed
    if float in (type(left), type(right)):
        return {
            "+": lambda: float(left) + float(right),
            "-": lambda: float(left) - float(right),
            "*": lambda: float(left) * float(right),
        }[symbol]()
    small = type(left) is type(right) is Int
    a, b = int(left), int(right)
    if symbol in "/%":
        if not b:
            raise Failed
        quotient = int(abs(a) // abs(b))
        quotient = quotient if a * b >= 0 else -quotient
        if symbol == "/" and quotient in (2**63, 2**31 if small else 2**63):
            raise Failed
        result = quotient if symbol == "/" else a - b * quotient
    else:
        result = {"+": a + b, "-": a - b, "*": a * b}[symbol]
    return Int(wrap(result, 32)) if small else wrap(result, 64)


def value_of(tree: Tree, message: Mapping[str, Any]) -> Any:
    match tree:
        case ("constant", value):
            return value
        case ("property", name):
            return message.get(name)
        case ("label",):
            return "order"
        case ("nope",):
            raise Failed
        case ("call", inner):
            name = value_of(inner, message)
            if name is not None and not isinstance(name, str):
                raise Failed
            return None if name is None else message.get(name.lower())
        case ("sign", inner):
            value = value_of(inner, message)
            if isinstance(value, bool | str):
                raise Failed
            return (
                None
                if value is None
                else calculate("-", Int(0) if type(value) is Int else 0, value)
            )
        case (symbol, left, right):
            first = value_of(left, message)
            return calculate(symbol, first, value_of(right, message))
    raise AssertionError(tree)


def equal(left: Any, right: Any, symbol: str = "=") -> bool | None:
    if left is None or right is None:
        return None
    kinds = [
        bool if isinstance(each, bool) else str if isinstance(each, str) else float
        for each in (left, right)
    ]
    if kinds[0] is not kinds[1] or (kinds[0] is not float and symbol not in ("=", "<>", "!=")):
        raise Failed
    if float in (type(left), type(right)):
        left, right = float(left), float(right)
    return {
        "=": left == right,
        "<>": left != right,
        "!=": left != right,
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
    }[symbol]


def negate(value: bool | None) -> bool | None:
    return None if value is None else not value


def holds(tree: Tree, message: Mapping[str, Any]) -> bool | None:
    match tree:
        case ("compare", symbol, left, right):
            first = value_of(left, message)
            return equal(first, value_of(right, message), symbol)
        case ("null", name, negated):
            return (message.get(name) is None) is not negated
        case ("exists", name):
            return name in message
        case ("in", left, items, negated):
            value = value_of(left, message)
            if value is None:
                return None
            results: list[bool | None] = []
            for item in items:
                results.append(equal(value, value_of(item, message)))
                if results[-1]:
                    break
            found = True if True in results else None if None in results else False
            return negate(found) if negated else found
        case ("like", left, pattern, negated):
            text, wanted = value_of(left, message), value_of(pattern, message)
            if text is None or wanted is None:
                return None
            if not isinstance(text, str) or not isinstance(wanted, str):
                raise Failed
            expression = re.escape(wanted).replace("%", ".*").replace("_", ".")
            return (re.fullmatch(expression, text, re.DOTALL) is not None) is not negated
        case ("not", inner):
            return negate(holds(inner, message))
        case ("and" | "or" as word, operands):
            decisive = word == "or"
            seen: list[bool | None] = []
            for operand in operands:
                seen.append(holds(operand, message))
                if seen[-1] is decisive:
                    return decisive
            return None if None in seen else not decisive
    raise AssertionError(tree)


# --- Trees, and their texts ------------------------------------------------------------------------

NAMES = ["a", "b", "text", "other", "flag"]
NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1), st.sampled_from([0.5, 2.0, 1e10]))
NUMERIC_LEAVES = st.one_of(
    st.tuples(st.just("constant"), NUMBERS), st.tuples(st.just("property"), st.sampled_from("ab"))
)
TEXT_LEAVES = st.one_of(
    st.tuples(st.just("constant"), st.text("ab%_'", max_size=4)),
    st.tuples(st.just("property"), st.sampled_from(["text", "other"])),
    st.just(("label",)),
)
ANY_LEAVES = st.one_of(
    NUMERIC_LEAVES,
    TEXT_LEAVES,
    st.tuples(st.just("constant"), st.sampled_from([True, False, None])),
    st.sampled_from([("property", "flag"), ("nope",)]),
)
#: Integers only, since the reference divides no floats.
QUOTIENTS = st.tuples(
    st.sampled_from("/%"),
    st.one_of(st.just(("property", "a")), st.integers(0, 9).map(lambda n: ("constant", n))),
    st.one_of(st.just(("property", "a")), st.integers(0, 3).map(lambda n: ("constant", n))),
)
NUMERIC: st.SearchStrategy[Tree] = st.recursive(
    st.one_of(NUMERIC_LEAVES, NUMERIC_LEAVES, QUOTIENTS),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, inner), st.tuples(st.just("sign"), inner)
    ),
    max_leaves=5,
)
TEXTS: st.SearchStrategy[Tree] = st.recursive(
    TEXT_LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("+"), inner, inner),
        st.tuples(st.just("call"), st.sampled_from(NAMES).map(lambda name: ("constant", name))),
    ),
    max_leaves=3,
)
ANY: st.SearchStrategy[Tree] = st.recursive(
    ANY_LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, inner),
        st.tuples(st.just("sign"), inner),
        st.tuples(st.just("call"), inner),
    ),
    max_leaves=3,
)
EXPRESSIONS = st.one_of(NUMERIC, NUMERIC, TEXTS, ANY)


def relations(values: st.SearchStrategy[Tree], symbols: list[str]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.just("compare"), st.sampled_from(symbols), values, values),
        st.tuples(st.just("in"), values, st.lists(values, min_size=1, max_size=3), st.booleans()),
    )


EQUALITIES = ["=", "<>", "!="]
TESTS: st.SearchStrategy[Tree] = st.one_of(
    relations(NUMERIC, [*EQUALITIES, "<", "<=", ">", ">="]),
    relations(TEXTS, EQUALITIES),
    relations(ANY, [*EQUALITIES, "<"]),
    st.tuples(st.just("null"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("exists"), st.sampled_from(NAMES)),
    st.tuples(st.just("like"), TEXTS, TEXTS, st.booleans()),
)
CONDITIONS: st.SearchStrategy[Tree] = st.recursive(
    TESTS,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=4)),
    ),
    max_leaves=6,
)
INTEGERS = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "a": st.one_of(INTEGERS, st.integers(-(2**31), 2**31 - 1).map(Int)),
        "b": st.one_of(st.none(), st.sampled_from([0.5, -2.0, 1e300]), INTEGERS),
        "text": st.text("ab%_", max_size=5),
        "other": st.one_of(st.none(), st.text("ab", max_size=3)),
        "flag": st.booleans(),
    },
)
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}


def constant(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return (
        "NULL" if value is None else str(value).upper() if isinstance(value, bool) else repr(value)
    )


def written(tree: Tree, least: int = 0) -> str:
    """Return the text of an expression, with no more parentheses than precedence needs."""
    match tree:
        case ("constant", value):
            return constant(value)
        case ("property", name):
            return name.upper() if name == "b" else f"user.[{name}]" if name == "other" else name
        case ("label",):
            return "sys.LABEL"
        case ("nope",):
            return "sys.Nope"
        case ("call", inner):
            return f"p({written(inner)})"
        case ("sign", inner):
            return f"- {written(inner, 3)}"
    symbol, left, right = tree
    level = PRECEDENCE[symbol]
    text = f"{written(left, level)} {symbol} {written(right, level + 1)}"
    return f"({text})" if level < least else text


def condition(tree: Tree, least: int = 0) -> str:
    match tree:
        case ("compare", symbol, left, right):
            return f"{written(left)}{symbol}{written(right)}"
        case ("null", name, negated):
            return f"{name} IS {'NOT ' if negated else ''}NULL"
        case ("exists", name):
            return f"exists({name})"
        case ("in", left, items, negated):
            return (
                f"{written(left)} {'not ' if negated else ''}in ({', '.join(map(written, items))})"
            )
        case ("like", left, pattern, negated):
            return f"{written(left)} {'NOT ' if negated else ''}LIKE {written(pattern)}"
        case ("not", inner):
            return f"NOT {condition(inner, 3)}"
    word, operands = tree
    level = 2 if word == "and" else 1
    text = f" {word} ".join(condition(operand, level + 1) for operand in operands)
    return f"({text})" if level < least else text


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of *call*, or the error of one that may fail."""
    try:
        return call()
    except (Failed, EvaluationError):
        return "failed"
    except InvalidSql as error:
        return error


@pytest.mark.slow
@settings(max_examples=min(600, 6 * settings().max_examples))
@given(tree=CONDITIONS, message=MESSAGES)
def test_filters_equal_the_reference(tree: Tree, message: dict[str, Any]) -> None:
    compiled = parse_filter(condition(tree))
    found = outcome(lambda: compiled.evaluate(Evaluation(Fields(message))))
    assert found == outcome(lambda: holds(tree, message))


@settings(max_examples=min(300, 3 * settings().max_examples))
@given(tree=EXPRESSIONS, message=MESSAGES)
def test_actions_set_what_the_reference_computes(tree: Tree, message: dict[str, Any]) -> None:
    run = Evaluation(Fields(message))
    action = parse_action(f"SET result = {written(tree)}")
    found = outcome(lambda: action.apply(run).properties["result"])
    expected = outcome(lambda: value_of(tree, message))
    assert type(found) is type(expected)
    assert found == expected or isnan(found)


@settings(max_examples=min(300, 3 * settings().max_examples))
@given(st.text("aS ()='%_@[]\"sys.x1,;NOTINLKE+-*/<>!\n", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_filter, parse_action):
        error = outcome(lambda parse=parse: parse(text))
        if isinstance(error, InvalidSql):
            lines = text.split("\n")
            assert 1 <= error.line <= len(lines)
            assert 1 <= error.column <= len(lines[error.line - 1]) + 1


@pytest.mark.parametrize(
    "text", ["'" * 10_001, "[" * 9_999, "'a" * 5_000, " " * 16_000 + "#", "a." * 8_000]
)
def test_hostile_texts_are_refused_at_once(text: str) -> None:
    with pytest.raises(InvalidSql):
        parse_filter(text)
