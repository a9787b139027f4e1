"""Container of nodes, with all tasks that run for them.

All tasks run within the ``async with`` block of their container. Leaving the block normally takes
credit back, lets handlers finish or cancels them, settles, detaches and closes, in this order.
Leaving it with an exception does the same without waiting for handlers.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from functools import partial
from itertools import takewhile
from math import inf
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, cast

import msgspec
import trio

from ..addresses import AddressError, AddressTable, address_of, parse_url
from ..errors import AmqpError, ConnectFailed, printable
from ..events import LoginRequested, Peer
from ..fronts.amqp10 import Front as Amqp10
from ..fronts.base import (
    RCV_FIRST,
    SENDER,
    Front,
    Host,
    ReceivingLink,
    SendingLink,
    ServerOptions,
    Topology,
)
from ..limits import DEFAULT_LIMITS, Limits, check_seconds
from ..loglimit import LogLimiter, error_text, log_refusal
from ..message import Message
from ..net.driver import TrioClock, run_connection
from ..net.endpoints import is_loopback
from ..net.entrance import Entrance, enter
from ..net.listeners import (
    Crowd,
    Door,
    bound_address,
    host_in,
    network_of,
    open_tcp,
    open_unix,
    serve_memory,
    serve_socket,
)
from ..net.memory import MemoryNetwork
from ..net.reactor import Reactor, open_reactor
from ..net.tls import ServerTls
from ..net.traces import Traces, traced
from ..outcomes import MODIFIED_FAILED, Accepted, Error
from ..security.access import (
    CBS,
    MANAGEMENT,
    Access,
    Passage,
    Rights,
    anywhere,
    decide,
    decide_anywhere,
    decide_passages,
)
from ..security.backoff import Backoff
from ..security.bearer import VerifyToken
from ..security.identities import Users
from ..security.mechanisms import (
    Challenge,
    Failure,
    ServerMechanism,
    Success,
    Verifier,
    offered,
)
from ..security.tokens import CBS_CAPABILITY, Cbs
from ..termini import ANONYMOUS_RELAY, Coordinator, Source, Target
from ..values import Symbol
from .cbs import TokenWatch, answer_cbs
from .connections import Connection
from .consuming import consume
from .links import fresh
from .logins import mechanisms_of
from .loops import require_trio
from .namesakes import SOLE_CONNECTION, Namesakes
from .recovery import connect, local
from .replies import (
    LINK_PAIR_CAPABILITY,
    Forward,
    Relay,
    Replies,
    answer,
    is_paired,
    paired_properties,
)
from .routes import (
    Binding,
    Declaration,
    Middleware,
    NodeDecorator,
    OnError,
    Resources,
    Route,
    RpcDecorator,
    SourceDecorator,
    declared,
)
from .schema import asyncapi
from .serving import Inbox, LinkHandler, SourceFeed, Workers, run_message, run_streamed

log = logging.getLogger("amqp_rt.container")

#: ``await authorize(peer, address, role)``: whether *peer* may be the ``"sender"`` or the
#: ``"receiver"`` of a link to *address*.
Authorize: TypeAlias = Callable[[Peer, str, str], Awaitable[bool]]
#: Whether clients have to log in; see :class:`Container`.
SaslPolicy: TypeAlias = Literal["required", "optional", "off"]
SASL_POLICIES: Final = ("required", "optional", "off")
#: Called when a container starts or has stopped.
Hook: TypeAlias = Callable[[], Any]

#: Seconds that peers have to answer our close before their connections are dropped.
CLOSE_GRACE_S: Final = 5.0
#: Links remembered for a connection before the first search for those that have ended.
_LINKS_KEPT: Final = 512
#: Characters of the reason of a failed login that are logged, and of the user name that the backoff
#: remembers.
_WHY_MAX: Final = 200

#: Identity of a link: (virtual host, user, container-id, whether we send, link name, connection).
#: The connection is set only for links to ``$cbs``, whose tokens belong to one connection. It is
#: None for other links, which may be attached again on another connection.
_Identity: TypeAlias = tuple[str, str | None, str, bool, str, Any]


class Container:
    """Nodes at addresses, with the tasks, listeners and connections that serve them.

    ::

        async with Container("shop", nodes=[Orders(db)]) as shop:
            await shop.listen("amqp://127.0.0.1:0")
            await shop.serve()

    Args:
        name: The container-id that peers see.
        nodes: Decorated functions, objects with decorated methods, routers.
        resources: Objects, or ``@asynccontextmanager`` functions that make them, which handlers ask
            for by type.
        middleware: Wrapped around every handler of this container.
        sasl: Mechanisms to offer, by name or as objects. By default those that *users* and *tokens*
            allow: PLAIN, SCRAM if every user has SCRAM credentials, OAUTHBEARER and XOAUTH2.
            Without either, ANONYMOUS, and with *cbs* also those that log in with its tokens.
        users: Users that may log in with PLAIN: names and passwords, or a verifier
            ``await users(user, password, peer)`` that returns an identity or None.
        tokens: ``await tokens(token, peer)`` for OAuth 2.0 tokens, which returns a ``Login`` or
            None.
        authorize: ``await authorize(peer, address, role)`` for each attach, and for each address
            that an anonymous terminus sends to. *role* is the peer's role: ``"sender"`` or
            ``"receiver"``.
        access: Rules of access, checked before *authorize*; see :mod:`amqp_rt.security.access`.
        cbs: Policy for tokens put at ``$cbs``, which give rights.
        plain_in_clear: Offer mechanisms that send passwords in clear on connections without TLS.
        tls: Certificates for listeners at ``amqps://``; with them ``amqp://`` accepts TLS too.
        tls_required: Refuse connections without TLS on ``amqp://``, and do not listen on ``ws://``.
            Connections that stay on the machine, ``amqp+unix://`` and ``memory://``, need none.
        origins: Web pages that may connect to ``ws://`` and ``wss://``, such as
            ``https://example.org``; ``*`` for all. Clients that are not browsers need not be
            listed.
        sasl_policy: ``"required"``: clients have to log in. ``"optional"``: they may also leave out
            the SASL layer, and are anonymous then. ``"off"``: there is no SASL layer. By default it
            is required unless ANONYMOUS is offered, which makes it optional.
        settle_second: Whether to grant ``rcv-settle-mode`` second to senders that ask for it, with
            which the sender settles first. False answers ``first``, as a receiver may (Part 2
            §2.7.3): outcomes are settled at once. Azure's clients ask for ``second``, but then wait
            until we settle.
        limits: Limits of the container and its connections.
        on_error: The outcome for a message whose handler raised, or a function of the exception.
        drain_s: Seconds that handlers have to finish when the block is left.
        network: Namespace of ``memory://`` addresses; share one between containers that connect to
            each other.
        fronts: Protocols that listeners speak.
        trace: A folder in which each connection records its input and output in a file; see
            :mod:`amqp_rt.net.traces`. The files contain messages, but no passwords.
    """

    def __init__(
        self,
        name: str,
        *,
        nodes: Iterable[Any] = (),
        resources: Iterable[Any] = (),
        middleware: Sequence[Middleware] = (),
        sasl: Collection[str | ServerMechanism] | None = None,
        users: Mapping[str, str] | Users | Verifier | None = None,
        tokens: VerifyToken | None = None,
        authorize: Authorize | None = None,
        access: Access | None = None,
        cbs: Cbs | None = None,
        plain_in_clear: bool = False,
        tls: ServerTls | None = None,
        tls_required: bool = False,
        origins: Collection[str] = (),
        sasl_policy: SaslPolicy | None = None,
        settle_second: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        on_error: OnError = MODIFIED_FAILED,
        drain_s: float = 10.0,
        network: MemoryNetwork | None = None,
        fronts: Sequence[Front] = (),
        trace: str | PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.on_error = on_error
        #: Limits log lines about failing handlers, since peers can cause them.
        self.log_limiter = LogLimiter(limits)
        check_seconds("drain_s", drain_s, most=inf)
        self.drain_s = drain_s
        self._settle_second = settle_second
        self.authorize = authorize
        # With CBS, a peer without a token has no rights.
        self.access = Access() if access is None and cbs is not None else access
        self._cbs = cbs
        self._watches: dict[Connection, TokenWatch] = {}
        self.network = network or MemoryNetwork()
        self.hosts: list[Host] = []
        #: Factory of the topology in which peers declare, for protocols with declarations; None if
        #: peers may not declare.
        self.topology: Callable[[Peer, Any], Topology] | None = None
        self.replies = Replies(self)
        #: Links of peers to the anonymous terminus.
        self.relays: set[Relay] = set()
        self.feeds: set[SourceFeed | LinkHandler] = set()
        self.node = NodeDecorator(self._add)
        self.rpc = RpcDecorator(self._add)
        self.source = SourceDecorator(self._add)
        self._middleware = tuple(middleware)
        self._resources = Resources(resources)
        #: Writer of connection traces; None without *trace*.
        self.traces = None if trace is None else Traces(trace, limits=limits)
        self._fronts: Sequence[Front] = [*fronts] or [Amqp10()]
        if isinstance(users, Mapping):
            users = Users(users)
        #: The users whose passwords are kept here; None with another verifier or none.
        self.users = users if isinstance(users, Users) else None
        if sasl_policy == "off":
            if sasl or users is not None or tokens is not None:
                raise ValueError(
                    "sasl_policy='off' lets nobody log in: leave sasl, users and tokens out"
                )
            sasl = ()
        self._mechanisms = mechanisms_of(sasl, users, tokens, cbs, limits)
        #: Waits for the sockets of all connections in one task, on systems that support it.
        self.reactor: Reactor | None = None
        self._plain_in_clear = plain_in_clear
        if tls_required and tls is None:
            raise ValueError("tls_required needs certificates: pass tls=ServerTls(…)")
        self._tls = tls
        self._tls_required = tls_required
        self._origins = origins
        if sasl_policy not in (None, *SASL_POLICIES):
            raise ValueError(
                f"sasl_policy is one of {', '.join(SASL_POLICIES)}, not {sasl_policy!r}"
            )
        # Clients that may be anonymous may also leave out SASL.
        self._sasl_required = (
            "ANONYMOUS" not in self._mechanisms
            if sasl_policy is None
            else sasl_policy == "required"
        )
        self._routes = RouteTable()
        #: Called with each handler before it is added; raises AddressError to refuse it.
        self.check_route: Callable[[Route], None] | None = None
        #: Workers of all nodes, including nodes that are served at peers only.
        self.workers: list[Workers] = []
        #: Attach requests that wait for ``authorize``, by the link's identity in order of arrival.
        self._asking: dict[_Identity, dict[ReceivingLink | SendingLink, None]] = {}
        self._links: dict[_Identity, ReceivingLink | SendingLink] = {}
        self._links_of: dict[Any, set[_Identity]] = {}
        self._requests: dict[Any, int] = {}
        self._accepted: dict[Any, Connection] = {}
        self._strangers: dict[Any, Callable[[], None]] = {}
        self._namesakes = Namesakes(limits)
        self._crowd = Crowd(self._is_blocked)
        self._logins: dict[Any, ServerMechanism] = {}
        #: Cancel scopes of the logins that are being checked, by engine.
        self._judging: dict[Any, trio.CancelScope] = {}
        self._backoff = Backoff(limits)
        self._on_startup: list[Hook] = []
        self._on_shutdown: list[Hook] = []
        self._nurseries: _Nurseries | None = None
        self._ready = trio.Event()
        self._stopped = trio.Event()
        #: Cause of the end of :meth:`serve`, unless :meth:`stop` ends it.
        self._failure: AmqpError | None = None
        self._stopping = False
        self._running: AbstractAsyncContextManager[Self] | None = None
        if cbs is not None:
            self.rpc(CBS)(self._answer_cbs)
        self.add(*nodes)

    # --- nodes ---------------------------------------------------------------------------

    def add(self, *nodes: Any) -> None:
        """Add nodes, before the container starts or while it runs.

        Raises:
            TypeError: A handler has a parameter that cannot be provided, or an object declares no
                node.
            AddressError: The address of a node is taken, possibly by a node of the broker.
        """
        for each in nodes:
            for function, declaration in declared(each):
                self._add(function, declaration)

    def _add(self, function: Callable[..., Any], declaration: Declaration) -> None:
        workers = self._workers_for(function, declaration)
        if self.check_route is not None:
            self.check_route(workers.route)
        self._routes.add(workers)
        self.workers.append(workers)

    def _workers_for(self, function: Callable[..., Any], declaration: Declaration) -> Workers:
        if self._middleware:
            declaration = msgspec.structs.replace(
                declaration, middleware=(*self._middleware, *declaration.middleware)
            )
        route = Route(function, declaration, self._resources)
        if route.kind == "rpc":
            return Workers(route, self, answer)
        return Workers(route, self, run_streamed if route.streaming else run_message)

    def remove(self, *nodes: Any) -> None:
        """Remove nodes, given as functions, objects, routers or addresses as they were declared.

        New links are refused from now on. Attached links get no more credit, and are detached
        (``amqp:resource-deleted``) once their running handlers have ended, or after ``drain_s``.

        Raises:
            ValueError: There is no such node.
        """
        for each in nodes:
            functions = [] if isinstance(each, str) else [named for named, _ in declared(each)]
            gone = [
                workers
                for workers in self._routes
                if workers.route.address == each or workers.route.function in functions
            ]
            if not gone:
                raise ValueError(f"{each!r} is no node of {self.name!r}")
            for workers in gone:
                self._routes.remove(workers)
                workers.stop()
                if self._nurseries is not None:
                    self.start_handler(self._retire, workers)
                else:
                    self.workers.remove(workers)

    async def _retire(self, workers: Workers) -> None:
        with trio.move_on_after(self.drain_s):
            await workers.wait_idle()
        workers.detach(Error("amqp:resource-deleted", f"{workers.route.address!r} is gone"))
        self.workers.remove(workers)

    def add_host(self, host: Host) -> None:
        """Look up addresses that are not ours in *host*, such as a broker."""
        self.hosts.append(host)

    def provide(self, thing: Any, *, as_type: type | None = None) -> None:
        """Provide *thing* to handlers with a parameter of its type; call it before adding them.

        An ``@asynccontextmanager`` function is entered when the container starts.

        Raises:
            RuntimeError: The container is running, and *thing* would have to be entered.
        """
        self._resources.provide(thing, as_type=as_type)
        if self._running is not None and self._resources.unmade:
            raise RuntimeError("a resource with a lifetime is provided before the container starts")

    def on_startup(self, hook: Hook) -> Hook:
        """Call *hook* when the container starts, before links are served. Usable as a decorator."""
        self._on_startup.append(hook)
        return hook

    def on_shutdown(self, hook: Hook) -> Hook:
        """Call *hook* after handlers have ended, before connections close; the last one first."""
        self._on_shutdown.append(hook)
        return hook

    def find(
        self, address: str, *, sends: bool = False
    ) -> tuple[Workers, Mapping[str, Any]] | None:
        """Find the node at *address* and the captures of its pattern.

        Args:
            address: The address of an attach.
            sends: Whether we are the link's sender.

        Raises:
            ValueError: The address fits, but a capture cannot be converted to the handler's type.
        """
        found = self._routes.find(address, sends=sends)
        if found is None and address.endswith(f"/{MANAGEMENT}"):
            # The management nodes of entities are served by that of the container.
            found = self._routes.find(MANAGEMENT, sends=sends)
        return found

    def handler_at(self, address: str, *, sends: bool = False) -> Route | None:
        """Return the handler whose address or pattern fits, without converting captures."""
        found = self._routes.tables[sends].find(address)
        return None if found is None else found[0].route

    @property
    def connections(self) -> list[Connection]:
        """Connections opened by peers. They can also be used to send, receive and call."""
        return list(self._accepted.values())

    @property
    def routes(self) -> list[Route]:
        """Handlers of the nodes, in the order in which they were added."""
        return [workers.route for workers in self._routes]

    def asyncapi(self, *, version: str = "1.0.0") -> dict[str, Any]:
        """Return the nodes as an AsyncAPI 3.0 document."""
        return asyncapi(self.name, self.routes, version=version)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counts of the messages of each node, by address.

        If one address has both a node to send to and one to receive from, the key of the second has
        its kind in front: ``"source orders"``.
        """
        found: dict[str, dict[str, int]] = {}
        for workers in self._routes:
            route = workers.route
            name = f"{route.kind} {route.address}" if route.address in found else route.address
            found[name] = {**msgspec.structs.asdict(route.stats), "running": workers.running}
        return found

    # --- lifetime ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the container has started and is not stopping."""
        return self._ready.is_set() and not self._stopping

    async def wait_ready(self) -> None:
        """Wait until the container has started."""
        await self._ready.wait()

    def stop(self) -> None:
        """Make :meth:`serve` return. Leaving the block then stops the container."""
        self._stopped.set()

    async def serve(self) -> None:
        """Wait until :meth:`stop`, or until a node can no longer be served at a peer.

        Raises:
            ConnectionLost: Reconnecting a connection with :meth:`Connection.serve` was given up.
            LinkDetached: A node's link to such a peer was ended permanently.
        """
        self._started()
        await self._stopped.wait()
        if self._failure is not None:
            raise fresh(self._failure)

    def fail(self, error: AmqpError) -> None:
        """Make :meth:`serve` raise *error*, because a node is no longer served."""
        if not self._stopped.is_set():
            self._failure = error
            self._stopped.set()

    async def __aenter__(self) -> Self:
        require_trio("Container")
        if self._running is not None:
            raise RuntimeError(f"{self!r} has been entered before: make another")
        self._running = self._run()
        return await self._running.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._running is not None
        return await self._running.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Self]:
        failure: BaseException | None = None
        try:
            async with AsyncExitStack() as resources:
                for kind, make in self._resources.unmade.items():
                    self._resources.made(kind, await resources.enter_async_context(make()))
                self.reactor = await resources.enter_async_context(open_reactor())
                async with trio.open_nursery() as connections:
                    try:
                        listeners = await connections.start(_open_nursery)
                        async with trio.open_nursery() as handlers:
                            self._nurseries = _Nurseries(connections, listeners, handlers)
                            try:
                                await _call(self._on_startup)
                                self._ready.set()
                                yield self
                            except BaseException as error:
                                # Raised again below: nurseries would wrap the exception in a group.
                                failure = error
                            try:
                                await self._drain(self.drain_s if failure is None else 0.0)
                            finally:
                                handlers.cancel_scope.cancel()
                    finally:
                        with trio.move_on_after(
                            max(self.drain_s, CLOSE_GRACE_S), shield=failure is not None
                        ):
                            await _call(reversed(self._on_shutdown))
                        self._say_goodbye()
                        connections.cancel_scope.deadline = trio.current_time() + CLOSE_GRACE_S
        except BaseException as error:
            unexpected = _without_cancelled(error)
            if unexpected is not None:
                raise unexpected from None
            if failure is None:
                raise
        finally:
            self._nurseries = None
        if failure is not None:
            raise failure

    async def _drain(self, seconds: float) -> None:
        """Stop taking messages, and let running handlers finish within *seconds*."""
        self._stopping = True
        self._started().listeners.cancel_scope.cancel()
        for workers in self.workers:
            workers.stop()
        for relay in self.relays:
            relay.stop()
        feeds = list(self.feeds)
        for feed in feeds:
            feed.stop()
        if seconds <= 0:
            return
        with trio.move_on_after(seconds):
            for workers in list(self.workers):
                await workers.wait_idle()
            for feed in feeds:
                await feed.finished.wait()
            await self.replies.flush()

    def _say_goodbye(self) -> None:
        """Close the connections opened by peers, without waiting.

        No link is detached first: a client takes a detach as the end of the link, and a close
        without an error as the regular end of the connection. This error makes clients connect
        again (Part 2 §2.8.16).
        """
        for connection in list(self._accepted.values()):
            connection.close(Error("amqp:connection:forced", f"{self.name!r} is stopping"))

    @property
    def connection_nursery(self) -> trio.Nursery:
        """Nursery of the connections' tasks, open until the container has ended."""
        return self._started().connections

    def _started(self) -> _Nurseries:
        if self._nurseries is None:
            raise RuntimeError(f"{self!r} does not run: use it in `async with`")
        return self._nurseries

    def start_handler(self, task: Callable[..., Awaitable[Any]], *args: Any) -> bool:
        """Run *task* until it ends or the container stops. An exception of *task* is logged.

        Returns:
            False if the container has stopped running handlers.
        """
        handlers = self._started().handlers
        if handlers.cancel_scope.cancel_called:
            return False
        handlers.start_soon(_guarded, task, *args)
        return True

    # --- listening -----------------------------------------------------------------------

    async def listen(self, *urls: str) -> list[str]:
        """Listen at each of *urls*, and return them with the addresses that were bound.

        ``amqp://HOST:PORT`` (``amqp://:PORT`` listens on every address, port 0 on any free port),
        ``amqps://`` for TLS, ``ws://HOST:PORT/PATH`` and ``wss://`` for WebSocket,
        ``amqp+unix:///PATH`` and ``memory://NAME``. If cancelled, listeners that are bound
        continue.

        Raises:
            ConnectFailed: A URL cannot be listened on; the error names it and the cause.
        """
        return [await self._listen(url) for url in urls]

    async def _listen(self, url: str) -> str:
        nurseries = self._started()
        where = parse_url(url, listening=True)
        door = Door(self.limits, self._crowd)
        if where.scheme == "memory":
            try:
                await nurseries.listeners.start(
                    partial(serve_memory, nursery=nurseries.connections),
                    self.network,
                    where.host,
                    door,
                    partial(self.accept, scheme=where.scheme),
                )
            except OSError as error:
                raise ConnectFailed(f"cannot listen on {where}: {error}") from error
        elif where.scheme == "amqp+unix":
            listener = await open_unix(where.path)
            nurseries.listeners.start_soon(self._serve_unix, listener, door, where.path)
        else:
            if where.scheme == "sb":
                raise ConnectFailed(
                    f"cannot listen on {where}: that is a scheme of clients; use amqps://",
                    condition="amqp:invalid-field",
                )
            if where.tls and self._tls is None:
                raise ConnectFailed(
                    f"cannot listen on {where}: there is no certificate; pass tls=ServerTls(…)",
                    condition="amqp:invalid-field",
                )
            if where.scheme == "ws" and self._tls_required:
                raise ConnectFailed(
                    f"cannot listen on {where}: TLS is required, and ws:// has none; use wss://",
                    condition="amqp:invalid-field",
                )
            listeners = await open_tcp(where.host, where.port)
            serve = partial(self.accept, scheme=where.scheme, path=where.path or "/")
            for each in listeners:
                nurseries.listeners.start_soon(
                    partial(serve_socket, each, door, serve, nursery=nurseries.connections)
                )
            host, port = bound_address(listeners[0])
            where = msgspec.structs.replace(where, host=where.host or host, port=port)
        return str(where)

    async def _serve_unix(self, listener: trio.SocketListener, door: Door, path: str) -> None:
        try:
            serve = partial(self.accept, scheme="amqp+unix")
            await serve_socket(listener, door, serve, nursery=self._started().connections)
        finally:
            with suppress(OSError):
                os.unlink(path)

    async def accept(
        self,
        stream: trio.abc.Stream,
        address: str = "",
        logged_in: Callable[[], None] = lambda: None,
        *,
        scheme: str = "amqp",
        path: str = "/",
        trusted: bool = False,
    ) -> None:
        """Run one connection that a peer opened, until it ends; then close *stream*.

        Faults of the peer or the network raise no exception.

        Args:
            stream: Any trio stream.
            address: The peer's address, for logs and for the limits by network.
            logged_in: Called once the peer is authenticated, or if that is not required.
            scheme: The expected outermost protocol: ``amqp``, ``amqps``, ``ws`` or ``wss``.
            path: Path of a WebSocket.
            trusted: The peer need not log in.
        """
        nursery = self.connection_nursery
        now = trio.current_time()
        entrance = Entrance(
            fronts=self._fronts,
            scheme=scheme,
            tls=self._tls,
            tls_required=self._tls_required and not trusted,
            path=path,
            origins=self._origins,
            limits=self.limits,
        )
        entered = await enter(stream, entrance, address=address or "a peer", nursery=nursery)
        if entered is None:
            return
        if self._stopping:
            await trio.aclose_forcefully(entered.stream)
            return
        engine = entered.front.server(
            ServerOptions(
                container_id=self.name,
                limits=self.limits,
                mechanisms=offered(
                    self._mechanisms.values(),
                    secure=entered.secure,
                    local=_is_local(address),
                    plain_in_clear=self._plain_in_clear,
                    certificate=entered.certificate is not None,
                ),
                sasl_required=not trusted and self._sasl_required,
                address=address,
                offered_capabilities=(
                    *self._capabilities,
                    *(Symbol(each) for host in self.hosts for each in host.capabilities),
                ),
                topology=self.topology,
            ),
            now,
        )
        engine.peer.secure = entered.secure
        engine.peer.certificate = entered.certificate
        # The host name of TLS applies if neither login nor open names one (Part 2 §2.7.1).
        engine.peer.virtual_host = engine.peer.server_name = entered.server_name
        engine.peer.trusted = trusted
        connection = Connection(self, engine, dialled=False)
        self._accepted[engine] = connection

        def known() -> None:
            entered.trust()
            logged_in()

        self._strangers[engine] = known
        try:
            with traced(self.traces, engine, client=False, clock=TrioClock()) as seen:
                await run_connection(
                    entered.stream,
                    seen,
                    connection.handle,
                    limits=self.limits,
                    initial=entered.received,
                    reactor=self.reactor,
                )
        except Exception:
            # A fault of ours: it must not end the other connections.
            log.exception("the connection from %s broke", address or "a peer")
        finally:
            if connection.stood:
                error = connection.ended_with
                self._log_connection(
                    "connection closed",
                    connection,
                    "" if error is None else f": {error_text(error)}",
                )
            self._accepted.pop(engine, None)
            self._strangers.pop(engine, None)
            self._namesakes.leave(connection)
            self._logins.pop(engine, None)
            if (judging := self._judging.pop(engine, None)) is not None:
                judging.cancel()
            if (watch := self._watches.pop(connection, None)) is not None:
                watch.stop()
            self._requests.pop(engine, None)
            for identity in self._links_of.pop(engine, ()):
                # Another connection may have taken the link over.
                if (link := self._links.get(identity)) and link.connection is engine:
                    del self._links[identity]

    @property
    def _capabilities(self) -> tuple[Symbol, ...]:
        """Capabilities that we offer in our open."""
        names = [ANONYMOUS_RELAY, LINK_PAIR_CAPABILITY, SOLE_CONNECTION]
        if self._cbs is not None:
            names.append(CBS_CAPABILITY)
        return tuple(Symbol(name) for name in names)

    def opened(self, connection: Connection) -> bool:
        """Handle the peer's open, which follows its login.

        The peer counts as known from here, unless it has to put a token first.

        Returns:
            False if the connection was closed: its virtual host does not exist, it conflicts with
                another one over being the only one of its container, or its user has too many.
        """
        peer = connection.peer
        for host in self.hosts:
            found = host.virtual_host(peer.virtual_host)
            if found is None and not peer.trusted:
                connection.engine.close(
                    Error("amqp:not-found", f"there is no virtual host {peer.virtual_host!r:.100}")
                )
                return False
            # Use the virtual host's own name from now on, not an alias that the peer used.
            peer.virtual_host = found or ""
        watch = self._watch_of(connection)
        owes = watch is not None and not anywhere(self.access, peer)
        # An unauthenticated peer without rights must not lock out a container by using its name.
        if not (owes and peer.user is None) and not self._enter(connection):
            return False
        if watch is not None:
            # Tokens that came with the login may expire like any other.
            by_login = self.access is not None and self.access.anywhere(peer)
            self.start_connection(partial(watch.run, owes=not by_login, known=not owes))
        if not owes:
            self.became_known(connection)
        self._log_connection("connection opened", connection, "")
        return True

    def _log_connection(self, event: str, connection: Connection, why: str) -> None:
        """Log *event* of a connection that a peer opened, limited for each network."""
        peer = connection.peer
        key = (event, network_of(host_in(peer.address)))
        left_out = self.log_limiter.admit(key, trio.current_time())
        if left_out is not None:
            log.info(
                "%s: from %s, container %.100r, user %.100r%s%s",
                event,
                peer.address or "this process",
                peer.container_id,
                peer.user,
                why,
                left_out,
            )

    def got_token(self, connection: Connection) -> bool:
        """Admit a peer that had no rights before its first token; return False if it was closed."""
        if connection.peer.user is None and not self._enter(connection):
            return False
        self.became_known(connection)
        return True

    def _enter(self, connection: Connection) -> bool:
        """Count *connection* for its container and user; close it and return False if refused."""
        peer = connection.peer
        if peer.trusted or (error := self._namesakes.enter(connection, peer)) is None:
            return True
        connection.engine.close(error)
        return False

    def _watch_of(self, connection: Connection) -> TokenWatch | None:
        """Return the token watch of *connection*, creating it; None if it takes no tokens."""
        peer = connection.peer
        if self._cbs is None or peer.trusted:
            return None
        watch = self._watches.get(connection)
        if watch is None:
            watch = self._watches[connection] = TokenWatch(connection, self._cbs)
            peer.tokens = watch.tokens
        return watch

    def _keep_tokens(self, connection: Connection, login: Success) -> Success | Failure:
        """Keep the tokens of *login* for *connection*, as if put (CBS draft §4.2.2)."""
        if not login.tokens or connection.engine not in self._accepted:
            return login
        watch = self._watch_of(connection)
        if watch is None:
            return Failure("the login has tokens, and none are taken here: pass cbs=Cbs(…)")
        try:
            for token in login.tokens:
                watch.keep(token)
        except AmqpError as error:
            return Failure(f"a token was refused: {error.description}")
        return login

    def became_known(self, connection: Connection) -> None:
        """Stop counting the peer as a stranger: it is authenticated."""
        logged_in = self._strangers.pop(connection.engine, None)
        if logged_in is not None:
            logged_in()

    async def _answer_cbs(self, message: Message, connection: Connection) -> Message | Accepted:
        watch = self._watches.get(connection)
        if watch is None:
            raise AmqpError("this connection needs no tokens", condition="amqp:not-allowed")
        return await answer_cbs(message, watch)

    def start_login(self, connection: Connection, event: LoginRequested) -> None:
        """Start checking a client's login (:meth:`login`) in a task of its connection."""
        self.start_connection(partial(self._login_while_there, connection, event))

    async def _login_while_there(self, connection: Connection, event: LoginRequested) -> None:
        """Check a login until it is answered or the connection ends.

        Otherwise a peer that reconnects repeatedly leaves a running check behind each time, which
        delays the checks of other peers.
        """
        engine = connection.engine
        if engine not in self._accepted:
            return
        with trio.CancelScope() as scope:
            self._judging[engine] = scope
            await self.login(connection, event)
        if self._judging.get(engine) is scope:
            del self._judging[engine]

    async def login(self, connection: Connection, event: LoginRequested) -> None:
        """Check one step of a client's login (Part 5 §5.3).

        Every failure gets the same answer after the same delay, so that neither reveals the cause.
        """
        engine = connection.engine
        began = trio.current_time()
        step: Challenge | Success | Failure
        if event.exchange.refused:
            step = Failure(event.exchange.refused)
        else:
            mechanism = self._logins.get(engine)
            if mechanism is None:
                mechanism = self._mechanisms[event.mechanism]
                begin = getattr(mechanism, "begin", None)
                mechanism = self._logins[engine] = mechanism if begin is None else begin()
            try:
                step = await mechanism.respond(event.response, engine.peer)
            except Exception:
                log.exception("%s failed on a login", event.mechanism)
                step = Failure("the mechanism failed")
            if isinstance(step, Success):
                step = self._keep_tokens(connection, step)
        if isinstance(step, Challenge):
            connection.handle(event.exchange.challenge(step.data))
        elif isinstance(step, Success):
            if self._cbs is None:
                self.became_known(connection)
            connection.handle(event.exchange.succeed(step.user, step.identity, step.data))
        else:
            address = engine.peer.address
            log.warning("login from %s failed: %s", address, printable(step.why, _WHY_MAX))
            who = [
                f"address {network_of(host_in(address))}",
                *([f"user {step.user:.{_WHY_MAX}}"] if step.user else []),
            ]
            delay = self._backoff.failed(who, began)
            # The answer does not depend on the time that the check took.
            await trio.sleep_until(began + delay)
            event.exchange.fail()

    def _is_blocked(self, network: str) -> bool:
        return self._backoff.blocks(f"address {network}", trio.current_time())

    # --- links ---------------------------------------------------------------------------

    def attach(self, connection: Connection, link: ReceivingLink | SendingLink) -> None:
        """Accept or refuse a link requested by the peer, at once or after ``authorize``.

        The address is looked up among our nodes, then in the hosts, then among the dynamic
        addresses that we created. A second attach of the same link takes it over (§2.6.1), but only
        after its right has been checked: otherwise any client could detach the links of others by
        their names.
        """
        if self._stopping:
            # The close will answer: a client does not attach a refused link again elsewhere.
            return
        if not self._settle_second and not _sends(link):
            link.rcv_settle_mode = RCV_FIRST
        terminus = self._recalled(link) or _our_terminus(link)
        if isinstance(terminus, Error):
            # A peer without any right must not learn whether a source is kept for a link of this
            # name.
            self._refuse(link, decide_anywhere(self.access, link.peer) or terminus)
        elif (refused := self._judge_attach(link, terminus)) is not None:
            self._refuse(link, refused)
        elif isinstance(terminus, Coordinator):
            # Rights are checked for the links whose deliveries are in the transaction, not here.
            self._take_over(link)
            if not any(host.attach(link) for host in self.hosts):
                self._refuse(link, Error("amqp:not-implemented", "there are no transactions here"))
        elif self.authorize is None or not terminus.address:
            self._take_over(link)
            self._place(connection, link, terminus)
        else:
            asking = self._asking.setdefault(_identity(link), {})
            asking[link] = None
            self.start_handler(self._place_if_allowed, connection, link, terminus, asking)

    def _refuse(self, link: ReceivingLink | SendingLink, error: Error) -> None:
        """Refuse *link* with *error*, and log the refusal."""
        link.refuse(error)
        log_refusal(log, self.log_limiter, link, error, trio.current_time())

    def _take_over(self, link: ReceivingLink | SendingLink) -> None:
        """Register *link* under its identity, and detach an earlier link with the same one."""
        identity = _identity(link)
        old = self._links.get(identity)
        if old is not None and old is not link:
            old.detach(_STOLEN)
        known = self._links_of.setdefault(link.connection, set())
        if len(known) >= _LINKS_KEPT and len(known) & (len(known) - 1) == 0:
            # Hosts do not report links that have ended: search for them whenever the number
            # doubled.
            self._forget_gone(link.connection)
        known.add(identity)
        self._links[identity] = link

    def _recalled(self, link: ReceivingLink | SendingLink) -> Source | Error | None:
        """Return the source that a host keeps for *link*, if its attach names none.

        The source is set on the link as if the peer had requested it. The result is an Error if
        nothing is kept, and None if the attach names a source or is that of a sender.
        """
        if not _sends(link) or link.source is not None:
            return None
        for host in self.hosts:
            try:
                link.source = host.recall(cast("SendingLink", link))
            except AmqpError as error:
                return Error.of(error)
            if link.source is not None:
                return link.source
        return Error("amqp:not-found", f"no source is kept for a link {link.name!r}")

    async def _place_if_allowed(
        self,
        connection: Connection,
        link: ReceivingLink | SendingLink,
        terminus: Source | Target,
        asking: dict[ReceivingLink | SendingLink, None],
    ) -> None:
        """Place *link* if ``authorize`` allows it.

        *asking* holds the requests for links of this identity that wait for their answer, in order.
        """
        role = "receiver" if _sends(link) else "sender"
        identity = _identity(link)
        try:
            allowed = await self.is_allowed(link.peer, terminus.address, role)
        finally:
            stolen = link not in asking
            earlier = list(takewhile(lambda each: each is not link, asking))
            asking.pop(link, None)
        if self._stopping:
            return  # As in attach(): the close answers.
        if stolen or connection.engine.over:
            self._refuse(link, _STOLEN)
        elif not allowed:
            self._refuse(link, _not_for_you(terminus.address))
        elif (refused := self._judge_attach(link, terminus)) is not None:
            self._refuse(link, refused)  # a token has expired meanwhile
        else:
            # Requests older than this one are refused when their answers arrive.
            for each in earlier:
                asking.pop(each, None)
            self._take_over(link)
            self._place(connection, link, terminus)
        if not asking and self._asking.get(identity) is asking:
            del self._asking[identity]

    async def is_allowed(self, peer: Peer, address: str, role: str) -> bool:
        """Return whether ``authorize`` allows *peer* the *role* at *address*.

        ``authorize`` gets the node's own name, even if the peer used an alias. An exception in it
        is logged and counts as False.
        """
        if self.authorize is None:
            return True
        try:
            return bool(await self.authorize(peer, self.own_name(peer, address), role))
        except Exception:
            log.exception("authorize failed for %r", address)
            return False

    @property
    def guarded(self) -> bool:
        """Whether any access control is configured."""
        return not (self.access is None and self._cbs is None and self.authorize is None)

    async def may_send(self, peer: Peer, address: str) -> Error | None:
        """Return why *peer* may not send to *address*, a ``to`` or ``reply-to``; None if it may."""
        refused = self.decide(peer, Rights.SEND, address)
        if refused is None and not await self.is_allowed(peer, address, "sender"):
            refused = _not_for_you(address)
        # A token may have expired while ``authorize`` was running.
        return refused or self.decide(peer, Rights.SEND, address)

    def may_be_sent(self, peer: Peer, address: str) -> bool:
        """Return whether messages that *peer* sent elsewhere may be forwarded to *address*.

        Only rules and tokens are checked, since this cannot wait: the answer is False if
        ``authorize`` would have to be asked.
        """
        if self.authorize is not None:
            return False
        return self.decide(peer, Rights.SEND, address) is None

    async def may_declare(self, peer: Peer, passages: Sequence[Passage]) -> Error | None:
        """Return why *peer* may not declare a route for messages along *passages*; None if it may.

        ``authorize`` is asked about each passage as for a link that receives from its source and
        one that sends to its target.
        """
        refused = decide_passages(self.decide, peer, passages)
        for each in passages if self.authorize is not None and not peer.trusted else ():
            for address, role in ((each.source, "receiver"), (each.target, "sender")):
                if refused is None and not await self.is_allowed(peer, address, role):
                    refused = _not_for_you(address)
        return refused or decide_passages(self.decide, peer, passages)

    def own_name(self, peer: Peer, address: str) -> str:
        """Return the name under which rights to *address*, as used by *peer*, are granted.

        For a node this is its name, whether *address* is a URL, an alias or ``/queues/NAME``; for
        an exchange ``/exchanges/NAME``, for any key.
        """
        name = address_of(address)
        for host in self.hosts:
            name = host.own_name(name, peer.virtual_host)
        return name

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        """Return None if rules and tokens give *peer* the right *wanted* at *address*, or why not.

        Like :func:`amqp_rt.security.access.decide`, but applied to the node's own name.
        """
        if peer.trusted or (self.access is None and peer.tokens is None):
            return None
        name = self.own_name(peer, address)
        refused = decide(self.access, peer, wanted, name, called=address)
        if refused is not None and wanted is Rights.SEND and self._is_dynamic(peer, name):
            # Such an address cannot be guessed: a peer that knows it received it in order to
            # answer.
            return decide_anywhere(self.access, peer)
        return refused

    def _is_dynamic(self, peer: Peer, address: str) -> bool:
        return address in self.replies.dynamic or any(
            host.is_dynamic(address, peer.virtual_host) for host in self.hosts
        )

    def _judge(
        self, link: ReceivingLink | SendingLink, terminus: Source | Target | Coordinator
    ) -> Error | None:
        """Return why the peer may not have *link* to *terminus*; None if it may."""
        if isinstance(terminus, Coordinator) or terminus.dynamic or not terminus.address:
            return decide_anywhere(self.access, link.peer)
        wanted = Rights.LISTEN if _sends(link) else Rights.SEND
        return self.decide(link.peer, wanted, terminus.address)

    def _judge_attach(
        self, link: ReceivingLink | SendingLink, terminus: Source | Target | Coordinator
    ) -> Error | None:
        """Return why the peer may not attach *link* to *terminus*; None if it may.

        Without a user, a link is identified by the names of its container and itself, which other
        clients can use too. Taking over or ending the earlier link or terminus of these names
        therefore requires the right to that one as well.
        """
        refused = self._judge(link, terminus)
        if refused is not None or link.peer.trusted or not self.guarded:
            return refused
        taken: list[Source | Target | Coordinator | Error | None] = [
            host.takes_over(link) for host in self.hosts
        ]
        old = self._links.get(_identity(link)) if link.peer.user is None else None
        if old is not None and old.connection is not link.connection and old.attached:
            taken.append(_our_terminus(old))
        for each in taken:
            if isinstance(each, Source | Target | Coordinator) and self._judge(link, each):
                return Error(
                    "amqp:unauthorized-access",
                    f"another client has a link {link.name!r:.100} to what is not for you: "
                    "use another name for the link or the container",
                )
        return None

    def judge_again(self, connection: Connection, why: str) -> None:
        """Detach the links for which *connection* no longer has the right, and only those.

        Args:
            connection: The connection whose rights have changed.
            why: Beginning of the description in the detach.
        """
        for identity in list(self._links_of.get(connection.engine, ())):
            link = self._links.get(identity)
            if link is None or link.connection is not connection.engine or not link.attached:
                continue
            terminus = _our_terminus(link)
            if isinstance(terminus, Error):
                continue
            refused = self._judge(link, terminus)
            if refused is not None:
                link.detach(Error(refused.condition, f"{why}: {refused.description}"))
        for relay in list(self.relays):
            relay.forget(connection)

    def _place(
        self,
        connection: Connection,
        link: ReceivingLink | SendingLink,
        terminus: Source | Target,
    ) -> None:
        address = terminus.address = address_of(terminus.address or "") or None
        if address:
            try:
                found = self.find(address, sends=_sends(link))
            except ValueError as error:
                self._refuse(link, Error("amqp:not-found", str(error)))
                return
            if found is not None:
                workers, captures = found
                self._serve_link(
                    Binding(
                        workers.route, self, connection, link, address, captures, asked=terminus
                    ),
                    workers,
                    terminus,
                )
                return
        if any(host.attach(link) for host in self.hosts):
            return
        if isinstance(terminus, Target):
            self._place_sender(connection, cast("ReceivingLink", link), terminus)
        elif terminus.dynamic:
            self.replies.attach_dynamic(cast("SendingLink", link))
        else:
            self._refuse(link, self._no_such(address))

    def _serve_link(self, binding: Binding, workers: Workers, terminus: Source | Target) -> None:
        """Accept a link to one of our nodes."""
        route = binding.route
        if isinstance(terminus, Target):
            cast("ReceivingLink", binding.link).accept(
                LinkHandler(binding).receive() if route.kind == "link" else Inbox(binding, workers),
                target=Target(address=terminus.address),
                # Peers can send this much before they have any right.
                max_message_size=(
                    self.limits.token_message_size_max if terminus.address == CBS else None
                ),
                streaming=route.streaming,
                properties=paired_properties(binding.link) if route.kind == "rpc" else None,
            )
            return
        sending = cast("SendingLink", binding.link)
        answered = Source(
            address=terminus.address,
            distribution_mode=Symbol(route.mode),
            filter=_applied(terminus.filter, route.filters),
            outcomes=terminus.outcomes,
        )
        if route.kind == "source":
            sending.accept(SourceFeed(binding), source=answered)
        elif route.kind == "link":
            sending.accept(LinkHandler(binding).send(), source=answered)
        else:
            self.replies.attach(sending, terminus.address, answered)

    def _place_sender(self, connection: Connection, link: ReceivingLink, target: Target) -> None:
        """Accept or refuse a link to send to an address that neither a node nor a host has."""
        made = self.replies.dynamic.get(target.address) if target.address else None
        if made is not None:
            link.accept(Forward(self, made, link), target=Target(address=target.address))
        elif target.dynamic:
            self._refuse(
                link,
                Error(
                    "amqp:not-implemented",
                    "messages sent to a dynamic target could not be received here",
                ),
            )
        elif target.address:
            self._refuse(link, self._no_such(target.address))
        else:
            link.accept(Relay(self, connection, link), target=Target())

    def _no_such(self, address: str | None) -> Error:
        if not address:
            return Error("amqp:invalid-field", "the attach has no source address")
        return Error("amqp:not-found", f"{self.name!r} has no node {address!r}")

    def forget(self, link: ReceivingLink | SendingLink) -> None:
        """Remove *link*, which has ended, so that its name is free; end its pair."""
        identity = _identity(link)
        if self._links.get(identity) is link:
            if is_paired(link):
                self._end_pair(link)
            del self._links[identity]
            if (known := self._links_of.get(link.connection)) is not None:
                known.discard(identity)

    def _end_pair(self, link: ReceivingLink | SendingLink) -> None:
        """Detach the other link of a pair whose first has ended."""
        host, user, container_id, sends, *others = _identity(link)
        other = self._links.get((host, user, container_id, not sends, others[0], others[1]))
        if (
            other is not None
            and other.attached
            and other.session is link.session
            and is_paired(other)
        ):
            other.detach()

    def _forget_gone(self, engine: Any) -> None:
        for identity in list(self._links_of[engine]):
            link = self._links.get(identity)
            if link is None or link.connection is not engine:
                self._links_of[engine].discard(identity)
            elif not link.attached:
                self._links_of[engine].discard(identity)
                del self._links[identity]

    def request_begins(self, engine: Any) -> bool:
        """Count one more running request of a connection; return False if it has too many."""
        running = self._requests.get(engine, 0)
        if running >= self.limits.requests_running_max:
            return False
        self._requests[engine] = running + 1
        return True

    def request_ends(self, engine: Any) -> None:
        running = self._requests.get(engine, 0) - 1
        if running > 0:
            self._requests[engine] = running
        else:
            self._requests.pop(engine, None)

    # --- being a client ------------------------------------------------------------------

    def connect(
        self, urls: str | Sequence[str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Connection]:
        """Connect to a peer; see :func:`amqp_rt.container.recovery.connect` for the options."""
        return connect(urls, container=self, **options)

    def local(self, virtual_host: str = "") -> AbstractAsyncContextManager[Connection]:
        """Connect to this container in memory, with the same states, credit and errors."""
        return local(self, virtual_host)

    def start_connection(self, task: Callable[[], Awaitable[Any]]) -> None:
        """Run *task*, which serves a connection, until it ends or the container does.

        An exception of *task* is logged.
        """
        self._started().connections.start_soon(_guarded, task)

    async def consume(self, connection: Connection, nodes: Iterable[Any]) -> None:
        """Consume from the addresses of a peer with *nodes*; see :meth:`Connection.serve`.

        Nodes of this container keep their slots, shared between messages from the peer and messages
        sent here directly. Without *nodes*, all nodes of the container are served that have an
        address without captures and do not handle links themselves.
        """
        found: list[Workers] = []
        for each in nodes:
            for function, declaration in declared(each):
                workers = self._routes.of(function, declaration.address)
                if workers is None:
                    workers = self._workers_for(function, declaration)
                    self.workers.append(workers)
                found.append(workers)
        if not found:
            found = [
                each
                for each in self._routes
                if each.route.kind != "link" and not each.route.pattern.captures
            ]
        await consume(connection, found)

    def __repr__(self) -> str:
        state = "ready" if self.ready else "stopping" if self._stopping else "not started"
        return f"<Container {self.name!r}, {len(self._routes)} nodes, {state}>"


async def _open_nursery(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Open a nursery that can be cancelled separately, without other tasks in it."""
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


class _Nurseries(NamedTuple):
    """Nurseries of a running container; the last two are inside the first."""

    connections: trio.Nursery
    listeners: trio.Nursery
    handlers: trio.Nursery


class RouteTable:
    """Nodes by address, with separate tables for those to send to and those to receive from."""

    def __init__(self) -> None:
        self._all: list[Workers] = []
        self.tables: tuple[AddressTable[Workers], AddressTable[Workers]] = (
            AddressTable(),
            AddressTable(),
        )

    def __iter__(self) -> Iterator[Workers]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, workers: Workers) -> None:
        """Add a node.

        Raises:
            AddressError: Its address is taken.
        """
        route = workers.route
        added: list[AddressTable[Workers]] = []
        try:
            for sends in _DIRECTIONS[route.kind]:
                self.tables[sends].add(route.pattern, workers)
                added.append(self.tables[sends])
        except AddressError as error:
            for table in added:
                table.remove(route.pattern)
            raise AddressError(f"{route.name}: {error.description}") from None
        self._all.append(workers)

    def remove(self, workers: Workers) -> None:
        """Remove a node."""
        self._all.remove(workers)
        for sends in _DIRECTIONS[workers.route.kind]:
            self.tables[sends].remove(workers.route.pattern)

    def of(self, function: Callable[..., Any], address: str) -> Workers | None:
        """Return the node declared by *function* at *address*."""
        for each in self._all:
            if each.route.function == function and each.route.address == address:
                return each
        return None

    def find(self, address: str, *, sends: bool) -> tuple[Workers, Mapping[str, Any]] | None:
        """Find the node at *address* and its converted captures; see :meth:`Container.find`."""
        found = self.tables[sends].find(address)
        if found is None:
            return None
        workers, captures = found
        return workers, workers.route.convert(address, captures)


#: Directions of links to a node of each kind: False where the peer sends, True where we do. An rpc
#: can be received from: replies without a reply-to go there.
_DIRECTIONS: Final[Mapping[str, tuple[bool, ...]]] = {
    "node": (False,),
    "rpc": (False, True),
    "source": (True,),
    "link": (False, True),
}


def _sends(link: ReceivingLink | SendingLink) -> bool:
    """Whether we are the sender of *link*."""
    return link.role == SENDER


def _identity(link: ReceivingLink | SendingLink) -> _Identity:
    peer = link.peer
    terminus = link.source if _sends(link) else link.target
    address = terminus.address if isinstance(terminus, Source | Target) else None
    own = isinstance(address, str) and address_of(address) == CBS
    return (
        peer.virtual_host,
        peer.user,
        peer.container_id,
        _sends(link),
        link.name,
        link.connection if own else None,
    )


def _our_terminus(link: ReceivingLink | SendingLink) -> Source | Target | Coordinator | Error:
    """Return our terminus of *link* as the peer requested it, or why there is none."""
    terminus = link.source if _sends(link) else link.target
    if isinstance(terminus, Coordinator):
        return terminus
    if terminus is None:
        return Error("amqp:invalid-field", "the attach names no node: its terminus is null")
    if terminus.address is not None and not isinstance(terminus.address, str):
        return Error("amqp:not-implemented", "addresses are strings here")
    return terminus


_STOLEN: Final = Error("amqp:link:stolen", "the link was attached again elsewhere")


def _not_for_you(address: object) -> Error:
    return Error("amqp:unauthorized-access", f"{address!r} is not for you")


def _applied(
    asked: Mapping[object, object] | None, known: Collection[str]
) -> Mapping[object, object] | None:
    """Return the filters in effect: only those that the node applies (Part 3 §3.5.8)."""
    return {name: value for name, value in (asked or {}).items() if name in known} or None


def _is_local(address: str) -> bool:
    """Whether a peer with *address* is on this machine."""
    if address == "unix" or address.startswith("memory"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return is_loopback(host)
    except ValueError:
        return False


async def _guarded(task: Callable[..., Awaitable[Any]], *args: Any) -> None:
    """Run *task* and log its exception, so that one failure does not end the whole container."""
    try:
        await task(*args)
    except Exception:
        log.exception("%s failed", getattr(task, "__qualname__", task))


async def _call(hooks: Iterable[Hook]) -> None:
    for hook in hooks:
        result = hook()
        if inspect.isawaitable(result):
            await result


def _without_cancelled(error: BaseException) -> BaseException | None:
    """Return the rest of *error* without cancellations, unwrapped if it is a group of one."""
    rest: BaseException | None = error
    if isinstance(error, BaseExceptionGroup):
        rest = error.split(trio.Cancelled)[1]
    elif isinstance(error, trio.Cancelled):
        rest = None
    while isinstance(rest, BaseExceptionGroup) and len(rest.exceptions) == 1:
        rest = rest.exceptions[0]
    return rest
