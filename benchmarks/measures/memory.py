"""Memory of idle objects: growth of a broker's resident memory per connection and per message.

Each sample has a new broker, since memory released after one sample would be reused by the next. A
connection has a session and a link that receives from an empty queue. Messages have 100 bytes of
data and wait in one queue.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial

from ..contestants import Contestant, Running
from ..processes import memory_bytes
from ..rounds import Case, Sample
from . import Plan

CONNECTIONS = 500
MESSAGES = 50_000


def cases(plan: Plan) -> list[Case]:
    present = plan.field.present
    client = present.get("compiled") or present.get("pure")
    if client is None:
        return []
    brokers = plan.field.brokers()
    return [
        Case(
            "memory",
            "idle connection",
            {one.key: partial(connections, plan, one, client) for one in brokers},
        ),
        Case(
            "memory",
            "queued message of 100 B",
            {one.key: partial(messages, plan, one, client) for one in brokers},
        ),
    ]


def connections(plan: Plan, one: Contestant, client: Contestant) -> Sample:
    count = CONNECTIONS // 5 if plan.settings.quick else CONNECTIONS
    with started(one) as running:
        before = settled(running)
        with client.role(
            "idle", port=running.port, address=running.address("idle"), connections=count
        ) as idle:
            after = settled(running)
            idle.end()
    return {"bytes": max(0, after - before) / count}


def messages(plan: Plan, one: Contestant, client: Contestant) -> Sample:
    count = MESSAGES // 5 if plan.settings.quick else MESSAGES
    with started(one) as running:
        before = settled(running)
        with client.role(
            "source",
            port=running.port,
            address=running.address("held"),
            size=100,
            settled=False,
            seconds=60,
            count=count,
            sasl=True,
        ) as producer:
            sent = producer.result(120)
        after = settled(running)
    return {"bytes": max(0, after - before) / sent["n"]}


def started(one: Contestant) -> AbstractContextManager[Running]:
    assert one.broker
    return one.broker()


def settled(running: Running) -> int:
    """Return the broker's memory once it is stable, after at most a second."""
    seen = memory_bytes(running.pids)
    for _ in range(10):
        time.sleep(0.1)
        last, seen = seen, memory_bytes(running.pids)
        if abs(seen - last) < 64 * 1024:
            break
    return seen
