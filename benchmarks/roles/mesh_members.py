"""Members of a mesh as roles, and meshes of many nodes in simulated time."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import trio

from amqp_rt import Container, node, rpc
from amqp_rt.mesh import Mesh

#: Addresses of the nodes that a member may serve.
SINK, ECHO, BIG, SHARED = "bench", "echo", "big", "shared"


async def member(options: dict[str, Any], say: Any) -> None:
    """Run a member that dials ``seeds``, and is ready when it reaches ``reach``.

    Each line of its input makes it print the number of messages that its nodes have taken.
    """
    taken = 0

    @node(SINK, prefetch=options["credit"])
    async def take(body: bytes) -> None:
        nonlocal taken
        taken += 1

    @rpc(ECHO, prefetch=options["credit"])
    async def reply(body: bytes) -> bytes:
        nonlocal taken
        taken += 1
        return body

    @node(BIG, streaming=True)
    async def read(body: AsyncIterator[bytes]) -> None:
        nonlocal taken
        async for chunk in body:
            taken += len(chunk)

    found = {SINK: take, ECHO: reply, BIG: read}
    async with Container(options["name"], nodes=[found[each] for each in options["serve"]]) as box:
        (url,) = await box.listen("amqp://127.0.0.1:0")
        async with Mesh(box, options["seeds"], role="interior", urls=()) as mesh:
            with trio.fail_after(20):
                for each in options["reach"]:
                    await mesh.reachable(each)
            say(ready=1, port=int(url.rpartition(":")[2]))
            while await trio.to_thread.run_sync(sys.stdin.readline):
                say(n=taken)
    say(n=taken)


async def stream(options: dict[str, Any], say: Any) -> None:
    """Send one message in pieces, of at least ``size`` octets and until standard input ends."""
    chunk = bytes(65_536)
    ended = False

    async def read() -> None:
        nonlocal ended
        await trio.to_thread.run_sync(sys.stdin.read)
        ended = True

    async with (
        Container("stream") as box,
        box.connect(f"amqp://127.0.0.1:{options['port']}", sasl=False) as peer,
        peer.sender(BIG) as out,
        trio.open_nursery() as nursery,
    ):
        say(ready=1)
        nursery.start_soon(read)
        written = 0
        async with out.stream() as body:
            while written < options["size"] or not ended:
                await body.write(chunk)
                written += len(chunk)
        say(written=written)


async def shares(options: dict[str, Any], say: Any) -> None:
    """Call instances, the first of which takes ten times as long as each other one."""
    counts = [0] * options["instances"]
    latencies: list[float] = []
    seconds = options["seconds"]

    def instance(number: int, address: str) -> Any:
        busy_s = options["busy_s"] * (10 if number == 0 else 1)

        @rpc(address, slots=1)
        async def work(body: bytes) -> bytes:
            counts[number] += 1
            await trio.sleep(busy_s)
            return body

        return work

    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Container("ingress"))
        (url,) = await box.listen("amqp://127.0.0.1:0")
        mesh = await stack.enter_async_context(Mesh(box, role="interior", urls=()))
        for number in range(len(counts)):
            other = await stack.enter_async_context(
                Container(
                    f"instance-{number}",
                    nodes=[instance(number, SHARED), instance(number, f"{SHARED}/{number}")],
                )
            )
            await stack.enter_async_context(Mesh(other, [url], role="interior", urls=()))
        with trio.fail_after(20):
            for number in range(len(counts)):
                await mesh.reachable(f"{SHARED}/{number}")
        say(ready=1)

        async def caller() -> None:
            while time.monotonic() < until:
                before = time.monotonic()
                await mesh.call(SHARED, b"", reply=bytes)
                latencies.append(time.monotonic() - before)

        # The first second shows how long each takes.
        for begins in (True, False):
            until = time.monotonic() + (1.0 if begins else seconds)
            counts[:] = [0] * len(counts)
            latencies.clear()
            async with trio.open_nursery() as nursery:
                for _ in range(options["in_flight"]):
                    nursery.start_soon(caller)
        latencies.sort()
        say(
            slow=counts[0],
            fast=sum(counts[1:]) / (len(counts) - 1),
            p50_ms=latencies[len(latencies) // 2] * 1000,
            p99_ms=latencies[len(latencies) * 99 // 100] * 1000,
        )


def spf(count: int) -> dict[str, float]:
    """Return the milliseconds that the paths from one of *count* nodes with eight neighbours take."""
    from random import Random

    from amqp_rt.mesh.paths import Paths

    random = Random(count)  # must be reproducible
    names = [f"node-{number:04}" for number in range(count)]
    claims: dict[str, dict[str, int]] = {name: {} for name in names}
    pairs = [(name, names[(at + 1) % count]) for at, name in enumerate(names)]
    while len(pairs) < 4 * count:
        pairs.append(tuple(random.sample(names, 2)))  # type: ignore[arg-type]
    for one, other in pairs:
        claims[one][other] = claims[other][one] = 1
    best = float("inf")
    for name in names[:20]:
        started = time.process_time()
        Paths(claims, name)
        best = min(best, time.process_time() - started)
    return {"spf_ms": best * 1000}


def converge(count: int, tests: str) -> dict[str, float]:
    """Return what a mesh of *count* simulated nodes with eight neighbours needs to learn of changes."""
    sys.path.insert(0, tests)
    from meshes import Mesh as Simulated

    from amqp_rt.mesh import routing

    known: dict[bytes, Any] = {}
    decode = routing.decode_record

    def decoded(data: bytes, limits: Any) -> Any:
        # All engines decode the same octets, of which one process needs the result once.
        if data not in known:
            if len(known) > 20_000:
                known.clear()
            known[data] = decode(data, limits)
        return known[data]

    routing.decode_record = decoded  # type: ignore[assignment]
    mesh = Simulated(count)
    names = mesh.graph(count, 8)

    def until(holds: Any, what: str) -> float:
        began: float = mesh.now
        while not holds():
            if mesh.now - began > 30:
                raise SystemExit(f"{count} nodes: {what} took longer than 30 s")
            mesh.run(0.01)
        return (mesh.now - began) * 1000

    def reached(node: str) -> int:
        return len(mesh.engines[node].lookup("shared"))

    found = {
        "joined_ms": until(
            lambda: all(len(each.paths().costs) == count for each in mesh.engines.values()),
            "joining",
        )
    }
    mesh.run(5.0)
    before = mesh.octets.total()
    mesh.run(2.0)
    found["quiet_bytes"] = (mesh.octets.total() - before) / 2 / count
    before = mesh.sent[5]
    octets = mesh.octets[5]
    mesh.offer(names[0], "shared")
    found["change_ms"] = until(lambda: all(map(reached, names)), "a new address")
    mesh.run(1.0)
    found["change_messages"] = (mesh.sent[5] - before) / len(mesh.lines)
    found["change_bytes"] = (mesh.octets[5] - octets) / (mesh.sent[5] - before)
    for silent in (False, True):
        gone = names[count // 2 + silent]
        mesh.offer(gone, "shared")
        mesh.run(1.0)
        mesh.stop(gone, silent=silent)
        took = until(lambda: all(reached(each) == 1 for each in mesh.engines), "a failure")
        found["silent_ms" if silent else "closed_ms"] = took
    return found
