"""Tables of results, for a terminal and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import click

from .results import METRICS, Change, Results, Series, Verdict

#: Order of the metrics of a case: costs first, then rates.
ORDER = list(METRICS)
FIRST = ("cpu_100k_s", "cpu_us", "server_cpu_us")


def number(value: float) -> str:
    """Format *value* with three significant digits, and with thousands separators."""
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def spread(series: Series) -> str:
    """Format the median and the range of the rounds."""
    text = number(series.median)
    if len(series.values) > 1:
        text += f" [{number(min(series.values))}–{number(max(series.values))}]"
    return text


def ratios(results: Results, series: Series) -> str:
    """Format the ratios of our numbers, in each mode, to *series*."""
    parts = []
    for mode in ("compiled", "pure"):
        ours = results.get(series.measure, series.case, mode, series.metric)
        if ours is None or series.contestant == mode:
            continue
        ratio = results.ratio(ours, series.contestant)
        if ratio is None or not ratio:
            continue
        parts.append(f"{mode} {number(ratio)}x")
    return ", ".join(parts)


def by_case(results: Results) -> list[tuple[str, list[Series]]]:
    """Return the series by measure and case, costs before rates."""

    def place(series: Series) -> int:
        return (
            FIRST.index(series.metric)
            if series.metric in FIRST
            else 10 + ORDER.index(series.metric)
        )

    found = []
    for (measure, case), group in groupby(results, key=lambda one: (one.measure, one.case)):
        found.append((f"{measure}: {case}", sorted(group, key=place)))
    return found


def show(results: Results, verdicts: Sequence[Verdict], old: Results | None) -> None:
    """Print the tables."""
    environment = results.environment
    click.echo(
        f"{environment['system']}, {environment['cores']} cores, Python {environment['python']}, "
        f"{environment['date']}"
    )
    for name, reason in results.absent.items():
        click.echo(f"absent: {name}: {reason}")
    for title, rows in by_case(results):
        click.secho(f"\n{title}", bold=True)
        for metric, group in groupby(rows, key=lambda one: one.metric):
            click.echo(f"  {METRICS[metric].title}")
            for series in group:
                line = f"    {spread(series):<34} {results.contestants[series.contestant]}"
                if ratio := ratios(results, series):
                    line += f"  |  {ratio} of this"
                if old and (before := old.get(*series.key)):
                    line += f"  |  {series.median / before.median:.2f}x of before"
                click.echo(line)
    for where, reason in results.failures.items():
        click.secho(f"failed: {where}: {reason}", fg="red")
    if verdicts:
        click.secho("\nTargets", bold=True)
        for verdict in verdicts:
            click.echo("  " + judged(verdict))


def show_changes(changes: Sequence[Change]) -> None:
    """Print the change of each cost, the worst first."""
    click.secho("\nAgainst the other checkout", bold=True)
    for change in sorted(changes, key=lambda one: -one.ratio):
        series = change.series
        click.echo(
            f"  {change.verdict:<10} {change.ratio:6.3f} [{change.low:.3f}–{change.high:.3f}]  "
            f"{series.measure}: {series.case}, {METRICS[series.metric].title}, {series.contestant}, "
            f"{len(series.values)} pairs"
        )


def judged(verdict: Verdict) -> str:
    """Return one line about one target."""
    target = verdict.target
    sign = "≥" if METRICS[target.metric].more else "≤"
    against = f" over {target.against}" if target.against else ""
    what = f"{target.measure}: {target.case}, {METRICS[target.metric].title}, {target.of}{against}"
    bounds = f"{sign} {target.floor:g}"
    if target.stretch is not None:
        bounds += f", aim {target.stretch:g}"
    if verdict.value is None:
        return f"not measured  {what} ({bounds})"
    word = "aim reached" if verdict.aim else "passed" if verdict.passed else "MISSED"
    return f"{word:<12} {number(verdict.value):>8}  {what} ({bounds})"


MARKDOWN_HEAD = """\
# Benchmarks

Written by `python -m benchmarks all --markdown`. What each measure does stands in the modules of
`benchmarks/measures`; targets in `benchmarks/targets.toml`.

Read the ratios, not the numbers: they come from {cores} cores, {system}, Python {python},
{date}, and such a machine's speed drifts by up to a factor of two. All contestants take turns in
every round, a number is the median of {rounds} rounds with the lowest and the highest beside it,
and a ratio is the median of the ratios round by round. Credit is 1000 and TCP_NODELAY is set
everywhere.

**A change beside the code before it**: `python -m benchmarks codec p2p broker durable amqp091 --against ../before` measures
both checkouts in one run, each in the modes that it has installed (`.venv`, and `.venv-compiled` by `make compiled`), in
11 pairs whose order alternates. Each cost is judged by the 95 % interval of the median of its pairs' ratios: *worse* if all
of the interval is above 1.03 (`--within`), *not worse* if none of it is, *unclear* if it takes more `--rounds`. The
exit code is 1 if a cost is worse. Calls of Python functions, which no load changes, are counted by
`tests/test_call_counts.py`.

"""


def markdown(results: Results, verdicts: Sequence[Verdict]) -> str:
    """Return the page ``docs/benchmarks.md``."""
    rounds = max((len(series.values) for series in results), default=0)
    out = [MARKDOWN_HEAD.format(rounds=rounds, **results.environment)]
    out += ["Contestants:\n"]
    out += [f"- `{key}`: {identity}" for key, identity in results.contestants.items()]
    out += [f"- absent: {name} ({reason})" for name, reason in results.absent.items()]
    if verdicts:
        out += ["\n## Targets\n", "| | measured | floor | aim | what |", "|---|---|---|---|---|"]
        out += [_row(verdict) for verdict in verdicts]
    for measure, cases in groupby(by_case(results), key=lambda pair: pair[0].partition(":")[0]):
        out.append(f"\n## {measure}\n")
        for title, rows in cases:
            out.append(f"\n**{title.partition(': ')[2]}**\n")
            out += _table(results, rows)
    if results.failures:
        out.append("\n## Failed\n")
        out += [f"- {where}: {reason}" for where, reason in results.failures.items()]
    return "\n".join(out) + "\n"


def _row(verdict: Verdict) -> str:
    target = verdict.target
    sign = "≥" if METRICS[target.metric].more else "≤"
    word = "aim reached" if verdict.aim else "passed" if verdict.passed else "**missed**"
    value = "" if verdict.value is None else number(verdict.value)
    if verdict.value is None:
        word = "not measured"
    aim = "" if target.stretch is None else f"{sign} {target.stretch:g}"
    against = f" / {target.against}" if target.against else ""
    what = f"{target.measure}: {target.case}, {METRICS[target.metric].title}: {target.of}{against}"
    return f"| {word} | {value} | {sign} {target.floor:g} | {aim} | {what} |"


def _table(results: Results, rows: Iterable[Series]) -> list[str]:
    rows = list(rows)
    metrics = list(dict.fromkeys(series.metric for series in rows))
    contestants = [key for key in results.contestants if any(one.contestant == key for one in rows)]
    head = " | ".join(METRICS[metric].title for metric in metrics)
    lines = [f"| | {head} | ours over this |", "|---" * (len(metrics) + 2) + "|"]
    for key in contestants:
        own = {series.metric: series for series in rows if series.contestant == key}
        cells = " | ".join(spread(own[metric]) if metric in own else "" for metric in metrics)
        first = next((own[metric] for metric in metrics if metric in own), None)
        lines.append(f"| {key} | {cells} | {ratios(results, first) if first else ''} |")
    return lines


def write_markdown(path: Path, results: Results, verdicts: Sequence[Verdict]) -> None:
    path.write_text(markdown(results, verdicts))
