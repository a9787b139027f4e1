"""Outbox and inbox in databases of SQLAlchemy; import the classes from :mod:`amqp_rt.outbox`."""

from __future__ import annotations

try:
    # Both kinds of sessions are taken. SQLAlchemy 2.1 has the asynchronous ones only beside greenlet.
    import sqlalchemy.ext.asyncio as _asyncio  # noqa: F401 - checked here, used by the modules
except ImportError:
    raise ImportError(
        "SqlOutbox and SqlInbox need SQLAlchemy 2: pip install 'amqp-rt[sqlalchemy]', and a driver of the database"
    ) from None
