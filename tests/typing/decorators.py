"""Programs that must type-check, and lines that must not: ``make types`` runs mypy over this file.

A line that must not check is marked with the error it must give; mypy reports marks that are not needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import assert_type

import msgspec

from amqp_rt import Container, Deadline, Message, Reject, Router, node, rpc, source


class Order(msgspec.Struct):
    sku: str


@node("orders", slots=8, prefetch=500)
async def place(order: Order, message: Message) -> None: ...


@rpc("price")
async def price(sku: str, *, deadline: Deadline) -> Decimal:
    if not sku:
        raise Reject("there is nothing", condition="shop:nothing")
    return Decimal(1)


@rpc("export")
async def export(day: str) -> AsyncIterator[Order]:
    yield Order(day)


@node("sync")
def plain(order: Order) -> int:
    return 1


class Orders:
    @node("place")
    async def place(self, order: Order) -> None: ...

    @source("events", mode="move", filters=["selector"])
    async def events(self) -> AsyncIterator[Order]:
        yield Order("A-1")

    @node.link("raw/{region}")
    async def raw(self, link: object, region: str) -> None: ...


async def decorated_functions_keep_their_types(message: Message, orders: Orders) -> None:
    assert_type(await place(Order("A-1"), message), None)
    assert_type(await price("A-1", deadline=Deadline()), Decimal)
    assert_type(export("today"), AsyncIterator[Order])
    assert_type(plain(Order("A-1")), int)
    assert_type(await orders.place(Order("A-1")), None)
    assert_type(orders.events(), AsyncIterator[Order])

    await place("A-1", message)  # type: ignore[arg-type]
    await price("A-1")  # type: ignore[call-arg]
    plain("A-1")  # type: ignore[arg-type]


container = Container("shop", nodes=[Orders(), place], users={"ann": "secret"})
router = Router("v1/", nodes=[price])


@container.node("direct")
@router.rpc("both")
async def both(number: int) -> int:
    return number


@container.node.link("links")
async def links(link: object) -> None: ...


async def registration_on_objects_keeps_them_too() -> None:
    assert_type(await both(1), int)
    await both("1")  # type: ignore[arg-type]


node(7)  # type: ignore[arg-type]
node("x", slots="many")  # type: ignore[arg-type]
source("x", mode="both")  # type: ignore[arg-type]
node("x")(7)  # type: ignore[type-var]
