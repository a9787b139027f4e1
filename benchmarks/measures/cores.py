"""Edge processes: the processor time of a broker without them, and of each process with two.

Each sample measures both, within the same minute. On a machine with cores for clients, broker and edges the rates would
show the gain; others show processor time. *Two cores* is what the broker and its edges would do on two cores, *cores* on one for each process, over the
broker without edges on one core: the limit is the busiest process, and on two cores half of the sum too.
"""

from __future__ import annotations

from functools import partial

from ..contestants import Contestant
from ..rounds import Case, Sample
from . import Plan, doors, size_name
from .doors import House, dial_each, hop_each

EDGES = 2
ENCRYPTED = ("amqps", "wss")


def cases(plan: Plan) -> list[Case]:
    alone, with_edges = House(plan), House(plan, EDGES)
    able = [one for one in plan.field.present.values() if one.doors]
    found = []
    for scheme in (each for each in ENCRYPTED if each in doors.WAYS):
        for size in doors.SIZES:
            runs = {
                one.key: partial(hop, plan, alone, with_edges, one, scheme, size) for one in able
            }
            found.append(Case("cores", f"{size_name(size)}, {doors.WAYS[scheme]}", runs))
        runs = {one.key: partial(setup, plan, alone, with_edges, one, scheme) for one in able}
        found.append(Case("cores", f"connect, session, link, close, {doors.WAYS[scheme]}", runs))
    return found


def hop(
    plan: Plan, alone: House, with_edges: House, one: Contestant, scheme: str, size: int
) -> Sample:
    unaided, aided = alone.doors(one), with_edges.doors(one)
    before, _ = hop_each(plan, unaided, alone.ca, scheme, size)
    after, _ = hop_each(plan, aided, with_edges.ca, scheme, size)
    return compared(before, after)


def setup(plan: Plan, alone: House, with_edges: House, one: Contestant, scheme: str) -> Sample:
    unaided, aided = alone.doors(one), with_edges.doors(one)
    before, _ = dial_each(plan, unaided, alone.ca, scheme)
    after, _ = dial_each(plan, aided, with_edges.ca, scheme)
    return compared(before, after)


def compared(alone: list[float], each: list[float]) -> Sample:
    """Compare seconds for a unit of work: of the broker *alone*, and of *each* process, the broker first."""
    busiest, total = max(each), sum(each)
    return {
        "alone_us": sum(alone) * 1e6,
        "hub_us": each[0] * 1e6,
        "edge_us": max(each[1:]) * 1e6,
        "two_cores": sum(alone) / max(busiest, total / 2),
        "core_each": sum(alone) / busiest,
    }
