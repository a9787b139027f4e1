"""Traces of 0-10 connections: passwords are masked, frames are named by their controls and commands."""

from __future__ import annotations

from typing import Final

from amqp_rt.fronts import TracedFrame

from .frames import BODY, COMMAND, CONTROL, FIRST_FRAME, FIRST_SEGMENT, HEADER, LAST_FRAME, OVERHEAD
from .layouts import COMMANDS, CONTROLS, ConnectionSecureOk, ConnectionStartOk, Operation

_MASK: Final = b"*"
#: Controls that hold secrets.
_SECRET: Final = frozenset((ConnectionStartOk.CODE, ConnectionSecureOk.CODE))
#: Addresses whose messages may contain a token, or a user with a password.
_SECRET_ADDRESSES: Final = (b"$cbs", b"$management")
_ONE_FRAME: Final = FIRST_FRAME | LAST_FRAME
_TYPES: Final = {CONTROL: "control", COMMAND: "command", HEADER: "header", BODY: "body"}
_NAMES: Final[dict[tuple[int, int], type[Operation]]] = {
    **{(CONTROL, code): control for code, control in CONTROLS.items()},
    **{(COMMAND, code): command for code, command in COMMANDS.items()},
}


def _is_frame(octets: bytes, at: int) -> bool:
    """Return whether a frame may begin at *at*, as far as its header has come."""
    head = octets[at : at + OVERHEAD]
    return (
        head[0] & 0xF0 == 0
        and (len(head) < 2 or head[1] in _TYPES)
        and (len(head) < 4 or head[2] << 8 | head[3] >= OVERHEAD)
    )


class ClientMask:
    """Mask for a client's octets: responses of logins and other secrets become asterisks.

    From the first octet that is no frame, all octets are masked: in a malformed login the position
    of the password is unknown.
    """

    def __init__(self) -> None:
        self._held = b""
        self._broken = False
        #: Whether a secret control is incomplete: the rest of it is secret, too.
        self._in_secret = False
        #: Channels whose current content is secret.
        self._secret: set[int] = set()

    def rest(self) -> bytes:
        """Return the masked rest of an incomplete frame."""
        return self._held[:OVERHEAD] + _MASK * (len(self._held) - OVERHEAD)

    def feed(self, data: bytes) -> bytes:
        """Mask *data*; return the octets for which the decision is known."""
        data, self._held = self._held + data, b""
        shown: list[bytes] = []
        at = 0
        while at < len(data):
            if self._broken or not _is_frame(data, at):
                self._broken = True
                shown.append(_MASK * (len(data) - at))
                break
            size = int.from_bytes(data[at + 2 : at + 4], "big")
            if len(data) - at < OVERHEAD or len(data) - at < size:
                # A frame has 65,535 octets at most.
                self._held = data[at:]
                break
            payload = data[at + OVERHEAD : at + size]
            channel = int.from_bytes(data[at + 6 : at + 8], "big")
            hidden = self._shown(data[at], data[at + 1], channel, payload)
            shown += (data[at : at + OVERHEAD], hidden)
            at += size
        return b"".join(shown)

    def _shown(self, flags: int, kind: int, channel: int, payload: bytes) -> bytes:
        """Return the payload of a frame with secrets masked."""
        begins = flags & (FIRST_SEGMENT | FIRST_FRAME) == FIRST_SEGMENT | FIRST_FRAME
        if kind == CONTROL:
            if begins:
                self._in_secret = int.from_bytes(payload[:2], "big") in _SECRET or len(payload) < 2
            if self._in_secret:
                # Class and code are no secret.
                keep = 2 if begins else 0
                return payload[:keep] + _MASK * (len(payload) - keep)
            return payload
        if kind == COMMAND and begins:
            self._secret.discard(channel)
        # An address may be cut in two where a header takes several frames.
        in_pieces = kind == HEADER and flags & _ONE_FRAME != _ONE_FRAME
        if kind != BODY and (in_pieces or any(each in payload for each in _SECRET_ADDRESSES)):
            self._secret.add(channel)
        if kind >= HEADER and channel in self._secret:
            return _MASK * len(payload)
        return payload


class FrameNames:
    """Splits one direction into frames, with their names."""

    def __init__(self) -> None:
        self.held = b""

    def feed(self, data: bytes) -> list[TracedFrame]:
        """Return the frames that *data* completes."""
        held = self.held + data
        found: list[TracedFrame] = []
        at = 0
        while at < len(held):
            if not _is_frame(held, at):
                # Protocol header, garbage, or masked octets.
                found.append(TracedFrame("octets", 0, len(held) - at, "no frame of 0-10"))
                at = len(held)
                break
            size = int.from_bytes(held[at + 2 : at + 4], "big")
            if len(held) - at < OVERHEAD or len(held) - at < size:
                break
            channel = int.from_bytes(held[at + 6 : at + 8], "big")
            name = _name(held[at], held[at + 1], held[at + OVERHEAD : at + size])
            found.append(TracedFrame(name, channel, size - OVERHEAD))
            at += size
        self.held = held[at:]
        return found


def _name(flags: int, kind: int, payload: bytes) -> str:
    """Return the name of a frame: that of its control or command, or its type."""
    if flags & FIRST_FRAME == 0 or kind >= HEADER or len(payload) < 2:
        return _TYPES[kind]
    known = _NAMES.get((kind, int.from_bytes(payload[:2], "big")))
    return f"{_TYPES[kind]} {payload[0]}.{payload[1]}" if known is None else known.NAME
