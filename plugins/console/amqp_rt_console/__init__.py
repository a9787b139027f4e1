"""HTTP door of a broker: a JSON API, and a console in the browser, for users with their rights over AMQP."""

from __future__ import annotations

from .door import HttpDoor
from .sessions import WebSession

__all__ = ["HttpDoor", "WebSession"]
