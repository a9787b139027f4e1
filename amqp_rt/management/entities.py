"""Management entities of a running broker besides its nodes: connections, sessions, links, users.

Each type of entity is a Struct, whose fields are the attributes, and a collection that computes its
rows from the current state. Nothing is stored for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
import trio
from msgspec import Struct

from ..broker.host import BrokerHost
from ..broker.nodes import TOPIC
from ..container.connections import Connection
from ..container.container import Container
from ..errors import AmqpError
from ..events import Peer
from ..fronts.base import SENDER
from ..outcomes import Error
from ..security.access import reserved
from ..tallies import Tallies
from ..termini import Source, Target
from .answering import Collection, UnchangeableEntities, attributes
from .branches import BranchCollection
from .open_transactions import TransactionCollection
from .termini import TerminusCollection


class ContainerEntity(Struct, frozen=True, kw_only=True):
    """The container itself."""

    name: str
    connections: int
    nodes: int
    bytes: int
    #: Number of deliveries, queues, senders, handlers and others that make no progress.
    stuck: int
    #: Whether it takes work: see :meth:`~amqp_rt.Container.health`.
    ready: bool
    #: Why it is not ready, as sentences.
    reasons: list[str]


class ConnectionEntity(Struct, frozen=True, kw_only=True):
    """A connection opened by a peer."""

    name: str
    container_id: str
    user: str | None
    address: str
    virtual_host: str
    protocol: str
    mechanism: str | None
    state: str
    sessions: int
    #: Tokens that the peer has put on ``$cbs``.
    tokens: int


class SessionEntity(Struct, frozen=True, kw_only=True):
    """A session of a connection."""

    name: str
    connection: str
    channel: int
    links: int
    #: Seconds since when the oldest delivery that the peer has not settled has been that, to within ten seconds;
    #: None if there is none.
    oldest_unsettled_s: float | None


class LinkEntity(Struct, frozen=True, kw_only=True):
    """A link of a session; ``role`` is the peer's role."""

    name: str
    link_name: str
    connection: str
    session: str
    role: str
    address: str | None
    credit: int


class SubscriptionEntity(Struct, frozen=True, kw_only=True):
    """A link on which a peer receives from a topic."""

    name: str
    topic: str
    connection: str
    container_id: str
    link: str


class UserEntity(Struct, frozen=True, kw_only=True):
    """A user who may log in. The password can be set, but not read."""

    name: str
    groups: list[str]
    connections: int


class RouteEntity(Struct, frozen=True, kw_only=True):
    """A handler of the application, with counts of its messages."""

    #: The address; with the kind in front if an earlier handler has it too, in the other direction.
    name: str
    address: str
    #: ``node``, ``rpc``, ``source`` or ``link``.
    kind: str
    handler: str
    slots: int
    prefetch: int
    #: Handlers that run now, and messages that wait or are handled.
    running: int
    load: int
    links: int
    received: int
    sent: int
    accepted: int
    rejected: int
    released: int
    modified: int
    cancelled: int
    failed: int


class RuleEntity(Struct, frozen=True, kw_only=True):
    """A rule of access. Rules are read from a file, and cannot be changed here."""

    #: Its number, from 1.
    name: str
    #: Address with wildcards; empty for a rule of a realm.
    address: str
    realm: str | None
    #: ``send``, ``listen``, both, or ``manage``.
    rights: str
    users: list[str]
    groups: list[str]
    #: Whether it also applies to peers without a user name.
    anonymous: bool
    #: Virtual host in which it applies; None for all.
    virtual_host: str | None


_BY_OPERATOR = Error("amqp:connection:forced", "closed by an operator")
_DELETED = Error("amqp:unauthorized-access", "the user has been deleted")
#: A client that knows the new password may connect again.
_NEW_PASSWORD = Error("amqp:connection:forced", "the user has another password now")


class _Entities:
    """Look-up of the entities reached through the connections of a container."""

    def __init__(self, container: Container, host: BrokerHost) -> None:
        self.container = container
        self.host = host
        self._names: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()
        self._named: WeakValueDictionary[str, Connection] = WeakValueDictionary()
        self._numbers = count(1)

    def connections(self, virtual_host: str) -> Iterator[tuple[str, Connection]]:
        """Yield the connections to *virtual_host*, each after its name, which never changes."""
        for each in self.container.connections:
            if each.peer.virtual_host == virtual_host:
                yield self._name_of(each), each

    def _name_of(self, connection: Connection) -> str:
        name = self._names.get(connection)
        if name is None:
            name = self._names[connection] = f"{next(self._numbers)}"
            self._named[name] = connection
        return name

    def connection(self, name: str, virtual_host: str) -> Connection | None:
        """Return the connection *name*, or None if it is closed or of another virtual host."""
        found = self._named.get(name)
        if found is None or found.peer.virtual_host != virtual_host:
            return None
        return found if found in self.container.connections else None

    def sessions(self, virtual_host: str) -> Iterator[tuple[str, str, Any]]:
        """Yield the sessions, each after its name and that of its connection."""
        for connection, each in self.connections(virtual_host):
            for session in list(each.engine.sessions.values()):
                yield f"{connection}/{session.channel}", connection, session

    def session(self, name: str, virtual_host: str) -> tuple[str, Any] | None:
        """Return the session *name* after the name of its connection, or None."""
        connection_name, _, channel = name.rpartition("/")
        connection = self.connection(connection_name, virtual_host)
        if connection is None:
            return None
        for session in list(connection.engine.sessions.values()):
            if f"{session.channel}" == channel:
                return connection_name, session
        return None

    def links(self, virtual_host: str) -> Iterator[tuple[LinkEntity, Any]]:
        """Yield the attached links after their entities."""
        for session_name, connection, session in self.sessions(virtual_host):
            for handle, link in list(session.links.items()):
                if link.attached:
                    yield _link_entity(session_name, connection, handle, link), link

    def link(self, name: str, virtual_host: str) -> tuple[LinkEntity, Any] | None:
        """Return the attached link *name* and its entity, or None."""
        session_name, _, wanted = name.rpartition("/")
        found = self.session(session_name, virtual_host)
        if found is None:
            return None
        connection, session = found
        for handle, link in list(session.links.items()):
            if f"{handle}" == wanted and link.attached:
                return _link_entity(session_name, connection, handle, link), link
        return None


def _link_entity(session: str, connection: str, handle: int, link: Any) -> LinkEntity:
    sends = link.role == SENDER
    terminus = link.source if sends else link.target
    address = terminus.address if isinstance(terminus, Source | Target) else None
    return LinkEntity(
        name=f"{session}/{handle}",
        link_name=link.name,
        connection=connection,
        session=session,
        role="receiver" if sends else "sender",
        address=address if isinstance(address, str) else None,
        credit=link.credit,
    )


class _Collection(UnchangeableEntities):
    """Collection of what a broker's container has."""

    def __init__(self, entities: _Entities) -> None:
        self._in = entities

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        for each in self._each(virtual_host):
            yield None if each is None else attributes(each)

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        found = self._find(name, virtual_host)
        return None if found is None else attributes(found)

    def _each(self, virtual_host: str) -> Iterator[Struct | None]:
        raise NotImplementedError

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        raise NotImplementedError


class _Containers(_Collection):
    type_name = "amqp_rt.container"
    attributes = ContainerEntity

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        container, host = self._in.container, self._in.host
        health = container.health()
        yield ContainerEntity(
            name=container.name,
            connections=len(container.connections),
            nodes=len(host.space(virtual_host).nodes),
            ready=health.ready,
            reasons=list(health.reasons),
            bytes=host.memory.held,
            stuck=sum(container.tallies.stuck.values()),
        )

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        return next(self._each(virtual_host)) if name == self._in.container.name else None


class _Connections(_Collection):
    type_name = "amqp_rt.connection"
    attributes = ConnectionEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        for name, each in self._in.connections(virtual_host):
            yield _connection_entity(name, each)

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        found = self._in.connection(name, virtual_host)
        return None if found is None else _connection_entity(name, found)

    async def delete(self, name: str, virtual_host: str) -> None:
        found = self._in.connection(name, virtual_host)
        if found is not None:
            found.close(_BY_OPERATOR)


def _connection_entity(name: str, connection: Connection) -> ConnectionEntity:
    peer = connection.peer
    return ConnectionEntity(
        name=name,
        container_id=peer.container_id,
        user=peer.user,
        address=peer.address,
        virtual_host=peer.virtual_host,
        protocol=peer.protocol,
        mechanism=peer.mechanism,
        state=connection.state,
        sessions=len(connection.engine.sessions),
        tokens=0 if peer.tokens is None else len(peer.tokens),
    )


class _Sessions(_Collection):
    type_name = "amqp_rt.session"
    attributes = SessionEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        for name, connection, session in self._in.sessions(virtual_host):
            yield _session_entity(name, connection, session, self._in.container.tallies)

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        found = self._in.session(name, virtual_host)
        return None if found is None else _session_entity(name, *found, self._in.container.tallies)

    async def delete(self, name: str, virtual_host: str) -> None:
        found = self._in.session(name, virtual_host)
        if found is not None:
            found[1].end(_BY_OPERATOR)


def _session_entity(name: str, connection: str, session: Any, tallies: Tallies) -> SessionEntity:
    since = tallies.unsettled_since.get(session)
    return SessionEntity(
        name=name,
        connection=connection,
        channel=session.channel,
        links=len(session.links),
        oldest_unsettled_s=None if since is None else round(trio.current_time() - since, 3),
    )


class _Links(_Collection):
    type_name = "amqp_rt.link"
    attributes = LinkEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        for entity, _ in self._in.links(virtual_host):
            yield entity

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        found = self._in.link(name, virtual_host)
        return None if found is None else found[0]

    async def delete(self, name: str, virtual_host: str) -> None:
        found = self._in.link(name, virtual_host)
        if found is not None:
            found[1].detach(Error("amqp:link:detach-forced", "detached by an operator"))


class _Subscriptions(_Collection):
    type_name = "amqp_rt.subscription"
    attributes = SubscriptionEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def _entity(self, entity: LinkEntity, link: Any, virtual_host: str) -> Struct | None:
        """Return the subscription entity of *link*, or None if it does not receive from a topic."""
        topic = entity.address
        if (
            topic is None
            or entity.role != "receiver"
            or self._in.host.space(virtual_host).kind(topic) != TOPIC
        ):
            return None
        return SubscriptionEntity(
            name=entity.name,
            topic=topic,
            connection=entity.connection,
            container_id=link.peer.container_id,
            link=entity.link_name,
        )

    def _each(self, virtual_host: str) -> Iterator[Struct | None]:
        for entity, link in self._in.links(virtual_host):
            yield self._entity(entity, link, virtual_host)

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        found = self._in.link(name, virtual_host)
        return None if found is None else self._entity(*found, virtual_host)

    async def delete(self, name: str, virtual_host: str) -> None:
        found = self._in.link(name, virtual_host)
        if found is not None and self._entity(*found, virtual_host) is not None:
            found[1].detach(Error("amqp:link:detach-forced", "unsubscribed by an operator"))


class _Routes(_Collection):
    type_name = "amqp_rt.route"
    attributes = RouteEntity

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        if virtual_host:
            return  # Handlers serve all virtual hosts: their counts tell of messages of others.
        seen: set[str] = set()
        for workers in self._in.container.nodes.workers:
            route = workers.route
            if reserved(route.address):
                continue
            name = f"{route.kind} {route.address}" if route.address in seen else route.address
            seen.add(route.address)
            yield RouteEntity(
                name=name,
                address=route.address,
                kind=route.kind,
                handler=route.name,
                slots=route.slots,
                prefetch=route.prefetch,
                running=workers.running,
                load=workers.load,
                **msgspec.structs.asdict(route.stats),
            )

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        for each in self._each(virtual_host):
            if isinstance(each, RouteEntity) and each.name == name:
                return each
        return None


class _Rules(_Collection):
    type_name = "amqp_rt.rule"
    attributes = RuleEntity

    def _each(self, virtual_host: str) -> Iterator[Struct | None]:
        access = self._in.container.permissions.access
        for number, rule in enumerate(() if access is None else access.rules, 1):
            # Those of other virtual hosts are no business of this one, unless it is the default one.
            if virtual_host and rule.virtual_host not in (None, virtual_host):
                yield None
                continue
            yield RuleEntity(
                name=f"{number}",
                address=rule.address,
                realm=rule.realm,
                rights=str(rule.rights),
                users=[*rule.users],
                groups=[*rule.groups],
                anonymous=rule.anonymous,
                virtual_host=rule.virtual_host,
            )

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        for each in self._each(virtual_host):
            if isinstance(each, RuleEntity) and each.name == name:
                return each
        return None


class _Password(Struct, forbid_unknown_fields=True):
    password: str


class _Users(_Collection):
    type_name = "amqp_rt.user"
    attributes = UserEntity
    operations: Mapping[str, list[str]] = {"CREATE": [], "READ": [], "UPDATE": [], "DELETE": []}

    def __init__(self, entities: _Entities) -> None:
        super().__init__(entities)
        #: Serializes changes, since hashing and writing the file happen in a thread.
        self._changing = trio.Lock()

    def _each(self, virtual_host: str) -> Iterator[Struct]:
        if virtual_host:
            return  # Users belong to the whole container, so other virtual hosts cannot manage them.
        # Counted once: a count for each user would take users times connections steps.
        counts = Counter(each.peer.user for each in self._in.container.connections)
        for name in list(self._in.container.users or ()):
            yield self._entity(name, counts)

    def _find(self, name: str, virtual_host: str) -> Struct | None:
        users = self._in.container.users
        if virtual_host or users is None or name not in users:
            return None
        return self._entity(
            name, Counter(each.peer.user for each in self._in.container.connections)
        )

    def _entity(self, name: str, counts: Mapping[str | None, int]) -> UserEntity:
        access = self._in.container.permissions.access
        groups = {} if access is None else access.groups
        return UserEntity(
            name=name,
            groups=sorted(group for group, users in groups.items() if name in users),
            connections=counts.get(name, 0),
        )

    async def create(self, name: str, attributes: Mapping[str, Any], virtual_host: str) -> None:
        await self._store(name, attributes, virtual_host, new=True)

    async def _store(
        self, name: str, attributes: Mapping[str, Any], virtual_host: str, *, new: bool
    ) -> None:
        if virtual_host:
            raise AmqpError(
                "users are managed from the default virtual host",
                condition="amqp:unauthorized-access",
            )
        users = self._in.container.users
        if users is None:
            raise AmqpError("users are not kept here", condition="amqp:not-implemented")
        try:
            given = msgspec.convert(attributes, _Password)
        except msgspec.ValidationError:
            raise AmqpError(
                "a user has one attribute to give: password, a text", condition="amqp:invalid-field"
            ) from None
        async with self._changing:
            # Another change may have come first: a deleted user must not reappear.
            if new and name in users:
                raise AmqpError(
                    f"there is a user {name!r:.100} already", condition="amqp:precondition-failed"
                )
            if not new:
                self._check_there(name)
            await trio.to_thread.run_sync(users.store, name, given.password)

    def _check_there(self, name: str) -> None:
        """Check that the user *name* has not been deleted meanwhile.

        Raises:
            AmqpError: There is no such user.
        """
        if name not in (self._in.container.users or ()):
            raise AmqpError(f"there is no user {name!r:.100}", condition="amqp:not-found")

    async def update(self, name: str, attributes: Mapping[str, Any], peer: Peer) -> None:
        await self._store(name, attributes, peer.virtual_host, new=False)
        # Who knows the old password only cannot stay. The one who has given the new one gets the reply.
        self._close_connections(name, _NEW_PASSWORD, but=peer)

    async def delete(self, name: str, virtual_host: str) -> None:
        container = self._in.container
        assert container.users is not None
        async with self._changing:
            self._check_there(name)
            await trio.to_thread.run_sync(container.users.forget, name)
        self._close_connections(name, _DELETED)

    def _close_connections(self, user: str, error: Error, but: Peer | None = None) -> None:
        """Close the connections of *user* with *error*, without waiting, *but* that of this peer."""
        for each in self._in.container.connections:
            if each.peer.user == user and each.peer is not but:
                each.close(error)


def collections_of(container: Container, host: BrokerHost) -> list[Collection]:
    """Return the entities of a broker that are not nodes."""
    entities = _Entities(container, host)
    return [
        _Containers(entities),
        _Connections(entities),
        _Sessions(entities),
        _Links(entities),
        _Subscriptions(entities),
        _Routes(entities),
        _Users(entities),
        _Rules(entities),
        BranchCollection(host.services.branches),
        TransactionCollection(host.services.transactions, entities.connections),
        TerminusCollection(host.services.termini),
    ]
