"""``$management``: the operations of the draft, every type, and who may do what."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from brokers import client_of
from msgspec import Struct

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Log, Queue, Schedule, Topic
from amqp_rt.broker.statistics import LogStats, NodeStats
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    CallFailed,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.events import Peer
from amqp_rt.limits import Limits
from amqp_rt.management.node import Management
from amqp_rt.message import Message
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.identities import Users, password_line
from amqp_rt.security.mechanisms import Plain
from amqp_rt.values import Symbol

USERS = {"root": "r", "ops": "o", "shop": "s"}
ACCESS = Access(
    [
        Rule("*", Rights.MANAGE, users=("root",)),
        Rule("team/*", Rights.MANAGE, users=("ops",)),
        Rule("team/q", Rights.SEND, users=("shop",)),
    ],
    groups={"staff": ["root", "ops"]},
)


@asynccontextmanager
async def broker_with(**options: Any) -> AsyncIterator[Broker]:
    broker = Broker("b", users=USERS, access=ACCESS, plain_in_clear=True, **options)
    async with broker:
        await broker.declare(
            Queue("team/q", max_deliveries=3), Queue("other"), Topic("team/t"), Log("l")
        )
        await broker.listen("memory://b")
        yield broker


def as_user(broker: Broker, user: str) -> AbstractAsyncContextManager[Connection]:
    return client_of(broker, user, auth=Plain(user, USERS[user]))


async def ask(
    peer: Connection, operation: Any, body: Any = None, *, at: str = "$management", **given: Any
) -> tuple[int, Any]:
    asked = {name: value for name, value in {"operation": operation, **given}.items() if value}
    message = Message(body, body_kind="value", application_properties=asked)
    try:
        reply = await peer.call(at, message, reply=Message, within=5)
    except CallFailed as error:
        return int(str(error.info["statusCode"])), {}
    status: int = reply.application_properties["statusCode"]
    return status, reply.body


@pytest.mark.req("G1", "G2")
async def test_the_life_of_a_node() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        kind = "amqp_rt.queue"
        given = {"max_deliveries": 5, "priorities": "4"}
        status, body = await ask(peer, "CREATE", given, type=kind, name="new")
        assert status == 201
        assert (body["name"], body["identity"], body["type"]) == ("new", "new", kind)
        assert (body["max_deliveries"], body["priorities"]) == (5, 4)
        assert (await ask(peer, "CREATE", {}, type=kind, name="new"))[0] == 409
        # The name is said once, or twice alike.
        again = {**given, "name": "another"}
        for operation, name in (("CREATE", "third"), ("UPDATE", "new")):
            assert (await ask(peer, operation, again, type=kind, name=name))[0] == 400
        assert not broker.has("third")
        assert not broker.has("another")
        alike = {**given, "name": "new"}
        assert (await ask(peer, "UPDATE", alike, type=kind, name="new"))[0] == 200
        status, body = await ask(peer, "READ", type=kind, name="new")
        assert (status, body["available"]) == (200, 0)
        assert (await ask(peer, "READ", type="amqp_rt.topic", name="new"))[0] == 404
        assert (await ask(peer, "READ", identity="new"))[0] == 200
        status, body = await ask(peer, "UPDATE", {"max_deliveries": 7}, name="new")
        assert (status, body["max_deliveries"], body["priorities"]) == (200, 7, 4)
        status, body = await ask(peer, "UPDATE", {"max_deliveries": None}, name="new")
        assert (status, "max_deliveries" in body) == (200, False)
        assert (await ask(peer, "UPDATE", {"priorities": 9}, name="new"))[0] == 409
        assert (await ask(peer, "UPDATE", {"prioritys": 9}, name="new"))[0] == 400
        assert (await ask(peer, "UPDATE", {"kind": "queue"}, name="new"))[0] == 200
        for other in ("topic", None):
            assert (await ask(peer, "UPDATE", {"kind": other}, name="new"))[0] == 409
        assert (await ask(peer, "DELETE", name="new")) == (204, {})
        for operation in ("READ", "UPDATE", "DELETE"):
            assert (await ask(peer, operation, {}, name="new"))[0] == 404


@pytest.mark.req("G2")
@pytest.mark.parametrize(
    ("operation", "given", "status"),
    [
        ("FROB", {}, 501),
        (5, {}, 501),
        (None, {}, 501),
        ("READ", {}, 400),
        ("READ", {"name": 5}, 400),
        ("READ", {"name": "other", "type": "nothing"}, 400),
        ("READ", {"name": "other", "type": 5}, 400),
        ("QUERY", {"entityType": "nothing"}, 404),
        ("QUERY", {"offset": -1}, 400),
        ("QUERY", {"count": "x"}, 400),
        ("GET-TYPES", {"entityType": "nothing"}, 404),
        ("CREATE", {"type": "amqp_rt.link", "name": "x"}, 501),
        ("READ", {"type": "amqp_rt.link", "name": "x"}, 404),
        ("MOVE", {"name": "other"}, 400),
        ("REGISTER", {}, 400),
    ],
)
async def test_what_cannot_be_done_is_said(
    operation: Any, given: dict[str, Any], status: int
) -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        assert (await ask(peer, operation, **given))[0] == status


@pytest.mark.req("SE11")
async def test_every_operation_takes_the_right_to_manage_what_it_is_about() -> None:
    async with broker_with() as broker, as_user(broker, "ops") as peer:
        broker.publish("team/q", Message("x").encode())
        broker.publish("other", Message("x").encode())
        assert (await ask(peer, "READ", name="team/q"))[0] == 200
        assert (await ask(peer, "PEEK", name="team/q"))[0] == 200
        assert (await ask(peer, "CREATE", {}, name="team/new"))[0] == 201
        for operation in ("READ", "UPDATE", "DELETE", "PEEK", "PURGE", "CREATE", "CURSOR", "HOLD"):
            assert (await ask(peer, operation, {}, name="other"))[0] == 403
            # Whether there is such a node is not told either.
            assert (await ask(peer, operation, {}, name="nowhere"))[0] == 403
        assert (await ask(peer, "SET-CURSOR", {}, name="l", group="g"))[0] == 403
        # No way around through another node.
        assert (await ask(peer, "MOVE", name="team/q", to="other"))[0] == 403
        assert (await ask(peer, "MOVE", name="other", to="team/q"))[0] == 403
        for operation, name in (("CREATE", "team/x"), ("UPDATE", "team/q")):
            assert (await ask(peer, operation, {"dead_letter": "other"}, name=name))[0] == 403
        assert broker.stats("other").available == 1
        # A query gives what may be managed, and nothing of other types.
        _, body = await ask(peer, "QUERY", {"attributeNames": ["name"]})
        assert sorted(body["results"]) == [["team/new"], ["team/q"], ["team/t"]]
        kinds = ("container", "connection", "session", "link", "subscription", "user")
        for kind in kinds:
            assert (await ask(peer, "QUERY", entityType=f"amqp_rt.{kind}"))[0] == 403
            for operation in ("CREATE", "READ", "DELETE"):
                given = {"type": f"amqp_rt.{kind}", "name": "shop"}
                assert (await ask(peer, operation, {"password": "p"}, **given))[0] == 403
        assert (await ask(peer, "REGISTER", address="x"))[0] == 403
        async with as_user(broker, "shop") as shop:
            with pytest.raises(LinkRefused):
                await ask(shop, "QUERY")


@pytest.mark.req("G2")
async def test_a_query_has_pages() -> None:
    async with broker_with(limits=Limits(management_rows_max=3)) as broker:
        for number in range(7):
            await broker.declare(Queue(f"many/{number}"))
        async with as_user(broker, "root") as peer:
            seen: list[str] = []
            sizes: list[int] = []
            while True:
                asked = {
                    "operation": "QUERY",
                    "entityType": "amqp_rt.queue",
                    "offset": len(seen),
                    "count": 100,
                }
                body = {"attributeNames": ["name", "kind", "nothing"]}
                message = Message(body, application_properties=asked)
                reply = await peer.call("$management", message, reply=Message)
                rows = reply.body["results"]
                assert reply.application_properties["count"] == len(rows)
                if not rows:
                    break
                sizes.append(len(rows))
                seen += [row[0] for row in rows]
                assert all(row[1:] == ["queue", None] for row in rows)
            declared = ["team/q", "other", *(f"many/{number}" for number in range(7))]
            assert seen[: len(declared)] == declared
            # The last one is the dynamic node that the replies come from.
            assert (len(seen), sizes) == (10, [3, 3, 3, 1])


class _Crowded:
    """A virtual host with many nodes, which counts how often it is asked for one."""

    def __init__(self, count: int) -> None:
        self.nodes = {f"n{number}": _Row(self, f"n{number}") for number in range(count)}
        self.asked = 0
        self.made = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def kind(self, name: str) -> str | None:
        self.asked += 1
        return "queue" if name in self.nodes else None


class _Named(Struct):
    """Its attributes."""

    name: str
    kind: str = "queue"


class _Row:
    """One of its nodes, which counts how often its statistics are read."""

    kind = "queue"

    def __init__(self, space: _Crowded, name: str) -> None:
        self._space = space
        self.declared = _Named(name)

    def kind_stats(self, *, alone: bool = False) -> None:
        return None

    def stats(self) -> _Named:
        self._space.made += 1
        return self.declared


class _Steps(trio.abc.Instrument):
    """The most that *done* grows by in one pass of the event loop."""

    def __init__(self, done: Callable[[], int]) -> None:
        self._done = done
        self._before = 0
        self.most = 0

    def before_io_wait(self, timeout: float) -> None:
        self.most = max(self.most, self._done() - self._before)
        self._before = self._done()


def _query(**given: Any) -> Message:
    return Message(application_properties={"operation": "QUERY", **given})


async def test_a_query_works_in_turns_and_makes_the_rows_of_its_page_only() -> None:
    crowded = _Crowded(100_000)
    management = Management(lambda virtual_host: cast("Any", crowded))
    steps = _Steps(lambda: crowded.asked)
    trio.lowlevel.add_instrument(steps)
    replies: list[Message] = []

    async def ask_for(**given: Any) -> None:
        replies.append(await management.answer(_query(**given), Peer()))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(partial(ask_for, entityType="amqp_rt.queue", offset=5_000, count=3))
    trio.lowlevel.remove_instrument(steps)
    assert {tuple(row[0] for row in reply.body["results"]) for reply in replies} == {
        ("n5000", "n5001", "n5002")
    }
    # However many queries run, one of them has a turn in each pass.
    assert 0 < steps.most <= 200
    assert crowded.made == 20 * 3
    assert crowded.asked <= 20 * 5_010


async def test_a_query_passes_nodes_that_are_deleted_meanwhile() -> None:
    crowded = _Crowded(2_000)
    management = Management(lambda virtual_host: cast("Any", crowded))
    seen: list[Message] = []

    async def ask_for() -> None:
        seen.append(await management.answer(_query(entityType="amqp_rt.queue"), Peer()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_for)
        await trio.lowlevel.checkpoint()
        while crowded.asked < 200:
            await trio.lowlevel.checkpoint()
        for number in range(1_000, 1_995):
            del crowded.nodes[f"n{number}"]
    names = [row[0] for row in seen[0].body["results"]]
    assert len(names) == 1_000
    assert not set(names) - {f"n{number}" for number in range(1_000)}


async def test_a_page_ends_early_where_its_values_would_be_too_many() -> None:
    crowded = _Crowded(2_000)
    management = Management(lambda virtual_host: cast("Any", crowded))
    wide = _query(entityType="amqp_rt.queue")
    wide.body = {"attributeNames": [f"a{number}" for number in range(200)]}
    reply = await management.answer(wide, Peer())
    assert reply.application_properties["count"] == len(reply.body["results"]) == 50


@pytest.mark.parametrize("operation", ["PURGE", "MOVE"])
async def test_what_an_operator_takes_away_goes_in_turns(operation: str) -> None:
    async with broker_with() as broker:
        for _ in range(3_000):
            broker.publish("other", Message("x").encode())
        steps = _Steps(lambda: -broker.stats("other").available)
        trio.lowlevel.add_instrument(steps)
        if operation == "PURGE":
            assert await broker.purge("other") == 3_000
        else:
            assert await broker.move("other", "team/q", 2_900) == 2_900
            assert broker.stats("team/q").available == 2_900
        trio.lowlevel.remove_instrument(steps)
        assert 0 < steps.most <= 500


@pytest.mark.req("G2", "G7")
async def test_what_there_is_to_know_about_types() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        _, types = await ask(peer, "GET-TYPES")
        assert types["amqp_rt.queue"] == ["amqp_rt.node"]
        names = {
            *("container", "connection", "session", "link", "subscription", "user", "route"),
            *("node", "queue", "topic", "log", "schedule", "virtual-host", "branch"),
            *("rule", "terminus", "transaction"),
        }
        assert set(types) == {*(f"amqp_rt.{name}" for name in names), "org.amqp.management"}
        assert (await ask(peer, "GET-TYPES", entityType="amqp_rt.log"))[1] == {
            "amqp_rt.log": ["amqp_rt.node"]
        }
        _, attributes = await ask(peer, "GET-ATTRIBUTES")
        assert {"max_deliveries", "name", "type", "identity"} <= set(attributes["amqp_rt.queue"])
        statistics = {*NodeStats.__struct_fields__}
        for kind in ("node", "queue", "topic", "log", "schedule"):
            assert statistics <= set(attributes[f"amqp_rt.{kind}"])
        assert {"next_at", "sent"} <= set(attributes["amqp_rt.schedule"])
        assert {"eras", "max_age_s"} <= set(attributes["amqp_rt.log"])
        assert "next_at" not in attributes["amqp_rt.queue"]
        assert "nodes" in attributes["amqp_rt.virtual-host"]
        assert "credit" in attributes["amqp_rt.link"]
        _, operations = await ask(peer, "GET-OPERATIONS")
        assert operations["amqp_rt.node"]["MOVE"] == ["to", "count"]
        assert set(operations["amqp_rt.link"]) == {"READ", "DELETE"}
        assert "QUERY" in operations["org.amqp.management"]
        _, annotations = await ask(peer, "GET-ANNOTATIONS", entityType="amqp_rt.user")
        assert annotations == {"amqp_rt.user": []}
        _, schema = await ask(peer, "GET-SCHEMA", entityType="amqp_rt.queue")
        assert "Queue" in str(schema)
        assert "max_deliveries" in str(schema)


@pytest.mark.req("G2", "G6")
async def test_ordered_queries_are_not_shifted_by_what_comes_and_goes() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        there = peer.management()
        await broker.declare(*(Queue(f"row-{each}") for each in range(8)))
        page = await there.page("amqp_rt.queue", q="row-", count=4, attributes=["name"])
        assert [each["name"] for each in page.rows] == ["row-0", "row-1", "row-2", "row-3"]
        assert page.total == 8
        await broker.delete("row-0")
        await broker.delete("row-3")
        await broker.declare(Queue("row-00"), Queue("row-44"))
        page = await there.page(Queue, q="row-", after=page.next, count=3, attributes=["name"])
        assert [each["name"] for each in page.rows] == ["row-4", "row-44", "row-5"]
        page = await there.page(Queue, q="ROW-", after=page.next, count=3)
        assert [each["name"] for each in page.rows] == ["row-6", "row-7"]
        assert page.next is None
        page = await there.page(Queue, sort="-max_deliveries", count=1)
        assert [each["name"] for each in page.rows] == ["team/q"]
        assert page.rows[0]["max_deliveries"] == 3
        # Positions have flags, too.
        page = await there.page("amqp_rt.node", sort="dynamic", q="row-", count=4)
        assert [each["name"] for each in page.rows] == ["row-00", "row-1", "row-2", "row-4"]
        page = await there.page("amqp_rt.node", sort="dynamic", q="row-", count=4, after=page.next)
        assert [each["name"] for each in page.rows] == ["row-44", "row-5", "row-6", "row-7"]
        # Attributes of any kind of node order the list of all.
        assert (await there.page("amqp_rt.node", sort="dead_letter")).total == 13
        for given in ({"after": "x"}, {"sort": "x" * 2_000}, {"q": 5}, {"sort": "a", "offset": 1}):
            assert (await ask(peer, "QUERY", entityType="amqp_rt.queue", **given))[0] == 400
        # A position is checked: this one has a number where a text has to be.
        assert (await ask(peer, "QUERY", entityType="amqp_rt.queue", after="kpICAaFh"))[0] == 400


@pytest.mark.req("G2", "G6")
@pytest.mark.parametrize("sort", ["name", "-messages"])
async def test_an_ordered_query_lets_others_work(sort: str) -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        await broker.declare(*(Queue(f"row-{each}") for each in range(2_000)))
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                await trio.lowlevel.checkpoint()
                passes += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            page = await peer.management().page("amqp_rt.node", sort=sort, count=10)
            nursery.cancel_scope.cancel()
        assert page.total == 2_005
        # A step visits 200 nodes at most, and 23 if it has to read their statistics.
        assert passes >= (10 if sort == "name" else 85)


@pytest.mark.req("G2")
async def test_every_attribute_of_the_description_orders_a_query() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        await broker.declare(Schedule("tick", to="other", every_s=60, payload="x"))
        there = peer.management()
        described = await there.attributes()
        listed = {kind: {*names} for kind, names in described.items()}
        # Only READ has these.
        listed["amqp_rt.log"] -= {*LogStats.__struct_fields__} - {*Log.__struct_fields__}
        kinds = [kind for kind, bases in (await there.types()).items() if "amqp_rt.node" in bases]
        # Rows of all nodes have what their kinds have.
        listed["amqp_rt.node"].update(*(listed[kind] for kind in kinds))
        del listed["org.amqp.management"]
        for kind, names in listed.items():
            rows = [row async for row in there.query(kind)]
            assert {key for row in rows for key in row} <= names
            for name in names:
                page = await there.page(kind, sort=f"-{name}")
                assert len(page.rows) == len(rows), (kind, name)


@pytest.mark.req("G2", "G6")
async def test_nodes_are_ordered_by_their_statistics() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        there = peer.management()
        await broker.declare(
            *(Queue(f"row-{each}") for each in range(3)),
            Schedule("soon", to="row-0", every_s=60, payload="x"),
            Schedule("later", to="row-0", every_s=600, payload="x"),
        )
        for number in range(6):
            broker.publish(f"row-{number % 2}", Message(number).encode())
        broker.publish("row-1", Message("later", delay_s=60).encode())
        async with peer.receiver("row-1") as consumer, await consumer.receive():
            page = await there.page("amqp_rt.node", q="row-", sort="-messages")
            counts = [(each["name"], each["messages"], each["delayed"]) for each in page.rows]
            assert counts == [("row-1", 4, 1), ("row-0", 3, 0), ("row-2", 0, 0)]
            page = await there.page(Queue, q="row-", sort="-acquired", count=1)
            assert page.rows[0]["name"] == "row-1"
            page = await there.page(Queue, q="row-", sort="-acquired", after=page.next)
            assert [each["name"] for each in page.rows] == ["row-2", "row-0"]
        page = await there.page(Schedule, sort="next_at")
        assert [each["name"] for each in page.rows] == ["soon", "later"]
        assert page.rows[0]["next_at"] < page.rows[1]["next_at"]
        page = await there.page("amqp_rt.node", sort="-type")
        kinds = [each["kind"] for each in page.rows]
        assert kinds == sorted(kinds, reverse=True)
        assert {*kinds} == {"topic", "schedule", "queue", "log"}


@pytest.mark.req("G2", "G6")
@pytest.mark.parametrize(
    ("kind", "sort", "said"),
    [
        (
            "amqp_rt.queue",
            "-mesages",
            "no attribute 'mesages' of amqp_rt.queue; did you mean 'messages'?",
        ),
        ("amqp_rt.queue", "next_at", "no attribute 'next_at' of amqp_rt.queue"),
        ("amqp_rt.log", "eras", "no attribute 'eras' of amqp_rt.log"),
        ("amqp_rt.link", "depth", "there are address, connection, credit, identity"),
        ("", "x" * 1_000, "there is no attribute 'xxx"),
    ],
)
async def test_an_order_by_an_attribute_that_rows_do_not_have_is_refused(
    kind: str, sort: str, said: str
) -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        with pytest.raises(CallFailed, match=re.escape(said)) as failed:
            await peer.management().page(kind, sort=sort)
        assert failed.value.info["statusCode"] == 400


@pytest.mark.req("G2")
async def test_queries_of_all_nodes_judge_each_unless_all_may_be_managed() -> None:
    async with broker_with() as broker:
        await broker.declare(*(Queue(f"n{each}") for each in range(250)))
        for user, count in (("root", 255), ("ops", 2)):
            async with as_user(broker, user) as peer:
                page = await peer.management().page("amqp_rt.node", count=500, attributes=["name"])
                assert (page.total, len(page.rows)) == (count, count)


@pytest.mark.req("G2")
async def test_management_nodes() -> None:
    async with (
        broker_with(limits=Limits(management_nodes_max=2)) as broker,
        as_user(broker, "root") as peer,
    ):
        for name in ("a", "b"):
            assert (await ask(peer, "REGISTER", address=name))[0] == 200
        assert (await ask(peer, "REGISTER", address="c"))[0] == 409
        assert (await ask(peer, "GET-MGMT-NODES"))[1] == ["$management", "a", "b"]
        assert (await ask(peer, "DEREGISTER", address="a"))[0] == 200
        assert (await ask(peer, "GET-MGMT-NODES"))[1] == ["$management", "b"]


async def rows(peer: Connection, kind: str) -> list[dict[str, Any]]:
    _, body = await ask(peer, "QUERY", entityType=f"amqp_rt.{kind}")
    return [dict(zip(body["attributeNames"], row, strict=True)) for row in body["results"]]


@pytest.mark.req("G2")
async def test_connections_sessions_links_and_subscriptions() -> None:
    async with broker_with() as broker, as_user(broker, "root") as root:
        (found,) = await rows(root, "container")
        assert (found["name"], found["connections"], found["nodes"]) == ("b", 1, 5)
        async with as_user(broker, "shop") as shop:
            await root.receiver("team/t", name="sub").wait_attached()
            out = shop.sender("team/q", name="mine")
            await out.wait_attached()
            connections = {each["container_id"]: each for each in await rows(root, "connection")}
            assert connections["shop"]["user"] == "shop"
            assert "s" not in (connections["shop"].get("password") or "")
            (subscription,) = await rows(root, "subscription")
            assert (subscription["topic"], subscription["link"]) == ("team/t", "sub")
            links = {each["link_name"]: each for each in await rows(root, "link")}
            assert (links["mine"]["role"], links["mine"]["address"]) == ("sender", "team/q")
            assert links["mine"]["connection"] == connections["shop"]["name"]
            assert links["mine"]["session"] in {
                each["name"] for each in await rows(root, "session")
            }
            asked = {"type": "amqp_rt.link", "name": links["mine"]["name"]}
            assert (await ask(root, "READ", **asked))[1]["address"] == "team/q"
            assert (await ask(root, "DELETE", **asked))[0] == 204
            with pytest.raises(LinkDetached, match="by an operator"):
                await out.send("x")
            asked = {"type": "amqp_rt.connection", "name": connections["shop"]["name"]}
            assert (await ask(root, "DELETE", **asked))[0] == 204
            with trio.fail_after(5):
                await shop.wait_closed()


@pytest.mark.slow
@pytest.mark.req("G2")
async def test_users() -> None:
    async with broker_with() as broker, as_user(broker, "root") as root:
        found = {each["name"]: each for each in await rows(root, "user")}
        assert found["root"] == {
            "name": "root",
            "identity": "root",
            "type": "amqp_rt.user",
            "groups": ["staff"],
            "connections": 1,
        }
        asked = {"type": "amqp_rt.user", "name": "ann"}
        for bad in ({}, {"password": ""}, {"password": 5}, {"password": "p", "x": 1}):
            assert (await ask(root, "CREATE", bad, **asked))[0] == 400
        status, body = await ask(root, "CREATE", {"password": "first"}, **asked)
        assert status == 201
        assert "first" not in str(body)
        assert (await ask(root, "CREATE", {"password": "p"}, **asked))[0] == 409
        assert (await ask(root, "UPDATE", {"password": "second"}, **asked))[0] == 200
        assert broker.container.users is not None
        assert broker.container.users.check("ann", "first") is None
        assert broker.container.users.check("ann", "second") == "ann"
        async with as_user(broker, "shop") as shop:
            given = {"password": "another"}
            assert (await ask(root, "UPDATE", given, type="amqp_rt.user", name="shop"))[0] == 200
            with trio.fail_after(5):
                await shop.wait_closed()
            assert shop.ended_with is not None
            assert shop.ended_with.description == "the user has another password now"
        # The one who asks for it stays.
        assert (
            await ask(root, "UPDATE", {"password": USERS["root"]}, type="amqp_rt.user", name="root")
        )[0] == 200
        assert broker.container.users is not None
        broker.container.users.add("shop", USERS["shop"])
        async with as_user(broker, "shop") as shop:
            assert (await ask(root, "DELETE", type="amqp_rt.user", name="shop"))[0] == 204
            with trio.fail_after(5):
                await shop.wait_closed()
        with pytest.raises(AuthenticationFailed):
            async with as_user(broker, "shop"):
                pass


class SlowUsers(Users):
    """Users whose changes a test lets go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go = threading.Event()

    def store(self, user: str, password: str) -> None:
        assert self.go.wait(10)
        super().store(user, password)

    def forget(self, user: str) -> None:
        assert self.go.wait(10)
        super().forget(user)


@pytest.mark.req("G2")
@pytest.mark.parametrize(
    ("first", "second", "status", "password"),
    [
        ("CREATE", "CREATE", 409, "first"),
        ("DELETE", "UPDATE", 404, None),
        ("DELETE", "DELETE", 404, None),
        ("UPDATE", "UPDATE", 200, "second"),
    ],
)
async def test_changes_of_one_user_at_the_same_time(
    first: str, second: str, status: int, password: str | None
) -> None:
    users = SlowUsers({"root": "r"} if first == "CREATE" else {"root": "r", "ann": "old"})
    access = Access([Rule("*", Rights.MANAGE, users=("root",))])
    answers: dict[str, int] = {}
    async with (
        Broker("b", users=users, access=access, plain_in_clear=True) as broker,
        broker.local() as root,
        trio.open_nursery() as nursery,
    ):

        async def change(operation: str, password: str) -> None:
            body = None if operation == "DELETE" else {"password": password}
            asked = {"type": "amqp_rt.user", "name": "ann"}
            answers[password] = (await ask(root, operation, body, **asked))[0]

        nursery.start_soon(change, first, "first")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(change, second, "second")
        await trio.testing.wait_all_tasks_blocked()
        users.go.set()
    assert answers == {"first": {"CREATE": 201, "DELETE": 204}.get(first, 200), "second": status}
    assert ("ann" in users) == (password is not None)
    if password is not None:
        assert users.check("ann", password) == "ann"


@pytest.mark.slow
@pytest.mark.req("G2", "SE2")
async def test_users_of_a_file_are_changed_there(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("\n".join(password_line(name, "pw") for name in ("root", "shop")), "utf-8")
    users = Users()
    users.load(path)
    access = Access([Rule("*", Rights.MANAGE, users=("root",))])
    async with Broker("b", users=users, access=access) as broker:
        await broker.listen("memory://b")
        auth = Plain("root", "pw")
        async with (
            Container("c", network=broker.container.network) as client,
            client.connect("memory://b", auth=auth, reconnect=None) as root,
        ):
            new, shop = ({"type": "amqp_rt.user", "name": name} for name in ("ann", "shop"))
            assert (await ask(root, "CREATE", {"password": "first"}, **new))[0] == 201
            assert (await ask(root, "UPDATE", {"password": "second"}, **new))[0] == 200
            assert (await ask(root, "DELETE", **shop))[0] == 204
            line = {"type": "amqp_rt.user", "name": "x\x0beve"}
            assert (await ask(root, "CREATE", {"password": "p"}, **line))[0] == 400
            async with client.connect(
                "memory://b", auth=Plain("ann", "second"), reconnect=None
            ) as ann:
                assert ann.state == "open"
            kept = path.read_text("utf-8")
            path.unlink()
            status, body = await ask(root, "UPDATE", {"password": "third"}, **new)
            assert status == 500
            assert "third" not in str(body)
            path.write_text(kept, "utf-8")
            assert (await ask(root, "UPDATE", {"password": "third"}, **new))[0] == 200
    again = Users()
    again.load(path)
    assert list(again) == ["ann", "root"]
    assert again.check("ann", "third") == "ann"
    assert "third" not in path.read_text("utf-8")


@pytest.mark.req("G3", "U1")
async def test_an_entity_has_a_management_node_that_profiles_fill() -> None:
    async def renew(entity: str, message: Message, peer: Peer) -> Message:
        await trio.lowlevel.checkpoint()
        return Message({"for": entity}, application_properties={"statusCode": 200})

    async with broker_with() as broker:
        assert broker.management is not None
        broker.management.add_hook("x:renew", renew, rights=Rights.SEND)
        broker.management.add_hook("x:look", renew, rights=Rights.LISTEN)
        with pytest.raises(ValueError, match="already"):
            broker.management.add_hook("READ", renew)
        async with as_user(broker, "shop") as shop, as_user(broker, "root") as root:
            at = "team/q/$management"
            assert await ask(shop, "x:renew", at=at) == (200, {"for": "team/q"})
            # Each operation takes the right that it was added with.
            assert (await ask(shop, "x:look", at=at))[0] == 403
            assert (await ask(shop, "READ", at=at))[0] == 403
            assert (await ask(root, "READ", at=at))[1]["name"] == "team/q"
            assert (await ask(root, "READ", at=at, name="other"))[0] == 400
            assert (await ask(root, "x:renew"))[0] == 501
            assert (await ask(root, "READ", at="nowhere/$management"))[0] == 404
            with pytest.raises(LinkRefused):
                await ask(shop, "x:renew", at="other/$management")
            _, operations = await ask(root, "GET-OPERATIONS", entityType="amqp_rt.node")
            assert "x:renew" in operations["amqp_rt.node"]


async def described(name: str, message: Message, peer: Peer) -> Message:
    await trio.lowlevel.checkpoint()
    if name == "team/gone":
        raise AmqpError("there is no hub 'team/gone'", condition="amqp:not-found")
    return Message({"name": name}, application_properties={"status-code": 200, "statusCode": 200})


async def test_an_added_type_is_read_by_peers_with_a_right_at_the_entity() -> None:
    async with broker_with() as broker:
        assert broker.management is not None
        broker.management.add_type("x:hub", described, rights=Rights.SEND)
        broker.management.add_type("x:other", described, rights=Rights.LISTEN)
        hub = {"type": "x:hub", "name": "team/q"}
        async with as_user(broker, "shop") as shop, as_user(broker, "ops") as ops:
            assert await ask(shop, "READ", **hub) == (200, {"name": "team/q"})
            assert (await ask(shop, "READ", at="team/q/$management", type="x:hub"))[0] == 200
            assert (await ask(shop, "READ", type="x:hub", name="other"))[0] == 403
            assert (await ask(shop, "READ", type="x:other", name="team/q"))[0] == 403
            assert (await ask(shop, "READ", type="x:hub"))[0] == 400
            assert (await ask(shop, "DELETE", **hub))[0] == 501
            _, operations = await ask(ops, "GET-OPERATIONS", entityType="x:hub")
            assert operations == {"x:hub": {"READ": []}}
            assert (await ask(ops, "QUERY", entityType="x:hub"))[0] == 404


async def test_a_type_may_take_any_right_at_the_entity() -> None:
    async with broker_with() as broker:
        assert broker.management is not None
        broker.management.add_type("x:hub", described, rights=Rights.NONE, operations=("LOOK",))
        async with as_user(broker, "shop") as shop, as_user(broker, "ops") as ops:
            for peer in (shop, ops):
                assert (await ask(peer, "LOOK", type="x:hub", name="team/q"))[0] == 200
                assert (await ask(peer, "LOOK", type="x:hub", name="other"))[0] == 403


async def test_with_an_added_type_the_other_operations_take_what_they_took() -> None:
    async with broker_with() as broker:
        assert broker.management is not None
        async with as_user(broker, "shop") as shop:
            with pytest.raises(LinkRefused):
                await ask(shop, "READ", name="team/q")
        broker.management.add_type("x:hub", described, rights=Rights.SEND)
        async with as_user(broker, "shop") as shop:
            for operation in ("READ", "DELETE", "PURGE", "PEEK", "REGISTER", "DEREGISTER"):
                assert (await ask(shop, operation, name="team/q", address="x"))[0] == 403
            assert (await ask(shop, "CREATE", {}, name="new", type="amqp_rt.queue"))[0] == 403
            for kind in ("amqp_rt.queue", "amqp_rt.connection", "amqp_rt.user"):
                status, body = await ask(shop, "QUERY", entityType=kind)
                assert status == 403 or body["results"] == []
        assert broker.has("team/q")
        other = Broker("n", access=ACCESS, addons=[Typed()])
        async with other:
            await other.listen("memory://n")
            async with client_of(other, url="memory://n") as peer:
                with pytest.raises(LinkRefused):
                    await ask(peer, "READ", type="x:hub", name="team/q")


class Typed:
    """Add-on with a type."""

    def install(self, broker: Broker) -> None:
        assert broker.management is not None
        broker.management.add_type("x:hub", described, rights=Rights.NONE)


async def test_failures_of_an_added_type_have_both_spellings_of_the_status() -> None:
    async with broker_with() as broker:
        assert broker.management is not None
        broker.management.add_type("x:hub", described)
        for name, status, condition in (
            ("team/gone", 404, "amqp:not-found"),
            ("", 400, "amqp:invalid-field"),
        ):
            given = {"operation": "READ", "type": "x:hub", "name": name}
            reply = await broker.management.answer(
                Message("", application_properties=given), Peer(trusted=True)
            )
            told = reply.application_properties
            assert told["statusCode"] == told["status-code"] == status
            assert told["statusDescription"] == told["status-description"] != ""
            assert told["errorCondition"] == condition


async def test_the_name_of_a_type_is_taken_once() -> None:
    async with broker_with() as broker:
        assert broker.management is not None
        broker.management.add_type("x:hub", described)
        for name in ("x:hub", "amqp_rt.queue", "amqp_rt.node", "amqp_rt.user"):
            with pytest.raises(ValueError, match="already"):
                broker.management.add_type(name, described)


@pytest.mark.req("SE11", "G2")
async def test_who_manages_a_virtual_host_manages_no_users() -> None:
    access = Access([Rule("*", Rights.MANAGE, users=("ops",), virtual_host="vh")])
    broker = Broker("b", users=USERS, access=access, plain_in_clear=True, virtual_hosts=["", "vh"])
    async with broker:
        await broker.declare(Queue("q"), virtual_host="vh")
        await broker.declare(Queue("q"), Queue("default"))
        await broker.listen("memory://b")
        async with Container("c", network=broker.container.network) as c:
            auth = Plain("ops", "o")
            async with c.connect("memory://b", auth=auth, virtual_host="vh", reconnect=None) as p:
                assert (await ask(p, "READ", name="q"))[0] == 200
                assert (await ask(p, "READ", name="default"))[0] == 404
                asked = {"type": "amqp_rt.user", "name": "new"}
                assert (await ask(p, "CREATE", {"password": "p"}, **asked))[0] == 403
                for operation in ("READ", "UPDATE", "DELETE"):
                    given = {"type": "amqp_rt.user", "name": "root"}
                    assert (await ask(p, operation, {"password": "p"}, **given))[0] == 404
                assert await rows(p, "user") == []
            async with c.connect("memory://b", auth=auth, virtual_host="", reconnect=None) as p:
                with pytest.raises(LinkRefused):
                    await ask(p, "READ", name="q")


# --- the client ---------------------------------------------------------------------------------


@pytest.mark.req("G2")
async def test_entities_come_back_as_what_they_are() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        async with peer.management() as there:
            queue = Queue("new", max_deliveries=4, priorities=2)
            await there.create(queue)
            assert await there.read(Queue, name="new") == queue
            await there.update(Queue("new", ttl_s=5.0, priorities=2))
            assert await there.read(Queue, name="new") == Queue("new", ttl_s=5.0, priorities=2)
            with pytest.raises(CallFailed) as caught:
                await there.read(Topic, name="new")
            assert caught.value.info["statusCode"] == 404
            names = [each.name async for each in there.query(Queue)]
            assert {"team/q", "other", "new"} <= set(names)
            found = [each async for each in there.query("amqp_rt.connection")]
            assert [each["user"] for each in found] == ["root"]
            await there.delete(Queue, name="new")
            assert "amqp_rt.log" in await there.types()
            assert "credit" in (await there.attributes())["amqp_rt.link"]
            assert "MOVE" in (await there.operations())["amqp_rt.queue"]
            assert repr(there) == "<ManagementClient of '$management'>"
        async with peer.management("other") as there:
            assert (await there.read(Queue, name="other")).name == "other"


# --- link pairs ---------------------------------------------------------------------------------

PAIRED: Any = {Symbol("paired"): True}


@pytest.mark.req("G5")
async def test_a_link_pair_answers_on_its_other_half() -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        assert "LINK_PAIR_V1_0" in peer.peer.offered_capabilities
        out = peer.sender("$management", name="pair", properties=PAIRED)
        back = peer.receiver("$management", name="pair", properties=PAIRED, target="mine")
        other = peer.receiver("$management", name="other", target="mine")
        for link in (out, back, other):
            await link.wait_attached()
        assert out.link.properties == back.link.properties == {"paired": True}
        assert not other.link.properties
        asked = {"operation": "READ", "name": "other"}
        message = Message({}, reply_to="$me", message_id="7", application_properties=asked)
        await out.send(message)
        async with await back.receive() as delivery:
            assert delivery.message.correlation_id == "7"
            assert delivery.message.application_properties["statusCode"] == 200
        # The end of one half ends the pair.
        await back.close()
        with pytest.raises(LinkDetached):
            await out.send(message)


@pytest.mark.req("G5")
@pytest.mark.parametrize("properties", [{}, PAIRED])
async def test_me_is_nobody_without_a_pair(properties: Any) -> None:
    async with broker_with() as broker, as_user(broker, "root") as peer:
        message = Message({}, reply_to="$me", application_properties={"operation": "QUERY"})
        async with (
            peer.sender("$management", name="x", properties=properties) as out,
            peer.receiver("$management", name="y", properties=PAIRED),
        ):
            with pytest.raises(DeliveryRejected) as caught:
                await out.send(message)
            assert caught.value.condition == "amqp:invalid-field"
