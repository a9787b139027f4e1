"""AMQP 0-9-1 for amqp-rt: a front for pika, Celery and amqplib, and a client for other brokers."""

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
