"""Connection setup: connect, session, link, close, one after the other.

Both ends use the same library first; then our client runs against each broker, for the broker's
cost of a connection.
"""

from __future__ import annotations

from functools import partial

from ..contestants import CREDIT, Contestant
from ..processes import cpu_s
from ..rounds import Case, Sample
from . import Plan


def cases(plan: Plan) -> list[Case]:
    able = [one for one in plan.field.present.values() if {"sink", "dial"} <= one.roles]
    found = [
        Case(
            "setup",
            "connect, session, link, close",
            {one.key: partial(sample, one, plan.settings.seconds) for one in able},
        )
    ]
    clients = [one for one in able if "hop" in one.roles]
    if clients and plan.field.brokers():
        runs = {
            one.key: partial(broker_sample, plan, one, clients[0]) for one in plan.field.brokers()
        }
        found.append(Case("setup", "the same, our client and a broker", runs))
    return found


def sample(one: Contestant, seconds: float) -> Sample:
    with (
        one.role("sink", credit=CREDIT) as server,
        one.role("dial", port=server.port, seconds=seconds) as client,
    ):
        before = cpu_s([server.pid])
        dialled = client.result(30 + 3 * seconds)
        spent = cpu_s([server.pid]) - before
        server.end()
    return {
        "connections": dialled["n"] / dialled["elapsed"],
        "server_cpu_us": spent / dialled["n"] * 1e6,
    }


def broker_sample(plan: Plan, one: Contestant, client: Contestant) -> Sample:
    running = plan.broker(one)
    seconds = plan.settings.seconds
    before = cpu_s(running.pids)
    with client.role(
        "dial",
        port=running.port,
        seconds=seconds,
        sasl=True,
        address=running.address("setup"),
    ) as dialler:
        dialled = dialler.result(30 + 3 * seconds)
    spent = cpu_s(running.pids) - before
    return {
        "connections": dialled["n"] / dialled["elapsed"],
        "server_cpu_us": spent / dialled["n"] * 1e6,
    }
