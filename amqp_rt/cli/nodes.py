"""``amqp-rt node``: manage the nodes of a running broker through its ``$management``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from ..broker.declarations import declared_by
from ..broker.nodes import KINDS, LOG, declaration_of
from ..container.container import Container
from ..container.managing import ManagementClient
from ..errors import AmqpError
from ..management.node import NODE_TYPE
from ..message import Message
from ..values import Described, Symbol
from .listing import LISTINGS, Output, ask, json_option, list_options, show_entity, show_list
from .messages import for_stdout, shown
from .running import Where, client_options, run
from .tables import cell


def _manage(where: Where, operation: str, name: str, **arguments: Any) -> Any:
    """Perform a management operation on a node; return the body of the reply."""

    async def work(there: ManagementClient) -> Any:
        reply = await there.request(operation, type=NODE_TYPE, name=name, **arguments)
        return reply.body

    return ask(where, work)


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
@list_options
def list_(where: Where, everything: bool, output: Output) -> None:
    """List queues, topics and logs with their messages and links."""
    show_list(
        where,
        output,
        LISTINGS["node list"],
        wanted=lambda row: everything or not row["dynamic"],
    )


@node.command()
@client_options
@list_options
def hosts(where: Where, output: Output) -> None:
    """List virtual hosts: all of them from the default one, otherwise the current one."""
    show_list(
        where,
        output,
        LISTINGS["node hosts"],
        shown=lambda row: {**row, "name": row["name"] or "(default)"},
    )


@node.command()
@click.argument("name")
@client_options
@json_option
def show(name: str, where: Where, as_json: bool) -> None:
    """Show the declaration and statistics of a node."""
    show_entity(_manage(where, "READ", name), as_json=as_json)


@node.command()
@click.argument("declarations", nargs=-1, required=True, metavar="KIND:NAME[?OPTIONS]...")
@client_options
def create(declarations: tuple[str, ...], where: Where) -> None:
    """Declare nodes, such as queue:orders, topic:prices, log:clicks or 'queue:work?priorities=5&dead_letter=dead'.

    A node that exists already with the same options stays as it is; one with others is an error.
    """
    try:
        declared = [declared_by(text) for text in declarations]
    except AmqpError as error:
        raise click.UsageError(error.description) from None

    async def work(there: ManagementClient) -> None:
        for each in declared:
            await there.create(each)

    ask(where, work)


@node.command()
@click.argument("name")
@click.argument("options", nargs=-1, required=True, metavar="OPTION=VALUE...")
@client_options
def update(name: str, options: tuple[str, ...], where: Where) -> None:
    """Change options of node NAME, such as max_deliveries=5; the others stay as they are.

    OPTION= without a value takes the option back to its default.
    """
    given: dict[str, str] = {}
    for text in options:
        option, equals, value = text.partition("=")
        if not equals or not option:
            raise click.UsageError(f"{text!r} is not OPTION=VALUE")
        given[option] = value

    async def work(there: ManagementClient) -> None:
        kind = str((await there.read(NODE_TYPE, name))["kind"])
        if kind not in KINDS:
            raise click.ClickException(f"{name!r} is a {kind}, which has no options")
        # An option without a value is left out here, so that the declaration has its default.
        known = KINDS[kind].__struct_fields__
        fields = {key: value for key, value in given.items() if value or key not in known}
        try:
            declared = declaration_of({**fields, "kind": kind, "name": name}, strict=False)
        except ValueError as error:
            raise click.UsageError(f"{name!r}: {error}") from None
        # Only what changes is sent: others may have changed the rest meanwhile.
        changed = {key: msgspec.to_builtins(getattr(declared, key)) for key in given}
        await there.request("UPDATE", changed, type=NODE_TYPE, name=name)

    ask(where, work)


@node.command()
@click.argument("name")
@client_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(name: str, where: Where, yes: bool) -> None:
    """Delete a node and its messages. This cannot be undone."""
    if not yes:
        found: Mapping[str, Any] = _manage(where, "READ", name)
        click.confirm(
            f"Delete {cell(found['kind'])} {cell(name)} with {found.get('available', 0)} messages?",
            abort=True,
        )
    _manage(where, "DELETE", name)


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
    found = _manage(where, "READ", name)
    if found["kind"] == LOG:
        payloads = _records(where, name, min(count, found["available"]))
    else:
        payloads = _manage(where, "PEEK", name, count=count)
    for payload in payloads:
        try:
            click.echo(for_stdout(shown(Message.decode(payload), whole=whole)))
        except AmqpError as error:
            click.echo(f"({len(payload)} bytes that are no message: {error})", err=True)


@node.command()
@click.argument("name")
@client_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def purge(name: str, where: Where, yes: bool, as_json: bool) -> None:
    """Delete all waiting messages of a queue, or the records of a log. This cannot be undone."""
    if not yes:
        # Report a mistyped name before asking for confirmation.
        _manage(where, "READ", name)
        click.confirm(f"Drop every message that waits in {name}?", abort=True)
    _report(_manage(where, "PURGE", name), "dropped", as_json=as_json)


@node.command()
@click.argument("name")
@click.argument("to")
@client_options
@click.option(
    "--count", type=click.IntRange(1), help="Number of messages; by default all that are waiting."
)
@json_option
def move(name: str, to: str, where: Where, count: int | None, as_json: bool) -> None:
    """Move waiting messages of queue NAME to node TO, in order."""
    arguments: dict[str, Any] = {"to": to}
    if count is not None:
        arguments["count"] = count
    _report(_manage(where, "MOVE", name, **arguments), "moved", as_json=as_json)


def _report(done: Mapping[str, Any], what: str, *, as_json: bool) -> None:
    """Write the number of messages that an operation changed."""
    if as_json:
        show_entity({"messages": done["messages"]}, as_json=True)
    else:
        click.echo(f"{cell(done['messages'])} messages {what}")
