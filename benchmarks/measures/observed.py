"""Costs of observers, and of an HTTP door: messages to a handler and calls within one process, both ends together.

Each sample also measures the same without observers first, within the same minute: *over_off* is the ratio. That of the case
*off* is the noise: both of its halves have none. With OpenTelemetry a third part makes the spans of a message, with
the same attributes and links, by its API alone: *span_us* is what a span of ours costs a message, and *hand_us* what a span by
hand costs, which nothing is sent with. The rest of the difference is ours. A door is compared with its broker without the door.
A page of the JSON API has a case of its own: 100 of 1,000 queues.
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
    "door": "an idle HTTP door",
}
WHAT = {False: "messages", True: "calls"}
#: Kinds of observers that make spans, and how many a message has.
TRACED = ("api", "unsampled", "sampled")
SPANS = 2
#: Cases that read pages.
PAGES = ("pages of 100 queues of 1,000, JSON API",)


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
    ] + [
        Case(
            "observed", title, {one.key: partial(page, one, plan.settings.seconds) for one in able}
        )
        for title in PAGES
    ]


def sample(one: Contestant, how: str, calls: bool, seconds: float) -> Sample:
    without = "broker" if how == "door" else "off"
    plain, found = (_cost_us(one, each, calls, seconds / 2) for each in (without, how))
    costs = {"cpu_us": found, "over_off": found / plain}
    if how in TRACED and not calls:
        by_hand = _cost_us(one, how, calls, seconds / 2, by_hand=True)
        span = (found - plain) / SPANS
        costs |= {
            "span_us": span,
            "hand_us": by_hand / SPANS,
            "own_us": span - by_hand / SPANS,
        }
    return costs


def page(one: Contestant, seconds: float) -> Sample:
    """Measure the processor time of one page, that of its reader included."""
    with one.role("observed", how="page", calls=False, seconds=seconds) as role:
        done = role.result(60 + 20 * seconds)
    return {"server_cpu_us": done["cpu"] / done["n"] * 1e6}


def _cost_us(
    one: Contestant, how: str, calls: bool, seconds: float, *, by_hand: bool = False
) -> float:
    with one.role("observed", how=how, calls=calls, seconds=seconds, by_hand=by_hand) as role:
        done = role.result(60 + 20 * seconds)
    return done["cpu"] / done["n"] * 1e6
