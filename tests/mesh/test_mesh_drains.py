"""Members that leave while messages pass: none is lost, processed twice or refused; in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from meshed import Members, client, members, until
from trio.testing import MockClock

from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")

#: Member → members that it dials. A and F have the clients, C and E the nodes; B and D are on the way.
SEEDS = {"A": (), "F": ("A",), "B": ("A", "F"), "D": ("A", "F"), "C": ("B", "D"), "E": ("B", "D")}


def serve(made: Members, name: str, done: Counter[str], by: Counter[str]) -> None:
    async def orders(order: str) -> None:
        await trio.sleep(0.005)
        done[order] += 1
        by[name] += 1

    async def price(sku: str) -> str:
        await trio.sleep(0.005)
        by[name] += 1
        return sku

    made.boxes[name].node("orders", slots=8)(orders)
    made.boxes[name].rpc("price", slots=8)(price)


async def test_each_member_leaves_in_turn_under_load(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    done: Counter[str] = Counter()
    by: Counter[str] = Counter()
    async with members(network) as made:
        for name, seeds in SEEDS.items():
            await made.start(name, *seeds)
        for name in ("C", "E"):
            serve(made, name, done, by)
        for name in ("A", "F"):
            await until(lambda name=name: len(made.meshes[name].instances("orders")) == 2)
        sent: list[str] = []
        answered = 0
        stop = trio.Event()

        async def produce(name: str, number: int) -> None:
            nonlocal answered
            async with (
                client(made.urls[name], f"client-{number}", network=network) as peer,
                peer.sender("orders") as out,
            ):
                at = 0
                while not stop.is_set():
                    # Any outcome but accepted raises an exception, and so does a call without an answer.
                    order = f"{name}-{number}-{at}"
                    await out.send(order)
                    sent.append(order)
                    assert await peer.call("price", order, reply=str, within=5) == order
                    answered += 1
                    at += 1

        async def leave(name: str) -> None:
            made.boxes[name].stop()
            await made.ended[name].wait()

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(produce, "A", number)
                nursery.start_soon(produce, "F", number)
            await trio.sleep(1)
            for name in ("B", "D", "C", "E"):
                since = trio.current_time()
                await leave(name)
                # Long before the seconds that a drain may take: nothing was waited for in vain.
                assert trio.current_time() - since < 1.5, name
                before = answered
                await trio.sleep(1)
                assert answered > before + 30, name
                await made.start(name, *SEEDS[name])
                if name in ("C", "E"):
                    serve(made, name, done, by)
                await trio.sleep(3)
            stop.set()
    assert set(done) == set(sent)
    assert set(done.values()) == {1}
    assert len(sent) > 300
    assert min(by["C"], by["E"]) > 50


async def test_leaving_waits_for_what_runs(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A")
        started = trio.Event()

        @made.boxes["B"].rpc("slow")
        async def slow(sku: str) -> str:
            started.set()
            await trio.sleep(1.5)
            return sku

        await made.meshes["A"].reachable("slow")
        answers: list[Any] = []
        async with client(made.urls["A"], network=network) as peer, trio.open_nursery() as nursery:

            async def call() -> None:
                answers.append(await peer.call("slow", "1", reply=str))

            nursery.start_soon(call)
            await started.wait()
            made.boxes["B"].stop()
            await trio.sleep(0.1)
            assert not made.meshes["A"].instances("slow")
        assert answers == ["1"]


async def test_a_caller_leaves_without_waiting_for_links_of_replies(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A")

        async def price(sku: str) -> str:
            return sku

        made.boxes["A"].rpc("price")(price)
        await made.meshes["B"].reachable("price")
        assert await made.meshes["B"].call("price", "1", reply=str, within=5) == "1"
        since = trio.current_time()
        made.boxes["B"].stop()
        await made.ended["B"].wait()
        assert trio.current_time() - since < 1.5
