"""pika, unmodified, on real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front

from amqp_rt import Broker, Container

pika = pytest.importorskip("pika")
from pika import exceptions  # noqa: E402 - only if it is there


@contextmanager
def connected(port: int, **options: Any) -> Iterator[Any]:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, **options))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


Step = Callable[[Any], None]


def on_channel(step: Step) -> Callable[[int], None]:
    """*step* with a new channel of a new connection."""

    def run(port: int) -> None:
        with connected(port) as connection:
            step(connection.channel())

    return run


def wait_for(check: Callable[[], Any]) -> Any:
    for _ in range(500):
        found = check()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def get(channel: Any, queue: str, *, auto_ack: bool = True) -> bytes | None:
    body: bytes | None = channel.basic_get(queue, auto_ack=auto_ack)[2]
    return body


def drain(channel: Any, queue: str) -> list[bytes]:
    found = []
    while (body := get(channel, queue)) is not None:
        found.append(body)
    return found


@pytest.mark.req("N13")
async def test_publish_get_consume_and_acknowledge(served: Any) -> None:
    def client(channel: Any) -> None:
        assert channel.queue_declare("q").method.message_count == 0
        channel.basic_publish("", "q", b"first", pika.BasicProperties(message_id="1"))
        method, properties, body = channel.basic_get("q")
        assert (body, properties.message_id, method.redelivered) == (b"first", "1", False)
        assert (method.exchange, method.routing_key, method.delivery_tag) == ("", "q", 1)
        assert channel.basic_get("q") == (None, None, None)
        channel.basic_ack(1)
        for number in range(10):
            channel.basic_publish("", "q", b"%d" % number)
        channel.basic_qos(prefetch_count=3)
        got: list[bytes] = []

        def on_message(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            got.append(body)
            channel.basic_ack(method.delivery_tag)
            if len(got) == 10:
                channel.stop_consuming()

        channel.basic_consume("q", on_message)
        channel.start_consuming()
        assert got == [b"%d" % number for number in range(10)]

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N5", "N13")
async def test_properties_come_back_as_they_were(served: Any) -> None:
    said = {
        "content_type": "text/plain",
        "content_encoding": "utf-8",
        "headers": {"n": 1, "t": "text", "yes": True, "x-list": [1, "two"], "none": None},
        "delivery_mode": 2,
        "priority": 4,
        "correlation_id": "c",
        "reply_to": "elsewhere",
        "expiration": "60000",
        "message_id": "m",
        "timestamp": 1_700_000_000,
        "type": "order",
        "app_id": "shop",
    }

    def client(channel: Any) -> None:
        channel.queue_declare("q")
        channel.basic_publish("", "q", b"x" * 300_000, pika.BasicProperties(**said))
        channel.basic_publish("", "q", b"")
        _, properties, body = channel.basic_get("q", auto_ack=True)
        assert {name: getattr(properties, name) for name in said} == said
        assert body == b"x" * 300_000
        _, properties, body = channel.basic_get("q", auto_ack=True)
        assert (body, properties.headers, properties.priority) == (b"", None, None)

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N11", "N12")
async def test_exchanges_of_every_type_lead_to_queues(served: Any) -> None:
    def client(channel: Any) -> None:
        for name in ("a", "b"):
            channel.queue_declare(name)
        channel.exchange_declare("news", "topic")
        channel.queue_bind("a", "news", "de.#")
        channel.queue_bind("b", "news", "*.sport")
        channel.basic_publish("news", "de.sport", b"both")
        channel.basic_publish("news", "de.a.b", b"a")
        channel.basic_publish("news", "fr.sport", b"b")
        channel.basic_publish("news", "fr", b"none")
        assert drain(channel, "a") == [b"both", b"a"]
        assert drain(channel, "b") == [b"both", b"b"]
        channel.queue_unbind("a", "news", "de.#")
        channel.basic_publish("news", "de.sport", b"again")
        assert (drain(channel, "a"), drain(channel, "b")) == ([], [b"again"])
        channel.exchange_declare("all", "fanout")
        channel.exchange_bind("news", "all")
        channel.queue_bind("a", "all")
        channel.basic_publish("all", "de.sport", b"on")
        assert (drain(channel, "a"), drain(channel, "b")) == ([b"on"], [b"on"])
        channel.queue_bind(
            "a", "amq.headers", arguments={"x-match": "any", "colour": "red", "size": 3}
        )
        for headers in ({"colour": "red"}, {"size": 3}, {"size": 4}):
            channel.basic_publish("amq.headers", "", b"h", pika.BasicProperties(headers=headers))
        assert drain(channel, "a") == [b"h", b"h"]
        channel.exchange_declare("news", passive=True)
        channel.exchange_delete("news")
        with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
            channel.exchange_declare("news", passive=True)
        assert caught.value.reply_code == 404

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N11")
async def test_what_no_binding_wants_goes_to_the_alternate_exchange(served: Any) -> None:
    def client(channel: Any) -> None:
        channel.queue_declare("rest")
        channel.exchange_declare("other", "fanout")
        channel.queue_bind("rest", "other")
        channel.exchange_declare("main", "direct", arguments={"alternate-exchange": "other"})
        channel.basic_publish("main", "nobody", b"x")
        assert drain(channel, "rest") == [b"x"]

    await served.run(on_channel(client), served.port)


def fails(channel: Any, code: int, step: Callable[[], Any]) -> None:
    with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
        step()
    assert caught.value.reply_code == code, caught.value.reply_text


#: Mistakes of a client on a channel, and their reply codes.
WRONG: list[tuple[int, Callable[[Any], Any]]] = [
    (404, lambda c: c.queue_declare("nowhere", passive=True)),
    (404, lambda c: c.queue_bind("nowhere", "amq.direct", "k")),
    (404, lambda c: c.queue_bind("q", "nowhere", "k")),
    (404, lambda c: c.basic_get("nowhere")),
    (404, lambda c: c.basic_consume("nowhere", print)),
    (404, lambda c: c.queue_purge("nowhere")),
    (404, lambda c: c.exchange_bind("nowhere", "amq.direct")),
    (403, lambda c: c.exchange_declare("", "direct")),
    (403, lambda c: c.exchange_delete("")),
    (403, lambda c: c.exchange_delete("amq.topic")),
    (403, lambda c: c.exchange_declare("amq.mine", "direct")),
    (403, lambda c: c.queue_declare("amq.mine")),
    (403, lambda c: c.queue_bind("q", "", "k")),
    (406, lambda c: c.queue_declare("q", durable=True)),
    (406, lambda c: c.queue_declare("q", arguments={"x-message-ttl": 1})),
    (406, lambda c: c.queue_declare("new", arguments={"x-message-ttl": "soon"})),
    (406, lambda c: c.queue_declare("new", arguments={"x-queue-type": "odd"})),
    (406, lambda c: c.exchange_declare("amq.topic", "direct")),
    (406, lambda c: c.queue_delete("full", if_empty=True)),
    (406, lambda c: c.tx_commit()),
]


@pytest.mark.req("N7", "N12")
@pytest.mark.parametrize(("code", "wrong"), WRONG)
async def test_a_mistake_costs_the_channel_and_nothing_else(
    served: Any, code: int, wrong: Callable[[Any], Any]
) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            other = connection.channel()
            other.queue_declare("q")
            other.queue_declare("full")
            other.basic_publish("", "full", b"x")
            channel = connection.channel()
            fails(channel, code, lambda: wrong(channel))
            assert channel.is_closed
            assert other.queue_declare("q", passive=True).method.queue == "q"
            assert connection.channel(channel.channel_number).is_open

    await served.run(client, served.port)


@pytest.mark.req("N7", "N13")
@pytest.mark.parametrize("wrong", ["ack", "nack", "reject", "multiple", "twice"])
async def test_an_unknown_delivery_tag_ends_the_channel(served: Any, wrong: str) -> None:
    def client(channel: Any) -> None:
        channel.queue_declare("q")
        channel.basic_publish("", "q", b"x")
        if wrong == "twice":
            tag = channel.basic_get("q")[0].delivery_tag
            channel.basic_ack(tag)
            channel.basic_ack(tag)
        elif wrong == "multiple":
            channel.basic_ack(7, multiple=True)
        else:
            getattr(channel, f"basic_{wrong}")(7)
        fails(channel, 406, lambda: channel.queue_declare("q"))

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N12")
async def test_exclusive_queues_are_for_one_connection_and_go_with_it(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            name = channel.queue_declare("", exclusive=True).method.queue
            assert name.startswith("amq.gen-")
            with connected(port) as other:
                for step in ("basic_get", "queue_purge", "queue_delete"):
                    there = other.channel()
                    fails(there, 405, lambda: getattr(there, step)(name))  # noqa: B023
                there = other.channel()
                fails(there, 405, lambda: there.queue_declare(name, passive=True))
        with connected(port) as connection:
            channel = connection.channel()
            fails(channel, 404, lambda: channel.queue_declare(name, passive=True))

    await served.run(client, served.port)


@pytest.mark.req("N12", "N18")
async def test_auto_delete_queues_go_with_their_last_consumer(served: Any) -> None:
    def client(channel: Any) -> None:
        channel.queue_declare("q", auto_delete=True)
        channel.basic_publish("", "q", b"x")
        assert get(channel, "q") == b"x"
        first = channel.basic_consume("q", print)
        second = channel.basic_consume("q", print)
        channel.basic_cancel(first)
        assert channel.queue_declare("q", passive=True).method.consumer_count == 1
        channel.basic_cancel(second)
        fails(channel, 404, lambda: channel.queue_declare("q", passive=True))

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N13", "N18")
async def test_what_a_channel_has_not_answered_goes_back(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            for number in range(3):
                channel.basic_publish("", "q", b"%d" % number)
            for _ in range(3):
                channel.basic_get("q")
            channel.close()
            channel = connection.channel()
            for number in range(3):
                method, _, body = channel.basic_get("q")
                assert (method.redelivered, body) == (True, b"%d" % number)
            channel.basic_nack(2, multiple=True, requeue=True)
            channel.basic_reject(3, requeue=False)
            assert drain(channel, "q") == [b"0", b"1"]
            channel.basic_publish("", "q", b"again")
            channel.basic_get("q")
            channel.basic_recover(requeue=True)
            method, _, _ = channel.basic_get("q")
            assert method.redelivered

    await served.run(client, served.port)


@pytest.mark.req("N13", "N14")
async def test_confirms_and_returns(served: Any) -> None:
    def client(channel: Any) -> None:
        channel.confirm_delivery()
        channel.queue_declare("q")
        channel.basic_publish("", "q", b"kept", mandatory=True)
        channel.basic_publish("amq.fanout", "", b"dropped")
        with pytest.raises(exceptions.UnroutableError) as caught:
            channel.basic_publish("", "nowhere", b"back", mandatory=True)
        (returned,) = caught.value.messages
        assert (returned.method.reply_code, returned.body) == (312, b"back")
        channel.queue_declare(
            "small", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        channel.basic_publish("", "small", b"1")
        with pytest.raises(exceptions.NackError):
            channel.basic_publish("", "small", b"2")
        assert drain(channel, "q") == [b"kept"]

    await served.run(on_channel(client), served.port)


@pytest.mark.req("N14", "R12")
async def test_transactions(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            other = connection.channel()
            channel.queue_declare("q")
            channel.queue_declare("out")
            for number in range(2):
                other.basic_publish("", "q", b"%d" % number)
            channel.tx_select()
            channel.basic_publish("", "out", b"never")
            method, _, _ = channel.basic_get("q")
            channel.basic_ack(method.delivery_tag)
            assert get(other, "out") is None
            channel.tx_rollback()
            assert get(other, "out") is None
            # The delivery was not requeued: it can be acknowledged again.
            channel.basic_publish("amq.fanout", "", b"nowhere")
            channel.basic_publish("", "out", b"done")
            channel.basic_ack(method.delivery_tag)
            channel.tx_commit()
            assert get(other, "out") == b"done"
            channel.close()
            assert drain(other, "q") == [b"1"]
            fails(other, 406, lambda: (other.confirm_delivery(), other.tx_select()))

    await served.run(client, served.port)


@pytest.mark.req("N15")
async def test_prefetch_of_a_consumer_and_of_a_channel(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            for number in range(20):
                channel.basic_publish("", "q", b"%d" % number)
            tags: list[int] = []
            channel.basic_qos(prefetch_count=2)
            for _ in range(2):
                channel.basic_consume("q", lambda _c, m, _p, _b: tags.append(m.delivery_tag))
            connection.process_data_events(0.2)
            assert len(tags) == 4
            channel.basic_qos(prefetch_count=5, global_qos=True)
            channel.basic_consume("q", lambda _c, m, _p, _b: tags.append(m.delivery_tag))
            connection.process_data_events(0.2)
            assert len(tags) == 5
            channel.basic_ack(tags[-1], multiple=True)
            connection.process_data_events(0.2)
            assert len(tags) == 10

    await served.run(client, served.port)


@pytest.mark.req("N13")
async def test_a_consumer_hears_that_its_queue_has_gone(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            channel.basic_publish("", "q", b"x")
            cancelled: list[Any] = []
            tags: list[int] = []
            channel.add_on_cancel_callback(cancelled.append)
            channel.basic_consume("q", lambda _c, m, _p, _b: tags.append(m.delivery_tag))
            connection.process_data_events(0.1)
            other = connection.channel()
            other.queue_delete("q")
            connection.process_data_events(0.1)
            assert len(cancelled) == 1
            # Unacknowledged deliveries can be acknowledged all the same.
            channel.basic_ack(tags[0])
            channel.queue_declare("q")

    await served.run(client, served.port)


async def test_direct_replies(served: Any) -> None:
    def client(port: int) -> None:
        with connected(port) as asks, connected(port) as answers:
            channel, there = asks.channel(), answers.channel()
            there.queue_declare("rpc")
            replies: list[bytes] = []
            channel.basic_consume(
                "amq.rabbitmq.reply-to",
                lambda _c, _m, _p, body: replies.append(body),
                auto_ack=True,
            )
            channel.basic_publish(
                "", "rpc", b"ask", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to")
            )
            asked = wait_for(lambda: there.basic_get("rpc", auto_ack=True)[1])
            assert asked.reply_to.startswith("amq.rabbitmq.reply-to.")
            there.basic_publish("", asked.reply_to, b"answer")
            there.queue_declare("rpc")
            asks.process_data_events(0.2)
            assert replies == [b"answer"]

    await served.run(client, served.port)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"x-max-length": 2}, [b"2", b"3"]),
        ({"x-max-length": 2, "x-overflow": "reject-publish"}, [b"0", b"1"]),
        ({"x-max-priority": 5}, [b"3", b"2", b"1", b"0"]),
        ({"x-message-ttl": 0}, []),
        ({"x-queue-type": "quorum", "x-delivery-limit": 3}, [b"0", b"1", b"2", b"3"]),
    ],
)
async def test_arguments_of_queues(
    served: Any, arguments: dict[str, Any], left: list[bytes]
) -> None:
    def client(channel: Any) -> None:
        channel.queue_declare("q", arguments=arguments)
        for number in range(4):
            channel.basic_publish("", "q", b"%d" % number, pika.BasicProperties(priority=number))
        assert drain(channel, "q") == left

    await served.run(on_channel(client), served.port)


async def test_dead_letters_go_where_the_arguments_say(served: Any) -> None:
    def client(channel: Any) -> None:
        channel.queue_declare("dead")
        channel.exchange_declare("dlx", "direct")
        channel.queue_bind("dead", "dlx", "gone")
        channel.queue_declare(
            "q",
            arguments={"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "gone"},
        )
        channel.queue_declare(
            "p", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        )
        for name in ("q", "p"):
            channel.basic_publish("", name, name.encode())
            method, _, _ = channel.basic_get(name)
            channel.basic_reject(method.delivery_tag, requeue=False)
        assert drain(channel, "dead") == [b"q", b"p"]

    await served.run(on_channel(client), served.port)


async def test_an_application_that_is_asked_is_asked_for_publishers_too() -> None:
    asked: list[tuple[str, str]] = []

    async def authorize(_peer: Any, address: str, role: str) -> bool:
        asked.append((address, role))
        return address != "secret"

    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("q")
            channel.queue_declare("secret")
            channel.queue_bind("q", "amq.fanout")
            channel.basic_publish("", "q", b"1")
            channel.basic_publish("amq.fanout", "", b"2")
            with pytest.raises(exceptions.NackError):
                channel.basic_publish("", "secret", b"3")
            assert drain(channel, "q") == [b"1", b"2"]
            fails(channel, 403, lambda: channel.basic_get("secret"))

    async with Broker(fronts=[Front()], volatile=True, authorize=authorize) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            await trio.to_thread.run_sync(
                client, int(url.rpartition(":")[2].rstrip("/")), abandon_on_cancel=True
            )
    assert ("q", "sender") in asked


async def test_a_node_of_an_application_takes_what_pika_publishes() -> None:
    container = Container("app", fronts=[Front()])
    heard = trio.Event()

    @container.node("orders")
    async def orders(body: bytes) -> None:
        assert body == b"5 apples"
        heard.set()

    def client(port: int) -> None:
        with connected(port) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "orders", b"5 apples")
            with pytest.raises(exceptions.UnroutableError):
                channel.basic_publish("", "nowhere", b"x", mandatory=True)

    async with container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            await trio.to_thread.run_sync(
                client, int(url.rpartition(":")[2].rstrip("/")), abandon_on_cancel=True
            )
            await heard.wait()
