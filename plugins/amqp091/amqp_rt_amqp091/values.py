"""Field values without a Python type of their own, the content header, and messages received by a client.

These are kept apart from the modules that use them, which are compiled: mypyc drops the keywords of a Struct's class.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .methods import BasicProperties


class Seconds(Struct, frozen=True):
    """A timestamp field: seconds since 1970-01-01 UTC, as its sender wrote them."""

    value: int


class Decimal(Struct, frozen=True):
    """A decimal field: *value* divided by ten to the power of *scale*."""

    scale: int
    value: int


class ContentHeader(Struct):
    """Content of a frame of type 2 (§4.2.6.1): class, size of the body and properties."""

    class_id: int
    body_size: int
    properties: BasicProperties


class ReceivedMessage(Struct):
    """A message from the server: its method, such as basic.deliver, and its content."""

    method: Any
    properties: BasicProperties
    body: bytes
