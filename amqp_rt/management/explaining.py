"""The operation ``EXPLAIN`` of ``$management``: whether a user has a right at an address, and which rules decide.

Its application-properties are *user* (absent for peers without a user name), *right*, which is ``send``,
``listen`` or ``manage``, and *address*. The reply is a map with the fields of
:class:`~amqp_rt.security.access.Explanation`. Rules are judged as for a connection of that user to the
virtual host of the request, without tokens.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ..container.permissions import Permissions
from ..errors import AmqpError
from ..events import Peer
from ..message import Message
from ..security.access import Rights, explain, rights_of
from .answering import EntityManagement, text_of, text_or

EXPLAIN: Final = "EXPLAIN"


def add_explaining(management: EntityManagement, permissions: Permissions) -> None:
    """Add the operation to *management*, which answers by *permissions*."""

    def perform(message: Message, asking: Peer) -> dict[str, Any]:
        right = text_of(message, "right")
        wanted = rights_of([right])
        if wanted is Rights.NONE:
            raise AmqpError(
                f"right is send, listen or manage, not {right!r:.50}",
                condition="amqp:invalid-field",
            )
        peer = Peer(user=text_or(message, "user") or None, virtual_host=asking.virtual_host)
        name = permissions.own_name(peer, text_of(message, "address"))
        found = explain(permissions.access, peer, wanted, name, permissions.decide)
        row: dict[str, Any] = msgspec.to_builtins(found)
        if found.allowed and permissions.authorize is not None and Rights.MANAGE not in wanted:
            row["reason"] += "; the application's authorize is asked as well, and may refuse a link"
        return row

    management.add_operation(EXPLAIN, perform, ["user", "right", "address"])
