"""Health over HTTP, and the listener of probes."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from commands import Served, amqp_rt

from amqp_rt import Container
from amqp_rt.broker.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.health import ContainerHealth
from amqp_rt.errors import AmqpError, ConnectFailed
from amqp_rt.stores.base import StoreFailed
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.telemetry.probe import Probe, parse_probe_url
from amqp_rt.telemetry.probe_http import (
    CONNECTIONS_MAX,
    PATIENCE_S,
    HttpResponder,
    ProbeRequest,
    ProbeResponse,
)

pytestmark = pytest.mark.req("O3")

Answer = tuple[int, str, bytes]


def fetch(url: str, accept: str = "*/*", method: str = "GET") -> Answer:
    """Return status, content-type and body."""
    request = urllib.request.Request(url, headers={"accept": accept}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers["content-type"], response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("content-type", ""), error.read()


async def get(url: str, **options: Any) -> Answer:
    return await trio.to_thread.run_sync(lambda: fetch(url, **options))


@asynccontextmanager
async def probing(container: Container, url: str = "http://127.0.0.1:0") -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(Probe(container).serve, url)
        nursery.cancel_scope.cancel()


async def test_probes_are_answered() -> None:
    broker = Broker("eu-1")
    async with probing(broker.container) as url:
        assert url.startswith("http://127.0.0.1:")
        status, kind, body = await get(f"{url}/readyz")
        assert (status, kind) == (503, "application/json")
        assert json.loads(body) == {"ready": False, "reasons": ["'eu-1' has not started"]}
        assert (await get(f"{url}/healthz"))[0] == 200
        async with broker:
            assert (await get(f"{url}/healthz"))[0] == 200
            assert b"neither listens nor is connected" in (await get(f"{url}/readyz"))[2]
            await broker.listen("amqp://127.0.0.1:0")
            status, _, body = await get(f"{url}/readyz")
            assert (status, json.loads(body)) == (200, {"ready": True, "reasons": []})
            await broker.declare(Queue("orders-eu"), Queue("other"))
            status, kind, body = await get(f"{url}/metrics")
            assert (status, kind.split(";")[0]) == (200, "text/plain")
            assert b"amqp_rt_build_info" in body
            assert b"orders-eu" not in body
            _, kind, body = await get(
                f"{url}/metrics/detailed?node=orders-*", accept="application/openmetrics-text"
            )
            assert kind.startswith("application/openmetrics-text")
            assert b'node="orders-eu"' in body
            assert b'node="other"' not in body
            assert (await get(f"{url}/elsewhere"))[0] == 404
            assert (await get(f"{url}/metrics", method="DELETE"))[0] == 405
            assert (await get(f"{url}/metrics", method="HEAD"))[2] == b""
            long = f"{url}/metrics/detailed?node={'%2A' * 257}"
            assert await get(long) == (
                400,
                "text/plain; charset=utf-8",
                b"node= has more than 256 characters\n",
            )
            # No version of OpenMetrics: prometheus-client cannot compare it.
            odd = "application/openmetrics-text; version=zz"
            assert (await get(f"{url}/metrics", accept=odd))[1].startswith("text/plain")


async def test_only_what_has_been_live_can_be_dead() -> None:
    class Told(Container):
        live = False

        def health(self) -> ContainerHealth:
            return ContainerHealth(self.live, False)

    told = Told("told")
    async with probing(told) as url:
        # It may be reading its store: a restart would begin again.
        assert await get(f"{url}/healthz") == (200, "application/json", b'{"live":true}\n')
        told.live = True
        assert (await get(f"{url}/healthz"))[0] == 200
        told.live = False
        assert await get(f"{url}/healthz") == (503, "application/json", b'{"live":false}\n')


async def test_a_container_is_live_from_its_startup_to_its_end() -> None:
    seen = []
    shop = Container("shop")
    shop.on_startup(lambda: seen.append(shop.health()))
    assert not shop.health().live

    async def fail() -> None:
        async with shop:
            seen.append(shop.health())
            raise KeyError("a mistake")

    with pytest.raises(KeyError):
        await fail()
    assert [each.live for each in seen] == [True, True]
    assert seen[0] == ContainerHealth(True, False, ("'shop' has not started",))
    assert shop.health() == ContainerHealth(False, False, ("'shop' has stopped",))


async def test_a_container_that_stops_is_not_ready() -> None:
    async with Container("shop", drain_s=5) as shop:
        await shop.listen("memory://shop")
        assert shop.health().ready
        seen = []
        shop.on_shutdown(lambda: seen.append(shop.health()))
    (health,) = seen
    assert (health.live, health.ready) == (True, False)
    assert health.reasons == ("'shop' is stopping",)


async def test_a_client_is_ready_while_its_connections_are_open(autojump_clock: Any) -> None:
    async with Container("worker") as worker:
        assert not worker.health().ready
        async with Container("server", network=worker.network) as server:
            await server.listen("memory://s")
            connecting = worker.connect("memory://s")
            peer = await connecting.__aenter__()
            assert worker.health().ready
        await peer.wait_changed() if peer.state == "open" else None
        (reason,) = worker.health().reasons
        assert reason == "the connection to a peer is recovering"
        with trio.CancelScope() as scope:
            scope.cancel()
            await connecting.__aexit__(None, None, None)
        assert worker.dialled == set()


async def test_a_broker_whose_store_has_failed_is_not_ready() -> None:
    class Failing(MemoryStore):
        broken = False

        def commit(self, batch: Any) -> None:
            if self.broken:
                raise StoreFailed("the disk is gone")
            super().commit(batch)

        def open(self) -> Any:
            if self.broken:
                raise StoreFailed("the disk is gone")
            return super().open()

    async def execute(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    store = Failing()
    async with Broker("eu-1", store=store, executor=execute) as broker:
        await broker.listen("memory://b")
        assert broker.container.health().ready
        store.broken = True
        await broker.declare(Queue("q"))
        await trio.testing.wait_all_tasks_blocked()
        (reason,) = broker.container.health().reasons
    assert reason.startswith("the store has failed: ")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("http://:9100", ("127.0.0.1", 9100)),
        ("http://0.0.0.0:80/", ("0.0.0.0", 80)),
        ("http://[::1]:80", ("::1", 80)),
        ("http://probe.example", ("probe.example", 9000)),
    ],
)
def test_places_of_probes(url: str, place: tuple[str, int]) -> None:
    assert parse_probe_url(url) == place


@pytest.mark.parametrize(
    "url", ["", "9000", "https://x:1", "http://x:70000", "http://x/metrics", "http://a:b@x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(AmqpError, match="is no URL of a probe"):
        parse_probe_url(url)


async def test_a_port_in_use_is_named() -> None:
    async with Container("one") as one, probing(one) as url:
        with pytest.raises(ConnectFailed, match=f"cannot listen on {url}: .*in use"):
            await Probe(one).serve(url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqp_rt.telemetry.metrics", None)
    with pytest.raises(AmqpError, match=r"pip install 'amqp-rt\[metrics\]'"):
        Probe(Container("one"))


_UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 30, b"200"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + _UPGRADE + b"AAAA\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + _UPGRADE + b"A\r\n\r\n", b"200"),
        (
            b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + b"x" * 9999,
            b"405",
        ),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"GET http://[::1/healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"404"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200, b"405"),
        (b"AMQP\x00\x01\x00\x00\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000, b"431"),
    ],
)
async def test_no_request_ends_the_container(sent: bytes, status: bytes) -> None:
    async with Container("one") as one, probing(one) as url:
        host, port = parse_probe_url(url)
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(sent)
            with trio.fail_after(4):
                answer = b"".join([piece async for piece in stream])
        assert answer.split(b" ")[1] == status
        assert b"connection: close" in answer.lower()
        assert (await get(f"{url}/healthz"))[0] == 200


async def test_a_peer_that_does_not_read_is_given_up(autojump_clock: Any) -> None:
    async def respond(request: ProbeRequest) -> ProbeResponse:
        return ProbeResponse(200, b"all is well")

    peer, ours = trio.testing.lockstep_stream_pair()
    handle = HttpResponder(respond).handle
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handle, ours)
        began = trio.current_time()
        await peer.send_all(b"GET / HTTP/1.0\r\n\r\n")
    assert trio.current_time() - began == PATIENCE_S
    peer, ours = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handle, ours)
        await peer.send_all(b"GET / HTTP/1.0\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began


async def test_a_peer_that_does_not_ask_is_given_up(autojump_clock: Any) -> None:
    async def respond(request: ProbeRequest) -> ProbeResponse:
        raise AssertionError("there was no request")

    handle = HttpResponder(respond).handle
    pairs = [trio.testing.memory_stream_pair() for _ in range(CONNECTIONS_MAX + 1)]
    closed: list[float] = []

    async def watch(peer: trio.abc.ReceiveStream) -> None:
        assert await peer.receive_some(1) == b""
        closed.append(trio.current_time() - began)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for peer, ours in pairs:
            nursery.start_soon(watch, peer)
            nursery.start_soon(handle, ours)
    # One more than there may be.
    assert closed == [0.0, *[PATIENCE_S] * CONNECTIONS_MAX]


async def test_a_failure_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def respond(request: ProbeRequest) -> ProbeResponse:
        raise RuntimeError("a defect")

    peer, ours = trio.testing.memory_stream_pair()
    await peer.send_all(b"GET / HTTP/1.0\r\n\r\n")
    await HttpResponder(respond).handle(ours)
    assert await peer.receive_some(1) == b""
    assert "a defect" in caplog.text


@pytest.mark.slow
def test_serve_has_a_probe() -> None:
    served = Served("--probe", "http://127.0.0.1:0", "--node", "queue:q")
    try:
        probe = served.ready["probe"]
        assert fetch(f"{probe}/readyz")[0] == 200
        assert b"amqp_rt_messages" in fetch(f"{probe}/metrics")[2]
    finally:
        code, errors = served.stop(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.slow
def test_serve_refuses_other_urls() -> None:
    done = amqp_rt("serve", "--listen", "amqp://127.0.0.1:0", "--probe", "ftp://x")
    assert done.returncode == 2
    assert "'ftp://x' is no URL of a probe" in done.stderr
