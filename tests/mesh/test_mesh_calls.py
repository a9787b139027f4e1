"""Requests between members with brokers, whose clients get their replies from the member that they are connected with."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from meshed import client, members
from peer_programs import PeerPrograms
from trio.testing import MockClock

from amqp_rt import Message
from amqp_rt.errors import DeliveryRejected, LinkRefused
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P1")

#: Broker that makes a queue of any address that is used, as that of ``amqp-rt serve --dev``.
CREATING = {"volatile": True, "auto_create": ("queue:*",)}


async def greet(name: str | None = None) -> str:
    return f"hello {name}"


@pytest.mark.parametrize("asked", [None, CREATING], ids=["plain", "broker"])
@pytest.mark.parametrize("asking", [{"volatile": True}, CREATING], ids=["declaring", "creating"])
async def test_replies_reach_clients_of_a_broker(
    asking: dict[str, Any], asked: dict[str, Any] | None, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A", broker=asking)
        await made.start("B", "A", broker=asked)
        made.boxes["B"].rpc("greet")(greet)
        await made.meshes["A"].reachable("greet")
        for member in ("A", "B"):
            async with client(made.urls[member], network=network) as peer:
                assert await peer.call("greet", reply=str, within=2) == "hello None"
                assert await peer.call("greet", "ann", reply=str, within=2) == "hello ann"
        assert await made.meshes["A"].call("greet", "bob", reply=str, within=2) == "hello bob"
        assert not [each for each in made.brokers["A"].nodes() if "$mesh" in each.name]


@pytest.mark.req("P4")
async def test_no_queue_is_made_at_the_address_of_a_client_that_has_left(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A", broker=CREATING)
        await made.start("B", "A")
        asked, left = trio.Event(), trio.Event()

        async def late(text: str) -> str:
            asked.set()
            await left.wait()
            return text

        made.boxes["B"].rpc("late")(late)
        await made.meshes["A"].reachable("late")
        address = ""

        async def call() -> None:
            nonlocal address
            async with (
                client(made.urls["A"], network=network) as peer,
                peer.receiver(dynamic=True) as replies,
                peer.sender("late") as out,
            ):
                address = str(replies.address)
                # Others cannot receive there.
                with pytest.raises(LinkRefused, match="not-found"):
                    async with peer.receiver(address):
                        pass
                await out.send(Message("x", reply_to=address, message_id="1"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await asked.wait()
            assert address.startswith("$mesh/A/")
            nursery.cancel_scope.cancel()
        left.set()
        await trio.sleep(10)
        async with client(made.urls["A"], network=network) as peer:
            with pytest.raises(LinkRefused, match="not-found"):
                async with peer.sender(address):
                    pass
            async with peer.sender() as out:
                with pytest.raises(DeliveryRejected, match="not-found"):
                    await out.send(Message("x", to=address))
        assert not [each for each in made.brokers["A"].nodes() if "$mesh" in each.name]


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.peer("rhea")
async def test_rhea_is_answered_by_another_member(rhea: list[str]) -> None:
    async with members() as made:
        await made.start("A", broker=CREATING)
        await made.start("B", "A", broker=CREATING)
        made.boxes["B"].rpc("greet")(greet)
        await made.meshes["A"].reachable("greet")
        for member in ("A", "B"):
            result = await PeerPrograms("rhea", rhea).run(
                "rpc",
                port=int(made.urls[member].rpartition(":")[2]),
                address="greet",
                requests=[["string", "ann"], ["string", "bob"]],
            )
            bodies = [each["body"][1] for each in result["replies"]]
            assert bodies == [["string", "hello ann"], ["string", "hello bob"]]
