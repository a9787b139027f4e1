"""The client's role: our engine talking to our engine, octets carried by hand (0-9-1 §2.4)."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.client import ClientChannel, ClientConnection, Consumer
from amqp_rt_amqp091.client_channels import EngineChannel
from amqp_rt_amqp091.client_engine import ClientEngine, ClientOptions, External, Plain
from amqp_rt_amqp091.faults import Fault
from amqp_rt_amqp091.frames import BODY, HEADER, PROTOCOL_HEADER, frame, method_frame
from amqp_rt_amqp091.lifecycle import CLIENT_TRANSITIONS, Stage
from amqp_rt_amqp091.values import ReceivedMessage
from hypothesis import given
from hypothesis import strategies as st
from worlds091 import Client, World

from amqp_rt.errors import AmqpError
from amqp_rt.events import Closed, ConnectionFailed, Event, Opened
from amqp_rt.fronts import Error, Limits

pytestmark = pytest.mark.req("N20")


class Conversation:
    """A client and a server, both of ours."""

    def __init__(self, world: World | None = None, piece: int = 1 << 20, **options: Any) -> None:
        self.world = world or World()
        self.server: Client = self.world.connect(opened=False)
        self.client = ClientEngine(ClientOptions(**options), self.world.now)
        self.events: list[Event] = []
        self.piece = piece
        #: Octets of the server that the client has heard.
        self._heard = 0

    def go(self) -> None:
        """Carry octets until both are silent."""
        while True:
            said = b"".join(self.client.take())
            for start in range(0, len(said), self.piece):
                self.server.feed(said[start : start + self.piece])
            for login in self.server.logins:
                self.server.handle(login.exchange.succeed(None))
            self.server.logins.clear()
            self.server.handle([])
            heard = self.server.wire[self._heard :]
            self._heard += len(heard)
            if not said and not heard:
                return
            for start in range(0, len(heard), self.piece):
                self.events += self.client.receive(heard[start : start + self.piece], 1000.0)

    def opened(self) -> Conversation:
        self.go()
        assert isinstance(self.events[-1], Opened)
        return self

    def channel(self) -> EngineChannel:
        channel = self.client.open_channel(lambda _answer: None)
        self.go()
        return channel

    def ask(self, channel: EngineChannel, method: m.Method) -> Any:
        """The answer to *method*."""
        found: list[Any] = []
        channel.ask(method, found.append)
        self.go()
        (answer,) = found
        return answer


@pytest.mark.req("N1", "N9")
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_the_handshake(piece: int) -> None:
    both = Conversation(piece=piece, properties={"connection_name": "mine"}, frame_max=8192)
    assert both.client.stage is Stage.START
    both.opened()
    assert both.client.peer.properties["product"] == "amqp-rt"
    assert both.server.engine.peer.properties["connection_name"] == "mine"
    assert both.client.frame_max_out == both.server.engine.frame_max_out == 8192
    # Heartbeats every minute, and an answer is waited for no more.
    assert both.client.deadline == both.world.now + 30
    quiet = Conversation(heartbeat_s=0).opened()
    assert quiet.client.deadline == inf


@pytest.mark.req("N5", "N13", "N14")
@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 20_000])
def test_messages_of_every_size_there_and_back(size: int, piece: int) -> None:
    both = Conversation(piece=piece, frame_max=4096).opened()
    channel = both.channel()
    assert both.ask(channel, m.QueueDeclare(queue="q")).queue == "q"
    confirmed: list[bool] = []
    channel.confirm(lambda _answer: None)
    body = bytes(index % 251 for index in range(size))
    properties = m.BasicProperties(message_id="m", headers={"n": "1"})
    channel.publish(m.BasicPublish(routing_key="q"), properties, body, confirmed.append)
    both.go()
    assert confirmed == [True]
    found: list[ReceivedMessage] = []
    channel.on_message = found.append
    assert isinstance(both.ask(channel, m.BasicConsume(queue="q")), m.BasicConsumeOk)
    (content,) = found
    assert (content.body, content.properties.message_id) == (body, "m")
    assert content.properties.headers == {"n": "1"}
    channel.say(m.BasicAck(delivery_tag=content.method.delivery_tag))
    both.go()
    assert both.ask(channel, m.BasicGet(queue="q")) == m.BasicGetEmpty()


def test_answers_come_in_order_to_who_asked() -> None:
    both = Conversation().opened()
    channel = both.channel()
    found: list[Any] = []
    channel.ask(m.QueueDeclare(queue="q"), found.append)
    channel.publish(m.BasicPublish(routing_key="q"), m.BasicProperties(), b"x")
    channel.ask(m.BasicGet(queue="q"), found.append)
    channel.ask(m.BasicGet(queue="q"), found.append)
    channel.ask(m.QueuePurge(queue="q"), found.append)
    both.go()
    assert [type(each) for each in found] == [
        *(m.QueueDeclareOk, ReceivedMessage, m.BasicGetEmpty, m.QueuePurgeOk)
    ]


@pytest.mark.req("N14")
def test_confirms_returns_and_refusals() -> None:
    both = Conversation().opened()
    channel = both.channel()
    both.ask(
        channel,
        m.QueueDeclare(queue="q", arguments={"x-max-length": 2, "x-overflow": "reject-publish"}),
    )
    said: list[tuple[int, bool]] = []
    back: list[ReceivedMessage] = []
    channel.on_message = back.append
    channel.confirm(lambda _answer: None)
    for number, key in enumerate(["q", "nowhere", "q", "q"]):
        channel.publish(
            m.BasicPublish(routing_key=key, mandatory=True),
            m.BasicProperties(),
            b"%d" % number,
            lambda taken, number=number: said.append((number, taken)),  # type: ignore[misc]
        )
    both.go()
    assert sorted(said) == [(0, True), (1, True), (2, True), (3, False)]
    (returned,) = back
    assert (returned.method.reply_code, returned.body) == (312, b"1")


@pytest.mark.req("N7", "N8")
def test_a_fault_ends_a_channel_and_its_number_is_free() -> None:
    both = Conversation().opened()
    one, other = both.channel(), both.channel()
    ended: list[Fault | None] = []
    one.on_end = ended.append
    never: list[Any] = []
    one.ask(m.QueueDeclare(queue="nowhere", passive=True), never.append)
    one.ask(m.QueueDeclare(queue="late"), never.append)
    both.go()
    assert [each.code for each in never] == [404, 404]
    assert ended == [never[0]]
    assert both.ask(one, m.BasicQos()).code == 404
    with pytest.raises(Fault, match="nowhere"):
        one.publish(m.BasicPublish(), m.BasicProperties(), b"")
    assert both.ask(other, m.QueueDeclare(queue="q")).queue == "q"
    assert both.channel().number == one.number


@pytest.mark.req("N8")
def test_channel_close_crosses_channel_close() -> None:
    both = Conversation().opened()
    channel = both.channel()
    answered: list[Any] = []
    channel.ask(m.QueueDeclare(queue="nowhere", passive=True), answered.append)
    channel.close()
    assert isinstance(answered[0], Fault)
    both.go()
    assert channel.number not in both.client.sessions
    assert channel.number not in both.server.engine.sessions
    assert both.ask(both.channel(), m.QueueDeclare(queue="q")).queue == "q"


@pytest.mark.req("N8")
@pytest.mark.parametrize("who", ["client", "server", "both"])
def test_who_closes_the_connection(who: str) -> None:
    both = Conversation().opened()
    channel = both.channel()
    ended: list[Fault | None] = []
    channel.on_end = ended.append
    if who != "server":
        both.client.close()
    if who != "client":
        both.server.engine.close(Error("amqp:connection:forced", "maintenance"))
    both.go()
    assert both.client.finished
    assert both.server.engine.finished
    (closed,) = [each for each in both.events if isinstance(each, Closed)]
    if who == "server":
        assert closed.error is not None
        assert closed.error.condition == "amqp:connection:forced"
    assert len(ended) == 1
    assert isinstance(both.ask(channel, m.BasicQos()), Fault)


@pytest.mark.req("N17")
def test_contents_of_two_channels_do_not_mix() -> None:
    both = Conversation(frame_max=4096).opened()
    found: dict[int, list[bytes]] = {}
    for number in (1, 2):
        channel = both.channel()
        both.ask(channel, m.QueueDeclare(queue=f"q{number}"))
        came = found[number] = []
        channel.on_message = lambda content, came=came: came.append(content.body)  # type: ignore[misc]
        both.ask(channel, m.BasicConsume(queue=f"q{number}", no_ack=True))
        for _ in range(3):
            channel.publish(
                m.BasicPublish(routing_key=f"q{3 - number}"),
                m.BasicProperties(),
                b"%d" % number * 9000,
            )
    both.go()
    # Channel 1 published before queue 2 was there: to nobody.
    assert found == {1: [b"2" * 9000] * 3, 2: []}


@pytest.mark.req("N16")
def test_a_server_that_stops_the_flow_is_answered() -> None:
    both = Conversation().opened()
    channel = both.channel()
    flows: list[bool] = []
    channel.on_flow = lambda: flows.append(channel.flowing)
    for active in (False, True):
        both.client.receive(method_frame(1, m.ChannelFlow(active=active)), 1000.0)
    said = b"".join(both.client.take())
    assert flows == [False, True]
    assert said == b"".join(
        method_frame(1, m.ChannelFlowOk(active=active)) for active in (False, True)
    )


@pytest.mark.req("N13")
def test_a_consumer_hears_that_its_queue_has_gone() -> None:
    both = Conversation().opened()
    channel = both.channel()
    gone: list[str] = []
    channel.on_cancel = gone.append
    both.ask(channel, m.QueueDeclare(queue="q"))
    both.ask(channel, m.BasicConsume(queue="q", consumer_tag="t"))
    both.ask(channel, m.QueueDelete(queue="q"))
    assert gone == ["t"]
    assert both.ask(channel, m.BasicRecover(requeue=True)) == m.BasicRecoverOk()


@pytest.mark.req("N9")
def test_blocked_and_unblocked() -> None:
    both = Conversation().opened()
    both.client.receive(method_frame(0, m.ConnectionBlocked(reason="low")), 1000.0)
    assert both.client.blocked == "low"
    both.client.receive(method_frame(0, m.ConnectionUnblocked()), 1000.0)
    assert both.client.blocked is None


class Publishers:
    """Tasks that publish on one channel without confirms, and what has become of each."""

    def __init__(self, nursery: trio.Nursery, **limits: Any) -> None:
        self.both = Conversation(limits=Limits(**limits)).opened()
        self.half = self.both.channel()
        connection = ClientConnection(self.both.client)
        self.channel = ClientChannel(connection, self.half, confirms=False)
        self.published = 0
        self.failed: list[str] = []
        self._nursery = nursery

    def start(self, count: int = 1, size: int = 1) -> None:
        for _ in range(count):
            self._nursery.start_soon(self._publish, b"x" * size)

    async def _publish(self, body: bytes) -> None:
        try:
            await self.channel.publish(body, key="q")
            self.published += 1
        except AmqpError as error:
            self.failed.append(error.description)

    async def hear(self, *said: tuple[int, m.Method]) -> None:
        """Take methods of the server in one chunk, and let the publishers run."""
        frames = b"".join(method_frame(number, method) for number, method in said)
        self.both.client.receive(frames, 1000.0)
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.req("N16")
async def test_publishers_hear_of_the_flow_however_often_it_is_stopped() -> None:
    async with trio.open_nursery() as nursery:
        publishers = Publishers(nursery)
        stop, go = ((1, m.ChannelFlow(active=active)) for active in (False, True))
        await publishers.hear(stop)
        publishers.start()
        await publishers.hear(stop)
        assert publishers.published == 0
        await publishers.hear(go)
        assert publishers.published == 1
        # On and off again in one chunk: whether it flows is looked at again.
        await publishers.hear(stop)
        publishers.start()
        await publishers.hear(go, stop)
        assert publishers.published == 1
        await publishers.hear(go)
    assert publishers.published == 2


@pytest.mark.req("N16")
async def test_publishers_that_wait_for_room_hear_that_the_flow_has_stopped() -> None:
    async with trio.open_nursery() as nursery:
        publishers = Publishers(nursery)
        await publishers.hear((0, m.ConnectionBlocked(reason="low")))
        publishers.start()
        await publishers.hear((1, m.ChannelFlow(active=False)))
        await publishers.hear((0, m.ConnectionUnblocked()))
        assert publishers.published == 0
        await publishers.hear((1, m.ChannelFlow(active=True)))
    assert publishers.published == 1


@pytest.mark.req("N16")
async def test_publishers_that_wake_together_do_not_exceed_the_output() -> None:
    async with trio.open_nursery() as nursery:
        publishers = Publishers(nursery, output_max=100_000)
        client = publishers.both.client
        publishers.start(20, 30_000)
        await trio.testing.wait_all_tasks_blocked()
        rounds = 0
        while publishers.published < 20:
            # The last one finds less than the bound.
            assert 100_000 <= client.output_size < 140_000
            client.take()
            await trio.testing.wait_all_tasks_blocked()
            rounds += 1
        assert rounds == 4


@pytest.mark.parametrize("blocked", ["flow", "connection", "both"])
async def test_publishers_of_a_channel_that_ends_wait_no_more(blocked: str) -> None:
    async with trio.open_nursery() as nursery:
        publishers = Publishers(nursery)
        if blocked != "flow":
            await publishers.hear((0, m.ConnectionBlocked(reason="low")))
        if blocked != "connection":
            await publishers.hear((1, m.ChannelFlow(active=False)))
        publishers.start(2)
        await publishers.hear((1, m.ChannelClose(reply_code=406, reply_text="no more")))
    assert publishers.failed == ["no more"] * 2


async def open_channel(both: Conversation) -> ClientChannel:
    half = both.channel()
    return ClientChannel(ClientConnection(both.client), half, confirms=False)


async def test_tasks_that_share_a_consumer_all_wake() -> None:
    both = Conversation().opened()
    channel = await open_channel(both)
    both.ask(channel._half, m.QueueDeclare(queue="q"))
    found: list[bytes] = []
    ended = 0

    async def take(consumer: Consumer) -> None:
        nonlocal ended
        async for delivery in consumer:
            found[len(found) :] = [delivery.body]
        ended += 1

    async with trio.open_nursery() as nursery:
        consumer = channel._consumers["c"] = Consumer("c", both.client.limits)
        for _ in range(3):
            nursery.start_soon(take, consumer)
        await trio.testing.wait_all_tasks_blocked()
        both.ask(channel._half, m.BasicConsume(queue="q", consumer_tag="c"))
        for body in (b"a", b"b", b"c"):
            both.server.publish(1, "q", body)
            both.go()
            await trio.testing.wait_all_tasks_blocked()
        assert found == [b"a", b"b", b"c"]
        channel._on_cancel("c")
    assert ended == 3


@pytest.mark.parametrize("no_ack", [False, True])
async def test_a_get_that_is_cancelled_requeues_its_message(no_ack: bool) -> None:
    both = Conversation().opened()
    channel = await open_channel(both)
    both.ask(channel._half, m.QueueDeclare(queue="q"))
    both.server.publish(1, "q", b"a")
    both.go()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(channel.get, "q", no_ack=no_ack))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    both.go()
    stats = both.world.stats("q")
    assert (stats.available, stats.acquired) == (0 if no_ack else 1, 0)


@pytest.mark.req("N6")
def test_silence_ends_it_and_nothing_is_said() -> None:
    both = Conversation(heartbeat_s=10).opened()
    client = both.client
    client.tick(1005.0)
    assert b"".join(client.take()) == frame(8, 0, b"")
    assert client.receive(frame(8, 0, b""), 1015.0) == []
    (failed,) = client.tick(1035.0)
    assert isinstance(failed, ConnectionFailed)
    assert client.take() == []


@pytest.mark.req("N1")
def test_a_server_of_another_version() -> None:
    client = ClientEngine(ClientOptions(), 0.0)
    assert client.take() == [PROTOCOL_HEADER]
    (failed,) = client.receive(b"AMQP\x00\x01\x00\x00", 0.0)
    assert isinstance(failed, ConnectionFailed)
    assert "does not speak" in str(failed.error.description)
    assert client.finished


@pytest.mark.req("N9")
def test_a_mechanism_that_both_have() -> None:
    start = method_frame(
        0, m.ConnectionStart(version_major=0, version_minor=9, mechanisms=b"EXTERNAL PLAIN")
    )
    client = ClientEngine(ClientOptions(mechanisms=(External(), Plain("a", "b"))), 0.0)
    client.take()
    client.receive(start, 0.0)
    assert b"\x08EXTERNAL\0\0\0\0" in b"".join(client.take())
    client.receive(method_frame(0, m.ConnectionSecure(challenge=b"?")), 0.0)
    assert client.take() == [method_frame(0, m.ConnectionSecureOk())]
    client = ClientEngine(ClientOptions(mechanisms=(External(),)), 0.0)
    (failed,) = client.receive(
        method_frame(0, m.ConnectionStart(mechanisms=b"PLAIN AMQPLAIN")), 0.0
    )
    assert isinstance(failed, ConnectionFailed)
    assert failed.error.condition == "amqp:unauthorized-access"


@pytest.mark.req("N3")
@pytest.mark.parametrize("stage", [Stage.START, Stage.LOGIN, Stage.OPEN, Stage.RUNNING])
@pytest.mark.parametrize("method", list(m.METHODS.values()), ids=lambda each: str(each.name))
def test_stages_crossed_with_methods_on_channel_0(stage: Stage, method: type[m.Method]) -> None:
    if method in CLIENT_TRANSITIONS[stage]:
        return
    client = at_stage(stage)
    client.receive(method_frame(0, method()), 0.0)
    if stage in (Stage.START, Stage.LOGIN):
        assert client.finished
    else:
        assert client.stage is Stage.CLOSING
        assert client.error is not None


def at_stage(stage: Stage) -> ClientEngine:
    client = ClientEngine(ClientOptions(), 0.0)
    said: dict[Stage, m.Method] = {
        Stage.START: m.ConnectionStart(mechanisms=b"PLAIN"),
        Stage.LOGIN: m.ConnectionTune(channel_max=10, frame_max=4096),
        Stage.OPEN: m.ConnectionOpenOk(),
    }
    while client.stage is not stage:
        client.receive(method_frame(0, said[client.stage]), 0.0)
    client.take()
    return client


WRONG: list[tuple[bytes, int]] = [
    (method_frame(1, m.QueueDeclareOk()), 503),
    (method_frame(1, m.BasicPublish()), 503),
    (method_frame(2, m.BasicQosOk()), 504),
    (frame(HEADER, 1, b"\x00\x3c\x00\x00" + b"\0" * 10), 505),
    (frame(BODY, 1, b"x"), 505),
    (method_frame(1, m.BasicDeliver()) + method_frame(1, m.BasicQosOk()), 505),
    (method_frame(0, m.ConnectionUpdateSecretOk()), 503),
    (frame(1, 1, b"\0\0\0"), 502),
    (frame(BODY, 1, b"x" * 200_000), 501),
]


@pytest.mark.req("N3", "N7")
@pytest.mark.parametrize(("octets", "code"), WRONG)
def test_what_a_server_does_wrong_ends_the_connection(octets: bytes, code: int) -> None:
    both = Conversation().opened()
    channel = both.channel()
    ended: list[Fault | None] = []
    channel.on_end = ended.append
    both.client.receive(octets, 1000.0)
    assert both.client.stage is Stage.CLOSING
    said = b"".join(both.client.take())
    assert said[7:11] == b"\x00\x0a\x00\x32"
    assert int.from_bytes(said[11:13], "big") == code
    assert len(ended) == 1


def test_what_is_larger_than_wanted_costs_its_channel() -> None:
    both = Conversation(limits=Limits(message_size_max=100)).opened()
    channel = both.channel()
    both.ask(channel, m.QueueDeclare(queue="q"))
    channel.publish(m.BasicPublish(routing_key="q"), m.BasicProperties(), b"x" * 101)
    answer = both.ask(channel, m.BasicGet(queue="q"))
    assert isinstance(answer, Fault)
    assert not both.client.over
    other = both.channel()
    assert both.ask(other, m.QueueDeclare(queue="q", passive=True)).message_count == 1


def test_no_more_channels_than_were_agreed() -> None:
    both = Conversation(channel_max=2).opened()
    assert [both.channel().number for _ in range(2)] == [1, 2]
    with pytest.raises(Fault, match="2 channels"):
        both.client.open_channel(print)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_octets_end_in_order(data: bytes, stage: int) -> None:
    client = at_stage([Stage.START, Stage.LOGIN, Stage.OPEN, Stage.RUNNING][stage])
    client.receive(data, 0.0)
    client.receive_eof(0.0)
    assert client.finished
