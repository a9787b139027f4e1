"""Container of nodes, with all tasks that run for them.

All tasks run within the ``async with`` block of their container. Leaving the block normally takes
credit back, lets handlers finish or cancels them, settles, detaches and closes, in this order.
Leaving it with an exception does the same without waiting for handlers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from math import inf
from os import PathLike
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgspec
import trio

from ..addresses import origin_of
from ..errors import AmqpError
from ..fronts.amqp10 import Front as Amqp10
from ..fronts.base import (
    Front,
    Host,
)
from ..limits import DEFAULT_LIMITS, Limits, check_seconds
from ..loglimit import LogLimiter
from ..message import Message
from ..net.memory import MemoryNetwork
from ..net.proxy_headers import ProxyProtocol
from ..net.reactor import Reactor, open_reactor
from ..net.tls import ServerTls
from ..net.traces.recording import Traces
from ..net.traces.watching import FrameWatches
from ..observers import Observer
from ..outcomes import MODIFIED_FAILED, Error
from ..policies import Retry
from ..security.access import (
    ASYNCAPI,
    CBS,
    Access,
    reserved,
)
from ..security.bearer import VerifyToken
from ..security.identities import Users
from ..security.mechanisms import (
    ServerMechanism,
    Verifier,
)
from ..security.tokens import Cbs
from ..tallies import Tallies
from .attaching import Attaching
from .blocks import TrioBlock
from .boxes import Outbox, OutboxFeed
from .codecs import Codec, Codecs
from .connections import Connection, LinkClasses
from .consuming import consume
from .declaring import NodeDecorator, RpcDecorator, SourceDecorator, declared, timed_in
from .doors import DoorArrival
from .entry import ConnectionEntry, SaslPolicy
from .health import ContainerHealth, health_of
from .home import Feed
from .links import fresh
from .local import Visitor, local
from .nodes import Nodes
from .observed import OBSERVED
from .permissions import Authorize, Permissions
from .profiles import Profile
from .raising import OnError
from .recovery import connect
from .replies import (
    Replies,
)
from .resources import Resources
from .routes import Middleware, Route
from .running import run_application, run_program
from .schema import asyncapi
from .serving import Workers
from .timing import CronDecorator, EveryDecorator, RunTimes, TimedFunction

log = logging.getLogger("amqp_rt.container")

#: Called when a container starts or has stopped.
Hook: TypeAlias = Callable[[], Any]

#: Seconds that peers have to answer our close before their connections are dropped.
CLOSE_GRACE_S: Final = 5.0


def _checked_name(name: str) -> str:
    """Return *name*.

    Raises:
        ValueError: It is empty.
    """
    if not name:
        raise ValueError("a container needs a name: it is the container-id that peers see")
    return name


class Container(TrioBlock):
    """Nodes at addresses, with the tasks, listeners and connections that serve them.

    ::

        async with Container("shop", nodes=[Orders(db)]) as shop:
            await shop.listen("amqp://127.0.0.1:0")
            await shop.serve()

    Args:
        name: The container-id that peers see.
        nodes: Decorated functions, objects with decorated methods, routers; also those of ``@every`` and ``@cron``.
        resources: Objects, or ``@asynccontextmanager`` functions that make them, which handlers ask
            for by type.
        middleware: Wrapped around every handler of this container.
        codecs: Codecs for payloads of types that msgspec does not know, or that it should not encode; see
            :class:`~amqp_rt.container.codecs.Codec`. Those of installed packages follow, then pydantic's, then msgspec.
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
        retry: Attempts and pauses of messages whose handler raised, for nodes that declare neither
            ``retry`` nor ``on_error``. It goes before *on_error* here.
        drain_s: Seconds that handlers have to finish when the block is left.
        network: Namespace of ``memory://`` addresses; share one between containers that connect to
            each other.
        fronts: Protocols that listeners speak.
        trace: A folder in which each connection records its input and output in a file; see
            :mod:`amqp_rt.net.traces.recording`. The files contain messages, but no passwords.
        observe: Observers of the operations on messages, such as :class:`amqp_rt.telemetry.otel.Otel`.
        outbox: Messages that transactions of the application's own database have committed, such as
            :class:`amqp_rt.outbox.SqlOutbox`. They are sent to the peer whose addresses all nodes serve: that of
            :meth:`run`, or of :meth:`Connection.serve`.
    """

    _public_name = "Container"
    #: Why its start waits for another program: it never does.
    standby: Final = ""

    #: Waits for the sockets of all connections in one task, on systems that support it.
    reactor: Reactor | None = None
    #: Answers at ``$management``, if a broker does; a member of a mesh adds its entities there.
    management: object | None = None
    #: Whether it has begun to stop.
    stopping = False
    #: When the handlers' time for a stop ends, once it has begun.
    _drain_by: float | None = None
    #: Whether the outbox sends to a peer.
    _relays = False
    #: Cause of the end of :meth:`serve`, unless :meth:`stop` ends it.
    _failure: AmqpError | None = None
    _nurseries: _Nurseries | None = None

    def __init__(
        self,
        name: str,
        *,
        nodes: Iterable[Any] = (),
        resources: Iterable[Any] = (),
        middleware: Sequence[Middleware] = (),
        codecs: Iterable[Codec] = (),
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
        retry: Retry | None = None,
        drain_s: float = 10.0,
        network: MemoryNetwork | None = None,
        fronts: Sequence[Front] = (),
        trace: str | PathLike[str] | None = None,
        observe: Iterable[Observer] = (),
        outbox: Outbox | None = None,
    ) -> None:
        super().__init__()
        self.name = _checked_name(name)
        self.limits = limits
        self.on_error = on_error
        self.retry = retry
        self.log_limiter = LogLimiter(limits)
        self.tallies = Tallies()
        self.dialled: set[Connection] = set()
        self.observers: list[Observer] = list(observe)
        self.outbox = outbox
        self.link_classes = OBSERVED if self.observers else LinkClasses()
        check_seconds("drain_s", drain_s, most=inf)
        self.drain_s = drain_s
        if isinstance(users, Mapping):
            users = Users(users)
        #: The users whose passwords are kept here; None with another verifier or none.
        self.users = users if isinstance(users, Users) else None
        self.network = network or MemoryNetwork()
        #: Writer of connection traces; None without *trace*.
        self.traces = None if trace is None else Traces(trace, limits=limits)
        #: Watches of operators, who see the frames of connections that peers open.
        self.frame_watches = FrameWatches(limits)
        self.hosts: list[Host] = []
        self.feeds: set[Feed] = set()
        self.replies = Replies(self)
        self._resources = Resources(resources)
        #: Codecs of payloads.
        self.codecs = Codecs(codecs, limits)
        self.nodes = Nodes(
            self,
            answer=self.replies.answer,
            resources=self._resources,
            codecs=self.codecs,
            middleware=middleware,
        )
        self.permissions = Permissions(
            # With CBS, a peer without a token has no rights.
            Access() if access is None and cbs is not None else access,
            authorize,
            self.hosts,
            self.replies.dynamic,
        )
        self.attaching = Attaching(self, self.nodes, self.replies, settle_second=settle_second)
        self.entry = ConnectionEntry(
            self,
            fronts=[*fronts] or [Amqp10()],
            sasl=sasl,
            sasl_policy=sasl_policy,
            users=users,
            tokens=tokens,
            cbs=cbs,
            plain_in_clear=plain_in_clear,
            tls=tls,
            tls_required=tls_required,
            origins=[each if each == "*" else origin_of(each) for each in origins],
        )
        self.node = NodeDecorator(self.nodes.add)
        self.rpc = RpcDecorator(self.nodes.add)
        self.source = SourceDecorator(self.nodes.add)
        #: Functions that run at certain times.
        self.timed: list[TimedFunction] = []
        self.every = EveryDecorator(self._add_timed)
        self.cron = CronDecorator(self._add_timed)
        self._on_startup: list[Hook] = []
        self._on_shutdown: list[Hook] = []
        self._ready = trio.Event()
        self._stopped = trio.Event()
        if cbs is not None:
            self.rpc(CBS)(self.entry.answer_cbs)
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
                self.nodes.add(function, declaration)
            for timed, timing in timed_in(each):
                self._add_timed(timed, timing)

    def _add_timed(self, function: Any, timing: RunTimes) -> None:
        timed = TimedFunction(function, timing, self._resources)
        self.timed.append(timed)
        if self._ready.is_set():
            self._start_timed(timed)

    def _start_timed(self, timed: TimedFunction) -> None:
        if self.start_handler(timed.run):
            self.feeds.add(timed)

    def remove(self, *nodes: Any) -> None:
        """Remove nodes, given as functions, objects, routers or addresses as they were declared.

        New links are refused from now on. Attached links get no more credit, and are detached
        (``amqp:resource-deleted``) once their running handlers have ended, or after ``drain_s``.

        Raises:
            ValueError: There is no such node.
        """
        for each in nodes:
            gone = self.nodes.of(each)
            if not gone:
                raise ValueError(f"{each!r} is no node of {self.name!r}")
            for workers in gone:
                self.nodes.remove(workers)
                workers.stop()
                if self._nurseries is not None:
                    self.start_handler(self._retire, workers)
                else:
                    self.nodes.retire(workers)

    async def _retire(self, workers: Workers) -> None:
        with trio.move_on_after(self.drain_s):
            await workers.wait_idle()
        workers.detach(Error("amqp:resource-deleted", f"{workers.route.address!r} is gone"))
        self.nodes.retire(workers)

    def add_host(self, host: Host, *, first: bool = False) -> None:
        """Look up addresses that no node has in *host*, such as a broker.

        Connections offer its capabilities if it is added before the start.

        Args:
            host: The host.
            first: Whether the host is asked before the nodes and the other hosts.
        """
        if first:
            self.hosts.insert(len(self.attaching.first_hosts), host)
            self.attaching.first_hosts.append(host)
        else:
            self.hosts.append(host)

    def remove_host(self, host: Host) -> None:
        """Ask *host* no longer; links that it has accepted stay."""
        self.hosts.remove(host)
        if host in self.attaching.first_hosts:
            self.attaching.first_hosts.remove(host)

    def provide(self, thing: Any, *, as_type: type | None = None) -> None:
        """Provide *thing* to handlers with a parameter of its type; call it before adding them.

        An ``@asynccontextmanager`` function is entered when the container starts.

        Raises:
            RuntimeError: The container is running, and *thing* would have to be entered.
        """
        self._resources.provide(thing, as_type=as_type)
        if self._running is not None and self._resources.unmade:
            raise RuntimeError("a resource with a lifetime is provided before the container starts")

    def override(self, kind: Any, value: Any) -> AbstractContextManager[None]:
        """Use *value* in place of the resource *kind*, or of the function of a ``Depends``, within a block of tests.

        Values that only the replaced one needs are not made.

        Raises:
            ValueError: It is overridden already.
        """
        return self._resources.overridden(kind, value)

    def observe(self, observer: Observer) -> None:
        """Tell *observer* of the operations on links that attach from now on, and of new connections' calls."""
        self.observers.append(observer)
        self.link_classes = OBSERVED

    def on_startup(self, hook: Hook) -> Hook:
        """Call *hook* when the container starts, before links are served. Usable as a decorator."""
        self._on_startup.append(hook)
        return hook

    def on_shutdown(self, hook: Hook) -> Hook:
        """Call *hook* after handlers have ended, before connections close; the last one first."""
        self._on_shutdown.append(hook)
        return hook

    @property
    def connections(self) -> list[Connection]:
        """Connections opened by peers. They can also be used to send, receive and call."""
        return self.entry.connections

    @property
    def routes(self) -> list[Route]:
        """Handlers of the nodes, in the order in which they were added."""
        return self.nodes.routes

    def asyncapi(self, *, version: str = "1.0.0") -> dict[str, Any]:
        """Return the nodes as an AsyncAPI 3.0 document, without those of this library, such as ``$management``."""
        routes = [each for each in self.routes if not reserved(each.address)]
        return asyncapi(self.name, routes, version=version, codecs=self.codecs)

    def offer_asyncapi(self, *, version: str = "1.0.0") -> None:
        """Answer requests to ``$asyncapi`` with the document of :meth:`asyncapi`, in JSON.

        With access rules, peers need the right to send there.

        Raises:
            AddressError: There is a node at ``$asyncapi`` already.
        """

        async def describe() -> Message:
            document = msgspec.json.encode(self.asyncapi(version=version))
            return Message(document, content_type="application/json")

        self.rpc(ASYNCAPI)(describe)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counts of the messages of each node, by address.

        If one address has both a node to send to and one to receive from, the key of the second has
        its kind in front: ``"source orders"``.
        """
        return self.nodes.stats()

    def health(self) -> ContainerHealth:
        """Return whether the container runs and takes work, with the reasons if it does not.

        To be called in its event loop; an answer proves that the loop runs.
        """
        return health_of(self, self.entry.urls, running=self._nurseries is not None)

    # --- lifetime ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the container has started and is not stopping."""
        return self._ready.is_set() and not self.stopping

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

    def run(
        self,
        url: str | Sequence[str] | None = None,
        *,
        listen: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Run the container as the whole program, under trio, until SIGINT or SIGTERM.

        ::

            if __name__ == "__main__":
                shop.run("amqp://broker.example", listen="amqp://127.0.0.1:0")

        The signal stops the container as the end of its block does: no more messages are taken, handlers have
        ``drain_s`` to finish, links detach. The second signal ends the process at once, with the status 128 and
        its number.

        Args:
            url: A peer, such as a broker: its addresses are consumed from by the nodes of the container, as
                :meth:`Connection.serve` does. Several URLs are a failover list.
            listen: Where to listen, too.
            options: Options of the connection to *url*; see :func:`amqp_rt.connect`.

        Raises:
            SystemExit: With a sentence, for a status of 1: it cannot listen or connect, or the peer has no such
                address.
            ValueError: There is neither *url* nor *listen*.
        """
        run_program(self, url, listen, **options)

    async def run_async(
        self,
        url: str | Sequence[str] | None = None,
        *,
        listen: str | Sequence[str] = (),
        signals: bool = True,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
        **options: Any,
    ) -> None:
        """Do as :meth:`run` within a program that runs trio: ``await nursery.start(shop.run_async, url)``.

        ``nursery.start`` returns the URLs that were bound, once nodes are served. With *signals*, which takes the main
        thread, SIGINT and SIGTERM stop the container; otherwise only :meth:`stop` does. Cancelling stops it
        without waiting for handlers.

        Raises:
            AmqpError: It cannot listen or connect, or the peer has no such address; later, a node can no longer be
                served at the peer.
            ValueError: There is neither *url* nor *listen*.
        """
        await run_application(
            self, url, listen, signals=signals, task_status=task_status, **options
        )

    def fail(self, error: AmqpError) -> None:
        """Make :meth:`serve` raise *error*, because a node is no longer served."""
        if not self._stopped.is_set():
            self._failure = error
            self._stopped.set()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Self]:
        failure: BaseException | None = None
        try:
            async with AsyncExitStack() as resources:
                await resources.enter_async_context(self._resources.entered())
                self.reactor = await resources.enter_async_context(open_reactor())
                async with trio.open_nursery() as connections:
                    try:
                        listeners = await connections.start(_open_nursery, self.reactor)
                        async with trio.open_nursery() as handlers:
                            self._nurseries = _Nurseries(connections, listeners, handlers)
                            try:
                                await _call(self._on_startup)
                                self._ready.set()
                                for timed in self.timed:
                                    self._start_timed(timed)
                                yield self
                            except BaseException as error:
                                # Raised again below: nurseries would wrap the exception in a group.
                                failure = error
                            try:
                                await self.drain(0.0 if failure is not None else None)
                            finally:
                                handlers.cancel_scope.cancel()
                    finally:
                        with trio.move_on_after(
                            max(self.drain_s, CLOSE_GRACE_S), shield=failure is not None
                        ):
                            await _call(reversed(self._on_shutdown))
                        # This error makes clients connect again (Part 2 §2.8.16).
                        self.entry.close_all(
                            Error("amqp:connection:forced", f"{self.name!r} is stopping")
                        )
                        connections.cancel_scope.deadline = trio.current_time() + CLOSE_GRACE_S
        except BaseException as error:
            unexpected = _without_cancelled(error)
            if unexpected is not None:
                raise unexpected from None
            if failure is None:
                raise
        finally:
            self._nurseries = None
            self.entry.timers.close()
        if failure is not None:
            raise failure

    async def drain(self, seconds: float | None = None) -> None:
        """Stop taking messages, and let running handlers finish within *seconds*.

        By default this is ``drain_s``, or what the first such call has left of it. The end of the block does
        the same. Called before it, connections that :meth:`connect` has made still
        carry the outcomes of the handlers. If cancelled, handlers continue, without new messages.
        """
        if seconds is None:
            if self._drain_by is None:
                self._drain_by = trio.current_time() + self.drain_s
            seconds = self._drain_by - trio.current_time()
        self.stopping = True
        self._started().listeners.cancel_scope.cancel()
        for workers in self.nodes.workers:
            workers.stop()
        for relay in self.attaching.relays:
            relay.stop()
        feeds = list(self.feeds)
        for feed in feeds:
            feed.stop()
        if seconds <= 0:
            return
        with trio.move_on_after(seconds):
            for workers in list(self.nodes.workers):
                await workers.wait_idle()
            for feed in feeds:
                await feed.finished.wait()
            await self.replies.flush()

    @property
    def connection_nursery(self) -> trio.Nursery:
        """Nursery of the connections' tasks, open until the container has ended."""
        return self._started().connections

    @property
    def listener_nursery(self) -> trio.Nursery:
        """Nursery of the listeners, cancelled when the container begins to stop."""
        return self._started().listeners

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

    async def listen(
        self,
        *urls: str,
        profile: Profile | None = None,
        proxy_protocol: ProxyProtocol | None = None,
    ) -> list[str]:
        """Listen at each of *urls*, and return them with the addresses that were bound.

        Connections have *profile*; without one, that of :meth:`set_profile`, if it was called. With
        *proxy_protocol* they come from proxies, which say for whom by the PROXY protocol;
        ``?proxy_protocol=required&trusted=10.0.0.0/8`` after a URL says so too.

        ``amqp://HOST:PORT`` (``amqp://:PORT`` listens on every address, port 0 on any free port),
        ``amqps://`` for TLS, ``ws://HOST:PORT/PATH`` and ``wss://`` for WebSocket,
        ``amqp+unix:///PATH`` and ``memory://NAME``. If cancelled, listeners that are bound
        continue.

        Raises:
            ConnectFailed: A URL cannot be listened on; the error names it and the cause.
            ValueError: The mechanisms of *profile* are not known, or logins are off.
        """
        if profile is not None:
            self._add_profile(profile)
        return [await self.entry.listen(url, profile, proxy_protocol) for url in urls]

    def set_profile(self, profile: Profile) -> None:
        """Give connections that are accepted from now on *profile*, unless their listener has another.

        Raises:
            ValueError: The mechanisms of *profile* are not known, or logins are off.
        """
        self._add_profile(profile)
        self.entry.profile = profile

    def _add_profile(self, profile: Profile) -> None:
        self.entry.add_profile(profile)
        if profile.cbs is not None:
            self.permissions.takes_tokens = True
            if self.nodes.find(CBS, sends=False) is None:
                self.rpc(CBS)(self.entry.answer_cbs)

    def add_front(self, front: Front) -> None:
        """Accept a further protocol at all listeners."""
        self.entry.add_front(front)

    async def accept(
        self,
        stream: trio.abc.Stream,
        address: str = "",
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
            scheme: The expected outermost protocol: ``amqp``, ``amqps``, ``ws`` or ``wss``.
            path: Path of a WebSocket.
            trusted: The peer need not log in.
        """
        await self.entry.accept(stream, address, scheme=scheme, path=path, trusted=trusted)

    async def open_door(
        self,
        host: str,
        port: int,
        serve: Callable[[trio.abc.Stream, DoorArrival], Awaitable[None]],
        *,
        tls: bool,
        nursery: trio.Nursery,
    ) -> int:
        """Accept TCP connections of another protocol, such as HTTP, in tasks of *nursery*; return the port.

        They count as connections of this container, in the same limits.

        Args:
            host: Address to listen on; empty for every interface.
            port: Port to listen on, 0 for any that is free.
            serve: Called with each stream, which is closed afterwards, and how it arrived.
            tls: Whether the streams are those within TLS, with the certificates of this container.
            nursery: Tasks of the listeners and of the connections; to be cancelled by the caller.

        Raises:
            ConnectFailed: The address cannot be listened on, TLS needs a certificate, or TLS is required.
        """
        return await self.entry.open_door(host, port, serve, tls=tls, nursery=nursery)

    # --- being a client ------------------------------------------------------------------

    def connect(
        self, urls: str | Sequence[str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Connection]:
        """Connect to a peer; see :func:`amqp_rt.container.recovery.connect` for the options."""
        return connect(urls, container=self, **options)

    def local(
        self, virtual_host: str = "", *, visitor: Visitor | None = None
    ) -> AbstractAsyncContextManager[Connection]:
        """Connect to this container in memory, with the same states, credit and errors.

        Without a *visitor*, who logs in, the connection may do everything; see :func:`amqp_rt.container.local.local`.
        """
        return local(self, virtual_host, visitor=visitor)

    def start_connection(self, task: Callable[[], Awaitable[Any]]) -> None:
        """Run *task*, which serves a connection, until it ends or the container does.

        An exception of *task* is logged.
        """
        self._started().connections.start_soon(_guarded, task)

    async def consume(self, connection: Connection, nodes: Iterable[Any]) -> None:
        """Consume from the addresses of a peer with *nodes*; see :meth:`Connection.serve`.

        Nodes of this container keep their slots, shared between messages from the peer and messages
        sent here directly. Without *nodes*, all nodes of the container are served that have an
        address without captures and do not handle links themselves, and the messages of the container's outbox are
        sent to the peer.

        Raises:
            ValueError: The outbox sends to another peer already.
        """
        nodes = list(nodes)
        outbox = None if nodes else self.outbox
        if outbox is not None and self._relays:
            raise ValueError(
                f"the outbox of {self.name!r} sends to another peer: serve single nodes"
            )
        await consume(connection, self.nodes.for_peer(nodes), self.replies)
        if outbox is not None:
            feed = OutboxFeed(outbox, connection, self.fail)
            if self.start_handler(feed.run):
                self._relays = True
                self.feeds.add(feed)

    def __repr__(self) -> str:
        state = "ready" if self.ready else "stopping" if self.stopping else "not started"
        return f"<Container {self.name!r}, {len(self.nodes)} nodes, {state}>"


async def _open_nursery(
    reactor: Reactor | None, *, task_status: trio.TaskStatus[trio.Nursery]
) -> None:
    """Open a nursery that can be cancelled separately, without other tasks in it.

    After that, wait for the connections of *reactor* that have no task; if cancelled, drop them.
    """
    try:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
        if reactor is not None:
            await reactor.wait_adopted()
    finally:
        if reactor is not None:
            reactor.drop_adopted()


class _Nurseries(NamedTuple):
    """Nurseries of a running container; the last two are inside the first."""

    connections: trio.Nursery
    listeners: trio.Nursery
    handlers: trio.Nursery


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
