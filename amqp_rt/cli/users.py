"""``amqp-rt user``: the file of those who may log in."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import AmqpError
from ..security.identities import Users, parse_user, password_line, rewrite

_HASHES = {"sha-1": "SHA-1", "sha-256": "SHA-256", "sha-512": "SHA-512"}


@click.group()
def user() -> None:
    """Who may log in: files for serve --users. Passwords are kept as hashes only."""


@user.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name", metavar="NAME[:PASSWORD]")
@click.option(
    "--scram",
    type=click.Choice(list(_HASHES)),
    multiple=True,
    help="Let the password be used with SCRAM too, which does not show it to the broker; a thief of "
    "the file guesses it faster then. Repeatable.",
)
def add(file: Path, name: str, scram: tuple[str, ...]) -> None:
    """Add a user to FILE, or change the password of one.

    The password comes from the terminal or, with NAME:@PATH, from a file; NAME:- reads standard
    input; what stands on the command line is seen by others.
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
    """Remove a user from FILE. Who is connected stays until the connection ends."""
    if not _rewrite(file, name, None):
        raise click.UsageError(f"there is no user {name!r} in {file}")


@user.command("list")
@click.argument("file", type=click.Path(path_type=Path, exists=True))
def list_(file: Path) -> None:
    """List the users of FILE, and how each may log in."""
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
