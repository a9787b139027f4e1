"""Declarations of handlers at addresses: decorators and routers.

A decorator marks the function and returns it unchanged; a container creates a
:class:`~amqp_rt.container.routes.Route` from the mark.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from ..addresses import Pattern
from ..policies import Retry
from .boxes import NodeInbox
from .raising import OnError
from .routes import PREFETCH, Batch, HandlerDeclaration, Kind, Middleware, check_form
from .timing import TIMED, CronDecorator, EveryDecorator, RunTimes

F = TypeVar("F", bound=Callable[..., Any])

#: Handlers that run at once by default (decision 0004): a node keeps the order of its messages.
SLOTS: Final[Mapping[Kind, int]] = {"node": 1, "rpc": 64, "source": 64, "link": 64}

MARK: Final = "__amqp_declarations__"


def _declare(
    kind: Kind,
    address: str,
    *,
    slots: int | None = None,
    prefetch: int | None = None,
    streaming: bool = False,
    mode: Literal["copy", "move"] = "copy",
    filters: Collection[str] = (),
    on_error: OnError | None = None,
    retry: Retry | None = None,
    thread: bool = False,
    batch: Batch | None = None,
    inbox: NodeInbox | None = None,
    middleware: Sequence[Middleware] = (),
) -> HandlerDeclaration:
    if not isinstance(address, str):
        raise TypeError(f"@{kind} takes an address, for example @{kind}('orders'), not {address!r}")
    if slots is None:
        slots = SLOTS[kind]
    if prefetch is None:
        prefetch = 0 if streaming else PREFETCH
    if slots < 1:
        raise ValueError(f"{address!r}: slots must be at least 1, not {slots}")
    if prefetch < 0:
        raise ValueError(f"{address!r}: prefetch must not be negative, it is {prefetch}")
    if retry is not None and on_error is not None:
        raise ValueError(f"{address!r}: give retry or on_error, not both")
    if batch is not None and streaming:
        raise ValueError(f"{address!r}: give batch or streaming, not both")
    if batch is not None and not isinstance(batch, Batch):
        raise TypeError(f"{address!r}: batch= takes Batch(messages=100), not {batch!r}")
    if mode not in ("copy", "move"):
        raise ValueError(f"{address!r}: mode is 'copy' or 'move', not {mode!r}")
    Pattern(address)  # A malformed address is refused where it is written
    return HandlerDeclaration(
        kind=kind,
        address=address,
        slots=slots,
        prefetch=prefetch,
        streaming=streaming,
        mode=mode,
        filters=tuple(filters),
        on_error=on_error,
        retry=retry,
        thread=thread,
        batch=batch,
        inbox=inbox,
        middleware=tuple(middleware),
    )


class _Decorators:
    """Base of decorators: they record declarations on functions, or add them to a container."""

    def __init__(self, register: Callable[[Any, HandlerDeclaration], None]) -> None:
        self.register = register

    def _decorator(self, declaration: HandlerDeclaration) -> Callable[[F], F]:
        def decorate(function: F) -> F:
            check_form(declaration.kind, function)
            declaration.names = _names_around(function, sys._getframe(1))
            self.register(function, declaration)
            return function

        return decorate


class NodeDecorator(_Decorators):
    """Decorator of functions that handle each message sent to an address.

    Returning accepts the message; raising :class:`Reject`, :class:`Release` or :class:`Modify`
    gives it the outcome of that name, and any other exception that of *on_error*.
    """

    def __call__(
        self,
        address: str,
        *,
        slots: int | None = None,
        prefetch: int | None = None,
        streaming: bool = False,
        on_error: OnError | None = None,
        retry: Retry | None = None,
        thread: bool = False,
        batch: Batch | None = None,
        inbox: NodeInbox | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[F], F]:
        """Declare the decorated function as the node at *address*.

        Args:
            address: An address, or a pattern with captures such as ``"orders/{region}"``.
            slots: Messages handled at once; 1, the default, keeps their order.
            prefetch: Messages that wait behind them on each link (and at most 8 MiB). 0 gives
                credit only for free slots.
            streaming: The handler reads the body while it arrives, in bounded memory, from a
                parameter ``AsyncIterator[bytes]``.
            on_error: The outcome after an exception, instead of *modified, delivery-failed*.
            retry: Attempts and pauses after exceptions, counted in the message by its queue, for all
                workers and over restarts. Its ``budget`` and ``attempt_s`` are for calls only.
            thread: Call the function, a ``def`` that blocks, in a thread; at most *slots* at once. It cannot be
                cancelled: the end of the container waits until it returns.
            batch: Pass messages in lists, of all links together. *slots* then counts batches. The handler returns
                None, one outcome for all, or a list with one for each; an exception fails all of them.
            inbox: Record of processed messages, such as :class:`amqp_rt.outbox.SqlInbox`, written by the transaction of
                the handler: a message that was processed is accepted without calling it, and one without message-id
                is rejected. With *batch*, the handler gets the messages that are left, and one transaction records them.
            middleware: Wrapped around the handler, the first outermost.
        """
        return self._decorator(
            _declare(
                "node",
                address,
                slots=slots,
                prefetch=prefetch,
                streaming=streaming,
                on_error=on_error,
                retry=retry,
                thread=thread,
                batch=batch,
                inbox=inbox,
                middleware=middleware,
            )
        )

    def link(
        self,
        address: str,
        *,
        prefetch: int | None = None,
        streaming: bool = False,
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[F], F]:
        """Declare a function that gets each whole link to *address*, in either direction."""
        return self._decorator(
            _declare("link", address, prefetch=prefetch, streaming=streaming, middleware=middleware)
        )


class RpcDecorator(_Decorators):
    """Decorator of functions that answer requests; see :meth:`__call__`."""

    def __call__(
        self,
        address: str,
        *,
        slots: int | None = None,
        prefetch: int | None = None,
        thread: bool = False,
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[F], F]:
        """Declare the decorated function as the handler of requests to *address*.

        Its return value is the reply; each value that an async generator yields is one message of a
        streamed reply. The handler is cancelled if its caller gives up or the caller's deadline
        passes.

        Args:
            address: An address, or a pattern with captures.
            slots: Requests answered at once.
            prefetch: Requests that wait behind them on each link.
            thread: Call the function, a ``def`` that blocks, in a thread, at most *slots* at once. It goes on
                when its caller gives up, and its reply is dropped.
            middleware: Wrapped around the handler, the first outermost.
        """
        return self._decorator(
            _declare(
                "rpc",
                address,
                slots=slots,
                prefetch=prefetch,
                thread=thread,
                middleware=middleware,
            )
        )


class SourceDecorator(_Decorators):
    """Decorator of async generators from which peers receive; see :meth:`__call__`."""

    def __call__(
        self,
        address: str,
        *,
        mode: Literal["copy", "move"] = "copy",
        filters: Collection[str] = (),
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[F], F]:
        """Declare the decorated async generator as a source of messages at *address*.

        The generator runs once for each link, no faster than the link's credit, and is closed with
        it.

        Args:
            address: An address, or a pattern with captures.
            mode: ``"copy"`` sends each value and continues; with ``"move"`` the value of ``yield``
                is the outcome, and the next value is requested when it is known (Part 3 §3.5.7).
            filters: Names of the filters that the generator applies. Only these are answered as
                being in effect (Part 3 §3.5.8).
            middleware: Wrapped around the handler, the first outermost.
        """
        return self._decorator(
            _declare("source", address, mode=mode, filters=filters, middleware=middleware)
        )


def _mark(function: Any, declaration: HandlerDeclaration) -> None:
    target = getattr(function, "__func__", function)
    if not callable(target):
        raise TypeError(f"@{declaration.kind} decorates functions and methods, not {function!r}")
    vars(target).setdefault(MARK, []).append(declaration)


node: Final = NodeDecorator(_mark)
rpc: Final = RpcDecorator(_mark)
source: Final = SourceDecorator(_mark)


def _names_around(function: Any, frame: types.FrameType | None) -> dict[str, Any]:
    """Return local names that string annotations of *function* mention.

    With postponed annotations there is no other way to find a class that is defined inside the
    function that also defines the handler.
    """
    target = getattr(function, "__func__", function)
    texts = " ".join(
        text for text in getattr(target, "__annotations__", {}).values() if isinstance(text, str)
    )
    words = set(re.findall(r"\w+", texts))
    space = getattr(target, "__globals__", None)
    found: dict[str, Any] = {}
    while frame is not None and frame.f_globals is space and frame.f_locals is not space:
        # Since Python 3.13 the keys of a frame's names are a list.
        for word in words.intersection(frame.f_locals):
            found.setdefault(word, frame.f_locals[word])
        frame = frame.f_back
    return found


class Router:
    """Nodes under a common prefix, with their own middleware.

    Args:
        prefix: Put before each address without a separator: ``"shop/"``.
        nodes: Functions, objects with decorated methods, or other routers.
        middleware: Wrapped around each handler, outside of the handler's own.
    """

    def __init__(
        self,
        prefix: str = "",
        *,
        nodes: Iterable[Any] = (),
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self.prefix = prefix
        self.middleware = tuple(middleware)
        self.node = NodeDecorator(self.declare)
        self.rpc = RpcDecorator(self.declare)
        self.source = SourceDecorator(self.declare)
        #: Functions that run at certain times.
        self.timed: list[tuple[Any, RunTimes]] = []
        self.every = EveryDecorator(self.time)
        self.cron = CronDecorator(self.time)
        self._declared: list[tuple[Any, HandlerDeclaration]] = []
        self.add(*nodes)

    def add(self, *nodes: Any) -> None:
        """Add functions, objects or routers; containers that have this router do not change."""
        for each in nodes:
            self._declared += declared(each)
            self.timed += timed_in(each)

    def time(self, function: Any, timing: RunTimes) -> None:
        """Add a function with its times, as a decorator would record them."""
        self.timed.append((function, timing))

    def declare(self, function: Any, declaration: HandlerDeclaration) -> None:
        """Add a function with a declaration, as a decorator would record it."""
        self._declared.append((function, declaration))

    @property
    def declared(self) -> list[tuple[Any, HandlerDeclaration]]:
        """Handlers of the router, with prefix and middleware applied to their declarations."""
        return [
            (
                function,
                msgspec.structs.replace(
                    declaration,
                    address=self.prefix + declaration.address,
                    middleware=(*self.middleware, *declaration.middleware),
                ),
            )
            for function, declaration in self._declared
        ]

    def __repr__(self) -> str:
        return f"<Router {self.prefix!r}: {len(self._declared)} nodes>"


def declared(thing: Any) -> list[tuple[Callable[..., Any], HandlerDeclaration]]:
    """Return the handlers that *thing* declares: a function, an object with such methods, a router.

    Raises:
        TypeError: *thing* declares no handler.
    """
    if isinstance(thing, Router):
        return thing.declared
    own = getattr(thing, MARK, None)
    if own and not inspect.isclass(thing):
        return [(thing, declaration) for declaration in own]
    if inspect.isclass(thing):
        raise TypeError(f"{thing.__name__} is a class: give an object, {thing.__name__}(…)")
    found = [
        (getattr(thing, name), declaration)
        for name, member in inspect.getmembers_static(type(thing))
        for declaration in getattr(getattr(member, "__func__", member), MARK, ())
    ]
    if not found and not timed_in(thing):
        what = f"{getattr(thing, '__qualname__', type(thing).__name__)}"
        raise TypeError(
            f"{what} declares no node: decorate it, or a method of it, "
            "with @node, @rpc, @source or @node.link, or to run at certain times with @every or @cron. "
            "A container's own @app.node declares a function for that container alone"
        )
    # In the order of the class body, as its author wrote it.
    order = {name: at for at, name in enumerate(vars(type(thing)))}
    return sorted(found, key=lambda each: order.get(each[0].__name__, -1))


def timed_in(thing: Any) -> list[tuple[Callable[..., Any], RunTimes]]:
    """Return the functions of *thing* that run at certain times: itself, its methods, or those of a router."""
    if isinstance(thing, Router):
        return thing.timed
    if inspect.isclass(thing):
        return []
    own = getattr(thing, TIMED, None)
    if own:
        return [(thing, timing) for timing in own]
    return [
        (getattr(thing, name), timing)
        for name, member in inspect.getmembers_static(type(thing))
        for timing in getattr(getattr(member, "__func__", member), TIMED, ())
    ]
