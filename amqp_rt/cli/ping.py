"""``amqp-rt ping``: how long each step of a connection to a peer takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Final

import click
import trio
from msgspec import Struct

from ..addresses import Url, parse_url
from ..container.container import Container
from ..container.recovery import client_options as options_of
from ..container.recovery import mechanisms_for, refuse_in_clear
from ..core.engine import Engine
from ..errors import AmqpError, AuthenticationFailed, ConnectFailed
from ..events import Closed, ConnectionFailed, Event
from ..fronts.amqp10 import client
from ..net.dial import dial, open_stream
from ..net.driver import run_connection
from ..net.proxies import proxy_for
from ..outcomes import Error
from .listing import json_option
from .running import Seconds, Where, client_options, run
from .tables import cell

#: Seconds between two looks at an engine, which reports neither the end of SASL nor that of a begin.
_LOOK_S: Final = 0.0002


class Pinged(Struct, kw_only=True):
    """Milliseconds of each step; None for steps that the URL does not have."""

    url: str
    #: TCP, or the Unix socket.
    connect_ms: float | None = None
    #: TLS, and the upgrade to a WebSocket.
    tls_ms: float | None = None
    sasl_ms: float | None = None
    open_ms: float | None = None
    #: Median of the round trips.
    echo_ms: float | None = None
    container_id: str = ""


class _Steps:
    """Times of the steps, each written when it has ended."""

    def __init__(self, pinged: Pinged, *, shown: bool) -> None:
        self.pinged = pinged
        self.now = ""
        self._shown = shown

    @asynccontextmanager
    async def step(self, name: str, what: str) -> AsyncIterator[None]:
        """Measure the block as step *name*, which is *what* in an error."""
        self.now = what
        began = time.perf_counter()
        yield
        self.report(name, 1000 * (time.perf_counter() - began))

    def report(self, name: str, ms: float) -> None:
        """Keep the milliseconds of step *name*, and write them."""
        setattr(self.pinged, f"{name}_ms", round(ms, 3))
        if self._shown:
            click.echo(f"{name.ljust(8)}{ms:10.3f} ms")


@click.command()
@click.argument("given", metavar="[URL]", required=False)
@client_options
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    default=5,
    show_default=True,
    help="Round trips on the open connection; their median is shown.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=10.0,
    show_default=True,
    metavar="TIME",
    help="Maximum time for all of it.",
)
@json_option
def ping(given: str | None, where: Where, count: int, timeout: float, as_json: bool) -> None:
    """Connect to URL, by default --url, step by step, and show the milliseconds of each.

    \b
    connect  TCP, through the proxy if there is one, or the Unix socket
    tls      TLS, and the upgrade to a WebSocket
    sasl     from the first octets of AMQP to the outcome of the login
    open     until the open of the peer
    echo     one round trip on the open connection: a session begins, and the peer answers

    Exit code 1: a step failed, or took too long; the error names it.
    """  # noqa: D301
    try:
        place = parse_url(where.url if given is None else given)
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    pinged = Pinged(url=str(place))
    steps = _Steps(pinged, shown=not as_json)

    async def main() -> None:
        with trio.move_on_after(timeout) as scope:
            await _ping(place, where, steps, count)
        if scope.cancelled_caught:
            raise click.ClickException(f"{place}: {steps.now} took longer than {timeout:g} s")

    run(main)
    if as_json:
        known = {name: getattr(pinged, name) for name in pinged.__struct_fields__}
        click.echo(json.dumps(known))
    else:
        click.echo(cell(f"{pinged.container_id or 'the peer'} answers"))


async def _ping(place: Url, where: Where, steps: _Steps, count: int) -> None:
    """Connect to *place* and measure each step.

    Raises:
        AmqpError: A step failed.
    """
    if place.scheme == "memory":
        raise ConnectFailed(f"cannot connect to {place}: memory is within one process")
    if place.scheme in ("ws", "wss"):
        # Loaded now, not within the step that is measured.
        from ..net import websocket  # noqa: F401
    async with Container("amqp-rt ping") as container:
        proxy = None if where.proxy is None else proxy_for(place, where.proxy, os.environ)
        # A proxy that does not answer is mistaken for a host that does not, unless it is named.
        way = "" if proxy is None else f" through {proxy}"
        async with steps.step("connect", f"the connection{way}"):
            dialled = await open_stream(place, proxy=where.proxy)
        stream, local = dialled.stream, dialled.local
        if place.tls or place.scheme in ("ws", "wss"):

            async def connected(_: str) -> trio.abc.Stream:
                return stream

            async with steps.step("tls", "TLS" if place.tls else "the upgrade to a WebSocket"):
                dialled = await dial(
                    place,
                    tls=where.tls,
                    transport=connected,
                )
        mechanisms = mechanisms_for(place, where.tls, secure=dialled.secure, local=local)
        try:
            refuse_in_clear(place, mechanisms, secure=dialled.secure, local=local)
        except AmqpError:
            await trio.aclose_forcefully(dialled.stream)
            raise
        engine = client(
            options_of(
                container,
                container.limits,
                hostname=place.virtual_host or place.host or None,
                mechanisms=mechanisms,
            ),
            trio.current_time(),
        )
        assert isinstance(engine, Engine)
        ended: list[Error | None] = []

        def handle(events: list[Event]) -> None:
            ended.extend(
                each.error for each in events if isinstance(each, Closed | ConnectionFailed)
            )

        async def until(there: Callable[[], bool]) -> None:
            while not there():
                if ended or engine.finished:
                    error = ended[0] if ended else None
                    why = "the peer closed the connection" if error is None else error.description
                    kind = AuthenticationFailed if steps.now == "the login" else ConnectFailed
                    raise kind(f"{place}: {steps.now} failed: {why or error}")
                await trio.sleep(_LOOK_S)

        async with trio.open_nursery() as nursery:
            async with steps.step("sasl", "the login"):
                nursery.start_soon(run_connection, dialled.stream, engine, handle)
                await until(lambda: engine.sasl_done)
            async with steps.step("open", "the open"):
                await until(lambda: engine.open_received)
            steps.pinged.container_id = engine.peer.container_id
            steps.now = "the round trip"
            trips = [await _round_trip(engine, until) for _ in range(count)]
            steps.report("echo", 1000 * median(trips))
            engine.close()


async def _round_trip(
    engine: Engine, until: Callable[[Callable[[], bool]], Awaitable[None]]
) -> float:
    """Begin a session on *engine*; return the seconds until the peer's begin."""
    began = time.perf_counter()
    session = engine.begin()
    await until(lambda: session.remote_channel >= 0)
    took = time.perf_counter() - began
    session.end()
    return took
