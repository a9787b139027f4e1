"""Output of ``amqp-rt --version``: versions, and whether performance-critical modules are compiled."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from .. import __version__

#: File in which setup.py notes why a build is plain Python.
_NOTE: Final = "not_compiled.txt"
#: Entry point groups of plug-ins with a protocol, an add-on or a command, which may have compiled modules too.
_GROUPS: Final = ("amqp_rt.fronts", "amqp_rt.addons", "amqp_rt.commands")


def print_versions(context: click.Context) -> None:
    """Print a line for amqp_rt and one for each plug-in of those groups, and exit."""
    click.echo(f"amqp-rt, version {__version__} ({form_of('amqp_rt')})")
    plugins = {
        each.module.partition(".")[0]: each.dist
        for group in _GROUPS
        for each in entry_points(group=group)
        if each.dist is not None
    }
    for package, dist in plugins.items():
        click.echo(f"{dist.name}, version {dist.version} ({form_of(package)})")
    context.exit()


def form_of(package: str) -> str:
    """Return whether *package* has compiled modules; if not, with the reason that the build noted."""
    found = find_spec(package)
    folders = [Path(name) for name in (found and found.submodule_search_locations) or ()]
    files = [path for folder in folders for path in folder.rglob("*")]
    if any(path.name.endswith(tuple(EXTENSION_SUFFIXES)) for path in files):
        return "compiled"
    notes = [path.read_text("utf-8").strip() for path in files if path.name == _NOTE]
    return ": ".join(("plain Python", *notes))
