"""SQL filters and actions: logic of three values, each construct of the grammar, errors, bounds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from amqp_rt_servicebus import sql
from amqp_rt_servicebus.sql import (
    COMPUTED_TEXT_MAX,
    DEFAULT_BOUNDS,
    PATTERN_MAX,
    SERVICE_BOUNDS,
    STEPS_MAX,
    SYSTEM_PROPERTIES,
    Evaluation,
    EvaluationError,
    InvalidSql,
    SqlBounds,
)

from amqp_rt.values import Char, Decimal128, Described, Float32, Int, Symbol, Timestamp, ULong

pytestmark = pytest.mark.req("Z14")

#: Texts longer than the default, which operators may allow.
LONG = SqlBounds(text_max=16_384)
parse_filter = partial(sql.parse_filter, bounds=LONG)
parse_action = partial(sql.parse_action, bounds=LONG)


class Fields:
    """Message that counts how often its sections are read."""

    def __init__(self, application: Mapping[str, object], system: Mapping[str, object]) -> None:
        self.application = application
        self.system = system
        self.read: list[str] = []

    def system_property(self, name: str) -> object:
        assert SYSTEM_PROPERTIES[name.lower()].name == name
        self.read.append(name)
        return self.system.get(name)

    def application_properties(self) -> Mapping[str, object]:
        self.read.append("application")
        return self.application


ID = UUID(int=7)
APPLICATION = {
    "color": "red",
    "Size": Int(4),
    "big": ULong(2**63),
    "price": 2.5,
    "cost": Decimal128((6175 << 113 | 25).to_bytes(16, "big")),
    "flag": True,
    "nothing": None,
    "a-b": "dashed",
    "letter": Char("x"),
    "at": Timestamp(1_000),
    "later": Timestamp(61_000),
    "list": [1],
    "pattern": "r_d",
    "mark": "!",
    "set": 1,
}
SYSTEM = {
    "Label": "order",
    "MessageId": "m1",
    "TimeToLive": timedelta(minutes=1),
    "SequenceNumber": 9,
}


def evaluation(
    application: Mapping[str, object] = APPLICATION,
    system: Mapping[str, object] = SYSTEM,
    *,
    steps_max: int = STEPS_MAX,
) -> Evaluation:
    return Evaluation(
        Fields(application, system),
        steps_max=steps_max,
        rule_steps_max=steps_max,
        new_id=lambda: ID,
    )


def result(text: str, parameters: Mapping[str, Any] | None = None) -> bool | None:
    return parse_filter(text, parameters).evaluate(evaluation())


# --- Logic -----------------------------------------------------------------------------------------

VALUES = {"1 = 1": True, "1 = 0": False, "missing = 1": None}
#: The tables of the documentation, in the order true, false, unknown.
AND = {True: (True, False, None), False: (False, False, False), None: (None, False, None)}
OR = {True: (True, True, True), False: (True, False, None), None: (True, None, None)}


@pytest.mark.parametrize(("left", "value"), VALUES.items())
def test_truth_tables(left: str, value: bool | None) -> None:
    for index, right in enumerate(VALUES):
        assert result(f"{left} AND {right}") is AND[value][index]
        assert result(f"{left} OR {right}") is OR[value][index]
    assert result(f"NOT {left}") is (None if value is None else not value)


@pytest.mark.parametrize(
    "unknown", ["missing", "nothing", "NULL", "sys.To", "missing + 1", "-missing"]
)
def test_unknown_spreads_through_operators(unknown: str) -> None:
    for text in (
        f"{unknown} = 1",
        f"1 <> {unknown}",
        f"{unknown} < 'a'",
        f"{unknown} + 1 = 2",
        f"2 * {unknown} = 2",
        f"{unknown} LIKE 'a%'",
        f"'a' LIKE {unknown}",
        f"'a' LIKE 'a' ESCAPE {unknown}",
        f"'a' NOT LIKE {unknown}",
        f"{unknown} IN (1, 2)",
        f"{unknown} NOT IN (1, 2)",
        f"p({unknown}) = 1",
    ):
        assert result(text) is None, text
        assert not parse_filter(text).matches(evaluation())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 IN (1, NULL)", True),
        ("1 IN (NULL, 2, 1)", True),
        ("1 IN (2, missing)", None),
        ("1 NOT IN (2, missing)", None),
        ("1 NOT IN (1, missing)", False),
        ("color IN ('blue', 'red')", True),
        ("color NOT IN ('blue', 'red')", False),
        ("color IN ('blue', price + 'x')", False),
        ("Size IN (3, 4.0)", True),
        ("missing IS NULL", True),
        ("nothing IS NULL", True),
        ("color IS NULL", False),
        ("color IS NOT NULL", True),
        ("list IS NOT NULL", True),
        ("sys.To IS NULL", True),
        ("sys.Label IS NULL", False),
        ("EXISTS(missing)", False),
        ("EXISTS (nothing)", True),
        ("EXISTS(sys.Label)", True),
        ("EXISTS(sys.To)", False),
        ("NOT EXISTS(user.color)", False),
    ],
)
def test_membership_null_and_presence(text: str, expected: bool | None) -> None:
    assert result(text) is expected


def test_what_decides_spares_the_operands_after_it() -> None:
    assert result("1 = 0 AND sys.Nope = 1") is False
    assert result("1 = 1 OR sys.Nope = 1") is True
    assert result("EXISTS(missing) AND missing > 'a'") is False
    assert result("1 IN (1, sys.Nope)") is True
    for text in ("sys.Nope = 1 AND 1 = 0", "missing = sys.Nope", "missing + sys.Nope = 1"):
        with pytest.raises(EvaluationError, match=r"no system property sys\.Nope"):
            result(text)


# --- Grammar ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "COLOR = 'red' and Not size > 4",
        "user.Color = 'red'",
        "USER.color = 'red'",
        "\"color\" = 'red'",
        "[a-b] = 'dashed' and \"a-b\" = 'dashed' and user.[A-B] = 'dashed'",
        '[a]]b] IS NULL AND "a""b" IS NULL',
        "[set] = 1",
        "SYS.LABEL = 'order'",
        "sys.[label] = 'order'",
        "color='red'AND(size=4)",
        "'it''s' = 'it''s' AND '' = ''",
        "1 + 2 * 3 = 7 AND (1 + 2) * 3 = 9 AND 7 - 2 - 1 = 4 AND 7 / 2 * 2 = 6 AND -2 * -2 = 4",
        "- - size = 4 AND +size = 4 AND 1--1 = 2",
        "7 % 4 = 3 AND -7 % 4 = -3",
        "1 = 0 AND 1 = 0 OR 1 = 1",
        "NOT 1 = 0 AND 1 = 1",
        "NOT (1 = 1 AND 1 = 0)",
        "NOT NOT 1 = 1",
        "101.5E5 = 10150000 AND 0.5E-2 = 0.005 AND .5 = 0.5 AND 2. = 2",
        "size > 3.5 AND price = 2.5 AND cost = cost AND big > 5",
        "cost * 2 = 5",
        "9223372036854775807 > -9223372036854775808",
        "flag = TRUE AND flag <> false AND flag != FALSE",
        "letter = 120",
        "'a' + 1 = 'a1' AND color + '!' = 'red!'",
        "later - at = @minute AND at + @minute = later AND later > at AND sys.TimeToLive = @MINUTE",
        "at < @now AND @now > at",
        "newid() = newid() AND NEWID() = @id",
        "property('color') = 'red' AND P('co' + 'lor') = 'red' AND p('sys.Label') = 'order'",
        "p('user.color') = 'red' AND p('a-b') = 'dashed'",
        "color LIKE 'r%' AND color LIKE '_e_' AND color NOT LIKE 'R%' AND 'a%b' LIKE 'a!%b' ESCAPE '!'",
        "color LIKE pattern AND 'a_' LIKE '_!_' ESCAPE mark",
        "name IS NULL\n  -- 1 = 1".replace("-- 1", "AND 1"),
        "größe IS NULL AND 名前 IS NULL AND a٣ IS NULL",
        "property IS NULL AND p IS NULL AND newid IS NULL AND sys IS NULL AND user IS NULL",
    ],
)
def test_each_construct(text: str) -> None:
    parameters = {
        "@minute": timedelta(minutes=1),
        "now": datetime(2026, 1, 1, tzinfo=UTC),
        "@id": ID,
    }
    assert result(text, parameters) is True


@pytest.mark.parametrize(
    "text",
    [
        # Examples of the service's documentation, of its emulator, and of the SDKs and their samples.
        "sys.label LIKE '%bus%' OR user.tag IN ('queue', 'topic', 'subscription')",
        "StoreId IN('Store1', 'Store2', 'Store3')",
        "sys.To NOT IN ('Store1','Store2') OR StoreId NOT IN ('Store1','Store2')",
        "\"http://schemas.microsoft.com/xrm/2011/Claims/EntityLogicalName\" = 'account'",
        "(DateTimeMp2-DateTimeMp1) <= @timespan",
        "property LIKE 'ABC\\%' ESCAPE '\\'",
        "color='blue' AND quantity=10",
        "sys.MessageId = '123456' AND userProp1 = 'value1'",
        "(priority = 1 OR priority = 3) AND (sys.label LIKE '%String1')",
        "property1 = @param1 AND property2 = @param2",
        "(sys.To IS NULL OR sys.To = 'name')",
        "1=1",
        "1=0",
        "1>1",
    ],
)
def test_published_filters_are_accepted(text: str) -> None:
    parameters = {"@timespan": timedelta(1), "@param1": "value", "@param2": 1}
    run = Evaluation(Fields({}, {}))
    assert parse_filter(text, parameters, bounds=SERVICE_BOUNDS).evaluate(run) in (
        True,
        False,
        None,
    )


@pytest.mark.parametrize(
    "text",
    [
        "SET quantity = quantity / 2;",
        "SET quantity = quantity / 2; REMOVE priority;SET sys.CorrelationId = 'low';",
        "SET source='routedOrders'",
        "SET sys.To = 'Entity'",
        "SET EventType = OriginalEventType; REMOVE OriginalEventType;",
        "SET Priority = @param",
    ],
)
def test_published_actions_are_accepted(text: str) -> None:
    action = parse_action(text, {"@param": datetime(2020, 7, 5, tzinfo=UTC)}, bounds=SERVICE_BOUNDS)
    assert action.apply(Evaluation(Fields({}, {})))


@pytest.mark.parametrize("name", SYSTEM_PROPERTIES)
def test_system_properties_are_read_by_their_names(name: str) -> None:
    fields = Fields({}, {})
    assert parse_filter(f"sys.{name} IS NULL").matches(Evaluation(fields))
    assert fields.read == [SYSTEM_PROPERTIES[name].name]


def test_parameters_have_the_types_of_python_or_of_the_wire() -> None:
    for value, text in (
        ("red", "color = @v"),
        (4, "size = @V"),
        (Int(4), "size = @v"),
        (2.5, "price = @v"),
        (True, "flag = @v"),
        (Decimal("2.5"), "cost = @v"),
        (Timestamp(1_000), "at = @v"),
        (Float32(2.5), "price = @v"),
    ):
        assert result(text, {"@v": value}) is True
    assert result("color = @v", {"v": None}) is None


def test_of_names_that_differ_by_case_the_first_counts() -> None:
    assert parse_filter("color = 'a'").matches(evaluation({"Color": "a", "color": "b"}))


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("", 1, "expected a value, found the end"),
        ("   ", 4, "expected a value, found the end"),
        ("color", 1, "expected a condition, found a value"),
        ("TRUE", 1, "expected a condition, found a value"),
        ("(color) AND 1 = 1", 1, "expected a condition, found a value"),
        ("1 = 1 AND color", 11, "expected a condition, found a value"),
        ("NOT color", 5, "expected a condition, found a value"),
        ("(1 = 1) = TRUE", 1, "expected a value, found a condition"),
        ("1 + (1 = 1) = 2", 5, "expected a value, found a condition"),
        ("-(1 = 1) = 2", 2, "expected a value, found a condition"),
        ("1 = NOT 1 = 1", 5, "expected a value, found a condition"),
        ("a = b = c", 7, "expected AND, OR or the end of the condition, found '='"),
        ("a IS NULL IS NULL", 11, "found 'IS'"),
        ("a b", 3, "expected an operator or the end, found 'b'"),
        ("1 = 1)", 6, "expected an operator or the end, found ')'"),
        ("(1 = 1", 7, "expected an operator or ), found the end"),
        ("a =", 4, "expected a value, found the end"),
        ("a = AND", 5, "found 'AND'; write [AND] if that is the name of a property"),
        ("set = 1", 1, "write [set]"),
        ("EXISTS(like)", 8, "expected a property, found 'like'; write [like]"),
        ("EXISTS color", 8, "expected ( after EXISTS"),
        ("EXISTS('a')", 8, "expected a property"),
        ("EXISTS(a + b)", 10, "expected ), found '+'"),
        ("1 IS NULL", 1, "expected a property before IS NULL"),
        ("p('a') IS NULL", 1, "expected a property before IS NULL"),
        ("a IS 1", 6, "expected NULL or NOT NULL, found '1'"),
        ("a IS NOT 1", 10, "expected NULL, found '1'"),
        ("a NOT 1", 7, "expected IN or LIKE after NOT"),
        ("a IN 1", 6, "expected ( after IN"),
        ("a IN ()", 7, "expected a value, found ')'"),
        ("a IN (1 2)", 9, "expected a comma or )"),
        ("a IN (1, b = 2)", 12, "expected a comma or )"),
        ("a LIKE", 7, "expected a value"),
        ("a LIKE 'x!' ESCAPE '!'", 8, "ends with its escape character"),
        ("a LIKE 'x' ESCAPE '!!'", 19, "a string of one character"),
        ("a LIKE 'x' ESCAPE ''", 19, "a string of one character"),
        ("a LIKE 'x' ESCAPE 1", 19, "a string of one character"),
        ("foo(a) = 1", 1, "there is no function 'foo'"),
        ("newid(1) = 1", 7, "expected ) after newid("),
        ("p() = 1", 3, "expected a value, found ')'"),
        ("p('a' = 1", 7, "expected an operator or ), found '='"),
        ("a.b = 1", 1, "there is no scope 'a'"),
        ("[sys].Label = 1", 1, "there is no scope '[sys]'"),
        ("sys. = 1", 6, "expected a property after sys., found '='"),
        ("sys.Label.x = 1", 10, "found '.'"),
        ("[] = 1", 1, "the name of a property is empty"),
        ("a = 'b", 5, "the string that begins here has no end"),
        ("a = 'b''", 5, "the string that begins here has no end"),
        ("[a]] = 1", 1, "the name that begins here has no end"),
        ('a = "b', 5, "the name that begins here has no end"),
        ("a = #", 5, "unexpected character '#'"),
        ("a == 1", 4, "expected a value, found '='"),
        ("a = 1x", 5, "'1x' is neither a number nor a name"),
        ("a = 1_0", 5, "'1_' is neither a number nor a name"),
        ("_a = 1", 1, "a name has letters, digits and _ after a letter, not '_'"),
        ("a½ = 1", 2, "not '½'"),
        ("@1 = 1", 2, "not '1'"),
        ("@ = 1", 1, "unexpected character '@'"),
        ("a = @b", 5, "there is no parameter '@b'"),
        (
            "a = @huge",
            5,
            "the parameter '@huge' cannot be used: a number is outside the range of decimal",
        ),
        ("a = 9223372036854775808", 5, "an integer is outside the range of 64 bits"),
        ("a = -9223372036854775809", 6, "an integer is outside the range of 64 bits"),
        ("a = " + "9" * 5000, 5, "an integer is outside the range of 64 bits"),
        ("a = 1e999", 5, "a number is outside the range of a double"),
    ],
)
def test_malformed_filters_are_refused_at_their_column(text: str, column: int, said: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        parse_filter(text, {"huge": Decimal(2**96)})
    assert (caught.value.line, caught.value.column) == (1, column)
    assert str(caught.value).startswith(f"the SQL filter is invalid at column {column}: ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


def test_errors_of_texts_with_lines_have_the_line() -> None:
    with pytest.raises(InvalidSql, match=r"at line 3, column 5: expected a value") as caught:
        parse_filter("a = 1\nAND\nb = ")
    assert (caught.value.line, caught.value.column) == (3, 5)


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("sys.Nope = 1", 1, "there is no system property sys.Nope"),
        ("EXISTS(sys.Body)", 8, "there is no system property sys.Body"),
        ("sys.Body IS NULL", 1, "there is no system property sys.Body"),
        ("p('sys.Nope') = 1", 1, "there is no system property sys.Nope"),
        ("p(1) = 1", 1, "property() takes a string, not a value of type 'long'"),
        ("color = 1", 7, "operator '=' cannot be applied to operands of type 'string' and 'long'"),
        (
            "color > 'a'",
            7,
            "operator '>' cannot be applied to operands of type 'string' and 'string'",
        ),
        ("size IN ('4')", 6, "'int' and 'string'"),
        ("list = list", 6, "'object' and 'object'"),
        ("cost > 1.5", 6, "'decimal' and 'double'"),
        ("big = size", 5, "'ulong' and 'int'"),
        ("1 + size / (size - 4) = 1", 10, "a number is divided by zero"),
        ("-color = 1", 1, "operator '-' cannot be applied to an operand of type 'string'"),
        ("size LIKE '4'", 6, "LIKE takes a string, not a value of type 'int'"),
        ("color LIKE size", 7, "a pattern of LIKE is a string, not a value of type 'int'"),
        ("color LIKE pattern ESCAPE color", 7, "an escape of LIKE is a string of one character"),
        ("color LIKE 'a' ESCAPE size", 7, "an escape of LIKE is a string of one character"),
        ("color LIKE pattern + mark ESCAPE mark", 7, "ends with its escape character"),
        ("broken = 1", 1, "a number is outside the range of decimal"),
    ],
)
def test_filters_that_fail_on_a_message_name_the_column(text: str, column: int, said: str) -> None:
    application = {**APPLICATION, "broken": Decimal128((0x1E << 122).to_bytes(16, "big"))}
    with pytest.raises(EvaluationError) as caught:
        parse_filter(text).matches(evaluation(application))
    assert str(caught.value).startswith(f"the SQL filter failed at column {column}: ")
    assert said in str(caught.value)


# --- Reading ---------------------------------------------------------------------------------------


def test_nothing_is_read_that_is_not_asked_for_and_nothing_twice() -> None:
    fields = Fields(APPLICATION, SYSTEM)
    run = Evaluation(fields)
    assert parse_filter("1 = 1").matches(run)
    assert fields.read == []
    assert parse_filter("sys.Label = 'order' AND sys.label <> 'x'").matches(run)
    assert fields.read == ["Label"]
    assert parse_filter("color = 'red' AND size = 4 AND EXISTS(flag)").matches(run)
    assert parse_filter("color = 'red' AND sys.Label = 'order'").matches(run)
    assert fields.read == ["Label", "application"]


# --- Actions ---------------------------------------------------------------------------------------


def changes(text: str, application: Mapping[str, object] = APPLICATION) -> dict[str, object]:
    """Return the application properties that differ after an action; removed ones are absent."""
    before = dict(application)
    found, system = parse_action(text, {"@t": timedelta(seconds=2)}).apply(evaluation(application))
    assert application == before
    assert not system
    gone = {name: "REMOVED" for name in before if name not in found}
    return {
        name: value
        for name, value in found.items()
        if name not in before or before[name] is not value
    } | gone


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SET added = 'x'", {"added": "x"}),
        ("set user.Added = 5;", {"Added": 5}),
        ("SET size = size / 2", {"Size": Int(2)}),
        ("SET SIZE = 2.5", {"Size": 2.5}),
        ("SET color = 5", {"color": "5"}),
        ("SET price = 3", {"price": 3.0}),
        ("SET nothing = 3", {"nothing": 3}),
        ("SET color = NULL", {"color": None}),
        ("SET color = missing + 1", {"color": None}),
        ("SET id = newid()", {"id": ID}),
        ("SET copied = list", {"copied": [1]}),
        ("SET span = @t", {"span": Described(Symbol("com.microsoft:timespan"), 20_000_000)}),
        ("SET then = at + @t", {"then": Timestamp(3_000)}),
        ("SET doubled = cost * 2", {"doubled": Decimal128((6175 << 113 | 50).to_bytes(16, "big"))}),
        ("SET label = sys.Label", {"label": "order"}),
        ("REMOVE COLOR", {"color": "REMOVED"}),
        ("REMOVE missing", {}),
        ("REMOVE [a-b]; REMOVE nothing", {"a-b": "REMOVED", "nothing": "REMOVED"}),
        ("SET a = 1, SET b = a + 1; SET c = b + 1 REMOVE a;", {"b": 2, "c": 3}),
        ("SET a = color; REMOVE color;SET d = color", {"a": "red", "color": "REMOVED", "d": None}),
    ],
)
def test_actions_change_application_properties(text: str, expected: dict[str, object]) -> None:
    found = changes(text)
    assert found == expected
    assert {name: type(found[name]) for name in expected} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SET sys.Label = 'x'", {"Label": "x"}),
        ("SET sys.label = sys.Label + '!'", {"Label": "order!"}),
        ("SET sys.To = 5", {"To": "5"}),
        ("SET sys.CorrelationId = newid()", {"CorrelationId": str(ID)}),
        ("SET sys.TimeToLive = @t", {"TimeToLive": timedelta(seconds=2)}),
        ("SET sys.ScheduledEnqueueTimeUtc = at", {"ScheduledEnqueueTimeUtc": Timestamp(1_000)}),
        ("SET sys.ScheduledEnqueueTimeUtc = offset", {"ScheduledEnqueueTimeUtc": Timestamp(0)}),
        ("REMOVE sys.Label", {"Label": None}),
        ("SET sys.Label = NULL; SET sys.To = sys.Label", {"Label": None, "To": None}),
        (
            "SET sys.SessionId = 's'; SET sys.PartitionKey = sys.SessionId",
            {"SessionId": "s", "PartitionKey": "s"},
        ),
    ],
)
def test_actions_change_system_properties(text: str, expected: dict[str, object]) -> None:
    moment = Described(Symbol("com.microsoft:datetime-offset"), 621_355_968_000_000_000)
    run = evaluation({**APPLICATION, "offset": moment})
    properties, system = parse_action(text, {"@t": timedelta(seconds=2)}).apply(run)
    assert system == expected
    assert list(map(type, system.values())) == list(map(type, expected.values()))
    assert properties == {**APPLICATION, "offset": moment}
    assert run.system("Label") == "order"


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("SET sys.Nope = 1", 5, "there is no system property sys.Nope"),
        ("REMOVE sys.Nope", 8, "there is no system property sys.Nope"),
        ("SET a = 1; SET b = sys.Nope", 20, "there is no system property sys.Nope"),
        ("SET sys.SequenceNumber = 1", 5, "sys.SequenceNumber can only be set by the service"),
        ("REMOVE sys.LockToken", 8, "sys.LockToken can only be set by the service"),
        ("SET sys.Label = at", 5, "sys.Label cannot be set to a value of type 'DateTime'"),
        ("SET sys.TimeToLive = 5", 5, "sys.TimeToLive cannot be set to a value of type 'long'"),
        ("SET sys.TimeToLive = at - later", 5, "sys.TimeToLive must be more than 0"),
        ("REMOVE sys.MessageId", 8, "sys.MessageId cannot be null"),
        ("SET sys.SessionId = long", 5, "sys.SessionId is longer than 128 characters"),
        ("SET a = color * 2", 15, "operator '*' cannot be applied"),
    ],
)
def test_actions_that_fail_on_a_message_name_the_column(text: str, column: int, said: str) -> None:
    run = evaluation({**APPLICATION, "long": "s" * 129})
    with pytest.raises(EvaluationError) as caught:
        parse_action(text).apply(run)
    assert str(caught.value).startswith(f"the SQL action failed at column {column}: ")
    assert said in str(caught.value)
    assert run.system("Label") == "order"


@pytest.mark.parametrize(
    "name", [name for name, each in SYSTEM_PROPERTIES.items() if each.settable]
)
def test_each_property_that_clients_set_can_be_set(name: str) -> None:
    value = {str: "'x'", Timestamp: "at", timedelta: "@t"}[SYSTEM_PROPERTIES[name].type]
    action = parse_action(f"SET sys.{name} = {value}", {"@t": timedelta(1)})
    assert list(action.apply(evaluation()).system) == [SYSTEM_PROPERTIES[name].name]


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("", 1, "expected SET or REMOVE, found the end"),
        ("color = 1", 1, "expected SET or REMOVE, found 'color'"),
        ("SET", 4, "expected a property, found the end"),
        ("SET 'a' = 1", 5, "expected a property"),
        ("SET set = 1", 5, "expected a property, found 'set'; write [set]"),
        ("SET a 1", 7, "expected =, found '1'"),
        ("SET a = ", 9, "expected a value, found the end"),
        ("SET a = (1 = 1)", 9, "expected a value, found a condition"),
        ("SET a = b = 1", 11, "expected an operator, SET or REMOVE, found '='"),
        ("SET a = 1 AND b = 1", 11, "expected an operator, SET or REMOVE, found 'AND'"),
        ("SET a = 1,", 11, "expected SET or REMOVE, found the end"),
        ("SET a = 1;;", 11, "expected SET or REMOVE, found ';'"),
        ("REMOVE a = 1", 10, "expected SET or REMOVE, found '='"),
        ("REMOVE a.b", 8, "there is no scope 'a'"),
        ("SET a = b LIKE 'x'", 11, "found 'LIKE'"),
    ],
)
def test_malformed_actions_are_refused_at_their_column(text: str, column: int, said: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        parse_action(text)
    assert caught.value.column == column
    assert str(caught.value).startswith(f"the SQL action is invalid at column {column}: ")
    assert said in str(caught.value)


# --- Bounds ----------------------------------------------------------------------------------------


def test_the_length_of_a_text_is_bounded() -> None:
    text = "color = '" + "x" * (1_024 - 10) + "'"
    assert parse_filter(text, bounds=SERVICE_BOUNDS).text == text
    with pytest.raises(InvalidSql, match="it has 1025 characters, but at most 1024 are allowed"):
        parse_filter(text + " ", bounds=SERVICE_BOUNDS)
    with pytest.raises(InvalidSql, match="it has 1026 characters"):
        parse_filter("color = @v", {"@v": "x" * 1_016}, bounds=SERVICE_BOUNDS)
    with pytest.raises(InvalidSql, match=f"at most {DEFAULT_BOUNDS.text_max}"):
        sql.parse_action("SET a = '" + "x" * DEFAULT_BOUNDS.text_max + "'")


def test_the_statements_of_an_action_are_bounded() -> None:
    most = SERVICE_BOUNDS.statements_max
    parse_action("SET a = 1;" * most, bounds=SERVICE_BOUNDS)
    with pytest.raises(InvalidSql, match="there are more than 32 statements") as caught:
        parse_action("SET a = 1;" * (most + 1), bounds=SERVICE_BOUNDS)
    assert caught.value.column == 10 * most + 1


def test_the_literals_are_bounded() -> None:
    bounds = SqlBounds(literals_max=3)
    parse_filter("1 IN (1, @p)", {"p": 1}, bounds=bounds)
    with pytest.raises(InvalidSql, match="at column 14: there are more than 3 constants"):
        parse_filter("1 IN (1, @p, NULL)", {"p": 1}, bounds=bounds)


@pytest.mark.parametrize(
    ("before", "after"),
    [("(", ")"), ("NOT ", ""), ("- ", ""), ("p(", ")"), ("NOT (1 = 0 OR 1 = 1 AND ", ")")],
)
def test_nesting_is_bounded(before: str, after: str) -> None:
    inner = "1 = 1" if "1 = 1" in before or "NOT" in before or before == "(" else "size"
    outer = "" if inner == "1 = 1" else " IN (1)"
    levels = before.count("(") + before.count("NOT") + before.count("-")
    most = DEFAULT_BOUNDS.depth_max // levels
    parse_filter(before * most + inner + after * most + outer)
    with pytest.raises(InvalidSql, match="more than 64 levels are nested"):
        parse_filter(before * (most + 1) + inner + after * (most + 1) + outer)


def test_levels_beside_each_other_are_not_nested() -> None:
    texts = ["(1 = 1)", "NOT 1 = 0", "- size < 0", "p('color') = 'red'", "(1 + 1) = 2"]
    assert result(" AND ".join(texts * DEFAULT_BOUNDS.depth_max)) is True


def test_the_deepest_text_fits_the_stack() -> None:
    """Parsing, compiling and evaluating take at most 500 calls within each other."""
    most = (DEFAULT_BOUNDS.depth_max - 3) // 3
    value = "p('a' + 'b' * - (" * most + "'a'" + "))" * most
    conditions = "NOT (1 = 0 OR 1 = 1 AND " * 32 + "1 = 1" + ")" * 32
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 500)
    try:
        deep = parse_filter(f"NOT (1 = 0 OR 1 = 1 AND NOT {value} IN (1))")
        with pytest.raises(EvaluationError, match="operator '-' cannot be applied"):
            deep.matches(evaluation())
        assert parse_filter(conditions).matches(evaluation())
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "text",
    [
        " OR ".join(["1 = 0"] * 1_000),
        " AND ".join(["1 = 1"] * 1_000) + " AND 1 = 0",
        "size NOT IN (" + ", ".join(["4"] * 2_000) + ")",
        "1" + " + 1" * 2_000 + " = 0",
        "1" + " * 1" * 2_000 + " = 0",
    ],
)
def test_long_texts_need_no_deep_stack(text: str) -> None:
    assert result(text) is False


def test_a_bomb_of_joined_texts_is_refused() -> None:
    run = evaluation({"a": "x" * COMPUTED_TEXT_MAX})
    with pytest.raises(EvaluationError, match=f"a text is longer than {COMPUTED_TEXT_MAX}"):
        parse_filter("a" + " + a" * 4_000 + " = 'x'").matches(run)


def test_steps_are_shared_by_all_filters_over_a_message() -> None:
    heavy = parse_filter("a LIKE b")
    run = evaluation({"a": "x" * 30_000, "b": "%_" * 2_000 + "y"})
    assert not heavy.matches(run)
    taken = run.steps
    assert taken > 30_000
    for _ in range(STEPS_MAX // taken - 1):
        heavy.matches(run)
    with pytest.raises(EvaluationError, match="more than 1000000 steps for this message"):
        heavy.matches(run)
    with pytest.raises(EvaluationError, match="steps"):
        parse_filter("1 = 1").matches(run)


def test_each_part_of_a_filter_takes_a_step() -> None:
    run = evaluation(steps_max=1_000)
    long = parse_filter(" OR ".join(["missing = 0"] * 200))
    assert long.evaluate(run) is None
    assert run.steps >= 600
    with pytest.raises(EvaluationError, match="more than 1000 steps"):
        long.evaluate(run)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("EXISTS(size)", 500),
        ("'x' LIKE pattern", 4_000),
        ("half + half = 'x'", 60),
        ("p(name) = 'x'", 30),
        ("name = name", 30),
        ("name IN ('x')", 30),
    ],
)
def test_work_that_depends_on_the_message_takes_steps(text: str, least: int) -> None:
    others = {f"p{number}": number for number in range(500)}
    long = {"name": "n" * 31_000, "half": "n" * 16_000, "pattern": "_" * 4_000}
    run = evaluation(others if text == "EXISTS(size)" else long)
    parse_filter(text).evaluate(run)
    assert run.steps >= least


def test_actions_take_steps() -> None:
    application = {f"p{number}": number for number in range(500)}
    run = evaluation(application)
    parse_action("SET a = 1").apply(run)
    assert run.steps >= 1_000
    run = evaluation({"name": "n" * 16_000})
    parse_action("SET a = name + name;" * 10).apply(run)
    assert run.steps >= 10 * 31
    with pytest.raises(EvaluationError, match="more than 100 steps"):
        parse_action("SET a = name + name;" * 10).apply(
            evaluation({"name": "n" * 16_000}, steps_max=100)
        )


def test_comparing_long_texts_takes_steps() -> None:
    run = evaluation({"a": "x" * 2_000_000, "b": "x" * 2_000_000})
    assert parse_filter("a = b AND a IN (b) AND a NOT IN ('x')").matches(run)
    assert run.steps > 3 * 1_900


def test_a_pattern_is_bounded() -> None:
    with pytest.raises(InvalidSql, match=f"longer than {PATTERN_MAX}"):
        parse_filter("a LIKE '" + "x" * (PATTERN_MAX + 1) + "'")
    with pytest.raises(EvaluationError, match=f"longer than {PATTERN_MAX}"):
        parse_filter("'a' LIKE a").matches(evaluation({"a": "x" * (PATTERN_MAX + 1)}))
