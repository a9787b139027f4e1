"""API for asyncio: the same classes, awaited by its tasks.

::

    async with aio.Container("shop", nodes=[Orders()]) as shop:
        (url,) = await shop.listen("amqp://127.0.0.1:0")
        async with shop.connect(url) as peer, peer.sender("orders") as orders:
            await orders.send(order)

Everything runs under trio, as a guest of the event loop, in its thread: plain calls such as
``delivery.accept()`` are plain calls, and an awaitable is run by a task of trio while a task of asyncio
awaits it. Handlers, hooks, middleware and verifiers are coroutines of asyncio.

Cancelling a task of asyncio cancels the call that it awaits, and raises ``CancelledError`` when that
call has ended; a delivery received in that moment is released. A block that ends by itself, such as
that of a container whose hook fails, cancels the task inside it and raises its error at the end of the
block. A handler that is cancelled, because its caller has gone, gets ``CancelledError``.

The guest run starts with the first block entered in an event loop and ends with the last one.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import trio

from .bridge import Crossing, DoorBlock, StandIn, give_back, inward
from .broker.broker import Broker as _Broker
from .container.callers import CALLER, HANDLED
from .container.container import Container as _Container
from .container.loops import task_of
from .container.raising import Release
from .container.receiving import Receiver
from .container.recovery import connect as _connect
from .mesh.mesh import Mesh as _Mesh

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Broker", "Container", "Mesh", "connect"]


class _TrioCall:
    """Call that a task of trio makes while a task of asyncio waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.scope = trio.CancelScope()
        #: Whether it has ended, or has reached the point that the task of asyncio waits for.
        self.ready = False
        self.error: BaseException | None = None
        self.value: Any = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Resume the waiting task of asyncio."""
        self.ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, call: Callable[[], Any]) -> None:
        """Make the call, in a task of trio."""
        try:
            with self.scope:
                self.value = await call()
            if self.scope.cancelled_caught:
                self.error = asyncio.CancelledError()
        except trio.Cancelled:
            # The guest run ends although the call has not.
            self.error = asyncio.CancelledError()
        except BaseException as error:
            self.error = error
        self.wake()

    async def wait(self) -> asyncio.CancelledError | None:
        """Wait until it is ready; return the cancellation of the caller, which cancels the call too."""
        cancelled = None
        while not self.ready:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error
                self.scope.cancel()
        return cancelled


class _Guest(Crossing):
    """Run of trio inside an event loop of asyncio, for as long as a block is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._context = contextvars.copy_context()
        self._users = 0
        self._turn = asyncio.Lock()
        self._nursery: trio.Nursery | None = None
        self._stop: trio.Event | None = None
        self._over: asyncio.Future[None] | None = None
        self._handlers: dict[Any, Any] = {}

    # --- Start and end ---

    async def enter(self) -> None:
        """Count one more block; the first one starts the run. Cancellation leaves it uncounted."""
        cancelled = await _uninterrupted(self._enter())
        if cancelled is not None:
            await self.leave()
            raise cancelled

    async def leave(self) -> None:
        """Count one block less; the last one ends the run, even if the caller is cancelled."""
        cancelled = await _uninterrupted(self._leave())
        if cancelled is not None:
            raise cancelled

    async def _enter(self) -> None:
        async with self._turn:
            if not self._users:
                await self._start()
            self._users += 1

    async def _leave(self) -> None:
        async with self._turn:
            self._users -= 1
            if not self._users:
                await self._end()

    async def _start(self) -> None:
        over = self._over = self.loop.create_future()
        begun = self.loop.create_future()

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._stop = trio.Event()
                begun.set_result(None)
                await self._stop.wait()
                nursery.cancel_scope.cancel()

        def done(outcome: Any) -> None:
            if not over.done():
                over.set_result(None)
            outcome.unwrap()

        trio.lowlevel.start_guest_run(
            main,
            run_sync_soon_threadsafe=self.loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=self.loop.call_soon,
            done_callback=done,
            host_uses_signal_set_wakeup_fd=True,
        )
        await begun

    async def _end(self) -> None:
        assert self._stop is not None
        assert self._over is not None
        self._stop.set()
        try:
            await self._over
        finally:
            self._nursery = self._stop = None
            self._handlers.clear()

    def start(self, task: Callable[[], Any]) -> None:
        """Run *task* under trio."""
        if self._nursery is None:
            raise RuntimeError("its block has been left: nothing runs any more")
        self._nursery.start_soon(task)

    # --- From asyncio to trio ---

    def stand_in(self, target: Any) -> StandIn:
        return _AioStandIn(self, target)

    def plain(self, call: Callable[[], Any]) -> Any:
        return call()

    async def wait(self, call: Callable[[], Any]) -> Any:
        doing = _TrioCall(self.loop)
        self.start(functools.partial(doing.run, call))
        cancelled = await doing.wait()
        if cancelled is not None:
            # asyncio cancels only once: if an error replaced it, the task could handle it and continue.
            give_back(doing.value)
            raise cancelled from doing.error
        if doing.error is not None:
            raise doing.error
        return self.outward(doing.value)

    # --- From trio to asyncio ---

    def handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        made = self._handlers.get(function)
        if made is None:
            made = self._handlers[function] = self._handler(function)
        return cast("Callable[..., Any]", made)

    def _handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and inspect.isasyncgenfunction(wrapped):

            @functools.wraps(function)
            @asynccontextmanager
            async def resource(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                block = function(*map(self.outward, args), **self._outwards(kwargs))
                value = await self.host(block.__aenter__)
                try:
                    yield inward(value)
                except BaseException as error:
                    # Cancellation has another class there.
                    raised = asyncio.CancelledError() if _is_cancelled(error) else error
                    leave = functools.partial(
                        block.__aexit__, type(raised), raised, error.__traceback__
                    )
                    with trio.CancelScope(shield=True):
                        if not await self.host(leave) or raised is not error:
                            raise
                else:
                    with trio.CancelScope(shield=True):
                        await self.host(functools.partial(block.__aexit__, None, None, None))

            # The type of the resource is read from the wrapped function.
            resource.__wrapped__ = wrapped
            return resource
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                parts = function(*map(self.outward, args), **self._outwards(kwargs))
                said: Any = None
                try:
                    while True:
                        try:
                            part = await self.host(functools.partial(parts.asend, said))
                        except StopAsyncIteration:
                            return
                        said = yield inward(part)
                finally:
                    with trio.CancelScope(shield=True):
                        await self.host(parts.aclose)

            return stream
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                outward = map(self.outward, args)
                bound = functools.partial(function, *outward, **self._outwards(kwargs))
                return inward(await self.host(bound))

            return call

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            return inward(function(*map(self.outward, args), **self._outwards(kwargs)))

        return plain

    def _outwards(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: self.outward(value) for name, value in kwargs.items()}

    async def host(self, call: Callable[[], Any]) -> Any:
        """Run the awaitable that *call* returns in a task of asyncio, and wait for it under trio."""
        context = self._context.copy()
        # Deadline and trace context of the handler's caller, for the calls that it makes.
        context.run(CALLER.set, CALLER.get())
        context.run(HANDLED.set, HANDLED.get())
        task = await task_of(self.loop, call, context)
        if task.cancelled():
            # The task was cancelled, but not because its caller was.
            raise Release
        return task.result()


def _is_cancelled(error: BaseException) -> bool:
    """Return whether *error* is the cancellation of a task of trio, with other exceptions or alone."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[0] is not None
    return isinstance(error, trio.Cancelled | GeneratorExit)


class _AioStandIn(StandIn):
    """Proxy that tasks of asyncio await, enter and iterate."""

    __slots__ = ("_block",)

    def __init__(self, bridge: _Guest, target: Any) -> None:
        super().__init__(bridge, target)
        self._block: _Block | None = None

    def __aiter__(self) -> Self:
        if hasattr(self._target, "__anext__"):
            return self
        return cast("Self", self._bridge.outward(self._target.__aiter__()))

    async def __anext__(self) -> Any:
        target = self._target
        if isinstance(target, Receiver):
            here = target.receive_nowait()
            if here is not None:
                return self._bridge.outward(here)
        return await self._bridge.wait(target.__anext__)

    async def __aenter__(self) -> Any:
        self._block = _Block(cast("_Guest", self._bridge), self._target)
        return await self._block.enter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._block is not None
        return await self._block.leave(error)

    def __enter__(self) -> Any:
        return self._bridge.outward(self._target.__enter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        return self._target.__exit__(kind, error, trace)


class _Block:
    """``async with`` block of a task of asyncio, entered on its behalf by a task of trio."""

    def __init__(self, guest: _Guest, manager: Any) -> None:
        self._guest = guest
        self._manager = manager
        self._inside = _TrioCall(guest.loop)
        self._outside = _TrioCall(guest.loop)
        self._outside.scope = self._inside.scope
        self._left = trio.Event()
        self._leaving = False
        self._error: BaseException | None = None
        self._host: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._interrupted = False

    async def enter(self) -> Any:
        self._host = asyncio.current_task()
        assert self._host is not None
        self._cancelling = self._host.cancelling()
        self._guest.start(self._run)
        cancelled = await self._inside.wait()
        if cancelled is None and not self._outside.ready:
            return self._guest.outward(self._inside.value)
        self._leaving = True
        await self._outside.wait()
        raise cancelled or self._outside.error or asyncio.CancelledError

    async def _run(self) -> None:
        await self._outside.run(self._within)
        self._inside.wake()

    async def _within(self) -> None:
        async with self._manager as value:
            self._inside.value = value
            self._inside.wake()
            try:
                await self._left.wait()
            finally:
                if not self._leaving:
                    # The block ends by itself: interrupt the task that is inside.
                    self._leaving = self._interrupted = True
                    assert self._host is not None
                    self._host.cancel()
            if isinstance(self._error, Exception):
                raise self._error
            if self._error is not None:
                self._outside.scope.cancel()
                await trio.lowlevel.checkpoint()

    async def leave(self, error: BaseException | None) -> bool:
        self._leaving = True
        self._error = error
        self._left.set()
        cancelled = await self._outside.wait()
        assert self._host is not None
        interrupted = (
            self._interrupted
            and self._host.uncancel() <= self._cancelling
            and isinstance(error, asyncio.CancelledError)
        )
        failure = self._outside.error
        if cancelled is not None:
            # As in _Guest.wait.
            raise cancelled from failure
        if failure is error and error is not None:
            return False
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
        if isinstance(error, Exception):
            # The block under trio has suppressed the error.
            return True
        return interrupted


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Run *work* to its end; return the cancellation of the caller meanwhile, None if there was none."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    return cancelled


_GUESTS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Guest]] = WeakKeyDictionary()


class _Entrance(DoorBlock, AbstractAsyncContextManager[Any]):
    """Block that starts the guest run if necessary."""

    statement = "async with"

    def __init__(self, make: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        super().__init__(f"amqp_rt.aio.{make.__name__}")
        self._make = make
        self._args = args
        self._kwargs = kwargs
        self._guest: _Guest | None = None
        self._inner: Any = None

    async def __aenter__(self) -> Any:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            name = self._make.__name__
            raise RuntimeError(
                f"amqp_rt.aio.{name} runs under asyncio: under trio use amqp_rt.{name}"
            ) from None
        guest = self._guest = _GUESTS.setdefault(loop, _Guest(loop))
        await guest.enter()
        try:
            nodes = [guest.nodes(node) for node in self._kwargs.pop("nodes", ())]
            given = {name: guest.given(value) for name, value in self._kwargs.items()}
            if nodes:
                given["nodes"] = nodes
            self._inner = guest.stand_in(self._make(*map(guest.given, self._args), **given))
            return await self._inner.__aenter__()
        except BaseException:
            await guest.leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._guest is not None
        try:
            return cast("bool", await self._inner.__aexit__(kind, error, trace))
        finally:
            await self._guest.leave()


def _entrance(
    make: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    @functools.wraps(make, updated=())
    def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _Entrance(make, args, dict(kwargs))

    return enter


if TYPE_CHECKING:
    Broker = _Broker
    Container = _Container
    Mesh = _Mesh
    connect = _connect
else:
    Broker = _entrance(_Broker)
    Container = _entrance(_Container)
    Mesh = _entrance(_Mesh)
    connect = _entrance(_connect)
