"""A broker outside, or the node with the bridge, is killed while unsettled messages cross in both directions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from meshed import Members, client, members, until

from amqp_rt import Broker, Connection, Container, connect
from amqp_rt.broker import Queue
from amqp_rt.container.recovery import Reconnect
from amqp_rt.mesh import Bridge, Pull, Push
from amqp_rt.outcomes import Accepted

pytestmark = [pytest.mark.req("P6"), pytest.mark.slow]

SOON = Reconnect(first_delay_s=0.05, delay_max_s=0.1)

#: A member with a bridge: its URL to dial, and that of the broker.
BRIDGE = """
import sys, trio
from amqp_rt import Container
from amqp_rt.mesh import Bridge, Mesh, Pull, Push
async def main():
    seed, url = sys.argv[1:]
    bridge = Bridge("outside", url, pull=[Pull("new", to="new")], push=[Push("done", to="done")])
    async with Container("B") as box, Mesh(box, [seed], role="interior", urls=(), bridges=[bridge]):
        await trio.sleep_forever()
trio.run(main)
"""
#: Messages pulled; the handler waits with this one in hand.
PULLED, IN_HAND = 10, 4
#: Messages pushed before the process stands still, and after.
BEFORE, AFTER = 10, 5


class Process:
    """A process that can be stopped, killed, and started again."""

    def __init__(self, *command: str) -> None:
        self.command = [sys.executable, *command]
        self.started = [self._start()]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)

    def first_line(self) -> str:
        stdout = self.started[-1].stdout
        assert stdout is not None
        return stdout.readline()

    def stop(self) -> None:
        """Stop it, and wait until it stands still."""
        pid = self.started[-1].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)

    def kill(self) -> None:
        self.started[-1].kill()
        self.started[-1].wait()

    def again(self) -> None:
        self.started.append(self._start())

    def end(self) -> None:
        for each in self.started:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()


class Crossing:
    """Messages that cross between A and the broker outside."""

    def __init__(self, box: Container) -> None:
        self.got: list[str] = []
        self.in_hand = trio.Event()
        self.go_on = trio.Event()

        @box.node("new", slots=1, prefetch=0)
        async def new(text: str) -> None:
            if text == str(IN_HAND):
                self.in_hand.set()
                await self.go_on.wait()
            self.got.append(text)

    async def run(self, made: Members, there: Connection, process: Process) -> None:
        """Send in both directions, and kill *process* in the middle; then send again what was not accepted."""
        async with client(made.urls["A"]) as peer:
            await made.meshes["A"].reachable("done")
            async with peer.sender("done") as out:
                for number in range(BEFORE):
                    await out.send(str(number), durable=True)
                async with there.sender("new") as first:
                    for number in range(PULLED):
                        await first.send(str(number), durable=True)
                    await self.in_hand.wait()
                async with there.sender("other") as last:
                    # When it is accepted the broker has stored the outcomes before it, too.
                    await last.send("x", durable=True)
                process.stop()
                receipts = [
                    out.send_nowait(str(BEFORE + number), durable=True) for number in range(AFTER)
                ]
                process.kill()
                for receipt in receipts:
                    # The process has read none of them.
                    assert not isinstance(await receipt.outcome(), Accepted)
                await until(lambda: not made.meshes["A"].instances("done"))
            # The outcome of this message has no way back.
            self.go_on.set()
            await until(lambda: len(self.got) == IN_HAND + 1)
            process.again()
            await made.meshes["A"].reachable("done")
            async with peer.sender("done") as out:
                for number in range(AFTER):
                    await out.send(str(BEFORE + number), durable=True)
            await until(lambda: str(PULLED - 1) in self.got)

    async def check(self, there: Connection) -> None:
        """Check that nothing was lost, and only the message in hand was doubled."""
        numbers = list(range(PULLED))
        assert self.got == [str(each) for each in (*numbers[: IN_HAND + 1], *numbers[IN_HAND:])]
        async with there.sender("done") as out:
            await out.send("end")
        pushed = []
        async with there.receiver("done") as done:
            while not pushed or pushed[-1] != "end":
                delivery = await done.receive()
                delivery.accept()
                pushed.append(delivery.body)
        assert pushed == [*(str(each) for each in range(BEFORE + AFTER)), "end"]


@asynccontextmanager
async def ended(*command: str) -> AsyncIterator[Process]:
    """Run a process that is killed at the end."""
    process = Process(*command)
    try:
        yield process
    finally:
        process.end()


async def test_the_broker_is_killed(tmp_path: Path) -> None:
    nodes = [part for name in ("new", "done", "other") for part in ("--node", f"queue:{name}")]
    serve = ["-m", "amqp_rt.cli", "serve", *nodes, "--store", f"sqlite:{tmp_path / 'store'}"]
    async with ended(*serve, "--listen", "amqp://127.0.0.1:0") as process:
        line = await trio.to_thread.run_sync(process.first_line)
        url = json.loads(line.removeprefix("ready "))["listeners"][0]
        # It comes back where it was.
        process.command[-1] = url
        bridge = Bridge(
            "outside",
            url,
            pull=[Pull("new", to="new")],
            push=[Push("done", to="done")],
            reconnect=SOON,
        )
        async with members() as made:
            crossing = Crossing(await made.start("A"))
            await made.start("B", "A", bridges=[bridge])
            async with connect(url, reconnect=SOON) as there:
                await crossing.run(made, there, process)
                await crossing.check(there)
            assert made.meshes["B"].stats().bridges == {"outside": 1}


async def test_the_node_with_the_bridge_is_killed() -> None:
    async with Broker(name="outside", volatile=True) as broker, members() as made:
        await broker.declare(Queue("new"), Queue("done"), Queue("other"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        crossing = Crossing(await made.start("A"))
        async with ended("-c", BRIDGE, made.urls["A"], url) as process, broker.local() as there:
            await crossing.run(made, there, process)
            await crossing.check(there)
