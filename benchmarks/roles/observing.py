"""Messages and calls in one process, with observers of some kind, or none."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import trio

from amqp_rt import Broker, Container, node, rpc
from amqp_rt.broker import Queue
from amqp_rt.security.access import Access, Rights, Rule

#: Messages or calls at a time, between two looks at the clock.
BATCH = 200


def provider_of(how: str) -> Any:
    """Return the provider of tracers of *how*: ``api``, ``unsampled`` or ``sampled``."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    class Dropping(SpanExporter):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    if how == "api":
        return trace.NoOpTracerProvider()
    provider = TracerProvider(sampler=ALWAYS_ON if how == "sampled" else ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(Dropping()))
    return provider


def observers_of(how: str) -> list[Any]:
    """Return the observers of *how*: none for ``off`` and ``metrics``."""
    if how in ("off", "metrics"):
        return []
    from amqp_rt.telemetry.otel import Otel

    return [Otel(tracer_provider=provider_of(how))]


def spans_by_hand(options: dict[str, Any], say: Any) -> None:
    """Make the two spans of a message, and record their metrics, by the API of OpenTelemetry alone.

    They have the attributes and the links that :class:`~amqp_rt.telemetry.otel.Otel` gives them. As many of them are open at a
    time as messages are sent, since the garbage collector looks at all that is. No context is written or read, and nothing is
    sent.
    """
    from opentelemetry import context, metrics, trace

    from amqp_rt.observers import ObservedLink
    from amqp_rt.telemetry.otel import attributes_of

    tracer = provider_of(options["how"]).get_tracer("by hand")
    meter = metrics.get_meter("by hand")
    counter = meter.create_counter("count")
    histogram = meter.create_histogram("duration")
    sending = dict(attributes_of(ObservedLink(kind="send", address="bench")))
    processing = dict(attributes_of(ObservedLink(kind="process", address="bench")))
    producer, consumer = trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER
    say(ready=1)
    count = 0
    warm = time.monotonic() + options["warmup"]
    began = time.process_time()
    started = None
    while started is None or time.process_time() - began < options["seconds"]:
        spans = []
        for _ in range(BATCH):
            sent = tracer.start_span("send bench", kind=producer, attributes=sending)
            spans.append((sent, time.perf_counter()))
        for sent, _ in spans:
            written = sent.get_span_context()
            links = (trace.Link(written),) if written.trace_flags.sampled else ()
            taken = tracer.start_span(
                "process bench", kind=consumer, attributes=processing, links=links
            )
            since = time.perf_counter()
            token = context.attach(trace.set_span_in_context(taken))
            context.detach(token)
            counter.add(1, processing)
            histogram.record(time.perf_counter() - since, processing)
            taken.end()
        for sent, since in spans:
            counter.add(1, sending)
            histogram.record(time.perf_counter() - since, sending)
            sent.end()
        count += BATCH
        if started is None and time.monotonic() >= warm:
            started, count, began = 1, 0, time.process_time()
    say(n=count, cpu=time.process_time() - began)


def broker_of(*nodes: Any) -> Broker:
    """Return the broker of a door, with logins and rights."""
    access = Access([Rule("*", Rights.SEND | Rights.MANAGE, users=("root",))])
    return Broker("both", nodes=nodes, users={"root": "secret"}, access=access)


@asynccontextmanager
async def with_door(*nodes: Any, queues: int = 0) -> AsyncIterator[tuple[Container, str]]:
    """Run a broker with an HTTP door; yield its container and the URL of the door."""
    from amqp_rt_console import HttpDoor

    async with broker_of(*nodes) as broker:
        await broker.declare(*(Queue(f"queue-{number}") for number in range(queues)))
        async with HttpDoor(broker, "http://127.0.0.1:0").open() as url:
            yield broker.container, url


async def pages(options: dict[str, Any], say: Any) -> None:
    """Read pages of 100 queues of 1,000 for some seconds."""
    async with with_door(queues=1_000) as (_, url):
        host = urlsplit(url)
        login = base64.b64encode(b"root:secret").decode()
        request = (
            f"GET /api/v1/nodes?limit=100 HTTP/1.1\r\nhost: {host.netloc}\r\n"
            f"authorization: Basic {login}\r\n\r\n"
        ).encode()
        stream = await trio.open_tcp_stream(str(host.hostname), host.port or 0)
        say(ready=1)
        count, began = 0, 0.0
        warm = trio.current_time() + options["warmup"]
        while not began or time.process_time() - began < options["seconds"]:
            await stream.send_all(request)
            head = b""
            while b"\r\n\r\n" not in head:
                head += bytes(await stream.receive_some())
            head, _, body = head.partition(b"\r\n\r\n")
            status, *fields = head.decode().lower().split("\r\n")
            assert status.split()[1] == "200", status
            size = next(int(each[15:]) for each in fields if each.startswith("content-length:"))
            while len(body) < size:
                body += bytes(await stream.receive_some())
            count += 1
            if not began and trio.current_time() >= warm:
                count, began = 0, time.process_time()
        say(n=count, cpu=time.process_time() - began)
        await stream.aclose()


@asynccontextmanager
async def _open(how: str, *nodes: Any) -> AsyncIterator[Container]:
    if how == "door":
        async with with_door(*nodes) as (container, _):
            yield container
    elif how == "broker":
        async with broker_of(*nodes) as broker:
            yield broker.container
    else:
        async with Container("both", nodes=nodes, observe=observers_of(how)) as container:
            yield container


async def observed(options: dict[str, Any], say: Any) -> None:
    """Send messages to a handler, or call it, for some seconds; the processor time is that of both ends."""

    @node("bench")
    async def take(body: bytes) -> None:
        """Accept each message."""

    @rpc("double")
    async def double(number: int) -> int:
        return 2 * number

    body = b"x" * 100
    if options["how"] == "page":
        await pages(options, say)
        return
    if options.get("by_hand"):
        spans_by_hand(options, say)
        return
    async with _open(options["how"], take, double) as both:
        if options["how"] == "metrics":
            from amqp_rt.telemetry.metrics import Metrics

            Metrics(both)
        async with both.local() as peer, peer.sender("bench") as sender:
            say(ready=1)
            count = 0
            warm = trio.current_time() + options["warmup"]
            began = time.process_time()
            started = None
            while started is None or time.process_time() - began < options["seconds"]:
                if options["calls"]:
                    for number in range(BATCH):
                        await peer.call("double", number, reply=int)
                else:
                    await sender.send_many([body] * BATCH)
                count += BATCH
                if started is None and trio.current_time() >= warm:
                    started, count, began = 1, 0, time.process_time()
            say(n=count, cpu=time.process_time() - began)
