"""``amqp-rt user``: files of users who may log in."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import AmqpError
from ..security.identities import Users, parse_user, password_line, rewrite

_HASHES = {"sha-1": "SHA-1", "sha-256": "SHA-256", "sha-512": "SHA-512"}


@click.group()
def user() -> None:
    """Manage files of users for serve --users. Passwords are stored as hashes only."""


@user.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name", metavar="NAME[:PASSWORD]")
@click.option(
    "--scram",
    type=click.Choice(list(_HASHES)),
    multiple=True,
    help="Store what SCRAM needs too, so that the password is never sent to the broker; it is "
    "easier to guess from a stolen file then. Repeatable.",
)
def add(file: Path, name: str, scram: tuple[str, ...]) -> None:
    """Add a user to FILE, or change a user's password.

    The password is read from the terminal or, with NAME:@PATH, from a file; NAME:- reads standard
    input; a password on the command line is visible to others.
    """
    if ":" in str(file) and ":" not in name and not file.exists():
        raise click.UsageError(
            f"FILE comes before NAME: amqp-rt user add {name} {file.name.split(':')[0]}:…"
        )
    try:
        given = name if ":" in name else f"{name}:-"
        who, password = parse_user(given)
        line = password_line(who, password, scram=[_HASHES[each] for each in scram])
        if file.exists():
            Users().load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    _rewrite(file, who, line)


@user.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.argument("name")
def remove(file: Path, name: str) -> None:
    """Remove a user from FILE. Existing connections of the user stay open."""
    if not _rewrite(file, name, None):
        raise click.UsageError(f"there is no user {name!r} in {file}")


@user.command("list")
@click.argument("file", type=click.Path(path_type=Path, exists=True))
def list_(file: Path) -> None:
    """List the users of FILE with the mechanisms by which they can log in."""
    users = Users()
    try:
        users.load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    for name in users:
        scram = [f"SCRAM-{each}" for each in _HASHES.values() if users.scram(name, each)]
        click.echo("  ".join([name, "PLAIN", *scram]))


def _rewrite(file: Path, name: str, line: str | None) -> bool:
    try:
        return rewrite(file, name, line, create=True)
    except AmqpError as error:
        raise click.ClickException(error.description) from None
