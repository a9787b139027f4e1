"""Members of a mesh in processes of their own, over loopback: one is stopped for two seconds, or killed.

Time is real here. What is waited for may take long on a busy machine; only what the test itself holds up has to be quick.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import meshed
import pytest
import trio

from amqp_rt import Container
from amqp_rt.errors import AmqpError
from amqp_rt.mesh import Mesh

pytestmark = [pytest.mark.slow, pytest.mark.req("P1", "P3")]

#: Seconds in which a process that is as good as idle does what it has to do.
WITHIN_S = 60.0
until = partial(meshed.until, within=WITHIN_S)

#: A member, with a node at its own name, which dials the URLs that follow its name.
MEMBER = """
import sys, trio
from amqp_rt import Container
from amqp_rt.mesh import Mesh
async def main():
    name, *seeds = sys.argv[1:]
    async with Container(name) as box:
        @box.rpc(f"at/{name}")
        async def there(number: int) -> int:
            return number
        (url,) = await box.listen("amqp://127.0.0.1:0")
        async with Mesh(box, seeds, role="interior", urls=()):
            print(url, flush=True)
            await trio.sleep_forever()
trio.run(main)
"""


class Twins:
    """A, in this process, reaches C over B and over D, which are processes."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        #: All that were started.
        self.started: list[subprocess.Popen[str]] = []
        self.urls: dict[str, str] = {}
        self.mesh: Mesh

    def start(self, name: str, *seeds: str) -> None:
        command = [sys.executable, "-c", MEMBER, name, *(self.urls[each] for each in seeds)]
        process = self.processes[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True
        )
        self.started.append(process)
        assert process.stdout is not None
        self.urls[name] = process.stdout.readline().strip()

    def way(self) -> tuple[str, ...]:
        found = self.mesh.instances("at/C")
        return found[0].path if found else ()

    async def call(self, number: int) -> bool:
        try:
            return await self.mesh.call("at/C", number, reply=int, within=WITHIN_S) == number
        except AmqpError:
            return False

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)


@asynccontextmanager
async def twins() -> AsyncIterator[Twins]:
    made = Twins()
    try:
        async with Container("A", drain_s=0) as box:
            (made.urls["A"],) = await box.listen("amqp://127.0.0.1:0")
            async with Mesh(box, role="interior", urls=()) as mesh:
                made.mesh = mesh
                for name, *seeds in (("B", "A"), ("D", "A"), ("C", "B", "D")):
                    await trio.to_thread.run_sync(made.start, name, *seeds)
                with trio.fail_after(WITHIN_S):
                    await mesh.reachable("at/C")
                await until(lambda: len(mesh._engine.paths().costs) == 4)
                await until(lambda: made.way() == ("B", "C"))
                yield made
    finally:
        for process in made.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


async def test_a_stopped_process_is_avoided_and_loses_no_line() -> None:
    async with twins() as made:
        assert await made.call(1)
        neighbours = made.mesh._host._ways.neighbours
        connection = neighbours["B"].connection
        made.signal("B", signal.SIGSTOP)
        stopped_at = trio.current_time()
        await until(lambda: made.way() == ("D", "C"))
        assert await made.call(2)
        # A silent line is lost after five seconds.
        await trio.sleep_until(stopped_at + 2)
        made.signal("B", signal.SIGCONT)
        await until(lambda: made.mesh._engine.lines["B"].state.value == "up")
        await until(lambda: made.way() == ("B", "C"))
        # The connection that was silent is the one that is used again.
        assert neighbours["B"].connection is connection
        assert await made.call(3)


async def test_a_killed_process_is_avoided_and_returns() -> None:
    async with twins() as made:
        assert await made.call(1)
        made.signal("B", signal.SIGKILL)
        await until(lambda: made.way() == ("D", "C"))
        assert await made.call(2)
        made.processes["B"].wait()
        await trio.to_thread.run_sync(made.start, "B", "A")
        await until(lambda: "B" in made.mesh._engine.paths().costs)
        assert await made.call(3)
