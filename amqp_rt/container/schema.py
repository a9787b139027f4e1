"""Typed nodes as an AsyncAPI 3.0 document.

Channels are addresses, operations are handlers, and the schemas of payloads are those by which
msgspec or a codec validates them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args, get_origin

import msgspec

from .codecs import Codec, Codecs, default_codecs
from .routes import Route

#: Action of the application at a channel by kind of node: a source sends its messages.
_ACTIONS: Final = {"node": "receive", "link": "receive", "rpc": "receive", "source": "send"}
#: References to schemas of components, and to those whose names another library has taken.
_REFERENCES: Final = "#/components/schemas/{name}"
_OTHER: Final = "codec."
_OTHER_REFERENCES: Final = f"#/components/schemas/{_OTHER}{{name}}"


def asyncapi(
    title: str, routes: Sequence[Route], *, version: str = "1.0.0", codecs: Codecs | None = None
) -> dict[str, Any]:
    """Return the document for *routes*, as plain dicts and lists, ready for JSON.

    A payload without a type, or of a type without a schema, is described by its name only. Types that *codecs*
    claim have the schemas of these.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas = _Schemas(_types(routes), codecs or default_codecs())
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
        if route.takes_items:
            operation["x-streamed"] = True
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

    def __init__(self, kinds: Sequence[Any], codecs: Codecs) -> None:
        self.components: dict[str, Any] = {}
        self._found: list[tuple[Any, Any]] = []
        self._codecs = codecs
        parts = [
            each for kind in kinds for each in (get_args(kind) if self._is_list(kind) else (kind,))
        ]
        known = [kind for kind in parts if codecs.claiming(kind) is None and self._has_schema(kind)]
        schemas, components = msgspec.json.schema_components(known, ref_template=_REFERENCES)
        self.components = dict(components)
        self._found = list(zip(known, schemas, strict=True))

    def _is_list(self, kind: Any) -> bool:
        """Whether *kind* stands for several arguments, of which codecs claim some."""
        if get_origin(kind) is not tuple:
            return False
        return any(self._codecs.claiming(each) is not None for each in get_args(kind))

    def _claimed(self, codec: Codec, kind: Any) -> Any:
        """Return the schema of *kind* by *codec*, whose definitions become components."""
        schema = codec.schema(kind, _REFERENCES)
        if schema is not None and self._has_others(schema):
            schema = codec.schema(kind, _OTHER_REFERENCES)
            if schema is not None and "$defs" in schema:
                schema["$defs"] = {
                    f"{_OTHER}{name}": each for name, each in schema["$defs"].items()
                }
        if schema is not None:
            schema = dict(schema)
            self.components.update(schema.pop("$defs", {}))
        return schema

    def _has_others(self, schema: Mapping[str, Any]) -> bool:
        """Whether msgspec, or another codec, has definitions of the same names."""
        return any(
            self.components.get(name, each) != each
            for name, each in schema.get("$defs", {}).items()
        )

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
        found: Any = None
        codec = self._codecs.claiming(kind)
        if self._is_list(kind):
            parts = [self[each] for each in get_args(kind)]
            found = {
                "type": "array",
                "prefixItems": [{} if each is None else each for each in parts],
            }
            found["minItems"] = found["maxItems"] = len(parts)
        elif codec is not None:
            found = self._claimed(codec, kind)
        if found is not None:
            self._found.append((kind, found))
        return found


def _key(address: str, taken: dict[str, Any]) -> str:
    """Return an unused key for *address* from the characters that AsyncAPI allows."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "_", address).strip("_") or "root"
    key = base
    number = 2
    while key in taken:
        key = f"{base}_{number}"
        number += 1
    return key
