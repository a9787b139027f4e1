"""Commands whose options may also be given in a TOML file (``--config``).

The keys of the file are the names of the options, such as ``tls_cert = "server.pem"``; an option that
may be repeated is a list. The command line overrides the file. Mistakes are reported with file and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import click
import msgspec

from ..config_files import SettingsError, Where, mistake, read_settings

#: Key in a context's ``meta`` for the name and the text of the file.
_META: Final = "amqp_rt.config"
#: Key in a context's ``meta`` for the tables of the file that are not options.
_TABLES: Final = "amqp_rt.config.tables"
#: Key in a context's ``meta``: the command checks its options, and does nothing else.
_CHECKS: Final = "amqp_rt.checks"


class ConfiguredCommand(click.Command):
    """Command with the option ``--config FILE``.

    Args:
        args: Arguments of ``click.Command``.
        tables: Tables that the file may have beside options: name → Struct; see :func:`table_of`.
        kwargs: Arguments of ``click.Command``.
    """

    def __init__(
        self, *args: Any, tables: Mapping[str, type[msgspec.Struct]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._tables = tables or {}
        self.params.append(
            click.Option(
                ["--config"],
                metavar="FILE",
                is_eager=True,
                expose_value=False,
                callback=self._read,
                help='A TOML file with options: listen = ["amqp://127.0.0.1:5672"], sasl = '
                '"required", …; the command line overrides it.',
            )
        )

    def _read(self, context: click.Context, _: click.Parameter, file: str | None) -> None:
        if file is None:
            return
        # A table replaces an option of the same name.
        options = [
            option
            for option in self.params
            if isinstance(option, click.Option)
            and option.expose_value
            and _key(option) not in self._tables
        ]
        names = {_key(option): option.name for option in options}
        fields: list[Any] = [(_key(option), _type(option) | None, None) for option in options]
        fields += [(name, table | None, None) for name, table in self._tables.items()]
        kind = msgspec.defstruct("Config", fields, forbid_unknown_fields=True, frozen=True)
        try:
            found, text = read_settings(file, kind)
        except SettingsError as error:
            raise click.UsageError(error.description) from None
        context.default_map = {
            str(names[key]): value
            for key, value in msgspec.structs.asdict(found).items()
            if value is not None and key in names
        }
        context.meta[_META] = file, text
        context.meta[_TABLES] = {name: getattr(found, name) for name in self._tables}

    def check(self, context: click.Context) -> None:
        """Check the options in *context* as the command does before it starts to work.

        For commands whose function returns after that if :func:`only_checks` is true.

        Raises:
            click.ClickException: The command would end with this error.
        """
        context.meta[_CHECKS] = True
        with context:
            self.invoke(context)

    def invoke(self, context: click.Context) -> Any:
        """Invoke the command; report a mistake in an option of the file with its line."""
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


def only_checks(context: click.Context) -> bool:
    """Return whether the command is to check its options only, without effects on files and the process."""
    return _CHECKS in context.meta


def table_of(context: click.Context, name: str) -> dict[str, Any]:
    """Return the table *name* of the file without absent keys, empty if there is none."""
    found = context.meta.get(_TABLES, {}).get(name)
    return {} if found is None else msgspec.to_builtins(found)


def mistake_in(context: click.Context, where: Where, what: str) -> click.UsageError:
    """Return the error for the mistake *what* at *where* in the file."""
    file, text = context.meta[_META]
    return click.UsageError(mistake(file, text, where, what).description)


def _key(option: click.Parameter) -> str:
    """Return the key of an option in the file."""
    return option.opts[0].lstrip("-").replace("-", "_")


def _type(option: click.Option) -> Any:
    if option.multiple:
        return list[str]
    if option.is_flag:
        return bool
    if isinstance(option.type, click.Choice):
        return Literal[tuple(option.type.choices)]
    # click's types for numbers; texts remain possible, since some take units, such as "30s".
    if isinstance(option.type, click.types.FloatParamType):
        return int | float | str
    if isinstance(option.type, click.types.IntParamType):
        return int | str
    return str
