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
from amqp_rt.errors import AmqpError, ConnectFailed
from amqp_rt.stores.base import StoreFailed
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.telemetry.probe import Probe, parse_probe_url

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
        assert (await get(f"{url}/healthz"))[0] == 503
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


@pytest.mark.parametrize("module", ["starlette.applications", "hypercorn.trio"])
async def test_missing_libraries_are_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AmqpError, match=r"pip install 'amqp-rt\[http,metrics\]'"):
        await Probe(Container("one")).serve("http://127.0.0.1:0")


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
