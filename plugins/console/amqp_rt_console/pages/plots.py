"""Plots as SVG, drawn by the server: no script, no styles of their own, so that the policy of the page holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup
from msgspec import Struct

WIDTH: Final = 640
HEIGHT: Final = 180
#: Space for the labels of the axes.
_LEFT: Final = 64
_BOTTOM: Final = 24
_TOP: Final = 10
_RIGHT: Final = 8


class Series(Struct, frozen=True):
    """A line of a plot."""

    name: str
    #: Values at equal distances, the latest one last; None for a gap.
    values: Sequence[float | None]


def plot(title: str, lines: Sequence[Series], *, slots: int, step_s: float) -> Markup:
    """Return the plot of *lines* as an ``svg`` element, which describes itself in words, too.

    Args:
        title: Name of the plot.
        lines: At most three lines; each is recognizable by its strokes, not only by its colour.
        slots: Values for which there is room; the latest ones are shown.
        step_s: Seconds between two values.
    """
    shown = [list(line.values)[-slots:] for line in lines]
    most = max((value for values in shown for value in values if value is not None), default=0.0)
    top = _round_up(most)
    parts = [
        Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, HEIGHT, f"{title}. {_words(lines, shown, slots * step_s)}"
        )
    ]
    for share in (0.0, 0.5, 1.0):
        y = _y(top * share, top)
        parts.append(
            Markup(
                '<path class="grid" d="M{} {}H{}"/><text x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(_LEFT, y, WIDTH - _RIGHT, _LEFT - 6, y + 4, _short(top * share))
        )
    parts.append(
        Markup(
            '<text x="{}" y="{}">{}</text><text x="{}" y="{}" text-anchor="end">now</text>'
        ).format(_LEFT, HEIGHT - 6, f"−{_span(slots * step_s)}", WIDTH - _RIGHT, HEIGHT - 6)
    )
    for number, values in enumerate(shown):
        path = _path(values, top, slots)
        if path:
            parts.append(Markup('<path class="line line-{}" d="{}"/>').format(number, path))
    return Markup("").join([*parts, Markup("</svg>")])


def legend(lines: Sequence[Series]) -> Markup:
    """Return a list that names *lines* beside their strokes and their latest values."""
    rows = [
        Markup(
            '<li><svg class="key" viewBox="0 0 24 8" aria-hidden="true"><path class="line line-{}" d="M0 4H24"/></svg> {}</li>'
        ).format(number, f"{line.name}: {_latest(line.values)}")
        for number, line in enumerate(lines)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(rows))


def _latest(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{known[-1]:,.4g}" if known else "no value yet"


def _words(lines: Sequence[Series], shown: Sequence[Sequence[float | None]], span_s: float) -> str:
    told = []
    for line, values in zip(lines, shown, strict=True):
        known = [value for value in values if value is not None]
        if known:
            told.append(
                f"{line.name} from {min(known):,.4g} to {max(known):,.4g}, now {known[-1]:,.4g}"
            )
        else:
            told.append(f"{line.name}: no value yet")
    return f"The last {_span(span_s)}: {'; '.join(told)}."


def _path(values: Sequence[float | None], top: float, slots: int) -> str:
    step = (WIDTH - _LEFT - _RIGHT) / max(1, slots - 1)
    first = slots - len(values)
    drawn: list[str] = []
    pen_down = False
    for slot, value in enumerate(values, first):
        if value is None:
            pen_down = False
            continue
        x, y = _LEFT + slot * step, _y(value, top)
        # A value between gaps is a dot: a line of no length with round ends.
        drawn.append(f"{'L' if pen_down else 'M'}{x:.1f} {y}")
        if not pen_down:
            drawn.append("h0")
        pen_down = True
    return "".join(drawn)


def _y(value: float, top: float) -> float:
    return round(_TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - value / top), 1)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20 … that is not below *value*."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    return next(power * each for each in (1, 2, 5, 10) if power * each >= value or each == 10)


def _short(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
