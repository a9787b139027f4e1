"""Identifiers of messages: UUIDs in 0-10, of four types in AMQP 1.0."""

from __future__ import annotations

from typing import Final
from uuid import NAMESPACE_URL, UUID, uuid5

from amqp_rt.fronts import ULong

#: Name of the header with a message-id of 1.0 that is no UUID.
MESSAGE_ID: Final = "x-amqp10-message-id"


def uuid_for(value: object) -> UUID:
    """Return the UUID that stands for a message-id of 1.0, the same one each time."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        found = _canonical(value)
        if found is not None:
            return found
        name = f"string:{value}"
    elif isinstance(value, bytes):
        name = f"binary:{value.hex()}"
    else:
        name = f"ulong:{value}"
    return uuid5(NAMESPACE_URL, f"amqp:message-id:{name}")


def original_id(message_id: UUID, header: object) -> str | bytes | ULong | None:
    """Return the id of 1.0 in a *header* of that name; None if *message_id* does not stand for it."""
    if type(header) in (str, bytes, ULong) and uuid_for(header) == message_id:
        assert isinstance(header, str | bytes | ULong)
        return header
    return None


def _canonical(text: str) -> UUID | None:
    if len(text) != 36:
        return None
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text else None
