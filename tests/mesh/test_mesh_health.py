"""Instances that are not alive get nothing new, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from meshed import client, line, until
from trio.testing import MockClock

from amqp_rt.errors import DeliveryNotAccepted, LinkRefused
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.health import CHECK_S, CHECKED_WITHIN_S
from amqp_rt.net.memory import MemoryNetwork

pytestmark = [pytest.mark.req("A19"), pytest.mark.req("P2")]


async def test_nothing_new_comes_to_an_instance_that_is_not_alive(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        got: list[str] = []
        release = trio.Event()

        def serve(name: str) -> Callable[[str], Awaitable[None]]:
            async def work(text: str) -> None:
                got.append(name)
                if text == "long":
                    await release.wait()

            return work

        for name in ("B", "C"):
            made.boxes[name].node("work", slots=10)(serve(name))
        await until(lambda: len(made.meshes["A"].instances("work")) == 2)
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(10):
                nursery.start_soon(out.send, "long")
            await until(lambda: len(got) == 10)
            assert set(got) == {"B", "C"}
            alive = True
            made.meshes["B"].health("work", lambda: alive)
            alive = False
            await trio.sleep(CHECK_S + 0.1)
            got.clear()
            for _ in range(10):
                await out.send("x")
            assert got == ["C"] * 10
            # What is under way there is answered.
            release.set()
            await trio.sleep(0.1)
            assert out.pending == 0
            alive = True
            await trio.sleep(CHECK_S + 0.1)
            for _ in range(20):
                await out.send("x")
            # C has been slow before.
            assert "B" in got[10:]


@pytest.mark.parametrize("where", ["A", "B"])
async def test_without_another_instance_clients_wait(where: str, autojump_clock: MockClock) -> None:
    """The client of another node, and one of the node itself, which would serve it without the mesh."""
    network = MemoryNetwork()
    rules = [MeshRule("later", absent="wait")]
    async with line("A", "B", network=network, rules=rules) as made:
        got = []

        async def work(text: str) -> None:
            got.append(text)

        for address in ("now", "later"):
            made.boxes["B"].node(address)(work)
            made.meshes["B"].health(address, False)
        await trio.sleep(1)
        async with client(made.urls[where], network=network) as peer:
            with pytest.raises(LinkRefused):
                async with peer.sender("now"):
                    pass
            async with peer.sender("later") as out, trio.open_nursery() as nursery:
                nursery.start_soon(out.send, "x")
                await trio.sleep(30)
                assert not got
                made.meshes["B"].health("later", True)
                await until(lambda: got)


async def test_checks_that_fail_or_take_long_count_as_not_alive(
    autojump_clock: MockClock,
) -> None:
    async with line("A", "B", network=MemoryNetwork()) as made:

        async def work(text: str) -> None:
            pass

        async def slow() -> bool:
            await trio.sleep_forever()
            return True

        async def quick() -> bool:
            await trio.sleep(0.1)
            return True

        def broken() -> bool:
            raise OSError("no route to the database")

        made.boxes["B"].node("work")(work)

        def weight() -> int:
            (found,) = made.meshes["A"].instances("work")
            return found.offer.weight

        await made.meshes["A"].reachable("work")
        for check, wanted in ((broken, 0), (quick, 1), (slow, 0), (True, 1)):
            made.meshes["B"].health("work", check)
            await trio.sleep(CHECKED_WITHIN_S + 0.5)
            assert weight() == wanted, check


async def test_instances_show_health_load_latencies_and_outcomes(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        go = trio.Event()

        async def work(text: str) -> None:
            if text == "stuck":
                await go.wait()
            else:
                await trio.sleep(0.25)
            if text == "bad":
                raise ValueError("out of order")

        made.boxes["C"].node("work", slots=3)(work)
        await made.meshes["A"].reachable("work")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(4):
                await out.send("x")
            with pytest.raises(DeliveryNotAccepted):
                await out.send("bad")
            nursery.start_soon(out.send, "stuck")
            await trio.sleep(5)
            (found,) = made.meshes["A"].instances("work")
            assert (found.node, found.cost, found.path) == ("C", 2, ("B", "C"))
            assert (found.alive, found.slots, found.load) == (True, 3, 1)
            assert (found.in_flight, found.stuck, found.ejected_s) == (1, 0, 0.0)
            assert found.outcomes == {"accepted": 4, "modified": 1}
            assert found.latency_p50_s == pytest.approx(0.25, abs=0.05)
            assert found.latency_p99_s == pytest.approx(0.25, abs=0.05)
            await trio.sleep(6)
            assert made.meshes["A"].instances("work")[0].stuck == 1
            go.set()
            await trio.sleep(2)
            (found,) = made.meshes["A"].instances("work")
            assert (found.in_flight, found.stuck, found.load) == (0, 0, 0)
            made.meshes["C"].health("work", False)
            await trio.sleep(1)
            assert not made.meshes["A"].instances("work")[0].alive
