"""The methods of a channel, one at a time, against a broker in memory."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.values import Seconds
from worlds091 import Client, World, published

from amqp_rt.addresses import REPLY_TO
from amqp_rt.fronts import Error


def made(*methods: m.Method) -> Client:
    """A client with a queue *q* that has done *methods*."""
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"), *methods)
    client.take()
    return client


def bodies(client: Client, queue: str = "q") -> list[bytes]:
    """What waits in *queue*, taken on a channel of its own."""
    client.take()
    client.say(50, m.ChannelOpen(), *[m.BasicGet(queue=queue, no_ack=True)] * 10, m.ChannelClose())
    return [each.body for each in client.contents()]


# --- transactions ---------------------------------------------------------------------------------


@pytest.mark.req("N14")
def test_a_commit_takes_what_was_accepted_and_a_rollback_leaves_it_open() -> None:
    client = made()
    for body in (b"a", b"b"):
        client.publish(1, "q", body)
    client.say(1, m.TxSelect(), m.BasicGet(queue="q"), m.BasicGet(queue="q"))
    first, second = client.contents()
    acks = [m.BasicAck(delivery_tag=each.method.delivery_tag) for each in (first, second)]
    client.say(1, acks[0], m.TxCommit())
    assert isinstance(client.answer(m.TxCommitOk), m.TxCommitOk)
    # A rolled back acknowledgement can be repeated; without one the message is requeued.
    client.say(1, acks[1], m.TxRollback())
    client.answer(m.TxRollbackOk)
    client.say(1, acks[1], m.TxRollback())
    client.answer(m.TxRollbackOk)
    client.say(1, m.ChannelClose())
    assert bodies(client) == [b"b"]


@pytest.mark.req("N14")
def test_an_answer_within_a_transaction_counts_whichever_queues_have_gone() -> None:
    client = made(m.QueueDeclare(queue="gone"))
    client.publish(1, "gone", b"a")
    client.publish(1, "q", b"b")
    client.say(1, m.TxSelect(), m.BasicGet(queue="gone"), m.BasicGet(queue="q"))
    client.say(2, m.ChannelOpen(), m.QueueDelete(queue="gone"))
    client.take()
    client.say(1, m.BasicAck(delivery_tag=0, multiple=True), m.TxCommit())
    client.answer(m.TxCommitOk)
    client.say(1, m.ChannelClose())
    assert bodies(client) == []


@pytest.mark.req("N14")
def test_a_select_that_is_refused_ends_its_channel() -> None:
    client = made()
    client.holds = []
    client.say(1, m.TxSelect())
    (link,) = client.holds
    link.refuse(Error("amqp:unauthorized-access", "no transactions for you"))
    client.handle([])
    closed = client.answer(m.ChannelClose)
    assert (closed.reply_code, closed.class_id, closed.method_id) == (403, 90, 10)


@pytest.mark.req("N14", "R4")
@pytest.mark.parametrize("end", [m.TxCommit, m.TxRollback])
@pytest.mark.parametrize("allows", [False, True])
def test_the_end_of_a_transaction_waits_for_rights_that_are_being_asked_for(
    end: type[m.Method], allows: bool
) -> None:
    client = made(m.QueueDeclare(queue="other"), m.TxSelect())
    client.world.topologies.asks = lambda: True
    client.publish(1, "other", b"b")
    client.holds = []
    client.publish(1, "q", b"a")
    client.say(1, end())
    assert client.take() == []
    (link,) = client.holds
    if allows:
        client.place(link)
    else:
        link.refuse(Error("amqp:unauthorized-access", "not for you"))
    client.handle([])
    client.tick()
    if allows:
        client.answer(m.TxCommitOk if end is m.TxCommit else m.TxRollbackOk)
    else:
        assert client.answer(m.ChannelClose).reply_code == 403
    client.holds = None
    done = allows and end is m.TxCommit
    assert bodies(client) == ([b"a"] if done else [])
    assert bodies(client, "other") == ([b"b"] if done else [])


@pytest.mark.req("N14", "R4")
def test_a_commit_waits_for_messages_that_wait_for_room() -> None:
    client = made(m.TxSelect())
    client.world.topologies.asks = lambda: True
    client.holds = []
    client.publish(1, "q", b"a")
    (link,) = client.holds
    client.place(link)
    link.credit = 0
    client.publish(1, "q", b"b")
    client.say(1, m.TxCommit())
    assert client.take() == []
    link.grant(1)
    client.tick()
    client.answer(m.TxCommitOk)
    client.holds = None
    assert bodies(client) == [b"a", b"b"]


# --- getting --------------------------------------------------------------------------------------


@pytest.mark.req("N13")
def test_a_get_is_no_consumer() -> None:
    client = made(m.BasicGet(queue="q"))
    client.say(1, m.QueueDeclare(queue="q", passive=True))
    assert client.answer(m.QueueDeclareOk).consumer_count == 0


class Silent:
    """A node that never answers a request for messages."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.mark.req("N13")
def test_a_get_from_a_node_that_goes_ends_its_channel() -> None:
    client = made()
    client.holds = []
    client.say(1, m.BasicGet(queue="node"))
    (link,) = client.holds
    link.accept(Silent())
    client.handle([])
    assert client.take() == []
    link.detach(None)
    client.handle([])
    closed = client.answer(m.ChannelClose)
    assert (closed.reply_code, closed.class_id, closed.method_id) == (404, 60, 70)


@pytest.mark.req("N17")
def test_a_get_waits_until_the_right_to_send_was_judged() -> None:
    client = made()
    client.holds = []
    client.publish(1, "node", b"a")
    client.say(1, m.BasicGet(queue="node"))
    # Messages published before are not lost between the two.
    (sending,) = client.holds
    sending.accept(Silent())
    client.handle([])
    client.tick()
    assert len(client.holds) == 2


# --- routing --------------------------------------------------------------------------------------


@pytest.mark.req("N11")
def test_requests_for_direct_replies_are_routed_each_by_its_own_headers() -> None:
    client = made(
        m.QueueDeclare(queue="other"),
        m.QueueBind(queue="q", exchange="amq.headers", arguments={"to": "q"}),
        m.QueueBind(queue="other", exchange="amq.headers", arguments={"to": "other"}),
        m.BasicConsume(queue=REPLY_TO, no_ack=True),
    )
    client.feed(
        b"".join(
            published(
                1,
                "",
                to.encode(),
                "amq.headers",
                properties=m.BasicProperties(reply_to=REPLY_TO, headers={"to": to}),
            )
            for to in ("q", "other")
        )
    )
    assert (bodies(client), bodies(client, "other")) == ([b"q"], [b"other"])


@pytest.mark.req("N13")
def test_blind_copies_are_not_told_of() -> None:
    client = made(m.QueueDeclare(queue="copy"))
    headers: dict[str, Any] = {"CC": ["copy"], "BCC": ["q"], "n": 1}
    client.publish(1, "nowhere", b"x", properties=m.BasicProperties(headers=headers))
    for queue in ("q", "copy"):
        client.say(1, m.BasicGet(queue=queue, no_ack=True))
        (found,) = client.contents()
        assert found.properties.headers == {"CC": ["copy"], "n": 1}


@pytest.mark.req("N12")
def test_what_is_unbound_gets_nothing_more() -> None:
    client = made(
        m.QueueBind(queue="q", exchange="amq.direct", routing_key="a"),
        m.QueueBind(queue="q", exchange="amq.direct", routing_key="b"),
        m.QueueUnbind(queue="q", exchange="amq.direct", routing_key="a"),
    )
    for key in ("a", "b"):
        client.publish(1, key, key.encode(), exchange="amq.direct")
    assert bodies(client) == [b"b"]


@pytest.mark.req("N11")
def test_an_exchange_that_is_not_there_is_deleted_without_an_error() -> None:
    client = made()
    client.say(1, m.ExchangeDelete(exchange="none"))
    client.answer(m.ExchangeDeleteOk)


def test_a_stream_is_read_from_a_time() -> None:
    client = made(
        m.QueueDeclare(queue="s", durable=True, arguments={"x-queue-type": "stream"}),
        m.BasicQos(prefetch_count=10),
    )
    world = client.world
    for body in (b"early", b"late"):
        client.publish(1, "s", body)
        world.now += 100
    offset: dict[str, object] = {"x-stream-offset": Seconds(int(world.now) - 150)}
    client.say(1, m.BasicConsume(queue="s", consumer_tag="t", arguments=offset))
    assert [each.body for each in client.contents()] == [b"late"]
