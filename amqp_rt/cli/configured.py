"""Commands whose options may stand in a TOML file (``--config``).

The file says what the command line would: its keys are the names of the options, such as
``tls_cert = "server.pem"``; an option that may be repeated is a list. What stands on the command line
goes before. A mistake is said with file and line.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import click
import msgspec

from ..settings import SettingsError, mistake, read_settings

#: Where a context has the name of the file and its text.
_META: Final = "amqp_rt.config"


class ConfiguredCommand(click.Command):
    """A command with ``--config FILE``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--config"],
                metavar="FILE",
                is_eager=True,
                expose_value=False,
                callback=self._read,
                help='A TOML file with options: listen = ["amqp://127.0.0.1:5672"], '
                'sasl = "required", …; the command line goes before.',
            )
        )

    def _read(self, context: click.Context, _: click.Parameter, file: str | None) -> None:
        if file is None:
            return
        names = {
            _key(option): option.name
            for option in self.params
            if isinstance(option, click.Option) and option.expose_value
        }
        fields = [
            (_key(option), _type(option) | None, None)
            for option in self.params
            if isinstance(option, click.Option) and option.expose_value
        ]
        kind = msgspec.defstruct("Config", fields, forbid_unknown_fields=True, frozen=True)
        try:
            found, text = read_settings(file, kind)
        except SettingsError as error:
            raise click.UsageError(error.description) from None
        context.default_map = {
            str(names[key]): value
            for key, value in msgspec.structs.asdict(found).items()
            if value is not None
        }
        context.meta[_META] = file, text

    def invoke(self, context: click.Context) -> Any:
        """As any command; what is wrong with an option of the file is said with its line."""
        try:
            return super().invoke(context)
        except click.BadParameter as error:
            hint = error.param_hint if isinstance(error.param_hint, str) else ""
            for option in self.params:
                if hint in option.opts and _META in context.meta and option.name:
                    source = context.get_parameter_source(option.name)
                    if source is click.core.ParameterSource.DEFAULT_MAP:
                        file, text = context.meta[_META]
                        where = mistake(file, text, (_key(option),), error.message)
                        raise click.UsageError(where.description) from None
            raise


def _key(option: click.Parameter) -> str:
    """What an option is called in the file."""
    return option.opts[0].lstrip("-").replace("-", "_")


def _type(option: click.Option) -> Any:
    if option.multiple:
        return list[str]
    if option.is_flag:
        return bool
    if isinstance(option.type, click.Choice):
        return Literal[tuple(option.type.choices)]
    return str
