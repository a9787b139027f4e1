"""Listeners behind proxies: the header of the PROXY protocol, and haproxy, which sends it."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from certificates import certificates
from trio.testing import MockClock

from amqp_rt import Broker, ClientTls, Peer, ProxyProtocol, ServerTls, connect, rpc
from amqp_rt.addresses import parse_url
from amqp_rt.errors import AmqpError, ConnectFailed, DecodeError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.net.listeners import ConnectionLimiter, ProxiedArrivals
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.proxy_headers import (
    ProxyHeader,
    octets_missing,
    parse_header,
    trusts,
)

pytestmark = pytest.mark.req("L5")

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
PORTS = (50_000).to_bytes(2, "big") + (5672).to_bytes(2, "big")
V4 = bytes((192, 0, 2, 1, 198, 51, 100, 1)) + PORTS
V6 = bytes.fromhex("20010db8000000000000000000000001" * 2) + PORTS
MAPPED = bytes(10) + b"\xff\xff" + bytes((192, 0, 2, 1)) + bytes(16) + PORTS
NAME = b"\x02\0\x0bExample.org"


def v2(command: int, kind: int, body: bytes) -> bytes:
    return SIGNATURE + bytes((command, kind)) + len(body).to_bytes(2, "big") + body


HEADER_MAX = DEFAULT_LIMITS.proxy_header_max
CLIENT = ("192.0.2.1", 50_000)
HEADERS = [
    (b"PROXY TCP4 192.0.2.1 198.51.100.1 50000 5672\r\n", ProxyHeader(CLIENT)),
    (b"PROXY TCP6 2001:db8::1 ::1 50000 0\r\n", ProxyHeader(("2001:db8::1", 50_000))),
    (b"PROXY TCP6 ::ffff:192.0.2.1 ::1 50000 1\r\n", ProxyHeader(CLIENT)),
    (b"PROXY UNKNOWN\r\n", ProxyHeader()),
    (b"PROXY UNKNOWN ffff:f...f:ffff whatever\r\n", ProxyHeader()),
    (v2(0x21, 0x11, V4), ProxyHeader(CLIENT)),
    (v2(0x21, 0x21, V6), ProxyHeader(("2001:db8::1", 50_000))),
    (v2(0x21, 0x21, MAPPED), ProxyHeader(CLIENT)),
    (v2(0x21, 0x11, V4 + b"\x04\0\2aa" + NAME), ProxyHeader(CLIENT, "example.org")),
    (v2(0x21, 0x31, bytes(216)), ProxyHeader(own=True)),
    (v2(0x21, 0x00, b""), ProxyHeader()),
    (v2(0x20, 0x00, b""), ProxyHeader(own=True)),
    # The addresses of a connection of the proxy's own count for nothing.
    (v2(0x20, 0x11, V4), ProxyHeader(own=True)),
    (v2(0x21, 0x11, V4 + b"\x04" + (HEADER_MAX - 31).to_bytes(2, "big") + bytes(HEADER_MAX - 31)),
     ProxyHeader(CLIENT)),
]  # fmt: skip


def read(data: bytes, *, at_once: int = 1 << 20) -> tuple[ProxyHeader, bytes]:
    """The header at the beginning of *data*, read at most *at_once* octets at a time, and the rest."""
    begun = b""
    while missing := octets_missing(begun, HEADER_MAX):
        piece = data[len(begun) : len(begun) + min(missing, at_once)]
        if not piece:
            raise EOFError
        begun += piece
    return parse_header(begun), data[len(begun) :]


@pytest.mark.parametrize(("octets", "expected"), HEADERS)
def test_a_header_is_read_and_nothing_after_it(octets: bytes, expected: ProxyHeader) -> None:
    for after in (b"", b"AMQP\0\1\0\0", b"\r\n"):
        for at_once in (1, 7, 1 << 20):
            assert read(octets + after, at_once=at_once) == (expected, after)
    for end in range(len(octets)):
        with pytest.raises(EOFError):
            read(octets[:end])


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"AMQP\0\1\0\0 and more", "no header of the PROXY protocol"),
        (b"\x16\3\1\0\0 and much more", "no header of the PROXY protocol"),
        (b"PROXY" + b"X" * 20, "no header of the PROXY protocol"),
        (b"PROXY UNKNOWN" + b" " * 100, "does not end within 107 octets"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.1 50000\r\n", "5 words instead of 6"),
        (b"PROXY TCP4 192.0.2.1  198.51.100.1 5 5\r\n", "7 words instead of 6"),
        (b"PROXY UDP4 192.0.2.1 198.51.100.1 5 5\r\n", "for the protocol b'UDP4'"),
        (b"PROXY TCP4 192.0.2.01 198.51.100.1 5 5\r\n", "malformed address or port"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.1 05 5\r\n", "malformed address or port"),
        (b"PROXY TCP4 192.0.2.1 198.51.100.1 5 65536\r\n", "malformed address or port"),
        (b"PROXY TCP4 2001:db8::1 198.51.100.1 5 5\r\n", "address of another family"),
        (b"PROXY TCP6 fe80::1%1 ::1 5 5\r\n", "address of another family"),
        (v2(0x11, 0x11, V4), "unknown version and command 0x11"),
        (v2(0x22, 0x11, V4), "unknown version and command 0x22"),
        (v2(0x21, 0x12, V4), "family and protocol 0x12"),
        (v2(0x21, 0x11, V4[:-1]), "11 octets of addresses instead of 12"),
        (v2(0x21, 0x11, V4 + b"\x02\0\5abc"), "TLV that ends after it"),
        (v2(0x21, 0x11, V4 + b"\x02\0"), "TLV that ends after it"),
        (v2(0x21, 0x11, V4 + b"\x02\1\0" + b"a" * 256), "host name of 256 octets"),
        (v2(0x21, 0x11, V4 + b"\x02\0\1\xff"), "not UTF-8"),
        (v2(0x21, 0x11, V4 + b"\x02\0\1\n"), "control characters"),
        (v2(0x21, 0x11, V4 + bytes(HEADER_MAX)), f"proxy_header_max allows {HEADER_MAX}"),
    ],
)
def test_a_malformed_header_is_refused(octets: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        read(octets)


def test_trusted_networks() -> None:
    networks = ("10.0.0.0/8", "192.0.2.7", "fd00::/8")
    for host in ("10.1.2.3", "::ffff:10.1.2.3", "192.0.2.7", "fd00::1", "fd00::1%2"):
        assert trusts(networks, host), host
    for host in ("11.1.2.3", "192.0.2.8", "::1", "::ffff:11.1.2.3"):
        assert not trusts(networks, host), host


@pytest.mark.parametrize(
    ("query", "trusted"),
    [
        ("proxy_protocol=required&trusted=10.0.0.0/8,fd00::/8", ("10.0.0.0/8", "fd00::/8")),
        ("trusted=::1&vhost=v&proxy_protocol=required", ("::1",)),
        ("vhost=v", None),
    ],
)
def test_the_url_of_a_listener(query: str, trusted: tuple[str, ...] | None) -> None:
    assert parse_url(f"amqp://:5672?{query}", listening=True).trusted_proxies == trusted


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("amqp://:0?proxy_protocol=required", "proxy_protocol=required&trusted=NETWORK"),
        ("amqp://:0?trusted=10.0.0.0/8", "proxy_protocol=required&trusted=NETWORK"),
        ("amqp://:0?proxy_protocol=optional&trusted=::1", "proxy_protocol=required&trusted"),
        ("amqp://:0?proxy_protocol=required&trusted=all", "'all' is no address or network"),
        ("amqp://:0?proxy_protocol=required&trusted=10.0.0.1/8", "has host bits set"),
        ("memory://m?proxy_protocol=required&trusted=::1", "the PROXY protocol is for TCP"),
        (
            "amqp://:0?proxy=required",
            "nothing but vhost=NAME, profile=NAME and proxy_protocol=required",
        ),
    ],
)
async def test_a_malformed_listener_is_refused(url: str, why: str) -> None:
    async with Broker() as broker:
        with pytest.raises(ConnectFailed) as it:
            await broker.listen(url)
        assert why in str(it.value)
    with pytest.raises(ConnectFailed, match="goes with trusted"):
        ProxyProtocol(())


# --- one connection --------------------------------------------------------------------------------


async def serve_one(
    octets: bytes,
    host: str,
    *,
    trusted: tuple[str, ...] = ("192.0.2.0/24", "127.0.0.1"),
    eof: bool = True,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[str, str] | None:
    """Serve a connection of *host* that begins with *octets*; return the client's address and the requested host."""
    found: list[tuple[str, str]] = []

    async def serve(
        stream: trio.abc.Stream, address: str, _: object, server_name: str = ""
    ) -> None:
        assert await stream.receive_some(100) == b"AMQP"
        found.append((address, server_name))

    ours, theirs = memory_stream_pair()
    arrivals = ProxiedArrivals(ProxyProtocol(trusted), ConnectionLimiter(limits))
    await theirs.send_all(octets + b"AMQP" if octets else b"")
    if eof:
        await theirs.send_eof()
    await arrivals.serve(ours, host, f"{host}:1", serve)
    assert arrivals.waiting == 0
    # The stream is closed in any case.
    with trio.fail_after(5):
        assert await theirs.receive_some(1) == b""
    return found[0] if found else None


async def test_the_client_of_a_proxy_has_its_own_address() -> None:
    assert await serve_one(v2(0x21, 0x11, V4 + NAME), "192.0.2.9") == (
        "192.0.2.1:50000",
        "example.org",
    )
    assert await serve_one(v2(0x21, 0x21, V6), "192.0.2.9") == ("[2001:db8::1]:50000", "")
    assert await serve_one(v2(0x20, 0, b""), "192.0.2.9") == ("192.0.2.9:1", "")


async def test_the_size_of_a_header_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    body = V4 + b"\x04\0\x10" + bytes(16)
    line = b"PROXY TCP4 192.0.2.1 198.51.100.1 50000 5672\r\n"
    for header in (v2(0x21, 0x11, body), line):
        size = len(header)
        for most, expected in ((size, ("192.0.2.1:50000", "")), (size - 1, None)):
            limits = Limits(proxy_header_max=most)
            assert await serve_one(header, "192.0.2.9", limits=limits) == expected
    said = [each.getMessage().partition(" refused: ")[2] for each in caplog.records]
    assert said == [
        "the header has 47 octets; proxy_header_max allows 46",
        "the line of the header does not end within 45 octets",
    ]


async def test_only_a_proxy_on_this_machine_speaks_for_clients_on_it() -> None:
    header = b"PROXY TCP4 127.0.0.2 127.0.0.1 5 6\r\n"
    assert await serve_one(header, "192.0.2.9") == ("192.0.2.9:1", "")
    assert await serve_one(header, "127.0.0.1") == ("127.0.0.2:5", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"])
async def test_clients_that_a_proxy_on_this_machine_does_not_know_are_not_on_it(host: str) -> None:
    trusted = ("127.0.0.0/8", "::1", "192.0.2.0/24")
    for header in (b"PROXY UNKNOWN\r\n", v2(0x21, 0x00, b""), v2(0x21, 0x00, NAME)):
        assert await serve_one(header, host, trusted=trusted) is None
        # The address of a proxy elsewhere has no privileges.
        assert await serve_one(header, "192.0.2.9", trusted=trusted)
    # Those of its own, and of clients at its Unix socket, are.
    for header in (v2(0x20, 0x00, b""), v2(0x21, 0x31, bytes(216))):
        assert await serve_one(header, host, trusted=trusted) == (f"{host}:1", "")


async def test_strangers_and_late_headers_are_logged_once(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    called: list[str] = []
    arrivals = ProxiedArrivals(
        ProxyProtocol(("192.0.2.0/24",)), ConnectionLimiter(Limits(handshake_s=7))
    )

    async def serve(*_: object) -> None:
        called.append("served")

    for host, octets in (
        *[("203.0.113.1", v2(0x21, 0x11, V4))] * 3,
        *[("192.0.2.9", b"AMQP\0\1\0\0 no header")] * 3,
        ("192.0.2.9", b"PROXY"),
    ):
        ours, theirs = memory_stream_pair()
        await theirs.send_all(octets)
        before = trio.current_time()
        await arrivals.serve(ours, host, f"{host}:1", serve)
        assert trio.current_time() - before == pytest.approx(
            7 if octets == b"PROXY" else 0, abs=0.1
        )
    assert called == []
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [line.partition(" refused: ")[2][:34] for line in lines] == [
        "it is none of the trusted proxies",
        "no header of the PROXY protocol: i",
        "no PROXY header within 7 s",
    ]


async def test_clients_behind_one_proxy_are_counted_by_their_own_addresses(
    nursery: trio.Nursery,
) -> None:
    limiter = ConnectionLimiter(Limits(connections_per_address_max=1))
    arrivals = ProxiedArrivals(ProxyProtocol(("192.0.2.0/24",)), limiter)
    served: list[str] = []

    async def serve(stream: trio.abc.Stream, address: str, _: object) -> None:
        served.append(address)
        await trio.sleep_forever()

    for last in (1, 1, 2):
        ours, theirs = memory_stream_pair()
        await theirs.send_all(f"PROXY TCP4 203.0.113.{last} 192.0.2.9 5 6\r\n".encode())
        nursery.start_soon(arrivals.serve, ours, "192.0.2.9", "192.0.2.9:1", serve)
        await trio.testing.wait_all_tasks_blocked()
    assert served == ["203.0.113.1:5", "203.0.113.2:5"]
    nursery.cancel_scope.cancel()


# --- haproxy ---------------------------------------------------------------------------------------


@contextmanager
def haproxy(folder: Path, config: str) -> Iterator[None]:
    """Run haproxy with the sections in *config*."""
    file = folder / "haproxy.cfg"
    file.write_text(
        "defaults\n mode tcp\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n"
        + config
    )
    process = subprocess.Popen(
        [str(shutil.which("haproxy")), "-db", "-q", "-f", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def _from(source: str, port: int, url: str) -> trio.abc.Stream:
    """Dial haproxy at *port* from the address *source*, as soon as it listens."""
    until = time.monotonic() + 10
    while True:
        try:
            return await trio.open_tcp_stream("127.0.0.1", port, local_address=source)
        except OSError:
            if time.monotonic() > until:
                raise
            await trio.sleep(0.05)


@rpc("who")
async def who(_: str, peer: Peer) -> dict[str, str]:
    return {"address": peer.address, "server_name": peer.server_name}


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed (Debian has it)"
)
@pytest.mark.parametrize("version", ["send-proxy", "send-proxy-v2"])
@pytest.mark.parametrize("kind", ["tcp", "pass-through", "tls at haproxy", "websocket"])
async def test_haproxy_says_who_connects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    files = certificates()
    scheme = {"tcp": "amqp", "pass-through": "amqps", "tls at haproxy": "amqp", "websocket": "ws"}[
        kind
    ]
    async with Broker(nodes=[who], tls=ServerTls(files.server)) as broker:
        [url] = await broker.listen(
            f"{scheme}://127.0.0.1:0?proxy_protocol=required&trusted=127.0.0.1"
        )
        front, back = free_port(), parse_url(url).port
        ends = f" ssl crt {files.server}" if kind == "tls at haproxy" else ""
        options = " proxy-v2-options authority" if ends and version == "send-proxy-v2" else ""
        # A check of haproxy's own begins with LOCAL, and an unknown client.
        config = (
            f"listen amqp\n bind 127.0.0.1:{front}{ends}\n"
            f" server s 127.0.0.1:{back} {version}{options} check inter 100ms\n"
        )
        with haproxy(tmp_path, config):
            secure = kind in ("pass-through", "tls at haproxy")
            dialled = {"pass-through": "amqps", "tls at haproxy": "amqps"}.get(kind, scheme)
            async with connect(
                f"{dialled}://localhost:{front}",
                transport=partial(_from, "127.0.0.7", front),
                tls=ClientTls(files.ca) if secure else None,
            ) as peer:
                told = await peer.call("who", "", reply=dict[str, str])
                assert told["address"].startswith("127.0.0.7:")
                named = kind == "pass-through" or bool(options)
                assert told["server_name"] == ("localhost" if named else "")
                [row] = [
                    each
                    for each in broker.container.connections
                    if each.peer.address == told["address"]
                ]
                assert row.state == "open"
        assert f"from {told['address']}" in caplog.text or told["address"] in caplog.text
        # Without the header nothing is served.
        with pytest.raises(AmqpError):
            async with connect(url, reconnect=None, within=2, tls=ClientTls(files.ca)):
                pass
