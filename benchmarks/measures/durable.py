"""Durable messages through a broker: one producer, one queue, one consumer, credit 1000, unsettled.

Every message is on disk before it is accepted. In the same round as each durable run, the same
broker receives messages that are not durable: *kept* is the ratio of the rates.
"""

from __future__ import annotations

from functools import partial

from ..contestants import Contestant
from ..rounds import Case, Sample
from . import Plan, size_name
from .broker import hop


def cases(plan: Plan) -> list[Case]:
    present = plan.field.present
    clients = {"rhea": present.get("rhea"), "own": present.get("compiled") or present.get("pure")}
    able = [one for one in present.values() if one.durable_broker]
    found = []
    for name, client in clients.items():
        for size in plan.settings.sizes:
            if client is None or not size:
                continue
            # Other brokers keep nothing in queues of our client, which requests no
            # terminus-durability.
            rivals = [
                one
                for one in able
                if name == "rhea" or one.key.removeprefix("before-") in ("compiled", "pure")
            ]
            rivals = [one for one in rivals if not 0 < one.size_max < size]
            runs = {one.key: partial(sample, plan, one, client, size) for one in rivals}
            found.append(Case("durable", f"{size_name(size)}, {name} clients", runs))
    return found


def sample(plan: Plan, one: Contestant, client: Contestant, size: int) -> Sample:
    running = plan.durable_broker(one)
    plain = hop(plan, running, client, size)
    kept = hop(plan, running, client, size, durable=True)
    return {**kept, "kept": kept["rate"] / plain["rate"]}
