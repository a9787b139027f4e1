"""Messages of 0-10 and of AMQP 1.0, converted to each other (``docs/guides/amqp010.md`` has the table).

The broker stores every message in the form of 1.0. What has no field in 1.0 travels in message annotations
whose names begin with ``x-``, so that a message comes out as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amqp_rt.fronts import DEFAULT_LIMITS, AmqpError, Limits, Message
from amqp_rt.fronts.headers import AMQP10
from amqp_rt.fronts.recent import OCTETS_MAX
from amqp_rt.fronts.splicing import split_data, with_data

from .bodies import OutgoingBody, body_of
from .faults import CommandFault
from .incoming_headers import IncomingHeader
from .outgoing_headers import OutgoingFields
from .recent import Recents


def payload_of(
    header: bytes | None,
    body: Sequence[bytes],
    *,
    exchange: str = "",
    number: int = 0,
    recents: Recents | None = None,
) -> bytes:
    """Encode the content of a ``message.transfer`` as a message of AMQP 1.0.

    The ``user-id`` is that of the header: whether it is the user's is for the caller to check (403).

    Args:
        header: Octets of the header segment; None if there is none.
        body: Octets of the body segment, in pieces.
        exchange: Destination of the transfer.
        number: Number that the exchange gives to the message; 0 for none.
        recents: Caches of the front, which numbered messages do not use: equal headers are converted once.

    Raises:
        CommandFault: The header is malformed (503), too deep or too large (506), or 1.0 cannot hold a value
            (542).
    """
    front: bytes | None = None
    if number:
        recents = None
    if recents is not None:
        front = recents.fronts.get((exchange, header or b""))
    if front is None:
        incoming = IncomingHeader(header, exchange, number)
        try:
            if incoming.has_sections:
                return incoming.with_sections(b"".join(body))
            front = incoming.front()
        except AmqpError as error:
            raise CommandFault.of(error) from error
        if recents is not None and (header is None or len(header) <= OCTETS_MAX):
            recents.fronts.put((exchange, header or b""), front)
    return with_data(front, body)


def content_of(
    payload: bytes,
    *,
    address: str = "",
    wall: Callable[[], float] | None = None,
    recents: Recents | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[bytes, list[bytes]]:
    """Return the header segment and the pieces of the body segment for a message of AMQP 1.0.

    Every message can be sent: values that exceed their fields become headers or are left out, malformed
    sections count as absent, and a body that cannot be read is passed on as it is.

    Args:
        payload: The message.
        address: Address of its queue: the routing key of messages without one.
        wall: Returns the time in seconds since 1970, for the expiration of a message with a time to live.
        recents: Caches of the front: messages alike in all but the body are converted once.
        limits: Bounds on sections and values.
    """
    place = split_data(payload)
    key: tuple[str, bytes] | None = None
    if place is not None:
        end, start = place
        body = payload[start:]
        if recents is not None and end <= OCTETS_MAX:
            key = (address, payload[:end])
            known = recents.headers.get(key)
            if known is not None:
                return known.with_length(len(body)), [body]
    try:
        message = Message.decode(payload, limits)
        found = body_of(message)
    except AmqpError:
        message = Message(b"")
        found = OutgoingBody([payload], None, AMQP10)
    fields = OutgoingFields(message, address, found.content_type, found.kind, wall)
    header = fields.encode()
    # An expiration is computed for each message.
    if key is not None and recents is not None and not fields.expires:
        recents.headers.put(key, header)
    return header.with_length(found.size), found.pieces
