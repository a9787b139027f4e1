"""Every limit of the HTTP door: at the bound all works, above it the answer is fixed. Time is that of a mock clock."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_console import HttpDoor

from amqp_rt import Broker, Limits, Message, Peer
from amqp_rt.broker import Queue
from amqp_rt.container.doors import DoorArrival
from amqp_rt.net.memory import MemoryStream, memory_stream_pair

pytestmark = pytest.mark.req("G6")

HEAD = b"Host: localhost\r\n"
Answer = tuple[int, dict[str, str], bytes]


class Wire:
    """Client of one connection, which sends octets."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self._data = b""

    async def say(self, *octets: bytes) -> bool:
        """Send *octets*; return whether the other end still reads."""
        try:
            await self.stream.send_all(b"".join(octets))
        except trio.BrokenResourceError:
            return False
        return True

    async def answer(self) -> Answer | None:
        """Return status, headers and body of the next answer; None if the connection ends before."""
        while b"\r\n\r\n" not in self._data:
            if not await self._more():
                return None
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
        size = int(headers["content-length"])
        while len(self._data) < size and await self._more():
            pass
        body, self._data = self._data[:size], self._data[size:]
        return int(first.split(" ")[1]), headers, body

    async def _more(self) -> bytes:
        try:
            data = bytes(await self.stream.receive_some(65_536))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""
        self._data += data
        return data

    async def get(self, path: str, *headers: bytes) -> Answer | None:
        await self.say(f"GET {path} HTTP/1.1\r\n".encode(), HEAD, *headers, b"\r\n")
        return await self.answer()

    async def post(self, path: str, body: bytes, *headers: bytes) -> Answer | None:
        length = f"Content-Length: {len(body)}\r\n".encode()
        await self.say(f"POST {path} HTTP/1.1\r\n".encode(), HEAD, length, *headers, b"\r\n", body)
        return await self.answer()


def basic(user: str) -> bytes:
    return b"Authorization: Basic " + b64encode(f"{user}:x".encode()) + b"\r\n"


FORM = b"Content-Type: application/x-www-form-urlencoded\r\n"
JSON = b"Content-Type: application/json\r\n"


class Wired:
    """A broker, its door, and clients of it in memory."""

    def __init__(self, broker: Broker, door: HttpDoor, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.door = door
        self._nursery = nursery

    def dial(
        self, address: str = "192.0.2.1", logged_in: Callable[[], None] = lambda: None
    ) -> Wire:
        ours, theirs = memory_stream_pair()
        arrival = DoorArrival(address=f"{address}:50000", logged_in=logged_in)
        self._nursery.start_soon(self._serve, theirs, arrival)
        return Wire(ours)

    async def _serve(self, stream: MemoryStream, arrival: DoorArrival) -> None:
        await self.door.accept(stream, arrival)
        await trio.aclose_forcefully(stream)

    async def log_in(self, user: str) -> bytes:
        """Log a browser in; return the header with its cookie."""
        answer = await self.dial().post("/login", f"user={user}&password=x".encode(), FORM)
        assert answer is not None
        assert answer[0] == 303, answer
        return b"Cookie: " + answer[1]["set-cookie"].partition(";")[0].encode() + b"\r\n"


@asynccontextmanager
async def wired(*, sasl: Sequence[str] = ("PLAIN",), **limits: Any) -> AsyncIterator[Wired]:
    async def verify(user: str, password: str, peer: Peer) -> str | None:
        return user if password == "x" else None

    options: dict[str, Any] = {"users": verify, "sasl": [*sasl], "plain_in_clear": True}
    async with Broker("b", limits=Limits(**limits), **options) as broker:
        door = HttpDoor(broker, "http://127.0.0.1:0")
        async with trio.open_nursery() as nursery, door.open():
            yield Wired(broker, door, nursery)
            nursery.cancel_scope.cancel()


SESSION = "/api/v1/session"


async def test_sessions_are_bounded(autojump_clock: Any) -> None:
    async with wired(http_sessions_max=3) as web:
        cookies = [await web.log_in(f"u{each}") for each in range(2)]
        for each in range(5):
            # Sessions of headers make room: their next request opens another.
            answer = await web.dial().get(SESSION, basic(f"h{each}"))
            assert answer is not None
            assert answer[0] == 200
        assert len(web.door.sessions) == 3
        cookies.append(await web.log_in("u2"))
        answer = await web.dial().post("/login", b"user=u3&password=x", FORM)
        assert answer is not None
        assert answer[0] == 503
        answer = await web.dial().get(SESSION, basic("h"))
        assert answer is not None
        assert (answer[0], answer[1]["retry-after"]) == (503, "60")
        for each in cookies:
            answer = await web.dial().get(SESSION, each)
            assert answer is not None
            assert answer[0] == 200


async def test_sessions_of_browsers_end(autojump_clock: Any) -> None:
    async with wired(http_session_idle_s=100, http_session_s=250) as web:
        cookie = await web.log_in("ops")
        began = trio.current_time()
        statuses = []
        for seconds in (99, 99, 51, 2):
            await trio.sleep(seconds)
            answer = await web.dial().get(SESSION, cookie)
            assert answer is not None
            statuses.append(answer[0])
        # In use all the time, and over after 250 s.
        assert statuses == [200, 200, 200, 401], trio.current_time() - began
        cookie = await web.log_in("ops")
        await trio.sleep(101)
        answer = await web.dial().get(SESSION, cookie)
        assert answer is not None
        assert answer[0] == 401
        assert web.broker.container.connections == []


async def held(web: Wired, path: str, *headers: bytes) -> tuple[Wire, bytes]:
    """Begin a request whose body lacks its last octet; return that."""
    wire = web.dial()
    body = b'{"body": 1}'
    length = f"Content-Length: {len(body)}\r\n".encode()
    await wire.say(f"POST {path} HTTP/1.1\r\n".encode(), HEAD, length, *headers, b"\r\n", body[:-1])
    await trio.testing.wait_all_tasks_blocked()
    return wire, body[-1:]


async def test_a_session_that_ends_is_left_to_requests_that_run(autojump_clock: Any) -> None:
    async with wired(http_login_kept_s=2) as web:
        await web.broker.declare(Queue("q"))
        wire, rest = await held(web, "/api/v1/nodes/q/publish", JSON, basic("ops"))
        await trio.sleep(3)
        (old,) = web.door.sessions._all
        assert not old.alive
        # Another request gets a session of its own.
        answer = await web.dial().get(SESSION, basic("ops"))
        assert answer is not None
        assert len(web.door.sessions) == 2
        await wire.say(rest)
        answer = await wire.answer()
        assert answer is not None
        assert answer[0] == 200, answer
        await trio.sleep(0.1)
        assert old not in web.door.sessions._all
        assert web.broker.stats("q").enqueued == 1


async def test_a_request_keeps_a_session_that_has_ended_for_a_time_only(
    autojump_clock: Any,
) -> None:
    async with wired(http_login_kept_s=2, http_body_s=30, write_stall_s=1_000) as web:
        await web.dial().get(SESSION, basic("ops"))
        (session,) = web.door.sessions._all
        with session.used():
            await trio.sleep(2 + 49)
            assert session.connection.state == "open"
            await trio.sleep(2)
            assert session.connection.state != "open"
            assert len(web.door.sessions) == 0


async def test_no_user_keeps_out_the_others(autojump_clock: Any) -> None:
    async with wired(http_sessions_max=8, http_sessions_user_max=3) as web:
        cookies = []
        for _ in range(5):
            cookies.append(await web.log_in("shop"))
            await trio.sleep(1)
        # The longest unused have gone.
        found = [await web.dial().get(SESSION, each) for each in cookies]
        assert [each and each[0] for each in found] == [401, 401, 200, 200, 200]
        # Further spellings and virtual hosts are of the same user, so that no session of another user ends.
        await web.log_in("root")
        root = next(each for each in web.door.sessions._all if each.user == "root")
        for name in range(20):
            host = f"AMQP-Virtual-Host: v{name}\r\n".encode()
            await web.dial().get(SESSION, basic("shop\u00ad" * (name % 2) or "shop"), host)
        assert len(web.door.sessions) == 4
        assert root.alive


async def test_a_share_in_use_is_not_ended(autojump_clock: Any) -> None:
    async with wired(http_sessions_user_max=2) as web:
        wires = [
            await held(
                web,
                "/api/v1/nodes/q/publish",
                JSON,
                basic("ops"),
                f"AMQP-Virtual-Host: {n}\r\n".encode(),
            )
            for n in "ab"
        ]
        answer = await web.dial().get(SESSION, basic("ops"))
        assert answer is not None
        assert (answer[0], answer[1]["retry-after"]) == (429, "60")
        assert b"http_sessions_user_max" in answer[2]
        for wire, rest in wires:
            await wire.say(rest)
            answer = await wire.answer()
            # No such node, but a session.
            assert answer is not None
            assert answer[0] == 404
        answer = await web.dial().get(SESSION, basic("ops"))
        assert answer is not None
        assert answer[0] == 200


async def test_strangers_make_room_for_users(autojump_clock: Any) -> None:
    html = b"Accept: text/html\r\n"
    async with wired(sasl=("PLAIN", "ANONYMOUS"), http_sessions_max=6) as web:
        for path, *headers in (
            ("/", b"Sec-Fetch-Site: cross-site\r\n"),
            ("/", b"Sec-Fetch-Site: same-site\r\n"),
        ):
            answer = await web.dial().get(path, html, *headers)
            assert answer is not None
            assert "set-cookie" not in answer[1]
        wire = web.dial()
        await wire.say(b"HEAD / HTTP/1.1\r\n", HEAD, html, b"\r\n")
        await trio.sleep(1)
        assert [each.has_cookie for each in web.door.sessions._all] == [False]
        for each in range(9):
            answer = await web.dial(f"192.0.2.{each}").get("/", html)
            assert answer is not None
            assert "set-cookie" in answer[1]
        assert len(web.door.sessions) == 6
        for user in ("a", "b", "c", "d", "e", "f"):
            await web.log_in(user)
        assert [each.user for each in web.door.sessions._all] == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize("by_cookie", [False, True])
async def test_users_of_sessions_are_no_strangers(autojump_clock: Any, by_cookie: bool) -> None:
    async with wired() as web:
        header = await web.log_in("ops") if by_cookie else basic("ops")
        await web.dial().get(SESSION, header)
        told: list[None] = []
        await web.dial(logged_in=lambda: told.append(None)).get(SESSION, header)
        assert told


@pytest.mark.parametrize("path", ["/live/overview", "/?refresh=5"])
async def test_what_pages_ask_by_themselves_keeps_no_session(
    autojump_clock: Any, path: str
) -> None:
    async with wired(http_session_idle_s=100) as web:
        cookie = await web.log_in("root")
        for _ in range(3):
            wire = web.dial()
            await wire.say(f"GET {path} HTTP/1.1\r\n".encode(), HEAD, cookie, b"\r\n")
            await trio.sleep(40)
        answer = await web.dial().get(SESSION, cookie)
        assert answer is not None
        assert answer[0] == 401


async def stream(web: Wired, user: str) -> Wire:
    wire = web.dial()
    await wire.say(b"GET /live/overview HTTP/1.1\r\n", HEAD, basic(user), b"\r\n")
    await trio.sleep(0.1)
    return wire


async def test_no_user_takes_the_streams_of_others(autojump_clock: Any) -> None:
    async with wired(http_streams_max=5, http_streams_user_max=2) as web:
        kept = [await stream(web, "ops") for _ in range(2)]
        refused = await web.dial().get("/live/overview", basic("ops"))
        assert refused is not None
        assert refused[0] == 429
        assert b"http_streams_user_max" in refused[2]
        kept += [await stream(web, "root") for _ in range(2)]
        assert len(web.door.streams) == len(kept) == 4
        for each in kept:
            await each.stream.aclose()
        await trio.sleep(0.1)
        assert len(web.door.streams) == 0


async def test_a_stream_ends_whose_client_leaves_after_further_octets(autojump_clock: Any) -> None:
    async with wired() as web:
        wire = await stream(web, "ops")
        for _ in range(3):
            await wire.say(b"GET /login HTTP/1.1\r\n")
            await trio.sleep(0.01)
        assert len(web.door.streams) == 1
        await wire.stream.aclose()
        # Before the next look at numbers.
        await trio.sleep(0.5)
        assert len(web.door.streams) == 0


async def test_octets_during_a_stream_are_bounded(autojump_clock: Any) -> None:
    async with wired(http_head_max=2_000) as web:
        wire = await stream(web, "ops")
        with trio.move_on_after(1) as blocked:
            for _ in range(1_000):
                await wire.stream.send_all(b"x" * 1_000)
        assert blocked.cancelled_caught


@pytest.mark.parametrize(("size", "status"), [(255, 200), (256, 400)])
async def test_names_of_virtual_hosts_are_bounded(
    autojump_clock: Any, size: int, status: int
) -> None:
    async with wired() as web:
        name = b"v" * size
        answer = await web.dial().get(
            SESSION, basic("ops"), b"AMQP-Virtual-Host: " + name + b"\r\n"
        )
        assert answer is not None
        assert answer[0] == status, answer
        form = b"user=u&password=x&virtual_host=" + name
        answer = await web.dial().post("/login", form, FORM)
        assert answer is not None
        assert answer[0] == (303 if status == 200 else 400)


async def test_a_login_of_a_header_is_kept_for_a_while(autojump_clock: Any) -> None:
    async with wired(http_login_kept_s=60) as web:
        seen = set()
        for seconds in (0, 30, 29, 2):
            await trio.sleep(seconds)
            answer = await web.dial().get(SESSION, basic("ops"))
            assert answer is not None
            assert answer[0] == 200
            (connection,) = web.broker.container.connections
            seen.add(connection)
        assert len(seen) == 2


async def test_equal_logins_at_a_time_are_one(autojump_clock: Any) -> None:
    async with wired() as web, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(web.dial().get, SESSION, basic("ops"))
        await trio.sleep(1)
        assert len(web.broker.container.connections) == 1


@pytest.mark.parametrize(("size", "status"), [(300, 400), (301, 413)])
async def test_bodies_are_bounded(autojump_clock: Any, size: int, status: int) -> None:
    async with wired(http_body_max=300) as web:
        body = b"{" + b" " * (size - 1)
        path = "/api/v1/nodes/q/publish"
        answer = await web.dial().post(path, body, JSON, basic("ops"))
        assert answer is not None
        assert answer[0] == status
        # Or in chunks, whose sum is not announced.
        wire = web.dial()
        await wire.say(f"POST {path} HTTP/1.1\r\n".encode(), HEAD, JSON, basic("ops"))
        await wire.say(b"Transfer-Encoding: chunked\r\n\r\n")
        for each in body:
            await wire.say(b"1\r\n%c\r\n" % each)
        await wire.say(b"0\r\n\r\n")
        answer = await wire.answer()
        assert answer is not None
        assert answer[0] == status


@pytest.mark.parametrize(("size", "status"), [(16_384, 401), (16_385, 413)])
async def test_the_body_of_a_stranger_is_small(autojump_clock: Any, size: int, status: int) -> None:
    async with wired() as web:
        body = b"user=u&password=".ljust(size, b"y")
        answer = await web.dial().post("/login", body, FORM)
        assert answer is not None
        assert answer[0] == status


async def test_a_body_has_to_arrive_in_time(autojump_clock: Any) -> None:
    async with wired(http_body_s=30) as web:
        wire = web.dial()
        await wire.say(b"POST /login HTTP/1.1\r\n", HEAD, FORM, b"Content-Length: 100\r\n\r\n")
        began = trio.current_time()
        # An octet now and then does not help.
        while await wire.say(b"x"):  # noqa: ASYNC110
            await trio.sleep(1)
        assert trio.current_time() - began == pytest.approx(31, abs=2)
        assert await wire.answer() is None


@pytest.mark.parametrize(("size", "status"), [(1_900, 401), (2_100, 431)])
async def test_heads_are_bounded(autojump_clock: Any, size: int, status: int) -> None:
    async with wired(http_head_max=2_000) as web:
        answer = await web.dial().get(SESSION, b"X: " + b"x" * (size - 100) + b"\r\n")
        assert answer is not None
        assert answer[0] == status


async def test_connections_without_a_request_end(autojump_clock: Any) -> None:
    async with wired(http_idle_s=60, handshake_s=10) as web:
        silent, slow = web.dial(), web.dial()
        began = trio.current_time()
        await slow.say(b"GET / HTTP/1.1\r\n")
        assert await silent.answer() is None
        assert trio.current_time() - began == pytest.approx(10)
        assert await slow.answer() is None
        assert trio.current_time() - began == pytest.approx(10, abs=3)
        began = trio.current_time()
        kept = web.dial()
        for _ in range(2):
            await trio.sleep(5)
            answer = await kept.get("/login")
            assert answer is not None
            assert answer[0] == 200
        began = trio.current_time()
        assert await kept.answer() is None
        assert trio.current_time() - began == pytest.approx(60)


async def test_rows_are_bounded(autojump_clock: Any) -> None:
    async with wired(http_rows_max=7) as web:
        for limit, status in ((7, 200), (8, 400), (0, 400)):
            answer = await web.dial().get(f"/api/v1/users?limit={limit}", basic("ops"))
            assert answer is not None
            assert answer[0] == status
        assert json.loads(answer[2])["detail"] == "limit is a whole number from 1 to 7, not '0'"


@pytest.mark.parametrize("page", [True, False])
async def test_a_publication_that_is_not_accepted_in_time_is_withdrawn(
    autojump_clock: Any, page: bool
) -> None:
    async with wired() as web:
        await web.broker.declare(Queue("full", length_max=3))
        for number in range(2 if page else 3):
            web.broker.publish("full", Message(number).encode())
        began = trio.current_time()
        if page:
            form = b"name=full&body=x&count=5"
            answer = await web.dial().post("/publish", form, FORM, basic("ops"))
            text = b"1 of 5 messages were accepted within 10 s"
        else:
            path = "/api/v1/nodes/full/publish"
            answer = await web.dial().post(path, b'{"body": "x"}', JSON, basic("ops"))
            text = b"0 of 1 messages were accepted within 10 s"
        assert answer is not None
        assert (answer[0], text in answer[2]) == (504, True), answer
        assert trio.current_time() - began == pytest.approx(10, abs=0.1)
        await web.broker.purge("full")
        await trio.sleep(1)
        assert web.broker.stats("full").available == 0


@pytest.mark.parametrize("page", [True, False])
async def test_a_publication_does_not_outlive_its_client(autojump_clock: Any, page: bool) -> None:
    async with wired() as web:
        await web.broker.declare(Queue("full", length_max=1))
        web.broker.publish("full", Message("first").encode())
        wire = web.dial()
        if page:
            body, path, kind = b"name=full&body=stale&count=5", "/publish", FORM
        else:
            body, path, kind = b'{"body": "stale"}', "/api/v1/nodes/full/publish", JSON
        length = f"Content-Length: {len(body)}\r\n".encode()
        await wire.say(f"POST {path} HTTP/1.1\r\n".encode(), HEAD, length, kind, basic("ops"))
        await wire.say(b"\r\n", body)
        await trio.sleep(0.5)
        await wire.stream.aclose()
        await trio.sleep(1.5)
        await web.broker.purge("full")
        await trio.sleep(1)
        assert web.broker.stats("full").enqueued == 1


async def test_a_client_that_has_ended_its_direction_gets_its_answer(autojump_clock: Any) -> None:
    async with wired() as web:
        await web.broker.declare(Queue("q"))
        wire = web.dial()
        body = b'{"body": "x"}'
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        head = b"POST /api/v1/nodes/q/publish HTTP/1.1\r\n"
        await wire.say(head, HEAD, JSON, basic("ops"), length, body)
        await wire.stream.send_eof()
        answer = await wire.answer()
        assert answer is not None
        assert (answer[0], json.loads(answer[2])) == (200, {"outcome": "accepted"})


async def test_copies_after_a_refusal_are_not_sent(autojump_clock: Any) -> None:
    async with wired() as web:
        await web.broker.declare(Queue("few", length_max=3, overflow="reject"))
        form = b"name=few&body=x&count=1000"
        answer = await web.dial().post("/publish", form, FORM, basic("ops"))
        assert answer is not None
        assert b"3 of 1,000 messages were accepted, then:" in answer[2]
        assert web.broker.stats("few").enqueued == 3
