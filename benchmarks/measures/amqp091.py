"""AMQP 0-9-1 through a broker: one producer, one queue, one consumer with a prefetch of 1000.

The clients are the same for all brokers, amqplib and pika, each used as in its documentation: pika
waits for every single confirm, amqplib has up to a thousand pending. *transient* messages are
published without confirms; *persistent* ones go into a durable queue and are confirmed. With
*bindings*, messages go through a topic exchange with that number of patterns, of which each message
matches one. The broker's processor time is that of its processes as counted by the system.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

from ..contestants import CREDIT, WARMUP_S, Contestant
from ..processes import RoleFailed, cpu_s
from ..rounds import Case, Sample
from . import Plan, size_name

BINDINGS = (10, 1_000, 100_000)
#: Sizes of the bodies measured.
SIZES = (100, 1024)
#: Longest duration of a sample in seconds, if shorter ones contain no measured message.
LONGEST_S = 20.0

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    present = plan.field.present
    able = [one for one in present.values() if one.broker091]
    found = []
    for name in ("amqplib", "pika"):
        client = present.get(name)
        if client is None:
            continue
        for size, durable in itertools.product(SIZES, (False, True)):
            if size not in plan.settings.sizes:
                continue
            runs = {
                one.key: partial(sample, plan, one, client, size, durable=durable) for one in able
            }
            kind = "persistent" if durable else "transient"
            found.append(Case("amqp091", f"{size_name(size)} {kind}, {name}", runs))
    if client := present.get("amqplib"):
        for count in BINDINGS:
            runs = {one.key: partial(routed, plan, one, client, count) for one in able}
            found.append(Case("amqp091", f"topic with {count:,} bindings, amqplib", runs))
    return found


def sample(plan: Plan, one: Contestant, client: Contestant, size: int, *, durable: bool) -> Sample:
    """Send messages of *size* through a new queue, as fast as possible."""
    running = plan.broker091(one, durable=durable)
    found = None
    seconds = plan.settings.seconds
    while found is None:
        options = {"port": running.port, "address": f"bench-{next(_numbers)}", "durable": durable}
        found = _hop(running.pids, client, seconds, {**options, "size": size, "confirmed": durable})
        # On a busy machine all messages may have arrived during the warm-up.
        seconds *= 4
        if found is None and seconds > LONGEST_S:
            raise RoleFailed(f"nothing came after the first {WARMUP_S} s")
    return found


def routed(plan: Plan, one: Contestant, client: Contestant, bindings: int) -> Sample:
    """Send messages through a topic exchange, each matching one of *bindings* bindings."""
    running = plan.broker091(one, durable=False)
    number = next(_numbers)
    options: dict[str, Any] = {
        "port": running.port,
        "address": f"bench-{number}",
        "exchange": f"bench-{number}",
        "keys": bindings,
    }
    with client.role("bind091", **options) as binder:
        binder.result(600)
    found = _hop(running.pids, client, plan.settings.seconds, {**options, "size": 100})
    if found is None:
        raise RoleFailed(f"nothing came after the first {WARMUP_S} s")
    return found


def _hop(
    pids: tuple[int, ...], client: Contestant, seconds: float, options: dict[str, Any]
) -> Sample | None:
    with client.role("consume091", credit=CREDIT, **options) as consumer:
        before = cpu_s(pids)
        with client.role("source091", credit=CREDIT, seconds=seconds, **options) as producer:
            sent = producer.result(60 + 5 * seconds)
        consumer.expect(sent["n"])
        heard = consumer.result(120)
        spent = cpu_s(pids) - before
    if heard["n"] != sent["n"]:
        raise RoleFailed(f"{heard['n']} of {sent['n']} messages arrived")
    # The last acknowledgements are under way.
    time.sleep(0.05)
    if not heard["measured"]:
        return None
    return {
        "cpu_100k_s": spent / heard["n"] * 100_000,
        "rate": heard["measured"] / (heard["last"] - heard["first"]),
    }
