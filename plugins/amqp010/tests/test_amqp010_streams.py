"""Class stream of 0-10 at a real broker: packets, their consumers, and what is dropped or returned."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_amqp010 import content_properties, layouts, streams
from amqp_rt_amqp010.content_transfers import ContentTransfer
from amqp_rt_amqp010.limits import CONSUMERS_MAX, STREAM_WAITING_MAX, STREAM_WAITING_OCTETS_MAX
from call_counts import plain_only
from octets010 import Operation, Struct
from protocol010 import Failed
from served010 import serving
from subscribers010 import Attached, World

from amqp_rt.broker.nodes import Queue
from amqp_rt.fronts import Error, Message, Rejected
from amqp_rt.security.access import Access, Rights, Rule

pytestmark = pytest.mark.req("D18")


def packet(session: Attached, body: bytes, key: str = "q", **fields: Any) -> None:
    """Publish a packet, and wait for the completion of that."""
    properties = fields.pop("properties", {})
    session.call(
        "stream.publish",
        headers=[Struct("stream-properties", **properties)],
        body=body,
        exchange=fields.pop("exchange", ""),
        routing_key=key,
        **fields,
    )


def consume(session: Attached, queue: str = "q", tag: str = "c", **fields: Any) -> None:
    session.call("stream.consume", queue=queue, consumer_tag=tag, **fields)


def got(session: Attached, name: str = "stream.deliver") -> list[Operation]:
    session.client.world.pump()
    return [each for each in session.state.others if each.name == name]


def bodies(session: Attached) -> list[bytes | None]:
    return [each.body for each in got(session)]


def refused(session: Attached, name: str, /, **fields: Any) -> int | None:
    with pytest.raises(Failed) as caught:
        session.call(name, **fields)
    return caught.value.code


def test_a_packet_comes_as_it_was_published() -> None:
    world = World("q")
    session = world.client().attach()
    consume(session)
    properties = {
        "content_type": "video/x",
        "content_encoding": "gzip",
        "headers": {"a": 1, "b": "text"},
        "priority": 7,
        "timestamp": 1_234,
    }
    packet(session, b"frame", properties=properties)
    assert [each.consumer_tag for each in got(session, "stream.consume-ok")] == ["c"]
    (found,) = got(session)
    assert (found.consumer_tag, found.delivery_tag) == ("c", 1)
    assert (found.exchange, found.queue, found.body) == ("", "q", b"frame")
    (stated,) = found.headers or []
    assert stated == Struct("stream-properties", **properties)


def test_a_packet_leaves_its_queue_when_it_is_sent() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    packet(session, b"1")
    consume(session)
    assert bodies(session) == [b"1"]
    stats = world.stats("q")
    assert (stats.available, stats.acquired) == (0, 0)


def test_no_packet_comes_before_consume_ok() -> None:
    world = World("q")
    session = world.client().attach()
    packet(session, b"1")
    consume(session)
    assert [each.name for each in session.state.others] == ["stream.consume-ok", "stream.deliver"]


def test_nowait_gets_no_answer() -> None:
    world = World("q")
    session = world.client().attach()
    consume(session, nowait=True)
    packet(session, b"1")
    assert [each.name for each in session.state.others] == ["stream.deliver"]


def test_consumers_of_streams_get_packets_only_and_others_get_all() -> None:
    world = World("q", "r")
    session = world.client().attach()
    for queue in ("q", "r"):
        world.publish(queue, b"message")
        packet(session, b"packet", queue)
    consume(session)
    assert bodies(session) == [b"packet"]
    assert world.stats("q").available == 1
    session.subscribe("r")
    assert session.bodies() == [b"message", b"packet"]
    (_, found) = session.state.messages
    for each in found.headers or []:
        assert "x-content-class" not in (each.fields.get("application-headers") or {})


def test_messages_of_others_with_the_mark_are_packets() -> None:
    world = World("q")
    marked = Message(b"made", message_annotations={"x-content-class": "stream"})
    world.host.space().publish("q", marked.encode())
    session = world.client().attach()
    consume(session)
    assert bodies(session) == [b"made"]


def test_packets_of_low_priority_are_dropped_first() -> None:
    world = World("q")
    sender = world.client().attach(b"sender")
    session = world.client().attach()
    session.state.completes = False
    session.call("stream.qos", prefetch_count=1)
    assert len(got(session, "stream.qos-ok")) == 1
    consume(session)
    packet(sender, b"sent", properties={"priority": 0})
    for index in range(STREAM_WAITING_MAX):
        priority = 9 if index % 2 else index % 4
        packet(sender, b"%d" % index, properties={"priority": priority})
    assert bodies(session) == [b"sent"]
    for index in range(10):
        packet(sender, b"high %d" % index, properties={"priority": 5})
    session.call("stream.qos", prefetch_count=0)
    found = bodies(session)
    assert len(found) == 1 + STREAM_WAITING_MAX
    kept = [b"%d" % each for each in range(STREAM_WAITING_MAX) if each % 2]
    # Of those with the lowest priority, the oldest were dropped; what is left keeps its order.
    assert [each for each in found if each in kept] == kept
    dropped = {b"%d" % (4 * each) for each in range(10)}
    assert not dropped & set(found)
    assert found[-10:] == [b"high %d" % each for each in range(10)]


def test_octets_that_wait_are_bounded() -> None:
    waiting = streams.WaitingPackets()
    half = STREAM_WAITING_OCTETS_MAX // 2
    for priority in (5, 1, 5):
        waiting.add(streams.Packet(b"", b"", [], half, priority))
    assert [waiting.take().priority for _ in range(len(waiting))] == [5, 5]
    assert waiting.octets == 0
    waiting.add(streams.Packet(b"", b"", [], 3 * half, 0))
    assert len(waiting) == 1


def test_the_window_has_octets_too() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    session.call("stream.qos", prefetch_size=250)
    consume(session)
    for _ in range(3):
        packet(session, b"x" * 100)
    assert len(got(session)) == 2
    session.complete(got(session)[0].id)
    assert len(got(session)) == 3


def test_a_packet_larger_than_the_window_comes_alone() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    session.call("stream.qos", prefetch_size=10)
    consume(session)
    packet(session, b"x" * 100)
    packet(session, b"y" * 100)
    assert bodies(session) == [b"x" * 100]


def test_a_new_quality_of_service_applies_to_consumers_that_there_are() -> None:
    world = World("q")
    session = world.client().attach()
    session.state.completes = False
    session.call("stream.qos", prefetch_count=1)
    consume(session)
    packet(session, b"1")
    packet(session, b"2")
    assert bodies(session) == [b"1"]
    session.call("stream.qos", prefetch_count=0)
    assert bodies(session) == [b"1", b"2"]


def test_cancelled_consumers_get_nothing() -> None:
    world = World("q")
    session = world.client().attach()
    consume(session)
    session.call("stream.cancel", consumer_tag="c")
    packet(session, b"1")
    assert (bodies(session), world.stats("q").available) == ([], 1)
    consume(session)
    assert bodies(session) == [b"1"]


def test_a_consumer_without_local_gets_packets_of_others() -> None:
    world = World("q", "r")
    session = world.client().attach()
    consume(session, no_local=True)
    consume(session, "r", "d")
    packet(session, b"1")
    packet(session, b"1", "r")
    assert [each.consumer_tag for each in got(session)] == ["d"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [({"mandatory": True}, 312), ({"immediate": True}, 312), ({}, None)],
    ids=["mandatory", "immediate", "neither"],
)
def test_unroutable_packets_are_returned(flags: dict[str, bool], code: int | None) -> None:
    world = World("q")
    session = world.client().attach()
    packet(session, b"1", "lost", exchange="amq.direct", properties={"priority": 3}, **flags)
    found = got(session, "stream.return")
    assert [each.reply_code for each in found] == ([] if code is None else [code])
    for each in found:
        assert (each.exchange, each.routing_key, each.body) == ("amq.direct", "lost", b"1")
        assert each.headers == [Struct("stream-properties", priority=3)]


def test_packets_without_a_consumer_are_returned_if_they_are_immediate() -> None:
    world = World("q")
    session = world.client().attach()
    packet(session, b"1", immediate=True)
    assert [each.reply_code for each in got(session, "stream.return")] == [313]
    assert world.stats("q").available == 0
    consume(session)
    packet(session, b"2", immediate=True)
    assert bodies(session) == [b"2"]


def test_a_queue_without_room_drops_packets() -> None:
    world = World(Queue("q", length_max=1, overflow="reject"))
    session = world.client().attach()
    for each in (b"1", b"2"):
        packet(session, each)
    assert world.stats("q").available == 1
    packet(session, b"3", mandatory=True)
    assert [each.reply_code for each in got(session, "stream.return")] == [312]


def test_a_full_ring_with_priorities_drops_packets_of_the_lowest_first() -> None:
    """The declaration that the guide names, and not the order in which packets came, says what is dropped."""
    world = World()
    session = world.client().attach()
    arguments = {"qpid.max_count": 3, "qpid.policy_type": "ring", "qpid.priorities": 10}
    session.call("queue.declare", queue="q", arguments=arguments)
    for body, priority in ((b"9", 9), (b"1", 1), (b"5", 5), (b"4", 4), (b"8", 8)):
        packet(session, body, properties={"priority": priority})
    assert world.stats("q").available == 3
    consume(session)
    assert sorted(each.body or b"" for each in got(session, "stream.deliver")) == [b"5", b"8", b"9"]


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("stream.consume", {"consumer_tag": "c"}, 530),
        ("stream.consume", {"queue": "", "consumer_tag": "c"}, 530),
        ("stream.consume", {"queue": "q"}, 530),
        ("stream.consume", {"queue": "q", "consumer_tag": " "}, 530),
        ("stream.consume", {"queue": "none", "consumer_tag": "c"}, 404),
        ("stream.consume", {"queue": "q", "consumer_tag": "c", "arguments": {"x": 1}}, 540),
        ("stream.cancel", {"consumer_tag": "c"}, 404),
        ("stream.qos", {"global_": True}, 540),
    ],
    ids=[
        *("no-queue", "empty-queue", "no-tag", "blank-tag", "unknown-queue", "argument"),
        *("cancel-unknown", "global"),
    ],
)
def test_bad_input(name: str, fields: dict[str, Any], code: int) -> None:
    world = World("q")
    assert refused(world.client().attach(), name, **fields) == code


async def test_the_rights_of_streams_are_those_of_messages() -> None:
    access = Access(
        [
            Rule("open", Rights.LISTEN | Rights.SEND, anonymous=True),
            Rule("inbox", Rights.SEND, anonymous=True),
            Rule("outbox", Rights.LISTEN, anonymous=True),
        ]
    )
    async with serving(access=access) as served, served.client() as client:
        for name in ("open", "inbox", "outbox"):
            await served.broker.declare(Queue(name))
        session = await client.session(b"open")
        await session.call("stream.consume", queue="open", consumer_tag="c")
        await session.call(
            "stream.publish",
            headers=[Struct("stream-properties", priority=1)],
            body=b"1",
            routing_key="open",
        )
        await session.until(lambda: len(session.state.others) == 2)
        assert session.state.others[-1].body == b"1"
        reader = await client.session(b"reader")
        with pytest.raises(Failed) as caught:
            await reader.call("stream.consume", queue="inbox", consumer_tag="c")
        assert caught.value.code == 403
        writer = await client.session(b"writer")
        with pytest.raises(Failed) as caught:
            await writer.call(
                "stream.publish",
                headers=[Struct("stream-properties", priority=1)],
                body=b"1",
                routing_key="outbox",
            )
        assert caught.value.code == 403
        # One failing session does not harm another.
        await session.sync()


def test_a_tag_is_used_once() -> None:
    world = World("q")
    session = world.client().attach()
    consume(session)
    assert refused(session, "stream.consume", queue="q", consumer_tag="c") == 530


def test_exclusive_consumers_are_alone() -> None:
    world = World("q")
    consume(world.client().attach(), exclusive=True)
    other = world.client().attach(b"other")
    assert refused(other, "stream.consume", queue="q", consumer_tag="c") == 405


def test_consumers_are_bounded() -> None:
    world = World("q")
    session = world.client().attach()
    for index in range(CONSUMERS_MAX):
        consume(session, tag=str(index))
    assert refused(session, "stream.consume", queue="q", consumer_tag="more") == 506


def test_an_unknown_exchange_fails() -> None:
    world = World("q")
    session = world.client().attach()
    with pytest.raises(Failed) as caught:
        packet(session, b"1", exchange="none")
    assert caught.value.code == 404


def test_an_exchange_that_is_not_for_the_user_fails() -> None:
    world = World("q")
    world.denied.add((Rights.SEND, "q"))
    session = world.client().attach()
    with pytest.raises(Failed) as caught:
        packet(session, b"1")
    assert caught.value.code == 403


def test_consumers_end_with_their_queue() -> None:
    world = World("q")
    session = world.client().attach()
    consume(session)
    other = world.client().attach(b"other")
    other.call("queue.delete", queue="q")
    world.pump()
    assert session.state.exception is not None
    assert session.state.exception.error_code == 408


def test_packets_that_wait_do_not_outlive_the_attachment() -> None:
    world = World("q")
    sender = world.client().attach(b"sender")
    client = world.client()
    session = client.attach(timeout=60)
    session.state.completes = False
    session.call("stream.qos", prefetch_count=1)
    consume(session)
    session.state.complete(*(each.id for each in session.state.others))
    for each in (b"1", b"2"):
        packet(sender, each)
    assert bodies(session) == [b"1"]
    client.cut()
    packet(sender, b"3")
    session.state.completes = True
    again = world.client().go_on(session.state)
    again.complete(*(each.id for each in got(again)))
    # Those in the queue stay there meanwhile.
    assert bodies(again) == [b"1", b"3"]


@plain_only
def test_equal_headers_are_converted_once_and_packets_keep_their_own_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {"in": 0, "out": 0}

    def counted(name: str, made: Any) -> Any:
        def make(*arguments: Any) -> Any:
            counts[name] += 1
            return made(*arguments)

        return make

    for name, made in (("in", "IncomingHeader"), ("out", "OutgoingFields")):
        monkeypatch.setattr(
            content_properties, made, counted(name, getattr(content_properties, made))
        )
    world = World("q", "r")
    session = world.client().attach()
    consume(session)
    consume(session, "r", "d")
    properties = {"priority": 3, "headers": {"a": 1}}
    for body in (b"1", b"2", b"3"):
        packet(session, body, properties=properties)
    assert counts == {"in": 1, "out": 1}
    packet(session, b"4", "r", properties=properties)
    packet(session, b"5", properties={"priority": 4})
    assert counts == {"in": 3, "out": 3}
    assert bodies(session) == [b"1", b"2", b"3", b"4", b"5"]
    assert [each.headers[0].priority for each in got(session) if each.headers] == [3, 3, 3, 3, 4]


@pytest.mark.parametrize("mandatory", [True, False])
def test_packets_too_large_for_a_queue_are_returned_if_that_is_wanted(mandatory: bool) -> None:
    world = World("q")
    session = world.client().attach()
    handler = world.clients[0].engine.sessions[session.state.channel]._handler
    publisher = handler._parts._publisher
    command = layouts.StreamPublish(routing_key="q", mandatory=mandatory)
    transfer = ContentTransfer(publisher, 0, command, b"", (b"x",))
    transfer.awaited = 1
    transfer(Rejected(Error("amqp:link:message-size-exceeded")))
    session.client.world.pump()
    codes = [each.reply_code for each in got(session, "stream.return")]
    assert codes == ([311] if mandatory else [])
    assert session.state.exception is None
