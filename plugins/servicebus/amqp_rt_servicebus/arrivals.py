"""Factory of messages for the inlets of the core.

A module of its own, since a compiled class cannot extend one of another distribution.
"""

from __future__ import annotations

from amqp_rt.broker.building import EntryFactory
from amqp_rt.errors import DecodeError
from amqp_rt.message import MESSAGE_FORMAT

from .messages import arrived
from .stored import Stored


class StoredFactory(EntryFactory):
    """Factory that makes a :class:`Stored` of each message that arrives.

    Durable messages are taken although entities keep them in memory only: their entries are not durable.
    """

    def make_entry(
        self, payload: bytes, message_format: int, now: float, ttl_s: float | None = None
    ) -> Stored:
        """Return the message that has arrived. Its times are set by the entity that takes it.

        Raises:
            DecodeError: It is malformed, or not of format 0.
        """
        if message_format != MESSAGE_FORMAT:
            raise DecodeError(
                f"a message of format 0 expected, not 0x{message_format:08x}: only batches (0x80013700)"
                " are sent in another format"
            )
        return arrived(payload, limits=self.limits)
