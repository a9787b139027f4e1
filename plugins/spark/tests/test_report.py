"""What jobs say, to people and to programs, of values that anybody may have sent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from amqp_rt_spark.jobs import report
from amqp_rt_spark.jobs.report import MissingExtra, Plot, Report, Table, Text
from hypothesis import example, given
from hypothesis import strategies as st

#: Texts of messages that attack the program that shows them.
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</svg></style><b>",
    "{{ 7 * 7 }}{% for x in y %}",
    "[bold red]markup[/] [link=http://x]y[/link] :warning:",
    "\x1b[31mred\x1b]0;title\x07",
    "\x9b31m\x7f\x00\u202egnp.exe\u2066",
    "$\\frac{1}{0}$ $x",
    "\ud800 lone",
    "one\r\ntwo\u2028three",
    "_hidden",
    "日本語",
    "--><!--",
    "a" * 100_000,
]
#: Characters that no text of ours may hold, as a terminal might obey them.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028]")


def of(*values: Any) -> Report:
    """A report that holds *values* wherever one may stand."""
    texts = [str(value) for value in values]
    return Report(
        title=texts[0],
        facts={texts[0]: list(values)},
        sections=[
            Text(" ".join(texts)),
            Table(texts[0], texts, [list(values), list(values)], note=texts[0]),
            Plot(texts[0], "bar", list(values), {text: [1] * len(values) for text in texts}, texts[0]),
            Plot(texts[0], "hist", [], {text: [1, 2] for text in texts}, texts[0]),
            Plot(texts[0], "line", list(values), {texts[0]: [None] * len(values)}, texts[0]),
        ],
    )  # fmt: skip


class Page(HTMLParser):
    """The tags of a page, what they refer to, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action"):
                self.references.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
@pytest.mark.req("K7")
def test_a_page_holds_hostile_values_as_text_alone() -> None:
    pytest.importorskip("matplotlib", reason="the extra jobs is not installed")
    pytest.importorskip("jinja2", reason="the extra jobs is not installed")
    usual = Page(of("a", "b").html())
    page = of(*HOSTILE).html()
    found = Page(page)
    assert found.tags <= usual.tags | {"use", "path"}
    assert not found.tags & {"script", "img", "b", "iframe", "link"}
    assert not found.handlers
    assert all(reference.startswith("#") for reference in found.references), "it works offline"
    assert "<script>alert(1)</script>" in found.text
    assert "{{ 7 * 7 }}" in found.text
    assert "$\\frac{1}{0}$" in found.text
    assert not CONTROL.search(page.replace("\t", ""))
    assert "http-equiv" in page  # and a page that could hold a script would not run it
    page.encode()


@pytest.mark.slow
def test_plots_are_well_formed_and_keep_their_text() -> None:
    pytest.importorskip("matplotlib", reason="the extra jobs is not installed")
    pytest.importorskip("jinja2", reason="the extra jobs is not installed")
    page = of(*HOSTILE).html()
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 3
    ids: list[str] = []
    for plot in plots:
        root = ET.fromstring(plot)
        texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any("$" in text or "alert" in text for text in texts)
        ids += re.findall(r'<clipPath id="(\w+)"', plot)
    assert len(ids) == len(set(ids)), "plots do not refer to each other's parts"


def test_a_console_shows_hostile_values_as_they_are() -> None:
    pytest.importorskip("rich", reason="the extra jobs is not installed")
    text = of(*HOSTILE[:-1]).console(width=4000)
    assert not CONTROL.search(text)
    assert "[bold red]markup[/]" in text
    assert ":warning:" in text
    assert "\\x1b[31mred" in text
    assert "3 plots in the HTML report" in text
    assert len(of("a" * 100_000).console(width=200)) < 20_000


def test_colour_is_only_there_when_asked_for() -> None:
    pytest.importorskip("rich", reason="the extra jobs is not installed")
    assert "\x1b[" in of("a").console(color=True)
    assert "\x1b[" not in of("a").console()


@pytest.mark.slow
@pytest.mark.req("K7")
@given(
    st.lists(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
        | st.datetimes() | st.decimals() | st.dictionaries(st.text(), st.integers()),
        min_size=1, max_size=5,
    )
)  # fmt: skip
@example(values=list(HOSTILE))
@example(values=[10**5000, -(10**5000)])
@example(values=[[[[[[[[[[[[1]]]]]]]]]]]])
def test_json_is_ascii_and_read_by_everybody(values: list[Any]) -> None:
    made = Report(
        title="t", sections=[Table("t", ["c"] * len(values), [values])], facts={"v": values}
    )
    text = made.json()
    assert text.isascii()
    assert not CONTROL.search(text)
    assert json.loads(text)["sections"][0]["type"] == "table"


def test_json_keeps_numbers_and_names_what_was_left_out() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    rows = [[1, 0.5, None, True, when, b"\x01", Decimal("1.5"), float("nan")]]
    made = Report(
        title="found",
        made=when,
        exit_code=3,
        facts={"missing": 2},
        sections=[Table("t", list("abcdefgh"), rows * (report.JSON_ROWS + 5), note="n")],
    )
    found = json.loads(made.json())
    assert found["exit_code"] == 3
    assert found["facts"] == {"missing": 2}
    (table,) = found["sections"]
    assert table["rows"][0] == [1, 0.5, None, True, when.isoformat(), "01", "1.5", None]
    assert len(table["rows"]) == report.JSON_ROWS
    assert table["left_out"] == 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.25, "0.25"),
        (10.0, "10"),
        (1e300, "1e+300"),
        pytest.param(10**5000, "about 2^16610", id="long"),
        (b"\x01\xff", "01ff"),
        ("a\tb\n", "a\\tb\\n"),
        ("\u202e", "\\u202e"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02 03:04:05+00:00"),
    ],
)
def test_a_value_is_shown_so_that_one_sees_what_it_is(value: Any, shown: str) -> None:
    assert report.printable(value) == shown


def test_tables_are_cut_with_a_sentence() -> None:
    pytest.importorskip("rich", reason="the extra jobs is not installed")
    made = Report(
        title="t", sections=[Table("t", ["n"], [[i] for i in range(60)], note="All of today.")]
    )
    assert "10 more rows are not shown. All of today." in made.console(width=80)


@pytest.mark.parametrize("width", [30, 40, 60, 74, 75, 76, 77, 78, 79, 80, 81, 82, 90, 120, 200])
def test_a_narrow_terminal_breaks_what_it_must_and_loses_nothing(width: int) -> None:
    pytest.importorskip("rich", reason="the extra jobs is not installed")
    columns = ["some address", *(f"column {number}" for number in range(5))]
    rows = [["orders-of-today" * 3, *(7 * 11111**number for number in range(5))]]
    shown = Report(title="t", sections=[Table("t", columns, rows)]).console(width=width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert shown.count("7") == sum(str(cell).count("7") for cell in rows[0])
    if width >= 90:
        assert all(f"{number:,}" in shown for number in rows[0][1:])


@pytest.mark.slow
def test_an_empty_report_has_its_title_in_each_output() -> None:
    pytest.importorskip("rich", reason="the extra jobs is not installed")
    pytest.importorskip("jinja2", reason="the extra jobs is not installed")
    empty = Report(
        title="Nothing",
        sections=[Table("t", ["a"], []), Plot("p", "line", [], {}), Plot("h", "hist", [], {})],
    )
    for text in (empty.console(), empty.json()):
        assert "Nothing" in text
    pytest.importorskip("matplotlib", reason="the extra jobs is not installed")
    assert "<h1>Nothing</h1>" in empty.html()


def test_sections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 columns, and a row of 1"):
        Table("t", ["a", "b"], [[1]])
    with pytest.raises(ValueError, match="has 1 points, but 'y' 2"):
        Plot("p", "line", [1], {"y": [1, 2]})


@pytest.mark.parametrize(("output", "library"), [("console", "rich"), ("html", "jinja2")])
def test_a_missing_extra_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, output: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra) as caught:
        getattr(of("a"), output)()
    assert str(caught.value) == f"reports need {library}: pip install 'amqp-rt-spark[jobs]'"


def test_a_report_is_made_without_what_draws_it() -> None:
    program = (
        "import sys; from amqp_rt_spark.jobs.report import Report; Report(title='t').json();"
        "print([m for m in ('rich', 'jinja2', 'matplotlib', 'pyspark', 'trio') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
