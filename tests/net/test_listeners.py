"""Listening: every address, stale files, bounds, and a system that runs out of descriptors."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt.addresses import network_of
from amqp_rt.errors import ConnectFailed
from amqp_rt.limits import Limits
from amqp_rt.net.listeners import (
    ConnectionLimiter,
    Crowd,
    Serve,
    bound_address,
    open_tcp,
    open_unix,
    serve_memory,
    serve_socket,
)
from amqp_rt.net.memory import MemoryNetwork, memory_stream_pair


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def echo(stream: trio.abc.Stream, address: str, logged_in: Callable[[], None]) -> None:
    async for data in stream:
        await stream.send_all(data)


async def ask(stream: trio.abc.Stream, data: bytes = b"hello") -> bytes:
    """Send *data* and return the answer; nothing if the connection was refused."""
    try:
        await stream.send_all(data)
        return bytes(await stream.receive_some(100))
    except trio.BrokenResourceError:
        return b""


@pytest.mark.req("L1")
async def test_port_0_is_a_free_port(nursery: trio.Nursery) -> None:
    (listener,) = await open_tcp("127.0.0.1", 0)
    host, port = bound_address(listener)
    assert (host, port > 0) == ("127.0.0.1", True)
    nursery.start_soon(
        partial(serve_socket, listener, ConnectionLimiter(Limits()), echo, nursery=nursery)
    )
    async with await trio.open_tcp_stream(host, port) as stream:
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert await ask(stream) == b"hello"


@pytest.mark.req("L1")
async def test_a_host_with_many_addresses_has_one_port(nursery: trio.Nursery) -> None:
    """Without a host every address is meant: with IPv6, two listeners."""
    listeners = await open_tcp("", 0)
    ports = {bound_address(listener)[1] for listener in listeners}
    assert len(ports) == 1
    limiter = ConnectionLimiter(Limits())
    for listener in listeners:
        nursery.start_soon(partial(serve_socket, listener, limiter, echo, nursery=nursery))
    for host in ["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"]:
        async with await trio.open_tcp_stream(host, *ports) as stream:
            assert await ask(stream) == b"hello"


@pytest.mark.req("L1")
async def test_ipv6(nursery: trio.Nursery) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    (listener,) = await open_tcp("::1", 0)
    seen = []

    async def note(stream: trio.abc.Stream, address: str, logged_in: Callable[[], None]) -> None:
        seen.append(address)
        await echo(stream, address, logged_in)

    nursery.start_soon(
        partial(serve_socket, listener, ConnectionLimiter(Limits()), note, nursery=nursery)
    )
    async with await trio.open_tcp_stream(*bound_address(listener)) as stream:
        assert await ask(stream) == b"hello"
        port = stream.socket.getsockname()[1]
    assert seen == [f"[::1]:{port}"]


@pytest.mark.req("L1")
async def test_a_port_that_is_taken_is_one_sentence() -> None:
    (listener,) = await open_tcp("127.0.0.1", 0)
    host, port = bound_address(listener)
    async with listener:
        with pytest.raises(ConnectFailed) as it:
            await open_tcp(host, port)
    assert it.value.description == (
        f"cannot listen on 127.0.0.1:{port}: the address is already in use"
    )


@pytest.mark.req("L1")
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("no-such-host.invalid", "the host's name is not known"),
        ("192.0.2.1", "the address is not one of this machine"),
    ],
)
async def test_a_host_that_is_not_ours_is_one_sentence(host: str, why: str) -> None:
    with pytest.raises(ConnectFailed) as it:
        await open_tcp(host, 0)
    assert it.value.description == f"cannot listen on {host}:0: {why}"


@pytest.mark.req("L3")
async def test_a_unix_socket_is_for_its_owner(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = str(tmp_path / "s")
    listener = await open_unix(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    nursery.start_soon(
        partial(serve_socket, listener, ConnectionLimiter(Limits()), echo, nursery=nursery)
    )
    async with await trio.open_unix_socket(path) as stream:
        assert await ask(stream) == b"hello"


@pytest.mark.req("L3")
async def test_a_unix_socket_may_be_for_others(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await open_unix(path, mode=0o666):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666


@pytest.mark.req("L3")
async def test_a_file_that_a_dead_listener_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await open_unix(path):
        pass
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    async with await open_unix(path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


@pytest.mark.req("L3")
async def test_a_living_listener_keeps_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await open_unix(path):
        with pytest.raises(ConnectFailed, match="the address is already in use"):
            await open_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


@pytest.mark.req("L3")
async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConnectFailed, match="a file that is no socket is in the way"):
        await open_unix(str(path))
    assert path.read_text() == "precious"


@pytest.mark.req("L3")
@pytest.mark.parametrize("path", ["missing/folder/s", "x" * 200])
async def test_a_path_that_cannot_be_is_one_sentence(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConnectFailed, match=r"^cannot listen on amqp\+unix://"):
        await open_unix(str(tmp_path / path))


@pytest.mark.req("L4")
async def test_a_name_in_memory(nursery: trio.Nursery) -> None:
    network, limiter = MemoryNetwork(), ConnectionLimiter(Limits())
    await nursery.start(partial(serve_memory, nursery=nursery), network, "here", limiter, echo)
    stream = await network.dial("here")
    assert await ask(stream) == b"hello"
    await stream.aclose()
    with pytest.raises(
        ConnectFailed, match="cannot listen on memory://here: the address is already in use"
    ):
        await serve_memory(network, "here", limiter, echo, nursery=nursery)
    with pytest.raises(ConnectFailed, match="cannot connect to memory://there: nothing listens"):
        await network.dial("there")


@pytest.mark.req("L4")
async def test_a_name_in_memory_is_free_again() -> None:
    network = MemoryNetwork()
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(serve_memory, nursery=nursery),
                network,
                "here",
                ConnectionLimiter(Limits()),
                echo,
            )
            nursery.cancel_scope.cancel()
    with pytest.raises(ConnectFailed):
        await network.dial("here")


# --- Bounds --------------------------------------------------------------------------------


class Visitors:
    """Connections of one listener, each served until the test ends it."""

    def __init__(self, limiter: ConnectionLimiter, nursery: trio.Nursery) -> None:
        self.limiter = limiter
        self.nursery = nursery
        self.log_in: list[Callable[[], None]] = []
        self.ends: list[Any] = []

    async def serve(
        self, stream: trio.abc.Stream, address: str, logged_in: Callable[[], None]
    ) -> None:
        self.log_in.append(logged_in)
        await trio.sleep_forever()

    async def come(self, host: str) -> bool:
        """Open one more connection; return whether it was admitted."""
        ours, theirs = memory_stream_pair()
        before = len(self.log_in)
        self.nursery.start_soon(self.limiter.serve, ours, host, host, self.serve)
        await trio.testing.wait_all_tasks_blocked()
        self.ends.append(theirs)
        return len(self.log_in) > before


@pytest.fixture
async def visitors(nursery: trio.Nursery, request: pytest.FixtureRequest) -> Visitors:
    return Visitors(ConnectionLimiter(request.param), nursery)


@pytest.mark.req("L6")
@pytest.mark.parametrize("visitors", [Limits(connections_max=3)], indirect=True)
async def test_connections_are_bounded_at_the_number(visitors: Visitors) -> None:
    assert [await visitors.come(f"192.0.2.{n}") for n in range(5)] == [True] * 3 + [False] * 2
    assert visitors.limiter.connections == 3
    # A login makes no room here.
    visitors.log_in[0]()
    assert not await visitors.come("192.0.2.9")
    # The stream of a refused connection is closed.
    assert await ask(visitors.ends[3]) == b""


@pytest.mark.req("L6")
@pytest.mark.parametrize("visitors", [Limits(connections_unauthenticated_max=2)], indirect=True)
async def test_strangers_are_bounded_and_make_room_by_logging_in(visitors: Visitors) -> None:
    assert [await visitors.come(f"192.0.2.{n}") for n in range(2)] == [True, True]
    visitors.log_in[0]()
    visitors.log_in[0]()  # a second call has no effect
    assert visitors.limiter.crowd.strangers == 1
    assert await visitors.come("192.0.2.5")
    assert visitors.limiter.connections == 3
    # There is no room for the next one: the oldest without a login is closed.
    assert await visitors.come("192.0.2.6")
    assert (visitors.limiter.connections, visitors.limiter.crowd.strangers) == (3, 2)
    assert await ask(visitors.ends[1]) == b""


@pytest.mark.req("L6")
@pytest.mark.parametrize("visitors", [Limits(connections_unauthenticated_max=4)], indirect=True)
async def test_who_fills_the_places_of_strangers_pushes_out_its_own(visitors: Visitors) -> None:
    hosts = ["192.0.2.9", *["2001:db8::1"] * 3, *["2001:db8::2"] * 20, "192.0.2.7"]
    assert all([await visitors.come(host) for host in hosts])
    assert visitors.limiter.crowd.strangers == 4
    assert visitors.limiter.crowd.strangers_of("192.0.2.9") == 1
    assert visitors.limiter.crowd.strangers_of("192.0.2.7") == 1
    # With equal numbers for each address, the oldest of all is closed.
    assert await visitors.come("192.0.2.8")
    assert await visitors.come("192.0.2.6")
    assert visitors.limiter.crowd.strangers_of("192.0.2.9") == 0
    assert visitors.limiter.crowd.strangers_of("192.0.2.7") == 1


@pytest.mark.req("L6")
@pytest.mark.parametrize("visitors", [Limits(connections_unauthenticated_max=0)], indirect=True)
async def test_no_place_for_strangers_lets_nobody_in(visitors: Visitors) -> None:
    assert not await visitors.come("192.0.2.1")


@pytest.mark.req("L6")
@pytest.mark.parametrize(
    "visitors", [Limits(connections_unauthenticated_per_address_max=2)], indirect=True
)
@pytest.mark.parametrize(
    ("crowd", "other"),
    [
        (["192.0.2.1"] * 3, "192.0.2.2"),
        (["2001:db8::1", "2001:db8::2", "2001:db8::ffff"], "2001:db8:0:1::1"),
        (["::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.1"], "::ffff:192.0.2.2"),
        (["fe80::1%eth0", "fe80::2%eth0", "fe80::3"], "192.0.2.1"),
    ],
)
async def test_strangers_of_one_address_are_bounded(
    visitors: Visitors, crowd: list[str], other: str
) -> None:
    assert await visitors.come(other)
    for host in crowd:
        assert await visitors.come(host)
    # The oldest of the same address has made room, rather than older ones of other addresses.
    assert await ask(visitors.ends[1]) == b""
    strangers = visitors.limiter.crowd
    assert [strangers.strangers_of(network_of(each)) for each in (crowd[0], other)] == [2, 1]
    # A connection with a login stays, regardless of later ones.
    visitors.log_in[2]()
    for _ in range(5):
        assert await visitors.come(crowd[0])
    assert (visitors.limiter.connections, strangers.strangers) == (4, 3)


@pytest.mark.req("L6")
@pytest.mark.parametrize("visitors", [Limits(connections_per_address_max=2)], indirect=True)
async def test_connections_of_one_address_are_bounded(visitors: Visitors) -> None:
    crowd = ["2001:db8::1", "2001:db8::2", "2001:db8::3"]
    assert [await visitors.come(host) for host in crowd] == [True, True, False]
    # A login makes no room here, and other addresses have room of their own.
    visitors.log_in[0]()
    assert not await visitors.come(crowd[0])
    assert await visitors.come("2001:db8:0:1::1")
    assert [await visitors.come("unix") for _ in range(3)] == [True] * 3


@pytest.mark.req("L6")
@pytest.mark.parametrize(
    ("limits", "hosts"),
    [
        (Limits(connections_unauthenticated_per_address_max=3), ["192.0.2.1"] * 3),
        (Limits(connections_per_address_max=3), ["192.0.2.1"] * 3),
    ],
)
async def test_what_is_bounded_is_bounded_over_all_doors(
    limits: Limits, hosts: list[str], nursery: trio.Nursery
) -> None:
    crowd = Crowd()
    one, other = (Visitors(ConnectionLimiter(limits, crowd), nursery) for _ in range(2))
    assert [await one.come(hosts[0]), await other.come(hosts[1]), await one.come(hosts[2])] == [
        True
    ] * 3
    # The oldest without a login makes room, at either listener; otherwise none does.
    makes_room = limits.connections_per_address_max > 3
    assert await other.come(hosts[0]) is makes_room
    assert await one.come(hosts[0]) is makes_room
    assert crowd.by_network[hosts[0]] == 3
    # The limit of a single listener is not shared.
    alone = Visitors(ConnectionLimiter(Limits(connections_max=1), crowd), nursery)
    assert await alone.come("198.51.100.1") is True
    assert await alone.come("198.51.100.2") is False


@pytest.mark.req("L6")
@pytest.mark.parametrize(
    "visitors", [Limits(connections_unauthenticated_per_address_max=1)], indirect=True
)
async def test_what_has_no_address_is_not_counted_by_it(visitors: Visitors) -> None:
    assert [await visitors.come("unix"), await visitors.come("unix")] == [True, True]
    assert [await visitors.come("memory"), await visitors.come("memory")] == [True, True]


@pytest.mark.req("L6")
async def test_the_end_of_a_connection_makes_room() -> None:
    limiter = ConnectionLimiter(Limits(connections_max=1))
    for _ in range(3):
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(limiter.serve, ours, "192.0.2.1", "a", echo)
            assert await ask(theirs) == b"hello"
            assert (limiter.connections, limiter.crowd.strangers) == (1, 1)
            await theirs.aclose()
        assert (limiter.connections, limiter.crowd.strangers) == (0, 0)


async def test_a_flood_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    limiter = ConnectionLimiter(Limits(connections_max=0))
    with caplog.at_level(logging.INFO, "amqp_rt.net"):
        for _ in range(10):
            ours, _theirs = memory_stream_pair()
            await limiter.serve(ours, "192.0.2.1", "192.0.2.1:5", echo)
    assert [record.getMessage() for record in caplog.records] == [
        "connection from 192.0.2.1:5 refused: too many connections"
    ]


class Exhausted(trio.abc.Listener[trio.SocketStream]):
    """Listener whose system lacks a resource for a while."""

    def __init__(self, listener: trio.SocketListener, errors: list[int]) -> None:
        self.listener = listener
        self.errors = errors

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if self.errors:
            number = self.errors.pop()
            raise OSError(number, os.strerror(number))
        return await self.listener.accept()

    async def aclose(self) -> None:
        await self.listener.aclose()


@pytest.mark.req("L6")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_running_out_of_descriptors_delays_and_does_not_end(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    (real,) = await open_tcp("127.0.0.1", 0)
    listener: Any = Exhausted(real, [number] * 2)
    serve: Serve = echo
    nursery.start_soon(
        partial(serve_socket, listener, ConnectionLimiter(Limits()), serve, nursery=nursery)
    )
    async with await trio.open_tcp_stream(*bound_address(real)) as stream:
        assert await ask(stream) == b"hello"
    assert len([r for r in caplog.records if "delayed" in r.getMessage()]) == 1


async def test_an_error_of_our_own_is_not_hidden(nursery: trio.Nursery) -> None:
    (real,) = await open_tcp("127.0.0.1", 0)
    listener: Any = Exhausted(real, [errno.EBADF])
    with pytest.raises(OSError, match="Bad file descriptor"):
        await serve_socket(listener, ConnectionLimiter(Limits()), echo, nursery=nursery)
