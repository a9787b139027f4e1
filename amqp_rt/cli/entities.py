"""``amqp-rt connections``, ``sessions``, ``links``, ``subscriptions``, ``termini``, ``schedules`` and ``transactions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from ..container.managing import ManagementClient
from ..management.branches import RESOLVE_BRANCH
from .listing import LISTINGS, Output, ask, json_option, list_options, show_entity, show_list
from .running import Where, client_options
from .tables import cell


def _group(
    name: str,
    what: str,
    closes: str,
    shown: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> click.Group:
    """Return the group *name* with the commands list, show and close.

    Args:
        name: Name of the group.
        what: What one entity is called.
        closes: Help of the command that ends one.
        shown: Returns a row as the table has it.
    """
    listing = LISTINGS[f"{name} list"]
    group = click.Group(name, help=f"List the {name} of a running broker, show one, or close one.")

    @group.command("list", help=f"List {name}.")
    @client_options
    @list_options
    def list_(where: Where, output: Output) -> None:
        show_list(where, output, listing, shown=shown)

    @group.command(help=f"Show {what} NAME, as the list names it.")
    @click.argument("name")
    @client_options
    @json_option
    def show(name: str, where: Where, as_json: bool) -> None:
        show_entity(_read(where, listing.type_name, name), as_json=as_json)

    @group.command(help=closes)
    @click.argument("name")
    @client_options
    def close(name: str, where: Where) -> None:
        async def work(there: ManagementClient) -> None:
            await there.delete(listing.type_name, name)

        ask(where, work)

    return group


def _read(where: Where, kind: str, name: str) -> Mapping[str, Any]:
    async def work(there: ManagementClient) -> Mapping[str, Any]:
        return await there.read(kind, name)

    return ask(where, work)


connections = _group(
    "connections", "connection", "Close connection NAME, as the list names it: it gets an error."
)
sessions = _group("sessions", "session", "End session NAME, as the list names it.")
links = _group("links", "link", "Detach link NAME, as the list names it.")
subscriptions = _group(
    "subscriptions", "subscription", "Detach the link of subscription NAME, as the list names it."
)


termini = _group(
    "termini",
    "terminus",
    "End terminus NAME, to which no link is attached, with its unsettled deliveries.",
)


def _schedule(row: dict[str, Any]) -> dict[str, Any]:
    every = row.get("every_s")
    times = f"{row.get('cron')} {row.get('tz')}" if every is None else f"every {every:g} s"
    return {**_with_time(row, "next_at"), "times": times}


def _with_time(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return *row* with the time *key*, in seconds since 1970, as a text in local time."""
    at = row.get(key)
    text = "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(at)))
    return {**row, key: text}


schedules = _group(
    "schedules",
    "schedule",
    "Delete schedule NAME: no more messages are sent. amqp-rt node create makes one.",
    shown=_schedule,
)


@click.group()
def transactions() -> None:
    """List branches of distributed transactions that are in doubt, show one, or complete one; list open transactions.

    A branch in doubt is prepared, and holds its messages until its coordinator commits it or rolls it back. An open
    transaction is one that a client has declared and not discharged.
    """


_BRANCHES = LISTINGS["transactions list"]


@transactions.command("list")
@client_options
@list_options
def _list(where: Where, output: Output) -> None:
    """List branches that are in doubt, and those that an operator has completed."""
    show_list(where, output, _BRANCHES, shown=lambda row: _with_time(row, "prepared_at"))


@transactions.command("show")
@click.argument("name")
@client_options
@json_option
def _show(name: str, where: Where, as_json: bool) -> None:
    """Show branch NAME, as the list names it."""
    show_entity(_read(where, _BRANCHES.type_name, name), as_json=as_json)


@transactions.command()
@click.argument("name")
@click.argument("outcome", type=click.Choice(["commit", "rollback"]))
@client_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def resolve(name: str, outcome: str, where: Where, yes: bool) -> None:
    """Commit branch NAME, or roll it back, in place of a coordinator that does not return.

    Other branches of the same transaction may have ended in another way.
    """
    if not yes:
        _read(where, _BRANCHES.type_name, name)
        click.confirm(f"Decide {outcome} for {cell(name)} in place of its coordinator?", abort=True)

    async def work(there: ManagementClient) -> None:
        await there.request(RESOLVE_BRANCH, type=_BRANCHES.type_name, name=name, outcome=outcome)

    ask(where, work)


@transactions.command("close")
@click.argument("name")
@client_options
def _close(name: str, where: Where) -> None:
    """Forget branch NAME, which an operator has completed: its coordinator is not told any more."""

    async def work(there: ManagementClient) -> None:
        await there.delete(_BRANCHES.type_name, name)

    ask(where, work)


_OPEN = LISTINGS["transactions open"]


@transactions.command("open")
@client_options
@list_options
def _open(where: Where, output: Output) -> None:
    """List transactions that clients have declared and not discharged."""
    show_list(where, output, _OPEN)


@transactions.command()
@click.argument("name")
@client_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def rollback(name: str, where: Where, yes: bool) -> None:
    """Roll back open transaction NAME, as the list of open ones names it. Its client learns of that when it commits."""
    _read(where, _OPEN.type_name, name)
    if not yes:
        click.confirm(f"Roll back transaction {cell(name)}?", abort=True)

    async def work(there: ManagementClient) -> None:
        await there.delete(_OPEN.type_name, name)

    ask(where, work)
