"""Containers and brokers in memory and in virtual time: the fixture ``amqp``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import trio
import trio.testing

from ..container.container import Container
from ..net.memory import MemoryNetwork
from ..runtime import Broker
from .clocks import VirtualClock

__all__ = ["VirtualAmqp", "VirtualContainer"]

T = TypeVar("T")


def run_in_virtual_time(
    main: Callable[[], Awaitable[T]], *, clock: trio.abc.Clock | None = None, **options: Any
) -> T:
    """``trio.run``, with a clock that jumps ahead when everybody waits, unless it is given another."""
    return trio.run(main, clock=clock or trio.testing.MockClock(autojump_threshold=0), **options)


class VirtualContainer(Container):
    """A container that a test can talk to in one line."""

    async def call(self, address: str, *args: Any, **options: Any) -> Any:
        """Ask the node at *address*; see :meth:`~amqp_rt.Connection.call`."""
        async with self.local() as peer:
            return await peer.call(address, *args, **options)

    async def send(self, address: str, body: Any, **options: Any) -> Any:
        """Send one message to the node at *address*; its outcome.

        Raises:
            DeliveryRejected: The node rejected it.
        """
        async with self.local() as peer, peer.sender(address) as sender:
            return await sender.send(body, **options)


class VirtualAmqp:
    """A network in memory, and containers and brokers that live there.

    ::

        def test_price(amqp):
            shop = amqp.container(Orders(FakeDb()))
            assert amqp.run(shop.call, "orders/price", "A-1") == 9

    In a test for pytest-trio, which has trio's clock made virtual by this fixture, a container is
    entered by ``async with`` as anywhere else, and :meth:`run` is not needed.

    Attributes:
        network: Where ``memory://NAME`` is listened on and dialled.
        clock: Both clocks of brokers: the event loop's time.
    """

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.clock = VirtualClock()
        self._made: list[Container | Broker] = []

    def container(self, *nodes: Any, name: str = "test", **options: Any) -> VirtualContainer:
        """A container with *nodes*; *options* are those of :class:`~amqp_rt.Container`."""
        options.setdefault("network", self.network)
        made = VirtualContainer(name, nodes=nodes, **options)
        self._made.append(made)
        return made

    def broker(self, name: str = "broker", **options: Any) -> Broker:
        """A broker that takes durable messages without keeping them, unless it is given a store.

        *options* are those of :class:`~amqp_rt.Broker`.
        """
        options.setdefault("volatile", "store" not in options)
        made = Broker(name, clock=self.clock, network=self.network, **options)
        self._made.append(made)
        return made

    def run(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """What ``await function(*args, **options)`` returns, while all that was made here runs.

        Time is virtual: it passes when everybody waits. A container runs once; make another for
        another run.

        Raises:
            RuntimeError: An event loop runs here already: await *function* instead.
        """
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            pass  # no event loop of trio's runs here
        else:
            raise RuntimeError(
                "amqp.run is for plain tests, and this one runs under trio already: enter what "
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
            # What *function* has made it has entered by itself.
            self._made.clear()

    def __repr__(self) -> str:
        return f"<VirtualAmqp: {len(self._made)} made>"
