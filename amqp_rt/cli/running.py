"""Shared parts of the commands: running trio, reporting errors, logging to standard error."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import wraps
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import click
import trio

from ..addresses import AddressError
from ..container.connections import Connection
from ..container.container import Container
from ..container.delivery_logs import DeliveryLogs
from ..container.running import first_of
from ..durations import parse_duration
from ..errors import AmqpError, printable
from ..net.tls import ClientTls
from .configured import only_checks
from .environment import SecretOption

if TYPE_CHECKING:
    from ..telemetry.probe import Probe

T = TypeVar("T")

PROBE_OPTION = click.option(
    "--probe",
    metavar="URL",
    help="Answer /healthz, /readyz and /metrics over HTTP, without a login, at this URL, such as "
    "http://127.0.0.1:9000; without a host only on this machine.",
)
URL_OPTION = click.option(
    "--url",
    cls=SecretOption,
    metavar="URL",
    envvar="AMQP_URL",
    default="amqp://127.0.0.1:5672",
    show_default=True,
    show_envvar=True,
    help="The peer to connect to: amqp://[USER[:PASSWORD]@]HOST[:PORT][/VHOST], amqps:// for TLS, "
    "ws:// and wss:// for WebSocket, or amqp+unix:///PATH.",
)
PROXY_OPTION = click.option(
    "--proxy",
    metavar="URL",
    help="Connect through a proxy: socks5h://, socks4a:// or http://[USER:PASSWORD@]HOST:PORT; env takes it from "
    "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY.",
)

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.types.FloatParamType):
    """Option type for times: seconds, or a number with a unit."""

    name = "seconds"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Where(NamedTuple):
    """The peer to connect to, and how to verify its certificate."""

    url: str
    tls: ClientTls | None
    proxy: str | None = None

    def connect(self, container: Container) -> AbstractAsyncContextManager[Connection]:
        """Connect without reconnecting."""
        return container.connect(self.url, tls=self.tls, proxy=self.proxy, reconnect=None)


def client_options(command: F) -> F:
    """Add the options for the connection to a command, which gets them as ``where``."""

    @wraps(command)
    def with_where(
        *args: Any, url: str, tls: ClientTls | None, proxy: str | None, **options: Any
    ) -> Any:
        return command(*args, where=Where(url, tls, proxy), **options)

    return cast("F", URL_OPTION(PROXY_OPTION(tls_options(with_where))))


def tls_options(command: F) -> F:
    """Add the options for certificates to a command, which gets them as ``tls``."""

    @wraps(command)
    def with_tls(
        *args: Any, ca: str | None, cert: str | None, key: str | None, **options: Any
    ) -> Any:
        tls = None
        if ca or cert:
            try:
                tls = ClientTls(ca, certificate=cert, key=key)
            except AmqpError as error:
                raise click.UsageError(error.description) from None
        elif key:
            raise click.UsageError("--key goes with --cert")
        return command(*args, tls=tls, **options)

    with_files = with_tls
    for option in (
        click.option(
            "--key", metavar="FILE", help="Private key (PEM), if it is not in the file of --cert."
        ),
        click.option(
            "--cert", metavar="FILE", help="Client certificate (PEM), for peers that request one."
        ),
        click.option(
            "--ca",
            metavar="FILE",
            envvar="AMQP_CA",
            show_envvar=True,
            help="Certificate authorities to trust (PEM); by default those of the system.",
        ),
    ):
        with_files = option(with_files)
    return cast("F", with_files)


def log_options(command: F) -> F:
    """Add the options for log lines to a command, and send the lines to standard error as they say."""

    @wraps(command)
    def with_logs(
        *args: Any, log_level: str, verbose: bool, quiet: bool, log_format: str, **options: Any
    ) -> Any:
        if verbose and quiet:
            raise click.UsageError("-v shows more and -q shows less: give one of them")
        if not only_checks(click.get_current_context()):
            set_up_logs(_level(log_level, verbose=verbose, quiet=quiet), log_format)
        return command(*args, **options)

    with_options = with_logs
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Form of log lines on standard error.",
        ),
        click.option("-q", "--quiet", is_flag=True, help="The same as --log-level warning."),
        click.option("-v", "--verbose", is_flag=True, help="The same as --log-level debug."),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="Lowest level of log lines to write.",
        ),
    ):
        with_options = option(with_options)
    return cast("F", with_options)


def _level(log_level: str, *, verbose: bool, quiet: bool) -> str:
    return "debug" if verbose else "warning" if quiet else log_level


def logs_of(context: click.Context) -> dict[str, str]:
    """Return level and format of log lines, ``log_level`` and ``log_format``, that options of a command say."""
    given = context.params
    level = _level(given["log_level"], verbose=given["verbose"], quiet=given["quiet"])
    return {"log_level": level, "log_format": given["log_format"]}


#: Attributes of all records; others were added by the program.
_OF_EVERY_RECORD: Final = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "taskName")
)
#: Adds the message that is being handled to lines in JSON.
_DELIVERY_LOGS: Final = DeliveryLogs()


class _LineFormatter(logging.Formatter):
    """Log format with one line per message, invisible characters escaped; a traceback follows in its
    own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    """Log format with one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {
            name: value
            for name, value in record.__dict__.items()
            if name not in _OF_EVERY_RECORD and value != ""
        }
        if extra:
            entry["extra"] = extra
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logs(level: str, form: str) -> None:
    """Send the log messages of the package to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(_JsonFormatter())
        handler.addFilter(_DELIVERY_LOGS)
    else:
        handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_deliveries(container: Container) -> None:
    """Let log lines in JSON have the message that a handler of *container* handles."""
    if any(_DELIVERY_LOGS in each.filters for each in logging.getLogger().handlers):
        container.observe(_DELIVERY_LOGS)


def describe(container: Container) -> None:
    """Answer at ``$asyncapi``, unless the application has a node there."""
    with suppress(AddressError):
        container.offer_asyncapi()


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run *work* under trio.

    Raises:
        click.ClickException: The work failed; the text is one sentence.
    """
    try:
        return trio.run(work)
    except BaseException as raised:
        error = first_of(raised)
        if isinstance(error, KeyboardInterrupt):
            raise click.exceptions.Exit(130) from None
        if isinstance(error, SystemExit | BrokenPipeError | click.ClickException):
            raise error from None  # The reader of our output has gone: click exits silently.
        if isinstance(error, AmqpError) and isinstance(error.__cause__, OSError):
            # The error comes from the system, so there is no condition of a peer to show.
            raise click.ClickException(error.description) from None
        if isinstance(error, AmqpError | OSError):
            raise click.ClickException(str(error)) from None
        raise


def is_local_host(host: str) -> bool:
    """Return whether only this machine can connect to *host*, a name or an IP address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_name(name: str | None) -> None:
    """Refuse an empty container-id as the value of ``--name``.

    Raises:
        BadParameter: It is empty.
    """
    if name == "":
        raise click.BadParameter("a container-id has at least one character", param_hint="--name")


def probe_of(container: Container, url: str) -> Probe:
    """Return the probe of *container* for *url* of ``--probe``, which is checked now.

    Raises:
        BadParameter: It is no such URL, or a library is missing.
    """
    from ..telemetry.probe import Probe, parse_probe_url

    try:
        parse_probe_url(url)
        return Probe(container)
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--probe") from None


def report_ready(listeners: list[str], **more: object) -> None:
    """Write the line on standard output by which a service tells that it listens: its URLs, *more* and its pid."""
    # Loaded modules stay for good: exempt them from full collections, which would otherwise delay all connections.
    # Not collected before: collections so far have left a few objects, and one more would delay the start.
    gc.freeze()
    click.echo(f"ready {json.dumps({**more, 'listeners': listeners, 'pid': os.getpid()})}")
