"""Octets that a broker took for a message, and that are none.

A broker looks at the header and the annotations of a message and leaves the rest alone, so that whoever may
send can put anything behind them. One such message must not end whoever reads the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

from amqp_rt import Message
from amqp_rt.errors import DecodeError
from amqp_rt.message import read_annotations, walk_head


class Malformed:
    """Stands where a :class:`~amqp_rt.Message` would: asked for any part of it, it says why there is none."""

    def __init__(self, payload: bytes, error: DecodeError) -> None:
        self._payload = payload
        self._error = error

    @cached_property
    def message_annotations(self) -> Mapping[Any, Any]:
        """What the broker has said of it, such as its number.

        Raises:
            DecodeError: That is malformed, too.
        """
        return read_annotations(walk_head(self._payload).message_annotations)

    def encode(self) -> bytes:
        """All of it, as it came."""
        return self._payload

    def __getattr__(self, name: str) -> Any:
        raise self._error


def decoded(payload: bytes) -> Message:
    """The message that *payload* is. If it is none, what raises ``DecodeError`` as soon as a part of it
    is looked at, as a message does whose parts are malformed."""
    try:
        return Message.decode(payload)
    except DecodeError as error:
        return cast("Message", Malformed(payload, error))
