"""Tests of the shop, in memory and in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from shop.bank import Bank
from shop.main import Invoice, Order, Status, bill, outbox, place, status

from amqp_rt import Connection
from amqp_rt.errors import DeliveryRejected

NODES = Path(__file__).parent.parent / "nodes.toml"


def order(number: int, card: str = "4711", **changes: Any) -> dict[str, Any]:
    return {"number": number, "sku": "A-1", "quantity": 2, "card": card, **changes}


def run(amqp: Any, customer: Callable[[Connection, Any], Awaitable[None]]) -> Bank:
    """Run the shop at the queues of a broker, with *customer*; return the bank."""
    bank = Bank()
    broker = amqp.broker(volatile=True)
    shop = amqp.container(place, bill, status, resources=[bank], outbox=outbox)

    async def scenario() -> None:
        await broker.declare_from(NODES)
        await broker.listen("memory://broker")
        async with shop.connect("memory://broker") as peer:
            await peer.serve()
            await customer(peer, broker)

    amqp.run(scenario)
    return bank


async def state_of(peer: Connection, number: int) -> str:
    """Return the state of an order when it is no longer being worked on."""
    while True:
        found = await peer.call("orders/status", number, reply=Status)
        if found.state not in ("unknown", "placed"):
            return found.state
        await trio.sleep(1)


def test_an_order_is_paid(amqp: Any) -> None:
    async def customer(peer: Connection, broker: Any) -> None:
        async with peer.sender("orders") as orders:
            await orders.send(Order(**order(1)), message_id="order-1")
        assert await state_of(peer, 1) == "paid"

    assert run(amqp, customer).charged == {"1": 998}


def test_an_order_that_is_sent_twice_is_paid_once(amqp: Any) -> None:
    async def customer(peer: Connection, broker: Any) -> None:
        async with peer.sender("orders") as orders:
            for _ in range(2):
                await orders.send(order(1), message_id="order-1")
        assert await state_of(peer, 1) == "paid"
        await outbox.flush()
        assert broker.stats("invoices").enqueued == 1

    run(amqp, customer)


def test_an_invoice_waits_for_the_bank(amqp: Any) -> None:
    async def customer(peer: Connection, broker: Any) -> None:
        async with peer.sender("orders") as orders:
            await orders.send(order(1, card="slow 4711"), message_id="order-1")
        assert await state_of(peer, 1) == "paid"
        assert broker.stats("invoices").requeued == 2

    assert run(amqp, customer).charged == {"1": 998}


def test_what_cannot_be_billed_is_kept(amqp: Any) -> None:
    async def customer(peer: Connection, broker: Any) -> None:
        async with peer.sender("orders") as orders:
            await orders.send(order(1, card="bad 4711"), message_id="order-1")
        async with peer.receiver("invoices/dead") as dead, await dead.receive() as invoice:
            assert invoice.decode(Invoice).number == 1

    assert run(amqp, customer).charged == {}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"sku": "Z"}, "there is no Z"), ({"quantity": 0}, "greater than 0 - at `\\$.quantity`")],
)
def test_an_order_that_is_wrong_is_rejected_with_the_reason(
    amqp: Any, wrong: dict[str, Any], why: str
) -> None:
    shop = amqp.container(place, resources=[Bank()])
    with pytest.raises(DeliveryRejected, match=why):
        amqp.run(shop.send, "orders", order(1, **wrong), message_id="order-1")
