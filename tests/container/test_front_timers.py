"""Fronts that hold state without a connection: their timers, and their end with the container."""

from __future__ import annotations

import logging
from math import inf

import pytest
import trio
from trio.testing import MockClock

from amqp_rt import Container
from amqp_rt.fronts import LastingFront
from amqp_rt.fronts.amqp10 import Front
from amqp_rt.net.memory import MemoryNetwork


class Lasting(Front):
    """The front of 1.0 with an appointment."""

    def __init__(self) -> None:
        self.deadline = inf
        self.every = inf
        self.ticks: list[float] = []
        self.closed = 0
        self.fault: Exception | None = None
        self.on_deadline = lambda: None

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        self.deadline = now + self.every
        if self.fault is not None:
            raise self.fault

    def close(self) -> None:
        self.closed += 1

    def appoint(self, at: float) -> None:
        self.deadline = at
        self.on_deadline()


class World:
    def __init__(self, *fronts: Front) -> None:
        self.network = MemoryNetwork()
        self.container = Container("us", fronts=fronts, network=self.network)

    async def visit(self) -> None:
        """Connect, and leave."""
        async with (
            Container("them", network=self.network) as them,
            them.connect("memory://us", reconnect=None),
        ):
            pass


@pytest.fixture
def front() -> Lasting:
    front = Lasting()
    assert isinstance(front, LastingFront)
    assert not isinstance(Front(), LastingFront)
    return front


async def test_a_front_is_called_when_it_is_due_although_no_connection_is_there(
    front: Lasting, autojump_clock: MockClock
) -> None:
    world = World(front)
    async with world.container:
        await world.container.listen("memory://us")
        await world.visit()
        front.appoint(trio.current_time() + 60)
        front.appoint(at := trio.current_time() + 5)
        await trio.sleep(100)
        assert front.ticks == [at]
        front.every = 10
        front.appoint(at := trio.current_time() + 1)
        await trio.sleep(25)
        assert front.ticks[1:] == [at, at + 10, at + 20]
        assert not front.closed
    assert front.closed == 1


async def test_a_front_without_connections_is_left_alone(
    front: Lasting, autojump_clock: MockClock
) -> None:
    world = World(front)
    async with world.container:
        front.deadline = 0
        await trio.sleep(10)
    assert (front.ticks, front.closed) == ([], 0)


async def test_connections_have_ended_when_their_front_is_closed(
    front: Lasting, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(front)
    open_then: list[int] = []
    monkeypatch.setattr(front, "close", lambda: open_then.append(len(world.container.connections)))
    async with trio.open_nursery() as nursery:
        async with world.container:
            await world.container.listen("memory://us")
            entered = trio.Event()

            async def stay() -> None:
                async with (
                    Container("them", network=world.network) as them,
                    them.connect("memory://us", reconnect=None) as peer,
                ):
                    entered.set()
                    await peer.wait_changed()

            nursery.start_soon(stay)
            await entered.wait()
            assert len(world.container.connections) == 1
        assert open_then == [0]


async def test_a_front_serves_the_next_container(front: Lasting, autojump_clock: MockClock) -> None:
    for _ in range(2):
        world = World(front)
        async with world.container:
            await world.container.listen("memory://us")
            await world.visit()
            front.appoint(trio.current_time() + 1)
            await trio.sleep(3)
    assert (len(front.ticks), front.closed) == (2, 2)


async def test_a_front_that_fails_is_called_again_after_a_pause(
    front: Lasting, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    front.fault = ValueError("ours")
    front.every = 0
    world = World(front)
    with caplog.at_level(logging.ERROR, "amqp_rt.container"):
        async with world.container:
            await world.container.listen("memory://us")
            await world.visit()
            front.appoint(at := trio.current_time())
            await trio.sleep(2.5)
            assert front.ticks == [at, at + 1, at + 2]
            await world.visit()
    assert "the timer of front 'amqp1.0' failed" in caplog.text
