"""Requests to ``/management`` by links of our own client, as RabbitMQ's clients send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from amqp_rt import Connection, Message


def request(method: str, path: str, body: object = None, **fields: Any) -> Message:
    """Return a request, whose body is an amqp-value."""
    given = {"message_id": 1, "reply_to": "$me", "subject": method, "to": path, **fields}
    return Message(body, body_kind="value", **given)


class Managing:
    """Pair of links to ``/management``."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.sender = sender
        self.receiver = receiver

    async def __call__(self, method: str, path: str, body: object = None) -> tuple[str, Any]:
        await self.sender.send(request(method, path, body))
        delivery = await self.receiver.receive()
        return delivery.message.subject, delivery.body


@asynccontextmanager
async def managing(peer: Connection) -> AsyncIterator[Managing]:
    pair: dict[str, Any] = {"name": "pair", "properties": {"paired": True}}
    async with (
        peer.sender("/management", **pair) as sender,
        peer.receiver("/management", **pair) as receiver,
    ):
        yield Managing(sender, receiver)
