"""Legs for high priorities and for messages that are streamed, opened when they are needed; in virtual time: A – B – C."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from meshed import Members, client, line, until
from trio.testing import MockClock

from amqp_rt import Message
from amqp_rt.limits import KIB, MIB
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.hops import HIGH, LOW, STREAMS
from amqp_rt.mesh.routed import KIND_IDLE_S
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED

pytestmark = pytest.mark.req("P2")


def serve(made: Members, *, pause_s: float = 0, slots: int = 1, prefetch: int = 0) -> list[int]:
    """Let C read the bodies of messages to *files*, slowly; return the sizes of those that it has read."""
    got: list[int] = []

    @made.boxes["C"].node("files", streaming=True, slots=slots, prefetch=prefetch)
    async def files(body: AsyncIterator[bytes]) -> None:
        size = 0
        async for chunk in body:
            size += len(chunk)
            await trio.sleep(pause_s)
        got.append(size)

    return got


def kinds(made: Members, address: str = "files") -> list[str]:
    """Return the kinds of the legs that A has, in order."""
    found = made.meshes["A"]._host.legs_to(address)
    return sorted(leg.kind for legs in found.values() for leg in legs)


def sessions(made: Members) -> list[int]:
    """Return the numbers of sessions of the members' connections with each other."""
    return [
        len(each.connection.engine.sessions)
        for name in "ABC"
        for each in made.meshes[name]._host._ways.neighbours.values()
    ]


async def send(out: Any, size: int, **options: Any) -> None:
    assert await out.send(Message(bytes(size), **options)) == ACCEPTED


async def test_a_small_message_passes_a_stream(autojump_clock: MockClock) -> None:
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        got = serve(made, pause_s=0.1, slots=8, prefetch=8)
        await made.meshes["A"].reachable("files")
        async with (
            client(made.urls["A"], network=made.network) as peer,
            client(made.urls["A"], "other", network=made.network) as other,
            peer.sender("files") as out,
            other.sender("files") as small,
        ):
            await small.send(b"x")
            assert kinds(made) == [LOW]
            before = sessions(made)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, out, 10 * MIB)
                await trio.sleep(1)
                began = trio.current_time()
                for _ in range(5):
                    await small.send(b"y")
                assert trio.current_time() - began < 1
                assert got == [1] * 6
                assert kinds(made) == [LOW, STREAMS]
                # A second one has a leg and a session of its own.
                nursery.start_soon(send, small, 100 * KIB)
                await until(lambda: kinds(made) == [LOW, STREAMS, STREAMS])
                await until(lambda: len(got) == 7)
            assert got == [1] * 6 + [100 * KIB, 10 * MIB]
            await trio.sleep(2 * KIND_IDLE_S)
            assert kinds(made) == [LOW]
            assert sessions(made) == before
            # And again.
            await send(out, MIB)
            assert kinds(made) == [LOW, STREAMS]


async def test_high_priority_has_legs_of_its_own(autojump_clock: MockClock) -> None:
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        got = serve(made)
        await made.meshes["A"].reachable("files")
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("files") as out,
        ):
            await send(out, 1)
            before = sessions(made)
            for priority in (0, 4):
                await send(out, 2, priority=priority)
            assert kinds(made) == [LOW]
            for priority in (5, 9, 5):
                await send(out, 3, priority=priority)
            assert kinds(made) == [HIGH, LOW]
            assert got == [1, 2, 2, 3, 3, 3]
            await trio.sleep(KIND_IDLE_S / 2)
            await send(out, 3, priority=7)
            await trio.sleep(KIND_IDLE_S / 2 + 2)
            assert kinds(made) == [HIGH, LOW], "used within the time"
            await trio.sleep(KIND_IDLE_S)
            assert kinds(made) == [LOW]
            assert sessions(made) == before


async def test_a_node_without_prefetch_is_not_blocked_by_idle_legs(
    autojump_clock: MockClock,
) -> None:
    """Its only slot is lent to one of the legs at a time."""
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        got: list[int] = []

        @made.boxes["C"].node("files", slots=1)
        async def files(body: bytes) -> None:
            got.append(len(body))

        await made.meshes["A"].reachable("files")
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("files") as out,
        ):
            for priority in (4, 9, 4, 4, 9, 9, 4):
                with trio.fail_after(10):
                    await send(out, priority, priority=priority)
            await send(out, 100 * KIB)
        assert got == [4, 9, 4, 4, 9, 9, 4, 100 * KIB]


async def test_the_only_slot_is_lent_again_after_a_long_stream(autojump_clock: MockClock) -> None:
    """The idle leg for small messages gets it first, and holds what the leg for streams needs."""
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        got = serve(made, pause_s=2)
        await made.meshes["A"].reachable("files")
        for _ in range(3):
            async with (
                client(made.urls["A"], network=made.network) as peer,
                peer.sender("files") as out,
            ):
                with trio.fail_after(30):
                    await send(out, 200 * KIB)
        assert got == [200 * KIB] * 3
        assert kinds(made) == [LOW, STREAMS]


async def test_an_order_of_all_messages_needs_one_leg(autojump_clock: MockClock) -> None:
    rules = [MeshRule("files", ordered=True)]
    async with line("A", "B", "C", network=MemoryNetwork(), rules=rules) as made:
        got = serve(made)
        await made.meshes["A"].reachable("files")
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("files") as out,
        ):
            receipts = [
                out.send_nowait(Message(bytes(size), priority=priority))
                for size, priority in ((1, 4), (100 * KIB, 4), (2, 9), (3, 0))
            ]
            for each in receipts:
                assert await each.outcome() == ACCEPTED
            assert kinds(made) == [LOW]
        assert got == [1, 100 * KIB, 2, 3]
