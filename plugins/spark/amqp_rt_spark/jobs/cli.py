"""``amqp-rt pipeline``: the jobs as commands, their options derived from their Structs.

A user's mistake gives one sentence on standard error and exit code 1 or 2; a job that has found something
wrong exits with 3.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import click
import msgspec
from msgspec import UNSET, Meta, Struct

from amqp_rt.cli.groups import LazyGroup
from amqp_rt.config_files import SettingsError, read_settings, suggestion

from ..cluster import check
from ..java import NoJava, java_home
from .checkpoints import local_path
from .conf import JOBS, Job, JobConf, bare
from .launching import NO_SPARK, sentence_of, signals, start
from .report import MissingExtra, Report, extra
from .running import MicroBatch, Watch
from .submitting import package, submit_line


class Running(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a job's run from the command line, beside those of the job."""

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
    debug: Annotated[bool, Meta(description="Show Spark's own errors and log lines.")] = False


class _Jobs(LazyGroup):
    """The jobs by name, and further commands."""

    def summaries(self) -> dict[str, str]:
        return {job.name: job.help for job in JOBS}

    def load_command(self, name: str) -> click.Command | None:
        for job in JOBS:
            if job.name == name:
                try:
                    return command_of(job)
                except ModuleNotFoundError as error:
                    if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow"):
                        raise
                    raise click.ClickException(NO_SPARK) from None
        return None


@click.group(cls=_Jobs)
def pipeline() -> None:
    """Jobs of Apache Spark over queues, logs and dead letters.

    Options may stand in a TOML file, --config FILE, under the same names.
    """


#: Placeholders of values in the help.
_METAVARS: Final = {int: "N", float: "X"}


def option_of(name: str, kind: Any, default: Any) -> click.Option:
    """Return the option of a field. Its default is None, so that a configuration file can set it."""
    plain = bare(kind)
    text = next(each.description for each in get_args(kind)[1:] if isinstance(each, Meta))
    flag = f"--{name.replace('_', '-')}"
    if default not in (msgspec.NODEFAULT, None, "", (), False):
        said = ", ".join(default) if isinstance(default, tuple) else default
        said = "yes" if default is True else said
        text = f"{text}  [default: {said}]"
    more: dict[str, Any] = {"help": text, "default": None, "show_default": False}
    if plain is bool:
        return click.Option([f"{flag}/--no-{name.replace('_', '-')}"], **more)
    if get_origin(plain) is tuple:
        more["multiple"] = True
        plain = bare(get_args(plain)[0])
    if get_origin(plain) is Literal:
        return click.Option([flag], type=click.Choice(get_args(plain)), **more)
    if name == "url":
        more |= {"envvar": "AMQP_URL", "show_envvar": True}
    kind = plain if plain in (int, float) else str
    return click.Option([flag], type=kind, metavar=_METAVARS.get(plain, "TEXT"), **more)


def fields_of(kind: type[Struct]) -> dict[str, tuple[Any, Any]]:
    """Return the fields of a Struct: name → type and default; its own before inherited ones."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    names = (name for each in kind.__mro__ for name in vars(each).get("__annotations__", ()))
    return {name: (hints[name], defaults[name]) for name in names if name in defaults}


def command_of(job: Job) -> click.Command:
    """Return the command that runs *job*."""
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
        told, running = read_told(conf, config, given)
        raise click.exceptions.Exit(run_job(job, told, running))

    return click.Command(job.name, params=options, callback=callback, help=job.help)


def read_told(
    conf: type[JobConf], config: str | None, given: dict[str, Any]
) -> tuple[JobConf, Running]:
    """Return the settings of a job and its run; the command line overrides the file *config*.

    Raises:
        click.UsageError: A setting is missing or invalid, or the file cannot be read.
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


class _Told(Watch):
    """Prints a line on standard error for each batch."""

    def batch(self, batch: MicroBatch) -> None:
        behind = "" if batch.behind is None else f", {batch.behind:,} behind"
        click.echo(
            f"batch {batch.number}: {batch.rows:,} rows in {batch.seconds:.1f} s, "
            f"{batch.rate:,.0f} rows/s{behind}",
            err=True,
        )


def run_job(job: Job, conf: JobConf, running: Running) -> int:
    """Run *job*, print its report, and return the exit code.

    Raises:
        click.ClickException: The job has failed.
    """
    function, _ = job.load()
    watch = _Told()
    spark = None
    try:
        # Fail now rather than after hours spent on a report that cannot be printed.
        if running.format == "console":
            extra("rich.console")
        if running.report:
            extra("jinja2")
            extra("matplotlib")
        if not (job.alone and local_path(str(getattr(conf, "checkpoint", ""))) is not None):
            if sys.stderr.isatty():
                click.echo(f"starting Spark at {running.master}, which takes a while", err=True)
            with signals(None):
                spark = start(
                    running.master, settings_of(running.conf), name=job.name, debug=running.debug
                )
        # Again, because starting Spark has replaced the signal handler.
        with signals(watch.stopping if job.stream else None):
            if spark is not None and not running.master.startswith("local["):
                # A local Spark runs this Python, whose packages are imported already.
                check(spark, conf.endpoint)
            more = {"watch": watch} if job.stream else {}
            report: Report = function(spark, conf, **more)
        if running.report:
            Path(running.report).write_text(report.html(), "utf-8")
    except click.ClickException:
        raise
    except MissingExtra as error:
        raise click.ClickException(str(error)) from None
    except Exception as error:
        if running.debug:
            raise
        raise click.ClickException(sentence_of(error)) from None
    finally:
        if spark is not None:
            spark.stop()
    if running.format == "json":
        click.echo(report.json())
    else:
        click.echo(report.console(color=sys.stdout.isatty()), nl=False)
    return report.exit_code


def settings_of(given: tuple[str, ...]) -> dict[str, str]:
    """Return *given*, texts of the form NAME=VALUE, as a dictionary.

    Raises:
        click.UsageError: A text has another form.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"--conf {text!r:.80} is not NAME=VALUE")
        found[name.strip()] = value
    return found


@pipeline.command(
    "submit",
    # Arguments after JOB belong to the job.
    context_settings={"allow_interspersed_args": False},
)
@click.option("--print", "only_print", is_flag=True, help="Print the line, and do not run it.")
@click.option(
    "--package",
    "archive",
    metavar="FILE.zip",
    help="Write our Python to this file, and send it along: for clusters that do not have it.",
)
@click.argument("name", metavar="JOB")
@click.argument("arguments", metavar="[OPTIONS]", nargs=-1, type=click.UNPROCESSED)
def submit(only_print: bool, archive: str | None, name: str, arguments: tuple[str, ...]) -> None:
    """Run JOB on a cluster by spark-submit.

    For example: amqp-rt pipeline submit --package jobs.zip ingest --master yarn --address orders …

    Every machine needs msgspec, pyarrow and the files that the options name, such as credentials.
    """
    for job in JOBS:
        if job.name == name:
            break
    else:
        known = [job.name for job in JOBS]
        raise click.UsageError(f"there is no job {name!r}{suggestion(name, known)}")
    command = command_of(job)
    with command.make_context(name, list(arguments)) as context:
        config = context.params.pop("config")
        conf, running = read_told(job.load()[1], config, context.params)
    if archive is not None:
        try:
            package(archive)
        except OSError as error:
            raise click.ClickException(f"cannot write {archive}: {error.strerror}") from None
    line = submit_line(
        job.name,
        [*arguments_of(conf), *arguments_of(running, without=("master", "conf"))],
        master=running.master,
        settings=settings_of(running.conf),
        archive=archive,
    )
    if only_print:
        click.echo(shlex.join(line))
        return
    try:
        home = java_home()
    except NoJava as error:
        raise click.ClickException(str(error)) from None
    os.environ["JAVA_HOME"] = str(home)
    # If spark-submit is not on the path, use the one of pyspark.
    if (program := shutil.which(line[0])) is None:
        found = find_spec("pyspark")
        if found is None or found.origin is None:
            raise click.ClickException(NO_SPARK)
        program = str(Path(found.origin).parent / "bin" / line[0])
    run = subprocess.run([program, *line[1:]], check=False)  # noqa: S603 - the user's own command line
    raise click.exceptions.Exit(run.returncode)


def arguments_of(told: Struct, without: tuple[str, ...] = ()) -> list[str]:
    """Return the command-line options of *told*, without those at their defaults."""
    found = []
    for name, (_, default) in fields_of(type(told)).items():
        value = getattr(told, name)
        if name in without or value == default:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        values = value if isinstance(value, tuple) else (value,)
        # As one word, so that a value with a leading dash is not parsed as an option.
        found += [f"--{flag}={each}" for each in values]
    return found
