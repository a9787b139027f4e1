"""Queues, topics and logs. Declare them on an :class:`amqp_rt.Broker`."""

from .nodes import Log, Queue, Topic

__all__ = ["Log", "Queue", "Topic"]
