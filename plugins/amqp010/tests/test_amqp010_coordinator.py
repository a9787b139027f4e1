"""Transactions over two brokers in processes of their own: whoever is killed, and when, each message is once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from coordinated010 import BrokerProcess, Coordinator, Crash, bodies_of
from protocol010 import Failed

#: Whether this is ``make test-long``.
LONG = os.environ.get("AMQP_RT_LONG") == "1"
#: All steps of a round at which it may be interrupted.
STEPS = [
    *("take", "put"),
    *(f"{at} prepare {side}" for side in ("source", "target") for at in ("before", "in", "after")),
    "decide",
    *(f"{at} commit {side}" for side in ("source", "target") for at in ("before", "in", "after")),
]


@pytest.mark.slow
@pytest.mark.req("R13")
@pytest.mark.parametrize("victim", ["source", "target", "coordinator", "both brokers", "all"])
async def test_each_message_is_there_once_whoever_is_killed_at_any_step(
    tmp_path: Path, victim: str
) -> None:
    # Each second step includes all kinds: before, within and after a command.
    steps = STEPS if LONG else STEPS[::2]
    source, target = BrokerProcess(tmp_path, "source"), BrokerProcess(tmp_path, "target")
    at = ""
    reached: set[str] = set()

    async def interrupt(step: str) -> None:
        if step != at:
            return
        reached.add(step)
        if victim in {"source", "both brokers", "all"}:
            await source.kill_and_start()
        if victim in {"target", "both brokers", "all"}:
            await target.kill_and_start()
        if victim in {"coordinator", "all"}:
            raise Crash

    try:
        bodies = [b"%d" % number for number in range(len(steps) + 1)]
        await source.fill(*bodies)
        coordinator = Coordinator(lambda: source.port, lambda: target.port, interrupt)
        for number, at in enumerate(steps):
            name = f"round-{number}"
            before = await bodies_of(target.port, "to")
            try:
                await coordinator.move(name)
            except (Crash, Failed, OSError, ExceptionGroup):
                await coordinator.recover()
            left, moved = await bodies_of(source.port, "from"), await bodies_of(target.port, "to")
            assert sorted((*left, *moved), key=int) == bodies, at
            assert left == sorted(left, key=int)
            # The log of the coordinator tells which.
            assert (len(moved) == len(before) + 1) is (name.encode() in coordinator.committed), at
        assert reached == set(steps)
        assert 0 < len(coordinator.committed) < len(steps)
        # Nothing is left behind: all other messages can be moved.
        at = ""
        for number in range(len(await bodies_of(source.port, "from"))):
            await coordinator.move(f"rest-{number}")
        await source.kill_and_start()
        await target.kill_and_start()
        assert await bodies_of(source.port, "from") == []
        assert sorted(await bodies_of(target.port, "to"), key=int) == bodies
    finally:
        source.kill()
        target.kill()
