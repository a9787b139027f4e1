"""``amqp-rt user``: users who may log in, of a file or of a running broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import click
from click.core import ParameterSource

from ..container.managing import ManagementClient
from ..errors import AmqpError
from ..security.identities import Users, parse_user, password_line, rewrite
from .listing import LISTINGS, Output, ask, list_options, show_list
from .running import Where, client_options

_HASHES = {"sha-1": "SHA-1", "sha-256": "SHA-256", "sha-512": "SHA-512"}
_USERS: Final = LISTINGS["user list"]

F = TypeVar("F", bound=Callable[..., Any])


class _Kept(NamedTuple):
    """Where users are kept: in a file, or, without one, at a running broker."""

    file: Path | None
    broker: Where


def _user_arguments(name: str | None) -> Callable[[F], F]:
    """Add the argument FILE, which may be left out, and *name* after it, to a command.

    The command gets them as ``kept`` and, if there is a *name*, ``name``.
    """

    def add_to(command: F) -> F:
        most = 1 if name is None else 2

        @wraps(command)
        def with_place(*args: Any, given: tuple[str, ...], where: Where, **options: Any) -> Any:
            if name is not None and not given:
                raise click.UsageError(f"Missing argument '{name}'.")
            if len(given) > most:
                raise click.UsageError(f"Got unexpected extra argument ({given[most]})")
            if name is not None:
                options["name"] = given[-1]
            file = Path(given[0]) if len(given) == most else None
            source = click.get_current_context().get_parameter_source("url")
            if file is not None and source is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    "users are in FILE or at the broker of --url: give one of them"
                )
            return command(*args, kept=_Kept(file, where), **options)

        shown = "[FILE]" if name is None else f"[FILE] {name}"
        return cast(
            "F", click.argument("given", nargs=-1, metavar=shown)(client_options(with_place))
        )

    return add_to


@click.group()
def user() -> None:
    """Manage users who may log in: those of FILE, for serve --users, or without it those of the broker at --url.

    A file has hashes of passwords only. A broker changes the file that it was started with.
    """


@user.command()
@_user_arguments("NAME[:PASSWORD]")
@click.option(
    "--scram",
    type=click.Choice(list(_HASHES)),
    multiple=True,
    help="Store what SCRAM needs too, so that the password is never sent to the broker; it is "
    "easier to guess from a stolen file then. For a FILE. Repeatable.",
)
def add(kept: _Kept, name: str, scram: tuple[str, ...]) -> None:
    """Add a user, or change a user's password.

    The password is read from the terminal or, with NAME:@PATH, from a file; NAME:- reads standard
    input; a password on the command line is visible to others.
    """
    file = kept.file
    if file is not None and ":" in str(file) and ":" not in name and not file.exists():
        raise click.UsageError(
            f"FILE comes before NAME: amqp-rt user add {name} {file.name.split(':')[0]}:…"
        )
    if file is None and scram:
        raise click.UsageError("--scram goes with a FILE: a broker chooses how it keeps passwords")
    try:
        who, password = parse_user(name if ":" in name else f"{name}:-")
        if file is None:
            _store(kept.broker, who, password)
            return
        line = password_line(who, password, scram=[_HASHES[each] for each in scram])
        if file.exists():
            Users().load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    _rewrite(file, who, line)


def _store(where: Where, who: str, password: str) -> None:
    """Store the password of user *who* at the broker."""

    async def work(there: ManagementClient) -> None:
        given = {"password": password}
        known = [row["name"] async for row in there.query(_USERS.type_name)]
        operation = "UPDATE" if who in known else "CREATE"
        await there.request(operation, given, type=_USERS.type_name, name=who)

    ask(where, work)


@user.command()
@_user_arguments("NAME")
def remove(kept: _Kept, name: str) -> None:
    """Remove a user. A broker closes the user's connections; with FILE they stay open."""
    if kept.file is not None:
        # A file that has something else on a line is not one of users, and stays as it is.
        _load(kept.file)
        if not _rewrite(kept.file, name, None):
            raise click.UsageError(f"there is no user {name!r} in {kept.file}")
        return

    async def work(there: ManagementClient) -> None:
        await there.delete(_USERS.type_name, name)

    ask(kept.broker, work)


@user.command("list")
@_user_arguments(None)
@list_options
def list_(kept: _Kept, output: Output) -> None:
    """List users: of a FILE with the mechanisms by which they can log in, of a broker with their groups and connections."""
    if kept.file is None:
        show_list(kept.broker, output, _USERS)
        return
    if output.watch_s is not None:
        raise click.UsageError("--watch is for the users of a broker: leave it or FILE out")
    users = _load(kept.file)
    for name in users:
        scram = [f"SCRAM-{each}" for each in _HASHES.values() if users.scram(name, each)]
        row: Mapping[str, Any] = {"name": name, "mechanisms": ["PLAIN", *scram]}
        if output.as_json:
            click.echo(json.dumps(row))
        else:
            click.echo("  ".join([name, *row["mechanisms"]]))


def _load(file: Path) -> Users:
    """Return the users of *file*.

    Raises:
        click.UsageError: It does not exist, cannot be read, or is no file of users.
    """
    if not file.exists():
        raise click.UsageError(f"there is no file {file}")
    users = Users()
    try:
        users.load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    return users


def _rewrite(file: Path, name: str, line: str | None) -> bool:
    try:
        return rewrite(file, name, line, create=True)
    except AmqpError as error:
        raise click.ClickException(error.description) from None
