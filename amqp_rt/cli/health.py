"""``amqp-rt health``: whether a broker is live, or ready, by the exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import click

from ..container.managing import ManagementClient
from .listing import ask, json_option
from .running import Seconds, Where, client_options
from .tables import cell, plain

_TYPE: Final = "amqp_rt.container"
#: Exit code: the broker answers, but is not ready.
NOT_READY: Final = 3


@click.command()
@client_options
@click.option(
    "--ready", is_flag=True, help="Ask whether it can be used, and not only whether it answers."
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=5.0,
    show_default=True,
    metavar="TIME",
    help="Maximum time for the answer; a broker that takes longer is not live.",
)
@json_option
def health(where: Where, ready: bool, timeout: float, as_json: bool) -> None:
    """Tell by the exit code whether the broker at --url is live or, with --ready, ready: for probes.

    \b
    0  live: it accepted the login and answered; with --ready: it takes work, as /readyz says
    1  no answer in time, or a login without the right to manage $management
    3  with --ready: it answers, but is not ready; the reasons are shown

    For the readiness of a member of a mesh there is amqp-rt mesh health.
    """  # noqa: D301

    async def work(there: ManagementClient) -> Mapping[str, Any]:
        for row in [each async for each in there.query(_TYPE)]:
            return row
        raise click.ClickException("the peer has no container: it is no broker of this package")

    found = ask(where, work, within=timeout)
    reasons = [str(each) for each in found.get("reasons") or ()]
    is_ready = bool(found.get("ready"))
    if as_json:
        row = {key: found.get(key) for key in ("name", "connections", "nodes", "bytes", "stuck")}
        click.echo(json.dumps(plain({"live": True, "ready": is_ready, "reasons": reasons, **row})))
    else:
        state = "ready" if is_ready else f"live, not ready: {'; '.join(reasons)}"
        stuck = f", {found['stuck']} stuck" if found.get("stuck") else ""
        counts = f"{found['connections']} connections, {found['nodes']} nodes{stuck}"
        click.echo(cell(f"{found['name']}: {state}; {counts}"))
    if ready and not is_ready:
        raise click.exceptions.Exit(NOT_READY)
