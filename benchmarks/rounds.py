"""Rounds that interleave all contestants, on a machine whose speed drifts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import click
from msgspec import Struct

from .processes import RoleFailed
from .results import METRICS, Results

#: A sample is repeated if the machine's speed changed by more than this fraction during it.
DRIFT_MAX = 0.25
#: How often, unless the command says otherwise.
REPEATS = 2

Sample = Mapping[str, float]


class Case(Struct):
    """Case of a measure, with a function for each contestant."""

    measure: str
    name: str
    #: Functions that take one sample, by contestant.
    runs: Mapping[str, Callable[[], Sample]]


def calibrate() -> float:
    """Return the seconds for a fixed piece of interpreted work: the machine's speed now."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        total = 0
        for number in range(150_000):
            total += number & 7
        best = min(best, time.perf_counter() - started)
    return best


class Progress:
    """Line on standard error that shows the current measurement."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        spent = time.monotonic() - self.started
        line = f"[{self.done}/{self.total} {spent:4.0f} s] {text}"
        if self.terminal:
            click.echo(f"\r\x1b[K{line[:110]}", err=True, nl=False)
        else:
            click.echo(line, err=True)

    def end(self) -> None:
        if self.terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


def run(
    case: Case, results: Results, rounds: int, progress: Progress, repeats: int = REPEATS
) -> None:
    """Measure *case* in *rounds*: A B C, C B A. A contestant that fails is omitted from then on.

    Every other round runs in reverse order, so that a gradual slowdown of the machine favours no
    contestant. A sample is repeated up to *repeats* times.
    """
    runs = dict(case.runs)
    for number in range(rounds):
        for contestant in list(runs) if number % 2 == 0 else list(reversed(runs)):
            progress.say(f"{case.measure}: {case.name}, {contestant}, round {number + 1}")
            try:
                sample = _steady(runs[contestant], repeats)
            except (RoleFailed, OSError, TimeoutError) as error:
                results.failures[f"{case.measure}: {case.name}, {contestant}"] = str(error)
                progress.say(f"failed: {error}")
                del runs[contestant]
            else:
                results.add(case.measure, case.name, contestant, sample)
            progress.done += 1


def _steady(measure: Callable[[], Sample], repeats: int) -> Sample:
    """Take a sample while the machine's speed is steady, or the last of a few attempts."""
    sample: Sample = {}
    for _ in range(repeats + 1):
        before = calibrate()
        sample = measure()
        after = calibrate()
        if max(before, after) <= (1 + DRIFT_MAX) * min(before, after):
            break
    unknown = set(sample) - set(METRICS)
    assert not unknown, unknown
    return sample
