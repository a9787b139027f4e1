"""Typed client of a peer's ``$management`` node: entities are sent and returned as Structs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, overload

import msgspec

from ..errors import DecodeError
from ..message import Message
from ..security.access import MANAGEMENT

T = TypeVar("T", bound=msgspec.Struct)

#: Rows requested in each page of a query.
_PAGE: Final = 200
_SELF: Final = "org.amqp.management"


class Caller(Protocol):
    """Connection on which requests are sent."""

    async def call(
        self, address: str, *args: Any, reply: type[Message], within: float | None
    ) -> Message:
        """Send a request to the node at *address* and wait for its reply."""


class Page(msgspec.Struct, frozen=True):
    """Page of an ordered query."""

    rows: list[dict[str, Any]]
    #: Position for the next page; None after the last one.
    next: str | None
    #: Number of all entities that match.
    total: int


class ManagementClient:
    """Operations on the entities of a peer; use as ``async with peer.management() as there:``.

    The kind of entity is given as a class, such as :class:`~amqp_rt.broker.Queue`, or as the name
    of a type, such as ``"amqp_rt.link"``; with a name, entities are mappings. Each operation waits
    for its answer. If cancelled, it may have been performed.

    Raises:
        CallFailed: The peer refused the operation; see its condition.
    """

    def __init__(self, connection: Caller, address: str, within: float | None) -> None:
        self._connection = connection
        self._address = address
        self._within = within

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    async def request(self, operation: str, body: Any = None, **given: Any) -> Message:
        """Request any operation, and return the whole answer.

        Args:
            operation: Name of the operation.
            body: Body of the request.
            given: Application-properties of the request.
        """
        message = Message(
            {} if body is None else body, application_properties={"operation": operation, **given}
        )
        return await self._connection.call(
            self._address, message, reply=Message, within=self._within
        )

    @overload
    async def read(self, kind: type[T], name: str) -> T: ...

    @overload
    async def read(self, kind: str, name: str) -> Mapping[str, Any]: ...

    async def read(self, kind: type[T] | str, name: str) -> T | Mapping[str, Any]:
        """Return the current attributes of one entity."""
        reply = await self.request("READ", type=type_name(kind), name=name)
        found: T | Mapping[str, Any] = _entity(kind, reply.body)
        return found

    async def create(self, entity: msgspec.Struct) -> None:
        """Create *entity*, a Struct with a ``name``."""
        await self._change("CREATE", entity)

    async def update(self, entity: msgspec.Struct) -> None:
        """Update the entity of the same name to the attributes of *entity*."""
        await self._change("UPDATE", entity)

    async def _change(self, operation: str, entity: msgspec.Struct) -> None:
        fields = msgspec.to_builtins(entity)
        name = fields.pop("name")
        if operation == "CREATE":
            fields = {key: value for key, value in fields.items() if value is not None}
        await self.request(operation, fields, type=type_name(type(entity)), name=name)

    async def delete(self, kind: type[msgspec.Struct] | str, name: str) -> None:
        """Delete an entity; deleting a connection or link ends it."""
        await self.request("DELETE", type=type_name(kind), name=name)

    @overload
    def query(self, kind: type[T]) -> AsyncIterator[T]: ...

    @overload
    def query(self, kind: str) -> AsyncIterator[Mapping[str, Any]]: ...

    async def query(self, kind: type[T] | str) -> AsyncIterator[T | Mapping[str, Any]]:
        """Iterate over all entities of a type, fetched page by page."""
        offset = 0
        while True:
            reply = await self.request(
                "QUERY", entityType=type_name(kind), offset=offset, count=_PAGE
            )
            names, rows = reply.body["attributeNames"], reply.body["results"]
            for row in rows:
                yield _entity(kind, dict(zip(names, row, strict=True)))
            if not rows:
                return
            offset += len(rows)

    async def page(
        self,
        kind: type[msgspec.Struct] | str,
        *,
        sort: str = "name",
        q: str = "",
        after: str | None = None,
        count: int = 100,
        attributes: Sequence[str] = (),
    ) -> Page:
        """Return some entities of a type, in an order.

        Args:
            kind: The type.
            sort: Attribute that orders them, then their names do; with ``-`` in front in descending order.
            q: Text that their names contain, in any case.
            after: ``next`` of the page before; None for the first page.
            count: How many there are at most; the page may be shorter.
            attributes: Attributes of the rows; all if there are none.
        """
        given = {"sort": sort, "q": q, "after": after}
        reply = await self.request(
            "QUERY",
            {"attributeNames": [*attributes]},
            entityType=type_name(kind),
            count=count,
            **{name: value for name, value in given.items() if value},
        )
        body = reply.body
        names = [str(name) for name in body["attributeNames"]]
        position = body.get("next")
        return Page(
            [dict(zip(names, row, strict=True)) for row in body["results"]],
            None if position is None else str(position),
            int(body.get("total", 0)),
        )

    async def types(self) -> Mapping[str, list[str]]:
        """Return the types, each with the types that it extends."""
        found: Mapping[str, list[str]] = (await self.request("GET-TYPES", type=_SELF)).body
        return found

    async def attributes(self) -> Mapping[str, list[str]]:
        """Return the attributes of each type."""
        found: Mapping[str, list[str]] = (await self.request("GET-ATTRIBUTES", type=_SELF)).body
        return found

    async def operations(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Return the operations of each type, with their arguments."""
        found: Mapping[str, Any] = (await self.request("GET-OPERATIONS", type=_SELF)).body
        return found

    def __repr__(self) -> str:
        return f"<ManagementClient of {self._address!r}>"


def management_of(connection: Caller, entity: str, within: float | None) -> ManagementClient:
    """Return a client of a peer's management node, or of that of an entity."""
    return ManagementClient(connection, f"{entity}/{MANAGEMENT}" if entity else MANAGEMENT, within)


def type_name(kind: type | str) -> str:
    """Return the name of a type: ``amqp_rt.queue`` for a class ``Queue``."""
    if isinstance(kind, str):
        return kind
    return f"amqp_rt.{kind.__name__.removesuffix('Entity').lower()}"


def _entity(kind: type[T] | str, row: Any) -> Any:
    if not isinstance(row, Mapping):
        raise DecodeError("the answer is no map of attributes")
    if isinstance(kind, str):
        return row
    try:
        present = {str(name): value for name, value in row.items() if value is not None}
        return msgspec.convert(present, kind, strict=False)
    except msgspec.ValidationError as error:
        raise DecodeError(f"the answer is no {kind.__name__}: {error}") from None
