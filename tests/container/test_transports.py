"""Connections over streams that are not ours: here the named pipes of POSIX."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from amqp_rt import Broker, Plain, Reconnect, connect
from amqp_rt.broker import Queue
from amqp_rt.errors import AuthenticationFailed, ConnectFailed
from amqp_rt.limits import Limits

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX has them")


def named_pipe(path: Path) -> tuple[trio.lowlevel.FdStream, trio.lowlevel.FdStream]:
    """Make a named pipe; the end to read from, and the end to write to."""
    os.mkfifo(path)
    ends = [os.open(path, flags | os.O_NONBLOCK) for flags in (os.O_RDONLY, os.O_WRONLY)]
    reading, writing = map(trio.lowlevel.FdStream, ends)
    return reading, writing


class Pipes:
    """Dials *broker* over a new pair of named pipes each time."""

    def __init__(self, broker: Broker, folder: Path, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.folder = folder
        self.nursery = nursery
        self.numbers = count()
        self.urls: list[str] = []
        self.streams: list[trio.abc.Stream] = []

    async def __call__(self, url: str) -> trio.abc.Stream:
        self.urls.append(url)
        number = next(self.numbers)
        reads, sends_back = named_pipe(self.folder / f"{number}-to-client")
        reads_back, sends = named_pipe(self.folder / f"{number}-to-server")
        accept = self.broker.container.accept
        self.nursery.start_soon(accept, trio.StapledStream(sends_back, reads_back), "a pipe")
        self.streams.append(trio.StapledStream(sends, reads))
        return self.streams[-1]


@pytest.mark.req("L3")
async def test_messages_go_over_named_pipes(tmp_path: Path, nursery: trio.Nursery) -> None:
    body = os.urandom(300_000)
    async with Broker() as broker:
        await broker.declare(Queue("q"))
        pipes = Pipes(broker, tmp_path, nursery)
        async with connect("amqp://shop/here", transport=pipes, reconnect=None) as peer:
            async with peer.sender("q") as out:
                await out.send(body)
            async with peer.receiver("q") as q:
                delivery = await q.receive()
                assert delivery.body == body
                delivery.accept()
        assert pipes.urls == ["amqp://shop:5672/here"]


@pytest.mark.req("L3")
async def test_a_pipe_that_breaks_is_dialled_again(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with Broker() as broker:
        await broker.declare(Queue("q"))
        pipes = Pipes(broker, tmp_path, nursery)
        async with (
            connect("amqp://shop", transport=pipes, reconnect=Reconnect()) as peer,
            peer.sender("q") as out,
        ):
            await out.send(1)
            await pipes.streams[0].aclose()
            await peer.wait_changed()
            await out.send(2)
        assert len(pipes.urls) == 2
        assert broker.stats("q").available == 2


@pytest.mark.req("L3", "SE2")
async def test_who_comes_by_a_pipe_logs_in(tmp_path: Path, nursery: trio.Nursery) -> None:
    limits = Limits(failed_login_delay_s=0.01)
    async with Broker(users={"ann": "right"}, plain_in_clear=True, limits=limits) as broker:
        pipes = Pipes(broker, tmp_path, nursery)
        for password in ("wrong", "right"):
            login = connect(
                "amqp://shop",
                transport=pipes,
                auth=Plain("ann", password),
                plain_in_clear=True,
                reconnect=None,
            )
            if password == "wrong":
                with pytest.raises(AuthenticationFailed):
                    await login.__aenter__()
            else:
                async with login as peer:
                    assert peer.state == "open"


@pytest.mark.req("L3")
async def test_a_pipe_that_cannot_be_opened_is_one_sentence() -> None:
    async def fail(url: str) -> trio.abc.Stream:
        raise FileNotFoundError(2, "No such file or directory", "/run/shop")

    with pytest.raises(ConnectFailed, match="cannot connect to amqp://shop:5672: there is no such"):
        async with connect("amqp://shop", transport=fail, reconnect=None):
            pass
