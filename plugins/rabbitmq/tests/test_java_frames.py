"""The frames of RabbitMQ's client for Java, see ``java_frames``, against our broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from java_frames import JavaClient, is_string_array

from amqp_rt import Broker
from amqp_rt.addresses import parse_url
from amqp_rt.core.performatives import Flow
from amqp_rt.message import Message
from amqp_rt.outcomes import Accepted, Released
from amqp_rt.termini import Source
from amqp_rt.values import Described, Int, Symbol, UInt, ULong

pytestmark = pytest.mark.req("G4")


@asynccontextmanager
async def java() -> AsyncIterator[JavaClient]:
    async with Broker(
        volatile=True, users={"guest": "guest"}, auto_create=(), plain_in_clear=True
    ) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        where = parse_url(url)
        async with await trio.open_tcp_stream(where.host, where.port) as stream:
            client = JavaClient(stream)
            opened = await client.open()
            properties = opened.properties
            assert opened.hostname is None
            # The client compares these as Strings.
            assert (type(properties["product"]), properties["product"]) == (str, "RabbitMQ")
            assert tuple(map(int, properties["version"].split("."))) >= (4, 0, 0)
            assert "ANONYMOUS-RELAY" in opened.offered_capabilities
            yield client
            await client.close()


def declaration(**arguments: object) -> dict[str, object]:
    return {"durable": True, "exclusive": False, "auto_delete": False, "arguments": arguments}


async def test_queues_exchanges_and_bindings_are_managed() -> None:
    async with java() as client:
        await client.open_management()
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": Int(5)}
        status, info = await client.request("PUT", "/queues/q%20%2F1", declaration(**arguments))
        assert (status, info["name"], info["type"]) == (201, "q /1", "quorum")
        assert info["arguments"] == arguments
        assert is_string_array(info["replicas"])
        assert isinstance(info["leader"], str)
        # Casts to Boolean and Number.
        for field in ("durable", "auto_delete", "exclusive"):
            assert isinstance(info[field], bool)
        for field in ("message_count", "consumer_count"):
            assert isinstance(info[field], UInt | ULong)
        assert (await client.request("PUT", "/queues/q%20%2F1", declaration(**arguments)))[0] == 200
        assert (await client.request("PUT", "/queues/q%20%2F1", declaration()))[0] == 409
        exchange = {"type": "topic", "durable": True, "auto_delete": False, "arguments": {}}
        assert await client.request("PUT", "/exchanges/e", exchange) == (204, None)
        binding: dict[str, object] = {
            "source": "e",
            "destination_queue": "q /1",
            "binding_key": "a.+",
            "arguments": {},
        }
        assert await client.request("POST", "/bindings", binding) == (204, None)
        differing: dict[str, object] = {"number": Int(7), "text": "x"}
        await client.request("POST", "/bindings", {**binding, "arguments": differing})
        # It unbinds with arguments by looking for the binding's location; its query leaves a plus as it is.
        status, found = await client.request("GET", "/bindings?src=e&dstq=q%20/1&key=a.+")
        assert status == 200
        [other] = [each for each in found if each["arguments"] == differing]
        assert {name: type(value) for name, value in other["arguments"].items()} == {
            "number": Int,
            "text": str,
        }
        assert await client.request("DELETE", other["location"]) == (204, None)
        path = "/bindings/src=e;dstq=q%20%2F1;key=a.%2B;args="
        assert await client.request("DELETE", path) == (204, None)
        assert await client.request("GET", "/bindings?src=e&dstq=q%20/1&key=a.+") == (200, [])
        assert await client.request("DELETE", "/exchanges/e") == (204, None)
        status, counted = await client.request("DELETE", "/queues/q%20%2F1/messages")
        assert (status, counted) == (200, {"message_count": 0})
        assert await client.request("DELETE", "/queues/q%20%2F1") == (200, {"message_count": 0})
        assert (await client.request("GET", "/queues/q%20%2F1"))[0] == 404
        await client.detach(1, 1)
        await client.detach(1, 0)


async def test_messages_are_published_and_consumed() -> None:
    async with java() as client:
        await client.open_management()
        await client.request("PUT", "/queues/q", declaration(**{"x-queue-type": "quorum"}))
        await client.begin(2)
        attached = await client.attach_sender(2, 0, "/queues/q")
        assert attached.target.address == "/queues/q"
        await client.hear(Flow, 2)
        message = Message(b"body", message_id=ULong(1), durable=True)
        await client.send(2, 0, message.encode())
        assert isinstance(await client.outcome(2), Accepted)
        # An exchange without a binding releases.
        await client.attach_sender(2, 1, "/exchanges/amq.direct/none")
        await client.hear(Flow, 2)
        await client.send(2, 1, message.encode())
        assert isinstance(await client.outcome(2), Released)
        await client.begin(3)
        attached = await client.attach_receiver(3, 0, Source(address="/queues/q"))
        assert attached.source.address == "/queues/q"
        await client.grant(3, 0)
        _, got = await client.receive(3)
        assert (got.body, got.message_id) == (b"body", 1)
        assert got.message_annotations == {"x-exchange": "", "x-routing-key": "q"}
        await client.detach(3, 0)
        assert (await client.request("DELETE", "/queues/q"))[1] == {"message_count": 0}


async def test_a_stream_is_consumed_with_filters() -> None:
    async with java() as client:
        await client.open_management()
        await client.request("PUT", "/queues/s", declaration(**{"x-queue-type": "stream"}))
        await client.begin(2)
        await client.attach_sender(2, 0, "/queues/s")
        await client.hear(Flow, 2)
        for value in ("a", "b", "a"):
            message = Message(value.encode(), message_annotations={"x-stream-filter-value": value})
            await client.send(2, 0, message.encode())
            assert isinstance(await client.outcome(2), Accepted)
        filters = {
            name: Described(Symbol(name), value)
            for name, value in (
                ("rabbitmq:stream-offset-spec", "first"),
                ("rabbitmq:stream-filter", ["a"]),
                ("rabbitmq:stream-match-unfiltered", False),
            )
        }
        source = Source(
            address="/queues/s", filter={Symbol(name): each for name, each in filters.items()}
        )
        attached = await client.attach_receiver(2, 1, source)
        # Each filter has to be in the answer, or the client closes.
        assert set(attached.source.filter) == set(filters)
        await client.grant(2, 1)
        offsets = [
            (await client.receive(2))[1].message_annotations["x-stream-offset"] for _ in range(2)
        ]
        assert offsets == [ULong(0), ULong(2)]


async def test_a_request_is_answered_by_direct_reply_to() -> None:
    async with java() as client:
        await client.open_management()
        await client.request("PUT", "/queues/rpc", declaration())
        await client.begin(2)
        source = Source(
            dynamic=True,
            expiry_policy=Symbol("link-detach"),
            capabilities=(Symbol("rabbitmq:volatile-queue"),),
        )
        replies = await client.attach_receiver(2, 0, source, snd_settle_mode=1)
        await client.grant(2, 0)
        asking = await client.attach_sender(2, 1, "/queues/rpc")
        assert asking.target is not None
        await client.hear(Flow, 2)
        request = Message(b"ping", message_id="1", reply_to=replies.source.address)
        await client.send(2, 1, request.encode())
        await client.outcome(2)
        # The server.
        await client.begin(3)
        await client.attach_receiver(3, 0, Source(address="/queues/rpc"))
        await client.grant(3, 0)
        _, asked = await client.receive(3)
        await client.begin(4)
        await client.attach_sender(4, 0, None)
        await client.hear(Flow, 4)
        answer: Any = Message(b"pong", to=asked.reply_to, correlation_id=asked.message_id)
        await client.send(4, 0, answer.encode())
        assert isinstance(await client.outcome(4), Accepted)
        transfer, got = await client.receive(2)
        assert (got.body, got.correlation_id, transfer.settled) == (b"pong", "1", True)
