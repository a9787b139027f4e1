"""A real browser: a page with rhea in it talks to a broker and to a node."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import h11
import pytest
import trio
from peer_programs import PROGRAMS

from amqp_rt import Broker, rpc
from amqp_rt.broker import Queue

FILES = {
    b"/": (PROGRAMS / "page.html", b"text/html"),
    b"/rhea.js": (PROGRAMS / "node_modules" / "rhea" / "dist" / "rhea.js", b"text/javascript"),
}


class Site:
    """The server that the page is from, and to which it tells what came of it."""

    def __init__(self) -> None:
        self.told: dict[str, Any] | None = None
        self.done = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        http = h11.Connection(h11.SERVER)
        body = b""
        target = b""
        async with stream:
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Request):
                    target = event.target
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.ConnectionClosed):
                    return
            file, kind = FILES.get(target, (None, b"text/plain"))
            answer = b"" if file is None else file.read_bytes()
            headers = [(b"Content-Type", kind), (b"Content-Length", b"%d" % len(answer))]
            response = h11.Response(status_code=200, headers=[*headers, (b"Connection", b"close")])
            for part in (response, h11.Data(data=answer), h11.EndOfMessage()):
                await stream.send_all(http.send(part) or b"")
        if target == b"/result":
            self.told = json.loads(body)
            self.done.set()


@rpc("double")
async def double(number: int) -> int:
    return 2 * number


@pytest.mark.peer("chromium")
@pytest.mark.req("L2")
@pytest.mark.parametrize("let_in", [pytest.param(True, marks=pytest.mark.smoke), False])
async def test_a_page(
    chromium: list[str], tmp_path: Path, nursery: trio.Nursery, let_in: bool
) -> None:
    site = Site()
    (listener,) = await nursery.start(partial(trio.serve_tcp, site.serve, 0, host="127.0.0.1"))
    origin = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    origins = [origin] if let_in else ["https://example.org"]
    async with Broker(nodes=[double], origins=origins) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("ws://127.0.0.1:0/amqp")
        browser = await trio.lowlevel.open_process(
            [
                *chromium,
                # In a container there is no sandbox to be had; the page is our own.
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", f"--user-data-dir={tmp_path}", f"{origin}/#{url}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with trio.fail_after(60):
                await site.done.wait()
        finally:
            browser.kill()
            with trio.CancelScope(shield=True):
                await browser.wait()
    nursery.cancel_scope.cancel()
    if let_in:
        assert site.told == {
            "outcome": "accepted",
            "received": "from a page",
            "reply": 42,
            "correlation": "c-1",
        }
    else:
        assert site.told is not None
        assert set(site.told) == {"error"}
