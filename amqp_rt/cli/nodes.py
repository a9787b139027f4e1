"""``amqp-rt node``: manage the nodes of a running broker through its ``$management``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..broker.nodes import LOG
from ..container.container import Container
from ..errors import AmqpError
from ..management.answering import ADDRESS, SELF_TYPE
from ..management.node import NODE_TYPE, VIRTUAL_HOST_TYPE
from ..message import Message
from ..values import Described, Symbol
from .messages import for_stdout, shown
from .running import Where, client_options, run
from .tables import cell, table

#: Columns of the list.
_COLUMNS = ("name", "kind", "available", "acquired", "consumers", "producers", "enqueued")


def _manage(where: Where, operation: str, **arguments: Any) -> Any:
    """Perform a management operation; return the body of the reply."""
    kind = SELF_TYPE if operation == "QUERY" else NODE_TYPE
    asked = {"operation": operation, "type": kind, **arguments}

    async def main() -> Any:
        async with (
            Container("amqp-rt node") as container,
            where.connect(container) as peer,
        ):
            message = Message({}, application_properties=asked)
            reply = await peer.call(ADDRESS, message, reply=Message, within=10)
            return reply.body

    return run(main)


def _query(where: Where, kind: str) -> Mapping[str, Any]:
    """Return all entities of a type, queried page by page."""
    found: Mapping[str, Any] = _manage(where, "QUERY", entityType=kind)
    names = found["attributeNames"]
    results = page = found["results"]
    while page:
        more = _manage(where, "QUERY", entityType=kind, offset=len(results))
        page = [
            [dict(zip(more["attributeNames"], row, strict=True)).get(name) for name in names]
            for row in more["results"]
        ]
        results = [*results, *page]
    return {"attributeNames": names, "results": results}


def _records(where: Where, name: str, count: int) -> list[bytes]:
    """Return the first records of a log, received over a link."""
    begin: dict[object, object] = {
        Symbol("begin"): Described(Symbol("rabbitmq:stream-offset-spec"), "first")
    }

    async def main() -> list[bytes]:
        async with (
            Container("amqp-rt node") as container,
            where.connect(container) as peer,
            peer.receiver(name, filter=begin, credit=count or 1) as records,
        ):
            return [(await records.receive(within=10)).payload for _ in range(count)]

    return run(main)


@click.group()
def node() -> None:
    """Inspect and manage the nodes of a running broker."""


@node.command("list")
@client_options
@click.option(
    "--all", "everything", is_flag=True, help="Include dynamic nodes, such as reply queues."
)
def list_(where: Where, everything: bool) -> None:
    """List queues, topics and logs with their messages and links."""
    found = _query(where, NODE_TYPE)
    names = [str(name) for name in found["attributeNames"]]
    dynamic = names.index("dynamic")
    rows = [
        ["" if row[names.index(head)] is None else row[names.index(head)] for head in _COLUMNS]
        for row in found["results"]
        if everything or not row[dynamic]
    ]
    click.echo(table(sorted(rows), _COLUMNS))


@node.command()
@client_options
def hosts(where: Where) -> None:
    """List virtual hosts: all of them from the default one, otherwise the current one."""
    found = _manage(where, "QUERY", entityType=VIRTUAL_HOST_TYPE)
    names = [str(name) for name in found["attributeNames"]]
    heads = ("name", "nodes")
    rows = [[row[names.index(head)] for head in heads] for row in found["results"]]
    click.echo(table(sorted([name or "(default)", nodes] for name, nodes in rows), heads))


@node.command()
@click.argument("name")
@client_options
def show(name: str, where: Where) -> None:
    """Show the declaration and statistics of a node."""
    found: Mapping[str, Any] = _manage(where, "READ", name=name)
    width = max((len(cell(key)) for key in found), default=0)
    for key, value in found.items():
        click.echo(f"{cell(key).ljust(width)}  {cell(value)}")


@node.command()
@click.argument("name")
@client_options
@click.option(
    "--count",
    type=click.IntRange(1, 100),
    default=10,
    show_default=True,
    help="Number of messages.",
)
@click.option(
    "--json", "whole", is_flag=True, help="Print whole messages, one JSON object per line."
)
def peek(name: str, where: Where, count: int, whole: bool) -> None:
    """Show the first messages of a queue, or records of a log, without acquiring them."""
    found = _manage(where, "READ", name=name)
    if found["kind"] == LOG:
        payloads = _records(where, name, min(count, found["available"]))
    else:
        payloads = _manage(where, "PEEK", name=name, count=count)
    for payload in payloads:
        try:
            click.echo(for_stdout(shown(Message.decode(payload), whole=whole)))
        except AmqpError as error:
            click.echo(f"({len(payload)} bytes that are no message: {error})", err=True)


@node.command()
@click.argument("name")
@client_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def purge(name: str, where: Where, yes: bool) -> None:
    """Delete all waiting messages of a queue, or the records of a log. This cannot be undone."""
    if not yes:
        # Report a mistyped name before asking for confirmation.
        _manage(where, "READ", name=name)
        click.confirm(f"Drop every message that waits in {name}?", abort=True)
    click.echo(f"{cell(_manage(where, 'PURGE', name=name)['messages'])} messages dropped")


@node.command()
@click.argument("name")
@click.argument("to")
@client_options
@click.option(
    "--count", type=click.IntRange(1), help="Number of messages; by default all that are waiting."
)
def move(name: str, to: str, where: Where, count: int | None) -> None:
    """Move waiting messages of queue NAME to node TO, in order."""
    arguments: dict[str, Any] = {"name": name, "to": to}
    if count is not None:
        arguments["count"] = count
    click.echo(f"{cell(_manage(where, 'MOVE', **arguments)['messages'])} messages moved")
