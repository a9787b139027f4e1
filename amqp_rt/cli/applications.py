"""``amqp-rt run`` and ``amqp-rt asyncapi``: applications in modules or files of the user's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

from ..addresses import parse_url, parse_urls
from ..errors import AmqpError
from ..net.tls import ClientTls
from .api_pages import html_page
from .configured import ConfiguredCommand
from .environment import SecretOption
from .notifying import ServiceManager
from .running import (
    PROBE_OPTION,
    check_name,
    describe,
    log_deliveries,
    log_options,
    probe_of,
    report_ready,
    tls_options,
)
from .running import run as run_trio
from .supervising import Supervisor, own_command, watch_files
from .targets import Target, check_profiles, container_of, load_target
from .worker_channels import WORKER, WorkerChannel

if TYPE_CHECKING:
    from ..telemetry.probe import Probe


@click.command(cls=ConfiguredCommand)
@click.argument("application", metavar="MODULE:NAME")
@click.option(
    "--url",
    "urls",
    cls=SecretOption,
    metavar="URL",
    multiple=True,
    envvar="AMQP_URL",
    show_envvar=True,
    help="A peer from whose addresses the nodes of the application consume, such as a broker. Several are a failover "
    "list. Repeatable.",
)
@click.option(
    "--listen",
    metavar="URL",
    multiple=True,
    help="Address to listen on, such as amqp://127.0.0.1:5672. Repeatable.",
)
@click.option("--factory", is_flag=True, help="NAME is a function that returns the container.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Number of processes, NAME-1, NAME-2, …, which share the queues at --url. Those that fail are started again.",
)
@click.option(
    "--reload",
    "reloads",
    is_flag=True,
    help="Start again when a Python file in the current folder, or in that of FILE.py, changes.",
)
@PROBE_OPTION
@click.option("--name", metavar="NAME", help="Container-id; by default that of the container.")
@tls_options
@log_options
def run(
    application: str,
    urls: tuple[str, ...],
    listen: tuple[str, ...],
    factory: bool,
    workers: int,
    reloads: bool,
    probe: str | None,
    name: str | None,
    tls: ClientTls | None,
) -> None:
    """Run an application until SIGINT or SIGTERM, after which running handlers may finish.

    MODULE:NAME is a container, or a broker, that a module defines, such as app.main:container; FILE.py:NAME one in
    a file. Once it serves, a line on standard output tells where: ready {"listeners": [...], "pid": ...}. With
    --workers or --reload, SIGHUP starts the processes again.
    """
    check_name(name)
    if urls:
        _check("--url", partial(parse_urls, urls))
    for each in listen:
        _check("--listen", partial(parse_url, each, listening=True))
    if probe is not None:
        from ..telemetry.probe import parse_probe_url, require_library

        _check("--probe", partial(parse_probe_url, probe))
        _check("--probe", require_library)
    manager = ServiceManager()
    channel = WorkerChannel(os.environ.pop(WORKER)) if WORKER in os.environ else None
    if channel is None and (workers > 1 or reloads):
        watched = _watched(application) if reloads else []
        if workers > 1 and listen:
            raise click.UsageError(
                "--workers share the queues of a peer, but no port: give --url alone, or --listen with one worker"
            )
        supervisor = Supervisor(own_command(), workers, manager, watched, probe)
        raise click.exceptions.Exit(run_trio(supervisor.run))
    target = load_target(application, factory=factory)
    container = container_of(target)
    if not urls and not listen and not container.timed:
        raise click.UsageError("where does it run? Give --url URL, --listen URL, or both.")
    check_profiles(target, listen)
    container.name = name or container.name
    if channel is not None and workers > 1:
        container.name += f"-{channel.number}"
    log_deliveries(container)
    describe(container)
    asked = None if probe is None else probe_of(container, probe)
    run_trio(partial(_run, target, urls, listen, tls, manager, channel, asked, probe))


def _check(option: str, parse: Callable[[], object]) -> None:
    try:
        parse()
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint=option) from None


def _watched(application: str) -> list[Path]:
    """Return the folders with the code of *application*."""
    watch_files([])  # A missing library is reported before anything starts.
    place = Path(application.rpartition(":")[0])
    return [Path.cwd(), *([place.resolve().parent] if place.suffix == ".py" else [])]


async def _run(
    target: Target,
    urls: tuple[str, ...],
    listen: tuple[str, ...],
    tls: ClientTls | None,
    manager: ServiceManager,
    channel: WorkerChannel | None,
    asked: Probe | None,
    probe: str | None,
) -> None:
    """Run *target* until it is stopped, and report its state."""
    container = container_of(target)
    options: dict[str, Any] = {} if tls is None else {"tls": tls}
    work = partial(target.run_async, urls or None, listen=listen, **options)
    async with trio.open_nursery() as beside:
        if channel is not None:
            # The supervisor has the port of the probe.
            beside.start_soon(channel.run, target.stop, asked)
        more: dict[str, object] = {}
        if asked is not None and channel is None:
            # Before the peer is there: until then the application is live, and not ready.
            more["probe"] = await beside.start(asked.serve, probe)
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(work)
            if container.ready:
                if channel is None:
                    report_ready(bound, **more)
                else:
                    await channel.report(container.name, bound)
                manager.ready()
                beside.start_soon(manager.show_life)
            with suppress(AmqpError):  # The other task raises it.
                await target.serve()
            manager.stopping()
        beside.cancel_scope.cancel()


@click.command()
@click.argument("application", metavar="MODULE:NAME")
@click.option("--factory", is_flag=True, help="NAME is a function that returns the container.")
@click.option("--html", is_flag=True, help="Write a page for people instead of JSON.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to a file instead of standard output.",
)
@click.option(
    "--api-version",
    metavar="VERSION",
    default="1.0.0",
    show_default=True,
    help="Version of the API.",
)
def asyncapi(
    application: str, factory: bool, html: bool, output: Path | None, api_version: str
) -> None:
    """Describe the nodes of an application as an AsyncAPI 3.0 document.

    MODULE:NAME or FILE.py:NAME is a container or a broker, as for amqp-rt run. It is loaded, and not started.
    """
    container = container_of(load_target(application, factory=factory))
    document = container.asyncapi(version=api_version)
    text = (
        html_page(document) if html else json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    )
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from None
