"""The JSON API over real sockets: each resource, pages of them, rights, and hostile names and bodies."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import trio
from amqp_rt_console import messages
from amqp_rt_console.resources import RESOURCES
from browsing import USERS, site
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from amqp_rt import Broker, Message, Plain
from amqp_rt.broker import Queue, Schedule
from amqp_rt.cli.tables import plain
from amqp_rt.errors import AmqpError
from amqp_rt.values import Array, Map, UByte

pytestmark = pytest.mark.req("G6")

#: Names and bodies that mean something to parsers of paths, HTML, JSON, logs or terminals.
HOSTILE = [
    "a/b/../c",
    "..",
    ".",
    "%2F",
    "a?b#c",
    "<script>alert(1)</script>",
    "\"'&;--",
    "a\u202eb\u0000c",
    "\x1b[31m",
    "name with spaces",
    "ä𝄞",
    "x" * 500,
    "nodes",
    "a+b=c",
]


async def items(client: httpx2.AsyncClient, path: str, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def status_of(client: httpx2.AsyncClient, method: str, path: str, **options: Any) -> int:
    answer = await client.request(method, f"/api/v1/{path}", **options)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        assert {"type", "title", "status", "detail"} <= {*answer.json()}
        assert answer.json()["status"] == answer.status_code
    return answer.status_code


async def test_the_life_of_a_node() -> None:
    async with site() as web, web.client("root") as root:
        given = {"kind": "queue", "max_deliveries": 5, "dead_letter": "other"}
        answer = await root.put("/api/v1/nodes/new", json=given)
        assert (answer.status_code, answer.json()["max_deliveries"]) == (201, 5), answer.text
        assert await status_of(root, "PUT", "nodes/new", json={"kind": "queue"}) == 409
        answer = await root.patch("/api/v1/nodes/new", json={"max_deliveries": 7})
        assert (answer.status_code, answer.json()["max_deliveries"]) == (200, 7)
        assert (await root.get("/api/v1/nodes/new")).json()["dead_letter"] == "other"
        assert await status_of(root, "PATCH", "nodes/new", json={"max_deliverys": 7}) == 400
        assert await status_of(root, "PUT", "nodes/bad", json={"kind": "tower"}) == 400
        assert await status_of(root, "DELETE", "nodes/new") == 204
        assert await status_of(root, "GET", "nodes/new") == 404
        assert (await root.head("/api/v1/nodes/other")).status_code == 200


async def test_names_may_have_line_breaks() -> None:
    async with site() as web, web.client("root") as root:
        await web.broker.declare(Queue("a\nb\n"))
        assert (await root.get("/api/v1/nodes/a%0Ab%0A")).json()["name"] == "a\nb\n"


async def test_messages_are_published_peeked_moved_and_purged() -> None:
    async with site() as web, web.client("root") as root:
        for body in (
            {"body": "hello", "subject": "s", "application_properties": {"a": 1}},
            {"body": {"id": 1}, "durable": False, "priority": 9},
            {"base64": b64encode(b"\xff\x00").decode(), "content_type": "image/png"},
            {"body": "<b>", "content_type": "text/html"},
        ):
            answer = await root.post("/api/v1/nodes/other/publish", json=body)
            assert (answer.status_code, answer.json()) == (200, {"outcome": "accepted"})
        rows = await items(root, "messages", node="other")
        assert [each.get("body") for each in rows] == ["hello", '{"id":1}', None, "<b>"]
        assert rows[0]["properties"]["subject"] == "s"
        assert rows[0]["application_properties"] == {"a": 1}
        assert (rows[1]["header"]["priority"], rows[1]["properties"]["content_type"]) == (
            9,
            "application/json",
        )
        assert rows[2]["base64"] == "/wA="
        assert await items(root, "nodes/other/peek", count=1) == rows[:1]
        answer = await root.post("/api/v1/nodes/other/move", json={"to": "team/q", "count": 3})
        assert answer.json() == {"messages": 3}
        answer = await root.post(f"/api/v1/nodes/{quote('team/q', safe='')}/purge")
        assert answer.json() == {"messages": 3}
        assert web.broker.stats("other").available == 1
        for body, status in (
            ({"bodi": 1}, 400),
            ({"body": "x", "base64": ""}, 400),
            ({"base64": "!"}, 400),
            ({"body": "x", "priority": 1_000}, 400),
            ({"body": "x", "durable": True}, 409),
        ):
            found = await status_of(root, "POST", "nodes/other/publish", json=body)
            assert found == status, (body, found)
        for body, sentence in (
            ({"base64": "eA"}, "base64: incorrect padding"),
            ({"body": "x", "delay_s": 1e18}, "a delay is a number of seconds, 0 to "),
        ):
            answer = await root.post("/api/v1/nodes/other/publish", json=body)
            assert sentence in answer.json()["detail"]
        # An empty parameter counts as absent; the document says so.
        assert await status_of(root, "GET", "nodes?sort=") == 200
        assert await status_of(root, "POST", "nodes/none/publish", json={"body": 1}) == 404
        assert await status_of(root, "POST", "nodes/other/move", json={}) == 400
        assert await status_of(root, "POST", "nodes/other/move", json={"to": 1}) == 400
        assert await status_of(root, "POST", "nodes/other/move", json={"to": "none"}) == 404
        assert await status_of(root, "POST", "nodes/other/burn") == 404
        assert await status_of(root, "GET", "nodes/other/purge") == 405


#: Bodies that are declared to be JSON, and the mistake in each; an empty text for those that are JSON.
DECLARED_JSON = [
    ({"body": "hello"}, "expecting value at line 1, column 1"),
    ({"body": ""}, "at line 1, column 1"),
    ({"body": '{"a": 1,\n "ä": x}'}, "expecting value at line 2, column 7"),
    ({"body": '{"a": 1} {}'}, "extra data at line 1, column 10"),
    ({"body": "[1,\n -Infinity]"}, "-Infinity is no value of JSON at line 2, column 3"),
    ({"body": "[" * 5_000}, "nested too deeply"),
    ({"body": "[" + "1,\n" * 30_000 + "x]"}, "invalid character at line 30,001, column 1"),
    ({"base64": b64encode(b'["\xff"]').decode()}, "of UTF-8 at line 1, column 3"),
    ({"base64": b64encode(b"[1").decode()}, "at line 1, column 3"),
    ({"body": ' {"a": [1, 2.5e3, "\\u00e4", null]}\n'}, ""),
    ({"base64": b64encode(b"7").decode()}, ""),
    ({"body": {"a": 1}}, ""),
    ({}, ""),
]


@pytest.mark.parametrize("content_type", ["application/json", "Application/LD+JSON; a=b"])
async def test_a_body_that_is_declared_as_json_is_json(content_type: str) -> None:
    async with site() as web, web.client("root") as root:
        for given, mistake in DECLARED_JSON:
            body = {**given, "content_type": content_type}
            answer = await root.post("/api/v1/nodes/other/publish", json=body)
            if not mistake:
                assert answer.status_code == 200, answer.text
                continue
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.status_code == 400, given
            detail = answer.json()["detail"]
            assert detail.startswith(f"the body is declared as {content_type}, but is "), detail
            assert detail.endswith(mistake)
        rows = await items(root, "messages", node="other")
        assert len(rows) == len([mistake for _, mistake in DECLARED_JSON if not mistake])
        assert rows[-1]["body"] == "null"
        # Other texts are as they are.
        body = {"body": "{", "content_type": "text/plain"}
        assert (await root.post("/api/v1/nodes/other/publish", json=body)).status_code == 200


async def test_one_message_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as web, web.client("root") as root:
        for body in ("before", Array([1], of=UByte), Map([(1, "one")]), "after"):
            web.broker.publish("other", Message(body).encode())
        rows = await items(root, "messages", node="other")
        assert [each["body"] for each in rows] == ["before", [1], {"1": "one"}, "after"]
        page = await root.get("/messages?name=other", headers={"accept": "text/html"})
        assert page.status_code == 200
        assert "before" in page.text
        assert "after" in page.text

        def failing(value: Any, *more: Any) -> Any:
            if isinstance(value, list | Array):
                raise TypeError("unforeseen")
            return plain(value, *more)

        monkeypatch.setattr(messages, "plain", failing)
        rows = await items(root, "nodes/other/peek", count=4)
        assert [each.get("body") for each in rows] == ["before", None, {"1": "one"}, "after"]
        assert "unforeseen" in rows[1]["error"]


async def test_every_resource_is_listed() -> None:
    async with site(journal=True) as web, web.client("root") as root:
        await web.broker.declare(Schedule("nightly", to="other", every_s=3_600, payload="x"))
        (url,) = await web.broker.listen("amqp://127.0.0.1:0")
        async with (
            web.broker.container.connect(
                url, auth=Plain("ops", USERS["ops"]), reconnect=None
            ) as peer,
            peer.receiver("team/t", name="sub", timeout=60) as _,
        ):
            names = (await root.get("/api/v1/")).json()["resources"]
            async with peer.transaction():
                found = {
                    name: await items(root, name)
                    for name in names
                    if name not in ("messages", "journal")
                }
            assert {each["name"] for each in found["nodes"]} >= {"team/q", "other", "team/t"}
            assert {each["user"] for each in found["connections"]} == {"root", "ops"}
            assert len(found["sessions"]) >= 2
            (link,) = [each for each in found["links"] if each["link_name"] == "sub"]
            assert (link["address"], link["role"]) == ("team/t", "receiver")
            assert [each["topic"] for each in found["subscriptions"]] == ["team/t"]
            assert {each["name"] for each in found["users"]} == {*USERS}
            assert [each["rights"] for each in found["rules"]] == ["manage", "manage", "send"]
            assert [each["name"] for each in found["virtual-hosts"]] == [""]
            (terminus,) = found["termini"]
            assert (terminus["link"], terminus["user"], terminus["links"]) == ("sub", "ops", 1)
            assert found["transactions"] == []
            assert [(each["user"], each["state"]) for each in found["open-transactions"]] == [
                ("ops", "open")
            ]
            assert [each["to"] for each in found["schedules"]] == ["other"]
            path = f"termini/{quote(terminus['name'], safe='')}"
            assert await status_of(root, "DELETE", path) == 409
            assert await status_of(root, "DELETE", f"connections/{link['connection']}") == 204
        with trio.fail_after(5):
            while (await items(root, "termini"))[0]["links"]:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert (await items(root, "termini"))[0]["expires_in_s"] <= 60
        assert await status_of(root, "DELETE", path) == 204
        assert await items(root, "termini") == []


def test_every_type_of_management_is_a_resource() -> None:
    broker = Broker("b")
    assert broker.management is not None
    types = {*broker.management.known_types()} - {"org.amqp.management"}
    kinds = {"amqp_rt.queue", "amqp_rt.topic", "amqp_rt.log"}
    assert types - {each.type_name for each in RESOURCES.values()} == kinds


async def test_open_transactions_are_listed_and_ended() -> None:
    async with site() as web, web.client("root") as root:
        (url,) = await web.broker.listen("amqp://127.0.0.1:0")
        auth = Plain("ops", USERS["ops"])

        async def send() -> None:
            async with (
                web.broker.container.connect(url, auth=auth, reconnect=None) as peer,
                peer.transaction() as txn,
                peer.sender("team/q") as out,
            ):
                await out.send("x", transaction=txn)
                (row,) = await items(root, "open-transactions")
                path = f"open-transactions/{quote(row['name'], safe='')}"
                assert (row["user"], row["state"], row["posts"]) == ("ops", "open", 1)
                assert await status_of(root, "DELETE", path) == 204
                (row,) = await items(root, "open-transactions")
                assert row["state"] == "rolled back"

        with pytest.raises(AmqpError, match="operator"):
            await send()
        assert await items(root, "open-transactions") == []
        assert web.broker.stats("team/q").available == 0


async def test_the_journal_is_read_page_by_page() -> None:
    async with site(journal=True) as web, web.client("root") as root:
        for _ in range(3):
            web.broker.publish("other", Message("x").encode())
        with trio.fail_after(5):
            while web.broker.stats("$journal").available < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
        seen: list[int] = []
        after: str | None = None
        while True:
            query = {"limit": "2", **({} if after is None else {"after": after})}
            answer = (await root.get("/api/v1/journal", params=query)).json()
            seen += [each["message_annotations"]["x-opt-offset"] for each in answer["items"]]
            after = answer["next"]
            if after is None:
                break
        assert seen == ["0", "1", "2"], seen
        assert {each["application_properties"]["event"] for each in answer["items"]} == {
            "published"
        }
        assert len(await items(root, "messages", node="$journal", limit=2)) == 2


async def test_connections_are_closed() -> None:
    async with site() as web, web.client("root") as root, web.client("ops") as ops:
        await ops.get("/api/v1/session")
        rows = await items(root, "connections")
        (name,) = [each["name"] for each in rows if each["user"] == "ops"]
        assert await status_of(root, "DELETE", f"connections/{name}") == 204
        await web.wait(["root"])


async def test_users_are_managed() -> None:
    async with site() as web, web.client("root") as root:
        assert await status_of(root, "PUT", "users/new", json={"password": "n-password"}) == 201
        assert "password" not in (await root.get("/api/v1/users/new")).text
        async with web.client(auth=("new", "n-password")) as new:
            assert (await new.get("/api/v1/session")).status_code == 200
            assert await status_of(root, "DELETE", "users/new") == 204
            # The session has ended with its user.
            assert (await new.get("/api/v1/session")).status_code == 401


@pytest.mark.parametrize(
    ("user", "method", "path", "status"),
    [
        ("ops", "GET", "nodes/team%2Fq", 200),
        ("ops", "GET", "nodes/other", 403),
        ("ops", "DELETE", "nodes/other", 403),
        ("ops", "POST", "nodes/other/purge", 403),
        ("ops", "POST", "nodes/team%2Fq/purge", 200),
        ("ops", "GET", "connections", 403),
        ("ops", "GET", "users", 403),
        ("ops", "GET", "rules", 403),
        ("ops", "GET", "messages?node=other", 403),
        ("ops", "GET", "messages?node=team%2Fq", 200),
        ("ops", "GET", "journal", 403),
        ("shop", "GET", "nodes/team%2Fq", 403),
        ("shop", "GET", "messages?node=team%2Fq", 403),
        ("shop", "GET", "access?right=send&address=x", 403),
    ],
)
async def test_rights_are_those_of_amqp(user: str, method: str, path: str, status: int) -> None:
    async with site() as web, web.client(user) as client:
        assert await status_of(client, method, path) == status
        if user == "ops":
            assert [each["name"] for each in await items(client, "nodes")] == ["team/q", "team/t"]
        if user == "shop" and "node" in path:
            send = "nodes/team%2Fq/publish"
            assert await status_of(client, "POST", send, json={"body": "x"}) == 200
            assert await status_of(client, "POST", "nodes/other/publish", json={"body": "x"}) == 403


async def test_rights_are_explained() -> None:
    async with site() as web, web.client("root") as root:
        query = {"user": "shop", "right": "send", "address": "team/q"}
        answer = await root.get("/api/v1/access", params=query)
        assert answer.json()["allowed"] is True
        answer = await root.get("/api/v1/access", params={**query, "address": "other"})
        assert answer.json()["allowed"] is False


async def pages_of(client: httpx2.AsyncClient, path: str, **query: Any) -> list[str]:
    """Return the names of all pages."""
    names: list[str] = []
    after: str | None = None
    while True:
        given = query | ({} if after is None else {"after": after})
        answer = (await client.get(f"/api/v1/{path}", params=given)).json()
        names += [each["name"] for each in answer["items"]]
        after = answer["next"]
        if after is None:
            assert answer["total"] == len(names)
            return names


async def test_pages_follow_each_other_in_an_order() -> None:
    async with site() as web, web.client("root") as root:
        await web.broker.declare(*(Queue(f"row-{each:02}") for each in range(25)))
        for each in range(25):
            for _ in range(each % 7):
                web.broker.publish(f"row-{each:02}", Message("x").encode())
        names = [f"row-{each:02}" for each in range(25)]
        for limit in (1, 4, 25, 26):
            found = await pages_of(root, "nodes", q="ROW-0", limit=limit)
            assert found == names[:10]
            found = await pages_of(root, "nodes", q="row-", sort="-name", limit=limit)
            assert [each for each in found if each in names] == names[::-1]
            found = await pages_of(root, "nodes", q="row-", sort="-messages", limit=limit)
            depths = [int(each[4:]) % 7 for each in found if each in names]
            assert depths == sorted(depths, reverse=True)
            assert {*names} <= {*found}
            found = await pages_of(root, "nodes", sort="available", limit=limit, fields="name")
            assert len(found) == len({*found})
        for query in ({"after": "x"}, {"after": "é" * 5}, {"limit": "x"}, {"limit": 501}):
            assert await status_of(root, "GET", "nodes", params=query) == 400
        assert await items(root, "nodes", q="nowhere") == []


async def test_an_order_by_an_unknown_attribute_is_refused() -> None:
    async with site() as web, web.client("root") as root:
        for resource in RESOURCES:
            answer = await root.get(f"/api/v1/{resource}", params={"sort": "-depht"})
            assert answer.status_code == 400, resource
            assert answer.headers["content-type"] == "application/problem+json"
            assert "no attribute 'depht'" in answer.json()["detail"]


async def test_the_document_names_the_orders_that_lists_have() -> None:
    async with site() as web, web.client("root") as root:
        await web.broker.declare(Schedule("nightly", to="other", every_s=3_600, payload="x"))
        paths = (await root.get("/api/v1/openapi.json")).json()["paths"]
        for resource in RESOURCES:
            given = {each["name"]: each for each in paths[f"/{resource}"]["get"]["parameters"]}
            orders = given["sort"]["schema"]["pattern"]
            for row in await items(root, resource):
                for name in row:
                    assert re.match(orders, f"-{name}"), (resource, name)
            assert not re.match(orders, "-depht")
        [row] = await items(root, "schedules", sort="-next_at", fields="next_at,sent,messages")
        assert row["next_at"] > 0
        assert (row["sent"], row["messages"]) == (0, 0)


async def test_rows_have_the_fields_asked_for() -> None:
    async with site() as web, web.client("root") as root:
        rows = await items(root, "nodes", fields="available,kind", q="other")
        assert rows == [{"name": "other", "available": 0, "kind": "queue"}]


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names(name: str) -> None:
    async with site() as web, web.client("root") as root:
        path = "/api/v1/nodes/" + quote(name, safe="").replace(".", "%2E")
        answer = await root.request("PUT", path, json={"kind": "queue"})
        if answer.status_code != 201:
            assert answer.status_code == 400, answer.text
            return
        assert web.broker.has(name)
        assert (await root.get(path)).json()["name"] == name
        body = {"body": name, "application_properties": {name: name}}
        assert (await root.post(f"{path}/publish", json=body)).status_code == 200
        (row,) = await items(root, "messages", node=name)
        assert (row["body"], row["application_properties"]) == (name, {name: name})
        assert name in [each["name"] for each in await items(root, "nodes", q=name)]
        assert (await root.delete(path)).status_code == 204


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"1", "application/json", 400),
        (b"[" * 100_000, "application/json", 413),
        (b"[" * 60_000, "application/json", 400),
        (b'{"kind":' * 8_000, "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"kind":"queue"}', "text/plain", 415),
        (b'{"kind":"queue"}', "application/x-www-form-urlencoded", 415),
        (b'{"kind":"queue","name":"other"}', "application/json", 400),
        (b'{"kind":{"a":[1,2,{}]}}', "application/json", 400),
        (b'{"kind":"queue","max_deliveries":1e999}', "application/json", 400),
        (b'{"kind":"queue","max_deliveries":99999999999999999999}', "application/json", 400),
    ],
)
async def test_hostile_bodies(body: bytes, kind: str, status: int) -> None:
    async with site() as web, web.client("root") as root:
        answer = await root.put("/api/v1/nodes/new", content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
        assert not web.broker.has("new")
        assert (await root.get("/api/v1/session")).status_code == 200


async def test_the_document_describes_what_is_answered() -> None:
    async with site() as web, web.client("root") as root:
        document = (await root.get("/api/v1/openapi.json")).json()
        OpenAPIV31SpecValidator(document).validate()
        listed = (await root.get("/api/v1/")).json()["resources"]
        assert {f"/{each}" for each in listed} <= {*document["paths"]}
        # Every path is answered, with a status that the document has.
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                there = path.replace("{name}", "other")
                query = {
                    each["name"]: "other"
                    for each in operation["parameters"]
                    if each["in"] == "query" and each.get("required")
                }
                if method in ("get", "delete") or "purge" in path:
                    answer = await root.request(method, f"/api/v1{there}", params=query)
                    known = {*operation["responses"]} - {"default"}
                    assert str(answer.status_code) in known or answer.status_code in (400, 404)
                if method == "delete" and path == "/nodes/{name}":
                    await web.broker.declare(Queue("other"))
        # Bodies that the document does not allow are refused, and those at its edge are taken.
        body = document["paths"]["/nodes/{name}"]["put"]["requestBody"]
        allowed = body["content"]["application/json"]["schema"]
        assert allowed["additionalProperties"] is False
        assert (await root.put("/api/v1/nodes/new", json={"x": 1})).status_code == 400
        assert document["paths"]["/schedules/{name}"]["put"]["requestBody"]["content"][
            "application/json"
        ]["schema"]["required"] == ["to"]
        assert (await root.put("/api/v1/schedules/new", json={})).status_code == 400
        for schema, path in (
            ("nodes/{name}/move", "nodes/other/move"),
            ("users/{name}", "users/new"),
        ):
            method = "post" if "move" in path else "put"
            given = document["paths"][f"/{schema}"][method]["requestBody"]["content"]
            ((name, kind),) = [
                each
                for each in given["application/json"]["schema"]["properties"].items()
                if each[0] in ("to", "password")
            ]
            assert kind["minLength"] == 1
            answer = await root.request(method, f"/api/v1/{path}", json={name: ""})
            assert answer.status_code == 400
        # Rows of chosen attributes, and positions of pages, are as the document says.
        page = (await root.get("/api/v1/nodes?fields=kind&limit=1")).json()
        listing = document["paths"]["/nodes"]["get"]
        Draft202012Validator(
            {
                **listing["responses"]["200"]["content"]["application/json"]["schema"],
                "components": document["components"],
            }
        ).validate(page)
        (after,) = [each for each in listing["parameters"] if each["name"] == "after"]
        Draft202012Validator(after["schema"]).validate(page["next"])
        # Management describes the attributes, once.
        queue = document["components"]["schemas"]["Queue"]["properties"]
        assert {*queue} == {*Queue.__struct_fields__}


async def test_metrics_take_the_right_to_manage_all() -> None:
    async with site() as web, web.client("root") as root:
        answer = await root.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "amqp_rt_messages{" in answer.text
        assert 'node="team/q"' not in answer.text
        assert 'node="team/q"' in (await root.get("/metrics", params={"node": "team/*"})).text
        assert (await root.get("/metrics", params={"node": "x" * 257})).status_code == 400
        async with web.client("ops") as ops:
            assert (await ops.get("/metrics")).status_code == 403
        async with web.client() as stranger:
            assert (await stranger.get("/metrics")).status_code == 401


async def test_a_node_that_is_deleted_meanwhile_is_not_found() -> None:
    """As it is for the next request: the first one was not malformed."""
    async with site() as web, web.client("root") as root, trio.open_nursery() as nursery:
        await web.broker.declare(Queue("full", length_max=1))
        assert await status_of(root, "POST", "nodes/full/publish", json={"body": 1}) == 200
        answered = trio.Event()

        async def publish() -> None:
            body = {"body": 2}
            answer = await root.post("/api/v1/nodes/full/publish", json=body)
            assert answer.status_code == 404
            assert answer.json()["condition"] == "amqp:resource-deleted"
            answered.set()

        nursery.start_soon(publish)
        while not web.broker.stats("full").producers:  # noqa: ASYNC110  # nothing else tells
            await trio.sleep(0.01)
        await web.broker.delete("full")
        with trio.fail_after(5):
            await answered.wait()
