"""``amqp-rt serve``: run a broker, optionally with the nodes of an application."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol

import click
import trio
from click.core import ParameterSource

from ..addresses import WEB_SCHEMES, Url, host_name_of, origin_of, parse_url
from ..broker.broker import Broker, front_of, installed_fronts, store_of
from ..broker.declarations import declarations_in, declared_by
from ..broker.filtering import selectors
from ..broker.lifecycles import LifeCycles, life_cycles_by
from ..broker.nodes import Declaration
from ..container.container import Container
from ..container.entry import SASL_POLICIES, SaslPolicy
from ..container.running import stop_on_signals
from ..errors import AmqpError
from ..limits import DEFAULT_LIMITS
from ..net.edges import Edges, EdgeSettings
from ..net.tls import ServerTls
from ..net.traces.recording import Traces
from ..security.access import Access
from ..security.identities import Users, parse_user
from ..stores.base import SharedStore, Store, StoreFull
from .configured import ConfiguredCommand, only_checks
from .edging import EDGES_MAX, EdgeProcesses, check_edges
from .environment import SecretOption
from .limit_options import CbsTable, LimitsTable, cbs_of, limits_of
from .mesh_options import MeshOptions, mesh_options
from .notifying import ServiceManager
from .running import (
    PROBE_OPTION,
    check_name,
    describe,
    is_local_host,
    log_deliveries,
    log_options,
    logs_of,
    probe_of,
    report_ready,
    run,
)
from .targets import check_profiles, load_target

log = logging.getLogger("amqp_rt.cli")

#: Conditions of errors that a second start would meet again: an option has to change.
_MISTAKES: Final = frozenset(
    {
        "amqp:invalid-field",
        "amqp:not-allowed",
        "amqp:precondition-failed",
        "amqp:resource-limit-exceeded",
        "amqp:unauthorized-access",
    }
)


@click.command(cls=ConfiguredCommand, tables={"limits": LimitsTable, "cbs": CbsTable})
@click.argument("application", metavar="[FILE.py:container]", required=False)
@click.option(
    "--dev",
    is_flag=True,
    help="Start a broker for experiments, on this machine only: no logins, every installed "
    "protocol, queues created on first use, nothing stored.",
)
@click.option(
    "--listen",
    "urls",
    metavar="URL",
    multiple=True,
    default=("amqp://127.0.0.1:5672",),
    show_default=True,
    help="Address to listen on: amqp://HOST:PORT (port 0 for any), amqps://HOST:PORT, "
    "ws://HOST:PORT/PATH, wss://, amqp+unix:///PATH. Repeatable.",
)
@click.option(
    "--user",
    "users",
    cls=SecretOption,
    metavar="NAME:PASSWORD",
    multiple=True,
    help="A user who may log in. NAME:@FILE reads the password from a file, NAME:- from standard "
    "input, NAME from $AMQP_RT_PASSWORD_NAME; a password on the command line is visible to "
    "others. Repeatable.",
)
@click.option(
    "--users",
    "users_file",
    metavar="FILE",
    help="File of users with hashed passwords, as amqp-rt user add writes it.",
)
@click.option(
    "--anonymous",
    is_flag=True,
    help="Accept connections without credentials. The default when there is no --user and all "
    "listeners are local.",
)
@click.option(
    "--sasl",
    "sasl_policy",
    type=click.Choice(SASL_POLICIES),
    help="Whether clients log in: required, optional (clients may leave SASL out, and are anonymous "
    "then), or off. The default is required, and optional where clients without credentials "
    "are accepted.",
)
@click.option(
    "--access",
    "rules",
    metavar="FILE",
    help="Access rules, in a TOML file. Without one, every user may do everything.",
)
@click.option(
    "--node",
    "nodes",
    metavar="KIND:NAME[?OPTIONS]",
    multiple=True,
    help="Declare a node, such as queue:orders, topic:prices, log:clicks or "
    "'queue:work?priorities=5&dead_letter=dead'. Repeatable.",
)
@click.option(
    "--nodes",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A TOML or YAML file that declares nodes. Repeatable.",
)
@click.option(
    "--auto-create",
    metavar="KIND:PATTERN[?OPTIONS]",
    multiple=True,
    help="Declare nodes on first use, such as 'queue:orders-*' or 'queue:jobs-*?lock_s=30'; the "
    "most specific pattern wins. Repeatable.",
)
@click.option(
    "--virtual-host",
    "virtual_hosts",
    metavar="NAME",
    multiple=True,
    help="A virtual host, with nodes of its own. Connections that name another one are refused, "
    "unless '' is given too, for a default one. Repeatable.",
)
@click.option(
    "--journal",
    metavar="OPTIONS",
    is_flag=False,
    flag_value="",
    help="Record the life-cycle events of messages in the log $journal; with options such as "
    "'every=10&per_second=100&addresses=orders-*'.",
)
@click.option(
    "--store",
    cls=SecretOption,
    metavar="STORE",
    default="memory:",
    show_default=True,
    help="Store of nodes and durable messages: sqlite:PATH, postgresql://USER@HOST/DATABASE if amqp-rt-postgres is "
    "installed, or memory: to store nothing. A password belongs in the file of AMQP_RT_SERVE_STORE_FILE or PGPASSFILE.",
)
@click.option(
    "--volatile",
    is_flag=True,
    help="Accept durable messages without a store; by default they are rejected.",
)
@click.option("--name", metavar="NAME", default="broker", show_default=True, help="Container-id.")
@click.option(
    "--front",
    "protocols",
    metavar="NAME",
    multiple=True,
    help="Accept another protocol beside AMQP 1.0 on the same listeners, such as amqp091 if "
    "amqp-rt-amqp091 is installed. Repeatable.",
)
@click.option(
    "--plain-in-clear",
    is_flag=True,
    help="Accept passwords on unencrypted connections from other machines.",
)
@click.option(
    "--tls-cert",
    metavar="FILE",
    help="Certificate (PEM) for amqps:// listeners; amqp:// listeners then accept TLS too. SIGHUP "
    "reloads the files.",
)
@click.option(
    "--tls-key", metavar="FILE", help="Private key (PEM), if it is not in the file of --tls-cert."
)
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    help="Authorities (PEM) of client certificates, which clients must then present; a certificate "
    "names its user.",
)
@click.option(
    "--origin",
    "origins",
    metavar="URL",
    multiple=True,
    help="Web pages that may connect to ws:// and wss:// listeners, such as https://example.org; "
    "* for all. Repeatable.",
)
@click.option(
    "--tls-required",
    is_flag=True,
    help="Refuse connections without TLS on every port, and ws:// too.",
)
@click.option(
    "--limit",
    "given_limits",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a limit, such as idle_timeout_s=30 or message_size_max=64MiB; amqp-rt limits lists "
    "them. In the file of --config: the table [limits]. Repeatable.",
)
@click.option(
    "--cbs",
    "given_cbs",
    cls=SecretOption,
    metavar="NAME=VALUE",
    multiple=True,
    help="Accept tokens at $cbs: sas.RULE=KEY, jwt.audience=NAME with jwt.jwks=URL, "
    "jwt.keys.ID=FILE or jwt.secret=KEY, swt.key=KEY; a KEY may be @FILE. In the file of "
    "--config: the table [cbs]. Repeatable.",
)
@click.option(
    "--settle-second/--no-settle-second",
    default=True,
    help="Accept rcv-settle-mode second from senders; Azure's clients need --no-settle-second.",
)
@click.option(
    "--trace",
    metavar="FOLDER",
    help="Record every connection in a file of FOLDER, messages included; see amqp-rt trace.",
)
@PROBE_OPTION
@click.option(
    "--http",
    metavar="URL",
    help="Serve the JSON API and the console, with a login, at this URL, such as http://127.0.0.1:15672; https://HOST:PORT "
    "takes --tls-cert. Needs amqp-rt-console.",
)
@click.option(
    "--http-read-only",
    is_flag=True,
    help="Refuse requests over --http that change something.",
)
@click.option(
    "--http-host",
    "http_hosts",
    metavar="NAME",
    multiple=True,
    help="A further name under which browsers reach --http. Repeatable.",
)
@click.option(
    "--http-origin",
    metavar="URL",
    help="Where browsers reach --http behind a proxy with TLS, such as https://console.example: cookies are for TLS only then.",
)
@click.option(
    "--otel",
    is_flag=True,
    help="Send spans and metrics by OpenTelemetry, whose own variables name exporter and endpoint, such as "
    "OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option(
    "--edges",
    "edge_count",
    metavar="N",
    type=click.IntRange(1, EDGES_MAX),
    help="Carry TLS and WebSocket in N processes of their own, so that more cores are used. Needs Linux.",
)
@mesh_options
@log_options
@click.pass_context
def serve(  # noqa: C901
    context: click.Context,
    application: str | None,
    dev: bool,
    urls: tuple[str, ...],
    users: tuple[str, ...],
    users_file: str | None,
    anonymous: bool,
    sasl_policy: SaslPolicy | None,
    rules: str | None,
    nodes: tuple[str, ...],
    files: tuple[Path, ...],
    auto_create: tuple[str, ...],
    virtual_hosts: tuple[str, ...],
    journal: str | None,
    store: str,
    volatile: bool,
    name: str,
    protocols: tuple[str, ...],
    plain_in_clear: bool,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    origins: tuple[str, ...],
    tls_required: bool,
    given_limits: tuple[str, ...],
    given_cbs: tuple[str, ...],
    settle_second: bool,
    trace: str | None,
    probe: str | None,
    http: str | None,
    http_read_only: bool,
    http_hosts: tuple[str, ...],
    http_origin: str | None,
    otel: bool,
    edge_count: int | None,
    joining: MeshOptions,
) -> None:
    """Run a broker until SIGINT or SIGTERM, after which running work may finish.

    FILE.py:container, or MODULE:container, adds the nodes of a container that a Python file or module defines. Once listening, a
    line on standard output has the addresses: ready {"listeners": [...], "pid": ...}.
    """
    check_name(name)
    places = [_place(url) for url in urls]
    with _mistakes_of("--origin"):
        origins = tuple(each if each == "*" else origin_of(each) for each in origins)
    limits = limits_of(context, given_limits)
    cbs = cbs_of(context, given_cbs, limits)
    if dev:
        _check_dev(places)
        anonymous = volatile = True
        auto_create = (*auto_create, *({"queue:*"} - {*auto_create}))
    kept = _store(store)
    declared = [declared_in("--node", text) for text in nodes]
    for file in files:
        try:
            declarations_in(file)
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--nodes") from None
    recorded: LifeCycles | bool = False
    if journal is not None:
        try:
            recorded = life_cycles_by(journal)
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--journal") from None
    for text in auto_create:
        declared_in("--auto-create", text)
    known = Users()
    for text in users:
        if only_checks(context) and text.endswith(":-"):
            continue  # A check does not wait for a password on standard input.
        try:
            known.add(*parse_user(text))
        except Exception as error:
            raise _mistake(error, "--user") from None
    if users_file is not None:
        try:
            known.load(users_file)
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--users") from None
    tls = _certificates(tls_cert, tls_key, tls_client_ca)
    if tls is None and (tls_required or any(place.tls for place in places)):
        raise click.UsageError("TLS needs a certificate: give --tls-cert FILE.")
    if tls_required and (clear := [place for place in places if place.scheme == "ws"]):
        raise click.UsageError(
            f"--tls-required: {clear[0]} has no TLS; listen on wss:// instead, or on amqp://, which"
            " clients can upgrade."
        )
    if edge_count and tls is None and not any(place.scheme == "ws" for place in places):
        raise click.UsageError(
            "--edges N carries TLS and WebSocket, and no listener has any: give --tls-cert FILE, or "
            "listen on ws://."
        )
    named = bool(users or known or tls_client_ca or cbs)
    if not named and not anonymous and not all(_is_local(place) for place in places):
        raise click.UsageError(
            "who may connect? Give --user NAME:PASSWORD, --users FILE, --tls-client-ca FILE, or "
            "--anonymous."
        )
    if sasl_policy == "off" and known:
        raise click.UsageError("--sasl off disables logins: leave --user and --users out.")
    if (
        sasl_policy in ("optional", "off")
        and not anonymous
        and not all(_is_local(place) for place in places)
    ):
        raise click.UsageError(
            f"--sasl {sasl_policy} accepts connections without credentials: add --anonymous to "
            "allow that, or listen on this machine only."
        )
    sasl = ["EXTERNAL"] if tls_client_ca else []
    if known:
        sasl += ["PLAIN", *(f"SCRAM-{each}" for each in known.scram_hashes)]
    if cbs is not None:
        sasl += ["AMQPCBS", "MSSBCBS", "OAUTHBEARER", "XOAUTH2"]
    # Clients with a token need not log in, and have no rights before they put it.
    sasl += ["ANONYMOUS"] if anonymous or not (known or tls_client_ca) else []
    try:
        access = None if rules is None else Access.load(rules)
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--access") from None
    if application is None:
        try:
            # With --dev too, which offers all: a plug-in that was named must be there.
            fronts = [front_of(each) for each in protocols]
            fronts = installed_fronts() if dev else fronts
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--front") from None
        broker = Broker(
            name,
            auto_create=auto_create,
            users=known or None,
            sasl=None if sasl_policy == "off" else sasl,
            sasl_policy=sasl_policy,
            access=access,
            plain_in_clear=plain_in_clear,
            tls=tls,
            tls_required=tls_required,
            limits=limits,
            cbs=cbs,
            settle_second=settle_second,
            origins=origins,
            store=kept,
            volatile=volatile,
            virtual_hosts=virtual_hosts or None,
            journal=recorded,
            fronts=fronts,
        )
    else:
        if (
            named or anonymous or sasl_policy or rules or tls is not None or protocols
            or limits != DEFAULT_LIMITS or not settle_second or edge_count
        ):  # fmt: skip
            raise click.UsageError(
                "options for users, access, TLS, edges, protocols and limits do not apply to the container of"
                " FILE.py"
            )
        nodes_of = load_target(application)
        if not isinstance(nodes_of, Container):
            raise click.BadParameter(
                f"{application} is a broker, which amqp-rt run runs", param_hint="FILE.py:container"
            )
        log_deliveries(nodes_of)
        describe(nodes_of)
        broker = Broker(
            container=nodes_of,
            auto_create=auto_create,
            store=kept,
            volatile=volatile,
            virtual_hosts=virtual_hosts or None,
            journal=recorded,
        )

    check_profiles(broker, urls)
    asked = None if probe is None else probe_of(broker.container, probe)
    door = None
    if http is None:
        for option, given in (
            ("--http-read-only", http_read_only), ("--http-host", http_hosts), ("--http-origin", http_origin)
        ):  # fmt: skip
            if given:
                raise click.UsageError(f"{option} goes with --http URL")
    else:
        with _mistakes_of("--http-host"):
            http_hosts = tuple(map(host_name_of, http_hosts))
        with _mistakes_of("--http-origin"):
            http_origin = http_origin and origin_of(http_origin, schemes=WEB_SCHEMES)
        door = _door(broker, http, read_only=http_read_only, hosts=http_hosts, origin=http_origin)
    member = joining.member(broker)
    if only_checks(context):
        if otel:
            _check_otel()
        if trace is not None:
            with _mistakes_of_folder(trace):
                Traces(trace).check_folder()
        if edge_count:
            check_edges()
        apart = Broker(
            limits=limits,
            auto_create=auto_create,
            virtual_hosts=virtual_hosts or None,
            journal=recorded,
        )
        run(partial(_declare_apart, apart, declared, files))
        return

    if trace is not None:
        broker.container.traces = _traces(trace, broker.container)
    end_otel = _start_otel(broker) if otel else None
    manager = ServiceManager()
    edges = Edges() if edge_count else None
    broker.container.entry.edges = edges

    async def main() -> None:
        # Signals are handled until the very end, so that a second one can end the wait.
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signals, partial(_stop, broker, nursery.cancel_scope))
            if tls is not None or manager.is_there:
                await nursery.start(_reload_on_hangup, tls, edges, manager)
            more: dict[str, object] = {}
            if edge_count and edges is not None:
                settings = EdgeSettings(
                    limits=limits,
                    certificate=tls_cert or "",
                    key=tls_key or "",
                    client_ca=tls_client_ca or "",
                    origins=origins,
                    **logs_of(context),
                )
                processes = EdgeProcesses(edge_count, settings, edges)
                more["edges"] = await nursery.start(processes.run)
            if asked is not None:
                # Before the broker, whose store may take long to read: it is not ready until then.
                more["probe"] = await nursery.start(asked.serve, probe)
            if isinstance(kept, SharedStore):
                nursery.start_soon(manager.show_standby, lambda: broker.standby)
            async with broker:
                await _declare(broker, declared, files)
                with _mistakes_of("--listen"):
                    bound = await broker.listen(*urls)
                async with member, AsyncExitStack() as doors:
                    if door is not None:
                        more["http"] = await doors.enter_async_context(door.open())
                    report_ready(bound, **more)
                    manager.ready()
                    nursery.start_soon(manager.show_life)
                    nursery.start_soon(trio.to_thread.run_sync, selectors.prepare)
                    await broker.serve()
                    manager.stopping()
            nursery.cancel_scope.cancel()

    try:
        run(main)
    finally:
        if end_otel is not None:
            end_otel()


async def _declare(broker: Broker, declared: list[Declaration], files: tuple[Path, ...]) -> None:
    """Create the nodes of ``--node`` and ``--nodes``.

    Raises:
        click.BadParameter: A node contradicts another one, or cannot be created with these options.
    """
    with _mistakes_of("--node"):
        await broker.declare(*declared)
    for file in files:
        with _mistakes_of("--nodes"):
            await broker.declare_from(file)


async def _declare_apart(
    broker: Broker, declared: list[Declaration], files: tuple[Path, ...]
) -> None:
    """Create the nodes in *broker*, which has no store and does not listen, as :func:`_declare` does."""
    async with broker:
        await _declare(broker, declared, files)


@contextmanager
def _mistakes_of(option: str) -> Iterator[None]:
    """Report failures of the block that a second start would not end as mistakes in *option*.

    Raises:
        click.BadParameter: There was such a failure.
    """
    try:
        yield
    except AmqpError as error:
        # Room on a disk may come without a change of the options.
        if error.condition not in _MISTAKES or isinstance(error, StoreFull):
            raise
        raise _mistake(error, option) from None


def _stop(broker: Broker, scope: trio.CancelScope) -> None:
    """Stop *broker*; if it waits for another one in *scope*, end that."""
    broker.stop()
    if broker.standby:
        scope.cancel()


class HttpDoor(Protocol):
    """Door of a plug-in (entry point ``http`` of the group ``amqp_rt.doors``)."""

    def open(self) -> AbstractAsyncContextManager[str]:
        """Listen until the end of the block; return the URL with the port."""


def _door(broker: Broker, url: str, **options: object) -> HttpDoor:
    """Return the HTTP door of *broker*, which is checked now."""
    found = next(iter(entry_points(group="amqp_rt.doors", name="http")), None)
    if found is None:
        raise click.UsageError("--http needs a plug-in: pip install amqp-rt-console")
    try:
        door: HttpDoor = found.load()(broker, url, **options)
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--http") from None
    return door


def _start_otel(broker: Broker) -> Callable[[], None]:
    """Observe *broker* with OpenTelemetry; return the function that sends what is left."""
    from ..telemetry.sdk import start_sdk

    try:
        end = start_sdk(broker.container.name)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    from ..telemetry.otel import Otel

    broker.container.observe(Otel())
    return end


def _store(text: str) -> Store | None:
    """Return the store of ``--store``, None for ``memory:``; it is not opened.

    Raises:
        click.BadParameter: There is no such store, or its file is something else.
    """
    try:
        kept = store_of(text)
        if text.startswith("sqlite:"):
            from ..stores.sqlite_files import refuse_foreign  # loads SQLite, as store_of did

            path = os.path.abspath(text.removeprefix("sqlite:"))
            # A file that is absent or cannot be read is for the broker, which creates it or gives the reason.
            if os.path.isfile(path) and os.access(path, os.R_OK):
                refuse_foreign(Path(path))
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--store") from None
    return kept


def _check_otel() -> None:
    """Check that what ``--otel`` needs is installed."""
    from ..telemetry.sdk import check_sdk

    try:
        check_sdk()
    except AmqpError as error:
        raise click.UsageError(error.description) from None


def _certificates(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    if cert is None:
        if key or client_ca:
            raise click.UsageError("--tls-key and --tls-client-ca go with --tls-cert")
        return None
    try:
        return ServerTls(cert, key, client_ca=client_ca)
    except AmqpError as error:
        raise click.UsageError(error.description) from None


async def _reload_on_hangup(
    tls: ServerTls | None,
    edges: Edges | None,
    manager: ServiceManager,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Reload the certificates at each SIGHUP; existing connections keep theirs.

    Without certificates the signal does nothing: ``systemctl reload`` of a common unit must not end the broker.
    """
    if not hasattr(signal, "SIGHUP"):
        task_status.started()
        return
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        async for _ in hangups:
            if tls is None:
                log.info("nothing was read again: there are no certificates")
                manager.reloading()
                manager.reloaded()
                continue
            manager.reloading()
            try:
                tls.reload()
            except AmqpError as error:
                log.error("the certificates stay as they were: %s", error.description)
            else:
                if edges is not None:
                    await edges.reload()
                log.info("the certificates were read again")
            manager.reloaded()


def declared_in(option: str, text: str) -> Declaration:
    """Return the declaration in an option's value; a mistake becomes an error of the option."""
    try:
        return declared_by(text)
    except Exception as error:
        raise _mistake(error, option) from None


def _mistake(error: Exception, option: str) -> click.BadParameter:
    return click.BadParameter(str(getattr(error, "description", error)), param_hint=option)


def _place(url: str) -> Url:
    try:
        return parse_url(url, listening=True)
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--listen") from None


#: Options that contradict ``--dev``, which admits all clients and stores nothing.
_NOT_DEV: Final = (
    *("application", "users", "users_file", "sasl_policy", "rules", "store"),
    *("tls_client_ca", "tls_required", "given_cbs"),
)


def _check_dev(places: list[Url]) -> None:
    """Refuse ``--dev`` if other machines could connect, or if an option contradicts it.

    Raises:
        click.UsageError: Names the address or the option.
    """
    for place in places:
        if not _is_local(place):
            raise click.UsageError(
                f"--dev accepts connections without credentials, and other machines can reach {place}: "
                "listen on 127.0.0.1, or leave --dev out and configure users"
            )
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in _NOT_DEV and source is not ParameterSource.DEFAULT:
            shown = option.opts[0] if isinstance(option, click.Option) else option.metavar
            raise click.UsageError(
                f"--dev lets everybody in and keeps nothing: leave --dev or {shown} out"
            )


def _is_local(place: Url) -> bool:
    """Return whether only this machine can connect there."""
    return place.scheme in ("amqp+unix", "memory") or is_local_host(place.host)


def _traces(folder: str, container: Container) -> Traces:
    """Return traces in *folder*, which is created now to report failures early."""
    traces = Traces(folder, limits=container.limits)
    with _mistakes_of_folder(folder):
        traces.make_folder()
    return traces


@contextmanager
def _mistakes_of_folder(folder: str) -> Iterator[None]:
    """Report failures of the block as mistakes in ``--trace``, the name of *folder*.

    Raises:
        click.BadParameter: There was such a failure.
    """
    try:
        yield
    except OSError as error:
        raise click.BadParameter(
            f"{folder} cannot be a folder of traces: {error.strerror}", param_hint="--trace"
        ) from None
