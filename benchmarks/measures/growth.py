"""Growth of costs: each is measured small and large in one process, and the quotient is judged.

Only amqp_rt is measured: a slope needs no peer. The hop is a message through a broker without
sockets: transfer in, queue, transfer out, disposition in, range of dispositions out.
"""

from __future__ import annotations

import itertools
from functools import partial

from ..contestants import Contestant, Running
from ..processes import cpu_s
from ..rounds import Case, Sample
from . import Plan

#: Titles by the names in the role.
SLOPES = {
    "depth": "queue depth 10 → 1M, enqueue and dequeue",
    "links": "links on a connection 1 → 10k, one active",
    "consumers": "consumers of a queue 1 → 1k",
    "unsettled_oldest": "unsettled 1 → 100k, settle the oldest",
    "unsettled_newest": "unsettled 1 → 100k, settle the newest",
    "unsettled_random": "unsettled 1 → 100k, settle at random",
    "addresses": "addresses 10 → 100k, routing",
    "slow": "fast consumer, alone → beside ten that keep their messages",
    "range": "disposition 0..2^31-1 over the same with exact ends",
    "properties": "application-properties 1 → 100, pass-through",
    "frames": "message 1 MiB → 10 MiB in frames of 512 B, per byte",
}

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    able = plan.field.with_role("growth")
    if not able:
        return []
    found = [
        Case("hop", name, {one.key: partial(hop, plan, one, acks) for one in able})
        for name, acks in (("100 B, an outcome each", 1), ("100 B, outcomes of 50", 50))
    ]
    found += [
        Case("growth", title, {one.key: partial(slope, plan, one, name) for one in able})
        for name, title in SLOPES.items()
    ]
    found.append(
        Case(
            "growth",
            "connections 0 → 4k idle, 16 active",
            {one.key: partial(idle, plan, one) for one in able if one.broker},
        )
    )
    found.append(
        Case(
            "growth",
            "full collection with 1M queued messages",
            {one.key: partial(pause, plan, one) for one in able},
        )
    )
    return found


def hop(plan: Plan, one: Contestant, acks: int) -> Sample:
    seconds = plan.settings.seconds / 2
    with one.role("hop", acks=acks, seconds=seconds) as role:
        found = role.result(60 + 10 * seconds)
    return {name: found[name] for name in ("ns", "loops", "allocations")}


def slope(plan: Plan, one: Contestant, name: str) -> Sample:
    with one.role("growth", what=name, quick=plan.settings.quick) as role:
        return {"slope": role.result(120)["slope"]}


def pause(plan: Plan, one: Contestant) -> Sample:
    with one.role("growth", what="pause", quick=plan.settings.quick) as role:
        return {"pause_ms": role.result(120)["pause_ms"]}


def idle(plan: Plan, one: Contestant) -> Sample:
    """Compare the broker's CPU for a message of 16 busy pairs beside idle connections and alone."""
    running = plan.broker(one)
    seconds = plan.settings.seconds
    alone, crowded = (
        _busy(running, one, count, seconds) for count in (0, 500 if plan.settings.quick else 4_000)
    )
    return {"slope": crowded / alone}


def _busy(running: Running, one: Contestant, count: int, seconds: float) -> float:
    options = {"address": f"busy-{next(_numbers)}", "active": 16, "seconds": seconds}
    with one.role("idle", port=running.port, connections=count, **options) as role:
        before = cpu_s(running.pids)
        done = role.line(60 + 10 * seconds)
        return (cpu_s(running.pids) - before) / float(done["n"])
