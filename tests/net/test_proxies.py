"""Connections through proxies: pproxy, which others wrote, and small ones that misbehave."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from functools import partial

import pytest
import trio
from certificates import certificates
from commands import amqp_rt as command
from trio.testing import MockClock

from amqp_rt import Broker, ClientTls, ServerTls, connect, sync
from amqp_rt.addresses import parse_url
from amqp_rt.broker import Queue
from amqp_rt.errors import ConnectFailed
from amqp_rt.net.dial import dial
from amqp_rt.net.proxies import is_exempt, parse_proxy, proxy_for

pytestmark = pytest.mark.req("L5")


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def proxies() -> Iterator[tuple[str, str]]:
    """Start pproxy; yield where it needs no login, and where ``ada:secret``, each as ``host:port``."""
    free, closed = (f"127.0.0.1:{free_port()}" for _ in range(2))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pproxy", "--auth", "0"),
            *("-l", f"http+socks4+socks5://{free}", "-l", f"http+socks5://{closed}#ada:secret"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for where in (free, closed):
            host, _, port = where.partition(":")
            for _ in range(200):
                try:
                    socket.create_connection((host, int(port)), timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None, "pproxy has ended"
                    time.sleep(0.05)
        yield free, closed
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["socks5h", "socks5", "socks4", "http"])
@pytest.mark.parametrize("transport", ["amqp", "amqps", "ws", "wss"])
async def test_messages_go_through_a_proxy(
    proxies: tuple[str, str], scheme: str, transport: str
) -> None:
    files = certificates()
    async with Broker(tls=ServerTls(files.server)) as broker:
        await broker.declare(Queue("q"))
        [url] = await broker.listen(f"{transport}://127.0.0.1:0")
        tls = ClientTls(files.ca) if transport in ("amqps", "wss") else None
        proxy = f"{scheme}://{proxies[0]}"
        async with connect(
            url.replace("127.0.0.1", "localhost"), proxy=proxy, tls=tls, reconnect=None
        ) as peer:
            async with peer.sender("q") as out:
                await out.send(scheme)
            async with peer.receiver("q") as q:
                delivery = await q.receive()
                assert delivery.body == scheme
                delivery.accept()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["socks5h", "http"])
async def test_a_proxy_with_a_login(proxies: tuple[str, str], scheme: str) -> None:
    async with Broker() as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0")
        where = proxies[1]
        async with connect(url, proxy=f"{scheme}://ada:secret@{where}", reconnect=None):
            pass
        for user in ("ada:wrong@", ""):
            with pytest.raises(ConnectFailed, match=r"through .* the proxy ") as it:
                async with connect(url, proxy=f"{scheme}://{user}{where}", reconnect=None):
                    pass
            assert "wrong" not in str(it.value)


@pytest.mark.slow
def test_threads_and_commands_go_through_a_proxy(proxies: tuple[str, str]) -> None:
    with sync.Broker() as broker:
        broker.declare(Queue("q"))
        [url] = broker.listen("amqp://127.0.0.1:0")
        proxy = f"http://{proxies[0]}"
        with sync.connect(url, proxy=proxy, reconnect=None) as peer, peer.sender("q") as out:
            out.send("one")
        done = command("receive", "q", "--count", "1", "--proxy", proxy, url=url)
        assert (done.returncode, done.stdout.strip()) == (0, "one"), done.stderr
        done = command("ping", "--proxy", proxy, url=url)
        assert done.returncode == 0, done.stderr
        refused = f"http://127.0.0.1:{free_port()}"
        done = command("ping", "--proxy", refused, url=url)
        assert done.returncode == 1
        assert f"through {refused}: " in done.stderr
        done = command("receive", "q", "--count", "1", "--proxy", "ftp://here:21", url=url)
        assert done.returncode != 0
        assert "its scheme is one of socks5h" in done.stderr
        assert "Traceback" not in done.stderr


# --- proxies that misbehave ------------------------------------------------------------------------

_Answer = Callable[[trio.SocketStream], Awaitable[None]]


async def _one_answer(stream: trio.SocketStream, *answers: bytes) -> None:
    for answer in answers:
        await stream.receive_some()
        await stream.send_all(answer)
    # Unread input would reset the connection before the client has read the answer.
    with trio.move_on_after(1):
        await stream.receive_some()


async def _silence(stream: trio.SocketStream) -> None:
    while await stream.receive_some():
        pass


async def _serve(
    answer: _Answer, ended: trio.Event, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        task_status.started(listener.socket.getsockname()[1])
        async with await listener.accept() as stream:
            # The client may close before it has read everything.
            with suppress(trio.BrokenResourceError):
                await answer(stream)
    ended.set()


OFFERED = b"\5\0"


@pytest.mark.parametrize(
    ("scheme", "answers", "why"),
    [
        ("socks5h", (OFFERED, b"\5\5\0\1" + bytes(6)), "nothing listens there, says the proxy"),
        ("socks5h", (OFFERED, b"\5\4\0\1" + bytes(6)), "the proxy cannot reach the host"),
        ("socks5h", (OFFERED, b"\5\2\0\1" + bytes(6)), "the proxy does not allow this connection"),
        ("socks5h", (b"\5\xff",), "the proxy requires a user name and a password"),
        ("socks5h", (b"HTTP/1.1 400 Bad Request\r\n\r\n",), "the answer is none of a socks5h proxy"),
        ("socks4a", (b"\0\x5b" + bytes(6),), "the proxy refused this connection, or it failed"),
        ("http", (b"HTTP/1.1 403 Forbidden\r\n\r\n",), "the proxy answered 403 Forbidden"),
        ("http", (b"HTTP/1.1 502 \r\n\r\n",), "the proxy answered 502"),
        ("http", (b"HTTP/1.1 407 Login\r\n\r\n",), "the proxy requires a user name and a password"),
        ("http", (b"HTTP/1.1 401 Login\r\n\r\n",), "the proxy requires a user name and a password"),
        ("http", (b"\5\0\0\0\r\n\r\n",), "the answer is none of a proxy of HTTP"),
        ("http", (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,), "the answer is none of a proxy of HTTP"),
        ("http", (), "the proxy closed the connection"),
        ("socks5h", (), "the proxy closed the connection"),
    ],
)  # fmt: skip
async def test_a_failure_is_one_sentence(
    nursery: trio.Nursery, scheme: str, answers: tuple[bytes, ...], why: str
) -> None:
    ended = trio.Event()

    async def answer(stream: trio.SocketStream) -> None:
        if answers:
            await _one_answer(stream, *answers)
        else:
            await stream.receive_some()

    port = await nursery.start(_serve, answer, ended)
    with pytest.raises(ConnectFailed) as it:
        await dial(parse_url("amqp://broker.example"), proxy=f"{scheme}://127.0.0.1:{port}")
    assert str(it.value.description).startswith(
        f"cannot connect to amqp://broker.example:5672 through {scheme}://127.0.0.1:{port}: {why}"
    )
    # The client has closed its socket.
    with trio.fail_after(5):
        await ended.wait()


@pytest.mark.parametrize("scheme", ["socks5h", "http"])
async def test_a_proxy_that_does_not_listen(scheme: str) -> None:
    port = free_port()
    with pytest.raises(ConnectFailed, match="the proxy cannot be reached: nothing listens there"):
        await dial(parse_url("amqp://broker.example"), proxy=f"{scheme}://127.0.0.1:{port}")


@pytest.mark.parametrize("scheme", ["socks5h", "socks4a", "http"])
async def test_a_proxy_that_is_silent_is_given_up(
    nursery: trio.Nursery, autojump_clock: MockClock, scheme: str
) -> None:
    ended = trio.Event()
    port = await nursery.start(_serve, _silence, ended)
    with pytest.raises(ConnectFailed, match="no answer within 3 s"):
        async with connect(
            "amqp://broker.example", proxy=f"{scheme}://127.0.0.1:{port}", within=3, reconnect=None
        ):
            pass
    await ended.wait()


async def test_what_follows_the_answer_of_a_proxy_belongs_to_the_peer(
    nursery: trio.Nursery,
) -> None:
    answer = partial(
        _one_answer_of, b"HTTP/1.0 200 Connection established\r\nVia: here\r\n\r\nAMQP\0\1\0\0"
    )
    port = await nursery.start(_serve, answer, trio.Event())
    dialled = await dial(parse_url("amqp://[::1]"), proxy=f"http://127.0.0.1:{port}")
    async with dialled.stream as stream:
        assert await stream.receive_some(100) == b"AMQP\0\1\0\0"
        # The proxy is on this machine, and the peer need not be: passwords do not go to it in clear.
        assert not dialled.local


async def _one_answer_of(answer: bytes, stream: trio.SocketStream) -> None:
    assert (await stream.receive_some()).startswith(b"CONNECT [::1]:5672 HTTP/1.1\r\n")
    await stream.send_all(answer)
    await _silence(stream)


async def test_a_proxy_of_socks_4a_looks_up_the_host(nursery: trio.Nursery) -> None:
    asked: list[bytes] = []

    async def answer(stream: trio.SocketStream) -> None:
        asked.append(await stream.receive_some())
        await stream.send_all(b"\0\x5a" + bytes(6) + b"AMQP")
        await _silence(stream)

    port = await nursery.start(_serve, answer, trio.Event())
    dialled = await dial(
        parse_url("amqp://no-such.invalid"), proxy=f"socks4a://ada@127.0.0.1:{port}"
    )
    async with dialled.stream as stream:
        assert await stream.receive_some(100) == b"AMQP"
    assert asked == [b"\4\1" + (5672).to_bytes(2, "big") + b"\0\0\0\1ada\0no-such.invalid\0"]


# --- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ftp://p:21", "its scheme is one of socks5h, socks5, socks4a, socks4, http"),
        ("https://p:443", "its scheme is one of"),
        ("socks5h://p", "it is SCHEME://HOST:PORT"),
        ("socks5h://p:99999", "it is no URL"),
        ("http://p:1/path", "nothing follows the port"),
        ("socks5h://ada@p:1", "a user name and a password, or neither"),
        ("socks4a://ada:s3cret@p:1", "user names without passwords"),
        (f"socks5h://ada:{'s3cret' * 50}@p:1", "at most 255 characters"),
        ("socks5h://ada:s3cr%C3%A9t@p:1", "of ASCII characters only"),
        ("http://a%3Ab:s3cret@p:1", "user names of HTTP have no ':'"),
        ("s3cret@p", "its scheme is one of"),
    ],
)
def test_a_malformed_setting_is_refused_without_its_password(text: str, why: str) -> None:
    with pytest.raises(ConnectFailed) as it:
        parse_proxy(text)
    assert why in str(it.value)
    assert "s3cr" not in str(it.value)


async def _never(url: str) -> trio.abc.Stream:
    raise AssertionError(url)


async def test_a_malformed_setting_is_refused_at_once() -> None:
    for url, setting in (("amqp://h", "ftp://p:1"), ("memory://here", "http://p:1")):
        with pytest.raises(ConnectFailed):
            async with connect(url, proxy=setting):
                pass
    with pytest.raises(ValueError, match="transport or proxy"):
        async with connect("amqp://h", proxy="env", transport=_never):
            pass


def test_a_proxy_shows_no_password() -> None:
    proxy = parse_proxy("socks5h://ada:s3cr%40t@[::1]:1080")
    assert (proxy.user, proxy.password) == ("ada", "s3cr@t")
    assert str(proxy) == "socks5h://ada@[::1]:1080"
    assert "s3cr" not in repr(proxy)


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("amqps://h", {"https_proxy": "http://p:1", "all_proxy": "socks5h://q:2"}, "http://p:1"),
        ("amqp://h", {"https_proxy": "http://p:1", "all_proxy": "socks5h://q:2"}, "socks5h://q:2"),
        ("wss://h", {"HTTPS_PROXY": "p:1"}, "http://p:1"),
        ("ws://h", {"HTTP_PROXY": "http://p:1", "http_proxy": "http://q:2"}, "http://q:2"),
        ("ws://h", {"HTTP_PROXY": "http://p:1", "REQUEST_METHOD": "GET"}, None),
        ("amqps://h", {}, None),
        ("amqps://h", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "h"}, None),
        ("amqp+unix:///s", {"ALL_PROXY": "http://p:1"}, None),
    ],
)
def test_the_environment(url: str, environment: dict[str, str], expected: str | None) -> None:
    found = proxy_for(parse_url(url), "env", environment)
    assert (None if found is None else str(found)) == expected
    assert proxy_for(parse_url(url), None, environment) is None


@pytest.mark.parametrize(
    ("host", "listed", "exempt"),
    [
        ("broker.example.org", "*", True),
        ("broker.example.org", "example.org", True),
        ("broker.example.org", " other, .example.org ", True),
        ("BROKER.example.org.", "*.example.ORG", True),
        ("example.org", ".example.org", True),
        ("badexample.org", "example.org", False),
        ("broker.example.org", "example.org:5672", True),
        ("broker.example.org", "example.org:5671", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("11.1.2.3", "10.0.0.0/8,1.2.3", False),
        ("::1", "[::1]:5672", True),
        ("::1", "::1", True),
        ("fe80::1%eth0", "fe80::/10", True),
        ("h", "", False),
        ("h", ",,.", False),
    ],
)
def test_hosts_without_a_proxy(host: str, listed: str, exempt: bool) -> None:
    assert is_exempt(host, 5672, {"no_proxy": listed}) is exempt


async def test_the_environment_is_read_at_each_attempt(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    port = await nursery.start(
        _serve, lambda stream: _one_answer(stream, b"HTTP/1.1 403 No\r\n\r\n"), trio.Event()
    )
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    with pytest.raises(ConnectFailed, match=f"through http://127.0.0.1:{port}: the proxy answered"):
        async with connect("amqp://broker.example", proxy="env", reconnect=None):
            pass


async def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_socks", None)
    with pytest.raises(ConnectFailed, match=r"pip install 'amqp-rt\[proxy\]'"):
        await dial(parse_url("amqp://h"), proxy="socks5h://127.0.0.1:1")
