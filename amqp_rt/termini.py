"""Sources, targets and the coordinator of transactions (Part 3 §3.5, Part 4 §4.5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .codec.composites import (
    ANY,
    BOOLEAN,
    FIELDS,
    SYMBOL,
    SYMBOLS,
    UINT,
    any_of,
    composite,
)
from .outcomes import Accepted, Modified, Outcome, Received, Rejected, Released
from .values import Described, Symbol

#: Terminus durability (§3.5.5).
DURABLE_NONE, DURABLE_CONFIGURATION, DURABLE_UNSETTLED = 0, 1, 2

#: Distribution modes (§3.5.7).
MOVE, COPY = "move", "copy"

#: Symbols of the outcomes of Part 3, as a source lists them.
STANDARD_OUTCOMES = (
    "amqp:accepted:list",
    "amqp:rejected:list",
    "amqp:released:list",
    "amqp:modified:list",
)

#: Open capability: messages routed by their ``to`` (anonymous terminus 1.0).
ANONYMOUS_RELAY = "ANONYMOUS-RELAY"
#: Open capability: subscriptions shared by several links (JMS mapping).
SHARED_SUBS = "SHARED-SUBS"
#: Source capability: its node keeps a failed message for the pause that its outcome requests.
PAUSES = Symbol("amqp_rt:pauses")


@composite(0x2B)
class DeleteOnClose(Struct, frozen=True, gc=False):
    """The node lives as long as the link that created it (§3.5.10)."""


@composite(0x2C)
class DeleteOnNoLinks(Struct, frozen=True, gc=False):
    """The node lives as long as any link is attached to it (§3.5.11)."""


@composite(0x2D)
class DeleteOnNoMessages(Struct, frozen=True, gc=False):
    """The node is deleted once the link that created it is closed and it is empty (§3.5.12)."""


@composite(0x2E)
class DeleteOnNoLinksOrMessages(Struct, frozen=True, gc=False):
    """The node is deleted once it has neither links nor messages (§3.5.13)."""


@composite(
    0x28,
    ("address", ANY),
    ("durable", UINT, 0),
    ("expiry_policy", SYMBOL, "session-end"),
    ("timeout", UINT, 0),
    ("dynamic", BOOLEAN, False),
    ("dynamic_node_properties", FIELDS),
    ("distribution_mode", SYMBOL),
    ("filter", FIELDS),
    (
        "default_outcome",
        any_of(Accepted, Rejected, Released, Modified, Received),
    ),
    ("outcomes", SYMBOLS, ()),
    ("capabilities", SYMBOLS, ()),
)
class Source(Struct, kw_only=True, gc=False):
    """Origin of the messages of a link (§3.5.3)."""

    address: Any = None
    durable: int = 0
    expiry_policy: str = "session-end"
    timeout: int = 0
    dynamic: bool = False
    dynamic_node_properties: Mapping[object, object] | None = None
    distribution_mode: str | None = None
    #: Filters by a name that the receiver is free to choose; the descriptor identifies the type of
    #: each (§3.5.8). Keys are symbols, or strings from peers that confuse the two.
    filter: Mapping[object, object] | None = None
    default_outcome: Outcome | Received | Described | None = None
    outcomes: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


@composite(
    0x29,
    ("address", ANY),
    ("durable", UINT, 0),
    ("expiry_policy", SYMBOL, "session-end"),
    ("timeout", UINT, 0),
    ("dynamic", BOOLEAN, False),
    ("dynamic_node_properties", FIELDS),
    ("capabilities", SYMBOLS, ()),
)
class Target(Struct, kw_only=True, gc=False):
    """Destination of the messages of a link (§3.5.4)."""

    address: Any = None
    durable: int = 0
    expiry_policy: str = "session-end"
    timeout: int = 0
    dynamic: bool = False
    dynamic_node_properties: Mapping[object, object] | None = None
    capabilities: tuple[str, ...] = ()


@composite(0x30, ("capabilities", SYMBOLS, ()))
class Coordinator(Struct, kw_only=True, gc=False):
    """The target of a transaction's control link (Part 4 §4.5.1)."""

    capabilities: tuple[str, ...] = ()


def outlives_connection(terminus: Source | Target | Coordinator | None) -> bool:
    """Return whether *terminus* is kept, with its unsettled deliveries, when its connection is lost.

    Unless the expiry-policy is *never*, a timer starts then, and the terminus expires when it
    runs out; by default that is at once (§3.5.6).
    """
    if not isinstance(terminus, Source | Target):
        return False
    return terminus.timeout > 0 or terminus.expiry_policy == "never"
