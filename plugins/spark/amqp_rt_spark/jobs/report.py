"""Reports of jobs: trees of plain values, rendered for terminals, programs and browsers.

The values come from messages, so senders control them. Each output bounds them and makes them harmless: no
value is interpreted as rich markup, as HTML, as a formula of matplotlib, or as a control sequence of the
terminal.

The libraries for the outputs are the extra ``jobs``; each is loaded by the first output that needs it.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import textwrap
import unicodedata
import warnings
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from importlib.resources import files
from typing import Any, Final, Literal

import msgspec

#: Most characters of one value, in any output, and of a paragraph.
CELL_CHARS: Final = 500
TEXT_CHARS: Final = 10_000
#: Most rows of one table. For all rows, write a table with Spark.
CONSOLE_ROWS: Final = 50
HTML_ROWS: Final = 2_000
JSON_ROWS: Final = 10_000
#: Most series of one plot, and most points of each.
PLOT_SERIES: Final = 12
PLOT_POINTS: Final = 5_000

#: Readable on light and dark backgrounds, and distinguishable with colour blindness (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
#: Placeholder that the template's style replaces by the colour of the page's text.
_INK: Final = "#123456"
_INKED: Final = (
    *("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
    "grid.color",
)


class MissingExtra(RuntimeError):
    """A library of an extra is not installed; the text gives the command that installs it."""


def extra(module: str, *, name: str = "jobs", wanted: str = "reports") -> Any:
    """Import *module*, which belongs to the extra *name*.

    Raises:
        MissingExtra: The module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{wanted} need {module.partition('.')[0]}: pip install 'amqp-rt-spark[{name}]'"
        ) from error


class Table(msgspec.Struct, tag="table", frozen=True):
    """Rows of plain values under *columns*; *note* is a sentence beneath.

    Raises:
        ValueError: A row has another length than *columns*.
    """

    name: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.name!r} has {len(self.columns)} columns, and a row of {len(row)}"
                )


class Plot(msgspec.Struct, tag="plot", frozen=True):
    """Plot of *series* over *x*, in *unit*.

    ``line`` and ``bar``: each series has a value for each *x* (numbers, times or texts); None leaves
    a gap. ``hist``: each series holds samples, and *x* the edges of the bins, or nothing.

    Raises:
        ValueError: A series has another length than *x*.
    """

    name: str
    kind: Literal["line", "bar", "hist"]
    x: list[Any]
    series: dict[str, list[float | None]]
    unit: str = ""

    def __post_init__(self) -> None:
        for name, values in self.series.items():
            if self.kind != "hist" and len(values) != len(self.x):
                raise ValueError(
                    f"plot {self.name!r} has {len(self.x)} points, but {name!r} {len(values)}"
                )


class Text(msgspec.Struct, tag="text", frozen=True):
    """A paragraph."""

    text: str


Section = Table | Plot | Text


class Report(msgspec.Struct, kw_only=True):
    """Result of a job.

    ``exit_code`` is the exit code of the command: 0, or 3 if the job found something wrong.
    ``facts`` are its totals for programs: they appear in :meth:`json` alone.
    """

    title: str
    sections: list[Section] = []
    exit_code: int = 0
    facts: dict[str, Any] = {}
    made: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))

    def json(self) -> str:
        """Return the report as one JSON document, in ASCII, so that terminals interpret none of its values.

        Values without a JSON type become text, NaN and infinities null.
        """
        document = {
            "title": _bounded(self.title),
            "made": self.made.isoformat(),
            "exit_code": self.exit_code,
            "facts": _plain(self.facts),
            "sections": [_section(section) for section in self.sections],
        }
        text = json.dumps(document, allow_nan=False, indent=1)
        return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets pass

    def console(self, *, width: int | None = None, color: bool = False) -> str:
        """Render the report for a terminal of *width* columns, by default the current one.

        Raises:
            MissingExtra: rich is not installed.
        """
        out = io.StringIO()
        width = width or shutil.get_terminal_size().columns
        text = extra("rich.text").Text
        console = extra("rich.console").Console(
            file=out,
            width=width,
            force_terminal=color,
            color_system="standard" if color else None,
            markup=False,
            emoji=False,
            highlight=False,
        )
        console.print(text(printable(self.title), style="bold"))
        plots = 0
        for section in self.sections:
            match section:
                case Plot():
                    plots += 1
                case Text():
                    console.print()
                    console.print(text(printable(section.text, TEXT_CHARS)))
                case Table():
                    console.print()
                    console.print(_rich_table(section, width))
                    if note := _note(section, CONSOLE_ROWS):
                        console.print(text(note))
        if plots:
            console.print(f"\n{plots} plot{'s' if plots > 1 else ''} in the HTML report")
        return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())

    def html(self) -> str:
        """Render the report as one self-contained page: no network, no script.

        Raises:
            MissingExtra: jinja2 is not installed, or matplotlib, and there are plots.
        """
        jinja2 = extra("jinja2")
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        template = files(__package__).joinpath("report.html.jinja").read_text("utf-8")
        # Only matplotlib's output is inserted unescaped: matplotlib has escaped its texts.
        trusted = extra("markupsafe").Markup
        sections: list[dict[str, Any]] = []
        for number, section in enumerate(self.sections):
            match section:
                case Plot():
                    svg = trusted(_svg(section, salt=f"plot-{number}"))
                    sections.append({"name": printable(section.name), "svg": svg})
                case Text():
                    sections.append({"text": printable(section.text, TEXT_CHARS)})
                case Table():
                    sections.append(_html_table(section))
        page: str = environment.from_string(template).render(
            title=printable(self.title),
            made=f"{self.made:%Y-%m-%d %H:%M:%S %Z}",
            ink=_INK,
            sections=sections,
        )
        return page


# ---- values ------------------------------------------------------------------------------------


def printable(value: object, most: int = CELL_CHARS) -> str:
    """Return *value* as visible text of at most *most* characters.

    Control and formatting characters (ESC, NUL, those that change the direction of writing) appear as
    Python escapes; so do line ends and tabs, which keeps a value on its line.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            # Python refuses to convert integers of very many digits to text.
            return f"{value:,}" if abs(value) < 1 << 128 else f"about 2^{value.bit_length()}"
        case float():
            return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else f"{value:.6g}"
        case datetime():
            return value.isoformat(" ", "milliseconds" if value.microsecond else "seconds")
        case bytes() | bytearray() | memoryview():
            text = bytes(value[:most]).hex()
        case _:
            text = str(value)
    return "".join(
        character
        if unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"
        else character.encode("unicode_escape").decode()
        for character in _bounded(text, most)
    )


def _bounded(text: str, most: int = CELL_CHARS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: object, depth: int = 8) -> Any:
    """Return *value* in types that JSON has, bounded in length and *depth*."""
    match value:
        case None | bool():
            return value
        case int():
            return value if abs(value) < 1 << 128 else printable(value)
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return _bounded(str(value))
        case datetime() | date():
            return value.isoformat()
        case bytes() | bytearray() | memoryview():
            return bytes(value[:CELL_CHARS]).hex()
        case dict() if depth:
            return {_bounded(str(key)): _plain(item, depth - 1) for key, item in value.items()}
        case list() | tuple() if depth:
            return [_plain(item, depth - 1) for item in value[:JSON_ROWS]]
        case _:
            return _bounded(str(value))


def _section(section: Section) -> dict[str, Any]:
    match section:
        case Text():
            return {"type": "text", "text": _bounded(section.text, TEXT_CHARS)}
        case Plot():
            return {
                "type": "plot",
                "name": _bounded(section.name),
                "kind": section.kind,
                "unit": _bounded(section.unit),
                "x": _plain(section.x),
                "series": _plain(section.series),
            }
        case Table():
            return {
                "type": "table",
                "name": _bounded(section.name),
                "columns": _plain(section.columns),
                "rows": _plain(section.rows),
                "left_out": max(0, len(section.rows) - JSON_ROWS),
                "note": _bounded(section.note),
            }


def _note(table: Table, most: int) -> str:
    """Return the sentence beneath a table of which *most* rows are shown."""
    left_out = len(table.rows) - most
    said = [f"{left_out:,} more rows are not shown."] if left_out > 0 else []
    return " ".join([*said, printable(table.note)]).strip()


def _numeric(table: Table) -> list[bool]:
    """Return, for each column, whether it holds numbers, which are aligned to the right."""
    return [
        bool(cells) and all(isinstance(cell, int | float | Decimal | None) for cell in cells)
        for cells in (
            [row[index] for row in table.rows[:HTML_ROWS]] for index in range(len(table.columns))
        )
    ]


# ---- outputs -----------------------------------------------------------------------------------


def _rich_table(table: Table, width: int) -> Any:
    text = extra("rich.text").Text
    drawn = extra("rich.table").Table(
        title=text(printable(table.name)),
        title_justify="left",
        box=extra("rich.box").SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    rows = [[printable(cell) for cell in row] for row in table.rows[:CONSOLE_ROWS]]
    names, right = [printable(column) for column in table.columns], _numeric(table)
    # A number broken across lines is unreadable, so columns of numbers keep their width.
    least = [
        max(map(len, (*name.split(), *((row[at] for row in rows) if right[at] else ()), "")))
        for at, name in enumerate(names)
    ]
    # In too narrow a terminal, break the cells of all columns rather than drop the last ones.
    edges = 2 * len(least) + 1
    most = [max(map(len, (name, *(row[at] for row in rows)))) for at, name in enumerate(names)]
    ample = sum(most) + edges <= width
    roomy = sum(least) + edges <= width
    for at, name in enumerate(names):
        whole = roomy and right[at]
        drawn.add_column(
            # rich breaks all cells of a column, or none.
            text(textwrap.fill(name, least[at]) if whole and not ample else name),
            justify="right" if right[at] else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=least[at] if roomy else None,
        )
    for row in rows:
        drawn.add_row(*map(text, row))
    return drawn


def _html_table(table: Table) -> dict[str, Any]:
    return {
        "name": printable(table.name),
        "columns": [printable(column) for column in table.columns],
        "right": _numeric(table),
        "rows": [[printable(cell) for cell in row] for row in table.rows[:HTML_ROWS]],
        "note": _note(table, HTML_ROWS),
    }


def _svg(plot: Plot, *, salt: str) -> str:
    """Draw *plot* as an SVG element; *salt* makes its ids unique in the page.

    Text stays text, so that it can be searched and takes the page's colour. It is never parsed as a
    formula, which would happen to a value between dollar signs.
    """
    matplotlib = extra("matplotlib", wanted="plots")
    figure_type = extra("matplotlib.figure").Figure
    canvas_type = extra("matplotlib.backends.backend_svg").FigureCanvasSVG
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "text.usetex": False,
        "font.family": "sans-serif",
        **dict.fromkeys(_INKED, _INK),
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character that no font here has: the browser's may
        figure = figure_type(figsize=(8, 3.6), layout="constrained")
        canvas_type(figure)
        _draw(figure.add_subplot(), plot)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: Any, plot: Plot) -> None:
    shown = list(plot.series.items())[:PLOT_SERIES]
    x = [value if _is_measure(value) else printable(value) for value in plot.x[:PLOT_POINTS]]
    named = not all(_is_measure(value) for value in x)
    at: Sequence[Any] = range(len(x)) if named or plot.kind == "bar" else x
    for number, (name, values) in enumerate(shown):
        look = {"color": _COLOURS[number % len(_COLOURS)], "label": printable(name)}
        numbers = [math.nan if value is None else float(value) for value in values[:PLOT_POINTS]]
        match plot.kind:
            case "line":
                axes.plot(at, numbers, marker="." if len(at) <= 60 else "", **look)
            case "bar":
                width = 0.8 / len(shown)
                shift = (number - (len(shown) - 1) / 2) * width
                axes.bar([place + shift for place in at], numbers, width=width, **look)
            case "hist":
                samples = [value for value in numbers if math.isfinite(value)]
                axes.hist(samples, bins=x or 30, alpha=0.7, **look)
    if plot.kind != "hist" and at and (named or plot.kind == "bar"):
        # Label every place as long as the labels do not overlap.
        step = max(1, len(x) // 30)
        axes.set_xticks(list(at)[::step], [printable(value)[:24] for value in x[::step]])
    if len(x) > 8 or plot.kind == "line":
        axes.tick_params(axis="x", rotation=30)
    if plot.kind == "hist":
        axes.set_xlabel(printable(plot.unit))
    else:
        axes.set_ylabel(printable(plot.unit))
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # Given explicitly, because labels that begin with an underscore are left out of the legend.
    if len(shown) > 1:
        axes.legend([printable(name)[:60] for name, _ in shown], frameon=False)


def _is_measure(value: object) -> bool:
    """Return whether *value* has a position on a numeric or time axis, rather than one by order."""
    return isinstance(value, int | float | datetime | date) and not isinstance(value, bool)
