"""Namespaces of Service Bus: Microsoft's SDK for Python, our own clients, and growth of costs.

The SDK sends messages, receives and completes them, one or a hundred at a time; *share* is the part of our processor
time in that of both processes. Our own clients send through a queue of a namespace and through a plain
queue of the same broker. The slopes are of the cost of a message in one process, without sockets.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

from ..contestants import CREDIT, Contestant
from ..processes import Role, RoleFailed, cpu_s
from ..rounds import Case, Sample
from . import Plan

#: Titles of the slopes by their names in the role.
SLOPES = {
    "sessions": "messages in a queue with sessions 10 → 100k, through one of 1,000 sessions",
    "correlations": "correlation rules of a topic 10 → 10k, one that matches",
    "copies": "SQL rules of a topic 10 → 10k, for each rule",
}

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    able = [one for one in plan.field.present.values() if one.namespace]
    found = []
    brokers: dict[str, Role] = {}
    if sdk := plan.field.present.get("pyamqp"):
        for title, count in (("one message", 1), ("100 messages", 100)):
            runs = {one.key: partial(driven, plan, one, sdk, brokers, count) for one in able}
            found.append(Case("servicebus", f"SDK for Python, {title} at a time", runs))
    for queue in ("a plain queue", "a queue of a namespace"):
        runs = {one.key: partial(hop, plan, one, queue, brokers) for one in able}
        found.append(Case("servicebus", f"100 B, own clients, {queue}", runs))
    found += [
        Case("servicebus", title, {one.key: partial(slope, plan, one, name) for one in able})
        for name, title in SLOPES.items()
    ]
    return found


def _broker(plan: Plan, one: Contestant, brokers: dict[str, Role]) -> Role:
    if one.key not in brokers:
        brokers[one.key] = plan.stack.enter_context(one.role("bus"))
    return brokers[one.key]


def driven(
    plan: Plan, one: Contestant, sdk: Contestant, brokers: dict[str, Role], count: int
) -> Sample:
    """Let the SDK send, receive and complete messages through a queue of a namespace, *count* at a time."""
    broker = _broker(plan, one, brokers)
    seconds = max(1.0, plan.settings.seconds)
    string = broker.ready["connection_string"]
    options: dict[str, Any] = {"connection_string": string, "queue": "driven", "count": count}
    with sdk.role("bus", seconds=seconds, **options) as client:
        client.line(60)
        before = cpu_s((broker.pid,))
        done = client.result(60 + 5 * seconds)
        spent = cpu_s((broker.pid,)) - before
    return {"rate": done["n"] / done["elapsed"], "share": spent / (spent + done["cpu"])}


def hop(plan: Plan, one: Contestant, queue: str, brokers: dict[str, Role]) -> Sample:
    """Send messages of our own clients through *queue*."""
    broker = _broker(plan, one, brokers)
    plain = queue == "a plain queue"
    common: dict[str, Any] = {
        "port": broker.ready["port" if plain else "bus_port"],
        "address": f"bench-{next(_numbers)}" if plain else "hop",
        "sasl": True,
        "sas": None if plain else "SAS_KEY_VALUE",
    }
    with one.role("consume", credit=CREDIT, **common) as consumer:
        time.sleep(0.1)  # The consumer's credit has reached the broker
        before = cpu_s((broker.pid,))
        seconds = plan.settings.seconds
        with one.role("source", size=100, settled=False, seconds=seconds, **common) as producer:
            sent = producer.result(60 + 5 * seconds)
        consumer.expect(sent["n"])
        heard = consumer.result(60)
        spent = cpu_s((broker.pid,)) - before
    if heard["n"] != sent["n"]:
        raise RoleFailed(f"{heard['n']} of {sent['n']} messages arrived")
    return {"cpu_100k_s": spent / sent["n"] * 100_000}


def slope(plan: Plan, one: Contestant, name: str) -> Sample:
    """Compare the cost of a message at the largest and the smallest size."""
    with one.role("bus_growth", what=name, quick=plan.settings.quick) as role:
        return {"slope": role.result(120)["slope"]}
