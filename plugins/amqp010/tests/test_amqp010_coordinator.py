"""Transactions over two brokers in processes of their own: whoever is killed, and when, each message is once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stored_broker010
import trio
from client010 import connected
from coordinated010 import PERSISTENT, Coordinator, Crash, bodies_of
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


class BrokerProcess:
    """A broker with a store, which is killed and started again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._command = [
            *(sys.executable, stored_broker010.__file__),
            *(str(folder / f"{name}.db"), "from", "to"),
        ]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def kill_and_start(self) -> None:
        await trio.to_thread.run_sync(self.kill)
        await trio.to_thread.run_sync(self.start)

    async def fill(self, *bodies: bytes) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with connected(stream) as client:
            session = await client.session(b"fill")
            for body in bodies:
                session.transfer("", body, key="from", delivery={"delivery_mode": PERSISTENT})
            await session.sync()


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
