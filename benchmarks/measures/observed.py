"""Costs of observers: messages to a handler and calls within one process, both ends together.

Each sample also measures the same without observers first, within the same minute: *over_off* is the ratio. That of the case
*off* is the noise: both of its halves have none.
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
    plain, found = (_cost_us(one, each, calls, seconds / 2) for each in ("off", how))
    return {"cpu_us": found, "over_off": found / plain}


def _cost_us(one: Contestant, how: str, calls: bool, seconds: float) -> float:
    with one.role("observed", how=how, calls=calls, seconds=seconds) as role:
        done = role.result(60 + 20 * seconds)
    return done["cpu"] / done["n"] * 1e6
