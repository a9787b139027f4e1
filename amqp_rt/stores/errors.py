"""Errors of stores, each with the AMQP error condition that peers get."""

from __future__ import annotations

from ..errors import AmqpError


class StoreFull(AmqpError):
    """There is no room for a batch. Nothing of it was stored; smaller batches may still fit."""

    default_condition = "amqp:resource-limit-exceeded"


class StoreFailed(AmqpError):
    """Reading or writing failed. Whether a batch in progress was stored is unknown until the store has
    been closed and opened again, which verifies it; until then it accepts no more batches."""

    default_condition = "amqp:internal-error"


class StoreRefused(AmqpError):
    """A batch that no store can keep: a place or a record exceeds a limit, or a chunk does not begin
    at the end of its log. Nothing of it was stored."""

    default_condition = "amqp:not-allowed"


class StoreBusy(AmqpError):
    """The store is in use, by another process for example."""

    default_condition = "amqp:resource-locked"


class StoreLost(AmqpError):
    """A store that several brokers may be started on is out of reach, or another broker uses it. Whether a
    batch in progress was stored is unknown. The store is never opened again by the same object, since what
    its broker has in memory may be out of date."""

    default_condition = "amqp:resource-locked"


class StoreDamaged(AmqpError):
    """Stored data is corrupt and cannot be recovered."""

    default_condition = "amqp:internal-error"
