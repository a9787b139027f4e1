"""Other clients of 0-9-1, unmodified, each with what its users do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
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


async def test_amqp_tools(served: Any) -> None:
    publish, fetch = shutil.which("amqp-publish"), shutil.which("amqp-get")
    declare = shutil.which("amqp-declare-queue")
    if publish is None or fetch is None or declare is None:
        pytest.skip("Debian's amqp-tools are not installed")

    def run(port: int, *command: str) -> bytes:
        url = f"--url=amqp://guest:guest@127.0.0.1:{port}"
        return subprocess.run(
            [command[0], url, *command[1:]], capture_output=True, timeout=25, check=True
        ).stdout

    await served.run(run, served.port, declare, "-q", "tools")
    await served.run(run, served.port, publish, "-r", "tools", "-b", "hello")
    assert await served.run(run, served.port, fetch, "-q", "tools") == b"hello"


@pytest.mark.req("N19")
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
