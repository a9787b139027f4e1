"""The JSON API below ``/api/v1/``: management and messages for programs.

Each request becomes operations at ``$management``, or links, of the session's own connection, which judges the user's rights.
Names in paths are percent-encoded, slashes too, so that ``work/dead`` is ``/api/v1/nodes/work%2Fdead``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
import trio
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from amqp_rt import Broker
from amqp_rt.cli.tables import plain
from amqp_rt.management.answering import KnownType

from . import reading
from .deleting import delete
from .messages import Publication
from .openapi import document
from .pieces import InPieces
from .problems import Problem
from .publishing import publish
from .resources import PEEK, PUBLISH, RESOURCES, Act, Resource
from .server import Receive, Scope, Send
from .sessions import WebSession

BASE: Final = "/api/v1"
#: Rows of a page by default.
_LIMIT: Final = 100
#: Rows that are converted and encoded in one step of the event loop.
_ROWS_IN_A_TURN: Final = 50
#: Octets of a body with attributes or arguments: they are decoded and encoded in one step.
_ATTRIBUTES_MAX: Final = 64 * 1024
#: Attributes that a query may ask for.
_FIELDS_MAX: Final = 100


class _Rest(Convertor[str]):
    """The rest of a path, whatever is in it: names may have line breaks, which ``path`` does not take."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """Return *value*."""
        return value

    def to_string(self, value: str) -> str:
        """Return *value*."""
        return value


register_url_convertor("rest", _Rest())


class Api:
    """Answers to requests of programs.

    Args:
        broker: The broker, whose types of management are the resources.
    """

    def __init__(self, broker: Broker) -> None:
        self._types: Mapping[str, KnownType] = (
            {} if broker.management is None else broker.management.known_types()
        )
        self._resources = {
            name: each for name, each in RESOURCES.items() if each.type_name in self._types
        }
        self._rows_max = broker.container.limits.http_rows_max
        self._document: bytes | None = None

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the API."""
        # Not a function, for which the router would have one list of methods: each resource has its own.
        return [Route(BASE + "/{rest:rest}", self)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request of *scope*, as an application of ASGI."""
        response = await self.answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            Problem: The request is refused.
            AmqpError: The broker refused an operation.
        """
        session: WebSession = request.state.session
        match _segments(request):
            case [""]:
                _only(request, "GET")
                return _json({"resources": [*self._resources, "messages", "journal"]})
            case ["openapi.json"]:
                _only(request, "GET")
                return Response(self._described(), media_type="application/json")
            case ["session"]:
                _only(request, "GET")
                return _json(
                    {
                        "user": session.user,
                        "virtual_host": session.virtual_host,
                        "csrf": session.csrf if session.has_cookie else None,
                        "read_only": request.state.door.read_only,
                    }
                )
            case ["access"]:
                _only(request, "GET")
                return await self._explain(request, session)
            case ["messages"]:
                _only(request, "GET")
                rows = await reading.peek(
                    session,
                    _text(request, "node"),
                    _number(request, "limit", 10, reading.COUNT_MAX),
                    msgspec.json.encode,
                )
                return _items(rows, next=None, total=len(rows))
            case ["journal"]:
                _only(request, "GET")
                return await self._journal(request, session)
            case [name]:
                return await self._list(request, session, self._resource(name))
            case [name, entity] if entity:
                return await self._entity(request, session, self._resource(name), entity)
            case [name, entity, act] if entity:
                return await self._act(request, session, self._resource(name), entity, act)
        raise Problem(404, "there is no such resource", "amqp:not-found")

    def _resource(self, name: str) -> Resource:
        found = self._resources.get(name)
        if found is None:
            known = ", ".join([*self._resources, "messages", "journal"])
            raise Problem(404, f"no resource {name!r:.50}; there are {known}", "amqp:not-found")
        return found

    def _described(self) -> bytes:
        if self._document is None:
            self._document = msgspec.json.encode(document(self._resources, self._types))
        return self._document

    # --- collections ---------------------------------------------------------------------------

    async def _list(self, request: Request, session: WebSession, resource: Resource) -> Response:
        _only(request, "GET")
        asked = request.query_params
        fields = [each for each in asked.get("fields", "").split(",") if each][:_FIELDS_MAX]
        page = await session.management.page(
            resource.type_name,
            sort=asked.get("sort", "name"),
            q=asked.get("q", ""),
            after=asked.get("after"),
            count=_number(request, "limit", _LIMIT, self._rows_max),
            attributes=["name", *(each for each in fields if each != "name")] if fields else (),
        )
        rows: list[bytes] = []
        for row in page.rows:
            found = plain(row)
            rows.append(msgspec.json.encode(found if fields else self._filled(resource, found)))
            if not len(rows) % _ROWS_IN_A_TURN:
                await trio.lowlevel.checkpoint()
        return _items(rows, next=page.next, total=page.total)

    def _filled(self, resource: Resource, row: dict[str, Any]) -> dict[str, Any]:
        """Return *row* with null for the attributes that management leaves out."""
        known = self._types[resource.type_name]
        for struct in (known.attributes, *known.statistics):
            if struct is not None:
                for name in struct.__struct_fields__:
                    row.setdefault(name, None)
        return row

    async def _journal(self, request: Request, session: WebSession) -> Response:
        after = request.query_params.get("after")
        rows, following = await reading.records(
            session,
            reading.JOURNAL,
            None if after is None else _number(request, "after", 0, 2**63 - 1, least=0),
            _number(request, "limit", _LIMIT, reading.COUNT_MAX),
            msgspec.json.encode,
        )
        return _items(rows, next=None if following is None else str(following))

    async def _explain(self, request: Request, session: WebSession) -> Response:
        given = {name: _text(request, name) for name in ("right", "address")}
        if user := request.query_params.get("user"):
            given["user"] = user
        reply = await session.management.request("EXPLAIN", **given)
        return _json(plain(reply.body))

    # --- entities ------------------------------------------------------------------------------

    async def _entity(
        self, request: Request, session: WebSession, resource: Resource, name: str
    ) -> Response:
        methods = resource.methods(self._types)
        operation = methods.get("GET" if request.method == "HEAD" else request.method)
        if operation is None:
            raise _not_allowed([*methods])
        if operation == "DELETE":
            await delete(request.state.door.broker, session, resource.type_name, name)
            return Response(status_code=204)
        body = await _object(request) if operation in ("CREATE", "UPDATE") else None
        reply = await session.management.request(
            operation, body, type=resource.type_name, name=name
        )
        row = self._filled(resource, plain(reply.body))
        return _json(row, 201 if operation == "CREATE" else 200)

    async def _act(
        self, request: Request, session: WebSession, resource: Resource, name: str, text: str
    ) -> Response:
        act = next((each for each in resource.acts if each.name == text), None)
        if act is None:
            known = ", ".join(each.name for each in resource.acts) or "none"
            raise Problem(404, f"no operation {text!r:.50}; there are {known}", "amqp:not-found")
        if act is PEEK:
            _only(request, "GET")
            count = _number(request, "count", 1, reading.COUNT_MAX)
            return _items(await reading.peek(session, name, count, msgspec.json.encode))
        _only(request, "POST")
        if act is PUBLISH:
            publication = _decoded(await _body(request), Publication)
            await publish(request, name, publication.message())
            return _json({"outcome": "accepted"})
        given = _arguments(act, await _object(request, empty=True))
        reply = await session.management.request(
            act.operation, type=resource.type_name, name=name, **given
        )
        return _json(plain(reply.body))


def _arguments(act: Act, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body as application-properties of the operation *act*."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "string": lambda value: isinstance(value, str),
    }
    for name, value in given.items():
        if name not in act.arguments:
            known = ", ".join(act.arguments) or "none"
            raise Problem(400, f"{act.name} has no argument {name!r:.50}; there are {known}")
        if not kinds[act.arguments[name]](value):
            raise Problem(400, f"{name} is a {act.arguments[name]}, not {value!r:.50}")
    for name in act.required:
        if name not in given:
            raise Problem(400, f"{act.name} needs {name}")
    return dict(given)


def _segments(request: Request) -> list[str]:
    """Return the segments of the path below :data:`BASE`, decoded: a slash within one is encoded."""
    raw: bytes = request.scope["raw_path"]
    try:
        return [unquote_to_bytes(each).decode() for each in raw.split(b"/")[3:]]
    except UnicodeDecodeError:
        raise Problem(400, "the percent-encoded characters of the path are not UTF-8") from None


def _only(request: Request, method: str) -> None:
    allowed = ("GET", "HEAD") if method == "GET" else (method,)
    if request.method not in allowed:
        raise _not_allowed([method])


def _not_allowed(methods: list[str]) -> Problem:
    if "GET" in methods:
        methods = [*methods, "HEAD"]
    return Problem(405, "there is no such method here", headers={"allow": ", ".join(methods)})


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise Problem(400, f"the query needs {name}=")
    return value


def _number(request: Request, name: str, default: int, most: int, *, least: int = 1) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise Problem(400, f"{name} is a whole number from {least} to {most}, not {text!r:.50}")
    return int(text)


async def _body(request: Request) -> bytes:
    """Return the body, which has to be announced as JSON: forms of other sites cannot do so."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    if body and kind != "application/json":
        raise Problem(415, f"the body is application/json, not {kind!r:.50}")
    return body


async def _object(request: Request, *, empty: bool = False) -> dict[str, Any]:
    body = await _body(request)
    if len(body) > _ATTRIBUTES_MAX:
        raise Problem(413, f"attributes have at most {_ATTRIBUTES_MAX} octets")
    return {} if empty and not body else _decoded(body, dict[str, Any])


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Problem(400, f"the body is malformed: {error!s:.200}") from None


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _items(rows: Sequence[bytes], **more: Any) -> Response:
    """Return the answer with *rows*, which are encoded, as its items."""
    pieces = [b'{"items":[']
    pieces += [b"," + row if number else row for number, row in enumerate(rows)]
    pieces.append(b"]," + msgspec.json.encode(more)[1:] if more else b"]}")
    return InPieces(pieces, media_type="application/json")
