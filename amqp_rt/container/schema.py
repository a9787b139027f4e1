"""Typed nodes as an AsyncAPI 3.0 document.

Channels are addresses, operations are handlers, and the schemas of payloads are those by which
msgspec validates them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from .routes import Route

#: Action of the application at a channel by kind of node: a source sends its messages.
_ACTIONS: Final = {"node": "receive", "link": "receive", "rpc": "receive", "source": "send"}


def asyncapi(title: str, routes: Sequence[Route], *, version: str = "1.0.0") -> dict[str, Any]:
    """Return the document for *routes*, as plain dicts and lists, ready for JSON.

    A payload without a type, or of a type without a msgspec schema, is described by its name only.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas = _Schemas(_types(routes))
    for route in routes:
        key = _key(route.address, channels)
        name = _key(f"{route.kind}.{route.address}", operations)
        reference = {"$ref": f"#/channels/{key}"}
        channel: dict[str, Any] = {"address": route.address, "messages": {}}
        if route.pattern.captures:
            channel["parameters"] = {capture: {} for capture in route.pattern.captures}
        channels[key] = channel
        operation: dict[str, Any] = {"action": _ACTIONS[route.kind], "channel": reference}
        if documentation := inspect.getdoc(route.function):
            operation["summary"] = documentation.partition("\n")[0]
        if route.kind == "source":
            operation["messages"] = _message(channel, messages, key, name, schemas[route.reply])
        elif route.payload is not None and not route.streaming:
            operation["messages"] = _message(channel, messages, key, name, schemas[route.payload])
        else:
            operation["messages"] = _message(channel, messages, key, name, None)
        if route.kind == "rpc":
            reply = _message(channel, messages, key, f"{name}.reply", schemas[route.reply])
            operation["reply"] = {
                "address": {"location": "$message.header#/reply-to"},
                "messages": reply,
            }
            if route.streams:
                operation["reply"]["x-streamed"] = True
        operations[name] = operation
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas.components},
    }


def _types(routes: Iterable[Route]) -> list[Any]:
    found: list[Any] = []
    for route in routes:
        for kind in (route.payload, route.reply):
            if kind not in (None, Any) and kind not in found:
                found.append(kind)
    return found


def _message(
    channel: dict[str, Any], messages: dict[str, Any], key: str, name: str, schema: Any
) -> list[dict[str, str]]:
    """Describe one message, and return the references to it for an operation."""
    messages[name] = {"name": name} if schema is None else {"name": name, "payload": schema}
    channel["messages"][name] = {"$ref": f"#/components/messages/{name}"}
    return [{"$ref": f"#/channels/{key}/messages/{name}"}]


class _Schemas:
    """JSON schemas of payload types, each described once."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.components: dict[str, Any] = {}
        self._found: list[tuple[Any, Any]] = []
        known = [kind for kind in kinds if self._has_schema(kind)]
        schemas, components = msgspec.json.schema_components(
            known, ref_template="#/components/schemas/{name}"
        )
        self.components = dict(components)
        self._found = list(zip(known, schemas, strict=True))

    @staticmethod
    def _has_schema(kind: Any) -> bool:
        try:
            msgspec.json.schema_components([kind])
        except TypeError:
            return False
        return True

    def __getitem__(self, kind: Any) -> Any:
        """Return the schema of *kind*; None if it has none."""
        if kind is None:
            return {"type": "null"}
        for known, schema in self._found:
            if known == kind:
                return schema
        return None


def _key(address: str, taken: dict[str, Any]) -> str:
    """Return an unused key for *address* from the characters that AsyncAPI allows."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "_", address).strip("_") or "root"
    key = base
    number = 2
    while key in taken:
        key = f"{base}_{number}"
        number += 1
    return key
