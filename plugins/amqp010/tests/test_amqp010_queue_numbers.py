"""``qpid.queue_msg_sequence``: a queue numbers its messages, for consumers of each protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp091 import BasicProperties
from amqp_rt_amqp091 import connect as connect091
from client010 import connected
from octets010 import Operation
from protocol010 import NOT_ACQUIRED
from served010 import serving

from amqp_rt import Broker, Message, connect

pytestmark = pytest.mark.req("D3", "N19")

NUMBERED = {"qpid.queue_msg_sequence": "n"}
#: What a sender states under the name of the header, which no consumer sees.
FORGED = {"n": 77}


def number_of(message: Operation) -> Any:
    number = message.header("message-properties").application_headers["n"]
    return getattr(number, "value", number)


async def test_consumers_of_all_protocols_get_the_number() -> None:
    async with Broker(fronts=[Front(), "amqp091"], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))
        async with (
            connect(url) as native,
            connect091(url) as amqp091,
            amqp091.channel() as channel,
            connected(stream) as client,
        ):
            session = await client.session(b"s")
            await session.call("queue.declare", queue="q", arguments=NUMBERED)
            answer: Any = await session.call("queue.query", queue="q")
            assert answer.arguments == NUMBERED
            session.transfer("", b"0-10", key="q", properties={"application_headers": FORGED})
            await session.sync()
            await channel.publish(b"0-9-1", key="q", properties=BasicProperties(headers=FORGED))
            async with native.sender("q") as sender:
                await sender.send(Message(b"1.0", application_properties=FORGED))

            await session.subscribe("q", "copies", acquire_mode=NOT_ACQUIRED)
            copies = [await session.message() for _ in range(3)]
            assert [number_of(each) for each in copies] == [1, 2, 3]
            async with native.receiver("q", mode="copy") as receiver:
                for number in (1, 2, 3):
                    annotations = (await receiver.receive()).message.message_annotations
                    assert annotations is not None
                    assert annotations["x-opt-queue-number-n"] == number
            for number in (1, 2, 3):
                found = await channel.get("q", no_ack=True)
                assert found is not None
                headers = found.properties.headers
                assert headers is not None
                assert (headers["n"], "x-opt-queue-number-n" in headers) == (number, False)


async def test_the_number_of_a_ring_shows_what_it_has_dropped(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/m.db"
    ring = {**NUMBERED, "qpid.policy_type": "ring", "qpid.max_count": 4}
    async with serving(store=store) as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q", durable=True, arguments=ring)
        for _ in range(6):
            session.transfer("", b"x", key="q", delivery={"delivery_mode": 2})
        await session.sync()
    async with serving(store=store) as served, served.client() as client:
        session = await client.session(b"s")
        session.transfer("", b"y", key="q")
        await session.sync()
        await session.subscribe("q", "d")
        found = [await session.message() for _ in range(4)]
        assert [number_of(each) for each in found] == [4, 5, 6, 7]
