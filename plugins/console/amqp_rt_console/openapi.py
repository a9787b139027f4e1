"""OpenAPI 3.1 document of the JSON API, from its resources and the types of management."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

import amqp_rt
from amqp_rt.broker import Log, Queue, Schedule, Topic
from amqp_rt.management.answering import KnownType

from .messages import Publication
from .reading import COUNT_MAX
from .resources import PEEK, PUBLISH, Act, Resource

_REF: Final = "#/components/schemas/{name}"
#: Declarations of nodes, by which they are created; each has a ``kind``.
_DECLARATIONS: Final = (Queue, Topic, Log, Schedule)
#: Statuses of successful answers, by method.
_SUCCESS: Final = {"GET": "200", "PUT": "201", "PATCH": "200", "DELETE": "204"}

Schema = dict[str, Any]


def document(resources: Mapping[str, Resource], types: Mapping[str, KnownType]) -> Schema:
    """Return the document for *resources*, whose attributes and operations are those of *types*."""
    structs: list[type[Struct]] = [Publication, *_DECLARATIONS]
    for each in resources.values():
        known = types[each.type_name]
        structs += [kind for kind in (known.attributes, *known.statistics) if kind is not None]
    _, schemas = msgspec.json.schema_components([*dict.fromkeys(structs)], ref_template=_REF)
    paths: Schema = {}
    for each in resources.values():
        paths |= _paths_of(each, types)
    paths |= _other_paths()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "amqp-rt",
            "version": amqp_rt.__version__,
            "description": "Management and messages of a broker, with the rights of the user who logs in.",
        },
        "servers": [{"url": "/api/v1"}],
        "security": [{"basic": []}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Problem": _problem()},
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _paths_of(resource: Resource, types: Mapping[str, KnownType]) -> Schema:
    row = _row_of(resource, types)
    plural = resource.name.replace("-", " ")
    paths: Schema = {
        f"/{resource.name}": {
            "get": _operation(
                f"list_{resource.name}",
                f"List {plural}.",
                _query(types[resource.type_name].orders),
                answer=_page_of(row),
            )
        }
    }
    name = _parameter("name", "path", {"type": "string", "minLength": 1}, required=True)
    entity: Schema = {}
    for method, operation in resource.methods(types).items():
        verb = operation.capitalize()
        entity[method.lower()] = _operation(
            f"{operation.lower()}_{resource.name}",
            f"{verb} one {resource.what}.",
            [name],
            answer=None if method == "DELETE" else row,
            status=_SUCCESS[method],
            body=_attributes_of(resource, method) if method in ("PUT", "PATCH") else None,
        )
    if entity:
        paths[f"/{resource.name}/{{name}}"] = entity
    for act in resource.acts:
        paths[f"/{resource.name}/{{name}}/{act.name}"] = _act(resource, act, name)
    return paths


def _act(resource: Resource, act: Act, name: Schema) -> Schema:
    called = f"{act.name}_{resource.name}"
    if act is PEEK:
        count = _parameter(
            "count", "query", {"type": "integer", "minimum": 1, "maximum": COUNT_MAX}
        )
        answer: Schema = {"type": "object", "required": ["items"]}
        return {"get": _operation(called, act.what, [name, count], answer=answer)}
    body: Schema = _referred(Publication)
    if act is not PUBLISH:
        body = {
            "type": "object",
            "properties": {
                # A required text is that of a name, none of which is empty.
                each: {"type": kind, "minLength": 1}
                if kind == "string" and each in act.required
                else {"type": kind}
                for each, kind in act.arguments.items()
            },
            "required": [*act.required],
            "additionalProperties": False,
        }
    answer = {"type": "object"}
    return {"post": _operation(called, act.what, [name], answer=answer, body=body)}


def _referred(kind: type[Struct]) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}


def _row_of(resource: Resource, types: Mapping[str, KnownType]) -> Schema:
    known = types[resource.type_name]
    if known.statistics:
        # Options of nodes are described where they are set.
        return {"allOf": [_referred(each) for each in known.statistics]}
    return (
        _referred(known.attributes)
        if known.attributes
        else {"type": "object", "required": ["name"]}
    )


def _attributes_of(resource: Resource, method: str) -> Schema:
    """Return what a body may have: the type checks it, since some attributes have values of several types."""
    if resource.name == "users":
        return {
            "type": "object",
            "properties": {
                "password": {
                    "type": "string",
                    "minLength": 1,
                    "description": "Without control characters and others that SASLprep (RFC 4013) prohibits.",
                }
            },
            "required": ["password"],
            "additionalProperties": False,
        }
    kinds = {"kind": {"enum": [each.__name__.lower() for each in _DECLARATIONS]}}
    options = sorted({name for each in _DECLARATIONS for name in each.__struct_fields__})
    found: Schema = {
        "type": "object",
        "properties": {**{each: {} for each in options}, **kinds},
        "additionalProperties": False,
    }
    if resource.name == "schedules" and method == "PUT":
        found["required"] = ["to"]
    return found


def _page_of(row: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["items", "next", "total"],
        "properties": {
            # With fields= a row has its name and these.
            "items": {
                "type": "array",
                "items": {"anyOf": [row, {"type": "object", "required": ["name"]}]},
            },
            "next": {"type": ["string", "null"], "description": "after= of the next page"},
            "total": {"type": "integer"},
        },
    }


def _other_paths() -> Schema:
    messages: Schema = {"type": "object", "required": ["items", "next"]}
    limit = _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": COUNT_MAX})
    text = {"type": "string", "minLength": 1}
    return {
        "/messages": {
            "get": _operation(
                "list_messages",
                "List the first messages of a queue, or records of a log.",
                [_parameter("node", "query", text, required=True), limit],
                answer=messages,
            )
        },
        "/journal": {
            "get": _operation(
                "list_journal",
                "List records of the life cycle of messages.",
                [limit, _parameter("after", "query", {"type": "integer", "minimum": 0})],
                answer=messages,
            )
        },
        "/access": {
            "get": _operation(
                "explain_access",
                "Tell whether a user has a right at an address, and which rules decide that.",
                [
                    _parameter("user", "query", {"type": "string"}),
                    _parameter(
                        "right", "query", {"enum": ["send", "listen", "manage"]}, required=True
                    ),
                    _parameter("address", "query", text, required=True),
                ],
                answer={"type": "object", "required": ["allowed", "reason"]},
            )
        },
        "/session": {
            "get": _operation(
                "read_session", "Read who is logged in.", [], answer={"type": "object"}
            )
        },
    }


def _operation(
    name: str,
    summary: str,
    parameters: list[Schema],
    *,
    answer: Schema | None,
    status: str = "200",
    body: Schema | None = None,
) -> Schema:
    success: Schema = {"description": "Done."}
    if answer is not None:
        success["content"] = {"application/json": {"schema": answer}}
    found: Schema = {
        "operationId": name.replace("-", "_"),
        "summary": summary,
        "parameters": parameters,
        "responses": {
            status: success,
            "default": {
                "description": "The request was refused.",
                "content": {
                    "application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}
                },
            },
        },
    }
    if body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return found


def _query(orders: Sequence[str]) -> list[Schema]:
    sort = {"type": "string", "pattern": f"^(-?({'|'.join(orders)}))?$"}
    return [
        _parameter("q", "query", {"type": "string"}, "Text that names contain."),
        _parameter("sort", "query", sort, "Attribute, with - in front in descending order."),
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 500}),
        _parameter(
            "after",
            "query",
            {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_=-]+$"},
            "next of the page before, which is not to be made otherwise.",
        ),
        _parameter("fields", "query", {"type": "string"}, "Attributes, with commas between them."),
    ]


def _parameter(
    name: str, where: str, schema: Schema, description: str = "", *, required: bool = False
) -> Schema:
    found: Schema = {"name": name, "in": where, "schema": schema}
    if description:
        found["description"] = description
    if required:
        found["required"] = True
    return found


def _problem() -> Schema:
    return {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "condition": {"type": "string", "description": "Condition of AMQP."},
        },
    }
