"""Masks for tokens and passwords in the messages of traced AMQP connections.

Secrets are sent by the side that dialled: to ``$cbs``, to ``$management`` when a user is created,
and to either through the anonymous terminus. The frames remain, with asterisks for the payload, so
that a trace shows their times and sizes. Frames that cannot be decoded are masked entirely.
"""

from __future__ import annotations

from typing import Final

from ...codec.primitives import Reader
from ...errors import AmqpError
from ...limits import DEFAULT_LIMITS
from ...values import Described

MASK: Final = b"*"
#: Maximum octets of a frame that are held back, until it is complete, to be decoded.
_HELD_MAX: Final = 65_536
#: Octets after the header of a frame that suffice to identify performative and link.
_START: Final = 24
_ATTACH: Final = (0x12, "amqp:attach:list")
_TRANSFER: Final = (0x14, "amqp:transfer:list")
#: The payload is secret on links to ``$cbs``; on links to ``$management``, to ``/management`` of
#: RabbitMQ's clients and to the anonymous terminus it is secret if it contains one of the words.
_CBS: Final = "$cbs"
_MANAGEMENT: Final = ("$management", "/management")
_WORDS: Final = (b"$cbs", b"put-token", b"set-token", b"password", b"/auth/tokens")


class FrameMask:
    """Mask of the frames of one direction, cut at any positions."""

    def __init__(self) -> None:
        self._held = b""
        #: Whether the octets held back are or may be secret.
        self._guarded = False
        #: Octets of the current frame that are still to come, and whether they are hidden.
        self._left = 0
        self._hides = False
        #: The octets are not AMQP any more: the connection is about to end.
        self._broken = False
        #: (channel, handle) → whether all messages on the link are secret. Links not listed are not
        #: examined.
        self._links: dict[tuple[int, int], bool] = {}
        #: Links on which a secret message continues in the next frame.
        self._going_on: set[tuple[int, int]] = set()

    def feed(self, data: bytes) -> bytes:
        """Return *data* masked, as far as its secrets can be determined yet."""
        if self._broken:
            return data
        data, self._held = self._held + data, b""
        shown: list[bytes] = []
        at = 0
        while at < len(data):
            if not self._left:
                found = self._begin(data, at)
                if found is None:
                    self._held = data[at:]
                    break
                shown.append(found)
                at += len(found)
                continue
            piece = data[at : at + self._left]
            shown.append(MASK * len(piece) if self._hides else piece)
            self._left -= len(piece)
            at += len(piece)
        return b"".join(shown)

    def rest(self) -> bytes:
        """Return the rest of an incomplete frame, masked where it may hold a secret."""
        return MASK * len(self._held) if self._guarded else self._held

    def _begin(self, data: bytes, at: int) -> bytes | None:
        """Return the beginning of a frame, or all of it; None if more octets are needed."""
        self._guarded = False
        if len(data) - at < 6:
            return None
        size = int.from_bytes(data[at : at + 4], "big")
        body = 4 * data[at + 4]
        if size < 8 or body < 8 or body > size:
            self._broken = True
            return data[at:]
        needed = min(size, body + _START)
        if len(data) - at < needed:
            return None
        start = data[at : at + needed]
        if not self._matters(start, body):
            self._left, self._hides = size - needed, False
            return start
        self._guarded = True
        if size > _HELD_MAX:
            self._left, self._hides = size - needed, True
            return start[:body] + MASK * (needed - body)
        if len(data) - at < size:
            return None
        return self._shown(data[at : at + size], body)

    def _matters(self, start: bytes, body: int) -> bool:
        """Return whether a frame with this beginning has to be decoded."""
        if len(start) < body + 3:
            return False
        if start[body : body + 2] != b"\x00\x53":
            return True  # a longer encoding of the descriptor
        if start[body + 2] == _ATTACH[0]:
            return True
        if start[body + 2] != _TRANSFER[0] or not self._links:
            return False
        found = start[body + 3 : body + 4]
        value = body + (6 if found == b"\xc0" else 12)
        code = start[value : value + 1]
        if code == b"\x52":
            handle = int.from_bytes(start[value + 1 : value + 2], "big")
        elif code == b"\x70":
            handle = int.from_bytes(start[value + 1 : value + 5], "big")
        elif code == b"\x43":
            handle = 0
        else:
            return True
        return (_channel(start), handle) in self._links

    def _shown(self, frame: bytes, body: int) -> bytes:
        """Return a whole frame, masked."""
        reader = Reader(frame, body, len(frame), DEFAULT_LIMITS)
        try:
            performative = reader.read_value()
        except AmqpError:
            performative = None
        if not isinstance(performative, Described) or not isinstance(performative.value, list):
            return frame[:body] + MASK * (len(frame) - body)
        fields = performative.value
        index = 1 if performative.descriptor in _ATTACH else 0
        handle = fields[index] if len(fields) > index else 0
        link = _channel(frame), handle if isinstance(handle, int) else 0
        if performative.descriptor in _ATTACH:
            self._links.pop(link, None)
            self._going_on.discard(link)
            address = _target_of(fields)
            if address is None or address == _CBS or address.endswith(_MANAGEMENT):
                self._links[link] = address == _CBS
        elif performative.descriptor in _TRANSFER and link in self._links:
            secret = (
                self._links[link] or link in self._going_on or any(word in frame for word in _WORDS)
            )
            if secret:
                more = len(fields) > 5 and fields[5] is True
                (self._going_on.add if more else self._going_on.discard)(link)
                return frame[: reader.at] + MASK * (len(frame) - reader.at)
        return frame


def _channel(frame: bytes) -> int:
    return int.from_bytes(frame[6:8], "big")


def _target_of(fields: list[object]) -> str | None:
    """Return the target of an attach; None for the anonymous terminus, empty on receiving links."""
    if len(fields) < 3 or fields[2] is not False:
        return ""
    target = fields[6] if len(fields) > 6 else None
    if not isinstance(target, Described) or not isinstance(target.value, list):
        return None
    address = target.value[0] if target.value else None
    if not isinstance(address, str):
        return None
    # The address may be a URL or a plain address.
    return address.rpartition("/")[2] if "://" in address else str(address)
