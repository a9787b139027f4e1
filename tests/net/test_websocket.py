"""WebSocket: handshakes that are admitted, and valid and invalid frames. The peer is trio-websocket."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
import trio_websocket
from certificates import certificates
from wire import OPEN
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request

from amqp_rt.addresses import parse_url
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.errors import ConnectFailed
from amqp_rt.limits import DEFAULT_LIMITS, MIB, Limits
from amqp_rt.net.memory import MemoryStream, memory_stream_pair
from amqp_rt.net.tls import ClientTls, ServerTls, client_layer, encrypt
from amqp_rt.net.websocket import (
    WebSocketStream,
    accept_websocket,
    request_websocket,
)

KNOWN = certificates()
NONE: list[tuple[bytes, bytes]] = []

#: Prints whether WebSockets are known after each listener, before any client.
LISTEN = """
import sys, trio
from amqp_rt import Container

async def main():
    async with Container("server") as server:
        for scheme in ("amqp", "ws"):
            await server.listen(f"{scheme}://127.0.0.1:0")
            print("amqp_rt.net.websocket" in sys.modules)

trio.run(main)
"""


@rpc("size")
async def size(body: bytes) -> int:
    return len(body)


@node("sink")
async def sink(body: Any) -> None:
    pass


@asynccontextmanager
async def serving(path: str = "/amqp", scheme: str = "ws", **options: Any) -> AsyncIterator[str]:
    async with Container("server", nodes=[size, sink], **options) as container:
        (url,) = await container.listen(f"{scheme}://127.0.0.1:0{path}")
        yield url


def test_clients_do_not_wait_for_modules() -> None:
    run = subprocess.run([sys.executable, "-c", LISTEN], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.mark.req("L2")
@pytest.mark.parametrize("scheme", ["ws", "wss"])
@pytest.mark.parametrize("length", [0, 100, 3_000_000])
async def test_there_and_back(scheme: str, length: int) -> None:
    async with (
        serving(scheme=scheme, tls=ServerTls(KNOWN.server)) as url,
        Container("client") as client,
        client.connect(url, tls=ClientTls(KNOWN.ca), reconnect=None) as peer,
    ):
        assert url.endswith("/amqp")
        assert await peer.call("size", b"x" * length) == length


@pytest.mark.req("L2")
@pytest.mark.parametrize("chunk", [1, 3, 8, 100, 1_000])
async def test_frames_are_cut_anywhere_over_messages(chunk: int) -> None:
    """Messages of a client may hold one octet, half a frame, or many frames."""
    async with serving() as url:
        said = AMQP_HEADER + OPEN
        async with trio_websocket.open_websocket_url(url, subprotocols=["amqp"]) as websocket:
            assert websocket.subprotocol == "amqp"
            for at in range(0, len(said), chunk):
                await websocket.send_message(said[at : at + chunk])
            heard = b""
            while b"server" not in heard:
                message = await websocket.get_message()
                assert isinstance(message, bytes)
                heard += message
            assert heard.startswith(AMQP_HEADER)
            await websocket.ping(b"still there?")


@pytest.mark.req("L2")
async def test_our_client_and_another_server(nursery: trio.Nursery) -> None:
    heard: list[bytes] = []

    async def serve(request: trio_websocket.WebSocketRequest) -> None:
        websocket = await request.accept(subprotocol=request.proposed_subprotocols[0])
        for octet in AMQP_HEADER + OPEN:
            await websocket.send_message(bytes([octet]))
        while sum(map(len, heard)) < 20:
            message = await websocket.get_message()
            assert isinstance(message, bytes)
            heard.append(message)
        await websocket.aclose()

    server = await nursery.start(trio_websocket.serve_websocket, serve, "127.0.0.1", 0, None)
    async with (
        Container("client") as client,
        client.connect(f"ws://127.0.0.1:{server.port}/x", sasl=False, reconnect=None) as peer,
    ):
        assert peer.peer.container_id
        await peer.wait_closed()
    assert b"".join(heard).startswith(AMQP_HEADER)
    nursery.cancel_scope.cancel()


# --- handshakes ------------------------------------------------------------------------------------


@pytest.mark.req("L2")
@pytest.mark.parametrize(
    ("origin", "origins", "status"),
    [
        (None, (), 101),
        ("https://example.org", (), 403),
        ("https://example.org", ("https://example.org",), 101),
        ("https://example.org.evil.net", ("https://example.org",), 403),
        ("http://example.org", ("https://example.org",), 403),
        ("null", ("https://example.org",), 403),
        ("https://evil.net", ("*",), 101),
        # As a person writes it, and as the browser sends it.
        ("https://example.org", ("HTTPS://Example.org:443/",), 101),
        ("http://127.0.0.1", (), 403),
    ],
)
async def test_pages_are_let_in_by_name(
    origin: str | None, origins: tuple[str, ...], status: int
) -> None:
    headers = [] if origin is None else [(b"Origin", origin.encode())]
    async with serving(origins=origins) as url:
        assert await answered(url, headers=headers) == status


@pytest.mark.req("L2")
async def test_the_path_and_the_subprotocol_must_be_ours() -> None:
    async with serving("/amqp") as url:
        assert await answered(url) == 101
        assert await answered(url + "?token=x") == 101
        assert await answered(url + "/x") == 404
        assert await answered(url.removesuffix("/amqp")) == 404
        assert await answered(url, subprotocols=["mqtt"]) == 400
        assert await answered(url, subprotocols=[]) == 400
        assert await answered(url, subprotocols=["mqtt", "amqp"]) == 101
    async with serving("") as url:
        assert await answered(url) == 101
        assert await answered(url + "/") == 101


@pytest.mark.req("L2")
async def test_the_name_that_libraries_for_azure_know_is_spoken() -> None:
    async with serving() as url:
        for offered, spoken in (
            (["AMQPWSB10"], "AMQPWSB10"),
            (["AMQPWSB10", "amqp"], "amqp"),
        ):
            async with trio_websocket.open_websocket_url(url, subprotocols=offered) as websocket:
                assert websocket.subprotocol == spoken
                await websocket.send_message(AMQP_HEADER)
                heard = await websocket.get_message()
                assert isinstance(heard, bytes)
                assert heard.startswith(AMQP_HEADER)
        assert await answered(url, subprotocols=["amqpwsb10"]) == 400


@pytest.mark.req("L2")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ=="], 101),
        (["Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0"], 400),
        (["Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NTY3"], 400),
        (["Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ"], 400),
        (["Sec-WebSocket-Key: !DEyMzQ1Njc4OTAxMjM0NQ=="], 400),
        (["Sec-WebSocket-Key:"], 400),
        (["Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ=="] * 2, 400),
        (
            [
                "Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==",
                "Origin: https://good",
                "Origin: https://evil",
            ],
            400,
        ),
        (
            [
                "Sec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==",
                "Origin: https://evil",
                "Origin: https://good",
            ],
            400,
        ),
    ],
)
async def test_keys_and_origins_are_one_and_sound(headers: list[str], status: int) -> None:
    async with serving(origins=("https://good",)) as url:
        host, _, path = url.removeprefix("ws://").partition("/")
        name, _, port = host.rpartition(":")
        lines = [f"GET /{path} HTTP/1.1", f"Host: {host}", "Connection: Upgrade"]
        lines += ["Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Protocol: amqp", *headers, "", ""]
        async with await trio.open_tcp_stream(name, int(port)) as stream:
            await stream.send_all("\r\n".join(lines).encode())
            answer = await stream.receive_some(100)
            assert int(answer.split()[1]) == status


async def answered(
    url: str, *, subprotocols: list[str] | None = None, headers: list[tuple[bytes, bytes]] = NONE
) -> int:
    """Return the HTTP status of the answer to a handshake."""
    _, _, rest = url.partition("://")
    host, _slash, path = rest.partition("/")
    client = WSConnection(ConnectionType.CLIENT)
    request = Request(
        host=host,
        target=f"/{path}",
        subprotocols=["amqp"] if subprotocols is None else subprotocols,
        extra_headers=list(headers),
    )
    stream = await trio.open_tcp_stream("127.0.0.1", int(host.partition(":")[2]))
    async with stream:
        await stream.send_all(client.send(request))
        return int((await stream.receive_some()).split(b" ")[1])


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize(
    "said",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"AMQP\x00\x01\x00\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000,
        b"GET / HTTP/1.1\r\nHost: \xff\xff\r\nConnection: Upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    ],
    ids=lambda said: repr(said[:30]),
)
async def test_what_is_no_handshake_is_answered_and_ends(
    said: bytes, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.send_all(said)
    with pytest.raises(ConnectFailed, match="it spoke no WebSocket"):
        await accept_websocket(ours, path="/", origins=(), limits=DEFAULT_LIMITS, within=5)
    assert (await theirs.receive_some()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.req("L2", "X7")
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_handshake_that_does_not_go_on_ends(
    said: bytes, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    ours, theirs = memory_stream_pair()
    if said:
        await theirs.send_all(said)
    with pytest.raises(ConnectFailed):
        await accept_websocket(ours, path="/", origins=(), limits=DEFAULT_LIMITS, within=5)
    assert trio.current_time() == pytest.approx(5)


@pytest.mark.req("L2")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "with HTTP status 404"),
        (b"AMQP\x00\x01\x00\x00\r\n\r\n", "does not speak WebSocket there"),
        (b"", "does not speak WebSocket there"),
        (
            (
                b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: wrong\r\n\r\n"
            ),
            "does not speak WebSocket there",
        ),
    ],
)
async def test_a_servers_refusal_is_one_sentence(
    answer: bytes, why: str, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.send_all(answer)
    await theirs.send_eof()
    with pytest.raises(ConnectFailed, match=why):
        await request_websocket(ours, host="x", path="/", limits=DEFAULT_LIMITS)


# --- content of frames -----------------------------------------------------------------------------


async def opened(
    nursery: trio.Nursery, limits: Limits = DEFAULT_LIMITS
) -> tuple[WebSocketStream, MemoryStream, WSConnection]:
    """Open a WebSocket; return the server's side, the client's stream, and its wsproto connection."""
    ours, theirs = memory_stream_pair()
    client = WSConnection(ConnectionType.CLIENT)
    await theirs.send_all(client.send(Request(host="x", target="/", subprotocols=["amqp"])))
    stream = await accept_websocket(ours, path="/", origins=(), limits=limits, within=5)
    client.receive_data(await theirs.receive_some())
    list(client.events())
    return stream, theirs, client


def masked(first: int, payload: bytes = b"", *, length: bytes | None = None) -> bytes:
    """Return a client's frame with any content; its mask is zero."""
    if length is None:
        length = (
            struct.pack("!BH", 126, len(payload)) if len(payload) > 125 else bytes([len(payload)])
        )
    return bytes([first, length[0] | 0x80]) + length[1:] + bytes(4) + payload


async def everything(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(piece) async for piece in stream])


def close_code(side: WSConnection, said: bytes) -> int:
    """Return the code of the close at the end of the octets *said* to *side*."""
    side.receive_data(said)
    *_, last = side.events()
    assert isinstance(last, CloseConnection)
    return last.code


def code_of(out: bytes) -> int:
    """Return the code of a close frame."""
    assert out[0] == 0x88
    return int.from_bytes(out[2:4], "big")


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (masked(0x81, b"text"), 1003),
        (b"\x82\x04abcd", 1002),  # not masked
        (masked(0xC2, b"abcd"), 1002),  # RSV1: compressed without negotiation
        (masked(0x92, b"abcd"), 1002),
        (masked(0x83, b"abcd"), 1002),  # reserved opcodes
        (masked(0x8B), 1002),
        (masked(0x80, b"abcd"), 1002),  # a continuation without a beginning
        (masked(0x02, b"a") + masked(0x82, b"b"), 1002),
        (masked(0x09, b"a"), 1002),  # a ping in pieces
        (masked(0x89, b"a" * 126), 1002),
        (masked(0x82, length=b"\x7f" + b"\xff" * 8), 1002),
        (masked(0x88, b"\x00"), 1002),
    ],
)
async def test_bad_frames_are_answered_with_their_code(
    frame: bytes, code: int, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    stream, client, _ = await opened(nursery)
    await client.send_all(frame)
    with pytest.raises(trio.BrokenResourceError, match="WebSocket: "):
        await stream.receive_some()
    assert code_of(await client.receive_some()) == code
    await stream.aclose()
    assert await client.receive_some() == b""


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize("pieces", [1, 10])
async def test_messages_are_bounded(
    pieces: int, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bound = 1_000
    for size, fits in ((bound, True), (bound + pieces, False)):
        stream, client, _ = await opened(nursery, Limits(websocket_message_max=bound))
        each = b"x" * (size // pieces)
        whole = b"".join(
            masked((0x82 if at == 0 else 0x80) & (0xFF if at == pieces - 1 else 0x7F), each)
            for at in range(pieces)
        )
        if fits:
            # Repeatedly: the limit is for a single message.
            for _ in range(3):
                await client.send_all(whole)
                assert len(await stream.receive_some()) == size
        else:
            await client.send_all(whole)
            with pytest.raises(trio.BrokenResourceError, match="a message is too large"):
                await stream.receive_some()
            assert code_of(await client.receive_some()) == 1009
        await trio.aclose_forcefully(stream)


@pytest.mark.slow
@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize("above", [0, 1])
@pytest.mark.parametrize("kind", ["empty fragments", "small fragments", "pings"])
@pytest.mark.parametrize("known", [False, True])
async def test_frames_that_make_no_message_are_bounded(
    known: bool,
    kind: str,
    above: int,
    autojump_clock: trio.testing.MockClock,
    nursery: trio.Nursery,
) -> None:
    """Empty fragments add no size to a message, and pings are no messages: their octets count anyway."""
    limits = Limits(
        websocket_message_max=20_000, websocket_stranger_max=3_000, websocket_overhead_max=1_000
    )
    stream, theirs, client = await opened(nursery, limits)
    bound = 3_000
    if known:
        stream.trust()
        bound = 20_000 + 1_000
    each = masked(0x89) if kind == "pings" else masked(0x00, b"x" if "small" in kind else b"")
    begin = b"" if kind == "pings" else masked(0x02)
    # A complete message resets the count: its end is at the bound, or one octet above.
    count = (bound - len(begin) - 150) // len(each)
    rest = bound + above - len(begin) - count * len(each) - 8
    end = masked(0x82 if kind == "pings" else 0x80, b"e" * (rest + 2 if rest < 124 else rest))
    said = begin + each * count + end
    assert len(said) == bound + above
    await theirs.send_all(said[:-1])
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(theirs.send_all, said[-1:])
    if not above:
        while not (await stream.receive_some()).endswith(b"e"):
            pass
        return
    # The octet above the bound is not processed.
    with pytest.raises(trio.BrokenResourceError, match="too much has come without a message"):
        await everything(stream)
    assert close_code(client, await everything(theirs)) == 1009


@pytest.mark.slow
@pytest.mark.req("L2", "SE18")
async def test_a_stranger_costs_little_memory(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """Input before a login is bounded, also in pieces that cost most."""
    stream, theirs, _ = await opened(nursery)

    async def flood() -> None:
        with suppress(trio.BrokenResourceError):
            await theirs.send_all(masked(0x02))
            while True:
                await theirs.send_all(masked(0x00, b"x") * 1_000)

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        nursery.start_soon(flood)
        with pytest.raises(trio.BrokenResourceError, match="too much"):
            await everything(stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 4 * MIB
    nursery.cancel_scope.cancel()


@pytest.mark.req("L2", "SE18")
async def test_a_login_makes_room(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """A client without a login may send enough for a login; one with a login sends messages."""
    limits = Limits(websocket_stranger_max=10_000, websocket_message_max=100_000)
    stream, theirs, _ = await opened(nursery, limits)
    large = masked(0x82, length=struct.pack("!BQ", 127, 100_000)) + b"x" * 100_000
    stream.trust()
    nursery.start_soon(theirs.send_all, large)
    heard = 0
    while heard < 100_000:
        heard += len(await stream.receive_some())
    stream, theirs, client = await opened(nursery, limits)
    nursery.start_soon(theirs.send_all, large)
    with pytest.raises(trio.BrokenResourceError, match="too much has come without a message"):
        await everything(stream)
    assert close_code(client, await everything(theirs)) == 1009


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize("above", [0, 1])
async def test_the_body_of_a_refusal_is_bounded(
    above: int, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """A hostile server refuses us with a long body."""
    bound = 2_000
    ours, theirs = memory_stream_pair()
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n"
    size = bound + above - len(head % 1_000)
    await theirs.send_all(head % size + b"x" * size)
    why = "speak WebSocket there" if above else "with HTTP status 403"
    with pytest.raises(ConnectFailed, match=why):
        await request_websocket(
            ours,
            host="x",
            path="/",
            limits=Limits(websocket_stranger_max=bound),
        )


@pytest.mark.req("L2", "L6", "SE18")
async def test_who_pings_and_does_not_read_is_left(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    stream, theirs, _ = await opened(nursery, Limits(write_stall_s=10))
    stream.trust()
    # A little more fits, and then answers wait.
    await stream.send_all(bytes(255_000))

    async def ping() -> None:
        said = masked(0x89, b"p" * 125) * 100 + masked(0x82, b"data")
        with suppress(trio.BrokenResourceError):
            while True:
                await theirs.send_all(said)

    nursery.start_soon(ping)
    with pytest.raises(trio.BrokenResourceError, match="has not read for 10 s"):
        await everything(stream)
    await stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize(
    ("frame", "code"), [(b"\x81\x04text", 1003), (masked(0x82, b"abcd"), 1002), (b"\xc2\x00", 1002)]
)
async def test_a_servers_bad_frames_are_answered_too(
    frame: bytes, code: int, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    ours, theirs = memory_stream_pair()
    server = WSConnection(ConnectionType.SERVER)

    async def serve() -> None:
        server.receive_data(await theirs.receive_some())
        list(server.events())
        await theirs.send_all(server.send(AcceptConnection(subprotocol="amqp")) + frame)

    async with trio.open_nursery() as serving:
        serving.start_soon(serve)
        stream = await request_websocket(ours, host="x", path="/", limits=DEFAULT_LIMITS)
    with pytest.raises(trio.BrokenResourceError, match="WebSocket: "):
        await stream.receive_some()
    nursery.start_soon(stream.aclose)
    assert close_code(server, await everything(theirs)) == code


@pytest.mark.req("L2", "SE18")
async def test_who_is_not_read_is_held_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    stream, client, _ = await opened(nursery)
    stream.trust()
    sent = 0
    with trio.move_on_after(5):
        while True:
            await client.send_all(masked(0x82, b"x" * 10_000))
            sent += 1
    assert sent < 200
    heard = 0
    while heard < sent * 10_000:
        heard += len(await stream.receive_some())


@pytest.mark.req("L2")
async def test_a_ping_is_answered_and_a_close_too(nursery: trio.Nursery) -> None:
    stream, theirs, client = await opened(nursery)
    heard: list[bytes] = []

    async def listen() -> None:
        heard.append(await everything(stream))

    nursery.start_soon(listen)
    await theirs.send_all(client.send(Ping(payload=b"p")))
    assert await theirs.receive_some() == b"\x8a\x01p"
    await theirs.send_all(client.send(BytesMessage(data=b"last")))
    await theirs.send_all(masked(0x88, b"\x03\xe8bye"))
    assert code_of(await theirs.receive_some()) == 1000
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [b"last"]
    with pytest.raises(trio.BrokenResourceError, match="has ended"):
        await stream.send_all(b"too late")
    await stream.aclose()
    assert await theirs.receive_some() == b""


@pytest.mark.req("L2")
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_closed_websocket_leaves_no_task(
    cancelled: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """The client does not answer our close: after a moment no task is left."""
    async with trio.open_nursery() as nursery:
        stream, theirs, _ = await opened(nursery)
        if cancelled:
            await trio.aclose_forcefully(stream)
        else:
            began = trio.current_time()
            await stream.aclose()
            assert trio.current_time() - began == pytest.approx(DEFAULT_LIMITS.websocket_linger_s)
            assert code_of(await theirs.receive_some()) == 1000
        assert await theirs.receive_some() == b""
        await trio.testing.wait_all_tasks_blocked()
        assert not nursery.child_tasks


@pytest.mark.req("L2")
async def test_a_page_that_leaves_leaves_nothing(nursery: trio.Nursery) -> None:
    """A browser closes the WebSocket without closing the AMQP connection."""
    async with serving() as url:
        stream = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        async with stream:
            client = WSConnection(ConnectionType.CLIENT)
            await stream.send_all(
                client.send(Request(host="x", target="/amqp", subprotocols=["amqp"]))
            )
            await stream.receive_some()
            await stream.send_all(masked(0x82, AMQP_HEADER + OPEN) + masked(0x88, b"\x03\xe8"))
            while await stream.receive_some():
                pass


@pytest.mark.req("L2", "SE18")
@pytest.mark.parametrize("scheme", ["ws", "wss"])
async def test_who_breaks_a_rule_while_sending_reads_why(
    scheme: str,
) -> None:
    """Discard the rest of the input of a faulty peer, so that the close with its code is not lost."""
    async with serving(scheme=scheme, tls=ServerTls(KNOWN.server)) as url:
        stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        if scheme == "wss":
            tls = client_layer(ClientTls(KNOWN.ca), "localhost")
            stream = await encrypt(stream, tls, within=5)
        async with stream:
            client = WSConnection(ConnectionType.CLIENT)
            request = Request(host="x", target="/amqp", subprotocols=["amqp"])
            # The first frames follow the handshake at once.
            hello = client.send(request) + masked(0x82, AMQP_HEADER + OPEN)
            await stream.send_all(hello)
            heard = b""
            while b"server" not in heard:
                heard += await stream.receive_some()
            await stream.send_all(masked(0x83) + b"x" * 300_000)
            heard += await everything(stream)
            client.receive_data(heard)
            *_, last = client.events()
            assert isinstance(last, CloseConnection)
            assert last.code == 1002
