"""Selection of a front by the first bytes of a connection (Part 2 §2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from ..fronts.base import Front
from ..limits import DEFAULT_LIMITS, Limits
from .carrier import READ_SIZE

#: Octets of a protocol header.
HEADER_SIZE: Final = 8
#: Protocol header that requests TLS within the AMQP port (Part 5 §5.2.1).
TLS_HEADER: Final = b"AMQP\x02\x01\x00\x00"
#: Seconds in which a refused client can read its answer.
_LINGER_S: Final = 1.0
#: Maximum chunks discarded from a refused client in that time.
_LINGER_READS: Final = 16


def match(
    data: bytes, fronts: Sequence[Front], others: Sequence[bytes] = ()
) -> Front | bytes | None:
    """Return the front with a header that *data* begin with, or the match in *others*."""
    for front in fronts:
        if data.startswith(front.headers):
            return front
    for other in others:
        if data.startswith(other):
            return other
    return None


def decidable(data: bytes, fronts: Sequence[Front], others: Sequence[bytes] = ()) -> bool:
    """Return whether more bytes cannot change the result of :func:`match`.

    A foreign protocol is recognised at the first octet that differs: an HTTP request at ``G``.
    """
    if match(data, fronts, others) is not None:
        return True
    headers = [*others, *(header for front in fronts for header in front.headers)]
    return not any(header.startswith(data) for header in headers)


def _ignore(data: bytes) -> None:
    """Ignore *data*."""


async def select_front(
    stream: trio.abc.Stream,
    fronts: Sequence[Front],
    *,
    limits: Limits = DEFAULT_LIMITS,
    others: Sequence[bytes] = (),
    preferred: bytes | None = None,
    within: float | None = None,
    on_unknown: Callable[[bytes], None] = _ignore,
) -> tuple[Front | bytes, bytes] | None:
    """Read until the front can be selected; return it and the octets read.

    A client with an unknown header is answered with the preferred header most similar to its own,
    as the standards require; then None is returned and the stream is closed. The same, without an
    answer, if the stream ends, or if too few octets have arrived within ``limits.handshake_s``.

    Never raises for faults of the peer.

    Args:
        stream: A stream on which the client sends first.
        fronts: Fronts to choose from.
        limits: ``handshake_s`` is used here.
        others: First octets of other protocols, which are returned instead of a front.
        preferred: Answer to a client with an unknown header, instead of the most similar one.
        within: Seconds, instead of ``limits.handshake_s``.
        on_unknown: Called with the first octets of a client that belong to no known protocol,
            before the answer.
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
                await _refuse(stream, preferred or nearest_header(data, fronts))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
    return None


def nearest_header(data: bytes, fronts: Sequence[Front]) -> bytes:
    """Return the preferred header that shares the longest beginning with *data*."""

    def likeness(header: bytes) -> int:
        different = (at for at, octet in enumerate(header) if data[at : at + 1] != bytes((octet,)))
        return next(different, len(header))

    return max((front.preferred_header for front in fronts), key=likeness)


async def _refuse(stream: trio.abc.Stream, header: bytes) -> None:
    """Send the header that would be accepted, and give the client a moment to read it.

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
