"""``amqp-rt servicebus``: run a namespace in a process of its own, for clients in any language."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import click
import trio

from amqp_rt import Broker, ServerTls
from amqp_rt.cli.limit_options import limit_value
from amqp_rt.cli.running import is_local_host, log_options, report_ready, run
from amqp_rt.config_files import SettingsError
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.security.identities import secret_of

from .addresses import WEBSOCKET_PATH
from .administration import AdministrationError
from .bounds import DEFAULT_BOUNDS, SERVICE_BOUNDS, Bounds, is_bound, with_bound
from .configuration import Configuration, read_configuration
from .declarations import SasKey, check_policies
from .namespace import Namespace
from .quotas import SERVICE_LIMITS
from .tokens import DEFAULT_KEY, DEFAULT_POLICY

__all__ = ["servicebus"]

# A line with \b keeps the lines of its paragraph as they are.
_EXAMPLES: Final = """\b
Examples:
  amqp-rt servicebus
  amqp-rt servicebus --config Config.json
  amqp-rt servicebus --host 0.0.0.0 --tls-cert server.pem --key app=@key.txt
"""
_PORT: Final = click.IntRange(0, 65_535)


@click.command(epilog=_EXAMPLES)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Entities and keys of the namespace: TOML, or the Config.json of Microsoft's emulators if its name "
    "ends in .json. Without one the namespace is empty, and administration clients create entities.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to listen on. Other machines can connect only if you replace the "
    "well-known key: see --key.",
)
@click.option(
    "--port",
    type=_PORT,
    default=5672,
    show_default=True,
    help="Port for AMQP and for the administration over HTTP; 0 for any.",
)
@click.option(
    "--admin-port",
    type=_PORT,
    default=5300,
    show_default=True,
    help="Another port for the administration, where clients of .NET expect that of the emulator; 0 for any.",
)
@click.option(
    "--websocket-port",
    type=_PORT,
    help="Port for AMQP over WebSocket; 0 for any. Clients find it there with TLS only, apart from those for "
    "Python.",
)
@click.option(
    "--tls-cert",
    metavar="FILE",
    help="Certificate (PEM). The ports then accept TLS too; from other machines, they accept nothing else.",
)
@click.option(
    "--tls-key", metavar="FILE", help="Private key (PEM), if it is not in the file of --tls-cert."
)
@click.option(
    "--key",
    "keys",
    metavar="NAME=KEY",
    multiple=True,
    help="Shared access policy with all rights, instead of "
    f"{DEFAULT_POLICY}={DEFAULT_KEY}; NAME=@FILE reads the key from a file. Policies with fewer rights are "
    "declared in the file of --config. Repeatable.",
)
@click.option(
    "--realistic",
    is_flag=True,
    help="Apply the limits of the service, such as locks of at most five minutes.",
)
@click.option(
    "--limit",
    "limits",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a limit: one of the namespace, such as rules_max=100, or one of the broker, which amqp-rt limits lists. "
    "Repeatable.",
)
@log_options
def servicebus(
    config: Path | None,
    host: str,
    port: int,
    admin_port: int,
    websocket_port: int | None,
    tls_cert: str | None,
    tls_key: str | None,
    keys: tuple[str, ...],
    realistic: bool,
    limits: tuple[str, ...],
) -> None:
    """Run a namespace of Azure Service Bus and Event Hubs until SIGINT or SIGTERM.

    Messages are in memory only. Once listening, a line on standard output has the addresses and the
    connection string: ready {"connection_string": "Endpoint=sb://…", "listeners": [...], "pid": ...}.
    """
    configuration = _configuration(config)
    policies = _policies(keys) or configuration.keys
    local = is_local_host(host)
    if not local and any(DEFAULT_KEY in (key.key, key.secondary) for key in _known(policies)):
        raise click.UsageError(
            f"the key {DEFAULT_KEY} is known to everyone, and other machines can reach {host}: give --key "
            "NAME=KEY, or listen on 127.0.0.1"
        )
    tls = _certificate(tls_cert, tls_key)
    if not local and tls is None:
        raise click.UsageError(
            f"other machines can reach {host}, and tokens would travel in clear: give --tls-cert FILE, or "
            "listen on 127.0.0.1"
        )
    bounds, broker_limits = _limits(limits, realistic=realistic)
    namespace = Namespace(
        *configuration.declarations, keys=policies or None, realistic=realistic, bounds=bounds
    )
    broker = _broker(namespace, tls, broker_limits, config)
    shown = f"[{host}]" if ":" in host else host
    scheme = "amqp" if local else "amqps"
    urls = [f"{scheme}://{shown}:{port}", f"{scheme}://{shown}:{admin_port}"]
    if websocket_port is not None:
        secure = "ws" if tls is None else "wss"
        urls.append(f"{secure}://{shown}:{websocket_port}{WEBSOCKET_PATH}")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(partial(broker.run_async, listen=urls))
            report_ready(bound, connection_string=_connection_string(namespace, bound[0]))

    run(main)


def _limits(given: tuple[str, ...], *, realistic: bool) -> tuple[Bounds, Limits]:
    """Return the bounds of the namespace and the limits of the broker with those *given*."""
    bounds = SERVICE_BOUNDS if realistic else DEFAULT_BOUNDS
    values: dict[str, int | float] = dict(SERVICE_LIMITS) if realistic else {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r:.60} is not NAME=VALUE", param_hint="--limit")
        try:
            if is_bound(name):
                bounds = with_bound(bounds, name, value)
            else:
                values[name] = limit_value(name, value)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--limit") from None
    return bounds, Limits(**values)  # type: ignore[arg-type]


def _broker(
    namespace: Namespace, tls: ServerTls | None, limits: Limits, config: Path | None
) -> Broker:
    try:
        # The synchronous SDK for Python sends the origin that a page would; tokens are what protects the namespace.
        return Broker(
            "servicebus", addons=[namespace], tls=tls, origins=("*",), volatile=True, limits=limits
        )
    except (ValueError, AdministrationError) as error:
        # Without a file the namespace is empty, and the options are what cannot be.
        where = "" if config is None else f"{config}: "
        raise click.ClickException(f"{where}{error}") from None


def _connection_string(namespace: Namespace, url: str) -> str:
    """Return the connection string for *url*, without the key if that is a secret."""
    text = namespace.connection_string(url)
    secrets = {key.key for key in namespace.keys.values()} - {DEFAULT_KEY}
    for secret in secrets:
        text = text.replace(f"SharedAccessKey={secret};", "SharedAccessKey=KEY;")
    return text


def _configuration(path: Path | None) -> Configuration:
    if path is None:
        return Configuration(())
    try:
        return read_configuration(path)
    except SettingsError as error:
        raise click.BadParameter(error.description, param_hint="--config") from None


def _policies(given: tuple[str, ...]) -> dict[str, SasKey]:
    found: dict[str, SasKey] = {}
    for text in given:
        name, equals, key = text.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{name!r:.60} is not NAME=KEY", param_hint="--key")
        try:
            found[name] = SasKey(secret_of(key))
            check_policies(found)
        except (AmqpError, ValueError) as error:
            text = error.description if isinstance(error, AmqpError) else str(error)
            raise click.BadParameter(text, param_hint="--key") from None
    return found


def _known(policies: dict[str, SasKey]) -> list[SasKey]:
    return list(policies.values()) or [SasKey(DEFAULT_KEY)]


def _certificate(cert: str | None, key: str | None) -> ServerTls | None:
    if cert is None:
        if key is not None:
            raise click.UsageError("--tls-key goes with --tls-cert")
        return None
    try:
        return ServerTls(cert, key)
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--tls-cert") from None
