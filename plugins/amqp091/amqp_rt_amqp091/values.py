"""Field values without a Python type of their own, and the content header.

Kept apart from the codec, which is compiled: mypyc drops the keywords of a Struct's class.
"""

from __future__ import annotations

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
