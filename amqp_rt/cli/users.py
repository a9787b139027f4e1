"""``amqp-rt user``: the file of those who may log in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from ..errors import AmqpError
from ..security.identities import Users, parse_user, password_line

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
    try:
        given = name if ":" in name else f"{name}:-"
        who, password = parse_user(given)
        line = password_line(who, password, scram=[_HASHES[each] for each in scram])
        if file.exists():
            Users().load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    kept = [each for each in _lines(file) if _name_of(each) != who]
    _write(file, [*kept, line])


@user.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.argument("name")
def remove(file: Path, name: str) -> None:
    """Remove a user from FILE. Who is connected stays until the connection ends."""
    lines = _lines(file)
    kept = [each for each in lines if _name_of(each) != name]
    if len(kept) == len(lines):
        raise click.UsageError(f"there is no user {name!r} in {file}")
    _write(file, kept)


@user.command("list")
@click.argument("file", type=click.Path(path_type=Path, exists=True))
def list_(file: Path) -> None:
    """List the users of FILE, and how each may log in."""
    users = Users()
    try:
        users.load(file)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    for name in sorted(filter(None, map(_name_of, _lines(file)))):
        scram = [f"SCRAM-{each}" for each in _HASHES.values() if users.scram(name, each)]
        click.echo("  ".join([name, "PLAIN", *scram]))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines() if file.exists() else []
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.UsageError(f"cannot read {file}: it is not UTF-8") from None


def _name_of(line: str) -> str | None:
    """Whose line it is; None for a comment."""
    line = line.strip()
    return None if not line or line.startswith("#") else line.partition(":")[0]


def _write(file: Path, lines: list[str]) -> None:
    """Put *lines* into *file* at one stroke, for its owner's eyes only."""
    try:
        descriptor, path = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as output:
            output.write("".join(f"{line}\n" for line in lines))
        os.replace(path, file)
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from None
