"""Write docs/reference/command-line.md from the commands of ``amqp-rt`` and their options.

``python docs/_tools/command_line_page.py`` writes the page; a test fails if it is not up to date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from amqp_rt import cli
from amqp_rt.cli.environment import PREFIX
from amqp_rt.cli.listing import LISTINGS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "command-line.md"
#: Commands of the distribution amqp-rt itself; those of plug-ins are described in the plug-ins' guides.
COMMANDS = tuple(cli.OURS)

HEAD = """\
# Command line and configuration

The command `amqp-rt` is installed with the package. `amqp-rt COMMAND --help` shows what this page lists.
`amqp-rt pipeline` comes with the [Spark plug-in](../guides/pipelines.md), `amqp-rt servicebus` with that for
[Service Bus](../guides/servicebus.md).

Commands that connect to a broker take the address from `--url`, else from the environment variable
`AMQP_URL`, else `amqp://127.0.0.1:5672`. The exit status is 0 on success, 1 if the broker refused or could not
be reached, 2 if an option or argument is wrong, 3 if the answer of `health`, `mesh health`, `mesh drain` or `access explain`
is no, and 130 after Ctrl-C. `serve` takes SIGINT and SIGTERM as a request to
stop: it lets running work finish and exits with 0; the second signal ends it at once.

(configuration-file)=
## Configuration file

`amqp-rt serve --config FILE` reads options from a TOML file. A key is the name of the option without its dashes, with `_`
in the place of `-`; an option that may be repeated takes a list. Options on the command line override the file. An unknown
key, or a value of another type, ends the start with one sentence that names the file and the line.

```toml
listen = ["amqp://127.0.0.1:5672", "amqps://0.0.0.0:5671"]
tls_cert = "server.pem"
tls_key = "server-key.pem"
users = "users.toml"
store = "sqlite:broker.db"

[limits]
idle_timeout_s = 30
```

The table `[limits]` has the names of [Limits](../limits.md), and `[cbs]` those of `--cbs`. Nodes are declared in files of
their own, which `--nodes` names; see [Declaring nodes](../guides/declaring.md).
`python docs/_tools/command_line_page.py` writes this page.
"""

LISTS = """\
(environment-variables)=
## Environment variables

Every option can be given in a variable `AMQP_RT_<COMMAND>_<OPTION>`: `AMQP_RT_SERVE_STORE` for `amqp-rt serve --store`,
`AMQP_RT_NODE_LIST_WATCH` for `amqp-rt node list --watch`. Options that may be repeated take several values, separated by spaces, and
paths of files by `:` (`;` on Windows); flags take `true` or `false`. The command line comes before the environment, that before the [file of `--config`](configuration-file), and that
before defaults. A variable that is set to nothing counts as not set. A command refuses other variables that begin as its own do,
such as `AMQP_RT_SERVE_LITSEN`, with exit status 2; those that Kubernetes sets for services are left alone.

Options that may have passwords also take the name of a file: `AMQP_RT_SERVE_USER_FILE`, `AMQP_RT_SERVE_CBS_FILE`,
`AMQP_RT_SERVE_MESH_FILE`, `AMQP_URL_FILE` and `AMQP_RT_<COMMAND>_URL_FILE`. The file has the value, or one on each line where
the option may be repeated.

```sh
export AMQP_RT_SERVE_LISTEN="amqp://127.0.0.1:5672 ws://127.0.0.1:8080/amqp"
export AMQP_RT_SERVE_USER_FILE=/run/secrets/users    # ada:her password
amqp-rt serve
```

(shell-completion)=
## Completion in shells

```sh
eval "$(_AMQP_RT_COMPLETE=bash_source amqp-rt)"                 # bash 4.4 or later, in ~/.bashrc
eval "$(_AMQP_RT_COMPLETE=zsh_source amqp-rt)"                  # zsh, in ~/.zshrc
_AMQP_RT_COMPLETE=fish_source amqp-rt > ~/.config/fish/completions/amqp-rt.fish
```

(keys-of-lists)=
## Keys of lists

With `--json` a list has one JSON object a line, with exactly these keys. Keys are not renamed or removed within a major
version; new ones may come. What an entity does not have is `null`.

| list | keys |
| --- | --- |
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield each command with its full name, groups before their members."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for each in command.list_commands(context):
                member = command.get_command(context, each)
                assert member is not None
                yield from walk(f"{name} {each}", member)

    context = click.Context(cli.main, auto_envvar_prefix=PREFIX)
    for each in COMMANDS:
        command = cli.main.get_command(context, each)
        assert command is not None
        yield from walk(each, command)


def described(name: str, command: click.Command) -> str:
    """Return the section of one command."""
    context = click.Context(command, info_name=f"amqp-rt {name}")
    lines = [f"{'#' * (2 + name.count(' '))} `{name}`", ""]
    lines += [
        "```text",
        f"amqp-rt {name} {' '.join(command.collect_usage_pieces(context))}",
        "```",
        "",
    ]
    lines += [_prose(inspect.cleandoc(command.help or "")), ""]
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    rows = [row for each in options if (row := each.get_help_record(context)) is not None]
    if len(rows) > 1:
        lines += ["| option | meaning |", "| --- | --- |"]
        for option, meaning in rows:
            shown = option.replace("|", "\\|")
            lines.append(f"| `{shown}` | {_cell(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def _prose(text: str) -> str:
    r"""Return the help of a command as Markdown: paragraphs after ``\b`` keep their lines."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("\b"):
            blocks.append("```text\n" + block.removeprefix("\b\n").removeprefix("\b") + "\n```")
        else:
            blocks.append(_markdown(block))
    return "\n\n".join(blocks)


def _markdown(text: str) -> str:
    """Escape what Markdown would read as markup."""
    return re.sub(r"([*_<>\[\]$])", r"\\\1", text)


def _cell(text: str) -> str:
    return _markdown(" ".join(text.split())).replace("|", "\\|")


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, _keys(), *(described(name, command) for name, command in commands())])


def _keys() -> str:
    """Return the table of the keys of each list."""
    rows = (
        f"| `{name}` | {', '.join(f'`{key}`' for key in listing.keys)} |"
        for name, listing in LISTINGS.items()
    )
    return LISTS + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
