"""Attempts that links stage messages for, and the properties of links that name them."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from ...fronts.base import ReceivingLink
from ...outcomes import Error
from ...values import Symbol
from ..durable.facts import Claim

#: Capability offered to a link that stages messages, and the properties that such a link has.
EPOCH_PUBLISH: Final = Symbol("amqp_rt:epoch-publish")
PRODUCER: Final = Symbol("amqp_rt:producer")
RUN: Final = Symbol("amqp_rt:run")
EPOCH: Final = Symbol("amqp_rt:epoch")
PART: Final = Symbol("amqp_rt:part")
ATTEMPT: Final = Symbol("amqp_rt:attempt")
#: Property of a link that continues an attempt with the messages staged by an earlier link.
RESUMES: Final = Symbol("amqp_rt:resumes")
#: Optional: name of the write that the attempt belongs to, if an epoch has several.
WRITE: Final = Symbol("amqp_rt:write")
#: Properties of our answer: the epoch committed last, -1 if none; and whether this write appears to be
#: published already, so that nothing has to be sent for it.
COMMITTED: Final = Symbol("amqp_rt:committed-epoch")
PUBLISHED: Final = Symbol("amqp_rt:published")

#: Characters in the name of a producer or run.
NAME_MAX: Final = 256
_WHOLE_MAX: Final = 2**63 - 1


class Part(Struct, frozen=True):
    """Attempt that counts, with the number and the CRC-32 of its encoded messages."""

    part: int
    attempt: int
    count: int
    crc: int


def claim_of(link: ReceivingLink) -> Claim | Error | None:
    """Return the claim of *link*; None if it does not stage messages, an error if it is invalid."""
    properties = link.properties
    if PRODUCER not in properties:
        return None
    found: dict[str, Any] = {}
    for key, type_ in ((PRODUCER, str), (RUN, str), (EPOCH, int), (PART, int), (ATTEMPT, int)):
        value = properties.get(key)
        if isinstance(value, bool) or not isinstance(value, type_):
            return Error("amqp:invalid-field", f"a link that stages messages has a property {key}")
        if isinstance(value, str):
            if not 0 < len(value) <= NAME_MAX:
                return Error("amqp:invalid-field", f"{key} has 1 to {NAME_MAX} characters")
            found[key.rpartition(":")[2]] = str(value)
        elif not 0 <= value <= _WHOLE_MAX:
            return Error("amqp:invalid-field", f"{key} is a whole number from 0 on")
        else:
            found[key.rpartition(":")[2]] = int(value)
    write = properties.get(WRITE, "")
    if not isinstance(write, str) or len(write) > NAME_MAX:
        return Error("amqp:invalid-field", f"{WRITE} has up to {NAME_MAX} characters")
    return Claim(**found, write=str(write))
