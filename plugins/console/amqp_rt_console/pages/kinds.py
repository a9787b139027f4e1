"""Pages of management types: everything comes from the descriptions of the types, but for the order of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

NODE: Final = "amqp_rt.node"
CONTAINER: Final = "amqp_rt.container"
#: Types whose entities are nodes, each with options of its own.
NODE_KINDS: Final = ("amqp_rt.queue", "amqp_rt.topic", "amqp_rt.log", "amqp_rt.schedule")
#: Nodes that have waiting messages, which PEEK, PURGE and MOVE are about.
WITH_MESSAGES: Final = ("queue",)
WITH_RECORDS: Final = ("log",)

#: Operations that pages offer in a form of their own, or that only programs use.
_ELSEWHERE: Final = frozenset(
    (
        *("CREATE", "READ", "UPDATE", "DELETE", "PEEK", "PURGE", "MOVE", "CURSOR", "SET-CURSOR", "HOLD"),
        # Programs send these with a body, to the management node of the queue or log itself.
        *("COMMIT-EPOCH", "EPOCH", "STAGE"),
        *("OPEN-LEASE", "LEASE-STATE", "LEASE", "ACCEPT-LEASE", "RETURN-LEASE", "RELEASE-LEASE"),
    )
)  # fmt: skip

#: Arguments of operations that have a few values only.
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"outcome": ("commit", "rollback")}


class TypePage(Struct, frozen=True):
    """How the pages of one management type look."""

    type_name: str
    title: str
    #: Columns of the list; None for the first eight attributes.
    columns: tuple[str, ...] | None = None
    #: Effect of DELETE on an entity, as the label of a button.
    ends: str = "Delete"
    #: Whether DELETE asks for the name of the entity: messages and users do not come back.
    asks_name: bool = True
    #: Attributes of an entity that name others, each with the type of those.
    links: Mapping[str, str] = {}
    #: Title of one entity, if that is not the title without its "s".
    singular: str = ""

    @property
    def one(self) -> str:
        """Title of one entity."""
        return self.singular or self.title.removesuffix("s")

    def columns_of(self, attributes: Sequence[str]) -> list[str]:
        """Return the columns of the list for entities that have *attributes*."""
        if self.columns is None:
            return ["name", *(each for each in attributes if each not in _HIDDEN)][:8]
        return [each for each in self.columns if each in attributes or each == "name"]


_HIDDEN: Final = frozenset(("name", "identity", "type"))

_CONNECTION = "amqp_rt.connection"
_PAGES: Final = (
    TypePage(
        NODE,
        "Nodes",
        ("name", "kind", "available", "acquired", "delayed", "bytes", "consumers", "producers", "enqueued", "delivered", "dynamic"),
    ),
    TypePage(
        "amqp_rt.queue",
        "Queues",
        ("name", "available", "acquired", "delayed", "bytes", "consumers", "producers", "enqueued", "delivered", "dead_lettered"),
        links={"dead_letter": NODE},
    ),
    TypePage(
        "amqp_rt.topic", "Topics", ("name", "available", "acquired", "bytes", "consumers", "producers", "enqueued")
    ),
    TypePage("amqp_rt.log", "Logs", ("name", "available", "bytes", "consumers", "producers", "enqueued")),
    TypePage(
        "amqp_rt.schedule",
        "Schedules",
        ("name", "to", "cron", "tz", "every_s", "sent", "next_at", "error"),
        links={"to": NODE},
    ),
    TypePage(
        _CONNECTION,
        "Connections",
        ("name", "user", "address", "protocol", "container_id", "state", "sessions"),
        ends="Close",
        asks_name=False,
        links={"user": "amqp_rt.user"},
    ),
    TypePage(
        "amqp_rt.session",
        "Sessions",
        ("name", "connection", "channel", "links", "oldest_unsettled_s"),
        ends="End",
        asks_name=False,
        links={"connection": _CONNECTION},
    ),
    TypePage(
        "amqp_rt.link",
        "Links",
        ("name", "role", "address", "credit", "link_name", "session"),
        ends="Detach",
        asks_name=False,
        links={"connection": _CONNECTION, "session": "amqp_rt.session", "address": NODE},
    ),
    TypePage(
        "amqp_rt.subscription",
        "Subscriptions",
        ("name", "topic", "container_id", "link", "connection"),
        ends="Detach",
        asks_name=False,
        links={"connection": _CONNECTION, "topic": NODE},
    ),
    TypePage(
        "amqp_rt.terminus",
        "Termini",
        ends="End",
        singular="Terminus",
    ),
    TypePage(
        "amqp_rt.transaction",
        "Open transactions",
        ("name", "state", "user", "container_id", "connection", "posts", "deliveries", "age_s"),
        ends="Roll back",
        links={"connection": _CONNECTION, "user": "amqp_rt.user"},
    ),
    TypePage(
        "amqp_rt.branch",
        "Transactions in doubt",
        ("name", "state", "user", "prepared_at"),
        ends="Forget",
        singular="Transaction in doubt",
    ),
    TypePage("amqp_rt.route", "Handlers", ("name", "kind", "handler", "slots", "running", "load", "received", "sent", "accepted", "failed")),
    TypePage("amqp_rt.user", "Users", ("name", "groups", "connections")),
    TypePage("amqp_rt.rule", "Rules"),
    TypePage("amqp_rt.virtual-host", "Virtual hosts", ("name", "nodes")),
)  # fmt: skip
_BY_TYPE: Final = {page.type_name: page for page in _PAGES}
#: Types without an entry in the navigation: their entities are on pages of others.
_UNLISTED: Final = frozenset((CONTAINER, "org.amqp.management", *NODE_KINDS))


def page_of(type_name: str) -> TypePage:
    """Return the page of a type; one that is not known here gets its name for a title."""
    found = _BY_TYPE.get(type_name)
    if found is None:
        title = type_name.removeprefix("amqp_rt.").replace("-", " ").replace(".", " ").capitalize()
        found = TypePage(type_name, title)
    return found


def listed(types: Mapping[str, Any]) -> list[TypePage]:
    """Return the pages of *types* that the navigation has, known ones first, in their order."""
    known = [
        page
        for page in _PAGES
        if page.type_name in types and page.type_name not in _UNLISTED - {"amqp_rt.schedule"}
    ]
    others = [
        page_of(name) for name in sorted(types) if name not in _BY_TYPE and name not in _UNLISTED
    ]
    return [*known, *others]


def further_operations(operations: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the *operations* of a type that get a form made from their arguments."""
    return {
        name: list(arguments) for name, arguments in operations.items() if name not in _ELSEWHERE
    }
