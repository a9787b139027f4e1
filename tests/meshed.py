"""Containers that are members of a mesh, over real sockets on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from amqp_rt import Broker, Connection, Container, Peer
from amqp_rt.mesh import Mesh
from amqp_rt.net.memory import MemoryNetwork


class Members:
    """Containers by name, with what is needed to use and to end them."""

    def __init__(self, network: MemoryNetwork | None) -> None:
        self.network = network
        self.boxes: dict[str, Container] = {}
        self.meshes: dict[str, Mesh] = {}
        #: Those of members that were started with ``broker``.
        self.brokers: dict[str, Broker] = {}
        self.urls: dict[str, str] = {}
        #: End a container at once.
        self.kill: dict[str, Callable[[], None]] = {}
        #: Set when a container has ended.
        self.ended: dict[str, trio.Event] = {}
        self._nursery: trio.Nursery

    async def start(
        self,
        name: str,
        *seeds: str,
        box_options: Any = None,
        broker: dict[str, Any] | None = None,
        **options: Any,
    ) -> Container:
        """Start a container that dials *seeds*, which are names; it does not say where it can be dialled.

        With *broker*, the options of one, it has a broker.
        """
        await self._nursery.start(self._run, name, seeds, box_options or {}, broker, options)
        return self.boxes[name]

    async def _run(
        self,
        name: str,
        seeds: tuple[str, ...],
        box_options: dict[str, Any],
        broker_options: dict[str, Any] | None,
        options: dict[str, Any],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.CancelScope() as scope:
            self.kill[name] = scope.cancel
            self.ended[name] = trio.Event()
            made = {"drain_s": 2.0, "network": self.network, **box_options}
            box = Container(name, **made)
            async with AsyncExitStack() as stack:
                if broker_options is None:
                    await stack.enter_async_context(box)
                else:
                    self.brokers[name] = await stack.enter_async_context(
                        Broker(container=box, **broker_options)
                    )
                where = "amqp://127.0.0.1:0" if self.network is None else f"memory://{name}"
                (self.urls[name],) = await box.listen(where)
                dialled = [self.urls[each] for each in seeds]
                options = {"role": "interior", "urls": (), **options}
                async with Mesh(box, dialled, **options) as mesh:
                    self.boxes[name], self.meshes[name] = box, mesh
                    task_status.started()
                    await box.serve()
        self.ended[name].set()

    def way(self, start: str, address: str) -> tuple[str, ...]:
        """Return the nodes from *start* to the nearest destination of *address*; none without one."""
        found = self.meshes[start].instances(address)
        return found[0].path if found else ()


@asynccontextmanager
async def members(network: MemoryNetwork | None = None) -> AsyncIterator[Members]:
    """Run members, which end with the block; over sockets without a *network* in memory."""
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            made = Members(network)
            made._nursery = nursery
            yield made
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def line(
    *names: str, network: MemoryNetwork | None = None, **options: Any
) -> AsyncIterator[Members]:
    """Run members, each of which dials the one before."""
    async with members(network) as made:
        for at, name in enumerate(names):
            await made.start(name, *names[max(at - 1, 0) : at], **options)
        yield made


@asynccontextmanager
async def client(
    url: str, name: str = "client", *, network: MemoryNetwork | None = None, **options: Any
) -> AsyncIterator[Connection]:
    """Connect a plain client."""
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Container(name, network=network))
        yield await stack.enter_async_context(box.connect(url, reconnect=None, **options))


def verifier(users: dict[str, str]) -> Any:
    """Return a check of passwords without a thread, for which virtual time would not wait."""

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return user if users.get(user) == password else None

    return verify


async def until(holds: Callable[[], object], *, within: float = 10) -> None:
    """Wait until a condition holds, at most so many seconds."""
    with trio.fail_after(within):
        while True:
            if holds():
                return
            await trio.sleep(0.01)
