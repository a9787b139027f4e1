"""Outboxes and inboxes: messages that happen together with the rows of an application's own database.

* :class:`SqlOutbox` and :class:`SqlInbox` use sessions of SQLAlchemy, for example on PostgreSQL, and any number of
  processes; they need ``pip install 'amqp-rt[sqlalchemy]'``. Messages are sent at least once, with a message-id
  by which an inbox recognizes duplicates.
* :class:`SqliteOutbox` uses a connection to SQLite in one process, and sends each message once to a broker that keeps
  durable termini.

:class:`Outbox` is their common interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..container.boxes import NodeInbox, Outbox, Refused
from .sqlite import Database, SqliteOutbox, Work

if TYPE_CHECKING:
    from .sql.inboxes import SqlInbox
    from .sql.outboxes import SqlOutbox

__all__ = [
    "Database",
    "NodeInbox",
    "Outbox",
    "Refused",
    "SqlInbox",
    "SqlOutbox",
    "SqliteOutbox",
    "Work",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # SQLAlchemy is imported by those who use it.
    if name == "SqlInbox":
        from .sql.inboxes import SqlInbox

        return SqlInbox
    if name == "SqlOutbox":
        from .sql.outboxes import SqlOutbox

        return SqlOutbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
