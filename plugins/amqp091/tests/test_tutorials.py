"""RabbitMQ's tutorials with pika, and the scenarios of pika's own acceptance tests, at our broker.

The programs are those of the tutorials, but for where they print: each part runs on a connection of its
own, as it would in a process of its own.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest

pika = pytest.importorskip("pika")
from pika import exceptions  # noqa: E402 - only if it is there


def connect(port: int) -> Any:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))


def wait_for(check: Callable[[], Any], within: float = 10) -> None:
    until = time.monotonic() + within
    while not check():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def take(channel: Any, queue: str, count: int) -> list[tuple[str, bytes]]:
    """*count* messages of *queue*: their keys and bodies."""
    found = []
    for method, _, body in channel.consume(queue, auto_ack=True, inactivity_timeout=10):
        assert method is not None, f"{len(found)} of {count} messages came"
        found.append((method.routing_key, body))
        if len(found) == count:
            break
    channel.cancel()
    return found


# --- The tutorials --------------------------------------------------------------------------------


@pytest.mark.req("N12", "N13")
async def test_1_hello_world(served: Any) -> None:
    def client(port: int) -> None:
        with closing(connect(port)) as send:
            channel = send.channel()
            channel.queue_declare(queue="hello")
            channel.basic_publish(exchange="", routing_key="hello", body="Hello World!")
        found = []
        with closing(connect(port)) as receive:
            channel = receive.channel()
            channel.queue_declare(queue="hello")

            def callback(ch: Any, method: Any, properties: Any, body: bytes) -> None:
                found.append(body)
                ch.stop_consuming()

            channel.basic_consume(queue="hello", on_message_callback=callback, auto_ack=True)
            channel.start_consuming()
        assert found == [b"Hello World!"]

    await served.run(client, served.port)


@pytest.mark.req("N13", "N15", "N18")
async def test_2_work_queues(served: Any) -> None:
    """Durable tasks go to who is free; those of a worker that dies go to another."""

    def client(port: int) -> None:
        with closing(connect(port)) as connection:
            channel = connection.channel()
            channel.queue_declare(queue="task_queue", durable=True)
            for number in range(6):
                channel.basic_publish(
                    exchange="",
                    routing_key="task_queue",
                    body=b"%d" % number,
                    properties=pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent),
                )
            busy, idle = connect(port), connect(port)
            held: list[Any] = []
            done: list[bytes] = []
            for worker, callback in (
                (busy, lambda ch, method, _properties, body: held.append(body)),
                (
                    idle,
                    lambda ch, method, _properties, body: (
                        done.append(body),
                        ch.basic_ack(delivery_tag=method.delivery_tag),
                    ),
                ),
            ):
                channel = worker.channel()
                channel.queue_declare(queue="task_queue", durable=True)
                channel.basic_qos(prefetch_count=1)
                channel.basic_consume(queue="task_queue", on_message_callback=callback)
                worker.process_data_events(time_limit=0.2)

            def others() -> bool:
                idle.process_data_events(time_limit=0.05)
                return len(done) == 5

            wait_for(others)
            busy.process_data_events(time_limit=0)
            assert held == [b"0"]
            assert done == [b"1", b"2", b"3", b"4", b"5"]
            # The busy worker dies without an acknowledgement.
            busy._impl._transport._sock.shutdown(socket.SHUT_RDWR)
            with suppress(exceptions.AMQPError):
                busy.process_data_events(time_limit=1)

            def all_of_them() -> bool:
                idle.process_data_events(time_limit=0.05)
                return len(done) == 6

            wait_for(all_of_them)
            assert done[-1] == b"0"
            idle.close()

    await served.run(client, served.port)


@pytest.mark.req("N11", "N12")
async def test_3_publish_and_subscribe(served: Any) -> None:
    def client(port: int) -> None:
        subscribers = [connect(port) for _ in range(2)]
        queues = []
        for each in subscribers:
            channel = each.channel()
            channel.exchange_declare(exchange="logs", exchange_type="fanout")
            result = channel.queue_declare(queue="", exclusive=True)
            assert result.method.queue.startswith("amq.gen-")
            channel.queue_bind(exchange="logs", queue=result.method.queue)
            queues.append((channel, result.method.queue))
        with closing(connect(port)) as emit:
            channel = emit.channel()
            channel.exchange_declare(exchange="logs", exchange_type="fanout")
            channel.basic_publish(exchange="logs", routing_key="", body="info: Hello World!")
            # An unroutable message is dropped, and that is no mistake.
            channel.basic_publish(exchange="", routing_key="gone", body="lost")
        for channel, queue in queues:
            assert take(channel, queue, 1) == [("", b"info: Hello World!")]
        for each in subscribers:
            each.close()

    await served.run(client, served.port)


@pytest.mark.req("N11")
@pytest.mark.parametrize("kind", ["direct", "topic"])
async def test_4_and_5_routing_and_topics(served: Any, kind: str) -> None:
    direct = {"disk": ["error"], "screen": ["info", "warning", "error"]}
    topic = {
        "all": ["#"],
        "kernel": ["kern.*"],
        "critical": ["*.critical"],
        "both": ["kern.*", "#"],
    }
    bound = direct if kind == "direct" else topic
    sent = ["info", "warning", "error", "debug"]
    if kind == "topic":
        sent = ["kern.critical", "kern.info", "anonymous.critical", "anonymous.info"]
    expected = {
        "disk": ["error"],
        "screen": ["info", "warning", "error"],
        "all": sent,
        "kernel": ["kern.critical", "kern.info"],
        "critical": ["kern.critical", "anonymous.critical"],
        "both": sent,
    }

    def client(port: int) -> None:
        with closing(connect(port)) as connection:
            channel = connection.channel()
            channel.exchange_declare(exchange="logs", exchange_type=kind)
            queues = {}
            for name, keys in bound.items():
                queue = channel.queue_declare(queue="", exclusive=True).method.queue
                queues[name] = queue
                for key in keys:
                    channel.queue_bind(exchange="logs", queue=queue, routing_key=key)
            for key in sent:
                channel.basic_publish(exchange="logs", routing_key=key, body=key)
            for name, queue in queues.items():
                found = take(channel, queue, len(expected[name]))
                assert found == [(key, key.encode()) for key in expected[name]]

    await served.run(client, served.port)


class FibonacciClient:
    """The client of the sixth tutorial."""

    def __init__(self, port: int) -> None:
        self.connection = connect(port)
        self.channel = self.connection.channel()
        result = self.channel.queue_declare(queue="", exclusive=True)
        self.callback_queue = result.method.queue
        self.channel.basic_consume(
            queue=self.callback_queue, on_message_callback=self.on_response, auto_ack=True
        )
        self.response: bytes | None = None
        self.corr_id = ""

    def on_response(self, ch: Any, method: Any, props: Any, body: bytes) -> None:
        if self.corr_id == props.correlation_id:
            self.response = body

    def call(self, number: int) -> int:
        self.response = None
        self.corr_id = str(uuid.uuid4())
        self.channel.basic_publish(
            exchange="",
            routing_key="rpc_queue",
            properties=pika.BasicProperties(
                reply_to=self.callback_queue, correlation_id=self.corr_id
            ),
            body=str(number),
        )
        while self.response is None:
            self.connection.process_data_events(time_limit=10)
        return int(self.response)


def fib(number: int) -> int:
    return number if number < 2 else fib(number - 1) + fib(number - 2)


@pytest.mark.req("N13")
async def test_6_remote_procedure_calls(served: Any) -> None:
    def serve(server: Any) -> None:
        channel = server.channel()
        channel.queue_declare(queue="rpc_queue")

        def on_request(ch: Any, method: Any, props: Any, body: bytes) -> None:
            ch.basic_publish(
                exchange="",
                routing_key=props.reply_to,
                properties=pika.BasicProperties(correlation_id=props.correlation_id),
                body=str(fib(int(body))),
            )
            ch.basic_ack(delivery_tag=method.delivery_tag)
            if int(body) == 0:
                ch.stop_consuming()

        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(queue="rpc_queue", on_message_callback=on_request)
        channel.start_consuming()
        server.close()

    def client(port: int) -> None:
        serving = threading.Thread(target=serve, args=[connect(port)])
        serving.start()
        with closing(connect(port)) as looking:
            channel = looking.channel()
            channel.queue_declare(queue="rpc_queue")
        asking = FibonacciClient(port)
        assert [asking.call(number) for number in (10, 7, 1, 0)] == [55, 13, 1, 0]
        asking.connection.close()
        serving.join(10)
        assert not serving.is_alive()

    await served.run(client, served.port)


@pytest.mark.req("N14")
async def test_7_publisher_confirms(served: Any) -> None:
    """One by one, and many at once as they come."""

    def one_by_one(port: int) -> None:
        with closing(connect(port)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            queue = channel.queue_declare(queue="", exclusive=True).method.queue
            for number in range(20):
                channel.basic_publish("", queue, b"%d" % number, mandatory=True)
            with pytest.raises(exceptions.UnroutableError) as caught:
                channel.basic_publish("", "nowhere", b"x", mandatory=True)
            (returned,) = caught.value.messages
            assert (returned.method.reply_code, returned.body) == (312, b"x")
            assert len(take(channel, queue, 20)) == 20

    def as_they_come(steps: Steps) -> None:
        outstanding: set[int] = set()

        def confirmed(frame: Any) -> None:
            method = frame.method
            assert type(method).__name__ == "Ack", "Basic.Nack came"
            tag = method.delivery_tag
            outstanding.difference_update(
                {each for each in outstanding if each <= tag} if method.multiple else {tag}
            )
            if not outstanding:
                steps.done()

        def selected(_frame: Any) -> None:
            for number in range(1, 501):
                outstanding.add(number)
                steps.channel.basic_publish("", steps.queue, b"x")

        steps.channel.confirm_delivery(confirmed, callback=selected)

    await served.run(one_by_one, served.port)
    await served.run(lambda port: Steps(port).run(as_they_come), served.port)


# --- Scenarios of pika's acceptance tests (async_adapter_tests, blocking_adapter_test) ----------------


class Steps:
    """A SelectConnection with a channel and an exclusive queue; it runs until somebody says ``done``."""

    def __init__(self, port: int) -> None:
        self.failure: BaseException | None = None
        self.finished = False
        self.port = port

    def run(self, begin: Callable[[Steps], None]) -> None:
        self.connection = pika.SelectConnection(
            pika.ConnectionParameters("127.0.0.1", self.port),
            on_open_callback=self.guarded(
                lambda connection: connection.channel(on_open_callback=self.guarded(opened))
            ),
            on_open_error_callback=self.guarded(self.stopped),
            on_close_callback=lambda _connection, _reason: self.connection.ioloop.stop(),
        )

        def opened(channel: Any) -> None:
            self.channel = channel
            channel.queue_declare("", exclusive=True, callback=self.guarded(declared))

        def declared(frame: Any) -> None:
            self.queue = frame.method.queue
            begin(self)

        self.connection.ioloop.call_later(20, self.guarded(self.late))
        self.connection.ioloop.start()
        self.connection.ioloop.close()
        if self.failure is not None:
            raise self.failure
        assert self.finished

    def guarded(self, step: Callable[..., Any]) -> Callable[..., None]:
        def guard(*args: Any) -> None:
            try:
                step(*args)
            except BaseException as error:  # it is raised where it is seen
                self.failure = error
                self.connection.ioloop.stop()

        return guard

    def late(self) -> None:
        raise AssertionError("it did not come to an end in time")

    def stopped(self, _connection: Any, error: Any) -> None:
        raise AssertionError(f"no connection: {error}")

    def done(self, *_: Any) -> None:
        self.finished = True
        self.connection.close()


def publish_and_consume(steps: Steps) -> None:
    body = bytes(range(256)) * 8192  # two megabytes: many frames

    def on_message(channel: Any, method: Any, _header: Any, found: bytes) -> None:
        assert found == body
        channel.basic_ack(method.delivery_tag)
        channel.basic_cancel("tag", callback=steps.done)

    steps.channel.basic_consume(
        steps.queue, steps.guarded(on_message), consumer_tag="tag",
        callback=lambda _frame: steps.channel.basic_publish("", steps.queue, body),
    )  # fmt: skip


def get_of_nothing_and_of_one(steps: Steps) -> None:
    def empty(_frame: Any) -> None:
        steps.channel.basic_publish("", steps.queue, b"x")
        steps.channel.basic_get(steps.queue, steps.guarded(got))

    def got(_channel: Any, method: Any, _header: Any, body: bytes) -> None:
        assert (body, method.message_count, method.redelivered) == (b"x", 0, False)
        steps.channel.basic_ack(method.delivery_tag)
        steps.done()

    steps.channel.add_callback(steps.guarded(empty), [pika.spec.Basic.GetEmpty])
    steps.channel.basic_get(steps.queue, steps.guarded(lambda *_: None))


def an_exchange_that_differs(steps: Steps) -> None:
    def closed(_channel: Any, reason: Any) -> None:
        assert reason.reply_code == 406
        steps.connection.channel(on_open_callback=steps.guarded(opened))

    def opened(channel: Any) -> None:
        channel.exchange_delete("mine", callback=steps.done)

    steps.channel.add_on_close_callback(steps.guarded(closed))
    steps.channel.exchange_declare(
        "mine", "direct",
        callback=lambda _frame: steps.channel.exchange_declare("mine", "fanout"),
    )  # fmt: skip


def a_transaction_that_is_committed_and_one_that_is_not(steps: Steps) -> None:
    channel = steps.channel

    def selected(_frame: Any) -> None:
        channel.basic_publish("", steps.queue, b"no")
        channel.tx_rollback(steps.guarded(rolled_back))

    def rolled_back(_frame: Any) -> None:
        channel.basic_publish("", steps.queue, b"yes")
        channel.tx_commit(steps.guarded(committed))

    def committed(_frame: Any) -> None:
        channel.basic_get(steps.queue, steps.guarded(got))

    def got(_channel: Any, method: Any, _header: Any, body: bytes) -> None:
        assert (body, method.message_count) == (b"yes", 0)
        steps.done()

    channel.tx_select(steps.guarded(selected))


def a_commit_without_a_transaction(steps: Steps) -> None:
    def closed(_channel: Any, reason: Any) -> None:
        assert reason.reply_code == 406
        steps.done()

    steps.channel.add_on_close_callback(steps.guarded(closed))
    steps.channel.tx_commit()


def calls_that_wait_for_their_answers_while_others_do_not(steps: Steps) -> None:
    """Answers come in the order in which was asked, with and without ``no-wait`` between."""
    channel = steps.channel
    names = [f"mine-{number}" for number in range(10)]
    heard: list[str] = []

    def declared(frame: Any) -> None:
        heard.append(frame.method.queue)
        if len(heard) == 10:
            assert heard == names
            for name in names:
                channel.queue_delete(name)
            steps.done()

    for name in names:
        channel.exchange_declare(f"e-{name}", "fanout", auto_delete=True)
        channel.queue_declare(name, callback=steps.guarded(declared))


@pytest.mark.req("N11", "N12", "N13", "N14")
@pytest.mark.parametrize(
    "scenario",
    [
        publish_and_consume,
        get_of_nothing_and_of_one,
        an_exchange_that_differs,
        a_transaction_that_is_committed_and_one_that_is_not,
        a_commit_without_a_transaction,
        calls_that_wait_for_their_answers_while_others_do_not,
    ],
    ids=lambda each: each.__name__,
)
async def test_scenarios_of_pikas_select_connection(
    served: Any, scenario: Callable[[Steps], None]
) -> None:
    await served.run(lambda port: Steps(port).run(scenario), served.port)


@pytest.mark.req("N13")
async def test_scenarios_of_pikas_blocking_connection(served: Any) -> None:
    def client(port: int) -> None:
        with closing(connect(port)) as connection:
            channel = connection.channel()
            queue = channel.queue_declare("", exclusive=True).method.queue
            # A generator that is left gives back what it has in hand.
            for number in range(4):
                channel.basic_publish("", queue, b"%d" % number)
            for method, _, body in channel.consume(queue):
                assert body == b"0"
                channel.basic_ack(method.delivery_tag)
                # The answer comes after all frames that were sent before.
                channel.queue_declare(queue, passive=True)
                break
            channel.cancel()
            method, _, body = channel.basic_get(queue)
            assert (body, method.redelivered) == (b"1", True)
            channel.basic_nack(method.delivery_tag, requeue=True)
            # Everything that is in hand, at once.
            tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(3)]
            assert channel.basic_get(queue)[0] is None
            channel.basic_nack(tags[-1], multiple=True, requeue=True)
            tags = [channel.basic_get(queue)[0].delivery_tag for _ in range(3)]
            channel.basic_ack(0, multiple=True)
            assert channel.queue_declare(queue, passive=True).method.message_count == 0
            assert channel.queue_purge(queue).method.message_count == 0
            # A consumer that is gone hears nothing, and another begins where it was.
            heard: list[bytes] = []
            tag = channel.basic_consume(queue, lambda _c, _m, _p, body: heard.append(body))
            channel.basic_cancel(tag)
            channel.basic_publish("", queue, b"later")
            connection.process_data_events(0.05)
            assert heard == []
            assert take(channel, queue, 1) == [(queue, b"later")]
            # Two channels, and what is said by another thread.
            called = threading.Event()
            threading.Thread(target=connection.add_callback_threadsafe, args=[called.set]).start()
            wait_for(lambda: connection.process_data_events(0.01) or called.is_set())
            # Exchanges bound to exchanges, and undone.
            channel.exchange_declare("one", "fanout", auto_delete=True)
            channel.exchange_declare("other", "fanout", internal=True)
            channel.exchange_bind("other", "one")
            channel.queue_bind(queue, "other")
            channel.basic_publish("one", "", b"through")
            assert take(channel, queue, 1) == [("", b"through")]
            channel.exchange_unbind("other", "one")
            with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
                # The auto-delete exchange was deleted with its last binding.
                channel.exchange_declare("one", passive=True)
            assert caught.value.reply_code == 404
            channel = connection.channel()
            channel.confirm_delivery()
            with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
                channel.basic_publish("other", "", b"x")
            assert caught.value.reply_code == 403

    await served.run(client, served.port)


@pytest.mark.req("N13", "N7")
async def test_what_is_not_offered_is_said_to_be_so(served: Any) -> None:
    def client(port: int) -> None:
        for method, content in (
            (pika.spec.Basic.Recover(requeue=False), None),
            (pika.spec.Basic.Publish(immediate=True), (pika.BasicProperties(), b"x")),
        ):
            channel = connect(port).channel()
            channel._impl._send_method(method, content)
            with pytest.raises(exceptions.ConnectionClosedByBroker) as caught:
                channel.queue_declare("q")
            assert caught.value.reply_code == 540

    await served.run(client, served.port)
