"""``$management``: a request names an operation, a type and an entity; the reply says how it went.

The request/response form of the AMQP Management drafts that deployed brokers speak:
application-properties ``operation``, ``type`` and ``name`` in, ``statusCode`` and
``statusDescription`` out, maps as amqp-value bodies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from ..errors import AmqpError
from ..message import Message
from ..values import Int, Symbol

ADDRESS: Final = "$management"

#: Type of the entities that hold messages, and of the node itself.
NODE_TYPE: Final = "amqp_rt.node"
SELF_TYPE: Final = "org.amqp.management"
#: Type of virtual hosts, as the ``entityType`` of a QUERY.
VIRTUAL_HOST_TYPE: Final = "amqp_rt.virtual-host"

#: Messages that one PEEK returns at most, and bytes of their bodies together.
PEEK_MAX: Final = 100
PEEK_BYTES_MAX: Final = 4 * 1024 * 1024

_DESCRIPTION_MAX: Final = 500

_STATUS: Final = {
    "amqp:not-found": 404,
    "amqp:not-allowed": 409,
    "amqp:precondition-failed": 409,
    "amqp:resource-locked": 409,
    "amqp:resource-limit-exceeded": 409,
    "amqp:unauthorized-access": 403,
    "amqp:not-implemented": 501,
}


class Managed(Protocol):
    """What of a broker is managed here: the nodes of one virtual host."""

    def virtual_hosts(self) -> list[Mapping[str, Any]]:
        """This virtual host; seen from the default one, all of them."""

    def nodes(self) -> list[Mapping[str, Any]]:
        """Every node in numbers."""

    def node(self, name: str) -> Mapping[str, Any]:
        """One node in numbers; an error if there is none."""

    def details(self, name: str) -> Mapping[str, Any]:
        """The same, with how far a log goes; or one partition of a log."""

    def cursor(self, name: str, group: str) -> Mapping[int, int]:
        """Where a group goes on in a log: partition → offset."""

    async def set_cursor(
        self, name: str, group: str, offsets: Mapping[int, int], incarnation: str | None
    ) -> None:
        """Remember where a group goes on."""

    async def hold(
        self,
        name: str,
        holder: str,
        offsets: Mapping[int, int],
        for_s: float,
        incarnation: str | None,
    ) -> None:
        """Keep records of a log for a while."""

    def create(self, name: str, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Declare a node."""

    def delete(self, name: str) -> int:
        """Delete a node; returns the messages that went with it."""

    def peek(self, name: str, count: int) -> list[bytes]:
        """The first messages, encoded, without taking them."""

    def purge(self, name: str) -> int:
        """Drop what waits; returns how many."""

    def move(self, name: str, to: str, count: int) -> int:
        """Move what waits to another node; returns how many."""


class _Failed(Exception):
    """An operation that ends with a status of its own."""

    def __init__(self, status: int, description: str) -> None:
        super().__init__(description)
        self.status = status
        self.description = description


def _reply(status: int, body: Any, description: str, condition: str | None = None) -> Message:
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


def _whole(message: Message, name: str, default: int, most: int) -> int:
    value = _request(message, name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Failed(400, f"{name} must be a whole number, not {value!r:.50}")
    return min(int(value), most)


class Management:
    """Answers management requests about the nodes of a broker."""

    def __init__(self, managed: Callable[[str], Managed]) -> None:
        """*managed* gives the nodes of a virtual host."""
        self._managed = managed
        self._operations: dict[str, Callable[[Managed, Message], tuple[int, Any]]] = {
            "CREATE": self._create,
            "READ": self._read,
            "DELETE": self._delete,
            "QUERY": self._query,
            "GET-TYPES": self._get_types,
            "GET-OPERATIONS": self._get_operations,
            "PEEK": self._peek,
            "PURGE": self._purge,
            "MOVE": self._move,
            "CURSOR": self._cursor,
        }
        #: Those that wait until what they did is kept.
        self._lasting: dict[str, Callable[[Managed, Message], Awaitable[tuple[int, Any]]]] = {
            "SET-CURSOR": self._set_cursor,
            "HOLD": self._hold,
        }

    async def answer(self, message: Message, virtual_host: str = "") -> Message:
        """The reply to *message*; what cannot be done is said in it."""
        operation = _request(message, "operation")
        name = operation if isinstance(operation, str) else ""
        perform = self._operations.get(name)
        lasting = self._lasting.get(name)
        try:
            if perform is not None:
                status, body = perform(self._managed(virtual_host), message)
            elif lasting is not None:
                status, body = await lasting(self._managed(virtual_host), message)
            else:
                known = ", ".join([*self._operations, *self._lasting])
                raise _Failed(501, f"no operation {operation!r:.50}; there are {known}")
        except _Failed as failed:
            return _reply(failed.status, {}, failed.description, "amqp:invalid-field")
        except AmqpError as error:
            status = _STATUS.get(error.condition, 400)
            return _reply(status, {}, error.description, error.condition)
        return _reply(status, body, "OK")

    @staticmethod
    def _name(message: Message) -> str:
        name = _request(message, "name")
        if name is None:
            name = _request(message, "identity")
        if not isinstance(name, str) or not name:
            raise _Failed(400, "the request names no entity: set the property name")
        return name

    def _create(self, managed: Managed, message: Message) -> tuple[int, Any]:
        attributes = message.body if message.body is not None else {}
        if not isinstance(attributes, Mapping):
            raise _Failed(400, "the body must be a map of attributes")
        return 201, managed.create(self._name(message), {str(k): v for k, v in attributes.items()})

    def _read(self, managed: Managed, message: Message) -> tuple[int, Any]:
        return 200, managed.details(self._name(message))

    def _delete(self, managed: Managed, message: Message) -> tuple[int, Any]:
        managed.delete(self._name(message))
        return 204, {}

    def _query(self, managed: Managed, message: Message) -> tuple[int, Any]:
        wanted_type = _request(message, "entityType")
        if wanted_type not in (None, NODE_TYPE, VIRTUAL_HOST_TYPE):
            raise _Failed(400, f"there are no entities of the type {wanted_type!r:.100}")
        rows = managed.virtual_hosts() if wanted_type == VIRTUAL_HOST_TYPE else managed.nodes()
        offset = _whole(message, "offset", 0, len(rows))
        count = _whole(message, "count", len(rows), len(rows))
        wanted: list[str] = []
        if isinstance(message.body, Mapping):
            names = message.body.get("attributeNames") or []
            if isinstance(names, list):
                wanted = [str(name) for name in names[:200]]
        if not wanted:
            wanted = sorted({name for row in rows for name in row})
        results = [[row.get(name) for name in wanted] for row in rows[offset : offset + count]]
        return 200, {"attributeNames": wanted, "results": results}

    def _get_types(self, managed: Managed, message: Message) -> tuple[int, Any]:
        return 200, {NODE_TYPE: [], SELF_TYPE: [], VIRTUAL_HOST_TYPE: []}

    def _get_operations(self, managed: Managed, message: Message) -> tuple[int, Any]:
        return 200, {
            NODE_TYPE: {
                "CREATE": [],
                "READ": [],
                "DELETE": [],
                "PEEK": ["count"],
                "PURGE": [],
                "MOVE": ["to", "count"],
                "CURSOR": ["group"],
                "SET-CURSOR": ["group", "incarnation"],
                "HOLD": ["holder", "seconds", "incarnation"],
            },
            SELF_TYPE: {
                "QUERY": ["entityType", "offset", "count"],
                "GET-TYPES": [],
                "GET-OPERATIONS": [],
            },
        }

    def _peek(self, managed: Managed, message: Message) -> tuple[int, Any]:
        found: list[bytes] = []
        size = 0
        for payload in managed.peek(self._name(message), _whole(message, "count", 1, PEEK_MAX)):
            size += len(payload)
            if size > PEEK_BYTES_MAX and found:
                break
            found.append(payload)
        return 200, found

    def _purge(self, managed: Managed, message: Message) -> tuple[int, Any]:
        return 200, {"messages": managed.purge(self._name(message))}

    def _move(self, managed: Managed, message: Message) -> tuple[int, Any]:
        to = _request(message, "to")
        if not isinstance(to, str) or not to:
            raise _Failed(400, "where to? set the property to")
        count = _whole(message, "count", 0xFFFFFFFF, 0xFFFFFFFF)
        return 200, {"messages": managed.move(self._name(message), to, count)}

    def _cursor(self, managed: Managed, message: Message) -> tuple[int, Any]:
        return 200, dict(managed.cursor(self._name(message), _text(message, "group")))

    async def _set_cursor(self, managed: Managed, message: Message) -> tuple[int, Any]:
        await managed.set_cursor(
            self._name(message), _text(message, "group"), _offsets(message), _incarnation(message)
        )
        return 200, {}

    async def _hold(self, managed: Managed, message: Message) -> tuple[int, Any]:
        seconds = _request(message, "seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise _Failed(400, "for how long? set the property seconds")
        await managed.hold(
            self._name(message),
            _text(message, "holder"),
            _offsets(message),
            float(seconds),
            _incarnation(message),
        )
        return 200, {}


def _text(message: Message, name: str) -> str:
    value = _request(message, name)
    if not isinstance(value, str) or not value:
        raise _Failed(400, f"set the property {name} to a text")
    return value


def _incarnation(message: Message) -> str | None:
    return None if _request(message, "incarnation") is None else _text(message, "incarnation")


def _offsets(message: Message) -> dict[int, int]:
    """The body: a map of partitions and offsets."""
    body = message.body
    if not isinstance(body, Mapping) or not all(
        isinstance(number, int) and not isinstance(number, bool)
        for entry in body.items()
        for number in entry
    ):
        raise _Failed(400, "the body must be a map of partitions and offsets")
    return {int(partition): int(offset) for partition, offset in body.items()}


def attributes(struct: msgspec.Struct) -> dict[str, Any]:
    """A struct's fields as a map that any AMQP peer can read; absent values are left out."""
    built = msgspec.to_builtins(struct)
    return {name: value for name, value in built.items() if value is not None}
