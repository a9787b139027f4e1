"""Deleting what carries the request: the user of a session, its connection, AMQP session and link."""

from __future__ import annotations

import httpx2
import pytest
import trio
from amqp_rt_console import deleting
from browsing import USERS, site

from amqp_rt.outcomes import Error

pytestmark = pytest.mark.req("G6")

HTML = {"accept": "text/html"}


async def own(client: httpx2.AsyncClient, kind: str) -> str:
    """Return the name of the only connection, or of its session or link by which requests are sent."""
    items = (await client.get(f"/api/v1/{kind}")).json()["items"]
    found = [each for each in items if each.get("address") == "$management" or kind != "links"]
    name: str = found[0]["name"]
    return name


@pytest.mark.parametrize("kind", ["connections", "sessions", "links"])
async def test_a_program_ends_its_own_connection(kind: str) -> None:
    async with site() as web, web.client("root") as client:
        answer = await client.delete(
            f"/api/v1/{kind}/{(await own(client, kind)).replace('/', '%2F')}"
        )
        assert (answer.status_code, answer.content) == (204, b"")
        # Credentials in a header log in again.
        assert (await client.get("/api/v1/session")).json()["user"] == "root"
        assert len((await client.get("/api/v1/connections")).json()["items"]) == 1


async def test_a_program_deletes_its_own_user() -> None:
    async with site(users=dict(USERS)) as web, web.client("root") as client:
        assert (await client.delete("/api/v1/users/root")).status_code == 204
        answer = await client.get("/api/v1/session")
        assert (answer.status_code, answer.json()["detail"]) == (401, "the login failed")
        await web.wait([])


@pytest.mark.parametrize("kind", ["user", "connection"])
async def test_a_browser_ends_its_own_session(kind: str) -> None:
    async with site(users=dict(USERS)) as web, web.client() as client:
        csrf = await web.browser(client, "root")
        name = "root" if kind == "user" else await own(client, "connections")
        form = {"csrf": csrf, "name": name, "operation": "DELETE", "confirm": name}
        page = f"/types/amqp_rt.{kind}"
        answer = await client.post(f"{page}/act", data=form, headers={**HTML, "origin": web.url})
        assert (answer.status_code, answer.headers["location"]) == (303, page)
        # The session has ended: pages lead to the login, and the API asks for one.
        answer = await client.get(page, headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
        assert (await client.get("/api/v1/session")).status_code == 401
        await web.wait([])


async def test_a_session_that_ends_otherwise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleting, "WITHIN_S", 0.1)
    async with site(users=dict(USERS)) as web, web.client("root") as client:
        users = web.broker.container.users
        assert users is not None

        def close() -> None:
            for each in list(web.broker.container.connections):
                each.close(Error("amqp:connection:forced", "for another reason"))

        def forget(name: str) -> None:
            trio.from_thread.run_sync(close)

        monkeypatch.setattr(users, "forget", forget)
        answer = await client.delete("/api/v1/users/shop")
        assert answer.status_code == 503
        assert "the session has ended" in answer.json()["detail"]


@pytest.mark.parametrize("exists", [True, False])
async def test_without_rights_nothing_is_taken_for_ended(exists: bool) -> None:
    """A user without any right gets no link to the management node, and the request ends as if the session had ended."""
    async with (
        site(users={**USERS, "guest": "g-password"}) as web,
        web.client("root") as root,
        web.client(auth=("guest", "g-password")) as guest,
    ):
        name = await own(root, "connections") if exists else "1"
        answer = await guest.delete(f"/api/v1/connections/{name}")
        assert answer.status_code == 403
        assert (await root.get("/api/v1/session")).status_code == 200
