"""Messages that have their outcome are freed at once: none leaves a cycle of references to the collector."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest
from references import no_collector

from amqp_rt import Broker, Connection, Container, Message, node, rpc
from amqp_rt.errors import DeliveryNotAccepted
from amqp_rt.outcomes import Released
from amqp_rt.stores.memory import MemoryStore

__all__ = ["no_collector"]

MESSAGES = 200
Work = Callable[[Connection, int], Awaitable[None]]


@node("taken", prefetch=100)
async def take(body: bytes) -> None:
    """Accept each message."""


@node("released")
async def release(body: bytes) -> Released:
    return Released()


@rpc("echo")
async def echo(number: int) -> int:
    return number


def numbered(count: int) -> Iterator[Message]:
    return (Message(b"x", message_id=number) for number in range(count))


async def send_many(peer: Connection, count: int) -> None:
    async with peer.sender("taken") as out:
        await out.send_many(numbered(count))


async def send_settled(peer: Connection, count: int) -> None:
    async with peer.sender("taken", settled=True) as out:
        await out.send_many(numbered(count))


async def send_each(peer: Connection, count: int) -> None:
    async with peer.sender("taken") as out:
        for message in numbered(count):
            await out.send(message)


async def send_released(peer: Connection, count: int) -> None:
    async with peer.sender("released") as out:
        for message in numbered(count):
            with pytest.raises(DeliveryNotAccepted):
                await out.send(message)


async def give_up(peer: Connection, count: int) -> None:
    async with peer.sender("taken") as out:
        for message in numbered(count):
            out.send_nowait(message).give_up()


async def call(peer: Connection, count: int) -> None:
    for number in range(count):
        assert await peer.call("echo", number, reply=int) == number


async def through_a_store(peer: Connection, count: int) -> None:
    """Each message is a unit of the journal, when it comes and when it goes."""
    async with peer.sender("queue") as out, peer.receiver("queue") as arriving:
        for number in range(count):
            await out.send(Message(b"x", message_id=number, durable=True))
            (await arriving.receive()).accept()


async def through_a_queue(peer: Connection, count: int) -> None:
    async with peer.sender("queue") as out, peer.receiver("queue") as arriving:
        await out.send_many(numbered(count))
        for _ in range(count):
            (await arriving.receive()).accept()


@pytest.mark.parametrize(
    "work",
    [
        *(send_many, send_settled, send_each, send_released, give_up, call),
        *(through_a_queue, through_a_store),
    ],
)
async def test_messages_leave_no_cycles(no_collector: None, work: Work) -> None:
    store = MemoryStore()
    async with Broker(
        nodes=[take, release, echo], auto_create=["queue:queue"], store=store
    ) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with Container("sender") as client, client.connect(str(url)) as peer:
            await work(peer, 1)
            gc.collect()
            await work(peer, MESSAGES)
            # A link that was opened and closed may leave some objects, but none for each message.
            assert gc.collect() < MESSAGES
