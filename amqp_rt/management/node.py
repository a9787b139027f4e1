"""The management node, ``$management``: requests for operations on entities, and their replies.

The request/response form of the AMQP Management drafts, as deployed brokers use it: requests have the
application-properties ``operation``, ``type`` and ``name``, replies ``statusCode`` and
``statusDescription``, and bodies are maps as amqp-value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import trio

from ..broker.kinds.base import Node
from ..broker.kinds.logs import LogNode
from ..broker.kinds.queues import QueueNode
from ..broker.nodes import KINDS, LOG, Declaration, declaration_of, passages_of, split_partition
from ..broker.spaces import VirtualHost
from ..errors import AmqpError
from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..outcomes import Error
from ..security.access import MANAGEMENT, Decide, Passage, Rights, decide_passages
from ..values import Int, Symbol

ADDRESS: Final = MANAGEMENT

#: Types of the entities that hold messages, and of the management node itself.
NODE_TYPE: Final = "amqp_rt.node"
SELF_TYPE: Final = "org.amqp.management"
#: Type of virtual hosts, as the ``entityType`` of a QUERY.
VIRTUAL_HOST_TYPE: Final = "amqp_rt.virtual-host"

#: Maximum number of messages that one PEEK returns, and of the bytes of their bodies together.
PEEK_MAX: Final = 100
PEEK_BYTES_MAX: Final = 4 * 1024 * 1024

_DESCRIPTION_MAX: Final = 500
#: Largest number in a request.
WHOLE_MAX: Final = 2**63 - 1

_STATUS: Final = {
    "amqp:internal-error": 500,
    "amqp:not-found": 404,
    "amqp:not-allowed": 409,
    "amqp:precondition-failed": 409,
    "amqp:resource-locked": 409,
    "amqp:resource-limit-exceeded": 409,
    "amqp:unauthorized-access": 403,
    "amqp:not-implemented": 501,
}


class Plan(msgspec.Struct, frozen=True):
    """Declaration of a node, and the paths of messages that result from it."""

    declared: Declaration
    passages: Sequence[Passage]


class _Failed(Exception):
    """Failure of an operation with a status code of its own."""

    def __init__(self, status: int, description: str) -> None:
        super().__init__(description)
        self.status = status
        self.description = description


def reply_of(
    status: int, body: Any, description: str = "OK", condition: str | None = None
) -> Message:
    """Return the reply to a request."""
    said: dict[str, Any] = {
        "statusCode": Int(status),
        "statusDescription": description[:_DESCRIPTION_MAX],
    }
    if condition is not None:
        said["errorCondition"] = Symbol(condition)
    return Message(body, application_properties=said)


def _request(message: Message, name: str) -> Any:
    value = message.application_properties.get(name)
    return str(value) if isinstance(value, str) else value


def whole_of(message: Message, name: str, default: int | None = None, most: int = WHOLE_MAX) -> int:
    """Return the property *name* of a request, a whole number, limited to *most*."""
    value = _request(message, name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Failed(400, f"{name} must be a whole number, not {value!r:.50}")
    return min(int(value), most)


class Collection(Protocol):
    """Entities of one type other than nodes."""

    type_name: str
    #: Operation → its arguments.
    operations: Mapping[str, list[str]]

    @property
    def attributes(self) -> type[msgspec.Struct]:
        """Struct whose fields are the attributes."""

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        """Yield the row of every entity, or None for a step of the walk without one.

        Entities may be created and deleted in between.
        """

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        """Return the row of the entity *name* without visiting the others, None if there is none."""

    async def create(self, name: str, attributes: Mapping[str, Any], virtual_host: str) -> None:
        """Create an entity."""

    async def update(self, name: str, attributes: Mapping[str, Any], virtual_host: str) -> None:
        """Change an existing entity."""

    async def delete(self, name: str, virtual_host: str) -> None:
        """Delete an existing entity."""

    async def act(self, operation: str, name: str, message: Message, virtual_host: str) -> None:
        """Perform *operation*, one of its own, on an existing entity, as *message* requests."""


class Asked(msgspec.Struct, frozen=True):
    """Request with its peer and the nodes that it is about."""

    message: Message
    peer: Peer
    space: VirtualHost
    #: Entity of the management node ``<entity>/$management``; empty at ``$management``.
    entity: str = ""

    @property
    def name(self) -> str:
        """Name of the entity in the request, which may be omitted at its own management node."""
        name = _request(self.message, "name")
        if name is None:
            name = _request(self.message, "identity")
        if name is None and self.entity:
            return self.entity
        if not isinstance(name, str) or not name:
            raise _Failed(400, "the request names no entity: set the property name")
        if self.entity and name not in (self.entity, "self"):
            raise _Failed(
                400, f"this is the management node of {self.entity!r}, not of {name!r:.50}"
            )
        return self.entity or name


#: ``await hook(entity, message, peer)``: answers a custom operation at ``<entity>/$management``.
EntityHook: TypeAlias = Callable[[str, Message, Peer], Awaitable[Message]]


class _AddedType(msgspec.Struct, frozen=True):
    """Type of entities that an add-on answers for."""

    handler: EntityHook
    rights: Rights
    operations: Sequence[str]


#: Returns the error if a peer may not declare nodes with these passages, None if it may.
MayDeclare: TypeAlias = Callable[[Peer, Sequence[Passage]], Awaitable[Error | None]]

#: Types of nodes, each of which extends :data:`NODE_TYPE`.
NODE_TYPES: Final = {f"amqp_rt.{kind}": kind for kind in KINDS}

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
_SELF_OPERATIONS: Final[Mapping[str, list[str]]] = {
    "QUERY": ["entityType", "offset", "count"],
    "GET-TYPES": ["entityType"],
    "GET-ANNOTATIONS": ["entityType"],
    "GET-ATTRIBUTES": ["entityType"],
    "GET-OPERATIONS": ["entityType"],
    "GET-SCHEMA": ["entityType"],
    "GET-MGMT-NODES": [],
    "REGISTER": ["address"],
    "DEREGISTER": ["address"],
}
_ENTITY_OPERATIONS: Final = ("CREATE", "READ", "UPDATE", "DELETE")


class Management:
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
        self._open_to_all = open_to_all
        self._added_types: dict[str, _AddedType] = {}
        self._space = space
        self._virtual_hosts = virtual_hosts
        self._decide = decide
        self._may_declare = may_declare
        self._limits = limits
        self._collections = {each.type_name: each for each in collections}
        self._hooks: dict[str, tuple[Rights, EntityHook]] = {}
        self._registered: dict[str, None] = {}
        #: Held for one turn of a query, so that each pass of the event loop has only one such turn
        #: however many queries run. trio's lock serves waiting queries in order.
        self._turn = trio.Lock()
        self._operations: dict[str, Callable[[Asked], tuple[int, Any]]] = {
            "GET-TYPES": self._get_types,
            "GET-ANNOTATIONS": self._get_annotations,
            "GET-ATTRIBUTES": self._get_attributes,
            "GET-OPERATIONS": self._get_operations,
            "GET-SCHEMA": self._get_schema,
            "GET-MGMT-NODES": self._get_nodes,
            "REGISTER": self._register,
            "DEREGISTER": self._deregister,
            "READ": self._read,
            "DELETE": self._delete,
            "CURSOR": self._cursor,
        }
        #: Operations that wait, for data to be read or for changes to be stored.
        self._lasting: dict[str, Callable[[Asked], Awaitable[tuple[int, Any]]]] = {
            "CREATE": self._create,
            "UPDATE": self._update,
            "QUERY": self._query,
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

    def add_type(
        self,
        type_name: str,
        handler: EntityHook,
        *,
        rights: Rights = Rights.MANAGE,
        operations: Sequence[str] = ("READ",),
    ) -> None:
        """Answer *operations* on entities of the type *type_name*, at ``$management`` and at their own nodes.

        Peers with any right may attach to ``$management`` from now on, since the operations may take less
        than the right to manage; all other operations there take what they took before.

        Args:
            type_name: The ``type`` in requests.
            handler: ``await handler(name, message, peer)`` returns the reply about the entity *name*. An
                AmqpError that it raises is reported, as a refusal is, with the status both as
                ``statusCode`` and as ``status-code``, of which clients read one.
            rights: What the peer needs at the address *name*; ``Rights.NONE`` stands for any right.
            operations: The operations.

        Raises:
            ValueError: There is such a type already.
        """
        known = {NODE_TYPE, SELF_TYPE, VIRTUAL_HOST_TYPE, *NODE_TYPES, *self._collections}
        if type_name in known or type_name in self._added_types:
            raise ValueError(f"there is a type {type_name!r} already")
        self._added_types[type_name] = _AddedType(handler, rights, tuple(operations))
        self._open_to_all()

    def add_node_hook(
        self, operation: str, answer: Callable[[Node, Message], Awaitable[Any]], rights: Rights
    ) -> None:
        """Answer *operation* at ``<node>/$management`` with the body that *answer* returns."""

        async def hook(entity: str, message: Message, peer: Peer) -> Message:
            node = self._space(peer.virtual_host).find(entity)
            return reply_of(200, await answer(node, message))

        self.add_hook(operation, hook, rights=rights)

    async def answer(self, message: Message, peer: Peer, entity: str = "") -> Message:
        """Return the reply to *message*, which was sent to the management node of *entity*, if given.

        Failures are reported in the reply.
        """
        if self._added_types and (added := self._added_type(message)) is not None:
            return await self._answer_added(added, message, peer, entity)
        try:
            operation = _request(message, "operation")
            name = operation if isinstance(operation, str) else ""
            asked = Asked(message, peer, self._space(peer.virtual_host), entity)
            if entity and name in self._hooks:
                rights, hook = self._hooks[name]
                self._check(peer, rights, entity)
                return await hook(entity, message, peer)
            status, body = await self._perform(name, asked)
        except _Failed as failed:
            return reply_of(failed.status, {}, failed.description, "amqp:invalid-field")
        except AmqpError as error:
            status = _STATUS.get(error.condition, 400)
            return reply_of(status, {}, error.description, error.condition)
        reply = reply_of(status, body)
        if name == "QUERY":
            reply.application_properties = {
                **reply.application_properties,
                "count": Int(len(body["results"])),
            }
        return reply

    def _added_type(self, message: Message) -> _AddedType | None:
        name = _request(message, "type")
        return self._added_types.get(name) if isinstance(name, str) else None

    async def _answer_added(
        self, added: _AddedType, message: Message, peer: Peer, entity: str
    ) -> Message:
        asked = Asked(message, peer, self._space(peer.virtual_host), entity)
        try:
            operation = _request(message, "operation")
            if operation not in added.operations:
                raise _Failed(
                    501, f"no operation {operation!r:.50}; there are {', '.join(added.operations)}"
                )
            # A link to the management node of an entity takes any right there.
            anything = added.rights is Rights.NONE
            wanted = Rights.LISTEN if anything else added.rights
            self._check(peer, wanted, f"{asked.name}/{ADDRESS}" if anything else asked.name)
            return await added.handler(asked.name, message, peer)
        except _Failed as failed:
            status, description, condition = failed.status, failed.description, "amqp:invalid-field"
        except AmqpError as error:
            status = _STATUS.get(error.condition, 400)
            description, condition = error.description, error.condition
        reply = reply_of(status, {}, description, condition)
        reply.application_properties = {
            **reply.application_properties,
            "status-code": Int(status),
            "status-description": description[:_DESCRIPTION_MAX],
        }
        return reply

    async def _perform(self, operation: str, asked: Asked) -> tuple[int, Any]:
        collection = self._collections.get(_text_or(asked.message, "type"))
        if collection is not None and (
            operation in _ENTITY_OPERATIONS or operation in collection.operations
        ):
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
            return await self._on_collection(collection, operation, asked)
        if operation in _NODE_OPERATIONS:
            self._check_type(asked)
            self._check(asked.peer, Rights.MANAGE, asked.name)
        elif operation in ("REGISTER", "DEREGISTER"):
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
        if (perform := self._operations.get(operation)) is not None:
            return perform(asked)
        if (lasting := self._lasting.get(operation)) is not None:
            return await lasting(asked)
        known = ", ".join([*self._operations, *self._lasting])
        raise _Failed(501, f"no operation {operation!r:.50}; there are {known}")

    def _check(self, peer: Peer, wanted: Rights, address: str) -> None:
        refused = self._decide(peer, wanted, address)
        if refused is not None:
            raise refused.raised_as(AmqpError)

    def _check_type(self, asked: Asked) -> None:
        """Check that the type in the request, if any, is a type of nodes."""
        given = _text_or(asked.message, "type")
        if given and given != NODE_TYPE and given not in NODE_TYPES:
            raise _Failed(400, f"there is no type {given!r:.50}")

    # --- entities of other types ---------------------------------------------------------------

    async def _on_collection(
        self, collection: Collection, operation: str, asked: Asked
    ) -> tuple[int, Any]:
        if operation not in collection.operations:
            raise _Failed(501, f"{collection.type_name} has no operation {operation}")
        host = asked.peer.virtual_host
        name = asked.name
        there = collection.find(name, host) is not None
        if operation == "CREATE":
            if there:
                raise _Failed(409, f"there is a {collection.type_name} {name!r:.50} already")
            await collection.create(name, _attributes(asked), host)
        elif not there:
            raise _Failed(404, f"there is no {collection.type_name} {name!r:.50}")
        elif operation == "UPDATE":
            await collection.update(name, _attributes(asked), host)
        elif operation == "DELETE":
            await collection.delete(name, host)
            return 204, {}
        elif operation != "READ":
            await collection.act(operation, name, asked.message, host)
        row = collection.find(name, host) or {"name": name}
        return 201 if operation == "CREATE" else 200, _described(row, collection.type_name)

    # --- nodes ---------------------------------------------------------------------------------

    async def _create(self, asked: Asked) -> tuple[int, Any]:
        given = _attributes(asked)
        kind = NODE_TYPES.get(_text_or(asked.message, "type"))
        if kind is not None:
            given.setdefault("kind", kind)
        declared = await self._planned(asked, given, new=True)
        asked.space.declare(declared)
        return 201, _node_row(asked.space.get(declared.name))

    async def _update(self, asked: Asked) -> tuple[int, Any]:
        given = _attributes(asked)
        declared = await self._planned(asked, given, new=False)
        asked.space.update(declared)
        return 200, _node_row(asked.space.get(declared.name))

    async def _planned(self, asked: Asked, given: Mapping[str, Any], *, new: bool) -> Declaration:
        """Return the requested declaration, after checking the peer's rights to its passages."""
        plan = _plan(asked.space, asked.name, given, new=new)
        if plan.passages and self._may_declare is not None:
            refused = await self._may_declare(asked.peer, plan.passages)
            # A token may have expired while waiting.
            self._check(asked.peer, Rights.MANAGE, asked.name)
            if refused is None and _plan(asked.space, asked.name, given, new=new) != plan:
                raise _Failed(
                    409, f"{asked.name!r:.50} or a node that it names has changed: ask again"
                )
        else:
            refused = decide_passages(self._decide, asked.peer, plan.passages)
        if refused is not None:
            raise refused.raised_as(AmqpError)
        return plan.declared

    def _read(self, asked: Asked) -> tuple[int, Any]:
        row = _details(asked.space, asked.name)
        kind = NODE_TYPES.get(_text_or(asked.message, "type"))
        if kind is not None and row["kind"] != kind:
            raise _Failed(404, f"there is no {kind} {asked.name!r:.50}")
        return 200, row

    def _delete(self, asked: Asked) -> tuple[int, Any]:
        asked.space.delete(asked.name)
        return 204, {}

    async def _peek(self, asked: Asked) -> tuple[int, Any]:
        count = whole_of(asked.message, "count", 1, PEEK_MAX)
        queue = asked.space.find_kind(asked.name, QueueNode)
        return 200, await queue.peek(count, bytes_max=PEEK_BYTES_MAX)

    async def _purge(self, asked: Asked) -> tuple[int, Any]:
        node = asked.space.find(asked.name)
        purged = await node.purge()
        if node.services.journal is not None:
            await node.services.journal.wait_kept()
        return 200, {"messages": purged}

    async def _move(self, asked: Asked) -> tuple[int, Any]:
        to = _request(asked.message, "to")
        if not isinstance(to, str) or not to:
            raise _Failed(400, "where to? set the property to")
        passage = Passage(asked.name, to, Rights.MANAGE, Rights.MANAGE)
        refused = decide_passages(self._decide, asked.peer, [passage])
        if refused is not None:
            raise refused.raised_as(AmqpError)
        count = whole_of(asked.message, "count", 0xFFFFFFFF, 0xFFFFFFFF)
        queue = asked.space.find_kind(asked.name, QueueNode)
        return 200, {"messages": await queue.move(asked.space.find(to), count)}

    def _cursor(self, asked: Asked) -> tuple[int, Any]:
        log = asked.space.find_kind(asked.name, LogNode)
        return 200, log.cursor(text_of(asked.message, "group"))

    async def _set_cursor(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        log = asked.space.find_kind(asked.name, LogNode)
        await log.set_cursor(
            text_of(message, "group"), _offsets(message), incarnation=_incarnation(message)
        )
        return 200, {}

    async def _hold(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        seconds = _request(message, "seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise _Failed(400, "for how long? set the property seconds")
        log = asked.space.find_kind(asked.name, LogNode)
        await log.hold(
            text_of(message, "holder"),
            _offsets(message),
            float(seconds),
            incarnation=_incarnation(message),
        )
        return 200, {}

    # --- the management node itself --------------------------------------------------------------

    async def _query(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        entities = self._entities(asked, _text_or(message, "entityType"))
        offset = whole_of(message, "offset", 0)
        most = self._limits.management_rows_max
        count = whole_of(message, "count", most, most)
        names: list[str] = []
        if isinstance(message.body, Mapping):
            given = message.body.get("attributeNames") or []
            if not isinstance(given, list):
                raise _Failed(400, "attributeNames must be a list of names")
            names = [str(name) for name in given[:_NAMES_MAX]]
        page = await self._page(entities, offset, count, len(names))
        if not names:
            names = sorted({name for row in page for name in row})
        return 200, {
            "attributeNames": names,
            "results": [[row.get(name) for name in names] for row in page],
        }

    async def _page(
        self, entities: Iterator[_RowOf | None], offset: int, count: int, columns: int
    ) -> list[Mapping[str, Any]]:
        """Return the rows of *count* entities from *offset*, in turns of bounded work.

        Rows are computed for this page only, and the walk ends with it. The page is shorter than
        requested if its values, *columns* for each row or as many as it has, would exceed
        ``_VALUES_MAX``, since encoding them is one step.
        """
        page: list[Mapping[str, Any]] = []
        skipped = values = 0
        while True:
            async with self._turn:
                work = 0
                while work < _TURN:
                    work += 1
                    if len(page) >= count or values >= _VALUES_MAX:
                        return page
                    try:
                        row_of = next(entities)
                    except StopIteration:
                        return page
                    if row_of is None:
                        continue
                    if skipped < offset:
                        skipped += 1
                        continue
                    if (row := row_of()) is not None:
                        page.append(row)
                        values += columns or len(row)
                        work += _ROW_WORK

    def _entities(self, asked: Asked, wanted: str) -> Iterator[_RowOf | None]:
        """Return an iterator over the entities of a type, or of all types.

        Yields a function that computes the row, or None for an entity that is left out, so that the
        caller can bound the work between two rows too.
        """
        peer = asked.peer
        every = wanted == ""
        chained: list[Iterator[_RowOf | None]] = []
        known = every or wanted == NODE_TYPE or wanted in NODE_TYPES
        if known:
            chained.append(self._node_rows(asked, NODE_TYPES.get(wanted)))
        if wanted == VIRTUAL_HOST_TYPE or wanted in self._collections:
            self._check(peer, Rights.MANAGE, ADDRESS)
        if self._decide(peer, Rights.MANAGE, ADDRESS) is None:
            others: dict[str, Callable[[], Iterable[Mapping[str, Any] | None]]] = {
                VIRTUAL_HOST_TYPE: partial(self._virtual_host_rows, peer.virtual_host),
                **{
                    name: partial(each.rows, peer.virtual_host)
                    for name, each in self._collections.items()
                },
            }
            for name, rows in others.items():
                if every or wanted == name:
                    known = True
                    chained.append(_described_rows(rows, name))
        if not known:
            raise _Failed(404, f"there is no type {wanted!r:.50}")
        return chain.from_iterable(chained)

    def _node_rows(self, asked: Asked, wanted: str | None) -> Iterator[_RowOf | None]:
        space = asked.space
        for name in space.names:
            counts = (
                (kind := space.kind(name)) is not None
                and wanted in (None, kind)
                and self._decide(asked.peer, Rights.MANAGE, name) is None
            )
            yield partial(_row_if_there, space, name) if counts else None

    def _virtual_host_rows(self, own: str) -> list[Mapping[str, Any]]:
        """Return the row of the peer's *own* virtual host; those of all for the default one."""
        return [
            {"name": name, "nodes": len(self._space(name).nodes)}
            for name in self._virtual_hosts()
            if name == own or not own
        ]

    def _types(self, asked: Asked) -> dict[str, type[msgspec.Struct] | None]:
        """Return the types that a request is about, with the Structs of their attributes."""
        found: dict[str, type[msgspec.Struct] | None] = {
            NODE_TYPE: None,
            SELF_TYPE: None,
            VIRTUAL_HOST_TYPE: None,
        }
        found |= {name: KINDS[kind] for name, kind in NODE_TYPES.items()}
        found |= {name: each.attributes for name, each in self._collections.items()}
        found |= dict.fromkeys(self._added_types)
        wanted = _text_or(asked.message, "entityType")
        if not wanted:
            return found
        if wanted not in found:
            raise _Failed(404, f"there is no type {wanted!r:.50}")
        return {wanted: found[wanted]}

    def _get_types(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: [NODE_TYPE] if name in NODE_TYPES else [] for name in self._types(asked)}

    def _get_annotations(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: [] for name in self._types(asked)}

    def _get_attributes(self, asked: Asked) -> tuple[int, Any]:
        return 200, {
            name: sorted({"name", "identity", "type", *(kind.__struct_fields__ if kind else ())})
            for name, kind in self._types(asked).items()
        }

    def _get_operations(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: self._operations_of(name) for name in self._types(asked)}

    def _operations_of(self, name: str) -> dict[str, list[str]]:
        if name == SELF_TYPE:
            return dict(_SELF_OPERATIONS)
        if name == VIRTUAL_HOST_TYPE:
            return {}
        if name in self._collections:
            return dict(self._collections[name].operations)
        if name in self._added_types:
            return {operation: [] for operation in self._added_types[name].operations}
        return {**_NODE_OPERATIONS, **{operation: [] for operation in self._hooks}}

    def _get_schema(self, asked: Asked) -> tuple[int, Any]:
        """Return the JSON Schemas of the attributes, generated from their classes."""
        return 200, {
            name: msgspec.json.schema(kind)
            for name, kind in self._types(asked).items()
            if kind is not None
        }

    def _get_nodes(self, asked: Asked) -> tuple[int, Any]:
        return 200, [ADDRESS, *self._registered]

    def _register(self, asked: Asked) -> tuple[int, Any]:
        address = text_of(asked.message, "address")
        if len(self._registered) >= self._limits.management_nodes_max:
            raise AmqpError(
                f"{len(self._registered)} management nodes are registered already",
                condition="amqp:resource-limit-exceeded",
            )
        self._registered[address[: self._limits.name_max]] = None
        return 200, {}

    def _deregister(self, asked: Asked) -> tuple[int, Any]:
        self._registered.pop(text_of(asked.message, "address"), None)
        return 200, {}


#: Computes the row of an entity; None if the entity has been deleted meanwhile.
_RowOf: TypeAlias = Callable[[], Mapping[str, Any] | None]

#: Names of attributes that one query may request.
_NAMES_MAX: Final = 200
#: Values in the rows of one reply, after which it ends at the current row. Encoding takes a few hundred
#: nanoseconds for each of them, in one step.
_VALUES_MAX: Final = 10_000
#: Work of a query in one turn: 1 for each entity visited, and so much more for each row.
_TURN: Final = 200
_ROW_WORK: Final = 9


def _attributes(asked: Asked) -> dict[str, Any]:
    """Return the attributes in the body, whose name, if there is one, must be that of the request."""
    given = asked.message.body if asked.message.body is not None else {}
    if not isinstance(given, Mapping):
        raise _Failed(400, "the body must be a map of attributes")
    attributes = {str(name): value for name, value in given.items()}
    name = attributes.get("name")
    if name is not None and name != asked.name:
        raise _Failed(
            400,
            f"the attribute name is {name!r:.50}, and the property name of the request is"
            f" {asked.name!r:.50}: they must be the same",
        )
    return attributes


def _described(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"identity": row["name"], "type": kind, **row}


def _described_rows(
    rows: Callable[[], Iterable[Mapping[str, Any] | None]], kind: str
) -> Iterator[_RowOf | None]:
    for row in rows():
        yield None if row is None else partial(_described, row, kind)


def _row_if_there(space: VirtualHost, name: str) -> dict[str, Any] | None:
    node = space.nodes.get(name)
    return None if node is None else _node_row(node)


def _node_row(node: Node) -> dict[str, Any]:
    """Return the declaration and the statistics of *node*."""
    # Statistics come last and win, since some share their name with a setting.
    row = {**attributes(node.declared), **attributes(node.stats())}
    return _described(row, f"amqp_rt.{node.kind}")


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
            return _described(row, f"amqp_rt.{LOG}")
    node = space.get(name)
    return {**_node_row(node), **attributes(node.details())}


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
        fields = {**msgspec.structs.asdict(before), **fields, "kind": before.kind}
    try:
        declared = declaration_of(fields, strict=False)
    except ValueError as error:
        raise AmqpError(str(error), condition="amqp:invalid-field") from error
    return Plan(
        declared,
        passages_of(declared, before, lambda address: space.name_of(address) is not None),
    )


def _text_or(message: Message, name: str) -> str:
    """Return an optional property, empty if absent."""
    value = _request(message, name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Failed(400, f"{name} must be a text, not {value!r:.50}")
    return value


def text_of(message: Message, name: str) -> str:
    """Return the property *name* of a request, a text that is not empty."""
    value = _request(message, name)
    if not isinstance(value, str) or not value:
        raise _Failed(400, f"set the property {name} to a text")
    return value


def _incarnation(message: Message) -> str | None:
    return None if _request(message, "incarnation") is None else text_of(message, "incarnation")


def _offsets(message: Message) -> dict[int, int]:
    """Return the body of a request, a map of partitions and offsets."""
    body = message.body
    if not isinstance(body, Mapping) or not all(
        isinstance(number, int) and not isinstance(number, bool)
        for entry in body.items()
        for number in entry
    ):
        raise _Failed(400, "the body must be a map of partitions and offsets")
    return {int(partition): int(offset) for partition, offset in body.items()}


def attributes(struct: msgspec.Struct) -> dict[str, Any]:
    """Return a struct's fields as a map that any AMQP peer can decode, without absent values."""
    built = msgspec.to_builtins(struct)
    return {name: value for name, value in built.items() if value is not None}
