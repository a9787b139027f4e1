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

from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc, source

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
