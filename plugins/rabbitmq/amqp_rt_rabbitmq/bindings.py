"""Bindings in requests of RabbitMQ's clients: in the body, in the path of one binding, and in a query."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct

from amqp_rt.codec.primitives import write_value
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Topology

from .requests import HttpResponse, map_of, text_of, unquoted

#: Octets of the hash that stands for the arguments of a binding in its path.
_HASH_OCTETS: Final = 12

_Steps = Generator[int, None, HttpResponse]


class Named(Struct, frozen=True):
    """Bindings of a source exchange to a destination with a key, as a client names them."""

    source: str
    destination: str
    key: str
    is_exchange: bool
    #: Hash of the arguments; empty for none.
    arguments: str = ""

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Named:
        """Return what *parts* name: ``src``, ``key``, ``dstq`` or ``dste``, and ``args``.

        Raises:
            AmqpError: One of them is missing.
        """
        destinations = parts.keys() & {"dstq", "dste"}
        if not {"src", "key"} <= parts.keys() or len(destinations) != 1:
            raise AmqpError(
                "a binding is named by src, key, and dstq for a queue or dste for an exchange",
                condition="amqp:invalid-field",
            )
        [kind] = destinations
        return cls(parts["src"], parts[kind], parts["key"], kind == "dste", parts.get("args", ""))

    @property
    def path(self) -> str:
        """Path of one binding."""
        kind = "dste" if self.is_exchange else "dstq"
        source, destination, key = (
            quote(each, safe="") for each in (self.source, self.destination, self.key)
        )
        return f"/bindings/src={source};{kind}={destination};key={key};args={self.arguments}"


def read_query(query: str) -> Named:
    """Return the bindings that the *query* of ``GET /bindings`` asks for.

    A plus stands for itself: RabbitMQ's client for Java writes it so.
    """
    parts = (part.partition("=") for part in query.split("&"))
    return Named.of({name: unquoted(value) for name, _, value in parts})


def read_segment(segment: str) -> Named:
    """Return the binding that the last *segment* of the path ``/bindings/…`` names."""
    parts = (part.partition("=") for part in segment.split(";"))
    return Named.of({name: unquoted(value) for name, _, value in parts})


def hash_of(arguments: Mapping[str, object]) -> str:
    """Return the hash that stands for *arguments* in a path, in characters that need no encoding; empty for none."""
    if not arguments:
        return ""
    out = bytearray()
    write_value(out, [[name, value] for name, value in sorted(arguments.items())])
    return urlsafe_b64encode(hashlib.sha256(out).digest()[:_HASH_OCTETS]).decode()


def bind(topology: Topology, body: Mapping[str, Any]) -> HttpResponse:
    """Create the binding in *body* (``POST /bindings``)."""
    source, key = text_of(body, "source"), text_of(body, "binding_key")
    arguments = map_of(body.get("arguments") or {}, "arguments")
    if "destination_queue" in body:
        topology.bind_queue(text_of(body, "destination_queue"), source, key, arguments)
    elif "destination_exchange" in body:
        topology.bind_exchange(text_of(body, "destination_exchange"), source, key, arguments)
    else:
        raise AmqpError(
            "a binding has a destination_queue or a destination_exchange",
            condition="amqp:invalid-field",
        )
    return HttpResponse(204)


def listed(topology: Topology, query: str) -> _Steps:
    """Return the bindings that *query* asks for, in steps (``GET /bindings``)."""
    wanted = read_query(query)
    found = topology.arguments_of(
        wanted.source, wanted.destination, wanted.key, is_exchange=wanted.is_exchange
    )
    kind = "exchange" if wanted.is_exchange else "queue"
    entries: list[object] = []
    for arguments in found:
        one = Named(
            wanted.source, wanted.destination, wanted.key, wanted.is_exchange, hash_of(arguments)
        )
        entries.append(
            {
                "source": one.source,
                f"destination_{kind}": one.destination,
                "binding_key": one.key,
                "arguments": arguments,
                "location": one.path,
            }
        )
        yield 1
    return HttpResponse(200, entries)


def unbind(topology: Topology, segment: str) -> _Steps:
    """Remove the binding that *segment* of a path names, in steps; one that does not exist is no error."""
    wanted = read_segment(segment)
    arguments: Mapping[str, object] = {}
    if wanted.arguments:
        try:
            found = topology.arguments_of(
                wanted.source, wanted.destination, wanted.key, is_exchange=wanted.is_exchange
            )
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
            return HttpResponse(204)
        for arguments in found:
            yield 1
            if hash_of(arguments) == wanted.arguments:
                break
        else:
            return HttpResponse(204)
    removals: list[Callable[..., object]] = [topology.unbind_exchange]
    if not wanted.is_exchange:
        # RabbitMQ's client for Python names an exchange like a queue.
        removals.insert(0, topology.unbind_queue)
    for remove in removals:
        try:
            remove(wanted.destination, wanted.source, wanted.key, arguments)
            break
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
    return HttpResponse(204)
