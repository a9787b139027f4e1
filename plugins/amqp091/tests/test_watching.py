"""Metrics and stuck deliveries of clients of 0-9-1."""

from __future__ import annotations

import logging

import pytest
import trio
from amqp_rt_amqp091 import Front, connect

from amqp_rt import Broker, Limits
from amqp_rt.broker import Queue
from amqp_rt.telemetry.metrics import Metrics
from amqp_rt.telemetry.stuck import StuckWatch


@pytest.mark.req("O3", "O4")
async def test_an_unsettled_delivery_is_found_and_connections_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(stuck_after_s=0.001)
    async with Broker("broker", fronts=[Front()], limits=limits) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        watch = StuckWatch(broker.container)
        async with connect(url, name="mine") as connection, connection.channel() as channel:
            await channel.publish(b"x", key="q")
            async with channel.consume("q") as deliveries:
                delivery = await anext(deliveries)
                for _ in range(2):
                    await watch.look()
                    await trio.sleep(0.01)
                assert broker.container.tallies.stuck["unsettled"] == 1
                page, _ = await Metrics(broker.container).render()
                delivery.ack()
                await channel.declare_queue("q", passive=True)
                await watch.look()
                assert broker.container.tallies.stuck["unsettled"] == 0
    (line,) = [
        each.getMessage()
        for each in caplog.records
        if each.name == "amqp_rt.stuck" and each.levelno == logging.WARNING
    ]
    assert "from 'q' on link" in line
    assert b'amqp_rt_connections{protocol="amqp0-9-1"} 1.0' in page
    assert b'amqp_rt_stuck{what="unsettled"} 1.0' in page
