"""A broker on a real loopback port, beside the test: the fixture ``amqp_broker``.

It has a thread and an event loop of its own, so that tests of any kind can use it: plain ones, and
those that run under trio or asyncio, with whatever client in the same process or another one.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import trio
from anyio.to_thread import run_sync

from ..broker.declarations import declared_by
from ..broker.nodes import Declaration, Queue
from ..message import Message
from ..outcomes import Error
from ..runtime import Broker
from .clocks import MovableClock

if TYPE_CHECKING:
    from ..broker.broker import NodeStats

__all__ = ["LoopbackBroker", "NodeHandle", "QueueHandle"]

T = TypeVar("T")

#: Seconds that clients have to take our close when the test is over. Many of them are not run any
#: more by then, and nobody is to wait for those.
_CLOSE_S: Final = 0.1
#: Seconds between two looks at a node that a test waits for.
_LOOK_S: Final = 0.002
#: Seconds that a test waits for a node, unless it says otherwise.
PATIENCE_S: Final = 5.0
#: Messages that a failed wait shows.
_SHOWN: Final = 5
_FORCED: Final = Error("amqp:connection:forced", "a test closes all connections")


class NodeHandle:
    """A node of the broker, as a test looks at it.

    Every call is a plain one and may come from any thread. Those that wait have a twin whose name
    begins with ``await_``, for tests that run in an event loop which has to go on meanwhile.
    """

    def __init__(self, broker: LoopbackBroker, name: str) -> None:
        self._broker = broker
        self.name = name

    @property
    def stats(self) -> NodeStats:
        """The node in numbers.

        Raises:
            AmqpError: There is no such node.
        """
        return self._broker.call(self._stats)

    async def _stats(self) -> NodeStats:
        return self._broker.broker.host.stats(self.name)

    @property
    def consumers(self) -> int:
        """Links that receive from it."""
        return self.stats.consumers

    @property
    def producers(self) -> int:
        """Links that send to it."""
        return self.stats.producers

    def send(self, body: object = None, **fields: Any) -> None:
        """Put a message there, as if a client had sent it.

        Args:
            body: The body, or a whole :class:`~amqp_rt.Message`.
            fields: What else :class:`~amqp_rt.Message` takes, such as ``subject`` and ``ttl_s``.

        Raises:
            AmqpError: There is no such node, or it has no room.
        """
        message = body if isinstance(body, Message) else Message(body, **fields)

        async def publish() -> None:
            self._broker.broker.host.publish(self.name, bytes(message.encode()))

        self._broker.call(publish)

    def wait_until(
        self,
        condition: Callable[[NodeStats], bool],
        *,
        timeout_s: float = PATIENCE_S,
        wanted: str = "what the test waits for",
    ) -> NodeStats:
        """Wait until *condition* holds of the node's numbers; returns those.

        Args:
            condition: Called in the broker's thread.
            timeout_s: Seconds of real time to wait.
            wanted: What is waited for, in the sentence of the failure.

        Raises:
            AssertionError: It did not come to that in time; the sentence says how things stand.
            AmqpError: There is no such node.
        """
        __tracebackhide__ = True
        return self._broker.call(self._until, condition, timeout_s, wanted)

    async def await_until(
        self,
        condition: Callable[[NodeStats], bool],
        *,
        timeout_s: float = PATIENCE_S,
        wanted: str = "what the test waits for",
    ) -> NodeStats:
        """:meth:`wait_until`, for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_until, condition, timeout_s=timeout_s, wanted=wanted)
        return await run_sync(wait, abandon_on_cancel=True)

    def wait_consumers(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until *count* links or more receive from it.

        Raises:
            AssertionError: There were fewer all the time.
        """
        __tracebackhide__ = True
        self.wait_until(
            lambda stats: stats.consumers >= count,
            timeout_s=timeout_s,
            wanted=f"{count} consumers",
        )

    async def await_consumers(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> None:
        """:meth:`wait_consumers`, for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_consumers, count, timeout_s=timeout_s)
        await run_sync(wait, abandon_on_cancel=True)

    async def _until(
        self, condition: Callable[[NodeStats], bool], timeout_s: float, wanted: str
    ) -> NodeStats:
        host = self._broker.broker.host
        with trio.move_on_after(timeout_s):
            while not condition(stats := host.stats(self.name)):
                if self._broker.stopping:
                    raise RuntimeError("the broker has been stopped")
                await trio.sleep(_LOOK_S)
            return stats
        raise AssertionError(
            f"no {wanted} at {self.name!r} within {timeout_s:g} s: {await self._described()}"
        )

    async def _described(self) -> str:
        stats = self._broker.broker.host.stats(self.name)
        return (
            f"it has {stats.available} messages available, {stats.acquired} delivered and not "
            f"settled, {stats.delayed} delayed, {stats.consumers} consumers and "
            f"{stats.producers} producers, and has accepted {stats.enqueued}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class QueueHandle(NodeHandle):
    """A queue of the broker, as a test looks at it."""

    @property
    def messages(self) -> list[Message]:
        """The messages that wait, in order, decoded; those that a consumer has are not among them.

        Raises:
            AmqpError: There is no such queue.
        """
        return self._broker.call(self._messages)

    async def _messages(self) -> list[Message]:
        host = self._broker.broker.host
        waiting = host.stats(self.name).available
        return [Message.decode(payload) for payload in await host.peek(self.name, waiting)]

    @property
    def count(self) -> int:
        """Messages that wait."""
        return self.stats.available

    @property
    def unsettled(self) -> int:
        """Messages that consumers have and have not settled."""
        return self.stats.acquired

    @property
    def delayed(self) -> int:
        """Messages that are not due yet."""
        return self.stats.delayed

    def purge(self) -> int:
        """Drop the messages that wait; how many there were."""

        async def purge() -> int:
            return await self._broker.broker.host.purge(self.name)

        return self._broker.call(purge)

    def wait_for(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Wait until *count* messages or more wait there; returns them.

        Raises:
            AssertionError: There were fewer all the time; the sentence says how things stand.
            AmqpError: There is no such queue.
        """
        __tracebackhide__ = True
        return self._broker.call(self._arrived, count, timeout_s)

    async def await_for(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """:meth:`wait_for`, for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_for, count, timeout_s=timeout_s)
        return await run_sync(wait, abandon_on_cancel=True)

    def wait_empty(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no message is there, nor with a consumer, nor delayed.

        Raises:
            AssertionError: Some stayed; the sentence says how things stand.
        """
        __tracebackhide__ = True
        self.wait_until(_is_empty, timeout_s=timeout_s, wanted="empty queue")

    async def await_empty(self, *, timeout_s: float = PATIENCE_S) -> None:
        """:meth:`wait_empty`, for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_empty, timeout_s=timeout_s)
        await run_sync(wait, abandon_on_cancel=True)

    async def _arrived(self, count: int, timeout_s: float) -> list[Message]:
        await self._until(lambda stats: stats.available >= count, timeout_s, f"{count} messages")
        return await self._messages()

    async def _described(self) -> str:
        first = await self._broker.broker.host.peek(self.name, _SHOWN)
        shown = "".join(f"\n  {Message.decode(payload)!r}" for payload in first)
        return await super()._described() + shown


def _is_empty(stats: NodeStats) -> bool:
    return not (stats.available or stats.acquired or stats.delayed)


class LoopbackBroker:
    """A broker at a free port of 127.0.0.1, from ``with`` to the end of its block.

    ::

        with LoopbackBroker() as broker:
            work = broker.declare("work")
            run_my_program(broker.url)
            assert [message.body for message in work.wait_for(2)] == ["a", "b"]

    Durable messages are taken without being kept, unless it is given a store. Its calls may come
    from any thread.

    Args:
        options: Those of :class:`~amqp_rt.Broker`, such as ``users``, ``auto_create`` and ``nodes``.
    """

    def __init__(self, **options: Any) -> None:
        self.clock = MovableClock()
        options.setdefault("volatile", "store" not in options)
        self._options = {"clock": self.clock, **options}
        self._broker: Broker | None = None
        self._url = ""
        self._thread: threading.Thread | None = None
        self._served: Future[None] = Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._calls: trio.Nursery | None = None
        self._stopped = trio.Event()
        #: Its block is being left.
        self.stopping = False

    # --- lifetime ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError(f"{self!r} has been entered before: make another")
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="amqp_rt loopback broker", daemon=True
        )
        self._thread.start()
        self._url = started.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        token, self._token = self._token, None
        self.stopping = True
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._stopped.set)
        self._thread.join()
        self._served.result()

    def _run(self, started: Future[str]) -> None:
        try:
            trio.run(self._serve, started)
        except BaseException as error:
            (self._served if started.done() else started).set_exception(error)
        else:
            self._served.set_result(None)

    async def _serve(self, started: Future[str]) -> None:
        with trio.CancelScope() as scope:
            async with Broker(**self._options) as self._broker, trio.open_nursery() as self._calls:
                (url,) = await self._broker.listen("amqp://127.0.0.1:0")
                self._token = trio.lowlevel.current_trio_token()
                started.set_result(url)
                await self._stopped.wait()
                scope.deadline = trio.current_time() + _CLOSE_S

    # --- what a test asks ----------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens: ``amqp://127.0.0.1:PORT``."""
        self._running()
        return self._url

    @property
    def host(self) -> str:
        """The address at which it listens."""
        return self.url.removeprefix("amqp://").rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def broker(self) -> Broker:
        """The broker itself. It belongs to its own thread: reach it by :meth:`call`."""
        self._running()
        assert self._broker is not None
        return self._broker

    @property
    def connections(self) -> int:
        """Connections that clients have opened."""

        async def count() -> int:
            return len(self.broker.container.connections)

        return self.call(count)

    def declare(self, *nodes: Declaration | str) -> QueueHandle:
        """Make nodes; the first one as a handle. Declaring the same again changes nothing.

        Args:
            nodes: Declarations, such as ``Queue("work", lock_s=30)``; a name is a plain queue, and
                ``"topic:prices"`` or ``"queue:work?lock_s=30"`` says more.

        Raises:
            AmqpError: The name is taken by another node, or the text declares none.
        """
        if not nodes:
            raise TypeError("declare takes at least one node")
        declared = [_declaration(node) if isinstance(node, str) else node for node in nodes]
        self.call(self.broker.declare, *declared)
        return QueueHandle(self, declared[0].name)

    def queue(self, name: str) -> QueueHandle:
        """The queue *name*, be it there already or not."""
        return QueueHandle(self, name)

    def node(self, name: str) -> NodeHandle:
        """The node *name* of any kind, be it there already or not."""
        return NodeHandle(self, name)

    def advance(self, seconds: float) -> None:
        """Move the broker's clocks on, and let it do what is due then before this returns.

        Times to live, locks, delays, schedules and transactions follow them. Timers of connections
        do not: a client that waits in real time is not given up for it.

        Raises:
            ValueError: *seconds* is negative.
        """

        async def advance() -> None:
            self.clock.advance(seconds)
            self.broker.host.catch_up()

        self.call(advance)

    def disconnect(self) -> int:
        """Close every connection with ``amqp:connection:forced``; how many there were.

        A client that recovers connects again.
        """
        return self.call(self._disconnect)

    async def _disconnect(self) -> int:
        connections = self.broker.container.connections
        for connection in connections:
            connection.close(_FORCED)
        return len(connections)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """What ``await function(*args)`` returns in the broker's thread, under trio.

        Raises:
            RuntimeError: The broker does not run, or this is its own thread.
        """
        __tracebackhide__ = True
        self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the broker's own thread: await what is to be called")
        answered: Future[T] = Future()
        try:
            assert self._token is not None
            self._token.run_sync_soon(self._begin, answered, function, args)
        except trio.RunFinishedError:
            self._served.result()  # says why, if something broke
            raise
        return answered.result()

    def _begin(
        self,
        answered: Future[T],
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
    ) -> None:
        async def answer() -> None:
            try:
                answered.set_result(await function(*args))
            except trio.Cancelled:
                answered.set_exception(RuntimeError("the broker has been stopped"))
                raise
            except BaseException as error:
                answered.set_exception(error)

        assert self._calls is not None
        try:
            self._calls.start_soon(answer)
        except RuntimeError:
            answered.set_exception(RuntimeError("the broker has been stopped"))

    def _running(self) -> None:
        if self._token is None:
            raise RuntimeError(f"{self!r} does not run: use it in `with`")

    def __repr__(self) -> str:
        return f"<LoopbackBroker {self._url or 'not started'}>"


def _declaration(text: str) -> Declaration:
    """What a test may write for a node: a name, or what ``amqp-rt serve --node`` takes."""
    return declared_by(text) if ":" in text else Queue(text)
