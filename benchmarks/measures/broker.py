"""Messages through a broker: one producer, one queue, one consumer, credit 1000, unsettled.

The clients are the same for all brokers, so that only the broker differs: rhea's, as ordinary
clients, and our own, which are fast enough to load a broker to its limit. The broker's processor
time is that of its processes as counted by the system.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

from ..contestants import CREDIT, WARMUP_S, Contestant, Running
from ..processes import RoleFailed, cpu_s
from ..rounds import Case, Sample
from . import Plan, size_name

#: Messages per second, to measure the cost of a broker that is mostly idle.
PACES = (500, 3000)

#: Longest duration of a sample in seconds, if shorter ones contain no measured message.
LONGEST_S = 20.0

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    found = []
    sizes = [size for size in plan.settings.sizes if size]
    present = plan.field.present
    clients = {"rhea": present.get("rhea"), "own": present.get("compiled") or present.get("pure")}
    for name, client in clients.items():
        if client is None:
            continue
        for size in sizes:
            able = [one for one in plan.field.brokers() if not 0 < one.size_max < size]
            runs = {one.key: partial(sample, plan, one, client, size) for one in able}
            found.append(Case("broker", f"{size_name(size)}, {name} clients", runs))
    if rhea := present.get("rhea"):
        for pace in PACES if not plan.settings.quick else ():
            runs = {
                one.key: partial(sample, plan, one, rhea, 100, pace) for one in plan.field.brokers()
            }
            found.append(Case("broker", f"100 B at {pace}/s, rhea clients", runs))
    return found


def sample(plan: Plan, one: Contestant, client: Contestant, size: int, pace: int = 0) -> Sample:
    return hop(plan, plan.broker(one), client, size, pace)


def hop(
    plan: Plan,
    running: Running,
    client: Contestant,
    size: int,
    pace: int = 0,
    *,
    durable: bool = False,
) -> Sample:
    """Send messages of *size* through a new queue, at *pace* per second or as fast as possible."""
    sample = None
    seconds = plan.settings.seconds
    while sample is None:
        sample = _hop(running, client, size, pace, seconds, durable=durable)
        # On a busy machine all messages may have arrived during the warm-up.
        seconds *= 4
        if sample is None and seconds > LONGEST_S:
            raise RoleFailed(f"nothing came after the first {WARMUP_S} s")
    return sample


def _hop(
    running: Running, client: Contestant, size: int, pace: int, seconds: float, *, durable: bool
) -> Sample | None:
    address = running.address(f"bench-{next(_numbers)}")
    common: dict[str, Any] = {"port": running.port, "address": address, "sasl": True}
    if durable and running.terminus_durability:
        common["terminus_durability"] = running.terminus_durability
    with client.role("consume", credit=CREDIT, latency=bool(pace), **common) as consumer:
        time.sleep(0.1)  # The consumer's credit has reached the broker
        before = cpu_s(running.pids)
        with client.role(
            "source",
            size=size,
            settled=False,
            seconds=seconds,
            rate=pace,
            durable=durable,
            **common,
        ) as producer:
            sent = producer.result(60 + 5 * seconds)
        consumer.expect(sent["n"])
        heard = consumer.result(60)
        spent = cpu_s(running.pids) - before
    count, measured = heard["n"], heard["measured"]
    if count != sent["n"]:
        raise RoleFailed(f"{count} of {sent['n']} messages arrived")
    if not measured:
        return None
    taken = {"cpu_100k_s": spent / count * 100_000}
    if pace:
        return taken | {"p50_ms": heard["p50_ms"], "p99_ms": heard["p99_ms"]}
    return taken | {
        "rate": measured / (heard["last"] - heard["first"]),
        "core_rate": count / spent,
    }
