"""Connections that the reactor carries without a task of their own, from their first octet to their end."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt import Container, node
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.limits import Limits
from amqp_rt.net.listeners import accept_sockets, bound_address, open_tcp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")


@node("work")
async def take(body: bytes) -> None:
    """Accept each message."""


async def dial(url: str) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))


async def read_all(stream: trio.SocketStream) -> bytes:
    """Return what arrives until the end of *stream*, also if it ends with a reset."""
    data = b""
    try:
        async for piece in stream:
            data += piece
    except trio.BrokenResourceError:
        pass
    return data


async def test_a_connection_needs_no_task() -> None:
    async with Container("server", nodes=[take]) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        await trio.testing.wait_all_tasks_blocked()
        before = set(server.connection_nursery.child_tasks)
        async with (
            Container("client") as client,
            client.connect(url) as peer,
            peer.sender("work") as sender,
        ):
            await sender.send(b"one")
            assert server.connection_nursery.child_tasks == before
            assert len(server.entry.connections) == 1
        while server.entry.connections:
            await trio.lowlevel.checkpoint()
        assert server.stats()["work"]["accepted"] == 1


async def test_a_header_may_come_in_pieces() -> None:
    async with Container("server", nodes=[take]) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        async with await dial(url) as stream:
            for octet in AMQP_HEADER:
                await stream.send_all(bytes((octet,)))
                await trio.sleep(0.001)
            assert await stream.receive_some(8) == AMQP_HEADER


async def test_another_protocol_is_answered_with_ours(caplog: pytest.LogCaptureFixture) -> None:
    async with Container("server") as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        with caplog.at_level(logging.INFO, "amqp_rt.net"):
            async with await dial(url) as stream:
                await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                assert await read_all(stream) == AMQP_HEADER
        assert "it speaks no protocol that is offered here" in caplog.text


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            b"AMQP\x00\x00\x09\x01",
            "it speaks AMQP 0-9-1, which is not offered here: install amqp-rt-amqp091 and give --front amqp091",
        ),
        (b"AMQP\x01\x01\x00\x0a", "it speaks AMQP 0-10, which is not offered here"),
        (b"AMQP\x01\x01\x08\x00", "it speaks AMQP 0-8, which no plug-in has"),
        (b"AMQP\x00\x01\x00\x01", r"and began with b'AMQP\x00\x01\x00\x01'"),
    ],
)
async def test_the_log_names_the_protocol_of_a_refused_client(
    header: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Container("server") as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        with caplog.at_level(logging.INFO, "amqp_rt.net"):
            async with await dial(url) as stream:
                await stream.send_all(header)
                assert await read_all(stream) == AMQP_HEADER
        assert said in caplog.text


@pytest.mark.req("L6")
async def test_a_peer_without_a_header_is_dropped_in_time() -> None:
    async with Container("server", limits=Limits(handshake_s=0.05)) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        async with await dial(url) as silent, await dial(url) as half:
            await half.send_all(AMQP_HEADER[:4])
            with trio.fail_after(5):
                assert await read_all(silent) == await read_all(half) == b""


async def test_a_fault_of_ours_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with Container("server", nodes=[take]) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        faults = [ZeroDivisionError("a fault")]

        def fail(connection: Any) -> None:
            if faults:
                raise faults.pop()

        server.entry.on_opened = fail
        async with (
            Container("client") as client,
            client.connect(url) as peer,
            peer.sender("work") as sender,
        ):
            # The first connection broke, and was dialled again.
            await sender.send(b"one")
            assert len(server.entry.connections) == 1
        assert "a fault" in caplog.text


async def test_a_stop_waits_for_the_close_of_peers() -> None:
    opened, ended = trio.Event(), trio.Event()
    async with Container("client") as client, trio.open_nursery() as nursery:
        async with Container("server", nodes=[take]) as server:
            (url,) = await server.listen("amqp://127.0.0.1:0")

            async def stay() -> None:
                async with client.connect(url, reconnect=None) as peer:
                    opened.set()
                    await peer.wait_closed()
                    assert peer.ended_with is not None
                    assert peer.ended_with.condition == "amqp:connection:forced"
                ended.set()

            nursery.start_soon(stay)
            await opened.wait()
        assert not server.entry.connections
        with trio.fail_after(5):
            await ended.wait()


async def test_a_stop_drops_peers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amqp_rt.container.container.CLOSE_GRACE_S", 0.05)
    async with Container("server") as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        begun, waiting = await dial(url), await dial(url)
        await begun.send_all(AMQP_HEADER)
        assert await begun.receive_some(8) == AMQP_HEADER
    with trio.fail_after(5):
        assert await read_all(begun) == await read_all(waiting) == b""
    await trio.aclose_forcefully(begun)
    await trio.aclose_forcefully(waiting)


async def test_cancelling_the_container_drops_its_connections() -> None:
    with trio.CancelScope() as scope:
        async with Container("server") as server:
            (url,) = await server.listen("amqp://127.0.0.1:0")
            stream = await dial(url)
            await stream.send_all(AMQP_HEADER)
            assert await stream.receive_some(8) == AMQP_HEADER
            scope.cancel()
            await trio.sleep_forever()
    assert not server.entry.connections
    with trio.fail_after(5):
        assert await read_all(stream) == b""
    await trio.aclose_forcefully(stream)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of errors with which the next calls of ``accept`` fail."""
    errors: list[int] = []

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if errors:
                raise OSError(errors.pop(), "no")
            return super().accept()

    monkeypatch.setattr(socket, "socket", Failing)
    return errors


@pytest.mark.req("L6")
@pytest.mark.parametrize(
    ("number", "lines"), [("EMFILE", 1), ("ENOBUFS", 1), ("ECONNABORTED", 0), ("EPERM", 0)]
)
async def test_accepting_goes_on_after_a_passing_error(
    failing: list[int],
    nursery: trio.Nursery,
    caplog: pytest.LogCaptureFixture,
    number: str,
    lines: int,
) -> None:
    (listener,) = await open_tcp("127.0.0.1", 0)
    host, port = bound_address(listener)
    failing += [getattr(errno, number)] * 2
    arrived: list[str] = []

    def arrive(sock: socket.socket, host: str, address: str) -> None:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        arrived.append(address)
        sock.close()

    nursery.start_soon(accept_sockets, listener, arrive)
    async with await trio.open_tcp_stream(host, port) as stream:
        assert await stream.receive_some() == b""
        assert arrived == ["{}:{}".format(*stream.socket.getsockname())]
    assert len([r for r in caplog.records if "delayed" in r.getMessage()]) == lines


async def test_an_error_of_our_own_ends_accepting(failing: list[int]) -> None:
    (listener,) = await open_tcp("127.0.0.1", 0)
    failing.append(errno.EBADF)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.open_tcp_stream, *bound_address(listener))
        with pytest.raises(OSError, match="no"):
            await accept_sockets(listener, lambda *arrival: None)
        nursery.cancel_scope.cancel()
