"""Exchanges and bindings: where messages go, what may be declared, and what goes with what."""

from __future__ import annotations

import re
from itertools import product
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt import Limits
from amqp_rt.broker.bindings import (
    STANDARD,
    TYPES,
    Binding,
    Destination,
    DirectTable,
    Exchange,
    Exchanges,
    SystemTable,
    TopicTable,
    size_of,
)
from amqp_rt.errors import AmqpError
from amqp_rt.values import Int, Short


def exchanges(*queues: str, **options: Any) -> Exchanges:
    return Exchanges(set(queues).__contains__, **options)


def bind(found: Exchanges, source: str, name: str, key: str = "", **arguments: object) -> bool:
    named = {key.replace("_", "-"): value for key, value in arguments.items()}
    return found.bind(source, Destination(name), key, named)


def refusal(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(AmqpError) as caught:
        function(*args, **options)
    assert caught.value.description
    return caught.value.condition.removeprefix("amqp:")


def destinations(table: Any, key: str) -> list[Destination]:
    """Return the destinations that *table* finds for *key*, without the amounts of work between them."""
    return [each for each in table.match(key, {}) if isinstance(each, Destination)]


@pytest.mark.req("N11", "D6")
def test_the_default_exchange_leads_to_every_queue_by_its_name() -> None:
    found = exchanges("orders")
    assert found.route("", "orders") == ["orders"]
    assert found.route("", "others") == []
    assert found.find("").type == "direct"
    for refused in (
        lambda: found.declare(Exchange(name="")),
        lambda: found.delete(""),
        lambda: bind(found, "", "orders", "k"),
        lambda: found.unbind("", Destination("orders"), "orders", {}),
        lambda: found.bind("amq.direct", Destination("", is_exchange=True), "", {}),
    ):
        assert refusal(refused) == "unauthorized-access"


@pytest.mark.req("N11")
def test_standard_exchanges_are_there_and_stay() -> None:
    found = exchanges()
    assert len(found) == len(STANDARD)
    for name, kind in STANDARD.items():
        assert found.find(name) == Exchange(name=name, type=kind, durable=True)
        assert found.declare(Exchange(name=name, type=kind, durable=True)) is False
        assert refusal(found.delete, name) == "unauthorized-access"
    assert refusal(found.declare, Exchange(name="amq.mine")) == "unauthorized-access"


@pytest.mark.req("N11")
def test_direct_and_fanout() -> None:
    found = exchanges()
    for name in ("a", "b"):
        assert bind(found, "amq.direct", name, "red")
        assert bind(found, "amq.fanout", name, "whatever")
    assert bind(found, "amq.direct", "b", "blue")
    assert not bind(found, "amq.direct", "b", "blue")
    assert found.route("amq.direct", "red") == ["a", "b"]
    assert found.route("amq.direct", "blue") == ["b"]
    assert found.route("amq.direct", "") == []
    assert found.route("amq.fanout", "anything") == ["a", "b"]
    assert found.unbind("amq.direct", Destination("b"), "red", {}) == []
    assert found.unbind("amq.direct", Destination("b"), "red", {}) == []
    assert found.route("amq.direct", "red") == ["a"]
    found.forget("a")
    assert found.route("amq.fanout", "") == ["b"]
    assert [binding.key for binding in found.bindings("amq.direct")] == ["blue"]


TOPICS = [
    ("a.b", "a.b", True),
    ("a.b", "a.b.c", False),
    ("*", "a", True),
    ("*", "", False),
    ("*", "a.b", False),
    ("a.*.c", "a.b.c", True),
    ("a.*.c", "a.c", False),
    ("#", "", True),
    ("#", "a.b.c", True),
    ("a.#", "a", True),
    ("a.#", "a.b.c", True),
    ("a.#", "b.a", False),
    ("#.c", "a.b.c", True),
    ("a.#.c", "a.c", True),
    ("#.b.#", "a.b.c", True),
    ("#.#", "", True),
    ("*.#", "", False),
    ("*.#", "a.b", True),
    ("", "", True),
    ("", "a", False),
    ("a..c", "a..c", True),
    ("a.*.c", "a..c", True),
    # A key's own wildcards are words like others.
    ("a.b", "a.*", False),
    ("a.*", "a.*", True),
    ("#", "#", True),
    ("b", "#", False),
]


@pytest.mark.req("N11")
@pytest.mark.parametrize(("pattern", "key", "fits"), TOPICS)
def test_topic_patterns(pattern: str, key: str, fits: bool) -> None:
    found = exchanges()
    bind(found, "amq.topic", "q", pattern)
    assert found.route("amq.topic", key) == (["q"] if fits else [])


WORDS = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=5).map(".".join)


def fits(pattern: str, key: str) -> bool:
    """The same as a regular expression over words that each end with a dot."""
    parts = {"*": r"[^.]*\.", "#": r"([^.]*\.)*"}
    wanted = "".join(parts.get(word, re.escape(word) + r"\.") for word in pattern.split("."))
    return re.fullmatch(wanted, key + ".") is not None


@pytest.mark.slow
@pytest.mark.req("N11")
@given(
    st.lists(WORDS, max_size=8, unique=True),
    WORDS.map(lambda key: key.replace("#", "c")),
    st.data(),
)
def test_topics_are_what_a_regular_expression_says(
    patterns: list[str], key: str, data: st.DataObject
) -> None:
    table = TopicTable()
    bindings = [Binding(Destination(pattern), pattern) for pattern in patterns]
    for binding in bindings:
        table.add(binding)
    for binding in data.draw(st.permutations(bindings)):
        expected = {pattern for pattern in patterns if fits(pattern, key)}
        found = [destination.name for destination in destinations(table, key)]
        assert sorted(found) == sorted(expected)
        table.remove(binding)
        patterns.remove(binding.key)
    # Nothing is left of patterns that are gone.
    assert not table._root.words


@pytest.mark.req("N11")
def test_a_topic_looks_at_words_and_not_at_bindings() -> None:
    table = TopicTable()
    for number in range(2_000):
        table.add(Binding(Destination("q"), f"stock.{number}.*"))
    table.add(Binding(Destination("all"), ".".join(["#"] * 60)))
    looked: list[str] = []

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    def watch(place: Any) -> None:
        place.words = Watched(place.words)
        for following in place.words.values():
            watch(following)

    watch(table._root)
    assert {each.name for each in destinations(table, "stock.7.nyse")} == {"q", "all"}
    assert len(looked) < 1_000  # words times the places of one pattern, not 2,000 bindings


HEADERS = [
    ({"x-match": "all", "a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}, True),
    ({"a": 1, "b": "x"}, {"a": 1}, False),
    ({"x-match": "any", "a": 1, "b": "x"}, {"b": "x"}, True),
    ({"x-match": "any", "a": 1}, {"a": 2}, False),
    ({"x-match": "all"}, {}, True),
    ({"x-match": "any"}, {"a": 1}, False),
    ({"a": None}, {"a": "whatever"}, True),
    ({"a": None}, {"b": 1}, False),
    ({"a": Short(5)}, {"a": Int(5)}, True),
    ({"a": True}, {"a": 1}, False),
    ({"a": [1, {"b": True}]}, {"a": [1, {"b": True}]}, True),
    ({"a": [1, {"b": True}]}, {"a": [1, {"b": 1}]}, False),
    ({"x-secret": 1}, {}, True),
    ({"x-match": "all-with-x", "x-secret": 1}, {}, False),
    ({"x-match": "any-with-x", "x-secret": 1, "a": 1}, {"x-secret": 1}, True),
]


@pytest.mark.req("N11")
@pytest.mark.parametrize(("arguments", "headers", "matches"), HEADERS)
def test_headers(arguments: dict[str, object], headers: dict[str, object], matches: bool) -> None:
    found = exchanges()
    for name in ("amq.headers", "amq.match"):
        found.bind(name, Destination("q"), "ignored", arguments)
        assert found.route(name, "", headers) == (["q"] if matches else [])
    found.unbind("amq.match", Destination("q"), "ignored", arguments)
    assert found.bindings("amq.match") == []


def test_x_match_is_one_of_four() -> None:
    assert refusal(bind, exchanges(), "amq.match", "q", x_match="some") == "precondition-failed"


@pytest.mark.req("N11")
def test_bindings_differ_by_key_and_arguments() -> None:
    found = exchanges()
    for arguments in ({}, {"a": 1}, {"a": True}, {"a": "1"}, {"a": {"b": [1]}}):
        assert found.bind("amq.topic", Destination("q"), "k", arguments)
        assert not found.bind("amq.topic", Destination("q"), "k", dict(arguments))
    assert found.route("amq.topic", "k") == ["q"]
    found.unbind("amq.topic", Destination("q"), "k", {"a": 1})
    assert len(found.bindings("amq.topic")) == 4


@pytest.mark.req("N11")
def test_declaring_again_is_declaring_equally() -> None:
    found = exchanges()
    wanted = Exchange(name="e", type="topic", durable=True)
    assert found.declare(wanted) is True
    assert found.declare(wanted) is False
    for other in (
        Exchange(name="e", type="direct", durable=True),
        Exchange(name="e", type="topic"),
        Exchange(name="e", type="topic", durable=True, auto_delete=True),
        Exchange(name="e", type="topic", durable=True, internal=True),
        Exchange(name="e", type="topic", durable=True, arguments={"alternate-exchange": "f"}),
    ):
        assert refusal(found.declare, other) == "precondition-failed"
    assert found.find("e") == wanted
    assert found.delete("e") == ["e"]
    assert refusal(found.find, "e") == "not-found"


@pytest.mark.req("N11")
def test_names_and_types() -> None:
    found = exchanges()
    for name in ("a", "x" * 127, "A-b_c.d:9"):
        assert found.declare(Exchange(name=name))
    for name in ("x" * 128, "a b", "é", "a/b"):
        assert refusal(found.declare, Exchange(name=name)) == "precondition-failed"
    assert found.declare(Exchange(name="x" * 255), name_max=255)
    assert refusal(found.declare, Exchange(name="e", type="x-unheard")) == "not-implemented"


@pytest.mark.req("N11")
def test_a_plug_in_brings_a_type() -> None:
    class LengthTable(DirectTable):
        """Messages go where the key has a certain length."""

        def match(self, key: str, headers: Any) -> Any:
            return super().match(str(len(key)), headers)

    found = exchanges(types={**TYPES, "x-length": LengthTable})
    found.declare(Exchange(name="e", type="x-length"))
    bind(found, "e", "four", "4")
    assert found.route("e", "abcd") == ["four"]
    assert found.route("e", "4") == []


@pytest.mark.req("N11", "D6")
def test_exchanges_lead_to_exchanges_and_round_trips_end() -> None:
    found = exchanges()
    for name in ("a", "b", "c"):
        found.declare(Exchange(name=name, type="fanout"))
        bind(found, name, f"queue-{name}")
    for source, destination in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")):
        assert found.bind(source, Destination(destination, is_exchange=True), "", {})
    for name in ("a", "b", "c"):
        assert sorted(found.route(name, "")) == ["queue-a", "queue-b", "queue-c"]
    found.delete("b")
    assert sorted(found.route("a", "")) == ["queue-a", "queue-c"]
    assert refusal(found.bind, "a", Destination("b", is_exchange=True), "", {}) == "not-found"
    assert refusal(found.route, "b", "") == "not-found"
    # An exchange and a queue of one name are two destinations.
    assert bind(found, "a", "c")
    assert sorted(found.route("a", "")) == ["c", "queue-a", "queue-c"]


@pytest.mark.req("N11")
def test_the_alternate_exchange_has_what_goes_nowhere() -> None:
    found = exchanges()
    found.declare(Exchange(name="e", arguments={"alternate-exchange": "rest"}))
    bind(found, "e", "known", "k")
    assert found.route("e", "other") == []  # it need not be there yet
    found.declare(Exchange(name="rest", type="fanout", arguments={"alternate-exchange": "e"}))
    assert found.route("e", "other") == []  # nor end in a circle
    bind(found, "rest", "unrouted")
    assert found.route("e", "other") == ["unrouted"]
    assert found.route("e", "k") == ["known"]


@pytest.mark.req("N11")
def test_auto_delete_exchanges_go_with_their_last_binding() -> None:
    found = exchanges()
    for name in ("first", "second"):
        found.declare(Exchange(name=name, auto_delete=True))
    assert refusal(found.delete, "nobody") == "not-found"
    bind(found, "second", "q", "one")
    bind(found, "second", "q", "two")
    found.bind("first", Destination("second", is_exchange=True), "", {})
    assert refusal(found.delete, "second", if_unused=True) == "precondition-failed"
    assert found.unbind("second", Destination("q"), "one", {}) == []
    # The first one had a binding to the second, and that was its last.
    assert found.unbind("second", Destination("q"), "two", {}) == ["second", "first"]
    found.declare(Exchange(name="first", auto_delete=True))
    bind(found, "first", "q")
    assert found.forget("q") == ["first"]
    assert found.forget("q") == []


def test_exchanges_and_bindings_are_counted() -> None:
    room = len(STANDARD) + 1
    found = exchanges(limits=Limits(exchanges_max=room, bindings_max=2))
    found.declare(Exchange(name="last"))
    assert refusal(found.declare, Exchange(name="more")) == "resource-limit-exceeded"
    bind(found, "last", "q", "1")
    bind(found, "amq.topic", "q", "2")
    assert refusal(bind, found, "last", "q", "3") == "resource-limit-exceeded"
    assert not bind(found, "last", "q", "1")
    found.delete("last")
    assert bind(found, "amq.topic", "q", "3")


def looks(found: Exchanges, name: str, keys: list[str], headers: Any = None) -> list[int]:
    """Return the amounts of work that routing a message yields."""
    return list(found.routing(name, keys, headers or {}, {}))


@pytest.mark.req("N11")
def test_a_search_yields_before_it_takes_long() -> None:
    found = exchanges(limits=Limits(routing_words_max=10))
    # Wherever the words lead, there are patterns that go on.
    for number in range(2**9):
        words = [("*", "a")[number >> bit & 1] for bit in range(9)]
        bind(found, "amq.topic", "q", ".".join(words))
        bind(found, "amq.headers", f"h{number}", x_match="all", a=1, b=number)
        bind(found, "amq.fanout", f"f{number}")
    key = ".".join(["a"] * 9)
    for name, headers in (("amq.topic", {}), ("amq.headers", {"a": 1}), ("amq.fanout", {})):
        work = looks(found, name, [key], headers)
        # A tenth of a frame's work for each look, and no step has many more looks than 100.
        assert sum(work) >= 50, name
        assert max(work) <= 40, name
        twice = looks(found, name, [key, key], headers)
        assert sum(twice) == pytest.approx(2 * sum(work), rel=0.05)


@pytest.mark.req("N11")
def test_a_header_is_read_once_however_many_bindings_want_it() -> None:
    class Counted(list[int]):
        reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            return super().__iter__()

    found = exchanges()
    for number in range(50):
        found.bind("amq.headers", Destination(f"q{number}"), "", {"a": [number]})
    array = Counted([7])
    assert found.route("amq.headers", "", {"a": array}) == ["q7"]
    assert array.reads == 1


@pytest.mark.req("N11")
def test_what_is_declared_during_a_search_does_not_end_it() -> None:
    found = exchanges()
    for number in range(1_000):
        bind(found, "amq.fanout", f"f{number}")
        bind(found, "amq.headers", f"h{number}", x_match="any", a=1)
        bind(found, "amq.topic", f"t{number}", f"#.{number}")
    for name, letter in (("amq.fanout", "f"), ("amq.headers", "h"), ("amq.topic", "t")):
        names: dict[str, None] = {}
        search = found.routing(name, ["x.7"], {"a": 1}, names)
        next(search)
        for number in range(500, 1_000):
            found.forget(f"{letter}{number}")
        bind(found, name, "new")
        for _ in search:
            pass
        assert f"{letter}7" in names


def test_routing_has_bounds() -> None:
    found = exchanges(
        limits=Limits(
            routing_key_max=5, routing_words_max=2, routing_keys_max=2, routing_looks_max=1_000
        )
    )
    for number in range(900):
        bind(found, "amq.fanout", f"f{number}")
    looks(found, "amq.fanout", ["12345", "a.b"][:1])
    for keys in (["123456"], ["a.b.c"], ["a", "b", "c"]):
        assert refusal(looks, found, "amq.fanout", keys) == "precondition-failed"
    # Both keys together have so many looks.
    assert refusal(looks, found, "amq.fanout", ["a", "b"]) == "precondition-failed"
    assert bind(found, "amq.topic", "q", "a.b")
    for key in ("123456", "a.b.c"):
        assert refusal(bind, found, "amq.topic", "q", key) == "precondition-failed"


QUEUES = ["q0", "q1", "q2"]
STEPS = st.tuples(
    st.sampled_from(["bind", "unbind", "forget", "delete", "declare"]),
    st.sampled_from(["amq.direct", "amq.fanout", "e", "auto"]),
    st.sampled_from([*map(Destination, QUEUES), Destination("e", True), Destination("auto", True)]),
    st.sampled_from(["x", "y"]),
)


@pytest.mark.slow
@pytest.mark.req("N11")
@given(st.lists(STEPS, max_size=30))
def test_routing_is_what_a_list_of_bindings_says(steps: list[Any]) -> None:
    found = exchanges()
    kinds = {"amq.direct": "direct", "amq.fanout": "fanout"}
    model: list[tuple[str, Destination, str]] = []

    #: Refusals although everything was there: only what is the broker's may be refused then.
    unexplained: list[str] = []

    def missing(source: str, destination: Destination) -> bool:
        return source not in kinds or (destination.is_exchange and destination.name not in kinds)

    def without(*gone: str) -> None:
        for name in gone:
            del kinds[name]
        model[:] = [
            each
            for each in model
            if each[0] not in gone and not (each[1].is_exchange and each[1].name in gone)
        ]

    for step, source, destination, key in steps:
        try:
            if step == "bind":
                made = found.bind(source, destination, key, {})
                assert (made is not None) == ((source, destination, key) not in model)
                model += [(source, destination, key)] * (made is not None)
            elif step == "unbind":
                gone = found.unbind(source, destination, key, {})
                if (source, destination, key) in model:
                    model.remove((source, destination, key))
                without(*gone)
            elif step == "forget" and not destination.is_exchange:
                gone = found.forget(destination.name)
                model[:] = [each for each in model if each[1] != destination]
                without(*gone)
            elif step == "delete":
                without(*found.delete(source))
            elif step == "declare" and source not in STANDARD:
                declared = Exchange(name=source, type="fanout", auto_delete=source == "auto")
                if found.declare(declared):
                    kinds[source] = "fanout"
        except AmqpError as error:
            if not missing(source, destination):
                unexplained.append(error.condition)
        # An auto-delete exchange that has had bindings ends without any.
        assert len(found) == len(kinds) + 3
        for name in kinds:
            expected: set[str] = set()
            seen, waiting = {name}, [name]
            while waiting:
                at = waiting.pop()
                for origin, to, by in model:
                    if origin != at or not (kinds[at] == "fanout" or by == "x"):
                        continue
                    if to.is_exchange and to.name not in seen:
                        seen.add(to.name)
                        waiting.append(to.name)
                    elif not to.is_exchange:
                        expected.add(to.name)
            assert set(found.route(name, "x")) == expected
    assert set(unexplained) <= {"amqp:unauthorized-access"}


@pytest.mark.req("N11")
def test_a_binding_that_is_taken_away_makes_room_for_one_other() -> None:
    found = exchanges("a", "b", "c", limits=Limits(bindings_max=2))
    bind(found, "amq.direct", "a")
    bind(found, "amq.direct", "b")
    found.unbind("amq.direct", Destination("a"), "", {})
    bind(found, "amq.direct", "c")
    assert refusal(bind, found, "amq.direct", "a") == "resource-limit-exceeded"


@pytest.mark.req("N11")
def test_a_system_exchange_leads_to_the_service_that_the_key_names() -> None:
    table = SystemTable()
    assert destinations(table, "billing") == [Destination("billing")]
    assert destinations(table, "") == []
    assert destinations(table, "amq.service") == []


@pytest.mark.req("N11")
@pytest.mark.parametrize("turned", [False, True])
def test_an_alternate_exchange_that_leads_nowhere_stops_nothing_else(turned: bool) -> None:
    found = exchanges("q")
    found.declare(Exchange(name="services", type="system"))
    found.declare(
        Exchange(name="empty", arguments={"alternate-exchange": "services"}, type="fanout")
    )
    found.declare(Exchange(name="all", type="fanout"))
    found.declare(Exchange(name="first", type="fanout"))
    bind(found, "all", "q")
    names = ["empty", "all"]
    for name in names[::-1] if turned else names:
        found.bind("first", Destination(name, is_exchange=True), "", {})
    assert found.route("first", "k") == ["q"]


@pytest.mark.req("N11", "D19")
@pytest.mark.parametrize(("chained", "names"), [(True, ["q"]), (False, [])])
def test_alternate_exchanges_may_be_chained_or_not(chained: bool, names: list[str]) -> None:
    """From first to second by an alternate, to third by a binding or an alternate, to fourth by an alternate."""
    for bound in (False, True):
        found = exchanges()
        third = {"alternate-exchange": "fourth"} if bound else {}
        found.declare(Exchange(name="fourth", type="fanout"))
        found.declare(Exchange(name="third", type="fanout", arguments=third))
        second = {} if bound else {"alternate-exchange": "third"}
        found.declare(Exchange(name="second", type="fanout", arguments=second))
        found.declare(Exchange(name="first", arguments={"alternate-exchange": "second"}))
        if bound:
            found.bind("second", Destination("third", is_exchange=True), "", {})
        bind(found, "fourth" if bound else "third", "q")
        routed: dict[str, None] = {}
        for _ in found.routing("first", ("k",), {}, routed, chained=chained):
            pass
        assert list(routed) == names, bound


@pytest.mark.req("D19")
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(("diverted", "names"), [(False, ["q"]), (True, [])])
def test_no_alternate_follows_an_alternate(diverted: bool, bound: bool, names: list[str]) -> None:
    """Neither from the exchange itself, nor from one that it is bound to."""
    found = exchanges()
    found.declare(Exchange(name="second", type="fanout"))
    found.declare(Exchange(name="first", arguments={"alternate-exchange": "second"}))
    if bound:
        found.declare(Exchange(name="before", type="fanout"))
        found.bind("before", Destination("first", is_exchange=True), "", {})
    bind(found, "second", "q")
    routed: dict[str, None] = {}
    for _ in found.routing("before" if bound else "first", ("k",), {}, routed, diverted=diverted):
        pass
    assert list(routed) == names


def test_names_in_a_table_take_memory_too() -> None:
    assert size_of({"n" * 1_000: 1}) - size_of({"": 1}) == 1_000


def test_a_binding_is_found_by_its_key_among_very_many() -> None:
    count = 20_000
    found = exchanges("q")
    queue = Destination("q")
    began = perf_counter()
    for number in range(count):
        assert not found.leading_to("amq.direct", queue, str(number))
        found.bind("amq.direct", queue, str(number), {})
    for arguments in ({"a": 1}, {"a": 2}):
        found.bind("amq.topic", queue, "", arguments)
    assert [each.key for each in found.leading_to("amq.direct", queue, "7")] == ["7"]
    # A walk over all of them would take minutes.
    assert perf_counter() - began < 20
    assert len(found.bindings("amq.direct")) == count
    assert len(found.leading_to("amq.topic", queue, "")) == 2
    assert found.is_bound("amq.topic", queue)
    found.unbind("amq.topic", queue, "", {"a": 1})
    assert len(found.leading_to("amq.topic", queue, "")) == 1
    found.unbind("amq.topic", queue, "", {"a": 2})
    assert not found.is_bound("amq.topic", queue)
    assert found.forget("q") == []
    assert not found.is_bound("amq.direct", queue)


_PARTS = st.tuples(
    st.sampled_from(("amq.match", "amq.headers")),
    st.sampled_from((Destination("q"), Destination("r"), Destination("amq.fanout", True))),
    st.sampled_from(("", "k", "l")),
    st.sampled_from(({}, {"a": 1}, {"a": 2})),
)


@given(st.lists(st.tuples(st.booleans(), _PARTS), max_size=30))
def test_each_question_about_bindings_is_answered_as_by_a_walk(
    steps: list[tuple[bool, tuple[str, Destination, str, dict[str, object]]]],
) -> None:
    found = exchanges("q", "r")
    for is_new, (source, destination, key, arguments) in steps:
        if is_new:
            found.bind(source, destination, key, arguments)
        else:
            found.unbind(source, destination, key, arguments)
    walked = found.bindings("amq.match")
    for destination, key, arguments in product(
        (None, Destination("q"), Destination("r"), Destination("amq.fanout", True)),
        (None, "", "k", "l"),
        (None, {}, {"a": 1}, {"a": 2}),
    ):
        expected = any(
            (destination is None or each.destination == destination)
            and (key is None or each.key == key)
            and (arguments is None or dict(each.arguments) == arguments)
            for each in walked
        )
        assert found.is_bound("amq.match", destination, key, arguments) == expected
    for key in ("", "k", "l"):
        assert found.with_key("amq.match", key) == [each for each in walked if each.key == key]


def test_messages_are_counted_for_exchanges_that_ask_for_it() -> None:
    found = exchanges()
    for name, arguments in (("counts", {"count": True}), ("not", {"count": False}), ("other", {})):
        found.declare(Exchange(name=name, type="fanout", arguments=arguments))
    assert [found.count_message("counts", "count") for _ in range(3)] == [1, 2, 3]
    for name in ("not", "other", "amq.fanout", "", "missing"):
        assert found.count_message(name, "count") == 0
    found.delete("counts")
    found.declare(Exchange(name="counts", type="fanout", arguments={"count": True}))
    assert found.count_message("counts", "count") == 1


def test_no_exchange_has_no_bindings() -> None:
    found = exchanges()
    assert not found.is_bound("none")
    assert refusal(found.with_key, "none", "k") == "not-found"
