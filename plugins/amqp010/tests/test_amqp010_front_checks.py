"""The front does what every front does (:func:`amqp_rt.testing.check_front`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front
from octets010 import HEADER, Operation
from protocol010 import EXPLICIT, WINDOW, Connection, Login, Session
from served010 import serving

from amqp_rt.broker.broker import front_of, installed_fronts
from amqp_rt.errors import AmqpError
from amqp_rt.testing.fronts import FRONT_CHECKS, FrontWorld


class ByHand:
    """A client of 0-10 with one session."""

    def __init__(self) -> None:
        self.received: list[tuple[Any, bytes]] = []
        self._connection = Connection()
        self._session = Session(b"%x" % id(self))
        self._later: list[Callable[[], None]] = []
        #: Id of a transfer → number of its message.
        self._numbers: dict[int, int] = {}
        self._subscriptions = 0
        self._taken = 0

    @property
    def opened(self) -> bool:
        return self._connection.opened

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def failed(self) -> bool:
        return self._session.exception is not None

    @property
    def accepted(self) -> list[int]:
        return self._answered("message.accept")

    @property
    def refused(self) -> list[int]:
        return self._answered("message.reject")

    def _answered(self, name: str) -> list[int]:
        found: list[Operation] = self._session.answers_of_broker
        return [
            self._numbers[number]
            for each in found
            if each.name == name
            for low, high in each.transfers
            for number in range(low, high + 1)
        ]

    def take(self) -> bytes:
        return b"".join(self._connection.take())

    def open(self, user: str, password: str) -> None:
        login = Login.plain(user, password) if user else Login.anonymous()
        self._connection = Connection(login)
        self._connection.start()

    def close(self) -> None:
        self._connection.control("connection.close", reply_code=200)

    def _when_open(self, call: Callable[[], None]) -> None:
        if self.opened:
            call()
        else:
            self._later.append(call)

    def send(self, address: str, number: int, body: bytes) -> None:
        self._when_open(lambda: self._publish(address, number, body))

    def _publish(self, address: str, number: int, body: bytes) -> None:
        transfer = self._session.transfer("", body, key=address, accept_mode=EXPLICIT)
        self._numbers[transfer] = number

    def subscribe(self, address: str, window: int) -> None:
        self._when_open(lambda: self._subscribe(address, window))

    def _subscribe(self, address: str, window: int) -> None:
        self._subscriptions += 1
        destination = str(self._subscriptions)
        send = self._session.send
        send("message.subscribe", queue=address, destination=destination, accept_mode=EXPLICIT)
        send("message.set-flow-mode", destination=destination, flow_mode=WINDOW)
        send("message.flow", destination=destination, unit=1, value=0xFFFF_FFFF)
        send("message.flow", destination=destination, unit=0, value=window)

    def accept(self, key: Any) -> None:
        self._session.accept(key)
        self._session.complete(key)

    def release(self, key: Any) -> None:
        self._session.release(key)
        self._session.complete(key)

    def receive(self, data: bytes) -> None:
        opened = self.opened
        self._connection.receive(data)
        if self.opened and not opened:
            self._connection.adopt(self._session)
            # A window moves when its messages are complete, which is when they are settled here.
            self._session.completes = False
            self._session.attach()
            later, self._later = self._later, []
            for call in later:
                call()
        for message in self._session.messages[self._taken :]:
            self._taken += 1
            self.received.append((message.id, message.body or b""))


@pytest.mark.slow
@pytest.mark.req("U1")
@pytest.mark.parametrize("check", FRONT_CHECKS, ids=lambda check: check.__name__)
def test_the_front_is_one(check: Callable[[FrontWorld], None]) -> None:
    check(FrontWorld(Front(), ByHand))


# --- By its name ----------------------------------------------------------------------------------


def test_a_broker_finds_it_by_its_name() -> None:
    assert front_of("amqp010").name == "amqp0-10"
    assert "amqp0-10" in [each.name for each in installed_fronts()]
    with pytest.raises(AmqpError, match=r"installed are: .*amqp010"):
        front_of("amqp011")


@pytest.mark.req("D1")
async def test_another_version_is_answered_with_our_header() -> None:
    async with serving() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as stream:
        await stream.send_all(b"AMQP\x01\x01\x00\x09")
        with trio.fail_after(5):
            assert await stream.receive_some() == HEADER
