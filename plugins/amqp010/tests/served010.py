"""A broker with 0-10 and 1.0 at one port of this machine, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from amqp_rt_amqp010 import Front
from client010 import Client, connected

from amqp_rt import Broker


class Served:
    """A broker at a port of this machine."""

    def __init__(self, broker: Broker, front: Front, url: str) -> None:
        self.broker = broker
        self.front = front
        self.url = url
        self.port = int(url.rpartition(":")[2].rstrip("/"))

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        """Connect the project's own client."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with connected(stream, **options) as client:
            yield client


@asynccontextmanager
async def serving(front: Front | None = None, **options: Any) -> AsyncIterator[Served]:
    """Run a broker; without a store, it takes durable messages all the same."""
    front = front or Front()
    volatile = "store" not in options
    async with Broker(fronts=[front], volatile=volatile, **options) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield Served(broker, front, url)
