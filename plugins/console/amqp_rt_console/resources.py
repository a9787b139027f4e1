"""Resources of the JSON API: what each is called, and the type of ``$management`` that answers for it.

Attributes and operations are those of the types, which are described once, in the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from amqp_rt.management.answering import KnownType

#: Operation of management → method of HTTP on one entity.
_METHODS: Final = {"READ": "GET", "CREATE": "PUT", "UPDATE": "PATCH", "DELETE": "DELETE"}


class Act(Struct, frozen=True):
    """Operation beyond reading and changing attributes: ``POST /api/v1/RESOURCE/NAME/ACT``."""

    name: str
    #: Operation of management that performs it; empty if links do.
    operation: str
    what: str
    #: Fields of the body that are application-properties of the request, with the types that they have in JSON.
    arguments: Mapping[str, str] = {}
    #: Those without which it is refused.
    required: tuple[str, ...] = ()


class Resource(Struct, frozen=True, kw_only=True):
    """Entities of one type at ``/api/v1/NAME``."""

    name: str
    type_name: str
    #: One entity, in words.
    what: str
    acts: tuple[Act, ...] = ()
    #: Whether one entity is read by itself for its row, since rows of a query do not have all attributes.
    listed_only: bool = False

    def methods(self, types: Mapping[str, KnownType]) -> dict[str, str]:
        """Return the methods on one entity, each with its operation."""
        if self.listed_only:
            return {}
        known = types[self.type_name].operations
        return {method: each for each, method in _METHODS.items() if each in known}


PUBLISH: Final = Act("publish", "", "Send a message to the node.")
PEEK: Final = Act(
    "peek", "", "Return the first messages, and leave them there.", {"count": "integer"}
)

RESOURCES: Final[dict[str, Resource]] = {
    each.name: each
    for each in (
        Resource(
            name="nodes",
            type_name="amqp_rt.node",
            what="queue, topic, log or schedule",
            acts=(
                PUBLISH,
                Act(
                    "move",
                    "MOVE",
                    "Move waiting messages to another node, in order.",
                    {"to": "string", "count": "integer"},
                    ("to",),
                ),
                Act("purge", "PURGE", "Drop the messages that wait, or the records of a log."),
                PEEK,
            ),
        ),
        Resource(name="connections", type_name="amqp_rt.connection", what="connection"),
        Resource(name="sessions", type_name="amqp_rt.session", what="session of a connection"),
        Resource(name="links", type_name="amqp_rt.link", what="link of a session"),
        Resource(
            name="subscriptions",
            type_name="amqp_rt.subscription",
            what="link that receives from a topic",
        ),
        Resource(name="users", type_name="amqp_rt.user", what="user"),
        Resource(name="rules", type_name="amqp_rt.rule", what="rule of access"),
        Resource(
            name="virtual-hosts",
            type_name="amqp_rt.virtual-host",
            what="virtual host",
            listed_only=True,
        ),
        Resource(name="termini", type_name="amqp_rt.terminus", what="terminus that is kept"),
        Resource(
            name="transactions",
            type_name="amqp_rt.branch",
            what="branch of a transaction that is in doubt",
            acts=(
                Act(
                    "resolve",
                    "RESOLVE-BRANCH",
                    "Commit the branch, or roll it back, in place of its coordinator.",
                    {"outcome": "string"},
                    ("outcome",),
                ),
            ),
        ),
        Resource(
            name="open-transactions",
            type_name="amqp_rt.transaction",
            what="transaction that a client has declared and not discharged",
        ),
        Resource(name="schedules", type_name="amqp_rt.schedule", what="schedule"),
        Resource(name="containers", type_name="amqp_rt.container", what="container"),
        Resource(name="routes", type_name="amqp_rt.route", what="handler of the application"),
    )
}
