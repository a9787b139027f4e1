"""Spans and metrics of OpenTelemetry, with the SDK's exporters in memory."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from call_counts import plain_only
from commands import Served, amqp_rt
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    Sampler,
    SamplingResult,
)
from peer_programs import PeerPrograms
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from amqp_rt import (
    Batch,
    Container,
    Delivery,
    Message,
    Modify,
    Receiver,
    Reject,
    Retry,
    connect,
    node,
    rpc,
    source,
)
from amqp_rt.broker.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.errors import CallFailed, DeliveryRejected
from amqp_rt.events import Peer
from amqp_rt.observers import ObservedLink
from amqp_rt.outbox import SqliteOutbox, SqlOutbox
from amqp_rt.telemetry import conventions as names
from amqp_rt.telemetry import otel as otel_module
from amqp_rt.telemetry.otel import Otel
from amqp_rt.trace_context import trace_of
from amqp_rt.values import Symbol

pytestmark = pytest.mark.req("O2")

#: Trace context of another program.
OWN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
#: Name, kind, name of the parent, names of the spans that it links to, and error.
Row = tuple[str, str, str | None, list[str], str | None]


class Collected:
    """An SDK whose spans and metrics stay in memory."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = TracerProvider(**options)
        self.tracing.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.metering = MeterProvider([self.reader])

    def otel(self, **options: Any) -> Otel:
        return Otel(tracer_provider=self.tracing, meter_provider=self.metering, **options)

    @property
    def spans(self) -> list[ReadableSpan]:
        """All ended spans, in the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda each: each.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans if each.name == name]

    def rows(self) -> list[Row]:
        by_id = {each.context.span_id: each.name for each in self.spans if each.context}
        return [
            (
                each.name,
                each.kind.name,
                None if each.parent is None else by_id.get(each.parent.span_id, "unknown"),
                [by_id.get(link.context.span_id, "unknown") for link in each.links],
                (each.attributes or {}).get("error.type"),  # type: ignore[misc]
            )
            for each in self.spans
        ]

    def metrics(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """Values of counters, and counts of histograms, by the values of their attributes."""
        found: dict[str, dict[tuple[str, ...], Any]] = {}
        data = self.reader.get_metrics_data()
        assert data is not None
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                assert scope.schema_url == names.SCHEMA_URL
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        key = tuple(
                            str(value)
                            for name, value in sorted((point.attributes or {}).items())
                            if name not in ("messaging.system", "messaging.operation.type")
                        )
                        value = getattr(point, "count", None) or getattr(point, "value", None)
                        found.setdefault(metric.name, {})[key] = value
        return found


class Shop:
    """Nodes of the last hops: a consumer of a queue calls a request, whose handler calls another."""

    def __init__(self) -> None:
        self.peer: Any = None
        self.arrived: list[Message] = []
        self.done = trio.Event()

    @node("orders")
    async def place(self, message: Message) -> None:
        self.arrived.append(message)
        assert await self.peer.call("stock/price", "A-1", reply=int) == 7
        self.done.set()


class Stock:
    def __init__(self) -> None:
        self.peer: Any = None

    @rpc("stock/{what}")
    async def stock(self, article: str, *, what: str) -> int:
        tax: int = await self.peer.calling(Retry()).call("tax", article, reply=int)
        return 6 + tax

    @rpc("tax")
    async def tax(self, article: str) -> int:
        return 1

    @rpc("count")
    async def count(self, most: int) -> AsyncIterator[int]:
        for each in range(most):
            yield each
        if most > 9:
            raise Reject("too many")


async def test_spans_over_three_hops_and_nested_calls() -> None:
    sdk = Collected()
    shop, stock = Shop(), Stock()
    async with Broker("broker", nodes=[stock], observe=[sdk.otel()]) as broker:
        await broker.declare(Queue("orders"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with (
            broker.local() as inside,
            Container("shop", observe=[sdk.otel()]) as worker,
            worker.connect(url) as served,
            Container("client", observe=[sdk.otel()]) as client,
            client.connect(url) as peer,
            peer.sender("orders") as sender,
        ):
            stock.peer, shop.peer = inside, served
            with trio.fail_after(5):
                await sender.send({"article": "A-1"}, message_id="m-1")
                await served.serve(shop)
                await shop.done.wait()
    assert sdk.rows() == [
        ("send orders", "PRODUCER", None, [], None),
        ("relay orders", "PRODUCER", "send orders", [], None),
        # Of three contexts that the message could have, it is the one in its annotations.
        ("process orders", "CONSUMER", None, ["relay orders"], None),
        ("call stock/price", "CLIENT", "process orders", [], None),
        ("process stock/{what}", "SERVER", "call stock/price", [], None),
        ("call tax", "CLIENT", "process stock/{what}", [], None),
        ("process tax", "SERVER", "call tax", [], None),
        # The replies go through queues of the broker, one for each caller.
        ("relay (temporary)", "PRODUCER", "process tax", [], None),
        ("relay (temporary)", "PRODUCER", "process stock/{what}", [], None),
    ]
    traces = [each.context.trace_id for each in sdk.spans if each.context]
    assert len(set(traces[:2])) == len(set(traces[2:])) == 1
    assert traces[0] != traces[2]
    send, process, call, served_call = (sdk.spans[each] for each in (0, 2, 3, 4))
    port = int(url.rpartition(":")[2])
    assert send.attributes == {
        "messaging.system": "amqp",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": "m-1",
        "server.address": "127.0.0.1",
        "server.port": port,
    }
    assert process.attributes == {
        "messaging.system": "amqp",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.message.id": "m-1",
        "server.address": "127.0.0.1",
        "server.port": port,
    }
    assert call.attributes is not None
    assert served_call.attributes is not None
    assert served_call.attributes["messaging.destination.template"] == "stock/{what}"
    assert "messaging.destination.name" not in served_call.attributes
    conversation = call.attributes["messaging.message.conversation_id"]
    assert served_call.attributes["messaging.message.conversation_id"] == conversation
    scope = send.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.schema_url) == ("amqp_rt", names.SCHEMA_URL)
    # The publisher wrote into the application-properties, and the broker only into the annotations.
    (message,) = shop.arrived
    written = {
        str(found.get("traceparent")).split("-")[2]
        for found in (message.application_properties, message.message_annotations)
    }
    assert written == {f"{each.context.span_id:016x}" for each in sdk.spans[:2] if each.context}


async def test_process_is_a_child_on_request_and_failures_have_their_condition() -> None:
    sdk = Collected()

    @node("checked")
    async def checked(body: bytes) -> None:
        if body == b"bad":
            raise Reject("no", condition="app:no")
        if body == b"later":
            raise Modify("later")
        if body == b"broken":
            raise KeyError(body)

    async with (
        Container("all", nodes=[checked], observe=[sdk.otel(parent=True)]) as all_,
        all_.local() as peer,
        peer.sender("checked") as sender,
    ):
        with pytest.raises(DeliveryRejected):
            await sender.send(b"bad")
        for body in (b"later", b"broken"):
            await sender.send_nowait(body).outcome()
    assert [(row[0], row[2], row[4]) for row in sdk.rows()] == [
        ("send checked", None, "app:no"),
        ("process checked", "send checked", "app:no"),
        ("send checked", None, "modified"),
        ("process checked", "send checked", "modified"),
        ("send checked", None, "modified"),
        ("process checked", "send checked", "KeyError"),
    ]
    assert all(not each.status.is_ok for each in sdk.spans)


async def test_a_callers_own_context_goes_on_and_a_message_keeps_its_own() -> None:
    sdk = Collected()
    stock = Stock()
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        Container("all", nodes=[stock], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
    ):
        stock.peer = peer
        with sdk.tracing.get_tracer("test").start_as_current_span("mine"):
            assert await peer.call("tax", "A-1") == 1
            assert [each async for each in peer.stream("count", 2)] == [0, 1]
        await peer.call("tax", "A-1", application_properties={"traceparent": own})
        with pytest.raises(CallFailed):
            _ = [each async for each in peer.stream("count", 10)]
    rows = sdk.rows()
    assert [row[:3] for row in rows[:6]] == [
        ("mine", "INTERNAL", None),
        ("call tax", "CLIENT", "mine"),
        ("process tax", "SERVER", "call tax"),
        ("call count", "CLIENT", "mine"),
        ("process count", "SERVER", "call count"),
        ("call tax", "CLIENT", None),
    ]
    assert rows[6][:3] == ("process tax", "SERVER", "unknown")
    parent = sdk.spans[6].parent
    assert parent is not None
    assert f"{parent.span_id:016x}" == "b7ad6b7169203331"
    assert rows[7][4] is not None
    assert rows[8][4] == "amqp:precondition-failed"


async def test_settling_by_hand_links_to_the_message() -> None:
    sdk = Collected()
    async with Broker("broker", observe=[sdk.otel()]) as broker:
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q") as receiver,
        ):
            await sender.send(b"one")
            delivery = await receiver.receive()
            delivery.accept()
    assert sdk.rows()[2:] == [("settle q", "CLIENT", None, ["relay q"], None)]
    assert sdk.metrics() == {
        "messaging.client.sent.messages": {("q", "send"): 1},
        "messaging.client.consumed.messages": {("q", "receive"): 1},
        "messaging.client.operation.duration": {("q", "send"): 1, ("q", "settle"): 1},
    }


async def test_a_handler_that_settles_its_message_itself_has_a_span_for_that() -> None:
    sdk = Collected()

    @node("by hand")
    async def by_hand(delivery: Delivery) -> None:
        delivery.accept()

    async with (
        Container("all", nodes=[by_hand], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
        peer.sender("by hand") as sender,
    ):
        await sender.send(b"one")
    assert sdk.rows() == [
        ("send by hand", "PRODUCER", None, [], None),
        ("process by hand", "CONSUMER", None, ["send by hand"], None),
        ("settle by hand", "CLIENT", "process by hand", ["send by hand"], None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
async def test_messages_of_an_outbox_carry_the_context_of_their_creation(
    kind: str, tmp_path: Path, sqlite_database: sqlite3.Connection
) -> None:
    sdk = Collected()
    tracer = sdk.tracing.get_tracer("test")
    async with (
        Broker("broker", volatile=True, observe=[sdk.otel()]) as broker,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("invoices"))
        outbox: Any
        async with broker.local() as peer, peer.receiver("invoices") as receiver:
            if kind == "sqlite":
                outbox = SqliteOutbox(sqlite_database, "shop", observe=[sdk.otel()])
                with tracer.start_as_current_span("order"):
                    async with outbox.transaction() as work:
                        work.send("invoices", "one")
            else:
                engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
                factory = sessionmaker(engine)
                outbox = SqlOutbox(factory, observe=[sdk.otel()])
                outbox.metadata.create_all(engine)
                with tracer.start_as_current_span("order"), factory.begin() as session:
                    outbox.send(session, "invoices", "one")
            nursery.start_soon(outbox.run, peer)
            with trio.fail_after(10):
                delivery = await receiver.receive()
            delivery.accept()
            await outbox.flush()
            nursery.cancel_scope.cancel()
        if kind == "sqlalchemy":
            engine.dispose()
        else:
            outbox.database.close()
    rows = [row for row in sdk.rows() if not row[0].startswith("send ")]
    assert rows == [
        ("order", "INTERNAL", None, [], None),
        ("create invoices", "PRODUCER", "order", [], None),
        ("relay invoices", "PRODUCER", "create invoices", [], None),
        ("settle invoices", "CLIENT", None, ["relay invoices"], None),
    ]


async def test_messages_of_a_source_carry_their_context() -> None:
    sdk = Collected()

    @source("moved", mode="move")
    async def moved() -> AsyncIterator[str]:
        with sdk.tracing.get_tracer("test").start_as_current_span("make"):
            yield "one"
        yield "two"

    @source("copied", mode="copy")
    async def copied() -> AsyncIterator[Message]:
        yield Message("own", application_properties={"traceparent": OWN, "a": 1})

    async with (
        Container("all", nodes=[moved, copied], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
    ):
        got: list[Message] = []
        async with peer.receiver("moved") as receiver:
            first = await receiver.receive()
            first.accept()
            second = await receiver.receive()
            second.reject("no", condition="app:no")
            got += (first.message, second.message)
        async with peer.receiver("copied") as receiver:
            got.append((await receiver.receive()).message)
    assert sdk.rows() == [
        ("make", "INTERNAL", None, [], None),
        ("send moved", "PRODUCER", "make", [], None),
        ("settle moved", "CLIENT", None, ["send moved"], None),
        ("send moved", "PRODUCER", None, [], "app:no"),
        ("settle moved", "CLIENT", None, ["send moved"], None),
        ("send copied", "PRODUCER", None, ["unknown"], None),
    ]
    sent = [each.context for each in sdk.spans if each.name == "send moved" and each.context]
    assert [trace_of(each)["traceparent"].split("-")[2] for each in got] == [
        *(f"{each.span_id:016x}" for each in sent),
        OWN.split("-")[2],
    ]
    assert sdk.metrics()[names.SENT] == {
        ("moved", "send"): 1,
        ("app:no", "moved", "send"): 1,
        ("copied", "send"): 1,
    }


async def test_messages_of_a_source_that_do_not_leave_or_have_no_outcome_end_their_spans() -> None:
    sdk = Collected()

    @source("moved", mode="move")
    async def moved() -> AsyncIterator[str]:
        yield "one"
        yield "two"

    async with (
        Container("all", nodes=[moved], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
    ):
        async with peer.receiver("moved", credit=0) as receiver:
            await receiver.get(within=0.05)
            # The first one has no outcome, and the second one is not there before it has.
        await trio.testing.wait_all_tasks_blocked()
        async with peer.receiver("moved", credit=0):
            # Without credit the first one does not leave.
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
    errors = [(row[0], row[4]) for row in sdk.rows()]
    assert errors == [("send moved", "amqp:link:detached"), ("send moved", "cancelled")]


async def test_handlers_of_whole_links_are_observed() -> None:
    sdk = Collected()
    echoed: list[Message] = []

    @node.link("echo/{what}")
    async def echo(link: Any, *, what: str) -> None:
        if isinstance(link, Receiver):
            async for delivery in link:
                echoed.append(delivery.message)
                delivery.accept()
        else:
            await link.send("one", message_id="m-1")

    async with (
        Container("all", nodes=[echo], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
        Container("client", network=all_.network) as client,
    ):
        await all_.listen("memory://all")
        async with client.connect("memory://all") as outside:
            async with outside.sender("echo/in") as sender:
                await sender.send("x", application_properties={"traceparent": OWN})
            async with outside.receiver("echo/out") as receiver:
                delivery = await receiver.receive()
                delivery.accept()
        del peer
    assert [row[:3] for row in sdk.rows()] == [
        ("settle echo/{what}", "CLIENT", None),
        ("send echo/{what}", "PRODUCER", None),
    ]
    settle, send = sdk.spans
    assert [f"{link.context.span_id:016x}" for link in settle.links] == [OWN.split("-")[2]]
    assert send.attributes is not None
    assert send.attributes["messaging.message.id"] == "m-1"
    assert send.context is not None
    assert f"{send.context.span_id:016x}" in trace_of(delivery.message)["traceparent"]
    assert sdk.metrics()[names.CONSUMED] == {("echo/{what}", "receive"): 1}


async def test_replies_carry_the_context_of_their_request() -> None:
    sdk = Collected()
    stock = Stock()

    @rpc("as/{kind}")
    async def reply_as(*, kind: str) -> Any:
        if kind == "failure":
            raise Reject("no", condition="app:no")
        if kind == "own":
            return Message("own", application_properties={"traceparent": OWN})
        return Message("given", application_properties={"a": 1}) if kind == "message" else kind

    got: dict[str, list[Message]] = {}
    async with Broker("broker", nodes=[stock, reply_as], observe=[sdk.otel()]) as broker:
        await broker.listen("memory://b")
        async with (
            Container("client", network=broker.container.network) as client,
            client.connect("memory://b") as peer,
            peer.receiver(None, dynamic=True) as replies,
        ):
            for address, body, count in (
                *((f"as/{kind}", None, 1) for kind in ("text", "message", "own", "failure")),
                ("count", 2, 3),
            ):
                async with peer.sender(address) as sender:
                    await sender.send(body, reply_to=replies.address, message_id="m")
                found = got[address] = []
                for _ in range(count):
                    delivery = await replies.receive()
                    delivery.accept()
                    found.append(delivery.message)
    served = [each.context for each in sdk.spans if each.kind.name == "SERVER" and each.context]
    written = [
        [str(each.application_properties.get("traceparent", "--"))[36:52] for each in found]
        for found in got.values()
    ]
    text, message, _, failure, count = (f"{each.span_id:016x}" for each in served)
    # A reply that has a context keeps it, and the end of a stream is no message of the handler.
    assert written == [[text], [message], [OWN[36:52]], [failure], [count, count, ""]]
    assert got["as/message"][0].application_properties["a"] == 1
    assert got["as/failure"][0].application_properties["errorCondition"] == "app:no"


async def test_the_span_of_a_batch_links_to_each_message() -> None:
    sdk = Collected()
    done = trio.Event()

    @node("rows", batch=Batch(messages=3, within_s=5))
    async def rows(batch: list[str]) -> None:
        if batch[0] == "bad":
            raise KeyError("bad")
        done.set()

    async with (
        Container("all", nodes=[rows], observe=[sdk.otel()]) as all_,
        all_.local() as peer,
        peer.sender("rows") as sender,
    ):
        await sender.send_many(["a", "b", "c"])
        for body in ("bad", "d", "e"):
            sender.send_nowait(body)
        await sender.flush()
    good, bad = sdk.named("process rows")
    sent = [each.context.span_id for each in sdk.named("send rows") if each.context]
    assert [link.context.span_id for link in (*good.links, *bad.links)] == sent
    assert good.attributes is not None
    assert good.attributes[names.BATCH_COUNT] == 3
    assert bad.attributes is not None
    assert bad.attributes["error.type"] == "KeyError"
    assert sdk.metrics()[names.CONSUMED] == {
        ("rows", "process"): 3,
        ("KeyError", "rows", "process"): 3,
    }


async def test_metrics_have_bounded_addresses() -> None:
    sdk = Collected()

    @node("to/{anything}")
    async def anything(body: bytes) -> None:
        if body == b"bad":
            raise Reject("no", condition="app:no")

    async with (
        Container("all", nodes=[anything], observe=[sdk.otel(destinations_max=3)]) as all_,
        all_.local() as peer,
    ):
        for number in range(5):
            async with peer.sender(f"to/{number}") as sender:
                await sender.send(b"good")
                with pytest.raises(DeliveryRejected):
                    await sender.send(b"bad")
    found = sdk.metrics()
    good = {key: value for key, value in found[names.SENT].items() if "app:no" not in key}
    assert good == {("to/0", "send"): 1, ("to/1", "send"): 1, ("to/2", "send"): 1, ("send",): 2}
    assert found[names.CONSUMED] == {
        ("to/{anything}", "process"): 5,
        ("app:no", "to/{anything}", "process"): 5,
    }
    assert sum(found[names.PROCESS_DURATION].values()) == 10


async def test_metrics_have_bounded_kinds_of_errors() -> None:
    sdk = Collected()

    @node("orders")
    async def refuse(body: str) -> None:
        raise Reject("no", condition=f"app:{body}")

    async with (
        Container("all", nodes=[refuse], observe=[sdk.otel(errors_max=2)]) as all_,
        all_.local() as peer,
        peer.sender("orders") as sender,
    ):
        for number in range(4):
            with pytest.raises(DeliveryRejected):
                await sender.send(str(number))
    sent = sdk.metrics()[names.SENT]
    assert sorted(value for key in sent for value in key if value not in ("orders", "send")) == [
        "_OTHER",
        "app:0",
        "app:1",
    ]
    assert sum(sent.values()) == 4
    # Spans are not aggregated: they have each condition.
    assert "app:3" in {row[4] for row in sdk.rows()}


async def test_relays_use_up_no_addresses_of_metrics() -> None:
    sdk = Collected()
    async with Broker("b", observe=[sdk.otel(destinations_max=1)]) as broker:
        await broker.declare(Queue("relayed"), Queue("own"))
        await broker.listen("memory://b")
        async with (
            Container("client", network=broker.container.network) as client,
            client.connect("memory://b") as peer,
            peer.sender("relayed") as sender,
        ):
            await sender.send(b"one")
        async with broker.local() as peer, peer.sender("own") as sender:
            await sender.send(b"two")
    assert sdk.metrics()[names.SENT] == {("own", "send"): 1}


async def test_unsampled_messages_carry_their_context_and_are_not_relayed() -> None:
    sdk = Collected(sampler=ALWAYS_OFF)
    async with Broker("broker", observe=[sdk.otel()]) as broker:
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q") as receiver,
        ):
            await sender.send(b"one")
            message = (await receiver.receive()).message
    assert int(trace_of(message)["traceparent"][-2:], 16) & 1 == 0
    assert not message.message_annotations
    assert sdk.spans == []


class ByLinks(Sampler):
    """Sampler that records the spans with a link, and notes the links that it is given."""

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.seen: list[tuple[trace.Link, ...]] = []

    def should_sample(self, *args: Any, **given: Any) -> SamplingResult:
        links = tuple(args[5] if len(args) > 5 else given.get("links") or ())
        self.seen.append(links)
        records = self.always or bool(links)
        return SamplingResult(Decision.RECORD_AND_SAMPLE if records else Decision.DROP)

    def get_description(self) -> str:
        return "ByLinks"


@plain_only
@pytest.mark.parametrize(("always", "sampled"), [(True, 0), (False, 0), (True, 1), (False, 1)])
def test_a_link_to_a_trace_that_is_not_recorded_is_made_for_recorded_spans_only(
    always: bool, sampled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    context_of = otel_module._context_of

    def counted(parent: str, given: Any) -> trace.SpanContext:
        made.append(parent)
        return context_of(parent, given)

    monkeypatch.setattr(otel_module, "_context_of", counted)
    sampler = ByLinks(always)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = f"00-{'a1' * 16}-{'b2' * 8}-{sampled:02x}"
    message = Message(b"x", application_properties={"traceparent": parent})
    observer = Otel(tracer_provider=provider).observe(ObservedLink(kind="process", address="q"))
    assert observer is not None
    operation = observer.begin(message)
    assert operation is not None
    operation.end()
    assert [len(each) for each in sampler.seen] == [sampled]
    assert len(made) == (1 if always or sampled else 0)
    spans = exporter.get_finished_spans()
    assert len(spans) == len(made)
    for span in spans:
        (link,) = span.links
        assert (link.context.trace_id, link.context.span_id) == (
            int("a1" * 16, 16),
            int("b2" * 8, 16),
        )
        assert link.context.trace_flags == sampled


class Failing(SimpleSpanProcessor):
    """Processor of spans that cannot take them."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("the exporter is gone")


class FailingSampler(ByLinks):
    def should_sample(self, *args: Any, **given: Any) -> SamplingResult:
        raise RuntimeError("no decision")


@pytest.mark.parametrize("what", ["processor", "sampler"])
async def test_what_the_sdk_raises_is_logged_and_messages_go_on(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(sampler=FailingSampler() if what == "sampler" else ALWAYS_ON)
    provider.add_span_processor(Failing(InMemorySpanExporter()))
    arrived: list[bytes] = []

    @node("q")
    async def take(body: bytes) -> None:
        arrived.append(body)

    async with (
        Container("all", nodes=[take], observe=[Otel(tracer_provider=provider)]) as all_,
        all_.local() as peer,
        peer.sender("q") as sender,
    ):
        await sender.send(b"one")
        await sender.send(b"two")
    assert arrived == [b"one", b"two"]
    lines = [each.getMessage() for each in caplog.records if each.name == "amqp_rt.observers"]
    if what == "sampler":
        # Once for each link: the sender, and that of the node.
        assert [each.partition(":")[0] for each in lines] == ["observer left out"] * 2
    else:
        assert [each.partition(":")[0] for each in lines] == ["observer failed"] * 4


async def test_an_sdk_that_is_set_up_later_gets_the_spans_of_links_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdk = Collected()
    real: list[trace.Tracer] = []

    class Later(trace.Tracer):
        """Tracer as the API has it until there is a provider."""

        def start_span(self, *args: Any, **given: Any) -> trace.Span:
            tracer = real[0] if real else trace.NoOpTracer()
            return tracer.start_span(*args, **given)

        def start_as_current_span(self, *args: Any, **given: Any) -> Any:
            raise NotImplementedError

    class Provider(trace.TracerProvider):
        def get_tracer(self, *args: Any, **given: Any) -> trace.Tracer:
            return Later()

    @node("q")
    async def take(body: bytes) -> None:
        pass

    async with (
        Container("all", nodes=[take], observe=[Otel(tracer_provider=Provider())]) as all_,
        all_.local() as peer,
        peer.sender("q") as sender,
    ):
        await sender.send(b"one")
        real.append(sdk.tracing.get_tracer("test"))
        await sender.send(b"two")
    assert sdk.rows() == [
        ("send q", "PRODUCER", None, [], None),
        ("process q", "CONSUMER", None, ["send q"], None),
    ]


@pytest.mark.parametrize("parent", [False, True])
async def test_without_an_sdk_a_context_that_is_current_goes_with_messages(parent: bool) -> None:
    inside: list[trace.SpanContext] = []
    current = trace.NonRecordingSpan(trace.SpanContext(0xA1, 0xB2, True, trace.TraceFlags(1)))
    arrived: list[Message] = []

    @node("q")
    async def take(message: Message) -> None:
        arrived.append(message)
        inside.append(trace.get_current_span().get_span_context())

    observer = Otel(parent=parent, tracer_provider=trace.NoOpTracerProvider())
    async with (
        Container("all", nodes=[take], observe=[observer]) as all_,
        all_.local() as peer,
        peer.sender("q") as sender,
    ):
        with trace.use_span(current):
            await sender.send(b"one")
    assert trace_of(arrived[0])["traceparent"] == f"00-{0xA1:032x}-{0xB2:016x}-01"
    assert (inside[0].span_id == 0xB2) == parent


async def test_without_an_sdk_the_callers_context_is_passed_on() -> None:
    own = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    seen: list[dict[str, str]] = []
    peers: list[Any] = []

    @rpc("outer")
    async def outer(body: str) -> int:
        found: int = await peers[0].call("inner", body, reply=int)
        return found

    @rpc("inner")
    async def inner(message: Message) -> int:
        seen.append(trace_of(message))
        return 1

    observer = Otel(tracer_provider=trace.NoOpTracerProvider())
    async with (
        Container("all", nodes=[outer, inner], observe=[observer]) as all_,
        all_.local() as peer,
    ):
        peers.append(peer)
        await peer.call("outer", "x", application_properties=own)
        await peer.call("outer", "x")
    assert seen == [own, {}]


def test_the_system_is_that_of_the_peers_product() -> None:
    for product, system in (
        ("RabbitMQ", "rabbitmq"),
        ("apache-activemq-artemis", "activemq"),
        ("ActiveMQ", "activemq"),
        ("Microsoft.ServiceBus", "servicebus"),
        ("amqp-rt", "amqp"),
    ):
        assert names.system_of(Peer(properties={Symbol("product"): product})) == system
    assert names.system_of(Peer()) == names.system_of(None) == "amqp"


async def test_a_broker_takes_in_messages_that_another_one_has_annotated() -> None:
    """The policy for annotations refuses unknown keys that are reserved."""
    sdk = Collected()
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for observe in ([], [sdk.otel()]):
        async with Broker("broker", observe=observe) as broker:
            await broker.declare(Queue("q"))
            async with broker.local() as peer, peer.receiver("q") as receiver:
                message = Message(
                    b"one", message_annotations={Symbol("traceparent"): context, "x-opt-a": 1}
                )
                broker.publish("q", message.encode())
                got = (await receiver.receive()).message
                assert got.message_annotations["x-opt-a"] == 1
                assert (got.message_annotations["traceparent"] == context) == (not observe)
    (relay,) = sdk.named("relay q")
    assert relay.parent is not None
    assert f"{relay.parent.span_id:016x}" == "b7ad6b7169203331"


@pytest.mark.peer("proton")
@pytest.mark.slow
async def test_a_trace_goes_through_proton(proton: list[str]) -> None:
    sdk = Collected()
    programs = PeerPrograms("proton", proton)
    arrived = trio.Event()

    @node("end")
    async def end(body: bytes) -> None:
        arrived.set()

    async with Broker("broker", nodes=[end], observe=[sdk.otel()]) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        async with broker.local() as peer, peer.sender("q") as sender:
            await sender.send(b"one")
        got = await programs.run("receive", port=port, address="q", count=1)
        await programs.run("send", port=port, address="end", messages=got["messages"])
        with trio.fail_after(5):
            await arrived.wait()
    assert sdk.rows() == [
        ("send q", "PRODUCER", None, [], None),
        ("relay q", "PRODUCER", "send q", [], None),
        # The program passes on the properties of the message, and not its annotations.
        ("process end", "CONSUMER", None, ["send q"], None),
    ]


@pytest.mark.foreign
@pytest.mark.slow
async def test_a_trace_goes_through_a_client_of_0_9_1() -> None:
    """Headers of 0-9-1 are application-properties; its client knows nothing of annotations."""
    pika = pytest.importorskip("pika")
    from amqp_rt_amqp091 import Front

    sdk = Collected()
    arrived = trio.Event()

    @node("end")
    async def end(body: bytes) -> None:
        arrived.set()

    def pass_on(port: int) -> dict[str, Any]:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
        channel = connection.channel()
        for _ in range(200):
            method, properties, body = channel.basic_get("in", auto_ack=True)
            if method is not None:
                break
        channel.basic_publish("", "out", body, properties)
        connection.close()
        return dict(properties.headers)

    async with Broker("broker", nodes=[end], fronts=[Front()], observe=[sdk.otel()]) as broker:
        await broker.declare(Queue("in"), Queue("out"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        async with (
            broker.local() as peer,
            peer.sender("in") as sender,
            peer.receiver("out") as receiver,
        ):
            await sender.send(b"one")
            headers = await trio.to_thread.run_sync(pass_on, port)
            with trio.fail_after(5):
                delivery = await receiver.receive()
            delivery.accept()
    assert "traceparent" in headers
    rows = sdk.rows()
    assert [row[0] for row in rows] == ["send in", "relay in", "relay out", "settle out"]
    assert rows[2][2] in ("send in", "relay in")
    assert rows[3][3] == ["relay out"]


@pytest.mark.slow
async def test_serve_sends_spans_as_the_variables_of_the_sdk_say() -> None:
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none"}
    served = Served("--otel", "--node", "queue:q", "--name", "eu-1", **variables)
    try:
        async with connect(served.url) as peer, peer.sender("q") as sender:
            await sender.send(b"one", application_properties={"traceparent": context})
    finally:
        served.process.send_signal(signal.SIGTERM)
        shown, errors = served.process.communicate(timeout=30)
    assert served.process.returncode == 0, errors
    (span,) = [each for each in _objects(shown) if "context" in each]
    assert span["name"] == "relay q"
    assert span["parent_id"] == "0xb7ad6b7169203331"
    assert span["resource"]["attributes"]["service.name"] == "eu-1"


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in *text*, which follow each other."""
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        found.append(value)
        at = text.find("{", end)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "-1"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")],
)
def test_a_wrong_variable_is_a_sentence(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv(variable, value)
    done = amqp_rt("serve", "--listen", "amqp://127.0.0.1:0", "--otel")
    assert done.returncode == 2
    assert "cannot be set up from its variables OTEL_*: " in done.stderr
    assert variable.removeprefix("OTEL_BSP_").lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"])
def test_an_exporter_that_is_not_installed_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv(variable, "carrier-pigeon")
    done = amqp_rt("serve", "--listen", "amqp://127.0.0.1:0", "--otel")
    assert done.returncode == 2
    assert "there is no exporter 'carrier-pigeon'" in done.stderr
    assert variable in done.stderr
    assert "Traceback" not in done.stderr
