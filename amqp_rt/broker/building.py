"""Parts for nodes of plug-ins: entries, the room of a node, links that send and receive, readers of logs.

A kind of node in another distribution (decisions 0063 and 0064) is made of these, and imports them from here.
"""

from __future__ import annotations

from ..transactions import TransactionalState
from .durable.duplicates import Arrived, Duplicates
from .entries import Entry, EntryFactory, UnacceptableMessage, exceeds_link
from .filtering.plugin_filters import FilterType
from .filtering.positions import Position, event_hubs_position
from .filtering.selectors import InvalidFilter
from .filtering.views import MessageView
from .log.reading import LogReader
from .producers import FULL, Inlet, Intake, Place, Producer
from .queue.accounts import Counts, Memory
from .queue.subscriptions import Enlisted, Subscription
from .transactions import Transaction, Transactions

__all__ = [
    "FULL",
    "Arrived",
    "Counts",
    "Duplicates",
    "Enlisted",
    "Entry",
    "EntryFactory",
    "FilterType",
    "Inlet",
    "Intake",
    "InvalidFilter",
    "LogReader",
    "Memory",
    "MessageView",
    "Place",
    "Position",
    "Producer",
    "Subscription",
    "Transaction",
    "TransactionalState",
    "Transactions",
    "UnacceptableMessage",
    "event_hubs_position",
    "exceeds_link",
]
