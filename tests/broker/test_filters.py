"""Filter sets: what is in place, what passes, and what is refused (Part 3 §3.5.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from amqp_rt.broker.entries import Entry, EntryFactory
from amqp_rt.broker.filtering.filters import FilterSet, compile_filter_set
from amqp_rt.broker.filtering.positions import Position
from amqp_rt.broker.filtering.selectors import QPID, InvalidFilter
from amqp_rt.codec.composites import read_composite, write_composite
from amqp_rt.codec.primitives import Reader, encode
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.termini import Source
from amqp_rt.values import Decimal32, Described, Map, Symbol, Timestamp, UInt, ULong

DIRECT, TOPIC, HEADERS, NO_LOCAL, SELECTOR = (
    (0x468C_0000_0000, "apache.org:legacy-amqp-direct-binding:string"),
    (0x468C_0000_0001, "apache.org:legacy-amqp-topic-binding:string"),
    (0x468C_0000_0002, "apache.org:legacy-amqp-headers-binding:map"),
    (0x468C_0000_0003, "apache.org:no-local-filter:list"),
    (0x468C_0000_0004, "apache.org:selector-filter:string"),
)
SQL = (0x120, "amqp:sql-filter")
HEADER, ANNOTATIONS, PROPERTIES, APPLICATION = (
    (0x170, "amqp:header-filter"),
    (0x172, "amqp:message-annotations-filter"),
    (0x173, "amqp:properties-filter"),
    (0x174, "amqp:application-properties-filter"),
)
TRUE, FALSE = (0x110, "amqp:true-filter"), (0x111, "amqp:false-filter")


def entry_of(**fields: Any) -> Entry:
    return EntryFactory("pass").make_entry(Message(b"body", **fields).encode(), 0, 0.0)


def described(kind: tuple[int, str], value: object) -> Described:
    return Described(ULong(kind[0]), value)


def filters(kind: tuple[int, str], value: object, **options: Any) -> FilterSet:
    """The set of one filter, which is in place."""
    found = compile_filter_set({Symbol("f"): described(kind, value)}, **options)
    assert found.unsupported == ()
    assert found.in_place == {"f": described(kind, value)}
    return found


BLUE = entry_of(subject="s", application_properties={"color": "blue"})


# --- The set -----------------------------------------------------------------------------------


@pytest.mark.req("M28")
@pytest.mark.parametrize("empty", [None, {}, Map(), {Symbol("n"): None}])
def test_no_filter_passes_everything(empty: Mapping[Any, object] | None) -> None:
    found = compile_filter_set(empty)
    assert found.matches(BLUE)
    assert not found.selective
    assert found.in_place == dict(empty or {})
    assert (found.unsupported, found.position) == ((), None)


@pytest.mark.req("M28")
@pytest.mark.parametrize(("subject", "color"), [("s", "blue"), ("s", "red"), ("t", "blue")])
def test_a_message_has_to_pass_all_filters(subject: str, color: str) -> None:
    found = compile_filter_set(
        {
            Symbol("one"): described(DIRECT, subject),
            Symbol("null"): None,
            Symbol("two"): described(SELECTOR, f"color = '{color}'"),
        }
    )
    assert found.selective
    assert found.matches(BLUE) is (subject == "s" and color == "blue")


@pytest.mark.req("M28", "M29")
def test_what_is_not_known_is_not_in_place() -> None:
    asked = {
        Symbol("a"): described(SELECTOR, "color = 'blue'"),
        Symbol("b"): Described(Symbol("com.example:filter"), 1),
        Symbol("c"): Described(ULong(0x999), 1),
        Symbol("d"): Described([1], 1),
        Symbol("e"): "no descriptor",
        Symbol("com.microsoft:session-filter"): "s1",
        Symbol("amqp:footer-filter"): Described(ULong(0x178), {}),
        Symbol("g"): None,
    }
    found = compile_filter_set(asked)
    assert found.in_place == {"a": asked[Symbol("a")], "g": None}
    assert found.unsupported == (
        "b",
        "c",
        "d",
        "e",
        "com.microsoft:session-filter",
        "amqp:footer-filter",
    )
    assert found.matches(BLUE)


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("kind", "value", "passes"),
    [
        (DIRECT, "s", True),
        (TOPIC, "#", True),
        (SELECTOR, "color = 'red'", False),
        (SQL, "color = 'blue'", True),
        (PROPERTIES, {Symbol("subject"): "s"}, True),
        (APPLICATION, {"color": "red"}, False),
        (HEADER, {Symbol("priority"): 4}, True),
        (ANNOTATIONS, {Symbol("x-opt-a"): 1}, False),
        (HEADERS, {"color": "blue", "x-match": "all"}, True),
        (TRUE, True, True),
        (FALSE, True, False),
    ],
)
def test_descriptors_are_codes_symbols_or_names(
    kind: tuple[int, str], value: object, passes: bool
) -> None:
    code, symbol = kind
    for asked in (
        {Symbol("any"): Described(ULong(code), value)},
        {Symbol("any"): Described(Symbol(symbol), value)},
        {Symbol(symbol): Described(ULong(code), value)},
        {Symbol(symbol): value},
        {symbol: value},
    ):
        found = compile_filter_set(asked)
        assert found.in_place == asked
        assert all(type(name) is Symbol for name in found.in_place)
        assert found.matches(BLUE) is passes


@pytest.mark.req("M28")
@pytest.mark.parametrize("key", [Symbol("jms-selector"), "jms-selector"])
def test_peers_that_send_strings_for_names_are_understood(key: str) -> None:
    # The map as it lies in the source, with a key of either type.
    octets = encode(
        Described(ULong(0x28), [None] * 7 + [Map([(key, described(SELECTOR, "color = 'blue'"))])])
    )
    source = read_composite(Reader(octets), Source)
    assert source.filter is not None
    assert [type(name) for name in source.filter] == [Symbol]
    found = compile_filter_set(source.filter)
    assert list(found.in_place) == ["jms-selector"]
    assert found.matches(BLUE)
    answer = bytearray()
    write_composite(answer, Source(filter={key: described(SELECTOR, "x")}))
    assert b"\xa3\x0cjms-selector" in answer  # a symbol, whatever we were given


# --- No-local ----------------------------------------------------------------------------------


@pytest.mark.req("M29")
@pytest.mark.parametrize("value", [[], "NoLocalFilter{}", None])
def test_no_local_keeps_back_what_the_receiver_sent_itself(value: object) -> None:
    found = filters(NO_LOCAL, value, receiver="me")
    assert found.selective
    assert not found.matches(BLUE, "me")
    assert found.matches(BLUE, "you")
    assert found.matches(BLUE, None)
    assert found.matches(BLUE)


def test_no_local_needs_to_know_who_receives() -> None:
    found = compile_filter_set({Symbol("no-local"): described(NO_LOCAL, [])})
    assert (found.in_place, found.unsupported) == ({}, ("no-local",))
    assert found.matches(BLUE, None)
    assert compile_filter_set({Symbol("no-local"): []}, receiver="me").in_place


# --- Subjects ----------------------------------------------------------------------------------


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("kind", "value", "subject", "passes"),
    [
        (DIRECT, "a.b", "a.b", True),
        (DIRECT, "a.b", "a.b.c", False),
        (DIRECT, "a.*", "a.b", False),
        (DIRECT, "", None, False),
        (TOPIC, "*.stock.#", "usd.stock", True),
        (TOPIC, "*.stock.#", "eur.stock.db", True),
        (TOPIC, "*.stock.#", "stock.nasdaq", False),
        (TOPIC, "#", None, True),
        (TOPIC, "#", "", True),
        (TOPIC, "#", "a.b.c", True),
        (TOPIC, "#.#", "a", True),
        (TOPIC, "*", None, False),
        (TOPIC, "#.*", None, False),
        (TOPIC, "*", "a", True),
        (TOPIC, "*", "a.b", False),
        (TOPIC, "*.*", "a", False),
        (TOPIC, "a.#", "a", True),
        (TOPIC, "a.#", "ab", False),
        (TOPIC, "a.#.z", "a.z", True),
        (TOPIC, "a.#.z", "a.b.c.z", True),
        (TOPIC, "a.#.z", "a.b.c", False),
        (TOPIC, "#.b.#", "a.b", True),
        (TOPIC, "#.b.#", "b", True),
        (TOPIC, "#.b.#.b", "b.b", True),
        (TOPIC, "#.b.#.b", "b", False),
        (TOPIC, "#.*.#", "a", True),
        (TOPIC, "#.a.a.#", "a.b.a.a.b", True),
        (TOPIC, "a#", "a#", True),
        (TOPIC, "a#", "ab", False),
        (TOPIC, "a..b", "a..b", True),
        (TOPIC, "a.*.b", "a..b", True),
    ],
)
def test_bindings_of_earlier_amqp(
    kind: tuple[int, str], value: str, subject: str | None, passes: bool
) -> None:
    assert filters(kind, value).matches(entry_of(subject=subject)) is passes


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ({}, True),
        ({"x-match": "any"}, False),
        ({"color": "blue"}, True),
        ({"color": "blue", "n": 2}, False),
        ({"color": "blue", "n": 2, "x-match": Symbol("any")}, True),
        ({"color": "red", "n": 2, "x-match": "any"}, False),
        ({"color": "blue", "n": UInt(1), "x-match": "all", "x-other": 5}, True),
        ({"color": None, "n": 1}, True),
        ({"nothing": None}, False),
        ({"n": True}, False),
    ],
)
def test_headers_binding(wanted: dict[str, object], passes: bool) -> None:
    entry = entry_of(application_properties={"color": "blue", "n": 1})
    assert filters(HEADERS, wanted).matches(entry) is passes


# --- Property filters --------------------------------------------------------------------------

FULL = entry_of(
    priority=9,
    durable=True,
    ttl_ms=500,
    message_id=UUID(int=1),
    user_id=b"u",
    subject="&subject",
    content_type="application/json",
    creation_time=Timestamp(5),
    group_sequence=3,
    message_annotations={Symbol("x-opt-key"): "k", Symbol("x-opt-n"): 1},
    application_properties={
        "color": "blue",
        "n": 1,
        "f": 1.5,
        "flag": True,
        "null": None,
        "symbol": Symbol("sym"),
        "id": UUID(int=2),
        "decimal": Decimal32(b"1234"),
    },
)


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("kind", "wanted", "passes"),
    [
        (PROPERTIES, {}, True),
        (PROPERTIES, {Symbol("subject"): None}, True),
        (PROPERTIES, {Symbol("to"): None}, True),
        (PROPERTIES, {Symbol("to"): "q"}, False),
        (PROPERTIES, {Symbol("subject"): "&&subject"}, True),
        (PROPERTIES, {Symbol("subject"): "&s:ject"}, True),
        (PROPERTIES, {Symbol("subject"): "&p:&sub"}, True),
        (PROPERTIES, {Symbol("subject"): "&p:sub"}, False),
        (PROPERTIES, {"content-type": Symbol("application/json")}, True),
        (PROPERTIES, {"content_type": "&s:/json"}, True),
        (PROPERTIES, {Symbol("content-type"): "&s:json", Symbol("user-id"): b"u"}, True),
        (PROPERTIES, {Symbol("content-type"): "&s:json", Symbol("user-id"): b"v"}, False),
        (PROPERTIES, {Symbol("message-id"): UUID(int=1)}, True),
        (PROPERTIES, {Symbol("message-id"): str(UUID(int=1))}, False),
        (PROPERTIES, {Symbol("message-id"): UUID(int=1).bytes}, False),
        (PROPERTIES, {Symbol("creation-time"): Timestamp(5)}, True),
        (PROPERTIES, {Symbol("group-sequence"): UInt(3)}, True),
        (PROPERTIES, {Symbol("group-sequence"): 3}, True),
        (APPLICATION, {"color": "blue", "n": 1}, True),
        (APPLICATION, {Symbol("color"): Symbol("blue")}, True),
        (APPLICATION, {"Color": "blue"}, False),
        (APPLICATION, {"color": "Blue"}, False),
        (APPLICATION, {"n": UInt(1), "f": 1.5}, True),
        (APPLICATION, {"n": 1.0}, True),
        (APPLICATION, {"n": True}, False),
        (APPLICATION, {"flag": 1}, False),
        (APPLICATION, {"flag": True, "symbol": "&p:s"}, True),
        (APPLICATION, {"n": "&p:1"}, False),
        (APPLICATION, {"nothing": None, "null": None}, True),
        (APPLICATION, {"nothing": 1}, False),
        (APPLICATION, {"null": 1}, False),
        (APPLICATION, {"id": UUID(int=2)}, True),
        (APPLICATION, {"decimal": Decimal32(b"1234")}, True),
        (APPLICATION, {"decimal": Decimal32(b"1235")}, False),
        (HEADER, {Symbol("priority"): 9, Symbol("durable"): True, Symbol("ttl"): 500}, True),
        (HEADER, {"first-acquirer": False, "delivery-count": UInt(0)}, True),
        (HEADER, {Symbol("priority"): 4}, False),
        (ANNOTATIONS, {Symbol("x-opt-key"): "k", "x-opt-n": 1}, True),
        (ANNOTATIONS, {Symbol("x-opt-key"): "l"}, False),
    ],
)
def test_property_filters(kind: tuple[int, str], wanted: dict[str, object], passes: bool) -> None:
    assert filters(kind, wanted).matches(FULL) is passes


# --- What is refused ---------------------------------------------------------------------------


@pytest.mark.req("M29")
@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (SELECTOR, 1, "f: a string expected"),
        (SELECTOR, "a = ", "f: the selector: at character 4: a value expected"),
        (SQL, "a = 'x' and b = 1", "f: the selector: at character 8: 'and' is a reserved word"),
        (SQL, "", "f: the selector: at character 0: a condition expected"),
        (DIRECT, None, "f: a string expected"),
        (TOPIC, b"x", "f: a string expected"),
        (TOPIC, "x" * 4097, "f: more than 4096 bytes"),
        (PROPERTIES, [], "f: a map expected"),
        (PROPERTIES, {Symbol("what"): 1}, "f: the properties have no field what"),
        (PROPERTIES, {Symbol("subject"): 1}, "f: the value of subject is not of its type"),
        (PROPERTIES, {Symbol("group-sequence"): True}, "f: the value of group-sequence"),
        (PROPERTIES, {Symbol("message-id"): 1.5}, "f: the value of message-id"),
        (PROPERTIES, {1: 1}, "f: the keys are symbols or strings"),
        (HEADER, {Symbol("what"): 1}, "f: the header has no field what"),
        (HEADER, {Symbol("durable"): 1}, "f: the value of durable is not of its type"),
        (APPLICATION, {"a": [1]}, "f: the value of a is not of a simple type"),
        (APPLICATION, {"a": "&x:1"}, "f: at character 1: p: or s: or & expected"),
        (APPLICATION, {"a": "&"}, "f: at character 1: p: or s: or & expected"),
        (HEADERS, {"x-match": "some"}, "f: x-match is all or any"),
    ],
)
def test_what_a_filter_cannot_be(kind: tuple[int, str], value: object, complaint: str) -> None:
    with pytest.raises(InvalidFilter) as caught:
        compile_filter_set({Symbol("f"): described(kind, value)})
    assert caught.value.description.startswith(complaint)
    assert caught.value.condition == "amqp:invalid-field"


def test_an_error_repeats_only_the_beginning_of_a_long_name() -> None:
    asked = {Symbol("f" * 1000): described(PROPERTIES, {Symbol("k" * 1000): 1})}
    with pytest.raises(InvalidFilter) as caught:
        compile_filter_set(asked)
    assert len(caught.value.description) < 200


def test_filters_of_one_kind_have_all_to_be_passed() -> None:
    entry = entry_of(message_annotations={Symbol("x-stream-filter-value"): "b"})
    for second, passes in ((["b", "c"], True), (["c"], False)):
        asked = {
            Symbol("one"): Described(Symbol("rabbitmq:stream-filter"), ["a", "b"]),
            Symbol("two"): Described(Symbol("rabbitmq:stream-filter"), second),
        }
        assert compile_filter_set(asked, log=True).matches(entry) is passes


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [1, 16])
def test_the_filters_of_a_source_are_bounded(bound: int) -> None:
    limits = Limits(filters_max=bound)
    asked: dict[Any, object] = {Symbol(f"f{n}"): described(DIRECT, "s") for n in range(bound)}
    assert len(compile_filter_set(asked, limits=limits).in_place) == bound
    asked[Symbol("one-more")] = None
    with pytest.raises(InvalidFilter, match=f"more than {bound} filters"):
        compile_filter_set(asked, limits=limits)


@pytest.mark.req("SE18")
@pytest.mark.parametrize("bound", [2, 16])
def test_the_entries_of_property_filters_are_bounded(bound: int) -> None:
    limits = Limits(filter_entries_max=bound)
    many = {f"k{n}": 1 for n in range(bound - 1)}
    asked = {
        Symbol("a"): described(APPLICATION, many),
        Symbol("b"): described(PROPERTIES, {Symbol("subject"): "s"}),
    }
    compile_filter_set(asked, limits=limits)
    with pytest.raises(InvalidFilter, match=f"b: more than {bound} entries"):
        compile_filter_set(
            asked | {Symbol("a"): described(HEADERS, many | {"x": 1})}, limits=limits
        )
    values = {Symbol("rabbitmq:stream-filter"): ["v"] * bound}
    compile_filter_set(values, log=True, limits=limits)
    values[Symbol("rabbitmq:stream-filter")].append("v")
    with pytest.raises(InvalidFilter, match=f"more than {bound} values"):
        compile_filter_set(values, log=True, limits=limits)


@pytest.mark.req("SE18")
def test_the_texts_of_all_filters_of_a_source_are_bounded_together() -> None:
    limits = Limits(filter_text_max=10)
    texts = {Symbol("a"): described(DIRECT, "12345"), Symbol("b"): described(TOPIC, "1234#")}
    compile_filter_set(texts, limits=limits)
    texts[Symbol("c")] = described(SELECTOR, "a")
    with pytest.raises(InvalidFilter, match="more than 10 bytes"):
        compile_filter_set(texts, limits=limits)


@pytest.mark.req("SE18", "X16")
@pytest.mark.parametrize(("count", "passes"), [(99, True), (101, False), (10_000, False)])
def test_a_message_with_too_many_properties_does_not_match(count: int, passes: bool) -> None:
    # Four steps for each, and a few for their octets.
    found = filters(SELECTOR, "NOT b = 1", limits=Limits(filter_steps_max=4 * 99 + 10))
    entry = entry_of(application_properties={"b": 2} | {f"p{at}": 0 for at in range(count - 1)})
    assert found.matches(entry) is passes
    # Decoding them is stopped too, and what is not decoded counts for little.
    assert found.work <= 100


@pytest.mark.req("SE18", "X16")
@pytest.mark.parametrize(
    ("kind", "value", "fields"),
    [
        (SELECTOR, "NOT b = 'x'", {"application_properties": {"b": "x" * 200_000}}),
        (SELECTOR, "NOT JMSType = 'x'", {"subject": "x" * 200_000}),
        (
            SELECTOR,
            "NOT amqp.annotation.x-a = 'x'",
            {"message_annotations": {Symbol("x-a"): "x" * 200_000}},
        ),
        (SELECTOR, "NOT JMSMessageID = 'x'", {"message_id": b"x" * 100_000}),
        (SELECTOR, "NOT JMSXUserID = 'x'", {"user_id": b"x" * 100_000}),
        (TOPIC, "#", {"subject": "." * 2_000}),
    ],
    ids=["application properties", "properties", "annotations", "id", "user", "words"],
)
def test_a_message_with_long_fields_does_not_match(
    kind: tuple[int, str], value: str, fields: dict[str, Any]
) -> None:
    entry = entry_of(**fields)
    assert filters(kind, value).matches(entry)
    assert not filters(kind, value, limits=Limits(filter_steps_max=1_000)).matches(entry)


@pytest.mark.req("B21")
@pytest.mark.parametrize("value", [["a"], {"a": 1}, 1, Symbol("b")], ids=repr)
def test_a_stream_filter_passes_no_values_of_other_types(value: object) -> None:
    kind = Symbol("rabbitmq:stream-filter")
    found = compile_filter_set({kind: Described(kind, ["a", "c"])}, log=True)
    annotation = Symbol("x-stream-filter-value")
    assert found.matches(entry_of(message_annotations={annotation: "a"}))
    assert not found.matches(entry_of(message_annotations={annotation: value}))


@pytest.mark.req("SE18", "X16")
def test_a_search_in_a_text_takes_few_steps_however_often_it_begins_to_match() -> None:
    entry = entry_of(application_properties={"a": "a" * 4_000})
    for pattern in ("%a_1%", "%a1%", "%a%1%", "%aaaa_%1%"):
        found = filters(SELECTOR, f"a LIKE '{pattern}'")
        assert not found.matches(entry)
        assert 1 < found.work < 50


@pytest.mark.req("X16")
def test_filters_count_their_work_for_each_message() -> None:
    found = filters(SELECTOR, " OR ".join(f"a LIKE '%a_{number}%'" for number in range(20)))
    assert not found.matches(entry_of(application_properties={"a": "a" * 4_000}))
    much = found.work
    assert not found.matches(entry_of(application_properties={"a": "a" * 40}))
    assert much > 40 * found.work
    assert not found.matches(entry_of())
    assert found.work <= 20


@pytest.mark.req("SE18")
def test_the_text_of_a_binding_and_its_subject_are_bounded() -> None:
    limits = Limits(filter_text_max=10, filter_subject_max=10)
    found = filters(TOPIC, "#.ä.#.#.b", limits=limits)
    assert found.matches(entry_of(subject="12345.ä.b"))
    assert filters(TOPIC, "#.b", limits=limits).matches(entry_of(subject="12345678.b"))
    assert not filters(TOPIC, "#.b", limits=limits).matches(entry_of(subject="123456789.b"))
    with pytest.raises(InvalidFilter, match="more than 10 bytes"):
        compile_filter_set({Symbol("f"): described(TOPIC, "#.ä.#.#.bc")}, limits=limits)


@pytest.mark.req("SE18")
def test_a_message_that_takes_too_many_steps_does_not_match() -> None:
    entry = entry_of(application_properties={"a": "x" * 640})
    for steps, passes in ((41, True), (40, False)):
        found = filters(SELECTOR, "NOT a LIKE '%x_z%'", limits=Limits(filter_steps_max=steps))
        assert found.matches(entry) is passes


# --- Messages ----------------------------------------------------------------------------------


@pytest.mark.req("B21", "M29")
@pytest.mark.parametrize(
    "octets",
    [
        "005374 c10302 4141",  # a key that is no string
        "005374 c10e02 a105636f6c6f72 a104626c",  # cut off
        "005374 c10101 005373 45",  # out of order
        "005374 45",  # no map
        "ff",
        "005379 45",
    ],
)
def test_a_malformed_message_does_not_match_and_nothing_is_raised(octets: str) -> None:
    entry = Entry(bytes.fromhex(octets))
    assert not filters(SELECTOR, "a IS NULL").matches(entry)
    assert not filters(SELECTOR, "NOT a = 1").matches(entry)
    assert compile_filter_set(None).matches(entry)


def test_what_looks_inside_matches_no_other_format() -> None:
    entry = Entry(Message(b"", subject="s").encode(), message_format=0x8001_3700)
    assert not filters(DIRECT, "s").matches(entry)
    assert not filters(SELECTOR, "TRUE").matches(entry)
    assert filters(NO_LOCAL, [], receiver="me").matches(entry, "you")


@pytest.mark.req("M27")
def test_the_result_is_the_same_until_the_state_of_the_message_changes() -> None:
    found = filters(SELECTOR, "JMSRedelivered AND color = 'blue'")
    entry = entry_of(application_properties={"color": "blue"})
    assert [found.matches(entry) for _ in range(3)] == [False] * 3
    entry.delivery_count += 1
    assert [found.matches(entry) for _ in range(3)] == [True] * 3
    # UTC() is the moment of the attach, not that of the question.
    found = filters(SQL, "p.creation_time > UTC() - 10", now_ms=15)
    assert found.matches(entry_of(creation_time=Timestamp(6)))
    assert not found.matches(entry_of(creation_time=Timestamp(5)))


def test_a_broker_chooses_how_selectors_are_read() -> None:
    assert filters(SELECTOR, "3 / 2 = 1.5").matches(BLUE)
    assert filters(SELECTOR, "3 / 2 = 1", selectors=QPID).matches(BLUE)
    assert filters(SQL, "3 / 2 = 1.5", selectors=QPID).matches(BLUE)


# --- Logs --------------------------------------------------------------------------------------


@pytest.mark.req("K4")
def test_a_start_position_is_in_place_on_a_log_only() -> None:
    asked: dict[Any, object] = {
        Symbol("rabbitmq:stream-offset-spec"): Described(
            Symbol("rabbitmq:stream-offset-spec"), "last"
        ),
        Symbol("a"): described(SELECTOR, "color = 'blue'"),
    }
    found = compile_filter_set(asked, log=True)
    assert (found.in_place, found.unsupported) == (asked, ())
    assert found.position == Position("last")
    assert found.matches(BLUE)
    found = compile_filter_set(asked)
    assert list(found.in_place) == ["a"]
    assert found.unsupported == ("rabbitmq:stream-offset-spec",)
    assert found.position is None


@pytest.mark.req("K4")
def test_the_start_position_of_event_hubs_is_no_selector_on_a_log() -> None:
    entry = entry_of(message_annotations={Symbol("x-opt-offset"): "7"})
    text = "amqp.annotation.x-opt-offset > '7'"
    on_a_log = filters(SELECTOR, text, log=True)
    assert on_a_log.position == Position("offset", 7, inclusive=False)
    assert on_a_log.matches(entry)
    on_a_queue = filters(SELECTOR, text)
    assert on_a_queue.position is None
    assert not on_a_queue.matches(entry)


@pytest.mark.req("K4")
@pytest.mark.parametrize(
    ("wanted", "unfiltered", "value", "passes"),
    [
        ("a", None, "a", True),
        (["a", "b"], None, "b", True),
        (["a", Symbol("b")], False, "c", False),
        ("a", None, None, False),
        ("a", True, None, True),
        ("a", True, "c", False),
        ([], True, None, True),
        (None, True, "c", True),
    ],
)
def test_stream_filters(
    wanted: object, unfiltered: bool | None, value: str | None, passes: bool
) -> None:
    asked: dict[Any, object] = {
        Symbol("f"): Described(Symbol("rabbitmq:stream-filter"), wanted),
        Symbol("u"): Described(Symbol("rabbitmq:stream-match-unfiltered"), unfiltered),
    }
    asked = {name: one for name, one in asked.items() if one.value is not None}  # type: ignore[attr-defined]
    annotations = {} if value is None else {Symbol("x-stream-filter-value"): value}
    entry = entry_of(message_annotations=annotations)
    found = compile_filter_set(asked, log=True)
    assert found.in_place == asked
    assert found.matches(entry) is passes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rabbitmq:stream-filter", 1),
        ("rabbitmq:stream-filter", [1]),
        ("rabbitmq:stream-match-unfiltered", "yes"),
        ("rabbitmq:stream-offset-spec", "soon"),
    ],
)
def test_stream_filters_of_other_types_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidFilter, match="expected"):
        compile_filter_set({Symbol(name): value}, log=True)
