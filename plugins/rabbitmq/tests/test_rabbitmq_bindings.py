"""Bindings at ``/management``: lists of them, and the removal of one of several that differ in their arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import pytest
from amqp_rt_rabbitmq.bindings import Named, hash_of, read_query, read_segment
from rabbit_requests import Managing, managing

from amqp_rt import Access, Broker, Limits, Message, Plain, Rights, Rule, connect
from amqp_rt.errors import AmqpError
from amqp_rt.values import Int

pytestmark = pytest.mark.req("G4")

#: A name with what percent-encoding and paths are about.
NAME = "größe/1 of %2F;a=b&c+d?e#f"


@asynccontextmanager
async def management(**options: Any) -> AsyncIterator[Managing]:
    async with Broker(volatile=True, **options) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            yield manage


async def test_one_of_several_bindings_is_removed_by_its_location() -> None:
    async with management() as manage:
        assert (await manage("PUT", "/exchanges/e", {"type": "headers"}))[0] == "204"
        assert (await manage("PUT", "/queues/q", {}))[0] == "201"
        wanted: list[dict[str, object]] = [
            {"x-match": "any", "n": Int(1)},
            {"x-match": "any", "n": Int(2)},
            {"x-match": "all", "flag": True, "deep": {"list": [1, "two", False]}},
        ]
        for arguments in wanted:
            body = {"source": "e", "destination_queue": "q", "binding_key": "k"}
            assert (await manage("POST", "/bindings", {**body, "arguments": arguments}))[0] == "204"
        status, found = await manage("GET", "/bindings?src=e&dstq=q&key=k")
        assert status == "200"
        assert [each["arguments"] for each in found] == wanted
        # A client for Java compares arguments with their widths.
        assert type(found[0]["arguments"]["n"]) is Int
        assert [{**each, "arguments": 0, "location": 0} for each in found] == [
            {**body, "arguments": 0, "location": 0}
        ] * 3
        assert (await manage("DELETE", found[1]["location"]))[0] == "204"
        _, left = await manage("GET", "/bindings?src=e&dstq=q&key=k")
        assert [each["arguments"] for each in left] == [wanted[0], wanted[2]]
        # It is gone already, which is no error; and a binding without arguments never existed.
        assert (await manage("DELETE", found[1]["location"]))[0] == "204"
        assert (await manage("DELETE", "/bindings/src=e;dstq=q;key=k;args="))[0] == "204"
        assert await manage("GET", "/bindings?src=e&dstq=q&key=other") == ("200", [])
        assert len((await manage("GET", "/bindings?src=e&dstq=q&key=k"))[1]) == 2


async def test_bindings_between_exchanges_are_listed_and_removed() -> None:
    async with management() as manage:
        for name in ("one", "two"):
            await manage("PUT", f"/exchanges/{name}", {"type": "topic"})
        body = {"source": "one", "destination_exchange": "two", "binding_key": "a.#"}
        await manage("POST", "/bindings", {**body, "arguments": {"x": "y"}})
        status, [found] = await manage("GET", "/bindings?src=one&dste=two&key=a.%23")
        assert (status, found["destination_exchange"]) == ("200", "two")
        assert (await manage("DELETE", found["location"]))[0] == "204"
        assert await manage("GET", "/bindings?src=one&dste=two&key=a.%23") == ("200", [])


async def test_names_may_have_any_characters() -> None:
    name = quote(NAME, safe="")
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            assert (await manage("PUT", f"/exchanges/{name}", {"type": "direct"}))[0] == "204"
            status, state = await manage("PUT", f"/queues/{name}", {})
            assert (status, state["name"]) == ("201", NAME)
            body = {"source": NAME, "destination_queue": NAME, "binding_key": NAME}
            assert (await manage("POST", "/bindings", body))[0] == "204"
            query = f"/bindings?src={name}&dstq={name}&key={name}"
            _, [found] = await manage("GET", query)
            assert found["location"] == f"/bindings/src={name};dstq={name};key={name};args="
            async with peer.sender(f"/exchanges/{name}/{name}") as out:
                await out.send(b"by its key")
            async with peer.receiver(f"/queues/{name}") as inbox:
                delivery = await inbox.receive()
                assert delivery.body == b"by its key"
                assert delivery.message.message_annotations == {
                    "x-exchange": NAME,
                    "x-routing-key": NAME,
                }
                delivery.accept()
            assert (await manage("DELETE", found["location"]))[0] == "204"
            assert await manage("GET", query) == ("200", [])
            assert (await manage("DELETE", f"/queues/{name}"))[0] == "200"
            assert (await manage("DELETE", f"/exchanges/{name}"))[0] == "204"


async def test_lists_of_bindings_have_a_limit() -> None:
    limits = Limits(bindings_listed_max=2)
    async with management(limits=limits) as manage:
        await manage("PUT", "/queues/q", {})
        body = {"source": "amq.headers", "destination_queue": "q", "binding_key": ""}
        for number in range(2):
            await manage("POST", "/bindings", {**body, "arguments": {"n": number}})
        status, found = await manage("GET", "/bindings?src=amq.headers&dstq=q&key=")
        assert (status, len(found)) == ("200", 2)
        await manage("POST", "/bindings", {**body, "arguments": {"n": 2}})
        for method, path in (
            ("GET", "/bindings?src=amq.headers&dstq=q&key="),
            ("DELETE", found[0]["location"]),
        ):
            status, why = await manage(method, path)
            assert status == "403"
            assert "bindings_listed_max" in why


async def test_bindings_of_others_are_not_listed() -> None:
    access = Access([
        Rule("mine", Rights.SEND, users=("ada",)),
        Rule("/exchanges/mine", Rights.SEND, users=("ada",)),
        Rule("*", Rights.SEND | Rights.LISTEN | Rights.MANAGE, users=("root",)),
    ])  # fmt: skip
    options: dict[str, Any] = {"users": {"ada": "pw", "root": "pw"}, "plain_in_clear": True}
    async with Broker(volatile=True, access=access, **options) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with (
            connect(url, auth=Plain("root", "pw"), reconnect=None) as peer,
            managing(peer) as manage,
        ):
            for name in ("mine", "theirs"):
                await manage("PUT", f"/queues/{name}", {})
                await manage("PUT", f"/exchanges/{name}", {})
        async with (
            connect(url, auth=Plain("ada", "pw"), reconnect=None) as peer,
            managing(peer) as manage,
        ):
            for query, status in (
                ("src=mine&dstq=mine", "200"),
                ("src=mine&dstq=theirs", "403"),
                ("src=mine&dste=theirs", "403"),
                ("src=theirs&dstq=mine", "403"),
                # Whether it exists is not to be learnt either.
                ("src=none&dstq=mine", "403"),
            ):
                assert (await manage("GET", f"/bindings?{query}&key="))[0] == status, query


async def test_arguments_outlive_a_restart(tmp_path: Any) -> None:
    arguments = {"x-match": "any", "n": 7, "flag": False}
    body = {"source": "amq.headers", "destination_queue": "q", "binding_key": ""}
    for first in (True, False):
        async with Broker(store=f"sqlite:{tmp_path / 'store'}") as broker:
            [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
            async with connect(url, reconnect=None) as peer, managing(peer) as manage:
                if first:
                    await manage("PUT", "/queues/q", {})
                    await manage("PUT", f"/exchanges/{quote('a/b', safe='')}", {"type": "fanout"})
                    await manage("POST", "/bindings", {**body, "arguments": arguments})
                else:
                    # An exchange whose name only RabbitMQ has.
                    async with peer.sender("/exchanges/a%2Fb") as out:
                        with pytest.raises(AmqpError):
                            await out.send(Message("to no queue"))
                _, [found] = await manage("GET", "/bindings?src=amq.headers&dstq=q&key=")
                assert found["arguments"] == arguments
                assert found["location"].endswith(f";args={hash_of(arguments)}")


def test_paths_and_queries_name_bindings() -> None:
    named = Named(NAME, NAME, NAME, is_exchange=True, arguments="ab-_")
    assert read_segment(named.path.rpartition("/")[2]) == named
    name = quote(NAME, safe="")
    assert read_query(f"src={name}&dste={name}&key={name}&args=ab-_") == named
    # The client for Java writes a plus as such.
    assert read_query("src=a+b&dstq=q&key=").source == "a+b"
    for wrong in (
        "",
        "src=a&key=",
        "src=a&dstq=b",
        "src=a&dstq=b&dste=c&key=d",
        "src=%FF&dstq=b&key=",
    ):
        with pytest.raises(AmqpError):
            read_query(wrong)


def test_a_hash_depends_on_all_arguments_and_not_on_their_order() -> None:
    assert hash_of({}) == ""
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    different = [{"a": 1}, {"a": 2}, {"a": True}, {"a": "1"}, {"b": 1}, {"a": [1]}, {"a": {"a": 1}}]
    assert len({hash_of(each) for each in different}) == len(different)
