"""AMQP 0-10 for amqp-rt: a front for the clients of Apache Qpid."""

from __future__ import annotations

from .front import Front

__all__ = ["Front"]
