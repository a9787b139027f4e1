"""Stores alone, without a broker: durable messages of 1 KiB, put by one batch and removed by the next one.

PostgreSQL is a server of its own on the same machine, so that there is no network between them.
"""

from __future__ import annotations

from functools import partial

from ..contestants import ROOT, Contestant
from ..rounds import Case, Sample
from . import Plan

KINDS = ("SQLite", "PostgreSQL")
SIZES = (1, 16, 64, 256, 1024)


def cases(plan: Plan) -> list[Case]:
    # Stores are not compiled.
    able = [one for one in plan.field.with_role("store") if one.key.endswith("pure")]
    return [
        Case(
            "stores",
            f"{kind}, batches of {size}",
            {one.key: partial(sample, one, kind, size, plan.settings.seconds) for one in able},
        )
        for size in SIZES
        for kind in KINDS
    ]


def sample(one: Contestant, kind: str, size: int, seconds: float) -> Sample:
    options = {"kind": kind, "size": size, "seconds": seconds, "tests": str(ROOT / "tests")}
    with one.role("store", **options) as role:
        done = role.result(60 + 20 * seconds)
    return {"rate": done["n"] / done["elapsed"]}
