"""From a URL to a connected stream, or to one sentence."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest
import trio

from amqp_rt.addresses import parse_url
from amqp_rt.errors import ConnectFailed
from amqp_rt.limits import Limits
from amqp_rt.net.dial import dial
from amqp_rt.net.endpoints import is_local, reason
from amqp_rt.net.listeners import (
    ConnectionLimiter,
    bound_address,
    open_tcp,
    open_unix,
    serve_memory,
)
from amqp_rt.net.memory import MemoryNetwork


@pytest.mark.req("L1")
async def test_tcp() -> None:
    (listener,) = await open_tcp("127.0.0.1", 0)
    async with listener:
        port = bound_address(listener)[1]
        for host in ("127.0.0.1", "localhost"):
            dialled = await dial(parse_url(f"amqp://{host}:{port}"))
            async with dialled.stream as stream, await listener.accept():
                assert (dialled.local, dialled.secure) == (True, False)
                assert isinstance(stream, trio.SocketStream)
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.req("L3")
async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await open_unix(path) as listener:
        dialled = await dial(parse_url(f"amqp+unix://{path}"))
        async with dialled.stream, await listener.accept():
            assert (dialled.local, dialled.secure) == (True, False)


@pytest.mark.req("L4")
async def test_a_name_in_memory(nursery: trio.Nursery) -> None:
    network = MemoryNetwork()

    async def greet(stream: trio.abc.Stream, address: str, logged_in: object) -> None:
        await stream.send_all(address.encode())

    await nursery.start(
        partial(serve_memory, nursery=nursery), network, "here", ConnectionLimiter(Limits()), greet
    )
    dialled = await dial(parse_url("memory://here"), network=network)
    assert dialled.local
    assert await dialled.stream.receive_some() == b"memory://here"


@pytest.mark.req("L1", "L3", "L4")
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("amqp://bob:s3cret@127.0.0.1:1", "amqp://bob@127.0.0.1:1: nothing listens there"),
        (
            "amqp://no-such-host.invalid",
            "amqp://no-such-host.invalid:5672: the host's name is not known",
        ),
        ("amqp+unix:///no/such/file", "amqp+unix:///no/such/file: there is no such file or folder"),
        ("memory://nobody", "memory://nobody: nothing listens there"),
        ("ws://127.0.0.1:1/amqp", "ws://127.0.0.1:1/amqp: nothing listens there"),
        ("wss://127.0.0.1:1/amqp", "wss://127.0.0.1:1/amqp: nothing listens there"),
    ],
)
async def test_why_not_is_one_sentence(url: str, why: str) -> None:
    with pytest.raises(ConnectFailed) as it:
        await dial(parse_url(url), network=MemoryNetwork())
    assert it.value.description.startswith("cannot connect to ")
    assert why in it.value.description
    assert "s3cret" not in str(it.value)


@pytest.mark.req("L3")
async def test_a_file_that_nobody_listens_on(tmp_path: Path) -> None:
    async with await open_unix(str(tmp_path / "s")):
        pass
    with pytest.raises(ConnectFailed, match="nothing listens there"):
        await dial(parse_url(f"amqp+unix://{tmp_path}/s"))


@pytest.mark.req("SE9")
@pytest.mark.parametrize(
    ("family", "address", "local"),
    [
        (socket.AF_INET, ("127.0.0.1", 1), True),
        (socket.AF_INET, ("127.8.9.1", 1), True),
        (socket.AF_INET, ("192.0.2.1", 1), False),
        (socket.AF_INET, ("0.0.0.0", 1), False),
        (socket.AF_INET6, ("::1", 1, 0, 0), True),
        (socket.AF_INET6, ("::ffff:127.0.0.1", 1, 0, 0), True),
        (socket.AF_INET6, ("::ffff:192.0.2.1", 1, 0, 0), False),
        (socket.AF_INET6, ("fe80::1%eth0", 1, 0, 2), False),
        (getattr(socket, "AF_UNIX", 1), "", True),
    ],
)
def test_what_is_local_is_told_by_the_address(family: int, address: object, local: bool) -> None:
    assert is_local(family, address) is local


def test_the_first_of_several_reasons_is_said() -> None:
    error = OSError("all attempts to connect failed")
    error.__cause__ = ExceptionGroup("", [ValueError(), OSError(111, "Connection refused")])
    assert reason(error) == "nothing listens there"
    assert reason(OSError("just words")) == "just words"
    assert reason(OSError(9999, "odd")) == "odd"
    assert reason(TimeoutError()) == "it does not answer"
