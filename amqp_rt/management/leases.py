"""Leases at ``<queue>/$management``: peers with the right to receive can lease messages of a queue.

The operations ``OPEN-LEASE`` (*group*, and *seconds* if it is to expire), ``LEASE-STATE`` (*group*),
``LEASE`` (*group*, *generation*, *count*), ``ACCEPT-LEASE`` (*group*, *generation*, *to*),
``RETURN-LEASE`` (*group*, *generation*, and a body that lists the ranges ``[from, to]`` to return) and
``RELEASE-LEASE`` (*group*) take application-properties. All but the last reply with the state of the
group: *generation*, *first*, *next*, *available*, *id*; the last with the number of messages *released*.
All but the first and the last also take that *id*: a group that was released or has expired, and was
opened again, has a new one, and requests with the old one are refused.
"""

from __future__ import annotations

from typing import Any, Final

import trio

from ..broker.kinds.base import Node
from ..broker.leases import Leases, LeaseState
from ..errors import AmqpError
from ..message import Message
from ..security.access import Rights
from .answering import text_of, whole_of
from .node import Management

__all__ = [
    "ACCEPT_LEASE",
    "LEASE",
    "LEASE_STATE",
    "OPEN_LEASE",
    "RELEASE_LEASE",
    "RETURN_LEASE",
    "add_leases",
]

OPEN_LEASE: Final = "OPEN-LEASE"
LEASE_STATE: Final = "LEASE-STATE"
LEASE: Final = "LEASE"
ACCEPT_LEASE: Final = "ACCEPT-LEASE"
RETURN_LEASE: Final = "RETURN-LEASE"
RELEASE_LEASE: Final = "RELEASE-LEASE"


def add_leases(management: Management, leases: Leases) -> None:
    """Add the operations on *leases* of queues to *management*."""

    async def opens(node: Node, message: Message) -> Any:
        seconds = message.application_properties.get("seconds")
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float)
        ):
            raise AmqpError(
                f"seconds must be a number, not {seconds!r:.50}", condition="amqp:invalid-field"
            )
        group = text_of(message, "group")
        return _row(await leases.open(node, group, None if seconds is None else float(seconds)))

    def current(node: Node, message: Message) -> LeaseState:
        """Return the state of the group, after checking the request's *id*."""
        id_ = message.application_properties.get("id")
        return leases.state(node, text_of(message, "group"), id_)

    async def state(node: Node, message: Message) -> Any:
        await trio.lowlevel.checkpoint()
        return _row(current(node, message))

    async def lease(node: Node, message: Message) -> Any:
        current(node, message)
        group, generation = text_of(message, "group"), whole_of(message, "generation")
        return _row(await leases.extend(node, group, generation, whole_of(message, "count")))

    async def accept(node: Node, message: Message) -> Any:
        current(node, message)
        group, generation = text_of(message, "group"), whole_of(message, "generation")
        return _row(await leases.accept(node, group, generation, whole_of(message, "to")))

    async def give_back(node: Node, message: Message) -> Any:
        current(node, message)
        group, generation = text_of(message, "group"), whole_of(message, "generation")
        return _row(await leases.give_back(node, group, generation, _ranges(message.body)))

    async def release(node: Node, message: Message) -> Any:
        return {"released": await leases.release(node, text_of(message, "group"))}

    for operation, answer in (
        (OPEN_LEASE, opens),
        (LEASE_STATE, state),
        (LEASE, lease),
        (ACCEPT_LEASE, accept),
        (RETURN_LEASE, give_back),
        (RELEASE_LEASE, release),
    ):
        management.add_node_hook(operation, answer, Rights.LISTEN)


def _ranges(body: Any) -> list[tuple[int, int]]:
    """Return the pairs of numbers that *body* lists.

    Raises:
        AmqpError: The body has another form.
    """
    found = []
    for each in body if isinstance(body, list) else [body]:
        if (
            not isinstance(each, list)
            or len(each) != 2
            or not all(isinstance(number, int) for number in each)
        ):
            raise AmqpError(
                f"the body of {RETURN_LEASE} is a list of ranges, each of them [from, to]",
                condition="amqp:invalid-field",
            )
        found.append((int(each[0]), int(each[1])))
    return found


def _row(state: LeaseState) -> dict[str, Any]:
    return {
        "generation": state.generation,
        "first": state.first,
        "next": state.next,
        "available": state.available,
        "id": state.id,
    }
