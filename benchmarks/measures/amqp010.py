"""AMQP 0-10 through our broker, beside 0-9-1: one producer, one queue, one consumer with a window of 1000.

Each sample sends messages by both protocols, through the same broker and with clients that do the same (see
``roles/on_octets.py``); *over_091* is the ratio of the broker's processor time. *transient* messages of
0-9-1 have no confirms; in 0-10 every command is completed. Branches are *recovered* after ``kill -9``: the time is
from the start of the next process until the last of them is committed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..contestants import CREDIT, ROLES, WARMUP_S, Contestant, Running
from ..processes import Role, RoleFailed, cpu_s, kill
from ..roles.on_octets import commit_branches, prepare_branches
from ..rounds import Case, Sample
from . import Plan, size_name

SIZE = 100
#: Messages of a session that is resumed: as many as one keeps for replay.
RESUMED = 5_000
#: Branches of distributed transactions that are recovered, and messages of each.
BRANCHES = 100
MESSAGES = 100
#: Longest duration of a sample in seconds, if shorter ones contain no measured message.
LONGEST_S = 20.0

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    able = [one for one in plan.field.present.values() if one.broker010]
    size = size_name(SIZE)
    found = []
    for durable in (False, True):
        runs = {one.key: partial(sample, plan, one, durable=durable) for one in able}
        found.append(Case("amqp010", f"{size} {'persistent' if durable else 'transient'}", runs))
    runs = {one.key: partial(one_by_one, plan, one) for one in able}
    found.append(Case("amqp010", f"{size} published one by one", runs))
    runs = {one.key: partial(resumed, plan, one) for one in able}
    found.append(Case("amqp010", f"session of {RESUMED:,} messages", runs))
    runs = {one.key: partial(recovered, one) for one in able}
    found.append(Case("amqp010", f"{BRANCHES} branches × {MESSAGES} messages, recovered", runs))
    return found


def sample(plan: Plan, one: Contestant, *, durable: bool) -> Sample:
    """Send messages through new queues as fast as possible, by 0-9-1 and by 0-10."""
    running = plan.broker010(one, durable=durable)
    before = _hop(running, plan.settings.seconds, "091", durable=durable)
    found = _hop(running, plan.settings.seconds, "010", durable=durable)
    return {**found, "over_091": found["cpu_100k_s"] / before["cpu_100k_s"]}


def one_by_one(plan: Plan, one: Contestant) -> Sample:
    """Publish messages, each when the one before is complete."""
    running = plan.broker010(one, durable=False)
    with _role("sync010", running, seconds=plan.settings.seconds) as client:
        return {"p50_ms": client.result(60 + plan.settings.seconds)["p50_ms"]}


def resumed(plan: Plan, one: Contestant) -> Sample:
    """Resume a session with messages that were sent and not completed."""
    running = plan.broker010(one, durable=False)
    with _role("resume010", running, count=RESUMED) as client:
        return {"resumed_s": client.result(60)["resumed_s"]}


def recovered(one: Contestant) -> Sample:
    """Prepare branches, kill the broker, and measure from its next start until they are committed."""
    assert one.kept010
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with one.kept010(folder) as running:
            prepare_branches(
                running.port,
                f"bench-{next(_numbers)}",
                count=BRANCHES,
                messages=MESSAGES,
                size=SIZE,
            )
            kill(running.pids)
        started = time.perf_counter()
        with one.kept010(folder) as running:
            began = time.perf_counter()
            commit_branches(running.port, count=BRANCHES)
            committed = time.perf_counter()
    return {"committed_s": committed - started, "after_ready_s": committed - began}


def _role(name: str, running: Running, **options: Any) -> Role:
    command = (sys.executable, str(ROLES / "on_octets.py"))
    known = {"port": running.port, "address": f"bench-{next(_numbers)}", "size": SIZE}
    return Role(command, name, {"warmup": WARMUP_S, "credit": CREDIT, **known, **options})


def _hop(running: Running, seconds: float, protocol: str, *, durable: bool) -> Sample:
    found = None
    while found is None:
        found = _measured(running, seconds, protocol, durable=durable)
        # On a busy machine all messages may have arrived during the warm-up.
        seconds *= 4
        if found is None and seconds > LONGEST_S:
            raise RoleFailed(f"nothing came after the first {WARMUP_S} s")
    return found


def _measured(running: Running, seconds: float, protocol: str, *, durable: bool) -> Sample | None:
    options = {
        "address": f"bench-{next(_numbers)}",
        "durable": durable,
        "confirmed": durable,
        "seconds": seconds,
    }
    with _role(f"consume{protocol}", running, **options) as consumer:
        before = cpu_s(running.pids)
        with _role(f"source{protocol}", running, **options) as producer:
            sent = producer.result(60 + 5 * seconds)
        consumer.expect(sent["n"])
        heard = consumer.result(120)
        # The last acknowledgements are under way.
        time.sleep(0.05)
        spent = cpu_s(running.pids) - before
    if heard["n"] != sent["n"]:
        raise RoleFailed(f"{heard['n']} of {sent['n']} messages arrived")
    if not heard["measured"]:
        return None
    return {
        "cpu_100k_s": spent / heard["n"] * 100_000,
        "rate": heard["measured"] / (heard["last"] - heard["first"]),
    }
