"""Containers as whole programs: how they start, and how signals and failures end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from amqp_rt import Broker, Container, node
from amqp_rt.broker import Queue
from amqp_rt.errors import LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.net.memory import MemoryNetwork

#: Program that consumes from the queue "work", and tells each step by a line.
PROGRAM = """
import sys
import time
import trio
from amqp_rt import Container

app = Container("app", drain_s={drain_s})

@app.node("work"{options})
{handler}

@app.on_startup
def started():
    print("started", flush=True)

@app.on_shutdown
def stopped():
    print("stopped", flush=True)

app.run(sys.argv[1])
print("returned", flush=True)
"""

SLOW = """async def work(body: str) -> None:
    print("begin", body, flush=True)
    await trio.sleep(0.5)
    print("end", body, flush=True)
"""

BLOCKING = """def work(body: str) -> None:
    print("begin", body, flush=True)
    time.sleep(60)
"""


class Program:
    """A Python program as a process."""

    def __init__(self, file: Path, text: str, *arguments: str) -> None:
        file.write_text(text, "utf-8")
        self.process = subprocess.Popen(
            [sys.executable, str(file), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def end(self) -> tuple[int, list[str], str]:
        """Return status, further lines and standard error."""
        output, errors = self.process.communicate(timeout=30)
        return self.process.returncode, output.splitlines(), errors


@contextmanager
def killed_at_the_end(program: Program) -> Iterator[Program]:
    try:
        yield program
    finally:
        if program.process.poll() is None:
            program.process.kill()
        program.process.communicate()


@pytest.mark.slow
@pytest.mark.req("A10")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_program_after_its_handlers(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with Broker() as broker:
        await broker.declare(Queue("work"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        text = PROGRAM.format(drain_s=10, handler=SLOW, options="")
        with killed_at_the_end(Program(tmp_path / "app.py", text, url)) as program:
            assert await trio.to_thread.run_sync(program.line) == "started"
            async with broker.local() as peer, peer.sender("work") as out:
                await out.send("first")
                await out.send("second")
            assert await trio.to_thread.run_sync(program.line) == "begin first"
            program.process.send_signal(number)
            status, lines, errors = await trio.to_thread.run_sync(program.end)
        assert (status, lines) == (0, ["end first", "stopped", "returned"]), errors
        # The outcome of the first has arrived; the second was never begun.
        stats = broker.stats("work")
        assert (stats.available, stats.acquired, stats.accepted) == (1, 0, 1)


@pytest.mark.slow
async def test_the_second_signal_ends_a_program_at_once(tmp_path: Path) -> None:
    async with Broker() as broker:
        await broker.declare(Queue("work"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        # A function in a thread cannot be cancelled.
        text = PROGRAM.format(drain_s=60, handler=BLOCKING, options=", thread=True")
        with killed_at_the_end(Program(tmp_path / "app.py", text, url)) as program:
            async with broker.local() as peer, peer.sender("work") as out:
                await out.send("first")
            assert await trio.to_thread.run_sync(program.line) == "started"
            assert await trio.to_thread.run_sync(program.line) == "begin first"
            program.process.send_signal(signal.SIGTERM)
            with trio.move_on_after(0.3):
                await trio.to_thread.run_sync(program.process.wait, abandon_on_cancel=True)
            assert program.process.poll() is None, "it waits for the handler"
            program.process.send_signal(signal.SIGTERM)
            status, lines, errors = await trio.to_thread.run_sync(program.end)
        assert (status, lines, errors) == (128 + signal.SIGTERM, [], "stopped without waiting\n")


@pytest.mark.slow
def test_a_program_that_cannot_start_says_why_in_a_sentence(tmp_path: Path) -> None:
    text = "from amqp_rt import Container\nContainer('app').run(listen='amqp://192.0.2.1:0')\n"
    status, lines, errors = Program(tmp_path / "app.py", text).end()
    assert (status, lines) == (1, [])
    assert errors.startswith("Error: cannot listen on 192.0.2.1:0: ")
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_mistake_in_a_program_has_its_traceback(tmp_path: Path) -> None:
    text = (
        "from amqp_rt import Container\napp = Container('app')\n"
        "@app.on_startup\ndef start():\n    raise KeyError('my mistake')\n"
        "app.run(listen='amqp://127.0.0.1:0')\n"
    )
    status, _, errors = Program(tmp_path / "app.py", text).end()
    assert status == 1
    assert 'app.py", line 5, in start' in errors
    assert "KeyError: 'my mistake'" in errors


async def test_a_signal_while_the_peer_is_away_ends_the_wait_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    app = Container("app", network=MemoryNetwork())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.run_async, "memory://nowhere")
        await trio.sleep(3)
        os.kill(os.getpid(), signal.SIGTERM)
    assert trio.current_time() < 60


@pytest.mark.req("A13")
async def test_a_program_of_several_containers(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    seen: list[str] = []

    @node("work")
    async def work(body: str) -> None:
        await trio.sleep(1)
        seen.append(body)

    broker = Broker("broker", network=network)
    app = Container("app", nodes=[work], network=network)
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(_started, broker, None, ["memory://here"])
        assert bound == ["memory://here"]
        await broker.declare(Queue("work"))
        assert await nursery.start(_started, app, "memory://here", ()) == []
        async with app.connect("memory://here") as peer, peer.sender("work") as out:
            await out.send("one")
        await trio.sleep(0.5)
        app.stop()
        await trio.sleep(1)
        assert seen == ["one"]
        assert broker.stats("work").accepted == 1
        assert broker.stats("work").consumers == 0
        broker.stop()


async def _started(
    app: Container | Broker,
    url: str | None,
    listen: Any,
    *,
    task_status: trio.TaskStatus[list[str]],
) -> None:
    await app.run_async(url, listen=listen, signals=False, task_status=task_status)


async def test_a_broker_consumes_from_another_one_with_its_handlers_only() -> None:
    network = MemoryNetwork()
    seen = trio.Event()

    @node("work")
    async def work(body: str) -> None:
        seen.set()

    async with Broker("far", network=network, auto_create=["queue:*"]) as far:
        await far.listen("memory://far")
        near = Broker("near", nodes=[work], network=network)
        async with trio.open_nursery() as nursery:
            # Its own $management is none of the far one's business.
            await nursery.start(_started, near, "memory://far", ["memory://near"])
            async with far.local() as peer, peer.sender("work") as out:
                await out.send("one")
            await seen.wait()
            near.stop()


async def test_a_peer_without_the_address_is_an_error() -> None:
    network = MemoryNetwork()

    @node("work")
    async def work(body: str) -> None: ...

    async with Broker("far", network=network) as far:
        await far.listen("memory://far")
        app = Container("app", nodes=[work], network=network)
        with pytest.RaisesGroup(LinkRefused, flatten_subgroups=True, allow_unwrapped=True):
            await app.run_async("memory://far", signals=False)


async def test_a_stop_while_a_login_is_judged_blames_no_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()

    @node("work")
    async def work(body: str) -> None: ...

    limits = Limits(failed_login_delay_s=30)
    async with Broker("far", network=network, users={"ada": "x"}, limits=limits) as far:
        await far.listen("memory://far")
        app = Container("app", nodes=[work], network=network)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.run_async, "memory://ada:y@far", signals=False))
            await trio.sleep(1)
            app.stop()
    assert "wrong user or password for 'ada'" in caplog.text
    assert "trying again" not in caplog.text


async def test_there_is_a_place_to_run_at() -> None:
    with pytest.raises(ValueError, match="nothing to run at: give a url, listen, or both"):
        await Container("app").run_async()
