"""The client's API, against our broker and against RabbitMQ, at real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_amqp091 import BasicProperties, External, Front, connect
from certificates import certificates
from foreign_brokers import foreign_broker

from amqp_rt import Broker, ClientTls, ServerTls
from amqp_rt.broker.nodes import Queue
from amqp_rt.errors import AmqpError, AuthenticationFailed, ConnectFailed

pytestmark = pytest.mark.req("N20")


@pytest.fixture(scope="module")
def rabbitmq() -> Any:
    with foreign_broker("rabbitmq") as running:
        yield running


@pytest.fixture(params=["ours", pytest.param("rabbitmq", marks=pytest.mark.foreign)])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Where a broker is that speaks 0-9-1."""
    if request.param == "rabbitmq":
        yield f"amqp://127.0.0.1:{request.getfixturevalue('rabbitmq').port}"
        return
    async with Broker(fronts=[Front()], volatile=True) as broker:
        (found,) = await broker.listen("amqp://127.0.0.1:0")
        yield found


@pytest.mark.smoke
async def test_publish_consume_and_get(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url, name="mine") as connection, connection.channel() as channel:
            queue = await channel.declare_queue("orders", durable=True)
            assert (queue.name, queue.messages, queue.consumers) == ("orders", 0, 0)
            for number in range(3):
                await channel.publish(
                    b"%d" % number * 50_000 * number,
                    key="orders",
                    properties=BasicProperties(message_id=str(number), headers={"n": number}),
                )
            async with channel.consume("orders") as deliveries:
                found = [await anext(deliveries) for _ in range(3)]
            assert [each.properties.message_id for each in found] == ["0", "1", "2"]
            assert [len(each.body) for each in found] == [0, 50_000, 100_000]
            found[0].ack()
            found[2].nack()
            await channel.qos(1)
            again = await channel.get("orders")
            assert again is not None
            assert (again.redelivered, again.routing_key) == (True, "orders")
            found[1].ack()
            again.nack(requeue=False)
            assert await channel.get("orders") is None
            assert await channel.delete_queue("orders") == 0


async def test_exchanges_and_what_goes_nowhere(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url) as connection, connection.channel() as channel:
            await channel.declare_exchange("news", "topic", auto_delete=True)
            await channel.declare_exchange("all", "fanout", auto_delete=True)
            await channel.bind_exchange("all", "news", "eu.#")
            queue = await channel.declare_queue(exclusive=True)
            await channel.bind_queue(queue.name, "all")
            await channel.publish(b"1", exchange="news", key="eu.berlin", mandatory=True)
            for body in (b"2", b"3"):
                with pytest.raises(AmqpError, match="nothing is bound"):
                    await channel.publish(body, exchange="news", key="us", mandatory=True)
            await channel.publish(b"4", exchange="news", key="us")
            assert await channel.purge_queue(queue.name) == 1
            await channel.unbind_queue(queue.name, "all")
            await channel.delete_exchange("news")


async def test_a_mistake_costs_its_channel_only(url: str) -> None:
    with trio.fail_after(30):
        async with (
            connect(url) as connection,
            connection.channel() as channel,
            connection.channel() as other,
        ):
            queue = await other.declare_queue(exclusive=True)
            async with channel.consume(queue.name) as deliveries:
                with pytest.raises(AmqpError, match="nowhere") as caught:
                    await channel.declare_queue("nowhere", passive=True)
                assert caught.value.condition == "amqp:not-found"
                with pytest.raises(AmqpError, match="nowhere"):
                    await anext(deliveries)
            with pytest.raises(AmqpError, match="nowhere"):
                await channel.publish(b"x", key=queue.name)
            await other.publish(b"x", key=queue.name)
            assert await other.purge_queue(queue.name) == 1


async def test_many_publish_at_once_and_one_consumes(url: str) -> None:
    found: list[int] = []

    async def publish(channel: Any, start: int) -> None:
        for number in range(start, start + 50):
            await channel.publish(b"%d" % number, key="many")

    with trio.fail_after(30):
        async with connect(url) as connection, connection.channel(prefetch=10) as channel:
            await channel.declare_queue("many", auto_delete=True)
            async with trio.open_nursery() as nursery, channel.consume("many") as deliveries:
                for start in range(0, 500, 50):
                    nursery.start_soon(publish, channel, start)
                async for delivery in deliveries:
                    found.append(int(delivery.body))
                    delivery.ack()
                    if len(found) == 500:
                        break
    assert sorted(found) == list(range(500))
    for start in range(0, 500, 50):
        mine = [each for each in found if start <= each < start + 50]
        assert mine == sorted(mine)


@pytest.mark.req("N14", "R12")
async def test_transactions(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url) as connection, connection.channel() as look:
            queue = await look.declare_queue(exclusive=True)
            async with connection.channel(confirms=False) as channel:
                await channel.select()
                await channel.publish(b"no", key=queue.name)
                await channel.rollback()
                await channel.publish(b"yes", key=queue.name)
                assert (await look.declare_queue(queue.name, passive=True)).messages == 0
                await channel.commit()
                delivery = await channel.get(queue.name)
                assert delivery is not None
                assert delivery.body == b"yes"
                delivery.ack()
                await channel.rollback()
            # The acknowledgement was rolled back, and its channel has closed.
            again = None
            while again is None:
                again = await look.get(queue.name)
            assert (again.body, again.redelivered) == (b"yes", True)


async def test_a_consumer_ends_with_its_queue(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url) as connection, connection.channel() as channel:
            queue = await channel.declare_queue(auto_delete=True)
            await channel.publish(b"x", key=queue.name)
            async with channel.consume(queue.name) as deliveries:
                found = []
                async for delivery in deliveries:
                    found.append(delivery.body)
                    await channel.delete_queue(queue.name)
            assert found == [b"x"]


async def test_a_client_that_is_cancelled_leaves_its_channel_in_order(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url) as connection, connection.channel() as channel:
            queue = await channel.declare_queue(exclusive=True)
            with trio.CancelScope() as scope:
                scope.cancel()
                await channel.purge_queue(queue.name)
            assert scope.cancelled_caught
            await channel.publish(b"x", key=queue.name)
            assert (await channel.declare_queue(queue.name, passive=True)).messages == 1


async def test_who_is_not_let_in(url: str) -> None:
    with pytest.raises(ConnectFailed, match="nowhere"), trio.fail_after(30):
        async with connect(f"{url}/nowhere"):
            pass


async def test_who_waits_while_the_channel_is_closed_hears_so() -> None:
    async with Broker(fronts=[Front()], volatile=True) as broker:
        await broker.declare(Queue("full", length_max=1))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        heard: list[AmqpError] = []

        async def wait(consumer: Any) -> None:
            try:
                await anext(consumer)
            except (AmqpError, StopAsyncIteration) as error:
                heard.append(error)  # type: ignore[arg-type]

        with trio.fail_after(30):
            async with connect(url) as connection, trio.open_nursery() as nursery:
                async with (
                    connection.channel() as channel,
                    channel.consume("full") as consumer,
                ):
                    nursery.start_soon(wait, consumer)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    broker.host.space().delete("full")
                with pytest.raises(AmqpError, match="closed"):
                    await channel.publish(b"x", key="full")
                with pytest.raises(AmqpError, match="closed"):
                    await channel.get("full")
        assert isinstance(heard[0], StopAsyncIteration)


async def test_there_is_nobody() -> None:
    async with Broker(volatile=True) as broker:
        (only_1_0,) = await broker.listen("amqp://127.0.0.1:0")
        with pytest.raises(ConnectFailed, match="does not speak"):
            async with connect(only_1_0):
                pass
    with pytest.raises(ConnectFailed, match="cannot connect"):
        async with connect(only_1_0):
            pass
    with pytest.raises(ConnectFailed, match="no ws"):
        async with connect("ws://127.0.0.1"):
            pass


class Body(Exception):
    """What the body of a block raises."""


async def test_what_a_body_raises_comes_out_as_it_is(url: str) -> None:
    with pytest.raises(Body), trio.fail_after(30):
        async with connect(url) as connection, connection.channel():
            raise Body


@pytest.mark.req("N9")
async def test_whom_a_certificate_names() -> None:
    known = certificates()
    users = []

    async def note(peer: Any, address: str, role: str) -> bool:
        users.append((peer.user, peer.mechanism))
        return True

    async with Broker(
        fronts=[Front()],
        tls=ServerTls(known.server, client_ca=known.ca),
        sasl=["EXTERNAL"],
        authorize=note,
        volatile=True,
    ) as broker:
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        shown = ClientTls(known.ca, certificate=known.client)
        with trio.fail_after(30):
            async with (
                connect(url, tls=shown, mechanisms=(External(),)) as connection,
                connection.channel() as channel,
            ):
                queue = await channel.declare_queue("q")
                await channel.publish(b"x", key=queue.name)
            with pytest.raises(AmqpError):
                async with connect(url, tls=shown):
                    pass
    assert set(users) == {("ada", "EXTERNAL")}


@pytest.mark.slow
@pytest.mark.req("N9")
async def test_a_new_secret_is_judged_by_who_judged_the_first() -> None:
    """``connection.update-secret``: tokens that expire are renewed on the connection."""
    judged: list[tuple[str, str]] = []
    valid = {"token-1", "token-2"}

    async def verify(user: str, password: str, _peer: Any) -> Any:
        judged.append((user, password))
        return {"token": password} if password in valid else None

    async with Broker(fronts=[Front()], volatile=True, users=verify) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            async with (
                connect(url.replace("//", "//ada:token-1@")) as connection,
                connection.channel() as channel,
            ):
                queue = await channel.declare_queue(exclusive=True)
                await connection.update_secret("token-2", "it expires")
                assert judged == [("ada", "token-1"), ("ada", "token-2")]
                await channel.publish(b"x", key=queue.name)
                with pytest.raises(AmqpError, match="not accepted"):
                    await connection.update_secret("token-3")
                with pytest.raises(AmqpError, match="not accepted"):
                    await channel.publish(b"x", key=queue.name)
            with pytest.raises(AuthenticationFailed):
                async with connect(url.replace("//", "//ada:token-3@")):
                    pass
