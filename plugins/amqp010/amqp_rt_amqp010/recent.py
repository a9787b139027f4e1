"""Caches of a front: headers that publishers repeat, and those of deliveries alike."""

from __future__ import annotations

from typing import NamedTuple

from amqp_rt.fronts.recent import Recent


class Delivered(NamedTuple):
    """A message on its way to a consumer of class file or stream."""

    #: Its header segment.
    header: bytes
    body: list[bytes]
    exchange: str | None
    routing_key: str | None
    redelivered: bool
    #: From 0 to 9.
    priority: int


class OutgoingHeader:
    """Header segment of messages alike, but for the length of the body.

    Args:
        before: Octets before the content-length; all of them if there is none.
        after: Octets after it; None if there is none.
    """

    __slots__ = ("after", "before")

    def __init__(self, before: bytes, after: bytes | None) -> None:
        self.before = before
        self.after = after

    def with_length(self, size: int) -> bytes:
        """Return the segment for a body of *size* octets."""
        if self.after is None:
            return self.before
        return self.before + size.to_bytes(8, "big") + self.after


class Recents:
    """All caches of a front."""

    def __init__(self) -> None:
        #: Exchange and octets of a header segment → the sections before the body in AMQP 1.0.
        self.fronts: Recent[tuple[str, bytes], bytes] = Recent()
        #: Address of the queue and the sections before a body in AMQP 1.0 → header segment.
        self.headers: Recent[tuple[str, bytes], OutgoingHeader] = Recent()
        #: Class of content, exchange, routing key and octets of a header segment → the sections before the body
        #: in AMQP 1.0, and the headers that bindings compare.
        self.content_fronts: Recent[
            tuple[int, str, str, bytes], tuple[bytes, dict[str, object]]
        ] = Recent()
        #: Class of content, address of the queue and the sections before a body in AMQP 1.0 → content without body.
        self.contents: Recent[tuple[int, str, bytes], Delivered] = Recent()
