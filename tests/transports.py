"""A container reached over four transports, which must make no difference (A12)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container

#: ``async with reach(container) as peer``: a connection to a running container.
Reach: TypeAlias = Callable[..., AbstractAsyncContextManager[Connection]]

TRANSPORTS = ["local", "memory", "unix", "tcp"]


def reach_over(transport: str, folder: Path) -> Reach:
    """Return a function that connects over *transport*; *folder* is for sockets."""

    @asynccontextmanager
    async def reach(container: Container, **options: Any) -> AsyncIterator[Connection]:
        if transport == "local":
            async with container.local() as peer:
                yield peer
            return
        url = {
            "memory": "memory://node",
            "unix": f"amqp+unix://{folder}/s",
            "tcp": "amqp://127.0.0.1:0",
        }[transport]
        (bound,) = await container.listen(url)
        async with (
            Container("client", network=container.network) as client,
            client.connect(bound, reconnect=None, **options) as peer,
        ):
            yield peer

    return reach
