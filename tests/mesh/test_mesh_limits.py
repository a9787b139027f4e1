"""Bounds of what members and clients can make a node of a mesh hold."""

from __future__ import annotations

import pytest
import trio
from meshed import client, members
from trio.testing import MockClock

from amqp_rt import Limits
from amqp_rt.errors import LinkRefused
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")


@pytest.mark.parametrize("bounded", ["A", "B"])
async def test_mesh_legs_max(bounded: str) -> None:
    """A, which opens the legs, has the bound; or B, which accepts them and opens the next."""
    with trio.fail_after(20):
        async with members() as made:
            for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
                limits = Limits(mesh_legs_max=2) if name == bounded else Limits()
                await made.start(name, *seeds, box_options={"limits": limits})
            for number in range(3):

                async def take(text: str) -> None:
                    pass

                made.boxes["C"].node(f"n{number}")(take)
            for number in range(3):
                await made.meshes["A"].reachable(f"n{number}")
            async with client(made.urls["A"]) as peer:
                first = await peer.sender("n0").__aenter__()
                second = await peer.sender("n1").__aenter__()
                with pytest.raises(LinkRefused):
                    async with peer.sender("n2"):
                        pass
                await first.send("still served")
                await second.send("still served")


async def test_mesh_legs_max_of_links_that_end_here(autojump_clock: MockClock) -> None:
    """B accepts two; links that have ended do not count."""
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", box_options={"limits": Limits(mesh_legs_max=2)})

        async def take(text: str) -> None:
            pass

        for number in range(4):
            made.boxes["B"].node(f"n{number}")(take)
            await made.meshes["A"].reachable(f"n{number}")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.sender("n0") as first, peer.sender("n1") as second:
                with pytest.raises(LinkRefused):
                    async with peer.sender("n2"):
                        pass
                await first.send("still served")
                await second.send("still served")
            # The legs go a minute after the last sender.
            await trio.sleep(70)
            async with peer.sender("n3") as out:
                await out.send("x")
