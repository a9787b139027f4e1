"""Streams of numbers, sessions without a login, and the token that forms need, as programs see them."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

import httpx2
import pytest
import trio
from amqp_rt_console import HttpDoor
from amqp_rt_console.pages.ladder import Ladders
from amqp_rt_console.pages.live import frame_events
from amqp_rt_console.pages.visits import PageStates, TypeDescriptions
from amqp_rt_console.sessions import Login, WebSession
from console_site import USERS, console

from amqp_rt import Access, Broker, Limits, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.container.doors import DoorArrival
from amqp_rt.errors import AmqpError

pytestmark = pytest.mark.req("G6")

HTML = {"accept": "text/html"}


def client(url: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, auth=("ada", USERS["ada"]), timeout=20)


class RawStream:
    """A stream of events, over a connection of its own."""

    def __init__(self, url: str, path: str) -> None:
        self._url = url
        self._path = path
        self.text = ""

    async def __aenter__(self) -> RawStream:
        host, _, port = self._url.removeprefix("http://").partition(":")
        self._socket = await trio.open_tcp_stream(host, int(port))
        login = b64encode(f"ada:{USERS['ada']}".encode()).decode()
        head = f"GET {self._path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Basic {login}\r\n\r\n"
        await self._socket.send_all(head.encode())
        await self.until("\r\n\r\n")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.aclose()

    async def until(self, text: str) -> None:
        """Read until *text* or the end has come."""
        with trio.fail_after(10):
            while text not in self.text:
                piece = await self._socket.receive_some()
                assert piece, self.text
                self.text += bytes(piece).decode()


def test_sessions_share_the_descriptions_of_types() -> None:
    states = PageStates()
    sessions: list[Any] = [Key(), Key(), Key()]
    for each, name in zip(sessions, "aab", strict=True):
        states.keep_types(each, TypeDescriptions({name: []}, {}, {}))
    first, second, third = (states.types_of(each) for each in sessions)
    assert first is second
    assert third == TypeDescriptions({"b": []}, {}, {})


class Key:
    """Stands for a session."""


async def test_streams_are_bounded() -> None:
    async with console(limits=Limits(http_streams_max=1)) as (_, url), client(url) as ada:
        async with RawStream(url, "/live/overview") as first:
            assert "content-type: text/event-stream" in first.text
            await first.until("event: numbers")
            await first.until('"nodes":')
            refused = await ada.get("/live/overview")
            assert refused.status_code == 503
            assert "http_streams_max" in refused.json()["detail"]
        # The place is free again as soon as it is noticed that the browser has left.
        with trio.fail_after(10):
            while True:
                async with RawStream(url, "/live/overview") as again:
                    if "HTTP/1.1 200" in again.text:
                        break
                await trio.sleep(0.1)


async def test_a_stream_ends_where_there_is_nothing_to_see() -> None:
    access = Access([Rule("q", Rights.SEND, users=("ada",))])
    broker = Broker(users=dict(USERS), access=access)
    async with broker, HttpDoor(broker, "http://127.0.0.1:0").open() as url, client(url) as ada:
        await broker.declare(Queue("q"))
        assert (await ada.get("/live/overview")).content == b""


async def test_frames_end_with_the_right_to_see_them(autojump_clock: Any) -> None:
    async with Broker() as broker, broker.local() as connection:
        ladders = Ladders(broker)
        login = Login((), b"")
        session = WebSession(
            connection, login, DoorArrival(address="", logged_in=lambda: None), 10_000
        )
        ladders.start(session)
        checks: list[float] = []

        async def check() -> None:
            checks.append(trio.current_time())
            if len(checks) == 3:
                raise AmqpError("not any more", condition="amqp:unauthorized-access")

        began = trio.current_time()
        assert {each async for each in frame_events(session, ladders, 0, check)} == {b":\n\n"}
        assert [each - began for each in checks] == pytest.approx([10, 20, 30], abs=1.5)
        assert ladders.of(session) is None


async def test_a_stream_ends_with_its_session() -> None:
    async with console() as (broker, url):
        await broker.declare(Queue("q"))
        async with RawStream(url, "/live/entity?type=amqp_rt.queue&name=q") as stream:
            await stream.until("event: numbers")
            for each in broker.container.connections:
                each.close()
            # The last chunk.
            await stream.until("\r\n0\r\n\r\n")


async def test_a_browser_keeps_its_session_where_no_login_is_needed() -> None:
    broker = Broker()
    async with (
        broker,
        HttpDoor(broker, "http://127.0.0.1:0").open() as url,
        httpx2.AsyncClient(base_url=url, headers=HTML) as browser,
    ):
        await broker.declare(Queue("q"))
        page = await browser.get("/")
        assert page.status_code == 200
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert found is not None
        watched = await browser.post("/watch", data={"name": "q", "do": "start", "csrf": found[1]})
        assert watched.status_code == 303
        assert "Stop watching" in (await browser.get(watched.headers["location"])).text
        # A page of another site does not know the token.
        forged = await browser.post("/watch", data={"name": "q", "do": "stop", "csrf": "guessed"})
        assert forged.status_code == 403
        assert "Stop watching" in (await browser.get(watched.headers["location"])).text


@pytest.mark.parametrize(
    ("path", "form", "status"),
    [
        ("/types/amqp_rt.queue/act", {"name": "q", "operation": "PEEK-ALL"}, 501),
        ("/types/amqp_rt.queue/act", {"name": "no", "operation": "PURGE", "confirm": "no"}, 404),
        ("/types/amqp_rt.queue/act", {"name": "q", "operation": "MOVE"}, 400),
        (
            "/types/amqp_rt.queue/act",
            {"name": "q", "operation": "MOVE", "p.to": "q", "p.count": "x"},
            400,
        ),
        ("/types/amqp_rt.connection/new", {"name": "c"}, 501),
        ("/publish", {"name": "q", "body": "b", "count": "1001"}, 400),
        ("/publish", {"name": "q", "body": "b", "ttl_s": "soon"}, 400),
        ("/publish", {"name": "q", "body": "!", "content_type": "base64"}, 400),
        ("/publish", {"name": "q", "body": "b", "properties": "x"}, 400),
        ("/watch", {"name": "no", "do": "start"}, 404),
    ],
)
async def test_forms_that_ask_for_what_cannot_be(
    path: str, form: dict[str, str], status: int
) -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("q"))
        answer = await ada.post(path, data=form, headers=HTML)
        assert answer.status_code == status, answer.text
        assert "failure" in answer.text
        assert broker.stats("q").enqueued == 0
