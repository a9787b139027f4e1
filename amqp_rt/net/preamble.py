"""The first bytes of a connection decide which front speaks (Part 2 §2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from ..fronts.base import Front
from ..limits import DEFAULT_LIMITS, Limits
from .carrier import READ_SIZE

#: Octets of a protocol header.
HEADER_SIZE: Final = 8
#: The header that asks for TLS within the AMQP port (Part 5 §5.2.1).
TLS_HEADER: Final = b"AMQP\x02\x01\x00\x00"
#: Seconds for a refused client to take its answer.
_LINGER_S: Final = 1.0
#: Chunks of a refused client that are thrown away while it does.
_LINGER_READS: Final = 16


def match(
    data: bytes, fronts: Sequence[Front], others: Sequence[bytes] = ()
) -> Front | bytes | None:
    """The front that answers to the header at the beginning of *data*, or which of *others* it is."""
    for front in fronts:
        if data[:HEADER_SIZE] in front.headers:
            return front
    for other in others:
        if data.startswith(other):
            return other
    return None


def decidable(data: bytes, fronts: Sequence[Front], others: Sequence[bytes] = ()) -> bool:
    """Whether more bytes cannot change what :func:`match` says.

    A foreign header is known at its first octet that differs: an HTTP request at ``G``.
    """
    if len(data) >= HEADER_SIZE or any(data.startswith(other) for other in others):
        return True
    headers = [*others, *(header for front in fronts for header in front.headers)]
    return not any(header.startswith(data) for header in headers)


def _ignore(data: bytes) -> None:
    """Do nothing about *data*."""


async def recognise(
    stream: trio.abc.Stream,
    fronts: Sequence[Front],
    *,
    limits: Limits = DEFAULT_LIMITS,
    others: Sequence[bytes] = (),
    preferred: bytes | None = None,
    within: float | None = None,
    on_unknown: Callable[[bytes], None] = _ignore,
) -> tuple[Front | bytes, bytes] | None:
    """Read until it is clear which front is meant; returns it and what was read.

    A client that nobody understands is told the preferred header that its own resembles most, by
    default the first front's, as the standards ask; then, or if the stream ends, or if ``limits.handshake_s`` pass before eight
    octets have come, this returns None and the stream is closed.

    Never raises for what the peer does.

    Args:
        stream: Where a client begins to speak.
        fronts: Who may answer.
        limits: ``handshake_s`` is used here.
        others: Beginnings that are no front's, and are returned instead of one.
        preferred: What a client is told that nobody understands.
        within: Seconds, instead of ``limits.handshake_s``.
        on_unknown: Called with the first bytes of a client that belong to no known protocol, before the answer.
    """
    data = b""
    try:
        with trio.move_on_after(limits.handshake_s if within is None else max(0.0, within)):
            while not decidable(data, fronts, others):
                piece = await stream.receive_some(READ_SIZE)
                if not piece:
                    break
                data += piece
            else:
                found = match(data, fronts, others)
                if found is not None:
                    return found, data
                on_unknown(data)
                await _refuse(stream, preferred or _nearest(data, fronts))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
    return None


def _nearest(data: bytes, fronts: Sequence[Front]) -> bytes:
    """The preferred header that has most of its first octets in common with *data*."""

    def likeness(header: bytes) -> int:
        different = (at for at, octet in enumerate(header) if data[at : at + 1] != bytes((octet,)))
        return next(different, len(header))

    return max((front.preferred_header for front in fronts), key=likeness)


async def _refuse(stream: trio.abc.Stream, header: bytes) -> None:
    """Say which header would have been right, and give the client a moment to read it.

    Closing with unread input would reset the connection, and the reset may overtake the answer.
    """
    with trio.move_on_after(_LINGER_S):
        await stream.send_all(header)
        if not isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.aclose()
            return
        await stream.send_eof()
        for _ in range(_LINGER_READS):
            if not await stream.receive_some(READ_SIZE):
                return
