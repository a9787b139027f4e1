"""The members of the shop; main.py runs each of them as a process of its own.

    python members.py NAME [SEED]

The part of NAME before a ``-`` says what it does: prices, stock, orders or audit. SEED is the URL of any other member. It
prints what happens as lines of JSON, and ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import msgspec
import trio

from amqp_rt import Container
from amqp_rt.mesh import Mesh, MeshRule
from amqp_rt.policies import Retry

PRICES = {"teapot": 24.50, "kettle": 39.00, "cup": 6.20, "strainer": 3.90}
#: Each message to an address of the audit goes to all members that serve it. All members have the same rules.
RULES = [MeshRule("audit/*", "multicast")]


class Price(msgspec.Struct):
    """Price of one article, and the member that gave it."""

    each: float
    by: str


class Order(msgspec.Struct):
    """Order of a customer."""

    number: int
    sku: str
    count: int


class Sale(msgspec.Struct):
    """An order that has been taken."""

    number: int
    sku: str
    count: int
    total: float
    priced_by: str
    left: int


def say(**event: Any) -> None:
    """Print one event."""
    print(json.dumps(event), flush=True)


def prices(box: Container, mesh: Mesh) -> None:
    """Serve the prices; each process that does so is an instance of the same address."""

    @box.rpc("price/{sku}", slots=4)
    async def price(sku: str) -> Price:
        await trio.sleep(0.02)  # something to do, so that a kill meets calls that are under way
        return Price(PRICES[sku], box.name)


def stock(box: Container, mesh: Mesh) -> None:
    """Know what is left, and take away what the audit hears has been sold."""
    left = Counter(dict.fromkeys(PRICES, 500))

    @box.rpc("stock/{sku}")
    async def in_stock(sku: str) -> int:
        return left[sku]

    @box.node("audit/sales")
    async def sold(sale: Sale) -> None:
        left[sale.sku] -= sale.count
        say(picked=sale.number)


def audit(box: Container, mesh: Mesh) -> None:
    """Book what was sold."""

    @box.node("audit/sales")
    async def sold(sale: Sale) -> None:
        say(booked=sale.number, total=sale.total)


def orders(box: Container, mesh: Mesh) -> None:
    """Take orders: ask for price and stock wherever they are served, and tell the audit."""
    # Asking for a price twice does no harm, so that a call whose answer was lost with a member is repeated.
    prices = mesh.connection.calling(Retry(5), idempotent=True)

    @box.rpc("order")
    async def take(order: Order) -> Sale:
        price = await prices.call(f"price/{order.sku}", reply=Price, within=5)
        left = await mesh.call(f"stock/{order.sku}", reply=int, within=5)
        sale = Sale(
            order.number,
            order.sku,
            order.count,
            round(order.count * price.each, 2),
            price.by,
            left - order.count,
        )
        async with mesh.sender("audit/sales") as out:
            await out.send(sale)  # both copies have been accepted when this returns
        return sale


SERVED = {"prices": prices, "stock": stock, "orders": orders, "audit": audit}


async def watch(mesh: Mesh) -> None:
    """Say which members serve prices whenever that changes."""
    known: set[str] | None = None
    while True:
        serving = {each.node for each in mesh.instances("price/teapot") if each.alive}
        if serving != known:
            known = serving
            say(serving=sorted(serving))
        await trio.sleep(0.02)


async def main(name: str, *seeds: str) -> None:
    kind = name.partition("-")[0]
    # A container that listens on loopback is an edge by default, which passes nothing on.
    async with Container(name, drain_s=5) as box:
        (url,) = await box.listen("amqp://127.0.0.1:0")
        async with (
            Mesh(box, seeds, name="shop", role="interior", rules=RULES) as mesh,
            trio.open_nursery() as nursery,
        ):
            SERVED[kind](box, mesh)
            await mesh.wait_ready()
            say(ready=url)
            if kind == "orders":
                nursery.start_soon(watch, mesh)
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
