"""Traces of 0-9-1 connections: passwords are masked, frames are named by their methods."""

from __future__ import annotations

from typing import Final

from amqp_rt.fronts import TracedFrame

from . import methods as m
from .frames import BODY, FRAME_END, HEADER, HEARTBEAT, METHOD, OVERHEAD

_MASK: Final = b"*"
_HEAD: Final = OVERHEAD - 1
#: Octets of a frame that is held until it is complete. The bound exceeds the default ``frame_max``.
_HELD_MAX: Final = 262_144
#: Octets of a frame that is drawn: larger sizes are taken for garbage.
_DRAWN_MAX: Final = 64 * 1024 * 1024
#: Methods whose payload is secret after the size of its first field.
_SECRET: Final = frozenset((m.ConnectionSecureOk.code, m.ConnectionUpdateSecret.code))
#: Addresses whose messages may contain a token, or a user with a password.
_SECRET_ADDRESSES: Final = (b"$cbs", b"$management")
_TYPES: Final = {METHOD: "method", HEADER: "header", BODY: "body", HEARTBEAT: "heartbeat"}


class ClientMask:
    """Mask for a client's octets: responses of logins and other secrets become asterisks.

    From the first octet that is no frame, all octets are masked: in a malformed login the position
    of the password is unknown.
    """

    def __init__(self) -> None:
        self._held = b""
        self._broken = False
        #: Octets still to come of a large frame, and whether they are masked.
        self._left = 0
        self._hides = False
        #: Channels whose current content is secret.
        self._secret: set[int] = set()

    def rest(self) -> bytes:
        """Return the masked rest of an incomplete frame."""
        return self._held[:_HEAD] + _MASK * (len(self._held) - _HEAD)

    def feed(self, data: bytes) -> bytes:
        """Mask *data*; return the octets for which the decision is known."""
        data, self._held = self._held + data, b""
        shown: list[bytes] = []
        at = 0
        while at < len(data):
            if self._broken:
                shown.append(_MASK * (len(data) - at))
                break
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                if self._hides:
                    # The end octet is not secret, and drawing needs it.
                    last = b"" if self._left or piece[-1] != FRAME_END else piece[-1:]
                    piece = _MASK * (len(piece) - len(last)) + last
                shown.append(piece)
                at += len(piece)
                continue
            if data[at] not in _TYPES:
                self._broken = True
                continue
            if len(data) - at < _HEAD:
                self._held = data[at:]
                break
            kind, channel = data[at], int.from_bytes(data[at + 1 : at + 3], "big")
            end = at + OVERHEAD + int.from_bytes(data[at + 3 : at + _HEAD], "big")
            if kind == BODY or end - at > _HELD_MAX:
                # Other types are masked if they are too large to be inspected.
                self._hides = kind != BODY or channel in self._secret
                self._left = end - at - _HEAD
                shown.append(data[at : at + _HEAD])
                at += _HEAD
            elif len(data) < end:
                self._held = data[at:]
                break
            elif data[end - 1] != FRAME_END:
                self._broken = True
            else:
                payload = self._shown(kind, channel, data[at + _HEAD : end - 1])
                shown += (data[at : at + _HEAD], payload, data[end - 1 : end])
                at = end
        return b"".join(shown)

    def _shown(self, kind: int, channel: int, payload: bytes) -> bytes:
        """Return the payload of a complete frame, with secrets masked."""
        if kind == HEARTBEAT:
            return payload
        if kind == METHOD:
            self._secret.discard(channel)
        if any(address in payload for address in _SECRET_ADDRESSES):
            self._secret.add(channel)
        if kind == HEADER:
            return _MASK * len(payload) if channel in self._secret else payload
        code = int.from_bytes(payload[:4], "big")
        if code == m.ConnectionStartOk.code:
            return _without_response(payload)
        if code in _SECRET:
            return payload[:8] + _MASK * (len(payload) - 8)
        return payload


def _without_response(payload: bytes) -> bytes:
    """Mask the response in ``connection.start-ok``, except the user name of PLAIN."""
    at = 8 + int.from_bytes(payload[4:8], "big")
    name_end = at + 1 + int.from_bytes(payload[at : at + 1], "big")
    mechanism = payload[at + 1 : name_end]
    begin = name_end + 4
    end = begin + int.from_bytes(payload[name_end:begin], "big")
    if end >= len(payload):
        # Malformed: show nothing but its length.
        return payload[:4] + _MASK * (len(payload) - 4)
    if mechanism == b"ANONYMOUS":
        return payload
    parts = payload[begin:end].split(b"\0", 2)
    if mechanism == b"PLAIN" and len(parts) == 3:
        begin = end - len(parts[2])
    return payload[:begin] + _MASK * (end - begin) + payload[end:]


class FrameNames:
    """Splits one direction into frames, with their names."""

    def __init__(self) -> None:
        self.held = b""

    def feed(self, data: bytes) -> list[TracedFrame]:
        """Return the frames that *data* completes."""
        held = self.held + data
        found: list[TracedFrame] = []
        at = 0
        while len(held) - at >= _HEAD:
            kind, channel = held[at], int.from_bytes(held[at + 1 : at + 3], "big")
            size = int.from_bytes(held[at + 3 : at + _HEAD], "big")
            if kind not in _TYPES or size > _DRAWN_MAX:
                # Protocol header, garbage, or masked octets.
                found.append(TracedFrame("octets", 0, len(held) - at, "no frame of 0-9-1"))
                at = len(held)
                break
            end = at + size + OVERHEAD
            if len(held) < end:
                break
            name = _TYPES[kind]
            if kind == METHOD:
                code = int.from_bytes(held[at + _HEAD : at + _HEAD + 4], "big")
                method = m.METHODS.get(code)
                name = f"method {code >> 16}.{code & 0xFFFF}" if method is None else method.name
            fault = "" if held[end - 1] == FRAME_END else "without an end octet"
            found.append(TracedFrame(name, channel, size, fault))
            at = end
        self.held = held[at:]
        return found
