"""AMQP 0-9-1 for amqp-rt: pika, Celery and amqplib talk to the same queues."""

from __future__ import annotations

from .front import Front

__all__ = ["Front"]
