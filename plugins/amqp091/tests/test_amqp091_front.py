"""The front does what every front does (:func:`amqp_rt.testing.check_front`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.codec import read_header, read_method
from amqp_rt_amqp091.frames import (
    BODY,
    HEADER,
    METHOD,
    PROTOCOL_HEADER,
    FrameReader,
    content_frames,
    method_frame,
)

from amqp_rt.broker.broker import front_of, installed_fronts
from amqp_rt.errors import AmqpError
from amqp_rt.testing import LoopbackBroker
from amqp_rt.testing.fronts import FRONT_CHECKS, FrontWorld

_FRAME_MAX = 8192


class ByHand:
    """A client of 0-9-1: one channel, confirms, everything mandatory."""

    def __init__(self) -> None:
        self.opened = self.closed = self.failed = False
        self.accepted: list[int] = []
        self.refused: list[int] = []
        self.received: list[tuple[Any, bytes]] = []
        self._output = b""
        self._later: list[Callable[[], None]] = []
        self._reader = FrameReader(1 << 20)
        self._login = ("", "")
        self._numbers: list[int] = []
        self._open: set[int] = set()
        self._returned: set[int] = set()
        self._content: list[Any] = []

    def take(self) -> bytes:
        output, self._output = self._output, b""
        return output

    def _say(self, channel: int, *methods: m.Method) -> None:
        for method in methods:
            self._output += method_frame(channel, method)

    def _when_open(self, call: Callable[[], None]) -> None:
        if self.opened:
            call()
        else:
            self._later.append(call)

    def open(self, user: str, password: str) -> None:
        self._login = (user, password)
        self._output += PROTOCOL_HEADER

    def send(self, address: str, number: int, body: bytes) -> None:
        self._when_open(lambda: self._publish(address, number, body))

    def _publish(self, address: str, number: int, body: bytes) -> None:
        self._numbers.append(number)
        self._open.add(len(self._numbers))
        self._output += b"".join(
            content_frames(
                1,
                m.BasicPublish(routing_key=address, mandatory=True),
                m.BasicProperties(message_id=str(number)),
                body,
                _FRAME_MAX,
            )
        )

    def subscribe(self, address: str, window: int) -> None:
        self._when_open(
            lambda: self._say(1, m.BasicQos(prefetch_count=window), m.BasicConsume(queue=address))
        )

    def accept(self, key: Any) -> None:
        self._say(1, m.BasicAck(delivery_tag=key))

    def release(self, key: Any) -> None:
        self._say(1, m.BasicReject(delivery_tag=key, requeue=True))

    def close(self) -> None:
        self._say(0, m.ConnectionClose(reply_code=200))

    def receive(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if frame.type == METHOD:
                method = read_method(frame.payload)
                if method.content:
                    self._content = [method]
                else:
                    self._on_method(method)
            elif frame.type == HEADER:
                self._content += [read_header(frame.payload), b""]
                self._on_content()
            elif frame.type == BODY:
                self._content[2] += frame.payload
                self._on_content()

    def _on_content(self) -> None:
        method, header, body = self._content
        if len(body) < header.body_size:
            return
        if isinstance(method, m.BasicDeliver):
            self.received.append((method.delivery_tag, body))
        else:
            number = int(header.properties.message_id or "0")
            self.refused.append(number)
            self._returned.add(number)

    def _on_method(self, method: m.Method) -> None:
        if isinstance(method, m.ConnectionStart):
            user, password = self._login
            response = f"\0{user}\0{password}".encode()
            self._say(0, m.ConnectionStartOk(mechanism="PLAIN", response=response))
        elif isinstance(method, m.ConnectionTune):
            self._say(
                0,
                m.ConnectionTuneOk(channel_max=method.channel_max, frame_max=_FRAME_MAX),
                m.ConnectionOpen(virtual_host="/"),
            )
        elif isinstance(method, m.ConnectionOpenOk):
            self._say(1, m.ChannelOpen(), m.ConfirmSelect(nowait=True))
            self.opened = True
            later, self._later = self._later, []
            for call in later:
                call()
        elif isinstance(method, m.BasicAck | m.BasicNack):
            tag, multiple = method.delivery_tag, method.multiple
            for each in sorted(self._open):
                if each == tag or (multiple and each <= tag):
                    self._open.discard(each)
                    number = self._numbers[each - 1]
                    if number in self._returned:
                        continue
                    taken = isinstance(method, m.BasicAck)
                    (self.accepted if taken else self.refused).append(number)
        elif isinstance(method, m.ChannelClose):
            self.failed = True
            self._say(1, m.ChannelCloseOk())
        elif isinstance(method, m.ConnectionClose):
            self.closed = True
            self._say(0, m.ConnectionCloseOk())
        elif isinstance(method, m.ConnectionCloseOk):
            self.closed = True


@pytest.mark.slow
@pytest.mark.req("U1")
@pytest.mark.parametrize("check", FRONT_CHECKS, ids=lambda check: check.__name__)
def test_the_front_is_one(check: Callable[[FrontWorld], None]) -> None:
    check(FrontWorld(Front(), ByHand))


# --- By its name ----------------------------------------------------------------------------------


def test_a_broker_finds_it_by_its_name() -> None:
    assert front_of("amqp091").name == "amqp0-9-1"
    assert "amqp0-9-1" in [each.name for each in installed_fronts()]
    with pytest.raises(AmqpError, match=r"installed are: .*amqp091"):
        front_of("amqp092")


def test_a_broker_of_the_tests_speaks_it_at_its_one_port() -> None:
    pika = pytest.importorskip("pika")
    with LoopbackBroker() as broker:
        work = broker.declare("work")
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        connection.channel().basic_publish("", "work", b"hello")
        connection.close()
        assert [message.body for message in work.wait_for(1)] == [b"hello"]


@pytest.mark.req("N1")
async def test_another_version_is_answered_with_our_header(served: Any) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", served.port)
    async with stream:
        await stream.send_all(b"AMQP\x00\x00\x09\x00")
        with trio.fail_after(5):
            assert await stream.receive_some() == PROTOCOL_HEADER
