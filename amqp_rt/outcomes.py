"""Delivery states and outcomes (Part 3 §3.4).

An outcome is the result of a delivery at its receiver. :class:`Received` is a state but not an
outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

from .codec.composites import (
    BOOLEAN,
    FIELDS,
    MANDATORY,
    STRING,
    SYMBOL,
    UINT,
    ULONG,
    composite,
    one_of,
)
from .errors import AmqpError


@composite(
    0x1D,
    ("condition", SYMBOL, MANDATORY),
    ("description", STRING),
    ("info", FIELDS),
)
class Error(Struct, gc=False):
    """Error with which a link, session, connection or delivery ended (Part 2 §2.8.14)."""

    condition: str
    description: str | None = None
    info: Mapping[object, object] | None = None

    @classmethod
    def of(cls, error: AmqpError) -> Error:
        """Return the wire form of an exception."""
        return cls(error.condition, error.description or None, error.info or None)

    def raised_as(self, kind: type[AmqpError]) -> AmqpError:
        """Return an exception of *kind* with the condition, description and info of this error."""
        return kind(self.description or "", condition=str(self.condition), info=self.info)


@composite(0x23, ("section_number", UINT, MANDATORY), ("section_offset", ULONG, MANDATORY))
class Received(Struct, frozen=True, gc=False):
    """Position up to which the receiver has a delivery (§3.4.1). Not an outcome."""

    section_number: int
    section_offset: int


@composite(0x24)
class Accepted(Struct, frozen=True, gc=False):
    """Processed; the sender can forget it (§3.4.2)."""


@composite(0x25, ("error", one_of(Error)))
class Rejected(Struct, frozen=True, gc=False):
    """Invalid and unprocessable; the error has the reason (§3.4.3)."""

    error: Error | None = None


@composite(0x26)
class Released(Struct, frozen=True, gc=False):
    """Not processed, nothing changed; may be delivered again (§3.4.4)."""


@composite(
    0x27,
    ("delivery_failed", BOOLEAN),
    ("undeliverable_here", BOOLEAN),
    ("message_annotations", FIELDS),
)
class Modified(Struct, frozen=True, gc=False):
    """Not processed; the message is changed as the fields specify (§3.4.5)."""

    delivery_failed: bool | None = None
    undeliverable_here: bool | None = None
    message_annotations: Mapping[object, object] | None = None


Outcome: TypeAlias = Accepted | Rejected | Released | Modified

ACCEPTED = Accepted()
RELEASED = Released()
#: The default for a handler that raised: counted as a failed attempt.
MODIFIED_FAILED = Modified(delivery_failed=True)


def rejected(condition: str, description: str = "") -> Rejected:
    """Return a :class:`Rejected` with an error made of *condition* and *description*."""
    return Rejected(Error(condition, description or None))
