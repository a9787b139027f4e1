"""Queues, topics, logs and schedules, and the :class:`Broker` that has them at its addresses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .lifecycles import LifeCycles
from .nodes import Log, Queue, Schedule, Topic

if TYPE_CHECKING:
    from .broker import AddOn, Broker

__all__ = ["AddOn", "Broker", "LifeCycles", "Log", "Queue", "Schedule", "Topic"]


def __getattr__(name: str) -> object:
    # Looked up on first use: the module composes broker, container and network, which import this one.
    if name not in ("AddOn", "Broker"):
        raise AttributeError(f"module 'amqp_rt.broker' has no attribute {name!r}")
    found: object = getattr(import_module("amqp_rt.broker.broker"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
