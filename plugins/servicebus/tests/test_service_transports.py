"""WebSockets and TLS, with the transport options of both SDKs, unmodified."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler, Javascript

pytestmark = [pytest.mark.req("Z5", "Z21"), pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(Queue("q")) as bus:
        yield bus


def exchange(bus: ServiceBus, kind: str, text: str, **options: Any) -> None:
    """Send a message, and receive it, by a client with *options*."""
    from azure.servicebus import ServiceBusMessage

    dialler = Dialler(kind)
    try:
        client = dialler.client(text, connection_verify=bus.ca_file, **options)
        with client.get_queue_sender("q") as sender:
            sender.send_messages(ServiceBusMessage("a" * 100_000))
        with client.get_queue_receiver("q") as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=5)
            assert len(str(message)) == 100_000
            receiver.complete_message(message)
    finally:
        dialler.close()
        with warnings.catch_warnings():
            # The SDK leaves transports of asyncio open, which would fail a later test.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_python_sends_and_receives_over_websockets(
    bus: ServiceBus, azure_python: None, kind: str
) -> None:
    from azure.servicebus import TransportType

    exchange(
        bus,
        kind,
        bus.connection_string_for(over="wss"),
        transport_type=TransportType.AmqpOverWebsocket,
        custom_endpoint_address=bus.websocket_url,
    )


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_python_sends_and_receives_with_tls(bus: ServiceBus, azure_python: None, kind: str) -> None:
    from azure.servicebus import TransportType

    # Without a custom endpoint the SDK takes port 5671, whatever the connection string says.
    exchange(
        bus,
        kind,
        bus.connection_string_for(over="amqps"),
        transport_type=TransportType.Amqp,
        custom_endpoint_address=f"sb://localhost:{bus.port}",
    )


@pytest.mark.parametrize("over", ["wss", "amqps"])
def test_javascript_sends_and_receives_with_tls(
    bus: ServiceBus, azure_javascript: str, over: Any
) -> None:
    text = bus.connection_string_for(over=over)
    websocket = ("websocket",) if over == "wss" else ()
    client = Javascript(azure_javascript, text, *websocket, ca_file=bus.ca_file)
    try:
        client("send", "q", {"body": "a" * 100_000})
        client("open", "r", ["q"])
        (message,) = client("receive", "r", 1)
        assert len(message["body"]) == 100_000
        client("settle", "r", "complete", message["key"])
    finally:
        client.close()
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


@pytest.mark.req("Z17")
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_python_has_small_frames_if_asked(azure_python: None, kind: str) -> None:
    with ServiceBus(Queue("q"), frame_size_max=262_144) as bus:
        exchange(bus, kind, bus.connection_string)


@pytest.mark.req("Z17")
def test_javascript_has_small_frames_if_asked(azure_javascript: str) -> None:
    with ServiceBus(Queue("q"), frame_size_max=262_144) as bus:
        client = Javascript(azure_javascript, bus.connection_string)
        try:
            client("send", "q", {"body": "a" * 600_000})
        finally:
            client.close()
        assert bus.queue("q").stats.active == 1
