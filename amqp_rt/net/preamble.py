"""The first bytes of a connection decide which front speaks (Part 2 §2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ..fronts.base import Front
from .driver import READ_SIZE


def match(data: bytes, fronts: Sequence[Front]) -> Front | bool | None:
    """The front that answers to *data*, None for nobody, True while it is not decidable yet."""
    undecided = False
    for front in fronts:
        for header in front.headers:
            if data[:8] == header:
                return front
            if len(data) < 8 and header.startswith(data):
                undecided = True
    return undecided or None


async def recognise(stream: trio.abc.Stream, fronts: Sequence[Front]) -> tuple[Front, bytes] | None:
    """Read until a front is recognised; returns it and what was read.

    A client that nobody understands is told the header of the first front, which is what the
    standard asks for, and None is returned; so it is when the stream ends. The caller bounds the
    time and closes the stream.
    """
    data = b""
    try:
        while True:
            piece = bytes(await stream.receive_some(READ_SIZE))
            if not piece:
                return None
            data += piece
            found = match(data, fronts)
            if found is None:
                await stream.send_all(fronts[0].preferred_header)
                return None
            if found is not True and not isinstance(found, bool):
                return found, data
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return None
