"""``amqp-rt access``: which rule lets a user do something at an address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from ..container.managing import ManagementClient
from ..errors import AmqpError
from ..events import Peer
from ..management.explaining import EXPLAIN
from ..security.access import Access, explain, rights_of
from .listing import ask, json_option
from .running import Where, client_options
from .tables import cell, plain

#: Stands for peers without a user name.
_NO_USER: Final = "-"
#: Exit code of ``explain``: the right is not there.
REFUSED: Final = 3


@click.group()
def access() -> None:
    """Ask for rights: which rule lets a user do something at an address."""


@access.command("explain")
@click.argument("user")
@click.argument("right", type=click.Choice(["send", "listen", "manage"]))
@click.argument("address")
@client_options
@click.option(
    "--access",
    "file",
    metavar="FILE",
    help="Judge by the rules of this TOML file, and not by those of the broker at --url.",
)
@click.option(
    "--virtual-host",
    metavar="NAME",
    default="",
    help="With --access: the virtual host of the connection; at a broker it is that of --url.",
)
@json_option
def explain_(
    user: str,
    right: str,
    address: str,
    where: Where,
    file: str | None,
    virtual_host: str,
    as_json: bool,
) -> None:
    """Tell whether USER has RIGHT at ADDRESS, and which rule decides that. USER - is a peer without a user name.

    The code that judges connections answers, with the rules of the broker at --url, which takes the right to manage
    $management there, or with those of a FILE. Tokens are left out. Exit code 3: the right is not there.
    """
    who = None if user == _NO_USER else user
    found: Mapping[str, Any]
    if file is None:
        if virtual_host:
            raise click.UsageError("--virtual-host goes with --access; at a broker it is in --url")
        found = _ask_broker(where, who, right, address)
    else:
        try:
            rules = Access.load(file)
        except AmqpError as error:
            raise click.UsageError(error.description) from None
        peer = Peer(user=who, virtual_host=virtual_host)
        found = msgspec.to_builtins(explain(rules, peer, rights_of([right]), address))
    if as_json:
        click.echo(json.dumps(plain(found)))
    else:
        verdict = "yes" if found["allowed"] else "no"
        click.echo(cell(f"{verdict}: {found['reason']}"))
    if not found["allowed"]:
        raise click.exceptions.Exit(REFUSED)


def _ask_broker(where: Where, who: str | None, right: str, address: str) -> Mapping[str, Any]:
    given = {"right": right, "address": address} | ({} if who is None else {"user": who})

    async def work(there: ManagementClient) -> Mapping[str, Any]:
        body: Mapping[str, Any] = (await there.request(EXPLAIN, **given)).body
        return body

    return ask(where, work)
