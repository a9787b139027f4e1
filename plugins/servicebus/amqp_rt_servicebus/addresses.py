"""Addresses of a namespace: an entity, one of its sub-queues, or the management node of either."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: Last part of the address of an entity's management node.
MANAGEMENT: Final = "$management"
DEAD_LETTERS: Final = "$deadletterqueue"
TRANSFERS: Final = "$transfer/$deadletterqueue"
#: Path of WebSockets, which the SDKs ask for.
WEBSOCKET_PATH: Final = "/$servicebus/websocket"

_SUBSCRIPTIONS: Final = "/subscriptions/"
#: Beginning of the addresses that a container makes for links.
_MADE: Final = "dynamic/"


class Place(Struct, frozen=True):
    """Place that an address names."""

    #: Name of the queue or topic, in lower case as all parts are.
    name: str
    #: Name of the subscription, empty for none.
    subscription: str = ""
    #: :data:`DEAD_LETTERS`, :data:`TRANSFERS`, or empty for the entity itself.
    sub_queue: str = ""
    #: Whether it is the place's management node.
    management: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the entity without its sub-queue."""
        return (self.name, self.subscription) if self.subscription else (self.name,)


def address_of(text: str) -> str:
    """Return the address that a client means: a path in lower case, without scheme, host and outer slashes.

    Clients write paths, or URLs whose host is that of the namespace, ``sb://``, ``amqps://`` or ``https://``.
    """
    # After the last separator, so that the result has none and stands for itself.
    _, separator, rest = text.rpartition("://")
    path = rest.partition("/")[2] if separator else text
    path = path.strip("/")
    # What the broker has made for a link that asked for a dynamic address is random text in both cases.
    return path if path.startswith(_MADE) else path.lower()


def place_of(address: str) -> Place:
    """Return the place of *address*, which need not exist.

    Suffixes are read from the end: names of queues and topics may contain slashes.
    """
    rest = address_of(address)
    management = rest.endswith(f"/{MANAGEMENT}")
    rest = rest.removesuffix(f"/{MANAGEMENT}")
    sub_queue = ""
    for each in (TRANSFERS, DEAD_LETTERS):
        if rest.endswith(f"/{each}"):
            sub_queue = each
            rest = rest.removesuffix(f"/{each}")
            break
    name, separator, subscription = rest.rpartition(_SUBSCRIPTIONS)
    if separator and "/" not in subscription:
        return Place(name, subscription, sub_queue, management)
    return Place(rest, "", sub_queue, management)
