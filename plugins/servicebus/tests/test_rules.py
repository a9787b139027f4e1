"""Rules of subscriptions: which copies a message gives, and the index of correlation filters."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from amqp_rt_servicebus.bounds import SERVICE_BOUNDS
from amqp_rt_servicebus.correlations import (
    FIELDS_MAX,
    TEXT_MAX,
    CorrelationIndex,
    conditions_of,
)
from amqp_rt_servicebus.declarations import (
    Correlation,
    Everything,
    Nothing,
    Rule,
    Sql,
    Subscription,
)
from amqp_rt_servicebus.rules import (
    ACTION_FAILED,
    FILTER_FAILED,
    Copy,
    Failure,
    InvalidRule,
    RuleBounds,
    RuleExists,
    RuleNotFound,
    SubscriptionRules,
    TooManyRules,
    TopicRules,
)
from amqp_rt_servicebus.sql import Evaluation
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.values import Decimal128, Float32, Int, Symbol, Timestamp, UInt

pytestmark = pytest.mark.req("Z14")


class Selection(NamedTuple):
    """Copies of a message that a subscription gets, and failures of its rules."""

    copies: tuple[Copy, ...] = ()
    failures: tuple[Failure, ...] = ()


class Fields:
    """Message that records which of its fields are read."""

    def __init__(self, application: Mapping[str, object], system: Mapping[str, object]) -> None:
        self.application = application
        self.system = system
        self.read: list[str] = []

    def system_property(self, name: str) -> object:
        self.read.append(name)
        return self.system.get(name)

    def application_properties(self) -> Mapping[str, object]:
        self.read.append("application")
        return self.application


def message(application: Mapping[str, object] | None = None, /, **system: object) -> Evaluation:
    return Evaluation(Fields(application or {}, system))


def rules(*declared: Rule) -> SubscriptionRules:
    return TopicRules().add("s", declared)


def select_all(topic: TopicRules, run: Evaluation) -> dict[str, Selection]:
    """Return what each subscription gets that gets anything."""
    found: dict[str, Selection] = {}
    for each in topic.examine(run):
        if each is not None:
            owner, result = each
            copies, failures = found.get(owner.name, Selection())
            if isinstance(result, Copy):
                copies = (*copies, result)
            else:
                failures = (*failures, result)
            found[owner.name] = Selection(copies, failures)
    return found


def select(found: SubscriptionRules, run: Evaluation) -> Selection:
    """Return what one subscription gets."""
    return select_all(found.topic, run).get(found.name, Selection())


def selected(found: SubscriptionRules, run: Evaluation) -> list[str | None]:
    """Return the rules that give copies: None for the copy of those without an action."""
    selection = select(found, run)
    assert selection.failures == ()
    return [copy.rule for copy in selection.copies]


RED = {"color": "red", "size": Int(4)}


# --- Copies ----------------------------------------------------------------------------------------


def test_rules_without_an_action_give_one_copy_however_many_match() -> None:
    found = rules(
        Rule("a", "color = 'red'"),
        Rule("b", Correlation(properties={"color": "red"})),
        Rule("c"),
        Rule("d", Nothing()),
        Rule("e", "color = 'blue'"),
    )
    assert select(found, message(RED)) == Selection((Copy(),))


def test_each_rule_with_an_action_gives_its_own_copy() -> None:
    """The example of the documentation: of five rules, two have actions, and all match."""
    found = rules(
        Rule("a"),
        Rule("halved", "color = 'red'", action="SET size = size / 2"),
        Rule("b", "size = 4"),
        Rule("labelled", Correlation(label="x"), action="REMOVE color; SET sys.Label = 'y'"),
        Rule("c", Correlation(properties={"size": 4})),
    )
    run = message(RED, Label="x")
    assert select(found, run).copies == (
        Copy(),
        Copy("halved", {"color": "red", "size": Int(2), "RuleName": "halved"}),
        Copy("labelled", {"size": Int(4), "RuleName": "labelled"}, {"Label": "y"}),
    )
    assert run.properties() == {"color": ("color", "red"), "size": ("size", Int(4))}
    assert list(RED.items()) == [("color", "red"), ("size", Int(4))]


def test_a_change_of_one_copy_is_seen_in_no_other() -> None:
    topic = TopicRules()
    topic.add(
        "s",
        [Rule("a", action="SET n = n + 1"), Rule("b", action="SET n = n + 1; SET sys.To = 'x'")],
    )
    topic.add(
        "t", [Rule("a", "n = 1", action="SET n = n + 5"), Rule("b", "n = 1 AND sys.To IS NULL")]
    )
    found = select_all(topic, message({"n": 1}))
    assert [copy.properties and copy.properties["n"] for copy in found["s"].copies] == [2, 2]
    assert [copy.properties and copy.properties["n"] for copy in found["t"].copies] == [6, None]


def test_the_name_of_the_rule_replaces_another() -> None:
    found = rules(Rule("mine", action="SET rulename = 'other'"))
    (copy,) = select(found, message({"RULENAME": "sent"})).copies
    assert copy.properties == {"RuleName": "mine"}


def test_copies_are_in_the_order_of_the_rules() -> None:
    found = rules(
        Rule("a", "color = 'red'", action="SET n = 1"),
        Rule("b", Correlation(properties={"color": "red"}), action="SET n = 2"),
        Rule("c"),
        Rule("d", Correlation(properties={"size": 4})),
        Rule("e", action="SET n = 3"),
    )
    assert selected(found, message(RED)) == ["a", "b", None, "e"]


def test_no_rule_selects_nothing() -> None:
    assert selected(rules(), message(RED)) == []
    assert selected(rules(Rule("a", Nothing())), message(RED)) == []


def test_the_default_rule_selects_everything() -> None:
    topic = TopicRules()
    topic.add("all", Subscription("all").rules or ())
    topic.add("none", Subscription("none", []).rules or ())
    assert select_all(topic, message()) == {"all": Selection((Copy(),))}


def test_a_failure_is_reported_beside_the_copies_of_other_rules() -> None:
    found = rules(
        Rule("wrong", "color > 5"),
        Rule("good", "color = 'red'"),
        Rule("acting", "color = 'red'", action="SET sys.Nope = 1"),
        Rule("also", Correlation(properties={"color": "red"}), action="SET n = 1"),
    )
    selection = select(found, message(RED))
    assert [copy.rule for copy in selection.copies] == [None, "also"]
    assert selection.failures == (
        Failure(
            "wrong",
            FILTER_FAILED,
            "the SQL filter failed at column 7: operator '>' cannot be applied to operands of type"
            " 'string' and 'long'",
        ),
        Failure(
            "acting",
            ACTION_FAILED,
            "the SQL action failed at column 5: there is no system property sys.Nope",
        ),
    )


def test_a_failure_alone_is_a_selection() -> None:
    topic = TopicRules()
    topic.add("s", [Rule("wrong", "sys.Nope = 1")])
    topic.add("t", [Rule("other", "color = 'blue'")])
    found = select_all(topic, message(RED))
    assert list(found) == ["s"]
    assert found["s"].copies == ()
    assert found["s"].failures[0].reason == "FilterException"


def test_all_rules_of_a_topic_share_the_steps() -> None:
    topic = TopicRules()
    for number in range(20):
        topic.add(f"s{number}", [Rule("r", "a LIKE b")])
    topic.add("correlated", [Rule("r", Correlation(label="x"))])
    fields = Fields({"a": "x" * 5_000, "b": "%_" * 2_000 + "y"}, {"Label": "x"})
    found = select_all(topic, Evaluation(fields, steps_max=300_000))
    failed = [name for name, selection in found.items() if selection.failures]
    assert 0 < len(failed) < 20
    assert all("more than 300000 steps" in found[name].failures[0].description for name in failed)
    assert found["correlated"] == Selection((Copy(),))


def test_a_subscription_fails_once_when_the_steps_are_used_up() -> None:
    topic = TopicRules(RuleBounds(steps_max=100))
    declared = [Rule(f"r{number}", "a = 1", action="SET a = 2") for number in range(50)]
    for name in ("first", "second", "third"):
        topic.add(name, [*declared, Rule("all")])
    found = select_all(topic, topic.evaluation(Fields({"a": 1}, {})))
    assert [len(each.failures) for each in found.values()] == [1, 1, 1]
    # A rule without an expression needs no steps that could be missing.
    assert found["first"].copies == (Copy(),)


def test_a_single_rule_has_steps_of_its_own() -> None:
    def failures(rule_steps_max: int) -> list[str]:
        topic = TopicRules(RuleBounds(rule_steps_max=rule_steps_max))
        topic.add("s", [Rule("long", " OR ".join(["a = 0"] * 9)), Rule("short", "a = 1")])
        found = select_all(topic, topic.evaluation(Fields({"a": 1}, {})))["s"]
        assert found.copies == (Copy(),)
        return [f"{each.rule}: {each.description}" for each in found.failures]

    # One for the filter and the junction each, and three for each comparison.
    assert failures(29) == []
    assert failures(28) == ["long: the rule takes more than 28 steps for this message"]


# --- Turns -----------------------------------------------------------------------------------------


def longest_pause(topic: TopicRules, run: Evaluation) -> int:
    """Return the most steps from one pause of an examination to the next."""
    longest = before = 0
    for _ in topic.examine(run):
        longest = max(longest, run.steps - before)
        before = run.steps
    return longest


def test_no_rule_takes_longer_than_a_turn_before_others_may_have_theirs() -> None:
    topic = TopicRules(RuleBounds(rule_steps_max=20_000))
    bomb = " OR ".join(["a LIKE b"] * 50)
    for number in range(10):
        topic.add(f"s{number}", [Rule("filter", bomb), Rule("all", action="SET c = a + a; " * 9)])
    sent = {"a": "x" * 10_000, "b": "%_" * 20 + "y"}
    run = topic.evaluation(Fields(sent, {}))
    assert longest_pause(topic, run) <= 20_000 + 100
    assert run.steps > 150_000


def test_many_rules_pause_often() -> None:
    topic = TopicRules()
    texts = [Rule(f"r{number}", f"a = {number}") for number in range(500)]
    topic.add("texts", texts)
    alike = Correlation(label="x")
    topic.add("alike", [Rule(f"r{number}", alike) for number in range(5_000)])
    different = [
        Rule(f"r{number}", Correlation(label="x", properties={f"p{number}": 1}))
        for number in range(500)
    ]
    topic.add("different", different)
    sent = {f"p{number}": 2 for number in range(500)} | {"a": 1}
    run = topic.evaluation(Fields(sent, {"Label": "x"}))
    # Reading 501 properties counts three for each.
    assert longest_pause(topic, run) <= 3 * 501 + 1_100
    # Three for each text, one for each that is alike, three for each group of different ones.
    assert run.steps > 3 * 500 + 5_000 + 3 * 500


def test_rules_that_come_during_an_examination_do_not_count() -> None:
    topic = TopicRules()
    first = topic.add("first", [Rule("a", "n = 1"), Rule("b", "n = 2")])
    topic.add("second", [Rule("a", Correlation(label="x"))])
    found = []
    for each in topic.examine(message({"n": 1}, Label="x")):
        if "late" not in [rule.declaration.name for rule in first]:
            first.add(Rule("late", "n = 1", action="SET n = 3"))
            topic.add("third", [Rule("a", Correlation(label="x")), Rule("b")])
        if each is not None:
            found.append((each[0].name, each[1]))
    assert sorted(found, key=lambda each: each[0]) == [("first", Copy()), ("second", Copy())]


def test_a_subscription_that_is_deleted_during_an_examination_gets_no_more() -> None:
    topic = TopicRules()
    topic.add("s", [Rule(f"r{number}", "n = 1", action="SET n = 2") for number in range(9)])
    topic.add("t", [Rule("a", "n = 1")])
    found = []
    for each in topic.examine(message({"n": 1})):
        if each is not None:
            found.append(each[0].name)
            if found == ["s"] * 3:
                topic.remove("s")
    assert found == ["s", "s", "s", "t"]


# --- Adding and removing ---------------------------------------------------------------------------


def test_rules_are_added_enumerated_and_removed() -> None:
    found = rules(Rule("a"))
    found.add(Rule("B", "color = 'red'"), now_ms=5)
    found.add(Rule("c", Correlation(label="x")))
    assert [each.declaration.name for each in found] == ["a", "B", "c"]
    assert (len(found), found["b"].created_ms, found["b"].declaration.filter) == (
        3,
        5,
        Sql("color = 'red'"),
    )
    assert [each.declaration.name for each in found.page(1, 1)] == ["B"]
    assert [each.declaration.name for each in found.page(2, 100)] == ["c"]
    assert found.page(3, 100) == found.page(0, 0) == found.page(0, -1) == []
    found.remove("A")
    found.remove("b")
    assert selected(found, message(RED)) == []
    assert selected(found, message(RED, Label="x")) == [None]
    found.remove("C")
    assert selected(found, message(RED, Label="x")) == []
    assert len(found) == 0


def test_a_rule_is_replaced_in_its_place() -> None:
    found = rules(Rule("a", action="SET n = 1"), Rule("b", action="SET n = 2"))
    found.replace(Rule("A", Correlation(label="x"), action="SET n = 3"))
    assert selected(found, message(Label="x")) == ["A", "b"]
    assert selected(found, message()) == ["b"]
    assert [each.declaration.name for each in found] == ["A", "b"]
    with pytest.raises(InvalidRule):
        found.replace(Rule("a", "1 ="))
    with pytest.raises(RuleNotFound):
        found.replace(Rule("c"))
    assert selected(found, message(Label="x")) == ["A", "b"]


def test_wrong_names_are_refused() -> None:
    found = rules(Rule("a"))
    with pytest.raises(RuleExists, match="subscription 's' already has a rule 'A'"):
        found.add(Rule("A"))
    with pytest.raises(RuleNotFound, match="subscription 's' has no rule 'b'"):
        found.remove("b")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule("a", "1 ="), "rule 'a': the SQL filter is invalid at column 4: expected a value"),
        (Rule("a", action="n = 1"), "rule 'a': the SQL action is invalid at column 1"),
        (Rule("a", Sql("n = @p", {"q": 1})), "there is no parameter '@p'"),
        (Rule("a", Correlation()), "the correlation filter has no field"),
        (Rule("a", Correlation(properties={"x": None})), "property 'x' is null"),
        (Rule("a", Correlation(properties={"x": [1]})), "property 'x' is list"),
        (Rule("a", Correlation(properties={"x": 1, "X": 1})), "property 'X' twice"),
        (Rule("a", Correlation(properties={"x": Decimal(2**96)})), "outside the range of decimal"),
        (Rule("a", Correlation(label="x" * (TEXT_MAX + 1))), f"more than {TEXT_MAX} characters"),
        (
            Rule("a", Correlation(properties={f"p{n}": n for n in range(FIELDS_MAX + 1)})),
            "more than 256 fields",
        ),
    ],
)
def test_invalid_rules_are_refused_and_leave_nothing(rule: Rule, said: str) -> None:
    found = rules(Rule("old", Correlation(label="x")))
    with pytest.raises(InvalidRule, match=r"^rule 'a': ") as caught:
        found.add(Rule("new"), rule)
    assert said in str(caught.value)
    assert [each.declaration.name for each in found] == ["old"]
    assert selected(found, message()) == []


def test_rules_are_bounded() -> None:
    topic = TopicRules(RuleBounds(rules_max=3, sql_filters_max=2, correlation_filters_max=2))
    first = topic.add("s", [Rule("a", "1 = 1"), Rule("b", Correlation(label="x"))])
    second = topic.add("t", [Rule("a", "1 = 1"), Rule("b", Correlation(label="x"))])
    with pytest.raises(TooManyRules, match="more than 2 SQL filters"):
        first.add(Rule("c", "1 = 1"))
    with pytest.raises(TooManyRules, match="more than 2 correlation filters"):
        first.add(Rule("c", Correlation(label="x")))
    with pytest.raises(TooManyRules, match="more than 2 SQL filters"):
        first.replace(Rule("b", "1 = 1"))
    with pytest.raises(TooManyRules, match="subscription 's' would have more than 3 rules"):
        first.add(Rule("c"), Rule("d"))
    assert [each.declaration.name for each in first] == ["a", "b"]
    assert [each.serial for each in first] == [1, 2]
    assert selected(first, message(Label="x")) == [None]
    second.remove("a")
    first.add(Rule("c", "1 = 1"))
    topic.remove("T")
    second = topic.add("t", [Rule("b", Correlation(label="x"))])
    assert selected(second, message(Label="x")) == [None]


def test_bounds_of_the_service() -> None:
    topic = TopicRules(SERVICE_BOUNDS.rules)
    with pytest.raises(InvalidRule, match="at most 1024"):
        topic.add("s", [Rule("a", "color = '" + "x" * 1_024 + "'")])
    assert (topic.bounds.sql_filters_max, topic.bounds.correlation_filters_max) == (2_000, 100_000)


def test_subscriptions_have_unique_names_and_take_their_rules_with_them() -> None:
    topic = TopicRules()
    topic.add("s", [Rule("a"), Rule("b", Correlation(label="x")), Rule("c", "1 = 1")])
    with pytest.raises(ValueError, match="already has a subscription 'S'"):
        topic.add("S")
    topic.remove("S")
    assert select_all(topic, message(Label="x")) == {}
    assert topic.correlations.size == 0
    assert not topic._evaluated
    with pytest.raises(InvalidRule):
        topic.add("s", [Rule("a"), Rule("b", "1 =")])
    assert select_all(topic, message()) == {}


# --- Correlation -----------------------------------------------------------------------------------

SYSTEM = {
    "correlation_id": "CorrelationId",
    "message_id": "MessageId",
    "to": "To",
    "reply_to": "ReplyTo",
    "label": "Label",
    "session_id": "SessionId",
    "reply_to_session_id": "ReplyToSessionId",
    "content_type": "ContentType",
}


@pytest.mark.parametrize(("attribute", "name"), SYSTEM.items())
def test_each_system_field_is_compared_by_case(attribute: str, name: str) -> None:
    found = rules(Rule("a", Correlation(**{attribute: "Value"})))
    assert selected(found, message(**{name: "Value"})) == [None]
    assert selected(found, message(**{name: "value"})) == []
    assert selected(found, message()) == []


def test_all_fields_are_to_be_equal() -> None:
    found = rules(
        Rule("a", Correlation(label="x", reply_to="y", properties={"color": "red", "size": 4}))
    )
    assert selected(found, message(RED, Label="x", ReplyTo="y")) == [None]
    assert selected(found, message(RED, Label="x", ReplyTo="z")) == []
    assert selected(found, message(RED, Label="x")) == []
    assert selected(found, message({"color": "red"}, Label="x", ReplyTo="y")) == []


@pytest.mark.parametrize(
    ("wanted", "sent", "equal"),
    [
        (4, Int(4), True),
        (4, UInt(4), True),
        (4, 4.0, True),
        (0.5, Float32(0.5), True),
        (Decimal("2.5"), Decimal128((6175 << 113 | 25).to_bytes(16, "big")), True),
        (4, "4", False),
        (1, True, False),
        (True, True, True),
        ("red", Symbol("red"), True),
        ("red", "Red", False),
        (UUID(int=1), UUID(int=1), True),
        (Timestamp(5), Timestamp(5), True),
        (Timestamp(5), 5, False),
        (b"a", b"a", True),
        ("a", b"a", False),
        (float("nan"), float("nan"), False),
        (4, None, False),
        (4, [4], False),
        (4, Decimal128((0x1E << 122).to_bytes(16, "big")), False),
    ],
)
def test_application_properties_are_compared_by_value(
    wanted: object, sent: object, equal: bool
) -> None:
    found = rules(Rule("a", Correlation(properties={"Color": wanted})))
    assert selected(found, message({"COLOR": sent})) == ([None] if equal else [])
    found.remove("a")
    assert selected(found, message({"COLOR": sent})) == []


def test_fields_that_no_filter_names_are_not_read() -> None:
    topic = TopicRules()
    topic.add("s", [Rule("a", Correlation(label="x", reply_to="y"))])
    run = message(RED, Label="x")
    select_all(topic, run)
    assert run._fields.read == ["Label", "ReplyTo"]
    topic.add("t", [Rule("a", Correlation(properties={"color": "red"}))])
    run = message(RED)
    select_all(topic, run)
    assert sorted(run._fields.read) == ["Label", "application"]


class Counting(Evaluation):
    """Evaluation that counts how often filters ask for a field."""

    asked = 0

    def system(self, name: str) -> Any:
        self.asked += 1
        return super().system(name)

    def application(self, folded: str) -> Any:
        self.asked += 1
        return super().application(folded)


@pytest.mark.slow
def test_ten_thousand_correlation_filters_cost_no_more_than_a_few() -> None:
    topic = TopicRules()
    for number in range(10_000):
        topic.add(
            f"s{number}",
            [
                Rule("id", Correlation(correlation_id=f"c{number}")),
                Rule(
                    "both", Correlation(label="order", properties={"type": "x", "tenant": number})
                ),
            ],
        )
    run = Counting(
        Fields(
            {"type": "x", "tenant": Int(77), "more": 1}, {"CorrelationId": "c5", "Label": "order"}
        )
    )
    assert select_all(topic, run) == {"s5": Selection((Copy(),)), "s77": Selection((Copy(),))}
    # One field for the first group, three for the second.
    assert run.asked == 4


def test_filters_on_different_fields_are_not_tried_without_them() -> None:
    topic = TopicRules()
    declared = [
        Rule(f"r{number}", Correlation(label="order", properties={f"p{number}": True}))
        for number in range(5_000)
    ]
    found = topic.add("s", declared)
    run = Counting(Fields({"p7": True, "other": 1}, {"Label": "order"}))
    assert selected(found, run) == [None]
    # The first group is filed under the label, before there was a better field.
    assert run.asked <= 4


# --- The index against a scan ----------------------------------------------------------------------

TEXTS = st.sampled_from(["x", "y", "X"])
NUMBERS = st.sampled_from([1, 1.0, True, "1", Int(1), 2])
FILTERS = st.builds(
    lambda system, properties: (system, properties),
    st.dictionaries(st.sampled_from(["label", "to"]), TEXTS),
    st.dictionaries(st.sampled_from("abc"), NUMBERS, max_size=3),
).filter(any)
MESSAGES = st.tuples(
    st.dictionaries(st.sampled_from("ABCd"), NUMBERS),
    st.dictionaries(st.sampled_from(["Label", "To"]), TEXTS),
)


def equals(left: object, right: object) -> bool:
    kinds = [
        (bool, str).index(type(each)) if type(each) in (bool, str) else 2 for each in (left, right)
    ]
    return kinds[0] == kinds[1] and left == right


def found_by(index: CorrelationIndex[int], run: Evaluation) -> list[int]:
    return [number for some in index.search(run) for number in some]


@given(
    filters=st.lists(FILTERS, max_size=12),
    removed=st.sets(st.integers(0, 11)),
    sent=MESSAGES,
)
def test_the_index_finds_what_a_scan_finds(
    filters: list[tuple[dict[str, str], dict[str, object]]],
    removed: set[int],
    sent: tuple[dict[str, object], dict[str, object]],
) -> None:
    application, system = sent
    lowered = {name.lower(): value for name, value in application.items()}
    index: CorrelationIndex[int] = CorrelationIndex()
    conditions = [
        conditions_of(Correlation(**fields, properties=properties))
        for fields, properties in filters
    ]
    for number, each in enumerate(conditions):
        index.add(each, number)
    for number in removed & set(range(len(filters))):
        index.remove(conditions[number], number)
    expected = [
        number
        for number, (fields, properties) in enumerate(filters)
        if number not in removed
        and all(system.get(SYSTEM[name]) == value for name, value in fields.items())
        and all(
            name in lowered and equals(value, lowered[name]) for name, value in properties.items()
        )
    ]
    assert sorted(found_by(index, message(application, **system))) == expected
    assert index.size == len(filters) - len(removed & set(range(len(filters))))


def test_an_index_of_nothing_keeps_nothing() -> None:
    index: CorrelationIndex[int] = CorrelationIndex()
    conditions = conditions_of(Correlation(label="x", properties={"a": 1}))
    index.add(conditions, 1)
    index.add(conditions, 2)
    index.remove(conditions, 1)
    assert found_by(index, message({"a": 1}, Label="x")) == [2]
    index.remove(conditions, 2)
    assert not index._groups
    assert not index._filed
    assert not index._places


def test_everything_and_a_text_are_filters() -> None:
    found = rules(
        Rule("a", Everything(), action="SET n = 1"),
        Rule("b", "color = 'red'", action="SET n = @p", action_parameters={"@p": "q"}),
    )
    copies = select(found, message(RED)).copies
    assert [copy.properties and copy.properties["n"] for copy in copies] == [1, "q"]
