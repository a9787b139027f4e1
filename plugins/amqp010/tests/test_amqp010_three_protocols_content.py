"""Content on its way through a broker of three protocols: bodies stay as they are, and headers are only added.

Section 2.2.1 of the June 2007 draft: a server must not modify bodies, and may add to headers but not change them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp091 import BasicProperties, ClientConnection
from amqp_rt_amqp091 import connect as connect091
from client010 import Attached, connected
from octets010 import Struct

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.message import Message

pytestmark = pytest.mark.req("D3", "N19")

#: No text, and larger than a frame of each protocol.
BODY = bytes(range(256)) * 1_000
HEADERS = {"colour": "red", "x-own": "kept", "count": 7}
STATED = {
    "content-type": "application/x-own",
    "content-encoding": "gzip",
    "correlation-id": "c-1",
    "priority": 7,
    "durable": False,
    **{f"header {name}": value for name, value in HEADERS.items()},
}


class Three:
    """Clients of three protocols at one broker."""

    def __init__(self, native: Connection, amqp091: ClientConnection, amqp010: Attached) -> None:
        self.native = native
        self.amqp091 = amqp091
        self.amqp010 = amqp010


@asynccontextmanager
async def three(*more: Queue) -> AsyncIterator[Three]:
    queues = (Queue("dead", browse_only=True), Queue("q", dead_letter="dead"), *more)
    async with Broker(fronts=[Front(), "amqp091"], volatile=True) as broker:
        for queue in queues:
            await broker.declare(queue)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))
        async with (
            Container("client") as client,
            client.connect(url, reconnect=None) as native,
            connect091(url) as amqp091,
            connected(stream) as amqp010,
        ):
            session = await amqp010.session(b"s")
            for queue in queues:
                await session.call(
                    "exchange.bind", queue=queue.name, exchange="amq.direct", binding_key=queue.name
                )
            yield Three(native, amqp091, session)


# --- publishers --------------------------------------------------------------------------------------


async def publish_by_native(here: Three) -> None:
    async with here.native.sender("/exchanges/amq.direct/q") as link:
        message = Message(
            BODY,
            content_type="application/x-own",
            content_encoding="gzip",
            correlation_id="c-1",
            priority=7,
            application_properties=HEADERS,
        )
        await link.send(message)


async def publish_by_091(here: Three) -> None:
    properties = BasicProperties(
        content_type="application/x-own",
        content_encoding="gzip",
        correlation_id="c-1",
        priority=7,
        delivery_mode=1,
        headers=HEADERS,
    )
    async with here.amqp091.channel() as channel:
        await channel.publish(BODY, key="q", exchange="amq.direct", properties=properties)


async def publish_by_010(here: Three) -> None:
    structs = [
        Struct("delivery-properties", priority=7, **{"delivery-mode": 1, "routing-key": "q"}),
        Struct(
            "message-properties",
            **{
                "content-type": "application/x-own",
                "content-encoding": "gzip",
                "correlation-id": b"c-1",
                "application-headers": HEADERS,
            },
        ),
    ]
    session = here.amqp010
    number = session.send(
        "message.transfer", destination="amq.direct", headers=structs, body=BODY, sync=True
    )
    await session.done(number)


# --- consumers, after a rejection --------------------------------------------------------------------

Content = tuple[bytes, Mapping[str, Any]]


def stated(headers: Mapping[str, Any], **fields: Any) -> Mapping[str, Any]:
    found = {name.replace("_", "-"): value for name, value in fields.items()}
    return {**found, **{f"header {name}": value for name, value in headers.items()}}


async def consume_by_native(here: Three) -> Content:
    async with here.native.receiver("dead") as link:
        message = (await link.receive()).message
    annotations = {str(name): value for name, value in (message.message_annotations or {}).items()}
    # Headers that 1.0 keeps for others, by their names, are together in one annotation.
    others = annotations.get("x-basic-headers") or {}
    return bytes(message.body), stated(
        {**annotations, **others, **(message.application_properties or {})},
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        correlation_id=message.correlation_id,
        priority=message.priority,
        durable=message.durable,
    )


async def consume_by_091(here: Three) -> Content:
    async with here.amqp091.channel() as channel, channel.consume("dead") as consumer:
        found = await consumer.__anext__()
    properties = found.properties
    return found.body, stated(
        properties.headers or {},
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        correlation_id=properties.correlation_id,
        priority=properties.priority,
        durable=properties.delivery_mode == 2,
    )


async def consume_by_010(here: Three) -> Content:
    session = here.amqp010
    await session.subscribe("dead", "dead")
    message = await session.message()
    delivery = message.header("delivery-properties")
    properties = message.header("message-properties")
    headers = {
        name: getattr(value, "value", value)
        for name, value in properties.application_headers.items()
    }
    return message.body, stated(
        headers,
        content_type=properties.content_type,
        content_encoding=properties.content_encoding,
        correlation_id=properties.correlation_id.decode(),
        priority=delivery.priority,
        durable=delivery.delivery_mode == 2,
    )


PUBLISHERS: dict[str, Callable[[Three], Awaitable[None]]] = {
    "1.0": publish_by_native,
    "0-9-1": publish_by_091,
    "0-10": publish_by_010,
}
CONSUMERS: dict[str, Callable[[Three], Awaitable[Content]]] = {
    "1.0": consume_by_native,
    "0-9-1": consume_by_091,
    "0-10": consume_by_010,
}


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("publisher", PUBLISHERS)
async def test_bodies_stay_and_headers_are_only_added(publisher: str, consumer: str) -> None:
    async with three() as here:
        await PUBLISHERS[publisher](here)
        async with here.native.receiver("q", credit=1) as link:
            (await link.receive()).reject("not for me")
        body, found = await CONSUMERS[consumer](here)
    assert body == BODY
    assert {name: found.get(name) for name in STATED} == STATED
    # What the broker adds says where the message has been, and why.
    assert "header x-opt-dead-letter-reason" in found


# --- priorities --------------------------------------------------------------------------------------

PRIORITIES = [5, 1, 9, 1, 5, 0, 9]


async def fill_by_native(here: Three) -> None:
    async with here.native.sender("ring") as link:
        for priority in PRIORITIES:
            await link.send(Message(b"%d" % priority, priority=priority))


async def fill_by_091(here: Three) -> None:
    arguments = {"x-max-length": 4, "x-overflow": "drop-head", "x-max-priority": 9}
    async with here.amqp091.channel() as channel:
        await channel.declare_queue("ring", arguments=arguments)
        for priority in PRIORITIES:
            properties = BasicProperties(priority=priority)
            await channel.publish(b"%d" % priority, key="ring", properties=properties)


async def fill_by_010(here: Three) -> None:
    arguments = {"qpid.max_count": 4, "qpid.policy_type": "ring", "qpid.priorities": 10}
    session = here.amqp010
    await session.call("queue.declare", queue="ring", arguments=arguments)
    for priority in PRIORITIES:
        delivery = Struct("delivery-properties", priority=priority, **{"routing-key": "ring"})
        session.send("message.transfer", headers=[delivery], body=b"%d" % priority)
    await session.sync()


@pytest.mark.parametrize("protocol", ["1.0", "0-9-1", "0-10"])
async def test_messages_of_low_priority_are_given_up_first(protocol: str) -> None:
    fill = {"1.0": fill_by_native, "0-9-1": fill_by_091, "0-10": fill_by_010}[protocol]
    ring = Queue("ring", length_max=4, overflow="drop-head", priorities=10)
    async with three(*([ring] if protocol == "1.0" else [])) as here:
        await fill(here)
        async with here.native.receiver("ring", credit=4) as link:
            found = [bytes((await link.receive()).body) for _ in range(4)]
    assert found == [b"9", b"9", b"5", b"5"]
