"""The public class Broker: a container, a broker and management in one object."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import entry_points
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol, Self

import msgspec
import trio

from ..addresses import AddressError, Wildcards, parse_url
from ..clock import Clock
from ..container.blocks import TrioBlock
from ..container.connections import Connection
from ..container.container import Container
from ..container.entry import SaslPolicy
from ..container.local import Visitor
from ..container.permissions import Authorize
from ..container.profiles import Profile
from ..container.routes import Context, Route
from ..container.running import run_application, run_program
from ..container.timing import TimedFunction
from ..errors import AmqpError
from ..fronts import amqp10
from ..fronts.base import Front
from ..limits import DEFAULT_LIMITS, Limits
from ..management.answering import ADDRESS
from ..management.entities import collections_of
from ..management.epochs import add_epochs
from ..management.explaining import add_explaining
from ..management.leases import add_leases
from ..management.node import Management
from ..message import Message
from ..net.memory import MemoryNetwork
from ..net.proxy_headers import ProxyProtocol
from ..net.tls import ServerTls
from ..observers import Observer
from ..outcomes import Error
from ..security.access import Access, reserved
from ..security.bearer import VerifyToken
from ..security.identities import Users
from ..security.mechanisms import ServerMechanism, Verifier
from ..security.tokens import Cbs
from ..stores.base import Store
from ..telemetry.stuck import StuckWatch
from .bindings import RoutingTable
from .branches.peers import PeerBranches
from .declarations import declarations_in, declared_by
from .durable.journal import Journal
from .durable.opening import Executor
from .filtering.filters import filter_types
from .filtering.plugin_filters import FilterType
from .host import BrokerHost
from .kinds.logs import LogNode
from .kinds.queues import QueueNode
from .kinds.schedules import ScheduleNode
from .kinds.topics import TopicNode
from .lifecycles import LifeCycles
from .nodes import Declaration
from .statistics import LogStats, NodeStats, ScheduleStats, SubscriptionStats
from .topology.arguments import QueueType
from .topology.topologies import Topologies


class AddOn(Protocol):
    """Extension of a broker, such as the namespace of another product; see :doc:`/guides/addons`."""

    def install(self, broker: Broker) -> None:
        """Add hosts, nodes, protocols and operations to *broker*, which has not started.

        Raises:
            AmqpError: The add-on and the options of the broker exclude each other.
        """


class Broker(TrioBlock):
    """Embedded broker: queues, topics and logs, beside the nodes of an application.

    ::

        async with Broker() as broker:
            await broker.declare(Queue("work", max_deliveries=5, dead_letter="work/dead"))
            (url,) = await broker.listen("amqp://127.0.0.1:0")

    Args:
        name: The container-id that peers see.
        nodes: Nodes of an application, reached at the same listeners; where an address belongs both
            to such a node and to a queue, the link attaches to the application's node.
        auto_create: Patterns for nodes that are created on first use, such as
            ``["queue:orders-*?dead_letter=dead", "topic:news-*"]``; the most specific pattern wins.
        container: A container to build on, instead of *name*, *nodes* and the options below.
        fronts: Protocols that listeners speak beside AMQP 1.0, as objects or by the names under
            which plug-ins are installed, such as ``["amqp091"]``.
        limits: Bounds of connections, queues and memory.
        clock: Source of the time for times to live, locks and schedules. By default they follow the
            clocks of the system, and the event loop's clock where that is virtual, such as
            ``trio.testing.MockClock``.
        users: Users who may log in; see :class:`~amqp_rt.container.container.Container`.
        sasl: Mechanisms to offer.
        sasl_policy: Whether clients log in: ``"required"``, ``"optional"`` or ``"off"``.
        tokens: Verifies OAuth 2.0 tokens.
        authorize: Decides whether a peer may attach to an address.
        access: Rights of users at addresses; see :mod:`amqp_rt.security.access`.
        cbs: Tokens that are accepted at ``$cbs``; see :mod:`amqp_rt.security.tokens`.
        plain_in_clear: Let passwords cross networks unencrypted.
        tls: Certificates for listeners at ``amqps://``.
        tls_required: Refuse connections without TLS on ``amqp://``, and do not listen on ``ws://``.
            ``amqp+unix://`` and ``memory://`` do not leave the machine and need no TLS.
        settle_second: Whether senders that ask for ``rcv-settle-mode`` second, to settle before we do,
            get it; Azure's clients need False.
        origins: Web pages that may connect to ``ws://`` and ``wss://``.
        network: Network in which ``memory://`` addresses are looked up.
        trace: A folder for traces of connections; see :class:`~amqp_rt.Container`.
        observe: Observers of the operations on messages; see :class:`~amqp_rt.Container`.
        management: Answer at ``$management``.
        store: Store of declared nodes and durable messages: ``"sqlite:PATH"``, the URL of a store that a
            plug-in provides, such as ``"postgresql://HOST/DATABASE"``, a
            :class:`~amqp_rt.stores.base.Store`, or None for no store. Without one, durable messages
            are refused (Part 3 §3.2.1).
        volatile: Accept durable messages although there is no store.
        executor: Runs the calls to the store; by default in a worker thread.
        virtual_hosts: Names of virtual hosts, each with its own nodes, beside those for which
            nodes are declared. With a list, connections that name none of them are refused, unless
            ``""`` is among them; otherwise they get the default virtual host.
        journal: Record the life cycle of messages in the log ``$journal``.
        exchange_types: Custom exchange types: maps a name that begins with ``x-`` to a function that
            makes a :class:`~amqp_rt.broker.bindings.RoutingTable` for each exchange.
        queue_types: Custom ``x-queue-type`` values of AMQP 0-9-1, beside RabbitMQ's: maps a name that
            begins with ``x-`` to a function from the declaration
            (:class:`~amqp_rt.fronts.base.QueueDeclaration`) to a ``Queue`` or a ``Log``.
        filters: Custom filter types that receivers may ask for, beside those of installed plug-ins: maps the
            symbol that describes the filter to a function from its value to a test of messages
            (:class:`~amqp_rt.broker.building.MessageView`); see :doc:`/guides/addons`.
        addons: Extensions, as objects or by the names under which plug-ins are installed; see
            :doc:`/guides/addons`. They are installed in this order.
    """

    _public_name = "Broker"

    def __init__(
        self,
        name: str = "broker",
        *,
        nodes: Iterable[Any] = (),
        auto_create: Collection[str] = (),
        container: Container | None = None,
        fronts: Sequence[Front | str] = (),
        limits: Limits = DEFAULT_LIMITS,
        clock: Clock | None = None,
        users: Mapping[str, str] | Users | Verifier | None = None,
        sasl: Collection[str | ServerMechanism] | None = None,
        sasl_policy: SaslPolicy | None = None,
        tokens: VerifyToken | None = None,
        authorize: Authorize | None = None,
        access: Access | None = None,
        cbs: Cbs | None = None,
        plain_in_clear: bool = False,
        tls: ServerTls | None = None,
        tls_required: bool = False,
        settle_second: bool = True,
        origins: Collection[str] = (),
        network: MemoryNetwork | None = None,
        trace: str | PathLike[str] | None = None,
        observe: Iterable[Observer] = (),
        management: bool = True,
        store: str | Store | None = None,
        volatile: bool = False,
        executor: Executor | None = None,
        virtual_hosts: Collection[str] | None = None,
        journal: LifeCycles | bool = False,
        exchange_types: Mapping[str, Callable[[], RoutingTable]] | None = None,
        queue_types: Mapping[str, QueueType] | None = None,
        filters: Mapping[str, FilterType] | None = None,
        addons: Sequence[AddOn | str] = (),
    ) -> None:
        super().__init__()
        self.container = container or Container(
            name,
            nodes=nodes,
            fronts=[
                amqp10.Front(),
                *(front_of(each) if isinstance(each, str) else each for each in fronts),
            ],
            limits=limits,
            users=users,
            sasl=sasl,
            sasl_policy=sasl_policy,
            tokens=tokens,
            authorize=authorize,
            access=access,
            cbs=cbs,
            plain_in_clear=plain_in_clear,
            tls=tls,
            tls_required=tls_required,
            settle_second=settle_second,
            origins=origins,
            network=network,
            trace=trace,
            observe=observe,
        )
        kept = store_of(store) if isinstance(store, str) else store
        self.host = BrokerHost(
            limits=self.container.limits,
            clock=clock,
            auto_create=self._creator_beside_handlers(auto_create),
            journal=None if kept is None else Journal(kept, executor),
            volatile=volatile,
            virtual_hosts=virtual_hosts,
            life_cycles=LifeCycles() if journal is True else journal or None,
        )
        self.host.services.observers = self.container.observers
        self.host.services.filters = filter_types(filters)
        self.container.add_host(self.host)
        self.topologies = Topologies(
            self.host,
            self.container.permissions.decide,
            asks=lambda: self.container.permissions.authorize is not None,
            routing=self.container.attaching.first_hosts,
            routed=self.container.attaching.is_routed,
            types=exchange_types,
            queue_types=queue_types,
        )
        self.container.entry.topology = self.topologies.of
        self.container.entry.branches = partial(
            PeerBranches, self.host.services.branches, rights=self.container.permissions
        )
        self.container.nodes.check = self._check_route
        self.management: Management | None = None
        if management:
            self._add_management()
        #: Profiles of plug-ins that listeners have, by name.
        self._profiles: dict[str, Profile] = {}
        for each in addons:
            (addon_of(each) if isinstance(each, str) else each).install(self)
        self._guard()

    def _add_management(self) -> None:
        """Answer at ``$management``."""
        self.management = management = Management(
            self.host.space,
            self.host.virtual_hosts,
            decide=self.container.permissions.decide,
            may_declare=self.container.permissions.may_declare,
            collections=collections_of(self.container, self.host),
            limits=self.container.limits,
            open_to_all=self.container.permissions.open_management,
        )
        add_epochs(management, self.host.staging)
        add_leases(management, self.host.leases)
        add_explaining(management, self.container.permissions)
        self.container.management = management
        self.container.rpc(ADDRESS)(self._answer)

    def _guard(self) -> None:
        """Check rights to addresses to which the broker itself sends, if there are rights at all."""
        if self.container.permissions.guarded:
            self.host.services.may_send = self.container.permissions.may_be_sent

    async def _answer(self, message: Message, context: Context) -> Message:
        assert self.management is not None
        # Each entity has a management node of its own; all of them are this one object.
        entity = context.address.removesuffix(ADDRESS).removesuffix("/")
        return await self.management.answer(message, context.peer, entity)

    # --- nodes ---------------------------------------------------------------------------

    async def declare(self, *declared: Declaration, virtual_host: str = "") -> None:
        """Create nodes, in *virtual_host* if one is named; an equal declaration changes nothing.

        With a store they are restored when it is opened again; a later declaration then replaces
        the stored one. If cancelled, the nodes exist, but may not be stored yet.

        Raises:
            AmqpError: A name is taken by another node or by a handler, or there are too many nodes.
        """
        for each in declared:
            if (route := self._handler_at(each.name)) is not None:
                raise AmqpError(
                    f"{each.kind} {each.name!r}: the handler {route.name} at {route.address!r} of this "
                    "container already receives the messages of that address, and the node would get none: give one of "
                    "them another address",
                    condition="amqp:not-allowed",
                )
        space = self.host.spaces.open(virtual_host)
        for each in declared:
            space.declare(each)
        await trio.lowlevel.checkpoint()
        await self.host.wait_kept()

    def _handler_at(self, address: str) -> Route | None:
        """Return the container's handler for *address*, in either direction.

        None for the broker's own addresses, whose names :class:`BrokerHost` refuses with its own reason.
        """
        if reserved(address):
            return None
        for sends in (False, True):
            if (route := self.container.nodes.handler_at(address, sends=sends)) is not None:
                return route
        return None

    def _creator_beside_handlers(
        self, patterns: Collection[str]
    ) -> Callable[[str], Declaration | None] | None:
        """Return the function that declares nodes on first use, None without patterns.

        Raises:
            AmqpError: A pattern is not KIND:PATTERN with a known kind.
        """
        create = _creator(patterns)
        if create is None:
            return None

        def create_without_handler(address: str) -> Declaration | None:
            # Messages of protocols without links reach the broker first, and would wait in a queue unread.
            return None if self._handler_at(address) is not None else create(address)

        return create_without_handler

    def _check_route(self, route: Route) -> None:
        """Refuse the handler of *route* if it would receive the messages sent to a node of the broker.

        Raises:
            AddressError: The handler is refused; the text names the node.
        """
        for space in self.host.spaces:
            for name, node in space.nodes.items():
                if (
                    route.pattern.match(name) is not None
                    and not reserved(name)
                    and not space.is_dynamic(name)
                ):
                    raise AddressError(
                        f"{route.name}: the handler at {route.address!r} would receive the messages of the "
                        f"{node.kind} {name!r}, and the node none: give one of them another address"
                    )

    async def declare_from(self, file: str | Path) -> None:
        """Create the nodes declared in a TOML or YAML file; see :doc:`/guides/declaring`.

        Raises:
            AmqpError: The file has a mistake, and no node was created; or as for :meth:`declare`.
        """
        for virtual_host, declared in declarations_in(file).items():
            await self.declare(*declared, virtual_host=virtual_host)

    async def delete(self, name: str, *, virtual_host: str = "") -> int:
        """Delete a node with its messages and detach its links; return the number of messages.

        Raises:
            AmqpError: There is no such node.
        """
        gone = self.host.space(virtual_host).delete(name)
        await trio.lowlevel.checkpoint()
        await self.host.wait_kept()
        return gone

    # --- operators -----------------------------------------------------------------------

    def nodes(self, *, virtual_host: str = "") -> list[Declaration]:
        """Return the declarations of all nodes, dynamic ones included, in the order of creation."""
        return self.host.space(virtual_host).declarations()

    @property
    def memory_held(self) -> int:
        """Bytes of the messages that are in memory."""
        return self.host.memory.held

    def virtual_hosts(self) -> list[str]:
        """Return the names of the virtual hosts; "" is the default one."""
        return self.host.virtual_hosts()

    def has(self, name: str, *, virtual_host: str = "") -> bool:
        """Return whether there is a node *name*."""
        return self.host.space(virtual_host).has(name)

    def declaration(self, name: str, *, virtual_host: str = "") -> Declaration:
        """Return the declaration of a node.

        Raises:
            AmqpError: There is no such node.
        """
        return self.host.space(virtual_host).get(name).declared

    def stats(self, name: str, *, virtual_host: str = "") -> NodeStats:
        """Return the statistics of a node.

        Raises:
            AmqpError: There is no such node.
        """
        return self.host.space(virtual_host).get(name).stats()

    def publish(self, address: str, payload: bytes, *, virtual_host: str = "") -> None:
        """Put an encoded message into a node.

        Raises:
            AmqpError: There is no such node, it has no room, or the message is malformed.
        """
        self.host.space(virtual_host).publish(address, payload)

    async def peek(self, name: str, count: int = 1, *, virtual_host: str = "") -> list[bytes]:
        """Return the first *count* messages of a queue, encoded as they would be sent now.

        These are the messages that are available or paused after a failure. Messages that are in
        the store only are read, and stay there. Of a message in pieces the body is left out.

        Raises:
            AmqpError: There is no such queue, or the store cannot be read.
        """
        return await self.host.space(virtual_host).find_kind(name, QueueNode).peek(count)

    async def purge(self, name: str, *, virtual_host: str = "") -> int:
        """Drop the messages of a queue that are available or paused, or the records of a log without a
        hold, in whole chunks; return how many there were.

        Messages that are in the store only are dropped at once, unless each has to be recorded in
        ``$journal``: then they are read first. Cancellation may leave some of them.

        Raises:
            AmqpError: There is no such queue or log, or the store refuses the change.
        """
        return await self.host.space(virtual_host).find(name).purge()

    async def move(self, name: str, to: str, count: int, *, virtual_host: str = "") -> int:
        """Move the first *count* messages of a queue to another node, in order; return their number.

        These are the messages that are available or paused after a failure. Each is in one of the
        two nodes whenever the broker stops. Messages that are in the store only are read a chunk at
        a time; after cancellation or an error, some may have been moved.

        Raises:
            AmqpError: There is no such queue, or no such node to move to; a message is too large for
                that node; or the store cannot be read.
        """
        space = self.host.space(virtual_host)
        return await space.find_kind(name, QueueNode).move(space.find(to), count)

    def subscriptions(self, topic: str, *, virtual_host: str = "") -> list[SubscriptionStats]:
        """Return the statistics of a topic's subscriptions, in the order of their creation.

        Raises:
            AmqpError: There is no such topic.
        """
        return self.host.space(virtual_host).find_kind(topic, TopicNode).subscriptions()

    def subscription(
        self, topic: str, name: str, *, container: str | None = None, virtual_host: str = ""
    ) -> SubscriptionStats:
        """Return the statistics of a topic's subscription *name*, of *container* if that is given.

        Raises:
            AmqpError: There is no such topic or subscription, or there are several.
        """
        node = self.host.space(virtual_host).find_kind(topic, TopicNode)
        return node.subscription(name, container)

    async def peek_subscription(
        self,
        topic: str,
        name: str,
        count: int = 1,
        *,
        container: str | None = None,
        virtual_host: str = "",
    ) -> list[bytes]:
        """Return the first *count* available messages of a topic's subscription.

        They are encoded as they would be sent now.

        Raises:
            AmqpError: There is no such topic or subscription, or there are several.
        """
        node = self.host.space(virtual_host).find_kind(topic, TopicNode)
        return await node.peek_subscription(name, count, container)

    def log_stats(self, name: str, *, virtual_host: str = "") -> LogStats:
        """Return the statistics of a log.

        Raises:
            AmqpError: There is no such log.
        """
        return self.host.space(virtual_host).find_kind(name, LogNode).log_stats()

    def schedule_stats(self, name: str, *, virtual_host: str = "") -> ScheduleStats:
        """Return the statistics of a schedule: when its next message is due, and how many were sent.

        Raises:
            AmqpError: There is no such schedule.
        """
        return self.host.space(virtual_host).find_kind(name, ScheduleNode).kind_stats()

    def cursor(self, name: str, group: str, *, virtual_host: str = "") -> dict[int, int]:
        """Return the cursor of *group* in a log: an offset for each partition that it has set.

        Raises:
            AmqpError: There is no such log.
        """
        return self.host.space(virtual_host).find_kind(name, LogNode).cursor(group)

    async def set_cursor(
        self,
        name: str,
        group: str,
        offsets: Mapping[int, int],
        *,
        incarnation: str | None = None,
        virtual_host: str = "",
    ) -> None:
        """Set the cursor of *group* in the partitions of *offsets*; without any, delete it.

        With a store, the cursor is stored when this returns.

        Args:
            name: The log.
            group: Name of the group.
            offsets: Partition → offset of the next record to read.
            incarnation: Expected incarnation of the log; None for any.
            virtual_host: Virtual host of the log.

        Raises:
            AmqpError: There is no such log or partition, the log has another incarnation or was
                deleted in the meantime, it has too many groups, or the store refuses the change.
        """
        log = self.host.space(virtual_host).find_kind(name, LogNode)
        await log.set_cursor(group, offsets, incarnation=incarnation)

    async def hold(
        self,
        name: str,
        holder: str,
        offsets: Mapping[int, int],
        for_s: float,
        *,
        incarnation: str | None = None,
        virtual_host: str = "",
    ) -> None:
        """Exempt the records of a log from *offsets* on from retention for *for_s* seconds.

        The hold replaces an earlier one of *holder*; without offsets it is removed.

        Args:
            name: The log.
            holder: Name of the holder.
            offsets: Partition → offset of the first record to hold.
            for_s: Duration in seconds.
            incarnation: Expected incarnation of the log; None for any.
            virtual_host: Virtual host of the log.

        Raises:
            AmqpError: As for :meth:`set_cursor`, or the duration is too long, or there are too many
                holders.
        """
        log = self.host.space(virtual_host).find_kind(name, LogNode)
        await log.hold(holder, offsets, for_s, incarnation=incarnation)

    # --- lifetime ------------------------------------------------------------------------

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Self]:
        if self.host.journal is not None:
            self.host.journal.on_lost = self._stop_serving
        try:
            await self.host.restore()
            self.host.declare_journals()
            for kept in self.nodes():
                if (route := self._handler_at(kept.name)) is not None:
                    _log.warning(
                        "node shadowed: %s %r of the store: the handler %s at %r receives the messages "
                        "there",
                        kept.kind,
                        kept.name,
                        route.name,
                        route.address,
                    )
            async with self.container:
                self.container.start_handler(self.host.run)
                self.container.start_handler(StuckWatch(self.container).run)
                yield self
        finally:
            with trio.CancelScope(shield=True):
                await self.host.close()

    @property
    def standby(self) -> str:
        """Why the broker waits for its store while it starts: another broker uses it. Empty otherwise."""
        return "" if self.host.journal is None else self.host.journal.standby

    def _stop_serving(self, error: AmqpError) -> None:
        """Close listeners and connections, since another broker may use the store: clients turn to that one."""
        container = self.container
        container.fail(error)
        container.listener_nursery.cancel_scope.cancel()
        container.entry.close_all(
            Error("amqp:connection:forced", f"{container.name!r} has lost its store")
        )

    async def listen(
        self,
        *urls: str,
        profile: Profile | None = None,
        proxy_protocol: ProxyProtocol | None = None,
    ) -> list[str]:
        """Accept connections at each of *urls*; see :meth:`Container.listen`.

        ``?profile=NAME`` after a URL gives its connections a profile of a plug-in.
        """
        bound: list[str] = []
        for url in urls:
            named = parse_url(url, listening=True).profile
            bound += await self.container.listen(
                url,
                profile=profile if named is None else self.profile_named(named),
                proxy_protocol=proxy_protocol,
            )
        self._guard()
        return bound

    def profile_named(self, name: str) -> Profile:
        """Return the profile that a plug-in provides for listeners of this broker under *name*.

        Raises:
            AmqpError: There is none.
        """
        if name not in self._profiles:
            self._profiles[name] = _plugin(_PROFILES, name, "profile")(self)
        return self._profiles[name]

    async def serve(self) -> None:
        """Wait until :meth:`stop` is called."""
        await self.container.serve()

    def stop(self) -> None:
        """Make :meth:`serve` return."""
        self.container.stop()

    @property
    def timed(self) -> list[TimedFunction]:
        """Functions of the application that run at certain times."""
        return self.container.timed

    async def drain(self) -> None:
        """Stop taking messages, and let running handlers finish; see :meth:`Container.drain`."""
        await self.container.drain()

    def run(
        self,
        url: str | Sequence[str] | None = None,
        *,
        listen: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Run the broker as the whole program, until SIGINT or SIGTERM; see :meth:`Container.run`."""
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
        """Run the broker within a program that runs trio; see :meth:`Container.run_async`."""
        await run_application(
            self, url, listen, signals=signals, task_status=task_status, **options
        )

    def local(
        self, virtual_host: str = "", *, visitor: Visitor | None = None
    ) -> AbstractAsyncContextManager[Connection]:
        """Open a connection to this broker without a socket; see :meth:`Container.local`."""
        return self.container.local(virtual_host, visitor=visitor)

    def connect(
        self, urls: str | Sequence[str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Connection]:
        """Open a connection to another container; see :meth:`Container.connect`."""
        return self.container.connect(urls, **options)

    def __repr__(self) -> str:
        return f"<Broker {self.container.name!r}: {len(self.nodes())} nodes>"


def store_of(text: str) -> Store | None:
    """Return the store for ``sqlite:PATH`` or the URL of a plug-in's store, or None for ``memory:``.

    Raises:
        AmqpError: *text* is neither, or the plug-in is not installed. The text has no password.
    """
    kind, colon, path = text.partition(":")
    if kind == "memory" and colon and not path:
        return None
    if kind == "sqlite" and path:
        from ..stores.sqlite import SQLiteStore  # imported here because it loads SQLite

        return SQLiteStore(path)
    for found in entry_points(group=_STORES, name=kind) if colon else ():
        make: Callable[[str], Store] = found.load()
        return make(text)
    if kind in _STORES_OF_PLUGINS:
        package = _STORES_OF_PLUGINS[kind]
        raise AmqpError(
            f"a store at {kind}: needs the plug-in {package}: pip install {package}",
            condition="amqp:not-found",
        )
    # The rest of a URL may hold a password.
    shown = f"{kind}:…" if "@" in path else text
    raise AmqpError(
        f"{shown!r:.200} is no store: it is memory:, sqlite:PATH, such as sqlite:broker.db, or "
        "postgresql://USER@HOST/DATABASE",
        condition="amqp:invalid-field",
    )


_log = logging.getLogger("amqp_rt.broker")

#: Entry point groups in which plug-ins register their fronts and add-ons by name, and the plug-ins of this project
#: that provide fronts.
_FRONTS: Final = "amqp_rt.fronts"
_FRONTS_OF_PLUGINS: Final = {"amqp091": "amqp-rt-amqp091", "amqp010": "amqp-rt-amqp010"}
_ADDONS: Final = "amqp_rt.addons"
#: Entry point group of profiles: functions from a broker to a :class:`~amqp_rt.container.profiles.Profile`.
_PROFILES: Final = "amqp_rt.profiles"
#: Entry point group of stores: functions from a URL, by its scheme, to a :class:`~amqp_rt.stores.base.Store`;
#: and the plug-ins of this project that provide some.
_STORES: Final = "amqp_rt.stores"
_STORES_OF_PLUGINS: Final = dict.fromkeys(("postgres", "postgresql"), "amqp-rt-postgres")


def front_of(name: str) -> Front:
    """Return the front that an installed plug-in provides under *name*.

    Raises:
        AmqpError: There is none.
    """
    front: Front = _plugin(_FRONTS, name, "protocol", _FRONTS_OF_PLUGINS)()
    return front


def addon_of(name: str) -> AddOn:
    """Return the add-on that an installed plug-in provides under *name*, with its default options.

    Raises:
        AmqpError: There is none.
    """
    addon: AddOn = _plugin(_ADDONS, name, "add-on")()
    return addon


def _plugin(group: str, name: str, what: str, packages: Mapping[str, str] | None = None) -> Any:
    """Return the object that an installed plug-in registers as *name* in *group*; *packages* are those to install for names.

    Raises:
        AmqpError: There is none.
    """
    for found in entry_points(group=group, name=name):
        return found.load()
    package = None if packages is None else packages.get(name)
    if package is not None:
        raise AmqpError(
            f"the {what} {name} needs the plug-in {package}: pip install {package}",
            condition="amqp:not-found",
        )
    names = ", ".join(sorted(each.name for each in entry_points(group=group))) or "none"
    raise AmqpError(
        f"no plug-in has a{'n' if what[0] in 'aeiou' else ''} {what} {name!r:.50}; installed are: {names}",
        condition="amqp:not-found",
    )


def installed_fronts() -> list[Front]:
    """Return the fronts of all installed plug-ins."""
    return [each.load()() for each in entry_points(group=_FRONTS)]


def _creator(patterns: Collection[str]) -> Callable[[str], Declaration | None] | None:
    """Return the function that declares nodes on first use, None without patterns.

    Raises:
        AmqpError: A pattern is not KIND:PATTERN with a known kind.
    """
    if not patterns:
        return None
    table: Wildcards[Declaration] = Wildcards()
    for text in patterns:
        declared = declared_by(text)
        table.add(declared.name, declared)

    def create(address: str) -> Declaration | None:
        declared = table.find(address)
        if declared is None:
            return None
        if declared.dead_letter == address:
            # The pattern matches its own dead-letter address, whose queue must not refer to itself.
            return msgspec.structs.replace(declared, name=address, dead_letter=None)
        return msgspec.structs.replace(declared, name=address)

    return create
