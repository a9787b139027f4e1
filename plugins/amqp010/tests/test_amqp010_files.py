"""Consumers of class file of 0-10 at a real broker: delivery by staging, windows, acknowledgement, other classes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp010.limits import (
    CONSUMERS_MAX,
    HASHED_TURN,
    OUTGOING_FILES_MAX,
    OUTGOING_FILES_OCTETS_MAX,
)
from amqp_rt_amqp091 import BasicProperties
from amqp_rt_amqp091 import connect as connect091
from client010 import connected
from files010 import Receiver, send_file
from octets010 import Struct
from protocol010 import Failed
from served010 import serving
from subscribers010 import Attached, World

from amqp_rt import Broker, connect
from amqp_rt.broker.nodes import Queue
from amqp_rt.fronts import Message
from amqp_rt.security.access import Access, Rights, Rule

pytestmark = pytest.mark.req("D18")


def received(world: World, queue: str = "q", **fields: Any) -> Receiver:
    """Return a receiver that consumes from *queue*."""
    receiver = Receiver(world.client().attach(b"receiver"))
    receiver.consume(queue, **fields)
    return receiver


def refused(session: Attached, name: str, /, **fields: Any) -> int | None:
    with pytest.raises(Failed) as caught:
        session.call(name, **fields)
    return caught.value.code


# --- delivery ----------------------------------------------------------------------------------------


def test_a_file_comes_as_it_was_published() -> None:
    world = World("q")
    receiver = received(world)
    properties = {
        "content_type": "text/x",
        "content_encoding": "gzip",
        "headers": {"a": 1, "b": "text"},
        "priority": 7,
        "reply_to": "replies",
        "message_id": "m-1",
        "filename": "a/b.txt",
        "timestamp": 1_234,
        "cluster_id": "c",
    }
    send_file(world.client().attach(), b"content", **properties)
    (found,) = receiver.run()
    assert found.body == b"content"
    assert found.properties == Struct("file-properties", **properties)
    deliver = found.deliver
    assert (deliver.consumer_tag, deliver.delivery_tag) == ("c", 1)
    assert (deliver.exchange, deliver.routing_key, deliver.redelivered) == ("", "q", False)


def test_files_come_in_their_order_after_consume_ok() -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2", b"3"):
        send_file(sender, each)
    receiver = received(world)
    assert [each.body for each in receiver.run()] == [b"1", b"2", b"3"]
    assert receiver.session.state.others[0].name == "file.consume-ok"
    assert [each.tag for each in receiver.delivered] == [1, 2, 3]


def test_nowait_gets_no_answer() -> None:
    receiver = received(World("q"), nowait=True)
    assert receiver.session.state.others == []


def test_staging_continues_where_the_client_says() -> None:
    world = World("q")
    body = b"0123456789"
    send_file(world.client().attach(), body)
    client = world.client()
    first = Receiver(client.attach(b"r"), answers=False)
    first.consume()
    first.run()
    (identifier,) = first.unanswered
    client.cut()
    # The client had got a part; the file has the same name again.
    second = Receiver(world.client().attach(b"r"))
    second.staged[identifier] = bytearray(body[:4])
    second.consume()
    (found,) = second.run()
    stages = [each.body for each in second.session.state.others if each.name == "file.stage"]
    assert (stages, found.body) == ([b"456789"], body)
    # It was not delivered before.
    assert not found.deliver.redelivered


def test_a_large_file_has_one_name_and_is_hashed_in_turns() -> None:
    world = World("q")
    body = os.urandom(HASHED_TURN) * 2 + b"x"
    send_file(world.client().attach(), body)
    receiver = received(world)
    (found,) = receiver.run()
    name = found.deliver.identifier
    receiver.session.client.cut()
    again = received(world)
    (found,) = again.run()
    assert (found.deliver.identifier, found.body) == (name, body)


def test_equal_files_are_staged_apart_while_the_client_has_both() -> None:
    world = World("q")
    sender = world.client().attach()
    for _ in range(2):
        send_file(sender, b"same")
    receiver = received(world)
    names = [each.deliver.identifier for each in receiver.run()]
    assert len(set(names)) == 2
    receiver.ack(2, multiple=True)
    send_file(sender, b"same")
    (third,) = receiver.run()
    assert third.deliver.identifier == names[0]


def test_opens_that_are_not_answered_are_bounded() -> None:
    world = World("q")
    sender = world.client().attach()
    for _ in range(OUTGOING_FILES_MAX + 1):
        send_file(sender, b"x")
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    assert len(receiver.unanswered) == OUTGOING_FILES_MAX
    assert world.stats("q").available == 1
    receiver.answers = True
    for _ in range(OUTGOING_FILES_MAX):
        receiver.answer()
    assert len(receiver.run()) == OUTGOING_FILES_MAX + 1


def test_octets_of_opens_that_are_not_answered_are_bounded() -> None:
    world = World("q")
    sender = world.client().attach()
    body = b"x" * (OUTGOING_FILES_OCTETS_MAX // 4)
    for _ in range(5):
        send_file(sender, body)
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    assert (len(receiver.unanswered), world.stats("q").available) == (4, 1)


@pytest.mark.parametrize(("staged", "code"), [(6, 542), (2**64 - 1, 542)])
def test_a_client_does_not_have_more_than_there_is(staged: int, code: int) -> None:
    world = World("q")
    send_file(world.client().attach(), b"12345")
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    assert refused(receiver.session, "file.open-ok", staged_size=staged) == code
    assert world.stats("q").available == 1


def test_open_ok_follows_an_open() -> None:
    assert refused(World("q").client().attach(), "file.open-ok", staged_size=0) == 409


def test_a_client_that_has_all_gets_an_empty_stage() -> None:
    world = World("q")
    send_file(world.client().attach(), b"12345")
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    receiver.staged[receiver.unanswered[0]] = bytearray(b"12345")
    receiver.answer()
    (found,) = receiver.run()
    assert found.body == b"12345"


def test_a_session_that_is_resumed_goes_on() -> None:
    world = World("q")
    send_file(world.client().attach(), b"12345")
    client = world.client()
    session = client.attach(b"r", timeout=60)
    receiver = Receiver(session, answers=False)
    receiver.consume()
    receiver.run()
    client.cut()
    receiver.session = world.client().go_on(session.state)
    receiver.answer()
    (found,) = receiver.run()
    receiver.ack(found.tag)
    stats = world.stats("q")
    assert (found.body, stats.available, stats.acquired) == (b"12345", 0, 0)


# --- windows -----------------------------------------------------------------------------------------


def test_no_more_is_sent_than_the_window_allows() -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2", b"3"):
        send_file(sender, each)
    receiver = Receiver(world.client().attach(b"r"))
    receiver.session.call("file.qos", prefetch_count=2)
    assert receiver.session.state.others[-1].name == "file.qos-ok"
    receiver.consume()
    assert [each.body for each in receiver.run()] == [b"1", b"2"]
    receiver.ack(1)
    assert [each.body for each in receiver.run()] == [b"3"]


def test_the_window_has_octets_too() -> None:
    world = World("q")
    sender = world.client().attach()
    for _ in range(3):
        send_file(sender, b"x" * 100)
    send_file(sender, b"y" * 300)
    receiver = Receiver(world.client().attach(b"r"))
    receiver.session.call("file.qos", prefetch_size=200)
    receiver.consume()
    assert len(receiver.run()) == 2
    receiver.ack(1)
    assert len(receiver.run()) == 1
    receiver.ack(2)
    assert receiver.run() == []
    # A file larger than the window comes alone: it is not sent in advance then.
    receiver.ack(3)
    assert [each.body for each in receiver.run()] == [b"y" * 300]


def test_the_window_does_not_apply_without_acknowledgement() -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2"):
        send_file(sender, each)
    receiver = Receiver(world.client().attach(b"r"))
    receiver.session.call("file.qos", prefetch_count=1, prefetch_size=1)
    receiver.consume(no_ack=True)
    assert len(receiver.run()) == 2


# --- outcomes ----------------------------------------------------------------------------------------


def test_files_without_acknowledgement_are_gone_when_they_are_delivered() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume(no_ack=True)
    receiver.run()
    assert world.stats("q").acquired == 1
    receiver.answer()
    receiver.run()
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)


def test_files_that_are_not_acknowledged_go_back() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    assert len(receiver.run()) == 1
    receiver.session.client.cut()
    (found,) = received(world).run()
    assert found.deliver.redelivered


@pytest.mark.parametrize(
    ("tag", "multiple", "left"), [(2, False, 2), (2, True, 1), (0, True, 0), (3, True, 0)]
)
def test_one_or_many_are_acknowledged(tag: int, multiple: bool, left: int) -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2", b"3"):
        send_file(sender, each)
    receiver = received(world)
    receiver.run()
    receiver.ack(tag, multiple=multiple)
    assert world.stats("q").acquired == left


@pytest.mark.parametrize(
    ("tag", "multiple"), [(0, False), (2, False), (2, True), (2**64 - 1, True), (1, False)]
)
def test_a_tag_names_a_delivered_file(tag: int, multiple: bool) -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2"):
        send_file(sender, each)
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    receiver.answer()
    receiver.run()
    if tag == 1:
        receiver.ack(1)
    # The second file is open, but has not been delivered.
    assert refused(receiver.session, "file.ack", delivery_tag=tag, multiple=multiple) == 542


@pytest.mark.parametrize("name", ["file.ack", "file.reject"])
def test_a_tag_is_valid_in_its_session(name: str) -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.run()
    assert refused(world.client().attach(b"other"), name, delivery_tag=1) == 542
    assert world.stats("q").acquired == 1


def test_a_rejected_file_is_discarded() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.run()
    receiver.reject(1)
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)


def test_a_requeued_file_goes_to_another_client() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.run()
    receiver.reject(1, requeue=True)
    assert receiver.run() == []
    assert world.stats("q").available == 1
    other = Receiver(world.client().attach(b"other"))
    other.consume()
    (found,) = other.run()
    assert (found.body, found.deliver.redelivered) == (b"1", True)


def test_a_requeued_file_does_not_come_to_another_consumer_of_its_session() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.run()
    receiver.consume(tag="d")
    receiver.reject(1, requeue=True)
    assert receiver.run() == []
    assert world.stats("q").available == 0


def test_a_file_that_fails_too_often_becomes_a_dead_letter() -> None:
    world = World(Queue("q", max_deliveries=2, dead_letter="dead"), "dead")
    send_file(world.client().attach(), b"1")
    for _ in range(2):
        receiver = received(world)
        assert len(receiver.run()) == 1
        receiver.reject(1, requeue=True)
        receiver.session.client.cut()
    (found,) = received(world, "dead").run()
    assert found.body == b"1"


@pytest.mark.parametrize("commits", [True, False])
def test_acknowledgements_belong_to_the_transaction(commits: bool) -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.session.call("tx.select")
    receiver.run()
    receiver.ack(1)
    assert world.stats("q").acquired == 1
    receiver.session.call("tx.commit" if commits else "tx.rollback")
    assert world.stats("q").acquired == (0 if commits else 1)
    if not commits:
        receiver.ack(1, multiple=True)
        receiver.session.call("tx.commit")
        assert world.stats("q").acquired == 0


def test_a_file_rejected_in_its_transaction_is_gone_after_the_rollback() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.session.call("tx.select")
    receiver.run()
    receiver.ack(1)
    receiver.reject(1)
    receiver.session.call("tx.rollback")
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 0)


# --- consumers ---------------------------------------------------------------------------------------


def test_cancelled_consumers_get_nothing_more_and_settle_what_they_have() -> None:
    world = World("q")
    sender = world.client().attach()
    for each in (b"1", b"2"):
        send_file(sender, each)
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    receiver.answer()
    receiver.run()
    receiver.session.call("file.cancel", consumer_tag="c")
    assert (world.stats("q").available, world.stats("q").acquired) == (1, 1)
    # The second was open: it is staged without content, so that later stages belong to later opens.
    receiver.answer()
    assert receiver.run() == []
    receiver.answers = True
    receiver.ack(1)
    receiver.consume()
    (found,) = receiver.run()
    assert (found.body, found.tag) == (b"2", 3)
    receiver.ack(3)
    assert world.stats("q").acquired == 0


def test_consumers_get_files_only_and_others_get_all() -> None:
    world = World("q", "r")
    sender = world.client().attach()
    for queue in ("q", "r"):
        world.publish(queue, b"message")
        send_file(sender, b"file", queue)
    (found,) = received(world).run()
    assert found.body == b"file"
    sender.subscribe("r")
    assert sender.bodies() == [b"message", b"file"]
    (_, message) = sender.state.messages
    for each in message.headers or []:
        assert "x-content-class" not in (each.fields.get("application-headers") or {})


def test_messages_of_others_with_the_mark_are_files() -> None:
    world = World("q")
    marked = Message(b"made", message_annotations={"x-content-class": "file", "x-filename": "n"})
    world.host.space().publish("q", marked.encode())
    (found,) = received(world).run()
    assert (found.body, found.properties.filename) == (b"made", "n")


def test_a_consumer_without_local_gets_files_of_others() -> None:
    world = World("q")
    session = world.client().attach()
    receiver = Receiver(session)
    receiver.consume(no_local=True)
    send_file(session, b"own")
    send_file(world.client().attach(b"other"), b"other")
    assert [each.body for each in receiver.run()] == [b"other"]


def test_queues_with_priorities_deliver_files_by_them() -> None:
    world = World(Queue("q", priorities=10))
    sender = world.client().attach()
    for priority in (4, 5, 9):
        send_file(sender, b"%d" % priority, priority=priority)
    assert [each.body for each in received(world).run()] == [b"9", b"5", b"4"]


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("file.consume", {"consumer_tag": "c"}, 530),
        ("file.consume", {"queue": "", "consumer_tag": "c"}, 530),
        ("file.consume", {"queue": "q"}, 530),
        ("file.consume", {"queue": "q", "consumer_tag": " "}, 530),
        ("file.consume", {"queue": "none", "consumer_tag": "c"}, 404),
        ("file.consume", {"queue": "q", "consumer_tag": "c", "arguments": {"x": 1}}, 540),
        ("file.cancel", {"consumer_tag": "c"}, 404),
        ("file.qos", {"global_": True}, 540),
        ("file.reject", {"delivery_tag": 1}, 542),
    ],
    ids=[
        *("no-queue", "empty-queue", "no-tag", "blank-tag", "unknown-queue", "argument"),
        *("cancel-unknown", "global", "reject-unknown"),
    ],
)
def test_bad_input(name: str, fields: dict[str, Any], code: int) -> None:
    assert refused(World("q").client().attach(), name, **fields) == code


def test_a_tag_is_used_once() -> None:
    receiver = received(World("q"))
    assert refused(receiver.session, "file.consume", queue="q", consumer_tag="c") == 530


def test_exclusive_consumers_are_alone() -> None:
    world = World("q")
    received(world, exclusive=True)
    other = world.client().attach(b"other")
    assert refused(other, "file.consume", queue="q", consumer_tag="c") == 405


def test_consumers_are_bounded() -> None:
    world = World("q")
    receiver = Receiver(world.client().attach())
    for index in range(CONSUMERS_MAX):
        receiver.consume(tag=str(index))
    assert refused(receiver.session, "file.consume", queue="q", consumer_tag="more") == 506


def test_cancelled_consumers_with_files_count() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = received(world)
    receiver.run()
    receiver.session.call("file.cancel", consumer_tag="c")
    for index in range(CONSUMERS_MAX - 1):
        receiver.consume(tag=str(index))
    receiver.ack(1)
    receiver.consume(tag="c")
    assert refused(receiver.session, "file.consume", queue="q", consumer_tag="more") == 506


def test_consumers_end_with_their_queue() -> None:
    world = World("q")
    send_file(world.client().attach(), b"1")
    receiver = Receiver(world.client().attach(b"r"), answers=False)
    receiver.consume()
    receiver.run()
    world.client().attach(b"other").call("queue.delete", queue="q")
    world.pump()
    assert receiver.session.state.exception is not None
    assert receiver.session.state.exception.error_code == 408


# --- sockets -----------------------------------------------------------------------------------------


async def test_files_pass_with_rights_as_messages_do() -> None:
    access = Access(
        [
            Rule("open", Rights.LISTEN | Rights.SEND, anonymous=True),
            Rule("inbox", Rights.SEND, anonymous=True),
            Rule("outbox", Rights.LISTEN, anonymous=True),
        ]
    )
    header = [Struct("file-properties", filename="n")]
    async with serving(access=access) as served, served.client() as client:
        for name in ("open", "inbox", "outbox"):
            await served.broker.declare(Queue(name))
        session = await client.session(b"session")
        await session.call("file.consume", queue="open", consumer_tag="c")
        await session.call("file.open", identifier="f", content_size=4)
        await session.call("file.stage", headers=header, body=b"file")
        await session.call("file.publish", routing_key="open", identifier="f")
        others = session.state.others
        await session.until(lambda: others[-1].name == "file.open")
        await session.call("file.open-ok", staged_size=0)
        await session.until(lambda: others[-1].name == "file.deliver")
        assert others[-2].body == b"file"
        await session.call("file.ack", delivery_tag=others[-1].delivery_tag)
        reader = await client.session(b"reader")
        with pytest.raises(Failed) as caught:
            await reader.call("file.consume", queue="inbox", consumer_tag="c")
        assert caught.value.code == 403
        writer = await client.session(b"writer")
        await writer.call("file.open", identifier="f", content_size=1)
        await writer.call("file.stage", headers=header, body=b"x")
        with pytest.raises(Failed) as caught:
            await writer.call("file.publish", routing_key="outbox", identifier="f")
        assert caught.value.code == 403
        await session.sync()


@pytest.mark.req("N19")
async def test_files_pass_between_three_protocols() -> None:
    async with Broker(fronts=[Front(), "amqp091"], volatile=True) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with (
            connected(stream) as client,
            connect(url) as amqp10,
            connect091(url) as amqp091,
            amqp091.channel() as channel,
        ):
            session = await client.session(b"session")
            header = [Struct("file-properties", filename="n", message_id="m")]

            async def send(body: bytes) -> None:
                await session.call("file.open", identifier="f", content_size=len(body))
                await session.call("file.stage", headers=header, body=body)
                await session.call("file.publish", routing_key="q", identifier="f")

            await send(b"to 1.0")
            async with amqp10.receiver("q") as receiver:
                message = await receiver.receive()
                message.accept()
            assert (message.body, message.message.properties.message_id) == (b"to 1.0", "m")
            assert message.message.message_annotations["x-filename"] == "n"
            await send(b"to 0-9-1")
            found = await channel.get("q", no_ack=True)
            assert found is not None
            assert (found.body, found.properties.message_id) == (b"to 0-9-1", "m")
            await send(b"to message")
            await session.subscribe("q", "d")
            transfer = await session.message()
            assert transfer.body == b"to message"
            session.accept(transfer.id)
            await session.call("message.cancel", destination="d")
            await session.call("file.consume", queue="q", consumer_tag="c")
            async with amqp10.sender("q") as sender:
                marks = {"x-content-class": "file", "x-filename": "made"}
                await sender.send(Message(b"from 1.0", message_annotations=marks))
            others = session.state.others
            await session.until(lambda: others[-1].name == "file.open")
            await session.call("file.open-ok", staged_size=0)
            await session.until(lambda: others[-1].name == "file.deliver")
            assert others[-2].body == b"from 1.0"
            assert others[-2].headers[0].filename == "made"
            await session.call("file.ack", delivery_tag=others[-1].delivery_tag)


@pytest.mark.req("N19")
async def test_a_header_of_091_marks_no_file_and_comes_back_as_it_was() -> None:
    async with Broker(fronts=[Front(), "amqp091"], volatile=True) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        async with (
            connected(stream) as client,
            connect091(url) as amqp091,
            amqp091.channel() as channel,
        ):
            session = await client.session(b"session")
            await session.call("file.consume", queue="q", consumer_tag="c")
            headers = {"x-content-class": "file", "x-filename": "n"}
            properties = BasicProperties(headers=headers)
            await channel.publish(b"marked", key="q", properties=properties)
            await session.sync()
            assert [each.name for each in session.state.others] == ["file.consume-ok"]
            found = await channel.get("q", no_ack=True)
            assert found is not None
            assert (found.body, found.properties.headers) == (b"marked", headers)
