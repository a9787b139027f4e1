"""Management nodes: requests for operations on entities of registered types, and their replies.

The request/response form of the AMQP Management drafts, as deployed brokers use it: requests have the
application-properties ``operation``, ``type`` and ``name``, replies ``statusCode`` and
``statusDescription``, and bodies are maps as amqp-value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import trio

from ..errors import AmqpError
from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..security.access import MANAGEMENT, Decide, Rights
from ..values import Int, Symbol
from .ordering import Listed, ListedRow, Order, Selection, order_of

ADDRESS: Final = MANAGEMENT

#: Type of the management node itself.
SELF_TYPE: Final = "org.amqp.management"

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


class Failed(Exception):
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


def property_of(message: Message, name: str) -> Any:
    """Return the property *name* of a request, None without it."""
    value = message.application_properties.get(name)
    return str(value) if isinstance(value, str) else value


def whole_of(message: Message, name: str, default: int | None = None, most: int = WHOLE_MAX) -> int:
    """Return the property *name* of a request, a whole number, limited to *most*."""
    value = property_of(message, name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Failed(400, f"{name} must be a whole number, not {value!r:.50}")
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

    async def update(self, name: str, attributes: Mapping[str, Any], peer: Peer) -> None:
        """Change an existing entity in the virtual host of *peer*, which asks for it."""

    async def delete(self, name: str, virtual_host: str) -> None:
        """Delete an existing entity."""

    async def act(self, operation: str, name: str, message: Message, virtual_host: str) -> None:
        """Perform *operation*, one of its own, on an existing entity, as *message* requests."""


class UnchangeableEntities:
    """Base of collections whose entities cannot be created or changed, unless a subclass overrides that.

    Management refuses operations that are not among ``operations`` before it calls a collection.
    """

    type_name: str
    attributes: type[msgspec.Struct]
    operations: Mapping[str, list[str]] = {"READ": []}

    async def create(self, name: str, attributes: Mapping[str, Any], virtual_host: str) -> None:
        raise NotImplementedError

    async def update(self, name: str, attributes: Mapping[str, Any], peer: Peer) -> None:
        raise NotImplementedError

    async def delete(self, name: str, virtual_host: str) -> None:
        raise NotImplementedError

    async def act(self, operation: str, name: str, message: Message, virtual_host: str) -> None:
        raise NotImplementedError


class Asked(msgspec.Struct, frozen=True):
    """Request with its peer."""

    message: Message
    peer: Peer
    #: Entity of the management node ``<entity>/$management``; empty at ``$management``.
    entity: str = ""

    @property
    def name(self) -> str:
        """Name of the entity in the request, which may be omitted at its own management node."""
        name = property_of(self.message, "name")
        if name is None:
            name = property_of(self.message, "identity")
        if name is None and self.entity:
            return self.entity
        if not isinstance(name, str) or not name:
            raise Failed(400, "the request names no entity: set the property name")
        if self.entity and name not in (self.entity, "self"):
            raise Failed(
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


class KnownType(msgspec.Struct, frozen=True):
    """Type of entities, as those who describe it elsewhere need it."""

    name: str
    #: Struct of the attributes; None for types that are described by others, which extend them.
    attributes: type[msgspec.Struct] | None
    #: Operation → its arguments.
    operations: Mapping[str, Sequence[str]]
    #: Structs of what entities have beside these attributes, and cannot be set.
    statistics: tuple[type[msgspec.Struct], ...]
    #: Attributes that may order a query.
    orders: Sequence[str]


_SELF_OPERATIONS: Final[Mapping[str, list[str]]] = {
    "QUERY": ["entityType", "offset", "count", "sort", "q", "after"],
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


#: Attributes of all entities.
_COMMON: Final = frozenset(("name", "identity", "type"))


class _WalkEnd:
    """End of a walk."""


_END: Final = _WalkEnd()


class EntityManagement:
    """Handler of management requests for entities of registered types.

    Operations take the right to manage ``$management``.

    Args:
        decide: Decides the rights of peers; by default every peer may do everything.
        collections: The types of entities.
        limits: Maximum numbers of rows in one reply and of registered nodes.
        open_to_all: Called when peers with any right have to be able to attach to ``$management``.
    """

    def __init__(
        self,
        *,
        decide: Decide = lambda peer, wanted, address: None,
        collections: Iterable[Collection] = (),
        limits: Limits = DEFAULT_LIMITS,
        open_to_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_to_all = open_to_all
        self._added_types: dict[str, _AddedType] = {}
        self._decide = decide
        self._limits = limits
        self._collections = {each.type_name: each for each in collections}
        self._registered: dict[str, None] = {}
        self._self_operations = dict(_SELF_OPERATIONS)
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
        }
        #: Operations that wait, for data to be read or for changes to be stored.
        self._lasting: dict[str, Callable[[Asked], Awaitable[tuple[int, Any]]]] = {
            "QUERY": self._query
        }

    def add_collection(self, collection: Collection) -> None:
        """Answer requests about entities of a further type.

        Raises:
            ValueError: There is such a type already.
        """
        self._check_new(collection.type_name)
        self._collections[collection.type_name] = collection

    def remove_collection(self, type_name: str) -> None:
        """Answer no more requests about entities of the type *type_name*."""
        del self._collections[type_name]

    def add_operation(
        self,
        operation: str,
        perform: Callable[[Message, Peer], Any],
        arguments: Sequence[str] = (),
    ) -> None:
        """Answer *operation* of ``$management`` itself, for peers with the right to manage it.

        Args:
            operation: Name of the operation.
            perform: Called with the request and its peer; returns the body of the reply. An AmqpError that
                it raises is reported.
            arguments: Names of the application-properties that it takes.

        Raises:
            ValueError: There is such an operation already.
        """
        if operation in self._self_operations:
            raise ValueError(f"there is an operation {operation!r} already")

        def checked(asked: Asked) -> tuple[int, Any]:
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
            return 200, perform(asked.message, asked.peer)

        self._operations[operation] = checked
        self._self_operations[operation] = list(arguments)

    def _check_new(self, type_name: str) -> None:
        if type_name in self._known_types() or type_name in self._added_types:
            raise ValueError(f"there is a type {type_name!r} already")

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
        self._check_new(type_name)
        self._added_types[type_name] = _AddedType(handler, rights, tuple(operations))
        self._open_to_all()

    async def answer(self, message: Message, peer: Peer, entity: str = "") -> Message:
        """Return the reply to *message*, which was sent to the management node of *entity*, if given.

        Failures are reported in the reply.
        """
        if self._added_types and (added := self._added_type(message)) is not None:
            return await self._answer_added(added, message, peer, entity)
        try:
            operation = property_of(message, "operation")
            name = operation if isinstance(operation, str) else ""
            return await self._reply(name, Asked(message, peer, entity))
        except Failed as failed:
            return reply_of(failed.status, {}, failed.description, "amqp:invalid-field")
        except AmqpError as error:
            status = _STATUS.get(error.condition, 400)
            return reply_of(status, {}, error.description, error.condition)

    async def _reply(self, operation: str, asked: Asked) -> Message:
        """Perform *operation* and return the reply.

        Raises:
            Failed: The operation failed, with a status of its own.
            AmqpError: The operation failed.
        """
        status, body = await self._perform(operation, asked)
        reply = reply_of(status, body)
        if operation == "QUERY":
            reply.application_properties = {
                **reply.application_properties,
                "count": Int(len(body["results"])),
            }
        return reply

    def _added_type(self, message: Message) -> _AddedType | None:
        name = property_of(message, "type")
        return self._added_types.get(name) if isinstance(name, str) else None

    async def _answer_added(
        self, added: _AddedType, message: Message, peer: Peer, entity: str
    ) -> Message:
        asked = Asked(message, peer, entity)
        try:
            operation = property_of(message, "operation")
            if operation not in added.operations:
                raise Failed(
                    501, f"no operation {operation!r:.50}; there are {', '.join(added.operations)}"
                )
            # A link to the management node of an entity takes any right there.
            anything = added.rights is Rights.NONE
            wanted = Rights.LISTEN if anything else added.rights
            self._check(peer, wanted, f"{asked.name}/{ADDRESS}" if anything else asked.name)
            return await added.handler(asked.name, message, peer)
        except Failed as failed:
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
        collection = self._collection_of(operation, asked)
        if collection is not None:
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
            return await self._on_collection(collection, operation, asked)
        if operation in ("REGISTER", "DEREGISTER"):
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
        if (perform := self._operations.get(operation)) is not None:
            return perform(asked)
        if (lasting := self._lasting.get(operation)) is not None:
            return await lasting(asked)
        if operation in _ENTITY_OPERATIONS:
            raise Failed(400, f"there is no type {text_or(asked.message, 'type')!r:.50}")
        known = ", ".join([*self._operations, *self._lasting])
        raise Failed(501, f"no operation {operation!r:.50}; there are {known}")

    def _collection_of(self, operation: str, asked: Asked) -> Collection | None:
        """Return the collection whose entity a request is about; None if it is about something else."""
        collection = self._collections.get(text_or(asked.message, "type"))
        if collection is None or (
            operation not in _ENTITY_OPERATIONS and operation not in collection.operations
        ):
            return None
        return collection

    def _check(self, peer: Peer, wanted: Rights, address: str) -> None:
        refused = self._decide(peer, wanted, address)
        if refused is not None:
            raise refused.raised_as(AmqpError)

    # --- entities of other types ---------------------------------------------------------------

    async def _on_collection(
        self, collection: Collection, operation: str, asked: Asked
    ) -> tuple[int, Any]:
        if operation not in collection.operations:
            raise Failed(501, f"{collection.type_name} has no operation {operation}")
        host = asked.peer.virtual_host
        name = asked.name
        there = collection.find(name, host) is not None
        if operation == "CREATE":
            if there:
                raise Failed(409, f"there is a {_word_for(collection)} {name!r:.50} already")
            await collection.create(name, attributes_of(asked), host)
        elif not there:
            raise Failed(404, f"there is no {_word_for(collection)} {name!r:.50}")
        elif operation == "UPDATE":
            await collection.update(name, attributes_of(asked), asked.peer)
        elif operation == "DELETE":
            await collection.delete(name, host)
            return 204, {}
        elif operation != "READ":
            await collection.act(operation, name, asked.message, host)
        row = collection.find(name, host) or {"name": name}
        return 201 if operation == "CREATE" else 200, described(row, collection.type_name)

    # --- the management node itself --------------------------------------------------------------

    async def _query(self, asked: Asked) -> tuple[int, Any]:
        message = asked.message
        entities = self._entities(asked, text_or(message, "entityType"))
        offset = whole_of(message, "offset", 0)
        most = self._limits.management_rows_max
        count = whole_of(message, "count", most, most)
        names: list[str] = []
        if isinstance(message.body, Mapping):
            given = message.body.get("attributeNames") or []
            if not isinstance(given, list):
                raise Failed(400, "attributeNames must be a list of names")
            names = [str(name) for name in given[:_NAMES_MAX]]
        try:
            order = order_of(message)
        except ValueError as error:
            raise Failed(400, str(error)) from None
        more: dict[str, Any] = {}
        if order is None:
            page = await self._page(entities, offset, count, len(names))
        elif offset:
            raise Failed(
                400, "an ordered query has no offset: after is the next of the page before"
            )
        else:
            self._check_order(order, text_or(message, "entityType"))
            page, more = await self._ordered_page(entities, order, count, len(names))
        if not names:
            names = sorted({name for row in page for name in row})
        return 200, {
            "attributeNames": names,
            "results": [[row.get(name) for name in names] for row in page],
            **more,
        }

    async def _ordered_page(
        self, entities: Iterator[Listed | None], order: Order, count: int, columns: int
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """Return the rows of an ordered page, and its ``total`` and ``next``, in turns of bounded work.

        The walk visits all entities, but computes rows for this page only. It may be shorter, as that of :meth:`_page`.
        """
        selection = Selection(order, count)
        # An attribute other than the name takes as much work as a row.
        step = 1 if order.attribute == "name" else _ROW_WORK
        ended = False
        while not ended:
            async with self._turn:
                work = 0
                while work < _TURN and not ended:
                    entity = next(entities, _END)
                    if isinstance(entity, _WalkEnd):
                        ended = True
                    elif entity is not None:
                        selection.offer(entity)
                        work += step
                    else:
                        work += 1
        page: list[Mapping[str, Any]] = []
        values = 0
        last: str | None = None
        chosen = iter(selection.entities())
        left = True
        while left:
            async with self._turn:
                for _ in range(_TURN // _ROW_WORK):
                    found = next(chosen, None)
                    if found is None or values >= _ORDERED_VALUES_MAX:
                        left = False
                        break
                    last = found[1]
                    if (row := found[0].row()) is not None:
                        page.append(row)
                        values += columns or len(row)
        more = found is not None or selection.more
        return page, {"total": selection.total, "next": last if more else None}

    async def _page(
        self, entities: Iterator[Listed | None], offset: int, count: int, columns: int
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
                        entity = next(entities)
                    except StopIteration:
                        return page
                    if entity is None:
                        continue
                    if skipped < offset:
                        skipped += 1
                        continue
                    if (row := entity.row()) is not None:
                        page.append(row)
                        values += columns or len(row)
                        work += _ROW_WORK

    def _entities(self, asked: Asked, wanted: str) -> Iterator[Listed | None]:
        """Return an iterator over the entities of a type, or of all types.

        Yields None for an entity that is left out, so that the caller can bound the work between two rows too.
        """
        collections = self._collections_for(asked)
        if wanted and wanted not in collections:
            raise Failed(404, f"there is no type {wanted!r:.50}")
        if wanted:
            self._check(asked.peer, Rights.MANAGE, ADDRESS)
        elif self._decide(asked.peer, Rights.MANAGE, ADDRESS) is not None:
            return iter(())
        return chain.from_iterable(
            _described_rows(rows, name)
            for name, rows in collections.items()
            if wanted in ("", name)
        )

    def _collections_for(self, asked: Asked) -> dict[str, Rows]:
        """Return the function that iterates over the rows of each type."""
        return {
            name: partial(each.rows, asked.peer.virtual_host)
            for name, each in self._collections.items()
        }

    def _known_types(self) -> dict[str, type[msgspec.Struct] | None]:
        """Return all types but those of add-ons, with the Structs of their attributes."""
        return {
            SELF_TYPE: None,
            **{name: each.attributes for name, each in self._collections.items()},
        }

    def has(self, type_name: str, name: str, virtual_host: str) -> bool:
        """Return whether there is an entity other than a node. For the program itself: no rights are checked."""
        collection = self._collections.get(type_name)
        return collection is not None and collection.find(name, virtual_host) is not None

    def known_types(self) -> dict[str, KnownType]:
        """Return all types but those of add-ons, by their names."""
        return {
            name: KnownType(
                name,
                kind,
                self._operations_of(name),
                self._statistics_of(name),
                sorted(self._orders_of(name)),
            )
            for name, kind in self._known_types().items()
        }

    def _bases_of(self, name: str) -> list[str]:
        """Return the types that a type extends."""
        return []

    def _statistics_of(self, name: str) -> tuple[type[msgspec.Struct], ...]:
        """Return the Structs of what rows of a type have beside its attributes."""
        return ()

    def _details_of(self, name: str) -> type[msgspec.Struct] | None:
        """Return the Struct of what READ adds to a row, None if it adds nothing."""
        return None

    def _listed_attributes(self, name: str) -> frozenset[str]:
        """Return the attributes of rows of a type."""
        kinds = (self._known_types().get(name), *self._statistics_of(name))
        return _COMMON.union(*(kind.__struct_fields__ for kind in kinds if kind is not None))

    def _orders_of(self, wanted: str) -> frozenset[str]:
        """Return the attributes that may order a query of a type or, if *wanted* is empty, of all types.

        Rows of a type may be of types that extend it, and have their attributes.
        """
        return _COMMON.union(
            *(
                self._listed_attributes(name)
                for name in self._known_types()
                if wanted in ("", name, *self._bases_of(name))
            )
        )

    def _check_order(self, order: Order, wanted: str) -> None:
        """Check that rows have the attribute of *order*: without it the order would be that of the names, unnoticed."""
        known = self._orders_of(wanted)
        if order.attribute in known:
            return
        name = order.attribute[:50]
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
        raise Failed(400, f"sort: there is no attribute {name!r} of {wanted or 'entities'}; {hint}")

    def _types(self, asked: Asked) -> dict[str, type[msgspec.Struct] | None]:
        """Return the types that a request is about, with the Structs of their attributes."""
        found = self._known_types()
        found |= dict.fromkeys(self._added_types)
        wanted = text_or(asked.message, "entityType")
        if not wanted:
            return found
        if wanted not in found:
            raise Failed(404, f"there is no type {wanted!r:.50}")
        return {wanted: found[wanted]}

    def _get_types(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: self._bases_of(name) for name in self._types(asked)}

    def _get_annotations(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: [] for name in self._types(asked)}

    def _get_attributes(self, asked: Asked) -> tuple[int, Any]:
        return 200, {
            name: sorted(
                self._listed_attributes(name).union(
                    () if (details := self._details_of(name)) is None else details.__struct_fields__
                )
            )
            for name in self._types(asked)
        }

    def _get_operations(self, asked: Asked) -> tuple[int, Any]:
        return 200, {name: self._operations_of(name) for name in self._types(asked)}

    def _operations_of(self, name: str) -> dict[str, list[str]]:
        if name == SELF_TYPE:
            return dict(self._self_operations)
        if name in self._collections:
            return dict(self._collections[name].operations)
        return {operation: [] for operation in self._added_types[name].operations}

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


#: Iterates over the rows of a type; None stands for a step of the walk without one.
Rows: TypeAlias = Callable[[], Iterable[Mapping[str, Any] | None]]

#: Names of attributes that one query may request.
_NAMES_MAX: Final = 200
#: Values in the rows of one reply, after which it ends at the current row. Encoding takes a few hundred
#: nanoseconds for each of them, in one step.
_VALUES_MAX: Final = 10_000
#: The same for ordered queries, whose pages are for people.
_ORDERED_VALUES_MAX: Final = 3_000
#: Work of a query in one turn: 1 for each entity visited, and so much more for each row.
_TURN: Final = 200
_ROW_WORK: Final = 9


def attributes_of(asked: Asked) -> dict[str, Any]:
    """Return the attributes in the body, whose name, if there is one, must be that of the request."""
    given = asked.message.body if asked.message.body is not None else {}
    if not isinstance(given, Mapping):
        raise Failed(400, "the body must be a map of attributes")
    attributes = {str(name): value for name, value in given.items()}
    name = attributes.get("name")
    if name is not None and name != asked.name:
        raise Failed(
            400,
            f"the attribute name is {name!r:.50}, and the property name of the request is"
            f" {asked.name!r:.50}: they must be the same",
        )
    return attributes


def _word_for(collection: Collection) -> str:
    """Return what errors call an entity of *collection*: ``mesh node`` for the type ``amqp_rt.mesh-node``."""
    return collection.type_name.removeprefix("amqp_rt.").replace("-", " ")


def described(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return *row* with the identity and the type of its entity."""
    return {"identity": row["name"], "type": kind, **row}


def _described_rows(rows: Rows, kind: str) -> Iterator[Listed | None]:
    finish = partial(described, kind=kind)
    for row in rows():
        yield None if row is None else ListedRow(row, finish)


def text_or(message: Message, name: str) -> str:
    """Return an optional property, empty if absent."""
    value = property_of(message, name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Failed(400, f"{name} must be a text, not {value!r:.50}")
    return value


def text_of(message: Message, name: str) -> str:
    """Return the property *name* of a request, a text that is not empty."""
    value = property_of(message, name)
    if not isinstance(value, str) or not value:
        raise Failed(400, f"set the property {name} to a text")
    return value


def attributes(struct: msgspec.Struct) -> dict[str, Any]:
    """Return a struct's fields as a map that any AMQP peer can decode, without absent values."""
    built = msgspec.to_builtins(struct)
    return {name: value for name, value in built.items() if value is not None}
