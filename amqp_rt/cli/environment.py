"""Options in environment variables: ``AMQP_RT_<COMMAND>_<OPTION>``, such as ``AMQP_RT_SERVE_STORE``.

The command line comes before the environment, and that before a file of ``--config``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final

import click

PREFIX: Final = "AMQP_RT"
#: Variables that Kubernetes sets for a service, whose name may be that of a command: ``amqp-rt-servicebus``.
_OF_A_SERVICE: Final = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)")


def name_variables(command: click.Command, prefix: str) -> None:
    """Let the options of *command*, and of the commands below it, be given in variables.

    A variable that an option has already, such as ``AMQP_URL``, is asked for after that of the command.

    Args:
        command: The command; it may have been named before.
        prefix: Beginning of the names: that of the command, such as ``AMQP_RT_NODE_LIST``.
    """
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        name = f"{prefix}_{_key(option)}"
        before: Sequence[str] = (
            [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
        )
        option.envvar = [name, *(each for each in before if each != name)]
        # click would form a name from the name of the parameter, which is not that of the option.
        option.allow_from_autoenv = False
    if isinstance(command, click.Group):
        for name, member in command.commands.items():
            name_variables(member, f"{prefix}_{variable_part(name)}")


def check_variables(command: click.Command, prefix: str, shown: str) -> None:
    """Refuse variables that begin as those of *command* and belong to no option of it, or of commands below it.

    Args:
        command: The command, whose options have their variables (:func:`name_variables`).
        prefix: Beginning of its variables, such as ``AMQP_RT_SERVE``.
        shown: How the command is called, such as ``amqp-rt serve``.

    Raises:
        click.UsageError: There is such a variable; the text has its name, and not its value.
    """
    begin = f"{prefix}_"
    known = {name.removeprefix(begin) for name in _variables(command) if name.startswith(begin)}
    for name, value in sorted(os.environ.items()):
        part = name.removeprefix(begin)
        # A variable that is set to nothing counts as not set.
        if not value or part == name or part in known or _OF_A_SERVICE.fullmatch(part):
            continue
        # Parts are compared: the beginning, which all have, would make any name a similar one.
        close = get_close_matches(part, sorted(known), 1)
        hint = f"did you mean {begin}{close[0]}?" if close else f"{shown} --help lists its options"
        raise click.UsageError(f"{name} is set, and {shown} has no such option; {hint}")


def _variables(command: click.Command) -> Iterator[str]:
    """Yield the variables of the options of *command*, and of the commands below it."""
    for option in command.params:
        if isinstance(option, click.Option):
            for name in option.envvar or ():
                yield name
                if isinstance(option, SecretOption):
                    yield f"{name}_FILE"
    if isinstance(command, click.Group):
        for member in command.commands.values():
            yield from _variables(member)


def variable_part(name: str) -> str:
    """Return the part of a variable for the command or option *name*."""
    return name.lstrip("-").replace("-", "_").upper()


def _key(option: click.Option) -> str:
    return variable_part(
        next((each for each in option.opts if each.startswith("--")), option.opts[0])
    )


class SecretOption(click.Option):
    """Option that may contain a password: the variable's name with ``_FILE`` names a file with the value.

    The file has one value, or, if the option may be repeated, one on each line. That keeps passwords out
    of the environment, which child processes and some monitors see.
    """

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Return the value in the environment or in the file that it names, None without one.

        Raises:
            click.UsageError: A variable and its file are both given, or the file cannot be read.
        """
        names = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        for name in names:
            path = os.environ.get(f"{name}_FILE")
            if path and os.environ.get(name):
                raise click.UsageError(f"{name} and {name}_FILE are both set: set one of them", ctx)
            if path:
                return self._value_in(f"{name}_FILE", path, ctx)
            if os.environ.get(name):
                break
        return super().value_from_envvar(ctx)

    def _value_in(self, variable: str, path: str, ctx: click.Context) -> Any:
        from ..errors import AmqpError
        from ..security.identities import read_secret_file

        try:
            lines = read_secret_file(path, f"the value of {variable}").splitlines()
        except AmqpError as error:
            raise click.UsageError(error.description, ctx) from None
        values = [line for line in lines if line.strip()]
        if not values:
            raise click.UsageError(f"{variable} names {path}, which is empty", ctx)
        return values if self.multiple else values[0]
