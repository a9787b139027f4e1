"""The command ``amqp-rt``: serve a broker, and talk to one from a terminal.

A user's mistake is one sentence on standard error and exit code 1 or 2, never a traceback.
"""

from __future__ import annotations

import click

from .. import __version__
from .messages import receive, request, send
from .nodes import node
from .serve import serve
from .stores import store
from .trace import trace
from .users import user


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="amqp-rt")
def main() -> None:
    """AMQP from the command line: a broker, its nodes, and messages in and out.

    \b
    In one terminal:   amqp-rt serve --anonymous --auto-create 'queue:*'
    In another one:    amqp-rt send orders '{"sku": "A-1"}'
                       amqp-rt receive orders --count 1

    The broker to talk to is --url, else $AMQP_URL, else amqp://127.0.0.1:5672.
    """  # noqa: D301  # click takes \b for "do not wrap"


for command in (serve, send, receive, request, node, store, user, trace):
    main.add_command(command)
