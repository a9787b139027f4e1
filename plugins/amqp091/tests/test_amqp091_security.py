"""Who gets in, and what they may do, with pika."""

from __future__ import annotations

from pathlib import Path
from ssl import create_default_context
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front
from certificates import certificates

from amqp_rt import Access, Broker, Rights, Rule, ServerTls

pika = pytest.importorskip("pika")
from pika import exceptions  # noqa: E402 - only if it is there


def connect(port: int, user: str, password: str, virtual_host: str = "/") -> Any:
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "127.0.0.1",
            port,
            virtual_host,
            pika.PlainCredentials(user, password),
        )
    )


async def run(broker: Broker, client: Any) -> None:
    (url,) = await broker.listen("amqp://127.0.0.1:0")
    with trio.fail_after(30):
        await trio.to_thread.run_sync(
            client, int(url.rpartition(":")[2].rstrip("/")), abandon_on_cancel=True
        )


@pytest.mark.slow
@pytest.mark.req("N9")
async def test_users_virtual_hosts_and_rights() -> None:
    access = Access(
        [
            Rule("*", Rights.MANAGE, users=("ada",)),
            Rule("in", Rights.SEND, users=("bob",)),
            Rule("/exchanges/news", Rights.SEND, users=("bob",)),
        ]
    )

    def client(port: int) -> None:
        with pytest.raises(exceptions.ProbableAuthenticationError) as caught:
            connect(port, "ada", "wrong")
        assert "403" in str(caught.value)
        with pytest.raises(exceptions.ProbableAccessDeniedError) as denied:
            connect(port, "ada", "a-word", "elsewhere")
        assert "530" in str(denied.value)
        ada = connect(port, "ada", "a-word")
        channel = ada.channel()
        for name in ("in", "other"):
            channel.queue_declare(name)
        channel.exchange_declare("news", "fanout")
        channel.queue_bind("other", "news")
        there = connect(port, "ada", "a-word", "berlin").channel()
        assert there.queue_declare("in").method.message_count == 0
        bob = connect(port, "bob", "b-word")
        mine = bob.channel()
        mine.confirm_delivery()
        mine.basic_publish("", "in", b"1", pika.BasicProperties(user_id="bob"))
        # A user with the right to send to an exchange needs none at the queues behind it.
        mine.basic_publish("news", "", b"2")
        assert channel.queue_declare("other", passive=True).method.message_count == 1
        for wrong, code in (
            (lambda c: c.basic_publish("", "other", b"x"), 403),
            (lambda c: c.queue_declare("new"), 403),
            (lambda c: c.basic_consume("in", print), 403),
            (lambda c: c.basic_get("in"), 403),
            (lambda c: c.queue_purge("in"), 403),
            (lambda c: c.basic_publish("", "in", b"x", pika.BasicProperties(user_id="ada")), 406),
        ):
            mine = bob.channel()
            mine.confirm_delivery()
            with pytest.raises(exceptions.ChannelClosedByBroker) as refused:
                wrong(mine)
            assert refused.value.reply_code == code
        for connection in (ada, bob, there.connection):
            connection.close()

    async with Broker(
        fronts=[Front()],
        users={"ada": "a-word", "bob": "b-word"},
        access=access,
        virtual_hosts=["", "berlin"],
        volatile=True,
    ) as broker:
        await run(broker, client)


@pytest.mark.req("N7")
@pytest.mark.parametrize("wrong", ["immediate", "tag", "type"])
async def test_mistakes_that_cost_the_connection(served: Any, wrong: str) -> None:
    def client(port: int) -> None:
        channel = connect(port, "guest", "guest").channel()
        channel.queue_declare("q")
        if wrong == "tag":
            channel.basic_consume("q", print, consumer_tag="t")
        code, method = {
            "immediate": (540, pika.spec.Basic.Publish(routing_key="q", immediate=True)),
            "tag": (530, pika.spec.Basic.Consume(queue="q", consumer_tag="t")),
            "type": (503, pika.spec.Exchange.Declare(exchange="e", type="odd")),
        }[wrong]
        content = (pika.BasicProperties(), b"x") if wrong == "immediate" else None
        # Past what pika itself would not let one say.
        channel._impl._send_method(method, content)
        with pytest.raises(exceptions.ConnectionClosedByBroker) as caught:
            channel.queue_declare("q")
        assert caught.value.reply_code == code

    await served.run(client, served.port)


@pytest.mark.req("N14")
async def test_what_was_confirmed_is_there_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"

    def publish(port: int) -> None:
        connection = connect(port, "guest", "guest")
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("q", durable=True)
        channel.exchange_declare("e", "direct", durable=True)
        channel.queue_bind("q", "e", "k")
        for number in range(3):
            channel.basic_publish("e", "k", b"%d" % number, pika.BasicProperties(delivery_mode=2))
        channel.basic_publish("e", "k", b"light")
        connection.close()

    def fetch(port: int) -> None:
        connection = connect(port, "guest", "guest")
        channel = connection.channel()
        assert channel.queue_declare("q", durable=True).method.message_count == 3
        channel.basic_publish("e", "k", b"3")
        found = [channel.basic_get("q", auto_ack=True)[2] for _ in range(4)]
        assert found == [b"0", b"1", b"2", b"3"]
        connection.close()

    for client in (publish, fetch):
        async with Broker(fronts=[Front()], store=store) as broker:
            await run(broker, client)


async def test_a_trace_of_a_connection_does_not_disturb_it(tmp_path: Path) -> None:
    def client(port: int) -> None:
        connection = connect(port, "guest", "guest")
        channel = connection.channel()
        channel.queue_declare("q")
        channel.basic_publish("", "q", b"x")
        assert channel.basic_get("q", auto_ack=True)[2] == b"x"
        connection.close()

    async with Broker(fronts=[Front()], trace=tmp_path) as broker:
        await run(broker, client)


async def test_management_sees_channels_and_consumers_and_can_end_them() -> None:
    async def client(broker: Broker, port: int) -> None:
        connection = await trio.to_thread.run_sync(connect, port, "guest", "guest")

        def consume() -> Any:
            channel = connection.channel()
            channel.queue_declare("q")
            channel.basic_consume("q", print)
            return channel

        channel = await trio.to_thread.run_sync(consume)
        async with broker.local() as operator:
            management = operator.management()
            (session,) = [
                each
                async for each in management.query("amqp_rt.session")
                if each["name"].startswith("1/")
            ]
            assert (session["channel"], session["links"]) == (1, 1)
            links = [
                (each["address"], each["role"]) async for each in management.query("amqp_rt.link")
            ]
            assert ("q", "receiver") in links
            await management.delete("amqp_rt.session", session["name"])

        def closed() -> None:
            with pytest.raises(exceptions.ChannelClosedByBroker) as caught:
                channel.queue_declare("q")
            assert caught.value.reply_code == 320
            connection.close()

        await trio.to_thread.run_sync(closed)

    async with Broker(fronts=[Front()], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            await client(broker, int(url.rpartition(":")[2].rstrip("/")))


@pytest.mark.req("N9")
async def test_external_is_whom_the_certificate_names() -> None:
    known = certificates()
    access = Access([Rule("q", Rights.MANAGE, users=("ada",))])

    def client(port: int, shown: Path | None, credentials: Any) -> Any:
        context = create_default_context(cafile=str(known.ca))
        if shown is not None:
            context.load_cert_chain(shown)
        return pika.BlockingConnection(
            pika.ConnectionParameters(
                "127.0.0.1",
                port,
                credentials=credentials,
                ssl_options=pika.SSLOptions(context, "localhost"),
            )
        )

    def go(port: int) -> None:
        external = pika.credentials.ExternalCredentials()
        connection = client(port, known.client, external)
        connection.channel().queue_declare("q")
        with pytest.raises(exceptions.ChannelClosedByBroker):
            connection.channel().queue_declare("other")
        connection.close()
        # A client without a certificate has no user, and no password is requested.
        with pytest.raises(exceptions.AMQPConnectionError):
            client(port, None, external)
        with pytest.raises(exceptions.AMQPConnectionError):
            client(port, known.client, pika.PlainCredentials("ada", "a-word"))

    tls = ServerTls(known.server, client_ca=known.ca, client_certificate="optional")
    async with Broker(
        fronts=[Front()], tls=tls, sasl=["EXTERNAL"], access=access, volatile=True
    ) as broker:
        (url,) = await broker.listen("amqps://127.0.0.1:0")
        with trio.fail_after(30):
            await trio.to_thread.run_sync(
                go, int(url.rpartition(":")[2].rstrip("/")), abandon_on_cancel=True
            )


@pytest.mark.slow
@pytest.mark.req("N9")
async def test_a_new_secret_keeps_the_connection_and_a_wrong_one_costs_it() -> None:
    judged = []

    async def verify(user: str, password: str, _peer: Any) -> Any:
        judged.append((user, password))
        return {"token": password} if password in ("first", "second") else None

    def client(port: int) -> None:
        connection = connect(port, "ada", "first")
        channel = connection.channel()
        channel.queue_declare("q")
        connection.update_secret("second", "it expires")
        channel.basic_publish("", "q", b"x")
        assert channel.basic_get("q", auto_ack=True)[2] == b"x"
        with pytest.raises(exceptions.ConnectionClosedByBroker) as caught:
            connection.update_secret("third", "a guess")
        assert caught.value.reply_code == 530

    async with Broker(fronts=[Front()], users=verify, volatile=True) as broker:
        await run(broker, client)
    assert judged == [("ada", "first"), ("ada", "second"), ("ada", "third")]
