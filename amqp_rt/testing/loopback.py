"""A broker on a real loopback port, beside the test: the fixture ``amqp_broker``.

The broker has its own thread and event loop, so that all kinds of tests can use it: plain ones,
tests under trio or asyncio, with any client in the same process or another one.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import trio
from anyio.to_thread import run_sync
from msgspec.structs import replace

from ..broker.broker import Broker, installed_fronts
from ..broker.declarations import declared_by
from ..broker.nodes import Declaration, Queue, split_partition
from ..broker.statistics import NodeStats, SubscriptionStats
from ..message import Message
from ..outcomes import Error
from .clocks import MovableClock

__all__ = [
    "LogHandle",
    "LoopbackBroker",
    "NodeHandle",
    "QueueHandle",
    "SubscriptionHandle",
    "TopicHandle",
]

T = TypeVar("T")
S = TypeVar("S", NodeStats, SubscriptionStats)

#: Seconds that clients have to answer our close at the end of the test. Many clients no longer run
#: by then, so waiting longer would only delay the test.
_CLOSE_S: Final = 0.1
#: Seconds between two checks of a node that a test waits for.
_LOOK_S: Final = 0.002
#: Default for the seconds that a test waits for a node.
PATIENCE_S: Final = 5.0
#: Messages shown by a wait that fails.
_SHOWN: Final = 5
#: Filter to read a log from its first record.
_FROM_THE_FIRST: Final[dict[object, object]] = {"rabbitmq:stream-offset-spec": "first"}
_FORCED: Final = Error("amqp:connection:forced", "a test closes all connections")


class _Watched(Generic[S]):
    """An object in the broker that a test inspects and waits for.

    All calls are plain and allowed in any thread. Methods that wait have a variant named
    ``await_…``, for tests whose event loop has to go on meanwhile.
    """

    def __init__(self, broker: LoopbackBroker, name: str) -> None:
        self._broker = broker
        self.name = name

    @property
    def stats(self) -> S:
        """Statistics of the object.

        Raises:
            AmqpError: It does not exist.
        """
        return self._broker.call(self._stats)

    async def _stats(self) -> S:
        return self._look(self._broker.broker)

    def _look(self, broker: Broker) -> S:
        raise NotImplementedError

    @property
    def consumers(self) -> int:
        """Number of links that receive from it."""
        return self.stats.consumers

    def wait_until(
        self,
        condition: Callable[[S], bool],
        *,
        timeout_s: float = PATIENCE_S,
        wanted: str = "the condition of the test",
    ) -> S:
        """Wait until *condition* is true of the statistics; return those.

        Args:
            condition: Called in the broker's thread.
            timeout_s: Seconds of real time to wait.
            wanted: Description of the condition, for the failure.

        Raises:
            AssertionError: The condition was not met in time; the text describes the state.
            AmqpError: The object does not exist.
        """
        __tracebackhide__ = True
        return self._broker.call(self._until, condition, timeout_s, wanted)

    async def await_until(
        self,
        condition: Callable[[S], bool],
        *,
        timeout_s: float = PATIENCE_S,
        wanted: str = "the condition of the test",
    ) -> S:
        """Variant of :meth:`wait_until` for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_until, condition, timeout_s=timeout_s, wanted=wanted)
        return await run_sync(wait, abandon_on_cancel=True)

    def wait_consumers(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until at least *count* links receive from it.

        Raises:
            AssertionError: There were fewer until the timeout.
        """
        __tracebackhide__ = True
        self.wait_until(
            lambda stats: stats.consumers >= count,
            timeout_s=timeout_s,
            wanted=f"{count} consumers",
        )

    async def await_consumers(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> None:
        """Variant of :meth:`wait_consumers` for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_consumers, count, timeout_s=timeout_s)
        await run_sync(wait, abandon_on_cancel=True)

    async def _until(self, condition: Callable[[S], bool], timeout_s: float, wanted: str) -> S:
        broker = self._broker.broker
        with trio.move_on_after(timeout_s):
            while not condition(stats := self._look(broker)):
                if self._broker.stopping:
                    raise RuntimeError("the broker has been stopped")
                await trio.sleep(_LOOK_S)
            return stats
        raise AssertionError(
            f"no {wanted} at {self.name!r} within {timeout_s:g} s: {await self._described(broker)}"
        )

    async def _described(self, broker: Broker) -> str:
        """Return a description of the state, for a failure."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class NodeHandle(_Watched[NodeStats]):
    """A node of the broker, for tests: plain calls, from any thread."""

    def _look(self, broker: Broker) -> NodeStats:
        return broker.stats(self.name)

    @property
    def producers(self) -> int:
        """Number of links that send to it."""
        return self.stats.producers

    def send(self, body: object = None, **fields: Any) -> None:
        """Put a message there, as if a client had sent it.

        Args:
            body: The body, or a whole :class:`~amqp_rt.Message`.
            fields: Other arguments of :class:`~amqp_rt.Message`, such as ``subject`` and ``ttl_s``.

        Raises:
            AmqpError: The node does not exist, or has no room.
        """
        message = body if isinstance(body, Message) else Message(body, **fields)

        async def publish() -> None:
            self._broker.broker.publish(self.name, bytes(message.encode()))

        self._broker.call(publish)

    async def _described(self, broker: Broker) -> str:
        stats = broker.stats(self.name)
        return (
            f"it has {stats.available} messages available, {stats.acquired} delivered and not "
            f"settled, {stats.delayed} delayed, {stats.consumers} consumers and "
            f"{stats.producers} producers, and has accepted {stats.enqueued}"
        )


class _Backlog(_Watched[S]):
    """Common part of nodes and subscriptions with a backlog of messages."""

    @property
    def messages(self) -> list[Message]:
        """Messages available, in order, decoded; messages acquired by consumers are not included.

        Raises:
            AmqpError: The object does not exist.
        """
        return self._broker.call(self._messages)

    async def _messages(self) -> list[Message]:
        broker = self._broker.broker
        found = await self._peek(broker, self._look(broker).available)
        return [Message.decode(payload) for payload in found]

    async def _peek(self, broker: Broker, count: int) -> list[bytes]:
        """Return the first *count* available messages, encoded."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Number of messages available."""
        return self.stats.available

    def wait_for(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Wait until at least *count* messages are available; return all of them.

        Raises:
            AssertionError: There were fewer until the timeout; the text describes the state.
            AmqpError: The object does not exist.
        """
        __tracebackhide__ = True
        return self._broker.call(self._arrived, count, timeout_s)

    async def await_for(self, count: int = 1, *, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Variant of :meth:`wait_for` for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_for, count, timeout_s=timeout_s)
        return await run_sync(wait, abandon_on_cancel=True)

    async def _arrived(self, count: int, timeout_s: float) -> list[Message]:
        await self._until(lambda stats: stats.available >= count, timeout_s, f"{count} messages")
        return await self._messages()


class _Consumed(_Backlog[S]):
    """Common part of queues and subscriptions, which remove messages once consumed."""

    @property
    def unsettled(self) -> int:
        """Number of messages delivered to consumers and not settled."""
        return self.stats.acquired

    @property
    def delayed(self) -> int:
        """Number of messages that are not due yet."""
        return self.stats.delayed

    def wait_empty(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no message is available, acquired or delayed.

        Raises:
            AssertionError: Some were left at the timeout; the text describes the state.
        """
        __tracebackhide__ = True
        self.wait_until(_is_empty, timeout_s=timeout_s, wanted="empty queue")

    async def await_empty(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Variant of :meth:`wait_empty` for tests under trio or asyncio; can be cancelled."""
        __tracebackhide__ = True
        wait = partial(self.wait_empty, timeout_s=timeout_s)
        await run_sync(wait, abandon_on_cancel=True)

    async def _shown(self, broker: Broker) -> str:
        """Format the first messages, a line each."""
        first = await self._peek(broker, _SHOWN)
        return "".join(f"\n  {Message.decode(payload)!r}" for payload in first)


class QueueHandle(_Consumed[NodeStats], NodeHandle):
    """A queue of the broker, for tests."""

    async def _peek(self, broker: Broker, count: int) -> list[bytes]:
        return await broker.peek(self.name, count)

    def purge(self) -> int:
        """Drop the available messages; return how many there were."""

        async def purge() -> int:
            return await self._broker.broker.purge(self.name)

        return self._broker.call(purge)

    async def _described(self, broker: Broker) -> str:
        return await NodeHandle._described(self, broker) + await self._shown(broker)


class SubscriptionHandle(_Consumed[SubscriptionStats]):
    """A subscription of a topic, for tests.

    Attributes:
        topic: Name of the topic.
        name: Name of the subscriber's link.
        container: The subscriber's container-id; None for any.
    """

    def __init__(
        self, broker: LoopbackBroker, topic: str, name: str, container: str | None
    ) -> None:
        super().__init__(broker, name)
        self.topic = topic
        self.container = container

    def _look(self, broker: Broker) -> SubscriptionStats:
        return broker.subscription(self.topic, self.name, container=self.container)

    async def _peek(self, broker: Broker, count: int) -> list[bytes]:
        return await broker.peek_subscription(
            self.topic, self.name, count, container=self.container
        )

    async def _described(self, broker: Broker) -> str:
        stats = self._look(broker)
        return (
            f"it has {stats.available} messages available, {stats.acquired} delivered and not "
            f"settled, {stats.delayed} delayed, and {stats.consumers} consumers"
            + await self._shown(broker)
        )


class TopicHandle(NodeHandle):
    """A topic of the broker, for tests."""

    @property
    def subscriptions(self) -> list[SubscriptionHandle]:
        """Subscriptions of the topic, in the order of creation.

        Raises:
            AmqpError: The topic does not exist.
        """
        return self._broker.call(self._subscriptions)

    async def _subscriptions(self) -> list[SubscriptionHandle]:
        return [
            SubscriptionHandle(self._broker, self.name, stats.name, stats.container)
            for stats in self._broker.broker.subscriptions(self.name)
        ]

    def subscription(self, name: str, *, container: str | None = None) -> SubscriptionHandle:
        """Return a handle of subscription *name*, which need not exist yet.

        Args:
            name: Name of its link, or of a shared subscription.
            container: The subscriber's container-id, where several have links of that name.
        """
        return SubscriptionHandle(self._broker, self.name, name, container)


class LogHandle(_Backlog[NodeStats], NodeHandle):
    """A log of the broker, for tests; ``messages`` are all records that it retains.

    ``NAME/partitions/N`` is one partition; records of several are listed partition by partition.
    """

    def _look(self, broker: Broker) -> NodeStats:
        log, partition = split_partition(self.name) or (self.name, None)
        stats = broker.stats(log)
        if partition is None:
            return stats
        here = [each for each in broker.log_stats(log).partitions if each.partition == partition]
        return replace(stats, available=sum(each.next - each.first for each in here))

    async def _messages(self) -> list[Message]:
        count = self._look(self._broker.broker).available
        async with (
            self._broker.broker.local() as peer,
            peer.receiver(self.name, filter=_FROM_THE_FIRST) as records,
        ):
            return [(await records.receive()).message for _ in range(count)]

    async def _described(self, broker: Broker) -> str:
        stats = self._look(broker)
        return f"it has {stats.available} records, {stats.consumers} readers and {stats.producers} producers"  # fmt: skip


def _is_empty(stats: NodeStats | SubscriptionStats) -> bool:
    return not (stats.available or stats.acquired or stats.delayed)


class LoopbackBroker:
    """A broker at a free port of 127.0.0.1, which runs within a ``with`` block.

    ::

        with LoopbackBroker() as broker:
            work = broker.declare("work")
            run_my_program(broker.url)
            assert [message.body for message in work.wait_for(2)] == ["a", "b"]

    Durable messages are accepted without being stored, unless a store is given. The port accepts
    every protocol that is installed. Calls are allowed in any thread.

    Args:
        options: Options of :class:`~amqp_rt.Broker`, such as ``users``, ``auto_create`` and
            ``nodes``.
    """

    def __init__(self, **options: Any) -> None:
        self.clock = MovableClock()
        options.setdefault("volatile", "store" not in options)
        if "container" not in options:
            options.setdefault("fronts", installed_fronts())
        self._options = {"clock": self.clock, **options}
        self._broker: Broker | None = None
        self._url = ""
        self._thread: threading.Thread | None = None
        self._served: Future[None] = Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._calls: trio.Nursery | None = None
        self._stopped = trio.Event()
        #: Whether the block is being left.
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

    # --- --- calls for tests -------------------------------------------------------------

    @property
    def url(self) -> str:
        """URL of the broker: ``amqp://127.0.0.1:PORT``."""
        self._running()
        return self._url

    @property
    def host(self) -> str:
        """Address that the broker listens on."""
        return self.url.removeprefix("amqp://").rpartition(":")[0]

    @property
    def port(self) -> int:
        """Port that the broker listens on."""
        return int(self.url.rpartition(":")[2])

    @property
    def broker(self) -> Broker:
        """The broker itself. It belongs to its own thread: use it through :meth:`call`."""
        self._running()
        assert self._broker is not None
        return self._broker

    @property
    def connections(self) -> int:
        """Number of open connections of clients."""

        async def count() -> int:
            return len(self.broker.container.connections)

        return self.call(count)

    def declare(self, *nodes: Declaration | str) -> QueueHandle:
        """Declare nodes; return a handle of the first. Equal declarations have no effect.

        Args:
            nodes: Declarations, such as ``Queue("work", lock_s=30)``; a name is a plain queue, and
                texts such as ``"topic:prices"`` or ``"queue:work?lock_s=30"`` declare others.

        Raises:
            AmqpError: Another node has the name, or the text is no declaration.
        """
        if not nodes:
            raise TypeError("declare takes at least one node")
        declared = [_declaration(node) if isinstance(node, str) else node for node in nodes]
        self.call(self.broker.declare, *declared)
        return QueueHandle(self, declared[0].name)

    def queue(self, name: str) -> QueueHandle:
        """Return a handle of queue *name*, which need not exist yet."""
        return QueueHandle(self, name)

    def topic(self, name: str) -> TopicHandle:
        """Return a handle of topic *name*, which need not exist yet."""
        return TopicHandle(self, name)

    def log(self, name: str) -> LogHandle:
        """Return a handle of log *name*, or of ``NAME/partitions/N``, which need not exist yet."""
        return LogHandle(self, name)

    def node(self, name: str) -> NodeHandle:
        """Return a handle of node *name* of any kind, which need not exist yet."""
        return NodeHandle(self, name)

    def advance(self, seconds: float) -> None:
        """Advance the broker's clocks, and complete everything that becomes due before returning.

        Expiry, locks, delays, schedules and transactions follow these clocks. Timers of connections
        do not, so that a client waiting in real time runs into no timeout.

        Raises:
            ValueError: *seconds* is negative.
        """

        async def advance() -> None:
            self.clock.advance(seconds)
            self.broker.host.catch_up()

        self.call(advance)

    def disconnect(self) -> int:
        """Close all connections with ``amqp:connection:forced``; return how many there were.

        Clients that recover will reconnect.
        """
        return self.call(self._disconnect)

    async def _disconnect(self) -> int:
        connections = self.broker.container.connections
        for connection in connections:
            connection.close(_FORCED)
        return len(connections)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run ``await function(*args)`` in the broker's thread, under trio, and return its result.

        Raises:
            RuntimeError: The broker does not run, or this is its own thread.
        """
        __tracebackhide__ = True
        self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the broker's own thread: await the function itself")
        answered: Future[T] = Future()
        try:
            assert self._token is not None
            self._token.run_sync_soon(self._begin, answered, function, args)
        except trio.RunFinishedError:
            self._served.result()  # raises the cause, if the broker failed
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
    """Parse a node of a test: a name, or a text as for ``amqp-rt serve --node``."""
    return declared_by(text) if ":" in text else Queue(text)
