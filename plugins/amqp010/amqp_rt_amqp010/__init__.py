"""AMQP 0-10 for amqp-rt: the wire format of the published specification, with Qpid's three errata."""

from __future__ import annotations
