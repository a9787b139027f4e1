"""Deliveries of 0-10 that no outcome ends are found by the watch over what is stuck."""

from __future__ import annotations

import logging

import pytest
import trio
from served010 import serving

from amqp_rt import Limits, connect
from amqp_rt.telemetry.stuck import StuckWatch


@pytest.mark.req("O4", "D7")
async def test_the_oldest_delivery_without_an_outcome_is_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "amqp_rt.stuck")
    async with serving(limits=Limits(stuck_after_s=0.05)) as served, served.client() as client:
        container = served.broker.container
        watch = StuckWatch(container)

        async def stuck() -> list[str]:
            """Return what is logged by a round, some time after the one before."""
            caplog.clear()
            await trio.sleep(0.1)
            await watch.look()
            return [each.getMessage() for each in caplog.records]

        session = await client.session(b"s")
        for name in ("first", "second", "browsed"):
            await session.call("queue.declare", queue=name)
            session.transfer("", b"text", key=name)
        # Of the first subscription nothing is held, and what the third one has is a copy.
        await session.subscribe("first", "1")
        await session.done(session.accept((await session.message()).id))
        await session.subscribe("second", "2")
        held = await session.message()
        await session.subscribe("browsed", "3", acquire_mode=1)
        await session.message()
        assert await stuck() == []
        (line,) = await stuck()
        assert line.startswith("stuck: unsettled for 0 s: delivery ")
        assert "from 'second'" in line
        assert container.tallies.stuck["unsettled"] == 1
        async with connect(served.url) as operator:
            ages = [
                each["oldest_unsettled_s"]
                async for each in operator.management().query("amqp_rt.session")
            ]
            assert len([each for each in ages if each is not None and each >= 0.1]) == 1
        # One episode is one line.
        assert await stuck() == []
        await session.done(session.accept(held.id))
        assert await stuck() == []
        assert container.tallies.stuck["unsettled"] == 0
