"""Limits of messages that only the service has, for a namespace that is as strict."""

from __future__ import annotations

from typing import Final

from amqp_rt.errors import DecodeError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Error

from .conditions import ARGUMENT_OUT_OF_RANGE, TOO_LARGE
from .messages import application_properties
from .stored import Stored

#: Characters of a message-id, a session id and a partition key.
ID_MAX: Final = 128
#: Octets of one application property, and of all.
PROPERTY_MAX: Final = 32 * 1024
PROPERTIES_MAX: Final = 64 * 1024


def check_message(stored: Stored, limits: Limits = DEFAULT_LIMITS) -> Error | None:
    """Return why the service would refuse a message, None if it would not."""
    for name, value in (
        ("message id", stored.properties.message_id),
        ("session id", stored.session),
        ("partition key", stored.partition_key),
    ):
        if isinstance(value, str) and len(value) > ID_MAX:
            return Error(
                ARGUMENT_OUT_OF_RANGE,
                f"the {name} has {len(value)} characters, and may have {ID_MAX}",
            )
    size = stored.body_at - stored.content_at
    if size > PROPERTIES_MAX:
        return Error(
            TOO_LARGE,
            f"the application properties have {size} octets, and may have {PROPERTIES_MAX}",
        )
    if size <= PROPERTY_MAX:
        return None
    try:
        properties = application_properties(stored, limits)
    except DecodeError as error:
        return Error.of(error)
    for key, value in properties.items():
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")
        if isinstance(value, bytes) and len(value) > PROPERTY_MAX:
            return Error(
                TOO_LARGE,
                f"the application property {key!r:.80} has {len(value)} octets, and may have {PROPERTY_MAX}",
            )
    return None
