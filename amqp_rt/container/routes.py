"""Handlers at addresses, and their arguments.

The signature of a handler is read once, when its :class:`Route` is created: the first free positional
parameter takes the payload, typed by its annotation; captures of the address are matched by name, and
all other arguments by type. Values that are constant for a link are computed when it attaches, so a
message costs one call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from math import inf
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import trio
from msgspec import Struct

from ..addresses import Pattern
from ..errors import DecodeError
from ..events import Peer
from ..fronts.base import IncomingDelivery, ReceivingLink, SendingLink
from ..limits import MIB, check_seconds
from ..message import Message
from ..observers import Kind as ObservedKind
from ..observers import ObservedLink, UnreadObserver, bind
from ..outcomes import MODIFIED_FAILED, Outcome
from ..policies import Retry
from ..termini import Source, Target
from .boxes import NodeInbox, recorded_id, refuse_unprocessed
from .codecs import Codecs, Decode, default_codecs
from .connections import Connection
from .deliveries import Delivery
from .home import Home
from .payloads import Readable, decode_payload, has_no_payload
from .raising import OnError
from .recording import BatchRecord
from .resources import Resources
from .scopes import Scope, check_default

Kind: TypeAlias = Literal["node", "rpc", "source", "link"]

#: Messages that wait behind the running ones on each link.
PREFETCH: Final = 500

_LINK_FORM: Final = "the handler of a link is an `async def` without `yield`"
_SOURCE_FORM: Final = "a source is an async generator: `async def` with `yield` in it"


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


class ReplyPath(Protocol):
    """Path on which replies are sent."""

    def send_nowait(self, payload: Sequence[bytes]) -> bool:
        """Send at once if possible; return whether the message was sent."""

    async def send(self, payload: Sequence[bytes]) -> None:
        """Send when there is credit.

        Raises:
            LinkDetached: The link has ended.
            LocalProtocolError: The message is larger than the peer allows.
        """


class RouteBinding:
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
        "settling",
    )

    def __init__(
        self,
        route: Route,
        container: Home,
        connection: Connection,
        link: ReceivingLink | SendingLink | None,
        address: str,
        captures: Mapping[str, Any],
        *,
        asked: Source | Target | None = None,
        relay: ReplyPath | None = None,
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
        #: Observer of outcomes that handlers set themselves; None until there is one.
        self.settling: UnreadObserver | None = None

    def observe(self, kind: ObservedKind) -> UnreadObserver | None:
        """Bind the container's observers to operations of *kind* on the link."""
        return bind(
            self.container.observers,
            ObservedLink(
                kind=kind,
                address=self.address,
                template=self.route.address if self.route.pattern.captures else None,
                name=self.link.name,
                peer=self.peer,
                dialled=self.connection.dialled,
            ),
        )

    @property
    def peer(self) -> Peer:
        """Peer at the other end of the link."""
        peer: Peer = self.link.peer
        return peer


class Context:
    """Message on its way to a handler, as middleware gets it.

    ``payload`` may be replaced before the handler is called. For sources and handlers of whole
    links there is no message: ``delivery`` and ``message`` are None, and ``payload`` is the link's
    :class:`~amqp_rt.container.feeding.SourceLink`, sender or receiver.
    """

    __slots__ = ("binding", "deadline", "delivery", "made", "message", "payload", "record")

    def __init__(
        self,
        binding: RouteBinding,
        delivery: IncomingDelivery | None,
        message: Message | None,
        deadline: Deadline,
        payload: Any,
        record: BatchRecord | None = None,
    ) -> None:
        self.binding = binding
        self.delivery = delivery
        self.message = message
        self.deadline = deadline
        self.payload = payload
        #: Values made for this message alone.
        self.made: dict[Any, Any] = {}
        #: Messages of a batch, for the inbox of the node; None for a single message, or without an inbox.
        self.record = record

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


class Batch(Struct, frozen=True):
    """Bounds of a batch: it is handled when the first of them is reached.

    Args:
        messages: Number of messages.
        bytes: Bytes of encoded messages; a larger message is a batch of its own.
        within_s: Seconds from the first message. 0 takes what has arrived.
    """

    messages: int = 100
    bytes: int = 1 * MIB
    within_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("messages", "bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a batch must be at least 1, not {value!r}")
        check_seconds("within_s", self.within_s)


class HandlerDeclaration(Struct, kw_only=True):
    """Declaration of a handler, as a decorator records it on a function."""

    kind: Kind
    address: str
    slots: int
    prefetch: int
    streaming: bool = False
    mode: Literal["copy", "move"] = "copy"
    filters: tuple[str, ...] = ()
    on_error: OnError | None = None
    retry: Retry | None = None
    thread: bool = False
    batch: Batch | None = None
    inbox: NodeInbox | None = None
    middleware: tuple[Middleware, ...] = ()
    #: Local names of the enclosing function that the annotations mention.
    names: dict[str, Any] = {}


def check_form(kind: Kind, function: Any) -> None:
    """Check the form of *function* as a handler of *kind*, apart from its annotations.

    Raises:
        TypeError: The form is wrong.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    called = called_function(function)
    if kind == "link" and not inspect.iscoroutinefunction(called):
        raise TypeError(f"{name}: {_LINK_FORM}")
    if (
        kind == "source"
        and not inspect.isasyncgenfunction(called)
        and "return" not in getattr(called, "__annotations__", {})
    ):
        raise TypeError(f"{name}: {_SOURCE_FORM}")
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


def _message(context: Context) -> Any:
    return context.message


def _delivery(context: Context) -> Any:
    if context.delivery is None:
        return None
    binding = context.binding
    delivery = Delivery(context.delivery, binding.container.codecs)
    if context.message is not None and not binding.route.streaming:
        delivery.keep(context.message)
    if binding.container.observers and binding.settling is None:
        binding.settling = binding.observe("settle")
    return delivery if binding.settling is None else delivery.observed_by(binding.settling)


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


def called_function(function: Any) -> Any:
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
        self,
        function: Callable[..., Any],
        declaration: HandlerDeclaration,
        resources: Resources,
        codecs: Codecs | None = None,
    ) -> None:
        self.function = function
        #: What is called for a message: the function, or one that calls it in a thread.
        self.target = function
        self.kind: Kind = declaration.kind
        self.address = declaration.address
        self.pattern = Pattern(declaration.address)
        self.slots = declaration.slots
        #: Bounds of the batches that the handler gets; None if it gets single messages.
        self.batch = declaration.batch
        #: Whether the handler of a request gets the items of a stream.
        self.takes_items = False
        #: Messages that are processed at a time.
        self.capacity = self.slots * (self.batch.messages if self.batch is not None else 1)
        self.prefetch = declaration.prefetch
        self.streaming = declaration.streaming
        self.mode = declaration.mode
        self.filters = declaration.filters
        self.middleware = declaration.middleware
        self.on_error = declaration.on_error
        self.retry = declaration.retry
        self.name: str = getattr(function, "__qualname__", type(function).__name__)
        self.stats = Stats()
        #: Type of the payload, ``Any`` if it is not annotated; None if the handler takes no
        #: payload.
        self.payload: Any = None
        #: Type of the reply, or of each item of a streamed one; ``Any`` if it is not annotated.
        self.reply: Any = Any
        self._codecs = codecs or default_codecs()
        #: Decodes a body as the payload.
        self._decode: Decode = decode_payload
        self._resources = resources
        # A batch has messages of several links.
        self._by_type = _BY_TYPE if self.batch is None else {}
        self._scope = Scope(self.name, resources, self._by_type)
        #: Record of processed messages, and the session in which it writes; None without *inbox*.
        self.inbox = declaration.inbox
        self._session: _Maker | None = None
        if self.inbox is not None:
            self._session = self._scope.provide(self.inbox.session_type, self.inbox.session)
        self._positional: list[_Maker] = []
        self._keyword: list[tuple[str, _Maker]] = []
        self._captured: dict[str, Any] = {}
        called = called_function(function)
        #: Whether the result of a call has to be awaited.
        self.awaits = inspect.iscoroutinefunction(called)
        #: Whether the result, awaited if necessary, is iterated over.
        self.streams = inspect.isasyncgenfunction(called)
        # A declaration may have been made without a decorator.
        check_form(self.kind, function)
        self._read_signature(called, declaration.names)
        self._payload_only = (
            self.payload is not None
            and not self.middleware
            and not self.streaming
            and self.inbox is None
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
        if declaration.thread:
            self._run_in_threads()
        self._call: Callable[[Context], Any] = self._direct
        if self._scope:
            self._call = self._streaming_in_scope if self.streams else self._called_in_scope
            self.awaits = not self.streams
        if self.middleware:
            self._call = _wrapped(self._call, self.middleware)
            self.awaits = True

    def _run_in_threads(self) -> None:
        """Replace the function by one that calls it in a thread."""
        if self.awaits or self.streams:
            raise TypeError(f"{self.name}: thread=True is for a `def` that returns a value")
        blocking = self.function
        limiter = trio.CapacityLimiter(self.slots)

        async def in_thread(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(blocking, *args, **kwargs)
            return await trio.to_thread.run_sync(call, limiter=limiter)

        self.target = in_thread
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
            check_default(self.name, parameter)
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
                    raise TypeError(self._no_provider(parameter.name, wanted))
            if by_name:
                self._keyword.append((parameter.name, maker))
            else:
                self._positional.append(maker)
        if self.batch is not None:
            main = self._elements(main)
        if self.kind == "rpc" and any(get_origin(each) in _STREAMS for each in main):
            main = self._items(main)
        if self.kind in ("node", "rpc") and main:
            self.payload = main[0]
            self._find_decoding(main)
        if len(main) > 1:
            self.payload = types.GenericAlias(tuple, tuple(main))
            self._positional = [
                _payload_part(0) if maker is _payload else maker for maker in self._positional
            ]

    def _elements(self, main: list[Any]) -> list[Any]:
        """Return the type of the items of the list that the handler of a batch takes."""
        if self.pattern.captures:
            raise TypeError(
                f"{self.name}: a batch has messages of several links: its address has no captures"
            )
        if len(main) != 1 or get_origin(main[0]) is not list:
            raise TypeError(f"{self.name}: with batch=, the payload is a list: rows: list[Row]")
        return list(get_args(main[0]))

    def _items(self, main: list[Any]) -> list[Any]:
        """Return the type of the items of a streamed request."""
        if len(main) != 1:
            raise TypeError(
                f"{self.name}: a stream is the only argument of a request: AsyncIterator[Item]"
            )
        if self.prefetch < 1:
            raise TypeError(f"{self.name}: a stream needs room for an item: prefetch=1 or more")
        self.takes_items = True
        return [get_args(main[0])[0]]

    def element(self, delivery: IncomingDelivery, message: Message) -> Any:
        """Return the item of a batch, or of a stream, for one message.

        Raises:
            DecodeError: The payload is not of the handler's type.
        """
        if self.payload is Message:
            return message
        if self.payload is Delivery:
            return Delivery(delivery, self._codecs)
        return self._decode(message, self.payload)

    def _maker(self, name: str, wanted: Any) -> _Maker | None:
        """Return the maker of an argument matched by name or type; None if it is neither."""
        if name in self.pattern.captures:
            if wanted not in (str, Any):
                self._captured[name] = wanted
            return lambda context: context.binding.captures[name]
        made = self._scope.maker(wanted)
        if made is not None:
            return made
        kind = _plain(wanted)
        if isinstance(kind, type) and kind in self._by_type:
            return self._by_type[kind]
        found = self._resources.find(kind)
        if found is not None:
            resources = self._resources
            key = found
            return lambda context: resources[key]
        return None

    def _check_kind(self) -> None:
        if self.kind == "source" and not self.streams:
            raise TypeError(f"{self.name}: {_SOURCE_FORM}")
        if self.kind == "link" and self.streams:
            raise TypeError(f"{self.name}: {_LINK_FORM}")
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

    def _find_decoding(self, wanted: list[Any]) -> None:
        """Look up the decoding of the payload, or of several arguments."""
        if self.streaming:
            return  # The handler reads the octets itself.
        if (self.batch is not None and wanted[0] in (Message, Delivery)) or (
            self.takes_items and wanted[0] is Message
        ):
            return
        try:
            if len(wanted) == 1:
                self._decode = self._codecs.decoding(wanted[0])
            else:
                self._decode = self._codecs.decoding_parts(wanted)
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {error}; a resource of that type is not provided"
            ) from None

    def _no_provider(self, name: str, wanted: Any) -> str:
        if wanted is Any:
            return (
                f"{self.name}: no value for {name!r}: it is no capture of {self.address!r}, and "
                "has no annotation to find it by"
            )
        shown = getattr(wanted, "__qualname__", str(wanted))
        return (
            f"{self.name}: no value for {name}: {shown}: it is no capture of {self.address!r}, and "
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
        binding: RouteBinding,
        delivery: IncomingDelivery,
        message: Readable,
        deadline: Deadline = NO_DEADLINE,
    ) -> Any:
        """Call the handler with one message; the result may have to be awaited or iterated over.

        Raises:
            DecodeError: The payload is not of the handler's type. The handler was not called.
        """
        if self._payload_only:
            return self.target(self._decode(message, self.payload))
        payload = None if self.payload is None else self._decode(message, self.payload)
        if self.takes_nothing and payload is None and not has_no_payload(message):
            raise DecodeError(f"{self.address!r} takes no argument, and the request has one")
        whole = message if isinstance(message, Message) else Message.decode(message.payload)
        return self._call(Context(binding, delivery, whole, deadline, payload))

    def open(
        self,
        binding: RouteBinding,
        payload: Any,
        *,
        delivery: IncomingDelivery | None = None,
        message: Message | None = None,
        deadline: Deadline = NO_DEADLINE,
        record: BatchRecord | None = None,
    ) -> Any:
        """Call the handler with a link, a batch, or messages or a body that are still arriving."""
        return self._call(Context(binding, delivery, message, deadline, payload, record))

    async def _called_in_scope(self, context: Context) -> Any:
        if self.inbox is not None:
            return await self._called_once(self.inbox, context)
        async with self._scope.entered(context):
            result = self._direct(context)
            return await result if inspect.isawaitable(result) else result

    async def _called_once(self, inbox: NodeInbox, context: Context) -> Any:
        """Call the handler unless the message was processed before; record it in the handler's transaction."""
        assert self._session is not None
        if context.record is not None:
            async with self._scope.entered(context):
                call = functools.partial(self._with_payload, context)
                session = self._session(context)
                return await context.record.process(inbox, session, context.payload, call)
        message_id = recorded_id(context.address, context.message)
        async with (
            self._scope.entered(context),
            inbox.recorded(self._session(context), context.address, message_id) as is_new,
        ):
            if not is_new:
                return None
            result = self._direct(context)
            result = await result if inspect.isawaitable(result) else result
            refuse_unprocessed(result)
            return result

    def _with_payload(self, context: Context, payload: Any) -> Any:
        """Call the handler with *payload*; middleware that calls it again has the former one."""
        former, context.payload = context.payload, payload
        try:
            return self._direct(context)
        finally:
            context.payload = former

    async def _streaming_in_scope(self, context: Context) -> AsyncGenerator[Any, Any]:
        async with self._scope.entered(context), aclosing(self._direct(context)) as items:
            said: Any = None
            while True:
                try:
                    item = await items.asend(said)
                except StopAsyncIteration:
                    return
                said = yield item

    def _direct(self, context: Context) -> Any:
        return self.target(
            *[make(context) for make in self._positional],
            **{name: make(context) for name, make in self._keyword},
        )

    def outcome_of(self, error: Exception, default: OnError = MODIFIED_FAILED) -> Outcome:
        """Return the outcome of a message whose handler raised *error*."""
        policy = default if self.on_error is None else self.on_error
        return policy(error) if callable(policy) else policy

    def __repr__(self) -> str:
        return f"<Route {self.kind} {self.address!r}: {self.name}>"
