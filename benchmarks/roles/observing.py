"""Messages and calls in one process, with observers of some kind, or none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import trio

from amqp_rt import Container, node, rpc

#: Messages or calls at a time, between two looks at the clock.
BATCH = 200


def observers_of(how: str) -> list[Any]:
    """Return the observers of *how*: none for ``off`` and ``metrics``."""
    if how in ("off", "metrics"):
        return []
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    from amqp_rt.telemetry.otel import Otel

    class Dropping(SpanExporter):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    if how == "api":
        return [Otel(tracer_provider=trace.NoOpTracerProvider())]
    provider = TracerProvider(sampler=ALWAYS_ON if how == "sampled" else ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(Dropping()))
    return [Otel(tracer_provider=provider)]


async def observed(options: dict[str, Any], say: Any) -> None:
    """Send messages to a handler, or call it, for some seconds; the processor time is that of both ends."""

    @node("bench")
    async def take(body: bytes) -> None:
        """Accept each message."""

    @rpc("double")
    async def double(number: int) -> int:
        return 2 * number

    body = b"x" * 100
    async with Container(
        "both", nodes=[take, double], observe=observers_of(options["how"])
    ) as both:
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
