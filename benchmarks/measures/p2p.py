"""Link between two processes of the same library, over loopback TCP.

All contestants send a message-id and a data section, decode the body, grant a credit of 1000, and
set TCP_NODELAY. Unsettled: the receiver accepts each message. The rate is the receiver's, from the
first message to the last.
"""

from __future__ import annotations

from functools import partial

from ..contestants import CREDIT, Contestant
from ..processes import RoleFailed
from ..rounds import Case, Sample
from . import Plan, size_name


def cases(plan: Plan) -> list[Case]:
    able = [one for one in plan.field.present.values() if {"sink", "source"} <= one.roles]
    return [
        Case(
            "p2p",
            f"{size_name(size)} {'pre-settled' if settled else 'unsettled'}",
            {one.key: partial(sample, one, size, settled, plan.settings.seconds) for one in able},
        )
        for settled in (False, True)
        for size in plan.settings.sizes
    ]


def sample(one: Contestant, size: int, settled: bool, seconds: float) -> Sample:
    with (
        one.role("sink", credit=CREDIT) as sink,
        one.role("source", port=sink.port, size=size, settled=settled, seconds=seconds) as source,
    ):
        sent = source.result(30 + 3 * seconds)
        heard = sink.end()
    count, measured = heard["n"], heard["measured"]
    if count != sent["n"] or not measured:
        raise RoleFailed(f"{count} of {sent['n']} messages arrived")
    took = heard["last"] - heard["first"]
    if not took or not sent["measured"]:
        raise RoleFailed("all messages came at once: measure for longer (--seconds)")
    return {
        "rate": measured / took,
        "cpu_us": (sent["cpu"] / sent["measured"] + heard["cpu"] / measured) * 1e6,
    }
