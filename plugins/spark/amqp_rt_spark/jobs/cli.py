"""``amqp-rt pipeline``: the jobs on the command line, their options taken from their Structs.

A user's mistake is one sentence on standard error and exit code 1 or 2; a job that has found something
wrong ends with 3.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import click
import msgspec
from msgspec import UNSET, Meta, Struct

from amqp_rt.settings import SettingsError, read_settings

from .conf import JOBS, Job, bare


class Running(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job is run from the command line, beside what it is told."""

    master: Annotated[
        str,
        Meta(
            description="Where Spark runs: local[*,4] is this machine, where a task has four attempts; "
            "spark://…, yarn, k8s://… and sc://… are handed on."
        ),
    ] = "local[*,4]"
    conf: Annotated[
        tuple[str, ...], Meta(description="A setting of Spark, NAME=VALUE. Repeatable.")
    ] = ()
    format: Annotated[
        Literal["console", "json"], Meta(description="How the report is printed.")
    ] = "console"
    report: Annotated[
        str, Meta(description="Write the report to this file, too: one page of HTML.")
    ] = ""


class _Jobs(click.Group):
    """The jobs by their names, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(job.name for job in JOBS), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for job in JOBS:
            if job.name == cmd_name:
                return command_of(job)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            for meant in get_close_matches(args[0], self.list_commands(ctx), 1):
                said = f"{error.message} Did you mean {meant!r}?"
                raise click.UsageError(said, error.ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = {job.name: job.help for job in JOBS}
        for name, command in self.commands.items():
            known[name] = command.get_short_help_str(80)
        if names := self.list_commands(ctx):
            with formatter.section("Commands"):
                formatter.write_dl([(name, known[name]) for name in names])


@click.group(cls=_Jobs)
def pipeline() -> None:
    """Jobs of Apache Spark over queues, logs and dead letters.

    Options may stand in a TOML file, --config FILE, under the same names.
    """


#: Struct → its fields: name, type, and the option's texts.
_METAVARS: Final = {int: "N", float: "X"}


def option_of(name: str, kind: Any, default: Any) -> click.Option:
    """The option of a field. It says nothing by itself, so that a file may."""
    plain = bare(kind)
    text = next(each.description for each in get_args(kind)[1:] if isinstance(each, Meta))
    flag = f"--{name.replace('_', '-')}"
    if default not in (msgspec.NODEFAULT, None, "", (), False):
        text = f"{text}  [default: {default}]"
    more: dict[str, Any] = {"help": text, "default": None, "show_default": False}
    if plain is bool:
        return click.Option([f"{flag}/--no-{name.replace('_', '-')}"], **more)
    if get_origin(plain) is Literal:
        return click.Option([flag], type=click.Choice(get_args(plain)), **more)
    if get_origin(plain) is tuple:
        return click.Option([flag], metavar="TEXT", multiple=True, **more)
    if name == "url":
        more |= {"envvar": "AMQP_URL", "show_envvar": True}
    kind = plain if plain in (int, float) else str
    return click.Option([flag], type=kind, metavar=_METAVARS.get(plain, "TEXT"), **more)


def fields_of(kind: type[Struct]) -> dict[str, tuple[Any, Any]]:
    """The fields of a Struct: name → type and default."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (hints[field.name], field.default) for field in msgspec.structs.fields(kind)
    }


def command_of(job: Job) -> click.Command:
    """The command that runs *job*."""
    _, conf = job.load()
    declared = fields_of(conf) | fields_of(Running)
    options: list[click.Parameter] = [
        option_of(name, kind, default) for name, (kind, default) in declared.items()
    ]
    options.append(
        click.Option(
            ["--config"], metavar="FILE", help="A TOML file with options; these here go before."
        )
    )

    def callback(config: str | None, **given: Any) -> None:
        told = read_told(conf, config, given)
        raise click.ClickException(f"{job.name}: {told}")

    return click.Command(job.name, params=options, callback=callback, help=job.help)


def read_told(
    conf: type[Struct], config: str | None, given: dict[str, Any]
) -> tuple[Struct, Running]:
    """What the command line, and the file *config* where it is silent, tell a job.

    Raises:
        click.UsageError: Something is wrong with it.
    """
    declared = fields_of(conf) | fields_of(Running)
    said = {name: value for name, value in given.items() if value not in (None, ())}
    if config is not None:
        kind = msgspec.defstruct(
            "Config",
            [(name, kind | msgspec.UnsetType, UNSET) for name, (kind, _) in declared.items()],
            forbid_unknown_fields=True,
        )
        try:
            found, _ = read_settings(config, kind)
        except SettingsError as error:
            raise click.UsageError(error.description) from None
        said = {
            name: value
            for name, value in msgspec.structs.asdict(found).items()
            if value is not UNSET
        } | said
    for name, (_, default) in declared.items():
        if default is msgspec.NODEFAULT and name not in said:
            raise click.UsageError(f"--{name.replace('_', '-')} is missing")
    ours = {name: said.pop(name) for name in fields_of(Running) if name in said}
    try:
        return conf(**said), msgspec.convert(ours, Running)
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise click.UsageError(f"--{name.replace('_', '-')}{colon}{rest}") from None
