"""Clients of three protocols, each by other authors, at one port and one queue of one broker."""

from __future__ import annotations

import pytest
import trio
from amqp_rt_amqp010 import Front
from driven010 import Driven

from amqp_rt import Broker

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


def receive_with_proton(url: str, queue: str) -> bytes:
    """Return the octets of the next message, received over AMQP 1.0."""
    from proton.utils import BlockingConnection

    connection = BlockingConnection(url, timeout=10, allowed_mechs="ANONYMOUS")
    try:
        receiver = connection.create_receiver(queue)
        message = receiver.receive(timeout=10)
        receiver.accept()
        return bytes(message.body)
    finally:
        connection.close()


def send_with_proton(url: str, queue: str, body: str) -> None:
    """Send a message over AMQP 1.0."""
    from proton import Message
    from proton.utils import BlockingConnection

    connection = BlockingConnection(url, timeout=10, allowed_mechs="ANONYMOUS")
    try:
        connection.create_sender(queue).send(Message(body=body))
    finally:
        connection.close()


def pass_on_with_pika(port: int, source: str, target: str) -> bytes:
    """Move a message from *source* to *target* over AMQP 0-9-1; return its body."""
    pika = pytest.importorskip("pika")
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    try:
        channel = connection.channel()
        method, properties, body = channel.basic_get(source)
        assert method is not None
        channel.basic_publish("", target, body, properties)
        channel.basic_ack(method.delivery_tag)
        assert isinstance(body, bytes)
        return body
    finally:
        connection.close()


@pytest.mark.req("X2", "N19", "D2")
@pytest.mark.peer("proton")
async def test_three_clients_pass_a_message_round_at_one_port(messaging: Driven) -> None:
    async with Broker(fronts=[Front(), "amqp091"], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        await messaging.step("connect", "c", f"127.0.0.1:{port}")
        await messaging.step("session", "s", "c")
        await messaging.step("sender", "out", "s", "first; {create: always}")
        await messaging.step("receiver", "in", "s", "second; {create: always}")

        await messaging.step("send", "out", "from 0-10")
        found = await trio.to_thread.run_sync(pass_on_with_pika, port, "first", "second")
        assert found == b"from 0-10"
        assert (await messaging.step("fetch", "in"))["content"] == "from 0-10"

        await trio.to_thread.run_sync(send_with_proton, url, "first", "from 1.0")
        await trio.to_thread.run_sync(pass_on_with_pika, port, "first", "second")
        assert (await messaging.step("fetch", "in"))["content"] == "from 1.0"

        await messaging.step("send", "out", "again from 0-10")
        found_by_proton = await trio.to_thread.run_sync(receive_with_proton, url, "first")
        assert found_by_proton == b"again from 0-10"
