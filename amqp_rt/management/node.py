"""The management node of a broker, ``$management``: operations on nodes, beside those on other entities."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from ..broker.kinds.base import Node
from ..broker.kinds.logs import LogNode
from ..broker.kinds.queues import QueueNode
from ..broker.nodes import (
    KINDS,
    LOG,
    SCHEDULE,
    Declaration,
    declaration_of,
    passages_of,
    split_partition,
)
from ..broker.spaces import VirtualHost
from ..broker.statistics import LogStats, NodeStats, ScheduleStats
from ..errors import AmqpError
from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..outcomes import Error
from ..security.access import EVERYWHERE, Decide, Passage, Rights, decide_passages
from .answering import (
    Asked,
    Collection,
    EntityHook,
    EntityManagement,
    Failed,
    Rows,
    attributes,
    attributes_of,
    described,
    property_of,
    reply_of,
    text_of,
    text_or,
    whole_of,
)
from .ordering import Listed

#: Type of the entities that hold messages.
NODE_TYPE: Final = "amqp_rt.node"
#: Type of virtual hosts, as the ``entityType`` of a QUERY.
VIRTUAL_HOST_TYPE: Final = "amqp_rt.virtual-host"

#: Maximum number of messages that one PEEK returns, and of the bytes of their bodies together.
PEEK_MAX: Final = 100
PEEK_BYTES_MAX: Final = 4 * 1024 * 1024


#: Nodes of a query for which the right to manage all addresses is decided once.
_DECISIONS: Final = 100


class Plan(msgspec.Struct, frozen=True):
    """Declaration of a node, and the paths of messages that result from it."""

    declared: Declaration
    passages: Sequence[Passage]


#: Returns the error if a peer may not declare nodes with these passages, None if it may.
MayDeclare: TypeAlias = Callable[[Peer, Sequence[Passage]], Awaitable[Error | None]]

#: Types of nodes, each of which extends :data:`NODE_TYPE`.
NODE_TYPES: Final = {f"amqp_rt.{kind}": kind for kind in KINDS}
#: Statistics that nodes of one kind have beside :class:`~amqp_rt.broker.statistics.NodeStats`, in lists and alone.
_KIND_STATS: Final = {f"amqp_rt.{SCHEDULE}": ScheduleStats}
#: What READ adds to the attributes that lists have.
_DETAILS: Final = {f"amqp_rt.{LOG}": LogStats}


class VirtualHostEntity(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual host."""

    name: str
    nodes: int


_NODE_OPERATIONS: Final[Mapping[str, list[str]]] = {
    "CREATE": [],
    "READ": [],
    "UPDATE": [],
    "DELETE": [],
    "PEEK": ["count"],
    "PURGE": [],
    "MOVE": ["to", "count"],
    "CURSOR": ["group"],
    "SET-CURSOR": ["group", "incarnation"],
    "HOLD": ["holder", "seconds", "incarnation"],
}


class Management(EntityManagement):
    """Handler of management requests.

    An operation on a node needs the right to manage that node, an operation on anything else the right
    to manage ``$management``. A query for nodes returns those that the peer may manage.

    Args:
        space: Returns a virtual host.
        virtual_hosts: Returns the names of all virtual hosts.
        decide: Decides the rights of peers; by default every peer may do everything.
        may_declare: Decides on passages of declarations; by default by *decide*.
        collections: Entities of further types.
        limits: Maximum numbers of rows in one reply and of registered nodes.
        open_to_all: Called when peers with any right have to be able to attach to ``$management``.
    """

    def __init__(
        self,
        space: Callable[[str], VirtualHost],
        virtual_hosts: Callable[[], Iterable[str]] = tuple,
        *,
        decide: Decide = lambda peer, wanted, address: None,
        may_declare: MayDeclare | None = None,
        collections: Iterable[Collection] = (),
        limits: Limits = DEFAULT_LIMITS,
        open_to_all: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            decide=decide, collections=collections, limits=limits, open_to_all=open_to_all
        )
        self._space = space
        self._virtual_hosts = virtual_hosts
        self._may_declare = may_declare
        self._hooks: dict[str, tuple[Rights, EntityHook]] = {}
        self._operations |= {"READ": self._read, "DELETE": self._delete, "CURSOR": self._cursor}
        self._lasting |= {
            "CREATE": self._create,
            "UPDATE": self._update,
            "PEEK": self._peek,
            "MOVE": self._move,
            "PURGE": self._purge,
            "SET-CURSOR": self._set_cursor,
            "HOLD": self._hold,
        }

    def add_hook(self, operation: str, hook: EntityHook, *, rights: Rights = Rights.MANAGE) -> None:
        """Answer *operation* at ``<entity>/$management``, for peers with *rights* at the entity.

        Raises:
            ValueError: There is such an operation already.
        """
        if operation in self._hooks or operation in self._operations or operation in self._lasting:
            raise ValueError(f"there is an operation {operation!r} already")
        self._hooks[operation] = rights, hook

    def add_node_hook(
        self, operation: str, answer: Callable[[Node, Message], Awaitable[Any]], rights: Rights
    ) -> None:
        """Answer *operation* at ``<node>/$management`` with the body that *answer* returns."""

        async def hook(entity: str, message: Message, peer: Peer) -> Message:
            node = self._space(peer.virtual_host).find(entity)
            return reply_of(200, await answer(node, message))

        self.add_hook(operation, hook, rights=rights)

    async def _reply(self, operation: str, asked: Asked) -> Message:
        if asked.entity and operation in self._hooks:
            rights, hook = self._hooks[operation]
            self._check(asked.peer, rights, asked.entity)
            return await hook(asked.entity, asked.message, asked.peer)
        return await super()._reply(operation, asked)

    async def _perform(self, operation: str, asked: Asked) -> tuple[int, Any]:
        if operation in _NODE_OPERATIONS and self._collection_of(operation, asked) is None:
            self._check_type(asked)
            self._check(asked.peer, Rights.MANAGE, asked.name)
        return await super()._perform(operation, asked)

    def _space_of(self, asked: Asked) -> VirtualHost:
        return self._space(asked.peer.virtual_host)

    def _check_type(self, asked: Asked) -> None:
        """Check that the type in the request, if any, is a type of nodes."""
        given = text_or(asked.message, "type")
        if given and given != NODE_TYPE and given not in NODE_TYPES:
            raise Failed(400, f"there is no type {given!r:.50}")

    # --- nodes ---------------------------------------------------------------------------------

    async def _create(self, asked: Asked) -> tuple[int, Any]:
        given = attributes_of(asked)
        kind = NODE_TYPES.get(text_or(asked.message, "type"))
        if kind is not None:
            given.setdefault("kind", kind)
        declared = await self._planned(asked, given, new=True)
        self._space_of(asked).declare(declared)
        return 201, _node_row(self._space_of(asked).get(declared.name))

    async def _update(self, asked: Asked) -> tuple[int, Any]:
        given = attributes_of(asked)
        declared = await self._planned(asked, given, new=False)
        self._space_of(asked).update(declared)
        return 200, _node_row(self._space_of(asked).get(declared.name))

    async def _planned(self, asked: Asked, given: Mapping[str, Any], *, new: bool) -> Declaration:
        """Return the requested declaration, after checking the peer's rights to its passages."""
        plan = _plan(self._space_of(asked), asked.name, given, new=new)
        if plan.passages and self._may_declare is not None:
            refused = await self._may_declare(asked.peer, plan.passages)
            # A token may have expired while waiting.
            self._check(asked.peer, Rights.MANAGE, asked.name)
            if refused is None and _plan(self._space_of(asked), asked.name, given, new=new) != plan:
                raise Failed(
                    409, f"{asked.name!r:.50} or a node that it names has changed: ask again"
                )
        else:
            refused = decide_passages(self._decide, asked.peer, plan.passages)
        if refused is not None:
            raise refused.raised_as(AmqpError)
        return plan.declared

    def _read(self, asked: Asked) -> tuple[int, Any]:
        row = _details(self._space_of(asked), asked.name)
        kind = NODE_TYPES.get(text_or(asked.message, "type"))
        if kind is not None and row["kind"] != kind:
            raise Failed(404, f"there is no {kind} {asked.name!r:.50}")
        return 200, row

    def _delete(self, asked: Asked) -> tuple[int, Any]:
        self._space_of(asked).delete(asked.name)
        return 204, {}

    async def _peek(self, asked: Asked) -> tuple[int, Any]:
        count = whole_of(asked.message, "count", 1, PEEK_MAX)
        queue = self._space_of(asked).find_kind(asked.name, QueueNode)
        return 200, await queue.peek(count, bytes_max=PEEK_BYTES_MAX)

    async def _purge(self, asked: Asked) -> tuple[int, Any]:
        node = self._space_of(asked).find(asked.name)
        purged = await node.purge()
        if node.services.journal is not None:
            await node.services.journal.wait_kept()
        return 200, {"messages": purged}

    async def _move(self, asked: Asked) -> tuple[int, Any]:
        to = property_of(asked.message, "to")
        if not isinstance(to, str) or not to:
            raise Failed(400, "where to? set the property to")
        passage = Passage(asked.name, to, Rights.MANAGE, Rights.MANAGE)
        refused = decide_passages(self._decide, asked.peer, [passage])
        if refused is not None:
            raise refused.raised_as(AmqpError)
        count = whole_of(asked.message, "count", 0xFFFFFFFF, 0xFFFFFFFF)
        queue = self._space_of(asked).find_kind(asked.name, QueueNode)
        return 200, {"messages": await queue.move(self._space_of(asked).find(to), count)}

    def _cursor(self, asked: Asked) -> tuple[int, Any]:
        log = self._space_of(asked).find_kind(asked.name, LogNode)
        return 200, log.cursor(text_of(asked.message, "group"))

    async def _set_cursor(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        log = self._space_of(asked).find_kind(asked.name, LogNode)
        await log.set_cursor(
            text_of(message, "group"), _offsets(message), incarnation=_incarnation(message)
        )
        return 200, {}

    async def _hold(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        seconds = property_of(message, "seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise Failed(400, "for how long? set the property seconds")
        log = self._space_of(asked).find_kind(asked.name, LogNode)
        await log.hold(
            text_of(message, "holder"),
            _offsets(message),
            float(seconds),
            incarnation=_incarnation(message),
        )
        return 200, {}

    def _node_rows(self, asked: Asked, wanted: str | None) -> Iterator[Listed | None]:
        space = self._space_of(asked)
        everywhere = False
        for number, name in enumerate(space.names):
            if not number % _DECISIONS:
                # Who manages all addresses need not be judged for each of very many, but again and again: rights end.
                everywhere = self._decide(asked.peer, Rights.MANAGE, EVERYWHERE) is None
            counts = (
                (kind := space.kind(name)) is not None
                and wanted in (None, kind)
                and (everywhere or self._decide(asked.peer, Rights.MANAGE, name) is None)
            )
            yield _ListedNode(space, name) if counts else None

    def _virtual_host_rows(self, own: str) -> list[Mapping[str, Any]]:
        """Return the row of the peer's *own* virtual host; those of all for the default one."""
        return [
            attributes(VirtualHostEntity(name=name, nodes=len(self._space(name).nodes)))
            for name in self._virtual_hosts()
            if name == own or not own
        ]

    def _entities(self, asked: Asked, wanted: str) -> Iterator[Listed | None]:
        if wanted == NODE_TYPE or wanted in NODE_TYPES:
            return self._node_rows(asked, NODE_TYPES.get(wanted))
        others = super()._entities(asked, wanted)
        return others if wanted else chain(self._node_rows(asked, None), others)

    def _collections_for(self, asked: Asked) -> dict[str, Rows]:
        hosts: Rows = partial(self._virtual_host_rows, asked.peer.virtual_host)
        return {VIRTUAL_HOST_TYPE: hosts, **super()._collections_for(asked)}

    def _known_types(self) -> dict[str, type[msgspec.Struct] | None]:
        return {
            NODE_TYPE: None,
            VIRTUAL_HOST_TYPE: VirtualHostEntity,
            **{name: KINDS[kind] for name, kind in NODE_TYPES.items()},
            **super()._known_types(),
        }

    def _statistics_of(self, name: str) -> tuple[type[msgspec.Struct], ...]:
        if name == NODE_TYPE or name in NODE_TYPES:
            own = _KIND_STATS.get(name)
            return (NodeStats,) if own is None else (NodeStats, own)
        return super()._statistics_of(name)

    def _details_of(self, name: str) -> type[msgspec.Struct] | None:
        return _DETAILS.get(name)

    def _bases_of(self, name: str) -> list[str]:
        return [NODE_TYPE] if name in NODE_TYPES else []

    def _operations_of(self, name: str) -> dict[str, list[str]]:
        if name == VIRTUAL_HOST_TYPE:
            return {}
        if name == NODE_TYPE or name in NODE_TYPES:
            return {**_NODE_OPERATIONS, **{operation: [] for operation in self._hooks}}
        return super()._operations_of(name)


class _ListedNode:
    """Node of a walk (:class:`~amqp_rt.management.ordering.Listed`)."""

    __slots__ = ("_space", "name")

    def __init__(self, space: VirtualHost, name: str) -> None:
        self.name = name
        self._space = space

    def row(self) -> dict[str, Any] | None:
        node = self._space.nodes.get(self.name)
        return None if node is None else _node_row(node)

    def value(self, attribute: str) -> Any:
        node = self._space.nodes.get(self.name)
        if node is None:
            return None
        if attribute == "type":
            return node.kind
        # Only the struct that has the attribute is made: a walk may visit very many nodes.
        if attribute in NodeStats.__struct_fields__:
            return getattr(node.stats(), attribute)
        own = node.kind_stats()
        if own is not None and attribute in own.__struct_fields__:
            return getattr(own, attribute)
        return getattr(node.declared, attribute, None)


def _node_row(node: Node) -> dict[str, Any]:
    """Return the declaration and the statistics of *node*."""
    row = {**attributes(node.declared), **attributes(node.stats())}
    if (own := node.kind_stats()) is not None:
        row |= attributes(own)
    return described(row, f"amqp_rt.{node.kind}")


def _details(space: VirtualHost, name: str) -> dict[str, Any]:
    """Return the row of a node, with the extent of a log; or the statistics of one partition of a log.

    Raises:
        AmqpError: There is no such node or partition.
    """
    found = split_partition(name)
    if name not in space.nodes and found is not None:
        log = space.find_kind(found[0], LogNode).log_stats()
        if found[1] < len(log.partitions):
            row = {
                "name": name,
                "kind": LOG,
                "incarnation": log.incarnation,
                **attributes(log.partitions[found[1]]),
            }
            return described(row, f"amqp_rt.{LOG}")
    node = space.get(name)
    row = _node_row(node)
    if (own := node.kind_stats(alone=True)) is not None:
        # The partitions of a log have the name of a setting, their number, and win.
        row |= attributes(own)
    return row


def _plan(space: VirtualHost, name: str, given: Mapping[str, Any], *, new: bool) -> Plan:
    """Return the plan for a *new* node, or for an existing one with changed attributes.

    Raises:
        AmqpError: An attribute is invalid, or there is no such node.
    """
    before = None
    fields = {**given, "name": name}
    if new:
        if space.has(name):
            before = space.get(name).declared
    else:
        before = space.get(name).declared
        if fields.get("kind", before.kind) != before.kind:
            raise AmqpError(
                f"{name!r:.50} is a {before.kind}, and the kind of a node cannot be changed: delete it first",
                condition="amqp:not-allowed",
            )
        fields = {**msgspec.structs.asdict(before), **fields, "kind": before.kind}
    try:
        declared = declaration_of(fields, strict=False)
    except ValueError as error:
        raise AmqpError(str(error), condition="amqp:invalid-field") from error
    return Plan(
        declared,
        passages_of(declared, before, lambda address: space.name_of(address) is not None),
    )


def _incarnation(message: Message) -> str | None:
    return None if property_of(message, "incarnation") is None else text_of(message, "incarnation")


def _offsets(message: Message) -> dict[int, int]:
    """Return the body of a request, a map of partitions and offsets."""
    body = message.body
    if not isinstance(body, Mapping) or not all(
        isinstance(number, int) and not isinstance(number, bool)
        for entry in body.items()
        for number in entry
    ):
        raise Failed(400, "the body must be a map of partitions and offsets")
    return {int(partition): int(offset) for partition, offset in body.items()}
