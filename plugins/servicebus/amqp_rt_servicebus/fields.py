"""View of a stored message for SQL filters, and the changes that actions make to a copy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from math import inf
from typing import Any, Final

from msgspec.structs import replace

from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.values import Int, Symbol, Timestamp

from .messages import (
    SCHEDULED_ENQUEUE_TIME,
    application_properties,
    change_properties,
    milliseconds,
)
from .rules import Copy
from .stored import PARTITION_KEY, Stored

VIA_PARTITION_KEY: Final = Symbol("x-opt-via-partition-key")

#: System property → field of the properties section.
_PROPERTIES: Final[Mapping[str, str]] = {
    "ContentType": "content_type",
    "CorrelationId": "correlation_id",
    "Label": "subject",
    "MessageId": "message_id",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_group_id",
    "SessionId": "group_id",
    "To": "to",
}
#: System property → message annotation.
_ANNOTATIONS: Final[Mapping[str, Symbol]] = {
    "PartitionKey": PARTITION_KEY,
    "ViaPartitionKey": VIA_PARTITION_KEY,
}
#: Properties that an action may set and the service leaves as they were in the copy of a subscription.
_KEPT: Final = frozenset({"MessageId", "ScheduledEnqueueTimeUtc"})
_TTL_MAX_MS: Final = 0xFFFF_FFFF


class StoredFields:
    """Properties of a stored message (``sql.MessageFields``).

    Args:
        stored: The message.
        limits: Bounds of the codec.
    """

    def __init__(self, stored: Stored, limits: Limits = DEFAULT_LIMITS) -> None:
        self._stored = stored
        self._limits = limits

    def application_properties(self) -> Mapping[str, object]:
        """Return the application properties as they are on the wire."""
        return application_properties(self._stored, self._limits)

    def system_property(self, name: str) -> object:
        """Return the value of a system property, None if it is not set."""
        stored = self._stored
        field = _PROPERTIES.get(name)
        if field is not None:
            return _text(getattr(stored.properties, field))
        annotation = _ANNOTATIONS.get(name)
        if annotation is not None:
            value = stored.annotations.get(annotation)
            return value if isinstance(value, str) else None
        match name:
            case "DeliveryCount":
                return Int(stored.delivery_count)
            case "EnqueuedSequenceNumber":
                return stored.enqueued_number or stored.number
            case "SequenceNumber":
                return stored.number or stored.enqueued_number
            case "EnqueuedTimeUtc":
                return Timestamp(milliseconds(stored.enqueued_at))
            case "ExpiresAtUtc":
                known = stored.expires_at != inf
                return Timestamp(milliseconds(stored.expires_at)) if known else None
            case "ScheduledEnqueueTimeUtc":
                value = stored.annotations.get(SCHEDULED_ENQUEUE_TIME)
                return value if isinstance(value, Timestamp) else None
            case "Size":
                return stored.size
            case "State":
                return Int(stored.state)
            case "TimeToLive":
                ttl_ms = stored.ttl_ms
                return None if ttl_ms is None else timedelta(milliseconds=ttl_ms)
            case "DeadLetterSource":
                return stored.dead_letter_source or None
        # A message that is on its way to a subscription is not locked.
        return None


def _text(value: object) -> object:
    """Return an id as the text that the SDKs make of it."""
    if value is None or type(value) is str:
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def apply_copy(stored: Stored, copy: Copy, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Change *stored*, a copy for a subscription, as the action of a rule has computed.

    The copy shares the body with others; octets of its own are the application properties only.

    Returns:
        Whether that was possible: the application properties may have become too large.
    """
    for name, value in copy.system.items():
        if name not in _KEPT:
            _set_system(stored, name, value)
    if copy.properties is None:
        return True
    before = application_properties(stored, limits)
    changes = {
        name: value
        for name, value in copy.properties.items()
        if name not in before or not _same(before[name], value)
    }
    removed = frozenset(name for name in before if name not in copy.properties)
    if not changes and not removed:
        return True
    return change_properties(stored, changes, removed=removed, limits=limits)


def _same(before: object, after: object) -> bool:
    # NaN differs from itself, and is written again.
    return type(before) is type(after) and before == after


def _set_system(stored: Stored, name: str, value: Any) -> None:
    field = _PROPERTIES.get(name)
    if field is not None:
        stored.properties = replace(stored.properties, **{field: value})
    elif name in _ANNOTATIONS:
        annotations = stored.annotations
        if value is None:
            annotations.pop(_ANNOTATIONS[name], None)
        else:
            annotations[_ANNOTATIONS[name]] = value
        stored.annotate(annotations)
    elif name == "TimeToLive":
        if value is None:
            stored.ttl_ms = None
        elif isinstance(value, timedelta):
            stored.ttl_ms = max(0, min(round(value.total_seconds() * 1000), _TTL_MAX_MS))
