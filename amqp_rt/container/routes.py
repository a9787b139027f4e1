"""Declarations of handlers at addresses: decorators, routes, and the arguments of handlers.

A decorator marks the function and returns it unchanged; a container creates a :class:`Route` from
the mark. The signature is read once, when the route is created: the first free positional parameter
takes the payload, typed by its annotation; captures of the address are matched by name, and all
other arguments by type. Values that are constant for a link are computed when it attaches, so a
message costs one call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from math import inf
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import trio
from msgspec import Struct

from ..addresses import Pattern
from ..errors import AmqpError, DecodeError
from ..events import Peer
from ..fronts.base import IncomingDelivery, ReceivingLink, SendingLink
from ..message import Message
from ..outcomes import MODIFIED_FAILED, RELEASED, Error, Modified, Outcome, Rejected
from ..termini import Source, Target
from .connections import Connection
from .payloads import check_payload_type, decode_payload, has_no_payload
from .receiving import Delivery

if TYPE_CHECKING:
    from .container import Container
    from .replies import ReplyLink

log = logging.getLogger("amqp_rt.handlers")

F = TypeVar("F", bound=Callable[..., Any])

Kind: TypeAlias = Literal["node", "rpc", "source", "link"]

#: Handlers that run at once by default (decision 0004): a node keeps the order of its messages.
SLOTS: Final[Mapping[Kind, int]] = {"node": 1, "rpc": 64, "source": 64, "link": 64}
#: Messages that wait behind the running ones on each link.
PREFETCH: Final = 500

MARK: Final = "__amqp_declarations__"


class RaisedOutcome(AmqpError):
    """Outcome that a handler raises instead of returning it (Part 3 §3.4)."""

    @property
    def outcome(self) -> Outcome:
        """Outcome that the sender gets."""
        raise NotImplementedError


class Reject(RaisedOutcome):
    """Outcome of an invalid message, which will never be processed (Part 3 §3.4.3). Raise it."""

    default_condition = "amqp:precondition-failed"

    @property
    def outcome(self) -> Outcome:
        return Rejected(Error.of(self))


class Release(RaisedOutcome):
    """Outcome of a message not processed and not changed (Part 3 §3.4.4).

    Raise it from a handler if another attempt may succeed.
    """

    default_condition = "amqp:not-allowed"

    @property
    def outcome(self) -> Outcome:
        return RELEASED


class Modify(RaisedOutcome):
    """Outcome of a message not processed, with changes for its next delivery (Part 3 §3.4.5).

    Raise it from a handler.

    Args:
        description: Used in the log only, since the outcome has no field for it.
        failed: The attempt counts: ``delivery-count`` is increased.
        undeliverable_here: The message is not to be sent to this link again.
        annotations: Entries to merge into the message annotations.
    """

    default_condition = "amqp:not-allowed"

    def __init__(
        self,
        description: str = "",
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
    ) -> None:
        super().__init__(description)
        self.failed = failed
        self.undeliverable_here = undeliverable_here
        self.annotations = annotations

    @property
    def outcome(self) -> Outcome:
        return Modified(self.failed, self.undeliverable_here, self.annotations)


class Deadline:
    """Time until which a caller waits, in trio's clock; its handler is cancelled afterwards."""

    __slots__ = ("at",)

    def __init__(self, at: float = inf) -> None:
        self.at = at

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative; infinite if the caller set no deadline."""
        return max(0.0, self.at - trio.current_time())

    @property
    def passed(self) -> bool:
        return trio.current_time() >= self.at

    def __repr__(self) -> str:
        return "Deadline()" if self.at == inf else f"Deadline(in {self.remaining_s:.3f} s)"


NO_DEADLINE: Final = Deadline()


class Binding:
    """Link and the route that it attached to: values that are the same for each of its messages."""

    __slots__ = (
        "address",
        "asked",
        "captures",
        "connection",
        "container",
        "link",
        "relay",
        "route",
    )

    def __init__(
        self,
        route: Route,
        container: Container,
        connection: Connection,
        link: ReceivingLink | SendingLink | None,
        address: str,
        captures: Mapping[str, Any],
        *,
        asked: Source | Target | None = None,
        relay: ReplyLink | None = None,
    ) -> None:
        self.route = route
        self.container = container
        self.connection = connection
        #: None only until a link that we requested is attached.
        self.link: Any = link
        #: Our terminus as the peer requested it; ``link`` has the one that we answered.
        self.asked = asked
        #: The peer's anonymous terminus, to which replies go instead of to the request's address.
        self.relay = relay
        #: The address that the peer requested, and the captures of the pattern in it.
        self.address = address
        self.captures = captures

    @property
    def peer(self) -> Peer:
        """Peer at the other end of the link."""
        peer: Peer = self.link.peer
        return peer


class Context:
    """Message on its way to a handler, as middleware gets it.

    ``payload`` may be replaced before the handler is called. For sources and handlers of whole
    links there is no message: ``delivery`` and ``message`` are None, and ``payload`` is the link's
    :class:`~amqp_rt.container.serving.SourceLink`, sender or receiver.
    """

    __slots__ = ("binding", "deadline", "delivery", "message", "payload")

    def __init__(
        self,
        binding: Binding,
        delivery: IncomingDelivery | None,
        message: Message | None,
        deadline: Deadline,
        payload: Any,
    ) -> None:
        self.binding = binding
        self.delivery = delivery
        self.message = message
        self.deadline = deadline
        self.payload = payload

    @property
    def address(self) -> str:
        return self.binding.address

    @property
    def captures(self) -> Mapping[str, Any]:
        return self.binding.captures

    @property
    def peer(self) -> Peer:
        return self.binding.peer

    @property
    def route(self) -> Route:
        return self.binding.route

    def __repr__(self) -> str:
        return f"<Context {self.route.name} {self.address!r}>"


CallNext: TypeAlias = Callable[[Context], Awaitable[Any]]
#: ``async def middleware(call_next, context)``: awaits ``call_next(context)``, or does not.
Middleware: TypeAlias = Callable[[CallNext, Context], Awaitable[Any]]
#: Outcome of a message whose handler raised, or a function from the exception to it.
OnError: TypeAlias = Outcome | Callable[[Exception], Outcome]


class Declaration(Struct, kw_only=True):
    """Declaration of a handler, as a decorator records it on a function."""

    kind: Kind
    address: str
    slots: int
    prefetch: int
    streaming: bool = False
    mode: Literal["copy", "move"] = "copy"
    filters: tuple[str, ...] = ()
    on_error: OnError | None = None
    middleware: tuple[Middleware, ...] = ()
    #: Local names of the enclosing function that the annotations mention.
    names: dict[str, Any] = {}


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
    middleware: Sequence[Middleware] = (),
) -> Declaration:
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
    if mode not in ("copy", "move"):
        raise ValueError(f"{address!r}: mode is 'copy' or 'move', not {mode!r}")
    Pattern(address)  # A malformed address is refused where it is written
    return Declaration(
        kind=kind,
        address=address,
        slots=slots,
        prefetch=prefetch,
        streaming=streaming,
        mode=mode,
        filters=tuple(filters),
        on_error=on_error,
        middleware=tuple(middleware),
    )


def _check_form(kind: Kind, function: Any) -> None:
    """Check the form of *function* as a handler of *kind*, apart from its annotations.

    Raises:
        TypeError: The form is wrong.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    called = _called(function)
    if kind == "link" and not inspect.iscoroutinefunction(called):
        raise TypeError(f"{name}: the handler of a link is an `async def` without `yield`")
    if (
        kind == "source"
        and not inspect.isasyncgenfunction(called)
        and "return" not in getattr(called, "__annotations__", {})
    ):
        raise TypeError(f"{name}: a source is an async generator: `async def` with `yield` in it")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: its signature cannot be read: {error}") from None
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(
                f"{name}: nothing is given to *{parameter.name}: name each parameter; a decorator of your"
                " own keeps them with functools.wraps"
            )


class _Decorators:
    """Base of decorators: they record declarations on functions, or add them to a container."""

    def __init__(self, register: Callable[[Any, Declaration], None]) -> None:
        self.register = register

    def _decorator(self, declaration: Declaration) -> Callable[[F], F]:
        def decorate(function: F) -> F:
            _check_form(declaration.kind, function)
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
            middleware: Wrapped around the handler, the first outermost.
        """
        return self._decorator(
            _declare("rpc", address, slots=slots, prefetch=prefetch, middleware=middleware)
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


def _mark(function: Any, declaration: Declaration) -> None:
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
        for word in words & frame.f_locals.keys():
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
        self._declared: list[tuple[Any, Declaration]] = []
        self.add(*nodes)

    def add(self, *nodes: Any) -> None:
        """Add functions, objects or routers; containers that have this router do not change."""
        for each in nodes:
            self._declared += declared(each)

    def declare(self, function: Any, declaration: Declaration) -> None:
        """Add a function with a declaration, as a decorator would record it."""
        self._declared.append((function, declaration))

    @property
    def declared(self) -> list[tuple[Any, Declaration]]:
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


def declared(thing: Any) -> list[tuple[Callable[..., Any], Declaration]]:
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
    if not found:
        what = f"{getattr(thing, '__qualname__', type(thing).__name__)}"
        raise TypeError(
            f"{what} declares no node: decorate it, or a method of it, "
            "with @node, @rpc, @source or @node.link"
        )
    # In the order of the class body, as its author wrote it.
    order = {name: at for at, name in enumerate(vars(type(thing)))}
    return sorted(found, key=lambda each: order.get(each[0].__name__, -1))


class Stats(Struct):
    """Counts of a route's links and messages so far."""

    links: int = 0
    received: int = 0
    #: Messages of a source, replies of an rpc.
    sent: int = 0
    accepted: int = 0
    rejected: int = 0
    released: int = 0
    modified: int = 0
    #: Abandoned by their sender: requests, also past their deadline, and incomplete messages.
    cancelled: int = 0
    #: Handlers that raised an exception other than an outcome.
    failed: int = 0


#: Function that makes one argument for a message.
_Maker: TypeAlias = Callable[[Context], Any]


class Resources:
    """Objects that handlers may request by type.

    A factory is an ``@asynccontextmanager`` function whose return annotation names the type that it
    yields; it is entered when the container starts and left when the container has stopped.
    """

    def __init__(self, provided: Iterable[Any] = ()) -> None:
        self._values: dict[type, Any] = {}
        self._factories: dict[type, Callable[[], AbstractAsyncContextManager[Any]]] = {}
        for each in provided:
            self.provide(each)

    def provide(self, thing: Any, *, as_type: type | None = None) -> None:
        """Add an object, or a factory of one.

        Raises:
            TypeError: The type of the factory's object is unknown, or there is a resource of that
                type.
        """
        wrapped = getattr(thing, "__wrapped__", None)
        kind: Any
        if wrapped is not None and inspect.isasyncgenfunction(wrapped):
            kind = as_type
            if kind is None:
                made = get_args(get_type_hints(wrapped).get("return"))
                kind = made[0] if made else None
            if not isinstance(kind, type):
                raise TypeError(
                    f"{thing.__qualname__}() does not say what it yields: annotate it as "
                    "-> AsyncIterator[Thing], or pass as_type=Thing"
                )
            self._free(kind)
            self._factories[kind] = thing
        else:
            kind = as_type or type(thing)
            self._free(kind)
            self._values[kind] = thing

    def _free(self, kind: type) -> None:
        if kind in self._values or kind in self._factories:
            raise TypeError(f"there is a resource of type {kind.__name__} already")

    @property
    def unmade(self) -> Mapping[type, Callable[[], AbstractAsyncContextManager[Any]]]:
        """Factories whose object has not been made."""
        return {kind: make for kind, make in self._factories.items() if kind not in self._values}

    def made(self, kind: type, value: Any) -> None:
        """Store the object made by the factory of *kind*."""
        self._values[kind] = value

    def find(self, wanted: Any) -> type | None:
        """Return the type of the resource that fits a parameter annotated *wanted*, or None.

        Raises:
            TypeError: Several resources fit.
        """
        if not isinstance(wanted, type) or wanted is object:
            return None
        known = [*self._values, *(set(self._factories) - set(self._values))]
        if wanted in known:
            return wanted
        fitting = [kind for kind in known if _is_subclass(kind, wanted)]
        if len(fitting) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in fitting))
            raise TypeError(f"{names} are both a {wanted.__name__}: ask for one of them")
        return fitting[0] if fitting else None

    def __getitem__(self, kind: type) -> Any:
        return self._values[kind]


def _is_subclass(kind: type, wanted: type) -> bool:
    try:
        return issubclass(kind, wanted)
    except TypeError:  # A protocol with data members, or not a runtime one
        return False


def _message(context: Context) -> Any:
    return context.message


def _delivery(context: Context) -> Any:
    return None if context.delivery is None else Delivery(context.delivery)


def _payload(context: Context) -> Any:
    return context.payload


def _payload_part(at: int) -> _Maker:
    return lambda context: context.payload[at]


def _constant(value: Any) -> _Maker:
    return lambda context: value


#: Arguments that are matched by type, with the functions that make them.
_BY_TYPE: Final[dict[type, _Maker]] = {
    Message: _message,
    Delivery: _delivery,
    Peer: lambda context: context.binding.peer,
    Connection: lambda context: context.binding.connection,
    Deadline: lambda context: context.deadline,
    Context: lambda context: context,
}

#: Arguments through which a handler can read the message itself.
_WHOLE: Final = tuple(_BY_TYPE[kind] for kind in (Message, Delivery, Context))

#: Annotations of values to iterate over.
_STREAMS: Final = (AsyncIterator, AsyncIterable, AsyncGenerator)


def _plain(wanted: Any) -> Any:
    """Return *wanted* without ``Annotated`` and ``| None``."""
    if get_origin(wanted) is Annotated:
        wanted = get_args(wanted)[0]
    if get_origin(wanted) in (Union, types.UnionType):
        rest = [each for each in get_args(wanted) if each is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return wanted


def _is_stream_of_bytes(wanted: Any) -> bool:
    return get_origin(wanted) in _STREAMS and get_args(wanted)[0] is bytes


def _called(function: Any) -> Any:
    """Return the function that has the annotations of *function* and whose code runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function
    return type(function).__call__


def _wrapped(call: Callable[[Context], Any], middleware: Sequence[Middleware]) -> CallNext:
    """Wrap *call* in *middleware*, the first outermost."""

    async def handler(context: Context) -> Any:
        result = call(context)
        return await result if inspect.isawaitable(result) else result

    wrapped: CallNext = handler
    for each in reversed(middleware):
        wrapped = functools.partial(each, wrapped)
    return wrapped


class Route:
    """Handler at an address, with its signature read.

    Raises:
        TypeError: A parameter of the signature cannot be provided.
    """

    def __init__(
        self, function: Callable[..., Any], declaration: Declaration, resources: Resources
    ) -> None:
        self.function = function
        self.kind: Kind = declaration.kind
        self.address = declaration.address
        self.pattern = Pattern(declaration.address)
        self.slots = declaration.slots
        self.prefetch = declaration.prefetch
        self.streaming = declaration.streaming
        self.mode = declaration.mode
        self.filters = declaration.filters
        self.middleware = declaration.middleware
        self.on_error = declaration.on_error
        self.name: str = getattr(function, "__qualname__", type(function).__name__)
        self.stats = Stats()
        #: Type of the payload, ``Any`` if it is not annotated; None if the handler takes no
        #: payload.
        self.payload: Any = None
        #: Type of the reply, or of each item of a streamed one; ``Any`` if it is not annotated.
        self.reply: Any = Any
        self._resources = resources
        self._positional: list[_Maker] = []
        self._keyword: list[tuple[str, _Maker]] = []
        self._captured: dict[str, Any] = {}
        called = _called(function)
        #: Whether the result of a call has to be awaited.
        self.awaits = inspect.iscoroutinefunction(called)
        #: Whether the result, awaited if necessary, is iterated over.
        self.streams = inspect.isasyncgenfunction(called)
        # A declaration may have been made without a decorator.
        _check_form(self.kind, function)
        self._read_signature(called, declaration.names)
        self._payload_only = (
            self.payload is not None
            and not self.middleware
            and not self.streaming
            and self._positional == [_payload]
            and not self._keyword
        )
        #: Whether a request with an argument is an error, as the handler takes none and has no
        #: access to the message.
        self.takes_nothing = (
            declaration.kind == "rpc"
            and not self.middleware
            and not any(
                maker in (_payload, *_WHOLE)
                for maker in (*self._positional, *(maker for _, maker in self._keyword))
            )
        )
        #: Whether the handler is called with only the octets of the body.
        self.takes_octets = self._payload_only and self.payload is bytes
        self._call: Callable[[Context], Any] = self._direct
        if self.middleware:
            self._call = _wrapped(self._direct, self.middleware)
            self.awaits = True

    def _read_signature(self, called: Any, names: Mapping[str, Any]) -> None:
        try:
            signature = inspect.signature(self.function)
            hints = get_type_hints(called, localns=dict(names), include_extras=True)
        except NameError as error:
            raise TypeError(
                f"{self.name}: an annotation names {error.name!r}, which is not defined where "
                "the handler can see it"
            ) from None
        except ValueError as error:
            raise TypeError(f"{self.name}: its signature cannot be read: {error}") from None
        self.reply = hints.get("return", Any)
        if get_origin(self.reply) in _STREAMS:
            self.reply = get_args(self.reply)[0]
            self.streams = True
        self._check_kind()
        main: list[Any] = []  # Types of the parameters for the payload or the link
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            wanted = hints.get(parameter.name, Any)
            maker = self._maker(parameter.name, wanted)
            if maker is None and not by_name and (not main or self._takes_another(parameter)):
                maker = _payload if not main else _payload_part(len(main))
                main.append(wanted)
                self._check_streaming(parameter.name, wanted)
            if maker is None:
                if parameter.default is not parameter.empty:
                    if by_name:
                        continue
                    maker = _constant(parameter.default)
                else:
                    raise TypeError(self._nobody_gives(parameter.name, wanted))
            if by_name:
                self._keyword.append((parameter.name, maker))
            else:
                self._positional.append(maker)
        if self.kind in ("node", "rpc") and main:
            self.payload = main[0]
            for wanted in main:
                self._check_payload(wanted)
        if len(main) > 1:
            self.payload = types.GenericAlias(tuple, tuple(main))
            self._positional = [
                _payload_part(0) if maker is _payload else maker for maker in self._positional
            ]

    def _maker(self, name: str, wanted: Any) -> _Maker | None:
        """Return the maker of an argument matched by name or type; None if it is neither."""
        if name in self.pattern.captures:
            if wanted not in (str, Any):
                self._captured[name] = wanted
            return lambda context: context.binding.captures[name]
        kind = _plain(wanted)
        if isinstance(kind, type) and kind in _BY_TYPE:
            return _BY_TYPE[kind]
        found = self._resources.find(kind)
        if found is not None:
            resources = self._resources
            key = found
            return lambda context: resources[key]
        return None

    def _check_kind(self) -> None:
        if self.kind == "source" and not self.streams:
            raise TypeError(
                f"{self.name}: a source is an async generator: `async def` with `yield` in it"
            )
        if self.kind == "link" and self.streams:
            raise TypeError(f"{self.name}: the handler of a link is an `async def` without `yield`")
        if self.kind == "node" and self.streams:
            raise TypeError(f"{self.name}: a node yields nothing: @rpc streams replies")

    def _takes_another(self, parameter: inspect.Parameter) -> bool:
        """Whether *parameter* is one of several arguments of a request, sent as a list."""
        return self.kind == "rpc" and parameter.default is parameter.empty

    def _check_streaming(self, name: str, wanted: Any) -> None:
        if self.kind == "node" and self.streaming != _is_stream_of_bytes(wanted):
            raise TypeError(
                f"{self.name}: with streaming=True, {name} is an AsyncIterator[bytes]"
                if self.streaming
                else f"{self.name}: {name} reads the body while it arrives: declare the node with "
                "streaming=True"
            )

    def _check_payload(self, wanted: Any) -> None:
        if self.streaming:
            return  # The handler reads the octets itself.
        try:
            check_payload_type(wanted)
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {error}; a resource of that type is not provided"
            ) from None

    def _nobody_gives(self, name: str, wanted: Any) -> str:
        if wanted is Any:
            return (
                f"{self.name}: nobody gives {name!r}: it is no capture of {self.address!r}, and "
                "has no annotation to find it by"
            )
        shown = getattr(wanted, "__qualname__", str(wanted))
        return (
            f"{self.name}: nobody gives {name}: {shown}: it is no capture of {self.address!r}, and "
            "no resource of that type is provided"
        )

    def convert(self, address: str, captures: Mapping[str, str]) -> Mapping[str, Any]:
        """Convert *captures* of *address* to the types of the handler's parameters.

        Raises:
            ValueError: A capture cannot be converted.
        """
        if not self._captured:
            return captures
        values: dict[str, Any] = dict(captures)
        for name, kind in self._captured.items():
            try:
                values[name] = msgspec.convert(captures[name], kind, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} in {address!r}: {error}") from None
        return values

    def invoke(
        self,
        binding: Binding,
        delivery: IncomingDelivery,
        message: Message,
        deadline: Deadline = NO_DEADLINE,
    ) -> Any:
        """Call the handler with one message; the result may have to be awaited or iterated over.

        Raises:
            DecodeError: The payload is not of the handler's type. The handler was not called.
        """
        if self._payload_only:
            return self.function(decode_payload(message, self.payload))
        payload = None if self.payload is None else decode_payload(message, self.payload)
        if self.takes_nothing and payload is None and not has_no_payload(message):
            raise DecodeError(f"{self.address!r} takes no argument, and the request has one")
        return self._call(Context(binding, delivery, message, deadline, payload))

    def open(
        self,
        binding: Binding,
        payload: Any,
        *,
        delivery: IncomingDelivery | None = None,
        message: Message | None = None,
    ) -> Any:
        """Call the handler with a link, or with a message whose body is still arriving."""
        return self._call(Context(binding, delivery, message, NO_DEADLINE, payload))

    def _direct(self, context: Context) -> Any:
        return self.function(
            *[make(context) for make in self._positional],
            **{name: make(context) for name, make in self._keyword},
        )

    def outcome_of(self, error: Exception, default: OnError = MODIFIED_FAILED) -> Outcome:
        """Return the outcome of a message whose handler raised *error*."""
        policy = default if self.on_error is None else self.on_error
        return policy(error) if callable(policy) else policy

    def __repr__(self) -> str:
        return f"<Route {self.kind} {self.address!r}: {self.name}>"
