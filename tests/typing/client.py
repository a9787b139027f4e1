"""The client as type checkers see it; ``decorators.py`` explains the checks."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, assert_type

import msgspec

from amqp_rt import (
    Breaker,
    Bulkhead,
    Cache,
    Connection,
    Container,
    Delivery,
    Hedge,
    Message,
    Plain,
    Receiver,
    Reconnect,
    Retry,
    Sender,
)
from amqp_rt.container.calling import Calling
from amqp_rt.container.sending import Receipt
from amqp_rt.outcomes import Accepted, Modified, Outcome, Rejected, Released


class Order(msgspec.Struct):
    sku: str


async def send(out: Sender) -> None:
    outcome = await out.send(Order("A-1"), ttl_s=60, subject="new", application_properties={"a": 1})
    assert_type(outcome, Accepted | Rejected | Released | Modified)
    assert_type(out.send_nowait(b"x"), Receipt)
    assert_type(await out.send_nowait("x").outcome(), Outcome)
    assert_type(await out.send_many([1, 2], durable=True), int)
    async with out.stream(content_type="video/mp4") as body:
        await body.write(b"x")
    await out.send("x", ttl=60)  # type: ignore[call-arg]
    await out.send("x", priority="high")  # type: ignore[arg-type]


async def receive(messages: Receiver) -> None:
    async for delivery in messages:
        assert_type(delivery, Delivery)
        assert_type(delivery.decode(Order), Order)
        delivery.modify(failed=True)
    assert_type(await messages.get(within=1), Delivery | None)
    assert_type(await messages.receive_batch(10), list[Delivery])


async def call(peer: Connection) -> None:
    assert_type(await peer.call("price", "A-1", reply=Decimal, within=2), Decimal)
    assert_type(await peer.call("price", reply=Message), Message)
    assert_type(await peer.call("price"), Any)
    async with peer.stream("export", reply=Order) as parts:
        async for part in parts:
            print(part)
    await peer.call("price", timeout=2)  # type: ignore[call-overload]


async def call_under_policies(peer: Connection) -> None:
    calls = peer.calling(Cache(), Hedge(), Retry(3), Breaker(), Bulkhead(8), idempotent=True)
    assert_type(calls, Calling)
    assert_type(await calls.call("price", "A-1", reply=Decimal, within=2), Decimal)
    assert_type(await calls.call("price", reply=Message), Message)
    assert_type(await calls.call("price"), Any)
    await calls.call("price", timeout=2)  # type: ignore[call-overload]
    peer.calling(Retry)  # type: ignore[arg-type]
    peer.calling(Retry(), True)  # type: ignore[arg-type]
    Retry(attempt=3)  # type: ignore[call-arg]


async def connect() -> None:
    async with (
        Container("shop") as shop,
        shop.connect(["amqp://a", "amqp://b"], auth=Plain("u", "p"), reconnect=Reconnect()) as peer,
        peer.sender("q", max_pending=10, in_doubt="resend") as out,
        peer.receiver("q", credit=20, mode="copy") as messages,
        peer.session(window_bytes=1_000_000) as session,
        session.sender("q") as other,
    ):
        assert_type(peer, Connection)
        assert_type(out, Sender)
        assert_type(messages, Receiver)
        assert_type(other, Sender)
        peer.sender("q", max_pendin=10)  # type: ignore[call-arg]
        peer.receiver("q", mode="steal")  # type: ignore[arg-type]
