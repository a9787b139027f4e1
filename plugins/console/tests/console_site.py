"""A broker with users and a console, and pages of it as programs read them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from amqp_rt_console import HttpDoor

from amqp_rt import Access, Broker, Rights, Rule

#: ada may do everything, bob only send and receive at the orders.
USERS = {name: f"secret of {name}" for name in ("ada", "bob")}
ACCESS = Access(
    [
        Rule("*", Rights.MANAGE, users=("ada",)),
        Rule("orders", Rights.SEND | Rights.LISTEN, users=("bob",)),
    ]
)


@asynccontextmanager
async def console(*, read_only: bool = False, **options: Any) -> AsyncIterator[tuple[Broker, str]]:
    """Run a broker with a console; yield it with the URL of the console."""
    broker = Broker(users=dict(USERS), access=ACCESS, **options)
    async with (
        broker,
        HttpDoor(broker, "http://127.0.0.1:0", read_only=read_only).open() as url,
    ):
        yield broker, url
