"""Containers and brokers in memory and in virtual time: the fixture ``amqp``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import trio
import trio.testing

from ..broker.broker import Broker
from ..container.container import Container
from ..net.memory import MemoryNetwork
from .clocks import VirtualClock

__all__ = ["VirtualAmqp", "VirtualContainer"]

T = TypeVar("T")


def run_in_virtual_time(
    main: Callable[[], Awaitable[T]], *, clock: trio.abc.Clock | None = None, **options: Any
) -> T:
    """Run ``trio.run`` with a clock that advances while all tasks wait, unless a clock is given."""
    return trio.run(main, clock=clock or trio.testing.MockClock(autojump_threshold=0), **options)


class VirtualContainer(Container):
    """A container with one-line calls for tests."""

    async def call(self, address: str, *args: Any, **options: Any) -> Any:
        """Call the node at *address*; see :meth:`~amqp_rt.Connection.call`."""
        async with self.local() as peer:
            return await peer.call(address, *args, **options)

    async def send(self, address: str, body: Any, **options: Any) -> Any:
        """Send a message to the node at *address*; return its outcome.

        Raises:
            DeliveryRejected: The node rejected it.
        """
        async with self.local() as peer, peer.sender(address) as sender:
            return await sender.send(body, **options)


class VirtualAmqp:
    """A network in memory, with containers and brokers on it.

    ::

        def test_price(amqp):
            shop = amqp.container(Orders(FakeDb()))
            assert amqp.run(shop.call, "orders/price", "A-1") == 9

    In tests under pytest-trio, whose clock this fixture makes virtual, a container is entered by
    ``async with`` as elsewhere, and :meth:`run` is not needed.

    Attributes:
        network: Network on which ``memory://NAME`` is listened on and dialled.
        clock: Clock of the brokers: the event loop's time.
    """

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.clock = VirtualClock()
        self._made: list[Container | Broker] = []

    def container(self, *nodes: Any, name: str = "test", **options: Any) -> VirtualContainer:
        """Create a container with *nodes*; *options* are those of :class:`~amqp_rt.Container`."""
        options.setdefault("network", self.network)
        made = VirtualContainer(name, nodes=nodes, **options)
        self._made.append(made)
        return made

    def broker(self, name: str = "broker", **options: Any) -> Broker:
        """Create a broker that accepts durable messages without storing them.

        *options* are those of :class:`~amqp_rt.Broker`; with a store, messages are stored.
        """
        options.setdefault("volatile", "store" not in options)
        options.setdefault("clock", self.clock)
        options.setdefault("network", self.network)
        made = Broker(name, **options)
        self._made.append(made)
        return made

    def run(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Run ``await function(*args, **options)`` and return its result.

        All containers and brokers created here run meanwhile. Time is virtual: it advances while
        all tasks wait. A container runs once; create another for another run.

        Raises:
            RuntimeError: An event loop runs here already: await *function* instead.
        """
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            pass  # no event loop of trio's runs here
        else:
            raise RuntimeError(
                "amqp.run is for plain tests, and this one runs under trio already: enter the objects that "
                "amqp.container and amqp.broker return with `async with`, and await"
            )
        made, self._made = self._made, []

        async def main() -> T:
            async with AsyncExitStack() as stack:
                for each in made:
                    await stack.enter_async_context(each)
                return await function(*args, **options)

        try:
            return run_in_virtual_time(main)
        finally:
            # Objects that *function* created were entered by itself.
            self._made.clear()

    def __repr__(self) -> str:
        return f"<VirtualAmqp: {len(self._made)} made>"
