"""The common base of the API for asyncio and for threads, with proxies for objects under trio.

There is one implementation, and it runs under trio. An application that does not run under trio holds a
:class:`StandIn`: reading an attribute reads that of the object, a plain call is a plain call, and an
awaitable is run under trio while the caller waits in its own way. A result gets a stand-in as well if
it has anything to wait for.

:mod:`amqp_rt.aio` and :mod:`amqp_rt.sync` define how callers wait.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import AsyncGeneratorType, TracebackType
from typing import Any, ClassVar, Final, NoReturn, Self

import msgspec
import trio
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from .container.declaring import (
    NodeDecorator,
    Router,
    RpcDecorator,
    SourceDecorator,
    declared,
    timed_in,
)
from .container.deliveries import Delivery
from .container.item_sending import StreamedItems
from .container.routes import HandlerDeclaration
from .container.scopes import PerMessage

_DECORATORS: Final = (NodeDecorator, RpcDecorator, SourceDecorator)
#: Methods with nodes of the application as arguments.
_OF_NODES: Final = ("add", "remove", "serve")
#: Methods of objects that need a stand-in.
_WAITING: Final = ("__aenter__", "__anext__", "__aiter__", "__await__")


class StandIn:
    """Proxy that behaves like *target* for code on the other side of *bridge*."""

    __slots__ = ("_bridge", "_target")

    def __init__(self, bridge: Crossing, target: Any) -> None:
        self._bridge = bridge
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self._target).__name__!r} shows no {name!r} here")
        return self._bridge.attribute(self._target, name)

    @property  # type: ignore[misc]  # the attribute of object is writable
    def __class__(self) -> type:
        return type(self._target)

    def __repr__(self) -> str:
        return repr(self._target)

    def __eq__(self, other: object) -> bool:
        return bool(self._target == inward(other))

    def __hash__(self) -> int:
        return hash(self._target)


def give_back(value: Any) -> None:
    """Release the deliveries in *value*, whose receiving call was interrupted or cancelled."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, Delivery) and not each.presettled:
            each.release()


def inward(value: Any) -> Any:
    """Return the object behind a stand-in, or *value* itself if it is none."""
    return value._target if issubclass(type(value), StandIn) else value


def _lives(value: object) -> bool:
    """Return whether *value* has something to wait for."""
    kind: Any = type(value)
    return _is_alive(kind)


@functools.lru_cache(maxsize=1_000)
def _is_alive(kind: Any) -> bool:
    if issubclass(kind, AsyncGeneratorType):
        return True
    # Blocks of our methods are made by contextlib. Objects of the application wait in its own event loop.
    if not kind.__module__.startswith("amqp_rt") and kind.__module__ != "contextlib":
        return False
    return any(hasattr(kind, name) for name in _WAITING) or any(
        inspect.iscoroutinefunction(member) for _, member in inspect.getmembers_static(kind)
    )


class Crossing(ABC):
    """Crossing between trio and the code of an application."""

    #: Whether handlers that are plain functions run in threads without asking for one.
    uses_threads = False

    @abstractmethod
    def stand_in(self, target: Any) -> StandIn:
        """Return a proxy of *target* for the application."""

    @abstractmethod
    def wait(self, call: Callable[[], Any]) -> Any:
        """Run the awaitable that *call* returns under trio, while the application waits for it."""

    @abstractmethod
    def plain(self, call: Callable[[], Any]) -> Any:
        """Make a call that does not wait, in a thread where that is allowed."""

    @abstractmethod
    def handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap *function* of the application for calls from trio; keep its name and signature."""

    def outward(self, value: Any) -> Any:
        """Return *value* in the form for the application."""
        if isinstance(value, list | tuple) and any(map(_lives, value)):
            return type(value)(map(self.outward, value))
        if _lives(value):
            return self.stand_in(value)
        if inspect.iscoroutinefunction(value):
            return self._calling(value)
        return value

    def given(self, value: Any) -> Any:
        """Return *value* in the form for objects under trio."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.given, value))
        if inspect.isfunction(value) or inspect.ismethod(value):
            return self.handler(value)
        if isinstance(value, StreamedItems):
            return StreamedItems(self._generating(value.items)())
        if isinstance(value, PerMessage):
            return PerMessage(self.handler(value.factory), as_type=value.as_type)
        return inward(value)

    @abstractmethod
    def _handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap *function* as :meth:`handler` does, for one use."""

    def _generating(self, items: Any) -> Callable[[], Any]:
        """Return a function whose generator iterates, under trio, over *items* of the application."""
        if isinstance(items, AsyncIterable):

            async def waiting() -> AsyncIterator[Any]:
                async for item in items:
                    yield item

            return self._handler(waiting)

        def plain() -> Iterator[Any]:
            yield from items

        return self._handler(plain)

    def attribute(self, target: Any, name: str) -> Any:
        """Return attribute *name* of *target* in the form for the application."""
        value = getattr(target, name)
        if isinstance(value, _DECORATORS):
            return type(value)(functools.partial(self._declare, value.register))
        if inspect.isroutine(value):
            return self._calling(value, self.nodes if name in _OF_NODES else self.given)
        return self.outward(value)

    def _calling(
        self, function: Callable[..., Any], given: Callable[[Any], Any] | None = None
    ) -> Callable[..., Any]:
        """Wrap *function* of an object under trio for calls from the application."""
        waits = inspect.iscoroutinefunction(function)
        take = given or self.given

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(
                function,
                *map(take, args),
                **{name: self.given(value) for name, value in kwargs.items()},
            )
            return self.wait(bound) if waits else self.outward(self.plain(bound))

        return call

    def _declare(
        self,
        register: Callable[[Any, HandlerDeclaration], None],
        function: Any,
        declaration: HandlerDeclaration,
    ) -> None:
        register(self.handler(function), self._declaration(declaration))

    def _declaration(self, declaration: HandlerDeclaration) -> HandlerDeclaration:
        """Return *declaration* for the wrapped function."""
        middleware = tuple(map(self.handler, declaration.middleware))
        thread = declaration.thread and not self.uses_threads
        return msgspec.structs.replace(declaration, middleware=middleware, thread=thread)

    def nodes(self, node: Any) -> Any:
        """Wrap *node* of the application for calls from trio; an address is returned unchanged."""
        if isinstance(node, str):
            return node
        router = Router()
        for function, declaration in declared(node):
            router.declare(self.handler(function), self._declaration(declaration))
        for function, timing in timed_in(node):
            router.time(self.handler(function), timing)
        return router


# --- Threads ---

#: The one thread of a process in which trio runs for other threads, as long as a block is open.
_THREAD: Final = BlockingPortalProvider("trio")


#: Blocks entered and not left yet.
_OPEN: Final[dict[ExitStack, None]] = {}


@atexit.register
def _leave_open_blocks() -> None:
    """Leave the blocks that a program has left open, such as one entered by hand.

    Later during the shutdown of the interpreter the thread of trio is stopped, and leaving them would
    wait for it for ever.
    """
    for stack in reversed(list(_OPEN)):
        with suppress(Exception):
            stack.__exit__(SystemExit, SystemExit(), None)


class _Doing:
    """Call under trio whose waiting thread may be interrupted."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._abandoned = False
        self.value: Any = None

    async def run(self) -> Any:
        """Perform the call."""
        self.value = await self._call()
        if self._abandoned:
            give_back(self.value)
        return self.value

    def abandon(self) -> None:
        """Release the deliveries that the call has returned, or will return when it ends."""
        self._abandoned = True
        give_back(self.value)


class ThreadBridge(Crossing):
    """Bridge for threads, which leads to the thread in which trio runs."""

    uses_threads = True

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal
        self._handlers: dict[Any, Any] = {}

    def stand_in(self, target: Any) -> StandIn:
        return _SyncStandIn(self, target)

    def wait(self, call: Callable[[], Any]) -> Any:
        doing = _Doing(call)
        future = self.portal.start_task_soon(doing.run)
        try:
            return self.outward(future.result())
        except BaseException:
            if not future.done() or doing.value is not None:
                # This thread was interrupted, not the call.
                future.cancel()
                self.portal.call(doing.abandon)
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


_Raised = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class _ThreadBlock:
    """Asynchronous context manager that a thread enters and leaves, in one task under trio.

    If the thread is interrupted while it waits, the task is cancelled and its end awaited: nothing stays
    open that no ``with`` block would close.
    """

    def __init__(self, portal: BlockingPortal, target: Any) -> None:
        self._portal = portal
        self._target = target
        self._scope = trio.CancelScope()
        self._leaving = trio.Event()
        self._raised: _Raised = (None, None, None)
        self._entered: Future[Any] = Future()
        self._left: Future[Any] | None = None
        self._ended = threading.Event()

    async def _run(self) -> Any:
        try:
            with self._scope:
                return await self._hold()
        finally:
            self._ended.set()

    async def _hold(self) -> Any:
        try:
            entered = await self._target.__aenter__()
        except BaseException as error:
            self._entered.set_exception(error)
            raise
        self._entered.set_result(entered)
        try:
            await self._leaving.wait()
        except BaseException as error:
            await self._target.__aexit__(type(error), error, error.__traceback__)
            raise
        return await self._target.__aexit__(*self._raised)

    def enter(self) -> Any:
        try:
            self._left = self._portal.start_task_soon(self._run)
            return self._entered.result()
        except BaseException:
            self.abandon()
            raise

    def leave(self, *raised: Any) -> bool | None:
        assert self._left is not None
        try:
            self._raised = raised
            self._portal.call(self._leaving.set)
            done: bool | None = self._left.result()
        except BaseException:
            self.abandon()
            raise
        return done

    def abandon(self) -> None:
        """Cancel the block unless it has ended, and wait for its end."""
        if self._ended.is_set():
            return
        # Also if the task has not begun yet: then it ends at its first checkpoint.
        self._portal.call(self._scope.cancel)
        if self._left is not None:
            self._ended.wait()


class _SyncStandIn(StandIn):
    """Proxy that threads call, enter and iterate."""

    __slots__ = ("_block",)
    _bridge: ThreadBridge

    def __init__(self, bridge: ThreadBridge, target: Any) -> None:
        super().__init__(bridge, target)
        self._block: _ThreadBlock | None = None

    def __iter__(self) -> Self:
        if hasattr(self._target, "__anext__"):
            return self
        stream: Self = self._bridge.outward(self._bridge.plain(self._target.__aiter__))
        return stream

    def __next__(self) -> Any:
        try:
            return self._bridge.wait(self._target.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        if hasattr(self._target, "__enter__"):
            return self._bridge.outward(self._bridge.plain(self._target.__enter__))
        block = self._block = _ThreadBlock(self._bridge.portal, self._target)
        entered = block.enter()
        try:
            return self._bridge.outward(entered)
        except BaseException:
            block.abandon()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._block is None:
            done: bool | None = self._bridge.plain(
                functools.partial(self._target.__exit__, kind, error, trace)
            )
            return done
        return self._block.leave(kind, error, trace)


class DoorBlock:
    """Block of asyncio or of threads around an object of trio, which exists once the block is entered.

    Args:
        name: Name of what the application has called, such as ``amqp_rt.aio.Container``.
    """

    #: Statement that enters the block.
    statement: ClassVar[str] = "with"

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> NoReturn:
        """Say how to get at *name*, which type checkers find here."""
        if name.startswith("_") or name == "name":
            raise AttributeError(name)  # Copies and others look for special methods.
        if name in ("run", "run_async"):
            raise AttributeError(
                f"{self.name} has no {name}(): enter its block in a program of your own, as in the guide to asyncio "
                "and threads, or run a container of amqp_rt"
            )
        raise AttributeError(
            f"{self.name}(...) has no {name!r} before its block: {self.statement} {self.name}(...) as ..."
        )


class _ThreadDoorBlock(DoorBlock, AbstractContextManager[Any]):
    """Block that starts the thread of trio if necessary."""

    def __init__(self, name: str, block: AbstractContextManager[Any]) -> None:
        super().__init__(name)
        self._block = block

    def __enter__(self) -> Any:
        return self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)


def thread_entrance(make: Callable[..., Any]) -> Callable[..., AbstractContextManager[Any]]:
    """Wrap *make* for threads: its block starts the thread of trio if necessary."""

    @contextmanager
    def enter(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            _OPEN[stack] = None
            stack.callback(_OPEN.pop, stack, None)
            bridge = ThreadBridge(stack.enter_context(_THREAD))
            nodes = [bridge.nodes(node) for node in kwargs.pop("nodes", ())]
            given = {name: bridge.given(value) for name, value in kwargs.items()}
            if nodes:
                given["nodes"] = nodes
            made = bridge.plain(functools.partial(make, *map(bridge.given, args), **given))
            yield stack.enter_context(bridge.stand_in(made))

    @functools.wraps(make, updated=())
    def entrance(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return _ThreadDoorBlock(f"amqp_rt.sync.{make.__name__}", enter(*args, **kwargs))

    return entrance
