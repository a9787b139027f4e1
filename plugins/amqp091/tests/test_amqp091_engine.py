"""The engine by its octets: handshake, frames, content, codes, closes, order (0-9-1 §4)."""

from __future__ import annotations

from math import inf

import pytest
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.frames import (
    BODY,
    FRAME_MIN_SIZE,
    HEADER,
    HEARTBEAT_FRAME,
    METHOD,
    PROTOCOL_HEADER,
    frame,
    method_frame,
)
from amqp_rt_amqp091.lifecycle import TRANSITIONS, Stage
from hypothesis import given
from hypothesis import strategies as st
from worlds091 import Client, Content, World, published

from amqp_rt.addresses import REPLY_TO
from amqp_rt.events import AttachRequested, Closed, ConnectionFailed, Opened
from amqp_rt.fronts import Error, Limits, Message
from amqp_rt.security.access import Rights


def closed_with(client: Client, code: int) -> m.ConnectionClose:
    """The connection was closed with *code*, and the peer's answer ends it."""
    close = next(each for _, each in client.take() if isinstance(each, m.ConnectionClose))
    assert close.reply_code == code, close.reply_text
    assert client.engine.stage is Stage.CLOSING
    client.say(0, m.ConnectionCloseOk())
    assert client.engine.finished
    return close


def ended_with(client: Client, code: int, channel: int = 1) -> m.ChannelClose:
    """The channel was closed with *code*, and nothing else."""
    number, close = client.take()[-1]
    assert isinstance(close, m.ChannelClose), close
    assert (number, close.reply_code) == (channel, code), close.reply_text
    return close


# --- Header and handshake -------------------------------------------------------------------------


@pytest.mark.req("N1", "N2")
@pytest.mark.parametrize("header", [b"AMQP\x00\x00\x09\x02", b"AMQP\x01\x01\x00\x0a", b"GET / HT"])
def test_another_header_is_answered_with_ours(header: bytes) -> None:
    client = World().connect(opened=False)
    client.feed(header)
    assert client.wire == PROTOCOL_HEADER
    assert client.engine.finished
    assert isinstance(client.events[-1], ConnectionFailed)


@pytest.mark.req("N9")
def test_the_handshake_in_pieces_of_every_size() -> None:
    whole = World().connect()
    assert whole.engine.stage is Stage.RUNNING
    said = PROTOCOL_HEADER + method_frame(
        0, m.ConnectionStartOk(mechanism="PLAIN", response=b"\0a\0b")
    )
    for size in (1, 3, 7):
        client = World().connect(opened=False)
        for at in range(0, len(said), size):
            client.feed(said[at : at + size])
        assert client.logins[0].mechanism == "ANONYMOUS"


@pytest.mark.req("N9")
def test_amqplain_says_what_plain_says() -> None:
    client = World().connect(opened=False, mechanisms=("PLAIN",), sasl_required=True)
    client.feed(PROTOCOL_HEADER)
    assert client.answer(m.ConnectionStart).mechanisms == b"PLAIN AMQPLAIN"
    table = b"\x05LOGINS\x00\x00\x00\x03ada\x08PASSWORDS\x00\x00\x00\x02pw"
    client.say(0, m.ConnectionStartOk(mechanism="AMQPLAIN", response=table))
    (login,) = client.logins
    assert (login.mechanism, login.response) == ("PLAIN", b"\0ada\0pw")
    client.handle(login.exchange.succeed("ada"))
    assert client.engine.peer.user == "ada"
    assert client.answer(m.ConnectionTune).frame_max == 131_072


@pytest.mark.req("N9")
def test_a_mechanism_may_ask_for_more() -> None:
    client = World().connect(opened=False, mechanisms=("SCRAM-SHA-256",), sasl_required=True)
    client.feed(PROTOCOL_HEADER)
    client.say(0, m.ConnectionStartOk(mechanism="SCRAM-SHA-256", response=b"first"))
    client.handle(client.logins[0].exchange.challenge(b"more"))
    assert client.take()[-1][1] == m.ConnectionSecure(challenge=b"more")
    client.say(0, m.ConnectionSecureOk(response=b"last"))
    assert client.logins[1].response == b"last"


@pytest.mark.req("N9")
@pytest.mark.parametrize("hears", [True, False])
def test_a_failed_login(hears: bool) -> None:
    client = World().connect(opened=False, mechanisms=("PLAIN",), sasl_required=True)
    client.feed(PROTOCOL_HEADER)
    client.heard.clear()
    capabilities = {"authentication_failure_close": hears}
    client.say(
        0,
        m.ConnectionStartOk(mechanism="PLAIN", client_properties={"capabilities": capabilities}),
    )
    client.logins[0].exchange.fail()
    client.handle([])
    if hears:
        closed_with(client, 403)
    else:
        assert client.take() == []
        assert client.engine.finished


def test_a_mechanism_that_is_not_offered_can_only_fail() -> None:
    client = World().connect(opened=False, mechanisms=("PLAIN",), sasl_required=True)
    client.feed(PROTOCOL_HEADER)
    client.say(0, m.ConnectionStartOk(mechanism="ANONYMOUS"))
    assert client.logins[0].exchange.refused
    client.handle(client.logins[0].exchange.succeed("somebody"))
    assert client.engine.finished


@pytest.mark.parametrize("field", ["frame_max", "channel_max"])
def test_more_than_was_offered_ends_without_a_word(field: str) -> None:
    client = World().connect(opened=False)
    client.feed(PROTOCOL_HEADER)
    client.say(0, m.ConnectionStartOk(mechanism="PLAIN", response=b"\0a\0b"))
    client.handle(client.logins[0].exchange.succeed(None))
    client.heard.clear()
    most = {"frame_max": 131_073, "channel_max": 65_535}
    client.say(0, m.ConnectionTuneOk(**{field: most[field]}))
    assert client.engine.finished
    assert client.take() == []


@pytest.mark.req("N3", "N9")
@pytest.mark.parametrize("stage", [Stage.START, Stage.TUNE, Stage.OPEN, Stage.RUNNING])
@pytest.mark.parametrize("method", list(m.METHODS.values()), ids=lambda each: str(each.name))
def test_stages_crossed_with_methods_on_channel_0(stage: Stage, method: type[m.Method]) -> None:
    if method in TRANSITIONS[stage]:
        return
    client = at_stage(stage)
    client.say(0, method())
    if stage is Stage.START:
        assert client.engine.finished
    else:
        closed_with(client, 503)


def at_stage(stage: Stage) -> Client:
    client = World().connect(opened=False)
    client.feed(PROTOCOL_HEADER)
    if stage is not Stage.START:
        client.say(0, m.ConnectionStartOk(mechanism="PLAIN", response=b"\0a\0b"))
        client.handle(client.logins[0].exchange.succeed(None))
    if stage in (Stage.OPEN, Stage.RUNNING):
        client.say(0, m.ConnectionTuneOk(channel_max=10, frame_max=4096))
    if stage is Stage.RUNNING:
        client.say(0, m.ConnectionOpen(virtual_host="/"))
    assert client.engine.stage is stage
    client.heard.clear()
    return client


@pytest.mark.req("N9")
@pytest.mark.parametrize("refused", [True, False])
def test_nothing_is_done_before_the_virtual_host_is_known(refused: bool) -> None:
    client = at_stage(Stage.OPEN)
    octets = b"".join(
        [
            method_frame(0, m.ConnectionOpen(virtual_host="elsewhere")),
            method_frame(1, m.ChannelOpen()),
            method_frame(1, m.QueueDeclare(queue="q")),
        ]
    )
    (opened,) = client.engine.receive(octets, client.world.now)
    assert isinstance(opened, Opened)
    assert opened.peer.virtual_host == "vhost:elsewhere"
    if refused:
        client.engine.close(Error("amqp:not-found", "there is no such virtual host"))
    else:
        opened.peer.virtual_host = "elsewhere"
    client.feed(b"")
    if refused:
        closed_with(client, 530)
    else:
        heard = [type(each) for _, each in client.take()]
        assert heard == [m.ConnectionOpenOk, m.ChannelOpenOk, m.QueueDeclareOk]
    assert client.world.host.space("elsewhere").has("q") is not refused


def test_who_never_opens_is_dropped() -> None:
    world = World(Limits(handshake_s=5.0))
    client = world.connect(opened=False)
    client.feed(PROTOCOL_HEADER)
    assert client.engine.deadline == world.now + 5
    world.now += 5
    client.tick()
    assert client.engine.finished


# --- Frames ---------------------------------------------------------------------------------------


@pytest.mark.req("N2")
@pytest.mark.parametrize(
    "octets", [b"\x05\x00\x01\x00\x00\x00\x00\xce", b"\x04\x00\x00\x00\x00\x00\x00\xce"]
)
def test_a_bad_frame_type_closes_silently(octets: bytes) -> None:
    client = World().connect()
    client.feed(octets)
    assert client.engine.finished
    assert client.take() == []


@pytest.mark.req("N2")
def test_a_bad_end_octet_is_seen_before_anything_is_decoded() -> None:
    client = World().connect()
    nonsense = frame(METHOD, 1, b"\xff\xff\xff\xff nonsense")
    client.feed(nonsense[:-1] + b"\xcd")
    assert client.engine.finished
    assert client.take() == []


@pytest.mark.req("N3")
def test_a_frame_over_the_agreed_size() -> None:
    client = World().connect()
    client.feed(frame(BODY, 1, b"x" * FRAME_MIN_SIZE))
    closed_with(client, 501)


WRONG_CHANNEL: list[tuple[bytes, int]] = [
    (method_frame(5, m.BasicGet(queue="q")), 504),
    (method_frame(101, m.ChannelOpen()), 504),
    (method_frame(1, m.ChannelOpen()), 504),
    (frame(HEADER, 0, b"\x00\x3c\x00\x00" + b"\0" * 10), 504),
    (frame(BODY, 0, b"x"), 504),
    (frame(BODY, 5, b"x"), 504),
    (method_frame(0, m.ChannelOpen()), 503),
    (method_frame(0, m.BasicGet(queue="q")), 503),
    (method_frame(1, m.ConnectionTuneOk()), 503),
    (method_frame(1, m.BasicGetOk()), 503),
    (frame(8, 1, b""), 501),
    (frame(8, 0, b"x"), 501),
    (frame(METHOD, 1, b"\x00\x3c\x00\x46\x00"), 502),
    (frame(METHOD, 1, b"\x00\x3c\xff\xff"), 540),
    (frame(METHOD, 1, b"\x00\x1e\x00\x0a"), 540),
]


@pytest.mark.req("N3", "N7")
@pytest.mark.parametrize(("octets", "code"), WRONG_CHANNEL)
def test_what_is_wrong_with_a_frame_ends_the_connection(octets: bytes, code: int) -> None:
    world = World()
    client, other = world.connect(), world.connect()
    client.feed(octets)
    closed_with(client, code)
    other.say(1, m.QueueDeclare(queue="q"))
    assert other.answer(m.QueueDeclareOk).queue == "q"


def test_a_login_comes_before_channels() -> None:
    client = at_stage(Stage.OPEN)
    client.say(1, m.ChannelOpen())
    closed_with(client, 504)


# --- Content --------------------------------------------------------------------------------------

_PUBLISH = method_frame(1, m.BasicPublish(routing_key="q"))
_HEADER = frame(HEADER, 1, b"\x00\x3c\x00\x00" + (5).to_bytes(8, "big") + b"\0\0")

WRONG_CONTENT: list[tuple[bytes, int]] = [
    (_HEADER, 505),
    (frame(BODY, 1, b"x"), 505),
    (_PUBLISH + frame(BODY, 1, b"x"), 505),
    (_PUBLISH + method_frame(1, m.BasicQos()), 505),
    (_PUBLISH + _HEADER + _HEADER, 505),
    (_PUBLISH + _HEADER + frame(BODY, 1, b"ab") + method_frame(1, m.BasicQos()), 505),
    (_PUBLISH + _HEADER + frame(BODY, 1, b"abcdef"), 501),
    (_PUBLISH + frame(HEADER, 1, b"\x00\x32\x00\x00" + b"\0" * 10), 505),
    (_PUBLISH + frame(HEADER, 1, b"\x00\x3c\x00\x01" + b"\0" * 10), 502),
    (_PUBLISH + frame(HEADER, 1, b"\x00\x3c\x00\x00" + b"\0" * 7), 502),
]


@pytest.mark.req("N5", "N7")
@pytest.mark.parametrize(("octets", "code"), WRONG_CONTENT)
def test_what_is_wrong_with_content_ends_the_connection(octets: bytes, code: int) -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    client.feed(octets)
    closed_with(client, code)


@pytest.mark.req("N5")
def test_content_comes_in_any_number_of_frames_and_empty_ones_too() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    client.heard.clear()
    client.feed(_PUBLISH + _HEADER)
    for part in (b"a", b"", b"bcd", b"", b"e"):
        client.feed(frame(BODY, 1, part))
    client.feed(_PUBLISH + frame(HEADER, 1, b"\x00\x3c\x00\x00" + b"\0" * 10))
    for expected in (b"abcde", b""):
        client.say(1, m.BasicGet(queue="q"))
        (found,) = client.contents()
        assert found.body == expected


@pytest.mark.req("N7")
def test_a_message_over_the_limit_is_refused_at_its_header() -> None:
    client = World(Limits(message_size_max=100)).connect()
    client.feed(
        _PUBLISH + frame(HEADER, 1, b"\x00\x3c\x00\x00" + (101).to_bytes(8, "big") + b"\0\0")
    )
    ended_with(client, 311)
    assert not client.engine.over


@pytest.mark.req("N17")
def test_contents_of_two_channels_interleave() -> None:
    world = World()
    client = world.connect()
    client.say(2, m.ChannelOpen())
    client.say(1, m.QueueDeclare(queue="q"))
    client.heard.clear()
    one = split(published(1, "q", b"1" * 9000))
    two = split(published(2, "q", b"2" * 9000))
    for pair in zip(one, two, strict=True):
        client.feed(b"".join(pair))
    for expected in (b"1", b"2"):
        client.say(1, m.BasicGet(queue="q", no_ack=True))
        (found,) = client.contents()
        assert found.body == expected * 9000


def split(data: bytes) -> list[bytes]:
    """*data* by frames."""
    found = []
    while data:
        end = int.from_bytes(data[3:7], "big") + 8
        found.append(data[:end])
        data = data[end:]
    return found


# --- Heartbeats -----------------------------------------------------------------------------------


@pytest.mark.req("N6")
def test_heartbeats_keep_a_connection_and_silence_ends_it() -> None:
    world = World()
    client = world.connect()
    client.wire = b""
    for _ in range(4):
        world.now += 5
        client.tick()
        assert client.wire.endswith(HEARTBEAT_FRAME)
        client.feed(HEARTBEAT_FRAME)
    assert not client.engine.finished
    # Any octets count.
    world.now += 15
    client.feed(b"\x08")
    world.now += 15
    client.tick()
    assert not client.engine.finished
    world.now += 5
    client.tick()
    assert client.engine.finished
    assert client.take() == []


@pytest.mark.req("N6")
def test_who_wants_no_heartbeats_has_none() -> None:
    client = at_stage(Stage.RUNNING)
    assert client.engine.deadline == inf


# --- Closing --------------------------------------------------------------------------------------


@pytest.mark.req("N8")
def test_close_is_answered_and_ends_the_connection() -> None:
    client = World().connect()
    client.say(0, m.ConnectionClose(reply_code=200, reply_text="bye"))
    assert client.answer(m.ConnectionCloseOk)
    assert client.engine.finished
    assert client.events[-1] == Closed(None)


@pytest.mark.req("N8")
def test_close_crosses_close() -> None:
    client = World().connect()
    client.engine.close()
    client.say(0, m.ConnectionClose(reply_code=200))
    assert [type(each) for _, each in client.take()] == [m.ConnectionClose, m.ConnectionCloseOk]
    assert client.engine.finished


@pytest.mark.req("N8")
def test_channel_close_crosses_channel_close() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="nowhere", passive=True))
    ended_with(client, 404)
    # Frames that were on their way are dropped, whatever they are.
    client.say(1, m.BasicAck(delivery_tag=9))
    client.feed(frame(BODY, 1, b"x"))
    assert client.take() == []
    client.say(1, m.ChannelClose())
    assert client.answer(m.ChannelCloseOk)
    client.say(1, m.ChannelCloseOk())
    client.say(1, m.ChannelOpen())
    assert client.answer(m.ChannelOpenOk)


@pytest.mark.req("N8")
def test_a_close_that_nobody_answers_ends_in_time() -> None:
    world = World(Limits(close_grace_s=3.0))
    client = world.connect()
    client.engine.close()
    client.handle([])
    world.now += 3
    client.tick()
    assert client.engine.finished


def test_after_close_ok_nothing_is_heard() -> None:
    client = World().connect()
    client.say(0, m.ConnectionClose())
    client.heard.clear()
    client.say(1, m.QueueDeclare(queue="q"))
    assert client.take() == []
    assert not client.world.host.space().has("q")


# --- Order and visibility -------------------------------------------------------------------------


@pytest.mark.req("N17")
def test_what_was_published_is_seen_by_what_follows_it_in_one_chunk() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    client.heard.clear()
    client.feed(
        b"".join(published(1, "q", b"%d" % number) for number in range(5))
        + method_frame(1, m.QueueDeclare(queue="q", passive=True))
        + method_frame(1, m.BasicGet(queue="q", no_ack=True))
    )
    declared, got = (each for _, each in client.take())
    assert declared.message_count == 5
    assert (got.body, got.method.message_count) == (b"0", 4)


@pytest.mark.req("N17")
def test_order_is_kept_but_for_what_was_redelivered() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for number in range(6):
        client.publish(1, "q", b"%d" % number)
    client.say(1, m.BasicQos(prefetch_count=3), m.BasicConsume(queue="q", consumer_tag="t"))
    found = client.contents()
    assert [each.body for each in found] == [b"0", b"1", b"2"]
    client.say(1, m.BasicReject(delivery_tag=1, requeue=True))
    (again,) = client.contents()
    assert (again.body, again.method.redelivered, again.method.delivery_tag) == (b"0", True, 4)
    client.say(1, m.BasicAck(delivery_tag=4, multiple=True))
    assert [each.body for each in client.contents()] == [b"3", b"4", b"5"]


@pytest.mark.req("N17", "N18")
def test_what_has_not_been_answered_is_redelivered_in_its_place() -> None:
    world = World()
    client, other = world.connect(), world.connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for number in range(3):
        client.publish(1, "q", b"%d" % number)
    client.say(1, m.BasicGet(queue="q"), m.BasicGet(queue="q"))
    client.handle(client.engine.receive_eof(world.now))
    other.say(1, m.BasicConsume(queue="q", no_ack=True))
    found = other.contents()
    assert [(each.body, each.method.redelivered) for each in found] == [
        (b"0", True),
        (b"1", True),
        (b"2", False),
    ]


@pytest.mark.req("N10")
def test_channels_that_wait_hold_nobody_up() -> None:
    client = World().connect()
    client.say(2, m.ChannelOpen())
    client.say(1, m.QueueDeclare(queue="q"))
    client.heard.clear()
    client.holds = []
    client.say(1, m.BasicConsume(queue="q", consumer_tag="t"), m.BasicQos(prefetch_count=1))
    client.say(2, m.QueueDeclare(queue="q", passive=True))
    ((number, _),) = client.take()
    assert number == 2
    client.place(client.holds[0])
    client.handle([])
    assert [type(each) for _, each in client.take()] == [m.BasicConsumeOk, m.BasicQosOk]


def test_an_engine_does_so_much_at_a_time() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    client.engine.work_max = 4
    octets = b"".join(published(1, "q", b"%d" % number) for number in range(5))
    client.handle(client.engine.receive(octets, client.world.now))
    assert client.engine.unread
    assert client.world.stats("q").available == 1
    client.feed(b"")
    assert client.world.stats("q").available == 5


@pytest.mark.req("N10")
def test_consumers_of_all_channels_take_turns() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for number in (2, 3):
        client.say(number, m.ChannelOpen())
    for number in (1, 2, 3):
        client.say(number, m.BasicConsume(queue="q", no_ack=True))
    client.heard.clear()
    client.feed(b"".join(published(1, "q", b"x") for _ in range(30)))
    shares = [number for number, _ in client.take()]
    assert [shares.count(number) for number in (1, 2, 3)] == [10, 10, 10]


@pytest.mark.req("N16")
def test_flow_stops_and_starts_deliveries() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    client.say(1, m.BasicConsume(queue="q", no_ack=True), m.ChannelFlow(active=False))
    assert client.take()[-1][1] == m.ChannelFlowOk(active=False)
    client.publish(1, "q", b"x")
    assert client.take() == []
    client.say(1, m.ChannelFlow(active=True))
    answer, content = (each for _, each in client.take())
    assert (answer, content.body) == (m.ChannelFlowOk(active=True), b"x")


@pytest.mark.req("N15")
def test_prefetch_by_octets() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"), m.BasicQos(prefetch_size=250))
    for _ in range(5):
        client.publish(1, "q", b"x" * 100)
    client.say(1, m.BasicConsume(queue="q"))
    assert len(client.contents()) == 3
    client.say(1, m.BasicAck(delivery_tag=1))
    assert len(client.contents()) == 1


def test_a_full_output_stops_deliveries_until_it_is_taken() -> None:
    world = World(Limits(output_max=10_000))
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for _ in range(50):
        client.publish(1, "q", b"x" * 1000)
    engine = client.engine
    client.heard.clear()
    (asked,) = engine.receive(method_frame(1, m.BasicConsume(queue="q", no_ack=True)), world.now)
    assert isinstance(asked, AttachRequested)
    world.host.attach(asked.link)
    assert 10_000 <= engine.output_size < 13_000
    # There will be room for the consumer.
    assert engine.notifies
    rounds = 0
    while len(client.heard) < 51 and rounds < 100:
        client.handle([])
        rounds += 1
    assert len([1 for _, each in client.heard if isinstance(each, Content)]) == 50


def test_output_notifies_endpoints_only_if_something_waits_for_it() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"), m.ConfirmSelect())
    engine = client.engine
    engine.receive(published(1, "q", b"x"), client.world.now)
    assert not engine.notifies
    assert engine.take()
    client.holds = []
    client.say(1, m.BasicConsume(queue="q", consumer_tag="c"), m.BasicQos(prefetch_count=1))
    assert not engine.notifies
    client.place(client.holds.pop())
    # The channel goes on with the method behind that of the consumer.
    assert engine.notifies
    client.handle([])
    assert any(isinstance(each, m.BasicQosOk) for _, each in client.take())
    assert not engine.notifies


def test_replies_to_one_who_does_not_read_are_bounded() -> None:
    world = World(Limits(output_max=10_000))
    asking, other = world.connect(), world.connect()
    asking.say(1, m.BasicConsume(queue=REPLY_TO, no_ack=True), m.QueueDeclare(queue="rpc"))
    asking.publish(1, "rpc", b"ask", properties=m.BasicProperties(reply_to=REPLY_TO))
    other.say(1, m.BasicConsume(queue="rpc", no_ack=True))
    (request,) = (each for _, each in other.heard if isinstance(each, Content))
    address = request.properties.reply_to
    other.heard.clear()
    for _ in range(50):
        other.publish(1, address, b"x" * 1_000, mandatory=True)
    assert 10_000 <= asking.engine.output_size < 12_000
    # Messages that found no room were returned to their sender.
    returned = [each for _, each in other.heard if isinstance(each, Content)]
    assert {type(each.method) for each in returned} == {m.BasicReturn}
    asking.heard.clear()
    asking.handle([])
    replies = [each for _, each in asking.heard if isinstance(each, Content)]
    assert len(replies) + len(returned) == 50
    # A client that reads gets more.
    other.publish(1, address, b"last", mandatory=True)
    asking.handle([])
    assert [each.body for _, each in asking.heard if isinstance(each, Content)][-1] == b"last"


def test_replies_of_others_wait_for_one_who_does_not_read() -> None:
    world = World(Limits(output_max=10_000))
    asking = world.connect()
    asking.say(1, m.BasicConsume(queue=REPLY_TO, no_ack=True, consumer_tag="t"))
    (reply_link,) = world.container.replies.dynamic.values()
    reply = [Message(b"x" * 1_000).encode()]
    for _ in range(150):
        # Within one turn more of them go than deliveries of queues.
        if asking.engine.output_size < 10_000:
            assert reply_link.send_nowait(reply)
            if asking.engine.output_size > 5_000:
                asking.handle([])
    while reply_link.send_nowait(reply):
        assert asking.engine.output_size < 12_000
    # The consumer reads: there is room again.
    asking.handle([])
    assert reply_link.send_nowait(reply)
    # Not while the client has stopped the flow.
    asking.say(1, m.ChannelFlow(active=False))
    assert not reply_link.send_nowait(reply)
    asking.publish(1, reply_link.address, b"x", mandatory=True)
    (returned,) = asking.contents()[-1:]
    assert type(returned.method) is m.BasicReturn
    asking.say(1, m.ChannelFlow(active=True))
    assert reply_link.send_nowait(reply)
    asking.say(1, m.BasicCancel(consumer_tag="t"))
    assert not world.container.replies.dynamic
    assert reply_link.over


# --- Rights ---------------------------------------------------------------------------------------


@pytest.mark.req("N7")
@pytest.mark.parametrize(
    ("right", "address", "method"),
    [
        (Rights.MANAGE, "new", m.QueueDeclare(queue="new")),
        (Rights.MANAGE, "q", m.QueueDelete(queue="q")),
        (Rights.MANAGE, "q", m.QueuePurge(queue="q")),
        (Rights.MANAGE, "/exchanges/e", m.ExchangeDeclare(exchange="e", type="fanout")),
        (Rights.MANAGE, "/exchanges/e", m.ExchangeDelete(exchange="e")),
        (Rights.MANAGE, "q", m.QueueBind(queue="q", exchange="amq.topic")),
        (Rights.LISTEN, "/exchanges/amq.topic", m.QueueBind(queue="q", exchange="amq.topic")),
    ],
)
def test_what_takes_which_right(right: Rights, address: str, method: m.Method) -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q"))
    world.denied.add((right, address))
    client.say(1, method)
    ended_with(client, 403)


@pytest.mark.parametrize(
    ("exchange", "address"), [("", "q"), ("amq.fanout", "/exchanges/amq.fanout")]
)
def test_publishing_takes_the_right_to_send(exchange: str, address: str) -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q"), m.QueueBind(queue="q", exchange="amq.fanout"))
    world.denied.add((Rights.SEND, address))
    client.publish(1, "q", b"x", exchange=exchange)
    ended_with(client, 403)
    assert world.stats("q").available == 0


# --- Anything -------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_octets_end_in_order(data: bytes, stage: int) -> None:
    stages = [Stage.START, Stage.TUNE, Stage.OPEN, Stage.RUNNING]
    client = at_stage(stages[stage])
    client.feed(data)
    client.handle(client.engine.receive_eof(client.world.now))
    assert client.engine.finished


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 2), st.binary(max_size=60))))
def test_any_frames_end_in_order(frames: list[tuple[int, int, bytes]]) -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for kind, channel, payload in frames:
        client.feed(frame(kind, channel, payload))
    client.handle(client.engine.receive_eof(client.world.now))
    assert client.engine.finished
