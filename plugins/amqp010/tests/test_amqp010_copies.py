"""How often a body is copied between two sockets, and transports other than TCP (decision 0083)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from amqp_rt_amqp010 import Front
from client010 import connected
from protocol010 import UNLIMITED, Session
from worlds010 import Client, World

from amqp_rt import Broker

pytestmark = pytest.mark.req("D17")

#: Octets of a body in several frames, so that everything else is small beside it.
SIZE = 480_000


def copies_of(call: Callable[[], object]) -> tuple[float, float]:
    """Return what *call* leaves in memory, and what it takes at most, in bodies."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        kept = call()
        now, most = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return (now - before) / SIZE, (most - before) / SIZE


def send(client: Client, data: bytes) -> list[bytes]:
    """Give octets to the engine; return its output."""
    client._call(data)
    output: list[bytes] = []
    while more := client.engine.take():
        output += more
    while client.engine.unread:
        client._call(b"")
        output += client.engine.take()
    return output


def queues(world: World, *names: str) -> tuple[Client, Session]:
    client = world.connect()
    session = client.session()
    for name in names:
        client.run(session, "queue.declare", queue=name)
        client.run(session, "exchange.bind", queue=name, exchange="amq.fanout")
    return client, session


def payload(world: World, queue: str) -> bytes:
    (entry,) = world.host.space().find(queue).held.peek(1)
    found = entry.payload
    assert isinstance(found, bytes)
    return found


def test_a_body_is_joined_once_on_its_way_in_and_kept_once_for_all_queues() -> None:
    names = [f"q{number}" for number in range(5)]
    world = World()
    client, session = queues(world, *names)
    session.transfer("amq.fanout", bytes(SIZE), accept_mode=None)
    data = b"".join(client.wire.take())
    kept, most = copies_of(lambda: send(client, data))
    assert len({id(payload(world, name)) for name in names}) == 1
    # At most: the payloads of the frames, and the message that they are joined to.
    assert kept < 1.1
    assert most < 2.1


def test_a_body_is_joined_once_on_its_way_out() -> None:
    world = World()
    client, session = queues(world, "q")
    session.transfer("amq.fanout", bytes(SIZE), accept_mode=None)
    client.run(session, "execution.sync")
    session.send("message.subscribe", queue="q", destination="d", accept_mode=1)
    for unit in (0, 1):
        session.send("message.flow", destination="d", unit=unit, value=UNLIMITED)
    data = b"".join(client.wire.take())
    output: list[bytes] = []
    kept, most = copies_of(lambda: output.extend(send(client, data)))
    assert sum(map(len, output)) > SIZE
    # At most: the body, cut off the message, and the frames.
    assert kept < 1.1
    assert most < 2.1


def test_a_body_that_fits_a_frame_is_sent_without_being_joined() -> None:
    world = World()
    client, session = queues(world, "q")
    body = bytes(range(256)) * 128
    session.transfer("amq.fanout", body, accept_mode=None)
    client.run(session, "execution.sync")
    session.send("message.subscribe", queue="q", destination="d", accept_mode=1)
    for unit in (0, 1):
        session.send("message.flow", destination="d", unit=unit, value=UNLIMITED)
    output = send(client, b"".join(client.wire.take()))
    assert body in output


async def pass_on(stream: trio.abc.Stream) -> bytes | None:
    """Send a message to a queue, and receive it from there."""
    async with connected(stream) as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        await session.subscribe("q", "d")
        session.transfer("", bytes(SIZE), key="q")
        body = (await session.message()).body
        assert body is None or isinstance(body, bytes)
        return body


async def test_bodies_pass_outside_of_tcp(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    async with Broker(fronts=[Front()], volatile=True) as broker:
        await broker.listen(f"amqp+unix://{path}")
        assert await pass_on(await trio.open_unix_socket(path)) == bytes(SIZE)
