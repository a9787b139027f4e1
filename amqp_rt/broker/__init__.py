"""Queues, topics and logs, and the :class:`Broker` that has them at its addresses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .lifecycles import LifeCycles
from .nodes import Log, Queue, Topic

if TYPE_CHECKING:
    from .broker import Broker

__all__ = ["Broker", "LifeCycles", "Log", "Queue", "Topic"]


def __getattr__(name: str) -> object:
    # Looked up on first use: the module composes broker, container and network, which import this one.
    if name != "Broker":
        raise AttributeError(f"module 'amqp_rt.broker' has no attribute {name!r}")
    return import_module("amqp_rt.broker.broker").Broker


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
