"""Fixtures of the tests of the plug-in for AMQP 0-10."""

from __future__ import annotations

from driven010 import commands, messaging, qpid_python, qpid_server  # noqa: F401 (fixtures)
