"""Payloads that a broker accepted as messages although they cannot be decoded.

A broker reads the header and the annotations of a message and leaves the rest alone, so a client with the
right to send can put anything behind them. One such message must not end the query that reads the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

from amqp_rt import Message
from amqp_rt.errors import DecodeError
from amqp_rt.message import read_annotations, walk_head


class Malformed:
    """Stands in for a :class:`~amqp_rt.Message`: reading any part of it raises the decoding error."""

    def __init__(self, payload: bytes, error: DecodeError) -> None:
        self._payload = payload
        self._error = error

    @cached_property
    def message_annotations(self) -> Mapping[Any, Any]:
        """The broker's annotations, such as the offset.

        Raises:
            DecodeError: The annotations are malformed, too.
        """
        return read_annotations(walk_head(self._payload).message_annotations)

    def encode(self) -> bytes:
        """Return the payload as it was received."""
        return self._payload

    def __getattr__(self, name: str) -> Any:
        raise self._error


def decoded(payload: bytes) -> Message:
    """Decode *payload*. If that fails, return an object that raises ``DecodeError`` when a part of it is
    read, as a message does whose parts are malformed."""
    try:
        return Message.decode(payload)
    except DecodeError as error:
        return cast("Message", Malformed(payload, error))
