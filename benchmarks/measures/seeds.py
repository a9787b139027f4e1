"""Duration of the simulation: the simulated world of the tests with its faults, for many seeds.

Some of 1,000 seeds are run, and the processor time of all of them is extrapolated.
"""

from __future__ import annotations

from functools import partial

from ..contestants import ROOT, Contestant
from ..rounds import Case, Sample
from . import Plan


def cases(plan: Plan) -> list[Case]:
    able = plan.field.with_role("seeds")
    name = "queues, transactions, logs and links that are resumed"
    return [Case("seeds", name, {one.key: partial(sample, plan, one) for one in able})]


def sample(plan: Plan, one: Contestant) -> Sample:
    seconds = 5 * plan.settings.seconds
    with one.role("seeds", tests=str(ROOT / "tests"), seconds=seconds) as role:
        done = role.result(60 + 20 * seconds)
    return {"seeds_s": done["elapsed"] / done["n"] * 1000}
