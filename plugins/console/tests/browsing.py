"""A broker with an HTTP door, and clients of it over real sockets."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import trio
from amqp_rt_console import HttpDoor

from amqp_rt import Access, Broker, Limits, Rights, Rule
from amqp_rt.broker import Queue, Topic

USERS = {"root": "r-password", "ops": "o-password", "shop": "s-password"}
ACCESS = Access(
    [
        Rule("*", Rights.MANAGE, users=("root",)),
        Rule("team/*", Rights.MANAGE, users=("ops",)),
        Rule("team/q", Rights.SEND, users=("shop",)),
    ]
)
#: The attacker waits for its answer, and so does the test.
QUICK = Limits(failed_login_delay_s=0.01, failed_login_delay_max_s=0.01)


class Site:
    """A broker, its door, and the URL of the door."""

    def __init__(self, broker: Broker, door: HttpDoor, url: str) -> None:
        self.broker = broker
        self.door = door
        self.url = url

    @property
    def door_port(self) -> int:
        """Port of the door."""
        return int(self.url.rpartition(":")[2])

    def client(self, user: str = "", **options: Any) -> httpx2.AsyncClient:
        """Return a client, with the credentials of *user* if that is given."""
        if user:
            options["auth"] = (user, USERS[user])
        return httpx2.AsyncClient(base_url=self.url, timeout=10, **options)

    async def wait(self, users: list[str | None]) -> None:
        """Wait until the connections of the broker are those of *users*."""
        with trio.fail_after(5):
            while [each.peer.user for each in self.broker.container.connections] != users:  # noqa: ASYNC110
                await trio.sleep(0.01)

    async def browser(self, client: httpx2.AsyncClient, user: str) -> str:
        """Log *client* in as a browser does, by the form; return the token of its session."""
        form = {"user": user, "password": USERS[user]}
        answer = await client.post("/login", data=form, headers={"origin": self.url})
        assert answer.status_code == 303, answer.text
        page = await client.get("/", headers={"accept": "text/html"})
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert found is not None, page.text
        return found[1]


@asynccontextmanager
async def site(**options: Any) -> AsyncIterator[Site]:
    """Run a broker with users, rules and some nodes, and its door."""
    door_options = {
        name: options.pop(name)
        for name in ("read_only", "hosts", "url", "origin")
        if name in options
    }
    given = {"users": USERS, "access": ACCESS, "limits": QUICK, **options}
    async with Broker("b", **given) as broker:
        await broker.declare(Queue("team/q", max_deliveries=3), Queue("other"), Topic("team/t"))
        url = door_options.pop("url", "http://127.0.0.1:0")
        door = HttpDoor(broker, url, **door_options)
        async with door.open() as bound:
            yield Site(broker, door, bound)
