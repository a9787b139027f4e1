"""Management of RabbitMQ 4 as octets and over links of our own client: rights, order of sections, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from amqp_rt_rabbitmq.requests import HttpRequest, HttpResponse, encode_response, read_request

from amqp_rt import Access, Broker, Connection, Message, Plain, Rights, Rule, connect
from amqp_rt.errors import AmqpError, ConnectFailed, DecodeError, LinkDetached
from amqp_rt.limits import DEFAULT_LIMITS

pytestmark = pytest.mark.req("G4")


def request(method: str, path: str, body: object = None, **fields: Any) -> Message:
    given = {"message_id": 1, "reply_to": "$me", "subject": method, "to": path, **fields}
    return Message(body, body_kind="value", **given)


def test_sections_may_be_in_any_order() -> None:
    payload = request("PUT", "/queues/q", {"durable": True}).encode()
    at = payload.index(b"\x00\x53\x77")
    for octets in (payload, payload[at:] + payload[:at]):
        assert read_request(octets, DEFAULT_LIMITS) == HttpRequest(
            1, "PUT", "/queues/q", {"durable": True}
        )
        for end in range(1, len(octets)):
            try:
                read_request(octets[:end], DEFAULT_LIMITS)
            except DecodeError:
                pass


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"", "no message-id"),
        (b"\x40", "no section of a message"),
        (b"\x00\x53\x10\x45", "no section of a message"),
        (b"\x00\x53\x73\x43", "properties of the request are no list"),
        (request("GET", "/queues/q", message_id=None).encode(), "no message-id"),
        (request("GET", "/queues/q", reply_to="elsewhere").encode(), "reply-to is '\\$me'"),
        (request("GET", "/queues/q", to=None).encode(), "no subject"),
        (b"\x00\x53\x77" + b"\xe0" * 9, "."),
    ],
)
def test_what_is_no_request_is_refused(octets: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        read_request(octets, DEFAULT_LIMITS)


def test_a_response_names_its_request() -> None:
    answer = Message.decode(
        encode_response(HttpRequest("id-7", "GET", "/", None), HttpResponse(404, "no"))
    )
    assert (answer.subject, answer.correlation_id, answer.body) == ("404", "id-7", "no")
    assert answer.application_properties == {"http:response": "1.1"}


# --- over links ------------------------------------------------------------------------------------


class Managing:
    """Pair of links to ``/management``."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.sender = sender
        self.receiver = receiver

    async def __call__(self, method: str, path: str, body: object = None) -> tuple[str, Any]:
        await self.sender.send(request(method, path, body))
        delivery = await self.receiver.receive()
        return delivery.message.subject, delivery.body


@asynccontextmanager
async def managing(peer: Connection) -> AsyncIterator[Managing]:
    pair: dict[str, Any] = {"name": "pair", "properties": {"paired": True}}
    async with (
        peer.sender("/management", **pair) as sender,
        peer.receiver("/management", **pair) as receiver,
    ):
        yield Managing(sender, receiver)


async def test_each_operation_takes_a_right() -> None:
    access = Access([
        Rule("mine-*", Rights.SEND | Rights.LISTEN | Rights.MANAGE, users=("ada",)),
        Rule("/exchanges/mine", Rights.SEND | Rights.LISTEN | Rights.MANAGE, users=("ada",)),
    ])  # fmt: skip
    async with Broker(
        volatile=True, access=access, users={"ada": "pw", "eve": "pw"}, plain_in_clear=True
    ) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with (
            connect(url, auth=Plain("ada", "pw"), reconnect=None) as peer,
            managing(peer) as manage,
        ):
            assert (await manage("PUT", "/queues/mine-1", {}))[0] == "201"
            assert (await manage("PUT", "/queues/mine-1", {}))[0] == "200"
            assert (await manage("PUT", "/exchanges/mine", {"type": "fanout"}))[0] == "204"
            binding = {"source": "mine", "destination_queue": "mine-1", "binding_key": ""}
            assert (await manage("POST", "/bindings", binding))[0] == "204"
            async with peer.sender("/exchanges/mine") as out:
                await out.send(b"x")
            # Deleting and purging what belongs to others, and learning of it, are refused.
            for method, path, body in (
                ("PUT", "/queues/theirs", {}),
                ("PUT", "/exchanges/theirs", {}),
                ("DELETE", "/queues/theirs", None),
                ("DELETE", "/queues/theirs/messages", None),
                ("DELETE", "/exchanges/theirs", None),
                ("GET", "/queues/theirs", None),
                ("POST", "/bindings", {**binding, "destination_queue": "theirs"}),
            ):
                status, why = await manage(method, path, body)
                assert status == "403", (method, path, why)
            status, state = await manage("GET", "/queues/mine-1")
            assert (status, state["message_count"], state["vhost"]) == ("200", 1, "/")
            assert (await manage("DELETE", "/queues/mine-1")) == ("200", {"message_count": 1})
        # Without any right there is no link to the management.
        with pytest.raises(AmqpError):
            async with (
                connect(url, auth=Plain("eve", "pw"), reconnect=None) as peer,
                managing(peer),
            ):
                pass


async def test_wrong_requests_are_answered() -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            for method, path, body, status in (
                ("BREW", "/queues/q", None, "400"),
                ("GET", "/bindings?src=e&dstq=q&key=", None, "400"),
                ("PUT", "/auth/tokens", b"token", "400"),
                ("PUT", "/queues/%FF", {}, "400"),
                ("PUT", "/queues/", {}, "400"),
                ("PUT", "/queues/q", None, "400"),
                ("PUT", "/queues/q", {"durable": "yes"}, "400"),
                ("PUT", "/queues/q", {"arguments": {"x-max-length": "many"}}, "409"),
                ("POST", "/bindings", {"source": "e"}, "400"),
                ("DELETE", "/bindings/nonsense", None, "400"),
                ("DELETE", "/bindings/src=e;dstq=q;key=;args=abc", None, "400"),
                ("DELETE", "/bindings/src=amq.direct;dstq=q;key=;args=", None, "204"),
                ("DELETE", "/exchanges/none", None, "204"),
                ("DELETE", "/queues/none", None, "200"),
                ("DELETE", "/queues/none/messages", None, "404"),
            ):
                found, why = await manage(method, path, body)
                assert found == status, (method, path, why)


async def test_an_exclusive_queue_ends_with_its_connection() -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            assert (await manage("PUT", "/queues/own", {"exclusive": True}))[0] == "201"
            async with connect(url, reconnect=None) as other, managing(other) as elsewhere:
                assert (await elsewhere("GET", "/queues/own"))[0] == "409"
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            assert (await manage("GET", "/queues/own"))[0] == "404"


async def _send(peer: Connection, message: Message) -> None:
    async with managing(peer) as manage:
        await manage.sender.send(message)
        await manage.receiver.receive()


async def test_other_links_to_the_management_are_refused() -> None:
    async with Broker() as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer:
            with pytest.raises(AmqpError, match="paired"):
                async with peer.sender("/management") as out:
                    await out.send(request("GET", "/queues/q"))
            with pytest.raises(LinkDetached, match="no message-id"):
                await _send(peer, Message("no request"))


async def test_a_profile_that_no_plugin_has_is_named() -> None:
    async with Broker() as broker:
        with pytest.raises(AmqpError, match="no plug-in has a profile 'nope'"):
            await broker.listen("amqp://127.0.0.1:0?profile=nope")
        with pytest.raises(ConnectFailed, match="profiles of plug-ins are for brokers"):
            await broker.container.listen("amqp://127.0.0.1:0?profile=rabbitmq")
