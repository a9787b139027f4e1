"""Lines that fail without a word, in virtual time: a node on the way is silent, a line works one way, flaps, heals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
from meshed import Members, client, members, until
from trio.testing import MockClock

from amqp_rt import Connection
from amqp_rt.errors import AmqpError, DeliveryNotAccepted
from amqp_rt.mesh.adjacency import LineState
from amqp_rt.testing.faults import Slow
from amqp_rt.testing.network import SimulatedNetwork, SimulationTrace

pytestmark = pytest.mark.req("P3")


class Ring:
    """A reaches C over B and over D; a client is connected with A."""

    def __init__(self, network: SimulatedNetwork, made: Members, peer: Connection) -> None:
        self.network = network
        self.made = made
        self.peer = peer


@asynccontextmanager
async def ring() -> AsyncIterator[Ring]:
    async with trio.open_nursery() as nursery:
        trace = SimulationTrace()
        network = SimulatedNetwork([], Random, trace, nursery)
        async with members(network.door("unused")) as made:
            for name, *seeds in (("A",), ("B", "A"), ("D", "A"), ("C", "B", "D")):
                await made.start(name, *seeds, box_options={"network": network.door(name)})
            door = network.door("client")
            async with client(made.urls["A"], network=door) as peer:
                yield Ring(network, made, peer)
        nursery.cancel_scope.cancel()


async def test_new_legs_avoid_a_silent_node_within_a_second(autojump_clock: MockClock) -> None:
    async with ring() as found:
        made, done = found.made, []

        @made.boxes["C"].node("orders")
        async def orders(order: str) -> None:
            done.append(order)

        await until(lambda: made.way("A", "orders") == ("B", "C"))
        async with found.peer.sender("orders") as out:
            await out.send("before")
            with found.network.apart("B"):
                since = trio.current_time()
                await until(lambda: made.way("A", "orders") == ("D", "C"))
                assert trio.current_time() - since <= 1
                # Messages under way over B wait for its outcome, or its loss; new ones take D.
                await trio.sleep(0.1)
                await out.send("meanwhile")
                assert trio.current_time() - since <= 1.5
                await trio.sleep(10)
                # B was lost in the meantime, and is connected again.
            await until(lambda: "B" in made.meshes["A"]._host._ways.neighbours)
            await until(lambda: len(made.meshes["A"]._engine.paths().costs) == 4)
        assert done == ["before", "meanwhile"]


async def test_a_line_that_works_one_way_is_not_used(autojump_clock: MockClock) -> None:
    async with ring() as found:
        made = found.made

        @made.boxes["C"].rpc("price")
        async def price(sku: str) -> str:
            return sku

        await until(lambda: made.way("A", "price") == ("B", "C"))
        assert await found.peer.call("price", "1") == "1"
        with found.network.mute("B", to="A"):
            await trio.sleep(1)
            assert made.way("A", "price") == ("D", "C")
            assert await found.peer.call("price", "2", within=1) == "2"
            await trio.sleep(10)
            assert await found.peer.call("price", "3", within=1) == "3"


async def test_a_slow_line_full_of_data_is_not_silent(autojump_clock: MockClock) -> None:
    """A reply takes six seconds, and the hellos behind it as long: more than the five after which a line is lost."""
    async with trio.open_nursery() as nursery:
        slow = [Slow(connection=0, octets_per_s=10_000, back=back) for back in (True, False)]
        network = SimulatedNetwork(slow, Random, SimulationTrace(), nursery)
        async with members(network.door("unused")) as made:
            await made.start("A", box_options={"network": network.door("A")})
            await made.start("B", "A", box_options={"network": network.door("B")})

            @made.boxes["B"].rpc("large")
            async def large(size: int) -> bytes:
                return bytes(size)

            await until(lambda: made.way("A", "large") == ("B",))
            sizes: list[int] = []

            async def call() -> None:
                sizes.append(len(await made.meshes["A"].call("large", 60_000, reply=bytes)))

            nursery.start_soon(call)
            while not sizes:
                assert made.way("A", "large") == ("B",)
                assert made.meshes["A"]._engine.lines["B"].state is LineState.UP
                await trio.sleep(0.05)
            assert trio.current_time() > 6
            assert sizes == [60_000]
        nursery.cancel_scope.cancel()


async def test_both_sides_of_a_partition_serve_what_they_have_and_heal(
    autojump_clock: MockClock,
) -> None:
    async with ring() as found:
        made = found.made
        for name in ("B", "C"):
            made.boxes[name].rpc(f"at/{name}")(_where(name))
        await made.meshes["A"].reachable("at/C")
        with found.network.apart("C"):
            await trio.sleep(8)
            assert not made.meshes["A"].instances("at/C")
            assert await found.peer.call("at/B", within=1, reply=str) == "B"
            assert await made.meshes["C"].call("at/C", within=1, reply=str) == "C"
            assert not made.meshes["C"].instances("at/B")
        with trio.fail_after(15):
            await made.meshes["A"].reachable("at/C")
            await made.meshes["C"].reachable("at/B")
            await trio.sleep(1)
        assert await found.peer.call("at/C", within=2, reply=str) == "C"


def _where(name: str) -> Callable[[], Awaitable[str]]:
    async def where() -> str:
        return name

    return where


async def test_other_legs_stand_while_a_line_flaps(autojump_clock: MockClock) -> None:
    async with ring() as found:
        made = found.made

        @made.boxes["C"].node("orders")
        async def orders(order: str) -> None:
            pass

        await until(lambda: made.way("A", "orders") == ("B", "C"))
        failed = accepted = 0
        async with found.peer.sender("orders") as out:
            await out.send("x")
            for _ in range(25):
                # 5 Hz
                found.network.cut("B")
                for _ in range(10):
                    try:
                        await out.send("x")
                        accepted += 1
                    except DeliveryNotAccepted:
                        failed += 1
                    await trio.sleep(0.02)
            legs = made.meshes["A"]._host._routed["orders", ""].fan.legs
            assert [each.link.attached for each in legs] == [True]
        assert failed <= 2
        assert accepted >= 240


async def test_a_silent_node_loses_nothing_that_was_accepted(autojump_clock: MockClock) -> None:
    """B vanishes while messages pass it: each message is accepted and processed, or has a true outcome."""
    async with ring() as found:
        made, done = found.made, []

        @made.boxes["C"].node("orders", slots=4)
        async def orders(order: str) -> None:
            await trio.sleep(0.01)
            done.append(order)

        await until(lambda: made.way("A", "orders") == ("B", "C"))
        accepted: set[str] = set()
        doubtful: set[str] = set()
        async with found.peer.sender("orders") as out:

            async def produce(number: int) -> None:
                for at in range(60):
                    order = f"{number}-{at}"
                    try:
                        await out.send(order)
                        accepted.add(order)
                    except AmqpError:
                        doubtful.add(order)

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(produce, number)
                await trio.sleep(0.2)
                found.network.drop("B", silent=True)
                made.kill["B"]()
        assert len(accepted) + len(doubtful) == 240
        assert accepted <= set(done)
        assert len(done) == len(set(done))
        # At most what C had slots for, and what was on the way.
        assert len(doubtful) <= 8
