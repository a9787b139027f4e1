"""``amqp-rt bench``: throughput and latency of a broker or of a node, by the client of this package."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial, wraps
from typing import Any, Final, TypeVar, cast

import click
import trio
from msgspec import Struct

from ..container.connections import Connection
from ..container.container import Container
from ..message import Message
from .latencies import Latencies
from .listing import json_option
from .running import Seconds, Where, client_options, run
from .tables import cell

F = TypeVar("F", bound=Callable[..., Any])

#: Application-property with the time at which a message was due, in seconds since 1970.
_DUE: Final = "amqp-rt-bench-due"
#: Latest such time (the year 2286). Others may have sent the message, with any number.
_DUE_MAX: Final = 1e10
#: Seconds after the end for what is under way: a peer that gives no credit answers never.
_GRACE_S: Final = 5.0
#: Benchmark → what it begins, the end of that, and the usual reason of one without an end.
_UNFINISHED: Final = {
    "send": ("messages", "outcome", "the peer may give no credit"),
    "call": ("requests", "reply", "there may be no service at that address"),
}
_PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}


class _Plan(Struct, frozen=True, kw_only=True):
    """Benchmark to run."""

    what: str
    address: str
    where: Where
    size: int
    clients: int
    pending: int
    rate: float | None
    seconds: float
    as_json: bool


class _Pace:
    """Times at which messages are due, shared by all clients.

    Without a rate a message is due when a client is free. With one they are due at equal distances,
    whether clients are free or not, and latencies count from then: a broker that stands still for a
    second delays all messages of that second, not only those that happened to be under way (the
    omission that benchmarks coordinate with what they measure).
    """

    def __init__(self, rate: float | None, seconds: float) -> None:
        self._rate = rate
        self._began = trio.current_time()
        self._taken = 0
        self.end = self._began + seconds

    async def due(self) -> float | None:
        """Wait until the next message is due, and return that time; None after the end."""
        if self._rate is None:
            now = trio.current_time()
            return now if now < self.end else None
        due = self._began + self._taken / self._rate
        if due >= self.end or trio.current_time() >= self.end:
            return None
        self._taken += 1
        await trio.sleep_until(due)
        return due

    @property
    def missed(self) -> int:
        """Messages that were due before the end and were not begun."""
        if self._rate is None:
            return 0
        return max(0, int((self.end - self._began) * self._rate) - self._taken)


class _Run:
    """Measurements of one run."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.latencies = Latencies()
        self.messages = 0
        self.bytes = 0
        #: Messages that were begun and had no outcome in time.
        self.unfinished = 0
        self.pace = _Pace(plan.rate, plan.seconds)
        self._began = trio.current_time()
        self.took_s = 0.0

    def count(self, size: int, latency_s: float | None) -> None:
        """Count a message of *size* octets."""
        self.messages += 1
        self.bytes += size
        if latency_s is not None:
            self.latencies.add(latency_s)

    def end(self) -> None:
        """Keep the duration of the run."""
        self.took_s = max(1e-9, trio.current_time() - self._began)

    async def show_progress(self) -> None:
        """Write a line on standard error each second, over the one before."""
        before = 0
        while True:
            await trio.sleep(1)
            passed = trio.current_time() - self._began
            p99 = 1000 * self.latencies.percentile(99)
            line = f"{passed:3.0f} s  {self.messages - before:,}/s  p99 {p99:.3f} ms"
            click.echo(f"\r{line}\x1b[K", nl=False, err=True)
            before = self.messages

    def result(self) -> dict[str, Any]:
        """Return the measurements, as they are written with ``--json``."""
        seen = self.latencies
        figures: dict[str, Any] = {
            "what": self.plan.what,
            "address": self.plan.address,
            "clients": self.plan.clients,
            "pending": self.plan.pending,
            "size": self.plan.size,
            "target_rate": self.plan.rate,
            "seconds": round(self.took_s, 3),
            "messages": self.messages,
            "bytes": self.bytes,
            "rate": round(self.messages / self.took_s, 1),
            "missed": self.pace.missed,
            "unfinished": self.unfinished,
            "corrected": self.plan.rate is not None,
        }
        known = {name: seen.percentile(percent) for name, percent in _PERCENTILES.items()}
        known |= {
            "min": seen.least_s,
            "mean": seen.total_s / max(1, seen.count),
            "max": seen.most_s,
        }
        for name, seconds in known.items():
            figures[f"{name}_ms"] = round(1000 * seconds, 4) if seen.count else None
        return figures


@click.group()
def bench() -> None:
    """Measure throughput and latency: of sending, receiving and calling.

    With --rate messages are due at equal distances and latencies count from the time at which they were due, so that
    pauses of the peer count in full. Without it each client sends the next one when one has ended, and latencies are
    those of a peer that is not asked while it pauses.
    """


def _options(command: F) -> F:
    """Add the options of every benchmark to a command, which gets them as ``plan``."""

    @wraps(command)
    def with_plan(address: str, where: Where, **options: Any) -> Any:
        # A client of each kind holds at least one message.
        plan = _Plan(
            what=str(click.get_current_context().info_name), address=address, where=where, **options
        )
        return command(plan)

    with_options: Any = with_plan
    for option in (
        json_option,
        click.option(
            "--seconds", type=Seconds(), default=10.0, show_default=True, metavar="TIME",
            help="How long to measure.",
        ),
        click.option(
            "--rate", type=click.FloatRange(min=0, min_open=True), metavar="N",
            help="Messages a second of all clients together; by default as many as possible.",
        ),
        click.option(
            "--pending", type=click.IntRange(1, 10_000), default=1, show_default=True,
            help="Messages of each client that may be under way at a time.",
        ),
        click.option(
            "--clients", type=click.IntRange(1, 1_000), default=1, show_default=True,
            help="Number of clients, each with a connection of its own.",
        ),
        click.option(
            "--size", type=click.IntRange(0, 64 * 1024 * 1024), default=100, show_default=True,
            help="Octets of the body of each message that is sent.",
        ),
        client_options,
        click.argument("address"),
    ):  # fmt: skip
        with_options = option(with_options)
    return cast("F", with_options)


@bench.command()
@_options
def send(plan: _Plan) -> None:
    """Send messages to ADDRESS; latency is the time until the peer has accepted one."""

    @asynccontextmanager
    async def sender(peer: Connection) -> AsyncIterator[Callable[[bytes, float], Awaitable[None]]]:
        async with peer.sender(plan.address, max_pending=plan.pending) as link:

            async def send_one(payload: bytes, ago_s: float) -> None:
                await link.send(
                    Message(payload, application_properties={_DUE: time.time() - ago_s})
                )

            yield send_one

    _measure(plan, sender)


@bench.command()
@_options
def call(plan: _Plan) -> None:
    """Send requests to ADDRESS; latency is the time until the reply has arrived."""

    @asynccontextmanager
    async def caller(peer: Connection) -> AsyncIterator[Callable[[bytes, float], Awaitable[None]]]:
        async def call_once(payload: bytes, ago_s: float) -> None:
            request = Message(payload, content_type="application/octet-stream")
            await peer.call(plan.address, request, reply=Message, within=30)

        yield call_once

    _measure(plan, caller)


@bench.command()
@_options
def receive(plan: _Plan) -> None:
    """Receive messages from ADDRESS, and accept them.

    Latency is known of messages that amqp-rt bench send has sent, and is the time since they were due there: both
    clocks have to agree. --size and --rate do not apply.
    """
    if plan.rate is not None:
        raise click.UsageError("--rate is for bench send and call: receivers take what there is")

    async def main() -> None:
        async with _connected(plan) as peers, AsyncExitStack() as stack:
            receivers = [
                await stack.enter_async_context(
                    peer.receiver(plan.address, credit=max(100, plan.pending))
                )
                for peer in peers
            ]
            run_ = _Run(plan)

            async def take(receiver: Any) -> None:
                with trio.move_on_at(run_.pace.end):
                    while True:
                        delivery = await receiver.receive()
                        with delivery:
                            message = delivery.message
                            due = message.application_properties.get(_DUE)
                            known = isinstance(due, float) and 0 <= due <= _DUE_MAX
                            age = time.time() - due if known else None
                            run_.count(len(delivery.payload), age)

            await _all(run_, [partial(take, each) for each in receivers])
        _report(run_)

    run(main)


def _measure(plan: _Plan, work: Callable[[Connection], Any]) -> None:
    """Run the clients of *plan*, each of which sends or calls by what *work* opens, and report."""
    payload = bytes(plan.size)

    async def main() -> None:
        async with _connected(plan) as peers, AsyncExitStack() as stack:
            acts = [await stack.enter_async_context(work(peer)) for peer in peers]
            run_ = _Run(plan)

            async def repeat(act: Callable[[bytes, float], Awaitable[None]]) -> None:
                while (due := await run_.pace.due()) is not None:
                    with trio.move_on_at(run_.pace.end + _GRACE_S) as scope:
                        await act(payload, trio.current_time() - due)
                    if scope.cancelled_caught:
                        run_.unfinished += 1
                        return
                    run_.count(plan.size, trio.current_time() - due)

            await _all(run_, [partial(repeat, act) for act in acts for _ in range(plan.pending)])
        _report(run_)

    run(main)


@asynccontextmanager
async def _connected(plan: _Plan) -> AsyncIterator[list[Connection]]:
    """Open the connections of all clients."""
    async with AsyncExitStack() as stack:
        container = await stack.enter_async_context(Container("amqp-rt bench"))
        yield [
            await stack.enter_async_context(plan.where.connect(container))
            for _ in range(plan.clients)
        ]


async def _all(run_: _Run, tasks: list[Callable[[], Awaitable[None]]]) -> None:
    """Run *tasks* to their end, with a line of progress on a terminal."""
    shows = sys.stderr.isatty() and not run_.plan.as_json
    async with trio.open_nursery() as progress:
        if shows:
            progress.start_soon(run_.show_progress)
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
        run_.end()
        progress.cancel_scope.cancel()
    if shows:
        click.echo("\r\x1b[K", nl=False, err=True)


def _report(run_: _Run) -> None:
    found = run_.result()
    if run_.plan.as_json:
        click.echo(json.dumps(found))
        return
    megabytes = found["bytes"] / found["seconds"] / 1e6 if found["seconds"] else 0.0
    click.echo(
        cell(
            f"{found['messages']:,} messages in {found['seconds']:.1f} s: {found['rate']:,.0f}/s, "
            f"{megabytes:.1f} MB/s"
        )
    )
    if found["p50_ms"] is None:
        click.echo(f"no latencies: {_without_latencies(run_)}")
    else:
        names = ("min", "mean", *_PERCENTILES, "max")
        shown = "  ".join(f"{name} {found[f'{name}_ms']:.3f}" for name in names)
        since = "since due" if found["corrected"] else "since begun"
        click.echo(f"latency in ms, {since}: {shown}")
    if found["missed"]:
        click.echo(
            f"{found['missed']:,} messages were due and could not be begun: the rate is too high for "
            f"{run_.plan.clients} clients with {run_.plan.pending} pending",
            err=True,
        )
    if found["unfinished"]:
        what, missed, reason = _UNFINISHED[run_.plan.what]
        click.echo(
            f"{found['unfinished']:,} {what} had no {missed} {_GRACE_S:g} s after the end: {reason}",
            err=True,
        )


def _without_latencies(run_: _Run) -> str:
    """Return why no latency was measured, as a part of a sentence."""
    what = run_.plan.what
    if run_.messages:
        return "the messages were not sent by amqp-rt bench send"
    if what == "receive":
        return "nothing was received"
    if not run_.unfinished:
        return "nothing was sent"
    return "nothing was accepted" if what == "send" else "nothing was answered"
