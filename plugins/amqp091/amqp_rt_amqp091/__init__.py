"""AMQP 0-9-1 for amqp-rt: pika, Celery and amqplib talk to the same queues, and we to other brokers."""

from __future__ import annotations

from .client import ClientChannel, ClientConnection, Consumer, Delivery, connect
from .client_engine import External, Plain
from .front import Front
from .methods import BasicProperties

__all__ = [
    "BasicProperties",
    "ClientChannel",
    "ClientConnection",
    "Consumer",
    "Delivery",
    "External",
    "Front",
    "Plain",
    "connect",
]
