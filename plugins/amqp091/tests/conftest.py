"""A broker with 0-9-1 and 1.0 at one port, and clients in threads beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest
import trio
from amqp_rt_amqp091 import Front
from references import no_collector  # noqa: F401 (a fixture)

from amqp_rt import Broker

T = TypeVar("T")


class Served:
    """A broker at a port of this machine."""

    def __init__(self, broker: Broker, url: str) -> None:
        self.broker = broker
        self.url = url
        self.port = int(url.rpartition(":")[2].rstrip("/"))

    async def run(self, client: Callable[..., T], *args: Any, within: float = 30) -> T:
        """Run *client*, which blocks, in a thread for at most *within* seconds; return its result."""
        with trio.fail_after(within):
            return await trio.to_thread.run_sync(client, *args, abandon_on_cancel=True)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with Broker(fronts=[Front()], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield Served(broker, url)
