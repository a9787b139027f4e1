"""A broker process is stopped by SIGTERM and started again: clients of 0-9-1 come back, and lose nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Served

COUNT = 20


class Restarted:
    """A broker with a store, at one port however often it is started."""

    def __init__(self, folder: Path) -> None:
        self._options = ("--store", f"sqlite:{folder / 'store.db'}", "--front", "amqp091")
        self._running = Served(*self._options)
        self._url = self._running.url
        self.port = int(self._url.rpartition(":")[2].rstrip("/"))

    def restart(self) -> None:
        self.stop()
        self._running = Served(*self._options, listen=self._url)

    def stop(self) -> None:
        code, errors = self._running.stop()
        assert code == 0, errors


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Restarted]:
    running = Restarted(tmp_path)
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.req("A10", "N13")
def test_pika_hears_320_and_comes_back(broker: Restarted) -> None:
    pika = pytest.importorskip("pika")
    from pika import exceptions

    received: set[int] = set()
    heard: list[tuple[int, str]] = []
    cancelled: list[Any] = []
    sent = 0
    restarting: threading.Thread | None = None
    while len(received) < COUNT:
        connection = pika.BlockingConnection(
            pika.ConnectionParameters(
                "127.0.0.1", broker.port, connection_attempts=100, retry_delay=0.1
            )
        )
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.add_on_cancel_callback(cancelled.append)

        def take(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            received.add(int(body))
            channel.basic_ack(method.delivery_tag)

        channel.basic_consume("q", take)
        try:
            while len(received) < COUNT:
                if sent == COUNT // 2 == len(received) and restarting is None:
                    restarting = threading.Thread(target=broker.restart)
                    restarting.start()
                if sent < (COUNT if heard else COUNT // 2):
                    properties = pika.BasicProperties(delivery_mode=2)
                    channel.basic_publish("", "q", b"%d" % sent, properties)
                    sent += 1
                connection.process_data_events(time_limit=0.05)
        except exceptions.ConnectionClosedByBroker as closed:
            heard.append((closed.reply_code, closed.reply_text))
        else:
            connection.close()
    assert restarting is not None
    restarting.join()
    assert received == set(range(COUNT))
    ((code, text),) = heard
    assert code == 320
    assert "is stopping" in text
    assert cancelled == []


@pytest.mark.slow
@pytest.mark.req("A10", "N13")
def test_aio_pika_comes_back_by_itself(broker: Restarted) -> None:
    aio_pika = pytest.importorskip("aio_pika")
    received: set[int] = set()

    async def go() -> None:
        url = f"amqp://guest:guest@127.0.0.1:{broker.port}/"
        connection = await aio_pika.connect_robust(url, reconnect_interval=0.1)
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True)
        reconnected = asyncio.Event()
        connection.reconnect_callbacks.add(lambda *_: reconnected.set())

        async def take(message: Any) -> None:
            async with message.process():
                received.add(int(message.body))
                if len(received) == COUNT:
                    everything.set()

        everything = asyncio.Event()
        await queue.consume(take)
        for number in range(COUNT):
            if number == COUNT // 2:
                await asyncio.to_thread(broker.restart)
                await reconnected.wait()
            message = aio_pika.Message(
                b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            await channel.default_exchange.publish(message, "q")
        await everything.wait()
        await connection.close()

    asyncio.run(asyncio.wait_for(go(), 40))
    assert received == set(range(COUNT))
