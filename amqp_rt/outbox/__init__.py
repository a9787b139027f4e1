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
    from .inboxes import SqlInbox
    from .sql import SqlOutbox

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
    if name not in ("SqlInbox", "SqlOutbox"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import inboxes, sql
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sqlalchemy":
            raise
        raise ImportError(
            f"{name} needs SQLAlchemy 2: pip install 'amqp-rt[sqlalchemy]', and a driver of the database"
        ) from None
    return inboxes.SqlInbox if name == "SqlInbox" else sql.SqlOutbox
