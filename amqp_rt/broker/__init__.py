"""Queues and topics. Declare them on an :class:`amqp_rt.Broker`."""

from .nodes import Queue, Topic

__all__ = ["Queue", "Topic"]
