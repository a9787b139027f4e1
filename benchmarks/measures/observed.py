"""Costs of observers: messages to a handler and calls within one process, both ends together.

Each sample also measures the same without observers first, within the same minute: *over_off* is the ratio. That of the case
*off* is the noise: both of its halves have none. With OpenTelemetry a third part makes the spans of a message, with
the same attributes and links, by its API alone: *span_us* is what a span of ours costs a message, and *hand_us* what a span by
hand costs, which nothing is sent with. The rest of the difference is ours.
"""

from __future__ import annotations

from functools import partial

from ..contestants import Contestant
from ..rounds import Case, Sample
from . import Plan

#: Kinds of observers → title.
HOW = {
    "off": "off",
    "metrics": "metrics for Prometheus",
    "api": "OpenTelemetry, API alone",
    "unsampled": "OpenTelemetry, not sampled",
    "sampled": "OpenTelemetry, sampled",
}
WHAT = {False: "messages", True: "calls"}
#: Kinds of observers that make spans, and how many a message has.
TRACED = ("api", "unsampled", "sampled")
SPANS = 2


def cases(plan: Plan) -> list[Case]:
    able = plan.field.with_role("observed")
    return [
        Case(
            "observed",
            f"{what}, {title}",
            {one.key: partial(sample, one, how, calls, plan.settings.seconds) for one in able},
        )
        for calls, what in WHAT.items()
        for how, title in HOW.items()
    ]


def sample(one: Contestant, how: str, calls: bool, seconds: float) -> Sample:
    costs = compared(one, how, "off", calls, seconds)
    if how in TRACED and not calls:
        by_hand = _cost_us(one, how, calls, seconds / 2, by_hand=True)
        without = costs["cpu_us"] / costs["over_off"]
        span = (costs["cpu_us"] - without) / SPANS
        costs |= {
            "span_us": span,
            "hand_us": by_hand / SPANS,
            "own_us": span - by_hand / SPANS,
        }
    return costs


def compared(
    one: Contestant, how: str, without: str, calls: bool, seconds: float
) -> dict[str, float]:
    """Measure *how*, and *without* shortly before it."""
    plain, found = (_cost_us(one, each, calls, seconds / 2) for each in (without, how))
    return {"cpu_us": found, "over_off": found / plain}


def _cost_us(
    one: Contestant, how: str, calls: bool, seconds: float, *, by_hand: bool = False
) -> float:
    with one.role("observed", how=how, calls=calls, seconds=seconds, by_hand=by_hand) as role:
        done = role.result(60 + 20 * seconds)
    return done["cpu"] / done["n"] * 1e6
