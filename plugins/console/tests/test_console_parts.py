"""Parts of pages that need no broker: plots, histories, forms and texts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
import trio
from amqp_rt_console.pages.forms import attributes_in, fields_of
from amqp_rt_console.pages.history import SAMPLES, STEP_S, NodeHistory, Watches
from amqp_rt_console.pages.kinds import listed, page_of
from amqp_rt_console.pages.plots import Series, legend, plot
from amqp_rt_console.pages.texts import body_text, shown, size
from amqp_rt_console.pages.visits import url
from trio.testing import MockClock

from amqp_rt import Limits
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError

pytestmark = pytest.mark.req("G6")


class Options(msgspec.Struct, kw_only=True):
    name: str
    to: str
    size: int = 5
    share: float | None = None
    kind_of: Literal["a", "b"] = "a"
    on: bool = False
    names: tuple[str, ...] = ()
    more: Any = None


SCHEMA = msgspec.json.schema(Options)


def test_a_form_has_a_control_for_each_type() -> None:
    found = {each.name: each for each in fields_of(SCHEMA)}
    assert {name: each.control for name, each in found.items()} == {
        "to": "text",
        "size": "number",
        "share": "number",
        "kind_of": "choice",
        "on": "choice",
        "names": "lines",
        "more": "json",
    }
    assert found["to"].required
    assert (found["size"].default, found["size"].whole) == ("5", True)
    assert found["kind_of"].choices == ("a", "b")


def test_a_filled_form_becomes_attributes() -> None:
    given = {
        "a.to": " there ",
        "a.size": "7",
        "a.share": "0.5",
        "a.kind_of": "b",
        "a.on": "yes",
        "a.names": "x\r\n\r\n y\r\n",
        "a.more": '{"k": [1]}',
        "csrf": "token",
    }
    assert attributes_in(given, fields_of(SCHEMA)) == {
        "to": "there",
        "size": 7,
        "share": 0.5,
        "kind_of": "b",
        "on": True,
        "names": ["x", "y"],
        "more": {"k": [1]},
    }
    assert attributes_in({"a.to": "there", "a.more": "plain"}, fields_of(SCHEMA)) == {
        "to": "there",
        "more": "plain",
    }


@pytest.mark.parametrize(
    ("field", "text", "complaint"),
    [
        ("size", "many", "size must be a number, got 'many'"),
        ("kind_of", "c", "kind of must be one of a, b"),
        ("to", "", "to must be given"),
    ],
)
def test_what_is_wrong_with_a_field_is_said(field: str, text: str, complaint: str) -> None:
    with pytest.raises(AmqpError) as refused:
        attributes_in({"a.to": "there"} | {f"a.{field}": text}, fields_of(SCHEMA))
    assert refused.value.description == complaint


def test_only_what_was_changed_is_sent() -> None:
    row = {"to": "there", "size": 7, "on": True, "names": ["x", "y"], "share": 0.5}
    fields = fields_of(SCHEMA, row)
    shown_before = {f"a.{each.name}": each.value for each in fields}
    assert attributes_in(shown_before, fields, changing=True) == {}
    changed = shown_before | {"a.size": "", "a.on": "no", "a.share": ""}
    assert attributes_in(changed, fields, changing=True) == {"size": 5, "on": False, "share": None}


def test_a_statistic_with_the_name_of_an_option_is_no_value_of_it() -> None:
    fields = fields_of(msgspec.json.schema(Log), {"name": "l", "partitions": [{"partition": 0}]})
    assert "partitions" not in {each.name for each in fields}
    assert "max_age_s" in {each.name for each in fields}


def test_all_options_of_queues_have_a_field() -> None:
    names = {each.name for each in fields_of(msgspec.json.schema(Queue))}
    assert names == set(Queue.__struct_fields__) - {"name"}


def test_a_plot_describes_itself_and_escapes_names() -> None:
    lines = [Series("<b>in", [1.0, None, 4.0, 2.0]), Series("out", [])]
    drawn = plot("Rates", lines, slots=4, step_s=10)
    assert drawn.count("<path class=") == 4  # Three lines of the grid, and the one with values.
    assert "M64.0 " in drawn
    assert "from 1 to 4, now 2" in drawn
    assert "out: no value yet" in drawn
    assert "<b>" not in drawn + legend(lines)
    assert "style" not in drawn


def history(*depths: int) -> NodeHistory:
    found = NodeHistory()
    for enqueued in depths:
        found.add({"available": enqueued, "acquired": 1, "enqueued": enqueued, "delivered": 0})
    return found


def test_a_history_has_rates_and_gaps() -> None:
    found = history(0, 100, 150)
    found.add(None)
    found.add({"available": 5, "enqueued": 160, "delivered": 2})
    found.add({"available": 1, "enqueued": 1, "delivered": 0})  # made anew
    assert found.depths()[0].values == [1, 101, 151, None, 5, 1]
    assert found.rates()[0].values == [None, 10, 5, None, None, None]


def test_a_history_is_bounded() -> None:
    assert len(history(*range(SAMPLES + 5)).depths()[0].values) == SAMPLES


class Session:
    """A session whose node grows by ten messages with each look."""

    def __init__(self) -> None:
        self.alive = True
        self.count = 0
        self.management = self

    async def read(self, kind: str, name: str) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if name == "gone":
            raise AmqpError("there is no node", condition="amqp:not-found")
        self.count += 10
        return {"available": self.count, "enqueued": self.count}


async def test_watched_nodes_are_sampled_while_their_session_lives(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    watches, session, other = Watches(Limits()), Session(), Session()
    nursery.start_soon(watches.run)
    await watches.watch(session, "q")
    await watches.watch(other, "q")
    await trio.sleep(3.5 * STEP_S)
    assert watches.of(session)["q"].depths()[0].values == [10, 20, 30, 40]
    assert watches.of(session)["q"].rates()[0].values == [None, 1, 1, 1]
    watches.stop(session, "q")
    other.alive = False
    await trio.sleep(STEP_S)
    assert len(watches) == 0
    nursery.cancel_scope.cancel()


async def test_the_number_of_watched_nodes_is_bounded() -> None:
    watches, session = Watches(Limits(console_watched_nodes_max=2)), Session()
    await watches.watch(session, "a")
    await watches.watch(Session(), "b")
    await watches.watch(session, "a")
    with pytest.raises(AmqpError, match="console_watched_nodes_max"):
        await watches.watch(session, "c")
    with pytest.raises(AmqpError, match="no node"):
        await watches.watch(session, "gone")
    watches.stop(session, "a")
    await watches.watch(session, "c")


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        (None, "", ""),
        (True, "", "yes"),
        (12_345, "", "12,345"),
        (1.5, "", "1.5"),
        (0.0, "next_at", "1970-01-01 00:00:00 UTC"),
        (1e300, "next_at", "1e+300"),
        (["a", "b"], "", "a, b"),
        ({"a": b"\xff"}, "", '{"a": {"base64": "/w=="}}'),
        ("a\u202eb\n", "", "a\\u202eb\\n"),
        ("x" * 300, "", "x" * 199 + "…"),
    ],
)
def test_values_are_texts_on_one_line(value: object, key: str, text: str) -> None:
    assert shown(value, key) == text


def test_sizes_have_units() -> None:
    assert [size(each) for each in (0, 1023, 1536, 5 << 30, 1 << 60)] == [
        *("0 B", "1,023 B", "1.5 KiB", "5.0 GiB", "1,048,576.0 TiB"),
    ]


@pytest.mark.parametrize(
    ("row", "text", "remark"),
    [
        ({"body": "a\tb\n\u202e"}, "a\tb\n\\u202e", ""),
        ({"body": {"k": [1]}}, '{\n  "k": [\n    1\n  ]\n}', ""),
        ({"body": None}, "", "no body"),
        ({"base64": "/w=="}, "/w==", "base64"),
        ({"body": "x" * 20_000}, "x" * 16_384, "beginning"),
        ({"octets": 3, "error": "<b>"}, "", "no message: <b>"),
    ],
)
def test_bodies_are_text(row: dict[str, Any], text: str, remark: str) -> None:
    found = body_text(row)
    assert found[0] == text
    assert remark in found[1]


def test_an_unknown_type_gets_a_page_of_its_own() -> None:
    types = {"x.some-thing": [], "amqp_rt.node": [], "amqp_rt.queue": [], "org.amqp.management": []}
    assert [each.title for each in listed(types)] == ["Nodes", "X some thing"]
    assert page_of("amqp_rt.mesh-leg").columns_of(["identity", "b", "name", "type"]) == [
        "name",
        "b",
    ]


def test_names_in_addresses_are_encoded() -> None:
    assert url("/a", name="javascript:/<x>&y=\u202e", empty="") == (
        "/a?name=javascript%3A%2F%3Cx%3E%26y%3D%E2%80%AE"
    )
