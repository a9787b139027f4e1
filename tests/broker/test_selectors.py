"""Selectors: matches, errors with their positions, and cost."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from amqp_rt.broker.entries import Entry, EntryFactory
from amqp_rt.broker.filtering.selectors import (
    FILTEX,
    JMS,
    QPID,
    Dialect,
    InvalidFilter,
    compile_selector,
)
from amqp_rt.broker.filtering.views import Exhausted, MessageView
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.values import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
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

NOW_MS = 1_234_567_890_123
DIALECTS = {"jms": JMS, "qpid": QPID, "filtex": FILTEX}


def entry_of(message: Message) -> Entry:
    return EntryFactory("pass").make_entry(message.encode(), 0, 0.0)


def result(
    text: str, entry: Entry, dialect: Dialect = JMS, limits: Limits = DEFAULT_LIMITS
) -> object:
    selector = compile_selector(text, dialect, now_ms=NOW_MS, limits=limits)
    return selector(MessageView(entry, limits, limits.filter_steps_max))


def outcome(text: str, entry: Entry, dialect: Dialect) -> bool | str:
    """Return a result as in the vectors: whether a message matches, or that the selector is invalid."""
    try:
        selector = compile_selector(text, dialect, now_ms=NOW_MS)
    except InvalidFilter:
        return "invalid"
    return selector(MessageView(entry, DEFAULT_LIMITS)) is True


# --- Precedence --------------------------------------------------------------------------------

#: Expression as written, and with the implied parentheses.
PRECEDENCE = [
    ("NOT a AND b", "(NOT a) AND b"),
    ("NOT a OR b", "(NOT a) OR b"),
    ("NOT NOT a AND b", "(NOT (NOT a)) AND b"),
    ("a AND NOT b OR c", "(a AND (NOT b)) OR c"),
    ("a OR b AND c", "a OR (b AND c)"),
    ("a AND b OR c", "(a AND b) OR c"),
    ("a OR NOT b AND c", "a OR ((NOT b) AND c)"),
    ("NOT x = 2 AND b", "(NOT (x = 2)) AND b"),
    ("NOT x IS NULL OR b", "(NOT (x IS NULL)) OR b"),
    ("NOT x IN (1) AND b", "(NOT (x IN (1))) AND b"),
    ("x BETWEEN 1 AND 3 AND b", "(x BETWEEN 1 AND 3) AND b"),
    ("x BETWEEN 3 AND 4 OR b", "(x BETWEEN 3 AND 4) OR b"),
    ("NOT x BETWEEN 1 AND 3 AND b", "(NOT (x BETWEEN 1 AND 3)) AND b"),
    ("x BETWEEN 1 + 1 AND 1 + 2", "x BETWEEN (1 + 1) AND (1 + 2)"),
    ("1 + x * 3 = 7", "(1 + (x * 3)) = 7"),
    ("9 - x - 1 = 6", "((9 - x) - 1) = 6"),
    ("16 / x / 2 = 4", "((16 / x) / 2) = 4"),
    ("16 / x * 2 = 16", "((16 / x) * 2) = 16"),
    ("-x * 3 + 1 = -5", "(((-x) * 3) + 1) = (-5)"),
    ("x + 1 < x * 2 AND b", "((x + 1) < (x * 2)) AND b"),
]


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("dialect", "written", "meant"),
    [
        (dialect, written, meant)
        for dialect in DIALECTS.values()
        for written, meant in PRECEDENCE
        if dialect is not FILTEX or "BETWEEN" not in written
    ],
)
def test_operators_bind_as_the_dialects_say(dialect: Dialect, written: str, meant: str) -> None:
    for a, b, c in product([True, False, None], repeat=3):
        known = {"a": a, "b": b, "c": c, "x": 2}
        entry = entry_of(
            Message(application_properties={k: v for k, v in known.items() if v is not None})
        )
        assert result(written, entry, dialect) == result(meant, entry, dialect), known


def both(one: bool | None, other: bool | None) -> bool | None:
    return False if one is False or other is False else None if None in (one, other) else True


def negated(one: bool | None) -> bool | None:
    return None if one is None else not one


TRUTH: list[bool | None] = [True, False, None]


@pytest.mark.req("M29")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_logic_has_three_values(dialect: Dialect) -> None:
    for a, b, c in product(TRUTH, repeat=3):
        entry = entry_of(
            Message(
                application_properties={
                    name: value
                    for name, value in {"a": a, "b": b, "c": c}.items()
                    if value is not None
                }
            )
        )
        assert result("NOT a", entry, dialect) is negated(a)
        assert result("a AND b AND c", entry, dialect) is both(both(a, b), c)
        assert result("a OR b OR c", entry, dialect) is negated(
            both(both(negated(a), negated(b)), negated(c))
        )


#: Values of properties with their kinds: only values of one kind are compared.
OPERANDS: list[tuple[Any, str]] = [
    (None, ""),
    (1, "number"),
    (2.0, "number"),
    (3, "number"),
    ("a", "text"),
    ("b", "text"),
    (True, "boolean"),
    (b"a", "binary"),
]


@pytest.mark.slow
@pytest.mark.req("M29")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_predicates_over_any_values(dialect: Dialect) -> None:
    """Absent values give unknown, different kinds the dialect's result, all others a comparison."""
    for (x, kind_of_x), (y, kind_of_y), (z, kind_of_z) in product(OPERANDS, repeat=3):
        named = {"x": x, "y": y, "z": z}
        entry = entry_of(
            Message(application_properties={k: v for k, v in named.items() if v is not None})
        )

        def compared(
            alike: bool, one: Any, other: Any, sign: Callable[[Any, Any], bool]
        ) -> bool | None:
            if one is None or other is None:
                return None
            return sign(one, other) if alike else dialect.unlike

        if z is None:
            for text, sign in (("=", operator.eq), ("<>", operator.ne), ("!=", operator.ne)):
                if text != "!=" or dialect is not JMS:
                    found = result(f"x {text} y", entry, dialect)
                    assert found is compared(kind_of_x == kind_of_y, x, y, sign), (text, named)
            like = None if x is None else x == "a" if kind_of_x == "text" else dialect.unlike
            assert result("x LIKE 'a'", entry, dialect) is like, named
            assert result("x NOT LIKE 'a'", entry, dialect) is negated(like), named
            ordered = kind_of_x == kind_of_y != "boolean"
            assert result("x < y", entry, dialect) is compared(ordered, x, y, operator.lt), named
        if dialect is not FILTEX:
            low = compared(kind_of_x == kind_of_y != "boolean", y, x, operator.le)
            high = compared(kind_of_x == kind_of_z != "boolean", x, z, operator.le)
            assert result("x BETWEEN y AND z", entry, dialect) is both(low, high), named
        for text, present in (("IN", True), ("NOT IN", False)):
            expected: bool | None = None
            if x is not None:
                if (kind_of_x, x) in ((kind_of_y, y), (kind_of_z, z)):
                    expected = present
                elif None not in (y, z):
                    alike = kind_of_x == kind_of_y == kind_of_z
                    expected = not present if alike else dialect.unlike
            assert result(f"x {text} (y, z)", entry, dialect) is expected, (text, named)


@pytest.mark.req("M29")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_arithmetic_with_anything_but_numbers_is_unknown(dialect: Dialect) -> None:
    values = {"n": 6, "text": "6", "flag": True, "octets": b"6"}
    entry = entry_of(Message(application_properties=values))
    signs = "+-*/%" if dialect is FILTEX else "+-*/"
    for other in ("text", "flag", "octets", "nothing"):
        texts = [f"-{other}", f"+{other}"]
        texts += [f"n {sign} {other}" for sign in signs]
        texts += [f"{other} {sign} n" for sign in signs]
        texts += [f"{other} {sign} {other}" for sign in signs if (sign, other) != ("+", "text")]
        for text in texts:
            assert result(f"({text}) IS NULL", entry, dialect) is True, text
    assert result("-n = -6 AND +n = 6", entry, dialect) is True


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("0xffffffffffffffff", -1),
        ("0x8000000000000000", -(2**63)),
        ("0x7fffffffffffffffL", 2**63 - 1),
        ("0x1.8p1", 3.0),
        ("0x1.8p1f", 3.0),
        ("0x1.8p1d", 3.0),
    ],
)
def test_literals_of_java(literal: str, value: float) -> None:
    assert result(literal, entry_of(Message()), QPID) == value


def test_a_user_id_need_not_be_a_text() -> None:
    entry = entry_of(Message(user_id=b"a\xff"))
    assert result("JMSXUserID = 'a\ufffd'", entry) is True


def test_a_name_in_brackets_may_have_brackets() -> None:
    entry = entry_of(Message(application_properties={"a[0].b": 1}))
    assert result("[a[[0]].b] = 1", entry, FILTEX) is True


# --- Shared vectors ----------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "string": str,
    "symbol": Symbol,
    "boolean": bool,
    "byte": Byte,
    "short": Short,
    "int": Int,
    "long": int,
    "ubyte": UByte,
    "ushort": UShort,
    "uint": UInt,
    "ulong": ULong,
    "float": Float32,
    "double": float,
    "null": lambda value: None,
}


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("file", "dialect", "count"),
    [("jms-artemis", JMS, 125), ("jms-qpid-cpp", QPID, 162), ("filtex-sql", FILTEX, 196)],
)
def test_the_shared_vectors(shared: Path, file: str, dialect: Dialect, count: int) -> None:
    vectors = json.loads((shared / f"spec/vectors/selectors/{file}.json").read_text("utf-8"))
    wrong = []
    for case in vectors["cases"]:
        own = case.get("properties", {})
        if isinstance(own, str):
            own = vectors["application_properties"] if own == "standard" else {}
        properties = vectors.get("properties", {}) | own | case.get("extra_properties", {})
        jms = case.get("jms", {})
        entry = entry_of(
            Message(
                application_properties={
                    name: TYPES[value["type"]](value["value"]) for name, value in properties.items()
                },
                message_id=jms.get("JMSMessageID"),
                subject=jms.get("JMSType"),
            )
        )
        # The vectors were made with a real clock, which is later than ours.
        text = case["expr"].replace("UTC() > 1000000000000", "UTC() > 1")
        found = outcome(text, entry, dialect)
        if case["expect"] == "valid":
            found = "valid" if found != "invalid" else found
        if found != case["expect"]:
            wrong.append((case["expr"], case["expect"], found))
    assert not wrong
    assert len(vectors["cases"]) == count


# --- Our own -----------------------------------------------------------------------------------

MESSAGE = Message(
    b"body",
    durable=True,
    priority=7,
    ttl_ms=60_000,
    delivery_count=2,
    message_annotations={
        Symbol("x-opt-sequence-number"): 42,
        Symbol("x-opt-enqueued-time"): Timestamp(1_700_000_000_000),
        Symbol("x-opt-offset"): "42",
    },
    message_id="ID:1",
    user_id=b"guest",
    to="orders",
    subject="order.new",
    reply_to="replies",
    correlation_id=UUID(int=7),
    content_type="text/plain",
    creation_time=Timestamp(1_700_000_000_000),
    group_id="g",
    group_sequence=4,
    application_properties={
        "color": "blue",
        "amount": Int(3),
        "price": 12.5,
        "flag": True,
        "empty": "",
        "strange name": 1,
        "a.dotted.name": "d",
        "$dollar": 1,
        "_under": 2,
        "größe": UByte(12),
        "null_value": None,
        "letter": Char("x"),
        "when": Timestamp(1_700_000_000_000),
        "octets": b"ab",
        "half": Float32(0.5),
        # Coefficient 15 and exponent -1; -1 and 0; 12 and 1.
        "dec32": Decimal32(bytes.fromhex("3200000f")),
        "dec64": Decimal64(bytes.fromhex("b1c0000000000001")),
        "dec128": Decimal128(bytes.fromhex("3042000000000000000000000000000c")),
        "nan": float("nan"),
        "repeated": "abababb" + "ab",
        "percent": "100%",
        "bang": "a!b",
        "regex": "a*c",
        "lines": "a\nb",
    },
)


def with_a_list(message: Message) -> Entry:
    """Our own encoder sends no list among the application properties; Java peers do."""
    octets = bytearray(message.encode())
    entry = entry_of(message)
    at = octets.index(b"\x00\x53\x74\xd1")
    size = int.from_bytes(octets[at + 4 : at + 8], "big")
    count = int.from_bytes(octets[at + 8 : at + 12], "big")
    extra = b"\xa1\x0alist_value\xc0\x03\x01\x54\x01"
    octets[at + 4 : at + 12] = (size + len(extra)).to_bytes(4, "big") + (count + 2).to_bytes(
        4, "big"
    )
    octets[at + 8 + size : at + 8 + size] = extra
    entry.payload = bytes(octets)
    return entry


OWN = json.loads((Path(__file__).parent / "vectors" / "selectors.json").read_text("utf-8"))["cases"]


@pytest.mark.req("M29")
@pytest.mark.parametrize("group", list(dict.fromkeys(case["group"] for case in OWN)))
def test_our_vectors(group: str) -> None:
    entry = with_a_list(MESSAGE)
    found = [
        (case["dialect"], case["expr"], outcome(case["expr"], entry, DIALECTS[case["dialect"]]))
        for case in OWN
        if case["group"] == group
    ]
    assert found == [
        (case["dialect"], case["expr"], case["expect"]) for case in OWN if case["group"] == group
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("amqp.first_acquirer", True),
        ("JMSRedelivered", False),
        ("JMSXDeliveryCount = 1", True),
        ("JMSDeliveryMode = 'NON_PERSISTENT'", True),
        ("JMSPriority = 4", True),
        ("amqp.ttl IS NULL", True),
        ("JMSMessageID = 'ID:AMQP_ULONG:5'", True),
        ("JMSCorrelationID = 'ID:AMQP_BINARY:0AFF'", True),
        ("color IS NULL", True),
        ("JMSXUserID IS NULL", True),
        ("amqp.annotation.x IS NULL", True),
    ],
)
def test_fields_that_are_absent_and_other_ids(text: str, value: object) -> None:
    message = Message(message_id=5, correlation_id=b"\x0a\xff", first_acquirer=True)
    assert result(text, entry_of(message)) is value


@pytest.mark.parametrize(
    ("octets", "text"),
    [
        ("32800001", "x = 1"),
        ("b2800001", "x = -1"),
        ("60000000", "x > 0"),  # the large form of the coefficient: 2 to the 23rd, times 10^-101
        ("6bf8967f", "x = 9.999999"),
        ("77f8967f", "x > 9.9E96"),  # the largest there is
        ("78000000", "x IS NULL"),  # an infinity
        ("7c000000", "x IS NULL"),  # not a number
    ],
)
def test_decimals_are_numbers(octets: str, text: str) -> None:
    message = Message(application_properties={"x": Decimal32(bytes.fromhex(octets))})
    assert result(text, entry_of(message)) is True


def test_the_end_of_the_range_of_large_decimals_is_unknown() -> None:
    largest = Decimal128(bytes.fromhex("5fffed09bead87c0378d8e63ffffffff"))
    message = Message(application_properties={"x": largest})
    assert result("x IS NULL", entry_of(message)) is True


# --- Invalid selectors -------------------------------------------------------------------------


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("text", "dialect", "position", "expected"),
    [
        ("color = ", JMS, 8, ("a value",)),
        ("color blue", JMS, 6, ("an operator", "the end")),
        ("color = 'a' AND (b = 1", JMS, 22, (")",)),
        ("a IN 'x'", JMS, 5, ("(",)),
        ("a NOT = 1", JMS, 6, ("BETWEEN", "IN", "LIKE")),
        ("a LIKE b", JMS, 7, ("a string",)),
        ("a LIKE 'b' ESCAPE 'cd'", JMS, 18, ("one escape character",)),
        ("a = 1 AND 7", JMS, 10, ("a condition",)),
        ("7", JMS, 0, ("a condition",)),
        ("a ^ 1", JMS, 2, ("an operator", "the end")),
        ("a = 99999999999999999999", JMS, 4, ("a number within its range",)),
        ("amqp.what = 1", JMS, 0, ("the name of a field of AMQP 1.0 after amqp.",)),
        ("a = 1 and b = 1", FILTEX, 6, ("a name",)),
        ("p.what = 1", FILTEX, 2, ("a field of the section p",)),
        ("x.what = 1", FILTEX, 0, ("header. or properties. or application_properties.",)),
        ("  ", FILTEX, 0, ("a condition",)),
    ],
)
def test_an_error_says_where_and_what_was_expected(
    text: str, dialect: Dialect, position: int, expected: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidFilter) as caught:
        compile_selector(text, dialect)
    error = caught.value
    assert (error.position, error.expected) == (position, expected)
    assert f"at character {position}:" in error.description
    assert error.condition == "amqp:invalid-field"
    assert error.info == {"invalid-field": "filter"}


# --- Bounds ------------------------------------------------------------------------------------


@pytest.mark.req("SE18")
@pytest.mark.parametrize(("bound", "letter"), [(64, "x"), (4096, "x"), (4096, "ä")])
def test_the_bytes_of_a_selector_are_bounded(bound: int, letter: str) -> None:
    limits = Limits(filter_text_max=bound)
    text = f"a = '{letter * ((bound - 6) // len(letter.encode()))}'"
    text += " " * (bound - len(text.encode()))
    compile_selector(text, limits=limits)
    with pytest.raises(InvalidFilter, match=f"more than {bound} bytes"):
        compile_selector(text + " ", limits=limits)


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [7, 511])
def test_the_terms_of_a_selector_are_bounded(bound: int) -> None:
    limits = Limits(selector_terms_max=bound)
    text = "a" + " OR a" * (bound // 2)
    compile_selector(text, limits=limits)
    with pytest.raises(InvalidFilter, match=f"more than {bound} terms"):
        compile_selector(text + ")", limits=limits)


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [3, 64])
@pytest.mark.parametrize(("opening", "closing"), [("(", ")"), ("NOT ", ""), ("- ", "")])
def test_the_depth_of_a_selector_is_bounded(bound: int, opening: str, closing: str) -> None:
    limits = Limits(selector_depth_max=bound)
    text = opening * (bound - 1) + "a" + closing * (bound - 1)
    compile_selector(text, QPID, limits=limits)
    with pytest.raises(InvalidFilter, match=f"more than {bound} levels"):
        compile_selector(opening + text + closing, QPID, limits=limits)


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [1, 64])
def test_the_wildcards_of_a_selector_are_bounded(bound: int) -> None:
    limits = Limits(like_wildcards_max=bound)
    compile_selector(f"a LIKE 'x{'_' * bound}!_' ESCAPE '!'", limits=limits)
    half = bound // 2
    compile_selector(f"a LIKE '{'%' * half}' OR b LIKE '{'%' * (bound - half)}'", limits=limits)
    several = " OR ".join([f"a LIKE '{'%' * half}'", f"b LIKE '{'%' * (bound - half)}'"])
    for text in (f"a LIKE '{'%' * (bound + 1)}'", f"{several} OR c LIKE '_'"):
        with pytest.raises(InvalidFilter, match="wildcards"):
            compile_selector(text, limits=limits)


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [5, 4096])
def test_the_subject_of_a_pattern_is_bounded(bound: int) -> None:
    limits = Limits(filter_subject_max=bound)
    at = entry_of(Message(application_properties={"a": "x" * bound, "b": ""}))
    above = entry_of(Message(application_properties={"a": "x" * (bound + 1)}))
    assert result("a LIKE 'x%'", at, limits=limits) is True
    assert result("a LIKE 'x%'", above, limits=limits) is None
    assert result("a + b = a", at, limits=limits) is True
    assert result("a + 'x' = a", at, limits=limits) is None


@pytest.mark.req("SE18")
def test_the_steps_of_an_evaluation_are_bounded() -> None:
    # A search compares three characters at each of 640 places, which takes 30 steps. There is one step
    # each for the pattern and the search; decoding takes 4 for the property and 5 for its octets.
    entry = entry_of(Message(application_properties={"a": "x" * 640}))
    text = "a LIKE '%x_z%'"
    assert result(text, entry, limits=Limits(filter_steps_max=41)) is False
    with pytest.raises(Exhausted):
        result(text, entry, limits=Limits(filter_steps_max=40))


def test_the_worst_that_fits_the_bounds_comes_to_an_end() -> None:
    """A pattern that takes a backtracking matcher for ever is stopped by the count of steps."""
    subject = entry_of(Message(application_properties={"a": "a" * 4096}))
    for pattern in ("%" + "a%" * 63, "%a_" * 31 + "b", "%" + "a" * 2000 + "_b%", "_" * 64):
        try:
            assert result(f"a LIKE '{pattern}'", subject) in (True, False)
        except Exhausted:
            pass
    many = " OR ".join(["a LIKE '%aa_bbbbbbb%'"] * 21)
    with pytest.raises(Exhausted):
        result(many, subject)


# --- Economy -----------------------------------------------------------------------------------


def test_nothing_is_loaded_before_there_is_a_selector() -> None:
    program = (
        "import sys, amqp_rt.broker.filtering.filters as f\n"
        "assert 'lark' not in sys.modules\n"
        "f.compile_filter_set({'apache.org:legacy-amqp-direct-binding:string': 'x'})\n"
        "assert 'lark' not in sys.modules\n"
        "f.compile_filter_set({'jms-selector': 'a = 1'})\n"
        "assert 'lark' in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()


@pytest.mark.req("B21", "M29")
@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("amqp.subject = 's'", "application-properties"),
        ("color = 'blue'", "properties"),
        ("JMSPriority = 4", "properties"),
        ("color = 'blue'", "body"),
    ],
)
def test_only_what_is_named_is_decoded(text: str, broken: str) -> None:
    sections = {
        "properties": "005373 c007 04 4040 40a10173",
        "application-properties": "005374 c10e 02 a105636f6c6f72 a104626c7565",
        "body": "005377 a10178",
    }
    # Valid sizes with invalid content: a symbol of no bytes although the count announces more.
    nonsense = {
        "properties": "005373 c003 04 a3a3",
        "application-properties": "005374 c103 02 4141",
        "body": "005375 b0ffffffff",
    }
    sections[broken] = nonsense[broken]
    entry = Entry(bytes.fromhex("".join(sections.values())))
    assert result(text, entry) is True


def test_maps_need_not_be_dicts() -> None:
    message = Message(application_properties=Map([("color", "blue")]))  # type: ignore[arg-type]
    assert result("color = 'blue'", entry_of(message)) is True
