"""Exchanges that remember their last message for new bindings (``qpid.ive``), over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp091 import connect as connect091
from client010 import Attached, connected

from amqp_rt import Broker, connect
from amqp_rt.limits import Limits

pytestmark = pytest.mark.req("D3")

IVE = {"qpid.ive": 1}


async def bound(session: Attached, queue: str, exchange: str = "e", key: str = "") -> int:
    """Declare *queue*, bind it, and return the number of its messages."""
    await session.call("queue.declare", queue=queue)
    await session.call("exchange.bind", queue=queue, exchange=exchange, binding_key=key)
    return await length(session, queue)


async def initial(url: str, session: Attached, queue: str, key: str) -> list[bytes]:
    """Return the messages that a queue gets when it is bound with *key*."""
    await bound(session, queue, key=key)
    await session.call("exchange.unbind", queue=queue, exchange="e", binding_key=key)
    found: list[bytes] = []
    async with connect(url) as connection, connection.receiver(queue) as receiver:
        while (delivery := await receiver.get(within=0.1)) is not None:
            found.append(bytes(delivery.body))
            delivery.accept()
    return found


async def length(session: Attached, queue: str) -> int:
    answer = await session.call("queue.query", queue=queue)
    count: int = getattr(answer, "message_count")  # noqa: B009
    return count


async def test_a_new_binding_gets_the_last_message_of_any_protocol(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/m.db"
    async with Broker(fronts=[Front(), "amqp091"], store=store) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2].rstrip("/"))
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with connected(stream) as client:
            session = await client.session(b"s")
            for name, kind in (("e", "topic"), ("plain", "topic"), ("h", "headers")):
                arguments = None if name == "plain" else IVE
                await session.call(
                    "exchange.declare", exchange=name, type=kind, durable=True, arguments=arguments
                )
                properties = {"application_headers": {"colour": "red"}}
                for body in (b"old", b"last"):
                    session.transfer(name, body, key="a.b", properties=properties)
            await session.sync()
            assert await initial(url, session, "q", "a.*") == [b"last"]
            assert await bound(session, "other", key="b.#") == 0
            assert await bound(session, "none", "plain", "#") == 0
            # No other queue gets it again, nor the queue itself if it has that binding already.
            assert await bound(session, "mine", key="a.#") == 1
            assert await bound(session, "mine", key="a.#") == 1
            assert await bound(session, "yours", key="a.#") == 1
            assert await length(session, "mine") == 1
            for colour, count in (("blue", 0), ("red", 1)):
                await session.call("queue.declare", queue=colour)
                await session.call(
                    "exchange.bind", queue=colour, exchange="h", arguments={"colour": colour}
                )
                assert await length(session, colour) == count

            # A message of a transaction is none, whether or not that is committed.
            working = await client.session(b"t")
            await working.call("tx.select")
            working.transfer("e", b"uncommitted", key="a.b")
            await working.call("tx.commit")
            assert await initial(url, session, "q1", "a.b") == [b"last"]
            async with connect091(url) as connection, connection.channel() as channel:
                await channel.publish(b"of 0-9-1", exchange="e", key="a.b")
                # Bindings made by 0-9-1 get it as well.
                await channel.declare_queue("q2")
                await channel.bind_queue("q2", "e", "a.b")
                found = await channel.get("q2")
                assert found is not None
                assert found.body == b"of 0-9-1"
            assert await initial(url, session, "q3", "a.#") == [b"of 0-9-1"]
            async with connect(url) as plain, plain.sender("/exchanges/e/a.b") as sender:
                await sender.send(b"of 1.0")
            assert await initial(url, session, "q4", "a.#") == [b"of 1.0"]
    async with Broker(fronts=[Front()], store=store) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2].rstrip("/"))
        async with connected(await trio.open_tcp_stream("127.0.0.1", port)) as client:
            session = await client.session(b"s")
            # The exchange remembers again, but not what was before.
            assert await bound(session, "later", key="a.b") == 0
            session.transfer("e", b"again", key="a.b")
            await session.sync()
            assert await bound(session, "latest", key="a.b") == 1


async def test_a_message_above_the_limit_is_not_remembered() -> None:
    limits = Limits(last_message_max=4_000)
    async with Broker(fronts=[Front()], limits=limits) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2].rstrip("/"))
        async with connected(await trio.open_tcp_stream("127.0.0.1", port)) as client:
            session = await client.session(b"s")
            await session.call("exchange.declare", exchange="e", type="fanout", arguments=IVE)
            for size, count in ((3_000, 1), (4_001, 0), (10, 1)):
                session.transfer("e", bytes(size))
                await session.sync()
                assert await bound(session, f"q{size}") == count
