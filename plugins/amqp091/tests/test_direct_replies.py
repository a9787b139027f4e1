"""Direct replies (``amq.rabbitmq.reply-to``) of services of every protocol, to pika and to our own client of 0-9-1."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front as Front010
from amqp_rt_amqp091 import BasicProperties, Front, connect
from meshed import line
from meshed import until as until_holds
from octets010 import Struct
from served010 import Served

from amqp_rt import Access, Broker, Connection, Container, Limits, Message, Peer, Rights, Rule
from amqp_rt.addresses import REPLY_TO
from amqp_rt.errors import AmqpError, DeliveryNotAccepted, DeliveryRejected, LinkRefused
from amqp_rt.fronts.amqp10 import Front as Amqp10

pika = pytest.importorskip("pika")
from pika import exceptions  # noqa: E402 - only if it is there

#: Broker as that of ``amqp-rt serve --dev``: it creates a queue at each address that is used.
CREATING: dict[str, Any] = {"volatile": True, "auto_create": ("queue:*",)}


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].rstrip("/"))


@asynccontextmanager
async def broker(**options: Any) -> AsyncIterator[tuple[Broker, str]]:
    options = {"fronts": [Front()], "volatile": True, **options}
    async with Broker(**options) as made:
        (url,) = await made.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            yield made, url


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[tuple[Any, Any]]:
    """A channel of a new connection, and its consumer of replies."""
    async with (
        connect(url) as connection,
        connection.channel() as channel,
        channel.consume(REPLY_TO, no_ack=True) as replies,
    ):
        yield channel, replies


@asynccontextmanager
async def answering(url: str, **options: Any) -> AsyncIterator[Any]:
    """A channel of a new connection."""
    async with connect(url) as connection, connection.channel(**options) as channel:
        yield channel


async def in_thread(client: Callable[..., Any], *args: Any) -> Any:
    return await trio.to_thread.run_sync(client, *args, abandon_on_cancel=True)


def ask(url: str, requests: list[tuple[str, bytes, Any]], replies: int) -> list[tuple[Any, bytes]]:
    """Send *requests*, each an address, a body and properties, and return so many replies, in their order."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port_of(url)))
    try:
        channel = connection.channel()
        got: list[tuple[Any, bytes]] = []
        channel.basic_consume(
            REPLY_TO,
            lambda _channel, _method, properties, body: got.append((properties, body)),
            auto_ack=True,
        )
        for address, body, properties in requests:
            properties.reply_to = REPLY_TO
            channel.basic_publish("", address, body, properties)
        for _ in range(300):
            if len(got) >= replies:
                break
            connection.process_data_events(0.1)
        return got
    finally:
        connection.close()


async def asked(url: str, *requests: tuple[str, bytes, Any], replies: int) -> dict[str, Any]:
    """Return the replies to *requests* by their correlation-ids."""
    got = await in_thread(ask, url, list(requests), replies)
    assert len(got) == replies
    return {properties.correlation_id: (properties, body) for properties, body in got}


def no_queues(made: Broker) -> None:
    assert [each.name for each in made.nodes() if REPLY_TO in each.name] == []


# --- services of 1.0 ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, CREATING], ids=["declaring", "creating"])
async def test_pika_is_answered_by_rpcs(options: dict[str, Any]) -> None:
    async with broker(**options) as (made, url):

        @made.container.rpc("echo")
        async def echo(message: Message) -> Message:
            properties = message.properties
            assert str(properties.reply_to).startswith(f"{REPLY_TO}.")
            return Message(
                message.body,
                content_type=properties.content_type,
                subject="s",
                application_properties={"n": 1, "from": "echo"},
            )

        @made.container.rpc("fail")
        async def fail(body: bytes) -> bytes:
            raise AmqpError("no such item", condition="amqp:not-found")

        @made.container.rpc("items")
        async def items(body: bytes) -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number

        @made.container.rpc("structure")
        async def structure(body: bytes) -> dict[str, int]:
            return {"a": 1}

        large = b"x" * 1_000_000  # of more than one frame
        got = await asked(
            url,
            ("echo", b"ask", pika.BasicProperties(correlation_id="1", content_type="text/x")),
            ("echo", large, pika.BasicProperties(correlation_id="2")),
            # Without a correlation-id, that of the reply is the id of the request.
            ("echo", b"id", pika.BasicProperties(message_id="3")),
            (
                "echo",
                b"typed",
                pika.BasicProperties(
                    correlation_id="4", headers={"x-correlation-id-type": "ulong"}
                ),
            ),
            ("fail", b"", pika.BasicProperties(correlation_id="5")),
            ("structure", b"", pika.BasicProperties(correlation_id="6")),
            replies=6,
        )
        properties, body = got["1"]
        assert (body, properties.content_type) == (b"ask", "text/x")
        headers = properties.headers
        assert (headers["n"], headers["from"], headers["x-amqp10-subject"]) == (1, "echo", "s")
        assert got["2"][1] == large
        assert got["3"][1] == b"id"
        assert got["4"][0].headers["x-correlation-id-type"] == "ulong"
        properties, body = got["5"]
        assert body == b""
        assert properties.headers["statusCode"] == 404
        assert properties.headers["statusDescription"] == "no such item"
        assert properties.headers["errorCondition"] == "amqp:not-found"
        assert (got["6"][0].content_type, got["6"][1]) == ("application/json", b'{"a":1}')

        stream = await in_thread(ask, url, [("items", b"", pika.BasicProperties())], 4)
        assert [body for _, body in stream] == [b"0", b"1", b"2", b""]
        no_queues(made)
        assert not made.container.replies.dynamic


@pytest.mark.parametrize("options", [{}, CREATING], ids=["declaring", "creating"])
@pytest.mark.parametrize("by", ["link", "to", "serve", "settled"])
async def test_pika_is_answered_by_a_consumer_of_a_queue(by: str, options: dict[str, Any]) -> None:
    """A service of 1.0 answers on a link of its own for each caller, or on one for all; or it serves an rpc."""

    async def answer(peer: Connection) -> None:
        async with peer.receiver("requests") as inbox:
            delivery = await inbox.receive()
            asked = delivery.message.properties
            reply = Message(b"answer", correlation_id=asked.correlation_id)
            if by == "link":
                async with peer.sender(asked.reply_to) as out:
                    await out.send(reply)
            elif by == "settled":
                async with peer.sender(asked.reply_to, settled=True) as out:
                    await out.send(reply)
            else:
                async with peer.sender() as out:
                    await out.send(reply.replace(to=asked.reply_to))
            delivery.accept()

    async with broker(**options) as (made, url), made.connect(url) as own:
        async with connect(url) as declaring, declaring.channel() as channel:
            await channel.declare_queue("requests")
        app = Container("service")
        app.rpc("requests")(_answer)
        async with trio.open_nursery() as nursery:
            if by == "serve":
                nursery.start_soon(_serve, app, url)
            else:
                nursery.start_soon(answer, own)
            request = ("requests", b"ask", pika.BasicProperties(correlation_id="1"))
            got = await asked(url, request, replies=1)
            assert got["1"][1] == b"answer"
            nursery.cancel_scope.cancel()
        no_queues(made)


async def direct_address(channel: Any) -> str:
    """Return the address of the consumer of replies of *channel*, as a request tells it to its service."""
    queue = await channel.declare_queue("", exclusive=True)
    await channel.publish(b"", key=queue.name, properties=BasicProperties(reply_to=REPLY_TO))
    request = await channel.get(queue.name, no_ack=True)
    return str(request.properties.reply_to)


async def _answer(body: bytes) -> bytes:
    return b"answer"


async def _serve(app: Container, url: str) -> None:
    async with app, app.connect(url) as peer:
        await peer.serve()
        await trio.sleep_forever()


@pytest.mark.parametrize("options", [{}, CREATING], ids=["declaring", "creating"])
async def test_a_caller_that_has_gone_costs_the_handler_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with broker(**options) as (made, url):
        gone = trio.Event()
        ends: list[str] = []
        begun: list[str] = []

        @made.container.rpc("late")
        async def late(body: bytes) -> bytes:
            begun.append("begun")
            await gone.wait()
            ends.append("done")
            return b"too late"

        async with (
            connect(url) as asking,
            connect(url) as staying,
            staying.channel() as other,
            staying.channel(confirms=False) as requests,
        ):
            async with asking.channel() as replies, replies.consume(REPLY_TO, no_ack=True):
                address = await direct_address(replies)
                # The request comes on another connection, whose end would cancel the handler.
                request = BasicProperties(reply_to=address)
                await requests.publish(b"x", key="late", properties=request)
                await until_holds(lambda: len(begun) == 1)
            await until_holds(lambda: address not in made.container.replies.dynamic)
            # One more request has the address of the caller that has gone.
            await requests.publish(b"x", key="late", properties=request)
            await until_holds(lambda: len(begun) == 2)
            gone.set()
            await until_holds(lambda: len(ends) == 2)
            # Nothing was created, neither by a reply nor by what others do with the address.
            await other.publish(b"x", key=address)
            with pytest.raises(DeliveryNotAccepted):
                await other.publish(b"x", key=address, mandatory=True)
        async with made.connect(url) as peer:
            for attach in (peer.sender, peer.receiver):
                with pytest.raises(LinkRefused, match="not-found"):
                    async with attach(address) as link:
                        await link.wait_attached()
            async with peer.sender() as out:
                with pytest.raises(DeliveryRejected, match="not-found"):
                    await out.send(Message("x", to=address))
        no_queues(made)
    assert "handler failed" not in caplog.text


async def test_a_service_asks_whether_its_caller_is_still_there() -> None:
    """The passive declaration of a reply address, by which services avoid work for callers that have gone."""

    def service(url: str, address: str) -> bool:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port_of(url)))
        try:
            channel = connection.channel()
            try:
                found = channel.queue_declare(address, passive=True).method
            except exceptions.ChannelClosedByBroker as closed:
                if closed.reply_code != 404:
                    raise
                return False
            assert (found.queue, found.consumer_count) == (address, 1)
            # The channel goes on.
            channel.queue_declare(REPLY_TO, passive=True)
            return True
        finally:
            connection.close()

    async with broker(**CREATING) as (made, url), connect(url) as asking:
        async with asking.channel() as channel, channel.consume(REPLY_TO, no_ack=True):
            address = await direct_address(channel)
            assert await in_thread(service, url, address)
            assert list(made.container.replies.dynamic) == [address]
            assert not made.container.replies.dynamic[address].forwards
        await until_holds(lambda: not made.container.replies.dynamic)
        assert not await in_thread(service, url, address)
        assert not await in_thread(service, url, f"{REPLY_TO}.guessed")
        no_queues(made)


@pytest.mark.parametrize("ends", ["consumer", "channel", "connection"])
async def test_the_address_ends_with_the_consumer(ends: str) -> None:
    async with broker() as (made, url), connect(url) as asking, asking.channel() as channel:
        async with channel.consume(REPLY_TO, no_ack=True) as replies:
            first = await direct_address(channel)
            if ends == "connection":
                await asking._close()
                await until_holds(lambda: not made.container.replies.dynamic)
                return
            if ends == "channel":
                with pytest.raises(AmqpError, match="has no acknowledgements"):
                    async with channel.consume(REPLY_TO):
                        pass
                await until_holds(lambda: not made.container.replies.dynamic)
                return
        # The next consumer of the channel has another address.
        async with channel.consume(REPLY_TO, no_ack=True) as replies:
            second = await direct_address(channel)
            assert first != second
            assert list(made.container.replies.dynamic) == [second]
            await channel.publish(b"lost", key=first)
            await channel.publish(b"x", key=second, mandatory=True)
            assert (await replies.__anext__()).body == b"x"


async def test_replies_of_publishers_with_confirms_and_transactions() -> None:
    async with (
        broker() as (_, url),
        calling(url) as (channel, replies),
        answering(url) as confirming,
        answering(url, confirms=False) as transacting,
    ):
        address = await direct_address(channel)
        properties = BasicProperties(correlation_id="1", type="t", headers={"n": [1]})
        await confirming.publish(b"1", key=address, properties=properties, mandatory=True)
        found = await replies.__anext__()
        assert (found.body, found.routing_key) == (b"1", address)
        assert (found.properties.correlation_id, found.properties.type) == ("1", "t")
        assert found.properties.headers == {"n": [1]}
        # A reply belongs to no transaction: there is no queue that could give it back.
        await transacting.select()
        await transacting.publish(b"2", key=address)
        await transacting.rollback()
        await transacting.publish(b"3", key=address)
        await transacting.commit()
        assert [(await replies.__anext__()).body for _ in range(2)] == [b"2", b"3"]


async def test_rights_at_reply_addresses() -> None:
    """A consumer of replies needs a right anywhere, like a dynamic source of 1.0; those that answer, no other."""
    access = Access(
        [
            Rule("requests", Rights.SEND, users=("asking",)),
            Rule("requests", Rights.LISTEN, users=("answering",)),
            Rule("*", Rights.MANAGE, users=("root",)),
        ]
    )
    users = dict.fromkeys(("asking", "answering", "root", "none"), "p")
    options: dict[str, Any] = {"access": access, "users": users, "plain_in_clear": True, **CREATING}
    async with broker(**options) as (made, url):

        def login(user: str) -> str:
            return url.replace("//", f"//{user}:p@")

        async with answering(login("root")) as channel:
            await channel.declare_queue("requests")
        with pytest.raises(AmqpError, match="unauthorized-access"):
            async with calling(login("none")):
                pass
        async with answering(login("answering")) as service:
            async with calling(login("asking")) as (channel, replies):
                await channel.publish(
                    b"", key="requests", properties=BasicProperties(reply_to=REPLY_TO)
                )
                request = await service.get("requests", no_ack=True)
                assert request is not None
                address = str(request.properties.reply_to)
                await service.publish(b"answer", key=address, mandatory=True)
                assert (await replies.__anext__()).body == b"answer"
                async with made.connect(login("answering")) as peer, peer.sender(address) as out:
                    await out.send(Message(b"of 1.0"))
                assert (await replies.__anext__()).body == b"of 1.0"
            # A reply that is too late does not cost the service its channel.
            await until_holds(lambda: not made.container.replies.dynamic)
            await service.publish(b"late", key=address)
            assert await service.get("requests", no_ack=True) is None
        no_queues(made)


async def test_the_application_is_not_asked_about_reply_addresses() -> None:
    asked: list[str] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        asked.append(address)
        return not address.startswith(REPLY_TO)

    async with broker(authorize=authorize) as (made, url):

        @made.container.rpc("echo")
        async def echo(body: bytes) -> bytes:
            return body

        got = await asked_once(url)
        assert got == b"ask"
        async with calling(url) as (channel, replies), answering(url) as service:
            address = await direct_address(channel)
            await service.publish(b"x", key=address, mandatory=True)
            assert (await replies.__anext__()).body == b"x"
    assert "echo" in asked
    assert not [each for each in asked if each.startswith(REPLY_TO)]


async def asked_once(url: str) -> bytes:
    """Return the reply of the rpc ``echo`` to a request of pika."""
    got = await asked(url, ("echo", b"ask", pika.BasicProperties(correlation_id="1")), replies=1)
    body: bytes = got["1"][1]
    return body


async def test_a_node_for_all_addresses_gets_no_replies() -> None:
    async with broker() as (made, url):
        taken: list[bytes] = []

        @made.container.node("{name:rest}")
        def take(body: bytes, name: str) -> None:
            taken.append(body)

        @made.container.rpc("echo")
        async def echo(body: bytes) -> bytes:
            return body

        assert await asked_once(url) == b"ask"
        async with connect(url) as asking, asking.channel() as channel, made.connect(url) as peer:
            async with channel.consume(REPLY_TO, no_ack=True) as replies:
                await channel.publish(
                    b"", key="echo", properties=BasicProperties(reply_to=REPLY_TO)
                )
                address = (await replies.__anext__()).routing_key
                await channel.publish(b"1", key=address)
                async with peer.sender(address) as out, peer.sender() as relay:
                    await out.send(Message(b"2"))
                    await relay.send(Message(b"3", to=address))
                assert [(await replies.__anext__()).body for _ in range(3)] == [b"1", b"2", b"3"]
            with pytest.raises(DeliveryNotAccepted):
                await channel.publish(b"4", key=address, mandatory=True)
            async with peer.sender() as relay:
                with pytest.raises(DeliveryRejected, match="not-found"):
                    await relay.send(Message(b"5", to=address))
        assert taken == []


@pytest.mark.slow
async def test_a_stream_waits_for_a_caller_that_does_not_read() -> None:
    """A streamed reply goes on as its caller reads; what the caller has not read is bounded meanwhile."""
    async with broker(limits=Limits(output_max=100_000)) as (made, url):
        sent = 0

        @made.container.rpc("stream")
        async def stream(body: bytes) -> AsyncIterator[bytes]:
            nonlocal sent
            for number in range(400):
                sent += 1
                yield number.to_bytes(2, "big") * 50_000

        def client(port: int) -> list[int]:
            connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
            try:
                channel = connection.channel()
                got: list[int] = []
                channel.basic_consume(
                    REPLY_TO,
                    lambda _channel, _method, _properties, body: got.append(
                        int.from_bytes(body[:2], "big")
                    ),
                    auto_ack=True,
                )
                channel.basic_publish(
                    "", "stream", b"", pika.BasicProperties(reply_to=REPLY_TO, correlation_id="1")
                )
                # The buffers of the system hold some of 40 MB.
                before, now = -1, 0
                while before != now:
                    time.sleep(0.3)
                    before, now = now, sent
                assert 0 < now < 400
                for _ in range(5_000):
                    if len(got) > 400:
                        break
                    connection.process_data_events(0.1)
                return got
            finally:
                connection.close()

        got = await in_thread(client, port_of(url))
        assert got == [*range(400), 0]


# --- a mesh, and other protocols -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"volatile": True}, CREATING], ids=["declaring", "creating"])
async def test_replies_come_over_a_mesh(options: dict[str, Any]) -> None:
    """The request goes over two members to the rpc; a service of 0-9-1 answers at another member, too."""
    box: dict[str, Any] = {"fronts": [Amqp10(), Front()]}
    async with line("A", "B", "C", box_options=box, broker=options) as made:
        made.boxes["C"].rpc("echo")(_echo)
        for member in "AB":
            await made.meshes[member].reachable("echo")
        with trio.fail_after(30):
            assert await asked_once(made.urls["A"]) == b"ask"
            async with answering(made.urls["C"]) as service:
                async with calling(made.urls["A"]) as (channel, replies):
                    address = await direct_address(channel)
                    await service.declare_queue(address, passive=True)
                    await service.publish(b"far", key=address, mandatory=True)
                    assert (await replies.__anext__()).body == b"far"
                await until_holds(lambda: not made.boxes["A"].replies.dynamic)
                with pytest.raises(DeliveryNotAccepted):
                    await service.publish(b"late", key=address, mandatory=True)
                with pytest.raises(AmqpError, match="not-found"):
                    await service.declare_queue(address, passive=True)
        for each in made.brokers.values():
            no_queues(each)


async def _echo(body: bytes) -> bytes:
    return body


async def test_services_and_callers_of_0_10() -> None:
    front = Front010()
    async with (
        broker(fronts=[Front(), front]) as (made, url),
        Served(made, front, url).client() as client,
        calling(url) as (channel, replies),
    ):
        session = await client.session(b"s")
        await channel.declare_queue("requests")
        await session.subscribe("requests", "in")
        properties = BasicProperties(reply_to=REPLY_TO, correlation_id="1")
        await channel.publish(b"ask", key="requests", properties=properties)
        request = (await session.message()).headers[1]
        back = request.reply_to
        assert (back.exchange, request.correlation_id) == ("", b"1")
        answer = {"correlation_id": request.correlation_id}
        session.transfer("", b"from 0-10", key=back.routing_key, properties=answer)
        found = await replies.__anext__()
        assert (found.body, found.properties.correlation_id) == (b"from 0-10", "1")

        # The other way, a service of 0-9-1 answers to a queue of the caller.
        await session.call("queue.declare", queue="back", exclusive=True)
        await session.subscribe("back", "replies")
        await channel.declare_queue("others")
        asking = {
            "correlation_id": b"2",
            "reply_to": Struct("reply-to", routing_key="back"),
        }
        session.transfer("", b"ask", key="others", properties=asking)
        await session.sync()
        got = (await channel.get("others", no_ack=True)).properties
        answered = BasicProperties(correlation_id=got.correlation_id)
        await channel.publish(b"from 0-9-1", key=got.reply_to, properties=answered)
        reply = await session.message()
        assert (reply.body, reply.headers[1].correlation_id) == (b"from 0-9-1", b"2")
