"""A peer's ``$management``, typed: entities go out and come back as Structs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, overload

import msgspec

from ..errors import DecodeError
from ..message import Message
from ..security.access import MANAGEMENT

if TYPE_CHECKING:
    from .connections import Connection

T = TypeVar("T", bound=msgspec.Struct)

#: Rows that a query asks for at a time.
_PAGE: Final = 200
_SELF: Final = "org.amqp.management"


class ManagementClient:
    """Operations on what a peer has; ``async with peer.management() as there:``.

    What it is about is said by a class, such as :class:`~amqp_rt.broker.Queue`, or by the name of a
    type, such as ``"amqp_rt.link"``; with a name, entities are mappings. Each operation waits for its
    answer; cancelled, it may have been performed.

    Raises:
        CallFailed: The peer says no; its condition says why.
    """

    def __init__(self, connection: Connection, address: str, within: float | None) -> None:
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
        """Any operation: *given* are its application-properties, *body* its body; the whole answer."""
        message = Message(
            {} if body is None else body, application_properties={"operation": operation, **given}
        )
        reply: Message = await self._connection.call(
            self._address, message, reply=Message, within=self._within
        )
        return reply

    @overload
    async def read(self, kind: type[T], name: str) -> T: ...

    @overload
    async def read(self, kind: str, name: str) -> Mapping[str, Any]: ...

    async def read(self, kind: type[T] | str, name: str) -> T | Mapping[str, Any]:
        """One entity as it is now."""
        reply = await self.request("READ", type=type_name(kind), name=name)
        found: T | Mapping[str, Any] = _entity(kind, reply.body)
        return found

    async def create(self, entity: msgspec.Struct) -> None:
        """Make what *entity* describes; it has a ``name``."""
        await self._change("CREATE", entity)

    async def update(self, entity: msgspec.Struct) -> None:
        """Let what there is under the name of *entity* go on as *entity*."""
        await self._change("UPDATE", entity)

    async def _change(self, operation: str, entity: msgspec.Struct) -> None:
        fields = msgspec.to_builtins(entity)
        name = fields.pop("name")
        if operation == "CREATE":
            fields = {key: value for key, value in fields.items() if value is not None}
        await self.request(operation, fields, type=type_name(type(entity)), name=name)

    async def delete(self, kind: type[msgspec.Struct] | str, name: str) -> None:
        """Delete an entity; of a connection or link, that is its end."""
        await self.request("DELETE", type=type_name(kind), name=name)

    @overload
    def query(self, kind: type[T]) -> AsyncIterator[T]: ...

    @overload
    def query(self, kind: str) -> AsyncIterator[Mapping[str, Any]]: ...

    async def query(self, kind: type[T] | str) -> AsyncIterator[T | Mapping[str, Any]]:
        """Every entity of a type, fetched page by page."""
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

    async def types(self) -> Mapping[str, list[str]]:
        """The types that there are, each with those that it extends."""
        found: Mapping[str, list[str]] = (await self.request("GET-TYPES", type=_SELF)).body
        return found

    async def attributes(self) -> Mapping[str, list[str]]:
        """The attributes of each type."""
        found: Mapping[str, list[str]] = (await self.request("GET-ATTRIBUTES", type=_SELF)).body
        return found

    async def operations(self) -> Mapping[str, Mapping[str, list[str]]]:
        """The operations of each type, with their arguments."""
        found: Mapping[str, Any] = (await self.request("GET-OPERATIONS", type=_SELF)).body
        return found

    def __repr__(self) -> str:
        return f"<ManagementClient of {self._address!r}>"


def management_of(connection: Connection, entity: str, within: float | None) -> ManagementClient:
    """The client of a peer's management node, or of that of an entity."""
    return ManagementClient(connection, f"{entity}/{MANAGEMENT}" if entity else MANAGEMENT, within)


def type_name(kind: type | str) -> str:
    """The name of a type: of a class ``Queue`` it is ``amqp_rt.queue``."""
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
