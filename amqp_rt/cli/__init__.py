"""The command ``amqp-rt``: run a broker, and use or manage one from a terminal.

A user's mistake is reported as one sentence on standard error with exit code 1 or 2, never as a traceback.

A command is imported when it is used, so that ``--help`` and completion are fast. A plug-in
adds a command by an entry point of the group ``amqp_rt.commands``, whose name is the command's and
whose object is a ``click.Command``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import click

from .environment import PREFIX
from .groups import LazyGroup, collections_paused

_COMMANDS: Final = "amqp_rt.commands"

#: Our commands: name → module of this package that defines it, and short help.
OURS: Final = {
    "serve": ("serve", "Run a broker, optionally with the nodes of a file."),
    "run": (
        "applications",
        "Run an application: nodes at a broker's queues, or at addresses of its own.",
    ),
    "asyncapi": ("applications", "Describe the nodes of an application as an AsyncAPI document."),
    "send": ("messages", "Send a message to an address."),
    "receive": ("messages", "Receive messages from an address."),
    "request": ("messages", "Send a request and print the reply."),
    "node": ("nodes", "Inspect and manage the nodes of a running broker."),
    "connections": ("entities", "List, show and close the connections of a running broker."),
    "sessions": ("entities", "The same for its sessions."),
    "links": ("entities", "The same for its links."),
    "subscriptions": ("entities", "The same for its subscriptions of topics."),
    "schedules": ("entities", "The same for its schedules."),
    "termini": ("entities", "Termini that outlive their connections: list, show, close."),
    "transactions": (
        "entities",
        "Transactions in doubt: list, show, commit, roll back, forget; open ones.",
    ),
    "ping": ("ping", "Connect step by step, and show how long each step takes."),
    "health": ("health", "Tell by the exit code whether a broker is live, or ready."),
    "doctor": ("doctor", "Examine this machine and the files of a broker, and say what to do."),
    "bench": ("bench", "Measure throughput and latency of sending, receiving and calling."),
    "top": ("top", "Show the busiest nodes of a running broker, again and again."),
    "mesh": ("mesh", "Look at a mesh from one of its members, drain it, ask for its health."),
    "store": ("stores", "Check, copy or upgrade a broker's store."),
    "user": ("users", "Manage users: of a file, or of a running broker."),
    "access": ("access", "Ask which rule lets a user do something at an address."),
    "limits": ("limit_options", "List the limits of a broker, with their defaults."),
    "trace": ("trace", "Draw the frames of a connection as a ladder."),
}

#: Commands of plug-ins that may not be installed: name → distribution that provides it, and short help.
_ELSEWHERE: Final = {
    "pipeline": ("amqp-rt-spark[all]", "Jobs of Apache Spark over nodes."),
    "servicebus": ("amqp-rt-servicebus", "Run a namespace of Azure Service Bus."),
}


class _Commands(LazyGroup):
    """Our commands, and those of plug-ins."""

    def summaries(self) -> dict[str, str]:
        installed = _installed()
        known = {name: said for name, (_, said) in OURS.items()}
        for name in sorted(installed | dict.fromkeys(_ELSEWHERE)):
            distribution, said = _ELSEWHERE.get(name, ("", ""))
            if name not in installed:
                known[name] = f"{said} Comes with {distribution}."
            elif said:
                known[name] = said
            else:
                found = installed[name].dist
                known[name] = f"Comes with {found.name}." if found else ""
        return known

    def load_command(self, name: str) -> click.Command | None:
        if name in OURS:
            with collections_paused():
                module = import_module(f"{__name__}.{OURS[name][0]}")
            command: click.Command = getattr(module, name)
            return command
        if found := _installed().get(name):
            loaded: click.Command = found.load()
            return loaded
        if name in _ELSEWHERE:
            raise click.ClickException(
                f"amqp-rt {name} comes with a plug-in: pip install '{_ELSEWHERE[name][0]}'"
            )
        return None


def _installed() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=_COMMANDS) if each.name not in OURS}


def _print_versions(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from .versions import print_versions

        print_versions(context)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_versions,
    help="Show the version, and whether it is compiled.",
)
def main() -> None:
    """AMQP from the command line: run a broker, manage its nodes, send and receive messages.

    \b
    In one terminal:   amqp-rt serve --dev
    In another one:    amqp-rt send orders '{"sku": "A-1"}'
                       amqp-rt receive orders --count 1

    The broker to connect to is --url, else $AMQP_URL, else amqp://127.0.0.1:5672. Every option can be given in a variable
    AMQP_RT_<COMMAND>_<OPTION>, such as AMQP_RT_SERVE_STORE.
    """  # noqa: D301  # click takes \b for "do not wrap"
