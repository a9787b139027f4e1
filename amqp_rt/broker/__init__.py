"""Queues, topics and logs. Declare them on an :class:`amqp_rt.Broker`."""

from .lifecycles import LifeCycles
from .nodes import Log, Queue, Topic

__all__ = ["LifeCycles", "Log", "Queue", "Topic"]
