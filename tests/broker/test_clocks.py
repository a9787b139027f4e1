"""The clock of a broker that is given none: the system's, or the event loop's if that is virtual."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.broker.clocks import RunClock


@pytest.mark.slow
@pytest.mark.req("B16")
async def test_times_to_live_and_locks_follow_a_virtual_clock(autojump_clock: Any) -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("work", dead_letter="dead"), Queue("locked", lock_s=60))
        async with peer.sender("work") as out:
            await out.send("short", ttl_s=1800)
            await out.send("long", ttl_s=7200)
        async with peer.sender("locked") as out:
            await out.send("held")
        async with peer.receiver("locked", credit=1) as messages:
            await messages.receive()
            await trio.sleep(61)
            assert broker.stats("locked").acquired == 0
        await trio.sleep(3600 - 61)
        assert broker.stats("work").available == 1
        assert broker.stats("dead").available == 1


async def test_delays_follow_a_clock_that_a_test_moves(mock_clock: Any) -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("later"))
        annotations = {"x-opt-delivery-delay": 3_600_000}
        async with peer.sender("later") as out:
            await out.send("an hour", message_annotations=annotations)
        for hours, available in ((0.9, 0), (0.2, 1)):
            mock_clock.jump(hours * 3600)
            await trio.testing.wait_all_tasks_blocked()
            broker.host.sweep()
            assert broker.stats("later").available == available


def test_virtual_time_goes_on_from_that_of_the_system() -> None:
    clock = RunClock()
    before = clock.wall(), clock.monotonic()

    async def run() -> tuple[float, float]:
        clock.begin()
        await trio.sleep(100)
        clock.begin()
        await trio.sleep(900)
        return clock.wall(), clock.monotonic()

    virtual = trio.testing.MockClock(autojump_threshold=0)
    after = trio.run(run, clock=virtual)
    for earlier, later in zip(before, after, strict=True):
        assert 1000 <= later - earlier < 1100
    # The clock can be read after the event loop has ended, and continues with the next one.
    assert (clock.wall(), clock.monotonic()) == after

    async def really() -> None:
        clock.begin()

    trio.run(really)
    earlier = time.time()
    assert earlier <= clock.wall() <= time.time()
    assert clock.monotonic() <= time.monotonic()


@pytest.mark.slow
async def test_a_clock_that_is_given_is_followed(autojump_clock: Any) -> None:
    class Stopped:
        def monotonic(self) -> float:
            return 5.0

        def wall(self) -> float:
            return 1_700_000_000.0

    async with Broker(clock=Stopped()) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        async with peer.sender("work") as out:
            await out.send("stays", ttl_s=1)
        await trio.sleep(3600)
        assert broker.stats("work").available == 1
