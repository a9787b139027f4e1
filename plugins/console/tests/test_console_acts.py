"""Acts on what peers hold, by the forms that the console makes of operations: each ends it, or is refused."""

from __future__ import annotations

import datetime as dt
import re
from base64 import b64encode
from html import unescape
from pathlib import Path

import httpx2
import pytest
import trio
from branching import XaSession, xid_of
from console_site import USERS, console

from amqp_rt import Container, Message, Plain
from amqp_rt.broker import Log, Queue, Schedule, Topic
from amqp_rt.errors import AmqpError
from amqp_rt.transactions import XaStatus

pytestmark = pytest.mark.req("G6")

HTML = {"accept": "text/html"}


def client(url: str, user: str = "ada") -> httpx2.AsyncClient:
    auth = (user, USERS[user])
    return httpx2.AsyncClient(base_url=url, auth=auth, headers=HTML, timeout=20)


async def names(ada: httpx2.AsyncClient, kind: str, text: str) -> list[str]:
    """Return the names of the entities whose row has *text*."""
    page = await ada.get(f"/types/{kind}")
    assert page.status_code == 200, page.text
    rows = re.findall(r"<tr>.*?</tr>", page.text, re.DOTALL)
    found = [
        re.search(r'scope=row[^>]*><a href="[^"]*">([^<]*)</a>', row) for row in rows if text in row
    ]
    return [unescape(each[1]) for each in found if each is not None]


async def act(ada: httpx2.AsyncClient, kind: str, **form: str) -> httpx2.Response:
    return await ada.post(f"/types/{kind}/act", data=form)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("amqp_rt.link", "prices"),
        ("amqp_rt.subscription", "prices"),
        ("amqp_rt.session", ""),
        ("amqp_rt.connection", "watcher"),
    ],
)
async def test_what_a_peer_has_open_can_be_ended(kind: str, text: str) -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Topic("prices"))
        (amqp,) = await broker.listen("amqp://127.0.0.1:0")
        auth = Plain("ada", USERS["ada"])
        async with (
            Container("watcher") as watcher,
            watcher.connect(amqp, auth=auth, reconnect=None) as peer,
        ):
            receiver = peer.receiver("prices")
            await receiver.wait_attached()
            connection = (await names(ada, "amqp_rt.connection", "watcher"))[0]
            mine = [
                each for each in await names(ada, kind, text) if each.split("/")[0] == connection
            ]
            form = {"name": mine[0], "operation": "DELETE"}
            assert (await act(ada, kind, **form)).status_code == 303
            with trio.fail_after(5):
                while await names(ada, "amqp_rt.link", "prices"):  # noqa: ASYNC110 - over HTTP
                    await trio.sleep(0.01)
            # It is gone: the same form finds nothing.
            assert (await act(ada, kind, **form)).status_code == 404


async def test_a_terminus_without_a_link_can_be_ended(tmp_path: Path) -> None:
    async with console(store=f"sqlite:{tmp_path / 'store'}") as (broker, url), client(url) as ada:
        await broker.declare(Topic("prices"))
        (amqp,) = await broker.listen("amqp://127.0.0.1:0")
        async with (
            Container("c") as container,
            container.connect(amqp, auth=Plain("ada", USERS["ada"])) as peer,
            peer.receiver("prices", name="inbox", durable=1) as inbox,
        ):
            (name,) = await names(ada, "amqp_rt.terminus", "inbox")
            wrong = await act(ada, "amqp_rt.terminus", name=name, operation="DELETE", confirm="x")
            assert wrong.status_code == 409
            form = {"name": name, "operation": "DELETE", "confirm": name}
            locked = await act(ada, "amqp_rt.terminus", **form)
            assert locked.status_code == 409
            assert "a link is attached" in locked.text
            await inbox.suspend()
        assert (await act(ada, "amqp_rt.terminus", **form)).status_code == 303
        assert await names(ada, "amqp_rt.terminus", "inbox") == []


async def test_a_branch_in_doubt_can_be_decided() -> None:
    async with console(volatile=True) as (broker, url), client(url) as ada:
        await broker.declare(Queue("to"))
        session = XaSession(broker.host)
        session.work(xid_of(1), "new")
        assert session.now("prepare", xid_of(1)) is XaStatus.OK
        (name,) = await names(ada, "amqp_rt.branch", "prepared")
        page = await ada.get("/types/amqp_rt.branch/entity", params={"name": name})
        assert "<option>rollback</option>" in page.text
        before = broker.stats("to").available
        form = {"name": name, "operation": "RESOLVE-BRANCH", "p.outcome": "commit"}
        assert (await act(ada, "amqp_rt.branch", **form)).status_code == 303
        assert broker.stats("to").available == before + 1


async def test_open_transactions_are_told_from_those_in_doubt() -> None:
    async with console(volatile=True) as (broker, url), client(url) as ada:
        await broker.declare(Queue("orders"))
        (amqp,) = await broker.listen("amqp://127.0.0.1:0")

        async def send() -> None:
            async with (
                Container("c") as container,
                container.connect(amqp, auth=Plain("ada", USERS["ada"])) as peer,
                peer.transaction() as txn,
                peer.sender("orders") as out,
            ):
                await out.send("x", transaction=txn)
                page = (await ada.get("/types/amqp_rt.transaction")).text
                assert "<h1>Open transactions</h1>" in page
                titles = re.findall(r">([^<]*[Tt]ransactions?[^<]*)</a>", page)
                assert titles == ["Open transactions", "Transactions in doubt"]
                (name,) = await names(ada, "amqp_rt.transaction", "open")
                form = {"name": name, "operation": "DELETE", "confirm": name}
                assert (await act(ada, "amqp_rt.transaction", **form)).status_code == 303

        with pytest.raises(AmqpError, match="an operator has rolled it back"):
            await send()
        assert broker.stats("orders").available == 0


@pytest.mark.parametrize(
    ("kind", "acts"),
    [
        ("queue", ["Publish a message", "Change", "Move", "Purge", "Delete"]),
        ("topic", ["Publish a message", "Change", "Delete"]),
        ("log", ["Publish a message", "Change", "Purge", "Delete"]),
    ],
)
async def test_nodes_offer_acts_for_people_only(kind: str, acts: list[str]) -> None:
    """Operations of programs, such as leases of Spark, take a body that no form here has."""
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("queue"), Topic("topic"), Log("log"))
        page = (await ada.get(f"/types/amqp_rt.{kind}/entity?name={kind}")).text
        assert re.findall(r"<summary>([^<]*)…</summary>", page) == acts


async def test_lists_of_one_kind_of_nodes_show_its_statistics() -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("few"), Queue("many"))
        await broker.declare(Schedule("nightly", to="few", every_s=60, payload="x"))
        for name in ("few", "many", "many"):
            broker.publish(name, Message("x").encode())
        page = (await ada.get("/types/amqp_rt.queue?sort=-available")).text
        assert "sort=available" in page
        rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
        found = [re.findall(r">([^<>]+)</(?:a|td)>", row)[:2] for row in rows]
        assert found[1:3] == [["many", "2"], ["few", "1"]]
        page = (await ada.get("/types/amqp_rt.schedule?sort=next_at")).text
        assert re.search(r"\d{4}-\d\d-\d\d [\d:]{8} UTC", page)
        assert (await ada.get("/types/amqp_rt.queue?sort=next_at")).status_code == 400


async def test_each_link_of_a_list_leads_to_a_page() -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("orders"))
        overview = (await ada.get("/")).text
        lists = re.findall(r'href="(/types/[^"]*)"', overview)
        assert len(lists) > 10
        for path in dict.fromkeys(lists):
            page = await ada.get(unescape(path))
            assert page.status_code == 200, path
            for link in re.findall(r'href="(/types/[^"]*/entity[^"]*)"', page.text):
                assert (await ada.get(unescape(link))).status_code == 200, link


async def test_times_of_messages_are_shown_as_times() -> None:
    async with console(journal=True) as (broker, url), client(url) as ada:
        await broker.declare(Log("clicks"), Queue("orders"))
        broker.publish("orders", Message("x").encode())
        created = dt.datetime(2026, 5, 4, 3, 2, 1, tzinfo=dt.UTC)
        given = {"time": 1_777_863_721_000}
        message = Message("x", creation_time=created, application_properties=given)
        broker.publish("clicks", message.encode())
        page = (await ada.get("/messages?name=clicks")).text
        assert "<dt>creation_time</dt><dd>2026-05-04 03:02:01 UTC</dd>" in page
        assert re.search(r"x-opt-enqueued-time</dt><dd>\d{4}-\d\d-\d\d [\d:]{8} UTC</dd>", page)
        # Only the application knows what its own properties are.
        assert "<dd>1,777,863,721,000</dd>" in page
        with trio.fail_after(5):
            while "Record 0" not in (page := (await ada.get("/journal")).text):  # noqa: ASYNC110 - over HTTP
                await trio.sleep(0.05)
        assert re.search(r"<dt>property time</dt><dd>\d{4}-\d\d-\d\d [\d:]{8} UTC</dd>", page)


@pytest.mark.parametrize(
    ("field", "text", "refusal"),
    [
        ("ttl_s", "soon", "time to live must be a number, got &#39;soon&#39;"),
        ("priority", "256", "priority must be 0 to 255, got 256"),
        ("priority", "-1", "priority must be 0 to 255, got -1"),
        ("properties", "a: 1", "application properties: &#39;a: 1&#39; is not NAME=VALUE"),
    ],
)
async def test_a_refused_publication_names_its_field(field: str, text: str, refusal: str) -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("orders"))
        answer = await ada.post("/publish", data={"name": "orders", "body": "x", field: text})
        assert answer.status_code == 400
        assert refusal in answer.text
        assert broker.stats("orders").available == 0


async def test_a_form_with_a_body_that_is_not_the_declared_json_stays_filled_in() -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("orders"))
        form = {
            "name": "orders",
            "body": '{"total": 12,\r\n "item": one}',
            "content_type": "application/json",
        }
        answer = await ada.post("/publish", data=form)
        assert answer.status_code == 400
        refusal = (
            "declared as application/json, but is not JSON: expecting value at line 2, column 10"
        )
        assert refusal in answer.text
        assert "&#34;item&#34;: one}</textarea>" in answer.text
        assert "<option selected>application/json</option>" in answer.text
        assert broker.stats("orders").available == 0
        form["body"] = form["body"].replace("one", '"one"')
        assert (await ada.post("/publish", data=form)).status_code == 303
        (payload,) = await broker.peek("orders")
        assert Message.decode(payload).body == b'{"total": 12,\n "item": "one"}'


async def test_records_of_logs_and_the_journal_are_shown() -> None:
    async with console(journal=True) as (broker, url), client(url) as ada:
        await broker.declare(Log("clicks"), Log("many", partitions=2), Queue("orders"))
        for number in range(30):
            broker.publish("clicks", Message(f"click {number}.").encode())
            broker.publish("many", Message(f"many {number}.").encode())
        broker.publish("orders", Message("one", message_id="m-1").encode())
        latest = (await ada.get("/messages?name=clicks&count=5")).text
        assert "click 29." in latest
        assert "click 24." not in latest
        first = (await ada.get("/messages?name=clicks&count=5&offset=2")).text
        assert "Record 2" in first
        assert "click 6." in first
        assert "click 7." not in first
        assert "many " in (await ada.get("/messages?name=many&count=50")).text
        with trio.fail_after(5):
            while "m-1" not in (await ada.get("/journal")).text:  # noqa: ASYNC110 - over HTTP
                await trio.sleep(0.05)


async def test_a_user_acts_with_the_rights_of_that_user() -> None:
    async with console() as (broker, url), client(url, "bob") as bob:
        await broker.declare(Queue("orders"), Queue("others"))
        for path, form in (
            (
                "/types/amqp_rt.queue/act",
                {"name": "orders", "operation": "PURGE", "confirm": "orders"},
            ),
            ("/types/amqp_rt.queue/new", {"name": "more"}),
            ("/types/amqp_rt.user/new", {"name": "joe", "a.password": "x"}),
            ("/publish", {"name": "others", "body": "b"}),
            ("/watch", {"name": "orders", "do": "start"}),
            ("/ladder", {"do": "start"}),
        ):
            answer = await bob.post(path, data=form)
            assert answer.status_code == 403, (path, answer.text)
        assert not broker.has("more")
        assert broker.stats("others").enqueued == 0


async def test_a_password_is_not_shown_again() -> None:
    async with console() as (_, url), client(url) as ada:
        answer = await ada.post(
            "/types/amqp_rt.user/new", data={"name": "bob", "a.password": "x-y-z"}
        )
        assert answer.status_code == 409
        assert "already" in answer.text
        assert "x-y-z" not in answer.text


async def test_the_text_of_a_form_becomes_octets() -> None:
    async with console() as (broker, url), client(url) as ada:
        await broker.declare(Queue("orders"))
        octets = b64encode(b"\x00\xff").decode()
        form = {
            "name": "orders",
            "body": octets,
            "content_type": "base64",
            "durable": "",
            "priority": "7",
        }
        assert (await ada.post("/publish", data=form)).status_code == 303
        (payload,) = await broker.peek("orders")
        message = Message.decode(payload)
        assert (message.body, message.priority) == (b"\x00\xff", 7)
        assert "AP8=" in (await ada.get("/messages?name=orders")).text
