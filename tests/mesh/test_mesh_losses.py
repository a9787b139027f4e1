"""Containers with two ways between the ends: a node on the way is killed, and leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from meshed import Members, client, members, until

from amqp_rt import Connection
from amqp_rt.errors import DeliveryNotAccepted

pytestmark = pytest.mark.req("P3")


@asynccontextmanager
async def ring() -> AsyncIterator[tuple[Members, Connection]]:
    """Connect A with C over B, and over D; and a client with A."""
    async with members() as made:
        await made.start("A")
        await made.start("B", "A")
        await made.start("D", "A")
        await made.start("C", "B", "D")
        async with client(made.urls["A"]) as peer:
            yield made, peer


async def test_another_way_is_used_when_a_node_on_the_way_is_killed() -> None:
    with trio.fail_after(20):
        async with ring() as (made, peer):
            done: list[str] = []

            @made.boxes["C"].node("orders")
            async def orders(order: str) -> None:
                done.append(order)

            await until(lambda: made.way("A", "orders") == ("B", "C"))
            async with peer.sender("orders") as out:
                await out.send("before")
                made.kill["B"]()
                since = trio.current_time()
                accepted, failed = ["before"], []
                for number in range(20):
                    try:
                        await out.send(str(number))
                        accepted.append(str(number))
                    except DeliveryNotAccepted:
                        failed.append(str(number))
                assert made.way("A", "orders") == ("D", "C")
                assert trio.current_time() - since < 1
            # What was accepted was processed, once; what was under way has an outcome that says so.
            assert set(accepted) <= set(done) <= {*accepted, *failed}
            assert len(done) == len(set(done))
            assert len(failed) <= 1


async def test_a_call_under_way_over_a_killed_node_fails_and_the_next_one_succeeds() -> None:
    with trio.fail_after(20):
        async with ring() as (made, peer):
            started, go_on = trio.Event(), trio.Event()

            @made.boxes["C"].rpc("price")
            async def price(sku: str) -> str:
                started.set()
                await go_on.wait()
                return sku

            await until(lambda: made.way("A", "price") == ("B", "C"))
            async with trio.open_nursery() as nursery:

                async def call() -> None:
                    with pytest.raises(DeliveryNotAccepted):
                        await peer.call("price", "1")

                nursery.start_soon(call)
                await started.wait()
                made.kill["B"]()
            go_on.set()
            assert await peer.call("price", "2", within=5) == "2"


async def test_a_node_that_leaves_loses_refuses_and_doubles_nothing() -> None:
    """B leaves while messages pass over it, then C's twin takes over: section "Drain"."""
    with trio.fail_after(30):
        async with ring() as (made, peer):
            done: dict[str, list[str]] = {"C": [], "D": []}

            def serve(name: str) -> None:
                async def orders(order: str) -> None:
                    await trio.sleep(0.002)
                    done[name].append(order)

                made.boxes[name].node("orders", slots=8)(orders)

            serve("C")
            serve("D")
            await until(lambda: len(made.meshes["A"].instances("orders")) == 2)
            sent: list[str] = []
            stopping = False

            async def produce(number: int) -> None:
                async with peer.sender("orders") as out:
                    at = 0
                    while not stopping:
                        order = f"{number}-{at}"
                        await out.send(order)
                        sent.append(order)
                        at += 1

            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(produce, number)
                await trio.sleep(0.5)
                made.boxes["C"].stop()
                await trio.sleep(1)
                assert "C" not in [each.node for each in made.meshes["A"].instances("orders")]
                stopping = True
            both = done["C"] + done["D"]
            assert sorted(both) == sorted(sent)
            assert done["C"]
            assert done["D"]
