"""Results of a run: samples by case and contestant, with their medians and ratios."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct, field


class Metric(Struct, frozen=True):
    """Meaning of a number."""

    title: str
    #: Whether more is better; otherwise the number is a cost.
    more: bool


METRICS: dict[str, Metric] = {
    "rate": Metric("messages/s", more=True),
    "rows": Metric("rows/s", more=True),
    "direct_rows": Metric("rows/s in one process, without Spark", more=True),
    "row_cpu_us": Metric("CPU µs/row, Spark and its workers", more=False),
    "of_direct": Metric("of the rate without Spark", more=True),
    "over_direct": Metric("of the CPU without Spark", more=False),
    "batch_ms": Metric("ms for a micro-batch", more=False),
    "calls": Metric("calls/s", more=True),
    "connections": Metric("connections/s", more=True),
    "cpu_us": Metric("CPU µs/message, both ends", more=False),
    "cpu_100k_s": Metric("broker CPU s/100k messages", more=False),
    "kept": Metric("of its own rate for what is not durable", more=True),
    "core_rate": Metric("messages/s and broker core", more=True),
    "server_cpu_us": Metric("server CPU µs each", more=False),
    "start_ms": Metric("ms until it listens", more=False),
    "first_message_ms": Metric("ms until a message has gone through", more=False),
    "stop_ms": Metric("ms until it is gone", more=False),
    "p50_ms": Metric("p50 ms", more=False),
    "p99_ms": Metric("p99 ms", more=False),
    "ns": Metric("ns", more=False),
    "bytes": Metric("bytes", more=False),
    "slope": Metric("cost, largest over smallest", more=False),
    "share": Metric("our share of the CPU", more=False),
    "over_tcp": Metric("of the broker's CPU over plain TCP", more=False),
    "alone_us": Metric("CPU µs of a broker without edges", more=False),
    "hub_us": Metric("CPU µs of one with edges", more=False),
    "edge_us": Metric("CPU µs of its busier edge", more=False),
    "two_cores": Metric("of one core's work, by CPU, on two", more=True),
    "core_each": Metric("the same with a core for each process", more=True),
    "over_off": Metric("of the CPU without observers", more=False),
    "span_us": Metric("CPU µs for a span", more=False),
    "hand_us": Metric("of it by OpenTelemetry alone", more=False),
    "own_us": Metric("of it by us", more=False),
    "over_091": Metric("of the broker's CPU for clients of 0-9-1", more=False),
    "of_direct_link": Metric("of the rate of a direct link, a core each", more=True),
    "over_end": Metric("CPU of a hop, of an end of a direct link", more=False),
    "hop_us": Metric("CPU µs/message of a hop", more=False),
    "ingress_us": Metric("CPU µs/message of the first node", more=False),
    "slow_share": Metric("calls of the slow one, of a fast one", more=False),
    "growth_bytes": Metric("bytes that a node grows by, at most", more=False),
    "over_apart": Metric("p99 of small calls, of that on nodes beside them", more=False),
    "spf_ms": Metric("ms for all paths from a node", more=False),
    "joined_ms": Metric("simulated ms until all reach all", more=False),
    "quiet_bytes": Metric("bytes/s that a node sends in quiet", more=False),
    "change_ms": Metric("simulated ms until all know a new address", more=False),
    "change_messages": Metric("messages per line for a new address", more=False),
    "change_bytes": Metric("bytes of such a message", more=False),
    "closed_ms": Metric("simulated ms until all know of a close", more=False),
    "silent_ms": Metric("simulated ms until all know of a silent end", more=False),
    "resumed_s": Metric("s until all messages have come again", more=False),
    "committed_s": Metric("s until all branches are committed", more=False),
    "after_ready_s": Metric("s of that after it listens", more=False),
    "accepted_s": Metric("s until a message is accepted", more=False),
    "peak": Metric("memory at most, over what stays", more=False),
    "step_ms": Metric("longest step of the loop, ms of CPU", more=False),
    "step_wall_ms": Metric("the same by the clock, ms", more=False),
    "longest_ms": Metric("longest round trip of a good client, ms", more=False),
    "seeds_s": Metric("CPU s for 1,000 seeds", more=False),
    "pause_ms": Metric("longest pause, ms", more=False),
    "allocations": Metric("bytes kept per message", more=False),
    "loops": Metric("in calibration loops", more=False),
}


class Series(Struct):
    """Samples of one metric for one contestant in one case, one for each round."""

    measure: str
    case: str
    contestant: str
    metric: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.measure, self.case, self.contestant, self.metric


class Results:
    """All series of a run, in the order of their first samples."""

    def __init__(self, environment: Mapping[str, Any], contestants: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        #: Version and other details of each contestant by its key.
        self.contestants = dict(contestants)
        #: Reasons why contestants were not measured, by name.
        self.absent: dict[str, str] = {}
        #: Reasons why measurements failed, by case and contestant.
        self.failures: dict[str, str] = {}
        self._series: dict[tuple[str, str, str, str], Series] = {}

    def add(self, measure: str, case: str, contestant: str, sample: Mapping[str, float]) -> None:
        for metric, value in sample.items():
            if metric not in METRICS:
                raise ValueError(f"no such metric: {metric}")
            series = Series(measure, case, contestant, metric)
            self._series.setdefault(series.key, series).values.append(value)

    def get(self, measure: str, case: str, contestant: str, metric: str) -> Series | None:
        return self._series.get((measure, case, contestant, metric))

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def ratio(self, series: Series, against: str) -> float | None:
        """Return the median of the ratios of *series* to that of *against*, round by round.

        Both are measured in every round, one after the other, so a temporary slowdown of the
        machine affects both.
        """
        other = self.get(series.measure, series.case, against, series.metric)
        if other is None or not all(other.values):
            return None
        return median(
            ours / theirs for ours, theirs in zip(series.values, other.values, strict=False)
        )

    def changes(self, before: str, within: float) -> list[Change]:
        """Return the changes of each contestant's costs since its namesake with prefix *before*."""
        found = []
        for series in self:
            old = self.get(series.measure, series.case, before + series.contestant, series.metric)
            if old is None or METRICS[series.metric].more or not all(old.values):
                continue
            ratios = [now / then for now, then in zip(series.values, old.values, strict=False)]
            found.append(Change(series, median(ratios), *interval(ratios), within))
        return found

    def write(self, path: Path) -> None:
        """Save all results as JSON, for ``--compare`` and for plots."""
        document = {
            "environment": self.environment,
            "contestants": self.contestants,
            "absent": self.absent,
            "failures": self.failures,
            "series": [
                {
                    "measure": series.measure,
                    "case": series.case,
                    "contestant": series.contestant,
                    "identity": self.contestants.get(series.contestant, ""),
                    "metric": series.metric,
                    "unit": METRICS[series.metric].title,
                    "median": series.median,
                    "values": series.values,
                }
                for series in self
            ],
        }
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        document = json.loads(path.read_text())
        results = cls(document["environment"], document["contestants"])
        results.absent = document["absent"]
        results.failures = document["failures"]
        for entry in document["series"]:
            for value in entry["values"]:
                results.add(
                    entry["measure"], entry["case"], entry["contestant"], {entry["metric"]: value}
                )
        return results


def interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median of the distribution of *values*.

    Its ends are two of the values, so nothing is assumed about the distribution. Fewer than six
    values cannot give an interval at 95 %: it is unbounded then.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0
    ends = (0.0, inf)
    for at in range(count // 2):
        # The median lies below the value at this position if at most that many of *count* coins
        # show heads.
        outside += 2 * comb(count, at) / 2**count
        if outside > 1 - confidence:
            break
        ends = (ordered[at], ordered[count - 1 - at])
    return ends


class Change(Struct, frozen=True):
    """Ratio of a cost to that before: the median of the ratios of pairs, and its interval."""

    series: Series
    ratio: float
    low: float
    high: float
    #: Allowed growth, as a fraction.
    within: float

    @property
    def verdict(self) -> str:
        """``worse`` or ``not worse`` if the interval is decisive, ``unclear`` otherwise."""
        allowed = 1 + self.within
        return "worse" if self.low > allowed else "not worse" if self.high <= allowed else "unclear"


class Target(Struct, frozen=True, kw_only=True):
    """Target of ``targets.toml``."""

    measure: str
    case: str
    metric: str
    #: Contestant that is judged: "compiled", "pure" or another.
    of: str
    #: Contestant whose number divides the judged one. None judges the number itself, which is a
    #: ratio (a slope), a count of bytes, or a time that a user waits.
    against: str | None = None
    #: Bound for a release.
    floor: float
    #: Bound to aim at.
    stretch: float | None = None


class Verdict(Struct, frozen=True):
    """Result of a run for a target."""

    target: Target
    #: None if the run did not measure it.
    value: float | None

    def reaches(self, bound: float | None) -> bool:
        if self.value is None or bound is None:
            return False
        if METRICS[self.target.metric].more:
            return self.value >= bound
        return self.value <= bound

    @property
    def passed(self) -> bool:
        return self.reaches(self.target.floor)

    @property
    def aim(self) -> bool:
        return self.reaches(self.target.stretch)


def judge(results: Results, targets: Iterable[Target]) -> list[Verdict]:
    """Compare *results* with *targets*."""
    verdicts = []
    for target in targets:
        series = results.get(target.measure, target.case, target.of, target.metric)
        value: float | None = None
        if series is not None:
            value = results.ratio(series, target.against) if target.against else series.median
        verdicts.append(Verdict(target, value))
    return verdicts
