"""What the properties of an arriving message claim, for queues that want to know (Part 3 §3.2.4)."""

from __future__ import annotations

import datetime as dt

from ..errors import DecodeError
from ..events import Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import Error, Rejected, rejected
from .entries import Entry
from .views import MessageView

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
    """Say why *entry*, which *peer* has sent, is refused, None if it is not.

    Args:
        entry: The message.
        peer: Its sender.
        user_id: A ``user-id`` has to be the name of the user who is logged in.
        absolute_expiry: The message has until its ``absolute-expiry-time`` from now on, and no longer
            than it had. When it was created is its sender's own business.
        limits: Bounds for its properties.
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
