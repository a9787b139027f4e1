"""Typed nodes as an AsyncAPI 3.0 document."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import date
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from amqp_rt import Broker, Message
from amqp_rt.addresses import AddressError
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc, source
from amqp_rt.errors import CallFailed
from amqp_rt.security.access import reserved

pytestmark = pytest.mark.req("A3")


class Order(msgspec.Struct):
    """Something that somebody wants."""

    sku: str
    quantity: Annotated[int, Meta(ge=1)] = 1


class Shop:
    @node("orders")
    async def place(self, order: Order) -> None:
        """Take an order.

        More about it.
        """

    @rpc("orders/{region}/price")
    async def price(self, sku: str, region: str) -> Decimal:
        return Decimal(1)

    @rpc("orders/export")
    async def export(self, day: date) -> AsyncIterator[Order]:
        yield Order("A-1")

    @source("orders/events")
    async def events(self) -> AsyncIterator[Order]:
        yield Order("A-1")

    @node.link("raw")
    async def raw(self, link: Any) -> None: ...

    @node("anything")
    async def anything(self, body: Any) -> None: ...

    @node("odd")
    async def odd(self, body: Container) -> None: ...


@pytest.fixture
def document() -> dict[str, Any]:
    found = Container("shop", nodes=[Shop()]).asyncapi(version="2.1")
    again: dict[str, Any] = json.loads(json.dumps(found))
    assert again == found  # nothing but JSON
    return found


def test_the_frame(document: dict[str, Any]) -> None:
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "shop", "version": "2.1"}
    assert document["channels"].keys() == {
        "orders",
        "orders_region_price",
        "orders_export",
        "orders_events",
        "raw",
        "anything",
        "odd",
    }


def test_a_node_receives_what_its_payload_is(document: dict[str, Any]) -> None:
    operation = document["operations"]["node.orders"]
    assert operation == {
        "action": "receive",
        "channel": {"$ref": "#/channels/orders"},
        "summary": "Take an order.",
        "messages": [{"$ref": "#/channels/orders/messages/node.orders"}],
    }
    assert document["channels"]["orders"] == {
        "address": "orders",
        "messages": {"node.orders": {"$ref": "#/components/messages/node.orders"}},
    }
    message = document["components"]["messages"]["node.orders"]
    assert message["payload"] == {"$ref": "#/components/schemas/Order"}
    assert document["components"]["schemas"]["Order"] == {
        "title": "Order",
        "description": "Something that somebody wants.",
        "type": "object",
        "properties": {
            "sku": {"type": "string"},
            "quantity": {"type": "integer", "minimum": 1, "default": 1},
        },
        "required": ["sku"],
    }


def test_a_request_has_its_reply(document: dict[str, Any]) -> None:
    operation = document["operations"]["rpc.orders_region_price"]
    assert operation["reply"] == {
        "address": {"location": "$message.header#/reply-to"},
        "messages": [
            {"$ref": "#/channels/orders_region_price/messages/rpc.orders_region_price.reply"}
        ],
    }
    messages = document["components"]["messages"]
    assert messages["rpc.orders_region_price"]["payload"] == {"type": "string"}
    assert messages["rpc.orders_region_price.reply"]["payload"]["format"] == "decimal"
    assert document["channels"]["orders_region_price"]["parameters"] == {"region": {}}


def test_a_streamed_reply_is_marked(document: dict[str, Any]) -> None:
    operation = document["operations"]["rpc.orders_export"]
    assert operation["reply"]["x-streamed"] is True
    reply = document["components"]["messages"]["rpc.orders_export.reply"]
    assert reply["payload"] == {"$ref": "#/components/schemas/Order"}


def test_a_source_sends(document: dict[str, Any]) -> None:
    operation = document["operations"]["source.orders_events"]
    assert operation["action"] == "send"
    message = document["components"]["messages"]["source.orders_events"]
    assert message["payload"] == {"$ref": "#/components/schemas/Order"}


@pytest.mark.parametrize("name", ["link.raw", "node.odd"])
def test_what_has_no_schema_has_a_name(document: dict[str, Any], name: str) -> None:
    assert document["components"]["messages"][name] == {"name": name}


def test_anything_is_anything(document: dict[str, Any]) -> None:
    assert document["components"]["messages"]["node.anything"].get("payload", {}) == {}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(part: Any) -> list[str]:
        if isinstance(part, dict):
            own = [part["$ref"]] if "$ref" in part else []
            return own + [each for value in part.values() for each in references(value)]
        if isinstance(part, list):
            return [each for value in part for each in references(value)]
        return []

    found = references(document)
    assert found
    for reference in found:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_two_addresses_that_read_alike_stay_two() -> None:
    c = Container("c")
    c.node("a/b")(lambda body: None)
    c.node("a b")(lambda body: None)
    c.source("a/b")(events)
    document = c.asyncapi()
    assert [channel["address"] for channel in document["channels"].values()] == [
        "a/b",
        "a b",
        "a/b",
    ]
    assert len(document["operations"]) == 3


async def events() -> AsyncIterator[int]:
    yield 1


@pytest.mark.req("A19")
async def test_a_running_container_describes_itself() -> None:
    async with Container("shop", nodes=[Shop()]) as shop:
        shop.offer_asyncapi(version="3.1")
        async with shop.local() as peer:
            reply = await peer.call("$asyncapi", reply=Message, within=5)
        assert reply.content_type == "application/json"
        document = json.loads(reply.body)
        assert document == json.loads(json.dumps(shop.asyncapi(version="3.1")))
        assert "orders" in document["channels"]
        assert not [each for each in document["channels"] if "asyncapi" in each]
        with pytest.raises(AddressError):
            shop.offer_asyncapi()


@pytest.mark.req("A19")
async def test_handlers_are_entities_of_a_broker() -> None:
    async with (
        Broker(nodes=[Shop()], virtual_hosts=["", "berlin"]) as broker,
        broker.local() as peer,
        broker.local("berlin") as other,
    ):
        async with peer.sender("orders") as out:
            await out.send(Order("A-1"))
        async with peer.management() as management:
            rows = {row["name"]: row async for row in management.query("amqp_rt.route")}
            one = await management.read("amqp_rt.route", "orders")
        assert "$management" not in rows
        assert rows["orders"] == one
        assert (one["kind"], one["accepted"], one["received"]) == ("node", 1, 1)
        assert one["handler"] == "Shop.place"
        async with other.management() as management:
            assert [row async for row in management.query("amqp_rt.route")] == []
            with pytest.raises(CallFailed):
                await management.read("amqp_rt.route", "orders")


def test_no_queue_is_called_like_the_document() -> None:
    assert reserved("$asyncapi") == "'$asyncapi' is the broker's own"
