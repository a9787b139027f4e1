"""Checks of the properties of an arriving message, for queues that want them (Part 3 §3.2.4)."""

from __future__ import annotations

import datetime as dt

from ..errors import DecodeError
from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import Error, Rejected, rejected
from .entries import Entry
from .filtering.views import MessageView

_NOT_THE_USER = rejected(
    "amqp:unauthorized-access", "the user-id of the message is not that of the connection's user"
)


def check_claims(
    entry: Entry,
    peer: Peer,
    *,
    user_id: bool = True,
    absolute_expiry: bool = True,
    limits: Limits = DEFAULT_LIMITS,
) -> Rejected | None:
    """Check the properties of *entry* and apply its expiry time; return why to reject it, or None.

    Args:
        entry: The message.
        peer: Its sender.
        user_id: Require that a ``user-id`` is the name of the authenticated user.
        absolute_expiry: Let the message expire at its ``absolute-expiry-time`` if that is earlier
            than its expiry so far. ``creation-time`` is not checked.
        limits: Bounds of its properties.
    """
    if entry.message_format != MESSAGE_FORMAT:
        return None
    try:
        properties = MessageView(entry, limits).properties()
    except DecodeError as error:
        return Rejected(Error.of(error))
    said = properties.user_id
    if user_id and said is not None and (peer.user is None or said != peer.user.encode()):
        return _NOT_THE_USER
    expiry = properties.absolute_expiry_time
    if absolute_expiry and expiry is not None:
        at = expiry.timestamp() if isinstance(expiry, dt.datetime) else int(expiry) / 1000
        entry.expires_at = min(entry.expires_at, at)
    return None
