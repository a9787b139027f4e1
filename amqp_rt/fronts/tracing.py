"""Interfaces by which a protocol masks secrets in traces of its connections, and draws their frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct


class TraceMask(Protocol):
    """Filter that removes secrets from one direction of a traced connection."""

    def feed(self, data: bytes) -> bytes:
        """Return *data* with secrets masked; incomplete frames may be held back."""

    def rest(self) -> bytes:
        """Return the masked rest that was held back when the connection ended."""


class TracedFrame(Struct, frozen=True):
    """Frame as it is named in a drawing of a trace."""

    name: str
    channel: int
    #: Octets of the payload.
    size: int
    #: Why the frame is malformed; empty if it is not.
    fault: str = ""


class TraceReader(Protocol):
    """Reader that splits one direction of a traced connection into frames."""

    #: Octets of an incomplete frame.
    held: bytes

    def feed(self, data: bytes) -> list[TracedFrame]:
        """Return the frames complete by now. Malformed input becomes a frame with a ``fault``."""


class Tracing(Protocol):
    """Masks and readers for traces of one protocol; their input begins after the header."""

    def mask(self, *, client: bool) -> TraceMask:
        """Create a mask for the bytes that the client, or the server, sends."""

    def reader(self) -> TraceReader:
        """Create a reader of one direction."""


class Unmasked:
    """Mask for the octets of a side that sends no secrets: it shows all of them."""

    def feed(self, data: bytes) -> bytes:
        """Return *data* unchanged."""
        return data

    def rest(self) -> bytes:
        """Return nothing: no octets are held back."""
        return b""


class ClientSecretsTracing:
    """Tracing of a protocol in which only clients send secrets.

    Args:
        mask: Makes the mask for the octets of one client.
        reader: Makes the reader of one direction.
    """

    def __init__(self, mask: Callable[[], TraceMask], reader: Callable[[], TraceReader]) -> None:
        self._mask = mask
        self._reader = reader

    def mask(self, *, client: bool) -> TraceMask:
        """Create a mask for the octets of the client, or of the server."""
        return self._mask() if client else Unmasked()

    def reader(self) -> TraceReader:
        """Create a reader of the frames of one direction."""
        return self._reader()


#: Protocol header → tracing of its connections. Plug-ins register theirs when they are imported.
#: For other protocols only sizes are recorded, since the positions of their secrets are unknown.
TRACINGS: Final[dict[bytes, Tracing]] = {}
