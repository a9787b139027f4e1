"""The same classes for threads and scripts: calls that wait, and ``with`` blocks.

::

    with sync.connect("amqp://127.0.0.1:5672") as peer, peer.sender("orders") as orders:
        orders.send(order)

    with sync.Broker() as broker:
        (url,) = broker.listen("amqp://127.0.0.1:0")

Everything runs under trio in one thread of its own, which begins with the first block that is entered
in the process and ends with the last one. Objects may be used by several threads at once. Handlers,
hooks and verifiers that are plain functions run in worker threads, so that they may wait as well;
those that are ``async def`` run under trio.

A thread that is interrupted (Ctrl-C) while it waits cancels what it waits for. A handler in a thread
cannot be cancelled: it is waited for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Self

import trio
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from .container.container import Container as _Container
from .container.recovery import connect as _connect
from .doors import Door, StandIn, inward
from .runtime import Broker as _Broker

__all__ = ["Broker", "Container", "connect"]

_THREAD: Final = BlockingPortalProvider("trio")


class _Thread(Door):
    """The way into the thread in which trio runs."""

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal
        self._handlers: dict[Any, Any] = {}

    def stand_in(self, target: Any) -> StandIn:
        return _SyncStandIn(self, target)

    def wait(self, call: Callable[[], Any]) -> Any:
        doing = self.portal.start_task_soon(call)
        try:
            return self.outward(doing.result())
        except BaseException:
            # If it was us who were interrupted.
            doing.cancel()
            raise

    def plain(self, call: Callable[[], Any]) -> Any:
        return self.portal.call(call)

    def handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] | None = self._handlers.get(function)
        if made is None:
            made = self._handlers[function] = self._handler(function)
        return made

    def _handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(
            getattr(function, "__wrapped__", function)
        ):
            return function
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                parts = function(*map(self.outward, args), **self._outwards(kwargs))
                said: Any = None
                over = object()

                def step(said: Any) -> Any:
                    try:
                        return parts.send(said)
                    except StopIteration:
                        return over

                try:
                    while (part := await trio.to_thread.run_sync(step, said)) is not over:
                        said = yield inward(part)
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(parts.close)

            return stream

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            outward = map(self.outward, args)
            bound = functools.partial(function, *outward, **self._outwards(kwargs))
            return inward(await trio.to_thread.run_sync(bound))

        return call

    def _outwards(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: self.outward(value) for name, value in kwargs.items()}


class _SyncStandIn(StandIn):
    """A stand-in that is called, entered and iterated by threads."""

    __slots__ = ("_block",)
    _door: _Thread

    def __init__(self, door: _Thread, target: Any) -> None:
        super().__init__(door, target)
        self._block: AbstractContextManager[Any] | None = None

    def __iter__(self) -> Self:
        if hasattr(self._target, "__anext__"):
            return self
        stream: Self = self._door.outward(self._door.plain(self._target.__aiter__))
        return stream

    def __next__(self) -> Any:
        try:
            return self._door.wait(self._target.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        if hasattr(self._target, "__enter__"):
            return self._door.outward(self._door.plain(self._target.__enter__))
        self._block = self._door.portal.wrap_async_context_manager(self._target)
        return self._door.outward(self._block.__enter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._block is None:
            done: bool | None = self._door.plain(
                functools.partial(self._target.__exit__, kind, error, trace)
            )
            return done
        return self._block.__exit__(kind, error, trace)


def _entrance(make: Callable[..., Any]) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def enter(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            door = _Thread(stack.enter_context(_THREAD))
            nodes = [door.nodes(node) for node in kwargs.pop("nodes", ())]
            given = {name: door.given(value) for name, value in kwargs.items()}
            if nodes:
                given["nodes"] = nodes
            made = door.plain(functools.partial(make, *map(door.given, args), **given))
            yield stack.enter_context(door.stand_in(made))

    return functools.wraps(make, updated=())(enter)


Broker = _entrance(_Broker)
Container = _entrance(_Container)
connect = _entrance(_connect)
