"""Requests and replies between two processes of the same library, 100 bytes in each direction."""

from __future__ import annotations

from functools import partial

from ..contestants import CREDIT, Contestant
from ..rounds import Case, Sample
from . import Plan

SIZE = 100


def cases(plan: Plan) -> list[Case]:
    able = [one for one in plan.field.present.values() if {"echo", "call"} <= one.roles]
    return [
        Case(
            "rpc",
            f"{in_flight} in flight",
            {one.key: partial(sample, one, in_flight, plan.settings.seconds) for one in able},
        )
        for in_flight in (1, 64)
    ]


def sample(one: Contestant, in_flight: int, seconds: float) -> Sample:
    with (
        one.role("echo", credit=CREDIT) as server,
        one.role(
            "call",
            port=server.port,
            size=SIZE,
            in_flight=in_flight,
            seconds=seconds,
            credit=CREDIT,
        ) as client,
    ):
        heard = client.result(30 + 3 * seconds)
        served = server.end()
    return {
        "calls": heard["n"] / heard["elapsed"],
        "cpu_us": (heard["cpu"] / heard["n"] + served["cpu"] / served["measured"]) * 1e6,
        "p50_ms": heard["p50_ms"],
        "p99_ms": heard["p99_ms"],
    }
