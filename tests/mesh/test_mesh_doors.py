"""One mesh of nodes in trio, in asyncio and in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import trio

from amqp_rt import Container, aio, rpc, sync
from amqp_rt.mesh import Mesh

pytestmark = [pytest.mark.req("P7"), pytest.mark.slow]


@rpc("trio/{name}")
async def in_trio(name: str) -> str:
    return f"trio, {name}"


@rpc("asyncio/{name}")
async def in_asyncio(name: str) -> str:
    await asyncio.sleep(0)
    return f"asyncio, {name}"


@rpc("threads/{name}")
def in_threads(name: str) -> str:
    return f"threads, {name}"


async def test_nodes_of_three_kinds_call_each_other() -> None:
    answers: dict[str, list[Any]] = {}
    wanted = ("trio", "asyncio", "threads")

    def thread(url: str) -> None:
        with (
            sync.Container("c", nodes=[in_threads]) as box,
            sync.Mesh(box, [url], role="interior") as mesh,
        ):
            mesh.wait_ready()
            for each in wanted:
                mesh.reachable(f"{each}/x")
            answers["threads"] = [mesh.call(f"{each}/c", reply=str, within=10) for each in wanted]
            done()

    async def tasks(url: str) -> None:
        async with (
            aio.Container("b", nodes=[in_asyncio]) as box,
            aio.Mesh(box, [url], role="interior") as mesh,
        ):
            await mesh.wait_ready()
            for each in wanted:
                await mesh.reachable(f"{each}/x")
            answers["asyncio"] = [
                await mesh.call(f"{each}/b", reply=str, within=10) for each in wanted
            ]
            await asyncio.to_thread(done)

    token = trio.lowlevel.current_trio_token()
    finished = {name: trio.Event() for name in wanted}
    everybody = trio.Event()

    async def arrive() -> None:
        if len(answers) == len(wanted):
            everybody.set()
        await everybody.wait()

    def done() -> None:
        trio.from_thread.run(arrive, trio_token=token)

    def ended(name: str, work: Callable[[], None]) -> None:
        work()
        trio.from_thread.run_sync(finished[name].set, trio_token=token)

    with trio.fail_after(60):
        async with (
            Container("a", nodes=[in_trio]) as box,
            Mesh(box, role="interior") as mesh,
            trio.open_nursery() as nursery,
        ):
            url = (await box.listen("amqp://127.0.0.1:0"))[0]
            nursery.start_soon(trio.to_thread.run_sync, ended, "threads", lambda: thread(url))
            nursery.start_soon(
                trio.to_thread.run_sync, ended, "asyncio", lambda: asyncio.run(tasks(url))
            )
            for each in wanted:
                await mesh.reachable(f"{each}/x")
            answers["trio"] = [
                await mesh.call(f"{each}/a", reply=str, within=10) for each in wanted
            ]
            await arrive()
            await finished["threads"].wait()
            await finished["asyncio"].wait()
    for name, node in (("trio", "a"), ("asyncio", "b"), ("threads", "c")):
        assert answers[name] == [f"{each}, {node}" for each in wanted]
