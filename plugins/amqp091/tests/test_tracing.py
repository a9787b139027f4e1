"""Traces of 0-9-1: methods by name, and no secrets."""

from __future__ import annotations

import io
from pathlib import Path

import pika
import pytest
import trio
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.codec import write_table
from amqp_rt_amqp091.frames import PROTOCOL_HEADER, content_frames, method_frame

from amqp_rt import Broker
from amqp_rt.clock import SystemClock
from amqp_rt.net.traces.drawing import rungs
from amqp_rt.net.traces.recording import Trace, TraceWriter, read_trace

pytestmark = pytest.mark.req("O5")

SECRET = b"correct horse"


class File(io.BytesIO):
    """A file whose octets are there after it was closed."""

    octets = b""

    def close(self) -> None:
        if not self.closed:
            self.octets = self.getvalue()
        super().close()


def traced(path: Path, octets: bytes, piece: int = 1 << 20) -> tuple[bytes, Trace]:
    """What a trace keeps of what a client says, *piece* octets at a time."""
    file = File()
    writer = TraceWriter(file, client=False, address="them", clock=SystemClock(), bytes_max=1 << 24)
    for at in range(0, len(octets), piece):
        writer.received(octets[at : at + piece])
    writer.close()
    path.write_bytes(file.octets)
    trace = read_trace(path)
    return b"".join(data for _, data in trace.chunks(client=True)), trace


def start_ok(mechanism: str, response: bytes) -> bytes:
    properties = {"product": "test"}
    return method_frame(
        0, m.ConnectionStartOk(client_properties=properties, mechanism=mechanism, response=response)
    )


def published(exchange: str, key: str, headers: dict[str, object], body: bytes) -> bytes:
    method = m.BasicPublish(exchange=exchange, routing_key=key)
    return b"".join(content_frames(1, method, m.BasicProperties(headers=headers), body, 4096))


AMQPLAIN = write_table({"LOGIN": "bench", "PASSWORD": SECRET.decode()})[4:]


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        (start_ok("PLAIN", b"\0bench\0" + SECRET), "connection.start-ok"),
        (start_ok("AMQPLAIN", AMQPLAIN), "connection.start-ok"),
        (start_ok("OTHER", SECRET), "connection.start-ok"),
        (start_ok("PLAIN", SECRET)[:-1], "bytes of a frame that did not become whole"),
        (start_ok("PLAIN", SECRET)[:-1] + b"x", "no frame of 0-9-1"),
        (b"\x41" + start_ok("PLAIN", SECRET), "no frame of 0-9-1"),
        (method_frame(0, m.ConnectionSecureOk(response=SECRET)), "connection.secure-ok"),
        (
            method_frame(0, m.ConnectionUpdateSecret(new_secret=SECRET, reason="renewed")),
            "connection.update-secret",
        ),
        (published("", "$cbs", {}, SECRET), "body"),
        (published("", "$management", {"password": SECRET.decode()}, b""), "header"),
        (published("amq.direct", "x", {"CC": ["$management"]}, bytes(5_000) + SECRET), "body"),
    ],
)
def test_secrets_are_masked(tmp_path: Path, said: bytes, drawn: str, piece: int) -> None:
    octets = PROTOCOL_HEADER + said
    kept, trace = traced(tmp_path / "one", octets, piece)
    assert SECRET not in kept
    assert len(kept) == len(octets)
    assert drawn in "\n".join(rung.text for rung in rungs(trace))


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_what_is_not_secret_is_kept_as_it_is(tmp_path: Path, piece: int) -> None:
    begin = PROTOCOL_HEADER + start_ok("ANONYMOUS", b"")
    hidden = published("", "$cbs", {}, b"hidden")
    after = published("", "q", {"a": "b"}, bytes(20_000)) + method_frame(1, m.BasicGet(queue="q"))
    kept, trace = traced(tmp_path / "one", begin + hidden + after, piece)
    assert kept.endswith(after)
    assert kept.startswith(begin)
    assert b"hidden" not in kept
    texts = [rung.text for rung in rungs(trace)]
    assert texts[-2].startswith("1 basic.get")
    assert not any(rung.bad for rung in rungs(trace))


async def test_a_conversation_with_pika_is_drawn_without_its_password(tmp_path: Path) -> None:
    def talk(port: int) -> None:
        login = pika.PlainCredentials("bench", SECRET.decode())
        parameters = pika.ConnectionParameters("127.0.0.1", port, credentials=login)
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            channel.basic_publish("", "q", b"hello")
            (_, _, body) = channel.basic_get("q", auto_ack=True)
            assert body == b"hello"

    async with Broker(
        "us", fronts=["amqp091"], users={"bench": SECRET.decode()}, trace=tmp_path
    ) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        await trio.to_thread.run_sync(talk, int(url.rpartition(":")[2]))
    (path,) = tmp_path.iterdir()  # noqa: ASYNC240
    assert SECRET not in path.read_bytes()
    found = rungs(read_trace(path))
    assert not any(rung.bad for rung in found)
    texts = [(rung.client, rung.text) for rung in found]
    for client, name in [
        (True, "header AMQP 0.9.1"),
        (False, "0 connection.start "),
        (True, "0 connection.start-ok + "),
        (True, "1 queue.declare + "),
        (True, "1 basic.publish + "),
        (True, "1 body + 5 bytes"),
        (False, "1 basic.get-ok + "),
    ]:
        assert any(side == client and text.startswith(name) for side, text in texts), name
