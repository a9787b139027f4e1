"""Spans and trace contexts of messages that pass a mesh, and bridges."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from meshed import line
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import MockClock

from amqp_rt import Broker, Container, Message
from amqp_rt.broker import Queue
from amqp_rt.limits import KIB, Limits
from amqp_rt.mesh import Bridge, Push
from amqp_rt.mesh.tracing import ContextWriter, context_writer, traced
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import Rejected
from amqp_rt.telemetry.otel import Otel
from amqp_rt.trace_context import NO_TRACE, trace_of
from amqp_rt.values import Symbol

pytestmark = pytest.mark.req("O2", "P6")

OWN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OURS = "00-0af7651916cd43dd8448eb211c80319c-00000000000000aa-01"


class Spans:
    """Spans of several containers."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.otel = Otel(tracer_provider=self.provider)

    def rows(self) -> list[tuple[str, str | None, list[str]]]:
        """Return name, parent and links of each, in the order in which they began."""
        spans = sorted(self.exporter.get_finished_spans(), key=lambda each: each.start_time or 0)
        named = {each.context.span_id: each.name for each in spans if each.context}
        return [
            (
                each.name,
                named[each.parent.span_id] if each.parent else None,
                [named[link.context.span_id] for link in each.links],
            )
            for each in spans
        ]


@pytest.mark.parametrize("size", [1, 200 * KIB])
async def test_the_first_node_of_a_route_is_a_span(size: int, autojump_clock: MockClock) -> None:
    spans = Spans()
    network = MemoryNetwork()
    done = trio.Event()
    got: list[Message] = []
    async with line("A", "B", "C", network=network, box_options={"observe": [spans.otel]}) as made:

        @made.boxes["C"].node("end")
        async def end(message: Message) -> None:
            got.append(message)
            done.set()

        await made.meshes["A"].reachable("end")
        async with (
            Container("client", network=network, observe=[spans.otel]) as client,
            client.connect("memory://A") as peer,
            peer.sender("end") as sender,
        ):
            await sender.send(b"x" * size)
            await done.wait()
            # Without a context, and with one that is not sampled, messages pass as they are.
            plain = Message(b"plain").encode()
            await sender.send_payload(plain)
    assert spans.rows()[:3] == [
        ("send end", None, []),
        ("relay end", "send end", []),
        ("process end", None, ["relay end"]),
    ]
    first, second = got
    assert first.body == b"x" * size
    assert set(first.message_annotations) == {"traceparent"}
    assert second.encode() == plain


@pytest.mark.slow
async def test_a_bridge_to_a_broker_outside_is_a_span() -> None:
    spans = Spans()
    async with Broker("outside") as broker:
        await broker.declare(Queue("there"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        bridge = Bridge("out", url, push=[Push("here", to="there")])
        async with line("A", "B", box_options={"observe": [spans.otel]}) as made:
            await made.start("X", "B", bridges=[bridge], box_options={"observe": [spans.otel]})
            await made.meshes["A"].reachable("here")
            async with (
                Container("client", observe=[spans.otel]) as client,
                client.connect(made.urls["A"]) as peer,
                peer.sender("here") as sender,
            ):
                await sender.send(b"one")
        async with broker.local() as peer, peer.receiver("there") as receiver:
            message = (await receiver.receive()).message
    assert spans.rows() == [
        ("send here", None, []),
        ("relay here", "send here", []),
        ("relay there", "relay here", []),
    ]
    (last,) = (
        each.context
        for each in spans.exporter.get_finished_spans()
        if each.name == "relay there" and each.context
    )
    assert message.message_annotations[Symbol("x-opt-mesh-via")] == ["mesh"]
    assert f"{last.span_id:016x}" in trace_of(message)["traceparent"]


# --- octets ----------------------------------------------------------------------------------------


class _Relays:
    """Observer of a link, and its operation, with the context *trace*."""

    def __init__(self, trace: Any) -> None:
        self.trace = trace
        self.given: list[str] = []
        self.ended = 0

    def begin(self, message: Message | None) -> Any:
        assert message is not None
        self.given.append(trace_of(message).get("traceparent", ""))
        return self

    def end(self, error: str | None = None) -> None:
        self.ended += 1


def test_the_context_is_written_into_the_annotations_and_nothing_else_changes() -> None:
    for given, body in (
        (None, b"x"),
        ({Symbol("x-opt-a"): 1}, b"x" * 1_000),
        ({Symbol("traceparent"): OWN, Symbol("x-opt-a"): 1}, b""),
    ):
        octets = Message(
            body,
            durable=True,
            message_annotations=given,
            application_properties={"traceparent": OWN},
        ).encode()
        relays = _Relays({"traceparent": OURS, "tracestate": "a=1"})
        writer = ContextWriter(relays)
        # Of a message in several frames the first octets will do, if they have all that comes before the body.
        for cut in (len(octets), len(octets) - len(body)):
            found = writer(octets[:cut])
            message = Message.decode(found + octets[cut:])
            assert message.bare == Message.decode(octets).bare
            assert message.durable
            assert message.message_annotations == {
                **(given or {}),
                "traceparent": OURS,
                "tracestate": "a=1",
            }
        assert relays.given == [OWN, OWN]
        assert relays.ended == 2


def test_other_messages_pass_as_they_are() -> None:
    octets = Message(b"x", application_properties={"traceparent": OWN}).encode()
    ours = {"traceparent": OURS}
    for given, limits, trace in (
        (Message(b"x").encode(), Limits(), ours),
        (octets, Limits(trace_context_within=5), ours),
        # An operation without a context, such as one of metrics.
        (octets, Limits(), NO_TRACE),
        # Cut within the properties, or malformed.
        (octets[:-40], Limits(), ours),
        (b"traceparent", Limits(), ours),
    ):
        assert ContextWriter(_Relays(trace), limits)(given) == given
    assert context_writer([], "a") is None


def test_a_revision_is_followed_by_the_context_unless_it_refuses() -> None:
    octets = Message(b"x", application_properties={"traceparent": OWN}).encode()
    refusal = Rejected(None)
    for revised in (octets, refusal, None):
        writer = ContextWriter(_Relays({"traceparent": OURS}))
        found = traced(lambda *_, revised=revised: revised, writer)(octets, True)  # type: ignore[misc]
        if revised is octets:
            assert isinstance(found, bytes)
            assert trace_of(Message.decode(found))["traceparent"] == OURS
        else:
            assert found is revised
