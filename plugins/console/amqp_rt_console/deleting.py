"""Deletions, also of what carries the request: the user of the session, or its connection, AMQP session or links."""

from __future__ import annotations

from typing import Any, Final

import trio

from amqp_rt import Broker
from amqp_rt.errors import ConnectionLost, LinkDetached, SessionEnded

from .sessions import WITHIN_S, WebSession

#: Entities with which a session of ours may end.
_CARRIERS: Final = frozenset(
    {"amqp_rt.connection", "amqp_rt.session", "amqp_rt.link", "amqp_rt.user"}
)
#: Seconds between two looks at an entity that is ending.
_LOOK_S: Final = 0.02


async def delete(broker: Broker, session: WebSession, type_name: str, name: str) -> Any:
    """Delete an entity with the rights of *session*, and return the body of the reply.

    The reply cannot arrive if *session* ends by the deletion. Then this waits until the entity is gone.

    Raises:
        AmqpError: The broker refused, or the session has ended for another reason.
    """
    host = session.virtual_host
    may_carry = type_name in _CARRIERS and _exists(broker, host, type_name, name)
    try:
        reply = await session.management.request("DELETE", type=type_name, name=name)
    except (ConnectionLost, SessionEnded, LinkDetached) as error:
        refused = isinstance(error, LinkDetached) and error.condition == "amqp:unauthorized-access"
        # Users without any right get no link to the management node.
        if refused or not may_carry:
            raise
        if not await _ends(broker, host, type_name, name):
            raise error
        return {}
    return reply.body


def _exists(broker: Broker, virtual_host: str, type_name: str, name: str) -> bool:
    management = broker.management
    return management is not None and management.has(type_name, name, virtual_host)


async def _ends(broker: Broker, virtual_host: str, type_name: str, name: str) -> bool:
    """Return whether an entity is gone, or is within ``WITHIN_S`` seconds."""
    with trio.move_on_after(WITHIN_S):
        while _exists(broker, virtual_host, type_name, name):  # noqa: ASYNC110 (entities have no event)
            await trio.sleep(_LOOK_S)
        return True
    return False
