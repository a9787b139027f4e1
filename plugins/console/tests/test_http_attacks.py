"""Hostile requests at the HTTP door: it answers or closes, serves others meanwhile, and stops when it has to."""

from __future__ import annotations

import gc
import json
import signal
import ssl
import time
from base64 import b64encode
from collections import Counter
from typing import Any

import httpx2
import jwt
import pytest
import trio
import trio.testing
from amqp_rt_console.server import HttpServer
from browsing import QUICK, USERS, Site, site
from certificates import certificates
from click.testing import CliRunner
from commands import Served, amqp_rt
from msgspec.structs import replace
from root_logging import restored_logging

from amqp_rt import Jwt, Limits, ServerTls
from amqp_rt.cli.serve import serve
from amqp_rt.container.doors import DoorArrival
from amqp_rt.errors import ConnectFailed
from amqp_rt.security.tokens import Cbs

pytestmark = pytest.mark.req("G6")

HOST = b"Host: localhost\r\n"
BASIC = b"Authorization: Basic " + b64encode(b"root:r-password") + b"\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"


async def exchange(web: Site, sent: bytes, *, within: float = 10) -> bytes:
    """Send octets on a connection of their own, end our direction, and return what is answered."""
    async with await trio.open_tcp_stream("127.0.0.1", web.door_port) as stream:
        with trio.fail_after(within):
            try:
                await stream.send_all(sent)
                await stream.send_eof()
                return b"".join([piece async for piece in stream])
            except trio.BrokenResourceError:
                return b""


ATTACKS: dict[str, tuple[bytes, set[bytes]]] = {
    "nothing": (b"", {b""}),
    "AMQP": (b"AMQP\x00\x01\x00\x00\r\n\r\n", {b"400"}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {b"400"}),
    "HTTP/1.0": (b"GET /login HTTP/1.0\r\nHost: localhost\r\n\r\n", {b"200"}),
    "no host": (b"GET /login HTTP/1.0\r\n\r\n", {b"400"}),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", {b"400"}),
    "absolute form": (b"GET http://evil.example/login HTTP/1.1\r\n" + HOST + b"\r\n", {b"200"}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200, {b"400"}),
    "h2c": (b"GET /login HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n", {b"200"}),
    "websocket": (
        b"GET /login HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        {b"200"},
    ),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n", {b"401", b"403", b"404", b"405"}),
    "unknown method": (b"BREW /login HTTP/1.1\r\n" + HOST + b"\r\n", {b"405"}),
    "path not UTF-8": (b"GET /%ff%fe HTTP/1.1\r\n" + HOST + BASIC + b"\r\n", {b"404"}),
    "path of the API not UTF-8": (
        b"GET /api/v1/nodes/%ff HTTP/1.1\r\n" + HOST + BASIC + b"\r\n",
        {b"400"},
    ),
    "octets in the path": (b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n", {b"400"}),
    "files elsewhere": (
        b"GET /static/../templates/login.html HTTP/1.1\r\n" + HOST + BASIC + b"\r\n",
        {b"404", b"400"},
    ),
    "files elsewhere, encoded": (
        b"GET /static/%2e%2e%2fserver.py HTTP/1.1\r\n" + HOST + BASIC + b"\r\n",
        {b"404", b"400"},
    ),
    "a NUL in a file": (b"GET /static/a%00b HTTP/1.1\r\n" + HOST + b"\r\n", {b"404", b"400"}),
    "length and chunks": (
        b"POST /login HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        {b"401", b"400"},
    ),
    "two lengths": (
        b"POST /login HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        {b"400"},
    ),
    "negative length": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n",
        {b"400"},
    ),
    "huge length": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n",
        {b"413", b"400"},
    ),
    "malformed chunks": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        {b"", b"400"},
    ),
    "a body that ends early": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\nabc",
        {b"", b"400"},
    ),
    "many fields": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 1000\r\n\r\n" + b"a&" * 500,
        {b"400"},
    ),
    "a form not UTF-8": (
        b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 6\r\n\r\nuser=\xff",
        {b"400"},
    ),
    "odd cookies": (
        b"GET /login HTTP/1.1\r\n" + HOST + b'Cookie: a="\\"; ;=;amqp_rt=\xff;$x\r\n\r\n',
        {b"200", b"400"},
    ),
    "a large head": (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, {b"431"}),
    "many headers": (b"GET / HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 20_000 + b"\r\n", {b"431"}),
    "a folded header": (
        b"GET /login HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
        {b"200", b"400"},
    ),
    "requests in advance": (b"GET /login HTTP/1.1\r\n" + HOST + b"\r\n" * 2, {b"200"}),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_strangers_get_an_answer_or_none(
    attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, statuses = ATTACKS[attack]
    async with site() as web, web.client("root") as good:
        assert (await good.get("/api/v1/session")).status_code == 200
        answer = await exchange(web, sent)
        status = answer.split(b" ")[1] if answer else b""
        assert status in statuses, answer
        assert (await good.get("/api/v1/session")).status_code == 200
        await web.wait(["root"])
    assert "Traceback" not in caplog.text
    assert "r-password" not in caplog.text


@pytest.mark.parametrize("cut", range(0, 140, 9))
async def test_a_request_may_come_in_pieces_and_end_anywhere(cut: int) -> None:
    body = b'{"body": "x"}'
    request = (
        b"POST /api/v1/nodes/other/publish HTTP/1.1\r\n" + HOST + BASIC
        + b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: 13\r\n\r\n" + body
    )  # fmt: skip
    async with site() as web:
        await exchange(web, request[:cut])
        assert web.broker.stats("other").enqueued == 0
        async with await trio.open_tcp_stream("127.0.0.1", web.door_port) as stream:
            await stream.send_all(request[:cut])
            await trio.testing.wait_all_tasks_blocked(0.001)
            await stream.send_all(request[cut:])
            answer = b"".join([piece async for piece in stream])
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert web.broker.stats("other").enqueued == 1


async def test_a_peer_that_does_not_read_is_given_up(autojump_clock: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})

    peer, ours = trio.testing.lockstep_stream_pair()
    server = HttpServer(app, Limits(write_stall_s=30))
    arrival = DoorArrival(address="192.0.2.1:1", logged_in=lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours, arrival)
        began = trio.current_time()
        await peer.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert trio.current_time() - began == 30
    # It does not keep the door from closing either.
    peer, ours = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours, arrival)
        await peer.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began


async def test_a_failure_of_ours_ends_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] != "/silent":
            raise RuntimeError("a defect")

    server = HttpServer(app, Limits())
    for path, answer in (("/", b"500"), ("/silent", b"500"), ("/late", b"200")):
        peer, ours = trio.testing.memory_stream_pair()
        await peer.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await peer.send_eof()
        await server.serve(ours, DoorArrival(address="", logged_in=lambda: None))
        await trio.aclose_forcefully(ours)
        assert b"".join([each async for each in peer]).split(b" ")[1] == answer
    assert caplog.text.count("RuntimeError: a defect") == 2


@pytest.mark.parametrize("given", ["", "bytes=5-1", "bytes=a-b,-", "bytes=0-1", "bytes=0-1,4-5"])
async def test_files_are_sent_whole_to_clients_that_end_their_side(given: str) -> None:
    range_ = f"Range: {given}\r\n".encode() if given else b""
    async with site() as web:
        request = b"GET /static/console.css HTTP/1.1\r\n" + HOST + range_ + b"\r\n"
        head, _, body = (await exchange(web, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert f"content-length: {len(body)}".encode() in head
        assert b"@media" in body


async def test_refused_methods_are_problems() -> None:
    async with site() as web, web.client("root") as client:
        for method, path in (
            ("OPTIONS", "/api/v1/nodes"),
            ("PUT", "/"),
            ("POST", "/static/console.css"),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == 405
            assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("access", {"GET", "HEAD"}),
        ("nodes", {"GET", "HEAD"}),
        ("nodes/x", {"GET", "HEAD", "PUT", "PATCH", "DELETE"}),
        ("nodes/x/purge", {"POST"}),
        ("sessions/x", {"GET", "HEAD", "DELETE"}),
    ],
)
@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "BREW"])
async def test_allowed_methods_are_those_of_the_resource(
    method: str, path: str, allowed: set[str]
) -> None:
    async with site() as web, web.client("root") as client:
        answer = await client.request(method, f"/api/v1/{path}")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed


async def test_only_targets_in_absolute_form_are_read_as_such() -> None:
    async with site() as web:
        for target, kind in (
            (b"/?q=a://x/api/v1/session", b"text/html"),
            (b"hTTp://x/api/v1/session", b"application/json"),
        ):
            request = b"GET " + target + b" HTTP/1.1\r\n" + HOST + BASIC + b"\r\n"
            assert b"content-type: " + kind in await exchange(web, request)


async def test_strangers_count_until_they_log_in() -> None:
    limits = replace(
        QUICK, connections_unauthenticated_per_address_max=3, connections_per_address_max=6
    )
    async with site(limits=limits) as web, web.client("root") as good:
        assert (await good.get("/api/v1/session")).status_code == 200
        streams = [await trio.open_tcp_stream("127.0.0.1", web.door_port) for _ in range(4)]
        with trio.fail_after(5):
            # The oldest makes room; who has logged in stays.
            assert await streams[0].receive_some(1) == b""
        assert (await good.get("/api/v1/session")).status_code == 200
        for each in streams:
            await trio.aclose_forcefully(each)


async def test_what_has_ended_leaves_nothing() -> None:
    def counted() -> Counter[str]:
        gc.collect()
        names = ("WebSession", "_Conversation", "_Exchange", "Connection", "Request", "Guard")
        return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in names)

    async with site() as web:
        for each in range(2):
            before = counted() if each else Counter()
            for user in USERS:
                async with web.client(user) as client:
                    for path in ("/api/v1/nodes", "/", "/nowhere"):
                        await client.get(path)
            for session in [*web.door.sessions._all]:
                session.end()
            await web.wait([])
            for attack in ("AMQP", "a body that ends early", "many fields"):
                await exchange(web, ATTACKS[attack][0])
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert counted() == before


# --- TLS ---------------------------------------------------------------------------------------


async def test_over_tls_cookies_and_passwords_of_other_machines_are_safe() -> None:
    known = certificates()
    async with site(url="https://localhost:0", tls=ServerTls(known.server)) as web:
        assert web.url.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=known.ca)
        async with web.client(verify=context) as browser:
            token = await web.browser(browser, "ops")
            assert token
            (cookie,) = browser.cookies.jar
            assert cookie.name.startswith("__Host-amqp_rt_")
            assert (cookie.secure, cookie.path) == (True, "/")
            (connection,) = web.broker.container.connections
            assert connection.peer.secure
        async with httpx2.AsyncClient(timeout=10) as clear:
            with pytest.raises(httpx2.TransportError):
                await clear.get(web.url.replace("https", "http"))


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("https://127.0.0.1:0", {}, "there is no certificate"),
        ("http://127.0.0.1:0", {"tls": "server", "tls_required": True}, "TLS is required"),
    ],
)
async def test_a_door_without_its_certificate_does_not_open(
    url: str, options: dict[str, Any], why: str
) -> None:
    if options:
        options = {**options, "tls": ServerTls(certificates().server)}
    with pytest.raises(ConnectFailed, match=why):
        async with site(url=url, **options):
            pass


async def test_tokens_log_in() -> None:
    secret = "a secret of at least 32 octets, for HS256"

    def token(seconds: float) -> dict[str, str]:
        claims = {"aud": "b", "sub": "ada", "scope": "manage", "exp": int(time.time() + seconds)}
        return {"authorization": f"Bearer {jwt.encode(claims, secret, algorithm='HS256')}"}

    cbs = Cbs([Jwt(secret=secret.encode(), audience="b")])
    async with site(users=None, cbs=cbs) as web, web.client() as client:
        assert (await client.get("/api/v1/session")).status_code == 401
        for seconds, status in ((600, 200), (-600, 401)):
            answer = await client.get("/api/v1/session", headers=token(seconds))
            assert answer.status_code == status, answer.text


async def test_a_broker_without_logins_has_anonymous_sessions() -> None:
    async with site(users=None, access=None) as web, web.client() as client:
        assert (await client.get("/api/v1/session")).json()["user"] is None
        assert (await client.get("/api/v1/nodes")).status_code == 200
        evil = {"sec-fetch-site": "cross-site"}
        assert (await client.delete("/api/v1/nodes/other", headers=evil)).status_code == 403
        assert (await client.delete("/api/v1/nodes/other")).status_code == 204
        (connection,) = web.broker.container.connections
        assert (connection.peer.mechanism, connection.peer.trusted) == ("ANONYMOUS", False)


async def test_sessions_are_of_virtual_hosts() -> None:
    async with site(access=None, virtual_hosts=["", "eu"]) as web, web.client("root") as client:
        eu = {"amqp-virtual-host": "eu"}
        answer = await client.put("/api/v1/nodes/q", json={"kind": "queue"}, headers=eu)
        assert answer.status_code == 201, answer.text
        assert web.broker.has("q", virtual_host="eu")
        assert not web.broker.has("q")
        names = (await client.get("/api/v1/nodes", headers=eu)).json()["items"]
        assert "team/q" not in [each["name"] for each in names]
    async with site(access=None, virtual_hosts=["eu"]) as web, web.client("root") as client:
        assert (await client.get("/api/v1/nodes")).status_code == 404


# --- as a program ------------------------------------------------------------------------------


@pytest.mark.slow
def test_serve_has_a_door() -> None:
    served = Served(
        "--http", "http://127.0.0.1:0", "--user", "ada:a-password", "--node", "queue:orders"
    )
    try:
        url = served.ready["http"]
        with httpx2.Client(base_url=url, auth=("ada", "a-password"), timeout=10) as client:
            (row,) = client.get("/api/v1/nodes", params={"q": "orders"}).json()["items"]
            assert (row["name"], row["kind"]) == ("orders", "queue")
            assert json.loads(client.get("/api/v1/openapi.json").text)["openapi"] == "3.1.0"
            # A connection that stands does not delay the end.
            code, errors = served.stop(signal.SIGTERM)
    finally:
        served.stop(signal.SIGTERM)
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "why"),
    [("http://0.0.0.0:0", "in clear"), ("x", "is no URL of the HTTP door")],
)
def test_serve_refuses_other_urls(url: str, why: str) -> None:
    done = amqp_rt("serve", "--listen", "amqp://127.0.0.1:0", "--http", url)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_the_plug_in_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amqp_rt.cli.serve.entry_points", lambda **_: ())
    with restored_logging():
        done = CliRunner().invoke(serve, ["--http", "http://127.0.0.1:0", "--listen", "memory://b"])
    assert done.exit_code == 2
    assert "--http needs a plug-in: pip install amqp-rt-console" in done.output
