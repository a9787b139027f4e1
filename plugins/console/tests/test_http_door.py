"""The HTTP door over real sockets: logins, sessions, and what it refuses before anything else."""

from __future__ import annotations

import httpx2
import pytest
import trio
from amqp_rt_console import HttpDoor
from browsing import QUICK, USERS, site
from msgspec.structs import replace

from amqp_rt import Broker
from amqp_rt.addresses import parse_url
from amqp_rt.errors import AmqpError

pytestmark = pytest.mark.req("G6")

HTML = {"accept": "text/html,application/xhtml+xml"}


async def test_a_session_is_a_connection_of_its_user() -> None:
    async with site() as web, web.client("ops") as ops:
        for _ in range(3):
            assert (await ops.get("/api/v1/session")).json()["user"] == "ops"
        (connection,) = web.broker.container.connections
        peer = connection.peer
        assert (peer.user, peer.container_id, peer.mechanism) == ("ops", "http", "PLAIN")
        assert peer.address.startswith("127.0.0.1:")
        assert not peer.trusted
        # The end of the connection ends the session; the header opens another.
        connection.close()
        await web.wait([])
        assert (await ops.get("/api/v1/session")).status_code == 200
        await web.wait(["ops"])
    assert web.broker.container.connections == []


async def test_wrong_credentials_are_refused_alike() -> None:
    async with site() as web, web.client() as client:
        answers = [
            await client.get("/api/v1/session", auth=auth)
            for auth in (("root", "wrong"), ("nobody", "x"), ("a\0b", "x"))
        ]
        answers += [
            await client.get("/api/v1/session", headers={"authorization": value})
            for value in (
                "Basic",
                "Basic !!!",
                "Basic bm9jb2xvbg==",
                "Bearer a.b.c",
                "Digest x",
            )
        ]
        answers.append(await client.get("/api/v1/session"))
        for answer in answers:
            assert answer.status_code == 401, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
        assert answers[0].headers["www-authenticate"].startswith("Basic realm=")
        assert {each.json()["detail"] for each in answers[:3]} == {"the login failed"}
        assert web.broker.container.connections == []
        assert len(web.door.sessions) == 0


async def test_failed_logins_block_their_address() -> None:
    async with site(limits=replace(QUICK, failed_logins_max=3)) as web:
        async with web.client() as client:
            for _ in range(3):
                answer = await client.get("/api/v1/session", auth=("root", "wrong"))
                assert answer.status_code == 401
        async with web.client("root") as client:
            with pytest.raises(httpx2.TransportError):
                await client.get("/api/v1/session")
        # So do listeners of AMQP, which count with the door.
        (url,) = await web.broker.listen("amqp://127.0.0.1:0")
        async with await trio.open_tcp_stream("127.0.0.1", parse_url(url).port) as stream:
            with trio.fail_after(5):
                try:
                    assert await stream.receive_some(1) == b""
                except trio.BrokenResourceError:
                    pass


async def test_browsers_have_a_cookie_and_a_token() -> None:
    async with site() as web, web.client(headers={"sec-fetch-mode": "navigate"}) as browser:
        answer = await browser.get("/?a=1", headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login?next=%2F%3Fa%3D1"
        form = await browser.get("/login?next=//evil.example")
        assert 'name="next" value="/"' in form.text
        wrong = await browser.post("/login", data={"user": "ops", "password": "x"})
        assert (wrong.status_code, "login failed" in wrong.text) == (401, True)
        token = await web.browser(browser, "ops")
        (cookie,) = browser.cookies.jar
        assert cookie.name.startswith("amqp_rt_")
        assert cookie.value not in (token, "")
        assert {"HttpOnly", "SameSite"} <= {*cookie._rest}  # type: ignore[attr-defined]
        assert (await browser.get("/api/v1/session")).json() == {
            "user": "ops", "virtual_host": "", "csrf": token, "read_only": False,
        }  # fmt: skip
        assert (await browser.post("/logout")).status_code == 403
        assert (await browser.post("/logout", data={"csrf": "wrong"})).status_code == 403
        assert (await browser.post("/logout", data={"csrf": token})).status_code == 303
        assert (await browser.get("/api/v1/session")).status_code == 401
        assert "www-authenticate" not in (await browser.get("/api/v1/session")).headers
    assert web.broker.container.connections == []


async def test_a_login_replaces_the_session_of_its_browser() -> None:
    async with site() as web, web.client() as browser:
        await web.browser(browser, "ops")
        before = next(iter(browser.cookies.jar)).value
        await web.browser(browser, "root")
        assert next(iter(browser.cookies.jar)).value != before
        (session,) = web.door.sessions._by_cookie.values()
        assert session.user == "root"
        await web.wait(["root"])


async def test_a_new_password_and_the_end_of_a_user_end_sessions() -> None:
    async with site() as web, web.client("root") as root, web.client() as browser:
        own = {"password": USERS["root"]}
        assert (await root.patch("/api/v1/users/root", json=own)).status_code == 200
        for change in (
            root.patch("/api/v1/users/ops", json={"password": USERS["ops"]}),
            root.delete("/api/v1/users/ops"),
        ):
            await web.browser(browser, "ops")
            assert (await browser.get("/api/v1/session")).json()["user"] == "ops"
            assert (await change).status_code in (200, 204)
            # The session of the one who asked is still the same.
            await web.wait(["root"])
            assert (await browser.get("/api/v1/session")).status_code == 401


@pytest.mark.parametrize(
    "others",
    ["x=a b; ", 'prefs={"a":"b"}; ', "a[b]=1; ", "no equals; ", "n=\u00e9; ", "u=a@b,c; ;; "],
)
async def test_cookies_of_other_applications_do_no_harm(others: str) -> None:
    async with site() as web, web.client() as browser:
        await web.browser(browser, "ops")
        (own,) = browser.cookies.jar
        browser.cookies.clear()
        cookies = f"{others}{own.name}={own.value}; z".encode()
        answer = await browser.get("/api/v1/session", headers=[(b"cookie", cookies)])
        assert answer.status_code == 200, answer.text


async def test_a_malformed_referrer_does_no_harm() -> None:
    async with site() as web, web.client() as client:
        answer = await client.post("/metrics", headers={**HTML, "referer": "http://[x"})
        assert answer.status_code == 401
        assert 'href="/"' in answer.text


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "http://evil.example"}, False),
    ],
)
async def test_pages_of_other_sites_change_nothing(headers: dict[str, str], admitted: bool) -> None:
    async with site() as web, web.client("root") as client:
        answer = await client.post("/api/v1/nodes/other/purge", headers=headers)
        assert answer.status_code == (200 if admitted else 403), answer.text


BEHIND = {"host": "console.example", "origin": "https://console.example"}


@pytest.mark.parametrize(
    ("headers", "origin", "status"),
    [
        # Proxies with TLS that keep the host, and one that does not.
        (BEHIND, None, 303),
        ({**BEHIND, "sec-fetch-site": "same-origin"}, None, 303),
        ({**BEHIND, "sec-fetch-site": "same-site"}, None, 403),
        ({**BEHIND, "origin": "https://evil.example"}, None, 403),
        ({**BEHIND, "origin": "ftp://console.example"}, None, 403),
        ({"origin": "https://console.example"}, None, 403),
        ({"origin": "https://console.example"}, "https://console.example:443/", 303),
        ({"origin": "https://console.example:444"}, "https://console.example", 403),
    ],
)
async def test_browsers_log_in_behind_a_proxy_with_tls(
    headers: dict[str, str], origin: str | None, status: int
) -> None:
    async with site(hosts=["console.example"], origin=origin) as web, web.client() as browser:
        form = {"user": "ops", "password": USERS["ops"]}
        answer = await browser.post("/login", data=form, headers=headers)
        assert answer.status_code == status, answer.text
        cookie = answer.headers.get("set-cookie", "")
        assert ("Secure" in cookie, "__Host-" in cookie) == (
            origin is not None and status == 303,
        ) * 2


@pytest.mark.parametrize("origin", ["console.example", "https://", "https://a/b", "https://[x"])
def test_other_origins_are_refused(origin: str) -> None:
    with pytest.raises(AmqpError, match="is no origin of pages"):
        HttpDoor(Broker("b"), "http://127.0.0.1:0", origin=origin)


@pytest.mark.parametrize("host", ["https://console.example", "console.example:443", "", "[::1]"])
def test_names_that_no_browser_sends_are_refused(host: str) -> None:
    with pytest.raises(AmqpError, match="is no name of a host"):
        HttpDoor(Broker("b"), "http://127.0.0.1:0", hosts=[host])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1", 200),
        ("[::1]:80", 200),
        ("Broker.Example", 200),
        ("evil.example", 421),
        ("evil.example@127.0.0.1", 400),
        ("127.0.0.1:x", 400),
        ("", 400),
        ("a/b", 400),
    ],
)
async def test_only_our_names_are_hosts(host: str, status: int) -> None:
    async with site(hosts=["broker.example"]) as web, web.client("root") as client:
        answer = await client.get("/api/v1/session", headers={"host": host})
        assert answer.status_code == status, answer.text


async def test_a_read_only_door_changes_nothing() -> None:
    async with site(read_only=True) as web, web.client("root") as client:
        assert (await client.get("/api/v1/nodes")).status_code == 200
        for method, path in (("DELETE", "nodes/other"), ("POST", "nodes/other/purge")):
            answer = await client.request(method, f"/api/v1/{path}")
            assert (answer.status_code, answer.json()["condition"]) == (403, "amqp:not-allowed")
        assert web.broker.has("other")
        async with web.client() as browser:
            token = await web.browser(browser, "root")
            assert (await browser.post("/logout", data={"csrf": token})).status_code == 303


async def test_all_answers_have_security_headers() -> None:
    async with site() as web, web.client("root") as client:
        for path in (
            "/",
            "/login",
            "/static/console.css",
            "/nowhere",
            "/api/v1/nodes",
            "/api/v1/x",
        ):
            headers = (await client.get(path)).headers
            assert "default-src 'self'" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
        page = await client.get("/nowhere", headers=HTML)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://x", "is no URL of the HTTP door"),
        ("http://x/path", "is no URL of the HTTP door"),
        ("http://a:b@x", "is no URL of the HTTP door"),
        ("http://127.0.0.1:99999", "is no URL of the HTTP door"),
        ("http://0.0.0.0:80", "in clear"),
        ("http://broker.example", "in clear"),
    ],
)
def test_other_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(AmqpError, match=why):
        HttpDoor(Broker("b"), url)
