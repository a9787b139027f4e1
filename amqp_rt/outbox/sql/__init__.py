"""Outbox and inbox in databases of SQLAlchemy; import the classes from :mod:`amqp_rt.outbox`."""

from __future__ import annotations

try:
    import sqlalchemy as sqlalchemy
except ModuleNotFoundError:
    raise ImportError(
        "SqlOutbox and SqlInbox need SQLAlchemy 2: pip install 'amqp-rt[sqlalchemy]', and a driver of the database"
    ) from None
