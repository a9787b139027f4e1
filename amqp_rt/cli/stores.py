"""``amqp-rt store``: check, copy and upgrade the file of a durable broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from ..errors import AmqpError
from ..stores import sqlite_files

T = TypeVar("T")


def _path(text: str) -> Path:
    """Return PATH, or the path in ``sqlite:PATH``, the form that ``serve`` uses."""
    kind, colon, rest = text.partition(":")
    if colon and kind != "sqlite" and (rest.startswith("//") or (kind == "memory" and not rest)):
        # The rest of a URL may hold a password.
        raise click.BadParameter(
            f"{kind}: is no file of SQLite, and only those are checked, copied and upgraded here: give PATH or "
            "sqlite:PATH"
        )
    return Path(text.removeprefix("sqlite:"))


def _ask(call: Callable[[], T]) -> T:
    """Return the result of *call*; failures of the store become errors of the command."""
    try:
        return call()
    except AmqpError as error:
        raise click.ClickException(error.description) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


@click.group()
def store() -> None:
    """Check, copy or upgrade the file in which a broker stores its messages."""


@store.command()
@click.argument("path", type=_path)
def check(path: Path) -> None:
    """Read everything in store PATH and list the damage.

    No broker may be running on it; to check one that is in use, check a backup of it. Nothing is
    repaired: a broker that opens a damaged store recovers the readable data and puts the old file
    aside. The exit code is 1 if anything is damaged.
    """
    found = _ask(lambda: sqlite_files.check(path))
    click.echo(f"{path}: {found.size} bytes, schema version {found.version}")
    if found.damage:
        for damage in found.damage:
            click.echo(f"damaged: {sqlite_files.described(damage)}")
        raise click.exceptions.Exit(1)
    click.echo(f"messages: {found.messages} in {found.nodes} nodes")
    click.echo(f"logs:     {found.logs}")
    click.echo(f"facts:    {found.facts}")
    if not found.clean:
        click.echo("It was not closed in good order; everything that was committed is there.")


@store.command()
@click.argument("path", type=_path)
@click.argument("to", type=_path)
def backup(path: Path, to: Path) -> None:
    """Copy store PATH into the new file TO, even while a broker is running on it.

    The copy is the state after one of the broker's commits, and has been verified. While it is made
    the broker continues, and the write-ahead log beside its store grows.
    """
    _ask(lambda: sqlite_files.backup(path, to))
    click.echo(f"{to}: {to.stat().st_size} bytes")


@store.command()
@click.argument("path", type=_path)
def upgrade(path: Path) -> None:
    """Upgrade store PATH, written by an earlier release, to this one.

    A broker does the same when it opens the store. An upgrade cannot be undone: make a backup before.
    No broker may be running on the store.
    """
    old, new = _ask(lambda: sqlite_files.upgrade(path))
    if old == new:
        click.echo(f"{path} is up to date: schema version {new}")
    else:
        click.echo(f"{path}: schema version {old} is now {new}")
