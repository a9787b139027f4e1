"""Requests at the management nodes of a namespace."""

from __future__ import annotations

from typing import Any

from amqp_rt_servicebus.testing import ServiceBus

from amqp_rt import Message
from amqp_rt.events import Peer
from amqp_rt.values import Int


def ask(
    bus: ServiceBus, entity: str, operation: str, body: object, link: str | None = None
) -> tuple[int, Any, Any]:
    """Return status, condition and body of the answer, which was encoded and decoded."""

    async def answer() -> Message:
        management = bus.broker.broker.management
        assert management is not None
        said = {"operation": f"com.microsoft:{operation}"}
        if link is not None:
            said["associated-link-name"] = link
        request = Message.decode(bytes(Message(body, application_properties=said).encode()))
        reply = await management.answer(request, Peer(trusted=True), entity)
        return Message.decode(bytes(reply.encode()))

    reply = bus.broker.call(answer)
    said = reply.application_properties
    assert type(said["statusCode"]) is Int
    return said["statusCode"], said.get("errorCondition"), reply.body
