"""What a connection leaves behind: nothing that waits for the collector of cycles.

A connection has buffers, and a broker may go on for long before Python looks for cycles in what is old.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front, connect
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.frames import FRAME_MIN_SIZE, content_frames
from references import reference
from worlds091 import Client, World

from amqp_rt import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.errors import AmqpError

pytestmark = pytest.mark.usefixtures("no_collector")


def publishes(client: Client) -> None:
    """Publish to a queue, by way of an exchange, and to where no queue is."""
    client.say(1, m.ExchangeDeclare(exchange="e", type="topic"))
    client.say(1, m.QueueBind(queue="q", exchange="e", routing_key="#"))
    client.publish(1, "q", b"x" * 1000)
    client.publish(1, "any", b"x" * 1000, exchange="e")
    client.publish(1, "nowhere", b"x", mandatory=True)


def publishes_half(client: Client) -> None:
    """Leave a message incomplete."""
    method, properties = m.BasicPublish(routing_key="q"), m.BasicProperties()
    frames = [*content_frames(1, method, properties, b"x" * 10_000, FRAME_MIN_SIZE)]
    client.feed(b"".join(frames[:-1]))


def confirms(client: Client) -> None:
    client.say(1, m.ConfirmSelect())
    publishes(client)


def consumes(client: Client) -> None:
    client.publish(1, "q", b"x")
    client.say(1, m.BasicQos(prefetch_count=5), m.BasicConsume(queue="q", consumer_tag="c"))
    client.say(1, m.BasicAck(delivery_tag=1))


def leaves_unacknowledged(client: Client) -> None:
    for _ in range(3):
        client.publish(1, "q", b"x" * 1000)
    client.say(1, m.BasicConsume(queue="q", consumer_tag="c"))
    client.say(1, m.BasicCancel(consumer_tag="c"))


def gets(client: Client) -> None:
    client.publish(1, "q", b"x")
    client.say(1, m.BasicGet(queue="q"), m.BasicGet(queue="q"))


def owns(client: Client) -> None:
    """Declare what goes with the connection, and consume from it."""
    client.say(1, m.QueueDeclare(queue="mine", exclusive=True, arguments={"x-expires": 1000}))
    client.say(1, m.BasicConsume(queue="mine", consumer_tag="c", no_ack=True))
    client.publish(1, "mine", b"x")


def asks(client: Client) -> None:
    """Wait for direct replies."""
    client.say(1, m.BasicConsume(queue="amq.rabbitmq.reply-to", no_ack=True))
    client.publish(1, "q", properties=m.BasicProperties(reply_to="amq.rabbitmq.reply-to"))


def transacts(client: Client) -> None:
    client.publish(1, "q", b"x")
    client.publish(1, "q", b"x")
    client.say(1, m.TxSelect(), m.BasicConsume(queue="q", consumer_tag="c"))
    client.say(1, m.BasicAck(delivery_tag=1))
    client.publish(1, "q", b"x")
    client.say(1, m.TxCommit())
    client.say(1, m.BasicAck(delivery_tag=2))
    client.publish(1, "q", b"x")


def is_refused(client: Client) -> None:
    """End a channel by a fault, and leave its close unanswered."""
    client.say(1, m.BasicConsume(queue="nowhere"))


def waits_for_rights(client: Client) -> None:
    """Leave requests for links without an answer."""
    client.holds = []
    client.say(1, m.BasicConsume(queue="q"))
    client.publish(1, "q", b"x")
    client.holds = None


USES = [
    *(publishes, publishes_half, confirms, consumes, leaves_unacknowledged),
    *(gets, owns, asks, transacts, is_refused, waits_for_rights),
]


def closes(client: Client) -> None:
    client.say(0, m.ConnectionClose(reply_code=200, reply_text="", class_id=0, method_id=0))


def closes_the_channel(client: Client) -> None:
    client.say(1, m.ChannelClose(reply_code=200, reply_text="", class_id=0, method_id=0))
    closes(client)


def is_lost(client: Client) -> None:
    client.handle(client.engine.receive_eof(client.world.now))


def falls_silent(client: Client) -> None:
    client.world.now += 100
    client.tick()


def is_closed(client: Client) -> None:
    client.engine.close()
    client.say(0, m.ConnectionCloseOk())


ENDS = [closes, closes_the_channel, is_lost, falls_silent, is_closed]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("use", USES, ids=lambda each: each.__name__)
def test_nothing_of_a_connection_waits_for_the_collector(
    use: Callable[[Client], None], end: Callable[[Client], None]
) -> None:
    world = World()
    world.host.space().declare(Queue("q"))
    client = world.connect()
    use(client)
    engine: Any = client.engine
    refs: dict[str, Callable[[], Any]] = {
        "engine": reference(engine),
        "topology": reference(engine.topology),
    }
    for channel in engine.sessions.values():
        refs[f"channel {channel.number}"] = reference(channel)
        refs[f"session {channel.number}"] = reference(channel.session)
        for link in channel.links.values():
            refs[f"link {link.name}"] = reference(link)
    channel = link = None
    end(client)
    assert engine.finished
    del engine, client
    assert [name for name, each in refs.items() if each() is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "cut", "by the broker"])
async def test_nothing_of_a_connection_over_tcp_waits_for_the_collector(end: str) -> None:
    async with Broker(fronts=[Front()], volatile=True, users={"ada": "pw"}) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        refs: dict[str, Callable[[], Any]] = {}

        async def client(*, task_status: trio.TaskStatus[None]) -> None:
            where = url.replace("://", "://ada:pw@")
            async with connect(where) as peer, peer.channel() as channel:
                refs["client"] = reference(peer._engine)
                await channel.declare_queue("q", durable=True)
                await channel.publish(b"x" * 1000, key="q")
                async with channel.consume("q") as deliveries:
                    await deliveries.__anext__()
                    (connection,) = broker.container.connections
                    refs["connection"] = reference(connection)
                    refs["engine"] = reference(connection.engine)
                    if end == "by the broker":
                        connection.close()
                    del connection, deliveries
                    task_status.started()
                    if end != "close":
                        await trio.sleep_forever() if end == "cut" else await peer._over.wait()

        async with trio.open_nursery() as nursery:
            with suppress(AmqpError):
                await nursery.start(client)
            if end == "cut":
                nursery.cancel_scope.cancel()
        with trio.move_on_after(5):
            while any(each() is not None for each in refs.values()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert len(refs) == 3
        assert [name for name, each in refs.items() if each() is not None] == []
