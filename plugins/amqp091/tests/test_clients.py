"""Other clients of 0-9-1, unmodified, each with what its users do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

PEERS = Path(__file__).parent / "peers"


def amqp_url(port: int) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}//"


async def test_aio_pika(served: Any) -> None:
    aio_pika = pytest.importorskip("aio_pika")
    from aio_pika.patterns import RPC

    async def multiply(*, one: int, other: int) -> int:
        return one * other

    async def go(port: int) -> None:
        connection = await aio_pika.connect_robust(amqp_url(port))
        async with connection:
            channel = await connection.channel()
            await channel.set_qos(10)
            exchange = await channel.declare_exchange("logs", aio_pika.ExchangeType.TOPIC)
            queue = await channel.declare_queue("aio", auto_delete=True)
            await queue.bind(exchange, "a.*")
            for number in range(20):
                message = aio_pika.Message(b"%d" % number, headers={"number": number})
                await exchange.publish(message, "a.b")
            found = []
            async with queue.iterator() as messages:
                async for message in messages:
                    async with message.process():
                        found.append((message.body, message.headers["number"]))
                    if len(found) == 20:
                        break
            assert found == [(b"%d" % number, number) for number in range(20)]
            rpc = await RPC.create(channel)
            await rpc.register("multiply", multiply, auto_delete=True)
            assert await rpc.call("multiply", kwargs={"one": 6, "other": 7}) == 42
            with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
                await channel.declare_queue("nowhere", passive=True)

    await served.run(lambda port: asyncio.run(go(port)), served.port)


async def test_kombu_on_py_amqp(served: Any) -> None:
    kombu = pytest.importorskip("kombu")

    def client(port: int) -> None:
        with kombu.Connection(amqp_url(port)) as connection:
            exchange = kombu.Exchange("kombu", "direct")
            queue = kombu.Queue("kombu", exchange, routing_key="k")
            with connection.Producer() as producer:
                for number in range(3):
                    producer.publish(
                        {"number": number}, exchange=exchange, routing_key="k", declare=[queue]
                    )
            found: list[Any] = []

            def on_message(body: Any, message: Any) -> None:
                found.append(body["number"])
                message.ack()

            with connection.Consumer(queue, callbacks=[on_message]):
                while len(found) < 3:
                    connection.drain_events(timeout=5)
            assert found == [0, 1, 2]
            simple = connection.SimpleQueue("simple")
            simple.put({"x": 2})
            message = simple.get(timeout=5)
            assert message.payload == {"x": 2}
            message.requeue()
            message = simple.get(timeout=5)
            assert message.delivery_info["redelivered"]
            message.ack()
            simple.close()

    await served.run(client, served.port)


@pytest.mark.slow
async def test_celery_with_tasks_retries_and_chords(served: Any, tmp_path: Path) -> None:
    pytest.importorskip("celery")
    pytest.importorskip("sqlalchemy")

    def client(port: int) -> None:
        environment = {
            **os.environ,
            "BROKER": amqp_url(port),
            "RESULTS": f"db+sqlite:///{tmp_path / 'results.db'}",
        }
        log = tmp_path / "worker.log"
        arguments = ["-A", "tasks", "worker", "-P", "solo", "-l", "INFO"]
        with log.open("w") as output:
            worker = subprocess.Popen(
                [sys.executable, "-m", "celery", *arguments],
                cwd=PEERS,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            asked = subprocess.run(
                [sys.executable, "ask.py"],
                cwd=PEERS,
                env=environment,
                capture_output=True,
                text=True,
                timeout=80,
                check=False,
            )
        finally:
            worker.terminate()
            worker.wait(20)
        said = asked.stdout.splitlines()
        assert said == ["5", "2", "[1, 2, 3]", "20", "[[{'ok': 'pong'}]]"], (
            asked.stderr + log.read_text()
        )

    await served.run(client, served.port, within=100)


async def test_amqplib(served: Any) -> None:
    node = shutil.which("node")
    if node is None or not (PEERS / "node_modules" / "amqplib").is_dir():
        pytest.skip("amqplib is not installed: npm install in tests/peers of this plug-in")

    def client(port: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(node), str(PEERS / "amqplib_peer.js"), f"amqp://guest:guest@127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        )

    done = await served.run(client, served.port)
    assert done.stdout.splitlines() == ["received 50", "returned 312", "error 404", "closed"], (
        done.stderr
    )


TOOLS = ("amqp-declare-queue", "amqp-publish", "amqp-get", "amqp-consume", "amqp-delete-queue")


async def test_amqp_tools(served: Any) -> None:
    if not all(map(shutil.which, TOOLS)):
        why = "Debian's amqp-tools are not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)

    def run(port: int, command: str, *arguments: str, given: bytes | None = None) -> bytes:
        return subprocess.run(
            [command, f"--url=amqp://guest:guest@127.0.0.1:{port}", *arguments],
            input=given,
            capture_output=True,
            timeout=25,
            check=True,
        ).stdout

    async def tool(command: str, *arguments: str, given: bytes | None = None) -> bytes:
        return await served.run(partial(run, given=given), served.port, command, *arguments)

    assert await tool("amqp-declare-queue", "-d", "-q", "tools") == b"tools\n"
    await tool("amqp-publish", "-r", "tools", "-p", "-C", "text/plain", "-b", "hello")
    async with served.broker.connect(served.url) as peer, peer.receiver("tools") as receiver:
        delivery = await receiver.receive()
        assert delivery.message.body == b"hello"
        assert (delivery.message.content_type, delivery.message.durable) == ("text/plain", True)
        delivery.release()
    assert await tool("amqp-get", "-q", "tools") == b"hello"
    await tool("amqp-publish", "-r", "tools", "-l", given=b"one\ntwo\n")
    await tool("amqp-publish", "-e", "amq.fanout", "-r", "x", "-b", "to nobody")
    # Each message is the input of a program of its own.
    assert await tool("amqp-consume", "-q", "tools", "-c", "2", "cat") == b"one\ntwo\n"
    assert await tool("amqp-delete-queue", "-q", "tools") == b"0\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        await tool("amqp-get", "-q", "tools")
    assert b"NOT_FOUND" in caught.value.stderr


#: Every property, and headers of the types that both protocols have.
HEADERS = {"text": "\u00e4", "number": 1 << 40, "yes": True, "nothing": None}
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "delivery_mode": 2,
    "priority": 7,
    "correlation_id": "c-1",
    "reply_to": "answers",
    "message_id": "m-1",
    "timestamp": 1_700_000_000,
    "type": "order",
    "user_id": None,
    "app_id": "shop",
}


@pytest.mark.req("N19", "X2")
async def test_a_message_of_pika_is_consumed_by_proton_and_the_other_way_round(served: Any) -> None:
    pika = pytest.importorskip("pika")
    proton = pytest.importorskip("proton")
    from proton.utils import BlockingConnection

    def client(port: int) -> None:
        there = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
        channel = there.channel()
        for name in ("to-proton", "to-pika"):
            channel.queue_declare(name, durable=True)
        sent = pika.BasicProperties(headers=HEADERS, expiration="60000", **PROPERTIES)
        channel.basic_publish("", "to-proton", b"{}", sent)
        here = BlockingConnection(f"amqp://127.0.0.1:{port}", timeout=10, allowed_mechs="ANONYMOUS")
        receiver = here.create_receiver("to-proton")
        message = receiver.receive(timeout=10)
        receiver.accept()
        found = {
            "content_type": str(message.content_type),
            "content_encoding": str(message.content_encoding),
            "delivery_mode": 2 if message.durable else 1,
            "priority": message.priority,
            "correlation_id": message.correlation_id,
            "reply_to": message.reply_to,
            "message_id": message.id,
            "timestamp": message.creation_time,
            "type": message.annotations["x-basic-type"],
            "user_id": message.user_id or None,
            "app_id": message.annotations["x-basic-app-id"],
        }
        assert found == PROPERTIES
        assert message.properties == HEADERS
        assert bytes(message.body) == b"{}"
        assert 0 < message.ttl <= 60
        # Back as it came.
        sender = here.create_sender("to-pika")
        sender.send(message)
        # And one of proton's own.
        sender.send(
            proton.Message(
                body=b"x",
                inferred=True,
                id=proton.ulong(5),
                subject="s",
                group_id="g",
                properties={"n": 1},
            )
        )
        here.close()
        method, properties, body = channel.basic_get("to-pika")
        assert (method.routing_key, body) == ("to-proton", b"{}")
        assert {name: getattr(properties, name) for name in PROPERTIES} == PROPERTIES
        assert properties.headers == HEADERS
        method, properties, body = channel.basic_get("to-pika")
        assert (method.exchange, method.routing_key, body) == ("", "to-pika", b"x")
        assert properties.message_id == "5"
        assert properties.headers == {
            "n": 1,
            "x-message-id-type": "ulong",
            "x-amqp10-subject": "s",
            "x-amqp10-group-id": "g",
            "x-amqp10-group-sequence": 0,
        }
        there.close()

    await served.run(client, served.port)


@pytest.mark.req("N19", "X2")
async def test_pika_and_1_0_talk_to_the_same_queues(served: Any) -> None:
    pika = pytest.importorskip("pika")

    def publish(port: int) -> None:
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            channel.queue_declare("work", durable=True)
            channel.queue_declare("copy", durable=True)
            channel.exchange_declare("news", "topic", durable=True)
            channel.queue_bind("copy", "news", "a.#")
            channel.basic_publish(
                "", "work", b"to 1.0", pika.BasicProperties(message_id="m", headers={"n": 1})
            )

    def fetch(port: int) -> list[tuple[bytes, Any]]:
        found = []
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            for name in ("work", "copy", "copy"):
                for _ in range(100):
                    _, properties, body = channel.basic_get(name, auto_ack=True)
                    if body is not None:
                        break
                    time.sleep(0.01)
                found.append((body, properties.message_id))
        return found

    await served.run(publish, served.port)
    async with served.broker.connect(served.url) as peer:
        async with peer.receiver("/queues/work") as receiver:
            delivery = await receiver.receive()
            assert (delivery.message.body, delivery.message.message_id) == (b"to 1.0", "m")
            assert delivery.message.application_properties == {"n": 1}
            delivery.accept()
        async with peer.sender("work") as sender:
            await sender.send(b"to 0-9-1", message_id="w")
        async with peer.sender("/exchanges/news/a.b") as sender:
            await sender.send(b"by key", message_id="k")
        async with peer.sender("/exchanges/news") as sender:
            await sender.send(b"by subject", message_id="s", subject="a.c")
    assert await served.run(fetch, served.port) == [
        (b"to 0-9-1", "w"),
        (b"by key", "k"),
        (b"by subject", "s"),
    ]


@pytest.mark.slow
async def test_a_broker_of_the_command_line(tmp_path: Path) -> None:
    pika = pytest.importorskip("pika")

    def client() -> None:
        command = [sys.executable, "-m", "amqp_rt.cli", "serve", "--front", "amqp091"]
        command += ["--listen", "amqp://127.0.0.1:0", "--volatile"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                ready = json.loads(server.stdout.readline().removeprefix("ready "))
                connection = pika.BlockingConnection(pika.URLParameters(ready["listeners"][0]))
                channel = connection.channel()
                channel.queue_declare("q")
                channel.basic_publish("", "q", b"x")
                assert channel.basic_get("q", auto_ack=True)[2] == b"x"
                connection.close()
            finally:
                server.terminate()

    with trio.fail_after(30):
        await trio.to_thread.run_sync(client)
