"""Spans and metrics leave by the OTLP exporter of OpenTelemetry, and arrive at a receiver of OTLP over HTTP.

The receiver is one of these tests: no collector can be installed from the registries that CI uses. It decodes requests
by OpenTelemetry's own definition of the protocol (opentelemetry-proto), and answers as the specification says.
"""

from __future__ import annotations

import gzip
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from commands import Served
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from peer_programs import PeerPrograms

from amqp_rt import Container, node
from amqp_rt.telemetry import conventions as names
from amqp_rt.telemetry.otel import Otel

pytestmark = [pytest.mark.req("O2"), pytest.mark.slow]

#: Nodes of the broker's process.
APPLICATION = """
from amqp_rt import Container

container = Container("broker")

@container.rpc("price/{article}")
async def price(*, article: str) -> int:
    return 250
"""


class ArrivedSpan(NamedTuple):
    """A span that has arrived, and the service that has sent it."""

    service: str
    span: Any
    scope: Any
    schema_url: str

    @property
    def name(self) -> str:
        return f"{self.service}: {self.span.name}"

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            each.key: getattr(each.value, str(each.value.WhichOneof("value")))
            for each in self.span.attributes
        }


def _service(resource: Any) -> str:
    return next(
        str(each.value.string_value) for each in resource.attributes if each.key == "service.name"
    )


class Collector:
    """Receiver of OTLP over HTTP at a port of this machine (OTLP Specification §OTLP/HTTP)."""

    def __init__(self) -> None:
        self.spans: list[ArrivedSpan] = []
        #: Service and name of a metric → sum of its points: of a counter the values, of a histogram the counts.
        self.metrics: dict[tuple[str, str], float] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                answer = collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> bytes:
        """Take one request; return the body of the answer."""
        answer: bytes
        if path == "/v1/traces":
            for traced in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _service(traced.resource)
                for scope in traced.scope_spans:
                    self.spans += (
                        ArrivedSpan(service, span, scope.scope, scope.schema_url)
                        for span in scope.spans
                    )
            answer = ExportTraceServiceResponse().SerializeToString()
            return answer
        assert path == "/v1/metrics"
        for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            service = _service(measured.resource)
            for each in (metric for scope in measured.scope_metrics for metric in scope.metrics):
                points = each.sum.data_points or each.histogram.data_points
                self.metrics[service, each.name] = sum(
                    getattr(point, "count", 0) or getattr(point, "as_int", 0) for point in points
                )
        answer = ExportMetricsServiceResponse().SerializeToString()
        return answer

    def rows(self) -> list[tuple[str, str, str, list[str]]]:
        """Return name, kind, parent and links of each span, in the order in which they began."""
        by_id = {each.span.span_id: each.name for each in self.spans}
        return [
            (
                each.name,
                trace_pb2.Span.SpanKind.Name(each.span.kind).removeprefix("SPAN_KIND_"),
                by_id.get(each.span.parent_span_id, ""),
                [by_id[link.span_id] for link in each.span.links],
            )
            for each in sorted(self.spans, key=lambda each: each.span.start_time_unix_nano)
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


class Exporting:
    """Observer of a service of this process, whose spans and metrics go to *collector*."""

    def __init__(self, service: str, collector: Collector) -> None:
        resource = Resource.create({"service.name": service})
        self._tracing = TracerProvider(resource=resource)
        self._tracing.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces"))
        )
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{collector.url}/v1/metrics"))
        self._metering = MeterProvider([reader], resource=resource)
        self.otel = Otel(tracer_provider=self._tracing, meter_provider=self._metering)

    def close(self) -> None:
        """Send what is left."""
        self._tracing.shutdown()
        self._metering.shutdown()


@pytest.mark.peer("proton")
async def test_a_trace_over_three_hops_and_proton_arrives_by_otlp(
    proton: list[str], collector: Collector, tmp_path: Path
) -> None:
    """A client sends to a broker, Proton passes the message on to another queue, and a worker calls the broker's process."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    broker = Served(
        *("shop.py:container", "--otel"),
        *("--node", "queue:in", "--node", "queue:out"),
        cwd=tmp_path,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
    )
    client, worker = Exporting("client", collector), Exporting("worker", collector)
    programs = PeerPrograms("proton", proton)
    port = int(broker.url.rpartition(":")[2])
    done = trio.Event()

    @node("out")
    async def pack(article: str) -> None:
        assert await served.call(f"price/{article}", reply=int) == 250
        done.set()

    try:
        async with (
            Container("client", observe=[client.otel]) as shop,
            shop.connect(broker.url) as peer,
            peer.sender("in") as sender,
        ):
            await sender.send("A-1", message_id="m-1")
        got = await programs.run("receive", port=port, address="in", count=1)
        await programs.run("send", port=port, address="out", messages=got["messages"])
        async with (
            Container("worker", observe=[worker.otel]) as packing,
            packing.connect(broker.url) as served,
        ):
            await served.serve(pack)
            with trio.fail_after(20):
                await done.wait()
    finally:
        code, errors = broker.stop(signal.SIGTERM)
        for each in (client, worker):
            await trio.to_thread.run_sync(each.close)
    assert code == 0, errors
    assert collector.rows() == [
        ("client: send in", "PRODUCER", "", []),
        ("broker: relay in", "PRODUCER", "client: send in", []),
        # Proton passes on the properties of the message, and not its annotations.
        ("broker: relay out", "PRODUCER", "client: send in", []),
        ("worker: process out", "CONSUMER", "", ["broker: relay out"]),
        ("worker: call price/A-1", "CLIENT", "worker: process out", []),
        ("broker: process price/{article}", "SERVER", "worker: call price/A-1", []),
        # The reply goes through a queue of the broker.
        ("broker: relay (temporary)", "PRODUCER", "broker: process price/{article}", []),
    ]
    spans = {each.name: each for each in collector.spans}
    sent = spans["client: send in"]
    assert (sent.scope.name, sent.schema_url) == ("amqp_rt", names.SCHEMA_URL)
    assert sent.attributes == {
        "messaging.system": "amqp",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "in",
        "messaging.message.id": "m-1",
        "server.address": "127.0.0.1",
        "server.port": port,
    }
    traces = [each.span.trace_id for each in spans.values()]
    assert len(set(traces)) == 2
    assert collector.metrics["client", names.SENT] == 1
    assert collector.metrics["worker", names.CONSUMED] == 1
    assert collector.metrics["worker", names.PROCESS_DURATION] == 1
    assert collector.metrics["broker", names.CONSUMED] == 1
