"""Failures and adversaries of a mesh, in virtual time: the rows that have no file of their own.

| failure, adversary | tests |
| --- | --- |
| partition, and its end | ``test_mesh_silence``, ``test_routing``, ``test_mesh_chaos``, ``test_mesh_twins`` |
| a line that works one way | ``test_mesh_silence``, ``test_routing``, ``test_mesh_chaos`` |
| flapping at 5 Hz | ``test_mesh_silence``, ``test_routing``, ``test_mesh_chaos`` |
| a program blocked for 2 s | here, ``test_routing``, ``test_mesh_twins`` (stopped by a signal) |
| a node killed, or silent, at each frame | ``test_mesh_kills``, ``test_splices``, ``test_mesh_twins`` |
| slow consumer, slow branch, stream that is not read | here, ``test_fans``, ``test_mesh_lines`` |
| a destination that fails fast | here, ``test_balance``, ``test_fans`` |
| misadvertising origin, or edge | ``test_mesh_admission``, ``test_routing`` |
| poisoned records: fuzzed, oversized | here, ``test_records``, ``fuzz_targets.mesh_records`` |
| poisoned records: last number, forged origin, 100,000 in a second | ``test_routing`` |
| route too long, looping, from no member | ``test_mesh_routes`` |
| an id that is used again, namesakes | ``test_routing``, ``test_mesh_dialling`` |
| clocks wrong by a day | ``test_routing``, ``test_mesh_chaos`` |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest
import trio
from meshed import client, line, members, until
from trio.testing import MockClock

from amqp_rt import Reject
from amqp_rt.errors import CallFailed
from amqp_rt.limits import KIB, MIB
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.records import encode_record
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")


async def test_no_leg_breaks_when_the_program_was_blocked(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        gate = trio.Event()

        @made.boxes["C"].node("orders", slots=10)
        async def orders(order: str) -> None:
            await gate.wait()

        await made.meshes["A"].reachable("orders")
        async with client(made.urls["A"], network=network) as peer, peer.sender("orders") as out:
            receipts = [out.send_nowait(str(number)) for number in range(5)]
            await trio.sleep(0.5)
            (leg,) = made.meshes["A"]._host._routed["orders", ""].fan.legs
            autojump_clock.jump(2.0)
            await trio.sleep(3)
            gate.set()
            for receipt in receipts:
                await receipt.accepted()
            assert made.meshes["A"]._host._routed["orders", ""].fan.legs == [leg]
            for mesh in made.meshes.values():
                assert {each.flaps.count for each in mesh._engine.lines.values()} == {0}


async def test_only_the_address_of_a_slow_consumer_waits(autojump_clock: MockClock) -> None:
    """Senders of "slow" have twice as much to send as a hop may hold."""
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        gate = trio.Event()

        @made.boxes["C"].node("slow", slots=3, prefetch=0)
        async def slow(body: bytes) -> None:
            await gate.wait()

        @made.boxes["C"].rpc("quick")
        async def quick(number: int) -> int:
            return number

        await made.meshes["A"].reachable("slow")
        await made.meshes["A"].reachable("quick")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("slow", max_pending=1_000) as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(256):
                nursery.start_soon(out.send, bytes(64 * KIB))
            await trio.sleep(2)
            for number in range(20):
                assert await peer.call("quick", number, within=0.1) == number
            fan = made.meshes["A"]._host._routed["slow", ""].fan
            # The sender has the credit of the destination, so that few messages are on their way.
            assert fan.waiting + sum(leg.standing.outstanding for leg in fan.legs) <= 6
            gate.set()


async def test_a_slow_branch_holds_up_its_address_only(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast")]
    async with line("A", "B", "C", network=network, rules=rules) as made:
        gate, got = trio.Event(), 0

        async def take(body: bytes) -> None:
            nonlocal got
            got += 1

        async def wait(body: bytes) -> None:
            await gate.wait()

        made.boxes["B"].node("news", slots=100)(take)
        made.boxes["C"].node("news", slots=2, prefetch=0)(wait)

        @made.boxes["C"].rpc("quick")
        async def quick(number: int) -> int:
            return number

        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        await made.meshes["A"].reachable("quick")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("news", max_pending=1_000) as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(100):
                nursery.start_soon(out.send, bytes(64 * KIB))
            await trio.sleep(2)
            assert got == 2
            (tree,) = made.meshes["A"]._host._trees
            assert tree._multicast is not None
            assert tree._multicast.held <= 8 * MIB
            for number in range(20):
                assert await peer.call("quick", number, within=0.1) == number
            gate.set()
        assert got == 100


async def test_a_stream_that_is_not_read_holds_up_nothing_else(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        sent = 0

        @made.boxes["C"].rpc("rows")
        async def rows(count: int) -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(count):
                yield bytes(32 * KIB)
                sent += 1

        @made.boxes["C"].rpc("quick")
        async def quick(number: int) -> int:
            return number

        await made.meshes["A"].reachable("rows")
        await made.meshes["A"].reachable("quick")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.stream("rows", 2_000, reply=bytes, credit=20) as replies:
                await anext(replies)
                await trio.sleep(2)
                stood = sent
                for number in range(20):
                    assert await peer.call("quick", number, within=0.1) == number
                await trio.sleep(2)
                # Each node of the way, and the caller, hold what their windows allow.
                assert sent == stood < 3 * 8 * MIB // (32 * KIB)
            assert await peer.call("quick", 1, within=0.1) == 1


@pytest.mark.parametrize(
    "failure", [Reject("no database", condition="amqp:internal-error"), OSError("no database")]
)
async def test_few_calls_fail_when_one_of_three_instances_fails_fast(
    failure: Exception, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "A"), ("D", "A")):
            await made.start(name, *seeds)

        async def price(sku: str) -> str:
            await trio.sleep(0.01)
            return sku

        async def broken(sku: str) -> str:
            raise failure

        made.boxes["B"].rpc("price")(broken)
        made.boxes["C"].rpc("price")(price)
        made.boxes["D"].rpc("price")(price)
        await until(lambda: len(made.meshes["A"].instances("price")) == 3)
        failed = 0
        async with client(made.urls["A"], network=network) as peer:

            async def call(number: int) -> None:
                nonlocal failed
                for _ in range(100):
                    try:
                        await peer.call("price", str(number))
                    except CallFailed:
                        failed += 1
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(call, number)
        assert 1 <= failed <= 50


async def test_records_that_are_garbled_change_nothing(autojump_clock: MockClock) -> None:
    """B is a member that sends its own records with octets changed, cut short, or far too large."""
    network = MemoryNetwork()
    luck = Random(7)
    async with line("A", "B", "C", network=network) as made:

        @made.boxes["C"].rpc("quick")
        async def quick(number: int) -> int:
            return number

        await made.meshes["A"].reachable("quick")
        engine = made.meshes["A"]._engine
        known = engine.database.versions()
        to_a = made.meshes["B"]._host._ways.neighbours["A"]
        records = [
            encode_record(links)
            for name in "AC"
            if (links := made.meshes["B"]._engine.database.links(name)) is not None
        ]
        for number in range(2_000):
            data = bytearray(luck.choice(records))
            # Behind the head of the list and its kind, so that most are read to the end.
            at = luck.randrange(5, len(data))
            if number % 3:
                data[at] ^= 1 << luck.randrange(8)
            else:
                del data[at:]
            to_a.send(bytes(data))
            if number % 50 == 0:
                await trio.sleep(0.02)
        to_a.send(bytes(64 * KIB))
        await trio.sleep(3)
        assert engine.refused > 500
        # Members that a flipped bit has invented have no line that both ends claim.
        assert engine.database.versions().keys() == known.keys()
        assert set(engine.paths().costs) == {"A", "B", "C"}
        assert made.meshes["A"]._engine.lines["B"].state.value == "up"
        assert made.way("A", "quick") == ("B", "C")
        async with client(made.urls["A"], network=network) as peer:
            assert await peer.call("quick", 5, within=1) == 5
