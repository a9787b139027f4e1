"""Costs of an HTTP door: messages and calls beside one that nobody uses, and pages of its JSON API.

Each sample of an idle door also measures its broker without a door first, within the same minute: *over_off* is the ratio. A page
has 100 of 1,000 queues.
"""

from __future__ import annotations

from functools import partial

from ..contestants import Contestant
from ..rounds import Case, Sample
from . import Plan
from .observed import WHAT, compared

PAGE = "pages of 100 queues of 1,000, JSON API"


def cases(plan: Plan) -> list[Case]:
    able = plan.field.with_role("observed")
    seconds = plan.settings.seconds
    return [
        *(
            Case(
                "door",
                f"{what}, an idle HTTP door",
                {one.key: partial(compared, one, "door", "broker", calls, seconds) for one in able},
            )
            for calls, what in WHAT.items()
        ),
        Case("door", PAGE, {one.key: partial(page, one, seconds) for one in able}),
    ]


def page(one: Contestant, seconds: float) -> Sample:
    """Measure the processor time of one page, that of its reader included."""
    with one.role("observed", how="page", calls=False, seconds=seconds) as role:
        done = role.result(60 + 20 * seconds)
    return {"server_cpu_us": done["cpu"] / done["n"] * 1e6}
